//! Files of threads that move to another tool server: reading them in parts, and writing the parts.
//!
//! Parts come from another server. Each is written below the directory of its thread: its path has no `..`, and no
//! directory on its way is a link.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use rap_protocol::ThreadId;
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Maximum number of files and directories of a session.
pub(crate) const FILES: usize = 100_000;
/// Maximum size of the files of a session, in bytes.
pub(crate) const BYTES: u64 = 4 * 1024 * 1024 * 1024;
/// Maximum number of bytes of a file in one part, and at which a page of parts is complete.
pub(crate) const PART_BYTES: usize = 512 * 1024;
/// Maximum number of parts in a page.
pub(crate) const PARTS: usize = 200;
/// Bits of a file's mode that are kept.
const MODE: u32 = 0o777;

/// Bytes that are base64 in JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Base64(pub(crate) Vec<u8>);

impl Serialize for Base64 {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&BASE64_STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Base64, D::Error> {
        let text = String::deserialize(from)?;
        BASE64_STANDARD.decode(text).map(Base64).map_err(serde::de::Error::custom)
    }
}

/// A part of a file, or a whole directory entry of another kind.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Part {
    pub(crate) thread: ThreadId,
    /// Path relative to the directory of the thread, which itself has the empty path.
    pub(crate) path: Base64,
    #[serde(flatten)]
    pub(crate) content: Content,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Content {
    Directory {
        mode: u32,
    },
    File {
        /// Position of the bytes in the file.
        from: u64,
        bytes: Base64,
        /// Mode and time of the last change, with the last part.
        end: Option<(u32, SystemTime)>,
    },
    Link {
        to: Base64,
    },
}

/// A directory entry that moves.
pub(crate) struct Found {
    /// Path relative to the directory of the thread.
    pub(crate) path: PathBuf,
    pub(crate) kind: FoundKind,
}

pub(crate) enum FoundKind {
    Directory { mode: u32 },
    File,
    Link { to: PathBuf },
}

/// Size of what was found so far.
#[derive(Default)]
pub(crate) struct Total {
    files: usize,
    bytes: u64,
}

/// Returns the entries of a directory, parents first, and links last. Absolute links, sockets and the like are left out:
/// they mean nothing on another machine.
pub(crate) fn find(directory: &Path, total: &mut Total) -> io::Result<Vec<Found>> {
    let (mut found, mut links) = (Vec::new(), Vec::new());
    let mut directories = vec![PathBuf::new()];
    while let Some(path) = directories.pop() {
        let mode = fs::metadata(directory.join(&path))?.permissions().mode() & MODE;
        found.push(Found { path: path.clone(), kind: FoundKind::Directory { mode } });
        for entry in fs::read_dir(directory.join(&path))? {
            let entry = entry?;
            let (kind, path) = (entry.file_type()?, path.join(entry.file_name()));
            total.files += 1;
            if kind.is_dir() {
                directories.push(path);
            } else if kind.is_file() {
                total.bytes += entry.metadata()?.len();
                found.push(Found { path, kind: FoundKind::File });
            } else if kind.is_symlink() {
                let to = fs::read_link(entry.path())?;
                if to.is_relative() {
                    links.push(Found { path, kind: FoundKind::Link { to } });
                }
            }
            if total.files > FILES || total.bytes > BYTES {
                let why = format!("the threads have more than {FILES} files or {BYTES} bytes in files");
                return Err(io::Error::other(why));
            }
        }
    }
    found.extend(links);
    Ok(found)
}

/// Reads the next bytes of a file below the directory of its thread, and its mode and time at its end.
pub(crate) fn read_part(directory: &Path, path: &Path, from: u64) -> io::Result<Content> {
    let mut opened = open_below(directory, path, OFlags::RDONLY)?;
    opened.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    (&opened).take(PART_BYTES as u64).read_to_end(&mut bytes)?;
    let is_last = bytes.len() < PART_BYTES;
    let metadata = opened.metadata()?;
    let end = (metadata.permissions().mode() & MODE, metadata.modified()?.max(SystemTime::UNIX_EPOCH));
    Ok(Content::File { from, bytes: Base64(bytes), end: is_last.then_some(end) })
}

