//! [`TestRuntime`]: tests of a tool server without a socket and with a virtual clock.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{Method, Request, StatusCode, header};
use http_body_util::BodyExt;
use rap_io::client::{self, Reply};
use rap_protocol::{
    Body as ResultBody, CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, CallId, Callback, CallbackUrl,
    ERROR_PREFIX, TOOL_CALL_STATUS_PATH, ToolResult, UserChoice, parse_callback,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tower::ServiceExt;

use crate::clock::Clock;
use crate::engine::{Engine, Externals, Outgoing};
use crate::error::ServeError;
use crate::http;
use crate::server::ToolServer;

/// Virtual time that [`TestRuntime::next`] waits for a callback.
const CALLBACK_TIMEOUT: Duration = Duration::from_secs(400 * 24 * 3600);

/// The default thread of calls.
const THREAD: &str = "test-thread";

/// A runtime for tests: calls the tools of a server and receives every callback.
///
/// It uses no socket, and keeps the journal in a temporary directory. Time is tokio's clock: with `start_paused =
/// true` (tokio's feature `test-util`) it jumps to the next timer whenever nothing else can run, so that a week takes
/// milliseconds. The endpoints, the journal, retries and restarts are those of a real server.
///
/// ```
/// use std::time::Duration;
///
/// use rap_tool::prelude::*;
/// use rap_tool::{Callback, TestRuntime};
/// use serde_json::json;
///
/// /// Tells the time every hour.
/// #[derive(Deserialize, JsonSchema)]
/// struct Chime {
///     /// How many times.
///     hours: u64,
/// }
///
/// async fn chime(args: Chime, subscribe: Subscribe) -> Result<()> {
///     let mut hour: u64 = subscribe.cursor()?.unwrap_or(0);
///     let subscription = subscribe.confirm("You will hear from me.").await?;
///     while hour < args.hours {
///         tokio::time::sleep(Duration::from_secs(3600)).await;
///         hour += 1;
///         subscription.send(Event::new(format!("hour {hour}")).cursor(hour)).await?;
///     }
///     subscription.finish("That was it.").await
/// }
///
/// #[tokio::main(flavor = "current_thread", start_paused = true)] // in a test: #[tokio::test(start_paused = true)]
/// async fn main() -> Result<()> {
///     let mut runtime = TestRuntime::start(ToolServer::new("clock").subscription("chime", chime)).await?;
///     let confirmed = runtime.call("chime", json!({"hours": 7 * 24})).await;
///     assert!(confirmed.text().starts_with("You will hear from me."));
///
///     for hour in 1..=7 * 24 {
///         if hour == 100 {
///             runtime.crash().await;
///             runtime.restart().await?;
///         }
///         let Callback::SubscriptionEvent(event) = runtime.next().await else { panic!("expected an event") };
///         assert_eq!(event.text, format!("hour {hour}"));
///     }
///     let Callback::SubscriptionEvent(event) = runtime.next().await else { panic!("expected an event") };
///     assert!(event.is_final);
///     Ok(())
/// }
/// ```
pub struct TestRuntime {
    server: ToolServer,
    token: Option<String>,
    clock: Clock,
    running: Option<(Arc<Engine>, Router)>,
    script: Arc<Script>,
    received: mpsc::UnboundedReceiver<Callback>,
    /// Callbacks that arrived while the test waited for another one.
    deferred: VecDeque<Callback>,
    calls: u64,
    _data: TempDir,
}

/// Faults to apply to the next callbacks, and where to send accepted callbacks.
struct Script {
    next: Mutex<VecDeque<CallbackFault>>,
    received: mpsc::UnboundedSender<Callback>,
}

enum CallbackFault {
    Refuse(u16),
    Delay(Duration),
    LoseAnswer,
}

/// The result of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// The callback message.
    pub result: ToolResult,
}

impl Outcome {
    /// Returns the text of the result.
    ///
    /// # Panics
    ///
    /// Panics if the result has content instead of text.
    pub fn text(&self) -> &str {
        match &self.result.body {
            ResultBody::Text(text) => text,
            ResultBody::Content(content) => panic!("the result has content, not text: {content:?}"),
        }
    }

    /// Returns true if the result is an error.
    pub fn is_error(&self) -> bool {
        matches!(&self.result.body, ResultBody::Text(text) if text.starts_with(ERROR_PREFIX))
    }
}

