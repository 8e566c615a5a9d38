//! `rap check runtime`, the real binary, against the real `rap serve`.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rap_testkit::postgres::Server;
use rap_testkit::{Port, Process, programs};
use serde_json::Value;

/// Maximum duration of a run against our own runtime, on a busy machine.
const QUICK: Duration = Duration::from_secs(120);

fn check(arguments: &[&str]) -> Command {
    let mut command = programs::rap(&["check", "runtime"]);
    command.args(arguments);
    command
}

fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).unwrap()
}

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
}

/// Names of the probes with this result.
fn probes<'a>(report: &'a Value, result: &str) -> Vec<&'a str> {
    let probes = report["probes"].as_array().unwrap().iter();
    probes.filter(|probe| probe["result"] == result).map(|probe| probe["name"].as_str().unwrap()).collect()
}

#[test]
fn our_own_runtime_meets_all_observable_requirements_and_survives_kills() {
    for profile in ["spec", "rap"] {
        check_our_own(profile, &[]);
    }
}

#[test]
fn our_own_runtime_on_postgres_meets_all_observable_requirements_and_survives_kills() {
    for profile in ["spec", "rap"] {
        // A database belongs to one public URL, and each run has a port of its own.
        let database = Server::shared().database();
        let (url, key) =
            (format!("RAP_STORE_URL={}", database.url()), format!("RAP_STORE_KEY={}", "7e".repeat(32)));
        check_our_own(profile, &["--env", &url, "--env", &key]);
    }
}

fn check_our_own(profile: &str, environment: &[&str]) {
    let start = Instant::now();
    let (path, options) = (programs::rap_path(), ["--strict", "--format", "json", "--profile", profile]);
    // The settings are the defaults. On a busy machine a first prompt may therefore be sent without tools; the checker
    // waits until the model has them.
    let mut check = check(&options);
    let output = check.args(environment).arg("--").arg(path).args(["serve", "--config", "{config}"]);
    let output = output.output().unwrap();
    assert!(start.elapsed() < QUICK, "{:?}", start.elapsed());
    assert_eq!(output.status.code(), Some(0), "{}{}", text(&output.stdout), text(&output.stderr));
    let report = report(&output);
    assert_eq!(report["good"], true);
    assert_eq!(probes(&report, "fail"), [""; 0], "{report}");
    assert_eq!(probes(&report, "not_observable"), [""; 0], "{report}");
    assert!(probes(&report, "pass").contains(&"crash_after_a_result"), "{report}");
    assert_eq!(probes(&report, "pass").contains(&"parallel_calls"), profile == "rap");
}

/// Reads the lines `  {name}  value` that the checker prints.
fn read_values(stderr: &mut impl BufRead) -> HashMap<String, String> {
    let mut values = HashMap::new();
    while values.len() < 6 {
        let mut line = String::new();
        assert!(stderr.read_line(&mut line).unwrap() > 0, "it ended: {values:?}");
        if let Some((name, value)) = line.trim().split_once("}  ") {
            values.insert(name.trim_start_matches('{').to_owned(), value.to_owned());
        }
    }
    values
}

#[test]
fn a_runtime_that_somebody_else_starts_later_is_waited_for_and_never_killed() {
    let port = Port::reserve();
    let url = format!("http://{}", port.address());
    let mut checker = check(&["--url", &url, "--quiet-period", "1", "--format", "json"]);
    let mut checker = checker.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(checker.stderr.take().unwrap());
    let values = read_values(&mut stderr);

    let directory = tempfile::tempdir().unwrap();
    let mut config = format!(
        "[server]\nlisten = \"{}\"\n[model]\nprovider = \"openai\"\nname = \"m\"\n\
         base_url = \"{}\"\napi_key = \"{}\"\n",
        port.address(),
        values["model_url"],
        values["model_key"]
    );
    // Only one of the three servers, and without its token.
    config.push_str(&format!("[[tool_server]]\nurl = \"{}\"\n", values["tool_url"]));
    fs::write(directory.path().join("rap.toml"), config).unwrap();
    let mut serve = programs::rap(&["serve"]);
    serve.current_dir(directory.path());
    let mut runtime = Process::start(serve);

    let mut stdout = Vec::new();
    checker.stdout.take().unwrap().read_to_end(&mut stdout).unwrap();
    let status = checker.wait().unwrap();
    assert_eq!(status.code(), Some(0), "{}", text(&stdout));
    let report: Value = serde_json::from_slice(&stdout).unwrap();
    assert_eq!(probes(&report, "fail"), [""; 0], "{report}");
    let hidden = probes(&report, "not_observable");
    for name in ["crash_in_a_call", "closing_told_to_all", "toolset_after_a_conflict", "retry_unreachable"] {
        assert!(hidden.contains(&name), "{name}: {hidden:?}");
    }
    assert!(hidden.contains(&"invocation_authenticated"), "{hidden:?}");
    assert!(runtime.ended().is_none(), "the checker killed a runtime that it did not start");
}

