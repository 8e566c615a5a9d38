//! A batch of applied messages: its replies, which are sent after the commit, and the decision about a commit of unknown
//! outcome. Every database shares it.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rap_io::metrics::{Counter, Exposition, Histogram};
use tokio::sync::oneshot;

use super::message_queue::ReplyReceiver;
use super::{Committed, Error, OnCommit, Receipt, ThreadKey};

/// The result of applying a message.
pub(super) enum Applied {
    /// Its step was written. `version` is the version of the new head.
    Done {
        receipt: Receipt,
        committed: Box<Committed>,
        version: i64,
    },
    /// It repeats a request that was applied earlier.
    Repeated(Receipt),
    Refused(Error),
}

/// Threads that accept no input until the runtime restarts, because one of their steps panicked. Clones refer to the
/// same set.
#[derive(Default, Clone)]
pub(super) struct DisabledThreads(Arc<Mutex<HashSet<ThreadKey>>>);

impl DisabledThreads {
    fn threads(&self) -> MutexGuard<'_, HashSet<ThreadKey>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn insert(&self, thread: ThreadKey) {
        self.threads().insert(thread);
    }

    pub(super) fn contains(&self, thread: ThreadKey) -> bool {
        self.threads().contains(&thread)
    }

    pub(super) fn len(&self) -> usize {
        self.threads().len()
    }
}

/// A batch that was written to a transaction.
pub(super) struct Batch {
    pub(super) replies: Vec<PendingReply>,
    pub(super) outcome: Outcome,
}

#[derive(PartialEq, Eq)]
pub(super) enum Outcome {
    /// The transaction is not committed yet.
    Pending,
    /// The COMMIT returned an error. The batch may be on disk nevertheless.
    Unknown,
}

/// The reply to a sender, which is sent after the commit.
pub(super) struct PendingReply {
    pub(super) applied: Applied,
    pub(super) reply: oneshot::Sender<Result<Receipt, Error>>,
    pub(super) since: Instant,
}

/// Waits for the replies to messages in a queue.
pub(super) async fn replies(receivers: Vec<ReplyReceiver>) -> Vec<Result<Receipt, Error>> {
    let mut results = Vec::with_capacity(receivers.len());
    for receiver in receivers {
        results.push(match receiver {
            // If the channel was closed without a reply, the message may have been applied or not.
            Ok(receiver) => receiver.await.unwrap_or_else(|lost| Err(Error::Unavailable(lost.into()))),
            Err(error) => Err(error),
        });
    }
    results
}

/// Returns the replies of a batch of unknown outcome that are true. The senders of the others are told to retry.
/// `stored` tells for each reply whether its step is on disk; it is `None` for a refusal or a repeat.
pub(super) fn confirmed(replies: Vec<PendingReply>, stored: Vec<Option<bool>>) -> Vec<PendingReply> {
    // A refusal or a repeat may depend on a step of the same batch, so it is valid only if all steps are stored.
    let all = !stored.contains(&Some(false));
    let mut committed_replies = Vec::new();
    for (mut pending, is_stored) in replies.into_iter().zip(stored) {
        if let Applied::Done { committed, .. } = &mut pending.applied {
            committed.late = true;
        }
        if is_stored.unwrap_or(all) {
            committed_replies.push(pending);
        } else {
            // The sender may have stopped waiting for the reply.
            pending.reply.send(Err(Error::Unavailable("the commit failed".into()))).ok();
        }
    }
    committed_replies
}

/// Sends the replies of a batch that is on disk and reports its steps to the runtime.
pub(super) fn complete(replies: Vec<PendingReply>, metrics: &StepMetrics, on_commit: &OnCommit) {
    for PendingReply { applied, reply, since } in replies {
        let result = match applied {
            Applied::Done { receipt, committed, .. } => {
                metrics.applied.count();
                metrics.seconds.observe_duration(since.elapsed());
                on_commit(*committed);
                Ok(receipt)
            }
            Applied::Repeated(receipt) => Ok(receipt),
            Applied::Refused(error) => {
                metrics.refused.count();
                Err(error)
            }
        };
        // The sender may have stopped waiting for the reply.
        reply.send(result).ok();
    }
}

pub(super) struct StepMetrics {
    applied: Counter,
    refused: Counter,
    /// Time from the arrival of a message until its step is on disk.
    seconds: Histogram,
}

impl StepMetrics {
    pub(super) fn new() -> StepMetrics {
        StepMetrics {
            applied: Counter::default(),
            refused: Counter::default(),
            seconds: Histogram::of_seconds(),
        }
    }

    /// Adds the metrics to an exposition. `waiting` has the numbers of waiting internal and external messages.
    pub(super) fn expose(&self, text: &mut Exposition, waiting: (usize, usize)) {
        let outcomes = [("applied", self.applied.get()), ("refused", self.refused.get())];
        let outcomes = outcomes.map(|(outcome, count)| (format!("outcome=\"{outcome}\""), count));
        text.family("rap_steps_total", "counter", "Messages to threads.", outcomes);
        let help = "Time from the arrival of a message until its step is on disk.";
        text.histogram("rap_step_commit_seconds", help, &self.seconds);
        let (internal, external) = waiting;
        // The label `lane` has the name of the first release; dashboards depend on it.
        let waiting = [("internal", internal), ("external", external)];
        let waiting = waiting.map(|(lane, count)| (format!("lane=\"{lane}\""), count));
        text.family("rap_writer_queue", "gauge", "Messages waiting for the writer.", waiting);
    }
}
