//! Running work: load it, attempt it, settle it. The same for questions, invocations, answers and checks.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use rap_agent::{Ignored, Input};
use rap_protocol::Timestamp;
use tokio_util::sync::CancellationToken;

use super::dispatch::Next;
use super::{Engine, STORE_PAUSE};
use crate::store::{self, Message, Target, Thread, Work, WorkKey, WorkKind, WorkQueue};

/// Work that cannot be read is looked at again after this time.
const UNREADABLE_PAUSE: Duration = Duration::from_secs(600);

/// How an attempt ended.
pub(super) enum Settlement {
    /// Nothing is left to do.
    Done,
    /// A tool server has accepted the invocation.
    Accepted,
    /// The model answered, or the work failed: the thread is told.
    Apply(Box<Message>),
    /// A person's answer was delivered, or its call is told that it cannot be.
    AnswerEnded { failed: Option<Input>, attempts: u32 },
    /// It is tried again.
    Again { at: Timestamp, attempts: u32, outcome: String },
    /// The store did not answer.
    StoreFailed(store::Error),
}

impl Engine {
    /// New work of a step. It begins at once if its destination has a free slot; otherwise it takes its turn.
    pub(super) fn offer(
        self: &Arc<Self>,
        queue: WorkQueue,
        thread: &Thread,
        key: WorkKey,
        work: Option<Work>,
    ) {
        match self.dispatcher.offer(&queue, thread.session, key.clone()) {
            Some(cancelled) => self.begin(queue, key, cancelled, work),
            None => self.pump(&queue),
        }
    }

    fn begin(
        self: &Arc<Self>,
        queue: WorkQueue,
        key: WorkKey,
        cancelled: CancellationToken,
        work: Option<Work>,
    ) {
        let engine = Arc::clone(self);
        self.spawn(async move { engine.run_work(queue, key, cancelled, work).await });
    }

    /// Begins work of a queue while it has free slots.
    pub(super) fn pump(self: &Arc<Self>, queue: &WorkQueue) {
        while !self.stop.is_cancelled() {
            match self.dispatcher.next(queue, self.now()) {
                Next::Start(key, cancelled) => self.begin(queue.clone(), key, cancelled, None),
                Next::Nothing => return,
                Next::Read(page) => {
                    let (engine, queue) = (Arc::clone(self), queue.clone());
                    return self.spawn(async move {
                        match engine.store.due_work(&queue, page.clone()).await {
                            Ok(found) => engine.dispatcher.read(&queue, &page, found),
                            Err(store::Error::Closed) => return,
                            Err(error) => {
                                tracing::warn!(why = error.with_sources(), "due work could not be read");
                                engine.dispatcher.not_read(&queue);
                                engine.pause_for_store().await;
                            }
                        }
                        engine.pump(&queue);
                    });
                }
            }
        }
    }

    pub(super) async fn pause_for_store(&self) {
        tokio::select! {
            biased;
            () = self.stop.cancelled() => {}
            () = tokio::time::sleep(STORE_PAUSE.1) => {}
        }
    }

    async fn run_work(
        self: Arc<Self>,
        queue: WorkQueue,
        key: WorkKey,
        cancelled: CancellationToken,
        work: Option<Work>,
    ) {
        let attempt = AssertUnwindSafe(self.attempt(&key, &cancelled, work)).catch_unwind();
        let settlement = attempt.await.unwrap_or_else(|_| {
            tracing::error!(?key, "an attempt panicked");
            self.later("an internal error".into())
        });
        // The slot is free when the outcome is on disk, so that outcomes that the store does not take are bounded.
        self.settle(&queue, &key, settlement).await;
        self.dispatcher.release(&queue);
        self.pump(&queue);
    }

    /// Work that cannot be done at the moment must not stay in front of the others.
    fn later(&self, outcome: String) -> Settlement {
        Settlement::Again { at: self.now().plus(UNREADABLE_PAUSE), attempts: 1, outcome }
    }

    async fn attempt(
        self: &Arc<Self>,
        key: &WorkKey,
        cancelled: &CancellationToken,
        work: Option<Work>,
    ) -> Settlement {
        let work = match work {
            Some(work) => work,
            // It was read a while ago: it may be done or cancelled since.
            None => match self.store.load_work(key, self.now()).await {
                Ok(Some(work)) => work,
                Ok(None) => return Settlement::Done,
                Err(error @ (store::Error::Unreadable(_) | store::Error::SetAside)) => {
                    tracing::error!(?key, why = error.with_sources(), "work cannot be done");
                    return self.later(error.to_string());
                }
                Err(error) => return Settlement::StoreFailed(error),
            },
        };
        if self.stop.is_cancelled() || cancelled.is_cancelled() {
            return Settlement::Done;
        }
        match work {
            Work::Ask(work) => tokio::select! {
                biased;
                () = cancelled.cancelled() => Settlement::Done,
                () = self.stop.cancelled() => Settlement::Done,
                settlement = self.ask(&work) => settlement,
            },
            Work::Invoke(work) => self.invoke(&work, cancelled).await,
            Work::Answer(work) => self.deliver_answer(&work).await,
            Work::Check(work) => self.check(&work).await,
        }
    }

