//! The client API: successful requests and errors of every route.

use rap_testkit::peer::Reply;
use rap_testkit::tools::INVOKE;
use rap_testkit::{Rap, Setup, Tools, until};
use serde_json::{Value, json};

const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test]
async fn a_request_whose_parsed_form_would_need_much_memory_is_refused() {
    let rap = Setup::new().start();
    let content = format!("[{}{{}}]", "{\"a\":0},".repeat(200_000));
    let body = format!("{{\"message\": \"x\", \"content\": {content}}}");
    let refused = rap.send("POST", "/v1/threads", &[JSON], body.as_bytes()).await;
    assert_eq!(refused.refusal(), (400, "invalid"));
    assert!(refused.message().contains("expected fewer objects"), "{}", refused.message());
    // A long text is accepted.
    let text = "x".repeat(4_000_000);
    rap.post("/v1/threads", &json!({"message": format!("say {text}")})).await.expect(201);
}

#[tokio::test]
async fn a_thread_is_created_shown_and_closed() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let body = json!({"id": "a.b-c_1", "user_id": "ada", "title": "Sums", "agent": "default"});
    let made = rap.post("/v1/threads", &body).await.expect(201);
    let expected = json!({
        "id": "a.b-c_1",
        "parent": null,
        "root": "a.b-c_1",
        "agent": "default",
        "title": "Sums",
        "user_id": "ada",
        "status": "idle",
        "why": null,
        "retry_at": null,
        "forked_from": null,
        "waiting_on": [],
        "subscriptions": [],
        "children": 0,
        "held": 0,
        "turn": 0,
        "usage": {"input": 0, "output": 0, "cached": 0},
        "created_at": made["created_at"],
        "updated_at": made["updated_at"],
    });
    assert_eq!(made, expected);
    assert!(made["created_at"].as_str().unwrap().ends_with('Z'));
    assert_eq!(rap.thread("a.b-c_1").await, made);

    let said = rap.post("/v1/threads/a.b-c_1/messages", &json!({"text": "hello"})).await.expect(202);
    assert_eq!(said, json!({"turn": 1}));
    rap.until_line("a.b-c_1", "assistant: hello").await;
    assert_eq!(rap.act("a.b-c_1", "close").await.expect(202), json!({}));
    assert_eq!(rap.thread("a.b-c_1").await["status"], "closed");

    for path in ["messages", "interrupt", "resume", "calls/call_1_1/cancel", "calls/call_1_1/choice"] {
        let body = match path {
            "messages" => json!({"text": "anyone?"}),
            _ => json!({"selected": 0}),
        };
        let answer = rap.post(&format!("/v1/threads/a.b-c_1/{path}"), &body).await;
        assert_eq!(answer.refusal(), (409, "thread_closed"), "{path}");
    }
    rap.act("a.b-c_1", "close").await.expect(202);
}

#[tokio::test]
async fn an_invalid_new_thread_is_refused() {
    let tools = Tools::start().await;
    let rap = Setup::new()
        .tools(&tools)
        .agent("name = \"one\"")
        .agent("name = \"two\"")
        .limit("body = \"4KiB\"")
        .start();
    let long = "x".repeat(129);
    let table = [
        (json!([]), ""),
        (json!({"name": "x"}), "unknown field `name`"),
        (json!({"id": 5}), "invalid type"),
        (json!({"id": ""}), "id: "),
        (json!({"id": ".hidden"}), "id: "),
        (json!({"id": "a/b"}), "id: "),
        (json!({"id": "ü"}), "id: "),
        (json!({"id": long}), "id: "),
        (json!({"user_id": ""}), "user_id: "),
        (json!({"user_id": "a\nb"}), "user_id: "),
        (json!({"title": "x".repeat(257)}), "title: "),
        (json!({"agent": "three"}), "agent: no such agent; configured agents: one, two"),
    ];
    for (body, begin) in table {
        let answer = rap.post("/v1/threads", &body).await;
        assert_eq!(answer.refusal(), (400, "invalid"), "{body}");
        assert!(answer.message().starts_with(begin), "{body}: {}", answer.message());
    }
    for body in [&b"{"[..], b"", b"\xff"] {
        assert_eq!(rap.send("POST", "/v1/threads", &[JSON], body).await.refusal(), (400, "invalid"));
    }
    assert_eq!(rap.send("POST", "/v1/threads", &[], b"{}").await.refusal(), (415, "not_json"));
    let large = rap.post("/v1/threads", &json!({"message": "x".repeat(5000)})).await;
    assert_eq!(large.refusal(), (413, "too_large"));
    assert_eq!(rap.get("/v1/threads").await.expect(200), json!({"threads": [], "next_cursor": null}));

    rap.post("/v1/threads", &json!({"id": "x", "agent": "two"})).await.expect(201);
    assert_eq!(rap.thread("x").await["agent"], "two");
    assert_eq!(rap.post("/v1/threads", &json!({"id": "x"})).await.refusal(), (409, "thread_exists"));
    assert_eq!(rap.post("/v1/threads", &json!({})).await.expect(201)["agent"], "one");
}

