//! Deadlines of running calls: the end of a handler's time, and of its grace time after a cancellation.
//!
//! The task here ends a call even if its handler blocks its thread, so that nothing else can interrupt it. It stops when
//! the server begins to shut down: then the shutdown time bounds all handlers.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{Engine, lock};
use crate::auth::Caller;
use crate::journal::CallSeq;
use crate::rules::Input;

/// Maximum number of calls whose deadlines are handled at once.
const PAGE: usize = 256;

/// The next deadline of each running call that has one.
#[derive(Default)]
pub(super) struct Deadlines {
    by_time: BTreeMap<(Instant, CallSeq), (Caller, Input)>,
    times: HashMap<CallSeq, Instant>,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Deadline {
    /// The grace time after a cancellation, which begins now.
    Grace,
    /// The handler has `left` to return, of `timeout` in all.
    Timeout { timeout: Duration, left: Duration },
}

impl Deadlines {
    fn set(&mut self, call: CallSeq, at: Instant, caller: Caller, input: Input) {
        self.remove(call);
        self.by_time.insert((at, call), (caller, input));
        self.times.insert(call, at);
    }

    fn remove(&mut self, call: CallSeq) {
        if let Some(at) = self.times.remove(&call) {
            self.by_time.remove(&(at, call));
        }
    }

    fn next(&self) -> Option<Instant> {
        self.by_time.first_key_value().map(|((at, _), _)| *at)
    }

    /// Removes and returns at most `limit` calls whose deadline has passed.
    fn take_due(&mut self, now: Instant, limit: usize) -> Vec<(CallSeq, Caller, Input)> {
        let mut due = Vec::new();
        while due.len() < limit
            && let Some(first) = self.by_time.first_entry()
            && first.key().0 <= now
        {
            let ((_, call), (caller, input)) = first.remove_entry();
            self.times.remove(&call);
            due.push((call, caller, input));
        }
        due
    }
}

impl Engine {
    /// Sets the deadline of a call. Replaces the one that it has.
    ///
    /// Must not be called by the task of a handler. It may wake the task that ends calls on the worker thread of the
    /// caller, and a handler that blocks this thread would keep that task from running.
    pub(super) fn set_deadline(&self, call: CallSeq, caller: &Caller, deadline: Deadline) {
        let (after, input) = match deadline {
            Deadline::Grace => (self.limits.cancel_grace, Input::GraceOver),
            Deadline::Timeout { timeout, left } => (left, Input::TimedOut(timeout)),
        };
        let at = Instant::now() + after;
        let mut deadlines = lock(&self.deadlines);
        deadlines.set(call, at, caller.clone(), input);
        if deadlines.next() == Some(at) {
            self.deadline_changed.notify_one();
        }
    }

    pub(crate) fn clear_deadline(&self, call: CallSeq) {
        lock(&self.deadlines).remove(call);
    }

    /// Ends calls whose deadline has passed, until the server stops.
    pub(super) async fn run_deadlines(self: Arc<Self>) {
        loop {
            let due = lock(&self.deadlines).take_due(Instant::now(), PAGE);
            for (call, caller, input) in due {
                let engine = Arc::clone(&self);
                // Ignored if the call has ended meanwhile.
                self.tasks.spawn(async move { engine.commit(&caller, call, input, None).await.ok() });
            }
            let next = lock(&self.deadlines).next();
            let passed = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = passed => {}
                () = self.deadline_changed.notified() => {}
                () = self.stopping.cancelled() => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_due_in_order_and_a_new_one_replaces_the_old() {
        let (start, caller) = (Instant::now(), || Caller::from_bytes([0; 16]));
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut deadlines = Deadlines::default();
        for (call, seconds) in [(1, 30), (2, 10), (3, 20), (4, 10)] {
            deadlines.set(call, at(seconds), caller(), Input::GraceOver);
        }
        deadlines.set(1, at(5), caller(), Input::GraceOver);
        deadlines.remove(3);
        let mut due = |seconds, limit| {
            let due = deadlines.take_due(at(seconds), limit);
            (due.into_iter().map(|(call, ..)| call).collect::<Vec<_>>(), deadlines.next())
        };
        assert_eq!(due(4, 9), (vec![], Some(at(5))));
        assert_eq!(due(10, 2), (vec![1, 2], Some(at(10))));
        assert_eq!(due(10, 2), (vec![4], None));
        assert!(deadlines.times.is_empty());
    }
}
