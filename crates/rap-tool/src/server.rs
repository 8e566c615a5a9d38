//! Putting a tool server together.

use std::any::TypeId;
use std::collections::HashMap;
use std::env;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{EndpointUrl, Secret, Toolset, parse_toolset};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::auth::Auth;
use crate::call::{Call, Thread};
use crate::clock::Clock;
use crate::engine::{CloseHook, Engine, Offered, Outgoing, Parts, Place, States, open};
use crate::error::{Error, ServeError};
use crate::http::INVOKE_PATH;
use crate::limits::Limits;
use crate::output::IntoOutput;
use crate::serve::Bound;
use crate::subscription::Subscribe;
use crate::tool::{Arguments, Tool};

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
    states: States,
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
            states: States::new(),
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
        A: Arguments,
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
        A: Arguments,
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

    /// Shares a value with the handlers, which find it by its type with [`Call::state`].
    #[must_use]
    pub fn state<S: Send + Sync + 'static>(mut self, state: S) -> Self {
        self.states.insert(TypeId::of::<S>(), Arc::new(state));
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

    /// The endpoints as a router, to be nested in an axum application at the path of the public URL, with layers of
    /// its own. Since this can not know who reaches the application, it wants a token, or
    /// [`Auth::OpenToAnyone`] where a layer authenticates. Use [`ToolServer::mount`] to stop in order as well.
    ///
    /// ```
    /// use rap_tool::prelude::*;
    ///
    /// # #[derive(Deserialize, JsonSchema)]
    /// # struct Greet { name: String }
    /// # async fn greet(args: Greet, _: Call) -> Result<String> { Ok(args.name) }
    /// # #[tokio::main]
    /// # async fn main() -> Result<()> {
    /// # let data = std::env::temp_dir().join(format!("rap-tool-doc-{}", std::process::id()));
    /// let tools = ToolServer::new("hello")
    ///     .tool("greet", greet)
    ///     .bearer("a-token")
    ///     .public_url("https://example.com/hello")
    /// #   .data(&data)
    ///     .router()
    ///     .await?;
    /// let application: axum::Router = axum::Router::new().nest("/hello", tools);
    /// # std::fs::remove_dir_all(data)?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn router(self) -> Result<Router, ServeError> {
        Ok(self.mount().await?.router())
    }

    /// Opens the journal and resumes what an earlier process has left, for a server that is part of another
    /// application; see [`ToolServer::router`].
    pub async fn mount(self) -> Result<Mounted, ServeError> {
        if self.is_open() && !self.open_to_anyone {
            return Err(ServeError::OpenRouter);
        }
        let Some(url) = &self.public_url else { return Err(ServeError::NoPublicUrl("a router".into())) };
        let url = checked_public_url(url)?;
        Ok(Mounted { engine: self.start(url).await? })
    }

    /// Whether nobody has to authenticate.
    pub(crate) fn is_open(&self) -> bool {
        self.tokens.is_empty()
    }

    pub(crate) fn first_token(&self) -> Option<&str> {
        self.tokens.first().map(Secret::expose)
    }

    pub(crate) fn public_url_given(&self) -> Option<&str> {
        self.public_url.as_deref()
    }

    /// Opens the journal of a server that is reached under this URL, and resumes what it finds.
    pub(crate) async fn start(self, public_url: String) -> Result<Arc<Engine>, ServeError> {
        let policy = self.limits.callbacks_to;
        let limits = ClientLimits { total: self.limits.callback_within, ..ClientLimits::default() };
        let opening = tokio::task::spawn_blocking(move || {
            let outgoing = Outgoing::Http(Box::new(Client::new(policy, limits)));
            self.open(Place { public_url, outgoing, clock: Clock::System })
        });
        let engine = opening.await.map_err(|error| ServeError::Journal(error.to_string()))??;
        engine.resume().await?;
        Ok(engine)
    }

    /// Opens the journal; nothing runs yet. This blocks.
    pub(crate) fn open(self, place: Place) -> Result<Arc<Engine>, ServeError> {
        if self.tokens.iter().any(|token| !is_token(token.expose())) {
            return Err(ServeError::BadToken);
        }
        let toolset = self.toolset(&place.public_url)?;
        let version = toolset.version.clone().unwrap_or_default();
        let manifest =
            serde_json::to_vec(&toolset).map_err(|error| ServeError::Toolset(error.to_string()))?;
        parse_toolset(&manifest).map_err(|invalid| ServeError::Toolset(invalid.to_string()))?;
        let data = self.data.unwrap_or_else(|| PathBuf::from("rap-data").join(directory_name(&self.name)));
        let schemas = toolset.tools.into_iter().map(|tool| tool.input_schema);
        let offered = |(tool, schema): (Tool, _)| {
            (tool.name().to_owned(), Offered { name: tool.name().into(), tool, schema })
        };
        let tools: HashMap<String, Offered> = self.tools.into_iter().zip(schemas).map(offered).collect();
        let parts = Parts {
            data,
            key: self.key,
            tokens: self.tokens,
            manifest: manifest.into(),
            version,
            tools,
            on_close: self.on_close,
            states: self.states,
            limits: self.limits,
        };
        open(parts, place)
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

/// A tool server as a part of another application.
pub struct Mounted {
    engine: Arc<Engine>,
}

impl Mounted {
    /// The endpoints, to be nested in the application at the path of the public URL.
    pub fn router(&self) -> Router {
        crate::http::router(Arc::clone(&self.engine))
    }

    /// Stops in order: lets running calls finish within [`Limits::stop_within`], and loses nothing.
    pub async fn shut_down(self) {
        self.engine.shut_down().await;
    }
}

/// A public URL without the slash at its end.
pub(crate) fn checked_public_url(given: &str) -> Result<String, ServeError> {
    let url = EndpointUrl::new(given).map_err(|_| ServeError::BadPublicUrl)?.to_url();
    if url.query().is_some() || url.fragment().is_some() {
        return Err(ServeError::BadPublicUrl);
    }
    Ok(given.trim_end_matches('/').to_owned())
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
