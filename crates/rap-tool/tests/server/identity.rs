//! Identity: a call is identified by caller, callback URL, thread and id, and callers are isolated from each other.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use crate::support::{Caller, Gate, Journal, Runtime, Server, data_dir, short_pauses};
use rap_tool::prelude::*;
use serde_json::json;
use tokio::sync::mpsc;

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

/// Ids that are dangerous in paths, queries and commands.
const HOSTILE_IDS: [&str; 8] = [
    "../../etc/passwd",
    "..",
    "/",
    "a/b\\c",
    "'; DROP TABLE calls; --",
    "$(reboot) `reboot` && reboot",
    "%2e%2e%2fetc%2fpasswd",
    "\u{202e}\u{fdd0}é😀",
];

fn server(gate: &Gate) -> ToolServer {
    let gate = gate.clone();
    ToolServer::new("test").limits(short_pauses()).bearer("one").bearer("two").tool(
        "wait",
        move |_: Nothing, call: Call| {
            let gate = gate.clone();
            async move {
                tokio::select! {
                    () = gate.pass() => Ok(call.thread().key().to_owned()),
                    () = call.cancelled() => Ok("stopped".into()),
                }
            }
        },
    )
}

fn callers(server: &Server) -> [Caller; 2] {
    ["one", "two"].map(|token| server.caller().with_token(token))
}

/// Proves: LC-18
#[tokio::test]
async fn a_call_is_identified_by_caller_callback_url_thread_and_id() {
    let (data, gate) = (data_dir(), Gate::closed());
    let server = Server::start(server(&gate), data.path()).await;
    let mut runtime = Runtime::start().await;
    let [one, two] = callers(&server);
    let call = runtime.invocation("wait", "t", "c", json!({}));
    let mut elsewhere = call.clone();
    elsewhere["callback_url"] = json!(runtime.callback_url("elsewhere"));
    let mut in_other_thread = call.clone();
    in_other_thread["group_id"] = json!("t2");

    one.accepted(&call).await;
    two.accepted(&call).await;
    one.accepted(&elsewhere).await;
    one.accepted(&in_other_thread).await;
    for _ in 0..4 {
        gate.reached().await;
    }
    // Sending each of them again is a repeat.
    one.accepted(&call).await;
    two.accepted(&call).await;
    one.accepted(&elsewhere).await;
    one.accepted(&in_other_thread).await;
    gate.open(100);
    let mut results = Vec::new();
    for _ in 0..4 {
        let result = runtime.next().await;
        assert_eq!(result.body["id"], "c");
        results.push((result.name.clone(), result.body["group_id"].as_str().unwrap().to_owned()));
    }
    results.sort();
    let expected = [("c", "t"), ("c", "t"), ("c", "t2"), ("elsewhere", "t")];
    assert_eq!(results, expected.map(|(name, thread)| (name.to_owned(), thread.to_owned())));
    assert_eq!(Journal::open(data.path()).rows()[0], 4);
    assert!(runtime.pending().is_empty());
}

/// Proves: CN-20, CN-23
#[tokio::test]
async fn a_cancellation_affects_only_calls_of_the_caller() {
    let (data, gate) = (data_dir(), Gate::closed());
    let server = Server::start(server(&gate), data.path()).await;
    let (mut first, mut second) = (Runtime::start().await, Runtime::start().await);
    let [one, two] = callers(&server);
    one.accepted(&first.invocation("wait", "t", "c", json!({}))).await;
    two.accepted(&second.invocation("wait", "t", "c", json!({}))).await;
    one.accepted(&first.invocation("wait", "t", "c2", json!({}))).await;
    one.accepted(&first.invocation("wait", "t2", "c", json!({}))).await;
    for _ in 0..4 {
        gate.reached().await;
    }

    assert_eq!(two.cancel("t", "c").await, (200, String::new()));
    assert_eq!(second.next().await.text(), "stopped");
    two.until_settled("t", "c").await;
    assert!(one.is_alive("t", "c").await && one.is_alive("t", "c2").await && one.is_alive("t2", "c").await);
    gate.open(3);
    for _ in 0..3 {
        assert!(!first.next().await.text().starts_with("Error"));
    }
    assert!(second.pending().is_empty());
}

