//! Clients that hold conversations, and the ledger of what they sent.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rap_testkit::http::{self, Response};
use rap_testkit::{PATIENCE, Rng};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::check::{self, Call, Tool};

const ANSWER_WITHIN: Duration = Duration::from_secs(8);
const RETRY_AFTER: Duration = Duration::from_millis(150);
const POLL: Duration = Duration::from_millis(300);
/// Number of conversations that are checked at the same time in the end.
const CHECKS: usize = 8;

/// A conversation and the calls that its messages asked for. Each message was acknowledged.
#[derive(Debug, Clone, Default)]
struct Conversation {
    thread: String,
    calls: Vec<Call>,
}

pub(crate) struct Ledger {
    url: String,
    finished: Mutex<Vec<Conversation>>,
    violations: Mutex<Vec<String>>,
    acknowledged: AtomicU64,
    calls: AtomicU64,
    retries: AtomicU64,
    next_mark: AtomicU64,
}

impl Ledger {
    pub(crate) fn new(url: &str) -> Arc<Ledger> {
        Arc::new(Ledger {
            url: url.to_owned(),
            finished: Mutex::default(),
            violations: Mutex::default(),
            acknowledged: AtomicU64::new(0),
            calls: AtomicU64::new(0),
            retries: AtomicU64::new(0),
            next_mark: AtomicU64::new(0),
        })
    }

    pub(crate) fn summary(&self) -> String {
        let [acknowledged, calls, retries] =
            [&self.acknowledged, &self.calls, &self.retries].map(|count| count.load(Ordering::SeqCst));
        let threads = self.finished.lock().unwrap().len();
        format!(
            "{acknowledged} messages acknowledged, {calls} calls in {threads} finished threads, {retries} retried requests"
        )
    }

    fn violation(&self, text: String) {
        self.violations.lock().unwrap().push(text);
    }

    /// Checks every finished conversation once more, and returns all violations.
    pub(crate) async fn check_all(self: &Arc<Ledger>) -> Vec<String> {
        let conversations = std::mem::take(&mut *self.finished.lock().unwrap());
        let (mut tasks, mut violations) =
            (JoinSet::new(), std::mem::take(&mut *self.violations.lock().unwrap()));
        for conversation in &conversations {
            if tasks.len() >= CHECKS {
                violations.extend(tasks.join_next().await.unwrap().unwrap());
            }
            let (ledger, conversation) = (Arc::clone(self), conversation.clone());
            tasks.spawn(async move { ledger.check(&conversation).await });
        }
        while let Some(found) = tasks.join_next().await {
            violations.extend(found.unwrap());
        }
        *self.finished.lock().unwrap() = conversations;
        violations
    }

    async fn check(&self, conversation: &Conversation) -> Vec<String> {
        let thread = &conversation.thread;
        let Some(histories) = self.histories(thread).await else {
            return vec![format!("the history of {thread} cannot be read")];
        };
        check::violations(thread, &conversation.calls, &histories)
    }

    /// Returns the history of a thread, followed by those of its children.
    async fn histories(&self, thread: &str) -> Option<Vec<Vec<Value>>> {
        let children = self.get(&format!("/v1/threads?parent={thread}&limit=1000")).await?;
        let children = children["threads"].as_array()?.iter().filter_map(|child| child["id"].as_str());
        let mut histories = Vec::new();
        for thread in [thread].into_iter().chain(children) {
            histories.push(self.history(thread).await?);
        }
        Some(histories)
    }

    async fn history(&self, thread: &str) -> Option<Vec<Value>> {
        let (mut entries, mut after) = (Vec::new(), 0);
        loop {
            let page = self.get(&format!("/v1/threads/{thread}/history?after={after}&limit=1000")).await?;
            entries.extend(page["entries"].as_array()?.iter().cloned());
            match page["next_after"].as_u64() {
                Some(next) => after = next,
                None => return Some(entries),
            }
        }
    }

    async fn get(&self, path: &str) -> Option<Value> {
        get(&self.url, path).await.filter(|answer| answer.status == 200).map(|answer| answer.body)
    }

    /// Sends a request until it is acknowledged. Repeats have the same key. Returns false if it is refused for good.
    async fn deliver(&self, path: &str, body: &Value, key: &str) -> bool {
        let (url, bytes) = (format!("{}{path}", self.url), body.to_string());
        let headers = [("content-type", "application/json"), ("idempotency-key", key)];
        loop {
            let sent = http::attempt("POST", &url, &headers, bytes.as_bytes());
            let answer = tokio::time::timeout(ANSWER_WITHIN, sent).await;
            match answer.ok().and_then(Result::ok) {
                Some(answer) if answer.status < 300 => {
                    self.acknowledged.fetch_add(1, Ordering::SeqCst);
                    return true;
                }
                Some(answer) if answer.status < 500 && answer.status != 429 => {
                    self.violation(format!("POST {path} was refused: {} {}", answer.status, answer.text));
                    return false;
                }
                _ => {
                    self.retries.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(RETRY_AFTER).await;
                }
            }
        }
    }
}

/// Sends a GET request. Returns `None` if there is no answer in time.
pub(crate) async fn get(url: &str, path: &str) -> Option<Response> {
    let url = format!("{url}{path}");
    let request = http::attempt("GET", &url, &[], b"");
    tokio::time::timeout(ANSWER_WITHIN, request).await.ok()?.ok()
}

