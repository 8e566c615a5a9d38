//! The messages that wait to be applied. There is one queue for internal messages, one for those of clients and one for
//! callbacks. In the last two, which are bounded, senders take turns: a message waits for one message of each other sender,
//! however many they have sent.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::oneshot;

use crate::store::{Client, Error, Message, MessageClass, MessageSender, Receipt, ThreadKey};

/// Maximum number of waiting messages of all clients, and of all callbacks. Beyond it, a sender may have one.
const MAX_EXTERNAL: usize = 4096;
/// The same with those of senders that have only one, since anybody may begin many threads.
const MAX_WITH_NEW_SENDERS: usize = 4 * MAX_EXTERNAL;
/// Maximum number of waiting messages of one sender.
const MAX_PER_SENDER: usize = 2048;
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

/// Queues of several senders, which take turns.
struct Turns<K> {
    /// Senders with waiting messages, in the order of their turns.
    order: VecDeque<K>,
    waiting: HashMap<K, VecDeque<Pending>>,
    count: usize,
}

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Turns { order: VecDeque::new(), waiting: HashMap::new(), count: 0 }
    }
}

impl<K: Copy + Eq + Hash> Turns<K> {
    fn is_full(&self, sender: K) -> bool {
        let own = self.waiting.get(&sender).map_or(0, VecDeque::len);
        own >= MAX_PER_SENDER || self.count >= if own > 0 { MAX_EXTERNAL } else { MAX_WITH_NEW_SENDERS }
    }

    fn push(&mut self, sender: K, pending: Pending) {
        let own = self.waiting.entry(sender).or_default();
        if own.is_empty() {
            self.order.push_back(sender);
        }
        own.push_back(pending);
        self.count += 1;
    }

    fn pop(&mut self) -> Option<Pending> {
        let sender = self.order.pop_front()?;
        let own = self.waiting.get_mut(&sender).expect("bug: a sender with a turn has messages");
        let pending = own.pop_front();
        if own.is_empty() {
            self.waiting.remove(&sender);
        } else {
            self.order.push_back(sender);
        }
        self.count -= 1;
        pending
    }
}

/// Messages of clients and callbacks, which take turns.
#[derive(Default)]
struct External {
    clients: Turns<Client>,
    tools: Turns<ThreadKey>,
    /// True if a callback is next.
    tools_next: bool,
}

impl External {
    /// Adds a message. Refuses it if there is no room.
    fn push(&mut self, sender: MessageSender, pending: Pending) -> Result<(), Error> {
        match sender {
            MessageSender::Client(client) if self.clients.is_full(client) => return Err(Error::Busy),
            MessageSender::Tools(thread) if self.tools.is_full(thread) => return Err(Error::Busy),
            MessageSender::Client(client) => self.clients.push(client, pending),
            MessageSender::Tools(thread) => self.tools.push(thread, pending),
        }
        Ok(())
    }

    fn pop(&mut self) -> Option<Pending> {
        let tools_first = self.tools_next;
        self.tools_next = !tools_first;
        match tools_first {
            true => self.tools.pop().or_else(|| self.clients.pop()),
            false => self.clients.pop().or_else(|| self.tools.pop()),
        }
    }

    fn len(&self) -> usize {
        self.clients.count + self.tools.count
    }
}

#[derive(Default)]
struct Queues {
    internal: VecDeque<Pending>,
    external: External,
    in_a_row: usize,
    /// True if a writer job is scheduled that will take the waiting messages.
    scheduled: bool,
}

impl Queues {
    fn pop(&mut self) -> Option<Pending> {
        if self.in_a_row >= INTERNAL_IN_A_ROW || self.internal.is_empty() {
            self.in_a_row = 0;
            return self.external.pop().or_else(|| self.internal.pop_front());
        }
        self.in_a_row += 1;
        self.internal.pop_front()
    }

    fn is_empty(&self) -> bool {
        self.internal.is_empty() && self.external.len() == 0
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
            let (reply, receiver) = oneshot::channel();
            let pending = Pending { message, reply, since };
            let queued = match class {
                MessageClass::Internal => {
                    queues.internal.push_back(pending);
                    Ok(())
                }
                MessageClass::External(sender) => queues.external.push(sender, pending),
            };
            replies.push(queued.map(|()| receiver));
        }
        let any_waiting = !queues.is_empty();
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
        let more = !queues.is_empty();
        queues.scheduled = more;
        (taken, more)
    }

    /// Refuses all waiting messages.
    pub(super) fn refuse_all(&self, error: impl Fn() -> Error) {
        let left = {
            let mut queues = self.queues();
            queues.scheduled = false;
            std::iter::from_fn(|| queues.pop()).collect::<Vec<_>>()
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

    fn client(number: usize) -> MessageClass {
        MessageClass::External(MessageSender::Client(Client::Configured(number)))
    }

    fn tools(thread: i64) -> MessageClass {
        MessageClass::External(MessageSender::Tools(ThreadKey::new(thread)))
    }

    #[test]
    fn a_flood_of_internal_messages_does_not_starve_external_ones() {
        let queue = MessageQueue::default();
        queue.push(MessageClass::Internal, messages(3 * INTERNAL_IN_A_ROW), || ());
        queue.push(MessageClass::OF_A_CLIENT, messages(1), || panic!("a writer job is scheduled already"));
        let (taken, more) = queue.take(INTERNAL_IN_A_ROW + 1);
        assert_eq!((taken.len(), more), (INTERNAL_IN_A_ROW + 1, true));
        assert_eq!(queue.waiting(), (2 * INTERNAL_IN_A_ROW, 0));
    }

    #[test]
    fn the_queue_of_a_sender_is_bounded_and_the_internal_one_is_not() {
        let queue = MessageQueue::default();
        let refused = |class, count| {
            let replies = queue.push(class, messages(count), || ());
            replies.iter().filter(|reply| matches!(reply, Err(Error::Busy))).count()
        };
        assert_eq!(refused(MessageClass::OF_A_CLIENT, MAX_PER_SENDER + 1), 1);
        assert_eq!(refused(MessageClass::Internal, MAX_EXTERNAL + 1), 0);
        assert_eq!(refused(client(1), MAX_PER_SENDER), 0);
        assert_eq!(
            refused(client(2), 3),
            2,
            "all clients together have a bound, but each may send something"
        );
        assert_eq!(refused(tools(1), 3), 0, "callbacks have a bound of their own");
    }

    #[test]
    fn senders_take_turns_however_much_each_has_sent() {
        let queue = MessageQueue::default();
        let senders = [client(1), tools(1), tools(2)];
        for sender in senders {
            queue.push(sender, messages(100), || ());
        }
        let mut replies = queue.push(client(2), messages(2), || ());
        // Two clients have a turn each, between two callbacks.
        queue.take(8).0.into_iter().for_each(|pending| drop(pending.reply.send(Err(Error::Closed))));
        for reply in &mut replies {
            assert!(reply.as_mut().unwrap().try_recv().is_ok());
        }
        assert_eq!(queue.waiting(), (0, 3 * 100 + 2 - 8));
        assert_eq!(queue.take(1000).0.len(), 3 * 100 + 2 - 8);
        assert!(queue.queues().external.clients.waiting.is_empty(), "senders without messages are forgotten");
    }
}
