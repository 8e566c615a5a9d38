//! Selects operations and arguments. It does no IO.

use rap_protocol::{Tool, Toolset};
use serde_json::{Map, Value, json};

use super::OperationCall;

/// Maximum number of invalid calls.
const INVALID_CALLS: usize = 4;

/// Checks that the toolset has the operation that the user chose, and that the arguments match its schema.
pub(super) fn check(toolset: &Toolset, operation_call: &OperationCall) -> Result<(), String> {
    let Some(tool) = toolset.tools.iter().find(|tool| tool.name.as_str() == operation_call.operation) else {
        let names: Vec<&str> = toolset.tools.iter().map(|tool| tool.name.as_str()).collect();
        return Err(format!(
            "the server has no operation `{}`; it offers {}",
            operation_call.operation,
            names.join(", ")
        ));
    };
    tool.input_schema.validate(&Value::Object(operation_call.arguments.clone())).map_err(|rejected| {
        format!("the arguments do not match the schema of `{}`: {rejected}", operation_call.operation)
    })
}

/// Selects an operation that needs no arguments and that is annotated as `readOnly`.
pub(super) fn operation(toolset: &Toolset) -> Option<OperationCall> {
    select(toolset, |tool| tool.annotations.long_running != Some(true))
}

/// Selects a slow operation that needs no arguments and that is annotated as `readOnly`.
pub(super) fn slow_operation(toolset: &Toolset) -> Option<OperationCall> {
    select(toolset, |tool| tool.annotations.long_running == Some(true))
}

fn select(toolset: &Toolset, is_suitable: impl Fn(&Tool) -> bool) -> Option<OperationCall> {
    let needs_nothing = |tool: &Tool| {
        tool.annotations.requires_auth.is_none() && tool.input_schema.validate(&json!({})).is_ok()
    };
    let tool =
        toolset.tools.iter().find(|tool| is_read_only(tool) && needs_nothing(tool) && is_suitable(tool))?;
    Some(OperationCall { operation: tool.name.as_str().to_owned(), arguments: Map::new() })
}

fn is_read_only(tool: &Tool) -> bool {
    tool.annotations.read_only == Some(true) && tool.annotations.destructive != Some(true)
}

/// Selects calls with arguments that violate a schema, all of one operation. A correct server does not run them. In case
/// it does, only operations that the user named are selected, or that are annotated as `readOnly`.
pub(super) fn invalid_calls(toolset: &Toolset, named: &[&OperationCall]) -> Vec<OperationCall> {
    let name_of = |tool: &Tool| named.iter().find(|call| call.operation == tool.name.as_str()).copied();
    let mut tools: Vec<(&Tool, Option<&OperationCall>)> =
        toolset.tools.iter().map(|tool| (tool, name_of(tool))).collect();
    tools.retain(|(tool, named)| named.is_some() || is_read_only(tool));
    tools.sort_by_key(|(_, named)| named.is_none());
    let calls = tools.into_iter().map(|(tool, named)| {
        let valid = named.map(|call| call.arguments.clone()).unwrap_or_default();
        let invalid = invalid_arguments(tool, &valid)
            .filter(|arguments| tool.input_schema.validate(&Value::Object(arguments.clone())).is_err());
        let operation = tool.name.as_str();
        invalid
            .map(|arguments| OperationCall { operation: operation.into(), arguments })
            .take(INVALID_CALLS)
            .collect()
    });
    { calls }.find(|calls: &Vec<OperationCall>| !calls.is_empty()).unwrap_or_default()
}

