//! The subcommands. They are the only part of the library that writes to the terminal.

pub mod backup;
pub mod bench;
pub mod calls;
pub mod chat;
pub mod check;
pub mod deliveries;
pub mod demo;
pub mod doctor;
pub mod inbox;
#[cfg(feature = "mcp")]
pub mod mcp;
pub mod models;
pub mod moving;
pub mod nodes;
pub mod prune;
pub mod subs;
pub mod threads;
pub mod timers;
pub mod token;
pub mod tool;
pub mod tools;
pub mod top;

use std::io::Write;

use anyhow::anyhow;
use clap::Args;
use rap_api::client::{Client, DEFAULT_URL, Error};
use rap_protocol::{Secret, visible};
use serde_json::Value;

use crate::suggestion;

/// Flags that select the runtime to talk to.
#[derive(Args, Clone)]
pub struct Connection {
    /// URL of the runtime.
    #[arg(long, env = "RAP_URL", default_value = DEFAULT_URL, hide_env_values = true, global = true)]
    pub url: String,
    /// Token for the runtime, if it requires one; prefer RAP_TOKEN.
    #[arg(long, env = "RAP_TOKEN", hide_env_values = true, global = true)]
    pub token: Option<Token>,
}

/// A secret token. It has no `Debug` or `Display`.
#[derive(Clone)]
pub struct Token(Secret);

impl Token {
    fn expose(&self) -> &str {
        self.0.expose()
    }
}

impl std::str::FromStr for Token {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Token(Secret::new(text)))
    }
}

impl Connection {
    /// Creates a client. An empty URL or token counts as not set.
    pub fn client(&self) -> Result<Client, Error> {
        let token =
            self.token.as_ref().map(|Token(secret)| secret).filter(|token| !token.expose().is_empty());
        let url = if self.url.is_empty() { DEFAULT_URL } else { &self.url };
        let client = Client::new(url)?;
        match token {
            Some(token) => client.with_token(token.expose()),
            None => Ok(client),
        }
    }
}

/// Returns the text of an error for people, with advice about flags and commands.
pub fn error_text(error: &anyhow::Error) -> String {
    match error.downcast_ref() {
        Some(Error::Unreachable { url, why }) => format!(
            "no runtime answers at {url} ({why})\nstart one with: rap serve, or set another URL with --url or RAP_URL"
        ),
        Some(error @ Error::Unauthorized { .. }) => {
            format!(
                "{error}: set RAP_TOKEN (or --token) to one of its server.tokens, or to one made with: rap token create"
            )
        }
        Some(error @ Error::BadToken) => format!("{error}; check RAP_TOKEN or --token"),
        Some(error @ Error::NotARuntime { .. }) => {
            format!("{error}; check --url or RAP_URL: it must be the base URL of a runtime")
        }
        Some(error @ Error::NoAnswer { .. }) => {
            format!("{error}; the request may have arrived: check with rap threads show before you repeat it")
        }
        _ => without_repetition(error),
    }
}

/// Returns an error with its causes. A cause that the text before it already contains is left out.
fn without_repetition(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string).filter(|cause| !cause.is_empty()) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// A usage error. It is printed like any other error, and the exit code is 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct WrongUsage(pub String);

/// Flag for the output format of a command.
#[derive(Args, Clone, Copy)]
pub struct OutputFormat {
    /// Print the JSON of the API.
    #[arg(long)]
    pub json: bool,
}

/// Flags of the listing commands.
#[derive(Args, Clone, Copy)]
pub struct Listing {
    /// Maximum number of rows, up to 1000.
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: usize,
    /// List all rows.
    #[arg(long, conflicts_with = "limit")]
    all: bool,
    /// Output format.
    #[command(flatten)]
    output: OutputFormat,
}

impl Listing {
    /// Returns the maximum number of rows; `None` for all.
    fn rows(self) -> Option<usize> {
        (!self.all).then_some(self.limit)
    }

