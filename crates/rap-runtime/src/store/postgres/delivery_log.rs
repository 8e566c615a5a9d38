//! Records of deliveries. If the last record of an invocation says that it is being retried, its outcome is read from
//! the call, which may have settled since.

use rap_protocol::{ThreadId, Timestamp};
use tokio_postgres::Row;

use super::connect::Connections;
use super::heads::{attempts, thread_id, thread_key, timestamp, timestamp_or_none};
use super::listings::{user, user_condition};
use super::statement::{Failure, Statement, get, unreadable};
use crate::store::delivery_log::{ATTEMPTS, attempt_line, read_attempts};
use crate::store::stored::RECORDS;
use crate::store::{
    Cursor, Delivery, DeliveryFilter, DeliveryKind, DeliveryOutcome, DeliveryRecord, Page, Redelivery,
    ThreadKey, Visibility,
};

/// Retries end when their call settles. If the call returned, the invocation was delivered, whatever the outcome of the
/// last attempt; if the call failed, the invocation was given up.
const ROWS: &str = "SELECT d.no, d.kind, t.id AS thread, d.call, d.server, d.topic, \
     CASE WHEN d.outcome <> 'retrying' OR c.state IS NULL OR c.state = 0 THEN d.outcome \
     WHEN d.kind = 'invocation' AND c.state IN (1, 5, 6) THEN 'delivered' \
     WHEN d.kind = 'invocation' AND c.state = 3 THEN 'given_up' ELSE 'dropped' END AS outcome, \
     d.attempts, d.detail, d.first_at, d.last_at, \
     CASE d.kind WHEN 'invocation' THEN c.invoke_at WHEN 'answer' THEN q.answer_at END AS next_at, d.user_id \
     FROM deliveries d LEFT JOIN threads t ON t.no = d.thread \
     LEFT JOIN calls c ON c.thread = d.thread AND c.id = d.call \
     LEFT JOIN questions q ON d.kind = 'answer' AND q.thread = d.thread AND q.no::text = d.topic";

/// Returns the statements that write records. Each returns the number of its record.
pub(super) fn record_all(records: &[DeliveryRecord]) -> Vec<Statement> {
    let mut statements: Vec<Statement> = records.iter().map(record).collect();
    let recorded = |kind: &DeliveryKind| records.iter().any(|record| record.kind == *kind);
    statements.extend(DeliveryKind::ALL.into_iter().filter(recorded).map(|kind| prune(kind, RECORDS)));
    statements
}

/// Writes a record. Each delivery has one record. Callbacks of a call that are refused for the same reason share a
/// record, which counts them. The column `detail` has a line for each of the last attempts. A thread that was deleted
/// meanwhile gets no record.
fn record(record: &DeliveryRecord) -> Statement {
    let full = ATTEMPTS - 1;
    Statement::new(format!(
        "INSERT INTO deliveries AS d (kind, thread, call, server, topic, outcome, attempts, detail, first_at, last_at, \
         session, user_id) SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $9, \
         coalesce((SELECT session FROM threads WHERE no = $2), 0), (SELECT user_id FROM threads WHERE no = $2) \
         WHERE $2 = 0 OR EXISTS (SELECT 1 FROM threads WHERE no = $2) \
         ON CONFLICT (thread, call, kind, topic, server) DO UPDATE SET outcome = excluded.outcome, \
         detail = CASE WHEN length(d.detail) - length(replace(d.detail, chr(10), '')) >= {full} \
         THEN substr(d.detail, strpos(d.detail, chr(10)) + 1) ELSE d.detail END || chr(10) || excluded.detail, \
         last_at = excluded.last_at, attempts = excluded.attempts + \
         CASE d.kind WHEN 'callback' THEN d.attempts ELSE 0 END RETURNING no",
    ))
    .text(record.kind.as_str())
    .with(record.thread.map_or(0, ThreadKey::number))
    .text(record.call.as_ref().map_or("", |call| call.as_str()))
    .text(record.server.as_deref().unwrap_or(""))
    .text(&record.topic)
    .text(record.outcome.as_str())
    .with(i64::from(record.attempts))
    .text(&attempt_line(record))
    .with(record.at.0)
}

/// Removes the oldest records of a kind, so that at most `records` remain.
fn prune(kind: DeliveryKind, records: usize) -> Statement {
    let sql = "DELETE FROM deliveries WHERE no IN \
               (SELECT no FROM deliveries WHERE kind = $1 ORDER BY last_at DESC OFFSET $2)";
    Statement::new(sql).text(kind.as_str()).with(records as i64)
}

/// Removes records whose last attempt was before a time.
pub(super) fn prune_old(before: Timestamp) -> Statement {
    let kinds: Vec<String> = DeliveryKind::ALL.iter().map(|kind| kind.as_str().to_owned()).collect();
    Statement::new("DELETE FROM deliveries WHERE kind = ANY($1) AND last_at < $2").with(kinds).with(before.0)
}

pub(super) fn ids(rows: &[Vec<Row>], records: usize) -> Result<Vec<String>, Failure> {
    let id = |row: &Row| get::<i64>(row, 0).map(|number| number.to_string());
    rows.iter().take(records).flatten().map(id).collect()
}

