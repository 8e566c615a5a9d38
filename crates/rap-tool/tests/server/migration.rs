//! Moving the state of a session: the author's hook behind `/migrate`.

use std::sync::{Arc, Mutex};

use rap_tool::Migration;
use rap_tool::prelude::*;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::support::{Received, Runtime, Server, data_dir, short_pauses};

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

fn server() -> ToolServer {
    ToolServer::new("test").bearer("one").tool("work", |_: Nothing, _: Call| async { Ok("done".to_owned()) })
}

async fn manifest(server: &Server) -> Value {
    let url = format!("{}/.well-known/rap-toolset", server.url);
    rap_testkit::http::send("GET", &url, &[], b"").await.body
}

#[tokio::test]
async fn the_hook_moves_a_session_and_200_means_that_it_has() {
    let data = data_dir();
    let moved: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
    let (record, mut outcomes) = (Arc::clone(&moved), vec!["ok", "panic", "fail", "ok"]);
    outcomes.reverse();
    let outcomes = Arc::new(Mutex::new(outcomes));
    let tools = server().migrate(move |migration: Migration| {
        let (record, outcome) = (Arc::clone(&record), outcomes.lock().unwrap().pop());
        async move {
            match outcome {
                Some("fail") => return Err(Error::new("the disk is full")),
                Some("panic") => panic!("a bug"),
                _ => {}
            }
            let session = migration.session().id().as_str().to_owned();
            record.lock().unwrap().push((session, migration.destination().to_string()));
            Ok(())
        }
    });
    let server = Server::start(tools, data.path()).await;
    assert_eq!(manifest(&server).await["needsMigration"], true);
    let caller = server.caller().with_token("one");
    let body = json!({"session_id": "s", "destination_url": "http://127.0.0.1:9/tools"}).to_string();
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(caller.post("/migrate", body.clone()).await.0);
    }
    assert_eq!(statuses, [200, 500, 500, 200]);
    let once = ("s".to_owned(), "http://127.0.0.1:9/tools".to_owned());
    assert_eq!(*moved.lock().unwrap(), [once.clone(), once]);
    assert_eq!(server.caller().with_token("two").post("/migrate", body).await.0, 401);
    for invalid in [json!({"session_id": "s"}), json!({"session_id": "", "destination_url": "http://h"})] {
        assert_eq!(caller.post("/migrate", invalid.to_string()).await.0, 400);
    }
    assert_eq!(moved.lock().unwrap().len(), 2);
    server.stop().await;
}

#[tokio::test]
async fn a_server_without_a_hook_needs_no_migration() {
    let data = data_dir();
    let server = Server::start(server(), data.path()).await;
    assert_ne!(manifest(&server).await["needsMigration"], true);
    let body = json!({"session_id": "s", "destination_url": "http://127.0.0.1:9"}).to_string();
    assert_eq!(server.caller().with_token("one").post("/migrate", body).await.0, 404);
    server.stop().await;
}

const KEY: &str = "0101010101010101010101010101010101010101010101010101010101010101";
const OTHER_KEY: &str = "0202020202020202020202020202020202020202020202020202020202020202";

#[derive(Deserialize, JsonSchema)]
struct Named {
    name: String,
}

/// A server with a call that never returns, one that runs again after a restart and returns only at `new`, and a
/// subscription whose events the test sends. `label` is in what it says.
fn movable(label: &'static str, events: &Arc<Semaphore>) -> ToolServer {
    let events = Arc::clone(events);
    let again = move |_: Nothing, call: Call| async move {
        if label == "old" {
            call.cancelled().await;
        }
        Ok(format!("{label} again"))
    };
    ToolServer::new("test")
        .limits(short_pauses())
        .tool("hang", |_: Nothing, call: Call| async move {
            call.cancelled().await;
            Err::<String, _>(Error::new("cancelled"))
        })
        .tool("say", |args: Named, _: Call| async move { Ok(args.name) })
        .offer(Tool::new("again", again).restartable())
        .subscription("watch", move |_: Nothing, subscribe: Subscribe| {
            let events = Arc::clone(&events);
            async move {
                let from = subscribe.cursor::<u32>()?.unwrap_or(0);
                let subscription = subscribe.confirm(format!("{label} watches")).await?;
                for number in from + 1.. {
                    events.acquire().await.map_err(|error| Error::new(error.to_string()))?.forget();
                    let event = Event::new(format!("{label} event {number}")).cursor(number);
                    subscription.send(event).await?;
                }
                Ok(())
            }
        })
}

