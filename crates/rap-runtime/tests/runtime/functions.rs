//! Tools that are async functions of the runtime's process, and the example of an embedded runtime.

use std::process::Command;
use std::time::Duration;

use rap_runtime::{Function, FunctionResult, Limits, Runtime, Settings, SettingsError, StartError};
use rap_testkit::programs::example_path;
use rap_testkit::{Client, Process};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;
use tempfile::{TempDir, tempdir};
use tokio::sync::mpsc;

use crate::local::{self, LocalRuntime};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Greet someone by name.
#[derive(Deserialize, JsonSchema)]
struct Greet {
    name: String,
}

/// Takes no arguments.
#[derive(Deserialize, JsonSchema)]
struct Nothing {}

async fn greet(args: Greet) -> FunctionResult {
    Ok(format!("Hello, {}!", args.name))
}

async fn start(directory: TempDir, functions: Vec<Function>) -> LocalRuntime {
    let limits = Limits { stop_within: Duration::from_millis(100), ..Limits::default() };
    LocalRuntime::with_functions(directory, functions, limits).await
}

/// Waits until the thread is idle, and returns the results in its history.
async fn results(client: &Client, thread: &str) -> Vec<String> {
    client.until_idle(thread).await;
    let history = client.raw_history(thread).await;
    let results = history.iter().filter(|entry| entry["kind"] == "result");
    results.map(|entry| entry["content"].as_str().unwrap().to_owned()).collect()
}

