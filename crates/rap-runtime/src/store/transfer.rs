//! The form in which a session moves between databases: one JSON object for each row, independent of the database.
//!
//! A session is a sequence of records: a header, its threads with parents first, the other rows in any order, and an end
//! record with their number. Rows name their thread by its id. JSON that is stored as text stays text, so that every
//! database holds the same bytes. Secrets stay encrypted with the key of their server.

mod check;
mod file;
mod table;

use std::time::Duration;

use async_trait::async_trait;
use rap_io::keyring::Keyring;
use rap_protocol::{ThreadId, Timestamp, UserId, check_json};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

pub(crate) use check::Checker;
pub(crate) use file::{LINE_BYTES, LineReader, LineWriter};
pub(crate) use table::{CALL, Cell, ENTRY, Row, Scope, TABLES};

use super::{Error, SessionKey, Thread, ThreadKey};
use crate::token::key_name;

/// Version of the form. A release reads all versions up to its own.
pub(crate) const VERSION: u32 = 1;
/// Maximum size of a record, in bytes. A row with the largest accepted body stays below it.
pub(crate) const RECORD_BYTES: usize = 64 * 1024 * 1024;
/// Maximum memory of the parsed form of a record, besides its texts, in bytes. Rows are flat: what is stored as JSON stays
/// text.
const PARSED_BYTES: usize = 16 * 1024 * 1024;
/// Number of the record of the root thread, after the header.
pub(crate) const ROOT_RECORD: i64 = 1;
/// Number of rows that are read or written together.
pub(crate) const PAGE_ROWS: usize = 32;
/// Time without callbacks after which it is forgotten where a thread was moved to.
pub(crate) const DEPARTURE_LIFETIME: Duration = Duration::from_secs(365 * 24 * 3600);
/// Interval at which the time of the last callback for a moved thread is stored.
pub(crate) const DEPARTURE_USED: Duration = Duration::from_secs(24 * 3600);

/// The server that records come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Origin {
    /// Identifies the key of the server without revealing it.
    pub(crate) key_id: String,
    /// Identifies all keys of the server: callback URLs and secrets may be older than its present key.
    #[serde(default)]
    pub(crate) key_ids: Vec<String>,
    /// Base of its callback URLs.
    pub(crate) public_url: String,
}

impl Origin {
    /// Describes a server with these keys.
    pub(crate) fn new(keys: &Keyring, now: Timestamp, public_url: &str) -> Origin {
        Origin {
            key_id: key_name(keys.at(now)),
            key_ids: keys.all().map(key_name).collect(),
            public_url: public_url.to_owned(),
        }
    }

    /// Returns true if a server with these keys accepts the callback URLs of this one, and can read its secrets.
    pub(crate) fn is_known_by(&self, key_id: &str, key_ids: &[String]) -> bool {
        let is_known = |own: &String| own == key_id || key_ids.contains(own);
        is_known(&self.key_id) && self.key_ids.iter().all(is_known)
    }
}

/// The first record of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) version: u32,
    pub(crate) session: ThreadId,
    pub(crate) origin: Origin,
    pub(crate) exported_at: Timestamp,
}

/// A thread. Everything that a database derives from a head is left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ThreadRecord {
    pub(crate) id: ThreadId,
    /// Key in the database that the record comes from.
    pub(crate) key: i64,
    /// Key that callback tokens of the thread contain.
    pub(crate) token_key: i64,
    pub(crate) parent: Option<ThreadId>,
    /// The thread whose history it inherits. A root inherits nothing: its history comes with it.
    pub(crate) source: Option<ThreadId>,
    pub(crate) inherits: u64,
    pub(crate) ancestors: Vec<ThreadId>,
    pub(crate) incarnation: u64,
    pub(crate) agent: String,
    pub(crate) user_id: Option<UserId>,
    pub(crate) title: Option<String>,
    pub(crate) created_at: Timestamp,
    pub(crate) updated_at: Timestamp,
    pub(crate) version: i64,
    /// Due time of the model request and number of failed attempts, if there is a request.
    pub(crate) ask: Option<(i64, i64)>,
    /// The head, as stored.
    pub(crate) head: String,
}

