//! The client API under /v1.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use rap_agent::{Ignored, Input, OnBusy, Seq, Status};
use rap_io::metrics::CONTENT_TYPE;
use rap_protocol::{CallId, ThreadId, UserId};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use sha2::{Digest as _, Sha256};

use super::json::{
    Calls, Done, Entries, Entry, Inbox, Subscriptions, Thread, Threads, Timers, Tools, Turn, View, Views,
};
use super::query::{self, Given};
use super::{InPath, Refused, body};
use crate::engine::Engine;
use crate::store::{
    self, HistoryPage, Lane, Message, NewThread, Once, Page, Target, ThreadFilter, Wanted, new_thread_id,
};

/// The longest id that a client gives a thread, and the longest title, in characters.
const ID_CHARS: usize = 128;
const TITLE_CHARS: usize = 256;
/// The longest Idempotency-Key, in bytes.
pub(super) const KEY_BYTES: usize = 256;

type Answer<T> = Result<Json<T>, Refused>;
pub(super) type Accepted<T = Done> = Result<(StatusCode, Json<T>), Refused>;

pub(super) const DONE: (StatusCode, Json<Done>) = (StatusCode::ACCEPTED, Json(Done {}));

/// A thread to be made.
#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CreateThread {
    /// An id of the client's own.
    #[schemars(regex(pattern = "^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}$"))]
    id: Option<String>,
    /// Which agent of the configuration; its first one if not given.
    agent: Option<String>,
    /// The end user on whose behalf tools are called.
    #[schemars(regex(pattern = query::ID))]
    user_id: Option<String>,
    #[schemars(length(max = 256))]
    title: Option<String>,
    /// What the user says first.
    message: Option<String>,
}

/// Something said to an agent.
#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Say {
    text: String,
    #[serde(default)]
    on_busy: Busy,
}

/// What becomes of a message to a busy agent.
#[derive(Deserialize, Serialize, JsonSchema, Default)]
#[serde(rename_all = "snake_case")]
enum Busy {
    /// It is answered at once; calls go on.
    #[default]
    Join,
    /// What the agent does is stopped first.
    Interrupt,
    /// It waits until the agent has come to rest.
    Enqueue,
    /// It is refused.
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

/// An answer to a question: `selected`, or `dismiss`.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(extend("oneOf" = [
    {"required": ["selected"], "properties": {"selected": {"type": "integer"}, "dismiss": {"const": false}}},
    {"required": ["dismiss"], "properties": {"selected": {"type": "null"}, "dismiss": {"const": true}}},
]))]
pub(super) struct Choose {
    /// The number of the choice, counted from 0.
    #[serde(default, deserialize_with = "whole")]
    #[schemars(range(max = rap_protocol::limits::CHOICES))]
    selected: Option<u32>,
    /// Leaves it to the default.
    #[serde(default)]
    dismiss: bool,
}

/// A whole number is one also where it is written as `1.0`.
fn whole<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let Some(given) = Option::<f64>::deserialize(deserializer)? else { return Ok(None) };
    let whole = given.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&given);
    let wrong = || serde::de::Error::custom(format!("expected a whole number from 0 to {}", u32::MAX));
    if whole { Ok(Some(given as u32)) } else { Err(wrong()) }
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

/// A client's key makes a repeat of its request harmless; it counts for the thread, or for making threads. What is asked
/// is compared as it was understood, so that a default may be given or left out.
fn once(headers: &HeaderMap, about: About<'_>, asked: &impl Serialize) -> Result<Option<Once>, Refused> {
    let Some(key) = headers.get("idempotency-key") else { return Ok(None) };
    let plain = key.as_bytes().iter().all(|byte| matches!(byte, b' '..=b'~'));
    if !plain || !(1..=KEY_BYTES).contains(&key.len()) {
        return Err(Refused::invalid(format!("Idempotency-Key: 1 to {KEY_BYTES} characters of ASCII")));
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
    let asked = serde_json::to_vec(asked).expect("bug: a request is JSON");
    Ok(Some(Once { key: hash.finalize().into(), request: Sha256::digest(asked).into() }))
}

/// Parses an id from the path. A malformed id is 404.
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
) -> Accepted<Thread> {
    let asked: CreateThread = read(&engine, &headers, request).await?;
    let mark = once(&headers, About::NewThreads, &asked)?;
    let CreateThread { id, agent, user_id, title, message } = asked;
    let id = match id {
        Some(id) => own_id(id)?,
        None => new_thread_id(engine.now(), engine.world.random.next()),
    };
    let user_id = user_id.map(UserId::new).transpose();
    let user_id = user_id.map_err(|error| Refused::invalid(format!("user_id: {error}")))?;
    if title.as_ref().is_some_and(|title| title.chars().nth(TITLE_CHARS).is_some()) {
        return Err(Refused::invalid(format!("title: at most {TITLE_CHARS} characters")));
    }
    let agent = known_agent(&engine, agent)?;
    let new = NewThread { id, incarnation: engine.world.random.next(), agent, user_id, title };
    let begin = Message::new(Target::New(new), Input::Begin { text: message });
    let receipt = engine.apply(Lane::External, Message { once: mark, ..begin }).await?;
    let row = engine.store.thread(&receipt.thread).await?;
    Ok((StatusCode::CREATED, Json(Thread::from(&row))))
}

