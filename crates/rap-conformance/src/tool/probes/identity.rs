//! Callbacks go to the URL of their call and carry its ids, even with concurrent calls.

use futures_util::future::join_all;
use serde_json::json;

use crate::report::{Probe, Verdict};
use crate::tool::inbox::Replies;
use crate::tool::target::{Call, Target};
use crate::tool::{Check, ProbeResult};

/// Number of concurrent calls.
const CALLS: usize = 16;
/// End of a callback URL that a server is likely to change if it parses and rebuilds the URL.
const ODD_URL: &str = "/a%2Fb/c//%7Euser;v=1?x=1&x=2&empty=&%C3%BC=%20+&next=http%3A%2F%2Fother.example%2F";

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "result_names_its_call",
            requirements: &["LC-11", "TR-12"],
            checks: "A result, and every other callback of the call, has the id and the group_id of its invocation.",
        },
        run: |target| Box::pin(names(target)),
    },
    Check {
        probe: Probe {
            name: "call_id_is_echoed",
            requirements: &[],
            checks: "The call_id of an invocation is repeated in its result.",
        },
        run: |target| Box::pin(call_id(target)),
    },
    Check {
        probe: Probe {
            name: "callback_url_is_opaque",
            requirements: &["TR-16"],
            checks: "A callback URL with an unusual path and a query is used unchanged.",
        },
        run: |target| Box::pin(opaque(target)),
    },
    Check {
        probe: Probe {
            name: "each_call_has_its_callback_url",
            requirements: &["TR-11", "LC-18"],
            checks: "The results of two calls of one thread each arrive at the callback URL of their own call.",
        },
        run: |target| Box::pin(own_url(target)),
    },
    Check {
        probe: Probe {
            name: "same_id_in_two_threads",
            requirements: &["LC-18"],
            checks: "Two calls with the same id in different threads are different calls.",
        },
        run: |target| Box::pin(same_id(target)),
    },
];

/// Runs alone, so that a failure under load does not affect other probes.
pub(super) const CONCURRENT: &[Check] = &[Check {
    probe: Probe {
        name: "concurrent_calls_do_not_mix",
        requirements: &["LC-18"],
        checks: "The results of sixteen concurrent calls arrive at their own callback URLs with their own ids.",
    },
    run: |target| Box::pin(concurrent(target)),
}];

async fn names(target: &Target) -> ProbeResult {
    let call = target.operation()?;
    target.invoke(&call).await?;
    call.result(target.timeouts).await?;
    expect_own_ids(&call)
}

async fn call_id(target: &Target) -> ProbeResult {
    let mut call = target.operation()?;
    let secondary = target.fresh_id("secondary");
    call.invocation["call_id"] = secondary.as_str().into();
    target.invoke(&call).await?;
    let result = call.result(target.timeouts).await?;
    if result.text("call_id") == secondary {
        Ok(())
    } else {
        Err(call.fail("the result does not repeat the call_id of its invocation"))
    }
}

async fn opaque(target: &Target) -> ProbeResult {
    // Not observable if the operation returns no result at all.
    drop(target.operation()?);
    let operation_call = target.operation_call()?;
    let call = target.call(
        &operation_call.operation,
        json!(operation_call.arguments),
        ODD_URL,
        Replies::default(),
    )?;
    target.invoke(&call).await?;
    let result = call.result(target.timeouts).await?;
    if call.inbox.url.ends_with(&result.path) {
        return Ok(());
    }
    let path = result.path.split_once("/callback/").and_then(|(_, rest)| rest.split_once('/'));
    let path = path.map_or("nothing", |(_, rest)| rest);
    Err(call.fail(format!("the callback URL ended in `{ODD_URL}`, but the result was sent to `/{path}`")))
}

async fn own_url(target: &Target) -> ProbeResult {
    let (one, mut two) = (target.operation()?, target.operation()?);
    two.thread.clone_from(&one.thread);
    two.invocation["group_id"] = one.thread.as_str().into();
    both(target, &one, &two).await
}

async fn same_id(target: &Target) -> ProbeResult {
    let (one, mut two) = (target.operation()?, target.operation()?);
    two.id.clone_from(&one.id);
    two.invocation["id"] = one.id.as_str().into();
    both(target, &one, &two).await
}

async fn both(target: &Target, one: &Call, two: &Call) -> ProbeResult {
    target.invoke(one).await?;
    target.invoke(two).await?;
    for call in [one, two] {
        call.result(target.timeouts).await?;
        only_own_messages(call)?;
    }
    Ok(())
}

async fn concurrent(target: &Target) -> ProbeResult {
    let calls = (0..CALLS).map(|_| target.operation()).collect::<Result<Vec<Call>, Verdict>>()?;
    let called = calls.iter().map(|call| async move {
        target.invoke(call).await?;
        call.result(target.timeouts).await
    });
    join_all(called).await.into_iter().collect::<Result<Vec<_>, Verdict>>()?;
    calls.iter().try_for_each(only_own_messages)
}

/// Fails if a message at this call's URL has the ids of another call of the checker.
fn only_own_messages(call: &Call) -> ProbeResult {
    for delivery in call.inbox.deliveries() {
        let (thread, id) = (delivery.text("group_id"), delivery.text("id"));
        let is_foreign = |found: &str, ours: &str, prefix: &str| found != ours && found.starts_with(prefix);
        if is_foreign(thread, &call.thread, "thread_") || is_foreign(id, &call.id, "call_") {
            return Err(call.fail("a message of another call arrived at the callback URL of this call"));
        }
    }
    Ok(())
}

fn expect_own_ids(call: &Call) -> ProbeResult {
    for delivery in call.inbox.deliveries() {
        if delivery.text("group_id") != call.thread {
            return Err(
                call.fail(format!("a {} does not have the group_id of its invocation", delivery.kind()))
            );
        }
        if delivery.kind() != "view_update" && delivery.text("id") != call.id {
            return Err(call.fail(format!("a {} does not have the id of its invocation", delivery.kind())));
        }
    }
    Ok(())
}
