//! Reads threads and their heads.

use std::sync::Arc;

use rap_agent::Head;
use rap_protocol::{CallId, ThreadId, Timestamp, UserId};
use tokio_postgres::Row;

use super::connect::Transaction;
use super::listings::{user, user_condition};
use super::statement::{Failure, Statement, get, unreadable};
use crate::store::damage::Damage;
use crate::store::{Loaded, SessionKey, Target, Thread, ThreadKey, Visibility};

pub(super) const THREAD_COLUMNS: &str = "t.no, t.id, t.parent, t.session, t.inherits, t.ancestors, t.incarnation, t.agent, \
                                         t.user_id, t.title, t.created_at, t.version, t.head, t.source, t.token_key";

pub(super) fn loaded(row: &Row) -> Result<Loaded, Failure> {
    match loaded_or_damaged(row)? {
        (loaded, None) => Ok(loaded),
        (_, Some(damage)) => Err(unreadable(damage)),
    }
}

/// Reads a thread for people. If its state is damaged, the head is that of a new thread.
pub(super) fn loaded_or_damaged(row: &Row) -> Result<(Loaded, Option<Damage>), Failure> {
    let ancestors = serde_json::from_str(get(row, 5)?).map_err(Damage::Ancestors);
    let head = serde_json::from_str(get(row, 12)?).map_err(Damage::Head);
    let (ancestors, damaged_list) =
        ancestors.map_or_else(|damage| (Vec::new(), Some(damage)), |list| (list, None));
    let (head, damage) = head.map_or_else(|damage| (Head::new(), Some(damage)), |head| (head, None));
    let thread = Thread {
        key: thread_key(row, 0)?,
        token_key: ThreadKey::new(get::<Option<i64>>(row, 14)?.map_or_else(|| get(row, 0), Ok)?),
        id: thread_id(row, 1)?,
        parent: get::<Option<i64>>(row, 2)?.map(ThreadKey::new),
        source: get::<Option<i64>>(row, 13)?.map(ThreadKey::new),
        session: session_key(row, 3)?,
        inherits: number(row, 4)?,
        ancestors,
        incarnation: get::<i64>(row, 6)?.cast_unsigned(),
        agent: get(row, 7)?,
        user_id: get::<Option<String>>(row, 8)?.map(UserId::new).transpose().map_err(unreadable)?,
        title: get(row, 9)?,
        created_at: timestamp(row, 10)?,
    };
    Ok((Loaded { thread: Arc::new(thread), head, version: get(row, 11)? }, damage.or(damaged_list)))
}

pub(super) fn thread_key(row: &Row, at: usize) -> Result<ThreadKey, Failure> {
    get(row, at).map(ThreadKey::new)
}

pub(super) fn session_key(row: &Row, at: usize) -> Result<SessionKey, Failure> {
    thread_key(row, at).map(SessionKey)
}

pub(super) fn thread_id(row: &Row, at: usize) -> Result<ThreadId, Failure> {
    ThreadId::new(get::<String>(row, at)?).map_err(unreadable)
}

pub(super) fn call_id(row: &Row, at: usize) -> Result<CallId, Failure> {
    CallId::new(get::<String>(row, at)?).map_err(unreadable)
}

pub(super) fn timestamp(row: &Row, at: usize) -> Result<Timestamp, Failure> {
    get(row, at).map(Timestamp)
}

pub(super) fn timestamp_or_none(row: &Row, at: usize) -> Result<Option<Timestamp>, Failure> {
    Ok(get::<Option<i64>>(row, at)?.map(Timestamp))
}

/// Reads a number that is never negative.
pub(super) fn number(row: &Row, at: usize) -> Result<u64, Failure> {
    get::<i64>(row, at).map(i64::unsigned_abs)
}

/// Reads the number of attempts.
pub(super) fn attempts(row: &Row, at: usize) -> Result<u32, Failure> {
    u32::try_from(get::<i64>(row, at)?).map_err(unreadable)
}

/// Returns the statements that record that rows of a thread are damaged. Its own rows stay as they are.
pub(super) fn set_aside(target: &Target, why: &str, now: Timestamp) -> Vec<Statement> {
    let (condition, key, id) = match target {
        Target::Key(key) | Target::Token { key, .. } => ("t.no = $1 AND $2 = ''", key.number(), ""),
        Target::Id(id) => ("$1 = 0 AND t.id = $2", 0, id.as_str()),
        Target::New(_) | Target::Fork { .. } => return Vec::new(),
    };
    let record = format!(
        "INSERT INTO damaged (thread, session, version, why, at) SELECT t.no, t.session, t.version, $3, $4 \
         FROM threads t WHERE {condition} ON CONFLICT (thread) DO UPDATE \
         SET version = excluded.version, why = excluded.why, at = excluded.at WHERE damaged.version <> excluded.version"
    );
    // Failed threads are listed by this table.
    let listed = format!(
        "INSERT INTO attention (thread, session, status) SELECT t.no, t.session, 'failed' FROM threads t \
         WHERE {condition} ON CONFLICT (thread) DO UPDATE SET status = excluded.status \
         WHERE attention.status <> excluded.status"
    );
    vec![
        Statement::new(record).with(key).text(id).text(why).with(now.0),
        Statement::new(listed).with(key).text(id),
    ]
}

/// Returns the statement that loads a thread by its key.
pub(super) fn by_key(key: ThreadKey) -> Statement {
    Statement::new(format!("SELECT {THREAD_COLUMNS} FROM threads t WHERE t.no = $1")).thread(key)
}

pub(super) async fn load(tx: &mut Transaction, key: ThreadKey) -> Result<Option<Loaded>, Failure> {
    tx.query(by_key(key)).await?.first().map(loaded).transpose()
}

/// Loads a thread by its id, if it is visible.
pub(super) async fn load_by_id(
    tx: &mut Transaction,
    id: &ThreadId,
    visible: &Visibility,
) -> Result<Option<Loaded>, Failure> {
    let condition = user_condition(visible, "t.user_id", 2);
    let sql = format!("SELECT {THREAD_COLUMNS} FROM threads t WHERE t.id = $1 AND {condition}");
    let statement = Statement::new(sql).text(id.as_str()).with(user(visible));
    tx.query(statement).await?.first().map(loaded).transpose()
}
