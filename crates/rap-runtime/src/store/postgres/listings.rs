//! Listings over all threads, page by page. They are read in index order, so the cost of a page depends only on its size.

use rap_agent::{Server, Status, Usage};
use rap_api::TimerKind;
use rap_io::hashing::in_place;
use rap_io::secret_box::Key;
use rap_protocol::{CallId, ThreadId};
use tokio_postgres::Row;

use super::connect::Connections;
use super::deletion::NOT_DELETED;
use super::heads::{
    self, THREAD_COLUMNS, attempts, call_id, number, thread_id, thread_key, timestamp, timestamp_or_none,
};
use super::history::{thread_row, thread_rows};
use super::statement::{Failure, Statement, get, skip_unreadable, unreadable};
use crate::store::stored::{PAGE_BYTES, call_arguments, decrypt_question};
use crate::store::{
    CallRow, Cursor, InboxItem, Loaded, Page, PageRequest, RecentEvents, SessionKey, SubscriptionRow,
    ThreadFilter, ThreadKey, ThreadRow, TimerRow, ViewKey, ViewRow, Visibility,
};

// The first parameters of each query are the cursor after which the page begins, and the number of rows.

/// Calls with nothing left to send come first, then new ones, then retries. The times of retries are shifted, so that a
/// cursor tells which of the three parts it is in.
const CALLS: &str = "SELECT * FROM (\
         SELECT NULL::bigint, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, c.acknowledged_at, c.attempts, \
                c.outcome, c.invoke_at \
         FROM calls c JOIN threads t ON t.no = c.thread \
         WHERE c.state = 0 AND c.invoke_at IS NULL AND $1 IS NULL AND (c.thread, c.id) > ($2, $3) \
         ORDER BY c.thread, c.id LIMIT $4) AS taken \
     UNION ALL SELECT * FROM (\
         SELECT c.invoke_at, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, c.acknowledged_at, \
                c.attempts, c.outcome, c.invoke_at \
         FROM calls c JOIN threads t ON t.no = c.thread \
         WHERE c.state = 0 AND c.invoke_at IS NOT NULL AND c.attempts = 0 AND coalesce($1, 0) < 100000000000000 \
         AND (c.server, c.session, c.invoke_at, c.thread, c.id) > (\
             CASE WHEN $1 IS NULL THEN '' ELSE (SELECT server FROM calls WHERE thread = $2 AND id = $3) END, \
             CASE WHEN $1 IS NULL THEN 0 ELSE (SELECT session FROM calls WHERE thread = $2 AND id = $3) END, \
             coalesce($1, -1), $2, $3) \
         ORDER BY c.server, c.session, c.invoke_at, c.thread, c.id LIMIT $4) AS new \
     UNION ALL SELECT * FROM (\
         SELECT c.invoke_at + 100000000000000, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, \
                c.acknowledged_at, c.attempts, c.outcome, c.invoke_at \
         FROM calls c JOIN threads t ON t.no = c.thread \
         WHERE c.state = 0 AND c.invoke_at IS NOT NULL AND c.attempts > 0 \
         AND (c.invoke_at, c.thread, c.id) > (CASE WHEN coalesce($1, 0) < 100000000000000 THEN -1 \
             ELSE $1 - 100000000000000 END, $2, $3) \
         ORDER BY c.invoke_at, c.thread, c.id LIMIT $4) AS retries WHERE $5::text IS NULL LIMIT $4";
/// Calls of one user, by thread.
const CALLS_OF_USER: &str = "SELECT NULL::bigint, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, \
            c.acknowledged_at, c.attempts, c.outcome, c.invoke_at \
     FROM calls c JOIN threads t ON t.no = c.thread \
     WHERE c.state = 0 AND c.user_id = $5 AND $1 IS NULL AND (c.thread, c.id) > ($2, $3) \
     ORDER BY c.thread, c.id LIMIT $4";
