//! Access tokens by the client credentials grant of OAuth 2.0 (RFC 6749, section 4.4).
//!
//! One token is requested at a time. It is used until shortly before it expires. After a failure there is a pause, in
//! which every request fails with the same reason, so that an authorization server that fails is not asked all the
//! time.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, header};
use rap_protocol::{Secret, UrlRules};
use serde::Deserialize;
use tokio::sync::Mutex;
use tokio::time::Instant;
use url::{Url, form_urlencoded};

use crate::client::{Client, ClientLimits, basic};
use crate::reloading::{FileError, Reloading, SecretSource, watch_secrets};

/// Time for a token request.
const REQUEST_WITHIN: Duration = Duration::from_secs(10);
/// Time before its expiry from which a token is not used any more, at most half of its lifetime.
const MARGIN: Duration = Duration::from_secs(60);
/// Lifetime of a token that has none, and longest time that a token is used.
const DEFAULT_LIFETIME: Duration = Duration::from_secs(5 * 60);
const MAX_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);
/// First and longest pause after a failure.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Maximum length of an access token, in bytes.
const TOKEN_BYTES: usize = 8192;
/// Error codes of RFC 6749. The authorization server's other words may repeat secrets and are not passed on.
const CODES: [&str; 6] = [
    "invalid_request",
    "invalid_client",
    "invalid_grant",
    "unauthorized_client",
    "unsupported_grant_type",
    "invalid_scope",
];

/// A client of an authorization server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OauthClient {
    /// Token endpoint.
    pub token_url: Url,
    /// Name of the client.
    pub client_id: String,
    /// Password of the client.
    pub client_secret: SecretSource,
    /// Scopes to ask for, separated by spaces.
    pub scope: Option<String>,
    /// Server that the tokens are for. Some authorization servers need it.
    pub audience: Option<String>,
}

/// The tokens of a client.
pub(crate) struct AccessTokens {
    client: OauthClient,
    secrets: Reloading<Vec<Secret>>,
    http: Client,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    token: Option<Token>,
    failure: Option<Failure>,
}

struct Token {
    header: HeaderValue,
    renew_at: Instant,
}

struct Failure {
    why: String,
    ask_again_at: Instant,
    pause: Duration,
}

#[derive(Deserialize)]
struct Granted {
    access_token: Secret,
    token_type: String,
    expires_in: Option<f64>,
}

#[derive(Deserialize)]
struct Denied {
    error: String,
}

impl AccessTokens {
    pub(crate) fn new(client: OauthClient) -> Result<AccessTokens, FileError> {
        let secrets = watch_secrets(vec![client.client_secret.clone()], |secrets| Ok(secrets.to_vec()))?;
        let limits = ClientLimits { total: REQUEST_WITHIN, ..ClientLimits::default() };
        let http = Client::new(UrlRules::unrestricted(), limits);
        Ok(AccessTokens { client, secrets, http, state: Mutex::default() })
    }

    /// Returns the `Authorization` header with a valid token. The requests that wait for one share it, or its failure.
    pub(crate) async fn header(&self) -> Result<HeaderValue, String> {
        let mut state = self.state.lock().await;
        let now = Instant::now();
        if let Some(token) = state.token.as_ref().filter(|token| now < token.renew_at) {
            return Ok(token.header.clone());
        }
        if let Some(failure) = state.failure.as_ref().filter(|failure| now < failure.ask_again_at) {
            return Err(failure.why.clone());
        }
        match self.request().await {
            Ok(token) => {
                let header = token.header.clone();
                *state = State { token: Some(token), failure: None };
                Ok(header)
            }
            Err(why) => {
                let before = state.failure.as_ref().map(|failure| failure.pause * 2);
                let pause = before.unwrap_or(PAUSE.0).min(PAUSE.1);
                state.failure =
                    Some(Failure { why: why.clone(), ask_again_at: Instant::now() + pause, pause });
                Err(why)
            }
        }
    }

