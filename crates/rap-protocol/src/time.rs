//! Points in time as plain data. The code that decides never reads a clock: it gets the time as an argument.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Point in time, in milliseconds since 1970-01-01 00:00:00 UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// Returns the time `duration` later. It saturates instead of wrapping.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Timestamp {
        Timestamp(self.0.saturating_add(millis(duration)))
    }

    /// Returns the time `duration` earlier. It saturates instead of wrapping.
    #[must_use]
    pub fn minus(self, duration: Duration) -> Timestamp {
        Timestamp(self.0.saturating_sub(millis(duration)))
    }

    /// Returns the time elapsed since `earlier`; zero if `earlier` is later than `self`.
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
