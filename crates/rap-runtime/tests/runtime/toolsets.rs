//! Toolsets: fetched at the first model request of a session, kept for the session, and valid only as a whole.

use std::time::Duration;

use rap_runtime::{Limits, ToolServer};
use rap_testkit::peer::Reply;
use rap_testkit::tools::{DISCOVERY, INVOKE, tool, with};
use rap_testkit::{Tools, until};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use crate::local::{LocalRuntime, tool_server};

/// Tool names and errors of each server in `/v1/tools`.
async fn servers(rap: &LocalRuntime) -> Vec<(Vec<String>, Vec<String>)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let of = |server: &Value| {
        let tools = server["tools"].as_array().unwrap().iter().map(|tool| text(&tool["name"])).collect();
        (tools, server["errors"].as_array().unwrap().iter().map(text).collect())
    };
    rap.listing("tools").await.iter().map(of).collect()
}

/// Sends a message in a new thread and waits for the answer. Returns the thread and the lines after the message.
async fn asked(rap: &LocalRuntime, message: &str) -> (String, Vec<String>) {
    let thread = rap.open(message).await;
    rap.until_idle(&thread).await;
    let transcript = rap.transcript(&thread).await;
    (thread, transcript[1..].to_vec())
}

/// Proves: LC-36
#[tokio::test]
async fn discovery_happens_at_the_first_model_request_of_a_session() {
    let tools = Tools::start().await;
    let rap = LocalRuntime::with(vec![tool_server(&tools, Some("tool-token"))], Limits::default()).await;
    let thread = rap.post("/v1/threads", &json!({})).await.expect(201)["id"].as_str().unwrap().to_owned();
    rap.get("/readyz").await.expect(200);
    assert_eq!(tools.count(DISCOVERY), 0);
    for _ in 0..2 {
        rap.say(&thread, "say hello").await;
        rap.until_idle(&thread).await;
        assert_eq!(tools.count(DISCOVERY), 1);
    }
    let asked = tools.next(DISCOVERY).await;
    assert_eq!((asked.method.as_str(), asked.header("authorization")), ("GET", Some("Bearer tool-token")));
    let other = rap.open("say hello").await;
    rap.until_idle(&other).await;
    assert_eq!(tools.count(DISCOVERY), 2, "a new session asks anew");
}

/// Proves: LC-36
#[tokio::test]
async fn a_new_session_sees_the_new_tools_and_a_known_one_keeps_what_it_has() {
    let tools = Tools::offering("bench", &["old"]).await;
    let rap = LocalRuntime::start(&tools).await;
    let (known, _) = asked(&rap, "say hello").await;
    tools.offer(tools.document("bench", "2", vec![tool("new")]));
    rap.say(&known, "call new").await;
    rap.until_line(&known, "assistant: new: Error: there is no tool `new`; available tools: old").await;
    let (_, transcript) = asked(&rap, "call old").await;
    assert_eq!(transcript[1], "result call_1_1: Error: there is no tool `old`; available tools: new");
    rap.open("call new").await;
    assert_eq!(tools.invocation().await.request.body["toolset_version"], "2");
}

#[tokio::test]
async fn one_invalid_tool_makes_its_toolset_invalid_and_leaves_the_others_usable() {
    let (bad, good) = (Tools::start().await, Tools::offering("good", &["help"]).await);
    let nonsense = with(tool("broken"), json!({"inputSchema": {"type": "nonsense"}}));
    bad.offer(bad.document("bench", "1", vec![tool("work"), nonsense]));
    let rap =
        LocalRuntime::with(vec![tool_server(&bad, None), tool_server(&good, None)], Limits::default()).await;
    let (thread, _) = asked(&rap, "call work").await;
    let transcript = rap.transcript(&thread).await;
    let notice = transcript.iter().find(|line| line.starts_with("notice: ")).unwrap();
    let expected = format!(
        "notice: the tools of {} are not available: the toolset is not valid: $.tools[1].inputSchema",
        bad.url
    );
    assert!(notice.starts_with(&expected), "{notice}");
    rap.until_line(&thread, "assistant: work: Error: there is no tool `work`; available tools: help").await;
    let servers = servers(&rap).await;
    assert!(servers[0].0.is_empty() && servers[0].1[0].contains("$.tools[1].inputSchema"), "{servers:?}");
    assert_eq!(servers[1], (vec!["help".to_owned()], vec![]));
    assert_eq!(bad.count(INVOKE), 0);
    // The same problem is reported once.
    rap.say(&thread, "say again").await;
    rap.until_line(&thread, "assistant: again").await;
    let notices = rap.transcript(&thread).await.iter().filter(|line| line.starts_with("notice: ")).count();
    assert_eq!(notices, 1);
}

