//! Deletes closed sessions, a bounded number of rows at a time. Any node does it; a session is locked during a batch.

use std::sync::Arc;

use rap_protocol::{ThreadId, Timestamp};
use tokio_postgres::Row;

use super::connect::{Connections, Transaction};
use super::heads::{self, session_key, thread_key};
use super::history;
use super::listings::{user, user_condition};
use super::statement::{BEGIN, Failure, Statement, get};
use super::transfer::inherited_page;
use crate::store::deletion::{
    BATCH_ROWS, DAMAGED_WAIT, EXAMINED, Expired, Expiry, RECHECK, RETRY, Remaining,
};
use crate::store::stored::PAGE_BYTES;
use crate::store::{Error, Loaded, SessionKey, Thread, ThreadKey, Visibility};

/// Tables with rows of threads, by their key.
const BY_KEY: [&str; 14] = [
    "damaged",
    "entries",
    "summaries",
    "held",
    "backlog",
    "calls",
    "questions",
    "views",
    "event_ids",
    "ended_subscriptions",
    "deliveries",
    "attention",
    "asks",
    "wakes",
];
/// Tables with rows of threads, by their id.
const BY_ID: [&str; 2] = ["requests", "alerts"];
/// Tables with rows of a session that belong to no thread.
const BY_SESSION: [&str; 4] = ["session_tools", "spending", "outbox", "deletions"];
/// Number of threads that one batch deletes.
const THREADS: i64 = 100;

/// Condition that the session of a thread `t` is not being deleted.
pub(super) const NOT_DELETED: &str = "NOT EXISTS (SELECT 1 FROM deletions d WHERE d.session = t.session)";

/// The threads of a session with their depth.
const SESSION: &str = "WITH RECURSIVE s (no, depth) AS (SELECT $1::bigint, 0 UNION ALL \
                       SELECT t.no, depth + 1 FROM s JOIN threads t ON t.parent = s.no) ";

/// Returns true if threads of this session cannot be forked, because it is being deleted. Otherwise no deletion or move
/// of it begins before the end of the transaction: those lock the root `FOR UPDATE`, which waits for this lock. Steps
/// do not.
pub(super) async fn forbids_fork(tx: &mut Transaction, session: SessionKey) -> Result<bool, Failure> {
    let marked = Statement::new("SELECT 1 FROM deletions WHERE session = $1").session(session);
    let root = Statement::new("SELECT 1 FROM threads WHERE no = $1 FOR KEY SHARE").session(session);
    let rows = tx.pipeline(&[root, marked]).await?;
    Ok(!rows[1].is_empty())
}

/// Returns true if a session is being deleted.
pub(super) async fn is_marked(tx: &mut Transaction, session: SessionKey) -> Result<bool, Failure> {
    let marked = Statement::new("SELECT 1 FROM deletions WHERE session = $1").session(session);
    Ok(!tx.query(marked).await?.is_empty())
}

/// Marks a closed session.
pub(super) async fn mark(
    connections: &Connections,
    id: &ThreadId,
    visible: &Visibility,
    now: Timestamp,
) -> Result<(), Error> {
    let mut tx = connections.begin(BEGIN).await?;
    // The row is locked, so that the session is not moved away. A fork that is being made is committed first.
    let sql = format!(
        "SELECT no, parent, status FROM threads t WHERE id = $1 AND {} AND {NOT_DELETED} FOR UPDATE",
        user_condition(visible, "user_id", 2)
    );
    let found = tx.query(Statement::new(sql).text(id.as_str()).with(user(visible))).await?;
    let row = found.first().ok_or(Error::NoThread)?;
    if get::<Option<i64>>(row, 1)?.is_some() {
        return Err(Error::NotARoot);
    }
    if get::<&str>(row, 2)? != "closed" {
        return Err(Error::NotClosed);
    }
    let session = session_key(row, 0)?;
    tx.finish(&[insert(session, now)]).await?;
    Ok(())
}

fn insert(session: SessionKey, now: Timestamp) -> Statement {
    let sql = "INSERT INTO deletions (session, due) VALUES ($1, $2) ON CONFLICT DO NOTHING";
    Statement::new(sql).session(session).with(now.0)
}

