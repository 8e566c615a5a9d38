//! Finds out whether a transaction was committed when its connection was lost during the commit.
//!
//! Another node may have stepped the same threads meanwhile, so the versions of heads alone do not tell. The number of the
//! transaction does, as long as the server has not been restarted or replaced: after a crash or a failover, the number of a
//! transaction that was lost may be used again.

use std::collections::HashMap;

use tokio_postgres::Row;

use super::connect::Connections;
use super::heads;
use super::statement::{Failure, Statement, get};
use crate::store::ThreadKey;

/// Time that the steps of a transaction get, which is the database's own, and the identity of the transaction: its
/// number, and the run of the server. The statistics of a server are reset when it recovers from a crash, also without
/// a new process. Connections may have different time zones.
pub(super) const NOW: &str = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint, pg_current_xact_id()::text, \
     concat_ws('/', extract(epoch FROM pg_postmaster_start_time()), extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()))";
const STATUS: &str = "SELECT coalesce(pg_xact_status($1::text::xid8), 'unknown'), \
     concat_ws('/', extract(epoch FROM pg_postmaster_start_time()), extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()))";
const VERSIONS: &str = "SELECT no, version FROM threads WHERE no = ANY($1)";
/// Writes something to the log of the database, so that the commit waits until everything before it is replicated. The
/// wait of the lost commit may have been cancelled by an administrator. A replica refuses the write, so it never
/// answers.
const BARRIER: &str = "SELECT pg_logical_emit_message(true, 'rap', '')";

/// Identity of a transaction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TransactionId {
    number: String,
    run: String,
}

impl TransactionId {
    /// Reads the columns of [`NOW`] after the first one.
    pub(super) fn read(row: &Row) -> Result<TransactionId, Failure> {
        Ok(TransactionId { number: get(row, 1)?, run: get(row, 2)? })
    }
}

/// The outcome of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Running,
    Committed,
    NotCommitted,
    /// It cannot be known.
    Unknown,
}

/// Asks for the outcome of a transaction that gave threads these versions. Rows of threads are never removed while the
/// outcome of a step is unknown, except that their session is moved away.
pub(super) async fn ask(
    connections: &Connections,
    transaction: &TransactionId,
    versions: &[(ThreadKey, i64)],
) -> Result<Outcome, Failure> {
    let keys: Vec<i64> = versions.iter().map(|(key, _)| key.number()).collect();
    let statements = vec![
        Statement::new(BARRIER),
        Statement::new(STATUS).with(transaction.number.clone()),
        Statement::new(VERSIONS).with(keys),
    ];
    let rows = match connections.write(statements).await {
        // The server has not reached the number of the transaction: it took over without it.
        Err(Failure::Row(error)) => {
            tracing::debug!(%error, "the transaction is not known to this server");
            return Ok(Outcome::NotCommitted);
        }
        rows => rows?,
    };
    let status =
        rows[1].first().ok_or_else(|| Failure::Unavailable("the database tells no status".into()))?;
    let mut stored = HashMap::new();
    for row in &rows[2] {
        stored.insert(heads::thread_key(row, 0)?, get::<i64>(row, 1)?);
    }
    let has_all = versions.iter().all(|(key, version)| stored.get(key).is_some_and(|now| now >= version));
    Ok(decide(get(status, 0)?, get::<String>(status, 1)? == transaction.run, has_all))
}

/// Decides with the status of the transaction's number. `same_run` is true if the server has not been restarted or
/// replaced, and `has_all` if all threads have reached the versions of the transaction.
fn decide(status: &str, same_run: bool, has_all: bool) -> Outcome {
    match status {
        "in progress" => Outcome::Running,
        "aborted" => Outcome::NotCommitted,
        "committed" if same_run => Outcome::Committed,
        // A transaction is committed as a whole.
        _ if !has_all => Outcome::NotCommitted,
        _ => Outcome::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_run_of_a_server_vouches_for_the_number_of_a_transaction() {
        for (status, same_run, has_all, expected) in [
            ("in progress", true, false, Outcome::Running),
            ("aborted", true, true, Outcome::NotCommitted),
            ("aborted", false, true, Outcome::NotCommitted),
            ("committed", true, true, Outcome::Committed),
            // A session that was moved away.
            ("committed", true, false, Outcome::Committed),
            ("committed", false, true, Outcome::Unknown),
            ("committed", false, false, Outcome::NotCommitted),
            ("unknown", true, true, Outcome::Unknown),
            ("unknown", true, false, Outcome::NotCommitted),
        ] {
            assert_eq!(decide(status, same_run, has_all), expected, "{status} {same_run} {has_all}");
        }
    }
}
