//! Timers and messages between threads: when they are due, and postponing them.

use rap_agent::{BuiltIn, Input, Limits, ThreadMessage, TurnRetry};
use rap_protocol::Timestamp;

use super::Database;
use super::fixture::{
    ALERTS, Fixture, LOST_AFTER, SERVER, START, answer, built_in, calls, event, id, inline_event, seconds,
    spawns, user,
};
use crate::store::{DuePage, LongestPauses, SessionKey, Timer, WorkKey, WorkKind};

const ALWAYS: Timestamp = Timestamp(i64::MIN);

fn sleep(seconds: u64) -> BuiltIn {
    BuiltIn::SleepUntil { until: START.plus(super::fixture::seconds(seconds)) }
}

fn failed(turn: u64) -> Input {
    Input::TurnFailed { turn, why: "no".into(), retry: TurnRetry::Later }
}

/// Creates a thread whose retry is due after 30 s, and one with sleeps that end after 10, 20 and 40 s.
async fn timers(fixture: &Fixture) {
    fixture.create("failed", Some("hello")).await;
    fixture.send_input("failed", failed(1)).await.unwrap();
    fixture.create("sleeps", Some("hello")).await;
    fixture.send_input("sleeps", built_in(1, vec![sleep(20), sleep(10), sleep(40)])).await.unwrap();
}

async fn due(fixture: &Fixture, skip: &[SessionKey], limit: usize) -> Vec<Timer> {
    fixture.store.due_timers(fixture.now(), ALWAYS, skip, limit).await.unwrap()
}

pub(crate) async fn timers_are_due_oldest_first(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    timers(&fixture).await;
    let row = fixture.row("sleeps").await;
    let of = |at: usize| Timer {
        session: row.thread.session,
        thread: row.thread.key,
        call: Some(row.head.batch()[at].id.clone()),
    };
    fixture.clock.pass(seconds(9));
    assert_eq!(due(&fixture, &[], 10).await, []);
    fixture.clock.pass(seconds(1));
    assert_eq!(due(&fixture, &[], 10).await, [of(1)]);
    fixture.clock.pass(seconds(30));
    let thread = fixture.row("failed").await.thread;
    let own = Timer { session: thread.session, thread: thread.key, call: None };
    assert_eq!(due(&fixture, &[], 10).await, [own.clone(), of(1), of(0), of(2)]);
    // The limit applies to each of the two kinds.
    assert_eq!(due(&fixture, &[], 1).await, [own, of(1)]);
    // The step of a timer moves or removes it.
    let call = row.head.batch()[1].id.clone();
    fixture.send_input("sleeps", Input::TimerFired { call }).await.unwrap();
    fixture.send_input("failed", Input::Due).await.unwrap();
    assert_eq!(due(&fixture, &[], 10).await, [of(0), of(2)]);
}

pub(crate) async fn late_timeouts_have_a_grace_period_and_sleeps_do_not(database: Box<dyn Database>) {
    let fixture = Fixture::with(database, Limits { call_timeout: Some(seconds(5)), ..Limits::default() });
    timers(&fixture).await;
    fixture.create("calls", Some("hello")).await;
    fixture.send_input("calls", calls(1, &[SERVER])).await.unwrap();
    fixture.clock.pass(seconds(15));
    assert_eq!(due(&fixture, &[], 10).await.len(), 2);
    let late = fixture.store.due_timers(fixture.now(), START.plus(seconds(5)), &[], 10).await.unwrap();
    assert_eq!(late.iter().map(|timer| timer.thread).collect::<Vec<_>>(), [fixture.key("sleeps").await]);
    let in_time = fixture.store.due_timers(fixture.now(), START.plus(seconds(4)), &[], 10).await.unwrap();
    assert_eq!(in_time.len(), 2);
}

pub(crate) async fn sessions_can_be_excluded_from_timers_and_messages(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let mut sessions = Vec::new();
    for name in ["a", "b", "c"] {
        fixture.create(name, Some("hello")).await;
        fixture.send_input(name, spawns(1, 2)).await.unwrap();
        let children: Vec<_> = fixture.head(name).await.children().cloned().collect();
        fixture.send_input(children[0].as_str(), Input::Close).await.unwrap();
        fixture.send_input(children[1].as_str(), built_in(1, vec![sleep(10)])).await.unwrap();
        fixture.send_input(name, failed(2)).await.unwrap();
        sessions.push(fixture.session(name).await);
    }
    fixture.clock.pass(seconds(60));
    for skipped in 0..=3 {
        let skip = &sessions[..skipped];
        let timers = due(&fixture, skip, 10).await;
        assert_eq!(timers.len(), 2 * (3 - skipped));
        assert!(timers.iter().all(|timer| !skip.contains(&timer.session)));
        let messages = fixture.store.due_messages(fixture.now(), skip, 10).await.unwrap();
        // Each session has a report of the closed child, and the message that it was closed.
        let found: Vec<_> = messages.chunks(2).map(|two| [two[0].session, two[1].session]).collect();
        assert_eq!(found, sessions[skipped..].iter().map(|session| [*session; 2]).collect::<Vec<_>>());
    }
}

