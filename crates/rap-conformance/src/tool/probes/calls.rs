//! The way of a call: acknowledgement, then one result.

use rap_protocol::parse_callback;
use serde_json::json;

use crate::report::{Probe, Verdict};
use crate::tool::inbox::{Delivery, Replies, Reply};
use crate::tool::target::{Target, results};
use crate::tool::{Check, Found};

/// One late acknowledgement may be the network's doing, or a busy machine's.
const ATTEMPTS: usize = 3;

/// All others that call the operation wait for this one.
pub(super) const FIRST: &[Check] = &[Check {
    probe: Probe {
        name: "result_is_delivered",
        requirements: &["LC-02", "LC-05", "LC-09", "TC-03"],
        checks: "An invocation at the toolset's endpoint brings a tool_result to its callback URL, in a \
                 thread that is never closed.",
    },
    run: |target| Box::pin(delivered(target)),
}];

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "acknowledged_with_200",
            requirements: &["TR-03"],
            checks: "An invocation is answered 200, and with no other status that looks like success.",
        },
        run: |target| Box::pin(acknowledged_with_200(target)),
    },
    Check {
        probe: Probe {
            name: "acknowledged_at_once",
            requirements: &["TR-03", "TR-04"],
            checks: "The acknowledgement comes within a second, at least once in three calls.",
        },
        run: |target| Box::pin(acknowledged_at_once(target)),
    },
    Check {
        probe: Probe {
            name: "acknowledged_before_delivery",
            requirements: &["TR-04", "LC-05", "LC-07"],
            checks: "The acknowledgement does not wait until the result was delivered.",
        },
        run: |target| Box::pin(acknowledged_before_delivery(target)),
    },
    Check {
        probe: Probe {
            name: "one_result_for_a_call",
            requirements: &["LC-08"],
            checks: "After a result that was answered 200 no second one follows.",
        },
        run: |target| Box::pin(one_result(target)),
    },
    Check {
        probe: Probe {
            name: "repeat_counts_once",
            requirements: &["TR-25"],
            checks: "The same invocation twice, as after a lost acknowledgement, is acknowledged twice and \
                     brings one result.",
        },
        run: |target| Box::pin(repeat(target)),
    },
    Check {
        probe: Probe {
            name: "callbacks_are_json",
            requirements: &["TR-01"],
            checks: "A callback is a POST of a JSON object with Content-Type: application/json, and has the \
                     fields of its type.",
        },
        run: |target| Box::pin(json_posts(target)),
    },
    Check {
        probe: Probe {
            name: "optional_fields_are_taken",
            requirements: &["LC-05", "LC-09"],
            checks: "An invocation with all optional fields, and some that nobody knows, brings a result \
                     like any other.",
        },
        run: |target| Box::pin(optional_fields(target)),
    },
];

async fn delivered(target: &Target) -> Found {
    let order = target.order()?;
    let call = target.call(&order.operation, json!(order.arguments), "", Replies::default())?;
    target.invoke(&call).await?;
    let result = call.result(target.patience).await;
    let asks = |delivery: &Delivery| matches!(delivery.kind(), "oauth" | "user_choice");
    if result.is_err() && call.inbox.deliveries().iter().any(asks) {
        let why =
            format!("`{}` wants to hear from a person; name another one with --operation", order.operation);
        return Err(Verdict::not_observable(why));
    }
    result?;
    target.works.get_or_init(|| ());
    Ok(())
}

async fn acknowledged_with_200(target: &Target) -> Found {
    let call = target.operation()?;
    match target.invoke(&call).await?.status {
        200 => Ok(()),
        status => Err(call.fail(format!("it was answered {status}"))),
    }
}

async fn acknowledged_at_once(target: &Target) -> Found {
    let mut found = Ok(());
    for _ in 0..ATTEMPTS {
        let call = target.operation()?;
        let took = target.invoke(&call).await?.took;
        if took <= target.patience.prompt {
            return Ok(());
        }
        found = Err(call.fail(format!("the acknowledgement took {:.1} s", took.as_secs_f64())));
    }
    found
}

async fn acknowledged_before_delivery(target: &Target) -> Found {
    let call = target.operation_answering(&[Reply::Held])?;
    let arrived = async {
        call.inbox.until(target.patience.result, |deliveries| results(deliveries).next().map(|_| ())).await;
        // One that is merely late is for another probe to find.
        tokio::time::sleep(target.patience.prompt + target.patience.quiet).await;
    };
    let outcome = tokio::select! {
        acknowledged = target.invoke(&call) => acknowledged.map(|_| ()),
        () = arrived => Err(call.fail("the acknowledgement waited for our answer to the result")),
    };
    call.inbox.release();
    outcome
}

async fn one_result(target: &Target) -> Found {
    let call = target.operation()?;
    target.invoke(&call).await?;
    call.result(target.patience).await?;
    let second = |deliveries: &[Delivery]| results(deliveries).nth(1).map(|_| ());
    match call.inbox.until(target.patience.quiet, second).await {
        None => Ok(()),
        Some(()) => Err(call.fail("a second result came")),
    }
}

async fn repeat(target: &Target) -> Found {
    let call = target.operation()?;
    target.invoke(&call).await?;
    target.invoke(&call).await?;
    call.result(target.patience).await?;
    target.invoke(&call).await?;
    let second = |deliveries: &[Delivery]| results(deliveries).nth(1).map(|_| ());
    match call.inbox.until(target.patience.quiet, second).await {
        None => Ok(()),
        Some(()) => Err(call.fail("one call that was sent three times brought more than one result")),
    }
}

async fn json_posts(target: &Target) -> Found {
    let call = target.operation()?;
    target.invoke(&call).await?;
    call.result(target.patience).await?;
    for delivery in call.inbox.deliveries() {
        let essence = delivery.content_type.split(';').next().unwrap_or("").trim();
        if delivery.method != "POST" {
            return Err(call.fail(format!("a callback was a {}", delivery.method)));
        }
        if !essence.eq_ignore_ascii_case("application/json") {
            return Err(call.fail(format!("a callback had the Content-Type `{}`", delivery.content_type)));
        }
        if let Err(invalid) = parse_callback(&delivery.body) {
            return Err(call.fail(format!("a callback is invalid: {invalid}")));
        }
    }
    Ok(())
}

async fn optional_fields(target: &Target) -> Found {
    let mut call = target.operation()?;
    call.invocation["user_id"] = "user_of_the_checker".into();
    call.invocation["thread_ancestors"] = json!([target.fresh("root"), target.fresh("parent")]);
    call.invocation["call_id"] = target.fresh("secondary").into();
    call.invocation["x-nobody-knows-this"] = json!({"a": [1, 2, null]});
    target.invoke(&call).await?;
    call.result(target.patience).await?;
    Ok(())
}
