//! Statements and pipelines. A pipeline is a list of statements that is sent without waiting for the answers in between, so
//! that it costs one round trip.
//!
//! Every statement is unnamed and has typed parameters: it is parsed, bound and executed in one message. So nothing has
//! to be prepared on a connection before, and a transaction pooler may hand each transaction to another connection.

use std::error::Error as _;

use futures_util::future::join_all;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row};

use crate::store::{BoxError, Error, SessionKey, ThreadKey};

/// Settings of each transaction. A head that another node holds is skipped, so a lock is waited for only briefly.
pub(super) const BEGIN: &str = "BEGIN; SET LOCAL lock_timeout = '2s'; SET LOCAL statement_timeout = '5s'; \
                                SET LOCAL idle_in_transaction_session_timeout = '5s'";
/// Settings of each transaction that need not survive a crash of the database: a claim, or a signal to other nodes.
pub(super) const BEGIN_SOON: &str = "BEGIN; SET LOCAL synchronous_commit = off; SET LOCAL lock_timeout = '2s'; \
                                     SET LOCAL statement_timeout = '5s'; \
                                     SET LOCAL idle_in_transaction_session_timeout = '5s'";
/// Settings of each transaction that only reads. All its statements see the same state.
pub(super) const BEGIN_READ: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; \
                                     SET LOCAL statement_timeout = '5s'; \
                                     SET LOCAL idle_in_transaction_session_timeout = '5s'";

/// A type of a parameter.
pub(super) trait Param: ToSql + Send + Sync + 'static {
    const TYPE: Type;
}

macro_rules! params {
    ($($rust:ty => $postgres:ident),* $(,)?) => {
        $(impl Param for $rust {
            const TYPE: Type = Type::$postgres;
        })*
    };
}

params! {
    i64 => INT8,
    Option<i64> => INT8,
    bool => BOOL,
    String => TEXT,
    Option<String> => TEXT,
    Vec<u8> => BYTEA,
    Vec<i64> => INT8_ARRAY,
    Vec<Option<i64>> => INT8_ARRAY,
    Vec<bool> => BOOL_ARRAY,
    Vec<String> => TEXT_ARRAY,
    Vec<Option<String>> => TEXT_ARRAY,
    Vec<Vec<u8>> => BYTEA_ARRAY,
}

/// All statements that this process has made.
#[cfg(test)]
pub(super) static USED: std::sync::Mutex<std::collections::BTreeSet<String>> =
    std::sync::Mutex::new(std::collections::BTreeSet::new());

/// A statement with its parameters.
pub(super) struct Statement {
    sql: String,
    params: Vec<(Box<dyn ToSql + Send + Sync>, Type)>,
    /// A command without parameters, which may consist of several commands.
    is_command: bool,
}

impl Statement {
    pub(super) fn new(sql: impl Into<String>) -> Statement {
        let sql = sql.into();
        #[cfg(test)]
        USED.lock().expect("nothing panics under the lock").insert(sql.clone());
        Statement { sql, params: Vec::new(), is_command: false }
    }

    pub(super) fn command(sql: impl Into<String>) -> Statement {
        Statement { is_command: true, ..Statement::new(sql) }
    }

    /// Adds the next parameter.
    pub(super) fn with<T: Param>(mut self, value: T) -> Statement {
        self.params.push((Box::new(value), T::TYPE));
        self
    }

    pub(super) fn text(self, text: &str) -> Statement {
        self.with(clean(text))
    }

    pub(super) fn thread(self, thread: ThreadKey) -> Statement {
        self.with(thread.number())
    }

    pub(super) fn session(self, session: SessionKey) -> Statement {
        self.with(session.0.number())
    }

    async fn run(&self, client: &Client) -> Result<Vec<Row>, tokio_postgres::Error> {
        if self.is_command {
            return client.batch_execute(&self.sql).await.map(|()| Vec::new());
        }
        let params: Vec<(&(dyn ToSql + Sync), Type)> =
            self.params.iter().map(|(value, kind)| (&**value as &(dyn ToSql + Sync), kind.clone())).collect();
        client.query_typed(&self.sql, &params).await
    }
}

/// Postgres stores no NUL in a text. It is replaced, so that no text of a tool or a model makes a write fail.
pub(super) fn clean(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// Sends statements in one pipeline. Returns the rows of each, or the first error.
pub(super) async fn pipeline(client: &Client, statements: &[&Statement]) -> Result<Vec<Vec<Row>>, Failure> {
    // The futures are polled in order, and each sends its statement when it is polled first.
    let results = join_all(statements.iter().map(|statement| statement.run(client))).await;
    results.into_iter().collect::<Result<_, _>>().map_err(Failure::from)
}

/// The reason why a transaction failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// Stored rows or values do not allow it: a constraint or an invalid value. A retry fails again.
    Row(BoxError),
    /// Another transaction was in the way: a deadlock, a serialization failure, or a lock that was not released in time.
    Conflict(BoxError),
    /// The database did not answer, or cannot carry it out now.
    Unavailable(BoxError),
    /// The connection was lost while the transaction was being committed.
    Unknown(BoxError),
    Closed,
}

impl From<tokio_postgres::Error> for Failure {
    fn from(error: tokio_postgres::Error) -> Failure {
        let Some(state) = error.code().cloned() else {
            // A value that the client cannot read or write is not a matter of the connection.
            let conversion = error.source().is_some_and(|source| {
                source.is::<tokio_postgres::types::WrongType>()
                    || source.is::<tokio_postgres::types::WasNull>()
            });
            return match conversion {
                true => Failure::Row(error.into()),
                false => Failure::Unavailable(error.into()),
            };
        };
        match state {
            SqlState::T_R_SERIALIZATION_FAILURE
            | SqlState::T_R_DEADLOCK_DETECTED
            | SqlState::LOCK_NOT_AVAILABLE => Failure::Conflict(error.into()),
            state if state.code().starts_with("23") || state.code().starts_with("22") => {
                Failure::Row(error.into())
            }
            _ => Failure::Unavailable(error.into()),
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        match failure {
            Failure::Row(error) => Error::Unreadable(error),
            Failure::Conflict(error) | Failure::Unavailable(error) | Failure::Unknown(error) => {
                Error::Unavailable(error)
            }
            Failure::Closed => Error::Closed,
        }
    }
}

/// Writes the error and its sources, for logs.
impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let error = match self {
            Failure::Row(error)
            | Failure::Conflict(error)
            | Failure::Unavailable(error)
            | Failure::Unknown(error) => error,
            Failure::Closed => return f.write_str("the store is closed"),
        };
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            let next = error.to_string();
            // Some errors contain the text of their source.
            if !text.ends_with(&next) {
                text = format!("{text}: {next}");
            }
            source = error.source();
        }
        f.write_str(&text)
    }
}

/// Makes the failure for an invalid stored value.
pub(super) fn unreadable(error: impl Into<BoxError>) -> Failure {
    Failure::Row(error.into())
}

/// Turns a failure that is caused by the rows of a thread into `None`, so that the thread does not block others.
pub(super) fn skip_unreadable<T>(thread: ThreadKey, read: Result<T, Failure>) -> Result<Option<T>, Failure> {
    match read {
        Err(Failure::Row(error)) => {
            tracing::error!(?thread, %error, "skipping a thread whose rows cannot be read");
            Ok(None)
        }
        read => read.map(Some),
    }
}

/// Reads a column.
pub(super) fn get<'a, T: tokio_postgres::types::FromSql<'a>>(row: &'a Row, at: usize) -> Result<T, Failure> {
    row.try_get(at).map_err(|error| Failure::Row(error.into()))
}