pub(crate) async fn postponed_timers_and_messages_are_not_due(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    timers(&fixture).await;
    fixture.create("root", Some("hello")).await;
    let call = fixture.subscribe("root").await;
    let child = fixture.spawn("root", &call, "event").await;
    fixture.send_input(&child, answer(1, "handled")).await.unwrap();
    fixture.clock.pass(seconds(60));
    let (due_timers, now) = (due(&fixture, &[], 10).await, fixture.now());
    assert_eq!(due_timers.len(), 4);
    let messages = fixture.store.due_messages(now, &[], 10).await.unwrap();
    assert_eq!(messages.len(), 1);
    let later = now.plus(seconds(60));
    fixture.store.postpone_due(due_timers[..2].to_vec(), vec![messages[0].key], now, later).await.unwrap();
    assert_eq!(due(&fixture, &[], 10).await, due_timers[2..]);
    assert!(fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap().is_empty());
    fixture.clock.pass(seconds(60));
    assert_eq!(due(&fixture, &[], 10).await.len(), 4);
    assert_eq!(fixture.store.due_messages(fixture.now(), &[], 10).await.unwrap(), messages);
    // Postponing did not change the thread, which still accepts the timer.
    fixture.send_input("failed", Input::Due).await.unwrap();
    assert_eq!(fixture.head("failed").await.turn(), 2);
    fixture.send(super::apply::delivery(&messages[0])).await.unwrap();
}

pub(crate) async fn a_timer_that_has_moved_is_not_postponed(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    timers(&fixture).await;
    fixture.clock.pass(seconds(60));
    let (timers, now) = (due(&fixture, &[], 10).await, fixture.now());
    // The retry failed again and has a new due time.
    fixture.send_input("failed", Input::Due).await.unwrap();
    fixture.send_input("failed", failed(2)).await.unwrap();
    let next = fixture.store.next_due(now).await.unwrap().unwrap();
    fixture.store.postpone_due(timers, Vec::new(), now, now.plus(seconds(3600))).await.unwrap();
    assert_eq!(fixture.store.next_due(now).await.unwrap(), Some(next));
}

pub(crate) async fn the_next_due_time_is_the_earliest_of_all_kinds(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let next = async |after: u64| {
        let next = fixture.store.next_due(START.plus(seconds(after))).await.unwrap();
        next.map(|next| (next.0 - START.0) / 1000)
    };
    assert_eq!(next(0).await, None);
    fixture.create("asks", Some("hello")).await;
    fixture.create("calls", Some("hello")).await;
    let call = fixture.call("calls", &[SERVER]).await.remove(0);
    // New work is due immediately, so it does not count.
    assert_eq!(next(0).await, None);
    let postpone = async |key: WorkKey, at: u64| {
        fixture.store.postpone(&key, START.plus(seconds(at)), 1, "503".into()).await.unwrap();
    };
    postpone(WorkKey::Ask { thread: fixture.key("asks").await, turn: 1 }, 70).await;
    assert_eq!(next(0).await, Some(70));
    postpone(WorkKey::Invoke { thread: fixture.key("calls").await, call }, 50).await;
    assert_eq!(next(0).await, Some(50));
    timers(&fixture).await;
    assert_eq!(next(0).await, Some(10));
    assert_eq!(
        [next(10).await, next(20).await, next(30).await, next(40).await],
        [Some(20), Some(30), Some(40), Some(50)]
    );
    assert_eq!([next(50).await, next(70).await], [Some(70), None]);
    // A postponed message.
    fixture.create("root", Some("hello")).await;
    fixture.send_input("root", spawns(1, 1)).await.unwrap();
    fixture.send_input("root", Input::Close).await.unwrap();
    let message = fixture.store.due_messages(START, &[], 1).await.unwrap().remove(0);
    let later = START.plus(LOST_AFTER);
    fixture.store.postpone_due(Vec::new(), vec![message.key], START, later).await.unwrap();
    assert_eq!(next(70).await, Some(900));
}

