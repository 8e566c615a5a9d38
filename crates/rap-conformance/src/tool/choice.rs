//! Which operations are called where the user named none, and with which arguments. Pure.

use rap_protocol::{Tool, Toolset};
use serde_json::{Map, Value, json};

use super::Order;

/// What the user named, if the toolset has it.
pub(super) fn check(toolset: &Toolset, order: &Order) -> Result<(), String> {
    let Some(tool) = toolset.tools.iter().find(|tool| tool.name.as_str() == order.operation) else {
        let names: Vec<&str> = toolset.tools.iter().map(|tool| tool.name.as_str()).collect();
        return Err(format!(
            "the server has no operation `{}`; it has {}",
            order.operation,
            names.join(", ")
        ));
    };
    tool.input_schema.validate(&Value::Object(order.arguments.clone())).map_err(|violations| {
        let violations: Vec<String> = violations.iter().map(ToString::to_string).collect();
        format!("the arguments do not fit the schema of `{}`: {}", order.operation, violations.join("; "))
    })
}

/// An operation that needs no arguments and promises nothing that a checker should not do. One that only
/// reads is best.
pub(super) fn operation(toolset: &Toolset) -> Option<Order> {
    let takes_nothing = |tool: &&Tool| tool.input_schema.validate(&json!({})).is_ok();
    let mut fit: Vec<&Tool> =
        toolset.tools.iter().filter(|tool| is_safe(tool)).filter(takes_nothing).collect();
    fit.sort_by_key(|tool| tool.annotations.read_only != Some(true));
    let tool = fit.first()?;
    Some(Order { operation: tool.name.as_str().to_owned(), arguments: Map::new() })
}

/// An operation with arguments that its schema does not permit. It should not even begin; in case it does, the one
/// that is called anyway comes first, then those that only read, and what is annotated as destructive never.
pub(super) fn misfit(toolset: &Toolset, called: Option<&Order>) -> Option<Order> {
    let mut tools: Vec<&Tool> =
        toolset.tools.iter().filter(|tool| tool.annotations.destructive != Some(true)).collect();
    let is_called = |tool: &Tool| called.is_some_and(|order| order.operation == tool.name.as_str());
    tools.sort_by_key(|tool| (!is_called(tool), tool.annotations.read_only != Some(true)));
    tools.into_iter().find_map(|tool| {
        let arguments = misfits(tool).find(|arguments| tool.input_schema.validate(arguments).is_err())?;
        let Value::Object(arguments) = arguments else { return None };
        Some(Order { operation: tool.name.as_str().to_owned(), arguments })
    })
}

fn misfits(tool: &Tool) -> impl Iterator<Item = Value> {
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

    fn needy() -> Value {
        json!({"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]})
    }

    #[test]
    fn what_destroys_takes_long_or_needs_something_is_never_picked() {
        let none = json!({"type": "object"});
        let harmful = toolset(&json!([
            tool("a", none.clone(), json!({"destructive": true})),
            tool("b", none.clone(), json!({"longRunning": true})),
            tool("c", none.clone(), json!({"requiresAuth": "yes"})),
            tool("d", needy(), json!({})),
        ]));
        assert_eq!(operation(&harmful), None);
        let good = [tool("e", none.clone(), json!({})), tool("f", none, json!({"readOnly": true}))];
        assert_eq!(operation(&toolset(&json!(good))).unwrap().operation, "f");
    }

    #[test]
    fn arguments_that_do_not_fit_are_found_where_the_schema_forbids_any() {
        let found =
            misfit(&toolset(&json!([tool("a", json!({}), json!({})), tool("b", needy(), json!({}))])), None);
        assert_eq!(found, Some(Order { operation: "b".into(), arguments: Map::new() }));
        let typed = json!({"type": "object", "properties": {"n": {"type": "integer"}}});
        let found = misfit(&toolset(&json!([tool("a", typed, json!({}))])), None).unwrap();
        assert!(found.arguments["n"].is_object());
        let three = [tool("a", needy(), json!({})), tool("b", needy(), json!({"readOnly": true}))];
        let three =
            toolset(&json!(three.into_iter().chain([tool("c", needy(), json!({}))]).collect::<Vec<_>>()));
        let called = Order { operation: "c".into(), arguments: Map::new() };
        assert_eq!(misfit(&three, None).unwrap().operation, "b");
        assert_eq!(misfit(&three, Some(&called)).unwrap().operation, "c");
        assert_eq!(misfit(&toolset(&json!([tool("a", json!({}), json!({}))])), None), None);
        assert_eq!(misfit(&toolset(&json!([tool("a", needy(), json!({"destructive": true}))])), None), None);
    }

    #[test]
    fn what_the_user_named_has_to_be_there_and_to_fit() {
        let toolset = toolset(&json!([tool("a", needy(), json!({}))]));
        let order = |name: &str, arguments: Value| Order {
            operation: name.into(),
            arguments: arguments.as_object().unwrap().clone(),
        };
        assert_eq!(check(&toolset, &order("a", json!({"x": "y"}))), Ok(()));
        assert_eq!(
            check(&toolset, &order("b", json!({}))).unwrap_err(),
            "the server has no operation `b`; it has a"
        );
        assert!(
            check(&toolset, &order("a", json!({}))).unwrap_err().contains("do not fit the schema of `a`")
        );
    }
}
