//! What can go wrong: in a handler, where a model will read about it, and in a server, where its owner will.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use rap_protocol::redact;

/// A result whose error a handler passes on with `?`.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a handler failed with. Any error turns into one with `?`.
///
/// ```
/// use rap_tool::Error;
///
/// let told = Error::new("there is no city of that name; try a larger one nearby");
/// assert_eq!(told.to_string(), "there is no city of that name; try a larger one nearby");
///
/// fn parse(text: &str) -> Result<u32, Error> {
///     Ok(text.parse()?)
/// }
/// assert_eq!(parse("x").unwrap_err().to_string(), "invalid digit found in string");
/// ```
pub enum Error {
    /// Words for the model, passed on as they are.
    Told(String),
    /// An error from elsewhere. The model sees its first line without paths and addresses; the log has all of it.
    Caused(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// An error in words that a model can act on.
    pub fn new(message: impl Into<String>) -> Self {
        Error::Told(message.into())
    }

    /// What the model reads, without the prefix that marks an error.
    pub(crate) fn for_model(&self) -> String {
        let text = match self {
            Error::Told(message) => message.clone(),
            Error::Caused(error) => redact::text(&error.to_string()),
        };
        if text.trim().is_empty() { "the tool failed and did not say why".into() } else { text }
    }
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for Error {
    fn from(error: E) -> Self {
        Error::Caused(Box::new(error))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Told(message) => f.write_str(message),
            Error::Caused(error) => error.fmt(f),
        }
    }
}

/// With those of its causes that it does not tell itself, since this is what `main` prints.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let told = self.to_string();
        f.write_str(&told)?;
        let mut source = match self {
            Error::Told(_) => None,
            Error::Caused(error) => error.source(),
        };
        while let Some(cause) = source {
            let text = cause.to_string();
            if !told.contains(&text) {
                write!(f, "\n  because: {text}")?;
            }
            source = cause.source();
        }
        Ok(())
    }
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address is not one, or is in use.
    #[error("can not listen on {address}: {source}")]
    Bind {
        /// What was asked for.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Without authentication, and reachable from elsewhere.
    #[error(
        "{0} can be reached from other machines, and nobody has to authenticate: set RAP_TOOL_BEARER or call \
         .bearer(token); or say .auth(Auth::OpenToAnyone) if everyone may call these tools"
    )]
    OpenToTheNetwork(SocketAddr),
    /// The same for a router, of which nobody knows who reaches it.
    #[error(
        "nobody has to authenticate: call .bearer(token); or say .auth(Auth::OpenToAnyone) if the application \
         authenticates callers itself, or everyone may call these tools"
    )]
    OpenRouter,
    /// Nobody could find the server under the address it is bound to.
    #[error(
        "{0} is no address that a runtime can call: say where it is reached, with RAP_TOOL_URL or .public_url(…)"
    )]
    NoPublicUrl(String),
    /// The public URL is not one.
    #[error("the public URL has to be an http or https URL without query and fragment")]
    BadPublicUrl,
    /// `PORT` is not a port.
    #[error("PORT has to be a number from 0 to 65535")]
    BadPort,
    /// A token that every request without one would match.
    #[error("a bearer token has to be at least one character of visible ASCII")]
    BadToken,
    /// The toolset would be refused by every runtime.
    #[error("the toolset is not valid: {0}")]
    Toolset(String),
    /// The data directory can not be used.
    #[error("can not use the data directory {}: {source}", path.display())]
    Data {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Another process has the journal.
    #[error(transparent)]
    Locked(#[from] rap_io::lock::LockError),
    /// The key that was given is not one.
    #[error(
        "RAP_TOOL_KEY, or what is given to .key(…), has to be 64 hexadecimal digits or the base64 of 32 bytes"
    )]
    BadKey,
    /// The file of the key is unusable.
    #[error(transparent)]
    Key(#[from] rap_io::secret_box::Error),
    /// The journal was written with another key.
    #[error(
        "the journal in {} was written with another key; give the same RAP_TOOL_KEY, or the same journal.key, as before",
        .0.display()
    )]
    WrongKey(PathBuf),
    /// The journal can not be used.
    #[error("can not use the journal: {0}")]
    Journal(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn main_prints_a_cause_once() {
        let source = std::io::Error::other("the port is taken");
        let error = Error::from(ServeError::Bind { address: "127.0.0.1:1".into(), source });
        assert_eq!(format!("{error:?}"), "can not listen on 127.0.0.1:1: the port is taken");
    }
}
