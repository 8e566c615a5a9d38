//! Sessions that move: between databases by file, and between runtimes.

use std::fs;
use std::path::Path;

use rap_testkit::peer::{Peer, Reply};
use rap_testkit::postgres::Server;
use rap_testkit::tools::{CLOSE, tool, with};
use rap_testkit::{Process, Rap, Setup, Tools, programs, until};
use serde_json::json;

use crate::support::{Api, start};

const MIGRATE: &str = "/migrate";
const TOKEN: &str = "a-long-token-of-the-destination";

/// Runs a command in the directory of a runtime. Returns its exit code and its output.
fn run(directory: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = programs::rap(arguments).current_dir(directory).output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (output.status.code(), text.concat())
}

fn succeed(directory: &Path, arguments: &[&str]) -> String {
    let (code, text) = run(directory, arguments);
    assert_eq!(code, Some(0), "{arguments:?}: {text}");
    text
}

/// Proves: LC-30
#[tokio::test(flavor = "multi_thread")]
async fn a_session_moves_from_sqlite_to_postgres_and_back_and_its_open_calls_return() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let (mut rap, api) = start(Setup::new().tools(&tools).store("url = \"sqlite:data/rap.db\""));
    api.create("before", "say nothing").await;
    api.until_status("before", "idle").await;
    api.create("t", "call work {}\ncall watch {}").await;
    let mut calls = [tools.invocation().await, tools.invocation().await];
    calls.sort_by_key(|call| call.request.body["operation"].as_str().unwrap().to_owned());
    let [watch, work] = calls;
    watch.confirms("watching").await;
    api.until_acknowledged(&work).await;
    // An export reads the database beside the runtime that uses it.
    succeed(rap.directory(), &["export", "t", "-o", "live.jsonl"]);
    rap.stop();
    succeed(rap.directory(), &["export", "t", "-o", "t.jsonl"]);
    let (code, text) = run(rap.directory(), &["export", "t", "-o", "t.jsonl"]);
    assert_eq!((code, text.contains("exists")), (Some(2), true), "{text}");
    // The other database has the same key, and its runtime the same address.
    let key = fs::read_to_string(rap.directory().join("data/rap.db.key")).unwrap();
    let store = format!("url = {:?}\nkey = {:?}", database.url(), key.trim());
    let public_url = format!("public_url = {:?}", rap.url);
    let other = Setup::new().tools(&tools).store(&store).server(&public_url);
    let other = other.prepare(tempfile::tempdir().unwrap());
    let file = rap.directory().join("t.jsonl");
    let file = file.to_str().unwrap();
    for expected in ["imported session t\n", "session t exists already\n"] {
        let text = succeed(other.directory(), &["import", file]);
        assert!(text.contains(expected), "{text}");
    }
    let address = rap.url.strip_prefix("http://").unwrap().to_owned();
    let mut node = Process::start(other.serve_command_on(&address));
    until("it serves", || async { api.try_get("/readyz").await }).await;
    work.returns("done").await;
    watch.says(&with(watch.inline("an event"), json!({"event_id": "e1"}))).await;
    api.until_said("t", "watch: an event").await;
    assert!(api.texts("t").await.contains(&"done".to_owned()));
    assert_eq!(api.get("/v1/threads/before").await.status, 404);
    node.terminate();
    // Everything moves back, into an empty SQLite database with the same key.
    succeed(other.directory(), &["export", "--all", "-o", "all.jsonl"]);
    let back = rap.directory().join("data");
    for name in ["rap.db", "rap.db-wal", "rap.db-shm"] {
        fs::remove_file(back.join(name)).ok();
    }
    let file = other.directory().join("all.jsonl");
    succeed(rap.directory(), &["import", file.to_str().unwrap()]);
    rap.start_again();
    let (code, text) = run(rap.directory(), &["import", file.to_str().unwrap()]);
    assert_eq!(code, Some(1), "a runtime uses the database: {text}");
    watch.says(&with(watch.inline("an event"), json!({"event_id": "e1"}))).await;
    watch.says(&with(watch.inline("another event"), json!({"event_id": "e2"}))).await;
    api.until_said("t", "watch: another event").await;
    let texts = api.texts("t").await;
    assert_eq!(texts.iter().filter(|text| *text == "an event").count(), 1, "{texts:?}");
    api.create("new", "say hello").await;
    api.until_status("new", "idle").await;
}

