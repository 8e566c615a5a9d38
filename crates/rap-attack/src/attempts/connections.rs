//! Connections and requests in bulk.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{ATTACKER, Stage, Target};
use crate::wire;

const TOPIC: &str = "connections";
/// More than a runtime accepts by default (`limits.connections`), without the reserve.
const RUNTIME: usize = 4_150;
/// More than a tool server accepts by default (`Limits::connections`).
const TOOL_SERVER: usize = 10_050;
/// Event streams that one token may have at the same time.
const STREAMS: usize = 256;
/// Time for which connections are held while bystanders are served.
const HOLD: Duration = Duration::from_millis(1_500);

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(TOPIC, "connections that never read", "bystanders are not served any more", never_read),
        attempt!(TOPIC, "connections that say nothing", "bystanders are not served any more", silent),
        attempt!(TOPIC, "event streams of one token", "one token has more than 256 streams", streams),
        attempt!(TOPIC, "discovery that is never read", "bystanders are not served any more", discovery),
        attempt!(TOPIC, "repeated floods", "a server gets slower with each", repeated),
    ]
}

/// Opens connections to a server, as many as this process can, and holds them.
async fn flood(stage: &Stage, target: &Target, wanted: usize, request: &str) -> (Tries, Vec<TcpStream>) {
    let mut tries = Tries::new();
    let count = wanted.min(stage.isolation.connections);
    if count < wanted {
        tries.note =
            Some(format!("{count} instead of {wanted} connections: too few open files are permitted"));
    }
    let request = format!("{request}host: {}\r\n\r\n", wire::authority(&target.url));
    let open = wire::never_reading(&target.url, count, &request).await;
    tries.count = count;
    (tries, open)
}

async fn never_read(stage: Arc<Stage>) -> Tries {
    let (tries, open) = flood(&stage, &stage.rap, RUNTIME, "GET /openapi.json HTTP/1.1\r\n").await;
    tokio::time::sleep(HOLD).await;
    drop(open);
    tries
}

async fn silent(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let count = RUNTIME.min(stage.isolation.connections);
    let open = wire::never_reading(&stage.rap.url, count, "").await;
    tries.count = count;
    tokio::time::sleep(HOLD).await;
    drop(open);
    tries
}

async fn streams(stage: Arc<Stage>) -> Tries {
    let request = format!("GET /v1/events HTTP/1.1\r\nauthorization: Bearer {ATTACKER}\r\n");
    let (mut tries, mut open) = flood(&stage, &stage.rap, RUNTIME, &request).await;
    let answers = open.iter_mut().map(|stream| wire::first_status(stream, HOLD));
    let statuses = futures_util::future::join_all(answers).await;
    let served = statuses.iter().filter(|status| **status == 200).count();
    tries.add(format!("{served} streams at the same time"), served > STREAMS);
    tries
}

async fn discovery(stage: Arc<Stage>) -> Tries {
    let request = "GET /.well-known/rap-toolset HTTP/1.1\r\n";
    let (tries, open) = flood(&stage, &stage.kitchen, TOOL_SERVER, request).await;
    tokio::time::sleep(HOLD).await;
    drop(open);
    tries
}

/// Opens and closes connections without a pause.
async fn repeated(stage: Arc<Stage>) -> Tries {
    const ROUNDS: usize = 5;
    const EACH: usize = 500;
    let mut tries = Tries::new();
    for _ in 0..ROUNDS {
        for target in [&stage.rap, &stage.kitchen] {
            let (round, open) = flood(&stage, target, EACH, "GET /metrics HTTP/1.1\r\n").await;
            tries.count += round.count;
            drop(open);
        }
    }
    tries
}
