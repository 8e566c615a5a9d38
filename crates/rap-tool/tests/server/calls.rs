//! Calls: acceptance, validation, execution and results.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{Gate, Journal, Received, Runtime, Server, ToolProcess, data_dir, short_pauses};
use rap_protocol::parse_toolset;
use rap_testkit::http::{exchange, request};
use rap_tool::prelude::*;
use rap_tool::{Content, Image, Limits, Segment};
use serde_json::{Value, json};

/// Returns its text.
#[derive(Deserialize, JsonSchema)]
struct Echo {
    /// The text to return.
    text: String,
}

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

/// Books a room.
#[derive(Deserialize, JsonSchema)]
#[allow(dead_code, reason = "only the schema matters")]
struct Book {
    guests: Vec<Guest>,
    #[schemars(range(min = 1, max = 30))]
    nights: u32,
}

#[derive(Deserialize, JsonSchema)]
#[allow(dead_code, reason = "only the schema matters")]
struct Guest {
    name: String,
}

async fn echo(args: Echo, _: Call) -> Result<String> {
    Ok(format!("echo {}", args.text))
}

async fn book(_: Book, _: Call) -> Result<String> {
    Ok("booked".into())
}

fn server() -> ToolServer {
    ToolServer::new("test").limits(short_pauses()).tool("echo", echo).tool("book", book)
}

/// A server with a tool `wait` that waits at the gate and counts its runs.
fn waiting(gate: &Gate, runs: &Arc<AtomicUsize>) -> ToolServer {
    let (gate, runs) = (gate.clone(), Arc::clone(runs));
    server().tool("wait", move |_: Nothing, _: Call| {
        let (gate, runs) = (gate.clone(), Arc::clone(&runs));
        async move {
            runs.fetch_add(1, Ordering::SeqCst);
            gate.pass().await;
            Ok("waited")
        }
    })
}

pub async fn discover(url: &str) -> Value {
    let get = "GET /.well-known/rap-toolset HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let answer = exchange(url, get).await;
    assert_eq!(answer.status, 200);
    assert!(answer.head.contains("content-type: application/json"), "{}", answer.head);
    answer.body
}

/// Checks that a result is an error without internal details of the server.
#[track_caller]
fn assert_plain_error(result: &Received) {
    assert_eq!(result.body["type"], "tool_result");
    let text = result.text();
    assert!(text.starts_with("Error: ") && text.len() > "Error: ".len(), "{text}");
    for leak in ["/", "\\", ".rs", "panicked", "backtrace", "stack", "RUST_", "thread '"] {
        assert!(!text.contains(leak), "{leak:?} in {text}");
    }
}

/// Makes a call whose result shows that everything before it has been processed.
async fn barrier(server: &Server, runtime: &mut Runtime) {
    server.caller().accepted(&runtime.invocation("echo", "last", "last", json!({"text": "end"}))).await;
    let last = runtime.next().await;
    assert_eq!((last.name.as_str(), last.text()), ("last", "echo end"));
}

/// Proves: LC-01, LC-02, TR-03, TR-11, TR-12, LC-05, LC-11
#[tokio::test]
async fn a_call_is_acknowledged_and_its_result_delivered() {
    let data = data_dir();
    let server = ToolProcess::start("kitchen_sink", data.path(), &[]);
    let mut runtime = Runtime::start().await;
    let call = runtime.invocation("echo", "thread_1", "call_1", json!({"text": "hi"}));
    server.caller().accepted(&call).await;
    let result = runtime.next().await;
    assert_eq!(result.name, "call_1");
    let expected = json!({"type": "tool_result", "group_id": "thread_1", "id": "call_1", "text": "echo hi"});
    assert_eq!(result.body, expected);
}

/// Proves: LC-01, LC-02, TR-19
#[tokio::test]
async fn the_toolset_is_served_without_a_token_and_names_an_endpoint_that_works() {
    let data = data_dir();
    let server = Server::start(server().bearer("secret"), data.path()).await;
    let mut runtime = Runtime::start().await;
    let manifest = discover(&server.url).await;
    let toolset = parse_toolset(manifest.to_string().as_bytes()).unwrap();
    assert_eq!(toolset.name, "test");
    let names: Vec<&str> = toolset.tools.iter().map(|tool| tool.name.as_str()).collect();
    assert_eq!(names, ["echo", "book"]);
    assert_eq!(toolset.tools[0].description, "Returns its text.");
    assert_eq!(manifest["tools"][0]["inputSchema"]["required"], json!(["text"]));

    let (base, path) = toolset.endpoint.expose().split_at(server.url.len());
    assert_eq!(base, server.url);
    let call = runtime.invocation("echo", "t", "c", json!({"text": "hi"})).to_string();
    let caller = server.caller().with_token("secret");
    assert_eq!(caller.post(path, call).await, (200, String::new()));
    assert_eq!(runtime.next().await.text(), "echo hi");
}

