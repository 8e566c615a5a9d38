//! The report as JUnit XML for CI servers: one test case for each requirement.
//!
//! JUnit has no warnings and no partial results. Unless the run is strict, an unmet SHOULD is a skipped test case with
//! a message.

use std::fmt::Write;

use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};

use super::{Outcome, Report, RequirementResult, Strictness, Verdict, is_must};
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
        for outcome in self.outcomes.iter().filter(|outcome| outcome.probe.is_addition()) {
            suite.add_test_case(self.addition(outcome, strictness));
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
            RequirementResult::Pass | RequirementResult::Partial { .. } => TestCaseStatus::success(),
            RequirementResult::Fail(weight)
                if is_must(requirement, *weight) || strictness == Strictness::Strict =>
            {
                let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
                status.set_message(format!("{level} {id} is not met")).set_description(self.failure_text(id));
                status
            }
            RequirementResult::Fail(_) => {
                let what = self.what_failed(id).join("; ");
                skipped(format!("warning: {level} {id} is not met: {what}"))
            }
            RequirementResult::NotObservable { why } => skipped(format!("not observable: {why}")),
        };
        let mut case = TestCase::new(format!("{id} {text}"), status);
        if let RequirementResult::Partial { unseen } = result {
            let seen: Vec<&str> = self.seen(id).collect();
            case.set_system_out(format!("seen: {}\nnot seen: {unseen}", seen.join(" ")));
        }
        case.set_classname(format!("rap.{}.{}", self.subject.name(), level.to_string().replace(' ', "_")));
        case
    }

    /// Test case of a probe without a requirement.
    fn addition(&self, outcome: &Outcome, strictness: Strictness) -> TestCase {
        let status = match &outcome.verdict {
            Verdict::Pass { .. } => TestCaseStatus::success(),
            Verdict::Fail { what, .. } if strictness == Strictness::Strict => {
                let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
                status.set_message(what.as_str());
                status
            }
            Verdict::Fail { what, .. } => skipped(format!("warning: {what}")),
            Verdict::NotObservable { why } => skipped(format!("not observable: {why}")),
        };
        let mut case = TestCase::new(format!("{} {}", outcome.probe.name, outcome.probe.checks), status);
        case.set_classname(format!("rap.{}.addition", self.subject.name()));
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
            if let Verdict::Fail { what, exchanges, .. } = &outcome.verdict {
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
