//! Forces every case of the store's rules, on a real database. A batch is held open by a job that waits on a channel,
//! so that what runs in it does not depend on time.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::mpsc;
use std::task::Poll;
use std::time::Duration;

use rap_agent::{
    Answer, Arguments, Choice, Entry, Event, Item, Letter, OnBusy, Outcome, Plan, PlannedCall, Seq, Server,
    Usage, words,
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
struct Acted(Arc<Mutex<Vec<Carried>>>);

type Carried = (Arc<Thread>, Effect);

impl Acted {
    fn take(&self) -> Vec<(Arc<Thread>, Effect)> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }

    fn count(&self, what: impl Fn(&Effect) -> bool) -> usize {
        self.0.lock().unwrap().iter().filter(|(_, effect)| what(effect)).count()
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
        for table in ["threads", "entries", "held", "calls", "questions", "views", "seen", "letters"] {
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
    Store::open_with(path, key, Limits::default(), batches, outlet)
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
        plan: Plan::Invoke(Server("http://127.0.0.1:9".into())),
    };
    let calls = ids.iter().map(planned).collect();
    Message::TurnEnded { turn, answer: Answer { text: String::new(), calls, usage: Usage::default() } }
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
        Item::User { text, .. } | Item::Notice { text } => text,
        Item::Assistant { text, calls } if calls.is_empty() => text,
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

/// Proves: TR-13
#[tokio::test]
async fn every_reply_of_a_batch_waits_for_its_commit_refusals_included() {
    let fixture = Fixture::new();
    fixture.create("busy", Some("hello")).await;
    let (store, before) = (&fixture.store, fixture.rows());
    fixture.acted.take();
    let first = Gate::hold(store).await;
    let mut made = queue_create(store, "new", "hello").await;
    let mut taken = queue_step(store, "busy", said_when_busy("later", OnBusy::Enqueue)).await;
    let mut refused = queue_step(store, "busy", said_when_busy("now", OnBusy::Reject)).await;
    let mut unknown = queue_step(store, "nobody", said("hello")).await;
    let mut exists = queue_create(store, "busy", "again").await;
    let last = Gate::queue(store).await;
    first.release.send(()).unwrap();
    last.entered.recv().unwrap();
    // All of them have run, in a batch that is still open.
    for answer in [&mut made, &mut taken, &mut refused, &mut unknown, &mut exists] {
        assert!(is_pending(answer).await);
    }
    assert_eq!(fixture.rows(), before);
    assert!(fixture.acted.take().is_empty());
    last.release().await.unwrap();
    assert_eq!(made.await.unwrap().turn, 1);
    assert_eq!(taken.await.unwrap().turn, 1);
    assert!(matches!(refused.await, Err(Error::Ignored(Ignored::Busy))));
    assert!(matches!(unknown.await, Err(Error::NoThread)));
    assert!(matches!(exists.await, Err(Error::Exists)));
    assert_eq!(fixture.acted.take().len(), 1);
}

/// Runs `sql` in a batch with good steps; nothing of the batch may stand, nothing is acted upon, and the next message
/// meets the thread as it was.
async fn check_lost(sql: &'static str) {
    let fixture = Fixture::new();
    fixture.create("old", Some("hello")).await;
    fixture.tell("old", answered(1, "hello to you")).await.unwrap();
    let (store, before) = (&fixture.store, fixture.rows());
    fixture.acted.take();
    let gate = Gate::hold(store).await;
    // Two in a row: the second rests on a remembered head that will never have been.
    let first = queue_step(store, "old", said("one")).await;
    let second = queue_step(store, "old", said_when_busy("two", OnBusy::Enqueue)).await;
    let refused = queue_step(store, "old", said_when_busy("three", OnBusy::Reject)).await;
    let made = queue_create(store, "new", "hello").await;
    let loses = queue_sql(store, sql).await;
    assert!(matches!(gate.release().await, Err(Error::Unavailable(_))), "{sql}");
    for (name, answer) in [("first", first), ("second", second), ("refused", refused), ("made", made)] {
        let answer = answer.await;
        assert!(matches!(answer, Err(Error::Unavailable(_))), "{sql}: {name}: {answer:?}");
    }
    assert!(loses.await.is_err(), "{sql}");
    assert_eq!(fixture.rows(), before, "{sql}");
    assert!(fixture.acted.take().is_empty(), "{sql}");
    assert!(matches!(fixture.tell("new", said("hello")).await, Err(Error::NoThread)), "{sql}");
    let next = fixture.tell("old", said_when_busy("four", OnBusy::Reject)).await.unwrap();
    assert_eq!(next.turn, 2, "{sql}");
    assert_eq!(fixture.words("old").await, ["hello", "hello to you", "four"], "{sql}");
    assert_eq!(fixture.acted.take().len(), 1, "{sql}");
}

/// Proves: LC-23, LC-38
#[tokio::test]
async fn of_a_batch_whose_commit_fails_nothing_stands_and_nothing_is_acted_upon() {
    // A parent that is not there is found at the commit.
    check_lost(
        "PRAGMA defer_foreign_keys = ON; \
         INSERT INTO threads SELECT 99, 'x', 98, 99, 0, '[]', 0, 'a', NULL, NULL, 0, 0, 1, 'idle', NULL, NULL, '{}'",
    )
    .await;
}

/// Proves: LC-23
#[tokio::test]
async fn of_a_batch_whose_transaction_is_lost_nothing_stands_and_nothing_is_acted_upon() {
    check_lost("ROLLBACK").await;
    check_lost("ROLLBACK; BEGIN").await;
    check_lost("INSERT OR ROLLBACK INTO threads SELECT * FROM threads LIMIT 1").await;
}

/// Proves: LC-20, LC-23
#[tokio::test]
async fn while_another_process_keeps_the_database_locked_nothing_is_taken() {
    let fixture = Fixture::new();
    fixture.create("thread", Some("hello")).await;
    let (other, before) = (fixture.look(), fixture.rows());
    fixture.acted.take();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    for message in [said("two"), answered(1, "an answer"), said_when_busy("three", OnBusy::Reject)] {
        let refused = fixture.tell("thread", message).await;
        assert!(matches!(&refused, Err(Error::Unavailable(why)) if why.contains("locked")), "{refused:?}");
    }
    // Reading goes on.
    assert_eq!(fixture.words("thread").await, ["hello"]);
    other.execute_batch("ROLLBACK").unwrap();
    assert_eq!(fixture.rows(), before);
    assert!(fixture.acted.take().is_empty());
    fixture.tell("thread", answered(1, "an answer")).await.unwrap();
    assert_eq!(fixture.words("thread").await, ["hello", "an answer"]);
}

/// Proves: LC-23
#[tokio::test]
async fn a_step_that_finds_no_room_on_the_disk_is_refused_and_what_fits_is_taken() {
    let fixture = Fixture::new();
    fixture.create("thread", None).await;
    let pages = |pages: i64| {
        let store = fixture.store.clone();
        async move { store.write(move |conn| conn.pragma_update(None, "max_page_count", pages)).await.unwrap() }
    };
    pages(1).await;
    let large = "x".repeat(1_000_000);
    let before = fixture.rows();
    for _ in 0..2 {
        let refused = fixture.tell("thread", said(&large)).await;
        assert!(matches!(&refused, Err(Error::Unavailable(why)) if why.contains("full")), "{refused:?}");
        assert_eq!(fixture.rows(), before);
    }
    assert!(fixture.acted.take().is_empty());
    assert_eq!(fixture.tell("thread", said("small")).await.unwrap().turn, 1);
    pages(1_000_000).await;
    fixture.tell("thread", said(&large)).await.unwrap();
    assert_eq!(fixture.words("thread").await, ["small", &large]);
}

#[tokio::test]
async fn a_step_that_panics_is_undone_alone_and_its_thread_set_aside() {
    let fixture = Fixture::new();
    fixture.create("bad", Some("hello")).await;
    fixture.create("good", None).await;
    let before = fixture.history("bad").await;
    fixture.acted.take();
    let store = &fixture.store;
    let gate = Gate::hold(store).await;
    let good = queue_step(store, "good", said("one")).await;
    let panics = queue_step(store, "bad", said(PANIC)).await;
    let behind = queue_step(store, "bad", said("two")).await;
    let after = queue_step(store, "good", said_when_busy("three", OnBusy::Enqueue)).await;
    let never_made = queue_create(store, "worse", PANIC).await;
    gate.release().await.unwrap();
    good.await.unwrap();
    assert!(matches!(panics.await, Err(Error::SetAside)));
    assert!(matches!(behind.await, Err(Error::SetAside)));
    after.await.unwrap();
    assert!(matches!(never_made.await, Err(Error::SetAside)));
    assert_eq!(fixture.history("bad").await, before);
    assert_eq!(fixture.head("good").await.queued.inputs, 1);
    assert!(matches!(fixture.store.thread(id("worse")).await, Err(Error::NoThread)));
    // By whichever name it is meant.
    let no = fixture.store.thread(id("bad")).await.unwrap().thread.no;
    let by_number = fixture.store.step(Lane::Internal, Target::No(no), answered(1, "late")).await;
    assert!(matches!(by_number, Err(Error::SetAside)));
    assert_eq!(fixture.acted.take().len(), 1);
    // Until the next start.
    let fixture = fixture.reopen().await;
    fixture.tell("bad", answered(1, "late")).await.unwrap();
    assert_eq!(fixture.words("bad").await, ["hello", "late"]);
}

/// The head as it would stand in the database, at the next version.
fn write_behind(fixture: &Fixture, thread: &str, head: &Head) {
    let head = serde_json::to_string(head).unwrap();
    let sql = "UPDATE threads SET version = version + 1, head = ?2 WHERE id = ?1";
    assert_eq!(fixture.look().execute(sql, [thread, &head]).unwrap(), 1);
}

/// Proves: LC-16
#[tokio::test]
async fn a_step_never_rests_on_a_head_that_is_not_the_one_in_the_database() {
    let fixture = Fixture::new();
    fixture.create("thread", Some("hello")).await;
    let asking = fixture.head("thread").await;
    fixture.tell("thread", answered(1, "hello to you")).await.unwrap();
    let idle = fixture.head("thread").await;
    // Remembered is an idle thread; in the database it is busy: what the remembered one would take is refused.
    write_behind(&fixture, "thread", &Head { seq: idle.seq, ..asking.clone() });
    let refused = fixture.tell("thread", said_when_busy("one", OnBusy::Reject)).await;
    assert!(matches!(refused, Err(Error::Ignored(Ignored::Busy))), "{refused:?}");
    // Remembered is a busy one; in the database it is idle: what the remembered one would refuse is taken.
    write_behind(&fixture, "thread", &Head { turn: 7, ..idle.clone() });
    let taken = fixture.tell("thread", said_when_busy("two", OnBusy::Reject)).await.unwrap();
    assert_eq!(taken.turn, 8);
    assert_eq!(fixture.words("thread").await, ["hello", "hello to you", "two"]);
    // Both kinds step, but differently.
    let now = fixture.head("thread").await;
    write_behind(&fixture, "thread", &Head { turn: 20, ..now });
    assert!(matches!(fixture.tell("thread", answered(8, "stale")).await, Err(Error::Ignored(_))));
    assert_eq!(fixture.tell("thread", answered(20, "fresh")).await.unwrap().turn, 20);
}

/// Proves: LC-38
#[tokio::test]
async fn a_head_is_written_only_at_the_version_it_was_read_at() {
    let fixture = Fixture::new();
    fixture.create("thread", None).await;
    let conn = fixture.look();
    let at = |version| rows::update_head(&conn, 1, version, &Head::new(), None, now()).unwrap();
    assert!(!at(0));
    assert!(!at(2));
    assert!(at(1));
    assert!(!at(1));
    assert!(at(2));
    assert!(rows::is_at(&conn, 1, 3).unwrap() && !rows::is_at(&conn, 1, 2).unwrap());
}

#[tokio::test]
async fn a_step_whose_sql_fails_is_undone_as_a_whole_and_alone() {
    let fixture = Fixture::new();
    let store = &fixture.store;
    for thread in ["waits", "calls", "other"] {
        fixture.create(thread, Some("hello")).await;
    }
    fixture.tell("waits", said_when_busy("later", OnBusy::Enqueue)).await.unwrap();
    // Where the released input has to go there is an entry already, and a call has the id of a new one.
    fixture.alter("INSERT INTO entries (key, body) VALUES ((1 << 32) + 3, '{}')");
    fixture.alter(
        "INSERT INTO calls (thread, id, state, name, server, seq, since) VALUES (2, 'c2', 1, 'tool', 's', 1, 0)",
    );
    let before = fixture.rows();
    fixture.acted.take();
    let gate = Gate::hold(store).await;
    let releases = queue_step(store, "waits", answered(1, "an answer")).await;
    let opens = queue_step(store, "calls", calls(1, &["c1", "c2"])).await;
    let other = queue_step(store, "other", said("more")).await;
    gate.release().await.unwrap();
    assert!(matches!(releases.await, Err(Error::Unavailable(_))));
    assert!(matches!(opens.await, Err(Error::Unavailable(_))));
    other.await.unwrap();
    let of = |rows: &[String], thread: i64| -> Vec<String> {
        let threads = format!("threads [Integer({thread}),");
        let entries = |row: &&String| {
            row.starts_with("entries [") && {
                let key: i64 = row["entries [Integer(".len()..].split(')').next().unwrap().parse().unwrap();
                key >> 32 == thread
            }
        };
        let others = ["held", "calls"].map(|table| format!("{table} [Integer({thread}),"));
        let mine = |row: &&String| {
            row.starts_with(&threads) || entries(row) || others.iter().any(|start| row.starts_with(start))
        };
        rows.iter().filter(mine).cloned().collect()
    };
    let after = fixture.rows();
    assert_eq!(of(&after, 1), of(&before, 1));
    assert_eq!(of(&after, 2), of(&before, 2));
    assert_ne!(of(&after, 3), of(&before, 3));
    assert!(fixture.acted.take().iter().all(|(thread, _)| thread.id == id("other")));
    // Once the obstacles are gone, the same messages are taken.
    fixture.alter("DELETE FROM entries WHERE key = (1 << 32) + 3");
    fixture.alter("DELETE FROM calls WHERE id = 'c2'");
    fixture.tell("waits", answered(1, "an answer")).await.unwrap();
    assert_eq!(fixture.words("waits").await, ["hello", "an answer", "later"]);
    fixture.tell("calls", calls(1, &["c1", "c2"])).await.unwrap();
    assert_eq!(fixture.head("calls").await.batch.len(), 2);
}

#[tokio::test]
async fn what_is_written_beside_a_step_stands_with_it_or_neither_does() {
    let fixture = Fixture::new();
    fixture.create("thread", Some("hello")).await;
    fixture.acted.take();
    let before = fixture.rows();
    let step = |message, sql: &'static str| {
        fixture.store.step_and(Lane::Internal, target("thread"), message, move |conn| conn.execute_batch(sql))
    };
    let broken = step(answered(1, "an answer"), "INSERT INTO nothing VALUES (1)").await;
    assert!(matches!(broken, Err(Error::Unavailable(_))), "{broken:?}");
    assert_eq!(fixture.rows(), before);
    assert!(fixture.acted.take().is_empty());
    // What was stepped is remembered no more: neither the refusal nor the step rests on it.
    let mark = "INSERT INTO toolsets (hash, body) VALUES ('mark', x'00')";
    let refused = step(answered(7, "stale"), mark).await;
    assert!(matches!(refused, Err(Error::Ignored(Ignored::StaleTurn))), "{refused:?}");
    assert!(fixture.store.toolset("mark".into()).await.unwrap().is_none());
    assert_eq!(step(answered(1, "an answer"), mark).await.unwrap().turn, 1);
    assert!(fixture.store.toolset("mark".into()).await.unwrap().is_some());
}

#[test]
fn a_second_owner_is_refused_and_told_why() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rap.db");
    let store = open(&path, &Acted::default()).unwrap();
    let refused = open(&path, &Acted::default()).err().expect("it is locked").to_string();
    assert!(refused.contains("rap.db.lock is locked: another process"), "{refused}");
    drop(store);
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused_and_both_versions_are_named() {
    let fixture = Fixture::new();
    let version = |conn: &Connection| -> i64 {
        conn.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap()
    };
    assert_eq!(version(&fixture.look()), MIGRATIONS.len() as i64);
    fixture.look().pragma_update(None, "user_version", 999).unwrap();
    let Fixture { dir, store, .. } = fixture;
    store.close().await;
    drop(store);
    let path = dir.path().join("rap.db");
    let refused = open(&path, &Acted::default()).err().expect("it is newer").to_string();
    for part in ["rap.db", "version 999", &format!("up to {}", MIGRATIONS.len())] {
        assert!(refused.contains(part), "{refused}");
    }
    assert_eq!(version(&open_sqlite(&path).unwrap()), 999);
}

/// Proves: LC-20
#[test]
fn a_file_that_is_no_database_is_refused_and_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rap.db");
    let garbage = b"This is a letter to my aunt. ".repeat(1000);
    std::fs::write(&path, &garbage).unwrap();
    let refused = open(&path, &Acted::default()).err().expect("it is no database").to_string();
    assert!(refused.contains("rap.db") && refused.contains("not a database"), "{refused}");
    assert_eq!(std::fs::read(&path).unwrap(), garbage);
}

