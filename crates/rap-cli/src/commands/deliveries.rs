//! `rap deliveries`: what was refused, retried or given up, of what was sent and of what was received.

use clap::{Subcommand, ValueEnum};
use rap_protocol::Timestamp;
use serde::Deserialize;

use super::{Connection, Listing, print, print_json};
use crate::age;
use crate::api::{maybe_time, time};
use crate::table::{GREEN, RED, Table, YELLOW, one_line, terminal_width};

/// What to do with deliveries.
#[derive(Subcommand)]
pub enum Command {
    /// List deliveries that did not succeed at their first attempt, the newest first.
    #[command(after_help = "Example: rap deliveries ls --outcome given-up")]
    Ls {
        /// Only those of this thread.
        #[arg(long)]
        thread: Option<String>,
        /// Only those that went like this.
        #[arg(long)]
        outcome: Option<Outcome>,
        /// How many, and how they are shown.
        #[command(flatten)]
        listing: Listing,
    },
    /// Say how one delivery went.
    Show {
        /// The delivery.
        delivery: String,
        /// How it is shown.
        #[command(flatten)]
        shape: super::Shape,
    },
    /// Send an invocation at once that waits to be tried again.
    #[command(after_help = "Example: rap deliveries redeliver 17")]
    Redeliver {
        /// The delivery.
        delivery: String,
    },
}

/// How a delivery goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It is tried again.
    Retrying,
    /// It arrived in the end.
    Delivered,
    /// The receiver does not want it.
    Refused,
    /// The receiver could not be reached for too long.
    #[value(alias = "given_up")]
    GivenUp,
    /// Nobody needs it any more, or there was no room for it.
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
    #[serde(default, deserialize_with = "maybe_time")]
    next_at: Option<Timestamp>,
}

impl Delivery {
    /// `notification close_thread`, `callback`.
    fn what(&self) -> String {
        match (self.kind.as_str(), &self.topic) {
            ("notification", Some(topic)) => format!("notification {topic}"),
            (kind, _) => kind.to_owned(),
        }
    }
}

/// Does it.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    match command {
        Command::Ls { thread, outcome, listing } => {
            let outcome = outcome.map(|outcome| outcome.word().replace(' ', "_"));
            let filters = [("thread", thread.as_deref()), ("outcome", outcome.as_deref())];
            listing.show(&client, "deliveries", &filters, list).await
        }
        Command::Show { delivery, shape } => {
            let answer = client.get(&["v1", "deliveries", &delivery], &[]).await?;
            if shape.json { print_json(&answer) } else { show(&client.typed(answer)?) }
        }
        Command::Redeliver { delivery } => {
            let path = ["v1", "deliveries", &delivery, "redeliver"];
            client.post(&path, &serde_json::json!({})).await?;
            Ok(print(&format!("delivery {delivery} is tried now\n"))?)
        }
    }
}

fn list(deliveries: &[Delivery]) -> anyhow::Result<()> {
    if deliveries.is_empty() {
        return Ok(print("nothing was refused, retried or given up\n")?);
    }
    let now = age::now();
    let mut table = Table::new(["ID", "WHAT", "OUTCOME", "TRIES", "LAST", "THREAD", "CALL", "DETAIL"]);
    for delivery in deliveries {
        let Delivery { id, thread_id, call_id, outcome, attempts, detail, .. } = delivery;
        let [thread, call] = [thread_id, call_id].map(|id| id.clone().unwrap_or_default());
        let (tries, last) = (attempts.to_string(), age::ago(delivery.last_at, now));
        let word = outcome.word().to_owned();
        table.row([id.clone(), delivery.what(), word, tries, last, thread, call, detail.clone()]);
        match outcome {
            Outcome::Retrying => table.style(2, YELLOW),
            Outcome::Delivered => table.style(2, GREEN),
            Outcome::Refused | Outcome::GivenUp => table.style(2, RED),
            Outcome::Dropped => {}
        }
    }
    Ok(print(&table.render(terminal_width()))?)
}

/// Everything about a delivery, and what can be done about it.
fn show(delivery: &Delivery) -> anyhow::Result<()> {
    let now = age::now();
    let Delivery { id, call_id, thread_id, server, outcome, attempts, detail, .. } = delivery;
    let to = server.as_ref().map(|server| format!(" to {}", one_line(server))).unwrap_or_default();
    let about = match (call_id, thread_id) {
        (Some(call), Some(thread)) => format!(" for call {call} of thread {thread}"),
        (None, Some(thread)) => format!(" for thread {thread}"),
        _ => String::new(),
    };
    let tries = if *attempts == 1 { "once".into() } else { format!("{attempts} times") };
    let mut text = format!(
        "{id}: {}{to}{about}\n  {}; tried {tries}, first {}, last {}\n  the last attempt: {}\n",
        delivery.what(),
        outcome.word(),
        age::ago(delivery.first_at, now),
        age::ago(delivery.last_at, now),
        one_line(detail),
    );
    if let Some(next) = delivery.next_at {
        text.push_str(&format!("  tried again {}", age::ago(next, now)));
        if delivery.kind == "invocation" {
            text.push_str(&format!(", or at once with: rap deliveries redeliver {id}"));
        }
        text.push('\n');
    }
    Ok(print(&text)?)
}
