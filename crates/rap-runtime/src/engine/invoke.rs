//! Invocations of tools. Each is sent at least once until it is answered, never after a 4xx and never for a settled
//! call.

use std::time::{Duration, Instant};

use bytes::Bytes;
use rap_agent::Input;
use rap_io::client;
use rap_protocol::retry::{Attempt, Next, Outcome, RetryPolicy, after_attempt};
use rap_protocol::{Address, CallbackUrl, Forbidden, Invocation, ToolName, TraceContext};
use tokio_util::sync::CancellationToken;
use url::Url;

use super::Engine;
use super::run::WorkOutcome;
use crate::function::IN_PROCESS;
use crate::settings::ToolServer;
use crate::store::{
    self, DeliveryKind, DeliveryOutcome, DeliveryRecord, InvokeWork, Message, SessionToolset, Target,
};
use crate::telemetry::Telemetry;
use crate::toolsets::{NO_MEMORY, Refresh, ServerTools, may_have_credentials};
use crate::world::{MessageKind, To};

/// Recorded outcome of an invocation that was refused because the server has another version of its tools. It is not
/// sent again: its call gets an error result as soon as the session may refresh its toolset.
const STALE: &str = "answered 409";

/// Outcome of an attempt to send an invocation.
enum SendOutcome {
    Answered(Outcome, String),
    /// It can never be sent, for this reason.
    CannotSend(String),
    /// It was not sent because its call was settled.
    Cancelled,
    /// It was not sent because the store failed.
    StoreFailed(store::Error),
}

impl Engine {
    pub(super) async fn invoke(&self, work: &InvokeWork, cancelled: &CancellationToken) -> WorkOutcome {
        let number = work.attempts.saturating_add(1);
        if work.outcome.as_deref() == Some(STALE) {
            return self.refresh_and_fail(work, work.attempts).await;
        }
        if work.call.server.0 == IN_PROCESS && !self.functions.is_empty() {
            return self.run_function(work, cancelled).await;
        }
        rap_io::crash::point("before_invocation");
        let began = Instant::now();
        let (next, outcome) = match self.send(work, cancelled).await {
            SendOutcome::Cancelled => return WorkOutcome::Done,
            SendOutcome::StoreFailed(error) => return WorkOutcome::StoreFailed(error),
            SendOutcome::CannotSend(why) => {
                self.audit(work, number, &why, began.elapsed());
                let given_up = DeliveryOutcome::GivenUp;
                self.delivery_ended(DeliveryKind::Invocation, given_up, number, || {
                    self.invocation_record(work, given_up, number, &why)
                });
                return failed(work, format!("Error: {why}"), None);
            }
            SendOutcome::Answered(outcome, text) => {
                let now = self.now();
                let jitter = self.world.random.next() as u32;
                let attempt = Attempt { number, since: work.call.since, now, jitter };
                (after_attempt(outcome, attempt, &self.retry_policy()), text)
            }
        };
        if !matches!(next, Next::Retry { .. }) {
            self.audit(work, number, &outcome, began.elapsed());
            self.trace_invocation(work, number, next);
        }
        let server = &work.call.server.0;
        match next {
            // 409 tells that the server has another version of its tools.
            Next::Done | Next::Refused { status: 409 } => self.toolsets.note_success(server),
            Next::Retry { at } => self.toolsets.note_failure(server, &outcome, Some(at)),
            Next::Refused { .. } | Next::GaveUp => self.toolsets.note_failure(server, &outcome, None),
        }
        let delivery = store::outcome_after(next);
        self.delivery_ended(DeliveryKind::Invocation, delivery, number, || {
            self.invocation_record(work, delivery, number, &outcome)
        });
        match next {
            Next::Done => WorkOutcome::Accepted,
            Next::Retry { at } => WorkOutcome::Retry { at, attempts: number, outcome },
            Next::Refused { status: 409 } => self.refresh_and_fail(work, number).await,
            Next::Refused { .. } => {
                failed(work, format!("Error: the tool server refused the call: {outcome}"), None)
            }
            Next::GaveUp => {
                let text =
                    format!("Error: the tool server could not be reached, {number} attempts: {outcome}");
                failed(work, text, None)
            }
        }
    }

    fn trace_invocation(&self, work: &InvokeWork, attempts: u32, next: Next) {
        let Some(telemetry) = &self.telemetry else { return };
        let failure = match next {
            Next::Done | Next::Retry { .. } => None,
            Next::Refused { .. } => Some("refused"),
            Next::GaveUp => Some("given_up"),
        };
        telemetry.invoked(work, attempts, failure);
    }

    fn invocation_record(
        &self,
        work: &InvokeWork,
        outcome: DeliveryOutcome,
        attempts: u32,
        detail: &str,
    ) -> DeliveryRecord {
        let InvokeWork { thread, call, .. } = work;
        DeliveryRecord {
            kind: DeliveryKind::Invocation,
            thread: Some(thread.key),
            thread_id: Some(thread.id.clone()),
            call: Some(call.id.clone()),
            server: Some(call.server.0.clone()),
            topic: String::new(),
            outcome,
            attempts,
            detail: detail.to_owned(),
            at: self.now(),
        }
    }

    pub(super) fn retry_policy(&self) -> RetryPolicy {
        RetryPolicy { give_up_after: self.settings.limits.invoke_retry_for, ..RetryPolicy::INVOCATION }
    }

    /// Writes one audit line for an invocation: thread, user, tool, server and outcome.
    pub(super) fn audit(&self, work: &InvokeWork, attempt: u32, outcome: &str, took: Duration) {
        let InvokeWork { thread, call, .. } = work;
        tracing::info!(
            target: "rap::audit",
            thread = %thread.id,
            call = %call.id,
            tool = call.name,
            server = call.server.0,
            user = thread.user_id.as_ref().map(|user| user.as_str()),
            attempts = attempt,
            outcome,
            took_ms = took.as_millis() as u64,
            "invocation"
        );
    }