/// Proves: LC-20, LC-37
#[tokio::test]
async fn a_thread_that_can_not_be_read_takes_nothing_and_stops_no_other() {
    let fixture = Fixture::new();
    fixture.create("bad", Some("hello")).await;
    fixture.create("good", Some("hello")).await;
    let fixture = fixture.reopen().await;
    fixture.alter("UPDATE threads SET head = '{\"phase\": \"confused\"}' WHERE id = 'bad'");
    let before = fixture.rows();
    for message in [said("one"), answered(1, "two"), Message::Close] {
        assert!(matches!(fixture.tell("bad", message).await, Err(Error::Unavailable(_))));
    }
    assert!(matches!(fixture.store.thread(id("bad")).await, Err(Error::Unavailable(_))));
    assert_eq!(fixture.rows(), before);
    fixture.tell("good", answered(1, "hello to you")).await.unwrap();
    fixture.tell("good", said("more")).await.unwrap();
    // What is due for others is found as well.
    let asks = fixture.store.asks(10).await.unwrap();
    assert_eq!(asks.iter().map(|(thread, ..)| thread.id.as_str()).collect::<Vec<_>>(), ["good"]);
}

/// Proves: LC-16
#[tokio::test]
async fn held_input_becomes_history_in_the_order_in_which_it_came() {
    let mut fixture = Fixture::new();
    fixture.create("thread", Some("hello")).await;
    fixture.tell("thread", calls(1, &["sub", "slow"])).await.unwrap();
    fixture.tell("thread", returned("sub", "subscribed", true)).await.unwrap();
    for number in 0..30 {
        if number % 10 == 9 {
            fixture = fixture.reopen().await;
        }
        let text = format!("event {number}");
        let event = Event { id: None, text, associative: true, is_final: false };
        let event = Message::Happened { call: call("sub"), event, past: None, seen: false, birth: None };
        fixture.tell("thread", event).await.unwrap();
        let queued = said_when_busy(&format!("queued {number}"), OnBusy::Enqueue);
        fixture.tell("thread", queued).await.unwrap();
    }
    assert_eq!(fixture.head("thread").await.held.inputs, 30);
    fixture.tell("thread", returned("slow", "done", false)).await.unwrap();
    fixture.tell("thread", answered(2, "so much happened")).await.unwrap();
    let words = fixture.words("thread").await;
    let events: Vec<String> = (0..30).map(|number| format!("event {number}")).collect();
    let queued: Vec<String> = (0..30).map(|number| format!("queued {number}")).collect();
    assert_eq!(words[..4], ["hello", "sub+slow", "subscribed", "done"]);
    let results: Vec<&String> = words[4..64].iter().skip(1).step_by(2).collect();
    assert_eq!(results, events.iter().collect::<Vec<_>>());
    assert_eq!(words[64], "so much happened");
    assert_eq!(words[65..], queued);
    let left: i64 = fixture.look().query_row("SELECT count(*) FROM held", [], |row| row.get(0)).unwrap();
    assert_eq!(left, 0);
}

