//! The bridge with a server with a URL, which misbehaves on demand: sessions, streams, tasks and sign-ins.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use rap_testkit::{Rap, Setup, until};
use serde_json::json;

use super::{Ending, SERVER, call, cancel, open, results, server, until_noted, uses_modern_server};

/// The server with streamable HTTP.
struct HttpServer {
    _process: Ending,
    url: String,
}

impl HttpServer {
    fn start(notes: &Path, environment: &[(&str, &str)]) -> HttpServer {
        let mut command = Command::new("python3");
        command.args([SERVER, "http"]).env("MCP_NOTES", notes).envs(environment.iter().copied());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        HttpServer { _process: Ending(child), url: format!("http://127.0.0.1:{}/mcp", line.trim()) }
    }

    /// Ends the server, and starts it again on the same port, without its sessions.
    fn restarted(self, notes: &Path, environment: &[(&str, &str)]) -> HttpServer {
        let port = self.url.rsplit_once(':').unwrap().1.trim_end_matches("/mcp").to_owned();
        drop(self);
        HttpServer::start(notes, &[environment, &[("MCP_PORT", port.as_str())]].concat())
    }

    fn setup(&self, lines: &str) -> Setup {
        Setup::new().mcp_lines(&format!("name = \"bad\"\nurl = {:?}\n{lines}", self.url))
    }
}

#[tokio::test]
async fn a_server_with_a_url_gets_calls_questions_and_cancellations() {
    let notes = tempfile::tempdir().unwrap();
    let http = HttpServer::start(notes.path(), &[("MCP_BEARER", "t0ken")]);
    let rap = http.setup("bearer = \"t0ken\"").start();
    let thread = open(&rap).await;
    assert_eq!(call(&rap, &thread, "echo", json!({"text": "hi"})).await, "hi");
    assert_eq!(call(&rap, &thread, "fail", json!({})).await, "Error: the disk is full");
    assert_eq!(call(&rap, &thread, "progress", json!({})).await, "done");
    rap.say(&thread, "call elicit {}").await;
    until("the question", async || {
        !rap.get("/v1/inbox").await.expect(200)["items"].as_array().unwrap().is_empty()
    })
    .await;
    let other = rap.open("call hang {}").await;
    until_noted(notes.path(), "hanging").await;
    cancel(&rap, &other).await;
    until_noted(notes.path(), "cancelled").await;
}

#[tokio::test]
async fn a_session_that_the_server_has_forgotten_is_replaced_and_the_call_is_made() {
    for status in ["404", "400"] {
        let notes = tempfile::tempdir().unwrap();
        let http = HttpServer::start(notes.path(), &[("MCP_UNKNOWN_SESSION", status)]);
        let rap = http.setup("").start();
        let thread = open(&rap).await;
        let other = rap.open("call hang {}").await;
        until_noted(notes.path(), "hanging").await;
        fs::write(notes.path().join("forget sessions"), "").unwrap();
        assert_eq!(call(&rap, &thread, "echo", json!({"text": "hi"})).await, "hi");
        assert_eq!(until_noted(notes.path(), "started").await.lines().count(), 2);
        // Nobody can answer the call of the session that was forgotten.
        let lost = until("the other call", async || results(&rap, &other).await.first().cloned()).await;
        assert!(lost.starts_with("Error: the MCP server bad ended while this call was running"), "{lost}");
    }
}

#[tokio::test]
async fn a_server_that_ends_fails_its_calls_and_is_used_again_when_it_is_back() {
    let notes = tempfile::tempdir().unwrap();
    let http = HttpServer::start(notes.path(), &[]);
    let rap = http.setup("").start();
    let thread = open(&rap).await;
    let crashed = call(&rap, &thread, "crash", json!({})).await;
    assert!(crashed.starts_with("Error: the MCP server bad ended while this call was running"), "{crashed}");
    let _http = http.restarted(notes.path(), &[]);
    assert_eq!(call(&rap, &thread, "echo", json!({"text": "again"})).await, "again");
    assert_eq!(
        until_noted(notes.path(), "crashed").await.lines().count(),
        1,
        "the call must not be repeated"
    );
}

