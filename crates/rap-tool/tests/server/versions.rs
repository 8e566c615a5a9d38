//! Versions of a toolset, and invocations of older ones.

use crate::calls::discover;
use crate::support::{Caller, Runtime, Server, data_dir};
use rap_tool::prelude::*;
use serde_json::{Value, json};

/// Look something up.
#[derive(Deserialize, JsonSchema)]
struct LookUp {
    /// What to look for.
    words: String,
    /// New in 2026-11.
    language: Option<String>,
}

async fn look_up(args: LookUp, _: Call) -> Result<String> {
    Ok(format!("{} in {}", args.words, args.language.unwrap_or("any language".into())))
}

/// Proves: LC-12
#[tokio::test]
async fn older_versions_that_the_author_names_are_still_served() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let tools =
        ToolServer::new("words").version("2026-11").accepts(["2026-10", "2026-09"]).tool("look_up", look_up);
    let server = Server::start(tools, data.path()).await;
    assert_eq!(discover(&server.url).await["version"], "2026-11");
    let call = |id: &str, version: &str, arguments: Value| {
        let mut call = runtime.invocation("look_up", "t", id, arguments);
        call["toolset_version"] = json!(version);
        call
    };
    let present = call("present", "2026-11", json!({"words": "a", "language": "Latin"}));
    let old = call("old", "2026-10", json!({"words": "b"}));
    let older = call("older", "2026-09", json!({"word": "c"}));
    let too_old = call("too_old", "2026-08", json!({"words": "d"}));
    server.caller().accepted(&present).await;
    assert_eq!(runtime.next().await.text(), "a in Latin");
    server.caller().accepted(&old).await;
    assert_eq!(runtime.next().await.text(), "b in any language");
    // Arguments that no longer fit get an error, not silence.
    server.caller().accepted(&older).await;
    let error = runtime.next().await;
    assert!(
        error.text().starts_with("Error: the arguments do not match the schema of look_up"),
        "{}",
        error.text()
    );
    assert_eq!(server.caller().invoke(&too_old).await.0, 409);
}

/// Names a version of the toolset in an invocation.
fn of_version(mut call: Value, version: &str) -> Value {
    call["toolset_version"] = json!(version);
    call
}

/// Proves: LC-12
#[tokio::test]
async fn tools_are_replaced_while_the_server_runs_and_older_sessions_go_on() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let before = Tool::new("look_up", look_up);
    let tools = ToolServer::new("words").bearer("token").public_url(&url).data(data.path());
    let mounted = tools.offer(before).mount().await.unwrap();
    let router = mounted.router();
    let serving = tokio::spawn(async move { axum::serve(listener, router).await });
    let caller = Caller::new(&url).with_token("token");
    let first = discover(&url).await;

    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    let double = |arguments: serde_json::Map<String, Value>, _: Call| async move {
        Ok(format!("{}", arguments["n"].as_i64().unwrap_or_default() * 2))
    };
    let look_up = Tool::new("look_up", look_up);
    mounted.replace_tools(vec![look_up, Tool::with_schema("double", schema, double)]).unwrap();
    let second = discover(&url).await;
    let (old, new) = (first["version"].as_str().unwrap(), second["version"].as_str().unwrap());
    assert_ne!(old, new);
    assert_eq!(second["tools"][1]["name"], "double");
    assert_eq!(mounted.versions(), [old, new]);

    // A session that holds the first version calls without a refusal.
    caller.accepted(&of_version(runtime.invocation("look_up", "t", "a", json!({"words": "a"})), old)).await;
    assert_eq!(runtime.next().await.text(), "a in any language");
    caller.accepted(&of_version(runtime.invocation("double", "t", "b", json!({"n": 21})), new)).await;
    assert_eq!(runtime.next().await.text(), "42");

    // A tool that is gone is named in an error result, and invalid tools change nothing.
    mounted.replace_tools(vec![Tool::new("other", self::look_up)]).unwrap();
    caller.accepted(&of_version(runtime.invocation("double", "t", "c", json!({"n": 1})), new)).await;
    let error = runtime.next().await;
    assert!(error.text().contains("there is no tool \"double\""), "{}", error.text());
    assert!(mounted.replace_tools(vec![Tool::new("no spaces", self::look_up)]).is_err());
    assert_eq!(discover(&url).await["tools"][0]["name"], "other");
    serving.abort();
    mounted.shut_down().await;
}

/// The call starts a job elsewhere, and waits for it without starting it twice.
#[tokio::test]
async fn a_note_of_a_call_survives_a_restart() {
    #[derive(Deserialize, JsonSchema)]
    struct Nothing {}
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let (saved, mut was_saved) = tokio::sync::mpsc::unbounded_channel();
    let job = move |_: Nothing, call: Call| {
        let saved = saved.clone();
        async move {
            if let Some(job) = call.saved::<String>()? {
                return Ok(format!("went on with {job}"));
            }
            call.save("job 7").await?;
            saved.send(()).ok();
            std::future::pending().await
        }
    };
    let tools = ToolServer::new("jobs").offer(Tool::new("job", job).restartable());
    let mut limits = crate::support::short_pauses();
    limits.stop_within = std::time::Duration::from_millis(100);
    let tools = tools.limits(limits);
    let server = Server::start(tools.clone(), data.path()).await;
    server.caller().accepted(&runtime.invocation("job", "t", "a", json!({}))).await;
    was_saved.recv().await.unwrap();
    server.stop().await;
    let _server = Server::start(tools, data.path()).await;
    assert_eq!(runtime.next().await.text(), "went on with job 7");
}
