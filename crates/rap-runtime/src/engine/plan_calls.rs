//! Plans for the calls of an answer. Each call is resolved and validated against the session's tools, so that the step
//! needs neither toolset nor schema. An invalid call becomes an error result for the model.

use std::sync::Arc;

use rap_agent::{Arguments, Plan, PlannedCall, Server, approval_prompt, texts};
use rap_io::validation::Validations;
use rap_protocol::schema::{Budget, Rejected};
use rap_protocol::{CallId, Timestamp, limits};
use serde_json::Value;

use super::built_in;
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

pub(super) async fn plan(
    calls: Vec<ModelCall>,
    context: &CallContext,
    tools: &SessionTools,
    validations: &Validations<String>,
) -> Vec<PlannedCall> {
    // All calls share these steps, so that many small validations do not block the worker either.
    let mut inline = Budget::new(limits::INLINE_VALIDATION_STEPS);
    let mut planned = Vec::with_capacity(calls.len());
    for ModelCall { id, name, arguments } in calls {
        let (plan, arguments) = match arguments {
            Err(text) => {
                let why = format!("Error: the arguments are not a JSON object: {text}");
                (Plan::Refuse(why), Arguments::Unusable(text))
            }
            Ok(arguments) => {
                let arguments = Arc::new(Value::Object(arguments));
                let plan = decide(&name, &arguments, context, tools, validations, &mut inline).await;
                let Value::Object(arguments) = Arc::unwrap_or_clone(arguments) else {
                    unreachable!("bug: it was an object")
                };
                (plan, Arguments::Given(arguments))
            }
        };
        planned.push(PlannedCall { model_id: CallId::new(id).ok(), name, arguments, display: None, plan });
    }
    planned
}

async fn decide(
    name: &str,
    value: &Arc<Value>,
    context: &CallContext,
    tools: &SessionTools,
    validations: &Validations<String>,
    inline: &mut Budget,
) -> Plan {
    let Value::Object(arguments) = &**value else { unreachable!("bug: arguments are an object") };
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
    match validations.validate(&server.url, &tool.input_schema, value, inline).await {
        Ok(())
            if tool.annotations.destructive == Some(true)
                || context.permissions.needs_approval(tool.name.as_str()) =>
        {
            let prompt = approval_prompt(tool.name.as_str(), arguments);
            Plan::Approve { server: Server(server.url.clone()), prompt }
        }
        Ok(()) => Plan::Invoke(Server(server.url.clone())),
        Err(rejected @ Rejected::Violations(_)) => {
            Plan::Refuse(format!("Error: the arguments do not match the tool's schema: {rejected}"))
        }
        Err(rejected) => Plan::Refuse(format!("Error: the arguments could not be validated: {rejected}")),
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
    format!("Error: there is no tool `{shown}`; available tools: {}", names.join(", "))
}