    /// Forgets a token that a server has refused, unless another one has replaced it by now.
    pub(crate) async fn forget(&self, refused: &HeaderValue) {
        let mut state = self.state.lock().await;
        if state.token.as_ref().is_some_and(|token| token.header == *refused) {
            state.token = None;
        }
    }

    async fn request(&self) -> Result<Token, String> {
        let OauthClient { token_url, client_id, scope, audience, .. } = &self.client;
        let mut form = String::from("grant_type=client_credentials");
        for (name, value) in [("scope", scope), ("audience", audience)] {
            if let Some(value) = value {
                form.push_str(&format!("&{name}={}", form_encoded(value)));
            }
        }
        let secret = self.secrets.get();
        let secret = secret.first().map(Secret::expose).unwrap_or_default();
        // RFC 6749 encodes both parts as in a form.
        let [user, password] = [client_id, secret].map(form_encoded);
        let headers = [
            (header::AUTHORIZATION, basic(user.as_bytes(), password.as_bytes())),
            (header::CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded")),
            (header::ACCEPT, HeaderValue::from_static("application/json")),
        ];
        let began = Instant::now();
        let reply = self.http.post_json(token_url, &headers, Bytes::from(form)).await;
        let reply = reply.map_err(|error| format!("the token request failed: {error}"))?;
        if reply.status != 200 {
            let denied: Option<Denied> = serde_json::from_slice(&reply.body).ok();
            let code = denied.and_then(|denied| CODES.into_iter().find(|code| *code == denied.error));
            let code = code.map(|code| format!(" {code}")).unwrap_or_default();
            return Err(format!("the token request was answered {}{code}", reply.status));
        }
        let granted: Granted = serde_json::from_slice(&reply.body)
            .map_err(|_| "the answer to the token request is not a valid token response".to_owned())?;
        token(&granted, began)
    }
}

pub(crate) fn form_encoded(text: &str) -> String {
    form_urlencoded::byte_serialize(text.as_bytes()).collect()
}

fn token(granted: &Granted, began: Instant) -> Result<Token, String> {
    if !granted.token_type.eq_ignore_ascii_case("bearer") {
        return Err("the token is not a bearer token".into());
    }
    let text = granted.access_token.expose();
    let is_token =
        (1..=TOKEN_BYTES).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
    let header = HeaderValue::try_from(format!("Bearer {text}")).ok().filter(|_| is_token);
    let mut header = header.ok_or("the token cannot be sent in a header")?;
    header.set_sensitive(true);
    let lifetime = match granted.expires_in {
        None => DEFAULT_LIFETIME,
        Some(seconds) => Duration::try_from_secs_f64(seconds).unwrap_or_default().min(MAX_LIFETIME),
    };
    Ok(Token { header, renew_at: began + lifetime - MARGIN.min(lifetime / 2) })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::{Request, Response};
    use http_body_util::{BodyExt, Full};
    use hyper::body::Incoming;
    use hyper::service::service_fn;
    use hyper_util::rt::TokioIo;
    use tokio::net::TcpListener;

    use super::*;

    const SECRET: &str = "s3cret+of/th";

    /// Starts an authorization server. `answer` gets the number of the request and returns status and body.
    async fn server(answer: fn(usize) -> (u16, String)) -> (AccessTokens, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let token_url = Url::parse(&format!("http://{}/token", listener.local_addr().unwrap())).unwrap();
        let requests = Arc::<AtomicUsize>::default();
        let counter = Arc::clone(&requests);
        tokio::spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let counter = Arc::clone(&counter);
                let service = service_fn(move |request: Request<Incoming>| {
                    let counter = Arc::clone(&counter);
                    async move {
                        let number = counter.fetch_add(1, Ordering::SeqCst);
                        let (head, body) = request.into_parts();
                        assert_eq!(head.headers[header::AUTHORIZATION], "Basic cmFwOnMzY3JldCUyQm9mJTJGdGg=");
                        let body = body.collect().await.unwrap().to_bytes();
                        assert_eq!(body, "grant_type=client_credentials&scope=call+tools");
                        let (status, text) = answer(number);
                        let response = Response::builder().status(status);
                        Ok::<_, Infallible>(response.body(Full::new(Bytes::from(text))).unwrap())
                    }
                });
                let connection = hyper::server::conn::http1::Builder::new();
                tokio::spawn(connection.serve_connection(TokioIo::new(socket), service));
            }
        });
        let client = OauthClient {
            token_url,
            client_id: "rap".into(),
            client_secret: Secret::new(SECRET).into(),
            scope: Some("call tools".into()),
            audience: None,
        };
        (AccessTokens::new(client).unwrap(), requests)
    }

    fn granted(number: usize, expires_in: &str) -> (u16, String) {
        (200, format!(r#"{{"access_token": "token-{number}", "token_type": "Bearer"{expires_in}}}"#))
    }

    #[tokio::test]
    async fn requests_at_the_same_time_share_one_token_request() {
        let (tokens, requests) = server(|number| granted(number, r#", "expires_in": 3600"#)).await;
        let tokens = Arc::new(tokens);
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..50 {
            let tokens = Arc::clone(&tokens);
            tasks.spawn(async move { tokens.header().await.unwrap() });
        }
        for header in tasks.join_all().await {
            assert_eq!(header, "Bearer token-0");
            assert!(header.is_sensitive());
        }
        assert_eq!(requests.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn a_refused_token_is_replaced_once() {
        let (tokens, requests) = server(|number| granted(number, "")).await;
        let first = tokens.header().await.unwrap();
        tokens.forget(&first).await;
        let second = tokens.header().await.unwrap();
        assert_eq!(second, "Bearer token-1");
        // The refusal of an older token does not discard the new one.
        tokens.forget(&first).await;
        assert_eq!(tokens.header().await.unwrap(), second);
        assert_eq!(requests.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_token_is_renewed_before_it_expires() {
        let began = Instant::now();
        let uses = |expires_in: Option<f64>| {
            let access_token = Secret::new("x");
            let granted = Granted { access_token, token_type: "bearer".into(), expires_in };
            token(&granted, began).unwrap().renew_at - began
        };
        for (expires_in, expected) in [
            (Some(3600.0), 3540),
            (Some(100.0), 50),
            (Some(0.0), 0),
            (Some(-5.0), 0),
            (Some(f64::INFINITY), 0),
            (Some(1e9), 86_340),
            (None, 240),
        ] {
            assert_eq!(uses(expires_in).as_secs(), expected, "{expires_in:?}");
        }
    }

    #[tokio::test]
    async fn a_misbehaving_authorization_server_is_described_without_its_words() {
        type Answer = fn(usize) -> (u16, String);
        let table: [(Answer, &str); 8] = [
            (
                |_| (401, r#"{"error": "invalid_client", "x": "s3cret"}"#.into()),
                "was answered 401 invalid_client",
            ),
            (|_| (400, r#"{"error": "s3cret"}"#.into()), "was answered 400"),
            (|_| (302, String::new()), "was answered 302"),
            (|_| (200, "<html>s3cret".into()), "is not a valid token response"),
            (|_| (200, r#"{"token_type": "bearer"}"#.into()), "is not a valid token response"),
            (
                |_| (200, r#"{"access_token": "a b", "token_type": "bearer"}"#.into()),
                "cannot be sent in a header",
            ),
            (|_| (200, r#"{"access_token": "x", "token_type": "mac"}"#.into()), "is not a bearer token"),
            (
                |_| {
                    (200, format!(r#"{{"access_token": "{}", "token_type": "bearer"}}"#, "x".repeat(1 << 20)))
                },
                "is not a valid token response",
            ),
        ];
        for (answer, expected) in table {
            let (tokens, requests) = server(answer).await;
            let error = tokens.header().await.unwrap_err();
            assert!(error.ends_with(expected) && !error.contains("s3cret"), "{error}");
            // The failure is shared for a while.
            assert_eq!(tokens.header().await.unwrap_err(), error);
            assert_eq!(requests.load(Ordering::SeqCst), 1);
        }
    }
}
