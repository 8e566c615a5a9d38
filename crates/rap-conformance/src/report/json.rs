//! The report as JSON.

use serde_json::{Value, json};

use super::{Outcome, Report, RequirementResult, Strictness, Verdict};

impl Report {
    /// Returns the report as one JSON object.
    pub fn to_json(&self, strictness: Strictness) -> Value {
        let requirements: Vec<Value> = self
            .requirement_results()
            .map(|(requirement, result)| {
                let probes: Vec<&str> =
                    self.outcomes_for(requirement.id).map(|outcome| outcome.probe.name).collect();
                let (result, why) = match result {
                    RequirementResult::Pass => ("pass", None),
                    RequirementResult::Fail => ("fail", None),
                    RequirementResult::NotObservable { why } => ("not_observable", Some(why)),
                };
                let mut row = json!({
                    "id": requirement.id, "level": requirement.level, "who": requirement.who,
                    "text": requirement.text, "result": result, "probes": probes,
                });
                if let Some(why) = why {
                    row["why"] = why.into();
                }
                row
            })
            .collect();
        json!({
            "subject": self.subject,
            "target": self.target,
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
        Verdict::Pass => row["result"] = "pass".into(),
        Verdict::Fail { what, exchanges } => {
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