#[tokio::test]
async fn a_tool_name_used_by_two_servers_is_offered_by_neither() {
    let first = Tools::offering("first", &["work", "one"]).await;
    let second = Tools::offering("second", &["work", "two"]).await;
    let rap =
        LocalRuntime::with(vec![tool_server(&first, None), tool_server(&second, None)], Limits::default())
            .await;
    let (_, transcript) = asked(&rap, "call work").await;
    assert_eq!(transcript[1], "result call_1_1: Error: there is no tool `work`; available tools: one, two");
    let servers = servers(&rap).await;
    for (server, other) in [(&servers[0], &second), (&servers[1], &first)] {
        assert_eq!(server.1, [format!("work: not offered; {} has a tool of the same name", other.url)]);
    }
    rap.open("call one\ncall two").await;
    first.invocation().await;
    second.invocation().await;
}

/// Proves: SE-14
#[tokio::test]
async fn a_server_cannot_offer_the_name_of_a_built_in_tool() {
    let tools = Tools::offering("bench", &["cancel_subscription", "work"]).await;
    let rap = LocalRuntime::start(&tools).await;
    let (_, transcript) = asked(&rap, "call cancel_subscription {\"tool_call_id\": \"x\"}").await;
    assert_eq!(
        transcript[1],
        "result call_1_1: Error: this thread has no active subscription `x`; it has none"
    );
    assert_eq!(tools.count(INVOKE), 0);
    let servers = servers(&rap).await;
    assert_eq!(servers[0].1, ["cancel_subscription: not offered; it is the name of a built-in tool"]);
    rap.open("call work").await;
    tools.invocation().await;
}

/// Proves: LC-21, LC-36, LC-40
#[tokio::test]
async fn an_existing_session_continues_without_discovery_and_a_new_one_gets_a_notice() {
    let (flaky, good) = (Tools::start().await, Tools::offering("good", &["help"]).await);
    let rap =
        LocalRuntime::with(vec![tool_server(&flaky, None), tool_server(&good, None)], Limits::default())
            .await;
    let (known, _) = asked(&rap, "say hello").await;
    flaky.answer_always(DISCOVERY, Reply::Status(500));
    rap.say(&known, "call work").await;
    flaky.invocation().await.returns("still here").await;
    rap.until_line(&known, "assistant: work: still here").await;

    let rap = rap.restarted().await;
    rap.say(&known, "call work").await;
    flaky.invocation().await.returns("after the restart").await;
    rap.until_line(&known, "assistant: work: after the restart").await;
    assert_eq!(flaky.count(DISCOVERY), 1, "nobody asked for what was known");

    let new = rap.open("call work\ncall help").await;
    good.invocation().await.returns("help").await;
    flaky.invocation().await.returns("as ever").await;
    rap.until_idle(&new).await;
    let notice = format!(
        "notice: the tools of {} could not be fetched: discovery was answered 500; the last known ones \
         are used",
        flaky.url
    );
    rap.until_line(&new, &notice).await;
    assert_eq!(flaky.count(DISCOVERY), 2, "a new session fetches anew");
}

