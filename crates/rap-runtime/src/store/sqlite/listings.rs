//! Listings over all threads or those of a user, page by page. All of them except the inbox of all threads, which is
//! small, are read in index order, so the cost of a page depends only on its size.

use rap_agent::{Server, Status, Usage};
use rap_api::TimerKind;
use rap_io::secret_box::Key;
use rap_protocol::{CallId, ThreadId, Timestamp, UserId};
use rusqlite::types::{Type, ValueRef};
use rusqlite::{Connection, OptionalExtension, Row, Rows, params};

use super::deletion::NOT_DELETED;
use super::facts;
use super::heads::{self, call_id, skip_unreadable, thread_id, unreadable};
use super::history::{thread_row, thread_rows};
use crate::store::stored::{self, PAGE_BYTES};
use crate::store::{
    CallRow, Cursor, InboxItem, Loaded, Page, PageRequest, RecentEvents, SessionKey, StoredQuestion,
    SubscriptionRow, Thread, ThreadFilter, ThreadKey, ThreadRow, TimerRow, ViewKey, ViewRow, Visibility,
};

// The parameters of each query are the cursor after which the page begins (1 to 3), the number of rows (4) and the user
// whose rows are listed (5). `{user}` is replaced by a condition on the user.

/// Calls with nothing left to send come first, then new ones, then retries. The times of retries are shifted, so that a
/// cursor tells which of the three parts it is in.
const CALLS: &str = "SELECT * FROM (\
         SELECT NULL, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, c.acknowledged_at, c.attempts, c.outcome, \
                c.invoke_at \
         FROM calls c JOIN threads t ON t.no = c.thread \
         WHERE c.state = 0 AND c.invoke_at IS NULL AND ?1 IS NULL AND (c.thread, c.id) > (?2, ?3) \
         ORDER BY c.thread, c.id LIMIT ?4) \
     UNION ALL SELECT * FROM (\
         SELECT c.invoke_at, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, c.acknowledged_at, \
                c.attempts, c.outcome, c.invoke_at \
         FROM calls c JOIN threads t ON t.no = c.thread \
         WHERE c.state = 0 AND c.invoke_at IS NOT NULL AND c.attempts = 0 AND coalesce(?1, 0) < 100000000000000 \
         AND (c.server, c.root, c.invoke_at, c.thread, c.id) > (\
             CASE WHEN ?1 IS NULL THEN '' ELSE (SELECT server FROM calls WHERE thread = ?2 AND id = ?3) END, \
             CASE WHEN ?1 IS NULL THEN 0 ELSE (SELECT root FROM calls WHERE thread = ?2 AND id = ?3) END, \
             coalesce(?1, -1), ?2, ?3) \
         ORDER BY c.server, c.root, c.invoke_at, c.thread, c.id LIMIT ?4) \
     UNION ALL SELECT * FROM (\
         SELECT c.invoke_at + 100000000000000, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, \
                c.acknowledged_at, c.attempts, c.outcome, c.invoke_at \
         FROM calls c JOIN threads t ON t.no = c.thread \
         WHERE c.state = 0 AND c.invoke_at IS NOT NULL AND c.attempts > 0 \
         AND (c.invoke_at, c.thread, c.id) > (CASE WHEN coalesce(?1, 0) < 100000000000000 THEN -1 \
             ELSE ?1 - 100000000000000 END, ?2, ?3) \
         ORDER BY c.invoke_at, c.thread, c.id LIMIT ?4) WHERE ?5 IS NULL LIMIT ?4";
/// Calls of one user, by thread.
const CALLS_OF_USER: &str = "SELECT NULL, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, c.acknowledged_at, \
            c.attempts, c.outcome, c.invoke_at \
     FROM calls c JOIN threads t ON t.no = c.thread \
     WHERE c.state = 0 AND c.user_id = ?5 AND ?1 IS NULL AND (c.thread, c.id) > (?2, ?3) \
     ORDER BY c.thread, c.id LIMIT ?4";
