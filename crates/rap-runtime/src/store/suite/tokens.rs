//! Client tokens, and what a client that belongs to a user sees.

use rap_agent::{BuiltIn, Input, TurnRetry};
use rap_api::TokenScope;
use rap_protocol::{AuthUrl, UserId};

use super::Database;
use super::fixture::{
    Fixture, SERVER, answer, built_in, id, new, new_thread, seconds, spawns, subscribed, to, user,
};
use super::listings::list_in_pages;
use crate::store::apply::PANIC;
use crate::store::{
    CallRow, ClientToken, Delivery, DeliveryFilter, DeliveryKind, DeliveryOutcome, DeliveryRecord, Error,
    IdempotencyKey, InboxItem, Message, NewClientToken, PageRequest, Redelivery, SubscriptionRow, Target,
    ThreadFilter, ThreadRow, TimerRow, TokenDigest, Visibility,
};

fn new_token(fixture: &Fixture, name: &str, scope: TokenScope, user: Option<&str>) -> NewClientToken {
    NewClientToken {
        digest: TokenDigest::of(name),
        name: name.into(),
        scope,
        user: user.map(|user| UserId::new(user).unwrap()),
        created_at: fixture.now(),
    }
}

pub(crate) async fn a_token_is_found_by_its_digest_until_it_is_revoked(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let store = &fixture.store;
    let new = new_token(&fixture, "phone", TokenScope::Write, Some("ann"));
    let id = store.add_token(new.clone(), 10).await.unwrap().unwrap();
    let NewClientToken { digest, name, scope, user, created_at } = new;
    let stored = ClientToken { id, name, scope, user, created_at, used_at: None };
    assert_eq!(store.token(&digest).await.unwrap(), Some(stored.clone()));
    assert_eq!(store.token(&TokenDigest::of("another")).await.unwrap(), None);
    // The time of the last use never goes back.
    let later = fixture.now().plus(seconds(60));
    store.token_used(id, later).await.unwrap();
    store.token_used(id, fixture.now()).await.unwrap();
    let fixture = fixture.reopen().await;
    let store = &fixture.store;
    let used = ClientToken { used_at: Some(later), ..stored };
    assert_eq!(store.token(&digest).await.unwrap(), Some(used));
    assert!(store.revoke_token(id).await.unwrap());
    assert_eq!(store.token(&digest).await.unwrap(), None);
    assert!(!store.revoke_token(id).await.unwrap(), "it is revoked already");
    store.token_used(id, later).await.unwrap();
    // No other token gets the id of a revoked one.
    let next = store.add_token(new_token(&fixture, "next", TokenScope::Read, None), 10).await.unwrap();
    assert_ne!(next, Some(id));
}

pub(crate) async fn tokens_are_listed_page_by_page_and_their_number_is_bounded(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let store = &fixture.store;
    for (name, scope) in [("a", TokenScope::Admin), ("b", TokenScope::Write), ("c", TokenScope::Read)] {
        store.add_token(new_token(&fixture, name, scope, None), 3).await.unwrap().unwrap();
    }
    let another = || new_token(&fixture, "d", TokenScope::Read, None);
    assert_eq!(store.add_token(another(), 3).await.unwrap(), None);
    let show = |token: &ClientToken| format!("{} {}", token.name, token.scope);
    let list = async || list_in_pages(|page_request| store.tokens(page_request), show).await;
    assert_eq!(list().await, ["a admin", "b write", "c read"]);
    let first = store.tokens(PageRequest::first(1)).await.unwrap().rows.remove(0);
    assert!(store.revoke_token(first.id).await.unwrap());
    store.add_token(another(), 3).await.unwrap().unwrap();
    assert_eq!(list().await, ["b write", "c read", "d read"]);
}

fn of(user: &str) -> Visibility {
    Visibility::User(UserId::new(user).unwrap())
}

fn new_of(user: &str, thread: &str) -> Message {
    let new = super::super::NewThread { user_id: Some(UserId::new(user).unwrap()), ..new_thread(thread) };
    Message::new(Target::New(new), Input::Begin { message: Some("hello".into()) })
}

