//! `rap tools`: lists tool servers, their tools and their errors.

use clap::Subcommand;
use serde::Deserialize;
use serde_json::Value;

use super::{Connection, OutputFormat, print, print_json};
use crate::client::take_at;
use crate::table::{RED, Table, one_line, styled, terminal_width};

/// Subcommands of `rap tools`.
#[derive(Subcommand)]
pub enum Command {
    /// List the tools of all tool servers, and the errors of servers that could not be read.
    Ls {
        /// Output format.
        #[command(flatten)]
        output: OutputFormat,
    },
}

#[derive(Deserialize)]
struct Server {
    url: String,
    name: Option<String>,
    tools: Vec<Tool>,
    errors: Vec<String>,
}

#[derive(Deserialize)]
struct Tool {
    name: String,
    description: String,
    #[serde(default)]
    annotations: Value,
}

/// Runs the command.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let Command::Ls { output } = command;
    let client = connection.client()?;
    let mut answer = client.get(&["v1", "tools"], &[]).await?;
    if output.json {
        return print_json(&answer);
    }
    let servers: Vec<Server> = client.typed(take_at(&mut answer, "/servers"))?;
    if servers.is_empty() {
        return Ok(print("no tool servers; add a [[tool_server]] to rap.toml\n")?);
    }
    let mut table = Table::new(["TOOL", "SERVER", "TRAITS", "DESCRIPTION"]);
    for server in &servers {
        let name = server.name.as_deref().unwrap_or(&server.url);
        for Tool { name: tool, description, annotations } in &server.tools {
            table.row([tool.clone(), name.to_owned(), traits(annotations), description.clone()]);
        }
    }
    if servers.iter().any(|server| !server.tools.is_empty()) {
        print(&table.render(terminal_width()))?;
    }
    for server in &servers {
        for error in &server.errors {
            print(&format!("{} {}\n", styled(RED, &format!("{}:", server.url)), one_line(error)))?;
        }
    }
    Ok(())
}

/// Formats the annotations of a tool.
fn traits(annotations: &Value) -> String {
    let known = [
        ("readOnly", "read-only"),
        ("destructive", "destructive"),
        ("longRunning", "slow"),
        ("idempotent", "idempotent"),
    ];
    let traits = known.iter().filter(|(key, _)| annotations[key] == true).map(|(_, word)| *word);
    let auth = annotations["requiresAuth"].is_string().then_some("sign-in");
    traits.chain(auth).collect::<Vec<_>>().join(", ")
}
