//! `rap threads`: lists, creates and controls threads.

mod tail;

pub(super) use tail::last_entry;

use std::io::Read;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use rap_agent::texts;
use rap_api::client::{Client, Error, IdempotencyKey};
use rap_api::{
    CreateThread, Done, Fork, Inbox, Item, OnBusy, SendMessage, Status, Thread, Threads, Time, Timers, Usage,
};
use serde_json::{Value, json};

use super::{Connection, Listing, OutputFormat, print, print_json, with_suggestion};
use crate::config::parse_duration;
use crate::status_text::{self, Related};
use crate::table::{BOLD, RED, Table, YELLOW, one_line, styled, terminal_width};
use crate::time_format;

/// Number of entries among which `rap threads show` looks for the last answer.
const NEWEST: u64 = 20;

/// Number of children that are requested.
const CHILDREN_REQUESTED: usize = 1000;
/// Maximum number of children that are shown.
const CHILDREN_SHOWN: usize = 8;
/// Number of timers that are requested.
const TIMERS_REQUESTED: usize = 1000;

/// Subcommands of `rap threads`.
#[derive(Subcommand)]
pub enum Command {
    /// List threads: open threads first, and in each group the newest first. Closed children are listed only with
    /// --all.
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
        /// Waiting for the answer.
        #[command(flatten)]
        wait: Wait,
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
        /// Handling of the message if the thread is busy.
        #[arg(long, default_value = "join")]
        on_busy: OnBusy,
        /// Waiting for the answer.
        #[command(flatten)]
        wait: Wait,
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
    /// Delete a closed session: a root thread, its descendants and everything that belongs to them. Forks keep their
    /// history.
    Delete {
        /// Id of the root thread.
        thread: String,
    },
    /// Create a thread that begins with the history of another one.
    #[command(after_help = "Example: rap threads fork t019 --at 12")]
    Fork {
        /// Id of the thread.
        thread: String,
        /// Last entry to copy [default: the last one]. If a call has no result at that point, the nearest earlier entry at
        /// which every call has a result.
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

/// Flags of the commands that can wait for the agent's answer.
#[derive(Args, Clone, Copy)]
pub struct Wait {
    /// Print the agent's messages until it is idle.
    #[arg(long, requires = "text")]
    wait: bool,
    /// Stop waiting after this time, such as 30s or 10m, with exit code 1. The agent keeps running.
    #[arg(long, value_name = "TIME", requires = "wait", value_parser = wait_time)]
    timeout: Option<Duration>,
}

impl Wait {
    /// Returns the time to wait; `None` if the command does not wait, `Some(None)` if it waits without limit.
    fn limit(self) -> Option<Option<Duration>> {
        self.wait.then_some(self.timeout)
    }
}

fn wait_time(text: &str) -> Result<Duration, &'static str> {
    let time = parse_duration(text).filter(|time| !time.is_zero());
    time.ok_or("expected a time such as 30s, 10m or 2h")
}

/// Waits for the agent's answer to a message, within the limit.
async fn wait_for_answer(
    client: &Client,
    id: &str,
    after: u64,
    text: &str,
    limit: Option<Duration>,
) -> anyhow::Result<()> {
    let answer = tail::answer(client, id, after, text);
    let Some(limit) = limit else { return answer.await };
    tokio::time::timeout(limit, answer).await.unwrap_or_else(|_| {
        let (limit, id) = (time_format::long_duration(limit), one_line(id));
        bail!("the agent is not idle after {limit}; it keeps running: follow it with: rap threads tail {id}")
    })
}

/// Runs the command.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    match command {
        Command::Ls { status, parent, listing } => {
            let filters = [("status", status.map(Status::as_str)), ("parent", parent.as_deref())];
            list_threads(&client, &filters, listing).await
        }
        Command::New { text, id, agent, title, wait } => {
            let text = text.map(text_or_stdin).transpose()?;
            let new = CreateThread { id, agent, title, message: text, ..CreateThread::default() };
            create(&client, &new, wait.limit()).await
        }
        Command::Show { thread, output } => show(&client, &thread, output).await,
        Command::Tail { thread, after, once, output } => {
            with_suggestion(&client, &thread, client.thread(&thread).await).await?;
            tail::tail(&client, &thread, tail::Tail { after, once, json: output.json }).await
        }
        Command::Send { thread, text, on_busy, wait } => {
            send(&client, &thread, &text_or_stdin(text)?, on_busy, wait.limit()).await
        }
        Command::Interrupt { thread } => {
            report(&client, &thread, client.interrupt(&thread).await, "interrupted thread").await
        }
        Command::Close { thread } => {
            report(&client, &thread, client.close(&thread).await, "closed thread").await
        }
        Command::Delete { thread } => {
            report(&client, &thread, client.delete_session(&thread).await, "deleted session").await
        }
        Command::Fork { thread, at, output } => fork(&client, &thread, at, output).await,
        Command::Resume { thread } => {
            report(&client, &thread, client.resume(&thread).await, "resumed thread").await
        }
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

/// Lists threads: open ones first, each part with the newest first. Without `--all`, closed children are left out, unless a
/// filter asks for them.
async fn list_threads(
    client: &Client,
    filters: &[(&str, Option<&str>)],
    listing: Listing,
) -> anyhow::Result<()> {
    let given: Vec<(&str, &str)> =
        filters.iter().filter_map(|(name, value)| Some((*name, (*value)?))).collect();
    let (limit, everything) = (listing.rows(), listing.all || !given.is_empty());
    let mut threads: Vec<Value> = Vec::new();
    let mut more = false;
    // Open threads of each status, then closed ones: a listing of all would have to pass many closed ones.
    let statuses = Status::ALL.into_iter().filter(|status| *status != Status::Closed);
    let parts: Vec<(Option<&str>, bool)> = match given.iter().any(|(name, _)| *name == "status") {
        true => vec![(None, false)],
        false => statuses
            .map(|status| (Some(status.as_str()), false))
            .chain([(Some("closed"), !everything)])
            .collect(),
    };
    for (status, roots) in parts {
        let room = limit
            .map(|limit| if status == Some("closed") { limit.saturating_sub(threads.len()) } else { limit });
        if room == Some(0) && !threads.is_empty() {
            break;
        }
        let mut filters = given.clone();
        filters.push(("order", "newest"));
        filters.extend(status.map(|status| ("status", status)));
        filters.extend(roots.then_some(("roots", "true")));
        let mut page = client.list_json::<Threads>(&filters, room).await?;
        more |= page["next_cursor"].is_string();
        match page.get_mut("threads").map(Value::take) {
            Some(Value::Array(rows)) => threads.extend(rows),
            _ => bail!("the server sent no list of threads; is --url that of a runtime?"),
        }
    }
    // Ids and times sort like the times of creation.
    let created = |thread: &Value| thread["created_at"].as_str().map(str::to_owned);
    threads.sort_by_key(|thread| (thread["status"] == "closed", std::cmp::Reverse(created(thread))));
    if let Some(limit) = limit.filter(|limit| *limit < threads.len()) {
        more = true;
        threads.truncate(limit);
    }
    if listing.output.json {
        return print_json(&json!({"threads": threads, "next_cursor": null}));
    }
    list(&serde_json::from_value::<Vec<Thread>>(Value::Array(threads))?)?;
    if more {
        eprintln!("there are more rows; use --all to list them");
    }
    Ok(())
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
        let status = status_text::label(thread.status).to_owned();
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

async fn create(client: &Client, new: &CreateThread, wait: Option<Option<Duration>>) -> anyhow::Result<()> {
    let thread = client.create_thread(new).await?;
    match (&new.message, wait) {
        (Some(text), Some(limit)) => wait_for_answer(client, &thread.id, 0, text, limit).await,
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
    // An older runtime does not know the session's usage.
    let session = client.usage(id).await.ok().filter(|all| all.threads > 1);
    let session = session.map_or(String::new(), |all| {
        format!("session of {} threads: {}\n", all.threads, status_text::tokens(&all.session))
    });
    let last_turn = if thread.turn > 1 { last_turn(client, id).await } else { None };
    let last_turn =
        last_turn.map_or(String::new(), |usage| format!("last answer: {}\n", status_text::tokens(&usage)));
    let now = Time::now();
    let title = thread.title.as_ref().map_or(String::new(), |title| format!(" “{}”", one_line(title)));
    let child =
        thread.parent.as_ref().map_or(String::new(), |parent| format!(", a child of {}", one_line(parent)));
    let mut text = format!(
        "{}{title}\nagent {}, created {}{child}\n{}\n{last_turn}{session}",
        styled(BOLD, id),
        one_line(&thread.agent),
        time_format::relative(thread.created_at, now),
        status_text::usage(&thread)
    );
    for (number, sentence) in status_text::describe(&thread, &related, now).iter().enumerate() {
        let indent = if number == 0 { "" } else { "  " };
        text.push_str(&format!("{indent}{}\n", one_line(sentence)));
    }
    Ok(print(&text)?)
}

/// Returns the tokens and the cost of the last answer, if it is among the newest entries.
async fn last_turn(client: &Client, id: &str) -> Option<Usage> {
    let last = tail::last_entry(client, id).await.ok()?;
    let newest = client.history(id, last.saturating_sub(NEWEST), NEWEST as usize).await.ok()?;
    newest.entries.into_iter().rev().find_map(|entry| match entry.item {
        Item::Assistant { usage, .. } => usage,
        _ => None,
    })
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

async fn send(
    client: &Client,
    id: &str,
    text: &str,
    on_busy: OnBusy,
    wait: Option<Option<Duration>>,
) -> anyhow::Result<()> {
    // Only entries after the current end of the history are printed.
    let before = if wait.is_some() { tail::last_entry(client, id).await } else { Ok(0) };
    let before = with_suggestion(client, id, before).await?;
    let message = SendMessage { on_busy, ..SendMessage::new(text) };
    let sent = client.send_message(id, &message, &IdempotencyKey::random()).await;
    let turn = with_suggestion(client, id, sent).await?.turn;
    if let Some(limit) = wait {
        return wait_for_answer(client, id, before, text, limit).await;
    }
    Ok(print(&format!("sent in turn {turn}; follow it with: rap threads tail {id}\n"))?)
}

async fn report(client: &Client, id: &str, outcome: Result<Done, Error>, done: &str) -> anyhow::Result<()> {
    with_suggestion(client, id, outcome).await?;
    Ok(print(&format!("{done} {id}\n"))?)
}
