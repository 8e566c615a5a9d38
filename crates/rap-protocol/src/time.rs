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

    /// Formats the time as RFC 3339 in UTC with milliseconds, such as `2026-11-16T09:30:00.000Z`. Times outside of the
    /// years 0 to 9999, which RFC 3339 cannot express, are clamped to that range.
    pub fn to_rfc3339(self) -> String {
        const FIRST: i64 = -62_167_219_200_000;
        const LAST: i64 = 253_402_300_799_999;
        let at = self.0.clamp(FIRST, LAST);
        let (days, rest) = (at.div_euclid(86_400_000), at.rem_euclid(86_400_000));
        let (year, month, day) = civil(days);
        let (seconds, millis) = (rest / 1000, rest % 1000);
        let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
    }
}

/// Converts days since 1970-01-01 to year, month and day. Internally a year begins in March, so that a leap day is the
/// last day of its year.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month, day)
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
    fn times_are_formatted_as_rfc_3339() {
        let table = [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_794_821_400_123, "2026-11-16T09:30:00.123Z"),
            (-1, "1969-12-31T23:59:59.999Z"),
            (i64::MAX, "9999-12-31T23:59:59.999Z"),
            (i64::MIN, "0000-01-01T00:00:00.000Z"),
        ];
        for (at, expected) in table {
            assert_eq!(Timestamp(at).to_rfc3339(), expected);
        }
    }

    #[test]
    fn time_saturates_instead_of_wrapping() {
        assert_eq!(Timestamp(i64::MAX).plus(Duration::from_secs(1)), Timestamp(i64::MAX));
        assert_eq!(Timestamp(i64::MIN).minus(Duration::MAX), Timestamp(i64::MIN));
        assert_eq!(Timestamp(5).since(Timestamp(9)), Duration::ZERO);
        assert_eq!(Timestamp(9).since(Timestamp(5)), Duration::from_millis(4));
    }
}
