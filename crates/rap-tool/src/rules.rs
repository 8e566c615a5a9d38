//! The life of one call, as a pure function: what has happened so far, what happens now, what follows.
//!
//! Nothing here reads a clock, a database or the network. The journal loads a [`Head`], asks [`step`], and
//! writes what comes out in one transaction; see `journal.rs`.
//!
//! What always holds:
//! - A call yields one result, or, when its thread is closed, none.
//! - Events follow the confirmation of a subscription; after a final event, a cancellation or the closing of
//!   the thread there are none.
//! - What is not [`State::Running`] or [`State::Subscribed`] produces nothing more.

use rap_protocol::{AuthUrl, Body, ERROR_PREFIX, ResponseUrl, Segment};
use serde_json::Value;

/// How far a call has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// Its handler is at work and there is no result yet.
    Running,
    /// It is a confirmed subscription that may still produce events.
    Subscribed,
    /// Its handler is done; what it said is still on its way.
    Ending,
    /// Everything was delivered, refused, given up or dropped.
    Settled,
}

impl State {
    /// Whether the handler still has a say.
    pub(crate) fn is_live(self) -> bool {
        matches!(self, State::Running | State::Subscribed)
    }
}

/// All that the rules know about a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) state: State,
    /// Its result, or its confirmation, has not been delivered yet.
    pub(crate) result_waits: bool,
    /// So many events have not been delivered yet.
    pub(crate) events_wait: u32,
    /// So many asides have not been delivered yet.
    pub(crate) asides_wait: u32,
    /// The number of the next event.
    pub(crate) next_event: u64,
    /// It was confirmed as a subscription.
    pub(crate) subscription: bool,
    /// Its result was refused, and the error result that says so has been written.
    pub(crate) apologised: bool,
    /// How often the server restarted without having been told to stop while it was running.
    pub(crate) restarts: u32,
}

impl Head {
    /// A call that was just accepted; the journal's columns default to this.
    #[cfg(test)]
    pub(crate) const NEW: Head = Head {
        state: State::Running,
        result_waits: false,
        events_wait: 0,
        asides_wait: 0,
        next_event: 1,
        subscription: false,
        apologised: false,
        restarts: 0,
    };

    pub(crate) fn outbox_is_empty(&self) -> bool {
        !self.result_waits && self.events_wait == 0 && self.asides_wait == 0
    }
}

/// What can happen to a call.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Input {
    /// The handler returned.
    Returned(Returned),
    /// The handler confirmed the subscription.
    Confirmed(String),
    /// The handler sends an event.
    Happened { text: String, associative: bool },
    /// The handler sends the last event.
    Finished { text: String, associative: bool },
    /// The handler shows or asks something while the call goes on.
    Aside(Aside),
    /// The runtime cancelled the call.
    Cancelled,
    /// The runtime closed the thread.
    Closed,
    /// The server has started and finds the call unfinished.
    Restarted(OnRestart),
    /// The runtime took a message of this call, which has left the outbox.
    Delivered(Kind),
    /// The runtime will not have a message of this call, which has left the outbox.
    Refused(Kind, u16),
    /// The runtime could not be reached for too long; the message has left the outbox.
    GaveUp(Kind),
}

/// How a handler returned.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Returned {
    Result {
        body: Body,
        display_as: Vec<Segment>,
    },
    Error(String),
    /// A subscription's handler is done and has nothing more to say.
    Nothing,
}

/// What the tool said about being interrupted by a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnRestart {
    RunAgain,
    Apologise,
}

/// What a message in the outbox is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Result,
    Event,
    Aside,
}

/// What is said to people while a call goes on.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Aside {
    View {
        view_type: String,
        content: Value,
    },
    Choice {
        question: Question,
        prompt: String,
        choices: Vec<String>,
        default: usize,
        response_url: ResponseUrl,
    },
    Authorise {
        question: Question,
        auth_url: AuthUrl,
    },
}

/// The name of a question: a hash of what makes its URL unguessable.
pub(crate) type Question = [u8; 32];

