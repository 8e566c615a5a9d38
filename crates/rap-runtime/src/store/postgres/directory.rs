//! Keys and sessions of threads, which never change, and keys for new threads.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rap_protocol::ThreadId;

use super::connect::Connections;
use super::heads::{session_key, thread_id, thread_key};
use super::statement::{Failure, Statement, get};
use crate::store::{Message, NewThread, SessionKey, Target, Thread, ThreadKey};

/// Maximum number of threads whose session is remembered.
const THREADS: usize = 100_000;
/// Number of keys that are taken from the database at once.
const KEYS: usize = 256;

#[derive(Default)]
pub(super) struct Directory {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    ids: HashMap<ThreadId, ThreadKey>,
    sessions: HashMap<ThreadKey, SessionKey>,
    /// Keys of root threads that are about to be stored, and the number of calls that plan them.
    planned: HashMap<ThreadId, (ThreadKey, usize)>,
    /// Keys that no thread has yet, in order.
    keys: VecDeque<ThreadKey>,
}

impl State {
    fn planned_key(&self, id: &ThreadId) -> Option<ThreadKey> {
        self.planned.get(id).map(|(key, _)| *key)
    }
}

/// The keys of root threads that a call plans.
pub(super) struct Planned<'a> {
    directory: &'a Directory,
    ids: Vec<ThreadId>,
}

impl Drop for Planned<'_> {
    fn drop(&mut self) {
        let mut state = self.directory.state();
        for id in &self.ids {
            if let Some((_, calls)) = state.planned.get_mut(id) {
                *calls -= 1;
                if *calls == 0 {
                    state.planned.remove(id);
                }
            }
        }
    }
}

impl Directory {
    /// A poisoned lock is ignored: every entry is true by itself.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers a stored thread.
    pub(super) fn remember(&self, thread: &Thread) {
        self.add(thread.id.clone(), thread.key, thread.session);
    }

    /// Forgets all threads, because some were moved away or came back.
    pub(super) fn forget(&self) {
        let mut state = self.state();
        state.ids.clear();
        state.sessions.clear();
    }

    /// Forgets a thread that is not there any more. Returns false if it was not known by this key.
    pub(super) fn forget_thread(&self, id: &ThreadId, key: ThreadKey) -> bool {
        let mut state = self.state();
        let is_known = state.ids.get(id) == Some(&key);
        if is_known {
            state.ids.remove(id);
            state.sessions.remove(&key);
        }
        is_known
    }

    pub(super) fn add(&self, id: ThreadId, key: ThreadKey, session: SessionKey) {
        let mut state = self.state();
        if state.ids.len() >= THREADS {
            state.ids.clear();
            state.sessions.clear();
        }
        state.ids.insert(id, key);
        state.sessions.insert(key, session);
    }

    /// Returns the key of the thread that a message is for, as far as it is known.
    pub(super) fn key(&self, target: &Target) -> Option<ThreadKey> {
        let state = self.state();
        match target {
            Target::Key(key) | Target::Token { key, .. } => Some(*key),
            Target::Id(id) => state.ids.get(id).copied().or_else(|| state.planned_key(id)),
            Target::New(NewThread { id, .. }) | Target::Fork { id, .. } => {
                state.planned_key(id).or_else(|| state.ids.get(id).copied())
            }
        }
    }

    /// Returns the session that a message belongs to, as far as it is known.
    pub(super) fn session(&self, target: &Target) -> Option<SessionKey> {
        let key = self.key(target)?;
        let state = self.state();
        let id = match target {
            Target::Id(id) | Target::New(NewThread { id, .. }) | Target::Fork { id, .. } => Some(id),
            Target::Key(_) | Target::Token { .. } => None,
        };
        let planned = id.and_then(|id| state.planned_key(id)).filter(|planned| *planned == key);
        state.sessions.get(&key).copied().or(planned.map(SessionKey))
    }

    /// Gives each new root thread a key, as long as the result is kept, and looks up the threads that are not known yet.
    pub(super) async fn prepare(
        &self,
        connections: &Connections,
        messages: &[Message],
    ) -> Result<Planned<'_>, Failure> {
        let mut statements = vec![];
        let new = messages.iter().filter(|message| is_new(&message.target)).count();
        let mut reserved = self.take_keys(new).unwrap_or_default();
        if reserved.len() < new {
            statements.push(new_keys(new + KEYS));
        }
        let (mut keys, mut ids) = (Vec::new(), Vec::new());
        for message in messages.iter().filter(|message| self.session(&message.target).is_none()) {
            match &message.target {
                Target::Key(key) | Target::Token { key, .. } => keys.push(key.number()),
                Target::Id(id) => ids.push(id.as_str().to_owned()),
                Target::New(_) | Target::Fork { .. } => {}
            }
        }
        if !keys.is_empty() || !ids.is_empty() {
            let sql = "SELECT no, id, session FROM threads WHERE no = ANY($1) OR id = ANY($2)";
            statements.push(Statement::new(sql).with(keys).with(ids));
        }
        if !statements.is_empty() {
            for row in connections.write(statements).await?.iter().flatten() {
                match row.len() {
                    1 if reserved.len() < new => reserved.push(thread_key(row, 0)?),
                    1 => self.state().keys.push_back(thread_key(row, 0)?),
                    _ => self.add(thread_id(row, 1)?, thread_key(row, 0)?, session_key(row, 2)?),
                }
            }
        }
        let mut planned = Planned { directory: self, ids: Vec::new() };
        let mut reserved = reserved.into_iter();
        for message in messages {
            let (Target::New(NewThread { id, .. }) | Target::Fork { id, .. }) = &message.target else {
                continue;
            };
            let mut state = self.state();
            if let Some(key) = state.planned_key(id).or_else(|| reserved.next()) {
                state.planned.entry(id.clone()).or_insert((key, 0)).1 += 1;
                planned.ids.push(id.clone());
            }
        }
        Ok(planned)
    }

    /// Takes keys for children. Returns `None` if there are not enough.
    pub(super) fn take_keys(&self, count: usize) -> Option<Vec<ThreadKey>> {
        let mut state = self.state();
        (state.keys.len() >= count).then(|| state.keys.drain(..count).collect())
    }

    pub(super) fn add_keys(&self, rows: &[tokio_postgres::Row]) -> Result<(), Failure> {
        let keys: Result<Vec<i64>, Failure> = rows.iter().map(|row| get(row, 0)).collect();
        self.state().keys.extend(keys?.into_iter().map(ThreadKey::new));
        Ok(())
    }
}

fn is_new(target: &Target) -> bool {
    matches!(target, Target::New(_) | Target::Fork { .. })
}

/// Returns the statement that takes keys from the database.
pub(super) fn new_keys(count: usize) -> Statement {
    Statement::new("SELECT nextval('thread_keys') FROM generate_series(1, $1)").with(count as i64)
}
