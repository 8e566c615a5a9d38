//! Conversations through a LiteLLM proxy, which translates each API into another one. It is installed from PyPI the
//! first time. It checks and converts every message of a history, so a history that it accepts is valid for others too. Each
//! request of a conversation is also checked against the types of the official SDKs.

use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use rap_testkit::anthropic::AnthropicServer;
use rap_testkit::model::ModelServer;
use rap_testkit::peer::Reply;
use rap_testkit::{Port, Rap, Setup, Tools, http, python, sdk_types, until};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const LITELLM: &str = "litellm[proxy]==1.106.2";
const KEY: &str = "sk-0123456789abcdef0123456789abcdef";

/// A proxy. It is killed on drop.
struct Proxy {
    child: Child,
    port: Port,
    recorder: Recorder,
    _directory: tempfile::TempDir,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Proxy {
    /// Starts a proxy whose model `m` is this model of LiteLLM at this URL.
    async fn start(model: &str, url: &str) -> Proxy {
        let directory = tempfile::tempdir().unwrap();
        let config = json!({
            "model_list": [{"model_name": "m", "litellm_params": {"model": model, "api_base": url, "api_key": "sk-b"}}],
            "litellm_settings": {"num_retries": 0},
        });
        // JSON is YAML.
        std::fs::write(directory.path().join("config.yaml"), config.to_string()).unwrap();
        let install = || python::environment(env!("CARGO_TARGET_TMPDIR"), "litellm-1.106.2", &[LITELLM]);
        let home = tokio::task::spawn_blocking(install).await.unwrap();
        let port = Port::reserve();
        let mut command = Command::new(home.join("bin/litellm"));
        command.args([
            "--config",
            "config.yaml",
            "--host",
            "127.0.0.1",
            "--port",
            &port.number().to_string(),
        ]);
        command.envs([("LITELLM_MASTER_KEY", KEY), ("LITELLM_LOCAL_MODEL_COST_MAP", "True")]);
        command.current_dir(directory.path()).stdin(Stdio::null());
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let recorder = Recorder::start(port.address()).await;
        let proxy = Proxy { child: command.spawn().unwrap(), port, recorder, _directory: directory };
        let url = format!("{}/health/liveliness", proxy.url());
        until("the proxy is alive", async || {
            http::attempt("GET", &url, &[], b"").await.is_ok_and(|answer| answer.status == 200)
        })
        .await;
        proxy
    }

    fn url(&self) -> String {
        format!("http://{}", self.port.address())
    }

    /// Lines for `[model]` in the configuration.
    fn lines(&self, provider: &str, path: &str) -> String {
        format!(
            "provider = \"{provider}\"\nname = \"m\"\napi_key = \"{KEY}\"\nbase_url = \"{}{path}\"",
            self.recorder.url
        )
    }

    /// Checks every request of the conversation against the types of the official SDK.
    async fn check_requests(&self, api: &'static str) {
        let requests: Vec<_> = self.recorder.requests().into_iter().map(|body| (api, body)).collect();
        // As many as the answers in the conversation.
        assert!(requests.len() >= 10, "{} requests", requests.len());
        sdk_types::check(env!("CARGO_TARGET_TMPDIR"), requests).await;
    }
}

/// Bytes that a client has sent over a connection.
type Sent = Arc<Mutex<Vec<u8>>>;

/// A server in front of the proxy. It forwards connections, and records the bytes that each client sends.
struct Recorder {
    url: String,
    connections: Arc<Mutex<Vec<Sent>>>,
}

impl Recorder {
    async fn start(address: String) -> Recorder {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let connections: Arc<Mutex<Vec<_>>> = Arc::default();
        let recorder = Recorder { url, connections: Arc::clone(&connections) };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let sent = Sent::default();
                connections.lock().unwrap().push(Arc::clone(&sent));
                let address = address.clone();
                tokio::spawn(async move { forward(client, &address, &sent).await.ok() });
            }
        });
        recorder
    }

    /// Returns the bodies of all requests that have one.
    fn requests(&self) -> Vec<Value> {
        let connections = self.connections.lock().unwrap();
        connections.iter().flat_map(|sent| bodies(&sent.lock().unwrap())).collect()
    }
}

