//! Deletes closed sessions, a bounded number of rows at a time.

use std::sync::Arc;

use rap_protocol::{ThreadId, Timestamp, UserId};
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::heads;
use super::history;
use super::writes::entry_key;
use crate::store::deletion::{
    BATCH_ROWS, DAMAGED_WAIT, EXAMINED, Expired, Expiry, RECHECK, RETRY, Remaining,
};
use crate::store::stored::PAGE_BYTES;
use crate::store::{Error, HistoryPage, Loaded, SessionKey, Thread, ThreadKey, Visibility};

/// Statements that delete up to `?2` rows of the thread `?1`.
const THREAD_ROWS: [&str; 13] = [
    "DELETE FROM damaged WHERE thread IN (SELECT thread FROM damaged WHERE thread = ?1 LIMIT ?2)",
    "DELETE FROM entries WHERE key IN (SELECT key FROM entries WHERE key > ?1 << 32 AND key < (?1 + 1) << 32 LIMIT ?2)",
    "DELETE FROM summaries WHERE thread = ?1 AND seq IN (SELECT seq FROM summaries WHERE thread = ?1 LIMIT ?2)",
    "DELETE FROM held WHERE thread = ?1 AND (queue, no) IN (SELECT queue, no FROM held WHERE thread = ?1 LIMIT ?2)",
    "DELETE FROM backlog WHERE thread = ?1 AND (call, no) IN (SELECT call, no FROM backlog WHERE thread = ?1 LIMIT ?2)",
    "DELETE FROM calls WHERE thread = ?1 AND id IN (SELECT id FROM calls WHERE thread = ?1 LIMIT ?2)",
    "DELETE FROM questions WHERE thread = ?1 AND no IN (SELECT no FROM questions WHERE thread = ?1 LIMIT ?2)",
    "DELETE FROM views WHERE thread = ?1 \
     AND (server, view_type) IN (SELECT server, view_type FROM views WHERE thread = ?1 LIMIT ?2)",
    "DELETE FROM seen WHERE thread = ?1 AND (call, event) IN (SELECT call, event FROM seen WHERE thread = ?1 LIMIT ?2)",
    "DELETE FROM ended_subscriptions WHERE thread = ?1 \
     AND call IN (SELECT call FROM ended_subscriptions WHERE thread = ?1 LIMIT ?2)",
    "DELETE FROM deliveries WHERE no IN (SELECT no FROM deliveries WHERE thread = ?1 LIMIT ?2)",
    "DELETE FROM repeats WHERE digest IN \
     (SELECT digest FROM repeats WHERE thread = (SELECT id FROM threads WHERE no = ?1) LIMIT ?2)",
    "DELETE FROM alerts WHERE no IN \
     (SELECT no FROM alerts WHERE thread = (SELECT id FROM threads WHERE no = ?1) LIMIT ?2)",
];
/// Statements that delete the rows of the session `?1` that belong to no thread. There is one for each tool server at most.
const SESSION_ROWS: [&str; 3] = [
    "DELETE FROM session_tools WHERE root = ?1",
    "DELETE FROM spending WHERE root = ?1",
    "DELETE FROM letters WHERE root = ?1",
];

/// Condition that the session of a thread `t` is not being deleted.
pub(super) const NOT_DELETED: &str = "NOT EXISTS (SELECT 1 FROM deletions d WHERE d.session = t.root)";

pub(super) fn is_marked(conn: &Connection, session: SessionKey) -> rusqlite::Result<bool> {
    conn.prepare_cached("SELECT 1 FROM deletions WHERE session = ?1")?.exists([session])
}

fn insert(conn: &Connection, session: SessionKey, now: Timestamp) -> rusqlite::Result<usize> {
    let sql = "INSERT OR IGNORE INTO deletions (session, due) VALUES (?1, ?2)";
    conn.prepare_cached(sql)?.execute(params![session, now.0])
}

/// Marks a closed session.
pub(super) fn mark(
    conn: &Connection,
    id: &ThreadId,
    visible: &Visibility,
    now: Timestamp,
) -> rusqlite::Result<Result<(), Error>> {
    let sql = format!(
        "SELECT no, parent, status FROM threads t WHERE id = ?1 AND (?2 IS NULL OR user_id = ?2) AND {NOT_DELETED}"
    );
    let user = visible.user().map(UserId::as_str);
    let found = |row: &Row<'_>| Ok((row.get(0)?, row.get::<_, Option<i64>>(1)?, row.get::<_, String>(2)?));
    let found = conn.prepare_cached(&sql)?.query_row(params![id.as_str(), user], found).optional()?;
    Ok(match found {
        None => Err(Error::NoThread),
        Some((_, Some(_), _)) => Err(Error::NotARoot),
        Some((_, None, status)) if status != "closed" => Err(Error::NotClosed),
        Some((session, None, _)) => {
            insert(conn, SessionKey(session), now)?;
            Ok(())
        }
    })
}

