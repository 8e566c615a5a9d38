//! The client API under /v1.

use std::collections::HashMap;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use rap_agent::{Ignored, Input, Seq, UserMessage, check_content};
use rap_api::{
    Answer, Calls, CreateThread, Done, Entries, Fork, ID_CHARS, Inbox, ListedCall, Nodes, SendMessage,
    SessionUsage, Status, Subscriptions, TITLE_CHARS, Thread, ThreadOrder, Threads, Timers, Tools, Turn,
    View, Views,
};
use rap_io::body::ReceivedBody;
use rap_io::hashing::in_place;
use rap_io::metrics::CONTENT_TYPE;
use rap_protocol::{CallId, ThreadId, UserId, check_json, parse_content};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::admission::Sender;
use super::json::{
    self, add_usual_durations, entry, node, thread_with_displays, time, tools_page, usual_duration,
};
use super::principal::Principal;
use super::query::{self, QueryParams};
use super::{ErrorResponse, PathParams, parse_body, read_body};
use crate::engine::Engine;
use crate::store::{
    self, HistoryPage, IdempotencyKey, Message, NewThread, Page, PageRequest, Receipt, Target, ThreadFilter,
    ThreadRow, Visibility, new_thread_id,
};
use crate::toolsets::UsualDurations;

/// Size at which a page of a history ends, in bytes. It holds at least one entry.
const HISTORY_BYTES: usize = 1024 * 1024;
/// Maximum length of an Idempotency-Key, in bytes.
pub(super) const KEY_BYTES: usize = 256;

pub(super) type ApiResult<T> = Result<Json<T>, ErrorResponse>;
pub(super) type Accepted<T = Done> = Result<(StatusCode, Json<T>), ErrorResponse>;

pub(super) const DONE: (StatusCode, Json<Done>) = (StatusCode::ACCEPTED, Json(Done {}));

/// Maximum memory of the parsed form of a request, besides its texts, in bytes.
const PARSED_BYTES: usize = 16 * 1024 * 1024;

/// Reads a request. Also returns its body, which has to be kept until the request is applied, so that it counts against
/// the memory of its sender for as long as it uses some.
pub(super) async fn read<T: DeserializeOwned + Send + 'static>(
    engine: &Engine,
    sender: Sender,
    headers: &HeaderMap,
    request: Body,
) -> Result<(T, ReceivedBody), ErrorResponse> {
    let received = read_body(engine, sender, headers, request).await?;
    let parse = |bytes: &[u8]| {
        check_json(bytes, PARSED_BYTES).map_err(|invalid| ErrorResponse::invalid(invalid.to_string()))?;
        serde_json::from_slice(bytes).map_err(|error| ErrorResponse::invalid(error.to_string()))
    };
    let request = parse_body(engine, &received, parse).await?;
    Ok((request, received))
}

/// Scope in which a client's key is unique.
enum KeyScope<'a> {
    NewThreads,
    Thread(&'a str),
}

/// Reads the Idempotency-Key, which makes a repeat of the request harmless. It belongs to the client and is unique
/// within `scope`. Requests are compared after parsing, so that a default may be given or left out.
fn idempotency(
    principal: &Principal,
    headers: &HeaderMap,
    scope: KeyScope<'_>,
    (request, received): (&impl Serialize, &ReceivedBody),
) -> Result<Option<IdempotencyKey>, ErrorResponse> {
    let Some(key) = headers.get("idempotency-key") else { return Ok(None) };
    let plain = key.as_bytes().iter().all(|byte| matches!(byte, b' '..=b'~'));
    if !plain || !(1..=KEY_BYTES).contains(&key.len()) {
        return Err(ErrorResponse::invalid(format!(
            "Idempotency-Key: expected 1 to {KEY_BYTES} printable ASCII characters"
        )));
    }
    // Ids are never empty, so the empty scope cannot be that of a thread.
    let scope = match scope {
        KeyScope::NewThreads => "",
        KeyScope::Thread(id) => id,
    };
    let digest = |client: &[u8]| {
        let length = (scope.len() as u64).to_be_bytes();
        Sha256::digest([client, &length, scope.as_bytes(), key.as_bytes()].concat()).into()
    };
    let hash = || Sha256::digest(serde_json::to_vec(request).expect("bug: a request is JSON"));
    Ok(Some(IdempotencyKey {
        key: digest(principal.key_space()),
        former_key: principal.is_configured().then(|| digest(&[])),
        request: in_place(received.bytes.len(), hash).into(),
    }))
}

