//! Calls: an acknowledgement, then exactly one result.

use rap_protocol::parse_callback;
use serde_json::json;
use tokio::time::Instant;

use crate::report::{Probe, Verdict};
use crate::tool::inbox::{Delivery, Replies, Reply};
use crate::tool::target::{Call, Target, results};
use crate::tool::{Check, ProbeResult, Timeouts};

/// Number of attempts: a single late acknowledgement may be caused by the network or by a busy machine.
const ATTEMPTS: usize = 3;

/// Factor by which the result of a slow operation may take longer than that of any other.
const SLOW_PATIENCE: u32 = 4;

/// Run before all other probes that call the operation.
pub(super) const FIRST: &[Check] = &[
    Check {
        probe: Probe {
            name: "result_is_delivered",
            requirements: &["LC-02", "LC-05", "LC-09", "TC-03"],
            checks: "After an invocation at the toolset's endpoint, a tool_result arrives at the callback URL, in a \
                     thread that was not closed.",
        },
        run: |target| Box::pin(delivered(target)),
    },
    Check {
        probe: Probe {
            name: "one_result_for_a_call",
            requirements: &["LC-08"],
            checks: "After a result that was answered 200, no second result follows.",
        },
        run: |target| Box::pin(one_result(target)),
    },
];

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "acknowledged_with_200",
            requirements: &["TR-03"],
            checks: "An invocation is answered with exactly 200, not with another 2xx status.",
        },
        run: |target| Box::pin(acknowledged_with_200(target)),
    },
    Check {
        probe: Probe {
            name: "acknowledged_at_once",
            requirements: &["TR-03", "TR-04"],
            checks: "The acknowledgement arrives within half a second, at least once in three calls.",
        },
        run: |target| Box::pin(acknowledged_at_once(target)),
    },
    Check {
        probe: Probe {
            name: "acknowledged_before_the_work",
            requirements: &["TR-03", "TR-04", "LC-05", "LC-07"],
            checks: "A slow operation is acknowledged at once, and its result arrives later.",
        },
        run: |target| Box::pin(acknowledged_before_the_work(target)),
    },
    Check {
        probe: Probe {
            name: "acknowledged_before_delivery",
            requirements: &["TR-04", "LC-05", "LC-07"],
            checks: "The acknowledgement is sent before the delivery of the result is answered.",
        },
        run: |target| Box::pin(acknowledged_before_delivery(target)),
    },
    Check {
        probe: Probe {
            name: "repeat_counts_once",
            requirements: &[],
            checks: "A repeated invocation, as after a lost acknowledgement, is acknowledged each time, and only one \
                     result follows.",
        },
        run: |target| Box::pin(repeat(target)),
    },
    Check {
        probe: Probe {
            name: "callbacks_are_json",
            requirements: &["TR-01"],
            checks: "A callback is a POST of a JSON object with Content-Type: application/json and has the fields of \
                     its type.",
        },
        run: |target| Box::pin(json_posts(target)),
    },
    Check {
        probe: Probe {
            name: "optional_fields_are_taken",
            requirements: &[],
            checks: "A result follows an invocation that has all optional fields and some unknown fields.",
        },
        run: |target| Box::pin(optional_fields(target)),
    },
];

/// Calls the operation for the first time.
async fn first_call(target: &Target) -> Result<Call, Verdict> {
    let operation_call = target.operation_call()?;
    let call =
        target.call(&operation_call.operation, json!(operation_call.arguments), "", Replies::default())?;
    target.invoke(&call).await?;
    Ok(call)
}

async fn delivered(target: &Target) -> ProbeResult {
    let call = first_call(target).await?;
    let result = call.result(target.timeouts).await;
    let asks_user = |delivery: &Delivery| matches!(delivery.kind(), "oauth" | "user_choice");
    if result.is_err() && call.inbox.deliveries().iter().any(asks_user) {
        let why = "the operation asks the user something; choose another operation with --operation";
        return Err(Verdict::not_observable(why));
    }
    result?;
    target.operation_works.get_or_init(|| (call.thread.clone(), call.id.clone()));
    Ok(())
}

async fn one_result(target: &Target) -> ProbeResult {
    let no_result = |_| Verdict::not_observable("no result arrived: see the probe result_is_delivered");
    let call = first_call(target).await.map_err(no_result)?;
    call.result(target.timeouts).await.map_err(no_result)?;
    let second = |deliveries: &[Delivery]| results(deliveries).nth(1).map(|_| ());
    match call.inbox.wait_for(target.timeouts.quiet, second).await {
        None => Ok(()),
        Some(()) => {
            target.repeats_results.get_or_init(|| ());
            Err(call.fail("a second result arrived"))
        }
    }
}

async fn acknowledged_with_200(target: &Target) -> ProbeResult {
    let call = target.operation()?;
    match target.invoke(&call).await?.status {
        200 => Ok(()),
        status => Err(call.fail(format!("the invocation was answered {status} instead of 200"))),
    }
}

