//! Tools that are async functions of this process.
//!
//! To the rest of the runtime they are the toolset of a server named [`IN_PROCESS`]: it is discovered, stored with each
//! session and versioned like any other, and calls are validated against it. Only the invocation differs; see
//! `engine/function.rs`.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use rap_agent::texts;
use rap_protocol::{Annotations, ArgumentType, EndpointUrl, Tool, ToolName, Toolset, parse_toolset};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::settings::SettingsError;
use crate::store::BoxError;

/// Name of the tool server that stands for the functions of this process.
pub(crate) const IN_PROCESS: &str = "in-process";
/// Endpoint in the toolset of the functions. Nothing is ever sent to it.
const ENDPOINT: &str = "http://in-process.invalid/invoke";

/// Result of a function: text for the model, or an error that the model is told.
pub type FunctionResult = Result<String, BoxError>;

type Run = dyn Fn(Map<String, Value>) -> BoxFuture<'static, FunctionResult> + Send + Sync;

/// An async function of this process that agents can call as a tool.
///
/// The input schema comes from the argument type, and the description that the model reads comes from that type's doc
/// comment.
///
/// A call runs at least once: if the process stops before the result is stored, the function runs again after the next
/// start, from its beginning. A function is dropped at its next `await` when its call is cancelled or times out, its
/// thread is interrupted or closed, or the runtime stops and the function does not finish within
/// [`Limits::stop_within`](crate::Limits::stop_within).
#[derive(Clone)]
pub struct Function {
    name: String,
    arguments: ArgumentType,
    run: Arc<Run>,
}

impl Function {
    /// Creates a tool from an async function with one argument, which is a struct that derives `Deserialize` and
    /// `JsonSchema`.
    pub fn new<A, F, R>(name: impl Into<String>, function: F) -> Function
    where
        A: DeserializeOwned + JsonSchema,
        F: Fn(A) -> R + Send + Sync + 'static,
        R: Future<Output = FunctionResult> + Send + 'static,
    {
        let run = move |arguments| -> BoxFuture<'static, FunctionResult> {
            match serde_json::from_value(Value::Object(arguments)) {
                Ok(arguments) => Box::pin(function(arguments)),
                Err(error) => {
                    let why = format!("the arguments could not be deserialized: {error}");
                    Box::pin(std::future::ready(Err(why.into())))
                }
            }
        };
        Function { name: name.into(), arguments: ArgumentType::of::<A>(), run: Arc::new(run) }
    }

    pub(crate) fn run(&self, arguments: Map<String, Value>) -> BoxFuture<'static, FunctionResult> {
        (self.run)(arguments)
    }

    fn describe(&self) -> Result<Tool, String> {
        let wrong = |why: String| format!("tool {:?}: {why}", self.name);
        if texts::BUILT_IN.contains(&self.name.as_str()) {
            return Err(wrong("this is the name of a built-in tool".into()));
        }
        Ok(Tool {
            name: ToolName::new(&self.name).map_err(|error| wrong(error.to_string()))?,
            description: self.arguments.description.clone(),
            input_schema: self.arguments.schema.clone().map_err(wrong)?,
            annotations: Annotations::default(),
            display_script: None,
        })
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Function").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The functions of a runtime and their toolset.
pub(crate) struct Functions {
    functions: Vec<Function>,
    toolset: Option<FunctionToolset>,
}

struct FunctionToolset {
    version: String,
    document: Vec<u8>,
}

impl Functions {
    pub(crate) fn new(functions: &[Function]) -> Result<Functions, SettingsError> {
        let toolset = match functions {
            [] => None,
            functions => Some(FunctionToolset::new(functions).map_err(SettingsError::BadFunction)?),
        };
        Ok(Functions { functions: functions.to_vec(), toolset })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|function| function.name == name)
    }

    /// Returns the toolset as a server would send it. `None` if there are no functions.
    pub(crate) fn document(&self) -> Option<Vec<u8>> {
        self.toolset.as_ref().map(|toolset| toolset.document.clone())
    }

    /// Returns true if a session that knows this version of the toolset may call the functions.
    pub(crate) fn has_version(&self, version: Option<&str>) -> bool {
        self.toolset.as_ref().map(|toolset| toolset.version.as_str()) == version
    }
}

impl FunctionToolset {
    fn new(functions: &[Function]) -> Result<FunctionToolset, String> {
        let tools = functions.iter().map(Function::describe).collect::<Result<Vec<_>, _>>()?;
        let digest = Sha256::digest(serde_json::to_vec(&tools).map_err(|error| error.to_string())?);
        let version: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let toolset = Toolset {
            name: IN_PROCESS.into(),
            description: None,
            endpoint: EndpointUrl::new(ENDPOINT).map_err(|error| error.to_string())?,
            tools,
            version: Some(version.clone()),
            needs_migration: false,
        };
        let document = serde_json::to_vec(&toolset).map_err(|error| error.to_string())?;
        // Rules such as unique names are checked here, at the start, and not at the first model request.
        parse_toolset(&document).map_err(|invalid| invalid.to_string())?;
        Ok(FunctionToolset { version, document })
    }
}
