//! `rap nodes`: lists the nodes that share the database.

use clap::Subcommand;
use rap_api::{Node, Nodes, Time};

use super::{Connection, Listing, print};
use crate::table::{Table, terminal_width};
use crate::time_format;

/// Subcommands of `rap nodes`.
#[derive(Subcommand)]
pub enum Command {
    /// List the nodes that share the database, oldest first, with the requests that each has in progress.
    Ls(Listing),
}

/// Runs the command.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    let Command::Ls(listing) = command;
    listing.show::<Nodes>(&client, &[], show).await
}

fn show(nodes: &[Node]) -> anyhow::Result<()> {
    if nodes.is_empty() {
        return Ok(print("no nodes\n")?);
    }
    let now = Time::now();
    let mut table = Table::new(["ID", "URL", "STARTED", "LAST SEEN", "MODEL REQUESTS", "INVOCATIONS"]);
    for Node { id, url, started_at, seen_at, asking, invoking } in nodes {
        table.row([
            id.clone(),
            url.clone(),
            time_format::relative(*started_at, now),
            time_format::relative(*seen_at, now),
            asking.to_string(),
            invoking.to_string(),
        ]);
    }
    Ok(print(&table.render(terminal_width()))?)
}
