//! A gate holds an answer back until a probe lets it go, or until it has been held long enough.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

/// A gate. Clones are the same gate.
#[derive(Debug, Clone)]
pub(crate) struct Gate {
    open: Arc<watch::Sender<bool>>,
    longest: Duration,
}

impl Gate {
    /// A closed gate that opens by itself after a time.
    pub(crate) fn closed(longest: Duration) -> Gate {
        Gate { open: Arc::new(watch::Sender::new(false)), longest }
    }

    pub(crate) fn open(&self) {
        self.open.send_replace(true);
    }

    /// Waits at the gate.
    pub(crate) async fn passed(&self) {
        let mut open = self.open.subscribe();
        // Whether it was opened or has opened by itself: the way is free.
        tokio::time::timeout(self.longest, open.wait_for(|open| *open)).await.ok();
        self.open();
    }
}
