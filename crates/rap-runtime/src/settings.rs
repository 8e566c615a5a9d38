//! What a runtime is told when it starts.

use std::path::PathBuf;
use std::time::Duration;

use rap_protocol::{Secret, UrlPolicy};

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
    /// The model that all agents ask.
    pub model: Model,
    /// Whether that model takes images.
    pub images: bool,
    /// The tool servers.
    pub tool_servers: Vec<ToolServer>,
    /// Where URLs that come from tool servers may lead.
    pub url_policy: UrlPolicy,
    /// Every bound.
    pub limits: Limits,
}

/// Who answers in a thread.
#[derive(Debug, Clone)]
pub struct Agent {
    /// Its name.
    pub name: String,
    /// What it is told before everything else.
    pub system: String,
    /// Which tools it may use: names, with `*` for any part of one.
    pub tools: Vec<String>,
}

impl Default for Agent {
    fn default() -> Self {
        Agent { name: "default".into(), system: String::new(), tools: vec!["*".into()] }
    }
}

impl Agent {
    /// Whether it may use a tool.
    pub(crate) fn may_use(&self, tool: &str) -> bool {
        self.tools.iter().any(|pattern| matches(pattern, tool))
    }
}

/// `*` stands for any text.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start, rest)) => text.strip_prefix(start).is_some_and(|text| {
            (0..=text.len()).filter(|at| text.is_char_boundary(*at)).any(|at| matches(rest, &text[at..]))
        }),
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
    /// How long a tool server may take to acknowledge.
    pub invoke_ack_timeout: Duration,
    /// Invocations under way at a time.
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
            stop_within: Duration::from_secs(2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_part_of_a_name() {
        let table = [
            ("*", "anything", true),
            ("git_*", "git_log", true),
            ("git_*", "svn_log", false),
            ("*_log", "git_log", true),
            ("a*b*c", "a1b2c", true),
            ("a*b*c", "a1c2b", false),
            ("echo", "echo", true),
            ("echo", "echo2", false),
        ];
        for (pattern, name, expected) in table {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }
}
