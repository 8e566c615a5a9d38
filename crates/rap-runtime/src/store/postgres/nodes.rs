//! Nodes: each has a row with a lease, which it renews every few seconds. The database's clock decides whether a lease
//! is valid.
//!
//! Work carries the number of the node that claimed it. A claim holds as long as the lease of its node.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use super::connect::Connections;
use super::heads::timestamp;
use super::hosts;
use super::signals::{CHANNEL, KEPT};
use super::statement::{Failure, Statement, get};
use crate::store::{Activity, Node, ThreadKey, WorkKey};

/// A lease is renewed after this part of it, and at least this often, since listings show the numbers of the last renewal.
const RENEWED_PART: u32 = 5;
const RENEW_WITHIN: Duration = Duration::from_secs(5);
/// Time for which the row of a node whose lease has run out is kept.
const KEEP: &str = "1 min";
/// Time after which another node removes expired rows, if the node that did so last has not done it again.
const PRUNE_PATIENCE: &str = "15 min";

#[derive(Debug, Clone)]
pub(crate) struct NodeSettings {
    /// Its host and the address that it listens on. A node with the same name is an earlier process of this one.
    pub(crate) name: String,
    /// Address that it listens on.
    pub(crate) url: String,
    pub(crate) lease: Duration,
    /// Tool servers that the node starts itself.
    pub(crate) started: Vec<String>,
}

/// The number of a node. Every process has another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeNumber(pub(super) i64);

/// State of the leases, as far as this node knows it.
#[derive(Debug)]
pub(super) struct Membership {
    /// The other nodes whose lease was valid at the last renewal.
    pub(super) peers: HashSet<i64>,
    /// Time until which the lease of this node is valid.
    pub(super) valid_until: Instant,
    /// Tool servers whose host was this node at the last renewal.
    pub(super) hosted: HashSet<String>,
    /// Tool servers whose host is another node now, and whose work may still have claims of this node.
    pub(super) lost: HashSet<String>,
}

/// Condition that a node is alive: its lease is valid. If the database's clock was set back by more than the duration of a
/// lease since it was renewed, it does not count, because it would last too long.
pub(super) const IS_ALIVE: &str =
    "n.lease_until > clock_timestamp() AND n.seen_at <= clock_timestamp() + (n.lease_until - n.seen_at)";

/// Returns the condition that this node may take a row: no node has claimed it, or this one, or one whose lease has run out.
pub(super) fn takeable(claim: &str, node: &str) -> String {
    format!(
        "({claim} IS NULL OR {claim} <> ALL (ARRAY(SELECT n.no FROM nodes n \
         WHERE n.no <> {node} AND {IS_ALIVE})))"
    )
}

/// Adds this node. Earlier processes of it are gone, so their claims end. Returns its number, and the tool servers
/// whose host it is.
pub(super) async fn join(
    client: &Client,
    node: &NodeSettings,
) -> Result<(NodeNumber, HashSet<String>), tokio_postgres::Error> {
    let lease = node.lease.as_millis() as i64;
    let sql = "INSERT INTO nodes (name, url, started_at, seen_at, lease_until) SELECT $1, $2, now.at, now.at, \
               now.at + $3 * interval '1 ms' FROM (SELECT clock_timestamp() AS at) AS now RETURNING no";
    let row: [(&(dyn ToSql + Sync), Type); 3] =
        [(&node.name, Type::TEXT), (&node.url, Type::TEXT), (&lease, Type::INT8)];
    let number: i64 = client.query_typed_one(sql, &row).await?.get(0);
    let hosted = hosts::join(client, NodeNumber(number), &node.name, &node.started).await?;
    let earlier = "DELETE FROM nodes WHERE name = $1 AND no <> $2";
    client.execute_typed(earlier, &[(&node.name, Type::TEXT), (&number, Type::INT8)]).await?;
    // The other nodes learn of it at once.
    let sql = format!("SELECT pg_notify('{CHANNEL}', $1)");
    client.query_typed(&sql, &[(&number.to_string(), Type::TEXT)]).await?;
    Ok((NodeNumber(number), hosted))
}

