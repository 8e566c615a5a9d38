//! Queries for due work. Model requests and wake times of threads have their own tables; due times of calls and answers
//! are columns of the call or question.
//!
//! An attempt begins with a claim (see `nodes.rs`). Pages of due work claim nothing: they only tell what may be claimed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rap_agent::{LONGEST_PAUSE, LostAfter, OpenCall, Server, StatusCheck};
use rap_io::hashing::in_place;
use rap_io::secret_box::Key;
use rap_protocol::{CallId, ResponseUrl, Timestamp};
use tokio_postgres::Row;

use super::connect::{Connections, Transaction};
use super::heads::{
    self, attempts, call_id, number, session_key, thread_id, thread_key, timestamp, timestamp_or_none,
};
use super::history::arguments_of;
use super::nodes::{NodeNumber, takeable};
use super::statement::{BEGIN_READ, Failure, Statement, get, skip_unreadable, unreadable};
use crate::store::damage::Damage;
use crate::store::deletion::RETRY;
use crate::store::stored::{RETRY_QUERIES, RETRY_ROWS, decrypt_question};
use crate::store::work::DueRetries;
use crate::store::{
    AnswerWork, AskWork, CheckWork, DuePage, DueWork, InvokeWork, Loaded, LongestPauses, OutboxKey,
    OutboxMessage, SessionKey, StoredQuestion, ThreadKey, Timer, Work, WorkKey, WorkKind, WorkQueue,
};

/// The table of work of one kind, and its columns. New work, which was not attempted yet, is always due and is found
/// session by session. Retries are found by their due time.
struct Queue {
    table: &'static str,
    destination: &'static str,
    due_at: &'static str,
    /// Columns of the key of an item.
    key: &'static str,
    /// Condition on rows that are work.
    is_work: &'static str,
}

const ASK: Queue = Queue {
    table: "asks",
    destination: "destination",
    due_at: "due_at",
    key: "thread, turn",
    is_work: "true",
};
const INVOKE: Queue = Queue {
    table: "calls",
    destination: "server",
    due_at: "invoke_at",
    key: "thread, id",
    is_work: "state = 0 AND invoke_at IS NOT NULL",
};
const ANSWER: Queue = Queue {
    table: "questions",
    destination: "server",
    due_at: "answer_at",
    key: "thread, no",
    is_work: "answer_at IS NOT NULL",
};

impl Queue {
    fn of(kind: WorkKind) -> Option<&'static Queue> {
        match kind {
            WorkKind::Ask => Some(&ASK),
            WorkKind::Invoke => Some(&INVOKE),
            WorkKind::Answer => Some(&ANSWER),
            // Checks have their own order: the call that was checked longest ago comes first.
            WorkKind::Check => None,
        }
    }

    /// Finds new work after a session. Each session is found by one index lookup.
    fn new_work(&self) -> String {
        let Queue { table, destination, due_at, key, is_work } = self;
        let free = takeable("claim", "$5");
        let new = format!("{table} WHERE {is_work} AND attempts = 0 AND {destination} = $1 AND {free}");
        format!(
            "WITH RECURSIVE s(session, at) AS (\
             (SELECT session, 1 FROM {new} AND session > $2 ORDER BY session LIMIT 1) \
             UNION ALL SELECT (SELECT w.session FROM {table} w WHERE {is_work} AND attempts = 0 \
             AND {destination} = $1 AND {free} AND w.session > s.session ORDER BY w.session LIMIT 1), at + 1 \
             FROM s WHERE s.session IS NOT NULL AND at < $3) \
             SELECT w.*, s.session FROM s, LATERAL (SELECT {key} FROM {new} AND session = s.session \
             ORDER BY {due_at} LIMIT $4) AS w WHERE s.session IS NOT NULL ORDER BY s.session"
        )
    }

    /// Finds due retries.
    fn retries(&self) -> String {
        let Queue { table, destination, due_at, key, is_work } = self;
        format!(
            "SELECT {key}, session FROM {table} WHERE {is_work} AND attempts > 0 AND {destination} = $1 \
             AND {due_at} <= $2 AND session <> ALL($3::bigint[]) AND {} ORDER BY {due_at} LIMIT $4",
            takeable("claim", "$5")
        )
    }

    /// Finds the destinations. They are few, so each is found by one index lookup.
    fn destinations(&self, attempts: &str) -> String {
        let Queue { table, destination, is_work, .. } = self;
        let work = format!("{table} WHERE {is_work} AND attempts {attempts} 0");
        format!(
            "WITH RECURSIVE d(name) AS (\
             (SELECT {destination} FROM {work} ORDER BY {destination} LIMIT 1) \
             UNION ALL SELECT (SELECT {destination} FROM {work} AND {destination} > d.name \
             ORDER BY {destination} LIMIT 1) FROM d WHERE d.name IS NOT NULL) \
             SELECT name FROM d WHERE name IS NOT NULL"
        )
    }
}

