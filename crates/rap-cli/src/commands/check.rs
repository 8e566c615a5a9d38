//! `rap check`: checks an implementation against the requirements of the specification.

mod operations;
mod runtime;

use std::io::{IsTerminal, Write};
use std::net::SocketAddr;

use anyhow::bail;
use clap::{Args, Subcommand, ValueEnum};
use rap_conformance::tool::{self, Options, Timeouts};
use rap_conformance::{Profile, Progress, Report, Strictness};
use url::Url;

use super::{Token, WrongUsage, print, print_json};
use crate::table::terminal_width;
use operations::Operations;

/// Subcommands of `rap check`.
#[derive(Subcommand)]
pub enum Command {
    /// Check a tool server; the command acts as the runtime.
    #[command(after_help = "\
The operation is called about fifty times and should return within seconds. The slow operation should work for two \
seconds or longer; it is called a few times. Without these flags, operations that need no arguments and are annotated \
as readOnly are selected (the slow one also as longRunning). No other operation is called unless a flag names it. The \
subscription should send several events within seconds, the last of them final. Without --subscription, subscriptions \
are not checked. The setup operation is called in each thread before any other.

Exit code: 0 if every MUST is met, 1 if one is not met (with --strict, also if a SHOULD is not met), 2 for wrong usage.

Example: rap check tool http://127.0.0.1:7500 --operation echo --arguments '{\"text\": \"hi\"}' \
--slow-operation slow --arguments '{\"seconds\": 2}' \
--subscription tick --arguments '{\"count\": 3, \"every_ms\": 50}'")]
    Tool(Tool),
    /// Check a runtime; the command acts as the tool servers, the model and the user.
    #[command(after_help = "\
Placeholders in the command, in --env and in the template: {tool_url}, {tool_url_2} and {tool_url_3} (base URLs of \
three tool servers), {tool_token} (a bearer token for them), {model_url} (base URL of the model; /chat/completions is \
appended), {model_key}, {listen}, {port} and {url} (address for the runtime to listen on), {data} (an empty directory, \
in which the command runs), {config} (path of the filled template). The last five are also filled in --say. No shell is \
used.

Without a command, this prints the values to configure and waits for the runtime. The runtime is then not killed, and \
requirements that show only after a crash are not observable.

Exit code: 0 if every MUST is met, 1 if one is not met (with --strict, also if a SHOULD is not met), 2 for wrong usage.

Example: rap check runtime --strict -- rap serve --config {config}")]
    Runtime(runtime::Runtime),
}

/// Arguments of `rap check tool`.
#[derive(Args)]
pub struct Tool {
    /// Base URL of the server.
    #[arg(value_parser = base_url)]
    url: Url,
    /// Bearer token for the server; prefer RAP_TOOL_BEARER.
    #[arg(long, env = "RAP_TOOL_BEARER", hide_env_values = true, value_name = "TOKEN")]
    bearer: Option<Token>,
    #[command(flatten)]
    operations: Operations,
    /// Address for callbacks, which the server must be able to reach [default: the local address of the connection to it].
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    #[command(flatten)]
    report_options: ReportOptions,
}

#[derive(Args, Clone, Copy)]
struct ReportOptions {
    /// Treat a SHOULD that is not met as a failure, not as a warning.
    #[arg(long)]
    strict: bool,
    /// Format of the report.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// Requirements to check.
    #[arg(long, value_enum, default_value_t = ProfileName::Spec)]
    profile: ProfileName,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ProfileName {
    /// Only the requirements of the specification.
    #[value(alias = "seeds")]
    Spec,
    /// Also this project's interpretation of points that the specification leaves open; an unmet one counts as a SHOULD.
    Rap,
}

impl From<ProfileName> for Profile {
    fn from(name: ProfileName) -> Profile {
        match name {
            ProfileName::Spec => Profile::Spec,
            ProfileName::Rap => Profile::Rap,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A table of requirements.
    Table,
    /// One JSON object.
    Json,
    /// JUnit XML with one test case per requirement.
    Junit,
}

/// Runs the command.
pub async fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Tool(flags) => check_tool(flags).await,
        Command::Runtime(flags) => runtime::check(flags).await,
    }
}

async fn check_tool(flags: Tool) -> anyhow::Result<()> {
    let Tool { url, bearer, operations, listen, report_options } = flags;
    let options = Options {
        url,
        bearer: bearer.map(|Token(secret)| secret).filter(|secret| !secret.expose().is_empty()),
        operation: operations.operation,
        slow_operation: operations.slow_operation,
        setup_operation: operations.setup_operation,
        subscription: operations.subscription,
        listen,
        timeouts: Timeouts::default(),
        profile: report_options.profile.into(),
    };
    let checked = tool::check(options, &show_progress).await;
    clear_progress();
    match checked {
        Ok(report) => report_options.show(&report),
        Err(error @ (tool::Error::Url(_) | tool::Error::Operation(_) | tool::Error::Unauthorized(_))) => {
            Err(WrongUsage(error.to_string()).into())
        }
        Err(error) => Err(error.into()),
    }
}

impl ReportOptions {
    /// Prints the report. Fails if the implementation does not meet the requirements.
    fn show(self, report: &Report) -> anyhow::Result<()> {
        let strictness = if self.strict { Strictness::Strict } else { Strictness::Lenient };
        match self.format {
            Format::Table => print(&report.to_table(strictness, terminal_width()))?,
            Format::Json => print_json(&report.to_json(strictness))?,
            Format::Junit => print(&report.to_junit(strictness))?,
        }
        if !report.is_good(strictness) {
            bail!("some requirements are not met; see the report");
        }
        Ok(())
    }
}

/// Shows the progress in one line that is overwritten.
fn show_progress(progress: Progress<'_>) {
    let Progress::Started { probe, number, total } = progress else { return };
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K{number}/{total} {}", probe.name);
        // An error is ignored: progress is optional.
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
    url.ok_or_else(|| "expected http://HOST:PORT or https://HOST:PORT".into())
}
