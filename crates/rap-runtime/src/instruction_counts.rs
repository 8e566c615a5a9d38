//! A guard on the cost of fixed operations: the number of instructions that valgrind counts. It hardly depends on the
//! machine and not at all on its load, so a limit can be tight.
//!
//! The limits are in `instruction_counts.tsv`. They hold for the test profile, one compiler and one kind of processor; with
//! others the test says so and checks nothing. `UPDATE_COUNTS=1` writes the counts that were measured.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rap_agent::prompt::{Prompt, openai, visible_entries};
use rap_agent::{Entry, Facts, Head, Identity, Input, Limits, ToolResult, step};
use rap_protocol::{ThreadId, Timestamp, parse_callback};

use crate::store::sqlite::tests::Batches;
use crate::store::suite::fixture::{SERVER, START, calls};

/// The operations, each a test that runs only below valgrind, and the function that is counted.
const OPERATIONS: [(&str, &str); 4] = [
    ("parse", "counted_parse"),
    ("step_of_a_conversation", "counted_step"),
    ("batch", "counted_batch"),
    ("prompt", "counted_prompt"),
];
/// A count may exceed its limit by this share. Different runs differ by less than a hundredth of that.
const TOLERANCE: f64 = 0.05;
/// Number of repetitions in one count.
const TURNS: u64 = 100;

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/instruction_counts.tsv")
}

/// Describes what counts depend on, besides the code.
fn conditions() -> String {
    let compiler = Command::new("rustc").arg("--version").output();
    let compiler = compiler.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    // Incremental builds are divided into other units, in which other functions are inlined.
    let incremental = option_env!("CARGO_INCREMENTAL").unwrap_or("1");
    format!("{} {} incremental={incremental}", std::env::consts::ARCH, compiler.unwrap_or_default())
}

/// Runs one of the tests below in valgrind. Returns the instructions of the counted function, or `None` if there is no
/// valgrind.
fn count(operation: &str, function: &str) -> Option<u64> {
    let directory = tempfile::tempdir().unwrap();
    let report = directory.path().join("report");
    let status = Command::new("valgrind")
        .args(["--tool=callgrind", "-q", &format!("--toggle-collect=*{function}*")])
        .arg(format!("--callgrind-out-file={}", report.display()))
        .arg(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--test-threads=1", &format!("instruction_counts::{operation}")])
        .env("RAP_COUNTED", "1")
        .stdout(Stdio::null())
        .status()
        .ok()?;
    assert!(status.success(), "{operation} failed below valgrind");
    let report = std::fs::read_to_string(report).unwrap();
    let total =
        report.lines().find_map(|line| line.strip_prefix("totals: ").or(line.strip_prefix("summary: ")));
    let total: u64 = total.expect("a report has a total").split(' ').next().unwrap().parse().unwrap();
    assert!(total > 0, "{function} was not counted");
    Some(total)
}

#[test]
fn fixed_operations_need_no_more_instructions_than_before() {
    let known = std::fs::read_to_string(file()).unwrap_or_default();
    let here = conditions();
    let (others, known): (Vec<&str>, Vec<&str>) = known.lines().partition(|line| !line.starts_with(&here));
    let is_update = std::env::var_os("UPDATE_COUNTS").is_some();
    if !is_update && known.is_empty() {
        eprintln!("not checked: there are no limits for {here}");
        return;
    }
    let (mut written, mut slower) = (others.join("\n") + "\n", Vec::new());
    for (operation, function) in OPERATIONS {
        let Some(count) = count(operation, function) else {
            eprintln!("not checked: there is no valgrind");
            return;
        };
        writeln!(written, "{here}\t{operation}\t{count}").unwrap();
        let start = format!("{here}\t{operation}\t");
        let limit = known.iter().find_map(|line| line.strip_prefix(&start)?.parse::<u64>().ok()).unwrap_or(0);
        println!("{operation}: {count} instructions, before {limit}");
        if count as f64 > limit as f64 * (1.0 + TOLERANCE) {
            slower.push(format!("{operation}: {count} instructions instead of {limit}"));
        }
    }
    if is_update {
        std::fs::write(file(), written.trim_start()).unwrap();
        return;
    }
    assert!(
        slower.is_empty(),
        "{slower:#?}: find the cause with valgrind --tool=callgrind. If the cost is worth it, run the test with \
         UPDATE_COUNTS=1 and say why in the commit"
    );
}

/// Returns true if valgrind runs this process.
fn is_counted() -> bool {
    std::env::var_os("RAP_COUNTED").is_some()
}

#[test]
#[ignore = "counted by the test above"]
fn parse() {
    if is_counted() {
        let text = "a result of a tool, with some text ".repeat(10);
        let body = format!(r#"{{"type":"tool_result","group_id":"thread","id":"call","text":"{text}"}}"#);
        counted_parse(body.as_bytes());
    }
}

#[inline(never)]
fn counted_parse(body: &[u8]) {
    for _ in 0..TURNS {
        std::hint::black_box(parse_callback(std::hint::black_box(body)).unwrap());
    }
}

/// Applies an input to a head. Returns the new head and the entries that were appended.
fn apply(head: Head, input: Input, limits: &Limits) -> (Head, Vec<Entry>) {
    let identity = Identity { id: ThreadId::new("thread").unwrap(), incarnation: 7, depth: 0 };
    let step = step(head, input, Facts::of(identity), START, limits).unwrap();
    let appended = step.writes.into_iter().filter_map(|write| match write {
        rap_agent::Write::Append { entry, .. } => Some(entry),
        _ => None,
    });
    (step.head, appended.collect())
}

/// Makes a conversation in which each turn calls a tool.
fn conversation() -> Vec<Entry> {
    let limits = Limits { turns_per_wake: u32::MAX, ..Limits::default() };
    let (mut head, mut entries) = apply(Head::new(), Input::Begin { message: Some("hello".into()) }, &limits);
    for _ in 0..TURNS {
        let turn = head.turn();
        let (asked, called) = apply(head, calls(turn, &[SERVER]), &limits);
        let call = asked.batch()[0].id.clone();
        let result = Input::ToolResult { call, result: ToolResult::text("a result") };
        let (next, returned) = apply(asked, result, &limits);
        entries.extend(called.into_iter().chain(returned));
        head = next;
    }
    entries
}

#[test]
#[ignore = "counted by the test above"]
fn step_of_a_conversation() {
    if is_counted() {
        counted_step();
    }
}

#[inline(never)]
fn counted_step() {
    std::hint::black_box(conversation());
}

#[test]
#[ignore = "counted by the test above"]
fn prompt() {
    if is_counted() {
        counted_prompt(conversation());
    }
}

#[inline(never)]
fn counted_prompt(entries: Vec<Entry>) {
    let numbered = (1..).zip(entries).collect();
    let entries = visible_entries(numbered);
    std::hint::black_box(openai::request(&Prompt::new("be good", &entries, &[])));
}

#[test]
#[ignore = "counted by the test above"]
fn batch() {
    if is_counted() {
        let mut batches = Batches::new(32, Timestamp(START.0));
        counted_batch(&mut batches);
    }
}

#[inline(never)]
fn counted_batch(batches: &mut Batches) {
    for _ in 0..4 {
        batches.turn();
    }
}
