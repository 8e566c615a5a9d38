//! `rap tool run`: starts a tool server that ships with rap. `rap serve` uses the same command for `run = "NAME"`.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use rap_protocol::{HostPort, Secret, UrlPolicy, UrlRules};
use rap_tools::mcp;
use url::Url;

use crate::config::{Config, Environment, McpServer, McpSource, ToolOptions};

/// Prefix of the environment variables with the secrets of the senders of webhooks.
const SECRET_VARIABLE: &str = "RAP_WEBHOOK_SECRET_";

/// Environment variable with the MCP servers as JSON. They contain secrets, so they are not on the command line.
const MCP_SERVERS_VARIABLE: &str = "RAP_MCP_SERVERS";
/// Maximum size of that variable, in bytes. Linux allows 128 KiB.
const MCP_SERVERS_BYTES: usize = 120 * 1024;
/// Environment variable of the allocator that keeps it from asking for huge pages. Each MCP server has threads with a little
/// memory of their own, and would take several times as much in huge pages.
const NO_HUGE_PAGES: (&str, &str) = ("MIMALLOC_ALLOW_THP", "0");
/// Environment variable of a tool server with the URL to which browsers are sent after a sign-in.
pub(crate) const CONSENT_VARIABLE: &str = "RAP_TOOL_CONSENT_URL";

/// Commands about the tool servers that ship with rap.
#[derive(Subcommand)]
pub enum Command {
    /// Start a tool server: shell, files, http, timer or webhook.
    #[command(
        after_help = "PORT overrides the port of --listen. RAP_TOOL_DATA sets the data directory, and RAP_TOOL_BEARER \
                      the token that callers must send."
    )]
    Run(Box<Run>),
    /// Connect to MCP servers and offer their tools. `rap serve` starts this for the `[[mcp_server]]` tables.
    #[command(hide = true)]
    Mcp,
}

/// Flags of `rap tool run`.
#[derive(Args)]
pub struct Run {
    /// Name of the tool server.
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(rap_tools::NAMES))]
    name: String,
    /// Address to listen on.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:7501")]
    listen: String,
    /// Directory that the tools may use; may be repeated.
    #[arg(long = "root", value_name = "DIRECTORY")]
    roots: Vec<PathBuf>,
    /// Command that shell runs without asking; may be repeated.
    #[arg(long, value_name = "PATTERN")]
    allow: Vec<String>,
    /// Addresses that fetch may use: public, private or loopback.
    #[arg(long, value_name = "POLICY", default_value = "public", value_parser = policy)]
    url_policy: UrlPolicy,
    /// Host and port that fetch may always use; may be repeated.
    #[arg(long = "allow-host", value_name = "HOST:PORT", value_parser = host_port)]
    allow_hosts: Vec<HostPort>,
    /// Address of a runtime, which fetch must not use.
    #[arg(long, hide = true)]
    runtime: Option<SocketAddr>,
    /// URL of a runtime, which fetch must not use.
    #[arg(long, hide = true)]
    runtime_url: Option<Url>,
    /// Address on which webhooks are received.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    hooks: SocketAddr,
    /// URL under which the senders of webhooks reach that address.
    #[arg(long, value_name = "URL")]
    hooks_url: Option<Url>,
}

fn policy(name: &str) -> Result<UrlPolicy, String> {
    UrlPolicy::from_name(name).ok_or_else(|| "expected public, private or loopback".into())
}

fn host_port(text: &str) -> Result<HostPort, String> {
    HostPort::parse(text).ok_or_else(|| "expected a host and its port such as tools.internal:8443".into())
}

/// Returns the path of this program.
fn own_program() -> String {
    if cfg!(target_os = "linux") {
        return "/proc/self/exe".to_owned();
    }
    std::env::current_exe().map_or_else(|_| "rap".to_owned(), |path| path.to_string_lossy().into_owned())
}

/// Command line of the bridge to MCP servers, and its environment variables.
pub(crate) struct McpLaunch {
    pub(crate) command: Vec<String>,
    pub(crate) variables: [(String, String); 2],
}

/// Returns how to start the bridge to MCP servers.
pub(crate) fn mcp_launch(servers: &[McpServer]) -> anyhow::Result<McpLaunch> {
    let servers: Vec<mcp::McpServer> = servers.iter().map(to_mcp).collect();
    let text = serde_json::to_string(&servers)?;
    if text.len() > MCP_SERVERS_BYTES {
        bail!("the [[mcp_server]] tables have more than {MCP_SERVERS_BYTES} bytes together; shorten them");
    }
    let command = vec![own_program(), "tool".to_owned(), "mcp".to_owned()];
    let no_huge_pages = (NO_HUGE_PAGES.0.to_owned(), NO_HUGE_PAGES.1.to_owned());
    Ok(McpLaunch { command, variables: [(MCP_SERVERS_VARIABLE.to_owned(), text), no_huge_pages] })
}