/// Looks at the next root threads, and counts or marks those that were closed before a time. A
/// session with a damaged thread does not expire: a backup may repair it.
pub(super) async fn expire(
    connections: &Connections,
    before: Timestamp,
    after: Option<ThreadKey>,
    expiry: Expiry,
    now: Timestamp,
) -> Result<Expired, Error> {
    let sql = format!(
        "SELECT no, id, status = 'closed' AND updated_at < $3 AND {NOT_DELETED} AND NOT EXISTS \
         (SELECT 1 FROM damaged d JOIN threads x ON x.no = d.thread AND x.version = d.version \
         WHERE d.session = t.no) FROM threads t WHERE no > $1 AND parent IS NULL ORDER BY no LIMIT $2"
    );
    let after = after.map_or(0, ThreadKey::number);
    let roots = connections.read_one(Statement::new(sql).with(after).with(EXAMINED).with(before.0)).await?;
    let full = roots.len() as i64 == EXAMINED;
    let next = roots.last().filter(|_| full).map(|row| thread_key(row, 0)).transpose()?;
    let mut sessions = 0;
    for row in &roots {
        if !get::<bool>(row, 2)? {
            continue;
        }
        if expiry == Expiry::Delete {
            match mark(connections, &heads::thread_id(row, 1)?, &Visibility::All, now).await {
                // Another node was faster.
                Err(Error::NoThread) => continue,
                marked => marked?,
            }
        }
        sessions += 1;
    }
    Ok(Expired { sessions, next })
}

/// Copies or deletes rows of a marked session. Returns true with [`Remaining::Some`] if a session is gone.
pub(super) async fn batch(connections: &Connections, now: Timestamp) -> Result<(Remaining, bool), Failure> {
    let mut tx = connections.begin(BEGIN).await?;
    let sql = "SELECT session, is_ready FROM deletions WHERE due <= $1 ORDER BY due, session LIMIT 1 \
               FOR UPDATE SKIP LOCKED";
    let found = tx.query(Statement::new(sql).with(now.0)).await?;
    let Some(row) = found.first() else {
        let waiting = !tx.query(Statement::new("SELECT 1 FROM deletions LIMIT 1")).await?.is_empty();
        return Ok((if waiting { Remaining::Waiting } else { Remaining::None }, false));
    };
    let (session, is_ready) = (session_key(row, 0)?, get(row, 1)?);
    let done = session_batch(tx, session, is_ready, now).await;
    if matches!(done, Err(Failure::Row(_) | Failure::Conflict(_))) {
        // Others are deleted meanwhile.
        connections.write(vec![set_due(session, now.plus(RETRY))]).await?;
    }
    Ok((Remaining::Some, done?))
}

fn set_due(session: SessionKey, due: Timestamp) -> Statement {
    Statement::new("UPDATE deletions SET due = $2 WHERE session = $1").session(session).with(due.0)
}

/// Copies or deletes rows of a session. Returns true if nothing is left of it.
async fn session_batch(
    mut tx: Transaction,
    session: SessionKey,
    is_ready: bool,
    now: Timestamp,
) -> Result<bool, Failure> {
    if is_ready {
        return delete_rows(tx, session).await;
    }
    if !is_quiet(&mut tx, session, now).await? {
        tx.finish(&[set_due(session, now.plus(RECHECK))]).await?;
    } else if let Some(fork) = next_fork(&mut tx, session).await? {
        copy_inherited(tx, &fork).await?;
    } else {
        let sql = "UPDATE deletions SET is_ready = true WHERE session = $1";
        tx.finish(&[Statement::new(sql).session(session)]).await?;
    }
    Ok(false)
}

/// Returns true if all threads of a session are closed and no message between them is on its way, or if that will not
/// happen because a thread is damaged.
async fn is_quiet(tx: &mut Transaction, session: SessionKey, now: Timestamp) -> Result<bool, Failure> {
    let open = format!(
        "{SESSION}SELECT 1 FROM s JOIN threads t ON t.no = s.no WHERE t.status <> 'closed' \
         UNION ALL SELECT 1 FROM outbox WHERE session = $1 LIMIT 1"
    );
    if tx.query(Statement::new(open).session(session)).await?.is_empty() {
        return Ok(true);
    }
    let damaged = "SELECT 1 FROM damaged d JOIN threads t ON t.no = d.thread AND t.version = d.version \
                   JOIN threads r ON r.no = d.session WHERE r.no = $1 AND r.updated_at < $2 LIMIT 1";
    let damaged = Statement::new(damaged).session(session).with(now.minus(DAMAGED_WAIT).0);
    Ok(!tx.query(damaged).await?.is_empty())
}

/// Returns a fork in another session that inherits from this one. Its head is not needed. It may be damaged.
async fn next_fork(tx: &mut Transaction, session: SessionKey) -> Result<Option<Arc<Thread>>, Failure> {
    let sql = format!(
        "{SESSION}SELECT f.no FROM s JOIN threads f ON f.source = s.no \
         WHERE f.parent IS NULL AND f.source IS NOT NULL AND f.session <> $1 LIMIT 1"
    );
    let found = tx.query(Statement::new(sql).session(session)).await?;
    let Some(row) = found.first() else { return Ok(None) };
    let found = tx.query(heads::by_key(thread_key(row, 0)?)).await?;
    let fork = found.first().map(heads::loaded_or_damaged).transpose()?;
    Ok(fork.map(|(Loaded { thread, .. }, _)| thread))
}

