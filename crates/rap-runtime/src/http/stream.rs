//! Event streams. Only `entry` events have ids. A client that reconnects with the last id gets every later entry once,
//! then a snapshot of status, open calls, questions and views, then live events.
//!
//! A stream reads entries from the store, never from memory, so that it neither loses nor repeats one. A reader that is
//! too slow gets an `end` event and is disconnected, so that it delays nothing else.

use std::collections::HashMap;
use std::convert::Infallible;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::stream::poll_fn;
use rap_agent::Seq;
use rap_api::{
    CallEvent, CallState, Delivery, Delta, End as EndEvent, Notice, OpenCall, Question, RuntimeEvent, Status,
    StatusEvent, ThreadEvent, ThreadStatus,
};
use rap_protocol::{CallId, ThreadId, Timestamp};
use serde_json::{Value, json};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc::error::SendTimeoutError;
use tokio::sync::{mpsc, oneshot};

use super::admission::{AnswerMemory, Client, HoldingBody, NoMemory};
use super::json::{entry, open_call, status_event};
use super::{ErrorResponse, PathParams};
use crate::engine::Engine;
use crate::hub::{Listener, LiveEvent};
use crate::store::{self, HistoryPage, Page, PageRequest, ThreadRow};

/// Maximum number of entries that are read at a time, and their approximate size in bytes.
const PAGE: usize = 200;
const PAGE_BYTES: usize = 1024 * 1024;
/// Number of events that are buffered for a reader.
const BUFFERED: usize = 16;
/// Time that a full buffer may take to accept an event before the reader is disconnected.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of comments that keep an idle stream alive.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// Maximum number of threads whose last status the stream of all threads remembers.
const REMEMBERED: usize = 10_000;

const STOPPING: &str = "the runtime is stopping; reconnect";
const TOO_SLOW: &str = "the reader is too slow; reconnect with Last-Event-ID";

/// Reason why a stream ends.
enum End {
    /// The reader has disconnected.
    Disconnected,
    /// The reader is sent this reason.
    Reason(&'static str),
    Failed(store::Error),
}

impl From<store::Error> for End {
    fn from(error: store::Error) -> Self {
        End::Failed(error)
    }
}

type StreamResult<T = ()> = Result<T, End>;

/// An event on its way to the reader, and the memory that it uses.
type Frame = (Bytes, Option<AnswerMemory>);

struct Writer {
    frames: mpsc::Sender<Frame>,
    engine: Arc<Engine>,
    client: Client,
}

impl Writer {
    async fn send(&self, event: &ThreadEvent) -> StreamResult {
        self.write(frame(event.name(), &json!(event))).await
    }

    async fn send_of_all(&self, event: &RuntimeEvent) -> StreamResult {
        self.write(frame(event.name(), &json!(event))).await
    }

    async fn send_entry(&self, seq: Seq, entry: ThreadEvent) -> StreamResult {
        self.write(format!("id: {seq}\n{}", frame(entry.name(), &json!(entry)))).await
    }

    async fn write(&self, frame: String) -> StreamResult {
        let memory = self.engine.admission.answer_within(self.client, frame.len(), WRITE_TIMEOUT).await;
        let memory = memory.map_err(|NoMemory| End::Reason(TOO_SLOW))?;
        self.frames.send_timeout((frame.into(), memory), WRITE_TIMEOUT).await.map_err(|error| match error {
            SendTimeoutError::Timeout(_) => End::Reason(TOO_SLOW),
            SendTimeoutError::Closed(_) => End::Disconnected,
        })
    }
}

fn frame(name: &str, data: &Value) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}

/// Returns the last event of a stream, or `None` if the reader is gone.
fn end_event(end: End) -> Option<Bytes> {
    let reason = match end {
        End::Disconnected => return None,
        End::Reason(reason) => reason,
        End::Failed(error) => {
            tracing::warn!(%error, "an event stream failed");
            "the store is not available; reconnect"
        }
    };
    let event = ThreadEvent::End(EndEvent { reason: reason.into() });
    Some(frame(event.name(), &json!(event)).into())
}

