//! A fake HTTP server on loopback that returns canned responses and records its requests, which have to be JSON.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Response};
use axum::serve::ListenerExt;
use axum::{Router, routing};
use futures_util::future::ready;
use futures_util::stream::{self, StreamExt};
use serde_json::Value;

/// A canned response of the server.
#[derive(Clone, Default)]
pub struct Canned {
    pub status: u16,
    pub headers: Vec<(&'static str, &'static str)>,
    pub content_type: Option<&'static str>,
    pub body: Vec<u8>,
    /// True if the connection is cut after the body.
    pub breaks: bool,
}

pub fn ok(body: impl Into<Vec<u8>>) -> Canned {
    Canned { status: 200, body: body.into(), ..Canned::default() }
}

/// A successful response with the content type of an event stream.
pub fn events_of(body: impl Into<Vec<u8>>) -> Canned {
    Canned { content_type: Some("text/event-stream"), ..ok(body) }
}

pub fn failing(status: u16, body: &str) -> Canned {
    Canned { status, body: body.into(), ..Canned::default() }
}

#[derive(Clone, Default)]
pub struct Server {
    responses: Arc<Mutex<VecDeque<Canned>>>,
    requests: Arc<Mutex<Vec<(HeaderMap, Value)>>>,
}

async fn respond(State(server): State<Server>, headers: HeaderMap, body: Bytes) -> Response<Body> {
    server.requests.lock().unwrap().push((headers, serde_json::from_slice(&body).unwrap()));
    let canned = server.responses.lock().unwrap().pop_front().unwrap();
    let mut response = Response::builder().status(canned.status);
    for (name, value) in canned.headers {
        response = response.header(name, value);
    }
    if let Some(kind) = canned.content_type {
        response = response.header("content-type", kind);
    }
    let body = stream::iter([Ok(Bytes::from(canned.body))]);
    // The yield lets the server send the body before the error.
    let end = stream::once(tokio::task::yield_now());
    let end = end.filter_map(move |()| ready(canned.breaks.then(|| Err(io::Error::other("cut")))));
    response.body(Body::from_stream(body.chain(end))).unwrap()
}

impl Server {
    /// Starts a server that returns these responses at a path, in this order. Returns its address as well.
    pub async fn start(path: &str, responses: impl IntoIterator<Item = Canned>) -> (Server, SocketAddr) {
        let responses = Arc::new(Mutex::new(responses.into_iter().collect()));
        let server = Server { responses, ..Server::default() };
        let router = Router::new().route(path, routing::post(respond)).with_state(server.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        (server, address)
    }

    /// Returns headers and body of every request so far.
    pub fn requests(&self) -> Vec<(HeaderMap, Value)> {
        self.requests.lock().unwrap().clone()
    }
}