/// Finds calls and subscriptions whose status is to be checked, by the rule of [`StatusCheck::due`].
const CHECKS: &str = "SELECT thread, id, session FROM calls \
     WHERE acknowledged_at IS NOT NULL AND state IN (0, 5) AND server = $1 \
     AND coalesce(asked_after, acknowledged_at) <= $3 \
     AND (gone_since IS NOT NULL OR coalesce(asked_after, acknowledged_at) <= $2) AND {free} \
     ORDER BY coalesce(asked_after, acknowledged_at) LIMIT $4";
const DUE_THREADS: &str = "SELECT session, thread, due_at AS at FROM wakes \
     WHERE due_at <= $1 AND session <> ALL($2::bigint[]) AND {free} ORDER BY due_at LIMIT $3";
const DUE_CALLS: &str = "SELECT session, thread, id, until AS at FROM calls \
     WHERE until <= $1 AND session <> ALL($2::bigint[]) AND {free} AND (until > $5 OR server = $6) \
     ORDER BY until LIMIT $3";
/// Finds the messages that this node delivers. Messages that another node delivers come first if they are for the same
/// receiver, so that it gets all of them in order.
const DUE_MESSAGES: &str = "SELECT no, session, sender, receiver, body FROM outbox \
     WHERE due_at <= $1 AND session <> ALL($2::bigint[]) AND ({free} OR receiver IN \
     (SELECT receiver FROM outbox WHERE due_at <= $1 AND {free})) ORDER BY no LIMIT $3";
const NEXT_DUE: [&str; 6] = [
    "SELECT min(due_at) FROM wakes WHERE due_at > $1",
    "SELECT min(until) FROM calls WHERE until > $1",
    "SELECT min(due_at) FROM asks WHERE attempts > 0 AND due_at > $1",
    "SELECT min(invoke_at) FROM calls WHERE state = 0 AND invoke_at IS NOT NULL AND attempts > 0 AND invoke_at > $1",
    "SELECT min(answer_at) FROM questions WHERE answer_at IS NOT NULL AND attempts > 0 AND answer_at > $1",
    "SELECT min(due_at) FROM outbox WHERE due_at > 0 AND due_at > $1",
];

fn sessions(skip: &[SessionKey]) -> Vec<i64> {
    skip.iter().map(|session| session.0.number()).collect()
}

pub(super) async fn destinations(connections: &Connections, kind: WorkKind) -> Result<Vec<String>, Failure> {
    let Some(queue) = Queue::of(kind) else { return Ok(Vec::new()) };
    let queries = ["=", ">"].map(|attempts| Statement::new(queue.destinations(attempts)));
    let found = connections.read(queries.into()).await?;
    let names: Result<Vec<String>, Failure> = found.iter().flatten().map(|row| get(row, 0)).collect();
    let mut names = names?;
    names.sort();
    names.dedup();
    Ok(names)
}

