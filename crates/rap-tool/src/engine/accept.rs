//! What comes in: invocations, cancellations, closings, questions.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use rap_io::writer::{Error as WriteError, Lane};
use rap_protocol::{
    BadInvocation, CallId, CancelToolCall, Fault, Forbidden, Invalid, Invocation, StatusQuery, ThreadId,
    Timestamp, parse_invocation,
};
use rusqlite::Connection;

use super::{Engine, Run, lock};
use crate::auth::Caller;
use crate::journal::{Applied, NewCall, Seq, StoredCall};
use crate::rules::{Input, Returned};

/// How long the sender of a notification waits until it is written.
const NOTIFIED_WITHIN: Duration = Duration::from_secs(5);

/// An invocation was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accepted {
    New,
    Repeat,
}

/// Why something that came in was not taken.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// It can not be read, or there is nowhere to answer.
    Invalid(Invalid),
    /// It was made for another version of the toolset.
    Stale,
    /// Too much at once: come back later.
    Overloaded,
    /// The journal can not be written: come back later.
    Unavailable,
}

impl From<WriteError> for Refusal {
    fn from(error: WriteError) -> Self {
        if matches!(error, WriteError::Busy) {
            return Refusal::Overloaded;
        }
        tracing::warn!(%error, "the journal can not be written");
        Refusal::Unavailable
    }
}

/// An invocation on its way into the journal.
struct Incoming {
    call: NewCall,
    run: Arc<Run>,
    what: What,
}

enum What {
    Sound { invocation: Box<Invocation>, stale: bool },
    Defective(Invalid),
}

/// A run that is registered before its call is committed. If that fails, it is taken back.
struct Registered {
    engine: Arc<Engine>,
    run: Option<Arc<Run>>,
}

impl Registered {
    fn new(engine: &Arc<Engine>, seq: Seq, run: Arc<Run>) -> Self {
        engine.register(seq, &run);
        Registered { engine: Arc::clone(engine), run: Some(run) }
    }

    fn keep(mut self) -> Arc<Run> {
        self.run.take().expect("bug: a run is kept once")
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(run) = &self.run {
            self.engine.unregister(run);
        }
    }
}

/// What the journal made of it.
enum Entry {
    /// It is to be run. The journal may know it already, from a commit that nobody was sure of.
    Run(Accepted, StoredCall, Registered),
    /// It is over before it began.
    Over(Seq, Applied),
    Repeat,
    Stale,
}

impl Engine {
    /// Takes an invocation: returns when it is on disk, and has started it.
    pub(crate) async fn accept(self: &Arc<Self>, caller: Caller, body: Bytes) -> Result<Accepted, Refusal> {
        if self.is_stopping() || !self.invocations.admits(&caller) {
            return Err(Refusal::Overloaded);
        }
        let incoming = self.read(caller, &body)?;
        drop(body);
        let engine = Arc::clone(self);
        self.act_upon(move |engine, db| engine.write_down(db, incoming), move |entry| engine.enter(entry))
            .await?
    }

    /// Writes, and acts upon what is written even if the client hangs up in between.
    pub(super) async fn act_upon<T: Send + 'static, U: Send + 'static>(
        self: &Arc<Self>,
        write: impl FnOnce(&Arc<Engine>, &Connection) -> rusqlite::Result<T> + Send + 'static,
        act: impl FnOnce(T) -> U + Send + 'static,
    ) -> Result<U, Refusal> {
        let (engine, runtime) = (Arc::clone(self), self.runtime.clone());
        let act = move |written| {
            let _runtime = runtime.enter();
            act(written)
        };
        // Such a job fails only if the database does, and then the others of its batch have nothing to lose by it.
        Ok(self.writer.run_unguarded(Lane::External, move |db| write(&engine, db), act).await?)
    }

