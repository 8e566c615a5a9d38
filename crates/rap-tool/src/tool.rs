//! [`Tool`]: a name, an input schema and a handler.

use std::future::Future;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use rap_protocol::{Annotations, ArgumentType, InputSchema, ToolName};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::call::Call;
use crate::error::{Error, ServeError};
use crate::output::{IntoOutput, Output};
use crate::rules::OnRestart;
use crate::subscription::Subscribe;

type StartResult<T> = Result<BoxFuture<'static, Result<T, Error>>, Error>;

/// Types that a tool can take as its arguments.
///
/// Implemented for every type that derives `Deserialize` and `JsonSchema`. The type has to be a struct with named
/// fields.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the arguments of a tool",
    label = "this type has no schema, or cannot be deserialized from JSON",
    note = "put `#[derive(Deserialize, JsonSchema)]` on a struct with named fields"
)]
pub trait Arguments: DeserializeOwned + JsonSchema {}

#[diagnostic::do_not_recommend]
impl<A: DeserializeOwned + JsonSchema> Arguments for A {}

#[derive(Clone)]
pub(crate) enum Handler {
    Call(Arc<dyn Fn(Value, Call) -> StartResult<Output> + Send + Sync>),
    Subscription(Arc<dyn Fn(Value, Subscribe) -> StartResult<()> + Send + Sync>),
}

/// One tool of a server.
///
/// [`ToolServer::tool`](crate::ToolServer::tool) and [`ToolServer::subscription`](crate::ToolServer::subscription)
/// build a tool from a name and a handler. Use this type to set a description, annotations or the restart behaviour:
///
/// ```
/// use rap_tool::prelude::*;
///
/// /// Counts to a number, slowly.
/// #[derive(Deserialize, JsonSchema)]
/// struct Count {
///     /// Where to stop.
///     to: u64,
/// }
///
/// let tool = Tool::new("count", |args: Count, _call: Call| async move { Ok(format!("counted to {}", args.to)) })
///     .restartable();
/// let server = ToolServer::new("numbers").offer(tool);
/// ```
#[derive(Clone)]
pub struct Tool {
    name: String,
    description: String,
    /// The error says why the argument type cannot be used.
    schema: Result<InputSchema, String>,
    handler: Handler,
    on_restart: OnRestart,
    annotations: Annotations,
    display_script: Option<String>,
}

impl Tool {
    /// Creates a tool whose handler is called and returns a result.
    ///
    /// The input schema comes from the argument type, and the description that the model reads comes from that
    /// type's doc comment.
    pub fn new<A, F, R, T>(name: impl Into<String>, handler: F) -> Self
    where
        A: Arguments,
        F: Fn(A, Call) -> R + Send + Sync + 'static,
        R: Future<Output = Result<T, Error>> + Send + 'static,
        T: IntoOutput,
    {
        let run = move |arguments, call| -> StartResult<Output> {
            let running = handler(deserialise(arguments)?, call);
            Ok(Box::pin(async move { running.await?.into_output() }))
        };
        Tool::with_handler::<A>(name.into(), Handler::Call(Arc::new(run)))
    }

