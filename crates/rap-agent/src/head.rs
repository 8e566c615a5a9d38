//! The head: the state of a thread besides its history. It is small, and [`Limits`] bounds its size.
//!
//! Data that exists only in one phase belongs to that variant of [`Phase`]. `stored.rs` defines the stored form. Some
//! types here, such as [`OpenCall`] and [`Subscription`], have the name of a type of `rap-api`, which is what clients
//! see of them.

use std::time::Duration;

use rap_api::Status;
use rap_protocol::{CallId, ThreadId, Timestamp};
use serde::{Deserialize, Serialize};

use crate::{InputQueue, Limits, Seq, texts};

/// Longest pause of a thread: that before a failed thread retries, and that until the hour of its session's budget is over.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(3600);
/// Number of questions that a thread keeps for each one that may be open.
pub const KEPT_QUESTIONS: usize = 4;

/// State of a thread, without its history and without the content of held input.
#[derive(Debug, Clone, PartialEq)]
pub struct Head {
    pub(crate) phase: Phase,
    pub(crate) origin: Origin,
    /// Number of the last turn; 0 before the first.
    pub(crate) turn: u64,
    /// Number of turns since the last external input reset the count.
    pub(crate) turns_since_external_input: u32,
    /// Time of the newest external input (from a user, a tool, an event or a long timer) that this thread received or
    /// learned of from other threads of its session.
    pub(crate) external_input_at: Timestamp,
    /// Value of `external_input_at` when `turns_since_external_input` was last reset.
    pub(crate) turns_reset_at: Timestamp,
    /// Number of the last entry.
    pub(crate) seq: Seq,
    /// Last entry at which no call was open and nothing was unanswered. Event children inherit the history up to here.
    pub(crate) settled_up_to: Seq,
    /// Last entry that the model has answered; every call up to there has a result. A summary ends here.
    pub(crate) answered_up_to: Seq,
    /// Last entry that the newest summary covers; 0 without a summary.
    pub(crate) summarised_up_to: Seq,
    /// Input tokens of the last answer; 0 if unknown or outdated.
    pub(crate) prompt_tokens: u64,
    /// Size of the results since the last model request, in bytes.
    pub(crate) result_bytes: u64,
    /// Number of ids that the thread has made: for calls, questions and children.
    pub(crate) ids_made: u64,
    /// Open calls that have a placeholder result in the history.
    pub(crate) background: Vec<OpenCall>,
    pub(crate) subscriptions: Vec<Subscription>,
    pub(crate) questions: Vec<Question>,
    /// Input that is written into the history when the batch closes or the answer has no calls.
    pub(crate) held: InputQueue,
    /// Input that is written into the history when the thread would be idle.
    pub(crate) queued: InputQueue,
    /// Open children that count against the limits: those that the model spawned, and active event children.
    pub(crate) counted_children: Vec<ThreadId>,
    /// Open event children that reported themselves idle.
    pub(crate) idle_event_children: Vec<ThreadId>,
    /// Waiting events and active event children, by subscription.
    pub(crate) backlogs: Vec<Backlog>,
    /// True if this thread is an event child that has reported itself idle to its parent.
    pub(crate) reported_idle: bool,
    /// True if this thread was spawned by its parent's model, and has sent no report since that or since the last message
    /// of its parent. The parent may wait for one.
    pub(crate) owes_report: bool,
    pub(crate) usage: Usage,
    /// Title made from the first message, the instructions or the event that the thread began with.
    pub(crate) title: Option<String>,
}

/// Phase of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// The thread waits for input.
    Idle,
    /// The model is being asked; the turn is [`Head::turn`].
    Asking(TurnInProgress),
    /// Calls of the last assistant entry are open.
    Waiting {
        /// Calls without a result, in call order. Never empty between steps.
        batch: Vec<OpenCall>,
    },
    /// The last request to the model failed.
    Failed {
        /// Reason that is shown to the user.
        why: String,
        /// Time of the first failure since the last success or the last action of the user.
        since: Timestamp,
        /// Time of the next attempt; `None` if the user has to act first.
        retry_at: Option<Timestamp>,
    },
    /// The model is not asked until the user resumes the thread or the pause ends.
    Paused(Pause),
    /// The thread accepts no more input.
    Closed,
}