const SUBSCRIPTIONS: &str = "SELECT c.since, c.thread, c.id, t.id, c.name, c.server, \
            (SELECT count(*) FROM backlog b WHERE b.thread = c.thread AND b.call = c.id) / 2, \
            (SELECT max(s.at) || ' ' || min(s.at) || ' ' || count(*) FROM (SELECT at FROM event_ids \
                WHERE thread = c.thread AND call = c.id ORDER BY no DESC LIMIT 100) AS s WHERE s.at > 0) \
     FROM calls c JOIN threads t ON t.no = c.thread \
     WHERE c.state = 5 AND {user} AND (c.since, c.thread, c.id) > (coalesce($1, -1), $2, $3) \
     ORDER BY c.since, c.thread, c.id LIMIT $4";
const TIMERS: &str = "SELECT * FROM (SELECT c.until AS at, c.thread, c.id, t.id AS thread_id, c.name, \
            CASE WHEN c.server <> $6 THEN 0::bigint WHEN c.state = 0 THEN 1 ELSE 2 END, greatest(c.since, t.updated_at) \
     FROM calls c JOIN threads t ON t.no = c.thread \
     WHERE c.until IS NOT NULL AND {user} AND (c.until, c.thread, c.id) > (coalesce($1, -1), $2, $3) \
     ORDER BY c.until, c.thread, c.id LIMIT $4) AS calls \
     UNION ALL SELECT * FROM (SELECT c.due_at, c.thread, '' COLLATE \"C\", t.id, NULL, 3::bigint, t.updated_at \
     FROM wakes c JOIN threads t ON t.no = c.thread \
     WHERE c.is_retry AND {user} AND (c.due_at, c.thread) > (coalesce($1, -1), $2) \
     ORDER BY c.due_at, c.thread LIMIT $4) AS wakes \
     ORDER BY 1, 2, 3 LIMIT $4";
/// Questions of one thread (6) or of all. Those of all come with the entry of their call.
const INBOX: &str = "SELECT c.asked_at, c.thread, c.no::text, c.no, c.call, c.body, k.name, e.body FROM questions c \
     JOIN calls k ON k.thread = c.thread AND k.id = c.call \
     LEFT JOIN entries e ON $6::bigint IS NULL AND e.thread = k.thread AND e.seq = k.seq \
     WHERE c.answer IS NULL AND ($6::bigint IS NULL OR c.thread = $6) AND {user} \
     AND (c.asked_at, c.thread, c.no) > (coalesce($1, -1), $2, $3) \
     ORDER BY c.asked_at, c.thread, c.no LIMIT $4";

/// Threads with a phrase (5) in their title or in a text. Its last word may be the beginning of a word. The expressions are
/// those of the indexes.
const PHRASE: &str = "AND t.no IN (\
     SELECT e.thread FROM phrase, entries e \
     WHERE (left(e.body, 48) LIKE '%\"kind\":\"user\"%' OR left(e.body, 48) LIKE '%\"kind\":\"assistant\"%') \
     AND to_tsvector('simple', CASE WHEN strpos(e.body, '\\u0000') > 0 THEN '' \
         ELSE left(e.body::jsonb ->> 'text', 100000) END) @@ phrase.query \
     UNION ALL SELECT n.no FROM phrase, threads n \
     WHERE n.title IS NOT NULL AND to_tsvector('simple', n.title) @@ phrase.query)";

/// Makes the query of a phrase. A phrase without any word finds nothing.
const PHRASE_QUERY: &str = "WITH phrase AS MATERIALIZED (SELECT CASE WHEN words = '' THEN ''::tsquery \
     ELSE (words || ':*')::tsquery END AS query FROM (SELECT phraseto_tsquery('simple', $5)::text AS words) AS given) ";

/// Returns the condition that a column contains the user whose rows are visible. The user is a parameter.
pub(super) fn user_condition(visible: &Visibility, column: &str, parameter: usize) -> String {
    match visible {
        // The statement must use each parameter.
        Visibility::All => format!("${parameter}::text IS NULL"),
        Visibility::User(_) => format!("{column} = ${parameter}"),
    }
}

pub(super) fn user(visible: &Visibility) -> Option<String> {
    visible.user().map(|user| user.as_str().to_owned())
}

/// Returns the query for the rows that are visible. `c` is the table with the user.
fn for_user(sql: &str, visible: &Visibility) -> String {
    sql.replace("{user}", &user_condition(visible, "c.user_id", 5))
}

