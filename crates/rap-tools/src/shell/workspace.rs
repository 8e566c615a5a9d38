//! Workspaces of threads. A workspace contains links to the roots and to the entries of the ancestors' workspaces.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rap_tool::prelude::*;

/// Maximum number of links to the entries of an ancestor's workspace.
const LINKS: usize = 1000;

pub(super) struct Workspace {
    pub(super) own: PathBuf,
    /// Workspaces of the ancestors, root first.
    ancestors: Vec<PathBuf>,
}

/// Creates the workspace of a call's thread, with links to the roots and to the entries of its ancestors' workspaces.
pub(super) async fn prepare(call: &Call, roots: &[PathBuf]) -> Result<Workspace> {
    let (own, ancestors) = (call.directory().await?, call.ancestor_directories());
    let workspace = Workspace { own, ancestors };
    let (own, ancestors, roots) = (workspace.own.clone(), workspace.ancestors.clone(), roots.to_vec());
    let linked = tokio::task::spawn_blocking(move || {
        roots
            .iter()
            .filter_map(|root| Some((root, root.file_name()?)))
            .try_for_each(|(root, name)| link(root, &own.join(name)))?;
        ancestors.iter().rev().try_for_each(|from| link_entries(from, &own))
    });
    linked.await.map_err(io::Error::other)??;
    Ok(workspace)
}

/// Links to the entries of a directory.
fn link_entries(from: &Path, to: &Path) -> io::Result<()> {
    fs::read_dir(from)?.take(LINKS).try_for_each(|entry| {
        let entry = entry?;
        link(&entry.path(), &to.join(entry.file_name()))
    })
}

/// Makes a link, unless there is already an entry of that name.
fn link(from: &Path, to: &Path) -> io::Result<()> {
    match symlink(from, to) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

impl Workspace {
    /// Returns the workspaces of the thread and of its ancestors.
    pub(super) fn all(&self) -> Vec<PathBuf> {
        self.ancestors.iter().chain([&self.own]).cloned().collect()
    }

    /// Returns the working directory of a command. It is in a workspace or in a root.
    pub(super) fn directory(&self, cwd: Option<&str>, roots: &[PathBuf]) -> Result<PathBuf> {
        let Some(cwd) = cwd else { return Ok(self.own.clone()) };
        let refused = |why: String| Error::new(format!("cwd {cwd:?} cannot be used: {why}"));
        let path = self.own.join(cwd).canonicalize().map_err(|error| refused(error.to_string()))?;
        let all = self.all().into_iter().chain(roots.iter().cloned());
        let mut permitted = all.filter_map(|root| root.canonicalize().ok());
        if !permitted.any(|root| path.starts_with(root)) {
            return Err(refused("it is outside the workspace; use a path below it".into()));
        }
        if path.is_dir() { Ok(path) } else { Err(refused("it is not a directory".into())) }
    }
}
