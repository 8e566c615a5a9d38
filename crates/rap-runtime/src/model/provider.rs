//! Model providers that a configuration can name.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use rap_agent::prompt::CallIds;
use rap_io::client::Client;
use rap_protocol::Secret;
use url::Url;

use super::anthropic::{MAX_TOKENS, Thinking};
use super::{Error, Model, Prices};

/// A model provider. Providers are equal if their names are.
pub struct Provider {
    /// Value of `model.provider` in a configuration.
    pub name: &'static str,
    /// Location of its models.
    pub kind: Kind,
    /// Creates a model.
    pub build: Build,
}

/// Creates a model. The client is created only for a model on a server. Invalid options are [`Error::Refused`].
pub type Build = fn(Options, &dyn Fn() -> Client) -> Result<Arc<dyn Model>, Error>;

/// Location of the models of a provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// In this process, without a name, URL or key.
    Local,
    /// On a server.
    Remote {
        /// Hint for users who configure neither a URL nor a key.
        key_hint: &'static str,
    },
}

/// Configurable options of a model. Each provider reads the ones that it supports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Name of the model on its server.
    pub name: String,
    /// Base URL of the server. `None` means the provider's default.
    pub base_url: Option<Url>,
    /// API key.
    pub api_key: Option<Secret>,
    /// Maximum number of tokens of an answer.
    pub max_tokens: u32,
    /// Extended thinking.
    pub thinking: Thinking,
    /// Form of the call ids in requests. `None` means the form that the server needs, as far as its URL tells.
    pub call_ids: Option<CallIds>,
    /// Prices of the model. `None` means those of a known model.
    pub prices: Option<Prices>,
    /// File with a scenario for the scripted model.
    pub script: Option<PathBuf>,
}

impl Options {
    /// Returns the configured base URL, or `default`, which has to be valid.
    pub fn base_url_or(&self, default: &str) -> Url {
        let default = || Url::parse(default).expect("bug: a constant URL");
        self.base_url.clone().unwrap_or_else(default)
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            name: String::new(),
            base_url: None,
            api_key: None,
            max_tokens: MAX_TOKENS,
            thinking: Thinking::Off,
            call_ids: None,
            prices: None,
            script: None,
        }
    }
}

impl PartialEq for Provider {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Provider {}

impl fmt::Debug for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Provider({})", self.name)
    }
}
