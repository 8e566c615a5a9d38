//! The invocation: the request by which a runtime calls a tool.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::invalid::{Invalid, describe};
use crate::read::{self, Object};
use crate::{CallId, CallbackUrl, ThreadId, ToolName, UserId, limits};

/// Tool call, POSTed to the toolset's endpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Invocation {
    /// Name of the tool.
    pub operation: ToolName,
    /// Arguments of the call.
    pub arguments: Map<String, Value>,
    /// Ids of the call, and the URL for its callbacks.
    #[serde(flatten)]
    pub address: Address,
    /// Ancestors of the thread, root first; empty for a root thread.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub thread_ancestors: Vec<ThreadId>,
    /// End user on whose behalf the call is made; `None` if the runtime does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_id: Option<UserId>,
    /// Version of the toolset that the runtime has fetched; `None` if the toolset has no version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub toolset_version: Option<String>,
}

/// Ids of a call and the URL for its callbacks: everything that is needed to answer the call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Address {
    /// Id of the call.
    pub id: CallId,
    /// Secondary id that some models give a call. It is echoed in the result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_id: Option<CallId>,
    /// URL to which the callbacks of the call are posted.
    pub callback_url: CallbackUrl,
    /// Thread of the call.
    pub group_id: ThreadId,
}

/// Invalid invocation. If its address can be read, the error is delivered there as an error result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct BadInvocation {
    /// Reason why the invocation is invalid.
    pub error: Invalid,
    /// Address for the error result; `None` if it cannot be read.
    pub address: Option<Box<Address>>,
}

/// Parses and validates an invocation.
pub fn parse_invocation(bytes: &[u8]) -> Result<Invocation, BadInvocation> {
    let without_address = |error| BadInvocation { error, address: None };
    let mut object = read::message(bytes).map_err(without_address)?;
    let address = address(&mut object).map_err(without_address)?;
    match fields(&mut object) {
        Ok(fields) => Ok(fields.with_address(address)),
        Err(error) => Err(BadInvocation { error, address: Some(Box::new(address)) }),
    }
}

fn address(object: &mut Object<'_>) -> Result<Address, Invalid> {
    Ok(Address {
        id: object.id("id")?,
        callback_url: object.url("callback_url")?,
        group_id: object.id("group_id")?,
        // A malformed secondary id does not fail the call. It is left out of the result.
        call_id: secondary_id(object),
    })
}

fn secondary_id(object: &mut Object<'_>) -> Option<CallId> {
    match object.optional("call_id") {
        Some(Value::String(text)) => CallId::new(text).ok(),
        _ => None,
    }
}

struct Fields {
    operation: ToolName,
    arguments: Map<String, Value>,
    thread_ancestors: Vec<ThreadId>,
    user_id: Option<UserId>,
    toolset_version: Option<String>,
}

fn fields(object: &mut Object<'_>) -> Result<Fields, Invalid> {
    Ok(Fields {
        operation: object.id("operation")?,
        arguments: object.object("arguments")?,
        thread_ancestors: ancestors(object)?,
        user_id: object.optional_id("user_id")?,
        toolset_version: object.optional_string("toolset_version", limits::ID_BYTES)?,
    })
}

fn ancestors(object: &mut Object<'_>) -> Result<Vec<ThreadId>, Invalid> {
    let items = object.optional_array("thread_ancestors", limits::ANCESTORS)?;
    let path = object.path().field("thread_ancestors");
    let thread = |(index, item): (usize, Value)| match item.as_str().map(ThreadId::new) {
        Some(Ok(thread)) => Ok(thread),
        Some(Err(error)) => Err(Invalid::value(&path.item(index), error.expected(), describe(&item))),
        None => Err(Invalid::shape(&path.item(index), "a string", describe(&item))),
    };
    items.into_iter().enumerate().map(thread).collect()
}

impl Fields {
    fn with_address(self, address: Address) -> Invocation {
        let Fields { operation, arguments, thread_ancestors, user_id, toolset_version } = self;
        Invocation { operation, arguments, address, thread_ancestors, user_id, toolset_version }
    }
}