/// Proves: TR-03, TR-04, LC-05, LC-07
#[tokio::test]
async fn an_invocation_is_acknowledged_before_its_handler_finishes() {
    let (data, gate, runs) = (data_dir(), Gate::closed(), Arc::default());
    let server = Server::start(waiting(&gate, &runs), data.path()).await;
    let mut runtime = Runtime::start().await;
    let caller = server.caller();
    caller.accepted(&runtime.invocation("wait", "t", "slow", json!({}))).await;
    gate.reached().await;
    assert!(caller.is_alive("t", "slow").await);
    // Another call overtakes it, and the first still has no result.
    caller.accepted(&runtime.invocation("echo", "t", "quick", json!({"text": "x"}))).await;
    assert_eq!(runtime.next().await.name, "quick");
    gate.open(1);
    assert_eq!(runtime.next().await.text(), "waited");
}

/// Proves: LC-13
#[tokio::test]
async fn an_invocation_is_in_the_journal_before_it_is_acknowledged() {
    let (data, gate, runs) = (data_dir(), Gate::closed(), Arc::default());
    let server = Server::start(waiting(&gate, &runs), data.path()).await;
    let runtime = Runtime::start().await;
    let journal = Journal::open(data.path());
    for round in 1..=20 {
        server.caller().accepted(&runtime.invocation("wait", "t", &format!("c{round}"), json!({}))).await;
        assert_eq!(journal.number("SELECT count(*) FROM calls WHERE state = 0"), round);
    }
    gate.open(20);
}

