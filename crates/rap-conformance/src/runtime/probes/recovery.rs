//! Recovery: the runtime is killed without warning and started again; what it had accepted is there, once.

use super::{Check, Phase};
use crate::runtime::crash::Place;
use crate::runtime::scene::{Scene, Seen, wrong};
use crate::runtime::tools::{Acknowledgement, WORK};
use crate::{Probe, Verdict};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "crash_in_a_call",
            requirements: &["LC-38"],
            checks: "A call that is open when the runtime is killed can return afterwards.",
        },
        phase: Phase::Crash,
        run: |scene| Box::pin(open_call(scene)),
    },
    Check {
        probe: Probe {
            name: "crash_after_a_result",
            requirements: &["TR-13"],
            checks: "A result that was answered 200 is there after the runtime is killed.",
        },
        phase: Phase::Crash,
        run: |scene| Box::pin(accepted_result(scene)),
    },
    Check {
        probe: Probe {
            name: "crash_after_an_event",
            requirements: &["TR-13"],
            checks: "An event that was answered 200, and its subscription, are there after the runtime is killed.",
        },
        phase: Phase::Crash,
        run: |scene| Box::pin(accepted_event(scene)),
    },
    Check {
        probe: Probe {
            name: "crash_after_a_message",
            requirements: &["LC-22"],
            checks: "A message that was accepted is there once after the runtime is killed.",
        },
        phase: Phase::Crash,
        run: |scene| Box::pin(accepted_message(scene)),
    },
    Check {
        probe: Probe {
            name: "crash_in_a_question",
            requirements: &["LC-38"],
            checks: "The model is asked again if the runtime is killed while it is asked.",
        },
        phase: Phase::Crash,
        run: |scene| Box::pin(question(scene)),
    },
    Check {
        probe: Probe {
            name: "crash_in_a_retry",
            requirements: &["TR-06"],
            checks: "A call that was to be sent again still is after the runtime is killed, and is the same.",
        },
        phase: Phase::Crash,
        run: |scene| Box::pin(retry(scene)),
    },
    Check {
        probe: Probe {
            name: "crash_and_a_duplicate",
            requirements: &["LC-30", "TR-25"],
            checks: "A result from before the runtime was killed does not count again.",
        },
        phase: Phase::Crash,
        run: |scene| Box::pin(duplicate(scene)),
    },
];

/// The place of a probe in the crash; taken first, so that nobody waits for a probe that has failed.
fn place(scene: &Scene) -> Result<Place<'_>, Verdict> {
    let crash = scene.crash.as_ref();
    crash.map(|crash| crash.place()).ok_or_else(|| Verdict::not_observable("nothing can be killed"))
}

/// Whether the runtime is up again at all.
fn back(scene: &Scene) -> Seen {
    match scene.crash.as_ref().and_then(|crash| crash.trouble()) {
        None => Ok(()),
        Some(why) => wrong(format!("the runtime did not start again: {why}"), Vec::new()),
    }
}

async fn open_call(scene: Scene) -> Seen {
    let place = place(&scene)?;
    let (_, call) = scene.called(WORK).await?;
    place.pass(async {}).await;
    back(&scene)?;
    let word = scene.word("aftercrash");
    call.returns(&word).await?;
    scene.heard(&word).await?;
    Ok(())
}

/// The result was answered 200 right before the crash, while another call keeps the model from being asked.
async fn accepted_result(scene: Scene) -> Seen {
    let place = place(&scene)?;
    scene.open(scene.calls(&[WORK, WORK])).await?;
    let mut calls = [scene.call().await?, scene.call().await?];
    calls.sort_by_key(|call| call.mark().to_owned());
    let [one, two] = calls;
    let words = [scene.word("before"), scene.word("after")];
    place.pass(one.returns(&words[0])).await?;
    back(&scene)?;
    two.returns(&words[1]).await?;
    let question = scene.heard(&words[1]).await?;
    if question.results_of(one.mark()) == [words[0].clone()] {
        return Ok(());
    }
    wrong(
        "a result that was answered 200 is gone after a crash",
        vec![one.asked.exchange(), question.exchange()],
    )
}

async fn accepted_event(scene: Scene) -> Seen {
    let place = place(&scene)?;
    let (thread, watch) = scene.subscribed().await?;
    scene.say(&thread, scene.calls(&[WORK])).await?;
    let work = scene.call().await?;
    let words = [scene.word("tick"), scene.word("worked"), scene.word("tock")];
    place.pass(watch.insists(&watch.inline(&words[0]))).await?;
    back(&scene)?;
    work.returns(&words[1]).await?;
    scene.heard(&words[0]).await?;
    // The subscription itself is still there.
    watch.insists(&watch.inline(&words[2])).await?;
    scene.heard(&words[2]).await?;
    Ok(())
}

async fn accepted_message(scene: Scene) -> Seen {
    let place = place(&scene)?;
    let first = scene.note();
    let thread = scene.open(first).await?;
    scene.heard(&scene.stage().written(first)).await?;
    let mark = scene.note();
    place.pass(scene.say(&thread, mark)).await?;
    back(&scene)?;
    scene.heard(&scene.stage().written(mark)).await?;
    let question = scene.looked_at(&thread).await?;
    match question.count(&scene.stage().written(mark)) {
        1 => Ok(()),
        times => wrong(
            format!("a message stands {times} times in the prompt after a crash"),
            vec![question.exchange()],
        ),
    }
}

/// The model is being asked when the runtime is killed.
async fn question(scene: Scene) -> Seen {
    let place = place(&scene)?;
    let mark = scene.calls(&[WORK]);
    let gate = scene.hold_answer(mark);
    scene.open(mark).await?;
    scene.heard(&scene.stage().written(mark)).await?;
    place.pass(async {}).await;
    gate.open();
    back(&scene)?;
    let call = scene.call().await?;
    let word = scene.word("worked");
    call.returns(&word).await?;
    scene.heard(&word).await?;
    Ok(())
}

/// The call was answered 503 and waits for its next attempt when the runtime is killed.
async fn retry(scene: Scene) -> Seen {
    let place = place(&scene)?;
    let mark = scene.calls(&[WORK]);
    // Until the crash nobody takes it.
    scene.acknowledge(mark, (0..1000).map(|_| Acknowledgement::Status(503)));
    scene.open(mark).await?;
    let first = scene.call().await?;
    place.pass(async {}).await;
    scene.acknowledge(mark, []);
    let before = scene.invocations().len();
    back(&scene)?;
    let again =
        scene.until("another attempt after the crash", || scene.invocations().get(before).cloned()).await?;
    if again.body["id"] != first.id() || again.body["callback_url"] != first.url() {
        return wrong("the same call has another `id` or `callback_url` after a crash", scene.story());
    }
    let word = scene.word("taken");
    first.returns(&word).await?;
    scene.heard(&word).await?;
    Ok(())
}

async fn duplicate(scene: Scene) -> Seen {
    let place = place(&scene)?;
    let (thread, call) = scene.called(WORK).await?;
    let word = scene.word("once");
    call.returns(&word).await?;
    scene.heard(&word).await?;
    place.pass(async {}).await;
    back(&scene)?;
    // As a tool does that did not hear the answer.
    call.says(&call.result(&word)).await?;
    scene.settle().await;
    let question = scene.looked_at(&thread).await?;
    match question.count(&word) {
        1 => Ok(()),
        0 => wrong("what was said before a crash is gone", vec![question.exchange()]),
        times => wrong(format!("a result from before a crash counts {times} times"), scene.story()),
    }
}
