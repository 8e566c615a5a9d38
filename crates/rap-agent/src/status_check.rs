//! Status checks: when a tool server is asked whether a call or subscription is alive, and what its answer means. A call
//! or subscription is lost after two answers "not alive" in a row, with a pause in between. Any other answer means unknown.

use std::time::Duration;

use rap_protocol::Timestamp;

/// Pause before the check that confirms an answer "not alive", unless `LostAfter` is shorter.
const PAUSE: Duration = Duration::from_secs(60);

/// Time from the acknowledgement of a call, or from its last check, to the next check. Named after its configuration key
/// `lost_after`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostAfter(pub Duration);

/// State of the checks of an acknowledged call without a result, or of a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusCheck {
    /// Time of the last check; before the first check, time of the acknowledgement or confirmation.
    pub checked_at: Timestamp,
    /// Time of the first answer "not alive"; `None` if the last answer was another one.
    pub gone_since: Option<Timestamp>,
}

/// Answer of a tool server to a status check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusAnswer {
    /// The call or subscription is not alive.
    NotAlive,
    /// Any other answer, or none.
    Other,
}

/// Outcome of a status check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckResult {
    /// The call or subscription is lost.
    Lost,
    /// The call or subscription is checked again, with this new state of its checks.
    KeepChecking(StatusCheck),
}

impl LostAfter {
    /// Returns the pause before the check that confirms an answer "not alive".
    pub fn pause(self) -> Duration {
        PAUSE.min(self.0)
    }
}

impl StatusCheck {
    /// Returns the state after a call was acknowledged or a subscription confirmed.
    pub fn new(acknowledged: Timestamp) -> StatusCheck {
        StatusCheck { checked_at: acknowledged, gone_since: None }
    }

    /// Returns the time of the next check.
    pub fn due(&self, lost_after: LostAfter) -> Timestamp {
        let wait = if self.gone_since.is_some() { lost_after.pause() } else { lost_after.0 };
        self.checked_at.plus(wait)
    }

    /// Returns the outcome of a check.
    pub fn after_answer(self, answer: StatusAnswer, now: Timestamp, lost_after: LostAfter) -> CheckResult {
        let gone_since = match (answer, self.gone_since) {
            (StatusAnswer::Other, _) => None,
            (StatusAnswer::NotAlive, None) => Some(now),
            // The clock was set back. The pause starts again, and becomes no longer.
            (StatusAnswer::NotAlive, Some(since)) if since > now => Some(now),
            (StatusAnswer::NotAlive, Some(since)) if now.since(since) >= lost_after.pause() => {
                return CheckResult::Lost;
            }
            (StatusAnswer::NotAlive, since) => since,
        };
        CheckResult::KeepChecking(StatusCheck { checked_at: now, gone_since })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp(seconds * 1000)
    }

    /// Runs each check when it is due. Returns the times of the checks in seconds, and the last outcome.
    fn run_checks(lost_after: LostAfter, answers: &[StatusAnswer]) -> (Vec<i64>, CheckResult) {
        let mut check = StatusCheck::new(at(0));
        let mut times = Vec::new();
        for answer in answers {
            let now = check.due(lost_after);
            times.push(now.0 / 1000);
            match check.after_answer(*answer, now, lost_after) {
                CheckResult::Lost => return (times, CheckResult::Lost),
                CheckResult::KeepChecking(next) => check = next,
            }
        }
        (times, CheckResult::KeepChecking(check))
    }

    #[test]
    fn a_call_is_lost_after_two_answers_a_minute_apart() {
        use StatusAnswer::{NotAlive, Other};
        let lost_after = LostAfter(Duration::from_secs(900));
        assert_eq!(run_checks(lost_after, &[NotAlive, NotAlive]), (vec![900, 960], CheckResult::Lost));
        let open =
            CheckResult::KeepChecking(StatusCheck { checked_at: at(2760), gone_since: Some(at(2760)) });
        assert_eq!(
            run_checks(lost_after, &[NotAlive, Other, Other, NotAlive]),
            (vec![900, 960, 1860, 2760], open)
        );
    }

    #[test]
    fn a_second_answer_within_the_pause_does_not_count() {
        let lost_after = LostAfter(Duration::from_secs(900));
        let check = StatusCheck { checked_at: at(900), gone_since: Some(at(900)) };
        let open = CheckResult::KeepChecking(StatusCheck { checked_at: at(959), gone_since: Some(at(900)) });
        assert_eq!(check.after_answer(StatusAnswer::NotAlive, at(959), lost_after), open);
        assert_eq!(check.after_answer(StatusAnswer::NotAlive, at(960), lost_after), CheckResult::Lost);
    }

    #[test]
    fn the_pause_is_never_longer_than_lost_after() {
        let lost_after = LostAfter(Duration::from_secs(2));
        assert_eq!(run_checks(lost_after, &[StatusAnswer::NotAlive; 2]), (vec![2, 4], CheckResult::Lost));
    }
}
