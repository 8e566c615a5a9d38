//! Carries out the writes of a step.

use std::sync::Arc;

use rap_agent::{
    BacklogRange, CallState, Entry, Item, Limits, NewQuestion, OpenCall, Queue, Seq, Spawn, ThreadMessage,
    Write,
};
use rap_io::secret_box::Key;
use rap_protocol::{CallId, EventId, ThreadId, Timestamp, UserId};
use rusqlite::{Connection, params};
use serde_json::Value;

use super::heads;
use crate::store::stored::{self, FORGET_PER_STEP, queue_number, state_number, to_json};
use crate::store::{StepSettings, Thread, ThreadKey};

/// Returns the key of an entry: the thread's number in the upper 32 bits, the entry's number in the lower 32.
pub(super) fn entry_key(thread: ThreadKey, seq: Seq) -> i64 {
    (thread.number() << 32) | i64::try_from(seq).unwrap_or(0)
}

/// Deletes the oldest event ids of a subscription.
pub(super) const FORGET_EVENT_IDS: &str = "DELETE FROM seen WHERE thread = ?1 AND call = ?2 AND event IN (\
     SELECT event FROM seen WHERE thread = ?1 AND call = ?2 AND no <= ?3 ORDER BY no LIMIT ?4)";

/// Writes everything of a step except its head.
pub(super) struct StepWriter<'a> {
    pub(super) conn: &'a Connection,
    pub(super) thread: &'a Thread,
    pub(super) key: &'a Key,
    pub(super) rules: &'a StepSettings,
    pub(super) now: Timestamp,
}

