//! `rap check tool`, the real binary, against tool servers that are processes of their own.

use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use rap_testkit::{Process, programs};
use serde_json::Value;

const TOKEN: &str = "s3cret-of-the-server";
/// Maximum duration of a run against our own server.
const QUICK: Duration = Duration::from_secs(60);

fn check(url: &str, arguments: &[&str]) -> Output {
    programs::rap(&["check", "tool", url]).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).unwrap()
}

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
}

/// Ids of the requirements with this result.
fn with_result<'a>(report: &'a Value, result: &str) -> Vec<&'a str> {
    let requirements = report["requirements"].as_array().unwrap().iter();
    requirements.filter(|row| row["result"] == result).map(|row| row["id"].as_str().unwrap()).collect()
}

const ECHO: [&str; 4] = ["--operation", "echo", "--arguments", "{\"text\": \"hi\"}"];
const TICK: [&str; 4] = ["--subscription", "tick", "--arguments", "{\"count\": 3, \"every_ms\": 50}"];
const SLOW: [&str; 4] = ["--slow-operation", "slow", "--arguments", "{\"seconds\": 2}"];
const WAIT_LONG: [&str; 4] = ["--slow-operation", "pause", "--arguments", "{\"seconds\": 2}"];
const WAIT: [&str; 4] = ["--operation", "pause", "--arguments", "{\"seconds\": 0}"];
const COUNTDOWN: [&str; 4] =
    ["--subscription", "countdown", "--arguments", "{\"from\": 3, \"every_seconds\": 0.05}"];

#[test]
fn our_own_server_meets_all_observable_requirements() {
    let data = tempfile::tempdir().unwrap();
    let server =
        Process::start(programs::example("kitchen_sink", data.path(), &[("RAP_TOOL_BEARER", TOKEN)]));
    for profile in ["spec", "rap"] {
        let start = Instant::now();
        let flags = ["--bearer", TOKEN, "--strict", "--format", "json", "--profile", profile];
        let output = check(&server.url, &[&ECHO[..], &SLOW, &TICK, &flags].concat());
        assert!(start.elapsed() < QUICK, "{:?}", start.elapsed());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
        let report = report(&output);
        assert_eq!(report["profile"], profile);
        assert_eq!(report["count"]["failed_must"], 0);
        assert_eq!(report["count"]["failed_should"], 0);
        for probe in report["probes"].as_array().unwrap() {
            assert_eq!(probe["result"], "pass", "{probe}");
        }
        for id in ["TR-03", "TR-04", "LC-07"] {
            assert!(with_result(&report, "pass").contains(&id), "{id}: {report}");
        }
        assert!(with_result(&report, "partial").contains(&"TC-14"), "{report}");
        for id in ["LC-13", "TC-21", "CN-23"] {
            assert!(with_result(&report, "not_observable").contains(&id), "{id}: {report}");
        }
        assert!(!text(&output.stdout).contains(TOKEN));
    }
}

/// Starts a tool server that ships with rap, without Landlock or a list of commands.
fn shipped(name: &str, data: &Path) -> Process {
    let mut command =
        programs::rap(&["tool", "run", name, "--listen", "127.0.0.1:0", "--url-policy", "loopback"]);
    command
        .env("RAP_TOOL_DATA", data)
        .env("RAP_TOOL_BEARER", TOKEN)
        .env("RAP_WEBHOOK_SECRET_GITHUB", "secret");
    Process::start(command)
}

#[test]
fn the_servers_that_ship_meet_all_observable_requirements() {
    let strings = |flags: &[&str]| flags.iter().map(ToString::to_string).collect::<Vec<_>>();
    let servers = [
        (
            "shell",
            strings(&[
                "--operation",
                "run_command",
                "--arguments",
                "{\"command\": \"echo hi\"}",
                "--slow-operation",
                "run_command",
                "--arguments",
                "{\"command\": \"sleep 3\"}",
                "--subscription",
                "run_command",
                "--arguments",
                "{\"command\": \"for i in 1 2 3; do echo $i; sleep 0.6; done\", \"stream\": true}",
            ]),
        ),
        ("files", strings(&["--operation", "list_files", "--arguments", "{\"path\": \".\"}"])),
        ("http", strings(&["--operation", "fetch", "--arguments", "{\"url\": \"http://127.0.0.1:9/\"}"])),
        (
            "timer",
            strings(&["--subscription", "remind", "--arguments", "{\"in_seconds\": 1, \"text\": \"now\"}"]),
        ),
        (
            "webhook",
            strings(&["--subscription", "subscribe_webhook", "--arguments", "{\"source\": \"github\"}"]),
        ),
    ];
    for (name, operations) in servers {
        let data = tempfile::tempdir().unwrap();
        let server = shipped(name, data.path());
        let flags = ["--bearer", TOKEN, "--strict", "--format", "json"];
        let operations: Vec<&str> = operations.iter().map(String::as_str).collect();
        let output = check(&server.url, &[&operations[..], &flags].concat());
        let report = report(&output);
        let failed: Vec<&Value> =
            report["probes"].as_array().unwrap().iter().filter(|probe| probe["result"] == "fail").collect();
        assert_eq!(output.status.code(), Some(0), "{name}: {failed:?}");
        assert!(failed.is_empty(), "{name}: {failed:?}");
    }
}

