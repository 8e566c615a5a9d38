//! The client of a request: its token, what it may do, and the threads that it sees.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, Method, header};
use rap_agent::Input;
use rap_api::TokenScope;
use subtle::ConstantTimeEq;

use super::ErrorResponse;
use super::admission::Sender;
use super::guard::refuse_without_tokens;
use super::sign_in;
use crate::engine::Engine;
use crate::store::{
    self, Client, ClientToken, Message, MessageClass, MessageSender, Receipt, Target, TokenDigest,
    Visibility, may_be_created,
};

/// Interval at which the use of a token is recorded.
const USED_EVERY: Duration = Duration::from_secs(600);
/// Interval at which an event stream checks that its token still exists, which another process may have revoked.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// An authenticated client.
#[derive(Debug, Clone)]
pub(crate) struct Principal {
    pub(super) client: Client,
    pub(super) scope: TokenScope,
    pub(super) visible: Visibility,
    /// Digest of its token, or of the empty text if it needs none.
    digest: TokenDigest,
}

impl Principal {
    /// Identifies the client of a request. A token that is given has to be valid, even if none is needed.
    pub(super) async fn of(
        engine: &Arc<Engine>,
        method: &Method,
        headers: &HeaderMap,
    ) -> Result<Principal, ErrorResponse> {
        let settings = &engine.settings;
        let Some(token) = bearer(headers) else {
            return match settings.tokens.is_empty() {
                true => refuse_without_tokens(settings, headers)
                    .map_or_else(|| Ok(Principal::operator(Client::Local, TokenDigest::of(""))), Err),
                false => Principal::of_page(engine, method, headers).await,
            };
        };
        let principal = Principal::with_token(engine, token).await?;
        principal
            .ok_or_else(|| ErrorResponse::unauthorised("the token is wrong or was revoked; use another one"))
    }

    /// Identifies a person who has signed in to the web interface.
    async fn of_page(
        engine: &Arc<Engine>,
        method: &Method,
        headers: &HeaderMap,
    ) -> Result<Principal, ErrorResponse> {
        let Some(digest) = sign_in::token_digest(engine, headers) else {
            return Err(ErrorResponse::unauthorised("send the header Authorization: Bearer <token>"));
        };
        sign_in::require_own_origin(engine, method, headers)?;
        let principal = Principal::with_digest(engine, digest).await?;
        principal
            .ok_or_else(|| ErrorResponse::unauthorised("the token was revoked; sign in with another one"))
    }

    /// Returns the client with this token. `None` if there is no such token. The store is asked only for a text that may
    /// be a token.
    pub(super) async fn with_token(
        engine: &Arc<Engine>,
        token: &str,
    ) -> Result<Option<Principal>, ErrorResponse> {
        let digest = TokenDigest::of(token);
        match configured(&engine.client_tokens, &digest) {
            None if !may_be_created(token) => Ok(None),
            _ => Principal::with_digest(engine, digest).await,
        }
    }

    /// Returns the client whose token has this digest. `None` if there is no such token.
    async fn with_digest(
        engine: &Arc<Engine>,
        digest: TokenDigest,
    ) -> Result<Option<Principal>, ErrorResponse> {
        if let Some(position) = configured(&engine.client_tokens, &digest) {
            return Ok(Some(Principal::operator(Client::Configured(position), digest)));
        }
        let reader = engine.admission.token_reader().await;
        let Some(stored) = engine.store.token(&digest).await? else { return Ok(None) };
        drop(reader);
        record_use(engine, &stored);
        let ClientToken { id, scope, user, .. } = stored;
        let visible = user.map_or(Visibility::All, Visibility::User);
        Ok(Some(Principal { client: Client::Created(id), scope, visible, digest }))
    }

    fn operator(client: Client, digest: TokenDigest) -> Principal {
        Principal { client, scope: TokenScope::Admin, visible: Visibility::All, digest }
    }

    /// Returns the sender of its requests.
    pub(super) fn sender(&self) -> Sender {
        Sender::Client(self.client)
    }

    /// Bytes that tell its Idempotency-Keys from those of other clients.
    pub(super) fn key_space(&self) -> &[u8; 32] {
        self.digest.as_bytes()
    }

    /// Returns true if it existed before tokens could be created.
    pub(super) fn is_configured(&self) -> bool {
        !matches!(self.client, Client::Created(_))
    }

    /// Makes a message to a thread that the client sees.
    pub(super) fn message(&self, target: Target, input: Input) -> Message {
        Message { visible: self.visible.clone(), ..Message::new(target, input) }
    }

    /// Applies a message of the client.
    pub(super) async fn apply(&self, engine: &Engine, message: Message) -> Result<Receipt, store::Error> {
        engine.apply(MessageClass::External(MessageSender::Client(self.client)), message).await
    }

    /// Waits until the token is revoked.
    pub(super) async fn revoked(&self, engine: &Engine) {
        if self.is_configured() {
            return std::future::pending().await;
        }
        let mut revocations = engine.revocations.subscribe();
        // While the store cannot be read, a stream gets nothing that is stored.
        while !matches!(engine.store.token(&self.digest).await, Ok(None)) {
            tokio::select! {
                _ = revocations.changed() => {}
                () = tokio::time::sleep(CHECK_EVERY) => {}
            }
        }
    }
}

/// Records that a token is used, but not for each request.
fn record_use(engine: &Arc<Engine>, token: &ClientToken) {
    let (id, now) = (token.id, engine.now());
    if token.used_at.is_some_and(|at| now < at.plus(USED_EVERY)) {
        return;
    }
    let store = Arc::clone(&engine.store);
    engine.spawn(async move {
        if let Err(error) = store.token_used(id, now).await {
            tracing::debug!(token = %id, why = error.with_sources(), "the use of a token was not recorded");
        }
    });
}

/// Returns the position of a token in the settings.
fn configured(tokens: &[TokenDigest], given: &TokenDigest) -> Option<usize> {
    // All digests have the same length and all are compared, so that the time does not depend on the token.
    tokens.iter().enumerate().fold(None, |known, (position, token)| {
        if bool::from(token.as_bytes().ct_eq(given.as_bytes())) { Some(position) } else { known }
    })
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}
