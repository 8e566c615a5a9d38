//! One crash for all probes that are about it: each sets its scene up, the runtime is killed and started again once, and
//! each goes on to see what became of it.

use std::future::Future;
use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;

use super::Host;

/// How far the probes are, and the runtime with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// Scenes are set up.
    Before,
    /// All are set up: whoever has something to say in the last moment says it.
    Last,
    /// The runtime is up again.
    After,
}

/// The crash.
#[derive(Debug)]
pub(crate) struct Crash {
    stage: watch::Sender<Stage>,
    /// How many probes are still to come to the crash, and to their last words.
    missing: watch::Sender<(usize, usize)>,
    trouble: Mutex<Option<String>>,
}

/// A probe's place in the crash. Dropping it gives it up, so that nobody waits for a probe that has failed.
pub(crate) struct Place<'a> {
    crash: &'a Crash,
    arrived: bool,
    spoken: bool,
}

impl Crash {
    pub(crate) fn of(probes: usize) -> Crash {
        Crash {
            stage: watch::Sender::new(Stage::Before),
            missing: watch::Sender::new((probes, probes)),
            trouble: Mutex::default(),
        }
    }

    pub(crate) fn place(&self) -> Place<'_> {
        Place { crash: self, arrived: false, spoken: false }
    }

    async fn reached(&self, stage: Stage) {
        // The sender lives as long as this.
        self.stage.subscribe().wait_for(|now| *now >= stage).await.ok();
    }

    /// Kills and starts the runtime when everybody is there.
    pub(crate) async fn happen(&self, host: &dyn Host) {
        self.missing.subscribe().wait_for(|(arriving, _)| *arriving == 0).await.ok();
        self.stage.send_replace(Stage::Last);
        self.missing.subscribe().wait_for(|(_, speaking)| *speaking == 0).await.ok();
        if let Err(error) = host.restart().await {
            *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
        }
        self.stage.send_replace(Stage::After);
    }

    /// Why the runtime did not come back.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Place<'_> {
    /// Waits for the others, does what is to be done in the last moment, and comes back when the runtime is up again.
    pub(crate) async fn pass<T>(mut self, last: impl Future<Output = T>) -> T {
        self.arrive();
        self.crash.reached(Stage::Last).await;
        let said = last.await;
        self.speak();
        self.crash.reached(Stage::After).await;
        said
    }

    fn arrive(&mut self) {
        if !std::mem::replace(&mut self.arrived, true) {
            self.crash.missing.send_modify(|(arriving, _)| *arriving -= 1);
        }
    }

    fn speak(&mut self) {
        if !std::mem::replace(&mut self.spoken, true) {
            self.crash.missing.send_modify(|(_, speaking)| *speaking -= 1);
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.arrive();
        self.speak();
    }
}
