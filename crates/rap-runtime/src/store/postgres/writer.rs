//! The writers: each takes the waiting messages of its sessions, applies them in batches, and replies after the commit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rap_protocol::Timestamp;
use tokio::sync::Notify;

use super::Inner;
use super::apply::{self, Context, Written};
use super::connect::conflict_pause;
use super::outcome::{self, Outcome, TransactionId};
use super::statement::Failure;
use crate::store::batch::{self, Applied, PendingReply};
use crate::store::message_queue::{MessageQueue, Pending};
use crate::store::{Error, Message};

/// Maximum number of messages in a batch.
const BATCH: usize = 256;
/// Number of waiting messages that a batch takes besides those that an earlier batch left over.
const ROOM: usize = 64;
/// Number of times that a batch is tried again because another transaction was in the way.
const CONFLICT_RETRIES: u32 = 8;
/// Pause before heads that another node holds are tried again: the first one, and the longest one.
const HELD_PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));
/// Time after which a message is refused because another node holds the head of its thread.
const HELD_PATIENCE: Duration = Duration::from_secs(10);
/// Pause before the outcome of a commit is asked for again.
const RESOLVE_PAUSE: Duration = Duration::from_millis(250);

/// The queue of one writer, which is a task.
#[derive(Default)]
pub(super) struct WriterQueue {
    pub(super) queue: MessageQueue,
    pub(super) wake: Notify,
    /// True while the outcome of a commit is unknown, and messages are therefore refused.
    pub(super) is_stuck: AtomicBool,
}

impl Inner {
    /// Applies the messages of one queue until the store is closed.
    pub(super) async fn run_writer(self: Arc<Self>, writer: usize) {
        let mut pause = HELD_PAUSE.0;
        // Messages that an earlier batch left over. They come first, so that messages of a thread keep their order.
        let mut left: Vec<Pending> = Vec::new();
        loop {
            // Messages that are left over keep no others out.
            let (taken, _) =
                self.writer_queues[writer].queue.take(BATCH.saturating_sub(left.len()).max(ROOM));
            left.extend(taken);
            if left.is_empty() {
                if self.closing.is_cancelled() {
                    return;
                }
                tokio::select! {
                    () = self.writer_queues[writer].wake.notified() => {}
                    () = self.closing.cancelled() => {}
                }
                continue;
            }
            let before = left.len();
            left = self.apply_all(writer, left).await;
            if left.len() < before {
                pause = HELD_PAUSE.0;
                continue;
            }
            left = self.refuse_late(left);
            tokio::select! {
                () = self.writer_queues[writer].wake.notified() => {}
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(HELD_PAUSE.1),
            }
        }
    }

    /// Applies messages. Returns those that are left for the next batch. If rows do not allow a batch, each half of it
    /// is tried on its own, so that one bad message does not affect others.
    async fn apply_all(&self, writer: usize, all: Vec<Pending>) -> Vec<Pending> {
        let (mut parts, mut left, mut tries) = (vec![(all, false)], Vec::new(), 0);
        while let Some((part, careful)) = parts.pop() {
            let messages: Vec<&Message> = part.iter().map(|pending| &pending.message).collect();
            self.batches.count();
            match apply::apply(&self.context(careful), &messages).await {
                Ok(written) => {
                    left = self.reply(writer, part, written).await;
                    if !left.is_empty() {
                        // The other parts may have later messages of the same threads.
                        left.extend(parts.into_iter().rev().flat_map(|(part, _)| part));
                        return left;
                    }
                }
                Err(Failure::Conflict(error)) if tries < CONFLICT_RETRIES => {
                    tries += 1;
                    tracing::debug!(%error, tries, "a batch was in conflict with another transaction");
                    tokio::time::sleep(conflict_pause(tries)).await;
                    parts.push((part, careful));
                }
                Err(Failure::Row(_)) if part.len() > 1 => {
                    let mut first = part;
                    let second = first.split_off(first.len() / 2);
                    parts.extend([(second, true), (first, true)]);
                }
                // Another node may have added a row that was not there when the facts were loaded.
                Err(Failure::Row(_)) if !careful => parts.push((part, true)),
                Err(failure) => {
                    tracing::warn!(%failure, "messages cannot be applied");
                    let only_these = matches!(failure, Failure::Row(_) | Failure::Conflict(_));
                    self.refuse(part, &failure);
                    if !only_these {
                        // The others would fail in the same way.
                        parts.into_iter().for_each(|(part, _)| self.refuse(part, &failure));
                        let why = || Error::Unavailable("the database does not answer".into());
                        self.writer_queues[writer].queue.refuse_all(why);
                        return left;
                    }
                }
            }
        }
        left
    }

