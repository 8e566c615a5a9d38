//! The open connections of a server, and the choice of those that make room for new ones.
//!
//! A full pool closes the connections that have made no progress for the longest time. While every connection makes
//! progress, new ones are admitted to a reserve, which serves only requests that must not wait.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;

/// Time without progress after which a connection may be closed to make room.
const IDLE: Duration = Duration::from_secs(2);
/// Maximum number of connections that are closed at a time. A search costs time for every open connection, so one search
/// makes room for several new connections.
const CLOSED_AT_ONCE: usize = 16;
/// Pause after a search that found nothing to close.
const SEARCH_PAUSE: Duration = Duration::from_millis(100);
/// The reserve has room for one more connection for each of this many.
const RESERVED_PART: usize = 8;

/// Time of the last progress of a connection.
#[derive(Debug)]
pub(super) struct Progress {
    began: Instant,
    /// In milliseconds since `began`.
    last: AtomicU64,
}

impl Progress {
    pub(super) fn new() -> Arc<Progress> {
        Arc::new(Progress { began: Instant::now(), last: AtomicU64::new(0) })
    }

    pub(super) fn note(&self) {
        let elapsed = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(elapsed, Ordering::Relaxed);
    }

    fn last(&self) -> Instant {
        self.began + Duration::from_millis(self.last.load(Ordering::Relaxed))
    }
}

/// Part of the pool that a connection belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Serves every request.
    Ordinary,
    /// Serves only requests that the reserve is for.
    Reserved,
}

struct Entry {
    part: Part,
    progress: Arc<Progress>,
    /// `None` until the connection's task has been spawned.
    task: Option<AbortHandle>,
}

struct State {
    entries: HashMap<u64, Entry>,
    reserved: usize,
    next: u64,
    search_after: Instant,
}

pub(super) struct Pool {
    ordinary: usize,
    reserve: usize,
    state: Mutex<State>,
}

/// A slot of the pool, which is free again when it is dropped.
pub(super) struct Admitted {
    pool: Arc<Pool>,
    id: u64,
    pub(super) part: Part,
    pub(super) progress: Arc<Progress>,
}

impl Pool {
    /// Creates a pool of this many connections, and a reserve besides.
    pub(super) fn new(connections: usize) -> Arc<Pool> {
        let state = State { entries: HashMap::new(), reserved: 0, next: 0, search_after: Instant::now() };
        let reserve = connections.div_ceil(RESERVED_PART);
        Arc::new(Pool { ordinary: connections, reserve, state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a connection. Returns `None` if all connections, those of the reserve too, make progress.
    pub(super) fn admit(self: &Arc<Self>) -> Option<Admitted> {
        let mut state = self.state();
        let is_full = |state: &State| state.entries.len() - state.reserved >= self.ordinary;
        if is_full(&state) {
            state.make_room();
        }
        let part = match is_full(&state) {
            false => Part::Ordinary,
            true if state.reserved < self.reserve => Part::Reserved,
            true => return None,
        };
        let (id, progress) = (state.next, Progress::new());
        state.next += 1;
        state.reserved += usize::from(part == Part::Reserved);
        state.entries.insert(id, Entry { part, progress: Arc::clone(&progress), task: None });
        Some(Admitted { pool: Arc::clone(self), id, part, progress })
    }

    /// Names the task of a connection, which is aborted when the connection has to make room.
    pub(super) fn set_task(&self, id: u64, task: AbortHandle) {
        if let Some(entry) = self.state().entries.get_mut(&id) {
            entry.task = Some(task);
        }
    }
}

impl State {
    /// Closes connections without progress, those that have been idle the longest first.
    fn make_room(&mut self) {
        let now = Instant::now();
        if now < self.search_after {
            return;
        }
        let mut idle: Vec<(Instant, u64)> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.task.is_some())
            .map(|(id, entry)| (entry.progress.last(), *id))
            .filter(|(last, _)| now.saturating_duration_since(*last) >= IDLE)
            .collect();
        if idle.is_empty() {
            self.search_after = now + SEARCH_PAUSE;
            return;
        }
        idle.sort_unstable();
        for (_, id) in idle.into_iter().take(CLOSED_AT_ONCE) {
            self.remove(id);
        }
    }

    fn remove(&mut self, id: u64) {
        let Some(entry) = self.entries.remove(&id) else { return };
        self.reserved -= usize::from(entry.part == Part::Reserved);
        if let Some(task) = entry.task {
            task.abort();
        }
    }
}

impl Admitted {
    pub(super) fn id(&self) -> u64 {
        self.id
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        if let Some(entry) = state.entries.remove(&self.id) {
            state.reserved -= usize::from(entry.part == Part::Reserved);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Admits a connection with a task that never ends.
    fn admit(pool: &Arc<Pool>) -> Option<(Admitted, tokio::task::JoinHandle<()>)> {
        let admitted = pool.admit()?;
        let task = tokio::spawn(std::future::pending());
        pool.set_task(admitted.id(), task.abort_handle());
        Some((admitted, task))
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_pool_closes_the_connection_that_made_no_progress_for_the_longest_time() {
        let pool = Pool::new(2);
        let (first, first_task) = admit(&pool).unwrap();
        tokio::time::advance(Duration::from_secs(1)).await;
        let (second, second_task) = admit(&pool).unwrap();
        tokio::time::advance(IDLE).await;
        first.progress.note();
        // The second one is idle, although it is newer.
        let (third, _task) = admit(&pool).unwrap();
        assert_eq!(third.part, Part::Ordinary);
        assert!(second_task.await.is_err_and(|error| error.is_cancelled()));
        assert!(!first_task.is_finished());
        drop((first, second, third));
        assert!(pool.state().entries.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn while_all_connections_make_progress_new_ones_go_to_the_reserve_and_then_are_refused() {
        let pool = Pool::new(16);
        let mut open: Vec<_> = (0..16).map(|_| admit(&pool).unwrap()).collect();
        assert!(open.iter().all(|(admitted, _)| admitted.part == Part::Ordinary));
        open.extend((0..2).map(|_| admit(&pool).unwrap()));
        assert!(open[16..].iter().all(|(admitted, _)| admitted.part == Part::Reserved));
        assert!(admit(&pool).is_none());
        // A slot of the reserve that is free again can be used, and so can an ordinary one.
        open.pop();
        assert_eq!(admit(&pool).unwrap().0.part, Part::Reserved);
        open.remove(0);
        assert_eq!(admit(&pool).unwrap().0.part, Part::Ordinary);
    }

    #[tokio::test(start_paused = true)]
    async fn a_fruitless_search_is_not_repeated_at_once() {
        let pool = Pool::new(1);
        let (_open, task) = admit(&pool).unwrap();
        tokio::time::advance(IDLE - Duration::from_millis(50)).await;
        assert_eq!(admit(&pool).unwrap().0.part, Part::Reserved);
        tokio::time::advance(Duration::from_millis(60)).await;
        assert_eq!(admit(&pool).unwrap().0.part, Part::Reserved);
        assert!(!task.is_finished());
        tokio::time::advance(SEARCH_PAUSE).await;
        assert_eq!(admit(&pool).unwrap().0.part, Part::Ordinary);
    }
}
