//! Finds and explains damage in a database. It only reads, and a runtime may be using the database.
//!
//! All tables are read once, in one snapshot. Memory grows with the number of threads and open calls, not with their
//! histories.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;

use rap_agent::{Entry, Head, Seq, ThreadMessage};
use serde::Serialize;
use serde_json::Value;

use crate::settings::Database;
use crate::store::PostgresError;
use crate::store::raw_rows::{Cell, RawRows, Table};

/// Maximum number of findings that are described. Further ones are counted.
const FINDINGS: usize = 1_000;

const RESTORE: &str = "restore a backup of the database, or leave the thread as it is: it stays failed, and other threads are not affected";
const CLOSE: &str = "close the thread, or cancel the call, and ask again";
const LEFTOVER: &str = "nothing reads these rows; they can stay";
const BACKUP: &str = "stop the runtime, copy the files of the database, and restore a backup; \
                      `rap export --all` saves the sessions that can be read";

/// Reason why a database cannot be examined.
#[derive(Debug, thiserror::Error)]
pub enum DoctorError {
    /// There is no such file.
    #[error("there is no database {}", .0.display())]
    NoFile(PathBuf),
    /// The file cannot be opened, or is not a database of the runtime.
    #[error("cannot read the database {}: {source}", path.display())]
    File {
        /// Path of the database.
        path: PathBuf,
        /// The error of the database.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The file has none of the tables.
    #[error("{} is not a database of rap: it has none of its tables", .0.display())]
    Empty(PathBuf),
    /// The Postgres database cannot be used.
    #[error(transparent)]
    Postgres(#[from] PostgresError),
    /// A newer release has written the database.
    #[error(
        "the database has schema version {found}, and this release knows only {known}: use the newer release"
    )]
    Newer {
        /// Version of the database.
        found: i64,
        /// Newest version that this release knows.
        known: i64,
    },
}

/// Damage in a database, and advice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Kind of the damage: `file`, `table`, `thread`, `history`, `call`, `message`, `leftover` or `set_aside`.
    pub kind: &'static str,
    /// Id of the thread, if the damage belongs to one that has an id.
    pub thread: Option<String>,
    /// Description.
    pub what: String,
    /// Advice.
    pub advice: &'static str,
}

/// Result of an examination.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Number of threads that were read.
    pub threads: u64,
    /// Number of entries that were read.
    pub entries: u64,
    /// Number of calls that were read.
    pub calls: u64,
    /// Damage, up to a bound.
    pub findings: Vec<Finding>,
    /// Number of findings that are not described, because there are too many.
    pub not_shown: u64,
}

impl Report {
    /// Returns true if no damage was found.
    pub fn is_healthy(&self) -> bool {
        self.findings.is_empty() && self.not_shown == 0
    }
}

/// Examines a database. Blocks while a file is read.
pub async fn examine(database: &Database) -> Result<Report, DoctorError> {
    let mut source = RawRows::open(database).await?;
    let mut examination = Examination::default();
    for problem in source.check_file() {
        examination.find("file", None, problem, BACKUP);
    }
    // Damaged threads come first, because they explain why a thread differs from its listed status.
    for table in [
        Table::Damaged,
        Table::Threads,
        Table::Entries,
        Table::Calls,
        Table::Held,
        Table::Backlog,
        Table::Messages,
    ] {
        let read = source.each(table, &mut |row| examination.take(table, row)).await;
        if let Err(error) = read {
            let what = format!("the table of {} cannot be read: {error}", table.name());
            examination.find("table", None, what, BACKUP);
        }
        if table == Table::Entries {
            examination.end_of_entries();
        }
        if table == Table::Calls {
            examination.end_of_calls();
        }
    }
    Ok(examination.finish())
}

/// A thread whose row was read.
struct Known {
    id: String,
    inherits: Seq,
    /// Number of its last entry. `None` if its head cannot be read.
    last: Option<Seq>,
    /// Number of the last entry that was found.
    found: Seq,
    parent: Option<i64>,
    source: Option<i64>,
    session: i64,
}

#[derive(Default)]
struct Examination {
    report: Report,
    threads: HashMap<i64, Known>,
    /// Open calls and subscriptions of the heads that could be read.
    open: HashSet<(i64, String)>,
    /// Versions of the threads that are set aside, and why.
    set_aside: HashMap<i64, (i64, String)>,
    /// Rows of threads that do not exist, by table and thread.
    leftovers: BTreeMap<(&'static str, i64), u64>,
}

impl Examination {
    fn find(&mut self, kind: &'static str, thread: Option<i64>, what: String, advice: &'static str) {
        if self.report.findings.len() >= FINDINGS {
            self.report.not_shown += 1;
            return;
        }
        let thread = thread.and_then(|number| self.threads.get(&number)).map(|known| known.id.clone());
        self.report.findings.push(Finding { kind, thread, what, advice });
    }