pub(super) async fn due(
    connections: &Connections,
    node: NodeNumber,
    queue: &WorkQueue,
    page: &DuePage,
    lost_after: LostAfter,
) -> Result<DueWork, Failure> {
    let Some(table) = Queue::of(queue.kind) else {
        return due_checks(connections, node, queue, page, lost_after).await;
    };
    let mut tx = connections.begin(BEGIN_READ).await?;
    let (mut work, more) = due_retries(&mut tx, node, table, queue, page).await?;
    let after = page.after.map_or(i64::MIN, |session| session.0.number());
    let per_session = page.per_session + page.skip.len();
    let statement = Statement::new(table.new_work()).text(&queue.destination).with(after);
    let statement = statement.with(page.sessions as i64).with(per_session as i64).with(node.0);
    let found = tx.query(statement).await?;
    let mut counts: BTreeMap<SessionKey, usize> = BTreeMap::new();
    for row in &found {
        let session = session_key(row, 2)?;
        let count = counts.entry(session).or_default();
        let Some(key) = skip_unreadable(thread_key(row, 0)?, work_key(queue.kind, row))? else { continue };
        if *count < page.per_session && !page.skip.contains(&key) {
            work.push((session, key));
            *count += 1;
        }
    }
    let last = counts.last_key_value().map(|(session, _)| *session);
    Ok(DueWork { work, after: last.filter(|_| counts.len() >= page.sessions), more })
}

/// Returns due retries, and whether more are due.
async fn due_retries(
    tx: &mut Transaction,
    node: NodeNumber,
    table: &Queue,
    queue: &WorkQueue,
    page: &DuePage,
) -> Result<(Vec<(SessionKey, WorkKey)>, bool), Failure> {
    let rows_at_once = RETRY_ROWS + page.skip.len();
    let mut retries = DueRetries::new(page);
    for _ in 0..RETRY_QUERIES {
        let full = retries.full();
        let statement = Statement::new(table.retries()).text(&queue.destination).with(page.now.0);
        let statement = statement.with(sessions(&full)).with(rows_at_once as i64).with(node.0);
        let rows = tx.query(statement).await?;
        for row in &rows {
            let Some(key) = skip_unreadable(thread_key(row, 0)?, work_key(queue.kind, row))? else {
                continue;
            };
            retries.add(session_key(row, 2)?, key);
        }
        if rows.len() < rows_at_once {
            return Ok(retries.finish(true));
        }
        if retries.full().len() == full.len() {
            break;
        }
    }
    Ok(retries.finish(false))
}

fn work_key(kind: WorkKind, row: &Row) -> Result<WorkKey, Failure> {
    let thread = thread_key(row, 0)?;
    Ok(match kind {
        WorkKind::Ask => WorkKey::Ask { thread, turn: number(row, 1)? },
        WorkKind::Invoke => WorkKey::Invoke { thread, call: call_id(row, 1)? },
        WorkKind::Answer => WorkKey::Answer { thread, number: number(row, 1)? },
        WorkKind::Check => WorkKey::Check { thread, call: call_id(row, 1)? },
    })
}

async fn due_checks(
    connections: &Connections,
    node: NodeNumber,
    queue: &WorkQueue,
    page: &DuePage,
    lost_after: LostAfter,
) -> Result<DueWork, Failure> {
    let (before, gone_before) = (page.now.minus(lost_after.0), page.now.minus(lost_after.pause()));
    let limit = page.sessions + page.skip.len();
    let sql = CHECKS.replace("{free}", &takeable("claim", "$5"));
    let statement = Statement::new(sql).text(&queue.destination).with(before.0).with(gone_before.0);
    let found = connections.read_one(statement.with(limit as i64).with(node.0)).await?;
    let mut work = Vec::new();
    for row in &found {
        let key = skip_unreadable(thread_key(row, 0)?, work_key(WorkKind::Check, row))?;
        if let Some(key) = key.filter(|key| !page.skip.contains(key)) {
            work.push((session_key(row, 2)?, key));
        }
    }
    Ok(DueWork { work, after: None, more: found.len() == limit })
}

