//! `rap init`: writes an initial configuration.

use std::fs::{OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::config::{Limits, limits};
use crate::table::wrap;

/// The commented `rap.toml` up to the limits.
const WITHOUT_LIMITS: &str = include_str!("rap.toml");
/// Maximum width of a comment.
const WIDTH: usize = 116;

/// Returns a commented `rap.toml` that lists every setting with its default.
pub fn text() -> String {
    let mut text = WITHOUT_LIMITS.to_owned();
    let thread = "Limits of a thread. An agent can have its own: a table [agent.limits] with these keys.";
    add_limits(&mut text, thread, limits::defaults(rap_agent::Limits::TABLE));
    text.push('\n');
    add_limits(&mut text, "Limits of the runtime.", limits::defaults(Limits::TABLE));
    text
}

fn add_limits(text: &mut String, title: &str, limits: impl Iterator<Item = (&'static str, String, String)>) {
    text.push_str(&format!("# {title}\n"));
    for (key, default, about) in limits {
        let lines: String = wrap(&about, WIDTH).iter().map(|line| format!("# {line}\n")).collect();
        text.push_str(&format!("\n{lines}#{key} = {default}\n"));
    }
}

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

/// Writes [`text`] to a file.
pub fn write(path: &Path, existing: Existing) -> Result<(), Error> {
    let mut options = OpenOptions::new();
    // The file may get secrets.
    options.mode(0o600);
    match existing {
        Existing::Keep => options.write(true).create_new(true),
        Existing::Replace => options.write(true).create(true).truncate(true),
    };
    let written = options.open(path).and_then(|mut file| {
        // An existing file keeps its mode when it is opened.
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.write_all(text().as_bytes())
    });
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
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text());
    }

    #[test]
    fn the_file_can_be_read_by_its_owner_only() {
        use std::os::unix::fs::MetadataExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rap.toml");
        for existing in [Existing::Keep, Existing::Replace] {
            write(&path, existing).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
            std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        }
    }

    #[test]
    fn an_error_names_the_file_that_cannot_be_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("no/rap.toml");
        let error = write(&path, Existing::Keep).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot write {}: ", path.display())), "{error}");
    }
}
