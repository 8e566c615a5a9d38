//! Settings of a runtime.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use rap_agent::RuntimeLimits as Limits;
use rap_agent::{Attention, Cause};
use rap_io::proxy::TrustedProxies;
use rap_io::reloading::{FileError, SecretSource};
use rap_io::tls::ServerTls;
use rap_protocol::{HostPort, Secret, UrlPolicy, UrlRules};
use sha2::{Digest, Sha256};
use url::Url;

use crate::function::{Function, Functions};
use crate::glob::ToolGlob;
use crate::model::Model;
use crate::telemetry::TelemetrySettings;
pub(crate) use crate::tool_server::{CallbackAuth, ToolServer};
use crate::web::WebAssets;

/// Settings with which a runtime starts.
pub struct Settings {
    /// Base of callback URLs, which tool servers have to reach. Has no trailing slash.
    pub public_url: String,
    /// Location of the database.
    pub database: Database,
    /// Bearer tokens of clients. If empty, every client on this machine is accepted.
    pub tokens: Vec<Secret>,
    /// Agents. The first one is the default for new threads.
    pub agents: Vec<Agent>,
    /// Model of every agent that has no model of its own.
    pub model: Arc<dyn Model>,
    /// True if that model accepts images.
    pub images: bool,
    /// Context window of that model.
    pub window: Window,
    /// Tool servers whose tools are offered to agents.
    pub tool_servers: Vec<ToolServer>,
    /// Destinations that are told about threads that need a person, have failed or were closed.
    pub notify: Vec<AlertDestination>,
    /// Collector of traces. `None` records none.
    pub telemetry: Option<TelemetrySettings>,
    /// Time after which closed sessions are deleted. `None` keeps them.
    pub retention: Option<Duration>,
    /// Functions of this process that are offered to agents as tools.
    pub functions: Vec<Function>,
    /// Addresses that URLs named by tools may have: endpoints and response URLs.
    pub url_policy: UrlPolicy,
    /// Exceptions from `url_policy`. Tool servers' credentials may be sent there, too.
    pub allow_hosts: Vec<HostPort>,
    /// Address that the runtime listens on, which tools must not make it send to. `None` if it is not known.
    pub listen: Option<SocketAddr>,
    /// TLS of the listener. `None` serves plain HTTP.
    pub tls: Option<ServerTls>,
    /// Proxies that verify the client certificates of tool servers. Their header is used for [`CallbackAuth::Tls`] only.
    pub proxies: Option<TrustedProxies>,
    /// Files of the web interface. `None` serves none.
    pub web_assets: Option<WebAssets>,
    /// Limits of the runtime.
    pub limits: Limits,
}

/// A destination of alerts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AlertDestination {
    /// URL to which each message is posted. Its path may be a secret.
    pub url: Url,
    /// Keys that sign the messages, as the Standard Webhooks specification says. At least one.
    pub keys: Vec<SecretSource>,
    /// States of threads that cause an alert to this destination.
    pub on: Vec<Attention>,
}

impl AlertDestination {
    /// Returns the name of the destination in the database: a digest of its URL.
    pub(crate) fn key(&self) -> String {
        let digest = Sha256::digest(self.url.as_str());
        digest[..16].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Returns the scheme, host and port of the URL, which are not secret.
    pub(crate) fn origin(&self) -> String {
        self.url.origin().ascii_serialization()
    }
}

/// Location of a database.
#[derive(Debug, Clone)]
pub enum Database {
    /// A SQLite file. Its lock file and its key file are in the same directory.
    File(PathBuf),
    /// A Postgres database, which any number of runtimes can share.
    Postgres(PostgresDatabase),
}

/// A Postgres database.
#[derive(Debug, Clone)]
pub struct PostgresDatabase {
    /// URL with user and password.
    pub url: Secret,
    /// Key that protects callback URLs and stored secrets: 64 hexadecimal digits or the base64 of 32 bytes.
    pub key: Secret,
    /// URL of a direct connection for notifications, if `url` leads to a transaction pooler. `None` means `url`.
    pub listen_url: Option<Secret>,
    /// Time after which other nodes take over the work of this one if it has not renewed its lease.
    pub lease: Duration,
}

impl PostgresDatabase {
    /// Default of `lease`.
    pub const LEASE: Duration = Duration::from_secs(15);
}

/// Writes the path, or the scheme and the host of the URL.
impl fmt::Display for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Database::File(path) => write!(f, "{}", path.display()),
            Database::Postgres(PostgresDatabase { url, .. }) => match Url::parse(url.expose()) {
                Ok(url) => f.write_str(&rap_protocol::redact::url(&url)),
                Err(_) => f.write_str("postgres"),
            },
        }
    }
}

