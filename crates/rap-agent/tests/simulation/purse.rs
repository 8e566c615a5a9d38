//! What the checker knows of a session's budget, of which one thing is bounded at most.

use std::time::Duration;

use rap_agent::{Amounts, Bounds, Limits};
use rap_protocol::Timestamp;

const HOUR: Duration = Duration::from_secs(3600);

#[derive(Debug, Clone, Copy)]
pub struct Purse {
    per_hour: bool,
    bounds: Bounds,
    /// When the hour began.
    began: Timestamp,
    spent: u64,
}

impl Purse {
    pub fn new(limits: &Limits, now: Timestamp) -> Purse {
        let per_hour = limits.budgets.per_hour != Bounds::default();
        let bounds = if per_hour { limits.budgets.per_hour } else { limits.budgets.in_total };
        Purse { per_hour, bounds, began: now, spent: 0 }
    }

    pub fn spend(&mut self, spent: Amounts, now: Timestamp) {
        self.pass(now);
        self.spent += match self.bounds {
            Bounds { turns: Some(_), .. } => spent.turns,
            Bounds { tokens: Some(_), .. } => spent.tokens,
            _ => spent.wakes,
        };
    }

    /// What was spent does not count any more, if it was too much.
    pub fn fill(&mut self) {
        if self.is_over() {
            self.spent = 0;
        }
    }

    /// Whether more was spent than there was.
    pub fn is_over(&self) -> bool {
        let Bounds { turns, tokens, wakes } = self.bounds;
        turns.or(tokens).or(wakes).is_some_and(|bound| self.spent > bound)
    }

    fn pass(&mut self, now: Timestamp) {
        if self.per_hour && now.since(self.began) >= HOUR {
            (self.began, self.spent) = (now, 0);
        }
    }
}
