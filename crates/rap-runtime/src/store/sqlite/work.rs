//! Queries for due work. Due times are columns of the thread, call or question that the work belongs to. No claims are
//! stored, since one process owns the file.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use rap_agent::{LONGEST_PAUSE, LostAfter, OpenCall, Server, StatusCheck};
use rap_io::secret_box::Key;
use rap_protocol::{CallId, ResponseUrl, Timestamp};
use rusqlite::types::Value as SqlValue;
use rusqlite::{Connection, OptionalExtension, Row, params, params_from_iter};

use super::facts;
use super::heads::{self, call_id, is_row_error, skip_unreadable, thread_id, unreadable};
use super::listings::decrypt_question;
use crate::store::damage::Damage;
use crate::store::deletion::RETRY;
use crate::store::stored::{RETRY_QUERIES, RETRY_ROWS};
use crate::store::work::DueRetries;
use crate::store::{
    AnswerWork, AskWork, CheckWork, DuePage, DueWork, InvokeWork, Loaded, LongestPauses, OutboxKey,
    OutboxMessage, SessionKey, StoredQuestion, ThreadKey, Timer, Work, WorkKey, WorkKind, WorkQueue,
};

/// The queries for work of one kind. New work, which was not attempted yet, is always due and is found session by
/// session. Retries are found by their due time.
struct Queries {
    /// Finds the next session with new work for a destination.
    next_session: &'static str,
    /// Finds new work of a session.
    new: &'static str,
    /// Finds due retries.
    retries: &'static str,
    /// Find the next destination with new work, and with retries.
    destinations: [&'static str; 2],
}

const ASK: Queries = Queries {
    next_session: "SELECT min(root) FROM threads \
                   WHERE ask IS NOT NULL AND ask_attempts = 0 AND ask_to = ?1 AND root > ?2",
    new: "SELECT no, ask FROM threads \
          WHERE ask IS NOT NULL AND ask_attempts = 0 AND ask_to = ?1 AND root = ?2 ORDER BY ask_at",
    retries: "SELECT no, ask, root FROM threads WHERE ask_attempts > 0 AND ask_to = ?1 AND ask_at <= ?2",
    destinations: [
        "SELECT min(ask_to) FROM threads WHERE ask IS NOT NULL AND ask_attempts = 0 AND ask_to >= ?1",
        "SELECT min(ask_to) FROM threads WHERE ask_attempts > 0 AND ask_to >= ?1",
    ],
};
const INVOKE: Queries = Queries {
    next_session: "SELECT min(root) FROM calls \
                   WHERE state = 0 AND invoke_at IS NOT NULL AND attempts = 0 AND server = ?1 AND root > ?2",
    new: "SELECT thread, id FROM calls \
          WHERE state = 0 AND invoke_at IS NOT NULL AND attempts = 0 AND server = ?1 AND root = ?2 ORDER BY invoke_at",
    retries: "SELECT thread, id, root FROM calls \
            WHERE state = 0 AND invoke_at IS NOT NULL AND attempts > 0 AND server = ?1 AND invoke_at <= ?2",
    destinations: [
        "SELECT min(server) FROM calls WHERE state = 0 AND invoke_at IS NOT NULL AND attempts = 0 AND server >= ?1",
        "SELECT min(server) FROM calls WHERE state = 0 AND invoke_at IS NOT NULL AND attempts > 0 AND server >= ?1",
    ],
};
const ANSWER: Queries = Queries {
    next_session: "SELECT min(root) FROM questions \
                   WHERE answer_at IS NOT NULL AND attempts = 0 AND server = ?1 AND root > ?2",
    new: "SELECT thread, no FROM questions \
          WHERE answer_at IS NOT NULL AND attempts = 0 AND server = ?1 AND root = ?2 ORDER BY answer_at",
    retries: "SELECT thread, no, root FROM questions \
            WHERE answer_at IS NOT NULL AND attempts > 0 AND server = ?1 AND answer_at <= ?2",
    destinations: [
        "SELECT min(server) FROM questions WHERE answer_at IS NOT NULL AND attempts = 0 AND server >= ?1",
        "SELECT min(server) FROM questions WHERE answer_at IS NOT NULL AND attempts > 0 AND server >= ?1",
    ],
};
/// Finds calls and subscriptions whose status is to be checked, by the rule of [`StatusCheck::due`].
const CHECKS: &str = "SELECT thread, id, root FROM calls \
     WHERE acknowledged_at IS NOT NULL AND state IN (0, 5) AND server = ?1 \
     AND coalesce(asked_after, acknowledged_at) <= ?3 \
     AND (gone_since IS NOT NULL OR coalesce(asked_after, acknowledged_at) <= ?2) \
     ORDER BY coalesce(asked_after, acknowledged_at) LIMIT ?4";
/// Due timers are found by an index, so timers that are not due cost nothing.
const DUE_THREADS: &str = "SELECT root, no FROM threads WHERE due <= ?1";
const DUE_CALLS: &str =
    "SELECT root, thread, id FROM calls WHERE until <= ?1 AND (until > ?2 OR server = ?3)";
const NEXT_DUE: [&str; 6] = [
    "SELECT min(due) FROM threads WHERE due > ?1",
    "SELECT min(until) FROM calls WHERE until > ?1",
    "SELECT min(ask_at) FROM threads WHERE ask_attempts > 0 AND ask_at > ?1",
    "SELECT min(invoke_at) FROM calls WHERE state = 0 AND invoke_at IS NOT NULL AND attempts > 0 AND invoke_at > ?1",
    "SELECT min(answer_at) FROM questions WHERE answer_at IS NOT NULL AND attempts > 0 AND answer_at > ?1",
    "SELECT min(due_at) FROM letters WHERE due_at > 0 AND due_at > ?1",
];

fn queries(kind: WorkKind) -> Option<&'static Queries> {
    match kind {
        WorkKind::Ask => Some(&ASK),
        WorkKind::Invoke => Some(&INVOKE),
        WorkKind::Answer => Some(&ANSWER),
        // Checks have their own order: the call that was checked longest ago comes first.
        WorkKind::Check => None,
    }
}

