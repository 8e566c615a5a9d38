//! The lease of a database. Work has no claims yet, so one node at a time uses a database: a second one would ask models and
//! send invocations twice.

use std::time::{Duration, Instant};

use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use super::connect::Connections;
use super::migrate::PostgresError;
use super::statement::Statement;

/// Time after which another node may take over from a node that has not renewed its lease.
const LEASE: Duration = if cfg!(test) { Duration::from_secs(2) } else { Duration::from_secs(15) };
/// Time between two renewals.
const RENEW_EVERY: Duration = Duration::from_secs(4);
/// Pause before a node looks again whether the lease of another one has run out.
const WAIT: Duration = Duration::from_millis(500);

/// Takes the lease for a node. A node with the same name takes it over at once: it was restarted. The lease of another node
/// is waited for; if that node renews it, it is alive, and this one is refused.
pub(super) async fn take(client: &Client, node: &str) -> Result<(), PostgresError> {
    let sql = "UPDATE rap_store SET node = $1, lease_until = clock_timestamp() + $2 * interval '1 ms' \
               WHERE node IS NULL OR node = $1 OR lease_until < clock_timestamp()";
    let lease = LEASE.as_millis() as i64;
    let row: [(&(dyn ToSql + Sync), Type); 2] = [(&node, Type::TEXT), (&lease, Type::INT8)];
    let began = Instant::now();
    loop {
        let failed = |error: tokio_postgres::Error| PostgresError::Prepare(error.into());
        if client.execute_typed(sql, &row).await.map_err(failed)? == 1 {
            return Ok(());
        }
        if began.elapsed() > LEASE + WAIT {
            let found = client.query_typed_opt("SELECT node FROM rap_store", &[]).await.map_err(failed)?;
            let other: Option<String> = found.and_then(|row| row.get(0));
            return Err(PostgresError::InUse { node: other.unwrap_or_default() });
        }
        tracing::info!("another node has used the database; waiting until its lease runs out");
        tokio::time::sleep(WAIT).await;
    }
}

/// Renews the lease of a node for ever. A failure is retried at the next renewal.
pub(super) async fn keep(connections: Connections, node: String) {
    loop {
        tokio::time::sleep(RENEW_EVERY).await;
        let sql =
            "UPDATE rap_store SET lease_until = clock_timestamp() + $2 * interval '1 ms' WHERE node = $1";
        let renew = Statement::new(sql).text(&node).with(LEASE.as_millis() as i64);
        if let Err(failure) = connections.write(vec![renew]).await {
            tracing::warn!(%failure, "the lease of this node cannot be renewed");
        }
    }
}

/// Returns the statement that gives the lease back.
pub(super) fn give_back(node: &str) -> Statement {
    Statement::new("UPDATE rap_store SET node = NULL WHERE node = $1").text(node)
}
