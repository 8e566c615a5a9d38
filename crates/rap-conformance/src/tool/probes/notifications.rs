//! Notifications about closed threads and cancelled calls: always answered 200, promptly, and without revealing state.

use rap_protocol::{CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH};
use serde_json::{Value, json};

use crate::canary::Canary;
use crate::report::{Probe, Verdict};
use crate::tool::inbox::Delivery;
use crate::tool::target::{Call, ServerResponse, Target, results};
use crate::tool::{Check, ProbeResult};

/// Ids that break servers which use them unchecked. A server that uses an id as a path may delete what it finds there,
/// so no path leads to an existing file or directory. The other ids are harmless even if they are interpreted.
const HOSTILE: [&str; 10] = [
    "../../../../rap-check/no-such-file",
    "..\\..\\..\\rap-check\\no-such-file",
    "/rap-check/no-such-file",
    "%2e%2e%2frap-check%2fno-such-file",
    "'",
    "\"; --",
    "$(id)`id`|id",
    "{\"$gt\": \"\"}",
    "<b>&amp;</b>",
    "a\u{0}b\r\nX-Injected: yes",
];
/// Number of attempts: a single late answer may be caused by the network or by a busy machine.
const ATTEMPTS: usize = 3;
/// Length of an id that exceeds the limit.
const LONG: usize = 10_000;

/// Runs before all other probes that send notifications.
pub(super) const FIRST: &[Check] = &[Check {
    probe: Probe {
        name: "close_thread_is_served",
        requirements: &["LC-03"],
        checks: "POST /close_thread is not answered like a path that does not exist.",
    },
    run: |target| Box::pin(close_is_served(target)),
}];

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "cancel_tool_call_is_served",
            requirements: &[],
            checks: "POST /cancel_tool_call is not answered like a path that does not exist.",
        },
        run: |target| Box::pin(std::future::ready(is_served(target, Kind::Cancel))),
    },
    Check {
        probe: Probe {
            name: "closing_an_unknown_thread_is_200",
            requirements: &["TC-04", "TC-05", "TC-14"],
            checks: "POST /close_thread with an unknown thread is answered 200.",
        },
        run: |target| Box::pin(unknown(target, Kind::Close)),
    },
    Check {
        probe: Probe {
            name: "closing_a_known_thread_is_200",
            requirements: &["TC-04", "TC-05"],
            checks: "POST /close_thread with a thread that has made a call is answered 200.",
        },
        run: |target| Box::pin(known(target, Kind::Close)),
    },
    Check {
        probe: Probe {
            name: "closing_twice_is_harmless",
            requirements: &["TC-09"],
            checks: "A second POST /close_thread with the same thread is answered 200, too.",
        },
        run: |target| Box::pin(twice(target, Kind::Close)),
    },
    Check {
        probe: Probe {
            name: "closing_is_answered_at_once",
            requirements: &["TC-12"],
            checks: "POST /close_thread is answered within half a second, at least once in three attempts.",
        },
        run: |target| Box::pin(at_once(target)),
    },
    Check {
        probe: Probe {
            name: "closing_takes_hostile_ids",
            requirements: &["TC-21"],
            checks: "POST /close_thread with ids that are paths, quotes, commands, control characters, far too long \
                     or no strings is answered with a status below 500, and no file at such a path vanishes.",
        },
        run: |target| Box::pin(hostile(target, Kind::Close)),
    },
    Check {
        probe: Probe {
            name: "closing_reveals_nothing",
            requirements: &["TC-19"],
            checks: "POST /close_thread has the same empty answer for a known and an unknown thread.",
        },
        run: |target| Box::pin(same_answer(target, Kind::Close)),
    },
    Check {
        probe: Probe {
            name: "a_closed_thread_can_call_again",
            requirements: &["TC-08"],
            checks: "A result follows an invocation that arrives after its thread was closed.",
        },
        run: |target| Box::pin(call_after_close(target)),
    },
    Check {
        probe: Probe {
            name: "cancelling_an_unknown_call_is_200",
            requirements: &["CN-04", "CN-05", "CN-16"],
            checks: "POST /cancel_tool_call with an unknown call is answered 200.",
        },
        run: |target| Box::pin(unknown(target, Kind::Cancel)),
    },
    Check {
        probe: Probe {
            name: "cancelling_a_finished_call_is_200",
            requirements: &["CN-03", "CN-04", "CN-05"],
            checks: "POST /cancel_tool_call with a call that has returned is answered 200, and no further result \
                     follows.",
        },
        run: |target| Box::pin(cancel_after_result(target)),
    },
    Check {
        probe: Probe {
            name: "cancelling_twice_is_harmless",
            requirements: &["CN-08"],
            checks: "A second POST /cancel_tool_call with the same call is answered 200, too.",
        },
        run: |target| Box::pin(twice(target, Kind::Cancel)),
    },
    Check {
        probe: Probe {
            name: "cancelling_takes_hostile_ids",
            requirements: &["CN-23"],
            checks: "POST /cancel_tool_call with ids that are paths, quotes, commands, control characters, far too \
                     long or no strings is answered with a status below 500, and no file at such a path vanishes.",
        },
        run: |target| Box::pin(hostile(target, Kind::Cancel)),
    },
    Check {
        probe: Probe {
            name: "hostile_ids_are_200",
            requirements: &[],
            checks: "Notifications with ids that are paths, quotes, commands, control characters or far too long are \
                     answered 200.",
        },
        run: |target| Box::pin(hostile_200(target)),
    },
    Check {
        probe: Probe {
            name: "cancelling_reveals_nothing",
            requirements: &["CN-21"],
            checks: "POST /cancel_tool_call has the same empty answer for a known and an unknown call.",
        },
        run: |target| Box::pin(same_answer(target, Kind::Cancel)),
    },
];

