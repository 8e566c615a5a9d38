//! Budgets: how much a session, a root with all its descendants, may ask the model.

use std::time::Duration;

use rap_protocol::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{Effect, Head, Phase, Step, Write};

const HOUR: Duration = Duration::from_secs(3600);

/// What a session may spend; nothing is bounded where nothing is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Budgets {
    /// In an hour.
    pub per_hour: Bounds,
    /// In all.
    pub in_total: Bounds,
}

/// The bounds of a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bounds {
    /// Questions to the model.
    pub turns: Option<u64>,
    /// Tokens that were read and written.
    pub tokens: Option<u64>,
    /// Times that a thread was woken by something from outside.
    pub wakes: Option<u64>,
}

/// What was spent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Amounts {
    /// Questions to the model.
    pub turns: u64,
    /// Tokens that were read and written.
    pub tokens: u64,
    /// Times that a thread was woken by something from outside.
    pub wakes: u64,
}

/// What a session has spent since its budget was lifted last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spending {
    /// When the hour began that is being counted.
    pub hour_began: Timestamp,
    /// In this hour.
    pub hour: Amounts,
    /// In all.
    pub total: Amounts,
}

/// Who goes on when a thread is resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resumes {
    /// The thread alone, if at all: what failed was its own.
    Alone,
    /// All threads of its session that would say the same: a budget is the session's, so it is lifted for all of them.
    WithSession,
}

impl Head {
    /// Who goes on when this thread is resumed.
    pub fn resumes(&self) -> Resumes {
        match self.phase {
            Phase::Paused { .. } => Resumes::WithSession,
            _ => Resumes::Alone,
        }
    }
}

impl Amounts {
    /// What a step spends, question by question: its own one, if it asks, and what an answer has cost; then the first
    /// one of each child that it bears. Tokens are known when they are spent.
    pub fn of(before: &Head, step: &Step) -> Vec<Amounts> {
        let asked = step.effects.iter().any(|effect| matches!(effect, Effect::Ask { .. }));
        let read_and_written = |head: &Head| head.usage.input.saturating_add(head.usage.output);
        let own = Amounts {
            turns: u64::from(asked),
            tokens: read_and_written(&step.head).saturating_sub(read_and_written(before)),
            wakes: u64::from(asked && is_woken(before, &step.head)),
        };
        let births = step.writes.iter().filter(|write| matches!(write, Write::Born { .. }));
        let birth = |_| Amounts { turns: 1, tokens: 0, wakes: 1 };
        [own].into_iter().chain(births.map(birth)).collect()
    }
}

/// Whether a thread asks about something new. A question that is asked again, because it has failed or with a summary,
/// is not.
fn is_woken(before: &Head, after: &Head) -> bool {
    let again = match before.phase {
        Phase::Failed { .. } => after.failing_since.is_some() && before.held.is_empty(),
        Phase::Asking { .. } => after.summarised != before.summarised,
        _ => false,
    };
    after.turns_awake == 1 && !again
}

impl Budgets {
    /// Whether nothing is bounded.
    pub fn are_off(&self) -> bool {
        *self == Budgets::default()
    }
}

impl Bounds {
    /// The bounds that were passed, by name.
    fn passed(&self, spent: &Amounts) -> impl Iterator<Item = (&'static str, u64)> {
        let all = [
            ("turns", self.turns, spent.turns),
            ("tokens", self.tokens, spent.tokens),
            ("wakes", self.wakes, spent.wakes),
        ];
        all.into_iter().filter_map(|(name, bound, spent)| Some((name, bound.filter(|bound| spent > *bound)?)))
    }
}

impl Spending {
    /// Nothing was spent yet.
    pub fn new(now: Timestamp) -> Spending {
        Spending { hour_began: now, hour: Amounts::default(), total: Amounts::default() }
    }

