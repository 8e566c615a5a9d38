//! `rap subs`: lists and cancels subscriptions.

use clap::Subcommand;
use rap_api::{ListedSubscription, Subscriptions, Time};

use super::{Connection, Listing, print};
use crate::table::{Table, terminal_width};
use crate::time_format::short_duration;

/// Subcommands of `rap subs`.
#[derive(Subcommand)]
pub enum Command {
    /// List the subscriptions of all threads, oldest first.
    Ls(Listing),
    /// Cancel a subscription. Its tool server is notified, and no more events are accepted.
    #[command(after_help = "Example: rap subs cancel t019 3")]
    Cancel {
        /// Thread that subscribed.
        thread: String,
        /// Id of the call that made the subscription, or the number at its end.
        call: String,
    },
}

/// Runs the command.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    match command {
        Command::Ls(listing) => listing.show::<Subscriptions>(&client, &[], show).await,
        Command::Cancel { thread, call } => super::cancel(&client, &thread, &call).await,
    }
}

fn show(rows: &[ListedSubscription]) -> anyhow::Result<()> {
    if rows.is_empty() {
        return Ok(print("no subscriptions\n")?);
    }
    let now = Time::now();
    let mut table = Table::new(["THREAD", "CALL", "TOOL", "AGE", "QUEUED", "SERVER"]);
    for ListedSubscription { thread_id, call_id, tool, server, since, waiting, .. } in rows {
        table.row([
            thread_id.clone(),
            call_id.clone(),
            tool.clone(),
            short_duration(now.since(*since)),
            waiting.to_string(),
            server.clone(),
        ]);
    }
    Ok(print(&table.render(terminal_width()))?)
}
