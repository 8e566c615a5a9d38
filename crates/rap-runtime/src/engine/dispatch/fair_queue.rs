//! A fair queue: sessions take turns, so that each waits for at most one item of every other session.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Queued items by session, bounded in total and per session.
pub(in crate::engine) struct FairQueue<S, T> {
    /// Sessions that have items, in the order of their turns.
    turns: VecDeque<S>,
    items: BTreeMap<S, VecDeque<T>>,
    known: BTreeSet<T>,
    bounds: Bounds,
}

/// Maximum number of items in a queue, in total and per session.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine) struct Bounds {
    pub(in crate::engine) items: usize,
    pub(in crate::engine) per_session: usize,
}

/// Result of a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum Pushed {
    /// The item is in the queue.
    Queued,
    /// The queue or the session's share is full. The item was not added.
    Full,
}

impl<S: Ord + Copy, T: Ord + Clone> FairQueue<S, T> {
    pub(in crate::engine) fn new(bounds: Bounds) -> Self {
        FairQueue { turns: VecDeque::new(), items: BTreeMap::new(), known: BTreeSet::new(), bounds }
    }

    pub(in crate::engine) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    pub(in crate::engine) fn has(&self, session: S) -> bool {
        self.items.contains_key(&session)
    }

    /// Appends an item to those of its session if there is room. An item that is already queued is not added again.
    pub(in crate::engine) fn push(&mut self, session: S, item: T) -> Pushed {
        if self.known.contains(&item) {
            return Pushed::Queued;
        }
        let of_session = self.items.get(&session).map_or(0, VecDeque::len);
        if self.known.len() >= self.bounds.items || of_session >= self.bounds.per_session {
            return Pushed::Full;
        }
        self.push_unbounded(session, item);
        Pushed::Queued
    }

    /// Like `push`, but ignores the bounds. The caller limits the number of items.
    pub(in crate::engine) fn push_unbounded(&mut self, session: S, item: T) {
        if !self.known.insert(item.clone()) {
            return;
        }
        let items = self.items.entry(session).or_default();
        if items.is_empty() {
            self.turns.push_back(session);
        }
        items.push_back(item);
    }

    pub(in crate::engine) fn len(&self) -> usize {
        self.known.len()
    }

    /// Returns the number of items of a session.
    pub(in crate::engine) fn count(&self, session: S) -> usize {
        self.items.get(&session).map_or(0, VecDeque::len)
    }

    /// Returns a session that has most items, and their number.
    pub(in crate::engine) fn longest(&self) -> Option<(S, usize)> {
        let lengths = self.items.iter().map(|(session, items)| (*session, items.len()));
        lengths.max_by_key(|(_, length)| *length)
    }

    /// Takes the newest item of a session.
    pub(in crate::engine) fn take_newest(&mut self, session: S) -> Option<T> {
        let items = self.items.get_mut(&session)?;
        let item = items.pop_back()?;
        if items.is_empty() {
            self.items.remove(&session);
            self.turns.retain(|other| *other != session);
        }
        self.known.remove(&item);
        Some(item)
    }

    /// Drops all items except the first of each session.
    pub(in crate::engine) fn keep_first(&mut self) {
        for items in self.items.values_mut() {
            for dropped in items.drain(1..) {
                self.known.remove(&dropped);
            }
        }
    }

