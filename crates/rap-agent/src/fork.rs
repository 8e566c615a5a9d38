//! Forks: a root of its own that begins with a part of another thread's history.

use std::collections::HashSet;

use rap_protocol::CallId;

use crate::{Head, Item, Seq};

/// Where a fork begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForkPoint {
    /// The last entry of the other thread that it sees.
    pub at: Seq,
    /// What the model has answered of that, which is what a summary may cover.
    answered: Seq,
    /// What a summary covers that nobody has answered yet; any other covers less than was answered.
    summarised: Seq,
}

/// Looks for the nearest point at or before an entry at which a history is a valid prompt: no call there lacks its
/// result. It is shown the entries from that one on, backwards.
#[derive(Debug)]
pub struct ForkSearch {
    point: ForkPoint,
    /// Results whose calls are yet to come; none any more when the point is found.
    results: Option<HashSet<CallId>>,
}

impl ForkSearch {
    /// Begins at an entry.
    pub fn new(at: Seq) -> ForkSearch {
        let point = ForkPoint { at, answered: 0, summarised: 0 };
        ForkSearch { point, results: Some(HashSet::new()) }
    }

    /// Looks at the next entry backwards; the point, as soon as all is known of it. After the point itself that takes
    /// no more than what came in between two answers of the model.
    pub fn look(&mut self, seq: Seq, item: &Item) -> Option<ForkPoint> {
        match item {
            Item::Result { call_id, .. } => {
                if let Some(results) = &mut self.results {
                    results.insert(call_id.clone());
                }
            }
            Item::Assistant { calls, .. } => {
                let complete = |results: HashSet<CallId>| calls.iter().all(|call| results.contains(&call.id));
                if !self.results.take().is_none_or(complete) {
                    self.point.at = seq - 1;
                } else if !calls.iter().any(|call| call.arguments.is_synthetic()) {
                    return Some(ForkPoint { answered: seq - 1, ..self.point });
                }
            }
            Item::Summary { covers, .. } => self.point.summarised = self.point.summarised.max(*covers),
            _ => {}
        }
        None
    }

    /// The point, if there was nothing more to look at.
    pub fn end(self) -> ForkPoint {
        self.point
    }
}

impl Head {
    /// The head of a fork that begins at a point of this thread. It inherits no calls, subscriptions, timers or
    /// children, and waits to be spoken to.
    pub fn fork(&self, point: ForkPoint) -> Head {
        let ForkPoint { at, answered, summarised } = point;
        Head { seq: at, settled: at, answered, summarised, ..Head::new() }
    }
}
