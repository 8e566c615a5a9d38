//! Prepares a database: creates or migrates its tables, and checks that this node belongs to it.

use rap_io::secret_box::Key;
use rap_protocol::Timestamp;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use super::connect::{Address, UrlError};
use super::lease;
use crate::store::{BoxError, StepSettings};

const MIGRATIONS: &[&str] = &[include_str!("schema_1.sql")];
/// Number of times that the table of the store is created again, when nodes that start together create it at once.
const CREATE_TRIES: u32 = 5;
/// The row that all nodes share. Its lock guards migrations.
const STORE: &str = "CREATE TABLE IF NOT EXISTS rap_store (\
     is_one boolean PRIMARY KEY DEFAULT true CHECK (is_one), \
     version integer NOT NULL DEFAULT 0, \
     key_check bytea NOT NULL, \
     public_url text NOT NULL, \
     node text, \
     lease_until timestamptz)";
/// Settings of the transaction that migrates. A migration may take long; another node waits for it.
const BEGIN: &str = "BEGIN; SET LOCAL lock_timeout = '60s'; SET LOCAL statement_timeout = 0";

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
    /// A newer release has migrated the database.
    #[error(
        "the Postgres database has schema version {found}, and this release knows only {known}: \
         install the newer release on this node"
    )]
    Newer {
        /// Version of the database.
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
    /// Another node uses the database.
    #[error(
        "the node {node} uses this Postgres database. One node at a time can use it: stop that node, and this one takes over"
    )]
    InUse {
        /// Name of the other node: its host and the address that it listens on.
        node: String,
    },
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

/// Prepares a database for a node, and takes the lease for it if it has a name. Blocks until that is done, also on a thread of an async runtime. Returns the time of
/// the database.
pub(crate) fn prepare_blocking(
    address: &Address,
    key: &Key,
    public_url: &str,
    node: Option<&str>,
    rules: &StepSettings,
) -> Result<Timestamp, PostgresError> {
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
    node: Option<&str>,
    rules: &StepSettings,
) -> Result<Timestamp, PostgresError> {
    let client = address.connect().await.map_err(|error| PostgresError::Connect(error.into()))?;
    create_store(&client).await.map_err(failed)?;
    client.batch_execute(BEGIN).await.map_err(failed)?;
    migrate(&client, key, public_url).await?;
    retarget_questions(&client, rules).await.map_err(failed)?;
    let sql = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint";
    let now = client.query_typed_one(sql, &[]).await.map_err(failed)?;
    client.batch_execute("COMMIT").await.map_err(failed)?;
    if let Some(node) = node {
        lease::take(&client, node).await?;
    }
    Ok(Timestamp(now.get(0)))
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
    let sql = "SELECT version, key_check, public_url FROM rap_store FOR UPDATE";
    let row = client.query_typed_one(sql, &[]).await.map_err(failed)?;
    let known = MIGRATIONS.len() as i32;
    let (found, stored_check): (i32, Vec<u8>) = (row.get(0), row.get(1));
    if found > known {
        return Err(PostgresError::Newer { found, known });
    }
    if !key.verify_mac(&[b"rap store"], &stored_check) {
        return Err(PostgresError::OtherKey);
    }
    let stored: String = row.get(2);
    if stored != public_url {
        return Err(PostgresError::OtherUrl { stored, configured: public_url.to_owned() });
    }
    for migration in &MIGRATIONS[found.unsigned_abs() as usize..] {
        client.batch_execute(migration).await.map_err(failed)?;
    }
    let sql = "UPDATE rap_store SET version = $1 WHERE version <> $1";
    client.execute_typed(sql, &[(&known, Type::INT4)]).await.map_err(failed)?;
    Ok(())
}

/// Sets the destination of waiting questions to the model servers that are configured now.
async fn retarget_questions(client: &Client, rules: &StepSettings) -> Result<(), tokio_postgres::Error> {
    use tokio_postgres::types::Type;
    for row in client.query_typed("SELECT DISTINCT agent FROM asks", &[]).await? {
        let agent: String = row.get(0);
        let server = rules.model_server(&agent).to_owned();
        let sql = "UPDATE asks SET destination = $2 WHERE agent = $1 AND destination <> $2";
        client.execute_typed(sql, &[(&agent, Type::TEXT), (&server, Type::TEXT)]).await?;
    }
    Ok(())
}