/// Looks at the next root threads, and counts or marks those that were closed before a time. A
/// session with a damaged thread does not expire: a backup may repair it.
pub(super) fn expire(
    conn: &Connection,
    before: Timestamp,
    after: Option<ThreadKey>,
    expiry: Expiry,
    now: Timestamp,
) -> rusqlite::Result<Expired> {
    let sql = format!(
        "SELECT no, status = 'closed' AND updated_at < ?3 AND {NOT_DELETED} AND NOT EXISTS \
         (SELECT 1 FROM damaged d JOIN threads x ON x.no = d.thread AND x.version = d.version WHERE x.root = t.no) \
         FROM threads t WHERE no > ?1 AND parent IS NULL ORDER BY no LIMIT ?2"
    );
    let mut statement = conn.prepare_cached(&sql)?;
    let row = params![after.map_or(0, ThreadKey::number), EXAMINED, before.0];
    let roots = statement.query_map(row, |row| Ok((row.get(0)?, row.get(1)?)))?;
    let roots = roots.collect::<rusqlite::Result<Vec<(ThreadKey, bool)>>>()?;
    let full = roots.len() as i64 == EXAMINED;
    let next = roots.last().filter(|_| full).map(|(root, _)| *root);
    let mut sessions = 0;
    for (root, _) in roots.into_iter().filter(|(_, is_expired)| *is_expired) {
        sessions += 1;
        if expiry == Expiry::Delete {
            insert(conn, SessionKey(root), now)?;
        }
    }
    Ok(Expired { sessions, next })
}

/// Returns the session whose rows are copied or deleted next.
pub(super) fn next(conn: &Connection, now: Timestamp) -> rusqlite::Result<Result<SessionKey, Remaining>> {
    let sql = "SELECT session FROM deletions WHERE due <= ?1 ORDER BY due, session LIMIT 1";
    if let Some(session) = conn.prepare_cached(sql)?.query_row([now.0], |row| row.get(0)).optional()? {
        return Ok(Ok(SessionKey(session)));
    }
    let waiting = conn.prepare_cached("SELECT 1 FROM deletions LIMIT 1")?.exists([])?;
    Ok(Err(if waiting { Remaining::Waiting } else { Remaining::None }))
}

fn set_due(conn: &Connection, session: SessionKey, due: Timestamp) -> rusqlite::Result<()> {
    let sql = "UPDATE deletions SET due = ?2 WHERE session = ?1";
    conn.prepare_cached(sql)?.execute(params![session, due.0])?;
    Ok(())
}

/// Postpones a session whose batch failed, so that others are deleted meanwhile.
pub(super) fn postpone(conn: &Connection, session: SessionKey, now: Timestamp) -> rusqlite::Result<()> {
    set_due(conn, session, now.plus(RETRY))
}

/// Copies or deletes up to [`BATCH_ROWS`] rows of a marked session.
pub(super) fn batch(conn: &Connection, session: SessionKey, now: Timestamp) -> rusqlite::Result<Remaining> {
    let sql = "SELECT is_ready FROM deletions WHERE session = ?1";
    let is_ready = conn.prepare_cached(sql)?.query_row([session], |row| row.get(0)).optional()?;
    let Some(is_ready) = is_ready else { return Ok(Remaining::Some) };
    if is_ready {
        delete_rows(conn, session)?;
    } else if !is_quiet(conn, session, now)? {
        set_due(conn, session, now.plus(RECHECK))?;
    } else if let Some(fork) = next_fork(conn, session)? {
        copy_inherited(conn, &fork)?;
    } else {
        let sql = "UPDATE deletions SET is_ready = 1 WHERE session = ?1";
        conn.prepare_cached(sql)?.execute([session])?;
    }
    Ok(Remaining::Some)
}

