//! Records of deliveries. If the last record of an invocation says that it is being retried, its outcome is read from
//! the call, which may have settled since.

use rap_protocol::{ThreadId, Timestamp, UserId};
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::heads::{thread_id, unreadable};
use crate::store::delivery_log::{ATTEMPTS, attempt_line, read_attempts};
use crate::store::stored::RECORDS;
use crate::store::{
    Cursor, Delivery, DeliveryFilter, DeliveryKind, DeliveryOutcome, DeliveryRecord, Page, Redelivery,
    ThreadKey, Visibility,
};

/// Writes records and returns their ids.
pub(super) fn record_all(conn: &Connection, records: &[DeliveryRecord]) -> rusqlite::Result<Vec<String>> {
    let ids = records.iter().filter_map(|record| self::record(conn, record).transpose()).collect();
    let recorded = |kind: &DeliveryKind| records.iter().any(|record| record.kind == *kind);
    DeliveryKind::ALL.into_iter().filter(recorded).try_for_each(|kind| prune(conn, kind, RECORDS))?;
    ids
}

fn listing(visible: &Visibility) -> String {
    let user = match visible {
        Visibility::All => "?5 IS NULL",
        Visibility::User(_) => "user_id = ?5",
    };
    format!(
        "SELECT * FROM ({ROWS}) WHERE no < ?1 AND (?2 IS NULL OR outcome = ?2) \
         AND (?3 IS NULL OR thread = ?3) AND {user} ORDER BY no DESC LIMIT ?4"
    )
}

pub(super) fn list(conn: &Connection, filter: &DeliveryFilter) -> rusqlite::Result<Page<Delivery>> {
    let sql = listing(&filter.visible);
    let thread = filter.thread.as_ref().map(ThreadId::as_str);
    let before = filter.before.as_ref().and_then(|cursor| cursor.at).unwrap_or(i64::MAX);
    let (outcome, limit) = (filter.outcome.map(DeliveryOutcome::as_str), filter.limit as i64 + 1);
    let parameters = params![before, outcome, thread, limit, filter.visible.user().map(UserId::as_str)];
    let found =
        conn.prepare_cached(&sql)?.query_map(parameters, delivery)?.collect::<rusqlite::Result<Vec<_>>>()?;
    let more = found.len() > filter.limit;
    let rows: Vec<Delivery> = found.into_iter().take(filter.limit).collect();
    let last = rows.last().and_then(|last| last.id.parse().ok());
    let next = last.filter(|_| more).map(|at| Cursor { at: Some(at), ..Cursor::default() });
    Ok(Page { rows, next })
}

/// Makes an invocation that waits for a retry due now.
pub(super) fn redeliver(
    conn: &Connection,
    number: i64,
    visible: &Visibility,
    now: Timestamp,
) -> rusqlite::Result<Redelivery> {
    let sql = "SELECT thread, call, kind FROM deliveries WHERE no = ?1 AND (?2 IS NULL OR user_id = ?2)";
    let mut found = conn.prepare_cached(sql)?;
    let row = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?, kind(row, 2)?));
    let found: Option<(ThreadKey, String, DeliveryKind)> =
        found.query_row(params![number, visible.user().map(UserId::as_str)], row).optional()?;
    let Some((thread, call, kind)) = found else { return Ok(Redelivery::NoSuchDelivery) };
    if kind != DeliveryKind::Invocation {
        return Ok(Redelivery::NotAnInvocation);
    }
    let mut due = conn.prepare_cached(
        "UPDATE calls SET invoke_at = min(invoke_at, ?3) \
         WHERE thread = ?1 AND id = ?2 AND state = 0 AND invoke_at IS NOT NULL",
    )?;
    if due.execute(params![thread, call, now.0])? == 1 {
        return Ok(Redelivery::Due);
    }
    let mut open = conn.prepare_cached("SELECT 1 FROM calls WHERE thread = ?1 AND id = ?2 AND state = 0")?;
    let open = open.exists(params![thread, call])?;
    Ok(if open { Redelivery::AlreadyDelivered } else { Redelivery::CallSettled })
}

