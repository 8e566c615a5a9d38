//! Errors are reported as results. Invocations for which no result can be delivered are rejected.

use std::ops::Range;

use bytes::Bytes;
use rap_protocol::redact;
use serde_json::{Value, json};

use crate::canary::Canary;
use crate::report::{Probe, Verdict};
use crate::tool::inbox::{Delivery, Replies};
use crate::tool::target::{Call, Credentials, Target, UNKNOWN, results};
use crate::tool::{Check, ProbeResult};

/// Size of a large argument, in bytes. It is far below any reasonable limit of a message.
const LARGE: usize = 256 * 1024;
/// Words of which an error message has at least one. The specification has no mark for errors.
const ERROR_WORDS: [&str; 24] = [
    "error",
    "fail",
    "unknown",
    "invalid",
    "unsupported",
    "unrecogni",
    "unexpected",
    "missing",
    "required",
    "expected",
    "refused",
    "rejected",
    "denied",
    "exception",
    "no such",
    "not ",
    "n't",
    "cannot",
    "must",
    "has to",
    "have to",
    "bad ",
    "wrong",
    "unable",
];
/// Nesting depth that no valid message reaches.
const NESTING: usize = 20_000;
/// Typical beginnings of stack traces.
const TRACES: [&str; 5] =
    ["Traceback (most recent call last)", "panicked at", "Exception in thread", "goroutine ", "\n    at "];

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "unknown_operation_is_an_error_result",
            requirements: &["LC-24", "LC-10", "LC-27"],
            checks: "An invocation of an operation that is not in the toolset is acknowledged with 200, and an \
                     error result follows.",
        },
        run: |target| Box::pin(unknown_operation(target)),
    },
    Check {
        probe: Probe {
            name: "unknown_operation_makes_no_subscription",
            requirements: &["LC-24"],
            checks: "The result of an operation that is not in the toolset does not have `subscription: true`.",
        },
        run: |target| Box::pin(no_subscription(target)),
    },
    Check {
        probe: Probe {
            name: "invalid_arguments_are_an_error_result",
            requirements: &["LC-25", "LC-31"],
            checks: "Invocations without arguments, or with a value of another type than the tool's schema says, are \
                     acknowledged with 200, and an error result follows.",
        },
        run: |target| Box::pin(invalid_arguments(target)),
    },
    Check {
        probe: Probe {
            name: "defects_are_error_results",
            requirements: &["TR-09"],
            checks: "An invocation without `arguments`, or with `arguments` that are not an object, is \
                     acknowledged with 200, and an error result follows, because its callback URL is known.",
        },
        run: |target| Box::pin(defects(target)),
    },
    Check {
        probe: Probe {
            name: "errors_say_what_is_wrong",
            requirements: &["LC-26"],
            checks: "The text of an error result has a description, so that a model can act on it.",
        },
        run: |target| Box::pin(informative(target)),
    },
    Check {
        probe: Probe {
            name: "errors_begin_with_error",
            requirements: &[],
            checks: "The text of an error result begins with `Error: `.",
        },
        run: |target| Box::pin(prefix(target)),
    },
    Check {
        probe: Probe {
            name: "errors_hide_what_is_inside",
            requirements: &["LC-33"],
            checks: "An error result contains no stack trace and no file path.",
        },
        run: |target| Box::pin(no_internal_details(target)),
    },
    Check {
        probe: Probe {
            name: "callback_urls_are_not_shown",
            requirements: &["LC-34"],
            checks: "No acknowledgement and no result contains the callback URL.",
        },
        run: |target| Box::pin(no_callback_url(target)),
    },
    Check {
        probe: Probe {
            name: "unreadable_invocation_does_no_harm",
            requirements: &["TR-23"],
            checks: "A body that is not JSON, or that has no `id`, no `group_id` or no valid `callback_url`, is \
                     answered with a status below 500.",
        },
        run: |target| Box::pin(unreadable(target, 200..500)),
    },
    Check {
        probe: Probe {
            name: "unreadable_invocation_is_4xx",
            requirements: &[],
            checks: "A body that is not JSON, or that has no `id`, no `group_id` or no valid `callback_url`, is \
                     answered 4xx, because its result could not be delivered.",
        },
        run: |target| Box::pin(unreadable(target, 400..500)),
    },
    Check {
        probe: Probe {
            name: "group_ids_are_no_paths",
            requirements: &["TR-23", "LC-31"],
            checks: "Invocations whose `group_id` is a path make no file there and are answered with a status below 500.",
        },
        run: |target| Box::pin(group_ids(target)),
    },
    Check {
        probe: Probe {
            name: "large_invocation_is_taken",
            requirements: &["TR-09"],
            checks: "An invocation with an argument of 256 KiB is acknowledged with 200, and a result follows.",
        },
        run: |target| Box::pin(large(target)),
    },
    Check {
        probe: Probe {
            name: "deep_json_does_no_harm",
            requirements: &["TR-23", "LC-31"],
            checks: "JSON with 20,000 levels of nesting is answered with a status below 500, and the server keeps \
                     running.",
        },
        run: |target| Box::pin(deep(target)),
    },
    Check {
        probe: Probe {
            name: "stale_version_is_409",
            requirements: &["TR-08"],
            checks: "An invocation whose `toolset_version` is not the current version is answered 409.",
        },
        run: |target| Box::pin(stale(target)),
    },
    Check {
        probe: Probe {
            name: "stale_call_is_not_lost",
            requirements: &["LC-12"],
            checks: "An invocation with an outdated `toolset_version` is answered 4xx, or a result follows.",
        },
        run: |target| Box::pin(stale_is_not_lost(target)),
    },
];

