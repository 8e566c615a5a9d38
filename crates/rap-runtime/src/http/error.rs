//! Error responses: a status, a stable code and a sentence that tells the reader what to do.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use rap_agent::Ignored;
use rap_api::{ErrorBody, ErrorReason, TokenScope};

use crate::store;

/// Maximum length of the reason in a problem, in characters.
const PROBLEM_CHARS: usize = 200;
/// Value of `Retry-After` for 429 and 503, in seconds.
const RETRY_AFTER: &str = "1";

#[derive(Debug)]
pub(crate) struct ErrorResponse {
    status: StatusCode,
    code: &'static str,
    message: String,
}

impl ErrorResponse {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> ErrorResponse {
        ErrorResponse { status, code, message: message.into() }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> ErrorResponse {
        ErrorResponse::new(StatusCode::BAD_REQUEST, "invalid", message)
    }

    pub(crate) fn code(&self) -> &'static str {
        self.code
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    /// Returns true if a repeat of the request would fail in the same way.
    pub(crate) fn is_final(&self) -> bool {
        self.status.is_client_error()
    }

    /// Returns the problem of a callback that its tool has to correct because it is malformed or too large.
    pub(crate) fn problem(&self) -> Option<String> {
        match self.status {
            StatusCode::PAYLOAD_TOO_LARGE => Some("413: too large".into()),
            StatusCode::BAD_REQUEST => {
                let message: String = self.message.chars().take(PROBLEM_CHARS).collect();
                Some(format!("400: {message}"))
            }
            _ => None,
        }
    }

    /// Returns a 429, which tells a client that it has used its share.
    pub(crate) fn too_many(message: &'static str) -> ErrorResponse {
        ErrorResponse::new(StatusCode::TOO_MANY_REQUESTS, "too_many", message)
    }

    pub(crate) fn unauthorised(message: &'static str) -> ErrorResponse {
        ErrorResponse::new(StatusCode::UNAUTHORIZED, "unauthorised", message)
    }

    pub(crate) fn insufficient_scope(needed: TokenScope) -> ErrorResponse {
        let message =
            format!("this request needs a token with the scope {needed}; ask an administrator for one");
        ErrorResponse::new(StatusCode::FORBIDDEN, "insufficient_scope", message)
    }
}

impl std::fmt::Display for ErrorResponse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "answered {}: {}", self.status.as_u16(), self.message)
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let body = Json(ErrorBody { error: ErrorReason { code: self.code.into(), message: self.message } });
        let mut response = (self.status, body).into_response();
        let headers = response.headers_mut();
        if matches!(self.status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER));
        }
        if self.status == StatusCode::REQUEST_TIMEOUT {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<store::Error> for ErrorResponse {
    fn from(error: store::Error) -> Self {
        use store::Error;
        let message = error.to_string();
        match error {
            Error::NoThread => ErrorResponse::new(StatusCode::NOT_FOUND, "no_such_thread", message),
            Error::WrongThread => ErrorResponse::new(StatusCode::FORBIDDEN, "wrong_thread", message),
            Error::Exists => ErrorResponse::new(StatusCode::CONFLICT, "thread_exists", message),
            Error::NotARoot => ErrorResponse::new(StatusCode::CONFLICT, "not_a_root", message),
            Error::NotClosed => ErrorResponse::new(StatusCode::CONFLICT, "thread_open", message),
            Error::Moving => ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "moving", message),
            Error::KeyReused => ErrorResponse::new(StatusCode::CONFLICT, "key_reused", message),
            Error::Ignored(ignored) => ignored.into(),
            Error::Disabled => ErrorResponse::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "set_aside",
                "an internal error disabled this thread; restart the runtime, and report the panic in its log",
            ),
            error @ Error::Unreadable(_) => {
                tracing::error!(
                    why = error.with_sources(),
                    "a request needs stored data that cannot be read"
                );
                let message = "stored data cannot be read; nothing was changed. The status of the thread and the log of the runtime have the reason";
                ErrorResponse::new(StatusCode::INTERNAL_SERVER_ERROR, "illegible", message)
            }
            Error::Busy => ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message),
            Error::Closed => ErrorResponse::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "stopping",
                "the runtime is stopping; try again later",
            ),
            error @ Error::Unavailable(_) => {
                tracing::warn!(why = error.with_sources(), "the store could not serve a request");
                let message = "the database cannot be used at the moment; nothing was changed, try again";
                ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "store_unavailable", message)
            }
        }
    }
}

/// Maps the reason why a client's input was ignored.
impl From<Ignored> for ErrorResponse {
    fn from(ignored: Ignored) -> Self {
        let message = ignored.to_string();
        let (status, code) = match ignored {
            Ignored::Closed => (StatusCode::CONFLICT, "thread_closed"),
            Ignored::Busy => (StatusCode::CONFLICT, "busy"),
            Ignored::NothingToResume => (StatusCode::CONFLICT, "nothing_to_resume"),
            Ignored::NoQuestion => (StatusCode::NOT_FOUND, "no_question"),
            Ignored::NoSuchChoice(_) => (StatusCode::BAD_REQUEST, "no_such_choice"),
            Ignored::UnknownCall => (StatusCode::NOT_FOUND, "no_such_call"),
            Ignored::Full(_) => (StatusCode::SERVICE_UNAVAILABLE, "thread_full"),
            Ignored::EndedSubscription => (StatusCode::GONE, "subscription_ended"),
            Ignored::NotYetSubscribed => (StatusCode::SERVICE_UNAVAILABLE, "not_confirmed_yet"),
            Ignored::SettledCall => (StatusCode::CONFLICT, "call_settled"),
            Ignored::StaleTurn | Ignored::Duplicate | Ignored::NothingToInterrupt | Ignored::NotDue => {
                (StatusCode::CONFLICT, "nothing_to_do")
            }
        };
        ErrorResponse::new(status, code, message)
    }
}
