//! Invocations: their fields, their retries, and the results of calls that cannot be sent.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Check, Phase, as_not_observable};
use crate::runtime::latch::Latch;
use crate::runtime::mock_server::{Marker, RecordedRequest, Route};
use crate::runtime::model::{ModelCall, ModelRequest, PromptCall};
use crate::runtime::scenario::{ProbeResult, Scenario, fail};
use crate::runtime::tools::{Acknowledgement, Call, MAIN, MARKER, THIRD, UNREACHABLE, WATCH, WORK};
use crate::runtime::user::User;
use crate::{Probe, Verdict};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "invocation_fields",
            requirements: &["TR-01", "TR-02"],
            checks: "An invocation is a POST of JSON to the toolset's endpoint with all required fields.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(fields(scenario)),
    },
    Check {
        probe: Probe {
            name: "invocation_version",
            requirements: &[],
            checks: "The toolset_version of an invocation is the version of the fetched toolset.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(version(scenario)),
    },
    Check {
        probe: Probe {
            name: "invocation_authenticated",
            requirements: &["TR-19"],
            checks: "The bearer token is sent with every request to a tool server.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(authentication(scenario)),
    },
    Check {
        probe: Probe {
            name: "acknowledgement_body",
            requirements: &["TR-05"],
            checks: "The body of an acknowledgement is ignored.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(acknowledgement_body(scenario)),
    },
    Check {
        probe: Probe {
            name: "retry_server_errors",
            requirements: &["TR-06"],
            checks: "An invocation that is answered 5xx is sent again.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(server_errors(scenario)),
    },
    Check {
        probe: Probe {
            name: "retry_unreachable",
            requirements: &["TR-06"],
            checks: "An invocation whose server cannot be reached is sent again.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(unreachable(scenario)),
    },
    Check {
        probe: Probe {
            name: "retry_backoff",
            requirements: &["TR-06"],
            checks: "The pauses between attempts of an invocation grow.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(backoff(scenario)),
    },
    Check {
        probe: Probe {
            name: "retry_is_the_same",
            requirements: &["TR-06"],
            checks: "Every attempt of an invocation has the same id and the same callback URL.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(same_again(scenario)),
    },
    Check {
        probe: Probe {
            name: "no_retry_after_4xx",
            requirements: &["TR-07"],
            checks: "An invocation that is answered 4xx is not sent again.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(rejected_once(scenario)),
    },
    Check {
        probe: Probe {
            name: "refusal_is_told",
            requirements: &["LC-15"],
            checks: "A call whose invocation is answered 4xx gets an error result.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(rejected_has_result(scenario)),
    },
    Check {
        probe: Probe {
            name: "results_reach_their_calls",
            requirements: &["LC-29"],
            checks: "Each of three calls of one model answer gets its own result.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(own_results(scenario)),
    },
    Check {
        probe: Probe {
            name: "parallel_calls",
            requirements: &[],
            checks: "The calls of one model answer are sent concurrently.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(parallel(scenario)),
    },
    Check {
        probe: Probe {
            name: "slow_acknowledgement",
            requirements: &["LC-19"],
            checks: "A message is answered while the acknowledgement of a call is outstanding.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(slow_acknowledgement(scenario)),
    },
    Check {
        probe: Probe {
            name: "invalid_arguments_not_sent",
            requirements: &[],
            checks: "A call whose arguments violate the tool's schema is not sent and gets a result.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(invalid_arguments(scenario)),
    },
    Check {
        probe: Probe {
            name: "repeated_call_id",
            requirements: &["TR-22"],
            checks: "Two calls to which the model gave the same id are not confused.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(repeated_id(scenario)),
    },
    Check {
        probe: Probe {
            name: "call_id_form",
            requirements: &[],
            checks: "The `id` of a call has at most 40 letters, digits, `_` and `-`, whatever id the model gave.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(id_form(scenario)),
    },
    Check {
        probe: Probe {
            name: "call_id_of_the_model",
            requirements: &[],
            checks: "The `call_id` of an invocation is the id that the model gave to the call.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(id_of_the_model(scenario)),
    },
    Check {
        probe: Probe {
            name: "call_ids_across_threads",
            requirements: &[],
            checks: "Calls of different threads and sessions have different ids.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(ids_across_threads(scenario)),
    },
];

/// Maximum length of the `id` of a call.
const ID_CHARACTERS: usize = 40;

/// Description of the first defect of an invocation.
fn defect(request: &RecordedRequest, scenario: &Scenario, marker: Marker) -> Option<String> {
    if request.method != "POST" {
        return Some(format!("the method is {} instead of POST", request.method));
    }
    let kind = request.header("content-type").unwrap_or_default();
    if kind.split(';').next().unwrap_or_default().trim() != "application/json" {
        return Some(format!("the Content-Type is `{kind}` instead of `application/json`"));
    }
    for name in ["operation", "id", "group_id", "callback_url"] {
        if request.field(name).is_empty() {
            return Some(format!("`{name}` is missing"));
        }
    }
    if request.field("operation") != WORK {
        return Some("`operation` is not the tool that the model called".into());
    }
    let expected = json!({"mark": scenario.call_marker(marker), "text": "\u{e9}\u{1f980} \"quoted\"", "list": [1, null]});
    if request.body["arguments"] != expected {
        return Some("`arguments` are not those of the model's call".into());
    }
    match request.body.get("thread_ancestors") {
        None | Some(Value::Null) => None,
        Some(Value::Array(ancestors)) if ancestors.is_empty() => None,
        Some(_) => Some("`thread_ancestors` is not empty, but the thread is a root thread".into()),
    }
}

async fn fields(scenario: Scenario) -> ProbeResult {
    let more = json!({"text": "\u{e9}\u{1f980} \"quoted\"", "list": [1, null]});
    let marker = scenario.step_with_call_arguments(&[(WORK, more)]);
    scenario.open_thread(marker).await?;
    let call = scenario.call().await?;
    match defect(&call.request, &scenario, marker) {
        None => Ok(()),
        Some(what) => fail(format!("the invocation is invalid: {what}"), scenario.exchanges()),
    }
}

async fn version(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    match call.request.body.get("toolset_version") {
        Some(version) if version == "main-1" => Ok(()),
        _ => fail(
            "the toolset_version of an invocation is not the version of the fetched toolset",
            scenario.exchanges(),
        ),
    }
}

async fn authentication(scenario: Scenario) -> ProbeResult {
    let (thread, call) = scenario.open_with_call(WORK).await?;
    let expected = format!("Bearer {}", scenario.server().token.expose());
    let has_token = |request: &RecordedRequest| request.header("authorization") == Some(expected.as_str());
    let discovered = scenario.server().requests(|request| request.route == Route::Discovery(MAIN));
    if !has_token(&call.request) {
        if discovered.iter().any(|request| has_token(request)) {
            return fail(
                "the token is sent with discovery requests, but not with invocations",
                scenario.exchanges(),
            );
        }
        return Err(Verdict::not_observable(
            "the runtime sends no bearer token; configure {tool_token} for the tool servers",
        ));
    }
    scenario.close(&thread).await?;
    let received =
        || scenario.notifications(Route::Close, call.thread()).into_iter().find(|(at, _)| *at == MAIN);
    // A missing notification is the failure of another probe.
    let (_, request) = scenario
        .wait_for("the /close_thread notification at a tool server", received)
        .await
        .map_err(as_not_observable)?;
    if has_token(&request) {
        return Ok(());
    }
    fail("the token is sent with invocations, but not with notifications", vec![request.exchange()])
}

async fn acknowledgement_body(scenario: Scenario) -> ProbeResult {
    let marker = scenario.step_with_calls(&[WORK]);
    let (text, real) = (scenario.unique_text("inbody"), scenario.unique_text("bycallback"));
    scenario.acknowledge(marker, [Acknowledgement::Result(text.clone())]);
    scenario.open_thread(marker).await?;
    let call = scenario.call().await?;
    scenario.wait_for_silence().await;
    scenario.expect_never_in_prompt(&text, "the body of an acknowledgement")?;
    call.return_result(&real).await?;
    scenario.wait_for_prompt_with(&real).await?;
    scenario.expect_never_in_prompt(&text, "the body of an acknowledgement")
}

/// Answers the first attempts of a call with these statuses, and returns all attempts including the first accepted one.
async fn attempts(scenario: &Scenario, statuses: &[u16]) -> Result<Vec<Arc<RecordedRequest>>, Verdict> {
    let marker = scenario.step_with_calls(&[WORK]);
    scenario.acknowledge(marker, statuses.iter().map(|status| Acknowledgement::Status(*status)));
    scenario.open_thread(marker).await?;
    let wanted = statuses.len() + 1;
    scenario
        .wait_for(&format!("attempt {wanted} of a call whose attempts were answered {statuses:?}"), || {
            Some(scenario.invocations()).filter(|request| request.len() >= wanted)
        })
        .await
}

async fn server_errors(scenario: Scenario) -> ProbeResult {
    attempts(&scenario, &[503, 500]).await?;
    let call = scenario.call().await?;
    let text = scenario.unique_text("atlast");
    call.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await?;
    Ok(())
}

async fn backoff(scenario: Scenario) -> ProbeResult {
    let attempts = attempts(&scenario, &[503, 503, 503]).await.map_err(as_not_observable)?;
    let pauses: Vec<Duration> = attempts.windows(2).map(|pair| pair[1].at - pair[0].at).collect();
    // Pauses may vary by a jitter.
    if pauses[2] > pauses[0].mul_f64(1.2) {
        return Ok(());
    }
    fail(format!("the pauses between attempts do not grow: {pauses:?}"), scenario.exchanges())
}

async fn same_again(scenario: Scenario) -> ProbeResult {
    let attempts = attempts(&scenario, &[503, 503]).await.map_err(as_not_observable)?;
    for name in ["id", "group_id", "callback_url", "operation", "arguments"] {
        if attempts.iter().any(|request| request.body[name] != attempts[0].body[name]) {
            return fail(
                format!("`{name}` differs between attempts of the same invocation"),
                scenario.exchanges(),
            );
        }
    }
    Ok(())
}

async fn unreachable(scenario: Scenario) -> ProbeResult {
    scenario.needs(THIRD)?;
    let marker = scenario.step_with_calls(&[UNREACHABLE]);
    scenario.open_thread(marker).await?;
    scenario.wait_for_prompt_with(&scenario.server().marker_text(marker)).await?;
    // The endpoint does not listen yet, so failed attempts cannot be observed. Wait for some of them.
    scenario.wait_for_silence().await;
    let started = scenario.context.server.start_third_endpoint();
    started.map_err(|error| {
        Verdict::not_observable(format!("the checker cannot listen on a second port: {error}"))
    })?;
    let call = scenario.call().await?;
    let text = scenario.unique_text("thereagain");
    call.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await?;
    Ok(())
}

async fn rejected_once(scenario: Scenario) -> ProbeResult {
    let statuses = [400, 404, 409, 429];
    let markers = statuses.map(|status| {
        let marker = scenario.step_with_calls(&[WORK]);
        scenario.acknowledge(marker, (0..20).map(|_| Acknowledgement::Status(status)));
        marker
    });
    for marker in markers {
        scenario.open_thread(marker).await?;
    }
    scenario
        .wait_for("the first attempts of four calls", || (scenario.invocations().len() >= 4).then_some(()))
        .await?;
    scenario.wait_for_silence().await;
    let invocations = scenario.invocations();
    for (marker, status) in markers.into_iter().zip(statuses) {
        let wanted = scenario.call_marker(marker);
        let of: Vec<_> = invocations.iter().filter(|request| request.marker() == wanted).collect();
        if of.len() != 1 {
            let shown = of.iter().take(3).map(|request| request.exchange()).collect();
            return fail(
                format!("an invocation that was answered {status} was sent {} times", of.len()),
                shown,
            );
        }
    }
    Ok(())
}

async fn rejected_has_result(scenario: Scenario) -> ProbeResult {
    let marker = scenario.step_with_calls(&[WORK]);
    scenario.acknowledge(marker, (0..20).map(|_| Acknowledgement::Status(422)));
    scenario.open_thread(marker).await?;
    let call = scenario.call().await?;
    let has_text = |results: Vec<String>| results.iter().any(|text| !text.trim().is_empty());
    let told = scenario
        .wait_for_model_request("a model request with the result of the rejected call", |request| {
            has_text(request.results_of(call.marker()))
        })
        .await;
    if told.is_err() && scenario.invocations().len() > 1 {
        return Err(Verdict::not_observable("the call is sent again: see the probe no_retry_after_4xx"));
    }
    told.map(|_| ())
}

/// Invocations of one answer that have arrived within the quiet period, of which there is at least one.
async fn arrived(scenario: &Scenario, wanted: usize) -> Result<Vec<Call>, Verdict> {
    let mut calls = vec![scenario.call().await?];
    let all = scenario.wait_for("all invocations", || (scenario.invocations().len() >= wanted).then_some(()));
    drop(tokio::time::timeout(scenario.server().timeouts.quiet_period, all).await);
    while calls.len() < scenario.invocations().len() {
        calls.push(scenario.call().await?);
    }
    Ok(calls)
}

/// Returns the results of the calls that have arrived in reverse order, then those of calls that follow.
async fn own_results(scenario: Scenario) -> ProbeResult {
    let marker = scenario.step_with_calls(&[WORK, WATCH, WORK]);
    scenario.open_thread(marker).await?;
    let mut calls = arrived(&scenario, 3).await?;
    let text = |call: &Call| scenario.unique_text(&format!("part{}", call.marker().replace('-', "_")));
    for call in calls.iter().rev() {
        call.return_result(&text(call)).await?;
    }
    while calls.len() < 3 {
        let call = scenario.call().await?;
        call.return_result(&text(&call)).await?;
        calls.push(call);
    }
    let texts: Vec<String> = calls.iter().map(text).collect();
    let all = |request: &ModelRequest| texts.iter().all(|text| request.has(text));
    let model_request =
        scenario.wait_for_model_request("a model request with the results of three calls", all).await?;
    for (call, text) in calls.iter().zip(&texts) {
        // The result follows the call itself or a synthetic call for it.
        if model_request.call_with_result(text).is_none_or(|found| found.marker() != call.marker()) {
            let what = format!("the result of `{}` does not follow its call in the prompt", call.id());
            return fail(what, vec![model_request.exchange()]);
        }
    }
    Ok(())
}

async fn parallel(scenario: Scenario) -> ProbeResult {
    scenario.open_thread(scenario.step_with_calls(&[WORK, WATCH, WORK])).await?;
    match arrived(&scenario, 3).await?.len() {
        3 => Ok(()),
        sent => fail(
            format!("only {sent} of three calls of one answer were sent while none had returned"),
            scenario.exchanges(),
        ),
    }
}

/// The tool server holds its acknowledgement back. The user writes meanwhile, which takes a while with a command.
async fn slow_acknowledgement(scenario: Scenario) -> ProbeResult {
    // A runtime that answers no message while a call is open is the failure of another probe.
    let (thread, call) = scenario.open_with_call(WORK).await?;
    scenario.current_prompt(&thread).await.map_err(as_not_observable)?;
    call.return_result("done").await?;
    let marker = scenario.step_with_calls(&[WORK]);
    let latch = Latch::new(scenario.server().timeouts.arrival);
    let held = match scenario.context.user {
        User::Api(_) => scenario.hold_time(),
        User::Command(_) => scenario.server().timeouts.arrival * 3 / 4,
    };
    scenario.acknowledge(marker, [Acknowledgement::Hold(latch.clone())]);
    let thread = scenario.open_thread(marker).await?;
    let call = scenario.call().await?;
    let answered = tokio::time::timeout(held, scenario.current_prompt(&thread)).await;
    latch.release();
    let text = scenario.unique_text("afterwards");
    call.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await?;
    match answered {
        Ok(prompt) => prompt.map(|_| ()),
        Err(_) => fail(
            format!("a message was not answered while an acknowledgement was held back for {held:?}"),
            scenario.exchanges(),
        ),
    }
}

/// The marker is in an array, but the schema says that it is a string.
async fn invalid_arguments(scenario: Scenario) -> ProbeResult {
    let marker = scenario.step(|marker, step| {
        let arguments = json!({MARKER: [marker]});
        step.calls.push(ModelCall { id: scenario.model_id(), name: WORK.into(), arguments });
    });
    scenario.open_thread(marker).await?;
    let has_result = |call: &PromptCall| call.arguments[MARKER].is_array() && !call.results.is_empty();
    let answered = scenario
        .wait_for("a result of a call with invalid arguments", || {
            let sent = scenario.invocations().into_iter().next();
            let told =
                scenario.model_requests().into_iter().find(|request| request.calls().iter().any(has_result));
            sent.map(Err).or(told.map(Ok))
        })
        .await?;
    match answered {
        Ok(_) => Ok(()),
        Err(sent) => fail("arguments that violate the tool's schema were sent", vec![sent.exchange()]),
    }
}

/// The model gives the second call the id of the first.
async fn repeated_id(scenario: Scenario) -> ProbeResult {
    let id = scenario.model_id();
    let thread = scenario.open_thread(scenario.step_with_call_id(&id, WORK)).await?;
    let one = scenario.call().await?;
    let texts = [scenario.unique_text("one"), scenario.unique_text("two")];
    one.return_result(&texts[0]).await?;
    scenario.wait_for_prompt_with(&texts[0]).await?;
    scenario.send_message(&thread, scenario.step_with_call_id(&id, WORK)).await?;
    let two = scenario.call().await?;
    if one.id() == two.id() {
        return fail(
            "two calls of one thread have the same `id`, so their results cannot be distinguished",
            scenario.exchanges(),
        );
    }
    two.return_result(&texts[1]).await?;
    let model_request = scenario.wait_for_prompt_with(&texts[1]).await?;
    let results: Vec<PromptCall> =
        model_request.calls().into_iter().filter(|call| call.name == WORK).collect();
    let each =
        results.len() == 2 && results.iter().zip(&texts).all(|(call, text)| call.results == [text.clone()]);
    if each {
        Ok(())
    } else {
        fail("the results of the two calls are swapped or missing", vec![model_request.exchange()])
    }
}

/// Makes a call to which the model gives a long id with special characters. Returns the call and the id.
async fn call_with_odd_id(scenario: &Scenario) -> Result<(Call, String), Verdict> {
    let given = format!("functions.{WORK}:0/{}", scenario.model_id());
    scenario.open_thread(scenario.step_with_call_id(&given, WORK)).await?;
    Ok((scenario.call().await?, given))
}

async fn id_form(scenario: Scenario) -> ProbeResult {
    let (call, _) = call_with_odd_id(&scenario).await?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if call.id().len() <= ID_CHARACTERS && call.id().bytes().all(plain) {
        return Ok(());
    }
    let what =
        format!("the `id` is `{}`; expected at most {ID_CHARACTERS} letters, digits, `_` and `-`", call.id());
    fail(what, scenario.exchanges())
}

async fn id_of_the_model(scenario: Scenario) -> ProbeResult {
    let (call, given) = call_with_odd_id(&scenario).await?;
    if call.request.field("call_id") == given {
        return Ok(());
    }
    fail(format!("`call_id` is not `{given}`, the id that the model gave to the call"), scenario.exchanges())
}

/// The model gives the same id to calls of a thread, of its child, and of a thread of another session.
async fn ids_across_threads(scenario: Scenario) -> ProbeResult {
    let given = scenario.model_id();
    let (_, subscription_call) =
        scenario.open_with_subscription_step(scenario.step_with_call_id(&given, WATCH)).await?;
    subscription_call
        .post_accepted(
            &subscription_call.event(&scenario.message_text(scenario.step_with_call_id(&given, WORK))),
        )
        .await?;
    let inner = scenario.call().await?;
    scenario.open_thread(scenario.step_with_call_id(&given, WORK)).await?;
    let outer = scenario.call().await?;
    if outer.id() == given {
        return Err(Verdict::not_observable(
            "the runtime uses the ids of the model: see the probe call_id_form",
        ));
    }
    for (one, two) in [(&subscription_call, &inner), (&subscription_call, &outer), (&inner, &outer)] {
        if one.id() == two.id() {
            let what =
                "two calls have the same `id`; a tool server that identifies calls by it would confuse them";
            return fail(what, vec![one.request.exchange(), two.request.exchange()]);
        }
    }
    Ok(())
}
