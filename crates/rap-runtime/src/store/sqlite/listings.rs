//! Listings over all threads, page by page. All but the questions, which are few, are read along an index, so that a page
//! costs what it shows.

use rap_agent::{Server, Status};
use rap_io::secret_box::Key;
use rap_protocol::{CallId, ThreadId, Timestamp};
use rusqlite::{Connection, Row, Rows, params};

use super::heads::{self, call_id, if_readable, thread_id, unreadable};
use super::history::{thread_row, thread_rows};
use super::writes::question_context;
use crate::store::{
    CallRow, Cursor, InboxItem, Loaded, Page, StoredQuestion, SubscriptionRow, Thread, ThreadFilter,
    ThreadKey, ThreadRow, TimerRow, ViewRow, Wanted,
};

// The parameters of each are the cursor that a page begins behind, and the number of rows.

/// Calls that nothing has to be sent for come first, then new ones, then those that are tried again. The time of the last
/// is shifted, so that a cursor tells which part it is in.
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

/// One more row tells whether there is another page.
fn rows(wanted: &Wanted) -> i64 {
    i64::try_from(wanted.limit).unwrap_or(i64::MAX).saturating_add(1)
}

/// Reads a page. The cursor of a row is in its first three columns; a row that cannot be read is passed over.
fn page<T>(
    mut found: Rows<'_>,
    limit: usize,
    read: impl Fn(&Row<'_>) -> rusqlite::Result<Option<T>>,
) -> rusqlite::Result<Page<T>> {
    let (mut rows, mut last, mut count) = (Vec::new(), None, 0);
    while let Some(row) = found.next()? {
        if count == limit {
            return Ok(Page { rows, next: last });
        }
        count += 1;
        let thread = row.get(1)?;
        last = Some(Cursor { at: row.get(0)?, thread, id: row.get(2)? });
        rows.extend(if_readable(thread, read(row))?.flatten());
    }
    Ok(Page { rows, next: None })
}

/// The condition on a thread `t`, whose parameters are the cursor, the parent and the limit. It is written out, so that its
/// index is found.
fn condition(filter: &ThreadFilter) -> String {
    let status = match filter.status {
        None => String::new(),
        // Threads that are asking are few. They are found by two indexes, which are not in the order of the listing.
        Some(Status::Running) => "AND t.no IN (\
             SELECT no FROM threads INDEXED BY threads_ask WHERE ask IS NOT NULL AND ask_attempts = 0 \
             UNION ALL SELECT no FROM threads INDEXED BY threads_retry WHERE ask_attempts > 0)"
            .into(),
        Some(status) => format!("AND t.status = '{}'", status.as_str()),
    };
    // Without a parent the parameter is there all the same.
    let parent = match filter.parent {
        None => "AND ?2 IS NOT NULL",
        Some(_) => "AND t.parent = (SELECT no FROM threads WHERE id = ?2)",
    };
    format!("WHERE t.no > ?1 {status} {parent} ORDER BY t.no LIMIT ?3")
}

pub(super) fn threads(conn: &Connection, filter: &ThreadFilter) -> rusqlite::Result<Page<ThreadRow>> {
    let sql = format!("{} {}", thread_rows(), condition(filter));
    let parent = filter.parent.as_ref().map_or("", ThreadId::as_str);
    let Wanted { after, limit } = &filter.wanted;
    let row = params![after.thread, parent, rows(&filter.wanted)];
    let mut statement = conn.prepare_cached(&sql)?;
    let mut found = statement.query(row)?;
    let (mut rows, mut last, mut count) = (Vec::new(), None, 0);
    while let Some(row) = found.next()? {
        if count == *limit {
            let next = last.map(|thread| Cursor { thread, ..Cursor::default() });
            return Ok(Page { rows, next });
        }
        count += 1;
        let thread = row.get(0)?;
        last = Some(thread);
        rows.extend(if_readable(thread, thread_row(row))?);
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
    wanted: &Wanted,
) -> rusqlite::Result<Page<InboxItem>> {
    let mut statement = conn.prepare_cached(
        "SELECT q.asked_at, q.thread, CAST(q.no AS TEXT), q.no, q.call, q.body, c.name FROM questions q \
         JOIN calls c ON c.thread = q.thread AND c.id = q.call \
         WHERE q.answer IS NULL AND (?5 IS NULL OR q.thread = ?5) \
         AND (q.asked_at, q.thread, q.no) > (coalesce(?1, -1), ?2, CAST(?3 AS INTEGER)) \
         ORDER BY q.asked_at, q.thread, q.no LIMIT ?4",
    )?;
    let Cursor { at, thread: of, id } = &wanted.after;
    let found = statement.query(params![at, of, id, rows(wanted), thread])?;
    page(found, wanted.limit, |row| {
        let of = row.get(1)?;
        let Some(Loaded { thread, .. }) = if_readable(of, heads::load(conn, of))?.flatten() else {
            return Ok(None);
        };
        let no = row.get::<_, i64>(3)?.cast_unsigned();
        let question = open_question(key, &thread, no, row.get_ref(5)?.as_blob()?);
        let Some(question) = if_readable(of, question)? else { return Ok(None) };
        Ok(Some(InboxItem {
            question,
            thread: thread.id.clone(),
            call: call_id(row, 4)?,
            asked_at: Timestamp(row.get(0)?),
            tool: row.get(6)?,
        }))
    })
}

/// Open calls: those that no tool server has to be sent, then the others.
pub(super) fn calls(conn: &Connection, wanted: &Wanted) -> rusqlite::Result<Page<CallRow>> {
    let mut statement = conn.prepare_cached(CALLS)?;
    let Cursor { at, thread, id: after } = &wanted.after;
    let found = statement.query(params![at, thread, after, rows(wanted)])?;
    page(found, wanted.limit, |row| {
        Ok(Some(CallRow {
            thread: thread_id(row, 3)?,
            call: call_id(row, 2)?,
            tool: row.get(4)?,
            server: row.get(5)?,
            since: Timestamp(row.get(6)?),
            until: row.get::<_, Option<i64>>(7)?.map(Timestamp),
            acknowledged_at: row.get::<_, Option<i64>>(8)?.map(Timestamp),
            attempts: row.get(9)?,
            outcome: row.get(10)?,
        }))
    })
}

/// Active subscriptions, the oldest first.
pub(super) fn subscriptions(conn: &Connection, wanted: &Wanted) -> rusqlite::Result<Page<SubscriptionRow>> {
    let mut statement = conn.prepare_cached(SUBSCRIPTIONS)?;
    let Cursor { at, thread, id: after } = &wanted.after;
    let found = statement.query(params![at, thread, after, rows(wanted)])?;
    page(found, wanted.limit, |row| {
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

pub(super) fn timers(conn: &Connection, wanted: &Wanted) -> rusqlite::Result<Page<TimerRow>> {
    let mut statement = conn.prepare_cached(TIMERS)?;
    let Cursor { at, thread, id: after } = &wanted.after;
    let found = statement.query(params![at, thread, after, rows(wanted), Server::runtime().0])?;
    page(found, wanted.limit, |row| {
        let kind = usize::from(row.get::<_, u8>(5)?);
        let call = Some(row.get::<_, String>(2)?).filter(|call| !call.is_empty());
        Ok(Some(TimerRow {
            thread: thread_id(row, 3)?,
            call: call.map(CallId::new).transpose().map_err(unreadable)?,
            tool: row.get(4)?,
            at: Timestamp(row.get(0)?),
            kind: ["timeout", "sleep", "schedule", "retry"][kind],
        }))
    })
}

/// A question, which is stored sealed.
pub(super) fn open_question(
    key: &Key,
    thread: &Thread,
    no: u64,
    sealed: &[u8],
) -> rusqlite::Result<StoredQuestion> {
    let plain = key.open(sealed, &question_context(thread, no)).map_err(unreadable)?;
    serde_json::from_slice(&plain).map_err(unreadable)
}

#[cfg(test)]
mod tests {
    use rusqlite::params;

    use super::*;
    use crate::store::sqlite::tests::database;

    /// However many rows there are, a page is read where it begins and nothing is sorted.
    #[test]
    fn a_page_costs_what_it_shows() {
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
    fn threads_that_are_few_are_found_by_an_index() {
        let conn = database();
        let plan = |status, parent| {
            let filter = ThreadFilter { status, parent, wanted: Wanted::first(1) };
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
