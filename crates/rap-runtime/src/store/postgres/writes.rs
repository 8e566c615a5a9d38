//! Writes the steps of a round in bulk: one statement for all rows of a kind, whatever thread they belong to.
//!
//! Writes of one step that touch the same table keep their order. Others may be carried out in any order, since the heads
//! of all threads in the batch are locked.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use rap_agent::{CallState, Entry, Head, Item, OpenCall, Seq, Spawn, Status, Write};
use rap_io::secret_box::Key;
use rap_protocol::{CallId, Timestamp, UserId};

use super::statement::{Statement, clean};
use crate::store::stored::{
    FORGET_PER_STEP, encrypt_question, new_child, queue_number, state_number, to_json,
};
use crate::store::{
    IdempotencyKey, OutboxKey, Receipt, Rules, SessionKey, SessionToolset, StoredToolset, Thread, ThreadKey,
};

/// Tables, as far as the order of writes to them matters.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Table {
    Threads,
    Work,
    Entries,
    Held,
    Backlog,
    Calls,
    Questions,
    EventIds,
    Views,
    Outbox,
    Requests,
    Toolsets,
}

const TABLES: usize = 12;

/// A statement that writes any number of rows. Its parameters are the columns of the rows, as arrays.
struct Kind {
    sql: &'static str,
    tables: &'static [Table],
    /// Number of leading columns that identify a row. One statement writes a row at most once. 0 if rows never collide.
    keyed: usize,
    /// True if the last parameter is the number of rows that must have been written. If it is wrong, the statement fails.
    checked: bool,
}

impl Kind {
    const fn new(sql: &'static str, tables: &'static [Table], keyed: usize) -> Kind {
        Kind { sql, tables, keyed, checked: false }
    }

    const fn checked(sql: &'static str, tables: &'static [Table], keyed: usize) -> Kind {
        Kind { sql, tables, keyed, checked: true }
    }
}

static INSERT_HEAD: Kind = Kind::new(
    "INSERT INTO threads (no, id, parent, source, session, inherits, ancestors, incarnation, agent, user_id, title, \
     created_at, updated_at, version, status, head) \
     SELECT no, id, parent, source, session, inherits, ancestors, incarnation, agent, user_id, title, created_at, \
     updated_at, 1, status, head \
     FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::text[], \
     $8::bigint[], $9::text[], $10::text[], $11::text[], $12::bigint[], $13::bigint[], $14::text[], $15::text[]) \
     AS w(no, id, parent, source, session, inherits, ancestors, incarnation, agent, user_id, title, created_at, \
     updated_at, status, head)",
    &[Table::Threads],
    1,
);
static UPDATE_HEAD: Kind = Kind::checked(
    "WITH done AS (UPDATE threads t SET head = w.head, version = w.version + 1, status = w.status, updated_at = w.at \
     FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::bigint[]) AS w(no, version, head, status, at) \
     WHERE t.no = w.no AND t.version = w.version RETURNING 1) \
     SELECT 1 / (count(*) = $6)::int FROM done",
    &[Table::Threads],
    1,
);
static COUNT: Kind = Kind::new(
    "INSERT INTO thread_counts (status, change) SELECT * FROM unnest($1::text[], $2::bigint[])",
    &[Table::Work],
    0,
);
static PUT_ATTENTION: Kind = Kind::new(
    "INSERT INTO attention (thread, session, status) SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::text[]) \
     ON CONFLICT (thread) DO UPDATE SET status = excluded.status",
    &[Table::Work],
    1,
);
static DROP_ATTENTION: Kind =
    Kind::new("DELETE FROM attention WHERE thread = ANY($1::bigint[])", &[Table::Work], 1);
