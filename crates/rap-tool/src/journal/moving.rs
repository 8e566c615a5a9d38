//! Calls that move to another tool server, and calls that have arrived from one.
//!
//! A session moves by copies. The calls here stay as they are until the runtime closes their threads. Those that have
//! arrived are records that nothing else reads, until the caller at the destination asks about one of them. So a move
//! that fails has started nothing.

use rap_protocol::{Address, CallId, CallbackUrl, ThreadId, Timestamp, TraceContext, UserId};
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::{CallSeq, Journal, NewCall, Result, id, json, optional_id, outbox};
use crate::auth::Caller;
use crate::rules::{MessageKind, State};

/// Number of calls that are looked at in one transaction, to find those of a session.
const WINDOW: CallSeq = 10_000;
/// Size at which a page of calls is sent, in bytes.
const PAGE_BYTES: i64 = 1024 * 1024;
/// Maximum size of a call with its messages, in bytes.
pub(crate) const CALL_BYTES: i64 = 16 * 1024 * 1024;
/// Number of arrivals that become calls in one transaction.
const ARRIVALS: u32 = 100;
const SEALED: &[u8] = b"arrival";

/// A call that moves, without the questions to its user: their URLs lead to the server that asked.
#[derive(Serialize, Deserialize)]
pub(crate) struct MovedCall {
    pub(crate) thread: ThreadId,
    pub(crate) id: CallId,
    #[serde(deserialize_with = "callback_url")]
    pub(crate) callback_url: CallbackUrl,
    call_id: Option<CallId>,
    pub(crate) operation: String,
    arguments: Option<String>,
    user_id: Option<UserId>,
    ancestors: Option<Vec<ThreadId>>,
    state: u8,
    subscription: bool,
    next_event: i64,
    refusal_reported: bool,
    restarts: u32,
    cancelled: bool,
    refused_since: Option<i64>,
    cursor: Option<String>,
    accepted_at: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    traceparent: Option<String>,
    messages: Vec<MovedMessage>,
}

#[derive(Serialize, Deserialize)]
struct MovedMessage {
    kind: u8,
    view: Option<String>,
    body: String,
    created_at: i64,
}

fn callback_url<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<CallbackUrl, D::Error> {
    CallbackUrl::new(String::deserialize(from)?).map_err(D::Error::custom)
}

impl MovedCall {
    /// Returns true if the call has no result yet. A confirmed subscription has one.
    pub(crate) fn is_running(&self) -> bool {
        self.state == State::Running as u8
    }

    /// Returns true if the call can be stored and run.
    pub(crate) fn is_valid(&self) -> bool {
        let is_object = |text: &String| serde_json::from_str::<Map<String, Value>>(text).is_ok();
        let is_json = |text: &String| serde_json::from_str::<Value>(text).is_ok();
        self.state <= State::Ending as u8
            && self.arguments.as_ref().is_none_or(is_object)
            && self.cursor.as_ref().is_none_or(is_json)
            && self
                .messages
                .iter()
                .all(|one| one.kind <= MessageKind::UserMessage as u8 && is_json(&one.body))
    }
}

/// Some calls of a session.
pub(crate) struct MovedPage {
    pub(crate) calls: Vec<MovedCall>,
    /// The call after which the next page begins. `None` after the last page.
    pub(crate) next: Option<CallSeq>,
    /// A call that is larger than [`CALL_BYTES`].
    pub(crate) too_large: Option<CallId>,
}

/// A call whose handler has not returned.
pub(crate) struct RunningCall {
    pub(crate) seq: CallSeq,
    pub(crate) id: CallId,
    pub(crate) operation: String,
}

/// Some running calls of a session.
pub(crate) struct RunningPage {
    pub(crate) calls: Vec<RunningCall>,
    /// The call after which the next page begins. `None` after the last page.
    pub(crate) next: Option<CallSeq>,
}

/// Condition for calls of the caller `?3` after `?1` and up to `?2` in the session `?4`.
const IN_SESSION: &str = "seq > ?1 AND seq <= ?2 AND caller = ?3
    AND (thread = ?4 OR EXISTS (SELECT 1 FROM json_each(ancestors) WHERE value = ?4))";

