//! The process that holds all MCP servers: one listener, and below it a path for each of them.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use rap_io::serve::{ServeLimits, Signals, serve_until};
use rap_protocol::DISCOVERY_PATH;
use rap_tool::{ServeError, embedded};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use super::Options;
use super::server::{Server, Urls};

/// Maximum number of servers that are being started at once. More would slow each other down.
const STARTS: usize = 8;

/// Reason why the bridge cannot be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address cannot be used.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The requested address.
        address: String,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The environment is not valid.
    #[error(transparent)]
    Environment(#[from] ServeError),
    /// The port cannot be announced.
    #[error("cannot write the port to stdout: {0}")]
    Announce(std::io::Error),
}

/// The bridge, bound to its address. [`Bound::run`] connects to the servers.
pub struct Bound {
    listener: TcpListener,
    address: SocketAddr,
    servers: Vec<Arc<Server>>,
    stop: CancellationToken,
}

/// Binds to the address. Calls of an earlier process continue at once, before their servers run again.
pub async fn bind(options: Options) -> Result<Bound, Error> {
    let address = embedded::address(options.listen)?;
    let failed = |source| Error::Bind { address: address.clone(), source };
    let listener = TcpListener::bind(&address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let stop = CancellationToken::new();
    let server = |config: super::McpServer| {
        let public_url = format!("http://{bound}/{}", config.name);
        let consent_url = options.consent_url.as_ref().map(|url| format!("{url}/mcp:{}", config.name));
        let urls = Urls { public_url, consent_url };
        let data = options.data.join(&config.name);
        Server::new(config, &options.environment, data, urls, stop.clone())
    };
    let servers = options.servers.into_iter().map(server).collect();
    Ok(Bound { listener, address: bound, servers, stop })
}

impl Bound {
    /// Returns the address that the bridge listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Connects to all servers and serves until SIGTERM or SIGINT.
    pub async fn run(self) -> Result<(), Error> {
        let mut signals = Signals::listen();
        self.run_until(async move {
            signals.next().await;
        })
        .await
    }

    /// Like [`Bound::run`], until `stopped` resolves.
    pub async fn run_until(self, stopped: impl Future<Output = ()>) -> Result<(), Error> {
        let Bound { listener, address, servers, stop } = self;
        let (tasks, starts) = (TaskTracker::new(), Arc::new(Semaphore::new(STARTS)));
        let mut router = Router::new();
        for server in servers {
            let path = format!("/{}", server.config().name);
            router = router.nest(&path, Router::new().fallback(forward).with_state(Arc::clone(&server)));
            let starts = Arc::clone(&starts);
            tasks.spawn(async move {
                server.resume().await;
                server.keep_connected(starts).await;
            });
        }
        tasks.close();
        embedded::announce(address.port()).map_err(Error::Announce)?;
        let limits = rap_tool::Limits::default();
        let limits = ServeLimits {
            connections: limits.connections,
            head_within: limits.request_within,
            urgent_paths: &[],
        };
        let connections = serve_until(listener, router, limits, stopped).await;
        stop.cancel();
        tokio::join!(connections.shutdown(), tasks.wait());
        Ok(())
    }
}

/// Passes a request on to the tool server of an MCP server.
async fn forward(State(server): State<Arc<Server>>, request: Request) -> Response {
    let discovers = request.uri().path() == DISCOVERY_PATH;
    let why = match server.router(discovers).await {
        Ok(router) => match router.oneshot(request).await {
            Ok(response) => return response,
            Err(never) => match never {},
        },
        Err(why) => why,
    };
    let message = format!("the MCP server {} {why}", server.config().name);
    let body = Json(json!({"error": {"code": "unavailable", "message": message}}));
    (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "1")], body).into_response()
}
