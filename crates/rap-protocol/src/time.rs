//! Points in time as plain data: the pure core has no clock, time comes to it with each message.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Milliseconds since the beginning of 1970, UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// This much later; stops at the end of time instead of wrapping.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Timestamp {
        Timestamp(self.0.saturating_add(millis(duration)))
    }

    /// This much earlier; stops at the beginning of time instead of wrapping.
    #[must_use]
    pub fn minus(self, duration: Duration) -> Timestamp {
        Timestamp(self.0.saturating_sub(millis(duration)))
    }

    /// How long ago `earlier` was; zero where it lies ahead.
    pub fn since(self, earlier: Timestamp) -> Duration {
        let elapsed = self.0.saturating_sub(earlier.0);
        Duration::from_millis(u64::try_from(elapsed).unwrap_or(0))
    }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Self {
        match time.duration_since(UNIX_EPOCH) {
            Ok(after) => Timestamp(millis(after)),
            Err(before) => Timestamp(-millis(before.duration())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_saturates_instead_of_wrapping() {
        assert_eq!(Timestamp(i64::MAX).plus(Duration::from_secs(1)), Timestamp(i64::MAX));
        assert_eq!(Timestamp(i64::MIN).minus(Duration::MAX), Timestamp(i64::MIN));
        assert_eq!(Timestamp(5).since(Timestamp(9)), Duration::ZERO);
        assert_eq!(Timestamp(9).since(Timestamp(5)), Duration::from_millis(4));
    }
}
