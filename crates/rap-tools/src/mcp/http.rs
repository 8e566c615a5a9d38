//! An MCP server with a URL: streamable HTTP over this project's own client.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ::http::header::{ACCEPT, AUTHORIZATION, WWW_AUTHENTICATE};
use ::http::{HeaderName, HeaderValue, Method};
use bytes::{Bytes, BytesMut};
use futures_util::stream::BoxStream;
use rap_io::client::{Client as HttpClient, ClientLimits, Error as ClientError, Streaming};
use rap_io::sse::Parser;
use rap_protocol::UrlRules;
use rmcp::model::{ClientJsonRpcMessage, ServerJsonRpcMessage};
use rmcp::service::{ClientInitializeError, ClientServiceExt};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::common::client_side_sse::ExponentialBackoff;
use rmcp::transport::streamable_http_client::{
    AuthRequiredError, HttpStatusError, InsufficientScopeError, SseError, StreamableHttpClient,
    StreamableHttpClientTransportConfig, StreamableHttpError, StreamableHttpPostResponse,
};
use sse_stream::Sse;
use url::Url;

use super::connection::{Running, Start};
use super::listing::TaskHints;
use super::notices::excerpt;
use super::running::{Client, RunningCalls};

/// Maximum size of a message, in bytes.
const MESSAGE_BYTES: usize = 16 * 1024 * 1024;
/// Maximum size of the body of a refusal that is read, in bytes.
const REFUSAL_BYTES: usize = 16 * 1024;
/// Time without any byte after which a stream counts as broken. It is opened again, and its call continues.
const STREAM_IDLE: Duration = Duration::from_secs(24 * 60 * 60);
/// Time until the answer to a request begins. A server may answer with the result itself, however long that takes.
const ANSWER_WITHIN: Duration = Duration::from_secs(24 * 60 * 60);
/// Maximum number of requests at once, which is also the maximum number of calls whose server answers without a stream.
const REQUESTS: usize = 1_000;

/// Shortest and longest pause before a stream that broke is opened again.
const FIRST_RETRY: Duration = Duration::from_millis(250);
const LONGEST_RETRY: Duration = Duration::from_secs(10);
/// Time after which a session whose streams cannot be opened has ended.
const RESUME_WITHIN: Duration = Duration::from_secs(60);

const SESSION: &str = "mcp-session-id";
const LAST_EVENT: &str = "last-event-id";

/// Connects to a server in one of the two ways.
pub(super) async fn connect(
    client: Client,
    start: Start,
    url: &str,
    token: Option<&str>,
    hints: &Arc<TaskHints>,
) -> Result<Running, ClientInitializeError> {
    let http = Http {
        client: HttpClient::new(
            UrlRules::unrestricted(),
            ClientLimits { stream_head: ANSWER_WITHIN, stream_idle: STREAM_IDLE, ..ClientLimits::default() },
        ),
        hints: Arc::clone(hints),
        calls: Arc::clone(&client.calls),
        lost_since: Arc::default(),
    };
    let mut retry = ExponentialBackoff::default();
    retry.base_duration = FIRST_RETRY;
    retry.max_delay = Some(LONGEST_RETRY);
    let mut config = StreamableHttpClientTransportConfig::with_uri(url).max_concurrent_requests(REQUESTS);
    config.max_sse_event_size = MESSAGE_BYTES;
    config.auth_header = token.map(ToOwned::to_owned);
    config.retry_config = Arc::new(retry);
    // A session that the server does not know any more is replaced by a new connection, with a new list of tools.
    config.reinit_on_expired_session = false;
    let transport = StreamableHttpClientTransport::with_client(http, config);
    client.serve_with_lifecycle(transport, start.mode()).await
}

#[derive(Clone)]
struct Http {
    client: HttpClient,
    hints: Arc<TaskHints>,
    calls: Arc<RunningCalls>,
    /// Time of the first of the attempts to open a stream that have failed in a row.
    lost_since: Arc<Mutex<Option<Instant>>>,
}

pub(super) type HttpError = StreamableHttpError<ClientError>;

fn url(uri: &str) -> Result<Url, HttpError> {
    Url::parse(uri).map_err(|_| StreamableHttpError::Client(ClientError::BadUrl))
}

fn headers(
    session: Option<&str>,
    token: Option<String>,
    custom: HashMap<HeaderName, HeaderValue>,
) -> Result<Vec<(HeaderName, HeaderValue)>, HttpError> {
    let invalid = |_| StreamableHttpError::UnexpectedServerResponse("a header value is not valid".into());
    let mut headers: Vec<(HeaderName, HeaderValue)> = custom.into_iter().collect();
    if let Some(token) = token {
        let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(invalid)?;
        value.set_sensitive(true);
        headers.push((AUTHORIZATION, value));
    }
    if let Some(session) = session {
        headers.push((HeaderName::from_static(SESSION), HeaderValue::try_from(session).map_err(invalid)?));
    }
    Ok(headers)
}

/// A refusal of a server.
struct Refusal {
    status: u16,
    body: Bytes,
    error: HttpError,
}

