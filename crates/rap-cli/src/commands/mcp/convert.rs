//! Conversion of RAP messages to MCP ones.

use std::sync::Arc;

use rap_protocol::{Annotations, Body, Content, ERROR_PREFIX, Tool, UserChoice};
use rmcp::model::{
    self, CallToolResult, ClientCapabilities, ContentBlock, ElicitRequestParams, ElicitResult,
    ElicitationAction, ElicitationSchema, EnumSchema, ProtocolVersion, Resource, ResourceContents,
    ToolAnnotations,
};
use serde_json::{Map, Value, json};

use super::call::{Call, Outcome, Question};
use super::session::uri;

/// Name of the only field of a question.
const CHOICE: &str = "choice";

/// Features that a client supports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Abilities {
    /// Questions with a form.
    pub(super) forms: bool,
    /// Pages to open.
    pub(super) pages: bool,
    pub(super) tasks: bool,
    /// Links to resources in results.
    pub(super) links: bool,
    /// The client sends a request again with the answers, instead of being asked.
    pub(super) asks_by_result: bool,
}

impl Abilities {
    pub(super) fn of(
        capabilities: Option<&ClientCapabilities>,
        version: Option<&ProtocolVersion>,
    ) -> Abilities {
        let elicitation = capabilities.and_then(|capabilities| capabilities.elicitation.as_ref());
        // Versions are dates, whose order is that of their texts.
        let since =
            |first: ProtocolVersion| version.is_some_and(|version| version.as_str() >= first.as_str());
        Abilities {
            // A client that names no mode means forms.
            forms: elicitation.is_some_and(|modes| modes.form.is_some() || modes.url.is_none()),
            pages: elicitation.is_some_and(|modes| modes.url.is_some()),
            tasks: capabilities.is_some_and(ClientCapabilities::supports_tasks),
            links: since(ProtocolVersion::V_2025_06_18),
            asks_by_result: since(ProtocolVersion::V_2026_07_28),
        }
    }

    pub(super) fn can_show(self, question: &Question) -> bool {
        match question {
            Question::Choice(_) => self.forms,
            Question::SignIn(_) => self.pages,
        }
    }
}

/// Converts the description of a tool.
pub(super) fn tool(tool: &Tool) -> model::Tool {
    let mut schema = tool.input_schema.document().as_object().cloned().unwrap_or_default();
    // MCP requires the type, which a JSON Schema may leave out.
    schema.entry("type").or_insert_with(|| "object".into());
    let converted = model::Tool::new(tool.name.to_string(), tool.description.clone(), Arc::new(schema));
    match annotations(&tool.annotations) {
        Some(annotations) => converted.with_annotations(annotations),
        None => converted,
    }
}

fn annotations(annotations: &Annotations) -> Option<ToolAnnotations> {
    let Annotations { read_only, destructive, idempotent, .. } = annotations;
    let is_set = read_only.is_some() || destructive.is_some() || idempotent.is_some();
    is_set.then(|| ToolAnnotations::from_raw(None, *read_only, *destructive, *idempotent, None))
}

/// Converts the result of a call.
pub(super) fn result(
    call: &Call,
    outcome: &Outcome,
    notes: Vec<String>,
    abilities: Abilities,
) -> CallToolResult {
    let (mut content, is_error) = body(&outcome.body);
    content.extend(notes.into_iter().map(ContentBlock::text));
    if outcome.is_subscription {
        content.push(ContentBlock::text(format!(
            "This is the subscription {id}. Its events are in the resource {uri}. Without resources, read them with \
             read_call and end the subscription with cancel_call; both take {{\"id\": \"{id}\"}}.",
            id = call.id,
            uri = uri(call)
        )));
        if abilities.links {
            content.push(ContentBlock::resource_link(resource(call)));
        }
    }
    if is_error { CallToolResult::error(content) } else { CallToolResult::success(content) }
}

