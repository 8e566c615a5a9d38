//! `rap serve`: starts a runtime from a configuration.

use std::collections::BTreeMap;
use std::future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use listenfd::ListenFd;
use rap_agent::{LimitValue, Server};
use rap_io::client::{Client, ClientLimits};
use rap_io::secret_box::Key;
use rap_io::serve::Signals;
use rap_protocol::{Secret, UrlRules, redact};
use rap_runtime::model::Model;
use rap_runtime::{Agent, AgentModel, Database, Limits, PostgresDatabase, Runtime, Settings, ToolServer};
use tokio::net::{TcpListener, TcpStream};
use url::Url;

use crate::commands::tool::McpLaunch;
use crate::config::{self, Config, Environment, Store, ToolProgram, ToolSource};
use crate::tool_process::{Launch, START_WITHIN, ToolProcesses};

/// Time within which a tool server has to accept a connection at the start. Nothing waits for it.
const PROBE_WITHIN: Duration = Duration::from_secs(5);

/// Name of the process that holds all MCP servers. No tool server can have it.
const MCP_BRIDGE: &str = "mcp:servers";

/// Condition under which a runtime stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// SIGTERM or SIGINT.
    UntilSignal,
    /// SIGTERM, SIGINT or the end of stdin.
    WhileStdinIsOpen,
    /// SIGTERM, SIGINT, or an idle time of this length.
    UntilIdle(Duration),
}

/// Runs the runtime for its lifetime. A second signal ends the process at once. Tool servers that it starts get the
/// variables of `environment` that are not secrets of this program.
pub async fn serve(config: Config, environment: &Environment, lifetime: Lifetime) -> anyhow::Result<()> {
    let mut signals = Signals::listen();
    let listen = config.server.listen;
    let listener = listener(listen)?;
    let bound = listener.local_addr()?;
    for (setting, url) in config.plain_http() {
        tracing::warn!(setting, url, "this URL leads to another machine in plain text: use https");
    }
    if config.server.has_short_token() {
        tracing::warn!(
            "a token of server.tokens is shorter than 16 characters and can be guessed: use a long random token"
        );
    }
    log_agents(&config);
    let starts = |server: &config::ToolServer| matches!(server.source, ToolSource::Start { .. });
    let starts_any = config.tool_servers.iter().any(starts) || !config.mcp_servers.is_empty();
    if matches!(lifetime, Lifetime::UntilIdle(_)) && starts_any {
        bail!(
            "--until-idle cannot be used with tool servers that `rap serve` starts: their calls would end with it"
        );
    }
    let mut processes = ToolProcesses::default();
    let tool_servers = add_tool_servers(&config, bound, environment, &mut processes)?;
    let urls: Vec<_> =
        config.tool_servers.iter().filter_map(config::ToolServer::url).map(config::BaseUrl::to_url).collect();
    let settings = settings(config, bound, tool_servers)?;
    let collector = settings.telemetry.as_ref().map(|telemetry| redact::url(&telemetry.url));
    let (url, database, servers) =
        (settings.public_url.clone(), settings.database.clone(), settings.tool_servers.len());
    // The start waits for the database. A signal ends the process all the same.
    let starting = tokio::task::spawn_blocking(|| Runtime::start(settings));
    let runtime = tokio::select! {
        biased;
        _ = signals.next() => {
            tracing::info!("stopped before the database was ready");
            return Ok(());
        }
        started = starting => started.context("the start failed")??,
    };
    tracing::info!(%url, %database, tool_servers = servers, "listening on {bound}");
    tracing::info!("web interface: {url}/");
    if let Some(collector) = collector {
        tracing::info!("traces are sent to {collector}");
    }
    let idle = match lifetime {
        Lifetime::UntilIdle(period) => Some(runtime.idle_for(period)),
        Lifetime::UntilSignal | Lifetime::WhileStdinIsOpen => None,
    };
    let idle = async {
        match idle {
            Some(idle) => idle.await,
            None => future::pending().await,
        }
    };
    processes.start();
    probe(urls);
    let stop = async {
        tokio::select! {
            _ = signals.next() => tracing::info!("stopping"),
            () = stdin_closed(), if lifetime == Lifetime::WhileStdinIsOpen => tracing::info!("stopping"),
            () = idle => tracing::info!("idle; stopping"),
        }
        tokio::spawn(async move {
            signals.next().await;
            tracing::warn!("stopping at once; everything acknowledged is on disk");
            std::process::exit(1);
        });
    };
    runtime.serve(listener, stop).await;
    processes.stop().await;
    tracing::info!("stopped");
    Ok(())
}