/// Gives a user a thread for each listing. Their names begin with the name of the user.
async fn busy_user(fixture: &Fixture, user: &str) -> Vec<String> {
    let name = |thread: &str| format!("{user}_{thread}");
    for thread in ["calls", "subscribes", "sleeps", "fails", "asks", "parent"] {
        fixture.send(new_of(user, &name(thread))).await.unwrap();
    }
    fixture.call(&name("calls"), &[SERVER, SERVER]).await;
    let call = fixture.call(&name("subscribes"), &[SERVER]).await.remove(0);
    fixture.send_input(&name("subscribes"), subscribed(&call)).await.unwrap();
    let sleep = BuiltIn::SleepUntil { until: fixture.now().plus(seconds(50)) };
    fixture.send_input(&name("sleeps"), built_in(1, vec![sleep])).await.unwrap();
    let failed = Input::TurnFailed { turn: 1, why: "no".into(), retry: TurnRetry::Later };
    fixture.send_input(&name("fails"), failed).await.unwrap();
    let call = fixture.call(&name("asks"), &[SERVER]).await.remove(0);
    let url = AuthUrl::new("https://example.com/sign-in").unwrap();
    fixture.send_input(&name("asks"), Input::SignInRequested { call, url }).await.unwrap();
    fixture.send_input(&name("parent"), spawns(1, 2)).await.unwrap();
    let row = fixture.row(&name("calls")).await;
    let record = DeliveryRecord {
        kind: DeliveryKind::Invocation,
        thread: Some(row.thread.key),
        thread_id: None,
        call: row.head.open_calls().next().map(|call| call.id.clone()),
        server: None,
        topic: String::new(),
        outcome: DeliveryOutcome::Retrying,
        attempts: 1,
        detail: String::new(),
        at: fixture.now(),
    };
    let nobody = DeliveryRecord { thread: None, call: None, ..record.clone() };
    fixture.store.record_deliveries(vec![record, nobody]).await.unwrap()
}

/// Returns the threads of all rows of each listing.
async fn listed(fixture: &Fixture, visible: &Visibility) -> Vec<(&'static str, Vec<String>)> {
    let store = &fixture.store;
    let threads = |page_request| {
        store.threads(ThreadFilter { visible: visible.clone(), page_request, ..ThreadFilter::default() })
    };
    let delivered =
        store.deliveries(DeliveryFilter { visible: visible.clone(), limit: 100, ..<_>::default() });
    let owner = |row: &Delivery| row.thread.as_ref().map_or("nobody".into(), |thread| thread.to_string());
    let calls = |page_request| store.calls(visible, page_request);
    let subscriptions = |page_request| store.subscriptions(visible, page_request);
    let timers = |page_request| store.timers(visible, page_request);
    let inbox = |page_request| store.inbox(None, visible, page_request);
    vec![
        ("threads", list_in_pages(threads, |row: &ThreadRow| row.thread.id.to_string()).await),
        ("calls", list_in_pages(calls, |row: &CallRow| format!("{} {}", row.thread, row.call)).await),
        ("subscriptions", list_in_pages(subscriptions, |row: &SubscriptionRow| row.thread.to_string()).await),
        ("timers", list_in_pages(timers, |row: &TimerRow| row.thread.to_string()).await),
        ("inbox", list_in_pages(inbox, |row: &InboxItem| row.thread.to_string()).await),
        ("deliveries", delivered.await.unwrap().rows.iter().map(owner).collect()),
    ]
}

pub(crate) async fn every_listing_of_a_user_has_the_rows_of_that_user_only(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("of_nobody", Some("hello")).await;
    let mut deliveries = Vec::new();
    for user in ["ann", "bob"] {
        deliveries.push(busy_user(&fixture, user).await);
    }
    let mut seen: Vec<String> = Vec::new();
    for user in ["ann", "bob"] {
        let children = fixture.head(&format!("{user}_parent")).await;
        let children: Vec<String> = children.children().map(|child| child.as_str().to_owned()).collect();
        assert_eq!(children.len(), 2);
        for (listing, rows) in listed(&fixture, &of(user)).await {
            let counts = [("threads", 8), ("calls", 4), ("subscriptions", 1), ("timers", 2), ("inbox", 1)];
            let count = counts.into_iter().find(|(name, _)| *name == listing).map_or(1, |(_, count)| count);
            assert_eq!(rows.len(), count, "{listing} of {user}: {rows:?}");
            let own = |row: &String| row.starts_with(user) || children.contains(row);
            assert!(rows.iter().all(own), "{listing} of {user}: {rows:?}");
            seen.extend(rows);
        }
    }
    for (listing, rows) in listed(&fixture, &of("nobody")).await {
        assert!(rows.is_empty(), "{listing}: {rows:?}");
    }
    // Together they see everything but the thread and the delivery that belong to nobody.
    let all = listed(&fixture, &Visibility::All).await.into_iter().flat_map(|(_, rows)| rows).count();
    assert_eq!(all, seen.len() + 2);
    one_by_one(&fixture, &deliveries).await;
}

