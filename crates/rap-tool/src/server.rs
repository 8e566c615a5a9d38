//! [`ToolServer`]: the builder of a tool server.

mod environment;

use std::any::TypeId;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use rap_io::client::{Client, ClientLimits};
use rap_io::exposure::warn_if_exposed;
use rap_io::reloading::Reloading;
use rap_io::tls::{ClientTls, ServerTls};
use rap_protocol::url::is_on_loopback;
use rap_protocol::{EndpointUrl, Secret, UrlPolicy, UrlRules};
use url::Url;

use crate::auth::Auth;
use crate::call::{Call, Thread};
use crate::clock::Clock;
use crate::engine::{
    CloseHook, Engine, EngineConfig, Externals, MigrateHook, Migration, Outgoing, States, open,
};
use crate::error::{Error, ServeError};
use crate::limits::Limits;
use crate::manifest::ToolsetSource;
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
    auth: Vec<Auth>,
    pub(crate) open_to_anyone: bool,
    pub(crate) tls: Option<ServerTls>,
    callback_tls: Option<ClientTls>,
    /// Names of environment variables of which only one is set.
    incomplete_environment: Option<&'static str>,
    public_url: Option<String>,
    consent_url: Option<String>,
    journal: JournalLocation,
    key: Option<Secret>,
    callbacks_to: CallbacksTo,
    on_close: Option<CloseHook>,
    on_migrate: Option<MigrateHook>,
    migration_key: Option<Secret>,
    states: States,
    limits: Limits,
    version: Option<String>,
    accepts: Vec<String>,
}

