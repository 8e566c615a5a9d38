//! A session with an MCP server: requests for calls, with progress and cancellation.

use std::sync::Arc;
use std::time::Duration;

use rap_io::client::Error as ClientError;
use rap_protocol::Secret;
use rap_tool::{Call, Error};
use rmcp::ServiceError;
use rmcp::model::{
    CancelledNotification, CancelledNotificationParam, ClientRequest, ErrorData, ServerResult,
};
use rmcp::service::{Peer, RoleClient};
use rmcp::transport::streamable_http_client::{AuthRequiredError, InsufficientScopeError};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::http::HttpError;
use super::notices::excerpt;
use super::running::{Progress, RunningCalls, Sent};

/// Shortest time between two progress views of a call. Reports in between are skipped, but not the last one.
const PROGRESS_PAUSE: Duration = Duration::from_millis(100);
/// Time that a cancelled request for a task waits for the id of its task. Handlers have five seconds to end.
const TASK_WITHIN: Duration = Duration::from_secs(3);

/// A session with a server that has been initialised.
#[derive(Clone)]
pub(super) struct Session {
    pub(super) server: String,
    pub(super) peer: Peer<RoleClient>,
    pub(super) calls: Arc<RunningCalls>,
    /// Cancelled when the session has ended.
    pub(super) ended: CancellationToken,
    /// Access token of the user whose session it is. `None` for the session of all users.
    pub(super) token: Option<Secret>,
    /// The user whose session it is. `None` for the session of all users.
    pub(super) user: Option<String>,
}

/// Reason why a request has no result.
#[derive(Debug)]
pub(super) enum Failure {
    Cancelled,
    /// There is no session, for this reason. The request was not sent.
    Unusable(Error),
    /// The user has to sign in, but did not. The request was not handled.
    NotSignedIn(Error),
    /// The server wants the user to sign in first, or again, with this challenge. It did not handle the request.
    SignIn(String),
    /// The server does not know the session any more, or cannot be reached. It did not handle the request.
    LostSession,
    /// The session ended while the request was under way.
    Ended,
    /// The request could not be sent, or its answer could not be received.
    NotAnswered(String),
    /// The server, or a proxy in front of it, answered this request with an HTTP error. The session continues.
    Failed(String),
    /// The server answered with an error.
    Refused(ErrorData),
}

impl From<ServiceError> for Failure {
    fn from(error: ServiceError) -> Self {
        match error {
            ServiceError::McpError(error) => Failure::Refused(error),
            ServiceError::TransportClosed => Failure::Ended,
            ServiceError::Cancelled { .. } => Failure::NotAnswered("the server cancelled the request".into()),
            ServiceError::TransportSend(error) => {
                let why = with_sources(&error);
                let failed =
                    || if has_status(&error) { Failure::Failed(why) } else { Failure::NotAnswered(why) };
                not_handled(&error).unwrap_or_else(failed)
            }
            error => Failure::NotAnswered(error.to_string()),
        }
    }
}

impl Failure {
    /// Returns the error for the model.
    pub(super) fn of(self, server: &str) -> Error {
        Error::new(match self {
            Failure::Cancelled => "cancelled".into(),
            Failure::Unusable(error) | Failure::NotSignedIn(error) => return error,
            Failure::SignIn(_) => {
                format!("the MCP server {server} refuses the sign-in of this user; the call was not made")
            }
            Failure::LostSession => {
                format!(
                    "the MCP server {server} forgets its sessions or cannot be reached; the call was not made"
                )
            }
            Failure::Ended => format!(
                "the MCP server {server} ended while this call was running; it may have done part of its work, so check \
                 before you call it again"
            ),
            Failure::NotAnswered(why) | Failure::Failed(why) => format!(
                "the MCP server {server} did not answer this call: {}; it may have done its work, so check before you \
                 call it again",
                excerpt(&why)
            ),
            Failure::Refused(error) => {
                let detail = error.data.map(|data| format!(": {}", excerpt(&data.to_string())));
                let detail = detail.unwrap_or_default();
                format!("{}{detail} (MCP error {})", excerpt(&error.message), error.code.0)
            }
        })
    }
}

/// Returns the failure for an error that says that the server did not handle the request.
fn not_handled(error: &(dyn std::error::Error + 'static)) -> Option<Failure> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<AuthRequiredError>() {
            return Some(Failure::SignIn(error.www_authenticate_header.clone()));
        }
        if let Some(error) = error.downcast_ref::<InsufficientScopeError>() {
            return Some(Failure::SignIn(error.www_authenticate_header.clone()));
        }
        if let Some(HttpError::SessionExpired | HttpError::Client(ClientError::Unreachable(_))) =
            error.downcast_ref()
        {
            return Some(Failure::LostSession);
        }
        cause = error.source();
    }
    None
}