/// Proves: SE-09
#[tokio::test]
async fn a_child_sees_its_ancestors_up_to_its_birth_and_nothing_after_it() {
    let fixture = Fixture::new();
    fixture.create("root", Some("hello")).await;
    fixture.subscribed("root", "sub_1").await;
    let child = fixture.bear("root", "sub_1", "event 1").await;
    fixture.tell("root", said("after the child")).await.unwrap();
    fixture.subscribed(&child, "sub_2").await;
    let grandchild = fixture.bear(&child, "sub_2", "event 2").await;
    fixture.tell(&child, said("after the grandchild")).await.unwrap();
    fixture.tell(&grandchild, answered(1, "handled")).await.unwrap();
    let root = ["hello", "sub_1", "subscribed", "I listen"];
    let words = fixture.words(&child).await;
    assert_eq!(words[..4], root);
    // Its own: the synthetic call, the event, what it is, and what it does.
    assert_eq!(words[5..], ["event 1", "born", "sub_2", "subscribed", "I listen", "after the grandchild"]);
    let words = fixture.words(&grandchild).await;
    assert_eq!(words[..4], root);
    assert_eq!(words[5..10], ["event 1", "born", "sub_2", "subscribed", "I listen"]);
    assert_eq!(words[11..], ["event 2", "born", "handled", "the thread was closed"]);
    let rows = fixture.history(&grandchild).await;
    assert_eq!(rows.iter().map(|(seq, _)| *seq).collect::<Vec<_>>(), (1..=15).collect::<Vec<_>>());
    let row = fixture.store.thread(id(&grandchild)).await.unwrap();
    assert_eq!(row.thread.ancestors, [id("root"), id(&child)]);
    assert_eq!((row.root_id, row.parent_id), (id("root"), Some(id(&child))));
    // Page by page it is the same, wherever a page ends.
    for limit in 1..=rows.len() + 1 {
        let mut pages = Vec::new();
        loop {
            let after = pages.last().map_or(0, |(seq, _)| *seq);
            let thread = Arc::clone(&row.thread);
            let page = fixture.store.history(thread, after, row.head.seq, limit).await.unwrap();
            assert!(page.len() <= limit);
            if page.is_empty() {
                break;
            }
            pages.extend(page);
        }
        assert_eq!(pages, rows, "{limit} at a time");
    }
    // And a question covers exactly the entries up to its own.
    for up_to in 0..=row.head.seq {
        let seen = fixture.store.history(Arc::clone(&row.thread), 0, up_to, usize::MAX).await.unwrap();
        assert_eq!(seen, rows[..up_to as usize]);
    }
    // People see the arguments of the call that a synthetic one repeats.
    let seen =
        fixture.store.history_for_people(row.thread, 0, row.head.seq, Page::rows(usize::MAX)).await.unwrap();
    let echoes: Vec<Value> = seen
        .into_iter()
        .filter_map(|(_, entry)| match entry.item {
            Item::Assistant { calls, .. } => calls.into_iter().next(),
            _ => None,
        })
        .filter_map(|call| match call.arguments {
            Arguments::Echo { arguments, .. } => Some(json!(arguments)),
            _ => None,
        })
        .collect();
    assert_eq!(echoes, [json!({"of": "sub_1"}), json!({"of": "sub_2"})]);
}