pub(crate) async fn messages_are_due_in_sending_order(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("root", Some("hello")).await;
    let call = fixture.subscribe("root").await;
    let mut children = Vec::new();
    for number in 0..3 {
        children.push(fixture.spawn("root", &call, &format!("event {number}")).await);
    }
    for child in children.iter().rev() {
        let report = BuiltIn::ReportToParent { report: child.clone() };
        fixture.send_input(child, built_in(1, vec![report])).await.unwrap();
        fixture.send_input(child, answer(2, "done")).await.unwrap();
    }
    fixture.send_input("root", event(&call, "one more", None)).await.unwrap();
    let messages = fixture.store.due_messages(fixture.now(), &[], 100).await.unwrap();
    let senders: Vec<_> = messages.iter().map(|message| message.sender.clone()).collect();
    let child = |at: usize| id(&children[at]);
    assert_eq!(senders, [child(2), child(2), child(1), child(1), child(0), child(0)]);
    assert!(matches!(&messages[0].message, ThreadMessage::Report { text, .. } if *text == children[2]));
    assert_eq!(messages[1].message, ThreadMessage::ChildClosed);
    assert!(messages.is_sorted_by_key(|message| message.key));
    let first = fixture.store.due_messages(fixture.now(), &[], 2).await.unwrap();
    assert_eq!(first, messages[..2]);
}

/// A clock that was set back makes no pause longer.
pub(crate) async fn no_pause_lasts_longer_than_its_kind_ever_does(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let longest = LongestPauses { retry: seconds(600), message: seconds(60), alert: seconds(7200) };
    fixture.create("asks", Some("hello")).await;
    fixture.create("calls", Some("hello")).await;
    let [call, checked] = fixture.call("calls", &[SERVER; 2]).await.try_into().unwrap();
    fixture.create("root", Some("hello")).await;
    fixture.send_input("root", spawns(1, 1)).await.unwrap();
    fixture.send_input("root", Input::Close).await.unwrap();
    fixture.create("failed", Some("hello")).await;
    fixture.send_input("failed", failed(1)).await.unwrap();
    fixture.create("holds", Some("hello")).await;
    let subscription = fixture.subscribe("holds").await;
    fixture.send_input("holds", user("work")).await.unwrap();
    fixture.call("holds", &[SERVER]).await;
    fixture.send_input("holds", inline_event(&subscription, "ding", None)).await.unwrap();
    let work = [
        WorkKey::Ask { thread: fixture.key("asks").await, turn: 1 },
        WorkKey::Invoke { thread: fixture.key("calls").await, call },
    ];
    let message = fixture.store.due_messages(START, &[], 1).await.unwrap().remove(0);
    let thread = fixture.key("calls").await;
    fixture.store.acknowledge(vec![(thread, checked.clone())], START).await.unwrap();
    let check = WorkKey::Check { thread, call: checked };
    for key in &work {
        fixture.store.postpone(key, START.plus(seconds(600)), 1, "503".into()).await.unwrap();
    }
    let (later, until) = (START.plus(seconds(60)), START.plus(seconds(7200)));
    fixture.store.postpone_due(Vec::new(), vec![message.key], START, later).await.unwrap();
    fixture.store.claim_alerts(ALERTS, START, until, 1).await.unwrap();
    // Pauses that are not longer than they may be are kept.
    fixture.store.end_long_pauses(START, longest).await.unwrap();
    assert_eq!(due(&fixture, &[], 10).await.len(), 0);
    assert!(fixture.store.due_messages(START, &[], 1).await.unwrap().is_empty());
    for key in &work {
        assert!(fixture.store.load_work(key, START).await.unwrap().is_none(), "{key:?}");
    }
    let now = START.minus(seconds(86_400));
    fixture.store.end_long_pauses(now, longest).await.unwrap();
    for key in &work {
        assert!(fixture.store.load_work(key, now).await.unwrap().is_some(), "{key:?}");
    }
    assert_eq!(fixture.store.due_messages(now, &[], 1).await.unwrap(), [message]);
    assert_eq!(fixture.store.claim_alerts(ALERTS, now, now, 1).await.unwrap().alerts.len(), 1);
    let timers = fixture.store.due_timers(now, ALWAYS, &[], 10).await.unwrap();
    let mut threads: Vec<_> = timers.iter().map(|timer| timer.thread).collect();
    threads.sort();
    assert_eq!(threads, [fixture.key("failed").await, fixture.key("holds").await]);
    // The pause before the next status check starts again.
    let page = DuePage { now: now.plus(LOST_AFTER), ..fixture.due_page() };
    let checks = fixture.page(WorkKind::Check, SERVER, page).await.work;
    assert!(checks.contains(&(fixture.session("calls").await, check)), "{checks:?}");
}