/// Reads threads and deliveries of one user as the other user.
async fn one_by_one(fixture: &Fixture, deliveries: &[Vec<String>]) {
    let (store, ann) = (&fixture.store, of("ann"));
    assert!(store.thread(&id("ann_calls"), &ann).await.is_ok());
    for thread in ["bob_calls", "of_nobody", "no_thread"] {
        assert!(matches!(store.thread(&id(thread), &ann).await, Err(Error::NoThread)), "{thread}");
    }
    let children = async |parent: &str| {
        let page_request = PageRequest::first(100);
        let filter =
            ThreadFilter { parent: Some(id(parent)), visible: ann.clone(), page_request, ..<_>::default() };
        store.threads(filter).await.unwrap().rows.len()
    };
    assert_eq!([children("ann_parent").await, children("bob_parent").await], [2, 0]);
    let [of_ann, of_bob] = [0, 1].map(|user| deliveries[user][0].as_str());
    assert!(store.delivery(of_ann, &ann).await.unwrap().is_some());
    assert_eq!(store.redeliver(of_ann, &ann, fixture.now()).await.unwrap(), Redelivery::Due);
    for hidden in [of_bob, &deliveries[0][1]] {
        assert!(store.delivery(hidden, &ann).await.unwrap().is_none());
        let redelivered = store.redeliver(hidden, &ann, fixture.now()).await.unwrap();
        assert_eq!(redelivered, Redelivery::NoSuchDelivery);
    }
}

pub(crate) async fn a_message_of_a_user_reaches_threads_of_that_user_only(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    for (user, thread) in [("ann", "own"), ("bob", "foreign"), ("bob", "disabled"), ("bob", "bad")] {
        fixture.send(new_of(user, thread)).await.unwrap();
    }
    fixture.create("of_nobody", Some("hello")).await;
    assert!(matches!(fixture.send_input("disabled", user(PANIC)).await, Err(Error::Disabled)));
    let fork = |source: &str, thread: &str| {
        let target = Target::Fork { source: id(source), at: None, id: id(thread), incarnation: 7 };
        Message::new(target, Input::Begin { message: None })
    };
    let by_ann = |message: Message| Message { visible: of("ann"), ..message };
    fixture.send(by_ann(to("own", user("more")))).await.unwrap();
    fixture.send(by_ann(fork("own", "own_fork"))).await.unwrap();
    assert_eq!(fixture.row("own_fork").await.thread.user_id, Some(UserId::new("ann").unwrap()));
    fixture.database.corrupt_head(&id("bad"));
    let fixture = fixture.reopen().await;
    assert!(matches!(fixture.send_input("disabled", user(PANIC)).await, Err(Error::Disabled)));
    for (number, thread) in ["foreign", "of_nobody", "no_thread", "disabled", "bad"].into_iter().enumerate() {
        for message in [
            to(thread, user("hello")),
            to(thread, Input::Close),
            to(thread, Input::Resume),
            fork(thread, &format!("fork_{number}")),
        ] {
            let refused = fixture.send(by_ann(message)).await;
            assert!(matches!(refused, Err(Error::NoThread)), "{thread}: {refused:?}");
        }
    }
    // Ids are shared by all users, so that an id in use cannot be used again.
    let taken = fixture.send(by_ann(new("foreign", None))).await;
    assert!(matches!(taken, Err(Error::Exists)), "{taken:?}");
    assert_eq!(fixture.texts("foreign").await, ["hello"]);
    fixture.send_input("foreign", answer(1, "fine")).await.unwrap();
}

pub(crate) async fn a_key_of_a_release_without_client_tokens_is_recognised(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let key = |key, former_key| Some(IdempotencyKey { key: [key; 32], former_key, request: [0; 32] });
    let send = async |idempotency_key, thread: &str| {
        fixture.send(Message { idempotency_key, ..new(thread, Some("hello")) }).await.unwrap().thread
    };
    assert_eq!(send(key(1, None), "first").await, id("first"));
    assert_eq!(send(key(2, Some([1; 32])), "second").await, id("first"));
    assert_eq!(send(key(2, None), "second").await, id("second"));
    // The key of the client itself comes first.
    assert_eq!(send(key(2, Some([1; 32])), "third").await, id("second"));
}