/// Number of rows to read. One more than the page holds, to find out whether there is another page.
fn rows(page_request: &PageRequest) -> i64 {
    i64::try_from(page_request.limit).unwrap_or(i64::MAX).saturating_add(1)
}

fn listing(sql: &str, visible: &Visibility, page_request: &PageRequest) -> Statement {
    let Cursor { at, thread, id } = &page_request.after;
    let statement = Statement::new(for_user(sql, visible)).with(*at).thread(*thread).text(id);
    statement.with(rows(page_request)).with(user(visible))
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

/// Returns the condition on a thread `t`. Its parameters are the cursor, the parent, the limit and the user.
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
    let user = user_condition(&filter.visible, "t.user_id", 4);
    let roots = if filter.roots { "AND t.parent IS NULL" } else { "" };
    let (compared, order) = filter.direction();
    let phrase = match filter.phrase {
        None => "AND $5::text IS NULL",
        Some(_) => PHRASE,
    };
    format!(
        "WHERE t.no {compared} $1 {status} {parent} {roots} {phrase} AND {user} AND {NOT_DELETED} \
         ORDER BY t.no {order} LIMIT $3"
    )
}

pub(super) async fn threads(
    connections: &Connections,
    filter: &ThreadFilter,
) -> Result<Page<ThreadRow>, Failure> {
    let with = if filter.phrase.is_some() { PHRASE_QUERY } else { "" };
    let sql = format!("{with}{} {}", thread_rows(), condition(filter));
    let parent = filter.parent.as_ref().map_or("", ThreadId::as_str);
    let limit = &filter.page_request.limit;
    let statement = Statement::new(sql).thread(filter.begins_after()).text(parent);
    let statement = statement.with(rows(&filter.page_request));
    let statement = statement.with(user(&filter.visible)).with(filter.phrase.clone());
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
        rows.extend(skip_unreadable(thread, thread_row(row))?.filter(|row| filter.has_status(row)));
    }
    Ok(Page { rows, next: None })
}

fn view_row(row: &Row) -> Result<ViewRow, Failure> {
    Ok(ViewRow {
        key: ViewKey { server: get(row, 0)?, view_type: get(row, 1)? },
        content: serde_json::from_str(get(row, 2)?).map_err(unreadable)?,
        at: timestamp(row, 3)?,
    })
}

/// Returns the sums of all threads of a session, which are found from its root.
pub(super) async fn session_usage(
    connections: &Connections,
    session: SessionKey,
) -> Result<(Usage, u64), Failure> {
    let sql = "WITH RECURSIVE found (no, used) AS (\
               SELECT no, head::json -> 'usage' FROM threads WHERE no = $1 UNION ALL \
               SELECT t.no, t.head::json -> 'usage' FROM threads t JOIN found f ON t.parent = f.no) \
               SELECT count(*), coalesce(sum((used ->> 'input')::bigint), 0)::bigint, \
               coalesce(sum((used ->> 'output')::bigint), 0)::bigint, coalesce(sum((used ->> 'cached')::bigint), 0)::bigint, \
               coalesce(sum((used ->> 'written')::bigint), 0)::bigint, coalesce(sum((used ->> 'cost')::bigint), 0)::bigint \
               FROM found";
    let rows = connections.read_one(Statement::new(sql).session(session)).await?;
    let Some(row) = rows.first() else { return Ok((Usage::default(), 0)) };
    let number = |at: usize| get::<i64>(row, at).map(i64::unsigned_abs);
    let (input, output, cached, written, cost) = (number(1)?, number(2)?, number(3)?, number(4)?, number(5)?);
    Ok((Usage { input, output, cached, written, cost }, number(0)?))
}

/// Returns a page of views. It ends at the view with which it reaches its size.
pub(super) async fn views(
    connections: &Connections,
    thread: ThreadKey,
    after: Option<ViewKey>,
) -> Result<Page<ViewRow, ViewKey>, Failure> {
    let sql = "SELECT server, view_type, content, at, before + octet_length(content) < total FROM (\
               SELECT *, sum(octet_length(content)) OVER (ORDER BY server, view_type) - octet_length(content) AS before, \
               sum(octet_length(content)) OVER () AS total \
               FROM views WHERE thread = $1 AND (server, view_type) > ($2, $3)) AS page \
               WHERE before < $4 ORDER BY server, view_type";
    let (server, view_type) = after.map_or_else(Default::default, |key| (key.server, key.view_type));
    let statement = Statement::new(sql).thread(thread).text(&server).text(&view_type);
    let found = connections.read_one(statement.with(PAGE_BYTES as i64)).await?;
    let rows = found.iter().map(view_row).collect::<Result<Vec<ViewRow>, Failure>>()?;
    let more = found.last().map(|last| get::<bool>(last, 4)).transpose()?.unwrap_or(false);
    let next = rows.last().filter(|_| more).map(|row| row.key.clone());
    Ok(Page { rows, next })
}