/// Proves: TC-18, TC-21
#[tokio::test]
async fn closing_a_thread_affects_only_the_thread_of_the_caller() {
    let (data, gate) = (data_dir(), Gate::closed());
    let (closed, mut closings) = mpsc::unbounded_channel();
    let tools = server(&gate).on_close_thread(move |thread| {
        closed.send(thread.key().to_owned()).unwrap();
        async { Ok(()) }
    });
    let server = Server::start(tools, data.path()).await;
    let (mut first, mut second) = (Runtime::start().await, Runtime::start().await);
    let [one, two] = callers(&server);
    one.accepted(&first.invocation("wait", "t", "c", json!({}))).await;
    two.accepted(&second.invocation("wait", "t", "c", json!({}))).await;
    one.accepted(&first.invocation("wait", "t2", "c", json!({}))).await;
    for _ in 0..3 {
        gate.reached().await;
    }

    assert_eq!(two.close("t").await, (200, String::new()));
    let closed = closings.recv().await.unwrap();
    assert!(!two.is_alive("t", "c").await);
    assert!(one.is_alive("t", "c").await && one.is_alive("t2", "c").await);
    gate.open(2);
    let keys = [first.next().await.text().to_owned(), first.next().await.text().to_owned()];
    assert!(!keys.contains(&closed), "the hook ran for the thread of the caller who closed it");
    assert!(second.pending().is_empty() && closings.try_recv().is_err());
}

#[tokio::test]
async fn a_caller_can_query_only_its_own_calls() {
    let (data, gate) = (data_dir(), Gate::closed());
    let server = Server::start(server(&gate), data.path()).await;
    let mut runtime = Runtime::start().await;
    let [one, two] = callers(&server);
    one.accepted(&runtime.invocation("wait", "t", "c", json!({}))).await;
    assert!(one.is_alive("t", "c").await);
    assert!(!one.is_alive("t", "c2").await && !one.is_alive("t2", "c").await);
    assert!(!two.is_alive("t", "c").await);
    gate.open(1);
    runtime.next().await;
    one.until_settled("t", "c").await;
}

/// Proves: TC-21, CN-23
#[tokio::test]
async fn thread_keys_differ_between_callers_and_are_safe_as_file_names() {
    let (data, gate) = (data_dir(), Gate::closed());
    let server = Server::start(server(&gate), data.path()).await;
    let mut runtime = Runtime::start().await;
    gate.open(1_000);
    let mut keys = HashSet::new();
    for caller in callers(&server) {
        for thread in HOSTILE_IDS {
            let mut key = None;
            for round in 0..2 {
                let mut call = runtime.invocation("wait", thread, &format!("c{round}"), json!({}));
                call["callback_url"] = json!(runtime.callback_url("x"));
                caller.accepted(&call).await;
                let result = runtime.next().await;
                assert_eq!(result.body["group_id"], thread);
                let found = result.text().to_owned();
                assert!(found.len() == 32 && found.bytes().all(|byte| byte.is_ascii_hexdigit()), "{found}");
                assert_eq!(*key.get_or_insert_with(|| found.clone()), found, "the key is stable");
            }
            assert!(keys.insert(key.unwrap()), "{thread} shares its key");
        }
    }
    assert_eq!(keys.len(), 2 * HOSTILE_IDS.len());
}

/// Proves: TC-21, CN-23, LC-11
#[tokio::test]
async fn hostile_ids_are_handled_like_any_other() {
    let (data, gate) = (data_dir(), Gate::closed());
    let closings = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&closings);
    let tools = server(&gate).on_close_thread(move |thread| {
        noted.lock().unwrap().push(thread.id().to_string());
        async { Ok(()) }
    });
    let server = Server::start(tools, data.path()).await;
    let mut runtime = Runtime::start().await;
    let caller = server.caller().with_token("one");
    let before: Vec<_> = std::fs::read_dir(data.path()).unwrap().map(|file| file.unwrap().path()).collect();
    for name in HOSTILE_IDS {
        for id in [name, "kept"] {
            let mut call = runtime.invocation("wait", name, id, json!({}));
            call["callback_url"] = json!(runtime.callback_url("x"));
            call["user_id"] = json!(name);
            caller.accepted(&call).await;
            gate.reached().await;
        }
        caller.cancel(name, name).await;
        let result = runtime.next().await;
        assert_eq!((result.body["id"].as_str(), result.text()), (Some(name), "stopped"));
        assert!(caller.is_alive(name, "kept").await, "{name}");
        caller.close(name).await;
        assert!(!caller.is_alive(name, "kept").await, "{name}");
    }
    let after: Vec<_> = std::fs::read_dir(data.path()).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(before, after, "no id was used as a file name");
    Journal::open(data.path()).until("SELECT count(*) FROM closings WHERE pending = 1", 0).await;
    assert_eq!(*closings.lock().unwrap(), HOSTILE_IDS);
    assert!(runtime.pending().is_empty());
}
