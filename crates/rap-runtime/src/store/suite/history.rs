//! Histories as people and models see them.

use rap_agent::prompt::visible_entries;
use rap_agent::{Arguments, Cause, Entry, Input, Item, Plan, PlannedCall, Seq, Server, TurnAnswer, Usage};
use serde_json::{Map, Value, json};

use super::Database;
use super::fixture::{
    Fixture, SERVER, all, answer, calls, entry_text, id, inline_event, result, spawns, subscribed, user,
};
use crate::store::HistoryPage;

fn summarised(turn: u64, text: &str) -> Input {
    Input::Summarised { turn, text: text.into(), usage: Usage::default() }
}

/// Creates a root, a child and a grandchild. Root and child continue after spawning.
async fn family(fixture: &Fixture) -> (String, String) {
    fixture.create("root", Some("hello")).await;
    let call = fixture.subscribe("root").await;
    let child = fixture.spawn("root", &call, "event 1").await;
    fixture.send_input("root", user("after the child")).await.unwrap();
    let call = fixture.subscribe(&child).await;
    let grandchild = fixture.spawn(&child, &call, "event 2").await;
    fixture.send_input(&child, user("after the grandchild")).await.unwrap();
    fixture.send_input(&grandchild, answer(1, "handled")).await.unwrap();
    (child, grandchild)
}

/// Proves: SE-09
pub(crate) async fn a_child_sees_its_ancestors_up_to_its_spawn_point_only(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let (child, grandchild) = family(&fixture).await;
    let root = ["hello", "1 calls", "subscribed", "I listen"];
    let texts = fixture.texts(&child).await;
    assert_eq!(texts[..4], root);
    // Its own entries: the synthetic call, the event, the notice that it is a child, and its own turns.
    let own =
        ["synthetic", "event 1", "spawned", "1 calls", "subscribed", "I listen", "after the grandchild"];
    assert_eq!(texts[4..], own);
    let texts = fixture.texts(&grandchild).await;
    assert_eq!(texts[..4], root);
    assert_eq!(texts[4..10], own[..6]);
    assert_eq!(texts[10..], ["synthetic", "event 2", "spawned", "handled", "the thread was closed"]);
    let rows = fixture.history(&grandchild).await;
    assert_eq!(rows.iter().map(|(seq, _)| *seq).collect::<Vec<_>>(), (1..=15).collect::<Vec<_>>());
    let row = fixture.row(&grandchild).await;
    assert_eq!(row.thread.ancestors, [id("root"), id(&child)]);
    assert_eq!((row.root_id, row.parent_id, row.forked_from), (id("root"), Some(id(&child)), None));
}

pub(crate) async fn a_history_is_the_same_page_by_page(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let (_, grandchild) = family(&fixture).await;
    let rows = fixture.history(&grandchild).await;
    let row = fixture.row(&grandchild).await;
    for limit in 1..=rows.len() + 1 {
        let mut pages: Vec<(Seq, Entry)> = Vec::new();
        loop {
            let after = pages.last().map_or(0, |(seq, _)| *seq);
            let page = HistoryPage { after, up_to: row.head.seq(), rows: limit, bytes: usize::MAX };
            let page = fixture.store.history(&row.thread, page).await.unwrap();
            assert!(page.len() <= limit);
            if page.is_empty() {
                break;
            }
            pages.extend(page);
        }
        assert_eq!(pages, rows, "page size {limit}");
    }
    // A model request covers exactly the entries up to its sequence number.
    for up_to in 0..=row.head.seq() {
        let part = fixture.store.history(&row.thread, all(up_to)).await.unwrap();
        assert_eq!(part, rows[..up_to as usize]);
        check_prompt(&fixture, &grandchild, up_to).await;
    }
}

pub(crate) async fn a_page_is_bounded_in_bytes_and_has_one_entry_at_least(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some(&"x".repeat(5000))).await;
    fixture.send_input("thread", answer(1, &"y".repeat(5000))).await.unwrap();
    fixture.send_input("thread", user("short")).await.unwrap();
    let row = fixture.row("thread").await;
    let read = async |after, bytes| {
        let page = HistoryPage { after, up_to: row.head.seq(), rows: 10, bytes };
        let entries = fixture.store.history(&row.thread, page).await.unwrap();
        let stored: usize = entries.iter().map(|(_, entry)| json!(entry).to_string().len()).sum();
        assert_eq!(fixture.store.history_bytes(&row.thread, page).await.unwrap(), stored);
        entries.len()
    };
    assert_eq!(read(0, 1).await, 1);
    assert_eq!(read(1, 100).await, 1);
    assert_eq!(read(0, 6000).await, 2);
    assert_eq!(read(0, 1_000_000).await, 3);
}

