//! The callback endpoint: where tools speak. 200 means that what was said is on disk, or was there before.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use rap_agent::{Choice, Event, Ignored, Message, Outcome};
use rap_protocol::{Callback, EventId, ThreadId, parse_callback};
use sha2::{Digest, Sha256};

use super::{InPath, Refused, body};
use crate::engine::Engine;
use crate::store::{Error, Target, now};
use crate::token::Grant;

/// Headers that name an event where its body does not.
const EVENT_ID_HEADERS: [&str; 2] = ["webhook-id", "idempotency-key"];

pub(super) async fn callback(
    State(engine): State<Arc<Engine>>,
    InPath(token): InPath<String>,
    headers: HeaderMap,
    request: Body,
) -> Result<StatusCode, Refused> {
    let Some(grant) = engine.tokens.read(&token, now()) else {
        let message = "the callback URL is not one of this runtime's, or it has expired";
        return Err(Refused::new(StatusCode::UNAUTHORIZED, "bad_token", message));
    };
    let bytes = body(&headers, request, engine.settings.limits.body).await?;
    let callback = parse_callback(&bytes).map_err(|invalid| Refused::invalid(invalid.to_string()))?;
    let (thread, message) = read(callback, &grant, &headers, engine.settings.limits.view_bytes)?;
    let target = Target::Token { no: grant.thread, incarnation: grant.incarnation, id: thread };
    match engine.tell(target, message).await {
        Ok(_) => Ok(StatusCode::OK),
        // It was taken before, or nobody waits for it any more: the tool has done its part.
        Err(Error::Ignored(Ignored::Duplicate | Ignored::SettledCall)) => Ok(StatusCode::OK),
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

/// Tells the questions of one call apart; the URL itself is sealed.
fn digest(text: &str) -> u64 {
    // It is stored, so that it has to be the same in every version of the program.
    let hash = Sha256::digest(text);
    hash.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
}