/// Returns the statement that claims an item for a node and loads its row, if it is still due and no other node has claimed
/// it. New work is always due, since the clock may have been set back.
fn claim(key: &WorkKey, node: NodeNumber, now: Timestamp, lost_after: LostAfter) -> Statement {
    let (table, number, set, condition, columns) = match key {
        // A model request that is taken over is a new attempt, so that its text differs from that of the attempt
        // before.
        WorkKey::Ask { .. } => (
            "asks",
            "turn",
            ", attempts = w.attempts + coalesce(w.claim <> $4, false)::int",
            "(attempts = 0 OR due_at <= $3)",
            "w.attempts",
        ),
        WorkKey::Invoke { .. } => (
            "calls",
            "id",
            "",
            "state = 0 AND invoke_at IS NOT NULL AND (attempts = 0 OR invoke_at <= $3)",
            "w.call_id, w.name, w.server, w.seq, w.since, w.until, w.attempts, w.outcome, w.callback_base",
        ),
        WorkKey::Answer { .. } => (
            "questions",
            "no",
            "",
            "answer_at IS NOT NULL AND (attempts = 0 OR answer_at <= $3)",
            "w.call, w.body, w.answer, w.attempts, w.answered_at, w.server",
        ),
        WorkKey::Check { .. } => (
            "calls",
            "id",
            "",
            "acknowledged_at IS NOT NULL AND state IN (0, 5) \
             AND coalesce(asked_after, acknowledged_at) <= $3 \
             AND (gone_since IS NOT NULL OR coalesce(asked_after, acknowledged_at) <= $5)",
            "w.server, w.state, coalesce(w.asked_after, w.acknowledged_at), w.gone_since",
        ),
    };
    let free = takeable("claim", "$4");
    let sql = format!(
        "UPDATE {table} w SET claim = $4{set} FROM (SELECT thread FROM {table} \
         WHERE thread = $1 AND {number} = $2 AND {condition} AND {free} FOR UPDATE SKIP LOCKED) AS due \
         WHERE w.thread = due.thread AND w.{number} = $2 RETURNING {columns}"
    );
    let statement = Statement::new(sql).thread(key.thread());
    match key {
        WorkKey::Ask { turn: number, .. } | WorkKey::Answer { number, .. } => {
            statement.with(number.cast_signed()).with(now.0).with(node.0)
        }
        WorkKey::Invoke { call, .. } => statement.text(call.as_str()).with(now.0).with(node.0),
        WorkKey::Check { call, .. } => statement
            .text(call.as_str())
            .with(now.minus(lost_after.pause()).0)
            .with(node.0)
            .with(now.minus(lost_after.0).0),
    }
}

pub(super) async fn load(
    connections: &Connections,
    secrets: &Key,
    (node, lost_after): (NodeNumber, LostAfter),
    key: &WorkKey,
    now: Timestamp,
) -> Result<Option<Work>, Failure> {
    // The head is read after the claim, so it is not older.
    let statements = vec![claim(key, node, now, lost_after), heads::by_key(key.thread())];
    let rows = connections.write_soon(statements).await?;
    let Some(row) = rows[0].first() else { return Ok(None) };
    let head = rows[1].first().ok_or_else(|| unreadable(Damage::MissingThread))?;
    let Loaded { thread, head, .. } = heads::loaded(head)?;
    Ok(match key {
        WorkKey::Ask { turn, .. } => {
            let Some(up_to) = head.prompt_up_to().filter(|_| head.turn() == *turn) else { return Ok(None) };
            let ask = AskWork { thread, head, turn: *turn, up_to, attempts: attempts(row, 0)? };
            Some(Work::Ask(Box::new(ask)))
        }
        WorkKey::Invoke { call, .. } => {
            let call = open_call(row, call)?;
            let mut tx = connections.begin(BEGIN_READ).await?;
            let arguments = arguments_of(&mut tx, thread.key, call.seq, &call.id).await?;
            let (attempts, outcome, callback_base) = (attempts(row, 6)?, get(row, 7)?, get(row, 8)?);
            Some(Work::Invoke(InvokeWork { thread, call, arguments, attempts, outcome, callback_base }))
        }
        WorkKey::Answer { number: question_number, .. } => {
            let question =
                decrypt_question(secrets, &thread, *question_number, get(row, 1)?).map_err(unreadable)?;
            let StoredQuestion::Choice { response_url: Some(response_url), .. } = question else {
                return Ok(None);
            };
            Some(Work::Answer(AnswerWork {
                number: *question_number,
                call: call_id(row, 0)?,
                server: get(row, 5)?,
                response_url: ResponseUrl::new(response_url).map_err(unreadable)?,
                selected: number(row, 2)? as usize,
                attempts: attempts(row, 3)?,
                since: timestamp(row, 4)?,
                thread: Arc::clone(&thread),
            }))
        }
        WorkKey::Check { call, .. } => Some(Work::Check(CheckWork {
            thread,
            call: call.clone(),
            server: get(row, 0)?,
            subscription: get::<i64>(row, 1)? == 5,
            check: StatusCheck { checked_at: timestamp(row, 2)?, gone_since: timestamp_or_none(row, 3)? },
        })),
    })
}