/// Returns the last call of the window after a call, and the call after which the next window begins.
fn window(db: &Connection, after: CallSeq) -> Result<(CallSeq, Option<CallSeq>)> {
    let last: CallSeq = db.query_row("SELECT coalesce(max(seq), 0) FROM calls", [], |row| row.get(0))?;
    let end = after.saturating_add(WINDOW);
    Ok((end, (end < last).then_some(end)))
}

/// Reads the next calls of a caller's session that have no result yet. Confirmed subscriptions have one.
pub(crate) fn running_calls(
    db: &Connection,
    caller: &Caller,
    session: &ThreadId,
    after: CallSeq,
) -> Result<RunningPage> {
    let (end, next) = window(db, after)?;
    let sql = format!("SELECT seq, call_id, operation FROM calls WHERE {IN_SESSION} AND state = 0");
    let calls = db
        .prepare_cached(&sql)?
        .query_map(params![after, end, caller.bytes(), session.as_str()], |row| {
            Ok(RunningCall { seq: row.get(0)?, id: id(row, 1)?, operation: row.get(2)? })
        })?
        .collect::<Result<_>>()?;
    Ok(RunningPage { calls, next })
}

impl Journal {
    /// Reads the next calls of a caller's session that are not settled.
    pub(crate) fn session_calls(
        &self,
        db: &Connection,
        caller: &Caller,
        session: &ThreadId,
        after: CallSeq,
    ) -> Result<MovedPage> {
        let (end, next) = window(db, after)?;
        let mut page = MovedPage { calls: Vec::new(), next, too_large: None };
        let mut statement = db.prepare_cached(&format!(
            "SELECT seq, call_id, coalesce(length(arguments), 0) + coalesce(length(cursor), 0)
                    + (SELECT coalesce(sum(length(body)), 0) FROM outbox WHERE call = calls.seq)
             FROM calls WHERE {IN_SESSION} AND state < 3 ORDER BY seq"
        ))?;
        let mut rows = statement.query(params![after, end, caller.bytes(), session.as_str()])?;
        let mut bytes = 0;
        while let Some(row) = rows.next()? {
            let (seq, size): (CallSeq, i64) = (row.get(0)?, row.get(2)?);
            if size > CALL_BYTES {
                page.too_large = Some(id(row, 1)?);
                return Ok(page);
            }
            page.calls.extend(self.moved_call(db, seq)?);
            bytes += size;
            if bytes >= PAGE_BYTES {
                page.next = Some(seq);
                break;
            }
        }
        Ok(page)
    }

    /// Reads a call that moves. `None` if its callback URL was encrypted with another key, so that nothing can be sent.
    fn moved_call(&self, db: &Connection, seq: CallSeq) -> Result<Option<MovedCall>> {
        let messages = db
            .prepare_cached(
                "SELECT kind, topic, body, created_at FROM outbox
                 WHERE call = ?1 AND (kind < 2 OR typeof(topic) = 'text') ORDER BY seq",
            )?
            .query_map([seq], |row| {
                let body = String::from_utf8(row.get(2)?).map_err(|error| super::broken(2, error))?;
                Ok(MovedMessage { kind: row.get(0)?, view: row.get(1)?, body, created_at: row.get(3)? })
            })?
            .collect::<Result<Vec<_>>>()?;
        db.prepare_cached(
            "SELECT key, thread, call_id, secondary_id, callback, operation, arguments, user_id, ancestors, state,
                    subscription, next_event, apologised, restarts, cancelled, refused_since, cursor, accepted_at,
                    traceparent
             FROM calls WHERE seq = ?1",
        )?
        .query_row([seq], |row| {
            let sealed: Vec<u8> = row.get::<_, Option<_>>(4)?.unwrap_or_default();
            let url = self.key.open(&sealed, &row.get::<_, [u8; 32]>(0)?).ok();
            let url = url.and_then(|plain| CallbackUrl::new(String::from_utf8(plain).ok()?).ok());
            url.map(|callback_url| read_call(row, callback_url, messages)).transpose()
        })
    }