#[tokio::test]
async fn invalid_messages_and_actions_are_refused() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    rap.post("/v1/threads", &json!({"id": "x"})).await.expect(201);
    for body in [
        json!({}),
        json!({"text": 1}),
        json!({"text": "x", "on_busy": "wait"}),
        json!({"text": "x", "to": "y"}),
    ] {
        let answer = rap.post("/v1/threads/x/messages", &body).await;
        assert_eq!(answer.refusal(), (400, "invalid"), "{body}");
    }
    assert_eq!(rap.send("POST", "/v1/threads/x/messages", &[], b"{}").await.refusal(), (415, "not_json"));
    assert_eq!(rap.act("x", "resume").await.refusal(), (409, "nothing_to_resume"));
    assert_eq!(rap.act("x", "calls/nothing/cancel").await.refusal(), (404, "no_such_call"));
    let choice = rap.post("/v1/threads/x/calls/nothing/choice", &json!({"selected": 0})).await;
    assert_eq!(choice.refusal(), (404, "no_question"));

    let nobody = ["messages", "interrupt", "close", "resume", "calls/c/cancel", "calls/c/choice"];
    for path in nobody {
        let body = if path == "messages" { json!({"text": "x"}) } else { json!({"selected": 0}) };
        let answer = rap.post(&format!("/v1/threads/nobody/{path}"), &body).await;
        assert_eq!(answer.refusal(), (404, "no_such_thread"), "{path}");
    }
    for path in ["", "/history", "/views"] {
        for id in ["nobody", "%00", "..%2f..", &"x".repeat(300)] {
            let answer = rap.get(&format!("/v1/threads/{id}{path}")).await;
            assert_eq!(answer.refusal(), (404, "no_such_thread"), "{id}{path}");
        }
    }
    assert_eq!(rap.thread("x").await["turn"], 0);
}

#[tokio::test]
async fn unknown_paths_and_methods_are_refused_in_json() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    for path in ["/nothing", "/v1", "/v1/nothing", "/callback", "/callback/a/b", "/v1/threads/x/y/z"] {
        assert_eq!(rap.get(path).await.refusal(), (404, "not_found"), "{path}");
    }
    for (method, path) in [
        ("DELETE", "/v1/threads"),
        ("GET", "/v1/threads/x/close"),
        ("POST", "/v1/calls"),
        ("POST", "/healthz"),
    ] {
        assert_eq!(
            rap.send(method, path, &[], b"").await.refusal(),
            (405, "method_not_allowed"),
            "{method} {path}"
        );
    }
    for path in ["/v1/threads/%ff", "/v1/threads/%ff/history"] {
        assert_eq!(rap.get(path).await.refusal(), (404, "not_found"), "{path}");
    }
    assert_eq!(rap.send("POST", "/callback/%ff", &[JSON], b"{}").await.refusal(), (404, "not_found"));
    assert_eq!(rap.get("/v1/threads?%ff=%ff").await.refusal(), (400, "invalid"));
}

