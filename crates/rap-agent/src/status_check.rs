//! Status checks: when a tool server is asked whether a call or subscription is still alive, and what its answer means.
//! Only "not alive", twice and some time apart, counts; every other answer means unknown.

use std::time::Duration;

use rap_protocol::Timestamp;

/// The pause between two checks, and between the two answers that count, unless `LostAfter` is even shorter.
const PAUSE: Duration = Duration::from_secs(60);

/// The time from the acknowledgement of a call, or the last check, to the next check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostAfter(pub Duration);

/// The state of the checks of a call that was acknowledged and has no result, or of a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusCheck {
    /// Time of the last check; at first, of the acknowledgement or confirmation.
    pub asked: Timestamp,
    /// Time since which its server says that it is not alive.
    pub gone_since: Option<Timestamp>,
}

/// What a server says about a call or subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// It is not alive.
    Gone,
    /// Anything else, or no answer.
    Unknown,
}

/// What follows from a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckResult {
    /// It is lost.
    Lost,
    /// It goes on, with this state of its checks.
    Open(StatusCheck),
}

impl LostAfter {
    /// The pause between two checks, and between the two answers that count.
    pub fn pause(self) -> Duration {
        PAUSE.min(self.0)
    }
}

impl StatusCheck {
    /// The state when a call was acknowledged or a subscription confirmed.
    pub fn new(acknowledged: Timestamp) -> StatusCheck {
        StatusCheck { asked: acknowledged, gone_since: None }
    }

    /// Time of the next check.
    pub fn due(&self, patience: LostAfter) -> Timestamp {
        let wait = if self.gone_since.is_some() { patience.pause() } else { patience.0 };
        self.asked.plus(wait)
    }

    /// Takes the answer to a check.
    pub fn after_answer(self, said: Liveness, now: Timestamp, patience: LostAfter) -> CheckResult {
        let gone_since = match (said, self.gone_since) {
            (Liveness::Unknown, _) => None,
            (Liveness::Gone, None) => Some(now),
            (Liveness::Gone, Some(since)) if now.since(since) >= patience.pause() => {
                return CheckResult::Lost;
            }
            (Liveness::Gone, since) => since,
        };
        CheckResult::Open(StatusCheck { asked: now, gone_since })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp(seconds * 1000)
    }

    /// Asks whenever it is due, and gives when each answer came and what became of the call.
    fn ask(patience: LostAfter, answers: &[Liveness]) -> (Vec<i64>, CheckResult) {
        let mut check = StatusCheck::new(at(0));
        let mut times = Vec::new();
        for said in answers {
            let now = check.due(patience);
            times.push(now.0 / 1000);
            match check.after_answer(*said, now, patience) {
                CheckResult::Lost => return (times, CheckResult::Lost),
                CheckResult::Open(next) => check = next,
            }
        }
        (times, CheckResult::Open(check))
    }

    #[test]
    fn a_call_is_lost_at_the_second_answer_a_minute_after_the_first() {
        use Liveness::{Gone, Unknown};
        let patience = LostAfter(Duration::from_secs(900));
        assert_eq!(ask(patience, &[Gone, Gone]), (vec![900, 960], CheckResult::Lost));
        let open = CheckResult::Open(StatusCheck { asked: at(2760), gone_since: Some(at(2760)) });
        assert_eq!(ask(patience, &[Gone, Unknown, Unknown, Gone]), (vec![900, 960, 1860, 2760], open));
    }

    #[test]
    fn a_second_answer_that_comes_too_early_does_not_count() {
        let patience = LostAfter(Duration::from_secs(900));
        let check = StatusCheck { asked: at(900), gone_since: Some(at(900)) };
        let open = CheckResult::Open(StatusCheck { asked: at(959), gone_since: Some(at(900)) });
        assert_eq!(check.after_answer(Liveness::Gone, at(959), patience), open);
        assert_eq!(check.after_answer(Liveness::Gone, at(960), patience), CheckResult::Lost);
    }

    #[test]
    fn the_pause_is_never_longer_than_lost_after() {
        let patience = LostAfter(Duration::from_secs(2));
        assert_eq!(ask(patience, &[Liveness::Gone; 2]), (vec![2, 4], CheckResult::Lost));
    }
}
