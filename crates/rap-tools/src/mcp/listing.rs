//! Tools, resources and prompts of an MCP server, and the RAP tools that are made of them.

mod per_user;

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use rap_protocol::limits;
use rap_tool::{Call, Tool};
use rmcp::ServiceError;
use rmcp::model::{
    ClientRequest, JsonObject, ListPromptsRequest, ListResourceTemplatesRequest, ListResourcesRequest,
    PaginatedRequestParams, Prompt, RequestOptionalParam, Resource, ResourceTemplate, ServerResult,
    Tool as McpTool,
};
use rmcp::service::{Peer, RoleClient};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::server::Server;
use super::session::Failure;
use super::{McpServer, Trust, calls, reading};

pub(super) use per_user::UserTools;

/// Maximum number of tools of one server. Further ones are left out.
const TOOLS: usize = 1_000;
/// Maximum number of pages of a list. Further ones are not read.
const PAGES: usize = 200;
/// Maximum number of resources and prompts that a description names.
const NAMED: usize = 50;

/// Support of a tool for tasks, in the form of the protocol version 2025-11-25.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TaskSupport {
    Optional,
    Required,
}

/// Use of tasks by the calls of a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tasks {
    Never,
    /// The server decides.
    Possible,
    /// The client asks for a task.
    Requested,
}

/// Support for tasks, collected from raw messages, since the library knows only the later form.
#[derive(Default)]
pub(super) struct TaskHints(Mutex<Hints>);

#[derive(Default)]
struct Hints {
    /// The server says that it makes tasks. Otherwise only tools are called as tasks that cannot be called without.
    makes_tasks: bool,
    tools: BTreeMap<String, TaskSupport>,
}

impl TaskHints {
    /// Looks for `capabilities.tasks`, and for tools with `execution.taskSupport`, in a message.
    pub(super) fn observe(&self, message: &[u8]) {
        let (capabilities, tools) =
            (contains(message, b"\"capabilities\""), contains(message, b"\"taskSupport\""));
        if !capabilities && !tools {
            return;
        }
        let Ok(message) = serde_json::from_slice::<Value>(message) else { return };
        let mut hints = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        hints.makes_tasks |= message.pointer("/result/capabilities/tasks").is_some();
        let Some(tools) = message.pointer("/result/tools").and_then(Value::as_array) else { return };
        let hints = &mut hints.tools;
        for tool in tools.iter().take(TOOLS) {
            let Some(name) = tool.get("name").and_then(Value::as_str) else { continue };
            match tool.pointer("/execution/taskSupport").and_then(Value::as_str) {
                Some("required") => hints.insert(name.to_owned(), TaskSupport::Required),
                Some("optional") => hints.insert(name.to_owned(), TaskSupport::Optional),
                _ => hints.remove(name),
            };
        }
    }

    fn found(&self) -> BTreeMap<String, TaskSupport> {
        let hints = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_used =
            |(_, support): &(&String, &TaskSupport)| hints.makes_tasks || **support == TaskSupport::Required;
        hints.tools.iter().filter(is_used).map(|(tool, support)| (tool.clone(), *support)).collect()
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// Tools, resources and prompts of a server. Stored, so that calls can continue before the server runs again.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct Listing {
    /// False as long as the server has not said what it offers.
    known: bool,
    tools: Vec<McpTool>,
    tasks: BTreeMap<String, TaskSupport>,
    /// The server may turn any call into a task: the extension of the protocol version 2026-07-28.
    may_make_tasks: bool,
    /// Each user may have another list: names of resources and prompts are not part of this one.
    #[serde(default)]
    is_per_user: bool,
    /// Resources and templates, each as a line of text; `None` if the server has none.
    resources: Option<Vec<String>>,
    /// Prompts, each as a line of text; `None` if the server has none.
    prompts: Option<Vec<String>>,
    /// Instructions that the server gave when it was initialised.
    pub(super) instructions: Option<String>,
}

impl Listing {
    /// Asks a server what it offers.
    pub(super) async fn read(peer: &Peer<RoleClient>, hints: &TaskHints) -> Result<Listing, ServiceError> {
        let info = peer.peer_info();
        let has = |capability: fn(&rmcp::model::ServerCapabilities) -> bool| {
            info.as_deref().is_none_or(|info| capability(&info.capabilities))
        };
        let tools = if has(|has| has.tools.is_some()) { tools(peer).await? } else { Vec::new() };
        let resources = if has(|has| has.resources.is_some()) { resources(peer).await } else { None };
        let prompts = if has(|has| has.prompts.is_some()) { prompts(peer).await } else { None };
        let instructions = info.as_deref().and_then(|info| info.instructions.clone());
        let may_make_tasks = info.as_deref().is_some_and(|info| info.capabilities.supports_tasks());
        Ok(Listing {
            known: true,
            tools,
            tasks: hints.found(),
            may_make_tasks,
            is_per_user: false,
            resources,
            prompts,
            instructions,
        })
    }

