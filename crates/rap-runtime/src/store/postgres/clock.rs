//! A clock that follows the database's, so that nodes whose own clocks differ agree on due times.

use std::sync::atomic::{AtomicI64, Ordering};

use rap_protocol::Timestamp;

use crate::world::{Clock, SystemClock};

/// The node's own clock, shifted by its difference from the database's.
#[derive(Default)]
pub(crate) struct DatabaseClock {
    /// The database's time minus the node's own, in milliseconds.
    ahead: AtomicI64,
}

impl DatabaseClock {
    /// Makes a clock that shows the time that the database has just told.
    pub(crate) fn at(now: Timestamp) -> DatabaseClock {
        let clock = DatabaseClock::default();
        clock.observe(now);
        clock
    }

    /// Takes the time that the database has just told.
    pub(super) fn observe(&self, now: Timestamp) {
        self.ahead.store(now.0 - SystemClock.now().0, Ordering::Relaxed);
    }
}

impl Clock for DatabaseClock {
    fn now(&self) -> Timestamp {
        Timestamp(SystemClock.now().0 + self.ahead.load(Ordering::Relaxed))
    }
}
