//! Applying messages: rounds, targets, panics, shared facts and messages between threads.

use rap_agent::{
    Bounds, Budgets, BuiltIn, Effect, Ignored, Input, Limits, Spending, Status, ThreadMessage, Write,
};

use super::Database;
use super::fixture::{
    Fixture, SERVER, answer, built_in, enqueued, entry_text, id, new, new_thread, rejecting, spawns, to, user,
};
use crate::store::apply::PANIC;
use crate::store::{Error, Message, MessageClass, OutboxMessage, Target, Visibility};

/// Proves: LC-16
pub(crate) async fn a_second_message_to_a_thread_sees_the_result_of_the_first(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("other", None).await;
    let results = fixture
        .apply(vec![
            new("thread", None),
            to("thread", user("one")),
            to("other", user("elsewhere")),
            to("thread", rejecting("two")),
            to("thread", answer(1, "first")),
            to("thread", rejecting("three")),
            to("thread", answer(1, "stale")),
        ])
        .await;
    let turn = |at: usize| results[at].as_ref().unwrap().turn;
    assert_eq!((turn(0), turn(1), turn(2), turn(4), turn(5)), (0, 1, 1, 1, 2));
    assert!(matches!(results[3], Err(Error::Ignored(Ignored::Busy))));
    assert!(matches!(results[6], Err(Error::Ignored(Ignored::StaleTurn))));
    assert_eq!(fixture.texts("thread").await, ["one", "first", "three"]);
    assert_eq!(fixture.texts("other").await, ["elsewhere"]);
    // Every committed step is reported.
    let reported: Vec<_> =
        fixture.commits.take().into_iter().map(|c| c.thread.id.as_str().to_owned()).collect();
    assert_eq!(reported.iter().filter(|thread| *thread == "thread").count(), 4);
    assert_eq!(reported.iter().filter(|thread| *thread == "other").count(), 2);
}

/// Proves: LC-17
pub(crate) async fn messages_to_many_threads_are_applied_together(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let names: Vec<String> = (0..50).map(|number| format!("thread_{number}")).collect();
    let results = fixture.apply(names.iter().map(|name| new(name, Some("hello"))).collect()).await;
    for (result, name) in results.into_iter().zip(&names) {
        assert_eq!(result.unwrap().thread, id(name));
    }
    fixture.send_inputs(names.iter().map(|name| (name.as_str(), answer(1, name))).collect()).await;
    for name in &names {
        assert_eq!(fixture.texts(name).await, ["hello", name]);
    }
    let committed = fixture.commits.take();
    assert_eq!(committed.len(), 100);
    assert!(committed[50..].iter().all(|one| one.step.head.status() == Status::Idle));
}

pub(crate) async fn more_messages_than_one_batch_holds_are_applied_in_order(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    let texts: Vec<String> = (0..300).map(|number| number.to_string()).collect();
    let messages = texts.iter().map(|text| to("thread", enqueued(text))).collect();
    for result in fixture.store.apply(MessageClass::Internal, messages).await {
        result.unwrap();
    }
    fixture.send_input("thread", answer(1, "an answer")).await.unwrap();
    assert_eq!(fixture.texts("thread").await[2..], texts);
}

pub(crate) async fn a_thread_is_addressed_by_id_key_or_token(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    let thread = fixture.row("thread").await.thread;
    let token = Target::Token { key: thread.key, incarnation: thread.incarnation, id: id("thread") };
    let targets = [Target::Id(id("thread")), Target::Key(thread.key), token];
    let messages: Vec<_> = targets.into_iter().map(|target| Message::new(target, enqueued("more"))).collect();
    // All three identify the same thread, even within a batch.
    for result in fixture.apply(messages).await {
        assert_eq!(result.unwrap().thread, id("thread"));
    }
    assert_eq!(fixture.head("thread").await.queued().inputs, 3);
}

pub(crate) async fn a_token_of_another_incarnation_finds_no_thread(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    let thread = fixture.row("thread").await.thread;
    let token = |incarnation, name: &str| {
        let target = Target::Token { key: thread.key, incarnation, id: id(name) };
        Message::new(target, enqueued("one"))
    };
    let results = fixture
        .apply(vec![token(thread.incarnation ^ 1, "thread"), token(thread.incarnation, "other")])
        .await;
    assert!(matches!(results[0], Err(Error::NoThread)));
    assert!(matches!(results[1], Err(Error::WrongThread)));
    fixture.send(token(thread.incarnation, "thread")).await.unwrap();
    assert_eq!(fixture.head("thread").await.queued().inputs, 1);
    assert!(matches!(fixture.send_input("nobody", user("hello")).await, Err(Error::NoThread)));
}

