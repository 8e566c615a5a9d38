//! Calls that a server has turned into tasks: they are polled until they end, also after a restart of the bridge.

use std::sync::Arc;
use std::time::Duration;

use rap_tool::{Call, Error, Output};
use rmcp::model::{
    CallToolResult, CancelTaskParams, ClientRequest, CustomRequest, CustomResult, DetailedTask,
    GetTaskParams, GetTaskRequest, ServerResult, TaskPayload, UpdateTaskParams,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::calls::{Note, answers};
use super::content;
use super::notices::excerpt;
use super::server::Server;
use super::session::Failure;

/// Bounds of the time between two polls.
const SHORTEST_POLL: Duration = Duration::from_millis(100);
const LONGEST_POLL: Duration = Duration::from_secs(30);
const USUAL_POLL: Duration = Duration::from_secs(1);
/// Number of polls in a row that may fail, because the server is being restarted or cannot be reached.
const FAILED_POLLS: u32 = 20;

/// A task of a server.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Task {
    id: String,
    form: Form,
    poll_ms: Option<u64>,
}

/// Form of tasks in the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Form {
    /// Protocol version 2025-11-25.
    Legacy,
    /// Extension of the protocol version 2026-07-28.
    Extension,
}

/// State of a task.
enum State {
    Working { poll: Option<u64>, said: Option<String> },
    Ended(Box<Result<CallToolResult, String>>),
}

impl Task {
    pub(super) fn extension(task: rmcp::model::Task) -> Task {
        Task { id: task.task_id, form: Form::Extension, poll_ms: task.poll_interval_ms }
    }

    /// Reads the answer to a call as a task.
    pub(super) fn legacy(result: &Value) -> Option<Task> {
        let task = result.get("task")?;
        let id = task.get("taskId")?.as_str()?.to_owned();
        Some(Task { id, form: Form::Legacy, poll_ms: task.get("pollInterval").and_then(Value::as_u64) })
    }

    fn pause(poll_ms: Option<u64>) -> Duration {
        poll_ms.map_or(USUAL_POLL, Duration::from_millis).clamp(SHORTEST_POLL, LONGEST_POLL)
    }
}

/// Polls a task until it ends.
pub(super) async fn follow(server: &Arc<Server>, call: &Call, task: Task) -> Result<Output, Error> {
    call.save(Note::Task(task.clone())).await?;
    let (mut pause, mut failed, mut last_said) = (Task::pause(task.poll_ms), 0, None);
    let name = &server.config().name;
    loop {
        match state(server, call, &task).await {
            Ok(State::Ended(result)) => return result.map_err(Error::new).and_then(content::result),
            Ok(State::Working { poll, said }) => {
                failed = 0;
                pause = Task::pause(poll.or(task.poll_ms));
                if let Some(said) = said.filter(|said| last_said.as_ref() != Some(said)) {
                    call.progress(0.0, said.clone()).await?;
                    last_said = Some(said);
                }
            }
            Err(Failure::Cancelled) => {
                cancel(server, call, &task).await;
                return Err(Error::new("cancelled"));
            }
            Err(failure @ (Failure::Refused(_) | Failure::NotSignedIn(_))) => return Err(failure.of(name)),
            Err(failure) => {
                failed += 1;
                if failed >= FAILED_POLLS {
                    return Err(failure.of(name));
                }
            }
        }
        if wait(call, pause).await.is_err() {
            cancel(server, call, &task).await;
            return Err(Error::new("cancelled"));
        }
    }
}

async fn wait(call: &Call, pause: Duration) -> Result<(), Error> {
    tokio::select! {
        () = call.cancelled() => Err(Error::new("cancelled")),
        () = tokio::time::sleep(pause) => Ok(()),
    }
}

