//! API of client tokens. Only administrators reach it.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::{Extension, Json};
use rap_api::{CreateToken, CreatedToken, Done, ListedToken, TOKEN_NAME_CHARS, TokenScope, Tokens};
use rap_protocol::UserId;

use super::api::{Accepted, ApiResult, Parameters, page_fields, page_request, read};
use super::json::time;
use super::principal::Principal;
use super::{ErrorResponse, PathParams};
use crate::engine::Engine;
use crate::store::{ClientToken, NewClientToken, Signal, TOKENS, TokenDigest, new_token};

impl From<ClientToken> for ListedToken {
    fn from(token: ClientToken) -> ListedToken {
        ListedToken {
            id: token.id.to_string(),
            name: token.name,
            scope: token.scope,
            user_id: token.user.map(|user| user.as_str().to_owned()),
            created_at: time(token.created_at),
            last_used_at: token.used_at.map(time),
        }
    }
}

pub(super) async fn create(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
    headers: HeaderMap,
    request: Body,
) -> Accepted<CreatedToken> {
    let (CreateToken { name, scope, user_id }, _) =
        read(&engine, principal.sender(), &headers, request).await?;
    if name.is_empty() || name.chars().nth(TOKEN_NAME_CHARS).is_some() || name.chars().any(char::is_control) {
        return Err(ErrorResponse::invalid(format!(
            "name: expected 1 to {TOKEN_NAME_CHARS} characters without control characters"
        )));
    }
    if scope == TokenScope::Unknown {
        let scopes = TokenScope::ALL.map(TokenScope::as_str).join(", ");
        return Err(ErrorResponse::invalid(format!("scope: expected one of {scopes}")));
    }
    let user = user_id.map(UserId::new).transpose();
    let user = user.map_err(|error| ErrorResponse::invalid(format!("user_id: {error}")))?;
    if scope == TokenScope::Admin && user.is_some() {
        let message =
            "user_id: an admin token sees all threads; leave user_id out, or use the scope write or read";
        return Err(ErrorResponse::invalid(message));
    }
    let token = new_token(std::array::from_fn(|_| engine.world.random.next()));
    let digest = TokenDigest::of(token.expose());
    let new = NewClientToken { digest, name, scope, user, created_at: engine.now() };
    let Some(id) = engine.store.add_token(new, TOKENS).await? else {
        let message = format!("there are {TOKENS} tokens already; revoke some of them");
        return Err(ErrorResponse::new(StatusCode::CONFLICT, "too_many_tokens", message));
    };
    tracing::info!(target: "rap::audit", token = %id, %scope, "a client token was created");
    let open = engine.settings.tokens.is_empty();
    let created = CreatedToken { id: id.to_string(), token: token.expose().to_owned(), open };
    Ok((StatusCode::CREATED, Json(created)))
}

pub(super) async fn list(
    State(engine): State<Arc<Engine>>,
    Query(parameters): Parameters,
) -> ApiResult<Tokens> {
    let (tokens, next_cursor) = page_fields(engine.store.tokens(page_request(parameters)?).await?);
    Ok(Json(Tokens { tokens, next_cursor }))
}

/// Revokes a token. Its event streams end.
pub(super) async fn revoke(
    State(engine): State<Arc<Engine>>,
    PathParams(id): PathParams<String>,
) -> ApiResult<Done> {
    let revoked = match id.parse() {
        Ok(id) => engine.store.revoke_token(id).await?,
        Err(_) => false,
    };
    if !revoked {
        return Err(ErrorResponse::new(StatusCode::NOT_FOUND, "no_such_token", "no such token"));
    }
    engine.revocations.send_replace(());
    engine.tell_peers(|| Signal::Revoked);
    tracing::info!(target: "rap::audit", token = id, "a client token was revoked");
    Ok(Json(Done {}))
}
