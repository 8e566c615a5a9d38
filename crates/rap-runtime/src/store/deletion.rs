//! Deletion of closed sessions.
//!
//! A session is marked first, which hides it and lasts over a restart. Its rows are then deleted in batches: first the
//! histories that forks inherit from it are copied into the forks, then its threads are deleted, children before their
//! parents.

use std::time::Duration;

use super::ThreadKey;

/// Maximum number of rows that one batch copies or deletes.
pub(crate) const BATCH_ROWS: usize = 500;
/// Number of root threads that one search for expired sessions looks at.
pub(crate) const EXAMINED: i64 = 1_000;
/// Pause before a session whose threads are not all closed yet is looked at again.
pub(crate) const RECHECK: Duration = Duration::from_secs(1);

/// Pause before a session is tried again whose rows could not be copied or deleted.
pub(crate) const RETRY: Duration = Duration::from_secs(60);
/// Time after the closing of its root after which a session with a damaged thread is deleted, even if not all of its threads
/// are closed: a damaged thread does not close, nor do those below it.
pub(crate) const DAMAGED_WAIT: Duration = Duration::from_secs(60);

/// Number of marked sessions that are left after a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remaining {
    None,
    /// Some that cannot be deleted yet, because their threads are being closed.
    Waiting,
    /// Some that the next batch can delete from.
    Some,
}

/// Action on sessions that were closed before a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expiry {
    Count,
    Delete,
}

/// Result of a search for expired sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Expired {
    /// Number of sessions that were found. Those that are marked already do not count.
    pub(crate) sessions: u64,
    /// Root thread after which the search continues. `None` if it has ended.
    pub(crate) next: Option<ThreadKey>,
}
