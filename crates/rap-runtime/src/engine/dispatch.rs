//! The dispatcher: decides which work runs next.
//!
//! Each kind of work has one queue per destination, with its own slots, so that a destination that hangs, fails or is
//! overloaded delays only itself. Within a queue, sessions take turns. Work that finds no slot and no room in memory
//! stays in the store and is read page by page, in session order. Work that waits for a retry has a due time in the
//! store and occupies no slot.
//!
//! A quarter of the slots of a queue is reserved for sessions that hold none of them, so that one session with many long
//! requests does not make the others wait until the first of them ends.
//!
//! I13: while the store may hold work that is not in memory, each session has at most one item in memory and gets no
//! second turn before the next page. Work therefore waits for at most one turn of each other session, however much work
//! they have, unless its session already holds a slot and only reserved slots are free.
//!
//! The module does no IO and never blocks.

pub(super) mod fair_queue;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rap_protocol::{CallId, Timestamp};
use tokio_util::sync::CancellationToken;

use crate::store::{DuePage, DueWork, SessionKey, ThreadKey, WorkKey, WorkKind, WorkQueue};
use fair_queue::{Bounds, FairQueue, Pushed};

/// Limits of the work of a queue that waits in memory, in total and per session. The rest waits in the store. `items`
/// is also the number of sessions on a page that is read from the store.
const WAITING: Bounds = Bounds { items: 256, per_session: 16 };
/// One of this many slots is reserved for sessions that hold no slot of the queue.
const RESERVED_PART: usize = 4;

/// Number of slots of each queue, by kind of work.
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
    /// Work in progress. An item is never started again while it is here.
    in_progress: BTreeMap<WorkKey, InProgress>,
    /// Accepted invocations whose acceptance is not stored yet.
    accepted: Vec<(ThreadKey, CallId)>,
    /// Work that is about to be stored and already holds a slot.
    reserved: BTreeMap<WorkKey, (WorkQueue, SessionKey)>,
}

struct Queue {
    slots: HeldSlots,
    waiting: FairQueue<SessionKey, WorkKey>,
    store: StoredWork,
    /// Last session that was read from the store, if more sessions follow it.
    cursor: Option<SessionKey>,
    /// True if a page of the current round had work that can be started.
    found: bool,
    /// True if a page of the current round had work of sessions that may not use the free slots.
    refused: bool,
    /// True if the last round had only such work. The store is not read again before a slot or new work comes.
    saturated: bool,
    /// Last turn of each session since the last page. Empty if all due work is in memory.
    turns: BTreeMap<SessionKey, u64>,
    /// Number of turns taken so far.
    turn: u64,
}

/// Due work in the store that is not in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StoredWork {
    NoMore,
    MaybeMore,
    /// A page is being read. `more` is set if work was added since the read began.
    Reading {
        more: bool,
    },
}

struct InProgress {
    cancelled: CancellationToken,
    /// True for an accepted invocation. It occupies no slot and is kept until the acceptance is stored.
    accepted: bool,
}

/// The slots of a queue, and the sessions that hold them.
pub(super) struct HeldSlots {
    all: usize,
    pub(super) busy: usize,
    /// Number of slots that each session holds. Sessions without a slot are missing.
    by_session: BTreeMap<SessionKey, usize>,
}

impl HeldSlots {
    pub(super) fn new(all: usize) -> HeldSlots {
        HeldSlots { all, busy: 0, by_session: BTreeMap::new() }
    }

    fn free(&self) -> usize {
        self.all.saturating_sub(self.busy)
    }

    /// Returns whether a session may use a free slot: any session may use the common slots, the reserved ones only a
    /// session that holds none.
    pub(super) fn admits(&self, session: SessionKey) -> bool {
        let common = self.all - self.all / RESERVED_PART;
        self.busy < common || (self.busy < self.all && !self.by_session.contains_key(&session))
    }

    pub(super) fn take(&mut self, session: SessionKey) {
        self.busy += 1;
        *self.by_session.entry(session).or_default() += 1;
    }

    pub(super) fn release(&mut self, session: SessionKey) {
        let Some(count) = self.by_session.get_mut(&session) else { return };
        self.busy -= 1;
        *count -= 1;
        if *count == 0 {
            self.by_session.remove(&session);
        }
    }
}

/// Next action for a queue.
pub(crate) enum Next {
    Start(SessionKey, WorkKey, CancellationToken),
    Read(DuePage),
    Nothing,
}

