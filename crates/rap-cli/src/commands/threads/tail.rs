//! Following a thread: for as long as somebody looks, or until the agent has come to rest.

use anyhow::bail;
use serde_json::Value;

use super::print;
use crate::api::{Asked, Item, Status};
use crate::client::{Client, Error, Event, Follower, News};
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
    if tail.json {
        return entries(client, id, &tail).await;
    }
    let mut follower = Follower::new(client.clone(), id, tail.after);
    let mut transcript = Transcript::default();
    loop {
        match follower.next().await? {
            News::Event(Event::Entry(entry)) => {
                for line in transcript.lines(&entry) {
                    print(&format!("{}\n", line.render()))?;
                }
            }
            News::Event(Event::Status(news)) => {
                let why = news.why.map_or(String::new(), |why| format!(": {}", one_line(&why)));
                print(&format!("{}\n", styled(DIM, &format!("        ({}{why})", news.status.word()))))?;
                if tail.once || news.status == Status::Closed {
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
            News::Lost => eprintln!("the connection is lost; connecting again"),
            News::Back => eprintln!("connected again"),
            News::Event(_) => {}
        }
    }
}

/// The entries as the API gives them, one on each line.
async fn entries(client: &Client, id: &str, tail: &Tail) -> anyhow::Result<()> {
    let mut after = tail.after;
    let mut follower = None;
    loop {
        let mut answer = client
            .get(&["v1", "threads", id, "history"], &[("after", &after.to_string()), ("limit", "1000")])
            .await?;
        let Value::Array(entries) = answer["entries"].take() else { bail!("the history has no entries") };
        for entry in &entries {
            after = entry["seq"].as_u64().unwrap_or(after);
            print(&format!("{entry}\n"))?;
        }
        if !entries.is_empty() {
            continue;
        }
        if tail.once || client.thread(id).await?.status == Status::Closed {
            return Ok(());
        }
        // Something new is on its way when the stream says so.
        let follower = follower.get_or_insert_with(|| Follower::new(client.clone(), id, after));
        loop {
            if let News::Event(Event::Entry(entry)) = follower.next().await?
                && entry.seq > after
            {
                break;
            }
        }
    }
}

/// The place of the last entry.
pub(super) async fn last_entry(client: &Client, id: &str) -> Result<u64, Error> {
    let mut last = 0;
    loop {
        let entries = client.history(id, last).await?;
        let Some(entry) = entries.last() else { return Ok(last) };
        last = entry.seq;
    }
}

/// Prints what the agent says, from the answer to `said` on, until it comes to rest. What is no answer goes to stderr.
pub(super) async fn answer(client: &Client, id: &str, after: u64, said: &str) -> anyhow::Result<()> {
    let mut follower = Follower::new(client.clone(), id, after);
    let mut rest = Rest::expecting(said);
    loop {
        let News::Event(event) = follower.next().await? else { continue };
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
