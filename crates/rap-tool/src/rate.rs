//! Rate limits with bursts.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

/// A rate limit: an average rate, and a burst after a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Average number per second. 0 counts as 1.
    pub per_second: u32,
    /// Number that may happen at once after a pause. 0 counts as 1.
    pub burst: u32,
}

impl Rate {
    /// Creates a rate of `per_second` with bursts of `burst`.
    pub const fn new(per_second: u32, burst: u32) -> Self {
        Rate { per_second, burst }
    }

    fn interval(self) -> Duration {
        Duration::from_secs(1) / self.per_second.max(1)
    }
}

/// State of one rate limit, as in the generic cell rate algorithm (GCRA).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Throttle {
    /// Time at which the next item would be due at the average rate.
    next_at: Instant,
}

impl Throttle {
    pub(crate) fn new() -> Self {
        Throttle { next_at: Instant::now() }
    }

    /// Counts one item and returns how long to wait before it.
    pub(crate) fn reserve(&mut self, rate: Rate, now: Instant) -> Duration {
        let next_at = self.next_at.max(now);
        self.next_at = next_at + rate.interval();
        let credit = rate.interval() * rate.burst.max(1).saturating_sub(1);
        next_at.saturating_duration_since(now + credit)
    }

    /// Counts further items that have already happened, up to `longest`.
    fn charge(&mut self, rate: Rate, items: u32, longest: Duration, now: Instant) {
        let charged = self.next_at.max(now) + rate.interval() * items;
        self.next_at = charged.min(now + longest).max(self.next_at);
    }

    /// Counts one item if it need not wait. Returns false otherwise.
    fn try_reserve(&mut self, rate: Rate, now: Instant) -> bool {
        let mut next = *self;
        let free = next.reserve(rate, now).is_zero();
        if free {
            *self = next;
        }
        free
    }
}

/// Time after which a key is admitted again, whatever its items have cost.
const LONGEST_CHARGE: Duration = Duration::from_secs(60);

/// A rate limit for each key. The caller bounds the set of keys.
pub(crate) struct Limiter<K> {
    rate: Rate,
    throttles: Mutex<HashMap<K, Throttle>>,
}

impl<K: Eq + Hash + Clone> Limiter<K> {
    pub(crate) fn new(rate: Rate) -> Self {
        Limiter { rate, throttles: Mutex::default() }
    }

    /// Counts one item of this key. Returns false if the rate is exceeded.
    pub(crate) fn admits(&self, key: &K) -> bool {
        let mut throttles = self.throttles.lock().expect("bug: nothing panics under this lock");
        let now = Instant::now();
        match throttles.get_mut(key) {
            Some(throttle) => throttle.try_reserve(self.rate, now),
            None => throttles.entry(key.clone()).or_insert_with(Throttle::new).try_reserve(self.rate, now),
        }
    }

    /// Counts the cost of an item of this key that was admitted before and turned out to be expensive: it counts as
    /// `items` more.
    pub(crate) fn charge(&self, key: &K, items: usize) {
        let items = u32::try_from(items).unwrap_or(u32::MAX);
        if items == 0 {
            return;
        }
        let mut throttles = self.throttles.lock().expect("bug: nothing panics under this lock");
        let throttle = throttles.entry(key.clone()).or_insert_with(Throttle::new);
        throttle.charge(self.rate, items, LONGEST_CHARGE, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves: SE-24
    #[test]
    fn a_throttle_allows_a_burst_and_then_limits_the_rate() {
        let rate = Rate::new(10, 3);
        let start = Instant::now();
        let mut throttle = Throttle { next_at: start };
        let waits: Vec<u128> = (0..5).map(|_| throttle.reserve(rate, start).as_millis()).collect();
        assert_eq!(waits, [0, 0, 0, 100, 200]);
        let later = start + Duration::from_secs(10);
        assert_eq!(throttle.reserve(rate, later), Duration::ZERO);
    }

    /// Proves: TC-20, CN-22, LC-32
    #[tokio::test(start_paused = true)]
    async fn a_limiter_refuses_past_the_burst_and_recovers() {
        let limiter = Limiter::new(Rate::new(100, 200));
        let admitted = (0..1_000).filter(|_| limiter.admits(&"a")).count();
        assert_eq!(admitted, 200);
        assert!(limiter.admits(&"b"), "another caller is not affected");
        limiter.charge(&"c", 1_200);
        assert!(!limiter.admits(&"c"), "an expensive item is paid for");
        tokio::time::advance(Duration::from_secs(1)).await;
        let admitted = (0..1_000).filter(|_| limiter.admits(&"a")).count();
        assert_eq!(admitted, 100);
        tokio::time::advance(Duration::from_secs(10)).await;
        assert!(limiter.admits(&"c"));
        limiter.charge(&"c", usize::MAX);
        assert!(!limiter.admits(&"c"));
        tokio::time::advance(LONGEST_CHARGE).await;
        assert!(limiter.admits(&"c"), "nobody is refused for ever");
    }
}