fn migrate_body(destination: &str) -> String {
    json!({"session_id": "s", "destination_url": destination}).to_string()
}

fn texts(callbacks: &[Received]) -> Vec<String> {
    let mut texts: Vec<String> = callbacks.iter().map(|one| one.text().to_owned()).collect();
    texts.sort();
    texts
}

#[tokio::test]
async fn calls_and_subscriptions_move_to_a_server_with_the_same_key_and_start_when_their_runtime_asks() {
    let (data, there) = (data_dir(), data_dir());
    let (old_events, events) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let source =
        Server::start(movable("old", &old_events).bearer("one").migrate_calls(KEY), data.path()).await;
    let target = Server::start(movable("new", &events).bearer("two").migrate_calls(KEY), there.path()).await;
    assert_eq!(manifest(&source).await["needsMigration"], true);
    let (old, new) = (source.caller().with_token("one"), target.caller().with_token("two"));
    let mut runtime = Runtime::start().await;
    old.accepted(&runtime.invocation("watch", "s", "w", json!({}))).await;
    runtime.expect_text("old watches Subscription ID: w").await;
    old_events.add_permits(1);
    runtime.expect_text("old event 1").await;
    old.accepted(&runtime.invocation("hang", "other", "o", json!({}))).await;
    let mut child = runtime.invocation("again", "child", "a", json!({}));
    child["thread_ancestors"] = json!(["s"]);
    old.accepted(&child).await;
    runtime.answer_always(503);
    old.accepted(&runtime.invocation("say", "s", "undelivered", json!({"name": "kept"}))).await;
    runtime.next().await;
    // The second copy replaces the first.
    for _ in 0..2 {
        assert_eq!(old.post("/migrate", migrate_body(&target.url)).await, (200, String::new()));
    }
    for thread in ["s", "child"] {
        assert_eq!(old.close(thread).await.0, 200);
    }
    old.until_settled("s", "undelivered").await;
    runtime.answer_always(200);
    runtime.pending();
    // Nothing runs at the destination, also after a restart, until the runtime asks.
    target.stop().await;
    let target = Server::start(movable("new", &events).bearer("two").migrate_calls(KEY), there.path()).await;
    let new = new.moved_to(&target.url);
    assert!(!new.is_alive("other", "o").await, "the other session stays");
    assert!(runtime.pending().is_empty());
    assert!(new.is_alive("s", "w").await);
    let arrived = [runtime.accepted().await, runtime.accepted().await];
    assert_eq!(texts(&arrived), ["kept", "new again"]);
    events.add_permits(1);
    let event = runtime.accepted().await;
    assert_eq!((event.text(), event.name.as_str()), ("new event 2", "w"));
    assert!(old.is_alive("other", "o").await);
    assert_eq!(new.cancel("s", "w").await.0, 200);
    new.until_settled("s", "w").await;
    assert!(texts(&runtime.pending()).is_empty());
    // Otherwise the server would wait for the call that never returns.
    old.cancel("other", "o").await;
    source.stop().await;
    target.stop().await;
}

/// A server with a tool that writes a file and returns when the test lets it, and the tools of [`with_files`].
fn gated(gate: &Arc<Semaphore>) -> ToolServer {
    let gate = Arc::clone(gate);
    with_files().tool("slow", move |_: Nothing, call: Call| {
        let gate = Arc::clone(&gate);
        async move {
            tokio::select! {
                permit = gate.acquire() => permit.map_err(|error| Error::new(error.to_string()))?.forget(),
                () = call.cancelled() => return Err(Error::new("cancelled")),
            }
            let directory = call.directory().await?.join("docs");
            std::fs::create_dir_all(&directory)?;
            std::fs::write(directory.join("late"), "late")?;
            Ok("the real result".to_owned())
        }
    })
}

