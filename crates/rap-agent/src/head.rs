//! The head: the state of a thread besides its history. It is small and bounded by [`Limits`].
//!
//! A phase owns the data that makes sense only in that phase. How a head is stored is described in `stored.rs`.

use rap_protocol::{CallId, ThreadId, Timestamp};
use serde::{Deserialize, Serialize};

use crate::{Item, Limits, Seq, words};

/// The state of a thread besides its history and the content of its held input.
#[derive(Debug, Clone, PartialEq)]
pub struct Head {
    pub(crate) phase: Phase,
    pub(crate) origin: Origin,
    /// Number of the last question to the model; 0 before the first.
    pub(crate) turn: u64,
    /// Questions since the last reset by something from outside.
    pub(crate) turns_awake: u32,
    /// Time of the newest input from outside (a person, a tool, an event or a long timer) that this thread has heard, or
    /// heard of from other threads of its session.
    pub(crate) heard: Timestamp,
    /// The value of `heard` when `turns_awake` was last reset.
    pub(crate) reset_for: Timestamp,
    /// The last entry.
    pub(crate) seq: Seq,
    /// The last entry at which nothing was open and nothing unanswered. Children for events inherit up to here.
    pub(crate) settled: Seq,
    /// The model has answered everything up to here, and every call had a result there. A summary ends here.
    pub(crate) answered: Seq,
    /// The last entry that the last summary covers.
    pub(crate) summarised: Seq,
    /// Tokens that the model read for its last answer; 0 if unknown or outdated.
    pub(crate) prompt_tokens: u64,
    /// Counts the ids that the thread has made: of calls, questions and children.
    pub(crate) ids: u64,
    /// Open calls that show a placeholder in the history.
    pub(crate) background: Vec<OpenCall>,
    pub(crate) subscriptions: Vec<Subscription>,
    pub(crate) questions: Vec<Question>,
    /// Input that is written when the batch closes or the answer has no calls.
    pub(crate) held: Held,
    /// Input that is written when the thread would be idle.
    pub(crate) queued: Held,
    /// Open children: spawned ones, and those at work on events.
    pub(crate) children: Vec<ThreadId>,
    /// Open children for events that are not at work any more.
    pub(crate) resting: Vec<ThreadId>,
    /// Events that wait for a child and children at work on events, by subscription.
    pub(crate) backlogs: Vec<Backlog>,
    /// Whether this thread, which was made for events, has told its parent that it is not at work any more.
    pub(crate) left_work: bool,
    pub(crate) usage: Usage,
}

/// What a thread is doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// Nothing.
    Idle,
    /// Question [`Head::turn`] is with the model.
    Asking(Asking),
    /// Calls of the last assistant entry are open.
    Waiting {
        /// Those without a result, in call order. Never empty between steps.
        batch: Vec<OpenCall>,
    },
    /// The model could not be asked.
    Failed {
        /// Why, for people.
        why: String,
        /// Time of the first failure since anybody did something about it.
        since: Timestamp,
        /// Time of the next attempt; without one, a person has to do something first.
        retry_at: Option<Timestamp>,
    },
    /// The model is not asked until a person or the clock allows it.
    Paused(Pause),
    /// The thread takes no input any more.
    Closed,
}

/// A question to the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asking {
    /// It covers the entries up to here.
    pub up_to: Seq,
    /// Answers in a row that a user's message dropped.
    pub dropped: u8,
    /// Time of the first failure of the questions that this one repeats.
    pub failing_since: Option<Timestamp>,
}

/// Why and how long a thread is paused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pause {
    /// The reason, for people.
    pub why: String,
    /// Whose limit was reached.
    pub scope: PauseScope,
    /// Time at which the thread goes on by itself.
    pub until: Option<Timestamp>,
}

/// Whose limit paused a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseScope {
    /// The session's budget. Resuming lifts it for all threads of the session.
    #[default]
    Session,
    /// The thread's own.
    Thread,
}

