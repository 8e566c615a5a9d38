//! `remind` and `every`: events at a time. They survive a restart, after which one event makes up for all times that
//! were missed.

use std::time::{Duration, SystemTime};

use croner::parser::{CronParser, Seconds, Year};
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use rap_tool::prelude::*;

/// Longest wait before the clock is read again. The clock may be set, and the machine may sleep.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// Maximum length of a cron expression, in bytes.
const CRON_BYTES: usize = 256;
/// Longest time until a reminder: ten years.
const LONGEST_SECONDS: u64 = 10 * 366 * 24 * 3600;

/// Reminds you once: the text arrives as an event after a number of seconds, or at a time. Give one of the two.
#[derive(Deserialize, JsonSchema)]
struct Remind {
    /// Number of seconds from now.
    #[schemars(range(min = 0, max = 316_224_000))]
    in_seconds: Option<u64>,
    /// Time with its offset, such as 2026-11-16T08:00:00Z.
    at: Option<String>,
    /// Text of the event.
    #[schemars(length(max = 10_000))]
    text: String,
}

/// Reminds you again and again, until you cancel the subscription: by a cron expression, or every number of seconds. Give
/// one of the two.
#[derive(Deserialize, JsonSchema)]
struct Every {
    /// Cron expression of five fields, or six with seconds, in UTC.
    cron: Option<String>,
    /// Number of seconds between two events.
    #[schemars(range(min = 1, max = 316_224_000))]
    seconds: Option<u64>,
    /// Text of the events.
    #[schemars(length(max = 10_000))]
    text: String,
}

pub(crate) fn server() -> ToolServer {
    ToolServer::new("timer")
        .description("Reminds at a time, or again and again.")
        .offer(Tool::subscription("remind", remind).read_only())
        .offer(Tool::subscription("every", every).read_only())
}

async fn remind(args: Remind, subscribe: Subscribe) -> Result<()> {
    let due: Option<u64> = subscribe.cursor()?;
    let is_new = due.is_none();
    let due = match due {
        Some(due) => due,
        None => reminder_time(&args, millis(subscribe.now()))?,
    };
    let subscription = subscribe.confirm(format!("The reminder is due at {}.", written(due))).await?;
    if is_new {
        subscription.save(due).await?;
    }
    wait_until(&subscription, due).await;
    subscription.finish(Event::new(args.text).associative()).await
}

fn reminder_time(args: &Remind, now: u64) -> Result<u64> {
    match (args.in_seconds, &args.at) {
        (Some(seconds), None) => Ok(now.saturating_add(seconds.min(LONGEST_SECONDS).saturating_mul(1000))),
        (None, Some(at)) => {
            let at: Timestamp = at.parse().map_err(|_| {
                Error::new(format!(
                    "{at:?} is not a time; write it with its offset, like 2026-11-16T08:00:00Z"
                ))
            })?;
            Ok(u64::try_from(at.as_millisecond()).unwrap_or_default())
        }
        _ => Err(Error::new("give either in_seconds or at")),
    }
}

async fn every(args: Every, subscribe: Subscribe) -> Result<()> {
    let due: Option<u64> = subscribe.cursor()?;
    let (is_new, now) = (due.is_none(), millis(subscribe.now()));
    let mut due = match due {
        Some(due) => due,
        None => next_time(&args, now, now)?,
    };
    let subscription = subscribe.confirm(format!("The first reminder is due at {}.", written(due))).await?;
    if is_new {
        subscription.save(due).await?;
    }
    loop {
        wait_until(&subscription, due).await;
        due = next_time(&args, due, millis(subscription.now()))?;
        subscription.send(Event::new(args.text.clone()).associative().cursor(due)).await?;
    }
}

/// Returns the next time after both `last` and `now`. Times that were missed are skipped.
fn next_time(args: &Every, last: u64, now: u64) -> Result<u64> {
    match (args.seconds, &args.cron) {
        (Some(seconds), None) => {
            let period = seconds.clamp(1, LONGEST_SECONDS) * 1000;
            let missed = now.saturating_sub(last) / period;
            Ok(last.saturating_add(period.saturating_mul(missed + 1)))
        }
        (None, Some(cron)) => next_cron(cron, last.max(now)),
        _ => Err(Error::new("give either cron or seconds")),
    }
}

fn next_cron(cron: &str, after: u64) -> Result<u64> {
    let wrong = |why: String| {
        Error::new(format!("{cron:?} is not a cron expression of five fields, or six with seconds: {why}"))
    };
    if cron.len() > CRON_BYTES {
        return Err(Error::new(format!("a cron expression has at most {CRON_BYTES} characters")));
    }
    let parser = CronParser::builder().seconds(Seconds::Optional).year(Year::Disallowed).build();
    let pattern = parser.parse(cron).map_err(|error| wrong(error.to_string()))?;
    let next = pattern.find_next_occurrence(&zoned(after)?, false);
    let next = next.map_err(|_| wrong("it never fires".into()))?;
    Ok(u64::try_from(next.timestamp().as_millisecond()).unwrap_or_default())
}

fn zoned(at: u64) -> Result<Zoned> {
    Ok(Timestamp::from_millisecond(i64::try_from(at)?)?.to_zoned(TimeZone::UTC))
}

fn written(at: u64) -> String {
    zoned(at).map_or_else(|_| at.to_string(), |zoned| zoned.timestamp().to_string())
}

fn millis(at: SystemTime) -> u64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

async fn wait_until(call: &Call, due: u64) {
    loop {
        let left = Duration::from_millis(due.saturating_sub(millis(call.now())));
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(LONGEST_WAIT)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every(cron: Option<&str>, seconds: Option<u64>) -> Every {
        Every { cron: cron.map(Into::into), seconds, text: String::new() }
    }

    #[test]
    fn missed_times_are_skipped() {
        let ten = every(None, Some(10));
        assert_eq!(next_time(&ten, 5_000, 5_000).unwrap(), 15_000);
        assert_eq!(next_time(&ten, 5_000, 15_001).unwrap(), 25_000);
        assert_eq!(next_time(&ten, 5_000, 3_600_000).unwrap(), 3_605_000);
        let hourly = every(Some("0 * * * *"), None);
        assert_eq!(next_time(&hourly, 3_600_000, 3_600_000).unwrap(), 7_200_000);
        assert_eq!(next_time(&hourly, 3_600_000, 9_000_000).unwrap(), 10_800_000);
    }

    #[test]
    fn wrong_arguments_are_explained() {
        let wrong = |args: Every| next_time(&args, 0, 0).unwrap_err().to_string();
        assert_eq!(wrong(every(None, None)), "give either cron or seconds");
        assert_eq!(wrong(every(Some("* * * * *"), Some(1))), "give either cron or seconds");
        assert!(wrong(every(Some("daily"), None)).starts_with("\"daily\" is not a cron expression"));
        let at = Remind { in_seconds: None, at: Some("noon".into()), text: String::new() };
        assert!(reminder_time(&at, 0).unwrap_err().to_string().starts_with("\"noon\" is not a time"));
        let both =
            Remind { in_seconds: Some(1), at: Some("2026-11-16T08:00:00Z".into()), text: String::new() };
        assert_eq!(reminder_time(&both, 0).unwrap_err().to_string(), "give either in_seconds or at");
    }
}
