//! Errors of a configuration and their locations. An error never contains a secret, nor a URL, which may contain a
//! password.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

/// Reason why a configuration could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration file cannot be read.
    #[error("cannot read {}: {why}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        why: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{location}: {message}")]
    Syntax {
        /// Location of the syntax error.
        location: Location,
        /// Message of the parser, without the source line.
        message: String,
    },
    /// Invalid settings. Each is printed on a line of its own.
    #[error("{}", lines(.0))]
    Mistakes(Vec<Mistake>),
}

fn lines(mistakes: &[Mistake]) -> String {
    mistakes.iter().map(Mistake::to_string).collect::<Vec<_>>().join("\n")
}

/// An invalid setting.
#[derive(Debug, thiserror::Error)]
#[error("{location}: {key}: {problem}")]
pub struct Mistake {
    /// Location of the setting.
    pub location: Location,
    /// Key with its section.
    pub key: String,
    /// Description of the problem.
    pub problem: Problem,
}

/// Location of a setting.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Location {
    /// A line of the configuration file.
    Line {
        /// Path of the file as given.
        file: Arc<str>,
        /// Line number, from 1.
        line: usize,
    },
    /// An environment variable.
    Variable(String),
    /// A flag.
    Flag(&'static str),
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Line { file, line } => write!(f, "{file}:{line}"),
            Location::Variable(name) => f.write_str(name),
            Location::Flag(name) => f.write_str(name),
        }
    }
}

/// Problem of a setting.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// An unknown key, with a similar known one.
    #[error("unknown key; did you mean {0}?")]
    Misspelt(&'static str),
    /// An unknown key.
    #[error("unknown key; `rap init` writes a file with every key")]
    Unknown,
    /// A value of the wrong type or out of range.
    #[error("expected {expected}, found {found}")]
    Found {
        /// Description of valid values.
        expected: String,
        /// The value found.
        found: String,
    },
    /// Like `Found`, for a value that may be secret and is not shown.
    #[error("expected {0}")]
    Expected(&'static str),
    /// A required key is missing.
    #[error("missing; {0}")]
    Missing(&'static str),
    /// `env:NAME` with a variable that is not set.
    #[error("the environment variable {0} is not set")]
    NotSet(String),
    /// `env:NAME` with an empty variable.
    #[error("the environment variable {0} is empty")]
    Empty(String),
    /// `file:PATH`, or a script, with a file that cannot be read.
    #[error("cannot read {}: {why}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        why: std::io::Error,
    },
    /// A value that must be unique occurs twice.
    #[error("already used at {0}")]
    Repeated(Location),
    /// A limit of the runtime as a whole, set for one agent.
    #[error("this limit cannot be set for one agent; set it in [limits]")]
    RuntimeOnly,
    /// The server would be reachable from other machines without a token.
    #[error(
        "{0} is reachable from other machines, but server.tokens is empty: set server.tokens, or listen on 127.0.0.1"
    )]
    OpenToTheNetwork(SocketAddr),
    /// A token of clients on other machines can be guessed.
    #[error(
        "a token is shorter than 16 characters, and the server is reachable from other machines: use a long random token, \
         or listen on 127.0.0.1"
    )]
    ShortToken,
    /// `listen` is an unspecified address, so there is no address for callback URLs.
    #[error(
        "tool servers cannot call back to {0}: set server.public_url to a URL that they can reach, such as \
         \"http://rap.example.com:7420\""
    )]
    NoPublicUrl(SocketAddr),
}
