//! Delivery of outbox messages, in order for each call, until each is delivered, refused or given up.
//!
//! A delivery queue sends the outbox messages of one call, one at a time, which keeps events in order. The number of
//! active queues per host is limited, so that a host that does not answer cannot block the others. A message that
//! waits for a retry uses no memory: it stays in the journal until it is due.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use futures_util::future::BoxFuture;
use rap_io::client::{self, Client, Reply};
use rap_protocol::CallbackUrl;
use rap_protocol::retry::{Attempt, Next, Outcome, after_attempt};
use rusqlite::Connection;
use tokio::sync::Notify;

use super::{Engine, lock};
use crate::journal::{CallSeq, OutboxMessage, outbox};
use crate::rules::{Dropped, Input};

/// Transport of callbacks.
pub(crate) enum Outgoing {
    Http(Box<Client>),
    /// Passes callbacks to a test.
    Memory(Arc<Take>),
}

type Take = dyn Fn(CallbackUrl, Bytes) -> BoxFuture<'static, Result<Reply, client::Error>> + Send + Sync;

impl Outgoing {
    async fn post(&self, url: CallbackUrl, body: Bytes) -> Result<Reply, client::Error> {
        match self {
            Outgoing::Http(client) => client.post_json(&url.to_url(), &[], body).await,
            Outgoing::Memory(take) => take(url, body).await,
        }
    }
}

/// The active delivery queues.
#[derive(Default)]
pub(super) struct DeliveryQueues {
    active: HashMap<CallSeq, DeliveryQueue>,
    hosts: HashMap<i64, usize>,
    /// A due message may wait for a slot. The dispatcher has to be woken when a slot becomes free.
    recheck: bool,
    /// Counts reads of outbox messages by queues, and deletions of unsent messages.
    read_epoch: u64,
}

/// A message that was just written, with the read epoch from before the write.
pub(super) struct FreshMessage {
    pub(super) message: OutboxMessage,
    pub(super) read_epoch: u64,
}

struct DeliveryQueue {
    /// A message was added since the queue last read the outbox.
    has_more: bool,
    /// The first message waits for a retry. The dispatcher skips calls with an active queue, so it has to be woken
    /// when the queue closes.
    retry_scheduled: bool,
    /// Notified when messages of the call were dropped from the outbox.
    interrupt: Arc<Notify>,
}

/// Maximum time between two scans for due messages. Wake-ups only make a scan happen earlier.
const MAX_DISPATCH_INTERVAL: Duration = Duration::from_secs(600);

impl Engine {
    /// Sends the messages of a call. Without a free slot they stay in the journal and are sent later.
    pub(super) fn deliver(self: &Arc<Self>, call: CallSeq, host: i64) {
        if let Some((interrupt, _)) = self.open_queue(call, host) {
            self.run_queue(call, host, None, interrupt);
        }
    }

    /// Like [`Engine::deliver`], but sends a message that is in memory without reading it from the journal. If the
    /// read epoch has changed since it was written, it may have been sent or dropped, so the outbox is read after
    /// all.
    pub(super) fn deliver_fresh(self: &Arc<Self>, FreshMessage { message, read_epoch }: FreshMessage) {
        let (call, host) = (message.call, message.origin);
        if let Some((interrupt, epoch_now)) = self.open_queue(call, host) {
            self.run_queue(call, host, (epoch_now == read_epoch).then_some(message), interrupt);
        }
    }

    pub(super) fn read_epoch(&self) -> u64 {
        lock(&self.queues).read_epoch
    }

    fn run_queue(
        self: &Arc<Self>,
        call: CallSeq,
        host: i64,
        first: Option<OutboxMessage>,
        interrupt: Arc<Notify>,
    ) {
        let engine = Arc::clone(self);
        self.tasks.spawn(async move {
            let mut message = first;
            loop {
                engine.send_all(call, message.take(), &interrupt).await;
                if engine.close_queue(call, host) {
                    return;
                }
            }
        });
    }