/// Lists the destinations that have work. They are few, so each is found by its own index lookup.
pub(super) fn destinations(conn: &Connection, kind: WorkKind) -> rusqlite::Result<Vec<String>> {
    let Some(queries) = queries(kind) else { return Ok(Vec::new()) };
    let mut found = BTreeSet::new();
    for sql in queries.destinations {
        let mut statement = conn.prepare_cached(sql)?;
        let mut from = String::new();
        while let Some(next) = statement.query_row([&from], |row| row.get::<_, Option<String>>(0))? {
            // The smallest string that is greater than `next`.
            from = format!("{next}\0");
            found.insert(next);
        }
    }
    Ok(found.into_iter().collect())
}

pub(super) fn due(
    conn: &Connection,
    queue: &WorkQueue,
    page: &DuePage,
    lost_after: LostAfter,
) -> rusqlite::Result<DueWork> {
    let Some(queries) = queries(queue.kind) else {
        return due_checks(conn, queue, page, lost_after);
    };
    let (mut work, more) = due_retries(conn, queries, queue, page)?;
    let mut next_session = conn.prepare_cached(queries.next_session)?;
    let mut new = conn.prepare_cached(queries.new)?;
    let mut after = page.after;
    for _ in 0..page.sessions {
        let previous = after.map_or(i64::MIN, |session| session.0.number());
        let session = next_session.query_row(params![queue.destination, previous], |row| row.get(0))?;
        let Some(session): Option<SessionKey> = session else {
            return Ok(DueWork { work, after: None, more });
        };
        after = Some(session);
        let mut rows = new.query(params![queue.destination, session])?;
        let mut of_session = 0;
        while let Some(row) = rows.next()?.filter(|_| of_session < page.per_session) {
            let Some(key) = skip_unreadable(row.get(0)?, work_key(queue.kind, row))? else { continue };
            if !page.skip.contains(&key) {
                work.push((session, key));
                of_session += 1;
            }
        }
    }
    Ok(DueWork { work, after, more })
}