pub(super) async fn view(
    connections: &Connections,
    thread: ThreadKey,
    key: &ViewKey,
) -> Result<Option<ViewRow>, Failure> {
    let sql = "SELECT server, view_type, content, at FROM views \
               WHERE thread = $1 AND server = $2 AND view_type = $3";
    let statement = Statement::new(sql).thread(thread).text(&key.server).text(&key.view_type);
    connections.read_one(statement).await?.first().map(view_row).transpose()
}

pub(super) async fn inbox(
    connections: &Connections,
    key: &Key,
    thread: Option<ThreadKey>,
    visible: &Visibility,
    page_request: &PageRequest,
) -> Result<Page<InboxItem>, Failure> {
    let mut tx = connections.begin(super::statement::BEGIN_READ).await?;
    let Cursor { at, thread: of, id } = &page_request.after;
    let after: i64 = id.parse().unwrap_or(0);
    let statement = Statement::new(for_user(INBOX, visible)).with(*at).thread(*of).with(after);
    let statement = statement.with(rows(page_request)).with(user(visible));
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
        let call = call_id(row, 4)?;
        let parse = |body: &str| in_place(body.len(), || serde_json::from_str(body));
        let entry = get::<Option<&str>>(row, 7)?.map(parse).transpose().map_err(unreadable)?;
        Ok(Some(InboxItem {
            question,
            thread: thread.id.clone(),
            arguments: entry.map(|entry| call_arguments(entry, &call)),
            call,
            asked_at: timestamp(row, 0)?,
            tool: get(row, 6)?,
        }))
    })
}

/// Lists open calls: those with nothing left to send first, then the others.
pub(super) async fn calls(
    connections: &Connections,
    visible: &Visibility,
    page_request: &PageRequest,
) -> Result<Page<CallRow>, Failure> {
    // Those of a user are in another order, for which there is an index.
    let sql = if *visible == Visibility::All { CALLS } else { CALLS_OF_USER };
    let found = connections.read_one(listing(sql, visible, page_request)).await?;
    page(found, page_request.limit, |row| {
        Ok(Some(CallRow {
            thread: thread_id(row, 3)?,
            call: call_id(row, 2)?,
            tool: get(row, 4)?,
            server: get(row, 5)?,
            since: timestamp(row, 6)?,
            until: timestamp_or_none(row, 7)?,
            acknowledged_at: timestamp_or_none(row, 8)?,
            next_attempt_at: timestamp_or_none(row, 11)?,
            attempts: attempts(row, 9)?,
            outcome: get(row, 10)?,
        }))
    })
}

/// Lists active subscriptions, oldest first.
pub(super) async fn subscriptions(
    connections: &Connections,
    visible: &Visibility,
    page_request: &PageRequest,
) -> Result<Page<SubscriptionRow>, Failure> {
    let found = connections.read_one(listing(SUBSCRIPTIONS, visible, page_request)).await?;
    page(found, page_request.limit, |row| {
        Ok(Some(SubscriptionRow {
            thread: thread_id(row, 3)?,
            call: call_id(row, 2)?,
            tool: get(row, 4)?,
            server: get(row, 5)?,
            since: timestamp(row, 0)?,
            waiting: number(row, 6)?,
            events: RecentEvents::parse(get(row, 7)?),
        }))
    })
}

pub(super) async fn timers(
    connections: &Connections,
    visible: &Visibility,
    page_request: &PageRequest,
) -> Result<Page<TimerRow>, Failure> {
    let statement = listing(TIMERS, visible, page_request).text(&Server::runtime().0);
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
            set_by: timestamp(row, 6)?,
        }))
    })
}
