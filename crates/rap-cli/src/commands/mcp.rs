//! `rap mcp serve`: offers RAP tools, or agents, to MCP clients.

mod agents;
mod bridge;
mod call;
mod callbacks;
mod convert;
mod handler;
mod http;
mod session;
mod stdio;
mod tasks;
mod tool_server;
mod waiting;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use rap_io::serve::Signals;
use rap_protocol::{Secret, UrlPolicy, UrlRules};
use rmcp::ServerHandler;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use url::Url;

use super::{Connection, Token, WrongUsage};
use crate::config::parse_duration;
use agents::AgentsHandler;
use bridge::{Bridge, Waiting};
use callbacks::Callbacks;
use handler::ToolsHandler;
use tool_server::{Clients, ToolServer};
use waiting::Parked;

/// Minimum length of the token of an HTTP server that does not listen on loopback.
const TOKEN_CHARACTERS: usize = 16;

/// Subcommands of `rap mcp`.
#[derive(Subcommand)]
pub enum Command {
    /// Offer the tools of tool servers, or the agents of a runtime, to MCP clients.
    #[command(after_help = "\
Without --listen it talks to one client over stdin and stdout, and exits when stdin is closed. With --listen it serves \
clients over streamable HTTP at /mcp.

A call that takes longer than --task-after becomes a task if the client supports tasks. Otherwise the client waits, \
with progress notifications; after --wait-at-most it gets an error that says how to read the result later.

Examples: rap mcp serve --toolset http://127.0.0.1:7501
          rap mcp serve --runtime http://127.0.0.1:7420 --listen 127.0.0.1:7600")]
    Serve(Box<Serve>),
}

/// Flags of `rap mcp serve`.
#[derive(Args)]
#[command(group(clap::ArgGroup::new("offered").required(true).args(["toolsets", "runtime"])))]
pub struct Serve {
    /// Base URL of a tool server whose tools are offered; may be repeated.
    #[arg(long = "toolset", value_name = "URL", num_args = 1..)]
    toolsets: Vec<Url>,
    /// URL of a runtime whose agents are offered.
    #[arg(long, value_name = "URL")]
    runtime: Option<String>,
    /// Token for the runtime, if it requires one; prefer RAP_TOKEN.
    #[arg(long, env = "RAP_TOKEN", hide_env_values = true)]
    token: Option<Token>,
    /// Bearer token for the tool servers, or one for each of them in their order; prefer RAP_TOOL_BEARER.
    #[arg(long, env = "RAP_TOOL_BEARER", hide_env_values = true, value_name = "TOKEN")]
    bearer: Vec<Token>,
    /// Address to serve HTTP on, instead of stdin and stdout.
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// Token that clients of the HTTP server have to show; prefer RAP_MCP_TOKEN. Required unless --listen is loopback.
    #[arg(long, env = "RAP_MCP_TOKEN", hide_env_values = true, value_name = "TOKEN", requires = "listen")]
    require_token: Option<Token>,
    /// Origin of web pages that may use the HTTP server, such as `https://app.example:443`; may be repeated.
    #[arg(long = "allow-origin", value_name = "ORIGIN", requires = "listen")]
    allow_origins: Vec<String>,
    /// Name under which clients reach the HTTP server, if it is not its address; may be repeated.
    #[arg(long = "allow-host", value_name = "HOST", requires = "listen")]
    allow_hosts: Vec<String>,
    /// Address on which the tool servers' results are received.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    callback_listen: SocketAddr,
    /// URL under which the tool servers reach that address.
    #[arg(long, value_name = "URL")]
    callback_url: Option<Url>,
    /// Time after which a call becomes a task, if the client supports tasks.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    task_after: Duration,
    /// Time after which a client that waits for any other call gets an error. The call itself continues.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = time)]
    wait_at_most: Duration,
}

fn time(text: &str) -> Result<Duration, &'static str> {
    parse_duration(text).filter(|time| !time.is_zero()).ok_or("expected a time such as 60s or 10m")
}

/// Runs the command.
pub async fn run(command: Command) -> anyhow::Result<()> {
    let Command::Serve(mut flags) = command;
    match flags.runtime.take() {
        Some(url) => serve_agents(url, *flags).await,
        None => serve_tools(*flags).await,
    }
}

async fn serve_agents(url: String, flags: Serve) -> anyhow::Result<()> {
    let client = Connection { url, token: flags.token.clone() }.client()?;
    // A wrong URL or token is reported at once.
    client.tools().await?;
    let handler = AgentsHandler::new(client);
    let own = handler.clone();
    serve(flags, move || handler.clone(), || own, || std::future::ready(())).await
}

