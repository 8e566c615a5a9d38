//! Event streams. Only `entry` events have ids. A client that reconnects with the last id gets every later entry once,
//! then a snapshot of status, open calls, questions and views, then live events.
//!
//! A stream reads entries from the store, never from memory, so that it neither loses nor repeats one. A reader that is
//! too slow gets an `end` event and is disconnected, so that it delays nothing else.

mod writer;

use std::collections::{HashMap, HashSet};
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
    CallEvent, CallEventKind, Delivery, Delta, End as EndEvent, Notice, OpenCall, Question, RuntimeEvent,
    Status, StatusEvent, ThreadEvent, ThreadStatus,
};
use rap_io::hashing::in_place;
use rap_protocol::{CallId, ThreadId, Timestamp, limits};
use serde::Serialize;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::oneshot;

use super::admission::HoldingBody;
use super::json::{entry, open_call, status_event};
use super::principal::Principal;
use super::{ErrorResponse, PathParams};
use crate::engine::Engine;
use crate::hub::{Changes, Listener, LiveEvent};
use crate::store::{
    self, HistoryPage, Page, PageRequest, Thread, ThreadKey, ThreadRow, ViewKey, ViewRow, Visibility,
};
use writer::{EncodedPage, End, PagePermit, StreamResult, TOO_SLOW, Writer, frame};

/// Maximum number of entries that are read at a time, and their approximate size in bytes.
const PAGE: usize = 200;
const PAGE_BYTES: usize = 1024 * 1024;
/// Maximum size of a question, in bytes.
const QUESTION_BYTES: usize = limits::PROMPT_BYTES + limits::CHOICES * limits::CHOICE_BYTES;
/// Interval of comments that keep an idle stream alive.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// Time after which a new stream reads again what another node may have changed. The following times are longer.
const FIRST_REFRESH: Duration = Duration::from_secs(1);
/// Maximum number of threads whose last status the stream of all threads remembers.
const REMEMBERED: usize = 10_000;

const STOPPING: &str = "the runtime is stopping; reconnect";
const REVOKED: &str = "the token was revoked";
const MISSED: &str = "events of another node were missed; reconnect";

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
    Some(frame(event.name(), &event).into())
}

/// Responds with the events of a stream until it ends, the client's token is revoked or the runtime stops. The `end`
/// event overtakes buffered events, which the reader gets when it reconnects.
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
    let (writer, mut waiting) = Writer::new(Arc::clone(engine), client);
    let (end, mut ended) = oneshot::channel();
    let stream = run(writer);
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
            let (bytes, buffered) = frame?;
            // The memory of the events before is free now.
            sending = Some(buffered);
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
    /// Digests of the questions.
    questions: HashSet<u64>,
    /// Time and digest of the views that were sent, so that none is sent twice. Two versions may have the same millisecond.
    views: HashMap<ViewKey, (Timestamp, u64)>,
    /// The last turn that has ended. Parts of its answer that arrive later are not sent.
    ended_turn: u64,
}

