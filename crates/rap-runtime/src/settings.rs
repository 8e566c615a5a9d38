//! Settings of a runtime.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use http::HeaderValue;
use rap_agent::Cause;
pub use rap_agent::RuntimeLimits as Limits;
use rap_protocol::{HostPort, Secret, UrlPolicy, UrlRules};
use url::Url;

use crate::function::{Function, Functions};
use crate::glob::ToolGlob;
use crate::model::Model;

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
    /// Functions of this process that are offered to agents as tools.
    pub functions: Vec<Function>,
    /// Addresses that URLs named by tools may have: endpoints and response URLs.
    pub url_policy: UrlPolicy,
    /// Exceptions from `url_policy`. Tool servers' credentials may be sent there, too.
    pub allow_hosts: Vec<HostPort>,
    /// Address that the runtime listens on, which tools must not make it send to. `None` if it is not known.
    pub listen: Option<SocketAddr>,
    /// Limits of the runtime.
    pub limits: Limits,
}

/// Location of a database.
#[derive(Debug, Clone)]
pub enum Database {
    /// A SQLite file. Its lock file and its key file are in the same directory.
    File(PathBuf),
    /// A Postgres database.
    Postgres {
        /// URL with user and password.
        url: Secret,
        /// Key that protects callback URLs and stored secrets: 64 hexadecimal digits or the base64 of 32 bytes.
        key: Secret,
    },
}

/// Writes the path, or the scheme and the host of the URL.
impl fmt::Display for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Database::File(path) => write!(f, "{}", path.display()),
            Database::Postgres { url, .. } => match Url::parse(url.expose()) {
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
    /// A bearer token of a tool server cannot be sent in a header.
    #[error(
        "the bearer token of tool server {server} cannot be sent: it has line breaks or control characters"
    )]
    BadBearer {
        /// Base URL of the tool server.
        server: String,
    },
    /// A function cannot be a tool.
    #[error("the functions cannot be tools: {0}")]
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
            functions: Vec::new(),
            url_policy: UrlPolicy::Loopback,
            allow_hosts: Vec::new(),
            listen: None,
            limits: Limits::default(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), SettingsError> {
        if self.agents.is_empty() {
            return Err(SettingsError::NoAgent);
        }
        for server in &self.tool_servers {
            let bearer = server.bearer.as_ref().map(Secret::expose);
            if bearer.is_some_and(|bearer| HeaderValue::try_from(bearer).is_err()) {
                return Err(SettingsError::BadBearer { server: server.url.clone() });
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
        let models = self.agents.iter().map(|agent| self.model_server(&agent.name));
        let configured = self.tool_servers.iter().map(|server| server.url.as_str()).chain(models);
        configured.filter_map(|url| Url::parse(url).ok()).fold(rules, |rules, url| rules.configured(&url))
    }

    /// Returns true if only clients on this machine are served.
    pub(crate) fn is_local_only(&self) -> bool {
        let is_loopback = |listen: SocketAddr| listen.ip().to_canonical().is_loopback();
        self.tokens.is_empty() || self.listen.is_some_and(is_loopback)
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
        match self.agent(agent) {
            None => "",
            Some(agent) => match &agent.model {
                Some(own) => own.model.destination(),
                None => self.model.destination(),
            },
        }
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
    /// Limits of the agent's threads. `None` means [`Limits::thread`].
    pub limits: Option<rap_agent::Limits>,
}

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

/// A tool server and the runtime's credentials for it.
#[derive(Debug, Clone)]
pub struct ToolServer {
    /// Base URL, without a trailing slash.
    pub url: String,
    /// Bearer token that is sent with every request. `None` sends no `Authorization` header.
    pub bearer: Option<Secret>,
}
