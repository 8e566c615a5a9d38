//! `rap calls`: lists and cancels open tool calls.

use clap::Subcommand;
use rap_agent::texts;
use rap_api::{Calls, ListedCall, Time};

use super::{Connection, Listing, print};
use crate::status_text;
use crate::table::{Table, terminal_width};
use crate::time_format::{self, short_duration};

/// Subcommands of `rap calls`.
#[derive(Subcommand)]
pub enum Command {
    /// List the open calls of all threads, sorted by age. If there are more than --limit calls, older ones may be missing;
    /// use --all.
    Ls(Listing),
    /// Cancel an open call. Its tool server is notified, and the agent sees the result `interrupted`.
    #[command(after_help = "Example: rap calls cancel t019 3")]
    Cancel {
        /// Thread that made the call.
        thread: String,
        /// Id of the call, or the number at its end.
        call: String,
    },
}

/// Runs the command.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    match command {
        Command::Ls(listing) => listing.show::<Calls>(&client, &[], show).await,
        Command::Cancel { thread, call } => super::cancel(&client, &thread, &call).await,
    }
}

fn show(calls: &[ListedCall]) -> anyhow::Result<()> {
    if calls.is_empty() {
        return Ok(print("no open calls\n")?);
    }
    let now = Time::now();
    let mut table = Table::new(["THREAD", "CALL", "TOOL", "AGE", "USUALLY", "TIMEOUT", "DELIVERY"]);
    let mut by_age: Vec<&ListedCall> = calls.iter().collect();
    by_age.sort_by_key(|call| call.since);
    for call in by_age {
        let until = call.until.map_or("none".into(), |until| time_format::exact_relative(until, now));
        let since = short_duration(now.since(call.since));
        let delivery = delivery(call);
        let (thread, id, tool) = (call.thread_id.clone(), call.call_id.clone(), call.tool.clone());
        table.row([thread, id, tool, since, usually(call), until, delivery]);
    }
    Ok(print(&table.render(terminal_width()))?)
}

/// Returns the usual duration, and `overdue` if the call has taken far longer.
fn usually(call: &ListedCall) -> String {
    let usual = status_text::usual(call.usually, call.overdue);
    usual.map_or("-".into(), |usual| usual.replace("usually takes ", ""))
}

fn delivery(call: &ListedCall) -> String {
    let ListedCall { tool, acknowledged_at, next_attempt_at, attempts, last_attempt, .. } = call;
    match (acknowledged_at, last_attempt, next_attempt_at) {
        (Some(_), ..) => "acknowledged".into(),
        (None, Some(outcome), _) => format!("not acknowledged, {attempts} attempts: {outcome}"),
        (None, None, Some(_)) => "sending".into(),
        (None, None, None) if texts::BUILT_IN.contains(&tool.as_str()) => "-".into(),
        (None, None, None) => "waits for approval".into(),
    }
}

/// A listing must not fail because of a field that it does not need.
#[cfg(test)]
#[test]
fn a_call_of_the_api_is_deserialized() {
    let call = serde_json::json!({"thread_id": "t", "call_id": "c", "tool": "slow", "server": "s",
        "since": "1970-01-01T00:00:00.000Z", "until": null, "acknowledged_at": null, "attempts": 0,
        "last_attempt": null});
    let mut call: ListedCall = serde_json::from_value(call).unwrap();
    assert_eq!((call.tool.as_str(), call.until), ("slow", None));
    assert_eq!(delivery(&call), "waits for approval");
    call.tool = "sleep".into();
    assert_eq!(delivery(&call), "-");
    call.next_attempt_at = Some(call.since);
    assert_eq!(delivery(&call), "sending");
    assert_eq!(usually(&call), "-");
    call.usually = Some(rap_api::UsualDuration { min_ms: 1_500, max_ms: 60_000 });
    assert_eq!(usually(&call), "1.5 s to 1 min");
    call.overdue = true;
    assert_eq!(usually(&call), "overdue: 1.5 s to 1 min");
}