/// Writes everything in the file system of a directory to disk. A call for each file would take minutes for a large session.
pub(crate) fn sync(directory: &Path) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::fs::syncfs(File::open(directory)?)?;
    #[cfg(not(target_os = "linux"))]
    rustix::fs::sync();
    Ok(())
}

/// Writes a part below the directory of its thread, which exists. It is not on disk before [`sync`].
pub(crate) fn write_part(directory: &Path, path: &Base64, content: &Content) -> io::Result<()> {
    let relative = Path::new(std::ffi::OsStr::from_bytes(&path.0));
    let path = place(directory, relative)?;
    match content {
        Content::Directory { mode } => {
            // The owner can always write, or nothing could be written into it.
            let made = DirBuilder::new().mode(mode & MODE | 0o700).create(&path);
            match made {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_directory(&path) => Ok(()),
                made => made,
            }
        }
        Content::File { from, bytes, end } => {
            let how = if *from == 0 { OFlags::CREATE | OFlags::EXCL } else { OFlags::APPEND };
            let mut file = open_below(directory, relative, OFlags::WRONLY | how)?;
            if file.metadata()?.len() != *from {
                return Err(io::Error::other("a part of a file is missing"));
            }
            file.write_all(&bytes.0)?;
            if let Some((mode, modified)) = end {
                file.set_permissions(Permissions::from_mode(mode & MODE))?;
                file.set_modified(*modified)?;
            }
            Ok(())
        }
        Content::Link { to } => {
            let to = PathBuf::from(std::ffi::OsString::from_vec(to.0.clone()));
            if to.is_absolute() {
                return Err(io::Error::other("an absolute link does not move"));
            }
            symlink(to, &path)
        }
    }
}

fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir())
}

fn refused() -> io::Error {
    io::Error::other("the path of a file leads out of the directory of its thread")
}

/// Opens a regular file below a directory. No part of its path is a link, even if a program that runs changes it at the
/// same time, and a pipe is not waited for.
fn open_below(directory: &Path, path: &Path, how: OFlags) -> io::Result<File> {
    let always = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut opened = File::open(directory)?;
    let mut names = path.components().peekable();
    while let Some(component) = names.next() {
        let Component::Normal(name) = component else { return Err(refused()) };
        let how = if names.peek().is_some() { OFlags::RDONLY | OFlags::DIRECTORY } else { how };
        opened = rustix::fs::openat(&opened, name, how | always, Mode::RUSR | Mode::WUSR)?.into();
    }
    if !opened.metadata()?.is_file() {
        return Err(io::Error::other("a file of a thread is not a regular file any more"));
    }
    Ok(opened)
}

/// Returns the path of an entry below a directory.
fn place(directory: &Path, relative: &Path) -> io::Result<PathBuf> {
    let mut place = directory.to_owned();
    for component in relative.components() {
        let Component::Normal(name) = component else { return Err(refused()) };
        if !is_directory(&place) {
            return Err(refused());
        }
        place.push(name);
    }
    Ok(place)
}

