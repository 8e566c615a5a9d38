//! The rules of a runtime for the Reactive Agent Protocol: what a thread is, and how an input changes it.
//!
//! [`step`] takes a thread's [`Head`], an [`Input`] and the [`Facts`] that [`facts_needed`] asked for. It returns a
//! [`Step`]: the new head, what is written together with it, and what is done after the commit; or the reason why nothing
//! changes ([`Ignored`]). [`prompt`] turns a history into a request that a provider accepts.
//!
//! There is no clock, no randomness and no IO here. Time arrives with each input, and ids are derived from the thread's
//! incarnation and a counter.
//!
//! ```
//! use rap_agent::{Effect, Facts, Head, Identity, Input, Limits, OnBusy, step};
//! use rap_protocol::{ThreadId, Timestamp};
//!
//! let thread = Identity { id: ThreadId::new("t1").unwrap(), incarnation: 7, depth: 0 };
//! let input = Input::UserMessage { text: "Hello".into(), on_busy: OnBusy::Join };
//! let step = step(Head::new(), input, Facts::of(thread), Timestamp(0), &Limits::default()).unwrap();
//! assert_eq!(step.head.asking(), Some(1));
//! assert_eq!(step.effects, [Effect::Ask { turn: 1, up_to: 1 }]);
//! ```

mod budget;
mod built_in;
mod callback;
mod children;
mod closing;
mod entry;
mod facts;
mod fork;
mod head;
mod input;
mod limits;
pub mod prompt;
mod status_check;
mod step;
mod stored;
mod summary;
mod turn;
mod user;
pub mod words;

pub use crate::budget::{Amounts, Bounds, Budgets, Spending};
pub use crate::entry::{Arguments, CallEntry, Entry, Item, Seq, Speaker, Thought, ThoughtKind, Thoughts};
pub use crate::facts::{CallState, Facts, Identity, Needs, NextTime, Occurrence, PastCall, facts_needed};
pub use crate::fork::{ForkPoint, ForkSearch};
pub use crate::head::{
    Asking, Backlog, Cause, Head, Held, OpenCall, Origin, Pause, PauseScope, Phase, Problem, Question,
    QuestionKind, Server, Status, Subscription, Usage,
};
pub use crate::input::{
    Again, Answer, BuiltIn, Choice, Event, Input, OnBusy, Plan, PlannedCall, ThreadMessage, ToolResult,
};
pub use crate::limits::Limits;
pub use crate::status_check::{CheckResult, Liveness, LostAfter, StatusCheck};
pub use crate::step::{BacklogRange, Effect, Ignored, NewQuestion, Queue, Spawn, Step, Write, step};