#[derive(Clone, Copy)]
enum Kind {
    Close,
    Cancel,
}

impl Kind {
    fn path(self) -> &'static str {
        match self {
            Kind::Close => CLOSE_THREAD_PATH,
            Kind::Cancel => CANCEL_TOOL_CALL_PATH,
        }
    }

    fn body(self, thread: impl Into<Value>, call: impl Into<Value>) -> Value {
        match self {
            Kind::Close => json!({"thread_id": thread.into()}),
            Kind::Cancel => json!({"thread_id": thread.into(), "tool_call_id": call.into()}),
        }
    }
}

async fn send(target: &Target, kind: Kind, body: &Value) -> Result<ServerResponse, Verdict> {
    target.notify(kind.path(), body).await
}

async fn send_about(target: &Target, kind: Kind, call: &Call) -> Result<ServerResponse, Verdict> {
    send(target, kind, &kind.body(call.thread.as_str(), call.id.as_str())).await
}

fn expect_200(response: ServerResponse) -> ProbeResult {
    match response.status {
        200 => Ok(()),
        status => Err(Verdict::fail(
            format!("the notification was answered {status} instead of 200"),
            vec![response.exchange],
        )),
    }
}

/// Makes a call and waits for its result.
async fn finished(target: &Target) -> Result<Call, Verdict> {
    let call = target.operation()?;
    target.invoke(&call).await?;
    call.result(target.timeouts).await?;
    Ok(call)
}

async fn close_is_served(target: &Target) -> ProbeResult {
    target.find_notification_endpoints().await?;
    is_served(target, Kind::Close)
}

fn is_served(target: &Target, kind: Kind) -> ProbeResult {
    target.has_endpoint(kind.path()).map_err(|_| {
        let what = format!("POST {} is answered like a path that does not exist", kind.path());
        Verdict::fail(what, Vec::new())
    })
}

async fn unknown(target: &Target, kind: Kind) -> ProbeResult {
    expect_200(send(target, kind, &kind.body(target.fresh_id("thread"), target.fresh_id("call"))).await?)
}

async fn known(target: &Target, kind: Kind) -> ProbeResult {
    expect_200(send_about(target, kind, &finished(target).await?).await?)
}

async fn twice(target: &Target, kind: Kind) -> ProbeResult {
    let call = finished(target).await?;
    send_about(target, kind, &call).await?;
    expect_200(send_about(target, kind, &call).await?)
}

async fn at_once(target: &Target) -> ProbeResult {
    let mut found = Ok(());
    for _ in 0..ATTEMPTS {
        let (call, prompt) = (finished(target).await?, target.prompt().await?);
        let response = send_about(target, Kind::Close, &call).await?;
        if response.took <= prompt {
            return Ok(());
        }
        found = Err(Verdict::fail(
            format!(
                "the answer took {:.1} s; answer before the clean-up is done",
                response.took.as_secs_f64()
            ),
            vec![response.exchange],
        ));
    }
    found
}

/// Bodies with an id that breaks servers which use it unchecked.
fn bodies(target: &Target, kind: Kind, id: &str) -> Vec<Value> {
    match kind {
        Kind::Close => vec![kind.body(id, "")],
        Kind::Cancel => {
            vec![kind.body(target.fresh_id("thread"), id), kind.body(id, target.fresh_id("call"))]
        }
    }
}

