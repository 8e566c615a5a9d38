//! Rows: how a thread, its entries and its calls are written and read. SQL lives here, in `read.rs` and in `due.rs`.

use std::sync::Arc;

use rap_agent::{
    CallState, Effect, Entry, Head, Item, Letter, Limits, NewQuestion, PastCall, Queue, Seq, Write, words,
};
use rap_io::secret_box::Key;
use rap_protocol::{CallId, EventId, ThreadId, Timestamp, UserId};
use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde_json::{Map, Value, json};

use super::Committed;
use super::cache::Loaded;
use super::thread::{NewThread, Thread, ThreadNo, random};

const THREAD_COLUMNS: &str = "no, id, parent, root, born_at, ancestors, incarnation, agent, user_id, title, created_at, \
                              version, head, source";

pub(super) fn key(thread: ThreadNo, seq: Seq) -> i64 {
    (thread << 32) | i64::try_from(seq).unwrap_or(0)
}

pub(super) fn state_number(state: CallState) -> i64 {
    match state {
        CallState::Open => 0,
        CallState::Returned => 1,
        CallState::Interrupted => 2,
        CallState::Failed => 3,
        CallState::TimedOut => 4,
        CallState::Subscribed => 5,
        CallState::Ended => 6,
    }
}

pub(super) fn state_of(number: i64) -> rusqlite::Result<CallState> {
    Ok(match number {
        0 => CallState::Open,
        1 => CallState::Returned,
        2 => CallState::Interrupted,
        3 => CallState::Failed,
        4 => CallState::TimedOut,
        5 => CallState::Subscribed,
        6 => CallState::Ended,
        other => return Err(rusqlite::Error::IntegralValueOutOfRange(0, other)),
    })
}

fn queue_number(queue: Queue) -> i64 {
    match queue {
        Queue::Held => 0,
        Queue::Queued => 1,
    }
}

/// What is in a column but can not be there.
pub(super) fn unreadable(error: impl std::error::Error + Send + Sync + 'static) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(0, Type::Text, Box::new(error))
}

/// Whether the database gave what it has, and that makes no sense.
pub(super) fn is_illegible(error: &rusqlite::Error) -> bool {
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
    )
}

pub(super) fn load(conn: &Connection, no: ThreadNo) -> rusqlite::Result<Option<Loaded>> {
    let sql = format!("SELECT {THREAD_COLUMNS} FROM threads WHERE no = ?1");
    conn.prepare_cached(&sql)?.query_row([no], loaded).optional()
}

pub(super) fn number_of(conn: &Connection, id: &ThreadId) -> rusqlite::Result<Option<ThreadNo>> {
    let mut statement = conn.prepare_cached("SELECT no FROM threads WHERE id = ?1")?;
    statement.query_row([id.as_str()], |row| row.get(0)).optional()
}

pub(super) fn loaded(row: &Row<'_>) -> rusqlite::Result<Loaded> {
    let thread = Thread {
        no: row.get(0)?,
        id: id(row, 1)?,
        parent: row.get(2)?,
        source: row.get(13)?,
        root: row.get(3)?,
        born_at: row.get::<_, i64>(4)?.unsigned_abs(),
        ancestors: serde_json::from_str(row.get_ref(5)?.as_str()?).map_err(unreadable)?,
        incarnation: row.get::<_, i64>(6)?.cast_unsigned(),
        agent: row.get(7)?,
        user_id: row.get::<_, Option<String>>(8)?.map(UserId::new).transpose().map_err(unreadable)?,
        title: row.get(9)?,
        created_at: Timestamp(row.get(10)?),
    };
    let head = serde_json::from_str(row.get_ref(12)?.as_str()?).map_err(unreadable)?;
    Ok(Loaded { thread: Arc::new(thread), head, version: row.get(11)? })
}

pub(super) fn id(row: &Row<'_>, at: usize) -> rusqlite::Result<ThreadId> {
    ThreadId::new(row.get::<_, String>(at)?).map_err(unreadable)
}

pub(super) fn call_id(row: &Row<'_>, at: usize) -> rusqlite::Result<CallId> {
    CallId::new(row.get::<_, String>(at)?).map_err(unreadable)
}

fn json_of(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("bug: what we store is JSON")
}

