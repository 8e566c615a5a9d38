//! Connections: the address of the database, TLS, and pools.

use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod, Runtime};
use rap_io::metrics::Counter;
use rap_protocol::Secret;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio_postgres::config::SslMode;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Config, Connection, Row, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;
use url::form_urlencoded;

use super::statement::{BEGIN, BEGIN_READ, BEGIN_SOON, Failure, Statement, pipeline};
use crate::store::BoxError;

/// Time limit for opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for waiting until a connection is free.
const WAIT_TIMEOUT: Duration = Duration::from_secs(15);
/// Idle time after which a connection is probed, and the time within which the database must have answered.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Time limit of a pipeline. The database ends a statement by itself after 5 seconds; this ends the wait for a database
/// that cannot be reached.
const PIPELINE_TIMEOUT: Duration = Duration::from_secs(15);
/// Number of times that a write is tried again when another transaction was in the way.
const CONFLICT_RETRIES: u32 = 5;

/// Reason why an address of a database is not valid. It never contains the address, which has a password.
#[derive(Debug, thiserror::Error)]
pub enum UrlError {
    /// It is not a URL of a Postgres database.
    #[error("expected postgres://USER:PASSWORD@HOST:PORT/DATABASE")]
    NotPostgres,
    /// It has an unknown or invalid parameter.
    #[error("{0}")]
    Parameter(String),
    /// `sslmode` is not one of the supported modes.
    #[error("sslmode must be disable, prefer, require or verify-full")]
    SslMode,
    /// The certificates for TLS cannot be read.
    #[error("the certificates for TLS to the database cannot be read")]
    Certificates(#[source] BoxError),
}

/// A connection that belongs to no pool.
pub(super) type DirectConnection = Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>;

/// Settings for connections to a database.
#[derive(Clone)]
pub(crate) struct Address {
    config: Config,
    tls: MakeRustlsConnect,
}

impl Address {
    /// Reads an address. As in other clients of Postgres, `sslmode=require` encrypts without checking the server's
    /// certificate; `verify-full` checks it and the host name, against `sslrootcert` or the system's certificates.
    pub(crate) fn parse(address: &Secret) -> Result<Address, UrlError> {
        // An address may name several hosts, which a URL cannot.
        let (base, query) = address.expose().split_once('?').unwrap_or((address.expose(), ""));
        if !base.starts_with("postgres://") && !base.starts_with("postgresql://") {
            return Err(UrlError::NotPostgres);
        }
        let (mut mode, mut root) = ("prefer".to_owned(), None);
        let mut others = form_urlencoded::Serializer::new(String::new());
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "sslmode" => mode = value.into_owned(),
                "sslrootcert" => root = Some(value.into_owned()),
                _ => _ = others.append_pair(&name, &value),
            }
        }
        // In the URL of a database, a plus sign does not stand for a space.
        let config = format!("{base}?{}", others.finish().replace('+', "%20")).parse::<Config>();
        let mut config = config.map_err(|error| match std::error::Error::source(&error) {
            Some(source) => UrlError::Parameter(source.to_string()),
            None => UrlError::NotPostgres,
        })?;
        let (ssl, verify) = match mode.as_str() {
            "disable" => (SslMode::Disable, false),
            "prefer" => (SslMode::Prefer, false),
            "require" => (SslMode::Require, false),
            "verify-full" => (SslMode::Require, true),
            _ => return Err(UrlError::SslMode),
        };
        config.ssl_mode(ssl).connect_timeout(CONNECT_TIMEOUT).keepalives(true).keepalives_idle(KEEPALIVE);
        config.tcp_user_timeout(PIPELINE_TIMEOUT).application_name("rap");
        let tls = MakeRustlsConnect::new(tls(verify, root.as_deref())?);
        Ok(Address { config, tls })
    }

    /// Opens a connection, which the caller drives.
    pub(super) async fn open(&self) -> Result<(Client, DirectConnection), tokio_postgres::Error> {
        self.config.connect(self.tls.clone()).await
    }

    /// Opens a connection that belongs to no pool.
    pub(crate) async fn connect(&self) -> Result<Client, tokio_postgres::Error> {
        let (client, connection) = self.open().await?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to the database ended");
            }
        });
        Ok(client)
    }

    pub(super) fn pool(&self, size: usize) -> Connections {
        let manager = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = Manager::from_config(self.config.clone(), self.tls.clone(), manager);
        let pool = Pool::builder(manager)
            .max_size(size)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(WAIT_TIMEOUT))
            .create_timeout(Some(CONNECT_TIMEOUT))
            .build()
            .expect("bug: the pool has a runtime for its time limits");
        Connections { pool, round_trips: Arc::default() }
    }
}

fn tls(verify: bool, root: Option<&str>) -> Result<ClientConfig, UrlError> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| UrlError::Certificates(error.into()))?;
    if !verify {
        let unverified = Arc::new(Unverified(provider));
        return Ok(builder.dangerous().with_custom_certificate_verifier(unverified).with_no_client_auth());
    }
    let mut roots = RootCertStore::empty();
    let certificates: Vec<CertificateDer<'static>> = match root {
        Some(path) => CertificateDer::pem_file_iter(path)
            .and_then(Iterator::collect)
            .map_err(|error| UrlError::Certificates(format!("{path}: {error}").into()))?,
        None => rustls_native_certs::load_native_certs().certs,
    };
    roots.add_parsable_certificates(certificates);
    if roots.is_empty() {
        return Err(UrlError::Certificates("there are none; name a file with sslrootcert".into()));
    }
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// Accepts every certificate, for the modes that only encrypt.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// A bounded number of connections.
#[derive(Clone)]
pub(super) struct Connections {
    pool: Pool,
    /// Number of pipelines that were sent.
    pub(super) round_trips: Arc<Counter>,
}