    /// Fetches a listing and passes its rows to `show`. Prints a hint to stderr if there are more rows.
    async fn show<L: rap_api::Listing>(
        self,
        client: &Client,
        filters: &[(&str, Option<&str>)],
        show: impl FnOnce(&[L::Row]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let limit = self.rows();
        let filters: Vec<_> = filters.iter().filter_map(|(name, value)| Some((*name, (*value)?))).collect();
        let answer = client.list_json::<L>(&filters, limit).await?;
        if self.output.json {
            return print_json(&answer);
        }
        let more = answer["next_cursor"].is_string();
        show(&serde_json::from_value::<L>(answer)?.into_rows())?;
        if more {
            eprintln!("there are more rows; use --all to list them");
        }
        Ok(())
    }
}

fn print(text: &str) -> std::io::Result<()> {
    let mut out = anstream::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Prints a JSON document. Its hidden characters are escaped, which does not change its meaning.
fn print_json(value: &Value) -> anyhow::Result<()> {
    Ok(print(&format!("{}\n", visible::json(&serde_json::to_string_pretty(value)?)))?)
}

/// Replaces a `no_such_thread` error by one that suggests similar thread ids.
async fn with_suggestion<T>(client: &Client, id: &str, outcome: Result<T, Error>) -> anyhow::Result<T> {
    match outcome {
        Err(error) if error.code() == Some("no_such_thread") => {
            let threads = client.list::<rap_api::Threads>(&[], Some(1000)).await?.threads;
            let ids: Vec<&str> = threads.iter().map(|thread| thread.id.as_str()).collect();
            Err(anyhow!("no thread `{id}`{}", did_you_mean(id, &ids)))
        }
        outcome => Ok(outcome?),
    }
}

fn did_you_mean(word: &str, known: &[&str]) -> String {
    match suggestion::similar(word, known).as_slice() {
        [] => "; list threads with: rap threads ls".into(),
        ids => format!("; did you mean {}?", ids.join(" or ")),
    }
}

/// Resolves a call given as a full id or as the number at the end of the id, among the open calls and subscriptions of
/// the thread. Returns the text unchanged if nothing matches.
async fn resolve_call_id(client: &Client, thread: &str, call: &str) -> String {
    let is_number = !call.is_empty() && call.bytes().all(|byte| byte.is_ascii_digit());
    // If the thread cannot be read, the next request reports the error.
    let Ok(found) = client.thread(thread).await else { return call.to_owned() };
    let open = found.waiting_on.iter().map(|call| &call.call_id);
    let mut ids = open.chain(found.subscriptions.iter().map(|subscription| &subscription.call_id));
    let suffix = format!("_{call}");
    let id = ids.find(|id| is_number && id.ends_with(&suffix));
    id.cloned().unwrap_or_else(|| call.to_owned())
}

/// Cancels a call or a subscription.
async fn cancel(client: &Client, thread: &str, call: &str) -> anyhow::Result<()> {
    let call = &resolve_call_id(client, thread, call).await;
    let outcome = client.cancel(thread, call).await;
    if outcome.as_ref().is_err_and(|error| error.code() == Some("no_such_call")) {
        let thread = client.thread(thread).await?;
        let calls = thread.waiting_on.iter().map(|call| call.call_id.as_str());
        let subscriptions = thread.subscriptions.iter().map(|subscription| subscription.call_id.as_str());
        let open: Vec<&str> = calls.chain(subscriptions).collect();
        let open = if open.is_empty() {
            "it has no open calls".into()
        } else {
            format!("open calls: {}", open.join(", "))
        };
        return Err(anyhow!("thread {} has no call `{call}`; {open}", thread.id));
    }
    with_suggestion(client, thread, outcome).await?;
    Ok(print(&format!("cancelled {call} of thread {thread}\n"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_named_once() {
        let error = anyhow!("no such file")
            .context("cannot use the key: no such file")
            .context("cannot use the key: no such file");
        assert_eq!(error_text(&error), "cannot use the key: no such file");
        assert_eq!(error_text(&anyhow!("b").context("a")), "a: b");
    }
}