/// A new root thread to which nothing has happened.
pub(super) fn insert_root(
    conn: &Connection,
    new: &NewThread,
    now: Timestamp,
) -> rusqlite::Result<Option<Loaded>> {
    if number_of(conn, &new.id)?.is_some() {
        return Ok(None);
    }
    let mut thread = Thread {
        no: next_number(conn)?,
        id: new.id.clone(),
        root: 0,
        parent: None,
        source: None,
        born_at: 0,
        ancestors: Vec::new(),
        incarnation: random(),
        agent: new.agent.clone(),
        user_id: new.user_id.clone(),
        title: new.title.clone(),
        created_at: now,
    };
    thread.root = thread.no;
    let head = Head::new();
    insert_thread(conn, &thread, &head, now)?;
    Ok(Some(Loaded { thread: Arc::new(thread), head, version: 1 }))
}

fn next_number(conn: &Connection) -> rusqlite::Result<ThreadNo> {
    let mut statement = conn.prepare_cached("SELECT coalesce(max(no), 0) + 1 FROM threads")?;
    statement.query_row([], |row| row.get(0))
}

fn insert_thread(conn: &Connection, thread: &Thread, head: &Head, now: Timestamp) -> rusqlite::Result<()> {
    let mut statement = conn.prepare_cached(
        "INSERT INTO threads (no, id, parent, root, born_at, ancestors, incarnation, agent, user_id, title, \
         created_at, updated_at, version, status, ask, due, head, source) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, 1, ?13, ?14, NULL, ?15, ?16)",
    )?;
    statement.execute(params![
        thread.no,
        thread.id.as_str(),
        thread.parent,
        thread.root,
        thread.born_at.cast_signed(),
        json_of(&thread.ancestors),
        thread.incarnation.cast_signed(),
        thread.agent,
        thread.user_id.as_ref().map(UserId::as_str),
        thread.title,
        thread.created_at.0,
        now.0,
        head.status().as_str(),
        head.asking().map(u64::cast_signed),
        json_of(head),
        thread.source,
    ])?;
    Ok(())
}

/// A root that begins with the history of another thread up to the nearest valid point.
pub(super) fn insert_fork(
    conn: &Connection,
    of: &Loaded,
    at: Option<Seq>,
    id: ThreadId,
    now: Timestamp,
) -> rusqlite::Result<Loaded> {
    let Loaded { thread: source, head, .. } = of;
    let point = super::read::fork_point(conn, source, at.unwrap_or(head.seq).min(head.seq))?;
    let no = next_number(conn)?;
    let thread = Thread {
        no,
        id,
        root: no,
        parent: None,
        source: Some(source.no),
        born_at: point.at,
        ancestors: Vec::new(),
        incarnation: random(),
        created_at: now,
        ..Thread::clone(source)
    };
    let head = head.fork(point);
    insert_thread(conn, &thread, &head, now)?;
    Ok(Loaded { thread: Arc::new(thread), head, version: 1 })
}

/// Whether the head was still at that version.
pub(super) fn update_head(
    conn: &Connection,
    no: ThreadNo,
    version: i64,
    head: &Head,
    due: Option<Timestamp>,
    now: Timestamp,
) -> rusqlite::Result<bool> {
    let mut statement = conn.prepare_cached(
        "UPDATE threads SET head = ?3, version = version + 1, status = ?4, ask = ?5, due = ?6, updated_at = ?7 \
         WHERE no = ?1 AND version = ?2",
    )?;
    let changed = statement.execute(params![
        no,
        version,
        json_of(head),
        head.status().as_str(),
        head.asking().map(u64::cast_signed),
        due.map(|due| due.0),
        now.0,
    ])?;
    Ok(changed == 1)
}

/// Everything of a step but its head.
pub(super) struct Applying<'a> {
    pub(super) conn: &'a Connection,
    pub(super) thread: &'a Thread,
    pub(super) key: &'a Key,
    pub(super) limits: &'a Limits,
    pub(super) now: Timestamp,
}

