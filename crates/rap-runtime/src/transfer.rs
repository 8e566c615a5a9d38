//! Export and import of sessions by file, without a running runtime.
//!
//! An export reads one snapshot of the database, even while a runtime uses it. An import puts a session into use in one
//! transaction or not at all. Nothing is imported twice.

use std::io::{BufRead, Read, Write};
use std::sync::Arc;

use rap_agent::{CallState, Input};
use rap_io::keyring::Keyring;
use rap_io::secret_box::Key;
use rap_protocol::{CallId, Secret, ThreadId};
use tokio::sync::mpsc;

use crate::engine::{self, StartError};
use crate::settings::{Database, PostgresDatabase, Settings};
use crate::store::postgres::PostgresStore;
use crate::store::sqlite::{SqliteReader, SqliteStore};
use crate::store::transfer::{
    CALL, Checker, Export, Header, LINE_BYTES, LineReader, LineWriter, Origin, PAGE_ROWS, Record, VERSION,
};
use crate::store::{self, Message, MessageClass, Store, Target, ThreadKey, Visibility};
use crate::world::{Clock, SystemClock};

/// Number of records that wait between the database and the file.
const QUEUED_RECORDS: usize = 16;
/// Size at which a page of records is written, in bytes.
const PAGE_BYTES: usize = 1024 * 1024;
/// Size up to which a session is kept in memory while it is checked, in bytes.
const CHECKED_BYTES: usize = 16 * 1024 * 1024;
/// The result of a call whose own result cannot arrive any more.
const ENDED: &str = "Error: the session was moved to another server, which cannot receive the result of this call. \
                     The call may have been carried out; check before you repeat it";

/// Reason why sessions could not be exported or imported.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The database cannot be opened.
    #[error(transparent)]
    Open(#[from] StartError),
    /// There is no such session.
    #[error("no session `{0}`: expected the id of a thread without a parent; list them with: rap threads ls")]
    NoSession(String),
    /// Stored rows of the session are damaged.
    #[error("session {session} is damaged and cannot be exported: {why}. `rap doctor` says what can be done")]
    Damaged {
        /// Id of the session.
        session: String,
        /// The damage.
        why: String,
    },
    /// A line of the file cannot be used.
    #[error("line {line}: {why}")]
    Line {
        /// Number of the line, from 1.
        line: u64,
        /// The reason.
        why: String,
    },
    /// The database has another thread with the id of a thread of the session.
    #[error(
        "session {0} was not imported: the database already has another thread with the id of one of its threads"
    )]
    Exists(String),
    /// The results of open calls could not arrive.
    #[error(
        "session {session} has {calls} open calls and subscriptions whose results cannot arrive here, because this \
         server has another key. Use the key of the old server (its store.key, or the file rap.db.key), or end those \
         calls with --end-calls: each gets an error as its result, and the agent decides what to do"
    )]
    OtherKey {
        /// Id of the session.
        session: String,
        /// Number of calls and subscriptions.
        calls: usize,
    },
    /// The file cannot be read or written.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The database failed.
    #[error("{0}")]
    Store(String),
}

impl From<store::Error> for TransferError {
    fn from(error: store::Error) -> TransferError {
        TransferError::Store(error.with_sources())
    }
}

/// Treatment of open calls whose results cannot arrive, because this server has another key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenCalls {
    /// A session with such calls is refused.
    Keep,
    /// Each of them ends with an error result.
    End,
}

/// A session that was imported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// Id of the session.
    pub session: String,
    /// True if it was here before. Nothing was changed then.
    pub present: bool,
    /// Number of open calls and active subscriptions that continue.
    pub open_calls: usize,
    /// Number of open calls and active subscriptions that were ended.
    pub ended_calls: usize,
    /// Base of the callback URLs of the open calls, if it is not the one of this server.
    pub other_url: Option<String>,
}

/// Sessions that were written to a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exported {
    /// Number of sessions in the file.
    pub sessions: u64,
    /// Sessions that are not in the file because stored rows of them are damaged, each with the damage.
    pub damaged: Vec<(String, String)>,
}

