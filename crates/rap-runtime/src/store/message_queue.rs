//! The messages that wait to be applied. There is one queue for internal and one for external messages. The external
//! queue is bounded; when it is full, messages are refused.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::oneshot;

use crate::store::{Error, Message, MessageClass, Receipt};

/// Maximum number of waiting external messages.
const MAX_EXTERNAL: usize = 4096;
/// Maximum number of internal messages that are taken before a waiting external one. Without this limit a flood of
/// internal messages would starve external ones, including those that could stop the flood.
const INTERNAL_IN_A_ROW: usize = 16;

/// A waiting message.
pub(super) struct Pending {
    pub(super) message: Message,
    pub(super) reply: oneshot::Sender<Result<Receipt, Error>>,
    pub(super) since: Instant,
}

pub(super) type ReplyReceiver = Result<oneshot::Receiver<Result<Receipt, Error>>, Error>;

#[derive(Default)]
pub(super) struct MessageQueue {
    queues: Mutex<Queues>,
}

#[derive(Default)]
struct Queues {
    internal: VecDeque<Pending>,
    external: VecDeque<Pending>,
    in_a_row: usize,
    /// True if a writer job is scheduled that will take the waiting messages.
    scheduled: bool,
}

impl Queues {
    fn pop(&mut self) -> Option<Pending> {
        if self.in_a_row >= INTERNAL_IN_A_ROW || self.internal.is_empty() {
            self.in_a_row = 0;
            return self.external.pop_front().or_else(|| self.internal.pop_front());
        }
        self.in_a_row += 1;
        self.internal.pop_front()
    }
}

impl MessageQueue {
    /// A poisoned lock is ignored: no panic can leave the queues in an inconsistent state.
    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds messages. Calls `schedule` if no writer job is scheduled yet.
    pub(super) fn push(
        &self,
        class: MessageClass,
        messages: Vec<Message>,
        schedule: impl FnOnce(),
    ) -> Vec<ReplyReceiver> {
        let since = Instant::now();
        let mut queues = self.queues();
        let mut replies = Vec::with_capacity(messages.len());
        for message in messages {
            if class == MessageClass::External && queues.external.len() >= MAX_EXTERNAL {
                replies.push(Err(Error::Busy));
                continue;
            }
            let (reply, receiver) = oneshot::channel();
            let pending = Pending { message, reply, since };
            match class {
                MessageClass::Internal => queues.internal.push_back(pending),
                MessageClass::External => queues.external.push_back(pending),
            }
            replies.push(Ok(receiver));
        }
        let any_waiting = !queues.internal.is_empty() || !queues.external.is_empty();
        let must_schedule = any_waiting && !queues.scheduled;
        queues.scheduled |= any_waiting;
        drop(queues);
        if must_schedule {
            schedule();
        }
        replies
    }

    /// Takes the next messages. Returns whether more are waiting; if so, the caller has to schedule another writer job.
    pub(super) fn take(&self, max: usize) -> (Vec<Pending>, bool) {
        let mut queues = self.queues();
        let taken: Vec<Pending> = std::iter::from_fn(|| queues.pop()).take(max).collect();
        let more = !queues.internal.is_empty() || !queues.external.is_empty();
        queues.scheduled = more;
        (taken, more)
    }

    /// Refuses all waiting messages.
    pub(super) fn refuse_all(&self, error: impl Fn() -> Error) {
        let left = {
            let mut queues = self.queues();
            queues.scheduled = false;
            let internal = std::mem::take(&mut queues.internal);
            internal.into_iter().chain(std::mem::take(&mut queues.external)).collect::<Vec<_>>()
        };
        for pending in left {
            // The sender may have stopped waiting for the reply.
            pending.reply.send(Err(error())).ok();
        }
    }

    /// Returns the numbers of waiting internal and external messages.
    pub(super) fn waiting(&self) -> (usize, usize) {
        let queues = self.queues();
        (queues.internal.len(), queues.external.len())
    }
}

#[cfg(test)]
mod tests {
    use rap_agent::Input;
    use rap_protocol::ThreadId;

    use super::*;
    use crate::store::Target;

    fn messages(count: usize) -> Vec<Message> {
        let target = Target::Id(ThreadId::new("t").unwrap());
        (0..count).map(|_| Message::new(target.clone(), Input::Interrupt)).collect()
    }

    #[test]
    fn a_flood_of_internal_messages_does_not_starve_external_ones() {
        let queue = MessageQueue::default();
        queue.push(MessageClass::Internal, messages(3 * INTERNAL_IN_A_ROW), || ());
        queue.push(MessageClass::External, messages(1), || panic!("a writer job is scheduled already"));
        let (taken, more) = queue.take(INTERNAL_IN_A_ROW + 1);
        assert_eq!((taken.len(), more), (INTERNAL_IN_A_ROW + 1, true));
        assert_eq!(queue.waiting(), (2 * INTERNAL_IN_A_ROW, 0));
    }

    #[test]
    fn the_external_queue_is_bounded_and_the_internal_one_is_not() {
        let queue = MessageQueue::default();
        let replies = queue.push(MessageClass::External, messages(MAX_EXTERNAL + 1), || ());
        assert_eq!(replies.iter().filter(|reply| matches!(reply, Err(Error::Busy))).count(), 1);
        let replies = queue.push(MessageClass::Internal, messages(MAX_EXTERNAL + 1), || ());
        assert!(replies.iter().all(Result::is_ok));
    }
}
