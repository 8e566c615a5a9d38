//! Batches on the writer's thread: what stands, what is undone, and who hears of it. A batch is held open by a job that
//! waits on a channel, so that what runs in it does not depend on time.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::mpsc;
use std::task::Poll;

use rap_agent::Ignored;

use super::*;
use crate::store::suite::fixture::{SERVER, answer, calls, enqueued, id, new, rejecting, to, user};
use crate::store::{Message, Once, Receipt};

type Answer<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type Results = Vec<Result<Receipt, Error>>;

async fn is_pending<T>(answer: &mut Answer<T>) -> bool {
    poll_fn(|cx| Poll::Ready(answer.as_mut().poll(cx).is_pending())).await
}

/// Queues something and comes back without its answer.
async fn queue<T: 'static>(work: impl Future<Output = T> + Send + 'static) -> Answer<T> {
    let mut answer: Answer<T> = Box::pin(work);
    assert!(is_pending(&mut answer).await, "answered at once");
    answer
}

async fn queue_messages(store: &SqliteStore, messages: Vec<Message>) -> Answer<Results> {
    let store = store.clone();
    queue(async move { store.apply(Lane::External, messages).await }).await
}

async fn queue_sql(store: &SqliteStore, sql: &'static str) -> Answer<Result<(), Error>> {
    let store = store.clone();
    queue(async move { store.write(move |conn| conn.execute_batch(sql)).await }).await
}

/// A job that holds its batch open until it is released.
struct Gate {
    entered: mpsc::Receiver<()>,
    release: mpsc::Sender<()>,
    answer: Answer<Result<(), Error>>,
}

impl Gate {
    async fn queue(store: &SqliteStore) -> Gate {
        let (enter, entered) = mpsc::channel();
        let (release, released) = mpsc::channel();
        let store = store.clone();
        let job = move |_: &Connection| {
            enter.send(()).unwrap();
            released.recv().unwrap();
            Ok(())
        };
        let answer = queue(async move { store.write(job).await }).await;
        Gate { entered, release, answer }
    }

