//! Holds a response back until a probe releases it, or until a maximum time has passed.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

/// Clones share the same state.
#[derive(Debug, Clone)]
pub(crate) struct Latch {
    released: Arc<watch::Sender<bool>>,
    max_wait: Duration,
}

impl Latch {
    pub(crate) fn new(max_wait: Duration) -> Latch {
        Latch { released: Arc::new(watch::Sender::new(false)), max_wait }
    }

    pub(crate) fn release(&self) {
        self.released.send_replace(true);
    }

    /// Waits until the latch is released, at most `max_wait`. After that it is released for everyone.
    pub(crate) async fn wait(&self) {
        let mut released = self.released.subscribe();
        tokio::time::timeout(self.max_wait, released.wait_for(|released| *released)).await.ok();
        self.release();
    }
}
