//! Errors of handlers, which the model reads, and errors of the server, which its operator reads.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use rap_protocol::redact;

/// The result type of handlers.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error of a handler. Any standard error converts into it with `?`.
///
/// ```
/// use rap_tool::Error;
///
/// let error = Error::new("there is no city of that name; try a larger one nearby");
/// assert_eq!(error.to_string(), "there is no city of that name; try a larger one nearby");
///
/// fn parse(text: &str) -> Result<u32, Error> {
///     Ok(text.parse()?)
/// }
/// assert_eq!(parse("x").unwrap_err().to_string(), "invalid digit found in string");
/// ```
pub enum Error {
    /// A message for the model.
    Message(String),
    /// Any other error. The model sees its first line, with paths and addresses removed. The log has the full text.
    Source(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Creates an error with a message that the model can act on.
    pub fn new(message: impl Into<String>) -> Self {
        Error::Message(message.into())
    }

    /// Returns the text for the model, without the prefix that marks an error result.
    pub(crate) fn for_model(&self) -> String {
        let text = match self {
            Error::Message(message) => message.clone(),
            Error::Source(error) => redact::text(&error.to_string()),
        };
        if text.trim().is_empty() { "the tool failed without an error message".into() } else { text }
    }
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for Error {
    fn from(error: E) -> Self {
        Error::Source(Box::new(error))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Message(message) => f.write_str(message),
            Error::Source(error) => error.fmt(f),
        }
    }
}

/// `main` prints an error with `Debug`, so this includes the causes that the message does not already contain.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let message = self.to_string();
        f.write_str(&message)?;
        let mut source = match self {
            Error::Message(_) => None,
            Error::Source(error) => error.source(),
        };
        while let Some(cause) = source {
            let text = cause.to_string();
            if !message.contains(&text) {
                write!(f, "\n  because: {text}")?;
            }
            source = cause.source();
        }
        Ok(())
    }
}

/// Reason why a server did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address is invalid or in use.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The requested address.
        address: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The server is reachable from other machines and requires no authentication.
    #[error(
        "{0} can be reached from other machines, and no authentication is set up: set RAP_TOOL_BEARER or call \
         .bearer(token), or call .auth(Auth::OpenToAnyone) if everyone may call these tools"
    )]
    UnauthenticatedListener(SocketAddr),
    /// The router requires no authentication. The library cannot know who can reach the application around it.
    #[error(
        "no authentication is set up: call .bearer(token), or call .auth(Auth::OpenToAnyone) if the application \
         authenticates callers itself or everyone may call these tools"
    )]
    UnauthenticatedRouter,
    /// Runtimes cannot call the address that the server is bound to, such as `0.0.0.0`.
    #[error("a runtime cannot call {0}: set the public URL with RAP_TOOL_URL or .public_url(…)")]
    NoPublicUrl(String),
    /// The public URL is invalid.
    #[error("the public URL must be an http or https URL without query and fragment")]
    BadPublicUrl,
    /// The environment variable `PORT` is not a port number.
    #[error("PORT must be a number from 0 to 65535")]
    BadPort,
    /// The environment variable `RAP_TOOL_CALLBACKS_TO` is not the name of a policy.
    #[error("RAP_TOOL_CALLBACKS_TO must be public, private or loopback")]
    BadCallbacksTo,
    /// A bearer token is empty or contains characters other than visible ASCII.
    #[error("a bearer token must have at least one character, all of them visible ASCII")]
    BadToken,
    /// A file with tokens, keys or certificates cannot be used, or a signing key is invalid.
    #[error(transparent)]
    Credentials(#[from] rap_io::reloading::FileError),
    /// The header or the addresses of [`Auth::ProxyHeader`](crate::Auth::ProxyHeader) are invalid.
    #[error("Auth::ProxyHeader: {0}")]
    Proxies(rap_io::proxy::BadProxies),
    /// The URL of [`Auth::Oauth`](crate::Auth::Oauth) would send secrets unencrypted over a network.
    #[error("Auth::Oauth: the introspection URL must begin with https, unless it is on this machine")]
    AuthorizationServer,
    /// Callers have to show client certificates, but the server does not ask for any.
    #[error("Auth::MutualTls needs .tls(…) with client_ca, or RAP_TOOL_TLS_CLIENT_CA")]
    NoClientCa,
    /// The application around a router has the connections, and so the certificates and addresses of callers.
    #[error(
        "Auth::MutualTls and Auth::ProxyHeader need the connections, which a router does not have: let the application \
         authenticate callers, and call .auth(Auth::OpenToAnyone)"
    )]
    NoConnections,
    /// Two environment variables belong together, and only one is set.
    #[error("{0} belong together: set both or none")]
    Environment(&'static str),
    /// The toolset is invalid. Every runtime would refuse it.
    #[error("the toolset is not valid: {0}")]
    Toolset(String),
    /// The data directory could not be created.
    #[error("cannot use the data directory {}: {source}", path.display())]
    Data {
        /// Path of the data directory.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The data directory is a URL, such as that of a database.
    #[error(
        "RAP_TOOL_DATA, or the argument of .data(…), must be a directory and not a URL: a journal cannot be in a \
         database server"
    )]
    JournalUrl,
    /// Another process uses the data directory.
    #[error(transparent)]
    Locked(#[from] rap_io::lock::LockError),
    /// The key that was passed in is invalid.
    #[error(
        "RAP_TOOL_KEY, or the argument of .key(…), must be 64 hexadecimal digits or the base64 of 32 bytes"
    )]
    BadKey,
    /// The migration key is invalid.
    #[error(
        "RAP_TOOL_MIGRATION_KEY, or the argument of .migrate_calls(…), must be 64 hexadecimal digits or the base64 of \
         32 bytes"
    )]
    BadMigrationKey,
    /// The key file is unusable.
    #[error(transparent)]
    Key(#[from] rap_io::secret_box::Error),
    /// The journal was written with another key.
    #[error(
        "the journal in {} was written with another key; use the RAP_TOOL_KEY or the file journal.key that it was \
         written with",
        .0.display()
    )]
    WrongKey(PathBuf),
    /// The journal could not be opened, migrated or written.
    #[error("cannot use the journal: {0}")]
    Journal(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn main_prints_a_cause_once() {
        let source = std::io::Error::other("the port is taken");
        let error = Error::from(ServeError::Bind { address: "127.0.0.1:1".into(), source });
        assert_eq!(format!("{error:?}"), "cannot listen on 127.0.0.1:1: the port is taken");
    }
}