async fn forward(client: TcpStream, address: &str, sent: &Mutex<Vec<u8>>) -> std::io::Result<()> {
    let server = TcpStream::connect(address).await?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let requests = async {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let count = from_client.read(&mut buffer).await?;
            if count == 0 {
                return to_server.shutdown().await;
            }
            sent.lock().unwrap().extend_from_slice(&buffer[..count]);
            to_server.write_all(&buffer[..count]).await?;
        }
    };
    let answers = async {
        tokio::io::copy(&mut from_server, &mut to_client).await?;
        to_client.shutdown().await
    };
    tokio::try_join!(requests, answers).map(|_| ())
}

/// Returns the JSON bodies of the requests that were sent over a connection, one after the other.
fn bodies(mut sent: &[u8]) -> Vec<Value> {
    let mut bodies = Vec::new();
    while let Some(end) = sent.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
        let head = String::from_utf8_lossy(&sent[..end]).to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
        let length = length.map_or(0, |length| length.trim().parse().unwrap());
        let body;
        (body, sent) = sent[end + 4..].split_at(length);
        if length > 0 {
            bodies.push(serde_json::from_slice(body).unwrap());
        }
    }
    bodies
}

/// Answers of the server behind the proxy.
trait Backend {
    fn calls(&self, calls: &[(&str, &str, Value)]);
    fn says(&self, text: &str);
}

impl Backend for AnthropicServer {
    fn calls(&self, calls: &[(&str, &str, Value)]) {
        AnthropicServer::calls(self, calls);
    }

    fn says(&self, text: &str) {
        AnthropicServer::says(self, text);
    }
}

