//! Execution of work: load it, make one attempt, record the outcome. The same code serves model requests, invocations,
//! users' answers and status checks.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use rap_agent::{Ignored, Input};
use rap_protocol::Timestamp;
use tokio_util::sync::CancellationToken;

use super::dispatch::Next;
use super::{Engine, STORE_PAUSE};
use crate::store::{self, Message, SessionKey, Target, Thread, Work, WorkKey, WorkKind, WorkQueue};

/// Time after which work that cannot be read is retried.
const UNREADABLE_PAUSE: Duration = Duration::from_secs(600);

/// Outcome of an attempt.
pub(super) enum WorkOutcome {
    /// The work is finished or no longer needed.
    Done,
    /// The tool server has accepted the invocation.
    Accepted,
    /// The model answered, or the work failed. The message is applied to the thread.
    Apply(Box<Message>),
    /// A user's answer was delivered. If it cannot be, `failed` settles its call with an error.
    AnswerEnded { failed: Option<Input>, attempts: u32 },
    /// The attempt failed and is repeated at `at`.
    Retry { at: Timestamp, attempts: u32, outcome: String },
    /// The store failed. The work is still stored and due.
    StoreFailed(store::Error),
}

impl Engine {
    /// Submits new work of a step. It starts at once if its destination has a free slot, and is queued otherwise.
    pub(super) fn offer(
        self: &Arc<Self>,
        queue: WorkQueue,
        thread: &Thread,
        key: WorkKey,
        work: Option<Work>,
    ) {
        match self.dispatcher.offer(&queue, thread.session, key.clone()) {
            Some(cancelled) => self.spawn_work(queue, thread.session, key, cancelled, work),
            None => self.fill_slots(&queue),
        }
    }

    fn spawn_work(
        self: &Arc<Self>,
        queue: WorkQueue,
        session: SessionKey,
        key: WorkKey,
        cancelled: CancellationToken,
        work: Option<Work>,
    ) {
        let engine = Arc::clone(self);
        self.spawn(async move { engine.run_work(queue, session, key, cancelled, work).await });
    }

