//! Incoming requests: invocations, cancellations, thread closings and status queries.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use rap_io::writer::{Error as WriteError, JobClass};
use rap_protocol::{
    BadInvocation, CallId, CancelToolCall, Fault, Forbidden, Invalid, Invocation, StatusQuery, ThreadId,
    Timestamp, TraceContext, parse_invocation,
};
use rusqlite::Connection;

use super::deadlines::Deadline;
use super::open::ARGUMENT_UNIT;
use super::{Engine, Run, lock};
use crate::auth::Caller;
use crate::journal::{Applied, CallSeq, NewCall, StoredCall, moving};
use crate::rules::{Input, Returned};

/// Maximum time that the sender of a notification waits until it is written.
const NOTIFICATION_WAIT: Duration = Duration::from_secs(5);
/// Size up to which an invocation is parsed on the async worker, in bytes.
const PARSED_INLINE: usize = 128 * 1024;
/// Number of calls that one notification or status query may visit. Each further thousand counts as another
/// notification.
const VISITS_PER_NOTIFICATION: usize = 1_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accepted {
    New,
    Repeat,
}

/// Reason why a request was refused.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The request is malformed, or its callback URL is not allowed.
    Invalid(Invalid),
    /// The invocation is for another version of the toolset.
    Stale,
    /// Too many requests; the client may try again later.
    Overloaded,
    /// The caller has as many running calls as its share allows; it may try again when one has ended.
    ShareUsedUp,
    /// The journal cannot be written; the client may try again later.
    Unavailable,
}

impl From<WriteError> for Refusal {
    fn from(error: WriteError) -> Self {
        if matches!(error, WriteError::Busy) {
            return Refusal::Overloaded;
        }
        tracing::warn!(%error, "the journal cannot be written");
        Refusal::Unavailable
    }
}

/// An invocation that is not in the journal yet.
struct Incoming {
    call: NewCall,
    run: Arc<Run>,
    parsed: Parsed,
}

enum Parsed {
    Valid { invocation: Box<Invocation>, stale: bool },
    Invalid(Invalid),
}

/// A run that is registered before its call is committed. Dropping it, as when the commit fails, unregisters the run.
struct RegisteredRun {
    engine: Arc<Engine>,
    run: Option<Arc<Run>>,
}

impl RegisteredRun {
    fn new(engine: &Arc<Engine>, seq: CallSeq, run: Arc<Run>) -> Self {
        engine.register(seq, &run);
        RegisteredRun { engine: Arc::clone(engine), run: Some(run) }
    }

    fn keep(mut self) -> Arc<Run> {
        self.run.take().expect("bug: a run is kept once")
    }
}

impl Drop for RegisteredRun {
    fn drop(&mut self) {
        if let Some(run) = &self.run {
            self.engine.unregister(run);
        }
    }
}

/// Result of writing an invocation to the journal.
enum Recorded {
    /// The call has to run. A repeat also runs if the call is in the journal, unfinished, and has no run: its commit
    /// was reported as failed but took effect.
    Run(Accepted, StoredCall, RegisteredRun),
    /// The call ended without running: the invocation is invalid, or was cancelled before it arrived.
    Ended(CallSeq, Applied),
    Repeat,
    Stale,
}

impl Engine {
    /// Accepts an invocation. Returns when it is on disk and its handler was started.
    pub(crate) async fn accept(
        self: &Arc<Self>,
        caller: Caller,
        body: Bytes,
        trace: Option<TraceContext>,
    ) -> Result<Accepted, Refusal> {
        if self.is_stopping() || !self.invocations.admits(&caller) {
            return Err(Refusal::Overloaded);
        }
        let mut incoming = self.parse(caller.clone(), body).await?;
        incoming.call.trace = trace;
        let ancestors = match &incoming.parsed {
            Parsed::Valid { invocation, .. } => invocation.thread_ancestors.as_slice(),
            Parsed::Invalid(_) => &[],
        };
        self.activate(&caller, &incoming.call.address.group_id, ancestors).await?;
        let _turn = self.job_turns.take(&caller, JobClass::External).await;
        let engine = Arc::clone(self);
        self.write_then(
            move |engine, db| engine.record(db, incoming),
            move |recorded| engine.after_accept(recorded),
        )
        .await?
    }

