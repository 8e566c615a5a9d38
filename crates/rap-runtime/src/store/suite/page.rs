//! Queries of the web interface: search for a phrase, the newest threads first, and statistics over time.

use rap_api::ThreadOrder;
use rap_protocol::Timestamp;

use super::Database;
use super::fixture::{Fixture, answer, seconds, spawns};
use super::listings::list_in_pages;
use crate::store::{Figures, FiguresRow, PART, ThreadFilter, ThreadRow};

fn id_of(row: &ThreadRow) -> String {
    row.thread.id.as_str().to_owned()
}

pub(crate) async fn threads_are_found_by_a_phrase_in_their_texts(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    fixture.create("one", Some("The quick brown fox")).await;
    fixture.create("two", Some("brown and quick, \"quoted\" 'single' \\ slash")).await;
    fixture.create("three", Some("nothing of it")).await;
    fixture.create("four", Some("a NUL \0 in the middle")).await;
    fixture.send_input("three", answer(1, "Look: a QUICK\nbrown dog")).await.unwrap();
    let find = async |phrase: &str| {
        let read = |page_request| {
            let filter =
                ThreadFilter { phrase: Some(phrase.into()), page_request, ..ThreadFilter::default() };
            fixture.store.threads(filter)
        };
        list_in_pages(read, id_of).await
    };
    assert_eq!(find("quick brown").await, ["three", "one"], "words in their order, newest first");
    assert_eq!(find("quick bro").await, ["three", "one"], "the last word may be incomplete");
    assert_eq!(find("brown").await, ["three", "two", "one"]);
    assert_eq!(find("\"quoted\"").await, ["two"]);
    for nothing in ["quick fox", "uick", "!!", "\"", "' OR 1 = 1", "quick AND brown"] {
        assert_eq!(find(nothing).await, Vec::<String>::new(), "{nothing}");
    }
}

pub(crate) async fn threads_are_listed_newest_first_and_without_children(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    for name in ["one", "two", "three"] {
        fixture.create(name, Some("hello")).await;
    }
    fixture.send_input("two", spawns(1, 1)).await.unwrap();
    let list = async |roots: bool| {
        let read = |page_request| {
            let order = ThreadOrder::Newest;
            fixture.store.threads(ThreadFilter { roots, order, page_request, ..ThreadFilter::default() })
        };
        list_in_pages(read, id_of).await
    };
    assert_eq!(list(true).await, ["three", "two", "one"]);
    let all = list(false).await;
    assert_eq!((all.len(), &all[1..]), (4, &["three".to_owned(), "two".into(), "one".into()][..]));
}

pub(crate) async fn figures_are_added_up_in_parts_of_time(database: Box<dyn Database>) {
    let fixture = Fixture::new(database);
    let part = PART.as_millis() as i64;
    let now = Timestamp(fixture.now().0 / (6 * part) * 6 * part + 6 * part);
    let row = |parts: i64, agent: &str, wakes| FiguresRow {
        at: Timestamp(now.0 + parts * part),
        agent: agent.into(),
        figures: Figures { wakes, cost: 10 * wakes, ..Figures::default() },
    };
    let add = async |rows| fixture.store.add_figures(rows, now).await.unwrap();
    add(vec![row(0, "b", 1), row(1, "a", 2)]).await;
    add(vec![row(0, "b", 4), row(6, "b", 8)]).await;
    let sums = fixture.store.figures(now, 6 * part).await.unwrap();
    let expected = [(now.0, "a", 2), (now.0, "b", 5), (now.0 + 6 * part, "b", 8)];
    let shown: Vec<_> = sums.iter().map(|row| (row.at.0, row.agent.as_str(), row.figures.wakes)).collect();
    assert_eq!(shown, expected);
    assert_eq!(sums[1].figures.cost, 50);
    // Old figures are removed when new ones are added.
    fixture.store.add_figures(vec![row(1, "c", 1)], now.plus(seconds(91 * 24 * 3600))).await.unwrap();
    assert_eq!(fixture.store.figures(now, part).await.unwrap(), []);
}
