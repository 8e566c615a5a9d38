//! Loads the facts that steps need, for all messages of a round at once.
//!
//! The facts of the first round are loaded in the same pipeline as the heads, so they are guessed from the input alone
//! ([`Wanted::guess`]). If a head then needs another fact, it is loaded in one more pipeline.

use std::collections::{BTreeSet, HashMap, HashSet};

use rap_agent::{
    BuiltIn, Facts, FactsNeeded, Input, Limits, PastCall, Plan, Seq, Server, Spending, ThreadMessage,
};
use rap_io::hashing::in_place;
use rap_protocol::{CallId, EventId, ThreadId, Timestamp};
use serde_json::{Map, Value};
use tokio_postgres::Row;

use super::heads::{call_id, number, session_key, thread_id, thread_key};
use super::statement::{Failure, Statement, get, unreadable};
use crate::engine::built_in;
use crate::store::damage::Damage;
use crate::store::stored::{RESUMED, call_arguments, state_from_number, to_json};
use crate::store::{
    Error, IdempotencyKey, Message, OutboxKey, Receipt, SessionKey, SharedFacts, Thread, ThreadKey,
};

const CALLS: &str = "SELECT c.thread, c.id, c.name, c.server, c.seq, c.state \
     FROM unnest($1::bigint[], $2::text[]) AS w(thread, id) JOIN calls c ON c.thread = w.thread AND c.id = w.id";
const EVENTS: &str = "SELECT e.thread, e.call, e.event \
     FROM unnest($1::bigint[], $2::text[], $3::text[]) AS w(thread, call, event) \
     JOIN event_ids e ON e.thread = w.thread AND e.call = w.call AND e.event = w.event";
const ENTRIES: &str = "SELECT e.thread, e.seq, e.body FROM unnest($1::bigint[], $2::bigint[]) AS w(thread, seq) \
     JOIN entries e ON e.thread = w.thread AND e.seq = w.seq";
const ENTRIES_OF_CALLS: &str = "SELECT e.thread, e.seq, e.body \
     FROM unnest($1::bigint[], $2::text[]) AS w(thread, id) JOIN calls c ON c.thread = w.thread AND c.id = w.id \
     JOIN entries e ON e.thread = c.thread AND e.seq = c.seq";
const PAUSED: &str = "SELECT a.session, a.thread, t.id FROM unnest($1::bigint[]) AS w(session), \
     LATERAL (SELECT session, thread FROM attention WHERE session = w.session AND status = 'needs_you' LIMIT $2) AS a \
     JOIN threads t ON t.no = a.thread ORDER BY a.thread";
/// The budget rows are locked in key order, after all heads.
const SPENDING: &str =
    "SELECT session, body FROM spending WHERE session = ANY($1) ORDER BY session FOR UPDATE";
const REQUESTS: &str = "SELECT digest, request, thread, turn FROM requests WHERE digest = ANY($1)";
const OUTBOX: &str = "SELECT no FROM outbox WHERE no = ANY($1)";

/// Statements that load facts.
#[cfg(test)]
pub(super) const ALL: [&str; 8] =
    [CALLS, EVENTS, ENTRIES, ENTRIES_OF_CALLS, PAUSED, SPENDING, REQUESTS, OUTBOX];

/// Facts to load.
#[derive(Default)]
pub(super) struct Wanted {
    calls: BTreeSet<(ThreadKey, CallId)>,
    events: BTreeSet<(ThreadKey, CallId, EventId)>,
    entries: BTreeSet<(ThreadKey, Seq)>,
    /// Calls whose assistant entry is wanted.
    made_by: BTreeSet<(ThreadKey, CallId)>,
    paused: BTreeSet<SessionKey>,
    spending: BTreeSet<SessionKey>,
    requests: Vec<Vec<u8>>,
    outbox: Vec<i64>,
}

