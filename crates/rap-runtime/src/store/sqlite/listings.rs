//! Listings over all threads, page by page. All of them except the inbox, which is small, are read in index order, so
//! the cost of a page depends only on its size.

use rap_agent::{Server, Status};
use rap_api::TimerKind;
use rap_io::secret_box::Key;
use rap_protocol::{CallId, ThreadId, Timestamp};
use rusqlite::types::{Type, ValueRef};
use rusqlite::{Connection, Row, Rows, params};

use super::heads::{self, call_id, skip_unreadable, thread_id, unreadable};
use super::history::{thread_row, thread_rows};
use crate::store::stored::{self, PAGE_BYTES};
use crate::store::{
    CallRow, Cursor, InboxItem, Loaded, Page, PageRequest, StoredQuestion, SubscriptionRow, Thread,
    ThreadFilter, ThreadKey, ThreadRow, TimerRow, ViewRow,
};

// The parameters of each query are the cursor after which the page begins, and the number of rows.

/// Calls with nothing left to send come first, then new ones, then retries. The times of retries are shifted, so that a
/// cursor tells which of the three parts it is in.
const CALLS: &str = "SELECT * FROM (\
         SELECT NULL, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, c.acknowledged_at, c.attempts, c.outcome \
         FROM calls c JOIN threads t ON t.no = c.thread \
         WHERE c.state = 0 AND c.invoke_at IS NULL AND ?1 IS NULL AND (c.thread, c.id) > (?2, ?3) \
         ORDER BY c.thread, c.id LIMIT ?4) \
     UNION ALL SELECT * FROM (\
         SELECT c.invoke_at, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, c.acknowledged_at, \
                c.attempts, c.outcome \
         FROM calls c JOIN threads t ON t.no = c.thread \
         WHERE c.state = 0 AND c.invoke_at IS NOT NULL AND c.attempts = 0 AND coalesce(?1, 0) < 100000000000000 \
         AND (c.server, c.root, c.invoke_at, c.thread, c.id) > (\
             CASE WHEN ?1 IS NULL THEN '' ELSE (SELECT server FROM calls WHERE thread = ?2 AND id = ?3) END, \
             CASE WHEN ?1 IS NULL THEN 0 ELSE (SELECT root FROM calls WHERE thread = ?2 AND id = ?3) END, \
             coalesce(?1, -1), ?2, ?3) \
         ORDER BY c.server, c.root, c.invoke_at, c.thread, c.id LIMIT ?4) \
     UNION ALL SELECT * FROM (\
         SELECT c.invoke_at + 100000000000000, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, \
                c.acknowledged_at, c.attempts, c.outcome \
         FROM calls c JOIN threads t ON t.no = c.thread \
         WHERE c.state = 0 AND c.invoke_at IS NOT NULL AND c.attempts > 0 \
         AND (c.invoke_at, c.thread, c.id) > (CASE WHEN coalesce(?1, 0) < 100000000000000 THEN -1 \
             ELSE ?1 - 100000000000000 END, ?2, ?3) \
         ORDER BY c.invoke_at, c.thread, c.id LIMIT ?4) LIMIT ?4";
const SUBSCRIPTIONS: &str = "SELECT c.since, c.thread, c.id, t.id, c.name, c.server, \
            (SELECT count(*) FROM backlog b WHERE b.thread = c.thread AND b.call = c.id) / 2 \
     FROM calls c JOIN threads t ON t.no = c.thread \
     WHERE c.state = 5 AND (c.since, c.thread, c.id) > (coalesce(?1, -1), ?2, ?3) \
     ORDER BY c.since, c.thread, c.id LIMIT ?4";
