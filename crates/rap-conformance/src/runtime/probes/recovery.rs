//! Recovery: after the runtime is killed and restarted, everything that it had accepted is there exactly once.

use super::subscriptions::open_with_inline_events;
use super::{Check, Phase, as_not_observable};
use crate::runtime::crash::Participant;
use crate::runtime::scenario::{ProbeResult, Scenario, fail};
use crate::runtime::tools::{Acknowledgement, WORK};
use crate::runtime::user::User;
use crate::{Probe, Verdict};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "crash_in_a_call",
            requirements: &["LC-38"],
            checks: "A call that is open when the runtime is killed can return after the restart.",
        },
        phase: Phase::Crash,
        run: |scenario| Box::pin(open_call(scenario)),
    },
    Check {
        probe: Probe {
            name: "crash_after_a_result",
            requirements: &["TR-13"],
            checks: "A result that was answered 200 survives a crash of the runtime.",
        },
        phase: Phase::Crash,
        run: |scenario| Box::pin(accepted_result(scenario)),
    },
    Check {
        probe: Probe {
            name: "crash_after_an_event",
            requirements: &["TR-13"],
            checks: "An event that was answered 200 and its subscription survive a crash of the runtime.",
        },
        phase: Phase::Crash,
        run: |scenario| Box::pin(accepted_event(scenario)),
    },
    Check {
        probe: Probe {
            name: "crash_after_a_message",
            requirements: &["LC-38"],
            checks: "A message that was accepted is in the history exactly once after a crash of the runtime.",
        },
        phase: Phase::Crash,
        run: |scenario| Box::pin(accepted_message(scenario)),
    },
    Check {
        probe: Probe {
            name: "crash_in_a_question",
            requirements: &["LC-38"],
            checks: "A model request that is interrupted by a crash of the runtime is repeated.",
        },
        phase: Phase::Crash,
        run: |scenario| Box::pin(model_request(scenario)),
    },
    Check {
        probe: Probe {
            name: "crash_in_a_retry",
            requirements: &["TR-06"],
            checks: "A pending retry of an invocation survives a crash, with the same id and callback URL.",
        },
        phase: Phase::Crash,
        run: |scenario| Box::pin(retry(scenario)),
    },
    Check {
        probe: Probe {
            name: "crash_and_a_duplicate",
            requirements: &["LC-30", "TR-25"],
            checks: "A result that was accepted before a crash and is sent again after it changes nothing.",
        },
        phase: Phase::Crash,
        run: |scenario| Box::pin(duplicate(scenario)),
    },
];

/// Registers the probe for the crash. Each probe calls this first, so that a failing probe is counted as finished.
fn participant(scenario: &Scenario) -> Result<Participant<'_>, Verdict> {
    let crash = scenario.crash.as_ref();
    crash
        .map(|crash| crash.participant())
        .ok_or_else(|| Verdict::not_observable("the checker cannot restart the runtime"))
}

/// Fails if the runtime was not restarted, or does not know the thread any more.
async fn expect_survived(scenario: &Scenario, thread: &str) -> ProbeResult {
    if let Some(why) = scenario.crash.as_ref().and_then(|crash| crash.restart_error()) {
        return fail(format!("the runtime could not be restarted: {why}"), Vec::new());
    }
    if let User::Api(api) = &scenario.context.user
        && api.get(&scenario.context.http, &["threads", thread]).await?.is_null()
    {
        return fail("the runtime does not know a thread any more that it knew before the crash", Vec::new());
    }
    Ok(())
}

/// Not observable if nothing survived, which is the failure of `crash_in_a_call`.
async fn needs_thread(scenario: &Scenario, thread: &str) -> ProbeResult {
    expect_survived(scenario, thread).await.map_err(as_not_observable)
}

async fn open_call(scenario: Scenario) -> ProbeResult {
    let participant = participant(&scenario)?;
    let (thread, call) = scenario.open_with_call(WORK).await?;
    participant.wait_for_restart(async {}).await;
    expect_survived(&scenario, &thread).await?;
    let text = scenario.unique_text("aftercrash");
    call.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await?;
    Ok(())
}

/// The result is answered 200 immediately before the crash. A second open call delays the model request.
async fn accepted_result(scenario: Scenario) -> ProbeResult {
    let participant = participant(&scenario)?;
    let thread = scenario.open_thread(scenario.step_with_calls(&[WORK, WORK])).await?;
    // Calls that are sent one after the other are the failure of another probe.
    let mut calls = [scenario.call().await?, scenario.call().await.map_err(as_not_observable)?];
    calls.sort_by_key(|call| call.marker().to_owned());
    let [one, two] = calls;
    let texts = [scenario.unique_text("before"), scenario.unique_text("after")];
    participant.wait_for_restart(one.return_result(&texts[0])).await?;
    needs_thread(&scenario, &thread).await?;
    two.return_result(&texts[1]).await?;
    let model_request = scenario.wait_for_prompt_with(&texts[1]).await?;
    if model_request.results_of(one.marker()) == [texts[0].clone()] {
        return Ok(());
    }
    fail(
        "a result that was answered 200 is lost after a crash",
        vec![one.request.exchange(), model_request.exchange()],
    )
}

