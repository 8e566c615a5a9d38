//! The MCP server that offers RAP tools.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, CancelTaskParams, ContentBlock, CustomRequest,
    CustomResult, ErrorCode, GetTaskParams, GetTaskResult, Implementation, InitializeRequestParams,
    InitializeResult, JsonObject, ListResourcesResult, ListToolsResult, PaginatedRequestParams,
    ReadResourceRequestParams, ReadResourceResponse, ReadResourceResult, ResourceUpdatedNotificationParam,
    ServerCapabilities, ServerConfig, ServerResult, SubscribeRequestParams, SubscriptionFilter, Tool,
    ToolAnnotations, UnsubscribeRequestParams, UpdateTaskParams,
};
use rmcp::service::{NotificationContext, Peer, RequestContext, SubscriptionContext, SubscriptionSendError};
use rmcp::task_manager::TaskManager;
use rmcp::{ErrorData, RoleServer, ServerHandler, ServiceError};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::sync::broadcast::error::RecvError;

use super::bridge::Bridge;
use super::call::Call;
use super::convert::{self, Abilities, object_schema};
use super::session::{NotStarted, Session, SessionChange, URI};
use super::tasks::{self, CallAsTask, OfTask, Task, has_tasks};
use super::waiting::{self, Parked};

/// Tools for calls that nobody waits for. They are listed when the session has such a call.
pub(super) const BUILT_IN: [&str; 2] = [READ_CALL, CANCEL_CALL];
const READ_CALL: &str = "read_call";
const CANCEL_CALL: &str = "cancel_call";
/// Maximum time that `read_call` waits.
const READ_WAIT: Duration = Duration::from_secs(60);
/// Requests whose parameters are read before the handler is called.
const KNOWN_REQUESTS: [&str; 11] = [
    "initialize",
    "tools/list",
    "tools/call",
    "resources/list",
    "resources/read",
    "resources/subscribe",
    "resources/unsubscribe",
    "subscriptions/listen",
    "tasks/get",
    "tasks/update",
    "tasks/cancel",
];

/// Handles the requests of an MCP client, or of all clients without a session.
#[derive(Clone)]
pub(super) struct ToolsHandler {
    bridge: Arc<Bridge>,
    /// Session of this client. Not set for a client that has none.
    own: Arc<OnceLock<OwnSession>>,
    parked: Parked,
}

/// A session that is closed when its client is gone, even if a task still refers to it.
struct OwnSession(Arc<Session>);

impl Drop for OwnSession {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl ToolsHandler {
    pub(super) fn new(bridge: &Arc<Bridge>, parked: &Parked) -> ToolsHandler {
        ToolsHandler { bridge: Arc::clone(bridge), own: Arc::default(), parked: parked.clone() }
    }

    /// Returns the handler of a connection that is one session.
    pub(super) fn of_connection(bridge: &Arc<Bridge>, parked: &Parked) -> ToolsHandler {
        let handler = ToolsHandler::new(bridge, parked);
        handler.own.get_or_init(|| OwnSession(Session::open(bridge)));
        handler
    }

    fn session(&self) -> Arc<Session> {
        self.own.get().map_or_else(|| self.bridge.shared(), |OwnSession(session)| Arc::clone(session))
    }

    /// Returns the call whose resource has this URI.
    fn resource(&self, uri: &str) -> Result<Arc<Call>, ErrorData> {
        let call = uri.strip_prefix(URI).and_then(|id| self.session().resource(id));
        call.ok_or_else(|| ErrorData::resource_not_found(format!("there is no resource {uri}"), None))
    }

    /// Names every resource of a subscription that has an event or has ended.
    async fn tell_changed(&self, context: &SubscriptionContext) -> Result<(), SubscriptionSendError> {
        for uri in context.accepted().resource_subscriptions.iter().flatten() {
            if self.resource(uri).is_ok_and(|call| call.has_content_after(0)) {
                context.sink().notify_resource_updated(uri).await?;
            }
        }
        Ok(())
    }

    /// Tells a client that has missed changes what may have changed.
    async fn tell_missed(&self, context: &SubscriptionContext) -> Result<(), SubscriptionSendError> {
        accepted(context.sink().notify_tool_list_changed().await)?;
        accepted(context.sink().notify_resource_list_changed().await)?;
        self.tell_changed(context).await
    }

