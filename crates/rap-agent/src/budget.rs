//! Budgets: how much a session, a root with all its descendants, may ask the model.

use std::time::Duration;

use rap_protocol::Timestamp;
use serde::{Deserialize, Serialize};

use crate::step::Stepping;

const HOUR: Duration = Duration::from_secs(3600);
const HOURLY_WAKES: (&str, &str) = ("wakes", "in this hour");

/// The budget of a session. What has no bound is not bounded.
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

/// Whether something may be spent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is within the budget.
    Allowed,
    /// The budget is spent until somebody lifts it.
    Spent {
        /// The reason, for people.
        why: String,
    },
    /// The wakes of this hour are used up.
    Hold {
        /// The reason, for people.
        why: String,
        /// The end of the hour.
        until: Timestamp,
    },
}

impl Budgets {
    /// Whether nothing is bounded.
    pub fn are_off(&self) -> bool {
        *self == Budgets::default()
    }

    /// Whether only wakes are bounded.
    pub(crate) fn bound_wakes_only(&self) -> bool {
        [self.per_hour, self.in_total].iter().all(|bounds| bounds.turns.is_none() && bounds.tokens.is_none())
    }

    /// Whether a bound concerns any of these amounts. That of tokens concerns questions too: their tokens are counted
    /// only after they were asked.
    pub(crate) fn count(&self, amounts: &Amounts) -> bool {
        [self.per_hour, self.in_total].iter().any(|bounds| {
            (bounds.turns.is_some() && amounts.turns > 0)
                || (bounds.tokens.is_some() && (amounts.tokens > 0 || amounts.turns > 0))
                || (bounds.wakes.is_some() && amounts.wakes > 0)
        })
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

    /// Counts what is spent, and says whether it is within the budget. Tokens are known only after they were spent,
    /// so they count against the next question.
    pub(crate) fn spend(&mut self, spent: Amounts, budgets: &Budgets, now: Timestamp) -> Verdict {
        self.pass_time(now);
        for amounts in [&mut self.hour, &mut self.total] {
            amounts.turns = amounts.turns.saturating_add(spent.turns);
            amounts.tokens = amounts.tokens.saturating_add(spent.tokens);
            amounts.wakes = amounts.wakes.saturating_add(spent.wakes);
        }
        let total = budgets.in_total.passed(&self.total).map(|(name, bound)| (name, bound, "in total"));
        let hour = budgets.per_hour.passed(&self.hour).map(|(name, bound)| (name, bound, "in this hour"));
        // A question that is no wake is not held back by the number of wakes.
        let concerns = |name: &str| name != "wakes" || spent.wakes > 0;
        let mut passed: Vec<_> = total.chain(hour).filter(|(name, ..)| concerns(name)).collect();
        // The hour's wakes come last: whatever else was passed lasts longer.
        passed.sort_by_key(|(name, _, when)| (*name, *when) == HOURLY_WAKES);
        match passed.first() {
            None => Verdict::Allowed,
            Some((name, bound, when)) if (*name, *when) == HOURLY_WAKES => {
                let why = format!(
                    "this session has reached its limit of {bound} wakes per hour; it continues by itself when the hour \
                     is over, or when it is resumed"
                );
                // It is counted in total when it is really asked.
                self.total.turns -= spent.turns;
                self.total.wakes -= spent.wakes;
                Verdict::Hold { why, until: self.hour_began.plus(HOUR) }
            }
            Some((name, bound, when)) => Verdict::Spent {
                why: format!(
                    "the budget of this session is spent: {bound} {name} {when}; resume it for as many again"
                ),
            },
        }
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

    /// Whether a bound was passed.
    pub(crate) fn is_spent(&self, budgets: &Budgets) -> bool {
        budgets.per_hour.passed(&self.hour).chain(budgets.in_total.passed(&self.total)).next().is_some()
    }

    /// Whether another wake would have to wait for the next hour.
    pub(crate) fn holds_wakes(mut self, budgets: &Budgets, now: Timestamp) -> bool {
        let wake = Amounts { turns: 1, tokens: 0, wakes: 1 };
        matches!(self.spend(wake, budgets, now), Verdict::Hold { .. })
    }

    fn pass_time(&mut self, now: Timestamp) {
        // A clock that was set back must not make an hour longer.
        if now < self.hour_began || now.since(self.hour_began) >= HOUR {
            (self.hour_began, self.hour) = (now, Amounts::default());
        }
    }
}

impl Stepping<'_> {
    /// Whether the session's budget is spent.
    pub(crate) fn is_budget_spent(&self) -> bool {
        self.facts.spending.is_some_and(|spending| spending.is_spent(&self.limits.budgets))
    }

    /// Whether held input has to wait for the next hour. People's own work does not wait for it.
    pub(crate) fn held_must_wait(&self) -> bool {
        let held = &self.head.held;
        let holds = |spending: Spending| spending.holds_wakes(&self.limits.budgets, self.now);
        !held.is_empty() && !held.user && self.facts.spending.is_some_and(holds)
    }

    /// Allows the session as much again of what it has spent.
    pub(crate) fn lift_budget(&mut self) {
        let budgets = self.limits.budgets;
        if let Some(spending) = &mut self.facts.spending {
            spending.lift(&budgets);
            self.mark_spent();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURN: Amounts = Amounts { turns: 1, tokens: 0, wakes: 0 };
    const WAKE: Amounts = Amounts { turns: 1, tokens: 0, wakes: 1 };
    const TOKENS: Amounts = Amounts { turns: 0, tokens: 10, wakes: 0 };

    fn at(minutes: i64) -> Timestamp {
        Timestamp(minutes * 60_000)
    }

    fn per_hour(bounds: Bounds) -> Budgets {
        Budgets { per_hour: bounds, ..Budgets::default() }
    }

    fn in_total(bounds: Bounds) -> Budgets {
        Budgets { in_total: bounds, ..Budgets::default() }
    }

    fn spent(what: &str) -> Verdict {
        let why = format!("the budget of this session is spent: {what}; resume it for as many again");
        Verdict::Spent { why }
    }

    #[test]
    fn an_hour_is_over_after_an_hour() {
        let budgets = per_hour(Bounds { turns: Some(2), ..Bounds::default() });
        let mut spending = Spending::new(at(0));
        for (minute, expected) in [
            (10, Verdict::Allowed),
            (10, Verdict::Allowed),
            (20, spent("2 turns in this hour")),
            (59, spent("2 turns in this hour")),
            (60, Verdict::Allowed),
        ] {
            assert_eq!(spending.spend(TURN, &budgets, at(minute)), expected, "minute {minute}");
        }
    }

    #[test]
    fn a_clock_that_is_set_back_begins_a_new_hour() {
        let budgets = per_hour(Bounds { turns: Some(1), ..Bounds::default() });
        let mut spending = Spending::new(at(1000));
        for (minute, allowed) in [(1000, true), (1001, false), (10, true), (69, false), (70, true)] {
            let verdict = spending.spend(TURN, &budgets, at(minute));
            assert_eq!(verdict == Verdict::Allowed, allowed, "minute {minute}: {verdict:?}");
        }
    }

    #[test]
    fn what_is_lifted_lasts_as_long_again() {
        let budgets = in_total(Bounds { tokens: Some(25), ..Bounds::default() });
        let mut spending = Spending::new(at(0));
        for _ in 0..2 {
            for hour in 0..3 {
                assert_eq!(spending.spend(TURN, &budgets, at(hour * 100)), Verdict::Allowed);
                spending.spend(TOKENS, &budgets, at(hour * 100));
            }
            assert_eq!(spending.spend(TURN, &budgets, at(1000)), spent("25 tokens in total"));
            spending.lift(&budgets);
        }
        // Amounts that were not passed are not reset.
        assert_eq!((spending.total.turns, spending.total.tokens), (8, 0));
    }

    #[test]
    fn tokens_alone_count_against_the_next_question() {
        let budgets = in_total(Bounds { tokens: Some(5), ..Bounds::default() });
        assert!(budgets.count(&TOKENS) && budgets.count(&TURN));
    }

    #[test]
    fn a_question_that_is_no_wake_is_not_held_for_wakes() {
        let bounds = Bounds { turns: Some(100), wakes: Some(1), ..Bounds::default() };
        let mut spending = Spending::new(at(0));
        assert_eq!(spending.spend(WAKE, &per_hour(bounds), at(1)), Verdict::Allowed);
        let held = spending.spend(WAKE, &per_hour(bounds), at(2));
        assert!(matches!(held, Verdict::Hold { until, .. } if until == at(60)), "{held:?}");
        assert_eq!(spending.spend(TURN, &per_hour(bounds), at(3)), Verdict::Allowed);
        assert_eq!(spending.spend(TURN, &in_total(bounds), at(3)), Verdict::Allowed);
        assert_eq!(spending.spend(WAKE, &in_total(bounds), at(3)), spent("1 wakes in total"));
    }

    #[test]
    fn a_wake_that_is_held_counts_in_total_when_it_is_asked() {
        let budgets = per_hour(Bounds { wakes: Some(1), ..Bounds::default() });
        let mut spending = Spending::new(at(0));
        spending.spend(WAKE, &budgets, at(1));
        assert!(matches!(spending.spend(WAKE, &budgets, at(2)), Verdict::Hold { .. }));
        assert_eq!((spending.total, spending.is_spent(&budgets)), (WAKE, true));
    }

    /// Whatever else was passed lasts longer than the hour.
    #[test]
    fn wakes_of_the_hour_are_named_last() {
        let wakes = Bounds { wakes: Some(0), ..Bounds::default() };
        let budgets = Budgets { per_hour: wakes, in_total: Bounds { turns: Some(0), ..Bounds::default() } };
        assert_eq!(Spending::new(at(0)).spend(WAKE, &budgets, at(0)), spent("0 turns in total"));
    }

    #[test]
    fn nothing_is_bounded_unless_it_is_configured() {
        let most = Amounts { turns: u64::MAX, tokens: u64::MAX, wakes: u64::MAX };
        let mut spending = Spending::new(at(0));
        for _ in 0..2 {
            assert_eq!(spending.spend(most, &Budgets::default(), at(0)), Verdict::Allowed);
        }
        assert!(Budgets::default().are_off());
    }
}
