//! Binding to an address, serving, and graceful shutdown.

use std::future::Future;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use rap_io::serve::{ServeLimits, Signals, is_loopback, serve_with_tls_until};
use rap_io::tls::Acceptor;
use rap_protocol::{CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH};
use tokio::net::TcpListener;

use crate::engine::Engine;
use crate::error::ServeError;
use crate::http::{self, ErrorResponse, INVOKE_PATH};
use crate::server::{ToolServer, checked_public_url};

/// A server that is bound to its address and has resumed its unfinished calls. Call [`Bound::run`] to serve.
pub struct Bound {
    listener: TcpListener,
    address: SocketAddr,
    url: String,
    engine: Arc<Engine>,
    router: Router,
    tls: Option<Acceptor>,
}

pub(crate) async fn bind(server: ToolServer, address: String) -> Result<Bound, ServeError> {
    let failed = |source| ServeError::Bind { address: address.clone(), source };
    let listener = TcpListener::bind(&address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    if server.is_open() && !server.open_to_anyone && !bound.ip().is_loopback() {
        return Err(ServeError::UnauthenticatedListener(bound));
    }
    let url = match server.configured_public_url() {
        Some(given) => checked_public_url(given)?,
        None if bound.ip().is_unspecified() => return Err(ServeError::NoPublicUrl(bound.to_string())),
        None if server.tls.is_some() => format!("https://{bound}"),
        None => format!("http://{bound}"),
    };
    if server.lacks_client_ca() {
        return Err(ServeError::NoClientCa);
    }
    let tls = server.tls.clone().map(Acceptor::new).transpose()?;
    let guarded = server.is_open() && !server.open_to_anyone;
    let engine = server.start(url.clone(), Some(bound)).await?;
    let mut router = http::router(Arc::clone(&engine));
    if guarded {
        router = router.layer(middleware::from_fn_with_state(Arc::from(url.as_str()), from_this_machine));
    }
    Ok(Bound { listener, address: bound, url, engine, router, tls })
}

/// Rejects requests whose `Host` is neither loopback nor the public URL.
///
/// A server without authentication accepts requests from its own machine only. A web page in a browser on this
/// machine could still reach it by DNS rebinding, with a domain that resolves to loopback. The `Host` header reveals
/// that.
async fn from_this_machine(
    axum::extract::State(public_url): axum::extract::State<Arc<str>>,
    request: Request,
    next: Next,
) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("");
    if is_loopback(host)
        || public_url.split('/').nth(2).is_some_and(|public| public.eq_ignore_ascii_case(host))
    {
        return next.run(request).await;
    }
    let message =
        "this server accepts requests from its own machine only; set RAP_TOOL_BEARER to accept others";
    ErrorResponse::new(StatusCode::MISDIRECTED_REQUEST, "not_local", message).into_response()
}

impl Bound {
    /// Returns the public URL of the server, which a runtime needs to find it.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the address that the server listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves until SIGTERM or SIGINT, then shuts down gracefully. A second signal ends the process at once.
    pub async fn run(self) {
        let mut signals = Signals::listen();
        self.run_until(async {
            signals.next().await;
            tokio::spawn(async move {
                signals.next().await;
                tracing::warn!("second signal: exiting immediately");
                std::process::exit(1);
            });
        })
        .await;
    }

    /// Serves until `stop` resolves, then shuts down gracefully: accepts no more requests and lets running calls
    /// finish within [`Limits::stop_within`](crate::Limits::stop_within). Everything that was accepted stays in the
    /// journal.
    pub async fn run_until(self, stop: impl Future<Output = ()>) {
        let Bound { listener, url, engine, router, tls, .. } = self;
        tracing::info!(%url, "listening");
        let limits = ServeLimits {
            connections: engine.limits.connections,
            head_within: engine.limits.request_within,
            urgent_paths: &[INVOKE_PATH, CLOSE_THREAD_PATH, CANCEL_TOOL_CALL_PATH, "/healthz"],
        };
        let connections = serve_with_tls_until(listener, tls, router, limits, stop).await;
        tracing::info!("stopping");
        let answered = tokio::time::timeout(engine.limits.stop_within, connections.shutdown());
        let ((), answered) = tokio::join!(engine.shut_down(), answered);
        if answered.is_err() {
            tracing::warn!("some connections were still open at the end of the shutdown time");
        }
        tracing::info!("stopped");
    }
}

/// Returns true if a runtime has started this program as one of its tool servers.
fn is_embedded() -> bool {
    std::env::var_os("RAP_EMBEDDED").is_some_and(|value| value == "1")
}

/// Tells the runtime that started this program where the server listens. Does nothing without `RAP_EMBEDDED=1` in the
/// environment.
pub fn announce(port: u16) -> std::io::Result<()> {
    if !is_embedded() {
        return Ok(());
    }
    use std::io::Write;
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", serde_json::json!({"port": port}))?;
    stdout.flush()
}

/// Replaces the port of an address by the environment variable `PORT`, if set.
pub fn address(address: String) -> Result<String, ServeError> {
    let Some(port) = std::env::var("PORT").ok().filter(|port| !port.is_empty()) else { return Ok(address) };
    let port: u16 = port.parse().map_err(|_| ServeError::BadPort)?;
    let host = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host);
    // The runtime that started this program reaches it on loopback only.
    let host = if is_embedded() { "127.0.0.1" } else { host };
    Ok(format!("{host}:{port}"))
}

/// Logs to stderr, unless the program has already set a tracing subscriber.
pub fn log_to_stderr() {
    use rap_io::log::VisibleLog;
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let stderr =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| VisibleLog(std::io::stderr()));
    if stderr.with_ansi(std::io::stderr().is_terminal()).try_init().is_err() {
        tracing::debug!("the program has its own tracing subscriber");
    }
}
