//! Write tool servers for the Reactive Agent Protocol.
//!
//! A few lines of Rust, and what runs is correct, durable and safe:
//!
//! ```no_run
//! use rap_tool::prelude::*;
//!
//! /// Greet someone by name.
//! #[derive(Deserialize, JsonSchema)]
//! struct Greet {
//!     /// Who to greet.
//!     name: String,
//! }
//!
//! #[tokio::main]
//! async fn main() -> Result<()> {
//!     ToolServer::new("hello")
//!         .tool("greet", |args: Greet, _: Call| async move { Ok(format!("Hello, {}!", args.name)) })
//!         .serve("127.0.0.1:7501")
//!         .await
//! }
//! ```
//!
//! An invocation is answered 200 when it is on disk, and not before. Its arguments are checked against the
//! schema of the type; its result is delivered with retries, for days if need be, and across restarts. A call
//! that comes twice runs once. What goes wrong becomes a result that a model can act on.
//!
//! [`Subscribe`] shows how to write a subscription, [`Tool`] how to say more about a tool, [`TestRuntime`] how to test
//! it, [`Limits`] lists every bound, and [`ToolServer`] the rest.

mod auth;
mod call;
mod clock;
mod engine;
mod error;
mod http;
mod journal;
mod limits;
mod output;
mod rate;
mod rules;
mod serve;
mod server;
mod subscription;
mod testing;
mod tool;

pub use auth::Auth;
pub use call::{Call, Consent, Thread};
pub use error::{Error, Result, ServeError};
pub use limits::Limits;
pub use output::{IntoOutput, Json, Output};
pub use rap_protocol::retry::Patience;
pub use rap_protocol::{
    CallId, Callback, Content, Image, Oauth, Segment, SubscriptionEvent, ThreadId, ToolResult, UrlPolicy,
    UserChoice, UserId, ViewUpdate,
};
pub use rate::Rate;
pub use schemars;
pub use serve::Bound;
pub use server::{Mounted, ToolServer};
pub use subscription::{Event, SendError, Subscribe, Subscription};
pub use testing::{Outcome, TestRuntime};
pub use tool::{Arguments, Tool};

/// What a tool's author needs on most days.
pub mod prelude {
    pub use crate::{
        Auth, Call, Error, Event, Json, Output, Result, Subscribe, Subscription, Thread, Tool, ToolServer,
    };
    pub use schemars::JsonSchema;
    pub use serde::{Deserialize, Serialize};
}

/// The code in the guide and in the README, as tests.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../../../docs/write-a-tool.md")]
    struct WriteATool;
    #[doc = include_str!("../../../README.md")]
    struct Readme;
}
