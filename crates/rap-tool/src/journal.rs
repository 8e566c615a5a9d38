//! The journal: the SQLite database of a tool server. The functions here run inside the writer's transactions.
//!
//! The journal makes no decisions about calls. It loads a head, calls [`rules::step`], and writes the result in the
//! same transaction. It stores callback URLs only encrypted, and deletes them when the call is settled.

pub(crate) mod keys;
mod message;
pub(crate) mod moving;
pub(crate) mod outbox;
pub(crate) mod questions;
pub(crate) mod recovery;
pub(crate) mod threads;

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard};

use rap_io::secret_box::Key;
use rap_protocol::{Address, CallId, CallbackUrl, Invocation, ThreadId, Timestamp, TraceContext, UserId};
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde_json::{Map, Value};
use url::Url;

use keys::CallIndex;
use threads::{Expired, ScanPosition, ThreadKey};

use crate::auth::Caller;
use crate::rules::{
    self, Bounds, Dropped, Head, Ignored, Input, MessageKind, OutboxContent, State, StopCause,
};

/// The schema migrations, in order.
pub(crate) const MIGRATIONS: &[&str] = &[
    include_str!("journal.sql"),
    include_str!("journal_2.sql"),
    include_str!("journal_3.sql"),
    include_str!("journal_4.sql"),
    include_str!("journal_5.sql"),
];

/// Row number of a call in the journal. A later call has a greater number.
pub(crate) type CallSeq = i64;

/// Key of a call: keyed hashes of caller and thread (8 bytes), of the call id (8 bytes) and of the callback URL (16
/// bytes). A call, all calls with an id, and all calls of a thread are each a range of one index.
pub(crate) type Identity = [u8; 32];

/// A call to be inserted.
pub(crate) struct NewCall {
    pub(crate) identity: Identity,
    pub(crate) caller: Caller,
    pub(crate) address: Address,
    pub(crate) operation: String,
    arguments: String,
    sealed_url: Vec<u8>,
    origin: i64,
    ancestors: Option<String>,
    user_id: Option<UserId>,
    /// Trace that the invocation belongs to.
    pub(crate) trace: Option<TraceContext>,
}

/// A call with the data that its handler needs.
pub(crate) struct StoredCall {
    pub(crate) seq: CallSeq,
    pub(crate) identity: Identity,
    pub(crate) caller: Caller,
    pub(crate) thread: ThreadId,
    pub(crate) id: CallId,
    pub(crate) operation: String,
    pub(crate) arguments: Map<String, Value>,
    pub(crate) ancestors: Vec<ThreadId>,
    pub(crate) user_id: Option<UserId>,
    pub(crate) confirmed: bool,
    pub(crate) cursor: Option<Value>,
    pub(crate) accepted_at: Timestamp,
    pub(crate) trace: Option<TraceContext>,
}

/// An outbox message, with all data that is needed to send it.
pub(crate) struct OutboxMessage {
    pub(crate) seq: i64,
    pub(crate) call: CallSeq,
    pub(crate) kind: MessageKind,
    pub(crate) body: Vec<u8>,
    pub(crate) attempts: u32,
    pub(crate) created_at: Timestamp,
    pub(crate) caller: Caller,
    pub(crate) origin: i64,
    /// The encrypted callback URL. It is bound to `identity`, which is needed to decrypt it.
    pub(crate) callback: Vec<u8>,
    pub(crate) identity: Identity,
    pub(crate) trace: Option<TraceContext>,
}

/// A step that was written.
pub(crate) struct Applied {
    pub(crate) before: Head,
    pub(crate) head: Head,
    pub(crate) cause: StopCause,
    pub(crate) dropped: Dropped,
    /// The message that the step has added, if it is the only one of the call and may be sent at once.
    pub(crate) first: Option<OutboxMessage>,
}

impl Applied {
    /// Returns true if the handler has to stop because of this step.
    pub(crate) fn stops_handler(&self) -> bool {
        self.before.state.is_live() && (!self.head.state.is_live() || self.begins_grace())
    }

    /// Returns true if the grace time of the handler begins with this step.
    pub(crate) fn begins_grace(&self) -> bool {
        self.head.cancelled && !self.before.cancelled
    }
}

