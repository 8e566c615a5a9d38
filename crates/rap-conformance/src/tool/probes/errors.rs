//! Errors are results, and what can not be answered with one is refused.

use bytes::Bytes;
use rap_protocol::redact;
use serde_json::{Value, json};

use crate::report::{Probe, Verdict};
use crate::tool::inbox::Replies;
use crate::tool::target::{Call, Credentials, Target};
use crate::tool::{Check, Found, choice};

const UNKNOWN: &str = "rap_check_no_such_operation";
/// Deeper than any JSON that means something.
const NESTING: usize = 20_000;
/// What programs print when they fall over.
const TRACES: [&str; 5] =
    ["Traceback (most recent call last)", "panicked at", "Exception in thread", "goroutine ", "\n    at "];

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "unknown_operation_is_an_error_result",
            requirements: &["LC-24", "LC-10", "LC-27"],
            checks: "An operation that is not in the toolset is acknowledged with 200 and brings an error \
                     result.",
        },
        run: |target| Box::pin(unknown_operation(target)),
    },
    Check {
        probe: Probe {
            name: "invalid_arguments_are_an_error_result",
            requirements: &["LC-25", "LC-31"],
            checks: "Arguments that do not fit the tool's own schema are acknowledged with 200 and bring an \
                     error result.",
        },
        run: |target| Box::pin(invalid_arguments(target)),
    },
    Check {
        probe: Probe {
            name: "defects_are_error_results",
            requirements: &["TR-09"],
            checks: "An invocation without arguments, or with arguments that are no object, is acknowledged \
                     with 200 and brings an error result, since it says where to.",
        },
        run: |target| Box::pin(defects(target)),
    },
    Check {
        probe: Probe {
            name: "errors_say_what_is_wrong",
            requirements: &["LC-26"],
            checks: "The text of an error result goes on after `Error: `, so that a model can act on it.",
        },
        run: |target| Box::pin(telling(target)),
    },
    Check {
        probe: Probe {
            name: "errors_hide_what_is_inside",
            requirements: &["LC-33"],
            checks: "No stack trace and no path of a file stands in an error result.",
        },
        run: |target| Box::pin(discreet(target)),
    },
    Check {
        probe: Probe {
            name: "callback_urls_are_not_shown",
            requirements: &["LC-34"],
            checks: "No acknowledgement and no result repeats the callback URL.",
        },
        run: |target| Box::pin(secretive(target)),
    },
    Check {
        probe: Probe {
            name: "unreadable_invocation_is_refused",
            requirements: &["TR-23"],
            checks: "What is no JSON, or lacks an id, a group_id or a usable callback_url, is answered 4xx.",
        },
        run: |target| Box::pin(unreadable(target)),
    },
    Check {
        probe: Probe {
            name: "deep_json_does_no_harm",
            requirements: &["TR-23", "LC-31"],
            checks: "JSON that nests 20,000 deep is answered below 500, and the server goes on.",
        },
        run: |target| Box::pin(deep(target)),
    },
    Check {
        probe: Probe {
            name: "stale_version_is_409",
            requirements: &["TR-08"],
            checks: "A toolset_version that is not the manifest's is answered 409.",
        },
        run: |target| Box::pin(stale(target)),
    },
    Check {
        probe: Probe {
            name: "stale_call_is_not_lost",
            requirements: &["LC-12"],
            checks: "A call with another toolset_version is refused, or brings a result.",
        },
        run: |target| Box::pin(stale_is_not_lost(target)),
    },
];

/// A call of something that is not there, with all that it brought.
async fn unknown(target: &Target) -> Result<Call, Verdict> {
    let call = target.call(UNKNOWN, json!({}), "", Replies::default())?;
    target.invoke(&call).await?;
    call.result(target.patience).await?;
    Ok(call)
}

async fn unknown_operation(target: &Target) -> Found {
    expect_error(target, &target.call(UNKNOWN, json!({}), "", Replies::default())?).await
}

async fn invalid_arguments(target: &Target) -> Found {
    let hidden = || Verdict::not_observable("no schema of a harmless tool forbids any arguments");
    let misfit = choice::misfit(target.toolset()?, target.order().ok()).ok_or_else(hidden)?;
    let call = target.call(&misfit.operation, Value::Object(misfit.arguments), "", Replies::default())?;
    expect_error(target, &call).await
}

async fn defects(target: &Target) -> Found {
    let order = target.order()?;
    for arguments in [Some(json!("none")), Some(json!([1, 2])), None] {
        let mut call = target.call(&order.operation, json!({}), "", Replies::default())?;
        let fields = call.invocation.as_object_mut().expect("bug: an invocation is an object");
        match arguments {
            Some(arguments) => fields.insert("arguments".into(), arguments),
            None => fields.remove("arguments"),
        };
        expect_error(target, &call).await?;
    }
    Ok(())
}

async fn expect_error(target: &Target, call: &Call) -> Found {
    target.invoke(call).await?;
    if call.result(target.patience).await?.says().starts_with("Error:") {
        return Ok(());
    }
    Err(call.fail("the result does not begin with `Error: `"))
}

