//! I4: the database contains exactly what the reference store contains.

use std::collections::BTreeMap;
use std::sync::Arc;

use rap_agent::{CallState, Entry, Head, Queue, Spending, ThreadMessage};
use rusqlite::Connection;
use serde::de::DeserializeOwned;

use super::invariants::{Violation, ensure};
use super::reference::{Outgoing, ReferenceStore, Row, ThreadIndex};
use super::state::Sim;

pub(super) fn compare(sim: &Arc<Sim>, conn: &Connection) -> Result<(), Violation> {
    let state = sim.state();
    let reference = &state.reference;
    let threads: i64 = one(conn, "SELECT count(*) FROM threads");
    ensure!(threads as usize == reference.threads.len(), "I4: {threads} threads are stored");
    for (index, row) in reference.threads.iter().enumerate() {
        compare_thread(conn, index, row, &state.bounds.thread)?;
    }
    let outbox: Vec<Outgoing> =
        rows(conn, "SELECT sender, receiver, letter FROM letters ORDER BY no", [], |row| Outgoing {
            sender: rap_protocol::ThreadId::new(row.get::<_, String>(0).expect("text")).expect("an id"),
            receiver: rap_protocol::ThreadId::new(row.get::<_, String>(1).expect("text")).expect("an id"),
            message: json::<ThreadMessage>(&row.get::<_, String>(2).expect("text")),
        });
    ensure!(
        outbox == reference.outbox,
        "I4: the stored messages are {outbox:?} instead of {:?}",
        reference.outbox
    );
    compare_spending(conn, reference)
}

fn compare_spending(conn: &Connection, reference: &ReferenceStore) -> Result<(), Violation> {
    let spending: BTreeMap<ThreadIndex, Spending> =
        rows(conn, "SELECT root, body FROM spending", [], |row| {
            (
                row.get::<_, i64>(0).expect("a number") as usize - 1,
                json(&row.get::<_, String>(1).expect("text")),
            )
        })
        .into_iter()
        .collect();
    ensure!(
        spending == reference.spending,
        "I12: the stored spending is {spending:?} instead of {:?}",
        reference.spending
    );
    Ok(())
}

fn compare_thread(
    conn: &Connection,
    index: ThreadIndex,
    row: &Row,
    limits: &rap_agent::Limits,
) -> Result<(), Violation> {
    let number = index as i64 + 1;
    let sql = "SELECT id, head, status, ask, due FROM threads WHERE no = ?1";
    let (id, head, status, ask, due) = rows(conn, sql, [number], |row| {
        (
            row.get::<_, String>(0).expect("text"),
            row.get::<_, String>(1).expect("text"),
            row.get::<_, String>(2).expect("text"),
            row.get::<_, Option<i64>>(3).expect("a number"),
            row.get::<_, Option<i64>>(4).expect("a number"),
        )
    })
    .pop()
    .ok_or_else(|| Violation(format!("I4: t{index} is not stored")))?;
    ensure!(id == row.thread.id.as_str(), "I4: t{index} is {id}");
    let head: Head = json(&head);
    ensure!(head == row.head, "I4: t{index} is stored as {head:?} instead of {:?}", row.head);
    let (own, asks) = (row.head.status().as_str(), row.head.turn_in_progress().map(|turn| turn as i64));
    ensure!(
        status == own && ask == asks,
        "I4: t{index} is stored as {status} {ask:?} instead of {own} {asks:?}"
    );
    ensure!(due.is_some() == row.head.due(limits).is_some(), "I4: t{index} is due at {due:?}");
    let entry = |row: &rusqlite::Row<'_>| -> Entry { json(&row.get::<_, String>(0).expect("text")) };
    let range = [(number << 32) + row.base() as i64, (number << 32) + u32::MAX as i64];
    let own = rows(conn, "SELECT body FROM entries WHERE key > ?1 AND key <= ?2 ORDER BY key", range, entry);
    ensure!(own == row.entries, "I4: t{index} has the entries {own:?} instead of {:?}", row.entries);
    let held = rows(conn, "SELECT body FROM held WHERE thread = ?1 ORDER BY queue, no", [number], entry);
    debug_assert!(Queue::UntilBatchCloses < Queue::UntilIdle);
    ensure!(held.iter().eq(row.held.values()), "I1: t{index} holds {held:?} instead of {:?}", row.held);
    let backlog = rows(conn, "SELECT body FROM backlog WHERE thread = ?1 ORDER BY call, no", [number], entry);
    ensure!(
        backlog.iter().eq(row.backlog.values()),
        "I1: t{index} has the backlog {backlog:?} instead of {:?}",
        row.backlog
    );
    compare_calls(conn, number, row)
}