fn to_mcp(server: &McpServer) -> mcp::McpServer {
    let text = |secret: &Secret| secret.expose().to_owned();
    mcp::McpServer {
        name: server.name.clone(),
        source: match &server.source {
            McpSource::Command(command) => mcp::McpSource::Command(command.clone()),
            McpSource::Url(url) => mcp::McpSource::Url(url.to_string()),
        },
        prefix: server.prefix.clone(),
        trust: server.trust,
        environment: server.environment.iter().map(|(name, value)| (name.clone(), text(value))).collect(),
        bearer: server.bearer.as_ref().map(text),
        oauth: mcp::OauthRegistration {
            client_id: server.oauth.client_id.clone(),
            client_secret: server.oauth.client_secret.as_ref().map(text),
            scope: server.oauth.scope.clone(),
        },
    }
}

/// Runs the bridge to MCP servers.
async fn run_mcp(environment: &Environment) -> anyhow::Result<()> {
    rap_tool::embedded::log_to_stderr();
    let servers = environment.get(MCP_SERVERS_VARIABLE).context("only `rap serve` starts this")?;
    let data = environment.get("RAP_TOOL_DATA").map_or_else(|| PathBuf::from("rap-data/mcp"), PathBuf::from);
    let is_own = |name: &String| name.starts_with("RAP_") || name == "PORT" || name == NO_HUGE_PAGES.0;
    let inherited = environment.iter().filter(|(name, _)| !is_own(name));
    let options = mcp::Options {
        servers: serde_json::from_str(servers).context("the MCP servers cannot be read")?,
        data: data.join("servers"),
        environment: inherited.map(|(name, value)| (name.clone(), value.clone())).collect(),
        consent_url: environment.get(CONSENT_VARIABLE).map(ToOwned::to_owned),
        listen: "127.0.0.1:7502".to_owned(),
    };
    Ok(mcp::bind(options).await?.run().await?)
}

/// Returns the command line that starts a tool server for a runtime.
pub(crate) fn arguments(run: &str, options: &ToolOptions, config: &Config, bound: SocketAddr) -> Vec<String> {
    let mut arguments: Vec<String> =
        [own_program().as_str(), "tool", "run", run].map(ToOwned::to_owned).into();
    let mut add = |flag: &str, value: String| arguments.push(format!("{flag}={value}"));
    for root in &options.roots {
        add("--root", root.to_string_lossy().into_owned());
    }
    for pattern in &options.allow {
        add("--allow", pattern.clone());
    }
    if run == "http" {
        add("--url-policy", config.server.url_policy.name().to_owned());
        for host in &config.server.allow_hosts {
            add("--allow-host", host.to_string());
        }
        add("--runtime", bound.to_string());
        add("--runtime-url", config.server.url_at(bound));
    }
    if run == "webhook" {
        options.listen.iter().for_each(|listen| add("--hooks", listen.to_string()));
        options.public_url.iter().for_each(|url| add("--hooks-url", url.to_string()));
    }
    arguments
}

/// Returns the environment variables with the secrets of a tool server.
pub(crate) fn secret_variables(options: &ToolOptions) -> impl Iterator<Item = (String, String)> {
    let variable = |(source, secret): &(String, Secret)| {
        (format!("{SECRET_VARIABLE}{}", source.to_ascii_uppercase()), secret.expose().to_owned())
    };
    options.secrets.iter().map(variable)
}

/// Runs a command.
pub async fn run(command: Command, environment: &Environment) -> anyhow::Result<()> {
    let run = match command {
        Command::Run(run) => run,
        Command::Mcp => return run_mcp(environment).await,
    };
    let rules = UrlRules::from(run.url_policy).allow_hosts(run.allow_hosts);
    let rules = run.runtime.into_iter().fold(rules, UrlRules::listening_on);
    let rules = run.runtime_url.iter().fold(rules, UrlRules::public_url);
    let secrets = environment.iter().filter_map(|(name, value)| {
        let source = name.strip_prefix(SECRET_VARIABLE)?.to_ascii_lowercase();
        Some((source, Secret::new(value)))
    });
    let data = environment.get("RAP_TOOL_DATA").filter(|data| !data.is_empty());
    let options = rap_tools::Options {
        data: data.map_or_else(|| PathBuf::from("rap-data").join(&run.name), PathBuf::from),
        roots: run.roots,
        allow: run.allow,
        rules,
        path: environment.get("PATH").cloned(),
        secrets: secrets.collect(),
        hooks: run.hooks,
        hooks_url: run.hooks_url,
    };
    let running = rap_tools::server(&run.name, options).await;
    let server = running.with_context(|| format!("the tool server {} cannot be started", run.name))?;
    server.serve(run.listen).await.map_err(|error| anyhow::anyhow!("{error:?}"))
}
