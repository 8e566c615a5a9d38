//! `rap threads`: lists, creates and controls threads.

mod tail;

use std::io::Read;

use anyhow::Context;
use clap::Subcommand;
use rap_agent::texts;
use rap_api::client::{Client, Error, IdempotencyKey};
use rap_api::{CreateThread, Done, Fork, Inbox, OnBusy, SendMessage, Status, Thread, Threads, Time, Timers};

use super::{Connection, Listing, OutputFormat, print, print_json, with_suggestion};
use crate::status_text::{self, Related};
use crate::table::{BOLD, RED, Table, YELLOW, one_line, styled, terminal_width};
use crate::time_format;

/// Number of children that are requested.
const CHILDREN_REQUESTED: usize = 1000;
/// Maximum number of children that are shown.
const CHILDREN_SHOWN: usize = 8;
/// Number of timers that are requested.
const TIMERS_REQUESTED: usize = 1000;

/// Subcommands of `rap threads`.
#[derive(Subcommand)]
pub enum Command {
    /// List threads, oldest first.
    #[command(after_help = "Example: rap threads ls --status needs-you")]
    Ls {
        /// Only threads with this status.
        #[arg(long)]
        status: Option<Status>,
        /// Only children of this thread.
        #[arg(long, value_name = "THREAD")]
        parent: Option<String>,
        /// Number of rows and output format.
        #[command(flatten)]
        listing: Listing,
    },
    /// Create a thread, and send it a first message if one is given.
    #[command(after_help = "Example: rap threads new \"Good morning\" --wait")]
    New {
        /// First message; - reads it from stdin.
        text: Option<String>,
        /// Id of the thread [default: generated].
        #[arg(long)]
        id: Option<String>,
        /// Name of the agent [default: the first one in the configuration].
        #[arg(long)]
        agent: Option<String>,
        /// Title of the thread.
        #[arg(long)]
        title: Option<String>,
        /// Print the agent's messages until it is idle, instead of the id of the thread.
        #[arg(long, requires = "text")]
        wait: bool,
    },
    /// Show the status of a thread and what it waits for.
    Show {
        /// Id of the thread.
        thread: String,
        /// Output format.
        #[command(flatten)]
        output: OutputFormat,
    },
    /// Print the history of a thread, then follow it.
    #[command(after_help = "Example: rap threads tail t019 --once")]
    Tail {
        /// Id of the thread.
        thread: String,
        /// Begin after this entry.
        #[arg(long, value_name = "SEQ", default_value_t = 0)]
        after: u64,
        /// Exit after the existing history.
        #[arg(long)]
        once: bool,
        /// Output format.
        #[command(flatten)]
        output: OutputFormat,
    },
    /// Send a message to a thread.
    #[command(after_help = "Example: rap threads send t019 \"What is new?\" --wait")]
    Send {
        /// Id of the thread.
        thread: String,
        /// Message; - reads it from stdin.
        text: String,
        /// What to do if the thread is busy.
        #[arg(long, default_value = "join")]
        on_busy: OnBusy,
        /// Print the agent's messages until it is idle.
        #[arg(long)]
        wait: bool,
    },
    /// Interrupt a thread: cancel its open calls and discard the answer in progress.
    Interrupt {
        /// Id of the thread.
        thread: String,
    },
    /// Close a thread and its descendants permanently.
    Close {
        /// Id of the thread.
        thread: String,
    },
    /// Create a thread that begins with the history of another one.
    #[command(after_help = "Example: rap threads fork t019 --at 12")]
    Fork {
        /// Id of the thread.
        thread: String,
        /// Last entry that the fork inherits [default: the last entry]. If a call has no result there, the fork ends at
        /// the nearest earlier entry at which every call has a result.
        #[arg(long)]
        at: Option<u32>,
        /// Output format.
        #[command(flatten)]
        output: OutputFormat,
    },
    /// Continue a thread that failed or is paused.
    Resume {
        /// Id of the thread.
        thread: String,
    },
}

/// Runs the command.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    match command {
        Command::Ls { status, parent, listing } => {
            let filters = [("status", status.map(Status::as_str)), ("parent", parent.as_deref())];
            listing.show::<Threads>(&client, &filters, list).await
        }
        Command::New { text, id, agent, title, wait } => {
            let text = text.map(text_or_stdin).transpose()?;
            let new = CreateThread { id, agent, title, message: text, user_id: None };
            create(&client, &new, wait).await
        }
        Command::Show { thread, output } => show(&client, &thread, output).await,
        Command::Tail { thread, after, once, output } => {
            with_suggestion(&client, &thread, client.thread(&thread).await).await?;
            tail::tail(&client, &thread, tail::Tail { after, once, json: output.json }).await
        }
        Command::Send { thread, text, on_busy, wait } => {
            send(&client, &thread, &text_or_stdin(text)?, on_busy, wait).await
        }
        Command::Interrupt { thread } => {
            report(&client, &thread, client.interrupt(&thread).await, "interrupted").await
        }
        Command::Close { thread } => report(&client, &thread, client.close(&thread).await, "closed").await,
        Command::Fork { thread, at, output } => fork(&client, &thread, at, output).await,
        Command::Resume { thread } => report(&client, &thread, client.resume(&thread).await, "resumed").await,
    }
}