impl Queue {
    fn new(slots: usize, bounds: Bounds) -> Queue {
        Queue {
            slots: HeldSlots::new(slots),
            waiting: FairQueue::new(bounds),
            store: StoredWork::NoMore,
            cursor: None,
            found: false,
            refused: false,
            saturated: false,
            turns: BTreeMap::new(),
            turn: 0,
        }
    }

    fn more_in_store(&mut self) {
        self.saturated = false;
        self.store = match self.store {
            StoredWork::Reading { .. } => StoredWork::Reading { more: true },
            StoredWork::MaybeMore => StoredWork::MaybeMore,
            StoredWork::NoMore => {
                self.waiting.keep_first();
                self.turns.clear();
                StoredWork::MaybeMore
            }
        };
    }

    /// Returns true if new work of a session need not wait.
    fn starts_at_once(&self, session: SessionKey) -> bool {
        self.slots.admits(session) && self.waiting.is_empty() && self.store == StoredWork::NoMore
    }

    /// Adds stored work. If there is no room for it in memory, it is read from the store later.
    fn add(&mut self, session: SessionKey, key: WorkKey) {
        if self.store == StoredWork::NoMore && self.waiting.push(session, key.clone()) == Pushed::Queued {
            return;
        }
        self.more_in_store();
        // A session without a turn since the last page need not wait for the next one. Between two pages of a round it
        // has to, because it would overtake the sessions of the next page.
        let has_turn =
            self.cursor.is_none() && !self.turns.contains_key(&session) && !self.waiting.has(session);
        if has_turn {
            self.waiting.push(session, key);
        }
    }

    fn pop(&mut self) -> Option<(SessionKey, WorkKey)> {
        let (session, key) = self.waiting.pop_if(|session| self.slots.admits(session))?;
        self.slots.take(session);
        if self.store != StoredWork::NoMore {
            self.turn += 1;
            self.turns.insert(session, self.turn);
        }
        Some((session, key))
    }

    /// Adds work of a page that does not hold all due work: one item of each session that has none in memory, and more
    /// items only for free slots. Sessions that had a turn since the last page come last.
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
                self.waiting.push_unbounded(*session, key);
                (added, left) = (added + 1, true);
            }
            if !left {
                return;
            }
        }
    }
}

