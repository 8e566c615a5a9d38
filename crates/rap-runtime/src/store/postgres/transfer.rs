//! Moves sessions: reads them as records, writes records as rows, and keeps parcels.
//!
//! Rows are read with cursors, a page at a time. A transaction that moves a session may take long, so it has time limits of
//! its own; it holds locks on the threads of that session only.

mod statements;

use std::collections::{HashMap, VecDeque};

use async_trait::async_trait;
use rap_agent::{Entry, Head, Item};
use rap_protocol::{ThreadId, Timestamp, UserId};
use tokio::sync::mpsc;
use tokio_postgres::Row as DatabaseRow;

use self::statements::{DERIVED, STATEMENTS};
use super::bulk::Bulk;
use super::connect::Transaction;
use super::heads::{self, THREAD_COLUMNS, thread_id, thread_key, timestamp};
use super::statement::{Failure, Statement, clean, get, unreadable};
use super::writer::Time;
use super::writes::{Claims, StepWriter};
use super::{PostgresStore, deletion, history};
use crate::store::stored::PAGE_BYTES;
use crate::store::transfer::{
    Cell, Checker, DEPARTURE_USED, ENTRY, Export, Header, Origin, PAGE_ROWS, Parcel, ParcelState,
    ROOT_RECORD, Record, Row, Scope, TABLES, ThreadRecord, TokenThread, VERSION,
};
use crate::store::{Error, HistoryPage, Loaded, Reserve, SessionKey, Thread, ThreadKey, Transfer};

/// Settings of a transaction that moves a session. A statement may write or delete the rows of all its threads.
pub(super) const BEGIN_MOVE: &str = "BEGIN; SET LOCAL lock_timeout = '10s'; SET LOCAL statement_timeout = '15s'; \
                          SET LOCAL idle_in_transaction_session_timeout = '5s'";
/// Settings of a transaction that reads a session. It waits for the reader of the records, and holds no lock meanwhile.
const BEGIN_EXPORT: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET LOCAL statement_timeout = '15s'; \
                            SET LOCAL idle_in_transaction_session_timeout = '60s'";
/// Number of root threads that are listed at once.
const ROOTS: i64 = 1_000;
/// Number of parcels that are listed at once. More than a few sessions are never on their way.
const PARCELS: i64 = 1_000;
/// Number of keys of threads that are taken at once.
const KEYS: i64 = 64;
/// Number of times that the threads of a session are looked up again, because it got new ones meanwhile.
const LOCK_TRIES: u32 = 100;

/// The threads of a session, which are locked or read in one snapshot.
struct Session {
    root: std::sync::Arc<Thread>,
    threads: Vec<i64>,
}

impl Session {
    /// Finds a session. Returns `None` if there is no such root thread.
    async fn find(tx: &mut Transaction, id: &ThreadId) -> Result<Option<Session>, Failure> {
        let found = heads::load_by_id(tx, id, &crate::store::Visibility::All).await?;
        let Some(Loaded { thread: root, .. }) = found.filter(|root| root.thread.parent.is_none()) else {
            return Ok(None);
        };
        let sql = "WITH RECURSIVE s AS (SELECT $1::bigint AS no UNION ALL \
                   SELECT t.no FROM s JOIN threads t ON t.parent = s.no) SELECT no FROM s ORDER BY no";
        let rows = tx.query(Statement::new(sql).thread(root.key)).await?;
        let threads = rows.iter().map(|row| get(row, 0)).collect::<Result<_, _>>()?;
        Ok(Some(Session { root, threads }))
    }

    /// Finds a session and locks its threads, so that no step of it runs.
    async fn lock(tx: &mut Transaction, id: &ThreadId) -> Result<Option<Session>, Failure> {
        for _ in 0..LOCK_TRIES {
            let Some(session) = Session::find(tx, id).await? else { return Ok(None) };
            let sql = "SELECT 1 FROM threads WHERE no = ANY($1) ORDER BY no FOR UPDATE";
            tx.query(Statement::new(sql).with(session.threads.clone())).await?;
            // A thread can have got children before it was locked.
            let again = Session::find(tx, id).await?;
            if again.is_some_and(|again| again.threads == session.threads) {
                return Ok(Some(session));
            }
        }
        Err(Failure::Conflict("the session keeps getting new threads".into()))
    }