    async fn settle(self: &Arc<Self>, queue: &WorkQueue, key: &WorkKey, settlement: Settlement) {
        match settlement {
            Settlement::Done => {}
            Settlement::Accepted => {
                if let WorkKey::Invoke { thread, call } = key
                    && self.dispatcher.accept(*thread, call)
                {
                    self.record_due.notify_one();
                }
                // It stays in progress until that is on disk.
                return;
            }
            Settlement::Apply(message) => {
                if let Err(error) = self.apply_settlement(*message).await {
                    tracing::error!(
                        ?key,
                        why = error.with_sources(),
                        "the outcome of work cannot be applied"
                    );
                    return Box::pin(self.settle(queue, key, self.later(error.to_string()))).await;
                }
            }
            Settlement::AnswerEnded { failed, attempts } => {
                if let (Some(input), WorkKey::Answer { thread, .. }) = (failed, key) {
                    // In this order: between the two the answer would be neither due nor failed.
                    let told = self.apply_settlement(Message::new(Target::Key(*thread), input)).await;
                    if let Err(error) = told {
                        return Box::pin(self.settle(queue, key, self.later(error.to_string()))).await;
                    }
                }
                if let Err(error) = self.store.answer_delivered(key, attempts).await {
                    tracing::warn!(why = error.with_sources(), "a delivered answer could not be recorded");
                    self.pause_for_store().await;
                }
            }
            Settlement::Again { at, attempts, outcome } => {
                match self.store.postpone(key, at, attempts, outcome).await {
                    Ok(()) => self.clock_by(at),
                    Err(error) => {
                        tracing::warn!(why = error.with_sources(), "an attempt could not be recorded");
                        return self.look_again_later(queue.clone(), key.clone());
                    }
                }
            }
            Settlement::StoreFailed(error) => {
                tracing::warn!(why = error.with_sources(), "work waits for the store");
                return self.look_again_later(queue.clone(), key.clone());
            }
        }
        self.dispatcher.end(key);
    }

    /// Work is in the store, and due, although nothing will tell so. It counts as in progress until it is looked at again.
    fn look_again_later(self: &Arc<Self>, queue: WorkQueue, key: WorkKey) {
        let engine = Arc::clone(self);
        self.spawn(async move {
            engine.pause_for_store().await;
            engine.dispatcher.end(&key);
            engine.dispatcher.look_in_store(&queue);
            engine.pump(&queue);
        });
    }

    /// An answer is kept until it is on disk, or nobody waits for it any more; then only its cost counts.
    /// Returns an error if the thread cannot take it at all.
    async fn apply_settlement(&self, message: Message) -> Result<(), store::Error> {
        let usage = match &message.input {
            Input::TurnEnded { answer, .. } => Some(answer.usage),
            Input::Summarised { usage, .. } => Some(*usage),
            _ => None,
        };
        let target = message.target.clone();
        match self.insist_on(message).await {
            Ok(_) => {}
            Err(store::Error::Ignored(Ignored::StaleTurn)) => {
                if let Some(usage) = usage {
                    self.insist_on(Message::new(target, Input::Spent(usage))).await.ok();
                }
            }
            Err(error @ (store::Error::SetAside | store::Error::Unreadable(_))) => return Err(error),
            Err(error) => tracing::debug!(%error, "the outcome of work was not taken"),
        }
        Ok(())
    }

    /// Looks for work that was left by an earlier start.
    pub(super) async fn take_up_work(self: Arc<Self>) {
        for kind in [WorkKind::Ask, WorkKind::Invoke, WorkKind::Answer] {
            let destinations = loop {
                match self.store.destinations(kind).await {
                    Ok(destinations) => break destinations,
                    Err(store::Error::Closed) => return,
                    Err(error) => {
                        tracing::warn!(why = error.with_sources(), "work that was left could not be read");
                        self.pause_for_store().await;
                    }
                }
                if self.stop.is_cancelled() {
                    return;
                }
            };
            for destination in destinations {
                let queue = WorkQueue { kind, destination };
                self.dispatcher.look_in_store(&queue);
                self.pump(&queue);
            }
        }
        for server in &self.settings.tool_servers {
            let queue = WorkQueue { kind: WorkKind::Check, destination: server.url.clone() };
            self.dispatcher.look_in_store(&queue);
            self.pump(&queue);
        }
    }
}
