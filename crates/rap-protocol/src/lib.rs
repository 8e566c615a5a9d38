//! Messages of the Reactive Agent Protocol: their types, limits and validation.
//!
//! This crate does no IO and reads no clock. Each kind of message has one function that parses and validates bytes
//! ([`parse_toolset`], [`parse_invocation`], [`parse_callback`], [`parse_close_thread`] …). Its error, [`Invalid`],
//! names the JSON path, what was expected and what was found. Messages are serialized with serde.
//!
//! ```
//! use rap_protocol::{Callback, parse_callback};
//!
//! let body = br#"{"type": "tool_result", "group_id": "thread_xyz", "id": "call_abc123", "text": "42"}"#;
//! let Callback::ToolResult(result) = parse_callback(body)? else { panic!("not a result") };
//! assert_eq!(result.id.as_str(), "call_abc123");
//!
//! let error = parse_callback(br#"{"type": "tool_result", "group_id": 5}"#).unwrap_err();
//! assert_eq!(error.to_string(), "$.group_id: expected a string, found 5");
//! # Ok::<(), rap_protocol::Invalid>(())
//! ```
//!
//! The crate also holds rules that tool servers and runtimes share: when to retry ([`retry`]), which addresses a URL
//! may point to ([`UrlPolicy`], [`UrlRules`]), how to keep secrets out of logs and error messages ([`redact`]), and
//! how to show text of others to people ([`visible`]).

mod arguments;
mod callback;
mod content;
pub mod id;
mod invalid;
mod invocation;
pub mod limits;
mod notification;
mod read;
pub mod redact;
pub mod retry;
pub mod schema;
mod time;
mod toolset;
mod trace_context;
pub mod url;
mod url_policy;
mod url_rules;
pub mod visible;

pub use crate::arguments::ArgumentType;
pub use crate::callback::{
    Body, Callback, ChoiceAnswer, ERROR_PREFIX, Oauth, SubscriptionEvent, ToolResult, UserChoice, ViewUpdate,
    parse_callback, parse_choice_answer,
};
pub use crate::content::{Content, Image, Segment, parse_content};
pub use crate::id::{CallId, EventId, ThreadId, ToolName, UserId};
pub use crate::invalid::{Fault, Invalid};
pub use crate::invocation::{Address, BadInvocation, Invocation, parse_invocation};
pub use crate::notification::{
    CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, CancelToolCall, CloseThread, MIGRATE_PATH, Migrate,
    StatusAnswer, StatusQuery, TOOL_CALL_STATUS_PATH, parse_cancel_tool_call, parse_close_thread,
    parse_migrate, parse_status_answer, parse_status_query,
};
pub use crate::read::check_json;
pub use crate::redact::Secret;
pub use crate::schema::InputSchema;
pub use crate::time::Timestamp;
pub use crate::toolset::{Annotations, DISCOVERY_PATH, ExpectedDuration, Tool, Toolset, parse_toolset};
pub use crate::trace_context::{TRACEPARENT, TraceContext};
pub use crate::url::{AuthUrl, CallbackUrl, EndpointUrl, ResponseUrl};
pub use crate::url_policy::{Forbidden, UrlPolicy};
pub use crate::url_rules::{HostPort, Origin, UrlRules};