async fn state(server: &Arc<Server>, call: &Call, task: &Task) -> Result<State, Failure> {
    let request = match task.form {
        Form::Extension => {
            ClientRequest::GetTaskRequest(GetTaskRequest::new(GetTaskParams::new(task.id.clone())))
        }
        Form::Legacy => custom("tasks/get", &task.id),
    };
    match server.request(call, request).await? {
        ServerResult::GetTaskResult(found) if task.form == Form::Extension => {
            extension_state(server, call, task, found.task).await
        }
        // The library reads the older form as the newer one as long as the task is working.
        ServerResult::GetTaskResult(found) => Ok(State::Working {
            poll: found.task.task.poll_interval_ms,
            said: found.task.task.status_message,
        }),
        ServerResult::CustomResult(CustomResult(found)) => legacy_state(server, call, task, &found).await,
        _ => Err(Failure::NotAnswered("it did not tell the state of the task".into())),
    }
}

async fn extension_state(
    server: &Arc<Server>,
    call: &Call,
    task: &Task,
    found: DetailedTask,
) -> Result<State, Failure> {
    let (poll, said) = (found.task.poll_interval_ms, found.task.status_message.clone());
    let ended = match found.payload {
        TaskPayload::Completed { result } => {
            serde_json::from_value(Value::Object(result)).map_err(|error| error.to_string())
        }
        TaskPayload::Failed { error } => {
            let said = error.get("message").and_then(Value::as_str).unwrap_or("the task failed");
            Err(excerpt(said))
        }
        TaskPayload::Cancelled => Err("the MCP server cancelled the task".into()),
        TaskPayload::InputRequired { input_requests } => {
            let answers = answers(server, input_requests, call).await?;
            let session = server.session(call).await?;
            session.peer.update_task(UpdateTaskParams::new(task.id.clone(), answers)).await?;
            return Ok(State::Working { poll, said });
        }
        _ => return Ok(State::Working { poll, said }),
    };
    Ok(State::Ended(Box::new(ended)))
}

async fn legacy_state(
    server: &Arc<Server>,
    call: &Call,
    task: &Task,
    found: &Value,
) -> Result<State, Failure> {
    let text = |name: &str| found.get(name).and_then(Value::as_str);
    let said = text("statusMessage").map(excerpt);
    match text("status") {
        // A task that waits for input asks for it in a request of its own while its result is awaited.
        Some("completed" | "input_required") => {}
        Some("failed") => return Ok(failed(said.unwrap_or_else(|| "the task failed".into()))),
        Some("cancelled") => return Ok(failed("the MCP server cancelled the task".into())),
        Some(_) => {
            let poll = found.get("pollInterval").and_then(Value::as_u64);
            return Ok(State::Working { poll, said });
        }
        None => return Err(Failure::NotAnswered("it did not tell the state of the task".into())),
    }
    match server.request(call, custom("tasks/result", &task.id)).await? {
        ServerResult::CallToolResult(result) => Ok(State::Ended(Box::new(Ok(result)))),
        _ => Err(Failure::NotAnswered("it did not return the result of the task".into())),
    }
}

fn failed(why: String) -> State {
    State::Ended(Box::new(Err(why)))
}

fn custom(method: &str, id: &str) -> ClientRequest {
    ClientRequest::CustomRequest(CustomRequest::new(method, Some(json!({"taskId": id}))))
}

/// Tells the server that nobody waits for the task any more.
async fn cancel(server: &Arc<Server>, call: &Call, task: &Task) {
    let cancelled = async {
        let session = server.current_session(call).await?;
        match task.form {
            Form::Extension => session.peer.cancel_task(CancelTaskParams::new(task.id.clone())).await?,
            Form::Legacy => drop(session.peer.send_request(custom("tasks/cancel", &task.id)).await?),
        }
        Ok::<(), Failure>(())
    };
    if let Err(failure) = cancelled.await {
        let error = failure.of(&server.config().name);
        tracing::info!(server = server.config().name, %error, "a task could not be cancelled");
    }
}
