//! The delivery ledger: deliveries in both directions that were refused, retried or given up. A delivery that succeeds
//! at its first attempt has no record.
//!
//! The ledger is for people; no decision depends on it. Records are written shortly after the attempt. The only URLs in
//! it are base URLs of servers.

use rap_protocol::retry::Next;
use rap_protocol::{CallId, ThreadId, Timestamp};

use super::{Cursor, ThreadKey};

/// The kind of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DeliveryKind {
    /// A call, sent to a tool server.
    Invocation,
    /// Tells a tool server that a thread was closed or a call cancelled. Attempted once.
    Notification,
    /// A person's choice, sent to the tool that asked.
    Answer,
    /// Received from a tool.
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

/// The state of a delivery after its last attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DeliveryOutcome {
    /// The last attempt failed, and there will be another one.
    Retrying,
    /// Delivered after at least one failed attempt.
    Delivered,
    /// Refused by the receiver.
    Refused,
    /// Given up, because the receiver could not be reached for too long.
    GivenUp,
    /// Dropped, because it was no longer needed or a queue was full.
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

    /// Returns the outcome of an attempt.
    pub(crate) fn after(next: Next) -> DeliveryOutcome {
        match next {
            Next::Done => DeliveryOutcome::Delivered,
            Next::Retry { .. } => DeliveryOutcome::Retrying,
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

/// The record of an attempt.
#[derive(Debug, Clone)]
pub(crate) struct DeliveryRecord {
    pub(crate) kind: DeliveryKind,
    pub(crate) thread: Option<ThreadKey>,
    /// Only for the log.
    pub(crate) thread_id: Option<ThreadId>,
    pub(crate) call: Option<CallId>,
    pub(crate) server: Option<String>,
    /// Path of a notification, number of a question, or error code of a refusal. Empty for an invocation.
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
    /// Time of the next attempt, if there will be one.
    pub(crate) next_at: Option<Timestamp>,
}

/// Selects the deliveries to list, newest first.
#[derive(Debug, Clone, Default)]
pub(crate) struct DeliveryFilter {
    pub(crate) thread: Option<ThreadId>,
    pub(crate) outcome: Option<DeliveryOutcome>,
    pub(crate) before: Option<Cursor>,
    pub(crate) limit: usize,
}

/// The result of a request to deliver an invocation again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Redelivery {
    /// The invocation is due now.
    Due,
    NoSuchDelivery,
    /// Only invocations can be delivered again.
    NotAnInvocation,
    AlreadyDelivered,
    CallSettled,
}
