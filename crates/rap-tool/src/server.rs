//! Putting a tool server together.

use std::collections::HashMap;
use std::env;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;

use rap_protocol::{EndpointUrl, Secret, Toolset, parse_toolset};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::auth::Auth;
use crate::call::{Call, Thread};
use crate::engine::{CloseHook, Engine, Offered, Parts, open};
use crate::error::{Error, ServeError};
use crate::http::INVOKE_PATH;
use crate::limits::Limits;
use crate::output::IntoOutput;
use crate::serve::Bound;
use crate::subscription::Subscribe;
use crate::tool::Tool;

/// A tool server: some tools, and how they are offered.
///
/// ```no_run
/// use rap_tool::prelude::*;
///
/// /// Greet someone by name.
/// #[derive(Deserialize, JsonSchema)]
/// struct Greet {
///     /// Who to greet.
///     name: String,
/// }
///
/// #[tokio::main]
/// async fn main() -> Result<()> {
///     ToolServer::new("hello")
///         .tool("greet", |args: Greet, _: Call| async move { Ok(format!("Hello, {}!", args.name)) })
///         .serve("127.0.0.1:7501")
///         .await
/// }
/// ```
#[derive(Clone)]
pub struct ToolServer {
    name: String,
    description: Option<String>,
    tools: Vec<Tool>,
    tokens: Vec<Secret>,
    pub(crate) open_to_anyone: bool,
    public_url: Option<String>,
    data: Option<PathBuf>,
    key: Option<Secret>,
    on_close: Option<CloseHook>,
    limits: Limits,
}

impl ToolServer {
    /// A server without tools. Its name, of 1 to 128 characters, is the toolset's.
    pub fn new(name: impl Into<String>) -> Self {
        ToolServer {
            name: name.into(),
            description: None,
            tools: Vec::new(),
            tokens: Vec::new(),
            open_to_anyone: false,
            public_url: None,
            data: None,
            key: None,
            on_close: None,
            limits: Limits::default(),
        }
    }

    /// Says what the tools are for.
    #[must_use]
    pub fn description(mut self, text: impl Into<String>) -> Self {
        self.description = Some(text.into());
        self
    }

    /// Adds a tool that is called and returns; see [`Tool::new`].
    #[must_use]
    pub fn tool<A, F, R, T>(self, name: impl Into<String>, handler: F) -> Self
    where
        A: DeserializeOwned + JsonSchema,
        F: Fn(A, Call) -> R + Send + Sync + 'static,
        R: Future<Output = Result<T, Error>> + Send + 'static,
        T: IntoOutput,
    {
        self.offer(Tool::new(name, handler))
    }

    /// Adds a tool that subscribes the agent to events; see [`Subscribe`].
    #[must_use]
    pub fn subscription<A, F, R>(self, name: impl Into<String>, handler: F) -> Self
    where
        A: DeserializeOwned + JsonSchema,
        F: Fn(A, Subscribe) -> R + Send + Sync + 'static,
        R: Future<Output = Result<(), Error>> + Send + 'static,
    {
        self.offer(Tool::subscription(name, handler))
    }

    /// Adds a tool that was made with [`Tool::new`] or [`Tool::subscription`].
    #[must_use]
    pub fn offer(mut self, tool: Tool) -> Self {
        self.tools.push(tool);
        self
    }

    /// Runs when a thread is closed, or has not been used for long: the time to clear away what belongs to it,
    /// best kept under [`Thread::key`]. It may run twice for the same thread, and runs again after a crash.
    #[must_use]
    pub fn on_close_thread<F, R>(mut self, hook: F) -> Self
    where
        F: Fn(Thread) -> R + Send + Sync + 'static,
        R: Future<Output = Result<(), Error>> + Send + 'static,
    {
        self.on_close = Some(Arc::new(move |thread| Box::pin(hook(thread))));
        self
    }

    /// Callers have to show this token; short for [`Auth::Bearer`].
    #[must_use]
    pub fn bearer(self, token: impl Into<String>) -> Self {
        self.auth(Auth::Bearer(token.into()))
    }

    /// How the server knows its callers.
    #[must_use]
    pub fn auth(mut self, auth: Auth) -> Self {
        match auth {
            Auth::Bearer(token) => self.tokens.push(Secret::new(token)),
            Auth::OpenToAnyone => self.open_to_anyone = true,
        }
        self
    }

    /// Where runtimes reach the server, if not under the address it is bound to.
    #[must_use]
    pub fn public_url(mut self, url: impl Into<String>) -> Self {
        self.public_url = Some(url.into());
        self
    }

