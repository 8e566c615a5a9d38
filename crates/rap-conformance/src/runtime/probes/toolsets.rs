//! Toolsets: fetched once for a session, cached, and refreshed after a 409.

use super::{Check, Phase};
use crate::Probe;
use crate::runtime::mock_server::{Reply, Route, SERVERS};
use crate::runtime::scenario::{ProbeResult, Scenario, fail};
use crate::runtime::tools::{self, ADDED, Acknowledgement, CHANGING, SECOND, WORK};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "discovery_once",
            requirements: &["LC-36"],
            checks: "A session fetches the toolset of each tool server once and does not poll.",
        },
        phase: Phase::First,
        run: |scenario| Box::pin(once(scenario)),
    },
    Check {
        probe: Probe {
            name: "toolset_of_a_new_session",
            requirements: &["LC-36"],
            checks: "The model of a new session is offered the current toolsets.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(new_session(scenario)),
    },
    Check {
        probe: Probe {
            name: "toolset_after_a_conflict",
            requirements: &["LC-35"],
            checks: "After a 409 the toolset is fetched again, and the model can call its new tools.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(conflict(scenario)),
    },
    Check {
        probe: Probe {
            name: "toolset_from_the_cache",
            requirements: &["LC-21"],
            checks: "A session keeps using its cached toolset while discovery fails.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(cached(scenario)),
    },
    Check {
        probe: Probe {
            name: "toolset_missing",
            requirements: &["LC-40"],
            checks: "A toolset that cannot be fetched is reported in the history, and the other tools stay usable.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(missing(scenario)),
    },
];

/// Replaces the toolset of the second server until this is dropped.
struct OfferOverride<'a> {
    scenario: &'a Scenario,
    before: Reply,
}

impl<'a> OfferOverride<'a> {
    fn new(scenario: &'a Scenario, reply: Reply) -> OfferOverride<'a> {
        let before = std::mem::replace(&mut scenario.server().record().documents[SECOND], reply);
        OfferOverride { scenario, before }
    }

    /// Another version with an additional tool.
    fn changed(scenario: &'a Scenario) -> OfferOverride<'a> {
        let version = format!("second-{}", scenario.number);
        OfferOverride::new(
            scenario,
            Reply::json(&tools::second_toolset(&scenario.server().url, &version, &[CHANGING, ADDED])),
        )
    }
}

impl Drop for OfferOverride<'_> {
    fn drop(&mut self) {
        self.scenario.server().record().documents[SECOND] = self.before.clone();
    }
}

/// Runs alone, because a discovery request does not identify its session.
async fn once(scenario: Scenario) -> ProbeResult {
    let servers = scenario.context.servers();
    let count = |at: usize| scenario.server().discoveries(at);
    let before: Vec<usize> = (0..SERVERS).map(count).collect();
    let marker = scenario.noop_step();
    let thread = scenario.open_thread(marker).await?;
    scenario.wait_for_prompt_with(&scenario.server().marker_text(marker)).await?;
    scenario.current_prompt(&thread).await?;
    scenario.settle().await;
    for at in servers {
        let requests = scenario.server().requests(|request| request.route == Route::Discovery(at));
        let exchanges =
            || requests.iter().skip(before[at]).take(3).map(|request| request.exchange()).collect();
        if requests.iter().any(|request| request.method != "GET") {
            return fail("a toolset was requested with another method than GET", exchanges());
        }
        match count(at) - before[at] {
            1 => {}
            0 => return fail("a new session did not fetch the toolset of a tool server", exchanges()),
            more => {
                let what = format!(
                    "a session with two model requests fetched a toolset {more} times instead of once"
                );
                return fail(what, exchanges());
            }
        }
    }
    Ok(())
}

async fn new_session(scenario: Scenario) -> ProbeResult {
    scenario.needs(SECOND)?;
    let _lock = scenario.context.second_toolset_lock.lock().await;
    let _offer = OfferOverride::changed(&scenario);
    let marker = scenario.noop_step();
    scenario.open_thread(marker).await?;
    let model_request = scenario.wait_for_prompt_with(&scenario.server().marker_text(marker)).await?;
    if model_request.offered(ADDED).is_some() {
        return Ok(());
    }
    fail(
        "the model of a new session is not offered the new tool of the current toolset",
        vec![model_request.exchange()],
    )
}

async fn conflict(scenario: Scenario) -> ProbeResult {
    scenario.needs(SECOND)?;
    let _lock = scenario.context.second_toolset_lock.lock().await;
    let first = scenario.noop_step();
    let thread = scenario.open_thread(first).await?;
    scenario.wait_for_prompt_with(&scenario.server().marker_text(first)).await?;
    let offer = OfferOverride::changed(&scenario);
    let marker = scenario.step_with_calls(&[CHANGING]);
    scenario.acknowledge(marker, (0..20).map(|_| Acknowledgement::Status(409)));
    scenario.send_message(&thread, marker).await?;
    let call = scenario.call().await?;
    let model_request = scenario
        .wait_for_model_request(
            "a model request with a result of the call that was answered 409",
            |request| !request.results_of(call.marker()).is_empty(),
        )
        .await?;
    if model_request.offered(ADDED).is_none() {
        return fail(
            "after a 409, the model is still offered the old toolset",
            vec![model_request.exchange()],
        );
    }
    let marker = scenario.step_with_calls(&[ADDED]);
    scenario.send_message(&thread, marker).await?;
    let call = scenario.call().await?;
    drop(offer);
    if call.operation() != ADDED {
        return fail("an invocation that was answered 409 was sent again", scenario.exchanges());
    }
    Ok(())
}

async fn cached(scenario: Scenario) -> ProbeResult {
    scenario.needs(SECOND)?;
    let _lock = scenario.context.second_toolset_lock.lock().await;
    let first = scenario.noop_step();
    let thread = scenario.open_thread(first).await?;
    scenario.wait_for_prompt_with(&scenario.server().marker_text(first)).await?;
    let _offer = OfferOverride::new(&scenario, Reply::status(500));
    scenario.send_message(&thread, scenario.step_with_calls(&[CHANGING])).await?;
    scenario.call().await?;
    Ok(())
}

async fn missing(scenario: Scenario) -> ProbeResult {
    scenario.needs(SECOND)?;
    let api = scenario.context.user.api("show the history of a thread")?;
    let _lock = scenario.context.second_toolset_lock.lock().await;
    let _offer = OfferOverride::new(&scenario, Reply::status(500));
    let marker = scenario.noop_step();
    let thread = scenario.open_thread(marker).await?;
    let model_request = scenario.wait_for_prompt_with(&scenario.server().marker_text(marker)).await?;
    // The runtime may use the toolset that another session has fetched.
    if model_request.offered(WORK).is_none() {
        let what = "a toolset could not be fetched, and the tools of another server are not offered either";
        return fail(what, vec![model_request.exchange()]);
    }
    let history = api.get(&scenario.context.http, &["threads", &thread, "history"]).await?;
    if history.to_string().contains(tools::base_path(SECOND)) {
        return Ok(());
    }
    let what = "a toolset could not be fetched, but the thread's history does not mention it";
    fail(what, vec![model_request.exchange()])
}
