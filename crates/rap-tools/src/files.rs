//! `read_file`, `write_file`, `list_files`, `search_files` and `watch_files`, within configured directories.
//!
//! Every path is opened relative to a root, step by step, so that no link and no `..` leads out of it.

mod roots;
mod search;
mod watch;

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use cap_std::fs::{Dir, File, OpenOptions, OpenOptionsExt};
use rap_tool::prelude::*;
use serde_json::json;

use crate::{Error as StartError, Options};
use roots::{RootedPath, Roots};

/// Largest file that is read or written, in bytes.
const FILE_BYTES: u64 = 1024 * 1024;
/// Maximum number of entries that are listed.
const ENTRIES: usize = 1000;

/// Reads a text file.
#[derive(Deserialize, JsonSchema)]
struct ReadFile {
    /// Path of the file.
    path: String,
}

/// Writes a text file as a whole, and creates missing directories. A reader sees the old or the new content, nothing in
/// between.
#[derive(Deserialize, JsonSchema)]
struct WriteFile {
    /// Path of the file.
    path: String,
    /// The new content.
    #[schemars(length(max = 1_048_576))]
    content: String,
}

/// Lists the entries of a directory.
#[derive(Deserialize, JsonSchema)]
struct ListFiles {
    /// Path of the directory; "." is the top.
    path: String,
}

/// Searches the contents of text files by a regular expression. Returns lines with the path, the line number and the
/// line. Large and binary files and .git are skipped.
#[derive(Deserialize, JsonSchema)]
struct SearchFiles {
    /// Path of a directory or a file.
    path: String,
    /// Regular expression, such as fn \w+_test.
    #[schemars(length(min = 1, max = 1000))]
    pattern: String,
}

/// Subscribes you to changes of files: an event says which were created, changed and deleted. .git is not watched.
#[derive(Deserialize, JsonSchema)]
struct WatchFiles {
    /// Path of a directory or a file.
    path: String,
    /// Glob pattern of the files to watch, such as src/**/*.rs, relative to the path; all files by default.
    #[schemars(length(max = 1000))]
    glob: Option<String>,
}

pub(crate) fn server(options: &Options) -> Result<ToolServer, StartError> {
    let roots = Arc::new(Roots::open(options)?);
    let watched = Arc::clone(&roots);
    let watch = move |args: WatchFiles, subscribe: Subscribe| {
        watch::watch(Arc::clone(&watched), args.path, args.glob, subscribe)
    };
    Ok(ToolServer::new("files")
        .description("Reads, writes and watches files.")
        .offer(
            blocking("read_file", &roots, |roots, args: ReadFile| read(&roots.resolve(&args.path)?))
                .read_only(),
        )
        .offer(
            blocking("write_file", &roots, |roots, args: WriteFile| {
                write(&roots.resolve(&args.path)?, &args.content)
            })
            .destructive()
            .idempotent()
            .restartable(),
        )
        .offer(
            blocking("list_files", &roots, |roots, args: ListFiles| list(&roots.resolve(&args.path)?))
                .read_only(),
        )
        .offer(
            blocking("search_files", &roots, |roots, args: SearchFiles| {
                search::search(&roots.resolve(&args.path)?, &args.pattern)
            })
            .read_only(),
        )
        .offer(Tool::subscription("watch_files", watch).read_only().without_scrubbing()))
}

/// Creates a tool that blocks its thread. Reading can be repeated, so such tools run again after a restart.
fn blocking<A>(name: &str, roots: &Arc<Roots>, run: fn(&Roots, A) -> Result<String>) -> Tool
where
    A: serde::de::DeserializeOwned + JsonSchema + Send + 'static,
{
    let roots = Arc::clone(roots);
    let handler = move |args: A, _: Call| {
        let roots = Arc::clone(&roots);
        async move {
            let done = tokio::task::spawn_blocking(move || run(&roots, args)).await;
            done.map_err(|_| Error::new("the tool failed unexpectedly"))?
        }
    };
    // An agent edits what it has read, so it needs the exact text.
    Tool::new(name, handler).restartable().without_scrubbing()
}

fn read(rooted: &RootedPath<'_>) -> Result<String> {
    let kind = rooted.metadata()?;
    if !kind.is_file() {
        return Err(rooted.wrong("it is not a file; use list_files for a directory"));
    }
    if kind.len() > FILE_BYTES {
        return Err(
            rooted.wrong(&format!("it has {} bytes, more than {FILE_BYTES}; use search_files", kind.len()))
        );
    }
    let file = open_file(rooted.dir, &rooted.path).map_err(|error| rooted.failed(&error))?;
    let mut content = Vec::new();
    file.take(FILE_BYTES).read_to_end(&mut content).map_err(|error| rooted.failed(&error))?;
    String::from_utf8(content).map_err(|_| rooted.wrong("it is not UTF-8 text"))
}