impl TestRuntime {
    /// Starts a server. Ignores its data directory and the environment. A journal in memory is lost at a restart.
    pub async fn start(server: ToolServer) -> Result<Self, ServeError> {
        let data =
            tempfile::tempdir().map_err(|source| ServeError::Data { path: std::env::temp_dir(), source })?;
        let (sender, received) = mpsc::unbounded_channel();
        // A test has no key or certificate of the callers.
        let needs_token = !server.is_open() && server.first_token().is_none();
        let server = if needs_token { server.bearer("test-runtime") } else { server };
        let mut runtime = TestRuntime {
            token: server.first_token().map(str::to_owned),
            server: if server.has_journal_in_memory() { server } else { server.data(data.path()) },
            clock: Clock::virtual_from_now(),
            running: None,
            script: Arc::new(Script { next: Mutex::default(), received: sender }),
            received,
            deferred: VecDeque::new(),
            calls: 0,
            _data: data,
        };
        runtime.restart().await?;
        Ok(runtime)
    }

    /// Kills the server: everything that is not on disk is lost, as with `kill -9`.
    pub async fn crash(&mut self) {
        if let Some((engine, _)) = self.running.take() {
            engine.crash().await;
        }
    }

    /// Shuts the server down gracefully.
    pub async fn stop(&mut self) {
        if let Some((engine, _)) = self.running.take() {
            engine.shut_down().await;
        }
    }

    /// Starts the server again with the same journal. Kills it first if it is running.
    pub async fn restart(&mut self) -> Result<(), ServeError> {
        self.crash().await;
        let script = Arc::clone(&self.script);
        let outgoing =
            Outgoing::Memory(Arc::new(move |url, body| Box::pin(receive(Arc::clone(&script), url, body))));
        let public_url = self.server.configured_public_url().unwrap_or("https://tool.test").to_owned();
        let callback_rules = self.server.callback_rules(&public_url, None)?;
        let externals = Externals { public_url, callback_rules, outgoing, clock: self.clock.clone() };
        let engine = self.server.clone().open(externals)?;
        engine.resume().await?;
        self.running = Some((Arc::clone(&engine), http::router(engine)));
        Ok(())
    }

    /// Calls a tool and waits for its result. Keeps other callbacks that arrive meanwhile for [`TestRuntime::next`].
    pub async fn call(&mut self, tool: &str, arguments: Value) -> Outcome {
        let id = self.invoke(tool, arguments).await;
        self.result_of(&id).await
    }

    /// Calls a tool without waiting for its result.
    pub async fn invoke(&mut self, tool: &str, arguments: Value) -> CallId {
        self.invoke_in(THREAD, tool, arguments).await
    }

    /// Calls a tool in the thread with this id, without waiting for its result.
    pub async fn invoke_in(&mut self, thread: &str, tool: &str, arguments: Value) -> CallId {
        self.calls += 1;
        let id = format!("call-{}", self.calls);
        let status = self.invoke_with_id(thread, &id, tool, arguments).await;
        assert_eq!(status, 200, "the server did not acknowledge the call");
        CallId::new(id).expect("bug: such ids are well-formed")
    }

    /// Sends an invocation with this id. Use the id of an earlier call to repeat it. Returns the HTTP status.
    pub async fn invoke_with_id(&self, thread: &str, id: &str, tool: &str, arguments: Value) -> u16 {
        let invocation = json!({
            "operation": tool,
            "arguments": arguments,
            "id": id,
            "group_id": thread,
            "callback_url": format!("https://runtime.test/callback/{id}"),
        });
        self.post(http::INVOKE_PATH, &invocation).await.0
    }

    /// Waits for the result of a call. Keeps other callbacks that arrive meanwhile for [`TestRuntime::next`].
    pub async fn result_of(&mut self, call: &CallId) -> Outcome {
        let mut others = VecDeque::new();
        loop {
            let callback = self.next().await;
            match callback {
                Callback::ToolResult(result) if result.id == *call => {
                    others.append(&mut self.deferred);
                    self.deferred = others;
                    return Outcome { result };
                }
                other => others.push_back(other),
            }
        }
    }

    /// Waits for the next callback that was accepted.
    pub async fn next(&mut self) -> Callback {
        if let Some(callback) = self.deferred.pop_front() {
            return callback;
        }
        let next = tokio::time::timeout(CALLBACK_TIMEOUT, self.received.recv()).await;
        next.expect("no callback arrived in 400 days").expect("bug: this runtime holds the sender")
    }

    /// Returns the accepted callbacks that the test has not received yet.
    pub fn pending(&mut self) -> Vec<Callback> {
        let mut pending: Vec<Callback> = self.deferred.drain(..).collect();
        pending.extend(std::iter::from_fn(|| self.received.try_recv().ok()));
        pending
    }

