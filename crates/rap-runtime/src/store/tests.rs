//! Forces every case of the store's rules, on a real database. A batch is held open by a job that waits on a channel,
//! so that what runs in it does not depend on time.

mod batch;
mod file;
mod seen;
mod thread;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::mpsc;
use std::task::Poll;
use std::time::Duration;

use rap_agent::{
    Answer, Arguments, Choice, Entry, Event, Item, Letter, OnBusy, Outcome, Plan, PlannedCall, Seq, Server,
};
use rap_protocol::{AuthUrl, Body, EventId, ResponseUrl};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::*;

/// What is said to a thread that is to panic.
pub(super) const PANIC: &str = "panic";

type Pending<T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send>>;

/// What was handed over to be acted upon.
#[derive(Clone, Default)]
struct Acted(Arc<Mutex<Vec<Act>>>);

/// Whose effect it is, and the effect.
type Act = (Arc<Thread>, Effect);

impl Acted {
    fn take(&self) -> Vec<Act> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }

    fn count(&self, what: impl Fn(&Effect) -> bool) -> usize {
        self.0.lock().unwrap().iter().filter(|(_, effect)| what(effect)).count()
    }
}

impl Store {
    /// What a thread sees: what it inherits and what is its own, after one entry and up to another.
    async fn history(
        &self,
        thread: Arc<Thread>,
        after: Seq,
        up_to: Seq,
        limit: usize,
    ) -> Result<Vec<(Seq, Entry)>, Error> {
        self.read(move |conn| read::history(conn, &thread, after, up_to, Page::rows(limit))).await
    }
}

struct Fixture {
    dir: TempDir,
    store: Store,
    acted: Acted,
}

impl Fixture {
    fn new() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let acted = Acted::default();
        let store = open(&dir.path().join("rap.db"), &acted).unwrap();
        Fixture { dir, store, acted }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("rap.db")
    }

    /// As after a restart.
    async fn reopen(self) -> Fixture {
        self.store.close().await;
        let Fixture { dir, store, acted } = self;
        drop(store);
        acted.take();
        let store = open(&dir.path().join("rap.db"), &acted).unwrap();
        Fixture { dir, store, acted }
    }

    /// Another connection, which sees what is committed.
    fn look(&self) -> Connection {
        open_sqlite(&self.path()).unwrap()
    }

    /// Something that is done behind the store's back.
    fn alter(&self, sql: &str) {
        assert_eq!(self.look().execute(sql, []).unwrap(), 1, "{sql}");
    }

    async fn create(&self, thread: &str, message: Option<&str>) -> Receipt {
        self.store.create(new(thread, message), None).await.unwrap()
    }

    async fn tell(&self, thread: &str, message: Message) -> Result<Receipt, Error> {
        self.store.step(Lane::External, target(thread), message).await
    }

    async fn head(&self, thread: &str) -> Head {
        self.store.thread(id(thread)).await.unwrap().head
    }

    async fn history(&self, thread: &str) -> Vec<(Seq, Entry)> {
        let row = self.store.thread(id(thread)).await.unwrap();
        self.store.history(row.thread, 0, row.head.seq, usize::MAX).await.unwrap()
    }

    /// The history, a word for each entry.
    async fn words(&self, thread: &str) -> Vec<String> {
        self.history(thread).await.into_iter().map(|(_, entry)| word(entry.item)).collect()
    }

    /// Everything that a step writes, of all threads.
    fn rows(&self) -> Vec<String> {
        let conn = self.look();
        let mut all = Vec::new();
        for table in
            ["threads", "entries", "summaries", "held", "calls", "questions", "views", "seen", "letters"]
        {
            let mut select = conn.prepare(&format!("SELECT * FROM {table} ORDER BY 1, 2")).unwrap();
            let columns = select.column_count();
            let row = |row: &rusqlite::Row<'_>| {
                let values: Vec<_> = (0..columns).map(|at| row.get_ref(at).unwrap()).collect();
                Ok(format!("{table} {values:?}"))
            };
            all.extend(select.query_map([], row).unwrap().map(Result::unwrap));
        }
        all
    }

    /// A thread that has an active subscription and is idle.
    async fn subscribed(&self, thread: &str, call: &str) {
        let turn = self.head(thread).await.turn;
        self.tell(thread, calls(turn, &[call])).await.unwrap();
        self.tell(thread, returned(call, "subscribed", true)).await.unwrap();
        self.tell(thread, answered(turn + 1, "I listen")).await.unwrap();
    }

    /// An event that makes a child; the child's id.
    async fn bear(&self, thread: &str, call: &str, text: &str) -> String {
        self.acted.take();
        self.tell(thread, happened(call, text, None)).await.unwrap();
        let child = self.acted.take().pop().expect("a child is asked").0;
        child.id.as_str().to_owned()
    }
}

