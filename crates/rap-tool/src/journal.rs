//! What a tool server remembers, in SQLite. The functions here run inside the writer's transactions.
//!
//! The journal decides nothing about the life of a call: it loads a head, asks [`rules::step`], and writes all
//! that follows at once. It never stores a callback URL in the clear, and forgets it when the call is settled.

pub(crate) mod keys;
mod letter;
pub(crate) mod outbox;
pub(crate) mod questions;
pub(crate) mod recovery;
pub(crate) mod threads;

use std::sync::{Arc, Mutex, MutexGuard};

use rap_io::secret_box::Key;
use rap_protocol::{Address, CallId, CallbackUrl, Invocation, ThreadId, Timestamp, UserId};
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde_json::{Map, Value};
use url::Url;

use keys::Keys;
use threads::{Expired, LookedUpTo};

use crate::auth::Caller;
use crate::rules::{self, Dropped, Head, Ignored, Input, Kind, Post, State};

/// The numbered steps from an empty file to the schema of today.
pub(crate) const MIGRATIONS: &[&str] = &[include_str!("journal.sql")];

/// The number of a call in this journal.
pub(crate) type Seq = i64;

/// What a call is known by: 8 bytes for caller and thread, 8 for the id, 16 for the callback URL, each a keyed hash.
/// So one index finds a call, all calls of an id, and all calls of a thread.
pub(crate) type Identity = [u8; 32];

/// A call that is to be remembered, ready to be written.
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
}

/// A call as its handler needs it.
pub(crate) struct StoredCall {
    pub(crate) seq: Seq,
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
}

/// A message on its way, with all that it takes to send it.
pub(crate) struct Letter {
    pub(crate) seq: i64,
    pub(crate) call: Seq,
    pub(crate) kind: Kind,
    pub(crate) body: Vec<u8>,
    pub(crate) attempts: u32,
    pub(crate) created_at: Timestamp,
    pub(crate) origin: i64,
    /// The sealed callback URL, and the identity of the call, which it is sealed for.
    pub(crate) callback: Vec<u8>,
    pub(crate) identity: Identity,
}

/// What a step has changed.
pub(crate) struct Applied {
    pub(crate) before: Head,
    pub(crate) head: Head,
    pub(crate) dropped: Dropped,
    /// The message that may go out at once, since nothing else of this call waits.
    pub(crate) first: Option<Letter>,
}

impl Applied {
    /// Whether this step took the word from the handler.
    pub(crate) fn stops_handler(&self) -> bool {
        self.before.state.is_live() && !self.head.state.is_live()
    }
}

/// What it takes to keep the journal: its key, its bounds, and which call is which.
pub(crate) struct Book {
    pub(crate) key: Key,
    pub(crate) most_events: u32,
    /// Only used by jobs of the writer.
    pub(crate) keys: Arc<Mutex<Keys>>,
}

type Result<T> = rusqlite::Result<T>;

/// What came of a step: a change, or the reason why there is none.
pub(crate) type Stepped = Result<std::result::Result<Applied, Ignored>>;