/// Writes a session, or all sessions of a database, to a file. A damaged session fails, or is left out of an export of all
/// sessions: a file with it could not be imported.
pub async fn export(
    settings: &Settings,
    session: Option<&str>,
    out: &mut (dyn Write + Send),
) -> Result<Exported, TransferError> {
    let (store, origin) = open_for_export(settings)?;
    let (mut file, mut exported) = (ExportFile { lines: LineWriter::default(), out }, Exported::default());
    if let Some(session) = session {
        let missing = || TransferError::NoSession(session.to_owned());
        let id = ThreadId::new(session).map_err(|_| missing())?;
        match file.add(&*store, &origin, &id).await? {
            Added::Whole => exported.sessions = 1,
            Added::Missing => return Err(missing()),
            Added::Damaged(why) => return Err(TransferError::Damaged { session: id.to_string(), why }),
        }
        file.out.flush()?;
        return Ok(exported);
    }
    file.write(&Record::Store { version: VERSION }.write())?;
    let mut after: Option<ThreadKey> = None;
    loop {
        let roots = store.roots(after).await?;
        let Some((last, _)) = roots.last() else { break };
        after = Some(*last);
        for (_, id) in roots {
            match file.add(&*store, &origin, &id).await? {
                Added::Whole => exported.sessions += 1,
                // It was moved away meanwhile.
                Added::Missing => {}
                Added::Damaged(why) => exported.damaged.push((id.to_string(), why)),
            }
        }
    }
    file.write(&Record::StoreEnd { sessions: exported.sessions }.write())?;
    file.out.flush()?;
    Ok(exported)
}

/// A file that sessions are written to.
struct ExportFile<'a> {
    lines: LineWriter,
    out: &'a mut (dyn Write + Send),
}

enum Added {
    Whole,
    /// There is no such session.
    Missing,
    /// The session is damaged in this way. Nothing of it was written.
    Damaged(String),
}

impl ExportFile<'_> {
    fn write(&mut self, record: &str) -> std::io::Result<()> {
        self.out.write_all(self.lines.line(record).as_bytes())
    }

    /// Adds a session. It is written when all of it was checked, so a large one is read twice.
    async fn add(
        &mut self,
        store: &dyn Export,
        origin: &Origin,
        session: &ThreadId,
    ) -> Result<Added, TransferError> {
        let (mut checker, mut kept, mut bytes) = (Checker::default(), Vec::new(), 0);
        let check = |record: String| {
            let checked = Record::read(&record).and_then(|parsed| checker.take(&parsed));
            checked.map_err(CheckFailed::Damaged)?;
            bytes += record.len();
            if bytes <= CHECKED_BYTES {
                kept.push(record);
            }
            Ok(())
        };
        match each_record(store, origin, session, check).await? {
            Added::Whole => {}
            other => return Ok(other),
        }
        if bytes <= CHECKED_BYTES {
            kept.iter().try_for_each(|record| self.write(record))?;
            return Ok(Added::Whole);
        }
        drop(kept);
        let written = each_record(store, origin, session, |record| Ok(self.write(&record)?)).await?;
        match written {
            Added::Whole => Ok(Added::Whole),
            Added::Missing => Err(TransferError::NoSession(session.to_string())),
            Added::Damaged(why) => Err(TransferError::Damaged { session: session.to_string(), why }),
        }
    }
}

/// Reason why a record was not taken.
enum CheckFailed {
    Damaged(String),
    Io(std::io::Error),
}

impl From<std::io::Error> for CheckFailed {
    fn from(error: std::io::Error) -> CheckFailed {
        CheckFailed::Io(error)
    }
}

/// Reads the records of a session, until `take` fails.
async fn each_record(
    store: &dyn Export,
    origin: &Origin,
    session: &ThreadId,
    mut take: impl FnMut(String) -> Result<(), CheckFailed>,
) -> Result<Added, TransferError> {
    let (sender, mut receiver) = mpsc::channel::<String>(QUEUED_RECORDS);
    // The reader of the database ends when the receiver is dropped.
    let take_all = async move {
        while let Some(record) = receiver.recv().await {
            take(record)?;
        }
        Ok(())
    };
    match tokio::join!(store.export(session, origin, sender), take_all) {
        (_, Err(CheckFailed::Damaged(why))) => Ok(Added::Damaged(why)),
        (_, Err(CheckFailed::Io(error))) => Err(error.into()),
        (Ok(()), Ok(())) => Ok(Added::Whole),
        (Err(store::Error::NoThread), Ok(())) => Ok(Added::Missing),
        (Err(error @ store::Error::Unreadable(_)), Ok(())) => Ok(Added::Damaged(error.with_sources())),
        (Err(error), Ok(())) => Err(error.into()),
    }
}

