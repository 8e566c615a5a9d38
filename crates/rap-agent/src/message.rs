//! Messages: everything that can happen to a thread.
//!
//! A message carries what the rules need to know besides the head, so that a step never reads anything: what
//! became of a call that is no longer open, whether an event was seen before, the id of a child to be born.

use rap_protocol::{AuthUrl, Body, CallId, EventId, ResponseUrl, Segment, ThreadId, Timestamp};
use serde_json::{Map, Value};

use crate::{Arguments, Seq, Server, Thoughts, Usage};

/// Something that happens to a thread.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// A user spoke.
    Said {
        /// What was said.
        text: String,
        /// What to do if the thread is busy.
        on_busy: OnBusy,
    },
    /// The model answered.
    TurnEnded {
        /// Which question it answers.
        turn: u64,
        /// What it answered.
        answer: Answer,
    },
    /// The model could not be asked.
    TurnFailed {
        /// Which question.
        turn: u64,
        /// Why, for people.
        why: String,
        /// Whether it makes sense to ask again.
        again: Again,
    },
    /// The model may not be asked: the budget of the session is spent.
    OverBudget {
        /// Which question.
        turn: u64,
        /// Which budget, for people.
        why: String,
    },
    /// An answer came that nobody waits for any more; it was paid for all the same.
    Spent(Usage),
    /// A tool sent a result.
    Returned {
        /// The call.
        call: CallId,
        /// The result.
        result: Outcome,
        /// What is known of the call, should it not be open any more.
        past: Option<PastCall>,
    },
    /// A call will have no result of its tool: its invocation or an answer it waits for could not be delivered.
    CallFailed {
        /// The call.
        call: CallId,
        /// The result that says why.
        text: String,
    },
    /// A call took longer than it may.
    TimedOut {
        /// The call.
        call: CallId,
    },
    /// An event of a subscription.
    Happened {
        /// The call that subscribed.
        call: CallId,
        /// The event.
        event: Event,
        /// What is known of the call, should it be neither open nor a subscription.
        past: Option<PastCall>,
        /// Whether an event with the same id was taken before.
        seen: bool,
        /// What a child for it would need; given where the event is not associative.
        birth: Option<Birth>,
    },
    /// A tool asks the user to sign in.
    WantsSignIn {
        /// The call.
        call: CallId,
        /// Where.
        url: AuthUrl,
    },
    /// A tool asks the user to choose.
    WantsChoice {
        /// The call.
        call: CallId,
        /// The question.
        choice: Choice,
    },
    /// A tool has something to look at.
    Viewed {
        /// The call by whose callback URL it came.
        call: CallId,
        /// What kind of view.
        view_type: String,
        /// What it shows.
        content: Value,
    },
    /// The user answers the oldest question of a call.
    Chose {
        /// The call.
        call: CallId,
        /// The answer; none dismisses the question.
        selected: Option<usize>,
    },
    /// Stop what it is doing.
    Interrupt,
    /// Stop one call, or one subscription.
    Cancel {
        /// The call.
        call: CallId,
    },
    /// Go on after a failure or a pause.
    Resume,
    /// Close the thread and its descendants.
    Close,
    /// The time that [`crate::Head::due`] named has come.
    Due,
    /// Something that people should know.
    Noted {
        /// What.
        text: String,
    },
    /// A child was closed.
    ChildClosed {
        /// Which.
        child: ThreadId,
        /// What the next child needs, should events wait for one.
        birth: Option<Birth>,
    },
    /// A child that was made for events is not at work any more.
    ChildRests {
        /// Which.
        child: ThreadId,
        /// What the next child needs, should events wait for one.
        birth: Option<Birth>,
    },
    /// A child reports.
    Reported {
        /// Which.
        child: ThreadId,
        /// The call that it was born of.
        call: CallId,
        /// The tool of that call.
        tool: String,
        /// What it reports.
        text: String,
    },
    /// The parent says something.
    Told {
        /// What.
        text: String,
    },
    /// The time of a schedule has come.
    Ticked {
        /// The call that made the schedule.
        call: CallId,
        /// What it says.
        text: String,
        /// When it comes again.
        next: Option<Timestamp>,
    },
}

/// What a user's message does to a busy thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnBusy {
    /// It joins: open calls go on in the background and the model hears of it at once.
    #[default]
    Join,
    /// Open calls and the answer in progress are given up.
    Interrupt,
    /// It waits until the thread would be idle.
    Enqueue,
    /// It is refused.
    Reject,
}

