//! The configuration: `rap.toml`, overridden by `RAP_` environment variables, overridden by flags.
//!
//! A loaded configuration is valid and complete. All mistakes are reported at once, each with its location. Secrets do
//! not appear in errors or `Debug` output. This module does not read the process environment; it arrives as data.

mod agent;
mod base_url;
mod document;
pub(crate) mod limits;
mod mcp_server;
mod mistake;
mod model;
mod notify;
mod read;
mod resolver;
mod section;
mod started_tool;
mod telemetry;
mod tool_server;
mod value;

pub use value::parse_duration;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rap_agent::LimitValue;
use rap_io::credentials::{Authorization, Credentials};
use rap_io::proxy::TrustedProxies;
use rap_io::tls::ServerTls;
use rap_protocol::url::is_on_loopback;
use rap_protocol::{HostPort, Secret, UrlPolicy, redact};
use rap_runtime::FALLBACK_AFTER;
pub use rap_runtime::model::anthropic::Thinking;
use rap_runtime::model::scripted;
pub use rap_runtime::model::{Options, Provider};
pub use rap_runtime::{AlertDestination, CallbackAuth, Limits, TelemetrySettings, ToolGlob, Window};
use url::Url;

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
    /// Destinations that are told about threads that need a person, have failed or were closed.
    pub notify: Vec<AlertDestination>,
    /// MCP servers whose tools are offered to agents.
    pub mcp_servers: Vec<McpServer>,
    /// Collector of traces; `None` if none are recorded.
    pub telemetry: Option<TelemetrySettings>,
    /// Time after which closed sessions are deleted; `None` if they are kept.
    pub retention: Option<Duration>,
    /// Limits of the runtime and of threads.
    pub limits: Limits,
    /// Files from which secrets were read, other than the configuration file.
    pub secret_files: Vec<PathBuf>,
    /// Environment variables from which secrets were read.
    pub secret_variables: Vec<String>,
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
    /// TLS of the listener; `None` for plain HTTP.
    pub tls: Option<ServerTls>,
    /// Proxies that verify client certificates.
    pub proxies: Option<TrustedProxies>,
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
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        self.public_url.as_ref().map_or_else(|| format!("{scheme}://{bound}"), BaseUrl::to_string)
    }
}

impl Config {
    /// Returns the settings whose URL is http and on another machine, with the URL.
    pub fn plain_http(&self) -> Vec<(&'static str, String)> {
        let own_models = self.agents.iter().flat_map(|agent| agent.model.iter().chain(&agent.fallbacks));
        let models = [&self.model].into_iter().chain(own_models);
        let models = models.filter_map(|model| model.options.base_url.as_ref());
        let public = self.server.public_url.iter().map(|url| ("server.public_url", url.to_url()));
        let urls = self.tool_servers.iter().filter_map(ToolServer::url);
        let servers = urls.map(|url| ("tool_server.url", url.to_url()));
        let token_url = |server: &ToolServer| match &server.credentials.authorization {
            Some(Authorization::Oauth(client)) => Some(("tool_server.oauth", client.token_url.clone())),
            _ => None,
        };
        let mcp_urls = self.mcp_servers.iter().filter_map(|server| match &server.source {
            McpSource::Url(url) => Some(("mcp_server.url", url.clone())),
            McpSource::Command(_) => None,
        });
        let token_urls = self.tool_servers.iter().filter_map(token_url);
        let notify = self.notify.iter().map(|notify| ("notify.url", notify.url.clone()));
        let models = models.map(|url| ("model.base_url", url.clone()));
        let telemetry =
            self.telemetry.iter().map(|telemetry| ("telemetry.otlp_endpoint", telemetry.url.clone()));
        let all = public.chain(models).chain(servers).chain(token_urls).chain(notify).chain(mcp_urls);
        let all = all.chain(telemetry);
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
        /// URL of a direct connection, if there is a transaction pooler at `url`.
        listen_url: Option<Secret>,
        /// Time after which other nodes take over from a node that does not renew its lease.
        lease: Duration,
    },
}

/// Returns the names of the providers that a configuration can name.
pub(crate) fn providers() -> [&'static str; 4] {
    model::PROVIDERS.map(|provider| provider.name)
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
    /// Models that are asked instead if the first one fails, in order.
    pub fallbacks: Vec<Model>,
    /// Time for which a model has to fail before the next one is asked.
    pub fallback_after: Duration,
    /// Limits of this agent's threads; `None` for the common ones.
    pub limits: Option<rap_agent::Limits>,
}