impl ThreadRecord {
    /// Returns the thread in another database. `parent` and `source` are its keys there.
    pub(crate) fn thread(
        &self,
        key: ThreadKey,
        session: SessionKey,
        parent: Option<ThreadKey>,
        source: Option<ThreadKey>,
    ) -> Thread {
        Thread {
            key,
            token_key: ThreadKey::new(self.token_key),
            id: self.id.clone(),
            session,
            parent,
            source,
            inherits: self.inherits,
            ancestors: self.ancestors.clone(),
            incarnation: self.incarnation,
            agent: self.agent.clone(),
            user_id: self.user_id.clone(),
            title: self.title.clone(),
            created_at: self.created_at,
        }
    }
}

/// A record of a session.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Record {
    /// The first record.
    Session(Header),
    Thread(Box<ThreadRecord>),
    Row(Row),
    /// The last record: the number of records before it.
    End(u64),
    /// First record of a file with all sessions of a database.
    Store {
        version: u32,
    },
    /// Last record of a file with all sessions of a database.
    StoreEnd {
        sessions: u64,
    },
}

impl Record {
    /// Replaces the URL of a tool server that has moved its state to another one.
    pub(crate) fn rename_server(&mut self, from: &str, to: &str) {
        match self {
            Record::Row(row) => row.rename_server(from, to),
            Record::Thread(thread) => {
                if let Ok(mut head) = serde_json::from_str::<Value>(&thread.head) {
                    rename_server(&mut head, from, to);
                    thread.head = head.to_string();
                }
            }
            _ => {}
        }
    }

    /// Returns the record as one line of JSON.
    pub(crate) fn write(&self) -> String {
        let (name, value) = match self {
            Record::Session(header) => ("session", json!(header)),
            Record::Thread(thread) => ("thread", json!(thread)),
            Record::Row(row) => (row.table().name, row.to_json()),
            Record::End(records) => ("end", json!({"records": records})),
            Record::Store { version } => ("store", json!({"version": version})),
            Record::StoreEnd { sessions } => ("store_end", json!({"sessions": sessions})),
        };
        json!({name: value}).to_string()
    }

    /// Reads a record. The error is a sentence for people.
    pub(crate) fn read(text: &str) -> Result<Record, String> {
        check_json(text.as_bytes(), PARSED_BYTES).map_err(|invalid| invalid.to_string())?;
        let object: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| format!("it is not a JSON object: {error}"))?;
        let mut fields = object.into_iter();
        let (Some((name, value)), None) = (fields.next(), fields.next()) else {
            return Err("it is not an object with one field, the kind of the record".into());
        };
        let invalid = |error: serde_json::Error| format!("{name}: {error}");
        match name.as_str() {
            // A newer version may have other fields, so its number is read first.
            "session" | "store"
                if value["version"].as_u64().is_some_and(|version| version > VERSION.into()) =>
            {
                Err(format!(
                    "it was written by a newer release, in version {} of the format; this release reads versions up \
                     to {VERSION}: install the newer release here",
                    value["version"]
                ))
            }
            "session" => Ok(Record::Session(serde_json::from_value(value).map_err(invalid)?)),
            "store" => Ok(Record::Store { version: VERSION }),
            "store_end" => match value["sessions"].as_u64() {
                Some(sessions) => Ok(Record::StoreEnd { sessions }),
                None => Err("store_end: the number of sessions is missing".into()),
            },
            "thread" => Ok(Record::Thread(serde_json::from_value(value).map_err(invalid)?)),
            "end" => match value["records"].as_u64() {
                Some(records) => Ok(Record::End(records)),
                None => Err("end: the number of records is missing".into()),
            },
            name => Row::from_json(name, value).map(Record::Row),
        }
    }
}

/// Replaces the URL of a tool server in the calls and subscriptions of a head.
fn rename_server(value: &mut Value, from: &str, to: &str) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(server) if name == "server" && server == from => *server = to.to_owned(),
                    value => rename_server(value, from, to),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| rename_server(item, from, to)),
        _ => {}
    }
}

/// State of a parcel: a session that is not in use because it is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParcelState {
    /// It comes from elsewhere. It is discarded if its import fails.
    Arriving,
    /// It is about to be moved elsewhere, and is put back into use if that fails.
    Leaving,
    /// Its destination has it. It is kept here until the destination has put it into use.
    Left,
}

impl ParcelState {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            ParcelState::Arriving => "arriving",
            ParcelState::Leaving => "leaving",
            ParcelState::Left => "left",
        }
    }

    pub(crate) fn parse(text: &str) -> Option<ParcelState> {
        [ParcelState::Arriving, ParcelState::Leaving, ParcelState::Left]
            .into_iter()
            .find(|state| state.as_str() == text)
    }
}

