//! The report as text: all requirements, then the failures with their exchanges, then the reasons why requirements
//! could not be observed.

use std::fmt::Write;

use anstyle::{AnsiColor, Effects, Style};
use rap_protocol::visible;

use super::{
    Count, Exchange, Outcome, Profile, RedactedMessage, Report, RequirementResult, Strictness, Verdict,
    is_must,
};
use crate::requirements::Requirement;

const BOLD: Style = Style::new().effects(Effects::BOLD);
const DIM: Style = Style::new().effects(Effects::DIMMED);
const RED: Style = AnsiColor::Red.on_default();
const YELLOW: Style = AnsiColor::Yellow.on_default();
const GREEN: Style = AnsiColor::Green.on_default();

/// Width of the columns before a requirement's text.
const BEFORE_TEXT: usize = 36;

impl Report {
    /// Returns the report as text with ANSI escape codes. The caller has to strip them if the output is not a terminal.
    /// Rows of the table are truncated to `width` characters; `None` means no truncation.
    pub fn to_table(&self, strictness: Strictness, width: Option<usize>) -> String {
        let mut text = String::new();
        let out = &mut text;
        let profile = match self.profile {
            Profile::Spec => "",
            Profile::Rap => " --profile rap",
        };
        line(out, &format!("rap check {} {}{profile}\n", self.subject.name(), plain(&self.target)));
        line(out, &format!("{BOLD}{:<6}  {:<10}  {:<14}  REQUIREMENT{BOLD:#}", "ID", "LEVEL", "RESULT"));
        for (requirement, result) in self.requirement_results() {
            let (style, result) = style_and_label(requirement, &result, strictness);
            let Requirement { id, level, text, .. } = requirement;
            let text = cut(text, width.map(|width| width.saturating_sub(BEFORE_TEXT)));
            line(out, &format!("{id:<6}  {level:<10}  {style}{result:<14}{style:#}  {text}"));
        }
        self.failures(out, strictness);
        self.partial_results(out);
        self.unobserved(out);
        line(out, "");
        line(out, &self.summary(strictness));
        text
    }

    /// Returns one line with the number of requirements by result.
    pub fn summary(&self, strictness: Strictness) -> String {
        let Count { passed, partial, failed_must, failed_should, not_observable, failed_additions } =
            self.count();
        let additions = match self.profile {
            Profile::Spec => String::new(),
            Profile::Rap => format!(" {failed_additions} additions fail,"),
        };
        let (style, label) = if self.is_good(strictness) { (GREEN, "good") } else { (RED, "not good") };
        format!(
            "{style}{label}{style:#}: {passed} requirements pass, {partial} in part, {failed_must} MUST and \
             {failed_should} SHOULD fail,{additions} {not_observable} cannot be observed; {} probes in {:.1} s",
            self.outcomes.len(),
            self.took.as_secs_f64()
        )
    }

    fn failures(&self, out: &mut String, strictness: Strictness) {
        for Outcome { probe, verdict, .. } in &self.outcomes {
            let Verdict::Fail { what, exchanges, weight } = verdict else { continue };
            let unmet = probe.requirements.iter().filter_map(|id| crate::requirements::find(id));
            let breaks_must = unmet.clone().any(|requirement| is_must(requirement, *weight));
            let is_failure = strictness == Strictness::Strict || breaks_must;
            let (style, label) = if is_failure { (RED, "fail") } else { (YELLOW, "warning") };
            line(out, "");
            line(out, &format!("{style}{label}{style:#} {BOLD}{}{BOLD:#}: {}", probe.name, probe.checks));
            for requirement in unmet {
                line(out, &format!("  {} {}: {}", requirement.id, requirement.level, requirement.text));
            }
            if probe.is_addition() {
                line(
                    out,
                    "  no requirement: this project's interpretation of a point that the specification leaves open",
                );
            }
            line(out, &format!("  {style}{}{style:#}", plain(what)));
            for Exchange { request, answer } in exchanges {
                side(out, ">", request);
                side(out, "<", answer);
            }
        }
    }

    fn partial_results(&self, out: &mut String) {
        let mut head =
            Some(format!("\n{BOLD}Seen in part{BOLD:#}: neither contradicted nor shown completely"));
        for (requirement, result) in self.requirement_results() {
            let RequirementResult::Partial { unseen } = result else { continue };
            head.take().into_iter().for_each(|head| line(out, &head));
            let seen: Vec<&str> = self.seen(requirement.id).collect();
            line(
                out,
                &format!(
                    "  {:<6}  {:<10}  seen: {}",
                    requirement.id,
                    requirement.level,
                    plain(&seen.join(" "))
                ),
            );
            line(out, &format!("  {:<18}  {DIM}not seen: {}{DIM:#}", "", plain(unseen)));
        }
    }

    fn unobserved(&self, out: &mut String) {
        let unobserved = self.requirement_results().filter_map(|(requirement, result)| match result {
            RequirementResult::NotObservable { why } => Some((requirement, why)),
            _ => None,
        });
        let unobserved: Vec<_> = unobserved.collect();
        if !unobserved.is_empty() {
            line(out, &format!("\n{BOLD}Not observable{BOLD:#}: neither passed nor failed"));
        }
        for (requirement, why) in unobserved {
            line(
                out,
                &format!("  {:<6}  {:<10}  {DIM}{}{DIM:#}", requirement.id, requirement.level, plain(why)),
            );
        }
    }
}

fn style_and_label(
    requirement: &Requirement,
    result: &RequirementResult<'_>,
    strictness: Strictness,
) -> (Style, &'static str) {
    match result {
        RequirementResult::Pass => (GREEN, "pass"),
        RequirementResult::Partial { .. } => (GREEN, "partial"),
        RequirementResult::Fail(weight)
            if is_must(requirement, *weight) || strictness == Strictness::Strict =>
        {
            (RED, "fail")
        }
        RequirementResult::Fail(_) => (YELLOW, "warning"),
        RequirementResult::NotObservable { .. } => (DIM, "not observable"),
    }
}

fn side(out: &mut String, mark: &str, shown: &RedactedMessage) {
    let body = if shown.body.is_empty() { String::new() } else { format!(" {}", plain(&shown.body)) };
    line(out, &format!("    {mark} {}{body}", plain(&shown.head)));
}

/// Returns the text on one line, with its hidden characters made visible.
fn plain(text: &str) -> String {
    visible::text(text).replace(['\n', '\t'], " ")
}

fn cut(text: &str, width: Option<usize>) -> String {
    match width {
        Some(width) if text.chars().count() > width => {
            text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
        }
        _ => text.to_owned(),
    }
}

fn line(out: &mut String, text: &str) {
    writeln!(out, "{text}").expect("bug: writing to a string does not fail");
}