    /// Deletes what has arrived of a session before.
    pub(crate) fn begin_arrival(&self, db: &Connection, caller: &Caller, session: &ThreadId) -> Result<()> {
        db.prepare_cached("DELETE FROM arrivals WHERE caller = ?1 AND session = ?2")?
            .execute(params![caller.bytes(), session.as_str()])?;
        Ok(())
    }

    /// Stores calls that have arrived.
    pub(crate) fn add_arrivals(
        &self,
        db: &Connection,
        (caller, session): (&Caller, &ThreadId),
        calls: &[MovedCall],
        now: Timestamp,
    ) -> Result<()> {
        let mut statement = db.prepare_cached(
            "INSERT INTO arrivals (caller, session, thread, record, at) VALUES (?1, ?2, ?3, ?4, ?5)",
        )?;
        for call in calls {
            let record = self.key.seal(super::to_json(call).as_bytes(), SEALED);
            let thread = call.thread.as_str();
            statement.execute(params![caller.bytes(), session.as_str(), thread, record, now.0])?;
        }
        Ok(())
    }

    /// Turns the next arrivals of a session into calls. Returns them, and true if there may be more.
    pub(crate) fn activate(
        &self,
        db: &Connection,
        caller: &Caller,
        session: &str,
    ) -> Result<(Vec<CallSeq>, bool)> {
        let records: Vec<Vec<u8>> = db
            .prepare_cached(
                "DELETE FROM arrivals WHERE seq IN
                   (SELECT seq FROM arrivals WHERE caller = ?1 AND session = ?2 ORDER BY seq LIMIT ?3)
                 RETURNING record",
            )?
            .query_map(params![caller.bytes(), session, ARRIVALS], |row| row.get(0))?
            .collect::<Result<_>>()?;
        let mut calls = Vec::new();
        for record in &records {
            // It was encrypted with another key of this server: nothing of it can be read.
            let Ok(plain) = self.key.open(record, SEALED) else { continue };
            let call = serde_json::from_slice(&plain).map_err(|error| super::broken(0, error))?;
            calls.extend(self.insert_arrival(db, caller, call)?);
        }
        calls.sort_unstable();
        Ok((calls, records.len() == ARRIVALS as usize))
    }

    /// Makes a thread known whose files have arrived, so that it can be closed and expires: a thread exists if it has calls.
    pub(crate) fn insert_thread(
        &self,
        db: &Connection,
        caller: &Caller,
        thread: &ThreadId,
        now: Timestamp,
    ) -> Result<()> {
        let url = CallbackUrl::new("http://localhost/").expect("bug: a valid URL");
        let address = Address {
            id: CallId::new(format!("moved-{}", now.0)).expect("bug: a valid id"),
            call_id: None,
            callback_url: url,
            group_id: thread.clone(),
        };
        let new = NewCall {
            identity: self.identity(caller, &address),
            caller: caller.clone(),
            operation: String::new(),
            arguments: String::new(),
            sealed_url: Vec::new(),
            origin: 0,
            ancestors: None,
            user_id: None,
            trace: None,
            address,
        };
        if let Some(seq) = self.insert(db, &new, now)? {
            let sql = "UPDATE calls SET state = 3, settled_at = ?2, arguments = NULL, callback = NULL WHERE seq = ?1";
            db.prepare_cached(sql)?.execute(params![seq, now.0])?;
        }
        Ok(())
    }

