//! The client API of a runtime for the Reactive Agent Protocol: types for its JSON and, with the feature `client`, an
//! async client. The runtime `rap serve` and the command `rap` use these types too.
//!
//! | path | request | answer |
//! |---|---|---|
//! | `POST /v1/threads` | [`CreateThread`] | [`Thread`] |
//! | `GET /v1/threads`, `/v1/threads/{id}` | | [`Threads`], [`Thread`] |
//! | `POST /v1/threads/{id}/messages` | [`SendMessage`] | [`Turn`] |
//! | `GET /v1/threads/{id}/history` | | [`Entries`] |
//! | `GET /v1/threads/{id}/events` | | a stream of [`ThreadEvent`] |
//! | `GET /v1/events` | | a stream of [`RuntimeEvent`] |
//! | `POST /v1/threads/{id}/interrupt`, `/close`, `/resume` | | [`Done`] |
//! | `DELETE /v1/threads/{id}` | | [`Done`] |
//! | `POST /v1/prune` | [`Prune`] | [`Pruned`] |
//! | `POST /v1/threads/{id}/fork` | [`Fork`] | [`Thread`] |
//! | `POST /v1/threads/{id}/calls/{call_id}/cancel` | | [`Done`] |
//! | `POST /v1/threads/{id}/calls/{call_id}/choice` | [`Answer`] | [`Done`] |
//! | `GET /v1/threads/{id}/views` | | [`Views`] |
//! | `GET /v1/threads/{id}/usage` | | [`SessionUsage`] |
//! | `GET /v1/calls`, `/v1/subscriptions`, `/v1/timers`, `/v1/inbox` | | [`Calls`], [`Subscriptions`], [`Timers`], [`Inbox`] |
//! | `GET /v1/deliveries`, `/v1/deliveries/{id}` | | [`Deliveries`], [`Delivery`] |
//! | `POST /v1/deliveries/{id}/redeliver` | | [`Done`] |
//! | `GET /v1/tools` | | [`Tools`] |
//! | `GET /v1/nodes` | | [`Nodes`] |
//! | `POST /v1/tokens` | [`CreateToken`] | [`CreatedToken`] |
//! | `GET /v1/tokens` | | [`Tokens`] |
//! | `DELETE /v1/tokens/{id}` | | [`Done`] |
//! | `GET /v1/figures` | | [`Figures`] |
//! | `POST /v1/threads/{id}/migrate` | [`Migrate`] | [`Done`] |
//! | `GET /v1/threads/{id}/move` | | [`Move`] |
//! | `GET /v1/imports` | | [`Destination`] |
//! | `POST /v1/imports/{id}/records`, `/check`, `/discard` | | [`Done`] |
//! | `POST /v1/imports/{id}/start` | [`StartSession`] | [`ArrivedSession`] |
//!
//! Every other answer is an [`ErrorBody`]. Reading is lenient, so that a program works with a newer runtime: unknown
//! fields are ignored, and an unknown value, such as a new status, is read as `Unknown`.
//!
//! ```
//! use rap_api::{Entry, Item, Status};
//!
//! let line = r#"{"seq": 2, "at": "2026-11-16T09:30:00.000Z", "kind": "assistant", "text": "Hello", "calls": []}"#;
//! let entry: Entry = serde_json::from_str(line)?;
//! assert!(matches!(entry.item, Item::Assistant { text, .. } if text == "Hello"));
//!
//! assert_eq!(serde_json::from_str::<Status>("\"needs_you\"")?, Status::NeedsYou);
//! assert_eq!(serde_json::from_str::<Status>("\"of a newer runtime\"")?, Status::Unknown);
//! # Ok::<(), serde_json::Error>(())
//! ```
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `client` | the module `client`: requests, and event streams that reconnect |
//! | `schema` | `schemars::JsonSchema` for all types |
//! | `clap` | `clap::ValueEnum` for [`Status`], [`OnBusy`], [`DeliveryOutcome`] and [`TokenScope`] |

#[cfg(feature = "client")]
pub mod client;
mod delivery;
mod entry;
mod event;
mod figures;
mod listing;
mod moving;
mod question;
mod request;
mod sign_in;
mod string_enum;
mod thread;
mod time;
mod token;
mod tool;

pub use delivery::{Delivery, DeliveryAttempt, DeliveryKind, DeliveryOutcome};
pub use entry::{Call, Content, Entries, Entry, Item, Sender, display_text};
pub use event::{
    CallEvent, CallEventKind, ChildEvent, Delta, End, Notice, RuntimeEvent, StatusEvent, ThreadEvent,
    ThreadStatus,
};
pub use figures::{AgentFigures, Figures, FiguresPoint};
pub use listing::{
    Calls, Deliveries, Inbox, ListedCall, ListedSubscription, Listing, Node, Nodes, Subscriptions,
    ThreadOrder, Threads, Timer, TimerKind, Timers, Tokens,
};
pub use moving::{ArrivedSession, Destination, DestinationServer, Migrate, Move, StartSession};
pub use question::{Question, QuestionKind};
#[cfg(feature = "schema")]
pub use request::ID_PATTERN;
pub use request::{
    Answer, CONTENT_ITEMS, CreateThread, Done, ErrorBody, ErrorReason, Fork, ID_CHARS, IMAGE_BYTES,
    IMAGE_TYPES, OnBusy, Prune, Pruned, SendMessage, TITLE_CHARS, Turn,
};
pub use sign_in::{SignIn, SignInState};
pub use thread::{Cost, OpenCall, SessionUsage, Status, Subscription, Thread, Usage, UsualDuration};
pub use time::{Time, TimeError};
pub use token::{CreateToken, CreatedToken, ListedToken, TOKEN_NAME_CHARS, TokenScope};
pub use tool::{HealthState, ServerHealth, Tool, ToolServer, Tools, View, Views};
