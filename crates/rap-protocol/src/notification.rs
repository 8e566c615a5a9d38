//! Notifications and queries from the runtime to a tool server, POSTed below the server's base URL.
//!
//! A notification whose id is a string but not a well-formed id has [`Fault::Value`]: a tool server
//! answers it like an unknown id.

use serde::Serialize;

use crate::invalid::{Fault, Invalid};
use crate::read;
use crate::url::EndpointUrl;
use crate::{CallId, ThreadId};

/// Where a [`CloseThread`] goes.
pub const CLOSE_THREAD_PATH: &str = "/close_thread";
/// Where a [`CancelToolCall`] goes.
pub const CANCEL_TOOL_CALL_PATH: &str = "/cancel_tool_call";
/// Where a [`StatusQuery`] goes.
pub const TOOL_CALL_STATUS_PATH: &str = "/tool_call_status";
/// Where a [`Migrate`] goes.
pub const MIGRATE_PATH: &str = "/migrate";

/// A thread has been closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CloseThread {
    /// The thread.
    pub thread_id: ThreadId,
}

/// A call, or a subscription, is no longer wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CancelToolCall {
    /// Its thread.
    pub thread_id: ThreadId,
    /// The call.
    pub tool_call_id: CallId,
}

/// Will a result, or further events, still come?
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StatusQuery {
    /// The thread of the call.
    pub thread_id: ThreadId,
    /// The call.
    pub tool_call_id: CallId,
}

/// The answer to a [`StatusQuery`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct StatusAnswer {
    /// Whether something will still come.
    pub alive: bool,
}

/// Move all state of a session to another server.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Migrate {
    /// The root thread of the session.
    pub session_id: ThreadId,
    /// Where it goes.
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

/// Shape comes before value: a message in which one id is missing is unreadable, whatever the other is.
fn call(bytes: &[u8]) -> Result<(ThreadId, CallId), Invalid> {
    let mut object = read::message(bytes)?;
    match (object.id("thread_id"), object.id("tool_call_id")) {
        (Ok(thread), Ok(call)) => Ok((thread, call)),
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => Err(error),
        (Err(thread), Err(call)) if (thread.fault, call.fault) == (Fault::Value, Fault::Shape) => Err(call),
        (Err(thread), Err(_)) => Err(thread),
    }
}