/// What follows.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Step {
    pub(crate) head: Head,
    /// What leaves the outbox unsent, before `post` enters it.
    pub(crate) drop: Dropped,
    pub(crate) post: Option<Post>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dropped {
    Nothing,
    Everything,
}

/// A message for the runtime.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Post {
    Result { body: Body, display_as: Vec<Segment>, subscription: bool },
    Event { number: u64, text: String, associative: bool, is_final: bool },
    Aside(Aside),
}

/// Why nothing follows. Each of these is expected to happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ignored {
    /// The call is over, or has said its last word.
    Over,
    /// As many events, or asides, wait as may wait.
    Full,
    /// It is to be run again.
    RunAgain,
}

/// So many asides of one call may wait.
pub(crate) const ASIDES: u32 = 64;

/// A call whose server died this often while it ran is not started again.
pub(crate) const RESTARTS: u32 = 20;

const RESTARTED: &str = "the server restarted during the call, so its outcome is unknown; \
                         check what was done before you call it again";
const KEEPS_CRASHING: &str = "the server went down each time it tried this call, and gave up";

/// What follows when `input` happens to a call. `most_events` may wait in the outbox.
pub(crate) fn step(head: Head, input: Input, most_events: u32) -> Result<Step, Ignored> {
    match input {
        _ if head.state == State::Settled => Err(Ignored::Over),
        Input::Closed => Ok(head.settle()),
        Input::Delivered(kind) => Ok(head.taken(kind)),
        Input::Refused(kind, status) => Ok(head.refused(kind, status)),
        Input::GaveUp(Kind::Result) => Ok(head.settle()),
        Input::GaveUp(kind) => Ok(head.taken(kind)),
        Input::Cancelled => head.cancel(),
        _ if head.state == State::Ending => Err(Ignored::Over),
        Input::Restarted(on_restart) => head.restart(on_restart),
        Input::Returned(returned) => Ok(head.end(returned)),
        Input::Confirmed(_) if head.subscription => Err(Ignored::Over),
        Input::Confirmed(text) => Ok(head.confirm(text)),
        Input::Happened { .. } | Input::Finished { .. } if !head.subscription => Err(Ignored::Over),
        Input::Happened { .. } if head.events_wait >= most_events => Err(Ignored::Full),
        Input::Happened { text, associative } => Ok(head.event(text, associative, false)),
        Input::Finished { text, associative } => Ok(head.event(text, associative, true)),
        Input::Aside(_) if head.asides_wait >= ASIDES => Err(Ignored::Full),
        Input::Aside(aside) => Ok(head.aside(aside)),
    }
}

impl Head {
    fn then(self, drop: Dropped, post: Option<Post>) -> Step {
        Step { head: self, drop, post }
    }

    /// The end: nothing is sent any more.
    fn settle(mut self) -> Step {
        (self.state, self.result_waits) = (State::Settled, false);
        (self.events_wait, self.asides_wait) = (0, 0);
        self.then(Dropped::Everything, None)
    }

    fn result(mut self, drop: Dropped, body: Body, display_as: Vec<Segment>) -> Step {
        (self.state, self.result_waits) = (State::Ending, true);
        self.then(drop, Some(Post::Result { body, display_as, subscription: false }))
    }

    fn error(self, drop: Dropped, message: &str) -> Step {
        self.result(drop, Body::Text(format!("{ERROR_PREFIX}{message}")), Vec::new())
    }

    fn confirm(mut self, text: String) -> Step {
        (self.state, self.result_waits, self.subscription) = (State::Subscribed, true, true);
        let body = Body::Text(text);
        self.then(Dropped::Nothing, Some(Post::Result { body, display_as: Vec::new(), subscription: true }))
    }

    fn event(mut self, text: String, associative: bool, is_final: bool) -> Step {
        let number = self.next_event;
        self.next_event += 1;
        self.events_wait += 1;
        if is_final {
            self.state = State::Ending;
        }
        self.then(Dropped::Nothing, Some(Post::Event { number, text, associative, is_final }))
    }

    fn aside(mut self, aside: Aside) -> Step {
        self.asides_wait += 1;
        self.then(Dropped::Nothing, Some(Post::Aside(aside)))
    }