/// Parses an id from the path. A malformed id is 404.
pub(super) fn thread_id(text: String) -> Result<ThreadId, ErrorResponse> {
    ThreadId::new(text).map_err(|_| store::Error::NoThread.into())
}

fn call_id(text: String) -> Result<CallId, ErrorResponse> {
    CallId::new(text).map_err(|_| Ignored::UnknownCall.into())
}

/// Checks a thread id that a client chose. The rules are stricter than on the wire, because the id is used in paths and
/// file names.
fn client_thread_id(text: String) -> Result<ThreadId, ErrorResponse> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if text.is_empty() || text.len() > ID_CHARS || text.starts_with('.') || !text.chars().all(plain) {
        let message = "id: expected 1 to 128 letters, digits, `_`, `-` and `.`, not starting with a dot";
        return Err(ErrorResponse::invalid(message));
    }
    ThreadId::new(text).map_err(|error| ErrorResponse::invalid(format!("id: {error}")))
}

pub(super) async fn create_thread(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    headers: HeaderMap,
    request: Body,
) -> Accepted<Thread> {
    let (body, received): (CreateThread, _) = read(&engine, principal.sender(), &headers, request).await?;
    let mark = idempotency(&principal, &headers, KeyScope::NewThreads, (&body, &received))?;
    let CreateThread { id, agent, user_id, title, message, content } = body;
    let message = user_message(message, content)?;
    let id = match id {
        Some(id) => unmoved(&engine, &principal, client_thread_id(id)?).await?,
        None => new_thread_id(engine.now(), engine.world.random.next()),
    };
    let user_id = owner(&principal, user_id)?;
    if title.as_ref().is_some_and(|title| title.chars().nth(TITLE_CHARS).is_some()) {
        return Err(ErrorResponse::invalid(format!("title: expected at most {TITLE_CHARS} characters")));
    }
    let agent = known_agent(&engine, agent)?;
    let new = NewThread { id, incarnation: engine.world.random.next(), agent, user_id, title };
    let begin = principal.message(Target::New(new), Input::Begin { message });
    let receipt = principal.apply(&engine, Message { idempotency_key: mark, ..begin }).await?;
    rap_io::crash::point("before_client_answer");
    let _reader = engine.admission.reader(principal.client).await;
    let row = engine.store.thread(&receipt.thread, &principal.visible).await?;
    Ok((StatusCode::CREATED, Json(Thread::from(&row))))
}

/// Checks the content of a user's message. Returns `None` if there is neither a text nor further content.
fn user_message(text: Option<String>, content: Vec<Value>) -> Result<Option<UserMessage>, ErrorResponse> {
    let content = parse_content(content).map_err(|error| ErrorResponse::invalid(error.to_string()))?;
    check_content(&content).map_err(ErrorResponse::invalid)?;
    if text.is_none() && content.is_empty() {
        return Ok(None);
    }
    Ok(Some(UserMessage { text: text.unwrap_or_default(), content }))
}

/// Refuses the id of a thread that is being moved, which may come back into use. A client that sees one user's threads
/// gets the answer for any id that is taken.
async fn unmoved(engine: &Engine, principal: &Principal, id: ThreadId) -> Result<ThreadId, ErrorResponse> {
    let _reader = engine.admission.reader(principal.client).await;
    match (engine.store.parcel_of(&id).await?, &principal.visible) {
        (None, _) => Ok(id),
        (Some(_), Visibility::All) => Err(store::Error::Moving.into()),
        (Some(_), Visibility::User(_)) => Err(store::Error::Exists.into()),
    }
}

/// Returns the user of a new thread.
fn owner(principal: &Principal, given: Option<String>) -> Result<Option<UserId>, ErrorResponse> {
    let given = given.map(UserId::new).transpose();
    let given = given.map_err(|error| ErrorResponse::invalid(format!("user_id: {error}")))?;
    match (&principal.visible, given) {
        (Visibility::All, given) => Ok(given),
        (Visibility::User(own), Some(given)) if given != *own => {
            let message = "user_id: this token creates threads of its own user only; leave user_id out";
            Err(ErrorResponse::new(StatusCode::FORBIDDEN, "wrong_user", message))
        }
        (Visibility::User(own), _) => Ok(Some(own.clone())),
    }
}