    async fn read_call(&self, arguments: &JsonObject, abilities: Abilities) -> CallToolResult {
        let call = match self.named_call(arguments) {
            Ok(call) => call,
            Err(error) => return error,
        };
        let after = arguments.get("after").and_then(serde_json::Value::as_u64).unwrap_or(0);
        let seconds = arguments.get("wait_seconds").and_then(serde_json::Value::as_u64).unwrap_or(0);
        call.wait_for_content_after(after, Duration::from_secs(seconds).min(READ_WAIT)).await;
        if let Some(outcome) = call.outcome().filter(|outcome| !outcome.is_subscription) {
            return convert::result(&call, &outcome, Vec::new(), abilities);
        }
        let shown = call.describe(after);
        let mut result = CallToolResult::success(vec![ContentBlock::text(shown.to_string())]);
        result.structured_content = Some(shown);
        result
    }

    /// Starts a call as a task, as the client has asked.
    async fn call_as_task(
        &self,
        request: CallAsTask,
        context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        let ttl = request.ttl();
        let CallAsTask { name, arguments, .. } = request;
        if !has_tasks(&context) {
            let mut request = CallToolRequestParams::new(name);
            request.arguments = arguments;
            return Ok(tasks::plain(self.call_tool(request, context).await?.into()));
        }
        if BUILT_IN.contains(&name.as_str()) {
            let why = format!("{name} cannot be called as a task");
            return Err(ErrorData::new(ErrorCode::METHOD_NOT_FOUND, why, None));
        }
        let session = self.session();
        if !session.tasks.make_room() {
            return Err(ErrorData::internal_error("too many tasks are running; cancel one of them", None));
        }
        let running = session.start(&name, arguments.unwrap_or_default()).await;
        let running = running.map_err(|error| match error {
            NotStarted::UnknownTool => unknown_tool(&name),
            NotStarted::Failed(why) => ErrorData::internal_error(why, None),
        })?;
        let abilities =
            Abilities::of(context.client_capabilities().as_ref(), context.protocol_version().as_ref());
        let task = Task::start(&session, running, ttl, abilities, context);
        Ok(CustomResult(json!({"task": task.describe()})))
    }

    /// Lists the tools, and says which can be called as tasks.
    async fn list_with_tasks(&self, context: RequestContext<RoleServer>) -> Result<CustomResult, ErrorData> {
        let has_tasks = has_tasks(&context);
        let CustomResult(mut listed) =
            tasks::plain(ServerResult::ListToolsResult(self.list_tools(None, context).await?));
        for tool in listed["tools"].as_array_mut().into_iter().flatten().filter(|_| has_tasks) {
            if !BUILT_IN.iter().any(|name| tool["name"] == *name) {
                tool["execution"] = json!({"taskSupport": "optional"});
            }
        }
        Ok(CustomResult(listed))
    }

    /// Answers a request about a task: one that the client has asked for, or one that this server has made of a long call.
    fn task(
        &self,
        OfTask { task_id }: OfTask,
        context: &RequestContext<RoleServer>,
        made: impl Fn(&TaskManager, &str) -> Result<ServerResult, ErrorData>,
    ) -> Result<CustomResult, ErrorData> {
        if let Some(task) = self.session().tasks.find(&task_id) {
            return Ok(CustomResult(task.describe()));
        }
        if !context.client_capabilities().is_some_and(|capabilities| capabilities.supports_tasks()) {
            return Err(unknown_task(&task_id));
        }
        Ok(tasks::plain(made(&self.bridge.tasks, &task_id)?))
    }

    fn cancel_call(&self, arguments: &JsonObject) -> CallToolResult {
        match self.named_call(arguments) {
            Ok(call) => {
                self.session().cancel(&call);
                CallToolResult::success(vec![ContentBlock::text(format!("cancelled {}", call.id))])
            }
            Err(error) => error,
        }
    }

