//! `storm --load N`: ten times the load that a runtime can carry, N connections that say or read nothing, a tool server
//! that never answers, one that floods with events, and a model that hangs. Memory stays below a bound, refusals come
//! soon, other clients are served, and in the end everything that was accepted is there.
//!
//! The load comes from the same machine. Its threads have the lowest priority, so that it does not take the processors
//! from the runtime and the other clients, as a load from other machines would not either.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rap_testkit::http::{self, Response};
use rap_testkit::peer::{self, Reply, Request};
use rap_testkit::tools::{Call, DISCOVERY, INVOKE, tool, with};
use rap_testkit::{Rap, Setup};
use rustix::process::{Resource, Rlimit, getrlimit, setpriority_process, setrlimit};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::bystanders::{Latencies, begin_threads};
use crate::model;

/// Maximum memory of the runtime, in MiB. It keeps up to 256 MiB of request bodies and 128 MiB of answers.
const MEMORY_MIB: u64 = 768;
/// Time within which 99 of 100 refusals have to come.
const REFUSED_WITHIN: Duration = Duration::from_secs(2);
/// Time in which everything that was accepted has to be answered after the load.
const QUIET_WITHIN: Duration = Duration::from_secs(120);
/// Time for which the capacity and the latency without load are measured.
const MEASURED: Duration = Duration::from_secs(3);
/// How many times its capacity the runtime is offered.
const OVERLOAD: f64 = 10.0;
/// Maximum number of requests under way. More are not sent.
const CONCURRENT: usize = 3000;
/// Number of clients with which the capacity is measured, and of requests with which it is checked in the end.
const CLIENTS: usize = 32;
/// Number of events of the tool server that floods, and of its requests under way.
const EVENTS: u64 = 1_000_000;
const FLOODING: usize = 8;
/// Number of threads that call the tool that never answers, and of those whose model hangs.
const STUCK: usize = 100;
const ANSWER_WITHIN: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(20);
/// Priority of the threads that cause the load: the lowest one.
const NICE: i32 = 19;

const LOAD: &str = "token-of-the-load-0001";
const BYSTANDER: &str = "token-of-a-bystander-1";

/// Runs everything. Returns what is wrong.
pub(crate) async fn run(connections: usize, seconds: u64) -> Vec<String> {
    raise_file_limit();
    let generator = low_priority_runtime();
    let model = model::start_reliable().await;
    let capacity = capacity(&model).await;
    println!("capacity: {capacity:.0} messages a second, each with the answer of a model");
    let (release, released) = watch::channel(false);
    let flood = Arc::new(Flood::default());
    let (hanging, mute) = (hanging_model(released).await, mute_tools().await);
    let setup = setup(&model)
        .limit(&format!("requests_per_second = {}", (capacity / 2.0).max(1.0) as u64))
        .tool_server(&mute)
        .tool_server(&flood_tools(&flood, generator.handle()).await)
        .agent("name = \"usual\"")
        .agent(&format!("name = \"hangs\"\n[agent.model]\n{}", model::lines(&hanging)));
    let rap = setup.start();
    let url = rap.url.clone();
    let quiet = begin_threads(&url, BYSTANDER, "quiet", &until_after(MEASURED)).await;
    println!("without load, others wait {quiet}");
    make_stuck_threads(&url).await;
    let open = open_connections(&url, connections).await;
    println!("{} of {connections} connections are open", open.len());
    let over = until_after(Duration::from_secs(seconds));
    let load = offer(url.clone(), OVERLOAD * capacity, Duration::from_secs(seconds));
    let load = generator.spawn(load);
    let (loaded, refusals) =
        tokio::join!(begin_threads(&url, BYSTANDER, "loaded", &over), refusals(&url, &over));
    let offered = load.await.unwrap();
    flood.ended.store(true, Ordering::SeqCst);
    drop(open);
    release.send_replace(true);
    println!("{offered}");
    println!("a client with the same token is refused in {}", Latencies(&refusals));
    println!("under load, others wait {loaded}: {} times as long", loaded.ratio(&quiet));
    println!(
        "{} events accepted, {} refused",
        flood.accepted.lock().unwrap().len(),
        flood.refused.load(Ordering::SeqCst)
    );
    let mut violations = [quiet.violations, loaded.violations].concat();
    let late = Latencies(&refusals).quantile(0.99);
    if late > REFUSED_WITHIN {
        violations.push(format!("one of a hundred refusals took more than {late:?}"));
    }
    violations.extend(check_all(&url, &offered.accepted, &flood).await);
    let memory = peak_memory_mib(&rap);
    println!("the runtime used at most {memory} MiB of memory");
    if memory > MEMORY_MIB {
        violations.push(format!("the runtime used {memory} MiB of memory, more than {MEMORY_MIB}"));
    }
    generator.shutdown_background();
    violations
}