fn known_agent(engine: &Engine, name: Option<String>) -> Result<String, ErrorResponse> {
    let agents = &engine.settings.agents;
    let Some(name) = name else {
        return Ok(agents.first().map(|agent| agent.name.clone()).unwrap_or_default());
    };
    if agents.iter().any(|agent| agent.name == name) {
        return Ok(name);
    }
    let names: Vec<&str> = agents.iter().map(|agent| agent.name.as_str()).collect();
    Err(ErrorResponse::invalid(format!("agent: no such agent; configured agents: {}", names.join(", "))))
}

/// Query parameters by name.
pub(super) type Parameters = Query<HashMap<String, String>>;

pub(super) async fn threads(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    Query(parameters): Parameters,
) -> ApiResult<Threads> {
    let params = QueryParams::check(parameters, query::THREAD_PARAMETERS)?;
    let page_request =
        PageRequest { after: params.parsed("cursor")?.unwrap_or_default(), limit: params.rows()? };
    let filter = ThreadFilter {
        status: params.one_of("status", &Status::ALL, Status::as_str)?,
        parent: params.thread("parent")?,
        phrase: params.phrase()?,
        roots: params.one_of("roots", &[false, true], |roots| if roots { "true" } else { "false" })?
            == Some(true),
        order: params.one_of("order", &ThreadOrder::ALL, ThreadOrder::as_str)?.unwrap_or(ThreadOrder::Oldest),
        visible: principal.visible,
        page_request,
    };
    let page = engine.store.threads(filter).await?;
    let next_cursor = page.next.map(|cursor| cursor.to_string());
    let (known, now) = (known_durations(&engine, page.rows.iter()).await?, engine.now());
    let thread = |row: &ThreadRow| {
        let mut thread = Thread::from(row);
        add_usual_durations(&mut thread, row, &known, now);
        thread
    };
    Ok(Json(Threads { threads: page.rows.iter().map(thread).collect(), next_cursor }))
}

/// Returns the usual durations of the open calls of these threads.
async fn known_durations(
    engine: &Engine,
    rows: impl Iterator<Item = &ThreadRow>,
) -> Result<UsualDurations, ErrorResponse> {
    let servers = rows.flat_map(|row| row.head.open_calls()).map(|call| call.server.0.as_str());
    Ok(engine.toolsets.usual_durations(servers.collect()).await?)
}

pub(super) async fn thread(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams(id): PathParams<String>,
) -> ApiResult<Thread> {
    let row = engine.store.thread(&thread_id(id)?, &principal.visible).await?;
    let displays = engine.store.displays(&row).await?;
    let mut thread = thread_with_displays(&row, &displays);
    let known = known_durations(&engine, std::iter::once(&row)).await?;
    add_usual_durations(&mut thread, &row, &known, engine.now());
    Ok(Json(thread))
}

pub(super) async fn message(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams(id): PathParams<String>,
    headers: HeaderMap,
    request: Body,
) -> Accepted<Turn> {
    let (body, received): (SendMessage, _) = read(&engine, principal.sender(), &headers, request).await?;
    let mark = idempotency(&principal, &headers, KeyScope::Thread(&id), (&body, &received))?;
    let SendMessage { text, content, on_busy } = body;
    let message = user_message(Some(text), content)?.unwrap_or_default();
    let input = Input::UserMessage { message, on_busy };
    let message = principal.message(Target::Id(thread_id(id)?), input);
    let receipt = principal.apply(&engine, Message { idempotency_key: mark, ..message }).await?;
    Ok((StatusCode::ACCEPTED, Json(Turn { turn: receipt.turn })))
}

pub(super) async fn history(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams(id): PathParams<String>,
    Query(parameters): Parameters,
) -> Result<Response, ErrorResponse> {
    let params = QueryParams::check(parameters, query::HISTORY_PARAMETERS)?;
    let (after, rows) = (params.parsed::<u32>("after")?.unwrap_or(0), params.rows()?);
    let row = engine.store.thread(&thread_id(id)?, &principal.visible).await?;
    let before = params.parsed::<u32>("before")?.map_or(Seq::MAX, Seq::from);
    let up_to = row.head.seq().min(before.saturating_sub(1));
    // The last entries before one that is named, else the first ones.
    let first = if before == Seq::MAX { 0 } else { up_to.saturating_sub(rows as Seq) };
    let page = HistoryPage { after: first.max(after.into()), up_to, rows, bytes: HISTORY_BYTES };
    // A large page is refused before it is read. The answer is counted when its size is known.
    let bytes = engine.store.history_bytes(&row.thread, page).await?;
    let _reader = engine.admission.large_reader(principal.client, bytes).await;
    drop(engine.admission.response(principal.client, bytes)?);
    let entries = engine.store.history(&row.thread, page).await?;
    let last = entries.last().map(|(seq, _)| *seq);
    let next_after = last.filter(|seq| *seq < up_to);
    let encode =
        || Json(Entries { entries: entries.into_iter().map(entry).collect(), next_after }).into_response();
    Ok(in_place(bytes, encode))
}

