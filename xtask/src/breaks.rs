//! `cargo xtask breaks`: mutation testing with a fixed list. Each entry of `xtask/breaks.toml` introduces a bug; at least
//! one test has to fail with it.
//!
//! The breaks are applied one at a time to a copy of the work tree, never to the work tree itself.

mod copy;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use std::{fmt, fs, io};

use serde::Deserialize;

use crate::root;
use copy::Copy;

/// Time after which the tests are stopped: a break may make a test run forever.
const TIME_LIMIT: Duration = Duration::from_secs(300);
/// Module prefix of the property tests.
const RANDOM: &str = "random::";
/// Maximum number of failed tests that are shown by name.
const SHOWN: usize = 2;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Breaks {
    r#break: Vec<Break>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Break {
    name: String,
    file: PathBuf,
    old: String,
    new: String,
    #[serde(default)]
    tests: Tests,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Tests {
    #[default]
    Rules,
    Runtime,
}

impl Tests {
    const ALL: [Tests; 2] = [Tests::Rules, Tests::Runtime];

    fn name(self) -> &'static str {
        match self {
            Tests::Rules => "rules",
            Tests::Runtime => "runtime",
        }
    }

    fn arguments(self) -> &'static [&'static str] {
        match self {
            Tests::Rules => &["--package", "rap-agent", "--lib", "--test", "rules"],
            Tests::Runtime => &["--package", "rap-runtime", "--lib"],
        }
    }
}

#[derive(Debug, PartialEq)]
enum Outcome {
    /// Names of the failed tests.
    Caught(Vec<String>),
    /// The test process failed without naming a failed test.
    Died,
    TimedOut,
    NotCaught,
    DoesNotApply,
    DoesNotCompile,
}

impl Outcome {
    fn is_caught(&self) -> bool {
        matches!(self, Outcome::Caught(_) | Outcome::Died | Outcome::TimedOut)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Caught(failed) => {
                let shown = failed.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
                let more = if failed.len() > SHOWN { ", …" } else { "" };
                write!(f, "{} failed: {shown}{more}", failed.len())
            }
            Outcome::Died => write!(f, "the test process failed without a result"),
            Outcome::TimedOut => write!(f, "the tests did not end within {} s", TIME_LIMIT.as_secs()),
            Outcome::NotCaught => write!(f, "NOT CAUGHT"),
            Outcome::DoesNotApply => write!(f, "DOES NOT APPLY"),
            Outcome::DoesNotCompile => write!(f, "DOES NOT COMPILE"),
        }
    }
}

