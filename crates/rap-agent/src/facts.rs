//! Facts: what the rules must know besides the head. [`facts_needed`] says which; the store loads them.

use rap_protocol::{CallId, EventId, ThreadId, Timestamp};
use serde_json::{Map, Value};

use crate::{BuiltIn, Head, Input, Limits, Plan, Seq, Server, Spending, ThreadMessage};

/// What a step must know besides the head and the input.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// The thread itself. Always given.
    pub thread: Identity,
    /// The call, if it is not open but was made once.
    pub call: Option<PastCall>,
    /// Whether an event of the same id was taken before.
    pub event_is_known: bool,
    /// The arguments of the call that subscribed.
    pub arguments: Map<String, Value>,
    /// The schedule whose timer has fired.
    pub schedule: Option<Occurrence>,
    /// What the session has spent; none if it was not asked for.
    pub spending: Option<Spending>,
    /// Other threads of the session that its budget has paused.
    pub paused: Vec<ThreadId>,
}

impl Facts {
    /// No facts but the thread itself.
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

/// Who a thread is. It never changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Its id.
    pub id: ThreadId,
    /// A random number. The ids of its calls and children are derived from it.
    pub incarnation: u64,
    /// Number of its ancestors.
    pub depth: usize,
}

impl Identity {
    /// A number that no other thread and no other count gives, for all that 64 bits can tell apart.
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
    /// Its tool server.
    pub server: Server,
    /// The assistant entry that made it.
    pub seq: Seq,
    /// Its state.
    pub state: CallState,
}

/// The state of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallState {
    /// It has no result of its own yet.
    Open,
    /// Its result is in the history.
    Returned,
    /// It was cancelled.
    Interrupted,
    /// Its invocation was not accepted, or its server lost it.
    Failed,
    /// It took too long.
    TimedOut,
    /// Its result confirmed a subscription, which is active.
    Subscribed,
    /// Its subscription has ended.
    Ended,
}

/// What a schedule says when its timer has fired.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occurrence {
    /// The text for the model.
    pub text: String,
    /// The next time.
    pub next: NextTime,
}

/// The next time of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextTime {
    /// This time.
    At(Timestamp),
    /// There is none.
    Never,
    /// It cannot be computed at the moment, for example because the time zone is not installed.
    Unknown,
}

/// The facts that a step needs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Needs {
    /// The state of a call.
    pub call: Option<CallId>,
    /// Whether an event id of a subscription is recorded.
    pub event: Option<(CallId, EventId)>,
    /// The arguments of a call, which stand in this entry.
    pub arguments: Option<(CallId, Seq)>,
    /// The next time of a schedule, whose arguments stand in this entry.
    pub schedule: Option<(CallId, Seq)>,
    /// What the session has spent.
    pub spending: bool,
    /// The paused threads of the session.
    pub paused: bool,
}

/// Says which facts a step needs.
pub fn facts_needed(head: &Head, input: &Input, limits: &Limits) -> Needs {
    let mut needs = Needs::default();
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

/// Whether a step may count something against a budget that has a bound.
fn may_spend(head: &Head, input: &Input, limits: &Limits) -> bool {
    let budgets = &limits.budgets;
    if budgets.are_off() {
        return false;
    }
    if !budgets.bound_wakes_only() {
        return true;
    }
    let spawns = |plan: &Plan| matches!(plan, Plan::BuiltIn(BuiltIn::SpawnThread { .. }));
    match input {
        // A person's message is no wake. It takes held input along.
        Input::Begin { .. } | Input::UserMessage { .. } | Input::Interrupt | Input::Resume => false,
        Input::TurnEnded { answer, .. } => {
            !head.held.is_empty() || answer.calls.iter().any(|call| spawns(&call.plan))
        }
        // A result that closes its batch is no wake, unless held input follows.
        Input::ToolResult { call, .. } | Input::CallFailed { call, .. } => {
            !head.held.is_empty() || !head.batch().iter().any(|open| open.id == *call)
        }
        Input::FromThread { message: ThreadMessage::Close | ThreadMessage::Notice { .. }, .. } => false,
        Input::TurnFailed { .. }
        | Input::PromptTooLong { .. }
        | Input::Summarised { .. }
        | Input::Spent(_)
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
