//! The clock: fires timers, looks at work whose retry pause is over, and removes what is kept for a time only.

use std::collections::{BTreeMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rap_agent::Input;
use rap_protocol::Timestamp;

use super::{Engine, STORE_PAUSE};
use crate::store::{self, Lane, Message, SessionKey, Target, Timer};

/// How long the clock sleeps when nothing is due.
pub(super) const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// Rows that are read in one query.
pub(super) const ROWS: usize = 1024;
/// Rows of one session that are taken before the others have had their turn.
pub(super) const PER_SESSION: usize = 64;
/// Queries that look for other sessions behind those that have more than their share.
pub(super) const QUERIES: usize = 8;
/// A timer or message that could not be applied is put off by this time.
pub(super) const PUT_OFF: Duration = Duration::from_secs(60);
/// How often old rows are removed, and the pause while there are more.
const PRUNE_EVERY: Duration = Duration::from_secs(600);
const PRUNE_PAUSE: Duration = Duration::from_millis(100);
/// How long deliveries are recorded.
const DELIVERIES_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// The longest time that a call has after a start if its own time was over before. A shorter time-out is enough.
const GRACE: Duration = Duration::from_secs(30);

impl Engine {
    pub(super) async fn run_clock(self: Arc<Self>) {
        let began = self.now();
        let mut prune_at = began.plus(PRUNE_EVERY);
        loop {
            // Whatever becomes due from now on may be missed by this look, and wakes the clock.
            self.clock_at.store(i64::MAX, Ordering::SeqCst);
            let pause = match self.look(began).await {
                Ok(next) => next.map_or(LONGEST_SLEEP, |next| next.since(self.now())),
                Err(store::Error::Closed) => return,
                Err(error) => {
                    tracing::warn!(why = error.with_sources(), "timers could not be read");
                    STORE_PAUSE.1
                }
            };
            if prune_at <= self.now() {
                prune_at = self.now().plus(self.prune().await);
            }
            let checks = self.settings.limits.lost_after.min(LONGEST_SLEEP);
            let pause = pause.min(LONGEST_SLEEP).min(checks).min(prune_at.since(self.now()));
            self.clock_at.store(self.now().plus(pause).0, Ordering::SeqCst);
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                () = self.clock_due.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Fires timers that are due, and begins work whose pause is over. Returns the time of the next.
    async fn look(self: &Arc<Self>, began: Timestamp) -> Result<Option<Timestamp>, store::Error> {
        let at = self.now();
        for queue in self.dispatcher.look_in_store_for_all() {
            self.pump(&queue);
        }
        self.messages_due.notify_one();
        // Results that could not be delivered while the runtime was down are on their way.
        let grace = began.plus(self.settings.limits.thread.call_timeout.unwrap_or(GRACE).min(GRACE));
        let (late_after, again) = if at < grace { (began, Some(grace)) } else { (Timestamp(i64::MIN), None) };
        while self.fire_timers(at, late_after).await? == More::Perhaps {
            if self.stop.is_cancelled() {
                return Err(store::Error::Closed);
            }
        }
        Ok([self.store.next_due(at).await?, again].into_iter().flatten().min())
    }

    async fn fire_timers(&self, at: Timestamp, late_after: Timestamp) -> Result<More, store::Error> {
        let mut shares = Shares::default();
        let mut timers: Vec<Timer> = Vec::new();
        for _ in 0..QUERIES {
            let found = self.store.due_timers(at, late_after, &shares.full(), ROWS).await?;
            // Each of the two kinds of timers has its own bound.
            if shares.take(found, |timer: &Timer| (timer.session, timer.clone()), &mut timers, ROWS)
                == More::No
            {
                break;
            }
        }
        if timers.is_empty() {
            return Ok(More::No);
        }
        let message = |timer: &Timer| {
            let input = match &timer.call {
                Some(call) => Input::TimerFired { call: call.clone() },
                None => Input::Due,
            };
            Message::new(Target::Key(timer.thread), input)
        };
        let results = self.store.apply(Lane::Internal, timers.iter().map(message).collect()).await;
        let failed = timers
            .into_iter()
            .zip(results)
            .filter_map(|(timer, result)| result.err().map(|error| (timer, error)));
        let mut put_off = Vec::new();
        for (timer, error) in failed {
            match error {
                store::Error::Closed | store::Error::Unavailable(_) => return Err(error),
                // It was overtaken, or cannot be applied: it must not stay in front of the others.
                _ => put_off.push(timer),
            }
        }
        if !put_off.is_empty() {
            self.store.put_off(put_off, Vec::new(), at, at.plus(PUT_OFF)).await?;
        }
        Ok(More::Perhaps)
    }

    /// Returns the pause until the next time.
    async fn prune(&self) -> Duration {
        let now = self.now();
        let keys_before = now.minus(self.settings.limits.event_marks_for);
        match self.store.prune(keys_before, now.minus(DELIVERIES_FOR)).await {
            Ok(true) => PRUNE_PAUSE,
            Ok(false) => PRUNE_EVERY,
            Err(error) => {
                tracing::warn!(why = error.with_sources(), "old rows could not be removed");
                PRUNE_EVERY
            }
        }
    }
}

/// Whether there may be more rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum More {
    No,
    Perhaps,
}

/// How much each session has had of its share.
pub(super) struct Shares<K> {
    taken: BTreeMap<SessionKey, usize>,
    /// Rows that were taken: a query finds those of sessions with a share left again.
    known: HashSet<K>,
}

impl<K> Default for Shares<K> {
    fn default() -> Shares<K> {
        Shares { taken: BTreeMap::new(), known: HashSet::new() }
    }
}

impl<K: Hash + Eq> Shares<K> {
    /// The sessions that have had their share.
    pub(super) fn full(&self) -> Vec<SessionKey> {
        self.taken.iter().filter(|(_, taken)| **taken >= PER_SESSION).map(|(session, _)| *session).collect()
    }

    /// Takes rows within the shares of their sessions. Says whether other sessions may be behind those whose share is
    /// full.
    pub(super) fn take<T>(
        &mut self,
        found: Vec<T>,
        key: impl Fn(&T) -> (SessionKey, K),
        taken: &mut Vec<T>,
        limit: usize,
    ) -> More {
        let full_before = self.full().len();
        let full_page = found.len() >= limit;
        for row in found {
            let (session, known) = key(&row);
            let share = self.taken.entry(session).or_default();
            if *share < PER_SESSION && self.known.insert(known) {
                *share += 1;
                taken.push(row);
            }
        }
        if full_page && self.full().len() > full_before { More::Perhaps } else { More::No }
    }
}
