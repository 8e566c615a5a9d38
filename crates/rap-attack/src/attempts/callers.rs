//! A caller of a tool server that takes more than its share, or that learns about others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{FutureExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{CALLER, Stage, TOOL};
use crate::wire;

const TOPIC: &str = "callers";
/// Invocations that are sent at the same time.
const AT_ONCE: usize = 32;
/// Additional delay of another caller, compared with a run without the attack, that counts as a success.
const DELAY: Duration = Duration::from_millis(500);

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(TOPIC, "one caller takes all calls", "another caller is refused", all_calls),
        attempt!(
            TOPIC,
            "one caller takes all delivery slots",
            "another caller's results wait",
            all_deliveries
        ),
        attempt!(TOPIC, "one caller names many dead hosts", "another caller's results wait", dead_hosts),
        attempt!(
            TOPIC,
            "one caller asks about another's calls",
            "it learns of them or stops them",
            other_calls
        ),
        attempt!(
            TOPIC,
            "status query as a port scanner",
            "a status differs between open and closed ports",
            ports
        ),
    ]
}

fn invocation(tool: &str, arguments: &Value, thread: &str, id: &str, callback_url: &str) -> Value {
    json!({"operation": tool, "arguments": arguments, "id": id, "group_id": thread, "callback_url": callback_url})
}

/// Sends invocations and returns how many were accepted.
async fn invoke_all(stage: &Stage, calls: impl Iterator<Item = Value>) -> usize {
    let url = stage.kitchen.at("/invoke");
    let sending = futures_util::stream::iter(calls).map(|call| {
        let url = url.clone();
        async move { wire::post(&url, Some(CALLER), &call).await.map_or(0, |answer| answer.status) }
    });
    sending.buffer_unordered(AT_ONCE).filter(|status| std::future::ready(*status == 200)).count().await
}

async fn close(stage: &Stage, thread: &str) {
    let body = json!({"thread_id": thread});
    wire::post(&stage.kitchen.at("/close_thread"), Some(CALLER), &body).await;
}

async fn all_calls(stage: Arc<Stage>) -> Tries {
    /// More than a tool server runs at the same time.
    const CALLS: usize = 10_100;
    let mut tries = Tries::new();
    let callback = format!("{}/hoard", stage.elsewhere.url);
    let calls = (0..CALLS).map(|number| {
        invocation("slow", &json!({"seconds": 600}), "hoard", &format!("hoard{number}"), &callback)
    });
    let accepted = invoke_all(&stage, calls).await;
    tries.count = CALLS;
    tries.add(format!("{accepted} calls of one caller run"), accepted >= 10_000);
    let mine = invocation(
        "slow",
        &json!({"seconds": 0}),
        "other",
        "other",
        &format!("{}/other", stage.elsewhere.url),
    );
    let status =
        wire::post(&stage.kitchen.at("/invoke"), Some(TOOL), &mine).await.map_or(0, |answer| answer.status);
    tries.add(format!("a call of another caller was answered {status}"), status != 200);
    close(&stage, "hoard").await;
    tries
}

/// A listener on all addresses of loopback that accepts and never answers. Returns its port.
async fn silent_listener() -> u16 {
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            open.push(stream);
        }
    });
    port
}

/// Calls whose callback URLs have as many different hosts.
fn calls_to_hosts(count: usize, thread: &'static str, port: u16) -> impl Iterator<Item = Value> {
    (0..count).map(move |number| {
        let host = format!("127.1.{}.{}", number / 250, number % 250 + 1);
        let callback = format!("http://{host}:{port}/");
        invocation("echo", &json!({"text": "x"}), thread, &format!("{thread}{number}"), &callback)
    })
}

async fn all_deliveries(stage: Arc<Stage>) -> Tries {
    /// More than the delivery slots of a tool server.
    const HOSTS: usize = 1_500;
    let mut tries = Tries::new();
    if !stage.isolation.isolated {
        tries.note = Some("not tried: the listener would be reachable from other machines".to_owned());
        return tries;
    }
    let port = silent_listener().await;
    let before = result_of_another(&stage, "before-silent").await;
    tries.count = invoke_all(&stage, calls_to_hosts(HOSTS, "silent", port)).await;
    let waited = result_of_another(&stage, "silent").await;
    tries.add(
        format!("a result of another caller took {waited:?} instead of {before:?}"),
        waited > DELAY + 4 * before,
    );
    close(&stage, "silent").await;
    tries
}