/// Arguments that a schema may reject: none at all, and valid ones with one value of another type.
fn invalid_arguments(tool: &Tool, valid: &Map<String, Value>) -> impl Iterator<Item = Map<String, Value>> {
    let properties = tool.input_schema.document()["properties"].as_object();
    let names: Vec<String> = properties.into_iter().flatten().map(|(name, _)| name.clone()).collect();
    let wrong = [json!({"not": ["of", "this", "type"]}), json!("not of this type"), json!(-1.5)];
    let changed = names.into_iter().flat_map(move |name| {
        let valid = valid.clone();
        wrong.clone().map(move |value| {
            let mut arguments = valid.clone();
            arguments.insert(name.clone(), value);
            arguments
        })
    });
    [Map::new()].into_iter().chain(changed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rap_protocol::parse_toolset;

    fn toolset(tools: &Value) -> Toolset {
        let toolset = json!({"name": "t", "endpoint": "http://h/invoke", "tools": tools});
        parse_toolset(&serde_json::to_vec(&toolset).unwrap()).unwrap()
    }

    fn tool(name: &str, schema: Value, annotations: Value) -> Value {
        json!({"name": name, "description": "", "inputSchema": schema, "annotations": annotations})
    }

    fn schema_with_required_field() -> Value {
        json!({"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]})
    }

    #[test]
    fn only_operations_that_are_read_only_and_need_no_arguments_are_selected() {
        let none = json!({"type": "object"});
        let others = [
            tool("unannotated", none.clone(), json!({})),
            tool("both", none.clone(), json!({"readOnly": true, "destructive": true})),
            tool("asks", none.clone(), json!({"readOnly": true, "requiresAuth": "yes"})),
            tool("needs", schema_with_required_field(), json!({"readOnly": true})),
        ];
        assert_eq!(operation(&toolset(&json!(others))), None);
        assert_eq!(slow_operation(&toolset(&json!(others))), None);
        let good = [
            tool("slow", none.clone(), json!({"readOnly": true, "longRunning": true})),
            tool("quick", none, json!({"readOnly": true})),
        ];
        assert_eq!(operation(&toolset(&json!(good))).unwrap().operation, "quick");
        assert_eq!(slow_operation(&toolset(&json!(good))).unwrap().operation, "slow");
    }

    #[test]
    fn invalid_calls_are_made_of_named_or_read_only_operations_only() {
        let read_only = json!({"readOnly": true});
        let found = |tools: Value, named: &[&OperationCall]| invalid_calls(&toolset(&tools), named);
        let two = json!([
            tool("a", schema_with_required_field(), json!({})),
            tool("b", schema_with_required_field(), read_only.clone()),
        ]);
        let named = OperationCall {
            operation: "a".into(),
            arguments: json!({"x": "y"}).as_object().unwrap().clone(),
        };
        assert!(found(two.clone(), &[]).iter().all(|call| call.operation == "b"));
        let calls = found(two, &[&named]);
        assert_eq!(calls[0], OperationCall { operation: "a".into(), arguments: Map::new() });
        assert!(calls[1].operation == "a" && calls[1].arguments["x"].is_object());
        let typed = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
        let calls = found(json!([tool("a", typed, read_only.clone())]), &[]);
        assert!(calls.len() == 3 && calls[0].arguments["n"].is_object());
        assert_eq!(found(json!([tool("a", json!({}), read_only)]), &[]), []);
        assert_eq!(found(json!([tool("a", schema_with_required_field(), json!({}))]), &[]), []);
    }

    #[test]
    fn the_chosen_operation_has_to_exist_and_its_arguments_to_match() {
        let toolset = toolset(&json!([tool("a", schema_with_required_field(), json!({}))]));
        let operation_call = |name: &str, arguments: Value| OperationCall {
            operation: name.into(),
            arguments: arguments.as_object().unwrap().clone(),
        };
        assert_eq!(check(&toolset, &operation_call("a", json!({"x": "y"}))), Ok(()));
        assert_eq!(
            check(&toolset, &operation_call("b", json!({}))).unwrap_err(),
            "the server has no operation `b`; it offers a"
        );
        assert!(
            check(&toolset, &operation_call("a", json!({})))
                .unwrap_err()
                .contains("do not match the schema of `a`")
        );
    }
}
