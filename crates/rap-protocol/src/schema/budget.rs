//! Steps that a validation may take.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::limits;

/// Number of steps between two checks of the flag that stops a validation.
const STEPS_PER_POLL: u64 = 10_000;

/// Steps that validations may take, and optionally a flag that stops them.
#[derive(Debug, Clone)]
pub struct Budget {
    left: u64,
    /// The flag is read when fewer steps than this are left.
    poll_below: u64,
    stop: Option<Arc<AtomicBool>>,
}

/// Reason why a validation ended without a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// The steps of the budget are spent.
    Spent,
    /// Someone set the flag.
    Flag,
    /// Subschemas are nested deeper than [`limits::VALIDATION_DEPTH`].
    TooDeep,
    /// Enough violations are known.
    Enough,
}

impl Budget {
    /// Creates a budget of a number of steps.
    pub fn new(steps: u64) -> Self {
        Budget { left: steps, poll_below: steps.saturating_sub(STEPS_PER_POLL), stop: None }
    }

    /// Creates a budget of [`limits::VALIDATION_STEPS`] that ends early when `stop` becomes true.
    pub fn stopped_by(stop: Arc<AtomicBool>) -> Self {
        Budget { stop: Some(stop), ..Budget::new(limits::VALIDATION_STEPS) }
    }

    /// Returns the number of steps that are left.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Returns another budget with the same flag.
    pub(super) fn again(&self, steps: u64) -> Self {
        Budget { stop: self.stop.clone(), ..Budget::new(steps) }
    }

    pub(super) fn spend(&mut self, steps: u64) -> Result<(), Stop> {
        let Some(left) = self.left.checked_sub(steps) else {
            self.left = 0;
            return Err(Stop::Spent);
        };
        self.left = left;
        if left < self.poll_below {
            self.poll_below = left.saturating_sub(STEPS_PER_POLL);
            if self.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                return Err(Stop::Flag);
            }
        }
        Ok(())
    }
}

impl Default for Budget {
    fn default() -> Self {
        Budget::new(limits::VALIDATION_STEPS)
    }
}
