//! Event streams with automatic reconnection.

use std::collections::VecDeque;
use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::pin::Pin;

use rap_io::client::Streaming;
use rap_io::sse::{self, Parser, TooLong};
use tokio::time::Instant;

use super::{Backoff, Client, Error, MIB};
use crate::{RuntimeEvent, ThreadEvent};

/// Maximum size of an event, in bytes: a result of 8 MiB (the upper bound of `limits.body`) with every byte escaped as
/// six, and room for the surrounding JSON.
const EVENT_BYTES: usize = 64 * MIB;

/// An event that is not parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawEvent {
    /// Name of the event, such as `entry`.
    pub name: String,
    /// Data of the event: JSON text.
    pub data: String,
}

/// A kind of event that a [`Follower`] can return: [`ThreadEvent`], [`RuntimeEvent`] or [`RawEvent`].
pub trait StreamEvent: Sized + sealed::Sealed {
    /// Parses an event. Returns `None` for an event that this version does not know.
    fn from_raw(raw: RawEvent) -> Option<Self>;
}

mod sealed {
    pub trait Sealed {}

    impl Sealed for super::RawEvent {}
    impl Sealed for super::ThreadEvent {}
    impl Sealed for super::RuntimeEvent {}
}

impl StreamEvent for RawEvent {
    fn from_raw(raw: RawEvent) -> Option<RawEvent> {
        Some(raw)
    }
}

impl StreamEvent for ThreadEvent {
    fn from_raw(raw: RawEvent) -> Option<ThreadEvent> {
        ThreadEvent::parse(&raw.name, &raw.data)
    }
}

impl StreamEvent for RuntimeEvent {
    fn from_raw(raw: RawEvent) -> Option<RuntimeEvent> {
        RuntimeEvent::parse(&raw.name, &raw.data)
    }
}

/// Events of one connection.
pub(super) struct Connection {
    stream: Streaming,
    parser: Parser,
    ready: VecDeque<Result<sse::Event, TooLong>>,
    connected_at: Instant,
}

impl Connection {
    pub(super) fn new(stream: Streaming) -> Connection {
        Connection {
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
        !matches!(self.ready.front(), Some(Ok(event)) if event.name == ThreadEvent::END)
    }
}

/// An item that a [`Follower`] returns.
#[derive(Debug, Clone, PartialEq)]
pub enum Update<E = ThreadEvent> {
    /// An event of the stream. The `end` of a stream is never returned: the follower reconnects.
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
}

/// An event that was too large and was skipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped(TooLong);

impl Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Skipped(TooLong { limit, name, id }) = self;
        match name.as_str() {
            ThreadEvent::ENTRY => write!(f, "entry {id} ")?,
            _ => write!(f, "an event `{name}` ")?,
        }
        write!(f, "was skipped: it is larger than {} MiB", limit / MIB)
    }
}

/// Follows an event stream across disconnections and restarts of the runtime. The follower of a thread returns every
/// entry once, in order.
///
/// The delay before each reconnection grows. It is reset by a new entry, or when a connection has lasted for
/// [`Backoff::MAX`]: a stream that always ends at once does not count as a success.
pub struct Follower<E = ThreadEvent> {
    client: Client,
    /// Segments of the path.
    path: Vec<String>,
    /// Sequence number of the last entry received.
    after: u64,
    link: Link,
    /// State of the connection as last reported to the caller; `None` before the first connection.
    reported: Option<Reported>,
    backoff: Backoff,
    events: PhantomData<fn() -> E>,
}

