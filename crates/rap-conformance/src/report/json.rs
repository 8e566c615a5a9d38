//! The report as JSON.

use serde_json::{Value, json};

use super::{Outcome, Report, RequirementResult, Strictness, Verdict, is_must};

impl Report {
    /// Returns the report as one JSON object.
    pub fn to_json(&self, strictness: Strictness) -> Value {
        let requirements: Vec<Value> = self
            .requirement_results()
            .map(|(requirement, result)| {
                let probes: Vec<&str> =
                    self.outcomes_for(requirement.id).map(|outcome| outcome.probe.name).collect();
                let mut row = json!({
                    "id": requirement.id, "level": requirement.level, "who": requirement.who,
                    "text": requirement.text, "probes": probes,
                    "seen": self.seen(requirement.id).collect::<Vec<_>>(),
                });
                row["result"] = match result {
                    RequirementResult::Pass => "pass",
                    RequirementResult::Partial { unseen } => {
                        row["unseen"] = unseen.into();
                        "partial"
                    }
                    RequirementResult::Fail(weight) => {
                        row["counts_as"] =
                            if is_must(requirement, weight) { "must" } else { "should" }.into();
                        "fail"
                    }
                    RequirementResult::NotObservable { why } => {
                        row["why"] = why.into();
                        "not_observable"
                    }
                }
                .into();
                row
            })
            .collect();
        json!({
            "subject": self.subject,
            "target": self.target,
            "profile": self.profile,
            "good": self.is_good(strictness),
            "strict": strictness == Strictness::Strict,
            "count": self.count(),
            "seconds": self.took.as_secs_f64(),
            "requirements": requirements,
            "probes": self.outcomes.iter().map(probe).collect::<Vec<_>>(),
        })
    }
}

fn probe(Outcome { probe, verdict, took }: &Outcome) -> Value {
    let mut row = json!({
        "name": probe.name, "checks": probe.checks, "requirements": probe.requirements,
        "seconds": took.as_secs_f64(),
    });
    match verdict {
        Verdict::Pass { seen } => {
            row["result"] = "pass".into();
            row["seen"] = seen.as_deref().unwrap_or(probe.checks).into();
        }
        Verdict::Fail { what, exchanges, .. } => {
            row["result"] = "fail".into();
            row["what"] = what.as_str().into();
            row["exchanges"] = json!(exchanges);
        }
        Verdict::NotObservable { why } => {
            row["result"] = "not_observable".into();
            row["why"] = why.as_str().into();
        }
    }
    row
}
