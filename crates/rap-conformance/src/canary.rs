//! Files of the checker that show whether an implementation on the same machine uses ids as paths.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// Number of `../` in a relative path, which leads to the root from any usual directory.
const STEPS_UP: usize = 16;

/// Directory with one file. Ids that are paths lead into it. It is deleted when this is dropped.
pub(crate) struct Canary {
    directory: TempDir,
}

impl Canary {
    pub(crate) fn new() -> io::Result<Canary> {
        let directory = tempfile::Builder::new().prefix("rap-check-").tempdir()?;
        let canary = Canary { directory };
        fs::create_dir(canary.kept())?;
        fs::write(
            canary.kept().join("file"),
            "A file of `rap check`. Whoever deletes it uses ids as paths.\n",
        )?;
        Ok(canary)
    }

    fn kept(&self) -> PathBuf {
        self.directory.path().join("kept")
    }

    /// Ids that are paths of the directory with the file.
    pub(crate) fn existing(&self) -> [String; 2] {
        as_ids(&self.kept())
    }

    /// Ids that are paths of directories that do not exist.
    pub(crate) fn missing(&self) -> [String; 2] {
        as_ids(&self.directory.path().join("made"))
    }

    /// Describes what has changed, if anything.
    pub(crate) fn damage(&self) -> Option<&'static str> {
        if !self.kept().join("file").exists() {
            return Some("a file of the checker was deleted, whose path was sent as an id");
        }
        let entries = fs::read_dir(self.directory.path()).map_or(0, Iterator::count);
        (entries > 1).then_some("a file was made at a path that was sent as an id")
    }
}

/// An absolute and a relative path.
fn as_ids(path: &Path) -> [String; 2] {
    let absolute = path.to_string_lossy().into_owned();
    let relative = format!("{}{}", "../".repeat(STEPS_UP), absolute.trim_start_matches('/'));
    [absolute, relative]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deleted_and_a_new_file_are_noticed() {
        let canary = Canary::new().unwrap();
        assert_eq!(canary.damage(), None);
        fs::create_dir(Path::new("/a/b").join(&canary.missing()[0])).unwrap();
        assert!(canary.damage().unwrap().contains("was made"));
        let canary = Canary::new().unwrap();
        fs::remove_dir_all(std::env::current_dir().unwrap().join(&canary.existing()[1])).unwrap();
        assert!(canary.damage().unwrap().contains("was deleted"));
    }
}