/// Where a thread came from.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// A client made it.
    #[default]
    Root,
    /// An event of its parent's subscription made it.
    Event {
        /// The parent.
        parent: ThreadId,
        /// The call that subscribed.
        call: CallId,
        /// The tool of that call.
        tool: String,
    },
    /// Its parent's model made it.
    Spawn {
        /// The parent.
        parent: ThreadId,
        /// The call that made it.
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

    /// The parent, the call of the parent that started the thread, and the tool of that call.
    pub fn parent(&self) -> Option<(&ThreadId, &CallId, &str)> {
        match self {
            Origin::Root => None,
            Origin::Event { parent, call, tool } => Some((parent, call, tool)),
            Origin::Spawn { parent, call } => Some((parent, call, words::SPAWN_THREAD)),
        }
    }

    /// The cause of a thread; none if it has the same cause as its parent: spawning a thread gives no rights.
    pub fn cause(&self) -> Option<Cause> {
        match self {
            Origin::Root => Some(Cause::Client),
            Origin::Event { .. } => Some(Cause::Event),
            Origin::Spawn { .. } => None,
        }
    }
}

/// The cause of a thread, which decides what its agent may do there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// A client of the runtime.
    Client,
    /// An event, whose content may be anybody's.
    Event,
}

/// The tool server of a call: its base URL as configured.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Server(pub String);

impl Server {
    const RUNTIME: &str = "rap:runtime";

    /// The runtime itself, which carries out sleeps, waits and schedules.
    pub fn runtime() -> Server {
        Server(Server::RUNTIME.into())
    }

    /// Whether it is the runtime itself.
    pub fn is_runtime(&self) -> bool {
        self.0 == Server::RUNTIME
    }
}

/// A call without a result, or with a placeholder for one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenCall {
    /// The call's id, made by the runtime.
    pub id: CallId,
    /// The model's own id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call_id: Option<CallId>,
    /// Name of the tool.
    pub name: String,
    /// Its tool server.
    pub server: Server,
    /// The assistant entry that makes it.
    pub seq: Seq,
    /// Time at which it was made, or approved.
    pub since: Timestamp,
    /// Time at which it times out. A sleep returns then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
    /// Whether it is not sent before a person allows it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unapproved: bool,
    /// A callback of its tool that was refused, if nothing valid came since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

/// A callback that was refused while its call was open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// The reason, such as `413: too large`.
    pub why: String,
    /// Time at which the call is settled if nothing valid follows.
    pub settle_at: Timestamp,
}

impl OpenCall {
    /// Whether a tool server has it, or may have it.
    pub fn is_sent(&self) -> bool {
        !self.server.is_runtime() && !self.unapproved
    }

    /// Time of its next timer.
    pub fn timer(&self) -> Option<Timestamp> {
        let problem = self.problem.as_ref().map(|problem| problem.settle_at);
        self.until.into_iter().chain(problem).min()
    }
}

/// A call that returned `subscription: true` and has not ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subscription {
    /// The call.
    pub id: CallId,
    /// The model's own id of the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call_id: Option<CallId>,
    /// Name of the tool.
    pub name: String,
    /// The server that sends the events.
    pub server: Server,
    /// The assistant entry that made the call.
    pub seq: Seq,
    /// Time of the confirmation.
    pub since: Timestamp,
    /// Time of the next timer of a schedule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<Timestamp>,
    /// Whether the next time of a schedule could not be computed. Its timer then only computes it again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unscheduled: bool,
    /// Number of event ids that were recorded for it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub marks: u64,
}

/// The events of one subscription that go to children. It outlives its subscription until it is empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backlog {
    /// The call that subscribed.
    pub call: CallId,
    /// Its tool.
    pub tool: String,
    /// The events that wait.
    #[serde(default, skip_serializing_if = "Held::is_new")]
    pub held: Held,
    /// The children at work on earlier events.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub at_work: Vec<ThreadId>,
}

/// A question of an open call that waits for a person.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// Its number in the thread.
    pub no: u64,
    /// The call that asks.
    pub call: CallId,
    /// What is asked.
    pub kind: QuestionKind,
    /// Whether it was answered. It is kept until its call settles, so that it is not asked again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub answered: bool,
}

/// What is asked of a person.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuestionKind {
    /// To sign in elsewhere; the tool learns of it by itself.
    SignIn,
    /// To allow a call: the first answer allows it, the second one refuses it and is the default.
    Approval,
    /// To choose one of several answers.
    Choice {
        /// Number of answers.
        choices: usize,
        /// The answer of a question that is dismissed.
        default: usize,
        /// Digest of the response URL: the same question twice is one.
        digest: u64,
    },
}

