//! Tokens of clients: what they permit, what they see, and when they end.

use std::collections::BTreeSet;

use rap_testkit::http::{self, Response};
use rap_testkit::peer::Reply;
use rap_testkit::stream::{Stream, data};
use rap_testkit::tools::INVOKE;
use rap_testkit::{Client, Rap, Setup, Tools, until};
use serde_json::{Value, json};

const ADMIN: &str = "token-of-the-operator";
const LISTINGS: [&str; 6] = ["threads", "calls", "subscriptions", "timers", "inbox", "deliveries"];

fn with_operator(tools: &Tools) -> Rap {
    Setup::new().tools(tools).token(ADMIN).start()
}

/// Creates a token. Returns its id and a client that uses it.
async fn create(admin: &Client, token: Value) -> (String, Client) {
    let created = admin.post("/v1/tokens", &token).await.expect(201);
    let [id, token] = ["id", "token"].map(|name| created[name].as_str().unwrap());
    (id.to_owned(), Client::new(&admin.url, Some(token)))
}

async fn of_user(admin: &Client, user: &str) -> Client {
    create(admin, json!({"name": format!("of {user}"), "scope": "write", "user_id": user})).await.1
}

fn bearer(client: &Client) -> String {
    format!("Bearer {}", client.token().unwrap())
}

async fn request(client: &Client, method: &str, path: &str, body: &Value) -> Response {
    let bearer = bearer(client);
    let mut headers = vec![("authorization", bearer.as_str())];
    let body = if method == "POST" { body.to_string() } else { String::new() };
    if method == "POST" {
        headers.push(("content-type", "application/json"));
    }
    client.send(method, path, &headers, body.as_bytes()).await
}

async fn revoke(admin: &Client, id: &str) -> Response {
    request(admin, "DELETE", &format!("/v1/tokens/{id}"), &Value::Null).await
}

async fn stream(client: &Client, path: &str) -> Stream {
    Stream::open_with(client, path, &[("authorization", &bearer(client))]).await.unwrap()
}

#[tokio::test]
async fn a_token_is_shown_once_and_works_until_it_is_revoked() {
    let tools = Tools::start().await;
    let rap = with_operator(&tools);
    let (id, client) = create(&rap, json!({"name": "phone", "scope": "write"})).await;
    assert!(client.token().unwrap().starts_with("rap_"), "people recognise it");
    assert!(client.token().unwrap().len() >= 36, "it cannot be guessed");
    let thread = client.open("say hello").await;
    client.until_idle(&thread).await;
    let used = until("its use is recorded", async || {
        let listed = rap.get("/v1/tokens").await;
        let token = listed.expect(200)["tokens"][0].clone();
        Some(token).filter(|token| !token["last_used_at"].is_null())
    });
    let used = used.await;
    let shown = ["id", "name", "scope", "user_id"].map(|field| used[field].clone());
    assert_eq!(shown, [json!(id), json!("phone"), json!("write"), json!(null)]);
    assert_eq!(used.as_object().unwrap().len(), 6, "neither the token nor its digest is listed: {used}");
    let rap = rap.restarted();
    let of_thread = format!("/v1/threads/{thread}/events");
    let mut streams = [stream(&client, &of_thread).await, stream(&client, "/v1/events").await];
    let mut kept = stream(&rap, "/v1/events").await;
    revoke(&rap, &id).await.expect(200);
    for stream in &mut streams {
        assert_eq!(stream.until("end").await["reason"], "the token was revoked");
    }
    let refused = client.get("/v1/threads").await;
    assert_eq!(refused.refusal(), (401, "unauthorised"));
    assert_eq!(refused.message(), "the token is wrong or was revoked; use another one");
    assert_eq!(revoke(&rap, &id).await.refusal(), (404, "no_such_token"));
    assert_eq!(revoke(&rap, "no-number").await.refusal(), (404, "no_such_token"));
    assert_eq!(rap.get("/v1/tokens").await.expect(200)["tokens"], json!([]));
    // The stream of another token continues.
    rap.say(&thread, "say more").await;
    assert_eq!(kept.until("status").await["thread_id"], thread.as_str());
}

/// Other processes may share the database.
#[tokio::test]
async fn a_token_that_another_process_revoked_stops_working() {
    let tools = Tools::start().await;
    let rap = with_operator(&tools);
    let (id, client) = create(&rap, json!({"name": "phone", "scope": "read"})).await;
    let mut stream = stream(&client, "/v1/events").await;
    let database = rusqlite::Connection::open(rap.directory().join("rap.db")).unwrap();
    assert_eq!(database.execute("DELETE FROM tokens WHERE no = ?1", [&id]).unwrap(), 1);
    assert_eq!(client.get("/v1/threads").await.status, 401);
    assert_eq!(stream.until("end").await["reason"], "the token was revoked");
}

