//! Verification of OAuth 2.0 access tokens: their authorization server is asked about them (RFC 7662).
//!
//! Its answer about a valid token is used for a short time, so a token that was revoked is refused after that. What it says
//! about other tokens is not kept, since anybody can make them up.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, header};
use rap_protocol::{Secret, Timestamp, UrlRules};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;
use url::Url;

use crate::client::{Client, ClientLimits, basic};
use crate::oauth::form_encoded;
use crate::reloading::{FileError, Reloading, SecretSource, watch_secrets};

/// Time for a request.
const REQUEST_WITHIN: Duration = Duration::from_secs(10);
/// Longest time for which an answer is used.
const USED_FOR: Duration = Duration::from_secs(60);
/// Maximum number of answers that are kept, and of requests at once.
const ANSWERS: usize = 1024;
const AT_ONCE: usize = 16;
/// Maximum difference between the clocks of this machine and of the authorization server.
const CLOCKS: Duration = Duration::from_secs(5 * 60);
/// Maximum length of an access token, in bytes.
const TOKEN_BYTES: usize = 8192;

/// An authorization server that is asked about access tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthorizationServer {
    /// Introspection endpoint.
    pub introspection_url: Url,
    /// Name of this server at the authorization server.
    pub client_id: String,
    /// Password of this server.
    pub client_secret: SecretSource,
    /// Name that a token must have in its audience. `None` accepts any audience.
    pub audience: Option<String>,
    /// Scope that a token must have. `None` needs none.
    pub scope: Option<String>,
}

/// Reason why a token is not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotAccepted {
    /// It has expired, was revoked, or is not a token for this server.
    #[error("the access token is not valid here: {0}")]
    Invalid(&'static str),
    /// The authorization server cannot be asked now.
    #[error("the authorization server cannot be asked about the access token: {0}")]
    Unavailable(String),
}

/// The answers of an authorization server.
pub struct Introspection {
    server: AuthorizationServer,
    secrets: Reloading<Vec<Secret>>,
    http: Client,
    requests: Semaphore,
    /// Clients by the SHA-256 of their tokens, and the time until which the answer is used.
    known: Mutex<HashMap<[u8; 32], (String, Timestamp)>>,
}

#[derive(Deserialize)]
struct Answer {
    active: bool,
    client_id: Option<String>,
    scope: Option<String>,
    /// Seconds since 1970.
    exp: Option<i64>,
    aud: Option<Audience>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Many(Vec<String>),
}

impl Audience {
    fn contains(&self, name: &str) -> bool {
        match self {
            Audience::One(one) => one == name,
            Audience::Many(many) => many.iter().any(|one| one == name),
        }
    }
}

impl Introspection {
    /// Reads the password. Nothing is asked yet.
    pub fn new(server: AuthorizationServer) -> Result<Introspection, FileError> {
        let secrets = watch_secrets(vec![server.client_secret.clone()], |secrets| Ok(secrets.to_vec()))?;
        let limits = ClientLimits { total: REQUEST_WITHIN, ..ClientLimits::default() };
        let http = Client::new(UrlRules::unrestricted(), limits);
        let requests = Semaphore::new(AT_ONCE);
        Ok(Introspection { server, secrets, http, requests, known: Mutex::default() })
    }

    /// Returns the client that an access token was given to.
    pub async fn client_of(&self, token: &str, now: Timestamp) -> Result<String, NotAccepted> {
        if token.len() > TOKEN_BYTES {
            return Err(NotAccepted::Invalid("it is too long"));
        }
        let digest: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        if let Some(client) = self.known_client(&digest, now) {
            return Ok(client);
        }
        let busy = |_| NotAccepted::Unavailable("too many requests at once".into());
        let _permit = self.requests.try_acquire().map_err(busy)?;
        let answer = self.ask(token).await.map_err(NotAccepted::Unavailable)?;
        let expires = answer.exp.map(|seconds| Timestamp(seconds.saturating_mul(1000)));
        let client = self.check(answer, expires, now).map_err(NotAccepted::Invalid)?;
        let until = now.plus(USED_FOR);
        self.keep(digest, client.clone(), expires.map_or(until, |expires| expires.min(until)), now);
        Ok(client)
    }