/// The way back is part of the test before.
#[tokio::test(flavor = "multi_thread")]
async fn a_whole_store_moves_from_sqlite_to_postgres() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let (mut rap, api) = start(Setup::new().tools(&tools).store("url = \"sqlite:data/rap.db\""));
    for number in 0..3 {
        api.create(&format!("t{number}"), &format!("say hello {number}")).await;
        api.until_status(&format!("t{number}"), "idle").await;
    }
    api.create("works", "call work {}").await;
    let work = tools.invocation().await;
    api.until_acknowledged(&work).await;
    let threads = ["t0", "t1", "t2", "works"];
    let mut before = Vec::new();
    for thread in threads {
        before.push(api.raw_history(thread).await);
    }
    rap.stop();
    succeed(rap.directory(), &["export", "--all", "-o", "whole.jsonl"]);
    let key = fs::read_to_string(rap.directory().join("data/rap.db.key")).unwrap();
    let store = format!("url = {:?}\nkey = {:?}", database.url(), key.trim());
    let other = Setup::new().tools(&tools).store(&store).server(&format!("public_url = {:?}", rap.url));
    let other = other.prepare(tempfile::tempdir().unwrap());
    let file = rap.directory().join("whole.jsonl");
    let text = succeed(other.directory(), &["import", file.to_str().unwrap()]);
    for thread in threads {
        assert!(text.contains(&format!("imported session {thread}\n")), "{text}");
    }
    let _node = Process::start(other.serve_command_on(rap.url.strip_prefix("http://").unwrap()));
    until("it serves", || async { api.try_get("/readyz").await }).await;
    for (thread, before) in threads.into_iter().zip(before) {
        assert_eq!(api.raw_history(thread).await, before);
    }
    work.returns("done").await;
    api.until_said("works", "work: done").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_another_key_open_calls_are_ended_only_on_request() {
    let tools = Tools::start().await;
    let (mut rap, api) = start(Setup::new().tools(&tools).store("url = \"sqlite:data/rap.db\""));
    api.create("t", "call work {}").await;
    let work = tools.invocation().await;
    api.until_acknowledged(&work).await;
    rap.stop();
    succeed(rap.directory(), &["export", "t", "-o", "t.jsonl"]);
    let mut other = Setup::new().tools(&tools).prepare(tempfile::tempdir().unwrap());
    let file = rap.directory().join("t.jsonl");
    let (code, text) = run(other.directory(), &["import", file.to_str().unwrap()]);
    assert_eq!(code, Some(1), "{text}");
    for part in ["1 open calls", "another key", "--end-calls"] {
        assert!(text.contains(part), "{text}");
    }
    let text = succeed(other.directory(), &["import", file.to_str().unwrap(), "--end-calls"]);
    assert!(text.contains("1 open calls and subscriptions were ended"), "{text}");
    other.start_again();
    let there = Api::of(&other);
    until("the agent is told", || async {
        there.texts("t").await.iter().any(|text| text.contains("the session was moved to another server"))
    })
    .await;
    assert_eq!(tools.pending("/invoke"), 0);
}