const TIMERS: &str = "SELECT c.until, c.thread, c.id, t.id, c.name, \
            CASE WHEN c.server != ?5 THEN 0 WHEN c.state = 0 THEN 1 ELSE 2 END \
     FROM calls c JOIN threads t ON t.no = c.thread \
     WHERE c.until IS NOT NULL AND (c.until, c.thread, c.id) > (coalesce(?1, -1), ?2, ?3) \
     UNION ALL SELECT due, no, '', id, NULL, 3 FROM threads \
     WHERE due IS NOT NULL AND status IN ('failed', 'needs_you') AND (due, no, '') > (coalesce(?1, -1), ?2, ?3) \
     ORDER BY 1, 2, 3 LIMIT ?4";

/// Size of the texts and blobs of a row, in bytes.
fn row_bytes(row: &Row<'_>) -> rusqlite::Result<usize> {
    let columns = row.as_ref().column_count();
    (0..columns).try_fold(0, |bytes, column| {
        Ok(bytes
            + match row.get_ref(column)? {
                ValueRef::Text(text) => text.len(),
                ValueRef::Blob(blob) => blob.len(),
                _ => 0,
            })
    })
}

/// Number of rows to read. One more than the page holds, to find out whether there is another page.
fn rows(page_request: &PageRequest) -> i64 {
    i64::try_from(page_request.limit).unwrap_or(i64::MAX).saturating_add(1)
}

/// Reads a page. The first three columns of a row are its cursor. Unreadable rows are skipped. A page ends early if its
/// rows are large.
fn page<T>(
    mut found: Rows<'_>,
    limit: usize,
    read: impl Fn(&Row<'_>) -> rusqlite::Result<Option<T>>,
) -> rusqlite::Result<Page<T>> {
    let (mut rows, mut last, mut count, mut bytes) = (Vec::new(), None, 0, 0);
    while let Some(row) = found.next()? {
        if count == limit || bytes >= PAGE_BYTES {
            return Ok(Page { rows, next: last });
        }
        count += 1;
        bytes += row_bytes(row)?;
        let thread = row.get(1)?;
        last = Some(Cursor { at: row.get(0)?, thread, id: row.get(2)? });
        rows.extend(skip_unreadable(thread, read(row))?.flatten());
    }
    Ok(Page { rows, next: None })
}

/// Returns the condition on a thread `t`. Its parameters are the cursor, the parent and the limit. The status is a
/// literal in the SQL, so that SQLite can use the partial index for it.
fn condition(filter: &ThreadFilter) -> String {
    let status = match filter.status {
        None => String::new(),
        // Few threads are running. They are found by two indexes that are not in the order of the listing.
        Some(Status::Running) => "AND t.no IN (\
             SELECT no FROM threads INDEXED BY threads_ask WHERE ask IS NOT NULL AND ask_attempts = 0 \
             UNION ALL SELECT no FROM threads INDEXED BY threads_retry WHERE ask_attempts > 0)"
            .into(),
        Some(status) => format!("AND t.status = '{}'", status.as_str()),
    };
    // The statement must use the parameter even if there is no parent.
    let parent = match filter.parent {
        None => "AND ?2 IS NOT NULL",
        Some(_) => "AND t.parent = (SELECT no FROM threads WHERE id = ?2)",
    };
    format!("WHERE t.no > ?1 {status} {parent} ORDER BY t.no LIMIT ?3")
}

pub(super) fn threads(conn: &Connection, filter: &ThreadFilter) -> rusqlite::Result<Page<ThreadRow>> {
    let sql = format!("{} {}", thread_rows(), condition(filter));
    let parent = filter.parent.as_ref().map_or("", ThreadId::as_str);
    let PageRequest { after, limit } = &filter.page_request;
    let row = params![after.thread, parent, rows(&filter.page_request)];
    let mut statement = conn.prepare_cached(&sql)?;
    let mut found = statement.query(row)?;
    let (mut rows, mut last, mut count, mut bytes) = (Vec::new(), None, 0, 0);
    while let Some(row) = found.next()? {
        if count == *limit || bytes >= PAGE_BYTES {
            let next = last.map(|thread| Cursor { thread, ..Cursor::default() });
            return Ok(Page { rows, next });
        }
        count += 1;
        bytes += row_bytes(row)?;
        let thread = row.get(0)?;
        last = Some(thread);
        rows.extend(skip_unreadable(thread, thread_row(row))?);
    }
    Ok(Page { rows, next: None })
}

pub(super) fn views(conn: &Connection, thread: ThreadKey) -> rusqlite::Result<Vec<ViewRow>> {
    let sql = "SELECT server, view_type, content, at FROM views WHERE thread = ?1 ORDER BY at DESC";
    let view = |row: &Row<'_>| {
        Ok(ViewRow {
            server: row.get(0)?,
            view_type: row.get(1)?,
            content: serde_json::from_str(row.get_ref(2)?.as_str()?).map_err(unreadable)?,
            at: Timestamp(row.get(3)?),
        })
    };
    conn.prepare_cached(sql)?.query_map([thread], view)?.collect()
}