#[test]
fn a_server_without_a_journal_meets_every_must_and_the_report_names_the_rest() {
    let data = tempfile::tempdir().unwrap();
    let server = Process::start(programs::python_tool(data.path(), &[("RAP_TOOL_BEARER", TOKEN)]));
    let flags = ["--bearer", TOKEN, "--format", "json"];
    let output = check(&server.url, &[&WAIT[..], &WAIT_LONG, &COUNTDOWN, &flags].concat());
    let found = report(&output);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
    assert_eq!(with_result(&found, "fail"), ["TC-20", "CN-22"]);
    for id in ["TR-18", "SE-10", "LC-13", "LC-14"] {
        assert!(with_result(&found, "not_observable").contains(&id), "{id}");
    }
}

/// Removes words with digits, which differ between runs.
fn without_numbers(line: &str) -> String {
    let word =
        |word: &str| if word.contains(|c: char| c.is_ascii_digit()) { "#".into() } else { word.to_owned() };
    line.split(' ').map(word).collect::<Vec<String>>().join(" ")
}

#[test]
fn the_guide_shows_the_real_output() {
    let data = tempfile::tempdir().unwrap();
    let server = Process::start(programs::python_tool(data.path(), &[]));
    let output = check(&server.url, &[&WAIT[..], &WAIT_LONG, &COUNTDOWN].concat());
    let said: Vec<String> = text(&output.stdout).lines().map(without_numbers).collect();
    let guide = include_str!("../../../../docs/check-your-server.md");
    let (_, shown) = guide.split_once("```text\n").unwrap();
    let (shown, _) = shown.split_once("```").unwrap();
    for line in shown.lines().filter(|line| line.trim() != "…") {
        assert!(said.contains(&without_numbers(line)), "{line}\n{}", text(&output.stdout));
    }
    for (flag, value) in
        [("--operation", WAIT), ("--slow-operation", WAIT_LONG), ("--subscription", COUNTDOWN)]
    {
        let command = format!("{flag} {} --arguments '{}'", value[1], value[3]);
        assert!(guide.contains(&command), "{command}");
    }
}

#[test]
fn a_dead_address_is_one_error_with_advice() {
    let output = check("http://127.0.0.1:1", &[]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stdout), "");
    let errors = text(&output.stderr);
    assert!(errors.lines().count() == 1 && errors.contains("http://127.0.0.1:1 does not answer"), "{errors}");
    assert!(errors.contains("start the server, or correct the address"), "{errors}");
}

#[test]
fn a_forgotten_token_is_one_error_with_advice() {
    let data = tempfile::tempdir().unwrap();
    let server = Process::start(programs::python_tool(data.path(), &[("RAP_TOOL_BEARER", TOKEN)]));
    for (flags, advice) in
        [(&[][..], "pass it with --bearer"), (&["--bearer", "wrong"], "the token of --bearer")]
    {
        let output = check(&server.url, flags);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert_eq!(text(&output.stdout), "");
        let errors = text(&output.stderr);
        assert!(errors.contains("answered 401 to an invocation") && errors.contains(advice), "{errors}");
    }
}

#[test]
fn wrong_usage_is_reported_with_advice() {
    let data = tempfile::tempdir().unwrap();
    let server = Process::start(programs::example("kitchen_sink", data.path(), &[]));
    let url = server.url.as_str();
    for (url, arguments, expected) in [
        ("127.0.0.1:7500", &[][..], "expected http://HOST:PORT"),
        (url, &["--operation", "bake"], "the server has no operation `bake`; it offers "),
        (url, &["--operation", "echo"], "the arguments do not match the schema of `echo`: "),
        (url, &["--arguments", "{}"], "--arguments must follow an --operation or a --subscription"),
        (url, &["--operation", "echo", "--arguments", "hi"], "invalid JSON"),
        (url, &["--format", "xml"], "[possible values: table, json, junit]"),
    ] {
        let output = check(url, arguments);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(text(&output.stderr).contains(expected), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "");
    }
}
