//! `rap timers`: lists timers.

use clap::Subcommand;
use rap_api::{Time, Timer, Timers};

use super::{Connection, Listing, print};
use crate::table::{Table, terminal_width};
use crate::time_format;

/// Subcommands of `rap timers`.
#[derive(Subcommand)]
pub enum Command {
    /// List the timers of all threads, next first: sleeps, schedules, timeouts and retries.
    Ls(Listing),
}

/// Runs the command.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    let Command::Ls(listing) = command;
    listing.show::<Timers>(&client, &[], show).await
}

fn show(timers: &[Timer]) -> anyhow::Result<()> {
    if timers.is_empty() {
        return Ok(print("no timers\n")?);
    }
    let now = Time::now();
    let mut table = Table::new(["WHEN", "AT", "KIND", "THREAD", "CALL", "TOOL"]);
    for Timer { thread_id, call_id, tool, kind, at } in timers {
        let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
        table.row([
            time_format::exact_relative(*at, now),
            time_format::clock(*at, now),
            kind.to_string(),
            thread_id.clone(),
            text(call_id),
            text(tool),
        ]);
    }
    Ok(print(&table.render(terminal_width()))?)
}
