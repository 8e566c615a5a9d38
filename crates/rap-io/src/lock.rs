//! A lock file, which ensures that only one process uses a data directory.
//!
//! The kernel holds the lock on the open file and releases it when the process ends, for whatever reason. The file
//! itself must never be removed: a process that still has it open would then hold a lock that others cannot see.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A held lock file. Released when this is dropped or the process ends.
#[derive(Debug)]
pub struct DirLock {
    file: File,
}

/// Reason why a lock was not acquired.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process, or another part of this one, holds the lock.
    #[error("{} is locked: another process is using this directory; stop it first", .0.display())]
    Held(PathBuf),
    /// The file could not be opened or locked.
    #[error("cannot lock {}: {source}", path.display())]
    Io {
        /// Path of the lock file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

impl DirLock {
    /// Takes the lock, or fails at once if it is held. `path` is the lock file, such as `DIR/lock`. The file is
    /// created if it is missing; its directory must exist.
    pub fn take(path: &Path) -> Result<DirLock, LockError> {
        let failed = |source| LockError::Io { path: path.into(), source };
        // Others must not be able to open the file, because they could hold the lock.
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).write(true).mode(0o600).open(path).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => Ok(DirLock { file }),
            Err(TryLockError::WouldBlock) => Err(LockError::Held(path.into())),
            Err(TryLockError::Error(source)) => Err(failed(source)),
        }
    }
}

impl Drop for DirLock {
    /// Closing the file is not enough: a child process that is just being started may still have it open.
    fn drop(&mut self) {
        if let Err(error) = self.file.unlock() {
            tracing::warn!(%error, "a lock file could not be unlocked; it is released when the process ends");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Child, Command, Stdio};

    use super::*;

    #[test]
    fn a_lock_is_held_until_it_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lock = DirLock::take(&path).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&path.metadata().unwrap()) & 0o777, 0o600);
        let refused = DirLock::take(&path).unwrap_err();
        assert!(matches!(refused, LockError::Held(_)));
        assert!(refused.to_string().contains(path.to_str().unwrap()), "{refused}");
        drop(lock);
        DirLock::take(&path).unwrap();
    }

    #[test]
    fn a_missing_directory_is_an_error_that_names_the_file() {
        let error = DirLock::take(Path::new("/nonexistent/dir/lock")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/dir/lock"), "{error}");
    }

    const CHILD: &str = "RAP_IO_TEST_LOCK";

    #[test]
    fn a_killed_process_releases_its_lock() {
        if let Ok(path) = env::var(CHILD) {
            return hold_until_killed(Path::new(&path));
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let mut holder = start_holder(&path);
        assert!(matches!(DirLock::take(&path), Err(LockError::Held(_))));
        holder.kill().unwrap();
        holder.wait().unwrap();
        DirLock::take(&path).unwrap();
    }

    fn hold_until_killed(path: &Path) {
        let _lock = DirLock::take(path).unwrap();
        println!("\nholding");
        io::stdin().read_to_end(&mut Vec::new()).unwrap();
    }

    /// Runs this test binary again as a second process, and waits until that holds the lock.
    fn start_holder(path: &Path) -> Child {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "lock::tests::a_killed_process_releases_its_lock", "--nocapture"])
            .env(CHILD, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "holding"), "the second process did not take the lock");
        child
    }
}
