//! How many tests passed and failed, read from what the test runners print.
//!
//! Pure text in, numbers out. Skipped and ignored tests are neither passed nor failed.

use std::fmt;
use std::ops::Add;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
}

/// Whether a runner's exit code said success.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Good,
    Bad,
}

impl Tally {
    /// What counts for a runner that reported this and came to this end.
    pub(crate) fn judged(reported: Option<Self>, end: End) -> Self {
        match (reported, end) {
            (None, _) => Self { passed: 0, failed: 1 },
            (Some(tally), End::Bad) if tally.failed == 0 => Self { failed: 1, ..tally },
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

/// Who prints the report, and so what it looks like.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reporter {
    /// One summary of the whole run, on stderr.
    Nextest,
    /// One result for each test binary, on stdout.
    Libtest,
}

impl Reporter {
    /// The total after one more line of output; none until something was reported.
    pub(crate) fn add(self, total: Option<Tally>, line: &str) -> Option<Tally> {
        match self {
            // The shown output of a failed test may hold a summary too; nextest's own comes after it.
            Self::Nextest => nextest_summary(line).or(total),
            Self::Libtest => match libtest_result(line) {
                Some(tally) => Some(total.unwrap_or_default() + tally),
                None => total,
            },
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
    fn a_summary_of_nextest_is_counted_in_all_its_forms() {
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
    fn a_result_of_libtest_is_counted_in_all_its_forms() {
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
    fn results_of_several_test_binaries_add_up() {
        let lines =
            ["test result: ok. 2 passed; 0 failed", "noise", "test result: FAILED. 1 passed; 3 failed"];
        let total = lines.into_iter().fold(None, |total, line| Reporter::Libtest.add(total, line));
        assert_eq!(total, tally(3, 3));
    }

    #[test]
    fn of_several_summaries_the_last_one_counts() {
        let lines =
            ["Summary [ 1s] 9 tests run: 9 passed", "Summary [ 2s] 2 tests run: 1 passed, 1 failed", "x"];
        let total = lines.into_iter().fold(None, |total, line| Reporter::Nextest.add(total, line));
        assert_eq!(total, tally(1, 1));
    }

    #[test]
    fn a_bad_end_without_a_failed_test_counts_as_one_failure() {
        assert_eq!(Some(Tally::judged(tally(5, 0), End::Good)), tally(5, 0));
        assert_eq!(Some(Tally::judged(tally(5, 2), End::Bad)), tally(5, 2));
        assert_eq!(Some(Tally::judged(tally(5, 0), End::Bad)), tally(5, 1));
        assert_eq!(Some(Tally::judged(None, End::Bad)), tally(0, 1));
    }

    #[test]
    fn silence_is_a_failure_even_when_it_ended_well() {
        assert_eq!(Some(Tally::judged(None, End::Good)), tally(0, 1));
    }

    #[test]
    fn the_closing_line_has_one_form() {
        assert_eq!(Tally { passed: 1, failed: 0 }.to_string(), "1 passed, 0 failed");
    }
}
