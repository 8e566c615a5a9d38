//! The bridge with a server that misbehaves on demand, over stdin and stdout.

use std::fs;

use rap_testkit::until;
use serde_json::{Value, json};

use super::{
    SERVER, call, cancel, open, results, server, until_noted, uses_modern_server, with_bad_command,
    with_bad_server,
};

fn tool<'a>(server: &'a Value, name: &str) -> &'a Value {
    let found = server["tools"].as_array().unwrap().iter().find(|tool| tool["name"] == name);
    found.unwrap_or_else(|| panic!("{server}"))
}

#[tokio::test]
async fn tools_have_their_names_schemas_and_annotations() {
    let notes = tempfile::tempdir().unwrap();
    let rap = with_bad_server(notes.path(), "").start();
    let bad = server(&rap, "mcp:bad").await;
    assert_eq!(bad["name"], "bad");
    let echo = tool(&bad, "echo");
    assert_eq!(echo["annotations"], json!({"readOnly": true}));
    assert_eq!(echo["inputSchema"]["required"], json!(["text"]));
    assert_eq!(tool(&bad, "destroy")["annotations"], json!({"destructive": true}));
    assert_eq!(tool(&bad, "fail")["annotations"].get("destructive"), None);
    tool(&bad, "dotted_name");
    let (_, listed) = rap.command(&["tools", "ls"]);
    assert!(listed.contains("echo") && listed.contains("bad"), "{listed}");
}

#[tokio::test]
async fn a_prefix_is_put_before_names_and_low_trust_makes_tools_destructive() {
    let notes = tempfile::tempdir().unwrap();
    let rap = with_bad_server(notes.path(), "prefix = \"b_\"\ntrust = \"low\"").start();
    let bad = server(&rap, "mcp:bad").await;
    assert_eq!(tool(&bad, "b_fail")["annotations"], json!({"destructive": true}));
    assert_eq!(tool(&bad, "b_echo")["annotations"], json!({"readOnly": true}));
    let thread = open(&rap).await;
    assert_eq!(call(&rap, &thread, "b_echo", json!({"text": "hi"})).await, "hi");
}

#[tokio::test]
async fn results_errors_media_and_variables_come_through() {
    let notes = tempfile::tempdir().unwrap();
    let rap = with_bad_server(notes.path(), "").variable("RAP_TOKEN", "own").start();
    let thread = open(&rap).await;
    assert_eq!(call(&rap, &thread, "echo", json!({"text": "hi"})).await, "hi");
    assert_eq!(call(&rap, &thread, "fail", json!({})).await, "Error: the disk is full");
    assert_eq!(call(&rap, &thread, "dotted_name", json!({})).await, "dots");
    assert_eq!(call(&rap, &thread, "variable", json!({})).await, "hush None two words");
    assert_eq!(call(&rap, &thread, "garbage", json!({})).await, "clean");
    rap.until_logged("this is not JSON").await;
    let media = call(&rap, &thread, "media", json!({})).await;
    for part in ["look", "image/png", "[audio of type audio/wav, 3 bytes, not shown]", "inside"] {
        assert!(media.contains(part), "{media}");
    }
    assert_eq!(
        call(&rap, &thread, "read_resource", json!({"uri": "note://1"})).await,
        "[resource note://1]\nthe note"
    );
    let prompt =
        call(&rap, &thread, "get_prompt", json!({"name": "greet", "arguments": {"who": "Ann"}})).await;
    assert_eq!(prompt, "user:\nGreet Ann.");
    let refused = call(&rap, &thread, "sample", json!({})).await;
    assert!(refused.contains("does not offer sampling"), "{refused}");
}

#[tokio::test]
async fn a_cancellation_reaches_the_server_and_progress_is_a_view() {
    let notes = tempfile::tempdir().unwrap();
    let rap = with_bad_server(notes.path(), "").start();
    let thread = open(&rap).await;
    assert_eq!(call(&rap, &thread, "progress", json!({})).await, "done");
    let views = rap.get(&format!("/v1/threads/{thread}/views")).await.expect(200);
    assert!(
        views.to_string().contains("\"fraction\":0.75") && views.to_string().contains("step 3"),
        "{views}"
    );
    rap.say(&thread, "call hang {}").await;
    until_noted(notes.path(), "hanging").await;
    cancel(&rap, &thread).await;
    until_noted(notes.path(), "cancelled").await;
}

#[tokio::test]
async fn a_crash_fails_the_running_calls_and_the_server_is_started_again() {
    let notes = tempfile::tempdir().unwrap();
    let rap = with_bad_server(notes.path(), "").start();
    let thread = open(&rap).await;
    let other = rap.open("call hang {}").await;
    until_noted(notes.path(), "hanging").await;
    let crashed = call(&rap, &thread, "crash", json!({})).await;
    assert!(crashed.starts_with("Error: the MCP server bad ended while this call was running"), "{crashed}");
    until("the other call", async || results(&rap, &other).await.first().cloned()).await;
    assert_eq!(call(&rap, &thread, "echo", json!({"text": "again"})).await, "again");
    let crashes = until_noted(notes.path(), "crashed").await;
    assert_eq!(crashes.lines().count(), 1, "the call must not be repeated");
    assert_eq!(until_noted(notes.path(), "started").await.lines().count(), 2);
}

