//! One pure function decides all retries.
//!
//! It never says "again" after an answer below 500: a 2xx is done, a 3xx or 4xx will not get better by asking
//! once more (TR-07, TR-15).

use std::time::Duration;

use crate::Timestamp;

/// How one attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// There was an HTTP answer.
    Answered {
        /// Its status.
        status: u16,
        /// What its `Retry-After` header asked for.
        retry_after: Option<Duration>,
    },
    /// No connection, a time-out, or an answer that was no HTTP.
    NoAnswer,
}

/// The attempt that has just ended.
#[derive(Debug, Clone, Copy)]
pub struct Attempt {
    /// 1 for the first.
    pub number: u32,
    /// Since when we have been trying.
    pub since: Timestamp,
    /// When it ended.
    pub now: Timestamp,
    /// A random number; it spreads the pauses of many senders.
    pub dice: u32,
}

/// How long, and how hard, to try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// The pause after the first attempt; it doubles from there.
    pub first_pause: Duration,
    /// No pause is longer than this, jitter aside.
    pub longest_pause: Duration,
    /// Past this time there is no further attempt.
    pub give_up_after: Duration,
    /// Past this number there is no further attempt.
    pub attempts: u32,
}

impl Patience {
    /// For callbacks: from half a second to five minutes, for 72 hours.
    pub const CALLBACK: Patience = Patience {
        first_pause: Duration::from_millis(500),
        longest_pause: Duration::from_secs(300),
        give_up_after: Duration::from_secs(72 * 3600),
        attempts: u32::MAX,
    };
    /// For invocations: from half a second to a minute, for ten minutes.
    pub const INVOCATION: Patience = Patience {
        first_pause: Duration::from_millis(500),
        longest_pause: Duration::from_secs(60),
        give_up_after: Duration::from_secs(600),
        attempts: u32::MAX,
    };
}

/// What to do after an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// It was accepted.
    Done,
    /// Try once more at this time.
    Again {
        /// When.
        at: Timestamp,
    },
    /// It was refused for good.
    Refused {
        /// The status that said so.
        status: u16,
    },
    /// Patience has run out.
    GaveUp,
}

/// Decides what follows an attempt.
pub fn after_attempt(outcome: Outcome, attempt: Attempt, patience: &Patience) -> Next {
    let retry_after = match outcome {
        Outcome::Answered { status: 200..=299, .. } => return Next::Done,
        Outcome::Answered { status: 500.., retry_after } => retry_after,
        Outcome::Answered { status, .. } => return Next::Refused { status },
        Outcome::NoAnswer => None,
    };
    let last_call = attempt.since.plus(patience.give_up_after);
    if attempt.number >= patience.attempts || attempt.now >= last_call {
        return Next::GaveUp;
    }
    let asked_for = retry_after.unwrap_or_default().min(patience.longest_pause);
    let pause = pause(attempt, patience).max(asked_for);
    // The last attempt falls on the deadline itself, so that patience is used to its end.
    Next::Again { at: attempt.now.plus(pause).min(last_call) }
}

/// Doubles with every attempt, give or take a quarter.
fn pause(attempt: Attempt, patience: &Patience) -> Duration {
    let doublings = attempt.number.saturating_sub(1).min(30);
    let plain = patience.first_pause.saturating_mul(1 << doublings).min(patience.longest_pause);
    let spread = f64::from(attempt.dice) / f64::from(u32::MAX);
    plain.mul_f64(0.75 + spread / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience = Patience {
        first_pause: Duration::from_millis(400),
        longest_pause: Duration::from_secs(10),
        give_up_after: Duration::from_secs(60),
        attempts: 8,
    };
    const MIDDLE: u32 = 1 << 31;

    fn after(status: u16, number: u32, now_ms: i64) -> Next {
        let attempt = Attempt { number, since: Timestamp(0), now: Timestamp(now_ms), dice: MIDDLE };
        after_attempt(Outcome::Answered { status, retry_after: None }, attempt, &PATIENCE)
    }

    fn pause_of(number: u32, dice: u32) -> i64 {
        let attempt = Attempt { number, since: Timestamp(0), now: Timestamp(0), dice };
        match after_attempt(Outcome::NoAnswer, attempt, &PATIENCE) {
            Next::Again { at } => at.0,
            other => panic!("{other:?}"),
        }
    }

    /// Proves: TR-07, TR-15
    #[test]
    fn nothing_below_500_is_tried_again() {
        for status in 100..500 {
            let expected = if (200..300).contains(&status) { Next::Done } else { Next::Refused { status } };
            assert_eq!(after(status, 1, 0), expected);
        }
    }

    /// Proves: TR-06, TR-14
    #[test]
    fn errors_of_the_server_and_silence_are_tried_again_with_growing_pauses() {
        for status in [500, 502, 503, 504, 599] {
            assert!(matches!(after(status, 1, 0), Next::Again { .. }), "{status}");
        }
        let pauses: Vec<i64> = (1..8).map(|number| pause_of(number, MIDDLE)).collect();
        assert_eq!(pauses, [400, 800, 1600, 3200, 6400, 10_000, 10_000]);
    }

    #[test]
    fn jitter_stays_within_a_quarter() {
        assert_eq!(pause_of(1, 0), 300);
        assert_eq!(pause_of(1, u32::MAX), 500);
    }

    #[test]
    fn retry_after_is_honoured_up_to_the_longest_pause() {
        let attempt = Attempt { number: 1, since: Timestamp(0), now: Timestamp(0), dice: MIDDLE };
        let asking =
            |seconds| Outcome::Answered { status: 503, retry_after: Some(Duration::from_secs(seconds)) };
        let at = |seconds| after_attempt(asking(seconds), attempt, &PATIENCE);
        assert_eq!(at(0), Next::Again { at: Timestamp(400) });
        assert_eq!(at(5), Next::Again { at: Timestamp(5_000) });
        assert_eq!(at(86_400), Next::Again { at: Timestamp(10_000) });
    }

    #[test]
    fn patience_ends_by_time_and_by_number() {
        assert_eq!(after(503, 2, 59_990), Next::Again { at: Timestamp(60_000) });
        assert_eq!(after(503, 2, 60_000), Next::GaveUp);
        assert_eq!(after(503, 8, 1), Next::GaveUp);
        assert_eq!(after(200, 9, 99_999), Next::Done);
    }
}
