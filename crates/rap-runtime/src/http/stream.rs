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
use super::principal::Principal;
use super::{ErrorResponse, PathParams};
use crate::engine::Engine;
use crate::hub::{Changes, Listener, LiveEvent};
use crate::store::{self, HistoryPage, Page, PageRequest, Thread, ThreadKey, ThreadRow, ViewKey, Visibility};

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
const REVOKED: &str = "the token was revoked";
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

/// Responds with the events of a stream until it ends, the client's token is revoked or the runtime stops. The `end` event overtakes buffered events,
/// which the reader gets when it reconnects.
fn respond<S>(
    engine: &Arc<Engine>,
    principal: Principal,
    run: impl FnOnce(Writer) -> S,
) -> Result<Response, ErrorResponse>
where
    S: Future<Output = End> + Send + 'static,
{
    let client = principal.client;
    let Some(share) = engine.admission.stream(client) else {
        return Err(ErrorResponse::too_many("too many event streams of this client; close some of them"));
    };
    let (frames, mut waiting) = mpsc::channel::<Frame>(BUFFERED);
    let (end, mut ended) = oneshot::channel();
    let stream = run(Writer { frames, engine: Arc::clone(engine), client });
    let runtime = Arc::clone(engine);
    engine.spawn(async move {
        let why = tokio::select! {
            () = runtime.stop.cancelled() => End::Reason(STOPPING),
            () = principal.revoked(&runtime) => End::Reason(REVOKED),
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
    Extension(principal): Extension<Principal>,
    PathParams(id): PathParams<String>,
    headers: HeaderMap,
) -> Result<Response, ErrorResponse> {
    let id = ThreadId::new(id).map_err(|_| store::Error::NoThread)?;
    let last_sent = last_event_id(&headers)?;
    let key = engine.store.thread(&id, &principal.visible).await?.thread.key;
    // Subscribe before the first read, so that no change in between is missed.
    let listener = engine.hub.listen(key);
    let visible = principal.visible.clone();
    let stream = ThreadStream {
        engine: Arc::clone(&engine),
        id,
        visible,
        last_sent,
        sent_state: SentState::default(),
    };
    respond(&engine, principal, |writer| stream.run(writer, listener))
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
    visible: Visibility,
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
    /// Time and digest of the views that were sent at the start and have not changed since. A change that was announced
    /// before they were read is not sent again. Two versions may have the same millisecond.
    first_views: HashMap<ViewKey, (Timestamp, u64)>,
}

impl ThreadStream {
    async fn run(mut self, writer: Writer, mut listener: Listener) -> End {
        let writer = &writer;
        if let Err(end) = self.begin(writer).await {
            return end;
        }
        loop {
            let result = tokio::select! {
                () = tokio::time::sleep(HEARTBEAT) => writer.write(": alive\n\n".into()).await,
                live = listener.next() => match live {
                    Ok(LiveEvent::ThreadChanged { changes, .. }) => self.catch_up(writer, changes).await,
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

    /// Sends all new entries, then the current state.
    async fn begin(&mut self, writer: &Writer) -> StreamResult {
        let row = self.send_entries(writer).await?;
        self.send_calls(writer, &row).await?;
        let changes = Changes { questions: true, ..Changes::default() };
        self.send_questions(writer, &row, &changes).await?;
        self.send_all_views(writer, &row).await?;
        self.send_status(writer, &row).await
    }

    /// Sends new entries, then everything else that has changed.
    async fn catch_up(&mut self, writer: &Writer, changes: Changes) -> StreamResult {
        let row = self.send_entries(writer).await?;
        self.send_calls(writer, &row).await?;
        self.send_questions(writer, &row, &changes).await?;
        for key in changes.views {
            self.send_view(writer, &row, key).await?;
        }
        self.send_status(writer, &row).await
    }

    async fn send_entries(&mut self, writer: &Writer) -> StreamResult<ThreadRow> {
        let store = &self.engine.store;
        let row = store.thread(&self.id, &self.visible).await?;
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
        Ok(row)
    }

    async fn send_status(&mut self, writer: &Writer, row: &ThreadRow) -> StreamResult {
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

    /// Sends new questions. They are read only if one has changed.
    async fn send_questions(&mut self, writer: &Writer, row: &ThreadRow, changes: &Changes) -> StreamResult {
        if row.head.questions().is_empty() {
            self.sent_state.questions.clear();
        } else if changes.questions {
            let asked = questions(&self.engine, row.thread.key).await?;
            for question in asked.iter().filter(|question| !self.sent_state.questions.contains(question)) {
                writer.send(&ThreadEvent::Question(question.clone())).await?;
            }
            self.sent_state.questions = asked;
        }
        Ok(())
    }

    async fn send_all_views(&mut self, writer: &Writer, row: &ThreadRow) -> StreamResult {
        let mut after = None;
        loop {
            let mut page = self.engine.store.views(row.thread.key, after).await?;
            page.rows.sort_by_key(|view| view.at);
            for view in page.rows {
                self.sent_state.first_views.insert(view.key.clone(), (view.at, digest(&view.content)));
                writer.send(&ThreadEvent::View(view.into())).await?;
            }
            after = page.next;
            if after.is_none() {
                return Ok(());
            }
        }
    }

    async fn send_view(&mut self, writer: &Writer, row: &ThreadRow, key: ViewKey) -> StreamResult {
        let Some(view) = self.engine.store.view(row.thread.key, &key).await? else { return Ok(()) };
        let sent = self.sent_state.first_views.remove(&key);
        if sent != Some((view.at, digest(&view.content))) {
            writer.send(&ThreadEvent::View(view.into())).await?;
        }
        Ok(())
    }
}

/// Returns the unanswered questions of a thread. The limit of questions bounds their number.
async fn questions(engine: &Engine, thread: ThreadKey) -> StreamResult<Vec<Question>> {
    let (mut questions, mut page_request) = (Vec::new(), PageRequest::first(PAGE));
    loop {
        let Page { rows, next } = engine.store.inbox(Some(thread), &Visibility::All, page_request).await?;
        questions.extend(rows.into_iter().map(Question::from));
        let Some(after) = next else { return Ok(questions) };
        page_request = PageRequest { after, limit: PAGE };
    }
}

fn digest(content: &Value) -> u64 {
    let mut hasher = DefaultHasher::new();
    content.to_string().hash(&mut hasher);
    hasher.finish()
}

/// Streams the status of all threads that the client sees, and the questions in them.
pub(super) async fn all_events(
    State(engine): State<Arc<Engine>>,
    Extension(principal): Extension<Principal>,
) -> Result<Response, ErrorResponse> {
    let listener = engine.hub.listen_to_all();
    let visible = principal.visible.clone();
    let stream =
        AllStream { engine: Arc::clone(&engine), visible, statuses: HashMap::new(), asked: HashMap::new() };
    respond(&engine, principal, |writer| stream.run(writer, listener))
}

struct AllStream {
    engine: Arc<Engine>,
    visible: Visibility,
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
                    Ok(LiveEvent::ThreadChanged { thread, .. } | LiveEvent::Notice { thread, .. })
                        if !self.visible.includes(thread.user_id.as_ref()) => Ok(()),
                    Ok(LiveEvent::ThreadChanged { thread, status, changes }) => {
                        self.thread_changed(writer, &thread, status, &changes).await
                    }
                    Ok(LiveEvent::Notice { thread, text }) => {
                        let (thread_id, text) = (Some(thread.id.as_str().to_owned()), (*text).into());
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
            let Page { rows, next } = self.engine.store.inbox(None, &self.visible, page_request).await?;
            for item in rows {
                let (thread, question) = (item.thread.clone(), item.into());
                self.send_question(writer, thread, Question { arguments: None, ..question }).await?;
            }
            let Some(after) = next else { return Ok(()) };
            page_request = PageRequest { after, limit: PAGE };
        }
    }

    async fn send_delivery(&self, writer: &Writer, id: &str) -> StreamResult {
        match self.engine.store.delivery(id, &self.visible).await? {
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

    async fn thread_changed(
        &mut self,
        writer: &Writer,
        thread: &Thread,
        status: Status,
        changes: &Changes,
    ) -> StreamResult {
        let id = &thread.id;
        if self.statuses.len() >= REMEMBERED {
            self.statuses.clear();
            self.asked.clear();
        }
        let same = self.statuses.insert(id.clone(), status) == Some(status);
        if !same {
            let thread_id = id.as_str().to_owned();
            writer.send_of_all(&RuntimeEvent::Status(ThreadStatus { thread_id, status })).await?;
        }
        if status != Status::NeedsYou {
            self.asked.remove(id);
            return Ok(());
        }
        if same && !changes.questions {
            return Ok(());
        }
        for question in questions(&self.engine, thread.key).await? {
            self.send_question(writer, id.clone(), question).await?;
        }
        Ok(())
    }
}
