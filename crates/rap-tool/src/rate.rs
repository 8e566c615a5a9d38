//! Rates: how often something may happen, with room for a burst.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

/// So many a second in the long run, and so many at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// How many a second. At least one.
    pub per_second: u32,
    /// How many at once after a pause. At least one.
    pub burst: u32,
}

impl Rate {
    /// So many a second, and so many at once.
    pub const fn new(per_second: u32, burst: u32) -> Self {
        Rate { per_second, burst }
    }

    fn interval(self) -> Duration {
        Duration::from_secs(1) / self.per_second.max(1)
    }
}

/// One stream of happenings, held to a rate. All it remembers is when the stream would be even again.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    even_at: Instant,
}

impl Pace {
    pub(crate) fn new() -> Self {
        Pace { even_at: Instant::now() }
    }

    /// Takes the next place in the stream: how long to wait for it.
    pub(crate) fn take(&mut self, rate: Rate, now: Instant) -> Duration {
        let even_at = self.even_at.max(now);
        self.even_at = even_at + rate.interval();
        let credit = rate.interval() * rate.burst.max(1).saturating_sub(1);
        even_at.saturating_duration_since(now + credit)
    }

    /// Takes the next place if it is free at once.
    fn try_take(&mut self, rate: Rate, now: Instant) -> bool {
        let mut next = *self;
        let free = next.take(rate, now).is_zero();
        if free {
            *self = next;
        }
        free
    }
}

/// A rate for each of a bounded set of keys.
pub(crate) struct Limiter<K> {
    rate: Rate,
    paces: Mutex<HashMap<K, Pace>>,
}

impl<K: Eq + Hash + Clone> Limiter<K> {
    pub(crate) fn new(rate: Rate) -> Self {
        Limiter { rate, paces: Mutex::default() }
    }

    /// Whether one more may happen now.
    pub(crate) fn admits(&self, key: &K) -> bool {
        let mut paces = self.paces.lock().expect("bug: a pace can not panic");
        let now = Instant::now();
        match paces.get_mut(key) {
            Some(pace) => pace.try_take(self.rate, now),
            None => paces.entry(key.clone()).or_insert_with(Pace::new).try_take(self.rate, now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves: SE-24
    #[test]
    fn a_pace_lets_a_burst_through_and_then_spreads() {
        let rate = Rate::new(10, 3);
        let start = Instant::now();
        let mut pace = Pace { even_at: start };
        let waits: Vec<u128> = (0..5).map(|_| pace.take(rate, start).as_millis()).collect();
        assert_eq!(waits, [0, 0, 0, 100, 200]);
        let later = start + Duration::from_secs(10);
        assert_eq!(pace.take(rate, later), Duration::ZERO);
    }

    /// Proves: TC-20, CN-22, LC-32
    #[tokio::test(start_paused = true)]
    async fn a_limiter_refuses_past_the_burst_and_recovers() {
        let limiter = Limiter::new(Rate::new(100, 200));
        let admitted = (0..1_000).filter(|_| limiter.admits(&"a")).count();
        assert_eq!(admitted, 200);
        assert!(limiter.admits(&"b"), "another caller is not affected");
        tokio::time::advance(Duration::from_secs(1)).await;
        let admitted = (0..1_000).filter(|_| limiter.admits(&"a")).count();
        assert_eq!(admitted, 100);
    }
}