/// Reason why settings are not valid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SettingsError {
    /// No agent is configured.
    #[error("there is no agent: configure at least one")]
    NoAgent,
    /// The credentials for a tool server cannot be used.
    #[error("the credentials for the tool server {server} cannot be used: {why}")]
    Credentials {
        /// Base URL of the tool server.
        server: String,
        /// Reason without any secret.
        why: String,
    },
    /// The keys for a destination of alerts cannot be used.
    #[error("the secret of [[notify]] for {server} cannot be used: {why}")]
    Notify {
        /// Scheme, host and port of the destination.
        server: String,
        /// Reason without any secret.
        why: String,
    },
    /// The certificate, key or client authorities of the listener cannot be used.
    #[error("server.tls: {0}")]
    Tls(FileError),
    /// Callbacks have to be signed, but there is no key.
    #[error("callbacks of the tool server {server} have to be signed, but it has no hmac key")]
    NoCallbackKey {
        /// Base URL of the tool server.
        server: String,
    },
    /// Callbacks have to show a certificate, but nothing asks for one.
    #[error(
        "callbacks of the tool server {server} have to show a certificate: set server.tls with client_ca, or \
         server.trusted_proxies"
    )]
    NoClientCa {
        /// Base URL of the tool server.
        server: String,
    },
    /// A function cannot be a tool.
    #[error("the functions cannot be offered as tools: {0}")]
    BadFunction(String),
}

