//! Counts passed and failed tests in the output of the test runners.
//!
//! Pure functions on text. Skipped and ignored tests count as neither passed nor failed.

use std::fmt;
use std::ops::Add;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
}

/// Exit status of a runner.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Success,
    Failure,
}

impl Tally {
    /// Returns the tally of a runner from its report and its exit status. A runner that reports nothing, or that fails
    /// without a failed test, counts as one failure.
    pub(crate) fn judged(reported: Option<Self>, end: End) -> Self {
        match (reported, end) {
            (None, _) => Self { passed: 0, failed: 1 },
            (Some(tally), End::Failure) if tally.failed == 0 => Self { failed: 1, ..tally },
            (Some(tally), _) => tally,
        }
    }

    /// Adds up items such as `12 passed`, `1 exec failed`, `3 skipped`.
    fn of_items<'a>(items: impl Iterator<Item = &'a str>) -> Self {
        items.filter_map(|item| item.trim().split_once(' ')).fold(Self::default(), Self::with_item)
    }

    fn with_item(self, (count, what): (&str, &str)) -> Self {
        let count = count.parse().unwrap_or(0);
        match what {
            "passed" => Self { passed: self.passed + count, ..self },
            "failed" | "exec failed" | "timed out" => Self { failed: self.failed + count, ..self },
            _ => self,
        }
    }
}

impl Add for Tally {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { passed: self.passed + other.passed, failed: self.failed + other.failed }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

/// Test runner whose report is read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reporter {
    /// One summary of the whole run, on stderr.
    Nextest,
    /// One result for each test binary, on stdout.
    Libtest,
    /// One summary of all attempts, on stdout.
    Attack,
}

impl Reporter {
    /// Returns the total after one more line of output; `None` until something was reported.
    pub(crate) fn add(self, total: Option<Tally>, line: &str) -> Option<Tally> {
        match self {
            // The output of a failed test may contain a summary too; that of nextest itself comes after it.
            Self::Nextest => nextest_summary(line).or(total),
            Self::Libtest => match libtest_result(line) {
                Some(tally) => Some(total.unwrap_or_default() + tally),
                None => total,
            },
            Self::Attack => attack_summary(line).or(total),
        }
    }
}

fn nextest_summary(line: &str) -> Option<Tally> {
    let summary = line.trim_start().strip_prefix("Summary [")?;
    let (_, items) = summary.split_once(" run: ")?;
    Some(Tally::of_items(without_parentheses(items).split(',')))
}

fn libtest_result(line: &str) -> Option<Tally> {
    let result = line.strip_prefix("test result: ")?;
    let (_, items) = result.split_once(". ")?;
    Some(Tally::of_items(items.split(';')))
}

/// `60 attempts, 0 successes`. An attempt that succeeded is a failed test.
fn attack_summary(line: &str) -> Option<Tally> {
    let (attempts, successes) = line.trim_end().strip_suffix(" successes")?.split_once(" attempts, ")?;
    let (attempts, failed): (u64, u64) = (attempts.parse().ok()?, successes.parse().ok()?);
    Some(Tally { passed: attempts.saturating_sub(failed), failed })
}

