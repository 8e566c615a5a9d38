//! The clock: fires timers, starts work whose retry time has come, and prunes expired rows.

use std::collections::{BTreeMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rap_agent::Input;
use rap_protocol::Timestamp;
use tokio::time::Instant;

use super::fallback::Outages;
use super::{Engine, STORE_PAUSE};
use crate::store::{
    self, LongestPauses, Message, MessageClass, PageRequest, SessionKey, Target, Timer, TimerRow, Visibility,
};

/// Longest time that the clock sleeps.
pub(super) const LONGEST_SLEEP: Duration = Duration::from_secs(60);
/// Maximum number of rows that one query reads.
pub(super) const ROWS: usize = 1024;
/// Maximum number of rows of one session in a batch, so that other sessions have their turn.
pub(super) const PER_SESSION: usize = 64;
/// Maximum number of queries for one batch. Each skips the sessions that have reached their share.
pub(super) const MAX_QUERIES: usize = 8;
/// Delay of a timer or message that could not be applied.
pub(super) const POSTPONE_BY: Duration = Duration::from_secs(60);
/// Interval at which expired rows are removed, and the pause between two batches of them.
const PRUNE_EVERY: Duration = Duration::from_secs(600);
const PRUNE_PAUSE: Duration = Duration::from_millis(100);
/// Time for which the delivery log keeps a row.
const DELIVERIES_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// Grace period after a start for calls that timed out while the runtime was down. A shorter `call_timeout` replaces
/// it.
const TIMEOUT_GRACE: Duration = Duration::from_secs(30);

/// Longest pauses of stored work.
const PAUSES: LongestPauses = LongestPauses {
    retry: super::run::LONGEST_RETRY,
    message: POSTPONE_BY,
    alert: super::alerts::LONGEST_RETRY,
};
/// Difference between the wall clock and the time that has passed which does not count as a clock that was set back.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(5);

/// State of the check for pauses that have become too long.
struct PauseCheck {
    /// Time of the last look at the clock.
    at: (Timestamp, Instant),
    /// Timers that have to be looked at again; `None` if there is no reason for a check.
    needed: Option<TimerCheck>,
}

/// Timers that may have been set before the clock was set back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TimerCheck {
    /// Those of threads whose last step is in the future. The clock may have been set back while no process was running.
    SetInFuture,
    /// All of them. Since the clock was set back, some threads have made steps.
    All,
}