/// Location of the journal.
#[derive(Clone)]
enum JournalLocation {
    /// The directory `rap-data/NAME`.
    Default,
    Directory(PathBuf),
    Memory,
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
            auth: Vec::new(),
            open_to_anyone: false,
            tls: None,
            callback_tls: None,
            incomplete_environment: None,
            public_url: None,
            consent_url: None,
            journal: JournalLocation::Default,
            key: None,
            callbacks_to: CallbacksTo::Default,
            on_close: None,
            on_migrate: None,
            migration_key: None,
            states: States::new(),
            limits: Limits::default(),
            version: None,
            accepts: Vec::new(),
        }
    }

    /// Sets the description of the toolset.
    #[must_use]
    pub fn description(mut self, text: impl Into<String>) -> Self {
        self.description = Some(text.into());
        self
    }

    /// Names the version of the toolset. An invocation for another version is answered with 409, and the runtime then
    /// fetches the toolset again.
    ///
    /// Default: a hash of the names, schemas and annotations of the tools, without descriptions. Name a version if you want
    /// to decide yourself which changes make older sessions fetch the toolset again.
    #[must_use]
    pub fn version(mut self, version: impl Into<String>) -> Self {
        self.version = Some(version.into());
        self
    }

    /// Names older versions whose invocations are still accepted. Their arguments are validated against the current
    /// schemas, so a new field has to be optional.
    ///
    /// ```
    /// # use rap_tool::prelude::*;
    /// let server = ToolServer::new("weather").version("2026-11").accepts(["2026-10", "2026-09"]);
    /// ```
    #[must_use]
    pub fn accepts<V: Into<String>>(mut self, versions: impl IntoIterator<Item = V>) -> Self {
        self.accepts.extend(versions.into_iter().map(Into::into));
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

    /// Sets a hook that moves the state of a session to another tool server, when a runtime moves the session to another
    /// runtime. The toolset then says `needsMigration`.
    ///
    /// The hook returns `Ok` only when all state of the session is at the destination. Otherwise the session continues
    /// where it is. So the hook copies state and deletes nothing: when the move is complete, the session's threads are
    /// closed here, and [`ToolServer::on_close_thread`] deletes their data. The hook may run more than once for the
    /// same session.
    #[must_use]
    pub fn migrate<F, R>(mut self, hook: F) -> Self
    where
        F: Fn(Migration) -> R + Send + Sync + 'static,
        R: Future<Output = Result<(), Error>> + Send + 'static,
    {
        self.on_migrate = Some(Arc::new(move |migration| Box::pin(hook(migration))));
        self
    }

    /// Moves the calls and subscriptions of a session, with their undelivered results and events, and the directories of
    /// its threads ([`Call::directory`]) to another tool server when a runtime moves the session there. The other server has
    /// the same tools and the same key, which is 64 hexadecimal digits or the base64 of 32 bytes. The toolset then says
    /// `needsMigration`. With a hook ([`ToolServer::migrate`]), the hook runs first.
    ///
    /// At the destination a call continues as after a restart: a subscription resumes with its cursor, and a
    /// [`Tool::restartable`](crate::Tool::restartable) call runs again. Any other call that is running has
    /// [`Limits::stop_within`] to return, and its result moves; if it does not, the session does not move. A call belongs to
    /// the caller with the same token or name, or to the only one that the server has. Questions to users do not move.
    #[must_use]
    pub fn migrate_calls(mut self, key: impl Into<String>) -> Self {
        self.migration_key = Some(Secret::new(key));
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

    /// Adds a way in which callers authenticate. A request needs one of them.
    #[must_use]
    pub fn auth(mut self, auth: Auth) -> Self {
        match auth {
            Auth::OpenToAnyone => self.open_to_anyone = true,
            auth => self.auth.push(auth),
        }
        self
    }

    /// Serves https with this certificate. The files are read again when they change. [`ToolServer::router`] ignores it.
    #[must_use]
    pub fn tls(mut self, tls: ServerTls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Sets the client certificate that callbacks show, and the authorities of the certificates of runtimes. The files are
    /// read again when they change.
    #[must_use]
    pub fn callback_tls(mut self, tls: ClientTls) -> Self {
        self.callback_tls = Some(tls);
        self
    }

    /// Sets the URL under which runtimes reach the server. Default: the address that it is bound to.
    #[must_use]
    pub fn public_url(mut self, url: impl Into<String>) -> Self {
        self.public_url = Some(url.into());
        self
    }

    /// Sets the URL under which browsers reach the server after a sign-in, if it is not the public URL: whoever serves it
    /// passes requests on to the path `/consent` of this server, with the rest of the path and the query.
    #[must_use]
    pub fn consent_url(mut self, url: impl Into<String>) -> Self {
        self.consent_url = Some(url.into());
        self
    }

    /// Sets the directory of the journal. Default: `rap-data/NAME` in the working directory.
    #[must_use]
    pub fn data(mut self, directory: impl Into<PathBuf>) -> Self {
        self.journal = JournalLocation::Directory(directory.into());
        self
    }

    /// Keeps the journal in memory, for a process without a disk, such as a function of a cloud provider.
    ///
    /// When the process ends, everything is lost: running calls end without a result, subscriptions send no more events,
    /// undelivered results and events are dropped, hooks of threads that were not closed do not run, and an invocation that
    /// is sent again runs again. The server logs this when it starts. Let calls finish with [`Mounted::shut_down`] before
    /// the platform freezes or ends the process.
    #[must_use]
    pub fn journal_in_memory(mut self) -> Self {
        self.journal = JournalLocation::Memory;
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

    /// Runs the server until SIGTERM or SIGINT. For a program that is only a tool server.
    ///
    /// Applies the environment ([`ToolServer::with_environment`]; `PORT` replaces the port of `address`). Logs to
    /// stderr if no tracing subscriber is set; `RUST_LOG` sets the level.
    ///
    /// With `RAP_EMBEDDED=1` in the environment, as `[[tool_server]] command = […]` of `rap serve` sets it, the server
    /// listens on 127.0.0.1, and its first line on stdout is `{"port": N}`. Print nothing before.
    pub async fn serve(self, address: impl Into<String>) -> Result<(), Error> {
        crate::serve::log_to_stderr();
        let address = crate::serve::address(address.into())?;
        let bound = self.with_environment().bind(address).await?;
        crate::serve::announce(bound.local_addr().port())?;
        bound.run().await;
        Ok(())
    }

    /// Binds to an address, opens the journal and resumes unfinished calls. Does not apply the environment.
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
            return Err(ServeError::UnauthenticatedRouter);
        }
        let needs_connection =
            |auth: &Auth| matches!(auth, Auth::MutualTls { .. } | Auth::ProxyHeader { .. });
        if self.auth.iter().any(needs_connection) {
            return Err(ServeError::NoConnections);
        }
        let Some(url) = &self.public_url else { return Err(ServeError::NoPublicUrl("a router".into())) };
        let url = checked_public_url(url)?;
        let source = self.source();
        Ok(Mounted { engine: self.start(url, None).await?, source })
    }

    /// Returns true if callers need a certificate that the server would not ask for.
    pub(crate) fn lacks_client_ca(&self) -> bool {
        let wants = self.auth.iter().any(|auth| matches!(auth, Auth::MutualTls { .. }));
        wants && self.tls.as_ref().is_none_or(|tls| tls.client_ca.is_none())
    }

    /// Returns true if no authentication is required.
    pub(crate) fn is_open(&self) -> bool {
        self.auth.is_empty()
    }

    pub(crate) fn first_token(&self) -> Option<&str> {
        self.auth.iter().find_map(|auth| match auth {
            Auth::Bearer(token) => Some(token.as_str()),
            _ => None,
        })
    }

    pub(crate) fn has_journal_in_memory(&self) -> bool {
        matches!(self.journal, JournalLocation::Memory)
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
            let client = match &self.callback_tls {
                Some(tls) => tls.outgoing(callback_rules.clone(), limits)?,
                None => Reloading::fixed(Client::outgoing(callback_rules.clone(), limits)),
            };
            let outgoing = Outgoing::Http(Box::new(client));
            self.open(Externals { public_url, callback_rules, outgoing, clock: Clock::System })
        });
        let engine = opening.await.map_err(|error| ServeError::Journal(error.to_string()))??;
        engine.resume().await?;
        Ok(engine)
    }

    /// Returns the files with tokens, signing keys and private keys.
    fn secret_files(&self) -> Vec<PathBuf> {
        let of_auth = self.auth.iter().filter_map(|auth| match auth {
            Auth::BearerFile { file, .. } | Auth::HmacFile { file, .. } => Some(file),
            _ => None,
        });
        let listener = self.tls.iter().map(|tls| &tls.key);
        let callbacks = self.callback_tls.iter().filter_map(|tls| tls.identity.as_ref().map(|(_, key)| key));
        of_auth.chain(listener).chain(callbacks).cloned().collect()
    }

    /// Opens the journal without resuming anything. Blocks.
    pub(crate) fn open(self, externals: Externals) -> Result<Arc<Engine>, ServeError> {
        warn_if_exposed(&self.secret_files());
        if let Some(names) = self.incomplete_environment {
            return Err(ServeError::Environment(names));
        }
        let is_bad = |auth: &Auth| matches!(auth, Auth::Bearer(token) if !is_token(token));
        if self.auth.iter().any(is_bad) {
            return Err(ServeError::BadToken);
        }
        let offer = self.source().offer(&externals.public_url, self.tools)?;
        let data = match self.journal {
            JournalLocation::Default => Some(PathBuf::from("rap-data").join(directory_name(&self.name))),
            JournalLocation::Directory(directory) => Some(directory),
            JournalLocation::Memory => None,
        };
        let config = EngineConfig {
            data,
            key: self.key,
            auth: self.auth,
            offer,
            on_close: self.on_close,
            on_migrate: self.on_migrate,
            migration_key: self.migration_key,
            consent_url: self.consent_url.as_deref().map(checked_public_url).transpose()?,
            states: self.states,
            limits: self.limits,
        };
        open(config, externals)
    }

    /// Returns what the toolset needs besides the tools.
    fn source(&self) -> ToolsetSource {
        ToolsetSource {
            name: self.name.clone(),
            description: self.description.clone(),
            version: self.version.clone(),
            accepts: self.accepts.clone(),
            needs_migration: self.on_migrate.is_some() || self.migration_key.is_some(),
        }
    }
}

