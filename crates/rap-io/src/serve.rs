//! Serves an axum router with limits and graceful shutdown, and listens for signals.
//!
//! No client can hold all connections: a request has to arrive in time, a reader has to read, and a full pool closes
//! the connections that have made no progress for the longest time.

mod pool;
mod stream;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::{HeaderValue, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::ServiceExt;

use crate::tls::{Acceptor, PeerCertificate};
use pool::{Admitted, Part, Pool, Progress};
use stream::TrackedStream;

/// Pause after a failed `accept`, for example when no file descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Divisor of the number of files that the process may open: connections may use this part of them. The others are for
/// outgoing requests, the database and child processes.
const FILE_LIMIT_DIVISOR: u64 = 2;
/// Maximum size of the head of a request, and of the part of an answer that is buffered for a reader that does not
/// read, in bytes.
const BUFFER_BYTES: usize = 64 * 1024;
/// Maximum number of connections that wait to be accepted, unless the system allows fewer. The system drops further
/// ones, and their clients wait a second or more until they try again, so a burst of one client would slow down others.
const BACKLOG: u32 = 4096;
/// Maximum number of connections for each processor that were accepted and that nothing was done for yet. Further ones
/// wait in the backlog, where they cost nothing, so that requests in progress do not have to wait for all of them at
/// each step.
const NEW_PER_PROCESSOR: usize = 8;
/// Answer to a connection that cannot be admitted.
const REFUSAL: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nx-content-type-options: nosniff\r\n\
      cache-control: no-store\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

/// Limits of a server.
#[derive(Debug, Clone, Copy)]
pub struct ServeLimits {
    /// Maximum number of open connections, at most half of the files that the process may open. If all are in use, the
    /// one that has made no progress for the longest time is closed.
    pub connections: usize,
    /// Time that the head of a request may take to arrive. Also the time after which an idle connection is closed, and
    /// one whose reader does not read.
    pub head_within: Duration,
    /// Beginnings of the paths that are still served if every connection makes progress, by a reserve of `connections`/8
    /// further connections. Other requests on these are answered with 503.
    pub urgent_paths: &'static [&'static str],
}

/// The other end of a connection, as an extension of its requests.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Address that the connection comes from. Behind a proxy it is the proxy's.
    pub address: SocketAddr,
    /// Certificate that the client has shown in the handshake.
    pub certificate: Option<PeerCertificate>,
}

/// Listens on an address, with room for bursts of connections.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves plain HTTP until `stop` resolves; see [`serve_with_tls_until`].
pub async fn serve_until(
    listener: TcpListener,
    router: Router,
    limits: ServeLimits,
    stop: impl Future<Output = ()>,
) -> GracefulShutdown {
    serve_with_tls_until(listener, None, router, limits, stop).await
}

/// Serves until `stop` resolves, with TLS if there is an acceptor. Returns the connections that are still open; the caller
/// has to shut them down. Each request has a [`Peer`] as an extension.
///
/// Raises the process's limit of open files as far as the system allows.
pub async fn serve_with_tls_until(
    listener: TcpListener,
    tls: Option<Acceptor>,
    router: Router,
    limits: ServeLimits,
    stop: impl Future<Output = ()>,
) -> GracefulShutdown {
    let tls = tls.map(Arc::new);
    let pool = Pool::new(limits.connections.min(connections_within_file_limit()));
    let connections = GracefulShutdown::new();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let new = Arc::new(Semaphore::new(NEW_PER_PROCESSOR * processors));
    tokio::pin!(stop);
    loop {
        tokio::select! {
            (socket, address, is_new) = accept(&listener, &new) => match pool.admit() {
                Some(admitted) => {
                    let connection = Connection {
                        router: router.clone(),
                        part: admitted.part,
                        progress: Arc::clone(&admitted.progress),
                        limits,
                        watcher: connections.watcher(),
                    };
                    serve((socket, address, is_new), admitted, &pool, tls.clone(), connection);
                }
                None => refuse(&socket),
            },
            () = &mut stop => return connections,
        }
    }
}

fn connections_within_file_limit() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let files = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => raised.current,
        Err(_) => limit.current,
    };
    files.map_or(usize::MAX, |files| usize::try_from(files / FILE_LIMIT_DIVISOR).unwrap_or(usize::MAX))
}

/// A connection that was accepted. The permit is held until something is done for it.
type AcceptedSocket = (TcpStream, SocketAddr, OwnedSemaphorePermit);

