//! Execution of work: load it, make one attempt, record the outcome. The same code serves model requests, invocations,
//! users' answers and status checks.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use rap_agent::{Ignored, Input};
use rap_protocol::Timestamp;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;

use super::ask::UnstoredTokens;
use super::dispatch::Next;
use super::{Engine, STORE_PAUSE};
use crate::model::AnswerMemory;
use crate::store::{
    self, AskWork, Message, SessionKey, Signal, Target, Thread, Work, WorkKey, WorkKind, WorkQueue,
};
use crate::toolsets::AwaitedFetches;

/// Time after which work that cannot be read is retried.
const UNREADABLE_PAUSE: Duration = Duration::from_secs(600);
/// Longest pause before a retry, whatever its reason.
pub(super) const LONGEST_RETRY: Duration = UNREADABLE_PAUSE;

/// Outcome of an attempt.
pub(super) enum WorkOutcome {
    /// The work is finished or no longer needed.
    Done,
    /// The tool server has accepted the invocation.
    Accepted,
    /// The model request has to wait for discovery. It does so without a slot.
    AwaitTools(Arc<Thread>, AwaitedFetches, OwnedSemaphorePermit),
    /// The model request goes to another model, whose server has its own slots.
    Elsewhere(Arc<Thread>, WorkQueue),
    /// The model answered, or the work failed. The message is applied to the thread. The answer keeps its memory until
    /// then.
    Apply(Box<Message>, AnswerMemory),
    /// A user's answer was delivered. If it cannot be, `failed` settles its call with an error.
    AnswerEnded { failed: Option<Input>, attempts: u32 },
    /// The attempt failed and is repeated at `at`.
    Retry { at: Timestamp, attempts: u32, outcome: String },
    /// Another node has become the host of the tool server meanwhile, and does the work.
    OtherHost,
    /// The store failed. The work is still stored and due.
    StoreFailed(store::Error),
}