/// Returns whether a step with this input probably needs the spending of its session.
fn probably_spends(input: &Input, limits: &Limits) -> bool {
    let spawns = |plan: &Plan| matches!(plan, Plan::BuiltIn(BuiltIn::SpawnThread { .. }));
    !limits.budgets.are_unlimited()
        && match input {
            _ if !limits.budgets.limit_only_wakes() => true,
            Input::TurnEnded { answer, .. } => answer.calls.iter().any(|call| spawns(&call.plan)),
            Input::FromThread { message, .. } => {
                !matches!(message, ThreadMessage::Close | ThreadMessage::Notice { .. })
            }
            Input::TimerFired { .. } | Input::Event { .. } | Input::Resume => true,
            _ => false,
        }
}

impl Wanted {
    /// Adds the facts that a step probably needs. `session` is known for every thread that was looked up.
    pub(super) fn guess(&mut self, key: ThreadKey, session: SessionKey, input: &Input, limits: &Limits) {
        match input {
            Input::Event { call, event } => {
                self.events.extend(event.id.clone().map(|id| (key, call.clone(), id)));
                self.made_by.extend((!event.associative).then(|| (key, call.clone())));
            }
            Input::TimerFired { call } => _ = self.made_by.insert((key, call.clone())),
            Input::Resume => _ = self.paused.insert(session),
            _ => {}
        }
        if probably_spends(input, limits) {
            self.spending.insert(session);
        }
    }

    /// Adds the facts that a step needs and that are not loaded yet.
    pub(super) fn add(
        &mut self,
        thread: &Thread,
        needs: &FactsNeeded,
        loaded: &LoadedFacts,
        shared: &SharedFacts,
    ) {
        let (key, session) = (thread.key, thread.session);
        let call = needs.call.iter().map(|call| (key, call.clone()));
        self.calls.extend(call.filter(|call| !loaded.calls.contains_key(call)));
        let event = needs.event.iter().map(|(call, event)| (key, call.clone(), event.clone()));
        self.events.extend(event.filter(|event| !loaded.events.contains_key(event)));
        let seqs = [&needs.arguments, &needs.schedule].into_iter().flatten().map(|(_, seq)| (key, *seq));
        self.entries.extend(seqs.filter(|entry| !loaded.entries.contains_key(entry)));
        if needs.paused && !loaded.paused.contains_key(&session) {
            self.paused.insert(session);
        }
        if needs.spending && shared.spending(session).is_none() && !loaded.spending.contains_key(&session) {
            self.spending.insert(session);
        }
    }

    /// Adds what a message needs whatever its thread is.
    pub(super) fn add_message(&mut self, message: &Message) {
        if let Some(key) = &message.idempotency_key {
            self.requests
                .extend([Some(key.key), key.former_key].into_iter().flatten().map(|digest| digest.to_vec()));
        }
        self.outbox.extend(message.outbox.map(|OutboxKey(number)| number));
    }

    /// Returns the statements that load the facts. [`LoadedFacts::add`] takes their rows.
    pub(super) fn statements(&self) -> Vec<Statement> {
        let mut statements = Vec::new();
        let by_call = |sql, calls: &BTreeSet<(ThreadKey, CallId)>| {
            let (threads, ids): (Vec<i64>, Vec<String>) =
                calls.iter().map(|(thread, call)| (thread.number(), call.as_str().to_owned())).unzip();
            (!threads.is_empty()).then(|| Statement::new(sql).with(threads).with(ids))
        };
        let sessions =
            |sessions: &BTreeSet<SessionKey>| sessions.iter().map(|s| s.0.number()).collect::<Vec<_>>();
        if !self.spending.is_empty() {
            statements.push(Statement::new(SPENDING).with(sessions(&self.spending)));
        }
        statements.extend(by_call(CALLS, &self.calls));
        if !self.events.is_empty() {
            let threads: Vec<i64> = self.events.iter().map(|(thread, ..)| thread.number()).collect();
            let calls: Vec<String> = self.events.iter().map(|(_, call, _)| call.as_str().into()).collect();
            let events: Vec<String> = self.events.iter().map(|(.., event)| event.as_str().into()).collect();
            statements.push(Statement::new(EVENTS).with(threads).with(calls).with(events));
        }
        if !self.entries.is_empty() {
            let (threads, seqs): (Vec<i64>, Vec<i64>) =
                self.entries.iter().map(|(thread, seq)| (thread.number(), seq.cast_signed())).unzip();
            statements.push(Statement::new(ENTRIES).with(threads).with(seqs));
        }
        statements.extend(by_call(ENTRIES_OF_CALLS, &self.made_by));
        if !self.paused.is_empty() {
            statements.push(Statement::new(PAUSED).with(sessions(&self.paused)).with(RESUMED as i64));
        }
        if !self.requests.is_empty() {
            statements.push(Statement::new(REQUESTS).with(self.requests.clone()));
        }
        if !self.outbox.is_empty() {
            statements.push(Statement::new(OUTBOX).with(self.outbox.clone()));
        }
        statements
    }
}

