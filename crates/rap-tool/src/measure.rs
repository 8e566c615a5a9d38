//! Measurements of a durable tool server and a bare router, for the benchmark of this crate and for `rap bench`. Not part of
//! the public API.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Bytes;
use axum::routing::post;
use rap_io::bench::{BenchResult, Figure, Server, parent_is_gone, resident_bytes};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::prelude::*;
use crate::{Limits, Rate};

/// Sizes of the measurements.
pub struct Sizes {
    pub sync: Duration,
    /// The router and the durable server are measured in turns, so that a slow phase of the machine affects both.
    pub rounds: u32,
    pub round: Duration,
    pub subscriptions: u64,
    pub deliveries: u64,
    /// Number of results whose delay is measured.
    pub delays: u64,
}

#[derive(Deserialize, JsonSchema)]
struct Nothing {}

/// Serves as a part of a benchmark, if one has started this process for that. Returns false otherwise.
pub async fn serve_role() -> BenchResult<bool> {
    match rap_io::bench::role() {
        Some((role, arguments)) if role == "router" || role == "tool" => {
            serve(&role, arguments.first().map_or("", String::as_str)).await?;
            Ok(true)
        }
        _ => Ok(false),
    }
}

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
    let limits = Limits {
        calls: 10_000_000,
        invocation_rate: Rate::new(1_000_000, 1_000_000),
        deliveries_per_host: 256,
        ..Limits::default()
    };
    let server = ToolServer::new("bench")
        .tool("hold", |_: Nothing, _: Call| std::future::pending::<Result<&str>>())
        .tool("echo", |_: Nothing, _: Call| async { Ok("echo") })
        .tool("time", |_: Nothing, _: Call| async { Ok(nanoseconds().to_string()) })
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
pub fn start(role: &str, data: &Path) -> BenchResult<Server> {
    Server::start(Server::command(role, &[data.to_str().ok_or("the directory has no valid name")?])?)
}

/// Loads two servers in turns.
pub async fn in_turns(
    one: &Server,
    other: &Server,
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
async fn load(server: &Server, connections: u64, round: u32, within: Duration) -> BenchResult<Vec<Duration>> {
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

/// Wall clock, which all processes of a measurement share.
fn nanoseconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Callbacks that a runtime has received.
#[derive(Default)]
struct Received {
    count: AtomicU64,
    /// Times between the end of the handler and the callback, for results of the tool `time`.
    delays: Mutex<Vec<Duration>>,
}

impl Received {
    fn take(&self, body: &[u8]) {
        let now = nanoseconds();
        if let Ok(result) = serde_json::from_slice::<TextResult>(body)
            && let Ok(ended) = result.text.parse::<u64>()
        {
            self.delays().push(Duration::from_nanos(now.saturating_sub(ended)));
        }
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    fn delays(&self) -> MutexGuard<'_, Vec<Duration>> {
        self.delays.lock().expect("bug: nothing panics under this lock")
    }

    async fn until(&self, count: u64) {
        while self.count.load(Ordering::Relaxed) < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

#[derive(Deserialize)]
struct TextResult {
    text: String,
}

/// A runtime that accepts and counts all callbacks.
async fn runtime() -> BenchResult<(String, Arc<Received>)> {
    let received = Arc::new(Received::default());
    let receiver = Arc::clone(&received);
    let take = move |body: Bytes| {
        receiver.take(&body);
        std::future::ready(())
    };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/callback", listener.local_addr()?);
    let router = Router::new().route("/callback", post(take));
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok((url, received))
}

/// Sends `count` invocations from 64 connections.
async fn invoke_all(server: &Server, operation: &'static str, count: u64, url: &str) -> BenchResult<()> {
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

/// Returns the rate of results that are accepted, run and delivered.
pub async fn deliveries(data: &Path, count: u64) -> BenchResult<f64> {
    let server = start("tool", data)?;
    let (url, received) = runtime().await?;
    let begun = Instant::now();
    invoke_all(&server, "echo", count, &url).await?;
    received.until(count).await;
    Ok(count as f64 / begun.elapsed().as_secs_f64())
}

/// Returns the times from the end of a handler to the callback with its result, one call after the other.
pub async fn delivery_delays(data: &Path, count: u64) -> BenchResult<Figure> {
    let server = start("tool", data)?;
    let (url, received) = runtime().await?;
    let mut client = Client::connect(&server.url).await?;
    let begun = Instant::now();
    for number in 0..count {
        client.invoke("time", &number.to_string(), &url).await?;
        received.until(number + 1).await;
    }
    let delays = std::mem::take(&mut *received.delays());
    Ok(Figure::of(delays, begun.elapsed()))
}

/// Returns the memory growth of the server with `count` idle subscriptions.
pub async fn subscriptions(data: &Path, count: u64) -> BenchResult<u64> {
    let server = start("tool", data)?;
    let (url, received) = runtime().await?;
    let mut first = Client::connect(&server.url).await?;
    first.invoke("wait", "first", &url).await?;
    received.until(1).await;
    let before = resident_bytes(server.id())?;
    invoke_all(&server, "wait", count, &url).await?;
    received.until(count + 1).await;
    Ok(resident_bytes(server.id())?.saturating_sub(before))
}