/// Calls an operation that does not exist, and waits for the result.
async fn unknown(target: &Target) -> Result<Call, Verdict> {
    let call = target.call(UNKNOWN, json!({}), "", Replies::default())?;
    target.invoke(&call).await?;
    call.result(target.timeouts).await?;
    Ok(call)
}

async fn unknown_operation(target: &Target) -> ProbeResult {
    expect_error(target, &target.call(UNKNOWN, json!({}), "", Replies::default())?).await
}

async fn no_subscription(target: &Target) -> ProbeResult {
    let call = or_not_observable(unknown(target).await)?;
    if call.result(target.timeouts).await?.message["subscription"] == true {
        return Err(call.fail(
            "the result of an unknown operation has `subscription: true`, but nothing was subscribed",
        ));
    }
    Ok(())
}

async fn invalid_arguments(target: &Target) -> ProbeResult {
    for call in target.invalid_calls()? {
        expect_error(target, &call).await?;
    }
    Ok(())
}

/// A missing `arguments` may count as an empty object, so any result will do for it.
async fn defects(target: &Target) -> ProbeResult {
    let operation_call = target.operation_call()?;
    for arguments in [Some(json!("none")), Some(json!([1, 2])), None] {
        let mut call = target.call(&operation_call.operation, json!({}), "", Replies::default())?;
        let fields = call.invocation.as_object_mut().expect("bug: an invocation is an object");
        match arguments {
            Some(arguments) => {
                fields.insert("arguments".into(), arguments);
                expect_error(target, &call).await?;
            }
            None => {
                fields.remove("arguments");
                target.invoke(&call).await?;
                call.result(target.timeouts).await?;
            }
        }
    }
    Ok(())
}

async fn expect_error(target: &Target, call: &Call) -> ProbeResult {
    target.invoke(call).await?;
    if is_error(call, &call.result(target.timeouts).await?.result_text()) {
        return Ok(());
    }
    Err(call.fail("the text of the result does not read like an error"))
}

/// Returns true if a text has a word that is usual in errors, or names the operation that does not exist.
fn is_error(call: &Call, text: &str) -> bool {
    let text = text.to_lowercase();
    let operation = call.invocation["operation"].as_str().unwrap_or_default();
    ERROR_WORDS.iter().any(|word| text.contains(word)) || operation == UNKNOWN && text.contains(UNKNOWN)
}

/// Error results of calls that cannot succeed. Not observable if the server sends none.
async fn errors(target: &Target) -> Result<Vec<(Call, String)>, Verdict> {
    let mut calls = vec![or_not_observable(unknown(target).await)?];
    for call in target.invalid_calls().unwrap_or_default() {
        or_not_observable(target.invoke(&call).await)?;
        calls.push(call);
    }
    let mut errors = Vec::new();
    for call in calls {
        let text = or_not_observable(call.result(target.timeouts).await)?.result_text();
        if is_error(&call, &text) {
            errors.push((call, text));
        }
    }
    if errors.is_empty() {
        return Err(Verdict::not_observable("the server sent no error result"));
    }
    Ok(errors)
}

async fn informative(target: &Target) -> ProbeResult {
    for (call, text) in errors(target).await? {
        let words = text.trim_start_matches("Error:").split_whitespace().count();
        if words < 2 {
            return Err(call.fail("the error result does not say what is wrong"));
        }
    }
    Ok(())
}

async fn prefix(target: &Target) -> ProbeResult {
    for (call, text) in errors(target).await? {
        if !text.starts_with("Error:") {
            return Err(call.fail("the text of the error result does not begin with `Error: `"));
        }
    }
    Ok(())
}

async fn no_internal_details(target: &Target) -> ProbeResult {
    for (call, text) in errors(target).await? {
        let path = |line: &str| !line.contains("://") && redact::text(line) != line.trim();
        if TRACES.iter().any(|trace| text.contains(trace)) || text.lines().any(path) {
            return Err(call.fail("the error result contains a stack trace or a file path"));
        }
    }
    Ok(())
}