/// The facts that were loaded for a round, and those that hold for the whole batch.
#[derive(Default)]
pub(super) struct LoadedFacts {
    calls: HashMap<(ThreadKey, CallId), Option<PastCall>>,
    events: HashMap<(ThreadKey, CallId, EventId), bool>,
    entries: HashMap<(ThreadKey, Seq), Option<String>>,
    paused: HashMap<SessionKey, Vec<(ThreadKey, ThreadId)>>,
    /// Spending that was loaded. `None` if the session has spent nothing yet.
    spending: HashMap<SessionKey, Option<Spending>>,
    requests: HashMap<Vec<u8>, (Vec<u8>, Receipt)>,
    outbox: HashSet<OutboxKey>,
}

impl LoadedFacts {
    /// Forgets what the steps of a round may have changed.
    pub(super) fn begin_round(&mut self) {
        self.calls.clear();
        self.events.clear();
        self.entries.clear();
        self.paused.clear();
    }

    /// Takes the rows of the statements of `wanted`, and removes them from `rows`.
    pub(super) fn add(
        &mut self,
        wanted: &Wanted,
        rows: &mut impl Iterator<Item = Vec<Row>>,
    ) -> Result<(), Failure> {
        let mut next = |is_wanted: bool| is_wanted.then(|| rows.next()).flatten().unwrap_or_default();
        for session in &wanted.spending {
            self.spending.insert(*session, None);
        }
        for row in next(!wanted.spending.is_empty()) {
            let body = serde_json::from_str(get(&row, 1)?).map_err(unreadable)?;
            self.spending.insert(session_key(&row, 0)?, Some(body));
        }
        self.calls.extend(wanted.calls.iter().map(|call| (call.clone(), None)));
        for row in next(!wanted.calls.is_empty()) {
            self.calls.insert((thread_key(&row, 0)?, call_id(&row, 1)?), Some(past_call(&row)?));
        }
        self.events.extend(wanted.events.iter().map(|event| (event.clone(), false)));
        for row in next(!wanted.events.is_empty()) {
            let event = EventId::new(get::<String>(&row, 2)?).map_err(unreadable)?;
            self.events.insert((thread_key(&row, 0)?, call_id(&row, 1)?, event), true);
        }
        self.entries.extend(wanted.entries.iter().map(|entry| (*entry, None)));
        let entries = next(!wanted.entries.is_empty());
        for row in entries.into_iter().chain(next(!wanted.made_by.is_empty())) {
            self.entries.insert((thread_key(&row, 0)?, number(&row, 1)?), Some(get(&row, 2)?));
        }
        self.paused.extend(wanted.paused.iter().map(|session| (*session, Vec::new())));
        for row in next(!wanted.paused.is_empty()) {
            let paused = (thread_key(&row, 1)?, thread_id(&row, 2)?);
            self.paused.entry(session_key(&row, 0)?).or_default().push(paused);
        }
        for row in next(!wanted.requests.is_empty()) {
            let receipt = Receipt { thread: thread_id(&row, 2)?, turn: number(&row, 3)? };
            self.requests.insert(get(&row, 0)?, (get(&row, 1)?, receipt));
        }
        for row in next(!wanted.outbox.is_empty()) {
            self.outbox.insert(OutboxKey(get(&row, 0)?));
        }
        Ok(())
    }

