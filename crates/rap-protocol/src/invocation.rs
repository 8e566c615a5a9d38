//! The invocation: how a runtime calls a tool.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::invalid::{Invalid, describe};
use crate::read::{self, Object};
use crate::{CallId, CallbackUrl, ThreadId, ToolName, UserId, limits};

/// A tool call as it is POSTed to the toolset's endpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Invocation {
    /// The tool's name.
    pub operation: ToolName,
    /// What it is called with.
    pub arguments: Map<String, Value>,
    /// Whose call this is and where its result goes.
    #[serde(flatten)]
    pub address: Address,
    /// The ancestors of the thread, root first; none for a root thread.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub thread_ancestors: Vec<ThreadId>,
    /// The end user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_id: Option<UserId>,
    /// The version of the toolset that the runtime holds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub toolset_version: Option<String>,
}

/// What it takes to answer a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Address {
    /// The call.
    pub id: CallId,
    /// A secondary id of some models, echoed in the result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call_id: Option<CallId>,
    /// Where the result goes.
    pub callback_url: CallbackUrl,
    /// The thread.
    pub group_id: ThreadId,
}

/// An invocation that is not valid. Where its address can be read, its defect is delivered there as a result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct BadInvocation {
    /// What is wrong with it.
    pub error: Invalid,
    /// Where to say so.
    pub address: Option<Box<Address>>,
}

/// Parses and validates an invocation.
pub fn parse_invocation(bytes: &[u8]) -> Result<Invocation, BadInvocation> {
    let unaddressed = |error| BadInvocation { error, address: None };
    let mut object = read::message(bytes).map_err(unaddressed)?;
    let address = address(&mut object).map_err(unaddressed)?;
    match fields(&mut object) {
        Ok(fields) => Ok(fields.addressed(address)),
        Err(error) => Err(BadInvocation { error, address: Some(Box::new(address)) }),
    }
}

fn address(object: &mut Object<'_>) -> Result<Address, Invalid> {
    Ok(Address {
        id: object.id("id")?,
        callback_url: object.url("callback_url")?,
        group_id: object.id("group_id")?,
        // An unusable secondary id is not worth a call: it is left out of the answer.
        call_id: secondary(object),
    })
}

fn secondary(object: &mut Object<'_>) -> Option<CallId> {
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
    fn addressed(self, address: Address) -> Invocation {
        let Fields { operation, arguments, thread_ancestors, user_id, toolset_version } = self;
        Invocation { operation, arguments, address, thread_ancestors, user_id, toolset_version }
    }
}
