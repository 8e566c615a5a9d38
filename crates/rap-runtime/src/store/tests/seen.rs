//! What a model sees of a history with summaries in it.

use super::*;
use rap_agent::prompt::seen;

fn summarised(turn: u64, text: &str) -> Message {
    Message::Summarised { turn, text: text.into(), usage: rap_agent::Usage::default() }
}

/// What is read is what would be seen of all that there is, for every entry that a question could end with.
async fn check(fixture: &Fixture, thread: &str) {
    let row = fixture.store.thread(id(thread)).await.unwrap();
    let all = fixture.history(thread).await;
    for up_to in 0..=row.head.seq {
        let read = fixture.store.seen(Arc::clone(&row.thread), up_to).await.unwrap();
        assert_eq!(read, seen(all[..up_to as usize].to_vec()), "{thread} up to {up_to}");
    }
}

async fn words(fixture: &Fixture, thread: &str) -> Vec<String> {
    let row = fixture.store.thread(id(thread)).await.unwrap();
    let seen = fixture.store.seen(row.thread, row.head.seq).await.unwrap();
    seen.into_iter().map(|entry| word(entry.item)).collect()
}

#[tokio::test]
async fn what_a_summary_covers_is_not_read_and_nothing_is_deleted() {
    let fixture = Fixture::new();
    fixture.create("root", Some("hello")).await;
    fixture.subscribed("root", "sub_1").await;
    let before = fixture.bear("root", "sub_1", "event 1").await;
    fixture.tell("root", said("more")).await.unwrap();
    fixture.tell("root", summarised(3, "SHORT")).await.unwrap();
    fixture.tell("root", answered(4, "fine")).await.unwrap();
    let between = fixture.bear("root", "sub_1", "event 2").await;
    fixture.tell("root", said("even more")).await.unwrap();
    fixture.tell("root", summarised(5, "SHORTER")).await.unwrap();

    let open = |text: &str, children: &[&str]| {
        let subscription = "Active subscriptions, which cancel_subscription ends:\n- sub_1 (tool)";
        let lines: String = children.iter().map(|child| format!("\n- {child}")).collect();
        let started = "Threads that this one started, which send_message_to_child reaches:";
        format!("{text}\n\n{subscription}\n\n{started}{lines}")
    };
    let (first, second) = (open("SHORT", &[&before]), open("SHORTER", &[&before, &between]));
    assert_eq!(words(&fixture, "root").await, [second.as_str(), "fine", "even more"]);
    let all = ["hello", "sub_1", "subscribed", "I listen", "more", &first, "fine", "even more", &second];
    assert_eq!(fixture.words("root").await, all);

    // A child sees what there was when it was born, whatever became of it since.
    let inherited = ["hello", "sub_1", "subscribed", "I listen"];
    assert_eq!(words(&fixture, &before).await[..4], inherited);
    let seen = words(&fixture, &between).await;
    assert_eq!(seen[..4], [first.as_str(), "I listen", "more", "fine"]);
    assert_eq!(seen[5..], ["event 2", "born"]);
    for thread in ["root", before.as_str(), between.as_str()] {
        check(&fixture, thread).await;
    }

    // Its own summary covers what it inherits.
    fixture.tell(&between, summarised(1, "OWN")).await.unwrap();
    assert_eq!(words(&fixture, &between).await[0], "OWN");
    assert_eq!(words(&fixture, &between).await[2..], ["event 2", "born"]);
    assert_eq!(fixture.words(&between).await.len(), 11);
    check(&fixture, &between).await;
    let fixture = fixture.reopen().await;
    check(&fixture, &between).await;
}
