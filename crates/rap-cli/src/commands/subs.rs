//! `rap subs`: what agents are subscribed to.

use clap::Subcommand;
use serde::Deserialize;

use super::{Connection, Listing, print};
use crate::age::{self, span};
use crate::api::Subscription;
use crate::table::{Table, terminal_width};

/// What to do with subscriptions.
#[derive(Subcommand)]
pub enum Command {
    /// List the subscriptions of all threads, the oldest first.
    Ls(Listing),
    /// End a subscription; its tool is told, and sends no more events.
    #[command(after_help = "Example: rap subs cancel t019 3")]
    Cancel {
        /// The thread that subscribed.
        thread: String,
        /// The call that made the subscription.
        call: String,
    },
}

#[derive(Deserialize)]
struct Held {
    thread_id: String,
    server: String,
    #[serde(default)]
    waiting: u64,
    #[serde(flatten)]
    subscription: Subscription,
}

/// Does it.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    match command {
        Command::Ls(listing) => listing.show(&client, "subscriptions", &[], show).await,
        Command::Cancel { thread, call } => super::cancel(&client, &thread, &call).await,
    }
}

fn show(held: &[Held]) -> anyhow::Result<()> {
    if held.is_empty() {
        return Ok(print("nothing is subscribed to\n")?);
    }
    let now = age::now();
    let mut table = Table::new(["THREAD", "CALL", "TOOL", "FOR", "WAITING", "SERVER"]);
    for Held { thread_id, server, waiting, subscription } in held {
        let Subscription { call_id, tool, since } = subscription;
        table.row([
            thread_id.clone(),
            call_id.clone(),
            tool.clone(),
            span(now.since(*since)),
            waiting.to_string(),
            server.clone(),
        ]);
    }
    Ok(print(&table.render(terminal_width()))?)
}