/// Proves: LC-30, TR-25
#[tokio::test]
async fn an_event_that_comes_twice_makes_one_child_also_after_a_restart() {
    let fixture = Fixture::new();
    fixture.create("root", Some("hello")).await;
    fixture.subscribed("root", "sub").await;
    fixture.tell("root", happened("sub", "event", Some("e1"))).await.unwrap();
    let again = fixture.tell("root", happened("sub", "event", Some("e1"))).await;
    assert!(matches!(again, Err(Error::Ignored(Ignored::Duplicate))), "{again:?}");
    let fixture = fixture.reopen().await;
    let again = fixture.tell("root", happened("sub", "event", Some("e1"))).await;
    assert!(matches!(again, Err(Error::Ignored(Ignored::Duplicate))), "{again:?}");
    fixture.tell("root", happened("sub", "another", Some("e2"))).await.unwrap();
    assert_eq!(fixture.head("root").await.children.len(), 2);
}

/// Proves: LC-30, TR-25
#[tokio::test]
async fn a_result_that_comes_twice_is_one_result_also_after_a_restart() {
    let fixture = Fixture::new();
    fixture.create("thread", Some("hello")).await;
    fixture.tell("thread", calls(1, &["c1"])).await.unwrap();
    fixture.tell("thread", returned("c1", "done", false)).await.unwrap();
    let fixture = fixture.reopen().await;
    let again = fixture.tell("thread", returned("c1", "done", false)).await;
    assert!(matches!(again, Err(Error::Ignored(Ignored::Duplicate))), "{again:?}");
    assert_eq!(fixture.words("thread").await, ["hello", "c1", "done"]);
}