    fn take(&mut self, table: Table, row: &[Cell]) {
        match table {
            Table::Damaged => self.take_set_aside(row),
            Table::Threads => self.take_thread(row),
            Table::Entries => self.take_entry(row),
            Table::Calls => self.take_call(row),
            Table::Held | Table::Backlog => self.take_waiting(table, row),
            Table::Messages => self.take_message(row),
        }
    }

    fn take_set_aside(&mut self, row: &[Cell]) {
        if let [Cell::Number(thread), Cell::Number(version), Cell::Text(why)] = row {
            self.set_aside.insert(*thread, (*version, why.clone()));
        }
    }

    fn take_thread(&mut self, row: &[Cell]) {
        self.report.threads += 1;
        let [number, id, parent, source, session, inherits, ancestors, version, status, head] = row else {
            unreachable!("bug: a row of threads has ten columns")
        };
        let Cell::Number(number) = *number else { return };
        let head: Result<Head, String> = head.json();
        let known = Known {
            id: id.text().unwrap_or_default().to_owned(),
            inherits: inherits.number().map_or(0, i64::unsigned_abs),
            last: head.as_ref().ok().map(Head::seq),
            found: inherits.number().map_or(0, i64::unsigned_abs),
            parent: parent.number(),
            source: source.number(),
            session: session.number().unwrap_or(number),
        };
        let is_named = rap_protocol::ThreadId::new(known.id.as_str()).is_ok();
        self.threads.insert(number, known);
        if !is_named {
            self.find("thread", Some(number), format!("thread number {number} has no valid id"), RESTORE);
        }
        if let Err(why) = ancestors.json::<Vec<rap_protocol::ThreadId>>() {
            self.find(
                "thread",
                Some(number),
                format!("the list of its ancestors cannot be read: {why}"),
                RESTORE,
            );
        }
        let set_aside = self.set_aside.remove(&number).filter(|(of, _)| Some(*of) == version.number());
        match head {
            Err(why) => {
                self.find("thread", Some(number), format!("its stored state cannot be read: {why}"), RESTORE);
            }
            Ok(head) => {
                let calls = head.open_calls().map(|call| &call.id);
                let calls = calls.chain(head.subscriptions().iter().map(|held| &held.id));
                self.open.extend(calls.map(|call| (number, call.as_str().to_owned())));
                let (stored, is) = (status.text().unwrap_or_default(), head.status().as_str());
                if set_aside.is_none() && stored != is {
                    let what = format!("it is listed as {stored}, but its state is {is}");
                    self.find("thread", Some(number), what, "its next step corrects this");
                }
                if let Some((_, why)) = set_aside {
                    self.find(
                        "set_aside",
                        Some(number),
                        why,
                        "send a message to the thread: it is then tried again",
                    );
                }
            }
        }
    }

    /// Counts a row of a thread that does not exist. Returns false if the thread exists.
    fn is_leftover(&mut self, table: Table, thread: i64) -> bool {
        let gone = !self.threads.contains_key(&thread);
        if gone {
            *self.leftovers.entry((table.name(), thread)).or_default() += 1;
        }
        gone
    }

    fn take_entry(&mut self, row: &[Cell]) {
        self.report.entries += 1;
        let [Cell::Number(thread), Cell::Number(seq), body] = row else { return };
        let (thread, seq) = (*thread, seq.unsigned_abs());
        if self.is_leftover(Table::Entries, thread) {
            return;
        }
        // A fork whose source is being deleted has copies that are not read until all are there.
        if self.threads.get(&thread).is_some_and(|known| seq <= known.inherits) {
            return;
        }
        if let Err(why) = body.json::<Entry>() {
            self.find("history", Some(thread), format!("entry {seq} cannot be read: {why}"), RESTORE);
        }
        let known = self.threads.get_mut(&thread).expect("bug: the thread is known");
        let expected = known.found + 1;
        known.found = seq;
        let last = known.last;
        if seq > expected {
            self.missing(thread, expected, seq - 1);
        }
        if last.is_some_and(|last| seq > last) {
            let what = format!("entry {seq} is beyond the end of its history");
            self.find(
                "history",
                Some(thread),
                what,
                "nothing reads this entry until the history grows beyond it",
            );
        }
    }