impl ThreadStream {
    async fn run(mut self, writer: Writer, mut listener: Listener) -> End {
        let writer = &writer;
        if let Err(end) = self.refresh(writer).await {
            return end;
        }
        let mut pause = if self.engine.has_peers() { FIRST_REFRESH } else { HEARTBEAT };
        loop {
            let result = tokio::select! {
                () = tokio::time::sleep(pause) => {
                    pause = (pause * 2).min(HEARTBEAT);
                    self.keep_alive(writer).await
                }
                live = listener.next() => match live {
                    Ok(LiveEvent::ThreadChanged { changes, .. }) => self.catch_up(writer, changes).await,
                    Ok(LiveEvent::Missed) => self.refresh(writer).await,
                    Ok(LiveEvent::Delta { turn, .. }) if turn <= self.sent_state.ended_turn => Ok(()),
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

    /// Shows the reader that the stream is alive. A signal of another node may have been lost, so everything is read again.
    async fn keep_alive(&mut self, writer: &Writer) -> StreamResult {
        writer.write(b": alive\n\n".to_vec()).await?;
        if self.engine.has_peers() { self.refresh(writer).await } else { Ok(()) }
    }

    /// Reads everything again, and sends what has changed.
    async fn refresh(&mut self, writer: &Writer) -> StreamResult {
        let changes = Changes { questions: true, ..Changes::default() };
        let row = self.send_entries(writer).await?;
        self.send_calls(writer, &row).await?;
        self.send_questions(writer, &row, &changes).await?;
        self.send_all_views(writer, &row).await?;
        self.send_status(writer, &row).await
    }

    /// Sends new entries, then everything else that has changed.
    async fn catch_up(&mut self, writer: &Writer, changes: Changes) -> StreamResult {
        let row = self.send_entries(writer).await?;
        self.send_calls(writer, &row).await?;
        self.send_questions(writer, &row, &changes).await?;
        for child in changes.children {
            writer.send(&ThreadEvent::Child(child)).await?;
        }
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
            let bytes = store.history_bytes(&row.thread, page).await?;
            let permit = writer.permit(bytes).await?;
            let entries = store.history(&row.thread, page).await?;
            let Some(last) = entries.last().map(|(seq, _)| *seq) else { break };
            let mut page = EncodedPage::default();
            in_place(bytes, || {
                for (seq, stored) in entries {
                    page.push_entry(seq, &ThreadEvent::Entry(entry((seq, stored))));
                }
            });
            writer.send_page(permit, page).await?;
            self.last_sent = last;
        }
        self.sent_state.ended_turn = match row.head.turn_in_progress() {
            Some(turn) => turn.saturating_sub(1),
            None => row.head.turn(),
        };
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
            let sent = self.sent_state.calls.get(&call.id);
            // A call is sent again when it was allowed.
            if sent.is_none_or(|sent| sent.needs_approval != shown.needs_approval) {
                writer
                    .send(&ThreadEvent::Call(CallEvent { call: shown.clone(), state: CallEventKind::Opened }))
                    .await?;
            }
            open.insert(call.id.clone(), shown);
        }
        for (id, call) in std::mem::replace(&mut self.sent_state.calls, open) {
            if !self.sent_state.calls.contains_key(&id) {
                writer.send(&ThreadEvent::Call(CallEvent { call, state: CallEventKind::Settled })).await?;
            }
        }
        Ok(())
    }

    /// Sends new questions. They are read only if one has changed.
    async fn send_questions(&mut self, writer: &Writer, row: &ThreadRow, changes: &Changes) -> StreamResult {
        if row.head.questions().is_empty() {
            self.sent_state.questions.clear();
        } else if changes.questions {
            let mut asked = HashSet::new();
            let mut pages = QuestionPages::of(&self.engine, row.thread.key);
            while let Some(permit) = pages.permit(writer).await? {
                let mut page = EncodedPage::default();
                for question in pages.next().await? {
                    let digest = digest(&question);
                    if asked.insert(digest) && !self.sent_state.questions.contains(&digest) {
                        let event = ThreadEvent::Question(question);
                        page.push(event.name(), &event);
                    }
                }
                writer.send_page(permit, page).await?;
            }
            self.sent_state.questions = asked;
        }
        Ok(())
    }

    async fn send_all_views(&mut self, writer: &Writer, row: &ThreadRow) -> StreamResult {
        let mut after = None;
        loop {
            let permit = writer.permit(PAGE_BYTES + self.engine.settings.limits.view_bytes).await?;
            let mut page = self.engine.store.views(row.thread.key, after).await?;
            page.rows.sort_by_key(|view| view.at);
            let mut events = EncodedPage::default();
            for view in page.rows {
                self.push_view(&mut events, view);
            }
            writer.send_page(permit, events).await?;
            after = page.next;
            if after.is_none() {
                return Ok(());
            }
        }
    }

    async fn send_view(&mut self, writer: &Writer, row: &ThreadRow, key: ViewKey) -> StreamResult {
        let permit = writer.permit(self.engine.settings.limits.view_bytes).await?;
        let mut page = EncodedPage::default();
        if let Some(view) = self.engine.store.view(row.thread.key, &key).await? {
            self.push_view(&mut page, view);
        }
        writer.send_page(permit, page).await
    }

    /// Adds a view to a page, unless it was sent already.
    fn push_view(&mut self, page: &mut EncodedPage, view: ViewRow) {
        let version = (view.at, digest(&view.content));
        if self.sent_state.views.insert(view.key.clone(), version) != Some(version) {
            let event = ThreadEvent::View(view.into());
            page.push(event.name(), &event);
        }
    }
}

/// The unanswered questions of a thread, page by page. The limit of questions bounds their number.
struct QuestionPages<'a> {
    engine: &'a Engine,
    thread: ThreadKey,
    /// `None` after the last page.
    next: Option<PageRequest>,
}

impl QuestionPages<'_> {
    fn of(engine: &Engine, thread: ThreadKey) -> QuestionPages<'_> {
        QuestionPages { engine, thread, next: Some(PageRequest::first(PAGE)) }
    }

    /// Waits for the permission to read the next page. Returns `None` if there is none.
    async fn permit(&self, writer: &Writer) -> StreamResult<Option<PagePermit>> {
        match self.next {
            Some(_) => writer.permit(PAGE_BYTES + QUESTION_BYTES).await.map(Some),
            None => Ok(None),
        }
    }

    async fn next(&mut self) -> StreamResult<impl Iterator<Item = Question>> {
        let rows = match self.next.take() {
            None => Vec::new(),
            Some(page_request) => {
                let store = &self.engine.store;
                let page = store.inbox(Some(self.thread), &Visibility::All, page_request).await?;
                self.next = page.next.map(|after| PageRequest { after, limit: PAGE });
                page.rows
            }
        };
        Ok(rows.into_iter().map(Question::from))
    }
}