fn compare_calls(conn: &Connection, number: i64, row: &Row) -> Result<(), Violation> {
    let sql = "SELECT id, state, until IS NOT NULL FROM calls WHERE thread = ?1 ORDER BY id";
    let calls: Vec<(String, i64, bool)> = rows(conn, sql, [number], |row| {
        (row.get(0).expect("text"), row.get(1).expect("a state"), row.get(2).expect("a bool"))
    });
    let expected: Vec<(String, i64, bool)> = row
        .calls
        .iter()
        .map(|(id, call)| (id.to_string(), state_number(call.state), call.timer.is_some()))
        .collect();
    ensure!(calls == expected, "I4: calls are stored as {calls:?} instead of {expected:?}");
    let sql = "SELECT no, call, answer FROM questions WHERE thread = ?1 ORDER BY no";
    let questions: Vec<(i64, String, Option<i64>)> = rows(conn, sql, [number], |row| {
        (row.get(0).expect("a number"), row.get(1).expect("text"), row.get(2).expect("an answer"))
    });
    let expected: Vec<(i64, String, Option<i64>)> = row
        .questions
        .iter()
        .map(|(number, row)| {
            (*number as i64, row.call.to_string(), row.selected.map(|selected| selected as i64))
        })
        .collect();
    ensure!(questions == expected, "I4: questions are stored as {questions:?} instead of {expected:?}");
    let sql = "SELECT call, event FROM seen WHERE thread = ?1 AND NOT EXISTS (SELECT 1 FROM ended_subscriptions e \
               WHERE e.thread = seen.thread AND e.call = seen.call) ORDER BY call, event";
    let event_ids: Vec<(String, String)> =
        rows(conn, sql, [number], |row| (row.get(0).expect("text"), row.get(1).expect("text")));
    let expected: Vec<(String, String)> =
        row.event_ids.iter().map(|(call, event)| (call.to_string(), event.as_str().to_owned())).collect();
    ensure!(event_ids == expected, "I2: event ids are stored as {event_ids:?} instead of {expected:?}");
    Ok(())
}

fn state_number(state: CallState) -> i64 {
    match state {
        CallState::Open => 0,
        CallState::Returned => 1,
        CallState::Interrupted => 2,
        CallState::Failed => 3,
        CallState::TimedOut => 4,
        CallState::Subscribed => 5,
        CallState::Ended => 6,
    }
}

fn json<T: DeserializeOwned>(text: &str) -> T {
    serde_json::from_str(text).expect("stored JSON can be read")
}

fn one<T: rusqlite::types::FromSql>(conn: &Connection, sql: &str) -> T {
    conn.query_row(sql, [], |row| row.get(0)).expect("a row")
}

fn rows<T, const N: usize>(
    conn: &Connection,
    sql: &str,
    parameters: [i64; N],
    read: impl Fn(&rusqlite::Row<'_>) -> T,
) -> Vec<T> {
    let mut statement = conn.prepare_cached(sql).expect("a statement");
    let mut found = statement.query(rusqlite::params_from_iter(parameters)).expect("a query");
    let mut rows = Vec::new();
    while let Some(row) = found.next().expect("a row") {
        rows.push(read(row));
    }
    rows
}
