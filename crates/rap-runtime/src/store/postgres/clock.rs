//! A clock that follows the database's, so that nodes whose own clocks differ agree on due times.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use rap_protocol::Timestamp;

use crate::world::Clock;

/// The node's own clock, shifted by its difference from the database's.
pub(crate) struct DatabaseClock {
    own: Arc<dyn Clock>,
    /// The database's time minus the node's own, in milliseconds.
    ahead: AtomicI64,
}

impl DatabaseClock {
    /// Makes a clock from the node's own, and the time that the database has just told.
    pub(crate) fn new(own: Arc<dyn Clock>, now: Timestamp) -> DatabaseClock {
        let clock = DatabaseClock { own, ahead: AtomicI64::new(0) };
        clock.observe(now);
        clock
    }

    /// Takes the time that the database has just told.
    pub(super) fn observe(&self, now: Timestamp) {
        self.ahead.store(now.0 - self.own.now().0, Ordering::Relaxed);
    }
}

impl Clock for DatabaseClock {
    fn now(&self) -> Timestamp {
        Timestamp(self.own.now().0 + self.ahead.load(Ordering::Relaxed))
    }
}
