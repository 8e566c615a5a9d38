//! The callback endpoint for tools. 200 means that the callback is stored, or was stored before.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use rap_agent::{Choice, Event, Ignored, Input, ToolResult};
use rap_io::body::ReceivedBody;
use rap_io::hashing::hash;
use rap_io::serve::Peer;
use rap_protocol::{Callback, EventId, ThreadId, parse_callback};
use sha2::{Digest, Sha256};

use super::admission::Sender;
use super::callback_auth::Verified;
use super::{ErrorResponse, PathParams, parse_body, read_body};
use crate::engine::{Engine, Forwarded};
use crate::store::transfer::TokenThread;
use crate::store::{DeliveryKind, DeliveryOutcome, DeliveryRecord, Error, Target, Visibility};
use crate::token::Grant;

/// Error code of a callback to a closed thread.
const THREAD_CLOSED: &str = "thread_closed";
/// Error code of a callback that the runtime to which its thread was moved has refused.
const REFUSED_AFTER_MOVE: &str = "refused_after_move";
/// Time after closing a thread in which refused callbacks are not recorded.
const CLOSING_GRACE: Duration = Duration::from_secs(60);
/// Headers that hold the event id if the body has none.
const EVENT_ID_HEADERS: [&str; 2] = ["webhook-id", "idempotency-key"];

pub(super) async fn callback(
    State(engine): State<Arc<Engine>>,
    PathParams(token): PathParams<String>,
    peer: Option<Extension<Peer>>,
    headers: HeaderMap,
    request: Body,
) -> Result<StatusCode, ErrorResponse> {
    let peer = peer.as_ref().map(|Extension(peer)| peer);
    let (began, began_at) = (Instant::now(), SystemTime::now());
    let mut grant = engine.tokens.read(&token, engine.now());
    let mut named = None;
    let taken = match &mut grant {
        Some(grant) => take(&engine, (grant, &token), (&headers, peer), request, &mut named).await,
        None => {
            let message = "the callback URL was not issued by this runtime, or it has expired";
            Err(ErrorResponse::new(StatusCode::UNAUTHORIZED, "bad_token", message))
        }
    };
    if let (Some(telemetry), Some(grant)) = (&engine.telemetry, &grant) {
        let status = taken.as_ref().map_or_else(ErrorResponse::status, |()| StatusCode::OK);
        telemetry.callback(grant, named.as_ref(), &headers, began_at, status);
    }
    match &taken {
        Err(error) if error.is_final() => {
            let kind = DeliveryKind::Callback;
            engine.metrics.count_delivery(kind, DeliveryOutcome::Refused);
            if let Some(grant) = &mut grant {
                follow_move(&engine, grant).await.ok();
                note_problem(&engine, grant, error).await;
            }
            if is_expected(&engine, error, named.as_ref()).await {
                tracing::info!(
                    thread = named.as_ref().map(ThreadId::as_str),
                    "a callback of a closed thread was discarded"
                );
            } else {
                engine.record_delivery(record(&engine, grant.as_ref(), named, error));
            }
        }
        // The tool is expected to retry.
        Err(_) => engine.metrics.count_delivery(DeliveryKind::Callback, DeliveryOutcome::Retrying),
        Ok(()) => {
            engine.metrics.count_delivery(DeliveryKind::Callback, DeliveryOutcome::Delivered);
            engine.metrics.callback.observe_duration(began.elapsed());
        }
    }
    taken.map(|()| StatusCode::OK)
}

/// Shows a malformed or too large callback to users as the problem of its open call.
async fn note_problem(engine: &Engine, grant: &Grant, error: &ErrorResponse) {
    let Some(why) = error.problem() else { return };
    let input = Input::CallbackRefused { call: grant.call.clone(), why };
    // The input is ignored if the call is no longer open.
    engine.apply_external(Target::Key(grant.thread), input).await.ok();
}

/// Returns true for a callback that arrives shortly after its thread was closed: the tool may not know yet.
async fn is_expected(engine: &Engine, error: &ErrorResponse, thread: Option<&ThreadId>) -> bool {
    if error.code() != THREAD_CLOSED {
        return false;
    }
    let Some(thread) = thread else { return false };
    let row = engine.store.thread(thread, &Visibility::All).await;
    row.is_ok_and(|row| engine.now().since(row.updated_at) < CLOSING_GRACE)
}