/// Reads the records of a file, and checks that they are whole sessions.
struct FileReader<'a> {
    file: &'a mut (dyn BufRead + Send),
    lines: LineReader,
    buffer: Vec<u8>,
    checker: Checker,
    /// True if the file is an export of all sessions.
    is_store: bool,
    sessions: u64,
    ended: bool,
}

impl FileReader<'_> {
    fn new(file: &mut (dyn BufRead + Send)) -> FileReader<'_> {
        FileReader {
            file,
            lines: LineReader::default(),
            buffer: Vec::new(),
            checker: Checker::default(),
            is_store: false,
            sessions: 0,
            ended: false,
        }
    }

    /// Returns the next record of a session and its text, or `None` at the end of the file.
    fn next(&mut self) -> Result<Option<(Record, String)>, TransferError> {
        loop {
            self.buffer.clear();
            (&mut *self.file).take(LINE_BYTES as u64 + 1).read_until(b'\n', &mut self.buffer)?;
            let line = self.lines.line + 1;
            let failed = |why: String| TransferError::Line { line, why };
            if self.buffer.is_empty() {
                let whole = if self.is_store { self.ended } else { self.sessions > 0 };
                if whole && self.checker.is_between_sessions() {
                    return Ok(None);
                }
                return Err(failed("the file is not complete: its last record is missing".into()));
            }
            let text = self.lines.record(&self.buffer).map_err(failed)?.to_owned();
            let record = Record::read(&text).map_err(failed)?;
            match record {
                _ if self.ended => return Err(failed("lines follow the end of the file".into())),
                Record::Store { .. } if line == 1 => self.is_store = true,
                Record::StoreEnd { sessions } if self.is_store => {
                    if sessions != self.sessions || !self.checker.is_between_sessions() {
                        let why = format!("the file has {} of {sessions} sessions", self.sessions);
                        return Err(failed(why));
                    }
                    self.ended = true;
                }
                Record::Store { .. } | Record::StoreEnd { .. } => {
                    return Err(failed("this record is not allowed here".into()));
                }
                record => {
                    self.checker.take(&record).map_err(failed)?;
                    if let Record::End(_) = record {
                        self.sessions += 1;
                    }
                    return Ok(Some((record, text)));
                }
            }
        }
    }
}

/// Checks that a file is a whole export. Returns the number of its sessions.
pub fn verify(file: &mut (dyn BufRead + Send)) -> Result<u64, TransferError> {
    let mut reader = FileReader::new(file);
    while reader.next()?.is_some() {}
    Ok(reader.sessions)
}

/// Imports the sessions of a file. Each of them is imported whole or not at all.
pub async fn import(
    settings: &Settings,
    file: &mut (dyn BufRead + Send),
    open_calls: OpenCalls,
) -> Result<Vec<Imported>, TransferError> {
    let (store, origin) = open_for_import(settings)?;
    let imported = import_all(&*store, &origin, file, open_calls).await;
    store.close().await;
    imported
}

async fn import_all(
    store: &dyn Store,
    origin: &Origin,
    file: &mut (dyn BufRead + Send),
    open_calls: OpenCalls,
) -> Result<Vec<Imported>, TransferError> {
    let mut reader = FileReader::new(file);
    let mut imported = Vec::new();
    let mut arrival: Option<Arrival<'_>> = None;
    loop {
        let next = match reader.next() {
            Ok(next) => next,
            Err(error) => {
                if let Some(arrival) = arrival {
                    arrival.discard().await?;
                }
                return Err(error);
            }
        };
        let Some((record, text)) = next else { return Ok(imported) };
        if let Record::Session(header) = &record {
            arrival = Some(Arrival::begin(store, header.clone()).await?);
        }
        let Some(mut current) = arrival.take() else { continue };
        current.add(&record, &text).await?;
        if !matches!(record, Record::End(_)) {
            arrival = Some(current);
            continue;
        }
        let unused = (!current.present).then(|| current.header.session.clone());
        match (current.finish(origin, open_calls).await, unused) {
            (Ok(session), _) => imported.push(session),
            (Err(error), Some(session)) => {
                store.drop_parcel(&session).await?;
                return Err(error);
            }
            (Err(error), None) => return Err(error),
        }
    }
}

