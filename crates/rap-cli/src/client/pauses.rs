//! Pauses between attempts.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(250);

/// Growing pauses: each is twice as long as the one before, up to [`Pauses::LONGEST`].
#[derive(Debug)]
pub struct Pauses {
    next: Duration,
}

impl Default for Pauses {
    fn default() -> Self {
        Pauses { next: FIRST }
    }
}

impl Pauses {
    /// Longest pause.
    pub const LONGEST: Duration = Duration::from_secs(5);

    /// Returns the next pause.
    pub fn take(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(Pauses::LONGEST);
        pause
    }

    /// Begins again with the shortest pause, because an attempt has succeeded.
    pub fn reset(&mut self) {
        *self = Pauses::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_bound_until_something_succeeds() {
        let mut pauses = Pauses::default();
        let taken: Vec<_> = (0..7).map(|_| pauses.take().as_millis()).collect();
        assert_eq!(taken, [250, 500, 1000, 2000, 4000, 5000, 5000]);
        pauses.reset();
        assert_eq!(pauses.take(), FIRST);
    }
}