#[tokio::test]
async fn threads_are_listed_by_page_status_and_parent() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    for n in 1..=5 {
        rap.post("/v1/threads", &json!({"id": format!("t{n}")})).await.expect(201);
    }
    rap.close("t2").await;
    let ids = |page: &Value| -> Vec<String> {
        page["threads"]
            .as_array()
            .unwrap()
            .iter()
            .map(|thread| thread["id"].as_str().unwrap().to_owned())
            .collect()
    };
    let (mut path, mut pages) = ("/v1/threads?limit=2".to_owned(), Vec::new());
    loop {
        let page = rap.get(&path).await.expect(200);
        pages.push(ids(&page));
        match page["next_cursor"].as_str() {
            Some(cursor) => path = format!("/v1/threads?limit=2&cursor={cursor}"),
            None => break,
        }
    }
    assert_eq!(pages, [vec!["t1", "t2"], vec!["t3", "t4"], vec!["t5"]]);
    let whole = rap.get("/v1/threads?limit=5").await.expect(200);
    assert_eq!((ids(&whole).len(), &whole["next_cursor"]), (5, &Value::Null));
    assert_eq!(ids(&rap.get("/v1/threads?status=closed").await.expect(200)), ["t2"]);
    assert_eq!(ids(&rap.get("/v1/threads?status=idle").await.expect(200)), ["t1", "t3", "t4", "t5"]);
    assert!(ids(&rap.get("/v1/threads?status=running").await.expect(200)).is_empty());
    assert!(ids(&rap.get("/v1/threads?parent=t1").await.expect(200)).is_empty());
    assert!(ids(&rap.get("/v1/threads?parent=nobody").await.expect(200)).is_empty());

    let mistakes = [
        ("limit=0", "limit: "),
        ("limit=1001", "limit: "),
        ("limit=ten", "limit: "),
        ("cursor=x", "cursor: "),
        ("status=busy", "status: "),
        ("sort=up", "sort: unknown parameter"),
    ];
    for (query, begin) in mistakes {
        let answer = rap.get(&format!("/v1/threads?{query}")).await;
        assert_eq!(answer.refusal(), (400, "invalid"), "{query}");
        assert!(answer.message().starts_with(begin), "{query}: {}", answer.message());
    }
    for status in ["closed", "failed", "running", "needs_you", "waiting", "idle"] {
        rap.get(&format!("/v1/threads?status={status}&parent=t1&cursor=-.0.&limit=1000")).await.expect(200);
    }
}

#[tokio::test]
async fn every_listing_validates_its_parameters() {
    let rap = Setup::new().start();
    rap.post("/v1/threads", &json!({"id": "t1"})).await.expect(201);
    let bounds = ["limit=0", "limit=1001", "limit=-1", "limit=1.5", "limit=", "limit=ten", "unknown=1"];
    let places = |name: &str| ["x", "-1", "", "4294967296", "1x"].map(|place| format!("{name}={place}"));
    let names =
        |name: &str| vec![format!("{name}="), format!("{name}=%00"), format!("{name}={}", "x".repeat(257))];
    let table = [
        ("/v1/threads", [places("cursor").to_vec(), names("parent"), vec!["status=busy".into()]].concat()),
        (
            "/v1/deliveries",
            [places("cursor").to_vec(), names("thread"), vec!["outcome=lost".into()]].concat(),
        ),
        ("/v1/threads/t1/history", places("after").to_vec()),
        ("/v1/calls", vec!["cursor=1".into()]),
        ("/v1/subscriptions", vec!["cursor=1".into()]),
        ("/v1/timers", vec!["cursor=1".into()]),
        ("/v1/inbox", vec!["cursor=1".into()]),
    ];
    for (path, more) in table {
        for query in bounds.into_iter().chain(more.iter().map(String::as_str)) {
            let answer = rap.get(&format!("{path}?{query}")).await;
            assert_eq!(answer.refusal(), (400, "invalid"), "{path}?{query}");
            assert!(answer.message().starts_with(query.split('=').next().unwrap()), "{}", answer.message());
        }
        for limit in ["1", "1000"] {
            rap.get(&format!("{path}?limit={limit}")).await.expect(200);
        }
    }
}

#[tokio::test]
async fn a_history_is_read_page_by_page() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let thread = rap.open("say one").await;
    rap.until_line(&thread, "assistant: one").await;
    rap.say(&thread, "say two").await;
    rap.until_line(&thread, "assistant: two").await;
    let all = rap.history(&thread).await;
    let (mut after, mut pieces) = (0, Vec::new());
    loop {
        let page = rap.get(&format!("/v1/threads/{thread}/history?after={after}&limit=3")).await.expect(200);
        let entries = page["entries"].as_array().unwrap().clone();
        let Some(last) = entries.last() else { break };
        after = last["seq"].as_u64().unwrap();
        pieces.extend(entries);
    }
    assert_eq!(pieces, all);
    assert_eq!(all.iter().map(|entry| entry["seq"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!(all[1]["kind"], "assistant");
    assert!(all[1]["at"].as_str().unwrap().ends_with('Z'));
    assert_eq!(rap.get(&format!("/v1/threads/{thread}/history?after=x")).await.refusal(), (400, "invalid"));
}

#[tokio::test]
async fn open_calls_are_listed_until_they_settle() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).limit("call_timeout = \"1h\"").start();
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    let listed = rap.listing("calls").await;
    let [row] = listed.as_slice() else { panic!("{listed:?}") };
    let place = (&row["thread_id"], &row["call_id"], &row["tool"], &row["server"]);
    assert_eq!(place, (&json!(thread), &json!("call_1_1"), &json!("work"), &json!(tools.url)));
    assert!(row["until"].as_str() > row["since"].as_str());
    assert!(!row.to_string().contains("/callback/"));
    call.returns("done").await;
    assert!(rap.listing("calls").await.is_empty());
}