    /// Fills the session into a statement, as literals: a cursor takes no parameters.
    fn sql(&self, statement: &str) -> String {
        let threads: Vec<String> = self.threads.iter().map(i64::to_string).collect();
        let threads = format!("'{{{}}}'::bigint[]", threads.join(","));
        statement.replace("SESSION", &self.root.key.number().to_string()).replace("THREADS", &threads)
    }
}

/// Consumer of records.
enum Sink<'a> {
    Channel(&'a mpsc::Sender<String>),
    Parcel { id: &'a ThreadId, number: u64, checker: Box<Checker> },
}

impl Sink<'_> {
    async fn take(&mut self, tx: &mut Transaction, records: Vec<Record>) -> Result<(), Failure> {
        match self {
            Sink::Channel(channel) => {
                for record in records {
                    let gone = |_| unreadable("the reader of the records is gone");
                    channel.send(record.write()).await.map_err(gone)?;
                }
            }
            Sink::Parcel { id, number, checker } => {
                let first = *number;
                *number += records.len() as u64;
                let texts: Vec<String> = records.iter().map(Record::write).collect();
                // A damaged session could not be unpacked.
                for text in &texts {
                    checker.take(&Record::read(text).map_err(unreadable)?).map_err(unreadable)?;
                }
                tx.pipeline(&additions(id, first, &records, texts)).await?;
            }
        }
        Ok(())
    }
}

/// Returns the statements that add records to a parcel.
fn additions(id: &ThreadId, first: u64, records: &[Record], texts: Vec<String>) -> Vec<Statement> {
    let numbers: Vec<i64> = (first.cast_signed()..).take(texts.len()).collect();
    let threads: Vec<String> = records
        .iter()
        .filter_map(|record| match record {
            Record::Thread(thread) => Some(thread.id.as_str().to_owned()),
            _ => None,
        })
        .collect();
    let add = "INSERT INTO parcel_records (session, no, record) \
               SELECT $1, no, record FROM unnest($2::bigint[], $3::text[]) AS r(no, record) \
               ON CONFLICT (session, no) DO UPDATE SET record = excluded.record";
    let name = "INSERT INTO parcel_threads (id, session) SELECT id, $1 FROM unnest($2::text[]) AS t(id) ON CONFLICT DO NOTHING";
    vec![
        Statement::new(add).text(id.as_str()).with(numbers).with(texts),
        Statement::new(name).text(id.as_str()).with(threads),
    ]
}

/// Reads the records of a session.
async fn read(
    tx: &mut Transaction,
    session: &Session,
    origin: &Origin,
    now: Timestamp,
    sink: &mut Sink<'_>,
) -> Result<(), Failure> {
    let root = &session.root;
    let header =
        Header { version: VERSION, session: root.id.clone(), origin: origin.clone(), exported_at: now };
    sink.take(tx, vec![Record::Session(header)]).await?;
    let mut records = 1;
    let select = format!(
        "SELECT {THREAD_COLUMNS}, p.id, s.id, t.updated_at, a.due_at, a.attempts FROM threads t \
         LEFT JOIN threads p ON p.no = t.parent LEFT JOIN threads s ON s.no = t.source \
         LEFT JOIN asks a ON a.thread = t.no WHERE t.no = ANY(THREADS) \
         ORDER BY json_array_length(t.ancestors::json), t.no"
    );
    records += each(tx, &session.sql(&select), sink, &thread_record).await?;
    records += inherited(tx, root, sink).await?;
    for (table, (select, ..)) in STATEMENTS.iter().enumerate() {
        records += each(tx, &session.sql(select), sink, &|row| row_record(table, row)).await?;
    }
    sink.take(tx, vec![Record::End(records)]).await
}

