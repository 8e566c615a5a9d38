//! Whose a callback is: it goes to the URL of its call and names it, whatever else is going on.

use futures_util::future::join_all;
use serde_json::json;

use crate::report::{Probe, Verdict};
use crate::tool::inbox::Replies;
use crate::tool::target::{Call, Target};
use crate::tool::{Check, Found};

/// How many calls are made at once.
const CALLS: usize = 16;
/// What a server that takes it apart and puts it together again is likely to change.
const ODD_URL: &str = "/a%2Fb/c//%7Euser;v=1?x=1&x=2&empty=&%C3%BC=%20+&next=http%3A%2F%2Fother.example%2F";

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "result_names_its_call",
            requirements: &["LC-11", "TR-12"],
            checks: "A result has the id and the group_id of its invocation, and so has everything that \
                     comes before it.",
        },
        run: |target| Box::pin(names(target)),
    },
    Check {
        probe: Probe {
            name: "call_id_is_echoed",
            requirements: &["LC-11"],
            checks: "A call_id in the invocation stands in the result as well.",
        },
        run: |target| Box::pin(call_id(target)),
    },
    Check {
        probe: Probe {
            name: "callback_url_is_opaque",
            requirements: &["TR-16"],
            checks: "A callback URL with an odd path and a query is used byte for byte.",
        },
        run: |target| Box::pin(opaque(target)),
    },
    Check {
        probe: Probe {
            name: "each_call_has_its_callback_url",
            requirements: &["TR-11", "LC-18"],
            checks: "Two calls of one thread with two callback URLs are answered at one each.",
        },
        run: |target| Box::pin(own_url(target)),
    },
    Check {
        probe: Probe {
            name: "same_id_in_two_threads",
            requirements: &["LC-18"],
            checks: "Two calls with the same id in two threads are two calls.",
        },
        run: |target| Box::pin(same_id(target)),
    },
];

/// It is alone with the server: what mixes here should not show elsewhere.
pub(super) const CROWD: &[Check] = &[Check {
    probe: Probe {
        name: "concurrent_calls_do_not_mix",
        requirements: &["LC-18"],
        checks: "Sixteen calls at once are answered at their own callback URLs, under their own names.",
    },
    run: |target| Box::pin(concurrent(target)),
}];

async fn names(target: &Target) -> Found {
    let call = target.operation()?;
    target.invoke(&call).await?;
    call.result(target.patience).await?;
    named_rightly(&call)
}

async fn call_id(target: &Target) -> Found {
    let mut call = target.operation()?;
    let secondary = target.fresh("secondary");
    call.invocation["call_id"] = secondary.as_str().into();
    target.invoke(&call).await?;
    let result = call.result(target.patience).await?;
    if result.text("call_id") == secondary {
        Ok(())
    } else {
        Err(call.fail("the result has another call_id, or none"))
    }
}

async fn opaque(target: &Target) -> Found {
    // Whether it works at all is another's question.
    drop(target.operation()?);
    let order = target.order()?;
    let call = target.call(&order.operation, json!(order.arguments), ODD_URL, Replies::default())?;
    target.invoke(&call).await?;
    let result = call.result(target.patience).await?;
    if call.inbox.url.ends_with(&result.path) {
        return Ok(());
    }
    let path = result.path.split_once("/callback/").and_then(|(_, rest)| rest.split_once('/'));
    let path = path.map_or("nothing", |(_, rest)| rest);
    Err(call.fail(format!("the URL ended in `{ODD_URL}`, and the result went to `/{path}`")))
}

async fn own_url(target: &Target) -> Found {
    let (one, mut two) = (target.operation()?, target.operation()?);
    two.thread.clone_from(&one.thread);
    two.invocation["group_id"] = one.thread.as_str().into();
    both(target, &one, &two).await
}

async fn same_id(target: &Target) -> Found {
    let (one, mut two) = (target.operation()?, target.operation()?);
    two.id.clone_from(&one.id);
    two.invocation["id"] = one.id.as_str().into();
    both(target, &one, &two).await
}

async fn both(target: &Target, one: &Call, two: &Call) -> Found {
    target.invoke(one).await?;
    target.invoke(two).await?;
    for call in [one, two] {
        call.result(target.patience).await?;
        own_messages(call)?;
    }
    Ok(())
}

async fn concurrent(target: &Target) -> Found {
    let calls = (0..CALLS).map(|_| target.operation()).collect::<Result<Vec<Call>, Verdict>>()?;
    let called = calls.iter().map(|call| async move {
        target.invoke(call).await?;
        call.result(target.patience).await
    });
    join_all(called).await.into_iter().collect::<Result<Vec<_>, Verdict>>()?;
    calls.iter().try_for_each(own_messages)
}

/// Each message at this call's URL names this call, if it names any of ours.
fn own_messages(call: &Call) -> Found {
    for delivery in call.inbox.deliveries() {
        let (thread, id) = (delivery.text("group_id"), delivery.text("id"));
        let foreign = |found: &str, ours: &str, word: &str| found != ours && found.starts_with(word);
        if foreign(thread, &call.thread, "thread_") || foreign(id, &call.id, "call_") {
            return Err(call.fail("a message for another call came to this one's callback URL"));
        }
    }
    Ok(())
}

fn named_rightly(call: &Call) -> Found {
    for delivery in call.inbox.deliveries() {
        if delivery.text("group_id") != call.thread {
            return Err(call.fail(format!("a {} has another group_id, or none", delivery.kind())));
        }
        if delivery.kind() != "view_update" && delivery.text("id") != call.id {
            return Err(call.fail(format!("a {} has another id, or none", delivery.kind())));
        }
    }
    Ok(())
}
