//! Several nodes on one Postgres database, as processes: kills, freezes, partitions, and requests that reach any node.

use std::time::{Duration, Instant};

use rap_testkit::http::{self, Response};
use rap_testkit::peer::Reply;
use rap_testkit::postgres::{Pooler, Server};
use rap_testkit::proxy::{Fault, Proxy};
use rap_testkit::stream::Stream;
use rap_testkit::tools::{Call, DISCOVERY, INVOKE, tool};
use rap_testkit::{Client, PATIENCE, Process, Rap, Setup, Tools, until};
use serde_json::{Value, json};

use crate::support::{Api, is_unavailable, prepared, start};

/// Nodes of these tests have no load balancer, so nothing listens at their public URL.
pub const PUBLIC_URL: &str = "http://127.0.0.1:9";

/// A node that takes over from another one after two seconds.
pub fn node(tools: &Tools, url: &str) -> Setup {
    node_with(tools, url, "lease = \"2s\"")
}

pub fn node_with(tools: &Tools, url: &str, store: &str) -> Setup {
    let key = "7e".repeat(32);
    let setup = Setup::new().tools(tools).server(&format!("public_url = {PUBLIC_URL:?}"));
    setup.store(&format!("url = {url:?}\nkey = {key:?}\n{store}"))
}

/// Starts two nodes that know each other.
pub async fn two(one: Setup, other: Setup) -> [(Rap, Api); 2] {
    let nodes = [start(one), start(other)];
    until_nodes(&nodes[0].1, 2).await;
    nodes
}

/// Waits until a node knows of this number of nodes.
pub async fn until_nodes(api: &Api, count: usize) {
    until(&format!("{count} nodes"), async || {
        let nodes = api.get("/v1/nodes").await.body["nodes"].as_array().map(Vec::len);
        nodes == Some(count)
    })
    .await;
}

/// Posts a callback to a node.
pub async fn post(api: &Api, call: &Call, body: &Value) -> Response {
    let path = call.url().strip_prefix(PUBLIC_URL).unwrap();
    http::post(&format!("{}{path}", api.url), body).await
}

