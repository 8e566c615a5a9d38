//! Callbacks: accepted once, from the right tool and for the right call, and rejected otherwise.

use bytes::Bytes;
use serde_json::json;

use super::{Check, Phase};
use crate::canary::Canary;
use crate::runtime::scenario::{ProbeResult, Scenario, fail};
use crate::runtime::tools::{self, Call, PostOutcome, WORK, with};
use crate::{Probe, Verdict};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "result",
            requirements: &["TR-10", "TR-13"],
            checks: "A result is answered 200 and follows its call in the prompt.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(result(scenario)),
    },
    Check {
        probe: Probe {
            name: "duplicate_result",
            requirements: &["LC-30", "TR-25"],
            checks: "A duplicate result changes nothing.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(duplicate(scenario)),
    },
    Check {
        probe: Probe {
            name: "forged_url",
            requirements: &["TR-20"],
            checks: "A result that is posted to a callback URL with one changed character does not reach the model.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(forged(scenario)),
    },
    Check {
        probe: Probe {
            name: "unguessable_url",
            requirements: &["TR-20"],
            checks: "A callback URL cannot be derived from the ids of its call.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(unguessable(scenario)),
    },
    Check {
        probe: Probe {
            name: "unmatched_result",
            requirements: &["LC-29", "TR-22"],
            checks: "A result whose ids belong to no open call never reaches the model.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(unmatched(scenario)),
    },
    Check {
        probe: Probe {
            name: "mismatched_result",
            requirements: &[],
            checks: "A result whose ids do not belong to its callback URL is answered 4xx.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(mismatched_rejected(scenario)),
    },
    Check {
        probe: Probe {
            name: "mismatched_result_unheard",
            requirements: &[],
            checks: "A result of another open call does not reach the model by this callback URL.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(mismatched_ignored(scenario)),
    },
    Check {
        probe: Probe {
            name: "invalid_callback",
            requirements: &["TR-21", "LC-29"],
            checks: "A callback that violates the schema changes nothing and is not answered 5xx.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(invalid(scenario)),
    },
    Check {
        probe: Probe {
            name: "invalid_callback_is_4xx",
            requirements: &[],
            checks: "A callback that violates the schema is answered 4xx.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(invalid_is_4xx(scenario)),
    },
    Check {
        probe: Probe {
            name: "callback_not_json",
            requirements: &[],
            checks: "A callback that is not sent as application/json is answered 4xx.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(not_json(scenario)),
    },
    Check {
        probe: Probe {
            name: "hostile_callback",
            requirements: &["TR-21"],
            checks: "Bodies that are too large or too deeply nested are not answered 5xx, and the runtime keeps running.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(hostile(scenario)),
    },
    Check {
        probe: Probe {
            name: "hostile_ids",
            requirements: &["TR-21"],
            checks: "Callbacks whose ids are paths change nothing, make no file there and are not answered 5xx.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(hostile_ids(scenario)),
    },
    Check {
        probe: Probe {
            name: "large_result",
            requirements: &["TR-10"],
            checks: "A result of 256 KiB is accepted and reaches the model.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(large_result(scenario)),
    },
];

/// Nesting depth of the hostile body.
const DEEP: usize = 200_000;
/// Size of the large hostile body, in bytes.
const LARGE: usize = 16 * 1024 * 1024;

async fn result(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let text = scenario.unique_text("done");
    let content = json!([{"type": "text", "text": text}]);
    call.post_expecting_200(&with(call.result("not this"), json!({"content": content, "future field": 1})))
        .await?;
    let model_request = scenario.wait_for_prompt_with(&text).await?;
    match model_request.results_of(call.marker()).as_slice() {
        [only] if only.contains(&text) => Ok(()),
        _ => fail(
            "the result does not follow its call in the prompt, or the call has several results",
            vec![model_request.exchange()],
        ),
    }
}

async fn duplicate(scenario: Scenario) -> ProbeResult {
    let (thread, call) = scenario.open_with_call(WORK).await?;
    let (text, other) = (scenario.unique_text("once"), scenario.unique_text("other"));
    call.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await?;
    let before = scenario.model_requests().len();
    for body in [call.result(&text), call.result(&other), call.result(&text)] {
        call.post_with_retry(&body).await?;
    }
    scenario.wait_for_silence().await;
    if scenario.model_requests().len() > before {
        return fail("a duplicate result caused another model request", scenario.exchanges());
    }
    let model_request = scenario.current_prompt(&thread).await?;
    scenario.expect_never_in_prompt(&other, "a second result of a call")?;
    match model_request.count(&text) {
        1 => Ok(()),
        times => {
            fail(format!("a result that was sent twice is {times} times in the prompt"), scenario.exchanges())
        }
    }
}

/// Variants of a URL in which one character near the end is changed. There are none of a URL that is only a host.
fn forgeries(url: &str) -> Vec<String> {
    let start = url.find("://").map_or(0, |at| at + 3);
    let Some(start) =
        url[start..].find(['/', '?']).map(|at| start + at + 1).filter(|start| *start < url.len())
    else {
        return Vec::new();
    };
    let places = (start..url.len()).filter(|at| url.as_bytes()[*at].is_ascii_alphanumeric());
    let places: Vec<usize> = places.collect();
    let tail = &places[places.len().saturating_sub(24)..];
    let changed = |at: &usize| {
        let other = if url.as_bytes()[*at] == b'A' { "B" } else { "A" };
        format!("{}{other}{}", &url[..*at], &url[at + 1..])
    };
    let mut urls: Vec<String> = tail.iter().step_by(4).map(changed).collect();
    urls.push(format!("{url}A"));
    urls
}

/// Fails unless the callback was answered 4xx.
pub(super) fn expect_rejected(posted: &PostOutcome, what: &str) -> ProbeResult {
    if posted.is_rejected() {
        return Ok(());
    }
    let status = posted.status.map_or_else(|| "no response".to_owned(), |status| status.to_string());
    fail(format!("{what} got {status} instead of 4xx"), vec![posted.exchange.clone()])
}

/// Sends the real result, and fails if the false one is in any prompt.
async fn expect_only_the_real_result(
    scenario: &Scenario,
    call: &Call,
    false_text: &str,
    what: &str,
) -> ProbeResult {
    let real = scenario.unique_text("real");
    call.return_result(&real).await?;
    scenario.wait_for_prompt_with(&real).await?;
    scenario.expect_never_in_prompt(false_text, what)
}

async fn forged(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let text = scenario.unique_text("forged");
    let body = Bytes::from(call.result(&text).to_string());
    let urls = forgeries(call.url());
    if urls.is_empty() {
        return Err(Verdict::not_observable(
            "the callback URL has neither path nor query that could be changed: see the probe unguessable_url",
        ));
    }
    for url in urls {
        let posted = tools::post(&scenario.context.http, &url, None, body.clone()).await?;
        scenario.log.add(posted.exchange);
    }
    expect_only_the_real_result(&scenario, &call, &text, "a result that was posted to a forged URL").await
}

/// Compares the URLs of two calls without the ids: they have to differ.
async fn unguessable(scenario: Scenario) -> ProbeResult {
    let (_, one) = scenario.open_with_call(WORK).await?;
    let (_, two) = scenario.open_with_call(WORK).await?;
    let bare = |call: &Call| call.url().replace(call.id(), "").replace(call.thread(), "");
    if bare(&one) == bare(&two) {
        let exchanges = vec![one.request.exchange(), two.request.exchange()];
        return fail(
            "the callback URL contains no token: it can be derived from the ids of the call",
            exchanges,
        );
    }
    Ok(())
}

/// Posts a result with these ids to the URL of a call.
async fn post_as(call: &Call, text: &str, (id, thread): (&str, &str)) -> Result<PostOutcome, Verdict> {
    call.post(&with(call.result(text), json!({"id": id, "group_id": thread}))).await
}

/// Posts results whose ids belong to no open call. The text is in all of them.
async fn post_unmatched(call: &Call, other: &Call, text: &str) -> Result<Vec<PostOutcome>, Verdict> {
    let open = [(call.id(), call.thread()), (other.id(), other.thread())];
    let ids = [(other.id(), call.thread()), (call.id(), other.thread()), ("no-call", "no-thread")];
    let mut answers = Vec::new();
    // If ids are unique only within a thread, both calls may have the same id.
    for ids in ids.into_iter().filter(|ids| !open.contains(ids)) {
        answers.push(post_as(call, text, ids).await?);
    }
    Ok(answers)
}

async fn unmatched(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let (_, other) = scenario.open_with_call(WORK).await?;
    let text = scenario.unique_text("astray");
    post_unmatched(&call, &other, &text).await?;
    scenario.wait_for_silence().await;
    expect_only_the_real_result(&scenario, &call, &text, "a result whose ids belong to no open call").await
}

/// Posts results that do not belong to the URL of the returned call, the last of them with the ids of another open call.
async fn post_mismatched(scenario: &Scenario) -> Result<(Call, String, Vec<PostOutcome>), Verdict> {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let (_, other) = scenario.open_with_call(WORK).await?;
    let (text, unmatched) = (scenario.unique_text("astray"), scenario.unique_text("unmatched"));
    let mut answers = post_unmatched(&call, &other, &unmatched).await?;
    scenario.wait_for_silence().await;
    if scenario.expect_never_in_prompt(&unmatched, "").is_err() {
        return Err(Verdict::not_observable(
            "results whose ids belong to no open call are accepted: see the probe unmatched_result",
        ));
    }
    answers.push(post_as(&call, &text, (other.id(), other.thread())).await?);
    scenario.wait_for_silence().await;
    Ok((call, text, answers))
}

async fn mismatched_rejected(scenario: Scenario) -> ProbeResult {
    let (_, text, answers) = post_mismatched(&scenario).await?;
    if scenario.expect_never_in_prompt(&text, "").is_err() {
        return Err(Verdict::not_observable(
            "a result of another call is accepted: see the probe mismatched_result_unheard",
        ));
    }
    answers.iter().try_for_each(|posted| {
        expect_rejected(posted, "a result whose ids do not belong to its callback URL")
    })
}

async fn mismatched_ignored(scenario: Scenario) -> ProbeResult {
    let (call, text, _) = post_mismatched(&scenario).await?;
    expect_only_the_real_result(&scenario, &call, &text, "a result with the ids of another call").await
}

/// Posts invalid callbacks to the URL of a call. The text is in all of them.
async fn post_invalid(call: &Call, text: &str) -> Result<Vec<PostOutcome>, Verdict> {
    let good = call.result(text);
    let without = |name: &str| {
        let mut body = good.clone();
        body.as_object_mut().map(|fields| fields.remove(name));
        body
    };
    let bodies = [
        json!([good]),
        json!(text),
        without("type"),
        with(good.clone(), json!({"type": "tool_results"})),
        without("group_id"),
        without("id"),
        without("text"),
        with(good.clone(), json!({"text": {"word": text}})),
        with(good.clone(), json!({"content": [{"type": "sound", "text": text}]})),
        with(good.clone(), json!({"subscription": "yes"})),
        with(call.message("user_choice"), json!({"prompt": text})),
    ];
    let mut answers = Vec::new();
    for body in bodies {
        answers.push(call.post(&body).await?);
    }
    for raw in [&b""[..], b"{", b"{\"type\": \"tool_result\"", b"\xff\xfe\x00"] {
        answers.push(call.post_raw("application/json", Bytes::from_static(raw)).await?);
    }
    Ok(answers)
}

async fn invalid(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let text = scenario.unique_text("invalid");
    let answers = post_invalid(&call, &text).await?;
    answers.iter().try_for_each(|posted| expect_no_5xx(posted, "an invalid callback"))?;
    expect_only_the_real_result(&scenario, &call, &text, "an invalid callback").await
}

async fn invalid_is_4xx(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let text = scenario.unique_text("invalid");
    let answers = post_invalid(&call, &text).await?;
    scenario.wait_for_silence().await;
    let has_effect = scenario.expect_never_in_prompt(&text, "").is_err();
    if has_effect || answers.iter().any(|posted| expect_no_5xx(posted, "").is_err()) {
        return Err(Verdict::not_observable("invalid callbacks do harm: see the probe invalid_callback"));
    }
    answers.iter().try_for_each(|posted| expect_rejected(posted, "an invalid callback"))
}

/// Fails if a callback was answered 5xx or not at all.
fn expect_no_5xx(posted: &PostOutcome, what: &str) -> ProbeResult {
    match posted.status {
        Some(..500) => Ok(()),
        status => {
            let status = status.map_or_else(|| "no response".to_owned(), |status| status.to_string());
            fail(format!("{what} got {status}"), vec![posted.exchange.clone()])
        }
    }
}

/// Ids that are paths into a directory of the checker. If the runtime is on the same machine and uses them, files appear
/// or vanish there.
async fn hostile_ids(scenario: Scenario) -> ProbeResult {
    let broken =
        |error| Verdict::not_observable(format!("the checker cannot make a temporary file: {error}"));
    let canary = Canary::new().map_err(broken)?;
    let (_, call) = scenario.open_with_call(WORK).await?;
    let text = scenario.unique_text("hostile");
    for path in canary.missing().iter().chain(&canary.existing()) {
        for ids in [(path.as_str(), call.thread()), (call.id(), path.as_str())] {
            let posted = post_as(&call, &text, ids).await?;
            expect_no_5xx(&posted, "a result whose id is a path")?;
            if let Some(damage) = canary.damage() {
                return fail(damage, vec![posted.exchange]);
            }
        }
    }
    // The next result shows that the runtime keeps running. Results with unknown ids are checked by another probe.
    let real = scenario.unique_text("real");
    call.post(&call.result(&real)).await?;
    scenario.wait_for_silence().await;
    canary.damage().map_or(Ok(()), |damage| fail(damage, scenario.exchanges()))
}

/// Size of a large result, in bytes. It is far below any reasonable limit of a message.
const LARGE_RESULT: usize = 256 * 1024;

async fn large_result(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let text = scenario.unique_text("large");
    call.return_result(&format!("{text} {}", "x".repeat(LARGE_RESULT))).await?;
    scenario.wait_for_prompt_with(&text).await.map(|_| ())
}

async fn not_json(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let text = scenario.unique_text("plain");
    let body = Bytes::from(call.result(&text).to_string());
    for kind in ["text/plain", "application/x-www-form-urlencoded"] {
        let posted = call.post_raw(kind, body.clone()).await?;
        expect_rejected(&posted, &format!("a callback with Content-Type: {kind}"))?;
    }
    expect_only_the_real_result(&scenario, &call, &text, "a callback that was not sent as JSON").await
}

async fn hostile(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let text = scenario.unique_text("hostile");
    let deep = "[".repeat(DEEP);
    let large = format!("{{\"type\":\"tool_result\",\"text\":\"{}", "x".repeat(LARGE));
    for (body, what) in [(deep, "a body of deeply nested arrays"), (large, "a truncated body of 16 MiB")] {
        let posted = call.post_raw("application/json", body.into()).await?;
        // The runtime may close the connection instead of answering.
        if posted.timed_out || posted.status.is_some_and(|status| status >= 500) {
            return fail(format!("{what} was answered 5xx or not at all"), vec![posted.exchange]);
        }
    }
    expect_only_the_real_result(&scenario, &call, &text, "a hostile body").await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgeries_change_the_path_or_the_query_and_never_the_host() {
        for url in ["http://127.0.0.1:7420", "http://127.0.0.1:7420/", "http://h?"] {
            assert_eq!(forgeries(url), [""; 0], "{url}");
        }
        for url in ["http://127.0.0.1:7420/callback/abcdef", "http://127.0.0.1:7420?token=abcdef"] {
            let forged = forgeries(url);
            assert!(forged.len() > 1, "{url}");
            for forged in forged {
                assert!(forged != url && forged.starts_with("http://127.0.0.1:7420"), "{forged}");
                assert_eq!(url::Url::parse(&forged).unwrap().port(), Some(7420), "{forged}");
            }
        }
    }
}
