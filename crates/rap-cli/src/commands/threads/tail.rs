//! Following a thread: for as long as somebody looks, or until the agent has come to rest.

use anyhow::{Context, bail};
use serde_json::Value;

use super::print;
use crate::api::{Asked, Item, Status};
use crate::client::{Client, ENTRY, Error, Event, Follower, News};
use crate::rest::Rest;
use crate::table::{DIM, one_line, plain, styled};
use crate::transcript::Transcript;

pub(super) struct Tail {
    pub after: u64,
    pub once: bool,
    pub json: bool,
}

/// Prints what has happened, then what happens.
pub(super) async fn tail(client: &Client, id: &str, tail: Tail) -> anyhow::Result<()> {
    let follower = Follower::new(client.clone(), id, tail.after);
    if tail.json { entries(follower, tail.once).await } else { lines(follower, tail.once).await }
}

async fn lines(mut follower: Follower, once: bool) -> anyhow::Result<()> {
    let mut transcript = Transcript::default();
    loop {
        let news = follower.next().await?;
        tell(&news);
        match news {
            News::Event(Event::Entry(entry)) => {
                for line in transcript.lines(&entry) {
                    print(&format!("{}\n", line.render()))?;
                }
            }
            News::Event(Event::Status(news)) => {
                let why = news.why.map_or(String::new(), |why| format!(": {}", one_line(&why)));
                print(&format!("{}\n", styled(DIM, &format!("        ({}{why})", news.status.word()))))?;
                if once || news.status == Status::Closed {
                    return Ok(());
                }
            }
            News::Event(Event::Question(question)) => {
                let text = match question.asked {
                    Asked::Choice { prompt, choices, .. } => format!("{prompt} {}", choices.join(", ")),
                    Asked::SignIn { auth_url } => format!("sign in: {auth_url}"),
                };
                print(&format!("asks    {}\n", one_line(&text)))?;
            }
            _ => {}
        }
    }
}

/// The entries as the API gives them, one on each line.
async fn entries(mut follower: Follower, once: bool) -> anyhow::Result<()> {
    loop {
        let news = follower.next_as_sent().await?;
        tell(&news);
        let News::Event(event) = news else { continue };
        if event.name == ENTRY {
            let entry: Value =
                serde_json::from_str(&event.data).context("an entry of the stream is no JSON")?;
            print(&format!("{entry}\n"))?;
        } else if let Some(Event::Status(news)) = Event::read(&event)
            && (once || news.status == Status::Closed)
        {
            return Ok(());
        }
    }
}

/// Tells a person what is no event.
fn tell<E>(news: &News<E>) {
    if let Some(words) = news.words() {
        eprintln!("{words}");
    }
}

/// The place of the last entry. Places have no gaps, so it is found by bisection: the entries themselves may be many
/// and large.
pub(super) async fn last_entry(client: &Client, id: &str) -> Result<u64, Error> {
    let (mut entry, mut none) = (0, 1);
    while none <= u64::from(u32::MAX) && is_entry(client, id, none).await? {
        (entry, none) = (none, none * 2);
    }
    while none - entry > 1 {
        let middle = entry + (none - entry) / 2;
        if is_entry(client, id, middle).await? {
            entry = middle;
        } else {
            none = middle;
        }
    }
    Ok(entry)
}

async fn is_entry(client: &Client, id: &str, place: u64) -> Result<bool, Error> {
    match client.history(id, place - 1, 1).await {
        Ok(entries) => Ok(!entries.is_empty()),
        Err(Error::TooLong { .. }) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Prints what the agent says, from the answer to `said` on, until it comes to rest. What is no answer goes to stderr.
pub(super) async fn answer(client: &Client, id: &str, after: u64, said: &str) -> anyhow::Result<()> {
    let mut follower = Follower::new(client.clone(), id, after);
    let mut rest = Rest::expecting(said);
    loop {
        let news = follower.next().await?;
        tell(&news);
        let event = match news {
            News::Event(event) => event,
            News::Back => {
                rest.start_over();
                continue;
            }
            News::LeftOut(_) | News::Lost => continue,
        };
        rest.see(&event);
        match event {
            Event::Entry(entry) => match entry.item {
                Item::Assistant { text, .. } if !text.is_empty() => print(&format!("{}\n", plain(&text)))?,
                Item::Notice { text } => eprintln!("{}", plain(&text)),
                _ => {}
            },
            Event::Question(question) => match question.asked {
                Asked::Choice { prompt, choices, .. } => eprintln!(
                    "{} {}; answer with: rap inbox answer {id} {} CHOICE",
                    one_line(&prompt),
                    choices.join(", "),
                    question.call_id
                ),
                Asked::SignIn { auth_url } => eprintln!("sign in: {auth_url}"),
            },
            Event::Status(news) if rest.is_reached() => match (news.status, news.why) {
                (Status::Failed, why) => bail!("the agent failed: {}", why.unwrap_or_default()),
                (Status::NeedsYou, why) => bail!("paused: {}", why.unwrap_or_default()),
                _ => return Ok(()),
            },
            _ => {}
        }
    }
}
