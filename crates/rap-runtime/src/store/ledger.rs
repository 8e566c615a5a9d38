//! The ledger of deliveries: what was refused, retried or given up, of what was sent and of what was received. What is
//! delivered at its first attempt leaves no line.
//!
//! It is for people: nothing is decided by it, and it is written a moment later than what it tells of. Whether a call
//! that was being retried has settled since is therefore read from the call. It holds no URL but a server's base.

use std::time::Duration;

use rap_protocol::retry::Next;
use rap_protocol::{CallId, ThreadId, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::rows::{id, unreadable};
use super::thread::ThreadNo;
use super::{Error, Store};

/// How many lines of each kind are kept, and for how long.
const LINES: usize = 10_000;
const KEPT_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// How much is kept of how an attempt ended, in characters.
const DETAIL_CHARS: usize = 500;

/// What is delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// To a tool server: a call.
    Invocation,
    /// To a tool server: a thread is closed, or a call cancelled. Tried once.
    Notification,
    /// To a tool: what a person chose.
    Answer,
    /// From a tool.
    Callback,
}

impl Kind {
    pub(crate) const ALL: [Kind; 4] = [Kind::Invocation, Kind::Notification, Kind::Answer, Kind::Callback];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Kind::Invocation => "invocation",
            Kind::Notification => "notification",
            Kind::Answer => "answer",
            Kind::Callback => "callback",
        }
    }
}

/// How it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fate {
    /// Not yet; it is tried again.
    Retrying,
    /// In the end.
    Delivered,
    /// The receiver does not want it.
    Refused,
    /// The receiver could not be reached for too long.
    GivenUp,
    /// Nobody needs it any more, or there was no room for it.
    Dropped,
}

impl Fate {
    /// After an attempt.
    pub(crate) fn of(next: Next) -> Fate {
        match next {
            Next::Done => Fate::Delivered,
            Next::Again { .. } => Fate::Retrying,
            Next::Refused { .. } => Fate::Refused,
            Next::GaveUp => Fate::GivenUp,
        }
    }

    pub(crate) const ALL: [Fate; 5] =
        [Fate::Retrying, Fate::Delivered, Fate::Refused, Fate::GivenUp, Fate::Dropped];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Fate::Retrying => "retrying",
            Fate::Delivered => "delivered",
            Fate::Refused => "refused",
            Fate::GivenUp => "given_up",
            Fate::Dropped => "dropped",
        }
    }
}

/// What is to be noted.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) kind: Kind,
    /// 0 where none is known.
    pub(crate) thread: ThreadNo,
    /// For the log; the number says it in the ledger.
    pub(crate) thread_id: Option<ThreadId>,
    pub(crate) call: Option<CallId>,
    pub(crate) server: Option<String>,
    /// The path of a notification, the number of a question, the code of a refusal.
    pub(crate) topic: String,
    pub(crate) outcome: Fate,
    pub(crate) attempts: u32,
    pub(crate) detail: String,
    pub(crate) at: Timestamp,
}

/// A line as it is listed.
pub(crate) struct DeliveryRow {
    pub(crate) no: i64,
    pub(crate) kind: Kind,
    pub(crate) thread: Option<ThreadId>,
    pub(crate) call: Option<String>,
    pub(crate) server: Option<String>,
    pub(crate) topic: String,
    pub(crate) outcome: Fate,
    pub(crate) attempts: u32,
    pub(crate) detail: String,
    pub(crate) first_at: Timestamp,
    pub(crate) last_at: Timestamp,
    /// When it is tried again.
    pub(crate) next_at: Option<Timestamp>,
}

/// Which lines to list, the newest first.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeliveryFilter {
    pub(crate) thread: Option<ThreadId>,
    pub(crate) outcome: Option<Fate>,
    /// Before this number.
    pub(crate) before: Option<i64>,
    pub(crate) limit: usize,
}

/// What became of the wish to deliver once more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Redelivery {
    /// It is due now.
    Due,
    NoSuchDelivery,
    /// Only invocations are ours to repeat.
    NotAnInvocation,
    AlreadyDelivered,
    CallSettled,
}

impl Store {
    /// Writes lines; gives their numbers.
    pub(crate) async fn note(&self, lines: Vec<Line>) -> Result<Vec<i64>, Error> {
        self.write(move |conn| {
            let numbers = lines.iter().map(|line| note(conn, line)).collect();
            let noted = |kind: &Kind| lines.iter().any(|line| line.kind == *kind);
            Kind::ALL.into_iter().filter(noted).try_for_each(|kind| prune(conn, kind, LINES))?;
            numbers
        })
        .await
    }

