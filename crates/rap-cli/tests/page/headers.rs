//! Protection of the page as a client sees it: headers, the cookie, and the origin of requests.

use rap_testkit::http::Response;
use rap_testkit::{Client, Rap, Setup};
use serde_json::{Value, json};

use crate::TOKEN;

const JSON: (&str, &str) = ("content-type", "application/json");

async fn sign_in(rap: &Rap, origin: Option<&str>, token: &str) -> Response {
    let headers: Vec<_> = [JSON].into_iter().chain(origin.map(|origin| ("origin", origin))).collect();
    rap.send("POST", "/session", &headers, json!({"token": token}).to_string().as_bytes()).await
}

/// Signs in. Returns the cookie as a browser sends it.
async fn cookie(rap: &Rap, token: &str) -> String {
    let answer = sign_in(rap, Some(&rap.url), token).await;
    let set = answer.exact_header("set-cookie").expect("a cookie").to_owned();
    for attribute in ["HttpOnly", "SameSite=Strict", "Path=/"] {
        assert!(set.contains(attribute), "{set}");
    }
    assert!(!set.contains(token), "the cookie is not the token");
    set.split(';').next().unwrap().to_owned()
}

#[tokio::test]
async fn every_address_of_the_page_forbids_inline_scripts_and_frames() {
    let rap = Setup::new().token(TOKEN).start();
    for path in [
        "/",
        "/threads",
        "/threads/some-id",
        "/inbox",
        "/subscriptions",
        "/timers",
        "/deliveries",
        "/tools",
        "/nodes",
    ] {
        let page = rap.send("GET", path, &[], b"").await;
        assert_eq!(page.status, 200, "{path}");
        let policy = page.header("content-security-policy").unwrap();
        assert!(
            policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"),
            "{policy}"
        );
        assert!(policy.contains("script-src 'self'") && !policy.contains("unsafe"), "{policy}");
        assert_eq!(page.header("x-frame-options"), Some("deny"));
        assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
        assert!(!page.text.contains("<style") && !page.text.contains("onload="), "nothing is inline");
    }
    let script = rap.send("GET", "/assets/app.js", &[], b"").await;
    let tag = script.exact_header("etag").unwrap().to_owned();
    assert_eq!(rap.send("GET", "/assets/app.js", &[("if-none-match", &tag)], b"").await.status, 304);
    assert_eq!(rap.send("GET", "/assets/unknown.js", &[], b"").await.status, 404);
}

#[tokio::test]
async fn a_cookie_works_only_for_requests_of_the_page_itself() {
    let rap = Setup::new().token(TOKEN).start();
    let cookie = cookie(&rap, TOKEN).await;
    let send = async |method: &str, path: &str, headers: &[(&str, &str)]| {
        let headers: Vec<_> = headers.iter().copied().chain([("cookie", cookie.as_str()), JSON]).collect();
        rap.send(method, path, &headers, if method == "POST" { b"{}" } else { b"" }).await
    };
    assert_eq!(send("GET", "/v1/threads", &[]).await.status, 200);
    assert_eq!(send("GET", "/v1/threads", &[("sec-fetch-site", "same-site")]).await.status, 403);
    assert_eq!(send("POST", "/v1/threads", &[("origin", &rap.url)]).await.status, 201);
    let neighbour = "http://127.0.0.1:1";
    for origin in [neighbour, "https://evil.example", "null"] {
        assert_eq!(
            send("POST", "/v1/threads", &[("origin", origin)]).await.refusal(),
            (403, "foreign_origin")
        );
        assert_eq!(sign_in(&rap, Some(origin), TOKEN).await.status, 403, "{origin}");
    }
    assert_eq!(send("POST", "/v1/threads", &[]).await.status, 403, "a browser names its origin");
    let thread = rap.open("say hello").await;
    let path = format!("/v1/threads/{thread}/close");
    let close = rap.send("POST", &path, &[("origin", neighbour), ("cookie", &cookie)], b"").await;
    assert_eq!(close.status, 403, "also without a body");
    let altered = format!("{}{}", &cookie[..cookie.len() - 8], "AAAAAAAA");
    assert_eq!(rap.send("GET", "/v1/threads", &[("cookie", &altered)], b"").await.status, 401);
}

