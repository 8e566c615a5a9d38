//! Costs of an attempt: memory and CPU time of the servers, and the latency of bystanders, within named bounds.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use rap_testkit::Process;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::attempt::{Attempt, Cost, Outcome, Tries};
use crate::stage::{BYSTANDER, Stage};
use crate::wire;

/// Maximum memory of a server, in bytes. A runtime keeps up to 256 MiB of request bodies, 128 MiB of
/// answers and 192 MiB of answers of models.
const RSS: u64 = 768 * 1024 * 1024;
/// Maximum CPU time that one attempt may cost all servers together.
const CPU: Duration = Duration::from_secs(20);
/// Maximum time that a bystander waits, including retries after 503.
const LATENCY: Duration = Duration::from_secs(5);
/// Maximum duration of an attempt.
const ATTEMPT: Duration = Duration::from_secs(30);
/// Time within which the servers are idle again after an attempt.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);
/// CPU time that idle servers use in [`SETTLE_WINDOW`] at most.
const IDLE: Duration = Duration::from_millis(60);
const SETTLE_WINDOW: Duration = Duration::from_millis(120);
/// Largest factor of bounds of time.
const MAX_SLOWDOWN: u32 = 4;
const SAMPLE_PAUSE: Duration = Duration::from_millis(20);
const ROUND_PAUSE: Duration = Duration::from_millis(100);
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Factor by which work takes longer than on an idle machine, because other programs use the processors too. Bounds of
/// time are multiplied by it. It is measured while an attempt runs.
#[derive(Default)]
struct Slowdown {
    waited: Duration,
    worked: Duration,
}

impl Slowdown {
    /// Works for a short time, and measures how long that takes.
    fn measure(&mut self) {
        const WORK: Duration = Duration::from_millis(5);
        fn on_cpu() -> Option<Duration> {
            let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
            text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
        }
        let (began, Some(before)) = (Instant::now(), on_cpu()) else { return };
        let worked = loop {
            let worked = on_cpu().unwrap_or_default().saturating_sub(before);
            if worked >= WORK || began.elapsed() > 100 * WORK {
                break worked;
            }
        };
        self.waited += began.elapsed();
        self.worked += worked;
    }

    fn factor(&self) -> u32 {
        // Half of the work is tolerance.
        let (waited, worked) = ((self.waited + self.worked / 2).as_micros(), self.worked.as_micros().max(1));
        u32::try_from(waited / worked).unwrap_or(MAX_SLOWDOWN).clamp(1, MAX_SLOWDOWN)
    }
}

/// Measures the slowdown for a moment.
pub(crate) async fn slowdown() -> u32 {
    let measure = || {
        let mut slowdown = Slowdown::default();
        (0..20).for_each(|_| slowdown.measure());
        slowdown.factor()
    };
    tokio::task::spawn_blocking(measure).await.unwrap_or(1)
}

async fn sample_slowdown(stopped: watch::Receiver<bool>) -> u32 {
    let mut slowdown = Slowdown::default();
    while !*stopped.borrow() {
        let sampling = tokio::task::spawn_blocking(move || {
            slowdown.measure();
            slowdown
        });
        slowdown = sampling.await.expect("bug: measuring does not panic");
        tokio::time::sleep(ROUND_PAUSE).await;
    }
    slowdown.factor()
}

/// Runs an attempt while the servers and the bystanders are watched.
pub(crate) async fn run(stage: &Arc<Stage>, attempt: &Attempt) -> Outcome {
    let (stop, stopped) = watch::channel(false);
    let before = cpu(stage);
    let memory = tokio::spawn(sample_memory(Arc::clone(stage), stopped.clone()));
    let slowdown = tokio::spawn(sample_slowdown(stopped.clone()));
    let bystanders = tokio::spawn(bystanders(Arc::clone(stage), stopped));
    let running = AssertUnwindSafe((attempt.run)(Arc::clone(stage))).catch_unwind();
    let mut tries = match tokio::time::timeout(ATTEMPT * MAX_SLOWDOWN, running).await {
        Ok(Ok(tries)) => tries,
        Ok(Err(panic)) => broken_off(&panic_text(&*panic)),
        Err(_) => broken_off("it did not end"),
    };
    stage.reset();
    let settled = settle(stage).await;
    stop.send_replace(true);
    let (latency, failures) = ended(bystanders).await;
    let cost = Cost { rss: ended(memory).await, cpu: cpu(stage).saturating_sub(before), latency };
    tries.successes.extend(violations(&cost, settled, ended(slowdown).await));
    tries.successes.extend(failures);
    if !tries.successes.is_empty() {
        tries.successes.insert(0, format!("it wanted this: {}", attempt.success));
    }
    Outcome { name: attempt.name, topic: attempt.topic, tries, cost }
}

fn broken_off(why: &str) -> Tries {
    let mut tries = Tries::new();
    tries.add(format!("the attempt broke off: {why}"), true);
    tries
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_default()
}

async fn ended<T>(task: JoinHandle<T>) -> T {
    task.await.expect("bug: watchers do not panic")
}