    fn read(&self, caller: Caller, body: &[u8]) -> Result<Incoming, Refusal> {
        let (address, what) = match parse_invocation(body) {
            Ok(invocation) => {
                let version = invocation.toolset_version.as_ref();
                let stale = version.is_some_and(|version| *version != self.version);
                (invocation.address.clone(), What::Sound { invocation: Box::new(invocation), stale })
            }
            Err(BadInvocation { error, address: Some(address) }) => (*address, What::Defective(error)),
            Err(BadInvocation { error, address: None }) => return Err(Refusal::Invalid(error)),
        };
        let url = address.callback_url.to_url();
        self.limits.callbacks_to.check(&url).map_err(|forbidden| forbidden_callback(&forbidden))?;
        let invocation = match &what {
            What::Sound { invocation, .. } => Some(&**invocation),
            What::Defective(_) => None,
        };
        let call = self.book.new_call(caller, address, &url, invocation);
        let place = Arc::clone(&self.calls).try_acquire_owned().map_err(|_| Refusal::Overloaded)?;
        Ok(Incoming { call, run: Run::new(Some(place)), what })
    }

    /// Acts upon an invocation that is on disk.
    fn enter(self: &Arc<Self>, entry: Entry) -> Result<Accepted, Refusal> {
        let accepted = match entry {
            Entry::Run(accepted, stored, registered) => {
                self.start(stored, registered.keep());
                accepted
            }
            Entry::Over(seq, applied) => {
                self.follow(seq, applied);
                Accepted::New
            }
            Entry::Repeat => Accepted::Repeat,
            Entry::Stale => return Err(Refusal::Stale),
        };
        self.counters.took(accepted);
        Ok(accepted)
    }

    /// A repeat is recognised before the version is compared, so that it is answered like the first time.
    fn write_down(self: &Arc<Self>, db: &Connection, incoming: Incoming) -> rusqlite::Result<Entry> {
        let Incoming { call, run, what } = incoming;
        let now = self.now();
        if matches!(what, What::Sound { stale: true, .. }) && !self.book.knows(db, &call.identity)? {
            return Ok(Entry::Stale);
        }
        let Some(seq) = self.book.insert(db, &call, now)? else {
            let orphan = self.book.unfinished_call(db, &call.identity)?;
            let orphan = orphan.filter(|stored| !lock(&self.runs).contains_key(&stored.seq));
            return Ok(orphan.map_or(Entry::Repeat, |stored| {
                let registered = Registered::new(self, stored.seq, run);
                Entry::Run(Accepted::Repeat, stored, registered)
            }));
        };
        let invocation = match what {
            What::Sound { invocation, .. } => Ok(invocation),
            What::Defective(defect) => Err(format!("the invocation is not valid: {defect}")),
        };
        let over = match &invocation {
            Err(defect) => Some(Input::Returned(Returned::Error(defect.clone()))),
            Ok(_) if lock(&self.early).knows(&call, now) => Some(Input::Cancelled),
            Ok(_) => None,
        };
        if let Some(input) = over {
            let applied = self.book.step(db, seq, input, now)?;
            return Ok(Entry::Over(seq, applied.expect("bug: a new call can end")));
        }
        let registered = Registered::new(self, seq, run);
        let invocation = invocation.expect("bug: a defective invocation is over");
        Ok(Entry::Run(Accepted::New, stored(seq, call, *invocation), registered))
    }

    /// From here on a cancellation finds the run, even one that is committed together with its call.
    pub(super) fn register(&self, seq: Seq, run: &Arc<Run>) {
        run.seq.set(seq).expect("bug: a run belongs to one call");
        lock(&self.runs).insert(seq, Arc::clone(run));
    }

    /// Forgets a run whose call was not written. By now its number may belong to another call.
    fn unregister(&self, run: &Arc<Run>) {
        let Some(seq) = run.seq.get() else { return };
        let mut runs = lock(&self.runs);
        if runs.get(seq).is_some_and(|registered| Arc::ptr_eq(registered, run)) {
            runs.remove(seq);
        }
    }

