//! Listings over all threads, page by page. They are read in index order, so the cost of a page depends only on its size.

use rap_agent::{Server, Status};
use rap_api::TimerKind;
use rap_io::secret_box::Key;
use rap_protocol::{CallId, ThreadId};
use tokio_postgres::Row;

use super::connect::Connections;
use super::heads::{
    self, THREAD_COLUMNS, attempts, call_id, number, thread_id, thread_key, timestamp, timestamp_or_none,
};
use super::history::{thread_row, thread_rows};
use super::statement::{Failure, Statement, get, skip_unreadable, unreadable};
use crate::store::stored::{PAGE_BYTES, decrypt_question};
use crate::store::{
    CallRow, Cursor, InboxItem, Loaded, Page, PageRequest, SubscriptionRow, ThreadFilter, ThreadKey,
    ThreadRow, TimerRow, ViewRow,
};

// The first parameters of each query are the cursor after which the page begins, and the number of rows.

/// Calls with nothing left to send come first, then new ones, then retries. The times of retries are shifted, so that a
/// cursor tells which of the three parts it is in.
const CALLS: &str = "SELECT * FROM (\
         SELECT NULL::bigint, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, c.acknowledged_at, c.attempts, \
                c.outcome \
         FROM calls c JOIN threads t ON t.no = c.thread \
         WHERE c.state = 0 AND c.invoke_at IS NULL AND $1 IS NULL AND (c.thread, c.id) > ($2, $3) \
         ORDER BY c.thread, c.id LIMIT $4) AS taken \
     UNION ALL SELECT * FROM (\
         SELECT c.invoke_at, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, c.acknowledged_at, \
                c.attempts, c.outcome \
         FROM calls c JOIN threads t ON t.no = c.thread \
         WHERE c.state = 0 AND c.invoke_at IS NOT NULL AND c.attempts = 0 AND coalesce($1, 0) < 100000000000000 \
         AND (c.server, c.session, c.invoke_at, c.thread, c.id) > (\
             CASE WHEN $1 IS NULL THEN '' ELSE (SELECT server FROM calls WHERE thread = $2 AND id = $3) END, \
             CASE WHEN $1 IS NULL THEN 0 ELSE (SELECT session FROM calls WHERE thread = $2 AND id = $3) END, \
             coalesce($1, -1), $2, $3) \
         ORDER BY c.server, c.session, c.invoke_at, c.thread, c.id LIMIT $4) AS new \
     UNION ALL SELECT * FROM (\
         SELECT c.invoke_at + 100000000000000, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, \
                c.acknowledged_at, c.attempts, c.outcome \
         FROM calls c JOIN threads t ON t.no = c.thread \
         WHERE c.state = 0 AND c.invoke_at IS NOT NULL AND c.attempts > 0 \
         AND (c.invoke_at, c.thread, c.id) > (CASE WHEN coalesce($1, 0) < 100000000000000 THEN -1 \
             ELSE $1 - 100000000000000 END, $2, $3) \
         ORDER BY c.invoke_at, c.thread, c.id LIMIT $4) AS retries LIMIT $4";
const SUBSCRIPTIONS: &str = "SELECT c.since, c.thread, c.id, t.id, c.name, c.server, \
            (SELECT count(*) FROM backlog b WHERE b.thread = c.thread AND b.call = c.id) / 2 \
     FROM calls c JOIN threads t ON t.no = c.thread \
     WHERE c.state = 5 AND (c.since, c.thread, c.id) > (coalesce($1, -1), $2, $3) \
     ORDER BY c.since, c.thread, c.id LIMIT $4";
const TIMERS: &str = "SELECT * FROM (SELECT c.until AS at, c.thread, c.id, t.id AS thread_id, c.name, \
            CASE WHEN c.server <> $5 THEN 0::bigint WHEN c.state = 0 THEN 1 ELSE 2 END \
     FROM calls c JOIN threads t ON t.no = c.thread \
     WHERE c.until IS NOT NULL AND (c.until, c.thread, c.id) > (coalesce($1, -1), $2, $3) \
     ORDER BY c.until, c.thread, c.id LIMIT $4) AS calls \
     UNION ALL SELECT * FROM (SELECT w.due_at, w.thread, '' COLLATE \"C\", t.id, NULL, 3::bigint \
     FROM wakes w JOIN threads t ON t.no = w.thread \
     WHERE w.is_retry AND (w.due_at, w.thread) > (coalesce($1, -1), $2) \
     ORDER BY w.due_at, w.thread LIMIT $4) AS wakes \
     ORDER BY 1, 2, 3 LIMIT $4";
