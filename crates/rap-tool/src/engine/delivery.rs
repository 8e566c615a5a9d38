//! Delivery of outbox messages, in order for each call, until each is delivered, refused or given up.
//!
//! A delivery queue sends the outbox messages of one call, one at a time, which keeps events in order. The number of
//! active queues per host is limited, so that a host that does not answer cannot block the others. Callers choose the
//! hosts, so the slots are also shared among callers; see `shares.rs`. A message that waits for a slot or for a retry
//! uses no memory: it stays in the journal until its caller's turn comes.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderName, HeaderValue};
use futures_util::future::BoxFuture;
use rap_io::client::{self, Client, Reply};
use rap_io::hashing::hash;
use rap_io::reloading::Reloading;
use rap_protocol::retry::{Attempt, Next, Outcome, after_attempt};
use rap_protocol::{CallbackUrl, TRACEPARENT, Timestamp};
use rusqlite::Connection;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{Engine, lock};
use crate::auth::Caller;
use crate::journal::outbox::{self, HostUse, InProgress, PageLimits, ReadyPage, Retry};
use crate::journal::{CallSeq, OutboxMessage};
use crate::limits::Limits;
use crate::rules::{Dropped, Input};
use crate::shares::Slots;

/// Transport of callbacks.
pub(crate) enum Outgoing {
    Http(Box<Reloading<Client>>),
    /// Passes callbacks to a test.
    Memory(Arc<Take>),
}

type Take = dyn Fn(CallbackUrl, Bytes) -> BoxFuture<'static, Result<Reply, client::Error>> + Send + Sync;

impl Outgoing {
    pub(super) async fn post(
        &self,
        url: CallbackUrl,
        headers: &[(HeaderName, HeaderValue)],
        body: Bytes,
    ) -> Result<Reply, client::Error> {
        match self {
            Outgoing::Http(client) => client.get().post_json(&url.to_url(), headers, body).await,
            Outgoing::Memory(take) => take(url, body).await,
        }
    }
}

/// The active delivery queues.
pub(super) struct DeliveryQueues {
    active: HashMap<CallSeq, DeliveryQueue>,
    slots: Slots,
    /// Slots of the hosts that something is being sent to.
    hosts: HashMap<i64, Slots>,
    per_host: usize,
    callers: Arc<HashSet<Caller>>,
    /// A message may wait for a slot. The dispatcher has to be woken when a slot becomes free.
    recheck: bool,
    /// Counts reads of outbox messages by queues, and deletions of unsent messages.
    read_epoch: u64,
}

/// A call with messages to send.
#[derive(Debug, Clone)]
struct Recipient {
    call: CallSeq,
    caller: Caller,
    host: i64,
}

impl DeliveryQueues {
    pub(super) fn new(limits: &Limits, callers: &Arc<HashSet<Caller>>) -> Self {
        DeliveryQueues {
            active: HashMap::new(),
            slots: Slots::new(limits.deliveries, callers),
            hosts: HashMap::new(),
            per_host: limits.deliveries_per_host,
            callers: Arc::clone(callers),
            recheck: false,
            read_epoch: 0,
        }
    }

    /// Takes a slot of the server and one of the host. Returns false if none is free for this caller.
    fn take_slots(&mut self, caller: &Caller, host: i64) -> bool {
        let (per_host, callers) = (self.per_host, &self.callers);
        let to_host = self.hosts.entry(host).or_insert_with(|| Slots::new(per_host, callers));
        let taken = self.slots.admits(caller) && to_host.take(caller) && self.slots.take(caller);
        if to_host.used() == 0 {
            self.hosts.remove(&host);
        }
        taken
    }

    fn release_slots(&mut self, caller: &Caller, host: i64) {
        self.slots.release(caller);
        if let Some(to_host) = self.hosts.get_mut(&host) {
            to_host.release(caller);
            if to_host.used() == 0 {
                self.hosts.remove(&host);
            }
        }
    }

    /// Returns what is being sent.
    fn in_progress(&self) -> InProgress {
        let mut found = InProgress { calls: self.active.keys().copied().collect(), ..InProgress::default() };
        for DeliveryQueue { caller, host, .. } in self.active.values() {
            if !self.slots.admits(caller) {
                found.full_callers.insert(caller.clone());
            }
            let is_full = self.hosts.get(host).is_some_and(|slots| !slots.admits(caller));
            let in_use = found.hosts.entry((caller.clone(), *host)).or_insert(HostUse { active: 0, is_full });
            in_use.active += 1;
        }
        found
    }
}

/// A message that was just written, with the read epoch from before the write.
pub(super) struct FreshMessage {
    pub(super) message: OutboxMessage,
    pub(super) read_epoch: u64,
}