/// Sends the rows of a query as records. Returns their number.
async fn each(
    tx: &mut Transaction,
    select: &str,
    sink: &mut Sink<'_>,
    record: &(dyn Fn(&DatabaseRow) -> Result<Record, Failure> + Sync),
) -> Result<u64, Failure> {
    let declare = Statement::command(format!("DECLARE moved NO SCROLL CURSOR FOR {select}"));
    let fetch = || Statement::new(format!("FETCH {PAGE_ROWS} FROM moved"));
    let mut rows = tx.pipeline(&[declare, fetch()]).await?.remove(1);
    let mut count = 0;
    loop {
        let is_last = rows.len() < PAGE_ROWS;
        count += rows.len() as u64;
        sink.take(tx, rows.iter().map(record).collect::<Result<_, _>>()?).await?;
        if is_last {
            tx.pipeline(&[Statement::command("CLOSE moved")]).await?;
            return Ok(count);
        }
        rows = tx.query(fetch()).await?;
    }
}

fn thread_record(row: &DatabaseRow) -> Result<Record, Failure> {
    let Loaded { thread, version, .. } = heads::loaded(row)?;
    let id = |at| {
        let id: Option<String> = get(row, at)?;
        id.map(ThreadId::new).transpose().map_err(unreadable)
    };
    let (due, attempts): (Option<i64>, Option<i64>) = (get(row, 18)?, get(row, 19)?);
    Ok(Record::Thread(Box::new(ThreadRecord {
        id: thread.id.clone(),
        key: thread.key.number(),
        token_key: thread.token_key.number(),
        parent: id(15)?,
        source: id(16)?,
        inherits: if thread.parent.is_some() { thread.inherits } else { 0 },
        ancestors: thread.ancestors.clone(),
        incarnation: thread.incarnation,
        agent: thread.agent.clone(),
        user_id: thread.user_id.clone(),
        title: thread.title.clone(),
        created_at: thread.created_at,
        updated_at: timestamp(row, 17)?,
        version,
        ask: due.zip(attempts),
        head: get(row, 12)?,
    })))
}

fn row_record(table: usize, row: &DatabaseRow) -> Result<Record, Failure> {
    let thread = match TABLES[table].scope {
        Scope::Thread => Some(thread_id(row, 0)?),
        Scope::Session => None,
    };
    let cells = TABLES[table].columns.iter().enumerate().map(|(at, (_, kind))| {
        Ok(match kind {
            kind if kind.is_number() => Cell::Number(get(row, at + 1)?),
            kind if kind.is_bytes() => Cell::Bytes(get(row, at + 1)?),
            _ => Cell::Text(get(row, at + 1)?),
        })
    });
    Ok(Record::Row(Row { table, thread, cells: cells.collect::<Result<_, Failure>>()? }))
}

/// Returns a page of the entries that a fork inherits, with the arguments of the calls that they refer to.
pub(super) async fn inherited_page(
    tx: &mut Transaction,
    fork: &Thread,
    after: u64,
) -> Result<Vec<(u64, String)>, Failure> {
    if after >= fork.inherits {
        return Ok(Vec::new());
    }
    let page = HistoryPage { after, up_to: fork.inherits, rows: PAGE_ROWS, bytes: PAGE_BYTES };
    history::for_copy(tx, fork, page).await
}

/// Sends the entries that a fork inherits. Returns their number.
async fn inherited(tx: &mut Transaction, fork: &Thread, sink: &mut Sink<'_>) -> Result<u64, Failure> {
    let (mut after, mut count) = (0, 0);
    loop {
        let page = inherited_page(tx, fork, after).await?;
        let Some((last, _)) = page.last() else { return Ok(count) };
        after = *last;
        count += page.len() as u64;
        let record = |(seq, body): (u64, String)| {
            let cells = vec![Cell::Number(Some(seq.cast_signed())), Cell::Text(Some(body))];
            Record::Row(Row { table: ENTRY, thread: Some(fork.id.clone()), cells })
        };
        sink.take(tx, page.into_iter().map(record).collect()).await?;
    }
}

