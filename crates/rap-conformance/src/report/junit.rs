//! The report as JUnit XML for CI servers: one test case for each requirement.
//!
//! JUnit has no warnings. Unless the run is strict, an unmet SHOULD is a skipped test case with a message.

use std::fmt::Write;

use super::{Count, Report, RequirementResult, Strictness, Verdict};
use crate::requirements::Requirement;

impl Report {
    /// Returns the report as JUnit XML.
    pub fn to_junit(&self, strictness: Strictness) -> String {
        let Count { passed, failed_must, failed_should, not_observable } = self.count();
        let (failures, warnings) = match strictness {
            Strictness::Strict => (failed_must + failed_should, 0),
            Strictness::Lenient => (failed_must, failed_should),
        };
        let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
        let counts = format!(
            "tests=\"{}\" failures=\"{failures}\" errors=\"0\" skipped=\"{}\" time=\"{:.3}\"",
            passed + failed_must + failed_should + not_observable,
            warnings + not_observable,
            self.took.as_secs_f64()
        );
        let name = format!("rap check {} {}", self.subject.name(), escape(&self.target));
        line(&mut xml, &format!("<testsuites {counts}>\n<testsuite name=\"{name}\" {counts}>"));
        for (requirement, result) in self.requirement_results() {
            self.case(&mut xml, requirement, &result, strictness);
        }
        line(&mut xml, "</testsuite>\n</testsuites>");
        xml
    }

    fn case(
        &self,
        xml: &mut String,
        requirement: &Requirement,
        result: &RequirementResult<'_>,
        strictness: Strictness,
    ) {
        let Requirement { id, level, text, .. } = requirement;
        let class = format!("rap.{}.{}", self.subject.name(), level.to_string().replace(' ', "_"));
        line(xml, &format!("<testcase classname=\"{class}\" name=\"{id} {}\">", escape(text)));
        match result {
            RequirementResult::Pass => {}
            RequirementResult::Fail if level.is_must() || strictness == Strictness::Strict => {
                let text = escape(&self.failure_text(id));
                line(xml, &format!("<failure message=\"{level} {id} is not met\">{text}</failure>"));
            }
            RequirementResult::Fail => {
                let what = escape(&self.what_failed(id).join("; "));
                line(xml, &format!("<skipped message=\"warning: {level} {id} is not met: {what}\"/>"));
            }
            RequirementResult::NotObservable { why } => {
                line(xml, &format!("<skipped message=\"not observable: {}\"/>", escape(why)));
            }
        }
        line(xml, "</testcase>");
    }

    fn what_failed(&self, id: &str) -> Vec<&str> {
        let failed = self.outcomes_for(id).filter_map(|outcome| match &outcome.verdict {
            Verdict::Fail { what, .. } => Some(what.as_str()),
            _ => None,
        });
        failed.collect()
    }

    fn failure_text(&self, id: &str) -> String {
        let mut text = String::new();
        for outcome in self.outcomes_for(id) {
            if let Verdict::Fail { what, exchanges } = &outcome.verdict {
                line(&mut text, &format!("{}: {what}", outcome.probe.name));
                for exchange in exchanges {
                    for (mark, side) in [(">", &exchange.request), ("<", &exchange.answer)] {
                        line(&mut text, &format!("{mark} {} {}", side.head, side.body));
                    }
                }
            }
        }
        text
    }
}

fn line(text: &mut String, more: &str) {
    writeln!(text, "{more}").expect("bug: writing to a string does not fail");
}

/// Escapes a text for XML. Characters that XML does not permit are replaced by U+FFFD.
fn escape(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\n' | '\t' => out.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