impl Book {
    /// Makes a call ready to be written. What is known of a defective one is its address.
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
            caller,
            address,
        }
    }

    /// Whether a call is already known.
    pub(crate) fn knows(&self, db: &Connection, identity: &Identity) -> Result<bool> {
        Ok(self.keys().find(db, identity)?.is_some())
    }

    /// Writes down a call as running, if it is new.
    pub(crate) fn insert(&self, db: &Connection, call: &NewCall, now: Timestamp) -> Result<Option<Seq>> {
        let mut keys = self.keys();
        if keys.find(db, &call.identity)?.is_some() {
            return Ok(None);
        }
        let seq = insert(db, call, now)?;
        keys.add(db, call.identity, seq)?;
        Ok(Some(seq))
    }

    /// The call of this identity, if its handler has not finished.
    pub(crate) fn unfinished_call(&self, db: &Connection, identity: &Identity) -> Result<Option<StoredCall>> {
        let call = self.keys().find(db, identity)?;
        call.map_or(Ok(None), |call| recovery::unfinished_call(db, call))
    }

    /// Forgets some of the calls that were settled before `before`; how many.
    pub(crate) fn forget_settled(&self, db: &Connection, before: Timestamp, most: u32) -> Result<usize> {
        let forgotten = recovery::forget_settled(db, before, most)?;
        self.keys().remove(db, &forgotten)?;
        Ok(forgotten.len())
    }

    /// Looks on for threads that have expired.
    pub(crate) fn expired(
        &self,
        db: &Connection,
        after: LookedUpTo,
        before: Timestamp,
        most: u32,
    ) -> Result<Expired> {
        threads::expired(db, &mut self.keys(), (after, before), most)
    }

    fn keys(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock().expect("bug: nothing panics under a lock")
    }

    /// A call is known by its caller, callback URL, thread and id: two runtimes never meet.
    fn identity(&self, caller: &Caller, address: &Address) -> Identity {
        let mut identity = [0; 32];
        let url = address.callback_url.expose().as_bytes();
        let call = self.call_key(caller, &address.group_id, &address.id);
        identity[..16].copy_from_slice(&call);
        identity[16..].copy_from_slice(&self.key.mac(&[b"callback", &call, url])[..16]);
        identity
    }

    /// What the identities of all calls of a caller's thread begin with.
    fn thread_key(&self, caller: &Caller, thread: &ThreadId) -> [u8; 8] {
        let mac = self.key.mac(&[b"thread of calls", caller.bytes(), thread.as_str().as_bytes()]);
        *mac.first_chunk().expect("bug: a MAC has 32 bytes")
    }

    /// What the identities of all calls with this id in a caller's thread begin with.
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

    /// Takes a call one step further: load, decide, write.
    pub(crate) fn step(&self, db: &Connection, call: Seq, input: Input, now: Timestamp) -> Stepped {
        self.advance(db, call, input, None, now)
    }

    /// The same for what came of a letter. One that was dropped meanwhile has no say any more.
    pub(crate) fn answered(
        &self,
        db: &Connection,
        letter: (i64, Seq),
        input: Input,
        now: Timestamp,
    ) -> Stepped {
        self.advance(db, letter.1, input, Some(letter.0), now)
    }

    fn advance(
        &self,
        db: &Connection,
        call: Seq,
        input: Input,
        letter: Option<i64>,
        now: Timestamp,
    ) -> Stepped {
        if let Some(letter) = letter
            && !outbox::take(db, letter, &input)?
        {
            return Ok(Err(Ignored::Over));
        }
        let Some(mut row) = load(db, call)? else { return Ok(Err(Ignored::Over)) };
        if let Input::Aside(aside) = &input
            && row.head.state.is_live()
        {
            // Only the latest content of a view counts.
            row.head.asides_wait -= outbox::forget_view(db, call, aside)?;
        }
        let step = match rules::step(row.head, input, self.most_events) {
            Ok(step) => step,
            Err(ignored) => return Ok(Err(ignored)),
        };
        if step.drop == Dropped::Everything {
            db.prepare_cached("DELETE FROM outbox WHERE call = ?1")?.execute([call])?;
        }
        let posted = step.post.map(|post| self.post(db, &row, post, now)).transpose()?;
        // What stands first keeps its appointment; another first one may go at once.
        let alone = row.deliver_at.is_none() || step.drop == Dropped::Everything;
        let first_at = if alone || letter.is_some() { Some(now) } else { row.deliver_at };
        save(db, &row, &step.head, first_at.filter(|_| !step.head.outbox_is_empty()), now)?;
        Ok(Ok(Applied {
            before: row.head,
            head: step.head,
            dropped: step.drop,
            first: posted.filter(|_| alone),
        }))
    }

    fn post(&self, db: &Connection, row: &CallRow, post: Post, now: Timestamp) -> Result<Letter> {
        let kind = letter::kind(&post);
        let topic = if let Post::Aside(aside) = &post { Some(letter::topic(aside)) } else { None };
        let body = to_json(&letter::message(row, post)).into_bytes();
        db.prepare_cached(
            "INSERT INTO outbox (call, kind, topic, body, created_at) VALUES (?1, ?2, ?3, ?4, ?5)",
        )?
        .execute(params![row.seq, kind as u8, topic, body, now.0])?;
        let seq = db.last_insert_rowid();
        let (callback, identity) = (row.callback.clone(), row.identity);
        let (call, origin) = (row.seq, row.origin);
        Ok(Letter { seq, call, kind, body, attempts: 0, created_at: now, origin, callback, identity })
    }

    /// Where a letter goes; nowhere if it was sealed with another key.
    pub(crate) fn callback_url(&self, letter: &Letter) -> Option<CallbackUrl> {
        let plain = self.key.open(&letter.callback, &letter.identity).ok()?;
        CallbackUrl::new(String::from_utf8(plain).ok()?).ok()
    }

    /// Cancels what a caller has under these names. `None`: nothing is known by them.
    pub(crate) fn cancel(
        &self,
        db: &Connection,
        caller: &Caller,
        thread: &ThreadId,
        call: &CallId,
        now: Timestamp,
    ) -> Result<Option<Vec<(Seq, Applied)>>> {
        let seqs = self.alive(db, &self.call_key(caller, thread, call))?;
        let mut applied = Vec::new();
        for seq in &seqs {
            applied.extend(self.step(db, *seq, Input::Cancelled, now)?.ok().map(|done| (*seq, done)));
        }
        Ok((!seqs.is_empty()).then_some(applied))
    }

    /// Closes a caller's thread. `None`: the thread is not known, or is closed already.
    pub(crate) fn close(
        &self,
        db: &Connection,
        caller: &Caller,
        thread: &ThreadId,
        now: Timestamp,
    ) -> Result<Option<Vec<(Seq, Applied)>>> {
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

    /// What belongs to a thread that was closed has been cleared away.
    pub(crate) fn cleared(
        &self,
        db: &Connection,
        caller: &Caller,
        thread: &ThreadId,
        closing: Option<Seq>,
    ) -> Result<()> {
        threads::cleared(db, &self.thread_key(caller, thread), closing)
    }

    /// The call that a thread's last closing came after.
    pub(crate) fn last_closing(
        &self,
        db: &Connection,
        caller: &Caller,
        thread: &ThreadId,
    ) -> Result<Option<Seq>> {
        threads::last_closing(db, &self.thread_key(caller, thread))
    }

    /// Will a result, or further events, of this call still come?
    pub(crate) fn is_alive(
        &self,
        db: &Connection,
        caller: &Caller,
        thread: &ThreadId,
        call: &CallId,
    ) -> Result<bool> {
        Ok(!self.alive(db, &self.call_key(caller, thread, call))?.is_empty())
    }

    /// The calls whose identity begins so and that are not settled.
    fn alive(&self, db: &Connection, key: &[u8]) -> Result<Vec<Seq>> {
        let mut statement = db.prepare_cached("SELECT 1 FROM calls WHERE seq = ?1 AND state < 3")?;
        let mut alive = Vec::new();
        for call in self.keys().beginning_with(db, key)? {
            if statement.exists([call])? {
                alive.push(call);
            }
        }
        Ok(alive)
    }
}