#[tokio::test]
async fn malformed_tokens_are_refused_with_a_reason() {
    let rap = Setup::new().token(ADMIN).start();
    let table = [
        (json!({"name": "", "scope": "read"}), "name: expected 1 to 100 characters"),
        (json!({"name": "x".repeat(101), "scope": "read"}), "name: expected 1 to 100 characters"),
        (json!({"name": "a\u{1b}[2J", "scope": "read"}), "name: expected 1 to 100 characters"),
        (json!({"name": "x", "scope": "root"}), "scope: expected one of read, write, admin"),
        (json!({"name": "x"}), "missing field `scope`"),
        (json!({"name": "x", "scope": "read", "user_id": ""}), "user_id: an identifier has 1 to 256 bytes"),
        (
            json!({"name": "x", "scope": "admin", "user_id": "ann"}),
            "user_id: an admin token sees all threads",
        ),
    ];
    for (token, why) in table {
        let refused = rap.post("/v1/tokens", &token).await;
        assert_eq!(refused.refusal(), (400, "invalid"), "{token}");
        assert!(refused.message().starts_with(why), "{token}: {}", refused.message());
    }
}

/// Tokens, moves of sessions between runtimes, and the deletion of many sessions.
fn is_for_admins(path: &str) -> bool {
    ["/tokens", "/imports", "/migrate", "/move", "/prune"].iter().any(|part| path.contains(part))
}

/// Every operation of the description, with each scope.
#[tokio::test]
async fn a_scope_permits_what_it_says() {
    let tools = Tools::start().await;
    let rap = with_operator(&tools);
    let document = rap.get("/openapi.json").await.expect(200);
    for (scope, permitted) in [("read", &["read"][..]), ("write", &["read", "write"]), ("admin", &["admin"])]
    {
        let (_, client) = create(&rap, json!({"name": scope, "scope": scope})).await;
        for (path, operations) in document["paths"].as_object().unwrap() {
            for (method, operation) in operations.as_object().unwrap() {
                let Some(needed) = operation["security"][0]["bearer"][0].as_str() else { continue };
                let expected = match (is_for_admins(path), method.as_str()) {
                    (true, _) => "admin",
                    (false, "get") => "read",
                    (false, _) => "write",
                };
                assert_eq!(needed, expected, "{method} {path}");
                if path == "/v1/events" {
                    continue;
                }
                let path = path.replace("{id}", "unknown").replace("{call_id}", "unknown");
                let answer = request(&client, &method.to_uppercase(), &path, &json!({})).await;
                if scope == "admin" || permitted.contains(&needed) {
                    assert!(![401, 403].contains(&answer.status), "{scope} {method} {path}: {answer:?}");
                } else {
                    assert_eq!(answer.refusal(), (403, "insufficient_scope"), "{scope} {method} {path}");
                    let why = format!("this request needs a token with the scope {needed}");
                    assert!(answer.message().starts_with(&why), "{}", answer.message());
                }
            }
        }
    }
}

/// Gives a user a row in each listing, by that user's token.
async fn busy(client: &Client, tools: &Tools) {
    client.open("call sleep {\"seconds\": 100000}").await;
    client.open("call work {}").await;
    let call = tools.invocation().await;
    call.says(&call.question(&format!("{}/answer", tools.url))).await;
    client.open("call watch {}").await;
    let call = tools.invocation().await;
    call.confirms("watching").await;
    call.says(&call.event("tick")).await;
    tools.answer_next(INVOKE, Reply::Status(400));
    client.open("call work {}").await;
    tools.invocation().await;
    until("a delivery is noted", async || (!client.raw_listing("deliveries").await.is_empty()).then_some(()))
        .await;
}

fn ids(rows: &[Value], field: &str) -> BTreeSet<String> {
    rows.iter().map(|row| row[field].as_str().unwrap_or("nobody").to_owned()).collect()
}

/// Reads the stream of all threads until it has a delivery. Returns the names and the threads of its events.
async fn heard(stream: &mut Stream) -> (BTreeSet<String>, BTreeSet<String>) {
    let (mut names, mut threads) = (BTreeSet::new(), BTreeSet::new());
    while !names.contains("delivery") {
        let event = stream.next().await.unwrap();
        threads.insert(data(&event)["thread_id"].as_str().unwrap_or("nobody").to_owned());
        names.insert(event.name);
    }
    (names, threads)
}

