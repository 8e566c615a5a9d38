//! Forks: a client makes a root that begins with a part of another thread's history.

use rap_agent::{ForkPoint, ForkSearch, Seq};

use super::{Committed, Crash, World};
use crate::sim::disk::{Disk, Place};
use crate::sim::fault::Fault;
use crate::sim::invariants::{Broken, holds};

impl World {
    /// Forks a thread at an entry, or before. A crash leaves a whole fork or none; the client does not ask again.
    pub fn fork(&mut self, source: Place, at: Seq) -> Result<(), Broken> {
        let point = match self.fault {
            Fault::ForksAnywhere => ForkSearch::new(at).end(),
            _ => nearest(&self.disk, source, at),
        };
        self.note(|| format!("t{source} is forked at {at}: {point:?}"));
        let crash = self.crash.take();
        if matches!(crash, None | Some(Crash::BeforeReply)) {
            let before = self.disk.threads[source].clone();
            let fork = self.disk.fork(source, point, self.fault);
            self.committed.push(Committed::Fork { source, point });
            holds!(self.disk.threads[source] == before, "I9: t{source} is another since it was forked");
            self.checker.forked(&self.disk, fork, at)?;
        }
        if crash.is_some() {
            self.restart()?;
        }
        Ok(())
    }
}

/// As the store looks for it: entry by entry, backwards.
fn nearest(disk: &Disk, source: Place, at: Seq) -> ForkPoint {
    let mut search = ForkSearch::new(at);
    let history = disk.visible(source, at);
    for (seq, entry) in (1..=at).rev().zip(history.into_iter().rev()) {
        if let Some(point) = search.look(seq, &entry.item) {
            return point;
        }
    }
    search.end()
}
