//! Batches: what stands, what is undone, and who hears of it.

use super::*;

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
         INSERT INTO threads SELECT 99, 'x', 98, NULL, 99, 0, '[]', 0, 'a', NULL, NULL, 0, 0, 1, 'idle', NULL, NULL, '{}'",
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

fn mark(key: u8) -> Once {
    Once { key: [key; 32], request: [0; 32] }
}

/// Proves: LC-30, LC-38
#[tokio::test]
async fn a_request_of_a_client_that_is_repeated_counts_once_also_after_a_lost_batch_and_a_restart() {
    let fixture = Fixture::new();
    let mark_of_it = Some(mark(7));
    let store = fixture.store.clone();
    let gate = Gate::hold(&store).await;
    let again = store.clone();
    let made = queue(async move { again.create(new("thread", Some("hello")), mark_of_it).await }).await;
    let loses = queue_sql(&store, "ROLLBACK").await;
    assert!(gate.release().await.is_err() && made.await.is_err() && loses.await.is_err());
    // Nothing of it stands, so the repeat is the first.
    let first = store.create(new("thread", Some("hello")), mark_of_it).await.unwrap();
    assert_eq!(store.create(new("thread", Some("hello")), mark_of_it).await.unwrap(), first);
    drop(store);
    let fixture = fixture.reopen().await;
    assert_eq!(fixture.store.create(new("thread", Some("hello")), mark_of_it).await.unwrap(), first);
    let other = fixture.store.create(new("thread", Some("hello")), Some(mark(8))).await;
    assert!(matches!(other, Err(Error::Exists)), "{other:?}");
    let changed = Once { request: [1; 32], ..mark(7) };
    let changed = fixture.store.create(new("another", Some("hello")), Some(changed)).await;
    assert!(matches!(changed, Err(Error::KeyReused)), "{changed:?}");
    let say = |mark_of_it| {
        let later = said_when_busy("later", OnBusy::Enqueue);
        fixture.store.step_once(target("thread"), later, Some(mark_of_it))
    };
    assert_eq!(say(mark(9)).await.unwrap(), say(mark(9)).await.unwrap());
    assert_eq!(fixture.head("thread").await.queued.inputs, 1);
    say(mark(10)).await.unwrap();
    assert_eq!(fixture.head("thread").await.queued.inputs, 2);
    assert_eq!(fixture.words("thread").await, ["hello"]);
}

#[tokio::test]
async fn a_thread_whose_making_was_undone_is_not_remembered_under_the_number_of_another() {
    let fixture = Fixture::new();
    // The step is done by the time its mark is refused.
    let refuse = "CREATE TRIGGER refuse BEFORE INSERT ON repeats BEGIN SELECT RAISE(ABORT, 'no room'); END";
    fixture.look().execute_batch(refuse).unwrap();
    let undone = fixture.store.create(new("undone", Some("hello")), Some(mark(7))).await;
    assert!(matches!(undone, Err(Error::Unavailable(_))), "{undone:?}");
    fixture.create("other", None).await;
    let lost = fixture.tell("undone", said("this is not for the other one")).await;
    assert!(matches!(lost, Err(Error::NoThread)), "{lost:?}");
    assert!(fixture.words("other").await.is_empty());
}

#[tokio::test]
async fn threads_are_counted_as_they_stand_also_after_a_lost_batch_and_a_restart() {
    let fixture = Fixture::new();
    for thread in ["asked", "closed", "idle"] {
        fixture.create(thread, Some("hello")).await;
    }
    fixture.tell("closed", Message::Close).await.unwrap();
    fixture.tell("idle", answered(1, "an answer")).await.unwrap();
    let store = fixture.store.clone();
    let gate = Gate::hold(&store).await;
    let again = store.clone();
    let lost = queue(async move { again.create(new("lost", Some("hello")), None).await }).await;
    let loses = queue_sql(&store, "ROLLBACK").await;
    assert!(gate.release().await.is_err() && lost.await.is_err() && loses.await.is_err());
    drop(store);
    let fixture = fixture.reopen().await;
    let counted = fixture.store.census().await.unwrap().threads;
    let expected =
        [("closed", 1), ("failed", 0), ("running", 1), ("needs_you", 0), ("waiting", 0), ("idle", 1)];
    assert_eq!(counted, expected);
}
