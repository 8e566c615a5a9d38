//! A server inside of the test: it records every request and answers as it was told.

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

/// A request as it came in.
#[derive(Debug, Clone)]
pub struct Asked {
    pub method: Method,
    pub path: String,
    pub headers: HeaderMap,
    pub raw: Bytes,
    /// The body, if it is JSON.
    pub body: Value,
    pub at: Instant,
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

/// How a request is answered.
#[derive(Debug, Clone)]
pub enum Reply {
    Status(u16),
    /// With a body, and a header or none.
    Full(u16, Option<(&'static str, String)>, Bytes),
    /// Not at all; the connection stays open.
    Hang,
    /// With the begin of a stream that never ends.
    Begin(Bytes),
}

impl Reply {
    pub fn json(value: &Value) -> Reply {
        Reply::Full(200, Some(("content-type", "application/json".into())), value.to_string().into())
    }
}

#[derive(Default)]
struct Record {
    /// What came, and whether the test has looked at it.
    asked: Vec<(Asked, bool)>,
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

/// The server.
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

    /// Connections break, and nobody listens there any more.
    pub async fn stop(&mut self) {
        let task = self.task.take().unwrap();
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
    }

    /// Listens again, where it was before.
    pub async fn start_again(&mut self) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        self.serve(listener);
    }

    /// The next request for a path is answered so, after those that were told before.
    pub fn answer_next(&self, path: &str, reply: Reply) {
        self.stage.record().next.entry(path.into()).or_default().push_back(reply);
    }

    /// Requests for a path are answered so, unless something was told for the next ones.
    pub fn answer_always(&self, path: &str, reply: Reply) {
        self.stage.record().always.insert(path.into(), reply);
    }

    /// How many requests for a path there were.
    pub fn count(&self, path: &str) -> usize {
        self.stage.record().asked.iter().filter(|(asked, _)| asked.path == path).count()
    }

    /// All requests for a path, in order.
    pub fn all(&self, path: &str) -> Vec<Asked> {
        let record = self.stage.record();
        record.asked.iter().filter(|(asked, _)| asked.path == path).map(|(asked, _)| asked.clone()).collect()
    }

    fn take(&self, path: &str) -> Option<Asked> {
        let mut record = self.stage.record();
        let (asked, seen) = record.asked.iter_mut().find(|(asked, seen)| !seen && asked.path == path)?;
        *seen = true;
        let mut asked = asked.clone();
        drop(record);
        // A notification names the call as the model does, if it was sent here before.
        if let Some(id) = asked.body["tool_call_id"].as_str() {
            asked.body["tool_call_id"] = Value::String(self.name_of(id));
        }
        Some(asked)
    }

    /// The id that the model gave a call which was sent here; the id itself for any other.
    pub fn name_of(&self, id: &str) -> String {
        let record = self.stage.record();
        let call = record.asked.iter().find(|(asked, _)| asked.body["id"] == id);
        let name = call.and_then(|(asked, _)| asked.body["call_id"].as_str());
        name.unwrap_or(id).to_owned()
    }

    /// The next request for a path that the test has not looked at.
    pub async fn next(&self, path: &str) -> Asked {
        let mut arrivals = self.stage.arrivals.subscribe();
        let next = async {
            loop {
                if let Some(asked) = self.take(path) {
                    return asked;
                }
                arrivals.changed().await.unwrap();
            }
        };
        tokio::time::timeout(PATIENCE, next).await.unwrap_or_else(|_| panic!("nothing came for {path}"))
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
        let asked = Asked { method, path: path.clone(), headers, raw, body, at: Instant::now() };
        record.asked.push((asked, false));
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

/// Unlike axum's, its connections end with it.
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
