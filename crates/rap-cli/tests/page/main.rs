//! The page in a real browser, against `rap serve` as a process with the tool server `kitchen_sink`. What the browser does
//! and checks is in `browser.mjs`.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod headers;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::Stdio;

use rap_testkit::peer::Reply;
use rap_testkit::tools::INVOKE;
use rap_testkit::{Process, Rap, Setup, Tools, browser, programs};
use serde_json::json;
use tempfile::TempDir;

const TOKEN: &str = "token-of-the-operator";

/// A runtime with a tool server.
struct Stage {
    rap: Rap,
    _tools: Option<(Process, TempDir)>,
}

fn stage(setup: Setup) -> Stage {
    let data = tempfile::tempdir().unwrap();
    let tools = Process::start(programs::example("kitchen_sink", data.path(), &[]));
    let setup = setup.tool_server(&tools.url).agent("name = \"default\"\napprove = [\"fail\"]");
    Stage { rap: setup.start(), _tools: Some((tools, data)) }
}

/// Runs a scenario of `browser.mjs`. `on_line` gets each line that it prints.
fn run(scenario: &str, stage: &mut Stage, mut on_line: impl FnMut(&mut Rap, &str)) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/page/browser.mjs");
    let mut command = browser::script(env!("CARGO_TARGET_TMPDIR"), &script);
    command.arg(scenario).env("PAGE_BASE", &stage.rap.url).env("PAGE_TOKEN", TOKEN);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("Node.js is installed");
    let mut printed = String::new();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        on_line(&mut stage.rap, &line);
        printed.push_str(&format!("{line}\n"));
    }
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    let status = child.wait().unwrap();
    assert!(
        status.success() && printed.contains("passed"),
        "{scenario}: {printed}{errors}\n{}",
        stage.rap.log()
    );
}

fn passes(scenario: &str, setup: Setup) {
    run(scenario, &mut stage(setup), |_, _| {});
}

#[test]
fn a_person_talks_to_an_agent_and_uses_every_button() {
    passes("conversation", Setup::new());
}

#[test]
fn images_are_attached_to_messages_and_shown() {
    passes("images", Setup::new());
}

/// The tool server fails when the script says so, and works again later.
#[test]
fn attempts_of_deliveries_and_the_health_of_tool_servers_are_shown() {
    let tokio = tokio::runtime::Runtime::new().unwrap();
    let tools = tokio.block_on(Tools::start());
    let mut stage = Stage { rap: Setup::new().tools(&tools).start(), _tools: None };
    run("deliveries", &mut stage, |_, line| match line {
        "progress" => tokio.block_on(async {
            let call = tools.invocation().await;
            call.says(&call.view("progress", json!({"fraction": 0.5, "text": "compiling"}))).await;
        }),
        "break" => tools.answer_always(INVOKE, Reply::Status(503)),
        "mend" => tools.answer_always(INVOKE, Reply::Status(200)),
        _ => {}
    });
}

#[test]
fn questions_appear_live_and_are_answered_in_place() {
    passes("inbox", Setup::new());
}

#[test]
fn a_question_that_nobody_sees_is_a_notification() {
    passes("notifications", Setup::new());
}

#[test]
fn the_time_line_is_to_scale() {
    passes("timeline", Setup::new());
}

/// The threads are copies of one, in the database.
#[test]
fn a_hundred_thousand_threads_are_listed_and_searched() {
    let mut stage = Stage { rap: Setup::new().start(), _tools: None };
    let tokio = tokio::runtime::Runtime::new().unwrap();
    let thread = tokio.block_on(async {
        let thread = stage.rap.open("say hello").await;
        stage.rap.until_idle(&thread).await;
        thread
    });
    stage.rap.stop();
    stage.rap.execute(&format!(
        "INSERT INTO threads (no, id, root, born_at, ancestors, incarnation, agent, title, created_at, updated_at,
                              version, status, head)
         WITH RECURSIVE numbers(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM numbers WHERE i < 100000)
         SELECT no + i, 'copy_' || i, no + i, born_at, ancestors, random(), agent, 'Report number ' || i,
                created_at, updated_at, version, status, head
         FROM threads, numbers WHERE id = '{thread}';
         INSERT INTO entries (key, body)
         SELECT copy.no << 32 | (key & 0xffffffff), body FROM threads AS copy, threads AS original, entries
         WHERE original.id = '{thread}' AND copy.no > original.no AND key >> 32 = original.no;"
    ));
    stage.rap.start_again();
    run("many", &mut stage, |_, line| eprintln!("{line}"));
}

#[test]
fn threads_are_listed_live_searched_by_phrase_and_filtered() {
    passes("threads", Setup::new());
}

#[test]
fn every_view_is_accessible_in_light_and_dark_and_on_a_phone() {
    passes("everywhere", Setup::new());
}

#[test]
fn the_page_can_be_used_with_the_keyboard_alone() {
    passes("keyboard", Setup::new());
}

#[test]
fn a_person_signs_in_with_a_token_that_scripts_cannot_read() {
    passes("sign-in", Setup::new().token(TOKEN));
}

/// The runtime is stopped while a thread is shown. What was said meanwhile is shown once, after the restart.
#[test]
fn no_line_is_lost_or_repeated_when_the_page_reconnects() {
    let mut stage = stage(Setup::new());
    let tokio = tokio::runtime::Runtime::new().unwrap();
    run("reconnect", &mut stage, |rap, line| {
        let Some(thread) = line.strip_prefix("restart /threads/") else { return };
        rap.stop();
        rap.start_again();
        tokio.block_on(async {
            for text in ["say meanwhile", "say later"] {
                rap.say(thread, text).await;
                rap.until_idle(thread).await;
            }
        });
    });
}