impl Backend for ModelServer {
    /// Sends one call after the other: the proxy loses calls whose pieces alternate.
    fn calls(&self, calls: &[(&str, &str, Value)]) {
        let chunk = |delta: Value, finish: Option<&str>| {
            format!(
                "data: {}\n\n",
                json!({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
            )
        };
        let mut body = String::new();
        for (index, (id, name, arguments)) in calls.iter().enumerate() {
            let function = json!({"name": name, "arguments": arguments.to_string()});
            let call = json!({"index": index, "id": id, "type": "function", "function": function});
            body.push_str(&chunk(json!({"tool_calls": [call]}), None));
        }
        body.push_str(&chunk(json!({}), Some("tool_calls")));
        body.push_str("data: [DONE]\n\n");
        let kind = ("content-type", "text/event-stream".to_owned());
        self.answer(Reply::Full(200, Some(kind), body.into()));
    }

    fn says(&self, text: &str) {
        ModelServer::says(self, text);
    }
}

/// Holds a conversation with parallel calls, an image, events, an interruption, children and a fork.
async fn converse(rap: &Rap, tools: &Tools, backend: &impl Backend) {
    backend.calls(&[("call_a", "work", json!({"n": 1})), ("call_b", "watch", json!({"n": 2}))]);
    backend.says("Both done.");
    let thread = rap.open("go").await;
    let calls = tools.invocations(2).await;
    let image = json!({"type": "image", "data": PNG, "mediaType": "image/png"});
    let mut one = calls[0].result("");
    one["content"] = json!([{"type": "text", "text": "one"}, image]);
    calls[0].says(&one).await;
    calls[1].confirms("watching").await;
    rap.until_line(&thread, "assistant: Both done.").await;
    rap.until_idle(&thread).await;

    backend.says("An event.");
    calls[1].says(&calls[1].inline("tick")).await;
    rap.until_line(&thread, "assistant: An event.").await;
    rap.until_idle(&thread).await;

    backend.calls(&[("call_c", "work", json!({}))]);
    rap.say(&thread, "work").await;
    tools.invocation().await;
    rap.until_status(&thread, "waiting").await;
    rap.act(&thread, "interrupt").await.expect(202);
    rap.until_idle(&thread).await;

    backend.says("After the interruption.");
    rap.say(&thread, "and now?").await;
    rap.until_line(&thread, "assistant: After the interruption.").await;
    rap.until_idle(&thread).await;

    // An event for a child, which inherits the history.
    backend.says("In the child.");
    calls[1].says(&calls[1].event("tock")).await;
    let child = rap.child(&thread).await;
    rap.until_line(&child, "assistant: In the child.").await;
    rap.until_status(&child, "closed").await;

    // The parent and a child that the model spawns are asked at the same time.
    backend.calls(&[("call_d", "spawn_thread", json!({"instructions": "dig"}))]);
    backend.says("Fine.");
    backend.says("Fine.");
    rap.say(&thread, "delegate").await;
    rap.until_line(&thread, "assistant: Fine.").await;
    let spawned = until("the spawned child has answered", async || {
        let children = rap.children(&thread).await;
        let spawned = children.into_iter().find(|one| one["id"] != child)?["id"].as_str()?.to_owned();
        rap.transcript(&spawned).await.contains(&"assistant: Fine.".to_owned()).then_some(spawned)
    })
    .await;
    rap.until_idle(&spawned).await;
    rap.until_idle(&thread).await;

    let forked = rap.post(&format!("/v1/threads/{thread}/fork"), &json!({})).await.expect(201);
    let fork = forked["id"].as_str().unwrap().to_owned();
    backend.says("In the fork.");
    let message = json!({"text": "are you a fork?", "content": [image]});
    rap.post(&format!("/v1/threads/{fork}/messages"), &message).await.expect(202);
    rap.until_line(&fork, "assistant: In the fork.").await;
}

/// Texts of the conversation that the last request of the fork contains.
const HISTORY: [&str; 12] = [
    "go",
    "Both done.",
    "one",
    "watching",
    "tick",
    "An event.",
    "interrupted",
    "After the interruption.",
    "dig",
    "Fine.",
    "are you a fork?",
    PNG,
];

/// Checks that nothing of the history was lost on its way through the proxy: its texts, and a result for each call, by
/// these names of their ids.
fn check_history(request: &Value, call_id: &str, result_id: &str) {
    let text = request.to_string();
    for part in HISTORY {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let mut ids = [Vec::new(), Vec::new()];
    collect(request, &mut |block| {
        let is_call = block["type"] == "tool_use"
            || block.get("function").is_some_and(|f| f.get("arguments").is_some());
        ids[0].extend(block[call_id].as_str().filter(|_| is_call).map(str::to_owned));
        ids[1].extend(block[result_id].as_str().map(str::to_owned));
    });
    ids.iter_mut().for_each(|ids| ids.sort());
    // Two parallel calls, an event, an interrupted call and a spawned child.
    assert!(ids[0].len() >= 5 && ids[0] == ids[1], "{ids:?} in {text}");
}

/// Calls a function with every object in a document.
fn collect(value: &Value, found: &mut impl FnMut(&Value)) {
    match value {
        Value::Object(members) => {
            found(value);
            members.values().for_each(|member| collect(member, found));
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
        _ => {}
    }
}

/// A red square of 8 by 8 pixels.
const PNG: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP4z8CAFWEXHbQSACj/P8Fu7N9hAAAAAElFTkSuQmCC";

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_accepts_a_full_history_through_the_openai_api() {
    let (tools, backend) = (Tools::start().await, AnthropicServer::start().await);
    let proxy = Proxy::start("anthropic/claude", &backend.url).await;
    let rap = Setup::new().tools(&tools).model(&proxy.lines("openai", "/v1")).start();
    converse(&rap, &tools, &backend).await;
    proxy.check_requests("openai").await;
    check_history(&backend.all("/v1/messages").last().unwrap().body, "id", "tool_use_id");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_accepts_a_full_history_through_the_anthropic_api() {
    let (tools, backend) = (Tools::start().await, ModelServer::start().await);
    let proxy = Proxy::start("hosted_vllm/gpt", &format!("{}/v1", backend.url)).await;
    let rap = Setup::new().tools(&tools).model(&proxy.lines("anthropic", "")).start();
    converse(&rap, &tools, &backend).await;
    proxy.check_requests("anthropic").await;
    check_history(&backend.all("/v1/chat/completions").last().unwrap().body, "id", "tool_call_id");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_accepts_a_full_history_through_the_responses_api() {
    let (tools, backend) = (Tools::start().await, AnthropicServer::start().await);
    let proxy = Proxy::start("anthropic/claude", &backend.url).await;
    let rap = Setup::new().tools(&tools).model(&proxy.lines("openai-responses", "/v1")).start();
    converse(&rap, &tools, &backend).await;
    proxy.check_requests("openai-responses").await;
    check_history(&backend.all("/v1/messages").last().unwrap().body, "id", "tool_use_id");
}
