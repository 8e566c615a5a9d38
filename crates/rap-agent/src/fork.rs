//! Forks: a root of its own that begins with a part of another thread's history.

use std::collections::HashSet;

use rap_protocol::CallId;

use crate::{Head, Item, Seq};

/// Looks for the nearest point at or before an entry at which a history is a valid prompt: no call there lacks its
/// result. It is shown the entries from that one on, backwards.
#[derive(Debug)]
pub struct ForkPoint {
    at: Seq,
    results: HashSet<CallId>,
}

impl ForkPoint {
    /// Begins at an entry.
    pub fn new(at: Seq) -> ForkPoint {
        ForkPoint { at, results: HashSet::new() }
    }

    /// Looks at the next entry backwards; the point, as soon as it is known.
    pub fn look(&mut self, seq: Seq, item: &Item) -> Option<Seq> {
        match item {
            Item::Result { call_id, .. } => {
                self.results.insert(call_id.clone());
                None
            }
            Item::Assistant { calls, .. } => {
                let complete = calls.iter().all(|call| self.results.contains(&call.id));
                Some(if complete { self.at } else { seq - 1 })
            }
            _ => None,
        }
    }

    /// The point, if there was nothing more to look at.
    pub fn end(self) -> Seq {
        self.at
    }
}

impl Head {
    /// The head of a fork that begins at a point of this thread. It inherits no calls, subscriptions, timers or
    /// children, and waits to be spoken to.
    pub fn fork(&self, at: Seq) -> Head {
        Head { seq: at, settled: at, minted: self.minted, ..Head::new() }
    }
}