enum Link {
    /// No connection until this time.
    Waiting(Instant),
    Connecting(Pin<Box<dyn Future<Output = Result<Connection, Error>> + Send>>),
    Connected(Box<Connection>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Reported {
    Connected,
    Disconnected,
}

impl<E: StreamEvent> Follower<E> {
    pub(super) fn new(client: Client, path: Vec<String>, after: u64) -> Follower<E> {
        Follower {
            client,
            path,
            after,
            link: Link::Waiting(Instant::now()),
            reported: None,
            backoff: Backoff::default(),
            events: PhantomData,
        }
    }

    /// Returns the next update. Fails if the first connection fails, or with an error that is not transient. Cancel safe.
    pub async fn next(&mut self) -> Result<Update<E>, Error> {
        loop {
            match &mut self.link {
                Link::Waiting(until) => {
                    tokio::time::sleep_until(*until).await;
                    self.connect();
                }
                Link::Connecting(attempt) => match attempt.as_mut().await {
                    Ok(connection) => {
                        self.link = Link::Connected(Box::new(connection));
                        self.reported.get_or_insert(Reported::Connected);
                    }
                    Err(error) => {
                        self.wait_before_reconnect();
                        if !error.is_transient() || self.reported.is_none() {
                            return Err(error);
                        }
                    }
                },
                Link::Connected(connection) => {
                    let is_connected = connection.wait_ready().await;
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
        let (client, path, after) = (self.client.clone(), self.path.clone(), self.after);
        self.link = Link::Connecting(Box::pin(async move { client.connect(&path, after).await }));
    }

    fn wait_before_reconnect(&mut self) {
        if matches!(&self.link, Link::Connected(connection) if connection.connected_at.elapsed() >= Backoff::MAX)
        {
            self.backoff.reset();
        }
        self.link = Link::Waiting(Instant::now() + self.backoff.next_delay());
    }

    /// Handles the next event of the connection, or its end. Returns `None` if the caller need not know.
    fn take_update(&mut self, is_connected: bool) -> Option<Update<E>> {
        let before =
            self.reported.replace(if is_connected { Reported::Connected } else { Reported::Disconnected });
        if !is_connected {
            self.wait_before_reconnect();
            return (before != Some(Reported::Disconnected)).then_some(Update::Disconnected);
        }
        if before == Some(Reported::Disconnected) {
            return Some(Update::Reconnected);
        }
        let Link::Connected(connection) = &mut self.link else { return None };
        let event = connection.ready.pop_front()?;
        let id = event.as_ref().map_or_else(|too_long| &too_long.id, |event| &event.id);
        if let Some(id) = id.parse().ok().filter(|id| *id > self.after) {
            self.after = id;
            self.backoff.reset();
        }
        match event {
            Ok(sse::Event { name, data, .. }) => E::from_raw(RawEvent { name, data }).map(Update::Event),
            Err(too_long) => Some(Update::Skipped(Skipped(too_long))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// Answers each connection with the next of the texts, and returns the `Last-Event-ID` of each request.
    fn serve(answers: Vec<String>) -> (String, thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = thread::spawn(move || {
            let answer = |events: String| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
                let head: Vec<String> = lines.by_ref().take_while(|line| !line.is_empty()).collect();
                let type_ = "Content-Type: text/event-stream\r\nConnection: close";
                write!(stream, "HTTP/1.1 200 OK\r\n{type_}\r\n\r\n{events}").unwrap();
                let id = head.iter().find_map(|line| line.strip_prefix("last-event-id: "));
                id.unwrap_or_default().to_owned()
            };
            answers.into_iter().map(answer).collect()
        });
        (url, requests)
    }

    fn entry(seq: u64) -> String {
        let data =
            format!(r#"{{"seq": {seq}, "at": "1970-01-01T00:00:00Z", "kind": "notice", "text": "hi"}}"#);
        format!("id: {seq}\nevent: entry\ndata: {data}\n\n")
    }

    #[tokio::test]
    async fn a_follower_reconnects_after_the_last_entry_and_skips_unknown_events() {
        let first = format!("{}event: of a newer runtime\ndata: {{}}\n\n{}", entry(1), entry(2));
        let (url, requests) = serve(vec![first, entry(3)]);
        let mut follower = Client::new(&url).unwrap().follow("t", 0);
        let mut updates = Vec::new();
        while updates.last() != Some(&"3".to_owned()) {
            updates.push(match follower.next().await.unwrap() {
                Update::Event(ThreadEvent::Entry(entry)) => entry.seq.to_string(),
                Update::Disconnected => "disconnected".into(),
                Update::Reconnected => "reconnected".into(),
                other => panic!("{other:?}"),
            });
        }
        assert_eq!(updates, ["1", "2", "disconnected", "reconnected", "3"]);
        assert_eq!(requests.join().unwrap(), ["0", "2"]);
    }

    #[tokio::test]
    async fn the_first_connection_must_succeed() {
        let url = format!("http://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
        let error = Client::new(&url).unwrap().follow_all().next().await.unwrap_err();
        assert!(error.is_transient(), "{error}");
    }
}
