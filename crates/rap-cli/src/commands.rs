//! The commands that talk to a runtime or a tool server. They, and they alone, write to the terminal.

pub mod calls;
pub mod chat;
pub mod check;
pub mod deliveries;
pub mod demo;
pub mod inbox;
pub mod subs;
pub mod threads;
pub mod timers;
pub mod tools;

use std::io::Write;

use anyhow::anyhow;
use clap::Args;
use rap_protocol::Secret;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::client::{Client, DEFAULT_URL, Error};
use crate::nearest;

/// Which runtime.
#[derive(Args, Clone)]
pub struct Connection {
    /// The URL of the runtime.
    #[arg(long, env = "RAP_URL", default_value = DEFAULT_URL, hide_env_values = true, global = true)]
    pub url: String,
    /// A token of the runtime, where it wants one; better given as RAP_TOKEN.
    #[arg(long, env = "RAP_TOKEN", hide_env_values = true, global = true)]
    pub token: Option<Token>,
}

/// A token, which is never shown.
#[derive(Clone)]
pub struct Token(Secret);

impl std::str::FromStr for Token {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Token(Secret::new(text)))
    }
}

impl Connection {
    /// A client for it. What is set to nothing is not set.
    pub fn client(&self) -> Result<Client, Error> {
        let token =
            self.token.as_ref().map(|Token(secret)| secret).filter(|token| !token.expose().is_empty());
        let url = if self.url.is_empty() { DEFAULT_URL } else { &self.url };
        Client::new(url, token)
    }
}

/// What was asked for makes no sense. It is told like any error, and ends with 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct WrongUsage(pub String);

/// How a listing is shown.
#[derive(Args, Clone, Copy)]
pub struct Shape {
    /// Print the API's JSON instead of a table.
    #[arg(long)]
    pub json: bool,
}

/// What a listing of everything of a kind takes.
#[derive(Args, Clone, Copy)]
pub struct Listing {
    /// How many at most, up to 1000.
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: usize,
    /// All of them, however many.
    #[arg(long, conflicts_with = "limit")]
    all: bool,
    /// How it is shown.
    #[command(flatten)]
    shape: Shape,
}

impl Listing {
    /// Shows the rows of `/v1/PATH` that are asked for, and says so if there are more.
    async fn show<T: DeserializeOwned>(
        self,
        client: &Client,
        path: &str,
        filters: &[(&str, Option<&str>)],
        show: impl FnOnce(&[T]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let limit = (!self.all).then_some(self.limit);
        let filters: Vec<_> = filters.iter().filter_map(|(name, value)| Some((*name, (*value)?))).collect();
        let answer = client.list(path, &filters, limit).await?;
        if self.shape.json {
            return print_json(&answer);
        }
        let more = answer["next_cursor"].is_string();
        show(&client.rows(answer)?)?;
        if more {
            eprintln!("there are more: --all lists them");
        }
        Ok(())
    }
}

/// Prints on stdout.
fn print(text: &str) -> std::io::Result<()> {
    let mut out = anstream::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

fn print_json(value: &Value) -> anyhow::Result<()> {
    Ok(print(&format!("{}\n", serde_json::to_string_pretty(value)?))?)
}

/// Where a thread is not known, says which ones were perhaps meant.
async fn known<T>(client: &Client, id: &str, outcome: Result<T, Error>) -> anyhow::Result<T> {
    match outcome {
        Err(error) if error.code() == Some("no_such_thread") => {
            let threads = client.threads(&[("limit", "1000")]).await?.threads;
            let ids: Vec<&str> = threads.iter().map(|thread| thread.id.as_str()).collect();
            Err(anyhow!("there is no thread `{id}`{}", perhaps(id, &ids)))
        }
        outcome => Ok(outcome?),
    }
}

fn perhaps(word: &str, known: &[&str]) -> String {
    match nearest::similar(word, known).as_slice() {
        [] => "; rap threads ls lists them".into(),
        ids => format!("; did you mean {}?", ids.join(" or ")),
    }
}

/// The id of an open call or subscription, which may be given by the number at its end.
async fn call_id(client: &Client, thread: &str, call: &str) -> String {
    let is_number = !call.is_empty() && call.bytes().all(|byte| byte.is_ascii_digit());
    // A thread that cannot be read is reported by the request that follows.
    let Ok(found) = client.thread(thread).await else { return call.to_owned() };
    let open = found.waiting_on.iter().map(|call| &call.call_id);
    let mut ids = open.chain(found.subscriptions.iter().map(|held| &held.call_id));
    let ending = format!("_{call}");
    let meant = ids.find(|id| is_number && id.ends_with(&ending));
    meant.cloned().unwrap_or_else(|| call.to_owned())
}

/// Cancels a call or a subscription.
async fn cancel(client: &Client, thread: &str, call: &str) -> anyhow::Result<()> {
    let call = &call_id(client, thread, call).await;
    let outcome = client.cancel(thread, call).await;
    if outcome.as_ref().is_err_and(|error| error.code() == Some("no_such_call")) {
        let thread = client.thread(thread).await?;
        let calls = thread.waiting_on.iter().map(|call| call.call_id.as_str());
        let held = thread.subscriptions.iter().map(|held| held.call_id.as_str());
        let open: Vec<&str> = calls.chain(held).collect();
        let open =
            if open.is_empty() { "none is open".into() } else { format!("open are: {}", open.join(", ")) };
        return Err(anyhow!("thread {} made no call `{call}`; {open}", thread.id));
    }
    known(client, thread, outcome).await?;
    Ok(print(&format!("{call} of {thread} is cancelled\n"))?)
}
