//! Applying messages: the part that every database shares. It is pure.
//!
//! A batch runs in rounds. A round has at most one message of each thread: heads and facts are loaded, steps are made in
//! memory, and all of it is written. So the second message of a thread sees what the first one did.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use rap_agent::{Facts, Head, Input, Limits, Spending, Step, Write, step};
use rap_protocol::Timestamp;

use super::{Error, Once, Receipt, SessionKey, Target, Thread};

/// A thread as it is stored, or as it is about to be stored for the first time.
#[derive(Debug, Clone)]
pub(crate) struct Loaded {
    pub(crate) thread: Arc<Thread>,
    pub(crate) head: Head,
    /// The version of the head; 0 if the thread is not stored yet.
    pub(crate) version: i64,
}

/// A step that has to be written.
pub(crate) struct Stepped {
    pub(crate) loaded: Loaded,
    pub(crate) step: Step,
    pub(crate) now: Timestamp,
}

/// Facts that threads share. They are loaded once for a batch, passed from step to step, and written at its end.
#[derive(Default)]
pub(crate) struct SharedFacts {
    spending: BTreeMap<SessionKey, (Spending, Saved)>,
    once: HashMap<[u8; 32], ([u8; 32], Receipt)>,
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

    pub(crate) fn loaded_spending(&mut self, session: SessionKey, spending: Spending) {
        self.spending.insert(session, (spending, Saved::Yes));
    }

    /// What has to be written at the end of the batch, in the order of the sessions.
    pub(crate) fn changed_spending(&self) -> impl Iterator<Item = (SessionKey, &Spending)> {
        let changed = self.spending.iter().filter(|(_, (_, saved))| *saved == Saved::No);
        changed.map(|(session, (spending, _))| (*session, spending))
    }

    /// The receipt of an earlier request with the same key.
    pub(crate) fn repeated(&self, once: &Once) -> Option<Result<Receipt, Error>> {
        self.once.get(&once.key).map(|(request, receipt)| same_request(once, request, receipt.clone()))
    }

    pub(crate) fn remember(&mut self, once: &Once, receipt: &Receipt) {
        self.once.insert(once.key, (once.request, receipt.clone()));
    }

    /// Takes the shared facts out of a step.
    pub(crate) fn after(&mut self, session: SessionKey, step: &Step) {
        for write in &step.writes {
            if let Write::Spending(spending) = write {
                self.spending.insert(session, (*spending, Saved::No));
            }
        }
    }
}

/// The answer to a request whose key was used before.
pub(crate) fn same_request(once: &Once, request: &[u8], receipt: Receipt) -> Result<Receipt, Error> {
    if once.request == request { Ok(receipt) } else { Err(Error::KeyReused) }
}

/// Distributes messages to rounds: the n-th message of each thread is in round n.
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

/// Whether a loaded thread is the one that is meant.
pub(crate) fn check_target(target: &Target, thread: &Thread) -> Result<(), Error> {
    match target {
        Target::Token { incarnation, .. } if thread.incarnation != *incarnation => Err(Error::NoThread),
        Target::Token { id, .. } if thread.id != *id => Err(Error::WrongThread),
        Target::Id(id) if thread.id != *id => Err(Error::NoThread),
        _ => Ok(()),
    }
}

/// Makes a step. A panic fails this one message.
pub(crate) fn step_one(
    loaded: Loaded,
    input: Input,
    facts: Facts,
    now: Timestamp,
    limits: &Limits,
) -> Result<Stepped, (Box<Loaded>, Error)> {
    let head = loaded.head.clone();
    #[cfg(test)]
    let fault = matches!(&input, Input::UserMessage { text, .. } if text == PANIC);
    let stepped = catch_unwind(AssertUnwindSafe(|| {
        #[cfg(test)]
        assert!(!fault, "as the test wanted");
        step(head, input, facts, now, limits)
    }));
    match stepped {
        Ok(Ok(step)) => Ok(Stepped { loaded, step, now }),
        Ok(Err(ignored)) => Err((loaded.into(), ignored.into())),
        Err(_panic) => {
            tracing::error!(thread = %loaded.thread.id, "a step panicked; its thread is set aside until the next start");
            Err((loaded.into(), Error::SetAside))
        }
    }
}

/// A message with this text makes its step panic in tests.
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