#[tokio::test]
async fn a_call_that_returns_while_its_session_moves_keeps_its_result_and_its_files() {
    let (data, there) = (data_dir(), data_dir());
    let (gate, other_gate) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let source = Server::start(gated(&gate).migrate_calls(KEY), data.path()).await;
    let target = Server::start(gated(&other_gate).migrate_calls(KEY), there.path()).await;
    let (old, new) = (source.caller(), target.caller());
    let mut runtime = Runtime::start().await;
    old.accepted(&runtime.invocation("slow", "s", "1", json!({}))).await;
    // The runtime has stopped the session: it takes no callbacks until the session has moved.
    runtime.answer_always(503);
    let moving = tokio::spawn({
        let (old, body) = (source.caller(), migrate_body(&target.url));
        async move { old.post("/migrate", body).await }
    });
    for _ in 0..50 {
        assert!(old.is_alive("s", "1").await);
    }
    assert!(!moving.is_finished(), "nothing is copied while the call is running");
    gate.add_permits(1);
    assert_eq!(moving.await.unwrap(), (200, String::new()));
    assert_eq!(old.close("s").await.0, 200);
    old.until_settled("s", "1").await;
    runtime.pending();
    runtime.answer_always(200);
    assert!(new.is_alive("s", "1").await);
    runtime.expect_text("the real result").await;
    new.accepted(&runtime.invocation("list", "s", "2", json!({}))).await;
    runtime.expect_text("files late:4").await;
    assert!(runtime.pending().is_empty());
    source.stop().await;
    target.stop().await;
}

#[tokio::test]
async fn a_call_that_does_not_end_fails_the_move_which_says_so() {
    let (data, there, gate) = (data_dir(), data_dir(), Arc::new(Semaphore::new(0)));
    let mut short = short_pauses();
    short.stop_within = std::time::Duration::from_millis(50);
    let source = Server::start(gated(&gate).limits(short).migrate_calls(KEY), data.path()).await;
    let target = Server::start(gated(&gate).migrate_calls(KEY), there.path()).await;
    let mut runtime = Runtime::start().await;
    source.caller().accepted(&runtime.invocation("slow", "s", "1", json!({}))).await;
    source.caller().accepted(&runtime.invocation("slow", "other", "2", json!({}))).await;
    let (status, body) = source.caller().post("/migrate", migrate_body(&target.url)).await;
    assert_eq!((status, body.contains("call 1 of slow is still running")), (500, true), "{body}");
    assert!(!target.caller().is_alive("s", "1").await);
    // The session goes on, and moves when the call has ended.
    source.caller().cancel("s", "1").await;
    runtime.expect_text("Error: cancelled").await;
    assert_eq!(source.caller().post("/migrate", migrate_body(&target.url)).await, (200, String::new()));
    source.caller().cancel("other", "2").await;
    source.stop().await;
    target.stop().await;
}

