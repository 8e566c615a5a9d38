//! Tasks in the form of the protocol version 2025-11-25: the client asks for a task when it calls a tool.
//!
//! The library knows only the later form, which is an extension. So messages are changed on their way: a call that asks
//! for a task, and the other requests whose answers differ, become custom requests ([`mark`], [`route`]), and the
//! answer to `initialize` says that there are tasks ([`announce`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rmcp::ErrorData;
use rmcp::model::{
    CallToolResult, ClientJsonRpcMessage, ClientRequest, CustomRequest, CustomResult, GetMeta,
    InitializeResult, JsonObject, JsonRpcMessage, ProtocolVersion, RequestMetaObject, RequestParamsMeta,
    ServerJsonRpcMessage, ServerResult, TaskStatus,
};
use rmcp::service::RequestContext;
use rmcp::task_manager::current_timestamp;
use rmcp::{RoleServer, ServiceError};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::bridge::TASK_TTL;
use super::call::{Call, Change, Question};
use super::convert::{self, Abilities, PersonsAnswer};
use super::session::{Running, Session};
use super::waiting::{POLL_MS, QUESTION_TIME, Reporter, cannot_ask, deliver};

/// Version of the protocol that has these tasks.
const VERSION: ProtocolVersion = ProtocolVersion::V_2025_11_25;
/// Maximum number of tasks of one session, those included that have ended and are kept.
const TASKS: usize = 100;
/// Field of `_meta` to which the request for a task is moved, because the library does not read it elsewhere.
const WANTED: &str = "rap/task";
/// Field of `_meta` that names the task to which a message belongs.
const RELATED: &str = "io.modelcontextprotocol/related-task";

/// Moves the request for a task of a call to where the library keeps it. `None` if nothing has to be changed.
pub(super) fn mark(message: &[u8]) -> Option<Vec<u8>> {
    let contains = |part: &[u8]| message.windows(part.len()).any(|window| window == part);
    if !contains(b"\"task\"") || !contains(b"tools/call") {
        return None;
    }
    let mut message: Value = serde_json::from_slice(message).ok()?;
    if message["method"] != "tools/call" {
        return None;
    }
    let params = message.get_mut("params")?.as_object_mut()?;
    let task = params.remove("task").filter(Value::is_object)?;
    params.entry("_meta").or_insert_with(|| json!({})).as_object_mut()?.insert(WANTED.into(), task);
    let mut text = serde_json::to_vec(&message).ok()?;
    text.push(b'\n');
    Some(text)
}

/// Makes requests whose answers differ from those of the library custom requests. Clients without a handshake have none.
pub(super) fn route(message: ClientJsonRpcMessage) -> ClientJsonRpcMessage {
    let JsonRpcMessage::Request(mut message) = message else { return message };
    if message.request.get_meta().protocol_version().is_none() {
        message.request = routed(message.request);
    }
    JsonRpcMessage::Request(message)
}

fn routed(request: ClientRequest) -> ClientRequest {
    let wanted = request.get_meta().get(WANTED).cloned();
    let (method, params, extensions) = match request {
        ClientRequest::CallToolRequest(request) if wanted.is_some() => {
            let params =
                json!({"name": request.params.name, "arguments": request.params.arguments, "task": wanted});
            ("tools/call", params, request.extensions)
        }
        ClientRequest::ListToolsRequest(request) => ("tools/list", json!({}), request.extensions),
        ClientRequest::GetTaskRequest(request) => {
            ("tasks/get", json!({"taskId": request.params.task_id}), request.extensions)
        }
        ClientRequest::CancelTaskRequest(request) => {
            ("tasks/cancel", json!({"taskId": request.params.task_id}), request.extensions)
        }
        request => return request,
    };
    let mut request = CustomRequest::new(method, Some(params));
    request.extensions = extensions;
    ClientRequest::CustomRequest(request)
}