const INBOX: &str = "SELECT q.asked_at, q.thread, q.no::text, q.no, q.call, q.body, c.name FROM questions q \
     JOIN calls c ON c.thread = q.thread AND c.id = q.call \
     WHERE q.answer IS NULL AND ($5::bigint IS NULL OR q.thread = $5) \
     AND (q.asked_at, q.thread, q.no) > (coalesce($1, -1), $2, $3) \
     ORDER BY q.asked_at, q.thread, q.no LIMIT $4";

/// Number of rows to read. One more than the page holds, to find out whether there is another page.
fn rows(page_request: &PageRequest) -> i64 {
    i64::try_from(page_request.limit).unwrap_or(i64::MAX).saturating_add(1)
}

fn listing(sql: &str, page_request: &PageRequest) -> Statement {
    let Cursor { at, thread, id } = &page_request.after;
    Statement::new(sql).with(*at).thread(*thread).text(id).with(rows(page_request))
}

/// Reads a page. The first three columns of a row are its cursor. Unreadable rows are skipped. A page ends early if its
/// rows are large.
fn page<T>(
    found: Vec<Row>,
    limit: usize,
    read: impl Fn(&Row) -> Result<Option<T>, Failure>,
) -> Result<Page<T>, Failure> {
    let (mut rows, mut last, mut count, mut bytes) = (Vec::new(), None, 0, 0);
    for row in &found {
        if count == limit || bytes >= PAGE_BYTES {
            return Ok(Page { rows, next: last });
        }
        count += 1;
        bytes += row.raw_size_bytes();
        let thread = thread_key(row, 1)?;
        last = Some(Cursor { at: get(row, 0)?, thread, id: get(row, 2)? });
        rows.extend(skip_unreadable(thread, read(row))?.flatten());
    }
    Ok(Page { rows, next: None })
}

/// Returns the condition on a thread `t`. Its parameters are the cursor, the parent and the limit.
fn condition(filter: &ThreadFilter) -> String {
    let status = match filter.status {
        None => String::new(),
        // Few threads are running, have failed or need a person.
        Some(Status::Running) => "AND t.no IN (SELECT thread FROM asks)".into(),
        Some(status @ (Status::Failed | Status::NeedsYou)) => {
            format!("AND t.no IN (SELECT thread FROM attention WHERE status = '{}')", status.as_str())
        }
        Some(status) => format!("AND t.status = '{}'", status.as_str()),
    };
    let parent = match filter.parent {
        None => "AND $2 = ''",
        Some(_) => "AND t.parent = (SELECT no FROM threads WHERE id = $2)",
    };
    format!("WHERE t.no > $1 {status} {parent} ORDER BY t.no LIMIT $3")
}

pub(super) async fn threads(
    connections: &Connections,
    filter: &ThreadFilter,
) -> Result<Page<ThreadRow>, Failure> {
    let sql = format!("{} {}", thread_rows(), condition(filter));
    let parent = filter.parent.as_ref().map_or("", ThreadId::as_str);
    let PageRequest { after, limit } = &filter.page_request;
    let statement = Statement::new(sql).thread(after.thread).text(parent).with(rows(&filter.page_request));
    let (mut rows, mut last, mut count, mut bytes) = (Vec::new(), None, 0, 0);
    for row in &connections.read_one(statement).await? {
        if count == *limit || bytes >= PAGE_BYTES {
            let next = last.map(|thread| Cursor { thread, ..Cursor::default() });
            return Ok(Page { rows, next });
        }
        count += 1;
        bytes += row.raw_size_bytes();
        let thread = thread_key(row, 0)?;
        last = Some(thread);
        rows.extend(skip_unreadable(thread, thread_row(row))?);
    }
    Ok(Page { rows, next: None })
}