#[tokio::test]
async fn a_destination_that_cannot_take_the_calls_fails_the_move_and_the_source_goes_on() {
    let events = Arc::new(Semaphore::new(0));
    let directories = [data_dir(), data_dir(), data_dir(), data_dir(), data_dir()];
    let there = |label, token: &str| movable(label, &events).bearer(token);
    let source = Server::start(there("old", "one").migrate_calls(KEY), directories[0].path()).await;
    let without_key = Server::start(there("new", "two"), directories[1].path()).await;
    let other_key = Server::start(there("new", "two").migrate_calls(OTHER_KEY), directories[2].path()).await;
    let strangers = there("new", "two").bearer("three").migrate_calls(KEY);
    let strangers = Server::start(strangers, directories[3].path()).await;
    let known =
        Server::start(there("new", "two").bearer("one").migrate_calls(KEY), directories[4].path()).await;
    let (caller, mut runtime) = (source.caller().with_token("one"), Runtime::start().await);
    caller.accepted(&runtime.invocation("watch", "s", "w", json!({}))).await;
    runtime.expect_text("old watches Subscription ID: w").await;
    let nobody = Server::start(there("new", "two"), data_dir().path()).await;
    let gone = nobody.url.clone();
    nobody.stop().await;
    for destination in [&without_key.url, &other_key.url, &strangers.url, &gone] {
        let (status, body) = caller.post("/migrate", migrate_body(destination)).await;
        assert_eq!((status, body.contains("not_moved")), (500, true), "{destination}: {body}");
    }
    for token in ["two", "three"] {
        assert!(!strangers.caller().with_token(token).is_alive("s", "w").await);
    }
    events.add_permits(1);
    runtime.expect_text("old event 1").await;
    // A stranger cannot bring calls.
    for (server, expected) in [(&without_key, 404), (&known, 403)] {
        let body = json!({"sealed": "bm90IHNlYWxlZA=="}).to_string();
        assert_eq!(server.caller().post("/import_calls", body).await.0, expected);
    }
    // A caller with the same token has the calls there; no other caller has.
    assert_eq!(caller.post("/migrate", migrate_body(&known.url)).await.0, 200);
    assert!(!known.caller().with_token("two").is_alive("s", "w").await);
    // A thread that is closed before it came into use is gone.
    assert_eq!(known.caller().with_token("one").close("s").await.0, 200);
    assert!(!known.caller().with_token("one").is_alive("s", "w").await);
    for server in [source, without_key, other_key, strangers, known] {
        server.stop().await;
    }
}

#[tokio::test]
async fn a_migration_key_has_the_form_of_a_key() {
    let data = data_dir();
    let refused = server().migrate_calls("short").data(data.path()).bind("127.0.0.1:0").await;
    let error = refused.err().expect("the key is refused").to_string();
    assert!(error.contains("RAP_TOOL_MIGRATION_KEY"), "{error}");
}

#[derive(Deserialize, JsonSchema)]
struct Write {
    name: String,
    kilobytes: usize,
}

/// A server whose tools write a file into the directory of their thread, and list the files of the thread and of its
/// ancestors.
fn with_files() -> ToolServer {
    let write = |args: Write, call: Call| async move {
        let directory = call.directory().await?.join("docs");
        std::fs::create_dir_all(&directory)?;
        std::fs::write(directory.join(&args.name), args.name.repeat(1024 * args.kilobytes))?;
        if !directory.join("link").is_symlink() {
            std::os::unix::fs::symlink(&args.name, directory.join("link"))?;
            std::os::unix::fs::symlink("/etc", directory.join("absolute"))?;
        }
        Ok(args.name)
    };
    let list = |_: Nothing, call: Call| async move {
        let mut files = Vec::new();
        for directory in call.ancestor_directories().into_iter().chain([call.directory().await?]) {
            for entry in std::fs::read_dir(directory.join("docs")).into_iter().flatten() {
                let entry = entry?;
                let size = std::fs::read(entry.path()).map_or(0, |bytes| bytes.len());
                files.push(format!("{}:{size}", entry.file_name().to_string_lossy()));
            }
        }
        files.sort();
        files.insert(0, "files".into());
        Ok(files.join(" "))
    };
    ToolServer::new("test").limits(short_pauses()).tool("write", write).tool("list", list)
}

fn threads_in(data: &std::path::Path) -> usize {
    let entries = std::fs::read_dir(data.join("threads")).into_iter().flatten().flatten();
    entries.filter(|entry| entry.path().extension().is_none() && entry.file_name() != "arriving").count()
}

