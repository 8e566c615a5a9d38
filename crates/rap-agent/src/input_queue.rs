//! A queue of held input, as the head counts it.

use rap_protocol::Timestamp;
use serde::{Deserialize, Serialize};

use crate::head::{is_zero, is_zero_time};
use crate::{Item, Limits};

/// Counters of a queue of held input. The entries themselves are stored outside of the head.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct InputQueue {
    /// Number of the first held entry in the queue.
    pub first: u64,
    /// Number that the next held entry gets.
    pub next: u64,
    /// Count of inputs that the entries came from.
    pub inputs: u32,
    /// Size of the entries in bytes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes: u64,
    /// Arrival time of the oldest input; `None` if the queue is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// True if the queue contains a user message.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub user: bool,
    /// True if the queue contains only messages of other threads of the session.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub session_only: bool,
    /// Count of messages of other threads of the session. They are not included in `inputs`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub from_session: u64,
    /// Count of messages of other threads of the session that were dropped because too many waited.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dropped_from_session: u64,
    /// Time of the newest external input that those messages carry.
    #[serde(default, rename = "heard", skip_serializing_if = "is_zero_time")]
    pub external_input_at: Timestamp,
}

impl InputQueue {
    pub(crate) fn is_default(&self) -> bool {
        *self == InputQueue::default()
    }

    /// Returns whether the queue holds no entries.
    pub fn is_empty(&self) -> bool {
        self.first == self.next
    }

    /// Returns the number of held entries.
    pub fn entries(&self) -> u64 {
        self.next - self.first
    }

    /// Returns whether another input must be refused. The size is checked before an input is added, so the last one may
    /// exceed the limit.
    pub fn is_full(&self, limits: &Limits) -> bool {
        self.inputs >= limits.held || self.bytes >= limits.held_bytes
    }

    /// Counts one more input and returns the number of its first entry.
    pub(crate) fn add(&mut self, items: &[Item], now: Timestamp) -> u64 {
        let first = self.next;
        self.inputs += 1;
        self.bytes += items.iter().map(Item::bytes).sum::<u64>();
        self.since.get_or_insert(now);
        self.next += items.len() as u64;
        first
    }

    /// Empties the queue. Returns the number of its first entry and the count of its entries.
    pub(crate) fn clear(&mut self) -> (u64, u64) {
        let removed = (self.first, self.entries());
        *self = InputQueue { first: self.next, next: self.next, ..InputQueue::default() };
        removed
    }

    /// Removes the oldest `inputs`, which have `entries` entries each. Returns the number of the first removed entry.
    pub(crate) fn take_inputs(&mut self, inputs: u32, entries: u64) -> u64 {
        if inputs >= self.inputs {
            return self.clear().0;
        }
        let first = self.first;
        // The size of each input is not known here; they count as equally large.
        self.bytes -= self.bytes / u64::from(self.inputs) * u64::from(inputs);
        self.inputs -= inputs;
        self.first += u64::from(inputs) * entries;
        first
    }
}