    /// Runs a write job and then `act` on its result, even if the client disconnects in between.
    pub(super) async fn write_then<T: Send + 'static, U: Send + 'static>(
        self: &Arc<Self>,
        write: impl FnOnce(&Arc<Engine>, &Connection) -> rusqlite::Result<T> + Send + 'static,
        act: impl FnOnce(T) -> U + Send + 'static,
    ) -> Result<U, Refusal> {
        let (engine, runtime) = (Arc::clone(self), self.runtime.clone());
        let act = move |written| {
            let _runtime = runtime.enter();
            act(written)
        };
        // Such a job fails only if the database fails, and then the whole batch fails anyway.
        Ok(self.writer.run_unguarded(JobClass::External, move |db| write(&engine, db), act).await?)
    }

    /// Parses an invocation. A large one is parsed outside of the async workers, a few at a time, because that takes long
    /// and needs a multiple of its size.
    async fn parse(self: &Arc<Self>, caller: Caller, body: Bytes) -> Result<Incoming, Refusal> {
        if body.len() <= PARSED_INLINE {
            return self.read(caller, &body);
        }
        let _parser = self.parsers.acquire().await.expect("bug: this semaphore is never closed");
        let engine = Arc::clone(self);
        let parsed = tokio::task::spawn_blocking(move || engine.read(caller, &body)).await;
        parsed.unwrap_or(Err(Refusal::Unavailable))
    }

    fn read(&self, caller: Caller, body: &[u8]) -> Result<Incoming, Refusal> {
        let (address, parsed) = match parse_invocation(body) {
            Ok(invocation) => {
                let version = invocation.toolset_version.as_ref();
                let stale = version.is_some_and(|version| !self.offer().versions.contains(version));
                (invocation.address.clone(), Parsed::Valid { invocation: Box::new(invocation), stale })
            }
            Err(BadInvocation { error, address: Some(address) }) => (*address, Parsed::Invalid(error)),
            Err(BadInvocation { error, address: None }) => return Err(Refusal::Invalid(error)),
        };
        let url = address.callback_url.to_url();
        self.callback_rules.check(&url).map_err(|forbidden| forbidden_callback(&forbidden))?;
        let invocation = match &parsed {
            Parsed::Valid { invocation, .. } => Some(&**invocation),
            Parsed::Invalid(_) => None,
        };
        let permit = self.calls.take(&caller).ok_or(Refusal::ShareUsedUp)?;
        let arguments = match body.len() / ARGUMENT_UNIT {
            0 => None,
            units => Some(self.arguments.take_many(&caller, units).ok_or(Refusal::ShareUsedUp)?),
        };
        let call = self.journal.new_call(caller, address, &url, invocation);
        Ok(Incoming { call, run: Run::new(Some(permit), arguments), parsed })
    }

    /// Acts on an invocation that is on disk.
    fn after_accept(self: &Arc<Self>, recorded: Recorded) -> Result<Accepted, Refusal> {
        let accepted = match recorded {
            Recorded::Run(accepted, stored, registered) => {
                self.start(stored, registered.keep());
                accepted
            }
            Recorded::Ended(seq, applied) => {
                self.after_commit(seq, applied);
                Accepted::New
            }
            Recorded::Repeat => Accepted::Repeat,
            Recorded::Stale => return Err(Refusal::Stale),
        };
        self.counters.count_accepted(accepted);
        Ok(accepted)
    }