/// Proves: LC-40
#[tokio::test]
async fn a_server_that_is_down_leaves_the_others_usable() {
    let (mut down, slow, good) = (
        Tools::start().await,
        Tools::offering("slow", &["linger"]).await,
        Tools::offering("good", &["help"]).await,
    );
    down.stop().await;
    slow.answer_always(DISCOVERY, Reply::Hang);
    let limits = Limits { discovery_timeout: Duration::from_millis(300), ..Limits::default() };
    let servers_of = [&down, &slow, &good].map(|tools| tool_server(tools, None));
    let rap = LocalRuntime::with(servers_of.into(), limits).await;
    let thread = rap.open("call help").await;
    good.invocation().await.returns("here").await;
    rap.until_line(&thread, "assistant: help: here").await;
    let transcript = rap.transcript(&thread).await;
    let notices: Vec<&String> = transcript.iter().filter(|line| line.starts_with("notice: ")).collect();
    assert_eq!(notices.len(), 2, "{transcript:?}");
    assert!(notices[0].contains(&format!(
        "the tools of {} are not available: discovery failed: could not connect",
        down.url
    )));
    assert!(notices[1].contains(&format!("the tools of {} are not available: ", slow.url)), "{}", notices[1]);
    let servers = servers(&rap).await;
    assert!(servers[..2].iter().all(|(tools, errors)| tools.is_empty() && errors.len() == 1), "{servers:?}");
}

#[tokio::test]
async fn the_listing_of_tools_discovers_unknown_servers() {
    let tools = Tools::start().await;
    let rap = LocalRuntime::start(&tools).await;
    let servers = rap.listing("tools").await;
    let server = &servers[0];
    assert_eq!(
        (&server["url"], &server["name"], &server["version"]),
        (&json!(tools.url), &json!("bench"), &json!("1"))
    );
    assert_eq!(server["tools"][0], tool("work"));
    rap.listing("tools").await;
    assert_eq!(tools.count(DISCOVERY), 1);
}

/// Limits under which a model request is sent because of the short wait, never because a fetch has ended.
fn short_wait() -> Limits {
    let (discovery_timeout, discovery_wait) = (Duration::from_secs(600), Duration::from_millis(200));
    Limits { discovery_timeout, discovery_wait, ..Limits::default() }
}

/// Sends a message until it leads to an invocation, because the tools of a server have joined.
async fn until_invoked(rap: &LocalRuntime, thread: &str, message: &str, tools: &Tools) {
    until("the tool is offered", async || {
        rap.say(thread, message).await;
        rap.until(thread, "idle or waiting", |row| row["status"] != "running").await;
        tools.count(INVOKE) > 0
    })
    .await;
}

#[tokio::test]
async fn a_question_goes_out_without_a_server_that_hangs_and_its_tools_join_at_a_later_one() {
    let (slow, good) = (Tools::offering("slow", &["linger"]).await, Tools::offering("good", &["help"]).await);
    let document = slow.document("slow", "1", vec![tool("linger")]);
    slow.answer_always(DISCOVERY, Reply::Hang);
    let rap =
        LocalRuntime::with(vec![tool_server(&slow, None), tool_server(&good, None)], short_wait()).await;
    let mut threads = Vec::new();
    for _ in 0..2 {
        let thread = rap.open("call help").await;
        good.invocation().await.returns("here").await;
        rap.until_line(&thread, "assistant: help: here").await;
        threads.push(thread);
    }
    let listed = servers(&rap).await;
    assert_eq!(listed[0], (vec![], vec!["discovery has not been answered yet; try again".to_owned()]));
    assert_eq!(listed[1], (vec!["help".to_owned()], vec![]));
    slow.offer(document);
    slow.release();
    until_invoked(&rap, &threads[0], "call linger", &slow).await;
    slow.invocation().await.returns("at last").await;
    rap.until_line(&threads[0], "assistant: linger: at last").await;
    rap.say(&threads[1], "call linger").await;
    slow.invocation().await.returns("here too").await;
    assert_eq!(slow.count(DISCOVERY), 1, "sessions share a fetch, and it is saved for all of them");
    assert!(rap.transcript(&threads[0]).await.iter().all(|line| !line.starts_with("notice: ")));
}

#[tokio::test]
async fn a_fetch_that_fails_after_the_question_went_out_is_told_later() {
    let tools = Tools::start().await;
    tools.answer_always(DISCOVERY, Reply::Hang);
    let rap = LocalRuntime::with(vec![tool_server(&tools, None)], short_wait()).await;
    let (thread, transcript) = asked(&rap, "say hello").await;
    assert_eq!(transcript, ["assistant: hello"]);
    tools.answer_always(DISCOVERY, Reply::Status(500));
    tools.release();
    let notice = format!("notice: the tools of {} are not available: discovery was answered 500", tools.url);
    rap.until_line(&thread, &notice).await;
}

