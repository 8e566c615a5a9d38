//! Follows a thread until it is closed, or until the agent is idle.

use anyhow::{Context, bail};
use rap_api::client::{Client, Error, Follower, RawEvent, Update};
use rap_api::{Item, QuestionKind, Status, ThreadEvent};
use rap_protocol::visible;
use serde_json::Value;

use super::print;
use crate::idle::IdleDetector;
use crate::status_text;
use crate::table::{DIM, one_line, plain, styled};
use crate::transcript::Transcript;

pub(super) struct Tail {
    /// Sequence number of the entry to begin after.
    pub after: u64,
    /// Exit after the existing history.
    pub once: bool,
    pub json: bool,
}

/// Prints the history, then follows the thread.
pub(super) async fn tail(client: &Client, id: &str, tail: Tail) -> anyhow::Result<()> {
    if tail.json {
        entries(client.follow_raw(id, tail.after), tail.once).await
    } else {
        lines(client.follow(id, tail.after), tail.once).await
    }
}

async fn lines(mut follower: Follower, once: bool) -> anyhow::Result<()> {
    let mut transcript = Transcript::default();
    loop {
        let update = follower.next().await?;
        print_update(&update);
        match update {
            Update::Event(ThreadEvent::Entry(entry)) => {
                for line in transcript.lines(&entry) {
                    print(&format!("{}\n", line.render()))?;
                }
            }
            Update::Event(ThreadEvent::Status(update)) => {
                let why = update.why.map_or(String::new(), |why| format!(": {}", one_line(&why)));
                print(&format!(
                    "{}\n",
                    styled(DIM, &format!("        ({}{why})", status_text::label(update.status)))
                ))?;
                if once || update.status == Status::Closed {
                    return Ok(());
                }
            }
            Update::Event(ThreadEvent::Question(question)) => {
                let text = match question.kind {
                    QuestionKind::Choice { prompt, choices, .. } => {
                        format!("{prompt} {}", choices.join(", "))
                    }
                    QuestionKind::SignIn { auth_url } => format!("sign in: {auth_url}"),
                    QuestionKind::Unknown => continue,
                };
                print(&format!("asks    {}\n", one_line(&text)))?;
            }
            _ => {}
        }
    }
}

/// Prints the entries as the API gives them, one per line.
async fn entries(mut follower: Follower<RawEvent>, once: bool) -> anyhow::Result<()> {
    loop {
        let update = follower.next().await?;
        print_update(&update);
        let Update::Event(event) = update else { continue };
        if event.name == ThreadEvent::ENTRY {
            let entry: Value =
                serde_json::from_str(&event.data).context("an entry of the event stream is not JSON")?;
            print(&format!("{}\n", visible::json(&entry.to_string())))?;
        } else if let Some(ThreadEvent::Status(update)) = ThreadEvent::parse(&event.name, &event.data)
            && (once || update.status == Status::Closed)
        {
            return Ok(());
        }
    }
}

/// Prints updates other than events to stderr.
fn print_update<E>(update: &Update<E>) {
    if let Some(message) = update.message() {
        eprintln!("{}", plain(&message));
    }
}

/// Returns the sequence number of the last entry, 0 if there is none. Sequence numbers have no gaps, so a binary search
/// finds it without reading all entries, which may be many and large.
pub(in crate::commands) async fn last_entry(client: &Client, id: &str) -> Result<u64, Error> {
    let (mut entry, mut none) = (0, 1);
    while none <= u64::from(u32::MAX) && has_entry(client, id, none).await? {
        (entry, none) = (none, none * 2);
    }
    while none - entry > 1 {
        let middle = entry + (none - entry) / 2;
        if has_entry(client, id, middle).await? {
            entry = middle;
        } else {
            none = middle;
        }
    }
    Ok(entry)
}

async fn has_entry(client: &Client, id: &str, seq: u64) -> Result<bool, Error> {
    match client.history(id, seq - 1, 1).await {
        Ok(page) => Ok(!page.entries.is_empty()),
        Err(Error::TooLong { .. }) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Prints what the agent says after the entry `after`, until it has answered `message` and is idle. Notices and questions
/// go to stderr.
pub(super) async fn answer(client: &Client, id: &str, after: u64, message: &str) -> anyhow::Result<()> {
    let mut follower = client.follow(id, after);
    let mut idle = IdleDetector::expecting(message);
    loop {
        let update = follower.next().await?;
        print_update(&update);
        let event = match update {
            Update::Event(event) => event,
            Update::Reconnected => {
                idle.reconnected();
                continue;
            }
            Update::Skipped(_) | Update::Disconnected => continue,
        };
        idle.observe(&event);
        match event {
            ThreadEvent::Entry(entry) => match entry.item {
                Item::Assistant { text, .. } if !text.is_empty() => print(&format!("{}\n", plain(&text)))?,
                Item::Notice { text } => eprintln!("{}", plain(&text)),
                _ => {}
            },
            ThreadEvent::Question(question) => match question.kind {
                QuestionKind::Choice { prompt, choices, .. } => eprintln!(
                    "{} {}; answer with: rap inbox answer {id} {} CHOICE",
                    one_line(&prompt),
                    one_line(&choices.join(", ")),
                    one_line(&question.call_id)
                ),
                QuestionKind::SignIn { auth_url } => eprintln!("sign in: {}", one_line(&auth_url)),
                QuestionKind::Unknown => {}
            },
            ThreadEvent::Status(update) if idle.is_idle() => match (update.status, update.why) {
                (Status::Failed, why) => {
                    bail!(
                        "the agent failed: {}; retry with: rap threads resume {id}",
                        why.unwrap_or_default()
                    )
                }
                (Status::NeedsYou, why) => {
                    let why = why.unwrap_or_default();
                    let why = status_text::with_status_prefix(Status::NeedsYou, &why);
                    bail!("the agent is {why}; continue with: rap threads resume {id}")
                }
                _ => return Ok(()),
            },
            _ => {}
        }
    }
}
