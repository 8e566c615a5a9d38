//! The MCP server that offers the agents of a runtime.
//!
//! An agent is durable: it keeps working when nobody waits for it. So no tool here cancels anything, and each one that
//! waits returns after a bounded time and says how to continue.

use std::time::Duration;

use rap_api::client::{Client, Error, IdempotencyKey, Update};
use rap_api::{
    CallEventKind, CreateThread, Item, OnBusy, Question, QuestionKind, SendMessage, Status, ThreadEvent,
};
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, CustomRequest, CustomResult,
    JsonObject, ListToolsResult, PaginatedRequestParams, ProgressNotificationParam, ServerCapabilities,
    ServerConfig, Tool, ToolAnnotations,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout, timeout_at};

use super::convert::{self, object_schema};
use super::handler::{implementation, unknown_request};
use crate::commands::error_text;
use crate::commands::threads::last_entry;
use crate::idle::IdleDetector;

/// Time that a tool waits unless its caller says otherwise, in seconds.
const WAIT_SECONDS: u64 = 60;
/// Maximum time that a tool waits, in seconds.
const WAIT_SECONDS_MAX: u64 = 600;
/// Number of entries that `read` returns unless its caller says otherwise, and at most.
const ENTRIES: usize = 50;
const ENTRIES_MAX: usize = 200;
/// Maximum size of the answers that are returned, in bytes. Earlier ones are left out.
const ANSWER_BYTES: usize = 256 * 1024;
/// Maximum time to send one progress notification.
const PROGRESS_TIME: Duration = Duration::from_secs(1);