static PUT_ASK: Kind = Kind::new(
    "INSERT INTO asks (thread, session, turn, agent, destination, due_at) \
     SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::text[], $5::text[], $6::bigint[]) \
     ON CONFLICT (thread) DO UPDATE SET turn = excluded.turn, destination = excluded.destination, \
     due_at = excluded.due_at, attempts = 0",
    &[Table::Work],
    1,
);
static DROP_ASK: Kind = Kind::new("DELETE FROM asks WHERE thread = ANY($1::bigint[])", &[Table::Work], 1);
static PUT_WAKE: Kind = Kind::new(
    "INSERT INTO wakes (thread, session, due_at, is_retry) \
     SELECT thread, session, due_at, is_retry = 1 \
     FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[]) AS w(thread, session, due_at, is_retry) \
     ON CONFLICT (thread) DO UPDATE SET due_at = excluded.due_at, is_retry = excluded.is_retry",
    &[Table::Work],
    1,
);
static DROP_WAKE: Kind = Kind::new("DELETE FROM wakes WHERE thread = ANY($1::bigint[])", &[Table::Work], 1);
static APPEND: Kind = Kind::new(
    "INSERT INTO entries (session, thread, seq, body) \
     SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::text[])",
    &[Table::Entries],
    0,
);
static SUMMARY: Kind = Kind::new(
    "INSERT INTO summaries (session, thread, seq, covers) \
     SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[])",
    &[Table::Entries],
    0,
);
static HOLD: Kind = Kind::new(
    "INSERT INTO held (thread, queue, no, session, body) \
     SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::text[])",
    &[Table::Held],
    3,
);
static RELEASE: Kind = Kind::checked(
    "WITH w AS (SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], \
     $6::bigint[]) AS w(thread, queue, first, until, seq, session)), \
     gone AS (DELETE FROM held h USING w WHERE h.thread = w.thread AND h.queue = w.queue AND h.no < w.until \
     RETURNING w.session, h.thread, w.seq + h.no - w.first AS seq, h.body, h.no >= w.first AS is_kept), \
     done AS (INSERT INTO entries (session, thread, seq, body) \
     SELECT session, thread, seq, body FROM gone WHERE is_kept RETURNING 1) \
     SELECT 1 / (count(*) = $7)::int FROM done",
    &[Table::Held],
    2,
);
static OPEN: Kind = Kind::new(
    "INSERT INTO calls (thread, id, session, state, call_id, name, server, seq, since, until, invoke_at) \
     SELECT thread, id, session, 0, call_id, name, server, seq, since, until, invoke_at \
     FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::bigint[], \
     $8::bigint[], $9::bigint[], $10::bigint[]) \
     AS w(thread, id, session, call_id, name, server, seq, since, until, invoke_at)",
    &[Table::Calls],
    0,
);
static APPROVE: Kind = Kind::new(
    "UPDATE calls c SET since = w.since, until = w.until, invoke_at = w.since \
     FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[]) AS w(thread, id, since, until) \
     WHERE c.thread = w.thread AND c.id = w.id",
    &[Table::Calls],
    2,
);
static SETTLE: Kind = Kind::new(
    "UPDATE calls c SET state = w.state, invoke_at = NULL, until = NULL, \
     since = CASE WHEN w.state = 5 THEN w.at ELSE c.since END, \
     acknowledged_at = CASE WHEN w.state = 5 THEN w.at ELSE c.acknowledged_at END, \
     asked_after = CASE WHEN w.state = 5 THEN NULL ELSE c.asked_after END, \
     gone_since = CASE WHEN w.state = 5 THEN NULL ELSE c.gone_since END \
     FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[]) AS w(thread, id, state, at) \
     WHERE c.thread = w.thread AND c.id = w.id",
    &[Table::Calls],
    2,
);
static END_SUBSCRIPTION: Kind = Kind::new(
    "INSERT INTO ended_subscriptions (thread, call, session) \
     SELECT w.thread, w.call, w.session FROM unnest($1::bigint[], $2::text[], $3::bigint[]) AS w(thread, call, session) \
     WHERE EXISTS (SELECT 1 FROM event_ids e WHERE e.thread = w.thread AND e.call = w.call) ON CONFLICT DO NOTHING",
    &[Table::EventIds],
    2,
);
static TIMER: Kind = Kind::new(
    "UPDATE calls c SET until = w.until FROM unnest($1::bigint[], $2::text[], $3::bigint[]) AS w(thread, id, until) \
     WHERE c.thread = w.thread AND c.id = w.id",
    &[Table::Calls],
    2,
);
static QUESTION: Kind = Kind::new(
    "INSERT INTO questions (thread, no, call, session, body, asked_at, server) \
     SELECT w.thread, w.no, w.call, w.session, w.body, w.at, \
     coalesce((SELECT c.server FROM calls c WHERE c.thread = w.thread AND c.id = w.call), '') \
     FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::bigint[], $5::bytea[], $6::bigint[]) \
     AS w(thread, no, call, session, body, at) \
     ON CONFLICT (thread, no) DO UPDATE SET call = excluded.call, server = excluded.server, body = excluded.body, \
     asked_at = excluded.asked_at, answer = NULL, answered_at = NULL, answer_at = NULL, attempts = 0",
    &[Table::Questions, Table::Calls],
    2,
);
static ANSWER: Kind = Kind::new(
    "UPDATE questions q SET answer = w.answer, answered_at = w.at, answer_at = w.at \
     FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[]) AS w(thread, no, answer, at) \
     WHERE q.thread = w.thread AND q.no = w.no",
    &[Table::Questions],
    2,
);
static DROP_QUESTIONS: Kind = Kind::new(
    "DELETE FROM questions q USING unnest($1::bigint[], $2::text[]) AS w(thread, call) \
     WHERE q.thread = w.thread AND q.call = w.call",
    &[Table::Questions],
    2,
);
static VIEW: Kind = Kind::new(
    "INSERT INTO views (thread, server, view_type, session, content, at) \
     SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::text[], $6::bigint[]) \
     ON CONFLICT (thread, server, view_type) DO UPDATE SET content = excluded.content, at = excluded.at",
    &[Table::Views],
    3,
);
static PRUNE_VIEWS: Kind = Kind::new(
    "DELETE FROM views v USING unnest($1::bigint[], $2::bigint[]) AS w(thread, views), \
     LATERAL (SELECT server, view_type FROM views WHERE thread = w.thread ORDER BY at DESC OFFSET w.views) AS old \
     WHERE v.thread = w.thread AND v.server = old.server AND v.view_type = old.view_type",
    &[Table::Views],
    1,
);
static RECORD_EVENT_ID: Kind = Kind::new(
    "INSERT INTO event_ids (thread, call, event, session, no) \
     SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::bigint[]) ON CONFLICT DO NOTHING",
    &[Table::EventIds],
    3,
);
static FORGET_EVENT_IDS: Kind = Kind::new(
    "DELETE FROM event_ids e USING unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[]) AS w(thread, call, up_to, most), \
     LATERAL (SELECT event FROM event_ids WHERE thread = w.thread AND call = w.call AND no <= w.up_to \
     ORDER BY no LIMIT w.most) AS old \
     WHERE e.thread = w.thread AND e.call = w.call AND e.event = old.event",
    &[Table::EventIds],
    2,
);
static PUT_BACKLOG: Kind = Kind::new(
    "INSERT INTO backlog (thread, call, no, session, body) \
     SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::text[])",
    &[Table::Backlog],
    3,
);
static DROP_BACKLOG: Kind = Kind::new(
    "DELETE FROM backlog b USING unnest($1::bigint[], $2::text[]) AS w(thread, call) \
     WHERE b.thread = w.thread AND b.call = w.call",
    &[Table::Backlog],
    2,
);
static MOVE_BACKLOG: Kind = Kind::checked(
    "WITH w AS (SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], \
     $7::bigint[]) AS w(thread, call, first, until, child, seq, session)), \
     gone AS (DELETE FROM backlog b USING w WHERE b.thread = w.thread AND b.call = w.call AND b.no < w.until \
     RETURNING w.session, w.child, w.seq + b.no - w.first AS seq, b.body, b.no >= w.first AS is_kept), \
     done AS (INSERT INTO entries (session, thread, seq, body) \
     SELECT session, child, seq, body FROM gone WHERE is_kept RETURNING 1) \
     SELECT 1 / (count(*) = $8)::int FROM done",
    &[Table::Backlog],
    2,
);
static SEND: Kind = Kind::new(
    "INSERT INTO outbox (session, sender, receiver, body) SELECT session, sender, receiver, body \
     FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[]) WITH ORDINALITY \
     AS w(session, sender, receiver, body, at) ORDER BY at",
    &[Table::Outbox],
    0,
);
static DELIVERED: Kind = Kind::new("DELETE FROM outbox WHERE no = ANY($1::bigint[])", &[Table::Outbox], 0);
static REQUEST: Kind = Kind::new(
    "INSERT INTO requests (digest, session, request, thread, turn, at) \
     SELECT * FROM unnest($1::bytea[], $2::bigint[], $3::bytea[], $4::text[], $5::bigint[], $6::bigint[])",
    &[Table::Requests],
    0,
);
static TOOLSET: Kind = Kind::new(
    "INSERT INTO toolsets (hash, body) SELECT * FROM unnest($1::text[], $2::bytea[]) ON CONFLICT DO NOTHING",
    &[Table::Toolsets],
    0,
);
static SESSION_TOOLSET: Kind = Kind::new(
    "INSERT INTO session_tools AS s (session, server, hash, error, fetched_at) \
     SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::bigint[]) \
     ON CONFLICT (session, server) DO UPDATE SET hash = coalesce(excluded.hash, s.hash), error = excluded.error, \
     fetched_at = excluded.fetched_at",
    &[Table::Toolsets],
    2,
);

