//! Choice between the models of an agent: the first one that works.
//!
//! A model that has failed for a given time is passed over, and asked again now and then. Which models fail is known in
//! memory only; after a restart the first model is asked again.

use std::collections::HashMap;
use std::time::Duration;

use rap_protocol::Timestamp;

use crate::store::ThreadKey;

/// Shortest pause before a model that is passed over is asked again.
const RECHECK_AFTER: Duration = Duration::from_secs(60);
/// Number of threads that are remembered as told about an outage. Beyond it they may be told again.
const MAX_TOLD: usize = 10_000;
/// Number of threads whose refused requests are remembered. Beyond it, a turn that all models refuse may be repeated.
const MAX_REFUSED: usize = 1_000;
/// Reasons for a thread that a model fails or refuses all requests, if only other threads have asked it. Their errors may
/// quote their requests.
const FAILS: &str = "its server fails or is overloaded";
const REFUSES: &str = "its server refuses all requests";

/// States of the models of all agents with several models.
#[derive(Debug, Default)]
pub(super) struct Outages {
    /// By the agent's name and the position of the model in its list.
    models: HashMap<(String, usize), ModelState>,
    /// Position of the model that answers a thread, as the thread was told, if it is not the first.
    told: HashMap<ThreadKey, usize>,
    /// Last turn of a thread that a model refused because of its content, with the error of each such model by position.
    /// It says nothing about the requests of other threads.
    refused: HashMap<ThreadKey, (u64, HashMap<usize, String>)>,
}

#[derive(Debug, Default)]
struct ModelState {
    answered_at: Option<Timestamp>,
    outage: Option<Outage>,
}

/// Failures of a model since its last answer.
#[derive(Debug)]
struct Outage {
    since: Timestamp,
    asked_at: Timestamp,
    /// Thread whose request asks the model again, although it is passed over.
    asked_by: Option<ThreadKey>,
    last: FailedRequest,
}

/// Failure of one request.
#[derive(Debug, Clone)]
pub(super) struct FailedRequest {
    pub(super) thread: ThreadKey,
    pub(super) began: Timestamp,
    pub(super) why: String,
    /// True if the server refuses all requests, so that this one cannot be repeated there.
    pub(super) refused: bool,
    /// Time before which the server does not want to be asked again.
    pub(super) not_before: Option<Timestamp>,
}

impl FailedRequest {
    /// Returns the reason as a thread may see it.
    fn reason_for(&self, thread: ThreadKey) -> String {
        match self.refused {
            _ if self.thread == thread => self.why.clone(),
            true => REFUSES.to_owned(),
            false => FAILS.to_owned(),
        }
    }
}

/// An agent's list of models, as far as the choice depends on it.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelList<'a> {
    pub(super) agent: &'a str,
    pub(super) count: usize,
    /// Time for which a model has to fail before the next one is asked.
    pub(super) after: Duration,
}

/// Change of the model that answers a thread, which a notice tells people.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ModelChange {
    /// Another model than the first answers, because the first one fails for this reason.
    Replaced(String),
    /// The first model answers again.
    Restored,
}

impl Outages {
    /// Returns the position of the model to ask for a thread, from `first` on: the first one that has not failed for the
    /// given time, or one that is due to be asked again. The last model is never passed over.
    pub(super) fn choose(
        &mut self,
        list: ModelList<'_>,
        thread: ThreadKey,
        first: usize,
        now: Timestamp,
    ) -> usize {
        let last = list.count.saturating_sub(1);
        for position in first..last {
            let state = self.models.get_mut(&(list.agent.to_owned(), position));
            let Some(outage) = state.and_then(|state| state.outage.as_mut()) else { return position };
            if now.since(outage.since) < list.after {
                return position;
            }
            let is_wanted = outage.last.not_before.is_none_or(|time| time <= now);
            if is_wanted && now.since(outage.asked_at) >= RECHECK_AFTER {
                (outage.asked_at, outage.asked_by) = (now, Some(thread));
            }
            if outage.asked_by == Some(thread) {
                return position;
            }
        }
        last
    }

    /// Records a failure of a model that concerns all threads.
    pub(super) fn failed(&mut self, agent: &str, position: usize, request: FailedRequest, now: Timestamp) {
        let state = self.models.entry((agent.to_owned(), position)).or_default();
        // A request may have begun before another one was answered.
        let since = state.answered_at.map_or(request.began, |at| at.max(request.began));
        let since = state.outage.as_ref().map_or(since, |outage| outage.since.min(since));
        state.outage = Some(Outage { since, asked_at: now, asked_by: None, last: request });
    }

