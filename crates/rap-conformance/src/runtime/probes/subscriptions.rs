//! Subscriptions: confirmation, events in the subscribing thread or in an event child, and their end.

use serde_json::{Value, json};

use super::{Check, Phase, as_not_observable};
use crate::runtime::mock_server::Route;
use crate::runtime::model::ModelRequest;
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
        phase: Phase::First,
        run: |scenario| Box::pin(first_subscription(scenario)),
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
            requirements: &["SE-08", "SE-02"],
            checks: "An associative event is added to the subscribing thread.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(inline(scenario)),
    },
    Check {
        probe: Probe {
            name: "event_answered_200",
            requirements: &["SE-05"],
            checks: "An event is answered 200.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(answered_200(scenario)),
    },
    Check {
        probe: Probe {
            name: "event_in_a_child",
            requirements: &["SE-09"],
            checks: "An event with `associative: false` is handled in a new thread, which inherits the history.",
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
            requirements: &[],
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

/// Other probes of subscriptions depend on this one.
async fn first_subscription(scenario: Scenario) -> ProbeResult {
    let outcome = confirmed(&scenario).await;
    if let Err(Verdict::Fail { .. }) = &outcome {
        scenario.context.subscriptions_fail.get_or_init(|| ());
    }
    outcome
}

async fn confirmed(scenario: &Scenario) -> ProbeResult {
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
    subscription_call.post_accepted(&subscription_call.inline_event(&event)).await?;
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

async fn answered_200(scenario: Scenario) -> ProbeResult {
    let (_, subscription_call) = scenario.open_with_subscription().await?;
    subscription_call.post_expecting_200(&subscription_call.event(&scenario.unique_text("tick"))).await
}

async fn own_thread(scenario: Scenario) -> ProbeResult {
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    let event = scenario.unique_text("tick");
    let body = with(subscription_call.event(&event), json!({"associative": false}));
    subscription_call.post_accepted(&body).await?;
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
        return Err(Verdict::not_observable(
            "an event that is not associative was handled in the subscribing thread: see the probe event_in_a_child",
        ));
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

/// Opens a thread with a subscription whose associative events reach it. Otherwise another probe fails.
pub(super) async fn open_with_inline_events(scenario: &Scenario) -> Result<(String, Call), Verdict> {
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    let event = scenario.unique_text("inline");
    subscription_call.post_accepted(&subscription_call.inline_event(&event)).await?;
    scenario.wait_for_prompt_with(&event).await?;
    if !scenario.current_prompt(&thread).await?.has(&event) {
        return Err(Verdict::not_observable(
            "an associative event is not in the history of the subscribing thread: see the probe event_in_its_thread",
        ));
    }
    scenario.wait_until_idle(&thread).await?;
    Ok((thread, subscription_call))
}

async fn behind_a_call(scenario: Scenario) -> ProbeResult {
    let (thread, subscription_call) = open_with_inline_events(&scenario).await?;
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
    let (thread, subscription_call) = open_with_inline_events(&scenario).await?;
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
pub(super) async fn expect_discarded(scenario: &Scenario, call: &Call, what: &str) -> ProbeResult {
    let (here, apart) = (scenario.unique_text("late"), scenario.unique_text("laterstill"));
    for body in [call.inline_event(&here), call.event(&apart)] {
        call.post(&body).await?;
    }
    scenario.wait_for_silence().await;
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
    scenario.wait_for_silence().await;
    let received = scenario.notifications(Route::Cancel, subscription_call.thread());
    match received.first() {
        None => Ok(()),
        Some((_, request)) => {
            fail("/cancel_tool_call was sent for a subscription of a closed thread", vec![request.exchange()])
        }
    }
}

/// One event with both fields set to false, and two without them.
async fn defaults(scenario: Scenario) -> ProbeResult {
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    let events = ["set", "first", "second"].map(|prefix| scenario.unique_text(prefix));
    for (event, more) in
        events.iter().zip([json!({"associative": false, "final": false}), json!({}), json!({})])
    {
        let body: Value = with(subscription_call.event(event), more);
        subscription_call.post_accepted(&body).await?;
        scenario.wait_for_prompt_with(event).await?;
    }
    let model_request = scenario.current_prompt(&thread).await?;
    if model_request.has(&events[0]) {
        return Err(Verdict::not_observable(
            "an event with `associative: false` is in the subscribing thread: see the probe event_in_a_child",
        ));
    }
    match events.iter().find(|event| model_request.has(event)) {
        None => Ok(()),
        Some(_) => fail(
            "an event without `associative` is in the history of the subscribing thread",
            vec![model_request.exchange()],
        ),
    }
}

/// Makes many subscriptions, and sends an event to each to see which of them are active.
async fn limit(scenario: Scenario) -> ProbeResult {
    scenario.open_thread(scenario.step_with_calls(&[WATCH; SUBSCRIPTIONS])).await?;
    let mut calls = Vec::new();
    for _ in 0..SUBSCRIPTIONS {
        calls.push(scenario.call().await.map_err(as_not_observable)?);
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
