//! Faults, chosen at random.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rap_testkit::Rng;
use rap_testkit::proxy::{Fault as LinkFault, Proxy};
use tokio::task::JoinHandle;

use crate::stage::Stage;

/// Number of faults that may happen at the same time.
const CONCURRENT: u64 = 2;
/// Longest pause between two faults, and longest duration of one, in milliseconds.
const LONGEST_PAUSE: usize = 1200;
const LONGEST_FAULT: usize = 1500;
/// A node that is frozen for longer than this loses its lease.
const LONGEST_FREEZE: usize = 6000;
/// Farthest that a clock is set from the real time, in seconds. A jump is at most twice as long.
const FARTHEST_CLOCK: i64 = 150;

/// Number of faults of each kind.
#[derive(Default)]
pub(crate) struct Tally {
    counts: Mutex<BTreeMap<&'static str, u64>>,
}

impl Tally {
    fn add(&self, kind: &'static str) {
        *self.counts.lock().unwrap().entry(kind).or_default() += 1;
    }

    pub(crate) fn summary(&self) -> String {
        let counts = self.counts.lock().unwrap();
        let parts: Vec<String> = counts.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
        parts.join(", ")
    }
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    KillNode,
    StopNode,
    FreezeNode,
    KillTools,
    FreezeTools,
    CutFront,
    StallFront,
    CutTools,
    StallTools,
    FillDisk,
    SetClock,
    KillDatabase,
    CutDatabase,
    StallDatabase,
    LoseCommit,
    LoseAnswer,
}

const ANYWHERE: [Fault; 16] = [
    Fault::KillNode,
    Fault::KillNode,
    Fault::KillNode,
    Fault::KillNode,
    Fault::StopNode,
    Fault::FreezeNode,
    Fault::KillTools,
    Fault::KillTools,
    Fault::FreezeTools,
    Fault::CutFront,
    Fault::StallFront,
    Fault::CutTools,
    Fault::StallTools,
    Fault::FillDisk,
    Fault::SetClock,
    Fault::SetClock,
];
const POSTGRES: [Fault; 6] = [
    Fault::KillDatabase,
    Fault::CutDatabase,
    Fault::StallDatabase,
    Fault::LoseCommit,
    Fault::LoseAnswer,
    Fault::LoseAnswer,
];

/// Faults that happen until [`Faults::end`].
pub(crate) struct Faults {
    ending: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Faults {
    /// Ends the faults. Those that happen are over when it returns.
    pub(crate) async fn end(self) {
        self.ending.store(true, Ordering::SeqCst);
        for task in self.tasks {
            task.await.unwrap();
        }
    }
}

pub(crate) fn start(stage: &Arc<Stage>, seed: u64) -> Faults {
    let ending = Arc::new(AtomicBool::new(false));
    let tasks = (0..CONCURRENT).map(|number| {
        let (stage, ending, mut rng) =
            (Arc::clone(stage), Arc::clone(&ending), Rng(seed.wrapping_mul(31) + number));
        tokio::spawn(async move {
            let mut choices = ANYWHERE.to_vec();
            if stage.postgres.is_some() {
                choices.extend(POSTGRES);
            }
            while !ending.load(Ordering::SeqCst) {
                tokio::time::sleep(milliseconds(&mut rng, LONGEST_PAUSE)).await;
                let fault = *rng.pick(&choices);
                cause(&stage, fault, &mut rng).await;
            }
        })
    });
    Faults { tasks: tasks.collect(), ending }
}

fn milliseconds(rng: &mut Rng, most: usize) -> Duration {
    Duration::from_millis(rng.below(most) as u64)
}

/// Causes a fault and waits until it is over.
async fn cause(stage: &Stage, fault: Fault, rng: &mut Rng) {
    let time = milliseconds(rng, LONGEST_FAULT);
    let node = rng.pick(&stage.nodes);
    let tally = |kind| stage.faults.add(kind);
    match fault {
        Fault::KillNode => {
            tally("kills");
            node.kill();
        }
        Fault::StopNode => {
            tally("stops");
            let late = node.stop().await;
            stage.noticed.lock().unwrap().extend(late);
        }
        Fault::FreezeNode => {
            tally("freezes");
            node.freeze(milliseconds(rng, LONGEST_FREEZE)).await;
        }
        Fault::KillTools => {
            tally("kills of tools");
            stage.tools.kill();
        }
        Fault::FreezeTools => {
            tally("freezes of tools");
            stage.tools.freeze(time).await;
        }
        Fault::CutFront | Fault::StallFront => {
            tally("cuts");
            link(
                &stage.front,
                if matches!(fault, Fault::CutFront) { LinkFault::Away } else { LinkFault::Stall },
                time,
            )
            .await;
        }
        Fault::CutTools | Fault::StallTools => {
            tally("cuts");
            link(
                &stage.tool_link,
                if matches!(fault, Fault::CutTools) { LinkFault::Away } else { LinkFault::Stall },
                time,
            )
            .await;
        }
        Fault::FillDisk => {
            if let Some(disk) = &stage.disk {
                tally("full disks");
                disk.fill(time).await;
            }
        }
        Fault::SetClock => {
            let servers: Vec<_> = stage.servers().filter_map(|server| server.clock.as_ref()).collect();
            if !servers.is_empty() {
                tally("jumps of a clock");
                let ahead = rng.below(2 * FARTHEST_CLOCK as usize + 1) as i64 - FARTHEST_CLOCK;
                rng.pick(&servers).set(ahead);
            }
        }
        _ => of_database(stage, fault, time).await,
    }
}

async fn of_database(stage: &Stage, fault: Fault, time: Duration) {
    let Some(postgres) = &stage.postgres else { return };
    match fault {
        Fault::KillDatabase => {
            stage.faults.add("kills of Postgres");
            let _changing = postgres.changing.lock().await;
            postgres.server.stop();
            tokio::time::sleep(time).await;
            postgres.server.start();
        }
        Fault::CutDatabase => {
            stage.faults.add("cuts of Postgres");
            link(&postgres.link, LinkFault::Away, time).await;
        }
        Fault::StallDatabase => {
            stage.faults.add("cuts of Postgres");
            link(&postgres.link, LinkFault::Stall, time).await;
        }
        Fault::LoseCommit => {
            stage.faults.add("lost commits");
            postgres.link.set(LinkFault::LoseCommit);
        }
        _ => {
            stage.faults.add("lost answers to commits");
            postgres.link.set(LinkFault::LoseAnswer);
        }
    }
}

async fn link(proxy: &Proxy, fault: LinkFault, time: Duration) {
    proxy.set(fault);
    tokio::time::sleep(time).await;
    proxy.set(LinkFault::None);
}
