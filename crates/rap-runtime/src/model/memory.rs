//! Memory for the answers of all models.
//!
//! An answer takes memory while it arrives, and keeps it until it is applied. The first part of each answer is free, so
//! ordinary answers need none. The answers of one server can have half of the memory. When there is none left, an answer
//! waits for the permission to continue without, which one answer has at a time. That one needs nothing else, and ends
//! within `limits.model_timeout`. So answers cannot wait for each other for ever, although each keeps what it has.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::memory::{Grant, Memory};

/// Size up to which an answer needs no memory, in bytes.
const FREE: usize = 256 * 1024;
/// Maximum size of an answer in memory, in bytes.
pub(super) const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// Memory for the answers of all models.
pub(crate) struct ModelMemory {
    /// Users are the servers of models.
    memory: Memory<String>,
    /// Permission to continue without memory.
    last: Arc<Semaphore>,
}

/// Memory of one answer. It is given back when all clones are dropped. The default has no bound.
#[derive(Clone, Default)]
pub struct AnswerMemory(Option<Arc<Answer>>);

struct Answer {
    all: Arc<ModelMemory>,
    server: String,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    grant: Option<Grant<String>>,
    last: Option<OwnedSemaphorePermit>,
}

impl fmt::Debug for AnswerMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnswerMemory").finish_non_exhaustive()
    }
}

impl ModelMemory {
    pub(crate) fn new(bytes: usize) -> Arc<ModelMemory> {
        let last = Arc::new(Semaphore::new(1));
        Arc::new(ModelMemory { memory: Memory::new(bytes, bytes.div_ceil(2)), last })
    }

    /// Returns the memory of an answer of a server.
    pub(crate) fn of(self: &Arc<Self>, server: &str) -> AnswerMemory {
        let (all, server) = (Arc::clone(self), server.to_owned());
        AnswerMemory(Some(Arc::new(Answer { all, server, held: Mutex::default() })))
    }
}

impl AnswerMemory {
    /// Waits until the answer may use this many bytes in total.
    pub(super) async fn hold(&self, bytes: usize) {
        let Some(answer) = self.0.as_deref().filter(|answer| !answer.take(bytes)) else { return };
        let last = Arc::clone(&answer.all.last).acquire_owned().await;
        answer.held().last = Some(last.expect("bug: this semaphore is never closed"));
    }
}

impl Answer {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns false if there is not enough memory.
    fn take(&self, bytes: usize) -> bool {
        let mut held = self.held();
        let has = held.grant.as_ref().map_or(FREE, |grant| FREE + grant.bytes());
        if bytes <= has || held.last.is_some() {
            return true;
        }
        // Larger parts than are needed, so that a long answer does not ask for each of its bytes.
        let Ok(more) = self.all.memory.take(self.server.clone(), (bytes - has).next_multiple_of(FREE)) else {
            return false;
        };
        match &mut held.grant {
            Some(grant) => grant.merge(more),
            None => held.grant = Some(more),
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    const MIB: usize = 1024 * 1024;

    #[test]
    fn small_answers_need_no_memory_and_large_ones_give_theirs_back() {
        let all = ModelMemory::new(4 * MIB);
        let small: Vec<AnswerMemory> = (0..100).map(|_| all.of("a")).collect();
        assert!(small.iter().all(|answer| answer.hold(FREE).now_or_never().is_some()));
        let large = all.of("a");
        assert!(large.hold(FREE + 1).now_or_never().is_some());
        assert_eq!(all.memory.left(), 4 * MIB - FREE);
        assert!(large.hold(2 * MIB).now_or_never().is_some());
        let engine = large.clone();
        drop(large);
        assert_eq!(all.memory.left(), 4 * MIB - (2 * MIB - FREE), "it is not applied yet");
        drop(engine);
        assert_eq!(all.memory.left(), 4 * MIB);
    }

    /// Two answers that keep memory and need more would otherwise wait for each other.
    #[tokio::test]
    async fn answers_that_keep_memory_while_they_wait_end_one_after_the_other() {
        let all = ModelMemory::new(4 * MIB);
        let answers: Vec<AnswerMemory> = (0..3).map(|_| all.of("a")).collect();
        let mut waiting = Vec::new();
        for answer in answers {
            assert!(answer.hold(MIB / 2).now_or_never().is_some());
            waiting.push(async move {
                for bytes in (MIB..=MAX_ANSWER).step_by(MIB) {
                    answer.hold(bytes).await;
                    tokio::task::yield_now().await;
                }
            });
        }
        let beside = all.of("b");
        let all_end = futures_util::future::join_all(waiting);
        tokio::pin!(all_end);
        assert!(all_end.as_mut().now_or_never().is_none());
        assert!(beside.hold(MIB).now_or_never().is_some(), "another server has its own half");
        all_end.await;
        drop(beside);
        assert_eq!((all.memory.left(), all.last.available_permits()), (4 * MIB, 1));
    }

    #[tokio::test]
    async fn an_answer_that_is_abandoned_while_it_waits_blocks_nobody() {
        let all = ModelMemory::new(MIB);
        let (first, second, third) = (all.of("a"), all.of("a"), all.of("a"));
        first.hold(MAX_ANSWER).await;
        assert!(second.hold(MAX_ANSWER).now_or_never().is_none());
        assert!(third.hold(MAX_ANSWER).now_or_never().is_none());
        drop((first, second));
        assert!(third.hold(MAX_ANSWER).now_or_never().is_some());
    }
}
