//! The event stream of a thread, with automatic reconnection.

use std::collections::VecDeque;
use std::fmt::Display;
use std::pin::Pin;

use rap_io::client::Streaming;
use rap_io::sse::{self, Parser, TooLong};
use serde_json::Value;
use tokio::time::Instant;

use super::{Backoff, Client, Error};
use crate::api::{CallEvent, Delta, Entry, Question, StatusEvent};

/// Maximum size of an event, in bytes: a result of 8 MiB (the upper bound of `limits.body`) with every byte escaped as
/// six, and room for the surrounding JSON.
const EVENT_BYTES: usize = 64 * MIB;
const MIB: usize = 1024 * 1024;

/// Name of the events that carry a history entry. Only these have an id.
pub const ENTRY: &str = "entry";
/// Name of the last event before the runtime ends the stream.
const END: &str = "end";

/// An event of a thread.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A new entry of the history.
    Entry(Entry),
    /// A piece of an answer in progress. The entry that follows it is authoritative.
    Delta(Delta),
    /// The status of the thread. The first one marks the end of the replayed entries.
    Status(StatusEvent),
    /// A call was made or has settled.
    Call(CallEvent),
    /// A tool asks the user to choose or to sign in.
    Question(Question),
    /// A message to people that is not stored in the history.
    Notice(String),
    /// A view that a tool shows to people.
    View(Value),
}

impl Event {
    /// Parses an event. Returns `None` for an event that this version does not know.
    pub fn parse(event: &sse::Event) -> Option<Event> {
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

/// Events of one connection.
pub struct Events {
    stream: Streaming,
    parser: Parser,
    ready: VecDeque<Result<sse::Event, TooLong>>,
    connected_at: Instant,
}

impl Events {
    pub(super) fn new(stream: Streaming) -> Events {
        Events {
            stream,
            parser: Parser::new(EVENT_BYTES),
            ready: VecDeque::new(),
            connected_at: Instant::now(),
        }
    }

    /// Waits until an event is ready. Returns false if the stream has ended or failed.
    async fn wait_ready(&mut self) -> bool {
        while self.ready.is_empty() {
            let Ok(Some(chunk)) = self.stream.chunk().await else { return false };
            self.ready.extend(self.parser.push(&chunk));
        }
        !matches!(self.ready.front(), Some(Ok(event)) if event.name == END)
    }
}

/// An item that a [`Follower`] returns.
#[derive(Debug, Clone, PartialEq)]
pub enum Update<E = Event> {
    Event(E),
    /// An event was too large and was skipped.
    Skipped(Skipped),
    /// The connection is lost and the follower reconnects. Returned once, however many attempts that takes.
    Disconnected,
    /// The connection is established again. The entries since then follow, then the current state.
    Reconnected,
}

impl<E> Update<E> {
    /// Returns a message for people; `None` for an event.
    pub fn message(&self) -> Option<String> {
        match self {
            Update::Event(_) => None,
            Update::Skipped(skipped) => Some(skipped.to_string()),
            Update::Disconnected => Some("connection lost; reconnecting".into()),
            Update::Reconnected => Some("reconnected".into()),
        }
    }

    fn map<T>(self, map: impl FnOnce(E) -> Option<T>) -> Option<Update<T>> {
        Some(match self {
            Update::Event(event) => Update::Event(map(event)?),
            Update::Skipped(skipped) => Update::Skipped(skipped),
            Update::Disconnected => Update::Disconnected,
            Update::Reconnected => Update::Reconnected,
        })
    }
}

/// An event that was too large and was skipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped(TooLong);

impl Display for Skipped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Skipped(TooLong { limit, name, id }) = self;
        match name.as_str() {
            ENTRY => write!(f, "entry {id} ")?,
            _ => write!(f, "an event `{name}` ")?,
        }
        write!(f, "was skipped: it is larger than {} MiB", limit / MIB)
    }
}