const SUBSCRIPTIONS: &str = "SELECT c.since, c.thread, c.id, t.id, c.name, c.server, \
            (SELECT count(*) FROM backlog b WHERE b.thread = c.thread AND b.call = c.id) / 2, \
            (SELECT max(s.at) || ' ' || min(s.at) || ' ' || count(*) FROM (SELECT at FROM seen \
                WHERE thread = c.thread AND call = c.id ORDER BY no DESC LIMIT 100) AS s WHERE s.at > 0) \
     FROM calls c JOIN threads t ON t.no = c.thread \
     WHERE c.state = 5 AND {user} AND (c.since, c.thread, c.id) > (coalesce(?1, -1), ?2, ?3) \
     ORDER BY c.since, c.thread, c.id LIMIT ?4";
const TIMERS: &str = "SELECT c.until, c.thread, c.id, t.id, c.name, \
            CASE WHEN c.server != ?6 THEN 0 WHEN c.state = 0 THEN 1 ELSE 2 END, max(c.since, t.updated_at) \
     FROM calls c JOIN threads t ON t.no = c.thread \
     WHERE c.until IS NOT NULL AND {user} AND (c.until, c.thread, c.id) > (coalesce(?1, -1), ?2, ?3) \
     UNION ALL SELECT c.due, c.no, '', c.id, NULL, 3, c.updated_at FROM threads c \
     WHERE c.due IS NOT NULL AND {user} AND c.status IN ('failed', 'needs_you') AND (c.due, c.no, '') > (coalesce(?1, -1), ?2, ?3) \
     ORDER BY 1, 2, 3 LIMIT ?4";

/// Questions of one thread (6) or of all.
const INBOX: &str = "SELECT c.asked_at, c.thread, CAST(c.no AS TEXT), c.no, c.call, c.body, k.name, e.body FROM questions c \
     JOIN calls k ON k.thread = c.thread AND k.id = c.call \
     LEFT JOIN entries e ON ?6 IS NULL AND e.key = ((k.thread << 32) | k.seq) \
     WHERE c.answer IS NULL AND (?6 IS NULL OR c.thread = ?6) AND {user} \
     AND (c.asked_at, c.thread, c.no) > (coalesce(?1, -1), ?2, CAST(?3 AS INTEGER)) \
     ORDER BY c.asked_at, c.thread, c.no LIMIT ?4";

/// Returns the query for the rows that are visible. `c` is the table with the user.
fn for_user(sql: &str, visible: &Visibility) -> String {
    match visible {
        Visibility::All => sql.replace("{user}", "?5 IS NULL"),
        Visibility::User(_) => sql.replace("{user}", "c.user_id = ?5"),
    }
}

/// Returns the query for open calls. Those of a user are in another order, for which there is an index.
fn calls_query(visible: &Visibility) -> &'static str {
    match visible {
        Visibility::All => CALLS,
        Visibility::User(_) => CALLS_OF_USER,
    }
}

fn user(visible: &Visibility) -> Option<&str> {
    visible.user().map(UserId::as_str)
}

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

/// Returns the condition on a thread `t`. Its parameters are the cursor, the parent, the limit and the user. The status
/// is a literal in the SQL, so that SQLite can use the partial index for it.
fn condition(filter: &ThreadFilter) -> String {
    let status = match filter.status {
        None => String::new(),
        // Few threads are running. They are found by two indexes that are not in the order of the listing.
        Some(Status::Running) if filter.visible == Visibility::All => "AND t.no IN (\
             SELECT no FROM threads INDEXED BY threads_ask WHERE ask IS NOT NULL AND ask_attempts = 0 \
             UNION ALL SELECT no FROM threads INDEXED BY threads_retry WHERE ask_attempts > 0)"
            .into(),
        Some(status) => format!("AND t.status = '{}'", status.as_str()),
    };
    // The statement must use each parameter, even if there is no parent or user.
    let parent = match filter.parent {
        None => "AND ?2 IS NOT NULL",
        // Children have the user of their parent.
        Some(_) => "AND t.parent = (SELECT no FROM threads WHERE id = ?2 AND (?4 IS NULL OR user_id = ?4))",
    };
    let user = match (&filter.parent, &filter.visible) {
        (Some(_), _) => "",
        (None, Visibility::All) => "AND ?4 IS NULL",
        (None, Visibility::User(_)) => "AND t.user_id = ?4",
    };
    let roots = if filter.roots { "AND t.parent IS NULL" } else { "" };
    let (compared, order) = filter.direction();
    format!(
        "WHERE t.no {compared} ?1 {status} {parent} {roots} {user} AND {NOT_DELETED} ORDER BY t.no {order} LIMIT ?3"
    )
}

