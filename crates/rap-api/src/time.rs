//! Points in time as the API writes them.

use std::borrow::Cow;
use std::fmt::{self, Display};
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Point in time with a precision of milliseconds. In JSON it is an RFC 3339 timestamp in UTC.
///
/// ```
/// use rap_api::Time;
///
/// let time: Time = "2026-11-16T10:30:00+01:00".parse()?;
/// assert_eq!(time.to_string(), "2026-11-16T09:30:00.000Z");
/// # Ok::<(), rap_api::TimeError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(jiff::Timestamp);

/// A text is not an RFC 3339 timestamp.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimeError(());

impl Display for TimeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("expected an RFC 3339 timestamp such as 2026-11-16T09:30:00.000Z")
    }
}

impl std::error::Error for TimeError {}

impl Time {
    /// Returns the current time of the system's clock.
    pub fn now() -> Time {
        SystemTime::now().into()
    }

    /// Returns the time so many milliseconds after 1970-01-01 00:00:00 UTC. Times outside of the years 0 to 9999,
    /// which RFC 3339 cannot express, are clamped to that range.
    pub fn from_millis(millis: i64) -> Time {
        /// Beginning of the year 0.
        const FIRST: i64 = -62_167_219_200_000;
        Time(jiff::Timestamp::from_millisecond(millis.max(FIRST)).unwrap_or(jiff::Timestamp::MAX))
    }

    /// Returns the number of milliseconds since 1970-01-01 00:00:00 UTC.
    pub fn as_millis(self) -> i64 {
        self.0.as_millisecond()
    }

    /// Returns the time elapsed since `earlier`; zero if `earlier` is later than `self`.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_millis(u64::try_from(self.as_millis() - earlier.as_millis()).unwrap_or(0))
    }
}

impl From<SystemTime> for Time {
    fn from(time: SystemTime) -> Time {
        let millis = |duration: Duration| i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
        Time::from_millis(match time.duration_since(UNIX_EPOCH) {
            Ok(after) => millis(after),
            Err(before) => -millis(before.duration()),
        })
    }
}

impl Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3}", self.0)
    }
}

impl FromStr for Time {
    type Err = TimeError;

    fn from_str(text: &str) -> Result<Time, TimeError> {
        let at: jiff::Timestamp = text.parse().map_err(|_| TimeError(()))?;
        Ok(Time::from_millis(at.as_millisecond()))
    }
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Time, D::Error> {
        Cow::<str>::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Time {
    fn schema_name() -> Cow<'static, str> {
        "Time".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({"type": "string", "format": "date-time"})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rfc_3339_in_utc_with_milliseconds() {
        let table = [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_794_821_400_123, "2026-11-16T09:30:00.123Z"),
            (-1, "1969-12-31T23:59:59.999Z"),
            (i64::MIN, "0000-01-01T00:00:00.000Z"),
        ];
        for (at, expected) in table {
            let time = Time::from_millis(at);
            assert_eq!(time.to_string(), expected);
            assert_eq!(expected.parse(), Ok(time));
        }
        let last = Time::from_millis(i64::MAX).to_string();
        assert!(last.starts_with("9999-12-30T"), "{last}");
        assert_eq!("2026-11-16T09:30:00.123456Z".parse(), Ok(Time::from_millis(1_794_821_400_123)));
    }

    #[test]
    fn other_texts_are_not_times() {
        for text in [
            "",
            "yesterday",
            "2026-13-01T00:00:00Z",
            "2026-11-16 09:30",
            "9223372036854775807-01-01T00:00:00Z",
        ] {
            assert_eq!(text.parse::<Time>(), Err(TimeError(())), "{text}");
        }
    }

    #[test]
    fn elapsed_time_is_never_negative() {
        assert_eq!(Time::from_millis(5).since(Time::from_millis(9)), Duration::ZERO);
        assert_eq!(Time::from_millis(9).since(Time::from_millis(5)), Duration::from_millis(4));
    }
}
