//! Tests of batches on the writer thread: commit, rollback and replies. A batch is kept open by a job that waits on a
//! channel, so the messages in it do not depend on timing.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::mpsc;
use std::task::Poll;

use rap_agent::Ignored;

use super::*;
use crate::store::suite::fixture::{SERVER, answer, calls, enqueued, id, new, rejecting, to, user};
use crate::store::{IdempotencyKey, Message, Receipt};

type PendingReply<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type Results = Vec<Result<Receipt, Error>>;

async fn is_pending<T>(answer: &mut PendingReply<T>) -> bool {
    poll_fn(|cx| Poll::Ready(answer.as_mut().poll(cx).is_pending())).await
}

/// Starts an operation that has to wait for its batch, and returns its pending reply.
async fn queue<T: 'static>(work: impl Future<Output = T> + Send + 'static) -> PendingReply<T> {
    let mut answer: PendingReply<T> = Box::pin(work);
    assert!(is_pending(&mut answer).await, "the reply came before the commit");
    answer
}

async fn queue_messages(store: &SqliteStore, messages: Vec<Message>) -> PendingReply<Results> {
    let store = store.clone();
    queue(async move { store.apply(MessageClass::OF_A_CLIENT, messages).await }).await
}

async fn queue_sql(store: &SqliteStore, sql: &'static str) -> PendingReply<Result<(), Error>> {
    let store = store.clone();
    queue(async move { store.write(move |conn| conn.execute_batch(sql)).await }).await
}

/// A job that keeps its batch open until it is released.
struct Gate {
    entered: mpsc::Receiver<()>,
    release: mpsc::Sender<()>,
    answer: PendingReply<Result<(), Error>>,
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

