//! Sockets and signals: serving a router until it is told to stop, within bounds.

use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How long to wait before accepting again when the system has no room for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The bounds of a server.
#[derive(Debug, Clone, Copy)]
pub struct ServeLimits {
    /// Connections at a time; more wait to be accepted.
    pub connections: usize,
    /// The head of a request has to arrive within this time, and so long an idle connection is kept.
    pub head_within: Duration,
}

/// Serves until `stop` resolves. What comes back are the connections that are still open: shut them down.
pub async fn serve_until(
    listener: TcpListener,
    router: Router,
    limits: ServeLimits,
    stop: impl Future<Output = ()>,
) -> GracefulShutdown {
    let places = Arc::new(Semaphore::new(limits.connections));
    let connections = GracefulShutdown::new();
    tokio::pin!(stop);
    loop {
        tokio::select! {
            (stream, place) = accept(&listener, &places) => {
                serve(stream, place, &router, &connections, limits.head_within);
            }
            () = &mut stop => return connections,
        }
    }
}

async fn accept(listener: &TcpListener, places: &Arc<Semaphore>) -> (TcpStream, OwnedSemaphorePermit) {
    loop {
        let place = Arc::clone(places).acquire_owned().await.expect("bug: nobody closes this semaphore");
        match listener.accept().await {
            Ok((stream, _)) => return (stream, place),
            Err(error) => {
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn serve(
    stream: TcpStream,
    place: OwnedSemaphorePermit,
    router: &Router,
    connections: &GracefulShutdown,
    head_within: Duration,
) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection is gone already");
        return;
    }
    let service = TowerToHyperService::new(router.clone());
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head_within)
        .serve_connection(TokioIo::new(stream), service);
    let connection = connections.watch(connection);
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection ended early");
        }
        drop(place);
    });
}

/// The signals that end a server. They are heard from the moment this is made.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Listens from now on.
    pub fn listen() -> Self {
        let hear = |kind| signal(kind).expect("bug: the runtime can listen for signals");
        Signals { terminate: hear(SignalKind::terminate()), interrupt: hear(SignalKind::interrupt()) }
    }

    /// The next signal.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Whether a `Host` header names this machine.
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
    use super::*;

    #[test]
    fn hosts_of_this_machine_are_known() {
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