    /// Inserts a call that has arrived. `None` if the call is here already.
    fn insert_arrival(&self, db: &Connection, caller: &Caller, call: MovedCall) -> Result<Option<CallSeq>> {
        let counts =
            |kind: MessageKind| call.messages.iter().filter(|message| message.kind == kind as u8).count();
        let (results, events, views) =
            (counts(MessageKind::Result), counts(MessageKind::Event), counts(MessageKind::UserMessage));
        if call.state >= State::Ending as u8 && call.messages.is_empty() {
            return Ok(None);
        }
        let address = Address {
            id: call.id,
            call_id: call.call_id,
            callback_url: call.callback_url,
            group_id: call.thread,
        };
        let identity = self.identity(caller, &address);
        let new = NewCall {
            identity,
            caller: caller.clone(),
            operation: call.operation,
            arguments: call.arguments.unwrap_or_else(|| "{}".into()),
            sealed_url: self.key.seal(address.callback_url.expose().as_bytes(), &identity),
            origin: self.origin(&address.callback_url.to_url()),
            ancestors: call.ancestors.as_ref().map(super::to_json),
            user_id: call.user_id,
            trace: call.traceparent.as_deref().and_then(TraceContext::parse),
            address,
        };
        let Some(seq) = self.insert(db, &new, Timestamp(call.accepted_at))? else { return Ok(None) };
        let deliver_at = (!call.messages.is_empty()).then_some(outbox::AT_ONCE.0);
        db.prepare_cached(
            "UPDATE calls SET state = ?2, subscription = ?3, next_event = ?4, apologised = ?5, restarts = ?6,
                              cancelled = ?7, refused_since = ?8, cursor = ?9, result_waits = ?10, events_wait = ?11,
                              asides_wait = ?12, deliver_at = ?13
             WHERE seq = ?1",
        )?
        .execute(params![
            seq,
            call.state,
            call.subscription,
            call.next_event,
            call.refusal_reported,
            call.restarts,
            call.cancelled,
            call.refused_since,
            call.cursor,
            results > 0,
            events as i64,
            views as i64,
            deliver_at,
        ])?;
        let mut insert = db.prepare_cached(
            "INSERT INTO outbox (call, kind, topic, body, created_at) VALUES (?1, ?2, ?3, ?4, ?5)",
        )?;
        for MovedMessage { kind, view, body, created_at } in call.messages {
            insert.execute(params![seq, kind, view, body.into_bytes(), created_at])?;
        }
        Ok(Some(seq))
    }
}

fn read_call(row: &Row<'_>, callback_url: CallbackUrl, messages: Vec<MovedMessage>) -> Result<MovedCall> {
    Ok(MovedCall {
        thread: id(row, 1)?,
        id: id(row, 2)?,
        callback_url,
        call_id: optional_id(row, 3)?,
        operation: row.get(5)?,
        arguments: row.get(6)?,
        user_id: optional_id(row, 7)?,
        ancestors: json(row, 8)?,
        state: row.get(9)?,
        subscription: row.get(10)?,
        next_event: row.get(11)?,
        refusal_reported: row.get(12)?,
        restarts: row.get(13)?,
        cancelled: row.get(14)?,
        refused_since: row.get(15)?,
        cursor: row.get(16)?,
        accepted_at: row.get(17)?,
        traceparent: row.get(18)?,
        messages,
    })
}

/// Returns the session of a thread with arrivals.
pub(crate) fn arrived_session(db: &Connection, caller: &Caller, thread: &ThreadId) -> Result<Option<String>> {
    db.prepare_cached("SELECT session FROM arrivals WHERE caller = ?1 AND thread = ?2 LIMIT 1")?
        .query_row(params![caller.bytes(), thread.as_str()], |row| row.get(0))
        .optional()
}

/// Deletes the arrivals of a thread that is closed before it came into use.
pub(crate) fn discard_thread(db: &Connection, caller: &Caller, thread: &ThreadId) -> Result<()> {
    db.prepare_cached("DELETE FROM arrivals WHERE caller = ?1 AND thread = ?2")?
        .execute(params![caller.bytes(), thread.as_str()])?;
    Ok(())
}

/// Deletes at most `limit` arrivals from before `before`. Returns how many.
pub(crate) fn delete_old(db: &Connection, before: Timestamp, limit: u32) -> Result<usize> {
    db.prepare_cached("DELETE FROM arrivals WHERE seq IN (SELECT seq FROM arrivals WHERE at < ?1 LIMIT ?2)")?
        .execute(params![before.0, limit])
}
