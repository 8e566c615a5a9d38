//! The dispatcher: which work runs now.
//!
//! Work of one kind for one destination is a queue with slots of its own, so that a destination that hangs, fails or is
//! flooded delays only itself. Within a queue sessions take turns. Work that finds no slot and no room here stays in the
//! store, page by page in the order of the sessions. A retry pause is a due time in the store and occupies no slot.
//!
//! I13: as long as there is work in the store that is not known here, each session has one item in memory at most, and
//! gets no second turn before the next page. So work waits for one turn of each other session, however much they have.
//!
//! This module only decides; nothing here waits, reads or sends.

mod fair_queue;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rap_protocol::{CallId, Timestamp};
use tokio_util::sync::CancellationToken;

use crate::store::{DuePage, DueWork, SessionKey, ThreadKey, WorkKey, WorkKind, WorkQueue};
use fair_queue::{Bounds, FairQueue, Pushed};

/// Work of a queue that waits in memory, in all and of each session. The rest waits in the store. A page that is read from
/// the store has as many sessions.
const WAITING: Bounds = Bounds { items: 256, per_session: 16 };

/// Slots of each queue, by kind.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slots {
    pub(crate) ask: usize,
    pub(crate) invoke: usize,
    pub(crate) answer: usize,
    pub(crate) check: usize,
}

impl Slots {
    fn of(&self, kind: WorkKind) -> usize {
        match kind {
            WorkKind::Ask => self.ask,
            WorkKind::Invoke => self.invoke,
            WorkKind::Answer => self.answer,
            WorkKind::Check => self.check,
        }
    }
}

pub(crate) struct Dispatcher {
    slots: Slots,
    bounds: Bounds,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    queues: BTreeMap<WorkQueue, Queue>,
    /// Work in progress. Nothing is begun twice at a time.
    running: BTreeMap<WorkKey, Running>,
    /// Invocations that were accepted, which is not on disk yet.
    accepted: Vec<(ThreadKey, CallId)>,
}

struct Queue {
    busy: usize,
    waiting: FairQueue<SessionKey, WorkKey>,
    store: InStore,
    /// The last session that was read from the store, if there are others behind it.
    cursor: Option<SessionKey>,
    /// Whether a page since the first session had work that can be begun.
    found: bool,
    /// The last turn of each session since the last page, while there is work in the store.
    turns: BTreeMap<SessionKey, u64>,
    /// Number of turns so far.
    turn: u64,
}

/// Whether there may be due work in the store that is not known here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InStore {
    Nothing,
    Perhaps,
    /// It is being read; more has come meanwhile if so marked.
    Reading {
        more: bool,
    },
}

struct Running {
    cancelled: CancellationToken,
    /// An invocation that was accepted. It occupies no slot and is kept until that is on disk.
    accepted: bool,
}

/// What to do next for a queue.
pub(crate) enum Next {
    /// Begin this work.
    Start(WorkKey, CancellationToken),
    /// Read this page from the store.
    Read(DuePage),
    Nothing,
}

impl Queue {
    fn new(bounds: Bounds) -> Queue {
        let waiting = FairQueue::new(bounds);
        let turns = BTreeMap::new();
        Queue { busy: 0, waiting, store: InStore::Nothing, cursor: None, found: false, turns, turn: 0 }
    }

    fn more_in_store(&mut self) {
        self.store = match self.store {
            InStore::Reading { .. } => InStore::Reading { more: true },
            InStore::Perhaps => InStore::Perhaps,
            InStore::Nothing => {
                self.waiting.keep_first();
                self.turns.clear();
                InStore::Perhaps
            }
        };
    }

    /// Adds work that is stored. If it does not wait here, it is found in the store.
    fn add(&mut self, session: SessionKey, key: WorkKey) {
        if self.store == InStore::Nothing && self.waiting.push(session, key.clone()) == Pushed::Waits {
            return;
        }
        self.more_in_store();
        // A session that had no turn yet need not wait for the next page. Between two pages of a round it would overtake
        // the sessions of the next one.
        let has_turn =
            self.cursor.is_none() && !self.turns.contains_key(&session) && !self.waiting.has(session);
        if has_turn {
            self.waiting.push(session, key);
        }
    }

    fn pop(&mut self) -> Option<WorkKey> {
        let (session, key) = self.waiting.pop()?;
        self.busy += 1;
        if self.store != InStore::Nothing {
            self.turn += 1;
            self.turns.insert(session, self.turn);
        }
        Some(key)
    }

