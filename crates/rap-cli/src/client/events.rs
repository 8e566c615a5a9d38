//! Events of a thread as they come, and again after a break.

use std::collections::VecDeque;
use std::time::Duration;

use rap_io::client::Streaming;
use rap_io::sse::Parser;
use serde_json::Value;

use super::{Client, Error};
use crate::api::{CallNews, Delta, Entry, Question, StatusNews};

/// The pauses before connecting again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// Something that happened in a thread.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A new entry of its history.
    Entry(Entry),
    /// A piece of an answer in progress. The entry that follows is the truth.
    Delta(Delta),
    /// What the thread is at. The first one says that everything before it has been told.
    Status(StatusNews),
    /// A call that was made or has settled.
    Call(CallNews),
    /// Somebody has to answer, or to sign in.
    Question(Question),
    /// Something for people that is not kept.
    Notice(String),
    /// Something is shown to people.
    View(Value),
    /// The runtime ends the stream.
    End,
}

/// A stream of events, over one connection.
pub struct Events {
    stream: Streaming,
    parser: Parser,
    ready: VecDeque<Event>,
}

impl Events {
    pub(super) fn new(stream: Streaming) -> Events {
        Events { stream, parser: Parser::default(), ready: VecDeque::new() }
    }

    /// The next event; nothing when the connection has ended or broken.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            let chunk = self.stream.chunk().await.ok()??;
            let parsed = self.parser.push(&chunk).ok()?;
            self.ready.extend(parsed.iter().filter_map(|event| read(&event.name, &event.data)));
        }
    }
}

/// What is unknown to this version is passed over.
fn read(name: &str, data: &str) -> Option<Event> {
    fn of<T: serde::de::DeserializeOwned>(data: &str) -> Option<T> {
        serde_json::from_str(data).ok()
    }
    Some(match name {
        "entry" => Event::Entry(of(data)?),
        "delta" => Event::Delta(of(data)?),
        "status" => Event::Status(of(data)?),
        "call" => Event::Call(of(data)?),
        "choice" | "oauth" => Event::Question(of(data)?),
        "notice" => Event::Notice(of::<Value>(data)?["text"].as_str()?.to_owned()),
        "view" => Event::View(of(data)?),
        "end" => Event::End,
        _ => return None,
    })
}

/// What a follower of a thread learns.
#[derive(Debug, Clone, PartialEq)]
pub enum News {
    /// Something happened.
    Event(Event),
    /// The connection is gone; it is being made again.
    Lost,
    /// It is there again. What follows is what happened meanwhile, then the state of things.
    Back,
}

/// Follows a thread across breaks and restarts: every entry once, in order.
pub struct Follower {
    client: Client,
    thread: String,
    after: u64,
    events: Option<Events>,
    link: Link,
    pause: Duration,
}

#[derive(PartialEq)]
enum Link {
    Fresh,
    Up,
    Lost,
}

impl Follower {
    /// Begins behind the entry `after`.
    pub fn new(client: Client, thread: impl Into<String>, after: u64) -> Follower {
        Follower { client, thread: thread.into(), after, events: None, link: Link::Fresh, pause: PAUSES.0 }
    }

    /// The next news. An error is one that waiting does not mend, or the very first connection fails. May be dropped
    /// and called again without losing anything.
    pub async fn next(&mut self) -> Result<News, Error> {
        loop {
            let Some(events) = &mut self.events else {
                if let Some(news) = self.connect().await? {
                    return Ok(news);
                }
                continue;
            };
            match events.next().await {
                Some(Event::End) | None => {
                    self.events = None;
                    if self.link == Link::Up {
                        self.link = Link::Lost;
                        return Ok(News::Lost);
                    }
                }
                Some(event) => {
                    if let Event::Entry(entry) = &event {
                        self.after = entry.seq;
                    }
                    return Ok(News::Event(event));
                }
            }
        }
    }

    async fn connect(&mut self) -> Result<Option<News>, Error> {
        match self.client.events(&self.thread, self.after).await {
            Ok(events) => {
                self.events = Some(events);
                self.pause = PAUSES.0;
                let before = std::mem::replace(&mut self.link, Link::Up);
                Ok((before == Link::Lost).then_some(News::Back))
            }
            Err(error) if error.is_passing() && self.link != Link::Fresh => {
                tokio::time::sleep(self.pause).await;
                self.pause = (self.pause * 2).min(PAUSES.1);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
