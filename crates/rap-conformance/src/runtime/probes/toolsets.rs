//! Toolsets: fetched once for a session, cached, refreshed after a 409, and validated.

use serde_json::{Value, json};

use super::{Check, Phase};
use crate::runtime::mock_server::{Reply, Route, SERVERS};
use crate::runtime::model::{CANCEL_SUBSCRIPTION, ModelRequest};
use crate::runtime::scenario::{ProbeResult, Scenario, fail};
use crate::runtime::tools::{
    self, ADDED, Acknowledgement, CHANGING, DOUBLE, INVALID_NAME, SECOND, THIRD, WORK,
};
use crate::{Probe, Verdict};

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
    Check {
        probe: Probe {
            name: "invalid_toolset",
            requirements: &[],
            checks: "A tool whose name and schema are invalid is not offered to the model, and the tools of other servers \
                     are.",
        },
        phase: Phase::Last,
        run: |scenario| Box::pin(invalid(scenario)),
    },
    Check {
        probe: Probe {
            name: "duplicate_tool_names",
            requirements: &[],
            checks: "The model is never offered two tools with the same name, even if two servers have one.",
        },
        phase: Phase::Last,
        run: |scenario| Box::pin(duplicate_names(scenario)),
    },
    Check {
        probe: Probe {
            name: "built_in_is_not_replaced",
            requirements: &["SE-14"],
            checks: "A tool server that offers a tool `cancel_subscription` does not replace the built-in one.",
        },
        phase: Phase::Last,
        run: |scenario| Box::pin(built_in_stays(scenario)),
    },
];

const NEVER_FETCHED: &str =
    "a new session did not fetch the toolsets: see the probe toolset_of_a_new_session";

/// Replaces the toolset of a server until this is dropped.
struct OfferOverride<'a> {
    scenario: &'a Scenario,
    server: usize,
    before: Reply,
}

