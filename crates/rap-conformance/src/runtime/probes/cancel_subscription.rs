//! The built-in tool `cancel_subscription`.

use super::subscriptions::expect_discarded;
use super::{Check, Phase, as_not_observable};
use crate::runtime::mock_server::Route;
use crate::runtime::model::{CANCEL_SUBSCRIPTION, Prompt};
use crate::runtime::scenario::{ProbeResult, Scenario, fail};
use crate::{Probe, Verdict};

pub(super) const CHECKS: &[Check] = &[
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
];

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

/// Depends on nothing but this scenario: the subscription is active, and the model's call of `cancel_subscription`
/// succeeded.
async fn cancelled(scenario: Scenario) -> ProbeResult {
    let (thread, subscription_call) = scenario.open_with_subscription().await?;
    let id = scenario.prompt_id_of(&subscription_call);
    scenario.send_message(&thread, scenario.step_cancelling(&id)).await?;
    let text = cancelling(&scenario, &id).await.map_err(as_not_observable)?;
    if is_error(&text) {
        return Err(Verdict::not_observable(
            "cancel_subscription did not succeed: see the probe cancel_subscription_at_once",
        ));
    }
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