/// Adds the capability to the answer to `initialize`, if the server has tasks.
pub(super) fn announce(mut message: ServerJsonRpcMessage) -> ServerJsonRpcMessage {
    if let JsonRpcMessage::Response(response) = &mut message
        && let ServerResult::InitializeResult(result) = &response.result
        && result.protocol_version == VERSION
        && result.capabilities.supports_tasks()
    {
        response.result = ServerResult::CustomResult(with_capability(result));
    }
    message
}

fn with_capability(result: &InitializeResult) -> CustomResult {
    let mut answer = json!(result);
    answer["capabilities"]["tasks"] = json!({"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}});
    CustomResult(answer)
}

/// Returns true if the client of a request may ask for tasks of this form.
pub(super) fn has_tasks(context: &RequestContext<RoleServer>) -> bool {
    context.protocol_version() == Some(VERSION)
}

/// Converts a result to the form of the protocol versions with a handshake.
pub(super) fn plain(mut result: ServerResult) -> CustomResult {
    result.strip_result_type_for_legacy_peer();
    CustomResult(json!(result))
}

/// A call of a tool as a task.
#[derive(Deserialize)]
pub(super) struct CallAsTask {
    pub(super) name: String,
    pub(super) arguments: Option<JsonObject>,
    task: Wanted,
}

#[derive(Deserialize)]
struct Wanted {
    /// Time for which the client wants the task to be kept, in milliseconds.
    ttl: Option<u64>,
}

impl CallAsTask {
    /// Returns the time for which the task is kept.
    pub(super) fn ttl(&self) -> Duration {
        self.task.ttl.map_or(TASK_TTL, |ttl| Duration::from_millis(ttl).min(TASK_TTL))
    }
}

/// A request that names a task.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct OfTask {
    pub(super) task_id: String,
}

/// Tasks of a session. Each is kept for its time.
#[derive(Default)]
pub(super) struct Tasks(Mutex<BTreeMap<String, Arc<Task>>>);

impl Tasks {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Task>>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, task| task.until > Instant::now());
        all
    }

    /// Makes room for one more task: if there are too many, the oldest one that has ended is removed. Returns false if
    /// all of them go on.
    pub(super) fn make_room(&self) -> bool {
        let mut all = self.all();
        if all.len() < TASKS {
            return true;
        }
        let ended = all.iter().filter(|(_, task)| task.has_ended());
        let oldest = ended.min_by_key(|(_, task)| task.created).map(|(id, _)| id.clone());
        oldest.is_some_and(|id| all.remove(&id).is_some())
    }

    pub(super) fn find(&self, id: &str) -> Option<Arc<Task>> {
        self.all().get(id).cloned()
    }

    pub(super) fn list(&self) -> Value {
        json!({"tasks": self.all().values().map(|task| task.describe()).collect::<Vec<_>>()})
    }
}

/// A call that runs as a task.
pub(super) struct Task {
    call: Arc<Call>,
    created: Instant,
    created_at: String,
    /// Time until which it is kept. A call that runs longer is cancelled.
    until: Instant,
    state: watch::Sender<State>,
    cancelled: CancellationToken,
}

struct State {
    status: TaskStatus,
    updated_at: String,
    /// Message for the user that the client cannot show in another way.
    message: Option<String>,
    /// The question that nobody has been asked yet, and the way to the answer.
    question: Option<(Question, oneshot::Sender<PersonsAnswer>)>,
    result: Option<CallToolResult>,
}

