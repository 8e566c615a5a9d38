//! Reads threads and their heads.

use std::sync::Arc;

use rap_protocol::{CallId, ThreadId, Timestamp, UserId};
use tokio_postgres::Row;

use super::connect::Transaction;
use super::listings::{user, user_condition};
use super::statement::{Failure, Statement, get, unreadable};
use crate::store::{Loaded, SessionKey, Thread, ThreadKey, Visibility};

pub(super) const THREAD_COLUMNS: &str = "t.no, t.id, t.parent, t.session, t.inherits, t.ancestors, t.incarnation, t.agent, \
                                         t.user_id, t.title, t.created_at, t.version, t.head, t.source";

pub(super) fn loaded(row: &Row) -> Result<Loaded, Failure> {
    let thread = Thread {
        key: thread_key(row, 0)?,
        id: thread_id(row, 1)?,
        parent: get::<Option<i64>>(row, 2)?.map(ThreadKey::new),
        source: get::<Option<i64>>(row, 13)?.map(ThreadKey::new),
        session: session_key(row, 3)?,
        inherits: number(row, 4)?,
        ancestors: serde_json::from_str(get(row, 5)?).map_err(unreadable)?,
        incarnation: get::<i64>(row, 6)?.cast_unsigned(),
        agent: get(row, 7)?,
        user_id: get::<Option<String>>(row, 8)?.map(UserId::new).transpose().map_err(unreadable)?,
        title: get(row, 9)?,
        created_at: timestamp(row, 10)?,
    };
    let head = serde_json::from_str(get(row, 12)?).map_err(unreadable)?;
    Ok(Loaded { thread: Arc::new(thread), head, version: get(row, 11)? })
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