pub(super) async fn views(connections: &Connections, thread: ThreadKey) -> Result<Vec<ViewRow>, Failure> {
    let sql = "SELECT server, view_type, content, at FROM views WHERE thread = $1 ORDER BY at DESC";
    let view = |row: &Row| {
        Ok(ViewRow {
            server: get(row, 0)?,
            view_type: get(row, 1)?,
            content: serde_json::from_str(get(row, 2)?).map_err(unreadable)?,
            at: timestamp(row, 3)?,
        })
    };
    connections.read_one(Statement::new(sql).thread(thread)).await?.iter().map(view).collect()
}

pub(super) async fn inbox(
    connections: &Connections,
    key: &Key,
    thread: Option<ThreadKey>,
    page_request: &PageRequest,
) -> Result<Page<InboxItem>, Failure> {
    let mut tx = connections.begin(super::statement::BEGIN_READ).await?;
    let Cursor { at, thread: of, id } = &page_request.after;
    let no: i64 = id.parse().unwrap_or(0);
    let statement = Statement::new(INBOX).with(*at).thread(*of).with(no).with(rows(page_request));
    let statement = statement.with(thread.map(ThreadKey::number));
    let found = tx.query(statement).await?;
    let threads = found.iter().map(|row| get(row, 1)).collect::<Result<Vec<i64>, Failure>>()?;
    let sql = format!("SELECT {THREAD_COLUMNS} FROM threads t WHERE t.no = ANY($1)");
    let mut loaded = std::collections::HashMap::new();
    for row in tx.query(Statement::new(sql).with(threads)).await? {
        let thread = thread_key(&row, 0)?;
        loaded.extend(skip_unreadable(thread, heads::loaded(&row))?.map(|loaded| (thread, loaded)));
    }
    page(found, page_request.limit, |row| {
        let Some(Loaded { thread, .. }) = loaded.get(&thread_key(row, 1)?) else { return Ok(None) };
        let question = decrypt_question(key, thread, number(row, 3)?, get(row, 5)?).map_err(unreadable)?;
        Ok(Some(InboxItem {
            question,
            thread: thread.id.clone(),
            call: call_id(row, 4)?,
            asked_at: timestamp(row, 0)?,
            tool: get(row, 6)?,
        }))
    })
}

/// Lists open calls: those with nothing left to send first, then the others.
pub(super) async fn calls(
    connections: &Connections,
    page_request: &PageRequest,
) -> Result<Page<CallRow>, Failure> {
    let found = connections.read_one(listing(CALLS, page_request)).await?;
    page(found, page_request.limit, |row| {
        Ok(Some(CallRow {
            thread: thread_id(row, 3)?,
            call: call_id(row, 2)?,
            tool: get(row, 4)?,
            server: get(row, 5)?,
            since: timestamp(row, 6)?,
            until: timestamp_or_none(row, 7)?,
            acknowledged_at: timestamp_or_none(row, 8)?,
            next_attempt_at: timestamp_or_none(row, 0)?,
            attempts: attempts(row, 9)?,
            outcome: get(row, 10)?,
        }))
    })
}

/// Lists active subscriptions, oldest first.
pub(super) async fn subscriptions(
    connections: &Connections,
    page_request: &PageRequest,
) -> Result<Page<SubscriptionRow>, Failure> {
    let found = connections.read_one(listing(SUBSCRIPTIONS, page_request)).await?;
    page(found, page_request.limit, |row| {
        Ok(Some(SubscriptionRow {
            thread: thread_id(row, 3)?,
            call: call_id(row, 2)?,
            tool: get(row, 4)?,
            server: get(row, 5)?,
            since: timestamp(row, 0)?,
            waiting: number(row, 6)?,
        }))
    })
}

pub(super) async fn timers(
    connections: &Connections,
    page_request: &PageRequest,
) -> Result<Page<TimerRow>, Failure> {
    let statement = listing(TIMERS, page_request).text(&Server::runtime().0);
    let found = connections.read_one(statement).await?;
    page(found, page_request.limit, |row| {
        let call = Some(get::<String>(row, 2)?).filter(|call| !call.is_empty());
        let kind =
            usize::try_from(get::<i64>(row, 5)?).ok().and_then(|kind| TimerKind::ALL.get(kind).copied());
        Ok(Some(TimerRow {
            thread: thread_id(row, 3)?,
            call: call.map(CallId::new).transpose().map_err(unreadable)?,
            tool: get(row, 4)?,
            at: timestamp(row, 0)?,
            kind: kind.ok_or_else(|| unreadable("unknown kind of a timer"))?,
        }))
    })
}