/// The database's answer to a renewal.
pub(super) struct Renewed {
    /// True if the lease was valid until now.
    pub(super) was_valid: bool,
    /// The other nodes, and the time until their lease runs out.
    pub(super) others: Vec<(i64, Duration)>,
    pub(super) now: i64,
    /// The oldest schema version that a node must know.
    pub(super) oldest: i32,
    /// Tool servers whose host is this node.
    pub(super) hosted: HashSet<String>,
}

/// Renews the lease of a node, and removes what nodes have left behind.
pub(super) async fn renew(
    connections: &Connections,
    number: NodeNumber,
    node: &NodeSettings,
    activity: Activity,
) -> Result<Renewed, Failure> {
    // The row is gone if the node was away for long, or if another process with its name was started.
    let renewal = "WITH old AS (SELECT {alive} AS is_valid FROM nodes n WHERE n.no = $1) \
                   INSERT INTO nodes AS n (no, name, url, started_at, seen_at, lease_until, asking, invoking) \
                   SELECT $1, $2, $3, now.at, now.at, now.at + $4 * interval '1 ms', $5, $6 \
                   FROM (SELECT clock_timestamp() AS at) AS now \
                   ON CONFLICT (no) DO UPDATE SET seen_at = excluded.seen_at, lease_until = excluded.lease_until, \
                   asking = excluded.asking, invoking = excluded.invoking \
                   RETURNING coalesce((SELECT is_valid FROM old), false)"
        .replace("{alive}", IS_ALIVE);
    let lease = node.lease.as_millis() as i64;
    let (asking, invoking) = (activity.asking as i64, activity.invoking as i64);
    let others = format!(
        "SELECT n.no, ceil(extract(epoch FROM n.lease_until - clock_timestamp()) * 1000)::bigint FROM nodes n \
         WHERE n.no <> $1 AND {IS_ALIVE}"
    );
    let [take, hosted] = hosts::take(number, &node.started);
    let found = connections
        .write(vec![
            Statement::new(renewal)
                .with(number.0)
                .text(&node.name)
                .text(&node.url)
                .with(lease)
                .with(asking)
                .with(invoking),
            Statement::new(others).with(number.0),
            Statement::new(
                "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint, oldest FROM rap_store",
            ),
            Statement::new(format!(
                "DELETE FROM nodes WHERE lease_until < clock_timestamp() - interval '{KEEP}'"
            )),
            Statement::new(format!(
                "DELETE FROM signals s WHERE s.at < clock_timestamp() - interval '{KEPT}' \
                 AND (s.node = $1 OR NOT EXISTS (SELECT 1 FROM nodes n WHERE n.no = s.node))"
            ))
            .with(number.0),
            take,
            hosted,
        ])
        .await?;
    let missing = || Failure::Unavailable("the row of the store is missing".into());
    let others = found[1].iter().map(|row| {
        let left = Duration::from_millis(get::<i64>(row, 1)?.max(0).unsigned_abs());
        Ok((get::<i64>(row, 0)?, left))
    });
    let time = found[2].first().ok_or_else(missing)?;
    Ok(Renewed {
        was_valid: found[0].first().map_or(Ok(false), |row| get(row, 0))?,
        others: others.collect::<Result<_, Failure>>()?,
        now: get(time, 0)?,
        oldest: get(time, 1)?,
        hosted: hosts::hosted(&found[6])?,
    })
}

impl Membership {
    pub(super) fn new(lease: Duration, hosted: HashSet<String>) -> Membership {
        Membership {
            peers: HashSet::new(),
            valid_until: Instant::now() + lease,
            hosted,
            lost: HashSet::new(),
        }
    }

    /// Takes the outcome of a renewal. Returns whether a node is gone or a tool server was taken over, and the time
    /// until the next renewal.
    pub(super) fn update(&mut self, renewed: &Renewed, lease: Duration, asked: Instant) -> (bool, Duration) {
        let Renewed { others, hosted, .. } = renewed;
        let peers: HashSet<i64> = others.iter().map(|(number, _)| *number).collect();
        let gone = self.peers.iter().any(|known| !peers.contains(known)) || !hosted.is_subset(&self.hosted);
        self.peers = peers;
        self.lost.extend(self.hosted.difference(hosted).cloned());
        self.lost.retain(|server| !hosted.contains(server));
        self.hosted.clone_from(hosted);
        self.valid_until = asked + lease;
        // A lease that runs out is noticed at that time.
        let first = others.iter().map(|(_, left)| *left + Duration::from_millis(1)).min();
        (gone, first.unwrap_or(lease).min(lease / RENEWED_PART).min(RENEW_WITHIN))
    }
}

