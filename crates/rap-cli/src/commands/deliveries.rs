//! `rap deliveries`: lists deliveries, sent and received, that were refused, retried or given up.

use clap::Subcommand;
use rap_api::{Deliveries, Delivery, DeliveryAttempt, DeliveryKind, DeliveryOutcome, Time};

use super::{Connection, Listing, print, print_json};
use crate::table::{GREEN, RED, Table, YELLOW, one_line, plain, terminal_width};
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
        outcome: Option<DeliveryOutcome>,
        /// Number of rows and output format.
        #[command(flatten)]
        listing: Listing,
    },
    /// Show one delivery and its last attempts.
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

/// Returns an outcome as shown to people.
fn outcome_label(outcome: DeliveryOutcome) -> &'static str {
    match outcome {
        DeliveryOutcome::GivenUp => "given up",
        other => other.as_str(),
    }
}

/// Kind of the delivery, with the topic of a notification: `notification close_thread`, `callback`.
fn label(delivery: &Delivery) -> String {
    match (delivery.kind, &delivery.topic) {
        (DeliveryKind::Notification, Some(topic)) => format!("notification {topic}"),
        (DeliveryKind::Alert, Some(topic)) => format!("alert {topic}"),
        (kind, _) => kind.to_string(),
    }
}

/// Runs the command.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    match command {
        Command::Ls { thread, outcome, listing } => {
            let filters = [("thread", thread.as_deref()), ("outcome", outcome.map(DeliveryOutcome::as_str))];
            listing.show::<Deliveries>(&client, &filters, list).await
        }
        Command::Show { delivery, output } => {
            if output.json {
                print_json(&client.get_json(&["v1", "deliveries", &delivery], &[]).await?)
            } else {
                show(&client.delivery(&delivery).await?)
            }
        }
        Command::Redeliver { delivery } => {
            client.redeliver(&delivery).await?;
            Ok(print(&format!("retrying delivery {delivery} now\n"))?)
        }
    }
}

fn list(deliveries: &[Delivery]) -> anyhow::Result<()> {
    if deliveries.is_empty() {
        return Ok(print("no deliveries were refused, retried or given up\n")?);
    }
    let now = Time::now();
    let mut table = Table::new(["ID", "KIND", "OUTCOME", "ATTEMPTS", "LAST", "THREAD", "CALL", "DETAIL"]);
    for delivery in deliveries {
        let Delivery { id, thread_id, call_id, outcome, attempts, detail, .. } = delivery;
        let [thread, call] = [thread_id, call_id].map(|id| id.clone().unwrap_or_default());
        let (attempts, last) = (attempts.to_string(), time_format::relative(delivery.last_at, now));
        let shown = outcome_label(*outcome).to_owned();
        table.row([id.clone(), label(delivery), shown, attempts, last, thread, call, detail.clone()]);
        match outcome {
            DeliveryOutcome::Retrying => table.style(2, YELLOW),
            DeliveryOutcome::Delivered => table.style(2, GREEN),
            DeliveryOutcome::Refused | DeliveryOutcome::GivenUp => table.style(2, RED),
            DeliveryOutcome::Dropped | DeliveryOutcome::Unknown => {}
        }
    }
    Ok(print(&table.render(terminal_width()))?)
}

fn show(delivery: &Delivery) -> anyhow::Result<()> {
    let now = Time::now();
    let Delivery { id, call_id, thread_id, server, outcome, attempts, detail, .. } = delivery;
    let to = server.as_ref().map(|server| format!(" to {}", one_line(server))).unwrap_or_default();
    let about = match (call_id, thread_id) {
        (Some(call), Some(thread)) => format!(" for call {call} of thread {thread}"),
        (None, Some(thread)) => format!(" for thread {thread}"),
        _ => String::new(),
    };
    let attempts = if *attempts == 1 { "1 attempt".into() } else { format!("{attempts} attempts") };
    let mut text = format!(
        "{id}: {}{to}{about}\n  {}; {attempts}, first {}, last {}\n",
        label(delivery),
        outcome_label(*outcome),
        time_format::relative(delivery.first_at, now),
        time_format::relative(delivery.last_at, now),
    );
    if delivery.last_attempts.len() > 1 {
        let left_out = (delivery.attempts as usize).saturating_sub(delivery.last_attempts.len());
        if left_out > 0 {
            text.push_str(&format!("  {left_out} earlier attempts are no longer recorded\n"));
        }
        for DeliveryAttempt { at, detail } in &delivery.last_attempts {
            text.push_str(&format!("  {}  {}\n", time_format::clock(*at, now), one_line(detail)));
        }
    } else {
        text.push_str(&format!("  last attempt: {}\n", one_line(detail)));
    }
    if let Some(next) = delivery.next_at {
        text.push_str(&format!("  next attempt {}", time_format::relative(next, now)));
        if delivery.kind == DeliveryKind::Invocation {
            text.push_str(&format!(", or at once with: rap deliveries redeliver {id}"));
        }
        text.push('\n');
    }
    Ok(print(&plain(&text))?)
}
