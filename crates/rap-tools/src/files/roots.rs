//! The directories that the tools may use.

use std::io;
use std::path::{Path, PathBuf};

use cap_std::ambient_authority;
use cap_std::fs::{Dir, Metadata};
use rap_tool::prelude::*;

use crate::{Error as StartError, Options};

pub(super) struct Roots(Vec<(PathBuf, Dir)>);

/// A path within a root.
pub(super) struct RootedPath<'a> {
    pub(super) dir: &'a Dir,
    /// Path relative to the root; never empty.
    pub(super) path: PathBuf,
    /// The path as it was given.
    pub(super) shown: &'a str,
}

impl Roots {
    /// Opens the roots. Without any, the root is a directory of the server itself.
    pub(super) fn open(options: &Options) -> std::result::Result<Roots, StartError> {
        let mut paths = options.roots.clone();
        if paths.is_empty() {
            let own = options.data.join("files");
            std::fs::create_dir_all(&own)
                .map_err(|source| StartError::Directory { path: own.clone(), source })?;
            paths.push(own);
        }
        let open = |path: PathBuf| {
            let opened = path.canonicalize().and_then(|full| {
                let dir = Dir::open_ambient_dir(&full, ambient_authority())?;
                Ok((full, dir))
            });
            opened.map_err(|source| StartError::Directory { path, source })
        };
        Ok(Roots(paths.into_iter().map(open).collect::<std::result::Result<_, _>>()?))
    }

    /// Finds the root of a path: an absolute path is in one of them, any other is relative to the first.
    pub(super) fn resolve<'a>(&'a self, path: &'a str) -> Result<RootedPath<'a>> {
        if path.contains('\0') {
            return Err(Error::new("a path must not contain NUL characters"));
        }
        let given = Path::new(path);
        let found = if given.is_absolute() {
            self.0.iter().find_map(|(root, dir)| Some((dir, given.strip_prefix(root).ok()?)))
        } else {
            self.0.first().map(|(_, dir)| (dir, given))
        };
        let (dir, relative) =
            found.ok_or_else(|| Error::new(format!("{path:?} is outside the permitted directories")))?;
        let path_in_root = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
        Ok(RootedPath { dir, path: path_in_root.to_owned(), shown: path })
    }
}

impl RootedPath<'_> {
    pub(super) fn metadata(&self) -> Result<Metadata> {
        self.dir.metadata(&self.path).map_err(|error| self.failed(&error))
    }

    pub(super) fn wrong(&self, why: &str) -> Error {
        Error::new(format!("{:?} cannot be used: {why}", self.shown))
    }

    pub(super) fn failed(&self, error: &io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::NotFound => self.wrong("there is no such file or directory"),
            io::ErrorKind::PermissionDenied => {
                self.wrong("it is not permitted, or leads out of the permitted directories")
            }
            _ => self.wrong(&error.to_string()),
        }
    }
}