/// Reports when a function starts, and when it is dropped before it returned.
struct Observed(mpsc::UnboundedSender<&'static str>);

impl Drop for Observed {
    fn drop(&mut self) {
        self.0.send("dropped").ok();
    }
}

/// Returns a function that never returns, and a channel that reports what happens to it.
fn endless() -> (Function, mpsc::UnboundedReceiver<&'static str>) {
    let (sender, events) = mpsc::unbounded_channel();
    let function = Function::new("work", move |_: Nothing| {
        let observed = Observed(sender.clone());
        async move {
            observed.0.send("started").ok();
            std::future::pending::<FunctionResult>().await
        }
    });
    (function, events)
}

async fn next(events: &mut mpsc::UnboundedReceiver<&'static str>) -> &'static str {
    tokio::time::timeout(TIMEOUT, events.recv()).await.unwrap().unwrap()
}

#[tokio::test]
async fn a_function_is_called_only_with_arguments_that_match_its_schema() {
    let runtime = start(tempdir().unwrap(), vec![Function::new("greet", greet)]).await;
    let thread = runtime.open(r#"call greet {"name": "Ada"}"#).await;
    assert_eq!(results(&runtime, &thread).await, ["Hello, Ada!"]);
    let thread = runtime.open(r#"call greet {"name": 5}"#).await;
    let refused = "Error: the arguments do not match the tool's schema: ";
    assert!(results(&runtime, &thread).await[0].starts_with(refused));
    let tools = runtime.get("/v1/tools").await.expect(200).to_string();
    assert!(tools.contains("in-process") && tools.contains("Greet someone by name."), "{tools}");
}

#[tokio::test]
async fn an_error_a_panic_and_a_result_that_is_too_long_are_error_results() {
    let functions = vec![
        Function::new("fail", |_: Nothing| async { Err("no bread".into()) }),
        Function::new("panic", |_: Nothing| async { panic!("a test") }),
        Function::new("talk", |_: Nothing| async { Ok("x".repeat(3000)) }),
    ];
    let limits = Limits { body: 2000, ..Limits::default() };
    let runtime = LocalRuntime::with_functions(tempdir().unwrap(), functions, limits).await;
    let too_long = "Error: the result has 3000 bytes, and at most 2000 are allowed";
    for (name, expected) in
        [("fail", "Error: no bread"), ("panic", "Error: the tool panicked"), ("talk", too_long)]
    {
        let thread = runtime.open(&format!("call {name} {{}}")).await;
        assert_eq!(results(&runtime, &thread).await, [expected]);
    }
}

#[tokio::test]
async fn a_call_that_a_stop_interrupted_runs_again_after_the_next_start() {
    let (function, mut events) = endless();
    let runtime = start(tempdir().unwrap(), vec![function]).await;
    let thread = runtime.open("call work {}").await;
    assert_eq!(next(&mut events).await, "started");
    let directory = runtime.stop().await;
    assert_eq!(next(&mut events).await, "dropped");

    let finishes = Function::new("work", |_: Nothing| async { Ok("done".into()) });
    let runtime = start(directory, vec![finishes]).await;
    assert_eq!(results(&runtime, &thread).await, ["done"]);
}

#[tokio::test]
async fn a_call_that_finishes_while_the_runtime_stops_is_not_run_again() {
    let (stopping, stopped) = tokio::sync::watch::channel(false);
    let (sender, mut events) = mpsc::unbounded_channel();
    let function = Function::new("work", move |_: Nothing| {
        let (mut stopped, sender) = (stopped.clone(), sender.clone());
        async move {
            sender.send("started")?;
            stopped.wait_for(|stopped| *stopped).await?;
            Ok("finished".into())
        }
    });
    let limits = Limits { stop_within: TIMEOUT, ..Limits::default() };
    let runtime = LocalRuntime::with_functions(tempdir().unwrap(), vec![function], limits).await;
    let thread = runtime.open("call work {}").await;
    assert_eq!(next(&mut events).await, "started");
    let (directory, ()) = tokio::join!(runtime.stop(), async { stopping.send(true).unwrap() });

    let (function, mut events) = endless();
    let runtime = start(directory, vec![function]).await;
    assert_eq!(results(&runtime, &thread).await, ["finished"]);
    runtime.stop().await;
    assert!(events.try_recv().is_err(), "the function ran again");
}

#[tokio::test]
async fn cancelling_interrupting_and_closing_drop_the_function() {
    let (function, mut events) = endless();
    let runtime = start(tempdir().unwrap(), vec![function]).await;
    for end in ["cancel", "interrupt", "close"] {
        let thread = runtime.open("call work {}").await;
        assert_eq!(next(&mut events).await, "started");
        let path = match end {
            "cancel" => {
                let calls = runtime.raw_listing("calls").await;
                format!("calls/{}/cancel", calls[0]["call_id"].as_str().unwrap())
            }
            end => end.to_owned(),
        };
        let answer = runtime.post(&format!("/v1/threads/{thread}/{path}"), &json!({})).await;
        assert!((200..300).contains(&answer.status), "{end}: {answer:?}");
        assert_eq!(next(&mut events).await, "dropped", "{end}");
    }
}

#[tokio::test]
async fn a_session_gets_the_functions_of_a_changed_program_after_one_error() {
    let runtime = start(tempdir().unwrap(), vec![Function::new("greet", greet)]).await;
    let call = r#"call greet {"name": "Ada"}"#;
    let thread = runtime.open(call).await;
    assert_eq!(results(&runtime, &thread).await, ["Hello, Ada!"]);

    let changed = Function::new("greet", |_: Nothing| async { Ok("Hello!".into()) });
    let runtime = start(runtime.stop().await, vec![changed]).await;
    runtime.say(&thread, call).await;
    let error = "Error: the tools of in-process changed; call again";
    assert_eq!(results(&runtime, &thread).await, ["Hello, Ada!", error]);
    runtime.say(&thread, call).await;
    assert_eq!(results(&runtime, &thread).await[2], "Hello!");
}

#[tokio::test]
async fn functions_that_cannot_be_tools_prevent_the_start() {
    let table = [
        (vec![Function::new("no spaces", greet)], "tool \"no spaces\": "),
        (vec![Function::new("wait", greet)], "tool \"wait\": this is the name of a built-in tool"),
        (vec![Function::new("greet", greet), Function::new("greet", greet)], "a second time"),
        (
            vec![Function::new("list", |_: Vec<u8>| async { Ok(String::new()) })],
            "its arguments must be a struct with named fields",
        ),
    ];
    for (functions, expected) in table {
        let directory = tempdir().unwrap();
        let settings = Settings { functions, ..local::settings(&directory) };
        let Err(StartError::Settings(error @ SettingsError::BadFunction(_))) = Runtime::start(settings)
        else {
            panic!("it started, without: {expected}");
        };
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[tokio::test]
async fn the_embedded_example_has_at_most_ten_lines_and_works() {
    let source = include_str!("../../examples/embedded.rs");
    let (_, main) = source.split_once("async fn main()").unwrap();
    // The first and the last line are the signature and the closing brace.
    assert!(main.trim_end().lines().count() - 2 <= 10, "{main}");

    let directory = tempdir().unwrap();
    let mut command = Command::new(example_path("embedded"));
    command.current_dir(directory.path()).env("PORT", "0");
    let example = Process::start(command);
    let client = Client::new(&example.url, None);
    let thread = client.open(r#"call greet {"name": "Ada"}"#).await;
    assert_eq!(results(&client, &thread).await, ["Hello, Ada!"]);
}
