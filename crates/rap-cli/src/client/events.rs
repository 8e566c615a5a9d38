//! Events of a thread as they come, and again after a break.

use std::collections::VecDeque;
use std::fmt::Display;
use std::pin::Pin;

use rap_io::client::Streaming;
use rap_io::sse::{self, Parser, TooLong};
use serde_json::Value;
use tokio::time::Instant;

use super::{Client, Error, Pauses};
use crate::api::{CallNews, Delta, Entry, Question, StatusNews};

/// Largest event that is read, in bytes: a result of 8 MiB, which is the most that a runtime can be configured to take
/// (`limits.body`), with every byte of it escaped as six, and room for what is around it.
const EVENT_BYTES: usize = 64 * MIB;
const MIB: usize = 1024 * 1024;

/// Name of the events that have ids of their own.
pub const ENTRY: &str = "entry";
/// Name of the event behind which the runtime ends the stream.
const END: &str = "end";

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
}

impl Event {
    /// Reads an event. What is unknown to this version is passed over.
    pub fn read(event: &sse::Event) -> Option<Event> {
        fn of<T: serde::de::DeserializeOwned>(data: &str) -> Option<T> {
            serde_json::from_str(data).ok()
        }
        let data = event.data.as_str();
        Some(match event.name.as_str() {
            ENTRY => Event::Entry(of(data)?),
            "delta" => Event::Delta(of(data)?),
            "status" => Event::Status(of(data)?),
            "call" => Event::Call(of(data)?),
            "choice" | "oauth" => Event::Question(of(data)?),
            "notice" => Event::Notice(of::<Value>(data)?["text"].as_str()?.to_owned()),
            "view" => Event::View(of(data)?),
            _ => return None,
        })
    }
}

/// A stream of events, over one connection.
pub struct Events {
    stream: Streaming,
    parser: Parser,
    ready: VecDeque<Result<sse::Event, TooLong>>,
    /// When the connection was made.
    since: Instant,
}

impl Events {
    pub(super) fn new(stream: Streaming) -> Events {
        Events { stream, parser: Parser::new(EVENT_BYTES), ready: VecDeque::new(), since: Instant::now() }
    }

    /// Waits until an event is ready; false when the stream has ended or broken.
    async fn wait(&mut self) -> bool {
        while self.ready.is_empty() {
            let Ok(Some(chunk)) = self.stream.chunk().await else { return false };
            self.ready.extend(self.parser.push(&chunk));
        }
        !matches!(self.ready.front(), Some(Ok(event)) if event.name == END)
    }
}

/// What a follower of a thread learns.
#[derive(Debug, Clone, PartialEq)]
pub enum News<E = Event> {
    /// Something happened.
    Event(E),
    /// An event is too large to be read. The follower goes on behind it.
    LeftOut(LeftOut),
    /// The connection is gone; it is being made again. Told once, however many attempts that takes.
    Lost,
    /// It is there again. What follows is what happened meanwhile, then the state of things.
    Back,
}

impl<E> News<E> {
    /// What to tell a person, unless it is an event.
    pub fn words(&self) -> Option<String> {
        match self {
            News::Event(_) => None,
            News::LeftOut(left_out) => Some(left_out.to_string()),
            News::Lost => Some("the connection is lost; connecting again".into()),
            News::Back => Some("connected again".into()),
        }
    }

    fn map<T>(self, map: impl FnOnce(E) -> Option<T>) -> Option<News<T>> {
        Some(match self {
            News::Event(event) => News::Event(map(event)?),
            News::LeftOut(left_out) => News::LeftOut(left_out),
            News::Lost => News::Lost,
            News::Back => News::Back,
        })
    }
}

/// An event that was too large to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut(TooLong);

impl Display for LeftOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let LeftOut(TooLong { limit, name, id }) = self;
        match name.as_str() {
            ENTRY => write!(f, "entry {id} ")?,
            _ => write!(f, "an event `{name}` ")?,
        }
        write!(f, "is left out: it has more than {} MiB", limit / MIB)
    }
}