#[tokio::test]
async fn the_directories_of_threads_move_with_their_session() {
    let (data, there) = (data_dir(), data_dir());
    let source = Server::start(with_files().bearer("one").migrate_calls(KEY), data.path()).await;
    let target = Server::start(with_files().bearer("two").migrate_calls(KEY), there.path()).await;
    let (old, new) = (source.caller().with_token("one"), target.caller().with_token("two"));
    let mut runtime = Runtime::start().await;
    let in_child = |mut call: Value| {
        call["thread_ancestors"] = json!(["s"]);
        call
    };
    // A file of several parts, and files of a child whose call has ended.
    for (thread, id, name, kilobytes) in
        [("s", "1", "a", 1300), ("child", "2", "b", 1), ("other", "3", "c", 1)]
    {
        let mut call = runtime.invocation("write", thread, id, json!({"name": name, "kilobytes": kilobytes}));
        if thread == "child" {
            call = in_child(call);
        }
        old.accepted(&call).await;
        runtime.expect_text(name).await;
    }
    // The second copy replaces the first.
    for _ in 0..2 {
        assert_eq!(old.post("/migrate", migrate_body(&target.url)).await, (200, String::new()));
    }
    assert_eq!(threads_in(there.path()), 0, "nothing is in use before the runtime asks");
    for thread in ["s", "child"] {
        assert_eq!(old.close(thread).await.0, 200);
    }
    rap_testkit::until("the directories are removed here", async || threads_in(data.path()) == 1).await;
    target.stop().await;
    let target = Server::start(with_files().bearer("two").migrate_calls(KEY), there.path()).await;
    let new = new.moved_to(&target.url);
    new.accepted(&in_child(runtime.invocation("list", "child", "4", json!({})))).await;
    runtime.expect_text("files a:1331200 b:1024 link:1024 link:1331200").await;
    assert_eq!(threads_in(there.path()), 2);
    // A thread that has come without calls is closed like any other.
    for thread in ["s", "child"] {
        assert_eq!(new.close(thread).await.0, 200);
    }
    rap_testkit::until("the directories are removed there", async || threads_in(there.path()) == 0).await;
    source.stop().await;
    target.stop().await;
}

/// The time that a move may take bounds this test.
#[tokio::test]
async fn a_workspace_of_thousands_of_files_moves() {
    const FILES: usize = 6_000;
    let (data, there) = (data_dir(), data_dir());
    let make = |_: Nothing, call: Call| async move {
        let directory = call.directory().await?;
        for number in 0..FILES {
            let folder = directory.join((number / 1000).to_string());
            if number % 1000 == 0 {
                std::fs::create_dir(&folder)?;
            }
            std::fs::write(folder.join(number.to_string()), number.to_string())?;
        }
        Ok("made".to_owned())
    };
    let server = || with_files().tool("make", make).migrate_calls(KEY);
    let source = Server::start(server(), data.path()).await;
    let target = Server::start(server(), there.path()).await;
    let mut runtime = Runtime::start().await;
    source.caller().accepted(&runtime.invocation("make", "s", "1", json!({}))).await;
    runtime.expect_text("made").await;
    let began = std::time::Instant::now();
    assert_eq!(source.caller().post("/migrate", migrate_body(&target.url)).await, (200, String::new()));
    println!("moved {FILES} files in {:?}", began.elapsed());
    target.caller().accepted(&runtime.invocation("list", "s", "2", json!({}))).await;
    runtime.expect_text("files").await;
    let threads = std::fs::read_dir(there.path().join("threads")).unwrap().flatten();
    let mut moved =
        threads.filter(|entry| entry.path().extension().is_none() && entry.path().join("0").is_dir());
    let directory = moved.next().expect("the directory of the thread").path();
    let last = directory.join("5").join("5999");
    assert_eq!(std::fs::read_to_string(last).unwrap(), "5999");
    let folders = std::fs::read_dir(&directory).unwrap().flatten().filter(|entry| entry.path().is_dir());
    let files: usize = folders.map(|folder| std::fs::read_dir(folder.path()).unwrap().count()).sum();
    assert_eq!(files, FILES);
    source.stop().await;
    target.stop().await;
}

#[tokio::test]
async fn files_that_arrive_are_gone_when_their_session_is_closed_and_strangers_bring_none() {
    let (data, there) = (data_dir(), data_dir());
    let source = Server::start(with_files().migrate_calls(KEY), data.path()).await;
    let target = Server::start(with_files().migrate_calls(KEY), there.path()).await;
    let mut runtime = Runtime::start().await;
    let write = runtime.invocation("write", "s", "1", json!({"name": "a", "kilobytes": 1}));
    source.caller().accepted(&write).await;
    runtime.expect_text("a").await;
    assert_eq!(source.caller().post("/migrate", migrate_body(&target.url)).await.0, 200);
    assert_eq!(target.caller().close("s").await.0, 200);
    target.caller().accepted(&runtime.invocation("list", "s", "2", json!({}))).await;
    runtime.expect_text("files").await;
    let body = json!({"sealed": "bm90IHNlYWxlZA=="}).to_string();
    assert_eq!(target.caller().post("/import_files", body).await.0, 403);
    // The session continues where it was.
    source.caller().accepted(&runtime.invocation("list", "s", "3", json!({}))).await;
    runtime.expect_text("files a:1024 absolute:0 link:1024").await;
    source.stop().await;
    target.stop().await;
}