pub(super) fn threads(conn: &Connection, filter: &ThreadFilter) -> rusqlite::Result<Page<ThreadRow>> {
    let sql = format!("{} {}", thread_rows(), condition(filter));
    let parent = filter.parent.as_ref().map_or("", ThreadId::as_str);
    let limit = &filter.page_request.limit;
    let row = params![filter.begins_after(), parent, rows(&filter.page_request), user(&filter.visible)];
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
        rows.extend(skip_unreadable(thread, thread_row(row))?.filter(|row| filter.has_status(row)));
    }
    Ok(Page { rows, next: None })
}

fn view_row(row: &Row<'_>) -> rusqlite::Result<ViewRow> {
    Ok(ViewRow {
        key: ViewKey { server: row.get(0)?, view_type: row.get(1)? },
        content: serde_json::from_str(row.get_ref(2)?.as_str()?).map_err(unreadable)?,
        at: Timestamp(row.get(3)?),
    })
}

/// Returns the sums of all threads of a session. The root has no parent.
pub(super) fn session_usage(conn: &Connection, session: SessionKey) -> rusqlite::Result<(Usage, u64)> {
    let sql = "SELECT count(*), total(head ->> '$.usage.input'), total(head ->> '$.usage.output'),
                      total(head ->> '$.usage.cached'), total(head ->> '$.usage.written'), total(head ->> '$.usage.cost')
               FROM (SELECT head FROM threads WHERE no = ?1
                     UNION ALL SELECT head FROM threads WHERE root = ?1 AND parent IS NOT NULL)";
    conn.prepare_cached(sql)?.query_row([session], |row| {
        let number = |at: usize| row.get::<_, f64>(at).map(|sum| sum as u64);
        let (input, output, cached) = (number(1)?, number(2)?, number(3)?);
        Ok((
            Usage { input, output, cached, written: number(4)?, cost: number(5)? },
            row.get::<_, u32>(0)?.into(),
        ))
    })
}

pub(super) fn views(
    conn: &Connection,
    thread: ThreadKey,
    after: Option<ViewKey>,
) -> rusqlite::Result<Page<ViewRow, ViewKey>> {
    let mut statement = conn.prepare_cached(
        "SELECT server, view_type, content, at FROM views WHERE thread = ?1 AND (server, view_type) > (?2, ?3) \
         ORDER BY server, view_type",
    )?;
    let (server, view_type) = after.map_or_else(Default::default, |key| (key.server, key.view_type));
    let mut found = statement.query(params![thread, server, view_type])?;
    let (mut rows, mut bytes): (Vec<ViewRow>, usize) = (Vec::new(), 0);
    while let Some(row) = found.next()? {
        if bytes >= PAGE_BYTES {
            let next = rows.last().map(|row| row.key.clone());
            return Ok(Page { rows, next });
        }
        bytes += row_bytes(row)?;
        rows.push(view_row(row)?);
    }
    Ok(Page { rows, next: None })
}

pub(super) fn view(conn: &Connection, thread: ThreadKey, key: &ViewKey) -> rusqlite::Result<Option<ViewRow>> {
    let sql = "SELECT server, view_type, content, at FROM views WHERE thread = ?1 AND server = ?2 AND view_type = ?3";
    conn.prepare_cached(sql)?.query_row(params![thread, key.server, key.view_type], view_row).optional()
}

