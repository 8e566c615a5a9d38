//! Notifications and queries from the runtime to a tool server, POSTed below the server's base URL.
//!
//! If an id in a notification is a string but not a well-formed id, the error has [`Fault::Value`]. A tool server
//! answers such a notification as if the id were unknown.

use serde::Serialize;

use crate::invalid::{Fault, Invalid};
use crate::read;
use crate::url::EndpointUrl;
use crate::{CallId, ThreadId};

/// Path of [`CloseThread`] notifications, relative to a tool server's base URL.
pub const CLOSE_THREAD_PATH: &str = "/close_thread";
/// Path of [`CancelToolCall`] notifications, relative to a tool server's base URL.
pub const CANCEL_TOOL_CALL_PATH: &str = "/cancel_tool_call";
/// Path of [`StatusQuery`] requests, relative to a tool server's base URL.
pub const TOOL_CALL_STATUS_PATH: &str = "/tool_call_status";
/// Path of [`Migrate`] requests, relative to a tool server's base URL.
pub const MIGRATE_PATH: &str = "/migrate";

/// Notification that a thread was closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CloseThread {
    /// Id of the closed thread.
    pub thread_id: ThreadId,
}

/// Notification that the result of a call, or the events of a subscription, are no longer needed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CancelToolCall {
    /// Thread of the call.
    pub thread_id: ThreadId,
    /// Id of the call that is cancelled; for a subscription, of the call that created it.
    pub tool_call_id: CallId,
}

/// Query whether a call will still send a result, or a subscription further events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StatusQuery {
    /// Thread of the call.
    pub thread_id: ThreadId,
    /// Id of the call; for a subscription, of the call that created it.
    pub tool_call_id: CallId,
}

/// Answer to a [`StatusQuery`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct StatusAnswer {
    /// True if a result or further events will still be sent.
    pub alive: bool,
}

/// Request to move all state of a session to another server.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Migrate {
    /// Id of the session, which is the id of its root thread.
    pub session_id: ThreadId,
    /// URL of the server that receives the state.
    pub destination_url: EndpointUrl,
}

/// Parses and validates a [`CloseThread`].
pub fn parse_close_thread(bytes: &[u8]) -> Result<CloseThread, Invalid> {
    Ok(CloseThread { thread_id: read::message(bytes)?.id("thread_id")? })
}

/// Parses and validates a [`CancelToolCall`].
pub fn parse_cancel_tool_call(bytes: &[u8]) -> Result<CancelToolCall, Invalid> {
    let (thread_id, tool_call_id) = call(bytes)?;
    Ok(CancelToolCall { thread_id, tool_call_id })
}

/// Parses and validates a [`StatusQuery`].
pub fn parse_status_query(bytes: &[u8]) -> Result<StatusQuery, Invalid> {
    let (thread_id, tool_call_id) = call(bytes)?;
    Ok(StatusQuery { thread_id, tool_call_id })
}

/// Parses and validates a [`StatusAnswer`].
pub fn parse_status_answer(bytes: &[u8]) -> Result<StatusAnswer, Invalid> {
    Ok(StatusAnswer { alive: read::message(bytes)?.bool("alive")? })
}

/// Parses and validates a [`Migrate`].
pub fn parse_migrate(bytes: &[u8]) -> Result<Migrate, Invalid> {
    let mut object = read::message(bytes)?;
    Ok(Migrate { session_id: object.id("session_id")?, destination_url: object.url("destination_url")? })
}

/// A [`Fault::Shape`] error takes precedence over a [`Fault::Value`] error: if one id is missing, the message is
/// unreadable, whatever is wrong with the other id.
fn call(bytes: &[u8]) -> Result<(ThreadId, CallId), Invalid> {
    let mut object = read::message(bytes)?;
    match (object.id("thread_id"), object.id("tool_call_id")) {
        (Ok(thread), Ok(call)) => Ok((thread, call)),
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => Err(error),
        (Err(thread), Err(call)) if (thread.fault, call.fault) == (Fault::Value, Fault::Shape) => Err(call),
        (Err(thread), Err(_)) => Err(thread),
    }
}
