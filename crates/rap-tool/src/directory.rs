//! A directory for each thread, which is removed with it.
//!
//! It is `threads/KEY` in the data directory, where KEY is [`Thread::key`]: no id that somebody else chose reaches a path.
//! `threads/KEY.json` says which thread it belongs to, so that the directories of a session can be found when it moves.

use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rap_io::secret_box::Key;
use rap_protocol::ThreadId;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use crate::auth::Caller;
use crate::call::{Call, Thread};
use crate::engine::Engine;
use crate::error::Error;

/// Attempts to remove a directory. Processes of the thread that are just being ended may still write into it.
const ATTEMPTS: u32 = 40;
const PAUSE: Duration = Duration::from_millis(250);
/// Maximum number of directories that are looked at to find those of a session.
const DIRECTORIES: usize = 1_000_000;

/// Owner of a directory, beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Owner {
    pub(crate) session: ThreadId,
    pub(crate) thread: ThreadId,
    /// Random, and the same in copies of the directory at other servers.
    pub(crate) id: String,
}

impl Owner {
    /// Reads the owner of a directory. Returns `None` if it is not known.
    pub(crate) fn of(directory: &Path) -> Option<Owner> {
        serde_json::from_slice(&std::fs::read(owner_file(directory)).ok()?).ok()
    }

    /// Writes the owner beside a directory.
    pub(crate) fn write(&self, directory: &Path) -> io::Result<()> {
        self.unfinished(directory)?.persist(owner_file(directory))?;
        Ok(())
    }

    /// Writes the owner beside a directory that has none. Calls of a thread may do so at the same time: the first one
    /// that is complete stays.
    fn write_first(&self, directory: &Path) -> io::Result<()> {
        match self.unfinished(directory)?.persist_noclobber(owner_file(directory)) {
            Err(failed) if failed.error.kind() != io::ErrorKind::AlreadyExists => Err(failed.error),
            _ => Ok(()),
        }
    }

    /// Writes the owner into a temporary file beside its final path.
    fn unfinished(&self, directory: &Path) -> io::Result<NamedTempFile> {
        let beside = directory.parent().ok_or(io::ErrorKind::InvalidInput)?;
        let mut file = NamedTempFile::new_in(beside)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        Ok(file)
    }
}

/// Creates the directory of a thread, and its owner beside it, unless they exist.
fn create(directory: &Path, session: ThreadId, thread: ThreadId) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
    if owner_file(directory).exists() {
        return Ok(());
    }
    Owner { session, thread, id: random_id() }.write_first(directory)
}

/// Returns a random id that is part of a file name without harm.
pub(crate) fn random_id() -> String {
    Key::random().mac(&[b"directory"])[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the file with the owner of a directory.
pub(crate) fn owner_file(directory: &Path) -> PathBuf {
    directory.with_extension("json")
}

impl Call {
    /// Returns the directory of the thread, for example a workspace. It is created at the first call, readable by its
    /// owner only, and removed with everything in it after the thread was closed or has expired
    /// ([`Limits::thread_ttl`](crate::Limits::thread_ttl)), after the hook of
    /// [`ToolServer::on_close_thread`](crate::ToolServer::on_close_thread) has ended.
    pub async fn directory(&self) -> Result<PathBuf, Error> {
        if self.is_cancelled() {
            return Err(Error::new("the call has ended"));
        }
        let path = self.engine().directory(self.thread());
        let made = path.clone();
        let (session, thread) = (self.session().id().clone(), self.thread().id().clone());
        tokio::task::spawn_blocking(move || create(&made, session, thread))
            .await
            .map_err(io::Error::other)??;
        Ok(path)
    }

    /// Returns the root thread of the session: the oldest ancestor, or the thread itself.
    pub fn session(&self) -> Thread {
        match self.ancestors().first() {
            Some(root) => self.engine().thread(self.thread().caller(), root),
            None => self.thread().clone(),
        }
    }

    /// Returns the directories of the thread's ancestors, root first, as far as they exist.
    pub fn ancestor_directories(&self) -> Vec<PathBuf> {
        let (engine, caller) = (self.engine(), self.thread().caller());
        let of = |id| engine.directory(&engine.thread(caller, id));
        self.ancestors().iter().map(of).filter(|path| path.is_dir()).collect()
    }
}

impl Engine {
    pub(crate) fn directory(&self, thread: &Thread) -> PathBuf {
        self.directories.join(thread.key())
    }

    /// Returns the directories of a session's threads, each with its thread. Reads the disk.
    pub(crate) fn session_directories(
        &self,
        caller: &Caller,
        session: &ThreadId,
    ) -> io::Result<Vec<(Owner, PathBuf)>> {
        let entries = match std::fs::read_dir(&self.directories) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut found = Vec::new();
        for (number, entry) in entries.enumerate() {
            if number >= DIRECTORIES {
                return Err(io::Error::other("there are too many directories of threads"));
            }
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let directory = path.with_extension("");
            let Some(owner) = Owner::of(&directory).filter(|owner| owner.session == *session) else {
                continue;
            };
            // Threads of other callers may have the same ids.
            if self.directory(&self.thread(caller, &owner.thread)) == directory && directory.is_dir() {
                found.push((owner, directory));
            }
        }
        Ok(found)
    }

    /// Removes the directory of a closed thread.
    pub(crate) async fn remove_directory(&self, thread: &Thread) {
        let path = self.directory(thread);
        for attempt in 1.. {
            match remove(path.clone()).await {
                Ok(()) => return,
                Err(error) if attempt == ATTEMPTS => {
                    let thread = thread.id();
                    return tracing::warn!(?thread, %error, "the directory of a closed thread could not be removed");
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }
}

async fn remove(path: PathBuf) -> io::Result<()> {
    let removed = tokio::task::spawn_blocking(move || {
        remove_tree(&path)?;
        match std::fs::remove_file(owner_file(&path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    });
    removed.await.map_err(io::Error::other)?
}

/// Removes a directory with everything in it, if it exists.
pub(crate) fn remove_tree(path: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            make_writable(path);
            std::fs::remove_dir_all(path)
        }
        removed => removed,
    }
}

/// Makes the directories below a path removable: a program may have taken its own permissions away, as the module cache
/// of Go does. Failures show when the directory is removed.
fn make_writable(path: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let mut directories = vec![path.to_owned()];
    while let Some(directory) = directories.pop() {
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o700)).ok();
        let entries = std::fs::read_dir(&directory).into_iter().flatten().flatten();
        directories.extend(
            entries
                .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                .map(|entry| entry.path()),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    const CALLS: usize = 8;

    #[test]
    fn the_first_calls_of_a_thread_get_its_directory_at_the_same_time() {
        let root = tempfile::tempdir().unwrap();
        let id = ThreadId::new("t1").unwrap();
        for round in 0..40 {
            let directory = root.path().join(round.to_string());
            let start = Barrier::new(CALLS);
            let call = || {
                start.wait();
                create(&directory, id.clone(), id.clone())?;
                Owner::of(&directory).ok_or_else(|| io::Error::other("there is no owner"))
            };
            let owners: Vec<Owner> = std::thread::scope(|scope| {
                let calls: Vec<_> = (0..CALLS).map(|_| scope.spawn(call)).collect();
                calls.into_iter().map(|call| call.join().unwrap().unwrap()).collect()
            });
            assert!(owners.iter().all(|owner| *owner == owners[0]), "{owners:?}");
        }
        // Nothing else is left.
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 2 * 40);
    }
}
