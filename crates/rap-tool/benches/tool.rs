//! Compares a durable tool server with a bare router on the same machine: `cargo bench -p rap-tool`.
//!
//! Absolute figures vary between machines and between runs; compare the ratios within one run. This process generates
//! the load, and each server runs in a separate process.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::routing::post;
use rap_testkit::Process;
use rap_testkit::bench::{self, BenchResult, Figure, Scale, parent_is_gone};
use rap_tool::prelude::*;
use rap_tool::{Limits, Rate};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Maximum memory of the idle subscriptions.
const SUBSCRIPTION_BYTES: u64 = 200_000_000;

/// The allocator of the `rap` binary, for the router as well.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Sizes of the measurements.
struct Sizes {
    sync: Duration,
    /// The router and the durable server are measured in turns, so that a slow phase of the machine affects both.
    rounds: u32,
    round: Duration,
    subscriptions: u64,
    deliveries: u64,
}

const FULL: Sizes = Sizes {
    sync: Duration::from_secs(2),
    rounds: 10,
    round: Duration::from_millis(500),
    subscriptions: 100_000,
    deliveries: 50_000,
};

const SMALL: Sizes = Sizes {
    sync: Duration::from_millis(100),
    rounds: 2,
    round: Duration::from_millis(50),
    subscriptions: 200,
    deliveries: 200,
};

#[tokio::main]
async fn main() -> BenchResult<()> {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().position(|argument| argument == "--role") {
        Some(at) => serve(&arguments[at + 1], &arguments[at + 2]).await,
        None => bench::run(measure).await,
    }
}

// ---- servers ----

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

async fn serve(role: &str, data: &str) -> BenchResult<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    if role == "router" {
        eprintln!("listening on {}", listener.local_addr()?);
        let router = Router::new().route("/invoke", post(|_: Bytes| async {}));
        tokio::select! {
            served = axum::serve(listener, router) => served?,
            () = parent_is_gone() => {}
        }
        return Ok(());
    }
    let mut limits = Limits::default();
    limits.calls = 10_000_000;
    limits.invocation_rate = Rate::new(1_000_000, 1_000_000);
    limits.deliveries_per_host = 256;
    let server = ToolServer::new("bench")
        .tool("hold", |_: Nothing, _: Call| std::future::pending::<Result<&str>>())
        .tool("echo", |_: Nothing, _: Call| async { Ok("echo") })
        .subscription("wait", |_: Nothing, subscribe: Subscribe| async move {
            let _subscription = subscribe.confirm("").await?;
            std::future::pending().await
        })
        .limits(limits)
        .data(data);
    let bound = server.bind("127.0.0.1:0").await?;
    eprintln!("listening on {}", bound.url());
    bound.run_until(parent_is_gone()).await;
    Ok(())
}

/// Starts a server in a process of its own.
fn start(role: &str, data: &Path) -> BenchResult<Process> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--role").arg(role).arg(data);
    Ok(Process::start(command))
}

// ---- load ----

async fn measure(scale: Scale) -> BenchResult<()> {
    let sizes = scale.of(&FULL, &SMALL);
    let data = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let data = data.path();
    let sync = bench::fdatasync(data, sizes.sync)?;
    eprintln!("the bare router and durable invocations, in turns …");
    let router = start("router", data)?;
    let tool = start("tool", &data.join("hold"))?;
    let (router_1, hold_1) = in_turns(&router, &tool, 1, sizes).await?;
    let (router_64, hold_64) = in_turns(&router, &tool, 64, sizes).await?;
    drop((router, tool));
    eprintln!("{} results …", sizes.deliveries);
    let delivered = deliveries(&data.join("echo"), sizes.deliveries).await?;
    eprintln!("{} subscriptions …", sizes.subscriptions);
    let subscribed = subscriptions(&data.join("wait"), sizes.subscriptions).await?;

    Figure::print_heading();
    sync.print("fdatasync of this disk");
    router_1.print("router with an empty handler, 1 connection");
    router_64.print("router with an empty handler, 64 connections");
    hold_1.print("durable invocations, 1 connection");
    hold_64.print("durable invocations, 64 connections");
    println!("{:<52} {delivered:>10.0}", "results delivered (accepted, run, acknowledged)");
    println!();
    let share = 100.0 * hold_64.per_second / router_64.per_second;
    let slower = hold_64.p99.as_secs_f64() / router_64.p99.as_secs_f64();
    println!(
        "at 64 connections: {share:.0} % of the bare router (at least 25), p99 {slower:.1} times (at most 5)"
    );
    let [taken, most] = [subscribed, SUBSCRIPTION_BYTES].map(|bytes| bytes / 1_000_000);
    println!("{} idle subscriptions: {taken} MB (at most {most})", sizes.subscriptions);
    scale.check(&[share >= 25.0, slower <= 5.0, subscribed <= SUBSCRIPTION_BYTES])
}