#[tokio::test]
async fn a_server_without_handshake_is_used_and_tells_changes() {
    let notes = tempfile::tempdir().unwrap();
    let http = HttpServer::start(notes.path(), &[("MCP_MODERN", "1")]);
    let rap = http.setup("").start();
    uses_modern_server(&rap, notes.path()).await;
}

#[tokio::test]
async fn a_task_is_polled_and_its_result_arrives_also_after_a_restart() {
    let notes = tempfile::tempdir().unwrap();
    let http = HttpServer::start(notes.path(), &[]);
    let rap = http.setup("").start();
    let thread = open(&rap).await;
    assert_eq!(call(&rap, &thread, "research", json!({"seconds": 0.3})).await, "result of task 1");
    rap.say(&thread, "call research {\"seconds\": 4}").await;
    until("the second task", async || until_noted(notes.path(), "task").await.lines().count() == 2).await;
    let rap = rap.stopped_and_started();
    let result = until("the result", async || results(&rap, &thread).await.get(1).cloned()).await;
    assert_eq!(result, "result of task 2");
    assert_eq!(until_noted(notes.path(), "task").await.lines().count(), 2, "the call must not be repeated");
    rap.say(&thread, "call research {\"seconds\": 1000}").await;
    until("the third task", async || until_noted(notes.path(), "task").await.lines().count() == 3).await;
    cancel(&rap, &thread).await;
    until_noted(notes.path(), "task cancelled").await;
}

