//! Facts: stored state that a step needs besides the head. [`facts_needed`] determines which facts, and the store loads
//! them.

use rap_protocol::{CallId, EventId, ThreadId, Timestamp};
use serde_json::{Map, Value};

use crate::{BuiltIn, Head, Input, Limits, Plan, Seq, Server, Spending, ThreadMessage};

/// Stored state that a step needs besides the head.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Identity of the thread. Always needed.
    pub thread: Identity,
    /// The call of the input, if the thread made it and it is no longer open.
    pub call: Option<PastCall>,
    /// True if an event with the same id was processed before.
    pub event_is_known: bool,
    /// Arguments of the call that subscribed.
    pub arguments: Map<String, Value>,
    /// Occurrence of the schedule whose timer fired; `None` if it was not needed or cannot be read.
    pub schedule: Option<Occurrence>,
    /// Amounts that the session has spent; `None` if they were not needed.
    pub spending: Option<Spending>,
    /// Other threads of the session that its budget has paused.
    pub paused: Vec<ThreadId>,
}

impl Facts {
    /// Returns facts that contain only the thread's identity.
    pub fn of(thread: Identity) -> Facts {
        Facts {
            thread,
            call: None,
            event_is_known: false,
            arguments: Map::new(),
            schedule: None,
            spending: None,
            paused: Vec::new(),
        }
    }
}

/// Identity of a thread, which never changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Id of the thread.
    pub id: ThreadId,
    /// Random number from which the ids of calls and children are derived.
    pub incarnation: u64,
    /// Number of ancestors; 0 for a root.
    pub depth: usize,
}

impl Identity {
    /// Derives a 64-bit number that is, with overwhelming probability, different for every thread and `count`.
    pub(crate) fn derive(&self, count: u64) -> u64 {
        // SplitMix64: a bijection of each argument.
        let mut mixed = self.incarnation.wrapping_add(count.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
}

/// A call that is no longer open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PastCall {
    /// Name of the tool.
    pub name: String,
    /// Tool server that was invoked.
    pub server: Server,
    /// Number of the assistant entry that contains the call.
    pub seq: Seq,
    /// Current state.
    pub state: CallState,
}

/// State of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallState {
    /// The call has no result, or only a placeholder.
    Open,
    /// The result is in the history or in held input.
    Returned,
    /// The call was cancelled, or the user did not allow it.
    Interrupted,
    /// The invocation was not accepted, the server lost the call, or its callback was refused.
    Failed,
    /// No result came in time.
    TimedOut,
    /// The result confirmed a subscription, which is active.
    Subscribed,
    /// The subscription has ended.
    Ended,
}

/// Occurrence of a schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occurrence {
    /// Text for the model.
    pub text: String,
    /// Time of the next occurrence.
    pub next: NextTime,
}

/// Time of a schedule's next occurrence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextTime {
    /// A known time.
    At(Timestamp),
    /// There is no further occurrence.
    Never,
    /// The time cannot be computed at the moment, for example because the time zone is not installed.
    Unknown,
}

/// Facts that a step needs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FactsNeeded {
    /// Call whose state is needed.
    pub call: Option<CallId>,
    /// Subscription and event id to look up among the recorded ids.
    pub event: Option<(CallId, EventId)>,
    /// Call whose arguments are needed, and the entry that contains them.
    pub arguments: Option<(CallId, Seq)>,
    /// Schedule whose occurrence is needed, and the entry that contains its arguments.
    pub schedule: Option<(CallId, Seq)>,
    /// True if the amounts that the session has spent are needed.
    pub spending: bool,
    /// True if the other paused threads of the session are needed.
    pub paused: bool,
}

/// Returns the facts that a step with this head and input needs.
pub fn facts_needed(head: &Head, input: &Input, limits: &Limits) -> FactsNeeded {
    let mut needs = FactsNeeded::default();
    if head.is_closed() {
        return needs;
    }
    let past = |call: &CallId| (!head.is_open(call)).then(|| call.clone());
    match input {
        Input::ToolResult { call, .. } => needs.call = past(call),
        Input::View { call, .. } if head.subscription(call).is_none() => needs.call = past(call),
        Input::Event { call, event } => match head.subscription(call) {
            None => needs.call = past(call),
            Some(subscription) => {
                needs.event = event.id.clone().map(|id| (call.clone(), id));
                needs.arguments = (!event.associative).then(|| (call.clone(), subscription.seq));
            }
        },
        Input::TimerFired { call } => {
            needs.schedule = head.subscription(call).map(|schedule| (call.clone(), schedule.seq));
        }
        Input::Resume => needs.paused = true,
        _ => {}
    }
    needs.spending = needs.paused || may_spend(head, input, limits);
    needs
}

/// Returns whether the step may count an amount against a limited budget.
fn may_spend(head: &Head, input: &Input, limits: &Limits) -> bool {
    let budgets = &limits.budgets;
    if budgets.are_unlimited() {
        return false;
    }
    if !budgets.limit_only_wakes() {
        return true;
    }
    let spawns = |plan: &Plan| matches!(plan, Plan::BuiltIn(BuiltIn::SpawnThread { .. }));
    match input {
        // A user message is not a wake, and neither is the held input that is released with it.
        Input::Begin { .. } | Input::UserMessage { .. } | Input::Interrupt | Input::Resume => false,
        Input::TurnEnded { answer, .. } => {
            !head.held.is_empty() || answer.calls.iter().any(|call| spawns(&call.plan))
        }
        // A result that closes its batch is not a wake, unless held input is released.
        Input::ToolResult { call, .. } | Input::CallFailed { call, .. } => {
            !head.held.is_empty() || !head.batch().iter().any(|open| open.id == *call)
        }
        Input::FromThread { message: ThreadMessage::Close | ThreadMessage::Notice { .. }, .. } => false,
        Input::TurnFailed { .. }
        | Input::PromptTooLong { .. }
        | Input::Summarised { .. }
        | Input::UnusedAnswer(_)
        | Input::CallbackRefused { .. }
        | Input::SignInRequested { .. }
        | Input::ChoiceRequested { .. }
        | Input::View { .. }
        | Input::Close
        | Input::Notice { .. } => false,
        Input::TimerFired { .. }
        | Input::Event { .. }
        | Input::SubscriptionLost { .. }
        | Input::Choose { .. }
        | Input::Cancel { .. }
        | Input::Due
        | Input::FromThread { .. } => true,
    }
}