    async fn send(&self, work: &InvokeWork, cancelled: &CancellationToken) -> SendOutcome {
        let InvokeWork { thread, call, .. } = work;
        let Some(server) = self.settings.tool_servers.iter().find(|server| server.url == call.server.0)
        else {
            return SendOutcome::CannotSend("the tool server is no longer configured".into());
        };
        let tools = match self.toolsets.load(thread.session).await {
            Ok(tools) => tools,
            Err(error) => return SendOutcome::StoreFailed(error),
        };
        let server_tools = tools.server(&call.server.0);
        if server_tools.is_some_and(|server_tools| server_tools.lacks_memory) {
            return SendOutcome::Answered(Outcome::NoAnswer, NO_MEMORY.into());
        }
        let Some(server_tools) = server_tools.filter(|server_tools| server_tools.toolset.is_some()) else {
            return SendOutcome::CannotSend("the tool server no longer offers any tools".into());
        };
        let trace = self.telemetry.as_ref().map(|_| Telemetry::invocation_context(work));
        match self.invocation(work, server_tools) {
            // The call was settled while its toolset was read.
            _ if cancelled.is_cancelled() => SendOutcome::Cancelled,
            Ok((endpoint, body)) => match server.resolve(&endpoint) {
                Ok(endpoint) => self.post_invocation(server, &endpoint, trace, body).await,
                Err(why) => SendOutcome::Answered(Outcome::NoAnswer, why),
            },
            Err(why) => SendOutcome::CannotSend(why),
        }
    }

    fn invocation(&self, work: &InvokeWork, server_tools: &ServerTools) -> Result<(Url, Bytes), String> {
        let InvokeWork { thread, call, arguments, .. } = work;
        let toolset = server_tools.toolset.as_deref().ok_or("the tool server no longer offers any tools")?;
        let callback_url = self.callback_url(work);
        let invocation = Invocation {
            operation: ToolName::new(call.name.clone()).map_err(|error| error.to_string())?,
            arguments: arguments.clone(),
            address: Address {
                id: call.id.clone(),
                call_id: call.model_id.clone(),
                callback_url: CallbackUrl::new(callback_url).map_err(|error| error.to_string())?,
                group_id: thread.id.clone(),
            },
            thread_ancestors: thread.ancestors.clone(),
            user_id: thread.user_id.clone(),
            toolset_version: toolset.version.clone(),
        };
        let body = serde_json::to_vec(&invocation).expect("bug: an invocation is JSON");
        Ok((toolset.endpoint.to_url(), body.into()))
    }

    // Argued: TR-05 the body of the acknowledgement is drained so that the connection can be reused, and never read
    async fn post_invocation(
        &self,
        server: &ToolServer,
        endpoint: &Url,
        trace: Option<TraceContext>,
        body: Bytes,
    ) -> SendOutcome {
        let not_allowed = |why: &Forbidden| {
            SendOutcome::CannotSend(format!("the endpoint of the tool server is not allowed: {why}"))
        };
        if let Err(why) = self.check_named_url(&server.url, endpoint) {
            return not_allowed(&why);
        }
        let trusted = may_have_credentials(&self.urls, server, endpoint);
        let to = To { trace, ..To::new(endpoint, trusted.then_some(server.url.as_str())) };
        let began = Instant::now();
        let sent = self.world.http.post(MessageKind::Invocation, to, body).await;
        self.metrics.invoke.observe_duration(began.elapsed());
        match sent {
            Ok(reply) => {
                let outcome = Outcome::Answered { status: reply.status, retry_after: reply.retry_after };
                SendOutcome::Answered(outcome, format!("answered {}", reply.status))
            }
            Err(client::Error::Forbidden(why)) => not_allowed(&why),
            Err(error) => SendOutcome::Answered(Outcome::NoAnswer, error.to_string()),
        }
    }

    /// Handles a 409: the server has another version of its tools. The newest toolset and the error result of the call
    /// are committed together. If the session refreshed its toolset less than a minute ago, the result is delayed until
    /// it may do so again.
    pub(super) async fn refresh_and_fail(&self, work: &InvokeWork, attempts: u32) -> WorkOutcome {
        let InvokeWork { thread, call, .. } = work;
        let tools = match self.toolsets.load(thread.session).await {
            Ok(tools) => tools,
            // The 409 was not recorded. The server will answer it again.
            Err(error) => return WorkOutcome::StoreFailed(error),
        };
        let server_tools = tools.server(&call.server.0);
        let name = server_tools
            .and_then(|server_tools| server_tools.toolset.as_ref())
            .map_or("the server", |toolset| &toolset.name);
        let text = format!("Error: the tools of {name} changed; call again");
        let refresh = match server_tools {
            Some(server_tools) => self.toolsets.refresh(thread.session, server_tools).await,
            None => Refresh::NotNeeded,
        };
        match refresh {
            Refresh::Wait(pause) => {
                WorkOutcome::Retry { at: self.now().plus(pause), attempts, outcome: STALE.into() }
            }
            Refresh::NotNeeded => failed(work, text, None),
            Refresh::Take(toolset) => failed(work, text, Some(toolset)),
        }
    }
}

/// Settles the call with an error result, and stores `toolset` in the same transaction.
fn failed(work: &InvokeWork, text: String, toolset: Option<SessionToolset>) -> WorkOutcome {
    let input = Input::CallFailed { call: work.call.id.clone(), text };
    let message = Message { toolset, ..Message::new(Target::Key(work.thread.key), input) };
    WorkOutcome::apply(message)
}