/// Names many dead hosts. The time that another caller waits meanwhile is compared with the time that it waits while
/// the first one sends as many calls that name one live host.
async fn dead_hosts(stage: Arc<Stage>) -> Tries {
    const HOSTS: usize = 3_000;
    /// The discard port, where nothing listens.
    const DEAD: u16 = 9;
    let mut tries = Tries::new();
    let live = (0..HOSTS).map(|number| {
        let callback = format!("{}/live", stage.elsewhere.url);
        invocation("echo", &json!({"text": "x"}), "live", &format!("live{number}"), &callback)
    });
    let (_, beside_live) = beside(&stage, "live", invoke_all(&stage, live)).await;
    let dead = invoke_all(&stage, calls_to_hosts(HOSTS, "dead", DEAD));
    let (named, beside_dead) = beside(&stage, "dead", dead).await;
    tries.count = named;
    let afterwards = result_of_another(&stage, "after-dead").await;
    let shown = format!("{beside_dead:?} and {afterwards:?} instead of {beside_live:?}");
    tries.note = Some(format!("another caller waited {shown}"));
    let bound = DELAY + 4 * beside_live;
    tries.add(format!("a result of another caller took {shown}"), beside_dead.max(afterwards) > bound);
    close(&stage, "dead").await;
    tries
}

/// Measures a second caller while the first one is busy. Returns the output of the first one, and the median time that a
/// call of the second one took.
async fn beside<T>(stage: &Stage, name: &str, busy: impl Future<Output = T>) -> (T, Duration) {
    let done = tokio::sync::Notify::new();
    let first = async {
        let output = busy.await;
        done.notify_one();
        output
    };
    let second = async {
        let mut times = Vec::new();
        let ended = done.notified();
        tokio::pin!(ended);
        loop {
            times.push(result_of_another(stage, &format!("{name}{}", times.len())).await);
            if ended.as_mut().now_or_never().is_some() {
                times.sort_unstable();
                return times[times.len() / 2];
            }
        }
    };
    tokio::join!(first, second)
}

/// Time that a call of another caller takes, with its result.
async fn result_of_another(stage: &Stage, id: &str) -> Duration {
    let (began, path) = (Instant::now(), format!("/result-beside-{id}"));
    let call =
        invocation("echo", &json!({"text": "x"}), "other", id, &format!("{}{path}", stage.elsewhere.url));
    wire::post(&stage.kitchen.at("/invoke"), Some(TOOL), &call).await;
    stage.elsewhere.next(&path).await;
    began.elapsed()
}

async fn other_calls(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let callback = format!("{}/victim", stage.elsewhere.url);
    let call = invocation("slow", &json!({"seconds": 600}), "victim", "victim", &callback);
    wire::post(&stage.kitchen.at("/invoke"), Some(TOOL), &call).await;
    let body = json!({"thread_id": "victim", "tool_call_id": "victim"});
    let ask = async |token, path: &str| wire::post(&stage.kitchen.at(path), Some(token), &body).await;
    let alive = async |token| {
        ask(token, "/tool_call_status").await.is_some_and(|answer| answer.body["alive"] == true)
    };
    tries.add("it learns that the call exists", alive(CALLER).await);
    ask(CALLER, "/cancel_tool_call").await;
    ask(CALLER, "/close_thread").await;
    // The same ids with another callback URL are another call.
    let mut stolen = call;
    stolen["callback_url"] = json!(format!("{}/thief", stage.elsewhere.url));
    wire::post(&stage.kitchen.at("/invoke"), Some(CALLER), &stolen).await;
    ask(CALLER, "/cancel_tool_call").await;
    tries.add("it stops the call", !alive(TOOL).await);
    tries.add("the victim got a result", stage.elsewhere.count("/victim") > 0);
    ask(TOOL, "/close_thread").await;
    tries
}

/// Names open and closed ports as callback URLs and asks for the status of the calls.
async fn ports(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    stage.elsewhere.answer_always("/refusing", rap_testkit::peer::Reply::Status(404));
    let closed = rap_testkit::Port::reserve();
    let urls = [
        ("refusing", format!("{}/refusing", stage.elsewhere.url)),
        ("closed", format!("http://{}/", closed.address())),
        ("api", stage.rap.at("/v1/threads")),
    ];
    for (id, url) in &urls {
        let call = invocation("echo", &json!({"text": "x"}), "ports", id, url);
        wire::post(&stage.kitchen.at("/invoke"), Some(TOOL), &call).await;
    }
    stage.elsewhere.next("/refusing").await;
    let mut seen = Vec::new();
    for (id, _) in &urls {
        let body = json!({"thread_id": "ports", "tool_call_id": id});
        let answer = wire::post(&stage.kitchen.at("/tool_call_status"), Some(TOOL), &body).await;
        seen.push(answer.map_or(Value::Null, |answer| answer.body["alive"].clone()));
    }
    for alive in &seen {
        tries.add(format!("statuses {seen:?}"), *alive != seen[0]);
    }
    let body = json!({"thread_id": "ports"});
    wire::post(&stage.kitchen.at("/close_thread"), Some(TOOL), &body).await;
    tries
}