    /// Adds the work of a page that is not all there is: one item of each session that has none here, those behind that had
    /// a turn since the last page, and more only for slots that are free.
    fn add_page(&mut self, mut sessions: Vec<(SessionKey, VecDeque<WorkKey>)>, free: usize) {
        sessions.retain(|(session, _)| !self.waiting.has(*session));
        sessions.sort_by_key(|(session, _)| self.turns.get(session).copied());
        let mut added = 0;
        for round in 0.. {
            let mut left = false;
            for (session, work) in &mut sessions {
                if round > 0 && added >= free {
                    return;
                }
                let Some(key) = work.pop_front() else { continue };
                self.waiting.push_beyond(*session, key);
                (added, left) = (added + 1, true);
            }
            if !left {
                return;
            }
        }
    }
}

/// The work of a page by session, in the order of the page.
fn by_session(work: Vec<(SessionKey, WorkKey)>) -> Vec<(SessionKey, VecDeque<WorkKey>)> {
    let mut places: BTreeMap<SessionKey, usize> = BTreeMap::new();
    let mut sessions: Vec<(SessionKey, VecDeque<WorkKey>)> = Vec::new();
    for (session, key) in work {
        let place = *places.entry(session).or_insert(sessions.len());
        if place == sessions.len() {
            sessions.push((session, VecDeque::new()));
        }
        sessions[place].1.push_back(key);
    }
    sessions
}

impl Dispatcher {
    pub(crate) fn new(slots: Slots) -> Dispatcher {
        Dispatcher::with_bounds(slots, WAITING)
    }

    fn with_bounds(slots: Slots, bounds: Bounds) -> Dispatcher {
        Dispatcher { slots, bounds, state: Mutex::default() }
    }

