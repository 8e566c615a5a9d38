//! Prepares a database: creates or migrates its tables, and checks that this node belongs to it.

use std::collections::{HashMap, HashSet};

use rap_io::secret_box::Key;
use rap_protocol::Timestamp;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use super::connect::{Address, UrlError};
use super::nodes::{self, NodeNumber, NodeSettings};
use crate::store::{BoxError, StepSettings};

/// The migrations. Nodes of the previous release keep working while a migration is applied, so a migration only adds:
/// columns that can be left out, tables and indexes. What it replaces is removed one release later, together with
/// `oldest` (see docs/decisions/0029-upgrades-of-a-fleet.md).
pub(super) const MIGRATIONS: &[&str] = &[
    include_str!("schema_1.sql"),
    include_str!("schema_2.sql"),
    include_str!("schema_3.sql"),
    include_str!("schema_4.sql"),
    include_str!("schema_5.sql"),
    include_str!("schema_6.sql"),
    include_str!("schema_7.sql"),
    include_str!("schema_8.sql"),
    include_str!("schema_9.sql"),
    include_str!("schema_10.sql"),
];
/// Newest schema version that this release knows.
pub(crate) const KNOWN: i32 = MIGRATIONS.len() as i32;
/// Number of times that the table of the store is created again, when nodes that start together create it at once.
const CREATE_TRIES: u32 = 5;
/// The row that all nodes share. The lock of its table guards migrations.
pub(super) const STORE: &str = "CREATE TABLE IF NOT EXISTS rap_store (\
     is_one boolean PRIMARY KEY DEFAULT true CHECK (is_one), \
     version integer NOT NULL DEFAULT 0, \
     key_check bytea NOT NULL, \
     public_url text NOT NULL, \
     node text, \
     lease_until timestamptz)"; // The last two are those of the first release, which had one node.
/// Settings of the transaction that migrates. A migration may take long; another node waits for it, without holding a
/// lock. A node that freezes in between must not hold the locks for long, which stop all others.
pub(super) const BEGIN: &str = "BEGIN; SET LOCAL lock_timeout = '60s'; SET LOCAL statement_timeout = 0; \
                     SET LOCAL idle_in_transaction_session_timeout = '5s'; \
                     LOCK TABLE rap_store IN SHARE ROW EXCLUSIVE MODE";

/// Reason why a Postgres database cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PostgresError {
    /// The address is not valid.
    #[error("store.url: {0}")]
    Url(#[from] UrlError),
    /// The database cannot be reached, or refuses the connection.
    #[error("cannot open the Postgres database")]
    Connect(#[source] BoxError),
    /// The tables cannot be created, migrated or read.
    #[error("cannot prepare the Postgres database")]
    Prepare(#[source] BoxError),
    /// A newer release has migrated the database, and nodes of this release cannot work on it any more.
    #[error(
        "the Postgres database needs nodes that know its schema version {found}, and this release knows only {known}: \
         install the newer release on this node"
    )]
    Newer {
        /// The oldest version that a node must know.
        found: i32,
        /// Newest version that this release knows.
        known: i32,
    },
    /// The database was created with another key.
    #[error(
        "store.key is not the key that this Postgres database was created with. Every node needs that key: with another \
         one, no open call could send its result, and stored questions could not be read"
    )]
    OtherKey,
    /// Other nodes of the database have another public URL.
    #[error(
        "public_url is {configured}, but the nodes of this Postgres database use {stored}. Tool servers know a call by \
         its callback URL, so all nodes need the same one: set public_url = \"{stored}\". To change it for all, stop \
         every node and run: UPDATE rap_store SET public_url = '{configured}'"
    )]
    OtherUrl {
        /// URL in the database.
        stored: String,
        /// URL in the settings of this node.
        configured: String,
    },
}

fn failed(error: tokio_postgres::Error) -> PostgresError {
    PostgresError::Prepare(error.into())
}

/// The result of preparing a database for a node.
pub(crate) struct Prepared {
    /// The database's time.
    pub(crate) now: Timestamp,
    pub(super) node: NodeNumber,
    /// The last signal of each other node.
    pub(super) signals: HashMap<i64, i64>,
    /// Tool servers whose host is this node.
    pub(super) hosted: HashSet<String>,
}

/// Prepares a database, and adds the node to it. Blocks until that is done, even on a thread of an async runtime.
pub(crate) fn prepare_blocking(
    address: &Address,
    key: &Key,
    public_url: &str,
    node: &NodeSettings,
    rules: &StepSettings,
) -> Result<Prepared, PostgresError> {
    std::thread::scope(|scope| {
        let prepared = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|error| PostgresError::Prepare(error.into()))?;
            runtime.block_on(prepare(address, key, public_url, node, rules))
        });
        prepared.join().unwrap_or_else(|_| Err(PostgresError::Prepare("the preparation panicked".into())))
    })
}

