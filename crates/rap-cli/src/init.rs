//! `rap init`: a configuration to begin with.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A commented `rap.toml` that lists every setting with its default.
pub const TEXT: &str = include_str!("rap.toml");

/// What to do about a file that is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Leave it alone; that is an error.
    Keep,
    /// Write over it.
    Replace,
}

/// Why no file was written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is one already.
    #[error("{} is there already; --force writes over it", .0.display())]
    Exists(PathBuf),
    /// It can not be written.
    #[error("can not write {}: {why}", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: io::Error,
    },
}

/// Writes the file.
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
    fn a_file_that_is_there_is_replaced_on_request_only() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rap.toml");
        std::fs::write(&path, "mine").unwrap();
        let error = write(&path, Existing::Keep).unwrap_err();
        assert_eq!(error.to_string(), format!("{} is there already; --force writes over it", path.display()));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
        write(&path, Existing::Replace).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), TEXT);
    }

    #[test]
    fn a_file_that_can_not_be_written_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("no/rap.toml");
        let error = write(&path, Existing::Keep).unwrap_err().to_string();
        assert!(error.starts_with(&format!("can not write {}: ", path.display())), "{error}");
    }
}
