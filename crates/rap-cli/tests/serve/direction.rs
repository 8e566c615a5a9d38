//! Direction of requests: where tools can make the runtime send to, and who may operate an API without tokens.
//!
//! Nothing here connects to an address other than loopback: URLs that name others are refused without connecting.

use rap_testkit::tools::{INVOKE, tool};
use rap_testkit::{Rap, Setup, Tools, http, until};
use serde_json::{Value, json};

const ENDPOINT_REFUSED: &str = "Error: the endpoint of the tool server is not allowed: ";

/// Offers the tool `work` at another endpoint.
fn offer_at(tools: &Tools, endpoint: &str) {
    tools.offer(json!({"name": "bench", "endpoint": endpoint, "tools": [tool("work")]}));
}

/// Calls `work` in a new thread and returns its result and its line in the delivery log.
async fn call_work(rap: &Rap) -> (String, Value) {
    let thread = rap.open("call work").await;
    rap.until_idle(&thread).await;
    let result = rap.transcript(&thread).await[2].clone();
    let line = until("a line in the delivery log", async || {
        rap.listing("deliveries").await.into_iter().find(|line| line["thread_id"] == json!(thread))
    });
    (result, line.await)
}

fn port(url: &str) -> &str {
    url.rsplit(':').next().unwrap()
}

#[tokio::test]
async fn an_endpoint_that_leads_to_our_own_listener_is_refused_once() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    rap.post("/v1/threads", &json!({"id": "victim"})).await.expect(201);
    for host in ["127.0.0.1", "localhost", "[::1]", "127.0.0.2", "2130706433", "0x7f.1", "0177.0.0.1"] {
        offer_at(&tools, &format!("http://{host}:{}/v1/threads/victim/close", port(&rap.url)));
        let (result, line) = call_work(&rap).await;
        assert!(result.contains(ENDPOINT_REFUSED), "{host}: {result}");
        assert!(result.contains("leads back to this server"), "{host}: {result}");
        assert_eq!((&line["attempts"], &line["outcome"]), (&json!(1), &json!("given_up")), "{host}: {line}");
    }
    assert_eq!(rap.thread("victim").await["status"], "idle");
}

#[tokio::test]
async fn a_response_url_that_leads_to_our_own_listener_is_refused_once() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    rap.post("/v1/threads", &json!({"id": "victim"})).await.expect(201);
    let thread = rap.open("call work").await;
    let call = tools.invocation().await;
    call.says(&call.question(&format!("http://localhost:{}/v1/threads/victim/close", port(&rap.url)))).await;
    rap.until_status(&thread, "needs_you").await;
    let path = format!("/v1/threads/{thread}/calls/{}/choice", call.id());
    rap.post(&path, &json!({"selected": 0})).await.expect(202);
    rap.until_idle(&thread).await;
    let result = rap.transcript(&thread).await[2].clone();
    assert!(result.contains("could not be delivered") && result.contains("leads back"), "{result}");
    assert_eq!(rap.thread("victim").await["status"], "idle");
}

#[tokio::test]
async fn an_endpoint_that_the_policy_forbids_is_refused_once_and_shown_in_the_list_of_tools() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    for host in ["169.254.169.254", "192.0.0.192", "[fd00:ec2::254]", "[fd20:ce::254]", "[::ffff:127.0.0.1]"]
    {
        offer_at(&tools, &format!("http://{host}/invoke"));
        let (result, line) = call_work(&rap).await;
        assert!(result.contains(ENDPOINT_REFUSED), "{host}: {result}");
        assert_eq!((&line["attempts"], &line["outcome"]), (&json!(1), &json!("given_up")), "{host}: {line}");
        let errors = rap.get("/v1/tools").await.expect(200)["servers"][0]["errors"].to_string();
        assert!(errors.contains("the endpoint is not allowed"), "{host}: {errors}");
    }
}

#[tokio::test]
async fn url_policy_judges_what_tools_name_and_allow_hosts_are_exceptions() {
    let (tools, elsewhere) = (Tools::start().await, Tools::start().await);
    let rap = Setup::new().tools(&tools).server("url_policy = \"public\"").start();
    // The configured origin is always allowed.
    let thread = rap.open("call work").await;
    tools.invocation().await.returns("at home").await;
    rap.until_line(&thread, "assistant: work: at home").await;
    offer_at(&tools, &format!("{}/invoke", elsewhere.url));
    let (result, _) = call_work(&rap).await;
    assert!(result.contains(ENDPOINT_REFUSED), "{result}");
    assert_eq!(elsewhere.count(INVOKE), 0);

    let allowed = elsewhere.url.trim_start_matches("http://");
    let setup = Setup::new().tools(&tools).server("url_policy = \"public\"");
    let rap = setup.server(&format!("allow_hosts = [{allowed:?}]")).start();
    rap.open("call work").await;
    elsewhere.invocation().await;
}

#[tokio::test]
async fn credentials_are_sent_to_the_configured_origin_and_to_allowed_hosts_only() {
    let (tools, elsewhere) = (Tools::start().await, Tools::start().await);
    let secret = Some("Bearer tool-token");
    let rap = Setup::new().tools(&tools).bearer("tool-token").start();
    for host in ["127.0.0.1", "localhost"] {
        offer_at(&tools, &format!("http://{host}:{}/invoke", port(&tools.url)));
        rap.open("call work").await;
        assert_eq!(tools.invocation().await.request.header("authorization"), secret, "{host}");
    }
    offer_at(&tools, &format!("{}/invoke", elsewhere.url));
    rap.open("call work").await;
    assert_eq!(elsewhere.invocation().await.request.header("authorization"), None);
    let errors = rap.get("/v1/tools").await.expect(200)["servers"][0]["errors"].to_string();
    assert!(errors.contains("server.allow_hosts"), "{errors}");

    let allowed = format!("allow_hosts = [\"localhost:{}\"]", port(&elsewhere.url));
    let rap = Setup::new().tools(&tools).bearer("tool-token").server(&allowed).start();
    rap.open("call work").await;
    assert_eq!(elsewhere.invocation().await.request.header("authorization"), secret);
}