pub(crate) async fn an_existing_thread_is_not_created_again(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("old", Some("hello")).await;
    let results = fixture
        .apply(vec![new("old", Some("again")), new("new", Some("one")), new("new", Some("two"))])
        .await;
    assert!(matches!(results[0], Err(Error::Exists)));
    assert!(results[1].is_ok());
    assert!(matches!(results[2], Err(Error::Exists)));
    assert_eq!(fixture.texts("old").await, ["hello"]);
    assert_eq!(fixture.texts("new").await, ["one"]);
}

fn fork(source: &str, at: Option<u64>, thread: &str, text: &str) -> Message {
    let target =
        Target::Fork { source: id(source), at, id: id(thread), incarnation: new_thread(thread).incarnation };
    Message::new(target, Input::Begin { message: Some(text.into()) })
}

pub(crate) async fn a_fork_inherits_part_of_another_history(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("source", Some("hello")).await;
    fixture.call("source", &[SERVER]).await;
    // The call has no result yet, so the fork begins before it.
    fixture.send(fork("source", None, "now", "what if")).await.unwrap();
    assert_eq!(fixture.texts("now").await, ["hello", "what if"]);
    let call = fixture.head("source").await.batch()[0].id.clone();
    fixture.send_input("source", super::fixture::result(&call, "done")).await.unwrap();
    fixture.send_input("source", answer(2, "finished")).await.unwrap();
    // A fork and a message to its source in one batch.
    let results =
        fixture.apply(vec![fork("source", Some(3), "middle", "go on"), to("source", user("more"))]).await;
    assert!(results.iter().all(Result::is_ok));
    fixture.send(fork("middle", None, "fork_of_fork", "and on")).await.unwrap();
    assert_eq!(fixture.texts("middle").await, ["hello", "1 calls", "done", "go on"]);
    assert_eq!(fixture.texts("fork_of_fork").await, ["hello", "1 calls", "done", "go on", "and on"]);
    assert_eq!(fixture.texts("source").await, ["hello", "1 calls", "done", "finished", "more"]);
    let row = fixture.row("middle").await;
    assert_eq!(row.forked_from, Some(id("source")));
    assert_eq!((row.parent_id, row.root_id), (None, id("middle")));
    assert_ne!(row.thread.session, fixture.session("source").await);
    assert_eq!(row.head.open_calls().count(), 0);
    let fixture = fixture.reopen().await;
    assert_eq!(fixture.texts("middle").await, ["hello", "1 calls", "done", "go on"]);
}

pub(crate) async fn a_fork_of_a_missing_thread_or_to_an_existing_id_is_refused(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create_idle("source").await;
    let results = fixture
        .apply(vec![
            fork("nobody", None, "fork", "hello"),
            fork("source", None, "source", "hello"),
            fork("source", None, "fork", "hello"),
            fork("source", None, "fork", "again"),
        ])
        .await;
    assert!(matches!(results[0], Err(Error::NoThread)));
    assert!(matches!(results[1], Err(Error::Exists)));
    assert!(results[2].is_ok());
    assert!(matches!(results[3], Err(Error::Exists)));
}

pub(crate) async fn a_panicking_step_fails_one_message_and_disables_its_thread(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("bad", Some("hello")).await;
    fixture.create("good", None).await;
    fixture.commits.take();
    let results = fixture
        .apply(vec![
            to("good", user("one")),
            to("bad", user(PANIC)),
            to("bad", user("two")),
            to("good", enqueued("three")),
        ])
        .await;
    assert!(results[0].is_ok() && results[3].is_ok());
    assert!(matches!(results[1], Err(Error::Disabled)));
    assert!(matches!(results[2], Err(Error::Disabled)));
    assert!(fixture.commits.take().iter().all(|committed| committed.thread.id == id("good")));
    assert_eq!(fixture.texts("bad").await, ["hello"]);
    assert_eq!(fixture.head("good").await.queued().inputs, 1);
    // Also when it is addressed by its key.
    let key = fixture.key("bad").await;
    let by_key = fixture.send(Message::new(Target::Key(key), answer(1, "late"))).await;
    assert!(matches!(by_key, Err(Error::Disabled)));
    assert_eq!(fixture.store.counts().await.unwrap().disabled, 1);
    // Until the next restart.
    let fixture = fixture.reopen().await;
    fixture.send_input("bad", answer(1, "late")).await.unwrap();
    assert_eq!(fixture.texts("bad").await, ["hello", "late"]);
}