/// A value of a row.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Value {
    Number(Option<i64>),
    Text(Option<String>),
    Bytes(Vec<u8>),
}

impl From<i64> for Value {
    fn from(number: i64) -> Value {
        Value::Number(Some(number))
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Value {
        Value::Number(Some(number.cast_signed()))
    }
}

impl From<Timestamp> for Value {
    fn from(at: Timestamp) -> Value {
        Value::Number(Some(at.0))
    }
}

impl From<Option<Timestamp>> for Value {
    fn from(at: Option<Timestamp>) -> Value {
        Value::Number(at.map(|at| at.0))
    }
}

impl From<ThreadKey> for Value {
    fn from(thread: ThreadKey) -> Value {
        Value::Number(Some(thread.number()))
    }
}

impl From<Option<ThreadKey>> for Value {
    fn from(thread: Option<ThreadKey>) -> Value {
        Value::Number(thread.map(ThreadKey::number))
    }
}

impl From<SessionKey> for Value {
    fn from(session: SessionKey) -> Value {
        session.0.into()
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(Some(clean(text)))
    }
}

impl From<Option<&str>> for Value {
    fn from(text: Option<&str>) -> Value {
        Value::Text(text.map(clean))
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::Text(Some(text))
    }
}

impl From<Vec<u8>> for Value {
    fn from(bytes: Vec<u8>) -> Value {
        Value::Bytes(bytes)
    }
}

macro_rules! row {
    ($($value:expr),* $(,)?) => { vec![$(Value::from($value)),*] };
}

/// The rows that one statement writes.
struct Group {
    kind: &'static Kind,
    rows: Vec<Vec<Value>>,
    keys: HashSet<Vec<Value>>,
    /// Number of rows that a checked statement must write.
    expected: i64,
}

impl Group {
    fn statement(self) -> Statement {
        let mut statement = Statement::new(self.kind.sql);
        let columns = self.rows.first().map_or(0, Vec::len);
        let mut rows: Vec<std::vec::IntoIter<Value>> = self.rows.into_iter().map(Vec::into_iter).collect();
        for _ in 0..columns {
            let (mut numbers, mut texts, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
            for value in rows.iter_mut().filter_map(Iterator::next) {
                match value {
                    Value::Number(number) => numbers.push(number),
                    Value::Text(text) => texts.push(text),
                    Value::Bytes(content) => bytes.push(content),
                }
            }
            statement = match (numbers.is_empty(), texts.is_empty()) {
                (false, _) => statement.with(numbers),
                (true, false) => statement.with(texts),
                (true, true) => statement.with(bytes),
            };
        }
        if self.kind.checked { statement.with(self.expected) } else { statement }
    }
}

/// Collects the writes of a round.
#[derive(Default)]
pub(super) struct Bulk {
    groups: Vec<Group>,
    counts: BTreeMap<&'static str, i64>,
    /// For each table, the first group that the next write of the current step may be in.
    positions: [usize; TABLES],
}

impl Bulk {
    fn add(&mut self, kind: &'static Kind, row: Vec<Value>, expected: i64) {
        let from = kind.tables.iter().map(|table| self.positions[*table as usize]).max().unwrap_or(0);
        let key = row[..kind.keyed].to_vec();
        let fits =
            |group: &Group| std::ptr::eq(group.kind, kind) && (kind.keyed == 0 || !group.keys.contains(&key));
        let at = (from..self.groups.len()).find(|at| fits(&self.groups[*at])).unwrap_or_else(|| {
            self.groups.push(Group { kind, rows: Vec::new(), keys: HashSet::new(), expected: 0 });
            self.groups.len() - 1
        });
        self.groups[at].rows.push(row);
        self.groups[at].keys.insert(key);
        self.groups[at].expected += expected;
        for table in kind.tables {
            self.positions[*table as usize] = at;
        }
    }

