//! Traces: the spans that a collector receives, and the trace context on the wire.

use std::time::Duration;

use rap_testkit::collector::Collector;
use rap_testkit::model::ModelServer;
use rap_testkit::{Process, Rap, Setup, Tools, programs, until};
use serde_json::json;

const FOREIGN: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
/// Shorter than the time that a request to the collector may take.
const STOP: Duration = Duration::from_secs(8);

/// A turn with its model request, invocation and callback is one trace. The next turn has a link to it. Nothing that
/// was said is in a span.
#[tokio::test]
async fn a_turn_with_its_call_and_callback_is_a_trace() {
    let data = tempfile::tempdir().unwrap();
    let tools = Process::start(programs::example("kitchen_sink", data.path(), &[]));
    let mut collector = Collector::start().await;
    let rap = Setup::new().tool_server(&tools.url).section(&collector.section()).start();
    let thread = rap.open("call echo {\"text\": \"very private words\"}").await;
    rap.until_idle(&thread).await;
    let root = collector.span("invoke_agent default").await;
    let attribute = |name: &str| root.attributes[name].as_str();
    assert_eq!(
        (attribute("gen_ai.operation.name"), attribute("gen_ai.agent.name")),
        ("invoke_agent", "default")
    );
    assert_eq!((attribute("gen_ai.conversation.id"), root.parent.as_str()), (thread.as_str(), ""));
    assert!(root.links.is_empty() && !root.is_error, "{root:?}");
    let call = collector.span("execute_tool echo").await;
    assert_eq!((&call.trace, &call.parent), (&root.trace, &root.id));
    assert_eq!(call.attributes["gen_ai.tool.name"], "echo");
    let callback = collector.span("callback").await;
    assert_eq!((&callback.trace, &callback.parent), (&root.trace, &call.id));
    assert_eq!(callback.attributes["gen_ai.tool.call.id"], call.attributes["gen_ai.tool.call.id"]);
    let next = collector.span("invoke_agent default").await;
    assert_eq!(next.links, [(root.trace.clone(), root.id.clone())]);
    assert_ne!(next.trace, root.trace);
    assert_eq!(collector.resource["service.name"], "rap");
    let sent = &collector.raw;
    assert!(!sent.contains("very private words"), "{sent}");
    assert!(!sent.contains("/callback/"), "{sent}");
}

#[tokio::test]
async fn a_model_request_has_the_names_of_the_semantic_conventions() {
    let (model, mut collector) = (ModelServer::start().await, Collector::start().await);
    let rap = Setup::new().model(&model.lines()).section(&collector.section()).start();
    model.says_to(17, "Hello.");
    let thread = rap.open("Hi.").await;
    rap.until_idle(&thread).await;
    let (root, chat) = (collector.span("invoke_agent default").await, collector.span("chat gpt").await);
    assert_eq!((&chat.trace, &chat.parent), (&root.trace, &root.id));
    for (name, value) in [
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.provider.name", "openai"),
        ("gen_ai.request.model", "gpt"),
        ("gen_ai.usage.input_tokens", "17"),
        ("gen_ai.conversation.id", &thread),
        ("server.address", "127.0.0.1"),
    ] {
        assert_eq!(chat.attributes[name], value, "{name}");
    }
    assert!(chat.attributes.contains_key("gen_ai.usage.output_tokens"));
}

/// The trace of a call is computed from what is stored.
#[tokio::test]
async fn a_callback_after_a_restart_belongs_to_the_trace_of_its_call() {
    let (tools, mut collector) = (Tools::start().await, Collector::start().await);
    let rap = Setup::new().tools(&tools).section(&collector.section()).start();
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    let header = call.request.header("traceparent").unwrap().to_owned();
    let invoked = collector.span("execute_tool work").await;
    assert_eq!(invoked.traceparent(), header);
    let rap = rap.restarted();
    // With its own span, and without any.
    let own = format!("{}-1111111111111111-01", &header[..35]);
    call.post_with(&[("traceparent", &own)], &call.view("progress", json!({}))).await.expect(200);
    let callback = collector.span("callback").await;
    assert_eq!((callback.trace.as_str(), callback.parent.as_str()), (&header[3..35], "1111111111111111"));
    call.returns("done").await;
    rap.until_idle(&thread).await;
    let callback = collector.span("callback").await;
    assert_eq!((&callback.trace, &callback.parent), (&invoked.trace, &invoked.id));
}

/// A span of a foreign trace is linked. The callback stays in the trace of its call.
#[tokio::test]
async fn a_callback_with_another_trace_is_linked_to_it() {
    let (tools, mut collector) = (Tools::start().await, Collector::start().await);
    let rap = Setup::new().tools(&tools).section(&collector.section()).start();
    rap.open("call work").await;
    let call = tools.invocation().await;
    call.post_with(&[("traceparent", FOREIGN)], &call.view("progress", json!({}))).await.expect(200);
    let (invoked, callback) = (collector.span("execute_tool work").await, collector.span("callback").await);
    assert_eq!((&callback.trace, &callback.parent), (&invoked.trace, &invoked.id));
    assert_eq!(callback.links, [(FOREIGN[3..35].to_owned(), FOREIGN[36..52].to_owned())]);
}

