//! Subscriptions: confirmed, then events in the thread or in one of its own, then an end.

use serde_json::{Value, json};

use super::{Check, Phase};
use crate::runtime::model::{CANCEL_SUBSCRIPTION, Prompt, Question};
use crate::runtime::scene::{Scene, Seen, wrong};
use crate::runtime::stage::Route;
use crate::runtime::tools::{Call, MARK, WATCH, WORK, with};
use crate::{Probe, Verdict};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "subscription_confirmed",
            requirements: &["SE-13"],
            checks: "A confirmed subscription is active: its events are accepted and wake the agent.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(confirmed(scene)),
    },
    Check {
        probe: Probe {
            name: "event_is_a_synthetic_call",
            requirements: &["SE-07"],
            checks: "An event is the result of a synthetic call that echoes the original.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(synthetic(scene)),
    },
    Check {
        probe: Probe {
            name: "subscription_has_one_result",
            requirements: &["SE-06"],
            checks: "The subscription's own call keeps its one result.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(one_result(scene)),
    },
    Check {
        probe: Probe {
            name: "event_in_its_thread",
            requirements: &["SE-08", "SE-02", "SE-05"],
            checks: "An associative event stands in the subscribing thread.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(inline(scene)),
    },
    Check {
        probe: Probe {
            name: "event_in_a_child",
            requirements: &["SE-09"],
            checks: "Any other event has a thread of its own, which inherits what was before.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(own_thread(scene)),
    },
    Check {
        probe: Probe {
            name: "event_defaults",
            requirements: &["SE-02"],
            checks: "Associative and final are false where they are not given.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(defaults(scene)),
    },
    Check {
        probe: Probe {
            name: "thread_ancestors",
            requirements: &["SE-09"],
            checks: "The calls of a child name its ancestors.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(ancestors(scene)),
    },
    Check {
        probe: Probe {
            name: "events_behind_a_call",
            requirements: &["SE-05", "SE-08"],
            checks: "Events that come while a call is open are kept, in order.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(behind_a_call(scene)),
    },
    Check {
        probe: Probe {
            name: "events_behind_a_question",
            requirements: &["SE-05", "SE-08"],
            checks: "Events that come while the model is asked are kept, in order.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(behind_a_question(scene)),
    },
    Check {
        probe: Probe {
            name: "final_event",
            requirements: &["SE-03", "SE-22"],
            checks: "After a final event no other is taken.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(last(scene)),
    },
    Check {
        probe: Probe {
            name: "event_of_no_subscription",
            requirements: &["SE-22"],
            checks: "An event of a call that is no subscription is discarded.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(never_subscribed(scene)),
    },
    Check {
        probe: Probe {
            name: "cancel_subscription_offered",
            requirements: &["SE-14"],
            checks: "The model has a tool cancel_subscription with the one parameter tool_call_id.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(offered(scene)),
    },
    Check {
        probe: Probe {
            name: "cancel_subscription_told",
            requirements: &["SE-16"],
            checks: "Cancel_subscription tells every tool server.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(cancelled(scene)),
    },
    Check {
        probe: Probe {
            name: "cancel_subscription_at_once",
            requirements: &["SE-18"],
            checks: "The result of cancel_subscription is there at once.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(cancelled_at_once(scene)),
    },
    Check {
        probe: Probe {
            name: "cancel_subscription_ends_it",
            requirements: &["SE-17", "SE-22"],
            checks: "Events of a cancelled subscription are discarded.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(cancelled_events(scene)),
    },
    Check {
        probe: Probe {
            name: "cancel_subscription_unknown",
            requirements: &["SE-15"],
            checks: "Cancelling an unknown subscription is an error.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(cancelled_unknown(scene)),
    },
    Check {
        probe: Probe {
            name: "cancel_subscription_foreign",
            requirements: &["SE-15"],
            checks: "No thread can cancel the subscription of another.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(cancelled_foreign(scene)),
    },
    Check {
        probe: Probe {
            name: "event_after_closing",
            requirements: &["SE-21"],
            checks: "Events of a closed thread are discarded.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(closed(scene)),
    },
    Check {
        probe: Probe {
            name: "closing_cancels_nothing",
            requirements: &["SE-20"],
            checks: "Closing a thread cancels no subscription.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(closing_cancels_nothing(scene)),
    },
    Check {
        probe: Probe {
            name: "subscription_limit",
            requirements: &["SE-25"],
            checks: "The subscriptions of one thread have a limit.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(limit(scene)),
    },
];

/// How many subscriptions of one thread are tried.
const MANY: usize = 100;

/// The result of cancelling a subscription, as soon as the model reads it.
async fn cancelling(scene: &Scene, subscription: &str) -> Result<String, Verdict> {
    let of = |prompt: &Prompt| prompt.result_of_cancelling(subscription);
    let what = "a question with the result of cancel_subscription";
    let question = scene.question(what, |asked| of(asked).is_some()).await?;
    Ok(of(&question).unwrap_or_default())
}

fn is_error(text: &str) -> bool {
    text.to_lowercase().contains("error")
}

async fn confirmed(scene: Scene) -> Seen {
    let (thread, watch) = scene.called(WATCH).await?;
    let (word, event) = (scene.word("watching"), scene.word("tick"));
    watch.confirms(&word).await?;
    let question = scene.heard(&word).await?;
    if question.results_of(watch.mark()).len() != 1 {
        return wrong("the confirmation is not the result of its call", vec![question.exchange()]);
    }
    scene.at_rest(&thread).await?;
    watch.says(&watch.inline(&event)).await?;
    scene.heard(&event).await?;
    Ok(())
}

async fn synthetic(scene: Scene) -> Seen {
    let (_, watch) = scene.subscribed().await?;
    let event = scene.word("tick");
    watch.insists(&watch.inline(&event)).await?;
    let question = scene.heard(&event).await?;
    let shown = || vec![watch.asked.exchange(), question.exchange()];
    let Some(call) = question.call_with_result(&event) else {
        return wrong("an event is not the result of a synthetic call", shown());
    };
    let kind = call.arguments["kind"].as_str().unwrap_or_default();
    if call.name != watch.operation() || call.arguments[MARK] != watch.mark() {
        return wrong(
            "the synthetic call of an event does not echo the original call's name and arguments",
            shown(),
        );
    }
    // The id is that of the wire, or the one by which the model knows the call.
    let expected = format!("interrupt:{} (subscription remains active)", watch.id());
    let known = format!("interrupt:{} (subscription remains active)", scene.known_as(&watch));
    if kind != expected && kind != known {
        return wrong(format!("the `kind` of a synthetic call is `{kind}` and not `{expected}`"), shown());
    }
    Ok(())
}

async fn one_result(scene: Scene) -> Seen {
    let (thread, watch) = scene.subscribed().await?;
    let event = scene.word("tick");
    watch.insists(&watch.inline(&event)).await?;
    scene.heard(&event).await?;
    let question = scene.looked_at(&thread).await?;
    match question.results_of(watch.mark()).len() {
        1 => Ok(()),
        count => wrong(format!("the subscription's own call has {count} results"), vec![question.exchange()]),
    }
}

async fn inline(scene: Scene) -> Seen {
    let (thread, watch) = scene.subscribed().await?;
    let event = scene.word("tick");
    watch.insists_on_200(&watch.inline(&event)).await?;
    scene.heard(&event).await?;
    let question = scene.looked_at(&thread).await?;
    if question.has(&event) {
        return Ok(());
    }
    wrong("an associative event is not in the history of its thread", vec![question.exchange()])
}

async fn own_thread(scene: Scene) -> Seen {
    let (thread, watch) = scene.subscribed().await?;
    let event = scene.word("tick");
    watch.insists(&watch.event(&event)).await?;
    let question = scene.heard(&event).await?;
    if !question.has(&scene.word("watching")) {
        return wrong(
            "the thread of an event does not inherit what was before it",
            vec![question.exchange()],
        );
    }
    let question = scene.looked_at(&thread).await?;
    if question.has(&event) {
        let what = "an event that is not associative stands in the history of the subscribing thread";
        return wrong(what, vec![question.exchange()]);
    }
    Ok(())
}

/// An event has a thread of its own call a tool.
async fn ancestors(scene: Scene) -> Seen {
    let (_, watch) = scene.subscribed().await?;
    let mark = scene.calls(&[WORK]);
    watch.insists(&watch.event(&scene.text(mark))).await?;
    let call = scene.call().await?;
    if call.thread() == watch.thread() {
        return wrong(
            "an event that is not associative was handled by the subscribing thread itself",
            scene.story(),
        );
    }
    let ancestors = &call.asked.body["thread_ancestors"];
    let last = ancestors.as_array().and_then(|ancestors| ancestors.last());
    if last != Some(&json!(watch.thread())) {
        return wrong("the call of a child does not name its parent in `thread_ancestors`", scene.story());
    }
    call.returns("done").await
}

async fn behind_a_call(scene: Scene) -> Seen {
    let (thread, watch) = scene.subscribed().await?;
    scene.say(&thread, scene.calls(&[WORK])).await?;
    let work = scene.call().await?;
    let events: Vec<String> = (1..=3).map(|number| scene.word(&format!("tick{number}"))).collect();
    for event in &events {
        watch.insists(&watch.inline(event)).await?;
    }
    let word = scene.word("worked");
    work.returns(&word).await?;
    scene.heard(&word).await?;
    in_order(&scene, &events).await
}

async fn behind_a_question(scene: Scene) -> Seen {
    let (thread, watch) = scene.subscribed().await?;
    let mark = scene.note();
    let gate = scene.hold_answer(mark);
    scene.say(&thread, mark).await?;
    scene.heard(&scene.stage().written(mark)).await?;
    let events: Vec<String> = (1..=3).map(|number| scene.word(&format!("tick{number}"))).collect();
    for event in &events {
        watch.insists(&watch.inline(event)).await?;
    }
    gate.open();
    in_order(&scene, &events).await
}

/// All of them reach the model, each once and in order.
async fn in_order(scene: &Scene, events: &[String]) -> Seen {
    let all = |asked: &Question| events.iter().all(|event| asked.has(event));
    let question = scene.question("a question with all three events", all).await?;
    let calls = question.calls();
    let heard: Vec<&String> = calls.iter().flat_map(|call| &call.results).collect();
    let places: Vec<usize> = events
        .iter()
        .filter_map(|event| heard.iter().position(|result| result.contains(event.as_str())))
        .collect();
    if events.iter().any(|event| question.count(event) != 1) {
        return wrong("an event reached the model more than once", vec![question.exchange()]);
    }
    if places.is_sorted() { Ok(()) } else { wrong("events are out of order", vec![question.exchange()]) }
}

/// Nothing of an event is heard, in whatever thread.
async fn unheard(scene: &Scene, call: &Call, what: &str) -> Seen {
    let (here, apart) = (scene.word("late"), scene.word("laterstill"));
    for body in [call.inline(&here), call.event(&apart)] {
        call.post(&body).await?;
    }
    scene.settle().await;
    scene.never_heard(&here, what)?;
    scene.never_heard(&apart, what)
}

async fn last(scene: Scene) -> Seen {
    let (_, watch) = scene.subscribed().await?;
    let event = scene.word("last");
    watch.insists(&with(watch.inline(&event), json!({"final": true}))).await?;
    scene.heard(&event).await?;
    unheard(&scene, &watch, "an event after the final one").await
}

async fn never_subscribed(scene: Scene) -> Seen {
    let (_, call) = scene.called(WORK).await?;
    let word = scene.word("returned");
    call.returns(&word).await?;
    scene.heard(&word).await?;
    unheard(&scene, &call, "an event of a call that is no subscription").await
}

async fn offered(scene: Scene) -> Seen {
    let mark = scene.note();
    scene.open(mark).await?;
    let question = scene.heard(&scene.stage().written(mark)).await?;
    let Some(schema) = question.offered(CANCEL_SUBSCRIPTION) else {
        return wrong("the model is not offered a tool `cancel_subscription`", vec![question.exchange()]);
    };
    let names: Vec<&String> =
        schema["properties"].as_object().into_iter().flat_map(|fields| fields.keys()).collect();
    if names == ["tool_call_id"] {
        return Ok(());
    }
    let what = format!("the parameters of `cancel_subscription` are {names:?} and not `tool_call_id` alone");
    wrong(what, vec![question.exchange()])
}

async fn cancelled(scene: Scene) -> Seen {
    let (thread, watch) = scene.subscribed().await?;
    scene.say(&thread, scene.cancels(&scene.known_as(&watch))).await?;
    let told = scene.all_told(Route::Cancel, watch.thread(), "the cancellation of a subscription").await?;
    match told.iter().find(|(_, asked)| asked.field("tool_call_id") != watch.id()) {
        None => Ok(()),
        Some((_, asked)) => wrong("another call was cancelled", vec![asked.exchange()]),
    }
}

/// The question behind the model's cancelling already has its result.
async fn cancelled_at_once(scene: Scene) -> Seen {
    let (thread, watch) = scene.subscribed().await?;
    let id = scene.known_as(&watch);
    scene.say(&thread, scene.cancels(&id)).await?;
    let text = cancelling(&scene, &id).await?;
    if text.trim().is_empty() || is_error(&text) || text.contains("still running") {
        return wrong(format!("cancel_subscription answered: {text}"), scene.story());
    }
    Ok(())
}

async fn cancelled_events(scene: Scene) -> Seen {
    let (thread, watch) = scene.subscribed().await?;
    let id = scene.known_as(&watch);
    scene.say(&thread, scene.cancels(&id)).await?;
    cancelling(&scene, &id).await?;
    unheard(&scene, &watch, "an event of a cancelled subscription").await
}

async fn cancelled_unknown(scene: Scene) -> Seen {
    let id = "no-such-subscription";
    scene.open(scene.cancels(id)).await?;
    let text = cancelling(&scene, id).await?;
    if is_error(&text) {
        return Ok(());
    }
    wrong(format!("cancelling what nobody subscribed to is no error: {text}"), scene.story())
}

async fn cancelled_foreign(scene: Scene) -> Seen {
    let (_, watch) = scene.subscribed().await?;
    let id = scene.known_as(&watch);
    scene.open(scene.cancels(&id)).await?;
    let text = cancelling(&scene, &id).await?;
    if !is_error(&text) {
        return wrong(format!("a thread may cancel another's subscription: {text}"), scene.story());
    }
    let event = scene.word("tick");
    watch.insists(&watch.inline(&event)).await?;
    scene.heard(&event).await?;
    Ok(())
}

async fn closed(scene: Scene) -> Seen {
    scene.may_close()?;
    let (thread, watch) = scene.subscribed().await?;
    scene.close(&thread).await?;
    unheard(&scene, &watch, "an event of a closed thread").await
}

async fn closing_cancels_nothing(scene: Scene) -> Seen {
    scene.may_close()?;
    let (thread, watch) = scene.subscribed().await?;
    scene.close(&thread).await?;
    scene.settle().await;
    let told = scene.told(Route::Cancel, watch.thread());
    match told.first() {
        None => Ok(()),
        Some((_, asked)) => wrong("closing a thread cancelled its subscription", vec![asked.exchange()]),
    }
}

/// Fields that are not there mean no.
async fn defaults(scene: Scene) -> Seen {
    let (thread, watch) = scene.subscribed().await?;
    let events = [scene.word("first"), scene.word("second")];
    for (event, more) in events.iter().zip([json!({}), json!({"associative": false, "final": false})]) {
        let body: Value = with(watch.event(event), more);
        watch.insists(&body).await?;
        scene.heard(event).await?;
    }
    let question = scene.looked_at(&thread).await?;
    match events.iter().find(|event| question.has(event)) {
        None => Ok(()),
        Some(_) => {
            wrong("an event without `associative` was taken for one with it", vec![question.exchange()])
        }
    }
}

/// Subscribes more often than anybody should, and sees by their events which subscriptions are active.
async fn limit(scene: Scene) -> Seen {
    scene.open(scene.calls(&[WATCH; MANY])).await?;
    let mut calls = Vec::new();
    for _ in 0..MANY {
        calls.push(scene.call().await?);
    }
    for call in &calls {
        call.confirms("watching").await?;
    }
    for (active, call) in calls.iter().enumerate() {
        let posted = call.says(&with(call.inline("tick"), json!({"final": true}))).await?;
        match active {
            _ if !posted.is_refused() => {}
            0 => return Err(Verdict::not_observable("no subscription is active at all")),
            _ => return Ok(()),
        }
    }
    Err(Verdict::not_observable(format!("one thread had {MANY} subscriptions; a limit may lie above that")))
}
