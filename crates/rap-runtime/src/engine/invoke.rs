//! Invocations: sent at least once until answered, never after a 4xx, never for a settled call.

use std::time::{Duration, Instant};

use bytes::Bytes;
use rap_agent::{Input, OpenCall};
use rap_protocol::retry::{Attempt, Next, Outcome, Patience, after_attempt};
use rap_protocol::{Address, CallbackUrl, Invocation, ToolName};
use serde_json::{Map, Value};
use tokio_util::sync::CancellationToken;
use url::Url;

use super::Engine;
use super::run::Settlement;
use crate::settings::ToolServer;
use crate::store::{
    self, DeliveryKind, DeliveryOutcome, DeliveryRecord, InvokeWork, Message, SessionToolset, Target, Thread,
};
use crate::toolsets::{Refresh, ServerTools, authorization};
use crate::world::Purpose;

/// The recorded outcome of an invocation whose server has another version of its tools. It is not sent again; its result
/// waits until the session may refresh what it holds.
const STALE: &str = "answered 409";

/// How an attempt ended.
enum Ended {
    Answered(Outcome, String),
    /// It cannot be sent at all.
    Impossible(String),
    /// It was not sent, because it is not wanted any more.
    Cancelled,
    /// It was not sent, because the store did not answer.
    StoreFailed(store::Error),
}

impl Engine {
    pub(super) async fn invoke(&self, work: &InvokeWork, cancelled: &CancellationToken) -> Settlement {
        let number = work.attempts.saturating_add(1);
        if work.outcome.as_deref() == Some(STALE) {
            return self.refresh_and_fail(work, work.attempts).await;
        }
        let began = Instant::now();
        let (next, outcome) = match self.send(work, cancelled).await {
            Ended::Cancelled => return Settlement::Done,
            Ended::StoreFailed(error) => return Settlement::StoreFailed(error),
            Ended::Impossible(why) => {
                self.audit(work, number, &why, began.elapsed());
                let given_up = DeliveryOutcome::GivenUp;
                self.delivery_ended(DeliveryKind::Invocation, given_up, number, || {
                    self.invocation_record(work, given_up, number, &why)
                });
                return failed(work, format!("Error: {why}"), None);
            }
            Ended::Answered(outcome, text) => {
                let now = self.now();
                let dice = self.world.random.next() as u32;
                let attempt = Attempt { number, since: work.call.since, now, dice };
                (after_attempt(outcome, attempt, &self.patience()), text)
            }
        };
        if !matches!(next, Next::Again { .. }) {
            self.audit(work, number, &outcome, began.elapsed());
        }
        let delivery = DeliveryOutcome::after(next);
        self.delivery_ended(DeliveryKind::Invocation, delivery, number, || {
            self.invocation_record(work, delivery, number, &outcome)
        });
        match next {
            Next::Done => Settlement::Accepted,
            Next::Again { at } => Settlement::Again { at, attempts: number, outcome },
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

    pub(super) fn patience(&self) -> Patience {
        Patience { give_up_after: self.settings.limits.invoke_retry_for, ..Patience::INVOCATION }
    }

    /// One line for each invocation: who called what for whom, and how it ended.
    fn audit(&self, work: &InvokeWork, attempt: u32, outcome: &str, took: Duration) {
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

    async fn send(&self, work: &InvokeWork, cancelled: &CancellationToken) -> Ended {
        let InvokeWork { thread, call, arguments, .. } = work;
        let Some(server) = self.settings.tool_servers.iter().find(|server| server.url == call.server.0)
        else {
            return Ended::Impossible("the tool's server is no longer configured".into());
        };
        let tools = match self.toolsets.held(&*self.store, thread.session).await {
            Ok(tools) => tools,
            Err(error) => return Ended::StoreFailed(error),
        };
        let Some(held) = tools.server(&call.server.0).filter(|held| held.toolset.is_some()) else {
            return Ended::Impossible("the tool's server offers no tools any more".into());
        };
        match self.invocation(thread, call, arguments, held) {
            // The call has settled while its toolset was read.
            _ if cancelled.is_cancelled() => Ended::Cancelled,
            Ok((endpoint, body)) => self.post_invocation(server, &endpoint, body).await,
            Err(why) => Ended::Impossible(why),
        }
    }

    fn invocation(
        &self,
        thread: &Thread,
        call: &OpenCall,
        arguments: &Map<String, Value>,
        held: &ServerTools,
    ) -> Result<(Url, Bytes), String> {
        let toolset = held.toolset.as_deref().ok_or("the tool's server offers no tools any more")?;
        let callback_url = self.callback_url(thread, &call.id, call.since);
        let invocation = Invocation {
            operation: ToolName::new(call.name.clone()).map_err(|error| error.to_string())?,
            arguments: arguments.clone(),
            address: Address {
                id: call.id.clone(),
                call_id: call.call_id.clone(),
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

    // Argued: TR-05 the body of the acknowledgement is drained for the sake of the connection and not looked at
    async fn post_invocation(&self, server: &ToolServer, endpoint: &Url, body: Bytes) -> Ended {
        let began = Instant::now();
        let sent = self.world.http.post(Purpose::Invoke, endpoint, &authorization(server), body).await;
        self.metrics.invoke.took(began.elapsed());
        match sent {
            Ok(reply) => {
                let outcome = Outcome::Answered { status: reply.status, retry_after: reply.retry_after };
                Ended::Answered(outcome, format!("answered {}", reply.status))
            }
            Err(error) => Ended::Answered(Outcome::NoAnswer, error.to_string()),
        }
    }

    /// The server has another version of its tools. The session takes the newest toolset, and that and the error result are
    /// committed together. While the session may not refresh, its result waits.
    async fn refresh_and_fail(&self, work: &InvokeWork, attempts: u32) -> Settlement {
        let InvokeWork { thread, call, .. } = work;
        let tools = match self.toolsets.held(&*self.store, thread.session).await {
            Ok(tools) => tools,
            // It was not recorded that the server has another version; it says so again.
            Err(error) => return Settlement::StoreFailed(error),
        };
        let held = tools.server(&call.server.0);
        let name = held.and_then(|held| held.toolset.as_ref()).map_or("the server", |toolset| &toolset.name);
        let text = format!("Error: the tools of {name} changed; call again");
        let refresh = match held {
            Some(held) => self.toolsets.refresh(thread.session, held).await,
            None => Refresh::Unneeded,
        };
        match refresh {
            Refresh::Wait(pause) => {
                Settlement::Again { at: self.now().plus(pause), attempts, outcome: STALE.into() }
            }
            Refresh::Unneeded => failed(work, text, None),
            Refresh::Take(toolset) => failed(work, text, Some(toolset)),
        }
    }
}

/// The call gets an error result, perhaps together with a new toolset.
fn failed(work: &InvokeWork, text: String, toolset: Option<SessionToolset>) -> Settlement {
    let input = Input::CallFailed { call: work.call.id.clone(), text };
    let message = Message { toolset, ..Message::new(Target::Key(work.thread.key), input) };
    Settlement::Apply(Box::new(message))
}