    /// Records that a model refused a turn because of its content.
    pub(super) fn refused(&mut self, (thread, turn): (ThreadKey, u64), position: usize, why: String) {
        if self.refused.len() >= MAX_REFUSED {
            self.refused.clear();
        }
        let refused = self.refused.entry(thread).or_default();
        if refused.0 != turn {
            *refused = (turn, HashMap::new());
        }
        refused.1.insert(position, why);
    }

    /// Records an answer of a model for a turn of a thread. Returns what the thread is to be told.
    pub(super) fn answered(
        &mut self,
        agent: &str,
        position: usize,
        (thread, turn): (ThreadKey, u64),
        now: Timestamp,
    ) -> Option<ModelChange> {
        let state = ModelState { answered_at: Some(now), outage: None };
        self.models.insert((agent.to_owned(), position), state);
        if position == 0 {
            self.refused.remove(&thread);
            return self.told.remove(&thread).map(|_| ModelChange::Restored);
        }
        let refused = self.refused.remove(&thread).filter(|refused| refused.0 == turn);
        let why = refused.and_then(|(_, mut errors)| errors.remove(&0));
        let why = why.or_else(|| Some(self.outage(agent, 0)?.last.reason_for(thread)))?;
        if self.told.len() >= MAX_TOLD {
            self.told.clear();
        }
        (self.told.insert(thread, position) != Some(position)).then_some(ModelChange::Replaced(why))
    }

    /// Returns the time until a model is passed over, if it fails until then.
    pub(super) fn passed_over_in(&self, list: ModelList<'_>, position: usize, now: Timestamp) -> Duration {
        let failing =
            self.outage(list.agent, position).map_or(Duration::ZERO, |outage| now.since(outage.since));
        list.after.saturating_sub(failing)
    }

    /// Returns true if every model has refused this turn, or refuses all requests.
    pub(super) fn all_refuse(&self, list: ModelList<'_>, (thread, turn): (ThreadKey, u64)) -> bool {
        let refused = self.refused.get(&thread).filter(|refused| refused.0 == turn);
        let refuses = |position| {
            refused.is_some_and(|(_, errors)| errors.contains_key(&position))
                || self.outage(list.agent, position).is_some_and(|outage| outage.last.refused)
        };
        (0..list.count).all(refuses)
    }