impl StepWriter<'_> {
    /// Carries out one write. Returns the child that it added, if any.
    pub(super) fn write(&self, write: &Write) -> rusqlite::Result<Option<Arc<Thread>>> {
        match write {
            Write::Append { seq, entry } => self.append(self.thread.key, *seq, entry)?,
            Write::Hold { queue, number, entry } => self.hold(*queue, *number, entry)?,
            Write::Release { queue, first, count, seq } => self.release(*queue, *first, *count, *seq)?,
            Write::Open(call) => self.open(call)?,
            Write::Approve(call) => self.approve(call)?,
            Write::Settle { call, state } => self.settle(call, *state)?,
            Write::Question { number, call, question } => self.question(*number, call, question)?,
            Write::Answer { number, selected } => self.answer(*number, *selected)?,
            Write::DropQuestions { call } => self.drop_questions(call)?,
            Write::View { server, view_type, content } => self.view(&server.0, view_type, content)?,
            Write::Timer { call, at } => self.timer(call, *at)?,
            Write::RecordEventId { call, event, number, forget } => {
                self.mark(call, event, *number, *forget)?
            }
            Write::Backlog { call, number, entry } => self.backlog(call, *number, entry)?,
            Write::DropBacklog { call } => self.drop_backlog(call)?,
            Write::Spawn(spawn) => return self.spawn(spawn).map(Some),
            Write::Send { to, message } => self.send(to, message)?,
            // Several threads share the spending. It is written at the end of the batch.
            Write::Spending(_) => {}
        }
        Ok(None)
    }

    fn user(&self) -> Option<&str> {
        self.thread.user_id.as_ref().map(UserId::as_str)
    }

    fn limits(&self) -> &Limits {
        self.rules.limits(&self.thread.agent)
    }

    fn append(&self, thread: ThreadKey, seq: Seq, entry: &Entry) -> rusqlite::Result<()> {
        let mut statement = self.conn.prepare_cached("INSERT INTO entries (key, body) VALUES (?1, ?2)")?;
        statement.execute(params![entry_key(thread, seq), to_json(entry)])?;
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

    fn hold(&self, queue: Queue, number: u64, entry: &Entry) -> rusqlite::Result<()> {
        let sql = "INSERT INTO held (thread, queue, no, body) VALUES (?1, ?2, ?3, ?4)";
        let row = params![self.thread.key, queue_number(queue), number.cast_signed(), to_json(entry)];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }

    fn release(&self, queue: Queue, first: u64, count: u64, seq: Seq) -> rusqlite::Result<()> {
        let (first, end) = (first.cast_signed(), (first + count).cast_signed());
        let mut copy = self.conn.prepare_cached(
            "INSERT INTO entries (key, body) SELECT ?4 + no - ?3, body FROM held \
             WHERE thread = ?1 AND queue = ?2 AND no >= ?3 AND no < ?5",
        )?;
        let copied = copy.execute(params![
            self.thread.key,
            queue_number(queue),
            first,
            entry_key(self.thread.key, seq),
            end
        ])?;
        if copied as u64 != count {
            return Err(rusqlite::Error::StatementChangedRows(copied));
        }
        let sql = "DELETE FROM held WHERE thread = ?1 AND queue = ?2 AND no < ?3";
        self.conn.prepare_cached(sql)?.execute(params![self.thread.key, queue_number(queue), end])?;
        Ok(())
    }

    fn open(&self, call: &OpenCall) -> rusqlite::Result<()> {
        let mut statement = self.conn.prepare_cached(
            "INSERT INTO calls (thread, id, state, call_id, name, server, seq, since, until, invoke_at, root, user_id, \
             callback_base) VALUES (?1, ?2, 0, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
        )?;
        statement.execute(params![
            self.thread.key,
            call.id.as_str(),
            call.model_id.as_ref().map(CallId::as_str),
            call.name,
            call.server.0,
            call.seq.cast_signed(),
            call.since.0,
            call.until.map(|until| until.0),
            call.is_sent().then_some(call.since.0),
            self.thread.session,
            self.user(),
            call.is_sent().then_some(&self.rules.callback_base),
        ])?;
        Ok(())
    }

    fn approve(&self, call: &OpenCall) -> rusqlite::Result<()> {
        let sql = "UPDATE calls SET since = ?3, until = ?4, invoke_at = ?3, callback_base = ?5 \
                   WHERE thread = ?1 AND id = ?2";
        let (until, base) = (call.until.map(|until| until.0), &self.rules.callback_base);
        let row = params![self.thread.key, call.id.as_str(), call.since.0, until, base];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }

    fn settle(&self, call: &CallId, state: CallState) -> rusqlite::Result<()> {
        let mut statement = self.conn.prepare_cached(
            "UPDATE calls SET state = ?3, invoke_at = NULL, until = NULL WHERE thread = ?1 AND id = ?2",
        )?;
        statement.execute(params![self.thread.key, call.as_str(), state_number(state)])?;
        match state {
            CallState::Subscribed => {
                let sql = "UPDATE calls SET since = ?3, acknowledged_at = ?3, asked_after = NULL, gone_since = NULL \
                           WHERE thread = ?1 AND id = ?2";
                self.conn.prepare_cached(sql)?.execute(params![
                    self.thread.key,
                    call.as_str(),
                    self.now.0
                ])?;
            }
            CallState::Ended => {
                // There can be many event ids. `prune` removes them in parts.
                let sql = "INSERT OR IGNORE INTO ended_subscriptions (thread, call) \
                           SELECT ?1, ?2 WHERE EXISTS (SELECT 1 FROM seen WHERE thread = ?1 AND call = ?2)";
                self.conn.prepare_cached(sql)?.execute(params![self.thread.key, call.as_str()])?;
            }
            _ => {}
        }
        Ok(())
    }

    fn question(&self, number: u64, call: &CallId, question: &NewQuestion) -> rusqlite::Result<()> {
        let sealed = stored::encrypt_question(self.key, self.thread, number, question);
        let sql = "INSERT OR REPLACE INTO questions (thread, no, call, body, asked_at, root, user_id, server) \
                   VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, \
                   coalesce((SELECT server FROM calls WHERE thread = ?1 AND id = ?3), ''))";
        let Thread { key, session, .. } = self.thread;
        let row = params![key, number.cast_signed(), call.as_str(), sealed, self.now.0, session, self.user()];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }

    fn answer(&self, number: u64, selected: usize) -> rusqlite::Result<()> {
        let sql = "UPDATE questions SET answer = ?3, answered_at = ?4, answer_at = ?4 WHERE thread = ?1 AND no = ?2";
        let row = params![self.thread.key, number.cast_signed(), selected as i64, self.now.0];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }

    fn drop_questions(&self, call: &CallId) -> rusqlite::Result<()> {
        let sql = "DELETE FROM questions WHERE thread = ?1 AND call = ?2";
        self.conn.prepare_cached(sql)?.execute(params![self.thread.key, call.as_str()])?;
        Ok(())
    }

    fn view(&self, server: &str, view_type: &str, content: &Value) -> rusqlite::Result<()> {
        let sql = "INSERT OR REPLACE INTO views (thread, server, view_type, content, at) VALUES (?1, ?2, ?3, ?4, ?5)";
        let row = params![self.thread.key, server, view_type, content.to_string(), self.now.0];
        self.conn.prepare_cached(sql)?.execute(row)?;
        // To find the oldest view, the content of all of them is read, so this is done only if there are too many.
        let count = "SELECT count(*) FROM views WHERE thread = ?1";
        let count: i64 = self.conn.prepare_cached(count)?.query_row([self.thread.key], |row| row.get(0))?;
        let limit = self.limits().views as i64;
        if count <= limit {
            return Ok(());
        }
        let mut prune = self.conn.prepare_cached(
            "DELETE FROM views WHERE thread = ?1 AND (server, view_type) IN \
             (SELECT server, view_type FROM views WHERE thread = ?1 \
             ORDER BY (server = ?3 AND view_type = ?4) DESC, at DESC, server, view_type LIMIT -1 OFFSET ?2)",
        )?;
        // The view that was just written is the newest one, even if another one was written in the same millisecond.
        prune.execute(params![self.thread.key, limit, server, view_type])?;
        Ok(())
    }

    fn timer(&self, call: &CallId, at: Option<Timestamp>) -> rusqlite::Result<()> {
        let sql = "UPDATE calls SET until = ?3 WHERE thread = ?1 AND id = ?2";
        let row = params![self.thread.key, call.as_str(), at.map(|at| at.0)];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }

    fn mark(&self, call: &CallId, event: &EventId, number: u64, forget: u64) -> rusqlite::Result<()> {
        let sql = "INSERT OR IGNORE INTO seen (thread, call, event, at, no) VALUES (?1, ?2, ?3, ?4, ?5)";
        let row = params![self.thread.key, call.as_str(), event.as_str(), self.now.0, number.cast_signed()];
        self.conn.prepare_cached(sql)?.execute(row)?;
        if forget > 0 {
            // Many can be over the limit, for example after the limit was lowered.
            let row = params![self.thread.key, call.as_str(), forget.cast_signed(), FORGET_PER_STEP];
            self.conn.prepare_cached(FORGET_EVENT_IDS)?.execute(row)?;
        }
        Ok(())
    }

    fn backlog(&self, call: &CallId, number: u64, entry: &Entry) -> rusqlite::Result<()> {
        let sql = "INSERT INTO backlog (thread, call, no, body) VALUES (?1, ?2, ?3, ?4)";
        let row = params![self.thread.key, call.as_str(), number.cast_signed(), to_json(entry)];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }

    fn drop_backlog(&self, call: &CallId) -> rusqlite::Result<()> {
        let sql = "DELETE FROM backlog WHERE thread = ?1 AND call = ?2";
        self.conn.prepare_cached(sql)?.execute(params![self.thread.key, call.as_str()])?;
        Ok(())
    }

    /// Moves a part of a backlog to a child, as its first entries.
    fn move_backlog(&self, range: &BacklogRange, child: ThreadKey, seq: Seq) -> rusqlite::Result<()> {
        let (first, end) = (range.first.cast_signed(), (range.first + range.count).cast_signed());
        let mut copy = self.conn.prepare_cached(
            "INSERT INTO entries (key, body) SELECT ?3 + no - ?4, body FROM backlog \
             WHERE thread = ?1 AND call = ?2 AND no >= ?4 AND no < ?5",
        )?;
        let call = range.call.as_str();
        let copied = copy.execute(params![self.thread.key, call, entry_key(child, seq), first, end])?;
        if copied as u64 != range.count {
            return Err(rusqlite::Error::StatementChangedRows(copied));
        }
        let sql = "DELETE FROM backlog WHERE thread = ?1 AND call = ?2 AND no < ?3";
        self.conn.prepare_cached(sql)?.execute(params![self.thread.key, call, end])?;
        Ok(())
    }

    fn spawn(&self, spawn: &Spawn) -> rusqlite::Result<Arc<Thread>> {
        let thread = stored::new_child(heads::next_key(self.conn)?, self.thread, spawn, self.now);
        heads::insert(self.conn, &thread, &spawn.head, self.rules, self.now)?;
        let mut first = spawn.at + 1;
        if let Some(range) = &spawn.backlog {
            self.move_backlog(range, thread.key, first)?;
            first += range.count;
        }
        for (seq, entry) in (first..).zip(&spawn.entries) {
            self.append(thread.key, seq, entry)?;
        }
        Ok(Arc::new(thread))
    }

    fn send(&self, to: &ThreadId, message: &ThreadMessage) -> rusqlite::Result<()> {
        let sql = "INSERT INTO letters (sender, receiver, letter, root) VALUES (?1, ?2, ?3, ?4)";
        let row = params![self.thread.id.as_str(), to.as_str(), to_json(message), self.thread.session];
        self.conn.prepare_cached(sql)?.execute(row)?;
        Ok(())
    }
}