pub(super) fn inbox(
    conn: &Connection,
    key: &Key,
    thread: Option<ThreadKey>,
    page_request: &PageRequest,
) -> rusqlite::Result<Page<InboxItem>> {
    let mut statement = conn.prepare_cached(
        "SELECT q.asked_at, q.thread, CAST(q.no AS TEXT), q.no, q.call, q.body, c.name FROM questions q \
         JOIN calls c ON c.thread = q.thread AND c.id = q.call \
         WHERE q.answer IS NULL AND (?5 IS NULL OR q.thread = ?5) \
         AND (q.asked_at, q.thread, q.no) > (coalesce(?1, -1), ?2, CAST(?3 AS INTEGER)) \
         ORDER BY q.asked_at, q.thread, q.no LIMIT ?4",
    )?;
    let Cursor { at, thread: of, id } = &page_request.after;
    let found = statement.query(params![at, of, id, rows(page_request), thread])?;
    page(found, page_request.limit, |row| {
        let of = row.get(1)?;
        let Some(Loaded { thread, .. }) = skip_unreadable(of, heads::load(conn, of))?.flatten() else {
            return Ok(None);
        };
        let no = row.get::<_, i64>(3)?.cast_unsigned();
        let question = decrypt_question(key, &thread, no, row.get_ref(5)?.as_blob()?);
        let Some(question) = skip_unreadable(of, question)? else { return Ok(None) };
        Ok(Some(InboxItem {
            question,
            thread: thread.id.clone(),
            call: call_id(row, 4)?,
            asked_at: Timestamp(row.get(0)?),
            tool: row.get(6)?,
        }))
    })
}

/// Lists open calls: those with nothing left to send first, then the others.
pub(super) fn calls(conn: &Connection, page_request: &PageRequest) -> rusqlite::Result<Page<CallRow>> {
    let mut statement = conn.prepare_cached(CALLS)?;
    let Cursor { at, thread, id: after } = &page_request.after;
    let found = statement.query(params![at, thread, after, rows(page_request)])?;
    page(found, page_request.limit, |row| {
        Ok(Some(CallRow {
            thread: thread_id(row, 3)?,
            call: call_id(row, 2)?,
            tool: row.get(4)?,
            server: row.get(5)?,
            since: Timestamp(row.get(6)?),
            until: row.get::<_, Option<i64>>(7)?.map(Timestamp),
            acknowledged_at: row.get::<_, Option<i64>>(8)?.map(Timestamp),
            next_attempt_at: row.get::<_, Option<i64>>(0)?.map(Timestamp),
            attempts: row.get(9)?,
            outcome: row.get(10)?,
        }))
    })
}