/// Makes a runtime for what causes the load.
fn low_priority_runtime() -> Runtime {
    let lower = || setpriority_process(None, NICE).unwrap();
    Builder::new_multi_thread().worker_threads(2).on_thread_start(lower).enable_all().build().unwrap()
}

fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // With fewer files, fewer connections are opened, and the output says so.
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).ok();
}

fn setup(model: &str) -> Setup {
    let tokens = format!("tokens = [{LOAD:?}, {BYSTANDER:?}]");
    Setup::new().server(&tokens).model(&model::lines(model)).limit("discovery_wait = \"2s\"")
}

fn peak_memory_mib(rap: &Rap) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", rap.process().id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

/// Returns a flag that becomes true after a time.
fn until_after(time: Duration) -> Arc<AtomicBool> {
    let over = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&over);
    tokio::spawn(async move {
        tokio::time::sleep(time).await;
        set.store(true, Ordering::SeqCst);
    });
    over
}

/// Sends a request. Returns `None` if there is no answer, or none in time.
async fn request(method: &str, url: &str, token: &str, body: &Value) -> Option<Response> {
    let bearer = format!("Bearer {token}");
    let headers = [("content-type", "application/json"), ("authorization", &bearer)];
    let body = if method == "GET" { String::new() } else { body.to_string() };
    let sent = http::attempt(method, url, &headers, body.as_bytes());
    tokio::time::timeout(ANSWER_WITHIN, sent).await.ok()?.ok()
}

pub(crate) async fn create(url: &str, token: &str, id: &str, more: Value) -> Option<Response> {
    let body = with(json!({"id": id, "message": format!("{id};")}), more);
    request("POST", &format!("{url}/v1/threads"), token, &body).await
}

/// Measures how many messages a second a runtime answers.
async fn capacity(model: &str) -> f64 {
    let rap = setup(model).start();
    let (url, over, began) = (rap.url.clone(), until_after(MEASURED), Instant::now());
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (url, over) = (url.clone(), Arc::clone(&over));
        clients.spawn(async move {
            let mut accepted = 0;
            while !over.load(Ordering::SeqCst) {
                let answer = create(&url, LOAD, &format!("first-{client}-{accepted}"), json!({})).await;
                accepted += u64::from(answer.is_some_and(|answer| answer.status == 201));
            }
            accepted
        });
    }
    let accepted: u64 = clients.join_all().await.iter().sum();
    assert!(until_quiet(&url).await, "the runtime does not answer everything without load");
    accepted as f64 / began.elapsed().as_secs_f64()
}

/// Waits until no thread asks its model. Returns false if that takes too long.
async fn until_quiet(url: &str) -> bool {
    let deadline = Instant::now() + QUIET_WITHIN;
    while Instant::now() < deadline {
        let running =
            request("GET", &format!("{url}/v1/threads?status=running&limit=1"), BYSTANDER, &Value::Null)
                .await;
        if running.is_some_and(|answer| answer.body["threads"].as_array().is_some_and(Vec::is_empty)) {
            return true;
        }
        tokio::time::sleep(PAUSE).await;
    }
    false
}

/// A model that answers nothing until it is released.
async fn hanging_model(released: watch::Receiver<bool>) -> String {
    peer::serve(move |request| {
        let mut released = released.clone();
        async move {
            released.wait_for(|released| *released).await.ok();
            model::reliable_answer(&request)
        }
    })
    .await
}

fn discovery(request: &Request, name: &str) -> Reply {
    let endpoint = format!("http://{}{INVOKE}", request.header("host").unwrap_or_default());
    Reply::json(&json!({"name": name, "version": "1", "endpoint": endpoint, "tools": [tool(name)]}))
}