/// Returns due retries, and whether more are due.
fn due_retries(
    conn: &Connection,
    queries: &Queries,
    queue: &WorkQueue,
    page: &DuePage,
) -> rusqlite::Result<(Vec<(SessionKey, WorkKey)>, bool)> {
    let rows_at_once = RETRY_ROWS + page.skip.len();
    let mut retries = DueRetries::new(page);
    for _ in 0..RETRY_QUERIES {
        let full = retries.full();
        let mut parameters = vec![SqlValue::from(queue.destination.clone()), SqlValue::from(page.now.0)];
        let except = except(&full, &mut parameters);
        let order = due_column(queue.kind);
        let sql = format!("{}{except} ORDER BY {order} LIMIT {rows_at_once}", queries.retries);
        let mut statement = conn.prepare(&sql)?;
        let mut rows = statement.query(params_from_iter(parameters))?;
        let mut read = 0;
        while let Some(row) = rows.next()? {
            read += 1;
            let Some(key) = skip_unreadable(row.get(0)?, work_key(queue.kind, row))? else { continue };
            retries.add(row.get(2)?, key);
        }
        if read < rows_at_once {
            return Ok(retries.finish(true));
        }
        if retries.full().len() == full.len() {
            break;
        }
    }
    Ok(retries.finish(false))
}

fn due_column(kind: WorkKind) -> &'static str {
    match kind {
        WorkKind::Ask => "ask_at",
        WorkKind::Invoke => "invoke_at",
        WorkKind::Answer => "answer_at",
        WorkKind::Check => "asked_after",
    }
}

fn work_key(kind: WorkKind, row: &Row<'_>) -> rusqlite::Result<WorkKey> {
    let thread = row.get(0)?;
    Ok(match kind {
        WorkKind::Ask => WorkKey::Ask { thread, turn: row.get::<_, i64>(1)?.unsigned_abs() },
        WorkKind::Invoke => WorkKey::Invoke { thread, call: call_id(row, 1)? },
        WorkKind::Answer => WorkKey::Answer { thread, number: row.get::<_, i64>(1)?.unsigned_abs() },
        WorkKind::Check => WorkKey::Check { thread, call: call_id(row, 1)? },
    })
}

fn due_checks(
    conn: &Connection,
    queue: &WorkQueue,
    page: &DuePage,
    lost_after: LostAfter,
) -> rusqlite::Result<DueWork> {
    let (before, gone_before) = (page.now.minus(lost_after.0), page.now.minus(lost_after.pause()));
    let limit = page.sessions + page.skip.len();
    let mut statement = conn.prepare_cached(CHECKS)?;
    let row = params![queue.destination, before.0, gone_before.0, limit as i64];
    let mut found = statement.query(row)?;
    let (mut work, mut read) = (Vec::new(), 0);
    while let Some(row) = found.next()? {
        read += 1;
        let key = skip_unreadable(row.get(0)?, work_key(WorkKind::Check, row))?;
        if let Some(key) = key.filter(|key| !page.skip.contains(key)) {
            work.push((row.get(2)?, key));
        }
    }
    Ok(DueWork { work, after: None, more: read == limit })
}

pub(super) fn load(
    conn: &Connection,
    secrets: &Key,
    key: &WorkKey,
    now: Timestamp,
) -> rusqlite::Result<Option<Work>> {
    let Some(loaded) = heads::load(conn, key.thread())? else {
        return if is_stored(conn, key)? { Err(unreadable(Damage::MissingThread)) } else { Ok(None) };
    };
    let work = match key {
        WorkKey::Ask { turn, .. } => {
            load_question(conn, loaded, *turn, now)?.map(|work| Work::Ask(Box::new(work)))
        }
        WorkKey::Invoke { call, .. } => load_invocation(conn, loaded, call, now)?.map(Work::Invoke),
        WorkKey::Answer { number, .. } => load_answer(conn, secrets, loaded, *number, now)?.map(Work::Answer),
        WorkKey::Check { call, .. } => load_check(conn, loaded, call)?.map(Work::Check),
    };
    Ok(work)
}