    fn context(&self, careful: bool) -> Context<'_> {
        Context {
            connections: &self.steps,
            directory: &self.directory,
            rules: &self.rules,
            key: &self.key,
            disabled: &self.disabled,
            clock: &self.time,
            node: self.node.0,
            reserve: &self.reserve,
            careful,
        }
    }

    /// Refuses messages that have waited too long for a head that another node holds.
    fn refuse_late(&self, left: Vec<Pending>) -> Vec<Pending> {
        let (late, left): (Vec<Pending>, Vec<Pending>) =
            left.into_iter().partition(|pending| pending.since.elapsed() > HELD_PATIENCE);
        self.refuse(late, &Failure::Conflict("another node holds the thread".into()));
        left
    }

    fn refuse(&self, part: Vec<Pending>, failure: &Failure) {
        for Pending { reply, .. } in part {
            let why = failure.to_string().into();
            let error = match failure {
                Failure::Row(_) => Error::Unreadable(why),
                Failure::Closed => Error::Closed,
                _ => Error::Unavailable(why),
            };
            // The sender may have stopped waiting for the reply.
            reply.send(Err(error)).ok();
        }
    }

    /// Replies to the messages of a batch that was written. Returns the messages that are left.
    async fn reply(&self, writer: usize, part: Vec<Pending>, written: Written) -> Vec<Pending> {
        let (mut replies, mut left) = (Vec::new(), Vec::new());
        for (pending, applied) in part.into_iter().zip(written.applied) {
            match applied {
                None => left.push(pending),
                Some(applied) => {
                    let Pending { reply, since, .. } = pending;
                    if let Applied::Done { committed, .. } = &applied {
                        self.directory.remember(&committed.thread);
                        committed.children.iter().for_each(|child| self.directory.remember(child));
                    }
                    replies.push(PendingReply { applied, reply, since });
                }
            }
        }
        if let Some(transaction) = written.unknown {
            self.writer_queues[writer].is_stuck.store(true, Ordering::Relaxed);
            replies = self.resolve(writer, replies, &transaction).await;
            self.writer_queues[writer].is_stuck.store(false, Ordering::Relaxed);
        }
        batch::complete(replies, &self.metrics, &self.on_commit);
        left
    }

    /// Waits until the database tells whether a batch was committed. Until then, messages of this writer are refused.
    async fn resolve(
        &self,
        writer: usize,
        replies: Vec<PendingReply>,
        transaction: &TransactionId,
    ) -> Vec<PendingReply> {
        let step = |pending: &PendingReply| match &pending.applied {
            Applied::Done { committed, version, .. } => Some((committed.thread.key, *version)),
            _ => None,
        };
        let versions: Vec<_> = replies.iter().filter_map(step).collect();
        let committed = loop {
            match outcome::ask(&self.steps, transaction, &versions).await {
                Ok(Outcome::Running) => {}
                Ok(Outcome::Committed) => break true,
                Ok(Outcome::NotCommitted) => break false,
                Ok(Outcome::Unknown) => {
                    tracing::warn!("the database was restarted or replaced: senders have to repeat messages");
                    // The work of the batch, if it was committed, is looked for in the store.
                    self.signals.read_everything_again();
                    break false;
                }
                // The senders get no reply: their messages may have been applied or not.
                Err(_) if self.closing.is_cancelled() => return Vec::new(),
                Err(failure) => {
                    tracing::warn!(%failure, "the outcome of a commit is still unknown");
                    let why = || Error::Unavailable("the database does not answer".into());
                    self.writer_queues[writer].queue.refuse_all(why);
                }
            }
            tokio::time::sleep(RESOLVE_PAUSE).await;
        };
        let stored = replies.iter().map(|pending| step(pending).map(|_| committed)).collect();
        batch::confirmed(replies, stored)
    }
}

/// Source of the time of steps.
pub(crate) enum Time {
    /// The database's clock. The runtime follows it, see [`super::clock::DatabaseClock`].
    Database(Arc<super::clock::DatabaseClock>),
    #[cfg(test)]
    Given(Arc<dyn crate::world::Clock>),
}

impl Time {
    #[cfg(test)]
    pub(super) fn now(&self) -> Timestamp {
        use crate::world::Clock;
        match self {
            Time::Database(clock) => clock.now(),
            Time::Given(clock) => clock.now(),
        }
    }

    /// Returns the time of a transaction, of which the database says that it is `millis`.
    pub(super) fn observe(&self, millis: i64) -> Timestamp {
        match self {
            Time::Database(clock) => {
                clock.observe(Timestamp(millis));
                Timestamp(millis)
            }
            #[cfg(test)]
            Time::Given(clock) => clock.now(),
        }
    }
}
