//! Signing in to the web interface. A browser sends a client token once and gets a cookie instead, which no script can
//! read.
//!
//! The cookie contains the digest of the token and an expiry time, encrypted, so that it ends with the token and reveals
//! nothing about it. Browsers send cookies of one port to all ports of a machine and do not count another port as another
//! site. So the cookie's name contains the port, and a request that is authenticated by it has to come from a page of
//! this very origin.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use rap_api::{SignIn, SignInState};
use rap_protocol::Timestamp;

use super::ErrorResponse;
use super::admission::Sender;
use super::api::read;
use super::guard::{host, is_own_origin};
use super::principal::Principal;
use crate::engine::Engine;
use crate::store::TokenDigest;

/// Time after which a person has to sign in again.
const LIFETIME: Duration = Duration::from_secs(30 * 24 * 3600);
/// Binds the encryption of a cookie to its purpose.
const PURPOSE: &[u8] = b"session of the page";
/// Maximum length of a cookie's value, in characters. A valid one is shorter.
const VALUE_CHARS: usize = 200;
const DIGEST_BYTES: usize = 32;

/// Describes the client to the web interface. It is never refused, so that the interface can ask before its first
/// request.
pub(super) async fn get(State(engine): State<Arc<Engine>>, headers: HeaderMap) -> Json<SignInState> {
    let principal = Principal::of(&engine, &Method::GET, &headers).await;
    Json(describe(&engine, principal.ok().as_ref()))
}

/// Exchanges a token for a cookie. A wrong token is answered with 200 and a text that says so.
pub(super) async fn sign_in(
    State(engine): State<Arc<Engine>>,
    headers: HeaderMap,
    request: Body,
) -> Result<Response, ErrorResponse> {
    require_own_origin(&engine, &Method::POST, &headers)?;
    let (SignIn { token }, _) = read(&engine, Sender::Stranger, &headers, request).await?;
    let token = token.trim();
    let digest = TokenDigest::of(token);
    let Some(principal) = Principal::with_token(&engine, token).await? else {
        let problem = "This token is wrong or was revoked. Check it, or ask for another one.";
        let answer = SignInState { problem: Some(problem.into()), ..describe(&engine, None) };
        return Ok(Json(answer).into_response());
    };
    let expires = engine.now().plus(LIFETIME);
    let plain = [digest.as_bytes().as_slice(), &expires.0.to_be_bytes()].concat();
    let value = BASE64_URL_SAFE_NO_PAD.encode(engine.secrets.seal(&plain, PURPOSE));
    tracing::info!(target: "rap::audit", scope = %principal.scope, "a person signed in to the web interface");
    let cookie = set_cookie(&headers, &value, LIFETIME);
    Ok(([(header::SET_COOKIE, cookie)], Json(describe(&engine, Some(&principal)))).into_response())
}

pub(super) async fn sign_out(
    State(engine): State<Arc<Engine>>,
    headers: HeaderMap,
) -> Result<Response, ErrorResponse> {
    require_own_origin(&engine, &Method::DELETE, &headers)?;
    let cookie = set_cookie(&headers, "", Duration::ZERO);
    Ok(([(header::SET_COOKIE, cookie)], Json(describe(&engine, None))).into_response())
}

fn describe(engine: &Engine, principal: Option<&Principal>) -> SignInState {
    let agents = engine.settings.agents.iter().map(|agent| agent.name.clone());
    SignInState {
        needs_token: !engine.settings.tokens.is_empty(),
        signed_in: principal.is_some(),
        scope: principal.map(|principal| principal.scope),
        user_id: principal
            .and_then(|principal| principal.visible.user())
            .map(|user| user.as_str().to_owned()),
        agents: if principal.is_some() { agents.collect() } else { Vec::new() },
        version: env!("CARGO_PKG_VERSION").into(),
        problem: None,
    }
}

/// Returns the digest of the token that the browser signed in with.
pub(super) fn token_digest(engine: &Engine, headers: &HeaderMap) -> Option<TokenDigest> {
    let name = cookie_name(headers);
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|cookies| cookies.to_str().ok());
    let mut pairs =
        cookies.flat_map(|cookies| cookies.split(';')).filter_map(|pair| pair.trim().split_once('='));
    let (_, value) = pairs.find(|(given, value)| *given == name && value.len() <= VALUE_CHARS)?;
    let plain = engine.secrets.open(&BASE64_URL_SAFE_NO_PAD.decode(value).ok()?, PURPOSE).ok()?;
    let (digest, expires) = plain.split_first_chunk::<DIGEST_BYTES>()?;
    let expires = Timestamp(i64::from_be_bytes(expires.try_into().ok()?));
    (engine.now() < expires).then(|| TokenDigest::from_bytes(*digest))
}

/// Refuses a request that a page of another origin may have made a browser send. One that changes something has to name
/// its origin.
pub(super) fn require_own_origin(
    engine: &Engine,
    method: &Method,
    headers: &HeaderMap,
) -> Result<(), ErrorResponse> {
    let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
    let foreign_site = site.is_some_and(|site| site != b"same-origin" && site != b"none");
    let unnamed = !method.is_safe() && !headers.contains_key(header::ORIGIN);
    if foreign_site || unnamed || !is_own_origin(&engine.settings, headers) {
        let message = "requests with the cookie of the web interface have to come from it; programs send a token instead";
        return Err(ErrorResponse::new(StatusCode::FORBIDDEN, "foreign_origin", message));
    }
    Ok(())
}

/// Returns the name of the cookie. Several runtimes on one machine have one each.
fn cookie_name(headers: &HeaderMap) -> String {
    let port = host(headers).rsplit_once(':').map(|(_, port)| port);
    let port = port.filter(|port| port.bytes().all(|byte| byte.is_ascii_digit()));
    port.map_or_else(|| "rap_session".into(), |port| format!("rap_session_{port}"))
}

fn set_cookie(headers: &HeaderMap, value: &str, lifetime: Duration) -> HeaderValue {
    let encrypted =
        headers.get(header::ORIGIN).is_some_and(|origin| origin.as_bytes().starts_with(b"https:"));
    let secure = if encrypted { "; Secure" } else { "" };
    let (name, seconds) = (cookie_name(headers), lifetime.as_secs());
    let text = format!("{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}");
    HeaderValue::from_str(&text).expect("bug: a port and base64 are valid in a header")
}
