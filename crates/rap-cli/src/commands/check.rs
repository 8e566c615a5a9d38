//! `rap check`: whether an implementation does what the specification asks, requirement by requirement.

mod orders;
mod runtime;

use std::io::{IsTerminal, Write};
use std::net::SocketAddr;

use anyhow::bail;
use clap::{Args, Subcommand, ValueEnum};
use rap_conformance::tool::{self, Options, Patience};
use rap_conformance::{Progress, Report, Strictness};
use url::Url;

use super::{Token, WrongUsage, print, print_json};
use crate::table::terminal_width;
use orders::Orders;

/// What to check.
#[derive(Subcommand)]
pub enum Command {
    /// Check a tool server: this plays the runtime.
    #[command(after_help = "\
The operation is called some fifty times and should return within seconds; without --operation one that needs \
no arguments is picked, never one that is annotated as destructive. The subscription should send several events \
within seconds, the last of them final; without --subscription nothing is seen of subscriptions.

Exit code: 0 when all is well, 1 when a MUST is not met (with --strict: a SHOULD either), 2 for wrong usage.

Example: rap check tool http://127.0.0.1:7500 --operation echo --arguments '{\"text\": \"hi\"}' \
--subscription tick --arguments '{\"count\": 3, \"every_ms\": 50}'")]
    Tool(Tool),
    /// Check a runtime: this plays the tool servers, the model and the user.
    #[command(after_help = "\
Placeholders in the command, in --env and in the template: {tool_url}, {tool_url_2} and {tool_url_3} (the base URLs of \
three tool servers), {tool_token} (a bearer token for them), {model_url} (what /chat/completions is appended to), \
{model_key}, {listen}, {port} and {url} (where the runtime is to listen), {data} (an empty directory, where the command \
is run), {config} (the template, filled). Nothing is run by a shell.

Without a command this prints what to configure and waits for the runtime; then nothing is killed, and what shows only \
after a crash is not observable.

Exit code: 0 when all is well, 1 when a MUST is not met (with --strict: a SHOULD either), 2 for wrong usage.

Example: rap check runtime --strict -- rap serve --config {config}")]
    Runtime(runtime::Runtime),
}

/// How a tool server is checked.
#[derive(Args)]
pub struct Tool {
    /// The base URL of the server.
    #[arg(value_parser = base_url)]
    url: Url,
    /// The token that the server wants; better given as RAP_TOOL_BEARER.
    #[arg(long, env = "RAP_TOOL_BEARER", hide_env_values = true, value_name = "TOKEN")]
    bearer: Option<Token>,
    #[command(flatten)]
    orders: Orders,
    /// Where callbacks arrive: an address that the server can reach. Otherwise the one that it sees us under.
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    #[command(flatten)]
    shape: Shape,
}

/// How it is judged and shown.
#[derive(Args, Clone, Copy)]
struct Shape {
    /// A SHOULD that is not met is a failure, not a warning.
    #[arg(long)]
    strict: bool,
    /// How the report is shown.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// The forms of a report.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A table by requirement, for people.
    Table,
    /// One JSON object.
    Json,
    /// JUnit's XML, one test case for each requirement.
    Junit,
}

/// Does it.
pub async fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Tool(flags) => check_tool(flags).await,
        Command::Runtime(flags) => runtime::check(flags).await,
    }
}

async fn check_tool(flags: Tool) -> anyhow::Result<()> {
    let Tool { url, bearer, orders, listen, shape } = flags;
    let options = Options {
        url,
        bearer: bearer.map(|Token(secret)| secret).filter(|secret| !secret.expose().is_empty()),
        operation: orders.operation,
        subscription: orders.subscription,
        listen,
        patience: Patience::default(),
    };
    let checked = tool::check(options, &show_progress).await;
    clear_progress();
    match checked {
        Ok(report) => shape.show(&report),
        Err(error @ (tool::Error::Url(_) | tool::Error::Order(_))) => {
            Err(WrongUsage(error.to_string()).into())
        }
        Err(error) => Err(error.into()),
    }
}

impl Shape {
    /// Prints the report; an implementation that is not good is an error.
    fn show(self, report: &Report) -> anyhow::Result<()> {
        let strictness = if self.strict { Strictness::Strict } else { Strictness::Lenient };
        match self.format {
            Format::Table => print(&report.to_table(strictness, terminal_width()))?,
            Format::Json => print_json(&report.to_json(strictness))?,
            Format::Junit => print(&report.to_junit(strictness))?,
        }
        if !report.is_good(strictness) {
            bail!("not everything that is asked for is met; the report says what");
        }
        Ok(())
    }
}

/// One line on the terminal, written over and over.
fn show_progress(progress: Progress<'_>) {
    let Progress::Begins { probe, number, of } = progress else { return };
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K{number}/{of} {}", probe.name);
        // Progress that can not be shown is none.
        std::io::stderr().flush().ok();
    }
}

fn clear_progress() {
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K");
    }
}

fn base_url(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
    url.ok_or_else(|| "write it as http://HOST:PORT".into())
}