/// Converts the body of a result. The second value is true if it is an error.
fn body(body: &Body) -> (Vec<ContentBlock>, bool) {
    match body {
        Body::Text(text) => (vec![ContentBlock::text(text)], text.starts_with(ERROR_PREFIX)),
        Body::Content(items) => {
            let is_error =
                matches!(items.first(), Some(Content::Text { text }) if text.starts_with(ERROR_PREFIX));
            let block = |item: &Content| match item {
                Content::Text { text } => ContentBlock::text(text),
                Content::Image(image) => ContentBlock::image(&image.data, &image.media_type),
            };
            (items.iter().map(block).collect(), is_error)
        }
    }
}

pub(super) fn error(text: &str) -> CallToolResult {
    let prefix = if text.starts_with(ERROR_PREFIX) { "" } else { ERROR_PREFIX };
    CallToolResult::error(vec![ContentBlock::text(format!("{prefix}{text}"))])
}

/// Describes the resource of a call.
pub(super) fn resource(call: &Call) -> Resource {
    Resource::new(uri(call), call.tool.to_string())
        .with_description(format!("Events or result of the call {} of {}", call.id, call.tool))
        .with_mime_type("application/json")
}

/// Returns the content of the resource of a call.
pub(super) fn contents(call: &Call) -> ResourceContents {
    ResourceContents::TextResourceContents {
        uri: uri(call),
        mime_type: Some("application/json".into()),
        text: call.describe(0).to_string(),
        meta: None,
    }
}

/// Converts a question of a tool.
pub(super) fn elicitation(call: &Call, question: &Question) -> Result<ElicitRequestParams, String> {
    match question {
        Question::Choice(choice) => Ok(ElicitRequestParams::FormElicitationParams {
            meta: None,
            message: choice.prompt.clone(),
            requested_schema: choice_schema(choice)?,
        }),
        Question::SignIn(auth_url) => Ok(ElicitRequestParams::UrlElicitationParams {
            meta: None,
            message: format!("{} needs your permission. Open the page to sign in.", call.tool),
            url: auth_url.expose().to_owned(),
            elicitation_id: call.id.to_string(),
        }),
    }
}

fn choice_schema(choice: &UserChoice) -> Result<ElicitationSchema, String> {
    let labels = labels(choice);
    let default = labels[choice.default].clone();
    let options = EnumSchema::builder(labels).title("Choice").untitled().with_default(default)?.build();
    ElicitationSchema::builder().required_enum_schema(CHOICE, options).build().map_err(ToOwned::to_owned)
}

/// Returns the choices, with numbers if they are not different texts.
fn labels(choice: &UserChoice) -> Vec<String> {
    let mut different = choice.choices.clone();
    different.sort();
    different.dedup();
    if different.len() == choice.choices.len() && !different.iter().any(String::is_empty) {
        return choice.choices.clone();
    }
    choice.choices.iter().enumerate().map(|(number, text)| format!("{}. {text}", number + 1)).collect()
}

/// Answer of a person to a question.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PersonsAnswer {
    Accepted(Option<usize>),
    Dismissed,
}

/// Reads the answer to a question. An answer that names no choice dismisses the question.
pub(super) fn answer(question: &Question, answer: &ElicitResult) -> PersonsAnswer {
    if answer.action != ElicitationAction::Accept {
        return PersonsAnswer::Dismissed;
    }
    let Question::Choice(choice) = question else { return PersonsAnswer::Accepted(None) };
    let selected = answer.content.as_ref().and_then(|content| content[CHOICE].as_str());
    let index = selected.and_then(|selected| labels(choice).iter().position(|label| label == selected));
    index.map_or(PersonsAnswer::Dismissed, |index| PersonsAnswer::Accepted(Some(index)))
}

