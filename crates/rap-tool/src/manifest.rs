//! The toolset as it is served, made from the tools of a server.

use std::sync::Arc;

use rap_protocol::{EndpointUrl, Toolset, parse_toolset};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::engine::{Offer, Offered};
use crate::error::ServeError;
use crate::http::INVOKE_PATH;
use crate::tool::Tool;

/// Parts of a toolset that stay when its tools are replaced.
pub(crate) struct ToolsetSource {
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// `None` for a hash of the tools.
    pub(crate) version: Option<String>,
    pub(crate) accepts: Vec<String>,
    pub(crate) needs_migration: bool,
}

impl ToolsetSource {
    /// Describes the tools, and checks that a runtime accepts the description.
    pub(crate) fn offer(&self, public_url: &str, tools: Vec<Tool>) -> Result<Offer, ServeError> {
        let endpoint = EndpointUrl::new(format!("{public_url}{INVOKE_PATH}"));
        let described = tools.iter().map(Tool::describe).collect::<Result<Vec<_>, _>>()?;
        let version = self.version.clone().unwrap_or_else(|| version(&self.name, &described));
        let toolset = Toolset {
            name: self.name.clone(),
            description: self.description.clone(),
            endpoint: endpoint.map_err(|_| ServeError::BadPublicUrl)?,
            tools: described,
            version: Some(version.clone()),
            needs_migration: self.needs_migration,
        };
        let manifest =
            serde_json::to_vec(&toolset).map_err(|error| ServeError::Toolset(error.to_string()))?;
        parse_toolset(&manifest).map_err(|invalid| ServeError::Toolset(invalid.to_string()))?;
        let schemas = toolset.tools.into_iter().map(|tool| tool.input_schema);
        let offered =
            |(tool, schema): (Tool, _)| (tool.name().to_owned(), Arc::new(Offered { tool, schema }));
        let tools = tools.into_iter().zip(schemas).map(offered).collect();
        let versions = self.accepts.iter().cloned().chain([version]).collect();
        Ok(Offer { manifest: manifest.into(), versions, tools })
    }
}

/// Hash of the toolset: changes when a name, a schema or an annotation changes. A new description does not invalidate
/// calls.
fn version(name: &str, tools: &[rap_protocol::Tool]) -> String {
    let tool = |tool: &rap_protocol::Tool| {
        let schema = without_descriptions(tool.input_schema.document());
        json!({"name": tool.name, "inputSchema": schema, "annotations": tool.annotations})
    };
    let content = json!({"name": name, "tools": tools.iter().map(tool).collect::<Vec<_>>()});
    let digest = Sha256::digest(content.to_string().as_bytes());
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a schema without the keywords that only describe it.
fn without_descriptions(schema: &Value) -> Value {
    const DESCRIBING: [&str; 5] = ["title", "description", "examples", "$comment", "deprecated"];
    let named = |schemas: &Value| match schemas {
        Value::Object(schemas) => {
            schemas.iter().map(|(name, schema)| (name.clone(), without_descriptions(schema))).collect()
        }
        other => other.clone(),
    };
    let keyword = |(name, value): (&String, &Value)| {
        let value = match name.as_str() {
            name if DESCRIBING.contains(&name) => return None,
            // Their fields are names, not keywords.
            "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas" => named(value),
            "const" | "enum" | "default" => value.clone(),
            _ => without_descriptions(value),
        };
        Some((name.clone(), value))
    };
    match schema {
        Value::Object(keywords) => keywords.iter().filter_map(keyword).collect(),
        Value::Array(schemas) => schemas.iter().map(without_descriptions).collect(),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_keywords_that_describe_a_schema_are_removed() {
        let schema = json!({
            "description": "d", "type": "object", "required": ["description"],
            "properties": {"description": {"type": "string", "title": "t"}, "kind": {"enum": [{"title": 1}]}},
            "allOf": [{"$comment": "c", "minProperties": 1}], "$defs": {"title": {"examples": [1], "default": {"title": 2}}},
        });
        let expected = json!({
            "type": "object", "required": ["description"],
            "properties": {"description": {"type": "string"}, "kind": {"enum": [{"title": 1}]}},
            "allOf": [{"minProperties": 1}], "$defs": {"title": {"default": {"title": 2}}},
        });
        assert_eq!(without_descriptions(&schema), expected);
    }
}