pub(super) fn inbox(
    conn: &Connection,
    key: &Key,
    thread: Option<ThreadKey>,
    visible: &Visibility,
    page_request: &PageRequest,
) -> rusqlite::Result<Page<InboxItem>> {
    let mut statement = conn.prepare_cached(&for_user(INBOX, visible))?;
    let Cursor { at, thread: of, id } = &page_request.after;
    let found = statement.query(params![at, of, id, rows(page_request), user(visible), thread])?;
    page(found, page_request.limit, |row| {
        let of = row.get(1)?;
        let Some(Loaded { thread, .. }) = skip_unreadable(of, heads::load(conn, of))?.flatten() else {
            return Ok(None);
        };
        let number = row.get::<_, i64>(3)?.cast_unsigned();
        let question = decrypt_question(key, &thread, number, row.get_ref(5)?.as_blob()?);
        let Some(question) = skip_unreadable(of, question)? else { return Ok(None) };
        let call = call_id(row, 4)?;
        let arguments = row.get_ref(7)?.as_str_or_null()?.map(|entry| facts::arguments_in(entry, &call));
        Ok(Some(InboxItem {
            question,
            thread: thread.id.clone(),
            arguments: arguments.transpose()?,
            call,
            asked_at: Timestamp(row.get(0)?),
            tool: row.get(6)?,
        }))
    })
}

/// Lists open calls: those with nothing left to send first, then the others.
pub(super) fn calls(
    conn: &Connection,
    visible: &Visibility,
    page_request: &PageRequest,
) -> rusqlite::Result<Page<CallRow>> {
    let mut statement = conn.prepare_cached(calls_query(visible))?;
    let Cursor { at, thread, id: after } = &page_request.after;
    let found = statement.query(params![at, thread, after, rows(page_request), user(visible)])?;
    page(found, page_request.limit, |row| {
        Ok(Some(CallRow {
            thread: thread_id(row, 3)?,
            call: call_id(row, 2)?,
            tool: row.get(4)?,
            server: row.get(5)?,
            since: Timestamp(row.get(6)?),
            until: row.get::<_, Option<i64>>(7)?.map(Timestamp),
            acknowledged_at: row.get::<_, Option<i64>>(8)?.map(Timestamp),
            next_attempt_at: row.get::<_, Option<i64>>(11)?.map(Timestamp),
            attempts: row.get(9)?,
            outcome: row.get(10)?,
        }))
    })
}

/// Lists active subscriptions, oldest first.
pub(super) fn subscriptions(
    conn: &Connection,
    visible: &Visibility,
    page_request: &PageRequest,
) -> rusqlite::Result<Page<SubscriptionRow>> {
    let mut statement = conn.prepare_cached(&for_user(SUBSCRIPTIONS, visible))?;
    let Cursor { at, thread, id: after } = &page_request.after;
    let found = statement.query(params![at, thread, after, rows(page_request), user(visible)])?;
    page(found, page_request.limit, |row| {
        Ok(Some(SubscriptionRow {
            thread: thread_id(row, 3)?,
            call: call_id(row, 2)?,
            tool: row.get(4)?,
            server: row.get(5)?,
            since: Timestamp(row.get(0)?),
            waiting: row.get::<_, i64>(6)?.unsigned_abs(),
            events: RecentEvents::parse(row.get_ref(7)?.as_str_or_null()?),
        }))
    })
}