fn open_call(row: &Row, call: &CallId) -> Result<OpenCall, Failure> {
    let secondary: Option<String> = get(row, 0)?;
    Ok(OpenCall {
        id: call.clone(),
        model_id: secondary.map(CallId::new).transpose().map_err(unreadable)?,
        name: get(row, 1)?,
        server: Server(get(row, 2)?),
        seq: number(row, 3)?,
        since: timestamp(row, 4)?,
        until: timestamp_or_none(row, 5)?,
        unapproved: false,
        problem: None,
    })
}

/// Returns the statement that postpones an item, unless another node has taken it over.
pub(super) fn postpone(
    key: &WorkKey,
    node: NodeNumber,
    at: Timestamp,
    attempts: u32,
    outcome: &str,
) -> Statement {
    let attempts = i64::from(attempts);
    match key {
        WorkKey::Ask { thread, turn } => Statement::new(
            "UPDATE asks SET due_at = $3, attempts = $4, claim = NULL \
             WHERE thread = $1 AND turn = $2 AND coalesce(claim, $5) = $5",
        )
        .thread(*thread)
        .with(turn.cast_signed())
        .with(at.0)
        .with(attempts)
        .with(node.0),
        WorkKey::Invoke { thread, call } => Statement::new(
            "UPDATE calls SET invoke_at = $3, attempts = $4, outcome = $5, claim = NULL \
             WHERE thread = $1 AND id = $2 AND state = 0 AND invoke_at IS NOT NULL AND coalesce(claim, $6) = $6",
        )
        .thread(*thread)
        .text(call.as_str())
        .with(at.0)
        .with(attempts)
        .text(outcome)
        .with(node.0),
        WorkKey::Answer { thread, number } => Statement::new(
            "UPDATE questions SET answer_at = $3, attempts = $4, claim = NULL \
             WHERE thread = $1 AND no = $2 AND coalesce(claim, $5) = $5",
        )
        .thread(*thread)
        .with(number.cast_signed())
        .with(at.0)
        .with(attempts)
        .with(node.0),
        // A check that failed is due again after the usual pause.
        WorkKey::Check { thread, call } => {
            Statement::new("UPDATE calls SET asked_after = $3, claim = NULL WHERE thread = $1 AND id = $2")
                .thread(*thread)
                .text(call.as_str())
                .with(at.0)
        }
    }
}

/// Returns the statement that changes the destination of a model request, unless another node has taken it over. The
/// claim is kept: this node continues with the request.
pub(super) fn redirect(key: &WorkKey, node: NodeNumber, destination: &str) -> Option<Statement> {
    let WorkKey::Ask { thread, turn } = key else { return None };
    let sql = "UPDATE asks SET destination = $3 WHERE thread = $1 AND turn = $2 AND coalesce(claim, $4) = $4";
    let statement = Statement::new(sql).thread(*thread).with(turn.cast_signed());
    Some(statement.text(destination).with(node.0))
}

/// Returns the statement that records the delivery of an answer, if the key is that of an answer.
pub(super) fn answer_delivered(key: &WorkKey, attempts: u32) -> Option<Statement> {
    let WorkKey::Answer { thread, number } = key else { return None };
    let sql =
        "UPDATE questions SET answer_at = NULL, attempts = $3, claim = NULL WHERE thread = $1 AND no = $2";
    Some(Statement::new(sql).thread(*thread).with(number.cast_signed()).with(i64::from(attempts)))
}