/// Requests a URL like a browser.
async fn get(url: &str) -> rap_testkit::http::Response {
    let rest = url.strip_prefix("http://").unwrap();
    let (host, path) = rest.split_once('/').unwrap();
    let request = format!("GET /{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    rap_testkit::http::exchange(&format!("http://{host}"), request.as_bytes()).await
}

/// Visits the page of a sign-in and follows its redirect, which leads to the runtime.
async fn visit(rap: &Rap, url: &str) {
    let answer = get(url).await;
    assert_eq!(answer.status, 302, "{answer:?}");
    let location = answer.header("location").unwrap_or_else(|| panic!("{answer:?}")).to_owned();
    assert!(location.starts_with(&format!("{}/consent/mcp:bad?", rap.url)), "{location}");
    let invented = location.replace("state=", "state=0");
    for unknown in
        [invented.as_str(), &location.replace("mcp:bad", "mcp:other"), &location.replace("mcp:bad", "x")]
    {
        assert_eq!(get(unknown).await.status, 404, "{unknown}");
    }
    let answer = get(&location).await;
    assert_eq!(answer.status, 200, "{answer:?}");
}

/// Waits for a request to sign in, and does so.
async fn sign_in(rap: &Rap) {
    let auth_url = until("the sign-in", async || {
        let items = rap.get("/v1/inbox").await.expect(200)["items"].clone();
        items[0]["auth_url"].as_str().map(ToOwned::to_owned)
    })
    .await;
    visit(rap, &auth_url).await;
    until("the end of the question", async || {
        let items = rap.get("/v1/inbox").await.expect(200)["items"].clone();
        items[0]["auth_url"].as_str() != Some(auth_url.as_str())
    })
    .await;
}

#[tokio::test]
async fn users_sign_in_to_a_server_that_asks_for_it() {
    let notes = tempfile::tempdir().unwrap();
    let http = HttpServer::start(notes.path(), &[("MCP_OAUTH", "1")]);
    let rap = http.setup("").start();
    let thread = open(&rap).await;
    assert_eq!(server(&rap, "mcp:bad").await["tools"][0]["name"], "sign_in");
    rap.say(&thread, "call sign_in {}").await;
    sign_in(&rap).await;
    let result = until("the result", async || results(&rap, &thread).await.first().cloned()).await;
    assert!(result.starts_with("signed in to bad"), "{result}");
    assert_eq!(until_noted(notes.path(), "authorized").await, format!("registered {}\n", http.url));

    // Another session has the tools, but another user, who has to sign in too.
    let new = rap.open("call echo {\"text\": \"hi\"}").await;
    sign_in(&rap).await;
    assert_eq!(until("the echo", async || results(&rap, &new).await.first().cloned()).await, "hi");
    assert_eq!(call(&rap, &new, "echo", json!({"text": "again"})).await, "again");

    // A token that the server does not accept any more is replaced, and the call continues.
    fs::write(notes.path().join("refuse tokens"), "").unwrap();
    rap.say(&new, "call echo {\"text\": \"signed in again\"}").await;
    sign_in(&rap).await;
    assert_eq!(
        until("the echo", async || results(&rap, &new).await.get(2).cloned()).await,
        "signed in again"
    );
}

/// Opens a thread of a user.
async fn open_as(rap: &Rap, user: &str) -> String {
    let opened = rap.post("/v1/threads", &json!({"user_id": user, "message": "hello"})).await.expect(201);
    let thread = opened["id"].as_str().unwrap().to_owned();
    rap.until_idle(&thread).await;
    thread
}

#[tokio::test]
async fn what_one_user_has_is_not_told_to_another() {
    let notes = tempfile::tempdir().unwrap();
    let http = HttpServer::start(notes.path(), &[("MCP_OAUTH", "1"), ("MCP_USERS", "1")]);
    let rap = http.setup("").start();
    server(&rap, "mcp:bad").await;
    let ann = open_as(&rap, "ann").await;
    rap.say(&ann, "call sign_in {}").await;
    sign_in(&rap).await;
    until("the result", async || results(&rap, &ann).await.first().cloned()).await;

    let ann = open_as(&rap, "ann").await;
    let resources = call(&rap, &ann, "list_resources", json!({})).await;
    let name = resources.split_once("diary of ").unwrap_or_else(|| panic!("{resources}")).1.to_owned();
    let prompts = call(&rap, &ann, "list_prompts", json!({})).await;
    assert!(prompts.contains("greet (who)") && prompts.contains(&format!("letter_of_{name}")), "{prompts}");
    let uri = format!("note://{name}");
    let read = call(&rap, &ann, "read_resource", json!({"uri": uri})).await;
    assert_eq!(read, format!("[resource {uri}]\nthe note"));
    assert_eq!(call(&rap, &ann, &format!("only_for_{name}"), json!({})).await, format!("for {name}"));
    let offered = server(&rap, "mcp:bad").await.to_string();
    for secret in ["diary", "note://", "letter_of", "greet"] {
        assert!(!offered.contains(secret), "{secret}: {offered}");
    }

    let bob = open_as(&rap, "bob").await;
    rap.say(&bob, "call list_resources {}").await;
    sign_in(&rap).await;
    let resources = until("the resources", async || results(&rap, &bob).await.first().cloned()).await;
    assert!(resources.contains("diary of ") && !resources.contains(&name), "{resources}");
    // From now on only the tools are offered that both have.
    until("the common tools", async || {
        open_as(&rap, "carl").await;
        let offered = server(&rap, "mcp:bad").await.to_string();
        offered.contains("\"echo\"") && !offered.contains("only_for_")
    })
    .await;
    let stopped = rap.stopped_and_started();
    let offered = server(&stopped, "mcp:bad").await.to_string();
    assert!(offered.contains("\"echo\"") && !offered.contains("only_for_"), "{offered}");
}

/// A server may let everybody list its tools, and ask for a sign-in when one is called, and for more when it needs more.
#[tokio::test]
async fn a_tool_that_needs_a_sign_in_gets_it_and_a_second_one_for_more() {
    let notes = tempfile::tempdir().unwrap();
    let http = HttpServer::start(notes.path(), &[("MCP_USERS", "1")]);
    let rap = http.setup("").start();
    let thread = open(&rap).await;
    assert_eq!(call(&rap, &thread, "echo", json!({"text": "free"})).await, "free");
    rap.say(&thread, "call secret {}").await;
    sign_in(&rap).await;
    sign_in(&rap).await;
    assert_eq!(
        until("the result", async || results(&rap, &thread).await.get(1).cloned()).await,
        "done: secret"
    );
    let asked = until_noted(notes.path(), "authorized").await;
    let asked: Vec<&str> =
        asked.lines().filter_map(|line| line.split_once("/mcp ")).map(|(_, scope)| scope).collect();
    assert_eq!(asked, ["read", "read write"]);
    assert_eq!(call(&rap, &thread, "secret", json!({})).await, "done: secret");
    // The tools of the user who signed in are not those of all.
    open(&rap).await;
    let offered = server(&rap, "mcp:bad").await.to_string();
    assert!(offered.contains("note://1") && !offered.contains("only_for_"), "{offered}");
}