/// Returns true if an error is an HTTP error of one request.
fn has_status(error: &(dyn std::error::Error + 'static)) -> bool {
    let is_status = |error: &(dyn std::error::Error + 'static)| {
        let error = error.downcast_ref();
        matches!(error, Some(HttpError::HttpStatus(_) | HttpError::UnexpectedServerResponse(_)))
    };
    std::iter::successors(Some(error), |error| error.source()).any(is_status)
}

pub(super) fn with_sources(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

impl Session {
    /// Sends a request for a call, shows its progress, and waits for its answer or its cancellation.
    pub(super) async fn request(&self, call: &Call, request: ClientRequest) -> Result<ServerResult, Failure> {
        let makes_task =
            matches!(&request, ClientRequest::CustomRequest(request) if request.method == "tools/call");
        let (sent, handle) = self.calls.send(&self.peer, call, request).await?;
        let mut answer = handle.rx;
        let mut progress = sent.progress.clone();
        let answer = async {
            tokio::select! {
                biased;
                answer = &mut answer => answer.unwrap_or(Err(ServiceError::TransportClosed)).map_err(Failure::from),
                // The task is cancelled by its id, which the answer contains.
                () = call.cancelled(), if makes_task => match timeout(TASK_WITHIN, &mut answer).await {
                    Ok(answer) => answer.unwrap_or(Err(ServiceError::TransportClosed)).map_err(Failure::from),
                    Err(_) => Err(Failure::Cancelled),
                },
                () = call.cancelled() => {
                    self.cancel(&sent).await;
                    Err(Failure::Cancelled)
                }
                () = self.ended.cancelled() => Err(Failure::Ended),
            }
        };
        tokio::pin!(answer);
        let answer = tokio::select! {
            biased;
            answer = &mut answer => answer,
            never = show_progress(call, &mut progress) => match never {},
        };
        if answer.is_ok() && progress.has_changed().unwrap_or(false) {
            show(call, &mut progress).await;
        }
        if matches!(answer, Err(Failure::NotAnswered(_))) {
            // The next call gets a new session.
            self.ended.cancel();
        }
        answer
    }

    async fn cancel(&self, sent: &Sent) {
        let why = Some("the call was cancelled".to_owned());
        let parameters = CancelledNotificationParam::new(Some(sent.request.clone()), why);
        let notification = CancelledNotification::new(parameters);
        if let Err(error) = self.peer.send_notification(notification.into()).await {
            tracing::info!(server = self.server, %error, "a cancellation could not be sent");
        }
    }
}

enum Never {}

async fn show_progress(call: &Call, progress: &mut tokio::sync::watch::Receiver<Option<Progress>>) -> Never {
    loop {
        if progress.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        show(call, progress).await;
        tokio::time::sleep(PROGRESS_PAUSE).await;
    }
}

async fn show(call: &Call, progress: &mut tokio::sync::watch::Receiver<Option<Progress>>) {
    let report = progress.borrow_and_update().clone();
    if let Some(Progress { fraction, text, .. }) = report
        && let Err(error) = call.progress(fraction, text).await
    {
        tracing::debug!(%error, "progress could not be shown");
    }
}

#[cfg(test)]
mod tests {
    use rmcp::transport::DynamicTransportError;
    use rmcp::transport::streamable_http_client::HttpStatusError;

    use super::*;

    #[test]
    fn an_http_error_of_one_call_does_not_end_the_session() {
        let failure = |error: HttpError| {
            let error =
                DynamicTransportError::from_parts("test", std::any::TypeId::of::<()>(), Box::new(error));
            Failure::from(ServiceError::TransportSend(error))
        };
        for status in [429, 500, 503] {
            let failure = failure(HttpStatusError::new(status, None).into());
            assert!(matches!(failure, Failure::Failed(_)), "{failure:?}");
        }
        let refused = failure(HttpError::UnexpectedServerResponse("HTTP 413: too large".into()));
        assert!(matches!(refused, Failure::Failed(_)), "{refused:?}");
        assert!(matches!(failure(HttpError::SessionExpired), Failure::LostSession));
        assert!(matches!(failure(HttpError::UnexpectedEndOfStream), Failure::NotAnswered(_)));
    }
}