#[tokio::test]
async fn an_invocation_that_cannot_be_written_is_answered_503_and_never_runs() {
    let (data, gate, runs) = (data_dir(), Gate::closed(), Arc::<AtomicUsize>::default());
    let server = Server::start(waiting(&gate, &runs), data.path()).await;
    let mut runtime = Runtime::start().await;
    let journal = Journal::open(data.path());
    let call = runtime.invocation("wait", "t", "c", json!({}));

    let blocked = journal.block();
    let answer = exchange(&server.url, request("/invoke", "", &call.to_string())).await;
    assert_eq!(answer.status, 503, "{answer:?}");
    assert!(answer.head.contains("retry-after: 1"), "{}", answer.head);
    drop(blocked);
    assert_eq!(journal.rows(), [0, 0, 0]);

    barrier(&server, &mut runtime).await;
    assert_eq!(runs.load(Ordering::SeqCst), 0);
    server.caller().accepted(&call).await;
    gate.open(1);
    assert_eq!(runtime.next().await.text(), "waited");
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

/// Proves: LC-24, TR-09, LC-27
#[tokio::test]
async fn an_unknown_operation_is_an_error_that_lists_the_tools() {
    let data = data_dir();
    let server = Server::start(server(), data.path()).await;
    let mut runtime = Runtime::start().await;
    server.caller().accepted(&runtime.invocation("ecoh", "t", "c", json!({}))).await;
    let result = runtime.next().await;
    assert_plain_error(&result);
    assert_eq!(result.text(), "Error: there is no tool \"ecoh\"; the tools of this server are: book, echo");
    barrier(&server, &mut runtime).await;
}

/// Proves: LC-25, LC-31, TR-09, TR-23
#[tokio::test]
async fn invalid_arguments_are_an_error_that_names_each_violation() {
    let data = data_dir();
    let server = Server::start(server(), data.path()).await;
    let mut runtime = Runtime::start().await;
    let guest = json!({"name": "Ann"});
    let table = [
        ("missing", json!({"guests": []}), "nights"),
        ("range", json!({"guests": [], "nights": 31}), "30"),
        ("type", json!({"guests": [], "nights": "two"}), "nights"),
        ("deep", json!({"guests": [guest, {"name": 7}], "nights": 1}), "guests"),
    ];
    for (id, arguments, named) in table {
        server.caller().accepted(&runtime.invocation("book", "t", id, arguments)).await;
        let result = runtime.next().await;
        assert_eq!(result.name, id);
        let text = result.text();
        assert!(text.starts_with("Error: the arguments do not match the schema of book: "), "{text}");
        assert!(text.contains(named), "{text}");
    }
    server
        .caller()
        .accepted(&runtime.invocation("book", "t", "deep2", json!({"guests": [{}, 1], "nights": 1})))
        .await;
    let text = runtime.next().await.text().to_owned();
    assert!(text.contains("guests[0]") && text.contains("guests[1]"), "each violation has its path: {text}");
    barrier(&server, &mut runtime).await;
}

/// The list needs more steps than an async worker may take for a validation.
#[tokio::test]
async fn a_wrong_item_in_a_long_list_is_named() {
    let data = data_dir();
    let server = Server::start(server(), data.path()).await;
    let mut runtime = Runtime::start().await;
    let mut guests = vec![json!({"name": "Ann"}); 50_000];
    guests[49_999] = json!({"name": 7});
    let invocation = runtime.invocation("book", "t", "long", json!({"guests": guests, "nights": 1}));
    server.caller().accepted(&invocation).await;
    let text = runtime.next().await.text().to_owned();
    assert_eq!(
        text,
        "Error: the arguments do not match the schema of book: $.guests[49999].name: 7 is not of type \"string\""
    );
    barrier(&server, &mut runtime).await;
}

/// Proves: LC-10, LC-26, LC-27, LC-33
#[tokio::test]
async fn a_handler_failure_is_one_error_result_that_leaks_nothing() {
    async fn message(_: Nothing, _: Call) -> Result<String> {
        Err(Error::new("there is no such city; ask for a larger one nearby"))
    }
    async fn io_error(_: Nothing, _: Call) -> Result<String> {
        let why = "cannot open /var/lib/secret/token.txt at src/store.rs:10:5\n   0: backtrace::capture";
        Err(std::io::Error::other(why))?
    }
    async fn missing(_: Nothing, _: Call) -> Result<String> {
        std::fs::read_to_string("/nonexistent/secret/file")?;
        Ok("read".into())
    }
    async fn panics(_: Nothing, _: Call) -> Result<String> {
        panic!("at /home/me/secret")
    }
    async fn silent(_: Nothing, _: Call) -> Result<String> {
        Err(Error::new(" "))
    }
    let data = data_dir();
    let tools = server()
        .tool("message", message)
        .tool("io_error", io_error)
        .tool("missing", missing)
        .tool("panics", panics)
        .tool("silent", silent)
        .tool("panics_at_once", |args: Nothing, call: Call| {
            assert!(call.is_cancelled(), "at /home/me/secret");
            panics(args, call)
        });
    let server = Server::start(tools, data.path()).await;
    let mut runtime = Runtime::start().await;
    let table = [
        ("message", "Error: there is no such city; ask for a larger one nearby"),
        ("io_error", "Error: cannot open [path] at [path]"),
        ("missing", "Error: No such file or directory (os error 2)"),
        ("silent", "Error: the tool failed without an error message"),
        ("panics", "Error: the tool failed unexpectedly; "),
        ("panics_at_once", "Error: the tool failed unexpectedly; "),
    ];
    for (tool, expected) in table {
        server.caller().accepted(&runtime.invocation(tool, "t", tool, json!({}))).await;
        let result = runtime.next().await;
        assert_eq!(result.name, tool);
        assert_plain_error(&result);
        assert!(result.text().starts_with(expected), "{}", result.text());
    }
    barrier(&server, &mut runtime).await;
}

/// Proves: TR-08, LC-12
#[tokio::test]
async fn an_invocation_for_another_version_of_the_toolset_is_a_conflict() {
    let data = data_dir();
    let server = Server::start(server(), data.path()).await;
    let mut runtime = Runtime::start().await;
    let caller = server.caller();
    let version = discover(&server.url).await["version"].clone();
    let with = |id: &str, version: &Value| {
        let mut call = runtime.invocation("echo", "t", id, json!({"text": id}));
        call["toolset_version"] = version.clone();
        call
    };
    let (stale, current, null) = (with("stale", &json!("0")), with("c1", &version), with("c2", &Value::Null));

    let (status, answer) = caller.invoke(&stale).await;
    assert_eq!(status, 409);
    assert!(answer.contains("stale_toolset"), "{answer}");
    assert_eq!(Journal::open(data.path()).rows(), [0, 0, 0]);
    caller.accepted(&current).await;
    assert_eq!(runtime.next().await.text(), "echo c1");
    caller.accepted(&null).await;
    assert_eq!(runtime.next().await.text(), "echo c2");

    // A repeat is recognised before the version is checked.
    let mut repeat = current.clone();
    repeat["toolset_version"] = json!("0");
    caller.accepted(&repeat).await;
    barrier(&server, &mut runtime).await;
}

/// Proves: LC-12
#[tokio::test]
async fn the_version_changes_with_names_and_schemas_but_not_with_descriptions() {
    #[derive(Deserialize, JsonSchema)]
    #[schemars(rename = "Book")]
    #[allow(dead_code, reason = "only the schema matters")]
    struct Longer {
        guests: Vec<Guest>,
        #[schemars(range(min = 1, max = 31))]
        nights: u32,
    }
    let version = async |server: ToolServer| {
        let data = data_dir();
        let server = Server::start(server, data.path()).await;
        let version = discover(&server.url).await["version"].as_str().unwrap().to_owned();
        server.stop().await;
        version
    };
    let base = || ToolServer::new("test").tool("echo", echo);
    let one = version(base().tool("book", book)).await;
    let mut others = HashSet::from([one.clone()]);
    assert_eq!(version(base().tool("book", book).bearer("t").limits(Limits::default())).await, one);
    assert!(others.insert(version(base().tool("book", |_: Longer, _: Call| async { Ok("") })).await));
    assert!(others.insert(version(base()).await));
    let described = base().description("New.").offer(Tool::new("book", book).description("Other."));
    assert_eq!(version(described).await, one);
}

/// Proves: LC-09, LC-12, LC-27, TR-09, TR-23
#[tokio::test]
async fn an_invalid_invocation_with_a_valid_address_gets_an_error_result() {
    let data = data_dir();
    let server = Server::start(server(), data.path()).await;
    let mut runtime = Runtime::start().await;
    let table = [
        ("operation", None, "$.operation"),
        ("operation", Some(json!("no spaces")), "$.operation"),
        ("operation", Some(json!(7)), "$.operation"),
        ("operation", Some(json!("../../etc")), "$.operation"),
        ("arguments", None, "$.arguments"),
        ("arguments", Some(json!(null)), "$.arguments"),
        ("arguments", Some(json!(["text"])), "$.arguments"),
        ("arguments", Some(json!("{\"text\": \"x\"}")), "$.arguments"),
        ("thread_ancestors", Some(json!("root")), "$.thread_ancestors"),
        ("thread_ancestors", Some(json!(["root", 7])), "$.thread_ancestors[1]"),
        ("thread_ancestors", Some(json!(["root", ""])), "$.thread_ancestors[1]"),
        ("user_id", Some(json!("")), "$.user_id"),
        ("user_id", Some(json!({})), "$.user_id"),
        ("toolset_version", Some(json!(1)), "$.toolset_version"),
    ];
    for (number, (field, value, path)) in table.into_iter().enumerate() {
        let id = format!("c{number}");
        let mut call = runtime.invocation("echo", "t", &id, json!({"text": "x"}));
        call["call_id"] = json!("second");
        match value {
            Some(value) => call[field] = value,
            None => drop(call.as_object_mut().unwrap().remove(field)),
        }
        server.caller().accepted(&call).await;
        let result = runtime.next().await;
        assert_eq!((&result.body["id"], &result.body["group_id"]), (&json!(id), &json!("t")));
        assert_eq!(result.body["call_id"], "second");
        let expected = format!("Error: the invocation is not valid: {path}: expected ");
        assert!(result.text().starts_with(&expected), "{field}: {}", result.text());
        // Sending it again is a repeat.
        server.caller().accepted(&call).await;
    }
    barrier(&server, &mut runtime).await;
}

/// Proves: TR-23
#[tokio::test]
async fn an_invocation_without_a_valid_address_is_400_and_the_answer_names_the_field() {
    let data = data_dir();
    let server = Server::start(server(), data.path()).await;
    let mut runtime = Runtime::start().await;
    let good = runtime.invocation("echo", "t", "c", json!({"text": "x"}));
    let mut bodies = vec![
        (String::new(), "$"),
        ("{".into(), "$"),
        ("[]".into(), "$"),
        ("null".into(), "$"),
        ("\"text\"".into(), "$"),
        (format!("{good}{good}"), "$"),
    ];
    for (field, path) in [("id", "$.id"), ("group_id", "$.group_id"), ("callback_url", "$.callback_url")] {
        for wrong in [Value::Null, json!(7), json!(""), json!([]), json!("a\u{0}b"), json!("x".repeat(9_000))]
        {
            let mut call = good.clone();
            call[field] = wrong;
            bodies.push((call.to_string(), path));
        }
        let mut call = good.clone();
        call.as_object_mut().unwrap().remove(field);
        bodies.push((call.to_string(), path));
    }
    for (body, path) in bodies {
        let (status, answer) = server.caller().post("/invoke", body.clone()).await;
        assert_eq!(status, 400, "{body}");
        let error: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(error["error"]["code"], "invalid");
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("{path}: expected ")), "{body}: {message}");
        assert!(!message.contains("callback/c"), "the message contains the callback URL: {message}");
    }
    assert_eq!(Journal::open(data.path()).rows(), [0, 0, 0]);
    barrier(&server, &mut runtime).await;
}