impl Engine {
    pub(super) async fn run_clock(self: Arc<Self>) {
        let began = (self.now(), Instant::now());
        let mut prune_at = began.1 + PRUNE_EVERY;
        let mut pauses = PauseCheck { at: began, needed: Some(TimerCheck::SetInFuture) };
        loop {
            self.end_long_pauses(&mut pauses).await;
            // Anything that becomes due from now on may be missed by this pass, so it has to wake the clock.
            self.clock_at.store(i64::MAX, Ordering::SeqCst);
            let pause = match self.fire_due(began).await {
                Ok(next) => next.map_or(LONGEST_SLEEP, |next| next.since(self.now())),
                Err(store::Error::Closed) => return,
                Err(error) => {
                    tracing::warn!(why = error.with_sources(), "timers could not be read");
                    STORE_PAUSE.1
                }
            };
            if prune_at <= Instant::now() {
                prune_at = Instant::now() + self.prune().await;
            }
            let checks = self.settings.limits.lost_after.min(LONGEST_SLEEP);
            let pause = pause.min(LONGEST_SLEEP).min(checks).min(prune_at - Instant::now());
            self.clock_at.store(self.now().plus(pause).0, Ordering::SeqCst);
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                () = self.clock_due.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Ends pauses that have become too long because the clock was set back, and lets timers of threads start again.
    async fn end_long_pauses(&self, check: &mut PauseCheck) {
        let (now, at) = (self.now(), Instant::now());
        let expected = check.at.0.plus(at - check.at.1);
        check.at = (now, at);
        if now.plus(CLOCK_TOLERANCE) < expected {
            check.needed = Some(TimerCheck::All);
            // The times of failures are in the future now.
            *self.outages() = Outages::default();
            tracing::warn!(seconds = expected.since(now).as_secs(), "the clock was set back");
        }
        let Some(timers) = check.needed else { return };
        let ended = async {
            self.store.end_long_pauses(now, PAUSES).await?;
            self.recheck_timers(timers).await
        };
        match ended.await {
            Ok(()) => check.needed = None,
            Err(error) => tracing::warn!(
                why = error.with_sources(),
                "pauses may last too long after the clock was set back"
            ),
        }
    }

    /// Lets the rules look at timers. They move those that were set before the clock was set back.
    async fn recheck_timers(&self, check: TimerCheck) -> Result<(), store::Error> {
        let mut page_request = PageRequest::first(ROWS);
        loop {
            let page = self.store.timers(&Visibility::All, page_request).await?;
            let message = |timer: TimerRow| {
                let input = match timer.call {
                    Some(call) => Input::TimerFired { call },
                    None => Input::Due,
                };
                Message::new(Target::Id(timer.thread), input)
            };
            let now = self.now();
            let early = page
                .rows
                .into_iter()
                .filter(|timer| timer.at > now && (check == TimerCheck::All || timer.set_by > now));
            let applied = self.store.apply(MessageClass::Internal, early.map(message).collect()).await;
            for error in applied.into_iter().filter_map(Result::err) {
                if matches!(error, store::Error::Closed | store::Error::Unavailable(_)) {
                    return Err(error);
                }
            }
            let Some(after) = page.next else { return Ok(()) };
            page_request = PageRequest { after, limit: ROWS };
        }
    }

    /// Fires due timers and starts work whose retry time has come. Returns the next due time.
    async fn fire_due(
        self: &Arc<Self>,
        (began, began_at): (Timestamp, Instant),
    ) -> Result<Option<Timestamp>, store::Error> {
        let at = self.now();
        for queue in self.dispatcher.check_store_for_all() {
            self.fill_slots(&queue);
        }
        self.messages_due.notify_one();
        // Tools may still be retrying results that they could not deliver while the runtime was down.
        let grace = self.settings.limits.thread.call_timeout.unwrap_or(TIMEOUT_GRACE).min(TIMEOUT_GRACE);
        let left = grace.saturating_sub(began_at.elapsed());
        let (late_after, again) =
            if left.is_zero() { (Timestamp(i64::MIN), None) } else { (began, Some(at.plus(left))) };
        while self.fire_timers(at, late_after).await? == More::Maybe {
            if self.stop.is_cancelled() {
                return Err(store::Error::Closed);
            }
        }
        Ok([self.store.next_due(at).await?, again].into_iter().flatten().min())
    }

    async fn fire_timers(&self, at: Timestamp, late_after: Timestamp) -> Result<More, store::Error> {
        let mut shares = Shares::default();
        let mut timers: Vec<Timer> = Vec::new();
        for _ in 0..MAX_QUERIES {
            let found = self.store.due_timers(at, late_after, &shares.full(), ROWS).await?;
            // The store limits each of the two kinds of timers separately.
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
        rap_io::crash::point("before_timer");
        let results = self.store.apply(MessageClass::Internal, timers.iter().map(message).collect()).await;
        let failed = timers
            .into_iter()
            .zip(results)
            .filter_map(|(timer, result)| result.err().map(|error| (timer, error)));
        let mut postponed = Vec::new();
        for (timer, error) in failed {
            match error {
                store::Error::Closed | store::Error::Unavailable(_) => return Err(error),
                // The timer is out of date or cannot be applied. It must not block the timers after it.
                _ => {
                    self.set_aside_if_damaged(&Target::Key(timer.thread), &error).await;
                    postponed.push(timer);
                }
            }
        }
        if !postponed.is_empty() {
            self.store.postpone_due(postponed, Vec::new(), at, at.plus(POSTPONE_BY)).await?;
        }
        Ok(More::Maybe)
    }

    /// Removes expired rows. Returns the time until it should run again.
    async fn prune(&self) -> Duration {
        let now = self.now();
        self.expire_alerts().await;
        let keys_before = now.minus(self.settings.limits.idempotency_key_lifetime);
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

/// Result of a paged query: another query may find more rows, or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum More {
    No,
    Maybe,
}

/// Number of rows that each session has in the current batch.
pub(super) struct Shares<K> {
    taken: BTreeMap<SessionKey, usize>,
    /// Rows in the batch. A later query finds rows again if their session has not reached its share.
    known: HashSet<K>,
}

impl<K> Default for Shares<K> {
    fn default() -> Shares<K> {
        Shares { taken: BTreeMap::new(), known: HashSet::new() }
    }
}

impl<K: Hash + Eq> Shares<K> {
    /// Returns the sessions that have reached their share.
    pub(super) fn full(&self) -> Vec<SessionKey> {
        self.taken.iter().filter(|(_, taken)| **taken >= PER_SESSION).map(|(session, _)| *session).collect()
    }

    /// Moves rows into the batch within the shares of their sessions. Returns [`More::Maybe`] if rows of other sessions
    /// may follow those of sessions that have reached their share.
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
        if full_page && self.full().len() > full_before { More::Maybe } else { More::No }
    }
}