impl Connections {
    async fn take(&self) -> Result<Object, Failure> {
        self.pool.get().await.map_err(|error| match error {
            PoolError::Closed => Failure::Closed,
            error => Failure::Unavailable(error.into()),
        })
    }

    /// Starts a transaction. `begin` is sent together with its first pipeline.
    pub(super) async fn begin(&self, begin: &'static str) -> Result<Transaction, Failure> {
        let round_trips = Arc::clone(&self.round_trips);
        Ok(Transaction { connection: Some(self.take().await?), begin: Some(begin), round_trips })
    }

    /// Reads with statements that do not depend on each other, in one pipeline.
    pub(super) async fn read(&self, statements: Vec<Statement>) -> Result<Vec<Vec<Row>>, Failure> {
        self.begin(BEGIN_READ).await?.finish(&statements).await
    }

    /// Reads with one statement.
    pub(super) async fn read_one(&self, statement: Statement) -> Result<Vec<Row>, Failure> {
        Ok(self.read(vec![statement]).await?.remove(0))
    }

    /// Writes in one transaction and one pipeline. If another transaction is in the way, the write is tried again.
    pub(super) async fn write(&self, statements: Vec<Statement>) -> Result<Vec<Vec<Row>>, Failure> {
        let mut tries = 0;
        loop {
            match self.begin(BEGIN).await?.finish(&statements).await {
                Err(Failure::Conflict(error)) if tries < CONFLICT_RETRIES => {
                    tries += 1;
                    tracing::debug!(%error, tries, "a write was in conflict with another one");
                    tokio::time::sleep(conflict_pause(tries)).await;
                }
                done => return done,
            }
        }
    }

    /// Writes something that need not survive a crash of the database.
    pub(super) async fn write_soon(&self, statements: Vec<Statement>) -> Result<Vec<Vec<Row>>, Failure> {
        self.begin(BEGIN_SOON).await?.finish(&statements).await
    }

    pub(super) fn close(&self) {
        self.pool.close();
    }
}

/// Returns the pause before a transaction is tried again. It differs between nodes, so that they do not meet again.
pub(super) fn conflict_pause(tries: u32) -> Duration {
    let mut random = [0; 2];
    // Without a random number the pause is merely not spread.
    getrandom::fill(&mut random).ok();
    Duration::from_micros(u64::from(u16::from_le_bytes(random)) * u64::from(tries.min(8)) / 8)
}

/// A transaction. If it is dropped unfinished, it is rolled back and its connection goes back to the pool.
pub(super) struct Transaction {
    connection: Option<Object>,
    /// The command that starts the transaction, until it is sent.
    begin: Option<&'static str>,
    round_trips: Arc<Counter>,
}

impl Transaction {
    /// Sends statements in one pipeline.
    pub(super) async fn pipeline(&mut self, statements: &[Statement]) -> Result<Vec<Vec<Row>>, Failure> {
        self.send(statements, false).await
    }

    /// Sends one statement.
    pub(super) async fn query(&mut self, statement: Statement) -> Result<Vec<Row>, Failure> {
        Ok(self.pipeline(&[statement]).await?.remove(0))
    }

    /// Sends the last statements and the commit in one pipeline.
    pub(super) async fn finish(mut self, statements: &[Statement]) -> Result<Vec<Vec<Row>>, Failure> {
        let done = self.send(statements, true).await;
        // The commit of a failed transaction is a rollback, so the connection can be used again. It was discarded if
        // it does not work.
        drop(self.connection.take());
        done.map_err(|failure| match failure {
            Failure::Unavailable(error) => Failure::Unknown(error),
            failure => failure,
        })
    }

    async fn send(&mut self, statements: &[Statement], commit: bool) -> Result<Vec<Vec<Row>>, Failure> {
        let Some(connection) = &self.connection else { return Err(Failure::Closed) };
        let begin = self.begin.take().map(Statement::command);
        let commit = commit.then(|| Statement::command("COMMIT"));
        let all: Vec<&Statement> = begin.iter().chain(statements).chain(&commit).collect();
        self.round_trips.count();
        let sent = tokio::time::timeout(PIPELINE_TIMEOUT, pipeline(connection, &all)).await;
        let done = sent.unwrap_or_else(|_| Err(Failure::Unavailable("the database does not answer".into())));
        if let Err(Failure::Unavailable(_)) = done
            && let Some(connection) = self.connection.take()
        {
            // A connection to a server that is shutting down or has become a replica is of no use either.
            drop(Object::take(connection));
        }
        let mut rows = done?;
        if begin.is_some() {
            rows.remove(0);
        }
        rows.truncate(statements.len());
        Ok(rows)
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        let Some(connection) = self.connection.take().filter(|_| self.begin.is_none()) else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            if connection.batch_execute("ROLLBACK").await.is_err() {
                drop(Object::take(connection));
            }
        });
    }
}