impl<'a> OfferOverride<'a> {
    fn new(scenario: &'a Scenario, server: usize, reply: Reply) -> OfferOverride<'a> {
        let before = std::mem::replace(&mut scenario.server().record().documents[server], reply);
        OfferOverride { scenario, server, before }
    }

    /// Another version with an additional tool.
    fn with_tool(scenario: &'a Scenario, server: usize, tool: Value) -> OfferOverride<'a> {
        let before = scenario.server().record().documents[server].body.clone();
        let mut toolset: Value = serde_json::from_slice(&before).unwrap_or_default();
        toolset["version"] = json!(format!("with-{}", scenario.number));
        toolset["tools"].as_array_mut().into_iter().for_each(|tools| tools.push(tool.clone()));
        OfferOverride::new(scenario, server, Reply::json(&toolset))
    }

    /// Another version with an additional tool.
    fn changed(scenario: &'a Scenario) -> OfferOverride<'a> {
        let version = format!("second-{}", scenario.number);
        OfferOverride::new(
            scenario,
            SECOND,
            Reply::json(&tools::second_toolset(&scenario.server().url, &version, &[CHANGING, ADDED])),
        )
    }
}

impl Drop for OfferOverride<'_> {
    fn drop(&mut self) {
        self.scenario.server().record().documents[self.server] = self.before.clone();
    }
}

/// Runs alone, because a discovery request does not identify its session.
async fn once(scenario: Scenario) -> ProbeResult {
    let servers = scenario.context.servers().to_vec();
    let count = |at: usize| scenario.server().discoveries(at);
    let before: Vec<usize> = (0..SERVERS).map(count).collect();
    let marker = scenario.noop_step();
    let thread = scenario.open_thread(marker).await?;
    scenario.wait_for_prompt_with(&scenario.server().marker_text(marker)).await?;
    scenario.current_prompt(&thread).await?;
    scenario.wait_for_silence().await;
    for at in servers {
        let requests = scenario.server().requests(|request| request.route == Route::Discovery(at));
        let exchanges =
            || requests.iter().skip(before[at]).take(3).map(|request| request.exchange()).collect();
        if requests.iter().any(|request| request.method != "GET") {
            return fail("a toolset was requested with another method than GET", exchanges());
        }
        match count(at) - before[at] {
            1 => {}
            // A session that uses an older toolset is the failure of another probe.
            0 => {
                return Err(Verdict::not_observable(
                    "a new session did not fetch the toolsets: see the probe toolset_of_a_new_session",
                ));
            }
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
    let _lock = scenario.context.toolset_lock.lock().await;
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
    let _lock = scenario.context.toolset_lock.lock().await;
    let first = scenario.noop_step();
    let fetched = scenario.server().discoveries(SECOND);
    let thread = scenario.open_thread(first).await?;
    scenario.wait_for_prompt_with(&scenario.server().marker_text(first)).await?;
    let has_fetched = scenario.server().discoveries(SECOND) > fetched;
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
    if model_request.offered(ADDED).is_none() && !has_fetched {
        return Err(Verdict::not_observable(NEVER_FETCHED));
    }
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
    let _lock = scenario.context.toolset_lock.lock().await;
    let first = scenario.noop_step();
    let thread = scenario.open_thread(first).await?;
    scenario.wait_for_prompt_with(&scenario.server().marker_text(first)).await?;
    let _offer = OfferOverride::new(&scenario, SECOND, Reply::status(500));
    scenario.send_message(&thread, scenario.step_with_calls(&[CHANGING])).await?;
    scenario.call().await?;
    Ok(())
}

async fn missing(scenario: Scenario) -> ProbeResult {
    scenario.needs(SECOND)?;
    let api = scenario.context.user.api("show the history of a thread")?;
    let _lock = scenario.context.toolset_lock.lock().await;
    let _offer = OfferOverride::new(&scenario, SECOND, Reply::status(500));
    let fetched = scenario.server().discoveries(SECOND);
    let marker = scenario.noop_step();
    let thread = scenario.open_thread(marker).await?;
    let model_request = scenario.wait_for_prompt_with(&scenario.server().marker_text(marker)).await?;
    // A runtime may fetch toolsets while it asks the model.
    let has_fetched = || (scenario.server().discoveries(SECOND) > fetched).then_some(());
    if scenario.wait_for("a discovery request", has_fetched).await.is_err() {
        return Err(Verdict::not_observable(NEVER_FETCHED));
    }
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

/// First prompt of a new session.
async fn first_prompt(scenario: &Scenario) -> Result<ModelRequest, Verdict> {
    let marker = scenario.noop_step();
    scenario.open_thread(marker).await?;
    scenario.wait_for_prompt_with(&scenario.server().marker_text(marker)).await
}

async fn invalid(scenario: Scenario) -> ProbeResult {
    scenario.needs(SECOND)?;
    let _lock = scenario.context.toolset_lock.lock().await;
    let invalid = json!({"name": INVALID_NAME, "description": "An invalid tool.", "inputSchema": "none"});
    let _offer = OfferOverride::with_tool(&scenario, SECOND, invalid);
    let model_request = first_prompt(&scenario).await?;
    if model_request.offered(INVALID_NAME).is_some() {
        return fail(
            format!("the model is offered the tool `{INVALID_NAME}`, whose name and schema are invalid"),
            vec![model_request.exchange()],
        );
    }
    if model_request.offered(WORK).is_none() {
        let what = "a toolset is invalid, and the tools of another server are not offered either";
        return fail(what, vec![model_request.exchange()]);
    }
    Ok(())
}

async fn duplicate_names(scenario: Scenario) -> ProbeResult {
    scenario.needs(SECOND)?;
    scenario.needs(THIRD)?;
    let _lock = scenario.context.toolset_lock.lock().await;
    let _second = OfferOverride::with_tool(&scenario, SECOND, tools::tool(DOUBLE));
    let _third = OfferOverride::with_tool(&scenario, THIRD, tools::tool(DOUBLE));
    let model_request = first_prompt(&scenario).await?;
    match model_request.offers(DOUBLE) {
        0 | 1 => Ok(()),
        times => fail(
            format!("the model is offered {times} tools with the name `{DOUBLE}`"),
            vec![model_request.exchange()],
        ),
    }
}

/// Runs alone, because the toolset affects every session that begins meanwhile.
async fn built_in_stays(scenario: Scenario) -> ProbeResult {
    scenario.needs(SECOND)?;
    let before = first_prompt(&scenario).await?;
    let Some(built_in) = before.offered(CANCEL_SUBSCRIPTION).cloned() else {
        return Err(Verdict::not_observable(
            "the model is not offered `cancel_subscription`: see the probe cancel_subscription_offered",
        ));
    };
    let _lock = scenario.context.toolset_lock.lock().await;
    let _offer = OfferOverride::with_tool(&scenario, SECOND, tools::tool(CANCEL_SUBSCRIPTION));
    let model_request = first_prompt(&scenario).await?;
    if model_request.offers(CANCEL_SUBSCRIPTION) == 1
        && model_request.offered(CANCEL_SUBSCRIPTION) == Some(&built_in)
    {
        return Ok(());
    }
    let what = "a tool server offers a tool `cancel_subscription`, and the model is offered it beside or instead of the \
                built-in one";
    fail(what, vec![model_request.exchange()])
}
