//! The event stream. Only `entry` events have ids: whoever connects again with the last one gets every entry after it,
//! once, then a snapshot of what can change, then what happens.
//!
//! A stream reads entries from the store, never from memory, so that it can neither lose nor repeat one. A reader that
//! is too slow is told so and dropped; it slows nobody.

use std::collections::HashMap;
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::stream::poll_fn;
use rap_agent::{Seq, Status};
use rap_protocol::{CallId, ThreadId, Timestamp};
use serde_json::{Value, json};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc::error::SendTimeoutError;
use tokio::sync::{mpsc, oneshot};

use super::json::{Entry, Question, StatusNews, View, WaitingOn};
use super::{InPath, Refused, deliveries};
use crate::engine::Engine;
use crate::hub::{Listener, Live};
use crate::store::{self, HistoryPage, Page, ThreadRow, Wanted};

/// How many entries are read at a time, and about how many bytes of them.
const PAGE: usize = 200;
const PAGE_BYTES: usize = 1024 * 1024;
/// How many events wait for a reader.
const WAITING: usize = 16;
/// How long a reader may take for one event before it is dropped.
const PATIENCE: Duration = Duration::from_secs(5);
/// A silent stream shows that it is alive.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// How many threads the stream of all threads remembers.
const REMEMBERED: usize = 10_000;

const STOPPING: &str = "the runtime is stopping; connect again";
const TOO_SLOW: &str = "too slow; connect again with Last-Event-ID";

/// Why a stream ends.
enum End {
    /// The reader is gone.
    Gone,
    /// It says so.
    Said(&'static str),
    Failed(store::Error),
}

impl From<store::Error> for End {
    fn from(error: store::Error) -> Self {
        End::Failed(error)
    }
}

type Flow<T = ()> = Result<T, End>;

struct Writer(mpsc::Sender<Bytes>);

impl Writer {
    async fn send(&self, event: &str, data: &Value) -> Flow {
        self.write(format!("event: {event}\ndata: {data}\n\n")).await
    }

    async fn send_entry(&self, seq: Seq, entry: &Value) -> Flow {
        self.write(format!("id: {seq}\nevent: entry\ndata: {entry}\n\n")).await
    }

