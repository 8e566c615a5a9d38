//! Messages that wait to be applied: two lanes under one lock. Past its bound the external lane refuses.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::oneshot;

use crate::store::{Error, Lane, Message, Receipt};

/// External messages that may wait.
const EXTERNAL: usize = 4096;
/// So many internal messages go before an external one that waits. Without an end, a flood of them would shut out
/// everybody else, also those who could end it.
const INTERNAL_IN_A_ROW: usize = 16;

/// A message that waits.
pub(super) struct Pending {
    pub(super) message: Message,
    pub(super) reply: oneshot::Sender<Result<Receipt, Error>>,
    pub(super) since: Instant,
}

type Answer = Result<oneshot::Receiver<Result<Receipt, Error>>, Error>;

#[derive(Default)]
pub(super) struct Inbox {
    lanes: Mutex<Lanes>,
}

#[derive(Default)]
struct Lanes {
    internal: VecDeque<Pending>,
    external: VecDeque<Pending>,
    in_a_row: usize,
    /// Whether the writer has been asked to look.
    scheduled: bool,
}

impl Lanes {
    fn pop(&mut self) -> Option<Pending> {
        if self.in_a_row >= INTERNAL_IN_A_ROW || self.internal.is_empty() {
            self.in_a_row = 0;
            return self.external.pop_front().or_else(|| self.internal.pop_front());
        }
        self.in_a_row += 1;
        self.internal.pop_front()
    }
}

impl Inbox {
    /// No code under the lock can leave the lanes half changed.
    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds messages, and calls `schedule` if the writer has not been asked to look.
    pub(super) fn push(&self, lane: Lane, messages: Vec<Message>, schedule: impl FnOnce()) -> Vec<Answer> {
        let since = Instant::now();
        let mut lanes = self.lanes();
        let mut answers = Vec::with_capacity(messages.len());
        for message in messages {
            if lane == Lane::External && lanes.external.len() >= EXTERNAL {
                answers.push(Err(Error::Busy));
                continue;
            }
            let (reply, answer) = oneshot::channel();
            let pending = Pending { message, reply, since };
            match lane {
                Lane::Internal => lanes.internal.push_back(pending),
                Lane::External => lanes.external.push_back(pending),
            }
            answers.push(Ok(answer));
        }
        let waits = !lanes.internal.is_empty() || !lanes.external.is_empty();
        let schedules = waits && !lanes.scheduled;
        lanes.scheduled |= waits;
        drop(lanes);
        if schedules {
            schedule();
        }
        answers
    }

    /// Takes the next messages. Says whether more wait, for which the caller has to ask the writer again.
    pub(super) fn take(&self, most: usize) -> (Vec<Pending>, bool) {
        let mut lanes = self.lanes();
        let taken: Vec<Pending> = std::iter::from_fn(|| lanes.pop()).take(most).collect();
        let more = !lanes.internal.is_empty() || !lanes.external.is_empty();
        lanes.scheduled = more;
        (taken, more)
    }

    /// Refuses all messages that wait.
    pub(super) fn refuse_all(&self, error: impl Fn() -> Error) {
        let left = {
            let mut lanes = self.lanes();
            lanes.scheduled = false;
            let internal = std::mem::take(&mut lanes.internal);
            internal.into_iter().chain(std::mem::take(&mut lanes.external)).collect::<Vec<_>>()
        };
        for pending in left {
            // A sender that is gone need not hear.
            pending.reply.send(Err(error())).ok();
        }
    }

    /// Numbers of internal and external messages that wait.
    pub(super) fn waiting(&self) -> (usize, usize) {
        let lanes = self.lanes();
        (lanes.internal.len(), lanes.external.len())
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
    fn a_flood_of_internal_messages_does_not_shut_out_the_external_ones() {
        let inbox = Inbox::default();
        inbox.push(Lane::Internal, messages(3 * INTERNAL_IN_A_ROW), || ());
        inbox.push(Lane::External, messages(1), || panic!("the writer was asked already"));
        let (taken, more) = inbox.take(INTERNAL_IN_A_ROW + 1);
        assert_eq!((taken.len(), more), (INTERNAL_IN_A_ROW + 1, true));
        assert_eq!(inbox.waiting(), (2 * INTERNAL_IN_A_ROW, 0));
    }

    #[test]
    fn the_external_lane_has_a_bound_and_the_internal_one_is_never_refused() {
        let inbox = Inbox::default();
        let answers = inbox.push(Lane::External, messages(EXTERNAL + 1), || ());
        assert_eq!(answers.iter().filter(|answer| matches!(answer, Err(Error::Busy))).count(), 1);
        let answers = inbox.push(Lane::Internal, messages(EXTERNAL + 1), || ());
        assert!(answers.iter().all(Result::is_ok));
    }
}
