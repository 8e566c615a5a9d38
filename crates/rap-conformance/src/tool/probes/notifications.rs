//! Closing threads and cancelling calls: always 200, at once, and without a word about what is there.

use rap_protocol::{CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH};
use serde_json::{Value, json};

use crate::report::{Probe, Verdict};
use crate::tool::inbox::Delivery;
use crate::tool::target::{Call, Said, Target, results};
use crate::tool::{Check, Found};

/// Ids that break what trusts them. A server that takes one for a path may well delete what is there, so all paths
/// lead to nothing, and none to a folder; what is not a path does no harm where it works either.
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
/// One late answer may be the network's doing, or a busy machine's.
const ATTEMPTS: usize = 3;
/// Longer than an id may be.
const LONG: usize = 10_000;

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "closing_an_unknown_thread_is_200",
            requirements: &["TC-04", "TC-05", "TC-14", "LC-03"],
            checks: "POST /close_thread with a thread that the server never heard of is answered 200.",
        },
        run: |target| Box::pin(unknown(target, Kind::Close)),
    },
    Check {
        probe: Probe {
            name: "closing_a_known_thread_is_200",
            requirements: &["TC-04", "TC-05"],
            checks: "POST /close_thread with a thread that made a call is answered 200.",
        },
        run: |target| Box::pin(known(target, Kind::Close)),
    },
    Check {
        probe: Probe {
            name: "closing_twice_is_harmless",
            requirements: &["TC-09"],
            checks: "A second closing of the same thread is answered 200 as well.",
        },
        run: |target| Box::pin(twice(target, Kind::Close)),
    },
    Check {
        probe: Probe {
            name: "closing_is_answered_at_once",
            requirements: &["TC-12"],
            checks: "The closing of a thread is answered within a second, at least once in three.",
        },
        run: |target| Box::pin(at_once(target)),
    },
    Check {
        probe: Probe {
            name: "closing_takes_hostile_ids",
            requirements: &["TC-21"],
            checks: "Thread ids that are paths, quotes, commands, control characters or far too long \
                     are answered 200, and what is no string below 500.",
        },
        run: |target| Box::pin(hostile(target, Kind::Close)),
    },
    Check {
        probe: Probe {
            name: "closing_reveals_nothing",
            requirements: &["TC-19"],
            checks: "A known and an unknown thread get the same answer.",
        },
        run: |target| Box::pin(discreet(target, Kind::Close)),
    },
    Check {
        probe: Probe {
            name: "a_closed_thread_can_call_again",
            requirements: &["TC-08"],
            checks: "An invocation that arrives after the closing of its thread brings a result.",
        },
        run: |target| Box::pin(call_after_close(target)),
    },
    Check {
        probe: Probe {
            name: "cancelling_an_unknown_call_is_200",
            requirements: &["CN-04", "CN-05", "CN-16"],
            checks: "POST /cancel_tool_call with a call that the server never heard of is answered 200.",
        },
        run: |target| Box::pin(unknown(target, Kind::Cancel)),
    },
    Check {
        probe: Probe {
            name: "cancelling_a_finished_call_is_200",
            requirements: &["CN-03", "CN-04", "CN-05"],
            checks: "POST /cancel_tool_call with a call whose result was delivered is answered 200, and \
                     nothing follows.",
        },
        run: |target| Box::pin(cancel_after_result(target)),
    },
    Check {
        probe: Probe {
            name: "cancelling_twice_is_harmless",
            requirements: &["CN-08"],
            checks: "A second cancellation of the same call is answered 200 as well.",
        },
        run: |target| Box::pin(twice(target, Kind::Cancel)),
    },
    Check {
        probe: Probe {
            name: "cancelling_takes_hostile_ids",
            requirements: &["CN-23"],
            checks: "Call and thread ids that are paths, quotes, commands, control characters or far \
                     too long are answered 200, and what is no string below 500.",
        },
        run: |target| Box::pin(hostile(target, Kind::Cancel)),
    },
    Check {
        probe: Probe {
            name: "cancelling_reveals_nothing",
            requirements: &["CN-21"],
            checks: "A known and an unknown call get the same answer.",
        },
        run: |target| Box::pin(discreet(target, Kind::Cancel)),
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

async fn send(target: &Target, kind: Kind, body: &Value) -> Result<Said, Verdict> {
    target.notify(kind.path(), body).await
}

async fn send_about(target: &Target, kind: Kind, call: &Call) -> Result<Said, Verdict> {
    send(target, kind, &kind.body(call.thread.as_str(), call.id.as_str())).await
}

fn expect_200(said: Said) -> Found {
    match said.status {
        200 => Ok(()),
        status => Err(Verdict::fail(format!("it was answered {status}"), vec![said.exchange])),
    }
}

/// A call that brought its result.
async fn finished(target: &Target) -> Result<Call, Verdict> {
    let call = target.operation()?;
    target.invoke(&call).await?;
    call.result(target.patience).await?;
    Ok(call)
}

async fn unknown(target: &Target, kind: Kind) -> Found {
    expect_200(send(target, kind, &kind.body(target.fresh("thread"), target.fresh("call"))).await?)
}

async fn known(target: &Target, kind: Kind) -> Found {
    expect_200(send_about(target, kind, &finished(target).await?).await?)
}

async fn twice(target: &Target, kind: Kind) -> Found {
    let call = finished(target).await?;
    send_about(target, kind, &call).await?;
    expect_200(send_about(target, kind, &call).await?)
}

async fn at_once(target: &Target) -> Found {
    let mut found = Ok(());
    for _ in 0..ATTEMPTS {
        let call = finished(target).await?;
        let said = send_about(target, Kind::Close, &call).await?;
        if said.took <= target.patience.prompt {
            return Ok(());
        }
        found = Err(Verdict::fail(format!("it took {:.1} s", said.took.as_secs_f64()), vec![said.exchange]));
    }
    found
}

async fn hostile(target: &Target, kind: Kind) -> Found {
    let long = "x".repeat(LONG);
    for id in HOSTILE.into_iter().chain([long.as_str()]) {
        let bodies = match kind {
            Kind::Close => vec![kind.body(id, "")],
            Kind::Cancel => vec![kind.body(target.fresh("thread"), id), kind.body(id, target.fresh("call"))],
        };
        for body in bodies {
            expect_200(send(target, kind, &body).await?)?;
        }
    }
    for no_id in [json!(7), json!(null), json!({"a": 1}), json!(["a"])] {
        let said = send(target, kind, &kind.body(no_id.clone(), no_id)).await?;
        if said.status >= 500 {
            return Err(Verdict::fail(format!("it was answered {}", said.status), vec![said.exchange]));
        }
    }
    Ok(())
}

async fn discreet(target: &Target, kind: Kind) -> Found {
    let call = finished(target).await?;
    let known = send_about(target, kind, &call).await?;
    let unknown = send(target, kind, &kind.body(target.fresh("thread"), target.fresh("call"))).await?;
    // Another status than 200 is for other probes to find.
    if known.body == unknown.body {
        return Ok(());
    }
    Err(Verdict::fail("the two answers differ", vec![known.exchange, unknown.exchange]))
}

/// The second call has the callback URL of the first, too: that is another probe's business.
async fn call_after_close(target: &Target) -> Found {
    let first = finished(target).await?;
    send_about(target, Kind::Close, &first).await?;
    let mut second = target.operation()?;
    second.invocation["group_id"] = first.thread.as_str().into();
    second.invocation["callback_url"] = first.inbox.url.as_str().into();
    target.invoke(&second).await?;
    let result = |deliveries: &[Delivery]| results(deliveries).nth(1).map(|_| ());
    let seen = first.inbox.until(target.patience.result, result).await;
    seen.ok_or_else(|| second.fail("the call was acknowledged and brought nothing"))
}

async fn cancel_after_result(target: &Target) -> Found {
    let call = finished(target).await?;
    expect_200(send_about(target, Kind::Cancel, &call).await?)?;
    let second = |deliveries: &[Delivery]| results(deliveries).nth(1).map(|_| ());
    match call.inbox.until(target.patience.quiet, second).await {
        None => Ok(()),
        Some(()) => Err(call.fail("a second result came after the cancellation of a call that was over")),
    }
}