/// Two users are busy at the same time. Each sees and hears everything of their own threads, and nothing else.
#[tokio::test]
async fn a_token_of_a_user_sees_and_hears_only_threads_of_that_user() {
    let tools = Tools::start().await;
    let rap = with_operator(&tools);
    let users = [("ann", of_user(&rap, "ann").await), ("bob", of_user(&rap, "bob").await)];
    rap.open("say the thread of nobody").await;
    http::post(&format!("{}/callback/of-no-thread", rap.url), &json!({})).await.expect_refusal(401);
    let mut streams = Vec::new();
    for (_, client) in &users {
        streams.push(stream(client, "/v1/events").await);
    }
    // The second user acts first, so that its events would come before those of the first user in the wrong stream.
    for (_, client) in users.iter().rev() {
        busy(client, &tools).await;
    }
    let all = rap.raw_listing("threads").await;
    let mut rows = 0;
    for ((user, client), stream) in users.iter().zip(&mut streams) {
        let own = all.iter().filter(|thread| thread["user_id"] == *user).cloned().collect::<Vec<_>>();
        let own = ids(&own, "id");
        assert_eq!(own.len(), 5, "four threads and an event child: {all:?}");
        for listing in LISTINGS {
            let listed = client.raw_listing(listing).await;
            let threads = ids(&listed, if listing == "threads" { "id" } else { "thread_id" });
            assert!(!threads.is_empty() && threads.is_subset(&own), "{listing} of {user}: {listed:?}");
            rows += listed.len();
        }
        let (names, threads) = heard(stream).await;
        assert!(threads.is_subset(&own), "{user} hears of {threads:?}");
        let expected = ["choice", "delivery", "status"].map(str::to_owned);
        assert!(expected.iter().all(|name| names.contains(name)), "{user} hears {names:?}");
    }
    let mut every = 0;
    for listing in LISTINGS {
        every += rap.raw_listing(listing).await.len();
    }
    assert_eq!(every, rows + 2, "the operator also sees a thread and a delivery of nobody");
    let metrics = rap.send("GET", "/metrics", &[], b"").await.text;
    for text in ["ann", "bob"].into_iter().map(str::to_owned).chain(ids(&all, "id")) {
        assert!(!metrics.contains(&format!("\"{text}\"")), "{text} is in the metrics");
    }
}

