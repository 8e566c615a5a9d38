//! The part of applying messages that every database shares. It does no IO.
//!
//! A batch is applied in rounds. A round has at most one message for each thread: heads and facts are loaded, steps are
//! computed in memory, and all of them are written. So the second message for a thread sees the result of the first.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use rap_agent::{Facts, Head, Input, Limits, Spending, Step, Write, step};
use rap_protocol::Timestamp;

use super::{Error, IdempotencyKey, Receipt, SessionKey, Target, Thread};

/// A thread that was loaded, or that is about to be stored for the first time.
#[derive(Debug, Clone)]
pub(crate) struct Loaded {
    pub(crate) thread: Arc<Thread>,
    pub(crate) head: Head,
    /// The version of the head; 0 if the thread is not stored yet.
    pub(crate) version: i64,
}

/// A step that is not written yet.
pub(crate) struct Stepped {
    pub(crate) loaded: Loaded,
    pub(crate) step: Step,
    pub(crate) now: Timestamp,
}

/// Facts that several threads share. They are loaded once for a batch, passed from step to step, and written at the end
/// of the batch.
#[derive(Default)]
pub(crate) struct SharedFacts {
    spending: BTreeMap<SessionKey, (Spending, Saved)>,
    receipts: HashMap<[u8; 32], ([u8; 32], Receipt)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Saved {
    Yes,
    No,
}

impl SharedFacts {
    pub(crate) fn spending(&self, session: SessionKey) -> Option<Spending> {
        self.spending.get(&session).map(|(spending, _)| *spending)
    }

    pub(crate) fn set_loaded_spending(&mut self, session: SessionKey, spending: Spending) {
        self.spending.insert(session, (spending, Saved::Yes));
    }

    /// Returns the spending to write at the end of the batch, ordered by session.
    pub(crate) fn changed_spending(&self) -> impl Iterator<Item = (SessionKey, &Spending)> {
        let changed = self.spending.iter().filter(|(_, (_, saved))| *saved == Saved::No);
        changed.map(|(session, (spending, _))| (*session, spending))
    }

    /// Returns the reply to a request whose key was used earlier in this batch.
    pub(crate) fn repeated(&self, key: &IdempotencyKey) -> Option<Result<Receipt, Error>> {
        self.receipts.get(&key.key).map(|(request, receipt)| same_request(key, request, receipt.clone()))
    }

    pub(crate) fn remember(&mut self, key: &IdempotencyKey, receipt: &Receipt) {
        self.receipts.insert(key.key, (key.request, receipt.clone()));
    }

    /// Updates the shared facts from the writes of a step.
    pub(crate) fn record_step(&mut self, session: SessionKey, step: &Step) {
        for write in &step.writes {
            if let Write::Spending(spending) = write {
                self.spending.insert(session, (*spending, Saved::No));
            }
        }
    }
}

/// Returns the reply to a request whose key was used before: the receipt of the same request, or an error if the
/// request is a different one.
pub(crate) fn same_request(key: &IdempotencyKey, request: &[u8], receipt: Receipt) -> Result<Receipt, Error> {
    if key.request == request { Ok(receipt) } else { Err(Error::KeyReused) }
}

/// Distributes messages over rounds: the n-th message for each thread is in round n.
pub(crate) fn rounds<K: Eq + Hash>(threads: Vec<K>) -> Vec<Vec<usize>> {
    let mut counts: HashMap<K, usize> = HashMap::new();
    let mut rounds: Vec<Vec<usize>> = Vec::new();
    for (at, thread) in threads.into_iter().enumerate() {
        let round = counts.entry(thread).or_default();
        if rounds.len() == *round {
            rounds.push(Vec::new());
        }
        rounds[*round].push(at);
        *round += 1;
    }
    rounds
}

/// Checks that a loaded thread is the one that the target identifies.
pub(crate) fn check_target(target: &Target, thread: &Thread) -> Result<(), Error> {
    match target {
        Target::Token { incarnation, .. } if thread.incarnation != *incarnation => Err(Error::NoThread),
        Target::Token { id, .. } if thread.id != *id => Err(Error::WrongThread),
        Target::Id(id) if thread.id != *id => Err(Error::NoThread),
        _ => Ok(()),
    }
}

/// Computes the step of one message. A panic fails only this message.
pub(crate) fn step_one(
    loaded: Loaded,
    input: Input,
    facts: Facts,
    now: Timestamp,
    limits: &Limits,
) -> Result<Stepped, (Box<Loaded>, Error)> {
    let head = loaded.head.clone();
    #[cfg(test)]
    let fault = matches!(&input, Input::UserMessage { message, .. } if message.text == PANIC);
    let stepped = catch_unwind(AssertUnwindSafe(|| {
        #[cfg(test)]
        assert!(!fault, "the test asked for a panic");
        step(head, input, facts, now, limits)
    }));
    match stepped {
        Ok(Ok(step)) => Ok(Stepped { loaded, step, now }),
        Ok(Err(ignored)) => Err((loaded.into(), ignored.into())),
        Err(_panic) => {
            tracing::error!(thread = %loaded.thread.id, "a step panicked; its thread is disabled until the runtime restarts");
            Err((loaded.into(), Error::Disabled))
        }
    }
}

/// In tests, a message with this text makes its step panic.
#[cfg(test)]
pub(crate) const PANIC: &str = "panic in this step, please";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_message_of_a_thread_is_in_the_second_round() {
        assert_eq!(rounds(vec!["a", "b", "a", "c", "a", "b"]), [vec![0, 1, 3], vec![2, 5], vec![4]]);
        assert_eq!(rounds::<u8>(Vec::new()), Vec::<Vec<usize>>::new());
    }
}
