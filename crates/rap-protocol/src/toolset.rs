//! The toolset: what a tool server offers, served at [`DISCOVERY_PATH`].

use std::collections::{BTreeMap, HashSet};

use serde::Serialize;
use serde_json::Value;

use crate::invalid::{Invalid, Path, describe, quote};
use crate::read::{self, Object};
use crate::schema::{self, InputSchema};
use crate::url::EndpointUrl;
use crate::{ToolName, limits};

/// Where discovery lives, below a server's base URL.
pub const DISCOVERY_PATH: &str = "/.well-known/rap-toolset";

/// What a tool server offers.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Toolset {
    /// 1 to 128 characters.
    pub name: String,
    /// What the tools are for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Where invocations are POSTed.
    pub endpoint: EndpointUrl,
    /// At least one; names are unique.
    pub tools: Vec<Tool>,
    /// What the `toolset_version` of an invocation is compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Whether the runtime has to call `/migrate` before it moves a session.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub needs_migration: bool,
}

/// One tool of a toolset.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Tool {
    /// Unique within its toolset.
    pub name: ToolName,
    /// What it does, for the model.
    pub description: String,
    /// What its arguments have to look like.
    pub input_schema: InputSchema,
    /// Hints about its behaviour.
    #[serde(skip_serializing_if = "Annotations::is_empty")]
    pub annotations: Annotations,
    /// A Rhai expression that shows a call to people; cosmetic and untrusted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub display_script: Option<String>,
}

/// Hints about a tool's behaviour.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Annotations {
    /// Which authorisation the user has to give.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requires_auth: Option<String>,
    /// It changes nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    /// It may destroy something.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destructive: Option<bool>,
    /// Twice is the same as once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotent: Option<bool>,
    /// It takes its time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub long_running: Option<bool>,
    /// Extensions, whose keys begin with `x-`.
    #[serde(flatten)]
    pub extensions: BTreeMap<String, Value>,
}

impl Annotations {
    /// Whether there is nothing to say.
    pub fn is_empty(&self) -> bool {
        *self == Annotations::default()
    }
}

/// Parses and validates a whole toolset: one invalid tool makes all of it invalid.
pub fn parse_toolset(bytes: &[u8]) -> Result<Toolset, Invalid> {
    let mut object = read::message(bytes)?;
    Ok(Toolset {
        name: name(&mut object)?,
        description: object.optional_string("description", limits::DESCRIPTION_BYTES)?,
        endpoint: object.url("endpoint")?,
        tools: tools(&mut object)?,
        version: object.optional_string("version", limits::ID_BYTES)?,
        needs_migration: object.optional_bool("needsMigration")?.unwrap_or(false),
    })
}

fn name(object: &mut Object<'_>) -> Result<String, Invalid> {
    let name = object.string("name", limits::BODY_BYTES)?;
    if (1..=limits::NAME_CHARS).contains(&name.chars().count()) {
        return Ok(name);
    }
    Err(object.value("name", "1 to 128 characters", quote(&name)))
}

fn tools(object: &mut Object<'_>) -> Result<Vec<Tool>, Invalid> {
    let items = object.array("tools", limits::TOOLS)?;
    if items.is_empty() {
        return Err(object.value("tools", "at least one tool", "none"));
    }
    let path = object.path().field("tools");
    let mut names = HashSet::new();
    let mut tools = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let path = path.item(index);
        let tool = tool(Object::new(item, path)?)?;
        if !names.insert(tool.name.clone()) {
            let found = format!("{} a second time", quote(tool.name.as_str()));
            return Err(Invalid::value(&path.field("name"), "a name of its own", found));
        }
        tools.push(tool);
    }
    Ok(tools)
}

fn tool(mut object: Object<'_>) -> Result<Tool, Invalid> {
    Ok(Tool {
        name: object.id("name")?,
        description: object.string("description", limits::DESCRIPTION_BYTES)?,
        input_schema: {
            let document = object.required("inputSchema", "a JSON Schema object")?;
            schema::parse(document, &object.path().field("inputSchema"))?
        },
        annotations: match object.optional("annotations") {
            None => Annotations::default(),
            Some(value) => annotations(value, &object.path().field("annotations"))?,
        },
        display_script: object.optional_string("displayScript", limits::DISPLAY_SCRIPT_BYTES)?,
    })
}

fn annotations(value: Value, path: &Path<'_>) -> Result<Annotations, Invalid> {
    let count = value.as_object().map_or(0, |map| map.len());
    if count > limits::ANNOTATIONS {
        let expected = format!("at most {} annotations", limits::ANNOTATIONS);
        return Err(Invalid::value(path, expected, describe(&count.into())));
    }
    let mut object = Object::new(value, *path)?;
    Ok(Annotations {
        requires_auth: object.optional_string("requiresAuth", limits::DESCRIPTION_BYTES)?,
        read_only: object.optional_bool("readOnly")?,
        destructive: object.optional_bool("destructive")?,
        idempotent: object.optional_bool("idempotent")?,
        long_running: object.optional_bool("longRunning")?,
        extensions: object.into_rest().into_iter().filter(|(key, _)| key.starts_with("x-")).collect(),
    })
}