pub(super) async fn list(
    connections: &Connections,
    filter: &DeliveryFilter,
) -> Result<Page<Delivery>, Failure> {
    let sql = format!(
        "SELECT * FROM ({ROWS}) AS d WHERE no < $1 AND ($2::text IS NULL OR outcome = $2) \
         AND ($3::text IS NULL OR thread = $3) AND {} ORDER BY no DESC LIMIT $4",
        user_condition(&filter.visible, "user_id", 5)
    );
    let before = filter.before.as_ref().and_then(|cursor| cursor.at).unwrap_or(i64::MAX);
    let statement = Statement::new(sql)
        .with(before)
        .with(filter.outcome.map(|outcome| outcome.as_str().to_owned()))
        .with(filter.thread.as_ref().map(|thread: &ThreadId| thread.as_str().to_owned()))
        .with(filter.limit as i64 + 1)
        .with(user(&filter.visible));
    let found: Vec<Delivery> =
        connections.read_one(statement).await?.iter().map(delivery).collect::<Result<_, _>>()?;
    let more = found.len() > filter.limit;
    let rows: Vec<Delivery> = found.into_iter().take(filter.limit).collect();
    let last = rows.last().and_then(|last| last.id.parse().ok());
    let next = last.filter(|_| more).map(|at| Cursor { at: Some(at), ..Cursor::default() });
    Ok(Page { rows, next })
}

pub(super) async fn by_number(
    connections: &Connections,
    number: i64,
    visible: &Visibility,
) -> Result<Option<Delivery>, Failure> {
    let sql =
        format!("SELECT * FROM ({ROWS}) AS d WHERE no = $1 AND {}", user_condition(visible, "user_id", 2));
    connections
        .read_one(Statement::new(sql).with(number).with(user(visible)))
        .await?
        .first()
        .map(delivery)
        .transpose()
}

/// Makes an invocation that waits for a retry due now.
pub(super) async fn redeliver(
    connections: &Connections,
    number: i64,
    visible: &Visibility,
    now: Timestamp,
) -> Result<Redelivery, Failure> {
    let sql = "SELECT thread, call, kind FROM deliveries WHERE no = $1 AND";
    let found = Statement::new(format!("{sql} {}", user_condition(visible, "user_id", 2)));
    let found = connections.read_one(found.with(number).with(user(visible))).await?;
    let Some(row) = found.first() else { return Ok(Redelivery::NoSuchDelivery) };
    if kind(row, 2)? != DeliveryKind::Invocation {
        return Ok(Redelivery::NotAnInvocation);
    }
    let (thread, call): (ThreadKey, String) = (thread_key(row, 0)?, get(row, 1)?);
    let sql = "WITH due AS (UPDATE calls SET invoke_at = least(invoke_at, $3) \
               WHERE thread = $1 AND id = $2 AND state = 0 AND invoke_at IS NOT NULL RETURNING 1) \
               SELECT EXISTS (SELECT 1 FROM due), \
               EXISTS (SELECT 1 FROM calls WHERE thread = $1 AND id = $2 AND state = 0)";
    let rows = connections.write(vec![Statement::new(sql).thread(thread).text(&call).with(now.0)]).await?;
    let row = rows[0].first().ok_or_else(|| unreadable("a query without a row"))?;
    Ok(match (get::<bool>(row, 0)?, get::<bool>(row, 1)?) {
        (true, _) => Redelivery::Due,
        (false, true) => Redelivery::AlreadyDelivered,
        (false, false) => Redelivery::CallSettled,
    })
}

fn delivery(row: &Row) -> Result<Delivery, Failure> {
    let some = |text: String| Some(text).filter(|text| !text.is_empty());
    let (detail, last_attempts) = read_attempts(get(row, 8)?);
    Ok(Delivery {
        id: get::<i64>(row, 0)?.to_string(),
        kind: kind(row, 1)?,
        thread: get::<Option<&str>>(row, 2)?.map(|_| thread_id(row, 2)).transpose()?,
        call: some(get(row, 3)?),
        server: some(get(row, 4)?),
        topic: get(row, 5)?,
        outcome: outcome(row, 6)?,
        attempts: attempts(row, 7)?,
        detail,
        last_attempts,
        first_at: timestamp(row, 9)?,
        last_at: timestamp(row, 10)?,
        next_at: timestamp_or_none(row, 11)?,
    })
}

fn kind(row: &Row, at: usize) -> Result<DeliveryKind, Failure> {
    let text: &str = get(row, at)?;
    DeliveryKind::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or_else(|| unknown_value(text))
}

fn outcome(row: &Row, at: usize) -> Result<DeliveryOutcome, Failure> {
    let text: &str = get(row, at)?;
    DeliveryOutcome::ALL
        .into_iter()
        .find(|outcome| outcome.as_str() == text)
        .ok_or_else(|| unknown_value(text))
}

fn unknown_value(text: &str) -> Failure {
    unreadable(format!("`{text}` is not a known value in the delivery log"))
}
