//! How much a model can read, from its server's list of models. Asked once, and never a reason to fail.

use rap_io::client::Fetched;
use serde_json::Value;
use tokio::sync::OnceCell;
use tokio::time::{Duration, timeout};
use url::Url;

use super::remote::Remote;

/// How long the list is waited for.
const WITHIN: Duration = Duration::from_secs(5);
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
    tokens: OnceCell<u64>,
}

impl Window {
    pub(super) fn new(list: Url, usual: u64) -> Self {
        Window { list, usual, tokens: OnceCell::new() }
    }

    pub(super) async fn tokens(&self, remote: &Remote, model: &str) -> u64 {
        let ask = async || {
            let answer = timeout(WITHIN, remote.get(&self.list, LIST_BYTES)).await;
            let found = answer.ok().and_then(Result::ok).and_then(|answer| listed(&answer, model));
            if found.is_none() {
                tracing::info!(
                    model,
                    usual = self.usual,
                    "the model's server does not say how much it reads"
                );
            }
            found.unwrap_or(self.usual)
        };
        *self.tokens.get_or_init(ask).await
    }
}

fn listed(answer: &Fetched, model: &str) -> Option<u64> {
    if answer.status != 200 {
        return None;
    }
    let list: Value = serde_json::from_slice(&answer.body).ok()?;
    let models = list.get("data").or(list.get("models")).unwrap_or(&list).as_array()?;
    let entry = models.iter().find(|entry| entry["id"] == model || entry["name"] == model)?;
    FIELDS.iter().find_map(|field| entry[field].as_u64()).filter(|tokens| *tokens > 0)
}
