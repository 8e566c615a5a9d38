//! The user, who sends messages to the runtime through its client API or through a command.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http::{HeaderValue, header};
use rap_io::client::Client;
use rap_protocol::Secret;
use serde_json::{Value, json};
use tokio::process::Command;
use url::Url;

use super::placeholders::{self, CommandTemplate};
use crate::{Exchange, RedactedMessage, Verdict};

/// Interface by which the user talks to the runtime.
#[derive(Clone)]
pub enum User {
    /// Client API of `rap serve`.
    Api(Api),
    /// Command that sends a message. It can do nothing else.
    Command(SayCommand),
}

/// Client API of a runtime.
#[derive(Clone)]
pub struct Api {
    pub(crate) base: Url,
    pub(crate) token: Option<Secret>,
}

/// Command of `--say`, with the placeholders `{thread}` and `{text}` and those of the runtime's process.
#[derive(Clone)]
pub struct SayCommand {
    words: CommandTemplate,
    /// Placeholders of the runtime's process, with their values.
    values: Vec<(&'static str, String)>,
    /// Error output of the last run that failed.
    last_error: Arc<Mutex<Option<String>>>,
}

/// Answer of the client API.
pub(crate) struct ApiResponse {
    pub(crate) status: u16,
    pub(crate) body: Value,
    pub(crate) exchange: Exchange,
}

impl Api {
    /// Creates a client for the API at this URL.
    pub fn new(base: Url, token: Option<Secret>) -> Api {
        Api { base, token }
    }

    fn url(&self, path: &[&str]) -> Url {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().push("v1").extend(path);
        }
        url
    }

    fn headers(&self) -> Vec<(header::HeaderName, HeaderValue)> {
        let bearer = self.token.as_ref().and_then(|token| {
            let mut value = HeaderValue::try_from(format!("Bearer {}", token.expose())).ok()?;
            value.set_sensitive(true);
            Some((header::AUTHORIZATION, value))
        });
        bearer.into_iter().collect()
    }

    pub(crate) async fn post(
        &self,
        http: &Client,
        path: &[&str],
        body: &Value,
    ) -> Result<ApiResponse, Verdict> {
        let url = self.url(path);
        let head = format!("POST {}", url.path());
        let raw = Bytes::from(body.to_string());
        let reply = http.post_json(&url, &self.headers(), raw.clone()).await;
        let reply = reply.map_err(|error| {
            let exchange =
                Exchange::new(RedactedMessage::new(&head, &raw), RedactedMessage::head(error.to_string()));
            Verdict::fail(format!("the client API did not answer: {error}"), vec![exchange])
        })?;
        let exchange = Exchange::new(
            RedactedMessage::new(&head, &raw),
            RedactedMessage::new(reply.status.to_string(), &reply.body),
        );
        let body = serde_json::from_slice(&reply.body).unwrap_or(Value::Null);
        Ok(ApiResponse { status: reply.status, body, exchange })
    }

    /// Body of an answer with status 200, or null.
    pub(crate) async fn get(&self, http: &Client, path: &[&str]) -> Result<Value, Verdict> {
        let fetched = http.get(&self.url(path), &self.headers(), 16 * 1024 * 1024).await;
        let fetched = fetched
            .map_err(|error| Verdict::fail(format!("the client API did not answer: {error}"), Vec::new()))?;
        let body = (fetched.status == 200).then(|| serde_json::from_slice(&fetched.body).ok()).flatten();
        Ok(body.unwrap_or(Value::Null))
    }
}

impl ApiResponse {
    /// Returns the body if the status is the expected one.
    pub(crate) fn expect(self, status: u16) -> Result<Value, Verdict> {
        if self.status == status {
            return Ok(self.body);
        }
        let what = format!("the client API answered {} instead of {status}", self.status);
        Err(Verdict::fail(what, vec![self.exchange]))
    }
}

impl SayCommand {
    /// Parses a command line as a shell does.
    pub fn new(command: &str) -> Result<SayCommand, placeholders::Error> {
        Ok(SayCommand {
            words: CommandTemplate::split(command)?.requiring(&["thread", "text"])?,
            values: Vec::new(),
            last_error: Arc::default(),
        })
    }

    /// Sets the values of further placeholders, such as `{data}`.
    pub fn with_values(self, values: Vec<(&'static str, String)>) -> SayCommand {
        SayCommand { values, ..self }
    }

    /// Starts the command and does not wait for it, because it may wait for the agent's answer.
    pub(crate) fn run(&self, thread: &str, text: &str) -> Result<(), Verdict> {
        let mut values = vec![("thread", thread), ("text", text)];
        values.extend(self.values.iter().map(|(name, value)| (*name, value.as_str())));
        let words = self.words.filled(&values);
        let (program, arguments) = words.split_first().expect("bug: the command is empty");
        let mut command = Command::new(program);
        command.args(arguments).stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
        command.stderr(std::process::Stdio::piped()).kill_on_drop(true);
        let child = command.spawn().map_err(|error| {
            Verdict::not_observable(format!("the command of --say cannot be started: {error}"))
        })?;
        let last_error = Arc::clone(&self.last_error);
        tokio::spawn(async move {
            let ended = child.wait_with_output().await;
            if let Ok(output) = ended
                && !output.status.success()
            {
                let text = rap_protocol::redact::text(&String::from_utf8_lossy(&output.stderr));
                let message = format!("the command of --say failed ({}): {text}", output.status);
                *last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(message);
            }
        });
        Ok(())
    }

    /// Error of the last run that failed.
    pub(crate) fn last_error(&self) -> Option<String> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl User {
    /// The client API; not observable without it.
    pub(crate) fn api(&self, what: &str) -> Result<&Api, Verdict> {
        match self {
            User::Api(api) => Ok(api),
            User::Command(_) => {
                Err(Verdict::not_observable(format!("--say cannot {what}; use the client API with --url")))
            }
        }
    }

    /// Sends a message in a new thread and returns the thread.
    pub(crate) async fn open(&self, http: &Client, name: &str, text: &str) -> Result<String, Verdict> {
        match self {
            User::Api(api) => {
                let thread = api.post(http, &["threads"], &json!({"message": text})).await?.expect(201)?;
                Ok(thread["id"].as_str().unwrap_or_default().to_owned())
            }
            User::Command(say) => {
                say.run(name, text)?;
                Ok(name.to_owned())
            }
        }
    }

    pub(crate) async fn say(&self, http: &Client, thread: &str, text: &str) -> Result<(), Verdict> {
        match self {
            User::Api(api) => {
                api.post(http, &["threads", thread, "messages"], &json!({"text": text}))
                    .await?
                    .expect(202)?;
                Ok(())
            }
            User::Command(say) => say.run(thread, text),
        }
    }
}
