//! Retry decisions, made by one pure function: [`after_attempt`].
//!
//! Only 5xx answers and missing answers are retried. A 2xx is a success, and a 3xx or 4xx is final, because the same
//! request would get the same answer (TR-07, TR-15).

use std::time::Duration;

use crate::Timestamp;

/// Outcome of one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The server sent an HTTP response.
    Answered {
        /// Status code of the response.
        status: u16,
        /// Value of the `Retry-After` header; `None` if there was none.
        retry_after: Option<Duration>,
    },
    /// There was no connection, a timeout, or a response that is not HTTP.
    NoAnswer,
}

/// Attempt that has just ended.
#[derive(Debug, Clone, Copy)]
pub struct Attempt {
    /// Number of the attempt, from 1.
    pub number: u32,
    /// Start of the first attempt.
    pub since: Timestamp,
    /// End of this attempt.
    pub now: Timestamp,
    /// Random number that varies the pause, so that many senders do not retry at the same time.
    pub jitter: u32,
}

/// Limits and pauses of retries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Pause after the first attempt. It doubles with each attempt.
    pub first_pause: Duration,
    /// Maximum pause, before jitter is applied.
    pub longest_pause: Duration,
    /// Time since the first attempt after which no further attempt is made.
    pub give_up_after: Duration,
    /// Maximum number of attempts.
    pub attempts: u32,
}

impl RetryPolicy {
    /// Policy for callbacks: pauses from half a second to five minutes, for 72 hours.
    pub const CALLBACK: RetryPolicy = RetryPolicy {
        first_pause: Duration::from_millis(500),
        longest_pause: Duration::from_secs(300),
        give_up_after: Duration::from_secs(72 * 3600),
        attempts: u32::MAX,
    };
    /// Policy for invocations: pauses from half a second to one minute, for ten minutes.
    pub const INVOCATION: RetryPolicy = RetryPolicy {
        first_pause: Duration::from_millis(500),
        longest_pause: Duration::from_secs(60),
        give_up_after: Duration::from_secs(600),
        attempts: u32::MAX,
    };
}

/// Decision after an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The message was accepted.
    Done,
    /// The message is sent again.
    Retry {
        /// Time of the next attempt.
        at: Timestamp,
    },
    /// The message was rejected and is not sent again.
    Refused {
        /// Status code of the response.
        status: u16,
    },
    /// The time or the number of attempts is used up.
    GaveUp,
}

/// Decides whether a message is sent again after an attempt, and when.
pub fn after_attempt(outcome: Outcome, attempt: Attempt, policy: &RetryPolicy) -> Next {
    let retry_after = match outcome {
        Outcome::Answered { status: 200..=299, .. } => return Next::Done,
        Outcome::Answered { status: 500.., retry_after } => retry_after,
        Outcome::Answered { status, .. } => return Next::Refused { status },
        Outcome::NoAnswer => None,
    };
    let left = policy.give_up_after.saturating_sub(elapsed(attempt, policy));
    if attempt.number >= policy.attempts || left.is_zero() {
        return Next::GaveUp;
    }
    let requested = retry_after.unwrap_or_default().min(policy.longest_pause);
    let pause = pause(attempt, policy).max(requested);
    // The last attempt is made at the deadline itself, so that the whole retry period is used.
    Next::Retry { at: attempt.now.plus(pause.min(left)) }
}

/// Returns the time since the first attempt. If the clock was set back since then, this is the time that the attempts
/// took at least.
fn elapsed(attempt: Attempt, policy: &RetryPolicy) -> Duration {
    if attempt.now >= attempt.since {
        return attempt.now.since(attempt.since);
    }
    let (mut pause, mut left) = (policy.first_pause, attempt.number.saturating_sub(1));
    let mut pauses = Duration::ZERO;
    while left > 0 && !pause.is_zero() && pause < policy.longest_pause {
        pauses += pause;
        pause = pause.saturating_mul(2);
        left -= 1;
    }
    pauses.saturating_add(policy.longest_pause.saturating_mul(left)).mul_f64(1.0 - JITTER)
}

/// Share of a pause by which it may be shorter or longer.
const JITTER: f64 = 0.25;

