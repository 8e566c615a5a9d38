//! How much a model can read, from its server's list of models. Never a reason to fail.
//!
//! A list that came is remembered, even if it does not say how much the model reads. A request that failed is repeated
//! when the window is wanted again, but not more often than once a minute.

use rap_io::client::Fetched;
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::time::{Duration, Instant, timeout};
use url::Url;

use super::remote::Remote;

/// How long the list is waited for.
const WITHIN: Duration = Duration::from_secs(5);
/// Shortest time between two requests for the list.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(60);
/// The longest list, in bytes.
const LIST_BYTES: usize = 8 * 1024 * 1024;
/// What servers call it, the narrower meaning first.
const FIELDS: [&str; 6] = [
    "max_input_tokens",
    "max_model_len",
    "loaded_context_length",
    "context_length",
    "context_window",
    "max_context_length",
];

/// The window of one model.
#[derive(Debug)]
pub(super) struct Window {
    list: Url,
    /// What is taken where the list says nothing.
    usual: u64,
    known: Mutex<Known>,
}

/// Knowledge from the list.
#[derive(Debug, Clone, Copy)]
enum Known {
    NotAsked,
    Failed {
        at: Instant,
    },
    /// For good; without a number, the list says nothing about the model.
    Listed(Option<u64>),
}

impl Window {
    pub(super) fn new(list: Url, usual: u64) -> Self {
        Window { list, usual, known: Mutex::new(Known::NotAsked) }
    }

    /// Number of tokens that the model can read. Those who come while the list is asked for wait for it.
    pub(super) async fn tokens(&self, remote: &Remote, model: &str) -> u64 {
        let mut known = self.known.lock().await;
        let is_due = match *known {
            Known::NotAsked => true,
            Known::Failed { at } => at.elapsed() >= ASK_AGAIN_AFTER,
            Known::Listed(_) => false,
        };
        if is_due {
            *known = self.ask(remote, model).await;
        }
        match *known {
            Known::Listed(Some(tokens)) => tokens,
            _ => self.usual,
        }
    }

    async fn ask(&self, remote: &Remote, model: &str) -> Known {
        let answer = timeout(WITHIN, remote.get(&self.list, LIST_BYTES)).await;
        let models = answer.ok().and_then(Result::ok).and_then(|answer| models(&answer));
        let usual = self.usual;
        match models.map(|models| listed(&models, model)) {
            Some(Some(tokens)) => Known::Listed(Some(tokens)),
            Some(None) => {
                tracing::info!(model, usual, "the model's server does not say how much it reads");
                Known::Listed(None)
            }
            None => {
                tracing::info!(model, usual, "the list of models could not be read; it is asked for again");
                Known::Failed { at: Instant::now() }
            }
        }
    }
}

/// The entries of a list, if it is one.
fn models(answer: &Fetched) -> Option<Vec<Value>> {
    if answer.status != 200 {
        return None;
    }
    let mut list: Value = serde_json::from_slice(&answer.body).ok()?;
    let models = ["data", "models"].iter().find_map(|key| list.get_mut(key).map(Value::take));
    match models.unwrap_or(list) {
        Value::Array(models) => Some(models),
        _ => None,
    }
}

fn listed(models: &[Value], model: &str) -> Option<u64> {
    let entry = models.iter().find(|entry| entry["id"] == model || entry["name"] == model)?;
    FIELDS.iter().find_map(|field| entry[field].as_u64()).filter(|tokens| *tokens > 0)
}