/// Each operation on one object: a name that tells whether a thread or a delivery is meant, its path and its body.
const OPERATIONS: [(&str, &str, &str, &str); 17] = [
    ("thread", "GET", "/v1/threads/{id}", ""),
    ("thread", "GET", "/v1/threads/{id}/history", ""),
    ("thread", "GET", "/v1/threads/{id}/events", ""),
    ("thread", "GET", "/v1/threads/{id}/views", ""),
    ("thread", "GET", "/v1/threads/{id}/usage", ""),
    ("thread", "POST", "/v1/threads/{id}/messages", r#"{"text": "hello"}"#),
    ("thread", "DELETE", "/v1/threads/{id}", ""),
    ("thread", "POST", "/v1/threads/{id}/interrupt", "{}"),
    ("thread", "POST", "/v1/threads/{id}/close", "{}"),
    ("thread", "POST", "/v1/threads/{id}/resume", "{}"),
    ("thread", "POST", "/v1/threads/{id}/fork", "{}"),
    ("thread", "POST", "/v1/threads/{id}/calls/{call_id}/cancel", "{}"),
    ("thread", "POST", "/v1/threads/{id}/calls/{call_id}/choice", r#"{"selected": 0}"#),
    ("thread", "GET", "/v1/threads?parent={id}", ""),
    ("thread", "GET", "/v1/deliveries?thread={id}", ""),
    ("delivery", "GET", "/v1/deliveries/{id}", ""),
    ("delivery", "POST", "/v1/deliveries/{id}/redeliver", "{}"),
];

/// An object of another user is answered in the same words as one that does not exist.
#[tokio::test]
async fn threads_of_others_do_not_exist_for_a_token_of_a_user() {
    let tools = Tools::start().await;
    let rap = with_operator(&tools);
    let (ann, bob) = (of_user(&rap, "ann").await, of_user(&rap, "bob").await);
    busy(&bob, &tools).await;
    let question = bob.raw_listing("inbox").await.remove(0);
    let parent = bob.raw_listing("subscriptions").await.remove(0);
    let delivery = bob.raw_listing("deliveries").await.remove(0);
    let text = |row: &Value, name: &str| row[name].as_str().unwrap().to_owned();
    let call = text(&question, "call_id");
    for (kind, method, path, body) in OPERATIONS {
        let foreign = match kind {
            "delivery" => text(&delivery, "id"),
            _ if path.contains("parent") => text(&parent, "thread_id"),
            _ if path.starts_with("/v1/deliveries") => text(&delivery, "thread_id"),
            _ => text(&question, "thread_id"),
        };
        let body = serde_json::from_str(body).unwrap_or(Value::Null);
        let ask = async |client: &Client, id: &str, call: &str| {
            let path = path.replace("{id}", id).replace("{call_id}", call);
            request(client, method, &path, &body).await
        };
        let unknown = if kind == "delivery" { "999999" } else { "unknown" };
        let (foreign, unknown) = (ask(&ann, &foreign, &call).await, ask(&ann, unknown, "unknown").await);
        assert_eq!((foreign.status, &foreign.text), (unknown.status, &unknown.text), "{method} {path}");
        assert!(foreign.status == 404 || path.contains('?'), "{method} {path}: {foreign:?}");
    }
    // Nothing has happened to the thread, and its own user can answer the question.
    let path = format!("/v1/threads/{}/calls/{call}/choice", text(&question, "thread_id"));
    bob.post(&path, &json!({"selected": 0})).await.expect(202);
    // The table above has every operation on one object.
    let document = rap.get("/openapi.json").await.expect(200);
    let paths = document["paths"].as_object().unwrap().keys();
    for path in paths.filter(|path| path.contains('{') && !is_for_admins(path)) {
        assert!(OPERATIONS.iter().any(|(_, _, known, _)| known == path), "{path} is missing in the table");
    }
}

#[tokio::test]
async fn nodes_and_threads_that_are_being_moved_tell_nothing_about_other_users() {
    let rap = Setup::new().token(ADMIN).start();
    let (ann, bob) = (of_user(&rap, "ann").await, of_user(&rap, "bob").await);
    assert_eq!(rap.get("/v1/nodes").await.expect(200)["nodes"].as_array().unwrap().len(), 1);
    assert_eq!(bob.get("/v1/nodes").await.expect(200)["nodes"], json!([]));
    // A session that has left, as it is stored until its destination has put it into use.
    let record = json!({"thread": {
        "id": "left", "key": 7, "token_key": 7, "parent": null, "source": null, "inherits": 0, "ancestors": [],
        "incarnation": 1, "agent": "default", "user_id": "ann", "title": null, "created_at": 0, "updated_at": 0,
        "version": 1, "ask": null, "head": "{}",
    }});
    let database = rusqlite::Connection::open(rap.directory().join("rap.db")).unwrap();
    database.execute("INSERT INTO parcels VALUES ('left', 'left', x'', 0)", []).unwrap();
    let values = [record.to_string()];
    database
        .execute("INSERT INTO parcel_records (session, no, record) VALUES ('left', 1, ?1)", values)
        .unwrap();
    database.execute("INSERT INTO parcel_threads VALUES ('left', 'left')", []).unwrap();
    for client in [&*rap, &ann] {
        assert_eq!(client.get("/v1/threads/left").await.refusal(), (503, "moving"));
    }
    let (foreign, unknown) = (bob.get("/v1/threads/left").await, bob.get("/v1/threads/unknown").await);
    assert_eq!((foreign.status, &foreign.text), (404, &unknown.text));
    assert_eq!(bob.post("/v1/threads", &json!({"id": "left"})).await.refusal(), (409, "thread_exists"));
}

#[tokio::test]
async fn a_token_of_a_user_creates_threads_of_that_user() {
    let tools = Tools::start().await;
    let rap = with_operator(&tools);
    let (ann, bob) = (of_user(&rap, "ann").await, of_user(&rap, "bob").await);
    let message = "call spawn_thread {\"instructions\": \"say dug\"}";
    let own = ann.post("/v1/threads", &json!({"id": "own", "user_id": "ann", "message": message})).await;
    assert_eq!(own.expect(201)["user_id"], "ann");
    let child = ann.child("own").await;
    let fork = ann.post("/v1/threads/own/fork", &json!({})).await.expect(201);
    for thread in [child.as_str(), fork["id"].as_str().unwrap(), &ann.open("say hello").await] {
        assert_eq!(rap.thread(thread).await["user_id"], "ann");
    }
    let refused = ann.post("/v1/threads", &json!({"user_id": "bob"})).await;
    assert_eq!(refused.refusal(), (403, "wrong_user"));
    assert!(refused.message().contains("leave user_id out") && !refused.message().contains("bob"));
    // An id belongs to one thread of all users. The answer says only that it is taken.
    let by_owner = ann.post("/v1/threads", &json!({"id": "own"})).await;
    let by_other = bob.post("/v1/threads", &json!({"id": "own"})).await;
    assert_eq!(by_other.refusal(), (409, "thread_exists"));
    assert_eq!(by_other.text, by_owner.text);
    assert_eq!(bob.raw_listing("threads").await.len(), 0);
}

#[tokio::test]
async fn idempotency_keys_belong_to_their_client() {
    let tools = Tools::start().await;
    let setup = Setup::new().tools(&tools).server(&format!("tokens = [\"{ADMIN}\", \"another-operator\"]"));
    let rap = setup.start();
    let operators = [ADMIN, "another-operator"].map(|token| Client::new(&rap.url, Some(token)));
    let [first, second] = operators;
    let clients = [of_user(&first, "ann").await, of_user(&first, "bob").await, first, second];
    let post = async |client: &Client, path: &str, body: Value| {
        let bearer = bearer(client);
        let headers = [("authorization", bearer.as_str()), ("idempotency-key", "key-1")];
        http::post_with(&format!("{}{path}", rap.url), &headers, &body).await
    };
    let mut threads = BTreeSet::new();
    for (number, client) in clients.iter().enumerate() {
        let title = format!("title {number}");
        let mut again = BTreeSet::new();
        for _ in 0..2 {
            let thread = post(client, "/v1/threads", json!({"title": title})).await.expect(201);
            again.insert(thread["id"].as_str().unwrap().to_owned());
        }
        assert_eq!(again.len(), 1, "a repeat creates nothing");
        threads.extend(again);
        let reused = post(client, "/v1/threads", json!({"title": "another"})).await;
        assert_eq!(reused.refusal(), (409, "key_reused"));
    }
    assert_eq!(threads.len(), clients.len());
    assert_eq!(rap.rows("threads"), 4);
}

/// Without `server.tokens` this machine needs no token, but a token that is given counts.
#[tokio::test]
async fn an_open_runtime_honours_the_tokens_that_it_is_given() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("say hello").await;
    let created = rap.post("/v1/tokens", &json!({"name": "reader", "scope": "read"})).await.expect(201);
    assert_eq!(created["open"], true);
    let reader = Client::new(&rap.url, created["token"].as_str());
    let id = created["id"].as_str().unwrap();
    assert_eq!(reader.raw_listing("threads").await.len(), 1);
    let refused = reader.post(&format!("/v1/threads/{thread}/close"), &json!({})).await;
    assert_eq!(refused.refusal(), (403, "insufficient_scope"));
    let ann = of_user(&rap, "ann").await;
    assert_eq!(ann.raw_listing("threads").await.len(), 0);
    rap.send("DELETE", &format!("/v1/tokens/{id}"), &[], b"").await.expect(200);
    let unknown = format!("rap_{}", "x".repeat(43));
    for wrong in [reader.token().unwrap(), &unknown, "anything"] {
        let refused = Client::new(&rap.url, Some(wrong)).get("/v1/threads").await;
        assert_eq!(refused.refusal(), (401, "unauthorised"));
    }
    assert_eq!(rap.raw_listing("threads").await.len(), 1, "no token is needed");
    // With a token, requests from pages of other sites are served, which are refused without one.
    let origin = ("origin", "https://elsewhere.example");
    let refused = rap.send("GET", "/v1/threads", &[origin], b"").await;
    assert_eq!(refused.refusal(), (403, "foreign_origin"));
    let bearer = bearer(&ann);
    rap.send("GET", "/v1/threads", &[origin, ("authorization", &bearer)], b"").await.expect(200);
}

#[tokio::test]
async fn requests_beyond_the_rate_of_a_token_are_refused() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).token(ADMIN).limit("requests_per_second = 1").start();
    let flood = |client: Client| async move {
        let requests = (0..12).map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.get("/v1/tools").await })
        });
        let mut answers = Vec::new();
        for request in requests.collect::<Vec<_>>() {
            answers.push(request.await.unwrap());
        }
        answers
    };
    let answers = flood(rap.client()).await;
    let refused: Vec<&Response> = answers.iter().filter(|answer| answer.status == 429).collect();
    assert!(answers.iter().any(|answer| answer.status == 200), "{answers:?}");
    assert!(!refused.is_empty(), "{answers:?}");
    assert!(refused.iter().all(|answer| answer.code() == "too_many" && answer.retry_after().is_some()));
    assert!(refused[0].message().contains("limits.requests_per_second"), "{}", refused[0].message());
    // Health checks have no token and no limit.
    assert_eq!(rap.send("GET", "/healthz", &[], b"").await.status, 200);
}