    /// Answers the next callback with this status instead of accepting it.
    pub fn refuse_next(&self, status: u16) {
        self.add_fault(CallbackFault::Refuse(status));
    }

    /// Delays the answer to the next callback.
    pub fn delay_next(&self, by: Duration) {
        self.add_fault(CallbackFault::Delay(by));
    }

    /// Accepts the next callback but loses the answer, so that the server sends it again.
    pub fn duplicate_next(&self) {
        self.add_fault(CallbackFault::LoseAnswer);
    }

    fn add_fault(&self, fault: CallbackFault) {
        self.script.next.lock().expect("bug: nothing panics under this lock").push_back(fault);
    }

    /// Answers a question, as the user would. Returns the HTTP status.
    pub async fn answer(&self, question: &UserChoice, selected: usize) -> u16 {
        let path = question.response_url.to_url().path().to_owned();
        let path = self.below_public_url(&path);
        self.post(&path, &json!({"id": question.id, "selected": selected})).await.0
    }

    /// Opens a URL of the server, as a user's browser would. Returns the HTTP status and the page.
    pub async fn visit(&self, url: &str) -> (u16, String) {
        let path = match url.strip_prefix(self.server.configured_public_url().unwrap_or("https://tool.test"))
        {
            Some(path) => path,
            None => panic!("{url} is not on this server"),
        };
        self.request(Method::GET, path, Body::empty()).await
    }

    /// Cancels a call of the default thread.
    pub async fn cancel(&self, call: &CallId) {
        let body = json!({"thread_id": THREAD, "tool_call_id": call});
        assert_eq!(self.post(CANCEL_TOOL_CALL_PATH, &body).await.0, 200);
    }

    /// Closes the default thread.
    pub async fn close(&self) {
        self.close_thread(THREAD).await;
    }

    /// Closes the thread with this id.
    pub async fn close_thread(&self, thread: &str) {
        assert_eq!(self.post(CLOSE_THREAD_PATH, &json!({"thread_id": thread})).await.0, 200);
    }

    /// Asks the server whether it will still send a result or events for a call of the default thread.
    pub async fn is_alive(&self, call: &CallId) -> bool {
        let body = json!({"thread_id": THREAD, "tool_call_id": call});
        let (_, answer) = self.post(TOOL_CALL_STATUS_PATH, &body).await;
        serde_json::from_str::<Value>(&answer).is_ok_and(|answer| answer["alive"] == true)
    }

    /// Strips the path of the public URL, which the router does not see.
    fn below_public_url(&self, path: &str) -> String {
        let base = self.server.configured_public_url().and_then(|url| url.parse::<axum::http::Uri>().ok());
        let prefix = base.as_ref().map_or("", |base| base.path().trim_end_matches('/'));
        path.strip_prefix(prefix).unwrap_or(path).to_owned()
    }

    async fn post(&self, path: &str, body: &Value) -> (u16, String) {
        self.request(Method::POST, path, Body::from(body.to_string())).await
    }

    async fn request(&self, method: Method, path: &str, body: Body) -> (u16, String) {
        let (_, router) = self.running.as_ref().expect("the server is not running");
        let mut request = Request::builder().method(method).uri(path);
        request = request.header(header::CONTENT_TYPE, "application/json");
        if let Some(token) = &self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request.body(body).expect("bug: such requests are well-formed");
        let response = match router.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let status = response.status();
        let body = response.into_body().collect().await.map_or_else(|_| Bytes::new(), |body| body.to_bytes());
        (status.as_u16(), String::from_utf8_lossy(&body).into_owned())
    }
}

/// Receives a callback from the server, as the endpoint of a runtime would.
async fn receive(script: Arc<Script>, _: CallbackUrl, body: Bytes) -> Result<Reply, client::Error> {
    let answer = |status| Ok(Reply { status, retry_after: None, body: Bytes::new() });
    let fault = script.next.lock().expect("bug: nothing panics under this lock").pop_front();
    let callback = parse_callback(&body).expect("bug: the server sent a callback that is not valid");
    match &fault {
        Some(CallbackFault::Refuse(status)) => return answer(*status),
        Some(CallbackFault::Delay(by)) => tokio::time::sleep(*by).await,
        Some(CallbackFault::LoseAnswer) | None => {}
    }
    if script.received.send(callback).is_err() {
        return answer(StatusCode::GONE.as_u16());
    }
    if matches!(fault, Some(CallbackFault::LoseAnswer)) { Err(client::Error::TimedOut) } else { answer(200) }
}
