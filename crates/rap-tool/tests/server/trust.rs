//! Authentication other than a fixed bearer token: rotated tokens, signatures, client certificates, trusted proxies.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use axum::http::{HeaderName, HeaderValue};
use rap_io::client::{Client, ClientLimits};
use rap_io::sigv4::AccessKey;
use rap_io::webhook::{SIGNATURE, SigningKeys};
use rap_protocol::{Secret, Timestamp, UrlPolicy};
use rap_testkit::certificates::Authority;
use rap_testkit::until;
use rap_tool::prelude::*;
use rap_tool::{Auth, AuthorizationServer, ClientCertificates, ClientTls, SecretSource, ServerTls};
use serde_json::{Value, json};
use tempfile::TempDir;
use url::Url;

use crate::support::{Runtime, Server, ToolProcess, data_dir, short_pauses};

const OLD: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const NEW: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";

#[derive(Deserialize, JsonSchema)]
struct Say {
    text: String,
}

fn tools() -> ToolServer {
    ToolServer::new("test")
        .limits(short_pauses())
        .tool("say", |args: Say, _: Call| async move { Ok(args.text) })
        .tool("wait", |_: Say, call: Call| async move {
            call.cancelled().await;
            Ok("cancelled")
        })
}

fn hmac(keys: &[&str]) -> Auth {
    Auth::Hmac { caller: "runtime".into(), keys: keys.iter().map(ToString::to_string).collect() }
}

type Headers = Vec<(HeaderName, HeaderValue)>;

fn now() -> Timestamp {
    SystemTime::now().into()
}

fn signing(keys: &[&str]) -> SigningKeys {
    SigningKeys::parse(&keys.iter().map(|key| Secret::new(*key)).collect::<Vec<_>>()).unwrap()
}

/// The headers of a message that is signed at a time.
fn signed(keys: &[&str], id: &str, at: Timestamp, body: &Value) -> Headers {
    signing(keys).sign(id, at, body.to_string().as_bytes()).into()
}

fn bearer(token: &str) -> Headers {
    vec![(HeaderName::from_static("authorization"), format!("Bearer {token}").parse().unwrap())]
}

async fn post(url: &str, headers: &Headers, body: &Value) -> (u16, String) {
    let client = Client::new(UrlPolicy::Loopback, ClientLimits::default());
    let reply = client.post_json(&url.parse().unwrap(), headers, body.to_string().into()).await.unwrap();
    (reply.status, String::from_utf8_lossy(&reply.body).into_owned())
}

async fn is_alive(server: &Server, call: &str) -> bool {
    let body = json!({"thread_id": "t", "tool_call_id": call});
    let headers = signed(&[OLD], "status", now(), &body);
    post(&format!("{}/tool_call_status", server.url), &headers, &body).await.1.contains("true")
}

/// Proves: TR-19, TC-18, CN-20
#[tokio::test]
async fn signed_requests_are_accepted_and_callbacks_to_their_caller_are_signed() {
    let data = data_dir();
    let server = Server::start(tools().auth(hmac(&[NEW, OLD])), data.path()).await;
    let mut runtime = Runtime::start().await;
    let invoke = format!("{}/invoke", server.url);
    let call = runtime.invocation("say", "t", "c1", json!({"text": "hello"}));
    runtime.answer_next(&[503]);
    assert_eq!(
        post(&invoke, &signed(&[OLD], "rap_invoke_1", now(), &call), &call).await,
        (200, String::new())
    );
    let (first, second) = (runtime.next().await, runtime.next().await);
    for callback in [&first, &second] {
        assert_eq!(callback.text(), "hello");
        for keys in [&[OLD], &[NEW]] {
            signing(keys).verify(&callback.headers, &callback.raw, now()).unwrap();
        }
    }
    assert_eq!(first.headers["webhook-id"], second.headers["webhook-id"], "a retry has the same id");
    let large = runtime.invocation("say", "t", "large", json!({"text": "x".repeat(300_000)}));
    assert_eq!(post(&invoke, &signed(&[OLD], "rap_invoke_2", now(), &large), &large).await.0, 200);
    let callback = runtime.accepted().await;
    signing(&[NEW]).verify(&callback.headers, &callback.raw, now()).unwrap();
    // Nobody else has access.
    let other = runtime.invocation("say", "t", "c2", json!({"text": "x"}));
    let mut altered = signed(&[OLD], "i", now(), &other);
    altered.retain(|(name, _)| *name != SIGNATURE);
    for (headers, expected) in [
        (Vec::new(), "sign the request in the form of Standard Webhooks"),
        (bearer("x"), "sign the request in the form of Standard Webhooks"),
        (
            signed(&["whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"], "i", now(), &other),
            "no signature of the request is valid",
        ),
        (signed(&[OLD], "i", now(), &call), "no signature of the request is valid"),
        (signed(&[OLD], "i", now().minus(Duration::from_secs(302)), &other), "check both clocks"),
        (signed(&[OLD], "i", now().plus(Duration::from_secs(302)), &other), "check both clocks"),
        (altered, "sign the request"),
    ] {
        let (status, answer) = post(&invoke, &headers, &other).await;
        assert!(status == 401 && answer.contains(expected), "{status} {answer}");
        assert!(!answer.contains("whsec_"), "{answer}");
    }
    assert!(runtime.pending().is_empty());
}