fn bytes_below(dir: &Path) -> Vec<u8> {
    let files = std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    files.flat_map(|file| std::fs::read(file).unwrap()).collect()
}

fn holds(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

#[tokio::test]
async fn where_a_question_leads_is_nowhere_in_the_files_in_plain_text() {
    let fixture = Fixture::new();
    fixture.create("thread", Some("hello")).await;
    fixture.tell("thread", calls(1, &["c1", "c2"])).await.unwrap();
    let choice = Choice {
        prompt: "Red or green?".into(),
        choices: vec!["red".into(), "green".into()],
        default: 0,
        response_url: ResponseUrl::new("http://127.0.0.1:9/answers/secret-of-the-choice").unwrap(),
        digest: 1,
    };
    fixture.tell("thread", Message::WantsChoice { call: call("c1"), choice }).await.unwrap();
    let url = AuthUrl::new("https://example.com/sign-in/secret-of-the-sign-in").unwrap();
    fixture.tell("thread", Message::WantsSignIn { call: call("c2"), url }).await.unwrap();
    fixture.tell("thread", Message::Chose { call: call("c1"), selected: Some(1) }).await.unwrap();
    let fixture = fixture.reopen().await;
    let check = || {
        let bytes = bytes_below(fixture.dir.path());
        assert!(holds(&bytes, "hello"), "there is nothing in the files");
        for secret in ["secret-of-the", "/answers/", "/sign-in/", "Red or green?"] {
            assert!(!holds(&bytes, secret), "{secret}");
        }
    };
    check();
    // Who has the key reads it.
    let due = fixture.store.due_answers(now(), 10).await.unwrap();
    assert_eq!(due.len(), 1);
    assert_eq!(due[0].response_url.expose(), "http://127.0.0.1:9/answers/secret-of-the-choice");
    assert_eq!(due[0].selected, 1);
    let inbox = fixture.store.inbox(None, 10).await.unwrap();
    assert_eq!(inbox.len(), 1);
    let url = "https://example.com/sign-in/secret-of-the-sign-in";
    assert!(matches!(&inbox[0].question, Asked::SignIn { auth_url } if auth_url == url));
    // A call that settles takes its questions and their answers with it.
    fixture.tell("thread", returned("c1", "done", false)).await.unwrap();
    fixture.tell("thread", returned("c2", "done", false)).await.unwrap();
    assert!(fixture.store.due_answers(now(), 10).await.unwrap().is_empty());
    assert!(fixture.store.inbox(None, 10).await.unwrap().is_empty());
    check();
}

/// Proves: LC-30
#[tokio::test]
async fn a_letter_that_is_handed_over_twice_is_delivered_once() {
    let fixture = Fixture::new();
    fixture.create("root", Some("hello")).await;
    fixture.subscribed("root", "sub").await;
    let children = [fixture.bear("root", "sub", "one").await, fixture.bear("root", "sub", "two").await];
    // One child ends by itself, the other with its parent.
    fixture.tell(&children[0], answered(1, "handled")).await.unwrap();
    let (first, again) = (fixture.store.letters(10).await.unwrap(), fixture.store.letters(10).await.unwrap());
    assert_eq!(first.len(), 1);
    for letter in first.into_iter().chain(again) {
        fixture.store.deliver(letter).await.unwrap();
    }
    assert_eq!(fixture.head("root").await.children, [id(&children[1])]);
    let version = |thread: &str| -> i64 {
        let sql = "SELECT version FROM threads WHERE id = ?1";
        fixture.look().query_row(sql, [thread], |row| row.get(0)).unwrap()
    };
    fixture.tell("root", Message::Close).await.unwrap();
    fixture.acted.take();
    let (first, again) = (fixture.store.letters(10).await.unwrap(), fixture.store.letters(10).await.unwrap());
    assert_eq!(first.len(), 1);
    let before = version(&children[1]);
    for letter in first.into_iter().chain(again) {
        fixture.store.deliver(letter).await.unwrap();
    }
    assert_eq!(version(&children[1]), before + 1);
    assert_eq!(fixture.acted.count(|effect| *effect == Effect::NotifyClose), 1);
    assert_eq!(
        fixture.acted.count(|effect| matches!(effect, Effect::Tell { letter: Letter::ChildClosed, .. })),
        1
    );
    let words = fixture.words(&children[1]).await;
    assert_eq!(words.iter().filter(|word| *word == "the thread was closed").count(), 1);
}

#[tokio::test]
async fn a_letter_is_kept_until_its_receiver_has_taken_or_refused_it() {
    let fixture = Fixture::new();
    fixture.create("root", Some("hello")).await;
    fixture.subscribed("root", "sub").await;
    let child = fixture.bear("root", "sub", "one").await;
    assert!(matches!(fixture.tell(&child, said(PANIC)).await, Err(Error::SetAside)));
    fixture.tell("root", Message::Close).await.unwrap();
    for _ in 0..2 {
        let letter = fixture.store.letters(10).await.unwrap().pop().expect("the letter is still there");
        assert!(matches!(fixture.store.deliver(letter).await, Err(Error::SetAside)));
    }
    let fixture = fixture.reopen().await;
    let letter = fixture.store.letters(10).await.unwrap().pop().expect("the letter is still there");
    fixture.store.deliver(letter).await.unwrap();
    assert!(fixture.head(&child).await.is_closed());
    assert_eq!(fixture.words(&child).await.last().unwrap(), "the thread was closed");
    // The child's own letter finds its parent closed, and is done with.
    let letter = fixture.store.letters(10).await.unwrap().pop().expect("the child tells its parent");
    fixture.store.deliver(letter).await.unwrap();
    assert!(fixture.store.letters(10).await.unwrap().is_empty());
}

/// Proves: LC-20, LC-37
#[tokio::test]
async fn a_store_whose_tables_can_not_be_read_is_not_readable() {
    let fixture = Fixture::new();
    fixture.create("thread", Some("hello")).await;
    fixture.store.is_readable().await.unwrap();
    fixture.look().execute_batch("ALTER TABLE threads RENAME TO gone").unwrap();
    assert!(matches!(fixture.store.is_readable().await, Err(Error::Unavailable(_))));
    assert!(matches!(fixture.store.thread(id("thread")).await, Err(Error::Unavailable(_))));
    fixture.look().execute_batch("ALTER TABLE gone RENAME TO threads").unwrap();
    fixture.store.is_readable().await.unwrap();
    assert_eq!(fixture.words("thread").await, ["hello"]);
}

/// Proves: LC-23
#[tokio::test]
async fn nothing_is_acknowledged_once_the_database_is_removed() {
    let fixture = Fixture::new();
    fixture.create("thread", Some("hello")).await;
    fixture.acted.take();
    let (path, aside) = (fixture.path(), fixture.dir.path().join("elsewhere"));
    std::fs::rename(&path, &aside).unwrap();
    for _ in 0..2 {
        let refused = fixture.tell("thread", said("more")).await;
        assert!(matches!(&refused, Err(Error::Unavailable(_))), "{refused:?}");
    }
    assert!(fixture.acted.take().is_empty());
    assert!(!path.exists(), "another database was made in its place");
    // Another file in its place is not the one that was opened.
    std::fs::write(&path, b"").unwrap();
    assert!(fixture.tell("thread", said("more")).await.is_err());
    std::fs::rename(&aside, &path).unwrap();
    fixture.tell("thread", said("more")).await.unwrap();
    assert_eq!(fixture.words("thread").await, ["hello", "more"]);
}

#[tokio::test]
async fn a_store_that_was_closed_is_one_file_and_refuses_everything() {
    let fixture = Fixture::new();
    fixture.create("thread", Some("hello")).await;
    fixture.words("thread").await;
    fixture.store.close().await;
    assert!(!beside_name(&fixture.path(), "-wal").exists(), "a part of the database is still in its log");
    assert!(matches!(fixture.tell("thread", said("more")).await, Err(Error::Closed)));
    assert!(matches!(fixture.store.thread(id("thread")).await, Err(Error::Closed)));
}

fn beside_name(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[tokio::test]
async fn a_thread_of_another_incarnation_is_another_thread() {
    let fixture = Fixture::new();
    fixture.create("thread", Some("hello")).await;
    let thread = fixture.store.thread(id("thread")).await.unwrap().thread;
    let token = |incarnation, name: &str| Target::Token { no: thread.no, incarnation, id: id(name) };
    let step = |target| fixture.store.step(Lane::External, target, said_when_busy("one", OnBusy::Enqueue));
    assert!(matches!(step(token(thread.incarnation ^ 1, "thread")).await, Err(Error::NoThread)));
    assert!(matches!(step(token(thread.incarnation, "other")).await, Err(Error::WrongThread)));
    step(token(thread.incarnation, "thread")).await.unwrap();
    assert_eq!(fixture.words("thread").await, ["hello"]);
    assert!(!words::INTERRUPTED.is_empty());
}

#[tokio::test]
async fn a_thread_whose_making_was_undone_is_not_remembered_under_the_number_of_another() {
    let fixture = Fixture::new();
    // The step is done by the time its mark is refused.
    let refuse = "CREATE TRIGGER refuse BEFORE INSERT ON repeats BEGIN SELECT RAISE(ABORT, 'no room'); END";
    fixture.look().execute_batch(refuse).unwrap();
    let undone = fixture.store.create(new("undone", Some("hello")), Some([7; 32])).await;
    assert!(matches!(undone, Err(Error::Unavailable(_))), "{undone:?}");
    fixture.create("other", None).await;
    let lost = fixture.tell("undone", said("this is not for the other one")).await;
    assert!(matches!(lost, Err(Error::NoThread)), "{lost:?}");
    assert!(fixture.words("other").await.is_empty());
}
