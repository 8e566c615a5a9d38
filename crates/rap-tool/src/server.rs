//! [`ToolServer`]: the builder of a tool server.

use std::any::TypeId;
use std::collections::HashMap;
use std::env;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use rap_io::client::{Client, ClientLimits};
use rap_protocol::url::is_on_loopback;
use rap_protocol::{EndpointUrl, Secret, Toolset, UrlPolicy, UrlRules, parse_toolset};
use serde_json::json;
use sha2::{Digest, Sha256};
use url::Url;

use crate::auth::Auth;
use crate::call::{Call, Thread};
use crate::clock::Clock;
use crate::engine::{CloseHook, Engine, EngineConfig, Externals, Offered, Outgoing, States, open};
use crate::error::{Error, ServeError};
use crate::http::INVOKE_PATH;
use crate::limits::Limits;
use crate::output::IntoOutput;
use crate::serve::Bound;
use crate::subscription::Subscribe;
use crate::tool::{Arguments, Tool};

/// A tool server: its tools and its configuration.
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
    callbacks_to: CallbacksTo,
    on_close: Option<CloseHook>,
    states: States,
    limits: Limits,
}

/// Policy for callback URLs.
#[derive(Clone, Copy)]
enum CallbacksTo {
    Default,
    Policy(UrlPolicy),
    /// The environment variable is not the name of a policy.
    Invalid,
}