fn known_agent(engine: &Engine, name: Option<String>) -> Result<String, Refused> {
    let agents = &engine.settings.agents;
    let Some(name) = name else {
        return Ok(agents.first().map(|agent| agent.name.clone()).unwrap_or_default());
    };
    if agents.iter().any(|agent| agent.name == name) {
        return Ok(name);
    }
    let names: Vec<&str> = agents.iter().map(|agent| agent.name.as_str()).collect();
    Err(Refused::invalid(format!("agent: there is no such agent; there are: {}", names.join(", "))))
}

/// What stands behind the question mark, each key once.
pub(super) type Parameters = Query<HashMap<String, String>>;

pub(super) async fn threads(
    State(engine): State<Arc<Engine>>,
    Query(parameters): Parameters,
) -> Answer<Threads> {
    let given = Given::check(parameters, query::OF_THREADS)?;
    let wanted = Wanted { after: given.place("cursor")?.unwrap_or_default(), limit: given.rows()? };
    let filter = ThreadFilter {
        status: given.one_of("status", &Status::ALL, Status::as_str)?,
        parent: given.thread("parent")?,
        wanted,
    };
    let page = engine.store.threads(filter).await?;
    let next_cursor = page.next.map(|cursor| cursor.to_string());
    Ok(Json(Threads { threads: page.rows.iter().map(Thread::from).collect(), next_cursor }))
}

pub(super) async fn thread(State(engine): State<Arc<Engine>>, InPath(id): InPath<String>) -> Answer<Thread> {
    let row = engine.store.thread(&thread_id(id)?).await?;
    let displays = engine.store.displays(&row).await?;
    Ok(Json(Thread::with(&row, &displays)))
}

pub(super) async fn message(
    State(engine): State<Arc<Engine>>,
    InPath(id): InPath<String>,
    headers: HeaderMap,
    request: Body,
) -> Accepted<Turn> {
    let asked: Say = read(&engine, &headers, request).await?;
    let mark = once(&headers, About::Thread(&id), &asked)?;
    let Say { text, on_busy } = asked;
    let said = Input::UserMessage { text, on_busy: on_busy.into() };
    let message = Message::new(Target::Id(thread_id(id)?), said);
    let receipt = engine.apply(Lane::External, Message { once: mark, ..message }).await?;
    Ok((StatusCode::ACCEPTED, Json(Turn { turn: receipt.turn })))
}

pub(super) async fn history(
    State(engine): State<Arc<Engine>>,
    InPath(id): InPath<String>,
    Query(parameters): Parameters,
) -> Answer<Entries> {
    let given = Given::check(parameters, query::OF_HISTORY)?;
    let (after, rows) = (given.place::<u32>("after")?.unwrap_or(0), given.rows()?);
    let row = engine.store.thread(&thread_id(id)?).await?;
    let page = HistoryPage { after: after.into(), up_to: row.head.seq(), rows, bytes: usize::MAX };
    let entries = engine.store.history(&row.thread, page).await?;
    Ok(Json(Entries { entries: entries.into_iter().map(Entry::from).collect() }))
}

/// A message whose sender need not know whether it changed anything.
async fn order(engine: &Engine, id: String, input: Input) -> Accepted {
    match engine.tell(Target::Id(thread_id(id)?), input).await {
        Ok(_) | Err(store::Error::Ignored(Ignored::NothingToInterrupt)) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(DONE)
}

pub(super) async fn interrupt(State(engine): State<Arc<Engine>>, InPath(id): InPath<String>) -> Accepted {
    order(&engine, id, Input::Interrupt).await
}

/// A second closing changes nothing and sends nothing.
pub(super) async fn close(State(engine): State<Arc<Engine>>, InPath(id): InPath<String>) -> Accepted {
    match engine.tell(Target::Id(thread_id(id)?), Input::Close).await {
        Ok(_) | Err(store::Error::Ignored(Ignored::Closed)) => Ok(DONE),
        Err(error) => Err(error.into()),
    }
}

/// Where a fork begins.
#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Fork {
    /// The last entry that it inherits, or the nearest before it at which no call lacks its result; the last one of
    /// all if none is given.
    #[serde(default, deserialize_with = "whole")]
    #[schemars(range(max = u32::MAX))]
    at: Option<u32>,
}