/// A tool server that is part of another application; see [`ToolServer::mount`].
pub struct Mounted {
    engine: Arc<Engine>,
    source: ToolsetSource,
}

impl Mounted {
    /// Returns the endpoints, to be nested in the application at the path of the public URL.
    pub fn router(&self) -> Router {
        crate::http::router(Arc::clone(&self.engine))
    }

    /// Replaces the tools while the server runs. Sessions that begin from now on see the new ones.
    ///
    /// Sessions that hold an earlier version keep it: their invocations are accepted, for the last 256 versions of
    /// this process and those of [`ToolServer::accepts`]. A call of a tool that no longer exists, or whose arguments no
    /// longer match its schema, ends with an error result that says so. Running calls are not affected.
    ///
    /// If the tools are not valid, nothing changes.
    pub fn replace_tools(&self, tools: Vec<Tool>) -> Result<(), ServeError> {
        self.engine.replace_offer(self.source.offer(&self.engine.public_url, tools)?);
        Ok(())
    }

    /// Returns the versions of the toolset whose invocations are accepted, the oldest first. The last one is the present
    /// one. A server that replaces its tools stores them, and passes them to [`ToolServer::accepts`] when it starts again.
    pub fn versions(&self) -> Vec<String> {
        self.engine.offer().versions.clone()
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

fn is_token(token: &str) -> bool {
    !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Replaces characters of a server's name that are unsafe in a directory name.
fn directory_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_') { c } else { '-' };
    name.chars().map(plain).collect()
}