/// State of the journal outside the database: the encryption key, limits and the cache of call keys.
pub(crate) struct Journal {
    pub(crate) key: Key,
    pub(crate) bounds: Bounds,
    /// Locked only by jobs of the writer.
    pub(crate) keys: Arc<Mutex<CallIndex>>,
}

type Result<T> = rusqlite::Result<T>;

/// Result of a step: the change, or why the input was ignored.
pub(crate) type Stepped = Result<std::result::Result<Applied, Ignored>>;

impl Journal {
    /// Prepares a call for insertion. `invocation` is `None` if it is invalid; then only its address is known.
    pub(crate) fn new_call(
        &self,
        caller: Caller,
        address: Address,
        callback_url: &Url,
        invocation: Option<&Invocation>,
    ) -> NewCall {
        let identity = self.identity(&caller, &address);
        let ancestors =
            invocation.map(|call| &call.thread_ancestors).filter(|ancestors| !ancestors.is_empty());
        NewCall {
            identity,
            operation: invocation.map(|call| call.operation.to_string()).unwrap_or_default(),
            arguments: invocation.map_or_else(|| "{}".into(), |call| to_json(&call.arguments)),
            sealed_url: self.key.seal(address.callback_url.expose().as_bytes(), &identity),
            origin: self.origin(callback_url),
            ancestors: ancestors.map(to_json),
            user_id: invocation.and_then(|call| call.user_id.clone()),
            trace: None,
            caller,
            address,
        }
    }

    pub(crate) fn contains(&self, db: &Connection, identity: &Identity) -> Result<bool> {
        Ok(self.keys().find(db, identity)?.is_some())
    }

    /// Inserts a call in the state running. Returns `None` if it exists already.
    pub(crate) fn insert(&self, db: &Connection, call: &NewCall, now: Timestamp) -> Result<Option<CallSeq>> {
        let mut keys = self.keys();
        if keys.find(db, &call.identity)?.is_some() {
            return Ok(None);
        }
        let seq = insert(db, call, now)?;
        keys.add(db, call.identity, seq)?;
        Ok(Some(seq))
    }

    /// Returns the call with this identity, if its handler has not finished.
    pub(crate) fn unfinished_call(&self, db: &Connection, identity: &Identity) -> Result<Option<StoredCall>> {
        let call = self.keys().find(db, identity)?;
        call.map_or(Ok(None), |call| recovery::unfinished_call(db, call))
    }

    /// Deletes at most `limit` calls that were settled before `before`. Returns how many.
    pub(crate) fn delete_settled(&self, db: &Connection, before: Timestamp, limit: u32) -> Result<usize> {
        let forgotten = recovery::delete_settled(db, before, limit)?;
        self.keys().remove(db, &forgotten)?;
        Ok(forgotten.len())
    }

    /// Finds threads that have expired, from `after` on.
    pub(crate) fn expired(
        &self,
        db: &Connection,
        after: ScanPosition,
        before: Timestamp,
        limit: u32,
    ) -> Result<Expired> {
        threads::expired(db, &mut self.keys(), (after, before), limit)
    }

