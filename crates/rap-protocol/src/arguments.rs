//! Input schemas of tools that are made from Rust types.

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::Value;

use crate::InputSchema;

/// Description of a tool's arguments, made from the Rust type of the arguments.
#[derive(Debug, Clone)]
pub struct ArgumentType {
    /// Input schema, or the reason why the type cannot be the arguments of a tool.
    pub schema: Result<InputSchema, String>,
    /// Doc comment of the type. Empty if it has none.
    pub description: String,
}

impl ArgumentType {
    /// Describes the type `A`, which has to be a struct with named fields.
    pub fn of<A: JsonSchema>() -> ArgumentType {
        let schema = SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<A>();
        let mut schema = schema.to_value();
        let mut description = String::new();
        if let Value::Object(fields) = &mut schema {
            // The title is the Rust type name, which a model does not need. The draft is the protocol's default.
            fields.remove("title");
            fields.remove("$schema");
            if let Some(Value::String(text)) = fields.remove("description") {
                description = text;
            }
        }
        let schema = match schema.get("type") {
            Some(kind) if kind != "object" => Err("its arguments must be a struct with named fields".into()),
            _ => InputSchema::new(schema).map_err(|error| format!("its schema does not compile: {error}")),
        };
        ArgumentType { schema, description }
    }
}
