//! Invocations: at least once until answered, never after a 4xx, never for a settled call.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use rap_agent::{Message, OpenCall};
use rap_io::writer::Lane;
use rap_protocol::retry::{Attempt, Next, Outcome, Patience, after_attempt};
use rap_protocol::{Address, CallbackUrl, Invocation, ToolName};
use rusqlite::params;
use serde_json::{Map, Value};
use url::Url;

use super::{Engine, STORE_PAUSE, Source};
use crate::settings::ToolServer;
use crate::store::{self, Fate, Kind, Line, Target, Thread, now, random};
use crate::toolsets::{ServerTools, authorization};

/// How long an acknowledgement may wait to be written. A call that returns before is never marked.
const RECORD_PAUSE: Duration = Duration::from_millis(100);

/// An invocation under way.
struct Sending {
    thread: Arc<Thread>,
    call: OpenCall,
    arguments: Map<String, Value>,
    source: Source,
}

impl Sending {
    /// The number of the attempt.
    fn number(&self) -> u32 {
        match self.source {
            Source::Step => 1,
            Source::Table { attempts } => attempts.saturating_add(1),
        }
    }

    fn line(&self, outcome: Fate, detail: &str) -> Line {
        let Sending { thread, call, .. } = self;
        Line {
            kind: Kind::Invocation,
            thread: thread.no,
            thread_id: Some(thread.id.clone()),
            call: Some(call.id.clone()),
            server: Some(call.server.0.clone()),
            topic: String::new(),
            outcome,
            attempts: self.number(),
            detail: detail.to_owned(),
            at: now(),
        }
    }
}

/// How an attempt ended.
enum Ended {
    Answered(Outcome, String),
    /// It can not be sent at all.
    Impossible(String),
}

impl Engine {
    pub(super) fn start_invoking(
        self: &Arc<Self>,
        thread: &Arc<Thread>,
        call: OpenCall,
        arguments: Map<String, Value>,
        source: Source,
    ) {
        if !self.underway.begin_invocation(thread.no, &call.id) {
            return;
        }
        let place = match self.invoke_places.get(&call.server.0) {
            // Nothing is sent: it fails for the lack of its server.
            None => None,
            Some(places) => match self.place(places) {
                Some(place) => Some(place),
                None => {
                    self.underway.invocation_is_void(thread.no, &call.id);
                    return self.look_again(places);
                }
            },
        };
        let engine = Arc::clone(self);
        let sending = Sending { thread: Arc::clone(thread), call, arguments, source };
        let send = async move {
            engine.invoke(sending).await;
            drop(place);
            engine.place_is_free();
        };
        self.tasks.spawn_on(send, &self.handle);
    }

    async fn invoke(self: &Arc<Self>, sending: Sending) {
        let Sending { thread, call, .. } = &sending;
        // The call may have settled since the step that made it, or since the table was read.
        if !self.is_due(&sending).await || self.stop.is_cancelled() {
            return self.underway.invocation_is_void(thread.no, &call.id);
        }
        let began = std::time::Instant::now();
        let ended = self.attempt(&sending).await;
        let number = sending.number();
        let (next, outcome) = match ended {
            Ended::Impossible(why) => {
                self.audit(&sending, number, &why, began.elapsed());
                self.ended(Kind::Invocation, Fate::GivenUp, number, || sending.line(Fate::GivenUp, &why));
                return self.fail_call(&sending, format!("Error: {why}")).await;
            }
            Ended::Answered(outcome, text) => {
                let attempt = Attempt { number, since: call.since, now: now(), dice: random() as u32 };
                (after_attempt(outcome, attempt, &self.patience()), text)
            }
        };
        if !matches!(next, Next::Again { .. }) {
            self.audit(&sending, number, &outcome, began.elapsed());
        }
        let fate = Fate::of(next);
        self.ended(Kind::Invocation, fate, number, || sending.line(fate, &outcome));
        match next {
            Next::Done => {
                if self.underway.acknowledge(thread.no, &call.id) {
                    self.unrecorded.notify_one();
                }
            }
            Next::Again { at } => self.try_later(&sending, at, number, outcome).await,
            Next::Refused { status: 409 } => self.refresh_and_fail(&sending).await,
            Next::Refused { .. } => {
                let text = format!("Error: the tool server refused the call: {outcome}");
                self.fail_call(&sending, text).await;
            }
            Next::GaveUp => {
                let text =
                    format!("Error: the tool server could not be reached, {number} attempts: {outcome}");
                self.fail_call(&sending, text).await;
            }
        }
    }

    /// What was read from the table is looked at once more: only now, while it is under way, does the step that
    /// settles the call take it off the list.
    async fn is_due(&self, sending: &Sending) -> bool {
        let Sending { thread, call, source, .. } = sending;
        if let Source::Table { attempts } = source {
            match self.store.is_due(thread.no, call.id.clone(), *attempts, now()).await {
                Ok(true) => {}
                Ok(false) => return false,
                Err(error) => tracing::debug!(%error, "sent without another look: at least once is promised"),
            }
        }
        self.underway.is_wanted(thread.no, &call.id)
    }

    fn patience(&self) -> Patience {
        Patience { give_up_after: self.settings.limits.invoke_retry_for, ..Patience::INVOCATION }
    }

