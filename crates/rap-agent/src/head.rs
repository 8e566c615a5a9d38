//! The head: what a thread is besides its history. Small, and bounded by [`Limits`].

use std::time::Duration;

use rap_protocol::{CallId, ThreadId, Timestamp};
use serde::{Deserialize, Serialize};

use crate::{Budgets, Item, Seq, words};

/// What a thread is besides its history and its held input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// What it is doing.
    pub phase: Phase,
    /// Where it came from.
    #[serde(default, skip_serializing_if = "Origin::is_root")]
    pub origin: Origin,
    /// The number of the last question to the model; 0 before the first.
    pub turn: u64,
    /// Questions since something from outside was heard.
    pub turns_awake: u32,
    /// Answers in a row that a user's message dropped.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dropped: u8,
    /// Since when the model has not answered, though nobody did anything about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing_since: Option<Timestamp>,
    /// The last entry.
    pub seq: Seq,
    /// The last point at which nothing was open and nothing unanswered. Children of events are born here.
    pub settled: Seq,
    /// The model has answered everything up to here, and every call had a result there. A summary ends here.
    #[serde(default, skip_serializing_if = "is_none")]
    pub answered: Seq,
    /// What the last summary covers.
    #[serde(default, skip_serializing_if = "is_none")]
    pub summarised: Seq,
    /// How many tokens the model read for its last answer; 0 where nobody knows, or it would be far less by now.
    #[serde(default, skip_serializing_if = "is_none")]
    pub read: u64,
    /// How many ids the thread has made.
    pub minted: u64,
    /// The calls of the last assistant entry that have no result yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub batch: Vec<OpenCall>,
    /// Open calls that show a placeholder.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub running: Vec<OpenCall>,
    /// The active subscriptions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub subscriptions: Vec<Subscription>,
    /// What open calls ask a person.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub questions: Vec<Question>,
    /// Input that is written when the batch closes or the answer has no calls.
    #[serde(default, skip_serializing_if = "Held::is_new")]
    pub held: Held,
    /// Input that is written when the thread would be idle.
    #[serde(default, skip_serializing_if = "Held::is_new")]
    pub queued: Held,
    /// Children that are not closed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub children: Vec<ThreadId>,
    /// Events that wait for a child, and children that are at work on events, by subscription.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backlogs: Vec<Backlog>,
    /// Whether the parent knows that this thread, which was made for events, is not at work any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rests: bool,
    /// What the model's answers have cost.
    pub usage: Usage,
}

fn is_zero(number: &u8) -> bool {
    *number == 0
}

fn is_none(number: &u64) -> bool {
    *number == 0
}

/// What a thread is doing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Nothing.
    Idle,
    /// Question [`Head::turn`] is with the model.
    Asking {
        /// It covers the entries up to here.
        up_to: Seq,
    },
    /// A call of the last assistant entry is open.
    Waiting,
    /// The model could not be asked.
    Failed {
        /// Why, for people.
        why: String,
        /// When it is asked again by itself.
        retry_at: Option<Timestamp>,
    },
    /// It would ask, but someone has to allow it first.
    Paused {
        /// Why, for people.
        why: String,
    },
    /// It takes no message any more.
    Closed,
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
    fn is_root(&self) -> bool {
        *self == Origin::Root
    }

    /// The parent, the call of the parent that the thread was born of, and the tool of that call.
    pub fn parent(&self) -> Option<(&ThreadId, &CallId, &str)> {
        match self {
            Origin::Root => None,
            Origin::Event { parent, call, tool } => Some((parent, call, tool)),
            Origin::Spawn { parent, call } => Some((parent, call, words::SPAWN_THREAD)),
        }
    }

    /// What set the thread going; none where that is what set its parent going: nobody gains a right by starting a
    /// thread.
    pub fn cause(&self) -> Option<Cause> {
        match self {
            Origin::Root => Some(Cause::Client),
            Origin::Event { .. } => Some(Cause::Event),
            Origin::Spawn { .. } => None,
        }
    }
}

/// What set a thread going.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Somebody who uses the agent.
    Client,
    /// An event, whose words may be anybody's.
    Event,
}

/// Which tool server a call goes to: its base URL as it was configured.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Server(pub String);

impl Server {
    const RUNTIME: &str = "rap:runtime";

    /// The runtime itself, which carries out its own calls: it sleeps, waits and keeps schedules.
    pub fn runtime() -> Server {
        Server(Server::RUNTIME.into())
    }