    /// Queues the gate and waits until it runs: what is queued from now on joins its batch.
    async fn hold(store: &SqliteStore) -> Gate {
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
async fn every_answer_of_a_batch_waits_for_its_commit_refusals_included() {
    let (file, fixture) = fixture();
    fixture.create("busy", Some("hello")).await;
    let (store, before) = (file.store(), file.rows());
    fixture.commits.take();
    let first = Gate::hold(&store).await;
    let messages = vec![
        new("new", Some("hello")),
        to("busy", enqueued("later")),
        to("busy", rejecting("now")),
        to("nobody", user("hello")),
        new("busy", Some("again")),
    ];
    let mut each = Vec::new();
    for message in messages {
        each.push(queue_messages(&store, vec![message]).await);
    }
    let last = Gate::queue(&store).await;
    first.release.send(()).unwrap();
    last.entered.recv().unwrap();
    // All of them have run, in a batch that is still open.
    for answer in &mut each {
        assert!(is_pending(answer).await);
    }
    assert_eq!(file.rows(), before);
    assert!(fixture.commits.take().is_empty());
    last.release().await.unwrap();
    let mut answers = Vec::new();
    for answer in each {
        answers.extend(answer.await);
    }
    assert_eq!(answers[0].as_ref().unwrap().turn, 1);
    assert_eq!(answers[1].as_ref().unwrap().turn, 1);
    assert!(matches!(answers[2], Err(Error::Ignored(Ignored::Busy))));
    assert!(matches!(answers[3], Err(Error::NoThread)));
    assert!(matches!(answers[4], Err(Error::Exists)));
    assert_eq!(fixture.commits.take().len(), 2);
}

/// Runs `sql` in a batch with good steps; nothing of the batch may stand, nothing is dispatched, and the next message
/// meets the thread as it was.
async fn check_lost(sql: &'static str) {
    let (file, fixture) = fixture();
    fixture.create_idle("old").await;
    let (store, before) = (file.store(), file.rows());
    fixture.commits.take();
    let gate = Gate::hold(&store).await;
    // The second step rests on a head that will never have been, and so does the refusal.
    let once = Once { key: [1; 32], request: [1; 32] };
    let created = || Message { once: Some(once), ..new("new", Some("hello")) };
    let messages = vec![
        to("old", user("one")),
        to("old", enqueued("two")),
        to("old", rejecting("three")),
        created(),
        created(),
    ];
    let answers = queue_messages(&store, messages).await;
    let loses = queue_sql(&store, sql).await;
    assert!(matches!(gate.release().await, Err(Error::Unavailable(_))), "{sql}");
    for (at, answer) in answers.await.into_iter().enumerate() {
        assert!(matches!(answer, Err(Error::Unavailable(_))), "{sql}: {at}: {answer:?}");
    }
    assert!(loses.await.is_err(), "{sql}");
    assert_eq!(file.rows(), before, "{sql}");
    assert!(fixture.commits.take().is_empty(), "{sql}");
    assert!(matches!(fixture.tell("new", user("hello")).await, Err(Error::NoThread)), "{sql}");
    assert_eq!(fixture.tell("old", rejecting("four")).await.unwrap().turn, 2, "{sql}");
    assert_eq!(fixture.words("old").await, ["hello", "hello to you", "four"], "{sql}");
    assert_eq!(fixture.commits.take().len(), 1, "{sql}");
    // The key of a request that did not stand is free.
    assert_eq!(fixture.send(created()).await.unwrap().thread, id("new"), "{sql}");
}

/// Proves: LC-23, LC-38
#[tokio::test]
async fn of_a_batch_whose_commit_fails_nothing_stands_and_nothing_is_dispatched() {
    // A parent that is not there is found at the commit.
    check_lost(
        "PRAGMA defer_foreign_keys = ON; \
         INSERT INTO threads (no, id, parent, root, born_at, ancestors, incarnation, agent, created_at, updated_at, \
         version, status, head) VALUES (99, 'x', 98, 99, 0, '[]', 0, 'a', 0, 0, 1, 'idle', '{}')",
    )
    .await;
}

/// Proves: LC-23
#[tokio::test]
async fn of_a_batch_whose_transaction_is_lost_nothing_stands_and_nothing_is_dispatched() {
    check_lost("ROLLBACK").await;
    check_lost("ROLLBACK; BEGIN").await;
    check_lost("INSERT OR ROLLBACK INTO threads SELECT * FROM threads LIMIT 1").await;
}

/// Proves: LC-20, LC-23
#[tokio::test]
async fn while_another_process_keeps_the_database_locked_nothing_is_taken() {
    let (file, fixture) = fixture();
    fixture.create("thread", Some("hello")).await;
    let (other, before) = (file.look(), file.rows());
    fixture.commits.take();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    for input in [user("two"), answer(1, "an answer"), rejecting("three")] {
        let refused = fixture.tell("thread", input).await;
        assert!(matches!(&refused, Err(Error::Unavailable(_))), "{refused:?}");
    }
    // Reading goes on.
    assert_eq!(fixture.words("thread").await, ["hello"]);
    other.execute_batch("ROLLBACK").unwrap();
    assert_eq!(file.rows(), before);
    assert!(fixture.commits.take().is_empty());
    fixture.tell("thread", answer(1, "an answer")).await.unwrap();
    assert_eq!(fixture.words("thread").await, ["hello", "an answer"]);
}

/// Proves: LC-23
#[tokio::test]
async fn a_step_that_finds_no_room_on_the_disk_is_refused_and_what_fits_is_taken() {
    let (file, fixture) = fixture();
    fixture.create("thread", None).await;
    fixture.commits.take();
    let pages = async |pages: i64| {
        let job = move |conn: &Connection| conn.pragma_update(None, "max_page_count", pages);
        file.store().write(job).await.unwrap();
    };
    pages(1).await;
    let large = "x".repeat(1_000_000);
    let before = file.rows();
    let refused = fixture.tell("thread", user(&large)).await.unwrap_err();
    assert!(matches!(refused, Error::Unavailable(_)));
    assert!(refused.with_sources().contains("full"), "{}", refused.with_sources());
    assert!(matches!(fixture.tell("thread", user(&large)).await, Err(Error::Unavailable(_))));
    assert_eq!(file.rows(), before);
    assert!(fixture.commits.take().is_empty());
    // A message that comes while a batch is being undone is refused with it.
    let mut small = fixture.tell("thread", user("small")).await;
    for _ in 0..100 {
        if !matches!(small, Err(Error::Unavailable(_))) {
            break;
        }
        small = fixture.tell("thread", user("small")).await;
    }
    assert_eq!(small.unwrap().turn, 1);
    pages(1_000_000).await;
    fixture.tell("thread", user(&large)).await.unwrap();
    assert_eq!(fixture.words("thread").await, ["small", &large]);
}

/// Rows of a thread.
fn of(rows: &[String], thread: i64) -> Vec<String> {
    let mine = |row: &&String| {
        let (table, values) = row.split_once(" [Integer(").unwrap_or_default();
        let number: i64 = values.split(')').next().and_then(|number| number.parse().ok()).unwrap_or(0);
        number == if table == "entries" { (thread << 32) | (number & 0xffff_ffff) } else { thread }
    };
    rows.iter().filter(mine).cloned().collect()
}

/// A write that a row does not allow is found out by halves.
#[tokio::test]
async fn a_step_that_rows_do_not_allow_is_undone_as_a_whole_and_alone() {
    let (file, fixture) = fixture();
    let good: Vec<String> = (0..7).map(|number| format!("good_{number}")).collect();
    for thread in ["waits", "calls"].into_iter().chain(good.iter().map(String::as_str)) {
        fixture.create(thread, Some("hello")).await;
    }
    fixture.tell("waits", enqueued("later")).await.unwrap();
    // Where the released input has to go there is an entry already, and a call has the id of a new one.
    file.alter("INSERT INTO entries (key, body) VALUES ((1 << 32) + 3, '{}')");
    let incarnation = fixture.row("calls").await.thread.incarnation;
    file.alter(&format!(
        "INSERT INTO calls (thread, id, state, name, server, seq, since) \
         VALUES (2, 'rap_{incarnation:016x}_2', 1, 'tool', 's', 1, 0)"
    ));
    let before = file.rows();
    fixture.commits.take();
    let mut messages = vec![to("waits", answer(1, "an answer"))];
    messages.extend(good.iter().map(|thread| to(thread, user("more"))));
    messages.insert(5, to("calls", calls(1, &[SERVER, SERVER])));
    let answers = fixture.apply(messages).await;
    for (at, answer) in answers.iter().enumerate() {
        match at {
            0 | 5 => assert!(matches!(answer, Err(Error::Unreadable(_))), "{at}: {answer:?}"),
            _ => assert_eq!(answer.as_ref().unwrap().turn, 2, "{at}"),
        }
    }
    let after = file.rows();
    for thread in [1, 2] {
        assert_eq!(of(&after, thread), of(&before, thread));
        assert!(!of(&after, thread).is_empty());
    }
    for (number, thread) in good.iter().enumerate() {
        assert_ne!(of(&after, number as i64 + 3), of(&before, number as i64 + 3));
        assert_eq!(fixture.words(thread).await, ["hello", "more"]);
    }
    // Each of the others is told once.
    let told = fixture.commits.take();
    assert_eq!(told.len(), 7);
    assert!(told.iter().all(|committed| committed.thread.id.as_str().starts_with("good")));
    // Once the obstacles are gone, the same messages are taken.
    file.alter("DELETE FROM entries WHERE key = (1 << 32) + 3");
    file.alter("DELETE FROM calls WHERE thread = 2");
    fixture.tell("waits", answer(1, "an answer")).await.unwrap();
    assert_eq!(fixture.words("waits").await, ["hello", "an answer", "later"]);
    fixture.tell("calls", calls(1, &[SERVER, SERVER])).await.unwrap();
    assert_eq!(fixture.head("calls").await.batch().len(), 2);
}

/// Proves: LC-38
#[tokio::test]
async fn a_head_is_written_only_over_the_version_that_it_was_made_from() {
    let (file, fixture) = fixture();
    fixture.create_idle("thread").await;
    file.alter("UPDATE threads SET version = version + 1 WHERE id = 'thread'");
    let before = file.rows();
    let refused = fixture.tell("thread", user("more")).await;
    assert!(matches!(refused, Err(Error::Unreadable(_))), "{refused:?}");
    assert_eq!(file.rows(), before);
    // The head that was kept in memory is forgotten.
    fixture.tell("thread", user("again")).await.unwrap();
    assert_eq!(fixture.words("thread").await, ["hello", "hello to you", "again"]);
}

#[tokio::test]
async fn a_thread_whose_making_was_undone_is_not_remembered_under_the_key_of_another() {
    let (file, fixture) = fixture();
    // The step is made by the time its key is refused.
    let refuse = "CREATE TRIGGER refuse BEFORE INSERT ON repeats BEGIN SELECT RAISE(ABORT, 'no'); END";
    file.look().execute_batch(refuse).unwrap();
    let once = Some(Once { key: [7; 32], request: [7; 32] });
    let undone = fixture.send(Message { once, ..new("undone", Some("hello")) }).await;
    assert!(matches!(undone, Err(Error::Unreadable(_))), "{undone:?}");
    fixture.create("other", None).await;
    let lost = fixture.tell("undone", user("this is not for the other one")).await;
    assert!(matches!(lost, Err(Error::NoThread)), "{lost:?}");
    assert!(fixture.words("other").await.is_empty());
}

#[tokio::test]
async fn threads_are_counted_as_they_stand_also_after_a_lost_batch() {
    let (file, fixture) = fixture();
    fixture.create("asks", Some("hello")).await;
    fixture.create_idle("idle").await;
    let store = file.store();
    let gate = Gate::hold(&store).await;
    let lost = queue_messages(&store, vec![new("lost", Some("hello"))]).await;
    let loses = queue_sql(&store, "ROLLBACK").await;
    assert!(gate.release().await.is_err() && lost.await[0].is_err() && loses.await.is_err());
    drop(store);
    let fixture = fixture.reopen().await;
    let counted = fixture.store.census().await.unwrap().threads;
    let expected =
        [("closed", 0), ("failed", 0), ("running", 1), ("needs_you", 0), ("waiting", 0), ("idle", 1)];
    assert_eq!(counted, expected);
}
