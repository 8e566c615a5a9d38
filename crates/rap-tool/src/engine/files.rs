//! Moves the directories of a session's threads to another tool server.
//!
//! They arrive in `arriving/SESSION` among the directories of threads, which no handler reads. They are moved to their final
//! paths when the caller at the destination asks about one of the threads, as calls are started then.
//!
//! The first page of calls announces a transfer with a random id. Its pages are accepted once and in order, and its files
//! are moved only if its last page has arrived, so that no directory in use is replaced by a part of itself or by an older
//! copy that somebody sends again. For the same reason, a session takes no transfer that began before another one whose
//! first page has arrived, and a server none that it has sent itself.

use std::collections::HashSet;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use rap_io::secret_box::Key;
use rap_protocol::{ThreadId, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::sync::OwnedMutexGuard;

use super::moving::{ArrivalRefused, WITHOUT_CALLER};
use super::{Engine, lock};
use crate::auth::Caller;
use crate::directory::{Owner, owner_file, remove_tree};
use crate::error::Error;
use crate::moved_files::{self, Content, Found, FoundKind, PART_BYTES, PARTS, Part, Total, bytes_of};

/// Path to which a tool server sends the files of a session, relative to the base URL of the destination.
pub(crate) const FILES_PATH: &str = "/import_files";
/// Directory of what has arrived, among the directories of threads.
const ARRIVING: &str = "arriving";
/// File with the progress of a transfer, in the directory of its session.
const TRANSFER: &str = "transfer";
/// Ending of the file with the last transfer of a session that has begun, and time that it is kept. Pages are refused much
/// earlier.
const BEGUN: &str = "begun";
const BEGUN_FOR: Duration = Duration::from_secs(60 * 60);
const SEALED: &[u8] = b"rap: files of a session that moves";

/// Parts of the files of a session, as they are sent.
#[derive(Serialize, Deserialize)]
struct FilePage {
    at: Timestamp,
    session: ThreadId,
    /// Identifies the caller to a server that knows it; see `Callers::label`.
    caller: Option<String>,
    /// Id of the transfer, and number of this page in it.
    transfer: String,
    number: u64,
    /// True for the last page of the transfer.
    last: bool,
    /// Owners of the directories that the parts belong to.
    owners: Vec<Owner>,
    parts: Vec<Part>,
}

/// Progress of a transfer, in the directory of what has arrived of it.
#[derive(Serialize, Deserialize)]
struct Transfer {
    id: String,
    /// Number of pages of calls that have arrived.
    #[serde(default)]
    calls: u64,
    /// Number of pages of files that have arrived.
    pages: u64,
    complete: bool,
}

impl Transfer {
    fn of(directory: &Path) -> Option<Transfer> {
        serde_json::from_slice(&std::fs::read(directory.join(TRANSFER)).ok()?).ok()
    }

    fn write(&self, directory: &Path) -> io::Result<()> {
        std::fs::write(directory.join(TRANSFER), serde_json::to_vec(self)?)
    }

    /// Begins a transfer, in place of an earlier one of the session. Returns false if the transfer has begun before, or
    /// another one later.
    fn begin(directory: &Path, id: &str, at: Timestamp) -> io::Result<bool> {
        let has_nothing = |transfer: Transfer| transfer.id == id && transfer.calls == 0;
        match Begun::of(directory) {
            // The first page could not be stored, and is sent again.
            Some(last) if last.id == id && Transfer::of(directory).is_some_and(has_nothing) => {}
            Some(last) if last.id == id || last.at >= at => return Ok(false),
            _ => {}
        }
        remove_tree(directory)?;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let begun = serde_json::to_vec(&Begun { id: id.to_owned(), at })?;
        std::fs::write(directory.with_extension(BEGUN), begun)?;
        Transfer { id: id.to_owned(), calls: 0, pages: 0, complete: false }.write(directory)?;
        Ok(true)
    }

    /// Returns true if a page of calls is the next one of the transfer.
    fn has_next(directory: &Path, id: &str, number: u64) -> bool {
        Transfer::of(directory)
            .is_some_and(|transfer| transfer.id == id && transfer.calls == number && transfer.pages == 0)
    }
}

/// The last transfer of a session that has begun.
#[derive(Serialize, Deserialize)]
struct Begun {
    id: String,
    /// Time of its first page, by the clock of its sender.
    at: Timestamp,
}

impl Begun {
    fn of(directory: &Path) -> Option<Begun> {
        serde_json::from_slice(&std::fs::read(directory.with_extension(BEGUN)).ok()?).ok()
    }
}

/// The right to store a page of calls. No other page of any transfer is stored meanwhile.
pub(super) struct CallsTurn {
    turn: OwnedMutexGuard<()>,
    directory: PathBuf,
}

impl CallsTurn {
    /// Counts the page, which was stored.
    pub(super) async fn finish(self) -> io::Result<()> {
        let CallsTurn { turn, directory } = self;
        let count = move || match Transfer::of(&directory) {
            Some(transfer) => Transfer { calls: transfer.calls + 1, ..transfer }.write(&directory),
            None => Err(io::Error::other("the transfer has ended")),
        };
        in_turn(turn, count).await.map(|_| ())
    }
}

/// Refuses a page that cannot be written now.
pub(super) fn unwritable(error: io::Error) -> ArrivalRefused {
    tracing::warn!(%error, "files of a session that moves here cannot be written");
    ArrivalRefused::Unavailable
}

/// Sessions whose files have arrived and are not at their final paths yet.
pub(super) struct ArrivedFiles {
    directory: PathBuf,
    /// Keys of the sessions.
    sessions: Mutex<HashSet<String>>,
    /// Held while files are written, or moved to their final paths.
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl ArrivedFiles {
    /// Finds what has arrived before.
    pub(super) fn open(directories: &Path) -> ArrivedFiles {
        let directory = directories.join(ARRIVING);
        let names = std::fs::read_dir(&directory).into_iter().flatten().flatten();
        let names = names.filter_map(|entry| entry.file_name().into_string().ok());
        let sessions = names.filter(|name| !name.contains('.')).collect();
        ArrivedFiles { directory, sessions: Mutex::new(sessions), turn: Arc::default() }
    }

    fn contains(&self, session: &str) -> bool {
        lock(&self.sessions).contains(session)
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// Does work in turn. The turn lasts until the work is done, even if nobody waits for it any more.
async fn in_turn<T: Send + 'static>(
    turn: OwnedMutexGuard<()>,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<(OwnedMutexGuard<()>, T)> {
    blocking(move || {
        let done = work()?;
        Ok((turn, done))
    })
    .await
}

fn unreadable(error: &io::Error) -> Error {
    Error::new(format!("the files of the session cannot be read: {error}"))
}

impl Engine {
    /// Copies the directories of a session's threads to another server.
    pub(super) async fn move_files(
        self: &Arc<Self>,
        key: &Key,
        caller: &Caller,
        session: &ThreadId,
        transfer: &str,
        base: &str,
    ) -> Result<(), Error> {
        let (engine, owner, id) = (Arc::clone(self), caller.clone(), session.clone());
        let find = move || {
            let mut total = Total::default();
            let directories = engine.session_directories(&owner, &id)?;
            let found = directories.into_iter().map(|(owner, directory)| {
                let entries = moved_files::find(&directory, &mut total)?;
                Ok((owner, directory, entries))
            });
            found.collect::<io::Result<Vec<_>>>()
        };
        let threads = blocking(find).await.map_err(|error| unreadable(&error))?;
        if threads.is_empty() {
            return Ok(());
        }
        let to = (base, FILES_PATH);
        let page = |number| FilePage {
            at: self.now(),
            session: session.clone(),
            caller: self.callers.label(caller, key),
            transfer: transfer.to_owned(),
            number,
            last: false,
            owners: Vec::new(),
            parts: Vec::new(),
        };
        let (mut next, mut bytes, mut files) = (page(0), 0, 0);
        for (owner, directory, entries) in threads {
            next.owners.push(owner.clone());
            for entry in entries {
                let mut from = Some(0);
                while let Some(position) = from {
                    let (content, size) = content(&directory, &entry, position).await?;
                    from = is_continued(&content).then_some(position + size as u64);
                    let (thread, path) = (owner.thread.clone(), bytes_of(&entry.path));
                    next.parts.push(Part { thread, path, content });
                    bytes += size;
                    if bytes >= PART_BYTES || next.parts.len() >= PARTS {
                        let following = page(next.number + 1);
                        let full = std::mem::replace(&mut next, following);
                        next.owners.push(owner.clone());
                        self.send_sealed(key, to, &full, SEALED).await?;
                        bytes = 0;
                    }
                }
                files += 1;
            }
        }
        next.last = true;
        self.send_sealed(key, to, &next, SEALED).await?;
        tracing::info!(?session, files, to = base, "the files of a session were copied to another server");
        Ok(())
    }

    /// Stores files that another server has sent.
    pub(crate) async fn receive_files(self: &Arc<Self>, body: Bytes) -> Result<(), ArrivalRefused> {
        let (page, key) = self.open_sealed::<FilePage>(body, SEALED).await?;
        self.check_age(page.at)?;
        let caller = self.callers.with_label(page.caller.as_deref(), &key);
        let caller = caller.ok_or(ArrivalRefused::Invalid(WITHOUT_CALLER))?;
        let session = self.thread(&caller, &page.session).key().to_owned();
        let directory = self.arrived_files.directory.join(&session);
        let engine = Arc::clone(self);
        let turn = Arc::clone(&self.arrived_files.turn).lock_owned().await;
        let written = in_turn(turn, move || write_page(&engine, &caller, &directory, &page)).await;
        if let Err(error) = written {
            tracing::warn!(%error, "files of a session that moves here could not be written");
            return Err(ArrivalRefused::Invalid("the files cannot be written; see the log of this server"));
        }
        Ok(())
    }

    /// Checks that a page of calls is the next one of its transfer. The first page begins it, and replaces the files of the
    /// session that have arrived before.
    pub(super) async fn next_calls(
        &self,
        session: String,
        (transfer, number): (&str, u64),
        at: Timestamp,
    ) -> Result<CallsTurn, ArrivalRefused> {
        if transfer.is_empty()
            || transfer.len() > 64
            || !transfer.bytes().all(|byte| byte.is_ascii_hexdigit())
        {
            return Err(ArrivalRefused::Invalid("the id of the transfer is not valid"));
        }
        let turn = Arc::clone(&self.arrived_files.turn).lock_owned().await;
        let (directory, id) = (self.arrived_files.directory.join(&session), transfer.to_owned());
        let is_new = lock(&self.arrived_files.sessions).insert(session.clone());
        let place = directory.clone();
        let is_next = move || match number {
            0 => Transfer::begin(&place, &id, at),
            number => Ok(Transfer::has_next(&place, &id, number)),
        };
        let (turn, is_next) = in_turn(turn, is_next).await.map_err(unwritable)?;
        if !is_next {
            if is_new {
                lock(&self.arrived_files.sessions).remove(&session);
            }
            return Err(ArrivalRefused::Invalid(
                "the page is not the next one of its transfer, or a later transfer of the session has begun",
            ));
        }
        Ok(CallsTurn { turn, directory })
    }

    /// Moves the files of a session that has arrived to their places. The caller has the session by now, since it asks.
    pub(super) async fn place_files(self: &Arc<Self>, caller: &Caller, session: &ThreadId) -> io::Result<()> {
        let key = self.thread(caller, session).key().to_owned();
        let arrived = &self.arrived_files;
        if !arrived.contains(&key) {
            return Ok(());
        }
        let turn = Arc::clone(&arrived.turn).lock_owned().await;
        if !arrived.contains(&key) {
            return Ok(());
        }
        let (from, to) = (arrived.directory.join(&key), self.directories.clone());
        let (turn, placed) = in_turn(turn, move || place_complete(&from, &to)).await?;
        let Some(placed) = placed else {
            tracing::warn!(
                ?session,
                "the files of a session have not arrived completely, so they are not used"
            );
            return Ok(());
        };
        let (count, owner, now) = (placed.len(), caller.clone(), self.now());
        let known = self.write_for(caller, move |engine, db| {
            placed.iter().try_for_each(|thread| engine.journal.insert_thread(db, &owner, thread, now))
        });
        known.await.ok_or_else(|| io::Error::other("the journal cannot be written"))?;
        let from = arrived.directory.join(&key);
        let (_turn, ()) = in_turn(turn, move || remove_tree(&from)).await?;
        lock(&arrived.sessions).remove(&key);
        tracing::info!(?session, threads = count, "the files of a session that was moved here are in use");
        Ok(())
    }

    /// Deletes the files of a thread that is closed before it came into use.
    pub(super) async fn discard_files(&self, caller: &Caller, thread: &ThreadId) {
        let arrived = &self.arrived_files;
        if lock(&arrived.sessions).is_empty() {
            return;
        }
        let thread = self.thread(caller, thread).key().to_owned();
        let turn = Arc::clone(&arrived.turn).lock_owned().await;
        let sessions: Vec<String> = lock(&arrived.sessions).iter().cloned().collect();
        let (root, directory) = (sessions.contains(&thread), arrived.directory.clone());
        let own = thread.clone();
        let removed = in_turn(turn, move || {
            if root {
                return remove_tree(&directory.join(own));
            }
            for session in sessions {
                let path = directory.join(session).join(&own);
                remove_tree(&path)?;
                std::fs::remove_file(owner_file(&path)).ok();
            }
            Ok(())
        });
        match removed.await {
            Ok((_turn, ())) if root => _ = lock(&arrived.sessions).remove(&thread),
            Ok(_) => {}
            Err(error) => tracing::warn!(%error, "the files of a closed thread could not be removed"),
        }
    }

    /// Deletes files that have arrived before `before` and that nobody has asked about.
    pub(super) async fn delete_arrived_files(&self, before: Timestamp) {
        let arrived = &self.arrived_files;
        let sessions: Vec<String> = lock(&arrived.sessions).iter().cloned().collect();
        for session in sessions {
            let turn = Arc::clone(&arrived.turn).lock_owned().await;
            let directory = arrived.directory.join(&session);
            let removed = in_turn(turn, move || {
                let changed = match std::fs::metadata(&directory) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
                    found => found?.modified()?,
                };
                let age = changed.duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap_or_default();
                let is_old = i64::try_from(age.as_millis()).is_ok_and(|millis| millis < before.0);
                if is_old {
                    remove_tree(&directory)?;
                }
                Ok(is_old)
            });
            match removed.await {
                Ok((_, false)) => {}
                Ok((_turn, true)) => _ = lock(&arrived.sessions).remove(&session),
                Err(error) => tracing::warn!(%error, "old files of a session could not be removed"),
            }
        }
        let directory = arrived.directory.clone();
        if let Err(error) = blocking(move || delete_begun(&directory)).await {
            tracing::warn!(%error, "files about old transfers could not be removed");
        }
    }
}

/// Deletes the files that mark old transfers as over.
fn delete_begun(arriving: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(arriving).into_iter().flatten() {
        let path = entry?.path();
        let is_begun = path.extension().is_some_and(|ending| ending == BEGUN);
        if is_begun && path.metadata()?.modified()?.elapsed().is_ok_and(|age| age > BEGUN_FOR) {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// Reads an entry from a position on. Returns what is sent and its size.
async fn content(directory: &Path, entry: &Found, from: u64) -> Result<(Content, usize), Error> {
    Ok(match &entry.kind {
        FoundKind::Directory { mode } => (Content::Directory { mode: *mode }, 0),
        FoundKind::Link { to } => (Content::Link { to: bytes_of(to) }, 0),
        FoundKind::File => {
            let (directory, path) = (directory.to_owned(), entry.path.clone());
            let part = blocking(move || moved_files::read_part(&directory, &path, from)).await;
            let part = part.map_err(|error| unreadable(&error))?;
            let size = match &part {
                Content::File { bytes, .. } => bytes.0.len(),
                _ => 0,
            };
            (part, size)
        }
    })
}

/// Returns true if further parts of a file follow.
fn is_continued(content: &Content) -> bool {
    matches!(content, Content::File { end: None, .. })
}

/// Writes the parts of a page into the directory of a session that arrives.
fn write_page(engine: &Engine, caller: &Caller, directory: &Path, page: &FilePage) -> io::Result<()> {
    let next = |transfer: &Transfer| {
        transfer.id == page.transfer && transfer.pages == page.number && !transfer.complete
    };
    let transfer = Transfer::of(directory).filter(next);
    let transfer = transfer.ok_or_else(|| io::Error::other("a page is not the next one of its transfer"))?;
    let place = |thread: &ThreadId| directory.join(engine.thread(caller, thread).key());
    for owner in &page.owners {
        if owner.session != page.session {
            return Err(io::Error::other("a directory belongs to another session"));
        }
        let path = place(&owner.thread);
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        owner.write(&path)?;
    }
    for part in &page.parts {
        moved_files::write_part(&place(&part.thread), &part.path, &part.content)?;
    }
    Transfer { pages: page.number + 1, complete: page.last, ..transfer }.write(directory)?;
    if page.last {
        moved_files::sync(directory)?;
    }
    Ok(())
}

/// Moves the directories of a transfer to their places, if it is complete. Returns their threads, or `None` if they
/// have to stay.
fn place_complete(from: &Path, to: &Path) -> io::Result<Option<Vec<ThreadId>>> {
    match Transfer::of(from) {
        Some(transfer) if transfer.complete => place_all(from, to).map(Some),
        // The session has no files.
        Some(transfer) if transfer.pages == 0 => Ok(Some(Vec::new())),
        _ => Ok(None),
    }
}

/// Moves directories to their places. Returns their threads. Can be repeated.
fn place_all(from: &Path, to: &Path) -> io::Result<Vec<ThreadId>> {
    let mut threads = Vec::new();
    for entry in std::fs::read_dir(from)? {
        let file = entry?.path();
        let (directory, is_owner) =
            (file.with_extension(""), file.extension().is_some_and(|end| end == "json"));
        let Some((owner, name)) = Owner::of(&directory).filter(|_| is_owner).zip(directory.file_name())
        else {
            continue;
        };
        let place = to.join(name);
        if directory.exists() {
            // An older copy of the same directory is replaced. Any other belongs to a thread that is in use here.
            match Owner::of(&place) {
                Some(present) if present.id == owner.id => remove_tree(&place)?,
                _ if place.exists() => {
                    tracing::warn!(thread = ?owner.thread, "the directory of a thread that arrived exists already");
                    continue;
                }
                _ => {}
            }
            std::fs::rename(&directory, &place)?;
            owner.write(&place)?;
        }
        threads.push(owner.thread);
    }
    Ok(threads)
}
