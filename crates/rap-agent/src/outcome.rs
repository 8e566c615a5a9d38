//! Outcome of a step: the rows to write, the work to start after the commit, or the reason why an input changes nothing.

use rap_protocol::{AuthUrl, CallId, EventId, ThreadId, Timestamp};
use serde_json::{Map, Value};

use crate::{Attention, CallState, Choice, Entry, Head, OpenCall, Seq, Server, Spending, ThreadMessage};

/// Result of applying an input to a thread.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// New head of the thread.
    pub head: Head,
    /// Rows to write in the transaction that stores the head, in this order.
    pub writes: Vec<Write>,
    /// Work to start after the commit. Work that must survive a crash is also stored with the head or the writes.
    pub effects: Vec<Effect>,
    /// States that the thread entered and that cause alerts to people.
    pub entered: Vec<Attention>,
}

impl Step {
    /// Returns true if this step starts a turn because of something outside the session: a message of a person, an event,
    /// a late result or a timer.
    pub fn is_wake(&self) -> bool {
        self.head.turns_since_external_input == 1
            && self.effects.iter().any(|effect| matches!(effect, Effect::AskModel { .. }))
    }

    /// Returns the calls that this step settles.
    pub fn settled(&self) -> impl Iterator<Item = &CallId> {
        self.writes.iter().filter_map(|write| match write {
            Write::Settle { call, .. } => Some(call),
            _ => None,
        })
    }
}

/// One change in the store.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// Append an entry to the history.
    Append {
        /// Number of the entry.
        seq: Seq,
        /// Entry to append.
        entry: Entry,
    },
    /// Add an entry to a queue of held input.
    Hold {
        /// Queue that holds it.
        queue: Queue,
        /// Number of the entry in the queue.
        number: u64,
        /// Entry to hold.
        entry: Entry,
    },
    /// Move held entries from a queue to the history, in order.
    Release {
        /// Queue that held them.
        queue: Queue,
        /// Number of the first entry in the queue.
        first: u64,
        /// Count of entries.
        count: u64,
        /// Number of the first entry in the history.
        seq: Seq,
    },
    /// Add a call. Unless it is unapproved, its invocation is due until it is acknowledged or the call is settled.
    Open(OpenCall),
    /// Record that the user allowed a call. Its invocation is due.
    Approve(OpenCall),
    /// Change the state of a call that is no longer open. Its invocation is no longer due.
    Settle {
        /// Call to change.
        call: CallId,
        /// New state.
        state: CallState,
    },
    /// Add a question to the user, or replace the question of the same number.
    Question {
        /// Number of the question in the thread.
        number: u64,
        /// Call that asks.
        call: CallId,
        /// Content of the question.
        question: NewQuestion,
    },
    /// Record the user's answer to a question. Its delivery is due.
    Answer {
        /// Number of the question.
        number: u64,
        /// Index of the chosen answer.
        selected: usize,
    },
    /// Remove the questions of a call and their answers.
    DropQuestions {
        /// Call that asked.
        call: CallId,
    },
    /// Store a view. It replaces the view of the same server and type.
    View {
        /// Tool server that sent the view.
        server: Server,
        /// Type of the view.
        view_type: String,
        /// Content of the view.
        content: Value,
    },
    /// Set or clear the timer of a call.
    Timer {
        /// Call or schedule that owns the timer.
        call: CallId,
        /// Time of the timer; `None` clears it.
        at: Option<Timestamp>,
    },
    /// Record an event id, so that a repetition of the event is ignored.
    RecordEventId {
        /// Call that subscribed.
        call: CallId,
        /// Id to record.
        event: EventId,
        /// Number of the id in the subscription, counted from 1.
        number: u64,
        /// Recorded ids of the subscription up to this number are deleted.
        forget: u64,
    },
    /// Store an entry of an event that waits for a child.
    Backlog {
        /// Call that subscribed.
        call: CallId,
        /// Number of the entry in the backlog.
        number: u64,
        /// Entry to store.
        entry: Entry,
    },
    /// Remove the backlog of a subscription.
    DropBacklog {
        /// Call that subscribed.
        call: CallId,
    },
    /// Add a child.
    Spawn(Box<Spawn>),
    /// Store a message for another thread of the session.
    Send {
        /// Thread that receives it.
        to: ThreadId,
        /// Message to store.
        message: ThreadMessage,
    },
    /// Store what the session has spent.
    Spending(Spending),
}