    fn put(&mut self, kind: &'static Kind, row: Vec<Value>) {
        self.add(kind, row, 1);
    }

    /// Returns the statements that carry out the writes.
    pub(super) fn statements(mut self) -> Vec<Statement> {
        self.positions = [0; TABLES];
        for (status, change) in std::mem::take(&mut self.counts) {
            if change != 0 {
                self.put(&COUNT, row![status, change]);
            }
        }
        self.groups.into_iter().map(Group::statement).collect()
    }

    pub(super) fn delivered(&mut self, message: OutboxKey) {
        self.put(&DELIVERED, row![message.0]);
    }

    pub(super) fn request(
        &mut self,
        key: &IdempotencyKey,
        session: SessionKey,
        receipt: &Receipt,
        now: Timestamp,
    ) {
        let (thread, turn) = (receipt.thread.as_str(), receipt.turn);
        self.put(&REQUEST, row![key.key.to_vec(), session, key.request.to_vec(), thread, turn, now]);
    }

    /// Saves the toolset of a session. After a failed discovery the session keeps its previous toolset.
    pub(super) fn toolset(&mut self, toolset: &SessionToolset) {
        if let Some(StoredToolset { hash, body: Some(body) }) = &toolset.toolset {
            self.put(&TOOLSET, row![hash.as_str(), body.to_vec()]);
        }
        let hash = toolset.toolset.as_ref().map(|toolset| toolset.hash.as_str());
        let (server, error) = (toolset.server.as_str(), toolset.error.as_deref());
        self.put(&SESSION_TOOLSET, row![toolset.session, server, hash, error, toolset.fetched_at]);
    }

