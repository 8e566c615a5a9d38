//! Plans for the calls of an answer. Each call is resolved and validated against the session's tools, so that the step
//! needs neither toolset nor schema. An invalid call becomes an error result for the model.

use std::collections::HashSet;

use rap_agent::{Arguments, Plan, PlannedCall, Server, texts};
use rap_protocol::{CallId, Timestamp};
use serde_json::{Map, Value};

use super::built_in;
use crate::display;
use crate::model::ModelCall;
use crate::settings::Permissions;
use crate::toolsets::SessionTools;

/// Maximum number of tool names that an error lists.
const MAX_NAMES: usize = 20;

/// Permissions of the calling agent in its thread, and the time of the call.
#[derive(Clone)]
pub(super) struct CallContext {
    pub(super) permissions: Permissions,
    pub(super) now: Timestamp,
}

pub(super) fn plan(
    calls: Vec<ModelCall>,
    context: &CallContext,
    tools: &SessionTools,
    uncheckable: &HashSet<String>,
) -> Vec<PlannedCall> {
    let planned = |call: ModelCall| {
        let call_id = CallId::new(call.id).ok();
        let plan = if uncheckable.contains(&call.name) {
            Plan::Refuse("Error: the arguments cannot be validated: the tool's schema takes too long".into())
        } else {
            decide(&call.name, &call.arguments, context, tools)
        };
        let arguments = match call.arguments {
            Ok(arguments) => Arguments::Given(arguments),
            Err(text) => Arguments::Unusable(text),
        };
        PlannedCall { call_id, name: call.name, arguments, display: None, plan }
    };
    calls.into_iter().map(planned).collect()
}

fn decide(
    name: &str,
    arguments: &Result<Map<String, Value>, String>,
    context: &CallContext,
    tools: &SessionTools,
) -> Plan {
    let arguments = match arguments {
        Ok(arguments) => arguments,
        Err(text) => return Plan::Refuse(format!("Error: the arguments are not a JSON object: {text}")),
    };
    let forged = arguments
        .get("kind")
        .and_then(Value::as_str)
        .is_some_and(|kind| kind.starts_with(texts::KIND_PREFIX));
    if forged {
        let why =
            "Error: a `kind` that begins with `interrupt:` is reserved for the runtime; nothing was called";
        return Plan::Refuse(why.into());
    }
    if let Some(plan) = built_in::plan(name, arguments, context.now) {
        return plan;
    }
    let found = tools.find(name).filter(|(_, _, tool)| context.permissions.may_use(tool.name.as_str()));
    let Some((server, _, tool)) = found else {
        return Plan::Refuse(no_such_tool(name, &context.permissions, tools));
    };
    match tool.input_schema.validate(&Value::Object(arguments.clone())) {
        Ok(())
            if tool.annotations.destructive == Some(true)
                || context.permissions.needs_approval(tool.name.as_str()) =>
        {
            let shown = display::plain_text(tool.name.as_str(), &Value::Object(arguments.clone()));
            Plan::Approve { server: Server(server.url.clone()), prompt: format!("Allow {shown}?") }
        }
        Ok(()) => Plan::Invoke(Server(server.url.clone())),
        Err(violations) => {
            let violations: Vec<String> = violations.iter().map(ToString::to_string).collect();
            Plan::Refuse(format!(
                "Error: the arguments do not match the tool's schema: {}",
                violations.join("; ")
            ))
        }
    }
}

fn no_such_tool(name: &str, permissions: &Permissions, tools: &SessionTools) -> String {
    let shown: String = name.chars().take(128).collect();
    let names: Vec<&str> = tools
        .offered()
        .map(|tool| tool.name.as_str())
        .filter(|name| permissions.may_use(name))
        .take(MAX_NAMES)
        .collect();
    if names.is_empty() {
        return format!("Error: there is no tool `{shown}`, and no other tool is available");
    }
    format!("Error: there is no tool `{shown}`; there are: {}", names.join(", "))
}