    /// Recognises a repeat before it compares the version, so that a repeat gets the same answer as the first time.
    fn record(self: &Arc<Self>, db: &Connection, incoming: Incoming) -> rusqlite::Result<Recorded> {
        let Incoming { call, run, parsed } = incoming;
        let now = self.now();
        if matches!(parsed, Parsed::Valid { stale: true, .. })
            && !self.journal.contains(db, &call.identity)?
        {
            return Ok(Recorded::Stale);
        }
        let Some(seq) = self.journal.insert(db, &call, now)? else {
            let orphan = self.journal.unfinished_call(db, &call.identity)?;
            let orphan = orphan.filter(|stored| !lock(&self.runs).contains_key(&stored.seq));
            return Ok(orphan.map_or(Recorded::Repeat, |stored| {
                let registered = RegisteredRun::new(self, stored.seq, run);
                Recorded::Run(Accepted::Repeat, stored, registered)
            }));
        };
        let invocation = match parsed {
            Parsed::Valid { invocation, .. } => Ok(invocation),
            Parsed::Invalid(error) => Err(format!("the invocation is not valid: {error}")),
        };
        let ended = match &invocation {
            Err(error) => Some(Input::Returned(Returned::Error(error.clone()))),
            Ok(_) if self.was_cancelled_early(&call, now) => {
                Some(Input::Returned(Returned::Error("cancelled".into())))
            }
            Ok(_) => None,
        };
        if let Some(input) = ended {
            let applied = self.journal.step(db, seq, input, now)?;
            return Ok(Recorded::Ended(seq, applied.expect("bug: a new call can end")));
        }
        let registered = RegisteredRun::new(self, seq, run);
        let invocation = invocation.expect("bug: an invalid invocation has ended");
        Ok(Recorded::Run(Accepted::New, stored(seq, call, *invocation, now), registered))
    }

    fn was_cancelled_early(&self, call: &NewCall, now: Timestamp) -> bool {
        lock(&self.early).get(&call.caller).is_some_and(|early| early.contains(call, now))
    }

    /// Makes the run visible to cancellations, including one that is committed in the same batch as the call.
    pub(super) fn register(&self, seq: CallSeq, run: &Arc<Run>) {
        run.seq.set(seq).expect("bug: a run belongs to one call");
        lock(&self.runs).insert(seq, Arc::clone(run));
    }

    /// Removes a run whose call was not written. Another call may have the same number by now.
    fn unregister(&self, run: &Arc<Run>) {
        let Some(seq) = run.seq.get() else { return };
        let mut runs = lock(&self.runs);
        if runs.get(seq).is_some_and(|registered| Arc::ptr_eq(registered, run)) {
            runs.remove(seq);
        }
    }

    /// Cancels a call. If it is unknown, remembers the cancellation in case it has overtaken the invocation.
    pub(crate) async fn cancel(self: &Arc<Self>, caller: Caller, request: CancelToolCall) {
        let CancelToolCall { thread_id: thread, tool_call_id: call } = request;
        let (sender, named) = (caller.clone(), thread.clone());
        let cancel = move |engine: &Engine, db: &Connection| {
            let now = engine.now();
            let cancelled =
                engine.charged(&caller, || engine.journal.cancel(db, &caller, &thread, &call, now))?;
            if cancelled.is_none() {
                tracing::info!(?thread, ?call, "received a cancellation of an unknown call");
                let mut early = lock(&engine.early);
                early.entry(caller.clone()).or_default().insert(thread.clone(), call.clone(), now);
            }
            Ok(cancelled)
        };
        let (engine, owner) = (Arc::clone(self), sender.clone());
        self.run_notification(&sender, async move {
            engine.activate(&owner, &named, &[]).await.ok();
            for (seq, applied) in engine.write(cancel).await.flatten().unwrap_or_default() {
                if applied.begins_grace() {
                    engine.set_deadline(seq, &owner, Deadline::Grace);
                }
                engine.after_commit(seq, applied);
            }
        })
        .await;
    }

    /// Closes a thread of the caller. The close hook runs in the background.
    pub(crate) async fn close(self: &Arc<Self>, caller: Caller, thread: ThreadId) {
        let (owner, id) = (caller.clone(), thread.clone());
        let close = move |engine: &Engine, db: &Connection| {
            moving::discard_thread(db, &owner, &id)?;
            engine.charged(&owner, || engine.journal.close(db, &owner, &id, engine.now()))
        };
        let (engine, owner, id) = (Arc::clone(self), caller.clone(), thread.clone());
        self.run_notification(&caller, async move {
            engine.discard_files(&owner, &id).await;
            match engine.write(close).await.flatten() {
                None => tracing::info!(?thread, "received a request to close a thread that is not open"),
                Some(closed) => engine.after_close(closed),
            }
        })
        .await;
    }