    async fn write(&self, frame: String) -> Flow {
        self.0.send_timeout(frame.into(), PATIENCE).await.map_err(|error| match error {
            SendTimeoutError::Timeout(_) => End::Said(TOO_SLOW),
            SendTimeoutError::Closed(_) => End::Gone,
        })
    }
}

/// The last words of a stream.
fn last_words(end: End) -> Option<Bytes> {
    let reason = match end {
        End::Gone => return None,
        End::Said(reason) => reason,
        End::Failed(error) => {
            tracing::warn!(%error, "a stream could not go on");
            "the store is not available; connect again"
        }
    };
    Some(format!("event: end\ndata: {}\n\n", json!({"reason": reason})).into())
}

/// Answers with what a stream writes until it ends, or the runtime stops. Its last words overtake what still waits for
/// the reader, who gets that by connecting again.
fn respond<S>(engine: &Arc<Engine>, run: impl FnOnce(Writer) -> S) -> Response
where
    S: Future<Output = End> + Send + 'static,
{
    let (frames, mut waiting) = mpsc::channel(WAITING);
    let (end, mut ended) = oneshot::channel();
    let (stream, stop) = (run(Writer(frames)), engine.stop.clone());
    engine.spawn(async move {
        let why = tokio::select! {
            () = stop.cancelled() => End::Said(STOPPING),
            why = stream => why,
        };
        // The reader may be gone.
        end.send(last_words(why)).ok();
    });
    let mut over = false;
    let body = poll_fn(move |context| {
        if over {
            return Poll::Ready(None);
        }
        if let Poll::Ready(words) = ended.poll_unpin(context) {
            over = true;
            return Poll::Ready(words.ok().flatten().map(Ok::<_, Infallible>));
        }
        waiting.poll_recv(context).map(|frame| frame.map(Ok))
    });
    let mut response = Body::from_stream(body).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

pub(super) async fn thread_events(
    State(engine): State<Arc<Engine>>,
    InPath(id): InPath<String>,
    headers: HeaderMap,
) -> Result<Response, Refused> {
    let id = ThreadId::new(id).map_err(|_| store::Error::NoThread)?;
    let sent = last_event_id(&headers)?;
    let key = engine.store.thread(&id).await?.thread.key;
    // Whoever listens before reading misses nothing in between.
    let listener = engine.hub.listen(key);
    let stream = ThreadStream { engine: Arc::clone(&engine), id, sent, shown: Shown::default() };
    Ok(respond(&engine, |writer| stream.run(writer, listener)))
}

fn last_event_id(headers: &HeaderMap) -> Result<Seq, Refused> {
    let Some(given) = headers.get("last-event-id") else { return Ok(0) };
    let number = given.to_str().ok().and_then(|text| text.trim().parse::<u32>().ok());
    number.map(Seq::from).ok_or_else(|| Refused::invalid("Last-Event-ID: expected the id of an entry event"))
}

struct ThreadStream {
    engine: Arc<Engine>,
    id: ThreadId,
    /// The last entry that was sent.
    sent: Seq,
    shown: Shown,
}

/// What the reader was told last.
#[derive(Default)]
struct Shown {
    status: Option<StatusNews>,
    calls: HashMap<CallId, Value>,
    questions: HashMap<String, Value>,
    /// When it was written, and what: two may be of the same millisecond.
    views: HashMap<(String, String), (Timestamp, u64)>,
}

impl ThreadStream {
    async fn run(mut self, writer: Writer, mut listener: Listener) -> End {
        let writer = &writer;
        if let Err(end) = self.catch_up(writer).await {
            return end;
        }
        loop {
            let flow = tokio::select! {
                () = tokio::time::sleep(HEARTBEAT) => writer.write(": alive\n\n".into()).await,
                live = listener.next() => match live {
                    Ok(Live::Moved { .. }) => self.catch_up(writer).await,
                    Ok(Live::Delta { turn, attempt, text }) => {
                        writer.send("delta", &json!({"turn": turn, "attempt": attempt, "text": &*text})).await
                    }
                    Ok(Live::Notice { text, .. }) => writer.send("notice", &json!({"text": &*text})).await,
                    Ok(Live::Delivery { .. }) => Ok(()),
                    Err(RecvError::Lagged(_)) => return End::Said(TOO_SLOW),
                    Err(RecvError::Closed) => return End::Said(STOPPING),
                },
            };
            if let Err(end) = flow {
                return end;
            }
        }
    }

    /// Sends the entries that are new, then whatever else has changed.
    async fn catch_up(&mut self, writer: &Writer) -> Flow {
        let store = &self.engine.store;
        let row = store.thread(&self.id).await?;
        while self.sent < row.head.seq() {
            let page = HistoryPage { after: self.sent, up_to: row.head.seq(), rows: PAGE, bytes: PAGE_BYTES };
            let entries = store.history(&row.thread, page).await?;
            if entries.is_empty() {
                break;
            }
            for (seq, entry) in entries {
                writer.send_entry(seq, &json!(Entry::from((seq, entry)))).await?;
                self.sent = seq;
            }
        }
        self.show_calls(writer, &row).await?;
        self.show_questions(writer, &row).await?;
        self.show_views(writer, &row).await?;
        let status = StatusNews::from(&row.head);
        if self.shown.status.as_ref() != Some(&status) {
            writer.send("status", &json!(status)).await?;
            self.shown.status = Some(status);
        }
        Ok(())
    }

    async fn show_calls(&mut self, writer: &Writer, row: &ThreadRow) -> Flow {
        let mut open = HashMap::new();
        for call in row.head.open_calls() {
            let shown = json!(WaitingOn::from(call));
            if !self.shown.calls.contains_key(&call.id) {
                let mut event = shown.clone();
                event["state"] = json!("open");
                writer.send("call", &event).await?;
            }
            open.insert(call.id.clone(), shown);
        }
        for (id, mut event) in std::mem::replace(&mut self.shown.calls, open) {
            if !self.shown.calls.contains_key(&id) {
                event["state"] = json!("settled");
                writer.send("call", &event).await?;
            }
        }
        Ok(())
    }

    async fn show_questions(&mut self, writer: &Writer, row: &ThreadRow) -> Flow {
        let mut asked = HashMap::new();
        if !row.head.questions().is_empty() {
            for item in self.engine.store.inbox(Some(row.thread.key), Wanted::first(PAGE)).await?.rows {
                let shown = json!(Question::from(item));
                let key = shown.to_string();
                if !self.shown.questions.contains_key(&key) {
                    let kind = shown["kind"].as_str().unwrap_or("choice").to_owned();
                    writer.send(&kind, &shown).await?;
                }
                asked.insert(key, shown);
            }
        }
        self.shown.questions = asked;
        Ok(())
    }

    async fn show_views(&mut self, writer: &Writer, row: &ThreadRow) -> Flow {
        let mut views = self.engine.store.views(row.thread.key).await?;
        views.reverse();
        for view in views {
            let key = (view.server.clone(), view.view_type.clone());
            let stamp = (view.at, digest(&view.content));
            if self.shown.views.get(&key) != Some(&stamp) {
                writer.send("view", &json!(View::from(view))).await?;
                self.shown.views.insert(key, stamp);
            }
        }
        Ok(())
    }
}

fn digest(content: &Value) -> u64 {
    let mut hasher = DefaultHasher::new();
    content.to_string().hash(&mut hasher);
    hasher.finish()
}

/// What happens in all threads: their status, and what waits for a person.
pub(super) async fn all_events(State(engine): State<Arc<Engine>>) -> Response {
    let listener = engine.hub.listen_to_all();
    let stream = AllStream { engine: Arc::clone(&engine), statuses: HashMap::new(), asked: HashMap::new() };
    respond(&engine, |writer| stream.run(writer, listener))
}

struct AllStream {
    engine: Arc<Engine>,
    statuses: HashMap<ThreadId, Status>,
    /// Questions that were told, by thread.
    asked: HashMap<ThreadId, Vec<Value>>,
}

impl AllStream {
    async fn run(mut self, writer: Writer, mut listener: Listener) -> End {
        let writer = &writer;
        if let Err(end) = self.show_inbox(writer).await {
            return end;
        }
        loop {
            let flow = tokio::select! {
                () = tokio::time::sleep(HEARTBEAT) => writer.write(": alive\n\n".into()).await,
                live = listener.next() => match live {
                    Ok(Live::Moved { thread, status }) => self.moved(writer, thread, status).await,
                    Ok(Live::Notice { thread, text }) => {
                        writer.send("notice", &json!({"thread_id": thread, "text": &*text})).await
                    }
                    Ok(Live::Delivery { id }) => self.show_delivery(writer, &id).await,
                    Ok(Live::Delta { .. }) => Ok(()),
                    Err(RecvError::Lagged(_)) => return End::Said("too slow; connect again"),
                    Err(RecvError::Closed) => return End::Said(STOPPING),
                },
            };
            if let Err(end) = flow {
                return end;
            }
        }
    }

    async fn show_inbox(&mut self, writer: &Writer) -> Flow {
        let mut wanted = Wanted::first(PAGE);
        loop {
            let Page { rows, next } = self.engine.store.inbox(None, wanted).await?;
            for item in rows {
                self.show_question(writer, item.thread.clone(), json!(Question::from(item))).await?;
            }
            let Some(after) = next else { return Ok(()) };
            wanted = Wanted { after, limit: PAGE };
        }
    }

    async fn show_delivery(&self, writer: &Writer, id: &str) -> Flow {
        match self.engine.store.delivery(id).await? {
            Some(row) => writer.send("delivery", &json!(deliveries::Delivery::from(row))).await,
            None => Ok(()),
        }
    }

    async fn show_question(&mut self, writer: &Writer, thread: ThreadId, shown: Value) -> Flow {
        let told = self.asked.entry(thread).or_default();
        if !told.contains(&shown) {
            let kind = shown["kind"].as_str().unwrap_or("choice").to_owned();
            writer.send(&kind, &shown).await?;
            told.push(shown);
        }
        Ok(())
    }

    async fn moved(&mut self, writer: &Writer, thread: ThreadId, status: Status) -> Flow {
        if self.statuses.len() >= REMEMBERED {
            self.statuses.clear();
            self.asked.clear();
        }
        if self.statuses.insert(thread.clone(), status) != Some(status) {
            writer.send("status", &json!({"thread_id": thread, "status": status})).await?;
        }
        if status != Status::NeedsYou {
            self.asked.remove(&thread);
            return Ok(());
        }
        let key = self.engine.store.thread(&thread).await?.thread.key;
        for item in self.engine.store.inbox(Some(key), Wanted::first(PAGE)).await?.rows {
            self.show_question(writer, thread.clone(), json!(Question::from(item))).await?;
        }
        Ok(())
    }
}
