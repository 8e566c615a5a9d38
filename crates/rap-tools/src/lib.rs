//! The tool servers that ship with rap. Each is a small module on `rap-tool`.
//!
//! | name | tools |
//! |---|---|
//! | `shell` | `run_command` |
//! | `files` | `read_file`, `write_file`, `list_files`, `search_files`, `watch_files` |
//! | `http` | `fetch` |
//! | `timer` | `remind`, `every` |
//! | `webhook` | `subscribe_webhook` |
//!
//! A program that offers `shell` calls [`rap_tool::process::init`] first in `main`.

mod cut;
mod files;
mod http;
#[cfg(feature = "mcp")]
pub mod mcp;
mod shell;
mod timer;
mod webhook;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use rap_protocol::{Secret, UrlRules};
use rap_tool::ToolServer;
use url::Url;

/// Names of the tool servers.
pub const NAMES: [&str; 5] = ["shell", "files", "http", "timer", "webhook"];

/// Options of a tool server. Each server uses some of them.
#[derive(Debug, Clone)]
pub struct Options {
    /// Directory of the server's data.
    pub data: PathBuf,
    /// Directories that `shell` and `files` may use.
    pub roots: Vec<PathBuf>,
    /// Commands that `shell` runs without asking. Empty: it never asks, and is annotated as destructive.
    pub allow: Vec<String>,
    /// Rules for the URLs of `fetch`.
    pub rules: UrlRules,
    /// Search path of `shell`. `None` is a usual one.
    pub path: Option<String>,
    /// Secrets of the senders of webhooks, by source.
    pub secrets: Vec<(String, Secret)>,
    /// Address on which webhooks are received.
    pub hooks: SocketAddr,
    /// URL under which senders reach that address. `None` is the address itself.
    pub hooks_url: Option<Url>,
}

impl Options {
    /// Returns options with a data directory, and otherwise defaults: no roots, no allow list, `fetch` for public
    /// addresses only, webhooks on any free port of loopback.
    pub fn new(data: impl Into<PathBuf>) -> Options {
        Options {
            data: data.into(),
            roots: Vec::new(),
            allow: Vec::new(),
            rules: UrlRules::from(rap_protocol::UrlPolicy::Public),
            path: None,
            secrets: Vec::new(),
            hooks: SocketAddr::from(([127, 0, 0, 1], 0)),
            hooks_url: None,
        }
    }
}

/// Reason why a tool server cannot be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no server of this name.
    #[error("there is no tool server {0:?}; the names are shell, files, http, timer and webhook")]
    UnknownName(String),
    /// A directory cannot be used.
    #[error("cannot use the directory {}: {source}", path.display())]
    Directory {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// Webhooks cannot be received on this address.
    #[error("cannot receive webhooks on {address}: {source}")]
    Hooks {
        /// The address.
        address: SocketAddr,
        /// Error of the system.
        source: io::Error,
    },
    /// There is no sender of webhooks of this name.
    #[error("there is no source of webhooks {0:?}; the sources are github, stripe, slack and standard")]
    UnknownSource(String),
    /// The secret of a sender has the wrong form.
    #[error("the secret of {0} is not valid: {1}")]
    BadSecret(String, rap_tool::webhook::BadSecret),
}

/// Returns the tool server of this name. The caller serves it.
pub async fn server(name: &str, options: Options) -> Result<ToolServer, Error> {
    let data = options.data.clone();
    let server = match name {
        "shell" => shell::server(options)?,
        "files" => files::server(&options)?,
        "http" => http::server(options),
        "timer" => timer::server(),
        "webhook" => webhook::server(options).await?,
        _ => return Err(Error::UnknownName(name.to_owned())),
    };
    Ok(server.data(data))
}