/// Holds a first conversation without faults, so that the runtime knows all tools: a session that finds a tool server
/// unreachable then uses the toolset that is known.
pub(crate) async fn warm_up(ledger: &Ledger) {
    let tools = [Tool::Once, Tool::Again, Tool::Unreliable, Tool::Ticks];
    let call = |tool: &Tool| Call { tool: *tool, mark: format!("{}-first", tool.name()), ms: 1, ticks: 1 };
    let conversation = Conversation { thread: "storm-first".into(), calls: tools.iter().map(call).collect() };
    let text = conversation.calls.iter().map(Call::line).collect::<Vec<_>>().join("\n");
    ledger.deliver("/v1/threads", &json!({"id": conversation.thread, "message": text}), "first").await;
    let deadline = Mutex::new(Some(Instant::now() + PATIENCE));
    let wrong = settle(ledger, &conversation, &deadline).await;
    assert!(wrong.is_empty(), "the first conversation, without faults, did not end well: {wrong:?}");
}

pub(crate) struct Clients {
    ending: Arc<AtomicBool>,
    deadline: Arc<Mutex<Option<Instant>>>,
    tasks: JoinSet<()>,
}

impl Clients {
    /// Begins no more conversations, and waits for a time until the running ones are complete.
    pub(crate) async fn end(mut self, within: Duration) {
        self.ending.store(true, Ordering::SeqCst);
        *self.deadline.lock().unwrap() = Some(Instant::now() + within);
        while self.tasks.join_next().await.is_some() {}
    }
}

pub(crate) fn start(ledger: &Arc<Ledger>, threads: usize, seed: u64) -> Clients {
    let (ending, deadline) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Option<Instant>>>::default());
    let mut tasks = JoinSet::new();
    for number in 0..threads {
        let mut rng = Rng(seed.wrapping_mul(1009) + number as u64);
        let (ledger, ending, deadline) = (Arc::clone(ledger), Arc::clone(&ending), Arc::clone(&deadline));
        tasks.spawn(async move {
            let mut conversations = 0;
            while !ending.load(Ordering::SeqCst) {
                conversations += 1;
                let thread = format!("storm-{seed}-{number}-{conversations}");
                converse(&ledger, &thread, &deadline, &mut rng).await;
            }
        });
    }
    Clients { ending, deadline, tasks }
}

/// Sends the messages of one conversation, and waits until everything that they asked for is there.
async fn converse(ledger: &Ledger, thread: &str, deadline: &Mutex<Option<Instant>>, rng: &mut Rng) {
    let mut conversation = Conversation { thread: thread.to_owned(), calls: Vec::new() };
    for number in 0..2 + rng.below(4) {
        let calls: Vec<Call> = (0..1 + rng.below(2)).map(|_| call(ledger, rng)).collect();
        let text = calls.iter().map(Call::line).collect::<Vec<_>>().join("\n");
        let key = format!("{thread}-{number}");
        let on_busy = *rng.pick(&["join", "join", "enqueue"]);
        let delivered = match number {
            0 => ledger.deliver("/v1/threads", &json!({"id": thread, "message": text}), &key).await,
            _ => {
                let path = format!("/v1/threads/{thread}/messages");
                ledger.deliver(&path, &json!({"text": text, "on_busy": on_busy}), &key).await
            }
        };
        if !delivered {
            return;
        }
        ledger.calls.fetch_add(calls.len() as u64, Ordering::SeqCst);
        conversation.calls.extend(calls);
        tokio::time::sleep(Duration::from_millis(rng.below(600) as u64)).await;
    }
    let last = settle(ledger, &conversation, deadline).await;
    if last.is_empty() {
        ledger.finished.lock().unwrap().push(conversation);
    }
    last.into_iter().for_each(|violation| ledger.violation(violation));
}

fn call(ledger: &Ledger, rng: &mut Rng) -> Call {
    let tool = *rng.pick(&[Tool::Once, Tool::Again, Tool::Again, Tool::Unreliable, Tool::Ticks]);
    let number = ledger.next_mark.fetch_add(1, Ordering::SeqCst);
    let ticks = if tool == Tool::Ticks { 1 + rng.below(6) as u64 } else { 0 };
    Call { tool, mark: format!("{}{number}", tool.name()), ms: rng.below(400) as u64, ticks }
}

/// Polls until a conversation is complete and its thread is idle. Returns what is wrong if that takes too long.
async fn settle(
    ledger: &Ledger,
    conversation: &Conversation,
    deadline: &Mutex<Option<Instant>>,
) -> Vec<String> {
    let path = format!("/v1/threads/{}", conversation.thread);
    loop {
        let thread = ledger.get(&path).await.unwrap_or_default();
        let wrong = match thread["status"].as_str() {
            Some("idle") if is_quiet(&thread) => ledger.check(conversation).await,
            _ => vec![format!("{} is not idle: {thread}", conversation.thread)],
        };
        if wrong.is_empty() {
            return wrong;
        }
        if thread["status"] == "failed" {
            // The model server sent a web page, which is not retried. A person resumes the thread.
            let url = format!("{}{path}/resume", ledger.url);
            let resume = http::attempt("POST", &url, &[("content-type", "application/json")], b"{}");
            tokio::time::timeout(ANSWER_WITHIN, resume).await.ok();
        }
        if deadline.lock().unwrap().is_some_and(|deadline| Instant::now() > deadline) {
            return wrong;
        }
        tokio::time::sleep(POLL).await;
    }
}

fn is_quiet(thread: &Value) -> bool {
    let empty = |name: &str| thread[name].as_array().is_none_or(Vec::is_empty);
    empty("waiting_on") && empty("subscriptions") && thread["held"] == 0
}
