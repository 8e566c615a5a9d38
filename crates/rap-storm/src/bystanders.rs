//! Clients that use a runtime while others overload it: one with an open connection, as the client of `rap-api` has,
//! and one with a new connection for each request.

use std::fmt::{self, Display, Formatter};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rap_api::CreateThread;
use rap_api::client::Client;
use serde_json::json;

use crate::load::create;

/// Longest time that a client may wait, including repeats.
const SERVED_WITHIN: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// Times for which the clients waited, sorted.
pub(crate) struct Waits {
    open: Vec<Duration>,
    new: Vec<Duration>,
    pub(crate) violations: Vec<String>,
}

impl Waits {
    /// Returns how many times as long as in a quiet run half of the requests took.
    pub(crate) fn ratio(&self, quiet: &Waits) -> String {
        let half = |times: &[Duration]| Latencies(times).quantile(0.5).as_secs_f64();
        let [open, new] = [(&self.open, &quiet.open), (&self.new, &quiet.new)]
            .map(|(loaded, quiet)| half(loaded) / half(quiet).max(f64::MIN_POSITIVE));
        format!("{open:.1} and {new:.1}")
    }
}

impl Display for Waits {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let [open, new] = [&self.open, &self.new].map(|times| Latencies(times));
        write!(f, "{open} with an open connection, {new} with a new one")
    }
}

/// Begins threads until the flag is set.
pub(crate) async fn begin_threads(url: &str, token: &str, name: &str, over: &AtomicBool) -> Waits {
    let client = Client::new(url).and_then(|client| client.with_token(token)).unwrap();
    let with_open = async |id: String| {
        let new = CreateThread { message: Some(format!("{id};")), id: Some(id), ..CreateThread::default() };
        client.create_thread(&new).await.is_ok()
    };
    let with_new = async |id: String| {
        create(url, token, &id, json!({})).await.is_some_and(|answer| answer.status == 201)
    };
    let names = ["open", "new"].map(|kind| format!("{name}-{kind}"));
    let (open, new) = tokio::join!(
        one_after_the_other(&names[0], over, with_open),
        one_after_the_other(&names[1], over, with_new)
    );
    Waits { open: open.0, new: new.0, violations: [open.1, new.1].concat() }
}

/// Repeats an attempt with an id of its own until it succeeds, one after the other. Returns the times, sorted, and
/// violations.
async fn one_after_the_other(
    name: &str,
    over: &AtomicBool,
    attempt: impl AsyncFn(String) -> bool,
) -> (Vec<Duration>, Vec<String>) {
    let (mut times, mut violations) = (Vec::new(), Vec::new());
    while !over.load(Ordering::SeqCst) {
        let (number, began, mut attempts) = (times.len(), Instant::now(), 0);
        // A client repeats what was not accepted.
        while !attempt(format!("{name}-{number}-{attempts}")).await {
            attempts += 1;
            if began.elapsed() > SERVED_WITHIN {
                violations.push(format!("{name} waited more than {SERVED_WITHIN:?}"));
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
        times.push(began.elapsed());
        tokio::time::sleep(PAUSE).await;
    }
    times.sort_unstable();
    (times, violations)
}

/// Sorted times.
pub(crate) struct Latencies<'a>(pub(crate) &'a [Duration]);

impl Latencies<'_> {
    pub(crate) fn quantile(&self, part: f64) -> Duration {
        let at = (self.0.len() as f64 * part) as usize;
        self.0.get(at.min(self.0.len().saturating_sub(1))).copied().unwrap_or_default()
    }
}

impl Display for Latencies<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let [half, most] = [0.5, 0.99].map(|part| self.quantile(part).as_secs_f64() * 1000.0);
        write!(f, "{half:.1} ms (p50), {most:.1} ms (p99), {} times", self.0.len())
    }
}