/// Changes one line of a file, without its checksum.
fn alter(file: &Path, line: usize, from: &str, to: &str) {
    let text = fs::read_to_string(file).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    assert!(lines[line].contains(from), "{}", lines[line]);
    lines[line] = lines[line].replacen(from, to, 1);
    fs::write(file, lines.join("\n") + "\n").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_file_is_refused_with_its_line_and_nothing_is_imported() {
    let tools = Tools::start().await;
    let (rap, api) = start(Setup::new().tools(&tools).store("url = \"sqlite:data/rap.db\""));
    api.create("t", "say hello").await;
    api.until_status("t", "idle").await;
    succeed(rap.directory(), &["export", "--all", "-o", "all.jsonl"]);
    let mut other = Setup::new().prepare(tempfile::tempdir().unwrap());
    let file = other.directory().join("all.jsonl");
    let original = rap.directory().join("all.jsonl");
    let refused = |expected: &[&str]| {
        let (code, text) = run(other.directory(), &["import", "all.jsonl"]);
        assert_eq!(code, Some(1), "{text}");
        assert!(expected.iter().all(|part| text.contains(part)), "{expected:?}: {text}");
        assert!(!other.directory().join("rap.db").exists(), "{text}");
    };
    fs::copy(&original, &file).unwrap();
    alter(&file, 2, "\"title\"", "\"titel\"");
    refused(&["line 3", "checksum", "nothing was imported"]);
    let text = fs::read(&original).unwrap();
    fs::write(&file, &text[..text.len() - 10]).unwrap();
    refused(&["cut off"]);
    let whole = fs::read_to_string(&original).unwrap();
    let lines: Vec<&str> = whole.lines().collect();
    fs::write(&file, lines[..lines.len() - 1].join("\n") + "\n").unwrap();
    refused(&[&format!("line {}", lines.len()), "not complete"]);
    fs::write(&file, "not an export\n").unwrap();
    refused(&["line 1", "not a line of an export"]);
    fs::write(&file, "").unwrap();
    refused(&["not complete"]);
    fs::copy(&original, &file).unwrap();
    succeed(other.directory(), &["import", "all.jsonl"]);
    other.start_again();
    assert_eq!(Api::of(&other).texts("t").await, ["say hello", "hello"]);
    let (code, text) = run(other.directory(), &["export", "nobody", "-o", "x.jsonl"]);
    assert_eq!((code, text.contains("no session `nobody`")), (Some(1), true), "{text}");
    assert!(!other.directory().join("x.jsonl").exists());
}

/// Two runtimes, each with a tool server of its own that has state of its sessions.
struct Pair {
    source: Rap,
    here: Api,
    tools: Tools,
    destination: Rap,
    there: Api,
    other_tools: Tools,
}

async fn stateful_tools() -> Tools {
    let tools = Tools::start().await;
    let document = tools.document("bench", "1", vec![tool("work"), tool("watch")]);
    tools.offer(with(document, json!({"needsMigration": true})));
    tools
}

impl Pair {
    async fn start() -> Pair {
        let (tools, other_tools) = (stateful_tools().await, stateful_tools().await);
        let (source, here) = start(Setup::new().tools(&tools).store("url = \"sqlite:data/rap.db\""));
        let setup = Setup::new().tools(&other_tools).token(TOKEN).store("url = \"sqlite:data/rap.db\"");
        let (destination, there) = start(setup);
        here.create("t", "call work {}").await;
        let call = tools.invocation().await;
        call.returns("first").await;
        here.until_status("t", "idle").await;
        Pair { source, here, tools, destination, there, other_tools }
    }

    async fn migrate(&self, more: &[&str]) -> (Option<i32>, String) {
        let (to, url) = (self.destination.url.clone(), self.source.url.clone());
        let more: Vec<String> = more.iter().map(ToString::to_string).collect();
        let command = move || {
            let mut command = programs::rap(&["migrate", "t", "--to", &to]);
            let output = command.args(more).env("RAP_URL", url).env("RAP_TO_TOKEN", TOKEN).output().unwrap();
            let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
            (output.status.code(), text.concat())
        };
        tokio::task::spawn_blocking(command).await.unwrap()
    }

    /// The session is in use here, as it was, and not at the destination.
    async fn goes_on_here(&self) {
        until("the session is back", || async { self.here.get("/v1/threads/t").await.status == 200 }).await;
        assert_eq!(self.there.get("/v1/threads/t").await.status, 404);
        let turn = self.here.thread("t").await["turn"].as_u64().unwrap();
        self.here.say("t", "say still here").await;
        self.here.until("t", "a turn", |thread| thread["turn"].as_u64() > Some(turn)).await;
        self.here.until_said("t", "still here").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_moves_to_another_runtime_after_its_tool_servers_have_moved_their_state() {
    let pair = Pair::start().await;
    let before = pair.here.texts("t").await;
    let (code, text) = pair.migrate(&[]).await;
    assert_eq!(code, Some(0), "{text}\n{}", pair.source.log());
    let request = pair.tools.next(MIGRATE).await;
    assert_eq!(request.body, json!({"session_id": "t", "destination_url": pair.other_tools.url}));
    assert_eq!(pair.tools.next(CLOSE).await.body["thread_id"], "t");
    assert_eq!(pair.here.get("/v1/threads/t").await.status, 404);
    assert_eq!(pair.there.texts("t").await, before);
    pair.there.say("t", "call work {}").await;
    pair.other_tools.invocation().await.returns("second").await;
    pair.there.until_said("t", "work: second").await;
    assert_eq!(pair.other_tools.count(MIGRATE), 0);
    assert_eq!(pair.tools.pending("/invoke"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_that_fails_leaves_the_session_as_it_was() {
    let mut pair = Pair::start().await;
    pair.tools.answer_next(MIGRATE, Reply::Status(500));
    let (code, text) = pair.migrate(&[]).await;
    assert_eq!((code, text.contains("did not move its state")), (Some(1), true), "{text}");
    pair.goes_on_here().await;
    // The destination refuses it.
    let (code, text) = pair.migrate(&["--to-token", "a-wrong-token-of-the-destination"]).await;
    assert_eq!((code, text.contains("refused")), (Some(1), true), "{text}");
    pair.goes_on_here().await;
    pair.there.create("t", "say another").await;
    let (code, text) = pair.migrate(&[]).await;
    assert_eq!((code, text.contains("another thread with the id")), (Some(1), true), "{text}");
    assert_eq!(pair.tools.count(MIGRATE), 1, "no state was copied to the other thread");
    assert_eq!(pair.here.get("/v1/threads/t").await.status, 200);
    pair.destination.kill();
    let (code, text) = pair.migrate(&[]).await;
    assert_eq!((code, text.contains("does not answer")), (Some(1), true), "{text}");
    assert_eq!(pair.here.get("/v1/threads/t").await.status, 200);
    pair.here.say("t", "say to the end").await;
    pair.here.until_said("t", "to the end").await;
}

/// Tool servers must not copy calls to a destination that may have another thread with the id.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_does_not_move_to_a_destination_that_does_not_tell_whether_the_id_is_free() {
    let (tools, destination) = (stateful_tools().await, Peer::start().await);
    let (source, here) = start(Setup::new().tools(&tools).store("url = \"sqlite:data/rap.db\""));
    here.create("t", "say hello").await;
    here.until_status("t", "idle").await;
    let server = json!({"name": "bench", "url": "http://127.0.0.1:9"});
    let described = json!({"key_id": "1", "public_url": "http://127.0.0.1:9", "tool_servers": [server]});
    destination.answer_always("/v1/imports", Reply::json(&described));
    let thread = "/v1/threads/t";
    destination.answer_next(thread, Reply::Status(500));
    destination.answer_next(thread, Reply::Status(403));
    let (code, text) = migrate_to(&source, &destination.url, &[]).await;
    assert_eq!((code, text.contains("refused the session (403)")), (Some(1), true), "{text}");
    assert_eq!((destination.count(thread), tools.count(MIGRATE)), (2, 0));
    // One that is on its way there is that of an earlier attempt.
    let moving = json!({"error": {"code": "moving", "message": "on its way"}}).to_string();
    destination.answer_next(thread, Reply::Full(503, None, moving.into()));
    tools.answer_next(MIGRATE, Reply::Status(500));
    let (code, text) = migrate_to(&source, &destination.url, &[]).await;
    assert_eq!((code, text.contains("did not move its state")), (Some(1), true), "{text}");
    assert_eq!(tools.count(MIGRATE), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_either_side_in_the_middle_of_a_move_loses_nothing() {
    let mut pair = Pair::start().await;
    pair.here.say("t", "call watch {}").await;
    let watch = pair.tools.invocation().await;
    watch.confirms("watching").await;
    pair.here.until_said("t", "watch: watching").await;
    let body = json!({"to": pair.destination.url, "token": TOKEN, "end_calls": true});
    // The source is killed while a tool server moves its state.
    pair.tools.answer_next(MIGRATE, Reply::Hang);
    pair.here.post("/v1/threads/t/migrate", &body).await.expect(202);
    pair.tools.next(MIGRATE).await;
    let event = with(watch.inline("meanwhile"), json!({"event_id": "e1"}));
    let refused = watch.post(&event).await;
    assert_eq!((refused.status, &refused.body["error"]["code"]), (503, &json!("moving")));
    let refused = pair.here.get("/v1/threads/t").await;
    assert_eq!((refused.status, &refused.body["error"]["code"]), (503, &json!("moving")));
    pair.source.restart();
    pair.goes_on_here().await;
    watch.says(&event).await;
    pair.here.until_said("t", "watch: meanwhile").await;
    // The destination is killed.
    pair.tools.answer_next(MIGRATE, Reply::Hang);
    pair.here.post("/v1/threads/t/migrate", &body).await.expect(202);
    pair.tools.next(MIGRATE).await;
    pair.destination.kill();
    pair.tools.release();
    until("the session is back", || async { pair.here.get("/v1/threads/t").await.status == 200 }).await;
    let state = || async { pair.here.get("/v1/threads/t/move").await.body["state"].clone() };
    until("the move has failed", || async { state().await == "failed" }).await;
    watch.says(&with(watch.inline("again"), json!({"event_id": "e2"}))).await;
    pair.here.until_said("t", "watch: again").await;
    pair.destination.start_again();
    // Then it moves. The subscription ends, because the destination has another key.
    let (code, text) = pair.migrate(&["--end-calls"]).await;
    assert_eq!(code, Some(0), "{text}");
    let texts = pair.there.texts("t").await;
    for text in ["meanwhile", "again"] {
        assert_eq!(texts.iter().filter(|said| *said == text).count(), 1, "{text}: {texts:?}");
    }
    assert!(pair.there.thread("t").await["subscriptions"].as_array().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_leaves_the_moves_of_others_alone_and_undoes_those_of_a_dead_one() {
    let (database, tools, other_tools) =
        (Server::shared().database(), stateful_tools().await, stateful_tools().await);
    let store = format!("url = {:?}\nkey = {:?}\nlease = \"2s\"", database.url(), "7e".repeat(32));
    let setup = || Setup::new().tools(&tools).server("public_url = \"http://127.0.0.1:9\"").store(&store);
    let (mut one, first) = start(setup());
    let setup_there = Setup::new().tools(&other_tools).token(TOKEN).store("url = \"sqlite:data/rap.db\"");
    let (destination, there) = start(setup_there);
    let body = json!({"to": destination.url, "token": TOKEN});
    for thread in ["moves", "stays"] {
        first.create(thread, "say hello").await;
        first.until_status(thread, "idle").await;
    }
    // Another node starts in the middle of a move.
    tools.answer_next(MIGRATE, Reply::Hang);
    first.post("/v1/threads/moves/migrate", &body).await.expect(202);
    tools.next(MIGRATE).await;
    let (_two, second) = start(setup());
    second.create("new", "say hello").await;
    second.until_status("new", "idle").await;
    assert_eq!(second.get("/v1/threads/moves").await.status, 503);
    tools.release();
    until("it has moved", || async { there.get("/v1/threads/moves").await.status == 200 }).await;
    until("it is gone", || async { second.get("/v1/threads/moves").await.status == 404 }).await;
    // The node that moves a session dies. The other one needs no restart.
    tools.answer_next(MIGRATE, Reply::Hang);
    first.post("/v1/threads/stays/migrate", &body).await.expect(202);
    tools.next(MIGRATE).await;
    assert_eq!(second.get("/v1/threads/stays").await.status, 503);
    one.kill();
    until("the session is back", || async { second.get("/v1/threads/stays").await.status == 200 }).await;
    assert_eq!(there.get("/v1/threads/stays").await.status, 404);
    second.say("stays", "say still here").await;
    second.until_said("stays", "still here").await;
}

/// Starts a destination with the keys of the source.
fn destination_with_the_keys_of(source: &Rap, tools: &Tools, public_url: Option<&str>) -> Rap {
    let mut setup = Setup::new().tools(tools).token(TOKEN).store("url = \"sqlite:data/rap.db\"");
    if let Some(public_url) = public_url {
        setup = setup.server(&format!("public_url = {public_url:?}"));
    }
    let mut destination = setup.prepare(tempfile::tempdir().unwrap());
    fs::create_dir(destination.directory().join("data")).unwrap();
    let key = Path::new("data/rap.db.key");
    fs::copy(source.directory().join(key), destination.directory().join(key)).unwrap();
    destination.start_again();
    destination
}

async fn migrate(source: &Rap, destination: &Rap, more: &[&str]) -> (Option<i32>, String) {
    migrate_to(source, &destination.url, more).await
}

async fn migrate_to(source: &Rap, to: &str, more: &[&str]) -> (Option<i32>, String) {
    let (to, url) = (to.to_owned(), source.url.clone());
    let more: Vec<String> = more.iter().map(ToString::to_string).collect();
    let command = move || {
        let mut command = programs::rap(&["migrate", "t", "--to", &to]);
        let output = command.args(more).env("RAP_URL", url).env("RAP_TO_TOKEN", TOKEN).output().unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        (output.status.code(), text.concat())
    };
    tokio::task::spawn_blocking(command).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_of_a_session_that_moves_belong_to_the_tool_server_of_the_destination() {
    let (tools, other_tools) = (stateful_tools().await, stateful_tools().await);
    let (source, here) = start(Setup::new().tools(&tools).store("url = \"sqlite:data/rap.db\""));
    here.create("t", "call watch {}").await;
    let watch = tools.invocation().await;
    watch.confirms("watching").await;
    here.until_said("t", "watch: watching").await;
    let destination = destination_with_the_keys_of(&source, &other_tools, Some(&source.url));
    let (code, text) = migrate(&source, &destination, &[]).await;
    assert_eq!(code, Some(0), "{text}");
    let there = Api::of(&destination);
    // The new server is asked at once, which is how it learns that the session has come into use.
    let asked = other_tools.next("/tool_call_status").await;
    assert_eq!(asked.body, json!({"thread_id": "t", "tool_call_id": watch.id()}));
    assert_eq!(tools.count("/tool_call_status"), 0);
    there.post(&format!("/v1/threads/t/calls/{}/cancel", watch.id()), &json!({})).await.expect(202);
    assert_eq!(other_tools.next(rap_testkit::tools::CANCEL).await.body["tool_call_id"], watch.id());
}

/// Tools know only the address of the runtime that invoked them.
#[tokio::test(flavor = "multi_thread")]
async fn callbacks_that_arrive_at_the_old_runtime_after_a_move_are_passed_on() {
    let tools = Tools::start().await;
    let (mut source, here) = start(Setup::new().tools(&tools).store("url = \"sqlite:data/rap.db\""));
    here.create("t", "call work {}\ncall watch {}").await;
    let mut calls = [tools.invocation().await, tools.invocation().await];
    calls.sort_by_key(|call| call.request.body["operation"].as_str().unwrap().to_owned());
    let [watch, work] = calls;
    watch.confirms("watching").await;
    here.until_acknowledged(&work).await;
    let mut destination = destination_with_the_keys_of(&source, &tools, None);
    let there = Api::of(&destination);
    let (code, text) = migrate(&source, &destination, &[]).await;
    assert_eq!(code, Some(0), "{text}\n{}", source.log());
    assert_eq!(here.get("/v1/threads/t").await.status, 404);
    work.returns("done").await;
    let event = with(watch.inline("an event"), json!({"event_id": "e1"}));
    watch.says(&event).await;
    there.until_said("t", "watch: an event").await;
    // A tool server tries again while the new runtime cannot be reached, and the event arrives once.
    destination.kill();
    let second = with(watch.inline("another event"), json!({"event_id": "e2"}));
    assert_eq!(watch.post(&second).await.status, 503);
    destination.start_again();
    source.restart();
    for event in [&event, &second, &second] {
        watch.says(event).await;
    }
    there.until_said("t", "watch: another event").await;
    let texts = there.texts("t").await;
    for text in ["done", "an event", "another event"] {
        assert_eq!(texts.iter().filter(|said| *said == text).count(), 1, "{text}: {texts:?}");
    }
    // The new runtime decides what it refuses.
    there.post("/v1/threads/t/close", &json!({})).await.expect(202);
    there.until_status("t", "closed").await;
    let refused = watch.post(&with(watch.inline("too late"), json!({"event_id": "e3"}))).await;
    assert_eq!((refused.status, &refused.body["error"]["code"]), (410, &json!("refused_after_move")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_may_have_been_sent_is_not_sent_again_with_another_url() {
    let tools = Tools::start().await;
    let (source, here) = start(Setup::new().tools(&tools).store("url = \"sqlite:data/rap.db\""));
    // The acknowledgement does not come before the session is stopped.
    tools.answer_always("/invoke", Reply::Hang);
    here.create("t", "call work {}").await;
    tools.next("/invoke").await;
    let destination = destination_with_the_keys_of(&source, &tools, None);
    let (code, text) = migrate(&source, &destination, &[]).await;
    assert_eq!((code, text.contains("no tool server has acknowledged yet")), (Some(1), true), "{text}");
    assert_eq!(here.get("/v1/threads/t").await.status, 200);
    let sent = tools.count("/invoke");
    let (code, text) = migrate(&source, &destination, &["--end-calls"]).await;
    assert_eq!(code, Some(0), "{text}");
    let there = Api::of(&destination);
    until("the agent is told", || async {
        there.texts("t").await.iter().any(|text| text.contains("the session was moved to another server"))
    })
    .await;
    there.until_status("t", "idle").await;
    let from_there = tools.all("/invoke").split_off(sent);
    let is_new = |request: &rap_testkit::peer::Request| {
        request.body["callback_url"].as_str().unwrap().starts_with(&destination.url)
    };
    assert!(!from_there.iter().any(is_new), "{from_there:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_export_of_all_sessions_leaves_damaged_ones_out_and_names_them() {
    let (mut rap, api) = start(Setup::new().store("url = \"sqlite:data/rap.db\""));
    for name in ["first", "entry", "head", "last"] {
        api.create(name, "say hello").await;
        api.until_status(name, "idle").await;
    }
    rap.stop();
    let database = rusqlite::Connection::open(rap.directory().join("data/rap.db")).unwrap();
    for sql in [
        "UPDATE threads SET head = '{}' WHERE id = 'head'",
        "UPDATE entries SET body = 'nonsense' WHERE key = (SELECT (no << 32) + 2 FROM threads WHERE id = 'entry')",
    ] {
        assert_eq!(database.execute(sql, []).unwrap(), 1, "{sql}");
    }
    drop(database);
    let text = succeed(rap.directory(), &["export", "--all", "-o", "all.jsonl"]);
    for part in ["exported 2 sessions", "left out session entry", "left out session head", "rap doctor"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    for session in ["entry", "head"] {
        let (code, text) = run(rap.directory(), &["export", session, "-o", "one.jsonl"]);
        assert_eq!((code, text.contains("is damaged and cannot be exported")), (Some(1), true), "{text}");
    }
    let other = Setup::new().prepare(tempfile::tempdir().unwrap());
    let file = rap.directory().join("all.jsonl");
    let text = succeed(other.directory(), &["import", file.to_str().unwrap()]);
    assert_eq!(text, "imported session first\nimported session last\n");
}

/// A destination that takes every session and answers requests to start one as the test says.
async fn taker() -> Peer {
    let destination = Peer::start().await;
    let described = json!({"key_id": "1", "public_url": "http://127.0.0.1:9", "tool_servers": []});
    destination.answer_always("/v1/imports", Reply::json(&described));
    destination.answer_always("/v1/threads/t", Reply::Status(404));
    for action in ["records", "check", "discard"] {
        destination.answer_always(&format!("/v1/imports/t/{action}"), Reply::json(&json!({})));
    }
    destination
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_ends_when_the_destination_does_not_have_the_session_any_more() {
    const START: &str = "/v1/imports/t/start";
    let destination = taker().await;
    let (mut source, here) = start(Setup::new().store("url = \"sqlite:data/rap.db\""));
    here.create("t", "say hello").await;
    here.until_status("t", "idle").await;
    let unknown = json!({"error": {"code": "no_such_thread", "message": "no such thread"}}).to_string();
    destination.answer_next(START, Reply::Status(503));
    destination.answer_always(START, Reply::Full(404, None, unknown.into()));
    let (code, text) = migrate_to(&source, &destination.url, &[]).await;
    assert_eq!((code, text.contains("does not confirm that it has it")), (Some(1), true), "{text}");
    let state = || async { here.get("/v1/threads/t/move").await.body["state"].clone() };
    assert_eq!(state().await, "lost");
    assert_eq!(here.get("/v1/threads/t").await.status, 503, "it is not in use here");
    // After a restart the destination is asked once more.
    let asked = destination.count(START);
    source.restart();
    until("the move has ended", || async { state().await == "lost" }).await;
    assert_eq!(destination.count(START), asked + 1);
    // A person who moves it again gets it back, unless the destination has it.
    destination.answer_next("/v1/threads/t", Reply::Status(200));
    let (code, text) = migrate_to(&source, &destination.url, &[]).await;
    assert_eq!((code, text.contains("that runtime has the session")), (Some(1), true), "{text}");
    assert_eq!(state().await, "lost");
    let setup = Setup::new().token(TOKEN).store("url = \"sqlite:data/rap.db\"");
    let (other, there) = start(setup);
    let (code, text) = migrate(&source, &other, &[]).await;
    assert_eq!(code, Some(0), "{text}\n{}", source.log());
    assert_eq!(there.texts("t").await, ["say hello", "hello"]);
    assert_eq!(here.get("/v1/threads/t").await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_was_deleted_at_its_destination_has_moved() {
    let (source, here) = start(Setup::new().store("url = \"sqlite:data/rap.db\""));
    let setup = Setup::new().token(TOKEN).store("url = \"sqlite:data/rap.db\"");
    let (destination, there) = start(setup);
    here.create("t", "say hello").await;
    here.until_status("t", "idle").await;
    let (code, text) = migrate(&source, &destination, &[]).await;
    assert_eq!(code, Some(0), "{text}");
    there.post("/v1/threads/t/close", &json!({})).await.expect(202);
    there.until_status("t", "closed").await;
    let (url, bearer) = (format!("{}/v1/threads/t", destination.url), format!("Bearer {TOKEN}"));
    rap_testkit::http::send("DELETE", &url, &[("authorization", &bearer)], b"").await.expect(202);
    until("it is deleted", || async { there.get("/v1/threads/t").await.status == 404 }).await;
    // The answer to the first request to start it may have been lost.
    let repeated = there.post("/v1/imports/t/start", &json!({})).await.expect(200);
    assert_eq!(repeated, json!({"open_calls": 0, "ended_calls": 0}));
    assert_eq!(there.post("/v1/imports/other/start", &json!({})).await.status, 404);
}