/// There is one slot of the model. The session that waits for its tools does not hold it.
#[tokio::test]
async fn a_session_that_waits_for_discovery_holds_no_slot_of_the_model() {
    let tools = Tools::start().await;
    let minute = Duration::from_secs(600);
    let limits = Limits {
        model_concurrency: 1,
        discovery_wait: minute,
        discovery_timeout: minute,
        ..Limits::default()
    };
    let rap = LocalRuntime::with(vec![tool_server(&tools, None)], limits).await;
    let (known, _) = asked(&rap, "say hello").await;
    tools.answer_always(DISCOVERY, Reply::Hang);
    let waiting = rap.open("call work").await;
    until("discovery is asked", async || tools.count(DISCOVERY) > 1).await;
    for text in ["one", "two"] {
        rap.say(&known, &format!("say {text}")).await;
        rap.until_line(&known, &format!("assistant: {text}")).await;
    }
    assert_eq!(rap.transcript(&waiting).await, ["user: call work"]);
    // Somebody else's message does not end the wait, but the end of the fetch does.
    tools.offer(tools.document("bench", "2", vec![tool("work")]));
    tools.release();
    let call = tools.invocation().await;
    assert_eq!(call.thread(), waiting);
    assert_eq!(call.request.body["toolset_version"], "2");
}

/// The fetch of the new session is still running while it uses what another session has.
#[tokio::test]
async fn a_known_toolset_stands_in_until_the_new_one_arrives() {
    let tools = Tools::offering("bench", &["old"]).await;
    let rap = LocalRuntime::with(vec![tool_server(&tools, None)], short_wait()).await;
    asked(&rap, "say hello").await;
    tools.answer_always(DISCOVERY, Reply::Hang);
    let thread = rap.open("call old").await;
    let call = tools.invocation().await;
    assert_eq!(call.request.body["toolset_version"], "1");
    call.returns("here").await;
    rap.until_line(&thread, "assistant: old: here").await;
    let before = tools.count(INVOKE);
    tools.offer(tools.document("bench", "2", vec![tool("new")]));
    tools.release();
    until("the new toolset is offered", async || {
        rap.say(&thread, "call new").await;
        rap.until(&thread, "idle or waiting", |row| row["status"] != "running").await;
        tools.count(INVOKE) > before
    })
    .await;
    assert_eq!(tools.invocation().await.request.body["toolset_version"], "2");
}

/// A server that sends a byte from time to time is not faster than one that sends nothing.
#[tokio::test]
async fn a_server_that_drips_its_toolset_has_the_same_time_as_any_other() {
    let drips = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", drips.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut connection, _) = drips.accept().await.unwrap();
        connection.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n").await.unwrap();
        while connection.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    let limits = Limits { discovery_timeout: Duration::from_millis(300), ..Limits::default() };
    let rap = LocalRuntime::with(vec![ToolServer::new(url.clone())], limits).await;
    let (thread, _) = asked(&rap, "say hello").await;
    let told = async || {
        let start = format!("notice: the tools of {url} are not available: discovery ");
        rap.transcript(&thread).await.into_iter().find(|line| line.starts_with(&start))
    };
    until("a notice", told).await;
}

#[tokio::test]
async fn large_toolsets_are_listed_in_pages() {
    let mut tools = Vec::new();
    for name in ["first", "second", "third"] {
        let server = Tools::start().await;
        let large =
            |number| with(tool(&format!("{name}_{number}")), json!({"description": "x".repeat(60 * 1024)}));
        server.offer(server.document(name, "1", (0..10).map(large).collect()));
        tools.push(server);
    }
    let servers = tools.iter().map(|tools| tool_server(tools, None)).collect();
    let rap = LocalRuntime::with(servers, Limits::default()).await;
    let page = async |path: String| {
        let page = rap.get(&path).await.expect(200);
        let names = page["servers"].as_array().unwrap().iter().map(|server| server["name"].clone());
        (names.collect::<Vec<Value>>(), page["next_cursor"].clone())
    };
    let (first, cursor) = page("/v1/tools".into()).await;
    assert_eq!(first, ["first", "second"]);
    let second = page(format!("/v1/tools?cursor={}", cursor.as_str().unwrap())).await;
    assert_eq!(second, (vec![json!("third")], Value::Null));
}
