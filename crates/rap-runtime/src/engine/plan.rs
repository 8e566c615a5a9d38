//! Plans for the calls of an answer. Each call is resolved and validated against the session's tools, so that the step
//! needs neither toolset nor schema. A mistake goes back to the model as a result that names it.

use std::collections::HashSet;

use rap_agent::{Arguments, Plan, PlannedCall, Server, words};
use rap_protocol::{CallId, Timestamp};
use serde_json::{Map, Value};

use super::built_in;
use crate::display;
use crate::model::ModelCall;
use crate::settings::Rights;
use crate::toolsets::SessionTools;

/// How many names of tools an error repeats.
const NAMES: usize = 20;

/// What the agent of a thread may use there, and when it calls.
#[derive(Clone)]
pub(super) struct Caller {
    pub(super) rights: Rights,
    pub(super) now: Timestamp,
}

pub(super) fn plan(
    calls: Vec<ModelCall>,
    caller: &Caller,
    tools: &SessionTools,
    unchecked: &HashSet<String>,
) -> Vec<PlannedCall> {
    let planned = |call: ModelCall| {
        let call_id = CallId::new(call.id).ok();
        let plan = if unchecked.contains(&call.name) {
            Plan::Refuse("Error: the arguments cannot be checked: the tool's schema takes too long".into())
        } else {
            decide(&call.name, &call.arguments, caller, tools)
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
    caller: &Caller,
    tools: &SessionTools,
) -> Plan {
    let arguments = match arguments {
        Ok(arguments) => arguments,
        Err(text) => return Plan::Refuse(format!("Error: the arguments are not a JSON object: {text}")),
    };
    let poses = arguments
        .get("kind")
        .and_then(Value::as_str)
        .is_some_and(|kind| kind.starts_with(words::KIND_PREFIX));
    if poses {
        let why =
            "Error: only the runtime makes calls whose `kind` begins with `interrupt:`; nothing was called";
        return Plan::Refuse(why.into());
    }
    if let Some(plan) = built_in::plan(name, arguments, caller.now) {
        return plan;
    }
    let found = tools.find(name).filter(|(_, _, tool)| caller.rights.may_use(tool.name.as_str()));
    let Some((server, _, tool)) = found else {
        return Plan::Refuse(no_such_tool(name, &caller.rights, tools));
    };
    match tool.input_schema.validate(&Value::Object(arguments.clone())) {
        Ok(())
            if tool.annotations.destructive == Some(true) || caller.rights.must_ask(tool.name.as_str()) =>
        {
            let shown = display::plainly(tool.name.as_str(), &Value::Object(arguments.clone()));
            Plan::Approve { server: Server(server.url.clone()), prompt: format!("Allow {shown}?") }
        }
        Ok(()) => Plan::Invoke(Server(server.url.clone())),
        Err(violations) => {
            let violations: Vec<String> = violations.iter().map(ToString::to_string).collect();
            Plan::Refuse(format!("Error: the arguments do not fit the tool: {}", violations.join("; ")))
        }
    }
}

fn no_such_tool(name: &str, rights: &Rights, tools: &SessionTools) -> String {
    let shown: String = name.chars().take(128).collect();
    let names: Vec<&str> = tools
        .offered()
        .map(|tool| tool.name.as_str())
        .filter(|name| rights.may_use(name))
        .take(NAMES)
        .collect();
    if names.is_empty() {
        return format!("Error: there is no tool `{shown}`, and no other one at the moment");
    }
    format!("Error: there is no tool `{shown}`; there are: {}", names.join(", "))
}