    fn known_client(&self, digest: &[u8; 32], now: Timestamp) -> Option<String> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        // An answer from the future is one from before the clock was set back.
        let is_used = |until: Timestamp| now < until && until <= now.plus(USED_FOR);
        known.get(digest).filter(|(_, until)| is_used(*until)).map(|(client, _)| client.clone())
    }

    fn keep(&self, digest: [u8; 32], client: String, until: Timestamp, now: Timestamp) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= ANSWERS {
            known.retain(|_, (_, until)| now < *until);
        }
        if known.len() < ANSWERS {
            known.insert(digest, (client, until));
        }
    }

    async fn ask(&self, token: &str) -> Result<Answer, String> {
        let AuthorizationServer { introspection_url, client_id, .. } = &self.server;
        let secret = self.secrets.get();
        let secret = secret.first().map(Secret::expose).unwrap_or_default();
        let [user, password] = [client_id, secret].map(form_encoded);
        let headers = [
            (header::AUTHORIZATION, basic(user.as_bytes(), password.as_bytes())),
            (header::CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded")),
            (header::ACCEPT, HeaderValue::from_static("application/json")),
        ];
        let form = format!("token={}&token_type_hint=access_token", form_encoded(token));
        let reply = self.http.post_json(introspection_url, &headers, Bytes::from(form)).await;
        let reply = reply.map_err(|error| error.to_string())?;
        if reply.status != 200 {
            return Err(format!("it answered {}", reply.status));
        }
        serde_json::from_slice(&reply.body).map_err(|_| "its answer is not valid".into())
    }

    fn check(
        &self,
        answer: Answer,
        expires: Option<Timestamp>,
        now: Timestamp,
    ) -> Result<String, &'static str> {
        let AuthorizationServer { audience, scope, .. } = &self.server;
        if !answer.active {
            return Err("it has expired or was revoked, or the authorization server does not know it");
        }
        if expires.is_some_and(|expires| expires.plus(CLOCKS) < now) {
            return Err("it has expired");
        }
        if let Some(name) = audience
            && !answer.aud.is_some_and(|audience| audience.contains(name))
        {
            return Err("it is for another server");
        }
        if let Some(scope) = scope
            && !answer.scope.unwrap_or_default().split(' ').any(|one| one == scope)
        {
            return Err("it does not have the scope that this server needs");
        }
        answer.client_id.ok_or("the authorization server does not say which client it was given to")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::http::{HeaderMap, StatusCode};
    use axum::response::IntoResponse;
    use axum::routing::post;
    use axum::{Json, Router};
    use serde_json::{Value, json};
    use tokio::net::TcpListener;

    use super::*;

    const NOW: Timestamp = Timestamp(1_800_000_000_000);

    /// Starts an authorization server that says the same about each token, or answers 500. Counts the requests.
    async fn server(answer: Value) -> (AuthorizationServer, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/introspect", listener.local_addr().unwrap());
        let requests = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&requests);
        let answer = move |headers: HeaderMap, body: String| {
            assert_eq!(headers[header::AUTHORIZATION], "Basic dG9vbDpwYXNz");
            assert_eq!(body, "token=a%2Bb&token_type_hint=access_token");
            counted.fetch_add(1, Ordering::SeqCst);
            let answer = answer.clone();
            async move {
                match answer.is_null() {
                    true => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
                    false => Json(answer).into_response(),
                }
            }
        };
        let router = Router::new().route("/introspect", post(answer));
        tokio::spawn(async move { axum::serve(listener, router).await });
        let server = AuthorizationServer {
            introspection_url: Url::parse(&url).unwrap(),
            client_id: "tool".into(),
            client_secret: Secret::new("pass").into(),
            audience: Some("tools".into()),
            scope: Some("call".into()),
        };
        (server, requests)
    }

    fn active() -> Value {
        json!({"active": true, "client_id": "runtime", "scope": "other call", "aud": ["tools"], "exp": NOW.0 / 1000 + 600})
    }

    async fn asked(answer: Value) -> Result<String, NotAccepted> {
        let (server, _) = server(answer).await;
        Introspection::new(server).unwrap().client_of("a+b", NOW).await
    }

    #[tokio::test]
    async fn a_token_is_accepted_for_its_client_audience_and_scope() {
        assert_eq!(asked(active()).await.as_deref(), Ok("runtime"));
        for (field, value) in [
            ("active", json!(false)),
            ("aud", json!("others")),
            ("aud", Value::Null),
            ("scope", json!("caller recall")),
            ("scope", Value::Null),
            ("client_id", Value::Null),
        ] {
            let mut answer = active();
            answer[field] = value;
            let refused = asked(answer.clone()).await;
            assert!(matches!(refused, Err(NotAccepted::Invalid(_))), "{answer}: {refused:?}");
        }
    }

    #[tokio::test]
    async fn clocks_may_differ_by_five_minutes() {
        for (seconds, expected) in [(1, true), (-299, true), (-301, false)] {
            let mut answer = active();
            answer["exp"] = (NOW.0 / 1000 + seconds).into();
            assert_eq!(asked(answer).await.is_ok(), expected, "{seconds}");
        }
    }

    #[tokio::test]
    async fn an_answer_is_used_for_a_minute_and_not_beyond_the_life_of_its_token() {
        for (lifetime, used_for) in [(600, 60), (20, 20)] {
            let mut answer = active();
            answer["exp"] = (NOW.0 / 1000 + lifetime).into();
            let (server, requests) = server(answer).await;
            let tokens = Introspection::new(server).unwrap();
            for (after, expected) in [(0, 1), (used_for - 1, 1), (used_for, 2)] {
                let now = NOW.plus(Duration::from_secs(after));
                tokens.client_of("a+b", now).await.unwrap();
                assert_eq!(requests.load(Ordering::SeqCst), expected, "after {after} s");
            }
            // The clock was set back.
            tokens.client_of("a+b", NOW.minus(Duration::from_secs(600))).await.unwrap();
            assert_eq!(requests.load(Ordering::SeqCst), 3);
        }
    }

    #[tokio::test]
    async fn a_server_that_fails_makes_no_token_invalid_and_its_words_are_not_repeated() {
        for answer in [Value::Null, json!("hush"), json!({"active": "hush"})] {
            let refused = asked(answer).await.unwrap_err();
            assert!(matches!(refused, NotAccepted::Unavailable(_)), "{refused}");
            assert!(!refused.to_string().contains("hush"), "{refused}");
        }
        let (mut server, _) = server(active()).await;
        server.introspection_url.set_port(Some(9)).unwrap();
        let refused = Introspection::new(server).unwrap().client_of("a+b", NOW).await;
        assert!(matches!(refused, Err(NotAccepted::Unavailable(_))), "{refused:?}");
        let long = asked_about(&"x".repeat(TOKEN_BYTES + 1)).await;
        assert!(matches!(long, Err(NotAccepted::Invalid(_))), "{long:?}");
    }

    async fn asked_about(token: &str) -> Result<String, NotAccepted> {
        let (server, _) = server(active()).await;
        Introspection::new(server).unwrap().client_of(token, NOW).await
    }
}
