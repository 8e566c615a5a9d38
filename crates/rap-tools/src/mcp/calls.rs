//! A call of a tool.

use std::collections::BTreeMap;
use std::sync::Arc;

use rap_tool::{Call, Error, Output};
use rmcp::model::{
    CallToolRequest, CallToolRequestParams, ClientRequest, CustomRequest, CustomResult, InputRequest,
    InputRequiredResult, JsonObject, ServerResult,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::content;
use super::listing::Tasks;
use super::questions;
use super::server::Server;
use super::session::Failure;
use super::task::{self, Task};

/// Maximum number of times that a server may ask for input during one call.
const INPUT_ROUNDS: usize = 10;
/// Time for which a server is asked to keep the result of a task.
const KEEP_RESULT_MS: u64 = 24 * 60 * 60 * 1000;
const RESTARTED: &str = "the bridge to the MCP server was restarted while this call was running, so its outcome is unknown; \
                         check before you call it again";

/// State of a call that may become a task, stored so that it survives a restart.
#[derive(Serialize, Deserialize)]
pub(super) enum Note {
    /// The request may have been sent.
    Sent,
    /// The server has made a task of it.
    Task(Task),
}

/// Runs a call.
pub(super) async fn run(
    server: Arc<Server>,
    tool: String,
    tasks: Tasks,
    arguments: JsonObject,
    call: Call,
) -> Result<Output, Error> {
    match call.saved()? {
        None => {}
        Some(Note::Sent) => return Err(Error::new(RESTARTED)),
        Some(Note::Task(task)) => return task::follow(&server, &call, task).await,
    }
    if tasks != Tasks::Never {
        // Until there is a session, nothing was sent, and the call can begin anew after a restart.
        server.session(&call).await.map_err(|failure| failure.of(&server.config().name))?;
        call.save(Note::Sent).await?;
    }
    let answered = match tasks {
        Tasks::Requested => as_task(&server, &tool, arguments, &call).await,
        Tasks::Never | Tasks::Possible => with_input(&server, &tool, arguments, &call).await,
    };
    let name = &server.config().name;
    match answered.map_err(|failure| failure.of(name))? {
        ServerResult::CallToolResult(result) => content::result(result),
        ServerResult::CreateTaskResult(created) => {
            task::follow(&server, &call, Task::extension(created.task)).await
        }
        ServerResult::CustomResult(CustomResult(result)) => match Task::legacy(&result) {
            Some(task) => task::follow(&server, &call, task).await,
            None => Err(Error::new(format!("the MCP server {name} returned something else"))),
        },
        _ => Err(Error::new(format!("the MCP server {name} returned something else"))),
    }
}

/// Calls a tool. A server of the protocol version 2026-07-28 may ask for input first, and then gets the request again.
async fn with_input(
    server: &Arc<Server>,
    tool: &str,
    arguments: JsonObject,
    call: &Call,
) -> Result<ServerResult, Failure> {
    let mut parameters = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
    for _ in 0..INPUT_ROUNDS {
        let request = ClientRequest::CallToolRequest(CallToolRequest::new(parameters.clone()));
        match server.request(call, request).await {
            Ok(ServerResult::InputRequiredResult(wanted)) => {
                let InputRequiredResult { input_requests, request_state, .. } = wanted;
                let answers = answers(server, input_requests.unwrap_or_default(), call).await?;
                parameters.input_responses = Some(answers).filter(|answers| !answers.is_empty());
                parameters.request_state = request_state;
            }
            answered => return answered,
        }
    }
    Err(Failure::NotAnswered(format!("it asked for input more than {INPUT_ROUNDS} times")))
}

/// Calls a tool as a task, in the form of the protocol version 2025-11-25.
async fn as_task(
    server: &Arc<Server>,
    tool: &str,
    arguments: JsonObject,
    call: &Call,
) -> Result<ServerResult, Failure> {
    let parameters = json!({"name": tool, "arguments": arguments, "task": {"ttl": KEEP_RESULT_MS}});
    let request = CustomRequest::new("tools/call", Some(parameters));
    server.request(call, ClientRequest::CustomRequest(request)).await
}

/// Asks the user for the input that a server wants.
pub(super) async fn answers(
    server: &Server,
    wanted: BTreeMap<String, InputRequest>,
    call: &Call,
) -> Result<BTreeMap<String, Value>, Failure> {
    let mut answers = BTreeMap::new();
    for (name, request) in wanted {
        let answer = match request {
            InputRequest::Elicitation(request) => {
                questions::ask(&server.config().name, call, request.params).await.map_err(Failure::Refused)?
            }
            _ => {
                let why = "it asked for something that this client does not offer, such as sampling";
                return Err(Failure::NotAnswered(why.into()));
            }
        };
        let answer = serde_json::to_value(answer).map_err(|error| Failure::NotAnswered(error.to_string()))?;
        answers.insert(name, answer);
    }
    Ok(answers)
}