/// Follows a thread across breaks and restarts: every entry once, in order.
///
/// There is a pause before every new connection. The pauses grow until there is a new entry, or a connection has lasted
/// for a while: a stream that always begins and ends at once is no success.
pub struct Follower {
    client: Client,
    thread: String,
    /// Id of the last event, which is the place of an entry.
    after: u64,
    link: Link,
    /// What was told of the connection; nothing before the first one.
    told: Option<Told>,
    pauses: Pauses,
}

enum Link {
    Pausing(Instant),
    Connecting(Pin<Box<dyn Future<Output = Result<Events, Error>> + Send>>),
    Up(Box<Events>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Told {
    Up,
    Lost,
}

impl Follower {
    /// Begins behind the entry `after`.
    pub fn new(client: Client, thread: impl Into<String>, after: u64) -> Follower {
        let link = Link::Pausing(Instant::now());
        Follower { client, thread: thread.into(), after, link, told: None, pauses: Pauses::default() }
    }

    /// The next news. An error is one that waiting does not mend, or the very first connection fails. May be dropped
    /// and called again without losing anything.
    pub async fn next(&mut self) -> Result<News, Error> {
        loop {
            let news = self.next_as_sent().await?;
            if let Some(news) = news.map(|event| Event::read(&event)) {
                return Ok(news);
            }
        }
    }

    /// The same, with events as the runtime sent them.
    pub async fn next_as_sent(&mut self) -> Result<News<sse::Event>, Error> {
        loop {
            match &mut self.link {
                Link::Pausing(until) => {
                    tokio::time::sleep_until(*until).await;
                    self.connect();
                }
                Link::Connecting(attempt) => match attempt.as_mut().await {
                    Ok(events) => {
                        self.link = Link::Up(Box::new(events));
                        self.told.get_or_insert(Told::Up);
                    }
                    Err(error) => {
                        self.pause();
                        if !error.is_passing() || self.told.is_none() {
                            return Err(error);
                        }
                    }
                },
                Link::Up(events) => {
                    let is_up = events.wait().await;
                    if let Some(news) = self.look(is_up) {
                        return Ok(news);
                    }
                }
            }
        }
    }

    /// Connects without a pause, because the runtime is known to be there.
    pub fn hurry(&mut self) {
        self.pauses.reset();
        if let Link::Pausing(until) = &mut self.link {
            *until = Instant::now();
        }
    }

    fn connect(&mut self) {
        let (client, thread, after) = (self.client.clone(), self.thread.clone(), self.after);
        self.link = Link::Connecting(Box::pin(async move { client.events(&thread, after).await }));
    }

    fn pause(&mut self) {
        if matches!(&self.link, Link::Up(events) if events.since.elapsed() >= Pauses::LONGEST) {
            self.pauses.reset();
        }
        self.link = Link::Pausing(Instant::now() + self.pauses.take());
    }

    /// Looks at what has come over the connection, or that it has ended.
    fn look(&mut self, is_up: bool) -> Option<News<sse::Event>> {
        let before = self.told.replace(if is_up { Told::Up } else { Told::Lost });
        if !is_up {
            self.pause();
            return (before != Some(Told::Lost)).then_some(News::Lost);
        }
        if before == Some(Told::Lost) {
            return Some(News::Back);
        }
        let Link::Up(events) = &mut self.link else { return None };
        let event = events.ready.pop_front()?;
        let id = event.as_ref().map_or_else(|too_long| &too_long.id, |event| &event.id);
        if let Some(id) = id.parse().ok().filter(|id| *id > self.after) {
            self.after = id;
            self.pauses.reset();
        }
        Some(event.map_or_else(|too_long| News::LeftOut(LeftOut(too_long)), News::Event))
    }
}