    /// Returns the facts of a step. They must have been loaded.
    pub(super) fn of(
        &self,
        thread: &Thread,
        needs: &FactsNeeded,
        shared: &mut SharedFacts,
        now: Timestamp,
    ) -> Result<Facts, Failure> {
        let mut facts = Facts::of(thread.identity());
        if let Some(call) = &needs.call {
            facts.call = self.calls.get(&(thread.key, call.clone())).cloned().flatten();
        }
        if let Some((call, event)) = &needs.event {
            let event = (thread.key, call.clone(), event.clone());
            facts.event_is_known = self.events.get(&event).copied().unwrap_or(false);
        }
        if let Some((call, seq)) = &needs.arguments {
            facts.arguments = self.arguments(thread.key, *seq, call)?;
        }
        if let Some((call, seq)) = &needs.schedule {
            let arguments = self.arguments(thread.key, *seq, call)?;
            facts.schedule = Some(built_in::occurrence(&arguments, now));
        }
        if needs.paused {
            let others = self.paused.get(&thread.session).into_iter().flatten();
            facts.paused = others.filter(|(key, _)| *key != thread.key).map(|(_, id)| id.clone()).collect();
        }
        if needs.spending {
            if shared.spending(thread.session).is_none() {
                let spending = self.spending.get(&thread.session).copied().flatten();
                shared.set_loaded_spending(thread.session, spending.unwrap_or_else(|| Spending::new(now)));
            }
            facts.spending = shared.spending(thread.session);
        }
        Ok(facts)
    }

    fn arguments(&self, thread: ThreadKey, seq: Seq, call: &CallId) -> Result<Map<String, Value>, Failure> {
        let body = self.entries.get(&(thread, seq)).and_then(Option::as_ref);
        let body = body.ok_or_else(|| unreadable(Damage::MissingEntry(seq)))?;
        let entry = in_place(body.len(), || Damage::check_entry(seq, body)).map_err(unreadable)?;
        Ok(call_arguments(entry, call))
    }

    /// Returns the reply to a request whose key was used before.
    pub(super) fn repeated(
        &self,
        key: &IdempotencyKey,
        shared: &SharedFacts,
    ) -> Option<Result<Receipt, Error>> {
        let former = key.former_key.as_ref().and_then(|digest| self.requests.get(digest.as_slice()));
        let stored = self.requests.get(key.key.as_slice()).or(former);
        let stored =
            stored.map(|(request, receipt)| crate::store::apply::same_request(key, request, receipt.clone()));
        shared.repeated(key).or(stored)
    }

    /// Takes a message between threads. Returns false if it was delivered before.
    pub(super) fn take_message(&mut self, message: OutboxKey) -> bool {
        self.outbox.remove(&message)
    }

    /// Returns the statements that save what the threads share. A session that had spent nothing gets a new row; if
    /// another node was faster, the write fails and is tried again.
    pub(super) fn save_shared(&self, shared: &SharedFacts) -> Vec<Statement> {
        let (mut new, mut old) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
        for (session, spending) in shared.changed_spending() {
            let is_new = self.spending.get(&session).is_none_or(Option::is_none);
            let (sessions, bodies) = if is_new { &mut new } else { &mut old };
            sessions.push(session.0.number());
            bodies.push(to_json(spending));
        }
        let insert = "INSERT INTO spending (session, body) SELECT * FROM unnest($1::bigint[], $2::text[])";
        let update = "UPDATE spending s SET body = w.body \
                      FROM unnest($1::bigint[], $2::text[]) AS w(session, body) WHERE s.session = w.session";
        let statements = [(insert, new), (update, old)].into_iter();
        let statements = statements.filter(|(_, (sessions, _))| !sessions.is_empty());
        statements.map(|(sql, (sessions, bodies))| Statement::new(sql).with(sessions).with(bodies)).collect()
    }
}

pub(super) fn past_call(row: &Row) -> Result<PastCall, Failure> {
    Ok(PastCall {
        name: get(row, 2)?,
        server: Server(get(row, 3)?),
        seq: number(row, 4)?,
        state: state_from_number(get(row, 5)?).ok_or_else(|| unreadable("unknown state of a call"))?,
    })
}

/// Returns the statement that finds a call, whatever its state is.
pub(super) fn call_of(thread: ThreadKey, call: &CallId) -> Statement {
    Statement::new("SELECT thread, id, name, server, seq, state FROM calls WHERE thread = $1 AND id = $2")
        .thread(thread)
        .text(call.as_str())
}
