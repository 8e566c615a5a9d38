//! Elicitation: a server asks the user for input. It becomes a question with choices.
//!
//! A person can choose but not type here. A field with choices is asked for; any other field gets its default or is
//! left out. A form with another required field cannot be filled in, and the person is told so.

use rap_protocol::limits;
use rap_tool::Call;
use rmcp::model::{ElicitRequestParams, ElicitResult, ElicitationAction, ErrorCode, ErrorData};
use serde_json::{Map, Value, json};

use super::notices::excerpt;

/// Maximum number of fields with choices of one form.
const FIELDS: usize = 20;
const DECLINE: &str = "Decline";

/// Asks the user of a call.
pub(super) async fn ask(
    server: &str,
    call: &Call,
    request: ElicitRequestParams,
) -> Result<ElicitResult, ErrorData> {
    let asked = match request {
        ElicitRequestParams::FormElicitationParams { message, requested_schema, .. } => {
            let schema = serde_json::to_value(requested_schema).unwrap_or_default();
            fill_in(call, &title(server, &message), &Form::of(&schema)).await
        }
        ElicitRequestParams::UrlElicitationParams { message, url, .. } => {
            let prompt = format!("{}\n\nOpen this page, then answer here: {url}", title(server, &message));
            choose(call, &prompt, vec!["Done".into()]).await.map(|choice| choice.map(|_| Map::new()))
        }
        _ => Ok(None),
    };
    match asked {
        Ok(Some(content)) if content.is_empty() => Ok(ElicitResult::new(ElicitationAction::Accept)),
        Ok(Some(content)) => {
            Ok(ElicitResult::new(ElicitationAction::Accept).with_content(Value::Object(content)))
        }
        Ok(None) => Ok(ElicitResult::new(ElicitationAction::Decline)),
        Err(error) => Err(ErrorData::new(ErrorCode::INTERNAL_ERROR, error.to_string(), None)),
    }
}

fn title(server: &str, message: &str) -> String {
    format!("The MCP server {server} asks: {}", message.trim())
}

/// Asks with these choices and one to decline. Returns the index of the choice; `None` if the user declines.
async fn choose(
    call: &Call,
    prompt: &str,
    mut choices: Vec<String>,
) -> Result<Option<usize>, rap_tool::Error> {
    let decline = choices.len();
    choices.push(DECLINE.into());
    let prompt = &prompt[..prompt.floor_char_boundary(limits::PROMPT_BYTES)];
    let chosen = call.choose(prompt, choices, decline).await?;
    Ok((chosen != decline).then_some(chosen))
}

/// Fields of a form.
#[derive(Debug, Default, PartialEq)]
struct Form {
    /// Values that need no question.
    given: Map<String, Value>,
    asked: Vec<Field>,
    /// Required fields that cannot be filled in by choosing.
    missing: Vec<String>,
}

#[derive(Debug, PartialEq)]
struct Field {
    name: String,
    title: String,
    choices: Vec<(String, Value)>,
}

impl Form {
    fn of(schema: &Value) -> Form {
        let required: Vec<&str> = schema
            .get("required")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let mut form = Form::default();
        for (name, field) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
            let choices = choices(field);
            if !choices.is_empty() && form.asked.len() < FIELDS {
                let text = |key: &str| field.get(key).and_then(Value::as_str);
                let title = text("title").unwrap_or(name).to_owned();
                let title = text("description").map_or(title.clone(), |about| format!("{title}: {about}"));
                form.asked.push(Field { name: name.clone(), title, choices });
            } else if let Some(default) = field.get("default") {
                form.given.insert(name.clone(), default.clone());
            } else if required.contains(&name.as_str()) {
                form.missing.push(name.clone());
            }
        }
        form
    }
}