/// Returns the delivery log record of a refused callback. An unknown thread is not named.
fn record(
    engine: &Engine,
    grant: Option<&Grant>,
    thread_id: Option<ThreadId>,
    error: &ErrorResponse,
) -> DeliveryRecord {
    let known = grant.filter(|_| !matches!(error.code(), "no_such_thread" | REFUSED_AFTER_MOVE));
    DeliveryRecord {
        kind: DeliveryKind::Callback,
        thread: known.map(|grant| grant.thread),
        thread_id,
        call: known.map(|grant| grant.call.clone()),
        server: None,
        topic: error.code().to_owned(),
        outcome: DeliveryOutcome::Refused,
        attempts: 1,
        detail: error.to_string(),
        at: engine.now(),
    }
}

/// If the thread of a token was moved here, sets its key in this database. Returns whether it was.
async fn follow_move(engine: &Engine, grant: &mut Grant) -> Result<bool, Error> {
    let moved = engine.store.moved_thread(grant.thread, grant.incarnation).await?;
    if let Some(key) = moved {
        grant.thread = key;
    }
    Ok(moved.is_some())
}

async fn take(
    engine: &Arc<Engine>,
    (grant, token): (&mut Grant, &str),
    (headers, peer): (&HeaderMap, Option<&Peer>),
    request: Body,
    named: &mut Option<ThreadId>,
) -> Result<(), ErrorResponse> {
    let Some(_share) = engine.admission.callback(grant.thread, &grant.call) else {
        let message = "too many requests with this callback URL at once; try again later";
        return Err(ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message));
    };
    let received = read_body(engine, Sender::Tool, headers, request).await?;
    let requirements = &engine.callback_requirements;
    let verified = verify(engine, grant, (headers, peer), &received).await?;
    if verified.as_ref().is_some_and(|verified| requirements.is_repeated(verified)) {
        return Ok(());
    }
    if let Applied::Elsewhere(destination) = apply(engine, grant, headers, &received, named).await? {
        return forward(engine, &destination, token, headers, &received).await;
    }
    if let Some(verified) = verified {
        requirements.remember(verified, engine.now());
    }
    Ok(())
}

/// Checks the credentials of a callback. Returns `None` if no tool server has to show any.
async fn verify(
    engine: &Arc<Engine>,
    grant: &mut Grant,
    (headers, peer): (&HeaderMap, Option<&Peer>),
    received: &ReceivedBody,
) -> Result<Option<Verified>, ErrorResponse> {
    if engine.callback_requirements.is_empty() {
        return Ok(None);
    }
    let mut server = engine.store.server_of_call(grant.thread, &grant.call).await?;
    if server.is_none() && follow_move(engine, grant).await? {
        server = engine.store.server_of_call(grant.thread, &grant.call).await?;
    }
    // A call that is not known any more is refused later.
    let server = server.unwrap_or_default();
    let (engine, call, bytes) = (Arc::clone(engine), grant.call.clone(), received.bytes.clone());
    let (headers, peer) = (headers.clone(), peer.cloned());
    let verify = move || {
        let shown = (&headers, peer.as_ref());
        engine.callback_requirements.verify(&server, call.as_str(), shown, &bytes, engine.now())
    };
    hash(received.bytes.len(), verify).await.map(Some)
}

/// Passes a callback on to the runtime that its thread was moved to.
async fn forward(
    engine: &Engine,
    destination: &str,
    token: &str,
    headers: &HeaderMap,
    received: &ReceivedBody,
) -> Result<(), ErrorResponse> {
    let message = match engine.forward_callback(destination, token, headers, received.bytes.clone()).await {
        Forwarded::Accepted => return Ok(()),
        Forwarded::Refused(status) => {
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::NOT_FOUND);
            let message = "the thread was moved to another runtime, which refused the callback";
            return Err(ErrorResponse::new(status, REFUSED_AFTER_MOVE, message));
        }
        Forwarded::Unavailable(why) => why,
    };
    tracing::warn!(why = message, "a callback of a thread that was moved could not be passed on");
    let message = "the thread was moved to another runtime, which cannot be reached; try again later";
    Err(ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "moving", message))
}

/// Outcome of a callback that was not refused.
enum Applied {
    Here,
    /// Its thread was moved to the runtime with this base URL.
    Elsewhere(String),
}

