//! A fake HTTP server: it records every request and gives the replies that the test has set.

use std::collections::{HashMap, VecDeque};
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

use super::PATIENCE;

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
    /// No reply; the connection stays open.
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
        let stage = Arc::new(Stage { record: Mutex::default(), arrivals: watch::Sender::new(0) });
        let mut peer = Peer { url: format!("http://{address}"), address, stage, task: None };
        peer.serve(listener);
        peer
    }

    fn serve(&mut self, listener: TcpListener) {
        let router = Router::new().fallback(answer).with_state(Arc::clone(&self.stage));
        self.task = Some(tokio::spawn(serve(listener, router)));
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

    /// Number of requests for a path so far.
    pub fn count(&self, path: &str) -> usize {
        self.stage.record().requests.iter().filter(|(request, _)| request.path == path).count()
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
        let (request, seen) =
            record.requests.iter_mut().find(|(request, seen)| !seen && request.path == path)?;
        *seen = true;
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
        let mut arrivals = self.stage.arrivals.subscribe();
        let next = async {
            loop {
                if let Some(request) = self.take(path) {
                    return request;
                }
                arrivals.changed().await.unwrap();
            }
        };
        tokio::time::timeout(PATIENCE, next).await.unwrap_or_else(|_| panic!("no request for {path}"))
    }
}

async fn answer(
    State(stage): State<Arc<Stage>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    raw: Bytes,
) -> Response<Body> {
    let path = uri.path().to_owned();
    let body = serde_json::from_slice(&raw).unwrap_or(Value::Null);
    let reply = {
        let mut record = stage.record();
        let request = Request { method, path: path.clone(), headers, raw, body, at: Instant::now() };
        record.requests.push((request, false));
        let next = record.next.get_mut(&path).and_then(VecDeque::pop_front);
        next.or_else(|| record.always.get(&path).cloned()).unwrap_or(Reply::Status(200))
    };
    stage.arrivals.send_modify(|count| *count += 1);
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
async fn serve(listener: TcpListener, router: Router) {
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
