//! `rap serve`: starts a runtime from a configuration.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;
use rap_io::client::{Client, ClientLimits};
use rap_io::serve::Signals;
use rap_protocol::UrlRules;
use rap_runtime::model::Model;
use rap_runtime::{Agent, AgentModel, Database, Limits, Runtime, Settings, ToolServer};
use tokio::net::TcpListener;

use crate::config::{self, Config, Store};

/// Condition under which a runtime stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// SIGTERM or SIGINT.
    UntilSignal,
    /// SIGTERM, SIGINT or the end of stdin.
    WhileStdinIsOpen,
}

/// Runs the runtime for its lifetime. A second signal ends the process at once.
pub async fn serve(config: Config, lifetime: Lifetime) -> anyhow::Result<()> {
    let mut signals = Signals::listen();
    let listen = config.server.listen;
    let listener = TcpListener::bind(listen).await.with_context(|| format!("cannot listen on {listen}"))?;
    let bound = listener.local_addr()?;
    for (setting, url) in config.plain_http() {
        tracing::warn!(setting, url, "this URL leads to another machine in plain text: use https");
    }
    if config.server.has_short_token() {
        tracing::warn!(
            "a token of server.tokens is shorter than 16 characters and can be guessed: use a long random token"
        );
    }
    let settings = settings(config, bound)?;
    let (url, database, servers) =
        (settings.public_url.clone(), settings.database.clone(), settings.tool_servers.len());
    let runtime = Runtime::start(settings)?;
    tracing::info!(%url, %database, tool_servers = servers, "listening on {bound}");
    let stop = async {
        tokio::select! {
            _ = signals.next() => {}
            () = stdin_closed(), if lifetime == Lifetime::WhileStdinIsOpen => {}
        }
        tracing::info!("stopping");
        tokio::spawn(async move {
            signals.next().await;
            tracing::warn!("stopping at once; everything acknowledged is on disk");
            std::process::exit(1);
        });
    };
    runtime.serve(listener, stop).await;
    tracing::info!("stopped");
    Ok(())
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

fn settings(config: Config, bound: SocketAddr) -> anyhow::Result<Settings> {
    let public_url = config.server.url_at(bound);
    let database = match config.store {
        Store::Sqlite(path) => Database::File(path),
        Store::Postgres { url, key } => Database::Postgres { url, key },
    };
    let (images, window) = (config.model.images, config.model.window);
    let agents: Result<_, _> =
        config.agents.into_iter().map(|agent| own_agent(agent, &config.limits)).collect();
    let tool_server = |server: config::ToolServer| ToolServer {
        url: server.url.as_str().to_owned(),
        bearer: server.bearer,
    };
    Ok(Settings {
        public_url,
        database,
        tokens: config.server.tokens,
        agents: agents?,
        model: model(config.model, &config.limits)?,
        images,
        window,
        tool_servers: config.tool_servers.into_iter().map(tool_server).collect(),
        functions: Vec::new(),
        url_policy: config.server.url_policy,
        allow_hosts: config.server.allow_hosts,
        listen: Some(bound),
        limits: config.limits,
    })
}

fn own_agent(agent: config::Agent, common: &Limits) -> anyhow::Result<Agent> {
    let config::Agent { name, system, tools, event_tools, approve, model: own_model, limits } = agent;
    let own_model = own_model.map(|own| {
        let (images, window) = (own.images, own.window);
        anyhow::Ok(AgentModel { model: model(own, common)?, images, window })
    });
    Ok(Agent { name, system, tools, event_tools, approve, model: own_model.transpose()?, limits })
}

fn model(model: config::Model, limits: &Limits) -> anyhow::Result<Arc<dyn Model>> {
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