pub(crate) async fn people_see_the_original_arguments_of_a_synthetic_call(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let (_, grandchild) = family(&fixture).await;
    // A late result of a call of the root that shows a placeholder.
    let call = fixture.call("root", &[SERVER]).await.remove(0);
    fixture.send_input("root", user("meanwhile")).await.unwrap();
    let turn = fixture.head("root").await.turn();
    fixture.send_input("root", answer(turn, "fine")).await.unwrap();
    fixture.send_input("root", result(&call, "late")).await.unwrap();
    let echoes = async |thread: &str| -> Vec<Value> {
        let echo = |arguments| match arguments {
            Arguments::Synthetic { arguments, .. } => Some(json!(arguments)),
            _ => None,
        };
        let calls = |(_, entry): (Seq, Entry)| match entry.item {
            Item::Assistant { calls, .. } => calls,
            _ => Vec::new(),
        };
        let history = fixture.history(thread).await;
        history.into_iter().flat_map(calls).filter_map(|call| echo(call.arguments)).collect()
    };
    assert_eq!(echoes(&grandchild).await, [json!({"at": 0}), json!({"at": 0})]);
    assert_eq!(echoes("root").await, [json!({"at": 0})]);
}

pub(crate) async fn a_page_ends_if_the_arguments_of_its_synthetic_calls_are_large(
    database: Box<dyn Database>,
) {
    const LARGE: usize = 100_000;
    let fixture = Fixture::new(database);
    fixture.create("root", Some("hello")).await;
    let mut subscribe = calls(1, &[SERVER]);
    if let Input::TurnEnded { answer, .. } = &mut subscribe {
        let large = Map::from_iter([("text".to_owned(), json!("x".repeat(LARGE)))]);
        answer.calls[0].arguments = Arguments::Given(large);
    }
    fixture.send_input("root", subscribe).await.unwrap();
    let call = fixture.head("root").await.batch()[0].id.clone();
    fixture.send_input("root", subscribed(&call)).await.unwrap();
    fixture.send_input("root", answer(2, "I listen")).await.unwrap();
    for turn in 3..6 {
        fixture.send_input("root", inline_event(&call, "event", None)).await.unwrap();
        fixture.send_input("root", answer(turn, "seen")).await.unwrap();
    }
    let row = fixture.row("root").await;
    let page = |after| HistoryPage { after, up_to: row.head.seq(), rows: 1000, bytes: LARGE * 2 };
    // The entries after the call itself are small, but each event shows the arguments of the call.
    let first = fixture.store.history(&row.thread, page(3)).await.unwrap();
    let last = first.last().map(|(seq, _)| *seq).unwrap();
    assert!(last < row.head.seq(), "a page up to {last}");
    let rest = fixture.store.history(&row.thread, page(last)).await.unwrap();
    assert_eq!(rest.last().map(|(seq, _)| *seq), Some(row.head.seq()));
}

/// Checks that the entries for a prompt are those that the rules select from the whole history.
async fn check_prompt(fixture: &Fixture, thread: &str, up_to: Seq) {
    let row = fixture.row(thread).await;
    let all = fixture.store.history(&row.thread, all(up_to)).await.unwrap();
    let read = fixture.store.prompt_entries(&row.thread, up_to).await.unwrap();
    // The history for people adds arguments to synthetic calls.
    let plain = |mut entries: Vec<Entry>| {
        for entry in &mut entries {
            let Item::Assistant { calls, .. } = &mut entry.item else { continue };
            for call in calls {
                if let Arguments::Synthetic { arguments, .. } = &mut call.arguments {
                    *arguments = None;
                }
            }
        }
        entries
    };
    assert_eq!(plain(read), plain(visible_entries(all)), "{thread} up to {up_to}");
}

async fn prompt_words(fixture: &Fixture, thread: &str) -> Vec<String> {
    let row = fixture.row(thread).await;
    let entries = fixture.store.prompt_entries(&row.thread, row.head.seq()).await.unwrap();
    entries.into_iter().map(|entry| entry_text(entry.item)).collect()
}

