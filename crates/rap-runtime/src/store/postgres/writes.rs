//! Turns the writes of a step into rows.

use std::sync::Arc;

use rap_agent::{CallState, Entry, Head, Item, OpenCall, Seq, Spawn, Status, Write};
use rap_io::secret_box::Key;
use rap_protocol::{CallId, Timestamp, UserId};

use super::bulk::{Bulk, Value, row};
use super::kinds::{
    ALERT, ANSWER, APPEND, APPROVE, DELIVERED, DROP_ASK, DROP_ATTENTION, DROP_BACKLOG, DROP_QUESTIONS,
    DROP_WAKE, END_SUBSCRIPTION, FORGET_EVENT_IDS, HOLD, INSERT_HEAD, MOVE_BACKLOG, OPEN, PRUNE_VIEWS,
    PUT_ASK, PUT_ATTENTION, PUT_BACKLOG, PUT_WAKE, QUESTION, RECORD_EVENT_ID, RELEASE, REQUEST, SEND,
    SESSION_TOOLSET, SETTLE, STAND_IN_TOOLSET, SUMMARY, TIMER, TOOLSET, UPDATE_HEAD, VIEW,
};
use super::nodes::NodeNumber;
use crate::store::alert::{NewAlert, WAITING};
use crate::store::stored::{
    FORGET_PER_STEP, encrypt_question, new_child, queue_number, state_number, to_json,
};
use crate::store::{
    IdempotencyKey, OutboxKey, Receipt, Reservation, Reserve, SessionKey, SessionToolset, Source,
    StepSettings, StoredToolset, Thread, ThreadKey, WorkKey, WorkKind, WorkQueue,
};

impl Bulk {
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

    pub(super) fn alert(&mut self, alert: NewAlert<'_>) {
        let NewAlert { destination, thread, state, reason, at } = alert;
        self.put(&ALERT, row![destination, thread, state, reason.as_deref(), at, WAITING]);
    }

    /// Saves the toolset of a session. After a failed discovery the session keeps its previous toolset.
    pub(super) fn toolset(&mut self, toolset: &SessionToolset) {
        if let Some(StoredToolset { hash, body: Some(body) }) = &toolset.toolset {
            self.put(&TOOLSET, row![hash.as_str(), body.to_vec()]);
        }
        let hash = toolset.toolset.as_ref().map(|toolset| toolset.hash.as_str());
        let (server, error) = (toolset.server.as_str(), toolset.error.as_deref());
        let kind = match toolset.source {
            Source::Fetched => &SESSION_TOOLSET,
            Source::StandIn => &STAND_IN_TOOLSET,
        };
        self.put(kind, row![toolset.session, server, hash, error, toolset.fetched_at]);
    }
}

fn user(thread: &Thread) -> Option<&str> {
    thread.user_id.as_ref().map(UserId::as_str)
}

fn needs_attention(status: Status) -> bool {
    matches!(status, Status::Failed | Status::NeedsYou)
}

/// Writes one step.
pub(super) struct StepWriter<'a> {
    pub(super) bulk: &'a mut Bulk,
    pub(super) thread: &'a Thread,
    pub(super) key: &'a Key,
    pub(super) rules: &'a StepSettings,
    pub(super) now: Timestamp,
    /// Keys for the children of the step.
    pub(super) keys: std::vec::IntoIter<ThreadKey>,
    pub(super) claims: Claims<'a>,
}

/// Claims of work that a step stores.
pub(super) struct Claims<'a> {
    pub(super) node: NodeNumber,
    pub(super) reserve: &'a Reserve,
    pub(super) reserved: Vec<Reservation>,
}

impl Claims<'_> {
    /// Claims work for this node, if it can start at once.
    fn claim(
        &mut self,
        kind: WorkKind,
        destination: &str,
        session: SessionKey,
        key: &WorkKey,
    ) -> Option<i64> {
        let queue = WorkQueue { kind, destination: destination.to_owned() };
        self.reserved.push((self.reserve)(&queue, session, key)?);
        Some(self.node.0)
    }
}