    fn named_call(&self, arguments: &JsonObject) -> Result<Arc<Call>, CallToolResult> {
        let id = arguments.get("id").and_then(serde_json::Value::as_str).unwrap_or_default();
        let session = self.session();
        session.resource(id).ok_or_else(|| {
            let known: Vec<String> = session.resources().iter().map(|call| call.id.to_string()).collect();
            let known = if known.is_empty() { "none".into() } else { known.join(", ") };
            convert::error(&format!("there is no call or subscription `{id}` to read; known ids: {known}"))
        })
    }
}

fn built_in() -> [Tool; 2] {
    let id = json!({"type": "string", "description": "Id of the call, as its result named it"});
    let read = json!({
        "id": id,
        "after": {"type": "integer", "minimum": 0, "description": "Number of the last event that you know"},
        "wait_seconds": {"type": "integer", "minimum": 0, "maximum": READ_WAIT.as_secs(),
                         "description": "Time to wait for a new event or the result"},
    });
    [
        Tool::new(
            READ_CALL,
            "Read the events of a subscription, or the result of a call that takes long.",
            object_schema(&read, &["id"]),
        )
        .with_annotations(ToolAnnotations::new().read_only(true)),
        Tool::new(
            CANCEL_CALL,
            "End a subscription, or cancel a call that takes long.",
            object_schema(&json!({"id": id}), &["id"]),
        )
        .with_annotations(ToolAnnotations::new().destructive(false).idempotent(true)),
    ]
}

/// Returns success for a notification that the client did not ask for.
fn accepted(sent: Result<(), SubscriptionSendError>) -> Result<(), SubscriptionSendError> {
    match sent {
        Err(SubscriptionSendError::NotificationNotAccepted(_)) => Ok(()),
        sent => sent,
    }
}

/// Tells a client that has missed changes what may have changed: the lists, and every resource that it follows.
async fn tell_everything(peer: &Peer<RoleServer>, followed: Vec<String>) -> Result<(), ServiceError> {
    peer.notify_tool_list_changed().await?;
    peer.notify_resource_list_changed().await?;
    for uri in followed {
        peer.notify_resource_updated(ResourceUpdatedNotificationParam::new(uri)).await?;
    }
    Ok(())
}

fn unknown_tool(name: &str) -> ErrorData {
    ErrorData::invalid_params(format!("there is no tool {name}"), None)
}

fn unknown_task(id: &str) -> ErrorData {
    ErrorData::invalid_params(format!("there is no task {id}"), None)
}

/// Reads the parameters of a custom request.
fn read<T: DeserializeOwned>(params: serde_json::Value) -> Result<T, ErrorData> {
    serde_json::from_value(params).map_err(|error| ErrorData::invalid_params(error.to_string(), None))
}

/// Answer to a request that is not known, or whose parameters could not be read.
pub(super) fn unknown_request(request: CustomRequest) -> ErrorData {
    if KNOWN_REQUESTS.contains(&request.method.as_str()) {
        return ErrorData::invalid_params(
            format!("the parameters of {} are not valid", request.method),
            None,
        );
    }
    ErrorData::new(ErrorCode::METHOD_NOT_FOUND, format!("there is no method {}", request.method), None)
}

pub(super) fn implementation() -> Implementation {
    Implementation::new("rap", env!("CARGO_PKG_VERSION"))
}

impl ServerHandler for ToolsHandler {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder()
            .enable_tools()
            .enable_tool_list_changed()
            .enable_resources()
            .enable_resources_list_changed()
            .enable_resources_subscribe()
            .enable_tasks()
            .build();
        let names: Vec<String> = self
            .bridge
            .servers()
            .iter()
            .filter_map(|server| {
                let toolset = server.toolset()?;
                let about = toolset.description.as_ref().map_or(String::new(), |text| format!(": {text}"));
                Some(format!("{}{about}", toolset.name))
            })
            .collect();
        ServerConfig::new(capabilities)
            .with_server_info(implementation())
            .with_instructions(format!("Tools of {}", names.join("; ")))
    }