pub(crate) async fn entries_covered_by_a_summary_are_not_read_and_not_deleted(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("root", Some("hello")).await;
    let call = fixture.subscribe("root").await;
    let before = fixture.spawn("root", &call, "event 1").await;
    fixture.send_input("root", user("more")).await.unwrap();
    fixture.send_input("root", summarised(3, "SHORT")).await.unwrap();
    fixture.send_input("root", answer(4, "fine")).await.unwrap();
    let between = fixture.spawn("root", &call, "event 2").await;
    fixture.send_input("root", user("even more")).await.unwrap();
    fixture.send_input("root", summarised(5, "SHORTER")).await.unwrap();

    let open = |text: &str, children: &[&str]| {
        let subscription = format!("Active subscriptions, which cancel_subscription ends:\n- {call} (tool)");
        let lines: String = children.iter().map(|child| format!("\n- {child}")).collect();
        let started = "Threads that this one started, which send_message_to_child reaches:";
        format!("{text}\n\n{subscription}\n\n{started}{lines}")
    };
    let (first, second) = (open("SHORT", &[&before]), open("SHORTER", &[&before, &between]));
    assert_eq!(prompt_words(&fixture, "root").await, [second.as_str(), "fine", "even more"]);
    let all = ["hello", "1 calls", "subscribed", "I listen", "more", &first, "fine", "even more", &second];
    assert_eq!(fixture.texts("root").await, all);

    // A child sees the summary that was current when it was spawned, not a later one.
    assert_eq!(prompt_words(&fixture, &before).await[..4], all[..4]);
    let seen = prompt_words(&fixture, &between).await;
    assert_eq!(seen[..4], [first.as_str(), "I listen", "more", "fine"]);
    assert_eq!(seen[5..], ["event 2", "spawned"]);
    for thread in ["root", before.as_str(), between.as_str()] {
        for up_to in 0..=fixture.head(thread).await.seq() {
            check_prompt(&fixture, thread, up_to).await;
        }
    }

    // Its own summary covers the inherited entries. The synthetic call keeps the arguments of the original call.
    fixture.send_input(&between, summarised(1, "OWN")).await.unwrap();
    assert_eq!(prompt_words(&fixture, &between).await[0], "OWN");
    assert_eq!(prompt_words(&fixture, &between).await[2..], ["event 2", "spawned"]);
    assert_eq!(fixture.texts(&between).await.len(), 11);
    let fixture = fixture.reopen().await;
    check_prompt(&fixture, &between, fixture.head(&between).await.seq()).await;
    let row = fixture.row(&between).await;
    let entries = fixture.store.prompt_entries(&row.thread, row.head.seq()).await.unwrap();
    let Item::Assistant { calls, .. } = &entries[1].item else { panic!("the event is not a synthetic call") };
    let expected = Map::from_iter([("at".to_owned(), json!(0))]);
    assert!(
        matches!(&calls[0].arguments, Arguments::Synthetic { arguments: Some(arguments), .. } if *arguments == expected)
    );
}

pub(crate) async fn entries_since_the_last_user_message_are_found(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let (child, grandchild) = family(&fixture).await;
    let since = async |thread: &str, up_to: Option<Seq>| -> Vec<String> {
        let row = fixture.row(thread).await;
        let up_to = up_to.unwrap_or(row.head.seq());
        let entries = fixture.store.entries_since_user(&row.thread, up_to).await.unwrap();
        entries.into_iter().map(|entry| entry_text(entry.item)).collect()
    };
    assert_eq!(since("root", None).await, ["after the child"]);
    assert_eq!(since("root", Some(4)).await, ["hello", "1 calls", "subscribed", "I listen"]);
    assert_eq!(since(&child, None).await, ["after the grandchild"]);
    // Neither it nor its inherited part of the child has a user message, so it is the root's.
    let texts = since(&grandchild, None).await;
    assert_eq!((texts[0].as_str(), texts.len()), ("hello", 15));
}

pub(crate) async fn a_thread_inherits_the_cause_of_its_ancestors(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("root", Some("hello")).await;
    fixture.send_input("root", spawns(1, 1)).await.unwrap();
    let spawned = fixture.head("root").await.children().next().unwrap().as_str().to_owned();
    let call = fixture.subscribe("root").await;
    let for_event = fixture.spawn("root", &call, "event").await;
    fixture.send_input(&for_event, spawns(1, 1)).await.unwrap();
    let below = fixture.head(&for_event).await.children().next().unwrap().as_str().to_owned();
    let table = [
        ("root", Cause::Client),
        (spawned.as_str(), Cause::Client),
        (for_event.as_str(), Cause::Event),
        (below.as_str(), Cause::Event),
    ];
    for (thread, cause) in table {
        let row = fixture.row(thread).await;
        assert_eq!(fixture.store.cause(&row.thread).await.unwrap(), cause, "{thread}");
    }
}

pub(crate) async fn calls_show_the_display_text_of_their_tools(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("thread", Some("hello")).await;
    let call = |display: Option<&str>| PlannedCall {
        model_id: None,
        name: "tool".into(),
        arguments: Arguments::Given(Map::new()),
        display: display.map(Into::into),
        plan: Plan::Invoke(Server(SERVER.into())),
    };
    let calls = vec![call(Some("Looking")), call(None), call(Some("Reading"))];
    let input = Input::TurnEnded { turn: 1, answer: TurnAnswer { calls, ..TurnAnswer::default() } };
    fixture.send_input("thread", input).await.unwrap();
    let row = fixture.row("thread").await;
    let shown = fixture.store.displays(&row).await.unwrap();
    let by_call: Vec<_> = row.head.open_calls().map(|call| shown.get(&call.id).map(String::as_str)).collect();
    assert_eq!(by_call, [Some("Looking"), None, Some("Reading")]);
    fixture.create("idle", None).await;
    assert!(fixture.store.displays(&fixture.row("idle").await).await.unwrap().is_empty());
}