async fn telling(target: &Target) -> Found {
    let call = unseen(unknown(target).await)?;
    let text = call.result(target.patience).await?.says();
    let words = text.trim_start_matches("Error:").split_whitespace().count();
    if words >= 2 { Ok(()) } else { Err(call.fail("the error does not say what is wrong")) }
}

async fn discreet(target: &Target) -> Found {
    let mut calls = vec![unseen(unknown(target).await)?];
    if let Some(misfit) = choice::misfit(target.toolset()?, target.order().ok()) {
        let call = target.call(&misfit.operation, Value::Object(misfit.arguments), "", Replies::default())?;
        target.invoke(&call).await?;
        calls.push(call);
    }
    for call in calls {
        let text = unseen(call.result(target.patience).await)?.says();
        let path = |line: &str| !line.contains("://") && redact::text(line) != line.trim();
        if TRACES.iter().any(|trace| text.contains(trace)) || text.lines().any(path) {
            return Err(call.fail("the error shows something of the server's inside"));
        }
    }
    Ok(())
}

/// The callback URL is known by its token, which stands behind the last slash.
async fn secretive(target: &Target) -> Found {
    let mut calls = vec![target.call(UNKNOWN, json!({}), "", Replies::default())?];
    calls.extend(target.operation().ok());
    for call in calls {
        let token = call.inbox.url.rsplit('/').next().unwrap_or_default();
        let said = unseen(target.invoke(&call).await)?;
        unseen(call.result(target.patience).await)?;
        let shows = |text: &str| text.contains(token);
        let deliveries = call.inbox.deliveries();
        if shows(&String::from_utf8_lossy(&said.body))
            || deliveries.iter().any(|delivery| shows(&delivery.says()))
        {
            return Err(call.fail("the callback URL was repeated, where others may read it"));
        }
    }
    Ok(())
}

async fn unreadable(target: &Target) -> Found {
    let call = target.call(UNKNOWN, json!({}), "", Replies::default())?;
    let changed = |field: &str, value: Option<Value>| {
        let mut body = call.invocation.clone();
        let fields = body.as_object_mut().expect("bug: an invocation is an object");
        match value {
            Some(value) => fields.insert(field.into(), value),
            None => fields.remove(field),
        };
        body.to_string()
    };
    let bodies = [
        "{\"operation\": ".to_owned(),
        "[]".to_owned(),
        "null".to_owned(),
        changed("id", None),
        changed("id", Some(json!(7))),
        changed("group_id", None),
        changed("callback_url", None),
        changed("callback_url", Some(json!("file:///etc/passwd"))),
        changed("callback_url", Some(json!("/relative"))),
    ];
    for body in bodies {
        let said = target.post_to_endpoint(body.into(), Credentials::Ours).await?;
        if !(400..500).contains(&said.status) {
            let what =
                format!("it was answered {}, and nobody can be told what is wrong with it", said.status);
            return Err(Verdict::fail(what, vec![said.exchange]));
        }
    }
    Ok(())
}

async fn deep(target: &Target) -> Found {
    let call = target.call(UNKNOWN, json!({"x": "HERE"}), "", Replies::default())?;
    let deep = format!("{}{}", "[".repeat(NESTING), "]".repeat(NESTING));
    let body = call.invocation.to_string().replace("\"HERE\"", &deep);
    let said = target.post_to_endpoint(Bytes::from(body), Credentials::Ours).await?;
    if said.status >= 500 {
        return Err(Verdict::fail(format!("it was answered {}", said.status), vec![said.exchange]));
    }
    target.discover().await?;
    Ok(())
}

fn stale_call(target: &Target) -> Result<Call, Verdict> {
    if target.toolset()?.version.is_none() {
        return Err(Verdict::not_observable("the toolset has no version"));
    }
    let mut call = target.operation()?;
    call.invocation["toolset_version"] = "rap-check-no-such-version".into();
    Ok(call)
}

async fn stale(target: &Target) -> Found {
    let call = stale_call(target)?;
    let said = target.send_invocation(&call, Credentials::Ours).await?;
    if said.status == 409 {
        Ok(())
    } else {
        Err(call.fail(format!("it was answered {} and not 409", said.status)))
    }
}

async fn stale_is_not_lost(target: &Target) -> Found {
    let call = stale_call(target)?;
    let said = target.send_invocation(&call, Credentials::Ours).await?;
    if said.status >= 500 {
        return Err(
            call.fail(format!("it was answered {}, so that it would be sent again and again", said.status))
        );
    }
    if said.status >= 400 {
        return Ok(());
    }
    call.result(target.patience).await.map(|_| ())
}

/// Where another probe says that there is no error result, this one has nothing to look at.
fn unseen<T>(outcome: Result<T, Verdict>) -> Result<T, Verdict> {
    outcome.map_err(|_| {
        Verdict::not_observable("no error result came: see unknown_operation_is_an_error_result")
    })
}
