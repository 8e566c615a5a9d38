//! Callbacks for the user: authorization, questions and views. They settle no call and never reach the model.

use serde_json::{Value, json};

use super::callbacks::expect_rejected;
use super::{Check, Phase};
use crate::Probe;
use crate::runtime::scenario::{ProbeResult, Scenario, fail};
use crate::runtime::tools::{Call, WORK, with};
use crate::runtime::user::User;

pub(super) const CHECKS: &[Check] = &[
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
            name: "oauth_of_an_unknown_call",
            requirements: &[],
            checks: "An oauth message whose id belongs to no open call is answered 4xx.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(unknown_sign_in(scenario)),
    },
    Check {
        probe: Probe {
            name: "user_choice",
            requirements: &[],
            checks: "The user's choice is posted to the response_url of the question.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(choice(scenario)),
    },
    Check {
        probe: Probe {
            name: "empty_choices",
            requirements: &[],
            checks: "A question to the user without choices is answered 4xx, and the call stays open.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(empty_choices(scenario)),
    },
    Check {
        probe: Probe {
            name: "view_update",
            requirements: &[],
            checks: "A view_update is accepted, causes no model request and never reaches the model.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(view(scenario)),
    },
    Check {
        probe: Probe {
            name: "view_after_result",
            requirements: &[],
            checks: "A view_update that arrives right after the result of its call is accepted and stored.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(view_after_result(scenario)),
    },
];

async fn sign_in(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let (secret, text) = (scenario.unique_text("secret"), scenario.unique_text("signedin"));
    let url = format!("https://sign-in.example/{secret}");
    call.post_accepted(&with(call.message("oauth"), json!({"auth_url": url}))).await?;
    let requests_before = scenario.model_requests().len();
    scenario.wait_for_silence().await;
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

async fn unknown_sign_in(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let message = json!({"id": "no-such-call", "auth_url": "https://sign-in.example/unknown"});
    let posted = call.post(&with(call.message("oauth"), message)).await?;
    expect_rejected(&posted, "an oauth message of an unknown call")?;
    let text = scenario.unique_text("returned");
    call.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await.map(|_| ())
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

async fn empty_choices(scenario: Scenario) -> ProbeResult {
    let (_, call) = scenario.open_with_call(WORK).await?;
    let response_url = format!("{}/answers/{}", scenario.server().url, scenario.number);
    let question = json!({"prompt": "Which?", "choices": [], "default": 0, "response_url": response_url});
    let posted = call.post(&with(call.message("user_choice"), question)).await?;
    expect_rejected(&posted, "a question without choices")?;
    let text = scenario.unique_text("returned");
    call.return_result(&text).await?;
    scenario.wait_for_prompt_with(&text).await.map(|_| ())
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
    scenario.wait_for_silence().await;
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
    call.post_accepted(&progress(&call, &shown)).await?;
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
    fail("a view_update was accepted, but is not among the views of its thread", scenario.exchanges())
}
