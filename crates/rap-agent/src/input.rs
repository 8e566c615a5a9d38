//! Inputs: everything that can happen to a thread.
//!
//! An input describes only what happened. Stored state that a step needs besides the head is in [`crate::Facts`].

use std::time::Duration;

use rap_api::{CONTENT_ITEMS, IMAGE_BYTES, IMAGE_TYPES, OnBusy};
use rap_protocol::{AuthUrl, Body, CallId, Content, EventId, ResponseUrl, Segment, ThreadId, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::title::title_of;
use crate::{Arguments, Item, Server, Speaker, Thoughts, Usage};

/// An input of [`crate::step`].
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// The thread was created.
    Begin {
        /// The user's first message; `None` leaves the thread idle.
        message: Option<UserMessage>,
    },
    /// The user sent a message.
    UserMessage {
        /// Content of the message.
        message: UserMessage,
        /// Effect of the message on a busy thread.
        on_busy: OnBusy,
    },
    /// The model answered.
    TurnEnded {
        /// Number of the turn that the answer belongs to. An answer to any other turn than the current one is ignored.
        turn: u64,
        /// The answer, with its calls resolved against the toolset.
        answer: TurnAnswer,
    },
    /// The request to the model failed.
    TurnFailed {
        /// Number of the turn.
        turn: u64,
        /// Reason that is shown to the user.
        why: String,
        /// Retry behaviour.
        retry: TurnRetry,
    },
    /// The prompt does not fit into the model's context window, and a summary would not help.
    PromptTooLong {
        /// Number of the turn.
        turn: u64,
        /// Reason that is shown to the user.
        why: String,
    },
    /// The prompt was too long, and the model wrote a summary of the entries up to
    /// [`crate::Head::summarisable_up_to`].
    Summarised {
        /// Number of the turn whose prompt was too long.
        turn: u64,
        /// Text of the summary.
        text: String,
        /// Tokens that the summary cost.
        usage: Usage,
    },
    /// The model answered a turn that was abandoned. Only the tokens are counted.
    UnusedAnswer(Usage),
    /// A tool sent a result.
    ToolResult {
        /// Call that the result belongs to.
        call: CallId,
        /// Result as it arrived in the callback.
        result: ToolResult,
    },
    /// The tool will not send a result: the invocation, or a user's answer that the tool waits for, could not be
    /// delivered, or the server has lost the call.
    CallFailed {
        /// Call that failed.
        call: CallId,
        /// Result for the model, which states the reason.
        text: String,
    },
    /// A callback of an open call was refused because it was malformed or too large.
    CallbackRefused {
        /// Call that the callback belongs to.
        call: CallId,
        /// Status and reason, such as `413: too large`.
        why: String,
    },
    /// The timer of a call or schedule fired.
    TimerFired {
        /// Call or schedule that owns the timer.
        call: CallId,
    },
    /// A tool sent an event of a subscription.
    Event {
        /// Call that subscribed.
        call: CallId,
        /// Event as it arrived in the callback.
        event: Event,
    },
    /// Status checks showed that the tool server has lost an active subscription.
    SubscriptionLost {
        /// Call that subscribed.
        call: CallId,
    },
    /// A tool asks the user to sign in.
    SignInRequested {
        /// Call that needs the sign-in.
        call: CallId,
        /// Address of the sign-in page.
        url: AuthUrl,
    },
    /// A tool asks the user to choose.
    ChoiceRequested {
        /// Call that asks.
        call: CallId,
        /// Question and possible answers.
        choice: Choice,
    },
    /// A tool updated a view.
    View {
        /// Call whose callback URL received the update.
        call: CallId,
        /// Type of the view. A view replaces an earlier one of the same server and type.
        view_type: String,
        /// Content, which the runtime does not interpret.
        content: Value,
    },
    /// The user answers the oldest open question of a call.
    Choose {
        /// Call that asked.
        call: CallId,
        /// Index of the chosen answer; `None` dismisses the question, which selects the default answer.
        selected: Option<usize>,
    },
    /// Stop all open calls and the answer in progress.
    Interrupt,
    /// Stop one call or end one subscription.
    Cancel {
        /// Open call, or call that subscribed.
        call: CallId,
    },
    /// Resume a failed or paused thread.
    Resume,
    /// Close the thread and its descendants.
    Close,
    /// The due time of the thread ([`crate::Head::due`]) has passed.
    Due,
    /// Write a notice for the user into the history.
    Notice {
        /// Text of the notice.
        text: String,
    },
    /// Another thread of the same session sent a message.
    FromThread {
        /// Thread that sent it.
        sender: ThreadId,
        /// Message that was sent.
        message: ThreadMessage,
    },
}