impl Settings {
    /// Returns settings with one agent, `model`, no tools and default limits. The callback endpoint is expected at
    /// `http://127.0.0.1:7420`, which matters only to tool servers.
    pub fn new(database: impl Into<PathBuf>, model: Arc<dyn Model>) -> Settings {
        Settings {
            public_url: "http://127.0.0.1:7420".into(),
            database: Database::File(database.into()),
            tokens: Vec::new(),
            agents: vec![Agent::default()],
            model,
            images: false,
            window: Window::default(),
            tool_servers: Vec::new(),
            notify: Vec::new(),
            telemetry: None,
            retention: None,
            functions: Vec::new(),
            url_policy: UrlPolicy::Loopback,
            allow_hosts: Vec::new(),
            listen: None,
            tls: None,
            proxies: None,
            web_assets: None,
            limits: Limits::default(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), SettingsError> {
        if self.agents.is_empty() {
            return Err(SettingsError::NoAgent);
        }
        for server in &self.tool_servers {
            let asks_for_certificates =
                self.proxies.is_some() || self.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
            if server.callback_auth == Some(CallbackAuth::Tls) && !asks_for_certificates {
                return Err(SettingsError::NoClientCa { server: server.url.clone() });
            }
            if server.callback_auth == Some(CallbackAuth::Hmac) && server.credentials.hmac.is_empty() {
                return Err(SettingsError::NoCallbackKey { server: server.url.clone() });
            }
        }
        Functions::new(&self.functions).map(drop)
    }

    /// Returns the rules for URLs that tools name. The origins of tool servers and models are always permitted.
    pub(crate) fn url_rules(&self) -> UrlRules {
        let mut rules = UrlRules::from(self.url_policy).allow_hosts(self.allow_hosts.iter().cloned());
        if let Some(listen) = self.listen {
            rules = rules.listening_on(listen);
        }
        if let Ok(public_url) = Url::parse(&self.public_url) {
            rules = rules.public_url(&public_url);
        }
        let models = self.agents.iter().flat_map(|agent| self.models(agent)).map(Model::destination);
        let configured = self.tool_servers.iter().map(|server| server.url.as_str()).chain(models);
        let configured = configured.chain(self.notify.iter().map(|notify| notify.url.as_str()));
        let rules = configured
            .filter_map(|url| Url::parse(url).ok())
            .fold(rules, |rules, url| rules.configured(&url));
        let started: Vec<_> = self.tool_servers.iter().filter_map(|server| server.started.clone()).collect();
        rules.started(move |port| started.iter().any(|server| server.port() == Some(port)))
    }

    /// Returns true if only clients on this machine are served.
    pub(crate) fn is_local_only(&self) -> bool {
        let is_loopback = |listen: SocketAddr| listen.ip().to_canonical().is_loopback();
        self.tokens.is_empty() || self.listen.is_some_and(is_loopback)
    }

    /// Returns the address that this runtime itself listens on, as far as it is known.
    pub(crate) fn own_url(&self) -> String {
        self.listen.map_or_else(|| self.public_url.clone(), |listen| format!("http://{listen}"))
    }

    /// Returns the models of an agent, in the order in which they are asked: its own or the default one, then its fallbacks.
    pub(crate) fn models<'a>(&'a self, agent: &'a Agent) -> impl Iterator<Item = &'a dyn Model> {
        let first = agent.model.as_ref().map_or(&self.model, |own| &own.model);
        let fallbacks = agent.fallbacks.iter().map(|fallback| &fallback.model);
        [first].into_iter().chain(fallbacks).map(|model| &**model)
    }

    fn agent(&self, name: &str) -> Option<&Agent> {
        self.agents.iter().find(|agent| agent.name == name)
    }

    /// Returns the limits of an agent's threads.
    pub(crate) fn thread_limits(&self, agent: &str) -> &rap_agent::Limits {
        self.agent(agent).and_then(|agent| agent.limits.as_ref()).unwrap_or(&self.limits.thread)
    }

    /// Returns the destination of an agent's model. Empty for an agent that is no longer configured.
    pub(crate) fn model_server(&self, agent: &str) -> &str {
        self.agent(agent).and_then(|agent| self.models(agent).next()).map_or("", Model::destination)
    }
}

/// An agent: a system prompt, tool permissions and a model.
#[derive(Debug, Clone)]
pub struct Agent {
    /// Name by which threads refer to the agent.
    pub name: String,
    /// System prompt.
    pub system: String,
    /// Tools that it may use.
    pub tools: Vec<ToolGlob>,
    /// Subset of `tools` that it may use in a thread that was spawned for an event, and in the descendants of that
    /// thread.
    pub event_tools: Vec<ToolGlob>,
    /// Tools whose calls need a user's approval, in addition to tools that declare themselves destructive.
    pub approve: Vec<ToolGlob>,
    /// The agent's own model. `None` means [`Settings::model`].
    pub model: Option<AgentModel>,
    /// Models that are asked instead if the first one fails, in order.
    pub fallbacks: Vec<AgentModel>,
    /// Time for which a model has to fail before the next one is asked.
    pub fallback_after: Duration,
    /// Limits of the agent's threads. `None` means [`Limits::thread`].
    pub limits: Option<rap_agent::Limits>,
}

/// Default time for which a model has to fail before the next one is asked.
pub const FALLBACK_AFTER: Duration = Duration::from_secs(30);

/// The model of one agent.
#[derive(Debug, Clone)]
pub struct AgentModel {
    /// The model itself.
    pub model: Arc<dyn Model>,
    /// True if it accepts images.
    pub images: bool,
    /// Its context window.
    pub window: Window,
}

/// Context window of a model, and the share of it that a conversation may fill before it is summarised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Size in tokens. `None` means that the model's server is asked.
    pub tokens: Option<u32>,
    /// Share of the window at which a conversation is summarised, in percent.
    pub summarise_at: u32,
}

impl Default for Window {
    fn default() -> Self {
        Window { tokens: None, summarise_at: 75 }
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

/// Tool permissions of an agent in a thread.
#[derive(Debug, Clone)]
pub(crate) struct Permissions {
    tools: Vec<ToolGlob>,
    event_tools: Option<Vec<ToolGlob>>,
    approve: Vec<ToolGlob>,
}

impl Agent {
    /// Returns the permissions in a thread with this cause.
    pub(crate) fn permissions(&self, cause: Cause) -> Permissions {
        let event_tools = (cause == Cause::Event).then(|| self.event_tools.clone());
        Permissions { tools: self.tools.clone(), event_tools, approve: self.approve.clone() }
    }
}

impl Permissions {
    pub(crate) fn may_use(&self, tool: &str) -> bool {
        let any = |patterns: &Vec<ToolGlob>| patterns.iter().any(|pattern| pattern.matches(tool));
        any(&self.tools) && self.event_tools.as_ref().is_none_or(any)
    }

    /// Returns true if calls of the tool need a user's approval.
    pub(crate) fn needs_approval(&self, tool: &str) -> bool {
        self.approve.iter().any(|pattern| pattern.matches(tool))
    }
}