fn insert(db: &Connection, call: &NewCall, now: Timestamp) -> Result<Seq> {
    db.prepare_cached(
        "INSERT INTO calls (key, caller, thread, call_id, secondary_id, operation, arguments, callback, origin,
                            user_id, ancestors, state, accepted_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, 0, ?12)",
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
    ])?;
    Ok(db.last_insert_rowid())
}

/// Everything about a call that a step reads or writes.
struct CallRow {
    seq: Seq,
    identity: Identity,
    thread: ThreadId,
    id: CallId,
    secondary: Option<CallId>,
    callback: Vec<u8>,
    origin: i64,
    deliver_at: Option<Timestamp>,
    head: Head,
}

fn load(db: &Connection, call: Seq) -> Result<Option<CallRow>> {
    db.prepare_cached(
        "SELECT seq, key, thread, call_id, secondary_id, callback, origin, deliver_at, state,
                result_waits, events_wait, asides_wait, next_event, subscription, apologised, restarts
         FROM calls WHERE seq = ?1 AND state < 3",
    )?
    .query_row([call], |row| {
        Ok(CallRow {
            seq: row.get(0)?,
            identity: row.get(1)?,
            thread: id(row, 2)?,
            id: id(row, 3)?,
            secondary: optional_id(row, 4)?,
            callback: row.get::<_, Option<Vec<u8>>>(5)?.unwrap_or_default(),
            origin: row.get(6)?,
            deliver_at: row.get::<_, Option<i64>>(7)?.map(Timestamp),
            head: Head {
                state: state(row.get(8)?),
                result_waits: row.get(9)?,
                events_wait: row.get(10)?,
                asides_wait: row.get(11)?,
                next_event: row.get::<_, i64>(12)?.unsigned_abs(),
                subscription: row.get(13)?,
                apologised: row.get(14)?,
                restarts: row.get(15)?,
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
                          apologised = ?7, restarts = ?8, deliver_at = ?9, asides_wait = ?10
         WHERE seq = ?1",
    )?
    .execute(params![
        row.seq,
        head.state as u8,
        head.result_waits,
        head.events_wait,
        head.next_event.cast_signed(),
        head.subscription,
        head.apologised,
        head.restarts,
        deliver_at.map(|at| at.0),
        head.asides_wait,
    ])?;
    if head.state == State::Settled {
        db.prepare_cached(
            "UPDATE calls SET settled_at = ?2, arguments = NULL, callback = NULL, user_id = NULL, ancestors = NULL,
                              cursor = NULL
             WHERE seq = ?1",
        )?
        .execute(params![row.seq, now.0])?;
        questions::forget(db, row.seq)?;
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
    serde_json::to_string(value).expect("bug: what has string keys can be written as JSON")
}

/// An id that was validated before it was stored.
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

fn json<T: serde::de::DeserializeOwned>(row: &Row<'_>, column: usize) -> Result<Option<T>> {
    let text: Option<String> = row.get(column)?;
    text.map(|text| serde_json::from_str(&text).map_err(|error| broken(column, error))).transpose()
}

fn broken(column: usize, error: impl std::error::Error + Send + Sync + 'static) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, Box::new(error))
}
