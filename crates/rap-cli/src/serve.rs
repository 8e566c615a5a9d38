//! `rap serve`: starts a runtime from a configuration.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;
use rap_agent::{Bounds, Budgets};
use rap_io::client::{Client, ClientLimits};
use rap_io::serve::Signals;
use rap_protocol::UrlPolicy;
use rap_runtime::model::Model;
use rap_runtime::{Agent, AgentModel, Limits, Runtime, Settings, ToolServer};
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
    let settings = settings(config, bound)?;
    let (url, database, servers) =
        (settings.public_url.clone(), settings.database.clone(), settings.tool_servers.len());
    let runtime = Runtime::start(settings)?;
    tracing::info!(%url, database = %database.display(), tool_servers = servers, "listening on {bound}");
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
    let Store::Sqlite(database) = config.store;
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
        url_policy: UrlPolicy::Local,
        limits: limits(&config.limits),
    })
}

fn own_agent(agent: config::Agent, limits: &config::Limits) -> anyhow::Result<Agent> {
    let config::Agent { name, system, tools, event_tools, approve, model: own_model, limits: own_limits } =
        agent;
    let own_model = own_model.map(|own| {
        let (images, window) = (own.images, own.window);
        anyhow::Ok(AgentModel { model: model(own, limits)?, images, window })
    });
    Ok(Agent {
        name,
        system,
        tools,
        event_tools,
        approve,
        model: own_model.transpose()?,
        limits: own_limits.as_ref().map(thread_limits),
    })
}

fn model(model: config::Model, limits: &config::Limits) -> anyhow::Result<Arc<dyn Model>> {
    Ok((model.provider.build)(model.options, &|| client(limits))?)
}

fn client(limits: &config::Limits) -> Client {
    let limits = ClientLimits {
        total: limits.model_timeout,
        stream_head: limits.model_timeout,
        stream_idle: limits.model_idle_timeout,
        ..ClientLimits::default()
    };
    Client::new(UrlPolicy::Local, limits)
}

fn thread_limits(given: &config::Limits) -> rap_agent::Limits {
    rap_agent::Limits {
        subscriptions: given.subscriptions_per_thread as usize,
        open_calls: given.open_calls_per_thread as usize,
        held: given.held_per_thread,
        held_bytes: given.held_bytes_per_thread as u64,
        questions: given.questions_per_thread as usize,
        children: given.children_per_thread as usize,
        event_children: given.event_children_per_subscription as usize,
        events_per_child: given.events_per_child,
        depth: given.depth as usize,
        views: given.views_per_thread as usize,
        turns_per_wake: given.turns_per_wake,
        hold_max: given.hold_max,
        call_timeout: given.call_timeout,
        approval_within: given.approval_within,
        failed_retry_for: given.failed_retry_for,
        budgets: Budgets {
            per_hour: Bounds {
                turns: given.turns_per_hour.map(u64::from),
                tokens: given.tokens_per_hour.map(u64::from),
                wakes: given.wakes_per_hour.map(u64::from),
            },
            in_total: Bounds {
                turns: given.turns_in_total.map(u64::from),
                tokens: given.tokens_in_total.map(u64::from),
                wakes: given.wakes_in_total.map(u64::from),
            },
        },
        ..rap_agent::Limits::default()
    }
}

fn limits(given: &config::Limits) -> Limits {
    Limits {
        thread: thread_limits(given),
        invoke_retry_for: given.invoke_retry_for,
        lost_after: given.lost_after,
        invoke_ack_timeout: given.invoke_ack_timeout,
        invoke_concurrency: given.invoke_concurrency as usize,
        model_attempts: given.model_attempts,
        model_concurrency: given.model_concurrency as usize,
        model_timeout: given.model_timeout,
        discovery_timeout: given.discovery_timeout,
        body: given.body,
        view_bytes: given.view_bytes,
        callback_token_lifetime: given.callback_token_lifetime,
        event_marks_for: given.event_marks_for,
        ..Limits::default()
    }
}