#[tokio::test]
async fn a_replayed_request_has_no_effect_and_a_signature_is_for_one_path() {
    let data = data_dir();
    let server = Server::start(tools().auth(hmac(&[OLD])), data.path()).await;
    let mut runtime = Runtime::start().await;
    let [invoke, cancel, close] =
        ["invoke", "cancel_tool_call", "close_thread"].map(|path| format!("{}/{path}", server.url));
    let call = runtime.invocation("wait", "t", "c", json!({"text": ""}));
    let headers = signed(&[OLD], "rap_invoke_1", now(), &call);
    for _ in 0..3 {
        assert_eq!(post(&invoke, &headers, &call).await.0, 200);
    }
    // The body of a status query is that of a cancellation.
    let body = json!({"thread_id": "t", "tool_call_id": "c"});
    let (status, answer) = post(&cancel, &signed(&[OLD], "rap_status_1", now(), &body), &body).await;
    assert!(status == 401 && answer.contains("signed for another path"), "{answer}");
    assert!(is_alive(&server, "c").await);
    // A message that was accepted before is acknowledged without effect. Here its id was used for another call.
    let other = json!({"thread_id": "t", "tool_call_id": "unknown"});
    assert_eq!(post(&cancel, &signed(&[OLD], "m1", now(), &other), &other).await.0, 200);
    assert_eq!(post(&cancel, &signed(&[OLD], "m1", now(), &body), &body).await.0, 200);
    assert!(is_alive(&server, "c").await);
    let closing = json!({"thread_id": "other"});
    assert_eq!(post(&close, &signed(&[OLD], "m2", now(), &closing), &closing).await.0, 200);
    assert_eq!(post(&cancel, &signed(&[OLD], "m3", now(), &body), &body).await.0, 200);
    assert_eq!(runtime.accepted().await.text(), "cancelled");
    assert!(runtime.pending().is_empty(), "the call ran once");
}

