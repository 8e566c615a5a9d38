//! Tools for what is not a tool in MCP: resources, prompts and the sign-in.

use std::sync::Arc;

use rap_tool::{Call, Error, Output, Tool};
use rmcp::model::{
    ClientRequest, GetPromptRequest, GetPromptRequestParams, JsonObject, ReadResourceRequest,
    ReadResourceRequestParams, Role, ServerResult,
};
use serde_json::{Value, json};

use super::server::Server;
use super::session::Failure;
use super::{content, listing};

/// Returns a tool that reads a resource of the server.
pub(super) fn read_resource(server: &Arc<Server>, name: String, listed: &str) -> Tool {
    let schema = json!({
        "type": "object",
        "properties": {"uri": {"type": "string", "description": "URI of the resource."}},
        "required": ["uri"],
    });
    let about = format!("Reads a resource of the MCP server {}.{listed}", server.config().name);
    let server = Arc::clone(server);
    let handler = move |arguments: JsonObject, call: Call| read(Arc::clone(&server), arguments, call);
    Tool::with_schema(name, schema, handler).description(about).read_only().restartable().without_scrubbing()
}

async fn read(server: Arc<Server>, arguments: JsonObject, call: Call) -> Result<Output, Error> {
    let uri = arguments.get("uri").and_then(Value::as_str).unwrap_or_default();
    let request = ReadResourceRequest::new(ReadResourceRequestParams::new(uri));
    let answer = server.request(&call, ClientRequest::ReadResourceRequest(request)).await;
    let name = &server.config().name;
    match answer.map_err(|failure| failure.of(name))? {
        ServerResult::ReadResourceResult(result) => {
            Ok(content::bounded_output(result.contents.into_iter().map(content::resource)))
        }
        _ => Err(Error::new(format!("the MCP server {name} returned something else"))),
    }
}

/// Returns a tool that lists the resources that its caller has.
pub(super) fn list_resources(server: &Arc<Server>, name: String) -> Tool {
    let about = format!("Lists the resources of the MCP server {} for read_resource.", server.config().name);
    lister(server, name, listing::resources_of_user).description(about)
}

/// Returns a tool that lists the prompts that its caller has.
pub(super) fn list_prompts(server: &Arc<Server>, name: String) -> Tool {
    let about = format!("Lists the prompts of the MCP server {} for get_prompt.", server.config().name);
    lister(server, name, listing::prompts_of_user).description(about)
}

fn lister<F>(server: &Arc<Server>, name: String, list: fn(Arc<Server>, Call) -> F) -> Tool
where
    F: Future<Output = Result<Vec<String>, Failure>> + Send + 'static,
{
    let server = Arc::clone(server);
    let handler = move |_: JsonObject, call: Call| {
        let server = Arc::clone(&server);
        async move {
            let listed = list(Arc::clone(&server), call).await;
            let lines = listed.map_err(|failure| failure.of(&server.config().name))?;
            let text = |text| rap_tool::Content::Text { text };
            Ok(content::bounded_output(lines.into_iter().map(text)))
        }
    };
    let schema = json!({"type": "object", "properties": {}});
    Tool::with_schema(name, schema, handler).read_only().restartable().without_scrubbing()
}

/// Returns a tool with which a user signs in to a server whose tools are not known before.
pub(super) fn sign_in(server: &Arc<Server>, name: String) -> Tool {
    let about = format!(
        "Asks the user to sign in to the MCP server {}. Its tools are available afterwards, in new sessions.",
        server.config().name
    );
    let auth = server.config().name.clone();
    let server = Arc::clone(server);
    let handler = move |_: JsonObject, call: Call| {
        let server = Arc::clone(&server);
        async move {
            let name = &server.config().name;
            server.session(&call).await.map_err(|failure| failure.of(name))?;
            Ok(format!("signed in to {name}; its tools are available in new sessions"))
        }
    };
    let schema = json!({"type": "object", "properties": {}});
    Tool::with_schema(name, schema, handler).description(about).restartable().requires_auth(auth)
}

/// Returns a tool that gets a prompt of the server, filled in.
pub(super) fn get_prompt(server: &Arc<Server>, name: String, listed: &str) -> Tool {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "Name of the prompt."},
            "arguments": {
                "type": "object", "description": "Arguments of the prompt.",
                "additionalProperties": {"type": "string"},
            },
        },
        "required": ["name"],
    });
    let about = format!("Gets a prompt of the MCP server {}.{listed}", server.config().name);
    let server = Arc::clone(server);
    let handler = move |arguments: JsonObject, call: Call| prompt(Arc::clone(&server), arguments, call);
    Tool::with_schema(name, schema, handler).description(about).read_only().restartable().without_scrubbing()
}

async fn prompt(server: Arc<Server>, arguments: JsonObject, call: Call) -> Result<Output, Error> {
    let name = arguments.get("name").and_then(Value::as_str).unwrap_or_default();
    let mut parameters = GetPromptRequestParams::new(name);
    if let Some(Value::Object(arguments)) = arguments.get("arguments") {
        parameters = parameters.with_arguments(arguments.clone());
    }
    let request = ClientRequest::GetPromptRequest(GetPromptRequest::new(parameters));
    let answer = server.request(&call, request).await;
    let server = &server.config().name;
    match answer.map_err(|failure| failure.of(server))? {
        ServerResult::GetPromptResult(result) => {
            let items = result.messages.into_iter().flat_map(|message| {
                let who = if message.role == Role::Assistant { "assistant" } else { "user" };
                [rap_tool::Content::Text { text: format!("{who}:") }, content::item(message.content)]
            });
            Ok(content::bounded_output(items))
        }
        _ => Err(Error::new(format!("the MCP server {server} returned something else"))),
    }
}