/// Handles the requests of MCP clients with the client API of a runtime.
#[derive(Clone)]
pub(super) struct AgentsHandler {
    client: Client,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Start {
    message: String,
    agent: Option<String>,
    title: Option<String>,
    wait_seconds: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ask {
    thread: String,
    message: String,
    wait_seconds: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wait {
    thread: String,
    after: Option<u64>,
    wait_seconds: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Read {
    thread: String,
    after: Option<u64>,
    limit: Option<usize>,
}

/// Outcome of waiting for an agent.
struct Watched {
    status: Status,
    why: Option<String>,
    answers: Vec<String>,
    questions: Vec<Question>,
    /// Sequence number of the last entry that was seen.
    after: u64,
    /// True if the agent has stopped, so that waiting for it would bring nothing.
    is_done: bool,
}

impl AgentsHandler {
    pub(super) fn new(client: Client) -> AgentsHandler {
        AgentsHandler { client }
    }

    async fn start(
        &self,
        start: Start,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, Error> {
        let Start { message, agent, title, wait_seconds } = start;
        let new = CreateThread {
            id: None,
            agent,
            user_id: None,
            title,
            message: Some(message.clone()),
            content: Vec::new(),
        };
        let thread = self.client.create_thread(&new).await?;
        self.watch(&thread.id, 0, IdleDetector::expecting(&message), wait_seconds.unwrap_or(0), context).await
    }

    async fn ask(&self, ask: Ask, context: &RequestContext<RoleServer>) -> Result<CallToolResult, Error> {
        let Ask { thread, message, wait_seconds } = ask;
        let before = last_entry(&self.client, &thread).await?;
        let sent = SendMessage { text: message.clone(), content: Vec::new(), on_busy: OnBusy::Join };
        self.client.send_message(&thread, &sent, &IdempotencyKey::random()).await?;
        let seconds = wait_seconds.unwrap_or(WAIT_SECONDS);
        self.watch(&thread, before, IdleDetector::expecting(&message), seconds, context).await
    }

    async fn wait(&self, wait: Wait, context: &RequestContext<RoleServer>) -> Result<CallToolResult, Error> {
        let Wait { thread, after, wait_seconds } = wait;
        let after = match after {
            Some(after) => after,
            None => last_entry(&self.client, &thread).await?,
        };
        let seconds = wait_seconds.unwrap_or(WAIT_SECONDS);
        self.watch(&thread, after, IdleDetector::default(), seconds, context).await
    }

    async fn read(&self, read: Read) -> Result<CallToolResult, Error> {
        let limit = read.limit.unwrap_or(ENTRIES).clamp(1, ENTRIES_MAX);
        let thread = self.client.thread(&read.thread).await?;
        let page = self.client.history(&read.thread, read.after.unwrap_or(0), limit).await?;
        let after = page.entries.last().map(|entry| entry.seq);
        let shown = json!({
            "thread": thread.id, "agent": thread.agent, "status": thread.status, "why": thread.why,
            "entries": page.entries, "more_after": page.next_after.and(after),
        });
        let mut result = CallToolResult::success(vec![ContentBlock::text(shown.to_string())]);
        result.structured_content = Some(shown);
        Ok(result)
    }

    /// Waits until the agent has nothing more to do, needs a person, or the time is over.
    async fn watch(
        &self,
        thread: &str,
        after: u64,
        mut idle: IdleDetector,
        seconds: u64,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, Error> {
        let until = Instant::now() + Duration::from_secs(seconds.min(WAIT_SECONDS_MAX));
        let mut seen = Watched::new(after);
        let mut follower = self.client.follow(thread, after);
        let mut steps = 0.0;
        while seconds > 0 && !seen.is_done {
            let update = tokio::select! {
                () = context.ct.cancelled() => break,
                update = timeout_at(until, follower.next()) => update,
            };
            match update {
                Err(_elapsed) => break,
                Ok(Err(error)) => return Err(error),
                Ok(Ok(Update::Reconnected)) => idle.reconnected(),
                Ok(Ok(Update::Event(event))) => {
                    idle.observe(&event);
                    if let Some(step) = seen.observe(event) {
                        steps += 1.0;
                        report(context, steps, step).await;
                    }
                    seen.is_done = idle.is_idle() || idle.status() == Some(Status::NeedsYou);
                }
                Ok(Ok(Update::Skipped(_) | Update::Disconnected)) => {}
            }
        }
        if !seen.is_done {
            let now = self.client.thread(thread).await?;
            (seen.status, seen.why) = (now.status, now.why);
        }
        Ok(seen.result(thread))
    }
}

impl Watched {
    fn new(after: u64) -> Watched {
        let (answers, questions) = (Vec::new(), Vec::new());
        Watched { status: Status::Running, why: None, answers, questions, after, is_done: false }
    }

    /// Takes note of an event. Returns a line about it for people.
    fn observe(&mut self, event: ThreadEvent) -> Option<String> {
        match event {
            ThreadEvent::Entry(entry) => {
                self.after = entry.seq;
                let Item::Assistant { text, .. } = entry.item else { return None };
                if text.is_empty() {
                    return None;
                }
                self.answers.push(text.clone());
                while self.answers.len() > 1
                    && self.answers.iter().map(String::len).sum::<usize>() > ANSWER_BYTES
                {
                    self.answers.remove(0);
                }
                Some(text)
            }
            ThreadEvent::Status(update) => {
                self.status = update.status;
                self.why = update.why;
                None
            }
            ThreadEvent::Question(question) => {
                let line = format!("asks a person ({})", question.tool);
                self.questions.push(question);
                Some(line)
            }
            ThreadEvent::Call(update) => {
                self.questions.retain(|question| question.call_id != update.call.call_id);
                (update.state == CallEventKind::Opened).then(|| format!("calls {}", update.call.tool))
            }
            _ => None,
        }
    }

    fn result(self, thread: &str) -> CallToolResult {
        let answer = self.answers.join("\n\n");
        let why = self.why.as_ref().map_or(String::new(), |why| format!(" ({why})"));
        let next = match self.status {
            Status::Closed => format!("Thread {thread} is closed; start another one."),
            Status::Failed => format!(
                "Thread {thread} failed{why}; a person can continue it with: rap threads resume {thread}"
            ),
            Status::NeedsYou => {
                let questions: Vec<String> = self.questions.iter().map(question).collect();
                format!(
                    "Thread {thread} waits for a person{why}{}{}. A person answers with: rap inbox. Call wait after that.",
                    if questions.is_empty() { "" } else { ": " },
                    questions.join("; ")
                )
            }
            Status::Idle if self.is_done => format!("Thread {thread} is idle; continue it with ask."),
            status => format!(
                "Thread {thread} is {status} and continues to work; call wait with {{\"thread\": \"{thread}\", \"after\": \
                 {}}}.",
                self.after
            ),
        };
        let shown = json!({
            "thread": thread, "status": self.status, "done": self.is_done, "answer": answer, "after": self.after,
            "why": self.why, "next": next,
        });
        let texts = [answer, next].into_iter().filter(|text| !text.is_empty());
        let mut result = CallToolResult::success(texts.map(ContentBlock::text).collect());
        if self.status == Status::Failed {
            result.is_error = Some(true);
        }
        result.structured_content = Some(shown);
        result
    }
}

fn question(question: &Question) -> String {
    match &question.kind {
        QuestionKind::Choice { prompt, choices, .. } => format!("{prompt} [{}]", choices.join(", ")),
        // The link is for the user alone, who finds it in the inbox.
        _ => format!("a sign-in for {}", question.tool),
    }
}

/// Sends a progress notification, if the caller wants any.
async fn report(context: &RequestContext<RoleServer>, number: f64, text: String) {
    if let Some(token) = context.meta.get_progress_token() {
        let params = ProgressNotificationParam::new(token, number).with_message(text);
        timeout(PROGRESS_TIME, context.peer.notify_progress(params)).await.ok();
    }
}

fn arguments<T: DeserializeOwned>(arguments: JsonObject) -> Result<T, String> {
    serde_json::from_value(Value::Object(arguments))
        .map_err(|error| format!("the arguments are not valid: {error}"))
}

fn tools() -> [Tool; 4] {
    let thread = json!({"type": "string", "description": "Id of the thread, as start returned it"});
    let message = json!({"type": "string", "description": "Message to the agent"});
    let after =
        json!({"type": "integer", "minimum": 0, "description": "Number of the last entry that you know"});
    let seconds = |default: u64| {
        json!({"type": "integer", "minimum": 0, "maximum": WAIT_SECONDS_MAX, "default": default,
               "description": "Time to wait until the agent has nothing more to do"})
    };
    let start = json!({
        "message": message, "wait_seconds": seconds(0),
        "agent": {"type": "string", "description": "Name of the agent; the first one of the runtime if absent"},
        "title": {"type": "string", "description": "Title for people"},
    });
    let ask = json!({"thread": thread, "message": message, "wait_seconds": seconds(WAIT_SECONDS)});
    let wait = json!({"thread": thread, "after": after, "wait_seconds": seconds(WAIT_SECONDS)});
    let limit = json!({"type": "integer", "minimum": 1, "maximum": ENTRIES_MAX, "default": ENTRIES});
    let read = json!({"thread": thread, "after": after, "limit": limit});
    let changes = ToolAnnotations::new().read_only(false).destructive(false);
    let reads = ToolAnnotations::new().read_only(true);
    [
        Tool::new(
            "start",
            "Start an agent on a task. It works on its own, also while nobody waits, and survives restarts. Returns \
             the id of its thread.",
            object_schema(&start, &["message"]),
        )
        .with_annotations(changes.clone()),
        Tool::new(
            "ask",
            "Send a message to an agent that was started, and wait for its answer.",
            object_schema(&ask, &["thread", "message"]),
        )
        .with_annotations(changes),
        Tool::new(
            "wait",
            "Wait until an agent has nothing more to do, and return what it said in the meantime.",
            object_schema(&wait, &["thread"]),
        )
        .with_annotations(reads.clone()),
        Tool::new("read", "Read the history of an agent's thread.", object_schema(&read, &["thread"]))
            .with_annotations(reads),
    ]
}

impl ServerHandler for AgentsHandler {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(implementation())
            .with_instructions(
                "Delegate work to durable agents: start one, ask it more, wait for it, read what it did. An agent goes \
                 on when nobody waits for it.",
            )
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(tools().into()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let given = request.arguments.unwrap_or_default();
        let outcome = match request.name.as_ref() {
            "start" => match arguments(given) {
                Ok(start) => self.start(start, &context).await,
                Err(why) => return Ok(convert::error(&why).into()),
            },
            "ask" => match arguments(given) {
                Ok(ask) => self.ask(ask, &context).await,
                Err(why) => return Ok(convert::error(&why).into()),
            },
            "wait" => match arguments(given) {
                Ok(wait) => self.wait(wait, &context).await,
                Err(why) => return Ok(convert::error(&why).into()),
            },
            "read" => match arguments(given) {
                Ok(read) => self.read(read).await,
                Err(why) => return Ok(convert::error(&why).into()),
            },
            name => return Err(ErrorData::invalid_params(format!("there is no tool {name}"), None)),
        };
        Ok(outcome.unwrap_or_else(|error| convert::error(&error_text(&error.into()))).into())
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        Err(unknown_request(request))
    }
}