/// Proves: LC-08, LC-30
#[tokio::test(flavor = "multi_thread")]
async fn the_same_call_fifty_times_at_once_runs_once_and_has_one_result() {
    let (data, gate, runs) = (data_dir(), Gate::closed(), Arc::<AtomicUsize>::default());
    let server = Server::start(waiting(&gate, &runs), data.path()).await;
    let mut runtime = Runtime::start().await;
    let call = runtime.invocation("wait", "t", "c", json!({}));
    let all = (0..50).map(|_| {
        let (caller, call) = (server.caller(), call.clone());
        tokio::spawn(async move { caller.accepted(&call).await })
    });
    for one in all.collect::<Vec<_>>() {
        one.await.unwrap();
    }
    gate.open(50);
    assert_eq!(runtime.next().await.text(), "waited");
    server.caller().until_settled("t", "c").await;
    // Even after the delivery, and with other arguments under the same id.
    server.caller().accepted(&call).await;
    server.caller().accepted(&runtime.invocation("echo", "t", "c", json!({"text": "other"}))).await;
    barrier(&server, &mut runtime).await;
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    assert_eq!(Journal::open(data.path()).number("SELECT count(*) FROM calls WHERE call_id = 'c'"), 1);
}

/// Proves: LC-06, LC-18
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_concurrent_calls_never_mix_callback_urls_or_ids() {
    let (data, gate) = (data_dir(), Gate::closed());
    let gate_of_tool = gate.clone();
    let tools = server().tool("echo_late", move |args: Echo, call: Call| {
        let gate = gate_of_tool.clone();
        async move {
            gate.pass().await;
            echo(args, call).await
        }
    });
    let server = Server::start(tools, data.path()).await;
    let mut runtime = Runtime::start().await;
    let invocation = |number: usize| {
        let (thread, id) = (format!("t{}", number % 37), format!("c{number}"));
        runtime.invocation("echo_late", &thread, &id, json!({"text": format!("{thread} {id}")}))
    };
    let posts: Vec<_> = (0..50)
        .map(|part| {
            let (caller, calls) = (server.caller(), (part * 20..part * 20 + 20).map(invocation));
            let calls: Vec<Value> = calls.collect();
            tokio::spawn(async move {
                for call in calls {
                    caller.accepted(&call).await;
                }
            })
        })
        .collect();
    for post in posts {
        post.await.unwrap();
    }
    for _ in 0..1_000 {
        gate.reached().await;
    }
    // All handlers run at the same time and end at the same time.
    gate.open(1_000);
    let mut seen = HashSet::new();
    for _ in 0..1_000 {
        let result = runtime.next().await;
        let (thread, id) = (result.body["group_id"].as_str().unwrap(), result.body["id"].as_str().unwrap());
        assert_eq!(result.name, id);
        assert_eq!(result.text(), format!("echo {thread} {id}"));
        assert!(seen.insert(result.name.clone()), "{} arrived twice", result.name);
    }
}