/// `121 passed (2 slow, 1 leaky), 2 failed` becomes `121 passed, 2 failed`.
fn without_parentheses(text: &str) -> String {
    let mut pieces = text.split('(');
    let first = pieces.next().unwrap_or_default().trim_end().to_owned();
    pieces.fold(first, |kept, piece| {
        let (_, after) = piece.split_once(')').unwrap_or_default();
        kept + after.trim_end()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(passed: u64, failed: u64) -> Option<Tally> {
        Some(Tally { passed, failed })
    }

    #[test]
    fn all_forms_of_the_nextest_summary_are_parsed() {
        for (line, expected) in [
            ("     Summary [   0.024s] 19 tests run: 19 passed, 0 skipped\n", tally(19, 0)),
            ("     Summary [   0.001s] 1 test run: 1 passed, 0 skipped\n", tally(1, 0)),
            ("     Summary [   0.000s] 0 tests run: 0 passed, 0 skipped\n", tally(0, 0)),
            (
                "     Summary [   1.234s] 123 tests run: 121 passed (2 slow), 2 failed, 3 skipped\n",
                tally(121, 2),
            ),
            (
                "     Summary [   9.034s] 7 tests run: 3 passed (1 slow, 1 flaky, 1 leaky), \
                 2 failed (1 due to being leaky), 1 exec failed, 1 timed out, 4 skipped\n",
                tally(3, 4),
            ),
            ("     Summary [   0.300s] 3/10 tests run: 2 passed, 1 failed, 0 skipped\n", tally(2, 1)),
            ("     Summary [   0.300s] 1 test run: 0 passed, 1 timed out, 0 skipped\n", tally(0, 1)),
            ("        PASS [   0.005s] rap-protocol id::tests::an_id_is_short\n", None),
            ("    Starting 14 tests across 3 binaries (177 tests skipped)\n", None),
            ("", None),
        ] {
            assert_eq!(nextest_summary(line), expected, "{line}");
        }
    }

    #[test]
    fn all_forms_of_the_libtest_result_are_parsed() {
        for (line, expected) in [
            (
                "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s\n",
                tally(12, 0),
            ),
            (
                "test result: FAILED. 3 passed; 2 failed; 1 ignored; 0 measured; 9 filtered out; \
                 finished in 1.52s\n",
                tally(3, 2),
            ),
            ("test tally::tests::one ... ok\n", None),
            ("running 12 tests\n", None),
            ("    test result: ok. 1 passed; 0 failed; 0 ignored\n", None),
        ] {
            assert_eq!(libtest_result(line), expected, "{line}");
        }
    }

    #[test]
    fn an_attempt_that_succeeded_counts_as_a_failed_test() {
        for (line, expected) in [
            ("60 attempts, 0 successes\n", tally(60, 0)),
            ("60 attempts, 2 successes\n", tally(58, 2)),
            ("   2.1 s  forged callback token: 309 tries, 0 successes\n", None),
            ("12 attempts are pending\n", None),
        ] {
            assert_eq!(attack_summary(line), expected, "{line}");
        }
    }

    #[test]
    fn results_of_several_test_binaries_add_up() {
        let lines =
            ["test result: ok. 2 passed; 0 failed", "noise", "test result: FAILED. 1 passed; 3 failed"];
        let total = lines.into_iter().fold(None, |total, line| Reporter::Libtest.add(total, line));
        assert_eq!(total, tally(3, 3));
    }

    #[test]
    fn the_last_of_several_summaries_counts() {
        let lines =
            ["Summary [ 1s] 9 tests run: 9 passed", "Summary [ 2s] 2 tests run: 1 passed, 1 failed", "x"];
        let total = lines.into_iter().fold(None, |total, line| Reporter::Nextest.add(total, line));
        assert_eq!(total, tally(1, 1));
    }

    #[test]
    fn a_failed_run_without_a_failed_test_counts_as_one_failure() {
        assert_eq!(Some(Tally::judged(tally(5, 0), End::Success)), tally(5, 0));
        assert_eq!(Some(Tally::judged(tally(5, 2), End::Failure)), tally(5, 2));
        assert_eq!(Some(Tally::judged(tally(5, 0), End::Failure)), tally(5, 1));
        assert_eq!(Some(Tally::judged(None, End::Failure)), tally(0, 1));
    }

    #[test]
    fn a_run_without_a_report_counts_as_one_failure() {
        assert_eq!(Some(Tally::judged(None, End::Success)), tally(0, 1));
    }

    #[test]
    fn a_tally_is_formatted() {
        assert_eq!(Tally { passed: 1, failed: 0 }.to_string(), "1 passed, 0 failed");
    }
}