    fn count(&mut self, old: Option<Status>, new: Status) {
        if old != Some(new) {
            *self.counts.entry(new.as_str()).or_default() += 1;
            if let Some(old) = old {
                *self.counts.entry(old.as_str()).or_default() -= 1;
            }
        }
    }
}

fn needs_attention(status: Status) -> bool {
    matches!(status, Status::Failed | Status::NeedsYou)
}

/// Writes one step.
pub(super) struct StepWriter<'a> {
    pub(super) bulk: &'a mut Bulk,
    pub(super) thread: &'a Thread,
    pub(super) key: &'a Key,
    pub(super) rules: &'a Rules,
    pub(super) now: Timestamp,
    /// Keys for the children of the step.
    pub(super) keys: std::vec::IntoIter<ThreadKey>,
}

impl StepWriter<'_> {
    /// Writes the head and everything that is derived from it. `old` is the head before the step and its version; it
    /// is `None` for a new thread.
    pub(super) fn head(&mut self, old: Option<(&Head, i64)>, head: &Head) {
        self.bulk.positions = [0; TABLES];
        let (thread, now) = (self.thread, self.now);
        match old {
            None => self.insert(thread, head),
            Some((_, version)) => {
                let row = row![thread.key, version, to_json(head), head.status().as_str(), now];
                self.bulk.put(&UPDATE_HEAD, row);
                self.work(thread, old.map(|(head, _)| head), head);
            }
        }
    }

