//! The client API under /v1.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use rap_agent::{Ignored, Message, OnBusy};
use rap_protocol::{CallId, ThreadId, UserId};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::{InPath, Refused, body, json};
use crate::engine::Engine;
use crate::store::{self, Digest, NewThread, Page, Target, ThreadFilter, fresh_id, now};

/// How many rows a listing has unless it is told, and at most.
const ROWS: (usize, usize) = (100, 1000);
/// The longest id that a client gives a thread, and the longest title, in characters.
const ID_CHARS: usize = 128;
const TITLE_CHARS: usize = 256;
/// The longest Idempotency-Key, in bytes.
const KEY_BYTES: usize = 256;

type Answer = Result<Json<Value>, Refused>;
type Accepted = Result<(StatusCode, Json<Value>), Refused>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CreateThread {
    id: Option<String>,
    agent: Option<String>,
    user_id: Option<String>,
    title: Option<String>,
    message: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Say {
    text: String,
    #[serde(default)]
    on_busy: Busy,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "snake_case")]
enum Busy {
    #[default]
    Join,
    Interrupt,
    Enqueue,
    Reject,
}

impl From<Busy> for OnBusy {
    fn from(busy: Busy) -> OnBusy {
        match busy {
            Busy::Join => OnBusy::Join,
            Busy::Interrupt => OnBusy::Interrupt,
            Busy::Enqueue => OnBusy::Enqueue,
            Busy::Reject => OnBusy::Reject,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Choose {
    selected: Option<usize>,
    #[serde(default)]
    dismiss: bool,
}

async fn read<T: DeserializeOwned>(
    engine: &Engine,
    headers: &HeaderMap,
    request: Body,
) -> Result<T, Refused> {
    let bytes = body(headers, request, engine.settings.limits.body).await?;
    serde_json::from_slice(&bytes).map_err(|error| Refused::invalid(error.to_string()))
}

/// What a client's key is unique for.
enum About<'a> {
    NewThreads,
    Thread(&'a str),
}

/// A client's key makes a repeat of its request harmless; it counts for the thread, or for making threads.
fn digest(headers: &HeaderMap, about: About<'_>) -> Result<Option<Digest>, Refused> {
    let Some(key) = headers.get("idempotency-key") else { return Ok(None) };
    if !(1..=KEY_BYTES).contains(&key.as_bytes().len()) {
        return Err(Refused::invalid(format!("Idempotency-Key: 1 to {KEY_BYTES} bytes")));
    }
    // No id is empty, so that no thread is taken for the making of threads.
    let about = match about {
        About::NewThreads => "",
        About::Thread(id) => id,
    };
    let mut hash = Sha256::new();
    hash.update((about.len() as u64).to_be_bytes());
    hash.update(about);
    hash.update(key.as_bytes());
    Ok(Some(hash.finalize().into()))
}

/// An id of the path. What can not be an id names nothing.
fn thread_id(text: String) -> Result<ThreadId, Refused> {
    ThreadId::new(text).map_err(|_| store::Error::NoThread.into())
}

fn call_id(text: String) -> Result<CallId, Refused> {
    CallId::new(text).map_err(|_| Ignored::UnknownCall.into())
}

/// An id that a client makes up; stricter than the wire, since it stands in paths and file names.
fn own_id(text: String) -> Result<ThreadId, Refused> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if text.is_empty() || text.len() > ID_CHARS || text.starts_with('.') || !text.chars().all(plain) {
        let message = "id: 1 to 128 letters, digits, `_`, `-` and `.`, not starting with a dot";
        return Err(Refused::invalid(message));
    }
    ThreadId::new(text).map_err(|error| Refused::invalid(format!("id: {error}")))
}

pub(super) async fn create_thread(
    State(engine): State<Arc<Engine>>,
    headers: HeaderMap,
    request: Body,
) -> Accepted {
    let CreateThread { id, agent, user_id, title, message } = read(&engine, &headers, request).await?;
    let id = match id {
        Some(id) => own_id(id)?,
        None => fresh_id(now()),
    };
    let user_id = user_id.map(UserId::new).transpose();
    let user_id = user_id.map_err(|error| Refused::invalid(format!("user_id: {error}")))?;
    if title.as_ref().is_some_and(|title| title.chars().nth(TITLE_CHARS).is_some()) {
        return Err(Refused::invalid(format!("title: at most {TITLE_CHARS} characters")));
    }
    let new = NewThread { id, agent: known_agent(&engine, agent)?, user_id, title, message };
    let receipt = engine.store.create(new, digest(&headers, About::NewThreads)?).await?;
    let row = engine.store.thread(receipt.thread).await?;
    Ok((StatusCode::CREATED, Json(json::thread(&row))))
}

fn known_agent(engine: &Engine, name: Option<String>) -> Result<String, Refused> {
    let agents = &engine.settings.agents;
    let Some(name) = name else { return Ok(agents[0].name.clone()) };
    if agents.iter().any(|agent| agent.name == name) {
        return Ok(name);
    }
    let names: Vec<&str> = agents.iter().map(|agent| agent.name.as_str()).collect();
    Err(Refused::invalid(format!("agent: there is no such agent; there are: {}", names.join(", "))))
}

/// What stands behind the question mark, each key once.
type Parameters = Query<HashMap<String, String>>;

fn rows(parameters: &HashMap<String, String>) -> Result<usize, Refused> {
    let (usual, most) = ROWS;
    match parameters.get("limit") {
        None => Ok(usual),
        Some(text) => match text.parse() {
            Ok(limit) if (1..=most).contains(&limit) => Ok(limit),
            _ => Err(Refused::invalid(format!("limit: a number from 1 to {most}"))),
        },
    }
}

fn number(parameters: &HashMap<String, String>, name: &str) -> Result<u64, Refused> {
    let Some(text) = parameters.get(name) else { return Ok(0) };
    let number: Result<u64, _> = text.parse();
    number
        .ok()
        .filter(|number| *number <= u64::from(u32::MAX))
        .ok_or_else(|| Refused::invalid(format!("{name}: expected what an earlier answer gave")))
}

fn only(parameters: &HashMap<String, String>, known: &[&str]) -> Result<(), Refused> {
    match parameters.keys().find(|key| !known.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => {
            Err(Refused::invalid(format!("{key}: unknown parameter; there are: {}", known.join(", "))))
        }
    }
}

pub(super) async fn threads(State(engine): State<Arc<Engine>>, Query(parameters): Parameters) -> Answer {
    only(&parameters, &["status", "parent", "limit", "cursor"])?;
    let limit = rows(&parameters)?;
    let status = parameters.get("status").cloned();
    const STATUSES: [&str; 6] = ["closed", "failed", "running", "needs_you", "waiting", "idle"];
    if status.as_ref().is_some_and(|status| !STATUSES.contains(&status.as_str())) {
        return Err(Refused::invalid(format!("status: one of {}", STATUSES.join(", "))));
    }
    let filter = ThreadFilter {
        status,
        parent: parameters.get("parent").cloned().map(thread_id).transpose()?,
        after: number(&parameters, "cursor")?.cast_signed(),
        limit: limit + 1,
    };
    let mut found = engine.store.threads(filter).await?;
    let more = found.len() > limit;
    found.truncate(limit);
    let next = found.last().filter(|_| more).map(|row| row.thread.no.to_string());
    let threads: Vec<Value> = found.iter().map(json::thread).collect();
    Ok(Json(json!({"threads": threads, "next_cursor": next})))
}

pub(super) async fn thread(State(engine): State<Arc<Engine>>, InPath(id): InPath<String>) -> Answer {
    let row = engine.store.thread(thread_id(id)?).await?;
    let displays = engine.store.displays(&row).await?;
    Ok(Json(json::thread_with(&row, &displays)))
}

pub(super) async fn message(
    State(engine): State<Arc<Engine>>,
    InPath(id): InPath<String>,
    headers: HeaderMap,
    request: Body,
) -> Accepted {
    let Say { text, on_busy } = read(&engine, &headers, request).await?;
    let said = Message::Said { text, on_busy: on_busy.into() };
    let digest = digest(&headers, About::Thread(&id))?;
    let receipt = engine.store.step_once(Target::Id(thread_id(id)?), said, digest).await?;
    Ok((StatusCode::ACCEPTED, Json(json!({"turn": receipt.turn}))))
}

pub(super) async fn history(
    State(engine): State<Arc<Engine>>,
    InPath(id): InPath<String>,
    Query(parameters): Parameters,
) -> Answer {
    only(&parameters, &["after", "limit"])?;
    let (after, limit) = (number(&parameters, "after")?, rows(&parameters)?);
    let row = engine.store.thread(thread_id(id)?).await?;
    let entries = engine.store.history_for_people(row.thread, after, row.head.seq, Page::rows(limit)).await?;
    let entries: Vec<Value> = entries.into_iter().map(|(seq, entry)| json::entry(seq, entry)).collect();
    Ok(Json(json!({"entries": entries})))
}

/// A message whose sender need not know whether it changed anything.
async fn order(engine: &Engine, id: String, message: Message) -> Accepted {
    match engine.tell(Target::Id(thread_id(id)?), message).await {
        Ok(_) | Err(store::Error::Ignored(Ignored::NothingToInterrupt)) => {}
        Err(error) => return Err(error.into()),
    }
    Ok((StatusCode::ACCEPTED, Json(json!({}))))
}

pub(super) async fn interrupt(State(engine): State<Arc<Engine>>, InPath(id): InPath<String>) -> Accepted {
    order(&engine, id, Message::Interrupt).await
}

/// A second closing changes nothing and sends nothing.
pub(super) async fn close(State(engine): State<Arc<Engine>>, InPath(id): InPath<String>) -> Accepted {
    match engine.tell(Target::Id(thread_id(id)?), Message::Close).await {
        Ok(_) | Err(store::Error::Ignored(Ignored::Closed)) => Ok((StatusCode::ACCEPTED, Json(json!({})))),
        Err(error) => Err(error.into()),
    }
}

pub(super) async fn resume(State(engine): State<Arc<Engine>>, InPath(id): InPath<String>) -> Accepted {
    order(&engine, id, Message::Resume).await
}

pub(super) async fn cancel(
    State(engine): State<Arc<Engine>>,
    InPath((id, call)): InPath<(String, String)>,
) -> Accepted {
    let (thread, call) = (thread_id(id)?, call_id(call)?);
    match engine.tell(Target::Id(thread.clone()), Message::Cancel { call: call.clone() }).await {
        Ok(_) => {}
        // Too late is as good as in time; a call that was never made is a mistake.
        Err(store::Error::Ignored(Ignored::SettledCall)) => {
            if !engine.store.knows_call(thread, call).await? {
                return Err(Ignored::UnknownCall.into());
            }
        }
        Err(error) => return Err(error.into()),
    }
    Ok((StatusCode::ACCEPTED, Json(json!({}))))
}

pub(super) async fn choice(
    State(engine): State<Arc<Engine>>,
    InPath((id, call)): InPath<(String, String)>,
    headers: HeaderMap,
    request: Body,
) -> Accepted {
    let Choose { selected, dismiss } = read(&engine, &headers, request).await?;
    if selected.is_some() == dismiss {
        return Err(Refused::invalid("give either `selected`, counted from 0, or `dismiss: true`"));
    }
    order(&engine, id, Message::Chose { call: call_id(call)?, selected }).await
}

pub(super) async fn views(State(engine): State<Arc<Engine>>, InPath(id): InPath<String>) -> Answer {
    let row = engine.store.thread(thread_id(id)?).await?;
    let views = engine.store.views(row.thread.no).await?;
    Ok(Json(json!({"views": views.iter().map(json::view).collect::<Vec<_>>()})))
}

pub(super) async fn calls(State(engine): State<Arc<Engine>>, Query(parameters): Parameters) -> Answer {
    only(&parameters, &["limit"])?;
    let calls = engine.store.calls(rows(&parameters)?).await?;
    Ok(Json(json!({"calls": calls.iter().map(json::open_call).collect::<Vec<_>>()})))
}

pub(super) async fn subscriptions(
    State(engine): State<Arc<Engine>>,
    Query(parameters): Parameters,
) -> Answer {
    only(&parameters, &["limit"])?;
    let found = engine.store.subscriptions(rows(&parameters)?).await?;
    Ok(Json(json!({"subscriptions": found.iter().map(json::subscription).collect::<Vec<_>>()})))
}

pub(super) async fn timers(State(engine): State<Arc<Engine>>, Query(parameters): Parameters) -> Answer {
    only(&parameters, &["limit"])?;
    let timers = engine.store.timers(rows(&parameters)?).await?;
    Ok(Json(json!({"timers": timers.iter().map(json::timer).collect::<Vec<_>>()})))
}

pub(super) async fn inbox(State(engine): State<Arc<Engine>>, Query(parameters): Parameters) -> Answer {
    only(&parameters, &["limit"])?;
    let items = engine.store.inbox(None, rows(&parameters)?).await?;
    Ok(Json(json!({"items": items.iter().map(json::inbox_item).collect::<Vec<_>>()})))
}

pub(super) async fn tools(State(engine): State<Arc<Engine>>) -> Answer {
    let tools = engine.toolsets.survey(&engine.store).await?;
    Ok(Json(json::tools(&tools)))
}

pub(super) async fn ready(State(engine): State<Arc<Engine>>) -> Result<&'static str, Refused> {
    engine.store.is_readable().await?;
    Ok("ready")
}
