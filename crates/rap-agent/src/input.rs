//! Inputs: everything that can happen to a thread.
//!
//! An input says what happened and nothing else. What the rules must know besides the head is in [`crate::Facts`].

use rap_protocol::{AuthUrl, Body, CallId, EventId, ResponseUrl, Segment, ThreadId, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Arguments, Server, Thoughts, Usage};

/// Something that happens to a thread.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// The thread was made, perhaps with a first message of its user.
    Begin {
        /// The message.
        text: Option<String>,
    },
    /// A message of the user.
    UserMessage {
        /// The message.
        text: String,
        /// What to do if the thread is busy.
        on_busy: OnBusy,
    },
    /// The model answered.
    TurnEnded {
        /// The question that it answers.
        turn: u64,
        /// The answer.
        answer: Answer,
    },
    /// The model could not be asked.
    TurnFailed {
        /// The question.
        turn: u64,
        /// The reason, for people.
        why: String,
        /// Whether it makes sense to ask again.
        again: Again,
    },
    /// The question cannot be made short enough for the model.
    PromptTooLong {
        /// The question.
        turn: u64,
        /// The reason, for people.
        why: String,
    },
    /// Instead of an answer, the model gave a summary of what it has answered before: everything up to
    /// [`crate::Head::coverable`].
    Summarised {
        /// The question for which there was no room.
        turn: u64,
        /// The summary.
        text: String,
        /// Its cost.
        usage: Usage,
    },
    /// An answer was paid for that nobody waits for any more.
    Spent(Usage),
    /// A tool sent a result.
    ToolResult {
        /// The call.
        call: CallId,
        /// The result.
        result: ToolResult,
    },
    /// A call will have no result of its tool: its invocation, or an answer that it waits for, could not be delivered.
    CallFailed {
        /// The call.
        call: CallId,
        /// The result that says why.
        text: String,
    },
    /// A callback of an open call was refused as malformed or too large.
    CallbackRefused {
        /// The call.
        call: CallId,
        /// The reason, such as `413: too large`.
        why: String,
    },
    /// The timer of a call or schedule has fired.
    TimerFired {
        /// The call.
        call: CallId,
    },
    /// An event of a subscription.
    Event {
        /// The call that subscribed.
        call: CallId,
        /// The event.
        event: Event,
    },
    /// The tool server of an active subscription does not know it any more.
    SubscriptionLost {
        /// The call that subscribed.
        call: CallId,
    },
    /// A tool asks the user to sign in.
    SignInRequested {
        /// The call.
        call: CallId,
        /// The address to sign in at.
        url: AuthUrl,
    },
    /// A tool asks the user to choose.
    ChoiceRequested {
        /// The call.
        call: CallId,
        /// The question.
        choice: Choice,
    },
    /// A tool shows something to people.
    View {
        /// The call by whose callback URL it came.
        call: CallId,
        /// The kind of view.
        view_type: String,
        /// Its content.
        content: Value,
    },
    /// The user answers the oldest question of a call.
    Choose {
        /// The call.
        call: CallId,
        /// The answer; none dismisses the question.
        selected: Option<usize>,
    },
    /// Stop the calls and the answer in progress.
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
    Notice {
        /// The text.
        text: String,
    },
    /// A message of another thread of the session.
    FromThread {
        /// The sender.
        sender: ThreadId,
        /// The message.
        message: ThreadMessage,
    },
}

/// A message between threads of one session. Stored until its receiver has taken it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThreadMessage {
    /// From a parent that is closed: close too.
    Close,
    /// From a thread whose session was resumed: go on too.
    Resume,
    /// From a child: it is closed.
    ChildClosed,
    /// From a child for events: it is not at work any more.
    #[serde(rename = "child_rests")]
    ChildIdle,
    /// From a child for events: people should know this.
    Notice {
        /// The text.
        text: String,
    },
    /// From a child: a report.
    Report {
        /// The call of the parent that started the child.
        call: CallId,
        /// The tool of that call.
        tool: String,
        /// The report.
        text: String,
        /// Time of the newest input from outside that the child knows of.
        #[serde(default)]
        heard: Timestamp,
    },
    /// From a parent: a text for the child's model.
    #[serde(rename = "say")]
    Text {
        /// The text.
        text: String,
        /// Time of the newest input from outside that the parent knows of.
        #[serde(default)]
        heard: Timestamp,
    },
}

/// What a user's message does to a busy thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnBusy {
    /// Open calls go on in the background and the model is asked at once.
    #[default]
    Join,
    /// Open calls and the answer in progress are given up.
    Interrupt,
    /// It waits until the thread would be idle.
    Enqueue,
    /// It is refused.
    Reject,
}

/// An answer of the model.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// The calls it makes, in order.
    pub calls: Vec<PlannedCall>,
    /// The model's thoughts.
    pub thoughts: Option<Thoughts>,
    /// Its cost.
    pub usage: Usage,
}

/// A call that the model makes, resolved against the toolset.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedCall {
    /// The model's own id, if it is well-formed.
    pub call_id: Option<CallId>,
    /// The tool, as the model wrote it.
    pub name: String,
    /// The arguments.
    pub arguments: Arguments,
    /// How people see it, if its tool says so.
    pub display: Option<String>,
    /// What is to be done.
    pub plan: Plan,
}

/// What is to be done with a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Plan {
    /// A tool server carries it out.
    Invoke(Server),
    /// A tool server carries it out if a person allows it.
    Approve {
        /// The tool server.
        server: Server,
        /// The question to the person.
        prompt: String,
    },
    /// The runtime carries it out, inside the step.
    BuiltIn(BuiltIn),
    /// It cannot be carried out; the result that says why.
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
        /// The child's task.
        instructions: String,
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
        /// The message.
        message: String,
    },
    /// `sleep {seconds}` and `sleep_until {time, timezone}`.
    Sleep {
        /// The end of the sleep.
        until: Timestamp,
    },
    /// `wait {}`.
    Wait,
    /// `schedule {cron, timezone, text}`.
    Schedule {
        /// The first time.
        next: Timestamp,
        /// The result for the model.
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
pub struct ToolResult {
    /// What the model sees.
    pub content: Body,
    /// What people see instead.
    pub display: Vec<Segment>,
    /// Whether the call is a subscription from now on.
    pub subscription: bool,
}

impl ToolResult {
    /// A plain text.
    pub fn text(text: impl Into<String>) -> ToolResult {
        ToolResult { content: Body::Text(text.into()), display: Vec::new(), subscription: false }
    }
}

/// An event as a tool sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Two events with the same id are the same event.
    pub id: Option<EventId>,
    /// The content.
    pub text: String,
    /// Whether it belongs into the thread itself.
    pub associative: bool,
    /// Whether it is the last.
    pub is_final: bool,
}

/// A question with choices.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The question.
    pub prompt: String,
    /// The possible answers.
    pub choices: Vec<String>,
    /// The answer of a question that is dismissed.
    pub default: usize,
    /// The address that the answer is sent to.
    pub response_url: ResponseUrl,
    /// A digest of that address.
    pub digest: u64,
}
