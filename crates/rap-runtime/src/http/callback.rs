//! The callback endpoint: where tools speak. 200 means that what was said is on disk, or was there before.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use rap_agent::{Choice, Event, Ignored, Message, Outcome};
use rap_protocol::{Callback, EventId, ThreadId, parse_callback};
use sha2::{Digest, Sha256};

use super::{InPath, Refused, body};
use crate::engine::Engine;
use crate::store::{Error, Fate, Kind, Line, Target, now};
use crate::token::Grant;

/// Headers that name an event where its body does not.
const EVENT_ID_HEADERS: [&str; 2] = ["webhook-id", "idempotency-key"];

pub(super) async fn callback(
    State(engine): State<Arc<Engine>>,
    InPath(token): InPath<String>,
    headers: HeaderMap,
    request: Body,
) -> Result<StatusCode, Refused> {
    let began = Instant::now();
    let grant = engine.tokens.read(&token, now());
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
            engine.ended(Kind::Callback, Fate::Refused, 1, || line(grant.as_ref(), named, refused));
        }
        // It is for the tool to try again.
        Err(_) => engine.metrics.delivery(Kind::Callback, Fate::Retrying),
        Ok(()) => {
            engine.metrics.delivery(Kind::Callback, Fate::Delivered);
            engine.metrics.callback.took(began.elapsed());
        }
    }
    taken.map(|()| StatusCode::OK)
}

/// What was refused for good, for the ledger. A thread that is not here is not named.
fn line(grant: Option<&Grant>, thread_id: Option<ThreadId>, refused: &Refused) -> Line {
    let known = grant.filter(|_| refused.code() != "no_such_thread");
    Line {
        kind: Kind::Callback,
        thread: known.map_or(0, |grant| grant.thread),
        thread_id,
        call: known.map(|grant| grant.call.clone()),
        server: None,
        topic: refused.code().to_owned(),
        outcome: Fate::Refused,
        attempts: 1,
        detail: refused.to_string(),
        at: now(),
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
    let (thread, message) = read(callback, grant, headers, engine.settings.limits.view_bytes)?;
    *named = Some(thread.clone());
    let target = Target::Token { no: grant.thread, incarnation: grant.incarnation, id: thread };
    match engine.tell(target, message).await {
        Ok(_) => Ok(()),
        // It was taken before, or nobody waits for it any more: the tool has done its part.
        Err(Error::Ignored(Ignored::Duplicate | Ignored::SettledCall)) => Ok(()),
        Err(Error::Ignored(Ignored::Closed)) => {
            Err(Refused::new(StatusCode::GONE, "thread_closed", "the thread is closed"))
        }
        Err(error) => Err(error.into()),
    }
}

/// The thread that the body names, and the message. Body and token have to speak of the same call.
fn read(
    callback: Callback,
    grant: &Grant,
    headers: &HeaderMap,
    view_bytes: usize,
) -> Result<(ThreadId, Message), Refused> {
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
    let message = match callback {
        Callback::ToolResult(result) => {
            let (content, display, subscription) = (result.body, result.display_as, result.subscription);
            Message::Returned { call, result: Outcome { content, display, subscription }, past: None }
        }
        Callback::SubscriptionEvent(event) => {
            let id = event.event_id.or_else(|| event_id(headers));
            let (text, associative, is_final) = (event.text, event.associative, event.is_final);
            let event = Event { id, text, associative, is_final };
            Message::Happened { call, event, past: None, seen: false, birth: None }
        }
        Callback::Oauth(oauth) => Message::WantsSignIn { call, url: oauth.auth_url },
        Callback::UserChoice(choice) => {
            let digest = digest(choice.response_url.expose());
            let choice = Choice {
                prompt: choice.prompt,
                choices: choice.choices,
                default: choice.default,
                response_url: choice.response_url,
                digest,
            };
            Message::WantsChoice { call, choice }
        }
        Callback::ViewUpdate(view) => {
            if view.content.to_string().len() > view_bytes {
                let message = format!("the content of a view has at most {view_bytes} bytes");
                return Err(Refused::new(StatusCode::PAYLOAD_TOO_LARGE, "view_too_large", message));
            }
            Message::Viewed { call, view_type: view.view_type, content: view.content }
        }
    };
    Ok((thread, message))
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