fn open(path: &Path, acted: &Acted) -> Result<Store, OpenError> {
    let acted = acted.clone();
    let outlet = Box::new(move |committed: Committed| {
        let Committed { thread, effects, .. } = committed;
        let with_thread = effects.into_iter().map(|effect| (Arc::clone(&thread), effect));
        acted.0.lock().unwrap().extend(with_thread);
    });
    let key = Key::parse(&"7".repeat(64)).unwrap();
    // Batches end by count or for want of jobs, never by time.
    let batches = WriterLimits {
        batch_jobs: BATCH_JOBS,
        batch_time: Duration::from_secs(3600),
        ..WriterLimits::default()
    };
    Store::open_with(path, key, AgentLimits::default(), batches, outlet)
}

fn id(text: &str) -> ThreadId {
    ThreadId::new(text).unwrap()
}

fn call(text: &str) -> CallId {
    CallId::new(text).unwrap()
}

fn target(thread: &str) -> Target {
    Target::Id(id(thread))
}

fn new(thread: &str, message: Option<&str>) -> NewThread {
    let message = message.map(Into::into);
    NewThread { id: id(thread), agent: "default".into(), user_id: None, title: None, message }
}

fn said(text: &str) -> Message {
    said_when_busy(text, OnBusy::Join)
}

fn said_when_busy(text: &str, on_busy: OnBusy) -> Message {
    Message::Said { text: text.into(), on_busy }
}

fn answered(turn: u64, text: &str) -> Message {
    Message::TurnEnded { turn, answer: Answer { text: text.into(), ..Answer::default() } }
}

fn calls(turn: u64, ids: &[&str]) -> Message {
    let planned = |text: &&str| PlannedCall {
        id: Some(call(text)),
        call_id: None,
        name: "tool".into(),
        arguments: Arguments::Given(Map::from_iter([("of".into(), json!(text))])),
        display: None,
        plan: Plan::Invoke(Server("http://127.0.0.1:9".into())),
    };
    let calls = ids.iter().map(planned).collect();
    Message::TurnEnded { turn, answer: Answer { calls, ..Answer::default() } }
}

fn returned(of: &str, text: &str, subscription: bool) -> Message {
    let result = Outcome { content: Body::Text(text.into()), display: Vec::new(), subscription };
    Message::Returned { call: call(of), result, past: None }
}

/// An event that is not associative: it makes a child.
fn happened(of: &str, text: &str, event: Option<&str>) -> Message {
    let event = Event {
        id: event.map(|event| EventId::new(event).unwrap()),
        text: text.into(),
        associative: false,
        is_final: false,
    };
    Message::Happened { call: call(of), event, past: None, seen: false, birth: None }
}

fn word(item: Item) -> String {
    match item {
        Item::User { text, .. } if text.starts_with("You are a thread of your own") => "born".into(),
        Item::User { text, .. } | Item::Notice { text } | Item::Summary { text, .. } => text,
        Item::Assistant { text, calls, .. } if calls.is_empty() => text,
        Item::Assistant { calls, .. } => {
            calls.iter().map(|call| call.id.as_str().to_owned()).collect::<Vec<_>>().join("+")
        }
        Item::Result { content: Body::Text(text), .. } => text,
        Item::Result { .. } => "content".into(),
    }
}

async fn is_pending<T>(answer: &mut Pending<T>) -> bool {
    poll_fn(|cx| Poll::Ready(answer.as_mut().poll(cx).is_pending())).await
}

/// Queues something and comes back without its answer.
async fn queue<T: 'static>(work: impl Future<Output = Result<T, Error>> + Send + 'static) -> Pending<T> {
    let mut answer: Pending<T> = Box::pin(work);
    assert!(is_pending(&mut answer).await, "answered at once");
    answer
}

async fn queue_step(store: &Store, thread: &str, message: Message) -> Pending<Receipt> {
    let (store, target) = (store.clone(), target(thread));
    queue(async move { store.step(Lane::External, target, message).await }).await
}

async fn queue_create(store: &Store, thread: &str, message: &str) -> Pending<Receipt> {
    let (store, new) = (store.clone(), new(thread, Some(message)));
    queue(async move { store.create(new, None).await }).await
}

async fn queue_sql(store: &Store, sql: &'static str) -> Pending<()> {
    let store = store.clone();
    // Behind the steps that were queued before.
    let job = move |conn: &Connection| conn.execute_batch(sql);
    queue(async move { Ok(store.writer.run(Lane::External, job).await?) }).await
}

/// A job that holds its batch open until it is released.
struct Gate {
    entered: mpsc::Receiver<()>,
    release: mpsc::Sender<()>,
    answer: Pending<()>,
}

impl Gate {
    async fn queue(store: &Store) -> Gate {
        let (enter, entered) = mpsc::channel();
        let (release, released) = mpsc::channel();
        let store = store.clone();
        let job = move |_: &Connection| {
            enter.send(()).unwrap();
            released.recv().unwrap();
            Ok(())
        };
        let answer = queue(async move { Ok(store.writer.run(Lane::External, job).await?) }).await;
        Gate { entered, release, answer }
    }

    /// Queues the gate and waits until it runs: what is queued from now on joins its batch.
    async fn hold(store: &Store) -> Gate {
        let gate = Gate::queue(store).await;
        gate.entered.recv().unwrap();
        gate
    }

    async fn release(self) -> Result<(), Error> {
        self.release.send(()).unwrap();
        self.answer.await
    }
}