    /// Starts work of a queue while it has free slots.
    pub(super) fn fill_slots(self: &Arc<Self>, queue: &WorkQueue) {
        while !self.stop.is_cancelled() {
            match self.dispatcher.next(queue, self.now()) {
                Next::Start(session, key, cancelled) => {
                    self.spawn_work(queue.clone(), session, key, cancelled, None);
                }
                Next::Nothing => return,
                Next::Read(page) => {
                    let (engine, queue) = (Arc::clone(self), queue.clone());
                    return self.spawn(async move {
                        match engine.store.due_work(&queue, page.clone()).await {
                            Ok(found) => engine.dispatcher.page_read(&queue, &page, found),
                            Err(store::Error::Closed) => return,
                            Err(error) => {
                                tracing::warn!(why = error.with_sources(), "due work could not be read");
                                engine.dispatcher.read_failed(&queue);
                                engine.pause_for_store().await;
                            }
                        }
                        engine.fill_slots(&queue);
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
        session: SessionKey,
        key: WorkKey,
        cancelled: CancellationToken,
        work: Option<Work>,
    ) {
        let attempt = AssertUnwindSafe(self.attempt(&key, &cancelled, work)).catch_unwind();
        let outcome = attempt.await.unwrap_or_else(|_| {
            tracing::error!(?key, "an attempt panicked");
            self.retry_later("an internal error".into())
        });
        // The slot is released after the outcome is stored. This limits the outcomes that wait for an unavailable
        // store.
        self.finish(&queue, &key, outcome).await;
        self.dispatcher.release(&queue, session);
        self.fill_slots(&queue);
    }

    /// Postpones work that cannot be done now, so that it does not block the work after it.
    fn retry_later(&self, outcome: String) -> WorkOutcome {
        WorkOutcome::Retry { at: self.now().plus(UNREADABLE_PAUSE), attempts: 1, outcome }
    }

    async fn attempt(
        self: &Arc<Self>,
        key: &WorkKey,
        cancelled: &CancellationToken,
        work: Option<Work>,
    ) -> WorkOutcome {
        let work = match work {
            Some(work) => work,
            // The work was queued a while ago and may be done or cancelled by now.
            None => match self.store.load_work(key, self.now()).await {
                Ok(Some(work)) => work,
                Ok(None) => return WorkOutcome::Done,
                Err(error @ (store::Error::Unreadable(_) | store::Error::Disabled)) => {
                    tracing::error!(?key, why = error.with_sources(), "stored work cannot be loaded");
                    return self.retry_later(error.to_string());
                }
                Err(error) => return WorkOutcome::StoreFailed(error),
            },
        };
        if self.stop.is_cancelled() || cancelled.is_cancelled() {
            return WorkOutcome::Done;
        }
        match work {
            Work::Ask(work) => tokio::select! {
                biased;
                () = cancelled.cancelled() => WorkOutcome::Done,
                () = self.stop.cancelled() => WorkOutcome::Done,
                outcome = self.ask(&work) => outcome,
            },
            Work::Invoke(work) => self.invoke(&work, cancelled).await,
            Work::Answer(work) => self.deliver_answer(&work).await,
            Work::Check(work) => self.check(&work).await,
        }
    }

    async fn finish(self: &Arc<Self>, queue: &WorkQueue, key: &WorkKey, outcome: WorkOutcome) {
        match outcome {
            WorkOutcome::Done => {}
            WorkOutcome::Accepted => {
                if let WorkKey::Invoke { thread, call } = key
                    && self.dispatcher.accept(*thread, call)
                {
                    self.record_due.notify_one();
                }
                // The work stays in progress until the acceptance is stored.
                return;
            }
            WorkOutcome::Apply(message) => {
                if let Err(error) = self.apply_outcome(*message).await {
                    tracing::error!(
                        ?key,
                        why = error.with_sources(),
                        "the outcome of an attempt cannot be applied"
                    );
                    return Box::pin(self.finish(queue, key, self.retry_later(error.to_string()))).await;
                }
            }
            WorkOutcome::AnswerEnded { failed, attempts } => {
                if let (Some(input), WorkKey::Answer { thread, .. }) = (failed, key) {
                    // The call is settled before the answer is removed. In the other order, a crash in between would
                    // leave the call open without an answer.
                    let applied = self.apply_outcome(Message::new(Target::Key(*thread), input)).await;
                    if let Err(error) = applied {
                        return Box::pin(self.finish(queue, key, self.retry_later(error.to_string()))).await;
                    }
                }
                if let Err(error) = self.store.answer_delivered(key, attempts).await {
                    tracing::warn!(why = error.with_sources(), "a delivered answer could not be recorded");
                    self.pause_for_store().await;
                }
            }
            WorkOutcome::Retry { at, attempts, outcome } => {
                match self.store.postpone(key, at, attempts, outcome).await {
                    Ok(()) => self.wake_clock_by(at),
                    Err(error) => {
                        tracing::warn!(why = error.with_sources(), "an attempt could not be recorded");
                        return self.recheck_after_pause(queue.clone(), key.clone());
                    }
                }
            }
            WorkOutcome::StoreFailed(error) => {
                tracing::warn!(why = error.with_sources(), "the store is unavailable; the work is retried");
                return self.recheck_after_pause(queue.clone(), key.clone());
            }
        }
        self.dispatcher.end(key);
    }

    /// Checks the queue again after a pause, because nothing else would announce this stored and due work. Until then
    /// the work counts as in progress.
    fn recheck_after_pause(self: &Arc<Self>, queue: WorkQueue, key: WorkKey) {
        let engine = Arc::clone(self);
        self.spawn(async move {
            engine.pause_for_store().await;
            engine.dispatcher.end(&key);
            engine.dispatcher.check_store(&queue);
            engine.fill_slots(&queue);
        });
    }

    /// Applies an outcome, and retries until it is stored or ignored. If the turn is stale, only the token usage of the
    /// answer is recorded. Returns an error if the thread cannot be changed at all.
    async fn apply_outcome(&self, message: Message) -> Result<(), store::Error> {
        let usage = match &message.input {
            Input::TurnEnded { answer, .. } => Some(answer.usage),
            Input::Summarised { usage, .. } => Some(*usage),
            _ => None,
        };
        let target = message.target.clone();
        match self.apply_message_with_retry(message).await {
            Ok(_) => {}
            Err(store::Error::Ignored(Ignored::StaleTurn)) => {
                if let Some(usage) = usage {
                    self.apply_message_with_retry(Message::new(target, Input::UnusedAnswer(usage)))
                        .await
                        .ok();
                }
            }
            Err(error @ (store::Error::Disabled | store::Error::Unreadable(_))) => return Err(error),
            Err(error) => tracing::debug!(%error, "the outcome of an attempt was ignored"),
        }
        Ok(())
    }

    /// Starts the work that an earlier process left in the store.
    pub(super) async fn resume_work(self: Arc<Self>) {
        for kind in [WorkKind::Ask, WorkKind::Invoke, WorkKind::Answer] {
            let destinations = loop {
                match self.store.destinations(kind).await {
                    Ok(destinations) => break destinations,
                    Err(store::Error::Closed) => return,
                    Err(error) => {
                        tracing::warn!(
                            why = error.with_sources(),
                            "work of an earlier process could not be read"
                        );
                        self.pause_for_store().await;
                    }
                }
                if self.stop.is_cancelled() {
                    return;
                }
            };
            for destination in destinations {
                let queue = WorkQueue { kind, destination };
                self.dispatcher.check_store(&queue);
                self.fill_slots(&queue);
            }
        }
        for server in &self.settings.tool_servers {
            let queue = WorkQueue { kind: WorkKind::Check, destination: server.url.clone() };
            self.dispatcher.check_store(&queue);
            self.fill_slots(&queue);
        }
    }
}
