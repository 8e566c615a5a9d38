//! Memory for the requests to all models, and for their answers.
//!
//! A large request takes memory until it is sent. If there is not enough, it waits, and holds nothing meanwhile.
//!
//! An answer takes memory while it arrives, and keeps it until it is applied. The first part of each answer is free, so
//! ordinary answers need none. The answers of one server can have half of the memory. When there is none left, an answer
//! waits for the permission to continue without, which one answer has at a time. That one needs nothing else, and ends
//! within `limits.model_timeout`. So answers cannot wait for each other for ever, although each keeps what it has.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fmt, io};

use rap_agent::Entry;
use rap_io::hashing::{LONG, in_place};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::memory::{Grant, Memory};

/// Size up to which an answer needs no memory, in bytes.
const FREE: usize = 256 * 1024;
/// Number of times that a request is in memory while it is built: as entries, as JSON value, and as bytes.
const COPIES: usize = 3;
/// Pause between two attempts to take memory for a request.
const PAUSE: Duration = Duration::from_millis(50);
/// Maximum size of an answer in memory, in bytes.
pub(super) const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// Memory for the requests to all models, and for their answers.
pub(crate) struct ModelMemory {
    /// Users are the servers of models.
    memory: Memory<String>,
    /// Maximum memory of the requests and answers of one server.
    share: usize,
    /// Permission to continue without memory.
    last: Arc<Semaphore>,
}

/// Memory of one request and its answer. It is given back when all clones are dropped. The default has no bound.
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
    request: Option<Grant<String>>,
    last: Option<OwnedSemaphorePermit>,
}

impl fmt::Debug for AnswerMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnswerMemory").finish_non_exhaustive()
    }
}

impl ModelMemory {
    pub(crate) fn new(bytes: usize) -> Arc<ModelMemory> {
        let (share, last) = (bytes.div_ceil(2), Arc::new(Semaphore::new(1)));
        Arc::new(ModelMemory { memory: Memory::new(bytes, share), share, last })
    }

    /// Returns the memory of an answer of a server.
    pub(crate) fn of(self: &Arc<Self>, server: &str) -> AnswerMemory {
        let (all, server) = (Arc::clone(self), server.to_owned());
        AnswerMemory(Some(Arc::new(Answer { all, server, held: Mutex::default() })))
    }
}

impl AnswerMemory {
    /// Takes memory for a request whose entries have this size. Returns false if there is not enough.
    pub(crate) fn take_for_request(&self, bytes: usize) -> bool {
        self.0.as_deref().is_none_or(|answer| answer.take_for_request(bytes))
    }

