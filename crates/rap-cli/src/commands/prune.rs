//! `rap prune`: deletes sessions that have been closed for a time.

use std::time::Duration;

use clap::Args;
use rap_api::Prune as Request;

use super::{Connection, OutputFormat, print, print_json};
use crate::config::parse_duration;

/// Arguments of `rap prune`.
#[derive(Args)]
pub struct Prune {
    /// Delete sessions that have been closed for this long, such as 30d [default: retention.closed_threads of the runtime].
    #[arg(long, value_name = "TIME", value_parser = time)]
    closed_for: Option<Duration>,
    /// Count the sessions, and delete nothing.
    #[arg(long)]
    dry_run: bool,
    /// Output format.
    #[command(flatten)]
    output: OutputFormat,
    /// The runtime that has the sessions.
    #[command(flatten)]
    connection: Connection,
}

fn time(text: &str) -> Result<Duration, &'static str> {
    let fits = |time: &Duration| u32::try_from(time.as_secs()).is_ok();
    parse_duration(text).filter(fits).ok_or("expected a time such as 12h or 30d")
}

/// Runs `rap prune`.
pub async fn run(arguments: Prune) -> anyhow::Result<()> {
    let Prune { closed_for, dry_run, output, connection } = arguments;
    let closed_for = closed_for.and_then(|time| u32::try_from(time.as_secs()).ok());
    let pruned = connection.client()?.prune(&Request { closed_for, dry_run }).await?;
    if output.json {
        return print_json(&serde_json::to_value(pruned)?);
    }
    let closed = match pruned.sessions {
        1 => "1 closed session".to_owned(),
        sessions => format!("{sessions} closed sessions"),
    };
    Ok(print(&match (pruned.sessions, dry_run) {
        (_, true) => format!("{closed} would be deleted\n"),
        (1, false) => format!("{closed} is being deleted\n"),
        (_, false) => format!("{closed} are being deleted\n"),
    })?)
}