    async fn initialize(
        &self,
        request: InitializeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<InitializeResult, ErrorData> {
        context.peer.set_peer_info(request.clone());
        self.own.get_or_init(|| OwnSession(Session::open(&self.bridge)));
        self.negotiate_initialize(&request)
    }

    async fn on_initialized(&self, context: NotificationContext<RoleServer>) {
        let session = self.session();
        let mut changes = session.changes();
        // The task must not keep the session open.
        let session = Arc::downgrade(&session);
        tokio::spawn(async move {
            loop {
                let sent = match changes.recv().await {
                    Ok(SessionChange::Tools) => context.peer.notify_tool_list_changed().await,
                    Ok(SessionChange::Resources) => context.peer.notify_resource_list_changed().await,
                    Ok(SessionChange::Updated(uri)) => {
                        let Some(session) = session.upgrade() else { return };
                        if !session.is_subscribed(&uri) {
                            continue;
                        }
                        context.peer.notify_resource_updated(ResourceUpdatedNotificationParam::new(uri)).await
                    }
                    Err(RecvError::Lagged(_)) => {
                        let Some(session) = session.upgrade() else { return };
                        tell_everything(&context.peer, session.followed()).await
                    }
                    Err(RecvError::Closed) => return,
                };
                if sent.is_err() {
                    return;
                }
            }
        });
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        self.bridge.refresh().await;
        let mut tools: Vec<Tool> = self.bridge.offered().tools().map(convert::tool).collect();
        if !self.session().resources().is_empty() {
            tools.extend(built_in());
        }
        Ok(ListToolsResult::with_all_items(tools))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let capabilities = context.client_capabilities();
        let abilities = Abilities::of(capabilities.as_ref(), context.protocol_version().as_ref());
        let arguments = request.arguments.unwrap_or_default();
        match request.name.as_ref() {
            READ_CALL => return Ok(self.read_call(&arguments, abilities).await.into()),
            CANCEL_CALL => return Ok(self.cancel_call(&arguments).into()),
            _ => {}
        }
        let running = match request.request_state {
            Some(state) => {
                let answers = request.input_responses.unwrap_or_default();
                self.parked.resume(&state, &answers).await
            }
            None => self.session().start(&request.name, arguments).await,
        };
        match running {
            Ok(running) => {
                let caller =
                    waiting::Caller { bridge: &self.bridge, parked: &self.parked, abilities, context };
                caller.wait_for(running).await
            }
            Err(NotStarted::UnknownTool) => Err(unknown_tool(&request.name)),
            Err(NotStarted::Failed(why)) => Ok(convert::error(&why).into()),
        }
    }

    async fn list_resources(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let resources = self.session().resources();
        Ok(ListResourcesResult::with_all_items(
            resources.iter().map(|call| convert::resource(call)).collect(),
        ))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        let call = self.resource(&request.uri)?;
        Ok(ReadResourceResult::new(vec![convert::contents(&call)]).into())
    }

    async fn subscribe(
        &self,
        request: SubscribeRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.resource(&request.uri)?;
        if self.session().subscribe(request.uri) {
            return Ok(());
        }
        Err(ErrorData::invalid_request("the session has too many subscriptions; end one of them first", None))
    }

    async fn unsubscribe(
        &self,
        request: UnsubscribeRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.session().unsubscribe(&request.uri);
        Ok(())
    }

    fn accepted_subscription_filter(&self, requested: &SubscriptionFilter) -> Option<SubscriptionFilter> {
        Some(requested.clone())
    }

    async fn listen(&self, context: SubscriptionContext) -> Result<(), ErrorData> {
        let mut changes = self.session().changes();
        // The client was told that it is subscribed before this method was called. Events may have come since then.
        if self.tell_changed(&context).await.is_err() {
            return Ok(());
        }
        loop {
            let change = tokio::select! {
                () = context.cancelled() => return Ok(()),
                change = changes.recv() => change,
            };
            let sent = match change {
                Ok(SessionChange::Tools) => context.sink().notify_tool_list_changed().await,
                Ok(SessionChange::Resources) => context.sink().notify_resource_list_changed().await,
                Ok(SessionChange::Updated(uri)) => context.sink().notify_resource_updated(uri).await,
                Err(RecvError::Lagged(_)) => self.tell_missed(&context).await,
                Err(RecvError::Closed) => return Ok(()),
            };
            if accepted(sent).is_err() {
                return Ok(());
            }
        }
    }

    async fn get_task(
        &self,
        request: GetTaskParams,
        _: RequestContext<RoleServer>,
    ) -> Result<GetTaskResult, ErrorData> {
        Ok(GetTaskResult::new(self.bridge.tasks.get_task(&request.task_id)?))
    }

    async fn update_task(
        &self,
        request: UpdateTaskParams,
        _: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.bridge.tasks.update_task(&request.task_id, request.input_responses)
    }

    async fn cancel_task(
        &self,
        request: CancelTaskParams,
        _: RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        self.bridge.tasks.cancel_task(&request.task_id)
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        let params = request.params.clone().unwrap_or_default();
        match request.method.as_str() {
            "tools/call" if params["task"].is_object() => self.call_as_task(read(params)?, context).await,
            // With other parameters they are not valid.
            "tools/list" if params == json!({}) => self.list_with_tasks(context).await,
            "tasks/get" => self.task(read(params)?, &context, |tasks, id| {
                Ok(ServerResult::GetTaskResult(GetTaskResult::new(tasks.get_task(id)?)))
            }),
            "tasks/cancel" => {
                let OfTask { task_id } = read(params.clone())?;
                if self.session().tasks.find(&task_id).is_some_and(|task| !task.cancel()) {
                    return Err(ErrorData::invalid_params(format!("the task {task_id} has ended"), None));
                }
                self.task(read(params)?, &context, |tasks, id| {
                    tasks.cancel_task(id).map(ServerResult::task_ack)
                })
            }
            "tasks/result" if has_tasks(&context) => {
                let OfTask { task_id } = read(params)?;
                let task = self.session().tasks.find(&task_id).ok_or_else(|| unknown_task(&task_id))?;
                task.result(&context).await
            }
            "tasks/list" if has_tasks(&context) && params["cursor"].is_null() => {
                Ok(CustomResult(self.session().tasks.list()))
            }
            "tasks/list" if has_tasks(&context) => {
                Err(ErrorData::invalid_params("there is no further page of tasks", None))
            }
            _ => Err(unknown_request(request)),
        }
    }
}