/// A turn that the model has not answered yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TurnInProgress {
    /// Last entry that the prompt includes.
    pub up_to: Seq,
    /// Number of consecutive answers that user messages dropped.
    pub dropped: u8,
    /// Time of the first failure, if this turn retries a failed one.
    pub failing_since: Option<Timestamp>,
}

/// Reason and end of a pause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pause {
    /// Reason that is shown to the user.
    pub why: String,
    /// Owner of the limit that was reached.
    pub scope: PauseScope,
    /// Time at which the thread resumes without help; `None` if the user has to resume it.
    pub until: Option<Timestamp>,
}

/// Owner of the limit that paused a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseScope {
    /// The session's budget. Resuming renews it and resumes all threads that it paused.
    #[default]
    Session,
    /// The thread itself.
    Thread,
}

/// Origin of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// Created by a client of the runtime.
    #[default]
    Root,
    /// Created for events of a subscription of its parent. Such a thread is an event child.
    Event {
        /// Thread that has the subscription.
        parent: ThreadId,
        /// Call that subscribed.
        call: CallId,
        /// Tool of that call.
        tool: String,
    },
    /// Created by its parent's model with `spawn_thread`.
    Spawn {
        /// Thread that spawned it.
        parent: ThreadId,
        /// Call of `spawn_thread`.
        call: CallId,
    },
}

impl Origin {
    pub(crate) fn is_root(&self) -> bool {
        *self == Origin::Root
    }

    pub(crate) fn is_event(&self) -> bool {
        matches!(self, Origin::Event { .. })
    }

    /// Returns the parent, the call of the parent that created the thread, and the tool of that call; `None` for a root.
    pub fn parent(&self) -> Option<(&ThreadId, &CallId, &str)> {
        match self {
            Origin::Root => None,
            Origin::Event { parent, call, tool } => Some((parent, call, tool)),
            Origin::Spawn { parent, call } => Some((parent, call, texts::SPAWN_THREAD)),
        }
    }

    /// Returns the cause of the thread. `None` means that it has the cause of its parent, so that spawning a thread grants
    /// no rights.
    pub fn cause(&self) -> Option<Cause> {
        match self {
            Origin::Root => Some(Cause::Client),
            Origin::Event { .. } => Some(Cause::Event),
            Origin::Spawn { .. } => None,
        }
    }
}

/// Cause of a thread, which decides what its agent may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// A client of the runtime.
    Client,
    /// An event, whose content is not trusted.
    Event,
}

/// Tool server of a call: its configured base URL.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Server(pub String);

impl Server {
    const RUNTIME: &str = "rap:runtime";

    /// Returns the server value that stands for the runtime itself, which executes sleeps, waits and schedules.
    pub fn runtime() -> Server {
        Server(Server::RUNTIME.into())
    }

    /// Returns whether this is the runtime itself.
    pub fn is_runtime(&self) -> bool {
        self.0 == Server::RUNTIME
    }
}

/// A call that has no result yet, or only a placeholder result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenCall {
    /// Id that the runtime made.
    pub id: CallId,
    /// Id that the model gave the call; `None` if it was malformed.
    #[serde(rename = "call_id", default, skip_serializing_if = "Option::is_none")]
    pub model_id: Option<CallId>,
    /// Name of the tool.
    pub name: String,
    /// Tool server that executes the call.
    pub server: Server,
    /// Number of the assistant entry that contains the call.
    pub seq: Seq,
    /// Time at which the call was made or approved.
    pub since: Timestamp,
    /// Time at which the call times out, or a sleep ends; `None` means never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
    /// True if the call waits for the user's approval. It is not sent before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unapproved: bool,
    /// The last callback that was refused, if no valid one followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<CallbackProblem>,
}