#[tokio::test]
async fn an_api_without_tokens_refuses_other_sites_and_the_runtimes_own_requests() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    rap.post("/v1/threads", &json!({"id": "victim", "message": "call work"})).await.expect(201);
    let agent = tools.invocation().await.request.header("user-agent").unwrap().to_owned();
    let close = "/v1/threads/victim/close";
    for (header, code) in [
        (("user-agent", agent.as_str()), "outgoing_request"),
        (("origin", "http://evil.example"), "foreign_origin"),
        (("origin", "http://127.0.0.1:1"), "foreign_origin"),
        (("origin", "null"), "foreign_origin"),
    ] {
        assert_eq!(rap.send("POST", close, &[header], b"").await.refusal(), (403, code), "{header:?}");
        assert_eq!(rap.send("GET", "/v1/threads", &[header], b"").await.refusal(), (403, code), "{header:?}");
    }
    assert_eq!(rap.thread("victim").await["status"], "waiting");
    rap.send("POST", close, &[("origin", &rap.url), ("user-agent", "curl/8")], b"").await.expect(202);
}

#[tokio::test]
async fn paths_without_a_token_refuse_a_foreign_host_on_a_loopback_server() {
    let public = "public_url = \"http://rap.example\"";
    for rap in [
        Setup::new().server(public).start(),
        Setup::new().server(public).token("a-long-client-token").start(),
    ] {
        for path in ["/healthz", "/readyz", "/metrics", "/openapi.json"] {
            let url = format!("{}{path}", rap.url);
            for host in ["evil.example", "evil.example:7420", "127.0.0.1.evil.example", ""] {
                let answer = http::send("GET", &url, &[("host", host)], b"").await;
                assert_eq!(answer.refusal(), (421, "not_local"), "{path} {host}");
            }
            for host in ["127.0.0.1", "localhost:7420", "[::1]:1", "rap.example"] {
                http::send("GET", &url, &[("host", host)], b"").await.expect(200);
            }
        }
    }
}

#[tokio::test]
async fn no_answer_may_be_sniffed_and_none_of_the_api_may_be_stored() {
    for rap in [Setup::new().start(), Setup::new().token("a-long-client-token").start()] {
        let refused =
            http::send("GET", &format!("{}/v1/threads", rap.url), &[("host", "evil.example")], b"").await;
        let bad = http::send("POST", &format!("{}/callback/x", rap.url), &[], b"").await;
        let answers = [
            ("/v1", refused),
            ("", bad),
            ("/v1", rap.get("/v1/threads").await),
            ("/v1", rap.get("/v1/threads/none").await),
            ("/v1", rap.get("/v1/nothing").await),
            ("/v1", rap.send("DELETE", "/v1/threads", &[], b"").await),
            ("/v1", rap.post("/v1/threads", &json!({"id": 5})).await),
            ("", rap.get("/healthz").await),
            ("", rap.get("/metrics").await),
            ("", rap.get("/openapi.json").await),
            ("", rap.get("/nothing").await),
        ];
        for (path, answer) in answers {
            assert_eq!(answer.header("x-content-type-options"), Some("nosniff"), "{answer:?}");
            let expected = (path == "/v1").then_some("no-store");
            assert_eq!(answer.header("cache-control"), expected, "{answer:?}");
        }
    }
}

#[tokio::test]
async fn an_event_stream_may_not_be_stored() {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    let rap = Setup::new().start();
    let address = rap.url.trim_start_matches("http://");
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET /v1/events HTTP/1.1\r\nhost: {address}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let (mut lines, mut head) = (BufReader::new(stream).lines(), String::new());
    while let Some(line) = lines.next_line().await.unwrap().filter(|line| !line.is_empty()) {
        head.push_str(&format!("{}\n", line.to_lowercase()));
    }
    assert!(head.contains("cache-control: no-store\n"), "{head}");
    assert!(head.contains("x-content-type-options: nosniff\n"), "{head}");
}

#[tokio::test]
async fn plain_http_to_another_machine_is_warned_about_at_the_start() {
    // Nothing is sent there, because there is no session.
    let rap =
        Setup::new().tool_server("http://tools.example:8080/path").tool_server("http://localhost:1").start();
    rap.until_logged("plain text").await;
    let log = rap.log();
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("plain text")).collect();
    assert!(warnings.len() == 1 && warnings[0].contains("tools.example:8080"), "{log}");
}

#[tokio::test]
async fn an_auth_url_with_a_user_is_refused_and_its_host_is_shown_in_punycode() {
    let tools = Tools::start().await;
    let rap = Rap::start(&tools);
    rap.open("call work").await;
    let call = tools.invocation().await;
    for bad in ["https://accounts.example@evil.example/", "https://@evil.example/", "https:@evil.example/"] {
        let answer = call.post(&call.oauth(bad)).await;
        answer.expect_refusal(400);
        assert!(answer.message().contains("@ before the host"), "{answer:?}");
    }
    call.says(&call.oauth("https://аpple.com/sign-in")).await;
    let item = until("the question", async || rap.listing("inbox").await.into_iter().next()).await;
    assert_eq!(item["auth_url"], "https://xn--pple-43d.com/sign-in", "{item}");
}
