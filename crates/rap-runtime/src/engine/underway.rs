//! What is under way: one attempt at a time for each question, invocation and answer.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rap_protocol::CallId;
use tokio_util::sync::CancellationToken;

use crate::store::ThreadNo;

#[derive(Default)]
pub(super) struct Underway {
    lists: Mutex<Lists>,
}

#[derive(Default)]
struct Lists {
    /// The question of a thread that is with the model.
    asks: HashMap<ThreadNo, (u64, CancellationToken)>,
    invocations: HashMap<(ThreadNo, CallId), Invocation>,
    answers: HashMap<(ThreadNo, u64), ()>,
    acknowledged: Vec<(ThreadNo, CallId)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Invocation {
    Sending,
    /// It was acknowledged, which is not on disk yet.
    Acknowledged,
}

impl Underway {
    /// How much is under way, by kind.
    pub(super) fn count(&self) -> [(&'static str, usize); 3] {
        let lists = self.lists();
        [("ask", lists.asks.len()), ("invoke", lists.invocations.len()), ("answer", lists.answers.len())]
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a question, unless it is under way. An older one of the same thread is abandoned.
    pub(super) fn begin_ask(&self, thread: ThreadNo, turn: u64) -> Option<CancellationToken> {
        let mut lists = self.lists();
        if let Some((current, token)) = lists.asks.get(&thread) {
            if *current >= turn {
                return None;
            }
            token.cancel();
        }
        let token = CancellationToken::new();
        lists.asks.insert(thread, (turn, token.clone()));
        Some(token)
    }

    pub(super) fn abandon(&self, thread: ThreadNo, turn: u64) {
        if let Some((current, token)) = self.lists().asks.get(&thread)
            && *current == turn
        {
            token.cancel();
        }
    }

    pub(super) fn end_ask(&self, thread: ThreadNo, turn: u64) {
        let mut lists = self.lists();
        if lists.asks.get(&thread).is_some_and(|(current, _)| *current == turn) {
            lists.asks.remove(&thread);
        }
    }

    /// Begins an invocation, unless it is under way.
    pub(super) fn begin_invocation(&self, thread: ThreadNo, call: &CallId) -> bool {
        use std::collections::hash_map::Entry;
        match self.lists().invocations.entry((thread, call.clone())) {
            Entry::Occupied(_) => false,
            Entry::Vacant(place) => {
                place.insert(Invocation::Sending);
                true
            }
        }
    }

    /// Whether it still has to be sent: the step that settles a call takes it off the list.
    pub(super) fn is_wanted(&self, thread: ThreadNo, call: &CallId) -> bool {
        self.lists().invocations.contains_key(&(thread, call.clone()))
    }

    pub(super) fn invocation_is_void(&self, thread: ThreadNo, call: &CallId) {
        self.lists().invocations.remove(&(thread, call.clone()));
    }

    /// Stays on the list until that is on disk, so that it is not sent again. Whether somebody has to be told.
    pub(super) fn acknowledge(&self, thread: ThreadNo, call: &CallId) -> bool {
        let mut lists = self.lists();
        let key = (thread, call.clone());
        match lists.invocations.get_mut(&key) {
            None => false,
            Some(state) => {
                *state = Invocation::Acknowledged;
                lists.acknowledged.push(key);
                lists.acknowledged.len() == 1
            }
        }
    }

    /// Those whose acknowledgement has to be written; calls that have settled since are left out.
    pub(super) fn take_acknowledged(&self) -> Vec<(ThreadNo, CallId)> {
        let mut lists = self.lists();
        let mut taken = std::mem::take(&mut lists.acknowledged);
        taken.retain(|key| lists.invocations.contains_key(key));
        taken
    }

    /// Gives back those that could not be written.
    pub(super) fn still_acknowledged(&self, mut taken: Vec<(ThreadNo, CallId)>) {
        self.lists().acknowledged.append(&mut taken);
    }

    pub(super) fn begin_answer(&self, thread: ThreadNo, no: u64) -> bool {
        self.lists().answers.insert((thread, no), ()).is_none()
    }

    pub(super) fn end_answer(&self, thread: ThreadNo, no: u64) {
        self.lists().answers.remove(&(thread, no));
    }
}
