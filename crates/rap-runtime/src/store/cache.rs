//! Heads that were used lately, so that a busy thread is not read again for each message.
//!
//! Only the writer's thread uses it. A head is taken out before a step and put back when everything the step writes
//! was written; if the batch is lost afterwards, all of them are dropped.

use std::collections::HashMap;
use std::sync::Arc;

use rap_agent::Head;
use rap_protocol::ThreadId;

use super::thread::{Thread, ThreadNo};

/// How many heads are remembered.
const HEADS: usize = 1024;

/// A thread as it stands in the database.
pub(crate) struct Loaded {
    pub(crate) thread: Arc<Thread>,
    pub(crate) head: Head,
    pub(crate) version: i64,
}

#[derive(Default)]
pub(super) struct Cache {
    heads: HashMap<ThreadNo, Loaded>,
    by_id: HashMap<ThreadId, ThreadNo>,
}

impl Cache {
    pub(super) fn take(&mut self, no: ThreadNo) -> Option<Loaded> {
        self.heads.remove(&no)
    }

    pub(super) fn no(&self, id: &ThreadId) -> Option<ThreadNo> {
        self.by_id.get(id).copied()
    }

    pub(super) fn put(&mut self, loaded: Loaded) {
        if self.by_id.len() >= HEADS && !self.by_id.contains_key(&loaded.thread.id) {
            self.forget_some();
        }
        self.by_id.insert(loaded.thread.id.clone(), loaded.thread.no);
        self.heads.insert(loaded.thread.no, loaded);
    }

    /// Half of them go, whichever; those in use come back at their next message.
    fn forget_some(&mut self) {
        let keep = HEADS / 2;
        let mut left = keep;
        self.heads.retain(|_, _| {
            left = left.saturating_sub(1);
            left > 0
        });
        let heads = &self.heads;
        self.by_id.retain(|_, no| heads.contains_key(no));
    }

    pub(super) fn clear(&mut self) {
        self.heads.clear();
        self.by_id.clear();
    }
}