    /// Creates a tool that subscribes the agent to events; see [`Subscribe`].
    pub fn subscription<A, F, R>(name: impl Into<String>, handler: F) -> Self
    where
        A: Arguments,
        F: Fn(A, Subscribe) -> R + Send + Sync + 'static,
        R: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let run = move |arguments, subscribe| -> StartResult<()> {
            Ok(Box::pin(handler(deserialise(arguments)?, subscribe)))
        };
        // The handler of a subscription is always called again after a restart.
        Tool::with_handler::<A>(name.into(), Handler::Subscription(Arc::new(run))).restartable()
    }

    fn with_handler<A: JsonSchema>(name: String, handler: Handler) -> Self {
        let ArgumentType { schema, description } = ArgumentType::of::<A>();
        let (annotations, display_script) = (Annotations::default(), None);
        let on_restart = OnRestart::Fail;
        Tool { name, description, schema, handler, on_restart, annotations, display_script }
    }

    /// Sets the description, which otherwise is the doc comment of the argument type.
    #[must_use]
    pub fn description(mut self, text: impl Into<String>) -> Self {
        self.description = text.into();
        self
    }

    /// Declares that a call can safely run twice.
    ///
    /// If the server stops during a call, it runs the call again from the beginning after the restart. A call of a
    /// tool that is not restartable ends with an error result instead, which says that the outcome is unknown. A
    /// subscription is always restartable.
    #[must_use]
    pub fn restartable(mut self) -> Self {
        self.on_restart = OnRestart::RunAgain;
        self
    }

    /// Annotates the tool as read-only: a call has no side effects.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.annotations.read_only = Some(true);
        self
    }

    /// Annotates the tool as destructive. A runtime may ask a person before it calls the tool.
    #[must_use]
    pub fn destructive(mut self) -> Self {
        self.annotations.destructive = Some(true);
        self
    }

    /// Annotates the tool as idempotent: a second call with the same arguments has no further effect.
    #[must_use]
    pub fn idempotent(mut self) -> Self {
        self.annotations.idempotent = Some(true);
        self
    }

    /// Annotates the tool as long-running.
    #[must_use]
    pub fn long_running(mut self) -> Self {
        self.annotations.long_running = Some(true);
        self
    }

    /// Annotates the tool with the authorisation that it needs from the user, such as the name of a service.
    #[must_use]
    pub fn requires_auth(mut self, what: impl Into<String>) -> Self {
        self.annotations.requires_auth = Some(what.into());
        self
    }

    /// Annotates the tool with the usual duration of a call.
    ///
    /// The manifest carries it as `x-expectedDuration`, in seconds. A runtime can use it to decide when a call is
    /// overdue.
    #[must_use]
    pub fn expected_duration(mut self, range: std::ops::RangeInclusive<std::time::Duration>) -> Self {
        let seconds = json!({"min": range.start().as_secs_f64(), "max": range.end().as_secs_f64()});
        self.annotations.extensions.insert("x-expectedDuration".into(), seconds);
        self
    }

    /// Sets a Rhai expression over `args` that renders a call as one line for display. It does not affect the call.
    #[must_use]
    pub fn display_script(mut self, script: impl Into<String>) -> Self {
        self.display_script = Some(script.into());
        self
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn on_restart(&self) -> OnRestart {
        self.on_restart
    }

    pub(crate) fn handler(&self) -> &Handler {
        &self.handler
    }

    /// Returns the tool's entry in the toolset.
    pub(crate) fn describe(&self) -> Result<rap_protocol::Tool, ServeError> {
        let wrong = |why: String| ServeError::Toolset(format!("tool {:?}: {why}", self.name));
        Ok(rap_protocol::Tool {
            name: ToolName::new(&self.name).map_err(|error| wrong(error.to_string()))?,
            description: self.description.clone(),
            input_schema: self.schema.clone().map_err(wrong)?,
            annotations: self.annotations.clone(),
            display_script: self.display_script.clone(),
        })
    }
}

fn deserialise<A: DeserializeOwned>(arguments: Value) -> Result<A, Error> {
    serde_json::from_value(arguments)
        .map_err(|error| Error::Message(format!("the arguments could not be deserialized: {error}")))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    /// Sends a parcel.
    #[derive(Deserialize, JsonSchema)]
    #[allow(dead_code)]
    struct Send {
        /// Where to.
        to: String,
        /// In grams.
        #[schemars(range(min = 1, max = 30_000))]
        weight: Option<u32>,
    }

    #[test]
    fn the_schema_and_the_description_come_from_the_type() {
        let tool = Tool::new("send", |_: Send, _: Call| async { Ok("sent") }).describe().unwrap();
        assert_eq!(tool.description, "Sends a parcel.");
        let expected = json!({
            "type": "object",
            "required": ["to"],
            "properties": {
                "to": {"type": "string", "description": "Where to."},
                "weight": {
                    "type": ["integer", "null"], "format": "uint32", "description": "In grams.",
                    "minimum": 1, "maximum": 30_000,
                },
            },
        });
        assert_eq!(tool.input_schema.document(), &expected);
    }

    #[test]
    fn an_invalid_tool_is_rejected_with_its_name() {
        let bad_name = Tool::new("no spaces", |_: Send, _: Call| async { Ok("") }).describe();
        let expected = "the toolset is not valid: tool \"no spaces\": a tool's name has 1 to 128 letters, digits, `_` and `-`";
        assert_eq!(bad_name.unwrap_err().to_string(), expected);
        let no_object = Tool::new("list", |_: Vec<u8>, _: Call| async { Ok("") }).describe();
        let expected =
            "the toolset is not valid: tool \"list\": its arguments must be a struct with named fields";
        assert_eq!(no_object.unwrap_err().to_string(), expected);
    }
}
