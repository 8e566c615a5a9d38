//! Hosts of tool servers that nodes start themselves. Every node starts its own process of each server, and one node at
//! a time is the host, whose process gets all calls. A node is the host as long as its lease is valid.

use std::collections::HashSet;

use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::nodes::{IS_ALIVE, NodeNumber};
use super::statement::{Failure, Statement, get};

/// Makes this node the host of servers that have none, or one whose lease has run out. Rows are locked in the order of their
/// keys, so that two nodes do not wait for each other.
fn take_statement() -> String {
    format!(
        "INSERT INTO tool_hosts AS h (server, node) \
         SELECT s.server, $1 FROM unnest($2::text[]) AS s(server) ORDER BY s.server \
         ON CONFLICT (server) DO UPDATE SET node = excluded.node WHERE h.node <> excluded.node AND NOT EXISTS \
         (SELECT 1 FROM nodes n WHERE n.no = h.node AND {IS_ALIVE})"
    )
}

/// Finds the servers whose host is this node.
const HOSTED: &str = "SELECT server FROM tool_hosts WHERE node = $1 AND server = ANY($2)";
/// Frees the work of these servers that this node has claimed. Each statement is covered by an index.
const RELEASE: [&str; 5] = [
    "UPDATE calls SET claim = NULL WHERE state = 0 AND invoke_at IS NOT NULL AND attempts = 0 \
     AND server = ANY($2) AND claim = $1",
    "UPDATE calls SET claim = NULL WHERE state = 0 AND invoke_at IS NOT NULL AND attempts > 0 \
     AND server = ANY($2) AND claim = $1",
    "UPDATE calls SET claim = NULL WHERE acknowledged_at IS NOT NULL AND state IN (0, 5) \
     AND server = ANY($2) AND claim = $1",
    "UPDATE questions SET claim = NULL WHERE answer_at IS NOT NULL AND attempts = 0 AND server = ANY($2) AND claim = $1",
    "UPDATE questions SET claim = NULL WHERE answer_at IS NOT NULL AND attempts > 0 AND server = ANY($2) AND claim = $1",
];

/// Makes a node that starts the host of the servers of its earlier processes, whose journals it has, and of those that
/// have no host. Returns the servers whose host it is.
pub(super) async fn join(
    client: &Client,
    number: NodeNumber,
    name: &str,
    started: &[String],
) -> Result<HashSet<String>, tokio_postgres::Error> {
    if started.is_empty() {
        return Ok(HashSet::new());
    }
    let inherit =
        "UPDATE tool_hosts SET node = $1 WHERE node IN (SELECT no FROM nodes WHERE name = $2 AND no <> $1)";
    let name = name.to_owned();
    client.execute_typed(inherit, &[(&number.0, Type::INT8), (&name, Type::TEXT)]).await?;
    let started = started.to_vec();
    client.execute_typed(&take_statement(), &[(&number.0, Type::INT8), (&started, Type::TEXT_ARRAY)]).await?;
    let hosted = client.query_typed(HOSTED, &[(&number.0, Type::INT8), (&started, Type::TEXT_ARRAY)]).await?;
    Ok(hosted.iter().map(|row| row.get(0)).collect())
}

/// Returns the statements that make a node the host of servers that have none. The rows of the last one are the servers
/// whose host it is.
pub(super) fn take(number: NodeNumber, started: &[String]) -> [Statement; 2] {
    [take_statement(), HOSTED.to_owned()].map(|sql| Statement::new(sql).with(number.0).with(started.to_vec()))
}

/// Reads the rows of [`take`].
pub(super) fn hosted(rows: &[tokio_postgres::Row]) -> Result<HashSet<String>, Failure> {
    rows.iter().map(|row| get(row, 0)).collect()
}

/// Returns the statements with which a node that is not the host of these servers any more frees its claims on their work.
pub(super) fn release(number: NodeNumber, servers: &[String]) -> Vec<Statement> {
    RELEASE.iter().map(|sql| Statement::new(*sql).with(number.0).with(servers.to_vec())).collect()
}