    /// Returns true if it may contain names that only one user should see.
    pub(super) fn may_name_users(&self) -> bool {
        self.known && !self.is_per_user
    }

    /// Returns true if the server has not said yet what it offers.
    pub(super) fn is_unknown(&self) -> bool {
        !self.known
    }

    /// Makes the tools. One that no runtime would accept is left out, and the log says why.
    pub(super) fn tools(&self, server: &Arc<Server>) -> Vec<Tool> {
        let config = server.config();
        let mut names = HashSet::new();
        let mut tools: Vec<Tool> = Vec::new();
        let mut add = |name: String, tool: Tool| match tool.check() {
            Ok(()) if names.insert(name.clone()) => tools.push(tool),
            Ok(()) => {
                tracing::warn!(server = config.name, tool = name, "left out a tool: another has its name")
            }
            Err(error) => tracing::warn!(server = config.name, tool = name, %error, "left out a tool"),
        };
        for tool in self.tools.iter().take(TOOLS) {
            let name = own_name(config, &tool.name);
            add(name.clone(), annotated(config, tool, self.tool(server, name, tool)));
        }
        if self.is_unknown() || self.is_per_user && self.tools.is_empty() {
            let name = own_name(config, "sign_in");
            add(name.clone(), reading::sign_in(server, name));
        }
        if let Some(resources) = &self.resources {
            let name = own_name(config, "read_resource");
            add(name.clone(), reading::read_resource(server, name, &list("Resources", resources)));
        }
        if self.resources.is_some() && self.is_per_user {
            let name = own_name(config, "list_resources");
            add(name.clone(), reading::list_resources(server, name));
        }
        if let Some(prompts) = &self.prompts {
            let name = own_name(config, "get_prompt");
            add(name.clone(), reading::get_prompt(server, name, &list("Prompts", prompts)));
        }
        if self.prompts.is_some() && self.is_per_user {
            let name = own_name(config, "list_prompts");
            add(name.clone(), reading::list_prompts(server, name));
        }
        tools
    }

    fn tool(&self, server: &Arc<Server>, name: String, tool: &McpTool) -> Tool {
        let (server, mcp_name) = (Arc::clone(server), tool.name.to_string());
        let tasks = match self.tasks.get(&mcp_name) {
            Some(_) => Tasks::Requested,
            None if self.may_make_tasks => Tasks::Possible,
            None => Tasks::Never,
        };
        let handler = move |arguments: JsonObject, call| {
            calls::run(Arc::clone(&server), mcp_name.clone(), tasks, arguments, call)
        };
        let about = tool.description.as_deref().or(tool.title.as_deref()).unwrap_or_default();
        let tool = Tool::with_schema(name, schema(&tool.input_schema), handler)
            .description(cut(about, limits::DESCRIPTION_BYTES))
            .without_scrubbing();
        match tasks {
            // A task continues after a restart of the bridge. Any other call gets an error that says that its outcome is
            // unknown.
            Tasks::Never => tool,
            _ => tool.restartable(),
        }
    }
}

/// Returns the name under which a tool is offered: its own, with characters replaced that a name of a tool cannot have.
fn own_name(config: &McpServer, name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '_' | '-') { c } else { '_' };
    format!("{}{name}", config.prefix).chars().map(plain).take(limits::NAME_CHARS).collect()
}