/// Returns the choices of a field with their values. Empty if it has none.
fn choices(field: &Value) -> Vec<(String, Value)> {
    let is_list = field.get("type").is_some_and(|kind| kind == "array");
    let source = if is_list { field.get("items").unwrap_or(&Value::Null) } else { field };
    if source.get("type").is_some_and(|kind| kind == "boolean") {
        return vec![("Yes".into(), json!(true)), ("No".into(), json!(false))];
    }
    let value = |value: &Value| if is_list { json!([value]) } else { value.clone() };
    let label = |value: &Value| value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned);
    let short = |label: &str| label[..label.floor_char_boundary(limits::CHOICE_BYTES)].to_owned();
    // One place is for the choice to decline.
    let most = limits::CHOICES - 1;
    if let Some(values) = source.get("enum").and_then(Value::as_array) {
        let names = source.get("enumNames").and_then(Value::as_array);
        let named = |(index, item): (usize, &Value)| {
            let name = names.and_then(|names| names.get(index)).unwrap_or(item);
            (short(&label(name)), value(item))
        };
        return values.iter().enumerate().take(most).map(named).collect();
    }
    let options = ["oneOf", "anyOf"].iter().find_map(|key| source.get(key).and_then(Value::as_array));
    let option = |option: &Value| {
        let constant = option.get("const")?;
        Some((short(&label(option.get("title").unwrap_or(constant))), value(constant)))
    };
    options.into_iter().flatten().filter_map(option).take(most).collect()
}

/// Returns the content of a form; `None` if the user declines.
async fn fill_in(
    call: &Call,
    message: &str,
    form: &Form,
) -> Result<Option<Map<String, Value>>, rap_tool::Error> {
    if !form.missing.is_empty() {
        let missing = excerpt(&form.missing.join(", "));
        let prompt = format!(
            "{message}\n\nThis needs text that cannot be entered here ({missing}), so it can only be declined."
        );
        choose(call, &prompt, Vec::new()).await?;
        return Ok(None);
    }
    let mut content = form.given.clone();
    let given = match content.is_empty() {
        true => String::new(),
        false => format!("\n\nFilled in: {}", excerpt(&Value::Object(content.clone()).to_string())),
    };
    if form.asked.is_empty() {
        let chosen = choose(call, &format!("{message}{given}"), vec!["Accept".into()]).await?;
        return Ok(chosen.map(|_| content));
    }
    for field in &form.asked {
        let prompt = format!("{message}{given}\n\n{}", field.title);
        let labels = field.choices.iter().map(|(label, _)| label.clone()).collect();
        let Some(chosen) = choose(call, &prompt, labels).await? else { return Ok(None) };
        content.insert(field.name.clone(), field.choices[chosen].1.clone());
    }
    Ok(Some(content))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_with_choices_are_asked_for_and_others_get_their_defaults() {
        let schema = json!({
            "type": "object", "required": ["size", "name"],
            "properties": {
                "size": {"type": "string", "enum": ["s", "l"], "enumNames": ["Small", "Large"]},
                "sure": {"type": "boolean", "title": "Are you sure"},
                "colour": {"type": "string", "oneOf": [{"const": "r", "title": "Red"}]},
                "tags": {"type": "array", "items": {"type": "string", "enum": ["x"]}},
                "count": {"type": "integer", "default": 3},
                "name": {"type": "string"},
                "note": {"type": "string"},
            },
        });
        let form = Form::of(&schema);
        assert_eq!(form.given, Map::from_iter([("count".to_owned(), json!(3))]));
        assert_eq!(form.missing, ["name"]);
        let choices = |name: &str| &form.asked.iter().find(|field| field.name == name).unwrap().choices;
        assert_eq!(choices("size")[1], ("Large".into(), json!("l")));
        assert_eq!(choices("sure")[0], ("Yes".into(), json!(true)));
        assert_eq!(choices("colour")[..], [("Red".into(), json!("r"))]);
        assert_eq!(choices("tags")[..], [("x".into(), json!(["x"]))]);
    }

    #[test]
    fn a_form_without_fields_is_a_confirmation() {
        assert_eq!(Form::of(&json!({"type": "object", "properties": {}})), Form::default());
    }
}