    /// Queues the gate and waits until it runs. Jobs that are queued afterwards join its batch.
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
async fn every_reply_of_a_batch_waits_for_its_commit_including_refusals() {
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
    // All of them have run in a batch that is still open.
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

/// Runs `sql`, which loses the transaction, in a batch with valid steps. Checks that nothing of the batch is stored,
/// that nothing is dispatched, and that the next message finds the thread unchanged.
async fn check_lost(sql: &'static str) {
    let (file, fixture) = fixture();
    fixture.create_idle("old").await;
    let (store, before) = (file.store(), file.rows());
    fixture.commits.take();
    let gate = Gate::hold(&store).await;
    // The second step and the refusal depend on a head that is rolled back.
    let idempotency_key = IdempotencyKey { key: [1; 32], former_key: None, request: [1; 32] };
    let created = || Message { idempotency_key: Some(idempotency_key), ..new("new", Some("hello")) };
    let messages = vec![
        to("old", user("one")),
        to("old", enqueued("two")),
        to("old", rejecting("three")),
        created(),
        created(),
    ];
    let answers = queue_messages(&store, messages).await;
    let fails = queue_sql(&store, sql).await;
    assert!(matches!(gate.release().await, Err(Error::Unavailable(_))), "{sql}");
    for (at, answer) in answers.await.into_iter().enumerate() {
        assert!(matches!(answer, Err(Error::Unavailable(_))), "{sql}: {at}: {answer:?}");
    }
    assert!(fails.await.is_err(), "{sql}");
    assert_eq!(file.rows(), before, "{sql}");
    assert!(fixture.commits.take().is_empty(), "{sql}");
    assert!(matches!(fixture.send_input("new", user("hello")).await, Err(Error::NoThread)), "{sql}");
    assert_eq!(fixture.send_input("old", rejecting("four")).await.unwrap().turn, 2, "{sql}");
    assert_eq!(fixture.texts("old").await, ["hello", "hello to you", "four"], "{sql}");
    assert_eq!(fixture.commits.take().len(), 1, "{sql}");
    // The key of a request that was rolled back can be used again.
    assert_eq!(fixture.send(created()).await.unwrap().thread, id("new"), "{sql}");
}

/// Proves: LC-23, LC-38
#[tokio::test]
async fn a_batch_whose_commit_fails_is_neither_stored_nor_dispatched() {
    // A missing parent is detected at the commit.
    check_lost(
        "PRAGMA defer_foreign_keys = ON; \
         INSERT INTO threads (no, id, parent, root, born_at, ancestors, incarnation, agent, created_at, updated_at, \
         version, status, head) VALUES (99, 'x', 98, 99, 0, '[]', 0, 'a', 0, 0, 1, 'idle', '{}')",
    )
    .await;
}

/// Proves: LC-23
#[tokio::test]
async fn a_batch_whose_transaction_is_lost_is_neither_stored_nor_dispatched() {
    check_lost("ROLLBACK").await;
    check_lost("ROLLBACK; BEGIN").await;
    check_lost("INSERT OR ROLLBACK INTO threads SELECT * FROM threads LIMIT 1").await;
}

/// Proves: LC-20, LC-23
#[tokio::test]
async fn messages_are_refused_while_another_process_locks_the_database() {
    let (file, fixture) = fixture();
    fixture.create("thread", Some("hello")).await;
    let (other, before) = (file.connection(), file.rows());
    fixture.commits.take();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    for input in [user("two"), answer(1, "an answer"), rejecting("three")] {
        let refused = fixture.send_input("thread", input).await;
        assert!(matches!(&refused, Err(Error::Unavailable(_))), "{refused:?}");
    }
    // Reads still work.
    assert_eq!(fixture.texts("thread").await, ["hello"]);
    other.execute_batch("ROLLBACK").unwrap();
    assert_eq!(file.rows(), before);
    assert!(fixture.commits.take().is_empty());
    fixture.send_input("thread", answer(1, "an answer")).await.unwrap();
    assert_eq!(fixture.texts("thread").await, ["hello", "an answer"]);
}

/// Proves: LC-23
#[tokio::test]
async fn a_step_that_does_not_fit_on_disk_is_refused_and_a_smaller_one_is_applied() {
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
    let refused = fixture.send_input("thread", user(&large)).await.unwrap_err();
    assert!(matches!(refused, Error::Unavailable(_)));
    assert!(refused.with_sources().contains("full"), "{}", refused.with_sources());
    assert!(matches!(fixture.send_input("thread", user(&large)).await, Err(Error::Unavailable(_))));
    assert_eq!(file.rows(), before);
    assert!(fixture.commits.take().is_empty());
    // A message that arrives while a batch is rolled back is refused with it.
    let mut small = fixture.send_input("thread", user("small")).await;
    for _ in 0..100 {
        if !matches!(small, Err(Error::Unavailable(_))) {
            break;
        }
        small = fixture.send_input("thread", user("small")).await;
    }
    assert_eq!(small.unwrap().turn, 1);
    pages(1_000_000).await;
    fixture.send_input("thread", user(&large)).await.unwrap();
    assert_eq!(fixture.texts("thread").await, ["small", &large]);
}

fn of(rows: &[String], thread: i64) -> Vec<String> {
    let mine = |row: &&String| {
        let (table, values) = row.split_once(" [Integer(").unwrap_or_default();
        let number: i64 = values.split(')').next().and_then(|number| number.parse().ok()).unwrap_or(0);
        number == if table == "entries" { (thread << 32) | (number & 0xffff_ffff) } else { thread }
    };
    rows.iter().filter(mine).cloned().collect()
}

/// The batch is split in halves to find the write that violates a constraint.
#[tokio::test]
async fn a_step_that_violates_a_constraint_is_rolled_back_alone_and_completely() {
    let (file, fixture) = fixture();
    let good: Vec<String> = (0..7).map(|number| format!("good_{number}")).collect();
    for thread in ["queues", "calls"].into_iter().chain(good.iter().map(String::as_str)) {
        fixture.create(thread, Some("hello")).await;
    }
    fixture.send_input("queues", enqueued("later")).await.unwrap();
    // There is already an entry at the position of the released input, and already a call with the id of a new one.
    file.alter("INSERT INTO entries (key, body) VALUES ((1 << 32) + 3, '{}')");
    let incarnation = fixture.row("calls").await.thread.incarnation;
    file.alter(&format!(
        "INSERT INTO calls (thread, id, state, name, server, seq, since) \
         VALUES (2, 'rap_{incarnation:016x}_2', 1, 'tool', 's', 1, 0)"
    ));
    let before = file.rows();
    fixture.commits.take();
    let mut messages = vec![to("queues", answer(1, "an answer"))];
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
        assert_eq!(fixture.texts(thread).await, ["hello", "more"]);
    }
    // Each of the other steps is reported once.
    let committed = fixture.commits.take();
    assert_eq!(committed.len(), 7);
    assert!(committed.iter().all(|step| step.thread.id.as_str().starts_with("good")));
    // Without the conflicting rows, the same messages are applied.
    file.alter("DELETE FROM entries WHERE key = (1 << 32) + 3");
    file.alter("DELETE FROM calls WHERE thread = 2");
    fixture.send_input("queues", answer(1, "an answer")).await.unwrap();
    assert_eq!(fixture.texts("queues").await, ["hello", "an answer", "later"]);
    fixture.send_input("calls", calls(1, &[SERVER, SERVER])).await.unwrap();
    assert_eq!(fixture.head("calls").await.batch().len(), 2);
}

/// Proves: LC-38
#[tokio::test]
async fn a_head_is_written_only_over_the_version_it_was_loaded_at() {
    let (file, fixture) = fixture();
    fixture.create_idle("thread").await;
    file.alter("UPDATE threads SET version = version + 1 WHERE id = 'thread'");
    let before = file.rows();
    let refused = fixture.send_input("thread", user("more")).await;
    assert!(matches!(refused, Err(Error::Unreadable(_))), "{refused:?}");
    assert_eq!(file.rows(), before);
    // The cached head was dropped.
    fixture.send_input("thread", user("again")).await.unwrap();
    assert_eq!(fixture.texts("thread").await, ["hello", "hello to you", "again"]);
}

#[tokio::test]
async fn a_thread_whose_creation_was_rolled_back_is_not_found_under_the_key_of_another() {
    let (file, fixture) = fixture();
    // The step is already written when writing its idempotency key fails.
    let refuse = "CREATE TRIGGER refuse BEFORE INSERT ON repeats BEGIN SELECT RAISE(ABORT, 'no'); END";
    file.connection().execute_batch(refuse).unwrap();
    let idempotency_key = Some(IdempotencyKey { key: [7; 32], former_key: None, request: [7; 32] });
    let undone = fixture.send(Message { idempotency_key, ..new("undone", Some("hello")) }).await;
    assert!(matches!(undone, Err(Error::Unreadable(_))), "{undone:?}");
    fixture.create("other", None).await;
    let lost = fixture.send_input("undone", user("not for the other thread")).await;
    assert!(matches!(lost, Err(Error::NoThread)), "{lost:?}");
    assert!(fixture.texts("other").await.is_empty());
}

#[tokio::test]
async fn threads_are_counted_correctly_after_a_lost_batch() {
    let (file, fixture) = fixture();
    fixture.create("asks", Some("hello")).await;
    fixture.create_idle("idle").await;
    let store = file.store();
    let gate = Gate::hold(&store).await;
    let lost = queue_messages(&store, vec![new("lost", Some("hello"))]).await;
    let fails = queue_sql(&store, "ROLLBACK").await;
    assert!(gate.release().await.is_err() && lost.await[0].is_err() && fails.await.is_err());
    drop(store);
    let fixture = fixture.reopen().await;
    let counted = fixture.store.counts().await.unwrap().threads;
    let expected =
        [("closed", 0), ("failed", 0), ("running", 1), ("needs_you", 0), ("waiting", 0), ("idle", 1)];
    assert_eq!(counted, expected);
}