async fn accept(listener: &TcpListener, new: &Arc<Semaphore>) -> AcceptedSocket {
    let is_new = Arc::clone(new).acquire_owned().await.expect("bug: this semaphore is never closed");
    loop {
        match listener.accept().await {
            Ok((socket, address)) => return (socket, address, is_new),
            Err(error) => {
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Answers 503 without waiting for the request. The answer fits into the socket's empty buffer.
fn refuse(stream: &TcpStream) {
    if let Err(error) = stream.try_write(REFUSAL) {
        tracing::debug!(%error, "a refused connection got no answer");
    }
}

/// An admitted connection.
struct Connection {
    router: Router,
    part: Part,
    progress: Arc<Progress>,
    limits: ServeLimits,
    watcher: Watcher,
}

fn serve(
    (socket, address, is_new): AcceptedSocket,
    admitted: Admitted,
    pool: &Arc<Pool>,
    tls: Option<Arc<Acceptor>>,
    connection: Connection,
) {
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!(%error, "a connection was closed before it was served");
        return;
    }
    let id = admitted.id();
    let task = tokio::spawn(async move {
        let _admitted = admitted;
        drop(is_new);
        let Some(tls) = tls else {
            return connection.serve(socket, Peer { address, certificate: None }).await;
        };
        match tokio::time::timeout(connection.limits.head_within, tls.accept(socket)).await {
            Ok(Ok((stream, certificate))) => connection.serve(stream, Peer { address, certificate }).await,
            Ok(Err(error)) => tracing::debug!(%address, %error, "a TLS handshake failed"),
            Err(_) => tracing::debug!(%address, "a TLS handshake took too long"),
        }
    });
    pool.set_task(id, task.abort_handle());
}

impl Connection {
    async fn serve<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(self, stream: S, peer: Peer) {
        let Connection { router, part, progress, limits, watcher } = self;
        let stream = TrackedStream::new(stream, Arc::clone(&progress), limits.head_within);
        let service = service_fn(move |mut request: Request<Incoming>| {
            progress.note();
            request.extensions_mut().insert(peer.clone());
            respond(router.clone(), part, limits.urgent_paths, request)
        });
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.head_within)
            .max_buf_size(BUFFER_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        if let Err(error) = watcher.watch(connection).await {
            tracing::debug!(%error, "a connection ended early");
        }
    }
}

/// Answers a request. A connection of the reserve serves one urgent request.
async fn respond(
    router: Router,
    part: Part,
    urgent_paths: &[&str],
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    if part == Part::Ordinary {
        return router.oneshot(request).await;
    }
    let is_urgent = urgent_paths.iter().any(|path| request.uri().path().starts_with(path));
    let mut response = if is_urgent { router.oneshot(request).await? } else { overloaded() };
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    Ok(response)
}

fn overloaded() -> Response<Body> {
    let error = r#"{"error":{"code":"overloaded","message":"too many connections; try again later"}}"#;
    let mut response = Response::new(Body::from(error));
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Listener for SIGTERM and SIGINT, from the moment of its creation.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Starts to listen.
    pub fn listen() -> Self {
        let listen = |kind| signal(kind).expect("bug: the runtime can listen for signals");
        Signals { terminate: listen(SignalKind::terminate()), interrupt: listen(SignalKind::interrupt()) }
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Returns true if a `Host` header names a loopback address.
pub fn is_loopback(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const LARGE: usize = 64 << 20;
    const LIMITS: ServeLimits =
        ServeLimits { connections: 8, head_within: Duration::from_millis(300), urgent_paths: &["/urgent"] };

    /// Serves `/small`, `/urgent` and `/large` until the test ends.
    async fn server(limits: ServeLimits) -> std::net::SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/small", get(async || "small"))
            .route("/urgent", get(async || "urgent"))
            .route("/large", get(async || vec![b'x'; LARGE]));
        tokio::spawn(serve_until(listener, router, limits, std::future::pending()));
        address
    }

    async fn request(address: std::net::SocketAddr, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        stream
    }

    /// Returns the beginning of the answer.
    async fn answer(mut stream: TcpStream) -> String {
        let mut beginning = [0; 1024];
        let read = stream.read(&mut beginning).await.unwrap_or(0);
        String::from_utf8_lossy(&beginning[..read]).into_owned()
    }

    #[tokio::test]
    async fn a_burst_of_connections_waits_to_be_accepted() {
        const BURST: usize = 2000;
        let allowed = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
        if allowed.trim().parse::<usize>().unwrap() < BURST || connections_within_file_limit() < BURST {
            return eprintln!("the system allows fewer connections");
        }
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let mut open = Vec::new();
        for _ in 0..BURST {
            // A connection that was dropped is tried again only after a second, and is dropped again.
            let connect = tokio::time::timeout(Duration::from_secs(20), TcpStream::connect(address));
            open.push(connect.await.unwrap().unwrap());
        }
    }

    #[tokio::test]
    async fn connections_wait_in_the_backlog_while_nothing_was_done_for_earlier_ones() {
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let _open = [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
        let new = Arc::new(Semaphore::new(1));
        let first = accept(&listener, &new).await;
        tokio::select! {
            biased;
            _ = accept(&listener, &new) => panic!("it was accepted"),
            () = tokio::task::yield_now() => {}
        }
        drop(first);
        drop(accept(&listener, &new).await);
    }

    #[tokio::test]
    async fn a_reader_that_does_not_read_is_disconnected() {
        let address = server(LIMITS).await;
        let mut stream = request(address, "/large").await;
        // The end of the connection is seen without reading the answer.
        let closed = async {
            while stream.write(b" ").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), closed).await.unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.ok();
        assert!(rest.len() < LARGE);
    }

    #[tokio::test]
    async fn connections_that_never_send_or_read_do_not_keep_others_out() {
        let limits = ServeLimits { head_within: Duration::from_secs(600), ..LIMITS };
        let address = server(limits).await;
        let mut held = Vec::new();
        for number in 0..2 * LIMITS.connections {
            match number % 2 {
                0 => held.push(TcpStream::connect(address).await.unwrap()),
                _ => held.push(request(address, "/large").await),
            }
        }
        let served = async {
            while !answer(request(address, "/small").await).await.ends_with("small") {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), served).await.unwrap();
    }

    #[tokio::test]
    async fn urgent_requests_are_served_while_all_connections_make_progress() {
        let address = server(LIMITS).await;
        let keep_busy = |mut stream: TcpStream| async move {
            let mut chunk = vec![0; 1 << 16];
            loop {
                stream.write_all(b"GET /small HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
                assert!(stream.read(&mut chunk).await.unwrap() > 0);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let mut busy = tokio::task::JoinSet::new();
        for _ in 0..LIMITS.connections {
            let mut stream = request(address, "/small").await;
            assert!(stream.read(&mut [0; 1024]).await.unwrap() > 0);
            busy.spawn(keep_busy(stream));
        }
        let refused = answer(request(address, "/small").await).await;
        assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
        check_headers(&refused);
        assert!(answer(request(address, "/urgent").await).await.ends_with("urgent"));
        assert!(busy.try_join_next().is_none());
    }

    #[tokio::test]
    async fn a_connection_that_is_not_admitted_gets_an_answer_with_all_headers() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        refuse(&listener.accept().await.unwrap().0);
        check_headers(&answer(stream).await);
    }

    #[tokio::test]
    async fn an_answer_of_hyper_has_all_headers() {
        let address = server(LIMITS).await;
        let long = format!("GET /small HTTP/1.1\r\nhost: {}\r\n\r\n", "x".repeat(1 << 20));
        for (bad, status) in [("nonsense\r\n\r\n", "400"), (long.as_str(), "431")] {
            // The second answer comes after one of the router's.
            for good in ["", "GET /small HTTP/1.1\r\nhost: localhost\r\n\r\n"] {
                let mut stream = TcpStream::connect(address).await.unwrap();
                if !good.is_empty() {
                    stream.write_all(good.as_bytes()).await.unwrap();
                    assert!(stream.read(&mut [0; 1024]).await.unwrap() > 0);
                }
                // Hyper answers before it has read a head that is too long.
                stream.write_all(bad.as_bytes()).await.ok();
                let answer = answer(stream).await;
                assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
                check_headers(&answer);
            }
        }
    }

    fn check_headers(answer: &str) {
        for header in ["x-content-type-options: nosniff\r\n", "cache-control: no-store\r\n"] {
            assert!(answer.contains(header), "{answer}");
        }
    }

    #[test]
    fn loopback_hosts_are_recognised() {
        for host in ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:7501", "[::1]", "[::1]:7501"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in
            ["", "evil.example", "evil.example:7501", "10.0.0.1", "localhost.evil.example", "127.0.0.1.x"]
        {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
