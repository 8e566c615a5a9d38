//! What can be wrong with a configuration, and where. A secret is never repeated, and neither is a URL, since
//! it may hold a password.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file can not be read.
    #[error("can not read {}: {why}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{place}: {message}")]
    Syntax {
        /// Where it stops to be.
        place: Place,
        /// What the parser says, without the line itself.
        message: String,
    },
    /// There are mistakes; each is a line of its own.
    #[error("{}", lines(.0))]
    Mistakes(Vec<Mistake>),
}

fn lines(mistakes: &[Mistake]) -> String {
    mistakes.iter().map(Mistake::to_string).collect::<Vec<_>>().join("\n")
}

/// One thing that is wrong.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {key}: {problem}")]
pub struct Mistake {
    /// Where it was written.
    pub place: Place,
    /// The key, with its section.
    pub key: String,
    /// What is wrong with it.
    pub problem: Problem,
}

/// Where a setting was written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// In the file.
    Line {
        /// The file's path, as it was given.
        file: Arc<str>,
        /// The line, counted from 1.
        line: usize,
    },
    /// In this environment variable.
    Variable(String),
    /// In this flag.
    Flag(&'static str),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line { file, line } => write!(f, "{file}:{line}"),
            Place::Variable(name) => f.write_str(name),
            Place::Flag(name) => f.write_str(name),
        }
    }
}

/// What is wrong with a setting.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// No such key, but one that looks like it.
    #[error("unknown key; did you mean {0}?")]
    Misspelt(&'static str),
    /// No such key.
    #[error("unknown key; `rap init` writes a file with every key")]
    Unknown,
    /// Another type, or a value out of bounds.
    #[error("expected {expected}, found {found}")]
    Found {
        /// What would do.
        expected: String,
        /// What is there.
        found: String,
    },
    /// The same, of a value that may be secret.
    #[error("expected {0}")]
    Expected(&'static str),
    /// It has to be there.
    #[error("missing; {0}")]
    Missing(&'static str),
    /// Planned, not built.
    #[error("{what} is not in this version yet; {instead}")]
    NotYet {
        /// What was asked for.
        what: &'static str,
        /// What to do now.
        instead: &'static str,
    },
    /// `env:NAME` of a variable that is not there.
    #[error("the environment variable {0} is not set")]
    NotSet(String),
    /// `env:NAME` of a variable without a value.
    #[error("the environment variable {0} is empty")]
    Empty(String),
    /// `file:PATH` of a file that can not be read, or a script.
    #[error("can not read {}: {why}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: std::io::Error,
    },
    /// What has to be there once is there twice.
    #[error("there already is one at {0}")]
    Repeated(Place),
    /// A bound of the runtime as a whole, set for one agent.
    #[error("an agent can not have this for itself; set it in [limits]")]
    OfAll,
    /// Other machines could reach a server that asks nobody for a token.
    #[error(
        "{0} can be reached from other machines, and no token is set: set server.tokens, or listen on 127.0.0.1"
    )]
    OpenToTheNetwork(SocketAddr),
    /// There is no address to hand to tool servers.
    #[error(
        "tool servers can not call back to {0}: set server.public_url to an address that they can reach, such as \
         \"http://rap.example.com:7420\""
    )]
    NoPublicUrl(SocketAddr),
}
