//! The ledger of deliveries: what was refused, retried or given up, in both directions. What is delivered at its first
//! attempt has no record.
//!
//! It is for people. Nothing is decided by it, and it is written a moment later than what it tells of. It holds no URL
//! but a server's base.

use rap_protocol::retry::Next;
use rap_protocol::{CallId, ThreadId, Timestamp};

use super::{Cursor, ThreadKey};

/// What is delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DeliveryKind {
    /// To a tool server: a call.
    Invocation,
    /// To a tool server: a thread is closed, or a call cancelled. Tried once.
    Notification,
    /// To a tool: a person's choice.
    Answer,
    /// From a tool.
    Callback,
}

impl DeliveryKind {
    pub(crate) const ALL: [DeliveryKind; 4] =
        [DeliveryKind::Invocation, DeliveryKind::Notification, DeliveryKind::Answer, DeliveryKind::Callback];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            DeliveryKind::Invocation => "invocation",
            DeliveryKind::Notification => "notification",
            DeliveryKind::Answer => "answer",
            DeliveryKind::Callback => "callback",
        }
    }
}

/// How a delivery goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DeliveryOutcome {
    /// Not yet; it is tried again.
    Retrying,
    /// In the end.
    Delivered,
    /// The receiver does not want it.
    Refused,
    /// The receiver could not be reached for too long.
    GivenUp,
    /// Nobody needs it any more, or there was no room for it.
    Dropped,
}

impl DeliveryOutcome {
    pub(crate) const ALL: [DeliveryOutcome; 5] = [
        DeliveryOutcome::Retrying,
        DeliveryOutcome::Delivered,
        DeliveryOutcome::Refused,
        DeliveryOutcome::GivenUp,
        DeliveryOutcome::Dropped,
    ];

    /// After an attempt.
    pub(crate) fn after(next: Next) -> DeliveryOutcome {
        match next {
            Next::Done => DeliveryOutcome::Delivered,
            Next::Again { .. } => DeliveryOutcome::Retrying,
            Next::Refused { .. } => DeliveryOutcome::Refused,
            Next::GaveUp => DeliveryOutcome::GivenUp,
        }
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            DeliveryOutcome::Retrying => "retrying",
            DeliveryOutcome::Delivered => "delivered",
            DeliveryOutcome::Refused => "refused",
            DeliveryOutcome::GivenUp => "given_up",
            DeliveryOutcome::Dropped => "dropped",
        }
    }
}

/// What is recorded of an attempt.
#[derive(Debug, Clone)]
pub(crate) struct DeliveryRecord {
    pub(crate) kind: DeliveryKind,
    pub(crate) thread: Option<ThreadKey>,
    /// For the log.
    pub(crate) thread_id: Option<ThreadId>,
    pub(crate) call: Option<CallId>,
    pub(crate) server: Option<String>,
    /// The path of a notification, the number of a question, the code of a refusal.
    pub(crate) topic: String,
    pub(crate) outcome: DeliveryOutcome,
    pub(crate) attempts: u32,
    pub(crate) detail: String,
    pub(crate) at: Timestamp,
}

/// A delivery as it is listed.
pub(crate) struct Delivery {
    pub(crate) id: String,
    pub(crate) kind: DeliveryKind,
    pub(crate) thread: Option<ThreadId>,
    pub(crate) call: Option<String>,
    pub(crate) server: Option<String>,
    pub(crate) topic: String,
    pub(crate) outcome: DeliveryOutcome,
    pub(crate) attempts: u32,
    pub(crate) detail: String,
    pub(crate) first_at: Timestamp,
    pub(crate) last_at: Timestamp,
    /// Time of the next attempt.
    pub(crate) next_at: Option<Timestamp>,
}

/// Which deliveries to list, the newest first.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeliveryFilter {
    pub(crate) thread: Option<ThreadId>,
    pub(crate) outcome: Option<DeliveryOutcome>,
    pub(crate) before: Option<Cursor>,
    pub(crate) limit: usize,
}

/// The answer to a request to deliver once more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Redelivery {
    /// It is due now.
    Due,
    NoSuchDelivery,
    /// Only invocations can be repeated.
    NotAnInvocation,
    AlreadyDelivered,
    CallSettled,
}