async fn apply(
    engine: &Engine,
    principal: &Principal,
    thread: ThreadId,
    input: Input,
) -> Result<Receipt, store::Error> {
    principal.apply(engine, principal.message(Target::Id(thread), input)).await
}

/// Applies an input whose sender need not know whether it changed anything.
async fn apply_command(engine: &Engine, principal: &Principal, id: String, input: Input) -> Accepted {
    match apply(engine, principal, thread_id(id)?, input).await {
        Ok(_) | Err(store::Error::Ignored(Ignored::NothingToInterrupt)) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(DONE)
}

pub(super) async fn interrupt(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams(id): PathParams<String>,
) -> Accepted {
    apply_command(&engine, &principal, id, Input::Interrupt).await
}

/// Closing a closed thread changes nothing and notifies no server.
pub(super) async fn close(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams(id): PathParams<String>,
) -> Accepted {
    match apply(&engine, &principal, thread_id(id)?, Input::Close).await {
        Ok(_) | Err(store::Error::Ignored(Ignored::Closed)) => Ok(DONE),
        Err(error) => Err(error.into()),
    }
}

pub(super) async fn fork(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams(id): PathParams<String>,
    headers: HeaderMap,
    request: Body,
) -> Accepted<Thread> {
    let (body, received): (Fork, _) = read(&engine, principal.sender(), &headers, request).await?;
    let mark = idempotency(&principal, &headers, KeyScope::Thread(&id), (&body, &received))?;
    let random = &engine.world.random;
    let fork = Target::Fork {
        source: thread_id(id)?,
        at: body.at.map(Seq::from),
        id: new_thread_id(engine.now(), random.next()),
        incarnation: random.next(),
    };
    let message =
        Message { idempotency_key: mark, ..principal.message(fork, Input::Begin { message: None }) };
    let receipt = principal.apply(&engine, message).await?;
    let _reader = engine.admission.reader(principal.client).await;
    let row = engine.store.thread(&receipt.thread, &principal.visible).await?;
    Ok((StatusCode::CREATED, Json(Thread::from(&row))))
}

pub(super) async fn resume(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams(id): PathParams<String>,
) -> Accepted {
    apply_command(&engine, &principal, id, Input::Resume).await
}

pub(super) async fn cancel(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams((id, call)): PathParams<(String, String)>,
) -> Accepted {
    let (thread, call) = (thread_id(id)?, call_id(call)?);
    match apply(&engine, &principal, thread.clone(), Input::Cancel { call: call.clone() }).await {
        Ok(_) => {}
        // A call that is settled already needs no cancellation; an unknown call is an error.
        Err(store::Error::Ignored(Ignored::SettledCall)) => {
            let _reader = engine.admission.reader(principal.client).await;
            if !engine.store.has_call(&thread, &call).await? {
                return Err(Ignored::UnknownCall.into());
            }
        }
        Err(error) => return Err(error.into()),
    }
    Ok(DONE)
}

pub(super) async fn choice(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams((id, call)): PathParams<(String, String)>,
    headers: HeaderMap,
    request: Body,
) -> Accepted {
    let (Answer { selected, dismiss }, _) = read(&engine, principal.sender(), &headers, request).await?;
    if selected.is_some() == dismiss {
        return Err(ErrorResponse::invalid(
            "give either `selected`, an index starting at 0, or `dismiss: true`",
        ));
    }
    apply_command(
        &engine,
        &principal,
        id,
        Input::Choose { call: call_id(call)?, selected: selected.map(|number| number as usize) },
    )
    .await
}

pub(super) async fn views(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams(id): PathParams<String>,
    Query(parameters): Parameters,
) -> ApiResult<Views> {
    let params = QueryParams::check(parameters, query::CURSOR_PARAMETERS)?;
    let row = engine.store.thread(&thread_id(id)?, &principal.visible).await?;
    let mut page = engine.store.views(row.thread.key, params.parsed("cursor")?).await?;
    page.rows.sort_by_key(|view| std::cmp::Reverse(view.at));
    let next_cursor = page.next.map(|key| key.to_string());
    Ok(Json(Views { views: page.rows.into_iter().map(View::from).collect(), next_cursor }))
}

pub(super) async fn usage(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    PathParams(id): PathParams<String>,
) -> ApiResult<SessionUsage> {
    let row = engine.store.thread(&thread_id(id)?, &principal.visible).await?;
    let (session, threads) = engine.store.session_usage(row.thread.session).await?;
    let thread = json::usage(row.head.usage());
    Ok(Json(SessionUsage { thread, session: json::usage(session), threads }))
}

pub(super) fn page_request(parameters: HashMap<String, String>) -> Result<PageRequest, ErrorResponse> {
    let params = QueryParams::check(parameters, query::PAGE_PARAMETERS)?;
    Ok(PageRequest { after: params.parsed("cursor")?.unwrap_or_default(), limit: params.rows()? })
}

/// Converts the rows of a page for the API. Also returns its `next_cursor`.
pub(super) fn page_fields<R, T: From<R>>(page: Page<R>) -> (Vec<T>, Option<String>) {
    let next = page.next.map(|cursor| cursor.to_string());
    (page.rows.into_iter().map(T::from).collect(), next)
}

pub(super) async fn calls(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    Query(parameters): Parameters,
) -> ApiResult<Calls> {
    let (mut calls, next_cursor): (Vec<ListedCall>, _) =
        page_fields(engine.store.calls(&principal.visible, page_request(parameters)?).await?);
    let servers = calls.iter().map(|call| call.server.as_str()).collect();
    let (known, now) = (engine.toolsets.usual_durations(servers).await?, time(engine.now()));
    for call in &mut calls {
        let elapsed = now.since(call.since);
        (call.usually, call.overdue) = usual_duration(&known, (&call.server, &call.tool), elapsed);
    }
    Ok(Json(Calls { calls, next_cursor }))
}

pub(super) async fn subscriptions(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    Query(parameters): Parameters,
) -> ApiResult<Subscriptions> {
    let (subscriptions, next_cursor) =
        page_fields(engine.store.subscriptions(&principal.visible, page_request(parameters)?).await?);
    Ok(Json(Subscriptions { subscriptions, next_cursor }))
}

pub(super) async fn timers(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    Query(parameters): Parameters,
) -> ApiResult<Timers> {
    let (timers, next_cursor) =
        page_fields(engine.store.timers(&principal.visible, page_request(parameters)?).await?);
    Ok(Json(Timers { timers, next_cursor }))
}

pub(super) async fn inbox(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    Query(parameters): Parameters,
) -> ApiResult<Inbox> {
    let page = engine.store.inbox(None, &principal.visible, page_request(parameters)?).await?;
    let (items, next_cursor) = page_fields(page);
    Ok(Json(Inbox { items, next_cursor }))
}

pub(super) async fn tools(
    State(engine): State<Arc<Engine>>,
    Query(parameters): Parameters,
) -> ApiResult<Tools> {
    let params = QueryParams::check(parameters, query::CURSOR_PARAMETERS)?;
    let after = params.parsed::<String>("cursor")?;
    let tools = engine.toolsets.latest().await?;
    Ok(Json(tools_page(&engine.toolsets, &tools, after.as_deref(), engine.now())))
}

/// Lists the nodes of the database. A database that only one node can use has this one. A client that sees one user's
/// threads gets none.
pub(super) async fn nodes(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    Query(parameters): Parameters,
) -> ApiResult<Nodes> {
    let limit = page_request(parameters)?.limit;
    // The figures of a node reveal something about the threads of all users.
    let mut nodes = match principal.visible {
        Visibility::All => engine.nodes().await?,
        Visibility::User(_) => Vec::new(),
    };
    nodes.truncate(limit);
    Ok(Json(Nodes { nodes: nodes.into_iter().map(node).collect(), next_cursor: None }))
}

pub(super) async fn ready(State(engine): State<Arc<Engine>>) -> Result<&'static str, ErrorResponse> {
    let _reader = engine.admission.readiness_reader().await;
    engine.store.is_readable().await?;
    Ok("ready")
}

pub(super) async fn metrics(State(engine): State<Arc<Engine>>) -> Result<Response, ErrorResponse> {
    let Some(_reader) = engine.admission.metrics_reader().await else {
        let message = "too many requests for the metrics at once; try again later";
        return Err(ErrorResponse::new(StatusCode::TOO_MANY_REQUESTS, "too_many", message));
    };
    let text = engine.exposition().await?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response())
}
