//! The bounds of a thread. Beyond one, input is refused by name or answered with an error result.

use std::time::Duration;

use crate::{Bounds, Budgets};

/// The bounds of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Active subscriptions.
    pub subscriptions: usize,
    /// Open calls, those with a placeholder included.
    pub open_calls: usize,
    /// Inputs held in each of the two queues, and events of each subscription that wait for a child.
    pub held: u32,
    /// Size of each of these queues in bytes, since all of it is read at once.
    pub held_bytes: u64,
    /// Questions that wait for a person.
    pub questions: usize,
    /// Open children that the model spawned, and children at work on events; each kind is counted by itself.
    pub children: usize,
    /// Children of one subscription at work on its events; more events wait.
    pub event_children: usize,
    /// Waiting events that one child takes.
    pub events_per_child: u32,
    /// Event ids that are recorded for each subscription; beyond it the oldest are forgotten.
    pub event_marks: u64,
    /// Depth of nested threads. Beyond it events are taken by their own thread.
    pub depth: usize,
    /// Views that are kept; the oldest goes first.
    pub views: usize,
    /// Questions to the model without anything new from outside.
    pub turns_per_wake: u32,
    /// How long events wait behind open calls.
    pub hold_max: Duration,
    /// How long a call may take.
    pub call_timeout: Option<Duration>,
    /// How long a call waits for a person to allow it.
    pub approval_within: Duration,
    /// How long a failed thread tries again by itself.
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
            events_per_child: 100,
            event_marks: 100_000,
            depth: 8,
            views: 64,
            turns_per_wake: 50,
            hold_max: Duration::from_secs(60),
            call_timeout: None,
            approval_within: Duration::from_secs(24 * 3600),
            failed_retry_for: Duration::from_secs(24 * 3600),
            budgets: Budgets {
                per_hour: Bounds { wakes: Some(1000), ..Bounds::default() },
                ..Budgets::default()
            },
        }
    }
}
