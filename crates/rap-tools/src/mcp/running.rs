//! The calls that run in a session, and the client's side of MCP: what a server may ask or tell.
//!
//! Sampling is refused. A server that asks for input gets it from the user of the call that it belongs to.

// The library marks sampling and logging as deprecated, because the newest version of MCP does.
#![expect(deprecated)]

use std::collections::HashMap;
use std::sync::Arc;

use rap_tool::Call;
use rmcp::ClientHandler;
use rmcp::model::{
    ClientCapabilities, ClientConfig, CreateMessageRequestParams, CreateMessageResult, ElicitRequestParams,
    ElicitResult, ElicitationCapability, ErrorCode, ErrorData, Extensions, FormElicitationCapability,
    Implementation, LoggingMessageNotificationParam, ProgressNotificationParam, ProgressToken,
    ProtocolVersion, RequestId, TASKS_EXTENSION_ID, UrlElicitationCapability,
};
use rmcp::service::{InboundStreamOrigin, NotificationContext, Peer, RequestContext, RoleClient};
use tokio::sync::{Mutex, Notify, watch};
use tokio_util::sync::CancellationToken;

use super::notices::excerpt;
use super::questions;

/// Progress of a call, as its server reports it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Progress {
    /// Amount that is done. It grows with each report.
    done: f64,
    pub(super) fraction: f64,
    pub(super) text: String,
}

impl From<ProgressNotificationParam> for Progress {
    fn from(report: ProgressNotificationParam) -> Self {
        let total = report.total.filter(|total| *total > 0.0);
        let fraction = total.map_or(0.0, |total| report.progress / total);
        let text = match (report.message, total) {
            (Some(message), _) => message,
            (None, Some(total)) => format!("{} of {total}", report.progress),
            (None, None) => report.progress.to_string(),
        };
        Progress { done: report.progress, fraction, text }
    }
}

struct Running {
    request: RequestId,
    call: Call,
    progress: watch::Sender<Option<Progress>>,
}

/// The calls that run in a session.
#[derive(Default)]
pub(super) struct RunningCalls {
    running: Mutex<HashMap<ProgressToken, Running>>,
    /// Notified when a list of the server has changed.
    pub(super) list_changed: Notify,
    /// Cancelled when the session has ended, or cannot be used any more.
    pub(super) ended: CancellationToken,
}

/// A request that was sent, until it is dropped.
pub(super) struct Sent {
    pub(super) request: RequestId,
    pub(super) progress: watch::Receiver<Option<Progress>>,
    token: ProgressToken,
    calls: Arc<RunningCalls>,
}

impl Drop for Sent {
    fn drop(&mut self) {
        let (calls, token) = (Arc::clone(&self.calls), self.token.clone());
        if let Ok(mut running) = self.calls.running.try_lock() {
            running.remove(&token);
            return;
        }
        tokio::spawn(async move { calls.running.lock().await.remove(&token) });
    }
}

impl RunningCalls {
    /// Returns true if no call runs.
    pub(super) fn is_idle(&self) -> bool {
        self.running.try_lock().is_ok_and(|running| running.is_empty())
    }

    /// Sends a request for a call. No message of the server about it is handled before it is registered.
    pub(super) async fn send(
        self: &Arc<Self>,
        peer: &Peer<RoleClient>,
        call: &Call,
        request: rmcp::model::ClientRequest,
    ) -> Result<(Sent, rmcp::service::RequestHandle<RoleClient>), rmcp::ServiceError> {
        let mut running = self.running.lock().await;
        let handle = peer.send_cancellable_request(request, Default::default()).await?;
        let (progress, receiver) = watch::channel(None);
        let (request, token) = (handle.id.clone(), handle.progress_token.clone());
        running.insert(token.clone(), Running { request: request.clone(), call: call.clone(), progress });
        let sent = Sent { request, progress: receiver, token, calls: Arc::clone(self) };
        Ok((sent, handle))
    }

    /// Returns the call that a request of the server belongs to. Over HTTP the stream tells; otherwise it is known if all
    /// running calls are of one thread.
    async fn origin(&self, extensions: &Extensions) -> Option<Call> {
        let running = self.running.lock().await;
        if let Some(InboundStreamOrigin::OutboundRequest(id)) = extensions.get() {
            return running
                .values()
                .find(|running| running.request == *id)
                .map(|running| running.call.clone());
        }
        let mut calls = running.values().map(|running| &running.call);
        let first = calls.next()?;
        calls.all(|other| other.thread() == first.thread()).then(|| first.clone())
    }
}

/// The client's side of one session.
pub(super) struct Client {
    pub(super) server: String,
    pub(super) calls: Arc<RunningCalls>,
    /// Version that the client asks for first.
    pub(super) version: ProtocolVersion,
}

impl ClientHandler for Client {
    fn get_info(&self) -> ClientConfig {
        let mut capabilities = ClientCapabilities::default();
        let forms = ElicitationCapability::new().with_form(FormElicitationCapability::default());
        capabilities.elicitation = Some(forms.with_url(UrlElicitationCapability::default()));
        capabilities.extensions =
            Some([(TASKS_EXTENSION_ID.to_owned(), Default::default())].into_iter().collect());
        let own = Implementation::new("rap", env!("CARGO_PKG_VERSION"));
        ClientConfig::new(capabilities, own).with_protocol_version(self.version.clone())
    }

    async fn create_message(
        &self,
        _: CreateMessageRequestParams,
        _: RequestContext<RoleClient>,
    ) -> Result<CreateMessageResult, ErrorData> {
        tracing::info!(server = self.server, "refused a request to ask a model (sampling)");
        let why = "this client does not offer sampling: it does not let servers ask its model";
        Err(ErrorData::new(ErrorCode::METHOD_NOT_FOUND, why, None))
    }

    async fn create_elicitation(
        &self,
        request: ElicitRequestParams,
        context: RequestContext<RoleClient>,
    ) -> Result<ElicitResult, ErrorData> {
        let Some(call) = self.calls.origin(&context.extensions).await else {
            let why = "it is not known which call this question belongs to, so nobody can be asked";
            return Err(ErrorData::new(ErrorCode::INVALID_REQUEST, why, None));
        };
        questions::ask(&self.server, &call, request).await
    }

    async fn on_progress(&self, report: ProgressNotificationParam, _: NotificationContext<RoleClient>) {
        let running = self.calls.running.lock().await;
        if let Some(running) = running.get(&report.progress_token) {
            // Notifications are handled concurrently, so an earlier one may come last.
            let report = Progress::from(report);
            running.progress.send_if_modified(|shown| {
                let is_newer = shown.as_ref().is_none_or(|shown| shown.done < report.done);
                if is_newer {
                    *shown = Some(report);
                }
                is_newer
            });
        }
    }

    async fn on_logging_message(
        &self,
        message: LoggingMessageNotificationParam,
        _: NotificationContext<RoleClient>,
    ) {
        tracing::info!(server = self.server, "{}", excerpt(&message.data.to_string()));
    }

    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.calls.list_changed.notify_one();
    }

    async fn on_resource_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.calls.list_changed.notify_one();
    }

    async fn on_prompt_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.calls.list_changed.notify_one();
    }
}