fn schema(document: &JsonObject) -> Value {
    let mut document = document.clone();
    document.entry("type").or_insert_with(|| json!("object"));
    Value::Object(document)
}

fn annotated(config: &McpServer, mcp: &McpTool, mut tool: Tool) -> Tool {
    let hints = mcp.annotations.clone().unwrap_or_default();
    let is_read_only = hints.read_only_hint == Some(true);
    let is_destructive = match hints.destructive_hint {
        Some(destructive) => destructive && !is_read_only,
        None => config.trust == Trust::Low && !is_read_only,
    };
    if is_read_only {
        tool = tool.read_only();
    }
    if is_destructive {
        tool = tool.destructive();
    }
    if hints.idempotent_hint == Some(true) {
        tool = tool.idempotent();
    }
    tool
}

/// Returns a list for a description.
fn list(what: &str, lines: &[String]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let more = lines.len().saturating_sub(NAMED);
    let more = if more > 0 { format!("\n({more} more)") } else { String::new() };
    let named: Vec<&str> = lines.iter().take(NAMED).map(String::as_str).collect();
    cut(&format!(" {what}:\n{}{more}", named.join("\n")), limits::DESCRIPTION_BYTES / 2)
}

fn cut(text: &str, bytes: usize) -> String {
    text[..text.floor_char_boundary(bytes)].to_owned()
}

fn line(id: &str, name: Option<&str>, about: Option<&str>) -> String {
    let about = about.or(name.filter(|name| *name != id)).map(|about| format!(": {about}"));
    cut(&format!("- {id}{}", about.unwrap_or_default()).replace('\n', " "), 400)
}

/// Reads a list page by page, up to a number of items.
async fn pages<T, E, P>(mut page: impl FnMut(Option<PaginatedRequestParams>) -> P) -> Result<Vec<T>, E>
where
    P: Future<Output = Result<(Vec<T>, Option<String>), E>>,
{
    let (mut all, mut cursor) = (Vec::new(), None);
    for _ in 0..PAGES {
        let parameters = cursor.take().map(|cursor| {
            let mut parameters = PaginatedRequestParams::default();
            parameters.cursor = Some(cursor);
            parameters
        });
        let (items, next) = page(parameters).await?;
        all.extend(items);
        cursor = next.filter(|_| all.len() < TOOLS);
        if cursor.is_none() {
            break;
        }
    }
    Ok(all)
}

async fn tools(peer: &Peer<RoleClient>) -> Result<Vec<McpTool>, ServiceError> {
    pages(|parameters| async move {
        peer.list_tools(parameters).await.map(|page| (page.tools, page.next_cursor))
    })
    .await
}

/// Returns the resources and their templates. An error counts as none.
async fn resources(peer: &Peer<RoleClient>) -> Option<Vec<String>> {
    let resources = pages(|parameters| async move {
        peer.list_resources(parameters).await.map(|page| (page.resources, page.next_cursor))
    });
    let templates = pages(|parameters| async move {
        let page = peer.list_resource_templates(parameters).await;
        page.map(|page| (page.resource_templates, page.next_cursor))
    });
    let lines = resource_lines(&resources.await.unwrap_or_default(), &templates.await.unwrap_or_default());
    (!lines.is_empty()).then_some(lines)
}

fn resource_lines(resources: &[Resource], templates: &[ResourceTemplate]) -> Vec<String> {
    let resources =
        resources.iter().map(|found| line(&found.uri, Some(&found.name), found.description.as_deref()));
    let templates = templates
        .iter()
        .map(|found| line(&found.uri_template, Some(&found.name), found.description.as_deref()));
    resources.chain(templates).take(TOOLS).collect()
}

async fn prompts(peer: &Peer<RoleClient>) -> Option<Vec<String>> {
    let prompts = pages(|parameters| async move {
        peer.list_prompts(parameters).await.map(|page| (page.prompts, page.next_cursor))
    });
    let lines = prompt_lines(&prompts.await.unwrap_or_default());
    (!lines.is_empty()).then_some(lines)
}