async fn acknowledged_at_once(target: &Target) -> ProbeResult {
    let mut found = Ok(());
    for _ in 0..ATTEMPTS {
        let (call, prompt) = (target.operation()?, target.prompt().await?);
        let took = target.invoke(&call).await?.took;
        if took <= prompt {
            return Err(Verdict::seen(format!(
                "An invocation was acknowledged after {} ms.",
                took.as_millis()
            )));
        }
        found = Err(call.fail(format!(
            "the acknowledgement took {:.1} s; send it before the work is done",
            took.as_secs_f64()
        )));
    }
    found
}

/// A server that works before it acknowledges an invocation is late if the work takes long enough.
async fn acknowledged_before_the_work(target: &Target) -> ProbeResult {
    let mut found = Ok(());
    for _ in 0..ATTEMPTS {
        let (call, prompt) = (target.slow_operation()?, target.prompt().await?);
        let acknowledged = target.invoke(&call).await?.took;
        let sent = Instant::now() - acknowledged;
        let patient = Timeouts { result: target.timeouts.result * SLOW_PATIENCE, ..target.timeouts };
        let no_result = |_| Verdict::not_observable("the slow operation takes too long; choose another one");
        let worked = call.result(patient).await.map_err(no_result)?.at.duration_since(sent);
        let (acknowledged_ms, worked_ms) = (acknowledged.as_millis(), worked.as_millis());
        if worked < target.timeouts.prompt * 2 {
            return Err(Verdict::not_observable(format!(
                "the slow operation returned after {worked_ms} ms; name one that works for two seconds or longer with \
                 --slow-operation"
            )));
        }
        if acknowledged <= prompt.min(worked / 2) {
            return Err(Verdict::seen(format!(
                "A slow operation was acknowledged after {acknowledged_ms} ms, and its result arrived after {worked_ms} ms."
            )));
        }
        if let Ok(quick) = target.operation()
            && target.invoke(&quick).await?.took > prompt
        {
            return Err(Verdict::not_observable(
                "every acknowledgement is late: see the probe acknowledged_at_once",
            ));
        }
        found = Err(call.fail(format!(
            "the acknowledgement of a slow operation took {acknowledged_ms} ms, and its result {worked_ms} ms; \
             acknowledge before the work is done"
        )));
    }
    found
}

async fn acknowledged_before_delivery(target: &Target) -> ProbeResult {
    let call = target.operation_answering(&[Reply::Held])?;
    let arrived = async {
        call.inbox
            .wait_for(target.timeouts.result, |deliveries| results(deliveries).next().map(|_| ()))
            .await;
        // A merely late acknowledgement is the failure of another probe.
        tokio::time::sleep(target.timeouts.prompt + target.timeouts.quiet).await;
    };
    let outcome = tokio::select! {
        acknowledged = target.invoke(&call) => acknowledged.map(|_| ()),
        () = arrived => Err(call.fail("the acknowledgement was not sent until the result had been answered")),
    };
    call.inbox.release();
    outcome
}

async fn repeat(target: &Target) -> ProbeResult {
    target.one_result()?;
    let call = target.operation()?;
    target.invoke(&call).await?;
    target.invoke(&call).await?;
    call.result(target.timeouts).await?;
    target.invoke(&call).await?;
    let second = |deliveries: &[Delivery]| results(deliveries).nth(1).map(|_| ());
    match call.inbox.wait_for(target.timeouts.quiet, second).await {
        None => Ok(()),
        Some(()) => Err(call.fail("an invocation that was sent three times produced more than one result")),
    }
}

async fn json_posts(target: &Target) -> ProbeResult {
    let call = target.operation()?;
    target.invoke(&call).await?;
    call.result(target.timeouts).await?;
    for delivery in call.inbox.deliveries() {
        let essence = delivery.content_type.split(';').next().unwrap_or("").trim();
        if delivery.method != "POST" {
            return Err(call.fail(format!("a callback was sent with {} instead of POST", delivery.method)));
        }
        if !essence.eq_ignore_ascii_case("application/json") {
            return Err(call.fail(format!(
                "a callback had the Content-Type `{}` instead of `application/json`",
                delivery.content_type
            )));
        }
        if let Err(invalid) = parse_callback(&delivery.body) {
            return Err(call.fail(format!("a callback is invalid: {invalid}")));
        }
    }
    Ok(())
}

async fn optional_fields(target: &Target) -> ProbeResult {
    let mut call = target.operation()?;
    call.invocation["user_id"] = "user_of_the_checker".into();
    call.invocation["thread_ancestors"] = json!([target.fresh_id("root"), target.fresh_id("parent")]);
    call.invocation["call_id"] = target.fresh_id("secondary").into();
    call.invocation["x-unknown-field"] = json!({"a": [1, 2, null]});
    target.invoke(&call).await?;
    call.result(target.timeouts).await?;
    Ok(())
}
