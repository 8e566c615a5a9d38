//! A fake HTTP server: it records every request and gives the replies that the test has set.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Method, Response, Uri};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::PATIENCE;

/// A received request.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: Method,
    pub path: String,
    pub headers: HeaderMap,
    pub raw: Bytes,
    /// Body as JSON; null if it is not JSON.
    pub body: Value,
    pub at: Instant,
}

impl Request {
    fn new(method: Method, uri: &Uri, headers: HeaderMap, raw: Bytes) -> Request {
        let body = serde_json::from_slice(&raw).unwrap_or(Value::Null);
        Request { method, path: uri.path().to_owned(), headers, raw, body, at: Instant::now() }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

/// Reply to a request.
#[derive(Debug, Clone)]
pub enum Reply {
    Status(u16),
    /// Status, optional header and body.
    Full(u16, Option<(&'static str, String)>, Bytes),
    /// No reply before [`Peer::release`]; the connection stays open.
    Hang,
    /// The first bytes of a stream that never ends.
    Begin(Bytes),
}

impl Reply {
    pub fn json(value: &Value) -> Reply {
        Reply::Full(200, Some(("content-type", "application/json".into())), value.to_string().into())
    }
}

#[derive(Default)]
struct Record {
    /// Received requests, each with a flag that says whether the test has taken it.
    requests: Vec<(Request, bool)>,
    next: HashMap<String, VecDeque<Reply>>,
    always: HashMap<String, Reply>,
}

struct Stage {
    record: Mutex<Record>,
    arrivals: watch::Sender<usize>,
    /// Number of calls of [`Peer::release`].
    releases: watch::Sender<usize>,
}

impl Stage {
    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap()
    }
}

pub struct Peer {
    pub url: String,
    address: SocketAddr,
    stage: Arc<Stage>,
    task: Option<JoinHandle<()>>,
}

impl Peer {
    pub async fn start() -> Peer {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stage = Arc::new(Stage {
            record: Mutex::default(),
            arrivals: watch::Sender::new(0),
            releases: watch::Sender::new(0),
        });
        let mut peer = Peer { url: format!("http://{address}"), address, stage, task: None };
        peer.serve(listener);
        peer
    }

    fn serve(&mut self, listener: TcpListener) {
        let router = Router::new().fallback(answer).with_state(Arc::clone(&self.stage));
        self.task = Some(tokio::spawn(serve_router(listener, router)));
    }

    /// Closes all connections and stops listening.
    pub async fn stop(&mut self) {
        let task = self.task.take().unwrap();
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
    }

    /// Listens again on the same address.
    pub async fn start_again(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.serve(listener);
    }

    /// Queues a reply to the next request for a path.
    pub fn answer_next(&self, path: &str, reply: Reply) {
        self.stage.record().next.entry(path.into()).or_default().push_back(reply);
    }

    /// Sets the reply to requests for a path that have no queued reply.
    pub fn answer_always(&self, path: &str, reply: Reply) {
        self.stage.record().always.insert(path.into(), reply);
    }

    /// Replies to every request that hangs, as its path is answered now, or with 200.
    pub fn release(&self) {
        self.stage.releases.send_modify(|count| *count += 1);
    }

    /// Number of requests for a path so far.
    pub fn count(&self, path: &str) -> usize {
        self.stage.record().requests.iter().filter(|(request, _)| request.path == path).count()
    }

    /// Number of requests for a path that the test has not taken yet.
    pub fn pending(&self, path: &str) -> usize {
        let record = self.stage.record();
        record.requests.iter().filter(|(request, taken)| !taken && request.path == path).count()
    }

    /// All requests for a path, in order.
    pub fn all(&self, path: &str) -> Vec<Request> {
        let record = self.stage.record();
        record
            .requests
            .iter()
            .filter(|(request, _)| request.path == path)
            .map(|(request, _)| request.clone())
            .collect()
    }

    fn take(&self, path: &str) -> Option<Request> {
        let mut record = self.stage.record();
        let (request, taken) =
            record.requests.iter_mut().find(|(request, taken)| !taken && request.path == path)?;
        *taken = true;
        let mut request = request.clone();
        drop(record);
        // Replace the call id in a notification by the model's id, if the call was sent to this server.
        if let Some(id) = request.body["tool_call_id"].as_str() {
            request.body["tool_call_id"] = Value::String(self.name_of(id));
        }
        Some(request)
    }

    /// Returns the model's id of a call that was sent to this server; the id itself for any other.
    pub fn name_of(&self, id: &str) -> String {
        let record = self.stage.record();
        let call = record.requests.iter().find(|(request, _)| request.body["id"] == id);
        let name = call.and_then(|(request, _)| request.body["call_id"].as_str());
        name.unwrap_or(id).to_owned()
    }

    /// Waits for the next request for a path that the test has not taken yet.
    pub async fn next(&self, path: &str) -> Request {
        let next = tokio::time::timeout(PATIENCE, self.next_at_any_time(path)).await;
        next.unwrap_or_else(|_| panic!("no request for {path}"))
    }

    /// Like [`Peer::next`], without a limit of time.
    pub async fn next_at_any_time(&self, path: &str) -> Request {
        let mut arrivals = self.stage.arrivals.subscribe();
        loop {
            if let Some(request) = self.take(path) {
                return request;
            }
            arrivals.changed().await.unwrap();
        }
    }
}

async fn answer(
    State(stage): State<Arc<Stage>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    raw: Bytes,
) -> Response<Body> {
    let request = Request::new(method, &uri, headers, raw);
    let mut releases = stage.releases.subscribe();
    let reply = {
        let mut record = stage.record();
        let next = record.next.get_mut(&request.path).and_then(VecDeque::pop_front);
        let reply = next.or_else(|| record.always.get(&request.path).cloned());
        record.requests.push((request, false));
        reply.unwrap_or(Reply::Status(200))
    };
    stage.arrivals.send_modify(|count| *count += 1);
    if matches!(reply, Reply::Hang) {
        releases.changed().await.unwrap();
        let now = stage.record().always.get(uri.path()).cloned();
        return response(now.filter(|now| !matches!(now, Reply::Hang)).unwrap_or(Reply::Status(200))).await;
    }
    response(reply).await
}

/// Starts a server whose replies a function computes. Returns its URL. It ends with the tokio runtime of the test.
pub async fn serve<F: Future<Output = Reply> + Send + 'static>(
    rule: impl Fn(Request) -> F + Clone + Send + Sync + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answer = move |method: Method, uri: Uri, headers: HeaderMap, raw: Bytes| {
        let reply = rule(Request::new(method, &uri, headers, raw));
        async move { response(reply.await).await }
    };
    tokio::spawn(serve_router(listener, Router::new().fallback(answer)));
    url
}

async fn response(reply: Reply) -> Response<Body> {
    let (status, header, body) = match reply {
        Reply::Status(status) => (status, None, Bytes::new()),
        Reply::Full(status, header, body) => (status, header, body),
        Reply::Hang => std::future::pending().await,
        Reply::Begin(body) => {
            let begin = futures_util::stream::iter([Ok::<_, std::io::Error>(body)]);
            let never = futures_util::stream::pending();
            return Response::new(Body::from_stream(futures_util::StreamExt::chain(begin, never)));
        }
    };
    let mut response = Response::builder().status(status);
    if let Some((name, value)) = header {
        response = response.header(name, value);
    }
    response.body(Body::from(body)).unwrap()
}

/// Serves until it is dropped. Unlike with axum's `serve`, the connections are closed then.
pub async fn serve_router(listener: TcpListener, router: Router) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let service = TowerToHyperService::new(router.clone());
        let connection =
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
        connections.spawn(async move { connection.await.ok() });
        while connections.try_join_next().is_some() {}
    }
}
