//! An in-process fuzzer: it mutates inputs of a seed corpus and gives them to a function, which panics if something does
//! not hold. An input with a new outcome joins the corpus. The same seed gives the same inputs.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `RAP_FUZZ_RUNS` | number of executions | 2,000 |
//! | `RAP_FUZZ_SECONDS` | time after which it ends earlier | none |
//! | `RAP_FUZZ_SEED` | seed of the mutations | 1 |
//! | `RAP_FUZZ_INPUT` | file with the only input, to repeat a failure | none |

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use crate::Rng;

/// Default number of executions: seconds without optimisation.
const RUNS: u64 = 2_000;
/// Maximum number of inputs in the corpus.
const CORPUS: usize = 4_096;
/// Maximum length of an input, in bytes.
const INPUT_BYTES: usize = 16 * 1024;
/// Maximum number of mutations that turn an input into the next one.
const MUTATIONS: usize = 4;
/// Number of executions between two checks of the time.
const RUNS_PER_CHECK: u64 = 256;
/// Time between two lines about the progress.
const PROGRESS: Duration = Duration::from_secs(10);

const NUMBERS: [&str; 12] = [
    "0",
    "-1",
    "1",
    "255",
    "65536",
    "2147483648",
    "9007199254740993",
    "-9223372036854775808",
    "18446744073709551616",
    "1e308",
    "1e-400",
    "0.1",
];
const TEXTS: [&str; 10] =
    ["", " ", "\0", "\u{feff}", "\u{202e}", "é", "😀", "\r\n", "\\u0000", "../../etc/passwd"];

/// One target: a name, a seed corpus, and words of its format.
pub struct Fuzz {
    pub name: &'static str,
    pub seeds: Vec<Vec<u8>>,
    pub words: &'static [&'static str],
}

impl Fuzz {
    /// Runs the target. It returns the outcome of an input, such as the text of an error, and panics if the input shows
    /// a mistake. Prints the number of executions to stderr while it runs and at the end.
    pub fn run(self, target: impl Fn(&[u8]) -> String) {
        let execute = |input: &[u8]| self.execute(&target, input);
        if let Some(path) = std::env::var_os("RAP_FUZZ_INPUT") {
            execute(&std::fs::read(path).unwrap());
            return;
        }
        let until = variable("RAP_FUZZ_SECONDS").map(|seconds| Instant::now() + Duration::from_secs(seconds));
        let (runs, began) = (variable("RAP_FUZZ_RUNS").unwrap_or(RUNS), Instant::now());
        let mut rng = Rng(variable("RAP_FUZZ_SEED").unwrap_or(1));
        let mut corpus = self.seeds.clone();
        let mut outcomes: HashSet<String> = corpus.iter().map(|seed| kind(&execute(seed))).collect();
        let (mut done, mut next_line) = (0, began + PROGRESS);
        while done < runs {
            if done % RUNS_PER_CHECK == 0 {
                let now = Instant::now();
                if until.is_some_and(|until| now > until) {
                    break;
                }
                if now > next_line {
                    eprintln!("fuzz {}: {done} of {runs} after {:.0?}", self.name, now - began);
                    next_line = now + PROGRESS;
                }
            }
            let input = self.next_input(&mut rng, &corpus);
            done += 1;
            if outcomes.insert(kind(&execute(&input))) && corpus.len() < CORPUS {
                corpus.push(input);
            }
        }
        let seconds = began.elapsed().as_secs_f64();
        // `cargo xtask fuzz` reads this line.
        eprintln!(
            "fuzz {}: {done} executions in {seconds:.1} s, {:.0} per second, {} inputs in the corpus",
            self.name,
            done as f64 / seconds,
            corpus.len()
        );
    }

    fn next_input(&self, rng: &mut Rng, corpus: &[Vec<u8>]) -> Vec<u8> {
        let (mut input, other) = (rng.pick(corpus).clone(), rng.pick(corpus));
        let mut mutator = Mutator { rng, other, words: self.words };
        for _ in 0..=mutator.rng.below(MUTATIONS) {
            let structured = mutator.rng.below(3) > 0;
            input = match structured.then(|| mutator.json(&input)).flatten() {
                Some(mutated) => mutated,
                None => mutator.bytes(input),
            };
            input.truncate(INPUT_BYTES);
        }
        input
    }

    fn execute(&self, target: &impl Fn(&[u8]) -> String, input: &[u8]) -> String {
        match catch_unwind(AssertUnwindSafe(|| target(input))) {
            Ok(outcome) => outcome,
            Err(panic) => {
                let path: PathBuf = std::env::temp_dir().join(format!("rap-fuzz-{}", self.name));
                std::fs::write(&path, input).unwrap();
                eprintln!("fuzz {}: this input failed, saved as {}:", self.name, path.display());
                eprintln!("{}", input.escape_ascii());
                resume_unwind(panic)
            }
        }
    }
}

fn variable(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.replace('_', "").parse().unwrap_or_else(|_| panic!("{name} is not a number: {value}")))
}