impl Applying<'_> {
    /// Writes; children that were born are given back, for they have to be asked.
    pub(super) fn write(&self, write: Write) -> rusqlite::Result<Option<Committed>> {
        match write {
            Write::Append { seq, entry } => self.append(self.thread.no, seq, &entry)?,
            Write::Hold { queue, no, entry } => self.hold(queue, no, &entry)?,
            Write::Release { queue, first, count, seq } => self.release(queue, first, count, seq)?,
            Write::Open(call) => self.open(&call)?,
            Write::Dispatch(call) => self.dispatch(&call)?,
            Write::Settle { call, state } => self.settle(&call, state)?,
            Write::Ask { no, call, question } => self.ask(no, &call, &question)?,
            Write::Answer { no, selected } => self.answer(no, selected)?,
            Write::Forget { call } => self.forget(&call)?,
            Write::View { server, view_type, content } => self.view(&server.0, &view_type, &content)?,
            Write::Timer { call, at } => self.timer(&call, at)?,
            Write::Seen { call, event } => self.seen(&call, &event)?,
            Write::Shelve { call, no, entry } => self.shelve(&call, no, &entry)?,
            Write::Discard { call } => self.discard(&call)?,
            Write::Born { child, at, head, shelf, entries } => {
                return self.born(child, at, *head, shelf, &entries).map(Some);
            }
        }
        Ok(None)
    }

    fn append(&self, thread: ThreadNo, seq: Seq, entry: &Entry) -> rusqlite::Result<()> {
        let mut statement = self.conn.prepare_cached("INSERT INTO entries (key, body) VALUES (?1, ?2)")?;
        statement.execute(params![key(thread, seq), json_of(entry)])?;
        if let Item::Summary { covers, .. } = entry.item {
            let sql = "INSERT INTO summaries (thread, seq, covers) VALUES (?1, ?2, ?3)";
            self.conn.prepare_cached(sql)?.execute(params![
                thread,
                seq.cast_signed(),
                covers.cast_signed()
            ])?;
        }
        Ok(())
    }

    fn hold(&self, queue: Queue, no: u64, entry: &Entry) -> rusqlite::Result<()> {
        let sql = "INSERT INTO held (thread, queue, no, body) VALUES (?1, ?2, ?3, ?4)";
        let row = params![self.thread.no, queue_number(queue), no.cast_signed(), json_of(entry)];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }

    fn release(&self, queue: Queue, first: u64, count: u64, seq: Seq) -> rusqlite::Result<()> {
        let (first, end) = (first.cast_signed(), (first + count).cast_signed());
        let mut copy = self.conn.prepare_cached(
            "INSERT INTO entries (key, body) SELECT ?4 + no - ?3, body FROM held \
             WHERE thread = ?1 AND queue = ?2 AND no >= ?3 AND no < ?5",
        )?;
        let copied =
            copy.execute(params![self.thread.no, queue_number(queue), first, key(self.thread.no, seq), end])?;
        if copied as u64 != count {
            return Err(rusqlite::Error::StatementChangedRows(copied));
        }
        let sql = "DELETE FROM held WHERE thread = ?1 AND queue = ?2 AND no < ?3";
        self.conn.prepare_cached(sql)?.execute(params![self.thread.no, queue_number(queue), end])?;
        Ok(())
    }

    fn open(&self, call: &rap_agent::OpenCall) -> rusqlite::Result<()> {
        let mut statement = self.conn.prepare_cached(
            "INSERT INTO calls (thread, id, state, call_id, name, server, seq, since, until, invoke_at) \
             VALUES (?1, ?2, 0, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
        )?;
        statement.execute(params![
            self.thread.no,
            call.id.as_str(),
            call.call_id.as_ref().map(CallId::as_str),
            call.name,
            call.server.0,
            call.seq.cast_signed(),
            call.since.0,
            call.until.map(|until| until.0),
            call.is_sent().then_some(call.since.0),
        ])?;
        Ok(())
    }

    fn dispatch(&self, call: &rap_agent::OpenCall) -> rusqlite::Result<()> {
        let sql = "UPDATE calls SET since = ?3, until = ?4, invoke_at = ?3 WHERE thread = ?1 AND id = ?2";
        let until = call.until.map(|until| until.0);
        let row = params![self.thread.no, call.id.as_str(), call.since.0, until];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }

    fn settle(&self, call: &CallId, state: CallState) -> rusqlite::Result<()> {
        let mut statement = self.conn.prepare_cached(
            "UPDATE calls SET state = ?3, invoke_at = NULL, until = NULL WHERE thread = ?1 AND id = ?2",
        )?;
        statement.execute(params![self.thread.no, call.as_str(), state_number(state)])?;
        match state {
            CallState::Subscribed => {
                let sql = "UPDATE calls SET since = ?3 WHERE thread = ?1 AND id = ?2";
                self.conn.prepare_cached(sql)?.execute(params![self.thread.no, call.as_str(), self.now.0])?;
            }
            CallState::Ended => {
                let sql = "DELETE FROM seen WHERE thread = ?1 AND call = ?2";
                self.conn.prepare_cached(sql)?.execute(params![self.thread.no, call.as_str()])?;
            }
            _ => {}
        }
        Ok(())
    }

    fn ask(&self, no: u64, call: &CallId, question: &NewQuestion) -> rusqlite::Result<()> {
        let plain = match question {
            NewQuestion::SignIn(url) => json!({"auth_url": url.expose()}),
            NewQuestion::Approval(prompt) => json!({
                "prompt": prompt,
                "choices": words::APPROVAL,
                "default": words::REFUSE,
            }),
            NewQuestion::Choice(choice) => json!({
                "prompt": choice.prompt,
                "choices": choice.choices,
                "default": choice.default,
                "response_url": choice.response_url.expose(),
            }),
        };
        let context = question_context(self.thread, no);
        let sealed = self.key.seal(plain.to_string().as_bytes(), &context);
        let sql =
            "INSERT OR REPLACE INTO questions (thread, no, call, body, asked_at) VALUES (?1, ?2, ?3, ?4, ?5)";
        let row = params![self.thread.no, no.cast_signed(), call.as_str(), sealed, self.now.0];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }

    fn answer(&self, no: u64, selected: usize) -> rusqlite::Result<()> {
        let sql = "UPDATE questions SET answer = ?3, answered_at = ?4, answer_at = ?4 WHERE thread = ?1 AND no = ?2";
        let row = params![self.thread.no, no.cast_signed(), selected as i64, self.now.0];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }

    fn forget(&self, call: &CallId) -> rusqlite::Result<()> {
        let sql = "DELETE FROM questions WHERE thread = ?1 AND call = ?2";
        self.conn.prepare_cached(sql)?.execute(params![self.thread.no, call.as_str()])?;
        Ok(())
    }

    fn view(&self, server: &str, view_type: &str, content: &Value) -> rusqlite::Result<()> {
        let sql = "INSERT OR REPLACE INTO views (thread, server, view_type, content, at) VALUES (?1, ?2, ?3, ?4, ?5)";
        let row = params![self.thread.no, server, view_type, content.to_string(), self.now.0];
        self.conn.prepare_cached(sql)?.execute(row)?;
        let mut prune = self.conn.prepare_cached(
            "DELETE FROM views WHERE thread = ?1 AND (server, view_type) IN \
             (SELECT server, view_type FROM views WHERE thread = ?1 ORDER BY at DESC LIMIT -1 OFFSET ?2)",
        )?;
        prune.execute(params![self.thread.no, self.limits.views as i64])?;
        Ok(())
    }

    fn timer(&self, call: &CallId, at: Option<Timestamp>) -> rusqlite::Result<()> {
        let sql = "UPDATE calls SET until = ?3 WHERE thread = ?1 AND id = ?2";
        let row = params![self.thread.no, call.as_str(), at.map(|at| at.0)];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }

    fn seen(&self, call: &CallId, event: &EventId) -> rusqlite::Result<()> {
        let sql = "INSERT OR IGNORE INTO seen (thread, call, event, at) VALUES (?1, ?2, ?3, ?4)";
        let row = params![self.thread.no, call.as_str(), event.as_str(), self.now.0];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }

    fn shelve(&self, call: &CallId, no: u64, entry: &Entry) -> rusqlite::Result<()> {
        let sql = "INSERT INTO backlog (thread, call, no, body) VALUES (?1, ?2, ?3, ?4)";
        let row = params![self.thread.no, call.as_str(), no.cast_signed(), json_of(entry)];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }

    fn discard(&self, call: &CallId) -> rusqlite::Result<()> {
        let sql = "DELETE FROM backlog WHERE thread = ?1 AND call = ?2";
        self.conn.prepare_cached(sql)?.execute(params![self.thread.no, call.as_str()])?;
        Ok(())
    }

    /// What waited for a child becomes its first entries.
    fn unshelve(&self, call: &CallId, count: u64, child: ThreadNo, seq: Seq) -> rusqlite::Result<()> {
        let mut copy = self.conn.prepare_cached(
            "INSERT INTO entries (key, body) SELECT ?3 + row_number() OVER (ORDER BY no) - 1, body FROM backlog \
             WHERE thread = ?1 AND call = ?2",
        )?;
        let copied = copy.execute(params![self.thread.no, call.as_str(), key(child, seq)])?;
        if copied as u64 != count {
            return Err(rusqlite::Error::StatementChangedRows(copied));
        }
        self.discard(call)
    }

    fn born(
        &self,
        child: ThreadId,
        at: Seq,
        head: Head,
        shelf: Option<(CallId, u64)>,
        entries: &[Entry],
    ) -> rusqlite::Result<Committed> {
        let mut ancestors = self.thread.ancestors.clone();
        ancestors.push(self.thread.id.clone());
        let thread = Thread {
            no: next_number(self.conn)?,
            id: child,
            root: self.thread.root,
            parent: Some(self.thread.no),
            source: Some(self.thread.no),
            born_at: at,
            ancestors,
            incarnation: random(),
            agent: self.thread.agent.clone(),
            user_id: self.thread.user_id.clone(),
            title: None,
            created_at: self.now,
        };
        insert_thread(self.conn, &thread, &head, self.now)?;
        let mut first = at + 1;
        if let Some((call, count)) = shelf {
            self.unshelve(&call, count, thread.no, first)?;
            first += count;
        }
        for (seq, entry) in (first..).zip(entries) {
            self.append(thread.no, seq, entry)?;
        }
        let ask = Effect::Ask { turn: head.turn, up_to: head.seq };
        Ok(Committed {
            thread: Arc::new(thread),
            effects: vec![ask],
            settled: Vec::new(),
            due: head.due(self.limits),
            status: head.status(),
        })
    }

    /// An effect that is promised and has no row of its own yet.
    pub(super) fn tell(&self, to: &ThreadId, letter: &Letter) -> rusqlite::Result<()> {
        let sql = "INSERT INTO letters (sender, receiver, letter) VALUES (?1, ?2, ?3)";
        let row = params![self.thread.id.as_str(), to.as_str(), json_of(letter)];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }
}

