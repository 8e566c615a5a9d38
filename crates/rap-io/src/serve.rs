//! Serves an axum router with limits and graceful shutdown, and listens for signals.

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

/// Pause after a failed `accept`, for example when no file descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Limits of a server.
#[derive(Debug, Clone, Copy)]
pub struct ServeLimits {
    /// Maximum number of open connections. Further ones wait to be accepted.
    pub connections: usize,
    /// Time that the head of a request may take to arrive. Also the time after which an idle connection is closed.
    pub head_within: Duration,
}

/// Serves until `stop` resolves. Returns the connections that are still open; the caller has to shut them down.
pub async fn serve_until(
    listener: TcpListener,
    router: Router,
    limits: ServeLimits,
    stop: impl Future<Output = ()>,
) -> GracefulShutdown {
    let permits = Arc::new(Semaphore::new(limits.connections));
    let connections = GracefulShutdown::new();
    tokio::pin!(stop);
    loop {
        tokio::select! {
            (stream, permit) = accept(&listener, &permits) => {
                serve(stream, permit, &router, &connections, limits.head_within);
            }
            () = &mut stop => return connections,
        }
    }
}

async fn accept(listener: &TcpListener, permits: &Arc<Semaphore>) -> (TcpStream, OwnedSemaphorePermit) {
    loop {
        let permit = Arc::clone(permits).acquire_owned().await.expect("bug: this semaphore is never closed");
        match listener.accept().await {
            Ok((stream, _)) => return (stream, permit),
            Err(error) => {
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn serve(
    stream: TcpStream,
    permit: OwnedSemaphorePermit,
    router: &Router,
    connections: &GracefulShutdown,
    head_within: Duration,
) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection was closed before it was served");
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
        drop(permit);
    });
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
    use super::*;

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
