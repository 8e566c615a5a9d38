//! `rap calls`: what agents have called and wait for.

use clap::Subcommand;
use serde::Deserialize;

use super::{Connection, Listing, print};
use crate::age::{self, span};
use crate::api::Waiting;
use crate::table::{Table, terminal_width};

/// What to do with calls.
#[derive(Subcommand)]
pub enum Command {
    /// List the open calls of all threads, the oldest first.
    Ls(Listing),
    /// Cancel an open call; its tool is told, and the agent sees that it was interrupted.
    #[command(after_help = "Example: rap calls cancel t019 3")]
    Cancel {
        /// The thread that made it.
        thread: String,
        /// The call: its id, or the number at the end of it.
        call: String,
    },
}

#[derive(Deserialize)]
struct OpenCall {
    thread_id: String,
    #[serde(flatten)]
    call: Waiting,
    acknowledged_at: Option<String>,
    attempts: u64,
    last_attempt: Option<String>,
}

/// Does it.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    match command {
        Command::Ls(listing) => listing.show(&client, "calls", &[], show).await,
        Command::Cancel { thread, call } => super::cancel(&client, &thread, &call).await,
    }
}

fn show(calls: &[OpenCall]) -> anyhow::Result<()> {
    if calls.is_empty() {
        return Ok(print("no call is open\n")?);
    }
    let now = age::now();
    let mut table = Table::new(["THREAD", "CALL", "TOOL", "FOR", "TIME-OUT", "DELIVERY"]);
    for OpenCall { thread_id, call, acknowledged_at, attempts, last_attempt } in calls {
        let until = call.until.map_or("none".into(), |until| age::ago(until, now));
        let delivery = match (acknowledged_at, last_attempt) {
            (Some(_), _) => "taken".into(),
            (None, Some(outcome)) => format!("not taken yet, {attempts} tries: {outcome}"),
            (None, None) => "on its way".into(),
        };
        let since = span(now.since(call.since));
        table.row([thread_id.clone(), call.call_id.clone(), call.tool.clone(), since, until, delivery]);
    }
    Ok(print(&table.render(terminal_width()))?)
}

/// So that a listing never fails for a field that it does not need.
#[cfg(test)]
#[test]
fn a_call_is_read_as_the_api_writes_it() {
    let call = serde_json::json!({"thread_id": "t", "call_id": "c", "tool": "slow", "server": "s",
        "since": "1970-01-01T00:00:00.000Z", "until": null, "acknowledged_at": null, "attempts": 0,
        "last_attempt": null});
    let call: OpenCall = serde_json::from_value(call).unwrap();
    assert_eq!((call.call.tool.as_str(), call.call.until), ("slow", None));
}