impl StepWriter<'_> {
    /// Writes the head and everything that is derived from it. `old` is the head before the step and its version; it
    /// is `None` for a new thread.
    pub(super) fn head(&mut self, old: Option<(&Head, i64)>, head: &Head) {
        self.bulk.begin_step();
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
            user(thread),
            thread.title.as_deref(),
            thread.created_at,
            self.now,
            head.status().as_str(),
            to_json(head),
        ];
        self.bulk.put(&INSERT_HEAD, row);
        self.work(thread, None, head);
    }

    /// Writes the model request, the wake time and the status of a thread, if they have changed. A request with the
    /// same turn number keeps its due time.
    fn work(&mut self, thread: &Thread, old: Option<&Head>, head: &Head) {
        let limits = self.rules.limits(&thread.agent);
        let asked = old.and_then(Head::turn_in_progress);
        match head.turn_in_progress() {
            asking if asking == asked => {}
            Some(turn) => {
                let destination = self.rules.model_server(&thread.agent);
                let agent = thread.agent.as_str();
                let key = WorkKey::Ask { thread: thread.key, turn };
                let claim = self.claims.claim(WorkKind::Ask, destination, thread.session, &key);
                let row = row![thread.key, thread.session, turn, agent, destination, self.now, claim];
                self.bulk.put(&PUT_ASK, row);
            }
            None => self.bulk.put(&DROP_ASK, row![thread.key]),
        }
        let status = head.status();
        match head.due(limits) {
            Some(due) => {
                let is_retry = i64::from(needs_attention(status));
                self.bulk.put(&PUT_WAKE, row![thread.key, thread.session, due, is_retry, user(thread)]);
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
            Write::Hold { queue, number, entry } => {
                self.bulk.put(&HOLD, row![thread, queue_number(*queue), *number, session, to_json(entry)]);
            }
            Write::Release { queue, first, count, seq } => {
                let row = row![thread, queue_number(*queue), *first, first + count, *seq, session];
                self.bulk.add(&RELEASE, row, count.cast_signed());
            }
            Write::Open(call) => self.open(call),
            Write::Approve(call) => {
                let base = self.rules.callback_base.as_str();
                self.bulk.put(&APPROVE, row![thread, call.id.as_str(), call.since, call.until, base]);
            }
            Write::Settle { call, state } => {
                self.bulk.put(&SETTLE, row![thread, call.as_str(), state_number(*state), now]);
                if *state == CallState::Ended {
                    // There can be many event ids. `prune` removes them in parts.
                    self.bulk.put(&END_SUBSCRIPTION, row![thread, call.as_str(), session]);
                }
            }
            Write::Question { number, call, question } => {
                let sealed = encrypt_question(self.key, self.thread, *number, question);
                self.bulk.put(
                    &QUESTION,
                    row![thread, *number, call.as_str(), session, sealed, now, user(self.thread)],
                );
            }
            Write::Answer { number, selected } => {
                self.bulk.put(&ANSWER, row![thread, *number, *selected as i64, now]);
            }
            Write::DropQuestions { call } => self.bulk.put(&DROP_QUESTIONS, row![thread, call.as_str()]),
            Write::View { server, view_type, content } => {
                let (server, view_type) = (server.0.as_str(), view_type.as_str());
                self.bulk.put(&VIEW, row![thread, server, view_type, session, content.to_string(), now]);
                let views = self.rules.limits(&self.thread.agent).views as i64;
                self.bulk.put(&PRUNE_VIEWS, row![thread, views, server, view_type]);
            }
            Write::Timer { call, at } => self.bulk.put(&TIMER, row![thread, call.as_str(), *at]),
            Write::RecordEventId { call, event, number, forget } => {
                let row = row![thread, call.as_str(), event.as_str(), session, *number];
                self.bulk.put(&RECORD_EVENT_ID, row);
                if *forget > 0 {
                    // Many can be over the limit, for example after the limit was lowered.
                    let row = row![thread, call.as_str(), *forget, FORGET_PER_STEP];
                    self.bulk.put(&FORGET_EVENT_IDS, row);
                }
            }
            Write::Backlog { call, number, entry } => {
                self.bulk.put(&PUT_BACKLOG, row![thread, call.as_str(), *number, session, to_json(entry)]);
            }
            Write::DropBacklog { call } => self.bulk.put(&DROP_BACKLOG, row![thread, call.as_str()]),
            Write::Spawn(spawn) => return Some(self.spawn(spawn)),
            Write::Send { to, message } => {
                // This node delivers it after the commit.
                let claim = self.claims.node.0;
                self.bulk.put(&SEND, row![session, id.as_str(), to.as_str(), to_json(message), claim]);
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
        let claim = call.is_sent().then(|| {
            let key = WorkKey::Invoke { thread: self.thread.key, call: call.id.clone() };
            self.claims.claim(WorkKind::Invoke, &call.server.0, self.thread.session, &key)
        });
        let row = row![
            self.thread.key,
            call.id.as_str(),
            self.thread.session,
            call.model_id.as_ref().map(CallId::as_str),
            call.name.as_str(),
            call.server.0.as_str(),
            call.seq,
            call.since,
            call.until,
            call.is_sent().then_some(call.since),
            user(self.thread),
            claim.flatten(),
            call.is_sent().then_some(self.rules.callback_base.as_str()),
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
