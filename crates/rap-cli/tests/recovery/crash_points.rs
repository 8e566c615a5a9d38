//! Crash points: the process ends at each named place in the code, in the middle of a scenario that reaches all of
//! them. After a restart everything is there once.

use std::time::Duration;

use rap_testkit::{Process, Rap, Setup, Tools, until};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::{self, Api, data, prepared};

fn is_on_postgres() -> bool {
    module_path!().ends_with("_on_postgres")
}

fn setup(tools: &Tools) -> Setup {
    if is_on_postgres() { Setup::new().tools(tools).on_postgres() } else { support::setup(tools) }
}

/// Longest time until a point is reached.
const REACHED_WITHIN: Duration = Duration::from_secs(60);

/// Starts the runtime with a crash point, and without it again when it has crashed.
fn start(mut rap: Rap, point: &str) -> JoinHandle<Rap> {
    let mut command = rap.serve_command();
    command.env("RAP_CRASH_POINT", point);
    let mut doomed = Process::start(command);
    tokio::spawn(async move {
        while doomed.ended().is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let log = doomed.into_log();
        assert!(log.contains("crash point"), "it ended by itself: {log}");
        rap.start_again();
        rap
    })
}

/// POSTs until there is an answer that is final.
async fn post(api: &Api, to: &str, body: &Value) {
    until("an answer", || async { api.try_post(to, body).await.is_some_and(|answer| answer.status < 500) })
        .await;
}

async fn until_status(api: &Api, id: &str, status: &str) {
    until(&format!("{id} is {status}"), async || {
        let thread = api.try_read(&format!("/v1/threads/{id}")).await;
        thread.is_some_and(|thread| thread["status"] == status)
    })
    .await;
}

/// Runs the scenario, in which the process crashes at a point.
async fn survive(point: &str) {
    let tools = Tools::start().await;
    let rap = prepared(setup(&tools));
    let api = Api::of(&rap);
    let restarted = start(rap, point);
    // A tool call, a timer, and a message between threads.
    post(&api, "/v1/threads", &json!({"id": "calls", "message": "call work {}"})).await;
    let call = tools.invocation().await;
    post(&api, call.url(), &call.result("done")).await;
    until_status(&api, "calls", "idle").await;
    post(&api, "/v1/threads", &json!({"id": "sleeps", "message": "call sleep {\"seconds\": 0.05}"})).await;
    until_status(&api, "sleeps", "idle").await;
    let spawn = json!({"id": "spawns", "message": "call spawn_thread {\"instructions\": \"say hello\"}"});
    post(&api, "/v1/threads", &spawn).await;
    until_status(&api, "spawns", "idle").await;
    post(&api, "/v1/threads/spawns/close", &json!({})).await;
    until_status(&api, "spawns", "closed").await;
    let rap = tokio::time::timeout(REACHED_WITHIN, restarted).await.expect("the point is reached").unwrap();
    let children = async || {
        let listed = api.get("/v1/threads?parent=spawns").await.body;
        listed["threads"].as_array().unwrap().clone()
    };
    until("the child is closed", async || {
        let children = children().await;
        children.len() == 1 && children[0]["status"] == "closed"
    })
    .await;
    let kinds = async |thread: &str| {
        let history = api.whole_history(thread).await;
        let kinds = history.iter().map(|entry| entry["kind"].as_str().unwrap().to_owned());
        kinds.filter(|kind| kind != "notice").collect::<Vec<_>>()
    };
    for thread in ["calls", "sleeps"] {
        assert_eq!(
            kinds(thread).await,
            ["user", "assistant", "result", "assistant"],
            "{thread} after {point}"
        );
    }
    let (file, config) = (data(&rap).join("rap.db"), rap.directory().join("rap.toml"));
    let (code, report) = match is_on_postgres() {
        true => rap.command(&["doctor", "--config", config.to_str().unwrap()]),
        false => rap.command(&["doctor", file.to_str().unwrap()]),
    };
    assert_eq!(code, Some(0), "after {point}: {report}");
}

macro_rules! crash_points {
    ($($name:ident: $point:literal;)*) => {
        $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                survive($point).await;
            }
        )*
    };
}

crash_points! {
    a_crash_before_the_first_commit_loses_nothing: "before_commit";
    a_crash_before_a_later_commit_loses_nothing: "before_commit:4";
    a_crash_after_a_commit_loses_nothing: "after_commit:2";
    a_crash_after_a_later_commit_loses_nothing: "after_commit:5";
    a_crash_before_effects_loses_nothing: "before_effects:2";
    a_crash_before_a_model_request_loses_nothing: "before_ask";
    a_crash_after_the_answer_of_a_model_loses_nothing: "after_answer";
    a_crash_before_an_invocation_loses_nothing: "before_invocation";
    a_crash_after_an_invocation_loses_nothing: "after_invocation";
    a_crash_before_a_timer_fires_loses_nothing: "before_timer";
    a_crash_before_a_message_between_threads_loses_nothing: "before_message";
    a_crash_before_the_answer_to_a_callback_loses_nothing: "before_callback_answer";
    a_crash_before_the_answer_to_a_client_loses_nothing: "before_client_answer";
}

/// A new point needs a test, and a test needs its point.
#[test]
fn each_crash_point_in_the_code_has_a_test() {
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut points = std::collections::BTreeSet::new();
    let mut directories: Vec<_> = crates
        .read_dir()
        .unwrap()
        .map(|of| of.unwrap().path().join("src"))
        .filter(|path| path.exists())
        .collect();
    while let Some(directory) = directories.pop() {
        for file in directory.read_dir().unwrap() {
            let path = file.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                for rest in text.split("crash::point").skip(1) {
                    let name = rest.strip_prefix("(\"").and_then(|rest| rest.split('"').next());
                    let name =
                        name.unwrap_or_else(|| panic!("a point without a plain name in {}", path.display()));
                    points.insert(name.to_owned());
                }
            }
        }
    }
    let runtime = include_str!("crash_points.rs").lines().filter(|line| line.starts_with("    a_crash_"));
    let tools = include_str!("../../../rap-tool/tests/server/crash_points.rs").lines();
    let tested: std::collections::BTreeSet<String> = runtime
        .chain(tools.filter(|line| line.contains("survive(\"")))
        .filter_map(|line| line.split('"').nth(1))
        .map(|point| point.split(':').next().unwrap_or(point).to_owned())
        .collect();
    assert_eq!(points, tested);
}
