//! Delivery: every message of the outbox, in order for each call, until it is taken, refused or given up.
//!
//! A lane is one call's messages under way. At most one attempt of a lane runs at a time, which keeps events in
//! order; lanes to the same host are bounded, so that a host that hangs holds up nobody else. What waits for a
//! later attempt costs no memory: it lies in the journal until it is due.

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
use crate::journal::{Letter, Seq, outbox};
use crate::rules::{Dropped, Input};

/// How callbacks leave the process.
pub(crate) enum Outgoing {
    Http(Box<Client>),
    /// Into the hands of a test.
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

/// The lanes at work.
#[derive(Default)]
pub(super) struct Lanes {
    active: HashMap<Seq, Lane>,
    hosts: HashMap<i64, usize>,
    /// A lane found no place, or may have; look for due ones when one becomes free.
    starved: bool,
    /// How often a lane has looked into the journal for what to send, or something was dropped from it.
    looks: u64,
}

/// A message at hand, and how often lanes had looked into the journal before it was written there.
pub(super) struct AtHand {
    pub(super) letter: Letter,
    pub(super) looks: u64,
}

struct Lane {
    /// Something was added while it was at work.
    again: bool,
    /// What stands first has to wait, so the dispatcher must look when the lane is closed, and not before: it
    /// passes over calls that have one.
    postponed: bool,
    /// What is being sent is not wanted any more.
    interrupt: Arc<Notify>,
}

/// The longest time between two looks at what is due: what wakes the dispatcher earlier is only a hint.
const LOOK_AGAIN: Duration = Duration::from_secs(600);

impl Engine {
    /// Sends what waits for a call. If there is no place, it stays in the journal and is sent later.
    pub(super) fn deliver(self: &Arc<Self>, call: Seq, host: i64) {
        if let Some((interrupt, _)) = self.open_lane(call, host) {
            self.run_lane(call, host, None, interrupt);
        }
    }

    /// The same, without reading what is at hand. If a lane has looked into the journal since it was written, it
    /// may have been sent already, and is read again.
    pub(super) fn deliver_at_hand(self: &Arc<Self>, AtHand { letter, looks }: AtHand) {
        let (call, host) = (letter.call, letter.origin);
        if let Some((interrupt, looks_now)) = self.open_lane(call, host) {
            self.run_lane(call, host, (looks_now == looks).then_some(letter), interrupt);
        }
    }

    pub(super) fn looks(&self) -> u64 {
        lock(&self.lanes).looks
    }

    fn run_lane(self: &Arc<Self>, call: Seq, host: i64, first: Option<Letter>, interrupt: Arc<Notify>) {
        let engine = Arc::clone(self);
        self.tasks.spawn(async move {
            let mut letter = first;
            loop {
                engine.work_off(call, letter.take(), &interrupt).await;
                if engine.close_lane(call, host) {
                    return;
                }
            }
        });
    }

    /// Opens a lane, if there is a place and it is not open; also how often lanes have looked into the journal.
    fn open_lane(&self, call: Seq, host: i64) -> Option<(Arc<Notify>, u64)> {
        let mut lanes = lock(&self.lanes);
        if let Some(lane) = lanes.active.get_mut(&call) {
            lane.again = true;
            return None;
        }
        let to_host = lanes.hosts.get(&host).copied().unwrap_or(0);
        if lanes.active.len() >= self.limits.deliveries || to_host >= self.limits.deliveries_per_host {
            lanes.starved = true;
            return None;
        }
        lanes.hosts.insert(host, to_host + 1);
        let interrupt = Arc::new(Notify::new());
        lanes.active.insert(call, Lane { again: false, postponed: false, interrupt: Arc::clone(&interrupt) });
        Some((interrupt, lanes.looks))
    }

    /// Whether the lane is closed; if something was added meanwhile it goes on instead.
    fn close_lane(&self, call: Seq, host: i64) -> bool {
        let mut lanes = lock(&self.lanes);
        if let Some(lane) = lanes.active.get_mut(&call)
            && std::mem::take(&mut lane.again)
        {
            return false;
        }
        let postponed = lanes.active.remove(&call).is_some_and(|lane| lane.postponed);
        if let Some(count) = lanes.hosts.get_mut(&host) {
            *count -= 1;
            if *count == 0 {
                lanes.hosts.remove(&host);
            }
        }
        if std::mem::take(&mut lanes.starved) || postponed {
            self.due.notify_one();
        }
        true
    }

    /// Stops sending what was dropped from the outbox: what is under way, and what is at hand but has no lane yet.
    pub(super) fn interrupt_delivery(&self, call: Seq) {
        let mut lanes = lock(&self.lanes);
        lanes.looks += 1;
        if let Some(lane) = lanes.active.get_mut(&call) {
            lane.again = true;
            lane.interrupt.notify_one();
        }
    }

    /// Sends one message after the other until there is none, or one has to wait.
    async fn work_off(self: &Arc<Self>, call: Seq, first: Option<Letter>, interrupt: &Notify) {
        let mut letter = first;
        loop {
            let current = match letter.take() {
                Some(letter) => letter,
                None => match self.first_letter(call).await {
                    Some(letter) => letter,
                    None => return,
                },
            };
            let attempted = tokio::select! {
                attempted = self.attempt_while_wanted(&current, interrupt) => attempted,
                () = self.ended.cancelled() => return,
            };
            // What stands first now may be another message, or none.
            let Some(attempted) = attempted else { continue };
            if !self.note(&current, attempted).await {
                return;
            }
        }
    }

