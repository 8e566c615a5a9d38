//! Subscriptions: confirmation, events in the subscribing thread or in an event child, and their end.

use serde_json::{Value, json};

use super::{Check, Phase};
use crate::runtime::mock_server::Route;
use crate::runtime::model::{CANCEL_SUBSCRIPTION, ModelRequest, Prompt};
use crate::runtime::scenario::{ProbeResult, Scenario, fail};
use crate::runtime::tools::{Call, MARKER, WATCH, WORK, with};
use crate::{Probe, Verdict};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "subscription_confirmed",
            requirements: &["SE-13"],
            checks: "Events of a confirmed subscription are accepted and cause a model request.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(confirmed(scenario)),
    },
    Check {
        probe: Probe {
            name: "event_is_a_synthetic_call",
            requirements: &["SE-07"],
            checks: "In the prompt, an event is the result of a synthetic call that echoes the original call.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(synthetic(scenario)),
    },
    Check {
        probe: Probe {
            name: "subscription_has_one_result",
            requirements: &["SE-06"],
            checks: "The call that made a subscription keeps exactly one result.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(one_result(scenario)),
    },
    Check {
        probe: Probe {
            name: "event_in_its_thread",
            requirements: &["SE-08", "SE-02", "SE-05"],
            checks: "An associative event is added to the subscribing thread.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(inline(scenario)),
    },
    Check {
        probe: Probe {
            name: "event_in_a_child",
            requirements: &["SE-09"],
            checks: "An event that is not associative is handled in a new thread, which inherits the history.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(own_thread(scenario)),
    },
    Check {
        probe: Probe {
            name: "event_defaults",
            requirements: &["SE-02"],
            checks: "`associative` and `final` are false by default.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(defaults(scenario)),
    },
    Check {
        probe: Probe {
            name: "thread_ancestors",
            requirements: &["SE-09"],
            checks: "The invocations of a child thread have `thread_ancestors`.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(ancestors(scenario)),
    },
    Check {
        probe: Probe {
            name: "events_behind_a_call",
            requirements: &["SE-05", "SE-08"],
            checks: "Events that arrive while a call is open reach the model later, in order.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(behind_a_call(scenario)),
    },
    Check {
        probe: Probe {
            name: "events_behind_a_question",
            requirements: &["SE-05", "SE-08"],
            checks: "Events that arrive during a model request reach the model later, in order.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(behind_a_question(scenario)),
    },
    Check {
        probe: Probe {
            name: "final_event",
            requirements: &["SE-03", "SE-22"],
            checks: "After a final event, further events are discarded.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(last(scenario)),
    },
    Check {
        probe: Probe {
            name: "event_of_no_subscription",
            requirements: &["SE-22"],
            checks: "An event of a call that is not a subscription is discarded.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(never_subscribed(scenario)),
    },
    Check {
        probe: Probe {
            name: "cancel_subscription_offered",
            requirements: &["SE-14"],
            checks: "The model is offered a tool `cancel_subscription` with the single parameter `tool_call_id`.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(offered(scenario)),
    },
    Check {
        probe: Probe {
            name: "cancel_subscription_told",
            requirements: &["SE-16"],
            checks: "`cancel_subscription` sends /cancel_tool_call to every tool server.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(cancelled(scenario)),
    },
    Check {
        probe: Probe {
            name: "cancel_subscription_at_once",
            requirements: &["SE-18"],
            checks: "The result of `cancel_subscription` is in the next model request.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(cancelled_at_once(scenario)),
    },
    Check {
        probe: Probe {
            name: "cancel_subscription_ends_it",
            requirements: &["SE-17", "SE-22"],
            checks: "Events of a cancelled subscription are discarded.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(cancelled_events(scenario)),
    },
    Check {
        probe: Probe {
            name: "cancel_subscription_unknown",
            requirements: &["SE-15"],
            checks: "`cancel_subscription` with an unknown subscription returns an error.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(cancelled_unknown(scenario)),
    },
    Check {
        probe: Probe {
            name: "cancel_subscription_foreign",
            requirements: &["SE-15"],
            checks: "`cancel_subscription` with a subscription of another thread returns an error.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(cancelled_foreign(scenario)),
    },
    Check {
        probe: Probe {
            name: "event_after_closing",
            requirements: &["SE-21"],
            checks: "Events of a closed thread are discarded.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(closed(scenario)),
    },
    Check {
        probe: Probe {
            name: "closing_cancels_nothing",
            requirements: &["SE-20"],
            checks: "Closing a thread sends no /cancel_tool_call for its subscriptions.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(closing_cancels_nothing(scenario)),
    },
    Check {
        probe: Probe {
            name: "subscription_limit",
            requirements: &["SE-25"],
            checks: "The number of subscriptions of one thread is limited.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(limit(scenario)),
    },
];

/// Number of subscriptions that the probe makes in one thread.
const SUBSCRIPTIONS: usize = 100;

/// Waits for the result of `cancel_subscription` in a prompt.
async fn cancelling(scenario: &Scenario, subscription: &str) -> Result<String, Verdict> {
    let of = |prompt: &Prompt| prompt.result_of_cancelling(subscription);
    let what = "a model request with the result of cancel_subscription";
    let model_request = scenario.wait_for_model_request(what, |request| of(request).is_some()).await?;
    Ok(of(&model_request).unwrap_or_default())
}

fn is_error(text: &str) -> bool {
    text.to_lowercase().contains("error")
}

async fn confirmed(scenario: Scenario) -> ProbeResult {
    let (thread, subscription_call) = scenario.open_with_call(WATCH).await?;
    let (text, event) = (scenario.unique_text("watching"), scenario.unique_text("tick"));
    subscription_call.confirm(&text).await?;
    let model_request = scenario.wait_for_prompt_with(&text).await?;
    if model_request.results_of(subscription_call.marker()).len() != 1 {
        return fail(
            "the confirmation does not follow its call as its only result",
            vec![model_request.exchange()],
        );
    }
    scenario.wait_until_idle(&thread).await?;
    subscription_call.post_with_retry(&subscription_call.inline_event(&event)).await?;
    scenario.wait_for_prompt_with(&event).await?;
    Ok(())
}

async fn synthetic(scenario: Scenario) -> ProbeResult {
    let (_, subscription_call) = scenario.open_with_subscription().await?;
    let event = scenario.unique_text("tick");
    subscription_call.post_accepted(&subscription_call.inline_event(&event)).await?;
    let model_request = scenario.wait_for_prompt_with(&event).await?;
    let shown = || vec![subscription_call.request.exchange(), model_request.exchange()];
    let Some(call) = model_request.call_with_result(&event) else {
        return fail("the event is not the result of a synthetic call", shown());
    };
    let kind = call.arguments["kind"].as_str().unwrap_or_default();
    if call.name != subscription_call.operation() || call.arguments[MARKER] != subscription_call.marker() {
        return fail(
            "the synthetic call of an event does not have the name and the arguments of the original call",
            shown(),
        );
    }
    // The id may be the one of the invocation or the one in prompts.
    let expected = format!("interrupt:{} (subscription remains active)", subscription_call.id());
    let known =
        format!("interrupt:{} (subscription remains active)", scenario.prompt_id_of(&subscription_call));
    if kind != expected && kind != known {
        return fail(format!("the `kind` of a synthetic call is `{kind}` instead of `{expected}`"), shown());
    }
    Ok(())
}

async fn one_result(scenario: Scenario) -> ProbeResult {
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    let event = scenario.unique_text("tick");
    subscription_call.post_accepted(&subscription_call.inline_event(&event)).await?;
    scenario.wait_for_prompt_with(&event).await?;
    let model_request = scenario.current_prompt(&thread).await?;
    match model_request.results_of(subscription_call.marker()).len() {
        1 => Ok(()),
        count => fail(
            format!("the call that made the subscription has {count} results instead of one"),
            vec![model_request.exchange()],
        ),
    }
}

async fn inline(scenario: Scenario) -> ProbeResult {
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    let event = scenario.unique_text("tick");
    subscription_call.post_expecting_200(&subscription_call.inline_event(&event)).await?;
    scenario.wait_for_prompt_with(&event).await?;
    let model_request = scenario.current_prompt(&thread).await?;
    if model_request.has(&event) {
        return Ok(());
    }
    fail(
        "an associative event is not in the history of the subscribing thread",
        vec![model_request.exchange()],
    )
}

async fn own_thread(scenario: Scenario) -> ProbeResult {
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    let event = scenario.unique_text("tick");
    subscription_call.post_accepted(&subscription_call.event(&event)).await?;
    let model_request = scenario.wait_for_prompt_with(&event).await?;
    if !model_request.has(&scenario.unique_text("watching")) {
        return fail(
            "the thread of an event does not inherit the history of the subscribing thread",
            vec![model_request.exchange()],
        );
    }
    let model_request = scenario.current_prompt(&thread).await?;
    if model_request.has(&event) {
        let what = "an event that is not associative is in the history of the subscribing thread";
        return fail(what, vec![model_request.exchange()]);
    }
    Ok(())
}

/// The event makes its child thread call a tool.
async fn ancestors(scenario: Scenario) -> ProbeResult {
    let (_, subscription_call) = scenario.open_with_subscription().await?;
    let marker = scenario.step_with_calls(&[WORK]);
    subscription_call.post_accepted(&subscription_call.event(&scenario.message_text(marker))).await?;
    let call = scenario.call().await?;
    if call.thread() == subscription_call.thread() {
        return fail(
            "an event that is not associative was handled in the subscribing thread",
            scenario.exchanges(),
        );
    }
    let ancestors = &call.request.body["thread_ancestors"];
    let last = ancestors.as_array().and_then(|ancestors| ancestors.last());
    if last != Some(&json!(subscription_call.thread())) {
        return fail(
            "the last of the `thread_ancestors` of a child thread is not its parent",
            scenario.exchanges(),
        );
    }
    call.return_result("done").await
}

async fn behind_a_call(scenario: Scenario) -> ProbeResult {
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    scenario.send_message(&thread, scenario.step_with_calls(&[WORK])).await?;
    let work = scenario.call().await?;
    let events: Vec<String> = (1..=3).map(|number| scenario.unique_text(&format!("tick{number}"))).collect();
    for event in &events {
        subscription_call.post_accepted(&subscription_call.inline_event(event)).await?;
    }
    let text = scenario.unique_text("worked");
    work.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await?;
    in_order(&scenario, &events).await
}

async fn behind_a_question(scenario: Scenario) -> ProbeResult {
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    let marker = scenario.noop_step();
    let latch = scenario.hold_answer(marker);
    scenario.send_message(&thread, marker).await?;
    scenario.wait_for_prompt_with(&scenario.server().marker_text(marker)).await?;
    let events: Vec<String> = (1..=3).map(|number| scenario.unique_text(&format!("tick{number}"))).collect();
    for event in &events {
        subscription_call.post_accepted(&subscription_call.inline_event(event)).await?;
    }
    latch.release();
    in_order(&scenario, &events).await
}

/// Fails unless all events reach the model, each once and in order.
async fn in_order(scenario: &Scenario, events: &[String]) -> ProbeResult {
    let all = |request: &ModelRequest| events.iter().all(|event| request.has(event));
    let model_request = scenario.wait_for_model_request("a model request with all three events", all).await?;
    let calls = model_request.calls();
    let results: Vec<&String> = calls.iter().flat_map(|call| &call.results).collect();
    let places: Vec<usize> = events
        .iter()
        .filter_map(|event| results.iter().position(|result| result.contains(event.as_str())))
        .collect();
    if events.iter().any(|event| model_request.count(event) != 1) {
        return fail("an event reached the model more than once", vec![model_request.exchange()]);
    }
    if places.is_sorted() {
        Ok(())
    } else {
        fail("the events are in the wrong order", vec![model_request.exchange()])
    }
}

/// Sends two events, and fails if one of them reaches the model in any thread.
async fn expect_discarded(scenario: &Scenario, call: &Call, what: &str) -> ProbeResult {
    let (here, apart) = (scenario.unique_text("late"), scenario.unique_text("laterstill"));
    for body in [call.inline_event(&here), call.event(&apart)] {
        call.post(&body).await?;
    }
    scenario.settle().await;
    scenario.expect_never_in_prompt(&here, what)?;
    scenario.expect_never_in_prompt(&apart, what)
}

async fn last(scenario: Scenario) -> ProbeResult {
    let (_, subscription_call) = scenario.open_with_subscription().await?;
    let event = scenario.unique_text("last");
    subscription_call
        .post_accepted(&with(subscription_call.inline_event(&event), json!({"final": true})))
        .await?;
    scenario.wait_for_prompt_with(&event).await?;
    expect_discarded(&scenario, &subscription_call, "an event after the final one").await
}

async fn never_subscribed(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let text = scenario.unique_text("returned");
    call.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await?;
    expect_discarded(&scenario, &call, "an event of a call that is not a subscription").await
}

async fn offered(scenario: Scenario) -> ProbeResult {
    let marker = scenario.noop_step();
    scenario.open_thread(marker).await?;
    let model_request = scenario.wait_for_prompt_with(&scenario.server().marker_text(marker)).await?;
    let Some(schema) = model_request.offered(CANCEL_SUBSCRIPTION) else {
        return fail(
            "the model is not offered the tool `cancel_subscription`",
            vec![model_request.exchange()],
        );
    };
    let names: Vec<&String> =
        schema["properties"].as_object().into_iter().flat_map(|fields| fields.keys()).collect();
    if names == ["tool_call_id"] {
        return Ok(());
    }
    let what =
        format!("the parameters of `cancel_subscription` are {names:?} instead of only `tool_call_id`");
    fail(what, vec![model_request.exchange()])
}

async fn cancelled(scenario: Scenario) -> ProbeResult {
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    scenario
        .send_message(&thread, scenario.step_cancelling(&scenario.prompt_id_of(&subscription_call)))
        .await?;
    let received = scenario
        .notifications_to_all(
            Route::Cancel,
            subscription_call.thread(),
            "/cancel_tool_call for the subscription",
        )
        .await?;
    match received.iter().find(|(_, request)| request.field("tool_call_id") != subscription_call.id()) {
        None => Ok(()),
        Some((_, request)) => fail("/cancel_tool_call has the id of another call", vec![request.exchange()]),
    }
}

/// The model request after the call of `cancel_subscription` already contains its result.
async fn cancelled_at_once(scenario: Scenario) -> ProbeResult {
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    let id = scenario.prompt_id_of(&subscription_call);
    scenario.send_message(&thread, scenario.step_cancelling(&id)).await?;
    let text = cancelling(&scenario, &id).await?;
    if text.trim().is_empty() || is_error(&text) || text.contains("still running") {
        return fail(
            format!("cancel_subscription did not succeed; its result is: {text}"),
            scenario.exchanges(),
        );
    }
    Ok(())
}

async fn cancelled_events(scenario: Scenario) -> ProbeResult {
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    let id = scenario.prompt_id_of(&subscription_call);
    scenario.send_message(&thread, scenario.step_cancelling(&id)).await?;
    cancelling(&scenario, &id).await?;
    expect_discarded(&scenario, &subscription_call, "an event of a cancelled subscription").await
}

async fn cancelled_unknown(scenario: Scenario) -> ProbeResult {
    let id = "no-such-subscription";
    scenario.open_thread(scenario.step_cancelling(id)).await?;
    let text = cancelling(&scenario, id).await?;
    if is_error(&text) {
        return Ok(());
    }
    fail(
        format!("cancel_subscription with an unknown subscription returned no error, but: {text}"),
        scenario.exchanges(),
    )
}

async fn cancelled_foreign(scenario: Scenario) -> ProbeResult {
    let (_, subscription_call) = scenario.open_with_subscription().await?;
    let id = scenario.prompt_id_of(&subscription_call);
    scenario.open_thread(scenario.step_cancelling(&id)).await?;
    let text = cancelling(&scenario, &id).await?;
    if !is_error(&text) {
        return fail(
            format!(
                "cancel_subscription with a subscription of another thread returned no error, but: {text}"
            ),
            scenario.exchanges(),
        );
    }
    let event = scenario.unique_text("tick");
    subscription_call.post_accepted(&subscription_call.inline_event(&event)).await?;
    scenario.wait_for_prompt_with(&event).await?;
    Ok(())
}

async fn closed(scenario: Scenario) -> ProbeResult {
    scenario.can_close()?;
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    scenario.close(&thread).await?;
    expect_discarded(&scenario, &subscription_call, "an event of a closed thread").await
}

async fn closing_cancels_nothing(scenario: Scenario) -> ProbeResult {
    scenario.can_close()?;
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    scenario.close(&thread).await?;
    scenario.settle().await;
    let received = scenario.notifications(Route::Cancel, subscription_call.thread());
    match received.first() {
        None => Ok(()),
        Some((_, request)) => {
            fail("/cancel_tool_call was sent for a subscription of a closed thread", vec![request.exchange()])
        }
    }
}

/// One event without the fields, and one with both set to false.
async fn defaults(scenario: Scenario) -> ProbeResult {
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    let events = [scenario.unique_text("first"), scenario.unique_text("second")];
    for (event, more) in events.iter().zip([json!({}), json!({"associative": false, "final": false})]) {
        let body: Value = with(subscription_call.event(event), more);
        subscription_call.post_accepted(&body).await?;
        scenario.wait_for_prompt_with(event).await?;
    }
    let model_request = scenario.current_prompt(&thread).await?;
    match events.iter().find(|event| model_request.has(event)) {
        None => Ok(()),
        Some(_) => fail(
            "an event without `associative: true` is in the history of the subscribing thread",
            vec![model_request.exchange()],
        ),
    }
}

/// Makes many subscriptions, and sends an event to each to see which of them are active.
async fn limit(scenario: Scenario) -> ProbeResult {
    scenario.open_thread(scenario.step_with_calls(&[WATCH; SUBSCRIPTIONS])).await?;
    let mut calls = Vec::new();
    for _ in 0..SUBSCRIPTIONS {
        calls.push(scenario.call().await?);
    }
    for call in &calls {
        call.confirm("watching").await?;
    }
    for (active, call) in calls.iter().enumerate() {
        let posted = call.post_with_retry(&with(call.inline_event("tick"), json!({"final": true}))).await?;
        match active {
            _ if !posted.is_rejected() => {}
            0 => return Err(Verdict::not_observable("no subscription is active")),
            _ => return Ok(()),
        }
    }
    Err(Verdict::not_observable(format!(
        "one thread could make {SUBSCRIPTIONS} subscriptions; a limit may be higher"
    )))
}