pub(super) fn acknowledge(mut calls: Vec<(ThreadKey, CallId)>, at: Timestamp) -> Statement {
    // Rows are locked in the order of their keys, so that two nodes do not wait for each other.
    calls.sort();
    let (threads, ids): (Vec<i64>, Vec<String>) =
        calls.iter().map(|(thread, call)| (thread.number(), call.as_str().to_owned())).unzip();
    Statement::new(
        "UPDATE calls c SET invoke_at = NULL, acknowledged_at = $3, claim = NULL \
         FROM (SELECT c.thread, c.id FROM unnest($1::bigint[], $2::text[]) AS w(thread, id) \
         JOIN calls c ON c.thread = w.thread AND c.id = w.id ORDER BY c.thread, c.id FOR UPDATE OF c) AS w \
         WHERE c.thread = w.thread AND c.id = w.id AND c.state = 0",
    )
    .with(threads)
    .with(ids)
    .with(at.0)
}

pub(super) fn record_check(thread: ThreadKey, call: &CallId, check: StatusCheck) -> Statement {
    Statement::new(
        "UPDATE calls SET asked_after = $3, gone_since = $4, claim = NULL WHERE thread = $1 AND id = $2",
    )
    .thread(thread)
    .text(call.as_str())
    .with(check.checked_at.0)
    .with(check.gone_since.map(|gone| gone.0))
}

pub(super) fn due_messages_statement(
    node: NodeNumber,
    now: Timestamp,
    skip: &[SessionKey],
    limit: usize,
) -> Statement {
    let sql = DUE_MESSAGES.replace("{free}", &takeable("claim", "$4"));
    Statement::new(sql).with(now.0).with(sessions(skip)).with(limit as i64).with(node.0)
}

pub(super) async fn due_messages(
    connections: &Connections,
    node: NodeNumber,
    now: Timestamp,
    skip: &[SessionKey],
    limit: usize,
) -> Result<Vec<OutboxMessage>, Failure> {
    let mut messages = Vec::new();
    for row in connections.read_one(due_messages_statement(node, now, skip, limit)).await? {
        match message(&row) {
            // An unreadable message must not block the others.
            Err(Failure::Row(error)) => {
                tracing::error!(number = get::<i64>(&row, 0)?, %error, "a message between threads cannot be read");
            }
            message => messages.push(message?),
        }
    }
    Ok(messages)
}

fn message(row: &Row) -> Result<OutboxMessage, Failure> {
    let body: &str = get(row, 4)?;
    Ok(OutboxMessage {
        key: OutboxKey(get(row, 0)?),
        session: session_key(row, 1)?,
        sender: thread_id(row, 2)?,
        receiver: thread_id(row, 3)?,
        message: in_place(body.len(), || serde_json::from_str(body)).map_err(unreadable)?,
    })
}

/// Returns due timers. They are claimed if there are other nodes, which would fire them too.
pub(super) async fn due_timers(
    connections: &Connections,
    (node, has_peers): (NodeNumber, bool),
    (now, late_after): (Timestamp, Timestamp),
    skip: &[SessionKey],
    limit: usize,
) -> Result<Vec<Timer>, Failure> {
    let due = |rows: &str, table: &str, claim: &str, key: &str| {
        let rows = rows.replace("{free}", &takeable(claim, "$4"));
        let sql = if has_peers {
            let columns: Vec<String> = key.split(", ").map(|column| format!("t.{column}")).collect();
            format!(
                "WITH due AS ({rows} FOR UPDATE SKIP LOCKED), taken AS (UPDATE {table} t SET {claim} = $4 FROM due \
                 WHERE ({}) = ({}) RETURNING due.*) SELECT * FROM taken ORDER BY at",
                columns.join(", "),
                key.split(", ").map(|column| format!("due.{column}")).collect::<Vec<_>>().join(", "),
            )
        } else {
            rows
        };
        Statement::new(sql).with(now.0).with(sessions(skip)).with(limit as i64).with(node.0)
    };
    let calls = due(DUE_CALLS, "calls", "until_claim", "thread, id");
    let calls = calls.with(late_after.0).text(&Server::runtime().0);
    let statements = vec![due(DUE_THREADS, "wakes", "claim", "thread"), calls];
    let found = match has_peers {
        true => connections.write_soon(statements).await?,
        false => connections.read(statements).await?,
    };
    let mut timers = Vec::new();
    for row in &found[0] {
        timers.push(Timer { session: session_key(row, 0)?, thread: thread_key(row, 1)?, call: None });
    }
    for row in &found[1] {
        let thread = thread_key(row, 1)?;
        if let Some(call) = skip_unreadable(thread, call_id(row, 2))? {
            timers.push(Timer { session: session_key(row, 0)?, thread, call: Some(call) });
        }
    }
    Ok(timers)
}