    /// Whether that is the runtime itself.
    pub fn is_runtime(&self) -> bool {
        self.0 == Server::RUNTIME
    }
}

/// A call without a result, or with a placeholder for one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenCall {
    /// The call.
    pub id: CallId,
    /// The model's own id, where it could not be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call_id: Option<CallId>,
    /// The tool.
    pub name: String,
    /// Who carries it out.
    pub server: Server,
    /// The assistant entry that makes it.
    pub seq: Seq,
    /// When it was made.
    pub since: Timestamp,
    /// When it times out. A call of the runtime's own returns then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
    /// Whether it is not sent before a person allows it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unapproved: bool,
}

impl OpenCall {
    /// Whether a tool server has it, or may have it.
    pub fn is_sent(&self) -> bool {
        !self.server.is_runtime() && !self.unapproved
    }
}

/// A call that returned `subscription: true` and has not ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subscription {
    /// The call.
    pub id: CallId,
    /// The tool.
    pub name: String,
    /// Who sends the events.
    pub server: Server,
    /// The assistant entry that made the call.
    pub seq: Seq,
    /// When it was confirmed.
    pub since: Timestamp,
    /// When a schedule of the runtime's own has its next event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<Timestamp>,
}

/// The events of one subscription that are not for the thread itself. It outlives its subscription until it is empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backlog {
    /// The call that subscribed.
    pub call: CallId,
    /// Its tool.
    pub tool: String,
    /// What waits.
    #[serde(default, skip_serializing_if = "Held::is_new")]
    pub held: Held,
    /// The children that are at work on what came before.
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
    /// Whether it was answered. It is remembered until its call settles, so that it is not asked again.
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
    /// To choose one of so many answers.
    Choice {
        /// How many there are.
        choices: usize,
        /// Which one is taken if the question is dismissed.
        default: usize,
        /// A digest of where the answer goes: the same question twice is one.
        digest: u64,
    },
}

/// What is known of held input without reading it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Held {
    /// The number of the first entry held.
    pub first: u64,
    /// The number that the next one gets.
    pub next: u64,
    /// How many inputs they came from.
    pub inputs: u32,
    /// How large they are, in bytes.
    #[serde(default, skip_serializing_if = "is_none")]
    pub bytes: u64,
    /// When the oldest came.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Whether a user waits among them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub user: bool,
}

impl Held {
    fn is_new(&self) -> bool {
        *self == Held::default()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.first == self.next
    }

    /// How many entries are held.
    pub fn entries(&self) -> u64 {
        self.next - self.first
    }

    /// Whether there is no room for another input. The last one that finds room may be as large as any.
    pub fn is_full(&self, limits: &Limits) -> bool {
        self.inputs >= limits.held || self.bytes >= limits.held_bytes
    }

    /// One more input; the number of its first entry.
    pub(crate) fn add(&mut self, items: &[Item], now: Timestamp) -> u64 {
        let first = self.next;
        self.inputs += 1;
        self.bytes += items.iter().map(Item::bytes).sum::<u64>();
        self.since.get_or_insert(now);
        self.next += items.len() as u64;
        first
    }
}

/// What the model's answers have cost, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Read.
    pub input: u64,
    /// Written.
    pub output: u64,
    /// Read, but from the provider's cache.
    #[serde(default)]
    pub cached: u64,
}

impl Usage {
    pub(crate) fn add(&mut self, more: Usage) {
        self.input = self.input.saturating_add(more.input);
        self.output = self.output.saturating_add(more.output);
        self.cached = self.cached.saturating_add(more.cached);
    }
}

/// What people see of a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It takes no message any more.
    Closed,
    /// The model could not be asked.
    Failed,
    /// The model is being asked.
    Running,
    /// A person has to choose, to sign in, or to let it go on.
    NeedsYou,
    /// A call is open.
    Waiting,
    /// Nothing.
    Idle,
}

impl Status {
    /// All of them.
    pub const ALL: [Status; 6] =
        [Status::Closed, Status::Failed, Status::Running, Status::NeedsYou, Status::Waiting, Status::Idle];

