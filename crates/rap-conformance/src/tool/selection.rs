//! Selects operations and arguments. It does no IO.

use rap_protocol::{Tool, Toolset};
use serde_json::{Map, Value, json};

use super::OperationCall;

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

/// Selects an operation that needs no arguments and that is safe to call. Operations annotated as `readOnly` are
/// preferred.
pub(super) fn operation(toolset: &Toolset) -> Option<OperationCall> {
    let needs_no_arguments = |tool: &&Tool| tool.input_schema.validate(&json!({})).is_ok();
    let mut suitable: Vec<&Tool> =
        toolset.tools.iter().filter(|tool| is_safe(tool)).filter(needs_no_arguments).collect();
    suitable.sort_by_key(|tool| tool.annotations.read_only != Some(true));
    let tool = suitable.first()?;
    Some(OperationCall { operation: tool.name.as_str().to_owned(), arguments: Map::new() })
}

/// Selects an operation with arguments that violate its schema. A correct server does not run it. In case it does, the
/// operation that the checker calls anyway is preferred, then operations annotated as `readOnly`. Operations annotated
/// as `destructive` are never selected.
pub(super) fn invalid_call(toolset: &Toolset, called: Option<&OperationCall>) -> Option<OperationCall> {
    let mut tools: Vec<&Tool> =
        toolset.tools.iter().filter(|tool| tool.annotations.destructive != Some(true)).collect();
    let is_called =
        |tool: &Tool| called.is_some_and(|operation_call| operation_call.operation == tool.name.as_str());
    tools.sort_by_key(|tool| (!is_called(tool), tool.annotations.read_only != Some(true)));
    tools.into_iter().find_map(|tool| {
        let arguments =
            invalid_arguments(tool).find(|arguments| tool.input_schema.validate(arguments).is_err())?;
        let Value::Object(arguments) = arguments else { return None };
        Some(OperationCall { operation: tool.name.as_str().to_owned(), arguments })
    })
}

fn invalid_arguments(tool: &Tool) -> impl Iterator<Item = Value> {
    let properties = tool.input_schema.document()["properties"].as_object();
    let names: Vec<String> = properties.into_iter().flatten().map(|(name, _)| name.clone()).collect();
    let wrong = [json!({"not": ["of", "this", "type"]}), json!("not of this type"), json!(-1.5)];
    let odd =
        names.into_iter().flat_map(move |name| wrong.clone().map(|value| json!({ name.as_str(): value })));
    [json!({})].into_iter().chain(odd)
}

fn is_safe(tool: &Tool) -> bool {
    let annotations = &tool.annotations;
    annotations.destructive != Some(true)
        && annotations.long_running != Some(true)
        && annotations.requires_auth.is_none()
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
    fn unsafe_operations_and_those_with_required_arguments_are_never_selected() {
        let none = json!({"type": "object"});
        let harmful = toolset(&json!([
            tool("a", none.clone(), json!({"destructive": true})),
            tool("b", none.clone(), json!({"longRunning": true})),
            tool("c", none.clone(), json!({"requiresAuth": "yes"})),
            tool("d", schema_with_required_field(), json!({})),
        ]));
        assert_eq!(operation(&harmful), None);
        let good = [tool("e", none.clone(), json!({})), tool("f", none, json!({"readOnly": true}))];
        assert_eq!(operation(&toolset(&json!(good))).unwrap().operation, "f");
    }

    #[test]
    fn invalid_arguments_are_found_if_a_schema_rejects_any() {
        let found = invalid_call(
            &toolset(&json!([
                tool("a", json!({}), json!({})),
                tool("b", schema_with_required_field(), json!({}))
            ])),
            None,
        );
        assert_eq!(found, Some(OperationCall { operation: "b".into(), arguments: Map::new() }));
        let typed = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
        let found = invalid_call(&toolset(&json!([tool("a", typed, json!({}))])), None).unwrap();
        assert!(found.arguments["n"].is_object());
        let three = [
            tool("a", schema_with_required_field(), json!({})),
            tool("b", schema_with_required_field(), json!({"readOnly": true})),
        ];
        let three = toolset(&json!(
            three.into_iter().chain([tool("c", schema_with_required_field(), json!({}))]).collect::<Vec<_>>()
        ));
        let called = OperationCall { operation: "c".into(), arguments: Map::new() };
        assert_eq!(invalid_call(&three, None).unwrap().operation, "b");
        assert_eq!(invalid_call(&three, Some(&called)).unwrap().operation, "c");
        assert_eq!(invalid_call(&toolset(&json!([tool("a", json!({}), json!({}))])), None), None);
        assert_eq!(
            invalid_call(
                &toolset(&json!([tool("a", schema_with_required_field(), json!({"destructive": true}))])),
                None
            ),
            None
        );
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