/// Returns the text, or all of stdin for `-`.
fn text_or_stdin(text: String) -> anyhow::Result<String> {
    if text != "-" {
        return Ok(text);
    }
    let mut read = String::new();
    std::io::stdin().read_to_string(&mut read).context("cannot read stdin")?;
    Ok(read.trim_end().to_owned())
}

async fn fork(client: &Client, thread: &str, at: Option<u32>, output: OutputFormat) -> anyhow::Result<()> {
    let forked = with_suggestion(client, thread, client.fork(thread, &Fork { at }).await).await?;
    if output.json {
        return print_json(&client.get_json(&["v1", "threads", &forked.id], &[]).await?);
    }
    Ok(print(&format!("{}\n", one_line(&forked.id)))?)
}

fn list(threads: &[Thread]) -> anyhow::Result<()> {
    if threads.is_empty() {
        return Ok(print("no threads; start one with: rap chat\n")?);
    }
    let now = Time::now();
    let mut table = Table::new(["ID", "STATUS", "AGENT", "UPDATED", "TITLE", "WAITING FOR"]);
    for thread in threads {
        let title = thread.title.clone().unwrap_or_default();
        let updated = time_format::relative(thread.updated_at, now);
        let status = status_text::word(thread.status).to_owned();
        let (id, agent) = (thread.id.clone(), thread.agent.clone());
        table.row([id, status, agent, updated, title, status_text::waiting_for(thread, now)]);
        match thread.status {
            Status::Failed => table.style(1, RED),
            Status::NeedsYou => table.style(1, YELLOW),
            _ => {}
        }
    }
    Ok(print(&table.render(terminal_width()))?)
}

async fn create(client: &Client, new: &CreateThread, wait: bool) -> anyhow::Result<()> {
    let thread = client.create_thread(new).await?;
    match &new.message {
        Some(text) if wait => tail::answer(client, &thread.id, 0, text).await,
        _ => Ok(print(&format!("{}\n", one_line(&thread.id)))?),
    }
}

async fn show(client: &Client, id: &str, output: OutputFormat) -> anyhow::Result<()> {
    if output.json {
        let answer = client.get_json(&["v1", "threads", id], &[]).await;
        return print_json(&with_suggestion(client, id, answer).await?);
    }
    let thread = with_suggestion(client, id, client.thread(id).await).await?;
    let related = fetch_related(client, &thread).await?;
    let now = Time::now();
    let title = thread.title.as_ref().map_or(String::new(), |title| format!(" “{}”", one_line(title)));
    let child =
        thread.parent.as_ref().map_or(String::new(), |parent| format!(", a child of {}", one_line(parent)));
    let mut text = format!(
        "{}{title}\nagent {}, {}, created {}{child}\n",
        styled(BOLD, id),
        one_line(&thread.agent),
        turns(thread.turn),
        time_format::relative(thread.created_at, now)
    );
    for (number, sentence) in status_text::describe(&thread, &related, now).iter().enumerate() {
        let indent = if number == 0 { "" } else { "  " };
        text.push_str(&format!("{indent}{}\n", one_line(sentence)));
    }
    Ok(print(&text)?)
}

/// Fetches the related objects that the thread has.
async fn fetch_related(client: &Client, thread: &Thread) -> anyhow::Result<Related> {
    let id = thread.id.as_str();
    let mut related = Related::default();
    if thread.status == Status::NeedsYou {
        related.questions = client.list::<Inbox>(&[], None).await?.items;
        related.questions.retain(|question| question.thread_id == id);
    }
    if thread.children > 0 {
        let children = client.list::<Threads>(&[("parent", id)], Some(CHILDREN_REQUESTED)).await?.threads;
        let open = children.into_iter().filter(|child| child.status != Status::Closed);
        related.children = open.take(CHILDREN_SHOWN).collect();
    }
    if thread.subscriptions.iter().any(|subscription| subscription.tool == texts::SCHEDULE) {
        let timers = client.list::<Timers>(&[], Some(TIMERS_REQUESTED)).await?.timers;
        let timers = timers.into_iter().filter(|timer| timer.thread_id == id);
        related.timers = timers.filter_map(|timer| Some((timer.call_id?, timer.at))).collect();
    }
    Ok(related)
}

async fn send(client: &Client, id: &str, text: &str, on_busy: OnBusy, wait: bool) -> anyhow::Result<()> {
    // Only entries after the current end of the history are printed.
    let before = if wait { tail::last_entry(client, id).await } else { Ok(0) };
    let before = with_suggestion(client, id, before).await?;
    let message = SendMessage { text: text.to_owned(), on_busy };
    let sent = client.send_message(id, &message, &IdempotencyKey::random()).await;
    let turn = with_suggestion(client, id, sent).await?.turn;
    if wait {
        return tail::answer(client, id, before, text).await;
    }
    Ok(print(&format!("sent in turn {turn}; follow it with: rap threads tail {id}\n"))?)
}

async fn report(client: &Client, id: &str, outcome: Result<Done, Error>, done: &str) -> anyhow::Result<()> {
    with_suggestion(client, id, outcome).await?;
    Ok(print(&format!("{done} thread {id}\n"))?)
}

fn turns(count: u64) -> String {
    if count == 1 { "1 turn".into() } else { format!("{count} turns") }
}
