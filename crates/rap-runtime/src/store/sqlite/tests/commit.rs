//! Tests of commits whose outcome is unknown: it is resolved by the versions of heads, and each step is reported once
//! and correctly.

use std::collections::{BTreeMap, VecDeque};

use rap_agent::Limits;

use super::*;
use crate::store::suite::fixture::{
    Commits, ManualClock, answer, enqueued, id, new, rejecting, rules, to, user,
};
use crate::store::{HistoryPage, IdempotencyKey, Message};

/// A store in memory whose commits have the given outcomes.
struct Faulty {
    store: SqliteStore,
    conn: Inline,
    commits: Commits,
    faults: Arc<Mutex<VecDeque<CommitFault>>>,
}

impl Faulty {
    fn new() -> Faulty {
        let faults: Arc<Mutex<VecDeque<CommitFault>>> = Arc::default();
        let next = Arc::clone(&faults);
        let fault = move || next.lock().unwrap().pop_front().unwrap_or(CommitFault::None);
        let conn = Inline::new(Connection::open_in_memory().unwrap(), fault, |_| ());
        let commits = Commits::default();
        let reported = commits.clone();
        let on_commit = Box::new(move |committed| reported.push(committed));
        let clock = Arc::new(ManualClock::new());
        let store = SqliteStore::inline(conn.clone(), key(), rules(Limits::default()), clock, on_commit);
        Faulty { store: store.unwrap(), conn, commits, faults }
    }

    fn next_commits(&self, faults: impl IntoIterator<Item = CommitFault>) {
        self.faults.lock().unwrap().extend(faults);
    }

    async fn apply(&self, messages: Vec<Message>) -> Vec<Result<Receipt, Error>> {
        self.store.apply(MessageClass::OF_A_CLIENT, messages).await
    }

    async fn send(&self, message: Message) -> Result<Receipt, Error> {
        self.apply(vec![message]).await.remove(0)
    }

    fn rows(&self) -> Vec<String> {
        self.conn.with(all_rows)
    }

    /// Returns the number of reported steps of each thread since the last call.
    fn reported(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for committed in self.commits.take() {
            *counts.entry(committed.thread.id.as_str().to_owned()).or_default() += 1;
        }
        counts
    }
}

fn with_key(message: Message, key: u8) -> Message {
    Message {
        idempotency_key: Some(IdempotencyKey { key: [key; 32], former_key: None, request: [0; 32] }),
        ..message
    }
}