/// A refused callback of an open call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallbackProblem {
    /// Status and reason, such as `413: too large`.
    pub why: String,
    /// Time at which the call is settled as failed if no valid callback follows.
    pub settle_at: Timestamp,
}

impl OpenCall {
    /// Returns whether the call was sent to a tool server, or may have been.
    pub fn is_sent(&self) -> bool {
        !self.server.is_runtime() && !self.unapproved
    }

    /// Returns the time of the call's next timer.
    pub fn timer(&self) -> Option<Timestamp> {
        let problem = self.problem.as_ref().map(|problem| problem.settle_at);
        self.until.into_iter().chain(problem).min()
    }
}

/// An active subscription: a call whose result had `subscription: true`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subscription {
    /// Id of the call that subscribed.
    pub id: CallId,
    /// Id that the model gave that call; `None` if it was malformed.
    #[serde(rename = "call_id", default, skip_serializing_if = "Option::is_none")]
    pub model_id: Option<CallId>,
    /// Name of the tool.
    pub name: String,
    /// Tool server that sends the events.
    pub server: Server,
    /// Number of the assistant entry that contains the call.
    pub seq: Seq,
    /// Time at which the subscription was confirmed.
    pub since: Timestamp,
    /// Time of a schedule's next timer; `None` for a subscription of a tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<Timestamp>,
    /// True if the next time of a schedule could not be computed. The timer then only computes it again.
    #[serde(default, rename = "unscheduled", skip_serializing_if = "std::ops::Not::not")]
    pub next_unknown: bool,
    /// Number of event ids that were recorded for the subscription, including forgotten ones.
    #[serde(default, rename = "marks", skip_serializing_if = "is_zero")]
    pub recorded_event_ids: u64,
}

/// Events of one subscription that event children handle. A backlog may outlive its subscription; it is removed when no
/// event waits and no child is active.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backlog {
    /// Call that subscribed.
    pub call: CallId,
    /// Tool of that call.
    pub tool: String,
    /// Events that wait for a child.
    #[serde(default, skip_serializing_if = "InputQueue::is_default")]
    pub held: InputQueue,
    /// Children that are working on earlier events. Each occupies a slot.
    #[serde(default, rename = "at_work", skip_serializing_if = "Vec::is_empty")]
    pub active_children: Vec<ThreadId>,
}

/// A question of an open call to the user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// Number of the question in its thread.
    #[serde(rename = "no")]
    pub number: u64,
    /// Call that asks.
    pub call: CallId,
    /// Kind of question.
    pub kind: QuestionKind,
    /// True if the user has answered. The question is kept until its call is settled, so that it is not asked twice.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub answered: bool,
}

/// Kind of a question to the user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuestionKind {
    /// The user has to sign in on a web page. The tool notices the sign-in itself.
    SignIn,
    /// The user has to allow a call. The first answer allows it; the second refuses it and is the default.
    Approval,
    /// The user has to choose one of several answers.
    Choice {
        /// Number of answers.
        choices: usize,
        /// Index of the answer that is sent if the user dismisses the question.
        default: usize,
        /// Digest of the response URL. Two questions of a call with the same digest are the same question.
        digest: u64,
    },
}

/// Tokens that answers of the model cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Input tokens.
    pub input: u64,
    /// Output tokens.
    pub output: u64,
    /// Input tokens that came from the provider's cache; they are included in `input`.
    #[serde(default)]
    pub cached: u64,
    /// Input tokens that were written to the provider's cache; they are included in `input`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub written: u64,
    /// Cost in billionths of a US dollar; 0 if the prices of the model are not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cost: u64,
}

impl Usage {
    /// Adds the numbers of another usage.
    pub fn add(&mut self, more: Usage) {
        self.input = self.input.saturating_add(more.input);
        self.output = self.output.saturating_add(more.output);
        self.cached = self.cached.saturating_add(more.cached);
        self.written = self.written.saturating_add(more.written);
        self.cost = self.cost.saturating_add(more.cost);
    }