pub(crate) async fn a_new_thread_whose_first_step_panics_affects_no_other_thread(
    database: Box<dyn Database>,
) {
    let fixture = Fixture::new(database);
    fixture.create_idle("source").await;
    let never_made = Message::new(Target::New(new_thread("never")), user(PANIC));
    let never_forked = Message { input: user(PANIC), ..fork("source", None, "neither", "") };
    for message in [never_made, never_forked] {
        assert!(matches!(fixture.send(message).await, Err(Error::Disabled)));
    }
    assert!(matches!(fixture.store.thread(&id("never"), &Visibility::All).await, Err(Error::NoThread)));
    // The next thread may get the internal key that it would have had.
    fixture.create("next", Some("hello")).await;
    fixture.send_input("next", answer(1, "hello to you")).await.unwrap();
    assert_eq!(fixture.texts("next").await, ["hello", "hello to you"]);
    assert_eq!(fixture.store.counts().await.unwrap().disabled, 0);
}

fn spent(fixture: &Fixture) -> Vec<Spending> {
    let writes = fixture.commits.take().into_iter().flat_map(|committed| committed.step.writes);
    let spent = writes.filter_map(|write| match write {
        Write::Spending(spending) => Some(spending),
        _ => None,
    });
    spent.collect()
}

/// Two threads of a session share its budget, even within one batch.
pub(crate) async fn spending_is_passed_from_step_to_step(database: Box<dyn Database>) {
    let bounds = Bounds { turns: Some(4), ..Bounds::default() };
    let limits = Limits { budgets: Budgets { in_total: bounds, ..Budgets::default() }, ..Limits::default() };
    let fixture = Fixture::with(database, limits);
    fixture.create("root", Some("hello")).await;
    fixture.send_input("root", spawns(1, 1)).await.unwrap();
    let child = fixture.head("root").await.children().next().unwrap().as_str().to_owned();
    // Three model requests so far: the first one, the child's, and the root's second one.
    assert_eq!(spent(&fixture).last().unwrap().total.turns, 3);
    let other = new("other", Some("hello"));
    let results = fixture.apply(vec![to("root", user("one")), other, to(&child, user("two"))]).await;
    assert!(results.iter().all(Result::is_ok));
    // Each step continued from the spending of the one before it. The other session is counted separately, and its step
    // may be reported before or after the others.
    let (other, session): (Vec<_>, Vec<_>) =
        spent(&fixture).iter().map(|s| s.total.turns).partition(|turns| *turns == 1);
    assert_eq!((other, session), (vec![1], vec![4, 5]));
    assert_eq!(fixture.head("root").await.status(), Status::Running);
    assert_eq!(fixture.head(&child).await.status(), Status::NeedsYou);
    // The last step's spending was written.
    let fixture = fixture.reopen().await;
    fixture.send_input("root", user("three")).await.unwrap();
    assert_eq!(spent(&fixture)[0].total.turns, 6);
    assert_eq!(fixture.head("root").await.status(), Status::NeedsYou);
    // Resuming one thread sends a message to the others.
    fixture.send_input("root", Input::Resume).await.unwrap();
    let messages = fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap();
    let resumed: Vec<_> = messages.iter().map(|message| (&message.receiver, &message.message)).collect();
    assert_eq!(resumed, [(&id(&child), &ThreadMessage::Resume)]);
}

pub(super) fn delivery(message: &OutboxMessage) -> Message {
    let OutboxMessage { key, sender, receiver, message, .. } = message.clone();
    Message { outbox: Some(key), ..Message::new(Target::Id(receiver), Input::FromThread { sender, message }) }
}

