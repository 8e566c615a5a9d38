//! Rules of a runtime for the Reactive Agent Protocol: the state of a thread, and how an input changes it.
//!
//! [`step`] takes a thread's [`Head`], an [`Input`] and the [`Facts`] that [`facts_needed`] asked for. It returns a
//! [`Step`]: the new head, the rows to write with it, and the work to start after the commit. If nothing changes, it
//! returns the reason ([`Ignored`]). [`prompt`] turns a history into a request that a provider accepts.
//!
//! This crate does no IO and uses no clock and no randomness. The time is passed to each step, and ids are derived from the
//! thread's incarnation and a counter.
//!
//! ```
//! use rap_agent::{Effect, Facts, Head, Identity, Input, Limits, OnBusy, step};
//! use rap_protocol::{ThreadId, Timestamp};
//!
//! let thread = Identity { id: ThreadId::new("t1").unwrap(), incarnation: 7, depth: 0 };
//! let input = Input::UserMessage { message: "Hello".into(), on_busy: OnBusy::Join };
//! let step = step(Head::new(), input, Facts::of(thread), Timestamp(0), &Limits::default()).unwrap();
//! assert_eq!(step.head.turn_in_progress(), Some(1));
//! assert_eq!(step.effects, [Effect::AskModel { turn: 1, up_to: 1 }]);
//! ```

mod approval;
mod attention;
mod budget;
mod built_in;
mod callback;
mod children;
mod clock;
mod closing;
mod entry;
mod facts;
mod fork;
mod head;
mod input;
mod input_queue;
mod limits;
mod outcome;
pub mod prompt;
mod status_check;
mod step;
mod stored;
mod summary;
pub mod texts;
mod title;
mod turn;
mod user;

pub use rap_api::{OnBusy, Status};

pub use crate::approval::approval_prompt;
pub use crate::attention::Attention;
pub use crate::budget::{Amounts, Bounds, Budgets, Spending};
pub use crate::entry::{
    Arguments, CallEntry, Entry, Item, Seq, Speaker, Thought, ThoughtKind, Thoughts, remove_nul,
};
pub use crate::facts::{
    CallState, Facts, FactsNeeded, Identity, NextTime, Occurrence, PastCall, facts_needed,
};
pub use crate::fork::{ForkPoint, ForkSearch};
pub use crate::head::{
    Backlog, CallbackProblem, Cause, Head, KEPT_QUESTIONS, LONGEST_PAUSE, OpenCall, Origin, Pause,
    PauseScope, Phase, Question, QuestionKind, Server, Subscription, TurnInProgress, Usage,
};
pub use crate::input::{
    BuiltIn, Choice, Event, Input, Plan, PlannedCall, ThreadMessage, ToolResult, TurnAnswer, TurnRetry,
    UserMessage, check_content,
};
pub use crate::input_queue::InputQueue;
pub use crate::limits::{Limit, LimitValue, Limits, RuntimeLimits, Valid};
pub use crate::outcome::{BacklogRange, Effect, Ignored, NewQuestion, Queue, Spawn, Step, Write};
pub use crate::status_check::{CheckResult, LostAfter, StatusAnswer, StatusCheck};
pub use crate::step::step;
pub use crate::title::{MADE_TITLE_CHARS, title_of};