/// A session that is being imported.
pub(crate) struct Arrival<'a> {
    store: &'a dyn Store,
    header: Header,
    /// True if the session is in use here already.
    present: bool,
    incarnation: Option<u64>,
    threads: Vec<ThreadId>,
    page: Vec<String>,
    page_bytes: usize,
    /// Number of records that are stored.
    stored: u64,
    calls: Vec<(ThreadId, CallId, CallState)>,
    /// Number of calls that continue whatever the key is.
    unaffected: usize,
}

impl<'a> Arrival<'a> {
    pub(crate) async fn begin(store: &'a dyn Store, header: Header) -> Result<Arrival<'a>, TransferError> {
        let present = match store.begin_parcel(&header.session).await {
            Ok(()) => false,
            Err(store::Error::Exists) => true,
            Err(error) => return Err(error.into()),
        };
        Ok(Arrival { present, ..Arrival::stored(store, header) })
    }

    /// Makes an arrival whose records are stored.
    pub(crate) fn stored(store: &'a dyn Store, header: Header) -> Arrival<'a> {
        Arrival {
            store,
            header,
            present: false,
            incarnation: None,
            threads: Vec::new(),
            page: Vec::new(),
            page_bytes: 0,
            stored: 0,
            calls: Vec::new(),
            unaffected: 0,
        }
    }

    pub(crate) async fn add(&mut self, record: &Record, text: &str) -> Result<(), TransferError> {
        self.note(record);
        if self.present {
            return Ok(());
        }
        self.page_bytes += text.len();
        self.page.push(text.to_owned());
        if self.page.len() >= PAGE_ROWS || self.page_bytes >= PAGE_BYTES || matches!(record, Record::End(_)) {
            let page = std::mem::take(&mut self.page);
            let (first, count) = (self.stored, page.len() as u64);
            (self.page_bytes, self.stored) = (0, first + count);
            self.store.add_records(&self.header.session, first, page).await?;
        }
        Ok(())
    }

    /// Notes a thread or a call.
    pub(crate) fn note(&mut self, record: &Record) {
        match record {
            Record::Thread(thread) => {
                if thread.parent.is_none() {
                    self.incarnation = Some(thread.incarnation);
                }
                self.threads.push(thread.id.clone());
            }
            Record::Row(row) if row.table == CALL => match row.open_call() {
                Some((thread, call, state)) if row.awaits_callback() => {
                    self.calls.push((thread, call, state))
                }
                Some(_) => self.unaffected += 1,
                None => {}
            },
            _ => {}
        }
    }

    /// Checks that the session can be put into use.
    pub(crate) async fn check(&self) -> Result<(), TransferError> {
        for thread in &self.threads {
            match self.store.thread(thread, &Visibility::All).await {
                Err(store::Error::NoThread) => {}
                Ok(_) => return Err(TransferError::Exists(self.header.session.to_string())),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    pub(crate) async fn discard(self) -> Result<(), TransferError> {
        if !self.present {
            self.store.drop_parcel(&self.header.session).await?;
        }
        Ok(())
    }

    /// Puts the session into use. If that fails, its records stay.
    pub(crate) async fn finish(self, own: &Origin, open_calls: OpenCalls) -> Result<Imported, TransferError> {
        let (store, session, origin) = (self.store, self.header.session.clone(), self.header.origin.clone());
        let other_key = !origin.is_known_by(&own.key_id, &own.key_ids);
        if other_key && open_calls == OpenCalls::Keep && !self.calls.is_empty() && !self.present {
            return Err(TransferError::OtherKey { session: session.to_string(), calls: self.calls.len() });
        }
        if self.present {
            let row = match store.thread(&session, &Visibility::All).await {
                Ok(row) => Some(row),
                Err(store::Error::NoThread) => None,
                Err(error) => return Err(error.into()),
            };
            if row.is_none_or(|row| Some(row.thread.incarnation) != self.incarnation) {
                return Err(TransferError::Exists(session.to_string()));
            }
        } else {
            store.unpack(&session).await.map_err(|error| match error {
                store::Error::Exists => TransferError::Exists(session.to_string()),
                error => error.into(),
            })?;
        }
        let mut imported = Imported {
            session: session.to_string(),
            present: self.present,
            open_calls: self.calls.len() + self.unaffected,
            ended_calls: 0,
            other_url: (origin.public_url != own.public_url).then_some(origin.public_url),
        };
        if (other_key || imported.other_url.is_some()) && open_calls == OpenCalls::End {
            imported.open_calls = self.unaffected;
            imported.ended_calls = end_calls(store, self.calls).await?;
        }
        Ok(imported)
    }
}

/// Ends calls whose results cannot arrive. Those that are settled meanwhile stay as they are.
async fn end_calls(
    store: &dyn Store,
    calls: Vec<(ThreadId, CallId, CallState)>,
) -> Result<usize, TransferError> {
    let messages = calls.into_iter().map(|(thread, call, state)| {
        let input = match state {
            CallState::Subscribed => Input::SubscriptionLost { call },
            _ => Input::CallFailed { call, text: ENDED.into() },
        };
        Message::new(Target::Id(thread), input)
    });
    let mut ended = 0;
    for reply in store.apply(MessageClass::Internal, messages.collect()).await {
        match reply {
            Ok(_) => ended += 1,
            Err(store::Error::Ignored(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(ended)
}

/// Opens a Postgres database as one more node, which takes no work.
fn open_postgres(
    settings: &Settings,
    postgres: &PostgresDatabase,
    key: &Key,
) -> Result<PostgresStore, TransferError> {
    let (mut clock, reserve): (Arc<dyn Clock>, store::Reserve) =
        (Arc::new(SystemClock), Box::new(|_, _, _| None));
    // It listens on no address. With the name of a runtime, it would be taken for that runtime started again.
    let name = engine::node_name(None);
    let store = engine::open_postgres(settings, postgres, name, key, &mut clock, Box::new(|_| ()), reserve);
    store.map_err(|error| StartError::from(error).into())
}

fn open_for_export(settings: &Settings) -> Result<(Arc<dyn Export>, Origin), TransferError> {
    let (store, keys): (Arc<dyn Export>, Keyring) = match &settings.database {
        Database::File(path) => {
            if !path.exists() {
                let why = format!("there is no database {}", path.display());
                return Err(TransferError::Store(why));
            }
            (Arc::new(SqliteReader::new(path)), engine::keys_of_file(path)?)
        }
        Database::Postgres(postgres) => {
            let (keys, key) = keys_of_text(&postgres.key)?;
            (Arc::new(open_postgres(settings, postgres, &key)?), keys)
        }
    };
    Ok((store, Origin::new(&keys, SystemClock.now(), &settings.public_url)))
}

fn open_for_import(settings: &Settings) -> Result<(Arc<dyn Store>, Origin), TransferError> {
    let (store, keys): (Arc<dyn Store>, Keyring) = match &settings.database {
        Database::File(path) => {
            let keys = engine::keys_of_file(path)?;
            let (rules, clock) = (engine::rules(settings), Arc::new(SystemClock));
            let key = keys.for_storage(clock.now());
            let store = SqliteStore::open(path, key, rules, clock, Box::new(|_| ()));
            (Arc::new(store.map_err(StartError::from)?), keys)
        }
        Database::Postgres(postgres) => {
            let (keys, key) = keys_of_text(&postgres.key)?;
            (Arc::new(open_postgres(settings, postgres, &key)?), keys)
        }
    };
    Ok((store, Origin::new(&keys, SystemClock.now(), &settings.public_url)))
}

/// Returns the keys of a Postgres database, and the one that protects what is stored now.
fn keys_of_text(text: &Secret) -> Result<(Keyring, Key), TransferError> {
    let keys = Keyring::parse(text.expose()).map_err(StartError::from)?;
    let key = keys.for_storage(SystemClock.now());
    Ok((keys, key))
}

#[cfg(test)]
mod tests;
