//! `rap threads`: what agents are at, and what they are told.

mod tail;

use std::io::Read;

use anyhow::Context;
use clap::{Subcommand, ValueEnum};
use rap_agent::words;
use serde_json::{Value, json};

use super::{Connection, Listing, Shape, known, print, print_json};
use crate::age;
use crate::api::{Status, Thread};
use crate::client::{Client, idempotency_key};
use crate::table::{BOLD, RED, Table, YELLOW, one_line, styled, terminal_width};
use crate::waits::{self, Around};

/// How many children are asked for, and how many are shown.
const CHILDREN: (&str, usize) = ("1000", 8);

/// What to do with threads.
#[derive(Subcommand)]
pub enum Command {
    /// List threads, the oldest first.
    #[command(after_help = "Example: rap threads ls --status needs-you")]
    Ls {
        /// Only those that are at this.
        #[arg(long)]
        status: Option<StatusName>,
        /// Only the children of this thread.
        #[arg(long, value_name = "THREAD")]
        parent: Option<String>,
        /// How many, and how they are shown.
        #[command(flatten)]
        listing: Listing,
    },
    /// Make a thread, and say something in it if there is something to say.
    #[command(after_help = "Example: rap threads new \"Good morning\" --wait")]
    New {
        /// What to say first; - reads it from stdin.
        text: Option<String>,
        /// An id of your own, instead of a made-up one.
        #[arg(long)]
        id: Option<String>,
        /// Which agent of the configuration; its first one if not given.
        #[arg(long)]
        agent: Option<String>,
        /// What to call it.
        #[arg(long)]
        title: Option<String>,
        /// Print what the agent says until it comes to rest, instead of the thread's id.
        #[arg(long, requires = "text")]
        wait: bool,
    },
    /// Say in words what a thread is at and what it waits on.
    Show {
        /// The thread.
        thread: String,
        /// How it is shown.
        #[command(flatten)]
        shape: Shape,
    },
    /// Print a thread's history, and what happens in it from now on.
    #[command(after_help = "Example: rap threads tail t019 --once")]
    Tail {
        /// The thread.
        thread: String,
        /// Begin behind this entry.
        #[arg(long, value_name = "SEQ", default_value_t = 0)]
        after: u64,
        /// End when everything that happened so far has been told.
        #[arg(long)]
        once: bool,
        /// How it is shown.
        #[command(flatten)]
        shape: Shape,
    },
    /// Say something to an agent.
    #[command(after_help = "Example: rap threads send t019 \"What is new?\" --wait")]
    Send {
        /// The thread.
        thread: String,
        /// What to say; - reads it from stdin.
        text: String,
        /// What to do if the agent is busy.
        #[arg(long, default_value = "join")]
        on_busy: OnBusy,
        /// Print what the agent says until it comes to rest.
        #[arg(long)]
        wait: bool,
    },
    /// Stop what an agent does: its calls are cancelled, its answer is dropped.
    Interrupt {
        /// The thread.
        thread: String,
    },
    /// Close a thread and its children for good.
    Close {
        /// The thread.
        thread: String,
    },
    /// Make a thread that begins with the history of another one.
    #[command(after_help = "Example: rap threads fork t019 --at 12")]
    Fork {
        /// The thread.
        thread: String,
        /// The last entry that the fork inherits; the last one of all if none is given. Where calls lack their results,
        /// it is the nearest before that.
        #[arg(long)]
        at: Option<u64>,
        /// How to print it.
        #[command(flatten)]
        shape: Shape,
    },
    /// Let a thread go on that has failed or is paused.
    Resume {
        /// The thread.
        thread: String,
    },
}

/// What a thread can be at.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum StatusName {
    /// It takes nothing any more.
    Closed,
    /// The model could not be asked.
    Failed,
    /// The model is being asked.
    Running,
    /// Somebody has to answer.
    #[value(alias = "needs_you")]
    NeedsYou,
    /// It waits for calls.
    Waiting,
    /// It waits for somebody to say something.
    Idle,
}

impl StatusName {
    fn parameter(self) -> &'static str {
        match self {
            StatusName::Closed => "closed",
            StatusName::Failed => "failed",
            StatusName::Running => "running",
            StatusName::NeedsYou => "needs_you",
            StatusName::Waiting => "waiting",
            StatusName::Idle => "idle",
        }
    }
}

/// What becomes of a message to a busy agent.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum OnBusy {
    /// It is answered at once; calls go on.
    Join,
    /// What the agent does is stopped first.
    Interrupt,
    /// It waits until the agent has come to rest.
    Enqueue,
    /// It is refused.
    Reject,
}

impl OnBusy {
    fn word(self) -> &'static str {
        match self {
            OnBusy::Join => "join",
            OnBusy::Interrupt => "interrupt",
            OnBusy::Enqueue => "enqueue",
            OnBusy::Reject => "reject",
        }
    }
}

/// Does it.
pub async fn run(command: Command, connection: Connection) -> anyhow::Result<()> {
    let client = connection.client()?;
    match command {
        Command::Ls { status, parent, listing } => {
            let filters = [("status", status.map(StatusName::parameter)), ("parent", parent.as_deref())];
            listing.show(&client, "threads", &filters, list).await
        }
        Command::New { text, id, agent, title, wait } => {
            let text = text.map(given).transpose()?;
            let new = json!({"id": id, "agent": agent, "title": title});
            make(&client, &new, text, wait).await
        }
        Command::Show { thread, shape } => show(&client, &thread, shape).await,
        Command::Tail { thread, after, once, shape } => {
            known(&client, &thread, client.thread(&thread).await).await?;
            tail::tail(&client, &thread, tail::Tail { after, once, json: shape.json }).await
        }
        Command::Send { thread, text, on_busy, wait } => {
            send(&client, &thread, &given(text)?, on_busy, wait).await
        }
        Command::Interrupt { thread } => order(&client, &thread, "interrupt", "is interrupted").await,
        Command::Close { thread } => order(&client, &thread, "close", "is closed").await,
        Command::Fork { thread, at, shape } => fork(&client, &thread, at, shape).await,
        Command::Resume { thread } => order(&client, &thread, "resume", "goes on").await,
    }
}

