//! The outbox: messages that are not delivered yet, in order for each call.

use rap_protocol::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};

use super::message::{self, Topic};
use super::{CallSeq, OutboxMessage, Result, questions};
use crate::rules::{Aside, Input, MessageKind};

/// Returns the first message of a call.
pub(crate) fn first(db: &Connection, call: CallSeq) -> Result<Option<OutboxMessage>> {
    db.prepare_cached(
        "SELECT outbox.seq, call, kind, body, attempts, created_at, origin, callback, key
         FROM outbox JOIN calls ON calls.seq = call WHERE call = ?1 ORDER BY outbox.seq LIMIT 1",
    )?
    .query_row([call], |row| {
        Ok(OutboxMessage {
            seq: row.get(0)?,
            call: row.get(1)?,
            kind: match row.get(2)? {
                0u8 => MessageKind::Result,
                1 => MessageKind::Event,
                _ => MessageKind::Aside,
            },
            body: row.get(3)?,
            attempts: row.get(4)?,
            created_at: Timestamp(row.get(5)?),
            origin: row.get(6)?,
            callback: row.get::<_, Option<Vec<u8>>>(7)?.unwrap_or_default(),
            identity: row.get(8)?,
        })
    })
    .optional()
}

/// Removes a message whose delivery has ended with `input`. Returns false if it was already gone.
pub(super) fn remove(db: &Connection, message: i64, input: &Input) -> Result<bool> {
    let topic: Option<Option<Topic>> = db
        .prepare_cached("DELETE FROM outbox WHERE seq = ?1 RETURNING topic")?
        .query_row([message], |row| row.get(0))
        .optional()?;
    if let (Some(Some(Topic::Question(name))), Input::Refused(..) | Input::GaveUp(_)) = (&topic, input) {
        questions::refuse(db, name)?;
    }
    Ok(topic.is_some())
}

/// Returns true if a message is still in the outbox.
pub(crate) fn exists(db: &Connection, message: i64) -> Result<bool> {
    db.prepare_cached("SELECT 1 FROM outbox WHERE seq = ?1")?.exists([message])
}

/// Records a failed attempt and the time of the next one. Does nothing if the message is gone.
pub(crate) fn postpone(
    db: &Connection,
    message: i64,
    call: CallSeq,
    attempts: u32,
    at: Timestamp,
) -> Result<()> {
    let still_there = db
        .prepare_cached("UPDATE outbox SET attempts = ?2 WHERE seq = ?1")?
        .execute(params![message, attempts])?;
    if still_there > 0 {
        db.prepare_cached("UPDATE calls SET deliver_at = ?2 WHERE seq = ?1")?.execute(params![call, at.0])?;
    }
    Ok(())
}

/// Calls with due messages, each with its host, and when the next message becomes due.
pub(crate) struct Due {
    pub(crate) calls: Vec<(CallSeq, i64)>,
    pub(crate) next: Option<Timestamp>,
}

/// Finds the calls whose first message is due, in order of their due time. Skips `busy` hosts, and returns at most
/// `limit_per_host` calls for each other host. Reads host by host, so that a long queue for one host does not slow
/// down the others.
pub(crate) fn due(db: &Connection, now: Timestamp, busy: &[i64], limit_per_host: u32) -> Result<Due> {
    let mut waiting: Vec<(i64, CallSeq, i64)> = Vec::new();
    let mut next = None;
    let mut from = Some(i64::MIN);
    while let Some(host) = from.map(|from| host_from(db, from)).transpose()?.flatten() {
        let later = db
            .prepare_cached("SELECT min(deliver_at) FROM calls WHERE origin = ?1 AND deliver_at > ?2")?
            .query_row([host, now.0], |row| row.get::<_, Option<i64>>(0))?;
        next = [next, later].into_iter().flatten().min();
        if !busy.contains(&host) {
            let mut due = db.prepare_cached(
                "SELECT deliver_at, seq FROM calls WHERE origin = ?1 AND deliver_at <= ?2
                 ORDER BY deliver_at LIMIT ?3",
            )?;
            for call in
                due.query_map(params![host, now.0, limit_per_host], |row| Ok((row.get(0)?, row.get(1)?)))?
            {
                let (at, seq) = call?;
                waiting.push((at, seq, host));
            }
        }
        from = host.checked_add(1);
    }
    waiting.sort_unstable();
    let calls = waiting.into_iter().map(|(_, seq, host)| (seq, host)).collect();
    Ok(Due { calls, next: next.map(Timestamp) })
}