/// Proves: TR-19
#[tokio::test]
async fn clients_need_a_token_and_health_checks_do_not() {
    let tools = Tools::start().await;
    let rap = Setup::new().tools(&tools).token("client-token").start();
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    for path in ["/v1/threads", "/v1/tools", "/v1/inbox", "/v1/threads/nobody"] {
        for headers in [
            &[][..],
            &[("authorization", "Bearer wrong")],
            &[("authorization", "Bearer ")],
            &[("authorization", "client-token")],
            &[("authorization", "Basic client-token")],
            &[("authorization", "Bearer client-token2")],
        ] {
            let answer = rap.send("GET", path, headers, b"").await;
            assert_eq!(answer.refusal(), (401, "unauthorised"), "{path} {headers:?}");
            assert_eq!(answer.header("www-authenticate"), Some("bearer"));
        }
    }
    let unknown = rap.send("POST", "/v1/threads", &[JSON], b"{\"id\": \"sneaky\"}").await;
    assert_eq!(unknown.status, 401);
    assert_eq!(rap.get("/v1/threads/sneaky").await.status, 404);
    for path in ["/healthz", "/readyz"] {
        assert_eq!(rap.send("GET", path, &[], b"").await.status, 200, "{path}");
    }
    // With tokens, any host name is accepted.
    let headers = [("authorization", "bearer client-token"), ("host", "rap.example")];
    assert_eq!(rap.send("GET", "/v1/threads", &headers, b"").await.status, 200);
    // The callback endpoint needs no client token.
    call.returns("done").await;
    rap.until_line(&thread, "assistant: work: done").await;
    assert!(!rap.log().contains("client-token"));
}

/// Protects against DNS rebinding: a web page could point its own host name to loopback.
#[tokio::test]
async fn without_tokens_another_host_name_is_refused() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    for host in ["evil.example", "evil.example:80", "10.0.0.1", "localhost.evil.example", ""] {
        let answer = rap.send("GET", "/v1/threads", &[("host", host)], b"").await;
        assert_eq!(answer.refusal(), (421, "not_local"), "{host}");
        let body = b"{\"id\": \"sneaky\"}";
        assert_eq!(
            rap.send("POST", "/v1/threads", &[("host", host), JSON], body).await.status,
            421,
            "{host}"
        );
    }
    for host in ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:80"] {
        assert_eq!(rap.send("GET", "/v1/threads", &[("host", host)], b"").await.status, 200, "{host}");
    }
    assert_eq!(rap.get("/v1/threads/sneaky").await.status, 404);
}

/// Proves: LC-30, LC-38
#[tokio::test]
async fn a_repeat_with_the_same_key_is_harmless() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    let post = async |rap: &Rap, path: &str, key: &str, body: Value| {
        let headers = [JSON, ("Idempotency-Key", key)];
        rap.send("POST", path, &headers, body.to_string().as_bytes()).await
    };
    let made = post(&rap, "/v1/threads", "k", json!({"message": "say one"})).await.expect(201);
    let thread = made["id"].as_str().unwrap().to_owned();
    rap.until_line(&thread, "assistant: one").await;
    let again = post(&rap, "/v1/threads", "k", json!({"message": "say one"})).await.expect(201);
    assert_eq!(again["id"], *thread);

    let messages = format!("/v1/threads/{thread}/messages");
    for _ in 0..2 {
        let said = post(&rap, &messages, "k", json!({"text": "say two"})).await.expect(202);
        assert_eq!(said, json!({"turn": 2}));
    }
    rap.until_line(&thread, "assistant: two").await;
    let rap = rap.restarted();
    post(&rap, &messages, "k", json!({"text": "say two"})).await.expect(202);
    post(&rap, "/v1/threads", "k", json!({"message": "say one"})).await.expect(201);
    post(&rap, &messages, "other", json!({"text": "say three"})).await.expect(202);
    rap.until_line(&thread, "assistant: three").await;
    let transcript = [
        "user: say one",
        "assistant: one",
        "user: say two",
        "assistant: two",
        "user: say three",
        "assistant: three",
    ];
    assert_eq!(rap.transcript(&thread).await, transcript);
    assert_eq!(rap.get("/v1/threads").await.expect(200)["threads"].as_array().unwrap().len(), 1);

    // A different request with the same key is refused and changes nothing.
    for (path, body) in [
        ("/v1/threads", json!({"message": "say something else"})),
        ("/v1/threads", json!({"message": "say one", "title": "x"})),
        (messages.as_str(), json!({"text": "say four"})),
        (messages.as_str(), json!({"text": "say two", "on_busy": "enqueue"})),
    ] {
        assert_eq!(post(&rap, path, "k", body.clone()).await.refusal(), (409, "key_reused"), "{path} {body}");
    }
    // Equivalent bodies count as the same request.
    post(&rap, &messages, "k", json!({"on_busy": "join", "text": "say two"})).await.expect(202);
    assert_eq!(rap.transcript(&thread).await, transcript);

    // Keys are scoped to a thread.
    post(&rap, "/v1/threads", "same", json!({"id": "threads"})).await.expect(201);
    post(&rap, "/v1/threads/threads/messages", "same", json!({"text": "say hello"})).await.expect(202);
    rap.until_line("threads", "assistant: hello").await;
    for key in ["", &"x".repeat(257), "k\u{e9}y"] {
        assert_eq!(post(&rap, "/v1/threads", key, json!({})).await.refusal(), (400, "invalid"));
    }
}