pub(crate) fn bytes_of(path: &Path) -> Base64 {
    Base64(path.as_os_str().as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(path: &str, content: Content) -> (Base64, Content) {
        (bytes_of(Path::new(path)), content)
    }

    fn file(text: &str) -> Content {
        let end = Some((0o640, SystemTime::UNIX_EPOCH));
        Content::File { from: 0, bytes: Base64(text.into()), end }
    }

    fn link(to: &str) -> Content {
        Content::Link { to: bytes_of(Path::new(to)) }
    }

    #[test]
    fn nothing_is_written_outside_of_the_directory_of_a_thread() {
        let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let write = |(path, content): (Base64, Content)| write_part(inside.path(), &path, &content);
        write(part("docs", Content::Directory { mode: 0o500 })).unwrap();
        write(part("docs/a", file("text"))).unwrap();
        // A link may lead anywhere, but nothing is written through it.
        let leads_out = format!("../{}", outside.path().file_name().unwrap().to_str().unwrap());
        write(part("out", link(&leads_out))).unwrap();
        write(part("docs/b", link("../../b"))).unwrap();
        let absolute = outside.path().join("x");
        for path in ["out/x", "../x", "docs/../../x", absolute.to_str().unwrap(), "docs/a/x", "docs/b"] {
            assert!(write(part(path, file("text"))).is_err(), "{path}");
        }
        assert!(write(part("c", link("/etc"))).is_err());
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
        assert!(!inside.path().with_file_name("x").exists() && !inside.path().with_file_name("b").exists());
        // A gap is noticed, and nothing is replaced.
        let second = Content::File { from: 9, bytes: Base64(b"more".to_vec()), end: None };
        assert!(write(part("docs/a", second)).is_err());
        assert!(write(part("docs/a", file("other"))).is_err());
        assert_eq!(fs::read_to_string(inside.path().join("docs/a")).unwrap(), "text");
    }

    #[test]
    fn no_part_is_written_or_read_through_a_link_or_waits_for_a_pipe() {
        let root = tempfile::tempdir().unwrap();
        let (inside, secret) = (root.path().join("thread"), root.path().join("secret"));
        fs::create_dir_all(inside.join("docs")).unwrap();
        fs::write(&secret, "secret").unwrap();
        fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
        symlink("../secret", inside.join("link")).unwrap();
        symlink("..", inside.join("up")).unwrap();
        let made = std::process::Command::new("mkfifo").arg(inside.join("pipe")).status().unwrap();
        assert!(made.success());
        let next = |from: usize| Content::File {
            from: from as u64,
            bytes: Base64(b" and more".to_vec()),
            end: Some((0o777, SystemTime::UNIX_EPOCH)),
        };
        // The second length is that of the link itself.
        for from in ["secret".len(), "../secret".len()] {
            for path in ["link", "up/secret", "../secret", "pipe", "docs", ""] {
                let (path, content) = part(path, next(from));
                assert!(write_part(&inside, &path, &content).is_err(), "{path:?}");
            }
        }
        for path in ["link", "up/secret", "../secret", "pipe", "docs", ""] {
            assert!(read_part(&inside, Path::new(path), 0).is_err(), "{path}");
        }
        assert_eq!(fs::read_to_string(&secret).unwrap(), "secret");
        assert_eq!(fs::metadata(&secret).unwrap().permissions().mode() & MODE, 0o600);
        // The next part of a file goes to its end.
        fs::write(inside.join("docs/a"), "text").unwrap();
        let (path, content) = part("docs/a", next(4));
        write_part(&inside, &path, &content).unwrap();
        assert_eq!(fs::read_to_string(inside.join("docs/a")).unwrap(), "text and more");
        assert!(matches!(
            read_part(&inside, Path::new("docs/a"), 4).unwrap(),
            Content::File { from: 4, bytes, end: Some((0o777, _)) } if bytes.0 == b" and more"
        ));
    }

    #[test]
    fn a_session_with_too_many_bytes_does_not_move() {
        let directory = tempfile::tempdir().unwrap();
        let large = File::create(directory.path().join("large")).unwrap();
        large.set_len(BYTES + 1).unwrap();
        assert!(find(directory.path(), &mut Total::default()).is_err());
        large.set_len(BYTES).unwrap();
        let mut total = Total::default();
        assert_eq!(find(directory.path(), &mut total).unwrap().len(), 2);
        // The bound is for all threads of a session together.
        fs::write(directory.path().join("small"), "x").unwrap();
        assert!(find(directory.path(), &mut total).is_err());
    }
}
