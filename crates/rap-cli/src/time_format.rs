//! Formats points in time and durations for people.

use std::time::Duration;

use rap_api::Time;

/// Formats a time relative to now: `3 min ago`, `just now`, `in 2 h`.
pub fn relative(at: Time, now: Time) -> String {
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

/// Formats a time relative to now and as a time of day in UTC, with the date unless it is today: `in 2 h, at 14:00:00 UTC`.
pub fn exact(at: Time, now: Time) -> String {
    format!("{}, at {}", exact_relative(at, now), clock(at, now))
}

/// Formats a time relative to now in its two largest units: `in 1 h 30 min`, `5 s ago`.
pub fn exact_relative(at: Time, now: Time) -> String {
    if at > now { format!("in {}", long_duration(rounded(at.since(now)))) } else { relative(at, now) }
}

/// Formats a time of day in UTC, with the date unless it is today.
pub fn clock(at: Time, now: Time) -> String {
    let (at, now) = (at.to_string(), now.to_string());
    let [date, time] = [&at[..10], &at[11..19]];
    if now.starts_with(date) { format!("{time} UTC") } else { format!("{date} {time} UTC") }
}

/// Rounds a duration to the smaller unit that is shown, so that a timer of two hours that was just set ends in 2 h, not
/// in 1 h 59 min.
fn rounded(duration: Duration) -> Duration {
    let seconds = duration.as_millis().div_ceil(1000) as u64;
    let unit = match seconds {
        0..3_570 => 1,
        3_570..171_000 => 60,
        _ => 3600,
    };
    Duration::from_secs((seconds + unit / 2) / unit * unit)
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
            assert_eq!(relative(Time::from_millis(0), Time::from_millis(millis)), expected);
        }
        assert_eq!(precise_duration(Duration::from_millis(440)), "0.4 s");
        assert_eq!(precise_duration(Duration::from_secs(75)), "1 min");
        let now = Time::from_millis(1_794_821_400_000);
        let after = |millis: i64| Time::from_millis(now.as_millis() + millis);
        assert_eq!(exact(after(7_199_400), now), "in 2 h, at 11:29:59 UTC");
        assert_eq!(exact(after(7_200_000), now), "in 2 h, at 11:30:00 UTC");
        assert_eq!(exact_relative(after(7_171_000), now), "in 2 h");
        assert_eq!(exact_relative(after(7_100_000), now), "in 1 h 58 min");
        assert_eq!(exact_relative(after(59_400), now), "in 1 min");
        assert_eq!(exact(after(5_400_000), now), "in 1 h 30 min, at 11:00:00 UTC");
        assert_eq!(exact(after(86_400_000), now), "in 24 h, at 2026-11-17 09:30:00 UTC");
        assert_eq!(exact(after(-5_000), now), "5 s ago, at 09:29:55 UTC");
        let table =
            [(9, "9 s"), (60, "1 min"), (75, "1 min 15 s"), (7500, "2 h 5 min"), (183_600, "2 days 3 h")];
        for (seconds, expected) in table {
            assert_eq!(long_duration(Duration::from_secs(seconds)), expected);
        }
    }
}
