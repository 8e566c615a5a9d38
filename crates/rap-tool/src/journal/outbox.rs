//! The outbox: messages that are not delivered yet, in order for each call.

use std::collections::{HashMap, HashSet};

use rap_protocol::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};

use super::message::{self, Topic};
use super::{CallSeq, OutboxMessage, Result, questions};
use crate::auth::Caller;
use crate::rules::{Input, MessageKind, UserMessage};

/// Value of `calls.deliver_at` if the first message of the call may be sent at once.
pub(super) const AT_ONCE: Timestamp = Timestamp(0);

/// Maximum number of calls that the metrics count.
const COUNTED: u32 = 100_000;

/// Returns the first message of a call.
pub(crate) fn first(db: &Connection, call: CallSeq) -> Result<Option<OutboxMessage>> {
    db.prepare_cached(
        "SELECT outbox.seq, call, kind, body, attempts, created_at, origin, callback, key, caller, traceparent
         FROM outbox JOIN calls ON calls.seq = call WHERE call = ?1 ORDER BY outbox.seq LIMIT 1",
    )?
    .query_row([call], |row| {
        Ok(OutboxMessage {
            seq: row.get(0)?,
            call: row.get(1)?,
            kind: match row.get(2)? {
                0u8 => MessageKind::Result,
                1 => MessageKind::Event,
                _ => MessageKind::UserMessage,
            },
            body: row.get(3)?,
            attempts: row.get(4)?,
            created_at: Timestamp(row.get(5)?),
            caller: Caller::from_bytes(row.get(9)?),
            origin: row.get(6)?,
            callback: row.get::<_, Option<Vec<u8>>>(7)?.unwrap_or_default(),
            identity: row.get(8)?,
            trace: super::trace(row, 10)?,
        })
    })
    .optional()
}

/// Returns the first messages of these calls, until they have `max_bytes`, and at least one.
pub(crate) fn firsts(
    db: &Connection,
    calls: &[CallSeq],
    max_bytes: usize,
) -> Result<HashMap<CallSeq, OutboxMessage>> {
    let (mut found, mut bytes) = (HashMap::new(), 0);
    for call in calls {
        if let Some(message) = first(db, *call)? {
            bytes += message.body.len();
            found.insert(*call, message);
        }
        if bytes >= max_bytes {
            break;
        }
    }
    Ok(found)
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

/// A failed attempt to send a message, and the time of the next one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Retry {
    pub(crate) message: i64,
    pub(crate) call: CallSeq,
    pub(crate) attempts: u32,
    pub(crate) at: Timestamp,
}

/// Records failed attempts. Does nothing for messages that are gone.
pub(crate) fn postpone(db: &Connection, retries: &[Retry]) -> Result<()> {
    for retry in retries {
        let still_there = db
            .prepare_cached("UPDATE outbox SET attempts = ?2 WHERE seq = ?1")?
            .execute(params![retry.message, retry.attempts])?;
        if still_there > 0 {
            // A time of 0 would have another meaning.
            db.prepare_cached("UPDATE calls SET deliver_at = ?2 WHERE seq = ?1")?
                .execute(params![retry.call, retry.at.0.max(1)])?;
        }
    }
    Ok(())
}

/// Makes the messages whose retry time has come ready to be sent, at most `limit` of each caller. Returns when the next
/// message becomes due, which is `now` if there are more.
pub(crate) fn release_due(db: &Connection, now: Timestamp, limit: u32) -> Result<Option<Timestamp>> {
    let mut next = None;
    let mut caller = Vec::new();
    while let Some(following) = db
        .prepare_cached(
            "SELECT min(caller) FROM calls INDEXED BY calls_retrying WHERE deliver_at > 0 AND caller > ?1",
        )?
        .query_row([&caller], |row| row.get::<_, Option<Vec<u8>>>(0))?
    {
        caller = following;
        let released = db
            .prepare_cached(
                "UPDATE calls SET deliver_at = 0 WHERE seq IN
                   (SELECT seq FROM calls INDEXED BY calls_retrying
                    WHERE deliver_at > 0 AND caller = ?1 AND deliver_at <= ?2 ORDER BY deliver_at LIMIT ?3)",
            )?
            .execute(params![caller, now.0, limit])?;
        let later: Option<i64> = match released == limit as usize {
            true => Some(now.0),
            false => db
                .prepare_cached(
                    "SELECT min(deliver_at) FROM calls INDEXED BY calls_retrying
                     WHERE deliver_at > 0 AND caller = ?1",
                )?
                .query_row([&caller], |row| row.get(0))?,
        };
        next = [next, later].into_iter().flatten().min();
    }
    Ok(next.map(Timestamp))
}

