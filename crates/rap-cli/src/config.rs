//! The configuration: `rap.toml`, overridden by `RAP_` environment variables, overridden by flags.
//!
//! A loaded configuration is valid and complete. All mistakes are reported at once, each with its location. Secrets do
//! not appear in errors or `Debug` output. This module does not read the process environment; it arrives as data.

mod agent;
mod base_url;
mod document;
pub(crate) mod limits;
mod mistake;
mod model;
mod read;
mod resolver;
mod section;
mod value;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use rap_protocol::url::is_on_loopback;
use rap_protocol::{HostPort, Secret, UrlPolicy, redact};
pub use rap_runtime::model::anthropic::Thinking;
use rap_runtime::model::scripted;
pub use rap_runtime::model::{Options, Provider};
pub use rap_runtime::{Limits, ToolGlob, Window};

pub use self::base_url::BaseUrl;
pub use self::mistake::{Error, Location, Mistake, Problem};
use self::read::Draft;
use self::resolver::Resolver;

/// Name of the file that is read by default, and that `rap init` writes.
pub const FILE_NAME: &str = "rap.toml";

/// Environment variables by name.
pub type Environment = BTreeMap<String, String>;

/// Configuration of a runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Network settings and client tokens.
    pub server: Server,
    /// Location of the database.
    pub store: Store,
    /// Model of every agent without a model of its own.
    pub model: Model,
    /// Agents, at least one. The first is the default.
    pub agents: Vec<Agent>,
    /// Tool servers whose tools are offered to agents.
    pub tool_servers: Vec<ToolServer>,
    /// Limits of the runtime and of threads.
    pub limits: Limits,
    /// Files from which secrets were read, other than the configuration file.
    pub secret_files: Vec<PathBuf>,
}

/// Network settings and client tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Address to bind.
    pub listen: SocketAddr,
    /// Base of callback URLs; `None` for the bound address. Always set if `listen` is an unspecified address.
    pub public_url: Option<BaseUrl>,
    /// Tokens of clients. If there are none, `listen` is a loopback address.
    pub tokens: Vec<Secret>,
    /// Addresses that URLs named by tools may have.
    pub url_policy: UrlPolicy,
    /// Exceptions from `url_policy`.
    pub allow_hosts: Vec<HostPort>,
}

/// Minimum length of a token of clients on other machines, in characters.
const MIN_TOKEN_CHARS: usize = 16;

fn has_short_token(tokens: &[Secret]) -> bool {
    tokens.iter().any(|token| token.expose().chars().count() < MIN_TOKEN_CHARS)
}

impl Server {
    /// Returns true if a token can be guessed. That is possible only on a loopback address.
    pub fn has_short_token(&self) -> bool {
        has_short_token(&self.tokens)
    }

    /// Returns the base of callback URLs for a server that is bound to this address.
    pub fn url_at(&self, bound: SocketAddr) -> String {
        self.public_url.as_ref().map_or_else(|| format!("http://{bound}"), BaseUrl::to_string)
    }
}

impl Config {
    /// Returns the settings whose URL is http and on another machine, with the URL.
    pub fn plain_http(&self) -> Vec<(&'static str, String)> {
        let own_models = self.agents.iter().filter_map(|agent| agent.model.as_ref());
        let models = [&self.model].into_iter().chain(own_models);
        let models = models.filter_map(|model| model.options.base_url.as_ref());
        let public = self.server.public_url.iter().map(|url| ("server.public_url", url.to_url()));
        let servers = self.tool_servers.iter().map(|server| ("tool_server.url", server.url.to_url()));
        let all = public.chain(models.map(|url| ("model.base_url", url.clone()))).chain(servers);
        let plain = all.filter(|(_, url)| url.scheme() == "http" && !is_on_loopback(url));
        let mut plain: Vec<_> = plain.map(|(key, url)| (key, redact::url(&url))).collect();
        plain.dedup();
        plain
    }
}

/// Location of the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Store {
    /// A SQLite file.
    Sqlite(PathBuf),
    /// A Postgres database.
    Postgres {
        /// URL with user and password.
        url: Secret,
        /// Key that all nodes of the database share.
        key: Secret,
    },
}

