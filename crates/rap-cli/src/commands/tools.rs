//! `rap tools`: lists tool servers, their tools and their errors.

use clap::Subcommand;
use rap_api::{HealthState, ServerHealth, Time, Tool, ToolServer};
use serde_json::{Map, Value};

use super::{Connection, OutputFormat, print, print_json};
use crate::table::{BOLD, RED, Table, cut, one_line, plain, styled, terminal_width};
use crate::time_format;

/// Maximum width of a description in a line.
const DESCRIPTION: usize = 80;

/// Subcommands of `rap tools`.
#[derive(Subcommand)]
pub enum Command {
    /// List the tools of all tool servers, one per line, and the servers that fail, with their errors.
    Ls {
        /// Show whole descriptions and the schemas of the arguments.
        #[arg(long)]
        long: bool,
        /// Output format.
        #[command(flatten)]
        output: OutputFormat,
    },
}

/// Runs the command.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let Command::Ls { long, output } = command;
    let client = connection.client()?;
    if output.json {
        return print_json(&client.tools_json().await?);
    }
    let servers = client.tools().await?.servers;
    if servers.is_empty() {
        return Ok(print("no tool servers; add a [[tool_server]] to rap.toml\n")?);
    }
    if long {
        print(&servers.iter().map(describe_server).collect::<String>())?;
    } else if servers.iter().any(|server| !server.tools.is_empty()) {
        print(&one_line_each(&servers).render(terminal_width()))?;
    }
    for server in &servers {
        for problem in problems(server) {
            print(&format!(
                "{} {}\n",
                styled(RED, &format!("{}:", one_line(&server.url))),
                one_line(&problem)
            ))?;
        }
    }
    Ok(())
}

/// Returns the errors of a server, and what its last request showed if that is not among them.
fn problems(server: &ToolServer) -> Vec<String> {
    let mut problems = server.errors.clone();
    let is_known = |why: &str| server.errors.iter().any(|error| error == why);
    match &server.health {
        Some(ServerHealth { state: HealthState::Failing, last_failure: Some(why), .. }) if is_known(why) => {}
        Some(health) if health.state == HealthState::Failing => problems.push(failing(health)),
        Some(health) if health.state == HealthState::Starting => {
            problems.push("its process is starting".into())
        }
        _ => {}
    }
    problems
}

/// Describes the last failure: `failed 3 s ago: answered 503; next attempt in 4 s`.
fn failing(health: &ServerHealth) -> String {
    let now = Time::now();
    let at =
        health.last_failure_at.map(|at| format!(" {}", time_format::relative(at, now))).unwrap_or_default();
    let why = health.last_failure.as_deref().unwrap_or("the reason is unknown");
    let next = health.next_attempt_at.map(|at| format!("; next attempt {}", time_format::relative(at, now)));
    format!("failed{at}: {why}{}", next.unwrap_or_default())
}

/// Lists each tool in one line, with the URL of its server and the beginning of its description.
fn one_line_each(servers: &[ToolServer]) -> Table {
    let mut table = Table::new(["TOOL", "ENDPOINT", "ANNOTATIONS", "DESCRIPTION"]);
    for server in servers {
        for Tool { name, description, annotations, .. } in &server.tools {
            let first = description.trim().lines().next().unwrap_or_default();
            let description = cut(&one_line(first), DESCRIPTION);
            table.row([name.clone(), server.url.clone(), describe(annotations), description]);
        }
    }
    table
}

/// Describes a server and its tools in full.
fn describe_server(server: &ToolServer) -> String {
    let name = server.name.as_ref().map_or(String::new(), |name| format!(" ({})", one_line(name)));
    let mut text = format!("{}{name}\n", styled(BOLD, &one_line(&server.url)));
    for Tool { name, description, annotations, input_schema, .. } in &server.tools {
        let annotations = describe(annotations);
        let annotations = if annotations.is_empty() { annotations } else { format!(" [{annotations}]") };
        let description = plain(description.trim()).replace('\n', "\n    ");
        let arguments = plain(&input_schema.to_string());
        text.push_str(&format!("  {}{annotations}\n    {description}\n    {arguments}\n", one_line(name)));
    }
    text
}

/// Formats the annotations of a tool.
fn describe(annotations: &Map<String, Value>) -> String {
    let known = [
        ("readOnly", "read-only"),
        ("destructive", "destructive"),
        ("longRunning", "long-running"),
        ("idempotent", "idempotent"),
    ];
    let set = known
        .iter()
        .filter(|(key, _)| annotations.get(*key).is_some_and(|value| *value == true))
        .map(|(_, word)| *word);
    let auth = annotations.get("requiresAuth").is_some_and(Value::is_string).then_some("requires sign-in");
    set.chain(auth).collect::<Vec<_>>().join(", ")
}