    /// No code under the lock can leave the state half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Amount of work in progress, by kind.
    pub(crate) fn running(&self) -> [(&'static str, usize); WorkKind::ALL.len()] {
        let state = self.state();
        WorkKind::ALL
            .map(|kind| (kind.as_str(), state.running.keys().filter(|key| key.kind() == kind).count()))
    }

    /// Number of slots in use.
    #[cfg(test)]
    pub(crate) fn busy(&self) -> usize {
        self.state().queues.values().map(|queue| queue.busy).sum()
    }

    /// New work that a step has stored. If a slot is free and nobody waits, it is to be begun at once; otherwise it takes
    /// its turn.
    pub(crate) fn offer(
        &self,
        queue: &WorkQueue,
        session: SessionKey,
        key: WorkKey,
    ) -> Option<CancellationToken> {
        let mut state = self.state();
        if state.running.contains_key(&key) {
            return None;
        }
        let slots = self.slots.of(queue.kind);
        let entry = state.queues.entry(queue.clone()).or_insert_with(|| Queue::new(self.bounds));
        let free = entry.busy < slots && entry.waiting.is_empty() && entry.store == InStore::Nothing;
        if !free {
            entry.add(session, key);
            return None;
        }
        entry.busy += 1;
        Some(state.begin(key))
    }

    /// There may be due work of a queue in the store.
    pub(crate) fn look_in_store(&self, queue: &WorkQueue) {
        let mut state = self.state();
        state.queues.entry(queue.clone()).or_insert_with(|| Queue::new(self.bounds)).more_in_store();
    }

    /// There may be due work of all known queues in the store.
    pub(crate) fn look_in_store_for_all(&self) -> Vec<WorkQueue> {
        let mut state = self.state();
        state.queues.values_mut().for_each(Queue::more_in_store);
        state.queues.keys().cloned().collect()
    }

    /// What to do next for a queue.
    pub(crate) fn next(&self, queue: &WorkQueue, now: Timestamp) -> Next {
        let mut state = self.state();
        let slots = self.slots.of(queue.kind);
        let Some(entry) = state.queues.get_mut(queue) else { return Next::Nothing };
        if entry.busy >= slots {
            return Next::Nothing;
        }
        if let Some(key) = entry.pop() {
            let cancelled = state.begin(key.clone());
            return Next::Start(key, cancelled);
        }
        if entry.store != InStore::Perhaps {
            return Next::Nothing;
        }
        entry.store = InStore::Reading { more: false };
        let after = entry.cursor;
        let skip: HashSet<WorkKey> =
            state.running.keys().filter(|key| key.kind() == queue.kind).cloned().collect();
        let sessions = self.bounds.items;
        // In a round of several pages each session has one turn.
        let per_session = if after.is_some() { 1 } else { self.bounds.per_session };
        Next::Read(DuePage { now, after, sessions, per_session, skip })
    }

    /// A page was read from the store.
    pub(crate) fn read(&self, queue: &WorkQueue, page: &DuePage, found: DueWork) {
        let mut state = self.state();
        let State { queues, running, .. } = &mut *state;
        let Some(entry) = queues.get_mut(queue) else { return };
        let DueWork { mut work, after, more } = found;
        // If nothing of it can be begun, it is looked at again when the clock says so.
        let more = more && !work.is_empty();
        let more_came = entry.store == InStore::Reading { more: true };
        work.retain(|(_, key)| !running.contains_key(key));
        let amount = work.len();
        let sessions = by_session(work);
        let full_session = sessions.iter().any(|(_, work)| work.len() >= page.per_session);
        // Behind the last session a round is over, and begins anew if it did not begin with the first one.
        let one_page = after.is_none() && page.after.is_none();
        entry.cursor = after;
        entry.found = amount > 0 || (entry.found && page.after.is_some());
        // Everything that is due is in progress already.
        let nothing = after.is_none() && !entry.found && !more_came;
        let is_all = one_page && !(more || more_came || full_session) && amount <= self.bounds.items;
        if is_all {
            let all = sessions
                .into_iter()
                .flat_map(|(session, work)| work.into_iter().map(move |key| (session, key)));
            all.for_each(|(session, key)| entry.waiting.push_beyond(session, key));
            entry.store = InStore::Nothing;
        } else if nothing {
            entry.store = InStore::Nothing;
        } else {
            entry.add_page(sessions, self.slots.of(queue.kind).saturating_sub(entry.busy));
            entry.store = InStore::Perhaps;
        }
        entry.turns.clear();
    }

    /// A page could not be read.
    pub(crate) fn not_read(&self, queue: &WorkQueue) {
        if let Some(entry) = self.state().queues.get_mut(queue) {
            entry.store = InStore::Perhaps;
        }
    }

    /// A slot of a queue is free again.
    pub(crate) fn release(&self, queue: &WorkQueue) {
        if let Some(entry) = self.state().queues.get_mut(queue) {
            entry.busy = entry.busy.saturating_sub(1);
        }
    }

    /// Work is not in progress any more.
    pub(crate) fn end(&self, key: &WorkKey) {
        self.state().running.remove(key);
    }

    /// Work is not wanted any more. An invocation that was accepted need not be recorded.
    pub(crate) fn cancel(&self, key: &WorkKey) {
        let mut state = self.state();
        if let Some(running) = state.running.get(key) {
            running.cancelled.cancel();
            if running.accepted {
                state.running.remove(key);
            }
        }
    }

    /// An invocation was accepted. Returns whether it is the first that waits to be recorded.
    pub(crate) fn accept(&self, thread: ThreadKey, call: &CallId) -> bool {
        let mut state = self.state();
        let key = WorkKey::Invoke { thread, call: call.clone() };
        let Some(running) = state.running.get_mut(&key) else { return false };
        if running.cancelled.is_cancelled() {
            state.running.remove(&key);
            return false;
        }
        running.accepted = true;
        state.accepted.push((thread, call.clone()));
        state.accepted.len() == 1
    }

    /// Takes the accepted invocations that have to be recorded. Calls that have settled since are left out.
    pub(crate) fn take_accepted(&self) -> Vec<(ThreadKey, CallId)> {
        let mut state = self.state();
        let mut taken = std::mem::take(&mut state.accepted);
        taken.retain(|(thread, call)| {
            let key = WorkKey::Invoke { thread: *thread, call: call.clone() };
            state.running.get(&key).is_some_and(|running| running.accepted)
        });
        taken
    }

    /// Accepted invocations could not be recorded. They are kept, so that they are not sent again meanwhile.
    pub(crate) fn keep_accepted(&self, calls: Vec<(ThreadKey, CallId)>) {
        self.state().accepted.extend(calls);
    }
}

impl State {
    fn begin(&mut self, key: WorkKey) -> CancellationToken {
        let cancelled = CancellationToken::new();
        self.running.insert(key, Running { cancelled: cancelled.clone(), accepted: false });
        cancelled
    }
}

#[cfg(test)]
mod tests;