/// Applies a callback whose credentials are valid.
async fn apply(
    engine: &Engine,
    grant: &mut Grant,
    headers: &HeaderMap,
    received: &ReceivedBody,
    named: &mut Option<ThreadId>,
) -> Result<Applied, ErrorResponse> {
    let callback = parse(engine, received).await?;
    let (thread, input) = read(callback, grant, headers, engine.settings.limits.view_bytes)?;
    if matches!(input, Input::Event { .. }) && !engine.admission.event(grant.thread, &grant.call) {
        let message = "too many events of this subscription in a second; try again later";
        return Err(ErrorResponse::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_events", message));
    }
    *named = Some(thread.clone());
    let target = |grant: &Grant| Target::Token {
        key: grant.thread,
        incarnation: grant.incarnation,
        id: thread.clone(),
    };
    let mut applied = engine.apply_external(target(grant), input).await;
    if matches!(applied, Err(Error::NoThread | Error::WrongThread)) {
        if follow_move(engine, grant).await? {
            let (_, input) =
                read(parse(engine, received).await?, grant, headers, engine.settings.limits.view_bytes)?;
            applied = engine.apply_external(target(grant), input).await;
        } else if engine.store.parcel_of(&thread).await?.is_some() {
            applied = Err(Error::Moving);
        } else {
            let moved = TokenThread { key: grant.thread, incarnation: grant.incarnation };
            if let Some(destination) = engine.store.moved_to(moved).await? {
                return Ok(Applied::Elsewhere(destination));
            }
        }
    }
    rap_io::crash::point("before_callback_answer");
    match applied {
        Ok(_) => Ok(Applied::Here),
        // The callback was accepted before, or its call is settled. The tool need not retry.
        Err(Error::Ignored(Ignored::Duplicate | Ignored::SettledCall)) => Ok(Applied::Here),
        Err(Error::Ignored(Ignored::Closed)) => {
            Err(ErrorResponse::new(StatusCode::GONE, THREAD_CLOSED, "the thread is closed"))
        }
        Err(error) => Err(error.into()),
    }
}

async fn parse(engine: &Engine, received: &ReceivedBody) -> Result<Callback, ErrorResponse> {
    let parse =
        |bytes: &[u8]| parse_callback(bytes).map_err(|invalid| ErrorResponse::invalid(invalid.to_string()));
    parse_body(engine, received, parse).await
}

/// Returns the thread that the body names and the input. Body and token have to name the same call.
fn read(
    callback: Callback,
    grant: &Grant,
    headers: &HeaderMap,
    view_bytes: usize,
) -> Result<(ThreadId, Input), ErrorResponse> {
    let call = grant.call.clone();
    let named = match &callback {
        Callback::ToolResult(result) => Some(&result.id),
        Callback::SubscriptionEvent(event) => Some(&event.tool_call_id),
        Callback::Oauth(oauth) => Some(&oauth.id),
        Callback::UserChoice(choice) => Some(&choice.id),
        Callback::ViewUpdate(_) => None,
    };
    if named.is_some_and(|named| *named != call) {
        let message = "the callback URL belongs to another call";
        return Err(ErrorResponse::new(StatusCode::FORBIDDEN, "wrong_call", message));
    }
    let thread = callback.group_id().clone();
    let input = match callback {
        Callback::ToolResult(result) => {
            let (content, display, subscription) = (result.body, result.display_as, result.subscription);
            Input::ToolResult { call, result: ToolResult { content, display, subscription } }
        }
        Callback::SubscriptionEvent(event) => {
            let id = event.event_id.or_else(|| event_id(headers));
            let (text, associative, is_final) = (event.text, event.associative, event.is_final);
            let event = Event { id, text, associative, is_final };
            Input::Event { call, event }
        }
        Callback::Oauth(oauth) => Input::SignInRequested { call, url: oauth.auth_url },
        Callback::UserChoice(choice) => {
            let digest = digest(choice.response_url.expose());
            let choice = Choice {
                prompt: choice.prompt,
                choices: choice.choices,
                default: choice.default,
                response_url: choice.response_url,
                digest,
            };
            Input::ChoiceRequested { call, choice }
        }
        Callback::ViewUpdate(view) => {
            if view.content.to_string().len() > view_bytes {
                let message = format!("the content of a view must not exceed {view_bytes} bytes");
                return Err(ErrorResponse::new(StatusCode::PAYLOAD_TOO_LARGE, "view_too_large", message));
            }
            Input::View { call, view_type: view.view_type, content: view.content }
        }
    };
    Ok((thread, input))
}

fn event_id(headers: &HeaderMap) -> Option<EventId> {
    let given = EVENT_ID_HEADERS.iter().find_map(|name| headers.get(*name))?;
    EventId::new(given.to_str().ok()?).ok()
}

/// Returns a digest that distinguishes the questions of one call, whose URLs are stored encrypted. It is stored, so the
/// function must never change.
fn digest(text: &str) -> u64 {
    let digest = Sha256::digest(text);
    let (first, _) = digest.split_first_chunk::<8>().expect("bug: a digest has 32 bytes");
    u64::from_le_bytes(*first)
}
