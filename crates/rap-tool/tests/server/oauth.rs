//! Sign-in of users with OAuth, against an authorization server that misbehaves on demand.

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use base64::Engine;
use rap_protocol::Callback;
use rap_testkit::http::exchange;
use rap_tool::OauthApp;
use rap_tool::prelude::*;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use url::Url;

use crate::support::{Runtime, Server, data_dir};

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

/// An authorization server. Its tokens are numbered.
#[derive(Clone)]
struct Provider {
    url: String,
    state: Arc<Mutex<ProviderState>>,
}

#[derive(Default)]
struct ProviderState {
    requests: Vec<BTreeMap<String, String>>,
    /// Answers to the next requests; a token if there is none.
    next: Vec<(u16, &'static str)>,
    expires_in: u32,
    issued: usize,
}

async fn token(State(provider): State<Provider>, body: String) -> (StatusCode, String) {
    let request = url::form_urlencoded::parse(body.as_bytes()).into_owned().collect();
    let mut state = provider.state.lock().unwrap();
    state.requests.push(request);
    if !state.next.is_empty() {
        let (status, body) = state.next.remove(0);
        return (StatusCode::from_u16(status).unwrap(), body.into());
    }
    state.issued += 1;
    let (number, expires_in) = (state.issued, state.expires_in);
    let token = json!({
        "access_token": format!("access-{number}"), "token_type": "Bearer", "expires_in": expires_in,
        "refresh_token": format!("refresh-{number}"),
    });
    (StatusCode::OK, token.to_string())
}

impl Provider {
    async fn start() -> Provider {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let provider = Provider { url, state: Arc::default() };
        provider.state.lock().unwrap().expires_in = 3600;
        let router = axum::Router::new().route("/token", post(token)).with_state(provider.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        provider
    }

    fn tools(&self) -> ToolServer {
        let app = OauthApp::new(&format!("{}/authorize", self.url), &format!("{}/token", self.url), "client");
        let app = app.unwrap().scope("read write");
        let tool = move |_: Nothing, call: Call| {
            let app = app.clone();
            async move { Ok(call.access_token(&app).await?.expose().to_owned()) }
        };
        ToolServer::new("signed-in").offer(Tool::new("token", tool).restartable().without_scrubbing())
    }

    fn answer_next(&self, status: u16, body: &'static str) {
        self.state.lock().unwrap().next.push((status, body));
    }

    fn requests(&self) -> Vec<BTreeMap<String, String>> {
        self.state.lock().unwrap().requests.clone()
    }
}

fn call(runtime: &Runtime, id: &str, user: &str) -> Value {
    let mut call = runtime.invocation("token", "t", id, json!({}));
    call["user_id"] = json!(user);
    call
}

/// Waits for the request to sign in, and returns the parameters of its URL.
async fn sign_in(runtime: &mut Runtime) -> BTreeMap<String, String> {
    let received = runtime.next().await;
    let Callback::Oauth(request) = received.message else { panic!("{}", received.body) };
    let url = Url::parse(request.auth_url.expose()).unwrap();
    url.query_pairs().into_owned().collect()
}

/// Follows the redirect of the authorization server, with these parameters added.
async fn redirect(parameters: &BTreeMap<String, String>, state: &str, answer: &str) -> u16 {
    let url = Url::parse(&parameters["redirect_uri"]).unwrap();
    let host = format!("{}:{}", url.host_str().unwrap(), url.port().unwrap());
    let path = format!("{}?state={state}&{answer}", url.path());
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    exchange(&format!("http://{host}"), request.as_bytes()).await.status
}

#[tokio::test]
async fn a_call_goes_on_after_consent_and_the_token_is_kept_for_the_user() {
    let (data, mut runtime, provider) = (data_dir(), Runtime::start().await, Provider::start().await);
    let server = Server::start(provider.tools(), data.path()).await;
    server.caller().accepted(&call(&runtime, "a", "ann")).await;
    let asked = sign_in(&mut runtime).await;
    assert_eq!((asked["client_id"].as_str(), asked["scope"].as_str()), ("client", "read write"));
    assert_eq!(redirect(&asked, "invented", "code=c").await, 404, "a state that nobody was given");
    assert_eq!(redirect(&asked, &asked["state"], "code=c0de").await, 200);
    assert_eq!(runtime.next().await.text(), "access-1");
    let exchanged = provider.requests().remove(0);
    let hash = Sha256::digest(exchanged["code_verifier"].as_bytes());
    let challenge = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(hash);
    assert_eq!((&challenge, exchanged["code"].as_str()), (&asked["code_challenge"], "c0de"));
    assert_eq!(exchanged["redirect_uri"], asked["redirect_uri"]);

    // The same user does not sign in again, also after a restart; another user does.
    server.caller().accepted(&call(&runtime, "b", "ann")).await;
    assert_eq!(runtime.next().await.text(), "access-1");
    server.stop().await;
    for file in fs::read_dir(data.path().join("oauth")).unwrap() {
        let content = fs::read(file.unwrap().path()).unwrap();
        assert!(!String::from_utf8_lossy(&content).contains("access-1"), "tokens are encrypted");
    }
    let server = Server::start(provider.tools(), data.path()).await;
    server.caller().accepted(&call(&runtime, "c", "ann")).await;
    assert_eq!(runtime.next().await.text(), "access-1");
    server.caller().accepted(&call(&runtime, "d", "bob")).await;
    let asked = sign_in(&mut runtime).await;
    assert_eq!(redirect(&asked, &asked["state"], "error=access_denied").await, 200);
    assert!(runtime.next().await.text().starts_with("Error: the user did not authorise this"));
}

#[tokio::test]
async fn an_authorization_server_that_misbehaves_is_an_error_and_its_words_are_not_repeated() {
    let (data, mut runtime, provider) = (data_dir(), Runtime::start().await, Provider::start().await);
    let server = Server::start(provider.tools(), data.path()).await;
    let answers = [
        (500, "down", "it answered 500"),
        (200, "<html>", "is not a token"),
        (200, r#"{"access_token": "a", "token_type": "mac"}"#, "not a bearer token"),
        (400, r#"{"error": "invalid_grant", "error_description": "s3cr3t"}"#, "invalid_grant"),
        (302, "", "it answered 302"),
    ];
    for (number, (status, body, expected)) in answers.into_iter().enumerate() {
        provider.answer_next(status, body);
        server.caller().accepted(&call(&runtime, &number.to_string(), "ann")).await;
        let asked = sign_in(&mut runtime).await;
        redirect(&asked, &asked["state"], "code=c").await;
        let error = runtime.next().await;
        assert!(error.text().starts_with("Error: ") && error.text().contains(expected), "{}", error.text());
        assert!(!error.text().contains("s3cr3t"));
    }
}

#[tokio::test]
async fn a_token_that_expires_is_renewed_and_the_user_signs_in_again_if_that_is_refused() {
    let (data, mut runtime, provider) = (data_dir(), Runtime::start().await, Provider::start().await);
    // Such a token is never fresh enough to be used twice.
    provider.state.lock().unwrap().expires_in = 1;
    let server = Server::start(provider.tools(), data.path()).await;
    server.caller().accepted(&call(&runtime, "a", "ann")).await;
    let asked = sign_in(&mut runtime).await;
    redirect(&asked, &asked["state"], "code=c").await;
    assert_eq!(runtime.next().await.text(), "access-1");
    server.caller().accepted(&call(&runtime, "b", "ann")).await;
    assert_eq!(runtime.next().await.text(), "access-2");
    assert_eq!(provider.requests()[1]["refresh_token"], "refresh-1");

    provider.answer_next(503, "");
    server.caller().accepted(&call(&runtime, "c", "ann")).await;
    let error = runtime.next().await;
    assert!(error.text().contains("could not be asked: it answered 503"), "{}", error.text());
    provider.answer_next(400, r#"{"error": "invalid_grant"}"#);
    server.caller().accepted(&call(&runtime, "d", "ann")).await;
    let asked = sign_in(&mut runtime).await;
    redirect(&asked, &asked["state"], "code=c").await;
    assert_eq!(runtime.next().await.text(), "access-3");
}

/// A server may refuse the token that a call has just got, for example because it does not permit enough.
#[tokio::test]
async fn a_call_may_ask_for_another_sign_in_also_after_a_restart() {
    let (data, mut runtime, provider) = (data_dir(), Runtime::start().await, Provider::start().await);
    let authorize = format!("{}/authorize", provider.url);
    let app = OauthApp::new(&authorize, &format!("{}/token", provider.url), "client").unwrap().scope("read");
    let runs = Arc::new(AtomicUsize::new(0));
    let twice = move |_: Nothing, call: Call| {
        let (app, runs) = (app.clone(), Arc::clone(&runs));
        async move {
            let first = call.access_token(&app).await?;
            call.remove_token(&app, &first).await;
            if runs.fetch_add(1, Ordering::SeqCst) == 0 {
                call.progress(0.5, "removed").await?;
                std::future::pending::<()>().await;
            }
            let second = call.access_token(&app.add_scope("write")).await?;
            Ok(format!("{} {}", first.expose(), second.expose()))
        }
    };
    let tools = || {
        let tool = Tool::new("token", twice.clone()).restartable().without_scrubbing();
        ToolServer::new("signed-in").offer(tool)
    };
    let server = Server::start(tools(), data.path()).await;
    server.caller().accepted(&call(&runtime, "a", "ann")).await;
    let first = sign_in(&mut runtime).await;
    redirect(&first, &first["state"], "code=one").await;
    assert!(matches!(runtime.next().await.message, Callback::ViewUpdate(_)));
    server.stop().await;

    // The call begins again. The code of its consent was used before, so the user is asked once more.
    provider.answer_next(400, r#"{"error": "invalid_grant"}"#);
    let _server = Server::start(tools(), data.path()).await;
    let second = sign_in(&mut runtime).await;
    redirect(&second, &second["state"], "code=two").await;
    let third = sign_in(&mut runtime).await;
    redirect(&third, &third["state"], "code=three").await;
    assert_eq!((second["scope"].as_str(), third["scope"].as_str()), ("read", "read write"));
    assert_eq!(runtime.next().await.text(), "access-2 access-3");
}