impl Task {
    /// Lets a call go on as a task of its session.
    pub(super) fn start(
        session: &Arc<Session>,
        running: Running,
        ttl: Duration,
        abilities: Abilities,
        context: RequestContext<RoleServer>,
    ) -> Arc<Task> {
        let (now, created) = (current_timestamp(), Instant::now());
        let task = Arc::new(Task {
            call: Arc::clone(&running.call),
            created,
            created_at: now.clone(),
            until: created + ttl,
            state: watch::Sender::new(State {
                status: TaskStatus::Working,
                updated_at: now,
                message: None,
                question: None,
                result: None,
            }),
            cancelled: CancellationToken::new(),
        });
        session.tasks.all().insert(task.call.id.to_string(), Arc::clone(&task));
        let followed = Arc::clone(&task);
        tokio::spawn(async move { followed.follow(running, abilities, &context).await });
        task
    }

    /// Describes the task.
    pub(super) fn describe(&self) -> Value {
        let state = self.state.borrow();
        let progress = self.call.progress().map(|progress| progress.text).filter(|text| !text.is_empty());
        let message = state.message.clone().or(progress);
        let mut task = json!({
            "taskId": self.call.id.as_str(), "status": state.status, "createdAt": self.created_at,
            "lastUpdatedAt": state.updated_at, "ttl": (self.until - self.created).as_millis(), "pollInterval": POLL_MS,
        });
        if let Some(message) = message {
            task["statusMessage"] = message.into();
        }
        task
    }

    fn has_ended(&self) -> bool {
        self.state.borrow().status.is_terminal()
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        self.state.send_if_modified(|state| {
            let goes_on = !state.status.is_terminal();
            if goes_on {
                change(state);
                state.updated_at = current_timestamp();
            }
            goes_on
        });
    }

    /// Waits for the end of the call, and notes what the client may ask for.
    async fn follow(&self, running: Running, abilities: Abilities, context: &RequestContext<RoleServer>) {
        let reporter = Reporter::start(&running.call, context);
        let mut notes = Vec::new();
        loop {
            match running.call.next(self.until, &self.cancelled).await {
                Change::Settled(outcome) => {
                    reporter.finish().await;
                    let result = convert::result(&running.call, &outcome, notes, abilities);
                    let has_failed = result.is_error == Some(true);
                    let status = if has_failed { TaskStatus::Failed } else { TaskStatus::Completed };
                    return self.set(|state| (state.status, state.result) = (status, Some(result)));
                }
                Change::Question(question) if abilities.can_show(&question) => {
                    self.ask(&running, question).await;
                }
                Change::Question(Question::SignIn(auth_url)) => {
                    let message = format!("the user has to open {}", auth_url.expose());
                    self.set(|state| state.message = Some(message));
                }
                Change::Question(question) => {
                    cannot_ask(&running, &question, &mut notes).await;
                }
                // Dropping the call cancels it.
                Change::StillRunning | Change::Cancelled => {
                    return self.set(|state| state.status = TaskStatus::Cancelled);
                }
            }
        }
    }

    /// Waits until a client that waits for the result has answered a question.
    async fn ask(&self, running: &Running, question: Question) {
        let (sender, answered) = oneshot::channel();
        let asked = question.clone();
        self.set(|state| {
            (state.status, state.question) = (TaskStatus::InputRequired, Some((asked, sender)));
        });
        let answer = tokio::select! {
            answer = answered => answer.ok().map(Some),
            () = running.call.settled() => Some(None),
            () = self.cancelled.cancelled() => Some(None),
            () = sleep(QUESTION_TIME) => Some(Some(PersonsAnswer::Dismissed)),
        };
        self.set(|state| (state.status, state.question) = (TaskStatus::Working, None));
        match answer {
            Some(Some(answer)) => deliver(running, &question, answer).await,
            Some(None) => {}
            // The client that was asked has gone.
            None => running.call.ask_again(question),
        }
    }

    /// Cancels the task. Returns false if it has ended.
    pub(super) fn cancel(&self) -> bool {
        let has_ended = self.has_ended();
        self.set(|state| state.status = TaskStatus::Cancelled);
        self.cancelled.cancel();
        !has_ended
    }