/// Last host of the last page of each caller. The next page begins after it.
pub(crate) type FairOrder = HashMap<Caller, i64>;

/// Calls with a message in progress.
#[derive(Debug, Default)]
pub(crate) struct InProgress {
    pub(crate) calls: HashSet<CallSeq>,
    /// Callers for which no slot is free.
    pub(crate) full_callers: HashSet<Caller>,
    /// Number of calls that a caller is sending to a host, and whether a slot of the host is free for it.
    pub(crate) hosts: HashMap<(Caller, i64), HostUse>,
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct HostUse {
    pub(crate) active: u32,
    pub(crate) is_full: bool,
}

/// Limits of one page of calls with messages that may be sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageLimits {
    /// Number of calls of one caller.
    pub(crate) per_caller: u32,
    /// Number of calls of one caller to one host.
    pub(crate) per_host: u32,
}

/// Calls of one caller with a message that may be sent, each with its host.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ReadyPage {
    pub(crate) caller: Caller,
    pub(crate) calls: Vec<(CallSeq, i64)>,
    /// The last host that was looked at, if there may be more.
    pub(crate) more_after: Option<i64>,
}

/// Returns a page of calls for each caller. The hosts of a caller take turns: a page begins after the host at which the
/// last one ended.
pub(crate) fn ready(
    db: &Connection,
    turns: &FairOrder,
    in_progress: &InProgress,
    limits: PageLimits,
) -> Result<Vec<ReadyPage>> {
    let mut pages = Vec::new();
    let mut after = Vec::new();
    while let Some(caller) = db
        .prepare_cached(
            "SELECT min(caller) FROM calls INDEXED BY calls_ready WHERE deliver_at = 0 AND caller > ?1",
        )?
        .query_row([&after], |row| row.get::<_, Option<[u8; 16]>>(0))?
    {
        after = caller.to_vec();
        let caller = Caller::from_bytes(caller);
        if !in_progress.full_callers.contains(&caller) {
            let first = turns.get(&caller).and_then(|last| last.checked_add(1)).unwrap_or(i64::MIN);
            pages.push(ready_of(db, caller, first, in_progress, limits)?);
        }
    }
    Ok(pages)
}

/// Returns a page of one caller's calls. Begins with the host `first` and continues with the lowest one after the highest.
/// A host without a call for the page is one that something is being sent to, so their number is bounded.
fn ready_of(
    db: &Connection,
    caller: Caller,
    first: i64,
    in_progress: &InProgress,
    limits: PageLimits,
) -> Result<ReadyPage> {
    let mut calls = Vec::new();
    let (mut from, mut wrapped) = (Some(first), false);
    loop {
        let host = from.map(|from| host_from(db, &caller, from)).transpose()?.flatten();
        let Some(host) = host.filter(|host| !wrapped || *host < first) else {
            if wrapped || first == i64::MIN {
                return Ok(ReadyPage { caller, calls, more_after: None });
            }
            (from, wrapped) = (Some(i64::MIN), true);
            continue;
        };
        let in_use = in_progress.hosts.get(&(caller.clone(), host)).copied().unwrap_or_default();
        if !in_use.is_full {
            let mut statement = db.prepare_cached(
                "SELECT seq FROM calls INDEXED BY calls_ready
                 WHERE deliver_at = 0 AND caller = ?1 AND origin = ?2 ORDER BY seq LIMIT ?3",
            )?;
            let limit = limits.per_host + in_use.active;
            for seq in statement.query_map(params![caller.bytes(), host, limit], |row| row.get(0))? {
                let seq = seq?;
                if !in_progress.calls.contains(&seq) {
                    calls.push((seq, host));
                }
            }
        }
        if calls.len() >= limits.per_caller as usize {
            return Ok(ReadyPage { caller, calls, more_after: Some(host) });
        }
        from = host.checked_add(1);
    }
}

/// Deletes the unsent content of the view that a message replaces. Returns the number of deleted messages.
pub(super) fn delete_view(db: &Connection, call: CallSeq, message: &UserMessage) -> Result<u32> {
    let view @ Topic::View(_) = message::topic(message) else { return Ok(0) };
    let dropped = db
        .prepare_cached("DELETE FROM outbox WHERE call = ?1 AND kind = 2 AND topic = ?2")?
        .execute(params![call, view])?;
    Ok(u32::try_from(dropped).unwrap_or(u32::MAX))
}

