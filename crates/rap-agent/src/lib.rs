//! The rules of a runtime for the Reactive Agent Protocol: what a thread is, and how a message changes it.
//!
//! [`step`] takes a thread's [`Head`] and a [`Message`] and gives a [`Step`]: the new head, what has to be written
//! together with it, and what is to be done once that is on disk; or it says by name why nothing changes
//! ([`Ignored`]). [`prompt`] turns a history into a request that a provider accepts.
//!
//! There is no clock, no random and no IO here: time arrives with each message, ids are counted.
//!
//! ```
//! use rap_agent::{Effect, Head, Limits, Message, OnBusy, step};
//! use rap_protocol::Timestamp;
//!
//! let said = Message::Said { text: "Hello".into(), on_busy: OnBusy::Join };
//! let step = step(Head::new(), said, Timestamp(0), &Limits::default()).expect("an idle thread listens");
//! assert_eq!(step.head.asking(), Some(1));
//! assert_eq!(step.effects, [Effect::Ask { turn: 1, up_to: 1 }]);
//! ```

mod backlog;
mod budget;
mod built_in;
mod callback;
mod entry;
mod fork;
mod head;
mod life;
mod lost;
mod message;
pub mod prompt;
mod step;
mod summary;
mod turn;
mod user;
pub mod words;

pub use crate::budget::{Amounts, Bounds, Budgets, Resumes, Spending};
pub use crate::entry::{Arguments, CallEntry, Entry, Item, Seq, Speaker, Thought, ThoughtKind, Thoughts};
pub use crate::fork::{ForkPoint, ForkSearch};
pub use crate::head::{
    Backlog, Cause, Head, Held, Limits, OpenCall, Origin, Phase, Question, QuestionKind, Server, Status,
    Subscription, Usage,
};
pub use crate::lost::{Doubt, LostAfter, Verdict, Whereabouts};
pub use crate::message::{
    Again, Answer, Birth, BuiltIn, CallState, Choice, Event, Message, OnBusy, Outcome, PastCall, Plan,
    PlannedCall,
};
pub use crate::step::{Effect, Ignored, Letter, NewQuestion, Queue, Step, Write, step};