/// Returns true if work is stored. Work of a thread that was moved away is not.
fn is_stored(conn: &Connection, key: &WorkKey) -> rusqlite::Result<bool> {
    let thread = key.thread();
    match key {
        WorkKey::Ask { .. } => Ok(false),
        WorkKey::Invoke { call, .. } | WorkKey::Check { call, .. } => {
            let mut calls = conn.prepare_cached("SELECT 1 FROM calls WHERE thread = ?1 AND id = ?2")?;
            calls.exists(params![thread, call.as_str()])
        }
        WorkKey::Answer { number, .. } => {
            let mut questions =
                conn.prepare_cached("SELECT 1 FROM questions WHERE thread = ?1 AND no = ?2")?;
            questions.exists(params![thread, number.cast_signed()])
        }
    }
}

fn load_question(
    conn: &Connection,
    loaded: Loaded,
    turn: u64,
    now: Timestamp,
) -> rusqlite::Result<Option<AskWork>> {
    let Loaded { thread, head, .. } = loaded;
    let Some(up_to) = head.prompt_up_to().filter(|_| head.turn() == turn) else { return Ok(None) };
    // New work is always due, since the clock may have been set back.
    let sql =
        "SELECT ask_attempts FROM threads WHERE no = ?1 AND ask = ?2 AND (ask_attempts = 0 OR ask_at <= ?3)";
    let mut statement = conn.prepare_cached(sql)?;
    let attempts = statement.query_row(params![thread.key, turn.cast_signed(), now.0], |row| row.get(0));
    Ok(attempts.optional()?.map(|attempts| AskWork { thread, head, turn, up_to, attempts }))
}

fn load_invocation(
    conn: &Connection,
    loaded: Loaded,
    call: &CallId,
    now: Timestamp,
) -> rusqlite::Result<Option<InvokeWork>> {
    let thread = loaded.thread;
    let sql = "SELECT call_id, name, server, seq, since, until, attempts, outcome, callback_base FROM calls \
               WHERE thread = ?1 AND id = ?2 AND state = 0 AND invoke_at IS NOT NULL \
               AND (attempts = 0 OR invoke_at <= ?3)";
    let open = |row: &Row<'_>| {
        let secondary: Option<String> = row.get(0)?;
        let open = OpenCall {
            id: call.clone(),
            model_id: secondary.map(CallId::new).transpose().map_err(unreadable)?,
            name: row.get(1)?,
            server: Server(row.get(2)?),
            seq: row.get::<_, i64>(3)?.unsigned_abs(),
            since: Timestamp(row.get(4)?),
            until: row.get::<_, Option<i64>>(5)?.map(Timestamp),
            unapproved: false,
            problem: None,
        };
        Ok((open, row.get(6)?, row.get(7)?, row.get(8)?))
    };
    let found = conn.prepare_cached(sql)?.query_row(params![thread.key, call.as_str(), now.0], open);
    let Some((call, attempts, outcome, callback_base)) = found.optional()? else { return Ok(None) };
    let arguments = facts::arguments_of(conn, thread.key, call.seq, &call.id)?;
    Ok(Some(InvokeWork { thread, call, arguments, attempts, outcome, callback_base }))
}

