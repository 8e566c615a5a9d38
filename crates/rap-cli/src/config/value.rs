//! Parses settings into typed values. A problem says what was expected.

use std::ops::RangeInclusive;
use std::time::Duration;

use rap_protocol::limits::FOUND_CHARS;

use super::base_url::BaseUrl;
use super::document::{Setting, Value};
use super::mistake::Problem;

/// Longest duration: 100 years. It can be added to any point in time without overflow.
const MAX_DURATION: Duration = Duration::from_hours(36_500 * 24);

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const GIB: u64 = 1024 * MIB;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Zero {
    Allowed,
    Refused,
}

pub(super) fn text(setting: &Setting) -> Result<&str, Problem> {
    match &setting.value {
        Value::Text(text) | Value::Untyped(text) => Ok(text),
        _ => Err(unexpected("a string", setting)),
    }
}

/// Parses a text that is not secret: errors show it.
pub(super) fn parse_text<T>(
    setting: &Setting,
    expected: &str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<T, Problem> {
    match &setting.value {
        Value::Text(text) | Value::Untyped(text) => parse(text).ok_or_else(|| unexpected(expected, setting)),
        _ => Err(unexpected(expected, setting)),
    }
}

pub(super) fn boolean(setting: &Setting) -> Result<bool, Problem> {
    match &setting.value {
        Value::Boolean(boolean) => Ok(*boolean),
        Value::Untyped(text) => text.parse().map_err(|_| unexpected("true or false", setting)),
        _ => Err(unexpected("true or false", setting)),
    }
}

pub(super) fn base_url(setting: &Setting) -> Result<BaseUrl, Problem> {
    BaseUrl::new(text(setting)?).ok_or(Problem::Expected(BaseUrl::EXPECTED))
}

/// Parses an integer within bounds.
pub(super) fn count(bounds: RangeInclusive<u32>) -> impl FnOnce(&Setting) -> Result<u32, Problem> {
    move |setting| {
        let number = match &setting.value {
            Value::Integer(number) => u32::try_from(*number).ok(),
            Value::Untyped(text) => text.parse().ok(),
            _ => None,
        };
        let (least, most) = (bounds.start(), bounds.end());
        number
            .filter(|number| bounds.contains(number))
            .ok_or_else(|| unexpected(&format!("a whole number from {least} to {most}"), setting))
    }
}

/// Parses a percentage.
pub(super) fn percent(setting: &Setting) -> Result<u32, Problem> {
    parse_text(setting, "a percentage from \"1%\" to \"100%\"", |text| {
        let (number, unit) = number_and_unit(text)?;
        let number = u32::try_from(number).ok()?;
        (unit == "%" && (1..=100).contains(&number)).then_some(number)
    })
}

/// Parses a number of bytes within bounds.
pub(super) fn size(bounds: RangeInclusive<u64>) -> impl FnOnce(&Setting) -> Result<u64, Problem> {
    move |setting| {
        let bytes = match &setting.value {
            Value::Integer(bytes) => u64::try_from(*bytes).ok(),
            Value::Text(text) | Value::Untyped(text) => parse_size(text),
            _ => None,
        };
        bytes.filter(|bytes| bounds.contains(bytes)).ok_or_else(|| {
            let (least, most) = (write_size(*bounds.start()), write_size(*bounds.end()));
            unexpected(&format!("a size from \"{least}\" to \"{most}\""), setting)
        })
    }
}

pub(super) fn duration(zero: Zero) -> impl FnOnce(&Setting) -> Result<Duration, Problem> {
    move |setting| {
        let expected = match zero {
            Zero::Allowed => "a duration such as \"250ms\", \"60s\", \"10m\", \"2h\" or \"7d\"",
            Zero::Refused => "a duration above zero such as \"250ms\", \"60s\", \"10m\", \"2h\" or \"7d\"",
        };
        let fits = |duration: &Duration| zero == Zero::Allowed || !duration.is_zero();
        parse_text(setting, expected, |text| parse_duration(text).filter(fits))
    }
}

/// Parses an integer above zero, or `"none"`.
pub(super) fn optional_count(setting: &Setting) -> Result<Option<u32>, Problem> {
    let none = match &setting.value {
        Value::Text(text) | Value::Untyped(text) => text == "none",
        _ => false,
    };
    if none {
        return Ok(None);
    }
    let expected = format!("\"none\", or a whole number from 1 to {}", u32::MAX);
    count(1..=u32::MAX)(setting).map(Some).map_err(|_| unexpected(&expected, setting))
}

/// Parses a duration above zero, or `"none"`.
pub(super) fn optional_duration(setting: &Setting) -> Result<Option<Duration>, Problem> {
    let expected = "\"none\", or a duration above zero such as \"60s\", \"10m\" or \"2h\"";
    parse_text(setting, expected, |text| match text {
        "none" => Some(None),
        _ => parse_duration(text).filter(|duration| !duration.is_zero()).map(Some),
    })
}

/// Parses a duration above zero, or `"never"`.
pub(super) fn duration_or_never(setting: &Setting) -> Result<Option<Duration>, Problem> {
    let expected = "\"never\", or a duration above zero such as \"12h\" or \"30d\"";
    parse_text(setting, expected, |text| match text {
        "never" => Some(None),
        _ => parse_duration(text).filter(|duration| !duration.is_zero()).map(Some),
    })
}

/// Parses digits and a unit: `250ms`, `60s`, `10m`, `2h`, `7d`.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let (number, unit) = number_and_unit(text)?;
    let milliseconds = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return None,
    };
    let duration = Duration::from_millis(number.checked_mul(milliseconds)?);
    (duration <= MAX_DURATION).then_some(duration)
}