/// Returns the kind of an outcome: its text without numbers, parts of the input and the values that an error has found.
fn kind(outcome: &str) -> String {
    let without_found = |part: &str| part.split(", found ").next().unwrap_or_default().to_owned();
    let outcome: String = outcome.split([';', '\n']).map(without_found).collect();
    let mut quoted = false;
    let mut keep = |c: char| {
        quoted ^= matches!(c, '"' | '`');
        !quoted && !c.is_ascii_digit()
    };
    outcome.chars().filter(|c| keep(*c)).take(120).collect()
}

struct Mutator<'a> {
    rng: &'a mut Rng,
    /// Another input of the corpus.
    other: &'a [u8],
    words: &'a [&'a str],
}

impl Mutator<'_> {
    fn word(&mut self) -> String {
        match self.rng.below(8) {
            0 => (*self.rng.pick(&NUMBERS)).to_owned(),
            1 => (*self.rng.pick(&TEXTS)).to_owned(),
            2 => self.rng.pick(&TEXTS).repeat(1 << self.rng.below(10)),
            _ => (*self.rng.pick(self.words)).to_owned(),
        }
    }

    fn range(&mut self, length: usize) -> std::ops::Range<usize> {
        let start = self.rng.below(length + 1);
        let longest = (length - start).min(1 << self.rng.below(8));
        start..start + self.rng.below(longest + 1)
    }

    fn bytes(&mut self, mut input: Vec<u8>) -> Vec<u8> {
        let at = self.rng.below(input.len() + 1);
        match self.rng.below(8) {
            0 if at < input.len() => input[at] ^= 1 << self.rng.below(8),
            1 if at < input.len() => input[at] = self.rng.number() as u8,
            2 => {
                let range = self.range(input.len());
                input.drain(range);
            }
            3 => {
                let range = self.range(input.len());
                let copy = input[range].to_vec();
                input.splice(at..at, copy);
            }
            4 => {
                let from = self.rng.below(self.other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&self.other[from..]);
            }
            5 => {
                let range = self.range(self.other.len());
                input.splice(at..at, self.other[range].iter().copied());
            }
            _ => {
                let (range, word) = (self.range(input.len()), self.word());
                let range = if self.rng.below(2) == 0 { at..at } else { range };
                input.splice(range, word.into_bytes());
            }
        }
        input
    }

    /// Mutates one value of a JSON document. Returns `None` for other inputs.
    fn json(&mut self, input: &[u8]) -> Option<Vec<u8>> {
        let mut document: Value = serde_json::from_slice(input).ok()?;
        let mut at = self.rng.below(count(&document));
        let chosen = node(&mut document, &mut at)?;
        match (self.rng.below(6), &mut *chosen) {
            (0 | 1, Value::Object(fields)) => self.object(fields),
            (0 | 1, Value::Array(items)) => self.array(items),
            (0 | 1, Value::String(text)) => {
                let bytes = self.bytes(text.as_bytes().to_vec());
                *text = String::from_utf8_lossy(&bytes).into_owned();
            }
            (2, _) => *chosen = json!([chosen.take()]),
            (3, _) => *chosen = json!({ self.word(): chosen.take() }),
            _ => *chosen = self.value(),
        }
        serde_json::to_vec(&document).ok()
    }

    fn object(&mut self, fields: &mut Map<String, Value>) {
        let names: Vec<String> = fields.keys().cloned().collect();
        let name = if names.is_empty() { self.word() } else { self.rng.pick(&names).clone() };
        match self.rng.below(3) {
            0 => drop(fields.remove(&name)),
            1 => {
                let value = fields.remove(&name).unwrap_or_default();
                fields.insert(self.word(), value);
            }
            _ => drop(fields.insert(self.word(), self.value())),
        }
    }

    fn array(&mut self, items: &mut Vec<Value>) {
        let at = self.rng.below(items.len());
        match self.rng.below(3) {
            0 if !items.is_empty() => drop(items.remove(at)),
            1 if !items.is_empty() => items.extend(vec![items[at].clone(); 1 << self.rng.below(6)]),
            _ => items.push(self.value()),
        }
    }

    /// Returns a scalar, or a value of another input.
    fn value(&mut self) -> Value {
        match self.rng.below(6) {
            0 => Value::Null,
            1 => json!(self.rng.below(2) == 0),
            2 => serde_json::from_str(self.rng.pick::<&str>(&NUMBERS)).unwrap_or_default(),
            3 => json!(self.word()),
            _ => {
                let mut other: Value = serde_json::from_slice(self.other).unwrap_or_default();
                let mut at = self.rng.below(count(&other));
                node(&mut other, &mut at).map(Value::take).unwrap_or_default()
            }
        }
    }
}

/// Returns the number of values in a document.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(fields) => fields.values().map(count).sum(),
        _ => 0,
    }
}

/// Returns the value at a position of the document.
fn node<'a>(value: &'a mut Value, at: &mut usize) -> Option<&'a mut Value> {
    if *at == 0 {
        return Some(value);
    }
    *at -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| node(item, at)),
        Value::Object(fields) => fields.values_mut().find_map(|field| node(field, at)),
        _ => None,
    }
}
