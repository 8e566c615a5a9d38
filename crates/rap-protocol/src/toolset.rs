//! The toolset: the list of a server's tools, served at [`DISCOVERY_PATH`].

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

use crate::invalid::{Invalid, Path, describe, quote};
use crate::read::{self, Object};
use crate::schema::{self, InputSchema};
use crate::url::EndpointUrl;
use crate::{ToolName, limits};

/// Path of the toolset, relative to a tool server's base URL.
pub const DISCOVERY_PATH: &str = "/.well-known/rap-toolset";

/// Tools of a tool server.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Toolset {
    /// Name of the toolset, 1 to 128 characters.
    pub name: String,
    /// Purpose of the tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// URL to which invocations are POSTed.
    pub endpoint: EndpointUrl,
    /// The tools, at least one, with unique names.
    pub tools: Vec<Tool>,
    /// Version of the toolset. A server compares it with the `toolset_version` of an invocation; `None` if the server
    /// does not version its toolset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// True if the runtime has to call `/migrate` before it moves a session.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub needs_migration: bool,
}

/// Tool of a toolset.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Tool {
    /// Name, unique within the toolset.
    pub name: ToolName,
    /// Description for the model.
    pub description: String,
    /// JSON Schema of the arguments.
    pub input_schema: InputSchema,
    /// Hints about the tool's behaviour.
    #[serde(skip_serializing_if = "Annotations::is_empty")]
    pub annotations: Annotations,
    /// Rhai expression that formats a call for users. It is cosmetic and untrusted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub display_script: Option<String>,
}

/// Hints about a tool's behaviour.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Annotations {
    /// Name of the authorization that the user has to grant; `None` if none is needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requires_auth: Option<String>,
    /// True if the tool changes nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    /// True if the tool may destroy data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destructive: Option<bool>,
    /// True if calling the tool twice has the same effect as calling it once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotent: Option<bool>,
    /// True if a call may take long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub long_running: Option<bool>,
    /// Extensions. Their keys begin with `x-`.
    #[serde(flatten)]
    pub extensions: BTreeMap<String, Value>,
}

impl Toolset {
    /// Returns the approximate size of its compiled schemas, in bytes.
    pub fn program_bytes(&self) -> usize {
        self.tools.iter().map(|tool| tool.input_schema.program_bytes()).sum()
    }
}

impl Annotations {
    /// Returns true if no annotation is set.
    pub fn is_empty(&self) -> bool {
        *self == Annotations::default()
    }

    /// Returns the usual duration of a call; `None` if the tool does not state it, or not in the form of
    /// [`ExpectedDuration`].
    pub fn expected_duration(&self) -> Option<ExpectedDuration> {
        ExpectedDuration::from_annotation(self.extensions.get(ExpectedDuration::ANNOTATION)?)
    }
}

/// Usual duration of a call, as the annotation `x-expectedDuration: {"min": 5, "max": 90.5}` states it, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpectedDuration {
    /// Shortest usual duration.
    pub min: Duration,
    /// Longest usual duration.
    pub max: Duration,
}

impl ExpectedDuration {
    /// Name of the annotation.
    pub const ANNOTATION: &str = "x-expectedDuration";

    /// Returns the value of the annotation.
    pub fn to_annotation(self) -> Value {
        json!({"min": self.min.as_secs_f64(), "max": self.max.as_secs_f64()})
    }

    /// Reads the value of the annotation. `None` if it has another form, or its values are negative or in the wrong order.
    pub fn from_annotation(value: &Value) -> Option<ExpectedDuration> {
        let seconds = |name| Duration::try_from_secs_f64(value.get(name)?.as_f64()?).ok();
        let (min, max) = (seconds("min")?, seconds("max")?);
        (min <= max).then_some(ExpectedDuration { min, max })
    }

    /// Returns true if a call that has taken this long is far beyond its usual duration: more than twice the longest, and
    /// at least five seconds more.
    pub fn is_far_exceeded_by(self, elapsed: Duration) -> bool {
        let margin = self.max.max(Duration::from_secs(5));
        elapsed > self.max.saturating_add(margin)
    }
}

/// Parses and validates a toolset. If one tool is invalid, the whole toolset is.
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
    let mut program_bytes = 0;
    for (index, item) in items.into_iter().enumerate() {
        let path = path.item(index);
        let tool = tool(Object::new(item, path)?)?;
        if !names.insert(tool.name.clone()) {
            let found = format!("{} a second time", quote(tool.name.as_str()));
            return Err(Invalid::value(&path.field("name"), "a unique name", found));
        }
        program_bytes += tool.input_schema.program_bytes();
        if program_bytes > limits::TOOLSET_PROGRAM_BYTES {
            let expected = format!("compiled schemas of at most {} bytes", limits::TOOLSET_PROGRAM_BYTES);
            return Err(Invalid::value(&path.field("inputSchema"), expected, "more, with those before it"));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves: LC-41
    #[test]
    fn the_usual_duration_of_a_call_is_read_from_its_annotation() {
        let read = |value: Value| {
            let extensions = BTreeMap::from([(ExpectedDuration::ANNOTATION.to_owned(), value)]);
            Annotations { extensions, ..Annotations::default() }.expected_duration()
        };
        let expected = ExpectedDuration { min: Duration::from_millis(1_500), max: Duration::from_secs(60) };
        assert_eq!(read(json!({"min": 1.5, "max": 60})), Some(expected));
        assert_eq!(read(expected.to_annotation()), Some(expected));
        let wrong = [
            json!(7),
            json!({}),
            json!({"min": 1}),
            json!({"min": "1", "max": 2}),
            json!({"min": 3, "max": 2}),
            json!({"min": -1, "max": 2}),
            json!({"min": 0, "max": 1e300}),
        ];
        for value in wrong {
            assert_eq!(read(value.clone()), None, "{value}");
        }
        assert_eq!(Annotations::default().expected_duration(), None);
    }

    #[test]
    fn a_call_is_far_beyond_its_usual_duration_after_twice_the_longest() {
        let exceeded = |max, elapsed| {
            let expected = ExpectedDuration { min: Duration::ZERO, max: Duration::from_secs(max) };
            expected.is_far_exceeded_by(Duration::from_secs(elapsed))
        };
        assert!(!exceeded(60, 120) && exceeded(60, 121));
        assert!(!exceeded(1, 6) && exceeded(1, 7));
        assert!(!exceeded(u64::MAX, u64::MAX));
    }
}