/// Writes a record. Each delivery has one record. Callbacks of a call that are refused for the same reason share a
/// record, which counts them. The column `detail` has a line for each of the last attempts. A thread that was deleted
/// meanwhile gets no record.
fn record(conn: &Connection, record: &DeliveryRecord) -> rusqlite::Result<Option<String>> {
    let full = ATTEMPTS - 1;
    let mut statement = conn.prepare_cached(&format!(
        "INSERT INTO deliveries (kind, thread, call, server, topic, outcome, attempts, detail, first_at, last_at, user_id) \
         SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?9, (SELECT user_id FROM threads WHERE no = ?2) \
         WHERE ?2 = 0 OR EXISTS (SELECT 1 FROM threads WHERE no = ?2) \
         ON CONFLICT (thread, call, kind, topic, server) DO UPDATE SET outcome = excluded.outcome, \
         detail = CASE WHEN length(detail) - length(replace(detail, char(10), '')) >= {full} \
         THEN substr(detail, instr(detail, char(10)) + 1) ELSE detail END || char(10) || excluded.detail, \
         last_at = excluded.last_at, attempts = excluded.attempts + \
         CASE kind WHEN 'callback' THEN attempts ELSE 0 END RETURNING no",
    ))?;
    let row = params![
        record.kind.as_str(),
        record.thread.map_or(0, ThreadKey::number),
        record.call.as_ref().map_or("", |call| call.as_str()),
        record.server.as_deref().unwrap_or(""),
        record.topic,
        record.outcome.as_str(),
        record.attempts,
        attempt_line(record),
        record.at.0,
    ];
    let number = statement.query_row(row, |row| row.get::<_, i64>(0)).optional()?;
    Ok(number.map(|number| number.to_string()))
}

/// Removes the oldest records of a kind, so that at most `records` remain.
fn prune(conn: &Connection, kind: DeliveryKind, records: usize) -> rusqlite::Result<()> {
    let mut statement = conn.prepare_cached(
        "DELETE FROM deliveries WHERE no IN \
         (SELECT no FROM deliveries WHERE kind = ?1 ORDER BY last_at DESC LIMIT -1 OFFSET ?2)",
    )?;
    statement.execute(params![kind.as_str(), records as i64])?;
    Ok(())
}

/// Removes records whose last attempt was before a time.
pub(super) fn prune_old(conn: &Connection, before: Timestamp) -> rusqlite::Result<()> {
    let mut statement = conn.prepare_cached("DELETE FROM deliveries WHERE kind = ?1 AND last_at < ?2")?;
    for kind in DeliveryKind::ALL {
        statement.execute(params![kind.as_str(), before.0])?;
    }
    Ok(())
}

pub(super) fn get(
    conn: &Connection,
    number: i64,
    visible: &Visibility,
) -> rusqlite::Result<Option<Delivery>> {
    let sql = format!("SELECT * FROM ({ROWS}) WHERE no = ?1 AND (?2 IS NULL OR user_id = ?2)");
    let parameters = params![number, visible.user().map(UserId::as_str)];
    conn.prepare_cached(&sql)?.query_row(parameters, delivery).optional()
}

/// Retries end when their call settles. If the call returned, the invocation was delivered, whatever the outcome of the
/// last attempt; if the call failed, the invocation was given up.
const ROWS: &str = "SELECT d.no, d.kind, t.id AS thread, d.call, d.server, d.topic, \
     CASE WHEN d.outcome <> 'retrying' OR c.state IS NULL OR c.state = 0 THEN d.outcome \
     WHEN d.kind = 'invocation' AND c.state IN (1, 5, 6) THEN 'delivered' \
     WHEN d.kind = 'invocation' AND c.state = 3 THEN 'given_up' ELSE 'dropped' END AS outcome, \
     d.attempts, d.detail, d.first_at, d.last_at, \
     CASE d.kind WHEN 'invocation' THEN c.invoke_at WHEN 'answer' THEN q.answer_at END, d.user_id \
     FROM deliveries d LEFT JOIN threads t ON t.no = d.thread \
     LEFT JOIN calls c ON c.thread = d.thread AND c.id = d.call \
     LEFT JOIN questions q ON d.kind = 'answer' AND q.thread = d.thread AND q.no = CAST(d.topic AS INTEGER)";

fn delivery(row: &Row<'_>) -> rusqlite::Result<Delivery> {
    let some = |text: String| Some(text).filter(|text| !text.is_empty());
    let (detail, last_attempts) = read_attempts(row.get_ref(8)?.as_str()?);
    Ok(Delivery {
        id: row.get::<_, i64>(0)?.to_string(),
        kind: kind(row, 1)?,
        thread: row.get_ref(2)?.as_str_or_null()?.map(|_| thread_id(row, 2)).transpose()?,
        call: some(row.get(3)?),
        server: some(row.get(4)?),
        topic: row.get(5)?,
        outcome: outcome(row, 6)?,
        attempts: row.get(7)?,
        detail,
        last_attempts,
        first_at: Timestamp(row.get(9)?),
        last_at: Timestamp(row.get(10)?),
        next_at: row.get::<_, Option<i64>>(11)?.map(Timestamp),
    })
}