impl ToolServer {
    /// Creates a server without tools. `name` has 1 to 128 characters and is also the name of the toolset.
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
            callbacks_to: CallbacksTo::Default,
            on_close: None,
            states: States::new(),
            limits: Limits::default(),
        }
    }

    /// Sets the description of the toolset.
    #[must_use]
    pub fn description(mut self, text: impl Into<String>) -> Self {
        self.description = Some(text.into());
        self
    }

    /// Adds a tool that is called and returns a result; see [`Tool::new`].
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

    /// Adds a tool that was created with [`Tool::new`] or [`Tool::subscription`].
    #[must_use]
    pub fn offer(mut self, tool: Tool) -> Self {
        self.tools.push(tool);
        self
    }

    /// Sets a hook that runs when a thread was closed or has expired ([`Limits::thread_ttl`]). Use it to delete the
    /// data that you keep for the thread, which is best stored under [`Thread::key`].
    ///
    /// The hook may run more than once for the same thread. It runs again if the server stops before it has
    /// finished. If it takes longer than [`Limits::close_within`], it is dropped. An error or a dropped hook is logged,
    /// and the hook does not run again.
    #[must_use]
    pub fn on_close_thread<F, R>(mut self, hook: F) -> Self
    where
        F: Fn(Thread) -> R + Send + Sync + 'static,
        R: Future<Output = Result<(), Error>> + Send + 'static,
    {
        self.on_close = Some(Arc::new(move |thread| Box::pin(hook(thread))));
        self
    }

    /// Shares a value with all handlers, which get it by its type from [`Call::state`].
    #[must_use]
    pub fn state<S: Send + Sync + 'static>(mut self, state: S) -> Self {
        self.states.insert(TypeId::of::<S>(), Arc::new(state));
        self
    }

    /// Requires this token from callers; short for [`Auth::Bearer`]. Can be called several times.
    #[must_use]
    pub fn bearer(self, token: impl Into<String>) -> Self {
        self.auth(Auth::Bearer(token.into()))
    }

    /// Sets how callers authenticate.
    #[must_use]
    pub fn auth(mut self, auth: Auth) -> Self {
        match auth {
            Auth::Bearer(token) => self.tokens.push(Secret::new(token)),
            Auth::OpenToAnyone => self.open_to_anyone = true,
        }
        self
    }

    /// Sets the URL under which runtimes reach the server. Default: the address that it is bound to.
    #[must_use]
    pub fn public_url(mut self, url: impl Into<String>) -> Self {
        self.public_url = Some(url.into());
        self
    }

    /// Sets the directory of the journal. Default: `rap-data/NAME` in the working directory.
    #[must_use]
    pub fn data(mut self, directory: impl Into<PathBuf>) -> Self {
        self.data = Some(directory.into());
        self
    }

    /// Sets the key that encrypts callback URLs in the journal: 64 hexadecimal digits, or the base64 of 32 bytes.
    /// Default: the file `journal.key` in the data directory, which is created at the first start and readable by its
    /// owner only.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(Secret::new(key));
        self
    }

    /// Sets the addresses that callback URLs may have. Default: [`UrlPolicy::Loopback`] for a server that is bound to
    /// loopback, else [`UrlPolicy::Private`]. No policy permits metadata services, link-local and reserved addresses,
    /// or the server itself.
    #[must_use]
    pub fn callbacks_to(mut self, policy: UrlPolicy) -> Self {
        self.callbacks_to = CallbacksTo::Policy(policy);
        self
    }

    /// Sets the limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Applies the environment variables `RAP_TOOL_DATA`, `RAP_TOOL_KEY`, `RAP_TOOL_URL` and `RAP_TOOL_CALLBACKS_TO`
    /// (`public`, `private` or `loopback`), which override the settings made so far, and adds the tokens in
    /// `RAP_TOOL_BEARER`, which are separated by commas. Each token is a caller of its own; see [`Auth::Bearer`].
    #[must_use]
    pub fn with_environment(mut self) -> Self {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
        // A value that is not UTF-8 must not be ignored. With the replacement character in it, it is rejected later.
        let text = |name| variable(name).map(|value| value.to_string_lossy().into_owned());
        self.data = variable("RAP_TOOL_DATA").map(PathBuf::from).or(self.data);
        self.key = text("RAP_TOOL_KEY").map(Secret::new).or(self.key);
        self.public_url = text("RAP_TOOL_URL").or(self.public_url);
        if let Some(name) = text("RAP_TOOL_CALLBACKS_TO") {
            let policy = UrlPolicy::from_name(&name);
            self.callbacks_to = policy.map_or(CallbacksTo::Invalid, CallbacksTo::Policy);
        }
        let tokens = text("RAP_TOOL_BEARER").unwrap_or_default();
        if !tokens.is_empty() {
            self.tokens.extend(tokens.split(',').map(|token| Secret::new(token.trim())));
        }
        self
    }

    /// Runs the server until SIGTERM or SIGINT. For a program that is only a tool server.
    ///
    /// Applies the environment ([`ToolServer::with_environment`]; `PORT` replaces the port of `address`). Logs to
    /// stderr if no tracing subscriber is set; `RUST_LOG` sets the level.
    pub async fn serve(self, address: impl Into<String>) -> Result<(), Error> {
        crate::serve::log_to_stderr();
        let address = crate::serve::with_port_from_environment(address.into())?;
        self.with_environment().bind(address).await?.run().await;
        Ok(())
    }

    /// Binds to an address, opens the journal and resumes unfinished calls. Does not read the environment.
    pub async fn bind(self, address: impl Into<String>) -> Result<Bound, ServeError> {
        crate::serve::bind(self, address.into()).await
    }

    /// Returns the endpoints as a router, to be nested in an axum application at the path of the public URL.
    ///
    /// Requires a token, or [`Auth::OpenToAnyone`] if a layer of the application authenticates callers. Use
    /// [`ToolServer::mount`] instead if you also need graceful shutdown.
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

    /// Opens the journal and resumes unfinished calls, for a server that is part of another application; see
    /// [`ToolServer::router`].
    pub async fn mount(self) -> Result<Mounted, ServeError> {
        if self.is_open() && !self.open_to_anyone {
            return Err(ServeError::OpenRouter);
        }
        let Some(url) = &self.public_url else { return Err(ServeError::NoPublicUrl("a router".into())) };
        let url = checked_public_url(url)?;
        Ok(Mounted { engine: self.start(url, None).await? })
    }

    /// Returns true if no token is required.
    pub(crate) fn is_open(&self) -> bool {
        self.tokens.is_empty()
    }

    pub(crate) fn first_token(&self) -> Option<&str> {
        self.tokens.first().map(Secret::expose)
    }

    pub(crate) fn configured_public_url(&self) -> Option<&str> {
        self.public_url.as_deref()
    }

    /// Returns the rules for callback URLs. Without an address, the server is part of an application that may also
    /// serve the runtime.
    pub(crate) fn callback_rules(
        &self,
        public_url: &str,
        bound: Option<SocketAddr>,
    ) -> Result<UrlRules, ServeError> {
        let policy = match (self.callbacks_to, bound) {
            (CallbacksTo::Invalid, _) => return Err(ServeError::BadCallbacksTo),
            (CallbacksTo::Policy(policy), _) => policy,
            (CallbacksTo::Default, Some(bound)) => UrlPolicy::of_listener(bound.ip()),
            (CallbacksTo::Default, None) if on_loopback(public_url) => UrlPolicy::Loopback,
            (CallbacksTo::Default, None) => UrlPolicy::Private,
        };
        let rules = UrlRules::from(policy);
        Ok(bound.into_iter().fold(rules, UrlRules::listening_on))
    }

    /// Opens the journal and resumes unfinished calls. `bound` is the address that the server listens on.
    pub(crate) async fn start(
        self,
        public_url: String,
        bound: Option<SocketAddr>,
    ) -> Result<Arc<Engine>, ServeError> {
        let callback_rules = self.callback_rules(&public_url, bound)?;
        if public_url.starts_with("http:") && !on_loopback(&public_url) {
            tracing::warn!(
                url = public_url,
                "runtimes on other machines send tokens and arguments in plain text: use https"
            );
        }
        let limits = ClientLimits { total: self.limits.callback_within, ..ClientLimits::default() };
        let opening = tokio::task::spawn_blocking(move || {
            let outgoing = Outgoing::Http(Box::new(Client::outgoing(callback_rules.clone(), limits)));
            self.open(Externals { public_url, callback_rules, outgoing, clock: Clock::System })
        });
        let engine = opening.await.map_err(|error| ServeError::Journal(error.to_string()))??;
        engine.resume().await?;
        Ok(engine)
    }

    /// Opens the journal without resuming anything. Blocks.
    pub(crate) fn open(self, externals: Externals) -> Result<Arc<Engine>, ServeError> {
        if self.tokens.iter().any(|token| !is_token(token.expose())) {
            return Err(ServeError::BadToken);
        }
        let toolset = self.toolset(&externals.public_url)?;
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
        let config = EngineConfig {
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
        open(config, externals)
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

/// A tool server that is part of another application; see [`ToolServer::mount`].
pub struct Mounted {
    engine: Arc<Engine>,
}

impl Mounted {
    /// Returns the endpoints, to be nested in the application at the path of the public URL.
    pub fn router(&self) -> Router {
        crate::http::router(Arc::clone(&self.engine))
    }

    /// Shuts down gracefully: lets running calls finish within [`Limits::stop_within`]. Everything that was accepted
    /// stays in the journal.
    pub async fn shut_down(self) {
        self.engine.shut_down().await;
    }
}

/// Validates a public URL and removes trailing slashes.
pub(crate) fn checked_public_url(given: &str) -> Result<String, ServeError> {
    let url = EndpointUrl::new(given).map_err(|_| ServeError::BadPublicUrl)?.to_url();
    if url.query().is_some() || url.fragment().is_some() {
        return Err(ServeError::BadPublicUrl);
    }
    Ok(given.trim_end_matches('/').to_owned())
}

fn on_loopback(url: &str) -> bool {
    Url::parse(url).is_ok_and(|url| is_on_loopback(&url))
}

/// Hash of the toolset: changes when a name, a description or a schema changes.
fn version(content: &str) -> String {
    let digest = Sha256::digest(content.as_bytes());
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_token(token: &str) -> bool {
    !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Replaces characters of a server's name that are unsafe in a directory name.
fn directory_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_') { c } else { '-' };
    name.chars().map(plain).collect()
}
