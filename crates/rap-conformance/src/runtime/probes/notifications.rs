//! Closings and cancellations: every server is told once, and nobody waits for it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use super::{Check, Phase, unseen};
use crate::runtime::gate::Gate;
use crate::runtime::scene::{Scene, Seen, wrong};
use crate::runtime::stage::{Asked, Route};
use crate::runtime::tools::{Call, Conduct, MAIN, WORK};
use crate::{Probe, Verdict};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "closing_told",
            requirements: &["TC-01"],
            checks: "The tool server that was used is told of a closing.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(closing_told(scene)),
    },
    Check {
        probe: Probe {
            name: "closing_told_to_all",
            requirements: &["TC-13"],
            checks: "Every tool server is told of a closing, whether or not it was used.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(closing_told_to_all(scene)),
    },
    Check {
        probe: Probe {
            name: "closing_waits_for_nobody",
            requirements: &["TC-16", "TC-02"],
            checks: "Closing a thread does not wait for the answers of tool servers.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(closing_prompt(scene)),
    },
    Check {
        probe: Probe {
            name: "closing_told_together",
            requirements: &["TC-15"],
            checks: "All tool servers are told at the same time.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(closing_together(scene)),
    },
    Check {
        probe: Probe {
            name: "closing_told_once",
            requirements: &["TC-07", "TC-06"],
            checks: "A closing that is answered with an error is not told again.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(closing_once(scene)),
    },
    Check {
        probe: Probe {
            name: "closing_told_despite_failures",
            requirements: &["TC-17"],
            checks: "A tool server that fails does not keep the others from being told.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(closing_despite(scene)),
    },
    Check {
        probe: Probe {
            name: "cancelling_told",
            requirements: &["CN-01"],
            checks: "The tool server that has the call is told of its cancellation.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(cancelling_told(scene)),
    },
    Check {
        probe: Probe {
            name: "cancelling_told_to_all",
            requirements: &["CN-15"],
            checks: "Every tool server is told of a cancellation, whichever has the call.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(cancelling_told_to_all(scene)),
    },
    Check {
        probe: Probe {
            name: "cancelling_waits_for_nobody",
            requirements: &["CN-18", "CN-02"],
            checks: "Cancelling does not wait for the answers of tool servers.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(cancelling_prompt(scene)),
    },
    Check {
        probe: Probe {
            name: "cancelling_told_together",
            requirements: &["CN-17"],
            checks: "All tool servers are told at the same time.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(cancelling_together(scene)),
    },
    Check {
        probe: Probe {
            name: "cancelling_told_once",
            requirements: &["CN-07", "CN-06"],
            checks: "A cancellation that is answered with an error is not told again.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(cancelling_once(scene)),
    },
    Check {
        probe: Probe {
            name: "cancelling_told_despite_failures",
            requirements: &["CN-19"],
            checks: "A tool server that fails does not keep the others from being told.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(cancelling_despite(scene)),
    },
    Check {
        probe: Probe {
            name: "late_result",
            requirements: &["CN-10", "CN-14"],
            checks: "The late result of an interrupted call is met without an error, and the thread goes on.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(late_result_met(scene)),
    },
    Check {
        probe: Probe {
            name: "late_result_ignored",
            requirements: &["CN-24"],
            checks: "The late result of an interrupted call does not reach the model.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(late_result_ignored(scene)),
    },
    Check {
        probe: Probe {
            name: "closing_cancels_open_calls",
            requirements: &[],
            checks: "Closing a thread cancels its open calls, and no subscription.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(closing_cancels(scene)),
    },
    Check {
        probe: Probe {
            name: "closing_told_before_cancellations",
            requirements: &[],
            checks: "A tool server is told of a closing before the cancellations that come with it.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(closing_first(scene)),
    },
];

/// How many threads are closed to see in which order a server is told.
const CLOSED: usize = 5;

/// One of the two notifications.
#[derive(Clone, Copy)]
enum About {
    Closing,
    Cancelling,
}

impl About {
    fn route(self) -> fn(usize) -> Route {
        match self {
            About::Closing => Route::Close,
            About::Cancelling => Route::Cancel,
        }
    }

    fn word(self) -> &'static str {
        match self {
            About::Closing => "the closing",
            About::Cancelling => "the cancellation",
        }
    }

    fn body(self, call: &Call) -> Value {
        match self {
            About::Closing => json!({"thread_id": call.thread()}),
            About::Cancelling => json!({"thread_id": call.thread(), "tool_call_id": call.id()}),
        }
    }

    /// A call in a new thread, if the user can have it happen.
    async fn called(self, scene: &Scene) -> Result<(String, Call), Verdict> {
        match self {
            About::Closing => scene.may_close()?,
            About::Cancelling => scene.may_interrupt()?,
        }
        scene.called(WORK).await
    }

    /// Does what servers are told of, to a thread with an open call.
    async fn happen(self, scene: &Scene, thread: &str) -> Seen {
        match self {
            About::Closing => scene.close(thread).await,
            About::Cancelling => scene.interrupt(thread).await,
        }
    }
}

async fn told(scene: Scene, about: About) -> Seen {
    let (thread, call) = about.called(&scene).await?;
    about.happen(&scene, &thread).await?;
    let told = || scene.told(about.route(), call.thread()).into_iter().find(|(at, _)| *at == MAIN);
    let (_, asked) = scene.until(&format!("{} at the server of the call", about.word()), told).await?;
    let kind = asked.header("content-type").unwrap_or_default();
    let json = kind.split(';').next().unwrap_or_default().trim() == "application/json";
    if asked.method == "POST" && json && asked.body == about.body(&call) {
        return Ok(());
    }
    let what = format!("{} was not told as it should be: {} {kind}", about.word(), asked.method);
    wrong(what, vec![asked.exchange()])
}

async fn told_to_all(scene: Scene, about: About) -> Seen {
    scene.several_servers()?;
    let (thread, call) = about.called(&scene).await?;
    about.happen(&scene, &thread).await?;
    scene.all_told(about.route(), call.thread(), about.word()).await?;
    Ok(())
}

/// Holds the answers of all servers back, has it happen, and lets them go when it was done.
async fn held(scene: &Scene, about: About) -> Result<(Call, Gate, Instant), Verdict> {
    let (thread, call) = about.called(scene).await?;
    let gate = Gate::closed(scene.hold());
    scene.conduct(call.thread(), Conduct::Holds(gate.clone()));
    let began = Instant::now();
    about.happen(scene, &thread).await?;
    Ok((call, gate, began))
}

async fn prompt(scene: Scene, about: About) -> Seen {
    let (_, gate, began) = held(&scene, about).await?;
    let took = began.elapsed();
    gate.open();
    if took < scene.hold() {
        return Ok(());
    }
    let what = format!("it took {took:.1?}, as long as the tool servers held back their answers");
    wrong(format!("{} waited for its notifications: {what}", about.word()), scene.story())
}

async fn together(scene: Scene, about: About) -> Seen {
    scene.several_servers()?;
    let (call, gate, _) = held(&scene, about).await?;
    let told = scene.all_told(about.route(), call.thread(), about.word()).await?;
    gate.open();
    let times = told.iter().map(|(_, asked)| asked.at);
    let (first, last) = (times.clone().min(), times.max());
    let apart = last.zip(first).map(|(last, first)| last - first).unwrap_or_default();
    if apart < scene.hold() {
        return Ok(());
    }
    let exchanges = told.iter().map(|(_, asked)| asked.exchange()).collect();
    wrong(format!("the tool servers were told one after the other, {apart:.1?} apart"), exchanges)
}

/// All servers answer with errors.
async fn failing(scene: &Scene, about: About) -> Result<Call, Verdict> {
    let (thread, call) = about.called(scene).await?;
    scene.conduct(call.thread(), Conduct::Fails);
    about.happen(scene, &thread).await?;
    Ok(call)
}

async fn once(scene: Scene, about: About) -> Seen {
    let call = failing(&scene, about).await?;
    scene
        .until(&format!("{} at a tool server", about.word()), || {
            (!scene.told(about.route(), call.thread()).is_empty()).then_some(())
        })
        .await?;
    scene.settle().await;
    let mut times: HashMap<usize, usize> = HashMap::new();
    let told = scene.told(about.route(), call.thread());
    for (at, _) in &told {
        *times.entry(*at).or_default() += 1;
    }
    match times.values().max() {
        Some(1) => Ok(()),
        most => {
            let exchanges = told.iter().take(4).map(|(_, asked)| asked.exchange()).collect();
            wrong(format!("{} was told {} times to one server", about.word(), most.unwrap_or(&0)), exchanges)
        }
    }
}

async fn despite(scene: Scene, about: About) -> Seen {
    scene.several_servers()?;
    let call = failing(&scene, about).await?;
    scene.all_told(about.route(), call.thread(), about.word()).await?;
    Ok(())
}

async fn closing_told(scene: Scene) -> Seen {
    told(scene, About::Closing).await
}

async fn closing_told_to_all(scene: Scene) -> Seen {
    told_to_all(scene, About::Closing).await
}

async fn closing_prompt(scene: Scene) -> Seen {
    prompt(scene, About::Closing).await
}

async fn closing_together(scene: Scene) -> Seen {
    together(scene, About::Closing).await
}

async fn closing_once(scene: Scene) -> Seen {
    once(scene, About::Closing).await
}

async fn closing_despite(scene: Scene) -> Seen {
    despite(scene, About::Closing).await
}

async fn cancelling_told(scene: Scene) -> Seen {
    told(scene, About::Cancelling).await
}

async fn cancelling_told_to_all(scene: Scene) -> Seen {
    told_to_all(scene, About::Cancelling).await
}

async fn cancelling_prompt(scene: Scene) -> Seen {
    prompt(scene, About::Cancelling).await
}

async fn cancelling_together(scene: Scene) -> Seen {
    together(scene, About::Cancelling).await
}

async fn cancelling_once(scene: Scene) -> Seen {
    once(scene, About::Cancelling).await
}

async fn cancelling_despite(scene: Scene) -> Seen {
    despite(scene, About::Cancelling).await
}

/// A tool returns though its call was interrupted.
async fn late_result_met(scene: Scene) -> Seen {
    let (thread, call) = About::Cancelling.called(&scene).await?;
    scene.interrupt(&thread).await?;
    let posted = call.post(&call.result(&scene.word("late"))).await?;
    if posted.status.is_none_or(|status| status >= 500) {
        return wrong("the result of a cancelled call was met with an error", scene.story());
    }
    scene.looked_at(&thread).await?;
    Ok(())
}

async fn late_result_ignored(scene: Scene) -> Seen {
    let (thread, call) = About::Cancelling.called(&scene).await?;
    scene.interrupt(&thread).await?;
    let word = scene.word("late");
    call.post(&call.result(&word)).await?;
    let question = scene.looked_at(&thread).await?;
    scene.settle().await;
    scene.never_heard(&word, "the late result of an interrupted call")?;
    match question.results_of(call.mark()).as_slice() {
        [only] if only.contains("interrupted") => Ok(()),
        _ => wrong("an interrupted call has no result `interrupted`", vec![question.exchange()]),
    }
}

/// The cancellation of a call at its own server, if it has come.
fn cancelled(scene: &Scene, call: &Call) -> Option<Arc<Asked>> {
    let told = scene.told(Route::Cancel, call.thread()).into_iter();
    told.filter(|(at, _)| *at == MAIN)
        .map(|(_, asked)| asked)
        .find(|asked| asked.field("tool_call_id") == call.id())
}

/// Waits for it.
async fn until_cancelled(scene: &Scene, call: &Call) -> Result<Arc<Asked>, Verdict> {
    scene.until("the cancellation of an open call of a closed thread", || cancelled(scene, call)).await
}

/// A thread with a subscription and an open call is closed.
async fn closing_cancels(scene: Scene) -> Seen {
    scene.may_close()?;
    let (thread, watch) = scene.subscribed().await?;
    scene.say(&thread, scene.calls(&[WORK])).await?;
    let work = scene.call().await?;
    // The runtime has time to note that the call was acknowledged.
    scene.settle().await;
    scene.close(&thread).await?;
    until_cancelled(&scene, &work).await?;
    scene.settle().await;
    match cancelled(&scene, &watch) {
        None => Ok(()),
        Some(asked) => wrong("closing a thread cancelled its subscription", vec![asked.exchange()]),
    }
}

/// Two requests that are sent one after the other may overtake each other now and then, but not most of the time.
async fn closing_first(scene: Scene) -> Seen {
    scene.may_close()?;
    let mut calls = Vec::new();
    for _ in 0..CLOSED {
        calls.push(scene.called(WORK).await?);
    }
    scene.settle().await;
    for (thread, _) in &calls {
        scene.close(thread).await?;
    }
    let mut early = Vec::new();
    for (_, call) in &calls {
        let told = || scene.told(Route::Close, call.thread()).into_iter().find(|(at, _)| *at == MAIN);
        let (_, closing) = scene.until("the closing at the server of the call", told).await?;
        let cancellation = until_cancelled(&scene, call).await.map_err(unseen)?;
        if cancellation.at < closing.at {
            early.extend([cancellation.exchange(), closing.exchange()]);
        }
    }
    // Each pair has two exchanges.
    if early.len() <= CLOSED {
        return Ok(());
    }
    wrong("a tool server is told of cancellations before the closing that they come with", early)
}
