//! Cron expressions and time zones. Pure functions.

use croner::parser::{CronParser, Seconds, Year};
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use jiff::{Timestamp as JiffTimestamp, Zoned};
use rap_protocol::Timestamp;

/// Maximum length of a cron expression, in bytes.
const CRON_BYTES: usize = 256;

/// Returns the next time after `after` at which a cron expression fires, or `None` if it never does. The error is a
/// sentence for the model.
pub(crate) fn next(cron: &str, timezone: &str, after: Timestamp) -> Result<Option<Timestamp>, String> {
    if cron.len() > CRON_BYTES {
        return Err(format!("a cron expression has at most {CRON_BYTES} characters"));
    }
    let parser = CronParser::builder().seconds(Seconds::Optional).year(Year::Disallowed).build();
    let pattern = parser.parse(cron).map_err(|error| {
        format!("`{cron}` is not a cron expression of five fields, or six with seconds: {error}")
    })?;
    let from = zoned(after, zone(timezone)?)?;
    Ok(pattern.find_next_occurrence(&from, false).ok().map(|next| timestamp(&next)))
}

/// Parses a time, either with an offset (`2026-11-16T08:00:00Z`) or as local time in `timezone`.
pub(crate) fn parse_time(time: &str, timezone: &str) -> Result<Timestamp, String> {
    if let Ok(time) = time.parse::<jiff::Timestamp>() {
        return Ok(Timestamp(time.as_millisecond()));
    }
    let civil: DateTime = time.parse().map_err(|_| {
        format!("`{time}` is not a time; write it like 2026-11-16T08:00:00 or 2026-11-16T08:00:00Z")
    })?;
    let zoned = civil.to_zoned(zone(timezone)?).map_err(|error| error.to_string())?;
    Ok(timestamp(&zoned))
}

/// Formats a time for users, in `timezone`.
pub(crate) fn format(at: Timestamp, timezone: &str) -> String {
    let zoned = zone(timezone).and_then(|zone| zoned(at, zone));
    zoned.map_or_else(|_| at.0.to_string(), |zoned| zoned.strftime("%Y-%m-%d %H:%M:%S %Z").to_string())
}

fn zone(name: &str) -> Result<TimeZone, String> {
    TimeZone::get(name)
        .map_err(|_| format!("`{name}` is not a time zone; write it like Europe/Berlin or UTC"))
}

fn zoned(at: Timestamp, zone: TimeZone) -> Result<Zoned, String> {
    Ok(JiffTimestamp::from_millisecond(at.0).map_err(|error| error.to_string())?.to_zoned(zone))
}

fn timestamp(zoned: &Zoned) -> Timestamp {
    Timestamp(zoned.timestamp().as_millisecond())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(time: &str) -> Timestamp {
        parse_time(time, "UTC").unwrap()
    }

    #[test]
    fn a_schedule_fires_in_its_time_zone() {
        let next = |cron, zone, after| next(cron, zone, at(after)).unwrap().unwrap();
        assert_eq!(next("0 8 * * *", "UTC", "2026-11-16T07:59:59Z"), at("2026-11-16T08:00:00Z"));
        assert_eq!(next("0 8 * * *", "UTC", "2026-11-16T08:00:00Z"), at("2026-11-17T08:00:00Z"));
        assert_eq!(next("0 8 * * *", "Europe/Berlin", "2026-11-16T07:00:00Z"), at("2026-11-17T07:00:00Z"));
        assert_eq!(next("0 8 * * *", "Europe/Berlin", "2026-07-01T07:00:00Z"), at("2026-07-02T06:00:00Z"));
        assert_eq!(next("0 9 * * MON", "UTC", "2026-11-16T10:00:00Z"), at("2026-11-23T09:00:00Z"));
        assert_eq!(next("*/15 * * * * *", "UTC", "2026-11-16T10:00:01Z"), at("2026-11-16T10:00:15Z"));
    }

    #[test]
    fn an_invalid_schedule_is_explained() {
        let wrong = |cron, zone| next(cron, zone, Timestamp(0)).unwrap_err();
        assert!(wrong("every day", "UTC").starts_with("`every day` is not a cron expression of five fields"));
        assert!(wrong("0 8 * * * * *", "UTC").contains("is not a cron expression"));
        assert!(wrong("0 8 * * *", "Mars/Base").starts_with("`Mars/Base` is not a time zone"));
        assert!(wrong(&"*".repeat(300), "UTC").contains("at most 256"));
    }

    #[test]
    fn a_date_that_never_occurs_is_detected_quickly() {
        let start = std::time::Instant::now();
        assert_eq!(next("0 0 30 2 *", "UTC", at("2026-11-16T10:00:00Z")), Ok(None));
        assert!(start.elapsed() < std::time::Duration::from_secs(2), "{:?}", start.elapsed());
    }

    #[test]
    fn a_time_is_parsed_in_its_time_zone() {
        assert_eq!(parse_time("2026-11-16T08:00", "Europe/Berlin"), Ok(at("2026-11-16T07:00:00Z")));
        assert_eq!(parse_time("2026-11-16T08:00:00+02:00", "Europe/Berlin"), Ok(at("2026-11-16T06:00:00Z")));
        assert!(parse_time("tomorrow", "UTC").unwrap_err().starts_with("`tomorrow` is not a time"));
        assert_eq!(format(at("2026-11-16T07:00:00Z"), "Europe/Berlin"), "2026-11-16 08:00:00 CET");
    }
}
