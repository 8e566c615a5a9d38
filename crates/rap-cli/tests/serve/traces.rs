//! Traces: the spans that a collector receives, and the trace context on the wire.

use rap_testkit::collector::Collector;
use rap_testkit::model::ModelServer;
use rap_testkit::{Process, Rap, Setup, Tools, programs};
use serde_json::json;

const CLIENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// A turn with its model request, invocation and callback is one trace. The next turn has a link to it. Nothing that was said is
/// in a span.
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
    let sent = String::from_utf8_lossy(&collector.raw);
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

#[tokio::test]
async fn a_message_with_a_trace_context_is_linked_to_its_turn() {
    let mut collector = Collector::start().await;
    let rap = Setup::new().section(&collector.section()).start();
    rap.post("/v1/threads", &json!({"id": "t"})).await.expect(201);
    let body = json!({"text": "say hello"}).to_string();
    let headers = [("traceparent", CLIENT), ("content-type", "application/json")];
    assert_eq!(rap.send("POST", "/v1/threads/t/messages", &headers, body.as_bytes()).await.status, 202);
    let message = collector.span("send_message").await;
    assert_eq!((message.trace.as_str(), message.parent.as_str()), (&CLIENT[3..35], &CLIENT[36..52]));
    let root = collector.span("invoke_agent default").await;
    assert_eq!(root.links, [(message.trace, message.id)]);
}

/// The usual variable of OpenTelemetry is enough. Without it, and without `[telemetry]`, invocations have no trace context.
#[tokio::test]
async fn traces_are_off_unless_a_collector_is_named() {
    let (tools, mut collector) = (Tools::start().await, Collector::start().await);
    let rap = Rap::start(&tools);
    rap.open("call work").await;
    assert_eq!(tools.invocation().await.request.header("traceparent"), None);
    let setup = Setup::new().tools(&tools).variable("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url());
    let rap = setup.variable("OTEL_SERVICE_NAME", "my-agents").start();
    rap.open("call work").await;
    assert!(tools.invocation().await.request.header("traceparent").is_some());
    collector.span("execute_tool work").await;
    assert_eq!(collector.resource["service.name"], "my-agents");
}

#[tokio::test]
async fn a_collector_that_does_not_answer_delays_nothing() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).section("[telemetry]\notlp = \"http://127.0.0.1:9\"").start();
    let thread = rap.open("call work").await;
    tools.invocation().await.returns("done").await;
    rap.until_idle(&thread).await;
    rap.until_line(&thread, "assistant: work: done").await;
}