#[tokio::test]
async fn tokens_and_keys_in_files_can_be_replaced_and_keep_their_caller() {
    let data = data_dir();
    let [tokens, keys] = ["tokens", "keys"].map(|name| data.path().join(name));
    fs::write(&tokens, "first-token\n").unwrap();
    fs::write(&keys, OLD).unwrap();
    let server = tools()
        .auth(Auth::BearerFile { caller: "a".into(), file: tokens.clone() })
        .auth(Auth::HmacFile { caller: "b".into(), file: keys.clone() });
    let server = Server::start(server, &data.path().join("journal")).await;
    let runtime = Runtime::start().await;
    let invoke = format!("{}/invoke", server.url);
    let call = runtime.invocation("wait", "t", "c", json!({"text": ""}));
    assert_eq!(post(&invoke, &bearer("first-token"), &call).await.0, 200);
    assert_eq!(post(&invoke, &bearer("second-token"), &call).await.0, 401);
    // Both are accepted for a while, then the first one is removed.
    let status = format!("{}/tool_call_status", server.url);
    let query = json!({"thread_id": "t", "tool_call_id": "c"});
    let alive =
        async |headers: Headers| post(&status, &headers, &query).await == (200, r#"{"alive":true}"#.into());
    fs::write(&tokens, "second-token\nfirst-token\n").unwrap();
    until("the second token is accepted", async || alive(bearer("second-token")).await).await;
    assert!(alive(bearer("first-token")).await);
    fs::write(&tokens, "second-token\n").unwrap();
    until("the first token is refused", async || !alive(bearer("first-token")).await).await;
    assert!(alive(bearer("second-token")).await, "it is the same caller");
    // Another caller does not see the call.
    assert_eq!(
        post(&status, &signed(&[OLD], "s", now(), &query), &query).await,
        (200, r#"{"alive":false}"#.into())
    );
    fs::write(&keys, NEW).unwrap();
    until("the new key is accepted", async || {
        post(&status, &signed(&[NEW], "s", now(), &query), &query).await.0 == 200
    })
    .await;
    assert_eq!(post(&status, &signed(&[OLD], "s", now(), &query), &query).await.0, 401);
}

fn access_key() -> AccessKey {
    AccessKey {
        id: "AKID".into(),
        secret: Secret::new("s3cret-access-key"),
        session: None,
        region: "eu-west-1".into(),
        service: "lambda".into(),
    }
}

#[tokio::test]
async fn requests_can_be_signed_as_those_to_aws() {
    let data = data_dir();
    let auth = Auth::Sigv4 {
        access_key_id: "AKID".into(),
        secret_access_key: "s3cret-access-key".into(),
        region: "eu-west-1".into(),
        service: "lambda".into(),
    };
    let server = Server::start(tools().auth(auth), data.path()).await;
    let mut runtime = Runtime::start().await;
    let call = runtime.invocation("say", "t", "c", json!({"text": "hello"}));
    let invoke: Url = format!("{}/invoke", server.url).parse().unwrap();
    let close: Url = format!("{}/close_thread", server.url).parse().unwrap();
    let sign = |key: AccessKey, url: &Url, at| key.sign("POST", url, call.to_string().as_bytes(), at);
    let other = AccessKey { secret: Secret::new("other"), ..access_key() };
    let unknown = AccessKey { id: "UNKNOWN".into(), ..access_key() };
    for (headers, expected) in [
        (sign(other, &invoke, now()), "the signature of the request is not valid"),
        (sign(unknown, &invoke, now()), "the access key of the request is not known"),
        (sign(access_key(), &close, now()), "the signature of the request is not valid"),
        (sign(access_key(), &invoke, now().minus(Duration::from_secs(400))), "check both clocks"),
        (Vec::new(), "sign the request with AWS4-HMAC-SHA256"),
    ] {
        let (status, answer) = post(invoke.as_str(), &headers, &call).await;
        assert!(status == 401 && answer.contains(expected) && !answer.contains("s3cret"), "{answer}");
    }
    assert_eq!(post(invoke.as_str(), &sign(access_key(), &invoke, now()), &call).await, (200, String::new()));
    runtime.expect_text("hello").await;
}

/// A client that trusts the authority, and may show a certificate.
fn client(authority: &Authority, identity: Option<&str>, directory: &TempDir) -> Client {
    let identity = identity.map(|name| authority.certify(directory.path(), name, &[name]));
    let tls = ClientTls { identity, ca: Some(authority.file.clone()) };
    let client = tls.outgoing(UrlPolicy::Loopback.into(), ClientLimits::default()).unwrap();
    client.get().as_ref().clone()
}

fn server_tls(authority: &Authority, directory: &Path) -> ServerTls {
    let (cert, key) = authority.certify(directory, "server", &["127.0.0.1"]);
    let client_ca = Some(authority.file.clone());
    ServerTls { cert, key, client_ca, clients: ClientCertificates::Optional }
}

/// Proves: TR-19, TR-24
#[tokio::test]
async fn a_client_certificate_identifies_its_caller() {
    let (data, files) = (data_dir(), data_dir());
    let authority = Authority::new(files.path(), "ours");
    let names = vec!["runtime.example".to_owned(), "other.example".to_owned()];
    let server = tools().tls(server_tls(&authority, files.path())).auth(Auth::MutualTls { names });
    let server = Server::start(server, data.path()).await;
    let url = server.url.replace("http:", "https:");
    let runtime = Runtime::start().await;
    let call = runtime.invocation("wait", "t", "c", json!({"text": ""}));
    let query = json!({"thread_id": "t", "tool_call_id": "c"});
    let send = async |client: &Client, path: &str, body: &Value| {
        let url = format!("{url}{path}").parse().unwrap();
        let reply = client.post_json(&url, &[], body.to_string().into()).await.unwrap();
        (reply.status, String::from_utf8_lossy(&reply.body).into_owned())
    };
    let known = client(&authority, Some("runtime.example"), &files);
    assert_eq!(send(&known, "/invoke", &call).await, (200, String::new()));
    assert_eq!(send(&known, "/tool_call_status", &query).await.1, r#"{"alive":true}"#);
    let other = client(&authority, Some("other.example"), &files);
    assert_eq!(send(&other, "/tool_call_status", &query).await.1, r#"{"alive":false}"#);
    for identity in [None, Some("stranger.example")] {
        let (status, answer) = send(&client(&authority, identity, &files), "/invoke", &call).await;
        assert!(status == 401 && answer.contains("show a client certificate"), "{identity:?}: {answer}");
    }
    // Discovery needs no credentials.
    let discovery = format!("{url}/.well-known/rap-toolset").parse().unwrap();
    let anonymous = client(&authority, None, &files);
    assert_eq!(anonymous.get(&discovery, &[], 1 << 20).await.unwrap().status, 200);
}

#[tokio::test]
async fn a_router_cannot_authenticate_by_certificates() {
    let data = data_dir();
    for auth in [
        Auth::MutualTls { names: Vec::new() },
        Auth::ProxyHeader { header: "x".into(), proxies: vec!["127.0.0.1".into()], names: Vec::new() },
    ] {
        let mounted = tools().auth(auth).data(data.path()).public_url("https://example.com").mount().await;
        let error = mounted.err().expect("it started").to_string();
        assert!(error.contains("a router does not have"), "{error}");
    }
}

#[test]
fn half_an_environment_is_an_error() {
    let data = data_dir();
    for (variable, expected) in [
        ("RAP_TOOL_TLS_CERT", "RAP_TOOL_TLS_CERT and RAP_TOOL_TLS_KEY belong together"),
        ("RAP_TOOL_CALLBACK_KEY", "RAP_TOOL_CALLBACK_CERT and RAP_TOOL_CALLBACK_KEY belong together"),
        ("RAP_TOOL_TLS_CLIENT_CA", "RAP_TOOL_TLS_CERT and RAP_TOOL_TLS_CLIENT_CA belong together"),
        ("RAP_TOOL_HMAC_FILE", "cannot use the file"),
        ("RAP_TOOL_BEARER_FILE", "cannot use the file"),
        ("RAP_TOOL_HMAC", "expected one to four keys"),
    ] {
        let log = ToolProcess::refused("hello", data.path(), &[(variable, "no-such-file")]);
        assert!(log.contains(expected), "{variable}: {log}");
    }
}

#[tokio::test]
async fn a_server_that_wants_certificates_has_to_ask_for_them() {
    let data = data_dir();
    let refused =
        tools().auth(Auth::MutualTls { names: Vec::new() }).data(data.path()).bind("127.0.0.1:0").await;
    let error = refused.err().expect("it started").to_string();
    assert!(error.contains("client_ca"), "{error}");
}

#[tokio::test]
async fn only_a_trusted_proxy_can_name_the_caller() {
    let runtime = Runtime::start().await;
    let call = runtime.invocation("say", "t", "c", json!({"text": "hello"}));
    let header = |value: &str| vec![(HeaderName::from_static("x-client-name"), value.parse().unwrap())];
    for (proxies, name, expected) in [
        (&["127.0.0.1", "::1"][..], "runtime.example", 200),
        (&["127.0.0.1", "::1"], "stranger.example", 401),
        (&["127.0.0.1", "::1"], "", 401),
        (&["10.0.0.0/8"], "runtime.example", 401),
    ] {
        let auth = Auth::ProxyHeader {
            header: "X-Client-Name".into(),
            proxies: proxies.iter().map(ToString::to_string).collect(),
            names: vec!["runtime.example".into()],
        };
        let data = data_dir();
        let server = Server::start(tools().auth(auth), data.path()).await;
        let (status, answer) = post(&format!("{}/invoke", server.url), &header(name), &call).await;
        assert_eq!(status, expected, "{proxies:?} {name}: {answer}");
    }
}

#[tokio::test]
async fn invalid_credentials_are_an_error_at_the_start_without_secrets() {
    let data = data_dir();
    let missing = data.path().join("missing");
    for (auth, expected) in [
        (hmac(&["s3cret"]), "expected one to four keys"),
        (Auth::BearerFile { caller: "a".into(), file: missing.clone() }, "missing: entity not found"),
        (Auth::HmacFile { caller: "a".into(), file: missing }, "missing: entity not found"),
        (
            Auth::ProxyHeader { header: "x".into(), proxies: vec!["s3cret".into()], names: Vec::new() },
            "addresses or networks of proxies",
        ),
    ] {
        let refused = tools().auth(auth).data(data.path().join("journal")).bind("127.0.0.1:0").await;
        let error = refused.err().expect("it started").to_string();
        assert!(error.contains(expected) && !error.contains("s3cret"), "{error}");
    }
}

/// Starts an authorization server that knows the tokens `of-CLIENT`. Those of `slow` get an error.
async fn authorization_server() -> AuthorizationServer {
    let answer = |body: String| async move {
        let token = body.split('&').find_map(|part| part.strip_prefix("token=")).unwrap().to_owned();
        let client = token.strip_prefix("of-");
        match client {
            Some("slow") => Err(axum::http::StatusCode::BAD_GATEWAY),
            client => Ok(axum::Json(json!({"active": client.is_some(), "client_id": client}))),
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/introspect", listener.local_addr().unwrap());
    let router = axum::Router::new().route("/introspect", axum::routing::post(answer));
    tokio::spawn(async move { axum::serve(listener, router).await });
    AuthorizationServer {
        introspection_url: url.parse().unwrap(),
        client_id: "tool".into(),
        client_secret: SecretSource::Given(Secret::new("pass")),
        audience: None,
        scope: None,
    }
}

#[tokio::test]
async fn an_access_token_identifies_the_client_that_it_was_given_to() {
    let (data, mut runtime) = (data_dir(), Runtime::start().await);
    let server = authorization_server().await;
    let clients = vec!["one".into(), "two".into(), "slow".into()];
    let tools = tools().auth(Auth::Oauth { server, clients }).bearer("fixed");
    let server = Server::start(tools, data.path()).await;
    let send = async |path: &str, token: &str, body: &Value| {
        post(&format!("{}{path}", server.url), &bearer(token), body).await
    };
    let call = runtime.invocation("wait", "t", "1", json!({"text": ""}));
    for (token, expected) in [("of-three", 401), ("made up", 401), ("", 401), ("of-slow", 503)] {
        let (status, text) = send("/invoke", token, &call).await;
        assert_eq!(status, expected, "{token}: {text}");
        assert!(!text.contains("of-"), "{text}");
    }
    assert_eq!(send("/invoke", "of-one", &call).await.0, 200);
    let query = json!({"thread_id": "t", "tool_call_id": "1"});
    for (token, expected) in [("of-one", true), ("of-two", false), ("fixed", false)] {
        assert_eq!(send("/tool_call_status", token, &query).await.1.contains("true"), expected, "{token}");
    }
    assert_eq!(send("/cancel_tool_call", "of-one", &query).await.0, 200);
    runtime.expect_text("cancelled").await;
    server.stop().await;
}