    /// Counts what is spent at a time. If that is beyond the budget, says why the question must not be asked.
    pub fn spend(&mut self, spent: Amounts, budgets: &Budgets, now: Timestamp) -> Option<String> {
        self.count(spent, now);
        self.exceeds(budgets, now)
    }

    fn count(&mut self, spent: Amounts, now: Timestamp) {
        self.pass_time(now);
        for amounts in [&mut self.hour, &mut self.total] {
            amounts.turns = amounts.turns.saturating_add(spent.turns);
            amounts.tokens = amounts.tokens.saturating_add(spent.tokens);
            amounts.wakes = amounts.wakes.saturating_add(spent.wakes);
        }
    }

    /// Why the model may not be asked at this time, for people; nothing, if it may.
    fn exceeds(mut self, budgets: &Budgets, now: Timestamp) -> Option<String> {
        self.pass_time(now);
        let total = budgets.in_total.passed(&self.total).map(|(name, bound)| (name, bound, "in total"));
        let hour = budgets.per_hour.passed(&self.hour).map(|(name, bound)| (name, bound, "in this hour"));
        let (name, bound, when) = total.chain(hour).next()?;
        Some(format!(
            "the budget of this session is spent: {bound} {name} {when}; resume it for as many again"
        ))
    }

    /// Allows as much again of what was passed.
    pub fn lift(&mut self, budgets: &Budgets) {
        for (bounds, amounts) in [(budgets.per_hour, &mut self.hour), (budgets.in_total, &mut self.total)] {
            let passed: Vec<&str> = bounds.passed(amounts).map(|(name, _)| name).collect();
            for name in passed {
                match name {
                    "turns" => amounts.turns = 0,
                    "tokens" => amounts.tokens = 0,
                    _ => amounts.wakes = 0,
                }
            }
        }
    }

    fn pass_time(&mut self, now: Timestamp) {
        if now.since(self.hour_began) >= HOUR {
            (self.hour_began, self.hour) = (now, Amounts::default());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURN: Amounts = Amounts { turns: 1, tokens: 10, wakes: 1 };

    fn at(minutes: i64) -> Timestamp {
        Timestamp(minutes * 60_000)
    }

    #[test]
    fn an_hour_is_over_after_an_hour() {
        let bounds = Bounds { turns: Some(2), ..Bounds::default() };
        let budgets = Budgets { per_hour: bounds, ..Budgets::default() };
        let mut spending = Spending::new(at(0));
        for _ in 0..2 {
            spending.count(TURN, at(10));
            assert_eq!(spending.exceeds(&budgets, at(10)), None);
        }
        spending.count(TURN, at(20));
        let why = "the budget of this session is spent: 2 turns in this hour; resume it for as many again";
        assert_eq!(spending.exceeds(&budgets, at(59)).as_deref(), Some(why));
        assert_eq!(spending.exceeds(&budgets, at(60)), None);
    }

    #[test]
    fn what_is_lifted_lasts_as_long_again() {
        let bounds = Bounds { tokens: Some(25), ..Bounds::default() };
        let budgets = Budgets { in_total: bounds, ..Budgets::default() };
        let mut spending = Spending::new(at(0));
        for _ in 0..2 {
            for hour in 0..3 {
                assert_eq!(spending.exceeds(&budgets, at(hour * 100)), None);
                spending.count(TURN, at(hour * 100));
            }
            assert!(spending.exceeds(&budgets, at(1000)).unwrap().contains("25 tokens in total"));
            spending.lift(&budgets);
        }
        // What was not passed goes on being counted.
        assert_eq!((spending.total.turns, spending.total.tokens), (6, 0));
    }

    #[test]
    fn nothing_is_bounded_unless_it_is_said() {
        let mut spending = Spending::new(at(0));
        spending.count(Amounts { turns: u64::MAX, tokens: u64::MAX, wakes: u64::MAX }, at(0));
        spending.count(TURN, at(0));
        assert_eq!(spending.exceeds(&Budgets::default(), at(0)), None);
        assert!(Budgets::default().are_off());
    }
}