pub(super) fn postpone_due(
    timers: &[Timer],
    messages: &[OutboxKey],
    now: Timestamp,
    at: Timestamp,
) -> Vec<Statement> {
    let own = timers.iter().filter(|timer| timer.call.is_none());
    let own: Vec<i64> = own.map(|timer| timer.thread.number()).collect();
    let calls = timers.iter().filter_map(|timer| Some((timer.thread.number(), timer.call.as_ref()?)));
    let (threads, calls): (Vec<i64>, Vec<String>) =
        calls.map(|(thread, call)| (thread, call.as_str().to_owned())).unzip();
    vec![
        Statement::new("UPDATE wakes SET due_at = $3, claim = NULL WHERE thread = ANY($1) AND due_at <= $2")
            .with(own)
            .with(now.0)
            .with(at.0),
        Statement::new(
            "UPDATE calls c SET until = $4, until_claim = NULL FROM unnest($1::bigint[], $2::text[]) AS w(thread, id) \
             WHERE c.thread = w.thread AND c.id = w.id AND c.until <= $3",
        )
        .with(threads)
        .with(calls)
        .with(now.0)
        .with(at.0),
        Statement::new("UPDATE outbox SET due_at = $2, claim = NULL WHERE no = ANY($1)")
            .with(messages.iter().map(|OutboxKey(number)| *number).collect::<Vec<i64>>())
            .with(at.0),
    ]
}

/// Returns the statements that make everything due that pauses for longer than its kind ever does. `hold` is the
/// longest time for which a thread holds its input.
pub(super) fn end_long_pauses(now: Timestamp, longest: LongestPauses, hold: Duration) -> Vec<Statement> {
    let LongestPauses { retry, message, alert } = longest;
    let pauses = [
        ("UPDATE asks SET due_at = $1 WHERE attempts > 0 AND due_at > $2", retry),
        (
            "UPDATE calls SET invoke_at = $1 \
             WHERE state = 0 AND invoke_at IS NOT NULL AND attempts > 0 AND invoke_at > $2",
            retry,
        ),
        (
            "UPDATE questions SET answer_at = $1 WHERE answer_at IS NOT NULL AND attempts > 0 AND answer_at > $2",
            retry,
        ),
        (
            "UPDATE calls SET asked_after = $1 WHERE acknowledged_at IS NOT NULL AND state IN (0, 5) \
             AND coalesce(asked_after, acknowledged_at) > $2",
            retry,
        ),
        ("UPDATE wakes SET due_at = $1 WHERE due_at > $2", LONGEST_PAUSE.max(hold)),
        ("UPDATE wakes SET due_at = $1 WHERE due_at > $2 AND NOT is_retry", hold),
        ("UPDATE outbox SET due_at = $1 WHERE due_at > 0 AND due_at > $2", message),
        ("UPDATE alerts SET due = $1 WHERE due > $2", alert),
        ("UPDATE deletions SET due = $1 WHERE due > $2", RETRY),
    ];
    let statement = |(sql, longest)| Statement::new(sql).with(now.0).with(now.plus(longest).0);
    pauses.map(statement).into()
}

/// Returns the time of the first retry or timer after a time. Earlier ones have been started already.
pub(super) async fn next_due(
    connections: &Connections,
    after: Timestamp,
) -> Result<Option<Timestamp>, Failure> {
    let statements = NEXT_DUE.iter().map(|sql| Statement::new(*sql).with(after.0)).collect();
    let mut next: Option<i64> = None;
    for row in connections.read(statements).await?.iter().flatten() {
        next = [next, get(row, 0)?].into_iter().flatten().min();
    }
    Ok(next.map(Timestamp))
}
