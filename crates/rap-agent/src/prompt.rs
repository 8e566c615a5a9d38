//! Prompts: builds the request for a model's provider from a history.
//!
//! Building a request is a total and pure function. Any entries give a request that the provider accepts, even entries
//! that no thread should have. Content that a provider does not accept is adapted, replaced by a note or omitted; it is
//! never an error. The same input gives the same request. As far as possible, the request of a longer history begins with
//! the request of the shorter one, so that the provider's prompt cache is effective.

pub mod anthropic;
mod bounded;
mod fit;
mod messages;
mod names;
pub mod openai;
pub mod responses;
mod schema;
mod summary;

use serde_json::{Map, Value};

use crate::Entry;
pub use bounded::PromptEntries;
pub use fit::{PromptFit, PromptParts, PromptSize, prompt_fit};
pub use names::{Names, short_call_id};
pub use summary::{
    SUMMARY_INSTRUCTIONS, entries_to_summarise, estimate_tokens, tokens_for_bytes, visible_entries,
};

/// Default maximum size of the text of one result in a prompt, in bytes.
pub const MAX_BYTES_PER_RESULT: usize = 256 * 1024;
/// Maximum total size of the texts of all results in a prompt, in bytes. The newest are kept. No model can read as much.
pub const MAX_BYTES_OF_RESULTS: usize = 32 * 1024 * 1024;
/// Maximum number of images in a request. The newest are kept.
pub const IMAGES: usize = rap_api::CONTENT_ITEMS;
/// Maximum total size of all images in a request, in bytes of base64. The newest are kept.
pub const MAX_BYTES_OF_IMAGES: usize = 16 * 1024 * 1024;
/// Maximum size of one image, in bytes of base64.
pub const MAX_BYTES_PER_IMAGE: usize = rap_api::IMAGE_BYTES;

/// Content of a request to a model, independent of the provider.
#[derive(Debug, Clone, Copy)]
pub struct Prompt<'a> {
    /// System prompt; may be empty.
    pub system: &'a str,
    /// Visible entries of the history, in order.
    pub entries: &'a [Entry],
    /// Tools to offer.
    pub tools: &'a [ToolSpec<'a>],
    /// True if the model accepts images.
    pub images: bool,
    /// Maximum size of the text of one result, in bytes; usually [`MAX_BYTES_PER_RESULT`].
    pub max_result_bytes: usize,
    /// Thinking mode of the model. Only requests for Anthropic's API depend on it.
    pub thinking: Thinking<'a>,
    /// Server and model to which the request goes, if the additional fields and items of [`Thoughts`](crate::Thoughts)
    /// are sent back to them.
    pub origin: Option<ServedModel<'a>>,
    /// Form of the call ids.
    pub call_ids: CallIds,
}

/// A model on its server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServedModel<'a> {
    /// Base URL of the server, without secrets.
    pub server: &'a str,
    /// Name of the model.
    pub model: &'a str,
}

/// Form of the call ids in a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CallIds {
    /// The id on the wire, where the provider accepts it.
    #[default]
    Wire,
    /// Nine letters and digits that are a function of the id on the wire ([`short_call_id`]).
    Short,
}

/// Thinking mode of a model, which determines how earlier thinking is sent back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thinking<'a> {
    /// The model does not think. Earlier thinking is omitted.
    Off,
    /// The model decides. Thinking of this model is sent back.
    Optional {
        /// Name of the model.
        model: &'a str,
    },
    /// The model always thinks. Thinking of this model is sent back, and the API accepts results only in a turn that
    /// begins with thinking.
    Always {
        /// Name of the model.
        model: &'a str,
    },
}

/// A tool as it is offered to a model.
#[derive(Debug, Clone, Copy)]
pub struct ToolSpec<'a> {
    /// Real name of the tool, which the provider may not accept.
    pub name: &'a str,
    /// Description for the model; may be empty.
    pub description: &'a str,
    /// JSON Schema of the arguments.
    pub schema: &'a Value,
}

/// A request for a provider.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Members of the request body: `messages`, and `tools` and `system` if there are any. The caller adds the model's
    /// name and settings.
    pub body: Map<String, Value>,
    /// Mapping from tool names in the request to the real names.
    pub names: Names,
    /// Tools that are not offered, with the reasons.
    pub omitted_tools: Vec<OmittedTool>,
}

/// A tool that is not offered because the provider does not accept it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OmittedTool {
    /// Real name of the tool.
    pub name: String,
    /// Reason why it is not offered.
    pub why: String,
}

impl<'a> Prompt<'a> {
    /// Returns a prompt for a model that accepts images and does not think, with the default maximum size of results.
    pub fn new(system: &'a str, entries: &'a [Entry], tools: &'a [ToolSpec<'a>]) -> Self {
        Prompt {
            system,
            entries,
            tools,
            images: true,
            max_result_bytes: MAX_BYTES_PER_RESULT,
            thinking: Thinking::Off,
            origin: None,
            call_ids: CallIds::Wire,
        }
    }
}

/// Rules of a provider for the tools of a request.
struct ToolRules {
    dialect: schema::Dialect,
    max_tools: usize,
    /// Builds the provider's own form of a tool from name, description and schema.
    render: fn(&str, &str, Value) -> Value,
}

impl ToolRules {
    /// Returns the tools that the provider accepts, in order, and the omitted ones.
    fn offer(&self, tools: &[ToolSpec<'_>], names: &mut Names) -> (Vec<Value>, Vec<OmittedTool>) {
        let (mut offered, mut omitted_tools) = (Vec::new(), Vec::new());
        for tool in tools {
            match self.fit(tool, offered.len(), names) {
                Ok(value) => offered.push(value),
                Err(why) => omitted_tools.push(OmittedTool { name: tool.name.into(), why }),
            }
        }
        (offered, omitted_tools)
    }

    fn fit(&self, tool: &ToolSpec<'_>, already: usize, names: &mut Names) -> Result<Value, String> {
        if names.has(tool.name) {
            return Err("another tool has the same name".into());
        }
        if already == self.max_tools {
            return Err(format!("the model accepts at most {} tools", self.max_tools));
        }
        let schema = schema::fitted(tool.schema, self.dialect)?;
        Ok((self.render)(&names.fit(tool.name), tool.description, schema))
    }
}