/// A tool server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolServer {
    /// URL, or program to start.
    pub source: ToolSource,
    /// Credentials to show. A server that is started has none of these.
    pub credentials: Credentials,
    /// Credentials that callbacks have to show; `None` if they need none.
    pub callback_auth: Option<CallbackAuth>,
    /// Timeout of calls to this server; `None` if `limits.call_timeout` applies.
    pub call_timeout: Option<LimitValue>,
}

/// Source of a tool server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolSource {
    /// It runs at this base URL; the discovery path is appended.
    Url(BaseUrl),
    /// `rap serve` starts it.
    Start {
        /// Name that is unique among the servers and stays the same.
        name: String,
        /// Program to start.
        program: Box<ToolProgram>,
        /// Bearer token that its callers send; `None` for one that is made at its first start.
        bearer: Option<Secret>,
        /// Time in which it has to name its port.
        start_timeout: Duration,
        /// Key that it shares with the server of the same name of another runtime, to move the state of sessions there.
        migration_key: Option<Secret>,
    },
}

/// Program of a tool server that `rap serve` starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolProgram {
    /// A command with its arguments. Its debug output may contain secrets.
    Command(Vec<String>),
    /// A tool server that ships with rap, with its options.
    Shipped(String, ToolOptions),
}

/// Options of a tool server that ships with rap.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ToolOptions {
    /// Directories that the tools may use.
    pub roots: Vec<PathBuf>,
    /// Commands that the shell runs without asking.
    pub allow: Vec<String>,
    /// Secrets of the senders of webhooks, by source.
    pub secrets: Vec<(String, Secret)>,
    /// Address on which webhooks are received.
    pub listen: Option<SocketAddr>,
    /// URL under which webhooks are received.
    pub public_url: Option<BaseUrl>,
}

/// An MCP server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct McpServer {
    /// Name that is unique among the MCP servers.
    pub name: String,
    /// Address or command of the server.
    pub source: McpSource,
    /// Text before the name of each tool.
    pub prefix: String,
    /// Meaning of missing annotations.
    pub trust: rap_tools::mcp::Trust,
    /// Variables of the environment of its process.
    pub environment: Vec<(String, Secret)>,
    /// Bearer token that every request to its URL shows.
    pub bearer: Option<Secret>,
    /// Registration as an OAuth client.
    pub oauth: McpOauth,
    /// Timeout of calls to this server; `None` if `limits.call_timeout` applies.
    pub call_timeout: Option<LimitValue>,
}

impl McpServer {
    /// Returns the name under which the runtime stores it.
    pub fn id(&self) -> String {
        format!("mcp:{}", self.name)
    }
}

/// Source of an MCP server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum McpSource {
    /// A command with its arguments. Its debug output may contain secrets.
    Command(Vec<String>),
    /// A URL with streamable HTTP.
    Url(Url),
}

/// Registration as an OAuth client of an MCP server. What is missing is requested from its authorization server.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct McpOauth {
    /// Client id.
    pub client_id: Option<String>,
    /// Secret of the client.
    pub client_secret: Option<Secret>,
    /// Scopes, separated by spaces.
    pub scope: Option<String>,
}

impl ToolServer {
    /// Returns the name under which the runtime stores it: its base URL, or `command:` and the name of a server that is
    /// started.
    pub fn id(&self) -> String {
        match &self.source {
            ToolSource::Url(url) => url.as_str().to_owned(),
            ToolSource::Start { name, .. } => format!("command:{name}"),
        }
    }

    /// Returns the base URL, if it is known.
    pub fn url(&self) -> Option<&BaseUrl> {
        match &self.source {
            ToolSource::Url(url) => Some(url),
            ToolSource::Start { .. } => None,
        }
    }
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
            notify: Vec::new(),
            mcp_servers: Vec::new(),
            telemetry: None,
            retention: None,
            limits: Limits::default(),
            secret_files: Vec::new(),
            secret_variables: Vec::new(),
        }
    }
}

impl Default for Server {
    fn default() -> Self {
        Server {
            listen: (Ipv4Addr::LOCALHOST, 7420).into(),
            public_url: None,
            tokens: Vec::new(),
            tls: None,
            proxies: None,
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
            fallbacks: Vec::new(),
            fallback_after: FALLBACK_AFTER,
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
    /// Returns the path, even if there is no such file.
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
