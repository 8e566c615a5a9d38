//! Budgets: what a session has spent is looked at before the model is asked, and lifted when one of its threads is
//! resumed.

use rap_agent::{Message, Resumes};

use super::{Asked, Reply, World};
use crate::sim::disk::Place;
use crate::sim::fault::Fault;
use crate::sim::invariants::{Broken, holds};
use crate::sim::outside::Request;

impl World {
    /// The session may have no budget for a question; whether it was held back.
    pub fn hold_back(&mut self, asked: &Asked) -> Result<bool, Broken> {
        let Asked { thread, turn, .. } = *asked;
        let root = self.disk.root(thread);
        let spending = self.disk.spending.get(&root);
        let over = spending.and_then(|spending| spending.exceeds(&self.limits.budgets, self.now));
        self.checker.may_ask(root, over.is_none(), self.now)?;
        let Some(why) = over else { return Ok(false) };
        self.offer(thread, Message::OverBudget { turn, why }, None)?;
        Ok(true)
    }

    /// With a thread that is paused, the others of its session go on, before itself: whoever has no answer asks again
    /// and reaches all of them. Whether all was done.
    pub(super) fn resume_session(&mut self, request: &Request) -> Result<bool, Broken> {
        let row = &self.disk.threads[request.thread];
        if row.keys.contains(&request.key) || row.head.resumes() == Resumes::Alone {
            return Ok(true);
        }
        let root = self.disk.root(request.thread);
        if let Some(spending) = self.disk.spending.get_mut(&root) {
            spending.lift(&self.limits.budgets);
        }
        self.checker.lifted(root);
        for other in self.paused(root) {
            let skipped = other == request.thread || self.fault == Fault::ResumesOne;
            if !skipped && self.offer(other, Message::Resume, None)? == Reply::Nothing {
                return Ok(false);
            }
        }
        let left: Vec<Place> =
            self.paused(root).into_iter().filter(|other| *other != request.thread).collect();
        holds!(left.is_empty(), "I12: the session of t{root} goes on, and {left:?} are still paused");
        Ok(true)
    }

    fn paused(&self, root: Place) -> Vec<Place> {
        let threads = 0..self.disk.threads.len();
        let waits = |thread: &Place| self.disk.threads[*thread].head.resumes() == Resumes::WithSession;
        threads.filter(|thread| waits(thread) && self.disk.root(*thread) == root).collect()
    }
}