async fn hostile(target: &Target, kind: Kind) -> ProbeResult {
    let broken =
        |error| Verdict::not_observable(format!("the checker cannot make a temporary file: {error}"));
    let canary = Canary::new().map_err(broken)?;
    let long = "x".repeat(LONG);
    let ids = HOSTILE.into_iter().chain([long.as_str()]).map(str::to_owned);
    let hostile = ids.chain(canary.existing()).flat_map(|id| bodies(target, kind, &id));
    let not_ids = [json!(7), json!(null), json!({"a": 1}), json!(["a"])];
    let not_ids = not_ids.into_iter().map(|id| kind.body(id.clone(), id));
    for body in hostile.chain(not_ids).collect::<Vec<Value>>() {
        let response = send(target, kind, &body).await?;
        if response.status >= 500 {
            return Err(Verdict::fail(
                format!("a hostile id was answered {}", response.status),
                vec![response.exchange],
            ));
        }
        if let Some(damage) = canary.damage() {
            return Err(Verdict::fail(damage, vec![response.exchange]));
        }
    }
    // The server may clean up in the background.
    tokio::time::sleep(target.timeouts.quiet).await;
    canary.damage().map_or(Ok(()), |damage| Err(Verdict::fail(damage, Vec::new())))
}

async fn hostile_200(target: &Target) -> ProbeResult {
    let long = "x".repeat(LONG);
    for kind in [Kind::Close, Kind::Cancel] {
        for id in HOSTILE.into_iter().chain([long.as_str()]) {
            // Another probe has sent the same ids without the suffix.
            for body in bodies(target, kind, &format!("{id}.{}", target.fresh_id("again"))) {
                let response = send(target, kind, &body).await?;
                if response.status >= 500 {
                    let why = "a hostile id was answered 5xx: see the probes closing_takes_hostile_ids and \
                               cancelling_takes_hostile_ids";
                    return Err(Verdict::not_observable(why));
                }
                expect_200(response)?;
            }
        }
    }
    Ok(())
}

/// Compares the answers for an unknown call, for one that has returned and, if there is a slow operation, for one that
/// is at work.
async fn same_answer(target: &Target, kind: Kind) -> ProbeResult {
    target.has_endpoint(kind.path())?;
    let unknown = send(target, kind, &kind.body(target.fresh_id("thread"), target.fresh_id("call"))).await?;
    let mut calls = vec![finished(target).await?];
    if let Ok(slow) = target.slow_operation() {
        target.invoke(&slow).await?;
        calls.push(slow);
    }
    for call in &calls {
        let known = send_about(target, kind, call).await?;
        // A status other than 200 is the failure of other probes.
        if known.body != unknown.body {
            return Err(Verdict::fail(
                "the answers for a known and an unknown id differ, which reveals whether the id is known",
                vec![known.exchange, unknown.exchange],
            ));
        }
    }
    if unknown.status == 200 && !unknown.body.is_empty() {
        let what = "the answer is not empty; an empty one reveals nothing";
        return Err(Verdict::not_recommended(what, vec![unknown.exchange]));
    }
    let seen = if calls.len() == 2 { "that is at work, one that has returned" } else { "that has returned" };
    Err(Verdict::seen(format!(
        "{} has the same empty answer for a call {seen} and an unknown one.",
        kind.path()
    )))
}

/// The second call uses the callback URL of the first, because separate URLs are checked by another probe.
async fn call_after_close(target: &Target) -> ProbeResult {
    let first = finished(target).await?;
    send_about(target, Kind::Close, &first).await?;
    let mut second = target.operation()?;
    second.invocation["group_id"] = first.thread.as_str().into();
    second.invocation["callback_url"] = first.inbox.url.as_str().into();
    target.invoke(&second).await?;
    let result = |deliveries: &[Delivery]| results(deliveries).nth(1).map(|_| ());
    let observed = first.inbox.wait_for(target.timeouts.result, result).await;
    observed.ok_or_else(|| second.fail("the call was acknowledged, but no result followed"))
}

async fn cancel_after_result(target: &Target) -> ProbeResult {
    target.one_result()?;
    let call = finished(target).await?;
    expect_200(send_about(target, Kind::Cancel, &call).await?)?;
    let second = |deliveries: &[Delivery]| results(deliveries).nth(1).map(|_| ());
    match call.inbox.wait_for(target.timeouts.quiet, second).await {
        None => Ok(()),
        Some(()) => Err(call.fail("a second result arrived after a finished call was cancelled")),
    }
}
