//! Conversations: when the model is called, and with which prompts.

use super::{Check, Phase};
use crate::Probe;
use crate::runtime::model::ModelRequest;
use crate::runtime::scenario::{ProbeResult, Scenario, fail};
use crate::runtime::tools::WORK;

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "responsive",
            requirements: &["LC-19"],
            checks: "A message is answered while a call is open, and the result of the call reaches the model later.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(responsive(scenario)),
    },
    Check {
        probe: Probe {
            name: "model_failure",
            requirements: &["LC-22"],
            checks: "A message stays in the history if the model request fails.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(model_fails(scenario)),
    },
    Check {
        probe: Probe {
            name: "prompts_are_valid",
            requirements: &["LC-16"],
            checks: "In every prompt, each assistant message with calls is followed by their results.",
        },
        phase: Phase::Last,
        run: |scenario| Box::pin(valid(scenario)),
    },
    Check {
        probe: Probe {
            name: "conversations_are_apart",
            requirements: &["LC-29"],
            checks: "No prompt contains messages of another conversation.",
        },
        phase: Phase::Last,
        run: |scenario| Box::pin(apart(scenario)),
    },
];

async fn responsive(scenario: Scenario) -> ProbeResult {
    let (thread, call) = scenario.open_with_call(WORK).await?;
    scenario.current_prompt(&thread).await?;
    let text = scenario.unique_text("afterwards");
    call.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await?;
    Ok(())
}

async fn model_fails(scenario: Scenario) -> ProbeResult {
    let marker = scenario.step(|_, step| step.error_statuses = [400].into());
    let written = scenario.server().marker_text(marker);
    let thread = scenario.open_thread(marker).await?;
    scenario.wait_for_prompt_with(&written).await?;
    let model_request = scenario.current_prompt(&thread).await?;
    if model_request.has(&written) {
        return Ok(());
    }
    fail("a message was lost after a failed model request", vec![model_request.exchange()])
}

fn all_model_requests(scenario: &Scenario) -> Vec<ModelRequest> {
    scenario
        .server()
        .requests(|request| request.prompt.is_some())
        .into_iter()
        .filter_map(ModelRequest::of)
        .collect()
}

async fn valid(scenario: Scenario) -> ProbeResult {
    for model_request in all_model_requests(&scenario) {
        if let Some(fault) = model_request.fault() {
            return fail(
                format!("a model API would reject this prompt: {fault}"),
                vec![model_request.exchange()],
            );
        }
    }
    Ok(())
}

async fn apart(scenario: Scenario) -> ProbeResult {
    for model_request in all_model_requests(&scenario) {
        let markers = model_request.markers(scenario.server());
        if markers.iter().any(|marker| marker.scenario != markers[0].scenario) {
            return fail("a prompt contains messages of two conversations", vec![model_request.exchange()]);
        }
    }
    Ok(())
}
