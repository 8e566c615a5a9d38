//! Callbacks: accepted once, from the right tool and for the right call, and rejected otherwise.

use bytes::Bytes;
use serde_json::{Value, json};

use super::{Check, Phase};
use crate::runtime::scenario::{ProbeResult, Scenario, fail};
use crate::runtime::tools::{self, Call, PostOutcome, WORK, with};
use crate::runtime::user::User;
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
            checks: "A result that is posted to a callback URL with one changed character is answered 4xx.",
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
            name: "mismatched_result",
            requirements: &["TR-22"],
            checks: "A result whose ids do not belong to its callback URL is answered 4xx.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(mismatched_rejected(scenario)),
    },
    Check {
        probe: Probe {
            name: "mismatched_result_unheard",
            requirements: &["LC-29"],
            checks: "A result whose ids do not belong to its callback URL never reaches the model.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(mismatched_ignored(scenario)),
    },
    Check {
        probe: Probe {
            name: "invalid_callback",
            requirements: &["TR-21", "LC-29"],
            checks: "A callback that violates the schema is answered 4xx.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(invalid(scenario)),
    },
    Check {
        probe: Probe {
            name: "callback_not_json",
            requirements: &["TR-01"],
            checks: "A callback that is not sent as application/json is answered 4xx.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(not_json(scenario)),
    },
    Check {
        probe: Probe {
            name: "hostile_callback",
            requirements: &["TR-21"],
            checks: "Bodies that are too large or too deeply nested are answered 4xx, and the runtime keeps running.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(hostile(scenario)),
    },
    Check {
        probe: Probe {
            name: "sign_in",
            requirements: &["TR-10"],
            checks: "A call that waits for the user's authorization stays open and is not sent again.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(sign_in(scenario)),
    },
    Check {
        probe: Probe {
            name: "user_choice",
            requirements: &["TR-10"],
            checks: "The user's choice is posted to the response_url of the question.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(choice(scenario)),
    },
    Check {
        probe: Probe {
            name: "view_update",
            requirements: &["TR-10"],
            checks: "A view_update is accepted, causes no model request and never reaches the model.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(view(scenario)),
    },
    Check {
        probe: Probe {
            name: "view_after_result",
            requirements: &[],
            checks: "A view_update that arrives right after the result of its call is answered 200 and stored.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(view_after_result(scenario)),
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
    scenario.settle().await;
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

/// Variants of a URL in which one character near the end is changed.
fn forgeries(url: &str) -> Vec<String> {
    let start = url.find("://").map_or(0, |at| at + 3);
    let start = url[start..].find('/').map_or(url.len(), |at| start + at + 1);
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
fn expect_rejected(posted: &PostOutcome, what: &str) -> ProbeResult {
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
    for url in forgeries(call.url()) {
        let posted = tools::post(&scenario.context.http, &url, None, body.clone()).await?;
        scenario.log.add(posted.exchange.clone());
        scenario.expect_never_in_prompt(&text, "a result that was posted to a forged URL")?;
        expect_rejected(&posted, "a result that was posted to a URL with one changed character")?;
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

const MISMATCHED: &str = "a result whose ids do not belong to its callback URL";

/// Posts results with foreign ids to the URL of the returned call. The returned text is in all of them.
async fn post_mismatched(scenario: &Scenario) -> Result<(Call, String, Vec<PostOutcome>), Verdict> {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let (_, other) = scenario.open_with_call(WORK).await?;
    let text = scenario.unique_text("astray");
    let mut answers = Vec::new();
    let foreign = [
        (other.id(), call.thread()),
        (call.id(), other.thread()),
        (other.id(), other.thread()),
        ("no-call", "no-thread"),
    ];
    // If ids are unique only within a thread, both calls may have the same id.
    let foreign = foreign.into_iter().filter(|ids| *ids != (call.id(), call.thread()));
    for (id, thread) in foreign {
        let body = with(call.result(&text), json!({"id": id, "group_id": thread}));
        let posted = call.post(&body).await?;
        answers.push(posted);
    }
    Ok((call, text, answers))
}

async fn mismatched_rejected(scenario: Scenario) -> ProbeResult {
    let (_, _, answers) = post_mismatched(&scenario).await?;
    answers.iter().try_for_each(|posted| expect_rejected(posted, MISMATCHED))
}

async fn mismatched_ignored(scenario: Scenario) -> ProbeResult {
    let (call, text, _) = post_mismatched(&scenario).await?;
    scenario.settle().await;
    scenario.expect_never_in_prompt(&text, MISMATCHED)?;
    expect_only_the_real_result(&scenario, &call, &text, MISMATCHED).await
}

async fn invalid(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let text = scenario.unique_text("invalid");
    let good = call.result(&text);
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
    for body in bodies {
        let posted = call.post(&body).await?;
        expect_rejected(&posted, "an invalid callback")?;
    }
    for raw in [&b""[..], b"{", b"{\"type\": \"tool_result\"", b"\xff\xfe\x00"] {
        let posted = call.post_raw("application/json", Bytes::from_static(raw)).await?;
        expect_rejected(&posted, "a callback that is not JSON")?;
    }
    expect_only_the_real_result(&scenario, &call, &text, "an invalid callback").await
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
        if posted.timed_out || posted.status.is_some_and(|status| !(400..500).contains(&status)) {
            return fail(format!("{what} was not answered 4xx"), vec![posted.exchange]);
        }
    }
    expect_only_the_real_result(&scenario, &call, &text, "a hostile body").await
}

async fn sign_in(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let (secret, text) = (scenario.unique_text("secret"), scenario.unique_text("signedin"));
    let url = format!("https://sign-in.example/{secret}");
    call.post_accepted(&with(call.message("oauth"), json!({"auth_url": url}))).await?;
    let requests_before = scenario.model_requests().len();
    scenario.settle().await;
    if scenario.invocations().len() > 1 {
        return fail("a call that waits for the user's authorization was sent again", scenario.exchanges());
    }
    if scenario.model_requests().len() > requests_before {
        return fail(
            "a call that waits for the user's authorization did not stay open",
            scenario.exchanges(),
        );
    }
    call.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await?;
    scenario.expect_never_in_prompt(&secret, "the auth_url")
}

async fn choice(scenario: Scenario) -> ProbeResult {
    let api = scenario.context.user.api("answer a question")?.clone();
    let (thread, call) = scenario.open_with_call(WORK).await?;
    let path = format!("/answers/{}", scenario.number);
    let user_choice = json!({
        "prompt": "Which?", "choices": ["red", "green", "blue"], "default": 0,
        "response_url": format!("{}{path}", scenario.server().url),
    });
    call.post_accepted(&with(call.message("user_choice"), user_choice)).await?;
    let answer = ["threads", &thread, "calls", call.id(), "choice"];
    let answered = api.post(&scenario.context.http, &answer, &json!({"selected": 2})).await?;
    scenario.log.add(answered.exchange.clone());
    answered.expect(202)?;
    let answers = || scenario.server().requests(|request| request.path == path).into_iter().next();
    let request = scenario.wait_for("the user's choice at the response_url", answers).await?;
    if request.body["id"] != call.id() || request.body["selected"] != json!(2) {
        return fail(
            "the user's choice does not have the `id` of the call and the `selected` index",
            vec![request.exchange()],
        );
    }
    let text = scenario.unique_text("chosen");
    call.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await?;
    Ok(())
}

/// A view_update with this note.
fn progress(call: &Call, note: &str) -> Value {
    let content = json!({"note": note});
    json!({"type": "view_update", "group_id": call.thread(), "view_type": "progress", "content": content})
}

async fn view(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let (shown, text) = (scenario.unique_text("shown"), scenario.unique_text("returned"));
    let requests_before = scenario.model_requests().len();
    call.post_accepted(&progress(&call, &shown)).await?;
    scenario.settle().await;
    if scenario.model_requests().len() > requests_before {
        return fail("a view_update caused a model request", scenario.exchanges());
    }
    call.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await?;
    scenario.expect_never_in_prompt(&shown, "a view_update")
}

/// A tool that changes a file may send the result first and then the diff.
async fn view_after_result(scenario: Scenario) -> ProbeResult {
    let (thread, call) = scenario.open_with_call(WORK).await?;
    let shown = scenario.unique_text("shown");
    call.return_result(&scenario.unique_text("returned")).await?;
    call.post_expecting_200(&progress(&call, &shown)).await?;
    expect_view_kept(&scenario, &thread, &shown).await
}

/// Fails if the thread has no view with this note. Passes if the client API does not show views.
async fn expect_view_kept(scenario: &Scenario, thread: &str, note: &str) -> ProbeResult {
    let User::Api(api) = &scenario.context.user else { return Ok(()) };
    let shown = api.get(&scenario.context.http, &["threads", thread, "views"]).await?;
    let Some(views) = shown["views"].as_array() else { return Ok(()) };
    if views.iter().any(|view| view["content"]["note"] == note) {
        return Ok(());
    }
    fail("a view_update was answered 200, but is not among the views of its thread", scenario.exchanges())
}
