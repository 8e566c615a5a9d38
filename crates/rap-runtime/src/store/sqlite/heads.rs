//! Loads and writes threads and their heads.

use std::sync::Arc;

use rap_agent::Head;
use rap_protocol::{CallId, ThreadId, Timestamp, UserId};
use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::store::damage::Damage;
use crate::store::stored::to_json;
use crate::store::{Loaded, SessionKey, StepSettings, Target, Thread, ThreadKey, Visibility};

pub(super) const THREAD_COLUMNS: &str = "t.no, t.id, t.parent, t.root, t.born_at, t.ancestors, t.incarnation, t.agent, t.user_id, \
                                         t.title, t.created_at, t.version, t.head, t.source, t.token_key";

impl rusqlite::ToSql for ThreadKey {
    fn to_sql(&self) -> rusqlite::Result<rusqlite::types::ToSqlOutput<'_>> {
        Ok(self.number().into())
    }
}

impl rusqlite::types::FromSql for ThreadKey {
    fn column_result(value: rusqlite::types::ValueRef<'_>) -> rusqlite::types::FromSqlResult<Self> {
        i64::column_result(value).map(ThreadKey::new)
    }
}

impl rusqlite::ToSql for SessionKey {
    fn to_sql(&self) -> rusqlite::Result<rusqlite::types::ToSqlOutput<'_>> {
        self.0.to_sql()
    }
}

impl rusqlite::types::FromSql for SessionKey {
    fn column_result(value: rusqlite::types::ValueRef<'_>) -> rusqlite::types::FromSqlResult<Self> {
        ThreadKey::column_result(value).map(SessionKey)
    }
}

/// Makes the error for an invalid value in a column.
pub(super) fn unreadable(error: impl std::error::Error + Send + Sync + 'static) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(0, Type::Text, Box::new(error))
}

/// Returns whether an error is caused by stored rows: an invalid value or a violated constraint. Retrying does not
/// help.
pub(super) fn is_row_error(error: &rusqlite::Error) -> bool {
    use rusqlite::Error::{
        FromSqlConversionFailure, IntegralValueOutOfRange, InvalidColumnType, QueryReturnedNoRows,
        StatementChangedRows,
    };
    matches!(
        error,
        FromSqlConversionFailure(..)
            | IntegralValueOutOfRange(..)
            | InvalidColumnType(..)
            | QueryReturnedNoRows
            | StatementChangedRows(_)
    ) || error.sqlite_error_code() == Some(rusqlite::ErrorCode::ConstraintViolation)
}

/// Turns an error that is caused by the rows of a thread into `None`, so that the thread does not block others.
pub(super) fn skip_unreadable<T>(
    thread: ThreadKey,
    read: rusqlite::Result<T>,
) -> rusqlite::Result<Option<T>> {
    match read {
        Err(error) if is_row_error(&error) => {
            tracing::error!(?thread, %error, "skipping a thread whose rows cannot be read");
            Ok(None)
        }
        read => read.map(Some),
    }
}

pub(super) fn load(conn: &Connection, key: ThreadKey) -> rusqlite::Result<Option<Loaded>> {
    let sql = format!("SELECT {THREAD_COLUMNS} FROM threads t WHERE t.no = ?1");
    conn.prepare_cached(&sql)?.query_row([key], loaded).optional()
}

pub(super) fn key_of(conn: &Connection, id: &ThreadId) -> rusqlite::Result<Option<ThreadKey>> {
    let mut statement = conn.prepare_cached("SELECT no FROM threads WHERE id = ?1")?;
    statement.query_row([id.as_str()], |row| row.get(0)).optional()
}

/// Returns true if a thread is visible, or if all are.
pub(super) fn is_visible(conn: &Connection, key: ThreadKey, visible: &Visibility) -> rusqlite::Result<bool> {
    let Visibility::User(user) = visible else { return Ok(true) };
    let mut statement = conn.prepare_cached("SELECT 1 FROM threads WHERE no = ?1 AND user_id = ?2")?;
    statement.exists(params![key, user.as_str()])
}

