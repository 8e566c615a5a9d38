//! The callback endpoint: where tools speak. 200 means that what was said is on disk, or was there before.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use rap_agent::{Choice, Event, Ignored, Input, ToolResult};
use rap_protocol::{Callback, EventId, ThreadId, parse_callback};
use sha2::{Digest, Sha256};

use super::{InPath, Refused, body};
use crate::engine::Engine;
use crate::store::{DeliveryKind, DeliveryOutcome, DeliveryRecord, Error, Target};
use crate::token::Grant;

/// The code of a refusal by a closed thread.
const THREAD_CLOSED: &str = "thread_closed";
/// How long after a closing its refusals are not recorded.
const CLOSING_GRACE: Duration = Duration::from_secs(60);
/// Headers that name an event where its body does not.
const EVENT_ID_HEADERS: [&str; 2] = ["webhook-id", "idempotency-key"];

pub(super) async fn callback(
    State(engine): State<Arc<Engine>>,
    InPath(token): InPath<String>,
    headers: HeaderMap,
    request: Body,
) -> Result<StatusCode, Refused> {
    let began = Instant::now();
    let grant = engine.tokens.read(&token, engine.now());
    let mut named = None;
    let taken = match &grant {
        Some(grant) => take(&engine, grant, &headers, request, &mut named).await,
        None => {
            let message = "the callback URL is not one of this runtime's, or it has expired";
            Err(Refused::new(StatusCode::UNAUTHORIZED, "bad_token", message))
        }
    };
    match &taken {
        Err(refused) if refused.is_final() => {
            let kind = DeliveryKind::Callback;
            engine.metrics.delivery(kind, DeliveryOutcome::Refused);
            if let Some(grant) = &grant {
                note_problem(&engine, grant, refused).await;
            }
            if !is_expected(&engine, refused, named.as_ref()).await {
                engine.record_delivery(record(&engine, grant.as_ref(), named, refused));
            }
        }
        // The tool has to try again.
        Err(_) => engine.metrics.delivery(DeliveryKind::Callback, DeliveryOutcome::Retrying),
        Ok(()) => {
            engine.metrics.delivery(DeliveryKind::Callback, DeliveryOutcome::Delivered);
            engine.metrics.callback.took(began.elapsed());
        }
    }
    taken.map(|()| StatusCode::OK)
}

/// A malformed or too large callback of an open call is shown to people as the reason why it waits.
async fn note_problem(engine: &Engine, grant: &Grant, refused: &Refused) {
    let Some(why) = refused.problem() else { return };
    let input = Input::CallbackRefused { call: grant.call.clone(), why };
    // A call that is not open has no problem.
    engine.tell(Target::Key(grant.thread), input).await.ok();
}

/// A tool that has not heard of the closing yet may well send something.
async fn is_expected(engine: &Engine, refused: &Refused, thread: Option<&ThreadId>) -> bool {
    if refused.code() != THREAD_CLOSED {
        return false;
    }
    let Some(thread) = thread else { return false };
    let row = engine.store.thread(thread).await;
    row.is_ok_and(|row| engine.now().since(row.updated_at) < CLOSING_GRACE)
}

/// A refusal for the ledger. A thread that is not here is not named.
fn record(
    engine: &Engine,
    grant: Option<&Grant>,
    thread_id: Option<ThreadId>,
    refused: &Refused,
) -> DeliveryRecord {
    let known = grant.filter(|_| refused.code() != "no_such_thread");
    DeliveryRecord {
        kind: DeliveryKind::Callback,
        thread: known.map(|grant| grant.thread),
        thread_id,
        call: known.map(|grant| grant.call.clone()),
        server: None,
        topic: refused.code().to_owned(),
        outcome: DeliveryOutcome::Refused,
        attempts: 1,
        detail: refused.to_string(),
        at: engine.now(),
    }
}

async fn take(
    engine: &Engine,
    grant: &Grant,
    headers: &HeaderMap,
    request: Body,
    named: &mut Option<ThreadId>,
) -> Result<(), Refused> {
    let bytes = body(headers, request, engine.settings.limits.body).await?;
    let callback = parse_callback(&bytes).map_err(|invalid| Refused::invalid(invalid.to_string()))?;
    let (thread, input) = read(callback, grant, headers, engine.settings.limits.view_bytes)?;
    *named = Some(thread.clone());
    let target = Target::Token { key: grant.thread, incarnation: grant.incarnation, id: thread };
    match engine.tell(target, input).await {
        Ok(_) => Ok(()),
        // It was taken before, or nobody waits for it any more: the tool has done its part.
        Err(Error::Ignored(Ignored::Duplicate | Ignored::SettledCall)) => Ok(()),
        Err(Error::Ignored(Ignored::Closed)) => {
            Err(Refused::new(StatusCode::GONE, THREAD_CLOSED, "the thread is closed"))
        }
        Err(error) => Err(error.into()),
    }
}

/// The thread that the body names, and the input. Body and token have to name the same call.
fn read(
    callback: Callback,
    grant: &Grant,
    headers: &HeaderMap,
    view_bytes: usize,
) -> Result<(ThreadId, Input), Refused> {
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
        return Err(Refused::new(StatusCode::FORBIDDEN, "wrong_call", message));
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
                let message = format!("the content of a view has at most {view_bytes} bytes");
                return Err(Refused::new(StatusCode::PAYLOAD_TOO_LARGE, "view_too_large", message));
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

/// Tells the questions of one call apart; the URL itself is sealed. It is stored, so it must never change.
fn digest(text: &str) -> u64 {
    let digest = Sha256::digest(text);
    let (first, _) = digest.split_first_chunk::<8>().expect("bug: a digest has 32 bytes");
    u64::from_le_bytes(*first)
}