fn load_answer(
    conn: &Connection,
    secrets: &Key,
    loaded: Loaded,
    number: u64,
    now: Timestamp,
) -> rusqlite::Result<Option<AnswerWork>> {
    let thread = loaded.thread;
    let sql = "SELECT call, body, answer, attempts, answered_at, server FROM questions \
               WHERE thread = ?1 AND no = ?2 AND answer_at IS NOT NULL AND (attempts = 0 OR answer_at <= ?3)";
    let mut statement = conn.prepare_cached(sql)?;
    let mut rows = statement.query(params![thread.key, number.cast_signed(), now.0])?;
    let Some(row) = rows.next()? else { return Ok(None) };
    let question = decrypt_question(secrets, &thread, number, row.get_ref(1)?.as_blob()?)?;
    let StoredQuestion::Choice { response_url: Some(response_url), .. } = question else { return Ok(None) };
    Ok(Some(AnswerWork {
        number,
        call: call_id(row, 0)?,
        server: row.get(5)?,
        response_url: ResponseUrl::new(response_url).map_err(unreadable)?,
        selected: row.get::<_, i64>(2)?.unsigned_abs() as usize,
        attempts: row.get(3)?,
        since: Timestamp(row.get(4)?),
        thread: Arc::clone(&thread),
    }))
}

fn load_check(conn: &Connection, loaded: Loaded, call: &CallId) -> rusqlite::Result<Option<CheckWork>> {
    let thread = loaded.thread;
    let sql = "SELECT server, state, coalesce(asked_after, acknowledged_at), gone_since FROM calls \
               WHERE thread = ?1 AND id = ?2 AND acknowledged_at IS NOT NULL AND state IN (0, 5)";
    let found = |row: &Row<'_>| {
        Ok(CheckWork {
            thread: Arc::clone(&thread),
            call: call.clone(),
            server: row.get(0)?,
            subscription: row.get::<_, i64>(1)? == 5,
            check: StatusCheck {
                checked_at: Timestamp(row.get(2)?),
                gone_since: row.get::<_, Option<i64>>(3)?.map(Timestamp),
            },
        })
    };
    conn.prepare_cached(sql)?.query_row(params![thread.key, call.as_str()], found).optional()
}

/// Stores the base of the callback URLs of invocations that an earlier release or an import left without one.
pub(super) fn keep_callback_base(conn: &Connection, base: &str) -> rusqlite::Result<()> {
    // Each of the two conditions has an index, which is much smaller than the table.
    for (index, condition) in [("calls_due", "attempts = 0"), ("calls_retry", "attempts > 0")] {
        let sql = format!(
            "UPDATE calls INDEXED BY {index} SET callback_base = ?1 \
             WHERE state = 0 AND invoke_at IS NOT NULL AND {condition} AND callback_base IS NULL"
        );
        conn.execute(&sql, [base])?;
    }
    Ok(())
}

pub(super) fn postpone(
    conn: &Connection,
    key: &WorkKey,
    at: Timestamp,
    attempts: u32,
    outcome: &str,
) -> rusqlite::Result<()> {
    match key {
        WorkKey::Ask { thread, turn } => {
            let sql = "UPDATE threads SET ask_at = ?3, ask_attempts = ?4 WHERE no = ?1 AND ask = ?2";
            conn.prepare_cached(sql)?.execute(params![thread, turn.cast_signed(), at.0, attempts])?;
        }
        WorkKey::Invoke { thread, call } => {
            let sql = "UPDATE calls SET invoke_at = ?3, attempts = ?4, outcome = ?5 \
                       WHERE thread = ?1 AND id = ?2 AND state = 0 AND invoke_at IS NOT NULL";
            conn.prepare_cached(sql)?.execute(params![thread, call.as_str(), at.0, attempts, outcome])?;
        }
        WorkKey::Answer { thread, number } => {
            let sql = "UPDATE questions SET answer_at = ?3, attempts = ?4 WHERE thread = ?1 AND no = ?2";
            conn.prepare_cached(sql)?.execute(params![thread, number.cast_signed(), at.0, attempts])?;
        }
        // A check that failed is due again after the usual pause.
        WorkKey::Check { thread, call } => {
            let sql = "UPDATE calls SET asked_after = ?3 WHERE thread = ?1 AND id = ?2";
            conn.prepare_cached(sql)?.execute(params![thread, call.as_str(), at.0])?;
        }
    }
    Ok(())
}

