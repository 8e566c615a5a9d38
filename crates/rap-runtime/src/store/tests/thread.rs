//! What is kept of a thread: its history, what it inherits, what it holds, what it asks, and its letters.

use super::*;

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
    let inbox = fixture.store.inbox(None, Wanted::first(10)).await.unwrap().rows;
    assert_eq!(inbox.len(), 1);
    let url = "https://example.com/sign-in/secret-of-the-sign-in";
    assert!(matches!(&inbox[0].question, Asked::SignIn { auth_url } if auth_url == url));
    // A call that settles takes its questions and their answers with it.
    fixture.tell("thread", returned("c1", "done", false)).await.unwrap();
    fixture.tell("thread", returned("c2", "done", false)).await.unwrap();
    assert!(fixture.store.due_answers(now(), 10).await.unwrap().is_empty());
    assert!(fixture.store.inbox(None, Wanted::first(10)).await.unwrap().rows.is_empty());
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
}
