//! Toolsets: fetched for a session, kept for it, refreshed when a server says that they are old.

use super::{Check, Phase};
use crate::Probe;
use crate::runtime::scene::{Scene, Seen, wrong};
use crate::runtime::stage::{Reply, Route, SERVERS};
use crate::runtime::tools::{self, Acknowledgement, FICKLE, NEW, SECOND, WORK};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "discovery_once",
            requirements: &["LC-36"],
            checks: "A session asks each tool server once for its tools, and nobody polls.",
        },
        phase: Phase::Alone,
        run: |scene| Box::pin(once(scene)),
    },
    Check {
        probe: Probe {
            name: "toolset_of_a_new_session",
            requirements: &["LC-36"],
            checks: "A new session is offered what the tool servers offer now.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(new_session(scene)),
    },
    Check {
        probe: Probe {
            name: "toolset_after_a_conflict",
            requirements: &["LC-35"],
            checks: "After a 409 the toolset is refreshed, and the model can call what it offers now.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(conflict(scene)),
    },
    Check {
        probe: Probe {
            name: "toolset_from_the_cache",
            requirements: &["LC-21"],
            checks: "A session goes on with the toolset that it has while discovery fails.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(cached(scene)),
    },
    Check {
        probe: Probe {
            name: "toolset_missing",
            requirements: &["LC-40"],
            checks: "A toolset that can not be fetched is reported, and the others stay usable.",
        },
        phase: Phase::Together,
        run: |scene| Box::pin(missing(scene)),
    },
];

/// Sets what the second server offers until it is dropped.
struct Offer<'a> {
    scene: &'a Scene,
    before: Reply,
}

impl<'a> Offer<'a> {
    fn new(scene: &'a Scene, reply: Reply) -> Offer<'a> {
        let before = std::mem::replace(&mut scene.stage().record().documents[SECOND], reply);
        Offer { scene, before }
    }

    /// Another version, with one tool more.
    fn changed(scene: &'a Scene) -> Offer<'a> {
        let version = format!("second-{}", scene.number);
        Offer::new(scene, Reply::json(&tools::second(&scene.stage().url, &version, &[FICKLE, NEW])))
    }
}

impl Drop for Offer<'_> {
    fn drop(&mut self) {
        self.scene.stage().record().documents[SECOND] = self.before.clone();
    }
}

/// Alone on the stage: a discovery does not say for whom it is.
async fn once(scene: Scene) -> Seen {
    let servers = scene.bench.servers();
    let count = |at: usize| scene.stage().discoveries(at);
    let before: Vec<usize> = (0..SERVERS).map(count).collect();
    let mark = scene.note();
    let thread = scene.open(mark).await?;
    scene.heard(&scene.stage().written(mark)).await?;
    scene.looked_at(&thread).await?;
    scene.settle().await;
    for at in servers {
        let asked = scene.stage().asked(|asked| asked.route == Route::Discovery(at));
        let exchanges = || asked.iter().skip(before[at]).take(3).map(|asked| asked.exchange()).collect();
        if asked.iter().any(|asked| asked.method != "GET") {
            return wrong("a toolset was asked for by something else than GET", exchanges());
        }
        match count(at) - before[at] {
            1 => {}
            0 => return wrong("a new session did not ask for the toolsets", exchanges()),
            more => {
                let what =
                    format!("a session of two questions asked a tool server {more} times for its tools");
                return wrong(what, exchanges());
            }
        }
    }
    Ok(())
}

async fn new_session(scene: Scene) -> Seen {
    scene.needs(SECOND)?;
    let _lock = scene.bench.second.lock().await;
    let _offer = Offer::changed(&scene);
    let mark = scene.note();
    scene.open(mark).await?;
    let question = scene.heard(&scene.stage().written(mark)).await?;
    if question.offered(NEW).is_some() {
        return Ok(());
    }
    wrong("a new session is not offered what the tool server offers now", vec![question.exchange()])
}

async fn conflict(scene: Scene) -> Seen {
    scene.needs(SECOND)?;
    let _lock = scene.bench.second.lock().await;
    let first = scene.note();
    let thread = scene.open(first).await?;
    scene.heard(&scene.stage().written(first)).await?;
    let offer = Offer::changed(&scene);
    let mark = scene.calls(&[FICKLE]);
    scene.acknowledge(mark, (0..20).map(|_| Acknowledgement::Status(409)));
    scene.say(&thread, mark).await?;
    let call = scene.call().await?;
    let question = scene
        .question("a question with a result of the call that was answered 409", |asked| {
            !asked.results_of(call.mark()).is_empty()
        })
        .await?;
    if question.offered(NEW).is_none() {
        return wrong("after a 409 the model is still offered the old toolset", vec![question.exchange()]);
    }
    let mark = scene.calls(&[NEW]);
    scene.say(&thread, mark).await?;
    let call = scene.call().await?;
    drop(offer);
    if call.operation() != NEW {
        return wrong("a call that was answered 409 was sent again", scene.story());
    }
    Ok(())
}

async fn cached(scene: Scene) -> Seen {
    scene.needs(SECOND)?;
    let _lock = scene.bench.second.lock().await;
    let first = scene.note();
    let thread = scene.open(first).await?;
    scene.heard(&scene.stage().written(first)).await?;
    let _offer = Offer::new(&scene, Reply::status(500));
    scene.say(&thread, scene.calls(&[FICKLE])).await?;
    scene.call().await?;
    Ok(())
}

async fn missing(scene: Scene) -> Seen {
    scene.needs(SECOND)?;
    let api = scene.bench.user.api("show what the runtime reports")?;
    let _lock = scene.bench.second.lock().await;
    let _offer = Offer::new(&scene, Reply::status(500));
    let mark = scene.note();
    let thread = scene.open(mark).await?;
    let question = scene.heard(&scene.stage().written(mark)).await?;
    // The toolset that another session has fetched may stand in for it.
    if question.offered(WORK).is_none() {
        let what = "a toolset could not be fetched, and the tools of another server are not offered";
        return wrong(what, vec![question.exchange()]);
    }
    let history = api.get(&scene.bench.http, &["threads", &thread, "history"]).await?;
    if history.to_string().contains(tools::base_path(SECOND)) {
        return Ok(());
    }
    let what = "a toolset could not be fetched, and the thread's history does not say so";
    wrong(what, vec![question.exchange()])
}