/// Returns the listening socket that the service manager passed (systemd's socket activation), or binds one.
fn listener(listen: SocketAddr) -> anyhow::Result<TcpListener> {
    let inherited = ListenFd::from_env().take_tcp_listener(0).context("cannot use the inherited socket")?;
    let Some(inherited) = inherited else {
        return rap_io::serve::listen(listen).with_context(|| format!("cannot listen on {listen}"));
    };
    // The checks of the configuration were made for `server.listen`.
    let bound = inherited.local_addr()?;
    if bound != listen {
        bail!(
            "the inherited socket listens on {bound}, but server.listen is {listen}: set both to the same address"
        );
    }
    inherited.set_nonblocking(true)?;
    Ok(TcpListener::from_std(inherited)?)
}

/// Completes when stdin is closed. A separate thread reads stdin, so that a blocked read does not keep the runtime from
/// stopping.
async fn stdin_closed() {
    let (sender, closed) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        // An error counts as the end. The receiver is gone if the runtime is already stopping.
        std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()).ok();
        sender.send(()).ok();
    });
    closed.await.ok();
}

/// Logs which tool servers accept no connections. That is not an error, because a server may be started later.
fn probe(tool_servers: Vec<Url>) {
    for url in tool_servers {
        let Some((host, port)) = url.host_str().zip(url.port_or_known_default()) else { continue };
        let host = host.trim_matches(['[', ']']).to_owned();
        tokio::spawn(async move {
            let why = match tokio::time::timeout(PROBE_WITHIN, TcpStream::connect((host, port))).await {
                Ok(Ok(_)) => return,
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no connection within {PROBE_WITHIN:?}"),
            };
            tracing::warn!(server = redact::url(&url), why, "the tool server does not answer");
        });
    }
}

/// Variable with the key with which a tool server moves the state of sessions; see `rap_tool::ToolServer::migrate_calls`.
const MIGRATION_KEY: &str = "RAP_TOOL_MIGRATION_KEY";