    fn missing(&mut self, thread: i64, first: Seq, last: Seq) {
        let what = match first == last {
            true => format!("entry {first} of its history is missing"),
            false => format!("entries {first} to {last} of its history are missing"),
        };
        self.find("history", Some(thread), what, RESTORE);
    }

    /// Finds histories whose last entries are missing, and threads that refer to missing ones.
    fn end_of_entries(&mut self) {
        let mut ends: Vec<(i64, Seq, Seq)> = Vec::new();
        let mut gone: Vec<(i64, &str, i64)> = Vec::new();
        for (number, known) in &self.threads {
            if let Some(last) = known.last.filter(|last| *last > known.found.max(known.inherits)) {
                ends.push((*number, known.found + 1, last));
            }
            let others = [("parent", known.parent), ("source", known.source), ("root", Some(known.session))];
            let others = others.into_iter().filter_map(|(name, other)| Some((*number, name, other?)));
            gone.extend(others.filter(|(.., other)| !self.threads.contains_key(other)));
        }
        ends.sort_unstable();
        gone.sort_unstable();
        for (number, first, last) in ends {
            self.missing(number, first, last);
        }
        for (number, name, other) in gone {
            let what = match name {
                "source" => "the thread whose history it inherits is missing".to_owned(),
                name => format!("its {name} thread is missing (number {other})"),
            };
            self.find("thread", Some(number), what, RESTORE);
        }
    }

    fn take_call(&mut self, row: &[Cell]) {
        self.report.calls += 1;
        let [Cell::Number(thread), id, state] = row else { return };
        if self.is_leftover(Table::Calls, *thread) {
            return;
        }
        let id = id.text().unwrap_or_default().to_owned();
        let Some(state) = state.number().and_then(crate::store::stored::state_from_number) else {
            let what = format!("call {id} is in a state that does not exist");
            return self.find("call", Some(*thread), what, CLOSE);
        };
        use rap_agent::CallState::{Open, Subscribed};
        let is_open = matches!(state, Open | Subscribed);
        let in_head = self.open.remove(&(*thread, id.clone()));
        let head_is_known = self.threads.get(thread).is_some_and(|known| known.last.is_some());
        let what = match (is_open, in_head) {
            (true, false) if head_is_known => {
                format!("call {id} is open, but its thread does not wait for it")
            }
            (false, true) => format!("its thread waits for call {id}, which has ended"),
            _ => return,
        };
        self.find("call", Some(*thread), what, CLOSE);
    }

    /// Finds open calls without a row: nobody sends them, and they do not time out.
    fn end_of_calls(&mut self) {
        let mut missing: Vec<(i64, String)> = self.open.drain().collect();
        missing.sort_unstable();
        for (thread, call) in missing {
            self.find("call", Some(thread), format!("the row of its open call {call} is missing"), CLOSE);
        }
    }

    fn take_waiting(&mut self, table: Table, row: &[Cell]) {
        let [Cell::Number(thread), body] = row else { return };
        if self.is_leftover(table, *thread) {
            return;
        }
        if let Err(why) = body.json::<Entry>() {
            let what = format!("{} cannot be read: {why}", table.one());
            self.find("history", Some(*thread), what, RESTORE);
        }
    }

    fn take_message(&mut self, row: &[Cell]) {
        let [receiver, body] = row else { return };
        if let Err(why) = body.json::<ThreadMessage>() {
            let receiver = receiver.text().unwrap_or_default();
            let what = format!("a message to thread {receiver} cannot be read: {why}");
            self.find(
                "message",
                None,
                what,
                "the thread never gets it; tell the thread yourself what happened",
            );
        }
    }

    fn finish(mut self) -> Report {
        for ((table, thread), rows) in std::mem::take(&mut self.leftovers) {
            let what = format!("{rows} {table} of thread number {thread}, whose own row is missing");
            self.find("leftover", None, what, LEFTOVER);
        }
        self.report
    }
}

impl Cell {
    fn number(&self) -> Option<i64> {
        if let Cell::Number(number) = self { Some(*number) } else { None }
    }

    fn text(&self) -> Option<&str> {
        if let Cell::Text(text) = self { Some(text) } else { None }
    }

    /// Reads JSON. The error says why it cannot be read, without the text itself, which may be private.
    fn json<T: serde::de::DeserializeOwned>(&self) -> Result<T, String> {
        let text = self.text().ok_or_else(|| "it is not a text".to_owned())?;
        serde_json::from_str(text).map_err(|error| match serde_json::from_str::<Value>(text) {
            Ok(_) => error.to_string(),
            Err(syntax) => format!("it is not JSON: {syntax}"),
        })
    }
}