/// A call that waited for a person has a trace of its own, which begins with the approval and is linked to the turn.
#[tokio::test]
async fn an_approved_call_is_a_trace_that_is_linked_to_its_turn() {
    let (tools, mut collector) = (Tools::start().await, Collector::start().await);
    let agent = "name = \"default\"\napprove = [\"work\"]";
    let rap = Setup::new().tools(&tools).section(&collector.section()).agent(agent).start();
    let thread = rap.open("call work").await;
    let turn = collector.span("invoke_agent default").await;
    rap.until_status(&thread, "needs_you").await;
    let question = rap.raw_listing("inbox").await.remove(0);
    let path = format!("/v1/threads/{thread}/calls/{}/choice", question["call_id"].as_str().unwrap());
    rap.post(&path, &json!({"selected": 0})).await.expect(202);
    let call = tools.invocation().await;
    let header = call.request.header("traceparent").unwrap().to_owned();
    let approved = collector.span("approve work").await;
    assert_eq!(approved.links, [(turn.trace.clone(), turn.id.clone())]);
    let invoked = collector.span("execute_tool work").await;
    assert_eq!((&invoked.trace, &invoked.parent), (&approved.trace, &approved.id));
    assert_eq!(invoked.traceparent(), header);
}

/// The usual variable of OpenTelemetry is enough. Without it, and without `[telemetry]`, invocations have no trace context.
#[tokio::test]
async fn traces_are_off_unless_a_collector_is_named() {
    let (tools, mut collector) = (Tools::start().await, Collector::start().await);
    let off: [&dyn Fn(Setup) -> Setup; 4] = [
        &|setup| setup,
        &|setup| {
            setup
                .variable("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url())
                .variable("OTEL_SDK_DISABLED", "true")
        },
        &|setup| {
            setup
                .variable("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url())
                .variable("OTEL_TRACES_EXPORTER", "none")
        },
        &|setup| {
            let setup = setup.variable("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url());
            setup.section("[telemetry]\notlp_endpoint = \"none\"")
        },
    ];
    for off in off {
        let rap = off(Setup::new().tools(&tools)).start();
        rap.open("call work").await;
        assert_eq!(tools.invocation().await.request.header("traceparent"), None);
        assert!(!metrics(&rap).await.contains("rap_trace_spans_total"));
    }
    assert_eq!(collector.requests(), 0);
    let setup = Setup::new().tools(&tools).variable("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url());
    let setup = setup.variable("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret-of-collector");
    let rap = setup.variable("OTEL_SERVICE_NAME", "my-agents").start();
    rap.open("call work").await;
    assert!(tools.invocation().await.request.header("traceparent").is_some());
    collector.span("execute_tool work").await;
    assert_eq!(collector.resource["service.name"], "my-agents");
    assert_eq!(collector.authorization.as_deref(), Some("Bearer secret-of-collector"));
    assert!(!collector.raw.contains("secret-of-collector"));
}

#[tokio::test]
async fn headers_of_the_collector_are_secrets() {
    let mut collector = Collector::start().await;
    let section = format!(
        "{}\nheaders = {{ Authorization = \"env:OTLP_AUTH\" }}\nservice = \"my-agents\"",
        collector.section()
    );
    let setup = Setup::new().section(&section).variable("OTLP_AUTH", "Bearer secret-of-collector");
    let rap = setup.start();
    rap.open("hello").await;
    collector.span("invoke_agent default").await;
    assert_eq!(collector.authorization.as_deref(), Some("Bearer secret-of-collector"));
    assert_eq!(collector.resource["service.name"], "my-agents");
}

/// A collector that takes requests and never answers delays no turn and no stop. Neither does one that is gone. What it
/// did not take is counted.
#[tokio::test]
async fn a_collector_that_does_not_answer_delays_nothing() {
    let (tools, collector) = (Tools::start().await, Collector::start().await);
    collector.hang();
    let gone = "[telemetry]\notlp_endpoint = \"http://127.0.0.1:9\"".to_owned();
    for (section, hangs) in [(collector.section(), true), (gone, false)] {
        let mut rap = Setup::new().tools(&tools).section(&section).start();
        let thread = rap.open("call work").await;
        tools.invocation().await.returns("done").await;
        rap.until_line(&thread, "assistant: work: done").await;
        if hangs {
            until("a request hangs", async || collector.requests() > 0).await;
        } else {
            until("dropped spans are counted", async || dropped(&metrics(&rap).await) > 0).await;
        }
        let thread = rap.open("say still here").await;
        rap.until_line(&thread, "assistant: still here").await;
        assert!(rap.stop() < STOP, "the runtime waited for the collector");
    }
}

async fn metrics(rap: &Rap) -> String {
    rap.send("GET", "/metrics", &[], b"").await.text
}

fn dropped(metrics: &str) -> u64 {
    let line =
        metrics.lines().find_map(|line| line.strip_prefix("rap_trace_spans_total{outcome=\"dropped\"} "));
    line.unwrap().parse().unwrap()
}