/// A request with state of a session, as somebody on the network sees it.
struct Recorded {
    path: String,
    proof: String,
    body: axum::body::Bytes,
}

impl Recorded {
    /// Sends the request again. Returns the status of the answer.
    async fn send(&self, server: &Server) -> u16 {
        self.send_with(server, &self.proof).await
    }

    async fn send_with(&self, server: &Server, proof: &str) -> u16 {
        let headers = [("content-type", "application/json"), (PROOF, proof)];
        rap_testkit::http::send("POST", &format!("{}{}", server.url, self.path), &headers, &self.body)
            .await
            .status
    }
}

const PROOF: &str = "rap-migration-proof";

/// A destination that records what it gets.
async fn recorder() -> (String, Arc<Mutex<Vec<Recorded>>>) {
    let pages: Arc<Mutex<Vec<_>>> = Arc::default();
    let record = Arc::clone(&pages);
    let take = move |uri: axum::http::Uri, headers: axum::http::HeaderMap, body: axum::body::Bytes| {
        let proof = headers[PROOF].to_str().unwrap().to_owned();
        record.lock().unwrap().push(Recorded { path: uri.path().to_owned(), proof, body });
        async {}
    };
    let router = axum::Router::new().fallback(take);
    let router = router.layer(axum::extract::DefaultBodyLimit::disable());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await });
    (url, pages)
}

#[tokio::test]
async fn files_take_their_places_only_when_all_pages_have_arrived_once_and_in_order() {
    let (data, there) = (data_dir(), data_dir());
    let source = Server::start(with_files().migrate_calls(KEY), data.path()).await;
    let target = Server::start(with_files().migrate_calls(KEY), there.path()).await;
    let mut runtime = Runtime::start().await;
    let write = runtime.invocation("write", "s", "1", json!({"name": "a", "kilobytes": 1300}));
    source.caller().accepted(&write).await;
    runtime.expect_text("a").await;
    let (url, recorded) = recorder().await;
    let mut transfers = Vec::new();
    for _ in 0..2 {
        assert_eq!(source.caller().post("/migrate", migrate_body(&url)).await.0, 200);
        transfers.push(std::mem::take(&mut *recorded.lock().unwrap()));
    }
    let pages = &transfers[0];
    let (announced, last) = ("/import_calls", pages.len() - 1);
    assert!(pages[0].path == announced && transfers[1][0].path == announced && last >= 3, "{last}");
    let new = target.caller();
    let send = async |page: &Recorded| page.send(&target).await;
    let list = |id: &str| {
        let mut call = runtime.invocation("list", "child", id, json!({}));
        call["thread_ancestors"] = json!(["s"]);
        call
    };
    let lists = [list("2"), list("3"), list("4")];
    assert_eq!(send(&pages[1]).await, 403, "the transfer was not announced");
    for page in [0, 1] {
        assert_eq!(send(&pages[page]).await, 200, "{page}");
    }
    for page in [0, 1, last] {
        assert_eq!(send(&pages[page]).await, 403, "{page} is not the next page");
    }
    assert_eq!(send(&transfers[1][2]).await, 403, "the page belongs to another transfer");
    // The page that was refused has left nothing.
    for page in &pages[2..last] {
        assert_eq!(send(page).await, 200);
    }
    new.accepted(&lists[0]).await;
    runtime.expect_text("files").await;
    assert_eq!(send(&pages[last]).await, 200);
    new.accepted(&lists[1]).await;
    runtime.expect_text("files a:1331200 link:1331200").await;
    // What was sent before does not replace what is in use.
    new.accepted(&runtime.invocation("write", "s", "5", json!({"name": "b", "kilobytes": 1}))).await;
    runtime.expect_text("b").await;
    for page in pages {
        assert_eq!(send(page).await, 403);
    }
    new.accepted(&lists[2]).await;
    runtime.expect_text("files a:1331200 b:1024 link:1331200").await;
    source.stop().await;
    target.stop().await;
}

