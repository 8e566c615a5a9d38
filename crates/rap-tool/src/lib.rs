//! Write tool servers for the Reactive Agent Protocol (RAP).
//!
//! A minimal server:
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
//! The server answers an invocation with 200 only after it has written the invocation to disk. It validates the
//! arguments against the schema of the argument type. It delivers the result with retries, for up to 72 hours by
//! default and across restarts. An invocation that arrives twice runs once. Every failure becomes an error result
//! that the model can act on.
//!
//! Where to go next:
//!
//! - [`ToolServer`]: configuration, authentication and how to run the server
//! - [`Tool`]: descriptions, annotations and restart behaviour of a tool
//! - [`Subscribe`]: tools that send events
//! - [`TestRuntime`]: tests without a socket
//! - [`process`]: child processes that end with their call
//! - [`Limits`]: every limit, with its default

mod auth;
mod call;
mod clock;
mod directory;
mod engine;
mod error;
mod http;
mod journal;
mod limits;
mod manifest;
#[doc(hidden)]
pub mod measure;
mod moved_files;
mod oauth;
mod output;
pub mod process;
mod rate;
mod rules;
mod scrub;
mod serve;
mod server;
mod shares;
mod subscription;
mod testing;
mod tool;
pub mod webhook;

pub use auth::Auth;
pub use call::{Call, Consent, Thread};
pub use engine::Migration;
pub use error::{Error, Result, ServeError};
pub use limits::Limits;
pub use oauth::OauthApp;
pub use output::{IntoOutput, Json, Output};
pub use rap_io::introspection::AuthorizationServer;
pub use rap_io::reloading::SecretSource;
pub use rap_io::tls::{ClientCertificates, ClientTls, ServerTls};
pub use rap_protocol::retry::RetryPolicy;
pub use rap_protocol::{
    CallId, Callback, Content, Image, Oauth, Secret, Segment, SubscriptionEvent, ThreadId, ToolResult,
    UrlPolicy, UserChoice, UserId, ViewUpdate,
};
pub use rate::Rate;
pub use schemars;
pub use serve::Bound;
pub use server::{Mounted, ToolServer};
pub use subscription::{Event, SendError, Subscribe, Subscription};
pub use testing::{Outcome, TestRuntime};
pub use tool::{Arguments, Tool};

/// Parts of [`ToolServer::serve`], for a program that serves several tool servers on one port.
pub mod embedded {
    pub use crate::serve::{address, announce, log_to_stderr};
}

/// The types that most tool servers need, for a glob import.
pub mod prelude {
    pub use crate::{
        Auth, Call, Error, Event, Json, Output, Result, Subscribe, Subscription, Thread, Tool, ToolServer,
    };
    pub use schemars::JsonSchema;
    pub use serde::{Deserialize, Serialize};
}

/// Runs the code blocks of the guide and of the README as doc tests.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../../../docs/write-a-tool.md")]
    struct WriteATool;
    #[doc = include_str!("../../../README.md")]
    struct Readme;
}
