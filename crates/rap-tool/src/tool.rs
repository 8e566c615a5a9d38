//! [`Tool`]: a name, an input schema and a handler.

use std::future::Future;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use rap_protocol::{Annotations, ArgumentType, ExpectedDuration, InputSchema, ToolName};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::call::Call;
use crate::error::{Error, ServeError};
use crate::output::{IntoOutput, Output};
use crate::rules::OnRestart;
use crate::subscription::Subscribe;

/// Longest timeout, as far as clocks can represent it.
const MAX_TIMEOUT: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The future of a handler, or why it could not be started.
pub(crate) type StartResult<T> = Result<BoxFuture<'static, Result<T, Error>>, Error>;

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
    timeout: Option<Duration>,
    scrubs: bool,
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
            let running = handler(deserialize(arguments)?, call);
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
            Ok(Box::pin(handler(deserialize(arguments)?, subscribe)))
        };
        // The handler of a subscription is always called again after a restart.
        Tool::with_handler::<A>(name.into(), Handler::Subscription(Arc::new(run))).restartable()
    }

    /// Creates a tool whose arguments are described by a JSON Schema that is known only at run time. It has no description
    /// unless [`Tool::description`] sets one.
    ///
    /// ```
    /// use rap_tool::prelude::*;
    /// use serde_json::{Map, Value, json};
    ///
    /// let schema = json!({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]});
    /// let tool = Tool::with_schema("echo", schema, |arguments: Map<String, Value>, _: Call| async move {
    ///     Ok(Json(arguments["text"].clone()))
    /// });
    /// ```
    pub fn with_schema<F, R, T>(name: impl Into<String>, schema: Value, handler: F) -> Self
    where
        F: Fn(Map<String, Value>, Call) -> R + Send + Sync + 'static,
        R: Future<Output = Result<T, Error>> + Send + 'static,
        T: IntoOutput,
    {
        let run = move |arguments, call| -> StartResult<Output> {
            let running = handler(deserialize(arguments)?, call);
            Ok(Box::pin(async move { running.await?.into_output() }))
        };
        let schema = match schema.get("type") {
            Some(kind) if kind == "object" => {
                InputSchema::new(schema).map_err(|error| format!("its schema does not compile: {error}"))
            }
            _ => Err("its schema must have the type object".into()),
        };
        let arguments = ArgumentType { schema, description: String::new() };
        Tool::described(name.into(), arguments, Handler::Call(Arc::new(run)))
    }

    /// Returns why a runtime would not accept the tool.
    pub fn check(&self) -> Result<(), ServeError> {
        self.describe().map(drop)
    }

    fn with_handler<A: JsonSchema>(name: String, handler: Handler) -> Self {
        Tool::described(name, ArgumentType::of::<A>(), handler)
    }

    fn described(name: String, arguments: ArgumentType, handler: Handler) -> Self {
        let ArgumentType { schema, description } = arguments;
        Tool {
            name,
            description,
            schema,
            handler,
            on_restart: OnRestart::Fail,
            annotations: Annotations::default(),
            display_script: None,
            timeout: None,
            scrubs: true,
        }
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

    /// Sets the time that a call may take, instead of [`Limits::call_timeout`](crate::Limits::call_timeout). Time
    /// counts from the acceptance of the call. If the server restarts and runs the call again, it has at least 10
    /// minutes, or this time if that is shorter.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sends the output of this tool unchanged.
    ///
    /// By default, a path in the home directory of the server begins with `~` in the output and one in a temporary
    /// directory with `[temp]`, the values of secret environment variables and the server's own tokens become `[secret]`,
    /// and backtraces are removed. An environment variable is secret if its value has at least 8 bytes, is neither a number
    /// nor a path, and its name contains `SECRET`, `TOKEN`, `PASSWORD`, `PASSWD`, `PASSPHRASE`, `CREDENTIAL`, `API_KEY`,
    /// `APIKEY` or `BEARER`, or ends in `_KEY`, `_KEY_ID`, `_PASS`, `_PWD`, `_DSN`, `_AUTH` or `DATABASE_URL`. This applies
    /// to results, errors, events, views and questions; images and the names of JSON fields are not changed.
    ///
    /// Use this for a tool whose output has to be exact, for example one that reads files for an agent which edits them.
    #[must_use]
    pub fn without_scrubbing(mut self) -> Self {
        self.scrubs = false;
        self
    }

    /// Declares that a call must not run twice, for a subscription whose call has effects before it is confirmed.
    ///
    /// If the server stops before the confirmation, the call ends with an error result that says that the outcome is
    /// unknown. The handler of a confirmed subscription is called again in any case; see [`Subscribe::is_confirmed`].
    #[must_use]
    pub fn not_restartable(mut self) -> Self {
        self.on_restart = OnRestart::Fail;
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
    /// The manifest carries it as `x-expectedDuration`, in seconds. A runtime shows it to people, and points out calls that
    /// take much longer. A tool without a [`Tool::timeout`] may take at least twice the longest expected time.
    #[must_use]
    pub fn expected_duration(mut self, range: RangeInclusive<Duration>) -> Self {
        let expected = ExpectedDuration { min: *range.start(), max: *range.end() };
        self.annotations.extensions.insert(ExpectedDuration::ANNOTATION.into(), expected.to_annotation());
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

    /// Returns the time that a call may take. `default` is the server's.
    pub(crate) fn timeout_or(&self, default: Duration) -> Duration {
        let expected = self.annotations.expected_duration().map(|expected| expected.max.saturating_mul(2));
        let timeout = self.timeout.unwrap_or_else(|| default.max(expected.unwrap_or_default()));
        timeout.min(MAX_TIMEOUT)
    }

    pub(crate) fn scrubs(&self) -> bool {
        self.scrubs
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

fn deserialize<A: DeserializeOwned>(arguments: Value) -> Result<A, Error> {
    serde_json::from_value(arguments)
        .map_err(|error| Error::Message(format!("the arguments could not be deserialized: {error}")))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde_json::json;

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
