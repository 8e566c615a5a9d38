//! I13: no destination has more requests at a time than slots, nothing is begun twice at a time, and a retry pauses first.
//! That sessions take turns is checked where the dispatcher is tested alone.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rap_protocol::Timestamp;

use super::invariants::{Broken, holds};
use crate::store::{WorkKind, WorkQueue};

/// The shortest pause before a retry, with all of its jitter.
const SHORTEST_PAUSE: Duration = Duration::from_millis(150);

pub(super) struct Fairness {
    /// Slots for questions and for invocations.
    slots: [usize; 2],
    running: BTreeMap<WorkQueue, BTreeSet<String>>,
    /// Work that has to be tried again, and when it failed.
    failed: BTreeMap<String, Timestamp>,
    /// Invocations that were accepted, which this process knows.
    accepted: BTreeSet<String>,
}

impl Fairness {
    pub(super) fn new(slots: [usize; 2]) -> Fairness {
        Fairness { slots, running: BTreeMap::new(), failed: BTreeMap::new(), accepted: BTreeSet::new() }
    }

    fn slots(&self, kind: WorkKind) -> usize {
        match kind {
            WorkKind::Ask => self.slots[0],
            WorkKind::Invoke => self.slots[1],
            WorkKind::Answer | WorkKind::Check => usize::MAX,
        }
    }

    pub(super) fn begin(&mut self, queue: &WorkQueue, work: &str, now: Timestamp) -> Result<(), Broken> {
        let slots = self.slots(queue.kind);
        if let Some(failed) = self.failed.remove(work) {
            let pause = now.since(failed);
            holds!(pause >= SHORTEST_PAUSE, "I13: {work} is tried again {pause:?} after it failed");
        }
        let again = queue.kind == WorkKind::Invoke && self.accepted.contains(work);
        holds!(!again, "I6: {work} is sent again, though it was accepted");
        let running = self.running.entry(queue.clone()).or_default();
        holds!(running.insert(work.to_owned()), "I13: {work} is begun twice at a time");
        let count = running.len();
        holds!(count <= slots, "I13: {count} requests of {queue:?}, it has {slots} slots");
        Ok(())
    }

    pub(super) fn end(&mut self, queue: &WorkQueue, work: &str) {
        if let Some(running) = self.running.get_mut(queue) {
            running.remove(work);
        }
    }

    /// An attempt failed in a way that calls for another one.
    pub(super) fn failed(&mut self, work: &str, now: Timestamp) {
        self.failed.insert(work.to_owned(), now);
    }

    /// A tool server has accepted an invocation.
    pub(super) fn accepted(&mut self, work: &str) {
        self.accepted.insert(work.to_owned());
    }

    /// The process has ended, and with it all that was in progress. It may have ended before it recorded a failure.
    pub(super) fn crash(&mut self) {
        self.running.clear();
        self.failed.clear();
        self.accepted.clear();
    }
}
