//! Values loaded from files (tokens, keys, certificates) and reloaded when a file changes.

use std::fmt;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rap_protocol::Secret;
use zeroize::Zeroizing;

/// Shortest time between two checks of the files.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// Maximum size of a file with secrets or certificates, in bytes.
const FILE_BYTES: u64 = 1024 * 1024;
/// Maximum length of a secret, in bytes: it has to fit into a header.
const SECRET_BYTES: usize = 4096;
/// Maximum number of secrets in a file.
const SECRETS: usize = 64;

/// Reason why a file, or a secret that is not in a file, cannot be used. It contains nothing of either.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{why}", prefix(path))]
pub struct FileError {
    /// Empty without a file.
    path: PathBuf,
    why: String,
}

fn prefix(path: &Path) -> String {
    if path == Path::new("") { String::new() } else { format!("cannot use the file {}: ", path.display()) }
}

impl FileError {
    /// Creates an error. `why` must contain nothing of the file.
    pub fn new(path: &Path, why: impl fmt::Display) -> FileError {
        FileError { path: path.into(), why: why.to_string() }
    }
}

type Load<T> = dyn Fn() -> Result<T, FileError> + Send + Sync;

/// A value that is made of files. If a changed file cannot be used, the last value stays.
pub struct Reloading<T> {
    files: Vec<PathBuf>,
    load: Box<Load<T>>,
    state: Mutex<State<T>>,
}

struct State<T> {
    value: Arc<T>,
    marks: Vec<Option<Mark>>,
    checked_at: Instant,
}

/// Identifies the content of a file without reading it. A replaced or rewritten file has another mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mark {
    changed_seconds: i64,
    changed_nanos: i64,
    size: u64,
    inode: u64,
}

impl Mark {
    fn of(file: &Metadata) -> Mark {
        Mark {
            changed_seconds: file.ctime(),
            changed_nanos: file.ctime_nsec(),
            size: file.size(),
            inode: file.ino(),
        }
    }
}

fn marks(files: &[PathBuf]) -> Vec<Option<Mark>> {
    files.iter().map(|file| fs::metadata(file).ok().map(|file| Mark::of(&file))).collect()
}

impl<T: 'static> Reloading<T> {
    /// Makes the value now, and again when one of the files changes.
    pub fn open(
        files: Vec<PathBuf>,
        load: impl Fn() -> Result<T, FileError> + Send + Sync + 'static,
    ) -> Result<Reloading<T>, FileError> {
        // The marks are older than the value: a file that changes in between is read again.
        let marks = marks(&files);
        let state = State { value: Arc::new(load()?), marks, checked_at: Instant::now() };
        Ok(Reloading { files, load: Box::new(load), state: Mutex::new(state) })
    }

    /// Wraps a value that never changes.
    pub fn fixed(value: T) -> Reloading<T> {
        let load = || Err(FileError::new(Path::new(""), "there is no file"));
        let state = State { value: Arc::new(value), marks: Vec::new(), checked_at: Instant::now() };
        Reloading { files: Vec::new(), load: Box::new(load), state: Mutex::new(state) }
    }

    /// Returns the value. Checks the files if the last check is more than a second ago.
    pub fn get(&self) -> Arc<T> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.files.is_empty() && state.checked_at.elapsed() >= CHECK_EVERY {
            state.checked_at = Instant::now();
            let marks = marks(&self.files);
            if marks != state.marks {
                state.marks = marks;
                match (self.load)() {
                    Ok(value) => {
                        state.value = Arc::new(value);
                        tracing::info!(files = ?self.files, "files have changed and were read again");
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a file has changed and cannot be used; its last content stays in use");
                    }
                }
            }
        }
        Arc::clone(&state.value)
    }
}

impl<T> fmt::Debug for Reloading<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reloading({:?})", self.files)
    }
}

/// A secret, or a file with secrets that is read again when it changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecretSource {
    /// The secret itself.
    Given(Secret),
    /// A file with a secret in each line. The first one is sent, and all are accepted.
    File(PathBuf),
}

impl From<Secret> for SecretSource {
    fn from(secret: Secret) -> Self {
        SecretSource::Given(secret)
    }
}

impl SecretSource {
    /// Returns the file, if the secrets are in one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            SecretSource::Given(_) => None,
            SecretSource::File(path) => Some(path),
        }
    }

    fn read(&self) -> Result<Vec<Secret>, FileError> {
        match self {
            SecretSource::Given(secret) => Ok(vec![secret.clone()]),
            SecretSource::File(path) => secrets_of(path),
        }
    }
}