/// Gives the forks of a session's threads the history that they inherit.
async fn separate_forks(tx: &mut Transaction, session: &Session) -> Result<(), Failure> {
    let sql = "SELECT no FROM threads WHERE parent IS NULL AND source = ANY($1) AND session <> $2 \
               ORDER BY no FOR UPDATE";
    let forks = Statement::new(sql).with(session.threads.clone()).session(session.root.session);
    for row in tx.query(forks).await? {
        let Some(Loaded { thread: fork, .. }) = heads::load(tx, thread_key(&row, 0)?).await? else {
            continue;
        };
        let mut after = 0;
        loop {
            let page = inherited_page(tx, &fork, after).await?;
            let Some((last, _)) = page.last() else { break };
            after = *last;
            let mut statements = Vec::new();
            for (seq, body) in &page {
                let cells = [Cell::Number(Some(seq.cast_signed())), Cell::Text(Some(body.clone()))];
                statements.extend(insertion(ENTRY, Some(fork.key), fork.session, None, &cells)?);
            }
            tx.pipeline(&statements).await?;
        }
        let sql = "UPDATE threads SET inherits = 0, source = NULL WHERE no = $1";
        tx.query(Statement::new(sql).thread(fork.key)).await?;
    }
    Ok(())
}

/// Returns the statements that write a row and, for an entry that is a summary, its position.
fn insertion(
    table: usize,
    thread: Option<ThreadKey>,
    session: SessionKey,
    user: Option<&UserId>,
    cells: &[Cell],
) -> Result<Vec<Statement>, Failure> {
    let mut statement = Statement::new(STATEMENTS[table].1)
        .with(thread.map(ThreadKey::number))
        .session(session)
        .with(user.map(|user| user.as_str().to_owned()));
    for cell in cells {
        statement = match cell {
            Cell::Number(number) => statement.with(*number),
            Cell::Text(text) => statement.with(text.as_deref().map(clean)),
            Cell::Bytes(bytes) => statement.with(bytes.clone()),
        };
    }
    let mut statements = vec![statement];
    if let (ENTRY, Some(thread), [Cell::Number(Some(seq)), Cell::Text(Some(body))]) = (table, thread, cells) {
        // A damaged entry of a fork that stays behind is copied as it is.
        if let Ok(Entry { item: Item::Summary { covers, .. }, .. }) = serde_json::from_str(body) {
            let sql = "INSERT INTO summaries (session, thread, seq, covers) VALUES ($1, $2, $3, $4)";
            let summary = Statement::new(sql).session(session).thread(thread);
            statements.push(summary.with(*seq).with(covers.cast_signed()));
        }
    }
    Ok(statements)
}

/// Returns the statements that delete a session.
fn deletions(session: &Session) -> Vec<Statement> {
    let counts = "INSERT INTO thread_counts (status, change) \
                  SELECT status, -count(*) FROM threads WHERE no = ANY(THREADS) GROUP BY status";
    let mut all = vec![Statement::command(session.sql(counts))];
    let rows = STATEMENTS.iter().map(|(.., rows)| *rows).filter(|rows| !rows.is_empty());
    all.extend(rows.map(|rows| Statement::command(session.sql(&format!("DELETE FROM {rows}")))));
    for table in DERIVED {
        all.push(Statement::command(
            session.sql(&format!("DELETE FROM {table} WHERE thread = ANY(THREADS)")),
        ));
    }
    all.push(Statement::command(session.sql("DELETE FROM threads WHERE no = ANY(THREADS)")));
    all
}

/// Returns the statements that delete a parcel.
fn parcel_deletions(session: &ThreadId) -> Vec<Statement> {
    let delete = |table: &str| {
        Statement::new(format!("DELETE FROM {table} WHERE session = $1")).text(session.as_str())
    };
    ["parcels", "parcel_records", "parcel_threads"].map(delete).into()
}

