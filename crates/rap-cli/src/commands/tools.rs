//! `rap tools`: which tools there are, and what is wrong with the others.

use clap::Subcommand;
use serde::Deserialize;
use serde_json::Value;

use super::{Connection, Shape, print, print_json};
use crate::client::taken;
use crate::table::{RED, Table, one_line, styled, terminal_width};

/// What to do with tools.
#[derive(Subcommand)]
pub enum Command {
    /// List the tool servers, their tools, and their errors.
    Ls {
        /// How it is shown.
        #[command(flatten)]
        shape: Shape,
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

/// Does it.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let Command::Ls { shape } = command;
    let client = connection.client()?;
    let mut answer = client.get(&["v1", "tools"], &[]).await?;
    if shape.json {
        return print_json(&answer);
    }
    let servers: Vec<Server> = client.typed(taken(&mut answer, "/servers"))?;
    if servers.is_empty() {
        return Ok(print("no tool server is configured; add a [[tool_server]] to rap.toml\n")?);
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

/// What a server says about its tool.
fn traits(annotations: &Value) -> String {
    let known = [
        ("readOnly", "read-only"),
        ("destructive", "destructive"),
        ("longRunning", "slow"),
        ("idempotent", "idempotent"),
    ];
    let said = known.iter().filter(|(key, _)| annotations[key] == true).map(|(_, word)| *word);
    let auth = annotations["requiresAuth"].is_string().then_some("sign-in");
    said.chain(auth).collect::<Vec<_>>().join(", ")
}
