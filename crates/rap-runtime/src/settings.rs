//! Settings of a runtime.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use rap_agent::Cause;
use rap_protocol::{Secret, UrlPolicy};

use crate::glob::ToolGlob;
use crate::model::Model;

/// Settings with which a runtime starts.
pub struct Settings {
    /// Base of callback URLs, which tool servers have to reach. Has no trailing slash.
    pub public_url: String,
    /// Path of the database. Its lock file and its key file are in the same directory.
    pub database: PathBuf,
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
    /// Restriction of the URLs that tool servers send.
    pub url_policy: UrlPolicy,
    /// Limits of the runtime.
    pub limits: Limits,
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
}

impl Settings {
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
        Ok(())
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

/// Configurable limits of a runtime.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Limits of a thread, for agents without limits of their own.
    pub thread: rap_agent::Limits,
    /// Time for which an invocation is retried.
    pub invoke_retry_for: Duration,
    /// Time after the acknowledgement of a call until its server is first asked whether the call is still alive, and
    /// the interval of further checks.
    pub lost_after: Duration,
    /// Time limit for a tool server to acknowledge an invocation.
    pub invoke_ack_timeout: Duration,
    /// Maximum number of concurrent invocations of each tool server.
    pub invoke_concurrency: usize,
    /// Maximum number of attempts to ask the model before the thread fails.
    pub model_attempts: u32,
    /// Maximum number of concurrent questions to each model server.
    pub model_concurrency: usize,
    /// Time limit of a question to the model.
    pub model_timeout: Duration,
    /// Time limit for fetching a toolset.
    pub discovery_timeout: Duration,
    /// Maximum size of a request body, in bytes.
    pub body: usize,
    /// Maximum size of a view's content, in bytes.
    pub view_bytes: usize,
    /// Time after which a callback URL expires. `None` means that it is valid as long as its call or subscription.
    pub callback_token_lifetime: Option<Duration>,
    /// Time for which clients' Idempotency-Keys are kept.
    pub event_marks_for: Duration,
    /// Maximum number of concurrent incoming connections.
    pub connections: usize,
    /// Time limit for receiving the headers of a request.
    pub request_within: Duration,
    /// Time that work in progress has to finish when the runtime stops.
    pub stop_within: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            thread: rap_agent::Limits::default(),
            invoke_retry_for: Duration::from_secs(600),
            lost_after: Duration::from_secs(15 * 60),
            invoke_ack_timeout: Duration::from_secs(10),
            invoke_concurrency: 256,
            model_attempts: 5,
            model_concurrency: 64,
            model_timeout: Duration::from_secs(600),
            discovery_timeout: Duration::from_secs(5),
            body: rap_protocol::limits::BODY_BYTES,
            view_bytes: 256 * 1024,
            callback_token_lifetime: None,
            event_marks_for: Duration::from_secs(7 * 24 * 3600),
            connections: 4096,
            request_within: Duration::from_secs(30),
            stop_within: Duration::from_millis(1500),
        }
    }
}
