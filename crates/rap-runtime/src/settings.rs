//! What a runtime is told when it starts.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use rap_agent::Cause;
use rap_protocol::{Secret, UrlPolicy};

use crate::glob::ToolGlob;
use crate::model::Model;

/// Everything a runtime needs to know.
pub struct Settings {
    /// What tool servers can reach; the base of callback URLs, without a slash at its end.
    pub public_url: String,
    /// The database. Its lock and its key lie beside it.
    pub database: PathBuf,
    /// The bearer tokens of clients. With none, everybody who reaches the server is a client.
    pub tokens: Vec<Secret>,
    /// The agents; the first one is meant where none is named.
    pub agents: Vec<Agent>,
    /// The model that is asked by every agent without one of its own.
    pub model: Arc<dyn Model>,
    /// Whether that model takes images.
    pub images: bool,
    /// How much that model can read.
    pub window: Window,
    /// The tool servers.
    pub tool_servers: Vec<ToolServer>,
    /// Where URLs that come from tool servers may lead.
    pub url_policy: UrlPolicy,
    /// Every bound.
    pub limits: Limits,
}

/// Why settings make no sense.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SettingsError {
    /// There has to be an agent.
    #[error("there is no agent: configure at least one")]
    NoAgent,
    /// A bearer token cannot be sent in a header.
    #[error(
        "the bearer of tool server {server} cannot be sent: a token has no line breaks or control characters"
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

    /// The bounds of an agent's threads.
    pub(crate) fn thread_limits(&self, agent: &str) -> &rap_agent::Limits {
        self.agent(agent).and_then(|agent| agent.limits.as_ref()).unwrap_or(&self.limits.thread)
    }

    /// The destination of an agent's questions; empty for an agent that is not configured any more.
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

/// Who answers in a thread.
#[derive(Debug, Clone)]
pub struct Agent {
    /// Its name.
    pub name: String,
    /// What it is told before everything else.
    pub system: String,
    /// Which tools it may use.
    pub tools: Vec<ToolGlob>,
    /// Which of these it may use in a thread that an event made, and in what comes of that thread.
    pub event_tools: Vec<ToolGlob>,
    /// Which of them a person has to allow each time, besides those that say that they are destructive.
    pub approve: Vec<ToolGlob>,
    /// Its own model, if it does not ask that of all.
    pub model: Option<AgentModel>,
    /// The bounds of its threads, if they are not those of all.
    pub limits: Option<rap_agent::Limits>,
}

/// The model of one agent.
#[derive(Debug, Clone)]
pub struct AgentModel {
    /// What is asked.
    pub model: Arc<dyn Model>,
    /// Whether it takes images.
    pub images: bool,
    /// How much it can read.
    pub window: Window,
}

/// How much a model can read at once, and how much of that a conversation may take before it is summarised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// In tokens; without it, the model's server is asked.
    pub tokens: Option<u32>,
    /// In percent of it.
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

/// What an agent may use in a thread.
#[derive(Debug, Clone)]
pub(crate) struct Rights {
    tools: Vec<ToolGlob>,
    event_tools: Option<Vec<ToolGlob>>,
    approve: Vec<ToolGlob>,
}

impl Agent {
    /// What it may use in a thread that was set going so.
    pub(crate) fn rights(&self, cause: Cause) -> Rights {
        let event_tools = (cause == Cause::Event).then(|| self.event_tools.clone());
        Rights { tools: self.tools.clone(), event_tools, approve: self.approve.clone() }
    }
}

impl Rights {
    pub(crate) fn may_use(&self, tool: &str) -> bool {
        let any = |patterns: &Vec<ToolGlob>| patterns.iter().any(|pattern| pattern.matches(tool));
        any(&self.tools) && self.event_tools.as_ref().is_none_or(any)
    }

    /// Whether a person has to allow a call of the tool.
    pub(crate) fn must_ask(&self, tool: &str) -> bool {
        self.approve.iter().any(|pattern| pattern.matches(tool))
    }
}

/// A tool server, and how we show who we are.
#[derive(Debug, Clone)]
pub struct ToolServer {
    /// Its base URL, without a slash at its end.
    pub url: String,
    /// The token for invocations and notifications.
    pub bearer: Option<Secret>,
}

/// Every bound of a runtime that is a setting.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The bounds of a thread.
    pub thread: rap_agent::Limits,
    /// How long an invocation is tried.
    pub invoke_retry_for: Duration,
    /// How long ago a call was acknowledged when its server is first asked whether anybody works on it, and how long it
    /// takes until it is asked again.
    pub lost_after: Duration,
    /// How long a tool server may take to acknowledge.
    pub invoke_ack_timeout: Duration,
    /// Invocations under way at a time, to each tool server.
    pub invoke_concurrency: usize,
    /// How often a question is put to the model before the thread has failed.
    pub model_attempts: u32,
    /// Questions under way at a time.
    pub model_concurrency: usize,
    /// How long a question may take.
    pub model_timeout: Duration,
    /// How long discovery may take.
    pub discovery_timeout: Duration,
    /// The largest body of a request, in bytes.
    pub body: usize,
    /// The largest content of a view, in bytes.
    pub view_bytes: usize,
    /// How long a callback URL is good for, apart from its call.
    pub callback_token_lifetime: Option<Duration>,
    /// For how long the ids of events are remembered.
    pub event_marks_for: Duration,
    /// Connections at a time.
    pub connections: usize,
    /// The head of a request has to arrive within this time.
    pub request_within: Duration,
    /// How long what is under way may take when the runtime stops.
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
