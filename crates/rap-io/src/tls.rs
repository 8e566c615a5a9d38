//! TLS with certificates from files, which are read again when they change, so that a renewed certificate needs no restart.

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, io};

use rap_protocol::UrlRules;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::client::{Client, ClientLimits, native_roots, tls_builder};
use crate::reloading::{FileError, Reloading, read_bounded};

/// Certificate, key and client certificates of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTls {
    /// PEM file with the certificate and those of the authorities between it and a root.
    pub cert: PathBuf,
    /// PEM file with the private key.
    pub key: PathBuf,
    /// PEM file with the authorities of client certificates. `None` asks clients for no certificate.
    pub client_ca: Option<PathBuf>,
    /// Clients that need a certificate, if there is a `client_ca`.
    pub clients: ClientCertificates,
}

/// Clients that need a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientCertificates {
    /// Every client: a connection without a valid certificate is refused.
    Required,
    /// No client: the server decides for each request. An invalid certificate is refused nevertheless.
    Optional,
}

/// Certificate, key and authorities with which a client connects. A file that is not given means the default: no client
/// certificate, and the root certificates of the system.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientTls {
    /// PEM files with the client's certificate and its private key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// PEM file with the authorities of the server's certificate, instead of the system's.
    pub ca: Option<PathBuf>,
}

/// A certificate that a client has proven to own, and that an authority of the server's has signed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerCertificate {
    /// URI names and DNS names of the certificate, in this order.
    pub names: Vec<String>,
}

impl PeerCertificate {
    /// Reads the names of a certificate that was verified before. Without a name, its SHA-256 is its name.
    fn of(certificate: &CertificateDer<'_>) -> PeerCertificate {
        let mut names = Vec::new();
        if let Ok(parsed) = webpki::EndEntityCert::try_from(certificate) {
            names.extend(parsed.valid_uri_names().map(str::to_owned));
            names.extend(parsed.valid_dns_names().map(str::to_owned));
        }
        if names.is_empty() {
            let digest = Sha256::digest(certificate);
            let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            names.push(format!("sha256:{hex}"));
        }
        PeerCertificate { names }
    }
}

/// Accepts TLS connections.
#[derive(Debug)]
pub struct Acceptor(Reloading<ServerConfig>);

impl Acceptor {
    /// Reads the files now, and again when one of them changes.
    pub fn new(tls: ServerTls) -> Result<Acceptor, FileError> {
        let mut files = vec![tls.cert.clone(), tls.key.clone()];
        files.extend(tls.client_ca.clone());
        Reloading::open(files, move || server_config(&tls)).map(Acceptor)
    }

    /// Performs the handshake.
    pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> io::Result<(TlsStream<S>, Option<PeerCertificate>)> {
        let stream = TlsAcceptor::from(self.0.get()).accept(stream).await?;
        let certificates = stream.get_ref().1.peer_certificates();
        let certificate = certificates.and_then(<[_]>::first).map(PeerCertificate::of);
        Ok((stream, certificate))
    }
}

impl ClientTls {
    /// Returns the files, for a check of their permissions and for [`Reloading`].
    pub fn files(&self) -> Vec<PathBuf> {
        let identity = self.identity.iter().flat_map(|(cert, key)| [cert, key]);
        identity.chain(&self.ca).cloned().collect()
    }

    /// Creates a client for URLs that somebody else named, which is made again when a file changes.
    pub fn outgoing(&self, rules: UrlRules, limits: ClientLimits) -> Result<Reloading<Client>, FileError> {
        let tls = self.clone();
        Reloading::open(self.files(), move || {
            Ok(Client::outgoing_with_tls(rules.clone(), limits, tls.config()?))
        })
    }

    fn config(&self) -> Result<ClientConfig, FileError> {
        let roots = match &self.ca {
            Some(path) => authorities(path)?,
            None => native_roots(),
        };
        let builder = tls_builder().with_root_certificates(roots);
        match &self.identity {
            None => Ok(builder.with_no_client_auth()),
            Some((cert, key)) => {
                let config = builder.with_client_auth_cert(chain(cert)?, private_key(key)?);
                config.map_err(|error| FileError::new(cert, error))
            }
        }
    }
}

fn server_config(tls: &ServerTls) -> Result<ServerConfig, FileError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("bug: ring supports the default TLS versions");
    let builder = match &tls.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let roots = Arc::new(authorities(path)?);
            let mut verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
            if tls.clients == ClientCertificates::Optional {
                verifier = verifier.allow_unauthenticated();
            }
            builder.with_client_cert_verifier(verifier.build().map_err(|error| FileError::new(path, error))?)
        }
    };
    let config = builder.with_single_cert(chain(&tls.cert)?, private_key(&tls.key)?);
    let mut config = config.map_err(|error| FileError::new(&tls.cert, error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

fn chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let bytes = read_bounded(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    found.ok().filter(|chain| !chain.is_empty()).ok_or_else(|| not_pem(path, "a certificate"))
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, FileError> {
    PrivateKeyDer::from_pem_slice(&read_bounded(path)?).map_err(|_| not_pem(path, "a private key"))
}

fn authorities(path: &Path) -> Result<RootCertStore, FileError> {
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(chain(path)?);
    if added == 0 { Err(not_pem(path, "a certificate of an authority")) } else { Ok(roots) }
}

fn not_pem(path: &Path, expected: impl fmt::Display) -> FileError {
    FileError::new(path, format_args!("expected {expected} in PEM format"))
}
