//! Lost calls: when a tool server is asked whether anybody still works on a call that it took long ago, and what its
//! answer means. Only the answer that nobody does, twice and some time apart, settles a call; any other means that it
//! is not known.

use std::time::Duration;

use rap_protocol::{CallId, Timestamp};

use crate::{Message, words};

/// The pause between two looks, and between the two answers that settle a call, unless patience is even shorter.
const PAUSE: Duration = Duration::from_secs(60);

/// How long a call is given that was acknowledged, or asked after without an answer that it is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostAfter(pub Duration);

/// What is known of a call that was acknowledged and has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Doubt {
    /// When its server was last asked about it; at first, when it was acknowledged.
    pub asked: Timestamp,
    /// Since when its server says that nobody works on it.
    pub gone_since: Option<Timestamp>,
}

/// What a server says about a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whereabouts {
    /// Nobody works on it.
    Gone,
    /// Anything else, and nothing at all.
    Unknown,
}

/// What follows from that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is lost.
    Lost,
    /// That is known of it now.
    Open(Doubt),
}

impl LostAfter {
    /// The pause between two looks, and between the two answers that settle a call.
    pub fn pause(self) -> Duration {
        PAUSE.min(self.0)
    }
}

impl Doubt {
    /// A call was acknowledged.
    pub fn new(acknowledged: Timestamp) -> Doubt {
        Doubt { asked: acknowledged, gone_since: None }
    }

    /// When its server is to be asked.
    pub fn due(&self, patience: LostAfter) -> Timestamp {
        let wait = if self.gone_since.is_some() { patience.pause() } else { patience.0 };
        self.asked.plus(wait)
    }

    /// Its server was asked.
    pub fn hear(self, said: Whereabouts, now: Timestamp, patience: LostAfter) -> Verdict {
        let gone_since = match (said, self.gone_since) {
            (Whereabouts::Unknown, _) => None,
            (Whereabouts::Gone, None) => Some(now),
            (Whereabouts::Gone, Some(since)) if now.since(since) >= patience.pause() => return Verdict::Lost,
            (Whereabouts::Gone, since) => since,
        };
        Verdict::Open(Doubt { asked: now, gone_since })
    }
}

impl Message {
    /// A call was lost. It failed, so that a result that comes all the same is not thrown away.
    pub fn lost(call: CallId) -> Message {
        Message::CallFailed { call, text: words::LOST.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp(seconds * 1000)
    }

    /// Asks whenever it is due, and gives when each answer came and what became of the call.
    fn ask(patience: LostAfter, answers: &[Whereabouts]) -> (Vec<i64>, Verdict) {
        let mut doubt = Doubt::new(at(0));
        let mut times = Vec::new();
        for said in answers {
            let now = doubt.due(patience);
            times.push(now.0 / 1000);
            match doubt.hear(*said, now, patience) {
                Verdict::Lost => return (times, Verdict::Lost),
                Verdict::Open(next) => doubt = next,
            }
        }
        (times, Verdict::Open(doubt))
    }

    #[test]
    fn a_call_is_lost_at_the_second_word_a_minute_after_the_first() {
        use Whereabouts::{Gone, Unknown};
        let patience = LostAfter(Duration::from_secs(900));
        assert_eq!(ask(patience, &[Gone, Gone]), (vec![900, 960], Verdict::Lost));
        let open = Verdict::Open(Doubt { asked: at(2760), gone_since: Some(at(2760)) });
        assert_eq!(ask(patience, &[Gone, Unknown, Unknown, Gone]), (vec![900, 960, 1860, 2760], open));
    }

    #[test]
    fn a_second_word_that_comes_too_early_does_not_count() {
        let patience = LostAfter(Duration::from_secs(900));
        let doubt = Doubt { asked: at(900), gone_since: Some(at(900)) };
        let open = Verdict::Open(Doubt { asked: at(959), gone_since: Some(at(900)) });
        assert_eq!(doubt.hear(Whereabouts::Gone, at(959), patience), open);
        assert_eq!(doubt.hear(Whereabouts::Gone, at(960), patience), Verdict::Lost);
    }

    #[test]
    fn who_has_less_patience_than_a_minute_pauses_no_longer() {
        let patience = LostAfter(Duration::from_secs(2));
        assert_eq!(ask(patience, &[Whereabouts::Gone; 2]), (vec![2, 4], Verdict::Lost));
    }
}