pub(super) async fn list(connections: &Connections) -> Result<Vec<Node>, Failure> {
    let millis = |column: &str| format!("(extract(epoch FROM {column}) * 1000)::bigint");
    let sql = format!(
        "SELECT no, url, {}, {}, asking, invoking FROM nodes n WHERE {IS_ALIVE} ORDER BY no",
        millis("started_at"),
        millis("seen_at")
    );
    let count = |row, at| Ok::<_, Failure>(usize::try_from(get::<i64>(row, at)?).unwrap_or_default());
    let rows = connections.read_one(Statement::new(sql)).await?;
    let node = |row| {
        Ok(Node {
            id: get::<i64>(row, 0)?.to_string(),
            url: get(row, 1)?,
            started_at: timestamp(row, 2)?,
            seen_at: timestamp(row, 3)?,
            activity: Activity { asking: count(row, 4)?, invoking: count(row, 5)? },
        })
    };
    rows.iter().map(node).collect()
}

/// Returns which of these model requests are settled or claimed by another node.
pub(super) async fn lost_model_requests(
    connections: &Connections,
    number: NodeNumber,
    mut keys: Vec<WorkKey>,
) -> Result<Vec<WorkKey>, Failure> {
    // One that has just begun may have no claim yet.
    let sql = "SELECT thread, turn FROM asks WHERE thread = ANY($2) AND (claim = $1 OR claim IS NULL)";
    let threads: Vec<i64> = keys.iter().map(|key| key.thread().number()).collect();
    let rows = connections.read_one(Statement::new(sql).with(number.0).with(threads)).await?;
    let key = |row| {
        let turn = get::<i64>(row, 1)?.unsigned_abs();
        Ok(WorkKey::Ask { thread: ThreadKey::new(get(row, 0)?), turn })
    };
    let kept: HashSet<WorkKey> = rows.iter().map(key).collect::<Result<_, Failure>>()?;
    keys.retain(|key| !kept.contains(key));
    Ok(keys)
}

/// Returns the statement that gives up a node's claim of work.
pub(super) fn release(number: NodeNumber, key: &WorkKey) -> Statement {
    let (table, name) = match key {
        WorkKey::Ask { .. } => ("asks", "turn"),
        WorkKey::Invoke { .. } | WorkKey::Check { .. } => ("calls", "id"),
        WorkKey::Answer { .. } => ("questions", "no"),
    };
    let sql = format!("UPDATE {table} SET claim = NULL WHERE thread = $1 AND {name} = $2 AND claim = $3");
    let statement = Statement::new(sql).thread(key.thread());
    let statement = match key {
        WorkKey::Ask { turn: number, .. } | WorkKey::Answer { number, .. } => {
            statement.with(number.cast_signed())
        }
        WorkKey::Invoke { call, .. } | WorkKey::Check { call, .. } => statement.text(call.as_str()),
    };
    statement.with(number.0)
}

/// Returns the statement that ends the lease of a node.
pub(super) fn leave(number: NodeNumber) -> Statement {
    Statement::new("DELETE FROM nodes WHERE no = $1").with(number.0)
}

/// Returns the statement that lets a node remove expired rows. It returns a row if the node may.
pub(super) fn claim_pruning(number: NodeNumber) -> Statement {
    let sql = format!(
        "UPDATE rap_store SET pruner = $1, pruned_at = clock_timestamp() \
         WHERE pruner IS NULL OR pruner = $1 OR pruned_at < clock_timestamp() - interval '{PRUNE_PATIENCE}' \
         OR NOT EXISTS (SELECT 1 FROM nodes n WHERE n.no = pruner) RETURNING 1"
    );
    Statement::new(sql).with(number.0)
}