    /// One line for each invocation: who called what on whose behalf, and how it was taken in the end.
    fn audit(&self, sending: &Sending, attempt: u32, outcome: &str, took: Duration) {
        let Sending { thread, call, .. } = sending;
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

    async fn attempt(&self, sending: &Sending) -> Ended {
        let Sending { thread, call, arguments, .. } = sending;
        let Some(server) = self.settings.tool_servers.iter().find(|server| server.url == call.server.0)
        else {
            return Ended::Impossible("the tool's server is no longer configured".into());
        };
        let tools = match self.toolsets.held(&self.store, thread.root).await {
            Ok(tools) => tools,
            Err(error) => return Ended::Answered(Outcome::NoAnswer, error.to_string()),
        };
        let Some(held) = tools.server(&call.server.0).filter(|held| held.toolset.is_some()) else {
            return Ended::Impossible("the tool's server offers no tools any more".into());
        };
        match self.body_of(thread, call, arguments, held) {
            Ok((endpoint, body)) => self.post(server, &endpoint, body).await,
            Err(why) => Ended::Impossible(why),
        }
    }

    fn body_of(
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
    async fn post(&self, server: &ToolServer, endpoint: &Url, body: Bytes) -> Ended {
        let began = std::time::Instant::now();
        let sent = self.invoker.post_json(endpoint, &authorization(server), body).await;
        self.metrics.invoke.took(began.elapsed());
        match sent {
            Ok(reply) => {
                let outcome = Outcome::Answered { status: reply.status, retry_after: reply.retry_after };
                Ended::Answered(outcome, format!("answered {}", reply.status))
            }
            Err(error) => Ended::Answered(Outcome::NoAnswer, error.to_string()),
        }
    }

    /// Backoff lives in the table.
    async fn try_later(
        &self,
        sending: &Sending,
        at: rap_protocol::Timestamp,
        attempts: u32,
        outcome: String,
    ) {
        let Sending { thread, call, .. } = sending;
        let (no, id) = (thread.no, call.id.clone());
        let written = self.store.write(move |conn| {
            let mut statement = conn.prepare_cached(
                "UPDATE calls SET invoke_at = ?3, attempts = ?4, outcome = ?5 WHERE thread = ?1 AND id = ?2 AND state = 0",
            )?;
            statement.execute(params![no, id.as_str(), at.0, attempts, outcome])
        });
        if let Err(error) = written.await {
            tracing::warn!(thread = %thread.id, call = %call.id, %error, "an attempt could not be noted");
            tokio::time::sleep(STORE_PAUSE.1).await;
        }
        self.underway.invocation_is_void(thread.no, &call.id);
        self.poke.notify_one();
    }

    async fn fail_call(&self, sending: &Sending, text: String) {
        let Sending { thread, call, .. } = sending;
        let failed = Message::CallFailed { call: call.id.clone(), text };
        self.settle(sending, self.insist(thread.no, failed).await);
    }

    /// The refreshed toolset and the error result come back as one message.
    async fn refresh_and_fail(&self, sending: &Sending) {
        let Sending { thread, call, .. } = sending;
        let tools = self.toolsets.held(&self.store, thread.root).await.ok();
        let held = tools.as_ref().and_then(|tools| tools.server(&call.server.0));
        let name = held.and_then(|held| held.toolset.as_ref()).map_or("the server", |toolset| &toolset.name);
        let text = format!("Error: the tools of {name} changed; call again");
        let refreshed = match held {
            Some(held) => self.toolsets.refresh(thread.root, held).await,
            None => None,
        };
        let failed = Message::CallFailed { call: call.id.clone(), text };
        let also = move |conn: &rusqlite::Connection| match &refreshed {
            Some(refreshed) => refreshed.write(conn),
            None => Ok(()),
        };
        let target = Target::No(thread.no);
        let done = self.store.step_and(Lane::Internal, target, failed.clone(), also).await;
        let done = match done {
            Err(store::Error::Unavailable(_)) => self.insist(thread.no, failed).await,
            done => done,
        };
        self.toolsets.forget(thread.root);
        self.settle(sending, done);
    }

    fn settle(&self, sending: &Sending, done: Result<store::Receipt, store::Error>) {
        let Sending { thread, call, .. } = sending;
        if let Err(error) = done {
            tracing::debug!(thread = %thread.id, call = %call.id, %error, "the call did not wait for its failure");
        }
        self.underway.invocation_is_void(thread.no, &call.id);
    }

    /// Acknowledgements are written together, and a call that returns soon needs none: it is at least once anyway.
    pub(super) async fn record(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = self.unrecorded.notified() => {}
                () = self.stop.cancelled() => return self.record_now().await,
            }
            tokio::select! {
                () = tokio::time::sleep(RECORD_PAUSE) => {}
                () = self.stop.cancelled() => {}
            }
            self.record_now().await;
        }
    }

    pub(super) async fn record_now(&self) {
        self.write_ledger().await;
        let taken = self.underway.take_acknowledged();
        if taken.is_empty() {
            return;
        }
        let (rows, at) = (taken.clone(), now());
        let written = self.store.write(move |conn| {
            let mut statement = conn.prepare_cached(
                "UPDATE calls SET invoke_at = NULL, acknowledged_at = ?3 WHERE thread = ?1 AND id = ?2 AND state = 0",
            )?;
            for (thread, call) in &rows {
                statement.execute(params![thread, call.as_str(), at.0])?;
            }
            Ok(())
        });
        if let Err(error) = written.await {
            tracing::warn!(%error, "acknowledgements could not be noted");
            // They stay on the list, so that the calls are not sent again while we run.
            self.underway.still_acknowledged(taken);
            tokio::select! {
                () = tokio::time::sleep(STORE_PAUSE.1) => {}
                () = self.stop.cancelled() => {}
            }
            return self.unrecorded.notify_one();
        }
        for (thread, call) in taken {
            self.underway.invocation_is_void(thread, &call);
        }
        // What did not fit in memory may be due.
        if self.overflow.load(Ordering::SeqCst) {
            self.poke.notify_one();
        }
    }
}