/// Value of a metric of a node.
async fn metric(api: &Api, name: &str) -> f64 {
    let answer = http::attempt("GET", &format!("{}/metrics", api.url), &[], b"").await.unwrap();
    let text = answer.text;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

pub async fn asking(api: &Api) -> bool {
    metric(api, "rap_effects_under_way{kind=\"ask\"}").await > 0.0
}

/// Makes a node answer thread `t` with this text, until a stream shows the text before the entry. A stream that happens
/// to read the entry first does not show the text again.
async fn until_streamed(stream: &mut Stream, api: &Api, answer: &str) {
    let lines: Vec<String> = answer.lines().map(|line| format!("say {line}")).collect();
    for _ in 0..5 {
        api.say("t", &format!("sleep 0.7\n{}", lines.join("\n"))).await;
        let mut text = String::new();
        loop {
            let event = stream.next().await.unwrap();
            let data: Value = serde_json::from_str(&event.data).unwrap();
            match event.name.as_str() {
                "delta" => text.push_str(data["text"].as_str().unwrap()),
                "entry" if data["text"] == answer => break,
                "entry" => text.clear(),
                _ => {}
            }
        }
        api.until_idle("t").await;
        if text == answer {
            return;
        }
        assert!(answer.starts_with(&text), "{text}");
    }
    panic!("the text of another node was never streamed");
}

/// Proves: TR-13, LC-30
#[tokio::test(flavor = "multi_thread")]
async fn the_work_of_a_killed_node_is_taken_over_within_its_lease() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let setup = || node(&tools, &database.url());
    let [(mut one, first), (_other, second)] = two(setup(), setup()).await;
    tools.answer_always(INVOKE, Reply::Hang);
    first.create("calls", "call work {}").await;
    let call = tools.invocation().await;
    first.create("asks", "sleep 2\nsay answered").await;
    first.create("sleeps", "call sleep {\"seconds\": 1}").await;
    until("the first node asks", async || asking(&first).await).await;
    tools.answer_always(INVOKE, Reply::Status(200));
    one.kill();
    let killed = Instant::now();
    let again = tools.invocation().await;
    assert_eq!(again.request.body, call.request.body);
    // The lease is two seconds; the rest is for a machine that is busy.
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    assert_eq!(post(&second, &again, &again.result("done")).await.status, 200);
    second.until_said("calls", "work: done").await;
    second.until_said("asks", "answered").await;
    second.until_said("sleeps", "sleep: the sleep is over").await;
    until_nodes(&second, 1).await;
    for (thread, text) in [("calls", "done"), ("asks", "answered")] {
        let texts = second.texts(thread).await;
        assert_eq!(texts.iter().filter(|said| *said == text).count(), 1, "{texts:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_node_that_wakes_up_does_no_harm() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let setup = || node(&tools, &database.url());
    let [(one, first), (_other, second)] = two(setup(), setup()).await;
    first.create("asks", "sleep 3\nsay once").await;
    first.create("calls", "call work {}").await;
    let call = tools.invocation().await;
    first.until_acknowledged(&call).await;
    until("the first node asks", async || asking(&first).await).await;
    let mut stream = Stream::of(&second, "asks").await;
    one.process().signal("STOP");
    until_nodes(&second, 1).await;
    // The other node asks the model again, and accepts callbacks for the frozen one.
    until("the other node asks", async || asking(&second).await).await;
    assert_eq!(post(&second, &call, &call.result("done")).await.status, 200);
    second.until_said("calls", "work: done").await;
    second.say("calls", "say meanwhile").await;
    second.until_said("calls", "meanwhile").await;
    one.process().signal("CONT");
    until_nodes(&second, 2).await;
    second.until_said("asks", "once").await;
    // It takes part again, and sees everything.
    first.create("new", "say back").await;
    second.until_said("new", "back").await;
    first.until_said("calls", "meanwhile").await;
    assert_eq!(post(&first, &call, &call.result("done")).await.status, 200);
    until("nobody asks", async || !asking(&first).await && !asking(&second).await).await;
    for (thread, text) in [("asks", "once"), ("calls", "done"), ("calls", "meanwhile")] {
        let texts = first.texts(thread).await;
        assert_eq!(texts.iter().filter(|said| *said == text).count(), 1, "{texts:?}");
    }
    // A reader sees one answer, and no text of the first attempt after it.
    let (mut deltas, mut answers) = (String::new(), 0);
    while let Ok(Some(event)) = tokio::time::timeout(Duration::from_millis(500), stream.next()).await {
        let data: Value = serde_json::from_str(&event.data).unwrap();
        match event.name.as_str() {
            "delta" => deltas.push_str(data["text"].as_str().unwrap()),
            "entry" if data["kind"] == "assistant" => answers += 1,
            _ => {}
        }
    }
    assert_eq!((deltas.as_str(), answers), ("once", 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_stopped_hands_its_work_over_at_once() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    // A lease that is long enough that nothing is taken over because it has run out.
    let setup = || node_with(&tools, &database.url(), "lease = \"5m\"");
    let [(one, first), (_other, second)] = two(setup(), setup()).await;
    tools.answer_always(INVOKE, Reply::Hang);
    first.create("asks", "sleep 1\nsay answered").await;
    first.create("calls", "call work {}").await;
    let call = tools.invocation().await;
    until("the first node asks", async || asking(&first).await).await;
    tools.answer_always(INVOKE, Reply::Status(200));
    one.process().signal("TERM");
    let stopped = Instant::now();
    let again = tools.invocation().await;
    let took = stopped.elapsed();
    assert_eq!(again.request.body, call.request.body);
    assert!(took < Duration::from_secs(5), "{took:?}");
    eprintln!("handed over within {took:?}");
    second.until_said("asks", "answered").await;
    assert_eq!(post(&second, &again, &again.result("done")).await.status, 200);
    second.until_said("calls", "work: done").await;
}

/// Proves: TR-13
#[tokio::test(flavor = "multi_thread")]
async fn any_node_answers_any_request_and_streams_follow_threads_of_other_nodes() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let setup = || node(&tools, &database.url());
    let [(_one, first), (_other, second)] = two(setup(), setup()).await;
    first.create("t", "call work {}").await;
    let call = tools.invocation().await;
    let mut stream = Stream::of(&second, "t").await;
    stream.until("status").await;
    assert_eq!(post(&second, &call, &call.result("done")).await.status, 200);
    // The answer to this is streamed by the node that the message reaches.
    second.until_idle("t").await;
    until_streamed(&mut stream, &first, "one\ntwo\nthree").await;
    drop(stream);
    // After a reconnect to the other node, nothing is missing or repeated.
    let path = "/v1/threads/t/events";
    let last = first.raw_history("t").await.last().unwrap()["seq"].as_u64().unwrap();
    let mut stream = Stream::open(&first, path, Some(last - 1)).await.unwrap();
    let entry = stream.expect("entry").await;
    assert_eq!((entry["seq"].as_u64(), &entry["text"]), (Some(last), &json!("one\ntwo\nthree")));
    second.say("t", "say more").await;
    assert_eq!(stream.until("entry").await["text"], "say more");
    assert_eq!(stream.until("entry").await["text"], "more");
    let seqs: Vec<u64> =
        first.raw_history("t").await.iter().map(|entry| entry["seq"].as_u64().unwrap()).collect();
    assert_eq!(seqs, (1..=last + 2).collect::<Vec<_>>());
    // An interrupt at one node ends the request of the other one.
    first.say("t", "sleep 600\nsay never").await;
    until("the first node asks", async || asking(&first).await).await;
    second.act("t", "interrupt").await.expect(202);
    until("the first node has stopped", async || !asking(&first).await).await;
    // Events of all threads.
    let mut all = Stream::open(&second, "/v1/events", None).await.unwrap();
    first.create("u", "call work {}").await;
    let waiting = async {
        loop {
            let status = all.until("status").await;
            if (&status["thread_id"], &status["status"]) == (&json!("u"), &json!("waiting")) {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap();
}

/// A session's toolset that one node has refreshed is the one that the other node offers from then on.
#[tokio::test(flavor = "multi_thread")]
async fn a_toolset_that_another_node_has_refreshed_is_used_at_once() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let setup = || node(&tools, &database.url());
    let [(_one, first), (_other, second)] = two(setup(), setup()).await;
    for (api, thread) in [(&first, "t"), (&second, "t")] {
        // Both nodes have used the toolset of the session.
        match api.get("/v1/threads/t").await.status {
            404 => api.create(thread, "say hello").await,
            _ => api.say(thread, "say hello").await,
        }
        api.until_idle(thread).await;
    }
    let newer = ["work", "watch", "extra"].iter().map(|name| tool(name)).collect();
    tools.offer(tools.document("bench", "2", newer));
    tools.answer_next(INVOKE, Reply::Status(409));
    first.say("t", "call work {}").await;
    tools.invocation().await;
    first.until_idle("t").await;
    second.say("t", "call extra {}").await;
    let call = tools.invocation().await;
    assert_eq!(call.request.body["operation"], "extra");
}

/// A token works at every node from its creation until it is revoked, and its streams end there.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_one_node_has_revoked_is_refused_by_the_others_at_once() {
    const ADMIN: &str = "token-of-the-operator";
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let setup = || node(&tools, &database.url()).token(ADMIN);
    let [(_one, first), (_other, second)] = two(setup(), setup()).await;
    for _ in 0..3 {
        let created = first.post("/v1/tokens", &json!({"name": "phone", "scope": "write"})).await.expect(201);
        let token = created["token"].as_str().unwrap();
        let client = Client::new(&second.url, Some(token));
        let thread = client.open("say hello").await;
        let bearer = format!("Bearer {token}");
        let authorization = [("authorization", bearer.as_str())];
        let path = format!("/v1/threads/{thread}/events");
        let mut stream = Stream::open_with(&client, &path, &authorization).await.unwrap();
        let revoked = format!("/v1/tokens/{}", created["id"].as_str().unwrap());
        let admin = format!("Bearer {ADMIN}");
        first.send("DELETE", &revoked, &[("authorization", &admin)], b"").await.expect(200);
        assert_eq!(client.get("/v1/threads").await.status, 401);
        assert_eq!(stream.until("end").await["reason"], "the token was revoked");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_cut_off_from_the_database_is_replaced_and_comes_back() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let proxy = Proxy::start(database.port()).await;
    let setups = [node(&tools, &database.url_at(proxy.port)), node(&tools, &database.url())];
    let [one, other] = setups;
    let [(_one, first), (_other, second)] = two(one, other).await;
    first.create("asks", "sleep 2\nsay answered").await;
    until("the first node asks", async || asking(&first).await).await;
    proxy.set(Fault::Away);
    let refused = first.post("/v1/threads/asks/messages", &json!({"text": "say refused"})).await;
    assert!(is_unavailable(&refused), "{refused:?}");
    assert_eq!(first.get("/readyz").await.status, 503);
    assert_eq!(second.get("/readyz").await.status, 200);
    until_nodes(&second, 1).await;
    second.until_said("asks", "answered").await;
    second.say("asks", "say meanwhile").await;
    second.until_said("asks", "meanwhile").await;
    proxy.set(Fault::None);
    until("it is ready again", async || first.get("/readyz").await.status == 200).await;
    until_nodes(&first, 2).await;
    let texts = first.texts("asks").await;
    let count = |text: &str| texts.iter().filter(|said| *said == text).count();
    assert_eq!((count("answered"), count("meanwhile"), count("say refused")), (1, 1, 0), "{texts:?}");
    // Streams at the node that was away follow the others again.
    let mut stream = Stream::of(&first, "asks").await;
    stream.until("status").await;
    second.say("asks", "say again").await;
    while stream.until("entry").await["text"] != "again" {}
}

/// The worst partition: connections stay open, and what was sent arrives much later.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_whose_connections_stall_is_replaced_and_does_no_harm_when_they_go_on() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let proxy = Proxy::start(database.port()).await;
    let [(_one, first), (_other, second)] =
        two(node(&tools, &database.url_at(proxy.port)), node(&tools, &database.url())).await;
    first.create("calls", "call work {}").await;
    let call = tools.invocation().await;
    first.until_acknowledged(&call).await;
    first.create("asks", "sleep 1\nsay answered").await;
    until("the first node asks", async || asking(&first).await).await;
    proxy.set(Fault::Stall);
    // A result is on its way into the database, and so is the answer.
    let stalled = tokio::spawn({
        let (first, call) = (first.clone(), call.clone());
        async move { post(&first, &call, &call.result("done")).await.status }
    });
    until_nodes(&second, 1).await;
    second.until_said("asks", "answered").await;
    assert_eq!(post(&second, &call, &call.result("done")).await.status, 200);
    second.until_said("calls", "work: done").await;
    proxy.set(Fault::None);
    let status = stalled.await.unwrap();
    assert!([200, 503].contains(&status), "{status}");
    until_nodes(&first, 2).await;
    first.say("calls", "say back").await;
    second.until_said("calls", "back").await;
    for (thread, text) in [("asks", "answered"), ("calls", "done"), ("calls", "back")] {
        let texts = second.texts(thread).await;
        assert_eq!(texts.iter().filter(|said| *said == text).count(), 1, "{texts:?}");
    }
}

/// Longest time that stopping may take when the database does not answer. A service manager kills after 30 seconds or more.
const STOP_WITHIN: Duration = Duration::from_secs(12);

/// Everything that a stopping node would like to write waits for a database that does not answer: a message, the result
/// of a call, an accepted invocation and the end of the lease.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_stops_in_time_although_its_database_does_not_answer() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let proxy = Proxy::start(database.port()).await;
    let (mut rap, api) = start(node(&tools, &database.url_at(proxy.port)));
    api.create("calls", "call work {}").await;
    let call = tools.invocation().await;
    api.until_acknowledged(&call).await;
    tools.answer_always(INVOKE, Reply::Hang);
    api.create("accepted", "call work {}").await;
    tools.invocation().await;
    proxy.set(Fault::Stall);
    tools.answer_always(INVOKE, Reply::Status(200));
    tools.release();
    let late = tokio::spawn({
        let (api, path) = (api.clone(), call.url().strip_prefix(PUBLIC_URL).unwrap().to_owned());
        let result = call.result("done");
        async move { api.try_post(&path, &result).await }
    });
    let time = rap.stop();
    assert!(time < STOP_WITHIN, "{time:?}: {}", rap.log());
    let late = late.await.unwrap();
    assert!(late.as_ref().is_none_or(|answer| answer.status == 503), "{late:?}");
    proxy.set(Fault::None);
    rap.start_again();
    until("the result is accepted", async || post(&api, &call, &call.result("done")).await.status == 200)
        .await;
    api.until_said("calls", "work: done").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_waits_for_its_database_at_the_start_can_be_stopped() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let proxy = Proxy::start(database.port()).await;
    proxy.set(Fault::Stall);
    let rap = prepared(node(&tools, &database.url_at(proxy.port)));
    let mut starting = Process::starting(rap.serve_command());
    // It listens for signals before that line.
    starting.until_logged("agent=").await;
    let began = Instant::now();
    assert!(starting.terminate().success(), "{}", starting.log());
    assert!(began.elapsed() < STOP_WITHIN, "{:?}", began.elapsed());
}

/// Proves: LC-23, LC-37
#[tokio::test(flavor = "multi_thread")]
async fn nodes_go_on_by_themselves_after_postgres_was_away() {
    let (server, tools) = (Server::own(), Tools::start().await);
    let database = server.database();
    let setup = || node(&tools, &database.url());
    let [(_one, first), (_other, second)] = two(setup(), setup()).await;
    first.create("one", "call work {}").await;
    let call = tools.invocation().await;
    first.until_acknowledged(&call).await;
    second.create("two", "sleep 1\nsay at last").await;
    let mut stream = Stream::of(&second, "one").await;
    server.stop();
    for api in [&first, &second] {
        let refused = api.post("/v1/threads/one/messages", &json!({"text": "say refused"})).await;
        assert!(is_unavailable(&refused), "{refused:?}");
        assert_eq!(api.get("/readyz").await.status, 503);
    }
    // Longer than the lease. A long run of the tests sets another time.
    let away = std::env::var("RAP_AWAY_SECONDS").map_or(3, |seconds| seconds.parse().unwrap());
    tokio::time::sleep(Duration::from_secs(away)).await;
    server.start();
    for api in [&first, &second] {
        until("it is ready again", async || api.get("/readyz").await.status == 200).await;
        until_nodes(api, 2).await;
    }
    second.until_said("two", "at last").await;
    until("the result is accepted", async || post(&first, &call, &call.result("done")).await.status == 200)
        .await;
    second.until_said("one", "work: done").await;
    assert!(!second.texts("one").await.contains(&"say refused".to_owned()));
    assert_eq!(second.texts("two").await.iter().filter(|said| *said == "at last").count(), 1);
    // The stream has ended or shows everything.
    while let Some(event) = stream.next().await {
        if event.data.contains("work: done") || event.name == "end" {
            break;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_node_takes_its_share_of_waiting_work_and_is_listed() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let setup = || node(&tools, &database.url()).limit("model_concurrency = 1");
    let (one, first) = start(setup());
    for number in 0..4 {
        first.create(&format!("t{number}"), "sleep 600\nsay never").await;
    }
    until("the first node asks", async || asking(&first).await).await;
    let (_other, second) = start(setup());
    until("the other node asks", async || asking(&second).await).await;
    // Either node shows the model requests of both.
    until("two nodes ask", async || {
        let nodes = first.raw_listing("nodes").await;
        nodes.len() == 2 && nodes.iter().all(|node| node["asking"] == 1)
    })
    .await;
    let nodes = second.raw_listing("nodes").await;
    assert_eq!(nodes[0]["url"], first.url.as_str());
    assert_eq!(nodes[1]["url"], second.url.as_str());
    let (code, listing) = one.command(&["nodes", "ls"]);
    assert!(
        code == Some(0) && listing.contains("MODEL REQUESTS") && listing.contains(&second.url),
        "{listing}"
    );
    assert_eq!(metric(&second, "rap_nodes").await, 2.0);
    // New work of a node without a free slot is taken by another one.
    for number in 0..4 {
        second.act(&format!("t{number}"), "close").await.expect(202);
    }
    until("nobody asks", async || !asking(&first).await && !asking(&second).await).await;
    first.create("a", "sleep 600\nsay never").await;
    first.create("b", "sleep 600\nsay never").await;
    until("both ask", async || asking(&first).await && asking(&second).await).await;
}

/// Model requests wait for discovery without a slot, so that one node may have claimed more of them than it has slots.
#[tokio::test(flavor = "multi_thread")]
async fn a_model_request_that_finds_no_slot_after_discovery_is_sent_by_another_node() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let setup = || {
        let node = node(&tools, &database.url());
        node.limit("model_concurrency = 1\ndiscovery_wait = \"60s\"\ndiscovery_timeout = \"60s\"")
    };
    let [(_one, first), (_other, second)] = two(setup(), setup()).await;
    until_nodes(&second, 2).await;
    tools.answer_always(DISCOVERY, Reply::Hang);
    first.create("a", "sleep 600\nsay never").await;
    first.create("b", "sleep 600\nsay never").await;
    let waiting = async || metric(&first, "rap_effects_under_way{kind=\"ask\"}").await == 2.0;
    until("both wait for discovery", waiting).await;
    tools.offer(tools.document("bench", "1", vec![tool("work")]));
    tools.release();
    until("both ask", async || asking(&first).await && asking(&second).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_work_behind_a_transaction_pooler_with_and_without_a_direct_connection() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let pooler = Pooler::start(database.port());
    let pooled = database.url_at(pooler.port());
    let direct = format!("lease = \"5s\"\nlisten_url = {:?}", database.url());
    let [(one, first), (_other, second)] =
        two(node_with(&tools, &pooled, "lease = \"5s\""), node_with(&tools, &pooled, &direct)).await;
    first.create("t", "call work {}").await;
    let call = tools.invocation().await;
    let mut streams = [Stream::of(&first, "t").await, Stream::of(&second, "t").await];
    assert_eq!(post(&second, &call, &call.result("done")).await.status, 200);
    second.until_idle("t").await;
    let [at_first, at_second] = &mut streams;
    until_streamed(at_second, &first, "from the first").await;
    until_streamed(at_first, &second, "from the second").await;
    // The first one has found out that no notifications arrive, and polls for signals.
    one.until_logged("no notifications arrive from the database").await;
    first.say("t", "sleep 600\nsay never").await;
    until("the first node asks", async || asking(&first).await).await;
    second.act("t", "interrupt").await.expect(202);
    until("the first node has stopped", async || !asking(&first).await).await;
}

/// Nodes come and go with the load: work that another node has claimed keeps no node running.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_nothing_to_do_ends_while_another_one_works() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let (_one, first) = start(node(&tools, &database.url()));
    first.create("asks", "sleep 600\nsay never").await;
    until("the first node asks", async || asking(&first).await).await;
    let other = prepared(node(&tools, &database.url()));
    let mut command = other.serve_command();
    command.args(["--until-idle", "1s"]);
    let mut process = Process::start(command);
    let second = Api::of(&other);
    second.create("quick", "say hello").await;
    second.until_idle("quick").await;
    until("the end of the second node", async || !process.is_running()).await;
    assert!(process.wait().success(), "{}", process.log());
    until_nodes(&first, 1).await;
    assert!(asking(&first).await);
}
