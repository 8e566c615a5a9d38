//! Destinations of callbacks: which URLs a server sends to, and what it reveals about them.

use rap_testkit::Process;
use rap_testkit::http::{Response, exchange, request};
use rap_testkit::programs::example;
use rap_tool::UrlPolicy;
use rap_tool::prelude::*;
use serde_json::json;

use crate::support::{Caller, Journal, Runtime, Server, ToolProcess, data_dir, short_pauses};

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

fn tools() -> ToolServer {
    ToolServer::new("echo").limits(short_pauses()).tool("echo", |_: Nothing, _: Call| async { Ok("echo") })
}

#[tokio::test]
async fn a_callback_url_that_leads_to_the_server_itself_is_refused() {
    let data = data_dir();
    let server = Server::start(tools(), data.path()).await;
    let runtime = Runtime::start().await;
    let port = server.url.rsplit(':').next().unwrap().to_owned();
    for host in
        ["127.0.0.1", "localhost", "[::1]", "127.0.0.2", "2130706433", "[::ffff:127.0.0.1]", "0.0.0.0"]
    {
        let mut call = runtime.invocation("echo", "t", "c", json!({}));
        call["callback_url"] = json!(format!("http://{host}:{port}/close_thread"));
        let (status, answer) = server.caller().invoke(&call).await;
        // A name is resolved when the callback is sent.
        let expected = if host == "localhost" { 200 } else { 400 };
        assert_eq!(status, expected, "{host}: {answer}");
    }
    Journal::open(data.path()).until("SELECT count(*) FROM calls WHERE state = 3", 1).await;
    let metrics = get(&server.url, "/metrics").await.text;
    assert!(metrics.contains("rap_tool_given_up_total 1"), "{metrics}");
    assert!(metrics.contains("rap_tool_retried_total 0"), "a forbidden URL is not retried: {metrics}");
}

async fn get(base: &str, path: &str) -> Response {
    let host = base.trim_start_matches("http://");
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    exchange(base, request.as_bytes()).await
}

#[tokio::test]
async fn callbacks_go_only_where_the_policy_permits() {
    for (policy, expected) in
        [(UrlPolicy::Loopback, 200), (UrlPolicy::Private, 400), (UrlPolicy::Public, 400)]
    {
        let (data, mut runtime) = (data_dir(), Runtime::start().await);
        let server = Server::start(tools().callbacks_to(policy), data.path()).await;
        let call = runtime.invocation("echo", "t", "c", json!({}));
        assert_eq!(server.caller().invoke(&call).await.0, expected, "{policy:?}");
        if expected == 200 {
            assert_eq!(runtime.next().await.text(), "echo");
        }
    }
}

#[tokio::test]
async fn only_a_server_on_loopback_sends_callbacks_to_loopback_by_default() {
    let data = data_dir();
    let bind = tools().data(data.path()).bearer("token").public_url("http://127.0.0.1:9");
    let bound = bind.bind("0.0.0.0:0").await.unwrap();
    let url = format!("http://127.0.0.1:{}", bound.local_addr().port());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(bound.run_until(async { drop(stopped.await) }));
    let runtime = Runtime::start().await;
    let caller = Caller::new(&url).with_token("token");
    let (status, answer) = caller.invoke(&runtime.invocation("echo", "t", "c", json!({}))).await;
    assert_eq!(status, 400, "{answer}");
    assert!(answer.contains("$.callback_url"), "{answer}");
    drop(stop);
    running.await.unwrap();
}

/// A status query must not turn a server into a port scanner.
#[tokio::test]
async fn a_status_query_does_not_tell_whether_anything_answers_at_the_callback_url() {
    let data = data_dir();
    let server = Server::start(tools(), data.path()).await;
    let runtime = Runtime::start().await;
    runtime.answer_always(404);
    let caller = server.caller();
    let mut nothing = runtime.invocation("echo", "t", "nothing", json!({}));
    nothing["callback_url"] = json!(format!("http://{}/", free_address()));
    caller.accepted(&nothing).await;
    caller.accepted(&runtime.invocation("echo", "t", "refusing", json!({}))).await;
    Journal::open(data.path()).until("SELECT count(*) FROM calls WHERE state = 3", 1).await;
    let both = async || [caller.is_alive("t", "nothing").await, caller.is_alive("t", "refusing").await];
    assert_eq!(both().await, [true, true]);
    caller.cancel("t", "nothing").await;
    caller.cancel("t", "refusing").await;
    assert_eq!(both().await, [true, true]);
    caller.close("t").await;
    assert_eq!(both().await, [false, false]);
}

/// Returns an address at which nothing listens.
fn free_address() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[tokio::test]
async fn every_answer_forbids_the_guessing_of_its_type() {
    let data = data_dir();
    let server = Server::start(tools(), data.path()).await;
    for path in ["/.well-known/rap-toolset", "/healthz", "/metrics", "/nothing"] {
        let answer = get(&server.url, path).await;
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"), "{path}");
    }
    let answer = exchange(&server.url, request("/invoke", "", "{}")).await;
    assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
}

#[tokio::test]
async fn the_policy_from_the_environment_is_used() {
    let (data, runtime) = (data_dir(), Runtime::start().await);
    let process = ToolProcess::start("kitchen_sink", data.path(), &[("RAP_TOOL_CALLBACKS_TO", "public")]);
    let call = runtime.invocation("echo", "t", "c", json!({"text": "x"}));
    assert_eq!(process.caller().invoke(&call).await.0, 400);
    process.kill();
    let error =
        Process::refused(example("kitchen_sink", data.path(), &[("RAP_TOOL_CALLBACKS_TO", "everywhere")]));
    assert!(error.contains("RAP_TOOL_CALLBACKS_TO must be public, private or loopback"), "{error}");
}
