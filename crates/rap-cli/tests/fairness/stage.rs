//! A model and a tool server whose answers are computed by a function, unlike those of `rap_testkit`, which are queued.

use std::future::Future;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use rap_testkit::peer::{Reply, Request, serve};
use rap_testkit::tools::{Call, DISCOVERY, INVOKE, tool, with};
use rap_testkit::{Rap, http};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Maximum time to wait for an expected event.
const SOON: Duration = Duration::from_secs(15);
const COMPLETIONS: &str = "/v1/chat/completions";
/// Number of concurrent clients.
const SENDERS: usize = 16;

/// List of received items, in order, that a test can wait on.
pub struct Log<T> {
    items: Mutex<Vec<T>>,
    grown: watch::Sender<usize>,
}

impl<T> Log<T> {
    fn new() -> Arc<Log<T>> {
        Arc::new(Log { items: Mutex::default(), grown: watch::Sender::new(0) })
    }

    fn push(&self, item: T) {
        self.items.lock().unwrap().push(item);
        self.grown.send_modify(|count| *count += 1);
    }

    /// Evaluates a function on the current items.
    pub fn look<R>(&self, look: impl FnOnce(&[T]) -> R) -> R {
        look(&self.items.lock().unwrap())
    }

    pub fn count(&self, is: impl Fn(&T) -> bool) -> usize {
        self.look(|items| items.iter().filter(|item| is(item)).count())
    }

    /// Evaluates a function after every arrival until it returns a value.
    pub async fn until<R>(&self, what: &str, look: impl Fn(&[T]) -> Option<R>) -> R {
        let mut grown = self.grown.subscribe();
        let found = async {
            loop {
                if let Some(found) = self.look(&look) {
                    return found;
                }
                grown.changed().await.unwrap();
            }
        };
        soon(what, found).await
    }

    /// Waits until this many items match. The time limit starts again with every arrival.
    pub async fn until_count(&self, what: &str, count: usize, is: impl Fn(&T) -> bool) {
        let mut reached = 0;
        while reached < count {
            let more = |items: &[T]| {
                let now = items.iter().filter(|item| is(item)).count();
                (now > reached).then_some(now)
            };
            reached = self.until(&format!("{what}: {count}; there are {reached}"), more).await;
        }
    }
}

/// A received model request.
pub struct Question {
    body: Value,
}

impl Question {
    fn messages(&self) -> &[Value] {
        self.body["messages"].as_array().unwrap()
    }

    /// First message of the user. It identifies the conversation; children inherit it.
    pub fn topic(&self) -> &str {
        let first = self.messages().iter().find(|message| message["role"] == "user");
        first.and_then(|message| message["content"].as_str()).unwrap_or_default()
    }

    /// The content of the last message.
    pub fn last(&self) -> &str {
        self.messages().last().and_then(|message| message["content"].as_str()).unwrap_or_default()
    }

    /// True for a request of a child thread.
    pub fn is_of_child(&self) -> bool {
        self.tool("report_to_parent").is_some()
    }

    /// The description of a tool, if it is offered.
    pub fn tool(&self, name: &str) -> Option<&str> {
        let tools = self.body["tools"].as_array()?;
        let function = tools.iter().map(|tool| &tool["function"]).find(|function| function["name"] == name);
        function.and_then(|function| function["description"].as_str())
    }

    /// True if the prompt contains the text.
    pub fn mentions(&self, text: &str) -> bool {
        self.messages().iter().any(|message| message.to_string().contains(text))
    }
}

