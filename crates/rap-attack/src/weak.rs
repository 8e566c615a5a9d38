//! A server that accepts anything, to show that the attempts notice one. It is a proxy in front of a real server: it hides
//! the headers by which the real one would recognise an attacker, turns every refusal into 200, keeps all bodies in memory,
//! logs everything that it receives, and does not stop when it is asked to.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Response, header};
use rap_testkit::{Process, http, peer};
use tempfile::TempDir;

use crate::stage::Front;

/// First argument of the process that is the proxy. The second one is a file with the URL of the real server.
const ROLE: &str = "weak-proxy";
/// Headers by which a server recognises requests of web pages and of other servers.
const HIDDEN: [header::HeaderName; 5] =
    [header::HOST, header::ORIGIN, header::USER_AGENT, header::CONNECTION, header::CONTENT_LENGTH];

/// Returns the file that the command line names, if this process is to be the proxy.
pub(crate) fn requested() -> Option<PathBuf> {
    let mut arguments = std::env::args_os().skip(1);
    (arguments.next()? == ROLE).then(|| arguments.next().map(PathBuf::from))?
}

/// Starts the proxy, if there is to be one. Its directory is for the URL of the real server.
pub(crate) fn start_before(front: Front) -> Option<(Process, TempDir)> {
    if front == Front::None {
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg(ROLE).arg(directory.path().join("target"));
    Some((Process::start(command), directory))
}

/// Tells the proxy the URL of the real server.
pub(crate) fn set_target(directory: TempDir, url: &str) {
    std::fs::write(directory.keep().join("target"), url).unwrap();
}

struct Proxy {
    target: PathBuf,
    /// Everything that it ever received.
    hoard: Mutex<Vec<Vec<u8>>>,
}

pub(crate) fn run(target: &Path) -> ExitCode {
    let proxy = Arc::new(Proxy { target: target.to_owned(), hoard: Mutex::default() });
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        // Receiving the signal keeps it from ending the process.
        let _ignored = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).unwrap();
        eprintln!("listening on http://{}", listener.local_addr().unwrap());
        let router = Router::new().fallback(forward).with_state(proxy);
        tokio::select! {
            () = peer::serve_router(listener, router) => {}
            // The attack is over.
            () = stdin_closed() => {}
        }
    });
    ExitCode::SUCCESS
}

async fn stdin_closed() {
    let reading =
        tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()));
    reading.await.unwrap().unwrap();
}

async fn forward(State(proxy): State<Arc<Proxy>>, request: Request) -> Response<Body> {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap_or_default();
    eprintln!("{} {} {:?} {:?}", head.method, head.uri, head.headers, &body[..body.len().min(1000)]);
    proxy.hoard.lock().unwrap().push(body.to_vec());
    let headers: Vec<(&str, &str)> = head
        .headers
        .iter()
        .filter(|(name, _)| !HIDDEN.contains(name))
        .filter_map(|(name, value)| Some((name.as_str(), value.to_str().ok()?)))
        .collect();
    let target = std::fs::read_to_string(&proxy.target).unwrap_or_default();
    let url = format!("{target}{}", head.uri);
    let answer = http::attempt(head.method.as_str(), &url, &headers, &body).await;
    let (status, text) = answer.map_or((200, String::new()), |answer| (answer.status, answer.text));
    let status = if status >= 400 { 200 } else { status };
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    *response.status_mut() = axum::http::StatusCode::from_u16(status).unwrap_or_default();
    response
}