struct DeliveryQueue {
    caller: Caller,
    host: i64,
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

/// Maximum number of messages of one caller, or of retries, that one job of the writer handles. Jobs of others wait for
/// that long.
const PAGE: u32 = 64;

/// Pause after a page of retries, if more are due. It bounds what hosts that always fail cost: a caller has at most
/// [`PAGE`] retries in that time.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Difference between the clock and the time that has passed that does not count as a clock that was set back.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(1);

/// Maximum size of the messages that the dispatcher reads at once, in bytes. Queues read further ones themselves.
const PAGE_BYTES: usize = 1024 * 1024;

/// Compares the clock with the time that has passed since the last call, which `last` keeps.
fn was_set_back(last: &mut (Timestamp, Instant), now: Timestamp, at: Instant) -> bool {
    let expected = last.0.plus(at - last.1);
    *last = (now, at);
    now.plus(CLOCK_TOLERANCE) < expected
}

impl Engine {
    /// Sends the messages of a call. Without a free slot they stay in the journal and are sent later.
    pub(super) fn deliver(self: &Arc<Self>, message: &OutboxMessage) {
        if let Some((interrupt, _)) = self.open_queue(&Recipient::of(message)) {
            self.run_queue(Recipient::of(message), None, interrupt);
        }
    }

    /// Like [`Engine::deliver`], but sends a message that is in memory without reading it from the journal. If the
    /// read epoch has changed since it was written, it may have been sent or dropped, so the outbox is read after
    /// all.
    pub(super) fn deliver_fresh(self: &Arc<Self>, FreshMessage { message, read_epoch }: FreshMessage) {
        let recipient = Recipient::of(&message);
        if let Some((interrupt, epoch_now)) = self.open_queue(&recipient) {
            self.run_queue(recipient, (epoch_now == read_epoch).then_some(message), interrupt);
        }
    }

    /// Counts a read of outbox messages. Called by the job that reads, so that no write comes in between.
    fn count_read(&self) {
        lock(&self.queues).read_epoch += 1;
    }

    pub(super) fn read_epoch(&self) -> u64 {
        lock(&self.queues).read_epoch
    }

    fn run_queue(
        self: &Arc<Self>,
        recipient: Recipient,
        first: Option<OutboxMessage>,
        interrupt: Arc<Notify>,
    ) {
        let engine = Arc::clone(self);
        self.tasks.spawn(async move {
            let mut message = first;
            loop {
                engine.send_all(&recipient, message.take(), &interrupt).await;
                if engine.close_queue(recipient.call) {
                    return;
                }
            }
        });
    }

    /// Opens the queue of a call, unless it is open already or no slot is free. Also returns the read epoch.
    fn open_queue(&self, Recipient { call, caller, host }: &Recipient) -> Option<(Arc<Notify>, u64)> {
        let mut queues = lock(&self.queues);
        if let Some(queue) = queues.active.get_mut(call) {
            queue.has_more = true;
            return None;
        }
        if !queues.take_slots(caller, *host) {
            queues.recheck = true;
            return None;
        }
        let interrupt = Arc::new(Notify::new());
        let queue = DeliveryQueue {
            caller: caller.clone(),
            host: *host,
            has_more: false,
            retry_scheduled: false,
            interrupt: Arc::clone(&interrupt),
        };
        queues.active.insert(*call, queue);
        Some((interrupt, queues.read_epoch))
    }