pub(super) fn timers(
    conn: &Connection,
    visible: &Visibility,
    page_request: &PageRequest,
) -> rusqlite::Result<Page<TimerRow>> {
    let mut statement = conn.prepare_cached(&for_user(TIMERS, visible))?;
    let Cursor { at, thread, id: after } = &page_request.after;
    let (rows, runtime) = (rows(page_request), Server::runtime().0);
    let found = statement.query(params![at, thread, after, rows, user(visible), runtime])?;
    page(found, page_request.limit, |row| {
        let kind = usize::from(row.get::<_, u8>(5)?);
        let call = Some(row.get::<_, String>(2)?).filter(|call| !call.is_empty());
        Ok(Some(TimerRow {
            thread: thread_id(row, 3)?,
            call: call.map(CallId::new).transpose().map_err(unreadable)?,
            tool: row.get(4)?,
            at: Timestamp(row.get(0)?),
            kind: TimerKind::ALL[kind],
            set_by: Timestamp(row.get(6)?),
        }))
    })
}

pub(super) fn decrypt_question(
    key: &Key,
    thread: &Thread,
    number: u64,
    sealed: &[u8],
) -> rusqlite::Result<StoredQuestion> {
    stored::decrypt_question(key, thread, number, sealed)
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
        let (conn, all, of_user) = (database(), Visibility::All, Visibility::User(UserId::new("u").unwrap()));
        let table = [
            (calls_query(&all).to_owned(), "calls_due ((server,root,invoke_at,thread,id)>"),
            (calls_query(&all).to_owned(), "calls_retry_at ((invoke_at,thread,id)>"),
            (calls_query(&all).to_owned(), "calls_taken ((thread,id)>"),
            (for_user(SUBSCRIPTIONS, &all), "calls_subscribed ((since,thread,id)>"),
            (for_user(TIMERS, &all), "calls_until ((until,thread,id)>"),
            (calls_query(&of_user).to_owned(), "calls_user_open (user_id=? AND (thread,id)>"),
            (for_user(SUBSCRIPTIONS, &of_user), "calls_user_subscribed (user_id=? AND (since,thread,id)>"),
            (for_user(TIMERS, &of_user), "calls_user_until (user_id=? AND (until,thread,id)>"),
            (for_user(TIMERS, &of_user), "threads_user_due (user_id=? AND due>"),
            (for_user(INBOX, &of_user), "questions_user (user_id=? AND (asked_at,thread)>"),
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
        let plan = |status, parent, visible| {
            let page_request = PageRequest::first(1);
            let filter = ThreadFilter { status, parent, visible, page_request, ..ThreadFilter::default() };
            let sql = format!("EXPLAIN QUERY PLAN SELECT head FROM threads t {}", condition(&filter));
            let mut statement = conn.prepare(&sql).unwrap();
            let steps = statement.query_map(params![0, "", 1, ""], |row| row.get::<_, String>(3)).unwrap();
            steps.map(Result::unwrap).collect::<Vec<_>>().join("; ")
        };
        let (all, of_user) = (|| Visibility::All, || Visibility::User(UserId::new("u").unwrap()));
        let parent = || Some(ThreadId::new("p").unwrap());
        let table = [
            (Some(Status::NeedsYou), None, all(), "threads_needs_you"),
            (Some(Status::Failed), None, all(), "threads_failed"),
            (Some(Status::Running), None, all(), "threads_ask"),
            (None, parent(), all(), "threads_parent"),
            (None, None, all(), "INTEGER PRIMARY KEY"),
            (
                Some(Status::NeedsYou),
                None,
                of_user(),
                "threads_user_status (user_id=? AND status=? AND rowid>",
            ),
            (
                Some(Status::Running),
                None,
                of_user(),
                "threads_user_status (user_id=? AND status=? AND rowid>",
            ),
            (Some(Status::Idle), None, of_user(), "threads_user_status (user_id=? AND status=? AND rowid>"),
            (None, parent(), of_user(), "threads_parent"),
            (None, None, of_user(), "threads_user (user_id=? AND rowid>"),
        ];
        for (status, parent, visible, index) in table {
            let plan = plan(status, parent, visible);
            assert!(plan.starts_with("SEARCH t ") && plan.contains(index), "{index}: {plan}");
            assert!(!plan.contains("TEMP B-TREE"), "{plan}");
        }
    }
}
