//! `rap timers`: what happens by itself at a time.

use clap::Subcommand;

use super::{Connection, Listing, print};
use crate::age;
use crate::api::Timer;
use crate::table::{Table, terminal_width};

/// What to do with timers.
#[derive(Subcommand)]
pub enum Command {
    /// List what happens by itself in all threads, the next first.
    Ls(Listing),
}

/// Does it.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    let Command::Ls(listing) = command;
    listing.show(&client, "timers", &[], show).await
}

fn show(timers: &[Timer]) -> anyhow::Result<()> {
    if timers.is_empty() {
        return Ok(print("nothing happens by itself\n")?);
    }
    let now = age::now();
    let mut table = Table::new(["WHEN", "KIND", "THREAD", "CALL", "TOOL"]);
    for Timer { thread_id, call_id, tool, kind, at } in timers {
        let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
        table.row([age::ago(*at, now), kind.clone(), thread_id.clone(), text(call_id), text(tool)]);
    }
    Ok(print(&table.render(terminal_width()))?)
}