pub(super) fn redirect(conn: &Connection, key: &WorkKey, destination: &str) -> rusqlite::Result<()> {
    if let WorkKey::Ask { thread, turn } = key {
        let sql = "UPDATE threads SET ask_to = ?3 WHERE no = ?1 AND ask = ?2";
        conn.prepare_cached(sql)?.execute(params![thread, turn.cast_signed(), destination])?;
    }
    Ok(())
}

pub(super) fn answer_delivered(conn: &Connection, key: &WorkKey, attempts: u32) -> rusqlite::Result<()> {
    if let WorkKey::Answer { thread, number } = key {
        let sql = "UPDATE questions SET answer_at = NULL, attempts = ?3 WHERE thread = ?1 AND no = ?2";
        conn.prepare_cached(sql)?.execute(params![thread, number.cast_signed(), attempts])?;
    }
    Ok(())
}

pub(super) fn acknowledge(
    conn: &Connection,
    calls: &[(ThreadKey, CallId)],
    at: Timestamp,
) -> rusqlite::Result<()> {
    let mut statement = conn.prepare_cached(
        "UPDATE calls SET invoke_at = NULL, acknowledged_at = ?3 WHERE thread = ?1 AND id = ?2 AND state = 0",
    )?;
    for (thread, call) in calls {
        statement.execute(params![thread, call.as_str(), at.0])?;
    }
    Ok(())
}

pub(super) fn record_check(
    conn: &Connection,
    thread: ThreadKey,
    call: &CallId,
    check: StatusCheck,
) -> rusqlite::Result<()> {
    let sql = "UPDATE calls SET asked_after = ?3, gone_since = ?4 WHERE thread = ?1 AND id = ?2";
    let gone = check.gone_since.map(|gone| gone.0);
    conn.prepare_cached(sql)?.execute(params![thread, call.as_str(), check.checked_at.0, gone])?;
    Ok(())
}

/// Returns a condition that excludes sessions, and adds its parameters.
fn except(skip: &[SessionKey], parameters: &mut Vec<SqlValue>) -> String {
    if skip.is_empty() {
        return String::new();
    }
    let first = parameters.len() + 1;
    parameters.extend(skip.iter().map(|session| SqlValue::from(session.0.number())));
    let placeholders: Vec<String> = (first..=parameters.len()).map(|at| format!("?{at}")).collect();
    format!(" AND root NOT IN ({})", placeholders.join(", "))
}

pub(super) fn due_messages(
    conn: &Connection,
    now: Timestamp,
    skip: &[SessionKey],
    limit: usize,
) -> rusqlite::Result<Vec<OutboxMessage>> {
    let mut parameters = vec![SqlValue::from(now.0), SqlValue::from(limit as i64)];
    let except = except(skip, &mut parameters);
    let sql = format!(
        "SELECT no, root, sender, receiver, letter FROM letters WHERE due_at <= ?1{except} ORDER BY no LIMIT ?2"
    );
    let mut statement = conn.prepare(&sql)?;
    let mut found = statement.query(params_from_iter(parameters))?;
    let mut messages = Vec::new();
    while let Some(row) = found.next()? {
        match message(row) {
            // An unreadable message must not block the others.
            Err(error) if is_row_error(&error) => {
                tracing::error!(number = row.get::<_, i64>(0)?, %error, "a message between threads cannot be read");
            }
            message => messages.push(message?),
        }
    }
    Ok(messages)
}

fn message(row: &Row<'_>) -> rusqlite::Result<OutboxMessage> {
    Ok(OutboxMessage {
        key: OutboxKey(row.get(0)?),
        session: row.get(1)?,
        sender: thread_id(row, 2)?,
        receiver: thread_id(row, 3)?,
        message: serde_json::from_str(row.get_ref(4)?.as_str()?).map_err(unreadable)?,
    })
}

