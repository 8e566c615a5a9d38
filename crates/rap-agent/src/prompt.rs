//! Prompts: a history becomes a request that a model's provider accepts.
//!
//! Building one is a total and pure function: any entries give a request that is accepted, even entries that
//! no thread should have. What a provider can not take is fitted, replaced by a note or left out; it is never
//! an error. The same input gives the same request, and the request of a longer history begins like that of the
//! shorter one as far as possible, so that a provider's cache of prompts is of use.

pub mod anthropic;
mod names;
pub mod openai;
mod room;
mod schema;
mod summary;
mod turns;

use serde_json::{Map, Value};

use crate::Entry;
pub use names::Names;
pub use room::{Parts, Room, Size, room};
pub use summary::{SUMMARISE, bytes_as_tokens, seen, to_summarise, tokens};

/// How much text of one result a model sees unless it is told otherwise, in bytes.
pub const RESULT_BYTES: usize = 256 * 1024;
/// How many images a request holds; the newest are kept.
pub const IMAGES: usize = 20;
/// How much base64 all images of a request have together, in bytes; the newest are kept.
pub const IMAGES_BYTES: usize = 16 * 1024 * 1024;
/// The largest image that a model is shown, in bytes of base64.
pub const IMAGE_BYTES: usize = 5 * 1024 * 1024;

/// What a model is asked.
#[derive(Debug, Clone, Copy)]
pub struct Prompt<'a> {
    /// What the agent is told about itself; may be empty.
    pub system: &'a str,
    /// The history, in order.
    pub entries: &'a [Entry],
    /// What it may call.
    pub tools: &'a [ToolSpec<'a>],
    /// Whether the model takes images.
    pub images: bool,
    /// How much text of one result it sees, in bytes; usually [`RESULT_BYTES`].
    pub result_bytes: usize,
    /// Whether it thinks. Only Anthropic's API wants to see again what was thought.
    pub thinking: Thinking<'a>,
}

/// Whether a model thinks before it answers, and what its API wants to see of that afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thinking<'a> {
    /// It does not; what was thought earlier is left out.
    Off,
    /// When it likes. What this model thought is sent back.
    Free {
        /// The model.
        model: &'a str,
    },
    /// Always. What this model thought is sent back, and no calls may be open that were made without a thought.
    First {
        /// The model.
        model: &'a str,
    },
}

/// A tool as it is offered to a model.
#[derive(Debug, Clone, Copy)]
pub struct ToolSpec<'a> {
    /// Its real name.
    pub name: &'a str,
    /// What it does.
    pub description: &'a str,
    /// What its arguments have to look like.
    pub schema: &'a Value,
}

/// A request for a provider.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// What history and tools give: `messages`, and `tools` and `system` where there are any. The model's name
    /// and the settings are for the client to add.
    pub body: Map<String, Value>,
    /// From the names in the request to the real ones.
    pub names: Names,
    /// The tools that are not offered.
    pub left_out: Vec<LeftOut>,
}

/// A tool that a provider can not take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// Its real name.
    pub name: String,
    /// Why it is not offered.
    pub why: String,
}

impl<'a> Prompt<'a> {
    /// A prompt for a model that takes images, with the usual bounds.
    pub fn new(system: &'a str, entries: &'a [Entry], tools: &'a [ToolSpec<'a>]) -> Self {
        Prompt { system, entries, tools, images: true, result_bytes: RESULT_BYTES, thinking: Thinking::Off }
    }
}

/// What a provider allows in the description of tools.
struct Shelf {
    dialect: schema::Dialect,
    most: usize,
    /// Builds the provider's own form of a tool from name, description and schema.
    render: fn(&str, &str, Value) -> Value,
}

impl Shelf {
    /// The tools that the provider takes, in order, and those that it does not.
    fn fill(&self, tools: &[ToolSpec<'_>], names: &mut Names) -> (Vec<Value>, Vec<LeftOut>) {
        let (mut offered, mut left_out) = (Vec::new(), Vec::new());
        for tool in tools {
            match self.fit(tool, offered.len(), names) {
                Ok(value) => offered.push(value),
                Err(why) => left_out.push(LeftOut { name: tool.name.into(), why }),
            }
        }
        (offered, left_out)
    }

    fn fit(&self, tool: &ToolSpec<'_>, already: usize, names: &mut Names) -> Result<Value, String> {
        if names.has(tool.name) {
            return Err("another tool has the same name".into());
        }
        if already == self.most {
            return Err(format!("the model takes no more than {} tools", self.most));
        }
        let schema = schema::fitted(tool.schema, self.dialect)?;
        Ok((self.render)(&names.fit(tool.name), tool.description, schema))
    }
}