fn digest(content: &impl Serialize) -> u64 {
    let mut hasher = DefaultHasher::new();
    serde_json::to_string(content).unwrap_or_default().hash(&mut hasher);
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
    /// Digests of the questions that were sent, by thread.
    asked: HashMap<ThreadId, HashSet<u64>>,
}

impl AllStream {
    async fn run(mut self, writer: Writer, mut listener: Listener) -> End {
        let writer = &writer;
        if let Err(end) = self.send_inbox(writer).await {
            return end;
        }
        loop {
            let result = tokio::select! {
                () = tokio::time::sleep(HEARTBEAT) => writer.write(b": alive\n\n".to_vec()).await,
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
                    Ok(LiveEvent::Missed) => return End::Reason(MISSED),
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
            let permit = writer.permit(PAGE_BYTES + QUESTION_BYTES).await?;
            let Page { rows, next } = self.engine.store.inbox(None, &self.visible, page_request).await?;
            let mut page = EncodedPage::default();
            for item in rows {
                let (thread, question) = (item.thread.clone(), item.into());
                self.push_question(&mut page, &thread, Question { arguments: None, ..question });
            }
            writer.send_page(permit, page).await?;
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

    /// Adds a question to a page, unless it was sent before.
    fn push_question(&mut self, page: &mut EncodedPage, thread: &ThreadId, question: Question) {
        if self.asked.len() >= REMEMBERED && !self.asked.contains_key(thread) {
            self.asked.clear();
        }
        if self.asked.entry(thread.clone()).or_default().insert(digest(&question)) {
            let event = RuntimeEvent::Question(question);
            page.push(event.name(), &event);
        }
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
        let engine = Arc::clone(&self.engine);
        let mut pages = QuestionPages::of(&engine, thread.key);
        while let Some(permit) = pages.permit(writer).await? {
            let mut page = EncodedPage::default();
            for question in pages.next().await? {
                self.push_question(&mut page, id, question);
            }
            writer.send_page(permit, page).await?;
        }
        Ok(())
    }
}