fn prompt_lines(prompts: &[Prompt]) -> Vec<String> {
    let described = |prompt: &Prompt| {
        let arguments: Vec<String> =
            prompt.arguments.iter().flatten().map(|argument| argument.name.clone()).collect();
        let name = format!("{} ({})", prompt.name, arguments.join(", "));
        line(&name, None, prompt.description.as_deref())
    };
    prompts.iter().take(TOOLS).map(described).collect()
}

/// Returns the resources and templates that the user of a call has, each as a line of text.
pub(super) async fn resources_of_user(server: Arc<Server>, call: Call) -> Result<Vec<String>, Failure> {
    let (server, call) = (&server, &call);
    let resources = pages(|parameters| async move {
        let request = ListResourcesRequest { params: parameters, ..RequestOptionalParam::default() };
        match server.request(call, ClientRequest::ListResourcesRequest(request)).await? {
            ServerResult::ListResourcesResult(page) => Ok((page.resources, page.next_cursor)),
            _ => Err(no_list()),
        }
    });
    let resources = resources.await?;
    let templates = pages(|parameters| async move {
        let request = ListResourceTemplatesRequest { params: parameters, ..RequestOptionalParam::default() };
        match server.request(call, ClientRequest::ListResourceTemplatesRequest(request)).await {
            Ok(ServerResult::ListResourceTemplatesResult(page)) => {
                Ok((page.resource_templates, page.next_cursor))
            }
            // Many servers have none, and say so with an error.
            Err(Failure::Refused(_)) => Ok((Vec::new(), None)),
            Ok(_) => Err(no_list()),
            Err(failure) => Err(failure),
        }
    });
    Ok(resource_lines(&resources, &templates.await?))
}

/// Returns the prompts that the user of a call has, each as a line of text.
pub(super) async fn prompts_of_user(server: Arc<Server>, call: Call) -> Result<Vec<String>, Failure> {
    let (server, call) = (&server, &call);
    let prompts = pages(|parameters| async move {
        let request = ListPromptsRequest { params: parameters, ..RequestOptionalParam::default() };
        match server.request(call, ClientRequest::ListPromptsRequest(request)).await? {
            ServerResult::ListPromptsResult(page) => Ok((page.prompts, page.next_cursor)),
            _ => Err(no_list()),
        }
    });
    Ok(prompt_lines(&prompts.await?))
}

fn no_list() -> Failure {
    Failure::NotAnswered("it did not return a list".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_used_if_the_server_makes_them_or_a_tool_needs_them() {
        let tools = json!({"result": {"tools": [
            {"name": "plain"},
            {"name": "never", "execution": {"taskSupport": "forbidden"}},
            {"name": "maybe", "execution": {"taskSupport": "optional"}},
            {"name": "always", "execution": {"taskSupport": "required"}},
        ]}});
        let names = |hints: &TaskHints| hints.found().into_keys().collect::<Vec<_>>();
        let hints = TaskHints::default();
        hints.observe(tools.to_string().as_bytes());
        assert_eq!(names(&hints), ["always"]);
        hints.observe(br#"{"result": {"capabilities": {"tasks": {}}}}"#);
        assert_eq!(names(&hints), ["always", "maybe"]);
    }

    #[tokio::test]
    async fn a_list_that_never_ends_is_cut() {
        let mut read = 0;
        let endless = pages(|_| {
            read += 1;
            std::future::ready(Ok::<_, ServiceError>((vec![0; 10], Some("next".to_owned()))))
        });
        assert_eq!(endless.await.unwrap().len(), TOOLS);
        assert_eq!(read, TOOLS / 10);
        let mut read = 0;
        let empty = pages(|_| {
            read += 1;
            std::future::ready(Ok::<_, ServiceError>((Vec::<u8>::new(), Some("next".to_owned()))))
        });
        assert!(empty.await.unwrap().is_empty());
        assert_eq!(read, PAGES);
    }
}