/// Returns steps, repeats and refusals that depend on each other.
fn batch() -> Vec<Message> {
    vec![
        to("old", user("one")),
        to("old", rejecting("two")),
        with_key(new("new", Some("hello")), 1),
        with_key(new("new", Some("hello")), 1),
        new("new", Some("again")),
        to("new", enqueued("later")),
    ]
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_turns_out_to_be_committed_is_reported_once() {
    for faults in [
        vec![CommitFault::Unknown],
        // The commit that would have resolved it is lost as well, or unknown.
        vec![CommitFault::Unknown, CommitFault::Lost],
        vec![CommitFault::Unknown, CommitFault::Unknown, CommitFault::Lost],
    ] {
        let faulty = Faulty::new();
        faulty.apply(vec![new("old", Some("hello")), to("old", answer(1, "fine"))]).await;
        faulty.commits.take();
        faulty.next_commits(faults.clone());
        let answers = faulty.apply(batch()).await;
        assert_eq!(answers[0].as_ref().unwrap().turn, 2, "{faults:?}");
        assert!(matches!(answers[1], Err(Error::Ignored(_))), "{faults:?}");
        for at in [2, 3, 5] {
            assert_eq!(answers[at].as_ref().unwrap().thread, id("new"), "{faults:?}");
        }
        assert!(matches!(answers[4], Err(Error::Exists)), "{faults:?}");
        assert_eq!(faulty.reported(), BTreeMap::from([("new".into(), 2), ("old".into(), 1)]), "{faults:?}");
        // Nothing is reported later.
        faulty.send(to("old", answer(2, "more"))).await.unwrap();
        assert_eq!(faulty.reported(), BTreeMap::from([("old".into(), 1)]));
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_turns_out_to_be_lost_is_not_reported() {
    for faults in [vec![CommitFault::Lost], vec![CommitFault::Lost, CommitFault::Lost]] {
        let faulty = Faulty::new();
        faulty.apply(vec![new("old", Some("hello")), to("old", answer(1, "fine"))]).await;
        faulty.commits.take();
        let before = faulty.rows();
        faulty.next_commits(faults.clone());
        for (at, answer) in faulty.apply(batch()).await.into_iter().enumerate() {
            assert!(matches!(answer, Err(Error::Unavailable(_))), "{faults:?}: {at}: {answer:?}");
        }
        assert_eq!(faulty.rows(), before);
        assert!(faulty.reported().is_empty());
        // Cached heads were dropped: the old thread is idle, and the new one does not exist.
        assert_eq!(faulty.send(to("old", rejecting("now"))).await.unwrap().turn, 2);
        assert!(matches!(faulty.send(to("new", user("hello"))).await, Err(Error::NoThread)));
        assert_eq!(faulty.send(with_key(new("new", Some("hello")), 1)).await.unwrap().thread, id("new"));
    }
}

#[tokio::test(start_paused = true)]
async fn an_unknown_outcome_is_resolved_before_anything_else_is_applied() {
    let faulty = Faulty::new();
    faulty.next_commits([CommitFault::None, CommitFault::Unknown]);
    faulty.send(new("thread", None)).await.unwrap();
    let first = faulty.store.clone();
    let first =
        tokio::spawn(
            async move { first.apply(MessageClass::OF_A_CLIENT, vec![to("thread", user("one"))]).await },
        );
    tokio::task::yield_now().await;
    // This message arrives while the outcome of the first is unknown, and sees the result of the first.
    let second = faulty.send(to("thread", rejecting("two"))).await;
    assert!(matches!(second, Err(Error::Ignored(rap_agent::Ignored::Busy))), "{second:?}");
    assert_eq!(first.await.unwrap()[0].as_ref().unwrap().turn, 1);
    assert_eq!(faulty.reported(), BTreeMap::from([("thread".into(), 2)]));
}

#[tokio::test(start_paused = true)]
async fn a_write_outside_a_step_fails_with_its_commit() {
    let faulty = Faulty::new();
    faulty.next_commits([CommitFault::Lost]);
    assert!(matches!(faulty.store.save_toolsets(Vec::new()).await, Err(Error::Unavailable(_))));
    faulty.store.save_toolsets(Vec::new()).await.unwrap();
}

/// Whatever the outcomes of commits are, every reply is true, and each step is reported once.
#[tokio::test(start_paused = true)]
async fn replies_and_reported_steps_match_what_is_stored() {
    for seed in 1..=20_u64 {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut random = move |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let faulty = Faulty::new();
        let names: Vec<String> = (0..5).map(|number| format!("thread_{number}")).collect();
        for name in &names {
            faulty.send(new(name, Some("hello"))).await.unwrap();
        }
        faulty.commits.take();
        let mut sent: Vec<(String, String, bool)> = Vec::new();
        for round in 0..20 {
            let fault = [CommitFault::None, CommitFault::Lost, CommitFault::Unknown][random(3) as usize];
            faulty.next_commits([fault]);
            // Two senders run concurrently.
            let mut senders = Vec::new();
            for sender in 0..2 {
                let count = 1 + random(6);
                let texts: Vec<(String, String)> = (0..count)
                    .map(|at| (names[random(5) as usize].clone(), format!("{round} {sender} {at}")))
                    .collect();
                let messages = texts.iter().map(|(name, text)| to(name, enqueued(text))).collect();
                let store = faulty.store.clone();
                let task =
                    tokio::spawn(async move { store.apply(MessageClass::OF_A_CLIENT, messages).await });
                if random(2) == 0 {
                    tokio::task::yield_now().await;
                }
                senders.push((texts, task));
            }
            for (texts, task) in senders {
                for ((name, text), result) in texts.into_iter().zip(task.await.unwrap()) {
                    assert!(matches!(result, Ok(_) | Err(Error::Unavailable(_))), "{result:?}");
                    sent.push((name, text, result.is_ok()));
                }
            }
        }
        faulty.faults.lock().unwrap().clear();
        let reported: usize = faulty.reported().values().sum();
        assert_eq!(reported, sent.iter().filter(|(.., taken)| *taken).count(), "seed {seed}");
        for name in &names {
            faulty.send(to(name, answer(1, "an answer"))).await.unwrap();
            let row = faulty.store.thread(&id(name), &Visibility::All).await.unwrap();
            let page = HistoryPage { after: 2, up_to: row.head.seq(), rows: usize::MAX, bytes: usize::MAX };
            let history = faulty.store.history(&row.thread, page).await.unwrap();
            let said = history.into_iter().map(|(_, e)| crate::store::suite::fixture::entry_text(e.item));
            let mut said: Vec<String> = said.collect();
            said.sort();
            let of_thread = sent.iter().filter(|(to, _, taken)| to == name && *taken);
            let mut expected: Vec<String> = of_thread.map(|(_, text, _)| text.clone()).collect();
            expected.sort();
            assert_eq!(said, expected, "seed {seed}, {name}");
        }
    }
}