/// Without tokens, local access is the credential. A web page of another site in a local browser must not use it.
#[tokio::test(flavor = "multi_thread")]
async fn without_tokens_the_page_of_another_site_is_refused() {
    let rap = Setup::new().start();
    rap.post("/v1/threads", &json!({"id": "t"})).await.expect(201);
    let foreign = ["https://evil.example", "http://127.0.0.1:1", "null", "http://localhost.evil.example"];
    for origin in foreign {
        let closed = rap.send("POST", "/v1/threads/t/close", &[("origin", origin)], b"").await;
        assert_eq!(closed.refusal(), (403, "foreign_origin"), "{origin}");
    }
    assert_eq!(rap.thread("t").await["status"], "idle");
    rap.send("POST", "/v1/threads/t/close", &[("origin", &rap.url)], b"").await.expect(202);
}

/// Reads a listing in pages of `limit` rows.
async fn paged(rap: &Rap, listing: &str, limit: usize) -> Vec<Value> {
    let (mut rows, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = rap.get(&format!("/v1/{listing}?limit={limit}{cursor}")).await.expect(200);
        let found = page.as_object().unwrap().values().find_map(Value::as_array).unwrap();
        assert!(found.len() <= limit);
        rows.extend_from_slice(found);
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return rows,
        }
    }
}

#[tokio::test]
async fn calls_subscriptions_and_timers_are_paged() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    for number in 0..4 {
        let id = format!("t{number}");
        let message = "call work {}\ncall watch {}\ncall sleep {\"seconds\": 1000}";
        rap.post("/v1/threads", &json!({"id": id, "message": message})).await.expect(201);
        let calls = tools.invocations(2).await;
        calls[0].says(&calls[0].question(&format!("{}/answer", tools.url))).await;
        calls[1].confirms("watching").await;
    }
    // A call that waits for a retry comes after those that were acknowledged.
    tools.answer_always(INVOKE, Reply::Status(503));
    rap.post("/v1/threads", &json!({"id": "late", "message": "call work {}\ncall work {}"}))
        .await
        .expect(201);
    let tried = |call: &Value| call["last_attempt"] == "answered 503";
    until("the retries", async || {
        (rap.listing("calls").await.iter().filter(|call| tried(call)).count() == 2).then_some(())
    })
    .await;
    let id = |row: &Value| (row["thread_id"].to_string(), row["call_id"].to_string());
    for (listing, count) in [("calls", 10), ("subscriptions", 4), ("timers", 4), ("inbox", 4)] {
        for limit in [1, 3, count, 1000] {
            // A retry in between changes the position of a row.
            until(&format!("the same {listing} by {limit}"), async || {
                let whole: Vec<_> = paged(&rap, listing, 1000).await.iter().map(id).collect();
                let pages: Vec<_> = paged(&rap, listing, limit).await.iter().map(id).collect();
                (whole.len() == count && pages == whole).then_some(())
            })
            .await;
        }
        for cursor in ["x", "1", "1.2", "1.x.c"] {
            let refused = rap.get(&format!("/v1/{listing}?cursor={cursor}")).await;
            assert_eq!(refused.refusal(), (400, "invalid"), "{cursor}");
            assert!(refused.message().starts_with("cursor: "), "{}", refused.message());
        }
    }
}