pub(super) fn loaded(row: &Row<'_>) -> rusqlite::Result<Loaded> {
    match loaded_or_damaged(row)? {
        (loaded, None) => Ok(loaded),
        (_, Some(damage)) => Err(unreadable(damage)),
    }
}

/// Reads a thread for people. If its state is damaged, the head is that of a new thread.
pub(super) fn loaded_or_damaged(row: &Row<'_>) -> rusqlite::Result<(Loaded, Option<Damage>)> {
    let ancestors = serde_json::from_str(row.get_ref(5)?.as_str()?).map_err(Damage::Ancestors);
    let head = serde_json::from_str(row.get_ref(12)?.as_str()?).map_err(Damage::Head);
    let (ancestors, damaged_list) =
        ancestors.map_or_else(|damage| (Vec::new(), Some(damage)), |list| (list, None));
    let (head, damage) = head.map_or_else(|damage| (Head::new(), Some(damage)), |head| (head, None));
    let thread = Thread {
        key: row.get(0)?,
        token_key: row.get::<_, Option<ThreadKey>>(14)?.map_or_else(|| row.get(0), Ok)?,
        id: thread_id(row, 1)?,
        parent: row.get(2)?,
        source: row.get(13)?,
        session: row.get(3)?,
        inherits: row.get::<_, i64>(4)?.unsigned_abs(),
        ancestors,
        incarnation: row.get::<_, i64>(6)?.cast_unsigned(),
        agent: row.get(7)?,
        user_id: row.get::<_, Option<String>>(8)?.map(UserId::new).transpose().map_err(unreadable)?,
        title: row.get(9)?,
        created_at: Timestamp(row.get(10)?),
    };
    Ok((Loaded { thread: Arc::new(thread), head, version: row.get(11)? }, damage.or(damaged_list)))
}

pub(super) fn thread_id(row: &Row<'_>, at: usize) -> rusqlite::Result<ThreadId> {
    ThreadId::new(row.get::<_, String>(at)?).map_err(unreadable)
}

pub(super) fn call_id(row: &Row<'_>, at: usize) -> rusqlite::Result<CallId> {
    CallId::new(row.get::<_, String>(at)?).map_err(unreadable)
}

/// Returns a key that no thread has had before.
pub(super) fn next_key(conn: &Connection) -> rusqlite::Result<ThreadKey> {
    let sql = "SELECT max(coalesce((SELECT max(no) FROM threads), 0), (SELECT last FROM used_keys)) + 1";
    let mut statement = conn.prepare_cached(sql)?;
    statement.query_row([], |row| row.get(0))
}

/// Inserts a thread. Its head gets version 1.
pub(super) fn insert(
    conn: &Connection,
    thread: &Thread,
    head: &Head,
    rules: &StepSettings,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let mut statement = conn.prepare_cached(
        "INSERT INTO threads (no, id, parent, root, born_at, ancestors, incarnation, agent, user_id, title, \
         created_at, updated_at, version, status, ask, ask_to, ask_at, due, head, source, token_key) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, 1, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20)",
    )?;
    let asking = head.turn_in_progress();
    statement.execute(params![
        thread.key,
        thread.id.as_str(),
        thread.parent,
        thread.session,
        thread.inherits.cast_signed(),
        to_json(&thread.ancestors),
        thread.incarnation.cast_signed(),
        thread.agent,
        thread.user_id.as_ref().map(UserId::as_str),
        thread.title,
        thread.created_at.0,
        now.0,
        head.status().as_str(),
        asking.map(u64::cast_signed),
        asking.map(|_| rules.model_server(&thread.agent)),
        asking.map(|_| now.0),
        head.due(rules.limits(&thread.agent)).map(|due| due.0),
        to_json(head),
        thread.source,
        (thread.token_key != thread.key).then_some(thread.token_key),
    ])?;
    Ok(())
}