/// Responds with the events of a stream until it ends or the runtime stops. The `end` event overtakes buffered events,
/// which the reader gets when it reconnects.
fn respond<S>(
    engine: &Arc<Engine>,
    client: Client,
    run: impl FnOnce(Writer) -> S,
) -> Result<Response, ErrorResponse>
where
    S: Future<Output = End> + Send + 'static,
{
    let Some(share) = engine.admission.stream(client) else {
        return Err(ErrorResponse::too_many("too many event streams of this client; close some of them"));
    };
    let (frames, mut waiting) = mpsc::channel::<Frame>(BUFFERED);
    let (end, mut ended) = oneshot::channel();
    let (stream, stop) = (run(Writer { frames, engine: Arc::clone(engine), client }), engine.stop.clone());
    engine.spawn(async move {
        let why = tokio::select! {
            () = stop.cancelled() => End::Reason(STOPPING),
            why = stream => why,
        };
        // Sending fails if the reader has disconnected.
        end.send(end_event(why)).ok();
    });
    let (mut over, mut sending) = (false, None);
    let body = poll_fn(move |context| {
        if over {
            return Poll::Ready(None);
        }
        if let Poll::Ready(event) = ended.poll_unpin(context) {
            over = true;
            return Poll::Ready(event.ok().flatten().map(Ok::<_, Infallible>));
        }
        waiting.poll_recv(context).map(|frame| {
            let (bytes, memory) = frame?;
            // The memory of the event before is free now.
            sending = memory;
            Some(Ok(bytes))
        })
    });
    let mut response = HoldingBody::wrap(Body::from_stream(body), (share,)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

pub(super) async fn thread_events(
    State(engine): State<Arc<Engine>>,
    Extension(client): Extension<Client>,
    PathParams(id): PathParams<String>,
    headers: HeaderMap,
) -> Result<Response, ErrorResponse> {
    let id = ThreadId::new(id).map_err(|_| store::Error::NoThread)?;
    let last_sent = last_event_id(&headers)?;
    let key = engine.store.thread(&id).await?.thread.key;
    // Subscribe before the first read, so that no change in between is missed.
    let listener = engine.hub.listen(key);
    let stream =
        ThreadStream { engine: Arc::clone(&engine), id, last_sent, sent_state: SentState::default() };
    respond(&engine, client, |writer| stream.run(writer, listener))
}

fn last_event_id(headers: &HeaderMap) -> Result<Seq, ErrorResponse> {
    let Some(given) = headers.get("last-event-id") else { return Ok(0) };
    let number = given.to_str().ok().and_then(|text| text.trim().parse::<u32>().ok());
    number
        .map(Seq::from)
        .ok_or_else(|| ErrorResponse::invalid("Last-Event-ID: expected the id of an entry event"))
}

struct ThreadStream {
    engine: Arc<Engine>,
    id: ThreadId,
    /// Last entry that was sent.
    last_sent: Seq,
    sent_state: SentState,
}

/// State that the reader was sent last.
#[derive(Default)]
struct SentState {
    status: Option<StatusEvent>,
    calls: HashMap<CallId, OpenCall>,
    questions: Vec<Question>,
    /// Time and digest of the content, by server and type. Two versions may have the same millisecond.
    views: HashMap<(String, String), (Timestamp, u64)>,
}

impl ThreadStream {
    async fn run(mut self, writer: Writer, mut listener: Listener) -> End {
        let writer = &writer;
        if let Err(end) = self.catch_up(writer).await {
            return end;
        }
        loop {
            let result = tokio::select! {
                () = tokio::time::sleep(HEARTBEAT) => writer.write(": alive\n\n".into()).await,
                live = listener.next() => match live {
                    Ok(LiveEvent::ThreadChanged { .. }) => self.catch_up(writer).await,
                    Ok(LiveEvent::Delta { turn, attempt, text }) => {
                        writer.send(&ThreadEvent::Delta(Delta { turn, attempt, text: (*text).into() })).await
                    }
                    Ok(LiveEvent::Notice { text, .. }) => {
                        writer.send(&ThreadEvent::Notice(Notice { thread_id: None, text: (*text).into() })).await
                    }
                    Ok(LiveEvent::Delivery { .. }) => Ok(()),
                    Err(RecvError::Lagged(_)) => return End::Reason(TOO_SLOW),
                    Err(RecvError::Closed) => return End::Reason(STOPPING),
                },
            };
            if let Err(end) = result {
                return end;
            }
        }
    }

    /// Sends new entries, then everything else that has changed.
    async fn catch_up(&mut self, writer: &Writer) -> StreamResult {
        let store = &self.engine.store;
        let row = store.thread(&self.id).await?;
        while self.last_sent < row.head.seq() {
            let page =
                HistoryPage { after: self.last_sent, up_to: row.head.seq(), rows: PAGE, bytes: PAGE_BYTES };
            let entries = store.history(&row.thread, page).await?;
            if entries.is_empty() {
                break;
            }
            for (seq, stored) in entries {
                writer.send_entry(seq, ThreadEvent::Entry(entry((seq, stored)))).await?;
                self.last_sent = seq;
            }
        }
        self.send_calls(writer, &row).await?;
        self.send_questions(writer, &row).await?;
        self.send_views(writer, &row).await?;
        let status = status_event(&row.head);
        if self.sent_state.status.as_ref() != Some(&status) {
            writer.send(&ThreadEvent::Status(status.clone())).await?;
            self.sent_state.status = Some(status);
        }
        Ok(())
    }

    async fn send_calls(&mut self, writer: &Writer, row: &ThreadRow) -> StreamResult {
        let mut open = HashMap::new();
        for call in row.head.open_calls() {
            let shown = open_call(call);
            if !self.sent_state.calls.contains_key(&call.id) {
                writer
                    .send(&ThreadEvent::Call(CallEvent { call: shown.clone(), state: CallState::Open }))
                    .await?;
            }
            open.insert(call.id.clone(), shown);
        }
        for (id, call) in std::mem::replace(&mut self.sent_state.calls, open) {
            if !self.sent_state.calls.contains_key(&id) {
                writer.send(&ThreadEvent::Call(CallEvent { call, state: CallState::Settled })).await?;
            }
        }
        Ok(())
    }

    async fn send_questions(&mut self, writer: &Writer, row: &ThreadRow) -> StreamResult {
        let mut asked = Vec::new();
        if !row.head.questions().is_empty() {
            for item in self.engine.store.inbox(Some(row.thread.key), PageRequest::first(PAGE)).await?.rows {
                let question = Question::from(item);
                if !self.sent_state.questions.contains(&question) {
                    writer.send(&ThreadEvent::Question(question.clone())).await?;
                }
                asked.push(question);
            }
        }
        self.sent_state.questions = asked;
        Ok(())
    }

    async fn send_views(&mut self, writer: &Writer, row: &ThreadRow) -> StreamResult {
        let mut views = self.engine.store.views(row.thread.key).await?;
        views.reverse();
        for view in views {
            let key = (view.server.clone(), view.view_type.clone());
            let stamp = (view.at, digest(&view.content));
            if self.sent_state.views.get(&key) != Some(&stamp) {
                writer.send(&ThreadEvent::View(view.into())).await?;
                self.sent_state.views.insert(key, stamp);
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

/// Streams the status of all threads and the questions that wait for users.
pub(super) async fn all_events(
    State(engine): State<Arc<Engine>>,
    Extension(client): Extension<Client>,
) -> Result<Response, ErrorResponse> {
    let listener = engine.hub.listen_to_all();
    let stream = AllStream { engine: Arc::clone(&engine), statuses: HashMap::new(), asked: HashMap::new() };
    respond(&engine, client, |writer| stream.run(writer, listener))
}

struct AllStream {
    engine: Arc<Engine>,
    statuses: HashMap<ThreadId, Status>,
    /// Questions that were sent, by thread.
    asked: HashMap<ThreadId, Vec<Question>>,
}

impl AllStream {
    async fn run(mut self, writer: Writer, mut listener: Listener) -> End {
        let writer = &writer;
        if let Err(end) = self.send_inbox(writer).await {
            return end;
        }
        loop {
            let result = tokio::select! {
                () = tokio::time::sleep(HEARTBEAT) => writer.write(": alive\n\n".into()).await,
                live = listener.next() => match live {
                    Ok(LiveEvent::ThreadChanged { thread, status }) => self.thread_changed(writer, thread, status).await,
                    Ok(LiveEvent::Notice { thread, text }) => {
                        let (thread_id, text) = (Some(thread.as_str().to_owned()), (*text).into());
                        writer.send_of_all(&RuntimeEvent::Notice(Notice { thread_id, text })).await
                    }
                    Ok(LiveEvent::Delivery { id }) => self.send_delivery(writer, &id).await,
                    Ok(LiveEvent::Delta { .. }) => Ok(()),
                    Err(RecvError::Lagged(_)) => return End::Reason("the reader is too slow; reconnect"),
                    Err(RecvError::Closed) => return End::Reason(STOPPING),
                },
            };
            if let Err(end) = result {
                return end;
            }
        }
    }

    async fn send_inbox(&mut self, writer: &Writer) -> StreamResult {
        let mut page_request = PageRequest::first(PAGE);
        loop {
            let Page { rows, next } = self.engine.store.inbox(None, page_request).await?;
            for item in rows {
                let (thread, question) = (item.thread.clone(), item.into());
                self.send_question(writer, thread, Question { arguments: None, ..question }).await?;
            }
            let Some(after) = next else { return Ok(()) };
            page_request = PageRequest { after, limit: PAGE };
        }
    }

    async fn send_delivery(&self, writer: &Writer, id: &str) -> StreamResult {
        match self.engine.store.delivery(id).await? {
            Some(row) => writer.send_of_all(&RuntimeEvent::Delivery(Delivery::from(row))).await,
            None => Ok(()),
        }
    }

    async fn send_question(&mut self, writer: &Writer, thread: ThreadId, question: Question) -> StreamResult {
        let sent = self.asked.entry(thread).or_default();
        if !sent.contains(&question) {
            writer.send_of_all(&RuntimeEvent::Question(question.clone())).await?;
            sent.push(question);
        }
        Ok(())
    }

    async fn thread_changed(&mut self, writer: &Writer, thread: ThreadId, status: Status) -> StreamResult {
        if self.statuses.len() >= REMEMBERED {
            self.statuses.clear();
            self.asked.clear();
        }
        if self.statuses.insert(thread.clone(), status) != Some(status) {
            let thread_id = thread.as_str().to_owned();
            writer.send_of_all(&RuntimeEvent::Status(ThreadStatus { thread_id, status })).await?;
        }
        if status != Status::NeedsYou {
            self.asked.remove(&thread);
            return Ok(());
        }
        let key = self.engine.store.thread(&thread).await?.thread.key;
        for item in self.engine.store.inbox(Some(key), PageRequest::first(PAGE)).await?.rows {
            self.send_question(writer, thread.clone(), item.into()).await?;
        }
        Ok(())
    }
}
