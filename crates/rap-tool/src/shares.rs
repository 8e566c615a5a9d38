//! Slots that the callers of a server share.
//!
//! A quarter of the slots is reserved: it is divided equally, and each part can be used only by its own caller. The
//! other slots are free for everyone. So a caller always finds the slots of its own part, whatever the others do, and a
//! single caller can use all slots. A caller whose token was removed has no part of its own.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rap_io::body::BodyMemory;

use crate::auth::Caller;

/// One of this many slots is divided among the callers.
const DIVIDED_PART: usize = 4;

/// The slots of one kind, and their use.
#[derive(Debug)]
pub(crate) struct Slots {
    callers: Arc<HashSet<Caller>>,
    /// Number of slots that only one caller can use, for each caller.
    own: usize,
    common: usize,
    common_used: usize,
    /// Number of slots that each caller holds. Callers without a slot are missing.
    held: HashMap<Caller, usize>,
}

impl Slots {
    pub(crate) fn new(all: usize, callers: &Arc<HashSet<Caller>>) -> Self {
        let number = callers.len().max(1);
        let own = (all / DIVIDED_PART / number).max(1).min(all / number);
        let callers = Arc::clone(callers);
        Slots { callers, own, common: all - own * number, common_used: 0, held: HashMap::new() }
    }

    pub(crate) fn used(&self) -> usize {
        self.held.values().sum()
    }

    /// Returns true if a slot is free for this caller.
    pub(crate) fn admits(&self, caller: &Caller) -> bool {
        self.common_used < self.common || self.held_by(caller) < self.own_of(caller)
    }

    /// Takes a slot. Returns false if none is free for this caller.
    pub(crate) fn take(&mut self, caller: &Caller) -> bool {
        self.take_many(caller, 1)
    }

    /// Takes slots. Returns false, and takes none, if fewer are free for this caller.
    fn take_many(&mut self, caller: &Caller, count: usize) -> bool {
        let left = self.own_of(caller).saturating_sub(self.held_by(caller));
        let from_common = count.saturating_sub(left);
        if from_common > self.common - self.common_used {
            return false;
        }
        self.common_used += from_common;
        *self.held.entry(caller.clone()).or_default() += count;
        true
    }

    /// Gives back a slot.
    pub(crate) fn release(&mut self, caller: &Caller) {
        self.release_many(caller, 1);
    }

    fn release_many(&mut self, caller: &Caller, count: usize) {
        let own = self.own_of(caller);
        let Some(held) = self.held.get_mut(caller) else { return };
        self.common_used -= held.saturating_sub(own).min(count);
        *held -= count;
        if *held == 0 {
            self.held.remove(caller);
        }
    }

    fn held_by(&self, caller: &Caller) -> usize {
        self.held.get(caller).copied().unwrap_or_default()
    }

    fn own_of(&self, caller: &Caller) -> usize {
        if self.callers.contains(caller) { self.own } else { 0 }
    }
}

/// Slots that are taken as permits.
#[derive(Debug, Clone)]
pub(crate) struct Pool(Arc<Mutex<Slots>>);

/// Slots of a [`Pool`], which are free again when it is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    pool: Pool,
    caller: Caller,
    count: usize,
}

impl Pool {
    pub(crate) fn new(all: usize, callers: &Arc<HashSet<Caller>>) -> Self {
        Pool(Arc::new(Mutex::new(Slots::new(all, callers))))
    }

    /// Takes a slot. Returns `None` if none is free for this caller.
    pub(crate) fn take(&self, caller: &Caller) -> Option<Permit> {
        self.take_many(caller, 1)
    }

    /// Takes slots. Returns `None` if fewer are free for this caller.
    pub(crate) fn take_many(&self, caller: &Caller, count: usize) -> Option<Permit> {
        let taken = self.slots().take_many(caller, count);
        taken.then(|| Permit { pool: self.clone(), caller: caller.clone(), count })
    }

    pub(crate) fn used(&self) -> usize {
        self.slots().used()
    }