/// Bounds that a cost leaves.
fn violations(cost: &Cost, settled: bool, slowdown: u32) -> Vec<String> {
    let mut found = Vec::new();
    let mut check = |exceeds: bool, what: String| found.extend(exceeds.then_some(what));
    check(cost.rss > RSS, format!("a server used {} MiB of memory", cost.rss / 1024 / 1024));
    check(cost.cpu > CPU, format!("it cost {:.1} s of CPU time", cost.cpu.as_secs_f64()));
    check(
        cost.latency > LATENCY * slowdown,
        format!("a bystander waited {:.1} s", cost.latency.as_secs_f64()),
    );
    check(!settled, format!("servers were still busy {} s later", SETTLED_WITHIN.as_secs()));
    found
}

/// Waits until the servers use hardly any CPU time. Bystanders continue meanwhile.
async fn settle(stage: &Stage) -> bool {
    let deadline = Instant::now() + SETTLED_WITHIN;
    while Instant::now() < deadline {
        let before = cpu(stage);
        tokio::time::sleep(SETTLE_WINDOW).await;
        if cpu(stage).saturating_sub(before) <= IDLE {
            return true;
        }
    }
    false
}

async fn sample_memory(stage: Arc<Stage>, stopped: watch::Receiver<bool>) -> u64 {
    let mut peak = 0;
    while !*stopped.borrow() {
        peak = processes(&stage).map(rss).max().unwrap_or_default().max(peak);
        tokio::time::sleep(SAMPLE_PAUSE).await;
    }
    peak
}

fn processes(stage: &Stage) -> impl Iterator<Item = &Process> {
    stage.targets().into_iter().flat_map(|target| target.processes())
}

/// Memory of a process in bytes.
fn rss(process: &Process) -> u64 {
    const PAGE: u64 = 4096;
    let text = std::fs::read_to_string(format!("/proc/{}/statm", process.id())).unwrap_or_default();
    let pages: u64 = text.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or_default();
    pages * PAGE
}

/// CPU time that all servers have used.
fn cpu(stage: &Stage) -> Duration {
    processes(stage).map(rap_testkit::Process::cpu_time).sum()
}

/// Ordinary clients, one after the other until the end. Returns the longest time that one waited, and failures.
async fn bystanders(stage: Arc<Stage>, stopped: watch::Receiver<bool>) -> (Duration, Vec<String>) {
    let (mut worst, mut failures) = (Duration::ZERO, Vec::new());
    loop {
        let is_last = *stopped.borrow();
        for bystander in [Bystander::Health, Bystander::ToolHealth, Bystander::Read, Bystander::RoundTrip] {
            let began = Instant::now();
            // A bystander that waits for longer than the bound is a success; there is no need to wait for its end.
            let served = tokio::time::timeout(2 * LATENCY * MAX_SLOWDOWN, bystander.serve(&stage)).await;
            worst = worst.max(began.elapsed());
            if served.is_err() && failures.is_empty() {
                failures.push(format!("a bystander was not served: {bystander:?}"));
            }
        }
        if is_last {
            return (worst, failures);
        }
        tokio::time::sleep(ROUND_PAUSE).await;
    }
}

#[derive(Debug, Clone, Copy)]
enum Bystander {
    /// Health check of the runtime.
    Health,
    /// Health check of the tool server.
    ToolHealth,
    /// Reads a list of threads.
    Read,
    /// Opens a thread that calls an ordinary tool, and waits for the agent's answer.
    RoundTrip,
}

impl Bystander {
    async fn serve(self, stage: &Stage) {
        match self {
            Bystander::Health => drop(until_ok(&stage.rap.at("/healthz"), None).await),
            Bystander::ToolHealth => drop(until_ok(&stage.kitchen.at("/healthz"), None).await),
            Bystander::Read => drop(until_ok(&stage.rap.at("/v1/threads?limit=5"), Some(BYSTANDER)).await),
            Bystander::RoundTrip => round_trip(stage).await,
        }
    }
}

/// Repeats a request until it succeeds, as a client does after 503. Returns the body.
async fn until_ok(url: &str, token: Option<&str>) -> String {
    loop {
        if let Some(answer) = wire::get(url, token).await.filter(|answer| answer.status == 200) {
            return answer.text;
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

async fn round_trip(stage: &Stage) {
    let message = json!({"message": "call echo {\"text\": \"of a bystander\"}"});
    let thread = loop {
        let made = wire::post(&stage.rap.at("/v1/threads"), Some(BYSTANDER), &message).await;
        if let Some(id) = made.as_ref().and_then(|made| made.body["id"].as_str()) {
            break id.to_owned();
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    };
    let history = stage.rap.at(&format!("/v1/threads/{thread}/history"));
    while !until_ok(&history, Some(BYSTANDER)).await.contains("echo: echo of a bystander") {
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bound_that_a_cost_leaves_is_a_success_of_the_attacker() {
        let within = Cost { rss: RSS, cpu: CPU, latency: LATENCY };
        assert_eq!(violations(&within, true, 1), Vec::<String>::new());
        let more = Duration::from_millis(1);
        for (cost, settled, expected) in [
            (Cost { rss: RSS + 1, ..within }, true, "memory"),
            (Cost { cpu: CPU + more, ..within }, true, "CPU time"),
            (Cost { latency: LATENCY + more, ..within }, true, "bystander"),
            (within, false, "busy"),
        ] {
            let found = violations(&cost, settled, 1);
            assert!(found.len() == 1 && found[0].contains(expected), "{expected}: {found:?}");
        }
    }
}