/// Anybody can send a sign-in, so it has little memory.
#[tokio::test]
async fn a_sign_in_is_small() {
    let rap = Setup::new().token(TOKEN).start();
    let refused = sign_in(&rap, Some(&rap.url), &"x".repeat(5_000)).await;
    assert_eq!(refused.refusal(), (413, "too_large"));
    assert_eq!(sign_in(&rap, Some(&rap.url), &"x".repeat(100)).await.expect(200)["signed_in"], json!(false));
    assert_eq!(sign_in(&rap, Some(&rap.url), TOKEN).await.expect(200)["signed_in"], json!(true));
}

#[tokio::test]
async fn without_tokens_another_port_of_this_machine_is_another_site() {
    let rap = Setup::new().start();
    let post =
        async |origin: &str| rap.send("POST", "/v1/threads", &[JSON, ("origin", origin)], b"{}").await.status;
    assert_eq!(post(&rap.url).await, 201);
    assert_eq!(post("http://127.0.0.1:1").await, 403);
    assert_eq!(
        rap.send("POST", "/session", &[JSON, ("origin", "http://127.0.0.1:1")], b"{}").await.status,
        403
    );
    let session = rap.send("GET", "/session", &[], b"").await.expect(200);
    assert_eq!((&session["signed_in"], &session["needs_token"]), (&json!(true), &json!(false)));
}

/// The cookie of a token sees what the token sees, and ends with it.
#[tokio::test]
async fn a_cookie_has_the_scope_and_the_user_of_its_token_and_ends_with_it() {
    let rap = Setup::new().token(TOKEN).start();
    let token = json!({"name": "Ann", "scope": "read", "user_id": "ann"});
    let created = rap.post("/v1/tokens", &token).await.expect(201);
    rap.post("/v1/threads", &json!({"id": "of-ann", "user_id": "ann", "title": "hers"})).await.expect(201);
    rap.post("/v1/threads", &json!({"id": "of-bob", "user_id": "bob", "title": "his"})).await.expect(201);
    let cookie = cookie(&rap, created["token"].as_str().unwrap()).await;
    let get = async |path: &str| rap.send("GET", path, &[("cookie", cookie.as_str())], b"").await;
    let session = get("/session").await.expect(200);
    assert_eq!((&session["scope"], &session["user_id"]), (&json!("read"), &json!("ann")));
    let ids = |listing: &Value| -> Vec<String> {
        let threads = listing["threads"].as_array().unwrap();
        threads.iter().map(|thread| thread["id"].as_str().unwrap().to_owned()).collect()
    };
    for query in ["order=newest", "q=hers", "roots=true"] {
        assert_eq!(ids(&get(&format!("/v1/threads?{query}")).await.expect(200)), ["of-ann"], "{query}");
    }
    assert_eq!(ids(&get("/v1/threads?q=his").await.expect(200)), Vec::<String>::new());
    let figures = get("/v1/figures").await.expect(200);
    assert_eq!((&figures["threads"]["idle"], &figures["agents"]), (&json!(1), &json!([])));
    let headers = [JSON, ("cookie", cookie.as_str()), ("origin", &*rap.url)];
    assert_eq!(rap.send("POST", "/v1/threads", &headers, b"{}").await.status, 403, "it may only read");
    let operator: Client = rap.client();
    let bearer = format!("Bearer {TOKEN}");
    let path = format!("/v1/tokens/{}", created["id"].as_str().unwrap());
    assert_eq!(operator.send("DELETE", &path, &[("authorization", &bearer)], b"").await.status, 200);
    assert_eq!(get("/v1/threads").await.status, 401);
}