async fn prepare(
    address: &Address,
    key: &Key,
    public_url: &str,
    node: &NodeSettings,
    rules: &StepSettings,
) -> Result<Prepared, PostgresError> {
    let client = address.connect().await.map_err(|error| PostgresError::Connect(error.into()))?;
    create_store(&client).await.map_err(failed)?;
    client.batch_execute(BEGIN).await.map_err(failed)?;
    migrate(&client, key, public_url).await?;
    retarget_model_requests(&client, rules).await.map_err(failed)?;
    keep_callback_base(&client, &rules.callback_base).await.map_err(failed)?;
    client.batch_execute("COMMIT").await.map_err(failed)?;
    let (number, hosted) = nodes::join(&client, node).await.map_err(failed)?;
    // Signals that come after this are read, however long the start takes.
    let sql = "SELECT n.no, coalesce((SELECT max(s.no) FROM signals s WHERE s.node = n.no), 0) FROM nodes n WHERE n.no <> $1";
    let number_type = tokio_postgres::types::Type::INT8;
    let signals = client.query_typed(sql, &[(&number.0, number_type)]).await.map_err(failed)?;
    let sql = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint";
    let now = client.query_typed_one(sql, &[]).await.map_err(failed)?;
    Ok(Prepared {
        now: Timestamp(now.get(0)),
        node: number,
        signals: signals.iter().map(|row| (row.get(0), row.get(1))).collect(),
        hosted,
    })
}

async fn create_store(client: &Client) -> Result<(), tokio_postgres::Error> {
    let mut tries = 1;
    loop {
        match client.batch_execute(STORE).await {
            Err(error)
                if tries < CREATE_TRIES
                    && [Some(&SqlState::UNIQUE_VIOLATION), Some(&SqlState::DUPLICATE_TABLE)]
                        .contains(&error.code()) =>
            {
                tries += 1;
            }
            done => return done,
        }
    }
}

/// Migrates the tables in the current transaction. Only one node does so at a time, and the others find it done.
async fn migrate(client: &Client, key: &Key, public_url: &str) -> Result<(), PostgresError> {
    use tokio_postgres::types::Type;
    let key_check = key.mac(&[b"rap store"]).to_vec();
    let sql = "INSERT INTO rap_store (key_check, public_url) VALUES ($1, $2) ON CONFLICT DO NOTHING";
    let row: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 2] =
        [(&key_check, Type::BYTEA), (&public_url, Type::TEXT)];
    client.execute_typed(sql, &row).await.map_err(failed)?;
    let sql = "SELECT version, key_check, public_url FROM rap_store";
    let row = client.query_typed_one(sql, &[]).await.map_err(failed)?;
    let (found, stored_check): (i32, Vec<u8>) = (row.get(0), row.get(1));
    if found > KNOWN {
        let oldest =
            client.query_typed_one("SELECT oldest FROM rap_store", &[]).await.map_err(failed)?.get(0);
        check_oldest(oldest)?;
    }
    if !key.verify_mac(&[b"rap store"], &stored_check) {
        return Err(PostgresError::OtherKey);
    }
    if stored_check != key_check {
        // The check follows the current key, so that the oldest one can be removed from the configuration one day.
        let sql = "UPDATE rap_store SET key_check = $1";
        client.execute_typed(sql, &[(&key_check, Type::BYTEA)]).await.map_err(failed)?;
    }
    let stored: String = row.get(2);
    if stored != public_url {
        return Err(PostgresError::OtherUrl { stored, configured: public_url.to_owned() });
    }
    if (1..KNOWN).contains(&found) {
        // Every step locks heads first, so no step of a running node is in the middle of something from now on.
        client.batch_execute("LOCK TABLE threads IN EXCLUSIVE MODE").await.map_err(failed)?;
    }
    for migration in MIGRATIONS.iter().skip(found.unsigned_abs() as usize) {
        client.batch_execute(migration).await.map_err(failed)?;
    }
    let sql = "UPDATE rap_store SET version = $1 WHERE version < $1";
    client.execute_typed(sql, &[(&KNOWN, Type::INT4)]).await.map_err(failed)?;
    Ok(())
}

/// Checks that this release knows the oldest schema version that a node must know.
pub(super) fn check_oldest(oldest: i32) -> Result<(), PostgresError> {
    if oldest > KNOWN { Err(PostgresError::Newer { found: oldest, known: KNOWN }) } else { Ok(()) }
}

/// Sets the destination of waiting model requests to the model servers that are configured now.
async fn retarget_model_requests(client: &Client, rules: &StepSettings) -> Result<(), tokio_postgres::Error> {
    use tokio_postgres::types::Type;
    for row in client.query_typed("SELECT DISTINCT agent FROM asks", &[]).await? {
        let agent: String = row.get(0);
        let server = rules.model_server(&agent).to_owned();
        let sql = "UPDATE asks SET destination = $2 WHERE agent = $1 AND destination <> $2";
        client.execute_typed(sql, &[(&agent, Type::TEXT), (&server, Type::TEXT)]).await?;
    }
    Ok(())
}

/// Stores the base of the callback URLs of invocations that an earlier release or an import left without one.
async fn keep_callback_base(client: &Client, base: &str) -> Result<(), tokio_postgres::Error> {
    // There is an index for each of the two conditions.
    for condition in ["attempts = 0", "attempts > 0"] {
        let sql = format!(
            "UPDATE calls SET callback_base = $1 \
             WHERE state = 0 AND invoke_at IS NOT NULL AND {condition} AND callback_base IS NULL"
        );
        client.execute_typed(&sql, &[(&base, tokio_postgres::types::Type::TEXT)]).await?;
    }
    Ok(())
}
