//! The clock of an engine: the system clock, or the clock of a test.

use std::time::SystemTime;

use rap_protocol::Timestamp;
use tokio::time::Instant;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Clock {
    System,
    /// Advances with tokio's clock, which a test can pause.
    Virtual {
        from: Timestamp,
        since: Instant,
    },
}

impl Clock {
    pub(crate) fn virtual_from_now() -> Self {
        Clock::Virtual { from: SystemTime::now().into(), since: Instant::now() }
    }

    pub(crate) fn is_virtual(self) -> bool {
        matches!(self, Clock::Virtual { .. })
    }

    pub(crate) fn now(self) -> Timestamp {
        match self {
            Clock::System => SystemTime::now().into(),
            Clock::Virtual { from, since } => from.plus(since.elapsed()),
        }
    }
}