/// Copies the next entries that a fork inherits. After the last ones, the fork no longer inherits. Until then it reads
/// none of the copies.
async fn copy_inherited(mut tx: Transaction, fork: &Thread) -> Result<(), Failure> {
    // The session of the fork may be deleted, too, which must not miss a copy.
    let lock = Statement::new("SELECT 1 FROM threads WHERE no = $1 FOR UPDATE").thread(fork.key);
    let sql = "SELECT coalesce(max(seq), 0) FROM entries WHERE thread = $1 AND seq <= $2";
    let copied = Statement::new(sql).thread(fork.key).with(fork.inherits.cast_signed());
    let found = tx.pipeline(&[lock, copied]).await?;
    if found[0].is_empty() {
        return Ok(());
    }
    let copied = found[1].first().map_or(Ok(0), |row| get::<i64>(row, 0))?;
    let (mut after, mut rows, mut bytes, mut is_last) = (copied.unsigned_abs(), 0, 0, false);
    // The fork is locked meanwhile.
    while rows < BATCH_ROWS && bytes < PAGE_BYTES {
        let page = inherited_page(&mut tx, fork, after).await?;
        let Some((last, _)) = page.last() else {
            is_last = true;
            break;
        };
        after = *last;
        rows += page.len();
        bytes += page.iter().map(|(_, body)| body.len()).sum::<usize>();
        let (numbers, bodies): (Vec<i64>, Vec<String>) =
            page.into_iter().map(|(seq, body)| (seq.cast_signed(), super::statement::clean(&body))).unzip();
        let sql = "INSERT INTO entries (session, thread, seq, body) \
                   SELECT $1, $2, seq, body FROM unnest($3::bigint[], $4::text[]) AS e(seq, body) \
                   ON CONFLICT DO NOTHING";
        tx.query(Statement::new(sql).session(fork.session).thread(fork.key).with(numbers).with(bodies))
            .await?;
    }
    let mut last = Vec::new();
    if is_last {
        last.push(history::copy_summaries(&mut tx, fork).await?);
        let sql = "UPDATE threads SET inherits = 0, source = NULL WHERE no = $1";
        last.push(Statement::new(sql).thread(fork.key));
    }
    tx.finish(&last).await?;
    Ok(())
}

/// Deletes rows of a session, the deepest threads first. Returns true if nothing is left of it.
async fn delete_rows(mut tx: Transaction, session: SessionKey) -> Result<bool, Failure> {
    let sql = format!(
        "{SESSION}SELECT t.no, t.id FROM s JOIN threads t ON t.no = s.no ORDER BY s.depth DESC, s.no LIMIT $2 \
         FOR UPDATE OF t"
    );
    let found = tx.query(Statement::new(sql).session(session).with(THREADS)).await?;
    let threads: Vec<i64> = found.iter().map(|row| get(row, 0)).collect::<Result<_, _>>()?;
    let ids: Vec<String> = found.iter().map(|row| get(row, 1)).collect::<Result<_, _>>()?;
    let mut left = BATCH_ROWS as i64;
    let delete = |table: &str, kind: &str| {
        format!(
            "WITH gone AS (DELETE FROM {table} WHERE ctid = ANY(ARRAY(\
             SELECT ctid FROM {table} WHERE thread = ANY($1::{kind}[]) LIMIT $2)) RETURNING 1) \
             SELECT count(*) FROM gone"
        )
    };
    let by_key = BY_KEY.iter().map(|table| (delete(table, "bigint"), true));
    for (sql, is_key) in by_key.chain(BY_ID.iter().map(|table| (delete(table, "text"), false))) {
        let statement = Statement::new(sql);
        let statement = if is_key { statement.with(threads.clone()) } else { statement.with(ids.clone()) };
        let rows = tx.query(statement.with(left)).await?;
        left -= rows.first().map_or(Ok(0), |row: &Row| get::<i64>(row, 0))?;
        if left <= 0 {
            tx.finish(&[]).await?;
            return Ok(false);
        }
    }
    let counts = "INSERT INTO thread_counts (status, change) \
                  SELECT status, -count(*) FROM threads WHERE no = ANY($1) GROUP BY status";
    // A fork that was imported meanwhile has its whole history, but may name its source.
    let sources = "UPDATE threads SET source = NULL \
                   WHERE source = ANY($1) AND source IS NOT NULL AND parent IS NULL AND inherits = 0";
    let mut last = vec![
        Statement::new(sources).with(threads.clone()),
        Statement::new(counts).with(threads.clone()),
        Statement::new("DELETE FROM threads WHERE no = ANY($1)").with(threads.clone()),
    ];
    let is_gone = threads.is_empty() || threads.contains(&session.0.number());
    if is_gone {
        let delete = |table: &&str| format!("DELETE FROM {table} WHERE session = $1");
        last.extend(BY_SESSION.iter().map(|table| Statement::new(delete(table)).session(session)));
    }
    tx.finish(&last).await?;
    Ok(is_gone)
}