async fn accepted_event(scenario: Scenario) -> ProbeResult {
    let participant = participant(&scenario)?;
    let (thread, subscription_call) = open_with_inline_events(&scenario).await?;
    let texts = [scenario.unique_text("tick"), scenario.unique_text("tock")];
    participant
        .wait_for_restart(subscription_call.post_accepted(&subscription_call.inline_event(&texts[0])))
        .await?;
    needs_thread(&scenario, &thread).await?;
    scenario.wait_for_prompt_with(&texts[0]).await?;
    if !scenario.current_prompt(&thread).await?.has(&texts[0]) {
        return fail("an event that was accepted before a crash is lost", scenario.exchanges());
    }
    // The subscription is still active.
    subscription_call.post_accepted(&subscription_call.inline_event(&texts[1])).await?;
    scenario.wait_for_prompt_with(&texts[1]).await?;
    Ok(())
}

async fn accepted_message(scenario: Scenario) -> ProbeResult {
    let participant = participant(&scenario)?;
    let first = scenario.noop_step();
    let thread = scenario.open_thread(first).await?;
    scenario.wait_for_prompt_with(&scenario.server().marker_text(first)).await?;
    let marker = scenario.noop_step();
    participant.wait_for_restart(scenario.send_message(&thread, marker)).await?;
    needs_thread(&scenario, &thread).await?;
    scenario.wait_for_prompt_with(&scenario.server().marker_text(marker)).await?;
    let model_request = scenario.current_prompt(&thread).await?;
    match model_request.count(&scenario.server().marker_text(marker)) {
        1 => Ok(()),
        times => fail(
            format!("after a crash, a message is {times} times in the prompt"),
            vec![model_request.exchange()],
        ),
    }
}

/// The runtime is killed while it waits for the model's answer.
async fn model_request(scenario: Scenario) -> ProbeResult {
    let participant = participant(&scenario)?;
    let marker = scenario.step_with_calls(&[WORK]);
    let latch = scenario.hold_answer(marker);
    let thread = scenario.open_thread(marker).await?;
    scenario.wait_for_prompt_with(&scenario.server().marker_text(marker)).await?;
    participant.wait_for_restart(async {}).await;
    latch.release();
    needs_thread(&scenario, &thread).await?;
    let call = scenario.call().await?;
    let text = scenario.unique_text("worked");
    call.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await?;
    Ok(())
}

/// The runtime is killed while it waits for the next attempt of an invocation that was answered 503.
async fn retry(scenario: Scenario) -> ProbeResult {
    let participant = participant(&scenario)?;
    let marker = scenario.step_with_calls(&[WORK]);
    // All attempts before the crash are answered 503.
    scenario.acknowledge(marker, (0..1000).map(|_| Acknowledgement::Status(503)));
    let thread = scenario.open_thread(marker).await?;
    let first = scenario.call().await?;
    let retried = || (scenario.invocations().len() > 1).then_some(());
    scenario.wait_for("a second attempt of an invocation", retried).await.map_err(as_not_observable)?;
    participant.wait_for_restart(async {}).await;
    scenario.acknowledge(marker, []);
    let before = scenario.invocations().len();
    needs_thread(&scenario, &thread).await?;
    let again = scenario
        .wait_for("another attempt of the invocation after the crash", || {
            scenario.invocations().get(before).cloned()
        })
        .await?;
    if again.body["id"] != first.id() || again.body["callback_url"] != first.url() {
        return fail(
            "after a crash, the `id` or the `callback_url` of an invocation is different",
            scenario.exchanges(),
        );
    }
    let text = scenario.unique_text("taken");
    first.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await?;
    Ok(())
}

async fn duplicate(scenario: Scenario) -> ProbeResult {
    let participant = participant(&scenario)?;
    let (thread, call) = scenario.open_with_call(WORK).await?;
    let text = scenario.unique_text("once");
    call.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await?;
    call.post_with_retry(&call.result(&text)).await?;
    if scenario.current_prompt(&thread).await?.count(&text) > 1 {
        return Err(Verdict::not_observable("duplicates are counted: see the probe duplicate_result"));
    }
    participant.wait_for_restart(async {}).await;
    needs_thread(&scenario, &thread).await?;
    // A tool that has not received the answer sends the result again.
    call.post_with_retry(&call.result(&text)).await?;
    scenario.wait_for_silence().await;
    let model_request = scenario.current_prompt(&thread).await?;
    match model_request.count(&text) {
        1 => Ok(()),
        0 => fail("a result that was accepted before a crash is lost", vec![model_request.exchange()]),
        times => fail(
            format!("a result that was accepted before a crash is {times} times in the prompt"),
            scenario.exchanges(),
        ),
    }
}