/// A message of the user: a text, and further texts and images.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UserMessage {
    /// Text of the message; may be empty if there is further content.
    pub text: String,
    /// Further content after the text.
    pub content: Vec<Content>,
}

impl UserMessage {
    /// Returns the title that a thread gets from this message.
    pub(crate) fn title(&self) -> Option<String> {
        let more = self.content.iter().filter_map(|item| match item {
            Content::Text { text } => Some(text.as_str()),
            Content::Image(_) => None,
        });
        let image = || (!self.content.is_empty()).then(|| "(an image)".to_owned());
        std::iter::once(self.text.as_str()).chain(more).find_map(title_of).or_else(image)
    }
}

/// Checks the further content of a user's message. The error says what is expected.
pub fn check_content(content: &[Content]) -> Result<(), String> {
    if content.len() > CONTENT_ITEMS {
        return Err(format!("content: expected at most {CONTENT_ITEMS} items, found {}", content.len()));
    }
    for (index, item) in content.iter().enumerate() {
        let Content::Image(image) = item else { continue };
        if !IMAGE_TYPES.contains(&image.media_type.as_str()) {
            let types = IMAGE_TYPES.join(", ");
            return Err(format!("content[{index}].mediaType: expected one of {types}"));
        }
        if !(1..=IMAGE_BYTES).contains(&image.data.len()) {
            let length = image.data.len();
            return Err(format!(
                "content[{index}].data: expected 1 to {IMAGE_BYTES} bytes of base64, found {length}"
            ));
        }
    }
    Ok(())
}

impl<T: Into<String>> From<T> for UserMessage {
    fn from(text: T) -> UserMessage {
        UserMessage { text: text.into(), content: Vec::new() }
    }
}

impl From<UserMessage> for Item {
    fn from(message: UserMessage) -> Item {
        Item::User { text: message.text, content: message.content, from: Speaker::User }
    }
}

/// A message between threads of one session. It is stored until the receiver has processed it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThreadMessage {
    /// Sent by a parent that was closed: the child is closed as well.
    Close,
    /// Sent by the thread through which the user resumed the session: the receiver resumes as well.
    Resume,
    /// Sent by a child that was closed.
    ChildClosed,
    /// Sent by an event child that stopped working without being closed: it is idle, failed, paused, or has been waiting
    /// for a long time. Its slot is free.
    #[serde(rename = "child_rests")]
    EventChildIdle,
    /// Sent by an event child: a notice for the user, to be written into the parent's history.
    Notice {
        /// Text of the notice.
        text: String,
    },
    /// Sent by a child: a report for the parent's model.
    Report {
        /// Call of the parent that spawned the child or subscribed to its events.
        call: CallId,
        /// Tool of that call.
        tool: String,
        /// Text of the report.
        text: String,
        /// Time of the newest external input that the child knows of.
        #[serde(default, rename = "heard")]
        external_input_at: Timestamp,
    },
    /// Sent by a parent: a message for the child's model.
    #[serde(rename = "say")]
    Text {
        /// Text of the message.
        text: String,
        /// Time of the newest external input that the parent knows of.
        #[serde(default, rename = "heard")]
        external_input_at: Timestamp,
    },
}

/// Answer of the model.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TurnAnswer {
    /// Text of the answer; may be empty.
    pub text: String,
    /// Calls of the answer, in order.
    pub calls: Vec<PlannedCall>,
    /// Thinking that came with the answer; `None` if the model did not think.
    pub thoughts: Option<Thoughts>,
    /// Tokens that the answer cost.
    pub usage: Usage,
}

/// A call of the model's answer, resolved against the toolset.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedCall {
    /// Id that the model gave the call; `None` if it is malformed.
    pub model_id: Option<CallId>,
    /// Name of the tool, as the model wrote it.
    pub name: String,
    /// Arguments that the model gave.
    pub arguments: Arguments,
    /// Text that users see for the call, from the tool's `displayScript`; `None` if it has none.
    pub display: Option<String>,
    /// Decision about the call.
    pub plan: Plan,
}