/// Makes a value of the secrets of all sources, and again when one of their files changes.
pub fn watch_secrets<T: 'static>(
    sources: Vec<SecretSource>,
    parse: impl Fn(&[Secret]) -> Result<T, String> + Send + Sync + 'static,
) -> Result<Reloading<T>, FileError> {
    let files: Vec<PathBuf> = sources.iter().filter_map(|source| source.file().map(PathBuf::from)).collect();
    let first = files.first().cloned().unwrap_or_default();
    let load = move || {
        let mut secrets = Vec::new();
        for source in &sources {
            secrets.extend(source.read()?);
        }
        parse(&secrets).map_err(|why| FileError::new(&first, why))
    };
    Reloading::open(files, load)
}

/// Reads a file of bounded size.
pub(crate) fn read_bounded(path: &Path) -> Result<Zeroizing<Vec<u8>>, FileError> {
    let failed = |error: io::Error| FileError::new(path, error.kind());
    let mut bytes = Zeroizing::new(Vec::new());
    File::open(path).and_then(|file| file.take(FILE_BYTES + 1).read_to_end(&mut bytes)).map_err(failed)?;
    if bytes.len() as u64 > FILE_BYTES {
        return Err(FileError::new(path, "it has more than 1 MiB"));
    }
    Ok(bytes)
}

/// Reads the secrets of a file, one in each line. Empty lines are skipped.
fn secrets_of(path: &Path) -> Result<Vec<Secret>, FileError> {
    let bytes = read_bounded(path)?;
    let text = std::str::from_utf8(&bytes).map_err(|_| FileError::new(path, "it is not text"))?;
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let is_secret =
        |line: &&str| line.len() <= SECRET_BYTES && line.bytes().all(|byte| byte.is_ascii_graphic());
    if lines.is_empty() || lines.len() > SECRETS || !lines.iter().all(is_secret) {
        let why =
            "expected a secret of at most 4096 visible ASCII characters in each line, and at most 64 of them";
        return Err(FileError::new(path, why));
    }
    Ok(lines.into_iter().map(Secret::new).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(secrets: &Reloading<Vec<Secret>>) -> String {
        secrets.get()[0].expose().to_owned()
    }

    /// Waits until the first secret is this one. The file is checked at most once a second.
    fn until(secrets: &Reloading<Vec<Secret>>, expected: &str) {
        rap_testkit::block_until("the file to be read again", || first(secrets) == expected);
    }

    fn watch(path: &Path) -> Result<Reloading<Vec<Secret>>, FileError> {
        watch_secrets(vec![SecretSource::File(path.into())], |secrets| Ok(secrets.to_vec()))
    }

    #[test]
    fn a_file_is_read_again_when_it_is_rewritten_or_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        fs::write(&path, "one\n").unwrap();
        let secrets = watch(&path).unwrap();
        assert_eq!(first(&secrets), "one");
        fs::write(&path, "two\n").unwrap();
        until(&secrets, "two");
        let next = directory.path().join("next");
        fs::write(&next, "six\nfive\n").unwrap();
        fs::rename(next, &path).unwrap();
        until(&secrets, "six");
        assert_eq!(secrets.get().len(), 2);
    }

    #[test]
    fn a_file_that_becomes_unusable_keeps_its_last_content_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        fs::write(&path, "one").unwrap();
        let secrets = watch(&path).unwrap();
        for content in ["", "hunter2 hunter2\n"] {
            fs::write(&path, content).unwrap();
            secrets.state.lock().unwrap().checked_at -= CHECK_EVERY;
            assert_eq!(first(&secrets), "one", "{content}");
        }
        fs::remove_file(&path).unwrap();
        secrets.state.lock().unwrap().checked_at -= CHECK_EVERY;
        assert_eq!(first(&secrets), "one");
        fs::write(&path, "two").unwrap();
        until(&secrets, "two");
    }

    #[test]
    fn an_error_names_the_file_and_nothing_of_its_content() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let missing = watch(&path).unwrap_err().to_string();
        assert!(missing.contains("token: entity not found"), "{missing}");
        let many = "x\n".repeat(SECRETS + 1);
        for content in ["", "\n\n", "hunter2 hunter2", "pässwort", &"x".repeat(SECRET_BYTES + 1), &many] {
            fs::write(&path, content).unwrap();
            let error = watch(&path).unwrap_err().to_string();
            assert!(error.contains("in each line") && !error.contains("hunter2"), "{error}");
        }
        fs::write(&path, vec![b'x'; FILE_BYTES as usize + 1]).unwrap();
        assert!(watch(&path).unwrap_err().to_string().contains("more than 1 MiB"));
    }
}
