//! I13: no destination has more concurrent requests than slots, no work runs twice at the same time, and a retry comes
//! after a pause. That sessions take turns is tested with the dispatcher alone.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rap_protocol::Timestamp;

use super::invariants::{Violation, ensure};
use crate::store::{WorkKind, WorkQueue};

/// Minimum pause before a retry, jitter included.
pub(super) const SHORTEST_PAUSE: Duration = Duration::from_millis(150);

pub(super) struct Fairness {
    /// Slots for model requests and for invocations.
    slots: [usize; 2],
    running: BTreeMap<WorkQueue, BTreeSet<String>>,
    /// Work that has to be retried, and the time of its failure.
    failed: BTreeMap<String, Timestamp>,
    /// Invocations that were accepted in this process.
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

    pub(super) fn begin(&mut self, queue: &WorkQueue, work: &str, now: Timestamp) -> Result<(), Violation> {
        let slots = self.slots(queue.kind);
        if let Some(failed) = self.failed.remove(work) {
            let pause = now.since(failed);
            ensure!(pause >= SHORTEST_PAUSE, "I13: {work} is retried {pause:?} after it failed");
        }
        let again = queue.kind == WorkKind::Invoke && self.accepted.contains(work);
        ensure!(!again, "I6: {work} is sent again, although it was accepted");
        let running = self.running.entry(queue.clone()).or_default();
        ensure!(running.insert(work.to_owned()), "I13: {work} runs twice at the same time");
        let count = running.len();
        ensure!(count <= slots, "I13: {count} concurrent requests of {queue:?}, which has {slots} slots");
        Ok(())
    }

    pub(super) fn end(&mut self, queue: &WorkQueue, work: &str) {
        if let Some(running) = self.running.get_mut(queue) {
            running.remove(work);
        }
    }

    /// An attempt failed and has to be retried.
    pub(super) fn failed(&mut self, work: &str, now: Timestamp) {
        self.failed.insert(work.to_owned(), now);
    }

    /// The clock was set back, which ends pauses that became too long.
    pub(super) fn forget_failures(&mut self) {
        self.failed.clear();
    }

    /// A tool server has accepted an invocation.
    pub(super) fn accepted(&mut self, work: &str) {
        self.accepted.insert(work.to_owned());
    }

    /// The process has ended, and with it all work in progress. A failure or an acceptance may not be recorded on disk.
    pub(super) fn crash(&mut self) {
        self.running.clear();
        self.failed.clear();
        self.accepted.clear();
    }
}