    /// Closes a queue. Returns false, and leaves it open, if a message was added meanwhile.
    fn close_queue(&self, call: CallSeq) -> bool {
        let mut queues = lock(&self.queues);
        if let Some(queue) = queues.active.get_mut(&call)
            && std::mem::take(&mut queue.has_more)
        {
            return false;
        }
        let Some(queue) = queues.active.remove(&call) else { return true };
        queues.release_slots(&queue.caller, queue.host);
        if std::mem::take(&mut queues.recheck) || queue.retry_scheduled {
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
    async fn send_all(
        self: &Arc<Self>,
        recipient: &Recipient,
        first: Option<OutboxMessage>,
        interrupt: &Notify,
    ) {
        let mut message = first;
        loop {
            let current = match message.take() {
                Some(message) => message,
                None => match self.first_message(recipient).await {
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
    async fn first_message(self: &Arc<Self>, recipient: &Recipient) -> Option<OutboxMessage> {
        let call = recipient.call;
        if let Some(queue) = lock(&self.queues).active.get_mut(&call) {
            queue.has_more = false;
        }
        let read = move |engine: &Engine, db: &Connection| {
            engine.count_read();
            outbox::first(db, call)
        };
        self.write_for(&recipient.caller, read).await.flatten()
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
                    let exists = move |_: &Engine, db: &Connection| outbox::exists(db, id);
                    if self.write_for(&message.caller, exists).await != Some(true) {
                        return None;
                    }
                }
                attempted = &mut attempt => return Some(attempted),
            }
        }
    }

    /// Returns the headers that sign a message, if its caller has signing keys.
    async fn sign(self: &Arc<Self>, message: &OutboxMessage, body: &Bytes) -> Vec<(HeaderName, HeaderValue)> {
        if !self.callers.has_signing_keys(&message.caller) {
            return Vec::new();
        }
        let (engine, caller, seq) = (Arc::clone(self), message.caller.clone(), message.seq);
        let (body, now) = (body.clone(), self.now());
        hash(body.len(), move || engine.callers.sign_callback(&caller, seq, &body, now)).await
    }

    async fn attempt(self: &Arc<Self>, message: &OutboxMessage) -> AttemptResult {
        let Some(url) = self.journal.callback_url(message) else {
            tracing::error!(
                call = message.call,
                "a callback URL could not be decrypted; giving up its message"
            );
            return AttemptResult::Impossible;
        };
        let body = Bytes::from(message.body.clone());
        let mut headers = self.sign(message, &body).await;
        headers.extend(message.trace.map(|trace| {
            let value = HeaderValue::from_str(&trace.to_string()).expect("bug: the context is ASCII text");
            (HeaderName::from_static(TRACEPARENT), value)
        }));
        rap_io::crash::point("before_delivery");
        let answered = self.outgoing.post(url, &headers, body).await;
        rap_io::crash::point("after_delivery");
        match answered {
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
                self.record_retry(Retry { message: id, call, attempts, at }).await;
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
        let written = self.write_for(&message.caller, answered).await;
        let Some(Ok(mut applied)) = written else { return true };
        let more = !applied.head.outbox_is_empty();
        // This queue continues by itself: it reads a message that the step has added from the journal, and is not
        // sending any message that the step has dropped.
        (applied.first, applied.dropped) = (None, Dropped::Nothing);
        self.after_commit(call, applied);
        more
    }

    /// Starts the delivery of due messages, until the server stops.
    pub(super) async fn dispatch(self: Arc<Self>) {
        let mut retries_from = Instant::now();
        // The clock may have been set back while no process was running. Jitter makes no pause twice as long.
        self.end_pauses_longer_than(self.limits.delivery.longest_pause * 2).await;
        let mut clock = (self.now(), Instant::now());
        loop {
            if was_set_back(&mut clock, self.now(), Instant::now()) {
                tracing::warn!("the clock was set back: callbacks that wait for a retry are sent now");
                self.end_pauses_longer_than(Duration::ZERO).await;
            }
            let pause = self.dispatch_due(&mut retries_from).await;
            tokio::select! {
                () = self.due.notified() => {}
                () = tokio::time::sleep(pause) => {}
                () = self.stopping.cancelled() => return,
            }
        }
    }

    /// Makes messages due that wait for a retry in the far future, which is a pause that began before the clock was set
    /// back.
    async fn end_pauses_longer_than(self: &Arc<Self>, longest: Duration) {
        let now = self.now();
        let end =
            move |_: &Engine, db: &Connection| outbox::end_long_pauses(db, now, now.plus(longest), PAGE);
        while self.write(end).await == Some(true) {}
    }

    /// Opens queues for messages that may be sent, as far as slots are free. Returns the time until the next scan.
    /// Messages that wait for a retry are left alone until `retries_from`.
    async fn dispatch_due(self: &Arc<Self>, retries_from: &mut Instant) -> Duration {
        let in_progress = {
            let mut queues = lock(&self.queues);
            let in_progress = queues.in_progress();
            // Messages that have no free slot are not read now, so scan again when there is one.
            queues.recheck = !in_progress.full_callers.is_empty()
                || in_progress.hosts.values().any(|in_use| in_use.is_full);
            Arc::new(in_progress)
        };
        let (now, turns) = (self.now(), Arc::new(lock(&self.turns).clone()));
        // One more than there are slots. It is refused, and then the dispatcher is woken when a slot is free.
        let per_host = u32::try_from(self.limits.deliveries_per_host).unwrap_or(PAGE).min(PAGE) + 1;
        let limits = PageLimits { per_caller: PAGE, per_host };
        let wait = retries_from.saturating_duration_since(Instant::now());
        let read = move |_: &Engine, db: &Connection| {
            let next = match wait.is_zero() {
                true => outbox::release_due(db, now, PAGE)?,
                false => Some(now.plus(wait)),
            };
            Ok((next, outbox::ready(db, &turns, &in_progress, limits)?))
        };
        let Some((mut next, pages)) = self.write(read).await else { return MAX_DISPATCH_INTERVAL };
        if wait.is_zero() && next == Some(now) {
            *retries_from = Instant::now() + RETRY_INTERVAL;
            next = Some(now.plus(RETRY_INTERVAL));
        }
        let more = pages.iter().any(|page| page.more_after.is_some());
        let opened = self.open_queues(pages);
        let may_continue = more && !opened.is_empty();
        self.run_queues(opened).await;
        if may_continue {
            return Duration::ZERO;
        }
        next.map_or(MAX_DISPATCH_INTERVAL, |at| at.since(now)).min(MAX_DISPATCH_INTERVAL)
    }

    /// Opens queues for the calls of these pages, as far as slots are free. Callers take turns.
    fn open_queues(&self, pages: Vec<ReadyPage>) -> Vec<(Recipient, Arc<Notify>)> {
        let mut turns = lock(&self.turns);
        let mut waiting = Vec::new();
        for ReadyPage { caller, calls, more_after } in pages {
            let recipient = |(call, host)| Recipient { call, caller: caller.clone(), host };
            waiting.extend(calls.into_iter().map(recipient).enumerate());
            match more_after {
                Some(host) => turns.insert(caller, host),
                None => turns.remove(&caller),
            };
        }
        // The first call of each caller comes before the second of any.
        waiting.sort_by_key(|(position, _)| *position);
        let (mut opened, mut served, mut refused) = (Vec::new(), HashSet::new(), HashSet::new());
        for (_, recipient) in waiting {
            let Recipient { caller, host, .. } = recipient.clone();
            match self.open_queue_if_idle(&recipient) {
                Some((interrupt, _)) => {
                    opened.push((recipient, interrupt));
                    served.insert((caller, host));
                }
                // The next page begins with the first host that had no slot at all.
                None if refused.insert(caller.clone()) => {
                    let is_served = served.contains(&(caller.clone(), host));
                    turns.insert(caller, if is_served { host } else { host.wrapping_sub(1) });
                }
                None => {}
            }
        }
        opened
    }

    /// Like [`Engine::open_queue`], but does nothing if the call has an active queue.
    fn open_queue_if_idle(&self, recipient: &Recipient) -> Option<(Arc<Notify>, u64)> {
        if lock(&self.queues).active.contains_key(&recipient.call) {
            return None;
        }
        self.open_queue(recipient)
    }

    /// Runs queues that were just opened. Reads their first messages together, which costs less than one by one.
    async fn run_queues(self: &Arc<Self>, opened: Vec<(Recipient, Arc<Notify>)>) {
        for page in opened.chunks(PAGE as usize) {
            let calls: Vec<CallSeq> = page.iter().map(|(recipient, _)| recipient.call).collect();
            let read = move |engine: &Engine, db: &Connection| {
                engine.count_read();
                outbox::firsts(db, &calls, PAGE_BYTES)
            };
            let mut firsts = self.write(read).await.unwrap_or_default();
            for (recipient, interrupt) in page {
                self.run_queue(recipient.clone(), firsts.remove(&recipient.call), Arc::clone(interrupt));
            }
        }
    }

    /// Stores the time of a retry. Retries that come while others are written are written together.
    async fn record_retry(self: &Arc<Self>, retry: Retry) {
        lock(&self.retries).push(retry);
        let _turn = self.retry_turn.lock().await;
        // Empty if another task has written this retry.
        let retries = std::mem::take(&mut *lock(&self.retries));
        for page in retries.chunks(PAGE as usize) {
            let page: Arc<[Retry]> = page.into();
            self.write(move |_, db| outbox::postpone(db, &page)).await;
        }
    }
}

impl Recipient {
    fn of(message: &OutboxMessage) -> Self {
        Recipient { call: message.call, caller: message.caller.clone(), host: message.origin }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_a_clock_that_was_set_back_is_noticed() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut last = (Timestamp(100_000), start);
        assert!(!was_set_back(&mut last, Timestamp(110_000), start + 10 * second));
        // Set back a little, and far ahead.
        assert!(!was_set_back(&mut last, Timestamp(110_500), start + 11 * second));
        assert!(!was_set_back(&mut last, Timestamp(900_000), start + 12 * second));
        assert!(was_set_back(&mut last, Timestamp(120_000), start + 13 * second));
        assert!(!was_set_back(&mut last, Timestamp(121_000), start + 14 * second));
    }
}