    /// Waits for memory for a request whose entries have this size.
    pub(crate) async fn wait_for_request(&self, bytes: usize) {
        while !self.take_for_request(bytes) {
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Gives back all but this many bytes of a request.
    pub(super) fn built(&self, bytes: usize) {
        let Some(answer) = self.0.as_deref() else { return };
        if let Some(request) = &mut answer.held().request {
            request.shrink(bytes);
        }
    }

    /// Gives back the memory of a request that was sent.
    pub(super) fn sent(&self) {
        if let Some(answer) = self.0.as_deref() {
            answer.held().request = None;
        }
    }

    /// Waits until the answer may use this many bytes in total.
    pub(super) async fn hold(&self, bytes: usize) {
        let Some(answer) = self.0.as_deref().filter(|answer| !answer.take(bytes)) else { return };
        let last = Arc::clone(&answer.all.last).acquire_owned().await;
        answer.held().last = Some(last.expect("bug: this semaphore is never closed"));
    }
}

/// Returns the size of entries as JSON, in bytes.
pub(crate) fn size_of(entries: &[Entry]) -> usize {
    let mut short = Size { bytes: 0, max: FREE };
    match serde_json::to_writer(&mut short, entries) {
        Ok(()) => short.bytes,
        Err(_) => in_place(LONG, || {
            let mut size = Size { bytes: 0, max: usize::MAX };
            serde_json::to_writer(&mut size, entries).map_or(usize::MAX, |()| size.bytes)
        }),
    }
}

/// Counts what is written, and fails when that is more than `max`.
struct Size {
    bytes: usize,
    max: usize,
}

impl io::Write for Size {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        self.bytes = self.bytes.saturating_add(part.len());
        if self.bytes > self.max { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(part.len()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Answer {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_for_request(&self, bytes: usize) -> bool {
        if bytes <= FREE {
            return true;
        }
        // A request that is larger than the share of a server takes all of it.
        let bytes = bytes.saturating_mul(COPIES).min(self.all.share);
        let taken = self.all.memory.take(self.server.clone(), bytes).ok();
        let is_taken = taken.is_some();
        self.held().request = taken;
        is_taken
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
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::FutureExt;
    use rap_agent::Item;
    use rap_io::client::{Client, ClientLimits};
    use rap_protocol::{Timestamp, UrlPolicy};
    use rap_testkit::peer::{Reply, serve};
    use rap_testkit::until;
    use serde_json::json;
    use url::Url;

    use super::*;
    use crate::model::openai::{OpenAi, Settings};
    use crate::model::{Model, ModelRequest, Spent};

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

    #[tokio::test(start_paused = true)]
    async fn a_large_request_waits_until_others_are_sent() {
        let all = ModelMemory::new(8 * MIB);
        let (first, second, small, other) = (all.of("a"), all.of("a"), all.of("a"), all.of("b"));
        let entries = [Entry { at: Timestamp(0), item: Item::user("x".repeat(MIB)) }];
        assert_eq!(size_of(&entries), serde_json::to_vec(&entries).unwrap().len());
        assert_eq!(size_of(&[]), 2);
        assert!(first.take_for_request(MIB));
        assert_eq!(all.memory.left(), 5 * MIB);
        assert!(!second.take_for_request(MIB));
        assert!(small.take_for_request(FREE) && other.take_for_request(MIB));
        first.built(MIB + 1);
        assert_eq!(all.memory.used_by(&"a".to_owned()), MIB + 1);
        let mut waiting = Box::pin(second.wait_for_request(100 * MIB));
        assert!(waiting.as_mut().now_or_never().is_none());
        first.sent();
        assert_eq!(all.memory.used_by(&"a".to_owned()), 0);
        waiting.await;
        assert_eq!(all.memory.used_by(&"a".to_owned()), 4 * MIB, "it is larger than all that it can have");
        drop((second, other));
        assert_eq!(all.memory.left(), 8 * MIB);
    }

    /// Returns a model whose server begins each answer with this text, and never ends it.
    async fn model_that_says(text: &str) -> Arc<OpenAi> {
        let delta = json!({"choices": [{"index": 0, "delta": {"content": text}}]});
        let begun = format!("data: {delta}\n\n").repeat(30);
        let url = serve(move |_| std::future::ready(Reply::Begin(begun.clone().into()))).await;
        let client = Client::new(UrlPolicy::Loopback, ClientLimits::default());
        let (base_url, name) = (Url::parse(&url).unwrap(), "m".to_owned());
        let settings = Settings { base_url, name, api_key: None, call_ids: None, prices: None };
        Arc::new(OpenAi::new(client, settings).unwrap())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn beyond_the_common_memory_one_answer_is_read_at_a_time() {
        const TEXT: usize = 100_000;
        const WHOLE: usize = 30 * TEXT;
        let (all, model) = (ModelMemory::new(MIB), model_that_says(&"x".repeat(TEXT)).await);
        let received: Arc<[AtomicUsize; 3]> = Arc::default();
        let mut answers = Vec::new();
        for index in 0..received.len() {
            let (memory, model, received) = (all.of("m"), Arc::clone(&model), Arc::clone(&received));
            let (system, entries, tools, spent) = (String::new(), Vec::new(), Arc::new([]), Spent::default());
            let request = ModelRequest { system, entries, tools, turn: 1, images: false, spent, memory };
            answers.push(tokio::spawn(async move {
                let mut count = |text: &str| {
                    received[index].fetch_add(text.len(), Ordering::SeqCst);
                };
                model.ask(request, &mut count).await
            }));
        }
        let whole = || received.iter().position(|bytes| bytes.load(Ordering::SeqCst) == WHOLE);
        until("an answer is received", async || whole().is_some()).await;
        // Time in which the others would be received, too, if nothing held them.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let bytes: Vec<usize> = received.iter().map(|bytes| bytes.load(Ordering::SeqCst)).collect();
        assert_eq!(bytes.iter().filter(|bytes| **bytes > WHOLE / 2).count(), 1, "{bytes:?}");
        let first = whole().unwrap();
        received[first].store(0, Ordering::SeqCst);
        answers[first].abort();
        until("another answer is received", async || whole().is_some()).await;
        answers.iter().for_each(tokio::task::JoinHandle::abort);
    }
}
