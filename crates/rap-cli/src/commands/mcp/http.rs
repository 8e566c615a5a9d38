//! MCP over streamable HTTP, at `/mcp`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use http::header::{AUTHORIZATION, CACHE_CONTROL, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use rap_io::body::{BodyLimits, BodyMemory};
use rap_io::serve::{ServeLimits, serve_until};
use rap_protocol::Secret;
use rmcp::ServerHandler;
use rmcp::model::{ClientJsonRpcMessage, ServerJsonRpcMessage};
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, SessionConfig};
use rmcp::transport::streamable_http_server::session::{ServerSseMessage, SessionId, SessionManager};
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::callbacks::refused;
use super::tasks;

/// Path of the endpoint.
pub(super) const PATH: &str = "/mcp";
const BODY: BodyLimits = BodyLimits { bytes: 16 * 1024 * 1024, within: Duration::from_secs(30) };
/// Memory for requests that are being received, in bytes.
const MEMORY: usize = 128 * 1024 * 1024;
/// Time without any message after which a session is closed.
const SESSION_IDLE: Duration = Duration::from_secs(60 * 60);
/// Maximum number of open sessions.
const SESSIONS: usize = 1_000;
/// Time that connections have to end when the server stops.
const STOP_TIME: Duration = Duration::from_secs(5);
const SESSION_ID: &str = "mcp-session-id";
const LIMITS: ServeLimits =
    ServeLimits { connections: 1_000, head_within: Duration::from_secs(30), urgent_paths: &[] };

/// Checks that decide which requests are accepted.
pub(super) struct Admission {
    /// Token that clients have to show.
    pub(super) token: Option<Secret>,
    /// Origins of pages that may send requests, besides the server's own.
    pub(super) origins: Vec<String>,
    /// Names of this server in requests, besides its address.
    pub(super) hosts: Vec<String>,
}

struct Gate {
    token: Option<[u8; 32]>,
    bodies: BodyMemory,
    sessions: Arc<Sessions>,
}

/// The sessions, whose messages are changed where the library does not know the tasks of the protocol version 2025-11-25.
struct Sessions {
    local: LocalSessionManager,
    has_tasks: bool,
}

impl Sessions {
    fn routed(&self, message: ClientJsonRpcMessage) -> ClientJsonRpcMessage {
        if self.has_tasks { tasks::route(message) } else { message }
    }
}

impl SessionManager for Sessions {
    type Error = <LocalSessionManager as SessionManager>::Error;
    type Transport = <LocalSessionManager as SessionManager>::Transport;

    async fn create_session(&self) -> Result<(SessionId, Self::Transport), Self::Error> {
        self.local.create_session().await
    }

    async fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<ServerJsonRpcMessage, Self::Error> {
        self.local.initialize_session(id, message).await.map(tasks::announce)
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, Self::Error> {
        self.local.has_session(id).await
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), Self::Error> {
        self.local.close_session(id).await
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        self.local.create_stream(id, self.routed(message)).await
    }

    async fn accept_message(&self, id: &SessionId, message: ClientJsonRpcMessage) -> Result<(), Self::Error> {
        self.local.accept_message(id, message).await
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        self.local.create_standalone_stream(id).await
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        self.local.resume(id, last_event_id).await
    }
}

/// Serves clients until `stop` is cancelled. Each session has a handler of its own.
pub(super) async fn serve<H: ServerHandler>(
    listener: TcpListener,
    admission: Admission,
    handler: impl Fn() -> H + Send + Sync + 'static,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let address = listener.local_addr()?;
    let mut sessions = LocalSessionManager::default();
    sessions.session_config = SessionConfig::default();
    sessions.session_config.keep_alive = Some(SESSION_IDLE);
    let has_tasks = handler().get_info().capabilities.supports_tasks();
    let sessions = Arc::new(Sessions { local: sessions, has_tasks });
    let config = config(address, &admission, stop.child_token());
    let service = StreamableHttpService::new(move || Ok(handler()), Arc::clone(&sessions), config);
    let token = admission.token.map(|token| Sha256::digest(token.expose()).into());
    let gate = Arc::new(Gate { token, bodies: BodyMemory::new(MEMORY), sessions });
    let router = Router::new().route_service(PATH, service).layer(from_fn_with_state(gate, admit));
    let connections = serve_until(listener, router, LIMITS, stop.cancelled_owned()).await;
    if timeout(STOP_TIME, connections.shutdown()).await.is_err() {
        tracing::warn!("some connections did not end in time");
    }
    Ok(())
}

fn config(address: SocketAddr, admission: &Admission, stop: CancellationToken) -> StreamableHttpServerConfig {
    let port = address.port();
    let own =
        [format!("http://{address}"), format!("http://localhost:{port}"), format!("http://127.0.0.1:{port}")];
    let hosts = ["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned(), address.ip().to_string()];
    StreamableHttpServerConfig::default()
        .with_allowed_hosts(hosts.into_iter().chain(admission.hosts.iter().cloned()))
        .with_allowed_origins(own.into_iter().chain(admission.origins.iter().cloned()))
        .enforce_origin_validation()
        .with_max_request_body_bytes(BODY.bytes)
        .with_cancellation_token(stop)
}

/// Checks the token and the bounds of a request.
async fn admit(State(gate): State<Arc<Gate>>, request: Request, next: Next) -> Response {
    let mut response = match gate.check(request.headers()).await {
        Err(refusal) => refusal,
        Ok(()) if request.method() == Method::POST => {
            let (head, body) = request.into_parts();
            match gate.bodies.read_json(&head.headers, body, BODY).await {
                Ok(received) => {
                    let body = tasks::mark(&received.bytes).map_or(received.bytes, Into::into);
                    next.run(Request::from_parts(head, Body::from(body))).await
                }
                Err(error) => refused(error).into_response(),
            }
        }
        Ok(()) => next.run(request).await,
    };
    let headers = response.headers_mut();
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

impl Gate {
    async fn check(&self, headers: &HeaderMap) -> Result<(), Response> {
        if let Some(expected) = &self.token {
            let shown = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
            let shown = shown.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default();
            // Digests are compared, so that the time says nothing about the token.
            if <[u8; 32]>::from(Sha256::digest(shown)) != *expected {
                let challenge = [(WWW_AUTHENTICATE, "Bearer")];
                let why = "send the token of this server: Authorization: Bearer TOKEN";
                return Err((StatusCode::UNAUTHORIZED, challenge, why).into_response());
            }
        }
        if !headers.contains_key(SESSION_ID) && self.sessions.local.sessions.read().await.len() >= SESSIONS {
            let why = format!("{SESSIONS} sessions are open; end one with DELETE, or try again later");
            return Err((StatusCode::SERVICE_UNAVAILABLE, why).into_response());
        }
        Ok(())
    }
}