impl Refusal {
    /// Returns the error of JSON-RPC that the refusal contains, as the answer to a request.
    fn answer(&self, request: &ClientJsonRpcMessage) -> Option<StreamableHttpPostResponse> {
        let ClientJsonRpcMessage::Request(request) = request else { return None };
        if !matches!(self.error, StreamableHttpError::UnexpectedServerResponse(_)) {
            return None;
        }
        match serde_json::from_slice(&self.body) {
            Ok(ServerJsonRpcMessage::Error(refusal)) => {
                let answer = ServerJsonRpcMessage::error(refusal.error, Some(request.id.clone()));
                Some(StreamableHttpPostResponse::Json(answer, None))
            }
            _ => None,
        }
    }

    /// Returns true if the server does not know the session. The specification wants 404 for that, but servers that are
    /// made like the examples of the TypeScript SDK answer 400, without the id of a request. An error with an id is the
    /// answer to one request, and its text may speak of any session.
    fn is_lost_session(&self) -> bool {
        let says_so = || String::from_utf8_lossy(&self.body).to_ascii_lowercase().contains("session");
        self.status == 404 || self.status == 400 && !self.has_request_id() && says_so()
    }

    fn has_request_id(&self) -> bool {
        let message = serde_json::from_slice(&self.body);
        matches!(message, Ok(ServerJsonRpcMessage::Error(refusal)) if refusal.id.is_some())
    }
}

impl Http {
    /// Returns the answer if it is a success, else what it stands for.
    async fn checked(&self, mut answer: Streaming, in_session: bool) -> Result<Streaming, Refusal> {
        let status = answer.status;
        if (200..300).contains(&status) {
            return Ok(answer);
        }
        let challenge = answer.header(&WWW_AUTHENTICATE);
        let body = read(&mut answer, REFUSAL_BYTES).await.unwrap_or_default();
        let said = excerpt(&String::from_utf8_lossy(&body));
        let error = match (status, challenge) {
            (401, challenge) => {
                StreamableHttpError::AuthRequired(AuthRequiredError::new(challenge.unwrap_or_default()))
            }
            (403, Some(challenge)) if challenge.contains("insufficient_scope") => {
                StreamableHttpError::InsufficientScope(InsufficientScopeError::new(challenge, None))
            }
            (429 | 500.., _) => HttpStatusError::new(status, None).into(),
            _ => StreamableHttpError::UnexpectedServerResponse(Cow::Owned(format!("HTTP {status}: {said}"))),
        };
        let mut refusal = Refusal { status, body, error };
        if in_session && refusal.is_lost_session() {
            refusal.error = StreamableHttpError::SessionExpired;
        }
        Err(refusal)
    }

    /// Notes that a stream was opened, or not. A server that does not know the session, or for some time cannot be
    /// reached, has lost the calls of the session: it has ended.
    fn note_stream(&self, opened: Result<(), &HttpError>) {
        let mut lost_since = self.lost_since.lock().unwrap_or_else(PoisonError::into_inner);
        match opened {
            Ok(()) | Err(StreamableHttpError::ServerDoesNotSupportSse) => *lost_since = None,
            Err(StreamableHttpError::SessionExpired) => self.calls.ended.cancel(),
            Err(_) if lost_since.get_or_insert_with(Instant::now).elapsed() > RESUME_WITHIN => {
                self.calls.ended.cancel();
            }
            Err(_) => {}
        }
    }

    async fn open_stream(
        &self,
        url: &Url,
        headers: &[(HeaderName, HeaderValue)],
        in_session: bool,
    ) -> Result<Streaming, HttpError> {
        let answer = self.client.get_stream(url, headers).await.map_err(StreamableHttpError::Client)?;
        if answer.status == 405 {
            return Err(StreamableHttpError::ServerDoesNotSupportSse);
        }
        let answer = self.checked(answer, in_session).await.map_err(|refusal| refusal.error)?;
        if !answer.content_type.as_deref().is_some_and(|kind| kind.starts_with("text/event-stream")) {
            return Err(StreamableHttpError::UnexpectedContentType(answer.content_type));
        }
        Ok(answer)
    }

    fn events(&self, answer: Streaming, limit: usize) -> BoxStream<'static, Result<Sse, SseError>> {
        let state = (answer, Parser::new(limit), Vec::new().into_iter(), Arc::clone(&self.hints));
        let next = |(mut answer, mut parser, mut waiting, hints): (
            Streaming,
            Parser,
            std::vec::IntoIter<_>,
            Arc<TaskHints>,
        )| async move {
            loop {
                if let Some(event) = waiting.next() {
                    let event: Result<rap_io::sse::Event, rap_io::sse::TooLong> = event;
                    let event = match event {
                        Ok(event) => event,
                        Err(error) => return Some((Err(broken(error)), (answer, parser, waiting, hints))),
                    };
                    hints.observe(event.data.as_bytes());
                    let id = Some(event.id).filter(|id| !id.is_empty());
                    let name = Some(event.name).filter(|name| !name.is_empty());
                    let retry = parser.retry().map(|pause| pause.min(RESUME_WITHIN));
                    let retry = retry.and_then(|pause| u64::try_from(pause.as_millis()).ok());
                    let sse = Sse { event: name, data: Some(event.data), id, retry };
                    return Some((Ok(sse), (answer, parser, waiting, hints)));
                }
                match answer.chunk().await {
                    Ok(Some(bytes)) => waiting = parser.push(&bytes).into_iter(),
                    Ok(None) => return None,
                    Err(error) => return Some((Err(broken(error)), (answer, parser, waiting, hints))),
                }
            }
        };
        Box::pin(futures_util::stream::unfold(state, next))
    }
}