/// Replaces a head if its stored version is still `version`, and fails otherwise. A model request with the same turn
/// number keeps its due time and its destination.
pub(super) fn update(
    conn: &Connection,
    thread: &Thread,
    version: i64,
    head: &Head,
    rules: &StepSettings,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let mut statement = conn.prepare_cached(
        "UPDATE threads SET head = ?3, version = version + 1, status = ?4, \
         ask_at = CASE WHEN ask IS ?5 THEN ask_at ELSE ?6 END, \
         ask_attempts = CASE WHEN ask IS ?5 THEN ask_attempts ELSE 0 END, \
         ask_to = CASE WHEN ask IS ?5 THEN ask_to ELSE ?7 END, \
         ask = ?5, due = ?8, updated_at = ?9 WHERE no = ?1 AND version = ?2",
    )?;
    let asking = head.turn_in_progress();
    let changed = statement.execute(params![
        thread.key,
        version,
        to_json(head),
        head.status().as_str(),
        asking.map(u64::cast_signed),
        asking.map(|_| now.0),
        asking.map(|_| rules.model_server(&thread.agent)),
        head.due(rules.limits(&thread.agent)).map(|due| due.0),
        now.0,
    ])?;
    if changed == 1 { Ok(()) } else { Err(rusqlite::Error::StatementChangedRows(changed)) }
}

/// Records that rows of a thread are damaged. Its own rows stay as they are.
pub(super) fn set_aside(
    conn: &Connection,
    target: &Target,
    why: &str,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let key = match target {
        Target::Key(key) | Target::Token { key, .. } => Some(*key),
        Target::Id(id) => key_of(conn, id)?,
        Target::New(_) | Target::Fork { .. } => None,
    };
    conn.execute(
        "INSERT OR REPLACE INTO damaged (thread, version, why, at) SELECT t.no, t.version, ?2, ?3 FROM threads t \
         WHERE t.no = ?1 AND NOT EXISTS (SELECT 1 FROM damaged d WHERE d.thread = t.no AND d.version = t.version)",
        params![key, why, now.0],
    )?;
    conn.execute(
        "UPDATE threads SET status = 'failed' WHERE no = ?1 AND status NOT IN ('failed', 'closed')",
        [key],
    )?;
    Ok(())
}

/// Returns the version of a stored head, or `None` if there is no such thread.
pub(super) fn version(conn: &Connection, key: ThreadKey) -> rusqlite::Result<Option<i64>> {
    let mut statement = conn.prepare_cached("SELECT version FROM threads WHERE no = ?1")?;
    statement.query_row([key], |row| row.get(0)).optional()
}

/// Sets the destination of waiting model requests to the model servers that are configured now.
pub(super) fn retarget_model_requests(conn: &Connection, rules: &StepSettings) -> rusqlite::Result<()> {
    // There is an index for each of the two conditions.
    for condition in ["ask IS NOT NULL AND ask_attempts = 0", "ask_attempts > 0"] {
        let mut agents = conn.prepare(&format!("SELECT DISTINCT agent FROM threads WHERE {condition}"))?;
        let agents: Vec<String> = agents.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
        let sql =
            format!("UPDATE threads SET ask_to = ?2 WHERE {condition} AND agent = ?1 AND ask_to IS NOT ?2");
        for agent in agents {
            conn.execute(&sql, params![agent, rules.model_server(&agent)])?;
        }
    }
    Ok(())
}

/// Sets the retry times of failed threads that the first release stored without one.
pub(super) fn recompute_due(conn: &Connection, rules: &StepSettings) -> rusqlite::Result<()> {
    let mut failed = conn.prepare("SELECT no FROM threads WHERE status = 'failed' AND due IS NULL")?;
    let failed: Vec<ThreadKey> = failed.query_map([], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
    for key in failed {
        let Some(Loaded { thread, head, .. }) = skip_unreadable(key, load(conn, key))?.flatten() else {
            continue;
        };
        if let Some(due) = head.due(rules.limits(&thread.agent)) {
            conn.execute("UPDATE threads SET due = ?2 WHERE no = ?1", params![key, due.0])?;
        }
    }
    Ok(())
}
