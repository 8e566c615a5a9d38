//! Budgets: what a session spends is counted in the transaction of the step that spends it, and lifted when one of its
//! threads is resumed.

use rap_agent::{Amounts, Message, Resumes, Spending, Step, Write, step};

use super::{Reply, World};
use crate::sim::disk::{Place, place};
use crate::sim::fault::Fault;
use crate::sim::invariants::{Broken, broken, holds};
use crate::sim::outside::Request;

impl World {
    /// Counts what a step and the children that it has borne have spent, in its transaction. Whose question is beyond
    /// the budget is paused.
    pub(super) fn spend(&mut self, thread: Place, step: &Step, spent: Vec<Amounts>) -> Result<(), Broken> {
        let born = step.writes.iter().filter_map(|write| match write {
            Write::Born { child, .. } => Some(place(child)),
            _ => None,
        });
        for (asker, spent) in [thread].into_iter().chain(born).zip(spent) {
            if spent == Amounts::default() {
                continue;
            }
            let (root, budgets) = (self.disk.root(asker), self.limits.budgets);
            let spending = self.disk.spending.entry(root).or_insert_with(|| Spending::new(self.now));
            let over = spending.spend(spent, &budgets, self.now);
            self.checker.spent(root, spent, over.is_some(), self.now)?;
            if let (Some(why), 1..) = (over, spent.turns) {
                self.pause(asker, why)?;
            }
        }
        Ok(())
    }

    fn pause(&mut self, thread: Place, why: String) -> Result<(), Broken> {
        let head = self.disk.threads[thread].head.clone();
        let message = Message::OverBudget { turn: head.turn, why };
        self.note(|| format!("t{thread} {message:?}"));
        match step(head, message.clone(), self.now, &self.limits) {
            Ok(step) => {
                holds!(step.head.asking().is_none(), "I12: t{thread} is over its budget, and asks on");
                self.commit(thread, &message, &step, None)
            }
            Err(why) => broken(format!("I12: t{thread} can not be paused: {why}")),
        }
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
        let paused = self.paused(root);
        for (other, _) in &paused {
            let skipped = *other == request.thread || self.fault == Fault::ResumesOne;
            if !skipped && self.offer(*other, Message::Resume, None)? == Reply::Nothing {
                return Ok(false);
            }
        }
        // Some may be paused again, for what the session has spent since.
        let asked = |(other, turn): &(Place, u64)| {
            *other == request.thread || self.disk.threads[*other].head.turn > *turn
        };
        let left = paused.iter().find(|paused| !asked(paused));
        holds!(left.is_none(), "I12: the session of t{root} goes on, and {left:?} does not");
        Ok(true)
    }

    /// The threads of a session that wait for somebody to let it go on, and their last questions.
    fn paused(&self, root: Place) -> Vec<(Place, u64)> {
        let threads = self.disk.threads.iter().enumerate();
        threads
            .filter(|(thread, row)| {
                row.head.resumes() == Resumes::WithSession && self.disk.root(*thread) == root
            })
            .map(|(thread, row)| (thread, row.head.turn))
            .collect()
    }
}