fn new_parcel(session: &ThreadId, state: ParcelState, peer: Vec<u8>, now: Timestamp) -> Statement {
    let sql = "INSERT INTO parcels (session, state, peer, at) VALUES ($1, $2, $3, $4)";
    Statement::new(sql).text(session.as_str()).text(state.as_str()).with(peer).with(now.0)
}

/// Returns the state of a parcel, and locks it.
async fn state(tx: &mut Transaction, session: &ThreadId) -> Result<Option<ParcelState>, Failure> {
    let sql = "SELECT state FROM parcels WHERE session = $1 FOR UPDATE";
    let rows = tx.query(Statement::new(sql).text(session.as_str())).await?;
    let state = rows.first().map(|row| get::<&str>(row, 0)).transpose()?;
    Ok(state.and_then(ParcelState::parse))
}

/// Writes the rows of a session from records.
struct Unpacking<'a> {
    store: &'a super::Inner,
    /// True if threads get the keys that their records have.
    keep_keys: bool,
    keys: VecDeque<ThreadKey>,
    session: SessionKey,
    threads: HashMap<ThreadId, (ThreadKey, Option<UserId>)>,
}

impl Unpacking<'_> {
    /// Returns the statements that write a record.
    async fn statements(&mut self, tx: &mut Transaction, record: &Record) -> Result<Vec<Statement>, Failure> {
        match record {
            Record::Thread(thread) => self.thread(tx, thread).await,
            Record::Row(row) => {
                let owner = row.thread.as_ref().map(|id| {
                    let missing = || unreadable(format!("thread {id} is not in the session"));
                    self.threads.get(id).ok_or_else(missing)
                });
                let owner = owner.transpose()?;
                let user = owner.and_then(|(_, user)| user.as_ref());
                insertion(row.table, owner.map(|(key, _)| *key), self.session, user, &row.cells)
            }
            _ => Ok(Vec::new()),
        }
    }

    async fn key(&mut self, tx: &mut Transaction, record: &ThreadRecord) -> Result<ThreadKey, Failure> {
        if self.keep_keys {
            return Ok(ThreadKey::new(record.key));
        }
        loop {
            if let Some(key) = self.keys.pop_front() {
                return Ok(key);
            }
            let sql = "SELECT nextval('thread_keys') FROM generate_series(1, $1)";
            for row in tx.query(Statement::new(sql).with(KEYS)).await? {
                self.keys.push_back(thread_key(&row, 0)?);
            }
        }
    }

    async fn thread(
        &mut self,
        tx: &mut Transaction,
        record: &ThreadRecord,
    ) -> Result<Vec<Statement>, Failure> {
        let key = self.key(tx, record).await?;
        if record.parent.is_none() {
            self.session = SessionKey(key);
        }
        let here = |id: &Option<ThreadId>| id.as_ref().and_then(|id| Some(self.threads.get(id)?.0));
        let source = match (&record.parent, &record.source) {
            (None, Some(source)) => {
                let sql = "SELECT no FROM threads WHERE id = $1";
                let rows = tx.query(Statement::new(sql).text(source.as_str())).await?;
                rows.first().map(|row| thread_key(row, 0)).transpose()?
            }
            (_, source) => here(source),
        };
        let thread = record.thread(key, self.session, here(&record.parent), source);
        let head: Head = serde_json::from_str(&record.head).map_err(unreadable)?;
        let mut bulk = Bulk::default();
        let super::Inner { rules, key: secrets, node: (node, _), .. } = self.store;
        // Any node may start the work of the session.
        let reserve: Reserve = Box::new(|_, _, _| None);
        let claims = Claims { node: *node, reserve: &reserve, reserved: Vec::new() };
        let (now, keys) = (record.updated_at, Vec::new().into_iter());
        StepWriter { bulk: &mut bulk, thread: &thread, key: secrets, rules, now, keys, claims }
            .head(None, &head);
        let mut statements = bulk.statements();
        let sql = "UPDATE threads SET version = $2, head = $3, token_key = $4 WHERE no = $1";
        let token_key = (thread.token_key != key).then_some(thread.token_key.number());
        statements
            .push(Statement::new(sql).thread(key).with(record.version).text(&record.head).with(token_key));
        if let Some((due, attempts)) = record.ask {
            let sql = "UPDATE asks SET due_at = $2, attempts = $3 WHERE thread = $1";
            statements.push(Statement::new(sql).thread(key).with(due).with(attempts));
        }
        // It may have been moved away from here before.
        let sql = "DELETE FROM departures WHERE token_key = $1 AND incarnation = $2";
        let departure = Statement::new(sql).with(record.token_key).with(record.incarnation.cast_signed());
        statements.push(departure);
        self.threads.insert(record.id.clone(), (key, record.user_id.clone()));
        Ok(statements)
    }
}

