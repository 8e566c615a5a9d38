//! Limits of a thread. Input beyond a limit is refused with [`crate::Ignored::Full`] or gets an error result.

use std::time::Duration;

use crate::{Bounds, Budgets};

/// Limits of a thread. A limit is the maximum number of what its field describes, unless the field says otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Active subscriptions, schedules included.
    pub subscriptions: usize,
    /// Open calls, including those with a placeholder result.
    pub open_calls: usize,
    /// Inputs in each of the two queues, and waiting events in the backlog of each subscription.
    pub held: u32,
    /// Size of each of these queues in bytes. All of a queue is read at once.
    pub held_bytes: u64,
    /// Questions of open calls to the user.
    pub questions: usize,
    /// Open children that the model spawned. The same limit applies separately to active event children.
    pub children: usize,
    /// Active event children of one subscription. Further events wait.
    pub event_children: usize,
    /// Waiting events that one event child receives.
    pub events_per_child: u32,
    /// Recorded event ids of each subscription. Beyond the limit the oldest are forgotten.
    pub event_marks: u64,
    /// Depth of nested threads. At this depth a thread spawns no children and handles all events itself.
    pub depth: usize,
    /// Stored views. Beyond the limit the oldest is deleted.
    pub views: usize,
    /// Consecutive turns without external input.
    pub turns_per_wake: u32,
    /// Maximum time that held input waits for open calls.
    pub hold_max: Duration,
    /// Time after which a call times out; `None` means never.
    pub call_timeout: Option<Duration>,
    /// Time within which the user has to allow a call.
    pub approval_within: Duration,
    /// Time for which a failed thread retries.
    pub failed_retry_for: Duration,
    /// Budget of the thread's session.
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
