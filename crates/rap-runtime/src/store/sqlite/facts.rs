//! Loads and stores the facts that steps need.

use rap_agent::{CallState, Entry, Facts, FactsNeeded, PastCall, Seq, Server, Spending};
use rap_protocol::{CallId, EventId, ThreadId, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde_json::{Map, Value};

use super::heads::{thread_id, unreadable};
use super::writes::entry_key;
use crate::engine::built_in;
use crate::store::damage::Damage;
use crate::store::stored::{RESUMED, call_arguments, state_from_number, to_json};
use crate::store::{Error, IdempotencyKey, OutboxKey, Receipt, SessionKey, SharedFacts, Thread, ThreadKey};

pub(super) fn load(
    conn: &Connection,
    thread: &Thread,
    needs: &FactsNeeded,
    shared: &mut SharedFacts,
    now: Timestamp,
) -> rusqlite::Result<Facts> {
    let mut facts = Facts::of(thread.identity());
    if let Some(call) = &needs.call {
        facts.call = past_call(conn, thread.key, call)?;
    }
    if let Some((call, event)) = &needs.event {
        facts.event_is_known = is_marked(conn, thread.key, call, event)?;
    }
    if let Some((call, seq)) = &needs.arguments {
        facts.arguments = arguments_of(conn, thread.key, *seq, call)?;
    }
    if let Some((call, seq)) = &needs.schedule {
        facts.schedule = Some(built_in::occurrence(&arguments_of(conn, thread.key, *seq, call)?, now));
    }
    if needs.paused {
        facts.paused = paused(conn, thread)?;
    }
    if needs.spending {
        facts.spending = Some(spending(conn, thread.session, shared, now)?);
    }
    Ok(facts)
}

pub(super) fn past_call(
    conn: &Connection,
    thread: ThreadKey,
    call: &CallId,
) -> rusqlite::Result<Option<PastCall>> {
    let sql = "SELECT name, server, seq, state FROM calls WHERE thread = ?1 AND id = ?2";
    let past = |row: &Row<'_>| {
        Ok(PastCall {
            name: row.get(0)?,
            server: Server(row.get(1)?),
            seq: row.get::<_, i64>(2)?.unsigned_abs(),
            state: state(row.get(3)?)?,
        })
    };
    conn.prepare_cached(sql)?.query_row(params![thread, call.as_str()], past).optional()
}

fn state(number: i64) -> rusqlite::Result<CallState> {
    state_from_number(number).ok_or(rusqlite::Error::IntegralValueOutOfRange(3, number))
}

fn is_marked(conn: &Connection, thread: ThreadKey, call: &CallId, event: &EventId) -> rusqlite::Result<bool> {
    let sql = "SELECT 1 FROM seen WHERE thread = ?1 AND call = ?2 AND event = ?3";
    conn.prepare_cached(sql)?.exists(params![thread, call.as_str(), event.as_str()])
}

/// Loads the arguments of a call.
pub(super) fn arguments_of(
    conn: &Connection,
    thread: ThreadKey,
    seq: Seq,
    call: &CallId,
) -> rusqlite::Result<Map<String, Value>> {
    let mut statement = conn.prepare_cached("SELECT body FROM entries WHERE key = ?1")?;
    let arguments = |row: &Row<'_>| {
        let entry = Damage::check_entry(seq, row.get_ref(0)?.as_str()?).map_err(unreadable)?;
        Ok(call_arguments(entry, call))
    };
    let found = statement.query_row([entry_key(thread, seq)], arguments).optional()?;
    found.ok_or_else(|| unreadable(Damage::MissingEntry(seq)))
}

/// Returns the arguments of a call from the stored assistant entry that made it.
pub(super) fn arguments_in(entry: &str, call: &CallId) -> rusqlite::Result<Map<String, Value>> {
    let entry: Entry = serde_json::from_str(entry).map_err(unreadable)?;
    Ok(call_arguments(entry, call))
}

/// Returns the other paused threads of a session. Each of them decides when it is resumed whether the budget had paused
/// it.
fn paused(conn: &Connection, thread: &Thread) -> rusqlite::Result<Vec<ThreadId>> {
    let sql = "SELECT id FROM threads WHERE no = ?1 AND status = 'needs_you' AND no <> ?2 \
               UNION ALL SELECT id FROM threads WHERE root = ?1 AND parent IS NOT NULL \
               AND status = 'needs_you' AND no <> ?2 LIMIT ?3";
    let mut statement = conn.prepare_cached(sql)?;
    let row = params![thread.session, thread.key, RESUMED as i64];
    statement.query_map(row, |row| thread_id(row, 0))?.collect()
}

fn spending(
    conn: &Connection,
    session: SessionKey,
    shared: &mut SharedFacts,
    now: Timestamp,
) -> rusqlite::Result<Spending> {
    if let Some(spending) = shared.spending(session) {
        return Ok(spending);
    }
    let mut statement = conn.prepare_cached("SELECT body FROM spending WHERE root = ?1")?;
    let stored = |row: &Row<'_>| serde_json::from_str(row.get_ref(0)?.as_str()?).map_err(unreadable);
    let spending = statement.query_row([session], stored).optional()?.unwrap_or_else(|| Spending::new(now));
    shared.set_loaded_spending(session, spending);
    Ok(spending)
}

pub(super) fn save_shared(conn: &Connection, shared: &SharedFacts) -> rusqlite::Result<()> {
    for (session, spending) in shared.changed_spending() {
        let sql = "INSERT OR REPLACE INTO spending (root, body) VALUES (?1, ?2)";
        conn.prepare_cached(sql)?.execute(params![session, to_json(spending)])?;
    }
    Ok(())
}

/// Returns the reply to a request whose key was used before.
pub(super) fn repeated(
    conn: &Connection,
    key: &IdempotencyKey,
    shared: &SharedFacts,
) -> rusqlite::Result<Option<Result<Receipt, Error>>> {
    if let Some(repeated) = shared.repeated(key) {
        return Ok(Some(repeated));
    }
    let mut statement = conn.prepare_cached("SELECT thread, turn, request FROM repeats WHERE digest = ?1")?;
    let found = |row: &Row<'_>| {
        let receipt = Receipt { thread: thread_id(row, 0)?, turn: row.get::<_, i64>(1)?.unsigned_abs() };
        Ok(crate::store::apply::same_request(key, row.get_ref(2)?.as_blob()?, receipt))
    };
    for digest in [Some(&key.key), key.former_key.as_ref()].into_iter().flatten() {
        if let Some(repeated) = statement.query_row([digest.as_slice()], found).optional()? {
            return Ok(Some(repeated));
        }
    }
    Ok(None)
}

pub(super) fn save_idempotency_key(
    conn: &Connection,
    key: &IdempotencyKey,
    receipt: &Receipt,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let sql = "INSERT INTO repeats (digest, request, thread, turn, at) VALUES (?1, ?2, ?3, ?4, ?5)";
    let (thread, turn) = (receipt.thread.as_str(), receipt.turn.cast_signed());
    let row = params![key.key.as_slice(), key.request.as_slice(), thread, turn, now.0];
    conn.prepare_cached(sql)?.execute(row)?;
    Ok(())
}

/// Removes a message between threads from the outbox. Returns false if it was delivered before.
pub(super) fn take_message(conn: &Connection, key: OutboxKey) -> rusqlite::Result<bool> {
    Ok(conn.prepare_cached("DELETE FROM letters WHERE no = ?1")?.execute([key.0])? == 1)
}
