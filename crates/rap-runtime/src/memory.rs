//! Resources that several users share. What one of them can use is bounded, so that it cannot keep the others out.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Amounts in use, by user of the resource.
pub(crate) struct Shares<K> {
    used: Mutex<HashMap<K, usize>>,
    each: usize,
}

/// Part of a share, which is given back when it is dropped.
pub(crate) struct Share<K: Eq + Hash> {
    shares: Arc<Shares<K>>,
    key: K,
    amount: usize,
}

impl<K: Eq + Hash + Clone> Shares<K> {
    pub(crate) fn new(each: usize) -> Arc<Self> {
        Arc::new(Shares { used: Mutex::default(), each })
    }

    fn used(&self) -> MutexGuard<'_, HashMap<K, usize>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `None` if that is more than is left of the share.
    pub(crate) fn take(self: &Arc<Self>, key: K, amount: usize) -> Option<Share<K>> {
        let mut all = self.used();
        let used = all.get(&key).copied().unwrap_or_default() + amount;
        if used > self.each {
            return None;
        }
        all.insert(key.clone(), used);
        Some(Share { shares: Arc::clone(self), key, amount })
    }
}

impl<K: Eq + Hash> Share<K> {
    /// Gives back all but this amount.
    fn shrink(&mut self, amount: usize) {
        let mut all = self.shares.used.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(used) = all.get_mut(&self.key) {
            *used -= self.amount.saturating_sub(amount);
            if *used == 0 {
                all.remove(&self.key);
            }
        }
        self.amount = self.amount.min(amount);
    }

    /// Adds another part of the same share.
    fn merge(&mut self, mut other: Self) {
        self.amount += std::mem::take(&mut other.amount);
    }
}

impl<K: Eq + Hash> Drop for Share<K> {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

/// Memory for large values of several users, in bytes.
pub(crate) struct Memory<K> {
    all: Arc<Semaphore>,
    shares: Arc<Shares<K>>,
}

/// Part of a memory, which is given back when it is dropped.
pub(crate) struct Grant<K: Eq + Hash> {
    permit: OwnedSemaphorePermit,
    share: Share<K>,
}

/// Too much of a memory, or of the user's share of it, is in use.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NoMemory;

impl<K: Eq + Hash + Clone> Memory<K> {
    /// Creates a memory of `all` bytes, of which each user can have `each`.
    pub(crate) fn new(all: usize, each: usize) -> Memory<K> {
        Memory { all: Arc::new(Semaphore::new(all.min(Semaphore::MAX_PERMITS))), shares: Shares::new(each) }
    }

    /// Takes this many bytes, without waiting.
    pub(crate) fn take(&self, key: K, bytes: usize) -> Result<Grant<K>, NoMemory> {
        let share = self.shares.take(key, bytes).ok_or(NoMemory)?;
        let bytes = u32::try_from(bytes).map_err(|_| NoMemory)?;
        let permit = Arc::clone(&self.all).try_acquire_many_owned(bytes).map_err(|_| NoMemory)?;
        Ok(Grant { permit, share })
    }

    #[cfg(test)]
    pub(crate) fn left(&self) -> usize {
        self.all.available_permits()
    }

    #[cfg(test)]
    pub(crate) fn used_by(&self, key: &K) -> usize {
        self.shares.used().get(key).copied().unwrap_or_default()
    }
}

impl<K: Eq + Hash> Grant<K> {
    pub(crate) fn bytes(&self) -> usize {
        self.share.amount
    }

    /// Gives back all but this many bytes.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        drop(self.permit.split(self.bytes().saturating_sub(bytes)));
        self.share.shrink(bytes);
    }

    /// Adds another part of the same memory, of the same user.
    pub(crate) fn merge(&mut self, more: Grant<K>) {
        self.permit.merge(more.permit);
        self.share.merge(more.share);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_bounded_and_given_back() {
        let shares = Shares::new(3);
        let (two, _one) = (shares.take("a", 2).unwrap(), shares.take("a", 1).unwrap());
        assert!(shares.take("a", 1).is_none());
        assert!(shares.take("b", 3).is_some());
        drop(two);
        assert!(shares.take("a", 2).is_some());
        drop(_one);
        assert!(shares.used().is_empty());
    }

    #[test]
    fn a_user_of_a_memory_leaves_some_to_others() {
        let memory = Memory::new(10, 6);
        let mut first = memory.take("a", 4).unwrap();
        assert_eq!(memory.take("a", 3).err(), Some(NoMemory), "more than its share");
        first.merge(memory.take("a", 2).unwrap());
        let second = memory.take("b", 4).unwrap();
        assert_eq!(memory.take("c", 1).err(), Some(NoMemory), "all is in use");
        assert_eq!(memory.used_by(&"c"), 0);
        first.shrink(1);
        assert_eq!((first.bytes(), memory.left()), (1, 5));
        drop((first, second));
        assert_eq!((memory.left(), memory.used_by(&"a")), (10, 0));
    }
}
