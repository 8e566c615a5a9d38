//! Testing a tool server: without a socket, and with the test's own clock.

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
use crate::engine::{Engine, Outgoing, Place};
use crate::error::ServeError;
use crate::http;
use crate::server::ToolServer;

/// How much time of the test's clock may pass before a callback comes.
const PATIENCE: Duration = Duration::from_secs(400 * 24 * 3600);

/// The thread that calls are made in, unless told otherwise.
const THREAD: &str = "test-thread";

/// A runtime for tests: calls the tools of a server and sees every callback.
///
/// There is no socket, the journal lies in a directory of its own, and time is the test's: with
/// `start_paused = true` (tokio's feature `test-util`) it jumps from one event to the next, so that a week takes
/// milliseconds. Everything else is real: the endpoints, the journal, retries and restarts.
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
///     let mut told: u64 = subscribe.cursor()?.unwrap_or(0);
///     let subscription = subscribe.confirm("You will hear from me.").await?;
///     while told < args.hours {
///         tokio::time::sleep(Duration::from_secs(3600)).await;
///         told += 1;
///         subscription.send(Event::new(format!("hour {told}")).cursor(told)).await?;
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
///         let Callback::SubscriptionEvent(event) = runtime.next().await else { panic!("an event") };
///         assert_eq!(event.text, format!("hour {hour}"));
///     }
///     let Callback::SubscriptionEvent(event) = runtime.next().await else { panic!("an event") };
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
    /// Came while something else was waited for.
    passed_over: VecDeque<Callback>,
    calls: u64,
    _data: TempDir,
}

/// What happens to the callbacks that come next.
struct Script {
    next: Mutex<VecDeque<Twist>>,
    received: mpsc::UnboundedSender<Callback>,
}

enum Twist {
    Refuse(u16),
    Delay(Duration),
    LoseAnswer,
}

/// The result of a call.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// The message as it came.
    pub result: ToolResult,
}

impl Outcome {
    /// The text of the result.
    ///
    /// # Panics
    ///
    /// If the result has content instead of text.
    pub fn text(&self) -> &str {
        match &self.result.body {
            ResultBody::Text(text) => text,
            ResultBody::Content(content) => panic!("the result has content, not text: {content:?}"),
        }
    }

    /// Whether the result says that something went wrong.
    pub fn is_error(&self) -> bool {
        matches!(&self.result.body, ResultBody::Text(text) if text.starts_with(ERROR_PREFIX))
    }
}

impl TestRuntime {
    /// Starts a server. Its data directory and the environment are not used.
    pub async fn start(server: ToolServer) -> Result<Self, ServeError> {
        let data =
            tempfile::tempdir().map_err(|source| ServeError::Data { path: std::env::temp_dir(), source })?;
        let (sender, received) = mpsc::unbounded_channel();
        let mut runtime = TestRuntime {
            token: server.first_token().map(str::to_owned),
            server: server.data(data.path()),
            clock: Clock::virtual_from_now(),
            running: None,
            script: Arc::new(Script { next: Mutex::default(), received: sender }),
            received,
            passed_over: VecDeque::new(),
            calls: 0,
            _data: data,
        };
        runtime.restart().await?;
        Ok(runtime)
    }

    /// Kills the server: what it had not written down is lost, as with `kill -9`.
    pub async fn crash(&mut self) {
        if let Some((engine, _)) = self.running.take() {
            engine.crash().await;
        }
    }

    /// Stops the server in order.
    pub async fn stop(&mut self) {
        if let Some((engine, _)) = self.running.take() {
            engine.shut_down().await;
        }
    }

    /// Starts the server again, with the journal that it left.
    pub async fn restart(&mut self) -> Result<(), ServeError> {
        self.crash().await;
        let script = Arc::clone(&self.script);
        let outgoing =
            Outgoing::Memory(Arc::new(move |url, body| Box::pin(take(Arc::clone(&script), url, body))));
        let public_url = self.server.public_url_given().unwrap_or("https://tool.test").to_owned();
        let engine = self.server.clone().open(Place { public_url, outgoing, clock: self.clock })?;
        engine.resume().await?;
        self.running = Some((Arc::clone(&engine), http::router(engine)));
        Ok(())
    }

    /// Calls a tool and waits for its result. Other callbacks that come meanwhile are kept for
    /// [`TestRuntime::next`].
    pub async fn call(&mut self, tool: &str, arguments: Value) -> Outcome {
        let id = self.invoke(tool, arguments).await;
        self.result_of(&id).await
    }

    /// Calls a tool and does not wait.
    pub async fn invoke(&mut self, tool: &str, arguments: Value) -> CallId {
        self.invoke_in(THREAD, tool, arguments).await
    }

    /// Calls a tool in a thread of this name.
    pub async fn invoke_in(&mut self, thread: &str, tool: &str, arguments: Value) -> CallId {
        self.calls += 1;
        let id = format!("call-{}", self.calls);
        let status = self.send_again(thread, &id, tool, arguments).await;
        assert_eq!(status, 200, "the server did not acknowledge the call");
        CallId::new(id).expect("bug: such ids are well-formed")
    }