/// Returns the settings of all tool servers. Those that this program starts are added to `processes`.
fn add_tool_servers(
    config: &Config,
    bound: SocketAddr,
    environment: &Environment,
    processes: &mut ToolProcesses,
) -> anyhow::Result<Vec<ToolServer>> {
    let is_secret =
        |name: &String| name.starts_with("RAP_") || name == "PORT" || config.secret_variables.contains(name);
    let inherited: Vec<(String, String)> = environment
        .iter()
        .filter(|(name, _)| !is_secret(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    let consent = |name: &str| consent_url(config, bound, name);
    let start = |server: &config::ToolServer| match &server.source {
        ToolSource::Url(url) => ToolServer {
            credentials: server.credentials.clone(),
            callback_auth: server.callback_auth,
            ..ToolServer::new(url.as_str())
        },
        ToolSource::Start { name, program, bearer, start_timeout, migration_key } => {
            let mut environment = inherited.clone();
            let key = migration_key.iter().map(|key| (MIGRATION_KEY.to_owned(), key.expose().to_owned()));
            environment.extend(key);
            environment.extend(consent(&format!("/command:{name}")));
            let command = match &**program {
                ToolProgram::Command(command) => command.clone(),
                ToolProgram::Shipped(run, options) => {
                    environment.extend(crate::commands::tool::secret_variables(options));
                    crate::commands::tool::arguments(run, options, config, bound)
                }
            };
            let (bearer, data) = (bearer.clone(), data_directory(&config.store, bound));
            let start_within = *start_timeout;
            let launch = Launch { name: name.clone(), command, environment, bearer, data, start_within };
            let parse = |key: &Secret| Key::parse(key.expose()).expect("bug: the configuration was checked");
            ToolServer { migration_key: migration_key.as_ref().map(parse), ..processes.add(launch) }
        }
    };
    let mut servers: Vec<ToolServer> = config.tool_servers.iter().map(start).collect();
    if !config.mcp_servers.is_empty() {
        let McpLaunch { command, variables } = crate::commands::tool::mcp_launch(&config.mcp_servers)?;
        let environment = inherited.into_iter().chain(variables).chain(consent("")).collect();
        let (name, data) = (MCP_BRIDGE.to_owned(), data_directory(&config.store, bound));
        let start_within = START_WITHIN;
        let bridge = processes.add(Launch { name, command, environment, bearer: None, data, start_within });
        servers.extend(config.mcp_servers.iter().map(|server| bridge.below(server.id(), &server.name)));
    }
    Ok(servers)
}

/// Returns the variable with the URL to which browsers are sent after a sign-in at a tool server that this program starts.
/// With Postgres there is none: another node, which does not know the sign-in, may get the request.
fn consent_url(config: &Config, bound: SocketAddr, name: &str) -> Option<(String, String)> {
    if matches!(config.store, Store::Postgres { .. }) {
        return None;
    }
    let public_url = config.server.url_at(bound);
    let url = format!("{}/consent{name}", public_url.trim_end_matches('/'));
    Some((crate::commands::tool::CONSENT_VARIABLE.to_owned(), url))
}

/// Returns the directory for the data of tool servers that this program starts: beside the database. Several nodes of a
/// Postgres database may run in one directory, and each has its own tool servers.
fn data_directory(store: &Store, bound: SocketAddr) -> PathBuf {
    const NAME: &str = "rap-data";
    match store {
        Store::Sqlite(path) => path.parent().unwrap_or(Path::new("")).join(NAME),
        Store::Postgres { .. } => Path::new(NAME).join(bound.port().to_string()),
    }
}

/// Makes the settings of a runtime that listens on this address.
pub fn settings(
    mut config: Config,
    bound: SocketAddr,
    tool_servers: Vec<ToolServer>,
) -> anyhow::Result<Settings> {
    let public_url = config.server.url_at(bound);
    let timeouts = call_timeouts(&config);
    let database = match config.store {
        Store::Sqlite(path) => Database::File(path),
        Store::Postgres { url, key, listen_url, lease } => {
            Database::Postgres(PostgresDatabase { url, key, listen_url, lease })
        }
    };
    let (images, window) = (config.model.images, config.model.window);
    let own = config.agents.iter_mut().filter_map(|agent| agent.limits.as_mut());
    for limits in own.chain([&mut config.limits.thread]) {
        limits.call_timeouts.clone_from(&timeouts);
    }
    let agents: Result<_, _> =
        config.agents.into_iter().map(|agent| own_agent(agent, &config.limits)).collect();
    Ok(Settings {
        public_url,
        database,
        tokens: config.server.tokens,
        agents: agents?,
        model: model(config.model, &config.limits)?,
        images,
        window,
        tool_servers,
        notify: config.notify,
        telemetry: config.telemetry,
        retention: config.retention,
        functions: Vec::new(),
        url_policy: config.server.url_policy,
        allow_hosts: config.server.allow_hosts,
        listen: Some(bound),
        tls: config.server.tls,
        proxies: config.server.proxies,
        web_assets: Some(crate::web::ASSETS),
        limits: config.limits,
    })
}

/// Returns the timeouts of calls to tool servers that have one of their own.
fn call_timeouts(config: &Config) -> BTreeMap<Server, Option<Duration>> {
    let timeout = |(id, timeout): (String, Option<LimitValue>)| {
        let timeout = match timeout? {
            LimitValue::Duration(timeout) => Some(timeout),
            LimitValue::Number(_) | LimitValue::None => None,
        };
        Some((Server(id), timeout))
    };
    let servers = config.tool_servers.iter().map(|server| (server.id(), server.call_timeout));
    let mcp_servers = config.mcp_servers.iter().map(|server| (server.id(), server.call_timeout));
    servers.chain(mcp_servers).filter_map(timeout).collect()
}

fn own_agent(agent: config::Agent, common: &Limits) -> anyhow::Result<Agent> {
    let config::Agent { name, system, tools, event_tools, approve, limits, .. } = agent;
    let own_model = |own: config::Model| {
        let (images, window) = (own.images, own.window);
        anyhow::Ok(AgentModel { model: model(own, common)?, images, window })
    };
    let model = agent.model.map(own_model).transpose()?;
    let fallbacks = agent.fallbacks.into_iter().map(own_model).collect::<Result<_, _>>()?;
    let fallback_after = agent.fallback_after;
    Ok(Agent { name, system, tools, event_tools, approve, model, fallbacks, fallback_after, limits })
}

/// Logs the model and the provider of each agent.
fn log_agents(config: &Config) {
    for agent in &config.agents {
        let models = agent.model.as_ref().unwrap_or(&config.model);
        let models: Vec<_> = [models].into_iter().chain(&agent.fallbacks).map(model_name).collect();
        tracing::info!(agent = agent.name, model = models.join(", then "), "agent");
    }
}

/// Returns the name of a model and of its provider.
pub(crate) fn model_name(model: &config::Model) -> String {
    let config::Model { provider, options, .. } = model;
    if options.name.is_empty() {
        provider.name.into()
    } else {
        format!("{} ({})", options.name, provider.name)
    }
}

/// Creates a model.
pub(crate) fn model(model: config::Model, limits: &Limits) -> anyhow::Result<Arc<dyn Model>> {
    Ok((model.provider.build)(model.options, &|| client(limits))?)
}

fn client(limits: &Limits) -> Client {
    let limits = ClientLimits {
        total: limits.model_timeout,
        stream_head: limits.model_timeout,
        stream_idle: limits.model_idle_timeout,
        ..ClientLimits::default()
    };
    Client::new(UrlRules::unrestricted(), limits)
}
