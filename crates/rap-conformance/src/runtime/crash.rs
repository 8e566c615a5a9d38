//! One crash that all crash probes share. Each probe sets up its scenario, the runtime is killed and restarted once,
//! and then each probe checks its part of the state.

use std::future::Future;
use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;

use super::RuntimeHost;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum CrashPhase {
    /// Probes set up their scenarios.
    Setup,
    /// All scenarios are set up. Probes do what has to happen immediately before the crash.
    BeforeKill,
    /// The runtime has been restarted.
    Restarted,
}

/// Coordinates the probes and the restart of the runtime.
#[derive(Debug)]
pub(crate) struct Crash {
    phase: watch::Sender<CrashPhase>,
    /// Number of probes that have not finished their setup, and number that have not finished their last action.
    pending: watch::Sender<(usize, usize)>,
    restart_error: Mutex<Option<String>>,
}

/// A probe that takes part in the crash. Dropping it counts as finished, so that the others do not wait for a failed probe.
pub(crate) struct Participant<'a> {
    crash: &'a Crash,
    is_set_up: bool,
    is_ready: bool,
}

impl Crash {
    pub(crate) fn new(probes: usize) -> Crash {
        Crash {
            phase: watch::Sender::new(CrashPhase::Setup),
            pending: watch::Sender::new((probes, probes)),
            restart_error: Mutex::default(),
        }
    }

    pub(crate) fn participant(&self) -> Participant<'_> {
        Participant { crash: self, is_set_up: false, is_ready: false }
    }

    async fn wait_for_phase(&self, phase: CrashPhase) {
        // The sender cannot be dropped while `self` is borrowed, so this does not fail.
        self.phase.subscribe().wait_for(|now| *now >= phase).await.ok();
    }

    /// Kills and restarts the runtime when all probes are ready.
    pub(crate) async fn run(&self, host: &dyn RuntimeHost) {
        self.pending.subscribe().wait_for(|(in_setup, _)| *in_setup == 0).await.ok();
        self.phase.send_replace(CrashPhase::BeforeKill);
        self.pending.subscribe().wait_for(|(_, not_ready)| *not_ready == 0).await.ok();
        if let Err(error) = host.restart().await {
            *self.restart_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
        }
        self.phase.send_replace(CrashPhase::Restarted);
    }

    /// Error of the restart; `None` if the runtime is running again.
    pub(crate) fn restart_error(&self) -> Option<String> {
        self.restart_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Participant<'_> {
    /// Waits until all probes are set up, runs `last_action` immediately before the crash, and returns its output after
    /// the restart.
    pub(crate) async fn wait_for_restart<T>(mut self, last_action: impl Future<Output = T>) -> T {
        self.set_up();
        self.crash.wait_for_phase(CrashPhase::BeforeKill).await;
        let output = last_action.await;
        self.set_ready();
        self.crash.wait_for_phase(CrashPhase::Restarted).await;
        output
    }

    fn set_up(&mut self) {
        if !std::mem::replace(&mut self.is_set_up, true) {
            self.crash.pending.send_modify(|(in_setup, _)| *in_setup -= 1);
        }
    }

    fn set_ready(&mut self) {
        if !std::mem::replace(&mut self.is_ready, true) {
            self.crash.pending.send_modify(|(_, not_ready)| *not_ready -= 1);
        }
    }
}

impl Drop for Participant<'_> {
    fn drop(&mut self) {
        self.set_up();
        self.set_ready();
    }
}