pub(super) async fn fork(
    State(engine): State<Arc<Engine>>,
    InPath(id): InPath<String>,
    headers: HeaderMap,
    request: Body,
) -> Accepted<Thread> {
    let asked: Fork = read(&engine, &headers, request).await?;
    let mark = once(&headers, About::Thread(&id), &asked)?;
    let random = &engine.world.random;
    let fork = Target::Fork {
        source: thread_id(id)?,
        at: asked.at.map(Seq::from),
        id: new_thread_id(engine.now(), random.next()),
        incarnation: random.next(),
    };
    let message = Message { once: mark, ..Message::new(fork, Input::Begin { text: None }) };
    let receipt = engine.apply(Lane::External, message).await?;
    let row = engine.store.thread(&receipt.thread).await?;
    Ok((StatusCode::CREATED, Json(Thread::from(&row))))
}

pub(super) async fn resume(State(engine): State<Arc<Engine>>, InPath(id): InPath<String>) -> Accepted {
    order(&engine, id, Input::Resume).await
}

pub(super) async fn cancel(
    State(engine): State<Arc<Engine>>,
    InPath((id, call)): InPath<(String, String)>,
) -> Accepted {
    let (thread, call) = (thread_id(id)?, call_id(call)?);
    match engine.tell(Target::Id(thread.clone()), Input::Cancel { call: call.clone() }).await {
        Ok(_) => {}
        // Too late is as good as in time; a call that was never made is a mistake.
        Err(store::Error::Ignored(Ignored::SettledCall)) => {
            if !engine.store.knows_call(&thread, &call).await? {
                return Err(Ignored::UnknownCall.into());
            }
        }
        Err(error) => return Err(error.into()),
    }
    Ok(DONE)
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
    order(
        &engine,
        id,
        Input::Choose { call: call_id(call)?, selected: selected.map(|number| number as usize) },
    )
    .await
}

pub(super) async fn views(State(engine): State<Arc<Engine>>, InPath(id): InPath<String>) -> Answer<Views> {
    let row = engine.store.thread(&thread_id(id)?).await?;
    let views = engine.store.views(row.thread.key).await?;
    Ok(Json(Views { views: views.into_iter().map(View::from).collect() }))
}

fn wanted(parameters: HashMap<String, String>) -> Result<Wanted, Refused> {
    let given = Given::check(parameters, query::OF_LISTINGS)?;
    Ok(Wanted { after: given.place("cursor")?.unwrap_or_default(), limit: given.rows()? })
}

/// The rows of a page as they stand in the API, and its `next_cursor`.
fn shown<R, T: From<R>>(page: Page<R>) -> (Vec<T>, Option<String>) {
    let next = page.next.map(|cursor| cursor.to_string());
    (page.rows.into_iter().map(T::from).collect(), next)
}

pub(super) async fn calls(State(engine): State<Arc<Engine>>, Query(parameters): Parameters) -> Answer<Calls> {
    let (calls, next_cursor) = shown(engine.store.calls(wanted(parameters)?).await?);
    Ok(Json(Calls { calls, next_cursor }))
}

pub(super) async fn subscriptions(
    State(engine): State<Arc<Engine>>,
    Query(parameters): Parameters,
) -> Answer<Subscriptions> {
    let (subscriptions, next_cursor) = shown(engine.store.subscriptions(wanted(parameters)?).await?);
    Ok(Json(Subscriptions { subscriptions, next_cursor }))
}

pub(super) async fn timers(
    State(engine): State<Arc<Engine>>,
    Query(parameters): Parameters,
) -> Answer<Timers> {
    let (timers, next_cursor) = shown(engine.store.timers(wanted(parameters)?).await?);
    Ok(Json(Timers { timers, next_cursor }))
}

pub(super) async fn inbox(State(engine): State<Arc<Engine>>, Query(parameters): Parameters) -> Answer<Inbox> {
    let (items, next_cursor) = shown(engine.store.inbox(None, wanted(parameters)?).await?);
    Ok(Json(Inbox { items, next_cursor }))
}

pub(super) async fn tools(State(engine): State<Arc<Engine>>) -> Answer<Tools> {
    Ok(Json(Tools::from(&*engine.toolsets.survey(&*engine.store).await?)))
}

pub(super) async fn ready(State(engine): State<Arc<Engine>>) -> Result<&'static str, Refused> {
    engine.store.is_readable().await?;
    Ok("ready")
}

pub(super) async fn metrics(State(engine): State<Arc<Engine>>) -> Result<Response, Refused> {
    let text = engine.exposition().await?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response())
}