pub(crate) fn run(filter: &str) -> ExitCode {
    match try_all(filter) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: the breaks could not be tried: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Tries every break that the filter selects. Returns whether all were caught.
fn try_all(filter: &str) -> io::Result<bool> {
    let breaks = selected(&fs::read_to_string(root().join("xtask/breaks.toml"))?, filter)?;
    let copy = Copy::of_work_tree()?;
    for tests in Tests::ALL.into_iter().filter(|tests| breaks.iter().any(|one| one.tests == *tests)) {
        match copy.test(tests)? {
            Outcome::NotCaught => {}
            failed => return Err(io::Error::other(format!("{} without a break: {failed}", tests.name()))),
        }
    }
    let mut outcomes = Vec::new();
    for one in &breaks {
        let outcome = copy.try_break(one)?;
        println!("{}: {outcome}", one.name);
        outcomes.push((one, outcome));
    }
    println!("{}", summary(&outcomes));
    Ok(!outcomes.is_empty() && outcomes.iter().all(|(_, outcome)| outcome.is_caught()))
}

/// Counts the caught breaks of each kind of tests, and names those that were not caught.
fn summary(outcomes: &[(&Break, Outcome)]) -> String {
    let mut lines = Vec::new();
    for tests in Tests::ALL {
        let of_kind = || outcomes.iter().filter(|(one, _)| one.tests == tests);
        let caught = of_kind().filter(|(_, outcome)| outcome.is_caught()).count();
        match of_kind().count() {
            0 => {}
            count => lines.push(format!("{}: {caught} of {count} caught", tests.name())),
        }
    }
    let missed = outcomes.iter().filter(|(_, outcome)| !outcome.is_caught());
    lines.extend(missed.map(|(one, outcome)| format!("{}: {outcome}", one.name)));
    lines.join("\n")
}

fn selected(toml: &str, filter: &str) -> io::Result<Vec<Break>> {
    let Breaks { r#break: mut breaks } = toml::from_str(toml).map_err(io::Error::other)?;
    breaks.retain(|one| one.name.contains(filter) || one.tests.name().contains(filter));
    Ok(breaks)
}

/// Applies a break to the text of a file. `None` if the old text does not occur exactly once.
fn broken(text: &str, one: &Break) -> Option<String> {
    (text.matches(&one.old).count() == 1).then(|| text.replacen(&one.old, &one.new, 1))
}

fn failed_tests(output: &str) -> Vec<String> {
    let name = |line: &str| Some(line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?.to_owned());
    let mut failed: Vec<String> = output.lines().filter_map(name).collect();
    // Property tests come last: the name of a table test says more.
    failed.sort_by_cached_key(|name| (name.starts_with(RANDOM), name.clone()));
    failed
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "
        [[break]]
        name = 'An hour never ends'
        file = 'a.rs'
        old = 'one'
        new = 'two'

        [[break]]
        name = 'Nothing is written'
        file = 'b.rs'
        old = 'x'
        new = ''
        tests = 'runtime'
    ";

    #[test]
    fn a_filter_selects_by_name_and_by_kind_of_tests() {
        for (filter, expected) in [
            ("", vec!["a.rs", "b.rs"]),
            ("hour", vec!["a.rs"]),
            ("rules", vec!["a.rs"]),
            ("runtime", vec!["b.rs"]),
            ("nothing of the kind", vec![]),
        ] {
            let found = selected(TWO, filter).unwrap();
            assert_eq!(found.iter().map(|one| one.file.to_str().unwrap()).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn a_misspelt_key_is_an_error() {
        assert!(selected(&TWO.replace("tests", "test"), "").is_err());
    }

    #[test]
    fn a_break_applies_only_where_its_text_occurs_once() {
        let one = &selected(TWO, "hour").unwrap()[0];
        assert_eq!(broken("a one b", one).as_deref(), Some("a two b"));
        assert_eq!(broken("one one", one), None);
        assert_eq!(broken("none of it", one).as_deref(), Some("ntwo of it"));
        assert_eq!(broken("", one), None);
    }

    #[test]
    fn failed_tests_are_found_by_name() {
        let output = "\
running 4 tests
test b::a_test ... FAILED
test c::another ... ok
test a::a_test - should panic ... FAILED
test random::inputs ... FAILED

failures:

---- b::a_test stdout ----
test result: FAILED. 1 passed; 2 failed
";
        assert_eq!(failed_tests(output), ["a::a_test - should panic", "b::a_test", "random::inputs"]);
    }

    #[test]
    fn other_outcomes_do_not_count_as_caught() {
        let two = ["a", "b", "c"].map(String::from).to_vec();
        assert_eq!(Outcome::Caught(two).to_string(), "3 failed: a, b, …");
        for outcome in [Outcome::NotCaught, Outcome::DoesNotApply, Outcome::DoesNotCompile] {
            assert!(!outcome.is_caught(), "{outcome}");
        }
    }

    #[test]
    fn the_summary_counts_by_kind_of_tests_and_names_what_was_not_caught() {
        let two = selected(TWO, "").unwrap();
        assert_eq!(summary(&[(&two[0], Outcome::Died)]), "rules: 1 of 1 caught");
        let outcomes = [(&two[0], Outcome::TimedOut), (&two[1], Outcome::NotCaught)];
        let expected = "rules: 1 of 1 caught\nruntime: 0 of 1 caught\nNothing is written: NOT CAUGHT";
        assert_eq!(summary(&outcomes), expected);
    }

    /// The list is valid, and names are unique.
    #[test]
    fn every_break_of_the_list_applies() {
        let breaks = selected(&fs::read_to_string(root().join("xtask/breaks.toml")).unwrap(), "").unwrap();
        let mut names: Vec<&str> = breaks.iter().map(|one| one.name.as_str()).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
        for one in &breaks {
            let text = fs::read_to_string(root().join(&one.file)).unwrap();
            assert!(broken(&text, one).is_some(), "{} does not apply", one.name);
        }
    }
}