pub(super) fn question_context(thread: &Thread, no: u64) -> Vec<u8> {
    [b"question".as_slice(), &thread.incarnation.to_le_bytes(), &no.to_le_bytes()].concat()
}

pub(super) fn past_call(
    conn: &Connection,
    thread: ThreadNo,
    call: &CallId,
) -> rusqlite::Result<Option<PastCall>> {
    let mut statement =
        conn.prepare_cached("SELECT name, seq, state FROM calls WHERE thread = ?1 AND id = ?2")?;
    let past = |row: &Row<'_>| {
        Ok(PastCall {
            name: row.get(0)?,
            seq: row.get::<_, i64>(1)?.unsigned_abs(),
            state: state_of(row.get(2)?)?,
        })
    };
    statement.query_row(params![thread, call.as_str()], past).optional()
}

pub(super) fn was_seen(
    conn: &Connection,
    thread: ThreadNo,
    call: &CallId,
    event: &EventId,
) -> rusqlite::Result<bool> {
    let mut statement =
        conn.prepare_cached("SELECT 1 FROM seen WHERE thread = ?1 AND call = ?2 AND event = ?3")?;
    statement.exists(params![thread, call.as_str(), event.as_str()])
}

/// The arguments of a call, from the assistant entry that makes it.
pub(super) fn arguments_of(
    conn: &Connection,
    thread: ThreadNo,
    seq: Seq,
    call: &CallId,
) -> rusqlite::Result<Map<String, Value>> {
    let entry = entry_at(conn, thread, seq)?;
    let rap_agent::Item::Assistant { calls, .. } = entry.item else { return Ok(Map::new()) };
    let given = calls.into_iter().find(|entry| entry.id == *call).map(|entry| entry.arguments);
    match given {
        Some(rap_agent::Arguments::Given(arguments)) => Ok(arguments),
        _ => Ok(Map::new()),
    }
}

fn entry_at(conn: &Connection, thread: ThreadNo, seq: Seq) -> rusqlite::Result<Entry> {
    let mut statement = conn.prepare_cached("SELECT body FROM entries WHERE key = ?1")?;
    statement.query_row([key(thread, seq)], |row| {
        serde_json::from_str(row.get_ref(0)?.as_str()?).map_err(unreadable)
    })
}

/// Whether a head is still at that version.
pub(super) fn is_at(conn: &Connection, thread: ThreadNo, version: i64) -> rusqlite::Result<bool> {
    let mut statement = conn.prepare_cached("SELECT 1 FROM threads WHERE no = ?1 AND version = ?2")?;
    statement.exists(params![thread, version])
}