/// Deletes the unsent content of the view that an aside replaces. Returns the number of deleted messages.
pub(super) fn delete_view(db: &Connection, call: CallSeq, aside: &Aside) -> Result<u32> {
    let view @ Topic::View(_) = message::topic(aside) else { return Ok(0) };
    let dropped = db
        .prepare_cached("DELETE FROM outbox WHERE call = ?1 AND kind = 2 AND topic = ?2")?
        .execute(params![call, view])?;
    Ok(u32::try_from(dropped).unwrap_or(u32::MAX))
}

/// Figures for the metrics.
pub(crate) struct OutboxStats {
    /// When the oldest message was added.
    pub(crate) oldest: Option<Timestamp>,
    /// Number of calls with a message that waits for a retry.
    pub(crate) retrying: f64,
}

pub(crate) fn stats(db: &Connection, now: Timestamp) -> Result<OutboxStats> {
    let oldest: Option<i64> = db
        .prepare_cached("SELECT created_at FROM outbox ORDER BY seq LIMIT 1")?
        .query_row([], |row| row.get(0))
        .optional()?;
    let retrying: u32 = db
        .prepare_cached("SELECT count(*) FROM calls WHERE deliver_at > ?1")?
        .query_row([now.0], |row| row.get(0))?;
    Ok(OutboxStats { oldest: oldest.map(Timestamp), retrying: retrying.into() })
}

/// Returns the first host, from `from` on, that has messages.
fn host_from(db: &Connection, from: i64) -> Result<Option<i64>> {
    db.prepare_cached("SELECT min(origin) FROM calls WHERE origin >= ?1 AND deliver_at IS NOT NULL")?
        .query_row([from], |row| row.get(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::MIGRATIONS;

    /// A journal in which calls 1, 2, … have messages for these hosts, due at these times.
    fn journal(waiting: &[(i64, Option<i64>)]) -> Connection {
        let db = Connection::open_in_memory().unwrap();
        rap_io::sqlite::migrate(&db, MIGRATIONS).unwrap();
        for (number, (host, at)) in waiting.iter().enumerate() {
            db.execute(
                "INSERT INTO calls (key, caller, thread, call_id, operation, origin, state, deliver_at, accepted_at)
                 VALUES (?1, x'00', 't', 'c', 'o', ?2, 2, ?3, 0)",
                params![[u8::try_from(number).unwrap(); 32], host, at],
            )
            .unwrap();
        }
        db
    }

    #[test]
    fn due_messages_are_found_per_host_in_order_of_due_time() {
        let (a, b, c) = (i64::MIN, -1, i64::MAX);
        let waiting = [
            (a, Some(10)),
            (a, Some(11)),
            (a, Some(12)),
            (b, Some(5)),
            (c, Some(99)),
            (c, Some(20)),
            (b, None),
        ];
        let db = journal(&waiting);
        let check = |now: i64, busy: &[i64], limit_per_host: u32, calls: &[CallSeq], next: Option<i64>| {
            let due = due(&db, Timestamp(now), busy, limit_per_host).unwrap();
            let found: Vec<CallSeq> = due.calls.iter().map(|(call, _)| *call).collect();
            assert_eq!(
                (&found[..], due.next.map(|at| at.0)),
                (calls, next),
                "{now} {busy:?} {limit_per_host}"
            );
        };
        check(50, &[], 10, &[4, 1, 2, 3, 6], Some(99));
        check(50, &[], 2, &[4, 1, 2, 6], Some(99));
        check(50, &[a], 10, &[4, 6], Some(99));
        check(50, &[a, b, c], 10, &[], Some(99));
        check(10, &[], 10, &[4, 1], Some(11));
        check(100, &[b], 1, &[1, 6], None);
    }
}