/// A model and its options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// Provider of the model.
    pub provider: &'static Provider,
    /// Options for the provider.
    pub options: Options,
    /// True if the model accepts images.
    pub images: bool,
    /// Size of the context window, and when a conversation is summarised.
    pub window: Window,
}

/// An agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agent {
    /// Name that threads refer to: 1 to 128 letters, digits, `_`, `-` and `.`.
    pub name: String,
    /// System prompt; may be empty.
    pub system: String,
    /// Tools that the agent may use.
    pub tools: Vec<ToolGlob>,
    /// Subset of `tools` for event children and their descendants.
    pub event_tools: Vec<ToolGlob>,
    /// Tools whose calls a person has to approve.
    pub approve: Vec<ToolGlob>,
    /// Model of this agent; `None` for the common one.
    pub model: Option<Model>,
    /// Limits of this agent's threads; `None` for the common ones.
    pub limits: Option<rap_agent::Limits>,
}

/// A tool server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolServer {
    /// Base URL; the discovery path is appended.
    pub url: BaseUrl,
    /// Bearer token to send; `None` if the server requires none.
    pub bearer: Option<Secret>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            server: Server::default(),
            store: Store::Sqlite("rap.db".into()),
            model: Model {
                provider: &scripted::PROVIDER,
                options: Options::default(),
                images: true,
                window: Window::default(),
            },
            agents: vec![Agent::default()],
            tool_servers: Vec::new(),
            limits: Limits::default(),
            secret_files: Vec::new(),
        }
    }
}

impl Default for Server {
    fn default() -> Self {
        Server {
            listen: (Ipv4Addr::LOCALHOST, 7420).into(),
            public_url: None,
            tokens: Vec::new(),
            url_policy: UrlPolicy::Loopback,
            allow_hosts: Vec::new(),
        }
    }
}

impl Default for Agent {
    fn default() -> Self {
        Agent {
            name: "default".into(),
            system: String::new(),
            tools: vec![ToolGlob::every()],
            event_tools: vec![ToolGlob::every()],
            approve: Vec::new(),
            model: None,
            limits: None,
        }
    }
}

/// Sources of a configuration. It has no `Debug` because it contains secrets.
pub struct Sources {
    /// Configuration file.
    pub file: File,
    /// Environment, whose `RAP_SECTION_KEY` variables override the file.
    pub environment: Environment,
    /// Flags, which override both.
    pub flags: Vec<Flag>,
}

/// Configuration file to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum File {
    /// A file that must exist.
    Given(PathBuf),
    /// A file that may be absent.
    IfPresent(PathBuf),
}

/// A flag that sets a key. It has no `Debug` because the value may be a secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Flag {
    /// Key with its section: `server.listen`.
    pub key: &'static str,
    /// Value as given on the command line.
    pub value: String,
    /// Name of the flag: `--listen`.
    pub name: &'static str,
}

impl Config {
    /// Reads and validates a configuration.
    pub fn load(sources: &Sources) -> Result<Config, Error> {
        let (text, path) = sources.file.read()?;
        let mut document = document::parse(&text, &path.display().to_string())?;
        document::apply_variables(&mut document, &sources.environment);
        document::apply_flags(&mut document, &sources.flags);
        Draft::from_document(document, &Resolver::new(&sources.environment, path)).into_result()
    }
}

impl File {
    /// Returns the path, also if there is no such file.
    pub fn path(&self) -> &Path {
        let (File::Given(path) | File::IfPresent(path)) = self;
        path
    }

    /// Returns the text and the path. An absent optional file is empty.
    fn read(&self) -> Result<(String, &Path), Error> {
        let path = self.path();
        match std::fs::read_to_string(path) {
            Ok(text) => Ok((text, path)),
            Err(error) if error.kind() == io::ErrorKind::NotFound && matches!(self, File::IfPresent(_)) => {
                Ok((String::new(), path))
            }
            Err(why) => Err(Error::Unreadable { path: path.to_owned(), why }),
        }
    }
}