#[test]
fn wrong_usage_is_reported_with_advice() {
    for (arguments, expected) in [
        (&["--", "sleep", "60"][..], "the command does not contain {listen}: add it, or give --url or --say"),
        (&["--say", "talk {thread}"], "the placeholder {text} is missing"),
        (&["--say", "talk '{thread} {text}"], "a quotation mark is not closed"),
        (&["--url", "127.0.0.1:7420"], "expected http://HOST:PORT"),
        (&["--env", "NAME", "--", "x", "{listen}"], "expected NAME=VALUE"),
        (&["--template", "no-such-file", "--", "x", "{listen}", "{config}"], "no-such-file"),
        (&["--timeout", "0"], "from 0.1 to 3600"),
        (&["--profile", "seeds", "--patience", "0"], "from 0.1 to 3600"),
    ] {
        let output = check(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(text(&output.stderr).contains(expected), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "");
    }
}

#[test]
fn a_runtime_that_does_not_start_is_reported_with_its_output() {
    let script = "echo out of coffee >&2; exit 3";
    let output = check(&["--", "/bin/sh", "-c", script, "{listen}"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let errors = text(&output.stderr);
    assert!(errors.contains("exit status: 3") && errors.contains("out of coffee"), "{errors}");
    let output = check(&["--", "/no/such/runtime", "{listen}"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cannot start the runtime"), "{}", text(&output.stderr));
}

/// Placeholders are replaced in arguments, variables and the template.
#[test]
fn placeholders_are_filled_in_arguments_variables_and_the_template() {
    let directory = tempfile::tempdir().unwrap();
    let template = directory.path().join("their.conf");
    fs::write(&template, "tools = {tool_url} {tool_url_2} {tool_url_3}\nother = {unknown}\n").unwrap();
    let out = directory.path().join("seen");
    let script = format!("{{ echo \"$1\"; echo \"$MODEL\"; cat \"$2\"; }} > {}; exit 3", out.display());
    let output = check(&[
        "--template",
        template.to_str().unwrap(),
        "--env",
        "MODEL=at {model_url}",
        "--",
        "/bin/sh",
        "-c",
        &script,
        "sh",
        "on {listen}",
        "{config}",
    ]);
    let output = { output }.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let seen = fs::read_to_string(&out).unwrap_or_else(|_| panic!("{output:?}"));
    let lines: Vec<&str> = seen.lines().collect();
    assert!(lines[0].starts_with("on 127.0.0.1:"), "{seen}");
    assert!(lines[1].starts_with("at http://127.0.0.1:") && lines[1].ends_with("/v1"), "{seen}");
    assert!(lines[2].contains("/main http://") && lines[2].ends_with("/third"), "{seen}");
    assert_eq!(lines[3], "other = {unknown}");
}

/// A client that has no address may need the runtime's directory.
#[test]
fn the_data_directory_is_filled_in_the_command_of_say() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("seen");
    let say = format!("/bin/sh -c 'echo \"$1\" \"$2\" > {}' sh {{data}} {{thread}} {{text}}", out.display());
    let output =
        check(&["--say", &say, "--timeout", "1", "--", "/bin/sh", "-c", "sleep 60"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let seen = fs::read_to_string(&out).unwrap_or_else(|_| panic!("{output:?}"));
    let (data, thread) = seen.trim().split_once(' ').unwrap();
    assert!(data.starts_with('/') && data.ends_with("/data") && thread.starts_with("rapcheck-"), "{seen}");
}