    /// Takes the first item of the first session in turn that the condition allows. The others keep their turns.
    pub(in crate::engine) fn pop_if(&mut self, allowed: impl Fn(S) -> bool) -> Option<(S, T)> {
        let turn = self.turns.iter().position(|session| allowed(*session))?;
        let session = self.turns.remove(turn)?;
        let items = self.items.get_mut(&session)?;
        let item = items.pop_front()?;
        if items.is_empty() {
            self.items.remove(&session);
        } else {
            self.turns.push_back(session);
        }
        self.known.remove(&item);
        Some((session, item))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> FairQueue<u8, (u8, u32)> {
        FairQueue::new(Bounds { items: 8, per_session: 4 })
    }

    #[test]
    fn sessions_take_turns() {
        let mut queue = queue();
        for number in 0..3 {
            queue.push(1, (1, number));
        }
        queue.push(2, (2, 0));
        queue.push(3, (3, 0));
        queue.push(2, (2, 1));
        let order: Vec<(u8, u32)> =
            std::iter::from_fn(|| queue.pop_if(|_| true)).map(|(_, item)| item).collect();
        assert_eq!(order, [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (1, 2)]);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_session_that_is_not_allowed_keeps_its_turn() {
        let mut queue = queue();
        for session in [1, 2, 3] {
            queue.push(session, (session, 0));
        }
        assert_eq!(queue.pop_if(|session| session > 1), Some((2, (2, 0))));
        assert_eq!(queue.pop_if(|session| session > 3), None);
        assert_eq!(queue.pop_if(|_| true), Some((1, (1, 0))));
    }

    #[test]
    fn a_new_session_waits_for_one_item_of_each_other_session() {
        let mut queue = queue();
        for number in 0..4 {
            queue.push(1, (1, number));
        }
        queue.pop_if(|_| true);
        queue.push(2, (2, 0));
        assert_eq!([queue.pop_if(|_| true), queue.pop_if(|_| true)], [Some((1, (1, 1))), Some((2, (2, 0)))]);
    }

    #[test]
    fn one_session_cannot_fill_the_queue() {
        let mut queue = queue();
        let pushed: Vec<Pushed> = (0..5).map(|number| queue.push(1, (1, number))).collect();
        assert_eq!(pushed[3..], [Pushed::Queued, Pushed::Full]);
        assert_eq!(queue.push(2, (2, 0)), Pushed::Queued);
        for number in 0..3 {
            assert_eq!(queue.push(3, (3, number)), Pushed::Queued);
        }
        assert_eq!(queue.push(4, (4, 0)), Pushed::Full);
    }

    #[test]
    fn an_item_is_queued_only_once() {
        let mut queue = queue();
        assert_eq!([queue.push(1, (1, 0)), queue.push(1, (1, 0))], [Pushed::Queued, Pushed::Queued]);
        queue.pop_if(|_| true);
        assert_eq!(queue.pop_if(|_| true), None);
    }

    #[test]
    fn keep_first_drops_all_but_the_first_item_of_each_session() {
        let mut queue = queue();
        for number in 0..3 {
            queue.push(1, (1, number));
            queue.push(2, (2, number));
        }
        queue.pop_if(|_| true);
        queue.keep_first();
        assert!(queue.has(1) && queue.has(2) && !queue.has(3));
        // Dropped items can be added again, also beyond the bounds.
        for number in 0..9 {
            queue.push_unbounded(1, (1, number));
        }
        let order: Vec<(u8, u32)> =
            std::iter::from_fn(|| queue.pop_if(|_| true)).map(|(_, item)| item).collect();
        assert_eq!(order[..4], [(2, 0), (1, 1), (1, 0), (1, 2)]);
        assert_eq!(order.len(), 10);
    }

    #[test]
    fn the_newest_item_of_the_session_with_most_items_can_be_taken() {
        let mut queue = queue();
        for (session, number) in [(1, 0), (2, 0), (2, 1), (3, 0)] {
            queue.push(session, (session, number));
        }
        assert_eq!((queue.longest(), queue.count(2), queue.len()), (Some((2, 2)), 2, 4));
        assert_eq!(
            [queue.take_newest(2), queue.take_newest(2), queue.take_newest(2)],
            [Some((2, 1)), Some((2, 0)), None]
        );
        // A session without items has no turn.
        assert_eq!([queue.pop_if(|_| true), queue.pop_if(|_| true)], [Some((1, (1, 0))), Some((3, (3, 0)))]);
        assert!(queue.is_empty());
    }
}