    /// Looks up calls in a job of the writer. A caller may have any number of calls with the same ids, so those that are
    /// visited count against its rate of notifications.
    fn charged<T>(&self, caller: &Caller, look_up: impl FnOnce() -> T) -> T {
        self.journal.take_visited();
        let found = look_up();
        self.notifications.charge(caller, self.journal.take_visited() / VISITS_PER_NOTIFICATION);
        found
    }

    /// Processes a notification in a task of its own. A notification is sent only once, so the task retries until it
    /// is written, even if the client disconnects. The request itself waits at most [`NOTIFICATION_WAIT`].
    async fn run_notification(
        self: &Arc<Self>,
        sender: &Caller,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        let Some(permit) = self.pending_notifications.take(sender) else {
            tracing::warn!(caller = ?sender, "too many notifications wait to be written; dropped one");
            return;
        };
        let acting = self.tasks.spawn(async move {
            work.await;
            drop(permit);
        });
        if tokio::time::timeout(NOTIFICATION_WAIT, acting).await.is_err() {
            tracing::warn!("the journal is slow: acknowledged a notification that is not on disk yet");
        }
    }

    /// Returns true if a result or further events of the call may still be sent.
    pub(crate) async fn is_alive(
        self: &Arc<Self>,
        caller: Caller,
        query: StatusQuery,
    ) -> Result<bool, Refusal> {
        self.activate(&caller, &query.thread_id, &[]).await?;
        let engine = Arc::clone(self);
        let alive = move |db: &Connection| {
            let StatusQuery { thread_id, tool_call_id, .. } = &query;
            engine.charged(&caller, || engine.journal.is_alive(db, &caller, thread_id, tool_call_id))
        };
        Ok(self.writer.run(JobClass::External, alive).await?)
    }
}

/// Refuses a forbidden callback URL now, since the server could never report it later.
fn forbidden_callback(forbidden: &Forbidden) -> Refusal {
    Refusal::Invalid(Invalid {
        fault: Fault::Value,
        path: "$.callback_url".into(),
        expected: "a URL that this server may send to".into(),
        found: forbidden.to_string(),
    })
}

fn stored(seq: CallSeq, call: NewCall, invocation: Invocation, accepted_at: Timestamp) -> StoredCall {
    StoredCall {
        seq,
        identity: call.identity,
        caller: call.caller,
        thread: call.address.group_id,
        id: call.address.id,
        operation: call.operation,
        arguments: invocation.arguments,
        ancestors: invocation.thread_ancestors,
        user_id: invocation.user_id,
        confirmed: false,
        cursor: None,
        accepted_at,
        trace: call.trace,
    }
}

/// Cancellations of one caller that arrived before their calls. Best effort: kept in memory, bounded in number and age.
#[derive(Default)]
pub(crate) struct EarlyCancels {
    at: HashMap<(ThreadId, CallId), Timestamp>,
    order: VecDeque<(Timestamp, (ThreadId, CallId))>,
}

impl EarlyCancels {
    const MAX: usize = 4_096;
    const TTL: Duration = Duration::from_secs(600);

    fn insert(&mut self, thread: ThreadId, call: CallId, now: Timestamp) {
        let name = (thread, call);
        self.at.insert(name.clone(), now);
        self.order.push_back((now, name));
        while self.order.len() > Self::MAX || self.order.front().is_some_and(|(at, _)| is_old(*at, now)) {
            let Some((at, name)) = self.order.pop_front() else { break };
            // A newer cancellation of the same call is kept.
            if self.at.get(&name) == Some(&at) {
                self.at.remove(&name);
            }
        }
    }

    fn contains(&self, call: &NewCall, now: Timestamp) -> bool {
        if self.at.is_empty() {
            return false;
        }
        let name = (call.address.group_id.clone(), call.address.id.clone());
        self.at.get(&name).is_some_and(|at| !is_old(*at, now))
    }
}

fn is_old(at: Timestamp, now: Timestamp) -> bool {
    now.since(at) > EarlyCancels::TTL
}