#[tokio::test]
async fn a_recorded_transfer_is_refused_by_its_sender_and_after_a_later_one() {
    let (data, there) = (data_dir(), data_dir());
    let source = Server::start(with_files().migrate_calls(KEY), data.path()).await;
    let target = Server::start(with_files().migrate_calls(KEY), there.path()).await;
    let mut runtime = Runtime::start().await;
    let (url, recorded) = recorder().await;
    let mut transfers = Vec::new();
    for name in ["a", "b"] {
        let write = runtime.invocation("write", "s", name, json!({"name": name, "kilobytes": 1}));
        source.caller().accepted(&write).await;
        runtime.expect_text(name).await;
        assert_eq!(source.caller().post("/migrate", migrate_body(&url)).await.0, 200);
        transfers.push(std::mem::take(&mut *recorded.lock().unwrap()));
    }
    // The older copy does not replace what the sender itself has in use.
    for page in &transfers[0] {
        assert_eq!(page.send(&source).await, 403);
    }
    source.caller().accepted(&runtime.invocation("list", "s", "1", json!({}))).await;
    let files = "files a:1024 absolute:0 b:1024 link:1024";
    runtime.expect_text(files).await;
    for page in &transfers[1] {
        assert_eq!(page.send(&target).await, 200);
    }
    for page in &transfers[0] {
        assert_eq!(page.send(&target).await, 403, "a later transfer has begun");
    }
    target.caller().accepted(&runtime.invocation("list", "s", "2", json!({}))).await;
    runtime.expect_text("files a:1024 b:1024 link:1024").await;
    source.stop().await;
    target.stop().await;
}

#[tokio::test]
async fn who_does_not_know_the_migration_key_is_refused_before_the_body_is_read() {
    let (data, there) = (data_dir(), data_dir());
    let source = Server::start(with_files().migrate_calls(KEY), data.path()).await;
    let target = Server::start(with_files().migrate_calls(KEY), there.path()).await;
    let (url, recorded) = recorder().await;
    assert_eq!(source.caller().post("/migrate", migrate_body(&url)).await.0, 200);
    let page = recorded.lock().unwrap().remove(0);
    for path in ["/import_calls", "/import_files"] {
        let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n");
        let request = format!("{head}Content-Length: 40000000\r\n\r\n");
        assert_eq!(rap_testkit::http::exchange(&target.url, &request).await.status, 403, "{path}");
    }
    let (at, mac) = page.proof.split_once('.').unwrap();
    let later = at.parse::<i64>().unwrap() + 1;
    for proof in [String::new(), format!("{later}.{mac}"), format!("{at}.{}", &mac[1..])] {
        assert_eq!(page.send_with(&target, &proof).await, 403, "{proof}");
    }
    let other_path =
        Recorded { path: "/import_files".into(), proof: page.proof.clone(), body: page.body.clone() };
    assert_eq!(other_path.send(&target).await, 403);
    assert_eq!(page.send(&target).await, 200);
    source.stop().await;
    target.stop().await;
}

#[tokio::test]
async fn a_caller_does_not_learn_what_other_services_answer() {
    let data = data_dir();
    let source = Server::start(server().migrate_calls(KEY), data.path()).await;
    let answer = || async { (axum::http::StatusCode::IM_A_TEAPOT, "{\"password\": \"hunter2\"}") };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(answer)).await });
    let caller = source.caller().with_token("one");
    let (status, text) = caller.post("/migrate", migrate_body(&url)).await;
    assert_eq!(
        (status, text.contains("answered 418"), text.contains("hunter2")),
        (500, true, false),
        "{text}"
    );
    let (status, text) = caller.post("/migrate", migrate_body(&format!("{url}/secrets?from="))).await;
    assert_eq!((status, text.contains("no query")), (500, true), "{text}");
    source.stop().await;
}