/// Lists active subscriptions, oldest first.
pub(super) fn subscriptions(
    conn: &Connection,
    page_request: &PageRequest,
) -> rusqlite::Result<Page<SubscriptionRow>> {
    let mut statement = conn.prepare_cached(SUBSCRIPTIONS)?;
    let Cursor { at, thread, id: after } = &page_request.after;
    let found = statement.query(params![at, thread, after, rows(page_request)])?;
    page(found, page_request.limit, |row| {
        Ok(Some(SubscriptionRow {
            thread: thread_id(row, 3)?,
            call: call_id(row, 2)?,
            tool: row.get(4)?,
            server: row.get(5)?,
            since: Timestamp(row.get(0)?),
            waiting: row.get::<_, i64>(6)?.unsigned_abs(),
        }))
    })
}

pub(super) fn timers(conn: &Connection, page_request: &PageRequest) -> rusqlite::Result<Page<TimerRow>> {
    let mut statement = conn.prepare_cached(TIMERS)?;
    let Cursor { at, thread, id: after } = &page_request.after;
    let found = statement.query(params![at, thread, after, rows(page_request), Server::runtime().0])?;
    page(found, page_request.limit, |row| {
        let kind = usize::from(row.get::<_, u8>(5)?);
        let call = Some(row.get::<_, String>(2)?).filter(|call| !call.is_empty());
        Ok(Some(TimerRow {
            thread: thread_id(row, 3)?,
            call: call.map(CallId::new).transpose().map_err(unreadable)?,
            tool: row.get(4)?,
            at: Timestamp(row.get(0)?),
            kind: TimerKind::ALL[kind],
        }))
    })
}

/// Decrypts a stored question.
pub(super) fn decrypt_question(
    key: &Key,
    thread: &Thread,
    no: u64,
    sealed: &[u8],
) -> rusqlite::Result<StoredQuestion> {
    stored::decrypt_question(key, thread, no, sealed)
        .map_err(|error| rusqlite::Error::FromSqlConversionFailure(0, Type::Blob, error))
}

#[cfg(test)]
mod tests {
    use rusqlite::params;

    use super::*;
    use crate::store::sqlite::tests::database;

    /// The cost of a page does not depend on the number of rows: it is found by an index and nothing is sorted.
    #[test]
    fn a_page_is_read_by_an_index_without_sorting() {
        let conn = database();
        let table = [
            (CALLS, "calls_due ((server,root,invoke_at,thread,id)>"),
            (CALLS, "calls_retry_at ((invoke_at,thread,id)>"),
            (CALLS, "calls_taken ((thread,id)>"),
            (SUBSCRIPTIONS, "calls_subscribed ((since,thread,id)>"),
            (TIMERS, "calls_until ((until,thread,id)>"),
        ];
        for (sql, index) in table {
            let mut statement = conn.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
            let steps = statement.raw_query().mapped(|row| row.get::<_, String>(3));
            let plan = steps.map(Result::unwrap).collect::<Vec<_>>().join("\n");
            assert!(plan.contains(index), "{index}: {plan}");
            assert!(!plan.contains("TEMP B-TREE") && !plan.contains("SCAN c"), "{plan}");
        }
    }

    #[test]
    fn filtered_threads_are_found_by_an_index() {
        let conn = database();
        let plan = |status, parent| {
            let filter = ThreadFilter { status, parent, page_request: PageRequest::first(1) };
            let sql = format!("EXPLAIN QUERY PLAN SELECT head FROM threads t {}", condition(&filter));
            let mut statement = conn.prepare(&sql).unwrap();
            let steps = statement.query_map(params![0, "", 1], |row| row.get::<_, String>(3)).unwrap();
            steps.map(Result::unwrap).collect::<Vec<_>>().join("; ")
        };
        let table = [
            (Some(Status::NeedsYou), None, "threads_needs_you"),
            (Some(Status::Failed), None, "threads_failed"),
            (Some(Status::Running), None, "threads_ask"),
            (None, Some(ThreadId::new("p").unwrap()), "threads_parent"),
            (None, None, "INTEGER PRIMARY KEY"),
        ];
        for (status, parent, index) in table {
            let plan = plan(status, parent);
            assert!(plan.starts_with("SEARCH t ") && plan.contains(index), "{index}: {plan}");
        }
    }
}