/// What the head knows of held input.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Held {
    /// Number of the first entry held.
    pub first: u64,
    /// Number of the next entry.
    pub next: u64,
    /// Number of inputs that the entries came from.
    pub inputs: u32,
    /// Size of the entries in bytes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes: u64,
    /// Arrival of the oldest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Whether a user's message is among them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub user: bool,
    /// Whether all of them are messages of the thread's own session.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub session_only: bool,
    /// Time of the newest input from outside that such a message told of.
    #[serde(default, skip_serializing_if = "is_never")]
    pub heard: Timestamp,
}

pub(crate) fn is_never(time: &Timestamp) -> bool {
    time.0 == 0
}

pub(crate) fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Held {
    pub(crate) fn is_new(&self) -> bool {
        *self == Held::default()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.first == self.next
    }

    /// Number of entries.
    pub fn entries(&self) -> u64 {
        self.next - self.first
    }

    /// Whether there is no room for another input. The last one that finds room may be as large as any.
    pub fn is_full(&self, limits: &Limits) -> bool {
        self.inputs >= limits.held || self.bytes >= limits.held_bytes
    }

    /// Adds one input and returns the number of its first entry.
    pub(crate) fn add(&mut self, items: &[Item], now: Timestamp) -> u64 {
        let first = self.next;
        self.inputs += 1;
        self.bytes += items.iter().map(Item::bytes).sum::<u64>();
        self.since.get_or_insert(now);
        self.next += items.len() as u64;
        first
    }

    /// Removes everything and returns the number of the first entry and their count.
    pub(crate) fn clear(&mut self) -> (u64, u64) {
        let removed = (self.first, self.entries());
        *self = Held { first: self.next, next: self.next, ..Held::default() };
        removed
    }

    /// Removes the first inputs, each of so many entries, and returns the number of the first entry.
    pub(crate) fn take_inputs(&mut self, inputs: u32, entries: u64) -> u64 {
        if inputs >= self.inputs {
            return self.clear().0;
        }
        let first = self.first;
        // The size of each is not known here; they count as equally large.
        self.bytes -= self.bytes / u64::from(self.inputs) * u64::from(inputs);
        self.inputs -= inputs;
        self.first += u64::from(inputs) * entries;
        first
    }
}

/// The cost of the model's answers in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens read.
    pub input: u64,
    /// Tokens written.
    pub output: u64,
    /// Tokens read from the provider's cache, which are part of `input`.
    #[serde(default)]
    pub cached: u64,
}

impl Usage {
    pub(crate) fn add(&mut self, more: Usage) {
        self.input = self.input.saturating_add(more.input);
        self.output = self.output.saturating_add(more.output);
        self.cached = self.cached.saturating_add(more.cached);
    }

    /// Tokens read and written.
    pub fn tokens(&self) -> u64 {
        self.input.saturating_add(self.output)
    }
}

/// What people see of a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The thread takes no input any more.
    Closed,
    /// The model could not be asked.
    Failed,
    /// The model is being asked.
    Running,
    /// A person has to choose, to sign in, or to let the thread go on.
    NeedsYou,
    /// A call is open.
    Waiting,
    /// Nothing happens.
    Idle,
}

impl Status {
    /// All of them.
    pub const ALL: [Status; 6] =
        [Status::Closed, Status::Failed, Status::Running, Status::NeedsYou, Status::Waiting, Status::Idle];

    /// The name in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Closed => "closed",
            Status::Failed => "failed",
            Status::Running => "running",
            Status::NeedsYou => "needs_you",
            Status::Waiting => "waiting",
            Status::Idle => "idle",
        }
    }
}

impl Head {
    /// A thread to which nothing has happened.
    pub fn new() -> Head {
        Head {
            phase: Phase::Idle,
            origin: Origin::Root,
            turn: 0,
            turns_awake: 0,
            heard: Timestamp(0),
            reset_for: Timestamp(0),
            seq: 0,
            settled: 0,
            answered: 0,
            summarised: 0,
            prompt_tokens: 0,
            ids: 0,
            background: Vec::new(),
            subscriptions: Vec::new(),
            questions: Vec::new(),
            held: Held::default(),
            queued: Held::default(),
            children: Vec::new(),
            resting: Vec::new(),
            backlogs: Vec::new(),
            left_work: false,
            usage: Usage::default(),
        }
    }

    /// What the thread is doing.
    pub fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Where the thread came from.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The first that applies, in the order of [`Status`].
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

    /// Number of the last question to the model; 0 before the first.
    pub fn turn(&self) -> u64 {
        self.turn
    }