/// Returns a page of the records of a parcel.
fn records_from(session: &ThreadId, from: u64) -> Statement {
    let sql = "SELECT record FROM parcel_records WHERE session = $1 AND no >= $2 ORDER BY no LIMIT $3";
    Statement::new(sql).text(session.as_str()).with(from.cast_signed()).with(PAGE_ROWS as i64)
}

async fn unpack(tx: &mut Transaction, store: &super::Inner, session: &ThreadId) -> Result<(), Error> {
    let state = state(tx, session).await?.ok_or(Error::NoThread)?;
    if state == ParcelState::Left {
        return Err(Error::Moving);
    }
    let sql = "SELECT 1 FROM parcel_threads p JOIN threads t ON t.id = p.id WHERE p.session = $1 LIMIT 1";
    if !tx.query(Statement::new(sql).text(session.as_str())).await?.is_empty() {
        return Err(Error::Exists);
    }
    let mut unpacking = Unpacking {
        store,
        keep_keys: state == ParcelState::Leaving,
        keys: VecDeque::new(),
        session: SessionKey::NONE,
        threads: HashMap::new(),
    };
    let (mut checker, mut from) = (Checker::default(), 0);
    while !checker.is_complete() {
        let rows = tx.query(records_from(session, from)).await?;
        if rows.is_empty() {
            return Err(unreadable("the session is not complete").into());
        }
        from += rows.len() as u64;
        let mut statements = Vec::new();
        for row in &rows {
            let record = Record::read(get(row, 0)?).map_err(unreadable)?;
            checker.take(&record).map_err(unreadable)?;
            statements.extend(unpacking.statements(tx, &record).await?);
        }
        tx.pipeline(&statements).await?;
    }
    Ok(())
}

impl PostgresStore {
    pub(super) fn time(&self) -> Timestamp {
        match &self.inner.time {
            Time::Database(clock) => crate::world::Clock::now(&**clock),
            #[cfg(test)]
            Time::Given(clock) => clock.now(),
        }
    }
}

#[async_trait]
impl Export for PostgresStore {
    async fn export(
        &self,
        session: &ThreadId,
        origin: &Origin,
        records: mpsc::Sender<String>,
    ) -> Result<(), Error> {
        let mut tx = self.inner.others.begin(BEGIN_EXPORT).await?;
        let session = Session::find(&mut tx, session).await?.ok_or(Error::NoThread)?;
        if deletion::is_marked(&mut tx, session.root.session).await? {
            return Err(Error::NoThread);
        }
        read(&mut tx, &session, origin, self.time(), &mut Sink::Channel(&records)).await?;
        Ok(())
    }

    async fn roots(&self, after: Option<ThreadKey>) -> Result<Vec<(ThreadKey, ThreadId)>, Error> {
        let not_deleted = deletion::NOT_DELETED;
        let sql = format!(
            "SELECT no, id FROM threads t WHERE no > $1 AND parent IS NULL AND {not_deleted} ORDER BY no LIMIT $2"
        );
        let statement = Statement::new(sql).with(after.map_or(0, ThreadKey::number)).with(ROOTS);
        let rows = self.inner.others.read_one(statement).await?;
        let roots = rows.iter().map(|row| Ok((thread_key(row, 0)?, thread_id(row, 1)?)));
        Ok(roots.collect::<Result<_, Failure>>()?)
    }
}

