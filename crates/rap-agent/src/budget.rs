//! Budgets: limits on the turns, tokens and wakes of a session. A session is a root thread with all its descendants.

use std::time::Duration;

use rap_protocol::Timestamp;
use serde::{Deserialize, Serialize};

use crate::head::LONGEST_PAUSE;
use crate::step::StepBuilder;

const HOUR: Duration = LONGEST_PAUSE;
const HOURLY_WAKES: (&str, &str) = ("wakes", "in this hour");

/// Budget of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Budgets {
    /// Limits per hour.
    pub per_hour: Bounds,
    /// Limits for the whole session.
    pub in_total: Bounds,
}

/// Limits of one period. `None` means unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bounds {
    /// Number of requests to the model.
    pub turns: Option<u64>,
    /// Number of input and output tokens.
    pub tokens: Option<u64>,
    /// Number of turns that were not started by a user or by the results of a batch, but by an event, a late result, a
    /// timer or a message from another thread.
    pub wakes: Option<u64>,
}

/// Amounts that were spent in one period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Amounts {
    /// Number of requests to the model.
    pub turns: u64,
    /// Number of input and output tokens.
    pub tokens: u64,
    /// Number of turns that were not started by a user or by the results of a batch, but by an event, a late result, a
    /// timer or a message from another thread.
    pub wakes: u64,
}

/// Amounts that a session has spent since its budget was last renewed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spending {
    /// Start of the current hour.
    pub hour_began: Timestamp,
    /// Amounts in the current hour.
    pub hour: Amounts,
    /// Amounts in total.
    pub total: Amounts,
}

/// Result of a budget check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    Allowed,
    /// The budget is exceeded until the user renews it.
    Spent {
        /// Reason that is shown to the user.
        why: String,
    },
    /// The hourly limit of wakes is reached.
    Hold {
        /// Reason that is shown to the user.
        why: String,
        /// End of the hour.
        until: Timestamp,
    },
}

impl Budgets {
    /// Returns whether the budget has no limits.
    pub fn are_unlimited(&self) -> bool {
        *self == Budgets::default()
    }

    /// Returns whether no turns and no tokens are limited.
    pub fn limit_only_wakes(&self) -> bool {
        [self.per_hour, self.in_total].iter().all(|bounds| bounds.turns.is_none() && bounds.tokens.is_none())
    }

    /// Returns whether any limit applies to these amounts. A limit of tokens applies to turns too, because the tokens
    /// of a turn are counted only after it.
    pub(crate) fn apply_to(&self, amounts: &Amounts) -> bool {
        [self.per_hour, self.in_total].iter().any(|bounds| {
            (bounds.turns.is_some() && amounts.turns > 0)
                || (bounds.tokens.is_some() && (amounts.tokens > 0 || amounts.turns > 0))
                || (bounds.wakes.is_some() && amounts.wakes > 0)
        })
    }
}

impl Bounds {
    /// Returns the name and value of every limit that is exceeded.
    fn exceeded(&self, spent: &Amounts) -> impl Iterator<Item = (&'static str, u64)> {
        let all = [
            ("turns", self.turns, spent.turns),
            ("tokens", self.tokens, spent.tokens),
            ("wakes", self.wakes, spent.wakes),
        ];
        all.into_iter().filter_map(|(name, bound, spent)| Some((name, bound.filter(|bound| spent > *bound)?)))
    }
}

impl Spending {
    /// Returns the state of a session that has spent nothing.
    pub fn new(now: Timestamp) -> Spending {
        Spending { hour_began: now, hour: Amounts::default(), total: Amounts::default() }
    }