async fn serve_tools(mut flags: Serve) -> anyhow::Result<()> {
    let servers = tool_servers(&mut flags)?;
    let (address, url) = (flags.callback_listen, flags.callback_url.as_ref());
    let callbacks =
        Callbacks::listen(address, url).await.with_context(|| format!("cannot listen on {address}"))?;
    let waiting = Waiting { task_after: flags.task_after, at_most: flags.wait_at_most };
    let bridge = Arc::new(Bridge::new(servers, callbacks, waiting));
    let errors = bridge.refresh().await;
    if bridge.offered().tools().next().is_none() {
        bail!("there are no tools to offer: {}", errors.join("; "));
    }
    let parked = Parked::default();
    let per_session = {
        let (bridge, parked) = (Arc::clone(&bridge), parked.clone());
        move || ToolsHandler::new(&bridge, &parked)
    };
    let of_connection = || ToolsHandler::of_connection(&bridge, &parked);
    let close = || {
        let bridge = Arc::clone(&bridge);
        async move { bridge.close().await }
    };
    serve(flags, per_session, of_connection, close).await
}

fn tool_servers(flags: &mut Serve) -> anyhow::Result<Vec<ToolServer>> {
    let tokens: Vec<Secret> = std::mem::take(&mut flags.bearer)
        .into_iter()
        .map(|Token(secret)| secret)
        .filter(|secret| !secret.expose().is_empty())
        .collect();
    if tokens.len() > 1 && tokens.len() != flags.toolsets.len() {
        let (tokens, servers) = (tokens.len(), flags.toolsets.len());
        let text =
            format!("{tokens} bearer tokens for {servers} tool servers; give one for all, or one for each");
        return Err(WrongUsage(text).into());
    }
    let is_local = flags.callback_listen.ip().is_loopback();
    let policy = if is_local { UrlPolicy::Loopback } else { UrlPolicy::Private };
    let mut rules = UrlRules::from(policy);
    for url in &flags.toolsets {
        if !matches!(url.scheme(), "http" | "https") {
            return Err(WrongUsage(format!(
                "the URL of a tool server has to begin with http:// or https://: {url}"
            ))
            .into());
        }
        rules = rules.configured(url);
    }
    let clients = Clients::new(rules);
    let server = |(index, url): (usize, Url)| {
        let token = if tokens.len() == 1 { tokens.first() } else { tokens.get(index) };
        ToolServer::new(url, token, clients.clone())
    };
    std::mem::take(&mut flags.toolsets).into_iter().enumerate().map(server).collect()
}

/// Serves over HTTP or stdio until the client is gone or a signal arrives. `close` ends the calls; it runs before this
/// returns, and when a client on stdio is gone.
async fn serve<H: ServerHandler, C: Future<Output = ()> + Send + 'static>(
    flags: Serve,
    per_session: impl Fn() -> H + Send + Sync + 'static,
    of_connection: impl FnOnce() -> H,
    close: impl Fn() -> C,
) -> anyhow::Result<()> {
    let stop = CancellationToken::new();
    let mut signals = Signals::listen();
    let stopping = stop.clone();
    tokio::spawn(async move {
        signals.next().await;
        stopping.cancel();
    });
    let served = match flags.listen {
        None => stdio::serve(of_connection(), stop, close()).await,
        Some(address) => {
            let token =
                flags.require_token.map(|Token(secret)| secret).filter(|token| !token.expose().is_empty());
            let is_strong = token.as_ref().is_some_and(|token| token.expose().len() >= TOKEN_CHARACTERS);
            if !is_strong && !address.ip().is_loopback() {
                let text = format!(
                    "{address} is not loopback: set RAP_MCP_TOKEN (or --require-token) to at least {TOKEN_CHARACTERS} \
                     characters"
                );
                return Err(WrongUsage(text).into());
            }
            let admission = http::Admission { token, origins: flags.allow_origins, hosts: flags.allow_hosts };
            let listener =
                TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))?;
            eprintln!("MCP at http://{}{}", listener.local_addr()?, http::PATH);
            http::serve(listener, admission, per_session, stop).await
        }
    };
    close().await;
    served
}

/// Returns random bytes.
fn random<const N: usize>() -> Result<[u8; N], getrandom::Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

/// Returns random bytes as hexadecimal digits.
fn random_hex<const N: usize>() -> Result<String, getrandom::Error> {
    Ok(random::<N>()?.iter().map(|byte| format!("{byte:02x}")).collect())
}
