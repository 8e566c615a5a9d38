//! A cache of recently used heads, so that the head of a busy thread is not loaded again for each message.
//!
//! A head enters the cache after all writes of its step. If its batch is lost afterwards, the cache is cleared.

use std::collections::HashMap;

use rap_protocol::ThreadId;

use crate::store::{Loaded, ThreadKey};

/// Maximum number of heads.
const HEADS: usize = 1024;

#[derive(Default)]
pub(super) struct Cache {
    heads: HashMap<ThreadKey, Loaded>,
    by_id: HashMap<ThreadId, ThreadKey>,
}

impl Cache {
    pub(super) fn take(&mut self, key: ThreadKey) -> Option<Loaded> {
        self.heads.remove(&key)
    }

    pub(super) fn key(&self, id: &ThreadId) -> Option<ThreadKey> {
        self.by_id.get(id).copied()
    }

    pub(super) fn put(&mut self, loaded: Loaded) {
        if self.by_id.len() >= HEADS && !self.by_id.contains_key(&loaded.thread.id) {
            self.drop_half();
        }
        self.by_id.insert(loaded.thread.id.clone(), loaded.thread.key);
        self.heads.insert(loaded.thread.key, loaded);
    }

    /// Drops an arbitrary half of the heads. Threads in use are loaded again with their next message.
    fn drop_half(&mut self) {
        let keep = HEADS / 2;
        let mut left = keep;
        self.heads.retain(|_, _| {
            left = left.saturating_sub(1);
            left > 0
        });
        let heads = &self.heads;
        self.by_id.retain(|_, key| heads.contains_key(key));
    }

    pub(super) fn clear(&mut self) {
        self.heads.clear();
        self.by_id.clear();
    }
}
