//! The delivery log.

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Time;
use crate::string_enum::string_enum;

/// A delivery that did not succeed at its first attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Delivery {
    /// Id of the delivery.
    pub id: String,
    /// Kind of message that was delivered.
    pub kind: DeliveryKind,
    /// Thread of the delivery, if it is known.
    pub thread_id: Option<String>,
    /// Call of the delivery, if it belongs to one.
    pub call_id: Option<String>,
    /// Base URL of the receiving tool server, or origin of the receiver of an alert. Null for callbacks and answers.
    pub server: Option<String>,
    /// Name of the notification, error code of the refused callback, or state that an alert is about.
    pub topic: Option<String>,
    /// State after the last attempt.
    pub outcome: DeliveryOutcome,
    /// Number of attempts.
    pub attempts: u32,
    /// Outcome of the last attempt, as text.
    pub detail: String,
    /// The last attempts, at most 32, oldest first. Absent in listings and events.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub last_attempts: Vec<DeliveryAttempt>,
    /// Time at which the first failed attempt ended.
    pub first_at: Time,
    /// Time at which the last attempt ended.
    pub last_at: Time,
    /// Time of the next attempt.
    pub next_at: Option<Time>,
}

/// An attempt of a delivery.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct DeliveryAttempt {
    /// Time at which the attempt ended.
    pub at: Time,
    /// Outcome of the attempt, as text.
    pub detail: String,
}

string_enum! {
    /// Kind of a delivery.
    DeliveryKind {
        /// A call, sent to a tool server.
        Invocation = "invocation",
        /// Tells a tool server that a thread was closed or a call cancelled. Attempted once.
        Notification = "notification",
        /// A person's choice, sent to the tool that asked.
        Answer = "answer",
        /// Received from a tool.
        Callback = "callback",
        /// Tells people about a thread; sent to the URL of a `[[notify]]`.
        Alert = "alert",
    }
}

string_enum! {
    /// State of a delivery after its last attempt.
    DeliveryOutcome {
        /// The last attempt failed, and there will be another one.
        Retrying = "retrying",
        /// It succeeded after a retry.
        Delivered = "delivered",
        /// The receiver refused it.
        Refused = "refused",
        /// All attempts failed within the retry period.
        GivenUp = "given_up",
        /// It was no longer needed, or a queue was full.
        Dropped = "dropped",
    }
}
