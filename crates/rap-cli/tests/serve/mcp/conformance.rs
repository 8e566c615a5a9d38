//! The bridge as the client in the official conformance suite. The suite starts a server for each scenario, and a
//! client that it waits for; here that is a script which waits for the test.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use rap_testkit::{Rap, Setup, node, until};
use serde_json::{Value, json};

use super::{results, server};

/// Scenarios about what the bridge does. The others need a client without users (`client-credentials`,
/// `cross-app-access`), a client id that is a URL (`basic-cimd`), or are drafts.
const SCENARIOS: [&str; 20] = [
    "initialize",
    "tools_call",
    "elicitation-sep1034-client-defaults",
    "sse-retry",
    "auth/metadata-default",
    "auth/metadata-var1",
    "auth/metadata-var2",
    "auth/metadata-var3",
    "auth/scope-from-www-authenticate",
    "auth/scope-from-scopes-supported",
    "auth/scope-omitted-when-undefined",
    "auth/scope-step-up",
    "auth/token-endpoint-auth-basic",
    "auth/token-endpoint-auth-post",
    "auth/token-endpoint-auth-none",
    "auth/pre-registration",
    "auth/2025-03-26-oauth-metadata-backcompat",
    "auth/2025-03-26-oauth-endpoint-fallback",
    "auth/scope-retry-limit",
    "auth/resource-mismatch",
];

/// Scenarios in which nobody can sign in.
const REFUSED: [&str; 2] = ["auth/scope-retry-limit", "auth/resource-mismatch"];

/// Writes the URL of the server and the context of the scenario to files, and waits until the test is done.
const CLIENT: &str = r#"#!/bin/sh
printf %s "$MCP_CONFORMANCE_CONTEXT" > context
printf %s "$1" > url.new && mv url.new url
while [ ! -e done ]; do sleep 0.02; done
"#;

/// Follows a page of a sign-in like a browser, up to the page of the runtime.
async fn visit(url: &str) {
    let mut url = url.to_owned();
    for _ in 0..5 {
        let (host, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
        let request = format!("GET /{path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        let address = host.replace("localhost", "127.0.0.1");
        let answer = rap_testkit::http::exchange(&format!("http://{address}"), request.as_bytes()).await;
        let next = answer.raw_head.lines().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            name.eq_ignore_ascii_case("location").then(|| value.trim().to_owned())
        });
        match next {
            Some(next) => url = next,
            None => return assert_eq!(answer.status, 200, "{answer:?}"),
        }
    }
}

/// Calls a tool, and does what a person would do: signs in, and gives the first answer to each question.
async fn call(rap: &Rap, thread: &str, tool: &str, arguments: &Value) -> String {
    let before = results(rap, thread).await.len();
    rap.say(thread, &format!("call {tool} {arguments}")).await;
    let mut visited = HashSet::new();
    loop {
        if let Some(result) = results(rap, thread).await.get(before) {
            return result.clone();
        }
        for item in rap.get("/v1/inbox").await.expect(200)["items"].as_array().unwrap() {
            match item["auth_url"].as_str() {
                Some(url) if visited.insert(url.to_owned()) => visit(url).await,
                Some(_) => {}
                None => {
                    let id = item["call_id"].as_str().unwrap();
                    // It may have been answered already.
                    rap.post(&format!("/v1/threads/{thread}/calls/{id}/choice"), &json!({"selected": 0}))
                        .await;
                }
            }
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

/// Opens a thread of the one user.
async fn open(rap: &Rap) -> String {
    let opened = rap.post("/v1/threads", &json!({"user_id": "ann", "message": "hello"})).await.expect(201);
    let thread = opened["id"].as_str().unwrap().to_owned();
    rap.until_idle(&thread).await;
    thread
}

async fn names(rap: &Rap) -> Vec<String> {
    let tools = server(rap, "mcp:suite").await["tools"].clone();
    tools.as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
}

/// Uses all tools of the server.
async fn use_server(directory: &Path, scenario: &str) {
    let url = until("the URL", async || fs::read_to_string(directory.join("url")).ok()).await;
    let context: Value =
        serde_json::from_str(&fs::read_to_string(directory.join("context")).unwrap()).unwrap_or_default();
    let mut lines = format!("name = \"suite\"\nurl = {url:?}");
    if let (Some(id), Some(secret)) = (context["client_id"].as_str(), context["client_secret"].as_str()) {
        lines.push_str(&format!("\noauth = {{ client_id = {id:?}, client_secret = {secret:?} }}"));
    }
    let rap = Setup::new().mcp_lines(&lines).start();
    if scenario == "initialize" {
        return rap.until_logged("has no tools").await;
    }
    if names(&rap).await == ["sign_in"] {
        let thread = open(&rap).await;
        let signed_in = call(&rap, &thread, "sign_in", &json!({})).await;
        if REFUSED.contains(&scenario) {
            return assert!(signed_in.starts_with("Error: "), "{scenario}: {signed_in}");
        }
        assert!(signed_in.starts_with("signed in"), "{scenario}: {signed_in}");
    }
    let thread = open(&rap).await;
    for name in names(&rap).await {
        let arguments = if name == "add_numbers" { json!({"a": 2, "b": 3}) } else { json!({}) };
        let result = call(&rap, &thread, &name, &arguments).await;
        assert!(!result.starts_with("Error: "), "{scenario}: {result}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_conformance_suite_for_clients_passes_where_it_applies() {
    let home = node::mcp_packages(env!("CARGO_TARGET_TMPDIR"));
    let only = std::env::var("SCENARIO").ok();
    for scenario in SCENARIOS.into_iter().filter(|name| only.as_deref().is_none_or(|only| only == *name)) {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("client.sh"), CLIENT).unwrap();
        let mut suite = Command::new(node::program(&home, "node"));
        suite.arg(node::program(&home, "conformance")).args(["client", "--command", "sh client.sh"]);
        suite.args(["--scenario", scenario]).current_dir(directory.path());
        let suite = suite.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        use_server(directory.path(), scenario).await;
        fs::write(directory.path().join("done"), "").unwrap();
        let output = suite.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{scenario}: {said}");
    }
}