    /// The directory of its journal. Default: `rap-data/NAME`, below the working directory.
    #[must_use]
    pub fn data(mut self, directory: impl Into<PathBuf>) -> Self {
        self.data = Some(directory.into());
        self
    }

    /// The key that callback URLs are encrypted with: 64 hexadecimal digits, or the base64 of 32 bytes. Default:
    /// a file `journal.key` in the data directory, made at the first start, that only its owner can read.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(Secret::new(key));
        self
    }

    /// Other bounds than the default ones.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Takes over what the environment says, which wins over what was said so far: `RAP_TOOL_DATA`,
    /// `RAP_TOOL_KEY`, `RAP_TOOL_URL`, and a further token in `RAP_TOOL_BEARER`.
    #[must_use]
    pub fn with_environment(mut self) -> Self {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
        // What is no text must not be passed over: with the replacement character in it, it is refused later.
        let text = |name| variable(name).map(|value| value.to_string_lossy().into_owned());
        self.data = variable("RAP_TOOL_DATA").map(PathBuf::from).or(self.data);
        self.key = text("RAP_TOOL_KEY").map(Secret::new).or(self.key);
        self.public_url = text("RAP_TOOL_URL").or(self.public_url);
        self.tokens.extend(text("RAP_TOOL_BEARER").map(Secret::new));
        self
    }

    /// Runs the server until it is told to stop by SIGTERM or SIGINT. This is for a program that is nothing but
    /// a tool server: it takes the environment into account ([`ToolServer::with_environment`]; `PORT` replaces
    /// the port), and logs to stderr where no other subscriber was set (`RUST_LOG` says how much).
    pub async fn serve(self, address: impl Into<String>) -> Result<(), Error> {
        crate::serve::log_to_stderr();
        let address = crate::serve::with_port_of_environment(address.into())?;
        self.with_environment().bind(address).await?.run().await;
        Ok(())
    }

    /// Binds to an address and resumes what an earlier process has left. The environment is not looked at.
    pub async fn bind(self, address: impl Into<String>) -> Result<Bound, ServeError> {
        crate::serve::bind(self, address.into()).await
    }

    /// Whether callers have to authenticate.
    pub(crate) fn is_open(&self) -> bool {
        self.tokens.is_empty()
    }

    pub(crate) fn public_url_given(&self) -> Option<&str> {
        self.public_url.as_deref()
    }

    /// Opens the journal of a server that is reached under this URL.
    pub(crate) fn open(self, public_url: &str) -> Result<Arc<Engine>, ServeError> {
        if self.tokens.iter().any(|token| !is_token(token.expose())) {
            return Err(ServeError::BadToken);
        }
        let toolset = self.toolset(public_url)?;
        let version = toolset.version.clone().unwrap_or_default();
        let manifest =
            serde_json::to_vec(&toolset).map_err(|error| ServeError::Toolset(error.to_string()))?;
        parse_toolset(&manifest).map_err(|invalid| ServeError::Toolset(invalid.to_string()))?;
        let data = self.data.unwrap_or_else(|| PathBuf::from("rap-data").join(directory_name(&self.name)));
        let schemas = toolset.tools.into_iter().map(|tool| tool.input_schema);
        let offered = |(tool, schema): (Tool, _)| (tool.name().to_owned(), Offered { tool, schema });
        let tools: HashMap<String, Offered> = self.tools.into_iter().zip(schemas).map(offered).collect();
        let (key, tokens, on_close, limits) = (self.key, self.tokens, self.on_close, self.limits);
        open(Parts { data, key, tokens, manifest: manifest.into(), version, tools, on_close, limits })
    }

    fn toolset(&self, public_url: &str) -> Result<Toolset, ServeError> {
        let endpoint = EndpointUrl::new(format!("{public_url}{INVOKE_PATH}"));
        let tools = self.tools.iter().map(Tool::describe).collect::<Result<Vec<_>, _>>()?;
        let (name, description) = (self.name.clone(), self.description.clone());
        let version = version(&json!({"name": name, "description": description, "tools": tools}).to_string());
        let endpoint = endpoint.map_err(|_| ServeError::BadPublicUrl)?;
        Ok(Toolset { name, description, endpoint, tools, version: Some(version), needs_migration: false })
    }
}

/// Changes with what a runtime has to know: where a schema, a name or a description does.
fn version(content: &str) -> String {
    let digest = Sha256::digest(content.as_bytes());
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_token(token: &str) -> bool {
    !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic())
}

/// A server's name may be any text; a directory's had better not.
fn directory_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_') { c } else { '-' };
    name.chars().map(plain).collect()
}