/// The text that was given, or all of stdin.
fn given(text: String) -> anyhow::Result<String> {
    if text != "-" {
        return Ok(text);
    }
    let mut read = String::new();
    std::io::stdin().read_to_string(&mut read).context("can not read stdin")?;
    Ok(read.trim_end().to_owned())
}

async fn fork(client: &Client, thread: &str, at: Option<u64>, shape: Shape) -> anyhow::Result<()> {
    let forked = client.post(&["v1", "threads", thread, "fork"], &json!({"at": at})).await;
    let forked = known(client, thread, forked).await?;
    if shape.json {
        return print_json(&forked);
    }
    Ok(print(&format!("{}\n", forked["id"].as_str().unwrap_or_default()))?)
}

fn list(threads: &[Thread]) -> anyhow::Result<()> {
    if threads.is_empty() {
        return Ok(print("there are no such threads; rap chat makes one\n")?);
    }
    let now = age::now();
    let mut table = Table::new(["ID", "STATUS", "AGENT", "UPDATED", "TITLE", "WAITS FOR"]);
    for thread in threads {
        let title = thread.title.clone().unwrap_or_default();
        let updated = age::ago(thread.updated_at, now);
        let status = thread.status.word().to_owned();
        let (id, agent) = (thread.id.clone(), thread.agent.clone());
        table.row([id, status, agent, updated, title, waits::brief(thread, now)]);
        match thread.status {
            Status::Failed => table.style(1, RED),
            Status::NeedsYou => table.style(1, YELLOW),
            _ => {}
        }
    }
    Ok(print(&table.render(terminal_width()))?)
}

async fn make(client: &Client, new: &Value, text: Option<String>, wait: bool) -> anyhow::Result<()> {
    let mut new = new.clone();
    if let Value::Object(fields) = &mut new {
        fields.retain(|_, value| !value.is_null());
        if let Some(text) = &text {
            fields.insert("message".into(), json!(text));
        }
    }
    let thread = client.create_thread(&new).await?;
    match text {
        Some(text) if wait => tail::answer(client, &thread.id, 0, &text).await,
        _ => Ok(print(&format!("{}\n", thread.id))?),
    }
}

async fn show(client: &Client, id: &str, shape: Shape) -> anyhow::Result<()> {
    let answer = known(client, id, client.get(&["v1", "threads", id], &[]).await).await?;
    if shape.json {
        return print_json(&answer);
    }
    let thread: Thread = client.typed(answer)?;
    let around = around(client, &thread).await?;
    let now = age::now();
    let title = thread.title.as_ref().map_or(String::new(), |title| format!(" “{}”", one_line(title)));
    let child = thread.parent.as_ref().map_or(String::new(), |parent| format!(", a child of {parent}"));
    let mut text = format!(
        "{}{title}\nagent {}, {}, made {}{child}\n",
        styled(BOLD, id),
        thread.agent,
        turns(thread.turn),
        age::ago(thread.created_at, now)
    );
    for (number, sentence) in waits::sentences(&thread, &around, now).iter().enumerate() {
        let indent = if number == 0 { "" } else { "  " };
        text.push_str(&format!("{indent}{}\n", one_line(sentence)));
    }
    Ok(print(&text)?)
}

/// What is told about a thread besides itself; asked for only where there is something.
async fn around(client: &Client, thread: &Thread) -> anyhow::Result<Around> {
    let id = thread.id.as_str();
    let mut around = Around::default();
    if thread.status == Status::NeedsYou {
        around.questions = client.inbox().await?;
        around.questions.retain(|question| question.thread_id == id);
    }
    if thread.children > 0 {
        let children = client.threads(&[("parent", id), ("limit", CHILDREN.0)]).await?.threads;
        let open = children.into_iter().filter(|child| child.status != Status::Closed);
        around.children = open.take(CHILDREN.1).collect();
    }
    if thread.subscriptions.iter().any(|held| held.tool == words::SCHEDULE) {
        let timers = client.timers().await?.into_iter().filter(|timer| timer.thread_id == id);
        around.timers = timers.filter_map(|timer| Some((timer.call_id?, timer.at))).collect();
    }
    Ok(around)
}

async fn send(client: &Client, id: &str, text: &str, on_busy: OnBusy, wait: bool) -> anyhow::Result<()> {
    // Where the history stands before, so that only what follows is told.
    let before = if wait { tail::last_entry(client, id).await } else { Ok(0) };
    let before = known(client, id, before).await?;
    let body = json!({"text": text, "on_busy": on_busy.word()});
    let turn = known(client, id, client.say(id, &body, &idempotency_key()).await).await?;
    if wait {
        return tail::answer(client, id, before, text).await;
    }
    Ok(print(&format!("said in turn {}; follow it with: rap threads tail {id}\n", turn["turn"]))?)
}

async fn order(client: &Client, id: &str, order: &str, done: &str) -> anyhow::Result<()> {
    known(client, id, client.order(id, order).await).await?;
    Ok(print(&format!("{id} {done}\n"))?)
}

fn turns(count: u64) -> String {
    if count == 1 { "1 turn".into() } else { format!("{count} turns") }
}
