//! Alerts: messages to people, one for each state that a thread entered and each destination that is configured for that
//! state. They are stored with the step that made them, and deleted when they were delivered or given up.

use rap_agent::{Attention, Step};
use rap_protocol::{ThreadId, Timestamp};

use super::{StepSettings, Thread};

/// Maximum number of alerts that wait for one destination. Further ones are not stored.
pub(super) const WAITING: i64 = 10_000;
/// Maximum length of the reason in an alert, in bytes.
const REASON_BYTES: usize = 500;

/// A destination of alerts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AlertRule {
    /// Name of the destination in the database, a digest of its URL.
    pub(crate) destination: String,
    pub(crate) on: Vec<Attention>,
}

/// An alert that is stored with a step.
pub(crate) struct NewAlert<'a> {
    pub(crate) destination: &'a str,
    pub(crate) thread: &'a str,
    pub(crate) state: &'static str,
    pub(crate) reason: Option<String>,
    pub(crate) at: Timestamp,
}

/// An alert that an attempt to send it has claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Alert {
    pub(crate) number: i64,
    pub(crate) thread: ThreadId,
    pub(crate) state: String,
    pub(crate) reason: Option<String>,
    pub(crate) at: Timestamp,
    /// Number of attempts, this one included.
    pub(crate) attempts: u32,
}

/// Due alerts of a destination.
#[derive(Debug, Default)]
pub(crate) struct ClaimedAlerts {
    pub(crate) alerts: Vec<Alert>,
    /// Due time of the next alert of the destination. `None` if there is none.
    pub(crate) next: Option<Timestamp>,
}

/// Returns the alerts of a step.
pub(super) fn alerts<'a>(
    rules: &'a StepSettings,
    thread: &'a Thread,
    step: &'a Step,
    now: Timestamp,
) -> impl Iterator<Item = NewAlert<'a>> {
    step.entered.iter().flat_map(move |state| {
        let reason = state.reason(&step.head);
        let reason = reason.map(|why| why[..why.floor_char_boundary(REASON_BYTES)].to_owned());
        let wanted = rules.alerts.iter().filter(|rule| rule.on.contains(state));
        wanted.map(move |rule| NewAlert {
            destination: &rule.destination,
            thread: thread.id.as_str(),
            state: state.as_str(),
            reason: reason.clone(),
            at: now,
        })
    })
}