    /// Ignores poisoning: no code under the lock can leave the slots inconsistent.
    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.pool.slots().release_many(&self.caller, self.count);
    }
}

/// Memory for request bodies.
#[derive(Debug)]
pub(crate) struct Memory {
    common: BodyMemory,
    callers: HashMap<Caller, BodyMemory>,
}

impl Memory {
    pub(crate) fn new(bytes: usize, callers: &HashSet<Caller>) -> Self {
        // A single caller may use all of it, so none has to be set aside.
        let own = if callers.len() > 1 { bytes / DIVIDED_PART / callers.len() } else { 0 };
        let common = BodyMemory::new(bytes - own * callers.len());
        let callers = callers.iter().map(|caller| (caller.clone(), common.with_own(own))).collect();
        Memory { common, callers }
    }

    /// Returns the memory for a body of this caller, or of a sender that need not authenticate.
    pub(crate) fn of(&self, caller: Option<&Caller>) -> &BodyMemory {
        caller.and_then(|caller| self.callers.get(caller)).unwrap_or(&self.common)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(number: u8) -> Caller {
        Caller::from_bytes([number; 16])
    }

    fn pool(all: usize, callers: u8) -> Pool {
        Pool::new(all, &Arc::new((0..callers).map(caller).collect()))
    }

    /// Takes all slots that a caller can get.
    fn take_all(pool: &Pool, number: u8) -> Vec<Permit> {
        std::iter::from_fn(|| pool.take(&caller(number))).collect()
    }

    #[test]
    fn one_caller_may_use_all_slots() {
        for all in [1, 2, 3, 10, 1_000] {
            assert_eq!(take_all(&pool(all, 1), 0).len(), all);
        }
        assert!(pool(0, 1).take(&caller(0)).is_none());
    }

    #[test]
    fn every_caller_finds_room_whatever_the_others_hold() {
        for (all, callers, own) in [(100, 2, 12), (100, 10, 2), (8, 3, 1), (3, 3, 1)] {
            let pool = pool(all, callers);
            let held: Vec<Vec<Permit>> = (0..callers).map(|number| take_all(&pool, number)).collect();
            let sizes: Vec<usize> = held.iter().map(Vec::len).collect();
            assert_eq!(sizes[0], all - own * (usize::from(callers) - 1), "{all} {callers}");
            assert!(sizes[1..].iter().all(|size| *size == own), "{all} {callers}: {sizes:?}");
            assert_eq!(pool.used(), all);
        }
    }

    #[test]
    fn a_slot_that_is_given_back_can_be_taken_again() {
        let pool = pool(16, 2);
        let (mut first, second) = (take_all(&pool, 0), take_all(&pool, 1));
        assert_eq!((first.len(), second.len()), (14, 2));
        // Common slots are free for everyone, those of a caller's own part only for it.
        first.truncate(10);
        let more = take_all(&pool, 1);
        assert_eq!(more.len(), 4);
        drop((first, more, second));
        assert_eq!(pool.used(), 0);
        assert_eq!(take_all(&pool, 1).len(), 14);
    }

    #[test]
    fn several_slots_are_taken_and_given_back_together() {
        let pool = pool(16, 2);
        let first = pool.take_many(&caller(0), 12).unwrap();
        assert!(pool.take_many(&caller(0), 3).is_none(), "14 are for the first caller");
        assert_eq!(pool.used(), 12, "nothing is taken in part");
        let second = pool.take_many(&caller(1), 4).unwrap();
        assert!(pool.take(&caller(0)).is_none());
        drop(first);
        assert_eq!(pool.used(), 4);
        drop(second);
        assert_eq!(take_all(&pool, 0).len(), 14);
    }

    #[test]
    fn a_caller_without_a_token_uses_only_common_slots() {
        let pool = pool(16, 2);
        let stranger = take_all(&pool, 9);
        assert_eq!(stranger.len(), 12);
        assert_eq!(take_all(&pool, 0).len(), 2);
        drop(stranger);
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn there_may_be_more_callers_than_slots() {
        let pool = pool(2, 5);
        assert_eq!(take_all(&pool, 3).len(), 2);
    }
}