pub(super) fn due_timers(
    conn: &Connection,
    now: Timestamp,
    late_after: Timestamp,
    skip: &[SessionKey],
    limit: usize,
) -> rusqlite::Result<Vec<Timer>> {
    let mut parameters = vec![SqlValue::from(now.0)];
    let except_threads = except(skip, &mut parameters);
    let sql = format!("{DUE_THREADS}{except_threads} ORDER BY due LIMIT {limit}");
    let own = |row: &Row<'_>| Ok(Timer { session: row.get(0)?, thread: row.get(1)?, call: None });
    let mut timers: Vec<Timer> = conn
        .prepare_cached(&sql)?
        .query_map(params_from_iter(parameters), own)?
        .collect::<rusqlite::Result<_>>()?;
    let mut parameters =
        vec![SqlValue::from(now.0), SqlValue::from(late_after.0), SqlValue::from(Server::runtime().0)];
    let except_calls = except(skip, &mut parameters);
    let sql = format!("{DUE_CALLS}{except_calls} ORDER BY until LIMIT {limit}");
    let mut statement = conn.prepare_cached(&sql)?;
    let mut found = statement.query(params_from_iter(parameters))?;
    while let Some(row) = found.next()? {
        let thread = row.get(1)?;
        if let Some(call) = skip_unreadable(thread, call_id(row, 2))? {
            timers.push(Timer { session: row.get(0)?, thread, call: Some(call) });
        }
    }
    Ok(timers)
}

pub(super) fn postpone_due(
    conn: &Connection,
    timers: &[Timer],
    messages: &[OutboxKey],
    now: Timestamp,
    at: Timestamp,
) -> rusqlite::Result<()> {
    for Timer { thread, call, .. } in timers {
        match call {
            Some(call) => {
                let sql = "UPDATE calls SET until = ?4 WHERE thread = ?1 AND id = ?2 AND until <= ?3";
                conn.prepare_cached(sql)?.execute(params![thread, call.as_str(), now.0, at.0])?;
            }
            None => {
                let sql = "UPDATE threads SET due = ?3 WHERE no = ?1 AND due <= ?2";
                conn.prepare_cached(sql)?.execute(params![thread, now.0, at.0])?;
            }
        }
    }
    for message in messages {
        let sql = "UPDATE letters SET due_at = ?2 WHERE no = ?1";
        conn.prepare_cached(sql)?.execute(params![message.0, at.0])?;
    }
    Ok(())
}

/// Makes everything due that pauses for longer than its kind ever does. `hold` is the longest time for which a thread holds
/// its input.
pub(super) fn end_long_pauses(
    conn: &Connection,
    now: Timestamp,
    longest: LongestPauses,
    hold: Duration,
) -> rusqlite::Result<()> {
    let LongestPauses { retry, message, alert } = longest;
    let pauses = [
        ("UPDATE threads SET ask_at = ?1 WHERE ask_attempts > 0 AND ask_at > ?2", retry),
        (
            "UPDATE calls SET invoke_at = ?1 \
             WHERE state = 0 AND invoke_at IS NOT NULL AND attempts > 0 AND invoke_at > ?2",
            retry,
        ),
        (
            "UPDATE questions SET answer_at = ?1 WHERE answer_at IS NOT NULL AND attempts > 0 AND answer_at > ?2",
            retry,
        ),
        (
            "UPDATE calls SET asked_after = ?1 WHERE acknowledged_at IS NOT NULL AND state IN (0, 5) \
             AND coalesce(asked_after, acknowledged_at) > ?2",
            retry,
        ),
        ("UPDATE threads SET due = ?1 WHERE due > ?2", LONGEST_PAUSE.max(hold)),
        ("UPDATE threads SET due = ?1 WHERE due > ?2 AND status NOT IN ('failed', 'needs_you')", hold),
        ("UPDATE letters SET due_at = ?1 WHERE due_at > 0 AND due_at > ?2", message),
        ("UPDATE alerts SET due = ?1 WHERE due > ?2", alert),
        ("UPDATE deletions SET due = ?1 WHERE due > ?2", RETRY),
    ];
    for (sql, longest) in pauses {
        conn.prepare_cached(sql)?.execute([now.0, now.plus(longest).0])?;
    }
    Ok(())
}