    /// What stands first in the journal. Whatever was added before this look is seen by it.
    async fn first_letter(self: &Arc<Self>, call: Seq) -> Option<Letter> {
        {
            let mut lanes = lock(&self.lanes);
            lanes.looks += 1;
            if let Some(lane) = lanes.active.get_mut(&call) {
                lane.again = false;
            }
        }
        self.write(move |_, db| outbox::first(db, call)).await.flatten()
    }

    /// `None` if the message was dropped from the outbox meanwhile.
    async fn attempt_while_wanted(
        self: &Arc<Self>,
        letter: &Letter,
        interrupt: &Notify,
    ) -> Option<Attempted> {
        let mut attempt = std::pin::pin!(self.attempt(letter));
        let id = letter.seq;
        loop {
            tokio::select! {
                biased;
                () = interrupt.notified() => {
                    // It may have been meant for the message before this one.
                    if self.write(move |_, db| outbox::waits(db, id)).await != Some(true) {
                        return None;
                    }
                }
                attempted = &mut attempt => return Some(attempted),
            }
        }
    }

    async fn attempt(&self, letter: &Letter) -> Attempted {
        let Some(url) = self.book.callback_url(letter) else {
            tracing::error!(
                call = letter.call,
                "a callback URL could not be opened; its message is given up"
            );
            return Attempted::Never;
        };
        let body = Bytes::from(letter.body.clone());
        match self.outgoing.post(url, body).await {
            Ok(reply) => {
                Attempted::Ended(Outcome::Answered { status: reply.status, retry_after: reply.retry_after })
            }
            Err(error @ client::Error::Forbidden(_)) => {
                tracing::warn!(call = letter.call, %error, "a callback leads where this server may not send to");
                Attempted::Never
            }
            Err(error) => {
                tracing::debug!(call = letter.call, %error, "a callback was not answered");
                Attempted::Ended(Outcome::NoAnswer)
            }
        }
    }

    /// Writes down how an attempt ended. Whether to go on with the next message at once.
    async fn note(self: &Arc<Self>, letter: &Letter, attempted: Attempted) -> bool {
        let (id, call, kind, attempts) = (letter.seq, letter.call, letter.kind, letter.attempts + 1);
        let now = self.now();
        let next = match attempted {
            Attempted::Never => Next::GaveUp,
            Attempted::Ended(outcome) => {
                let attempt = Attempt { number: attempts, since: letter.created_at, now, dice: dice() };
                after_attempt(outcome, attempt, &self.limits.delivery)
            }
        };
        self.counters.attempted(next);
        let input = match next {
            Next::Again { at } => {
                self.write(move |_, db| outbox::postpone(db, id, call, attempts, at)).await;
                if let Some(lane) = lock(&self.lanes).active.get_mut(&call) {
                    lane.postponed = true;
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
            engine.book.answered(db, (id, call), input.clone(), engine.now())
        };
        let Some(Ok(mut applied)) = self.write(answered).await else { return true };
        let more = !applied.head.outbox_is_empty();
        // This lane goes on by itself: a message that the step has posted is read from the journal, and those
        // that it dropped are not being sent.
        (applied.first, applied.dropped) = (None, Dropped::Nothing);
        self.follow(call, applied);
        more
    }

    /// Finds what is due in the journal, until the server stops.
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

    /// Opens a lane for all that is due and has a place; how long until more is due.
    async fn dispatch_due(self: &Arc<Self>) -> Duration {
        let busy: Vec<i64> = {
            let mut lanes = lock(&self.lanes);
            let full =
                |(host, count): (&i64, &usize)| (*count >= self.limits.deliveries_per_host).then_some(*host);
            let busy: Vec<i64> = lanes.hosts.iter().filter_map(full).collect();
            // What is due for a busy host is not looked for, and must be found when it has a place.
            lanes.starved = !busy.is_empty();
            busy
        };
        let now = self.now();
        // Those that are at work are due as well.
        let most_each = u32::try_from(self.limits.deliveries_per_host.saturating_mul(2)).unwrap_or(u32::MAX);
        let read = move |_: &Engine, db: &Connection| outbox::due(db, now, &busy, most_each);
        let Some(due) = self.write(read).await else { return LOOK_AGAIN };
        for (call, host) in due.calls {
            self.deliver_due(call, host);
        }
        due.next.map_or(LOOK_AGAIN, |at| at.since(now)).min(LOOK_AGAIN)
    }

    /// Like [`Engine::deliver`], but leaves a lane that is at work alone.
    fn deliver_due(self: &Arc<Self>, call: Seq, host: i64) {
        if !lock(&self.lanes).active.contains_key(&call) {
            self.deliver(call, host);
        }
    }
}

/// How an attempt ended, if there could be one at all.
enum Attempted {
    Ended(Outcome),
    Never,
}

/// A number that spreads the pauses of many lanes. It need not be hard to guess.
fn dice() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    (RandomState::new().hash_one(0u8) >> 32) as u32
}