    fn insert(&mut self, thread: &Thread, head: &Head) {
        let row = row![
            thread.key,
            thread.id.as_str(),
            thread.parent,
            thread.source,
            thread.session,
            thread.inherits,
            to_json(&thread.ancestors),
            thread.incarnation,
            thread.agent.as_str(),
            thread.user_id.as_ref().map(UserId::as_str),
            thread.title.as_deref(),
            thread.created_at,
            self.now,
            head.status().as_str(),
            to_json(head),
        ];
        self.bulk.put(&INSERT_HEAD, row);
        self.work(thread, None, head);
    }

    /// Writes the question, the wake time and the status of a thread, if they have changed. A question with the same
    /// turn number keeps its due time.
    fn work(&mut self, thread: &Thread, old: Option<&Head>, head: &Head) {
        let limits = self.rules.limits(&thread.agent);
        let asked = old.and_then(Head::turn_in_progress);
        match head.turn_in_progress() {
            asking if asking == asked => {}
            Some(turn) => {
                let destination = self.rules.model_server(&thread.agent);
                let agent = thread.agent.as_str();
                let row = row![thread.key, thread.session, turn, agent, destination, self.now];
                self.bulk.put(&PUT_ASK, row);
            }
            None => self.bulk.put(&DROP_ASK, row![thread.key]),
        }
        let status = head.status();
        match head.due(limits) {
            Some(due) => {
                let is_retry = i64::from(needs_attention(status));
                self.bulk.put(&PUT_WAKE, row![thread.key, thread.session, due, is_retry]);
            }
            None if old.is_some_and(|old| old.due(limits).is_some()) => {
                self.bulk.put(&DROP_WAKE, row![thread.key]);
            }
            None => {}
        }
        let old = old.map(Head::status);
        self.bulk.count(old, status);
        if old != Some(status) && needs_attention(status) {
            self.bulk.put(&PUT_ATTENTION, row![thread.key, thread.session, status.as_str()]);
        } else if old.is_some_and(needs_attention) && !needs_attention(status) {
            self.bulk.put(&DROP_ATTENTION, row![thread.key]);
        }
    }