    fn end(self, returned: Returned) -> Step {
        if self.subscription {
            let text = match returned {
                Returned::Error(message) => format!("{ERROR_PREFIX}{message}"),
                Returned::Result { .. } | Returned::Nothing => "the subscription has ended".into(),
            };
            return self.event(text, false, true);
        }
        match returned {
            Returned::Result { body, display_as } => self.result(Dropped::Nothing, body, display_as),
            Returned::Error(message) => self.error(Dropped::Nothing, &message),
            Returned::Nothing => self.error(Dropped::Nothing, "the subscription ended before it began"),
        }
    }

    /// A result that is on its way stays there; a subscription sends nothing more.
    fn cancel(self) -> Result<Step, Ignored> {
        if self.state == State::Running {
            return Ok(self.error(Dropped::Nothing, "cancelled"));
        }
        if !self.subscription {
            return Err(Ignored::Over);
        }
        if !self.result_waits {
            return Ok(self.settle());
        }
        // The runtime has not seen the confirmation: the one result of this call is that it was cancelled.
        let head = Head { events_wait: 0, asides_wait: 0, subscription: false, ..self };
        Ok(head.error(Dropped::Everything, "cancelled"))
    }

    fn restart(mut self, on_restart: OnRestart) -> Result<Step, Ignored> {
        if self.state == State::Subscribed {
            return Err(Ignored::RunAgain);
        }
        if on_restart == OnRestart::Apologise {
            return Ok(self.error(Dropped::Nothing, RESTARTED));
        }
        self.restarts += 1;
        if self.restarts > RESTARTS {
            return Ok(self.error(Dropped::Nothing, KEEPS_CRASHING));
        }
        Ok(self.then(Dropped::Nothing, None))
    }

    /// One message has left the outbox.
    fn taken(mut self, kind: Kind) -> Step {
        match kind {
            Kind::Result => self.result_waits = false,
            Kind::Event => self.events_wait = self.events_wait.saturating_sub(1),
            Kind::Aside => self.asides_wait = self.asides_wait.saturating_sub(1),
        }
        if self.state == State::Ending && self.outbox_is_empty() {
            self.state = State::Settled;
        }
        self.then(Dropped::Nothing, None)
    }