/// Group ids that are paths into a directory of the checker. If the server runs on the same machine and uses them, files
/// appear or vanish there.
async fn group_ids(target: &Target) -> ProbeResult {
    let broken =
        |error| Verdict::not_observable(format!("the checker cannot make a temporary file: {error}"));
    let canary = Canary::new().map_err(broken)?;
    for path in canary.missing().into_iter().chain(canary.existing()) {
        let mut call = target.operation()?;
        call.invocation["group_id"] = path.into();
        let response = target.send_invocation(&call, Credentials::Valid).await?;
        if response.status >= 500 && response.status != 503 {
            return Err(call.fail(format!("a group_id that is a path was answered {}", response.status)));
        }
        // The server may refuse the call, or deliver an error.
        let result = |deliveries: &[Delivery]| results(deliveries).next().cloned();
        drop(call.inbox.wait_for(target.timeouts.quiet, result).await);
        if let Some(damage) = canary.damage() {
            return Err(call.fail(damage));
        }
    }
    Ok(())
}

async fn large(target: &Target) -> ProbeResult {
    let call = target.call(UNKNOWN, json!({"text": "x".repeat(LARGE)}), "", Replies::default())?;
    or_not_observable(unknown(target).await)?;
    target.invoke(&call).await?;
    call.result(target.timeouts).await.map(|_| ())
}

/// Looks for the token of the callback URL, which is the part after the last slash.
async fn no_callback_url(target: &Target) -> ProbeResult {
    let mut calls = vec![target.call(UNKNOWN, json!({}), "", Replies::default())?];
    calls.extend(target.operation().ok());
    for call in calls {
        let token = call.inbox.url.rsplit('/').next().unwrap_or_default();
        let response = or_not_observable(target.invoke(&call).await)?;
        or_not_observable(call.result(target.timeouts).await)?;
        let has_token = |text: &str| text.contains(token);
        let deliveries = call.inbox.deliveries();
        if has_token(&String::from_utf8_lossy(&response.body))
            || deliveries.iter().any(|delivery| has_token(&delivery.result_text()))
        {
            return Err(call
                .fail("an acknowledgement or a result contains the callback URL, where others may read it"));
        }
    }
    Ok(())
}

async fn unreadable(target: &Target, expected: Range<u16>) -> ProbeResult {
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
        let response = target.post_to_endpoint(body.into(), Credentials::Valid).await?;
        if response.status >= 500 && expected.start >= 400 {
            let why =
                "an unreadable invocation was answered 5xx: see the probe unreadable_invocation_does_no_harm";
            return Err(Verdict::not_observable(why));
        }
        if !expected.contains(&response.status) {
            let what = format!("an unreadable invocation was answered {}", response.status);
            return Err(Verdict::fail(what, vec![response.exchange]));
        }
    }
    Ok(())
}

async fn deep(target: &Target) -> ProbeResult {
    let call = target.call(UNKNOWN, json!({"x": "HERE"}), "", Replies::default())?;
    let deep = format!("{}{}", "[".repeat(NESTING), "]".repeat(NESTING));
    let body = call.invocation.to_string().replace("\"HERE\"", &deep);
    let response = target.post_to_endpoint(Bytes::from(body), Credentials::Valid).await?;
    if response.status >= 500 {
        return Err(Verdict::fail(
            format!("deeply nested JSON was answered {} instead of a status below 500", response.status),
            vec![response.exchange],
        ));
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

async fn stale(target: &Target) -> ProbeResult {
    let call = stale_call(target)?;
    let response = target.send_invocation(&call, Credentials::Valid).await?;
    if response.status == 409 {
        return Ok(());
    }
    if response.status < 300 {
        let lost = |_| Verdict::not_observable("the call was lost: see the probe stale_call_is_not_lost");
        call.result(target.timeouts).await.map_err(lost)?;
    }
    Err(call.fail(format!("an outdated toolset_version was answered {} instead of 409", response.status)))
}

async fn stale_is_not_lost(target: &Target) -> ProbeResult {
    let call = stale_call(target)?;
    let response = target.send_invocation(&call, Credentials::Valid).await?;
    if response.status >= 500 {
        return Err(call.fail(format!(
            "an outdated toolset_version was answered {}, so the runtime would send it again",
            response.status
        )));
    }
    if response.status >= 400 {
        return Ok(());
    }
    call.result(target.timeouts).await.map(|_| ())
}

/// Turns a failure into not observable: a missing error result is the failure of another probe.
fn or_not_observable<T>(outcome: Result<T, Verdict>) -> Result<T, Verdict> {
    outcome.map_err(|_| {
        Verdict::not_observable("no error result arrived: see the probe unknown_operation_is_an_error_result")
    })
}