    pub(crate) async fn deliveries(&self, filter: DeliveryFilter) -> Result<Vec<DeliveryRow>, Error> {
        self.read(move |conn| {
            let sql = format!(
                "SELECT * FROM ({ROWS}) WHERE no < ?1 AND (?2 IS NULL OR outcome = ?2) \
                 AND (?3 IS NULL OR thread = ?3) ORDER BY no DESC LIMIT ?4"
            );
            let thread = filter.thread.as_ref().map(ThreadId::as_str);
            let before = filter.before.unwrap_or(i64::MAX);
            let wanted = params![before, filter.outcome.map(Fate::as_str), thread, filter.limit as i64];
            conn.prepare_cached(&sql)?.query_map(wanted, delivery)?.collect()
        })
        .await
    }

    pub(crate) async fn delivery(&self, no: i64) -> Result<Option<DeliveryRow>, Error> {
        self.read(move |conn| one(conn, no)).await
    }

    /// Makes an invocation due that waits to be tried again.
    pub(crate) async fn redeliver(&self, no: i64, now: Timestamp) -> Result<Redelivery, Error> {
        self.write(move |conn| {
            let mut found = conn.prepare_cached("SELECT thread, call, kind FROM deliveries WHERE no = ?1")?;
            let row = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?, kind(row, 2)?));
            let found: Option<(ThreadNo, String, Kind)> = found.query_row([no], row).optional()?;
            let Some((thread, call, kind)) = found else { return Ok(Redelivery::NoSuchDelivery) };
            if kind != Kind::Invocation {
                return Ok(Redelivery::NotAnInvocation);
            }
            let mut due = conn.prepare_cached(
                "UPDATE calls SET invoke_at = min(invoke_at, ?3) \
                 WHERE thread = ?1 AND id = ?2 AND state = 0 AND invoke_at IS NOT NULL",
            )?;
            if due.execute(params![thread, call, now.0])? == 1 {
                return Ok(Redelivery::Due);
            }
            let mut open =
                conn.prepare_cached("SELECT 1 FROM calls WHERE thread = ?1 AND id = ?2 AND state = 0")?;
            let open = open.exists(params![thread, call])?;
            Ok(if open { Redelivery::AlreadyDelivered } else { Redelivery::CallSettled })
        })
        .await
    }
}

/// The same delivery is the same line. Callbacks that are refused for the same reason are counted in one.
fn note(conn: &Connection, line: &Line) -> rusqlite::Result<i64> {
    let mut statement = conn.prepare_cached(
        "INSERT INTO deliveries (kind, thread, call, server, topic, outcome, attempts, detail, first_at, last_at) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?9) \
         ON CONFLICT (thread, call, kind, topic, server) DO UPDATE SET outcome = excluded.outcome, \
         detail = excluded.detail, last_at = excluded.last_at, attempts = excluded.attempts + \
         CASE kind WHEN 'callback' THEN attempts ELSE 0 END RETURNING no",
    )?;
    let detail: String = line.detail.chars().take(DETAIL_CHARS).collect();
    let row = params![
        line.kind.as_str(),
        line.thread,
        line.call.as_ref().map_or("", |call| call.as_str()),
        line.server.as_deref().unwrap_or(""),
        line.topic,
        line.outcome.as_str(),
        line.attempts,
        detail,
        line.at.0,
    ];
    statement.query_row(row, |row| row.get(0))
}

/// Removes what is beyond the bound, the oldest first.
fn prune(conn: &Connection, kind: Kind, lines: usize) -> rusqlite::Result<()> {
    let mut statement = conn.prepare_cached(
        "DELETE FROM deliveries WHERE no IN \
         (SELECT no FROM deliveries WHERE kind = ?1 ORDER BY last_at DESC LIMIT -1 OFFSET ?2)",
    )?;
    statement.execute(params![kind.as_str(), lines as i64])?;
    Ok(())
}

/// Removes what is old.
pub(crate) fn prune_old(conn: &Connection, now: Timestamp) -> rusqlite::Result<()> {
    let mut statement = conn.prepare_cached("DELETE FROM deliveries WHERE kind = ?1 AND last_at < ?2")?;
    for kind in Kind::ALL {
        statement.execute(params![kind.as_str(), now.minus(KEPT_FOR).0])?;
    }
    Ok(())
}

fn one(conn: &Connection, no: i64) -> rusqlite::Result<Option<DeliveryRow>> {
    let sql = format!("SELECT * FROM ({ROWS}) WHERE no = ?1");
    conn.prepare_cached(&sql)?.query_row([no], delivery).optional()
}