/// Returns true if all threads of a session are closed and no message between them is on its way, or if that will not
/// happen because a thread is damaged.
fn is_quiet(conn: &Connection, session: SessionKey, now: Timestamp) -> rusqlite::Result<bool> {
    let open = "SELECT 1 FROM threads WHERE root = ?1 AND parent IS NOT NULL AND status <> 'closed' \
                UNION ALL SELECT 1 FROM letters WHERE root = ?1";
    if !conn.prepare_cached(open)?.exists([session])? {
        return Ok(true);
    }
    let damaged = "SELECT 1 FROM damaged d JOIN threads t ON t.no = d.thread AND t.version = d.version \
                   JOIN threads r ON r.no = t.root WHERE r.no = ?1 AND r.updated_at < ?2";
    conn.prepare_cached(damaged)?.exists(params![session, now.minus(DAMAGED_WAIT).0])
}

/// Returns a fork in another session that inherits from this one. Its head is not needed. It may be damaged.
fn next_fork(conn: &Connection, session: SessionKey) -> rusqlite::Result<Option<Arc<Thread>>> {
    let sql = format!(
        "SELECT {} FROM threads t WHERE t.no = (SELECT f.no FROM threads s \
         JOIN threads f ON f.source = s.no AND f.parent IS NULL \
         WHERE (s.no = ?1 OR (s.root = ?1 AND s.parent IS NOT NULL)) AND f.root <> ?1 LIMIT 1)",
        heads::THREAD_COLUMNS
    );
    let fork = conn.prepare_cached(&sql)?.query_row([session], heads::loaded_or_damaged).optional()?;
    Ok(fork.map(|(Loaded { thread, .. }, _)| thread))
}

/// Copies the next entries that a fork inherits. After the last ones, the fork no longer inherits. Until then it reads
/// none of the copies.
fn copy_inherited(conn: &Connection, fork: &Thread) -> rusqlite::Result<()> {
    let sql = "SELECT coalesce(max(key), ?1) & 4294967295 FROM entries WHERE key > ?1 AND key <= ?2";
    let range = params![entry_key(fork.key, 0), entry_key(fork.key, fork.inherits)];
    let copied: i64 = conn.prepare_cached(sql)?.query_row(range, |row| row.get(0))?;
    let page = HistoryPage {
        after: copied.unsigned_abs(),
        up_to: fork.inherits,
        rows: BATCH_ROWS,
        bytes: PAGE_BYTES,
    };
    let entries = history::for_copy(conn, fork, page)?;
    let is_last = entries.last().is_none_or(|(seq, _)| *seq >= fork.inherits);
    let sql = "INSERT OR REPLACE INTO entries (key, body) VALUES (?1, ?2)";
    let mut insert = conn.prepare_cached(sql)?;
    for (seq, body) in entries {
        insert.execute(params![entry_key(fork.key, seq), body])?;
    }
    if is_last {
        history::copy_summaries(conn, fork)?;
        let sql = "UPDATE threads SET born_at = 0, source = NULL WHERE no = ?1";
        conn.prepare_cached(sql)?.execute([fork.key])?;
    }
    Ok(())
}

/// Deletes rows of a session, threads with the highest keys first, so that children are deleted before their parents.
fn delete_rows(conn: &Connection, session: SessionKey) -> rusqlite::Result<()> {
    let sql = "SELECT no FROM threads WHERE root = ?1 AND parent IS NOT NULL ORDER BY no DESC LIMIT 1";
    let mut children = conn.prepare_cached(sql)?;
    let mut left = BATCH_ROWS;
    loop {
        let child: Option<ThreadKey> = children.query_row([session], |row| row.get(0)).optional()?;
        let thread = child.unwrap_or(session.0);
        for sql in THREAD_ROWS {
            left -= conn.prepare_cached(sql)?.execute(params![thread, left as i64])?;
            if left == 0 {
                return Ok(());
            }
        }
        if child.is_none() {
            for sql in SESSION_ROWS {
                conn.prepare_cached(sql)?.execute([session])?;
            }
            conn.prepare_cached("DELETE FROM deletions WHERE session = ?1")?.execute([session])?;
        }
        // A fork that was imported meanwhile has its whole history, but may name its source.
        let sql = "UPDATE threads SET source = NULL WHERE source = ?1 AND parent IS NULL AND born_at = 0";
        conn.prepare_cached(sql)?.execute([thread])?;
        conn.prepare_cached("DELETE FROM threads WHERE no = ?1")?.execute([thread])?;
        left -= 1;
        if child.is_none() || left == 0 {
            return Ok(());
        }
    }
}