impl WorkOutcome {
    /// Returns the outcome of work without an answer of a model.
    pub(super) fn apply(message: Message) -> WorkOutcome {
        WorkOutcome::Apply(Box::new(message), AnswerMemory::default())
    }
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
        if !self.hosts(&queue.destination) && !self.dispatcher.is_reserved(&key) {
            return self.tell_peers(|| Signal::Work { queue });
        }
        match self.dispatcher.offer(&queue, thread.session, key.clone()) {
            Some(cancelled) => self.spawn_work(queue, thread.session, key, cancelled, work),
            None => {
                // Another node may have a free slot.
                self.tell_peers(|| Signal::Work { queue: queue.clone() });
                self.fill_slots(&queue);
            }
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
        while !self.stop.is_cancelled() && self.hosts(&queue.destination) {
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
        let attempt = AssertUnwindSafe(self.attempt(&queue, &key, &cancelled, work)).catch_unwind();
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
        queue: &WorkQueue,
        key: &WorkKey,
        cancelled: &CancellationToken,
        work: Option<Work>,
    ) -> WorkOutcome {
        if !self.hosts(&queue.destination) {
            return WorkOutcome::OtherHost;
        }
        let work = match work {
            Some(work) => work,
            // The work was queued a while ago and may be done or cancelled by now.
            None => match self.store.load_work(key, self.now()).await {
                Ok(Some(work)) => work,
                Ok(None) => return WorkOutcome::Done,
                Err(error @ (store::Error::Unreadable(_) | store::Error::Disabled)) => {
                    tracing::error!(?key, why = error.with_sources(), "stored work cannot be loaded");
                    self.set_aside_if_damaged(&Target::Key(key.thread()), &error).await;
                    return self.retry_later(error.to_string());
                }
                Err(error) => return WorkOutcome::StoreFailed(error),
            },
        };
        if self.stop.is_cancelled() || cancelled.is_cancelled() {
            return WorkOutcome::Done;
        }
        if !self.holds_lease() {
            // Another node may have taken the work over meanwhile.
            return WorkOutcome::StoreFailed(store::Error::Unavailable(
                "the lease of this node ran out".into(),
            ));
        }
        if !self.hosts(&queue.destination) {
            // The host has changed while the work was loaded.
            return WorkOutcome::OtherHost;
        }
        match work {
            Work::Ask(work) => self.ask_unless_cancelled(queue, &work, cancelled).await,
            Work::Invoke(work) => self.invoke(&work, cancelled).await,
            Work::Answer(work) => self.deliver_answer(&work).await,
            Work::Check(work) => self.check(&work).await,
        }
    }

    async fn finish(self: &Arc<Self>, queue: &WorkQueue, key: &WorkKey, outcome: WorkOutcome) {
        match outcome {
            WorkOutcome::Done => {}
            WorkOutcome::Accepted => {
                rap_io::crash::point("after_invocation");
                if let WorkKey::Invoke { thread, call } = key
                    && self.dispatcher.accept(*thread, call)
                {
                    self.record_due.notify_one();
                }
                // The work stays in progress until the acceptance is stored.
                return;
            }
            WorkOutcome::AwaitTools(thread, fetches, permit) => {
                return self.offer_after(fetches, permit, queue.clone(), thread, key.clone());
            }
            WorkOutcome::Elsewhere(thread, to) => {
                return self.move_ask(queue, to, &thread, key).await;
            }
            WorkOutcome::Apply(message, _memory) => {
                rap_io::crash::point("after_answer");
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
            WorkOutcome::OtherHost => self.hand_to_host(queue, key).await,
            WorkOutcome::StoreFailed(error) => {
                tracing::warn!(why = error.with_sources(), "the store is unavailable; the work is retried");
                return self.recheck_after_pause(queue.clone(), key.clone());
            }
        }
        self.dispatcher.end(key);
    }

    /// Asks the model until the request is cancelled or the runtime stops. Tokens that the server has counted until then
    /// are paid, so they are recorded.
    async fn ask_unless_cancelled(
        &self,
        queue: &WorkQueue,
        work: &AskWork,
        cancelled: &CancellationToken,
    ) -> WorkOutcome {
        let position = self.choose_model(&work.thread, work.attempts);
        let tokens = UnstoredTokens::default();
        let outcome = tokio::select! {
            biased;
            () = cancelled.cancelled() => WorkOutcome::Done,
            () = self.stop.cancelled() => WorkOutcome::Done,
            outcome = self.ask_with_tools(queue, work, position, &tokens) => outcome,
        };
        self.count_unstored(&work.thread, position, &tokens).await;
        outcome
    }

    /// Offers a new model request to the queue of its model's server. A request for another model than the first is
    /// moved to the queue of that one before it starts, so that it does not wait for slots of a server that hangs.
    pub(super) fn offer_ask(
        self: &Arc<Self>,
        home: WorkQueue,
        thread: &Arc<Thread>,
        key: WorkKey,
        work: Option<Work>,
    ) {
        let position = self.choose_model(thread, 0);
        let Some(to) = self.queue_of_model(thread, position).filter(|queue| *queue != home) else {
            return self.offer(home, thread, key, work);
        };
        if !self.dispatcher.hold(&key) {
            return;
        }
        let (engine, thread) = (Arc::clone(self), Arc::clone(thread));
        self.spawn(async move { engine.move_ask(&home, to, &thread, &key).await });
    }

    /// Moves a model request that is in progress to the queue of another model, and offers it there.
    async fn move_ask(self: &Arc<Self>, from: &WorkQueue, to: WorkQueue, thread: &Thread, key: &WorkKey) {
        if let Err(error) = self.store.redirect(key, &to.destination).await {
            tracing::warn!(why = error.with_sources(), "a model request could not be moved");
            return self.recheck_after_pause(from.clone(), key.clone());
        }
        self.offer_again(to, thread, key.clone()).await;
    }

    /// Offers a model request that is in progress without a slot. If it has to wait, other nodes may send it.
    async fn offer_again(self: &Arc<Self>, queue: WorkQueue, thread: &Thread, key: WorkKey) {
        if !self.dispatcher.has_free_slot(&queue, thread.session) {
            self.release_to_peers(&key).await;
        }
        self.dispatcher.end(&key);
        self.offer(queue, thread, key, None);
    }

    /// Asks the model, unless a toolset is likely to arrive soon or the slot is one of another model's server.
    async fn ask_with_tools(
        &self,
        queue: &WorkQueue,
        work: &AskWork,
        position: usize,
        tokens: &UnstoredTokens,
    ) -> WorkOutcome {
        if let Some(to) = self.queue_of_model(&work.thread, position).filter(|to| to != queue) {
            return WorkOutcome::Elsewhere(Arc::clone(&work.thread), to);
        }
        // If the store fails here, it fails in `ask` too. If too many requests wait already, this one is sent with the
        // tools that are known.
        if let Ok(fetches) = self.toolsets.awaited(&work.thread).await
            && !fetches.is_empty()
            && let Ok(permit) = Arc::clone(&self.awaiting_tools).try_acquire_owned()
        {
            return WorkOutcome::AwaitTools(Arc::clone(&work.thread), fetches, permit);
        }
        self.ask(work, position, tokens).await
    }

    /// Offers a model request again when discovery has ended or its time is over. Until then it counts as in progress,
    /// and holds no slot.
    fn offer_after(
        self: &Arc<Self>,
        fetches: AwaitedFetches,
        permit: OwnedSemaphorePermit,
        queue: WorkQueue,
        thread: Arc<Thread>,
        key: WorkKey,
    ) {
        let engine = Arc::clone(self);
        self.spawn(async move {
            let all_saved = tokio::select! {
                biased;
                () = engine.stop.cancelled() => return,
                all_saved = fetches.ended() => all_saved,
            };
            drop(permit);
            if !all_saved {
                return engine.recheck_after_pause(queue, key);
            }
            engine.offer_again(queue, &thread, key).await;
        });
    }

    /// Lets another node send a model request that this node has claimed and would have to queue.
    async fn release_to_peers(&self, key: &WorkKey) {
        let Some(fleet) = self.store.fleet().filter(|fleet| fleet.has_peers()) else { return };
        if let Err(error) = fleet.release(key).await {
            tracing::warn!(
                why = error.with_sources(),
                "a model request stays claimed until this node sends it"
            );
        }
    }

    /// Frees work that the host of its tool server has to do, and tells it. Waits while the store is unavailable.
    async fn hand_to_host(&self, queue: &WorkQueue, key: &WorkKey) {
        let Some(fleet) = self.store.fleet() else { return };
        while let Err(error) = fleet.release(key).await {
            tracing::warn!(why = error.with_sources(), "work for another node stays claimed for now");
            if matches!(error, store::Error::Closed) || self.stop.is_cancelled() {
                return;
            }
            self.pause_for_store().await;
        }
        // This node may be the host again.
        self.dispatcher.check_store(queue);
        self.tell_peers(|| Signal::Work { queue: queue.clone() });
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
        let (target, changed) = (message.target.clone(), message.toolset.as_ref().map(|new| new.session));
        let answered = match (&message.input, &target) {
            (Input::TurnEnded { turn, .. }, Target::Key(thread)) => {
                Some(WorkKey::Ask { thread: *thread, turn: *turn })
            }
            _ => None,
        };
        let applied = self.apply_message_with_retry(message).await;
        if let Some(session) = changed {
            self.toolsets.stored(session);
        }
        match applied {
            Ok(_) => {
                if let Some(key) = answered {
                    // Another node may be asking the model as well, if it has taken the request over too early.
                    self.tell_peers(|| Signal::Cancelled { key });
                }
            }
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