fn kind(row: &Row<'_>, at: usize) -> rusqlite::Result<DeliveryKind> {
    let text = row.get_ref(at)?.as_str()?;
    DeliveryKind::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or_else(|| unknown_value(text))
}

fn outcome(row: &Row<'_>, at: usize) -> rusqlite::Result<DeliveryOutcome> {
    let text = row.get_ref(at)?.as_str()?;
    DeliveryOutcome::ALL
        .into_iter()
        .find(|outcome| outcome.as_str() == text)
        .ok_or_else(|| unknown_value(text))
}

fn unknown_value(text: &str) -> rusqlite::Error {
    unreadable(std::io::Error::other(format!("`{text}` is not a known value in the delivery log")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::stored::DETAIL_CHARS;

    fn ledger() -> Connection {
        let conn = crate::store::sqlite::tests::database();
        let sql = "INSERT INTO threads (no, id, root, born_at, ancestors, incarnation, agent, created_at, updated_at, \
                   version, status, head) VALUES (1, 't', 1, 0, '[]', 1, 'a', 0, 0, 1, 'idle', '{}')";
        conn.execute(sql, []).unwrap();
        conn
    }

    fn record_of(kind: DeliveryKind, call: &str, at: i64) -> DeliveryRecord {
        DeliveryRecord {
            kind,
            thread: Some(ThreadKey::new(1)),
            thread_id: None,
            call: Some(rap_protocol::CallId::new(call).unwrap()),
            server: None,
            topic: String::new(),
            outcome: DeliveryOutcome::Refused,
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
    fn the_oldest_records_of_a_kind_are_pruned_first_and_other_kinds_are_kept() {
        let conn = ledger();
        record(&conn, &record_of(DeliveryKind::Invocation, "other", 0)).unwrap();
        for (call, at) in [("a", 1), ("b", 2), ("c", 3)] {
            record(&conn, &record_of(DeliveryKind::Callback, call, at)).unwrap();
        }
        // Recording it again makes it the newest.
        record(&conn, &record_of(DeliveryKind::Callback, "a", 4)).unwrap();
        prune(&conn, DeliveryKind::Callback, 2).unwrap();
        assert_eq!(calls(&conn), [("other".into(), 1), ("a".into(), 2), ("c".into(), 1)]);
        prune_old(&conn, Timestamp(4)).unwrap();
        assert_eq!(calls(&conn), [("a".into(), 2)]);
    }

    #[test]
    fn deliveries_of_a_user_are_found_by_an_index() {
        let visible = Visibility::User(UserId::new("u").unwrap());
        let sql = format!("EXPLAIN QUERY PLAN {}", listing(&visible));
        let conn = ledger();
        let mut statement = conn.prepare(&sql).unwrap();
        let steps = statement.raw_query().mapped(|row| row.get::<_, String>(3));
        let plan = steps.map(Result::unwrap).collect::<Vec<_>>().join("\n");
        assert!(plan.contains("deliveries_user (user_id=? AND rowid<"), "{plan}");
        assert!(!plan.contains("TEMP B-TREE") && !plan.contains("SCAN"), "{plan}");
    }

    #[test]
    fn a_deleted_thread_gets_no_record() {
        let of = |thread: Option<i64>| DeliveryRecord {
            thread: thread.map(ThreadKey::new),
            ..record_of(DeliveryKind::Callback, "a", 1)
        };
        let written = record_all(&ledger(), &[of(Some(9)), of(Some(1)), of(None)]).unwrap();
        assert_eq!(written.len(), 2);
    }

    #[test]
    fn an_invocation_has_one_record_with_its_last_attempt() {
        let conn = ledger();
        let first = record(&conn, &record_of(DeliveryKind::Invocation, "a", 1)).unwrap();
        let again = DeliveryRecord {
            attempts: 7,
            outcome: DeliveryOutcome::GivenUp,
            ..record_of(DeliveryKind::Invocation, "a", 2)
        };
        assert_eq!(record(&conn, &again).unwrap(), first);
        let row = get(&conn, first.unwrap().parse().unwrap(), &Visibility::All).unwrap().unwrap();
        assert_eq!(
            (row.attempts, row.outcome, row.first_at, row.last_at),
            (7, DeliveryOutcome::GivenUp, Timestamp(1), Timestamp(2))
        );
        assert_eq!(row.detail.len(), DETAIL_CHARS);
    }
}