/// Opens a file for reading. Anything else is an error: opening a pipe would wait until somebody writes to it, without end
/// and on a thread that others need.
fn open_file(dir: &Dir, path: &Path) -> io::Result<File> {
    let without_waiting = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = dir.open_with(path, OpenOptions::new().read(true).custom_flags(without_waiting))?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

fn write(rooted: &RootedPath<'_>, content: &str) -> Result<String> {
    if content.len() as u64 > FILE_BYTES {
        return Err(rooted.wrong(&format!("the content has more than {FILE_BYTES} bytes")));
    }
    let Some(name) = rooted.path.file_name() else {
        return Err(rooted.wrong("it is not the path of a file"));
    };
    let parent = rooted.path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent {
        rooted.dir.create_dir_all(parent).map_err(|error| rooted.failed(&error))?;
    }
    let dir = rooted.dir.open_dir(parent.unwrap_or(Path::new("."))).map_err(|error| rooted.failed(&error))?;
    let existing = dir.symlink_metadata(name).ok();
    if existing.as_ref().is_some_and(|existing| !existing.is_file()) {
        return Err(rooted.wrong("something other than a file has this path"));
    }
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(std::io::Error::other)?;
    let new = format!(".rap-{:016x}.new", u64::from_le_bytes(random));
    let written = (|| {
        let mut file = dir.open_with(&new, OpenOptions::new().write(true).create_new(true))?;
        file.write_all(content.as_bytes())?;
        if let Some(existing) = &existing {
            file.set_permissions(existing.permissions())?;
        }
        file.sync_all()?;
        dir.rename(&new, &dir, name)
    })();
    if let Err(error) = written {
        // Remove the temporary file. An error here would only hide the first one.
        dir.remove_file(&new).ok();
        return Err(rooted.failed(&error));
    }
    Ok(format!("wrote {} bytes to {}", content.len(), rooted.shown))
}

fn list(rooted: &RootedPath<'_>) -> Result<String> {
    let entries = rooted.dir.read_dir(&rooted.path).map_err(|error| rooted.failed(&error))?;
    let mut listed = Vec::new();
    let mut truncated = false;
    for entry in entries {
        let entry = entry.map_err(|error| rooted.failed(&error))?;
        if listed.len() == ENTRIES {
            truncated = true;
            break;
        }
        let metadata = entry.metadata().map_err(|error| rooted.failed(&error))?;
        let kind = if metadata.is_dir() {
            "directory"
        } else if metadata.is_symlink() {
            "link"
        } else if metadata.is_file() {
            "file"
        } else {
            "other"
        };
        let name = entry.file_name().to_string_lossy().into_owned();
        listed.push((name, kind, metadata.len()));
    }
    listed.sort();
    let entries: Vec<_> = listed
        .into_iter()
        .map(|(name, kind, size)| match kind {
            "file" => json!({"name": name, "type": kind, "size": size}),
            _ => json!({"name": name, "type": kind}),
        })
        .collect();
    Ok(json!({"entries": entries, "truncated": truncated}).to_string())
}

/// Visits the files below a path, without those of `.git`, with their paths relative to it. Links are not followed.
/// `visit` returns false to stop.
fn walk(rooted: &RootedPath<'_>, mut visit: impl FnMut(&Dir, &Path, &str) -> Result<bool>) -> Result<()> {
    let kind = rooted.metadata()?;
    if !kind.is_dir() && !kind.is_file() {
        return Err(rooted.wrong("it is neither a file nor a directory"));
    }
    if !kind.is_dir() {
        let name =
            rooted.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        return visit(rooted.dir, &rooted.path, &name).map(drop);
    }
    let top = rooted.dir.open_dir(&rooted.path).map_err(|error| rooted.failed(&error))?;
    let mut waiting = vec![(top, String::new())];
    while let Some((dir, prefix)) = waiting.pop() {
        let mut entries: Vec<_> = dir
            .entries()
            .map_err(|error| rooted.failed(&error))?
            .filter_map(std::result::Result::ok)
            .collect();
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.file_name()));
        let mut files = Vec::new();
        for entry in entries {
            let (name, Ok(kind)) = (entry.file_name(), entry.file_type()) else { continue };
            let shown = format!("{prefix}{}", name.to_string_lossy());
            if kind.is_dir() && name != ".git" && waiting.len() < ENTRIES {
                // A directory that cannot be opened or was just deleted is left out.
                waiting.extend(entry.open_dir().ok().map(|dir| (dir, format!("{shown}/"))));
            } else if kind.is_file() {
                files.push((name, shown));
            }
        }
        for (name, shown) in files.into_iter().rev() {
            if !visit(&dir, Path::new(&name), &shown)? {
                return Ok(());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn options(root: PathBuf) -> Options {
        Options { roots: vec![root], ..Options::new("unused") }
    }

    /// A thread that waits for the other end of a pipe would be lost, and after some hundred calls the server with it.
    #[test]
    fn nothing_waits_for_the_other_end_of_a_pipe() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        std::fs::write(dir.path().join("text"), "needle\n").unwrap();
        let roots = Roots::open(&options(dir.path().to_owned())).unwrap();
        let (done, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let rooted = roots.resolve("pipe").unwrap();
            assert!(read(&rooted).is_err());
            assert!(search::search(&rooted, "x").is_err());
            assert!(open_file(rooted.dir, &rooted.path).is_err());
            let all = search::search(&roots.resolve(".").unwrap(), "needle").unwrap();
            done.send(all).unwrap();
        });
        let found = ended.recv_timeout(std::time::Duration::from_secs(30)).expect("something waits");
        assert_eq!(found, "text:1: needle");
    }
}