#[async_trait]
impl Transfer for PostgresStore {
    async fn pack(&self, session: &ThreadId, origin: &Origin, peer: Vec<u8>) -> Result<(), Error> {
        let (mut tx, now) = (self.inner.others.begin(BEGIN_MOVE).await?, self.time());
        if state(&mut tx, session).await?.is_some() {
            return Err(Error::Moving);
        }
        // A fork that is being made is committed first, so that it gets the history that it inherits.
        let found = Session::lock(&mut tx, session).await?.ok_or(Error::NoThread)?;
        if deletion::is_marked(&mut tx, found.root.session).await? {
            return Err(Error::NoThread);
        }
        tx.query(new_parcel(session, ParcelState::Leaving, peer, now)).await?;
        let mut sink = Sink::Parcel { id: session, number: 0, checker: Box::default() };
        read(&mut tx, &found, origin, now, &mut sink).await?;
        separate_forks(&mut tx, &found).await?;
        tx.finish(&deletions(&found)).await?;
        self.inner.directory.forget();
        Ok(())
    }

    async fn begin_parcel(&self, session: &ThreadId) -> Result<(), Error> {
        let mut tx = self.inner.others.begin(BEGIN_MOVE).await?;
        let sql = "SELECT 1 FROM threads WHERE id = $1";
        let exists = !tx.query(Statement::new(sql).text(session.as_str())).await?.is_empty();
        if exists || state(&mut tx, session).await?.is_some_and(|state| state != ParcelState::Arriving) {
            return Err(Error::Exists);
        }
        let mut statements = parcel_deletions(session);
        statements.push(new_parcel(session, ParcelState::Arriving, Vec::new(), self.time()));
        tx.finish(&statements).await?;
        Ok(())
    }

    async fn add_records(&self, session: &ThreadId, first: u64, texts: Vec<String>) -> Result<(), Error> {
        let records = texts.iter().map(|text| Record::read(text)).collect::<Result<Vec<_>, _>>();
        let records = records.map_err(|why| Error::Unreadable(why.into()))?;
        let mut tx = self.inner.others.begin(BEGIN_MOVE).await?;
        if state(&mut tx, session).await? != Some(ParcelState::Arriving) {
            return Err(Error::NoThread);
        }
        let texts = texts.iter().map(|text| clean(text)).collect();
        tx.finish(&additions(session, first, &records, texts)).await?;
        Ok(())
    }

    async fn unpack(&self, session: &ThreadId) -> Result<(), Error> {
        let mut tx = self.inner.others.begin(BEGIN_MOVE).await?;
        unpack(&mut tx, &self.inner, session).await?;
        tx.finish(&parcel_deletions(session)).await?;
        self.inner.directory.forget();
        Ok(())
    }

    async fn records(&self, session: &ThreadId, from: u64) -> Result<Vec<String>, Error> {
        let rows = self.inner.others.read_one(records_from(session, from)).await?;
        Ok(rows.iter().map(|row| get(row, 0)).collect::<Result<_, Failure>>()?)
    }

    async fn parcels(&self) -> Result<Vec<Parcel>, Error> {
        let statement = Statement::new("SELECT session, state, peer, at FROM parcels LIMIT $1").with(PARCELS);
        let rows = self.inner.others.read_one(statement).await?;
        let parcel = |row: &DatabaseRow| {
            let state = ParcelState::parse(get(row, 1)?);
            Ok(Parcel {
                session: thread_id(row, 0)?,
                state: state.ok_or_else(|| unreadable("the state of a parcel is not known"))?,
                peer: get(row, 2)?,
                at: timestamp(row, 3)?,
            })
        };
        Ok(rows.iter().map(parcel).collect::<Result<_, Failure>>()?)
    }