    /// Counts amounts, and returns whether they are within the budget. The tokens of a turn are known only after it, so
    /// they count against the next turn.
    pub(crate) fn spend(&mut self, spent: Amounts, budgets: &Budgets, now: Timestamp) -> Verdict {
        self.roll_hour(now);
        for amounts in [&mut self.hour, &mut self.total] {
            amounts.turns = amounts.turns.saturating_add(spent.turns);
            amounts.tokens = amounts.tokens.saturating_add(spent.tokens);
            amounts.wakes = amounts.wakes.saturating_add(spent.wakes);
        }
        let total = budgets.in_total.exceeded(&self.total).map(|(name, bound)| (name, bound, "in total"));
        let hour = budgets.per_hour.exceeded(&self.hour).map(|(name, bound)| (name, bound, "in this hour"));
        // The limit of wakes does not apply to turns that are not wakes.
        let applies = |name: &str| name != "wakes" || spent.wakes > 0;
        let mut exceeded: Vec<_> = total.chain(hour).filter(|(name, ..)| applies(name)).collect();
        // The hourly limit of wakes comes last: any other exceeded limit lasts longer.
        exceeded.sort_by_key(|(name, _, when)| (*name, *when) == HOURLY_WAKES);
        match exceeded.first() {
            None => Verdict::Allowed,
            Some((name, bound, when)) if (*name, *when) == HOURLY_WAKES => {
                let why = format!(
                    "this session has reached its limit of {bound} wakes per hour; it continues automatically when the \
                     hour is over, or when it is resumed"
                );
                // The turn counts only when it starts. The wake stays in the hour's count, so that resuming the session
                // resets it.
                self.hour.turns -= spent.turns;
                self.total.turns -= spent.turns;
                self.total.wakes -= spent.wakes;
                Verdict::Hold { why, until: self.hour_began.plus(HOUR) }
            }
            Some((name, bound, when)) => Verdict::Spent {
                why: format!(
                    "this session has used its budget of {bound} {} {when}; resuming it renews the budget",
                    if *bound == 1 { &name[..name.len() - 1] } else { name }
                ),
            },
        }
    }

    /// Resets the amounts whose limits are exceeded, so that the session may spend as much again.
    pub fn reset_exceeded(&mut self, budgets: &Budgets) {
        for (bounds, amounts) in [(budgets.per_hour, &mut self.hour), (budgets.in_total, &mut self.total)] {
            let exceeded: Vec<&str> = bounds.exceeded(amounts).map(|(name, _)| name).collect();
            for name in exceeded {
                match name {
                    "turns" => amounts.turns = 0,
                    "tokens" => amounts.tokens = 0,
                    _ => amounts.wakes = 0,
                }
            }
        }
    }

    /// Returns whether any limit is exceeded.
    pub(crate) fn is_exceeded(&self, budgets: &Budgets) -> bool {
        budgets.per_hour.exceeded(&self.hour).chain(budgets.in_total.exceeded(&self.total)).next().is_some()
    }

    /// Returns whether another wake would have to wait until the next hour.
    pub(crate) fn holds_wakes(mut self, budgets: &Budgets, now: Timestamp) -> bool {
        let wake = Amounts { turns: 1, tokens: 0, wakes: 1 };
        matches!(self.spend(wake, budgets, now), Verdict::Hold { .. })
    }

    /// Starts a new hour if the current one is over.
    fn roll_hour(&mut self, now: Timestamp) {
        // If the clock was set back, a new hour starts. Otherwise the hour would become longer.
        if now < self.hour_began || now.since(self.hour_began) >= HOUR {
            (self.hour_began, self.hour) = (now, Amounts::default());
        }
    }
}

