//! The delivery log: deliveries in both directions that were refused, retried or given up. A delivery that succeeds
//! at its first attempt has no record.
//!
//! The delivery log is for people; no decision depends on it. Records are written shortly after the attempt. The only
//! URLs in it are base URLs of servers.

pub(crate) use rap_api::{DeliveryKind, DeliveryOutcome};
use rap_protocol::retry::Next;
use rap_protocol::{CallId, ThreadId, Timestamp};

use super::stored::DETAIL_CHARS;
use super::{Cursor, ThreadKey, Visibility};

/// Maximum number of attempts of which a record keeps the time and the outcome.
pub(super) const ATTEMPTS: usize = 32;

/// Returns the outcome of an attempt.
pub(crate) fn outcome_after(next: Next) -> DeliveryOutcome {
    match next {
        Next::Done => DeliveryOutcome::Delivered,
        Next::Retry { .. } => DeliveryOutcome::Retrying,
        Next::Refused { .. } => DeliveryOutcome::Refused,
        Next::GaveUp => DeliveryOutcome::GivenUp,
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

/// Returns the line of an attempt in the column `detail`: its time and its outcome.
pub(super) fn attempt_line(record: &DeliveryRecord) -> String {
    let words: String =
        record.detail.chars().map(|c| if c == '\n' { ' ' } else { c }).take(DETAIL_CHARS).collect();
    format!("{}\t{words}", record.at.0)
}

/// Reads the column `detail`: the outcome of the last attempt, and the attempts. Versions before this format wrote only
/// the outcome of the last attempt.
pub(super) fn read_attempts(column: &str) -> (String, Vec<DeliveryAttempt>) {
    let attempt = |line: &str| {
        let (at, detail) = line.split_once('\t')?;
        Some(DeliveryAttempt { at: Timestamp(at.parse().ok()?), detail: detail.to_owned() })
    };
    let attempts: Vec<DeliveryAttempt> = column.lines().filter_map(attempt).collect();
    let last = attempts.last().map_or_else(|| column.to_owned(), |last| last.detail.clone());
    (last, attempts)
}

/// An attempt of a delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeliveryAttempt {
    pub(crate) at: Timestamp,
    pub(crate) detail: String,
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
    /// The last attempts, oldest first.
    pub(crate) last_attempts: Vec<DeliveryAttempt>,
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
    pub(crate) visible: Visibility,
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