    /// Carries out one write. Returns the child that it added, if any.
    pub(super) fn write(&mut self, write: &Write) -> Option<Arc<Thread>> {
        let Thread { key: thread, session, id, .. } = self.thread;
        let (thread, session, now) = (*thread, *session, self.now);
        match write {
            Write::Append { seq, entry } => self.append(thread, *seq, entry),
            Write::Hold { queue, no, entry } => {
                self.bulk.put(&HOLD, row![thread, queue_number(*queue), *no, session, to_json(entry)]);
            }
            Write::Release { queue, first, count, seq } => {
                let row = row![thread, queue_number(*queue), *first, first + count, *seq, session];
                self.bulk.add(&RELEASE, row, count.cast_signed());
            }
            Write::Open(call) => self.open(call),
            Write::Approve(call) => {
                self.bulk.put(&APPROVE, row![thread, call.id.as_str(), call.since, call.until]);
            }
            Write::Settle { call, state } => {
                self.bulk.put(&SETTLE, row![thread, call.as_str(), state_number(*state), now]);
                if *state == CallState::Ended {
                    // There can be many event ids. `prune` removes them in parts.
                    self.bulk.put(&END_SUBSCRIPTION, row![thread, call.as_str(), session]);
                }
            }
            Write::Question { no, call, question } => {
                let sealed = encrypt_question(self.key, self.thread, *no, question);
                self.bulk.put(&QUESTION, row![thread, *no, call.as_str(), session, sealed, now]);
            }
            Write::Answer { no, selected } => {
                self.bulk.put(&ANSWER, row![thread, *no, *selected as i64, now]);
            }
            Write::DropQuestions { call } => self.bulk.put(&DROP_QUESTIONS, row![thread, call.as_str()]),
            Write::View { server, view_type, content } => {
                let (server, view_type) = (server.0.as_str(), view_type.as_str());
                self.bulk.put(&VIEW, row![thread, server, view_type, session, content.to_string(), now]);
                let views = self.rules.limits(&self.thread.agent).views as i64;
                self.bulk.put(&PRUNE_VIEWS, row![thread, views]);
            }
            Write::Timer { call, at } => self.bulk.put(&TIMER, row![thread, call.as_str(), *at]),
            Write::RecordEventId { call, event, no, forget } => {
                let row = row![thread, call.as_str(), event.as_str(), session, *no];
                self.bulk.put(&RECORD_EVENT_ID, row);
                if *forget > 0 {
                    // Many can be over the limit, for example after the limit was lowered.
                    let row = row![thread, call.as_str(), *forget, FORGET_PER_STEP];
                    self.bulk.put(&FORGET_EVENT_IDS, row);
                }
            }
            Write::Backlog { call, no, entry } => {
                self.bulk.put(&PUT_BACKLOG, row![thread, call.as_str(), *no, session, to_json(entry)]);
            }
            Write::DropBacklog { call } => self.bulk.put(&DROP_BACKLOG, row![thread, call.as_str()]),
            Write::Spawn(spawn) => return Some(self.spawn(spawn)),
            Write::Send { to, message } => {
                self.bulk.put(&SEND, row![session, id.as_str(), to.as_str(), to_json(message)]);
            }
            // Several threads share the spending. It is written at the end of the batch.
            Write::Spending(_) => {}
        }
        None
    }

    fn append(&mut self, thread: ThreadKey, seq: Seq, entry: &Entry) {
        let session = self.thread.session;
        self.bulk.put(&APPEND, row![session, thread, seq, to_json(entry)]);
        if let Item::Summary { covers, .. } = entry.item {
            self.bulk.put(&SUMMARY, row![session, thread, seq, covers]);
        }
    }

    fn open(&mut self, call: &OpenCall) {
        let row = row![
            self.thread.key,
            call.id.as_str(),
            self.thread.session,
            call.call_id.as_ref().map(CallId::as_str),
            call.name.as_str(),
            call.server.0.as_str(),
            call.seq,
            call.since,
            call.until,
            call.is_sent().then_some(call.since),
        ];
        self.bulk.put(&OPEN, row);
    }

    fn spawn(&mut self, spawn: &Spawn) -> Arc<Thread> {
        let key = self.keys.next().expect("bug: there is a key for each child");
        let child = new_child(key, self.thread, spawn, self.now);
        self.insert(&child, &spawn.head);
        let mut first = spawn.at + 1;
        if let Some(range) = &spawn.backlog {
            let (call, end) = (range.call.as_str(), range.first + range.count);
            let row = row![self.thread.key, call, range.first, end, key, first, self.thread.session];
            self.bulk.add(&MOVE_BACKLOG, row, range.count.cast_signed());
            first += range.count;
        }
        for (seq, entry) in (first..).zip(&spawn.entries) {
            self.append(key, seq, entry);
        }
        Arc::new(child)
    }
}