/// A thread, as its callback tokens name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenThread {
    pub(crate) key: ThreadKey,
    pub(crate) incarnation: u64,
}

/// A session that is not in use because it is on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parcel {
    pub(crate) session: ThreadId,
    pub(crate) state: ParcelState,
    /// Destination of a parcel that leaves, encrypted. Empty for one that arrives.
    pub(crate) peer: Vec<u8>,
    pub(crate) at: Timestamp,
}

/// The part of a store that reads sessions.
#[async_trait]
pub(crate) trait Export: Send + Sync {
    /// Sends the records of a session, all of the same point in time.
    async fn export(
        &self,
        session: &ThreadId,
        origin: &Origin,
        records: mpsc::Sender<String>,
    ) -> Result<(), Error>;
    /// Returns a page of the root threads, in the order of their keys.
    async fn roots(&self, after: Option<ThreadKey>) -> Result<Vec<(ThreadKey, ThreadId)>, Error>;
}

/// The part of a store that moves sessions.
#[async_trait]
pub(crate) trait Transfer: Export {
    /// Takes a session out of use, in one transaction: its records become a parcel that leaves, and its rows are deleted.
    /// Forks of its threads get the history that they inherit from them.
    async fn pack(&self, session: &ThreadId, origin: &Origin, peer: Vec<u8>) -> Result<(), Error>;
    /// Begins a parcel that arrives, and discards what an earlier attempt left. Fails with [`Error::Exists`] if the
    /// session is in use, or is a parcel that leaves.
    async fn begin_parcel(&self, session: &ThreadId) -> Result<(), Error>;
    /// Adds records to a parcel that arrives. `first` is the number of the first one, from 0. Records that it has already
    /// are replaced.
    async fn add_records(&self, session: &ThreadId, first: u64, records: Vec<String>) -> Result<(), Error>;
    /// Puts the session of a parcel into use, in one transaction, and deletes the parcel. Threads of a parcel that was
    /// to leave get their keys back; others get new ones.
    async fn unpack(&self, session: &ThreadId) -> Result<(), Error>;
    /// Returns a page of the records of a parcel, from a number on.
    async fn records(&self, session: &ThreadId, from: u64) -> Result<Vec<String>, Error>;
    async fn parcels(&self) -> Result<Vec<Parcel>, Error>;
    /// Records that the destination of a parcel has it. From now on it never goes back into use here. `peer` is that of
    /// the move. Can be repeated. Fails with [`Error::NoThread`] if the parcel of this move is gone, because the session
    /// is back in use.
    async fn mark_left(&self, session: &ThreadId, peer: &[u8]) -> Result<(), Error>;
    /// Makes a parcel that has left, and that its destination does not have, one that can be unpacked.
    async fn reclaim(&self, session: &ThreadId) -> Result<(), Error>;
    async fn drop_parcel(&self, session: &ThreadId) -> Result<(), Error>;
    /// Deletes a parcel that has left, and remembers the runtime that has its threads now. Can be repeated.
    async fn depart(
        &self,
        session: &ThreadId,
        threads: Vec<TokenThread>,
        destination: &str,
    ) -> Result<(), Error>;
    /// Returns the base URL of the runtime that a thread was moved to.
    async fn moved_to(&self, thread: TokenThread) -> Result<Option<String>, Error>;

    /// Returns the parcel that a thread is in.
    async fn parcel_of(&self, thread: &ThreadId) -> Result<Option<ParcelState>, Error>;
    /// Returns the record of the root thread of the parcel that a thread is in.
    async fn parcel_root(&self, thread: &ThreadId) -> Result<Option<String>, Error>;
    /// Returns the thread that callback tokens of another database name.
    async fn moved_thread(&self, token_key: ThreadKey, incarnation: u64) -> Result<Option<ThreadKey>, Error>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_needs_too_much_memory_is_not_parsed() {
        let record = format!("{{\"thread\": [{}0]}}", "{\"a\":0},".repeat(100_000));
        let refused = Record::read(&record).unwrap_err();
        assert!(refused.contains("expected fewer objects"), "{refused}");
        let deep = format!("{{\"thread\": {}{}}}", "[".repeat(100), "]".repeat(100));
        assert!(Record::read(&deep).unwrap_err().contains("levels of nesting"));
        assert_eq!(Record::read("{\"end\": {\"records\": 2}}"), Ok(Record::End(2)));
    }
}