/// Figures for the metrics.
pub(crate) struct OutboxStats {
    /// Time at which the oldest message was added.
    pub(crate) oldest: Option<Timestamp>,
    /// Number of calls with a message that waits for a retry, at most [`COUNTED`].
    pub(crate) retrying: f64,
}

pub(crate) fn stats(db: &Connection) -> Result<OutboxStats> {
    let oldest: Option<i64> = db
        .prepare_cached("SELECT created_at FROM outbox ORDER BY seq LIMIT 1")?
        .query_row([], |row| row.get(0))
        .optional()?;
    let retrying: u32 = db
        .prepare_cached("SELECT count(*) FROM (SELECT 1 FROM calls WHERE deliver_at > 0 LIMIT ?1)")?
        .query_row([COUNTED], |row| row.get(0))?;
    Ok(OutboxStats { oldest: oldest.map(Timestamp), retrying: retrying.into() })
}

/// Returns the first host, from `from` on, to which messages of a caller may be sent.
fn host_from(db: &Connection, caller: &Caller, from: i64) -> Result<Option<i64>> {
    db.prepare_cached(
        "SELECT min(origin) FROM calls INDEXED BY calls_ready
         WHERE deliver_at = 0 AND caller = ?1 AND origin >= ?2",
    )?
    .query_row(params![caller.bytes(), from], |row| row.get(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::MIGRATIONS;

    const LIMITS: PageLimits = PageLimits { per_caller: 4, per_host: 2 };

    fn caller(number: u8) -> Caller {
        Caller::from_bytes([number; 16])
    }

    /// A journal in which calls 1, 2, … of these callers have messages for these hosts, with these times.
    fn journal(waiting: &[(u8, i64, Option<i64>)]) -> Connection {
        let db = Connection::open_in_memory().unwrap();
        rap_io::sqlite::migrate(&db, MIGRATIONS).unwrap();
        for (number, (of, host, at)) in waiting.iter().enumerate() {
            db.execute(
                "INSERT INTO calls (key, caller, thread, call_id, operation, origin, state, deliver_at, accepted_at)
                 VALUES (?1, ?2, 't', 'c', 'o', ?3, 2, ?4, 0)",
                params![[u8::try_from(number).unwrap(); 32], caller(*of).bytes(), host, at],
            )
            .unwrap();
        }
        db
    }

    /// Returns the calls on the next page of each caller, and moves the turns on.
    fn next_pages(db: &Connection, turns: &mut FairOrder, in_progress: &InProgress) -> Vec<Vec<CallSeq>> {
        let pages = ready(db, turns, in_progress, LIMITS).unwrap();
        let calls = pages.iter().map(|page| page.calls.iter().map(|(call, _)| *call).collect()).collect();
        for ReadyPage { caller, more_after, .. } in pages {
            match more_after {
                Some(host) => turns.insert(caller, host),
                None => turns.remove(&caller),
            };
        }
        calls
    }

    #[test]
    fn each_caller_has_a_page_of_its_own() {
        let db = journal(&[(1, 1, Some(0)), (2, 1, Some(0)), (1, 2, Some(0)), (3, 1, Some(9)), (4, 1, None)]);
        assert_eq!(next_pages(&db, &mut FairOrder::new(), &InProgress::default()), [vec![1, 3], vec![2]]);
        let full = InProgress { full_callers: HashSet::from([caller(1)]), ..InProgress::default() };
        assert_eq!(next_pages(&db, &mut FairOrder::new(), &full), [vec![2]]);
    }

    #[test]
    fn the_hosts_of_a_caller_take_turns() {
        let (a, b, c, d) = (i64::MIN, -1, 7, i64::MAX);
        let hosts = [a, a, a, b, c, c, c, d];
        let db = journal(&hosts.map(|host| (1, host, Some(0))));
        let (mut turns, nothing) = (FairOrder::new(), InProgress::default());
        assert_eq!(next_pages(&db, &mut turns, &nothing), [[1, 2, 4, 5, 6]]);
        assert_eq!(next_pages(&db, &mut turns, &nothing), [[8, 1, 2, 4]]);
        assert_eq!(next_pages(&db, &mut turns, &nothing), [[5, 6, 8, 1, 2]]);
    }

    #[test]
    fn calls_in_progress_and_full_hosts_are_passed_over() {
        let db = journal(&[1, 1, 1, 1, 2, 2, 3].map(|host| (1, host, Some(0))));
        let hosts = HashMap::from([
            ((caller(1), 1), HostUse { active: 1, is_full: false }),
            ((caller(1), 2), HostUse { active: 1, is_full: true }),
            ((caller(2), 3), HostUse { active: 1, is_full: true }),
        ]);
        let in_progress = InProgress { calls: HashSet::from([1, 5]), hosts, ..InProgress::default() };
        assert_eq!(next_pages(&db, &mut FairOrder::new(), &in_progress), [[2, 3, 7]]);
    }

    #[test]
    fn full_hosts_do_not_fill_a_page() {
        let db = journal(&[1, 2, 3, 4, 5].map(|host| (1, host, Some(0))));
        let full = |host| ((caller(1), host), HostUse { active: 1, is_full: true });
        let in_progress =
            InProgress { hosts: HashMap::from([1, 2, 3, 4].map(full)), ..InProgress::default() };
        assert_eq!(next_pages(&db, &mut FairOrder::new(), &in_progress), [[5]]);
    }

    #[test]
    fn retries_become_ready_at_their_time_a_few_of_each_caller_at_once() {
        let db =
            journal(&[(1, 1, Some(5)), (1, 2, Some(4)), (1, 3, Some(3)), (2, 1, Some(6)), (2, 2, Some(99))]);
        let ready = |db: &Connection| {
            let sql = "SELECT seq FROM calls WHERE deliver_at = 0 ORDER BY seq";
            let mut statement = db.prepare(sql).unwrap();
            statement.query_map([], |row| row.get(0)).unwrap().collect::<Result<Vec<CallSeq>>>().unwrap()
        };
        assert_eq!(release_due(&db, Timestamp(2), 2).unwrap(), Some(Timestamp(3)));
        assert!(ready(&db).is_empty());
        assert_eq!(release_due(&db, Timestamp(6), 2).unwrap(), Some(Timestamp(6)));
        assert_eq!(ready(&db), [2, 3, 4]);
        assert_eq!(release_due(&db, Timestamp(6), 2).unwrap(), Some(Timestamp(99)));
        assert_eq!(ready(&db), [1, 2, 3, 4]);
        assert_eq!(release_due(&db, Timestamp(100), 2).unwrap(), None);
    }

    /// Times are compared within one run, so that they mean the same on any machine.
    #[test]
    fn hundreds_of_thousands_of_dead_hosts_do_not_slow_the_writer() {
        let time_for = |hosts: i64| {
            let db = journal(&[(2, 1, Some(0)), (2, 2, Some(9))]);
            for deliver_at in [0, 5_000_000] {
                db.execute(
                    "INSERT INTO calls (key, caller, thread, call_id, operation, origin, state, deliver_at, accepted_at)
                     WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < ?2)
                     SELECT randomblob(32), ?1, 't', 'c', 'o', i * 1000003, 2, ?3 + (?3 > 0) * i, 0 FROM n",
                    params![caller(1).bytes(), hosts, deliver_at],
                )
                .unwrap();
            }
            let mut turns = FairOrder::new();
            let mut times: Vec<_> = (0..50)
                .map(|_| {
                    let began = std::time::Instant::now();
                    assert_eq!(next_pages(&db, &mut turns, &InProgress::default())[1], [1]);
                    release_due(&db, Timestamp(1), 100).unwrap();
                    stats(&db).unwrap();
                    began.elapsed()
                })
                .collect();
            times.sort_unstable();
            times[times.len() / 2]
        };
        let (few, many) = (time_for(2_000), time_for(200_000));
        assert!(many < 20 * few + std::time::Duration::from_millis(20), "{many:?} instead of {few:?}");
    }

    #[test]
    fn a_journal_of_the_first_version_keeps_its_retries() {
        let db = Connection::open_in_memory().unwrap();
        rap_io::sqlite::migrate(&db, &MIGRATIONS[..1]).unwrap();
        db.execute(
            "INSERT INTO calls (key, caller, thread, call_id, operation, origin, state, deliver_at, accepted_at)
             VALUES (x'00', ?1, 't', 'c', 'o', 1, 2, 5, 0)",
            [caller(1).bytes()],
        )
        .unwrap();
        rap_io::sqlite::migrate(&db, MIGRATIONS).unwrap();
        assert_eq!(release_due(&db, Timestamp(9), 2).unwrap(), None);
        assert_eq!(next_pages(&db, &mut FairOrder::new(), &InProgress::default()), [[1]]);
    }
}