    /// The last entry.
    pub fn seq(&self) -> Seq {
        self.seq
    }

    /// The last entry at which nothing was open and nothing unanswered.
    pub fn settled(&self) -> Seq {
        self.settled
    }

    /// The last entry that the model has answered.
    pub fn answered(&self) -> Seq {
        self.answered
    }

    /// The last entry that a summary covers.
    pub fn summarised(&self) -> Seq {
        self.summarised
    }

    /// Questions to the model since something from outside was heard.
    pub fn turns_awake(&self) -> u32 {
        self.turns_awake
    }

    /// Tokens that the model read for its last answer; 0 if unknown or outdated.
    pub fn prompt_tokens(&self) -> u64 {
        self.prompt_tokens
    }

    /// The cost of all answers.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// The turn that is with the model.
    pub fn asking(&self) -> Option<u64> {
        matches!(self.phase, Phase::Asking(_)).then_some(self.turn)
    }

    /// The last entry that the question with the model covers.
    pub fn asking_up_to(&self) -> Option<Seq> {
        match &self.phase {
            Phase::Asking(asking) => Some(asking.up_to),
            _ => None,
        }
    }

    /// Whether the thread takes no input any more.
    pub fn is_closed(&self) -> bool {
        self.phase == Phase::Closed
    }

    /// The last entry that a summary would cover, if there is anything that the last one does not cover.
    pub fn coverable(&self) -> Option<Seq> {
        (self.answered > self.summarised).then_some(self.answered)
    }

    /// The calls of the last assistant entry that have no result yet.
    pub fn batch(&self) -> &[OpenCall] {
        match &self.phase {
            Phase::Waiting { batch } => batch,
            _ => &[],
        }
    }

    /// Open calls that show a placeholder in the history.
    pub fn background(&self) -> &[OpenCall] {
        &self.background
    }

    /// All open calls.
    pub fn open_calls(&self) -> impl Iterator<Item = &OpenCall> {
        self.batch().iter().chain(&self.background)
    }

    /// An open call.
    pub fn open_call(&self, call: &CallId) -> Option<&OpenCall> {
        self.open_calls().find(|open| open.id == *call)
    }

    /// Whether a call is open.
    pub fn is_open(&self, call: &CallId) -> bool {
        self.open_call(call).is_some()
    }

    /// The active subscriptions.
    pub fn subscriptions(&self) -> &[Subscription] {
        &self.subscriptions
    }

    /// An active subscription.
    pub fn subscription(&self, call: &CallId) -> Option<&Subscription> {
        self.subscriptions.iter().find(|subscription| subscription.id == *call)
    }

    /// Questions that wait for a person, or whose call is still open.
    pub fn questions(&self) -> &[Question] {
        &self.questions
    }

    /// Input that waits for the batch to close or the model to answer.
    pub fn held(&self) -> &Held {
        &self.held
    }

    /// Input that waits for the thread to be idle.
    pub fn queued(&self) -> &Held {
        &self.queued
    }

    /// Events that wait for a child, by subscription.
    pub fn backlogs(&self) -> &[Backlog] {
        &self.backlogs
    }

    /// Number of children at work on events. All of them are among the open children.
    pub(crate) fn at_work(&self) -> usize {
        self.backlogs.iter().map(|backlog| backlog.at_work.len()).sum()
    }

    /// Children that are not closed.
    pub fn children(&self) -> impl Iterator<Item = &ThreadId> {
        self.children.iter().chain(&self.resting)
    }

    /// Time since which a waiting thread keeps somebody else waiting: held input, or the events of its parent.
    pub(crate) fn delays_since(&self) -> Option<Timestamp> {
        let delays_parent = self.origin.is_event() && !self.left_work;
        let calls = self.batch().iter().map(|call| call.since).min().filter(|_| delays_parent);
        self.held.since.into_iter().chain(calls).min()
    }

    /// Time at which the thread wants an [`crate::Input::Due`], if nothing else happens before.
    pub fn due(&self, limits: &Limits) -> Option<Timestamp> {
        match &self.phase {
            Phase::Failed { retry_at, .. } => *retry_at,
            Phase::Paused(pause) => pause.until,
            Phase::Waiting { .. } => self.delays_since().map(|since| since.plus(limits.hold_max)),
            Phase::Idle | Phase::Asking(_) | Phase::Closed => None,
        }
    }
}

impl Default for Head {
    fn default() -> Self {
        Head::new()
    }
}