/// Parses digits and a unit, or digits alone: `8MiB`, `256KiB`, `4096`.
fn parse_size(text: &str) -> Option<u64> {
    let (number, unit) = number_and_unit(text)?;
    let bytes = match unit {
        "" | "B" => 1,
        "KiB" => KIB,
        "MiB" => MIB,
        "GiB" => GIB,
        _ => return None,
    };
    number.checked_mul(bytes)
}

fn number_and_unit(text: &str) -> Option<(u64, &str)> {
    let end = text.bytes().take_while(u8::is_ascii_digit).count();
    let (digits, unit) = text.split_at(end);
    Some((digits.parse().ok()?, unit))
}

/// Formats a number of bytes as [`size`] parses it.
pub(super) fn write_size(bytes: u64) -> String {
    match bytes {
        _ if bytes >= MIB && bytes.is_multiple_of(MIB) => format!("{}MiB", bytes / MIB),
        _ if bytes >= KIB && bytes.is_multiple_of(KIB) => format!("{}KiB", bytes / KIB),
        _ => format!("{bytes}B"),
    }
}

/// Formats a duration as [`duration`] parses it, in the largest unit of which it has at least two, or in seconds: `1s`,
/// `60s`, `24h`, `7d`.
pub(super) fn write_duration(duration: Duration) -> String {
    let milliseconds = duration.as_millis();
    let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s")];
    let least = |unit: u128| if unit == 1_000 { 1 } else { 2 };
    let fits = |unit: u128| milliseconds.is_multiple_of(unit) && milliseconds / unit >= least(unit);
    match units.into_iter().find(|(unit, _)| fits(*unit)) {
        Some((unit, name)) => format!("{}{name}", milliseconds / unit),
        None => format!("{milliseconds}ms"),
    }
}

/// A problem that shows the value. Not for secrets.
pub(super) fn unexpected(expected: &str, setting: &Setting) -> Problem {
    let found = match &setting.value {
        Value::Text(text) | Value::Untyped(text) => format!("{:?}", shortened(text)),
        Value::Integer(number) => number.to_string(),
        Value::Boolean(boolean) => boolean.to_string(),
        other => other.kind().to_owned(),
    };
    Problem::Found { expected: expected.to_owned(), found }
}

fn shortened(text: &str) -> String {
    let mut short: String = text.chars().take(FOUND_CHARS).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_number_and_a_unit() {
        let table = [("0s", 0), ("250ms", 250), ("60s", 60_000), ("10m", 600_000), ("2h", 7_200_000)];
        for (text, expected) in table {
            assert_eq!(parse_duration(text), Some(Duration::from_millis(expected)), "{text}");
        }
        assert_eq!(parse_duration("7d"), Some(Duration::from_hours(7 * 24)));
        assert_eq!(parse_duration("36500d"), Some(MAX_DURATION));
    }

    #[test]
    fn other_texts_are_not_durations() {
        let bad = [
            "",
            "s",
            "60",
            "60 s",
            "1.5h",
            "-1s",
            "+1s",
            "1w",
            "60S",
            "none",
            "36501d",
            "99999999999999999999s",
        ];
        for text in bad {
            assert_eq!(parse_duration(text), None, "{text}");
        }
    }

    #[test]
    fn sizes_have_a_number_and_an_optional_unit() {
        let table =
            [("0", 0), ("4096", 4096), ("12B", 12), ("256KiB", 262_144), ("8MiB", 8_388_608), ("1GiB", GIB)];
        for (text, expected) in table {
            assert_eq!(parse_size(text), Some(expected), "{text}");
        }
        for text in ["", "MiB", "8MB", "8 MiB", "8mib", "-1", "1.5MiB", "99999999999GiB"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }

    #[test]
    fn durations_are_written_as_they_are_read() {
        for text in ["0ms", "999ms", "1500ms", "1s", "5s", "60s", "90s", "2m", "10m", "24h", "7d"] {
            assert_eq!(write_duration(parse_duration(text).unwrap()), text);
        }
    }

    #[test]
    fn sizes_are_written_as_they_are_read() {
        for text in ["1B", "1023B", "1KiB", "256KiB", "8MiB"] {
            assert_eq!(write_size(parse_size(text).unwrap()), text);
        }
    }
}