/// What the model answered.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Answer {
    /// What it said.
    pub text: String,
    /// The calls it makes, in order.
    pub calls: Vec<PlannedCall>,
    /// What it thought on the way.
    pub thoughts: Option<Thoughts>,
    /// What it cost.
    pub usage: Usage,
}

/// A call that the model makes, resolved against the toolset.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedCall {
    /// The model's own id, if it is well-formed and new in all that the thread can see.
    pub id: Option<CallId>,
    /// The model's own id, where it can not be used.
    pub call_id: Option<CallId>,
    /// The tool, as the model wrote it.
    pub name: String,
    /// What it is called with.
    pub arguments: Arguments,
    /// What people see of it, where its tool has said how to show it.
    pub display: Option<String>,
    /// What is to be done.
    pub plan: Plan,
}

/// What is to be done with a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Plan {
    /// A tool server carries it out.
    Invoke(Server),
    /// A tool server carries it out, if a person allows it.
    Approve {
        /// Who would carry it out.
        server: Server,
        /// What the person is asked.
        prompt: String,
    },
    /// The runtime carries it out, inside the step.
    BuiltIn(BuiltIn),
    /// It can not be carried out; the result that says why.
    Refuse(String),
}

/// A tool of the runtime itself.
#[derive(Debug, Clone, PartialEq)]
pub enum BuiltIn {
    /// `cancel_subscription {tool_call_id}`.
    CancelSubscription {
        /// As the model wrote it.
        tool_call_id: String,
    },
    /// `spawn_thread {instructions}`.
    SpawnThread {
        /// What the child is to do.
        instructions: String,
        /// The child.
        birth: Birth,
    },
    /// `report_to_parent {report}`.
    ReportToParent {
        /// The report.
        report: String,
    },
    /// `close_thread {report?}`.
    CloseThread {
        /// The last report.
        report: Option<String>,
    },
    /// `send_message_to_child {thread_id, message}`.
    SendMessageToChild {
        /// As the model wrote it.
        thread_id: String,
        /// What the child is told.
        message: String,
    },
    /// `sleep {seconds}` and `sleep_until {time, timezone}`.
    Sleep {
        /// When it is over.
        until: Timestamp,
    },
    /// `wait {}`.
    Wait,
    /// `schedule {cron, timezone, text}`.
    Schedule {
        /// The first time.
        next: Timestamp,
        /// What the model hears of it.
        confirmation: String,
    },
}

/// Whether a failed question is asked again by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Again {
    /// It may work later.
    Later,
    /// Not before somebody changed something.
    No,
}

/// A result as a tool sent it.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// What the model sees.
    pub content: Body,
    /// What people see instead.
    pub display: Vec<Segment>,
    /// Whether the call is a subscription from now on.
    pub subscription: bool,
}

/// An event as a tool sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The same id is the same event.
    pub id: Option<EventId>,
    /// What happened.
    pub text: String,
    /// Whether it belongs into the thread itself.
    pub associative: bool,
    /// Whether it is the last.
    pub is_final: bool,
}

/// What a child needs that the head does not know.
#[derive(Debug, Clone, PartialEq)]
pub struct Birth {
    /// The thread itself.
    pub parent: ThreadId,
    /// How many ancestors a child has.
    pub depth: usize,
    /// The id of the child, if there is to be one.
    pub child: ThreadId,
    /// The arguments of the call that it is born of.
    pub arguments: Map<String, Value>,
}

/// A call that is no longer open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PastCall {
    /// The tool.
    pub name: String,
    /// The assistant entry that made it.
    pub seq: Seq,
    /// What became of it.
    pub state: CallState,
}

/// What became of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallState {
    /// It has no result of its own yet.
    Open,
    /// Its result is in the history.
    Returned,
    /// It was cancelled.
    Interrupted,
    /// Its invocation was not accepted.
    Failed,
    /// It took too long.
    TimedOut,
    /// Its result confirmed a subscription, which is active.
    Subscribed,
    /// Its subscription has ended.
    Ended,
}

/// A question with choices.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The question.
    pub prompt: String,
    /// The possible answers.
    pub choices: Vec<String>,
    /// The one for a question that is dismissed.
    pub default: usize,
    /// Where the answer goes.
    pub response_url: ResponseUrl,
    /// A digest of that.
    pub digest: u64,
}