    /// Returns the sum of input and output tokens.
    pub fn tokens(&self) -> u64 {
        self.input.saturating_add(self.output)
    }
}

impl Head {
    /// Returns the head of a new root thread.
    pub fn new() -> Head {
        Head {
            phase: Phase::Idle,
            origin: Origin::Root,
            turn: 0,
            turns_since_external_input: 0,
            external_input_at: Timestamp(0),
            turns_reset_at: Timestamp(0),
            seq: 0,
            settled_up_to: 0,
            answered_up_to: 0,
            summarised_up_to: 0,
            prompt_tokens: 0,
            result_bytes: 0,
            ids_made: 0,
            background: Vec::new(),
            subscriptions: Vec::new(),
            questions: Vec::new(),
            held: InputQueue::default(),
            queued: InputQueue::default(),
            counted_children: Vec::new(),
            idle_event_children: Vec::new(),
            backlogs: Vec::new(),
            reported_idle: false,
            owes_report: false,
            usage: Usage::default(),
            title: None,
        }
    }

    /// Makes the head of a damaged thread, for people: it failed, and is not retried.
    pub fn show_damage(&mut self, why: String) {
        self.phase = Phase::Failed { why, since: Timestamp(0), retry_at: None };
    }

    /// Returns the title that was made from the thread's beginning.
    pub fn title(&self) -> Option<&str> {
        self.title.as_deref()
    }

    /// Returns the phase.
    pub fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Returns how the thread was created.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Returns the status: the first that applies, in the order of the variants of [`Status`].
    pub fn status(&self) -> Status {
        match self.phase {
            Phase::Closed => Status::Closed,
            Phase::Failed { .. } => Status::Failed,
            Phase::Asking(_) => Status::Running,
            Phase::Paused(_) => Status::NeedsYou,
            _ if self.questions.iter().any(|question| !question.answered) => Status::NeedsYou,
            Phase::Waiting { .. } => Status::Waiting,
            Phase::Idle => Status::Idle,
        }
    }

    /// Returns the number of the last turn; 0 before the first.
    pub fn turn(&self) -> u64 {
        self.turn
    }

    /// Returns the number of the last entry.
    pub fn seq(&self) -> Seq {
        self.seq
    }

    /// Returns the last entry at which no call was open and nothing was unanswered.
    pub fn settled_up_to(&self) -> Seq {
        self.settled_up_to
    }

    /// Returns the last entry that the model has answered.
    pub fn answered_up_to(&self) -> Seq {
        self.answered_up_to
    }

    /// Returns the last entry that the newest summary covers; 0 without a summary.
    pub fn summarised_up_to(&self) -> Seq {
        self.summarised_up_to
    }

    /// Returns the number of turns since the last external input.
    pub fn turns_since_external_input(&self) -> u32 {
        self.turns_since_external_input
    }

    /// Returns the input tokens of the last answer; 0 if unknown or outdated.
    pub fn prompt_tokens(&self) -> u64 {
        self.prompt_tokens
    }

    /// Returns the tokens that all answers of this thread cost.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// Returns the number of the turn that the model is answering; `None` in any phase but [`Phase::Asking`].
    pub fn turn_in_progress(&self) -> Option<u64> {
        matches!(self.phase, Phase::Asking(_)).then_some(self.turn)
    }

    /// Returns the last entry that the prompt of the turn in progress includes.
    pub fn prompt_up_to(&self) -> Option<Seq> {
        match &self.phase {
            Phase::Asking(asking) => Some(asking.up_to),
            _ => None,
        }
    }

    /// Returns whether the thread is closed.
    pub fn is_closed(&self) -> bool {
        self.phase == Phase::Closed
    }

    /// Returns the last entry that a new summary would cover; `None` if the newest summary covers it already.
    pub fn summarisable_up_to(&self) -> Option<Seq> {
        (self.answered_up_to > self.summarised_up_to).then_some(self.answered_up_to)
    }

    /// Returns the calls of the last assistant entry that have no result yet.
    pub fn batch(&self) -> &[OpenCall] {
        match &self.phase {
            Phase::Waiting { batch } => batch,
            _ => &[],
        }
    }