    /// Cancels what the caller calls so, now or, if it is overtaken, when it comes.
    pub(crate) async fn cancel(self: &Arc<Self>, caller: Caller, what: CancelToolCall) {
        let CancelToolCall { thread_id: thread, tool_call_id: call } = what;
        let cancel = move |engine: &Engine, db: &Connection| {
            let now = engine.now();
            let cancelled = engine.book.cancel(db, &caller, &thread, &call, now)?;
            if cancelled.is_none() {
                tracing::info!(?thread, ?call, "cancelled a call that is not known here");
                lock(&engine.early).note(caller.clone(), thread.clone(), call.clone(), now);
            }
            Ok(cancelled)
        };
        let engine = Arc::clone(self);
        self.notified(async move {
            for (seq, applied) in engine.write(cancel).await.flatten().unwrap_or_default() {
                engine.follow(seq, applied);
            }
        })
        .await;
    }

    /// Closes a thread of the caller. What belongs to it is cleared away in the background.
    pub(crate) async fn close(self: &Arc<Self>, caller: Caller, thread: ThreadId) {
        let (owner, id) = (caller.clone(), thread.clone());
        let close = move |engine: &Engine, db: &Connection| engine.book.close(db, &owner, &id, engine.now());
        let engine = Arc::clone(self);
        self.notified(async move {
            match engine.write(close).await.flatten() {
                None => tracing::info!(?thread, "closed a thread that is not open here"),
                Some(closed) => engine.closed(caller, thread, closed),
            }
        })
        .await;
    }

    /// Acts upon a notification. It will not come again, so it is kept until it can be written, whoever hangs up;
    /// but nobody waits long for that.
    async fn notified(self: &Arc<Self>, work: impl Future<Output = ()> + Send + 'static) {
        let Ok(place) = Arc::clone(&self.notified).try_acquire_owned() else {
            tracing::warn!("too many notifications wait to be written; one is lost");
            return;
        };
        let acting = self.tasks.spawn(async move {
            work.await;
            drop(place);
        });
        if tokio::time::timeout(NOTIFIED_WITHIN, acting).await.is_err() {
            tracing::warn!("a notification waits to be written");
        }
    }

    /// Will a result, or further events, still come?
    pub(crate) async fn is_alive(
        self: &Arc<Self>,
        caller: Caller,
        what: StatusQuery,
    ) -> Result<bool, Refusal> {
        let engine = Arc::clone(self);
        let alive =
            move |db: &Connection| engine.book.is_alive(db, &caller, &what.thread_id, &what.tool_call_id);
        Ok(self.writer.run(Lane::External, alive).await?)
    }
}

/// A URL that we will never send to is refused while somebody listens.
fn forbidden_callback(forbidden: &Forbidden) -> Refusal {
    Refusal::Invalid(Invalid {
        fault: Fault::Value,
        path: "$.callback_url".into(),
        expected: "a URL that this server may send to".into(),
        found: forbidden.to_string(),
    })
}

fn stored(seq: Seq, call: NewCall, invocation: Invocation) -> StoredCall {
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
    }
}

/// Cancellations of calls that have not come yet. Only a hint, so it lives in memory and is bounded.
#[derive(Default)]
pub(crate) struct EarlyCancels {
    at: HashMap<(Caller, ThreadId, CallId), Timestamp>,
    order: VecDeque<(Timestamp, (Caller, ThreadId, CallId))>,
}

impl EarlyCancels {
    /// How many are remembered.
    const MOST: usize = 4_096;
    /// How long.
    const FOR: Duration = Duration::from_secs(600);

    fn note(&mut self, caller: Caller, thread: ThreadId, call: CallId, now: Timestamp) {
        let name = (caller, thread, call);
        self.at.insert(name.clone(), now);
        self.order.push_back((now, name));
        while self.order.len() > Self::MOST || self.order.front().is_some_and(|(at, _)| is_old(*at, now)) {
            let Some((at, name)) = self.order.pop_front() else { break };
            // A name that was noted again since then lives on.
            if self.at.get(&name) == Some(&at) {
                self.at.remove(&name);
            }
        }
    }

    fn knows(&self, call: &NewCall, now: Timestamp) -> bool {
        if self.at.is_empty() {
            return false;
        }
        let name = (call.caller.clone(), call.address.group_id.clone(), call.address.id.clone());
        self.at.get(&name).is_some_and(|at| !is_old(*at, now))
    }
}

fn is_old(at: Timestamp, now: Timestamp) -> bool {
    now.since(at) > EarlyCancels::FOR
}
