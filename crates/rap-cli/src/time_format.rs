//! Parses and formats points in time and durations for people.

use std::time::{Duration, SystemTime};

use rap_protocol::Timestamp;

pub fn now() -> Timestamp {
    SystemTime::now().into()
}

/// Parses a timestamp of the API, such as `2026-11-16T09:30:00.000Z`.
pub fn parse(text: &str) -> Option<Timestamp> {
    let (date, clock) = text.strip_suffix('Z')?.split_once('T')?;
    let mut date = date.splitn(3, '-').map(str::parse::<i64>);
    let (year, month, day) = (date.next()?.ok()?, date.next()?.ok()?, date.next()?.ok()?);
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, "0"));
    let mut clock = clock.splitn(3, ':').map(str::parse::<i64>);
    let (hour, minute, second) = (clock.next()?.ok()?, clock.next()?.ok()?, clock.next()?.ok()?);
    let millis: u32 = format!("{fraction:0<3}").get(..3)?.parse().ok()?;
    let is_date = (0..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    let is_clock = (0..24).contains(&hour) && (0..60).contains(&minute) && (0..=60).contains(&second);
    if !is_date || !is_clock {
        return None;
    }
    let seconds = days(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second;
    Some(Timestamp(seconds * 1000 + i64::from(millis)))
}

/// Days since 1970-01-01. Years begin in March here, so that a leap day is the last day of its year.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

/// Formats a time relative to now: `3 min ago`, `just now`, `in 2 h`.
pub fn relative(at: Timestamp, now: Timestamp) -> String {
    if at > now {
        return format!("in {}", short_duration(at.since(now)));
    }
    let elapsed = now.since(at);
    if elapsed < Duration::from_secs(1) {
        "just now".into()
    } else {
        format!("{} ago", short_duration(elapsed))
    }
}

/// Formats a duration in its largest unit, rounded down: `8 s`, `3 min`, `2 h`, `5 days`.
pub fn short_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (count, unit) = match seconds {
        0..60 => (seconds, "s"),
        60..3600 => (seconds / 60, "min"),
        3600..172_800 => (seconds / 3600, "h"),
        _ => (seconds / 86_400, "days"),
    };
    format!("{count} {unit}")
}

/// Formats a duration in its two largest units, rounded down: `12 s`, `1 min 12 s`, `2 h 5 min`.
pub fn long_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (below, unit) = match seconds {
        0..60 => (0, ""),
        60..3600 => (seconds % 60, "s"),
        3600..172_800 => (seconds % 3600 / 60, "min"),
        _ => (seconds % 86_400 / 3600, "h"),
    };
    let above = short_duration(duration);
    if below == 0 { above } else { format!("{above} {below} {unit}") }
}

/// Formats a duration with tenths of a second below 10 seconds: `0.4 s`, `12 s`, `3 min`.
pub fn precise_duration(duration: Duration) -> String {
    if duration < Duration::from_secs(10) {
        format!("{:.1} s", duration.as_secs_f64())
    } else {
        short_duration(duration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_of_the_api_are_parsed() {
        for at in [0, 951_782_400_000, 1_794_821_400_123, -1, 68_169_600_000, 4_107_542_399_999] {
            assert_eq!(parse(&Timestamp(at).to_rfc3339()), Some(Timestamp(at)));
        }
        for text in [
            "",
            "yesterday",
            "2026-13-01T00:00:00Z",
            "2026-11-16 09:30",
            "2026-11-16T09:30Z",
            "9223372036854775807-01-01T00:00:00Z",
            "2026-01-01T9223372036854775807:00:00Z",
            "2026-01-01T00:00:00.-99Z",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn times_and_durations_are_formatted() {
        let table = [
            (0, "just now"),
            (999, "just now"),
            (1_000, "1 s ago"),
            (59_999, "59 s ago"),
            (60_000, "1 min ago"),
            (3 * 3_600_000, "3 h ago"),
            (47 * 3_600_000, "47 h ago"),
            (48 * 3_600_000, "2 days ago"),
            (-90_000, "in 1 min"),
        ];
        for (millis, expected) in table {
            assert_eq!(relative(Timestamp(0), Timestamp(millis)), expected);
        }
        assert_eq!(precise_duration(Duration::from_millis(440)), "0.4 s");
        assert_eq!(precise_duration(Duration::from_secs(75)), "1 min");
        let table =
            [(9, "9 s"), (60, "1 min"), (75, "1 min 15 s"), (7500, "2 h 5 min"), (183_600, "2 days 3 h")];
        for (seconds, expected) in table {
            assert_eq!(long_duration(Duration::from_secs(seconds)), expected);
        }
    }
}