/// Proves: LC-30
pub(crate) async fn a_message_between_threads_is_applied_once(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("root", Some("hello")).await;
    let call = fixture.subscribe("root").await;
    let children = [fixture.spawn("root", &call, "one").await, fixture.spawn("root", &call, "two").await];
    // One child ends on its own, the other one with its parent.
    fixture.send_input(&children[0], answer(1, "handled")).await.unwrap();
    let closed = fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap();
    assert_eq!(closed.len(), 1);
    assert_eq!((closed[0].sender.as_str(), closed[0].receiver.as_str()), (children[0].as_str(), "root"));
    assert_eq!(closed[0].session, fixture.session("root").await);
    let results = fixture.apply(vec![delivery(&closed[0]), delivery(&closed[0])]).await;
    assert!(results[0].is_ok());
    assert!(matches!(results[1], Err(Error::Ignored(Ignored::Duplicate))));
    let again = fixture.send(delivery(&closed[0])).await;
    assert!(matches!(again, Err(Error::Ignored(Ignored::Duplicate))));
    assert_eq!(fixture.head("root").await.children().collect::<Vec<_>>(), [&id(&children[1])]);

    // The state of the receiver does not tell that it has read a text before.
    fixture.send_input("root", user("tell the child")).await.unwrap();
    let turn = fixture.head("root").await.turn();
    let text = BuiltIn::SendMessageToChild { thread_id: children[1].clone(), message: "a word".into() };
    fixture.send_input("root", built_in(turn, vec![text])).await.unwrap();
    let sent = fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap();
    assert_eq!(sent.len(), 1);
    fixture.send(delivery(&sent[0])).await.unwrap();
    let held = fixture.head(&children[1]).await;
    let again = fixture.send(delivery(&sent[0])).await;
    assert!(matches!(again, Err(Error::Ignored(Ignored::Duplicate))));
    assert_eq!(fixture.head(&children[1]).await, held);

    fixture.send_input("root", Input::Close).await.unwrap();
    fixture.commits.take();
    let close = fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap();
    assert_eq!(close.len(), 1);
    fixture.send(delivery(&close[0])).await.unwrap();
    // The child is closed now and would refuse the message anyway.
    let again = fixture.send(delivery(&close[0])).await;
    assert!(matches!(again, Err(Error::Ignored(_))));
    let effects = fixture.commits.take_effects();
    let count = |expected: &Effect| effects.iter().filter(|(_, effect)| effect == expected).count();
    assert_eq!((count(&Effect::NotifyClose { cancelled: Vec::new() }), count(&Effect::Deliver)), (1, 1));
    let texts = fixture.texts(&children[1]).await;
    assert_eq!(texts.iter().filter(|entry_text| *entry_text == "the thread was closed").count(), 1);
}

pub(crate) async fn a_message_is_kept_until_its_receiver_has_applied_or_refused_it(
    database: Box<dyn Database>,
) {
    let fixture = Fixture::new(database);
    fixture.create("root", Some("hello")).await;
    let call = fixture.subscribe("root").await;
    let child = fixture.spawn("root", &call, "one").await;
    assert!(matches!(fixture.send_input(&child, user(PANIC)).await, Err(Error::Disabled)));
    fixture.send_input("root", Input::Close).await.unwrap();
    for _ in 0..2 {
        let message = fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap().remove(0);
        assert!(matches!(fixture.send(delivery(&message)).await, Err(Error::Disabled)));
    }
    let fixture = fixture.reopen().await;
    let message = fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap().remove(0);
    fixture.send(delivery(&message)).await.unwrap();
    assert!(fixture.head(&child).await.is_closed());
    // The child's own message is refused by the closed parent, and is removed.
    let message = fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap().remove(0);
    assert!(matches!(fixture.send(delivery(&message)).await, Err(Error::Ignored(Ignored::Closed))));
    assert!(fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap().is_empty());
}

pub(crate) async fn a_message_to_a_missing_thread_is_removed(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("root", Some("hello")).await;
    fixture.send_input("root", spawns(1, 1)).await.unwrap();
    fixture.send_input("root", Input::Close).await.unwrap();
    let message = fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap().remove(0);
    let to_nobody = Message { target: Target::Id(id("nobody")), ..delivery(&message) };
    assert!(matches!(fixture.send(to_nobody).await, Err(Error::NoThread)));
    assert!(fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap().is_empty());
}

pub(crate) async fn a_closed_store_refuses_everything(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    fixture.store.close().await;
    assert!(matches!(fixture.send_input("thread", user("more")).await, Err(Error::Closed)));
    assert!(matches!(fixture.store.thread(&id("thread"), &Visibility::All).await, Err(Error::Closed)));
    assert!(matches!(fixture.store.save_toolsets(Vec::new()).await, Err(Error::Closed)));
    let fixture = fixture.reopen().await;
    let entry = fixture.history("thread").await.remove(0).1;
    assert_eq!(entry_text(entry.item), "hello");
}