    /// Opens the queue of a call, unless it is open already or no slot is free. Also returns the read epoch.
    fn open_queue(&self, call: CallSeq, host: i64) -> Option<(Arc<Notify>, u64)> {
        let mut queues = lock(&self.queues);
        if let Some(queue) = queues.active.get_mut(&call) {
            queue.has_more = true;
            return None;
        }
        let to_host = queues.hosts.get(&host).copied().unwrap_or(0);
        if queues.active.len() >= self.limits.deliveries || to_host >= self.limits.deliveries_per_host {
            queues.recheck = true;
            return None;
        }
        queues.hosts.insert(host, to_host + 1);
        let interrupt = Arc::new(Notify::new());
        queues.active.insert(
            call,
            DeliveryQueue { has_more: false, retry_scheduled: false, interrupt: Arc::clone(&interrupt) },
        );
        Some((interrupt, queues.read_epoch))
    }

    /// Closes a queue. Returns false, and leaves it open, if a message was added meanwhile.
    fn close_queue(&self, call: CallSeq, host: i64) -> bool {
        let mut queues = lock(&self.queues);
        if let Some(queue) = queues.active.get_mut(&call)
            && std::mem::take(&mut queue.has_more)
        {
            return false;
        }
        let retry_scheduled = queues.active.remove(&call).is_some_and(|queue| queue.retry_scheduled);
        if let Some(count) = queues.hosts.get_mut(&host) {
            *count -= 1;
            if *count == 0 {
                queues.hosts.remove(&host);
            }
        }
        if std::mem::take(&mut queues.recheck) || retry_scheduled {
            self.due.notify_one();
        }
        true
    }

    /// Stops sending messages that were dropped from the outbox: the one in progress, and any [`FreshMessage`].
    pub(super) fn interrupt_delivery(&self, call: CallSeq) {
        let mut queues = lock(&self.queues);
        queues.read_epoch += 1;
        if let Some(queue) = queues.active.get_mut(&call) {
            queue.has_more = true;
            queue.interrupt.notify_one();
        }
    }

    /// Sends messages in order until there is none left or one has to wait for a retry.
    async fn send_all(self: &Arc<Self>, call: CallSeq, first: Option<OutboxMessage>, interrupt: &Notify) {
        let mut message = first;
        loop {
            let current = match message.take() {
                Some(message) => message,
                None => match self.first_message(call).await {
                    Some(message) => message,
                    None => return,
                },
            };
            let attempted = tokio::select! {
                attempted = self.attempt_unless_dropped(&current, interrupt) => attempted,
                () = self.ended.cancelled() => return,
            };
            // The message was dropped; the outbox may have another one.
            let Some(attempted) = attempted else { continue };
            if !self.record_attempt(&current, attempted).await {
                return;
            }
        }
    }

    /// Reads the first outbox message of a call, and resets `has_more` before it.
    async fn first_message(self: &Arc<Self>, call: CallSeq) -> Option<OutboxMessage> {
        {
            let mut queues = lock(&self.queues);
            queues.read_epoch += 1;
            if let Some(queue) = queues.active.get_mut(&call) {
                queue.has_more = false;
            }
        }
        self.write(move |_, db| outbox::first(db, call)).await.flatten()
    }

    /// Returns `None` if the message was dropped from the outbox meanwhile.
    async fn attempt_unless_dropped(
        self: &Arc<Self>,
        message: &OutboxMessage,
        interrupt: &Notify,
    ) -> Option<AttemptResult> {
        let mut attempt = std::pin::pin!(self.attempt(message));
        let id = message.seq;
        loop {
            tokio::select! {
                biased;
                () = interrupt.notified() => {
                    // The interruption may have been meant for the previous message.
                    if self.write(move |_, db| outbox::exists(db, id)).await != Some(true) {
                        return None;
                    }
                }
                attempted = &mut attempt => return Some(attempted),
            }
        }
    }

    async fn attempt(&self, message: &OutboxMessage) -> AttemptResult {
        let Some(url) = self.journal.callback_url(message) else {
            tracing::error!(
                call = message.call,
                "a callback URL could not be decrypted; giving up its message"
            );
            return AttemptResult::Impossible;
        };
        let body = Bytes::from(message.body.clone());
        match self.outgoing.post(url, body).await {
            Ok(reply) => AttemptResult::Finished(Outcome::Answered {
                status: reply.status,
                retry_after: reply.retry_after,
            }),
            Err(error @ client::Error::Forbidden(_)) => {
                tracing::warn!(call = message.call, %error, "a callback URL is not allowed");
                AttemptResult::Impossible
            }
            Err(error) => {
                tracing::debug!(call = message.call, %error, "a callback was not answered");
                AttemptResult::Finished(Outcome::NoAnswer)
            }
        }
    }

