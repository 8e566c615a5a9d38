//! MCP servers as tool servers: the bridge.
//!
//! One process holds all configured MCP servers. Each of them is a tool server of its own, with its own path, journal and
//! toolset, so that servers do not affect each other. An MCP server that is a command runs as one process, which all threads
//! share; one with a URL is a connection, or one for each user if the server asks users to sign in.
//!
//! A call of the agent becomes one `tools/call`. It is never repeated: if the MCP server ends during a call, the call
//! gets an error that says so.

mod bridge;
mod calls;
mod connection;
mod content;
mod http;
mod listing;
mod notices;
mod outline;
mod process;
mod questions;
mod reading;
mod running;
mod server;
mod session;
mod sign_in;
mod task;
mod users;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use bridge::{Bound, Error, bind};

/// An MCP server. It has no `Debug` because it contains secrets.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct McpServer {
    /// Name, which is also the name of its directory and the first part of its path.
    pub name: String,
    /// Address or command of the server.
    pub source: McpSource,
    /// Text before the name of each tool.
    pub prefix: String,
    /// Meaning of missing annotations.
    pub trust: Trust,
    /// Variables of the environment of its process.
    pub environment: BTreeMap<String, String>,
    /// Token for every request to a server with a URL.
    pub bearer: Option<String>,
    /// Registration of this program as a client of a server that asks users to sign in.
    pub oauth: OauthRegistration,
}

/// Source of an MCP server.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum McpSource {
    /// A command with its arguments, which speaks MCP on stdin and stdout.
    Command(Vec<String>),
    /// A URL with streamable HTTP.
    Url(String),
}

/// Trust in the annotations of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Trust {
    /// A tool that does not say whether it is destructive is taken not to be.
    #[default]
    Normal,
    /// A tool that does not say whether it is destructive is taken to be.
    Low,
}

/// Registration as an OAuth client. Everything that is missing is requested from the authorization server.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct OauthRegistration {
    /// Client id; `None` to register dynamically.
    pub client_id: Option<String>,
    /// Secret of the client; `None` for a public client.
    pub client_secret: Option<String>,
    /// Scopes, separated by spaces; `None` for those that the server names.
    pub scope: Option<String>,
}

/// Options of the bridge.
pub struct Options {
    /// The MCP servers. Their names are different.
    pub servers: Vec<McpServer>,
    /// Parent of the servers' data directories.
    pub data: PathBuf,
    /// Environment of the processes, besides their own variables.
    pub environment: Vec<(String, String)>,
    /// URL under which browsers reach the bridge after a sign-in: below it, `/mcp:NAME` leads to `/NAME/consent`. `None` if
    /// they reach its own address.
    pub consent_url: Option<String>,
    /// Address to listen on, unless the environment variable `PORT` says otherwise.
    pub listen: String,
}