    /// Returns the open calls that have a placeholder result in the history.
    pub fn background(&self) -> &[OpenCall] {
        &self.background
    }

    /// Returns all open calls.
    pub fn open_calls(&self) -> impl Iterator<Item = &OpenCall> {
        self.batch().iter().chain(&self.background)
    }

    /// Returns the open call with this id.
    pub fn open_call(&self, call: &CallId) -> Option<&OpenCall> {
        self.open_calls().find(|open| open.id == *call)
    }

    /// Returns whether the call is open.
    pub fn is_open(&self, call: &CallId) -> bool {
        self.open_call(call).is_some()
    }

    /// Returns the active subscriptions, schedules included.
    pub fn subscriptions(&self) -> &[Subscription] {
        &self.subscriptions
    }

    /// Returns the active subscription with this id.
    pub fn subscription(&self, call: &CallId) -> Option<&Subscription> {
        self.subscriptions.iter().find(|subscription| subscription.id == *call)
    }

    /// Returns the questions of open calls to the user, answered ones included.
    pub fn questions(&self) -> &[Question] {
        &self.questions
    }

    /// Returns whether another question may be asked. Answered questions, which are kept until their calls are settled, have
    /// a bound of their own.
    pub fn may_ask_user(&self, limits: &Limits) -> bool {
        let open = self.questions.iter().filter(|question| !question.answered).count();
        open < limits.questions && self.questions.len() < KEPT_QUESTIONS * limits.questions
    }

    /// Returns the queue of input that waits until the batch closes or the model answers without calls.
    pub fn held(&self) -> &InputQueue {
        &self.held
    }

    /// Returns the queue of input that waits until the thread would be idle.
    pub fn queued(&self) -> &InputQueue {
        &self.queued
    }

    /// Returns the events that wait for a child, by subscription.
    pub fn backlogs(&self) -> &[Backlog] {
        &self.backlogs
    }

    /// Number of active event children. `counted_children` contains all of them.
    pub(crate) fn active_event_children(&self) -> usize {
        self.backlogs.iter().map(|backlog| backlog.active_children.len()).sum()
    }

    /// Returns all children that are not closed, idle event children included.
    pub fn children(&self) -> impl Iterator<Item = &ThreadId> {
        self.counted_children.iter().chain(&self.idle_event_children)
    }

    /// Time since which a waiting thread delays its held input or, in an event child, the waiting events of its parent.
    pub(crate) fn delays_others_since(&self) -> Option<Timestamp> {
        let delays_parent = self.origin.is_event() && !self.reported_idle;
        let calls = self.batch().iter().map(|call| call.since).min().filter(|_| delays_parent);
        self.held.since.into_iter().chain(calls).min()
    }

    /// Returns whether the due time has come. A due time that is further away than any pause of its kind was set before the
    /// clock was set back; it has come too, so that no pause becomes longer than its bound.
    pub(crate) fn is_due(&self, limits: &Limits, now: Timestamp) -> bool {
        let longest = match &self.phase {
            Phase::Waiting { .. } => limits.hold_max,
            _ => LONGEST_PAUSE,
        };
        self.due(limits).is_some_and(|due| due <= now || due > now.plus(longest))
    }

    /// Returns the time at which the thread needs [`crate::Input::Due`] if no other input changes it before.
    pub fn due(&self, limits: &Limits) -> Option<Timestamp> {
        match &self.phase {
            Phase::Failed { retry_at, .. } => *retry_at,
            Phase::Paused(pause) => pause.until,
            Phase::Waiting { .. } => self.delays_others_since().map(|since| since.plus(limits.hold_max)),
            Phase::Idle | Phase::Asking(_) | Phase::Closed => None,
        }
    }
}

pub(crate) fn is_zero_time(time: &Timestamp) -> bool {
    time.0 == 0
}

pub(crate) fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Default for Head {
    fn default() -> Self {
        Head::new()
    }
}
