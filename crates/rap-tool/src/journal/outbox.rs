//! The outbox: messages on their way, in order for each call.

use rap_protocol::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};

use super::letter::{self, Topic};
use super::{Letter, Result, Seq, questions};
use crate::rules::{Aside, Input, Kind};

/// The message of this call that stands first.
pub(crate) fn first(db: &Connection, call: Seq) -> Result<Option<Letter>> {
    db.prepare_cached(
        "SELECT outbox.seq, call, kind, body, attempts, created_at, origin, callback, key
         FROM outbox JOIN calls ON calls.seq = call WHERE call = ?1 ORDER BY outbox.seq LIMIT 1",
    )?
    .query_row([call], |row| {
        Ok(Letter {
            seq: row.get(0)?,
            call: row.get(1)?,
            kind: match row.get(2)? {
                0u8 => Kind::Result,
                1 => Kind::Event,
                _ => Kind::Aside,
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

/// Takes a message out, since this became of it. Whether it was still there.
pub(super) fn take(db: &Connection, letter: i64, input: &Input) -> Result<bool> {
    let topic: Option<Option<Topic>> = db
        .prepare_cached("DELETE FROM outbox WHERE seq = ?1 RETURNING topic")?
        .query_row([letter], |row| row.get(0))
        .optional()?;
    if let (Some(Some(Topic::Question(name))), Input::Refused(..) | Input::GaveUp(_)) = (&topic, input) {
        questions::refuse(db, name)?;
    }
    Ok(topic.is_some())
}

/// Notes a failed attempt and when the next one is due. A message that is gone meanwhile stays gone.
pub(crate) fn postpone(db: &Connection, letter: i64, call: Seq, attempts: u32, at: Timestamp) -> Result<()> {
    let still_there = db
        .prepare_cached("UPDATE outbox SET attempts = ?2 WHERE seq = ?1")?
        .execute(params![letter, attempts])?;
    if still_there > 0 {
        db.prepare_cached("UPDATE calls SET deliver_at = ?2 WHERE seq = ?1")?.execute(params![call, at.0])?;
    }
    Ok(())
}

/// What is to be sent now, and when to look again.
pub(crate) struct Due {
    pub(crate) calls: Vec<(Seq, i64)>,
    pub(crate) next: Option<Timestamp>,
}

/// The calls whose first message is due, longest waiting first, but for those to `busy` origins.
pub(crate) fn due(db: &Connection, now: Timestamp, busy: &[i64], most: u32) -> Result<Due> {
    let busy = serde_json::json!(busy).to_string();
    let calls = db
        .prepare_cached(
            "SELECT seq, origin FROM calls
             WHERE deliver_at <= ?1 AND origin NOT IN (SELECT value FROM json_each(?2))
             ORDER BY deliver_at LIMIT ?3",
        )?
        .query_map(params![now.0, busy, most], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<_>>()?;
    let next: Option<i64> = db
        .prepare_cached("SELECT min(deliver_at) FROM calls WHERE deliver_at > ?1")?
        .query_row([now.0], |row| row.get(0))?;
    Ok(Due { calls, next: next.map(Timestamp) })
}

/// Drops what an aside takes the place of; how many.
pub(super) fn forget_view(db: &Connection, call: Seq, aside: &Aside) -> Result<u32> {
    let view @ Topic::View(_) = letter::topic(aside) else { return Ok(0) };
    let dropped = db
        .prepare_cached("DELETE FROM outbox WHERE call = ?1 AND kind = 2 AND topic = ?2")?
        .execute(params![call, view])?;
    Ok(u32::try_from(dropped).unwrap_or(u32::MAX))
}

/// What has not been delivered.
pub(crate) struct Waiting {
    /// Since when the oldest message has been under way.
    pub(crate) oldest: Option<Timestamp>,
    /// How many calls have a message that waits for another attempt.
    pub(crate) later: f64,
}

pub(crate) fn waiting(db: &Connection, now: Timestamp) -> Result<Waiting> {
    let oldest: Option<i64> = db
        .prepare_cached("SELECT created_at FROM outbox ORDER BY seq LIMIT 1")?
        .query_row([], |row| row.get(0))
        .optional()?;
    let later: u32 = db
        .prepare_cached("SELECT count(*) FROM calls WHERE deliver_at > ?1")?
        .query_row([now.0], |row| row.get(0))?;
    Ok(Waiting { oldest: oldest.map(Timestamp), later: later.into() })
}