    fn keys(&self) -> MutexGuard<'_, CallIndex> {
        self.keys.lock().expect("bug: nothing panics under a lock")
    }

    /// Returns how many keys of calls were visited since the last time.
    pub(crate) fn take_visited(&self) -> usize {
        self.keys().take_visited()
    }

    /// Identifies a call by caller, callback URL, thread and id, so that calls of two runtimes never collide.
    fn identity(&self, caller: &Caller, address: &Address) -> Identity {
        let mut identity = [0; 32];
        let url = address.callback_url.expose().as_bytes();
        let call = self.call_key(caller, &address.group_id, &address.id);
        identity[..16].copy_from_slice(&call);
        identity[16..].copy_from_slice(&self.key.mac(&[b"callback", &call, url])[..16]);
        identity
    }

    /// Common prefix of the identities of all calls of a caller's thread.
    fn thread_key(&self, caller: &Caller, thread: &ThreadId) -> ThreadKey {
        let mac = self.key.mac(&[b"thread of calls", caller.bytes(), thread.as_str().as_bytes()]);
        *mac.first_chunk().expect("bug: a MAC has 32 bytes")
    }

    /// Common prefix of the identities of all calls with this id in a caller's thread.
    fn call_key(&self, caller: &Caller, thread: &ThreadId, id: &CallId) -> [u8; 16] {
        let thread = self.thread_key(caller, thread);
        let mac = self.key.mac(&[b"call", &thread, id.as_str().as_bytes()]);
        let mut key = [0; 16];
        key[..8].copy_from_slice(&thread);
        key[8..].copy_from_slice(&mac[..8]);
        key
    }

    fn origin(&self, url: &Url) -> i64 {
        let origin = url.origin().ascii_serialization();
        let mac = self.key.mac(&[b"origin", origin.as_bytes()]);
        i64::from_le_bytes(*mac.first_chunk().expect("bug: a MAC has 32 bytes"))
    }

    /// Loads a call, applies an input and writes the result.
    pub(crate) fn step(&self, db: &Connection, call: CallSeq, input: Input, now: Timestamp) -> Stepped {
        self.advance(db, call, input, None, now)
    }

    /// Like [`Journal::step`], for the end of a delivery. Ignored if the message was dropped meanwhile.
    pub(crate) fn step_delivered(
        &self,
        db: &Connection,
        message: (i64, CallSeq),
        input: Input,
        now: Timestamp,
    ) -> Stepped {
        self.advance(db, message.1, input, Some(message.0), now)
    }

    fn advance(
        &self,
        db: &Connection,
        call: CallSeq,
        input: Input,
        message: Option<i64>,
        now: Timestamp,
    ) -> Stepped {
        if let Some(message) = message
            && !outbox::remove(db, message, &input)?
        {
            return Ok(Err(Ignored::Ended));
        }
        let Some(mut row) = load(db, call)? else { return Ok(Err(Ignored::Ended)) };
        if let Input::UserMessage(message) = &input
            && row.head.accepts_messages()
        {
            // New content of a view replaces content that was not sent yet.
            row.head.user_messages_wait -= outbox::delete_view(db, call, message)?;
        }
        let cause = input.stop_cause();
        let step = match rules::step(row.head, input, now, &self.bounds) {
            Ok(step) => step,
            Err(ignored) => return Ok(Err(ignored)),
        };
        if step.drop == Dropped::Everything {
            db.prepare_cached("DELETE FROM outbox WHERE call = ?1")?.execute([call])?;
        }
        let posted = step.post.map(|post| self.post(db, &row, post, now)).transpose()?;
        // The head of the queue keeps its retry time. A new head may be sent at once.
        let alone = row.deliver_at.is_none() || step.drop == Dropped::Everything;
        let first_at = if alone || message.is_some() { Some(outbox::AT_ONCE) } else { row.deliver_at };
        save(db, &row, &step.head, first_at.filter(|_| !step.head.outbox_is_empty()), now)?;
        Ok(Ok(Applied {
            before: row.head,
            head: step.head,
            cause,
            dropped: step.drop,
            first: posted.filter(|_| alone),
        }))
    }

    fn post(
        &self,
        db: &Connection,
        row: &CallRow,
        post: OutboxContent,
        now: Timestamp,
    ) -> Result<OutboxMessage> {
        let kind = message::kind(&post);
        let topic = if let OutboxContent::UserMessage(message) = &post {
            Some(message::topic(message))
        } else {
            None
        };
        let body = to_json(&message::to_callback(row, post)).into_bytes();
        db.prepare_cached(
            "INSERT INTO outbox (call, kind, topic, body, created_at) VALUES (?1, ?2, ?3, ?4, ?5)",
        )?
        .execute(params![row.seq, kind as u8, topic, body, now.0])?;
        let seq = db.last_insert_rowid();
        let (callback, identity) = (row.callback.clone(), row.identity);
        let (call, caller, origin) = (row.seq, row.caller.clone(), row.origin);
        Ok(OutboxMessage {
            seq,
            call,
            kind,
            body,
            attempts: 0,
            created_at: now,
            caller,
            origin,
            callback,
            identity,
            trace: row.trace,
        })
    }

    /// Decrypts the callback URL of a message. `None` if it was encrypted with another key.
    pub(crate) fn callback_url(&self, message: &OutboxMessage) -> Option<CallbackUrl> {
        let plain = self.key.open(&message.callback, &message.identity).ok()?;
        CallbackUrl::new(String::from_utf8(plain).ok()?).ok()
    }

    /// Cancels a caller's calls with this id. `None` if there are none.
    pub(crate) fn cancel(
        &self,
        db: &Connection,
        caller: &Caller,
        thread: &ThreadId,
        call: &CallId,
        now: Timestamp,
    ) -> Result<Option<Vec<(CallSeq, Applied)>>> {
        let seqs = self.alive(db, &self.call_key(caller, thread, call))?;
        let mut applied = Vec::new();
        for seq in &seqs {
            applied.extend(self.step(db, *seq, Input::Cancelled, now)?.ok().map(|done| (*seq, done)));
        }
        Ok((!seqs.is_empty()).then_some(applied))
    }

    /// Closes a caller's thread. `None` if the thread is unknown or already closed.
    pub(crate) fn close(
        &self,
        db: &Connection,
        caller: &Caller,
        thread: &ThreadId,
        now: Timestamp,
    ) -> Result<Option<Vec<(CallSeq, Applied)>>> {
        let key = self.thread_key(caller, thread);
        let last_call = threads::last_call(db, &mut self.keys(), &key)?;
        if !threads::begin_closing(db, &key, last_call, (caller, thread), now)? {
            return Ok(None);
        }
        let mut applied = Vec::new();
        for seq in self.alive(db, &key)? {
            applied.extend(self.step(db, seq, Input::Closed, now)?.ok().map(|done| (seq, done)));
        }
        Ok(Some(applied))
    }

    /// Returns the last call before the thread was last closed.
    fn last_closed_call(
        &self,
        db: &Connection,
        caller: &Caller,
        thread: &ThreadId,
    ) -> Result<Option<CallSeq>> {
        threads::last_closed_call(db, &self.thread_key(caller, thread))
    }

    /// Returns true until the result of the call was accepted, or the call was cancelled or closed; for a subscription,
    /// until it ended. A result that was refused or given up counts as not accepted yet. Otherwise a caller could find
    /// out which ports of other machines answer, by naming them as callback URLs.
    pub(crate) fn is_alive(
        &self,
        db: &Connection,
        caller: &Caller,
        thread: &ThreadId,
        call: &CallId,
    ) -> Result<bool> {
        let closed = self.last_closed_call(db, caller, thread)?.unwrap_or_default();
        let mut statement = db.prepare_cached(
            "SELECT 1 FROM calls WHERE seq = ?1 AND (state < 3 OR result_waits AND seq > ?2)",
        )?;
        let mut alive = false;
        self.keys().scan(db, &self.call_key(caller, thread, call), |seq| {
            alive = statement.exists([seq, closed])?;
            Ok(if alive { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        Ok(alive)
    }

    /// Returns the calls that have this key prefix and are not settled. The limits of calls and subscriptions bound
    /// their number.
    fn alive(&self, db: &Connection, key: &[u8]) -> Result<Vec<CallSeq>> {
        let mut statement = db.prepare_cached("SELECT 1 FROM calls WHERE seq = ?1 AND state < 3")?;
        let mut alive = Vec::new();
        self.keys().scan(db, key, |call| {
            if statement.exists([call])? {
                alive.push(call);
            }
            Ok(ControlFlow::Continue(()))
        })?;
        alive.sort_unstable();
        alive.dedup();
        Ok(alive)
    }
}

fn insert(db: &Connection, call: &NewCall, now: Timestamp) -> Result<CallSeq> {
    db.prepare_cached(
        "INSERT INTO calls (key, caller, thread, call_id, secondary_id, operation, arguments, callback, origin,
                            user_id, ancestors, state, accepted_at, traceparent)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, 0, ?12, ?13)",
    )?
    .execute(params![
        call.identity,
        call.caller.bytes(),
        call.address.group_id.as_str(),
        call.address.id.as_str(),
        call.address.call_id.as_ref().map(CallId::as_str),
        call.operation,
        call.arguments,
        call.sealed_url,
        call.origin,
        call.user_id.as_ref().map(UserId::as_str),
        call.ancestors,
        now.0,
        call.trace.map(|trace| trace.to_string()),
    ])?;
    Ok(db.last_insert_rowid())
}

/// The columns of a call that a step reads or writes.
struct CallRow {
    seq: CallSeq,
    identity: Identity,
    caller: Caller,
    thread: ThreadId,
    id: CallId,
    secondary: Option<CallId>,
    callback: Vec<u8>,
    origin: i64,
    deliver_at: Option<Timestamp>,
    trace: Option<TraceContext>,
    head: Head,
}

// The column `apologised` is `refusal_reported`, and `asides_wait` counts views and questions.
fn load(db: &Connection, call: CallSeq) -> Result<Option<CallRow>> {
    db.prepare_cached(
        "SELECT seq, key, thread, call_id, secondary_id, callback, origin, deliver_at, state,
                result_waits, events_wait, asides_wait, next_event, subscription, apologised, restarts, caller,
                cancelled, refused_since, traceparent
         FROM calls WHERE seq = ?1 AND state < 3",
    )?
    .query_row([call], |row| {
        Ok(CallRow {
            seq: row.get(0)?,
            identity: row.get(1)?,
            caller: Caller::from_bytes(row.get(16)?),
            thread: id(row, 2)?,
            id: id(row, 3)?,
            secondary: optional_id(row, 4)?,
            callback: row.get::<_, Option<Vec<u8>>>(5)?.unwrap_or_default(),
            origin: row.get(6)?,
            deliver_at: row.get::<_, Option<i64>>(7)?.map(Timestamp),
            trace: trace(row, 19)?,
            head: Head {
                state: state(row.get(8)?),
                result_waits: row.get(9)?,
                events_wait: row.get(10)?,
                user_messages_wait: row.get(11)?,
                next_event: row.get::<_, i64>(12)?.unsigned_abs(),
                subscription: row.get(13)?,
                refusal_reported: row.get(14)?,
                restarts: row.get(15)?,
                cancelled: row.get(17)?,
                refused_since: row.get::<_, Option<i64>>(18)?.map(Timestamp),
            },
        })
    })
    .optional()
}

fn save(
    db: &Connection,
    row: &CallRow,
    head: &Head,
    deliver_at: Option<Timestamp>,
    now: Timestamp,
) -> Result<()> {
    db.prepare_cached(
        "UPDATE calls SET state = ?2, result_waits = ?3, events_wait = ?4, next_event = ?5, subscription = ?6,
                          apologised = ?7, restarts = ?8, deliver_at = ?9, asides_wait = ?10, cancelled = ?11,
                          refused_since = ?12
         WHERE seq = ?1",
    )?
    .execute(params![
        row.seq,
        head.state as u8,
        head.result_waits,
        head.events_wait,
        head.next_event.cast_signed(),
        head.subscription,
        head.refusal_reported,
        head.restarts,
        deliver_at.map(|at| at.0),
        head.user_messages_wait,
        head.cancelled,
        head.refused_since.map(|at| at.0),
    ])?;
    if head.state == State::Settled {
        db.prepare_cached(
            "UPDATE calls SET settled_at = ?2, arguments = NULL, callback = NULL, user_id = NULL, ancestors = NULL,
                              cursor = NULL, traceparent = NULL
             WHERE seq = ?1",
        )?
        .execute(params![row.seq, now.0])?;
        questions::delete_for_call(db, row.seq)?;
    }
    Ok(())
}

fn state(number: u8) -> State {
    match number {
        0 => State::Running,
        1 => State::Subscribed,
        2 => State::Ending,
        _ => State::Settled,
    }
}

fn to_json<T: serde::Serialize + ?Sized>(value: &T) -> String {
    serde_json::to_string(value).expect("bug: a value with string keys can be serialized")
}

/// Reads an id, which was validated before it was stored.
fn id<T: TryFrom<String, Error = rap_protocol::id::Error>>(row: &Row<'_>, column: usize) -> Result<T> {
    T::try_from(row.get(column)?).map_err(|error| broken(column, error))
}

fn optional_id<T: TryFrom<String, Error = rap_protocol::id::Error>>(
    row: &Row<'_>,
    column: usize,
) -> Result<Option<T>> {
    let text: Option<String> = row.get(column)?;
    text.map(|text| T::try_from(text).map_err(|error| broken(column, error))).transpose()
}

fn trace(row: &Row<'_>, column: usize) -> Result<Option<TraceContext>> {
    let text: Option<String> = row.get(column)?;
    Ok(text.and_then(|text| TraceContext::parse(&text)))
}

fn json<T: serde::de::DeserializeOwned>(row: &Row<'_>, column: usize) -> Result<Option<T>> {
    let text: Option<String> = row.get(column)?;
    text.map(|text| serde_json::from_str(&text).map_err(|error| broken(column, error))).transpose()
}

fn broken(column: usize, error: impl std::error::Error + Send + Sync + 'static) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, Box::new(error))
}
