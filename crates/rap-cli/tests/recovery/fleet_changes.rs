//! Nodes that come, go, freeze or have a wrong clock, and what the other nodes and their readers see of it.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use rap_testkit::peer::Reply;
use rap_testkit::postgres::Server;
use rap_testkit::stream::Stream;
use rap_testkit::tools::{INVOKE, tool};
use rap_testkit::{PATIENCE, Process, Tools, until};

use crate::fleet::{asking, node, node_with, post, two, until_nodes};
use crate::support::{Api, prepared, start};

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_shows_the_children_that_another_node_has_spawned() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let setup = || node(&tools, &database.url());
    let [(_one, first), (_other, second)] = two(setup(), setup()).await;
    first.create("t", "say hello").await;
    first.until_idle("t").await;
    let mut stream = Stream::of(&second, "t").await;
    stream.until("status").await;
    first.say("t", "call spawn_thread {\"instructions\": \"say hello\"}").await;
    let child = tokio::time::timeout(PATIENCE, stream.until("child")).await.unwrap();
    assert_eq!(child["tool"], "spawn_thread");
    let listed = second.get("/v1/threads?parent=t").await.body;
    assert_eq!(listed["threads"][0]["id"], child["thread_id"]);
}

/// A node drops what it cached while there were other nodes, when it becomes the only one.
#[tokio::test(flavor = "multi_thread")]
async fn a_toolset_that_a_node_has_refreshed_before_it_left_is_used() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let setup = || node(&tools, &database.url());
    let [(_one, first), (mut other, second)] = two(setup(), setup()).await;
    first.create("t", "say hello").await;
    first.until_idle("t").await;
    let newer = ["work", "watch", "extra"].iter().map(|name| tool(name)).collect();
    tools.offer(tools.document("bench", "2", newer));
    tools.answer_next(INVOKE, Reply::Status(409));
    second.say("t", "call work {}").await;
    tools.invocation().await;
    second.until_idle("t").await;
    // Either node shows the newest tools.
    let tools_of = async |api: &Api| api.get("/v1/tools").await.text;
    assert!(tools_of(&first).await.contains("extra") && tools_of(&second).await.contains("extra"));
    other.stop();
    until_nodes(&first, 1).await;
    // It has renewed its lease, and knows that it is alone.
    tokio::time::sleep(Duration::from_secs(1)).await;
    first.say("t", "call extra {}").await;
    assert_eq!(tools.invocation().await.request.body["operation"], "extra");
}

/// The rows of the signals are gone before the node looks for them.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_all_threads_ends_if_its_node_was_frozen_while_others_changed_threads() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let setup = || node(&tools, &database.url());
    let [(one, first), (_other, second)] = two(setup(), setup()).await;
    // The other node is not alone meanwhile, so it has no reason to tell that signals may be lost.
    let (_third, third) = start(setup());
    until_nodes(&third, 3).await;
    let mut all = Stream::open(&first, "/v1/events", None).await.unwrap();
    one.process().signal("STOP");
    until_nodes(&second, 2).await;
    second.create("meanwhile", "say hello").await;
    second.until_idle("meanwhile").await;
    database.sql("DELETE FROM signals");
    one.process().signal("CONT");
    let end = tokio::time::timeout(PATIENCE, all.until("end")).await.unwrap();
    assert_eq!(end["reason"], "events of another node were missed; reconnect");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_stopped_leaves_within_a_second() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let setup = || node_with(&tools, &database.url(), "lease = \"5m\"");
    let (_other, second) = start(setup());
    let seconds = |sql: &str| database.sql(sql).parse::<f64>().unwrap();
    let mut took = Vec::new();
    // On a machine that is busy with other things, one try of several is quick enough.
    for number in 0..5 {
        let (one, first) = start(setup());
        until_nodes(&second, 2).await;
        first.create(&format!("asks{number}"), "sleep 600\nsay never").await;
        until("the node asks", async || asking(&first).await).await;
        let began = seconds("SELECT extract(epoch FROM clock_timestamp())");
        one.process().signal("TERM");
        until_nodes(&second, 1).await;
        let left = "SELECT extract(epoch FROM max(at)) FROM signals WHERE body = '[\"g\"]'";
        took.push(seconds(left) - began);
        if took[number] < 1.0 {
            return;
        }
    }
    panic!("seconds until the node had left: {took:?}");
}

/// The work of a node that has just died is claimed until its lease runs out, and nothing else would start a node then.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_does_not_end_before_it_knows_that_the_others_do_their_work() {
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let setup = || node_with(&tools, &database.url(), "lease = \"8s\"");
    let (mut one, first) = start(setup());
    first.create("asks", "sleep 1\nsay answered").await;
    until("the first node asks", async || asking(&first).await).await;
    one.kill();
    let other = prepared(setup());
    let mut command = other.serve_command();
    command.args(["--until-idle", "1s"]);
    let mut process = Process::start(command);
    until("the end of the other node", async || !process.is_running()).await;
    assert!(process.wait().success(), "{}", process.log());
    let said = "SELECT count(*) FROM entries WHERE body LIKE '%\"answered\"%'";
    assert_ne!(database.sql(said), "0");
}

/// Shifts the clock of programs that load it.
const SHIFT: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *time) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(id, time);
    const char *shift = getenv("SHIFT_SECONDS");
    if (id == CLOCK_REALTIME && shift) time->tv_sec += atoi(shift);
    return done;
}
"#;

#[tokio::test(flavor = "multi_thread")]
async fn clocks_that_differ_by_two_minutes_do_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let (source, library) = (dir.path().join("shift.c"), dir.path().join("shift.so"));
    fs::write(&source, SHIFT).unwrap();
    let compiled =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).arg("-ldl").status();
    assert!(compiled.unwrap().success());
    let (database, tools) = (Server::shared().database(), Tools::start().await);
    let setup = |shift: &str| {
        let setup = node(&tools, &database.url()).variable("LD_PRELOAD", library.to_str().unwrap());
        setup.variable("SHIFT_SECONDS", shift)
    };
    let [(one, first), (_other, second)] = two(setup("60"), setup("-60")).await;
    // Lines of the log begin with the time of the node.
    let ahead =
        Command::new("date").args(["-u", "-d", "+30 seconds", "+%Y-%m-%dT%H:%M:%S"]).output().unwrap();
    let (log, ahead) = (one.log(), String::from_utf8(ahead.stdout).unwrap());
    let is_ahead = |line: &str| line.starts_with("20") && line > ahead.as_str();
    assert!(log.lines().any(is_ahead), "the clock of the node is not shifted: {log}");
    tools.answer_next(INVOKE, Reply::Status(503));
    let began = Instant::now();
    first.create("sleeps", "call sleep {\"seconds\": 3}").await;
    second.create("calls", "call work {}").await;
    tools.invocation().await;
    // The retry is due at the same time for both nodes.
    let again = tools.invocation().await;
    assert_eq!(post(&first, &again, &again.result("done")).await.status, 200);
    second.until_said("calls", "work: done").await;
    second.until_said("sleeps", "sleep: the sleep is over").await;
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(2900) && took < Duration::from_secs(50), "{took:?}");
    // Longer than the lease: neither takes the other one to be gone.
    for api in [&first, &second] {
        assert_eq!(api.raw_listing("nodes").await.len(), 2);
        assert_eq!(api.get("/readyz").await.status, 200);
    }
}