    fn refused(self, kind: Kind, status: u16) -> Step {
        match (kind, status) {
            (Kind::Event, 404 | 410) => self.settle(),
            (Kind::Event | Kind::Aside, _) => self.taken(kind),
            (Kind::Result, 400 | 413) if !self.apologised => {
                let head =
                    Head { apologised: true, subscription: false, events_wait: 0, asides_wait: 0, ..self };
                head.error(Dropped::Everything, &format!("the result was refused ({status})"))
            }
            (Kind::Result, _) => self.settle(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u32 = 3;

    /// Plays inputs against a fresh call and notes what is posted and dropped, and where it ends.
    fn play(inputs: &[Input]) -> String {
        let mut head = Head::NEW;
        let mut story = Vec::new();
        for input in inputs {
            match step(head, input.clone(), MOST) {
                Err(ignored) => story.push(format!("{ignored:?}")),
                Ok(next) => {
                    head = next.head;
                    story.extend((next.drop == Dropped::Everything).then(|| "drop all".to_owned()));
                    story.extend(next.post.map(told));
                }
            }
        }
        format!("{} -> {:?}", story.join(", "), head.state)
    }

    fn told(post: Post) -> String {
        match post {
            Post::Result { body: Body::Text(text), subscription, .. } => {
                format!("{}[{text}]", if subscription { "confirm" } else { "result" })
            }
            Post::Result { body, .. } => format!("result[{body:?}]"),
            Post::Aside(aside) => format!("aside[{aside:?}]"),
            Post::Event { number, text, is_final, .. } => {
                format!("{}{number}[{text}]", if is_final { "final" } else { "event" })
            }
        }
    }

    fn returned(text: &str) -> Input {
        Input::Returned(Returned::Result { body: Body::Text(text.into()), display_as: Vec::new() })
    }
    fn failed(text: &str) -> Input {
        Input::Returned(Returned::Error(text.into()))
    }
    fn confirmed() -> Input {
        Input::Confirmed("ok".into())
    }
    fn event() -> Input {
        Input::Happened { text: "e".into(), associative: false }
    }
    fn finished() -> Input {
        Input::Finished { text: "f".into(), associative: false }
    }
    const GOT_RESULT: Input = Input::Delivered(Kind::Result);
    const GOT_EVENT: Input = Input::Delivered(Kind::Event);

    fn check(inputs: &[Input], expected: &str) {
        assert_eq!(play(inputs), expected, "{inputs:?}");
    }

    /// Proves: LC-08, LC-10, LC-26, LC-27
    #[test]
    fn a_call_yields_one_result() {
        check(&[returned("r")], "result[r] -> Ending");
        check(&[returned("r"), GOT_RESULT], "result[r] -> Settled");
        check(&[returned("r"), returned("again")], "result[r], Over -> Ending");
        check(&[failed("no")], "result[Error: no] -> Ending");
        check(&[event()], "Over -> Running");
    }

    /// Proves: CN-03, CN-08, CN-09
    #[test]
    fn a_cancelled_call_says_so_once_and_a_result_on_its_way_stays() {
        check(&[Input::Cancelled], "result[Error: cancelled] -> Ending");
        check(&[Input::Cancelled, Input::Cancelled], "result[Error: cancelled], Over -> Ending");
        check(&[Input::Cancelled, returned("late")], "result[Error: cancelled], Over -> Ending");
        check(&[returned("r"), Input::Cancelled, GOT_RESULT], "result[r], Over -> Settled");
        check(&[returned("r"), GOT_RESULT, Input::Cancelled], "result[r], Over -> Settled");
    }

    /// Proves: TC-09, TC-11
    #[test]
    fn a_closed_thread_hears_nothing_more() {
        check(&[Input::Closed], "drop all -> Settled");
        check(&[Input::Closed, returned("late"), Input::Closed], "drop all, Over, Over -> Settled");
        check(&[returned("r"), Input::Closed], "result[r], drop all -> Settled");
        check(&[confirmed(), event(), Input::Closed], "confirm[ok], event1[e], drop all -> Settled");
    }

    /// Proves: SE-04, SE-11
    #[test]
    fn events_lie_between_the_confirmation_and_the_final_one() {
        check(&[confirmed(), event(), event()], "confirm[ok], event1[e], event2[e] -> Subscribed");
        check(&[confirmed(), confirmed()], "confirm[ok], Over -> Subscribed");
        check(&[confirmed(), finished(), event()], "confirm[ok], final1[f], Over -> Ending");
        check(&[confirmed(), finished(), GOT_RESULT, GOT_EVENT], "confirm[ok], final1[f] -> Settled");
        let ended = "confirm[ok], final1[the subscription has ended] -> Ending";
        check(&[confirmed(), Input::Returned(Returned::Nothing)], ended);
        check(&[confirmed(), failed("no")], "confirm[ok], final1[Error: no] -> Ending");
        check(&[failed("no such feed")], "result[Error: no such feed] -> Ending");
    }

    /// Proves: SE-19, SE-26
    #[test]
    fn a_cancelled_subscription_sends_nothing_more() {
        let started = [confirmed(), GOT_RESULT, event()];
        let after = |inputs: &[Input]| [&started[..], inputs].concat();
        check(&after(&[Input::Cancelled]), "confirm[ok], event1[e], drop all -> Settled");
        check(&after(&[Input::Cancelled, event()]), "confirm[ok], event1[e], drop all, Over -> Settled");
        let final_waits = "confirm[ok], event1[e], final2[f], drop all -> Settled";
        check(&after(&[finished(), Input::Cancelled]), final_waits);
        // Before the confirmation was delivered, its place is taken by the one result of a cancelled call.
        let unseen = "confirm[ok], event1[e], drop all, result[Error: cancelled] -> Ending";
        check(&[confirmed(), event(), Input::Cancelled], unseen);
        check(&[confirmed(), event(), Input::Cancelled, GOT_RESULT], &unseen.replace("Ending", "Settled"));
    }

    #[test]
    fn only_so_many_events_wait() {
        let full = "confirm[ok], event1[e], event2[e], event3[e], Full -> Subscribed";
        check(&[confirmed(), event(), event(), event(), event()], full);
        let room = "confirm[ok], event1[e], event2[e], event3[e], event4[e] -> Subscribed";
        check(&[confirmed(), event(), event(), event(), GOT_EVENT, event()], room);
    }

    #[test]
    fn asides_are_said_while_the_call_goes_on_and_change_nothing_else() {
        let aside = || Input::Aside(Aside::View { view_type: "v".into(), content: Value::Null });
        let shown = r#"aside[View { view_type: "v", content: Null }]"#;
        check(&[aside()], &format!("{shown} -> Running"));
        check(&[aside(), returned("r")], &format!("{shown}, result[r] -> Ending"));
        check(&[returned("r"), aside()], "result[r], Over -> Ending");
        let delivered = [aside(), returned("r"), Input::Delivered(Kind::Aside), GOT_RESULT];
        check(&delivered, &format!("{shown}, result[r] -> Settled"));
        let refused = [aside(), returned("r"), Input::Refused(Kind::Aside, 410), GOT_RESULT];
        check(&refused, &format!("{shown}, result[r] -> Settled"));
        let full = vec![aside(); ASIDES as usize + 1];
        assert!(play(&full).ends_with(", Full -> Running"));
    }

    /// Proves: LC-13, LC-14
    #[test]
    fn a_restart_runs_again_what_may_run_again() {
        let again = Input::Restarted(OnRestart::RunAgain);
        let apologise = Input::Restarted(OnRestart::Apologise);
        check(std::slice::from_ref(&again), " -> Running");
        check(&[confirmed(), again.clone()], "confirm[ok], RunAgain -> Subscribed");
        check(&[confirmed(), apologise.clone()], "confirm[ok], RunAgain -> Subscribed");
        check(std::slice::from_ref(&apologise), &format!("result[Error: {RESTARTED}] -> Ending"));
        check(&[returned("r"), apologise], "result[r], Over -> Ending");
        let many = vec![again; RESTARTS as usize + 1];
        check(&many, &format!("result[Error: {KEEPS_CRASHING}] -> Ending"));
    }

    #[test]
    fn a_refused_result_is_followed_once_by_one_that_says_so() {
        let refused = |status| Input::Refused(Kind::Result, status);
        let sorry = "result[r], drop all, result[Error: the result was refused (413)]";
        check(&[returned("r"), refused(413)], &format!("{sorry} -> Ending"));
        check(&[returned("r"), refused(413), GOT_RESULT], &format!("{sorry} -> Settled"));
        check(&[returned("r"), refused(413), refused(400)], &format!("{sorry}, drop all -> Settled"));
        for status in [301, 401, 403, 404, 409, 410, 429] {
            check(&[returned("r"), refused(status)], "result[r], drop all -> Settled");
        }
        let unconfirmed =
            "confirm[ok], event1[e], drop all, result[Error: the result was refused (400)] -> Ending";
        check(&[confirmed(), event(), refused(400)], unconfirmed);
        check(&[confirmed(), event(), refused(410)], "confirm[ok], event1[e], drop all -> Settled");
    }

    #[test]
    fn an_event_that_finds_no_thread_ends_its_subscription() {
        let started = [confirmed(), GOT_RESULT, event(), event()];
        let after = |input: Input| [&started[..], &[input]].concat();
        let story = "confirm[ok], event1[e], event2[e]";
        for status in [404, 410] {
            check(&after(Input::Refused(Kind::Event, status)), &format!("{story}, drop all -> Settled"));
        }
        for status in [400, 401, 403, 413, 429] {
            check(&after(Input::Refused(Kind::Event, status)), &format!("{story} -> Subscribed"));
        }
        check(&after(Input::GaveUp(Kind::Event)), &format!("{story} -> Subscribed"));
        check(&[returned("r"), Input::GaveUp(Kind::Result)], "result[r], drop all -> Settled");
    }
}