/// A new child of a thread.
#[derive(Debug, Clone, PartialEq)]
pub struct Spawn {
    /// Id of the child.
    pub id: ThreadId,
    /// Incarnation of the child.
    pub incarnation: u64,
    /// Last entry of the parent's history that the child inherits.
    pub at: Seq,
    /// Head of the child.
    pub head: Head,
    /// Waiting events of the parent that become the child's first entries.
    pub backlog: Option<BacklogRange>,
    /// Further entries of the child, after those of the backlog.
    pub entries: Vec<Entry>,
    /// Work to start for the child after the commit.
    pub effects: Vec<Effect>,
}

impl Spawn {
    /// Returns true if the child begins with a turn.
    pub fn starts_turn(&self) -> bool {
        self.effects.iter().any(|effect| matches!(effect, Effect::AskModel { .. }))
    }
}

/// A range of entries of a backlog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BacklogRange {
    /// Call that subscribed.
    pub call: CallId,
    /// Number of the first entry.
    pub first: u64,
    /// Count of entries.
    pub count: u64,
}

/// A queue of held input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Queue {
    /// Input waits until the batch closes or the answer has no calls.
    UntilBatchCloses,
    /// Input waits until no call is open and no model request is in progress.
    UntilIdle,
}

/// Content of a question to the user.
#[derive(Debug, Clone, PartialEq)]
pub enum NewQuestion {
    /// The user has to sign in at this URL.
    SignIn(AuthUrl),
    /// The user has to choose an answer.
    Choice(Choice),
    /// The user has to allow the call. The text describes what it would do.
    Approval(String),
}

/// Work to start after the commit of a step.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Ask the model. Stored with the head.
    AskModel {
        /// Number of the turn.
        turn: u64,
        /// Last entry that the prompt includes.
        up_to: Seq,
    },
    /// Stop waiting for the model's answer.
    Abandon {
        /// Number of the turn.
        turn: u64,
    },
    /// Invoke a tool. Stored with its call.
    Invoke {
        /// Call to send.
        call: OpenCall,
        /// Arguments of the call.
        arguments: Map<String, Value>,
    },
    /// Invoke a tool after the user has allowed the call. Stored with its call.
    InvokeApproved {
        /// Call to send.
        call: CallId,
        /// Tool server that is invoked.
        server: Server,
    },
    /// Notify every tool server that the thread is closed, and then that calls are cancelled. Never stored.
    NotifyClose {
        /// Calls and subscriptions that this step cancels. A server is notified of them after the closing.
        cancelled: Vec<CallId>,
    },
    /// Notify every tool server that a call or subscription is cancelled. Never stored.
    NotifyCancel {
        /// Cancelled call, or call that subscribed.
        call: CallId,
    },
    /// Deliver the user's answer to a question. Stored with its question.
    Answer {
        /// Number of the question.
        number: u64,
        /// Tool server that asked.
        server: Server,
    },
    /// Deliver messages to other threads. Stored as [`Write::Send`].
    Deliver,
}

/// Reason why an input changes nothing. None of these is an error: all of them happen in normal operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Ignored {
    /// The thread is closed and accepts no more input.
    #[error("the thread is closed")]
    Closed,
    /// The answer belongs to a turn that is not in progress.
    #[error("the turn is no longer in progress")]
    StaleTurn,
    /// The same input was processed before.
    #[error("the input was already processed")]
    Duplicate,
    /// The call is not open: it is settled, the thread never made it, or it waits for approval and was not sent.
    #[error("the call is not open")]
    SettledCall,
    /// The thread never made the call, or it waits for approval and was not sent. Unlike [`Ignored::SettledCall`], this
    /// says that no callback of the call can be valid.
    #[error("the thread made no such call")]
    UnknownCall,
    /// The call has no active subscription: it never was one, it was cancelled, or it sent its final event.
    #[error("the call has no active subscription")]
    EndedSubscription,
    /// The call has not been confirmed as a subscription yet.
    #[error("the call is still open; the subscription has to be confirmed first")]
    NotYetSubscribed,
    /// A limit was reached. The sender may retry later.
    #[error("a limit of the thread was reached: {0}")]
    Full(&'static str),
    /// The thread is busy, and the message was sent with [`crate::OnBusy::Reject`].
    #[error("the thread is busy; send the message again later, or with on_busy join, interrupt or enqueue")]
    Busy,
    /// No call is open and no answer is in progress.
    #[error("there is nothing to interrupt: no call is open and no answer is in progress")]
    NothingToInterrupt,
    /// The thread is neither failed nor paused.
    #[error("the thread is neither failed nor paused")]
    NothingToResume,
    /// The call has no question that waits for an answer.
    #[error("the call has no open question")]
    NoQuestion,
    /// The index is not one of the choices.
    #[error("the question has {0} choices, counted from 0")]
    NoSuchChoice(usize),
    /// The timer fired too early, or something else has already happened instead.
    #[error("nothing is due")]
    NotDue,
}