/// Behaviour of the model.
pub enum Answer {
    Says(String),
    Calls(Vec<(&'static str, Value)>),
    /// A status, and the seconds of its `Retry-After`.
    Fails(u16, Option<u32>),
    /// Never answers.
    Hangs,
}

/// A fake OpenAI server.
pub struct Model {
    url: String,
    /// Every received request.
    pub requests: Arc<Log<Arc<Question>>>,
}

impl Model {
    pub async fn start<F: Future<Output = Answer> + Send + 'static>(
        rule: impl Fn(Arc<Question>) -> F + Send + Sync + 'static,
    ) -> Model {
        let (requests, rule, calls) = (Log::new(), Arc::new(rule), Arc::new(AtomicUsize::new(0)));
        let log = Arc::clone(&requests);
        let url = serve(move |request: Request| {
            let (log, rule, calls) = (Arc::clone(&log), Arc::clone(&rule), Arc::clone(&calls));
            async move {
                if request.path != COMPLETIONS {
                    return Reply::Status(404);
                }
                let question = Arc::new(Question { body: request.body });
                log.push(Arc::clone(&question));
                completion(rule(question).await, &calls)
            }
        });
        Model { url: url.await, requests }
    }

    /// The lines of `[model]`.
    pub fn lines(&self) -> String {
        format!("provider = \"openai\"\nname = \"gpt\"\napi_key = \"sk-key\"\nbase_url = \"{}/v1\"", self.url)
    }
}

fn completion(answer: Answer, calls_before: &AtomicUsize) -> Reply {
    let (delta, finish) = match answer {
        Answer::Says(text) => (json!({"content": text}), "stop"),
        Answer::Calls(calls) => {
            let call = |(index, (name, arguments)): (usize, (&str, Value))| {
                let id = format!("model_{}", calls_before.fetch_add(1, Ordering::Relaxed));
                let function = json!({"name": name, "arguments": arguments.to_string()});
                json!({"index": index, "id": id, "type": "function", "function": function})
            };
            let calls: Vec<Value> = calls.into_iter().enumerate().map(call).collect();
            (json!({"tool_calls": calls}), "tool_calls")
        }
        Answer::Fails(status, retry_after) => {
            let header = retry_after.map(|seconds| ("retry-after", seconds.to_string()));
            return Reply::Full(status, header, Bytes::new());
        }
        Answer::Hangs => return Reply::Hang,
    };
    let chunks = [
        json!({"choices": [{"index": 0, "delta": delta, "finish_reason": null}]}),
        json!({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}),
        json!({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 3}}),
    ];
    let body: String = chunks.iter().map(|chunk| format!("data: {chunk}\n\n")).collect();
    let header = Some(("content-type", "text/event-stream".to_owned()));
    Reply::Full(200, header, format!("{body}data: [DONE]\n\n").into())
}

/// Tool server `bench` with the tool `work`, which returns `done` at once. After a new deployment it has another version
/// and refuses calls with an older one by 409.
pub struct Bench {
    pub url: String,
    version: Arc<AtomicU32>,
    /// Every received request.
    pub requests: Arc<Log<Request>>,
}

impl Bench {
    pub async fn start() -> Bench {
        let (version, requests) = (Arc::new(AtomicU32::new(1)), Log::new());
        let (current, log) = (Arc::clone(&version), Arc::clone(&requests));
        let url = serve(move |request: Request| {
            let version = current.load(Ordering::SeqCst).to_string();
            let host = request.header("host").unwrap().to_owned();
            log.push(request.clone());
            async move {
                match request.path.as_str() {
                    DISCOVERY => Reply::json(&document(&host, &version)),
                    INVOKE if request.body["toolset_version"] != *version => Reply::Status(409),
                    INVOKE => {
                        let call = Call { request };
                        let result = call.result("done").to_string();
                        tokio::spawn(async move {
                            let headers = [("content-type", "application/json")];
                            // The runtime may be gone after the test.
                            http::attempt("POST", call.url(), &headers, result.as_bytes()).await.ok()
                        });
                        Reply::Status(200)
                    }
                    _ => Reply::Status(200),
                }
            }
        });
        Bench { url: url.await, version, requests }
    }

    pub fn deploy(&self, version: u32) {
        self.version.store(version, Ordering::SeqCst);
    }

    pub fn discoveries(&self) -> usize {
        self.requests.count(|request| request.path == DISCOVERY)
    }

    /// Invocations that named this version.
    pub fn invocations(&self, version: u32) -> usize {
        let version = version.to_string();
        self.requests.count(|request| request.path == INVOKE && request.body["toolset_version"] == *version)
    }
}

/// The description of the tool contains the version, so that a test sees which one a model was offered.
fn document(host: &str, version: &str) -> Value {
    let work = with(tool("work"), json!({"description": format!("Works, version {version}.")}));
    let endpoint = format!("http://{host}{INVOKE}");
    json!({"name": "bench", "version": version, "endpoint": endpoint, "tools": [work]})
}

/// Waits for a future, at most [`SOON`].
pub async fn soon<T>(what: &str, arrives: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, arrives).await.unwrap_or_else(|_| panic!("timed out waiting for {what}"))
}

/// POSTs all requests, several at a time. Each has to get this status.
pub async fn post_all(status: u16, requests: impl IntoIterator<Item = (String, Value)>) {
    let queue = Arc::new(Mutex::new(requests.into_iter().collect::<Vec<_>>().into_iter()));
    let mut senders = JoinSet::new();
    for _ in 0..SENDERS {
        let queue = Arc::clone(&queue);
        senders.spawn(async move {
            loop {
                let Some((url, body)) = queue.lock().unwrap().next() else { return };
                http::post(&url, &body).await.expect(status);
            }
        });
    }
    senders.join_all().await;
}

/// Creates threads with these ids, and with a first message if one is given.
pub async fn open_all(rap: &Rap, ids: &[String], message: Option<&str>) {
    let url = format!("{}/v1/threads", rap.url);
    let body = |id: &String| match message {
        Some(message) => json!({"id": id, "message": message}),
        None => json!({"id": id}),
    };
    post_all(201, ids.iter().map(|id| (url.clone(), body(id)))).await;
}
