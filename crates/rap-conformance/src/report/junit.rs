//! The report as JUnit XML for CI servers: one test case for each requirement.
//!
//! JUnit has no warnings. Unless the run is strict, an unmet SHOULD is a skipped test case with a message.

use std::fmt::Write;

use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};

use super::{Report, RequirementResult, Strictness, Verdict};
use crate::requirements::Requirement;

impl Report {
    /// Returns the report as JUnit XML.
    pub fn to_junit(&self, strictness: Strictness) -> String {
        let name = format!("rap check {} {}", self.subject.name(), self.target);
        let mut suite = TestSuite::new(&name);
        suite.set_time(self.took);
        for (requirement, result) in self.requirement_results() {
            suite.add_test_case(self.test_case(requirement, &result, strictness));
        }
        let mut report = quick_junit::Report::new(name);
        report.set_time(self.took);
        report.add_test_suite(suite);
        report.to_string().expect("bug: writing to a string does not fail")
    }

    fn test_case(
        &self,
        requirement: &Requirement,
        result: &RequirementResult<'_>,
        strictness: Strictness,
    ) -> TestCase {
        let Requirement { id, level, text, .. } = requirement;
        let status = match result {
            RequirementResult::Pass => TestCaseStatus::success(),
            RequirementResult::Fail if level.is_must() || strictness == Strictness::Strict => {
                let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
                status.set_message(format!("{level} {id} is not met")).set_description(self.failure_text(id));
                status
            }
            RequirementResult::Fail => {
                let what = self.what_failed(id).join("; ");
                skipped(format!("warning: {level} {id} is not met: {what}"))
            }
            RequirementResult::NotObservable { why } => skipped(format!("not observable: {why}")),
        };
        let mut case = TestCase::new(format!("{id} {text}"), status);
        case.set_classname(format!("rap.{}.{}", self.subject.name(), level.to_string().replace(' ', "_")));
        case
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
        let mut line = |line| writeln!(text, "{line}").expect("bug: writing to a string does not fail");
        for outcome in self.outcomes_for(id) {
            if let Verdict::Fail { what, exchanges } = &outcome.verdict {
                line(format!("{}: {what}", outcome.probe.name));
                for exchange in exchanges {
                    for (mark, side) in [(">", &exchange.request), ("<", &exchange.answer)] {
                        line(format!("{mark} {} {}", side.head, side.body));
                    }
                }
            }
        }
        text
    }
}

fn skipped(message: String) -> TestCaseStatus {
    let mut status = TestCaseStatus::skipped();
    status.set_message(message);
    status
}