    /// Sends an invocation under a given id, such as one that was sent before; the status of the answer.
    pub async fn send_again(&self, thread: &str, id: &str, tool: &str, arguments: Value) -> u16 {
        let invocation = json!({
            "operation": tool,
            "arguments": arguments,
            "id": id,
            "group_id": thread,
            "callback_url": format!("https://runtime.test/callback/{id}"),
        });
        self.post(http::INVOKE_PATH, &invocation).await.0
    }

    /// Waits for the result of a call. Other callbacks that come meanwhile are kept for [`TestRuntime::next`].
    pub async fn result_of(&mut self, call: &CallId) -> Outcome {
        let mut others = VecDeque::new();
        loop {
            let callback = self.next().await;
            match callback {
                Callback::ToolResult(result) if result.id == *call => {
                    others.append(&mut self.passed_over);
                    self.passed_over = others;
                    return Outcome { result };
                }
                other => others.push_back(other),
            }
        }
    }

    /// The next callback that was accepted.
    pub async fn next(&mut self) -> Callback {
        if let Some(callback) = self.passed_over.pop_front() {
            return callback;
        }
        let next = tokio::time::timeout(PATIENCE, self.received.recv()).await;
        next.expect("no callback came in more than a year").expect("bug: this runtime holds the sender")
    }

    /// The callbacks that have been accepted and not been looked at.
    pub fn pending(&mut self) -> Vec<Callback> {
        let mut pending: Vec<Callback> = self.passed_over.drain(..).collect();
        pending.extend(std::iter::from_fn(|| self.received.try_recv().ok()));
        pending
    }

    /// The next callback is answered with this status, and not seen.
    pub fn refuse_next(&self, status: u16) {
        self.twist(Twist::Refuse(status));
    }

    /// The next callback takes this long to be answered.
    pub fn delay_next(&self, by: Duration) {
        self.twist(Twist::Delay(by));
    }

    /// The next callback is taken, but the answer is lost on its way, so that it comes a second time.
    pub fn duplicate_next(&self) {
        self.twist(Twist::LoseAnswer);
    }

    fn twist(&self, twist: Twist) {
        self.script.next.lock().expect("bug: nothing panics under this lock").push_back(twist);
    }

    /// Answers a question, as the user would; the status that the server answers with.
    pub async fn answer(&self, question: &UserChoice, selected: usize) -> u16 {
        let path = question.response_url.to_url().path().to_owned();
        let path = self.below_public_url(&path);
        self.post(&path, &json!({"id": question.id, "selected": selected})).await.0
    }

    /// Opens a URL of the server, as a user's browser would; status and page.
    pub async fn visit(&self, url: &str) -> (u16, String) {
        let path = match url.strip_prefix(self.server.public_url_given().unwrap_or("https://tool.test")) {
            Some(path) => path,
            None => panic!("{url} is not on this server"),
        };
        self.request(Method::GET, path, Body::empty()).await
    }

    /// Cancels a call of the usual thread.
    pub async fn cancel(&self, call: &CallId) {
        let body = json!({"thread_id": THREAD, "tool_call_id": call});
        assert_eq!(self.post(CANCEL_TOOL_CALL_PATH, &body).await.0, 200);
    }

    /// Closes the usual thread.
    pub async fn close(&self) {
        self.close_thread(THREAD).await;
    }

    /// Closes a thread of this name.
    pub async fn close_thread(&self, thread: &str) {
        assert_eq!(self.post(CLOSE_THREAD_PATH, &json!({"thread_id": thread})).await.0, 200);
    }

    /// Whether a result, or further events, of a call in the usual thread will still come.
    pub async fn is_alive(&self, call: &CallId) -> bool {
        let body = json!({"thread_id": THREAD, "tool_call_id": call});
        let (_, answer) = self.post(TOOL_CALL_STATUS_PATH, &body).await;
        serde_json::from_str::<Value>(&answer).is_ok_and(|answer| answer["alive"] == true)
    }

    /// The path of a URL of the server, as its router sees it.
    fn below_public_url(&self, path: &str) -> String {
        let base = self.server.public_url_given().and_then(|url| url.parse::<axum::http::Uri>().ok());
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

/// Takes a callback from the server, as a runtime's endpoint would.
async fn take(script: Arc<Script>, _: CallbackUrl, body: Bytes) -> Result<Reply, client::Error> {
    let answer = |status| Ok(Reply { status, retry_after: None, body: Bytes::new() });
    let twist = script.next.lock().expect("bug: nothing panics under this lock").pop_front();
    let callback = parse_callback(&body).expect("bug: the server sent a callback that is not valid");
    match &twist {
        Some(Twist::Refuse(status)) => return answer(*status),
        Some(Twist::Delay(by)) => tokio::time::sleep(*by).await,
        Some(Twist::LoseAnswer) | None => {}
    }
    if script.received.send(callback).is_err() {
        return answer(StatusCode::GONE.as_u16());
    }
    if matches!(twist, Some(Twist::LoseAnswer)) { Err(client::Error::TimedOut) } else { answer(200) }
}