impl StepBuilder<'_> {
    /// Returns whether the session's budget is exceeded.
    pub(crate) fn is_budget_exceeded(&self) -> bool {
        self.facts.spending.is_some_and(|spending| spending.is_exceeded(&self.limits.budgets))
    }

    /// Returns whether held input has to wait until the next hour. Held user messages never have to.
    pub(crate) fn held_must_wait(&self) -> bool {
        let held = &self.head.held;
        let holds = |spending: Spending| spending.holds_wakes(&self.limits.budgets, self.now);
        !held.is_empty() && !held.user && self.facts.spending.is_some_and(holds)
    }

    /// Renews the session's budget, so that it may spend as much again.
    pub(crate) fn renew_budget(&mut self) {
        let budgets = self.limits.budgets;
        if let Some(spending) = &mut self.facts.spending {
            spending.reset_exceeded(&budgets);
            self.mark_spending_changed();
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
        let why = format!("this session has used its budget of {what}; resuming it renews the budget");
        Verdict::Spent { why }
    }

    #[test]
    fn an_hourly_limit_is_reset_after_an_hour() {
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
    fn a_turn_that_is_held_does_not_count_against_the_limit_of_turns() {
        let budgets = per_hour(Bounds { turns: Some(3), wakes: Some(1), ..Bounds::default() });
        let mut spending = Spending::new(at(0));
        assert_eq!(spending.spend(WAKE, &budgets, at(1)), Verdict::Allowed);
        for _ in 0..5 {
            let verdict = spending.spend(WAKE, &budgets, at(2));
            assert!(matches!(verdict, Verdict::Hold { .. }), "{verdict:?}");
        }
        let verdicts = [3, 4, 5].map(|minute| spending.spend(TURN, &budgets, at(minute)));
        assert_eq!(verdicts, [Verdict::Allowed, Verdict::Allowed, spent("3 turns in this hour")]);
    }

    #[test]
    fn a_new_hour_starts_when_the_clock_is_set_back() {
        let budgets = per_hour(Bounds { turns: Some(1), ..Bounds::default() });
        let mut spending = Spending::new(at(1000));
        for (minute, allowed) in [(1000, true), (1001, false), (10, true), (69, false), (70, true)] {
            let verdict = spending.spend(TURN, &budgets, at(minute));
            assert_eq!(verdict == Verdict::Allowed, allowed, "minute {minute}: {verdict:?}");
        }
    }

    #[test]
    fn a_renewed_budget_allows_the_same_amounts_again() {
        let budgets = in_total(Bounds { tokens: Some(25), ..Bounds::default() });
        let mut spending = Spending::new(at(0));
        for _ in 0..2 {
            for hour in 0..3 {
                assert_eq!(spending.spend(TURN, &budgets, at(hour * 100)), Verdict::Allowed);
                spending.spend(TOKENS, &budgets, at(hour * 100));
            }
            assert_eq!(spending.spend(TURN, &budgets, at(1000)), spent("25 tokens in total"));
            spending.reset_exceeded(&budgets);
        }
        // Amounts that were not exceeded are not reset.
        assert_eq!((spending.total.turns, spending.total.tokens), (8, 0));
    }

    #[test]
    fn a_token_limit_applies_to_turns_too() {
        let budgets = in_total(Bounds { tokens: Some(5), ..Bounds::default() });
        assert!(budgets.apply_to(&TOKENS) && budgets.apply_to(&TURN));
    }

    #[test]
    fn the_limit_of_wakes_does_not_apply_to_other_turns() {
        let bounds = Bounds { turns: Some(100), wakes: Some(1), ..Bounds::default() };
        let mut spending = Spending::new(at(0));
        assert_eq!(spending.spend(WAKE, &per_hour(bounds), at(1)), Verdict::Allowed);
        let held = spending.spend(WAKE, &per_hour(bounds), at(2));
        assert!(matches!(held, Verdict::Hold { until, .. } if until == at(60)), "{held:?}");
        assert_eq!(spending.spend(TURN, &per_hour(bounds), at(3)), Verdict::Allowed);
        assert_eq!(spending.spend(TURN, &in_total(bounds), at(3)), Verdict::Allowed);
        assert_eq!(spending.spend(WAKE, &in_total(bounds), at(3)), spent("1 wake in total"));
    }

    #[test]
    fn a_held_wake_does_not_count_in_the_total() {
        let budgets = per_hour(Bounds { wakes: Some(1), ..Bounds::default() });
        let mut spending = Spending::new(at(0));
        spending.spend(WAKE, &budgets, at(1));
        assert!(matches!(spending.spend(WAKE, &budgets, at(2)), Verdict::Hold { .. }));
        assert_eq!((spending.total, spending.is_exceeded(&budgets)), (WAKE, true));
    }

    #[test]
    fn an_exceeded_total_is_reported_before_the_hourly_wakes() {
        let wakes = Bounds { wakes: Some(0), ..Bounds::default() };
        let budgets = Budgets { per_hour: wakes, in_total: Bounds { turns: Some(0), ..Bounds::default() } };
        assert_eq!(Spending::new(at(0)).spend(WAKE, &budgets, at(0)), spent("0 turns in total"));
    }

    #[test]
    fn the_default_budget_has_no_limits() {
        let most = Amounts { turns: u64::MAX, tokens: u64::MAX, wakes: u64::MAX };
        let mut spending = Spending::new(at(0));
        for _ in 0..2 {
            assert_eq!(spending.spend(most, &Budgets::default(), at(0)), Verdict::Allowed);
        }
        assert!(Budgets::default().are_unlimited());
    }
}
