//! Providers: the kinds of models that a configuration can name.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use rap_io::client::Client;
use rap_protocol::Secret;
use url::Url;

use super::anthropic::{MAX_TOKENS, Thinking};
use super::{Error, Model};

/// A kind of model. Two with the same name are the same.
pub struct Provider {
    /// Value of `model.provider` in a configuration.
    pub name: &'static str,
    /// Place where its models run.
    pub kind: Kind,
    /// Makes a model.
    pub build: Build,
}

/// Makes a model. The client is made only for a model that has a server. Options that cannot be used are
/// [`Error::Refused`].
pub type Build = fn(Options, &dyn Fn() -> Client) -> Result<Arc<dyn Model>, Error>;

/// Place where the models of a provider run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// In this process: there is no name, URL or key.
    Local,
    /// On a server.
    Remote {
        /// What a person is told who gives neither a URL nor a key.
        key_hint: &'static str,
    },
}

/// Everything that a configuration can say about a model. A provider reads what it has a use for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Name that the server knows the model by.
    pub name: String,
    /// URL of the server; without it, the provider's own.
    pub base_url: Option<Url>,
    /// Key that the server wants to see.
    pub api_key: Option<Secret>,
    /// Largest number of tokens of an answer.
    pub max_tokens: u32,
    /// Whether the model thinks before it answers.
    pub thinking: Thinking,
    /// File with a scenario to replay.
    pub script: Option<PathBuf>,
}

impl Options {
    /// The server's URL, or else this one, which has to be valid.
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
