//! The conversation as a whole: what the model is asked, and when.

use super::{Check, Phase};
use crate::Probe;
use crate::runtime::model::Question;
use crate::runtime::scene::{Scene, Seen, wrong};
use crate::runtime::tools::WORK;

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "responsive",
            requirements: &["LC-19"],
            checks: "A message is answered while a call is open, and the call's result follows.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(responsive(scene)),
    },
    Check {
        probe: Probe {
            name: "model_failure",
            requirements: &["LC-22"],
            checks: "A message stays when the model can not be asked.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(model_fails(scene)),
    },
    Check {
        probe: Probe {
            name: "prompts_are_valid",
            requirements: &["LC-16"],
            checks: "In every prompt each call is followed by exactly its results, and nothing stands between.",
        },
        phase: Phase::Last,
        run: |scene| Box::pin(valid(scene)),
    },
    Check {
        probe: Probe {
            name: "conversations_are_apart",
            requirements: &["LC-29"],
            checks: "No prompt holds anything of another conversation.",
        },
        phase: Phase::Last,
        run: |scene| Box::pin(apart(scene)),
    },
];

async fn responsive(scene: Scene) -> Seen {
    let (thread, call) = scene.called(WORK).await?;
    scene.looked_at(&thread).await?;
    let word = scene.word("afterwards");
    call.returns(&word).await?;
    scene.heard(&word).await?;
    Ok(())
}

async fn model_fails(scene: Scene) -> Seen {
    let mark = scene.step(|_, step| step.refusals = [400].into());
    let written = scene.stage().written(mark);
    let thread = scene.open(mark).await?;
    scene.heard(&written).await?;
    let question = scene.looked_at(&thread).await?;
    if question.has(&written) {
        return Ok(());
    }
    wrong("a message is lost because the model could not be asked", vec![question.exchange()])
}

/// Every question of every scene.
fn questions(scene: &Scene) -> Vec<Question> {
    scene.stage().asked(|asked| asked.prompt.is_some()).into_iter().filter_map(Question::of).collect()
}

async fn valid(scene: Scene) -> Seen {
    for question in questions(&scene) {
        if let Some(fault) = question.fault() {
            return wrong(format!("no model's server takes this prompt: {fault}"), vec![question.exchange()]);
        }
    }
    Ok(())
}

async fn apart(scene: Scene) -> Seen {
    for question in questions(&scene) {
        let marks = question.marks(scene.stage());
        if marks.iter().any(|mark| mark.scene != marks[0].scene) {
            return wrong("two conversations are mixed in one prompt", vec![question.exchange()]);
        }
    }
    Ok(())
}