/// Returns the time of the first retry or timer after a time. Earlier ones have been started already.
pub(super) fn next_due(conn: &Connection, after: Timestamp) -> rusqlite::Result<Option<Timestamp>> {
    let mut next: Option<i64> = None;
    for sql in NEXT_DUE {
        let due: Option<i64> = conn.prepare_cached(sql)?.query_row([after.0], |row| row.get(0))?;
        next = [next, due].into_iter().flatten().min();
    }
    Ok(next.map(Timestamp))
}

#[cfg(test)]
mod tests {
    use rusqlite::Statement;

    use super::*;
    use crate::store::sqlite::prune::DELETE_EVENT_IDS;
    use crate::store::sqlite::tests::database;
    use crate::store::sqlite::writes::FORGET_EVENT_IDS;

    fn plan(conn: &Connection, sql: &str) -> Vec<String> {
        let mut statement = conn.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
        let bare = vec![0; Statement::parameter_count(&statement)];
        let steps = statement.query_map(params_from_iter(bare), |row| row.get(3)).unwrap();
        steps.collect::<rusqlite::Result<_>>().unwrap()
    }

    /// The query planner knows nothing about table sizes here, so the plans are the same for a million rows.
    #[test]
    fn work_is_found_by_an_index_and_in_its_order() {
        let conn = database();
        let table = [
            (ASK.next_session, "threads_ask"),
            (ASK.new, "threads_ask"),
            (ASK.retries, "threads_retry"),
            (ASK.destinations[0], "threads_ask"),
            (ASK.destinations[1], "threads_retry"),
            (INVOKE.next_session, "calls_due"),
            (INVOKE.new, "calls_due"),
            (INVOKE.retries, "calls_retry"),
            (INVOKE.destinations[0], "calls_due"),
            (INVOKE.destinations[1], "calls_retry"),
            (ANSWER.next_session, "questions_answer"),
            (ANSWER.new, "questions_answer"),
            (ANSWER.retries, "questions_retry"),
            (ANSWER.destinations[0], "questions_answer"),
            (ANSWER.destinations[1], "questions_retry"),
            (CHECKS, "calls_check"),
            ("SELECT no FROM threads WHERE due <= ?1 ORDER BY due", "threads_due"),
            ("SELECT id FROM calls WHERE until <= ?1 ORDER BY until", "calls_until"),
            (NEXT_DUE[0], "threads_due"),
            (NEXT_DUE[1], "calls_until"),
            (NEXT_DUE[2], "threads_retry_at"),
            (NEXT_DUE[3], "calls_retry_at"),
            (NEXT_DUE[4], "questions_retry_at"),
        ];
        for (sql, index) in table {
            let plan = plan(&conn, sql);
            let searched = plan[0].starts_with("SEARCH ") && plan[0].contains(&format!("INDEX {index} ("));
            assert!(searched && plan.len() == 1, "{sql}: {plan:?}");
        }
    }

    /// The time to delete event ids does not depend on how many a thread has.
    #[test]
    fn event_ids_are_deleted_by_an_index_without_sorting() {
        let conn = database();
        for sql in [FORGET_EVENT_IDS, DELETE_EVENT_IDS] {
            let plan = plan(&conn, sql);
            let scans = plan.iter().any(|step| step.starts_with("SCAN ") || step.contains("TEMP B-TREE"));
            let found = plan.iter().any(|step| step.contains("INDEX seen_no ("));
            assert!(found && !scans, "{sql}: {plan:?}");
        }
    }
}