fn broken(error: impl std::error::Error + Send + Sync + 'static) -> SseError {
    SseError::Body(Box::new(error))
}

async fn read(answer: &mut Streaming, limit: usize) -> Result<Bytes, ClientError> {
    let mut body = BytesMut::new();
    while let Some(chunk) = answer.chunk().await? {
        if body.len() + chunk.len() > limit {
            return Err(ClientError::TooLong { limit });
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.freeze())
}

impl StreamableHttpClient for Http {
    type Error = ClientError;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        token: Option<String>,
        custom: HashMap<HeaderName, HeaderValue>,
    ) -> Result<StreamableHttpPostResponse, HttpError> {
        let mut headers = headers(session.as_deref(), token, custom)?;
        headers.push((ACCEPT, HeaderValue::from_static("application/json, text/event-stream")));
        let body = Bytes::from(serde_json::to_vec(&message)?);
        let answer = self.client.post_stream(&url(&uri)?, &headers, body).await;
        let answer = answer.map_err(StreamableHttpError::Client)?;
        let mut answer = match self.checked(answer, session.is_some()).await {
            Ok(answer) => answer,
            Err(refusal) => return refusal.answer(&message).ok_or(refusal.error),
        };
        let wants_answer = matches!(message, ClientJsonRpcMessage::Request(_));
        if !wants_answer || matches!(answer.status, 202 | 204) {
            return Ok(StreamableHttpPostResponse::Accepted);
        }
        let session = answer.header(&HeaderName::from_static(SESSION));
        let kind = answer.content_type.clone().unwrap_or_default();
        if kind.starts_with("text/event-stream") {
            return Ok(StreamableHttpPostResponse::Sse(self.events(answer, MESSAGE_BYTES), session));
        }
        if !kind.starts_with("application/json") {
            return Err(StreamableHttpError::UnexpectedContentType(Some(excerpt(&kind))));
        }
        let body = read(&mut answer, MESSAGE_BYTES).await.map_err(StreamableHttpError::Client)?;
        self.hints.observe(&body);
        Ok(StreamableHttpPostResponse::Json(serde_json::from_slice::<ServerJsonRpcMessage>(&body)?, session))
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session: Arc<str>,
        token: Option<String>,
        custom: HashMap<HeaderName, HeaderValue>,
    ) -> Result<(), HttpError> {
        let headers = headers(Some(&session), token, custom)?;
        let answer = self.client.request(Method::DELETE, &url(&uri)?, &headers, Bytes::new(), 0).await;
        match answer.map_err(StreamableHttpError::Client)?.status {
            405 => Err(StreamableHttpError::ServerDoesNotSupportDeleteSession),
            _ => Ok(()),
        }
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session: Option<Arc<str>>,
        last_event: Option<String>,
        token: Option<String>,
        custom: HashMap<HeaderName, HeaderValue>,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, HttpError> {
        let mut headers = headers(session.as_deref(), token, custom)?;
        headers.push((ACCEPT, HeaderValue::from_static("text/event-stream")));
        if let Some(value) = last_event.and_then(|id| HeaderValue::try_from(id).ok()) {
            headers.push((HeaderName::from_static(LAST_EVENT), value));
        }
        let opened = self.open_stream(&url(&uri)?, &headers, session.is_some()).await;
        self.note_stream(opened.as_ref().map(drop));
        let answer = opened?;
        Ok(self.events(answer, MESSAGE_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_refusal_without_the_id_of_a_request_means_a_lost_session() {
        let is_lost = |status, body: &'static str| {
            let error = StreamableHttpError::UnexpectedServerResponse("refused".into());
            Refusal { status, body: Bytes::from_static(body.as_bytes()), error }.is_lost_session()
        };
        let of_request = r#"{"jsonrpc":"2.0","id":7,"error":{"code":-32602,"message":"no such session: x"}}"#;
        let of_none =
            r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"No valid session ID"}}"#;
        let without = r#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"No valid session ID"}}"#;
        assert!(!is_lost(400, of_request));
        assert!(!is_lost(400, r#"{"error":"the date is not valid"}"#));
        for body in [of_none, without, "Unknown session"] {
            assert!(is_lost(400, body), "{body}");
            assert!(!is_lost(500, body), "{body}");
        }
        assert!(is_lost(404, ""));
    }
}