/// Follows a thread across disconnections and restarts of the runtime. It returns every entry once, in order.
///
/// The delay before each reconnection grows. It is reset by a new entry, or when a connection has lasted for
/// [`Backoff::MAX`]: a stream that always ends at once does not count as a success.
pub struct Follower {
    client: Client,
    thread: String,
    /// Sequence number of the last entry received.
    after: u64,
    link: Link,
    /// State of the connection as last reported to the caller; `None` before the first connection.
    reported: Option<Reported>,
    backoff: Backoff,
}

enum Link {
    /// No connection until this time.
    Waiting(Instant),
    Connecting(Pin<Box<dyn Future<Output = Result<Events, Error>> + Send>>),
    Connected(Box<Events>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Reported {
    Connected,
    Disconnected,
}

impl Follower {
    /// Begins after the entry `after`.
    pub fn new(client: Client, thread: impl Into<String>, after: u64) -> Follower {
        let link = Link::Waiting(Instant::now());
        Follower { client, thread: thread.into(), after, link, reported: None, backoff: Backoff::default() }
    }

    /// Returns the next update. Fails if the first connection fails, or with an error that is not transient. Cancel safe.
    pub async fn next(&mut self) -> Result<Update, Error> {
        loop {
            let update = self.next_raw().await?;
            if let Some(update) = update.map(|event| Event::parse(&event)) {
                return Ok(update);
            }
        }
    }

    /// Like [`Follower::next`], with unparsed events.
    pub async fn next_raw(&mut self) -> Result<Update<sse::Event>, Error> {
        loop {
            match &mut self.link {
                Link::Waiting(until) => {
                    tokio::time::sleep_until(*until).await;
                    self.connect();
                }
                Link::Connecting(attempt) => match attempt.as_mut().await {
                    Ok(events) => {
                        self.link = Link::Connected(Box::new(events));
                        self.reported.get_or_insert(Reported::Connected);
                    }
                    Err(error) => {
                        self.wait_before_reconnect();
                        if !error.is_transient() || self.reported.is_none() {
                            return Err(error);
                        }
                    }
                },
                Link::Connected(events) => {
                    let is_connected = events.wait_ready().await;
                    if let Some(update) = self.take_update(is_connected) {
                        return Ok(update);
                    }
                }
            }
        }
    }

    /// Connects without delay, because the runtime is known to be up.
    pub fn connect_now(&mut self) {
        self.backoff.reset();
        if let Link::Waiting(until) = &mut self.link {
            *until = Instant::now();
        }
    }

    fn connect(&mut self) {
        let (client, thread, after) = (self.client.clone(), self.thread.clone(), self.after);
        self.link = Link::Connecting(Box::pin(async move { client.events(&thread, after).await }));
    }

    fn wait_before_reconnect(&mut self) {
        if matches!(&self.link, Link::Connected(events) if events.connected_at.elapsed() >= Backoff::MAX) {
            self.backoff.reset();
        }
        self.link = Link::Waiting(Instant::now() + self.backoff.next_delay());
    }

    /// Handles the next event of the connection, or its end.
    fn take_update(&mut self, is_connected: bool) -> Option<Update<sse::Event>> {
        let before =
            self.reported.replace(if is_connected { Reported::Connected } else { Reported::Disconnected });
        if !is_connected {
            self.wait_before_reconnect();
            return (before != Some(Reported::Disconnected)).then_some(Update::Disconnected);
        }
        if before == Some(Reported::Disconnected) {
            return Some(Update::Reconnected);
        }
        let Link::Connected(events) = &mut self.link else { return None };
        let event = events.ready.pop_front()?;
        let id = event.as_ref().map_or_else(|too_long| &too_long.id, |event| &event.id);
        if let Some(id) = id.parse().ok().filter(|id| *id > self.after) {
            self.after = id;
            self.backoff.reset();
        }
        Some(event.map_or_else(|too_long| Update::Skipped(Skipped(too_long)), Update::Event))
    }
}
