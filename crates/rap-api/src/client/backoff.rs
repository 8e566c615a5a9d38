//! Delays between attempts to connect or to send.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(250);

/// Exponential backoff: each delay is twice as long as the one before, up to [`Backoff::MAX`].
#[derive(Debug)]
pub struct Backoff {
    next: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Backoff { next: FIRST }
    }
}

impl Backoff {
    /// Longest delay.
    pub const MAX: Duration = Duration::from_secs(5);

    /// Returns the next delay.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (delay * 2).min(Backoff::MAX);
        delay
    }

    /// Begins again with the shortest delay, because an attempt has succeeded.
    pub fn reset(&mut self) {
        *self = Backoff::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_a_bound_until_reset() {
        let mut backoff = Backoff::default();
        let delays: Vec<_> = (0..7).map(|_| backoff.next_delay().as_millis()).collect();
        assert_eq!(delays, [250, 500, 1000, 2000, 4000, 5000, 5000]);
        backoff.reset();
        assert_eq!(backoff.next_delay(), FIRST);
    }
}