    /// Waits for the result. Asks the user of the client what the tool wants to know meanwhile.
    pub(super) async fn result(
        &self,
        context: &RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        let mut changes = self.state.subscribe();
        loop {
            {
                let state = changes.borrow_and_update();
                match (&state.result, state.status) {
                    (Some(result), _) => return Ok(self.related(result.clone())),
                    (None, TaskStatus::Cancelled) => {
                        return Err(ErrorData::invalid_request("the task was cancelled", None));
                    }
                    (None, _) => {}
                }
            }
            let mut asked = None;
            self.state.send_if_modified(|state| {
                asked = state.question.take();
                false
            });
            if let Some((question, answer)) = asked {
                self.elicit(&question, answer, context).await?;
                continue;
            }
            tokio::select! {
                changed = changes.changed() => {
                    changed.map_err(|error| ErrorData::internal_error(error.to_string(), None))?;
                }
                () = context.ct.cancelled() => return Err(gone()),
            }
        }
    }

    async fn elicit(
        &self,
        question: &Question,
        answer: oneshot::Sender<PersonsAnswer>,
        context: &RequestContext<RoleServer>,
    ) -> Result<(), ErrorData> {
        let mut params =
            convert::elicitation(&self.call, question).map_err(|why| ErrorData::internal_error(why, None))?;
        let mut meta = RequestMetaObject::new();
        meta.insert(RELATED.into(), json!({"taskId": self.call.id.as_str()}));
        *params.meta_mut() = Some(meta);
        let elicited = tokio::select! {
            elicited = context.peer.create_elicitation_with_timeout(params, Some(QUESTION_TIME)) => elicited,
            () = self.call.settled() => return Ok(()),
            () = context.ct.cancelled() => return Err(gone()),
        };
        let said = match elicited {
            Ok(result) => convert::answer(question, &result),
            Err(ServiceError::TransportClosed) => return Err(gone()),
            Err(_) => PersonsAnswer::Dismissed,
        };
        // The tool may have ended without the answer.
        answer.send(said).ok();
        Ok(())
    }

    fn related(&self, result: CallToolResult) -> CustomResult {
        let CustomResult(mut result) = plain(ServerResult::CallToolResult(result));
        result["_meta"][RELATED] = json!({"taskId": self.call.id.as_str()});
        CustomResult(result)
    }
}

fn gone() -> ErrorData {
    ErrorData::internal_error("the client does not wait any more", None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routed_method(message: &Value) -> Option<Value> {
        let bytes = message.to_string().into_bytes();
        let message = serde_json::from_slice(&mark(&bytes).unwrap_or(bytes)).unwrap();
        let JsonRpcMessage::Request(request) = route(message) else { panic!("not a request") };
        match request.request {
            ClientRequest::CustomRequest(request) => Some(json!([request.method, request.params])),
            _ => None,
        }
    }

    #[test]
    fn a_call_that_asks_for_a_task_is_told_apart_and_others_are_left_alone() {
        let call =
            |params: Value| json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params});
        let wanted = call(json!({"name": "work", "arguments": {"a": 1}, "task": {"ttl": 5}}));
        let expected = json!(["tools/call", {"name": "work", "arguments": {"a": 1}, "task": {"ttl": 5}}]);
        assert_eq!(routed_method(&wanted), Some(expected));
        for params in [
            json!({"name": "work", "arguments": {"task": {"ttl": 5}}}),
            json!({"name": "task"}),
            json!({"name": "work", "task": "later"}),
        ] {
            assert_eq!(routed_method(&call(params.clone())), None, "{params}");
        }
    }

    #[test]
    fn requests_of_clients_without_a_handshake_are_left_alone() {
        let meta = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28"});
        let get = |params: Value| json!({"jsonrpc": "2.0", "id": 1, "method": "tasks/get", "params": params});
        assert!(routed_method(&get(json!({"taskId": "t"}))).is_some());
        assert_eq!(routed_method(&get(json!({"taskId": "t", "_meta": meta}))), None);
    }
}
