//! `rap tools`: lists tool servers, their tools and their errors.

use clap::Subcommand;
use rap_api::Tool;
use serde_json::{Map, Value};

use super::{Connection, OutputFormat, print, print_json};
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

/// Runs the command.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let Command::Ls { output } = command;
    let client = connection.client()?;
    if output.json {
        return print_json(&client.tools_json().await?);
    }
    let servers = client.tools().await?.servers;
    if servers.is_empty() {
        return Ok(print("no tool servers; add a [[tool_server]] to rap.toml\n")?);
    }
    let mut table = Table::new(["TOOL", "SERVER", "TRAITS", "DESCRIPTION"]);
    for server in &servers {
        let name = server.name.as_deref().unwrap_or(&server.url);
        for Tool { name: tool, description, annotations, .. } in &server.tools {
            table.row([tool.clone(), name.to_owned(), traits(annotations), description.clone()]);
        }
    }
    if servers.iter().any(|server| !server.tools.is_empty()) {
        print(&table.render(terminal_width()))?;
    }
    for server in &servers {
        for error in &server.errors {
            print(&format!("{} {}\n", styled(RED, &format!("{}:", one_line(&server.url))), one_line(error)))?;
        }
    }
    Ok(())
}

/// Formats the annotations of a tool.
fn traits(annotations: &Map<String, Value>) -> String {
    let known = [
        ("readOnly", "read-only"),
        ("destructive", "destructive"),
        ("longRunning", "slow"),
        ("idempotent", "idempotent"),
    ];
    let traits = known
        .iter()
        .filter(|(key, _)| annotations.get(*key).is_some_and(|value| *value == true))
        .map(|(_, word)| *word);
    let auth = annotations.get("requiresAuth").is_some_and(Value::is_string).then_some("sign-in");
    traits.chain(auth).collect::<Vec<_>>().join(", ")
}