/// A tool server that never answers an invocation.
async fn mute_tools() -> String {
    let answer = |request: Request| async move {
        match request.path.as_str() {
            DISCOVERY => discovery(&request, "mute"),
            INVOKE => Reply::Hang,
            _ => Reply::Status(200),
        }
    };
    peer::serve(answer).await
}

#[derive(Default)]
struct Flood {
    ended: AtomicBool,
    next: AtomicU64,
    accepted: Mutex<HashSet<u64>>,
    refused: AtomicU64,
}

/// A tool server that sends events as fast as they are answered.
async fn flood_tools(flood: &Arc<Flood>, generator: &Handle) -> String {
    let (flood, generator) = (Arc::clone(flood), generator.clone());
    peer::serve(move |request| {
        let (flood, generator) = (Arc::clone(&flood), generator.clone());
        async move {
            match request.path.as_str() {
                DISCOVERY => return discovery(&request, "flood"),
                INVOKE => {
                    generator.spawn(send_events(Arc::new(Call { request }), flood));
                }
                _ => {}
            }
            Reply::Status(200)
        }
    })
    .await
}

async fn send_events(call: Arc<Call>, flood: Arc<Flood>) {
    let post = async |call: &Call, body: Value| {
        let answer = request("POST", call.url(), "", &body).await;
        answer.is_some_and(|answer| answer.status == 200)
    };
    while !post(&call, call.confirmation("flooding")).await {
        tokio::time::sleep(PAUSE).await;
    }
    let mut tasks = JoinSet::new();
    for _ in 0..FLOODING {
        let (call, flood) = (Arc::clone(&call), Arc::clone(&flood));
        tasks.spawn(async move {
            while !flood.ended.load(Ordering::SeqCst) {
                let number = flood.next.fetch_add(1, Ordering::SeqCst);
                if number >= EVENTS {
                    return;
                }
                let event =
                    with(call.inline(&format!("event {number};")), json!({"event_id": number.to_string()}));
                match post(&call, event).await {
                    true => _ = flood.accepted.lock().unwrap().insert(number),
                    false => _ = flood.refused.fetch_add(1, Ordering::SeqCst),
                }
            }
        });
    }
    tasks.join_all().await;
}

/// Makes threads whose tool never answers, threads whose model hangs, and the one that is flooded.
async fn make_stuck_threads(url: &str) {
    let call = |name: &str| json!({"message": format!("call {name} {{\"mark\": \"{name}\"}}")});
    for number in 0..STUCK {
        create(url, BYSTANDER, &format!("mute-{number}"), call("mute")).await;
        create(url, BYSTANDER, &format!("hangs-{number}"), json!({"agent": "hangs"})).await;
    }
    create(url, BYSTANDER, "flood", call("flood")).await;
}

/// Opens connections. One half says nothing, the other half sends a request and does not read the answer.
async fn open_connections(url: &str, count: usize) -> Vec<TcpStream> {
    let address = url.trim_start_matches("http://");
    let get =
        format!("GET /openapi.json HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {LOAD}\r\n\r\n");
    let mut open = Vec::new();
    for number in 0..count {
        let Ok(Ok(mut stream)) = tokio::time::timeout(ANSWER_WITHIN, TcpStream::connect(address)).await
        else {
            break;
        };
        if number % 2 == 0 && stream.write_all(get.as_bytes()).await.is_err() {
            continue;
        }
        open.push(stream);
    }
    open
}

/// Sends messages with the token of the load, one after the other, until the flag is set. Returns how long each refusal
/// took, sorted. The load itself cannot measure that, because it waits for processors.
async fn refusals(url: &str, over: &AtomicBool) -> Vec<Duration> {
    let (mut times, mut number) = (Vec::new(), 0);
    while !over.load(Ordering::SeqCst) {
        let began = Instant::now();
        let answer = create(url, LOAD, &format!("refusal-{number}"), json!({})).await;
        if answer.is_none_or(|answer| answer.status != 201) {
            times.push(began.elapsed());
        }
        number += 1;
        tokio::time::sleep(PAUSE).await;
    }
    times.sort_unstable();
    times
}

#[derive(Default)]
struct Offered {
    accepted: Vec<u64>,
    refused: u64,
    unanswered: u64,
    unsent: u64,
}

