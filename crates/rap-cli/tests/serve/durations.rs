//! Timeouts of single tool servers, and usual durations of calls.

use rap_testkit::tools::{tool, with};
use rap_testkit::{Rap, Setup, Tools, until};
use serde_json::{Value, json};

/// Proves: LC-28
#[tokio::test]
async fn the_timeout_of_a_tool_server_overrides_the_common_one() {
    let quick = Tools::offering("quick", &["fast"]).await;
    let patient = Tools::offering("patient", &["slow"]).await;
    let common = Tools::offering("common", &["usual"]).await;
    let rap = Setup::new()
        .tools(&quick)
        .tool_setting("call_timeout = \"300ms\"")
        .tools(&patient)
        .tool_setting("call_timeout = \"none\"")
        .tools(&common)
        .limit("call_timeout = \"1h\"")
        .agent("name = \"default\"\nlimits = {depth = 3}")
        .start();
    let thread = rap.open("call fast\ncall slow\ncall usual").await;
    let error = "Error: no result came within 300 ms; it may still follow";
    rap.until_line(&thread, &format!("result call_1_1: {error}")).await;
    let waiting = rap.thread(&thread).await["waiting_on"].clone();
    let ends = |call: &Value| (call["tool"].as_str().unwrap().to_owned(), call["until"].is_string());
    let ends: Vec<_> = waiting.as_array().unwrap().iter().map(ends).collect();
    assert_eq!(ends, [("slow".to_owned(), false), ("usual".to_owned(), true)]);
    patient.invocation().await.returns("done").await;
    common.invocation().await.returns("done").await;
    rap.until_idle(&thread).await;
}

fn command(rap: &Rap, arguments: &[&str]) -> String {
    let (code, output) = rap.command(arguments);
    assert_eq!(code, Some(0), "{output}");
    output
}

/// Proves: LC-41
#[tokio::test]
async fn the_usual_duration_of_a_call_is_shown_and_a_call_far_beyond_it_is_flagged() {
    let tools = Tools::start().await;
    let stated = |min, max| json!({"annotations": {"x-expectedDuration": {"min": min, "max": max}}});
    let offered = vec![
        with(tool("short"), stated(0.1, 0.5)),
        with(tool("long"), stated(60.0, 7200.0)),
        with(tool("wrong"), stated(9.0, 1.0)),
        tool("silent"),
    ];
    tools.offer(tools.document("bench", "1", offered));
    let rap = Setup::new().tools(&tools).start();
    let thread = rap.open("call short\ncall long\ncall wrong\ncall silent").await;
    let calls = tools.invocations(4).await;
    // The runtime still knows it after a restart, without asking the server.
    let rap = rap.restarted();
    let usual = async |tool: &str| {
        let shown = rap.thread(&thread).await["waiting_on"].clone();
        let listed = Value::from(rap.listing("calls").await);
        let find = |calls: &Value| {
            let call = calls.as_array().unwrap().iter().find(|call| call["tool"] == tool).unwrap();
            (call["usually"].clone(), call["overdue"].clone())
        };
        assert_eq!(find(&shown).0, find(&listed).0);
        find(&listed)
    };
    assert_eq!(usual("long").await, (json!({"min_ms": 60_000, "max_ms": 7_200_000}), json!(false)));
    assert_eq!(usual("silent").await, (Value::Null, json!(false)));
    assert_eq!(usual("wrong").await, (Value::Null, json!(false)));
    until("the call is overdue", async || usual("short").await.1 == json!(true)).await;
    assert_eq!(usual("short").await.0, json!({"min_ms": 100, "max_ms": 500}));
    assert_eq!(usual("long").await.1, json!(false));

    let threads = rap.listing("threads").await;
    assert_eq!(threads[0]["waiting_on"][0]["overdue"], json!(true));
    let shown = command(&rap, &["threads", "show", &thread]);
    assert!(shown.contains("; overdue: usually takes 0.1 s to 0.5 s"), "{shown}");
    assert!(shown.contains("; usually takes 1 min to 2 h"), "{shown}");
    let listed = command(&rap, &["calls", "ls"]);
    assert!(listed.contains("USUALLY") && listed.contains("overdue: 0.1 s to 0.5 s"), "{listed}");
    for call in calls {
        call.returns("done").await;
    }
    rap.until_idle(&thread).await;
}