    /// The status as it stands in the API.
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
            dropped: 0,
            failing_since: None,
            seq: 0,
            settled: 0,
            answered: 0,
            summarised: 0,
            read: 0,
            minted: 0,
            batch: Vec::new(),
            running: Vec::new(),
            subscriptions: Vec::new(),
            questions: Vec::new(),
            held: Held::default(),
            queued: Held::default(),
            children: Vec::new(),
            backlogs: Vec::new(),
            rests: false,
            usage: Usage::default(),
        }
    }

    /// The first that applies, in the order of [`Status`].
    pub fn status(&self) -> Status {
        match self.phase {
            Phase::Closed => Status::Closed,
            Phase::Failed { .. } => Status::Failed,
            Phase::Asking { .. } => Status::Running,
            Phase::Paused { .. } => Status::NeedsYou,
            _ if self.questions.iter().any(|question| !question.answered) => Status::NeedsYou,
            Phase::Waiting => Status::Waiting,
            Phase::Idle => Status::Idle,
        }
    }

    /// The turn that is with the model.
    pub fn asking(&self) -> Option<u64> {
        matches!(self.phase, Phase::Asking { .. }).then_some(self.turn)
    }

    /// Whether it takes no message any more.
    pub fn is_closed(&self) -> bool {
        self.phase == Phase::Closed
    }

    /// Up to where a summary would cover the history, if there is anything that the last one does not cover.
    pub fn coverable(&self) -> Option<Seq> {
        (self.answered > self.summarised).then_some(self.answered)
    }

    /// All open calls, those with a placeholder too.
    pub fn open_calls(&self) -> impl Iterator<Item = &OpenCall> {
        self.batch.iter().chain(&self.running)
    }

    /// Whether a call is open.
    pub fn is_open(&self, call: &CallId) -> bool {
        self.open_calls().any(|open| open.id == *call)
    }

    /// An active subscription.
    pub fn subscription(&self, call: &CallId) -> Option<&Subscription> {
        self.subscriptions.iter().find(|subscription| subscription.id == *call)
    }

    /// Since when a thread that waits keeps somebody else waiting: held input, or the events behind it.
    pub(crate) fn waits_since(&self) -> Option<Timestamp> {
        let made = matches!(self.origin, Origin::Event { .. }) && !self.rests;
        let calls = self.batch.iter().map(|call| call.since).min().filter(|_| made);
        self.held.since.into_iter().chain(calls).min()
    }

    /// When the thread wants a [`crate::Message::Due`], if nothing else happens before.
    pub fn due(&self, limits: &Limits) -> Option<Timestamp> {
        match &self.phase {
            Phase::Failed { retry_at, .. } => *retry_at,
            Phase::Waiting => self.waits_since().map(|since| since.plus(limits.hold_max)),
            _ => None,
        }
    }
}

impl Default for Head {
    fn default() -> Self {
        Head::new()
    }
}

/// The bounds of a thread. What lies beyond one is refused by name, or answered with an error result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Active subscriptions.
    pub subscriptions: usize,
    /// Open calls, those with a placeholder included.
    pub open_calls: usize,
    /// Inputs held, in each of the two queues, and events of each subscription that wait for a child.
    pub held: u32,
    /// How large they may be together, in bytes. Whoever takes them up reads them all at once.
    pub held_bytes: u64,
    /// Questions that wait for a person.
    pub questions: usize,
    /// Children that are not closed.
    pub children: usize,
    /// Children of one subscription that are at work on its events; more events wait.
    pub event_children: usize,
    /// How deep threads nest. Beyond it events are taken by their own thread.
    pub depth: usize,
    /// Views that are kept; the oldest goes first.
    pub views: usize,
    /// Questions to the model without anything new from outside.
    pub turns_per_wake: u32,
    /// How long events wait behind open calls.
    pub hold_max: Duration,
    /// How long a call may take.
    pub call_timeout: Option<Duration>,
    /// How long a call waits for somebody to allow it.
    pub approval_within: Duration,
    /// For how long a failed thread asks again by itself.
    pub failed_retry_for: Duration,
    /// What the thread's session may spend.
    pub budgets: Budgets,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            subscriptions: 32,
            open_calls: 128,
            held: 1000,
            held_bytes: 16 * 1024 * 1024,
            questions: 64,
            children: 64,
            event_children: 4,
            depth: 8,
            views: 64,
            turns_per_wake: 50,
            hold_max: Duration::from_secs(60),
            call_timeout: None,
            approval_within: Duration::from_secs(24 * 3600),
            failed_retry_for: Duration::from_secs(24 * 3600),
            budgets: Budgets::default(),
        }
    }
}