/// Decision about a call: invoke, ask for approval, run or refuse.
#[derive(Debug, Clone, PartialEq)]
pub enum Plan {
    /// A tool server is invoked.
    Invoke(Server),
    /// A tool server is invoked after the user has allowed the call.
    Approve {
        /// Tool server that would be invoked.
        server: Server,
        /// Question for the user.
        prompt: String,
    },
    /// The step itself runs a built-in tool.
    BuiltIn(BuiltIn),
    /// The call cannot be executed. The text is its result, which states the reason.
    Refuse(String),
}

/// A tool of the runtime itself.
#[derive(Debug, Clone, PartialEq)]
pub enum BuiltIn {
    /// `cancel_subscription {tool_call_id}`.
    CancelSubscription {
        /// Id of the call that subscribed, as the model wrote it.
        tool_call_id: String,
    },
    /// `spawn_thread {instructions}`.
    SpawnThread {
        /// Task of the child.
        instructions: String,
    },
    /// `report_to_parent {report}`.
    ReportToParent {
        /// Text of the report.
        report: String,
    },
    /// `close_thread {report?}`.
    CloseThread {
        /// Last report to the parent.
        report: Option<String>,
    },
    /// `send_message_to_child {thread_id, message}`.
    SendMessageToChild {
        /// Id of the child, as the model wrote it.
        thread_id: String,
        /// Text of the message.
        message: String,
    },
    /// `sleep {seconds}`.
    Sleep {
        /// Time from the step on. The clock may be set back between the plan and the step, and may differ between nodes.
        duration: Duration,
    },
    /// `sleep_until {time, timezone}`.
    SleepUntil {
        /// Time at which the sleep ends.
        until: Timestamp,
    },
    /// `wait {}`.
    Wait,
    /// `schedule {cron, timezone, text}`.
    Schedule {
        /// Time of the first occurrence.
        next: Timestamp,
        /// Result for the model.
        confirmation: String,
    },
}

/// Retry behaviour after a failed turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TurnRetry {
    /// The runtime repeats the request after a pause.
    Later,
    /// The same request would fail again, for example because of a wrong API key.
    Never,
}

/// Result of a call, as the tool sent it.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolResult {
    /// Content for the model.
    pub content: Body,
    /// Content that users see instead; empty if they see `content`.
    pub display: Vec<Segment>,
    /// True if the result confirms a subscription.
    pub subscription: bool,
}

impl ToolResult {
    /// Returns a result that is plain text and confirms no subscription.
    pub fn text(text: impl Into<String>) -> ToolResult {
        ToolResult { content: Body::Text(text.into()), display: Vec::new(), subscription: false }
    }

    /// Size of the texts and images, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let part = |part: &Content| match part {
            Content::Text { text } => text.len(),
            Content::Image(image) => image.data.len(),
        };
        let segment = |segment: &Segment| match segment {
            Segment::Text(text) => text.len(),
            Segment::Diff { path, patch } => path.len() + patch.len(),
            Segment::Image(image) => image.data.len(),
        };
        let content = match &self.content {
            Body::Text(text) => text.len(),
            Body::Content(parts) => parts.iter().map(part).sum(),
        };
        (content + self.display.iter().map(segment).sum::<usize>()) as u64
    }
}

/// Event of a subscription, as the tool sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Id for deduplication: a second event of the same subscription and id is ignored.
    pub id: Option<EventId>,
    /// Content for the model.
    pub text: String,
    /// True if the event enters the subscribing thread itself. If not, an event child handles it.
    pub associative: bool,
    /// True if the subscription ends with this event.
    pub is_final: bool,
}

/// A question of a tool to the user, with the possible answers.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// Text of the question.
    pub prompt: String,
    /// Possible answers.
    pub choices: Vec<String>,
    /// Index of the answer that is sent if the user dismisses the question.
    pub default: usize,
    /// URL that the answer is sent to.
    pub response_url: ResponseUrl,
    /// Digest of that URL. Two questions of a call with the same digest are the same question.
    pub digest: u64,
}