/// What is no longer tried because its call has settled says so: a call that returned had been delivered, whatever we
/// heard of it; one that failed was given up.
const ROWS: &str = "SELECT d.no, d.kind, t.id AS thread, d.call, d.server, d.topic, \
     CASE WHEN d.outcome <> 'retrying' OR c.state IS NULL OR c.state = 0 THEN d.outcome \
     WHEN d.kind = 'invocation' AND c.state IN (1, 5, 6) THEN 'delivered' \
     WHEN d.kind = 'invocation' AND c.state = 3 THEN 'given_up' ELSE 'dropped' END AS outcome, \
     d.attempts, d.detail, d.first_at, d.last_at, \
     CASE d.kind WHEN 'invocation' THEN c.invoke_at WHEN 'answer' THEN q.answer_at END \
     FROM deliveries d LEFT JOIN threads t ON t.no = d.thread \
     LEFT JOIN calls c ON c.thread = d.thread AND c.id = d.call \
     LEFT JOIN questions q ON d.kind = 'answer' AND q.thread = d.thread AND q.no = CAST(d.topic AS INTEGER)";

fn delivery(row: &Row<'_>) -> rusqlite::Result<DeliveryRow> {
    let some = |text: String| Some(text).filter(|text| !text.is_empty());
    Ok(DeliveryRow {
        no: row.get(0)?,
        kind: kind(row, 1)?,
        thread: row.get_ref(2)?.as_str_or_null()?.map(|_| id(row, 2)).transpose()?,
        call: some(row.get(3)?),
        server: some(row.get(4)?),
        topic: row.get(5)?,
        outcome: outcome(row, 6)?,
        attempts: row.get(7)?,
        detail: row.get(8)?,
        first_at: Timestamp(row.get(9)?),
        last_at: Timestamp(row.get(10)?),
        next_at: row.get::<_, Option<i64>>(11)?.map(Timestamp),
    })
}

fn kind(row: &Row<'_>, at: usize) -> rusqlite::Result<Kind> {
    let text = row.get_ref(at)?.as_str()?;
    Kind::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or_else(|| strange(text))
}

fn outcome(row: &Row<'_>, at: usize) -> rusqlite::Result<Fate> {
    let text = row.get_ref(at)?.as_str()?;
    Fate::ALL.into_iter().find(|outcome| outcome.as_str() == text).ok_or_else(|| strange(text))
}

fn strange(text: &str) -> rusqlite::Error {
    unreadable(std::io::Error::other(format!("`{text}` is no word of the ledger")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> Connection {
        let conn = Connection::open_in_memory().unwrap();
        conn.execute_batch(include_str!("schema_1.sql")).unwrap();
        conn
    }

    fn line(kind: Kind, call: &str, at: i64) -> Line {
        Line {
            kind,
            thread: 1,
            thread_id: None,
            call: Some(CallId::new(call).unwrap()),
            server: None,
            topic: String::new(),
            outcome: Fate::Refused,
            attempts: 1,
            detail: "x".repeat(2 * DETAIL_CHARS),
            at: Timestamp(at),
        }
    }

    fn calls(conn: &Connection) -> Vec<(String, u32)> {
        let mut rows = conn.prepare("SELECT call, attempts FROM deliveries ORDER BY no").unwrap();
        rows.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap().map(Result::unwrap).collect()
    }

    #[test]
    fn the_oldest_lines_of_a_kind_go_first_and_those_of_others_stay() {
        let conn = ledger();
        note(&conn, &line(Kind::Invocation, "other", 0)).unwrap();
        for (call, at) in [("a", 1), ("b", 2), ("c", 3)] {
            note(&conn, &line(Kind::Callback, call, at)).unwrap();
        }
        // It has happened again, so that it is not the oldest any more.
        note(&conn, &line(Kind::Callback, "a", 4)).unwrap();
        prune(&conn, Kind::Callback, 2).unwrap();
        assert_eq!(calls(&conn), [("other".into(), 1), ("a".into(), 2), ("c".into(), 1)]);
        let now = Timestamp(4).plus(KEPT_FOR);
        prune_old(&conn, now).unwrap();
        assert_eq!(calls(&conn), [("a".into(), 2)]);
    }

    #[test]
    fn the_same_invocation_is_one_line_with_its_last_attempt() {
        let conn = ledger();
        let first = note(&conn, &line(Kind::Invocation, "a", 1)).unwrap();
        let again = Line { attempts: 7, outcome: Fate::GivenUp, ..line(Kind::Invocation, "a", 2) };
        assert_eq!(note(&conn, &again).unwrap(), first);
        let row = one(&conn, first).unwrap().unwrap();
        assert_eq!(
            (row.attempts, row.outcome, row.first_at, row.last_at),
            (7, Fate::GivenUp, Timestamp(1), Timestamp(2))
        );
        assert_eq!(row.detail.len(), DETAIL_CHARS);
    }
}