async fn in_turns(
    one: &Process,
    other: &Process,
    connections: u64,
    sizes: &Sizes,
) -> BenchResult<(Figure, Figure)> {
    let (mut ones, mut others) = (Vec::new(), Vec::new());
    for round in 0..sizes.rounds {
        ones.extend(load(one, connections, round, sizes.round).await?);
        others.extend(load(other, connections, round, sizes.round).await?);
    }
    let elapsed = sizes.round * sizes.rounds;
    Ok((Figure::of(ones, elapsed), Figure::of(others, elapsed)))
}

/// Invokes a tool that never returns, from several connections, and returns the latency of each invocation.
async fn load(
    server: &Process,
    connections: u64,
    round: u32,
    within: Duration,
) -> BenchResult<Vec<Duration>> {
    let begun = Instant::now();
    let mut tasks = Vec::new();
    for connection in 0..connections {
        let address = server.url.clone();
        tasks.push(tokio::spawn(async move {
            let mut client = Client::connect(&address).await?;
            let mut latencies = Vec::new();
            while begun.elapsed() < within {
                let id = format!("{connections}-{round}-{connection}-{}", latencies.len());
                let one = Instant::now();
                client.invoke("hold", &id, "http://127.0.0.1:9/").await?;
                latencies.push(one.elapsed());
            }
            BenchResult::Ok(latencies)
        }));
    }
    let mut latencies = Vec::new();
    for task in tasks {
        latencies.extend(task.await??);
    }
    Ok(latencies)
}

/// A minimal HTTP client on one connection, so that generating the load costs little.
struct Client {
    stream: TcpStream,
    host: String,
    answer: Vec<u8>,
}

impl Client {
    async fn connect(url: &str) -> BenchResult<Client> {
        let address = url.trim_start_matches("http://");
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Client { stream, host: address.to_owned(), answer: Vec::new() })
    }

    async fn invoke(&mut self, operation: &str, id: &str, callback_url: &str) -> BenchResult<()> {
        let body = format!(
            r#"{{"operation":"{operation}","arguments":{{}},"id":"{id}","group_id":"thread-{id}","callback_url":"{callback_url}"}}"#
        );
        let request = format!(
            "POST /invoke HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            self.host,
            body.len()
        );
        self.stream.write_all(request.as_bytes()).await?;
        self.answer.clear();
        while !self.answer.windows(4).any(|end| end == b"\r\n\r\n") {
            if self.stream.read_buf(&mut self.answer).await? == 0 {
                return Err("the server closed the connection".into());
            }
        }
        if self.answer.starts_with(b"HTTP/1.1 200") { Ok(()) } else { Err(self.refused().into()) }
    }

    fn refused(&self) -> String {
        String::from_utf8_lossy(&self.answer).into_owned()
    }
}

/// A runtime that accepts and counts all callbacks.
async fn runtime() -> BenchResult<(String, Arc<AtomicU64>)> {
    let taken = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&taken);
    let take = move |_: Bytes| {
        counter.fetch_add(1, Ordering::Relaxed);
        std::future::ready(())
    };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/callback", listener.local_addr()?);
    let router = Router::new().route("/callback", post(take));
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok((url, taken))
}

/// Sends `count` invocations from 64 connections.
async fn invoke_all(server: &Process, operation: &'static str, count: u64, url: &str) -> BenchResult<()> {
    let mut tasks = Vec::new();
    for connection in 0..64 {
        let (address, url) = (server.url.clone(), url.to_owned());
        tasks.push(tokio::spawn(async move {
            let mut client = Client::connect(&address).await?;
            for number in 0..count.div_ceil(64) {
                client.invoke(operation, &format!("{connection}-{number}"), &url).await?;
            }
            BenchResult::Ok(())
        }));
    }
    for task in tasks {
        task.await??;
    }
    Ok(())
}

async fn until(taken: &AtomicU64, count: u64) {
    while taken.load(Ordering::Relaxed) < count {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn deliveries(data: &Path, count: u64) -> BenchResult<f64> {
    let server = start("tool", data)?;
    let (url, taken) = runtime().await?;
    let begun = Instant::now();
    invoke_all(&server, "echo", count, &url).await?;
    until(&taken, count).await;
    Ok(count as f64 / begun.elapsed().as_secs_f64())
}

/// Returns the memory growth of the server with `count` idle subscriptions.
async fn subscriptions(data: &Path, count: u64) -> BenchResult<u64> {
    let server = start("tool", data)?;
    let (url, taken) = runtime().await?;
    let mut first = Client::connect(&server.url).await?;
    first.invoke("wait", "first", &url).await?;
    until(&taken, 1).await;
    let before = bench::resident_bytes(server.id())?;
    invoke_all(&server, "wait", count, &url).await?;
    until(&taken, count + 1).await;
    Ok(bench::resident_bytes(server.id())?.saturating_sub(before))
}
