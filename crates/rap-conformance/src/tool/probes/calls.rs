//! Calls: an acknowledgement, then exactly one result.

use rap_protocol::parse_callback;
use serde_json::json;

use crate::report::{Probe, Verdict};
use crate::tool::inbox::{Delivery, Replies, Reply};
use crate::tool::target::{Target, results};
use crate::tool::{Check, ProbeResult};

/// Number of attempts: a single late acknowledgement may be caused by the network or by a busy machine.
const ATTEMPTS: usize = 3;

/// Runs before all other probes that call the operation.
pub(super) const FIRST: &[Check] = &[Check {
    probe: Probe {
        name: "result_is_delivered",
        requirements: &["LC-02", "LC-05", "LC-09", "TC-03"],
        checks: "After an invocation at the toolset's endpoint, a tool_result arrives at the callback URL, in a \
                 thread that is never closed.",
    },
    run: |target| Box::pin(delivered(target)),
}];

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
            checks: "The acknowledgement arrives within one second, at least once in three calls.",
        },
        run: |target| Box::pin(acknowledged_at_once(target)),
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
            name: "one_result_for_a_call",
            requirements: &["LC-08"],
            checks: "After a result that was answered 200, no second result follows.",
        },
        run: |target| Box::pin(one_result(target)),
    },
    Check {
        probe: Probe {
            name: "repeat_counts_once",
            requirements: &["TR-25"],
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
            requirements: &["LC-05", "LC-09"],
            checks: "A result follows an invocation that has all optional fields and some unknown fields.",
        },
        run: |target| Box::pin(optional_fields(target)),
    },
];

async fn delivered(target: &Target) -> ProbeResult {
    let operation_call = target.operation_call()?;
    let call =
        target.call(&operation_call.operation, json!(operation_call.arguments), "", Replies::default())?;
    target.invoke(&call).await?;
    let result = call.result(target.timeouts).await;
    let asks_user = |delivery: &Delivery| matches!(delivery.kind(), "oauth" | "user_choice");
    if result.is_err() && call.inbox.deliveries().iter().any(asks_user) {
        let why = format!(
            "`{}` asks the user something; choose another operation with --operation",
            operation_call.operation
        );
        return Err(Verdict::not_observable(why));
    }
    result?;
    target.operation_works.get_or_init(|| ());
    Ok(())
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
        let call = target.operation()?;
        let took = target.invoke(&call).await?.took;
        if took <= target.timeouts.prompt {
            return Ok(());
        }
        found = Err(call.fail(format!(
            "the acknowledgement took {:.1} s; send it before the work is done",
            took.as_secs_f64()
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

async fn one_result(target: &Target) -> ProbeResult {
    let call = target.operation()?;
    target.invoke(&call).await?;
    call.result(target.timeouts).await?;
    let second = |deliveries: &[Delivery]| results(deliveries).nth(1).map(|_| ());
    match call.inbox.wait_for(target.timeouts.quiet, second).await {
        None => Ok(()),
        Some(()) => Err(call.fail("a second result arrived")),
    }
}

async fn repeat(target: &Target) -> ProbeResult {
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