    async fn mark_left(&self, session: &ThreadId, peer: &[u8]) -> Result<(), Error> {
        let sql = "UPDATE parcels SET state = 'left' WHERE session = $1 AND peer = $2 AND state <> 'arriving' \
                   RETURNING 1";
        let statement = Statement::new(sql).text(session.as_str()).with(peer.to_vec());
        let rows = self.inner.others.write(vec![statement]).await?;
        if rows[0].is_empty() { Err(Error::NoThread) } else { Ok(()) }
    }

    async fn reclaim(&self, session: &ThreadId) -> Result<(), Error> {
        let sql = "UPDATE parcels SET state = 'leaving' WHERE session = $1 AND state = 'left'";
        self.write(vec![Statement::new(sql).text(session.as_str())]).await
    }

    async fn drop_parcel(&self, session: &ThreadId) -> Result<(), Error> {
        self.write(parcel_deletions(session)).await
    }

    async fn depart(
        &self,
        session: &ThreadId,
        threads: Vec<TokenThread>,
        destination: &str,
    ) -> Result<(), Error> {
        let sql = "INSERT INTO departures (token_key, incarnation, destination, at) \
                   SELECT key, incarnation, $3, $4 FROM unnest($1::bigint[], $2::bigint[]) AS t(key, incarnation) \
                   ON CONFLICT (token_key, incarnation) DO UPDATE \
                   SET destination = excluded.destination, at = excluded.at";
        let keys: Vec<i64> = threads.iter().map(|thread| thread.key.number()).collect();
        let incarnations: Vec<i64> = threads.iter().map(|thread| thread.incarnation.cast_signed()).collect();
        let departures = Statement::new(sql).with(keys).with(incarnations).text(destination);
        let mut statements = vec![departures.with(self.time().0)];
        statements.extend(parcel_deletions(session));
        self.write(statements).await
    }

    async fn moved_to(&self, thread: TokenThread) -> Result<Option<String>, Error> {
        let departure =
            |sql: &str| Statement::new(sql).thread(thread.key).with(thread.incarnation.cast_signed());
        let sql = "SELECT destination, at FROM departures WHERE token_key = $1 AND incarnation = $2";
        let rows = self.inner.others.read_one(departure(sql)).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let now = self.time();
        if timestamp(row, 1)?.plus(DEPARTURE_USED) < now {
            let sql = "UPDATE departures SET at = $3 WHERE token_key = $1 AND incarnation = $2";
            self.write(vec![departure(sql).with(now.0)]).await?;
        }
        Ok(Some(get(row, 0)?))
    }

    async fn parcel_of(&self, thread: &ThreadId) -> Result<Option<ParcelState>, Error> {
        let sql =
            "SELECT state FROM parcel_threads t JOIN parcels p ON p.session = t.session WHERE t.id = $1";
        let rows = self.inner.others.read_one(Statement::new(sql).text(thread.as_str())).await?;
        let state = rows.first().map(|row| get::<&str>(row, 0)).transpose()?;
        Ok(state.and_then(ParcelState::parse))
    }

    async fn parcel_root(&self, thread: &ThreadId) -> Result<Option<String>, Error> {
        let sql = "SELECT record FROM parcel_threads t JOIN parcel_records r ON r.session = t.session
                   WHERE t.id = $1 AND r.no = $2";
        let statement = Statement::new(sql).text(thread.as_str()).with(ROOT_RECORD);
        let rows = self.inner.others.read_one(statement).await?;
        Ok(rows.first().map(|row| get::<&str>(row, 0).map(str::to_owned)).transpose()?)
    }

    async fn moved_thread(&self, token_key: ThreadKey, incarnation: u64) -> Result<Option<ThreadKey>, Error> {
        let sql = "SELECT no FROM threads WHERE token_key = $1 AND incarnation = $2";
        let statement = Statement::new(sql).thread(token_key).with(incarnation.cast_signed());
        let rows = self.inner.others.read_one(statement).await?;
        Ok(rows.first().map(|row| thread_key(row, 0)).transpose()?)
    }
}