    /// Records the result of an attempt. Returns true if the next message may be sent at once.
    async fn record_attempt(self: &Arc<Self>, message: &OutboxMessage, attempted: AttemptResult) -> bool {
        let (id, call, kind, attempts) = (message.seq, message.call, message.kind, message.attempts + 1);
        let now = self.now();
        let next = match attempted {
            AttemptResult::Impossible => Next::GaveUp,
            AttemptResult::Finished(outcome) => {
                let attempt = Attempt { number: attempts, since: message.created_at, now, jitter: jitter() };
                after_attempt(outcome, attempt, &self.limits.delivery)
            }
        };
        self.counters.count_attempt(next);
        let input = match next {
            Next::Retry { at } => {
                self.write(move |_, db| outbox::postpone(db, id, call, attempts, at)).await;
                if let Some(queue) = lock(&self.queues).active.get_mut(&call) {
                    queue.retry_scheduled = true;
                }
                return false;
            }
            Next::Done => Input::Delivered(kind),
            Next::Refused { status } => {
                tracing::warn!(call, status, attempts, "a callback was refused");
                Input::Refused(kind, status)
            }
            Next::GaveUp => {
                tracing::warn!(call, attempts, "a callback was given up");
                Input::GaveUp(kind)
            }
        };
        let answered = move |engine: &Engine, db: &Connection| {
            engine.journal.step_delivered(db, (id, call), input.clone(), engine.now())
        };
        let Some(Ok(mut applied)) = self.write(answered).await else { return true };
        let more = !applied.head.outbox_is_empty();
        // This queue continues by itself: it reads a message that the step has added from the journal, and is not
        // sending any message that the step has dropped.
        (applied.first, applied.dropped) = (None, Dropped::Nothing);
        self.after_commit(call, applied);
        more
    }

    /// Starts the delivery of due messages, until the server stops.
    pub(super) async fn dispatch(self: Arc<Self>) {
        loop {
            let pause = self.dispatch_due().await;
            tokio::select! {
                () = self.due.notified() => {}
                () = tokio::time::sleep(pause) => {}
                () = self.stopping.cancelled() => return,
            }
        }
    }

    /// Opens queues for due messages, as far as slots are free. Returns the time until the next scan.
    async fn dispatch_due(self: &Arc<Self>) -> Duration {
        let busy: Vec<i64> = {
            let mut queues = lock(&self.queues);
            let full =
                |(host, count): (&i64, &usize)| (*count >= self.limits.deliveries_per_host).then_some(*host);
            let busy: Vec<i64> = queues.hosts.iter().filter_map(full).collect();
            // Messages to a busy host are not read now, so scan again when it has a free slot.
            queues.recheck = !busy.is_empty();
            busy
        };
        let now = self.now();
        // Calls with an active queue are also due, so read more than can be started.
        let limit_per_host =
            u32::try_from(self.limits.deliveries_per_host.saturating_mul(2)).unwrap_or(u32::MAX);
        let read = move |_: &Engine, db: &Connection| outbox::due(db, now, &busy, limit_per_host);
        let Some(due) = self.write(read).await else { return MAX_DISPATCH_INTERVAL };
        for (call, host) in due.calls {
            self.deliver_if_idle(call, host);
        }
        due.next.map_or(MAX_DISPATCH_INTERVAL, |at| at.since(now)).min(MAX_DISPATCH_INTERVAL)
    }

    /// Like [`Engine::deliver`], but does nothing if the call has an active queue.
    fn deliver_if_idle(self: &Arc<Self>, call: CallSeq, host: i64) {
        if !lock(&self.queues).active.contains_key(&call) {
            self.deliver(call, host);
        }
    }
}

enum AttemptResult {
    Finished(Outcome),
    /// The URL cannot be decrypted or is not allowed.
    Impossible,
}

/// Returns a random number for jitter. It need not be unpredictable.
fn jitter() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    (RandomState::new().hash_one(0u8) >> 32) as u32
}
