//! `rap deliveries`: lists deliveries, sent and received, that were refused, retried or given up.

use clap::{Subcommand, ValueEnum};
use rap_protocol::Timestamp;
use serde::Deserialize;

use super::{Connection, Listing, print, print_json};
use crate::api::{optional_time, time};
use crate::table::{GREEN, RED, Table, YELLOW, one_line, terminal_width};
use crate::time_format;

/// Subcommands of `rap deliveries`.
#[derive(Subcommand)]
pub enum Command {
    /// List deliveries that did not succeed at the first attempt, newest first.
    #[command(after_help = "Example: rap deliveries ls --outcome given-up")]
    Ls {
        /// Only deliveries of this thread.
        #[arg(long)]
        thread: Option<String>,
        /// Only deliveries with this outcome.
        #[arg(long)]
        outcome: Option<Outcome>,
        /// Number of rows and output format.
        #[command(flatten)]
        listing: Listing,
    },
    /// Show one delivery and its last attempt.
    Show {
        /// Id of the delivery.
        delivery: String,
        /// Output format.
        #[command(flatten)]
        output: super::OutputFormat,
    },
    /// Retry an invocation now instead of at its next due time.
    #[command(after_help = "Example: rap deliveries redeliver 17")]
    Redeliver {
        /// Id of the delivery.
        delivery: String,
    },
}

/// Outcome of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It will be retried.
    Retrying,
    /// It succeeded after a retry.
    Delivered,
    /// The receiver refused it.
    Refused,
    /// All attempts failed within the retry period.
    #[value(alias = "given_up")]
    GivenUp,
    /// It was no longer needed, or the queue was full.
    Dropped,
}

impl Outcome {
    fn word(self) -> &'static str {
        match self {
            Outcome::Retrying => "retrying",
            Outcome::Delivered => "delivered",
            Outcome::Refused => "refused",
            Outcome::GivenUp => "given up",
            Outcome::Dropped => "dropped",
        }
    }
}

#[derive(Deserialize)]
struct Delivery {
    id: String,
    kind: String,
    thread_id: Option<String>,
    call_id: Option<String>,
    server: Option<String>,
    topic: Option<String>,
    outcome: Outcome,
    attempts: u64,
    detail: String,
    #[serde(deserialize_with = "time")]
    first_at: Timestamp,
    #[serde(deserialize_with = "time")]
    last_at: Timestamp,
    #[serde(default, deserialize_with = "optional_time")]
    next_at: Option<Timestamp>,
}

impl Delivery {
    /// Kind of the delivery, with the topic of a notification: `notification close_thread`, `callback`.
    fn label(&self) -> String {
        match (self.kind.as_str(), &self.topic) {
            ("notification", Some(topic)) => format!("notification {topic}"),
            (kind, _) => kind.to_owned(),
        }
    }
}

/// Runs the command.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    match command {
        Command::Ls { thread, outcome, listing } => {
            let outcome = outcome.map(|outcome| outcome.word().replace(' ', "_"));
            let filters = [("thread", thread.as_deref()), ("outcome", outcome.as_deref())];
            listing.show(&client, "deliveries", &filters, list).await
        }
        Command::Show { delivery, output } => {
            let answer = client.get(&["v1", "deliveries", &delivery], &[]).await?;
            if output.json { print_json(&answer) } else { show(&client.typed(answer)?) }
        }
        Command::Redeliver { delivery } => {
            let path = ["v1", "deliveries", &delivery, "redeliver"];
            client.post(&path, &serde_json::json!({})).await?;
            Ok(print(&format!("retrying delivery {delivery} now\n"))?)
        }
    }
}

fn list(deliveries: &[Delivery]) -> anyhow::Result<()> {
    if deliveries.is_empty() {
        return Ok(print("no deliveries were refused, retried or given up\n")?);
    }
    let now = time_format::now();
    let mut table = Table::new(["ID", "KIND", "OUTCOME", "ATTEMPTS", "LAST", "THREAD", "CALL", "DETAIL"]);
    for delivery in deliveries {
        let Delivery { id, thread_id, call_id, outcome, attempts, detail, .. } = delivery;
        let [thread, call] = [thread_id, call_id].map(|id| id.clone().unwrap_or_default());
        let (attempts, last) = (attempts.to_string(), time_format::relative(delivery.last_at, now));
        let word = outcome.word().to_owned();
        table.row([id.clone(), delivery.label(), word, attempts, last, thread, call, detail.clone()]);
        match outcome {
            Outcome::Retrying => table.style(2, YELLOW),
            Outcome::Delivered => table.style(2, GREEN),
            Outcome::Refused | Outcome::GivenUp => table.style(2, RED),
            Outcome::Dropped => {}
        }
    }
    Ok(print(&table.render(terminal_width()))?)
}

fn show(delivery: &Delivery) -> anyhow::Result<()> {
    let now = time_format::now();
    let Delivery { id, call_id, thread_id, server, outcome, attempts, detail, .. } = delivery;
    let to = server.as_ref().map(|server| format!(" to {}", one_line(server))).unwrap_or_default();
    let about = match (call_id, thread_id) {
        (Some(call), Some(thread)) => format!(" for call {call} of thread {thread}"),
        (None, Some(thread)) => format!(" for thread {thread}"),
        _ => String::new(),
    };
    let attempts = if *attempts == 1 { "1 attempt".into() } else { format!("{attempts} attempts") };
    let mut text = format!(
        "{id}: {}{to}{about}\n  {}; {attempts}, first {}, last {}\n  last attempt: {}\n",
        delivery.label(),
        outcome.word(),
        time_format::relative(delivery.first_at, now),
        time_format::relative(delivery.last_at, now),
        one_line(detail),
    );
    if let Some(next) = delivery.next_at {
        text.push_str(&format!("  next attempt {}", time_format::relative(next, now)));
        if delivery.kind == "invocation" {
            text.push_str(&format!(", or at once with: rap deliveries redeliver {id}"));
        }
        text.push('\n');
    }
    Ok(print(&text)?)
}