/// Pause after an attempt: doubles with every attempt, with a jitter.
fn pause(attempt: Attempt, policy: &RetryPolicy) -> Duration {
    let doublings = attempt.number.saturating_sub(1).min(30);
    let plain = policy.first_pause.saturating_mul(1 << doublings).min(policy.longest_pause);
    let spread = f64::from(attempt.jitter) / f64::from(u32::MAX);
    plain.mul_f64(1.0 - JITTER + spread * 2.0 * JITTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: RetryPolicy = RetryPolicy {
        first_pause: Duration::from_millis(400),
        longest_pause: Duration::from_secs(10),
        give_up_after: Duration::from_secs(60),
        attempts: 8,
    };
    const MIDDLE: u32 = 1 << 31;

    fn after(status: u16, number: u32, now_ms: i64) -> Next {
        let attempt = Attempt { number, since: Timestamp(0), now: Timestamp(now_ms), jitter: MIDDLE };
        after_attempt(Outcome::Answered { status, retry_after: None }, attempt, &POLICY)
    }

    fn pause_of(number: u32, jitter: u32) -> i64 {
        let attempt = Attempt { number, since: Timestamp(0), now: Timestamp(0), jitter };
        match after_attempt(Outcome::NoAnswer, attempt, &POLICY) {
            Next::Retry { at } => at.0,
            other => panic!("{other:?}"),
        }
    }

    /// Proves: TR-07, TR-15
    #[test]
    fn statuses_below_500_are_never_retried() {
        for status in 100..500 {
            let expected = if (200..300).contains(&status) { Next::Done } else { Next::Refused { status } };
            assert_eq!(after(status, 1, 0), expected);
        }
    }

    /// Proves: TR-06, TR-14
    #[test]
    fn server_errors_and_missing_answers_are_retried_with_growing_pauses() {
        for status in [500, 502, 503, 504, 599] {
            assert!(matches!(after(status, 1, 0), Next::Retry { .. }), "{status}");
        }
        let pauses: Vec<i64> = (1..8).map(|number| pause_of(number, MIDDLE)).collect();
        assert_eq!(pauses, [400, 800, 1600, 3200, 6400, 10_000, 10_000]);
    }

    #[test]
    fn jitter_is_at_most_25_percent() {
        assert_eq!(pause_of(1, 0), 300);
        assert_eq!(pause_of(1, u32::MAX), 500);
    }

    #[test]
    fn retry_after_is_honoured_up_to_the_longest_pause() {
        let attempt = Attempt { number: 1, since: Timestamp(0), now: Timestamp(0), jitter: MIDDLE };
        let asking =
            |seconds| Outcome::Answered { status: 503, retry_after: Some(Duration::from_secs(seconds)) };
        let at = |seconds| after_attempt(asking(seconds), attempt, &POLICY);
        assert_eq!(at(0), Next::Retry { at: Timestamp(400) });
        assert_eq!(at(5), Next::Retry { at: Timestamp(5_000) });
        assert_eq!(at(86_400), Next::Retry { at: Timestamp(10_000) });
    }

    #[test]
    fn retries_end_at_the_deadline_and_at_the_maximum_number_of_attempts() {
        assert_eq!(after(503, 2, 59_990), Next::Retry { at: Timestamp(60_000) });
        assert_eq!(after(503, 2, 60_000), Next::GaveUp);
        assert_eq!(after(503, 8, 1), Next::GaveUp);
        assert_eq!(after(200, 9, 99_999), Next::Done);
    }

    /// Otherwise a message would be retried for as long as the clock was set back.
    #[test]
    fn the_retry_period_ends_although_the_clock_was_set_back() {
        let after = |number: u32| {
            let attempt = Attempt { number, since: Timestamp(86_400_000), now: Timestamp(0), jitter: MIDDLE };
            after_attempt(Outcome::NoAnswer, attempt, &RetryPolicy { attempts: u32::MAX, ..POLICY })
        };
        assert_eq!(after(1), Next::Retry { at: Timestamp(400) });
        let last = (1..100).take_while(|number| after(*number) != Next::GaveUp).last();
        // The pauses of 0.4, 0.8, 1.6, 3.2, 6.4 and then 10 seconds are at least three quarters of that.
        assert_eq!(last, Some(12));
        assert!(matches!(after(12), Next::Retry { at: Timestamp(5_690..=5_700) }), "{:?}", after(12));
    }
}