#[tokio::test]
async fn a_handler_knows_its_caller_and_the_secondary_id_is_echoed() {
    let data = data_dir();
    let tools = server().tool("who", |_: Nothing, call: Call| async move {
        Ok(Json((
            call.id().clone(),
            call.thread().id().clone(),
            call.ancestors().to_vec(),
            call.user_id().cloned(),
        )))
    });
    let server = Server::start(tools, data.path()).await;
    let mut runtime = Runtime::start().await;
    let mut call = runtime.invocation("who", "child", "c1", json!({}));
    call["call_id"] = json!("fc_1");
    call["thread_ancestors"] = json!(["root", "parent"]);
    call["user_id"] = json!("ann");
    call["x_unknown"] = json!({"is": "ignored"});
    server.caller().accepted(&call).await;
    let result = runtime.next().await;
    assert_eq!(result.text(), r#"["c1","child",["root","parent"],"ann"]"#);
    assert_eq!(result.body["call_id"], "fc_1");
    server.caller().accepted(&runtime.invocation("who", "root", "c2", json!({}))).await;
    let result = runtime.next().await;
    assert_eq!(result.text(), r#"["c2","root",[],null]"#);
    assert_eq!(result.body.get("call_id"), None);
}

#[tokio::test]
async fn results_are_texts_json_or_content_with_a_display_for_people() {
    async fn content(_: Nothing, _: Call) -> Result<Vec<Content>> {
        let image = Image { data: "aGk=".into(), media_type: "image/png".into() };
        Ok(vec![Content::Text { text: "a".into() }, Content::Image(image)])
    }
    async fn display(_: Nothing, _: Call) -> Result<Output> {
        let diff = Segment::Diff { path: "a.txt".into(), patch: "-a\n+b".into() };
        Ok(Output::text("changed").display(diff).display(Segment::Text("a -> b".into())))
    }
    let data = data_dir();
    let tools = server()
        .tool("json", |_: Nothing, _: Call| async { Ok(Json(json!({"n": [1, 2]}))) })
        .tool("content", content)
        .tool("display", display);
    let server = Server::start(tools, data.path()).await;
    let mut runtime = Runtime::start().await;
    let table = [
        ("json", json!({"text": "{\"n\":[1,2]}"})),
        (
            "content",
            json!({"content": [{"type": "text", "text": "a"},
                               {"type": "image", "data": "aGk=", "mediaType": "image/png"}]}),
        ),
        (
            "display",
            json!({"text": "changed",
                   "display_as": [{"type": "diff", "content": {"path": "a.txt", "patch": "-a\n+b"}},
                                  {"type": "text", "content": "a -> b"}]}),
        ),
    ];
    for (tool, mut expected) in table {
        server.caller().accepted(&runtime.invocation(tool, "t", tool, json!({}))).await;
        expected["type"] = json!("tool_result");
        expected["group_id"] = json!("t");
        expected["id"] = json!(tool);
        assert_eq!(runtime.next().await.body, expected);
    }
}

/// Proves: LC-10
#[tokio::test]
async fn a_result_that_every_runtime_would_refuse_becomes_an_error() {
    let data = data_dir();
    let tools = server()
        .tool("large", |_: Nothing, _: Call| async { Ok("x".repeat(8 * 1024 * 1024)) })
        .tool("many", |_: Nothing, _: Call| async { Ok(vec![Content::Text { text: "x".into() }; 257]) })
        .tool("no_image", |_: Nothing, _: Call| async {
            Ok(vec![Content::Image(Image { data: "no base64".into(), media_type: "image/png".into() })])
        });
    let server = Server::start(tools, data.path()).await;
    let mut runtime = Runtime::start().await;
    let table = [("large", "too large"), ("many", "256"), ("no_image", "base64")];
    for (tool, why) in table {
        server.caller().accepted(&runtime.invocation(tool, "t", tool, json!({}))).await;
        let result = runtime.next().await;
        assert_eq!(result.name, tool);
        assert!(result.text().starts_with("Error: ") && result.text().contains(why), "{}", result.text());
    }
    barrier(&server, &mut runtime).await;
}

/// Proves: LC-09, LC-13
#[tokio::test]
async fn more_due_results_than_delivery_slots_are_all_delivered() {
    let data = data_dir();
    let mut runtime = Runtime::start().await;
    runtime.answer_always(503);
    let first = Server::start(server(), data.path()).await;
    for number in 0..30 {
        first
            .caller()
            .accepted(&runtime.invocation("echo", "t", &format!("c{number}"), json!({"text": ""})))
            .await;
        assert_eq!(runtime.next().await.status, 503);
    }
    first.stop().await;
    runtime.pending();
    let due = "SELECT count(*) FROM calls WHERE deliver_at < unixepoch('subsec') * 1000";
    Journal::open(data.path()).until(due, 30).await;

    runtime.answer_always(200);
    let mut limits = short_pauses();
    limits.deliveries = 2;
    let second = Server::start(server().limits(limits), data.path()).await;
    let mut names = HashSet::new();
    for _ in 0..30 {
        assert!(names.insert(runtime.accepted().await.name));
    }
    barrier(&second, &mut runtime).await;
}