impl Offered {
    fn add(&mut self, (number, answer): (u64, Option<Response>)) {
        match answer.map(|answer| answer.status) {
            Some(200..300) => self.accepted.push(number),
            Some(_) => self.refused += 1,
            None => self.unanswered += 1,
        }
    }
}

impl std::fmt::Display for Offered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Offered { accepted, refused, unanswered, unsent } = self;
        let accepted = accepted.len();
        write!(
            f,
            "{accepted} messages accepted, {refused} refused; {unanswered} without an answer, {unsent} not sent"
        )
    }
}

/// Sends messages at a rate, whether they are answered or not.
async fn offer(url: String, per_second: f64, time: Duration) -> Offered {
    let (mut offered, mut tasks) = (Offered::default(), JoinSet::new());
    let (began, mut number) = (Instant::now(), 0);
    while began.elapsed() < time {
        let due = (began.elapsed().as_secs_f64() * per_second) as u64;
        while number < due {
            number += 1;
            if tasks.len() >= CONCURRENT {
                offered.unsent += 1;
                continue;
            }
            let url = url.clone();
            tasks.spawn(
                async move { (number, create(&url, LOAD, &format!("load-{number}"), json!({})).await) },
            );
        }
        while let Some(done) = tasks.try_join_next() {
            offered.add(done.unwrap());
        }
        tokio::time::sleep(PAUSE).await;
    }
    while let Some(done) = tasks.join_next().await {
        offered.add(done.unwrap());
    }
    offered
}

/// Checks that every accepted message and event is there once, and that every message was answered.
async fn check_all(url: &str, accepted: &[u64], flood: &Flood) -> Vec<String> {
    let mut violations = Vec::new();
    if !until_quiet(url).await {
        violations.push(format!("some threads are still running {QUIET_WITHIN:?} after the load"));
    }
    let (mut tasks, mut numbers) = (JoinSet::new(), accepted.iter().copied());
    loop {
        while tasks.len() < CLIENTS
            && let Some(number) = numbers.next()
        {
            let url = url.to_owned();
            tasks.spawn(async move { check_thread(&url, &format!("load-{number}")).await });
        }
        match tasks.join_next().await {
            Some(found) => violations.extend(found.unwrap()),
            None => break,
        }
    }
    let mut missing = flood.accepted.lock().unwrap().clone();
    let history = history(url, "flood").await.unwrap_or_default();
    let results = history.iter().filter(|entry| entry["kind"] == "result");
    let texts =
        results.filter_map(|entry| entry["content"].as_str()?.strip_prefix("event ")?.strip_suffix(';'));
    let mut seen = HashSet::new();
    for number in texts.filter_map(|text| text.parse().ok()) {
        missing.remove(&number);
        if !seen.insert(number) {
            violations.push(format!("event {number} is there twice"));
        }
    }
    if !missing.is_empty() {
        violations.push(format!("{} events were accepted and are not there", missing.len()));
    }
    violations
}

async fn check_thread(url: &str, id: &str) -> Option<String> {
    let Some(history) = history(url, id).await else {
        return Some(format!("{id} was accepted and is not there"));
    };
    let text = format!("{id};");
    let said = history.iter().filter(|entry| entry["kind"] == "user" && entry["text"] == text).count();
    let answers = history.iter().filter(|entry| entry["kind"] == "assistant").count();
    ((said, answers) != (1, 1)).then(|| format!("{id} has its message {said} times and {answers} answers"))
}

async fn history(url: &str, id: &str) -> Option<Vec<Value>> {
    let (mut entries, mut after) = (Vec::new(), 0);
    loop {
        let path = format!("{url}/v1/threads/{id}/history?after={after}&limit=1000");
        // The load has to stay below its rate here, too.
        let page = loop {
            match request("GET", &path, BYSTANDER, &Value::Null).await {
                Some(answer) if [429, 503].contains(&answer.status) => tokio::time::sleep(PAUSE).await,
                answer => break answer.filter(|answer| answer.status == 200)?.body,
            }
        };
        entries.extend(page["entries"].as_array()?.iter().cloned());
        match page["next_after"].as_u64() {
            Some(next) => after = next,
            None => return Some(entries),
        }
    }
}