    fn outage(&self, agent: &str, position: usize) -> Option<&Outage> {
        self.models.get(&(agent.to_owned(), position))?.outage.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: ModelList<'_> = ModelList { agent: "a", count: 2, after: Duration::from_secs(30) };

    fn at(seconds: i64) -> Timestamp {
        Timestamp(seconds * 1_000)
    }

    fn thread(number: u8) -> ThreadKey {
        ThreadKey::from_bytes([number; 8])
    }

    fn failure(began: i64) -> FailedRequest {
        let thread = thread(1);
        FailedRequest { thread, began: at(began), why: "busy".into(), refused: false, not_before: None }
    }

    #[test]
    fn the_next_model_is_asked_after_failures_for_a_time_and_the_first_one_again_later() {
        let mut outages = Outages::default();
        for second in [0, 1, 10, 29] {
            assert_eq!(outages.choose(LIST, thread(1), 0, at(second)), 0, "second {second}");
            outages.failed("a", 0, failure(second), at(second));
        }
        assert_eq!(outages.passed_over_in(LIST, 0, at(29)), Duration::from_secs(1));
        assert_eq!(outages.choose(LIST, thread(1), 0, at(31)), 1);
        // Another agent and an agent with one model are not affected.
        assert_eq!(outages.choose(ModelList { agent: "b", ..LIST }, thread(1), 0, at(31)), 0);
        assert_eq!(outages.choose(ModelList { count: 1, ..LIST }, thread(1), 0, at(31)), 0);
        assert_eq!(
            outages.answered("a", 1, (thread(1), 1), at(31)),
            Some(ModelChange::Replaced("busy".into()))
        );
        assert_eq!(outages.answered("a", 1, (thread(1), 1), at(32)), None, "a thread is told once");
        // One thread asks the first model again, even if it has to wait for a slot. The others do not.
        assert_eq!(outages.choose(LIST, thread(1), 0, at(90)), 0);
        assert_eq!(outages.choose(LIST, thread(2), 0, at(91)), 1);
        assert_eq!(outages.choose(LIST, thread(1), 0, at(92)), 0);
        outages.failed("a", 0, failure(92), at(92));
        assert_eq!(outages.choose(LIST, thread(1), 0, at(93)), 1);
        assert_eq!(outages.choose(LIST, thread(2), 0, at(153)), 0);
        assert_eq!(outages.answered("a", 0, (thread(2), 1), at(154)), None);
        assert_eq!(outages.answered("a", 0, (thread(1), 1), at(154)), Some(ModelChange::Restored));
        assert_eq!(outages.choose(LIST, thread(1), 0, at(154)), 0);
    }

    #[test]
    fn a_request_that_hangs_counts_from_its_start_but_not_from_before_an_answer() {
        let mut outages = Outages::default();
        outages.failed("a", 0, failure(0), at(600));
        assert_eq!(outages.choose(LIST, thread(1), 0, at(600)), 1);
        outages.answered("a", 0, (thread(1), 1), at(601));
        outages.failed("a", 0, failure(500), at(602));
        assert_eq!(outages.choose(LIST, thread(1), 0, at(602)), 0);
    }

    #[test]
    fn a_model_is_not_asked_before_the_time_that_its_server_named() {
        let mut outages = Outages::default();
        let named = FailedRequest { not_before: Some(at(300)), ..failure(0) };
        outages.failed("a", 0, named, at(0));
        assert_eq!(outages.choose(LIST, thread(1), 0, at(299)), 1);
        assert_eq!(outages.choose(LIST, thread(1), 0, at(300)), 0);
    }

    #[test]
    fn a_refused_turn_says_nothing_about_the_requests_of_other_threads() {
        let mut outages = Outages::default();
        let list = ModelList { after: Duration::ZERO, ..LIST };
        outages.refused((thread(1), 1), 0, "your text is bad".into());
        assert_eq!(outages.choose(list, thread(2), 0, at(1)), 0);
        let told = Some(ModelChange::Replaced("your text is bad".into()));
        assert_eq!(outages.answered("a", 1, (thread(2), 1), at(1)), None);
        assert_eq!(outages.answered("a", 1, (thread(1), 1), at(1)), told);
        // A turn is refused for good if all models refuse it. The next turn may be another one.
        for position in [0, 1] {
            assert!(!outages.all_refuse(list, (thread(1), 2)));
            outages.refused((thread(1), 2), position, "your text is bad".into());
        }
        assert!(outages.all_refuse(list, (thread(1), 2)));
        assert!(!outages.all_refuse(list, (thread(1), 3)) && !outages.all_refuse(list, (thread(2), 2)));
    }

    #[test]
    fn a_thread_does_not_see_the_error_of_another_one() {
        for (refused, reason) in [(false, FAILS), (true, REFUSES)] {
            let mut outages = Outages::default();
            outages.failed("a", 0, FailedRequest { refused, ..failure(0) }, at(0));
            let mut told = |number| outages.answered("a", 1, (thread(number), 1), at(40));
            assert_eq!(told(1), Some(ModelChange::Replaced("busy".into())));
            assert_eq!(told(2), Some(ModelChange::Replaced(reason.into())));
        }
    }

    #[test]
    fn the_last_model_is_asked_if_all_fail() {
        let mut outages = Outages::default();
        let list = ModelList { count: 3, ..LIST };
        for position in [0, 1, 2] {
            outages.failed("a", position, failure(0), at(0));
            outages.failed("a", position, FailedRequest { refused: position < 2, ..failure(40) }, at(40));
        }
        assert_eq!(outages.choose(list, thread(1), 0, at(41)), 2);
        assert!(!outages.all_refuse(list, (thread(1), 1)));
        outages.failed("a", 2, FailedRequest { refused: true, ..failure(41) }, at(41));
        assert!(outages.all_refuse(list, (thread(1), 1)));
        // The models before the first one that may be asked are left out.
        assert_eq!(Outages::default().choose(list, thread(1), 1, at(41)), 1);
        assert_eq!(Outages::default().choose(list, thread(1), 7, at(41)), 2);
    }
}