/// Returns a JSON Schema of an object with these properties.
pub(super) fn object_schema(properties: &Value, required: &[&str]) -> Arc<Map<String, Value>> {
    let schema = json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false});
    Arc::new(schema.as_object().cloned().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rap_protocol::{CallId, Callback, ThreadId, ToolName, parse_callback};

    fn choice(choices: &[&str]) -> Question {
        let message = json!({"type": "user_choice", "group_id": "g", "id": "c", "prompt": "Which?", "choices": choices,
                             "default": 0, "response_url": "http://127.0.0.1:1/a"});
        let Callback::UserChoice(choice) = parse_callback(message.to_string().as_bytes()).unwrap() else {
            panic!("not a question")
        };
        Question::Choice(choice)
    }

    fn call() -> Call {
        let id = CallId::new("c").unwrap();
        Call::new(id, ThreadId::new("g").unwrap(), ToolName::new("choose").unwrap())
    }

    #[test]
    fn choices_become_an_enumeration_even_if_they_are_the_same_text() {
        for (choices, expected) in
            [(["red", "green"], json!(["red", "green"])), (["", ""], json!(["1. ", "2. "]))]
        {
            let params = serde_json::to_value(elicitation(&call(), &choice(&choices)).unwrap()).unwrap();
            assert_eq!(params["requestedSchema"]["properties"]["choice"]["enum"], expected, "{params}");
            assert_eq!(params["requestedSchema"]["required"], json!(["choice"]));
        }
    }

    #[test]
    fn an_answer_that_names_no_choice_dismisses_the_question() {
        let given = |action: &str, content: Value| {
            let result = serde_json::from_value(json!({"action": action, "content": content})).unwrap();
            answer(&choice(&["red", "green"]), &result)
        };
        assert_eq!(given("accept", json!({"choice": "green"})), PersonsAnswer::Accepted(Some(1)));
        assert_eq!(given("accept", json!({"choice": "blue"})), PersonsAnswer::Dismissed);
        assert_eq!(given("accept", json!({"choice": 1})), PersonsAnswer::Dismissed);
        assert_eq!(given("decline", json!({"choice": "green"})), PersonsAnswer::Dismissed);
        assert_eq!(given("cancel", json!(null)), PersonsAnswer::Dismissed);
    }

    #[test]
    fn an_error_and_an_image_keep_their_meaning() {
        let convert = |body: Body| {
            let outcome = Outcome { body, is_subscription: false };
            serde_json::to_value(result(&call(), &outcome, Vec::new(), Abilities::default())).unwrap()
        };
        let failed = convert(Body::Text("Error: boom".into()));
        assert_eq!(failed["isError"], true);
        assert_eq!(failed["content"][0]["text"], "Error: boom");
        let image = json!({"type": "image", "data": "aGk=", "mediaType": "image/png"});
        let shown = convert(Body::Content(vec![serde_json::from_value(image).unwrap()]));
        assert_eq!(shown["content"], json!([{"type": "image", "data": "aGk=", "mimeType": "image/png"}]));
        assert_ne!(shown["isError"], true);
    }

    #[test]
    fn abilities_follow_version_and_capabilities() {
        let of = |capabilities: Value, version: &str| {
            let capabilities: ClientCapabilities = serde_json::from_value(capabilities).unwrap();
            let version: ProtocolVersion = serde_json::from_value(json!(version)).unwrap();
            Abilities::of(Some(&capabilities), Some(&version))
        };
        let old = of(json!({"elicitation": {}}), "2025-03-26");
        assert_eq!(old, Abilities { forms: true, ..Abilities::default() });
        let url = of(json!({"elicitation": {"url": {}}}), "2025-11-25");
        assert_eq!(url, Abilities { pages: true, links: true, ..Abilities::default() });
        let tasks = json!({"extensions": {"io.modelcontextprotocol/tasks": {}}});
        let new = of(tasks, "2026-07-28");
        assert_eq!(new, Abilities { tasks: true, links: true, asks_by_result: true, ..Abilities::default() });
    }
}
