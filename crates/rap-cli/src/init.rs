//! `rap init`: writes an initial configuration.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A commented `rap.toml` that lists every setting with its default.
pub const TEXT: &str = include_str!("rap.toml");

/// What to do if the file exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Fail.
    Keep,
    /// Overwrite it.
    Replace,
}

/// Reason why no file was written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file exists.
    #[error("{} exists; use --force to overwrite it", .0.display())]
    Exists(PathBuf),
    /// The file cannot be written.
    #[error("cannot write {}: {why}", path.display())]
    Unwritable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        why: io::Error,
    },
}

/// Writes [`TEXT`] to a file.
pub fn write(path: &Path, existing: Existing) -> Result<(), Error> {
    let mut options = OpenOptions::new();
    match existing {
        Existing::Keep => options.write(true).create_new(true),
        Existing::Replace => options.write(true).create(true).truncate(true),
    };
    let written = options.open(path).and_then(|mut file| file.write_all(TEXT.as_bytes()));
    written.map_err(|why| match why.kind() {
        io::ErrorKind::AlreadyExists => Error::Exists(path.to_owned()),
        _ => Error::Unwritable { path: path.to_owned(), why },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_existing_file_is_only_replaced_on_request() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rap.toml");
        std::fs::write(&path, "mine").unwrap();
        let error = write(&path, Existing::Keep).unwrap_err();
        assert_eq!(error.to_string(), format!("{} exists; use --force to overwrite it", path.display()));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
        write(&path, Existing::Replace).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), TEXT);
    }

    #[test]
    fn an_error_names_the_file_that_cannot_be_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("no/rap.toml");
        let error = write(&path, Existing::Keep).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot write {}: ", path.display())), "{error}");
    }
}
