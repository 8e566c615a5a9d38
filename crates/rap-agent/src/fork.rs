//! Forks: new root threads that inherit the beginning of another thread's history.

use std::collections::HashSet;

use rap_protocol::CallId;

use crate::{Head, Item, Seq};

/// Point of a history at which a fork begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForkPoint {
    /// Last entry that the fork inherits.
    pub at: Seq,
    /// Last entry up to there that the model has answered. A summary may cover the history up to this entry.
    answered: Seq,
    /// Last entry that the newest summary among the visited entries covers; 0 if there is none.
    summarised: Seq,
}

/// Search for the last valid fork point at or before an entry. At a valid point the history is a valid prompt: every call
/// has its result. The caller passes the entries backwards, beginning with that entry.
#[derive(Debug)]
pub struct ForkSearch {
    point: ForkPoint,
    /// Results that were visited before their calls; `None` as soon as `point.at` is known.
    results: Option<HashSet<CallId>>,
}

impl ForkSearch {
    /// Starts a search at an entry.
    pub fn new(at: Seq) -> ForkSearch {
        let point = ForkPoint { at, answered: 0, summarised: 0 };
        ForkSearch { point, results: Some(HashSet::new()) }
    }

    /// Visits the next entry backwards. Returns the point as soon as it is complete. After `at` is known, this takes only
    /// the entries back to the model's last answer.
    pub fn visit(&mut self, seq: Seq, item: &Item) -> Option<ForkPoint> {
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

    /// Returns the point after the first entry of the history was visited.
    pub fn finish(self) -> ForkPoint {
        self.point
    }
}

impl ForkPoint {
    /// Returns the head of a fork that begins at this point. The fork is idle and inherits no calls, subscriptions, timers
    /// or children.
    pub fn head(self) -> Head {
        let ForkPoint { at, answered, summarised } = self;
        Head {
            seq: at,
            settled_up_to: at,
            answered_up_to: answered,
            summarised_up_to: summarised,
            ..Head::new()
        }
    }
}