/// Groups the work of a page by session, in the order of the page.
fn by_session(work: Vec<(SessionKey, WorkKey)>) -> Vec<(SessionKey, VecDeque<WorkKey>)> {
    let mut positions: BTreeMap<SessionKey, usize> = BTreeMap::new();
    let mut sessions: Vec<(SessionKey, VecDeque<WorkKey>)> = Vec::new();
    for (session, key) in work {
        let position = *positions.entry(session).or_insert(sessions.len());
        if position == sessions.len() {
            sessions.push((session, VecDeque::new()));
        }
        sessions[position].1.push_back(key);
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

    /// Ignores poisoning: no code under the lock can leave the state inconsistent.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entry<'a>(&self, state: &'a mut State, queue: &WorkQueue) -> &'a mut Queue {
        let new = || Queue::new(self.slots.of(queue.kind), self.bounds);
        state.queues.entry(queue.clone()).or_insert_with(new)
    }

    /// Returns the number of items in progress, by kind.
    pub(crate) fn in_progress(&self) -> [(&'static str, usize); WorkKind::ALL.len()] {
        let state = self.state();
        WorkKind::ALL
            .map(|kind| (kind.as_str(), state.in_progress.keys().filter(|key| key.kind() == kind).count()))
    }

    /// Returns true if work is in progress, waits in memory, or may be in the store and due.
    pub(crate) fn has_work(&self) -> bool {
        let state = self.state();
        let has_work = |queue: &Queue| queue.store != StoredWork::NoMore || !queue.waiting.is_empty();
        !state.in_progress.is_empty() || state.queues.values().any(has_work)
    }

    /// Returns the number of slots in use.
    #[cfg(test)]
    pub(crate) fn busy(&self) -> usize {
        self.state().queues.values().map(|queue| queue.slots.busy).sum()
    }

    /// Takes new work that a step has stored. Returns a token if the caller has to start it at once, because a slot is
    /// free and nothing waits. Otherwise queues the work and returns `None`.
    pub(crate) fn offer(
        &self,
        queue: &WorkQueue,
        session: SessionKey,
        key: WorkKey,
    ) -> Option<CancellationToken> {
        let mut state = self.state();
        if state.in_progress.contains_key(&key) {
            return None;
        }
        // A reservation in another queue is not used. Its holder releases it.
        if state.reserved.get(&key).is_some_and(|(reserved, _)| reserved == queue) {
            state.reserved.remove(&key);
            return Some(state.start(key));
        }
        let entry = self.entry(&mut state, queue);
        if !entry.starts_at_once(session) {
            entry.add(session, key);
            return None;
        }
        entry.slots.take(session);
        Some(state.start(key))
    }

    /// Marks stored work as in progress without a slot, so that it does not start while it is moved to another queue.
    /// Returns false if it is in progress already.
    pub(crate) fn hold(&self, key: &WorkKey) -> bool {
        let mut state = self.state();
        let is_new = !state.in_progress.contains_key(key);
        if is_new {
            state.start(key.clone());
        }
        is_new
    }

    /// Returns true if work of a session could start at once.
    pub(crate) fn has_free_slot(&self, queue: &WorkQueue, session: SessionKey) -> bool {
        let state = self.state();
        state.queues.get(queue).is_none_or(|entry| entry.starts_at_once(session))
    }

    /// Reserves a slot for work that is about to be stored. Returns false if the work could not start at once.
    pub(crate) fn reserve(&self, queue: &WorkQueue, session: SessionKey, key: &WorkKey) -> bool {
        let mut state = self.state();
        if state.in_progress.contains_key(key) || state.reserved.contains_key(key) {
            return false;
        }
        let entry = self.entry(&mut state, queue);
        if !entry.starts_at_once(session) {
            return false;
        }
        entry.slots.take(session);
        state.reserved.insert(key.clone(), (queue.clone(), session));
        true
    }

    /// Returns true if a slot is reserved for this work.
    pub(crate) fn is_reserved(&self, key: &WorkKey) -> bool {
        self.state().reserved.contains_key(key)
    }

    /// Releases the slot of reserved work that was not started. Returns its queue.
    pub(crate) fn unreserve(&self, key: &WorkKey) -> Option<WorkQueue> {
        let (queue, session) = self.state().reserved.remove(key)?;
        self.release(&queue, session);
        Some(queue)
    }

    /// Returns the model requests in progress.
    pub(crate) fn model_requests(&self) -> Vec<WorkKey> {
        let state = self.state();
        state.in_progress.keys().filter(|key| key.kind() == WorkKind::Ask).cloned().collect()
    }

    /// Returns the calls whose invocations are in progress.
    pub(crate) fn invocations(&self) -> impl Iterator<Item = (ThreadKey, CallId)> + use<> {
        let state = self.state();
        let invocations = state.in_progress.keys().filter_map(|key| match key {
            WorkKey::Invoke { thread, call } => Some((*thread, call.clone())),
            _ => None,
        });
        invocations.collect::<Vec<_>>().into_iter()
    }

    /// Notes that the store may hold due work of a queue.
    pub(crate) fn check_store(&self, queue: &WorkQueue) {
        let mut state = self.state();
        self.entry(&mut state, queue).more_in_store();
    }

    /// Notes that the store may hold due work of every known queue. Returns these queues.
    pub(crate) fn check_store_for_all(&self) -> Vec<WorkQueue> {
        let mut state = self.state();
        state.queues.values_mut().for_each(Queue::more_in_store);
        state.queues.keys().cloned().collect()
    }

    /// Returns the next action for a queue.
    pub(crate) fn next(&self, queue: &WorkQueue, now: Timestamp) -> Next {
        let mut state = self.state();
        let State { queues, in_progress, .. } = &mut *state;
        let Some(entry) = queues.get_mut(queue) else { return Next::Nothing };
        if entry.slots.free() == 0 {
            return Next::Nothing;
        }
        while let Some((session, key)) = entry.pop() {
            // A request that was moved to another queue may be in progress there.
            if in_progress.contains_key(&key) {
                HeldSlots::release(&mut entry.slots, session);
                continue;
            }
            let cancelled = state.start(key.clone());
            return Next::Start(session, key, cancelled);
        }
        if entry.store != StoredWork::MaybeMore || entry.saturated {
            return Next::Nothing;
        }
        entry.store = StoredWork::Reading { more: false };
        let after = entry.cursor;
        let active = state.in_progress.keys().chain(state.reserved.keys());
        let skip: HashSet<WorkKey> = active.filter(|key| key.kind() == queue.kind).cloned().collect();
        let sessions = self.bounds.items;
        // In a round of several pages, each session has one turn.
        let per_session = if after.is_some() { 1 } else { self.bounds.per_session };
        Next::Read(DuePage { now, after, sessions, per_session, skip })
    }

    /// Takes a page that was read from the store.
    pub(crate) fn page_read(&self, queue: &WorkQueue, page: &DuePage, found: DueWork) {
        let mut state = self.state();
        let State { queues, in_progress, reserved, .. } = &mut *state;
        let Some(entry) = queues.get_mut(queue) else { return };
        let DueWork { mut work, after, more } = found;
        // If none of the page can be started, the clock causes the next read.
        let more = more && !work.is_empty();
        let more_came = entry.store == StoredWork::Reading { more: true };
        work.retain(|(_, key)| !in_progress.contains_key(key) && !reserved.contains_key(key));
        let amount = work.len();
        let sessions = by_session(work);
        let full_session = sessions.iter().any(|(_, work)| work.len() >= page.per_session);
        // The page holds all sessions only if it starts with the first and ends with the last one. Otherwise the next
        // page continues the round or starts a new one.
        let one_page = after.is_none() && page.after.is_none();
        entry.cursor = after;
        let same_round = page.after.is_some();
        let startable = sessions.iter().any(|(session, _)| entry.slots.admits(*session));
        entry.found = startable || (entry.found && same_round);
        entry.refused = (amount > 0 && !startable) || (entry.refused && same_round);
        let fruitless = after.is_none() && !entry.found && !more_came;
        // All due work is in progress already.
        let nothing = fruitless && !entry.refused;
        entry.saturated = fruitless && entry.refused;
        let is_all = one_page && !(more || more_came || full_session) && amount <= self.bounds.items;
        if is_all {
            let all = sessions
                .into_iter()
                .flat_map(|(session, work)| work.into_iter().map(move |key| (session, key)));
            all.for_each(|(session, key)| entry.waiting.push_unbounded(session, key));
            entry.store = StoredWork::NoMore;
        } else if nothing {
            entry.store = StoredWork::NoMore;
        } else {
            entry.add_page(sessions, entry.slots.free());
            entry.store = StoredWork::MaybeMore;
        }
        entry.turns.clear();
    }

    /// Notes that a page could not be read.
    pub(crate) fn read_failed(&self, queue: &WorkQueue) {
        if let Some(entry) = self.state().queues.get_mut(queue) {
            entry.store = StoredWork::MaybeMore;
        }
    }

    /// Releases a slot of a queue that a session holds.
    pub(crate) fn release(&self, queue: &WorkQueue, session: SessionKey) {
        let mut state = self.state();
        let Some(entry) = state.queues.get_mut(queue) else { return };
        entry.saturated = false;
        entry.slots.release(session);
    }

    /// Ends work in progress.
    pub(crate) fn end(&self, key: &WorkKey) {
        self.state().in_progress.remove(key);
    }

    /// Cancels work in progress. The acceptance of a cancelled invocation is not recorded. Returns false if the work is not
    /// in progress here.
    pub(crate) fn cancel(&self, key: &WorkKey) -> bool {
        let mut state = self.state();
        let Some(work) = state.in_progress.get(key) else { return false };
        work.cancelled.cancel();
        if work.accepted {
            state.in_progress.remove(key);
        }
        true
    }

    /// Notes that an invocation was accepted. Returns true if it is the only one that waits to be recorded.
    pub(crate) fn accept(&self, thread: ThreadKey, call: &CallId) -> bool {
        let mut state = self.state();
        let key = WorkKey::Invoke { thread, call: call.clone() };
        let Some(work) = state.in_progress.get_mut(&key) else { return false };
        if work.cancelled.is_cancelled() {
            state.in_progress.remove(&key);
            return false;
        }
        work.accepted = true;
        state.accepted.push((thread, call.clone()));
        state.accepted.len() == 1
    }

    /// Takes the accepted invocations that have to be recorded, without those whose calls were settled since.
    pub(crate) fn take_accepted(&self) -> Vec<(ThreadKey, CallId)> {
        let mut state = self.state();
        let mut taken = std::mem::take(&mut state.accepted);
        taken.retain(|(thread, call)| {
            let key = WorkKey::Invoke { thread: *thread, call: call.clone() };
            state.in_progress.get(&key).is_some_and(|work| work.accepted)
        });
        taken
    }

    /// Puts back accepted invocations that could not be recorded. They stay in progress, so that they are not sent
    /// again.
    pub(crate) fn keep_accepted(&self, calls: Vec<(ThreadKey, CallId)>) {
        self.state().accepted.extend(calls);
    }
}

impl State {
    fn start(&mut self, key: WorkKey) -> CancellationToken {
        let cancelled = CancellationToken::new();
        self.in_progress.insert(key, InProgress { cancelled: cancelled.clone(), accepted: false });
        cancelled
    }
}

#[cfg(test)]
mod tests;
