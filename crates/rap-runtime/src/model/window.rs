//! Context window of a model, from its server's list of models. A failure to read the list never fails a request.
//! If the list does not name the window, it is learned from the error of a request that was too long.
//!
//! A list is remembered, even if it does not contain the size of the window. A failed request is repeated when the
//! window is needed again, but at most once a minute.

use std::sync::atomic::{AtomicU64, Ordering};

use rap_io::client::Fetched;
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::time::{Duration, Instant, timeout};
use url::Url;

use super::remote::Remote;

/// Time limit of the request for the list.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);
/// Shortest time between two requests for the list.
const RETRY_AFTER: Duration = Duration::from_secs(60);
/// Maximum size of the list, in bytes.
const LIST_BYTES: usize = 8 * 1024 * 1024;
/// Fields in which servers report the window, most specific first.
const FIELDS: [&str; 6] = [
    "max_input_tokens",
    "max_model_len",
    "loaded_context_length",
    "context_length",
    "context_window",
    "max_context_length",
];

/// Context window of one model.
#[derive(Debug)]
pub(super) struct Window {
    list: Url,
    /// Number of tokens that is used if the list does not contain one.
    default: u64,
    /// Number of tokens that an error of the server named; 0 if there was none.
    learned: AtomicU64,
    lookup: Mutex<Lookup>,
}

/// State of the lookup in the list.
#[derive(Debug, Clone, Copy)]
enum Lookup {
    NotFetched,
    Failed {
        at: Instant,
    },
    /// The list was read. `None` if it does not contain the window.
    Listed(Option<u64>),
}

impl Window {
    pub(super) fn new(list: Url, default: u64) -> Self {
        Window { list, default, learned: AtomicU64::new(0), lookup: Mutex::new(Lookup::NotFetched) }
    }

    /// Remembers the number of tokens that the server named in an error.
    pub(super) fn learn(&self, tokens: u64) {
        if self.learned.swap(tokens, Ordering::Relaxed) != tokens {
            tracing::info!(tokens, "the model's server named its context window");
        }
    }

    /// Returns the number of tokens that the model can read. Concurrent callers wait for the same request.
    pub(super) async fn tokens(&self, remote: &Remote, model: &str) -> u64 {
        let mut lookup = self.lookup.lock().await;
        let is_due = match *lookup {
            Lookup::NotFetched => true,
            Lookup::Failed { at } => at.elapsed() >= RETRY_AFTER,
            Lookup::Listed(_) => false,
        };
        if is_due {
            *lookup = self.fetch(remote, model).await;
        }
        match *lookup {
            Lookup::Listed(Some(tokens)) => tokens,
            _ => match self.learned.load(Ordering::Relaxed) {
                0 => self.default,
                learned => learned,
            },
        }
    }

    /// Returns true if neither the list nor an error has named the number of tokens.
    pub(super) async fn is_assumed(&self) -> bool {
        let is_listed = matches!(*self.lookup.lock().await, Lookup::Listed(Some(_)));
        !is_listed && self.learned.load(Ordering::Relaxed) == 0
    }

    async fn fetch(&self, remote: &Remote, model: &str) -> Lookup {
        let answer = timeout(LIST_TIMEOUT, remote.get(&self.list, LIST_BYTES)).await;
        let models = answer.ok().and_then(Result::ok).and_then(|answer| models(&answer));
        let default = self.default;
        match models.map(|models| window_of(&models, model)) {
            Some(Some(tokens)) => Lookup::Listed(Some(tokens)),
            Some(None) => {
                tracing::info!(
                    model,
                    default,
                    "the model's server does not report the context window; using the default"
                );
                Lookup::Listed(None)
            }
            None => {
                tracing::info!(
                    model,
                    default,
                    "the list of models could not be read; using the default window and trying again later"
                );
                Lookup::Failed { at: Instant::now() }
            }
        }
    }
}

/// Returns the entries of the list, or `None` if the response is not a list.
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

fn window_of(models: &[Value], model: &str) -> Option<u64> {
    let entry = models.iter().find(|entry| entry["id"] == model || entry["name"] == model)?;
    FIELDS.iter().find_map(|field| entry[field].as_u64()).filter(|tokens| *tokens > 0)
}