#[tokio::test]
async fn a_changed_list_is_seen_by_new_sessions_and_old_ones_go_on() {
    let notes = tempfile::tempdir().unwrap();
    let rap = with_bad_server(notes.path(), "").start();
    let old = open(&rap).await;
    assert_eq!(call(&rap, &old, "grow", json!({})).await, "grown");
    let turn = rap.thread(&old).await["turn"].clone();
    until("the new tool in a new session", async || {
        let new = rap.open("call grown {}").await;
        until("a result", async || results(&rap, &new).await.first().cloned()).await == "big"
    })
    .await;
    assert_eq!(rap.thread(&old).await["turn"], turn);
    assert_eq!(call(&rap, &old, "echo", json!({"text": "still"})).await, "still");
}

#[tokio::test]
async fn an_elicitation_is_a_question_to_the_user() {
    let notes = tempfile::tempdir().unwrap();
    let rap = with_bad_server(notes.path(), "").start();
    let thread = open(&rap).await;
    rap.say(&thread, "call elicit {}").await;
    let question = until("the question", async || {
        rap.get("/v1/inbox").await.expect(200)["items"].as_array().unwrap().first().cloned()
    })
    .await;
    assert_eq!(question["choices"], json!(["small", "large", "Decline"]));
    assert!(question["prompt"].as_str().unwrap().contains("Which size?"), "{question}");
    let id = question["call_id"].as_str().unwrap();
    let selected = json!({"selected": 1});
    rap.post(&format!("/v1/threads/{thread}/calls/{id}/choice"), &selected).await.expect(202);
    let answer = until("the result", async || results(&rap, &thread).await.first().cloned()).await;
    assert!(answer.contains("accept") && answer.contains("large"), "{answer}");
}

#[tokio::test]
async fn a_server_that_cannot_be_started_is_an_error_of_its_own() {
    let notes = tempfile::tempdir().unwrap();
    let rap = with_bad_server(notes.path(), "")
        .mcp_lines("name = \"missing\"\ncommand = [\"/no/such/program\"]")
        .mcp_lines("name = \"ends\"\ncommand = [\"sh\", \"-c\", \"exit 7\"]")
        .start();
    let thread = open(&rap).await;
    assert_eq!(call(&rap, &thread, "echo", json!({"text": "hi"})).await, "hi");
    for (url, expected) in
        [("mcp:missing", "cannot be started: No such file"), ("mcp:ends", "exit status: 7")]
    {
        until(expected, async || {
            let servers = rap.get("/v1/tools").await.expect(200)["servers"].clone();
            let found = servers.as_array().unwrap().iter().find(|server| server["url"] == url).cloned();
            found.is_some_and(|server| server["errors"].to_string().contains(expected))
        })
        .await;
    }
}

/// The call that the answer belongs to must not wait for ever.
#[tokio::test]
async fn an_answer_that_is_too_long_is_an_error_of_its_call() {
    let notes = tempfile::tempdir().unwrap();
    let rap = with_bad_server(notes.path(), "").start();
    let thread = open(&rap).await;
    let huge = call(&rap, &thread, "huge", json!({})).await;
    assert!(huge.starts_with("Error: the answer of the server is too long"), "{huge}");
    assert_eq!(call(&rap, &thread, "echo", json!({"text": "on"})).await, "on");
    assert_eq!(until_noted(notes.path(), "started").await.lines().count(), 1);
}

/// Servers may know only the protocol version 2026-07-28, in which they announce changes only to subscribers.
#[tokio::test]
async fn a_server_without_handshake_is_used_and_tells_changes() {
    let notes = tempfile::tempdir().unwrap();
    let command = json!(["env", "MCP_MODERN=1", "python3", SERVER]);
    let rap = with_bad_command(notes.path(), "", &command).start();
    uses_modern_server(&rap, notes.path()).await;
    let thread = open(&rap).await;
    let crashed = call(&rap, &thread, "crash", json!({})).await;
    assert!(crashed.starts_with("Error: the MCP server bad ended while this call was running"), "{crashed}");
    assert_eq!(call(&rap, &thread, "echo", json!({"text": "again"})).await, "again");
    assert_eq!(until_noted(notes.path(), "discovered").await.lines().count(), 2);
}

/// Returns the environments that contain a text, of processes whose command lines contain another one.
fn environments_with(command: &str, variable: &str) -> Vec<String> {
    let read = |path: std::path::PathBuf| {
        String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).replace('\0', "\n")
    };
    let processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let processes = processes.filter(|process| read(process.join("cmdline")).contains(command));
    processes.map(|process| read(process.join("environ"))).filter(|text| text.contains(variable)).collect()
}

#[tokio::test]
async fn the_bridge_uses_no_huge_pages_and_mcp_servers_do_not_see_that() {
    let notes = tempfile::tempdir().unwrap();
    let rap = with_bad_server(notes.path(), "").start();
    server(&rap, "mcp:bad").await;
    let has_variable = |text: &String| text.lines().any(|line| line.starts_with("MIMALLOC_ALLOW_THP="));
    let directory = rap.directory().to_string_lossy();
    let bridge = environments_with("tool\nmcp", &directory);
    assert!(!bridge.is_empty() && bridge.iter().all(has_variable), "{bridge:?}");
    let marked = format!("MCP_NOTES={}", notes.path().display());
    let servers: Vec<String> = environments_with(SERVER, &marked);
    assert!(!servers.is_empty() && !servers.iter().any(has_variable), "{servers:?}");
}
