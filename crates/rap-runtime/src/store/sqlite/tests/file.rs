//! Tests of the database file: locking, invalid files, and files that are removed or replaced.

use std::path::Path;

use rap_agent::{Choice, Input};
use rap_protocol::{AuthUrl, ResponseUrl};

use super::*;
use crate::store::suite::fixture::{SERVER, answer, id, user};
use crate::store::{StoredQuestion, Work, WorkKind};

fn refusal(file: &File) -> String {
    file.try_open().err().expect("opening fails").to_string()
}

#[test]
fn a_second_process_is_refused_with_a_reason() {
    let file = File::new();
    let store = file.try_open().unwrap();
    let refused = refusal(&file);
    assert!(refused.contains("rap.db.lock is locked: another process"), "{refused}");
    drop(store);
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused_and_left_unchanged() {
    let (file, fixture) = fixture();
    let version = |conn: &Connection| -> i64 {
        conn.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap()
    };
    assert_eq!(version(&file.connection()), MIGRATIONS.len() as i64);
    file.connection().pragma_update(None, "user_version", 999).unwrap();
    fixture.store.close().await;
    drop(fixture);
    file.opened.lock().unwrap().take();
    let error = file.try_open().err().expect("opening fails, because the version is newer");
    let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    let refused = format!("{error}: {source}");
    for part in ["rap.db", "version 999", &format!("up to {}", MIGRATIONS.len())] {
        assert!(refused.contains(part), "{refused}");
    }
    assert_eq!(version(&file.connection()), 999);
}

/// Proves: LC-20
#[test]
fn a_file_that_is_not_a_database_is_refused_and_left_unchanged() {
    let file = File::new();
    let garbage = b"This is not a database. ".repeat(1000);
    std::fs::write(file.path(), &garbage).unwrap();
    let refused = refusal(&file);
    assert!(refused.contains("rap.db"), "{refused}");
    assert_eq!(std::fs::read(file.path()).unwrap(), garbage);
}

/// Proves: LC-20, LC-37
#[tokio::test]
async fn a_store_whose_tables_cannot_be_read_is_not_readable() {
    let (file, fixture) = fixture();
    fixture.create("thread", Some("hello")).await;
    fixture.store.is_readable().await.unwrap();
    file.connection().execute_batch("ALTER TABLE threads RENAME TO gone").unwrap();
    assert!(matches!(fixture.store.is_readable().await, Err(Error::Unavailable(_))));
    assert!(matches!(
        fixture.store.thread(&id("thread"), &Visibility::All).await,
        Err(Error::Unavailable(_))
    ));
    file.connection().execute_batch("ALTER TABLE gone RENAME TO threads").unwrap();
    fixture.store.is_readable().await.unwrap();
    assert_eq!(fixture.texts("thread").await, ["hello"]);
}

/// Proves: LC-23
#[tokio::test]
async fn nothing_is_acknowledged_once_the_database_is_removed_or_replaced() {
    let (file, fixture) = fixture();
    fixture.create("thread", Some("hello")).await;
    fixture.commits.take();
    let (path, moved) = (file.path(), file.dir.path().join("elsewhere"));
    std::fs::rename(&path, &moved).unwrap();
    for _ in 0..2 {
        let refused = fixture.send_input("thread", user("more")).await;
        assert!(matches!(&refused, Err(Error::Unavailable(_))), "{refused:?}");
    }
    assert!(fixture.commits.take().is_empty());
    assert!(!path.exists(), "a new database was created in its place");
    // A different file at the same path is not the one that was opened.
    std::fs::write(&path, b"").unwrap();
    assert!(fixture.send_input("thread", user("more")).await.is_err());
    std::fs::rename(&moved, &path).unwrap();
    fixture.send_input("thread", user("more")).await.unwrap();
    assert_eq!(fixture.texts("thread").await, ["hello", "more"]);
    assert_eq!(fixture.commits.take().len(), 1);
}

#[tokio::test]
async fn a_closed_store_is_a_single_file() {
    let (file, fixture) = fixture();
    fixture.create("thread", Some("hello")).await;
    fixture.texts("thread").await;
    fixture.store.close().await;
    let mut log = file.path().into_os_string();
    log.push("-wal");
    assert!(!Path::new(&log).exists(), "the write-ahead log was not checkpointed");
}

fn bytes_below(dir: &Path) -> Vec<u8> {
    let files = std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    files.flat_map(|file| std::fs::read(file).unwrap()).collect()
}

fn contains_text(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

#[tokio::test]
async fn questions_and_their_urls_are_not_stored_in_plain_text() {
    let (file, fixture) = fixture();
    fixture.create("thread", Some("hello")).await;
    let open = fixture.call("thread", &[SERVER, SERVER]).await;
    let choice = Choice {
        prompt: "Red or green?".into(),
        choices: vec!["red".into(), "green".into()],
        default: 0,
        response_url: ResponseUrl::new("http://127.0.0.1:9/answers/secret-of-the-choice").unwrap(),
        digest: 1,
    };
    let call = open[0].clone();
    fixture.send_input("thread", Input::ChoiceRequested { call: call.clone(), choice }).await.unwrap();
    let url = AuthUrl::new("https://example.com/sign-in/secret-of-the-sign-in").unwrap();
    fixture.send_input("thread", Input::SignInRequested { call: open[1].clone(), url }).await.unwrap();
    fixture.send_input("thread", Input::Choose { call, selected: Some(1) }).await.unwrap();
    let fixture = fixture.reopen().await;
    let check = || {
        let bytes = bytes_below(file.dir.path());
        assert!(contains_text(&bytes, "hello"), "the files do not contain the message");
        for secret in ["secret-of-the", "/answers/", "/sign-in/", "Red or green?"] {
            assert!(!contains_text(&bytes, secret), "{secret}");
        }
    };
    check();
    // With the key, the questions can be read.
    let due = fixture.due(WorkKind::Answer, SERVER).await;
    let Some(Work::Answer(work)) = fixture.store.load_work(&due[0].1, fixture.now()).await.unwrap() else {
        panic!("the answer is not due")
    };
    assert_eq!(work.response_url.expose(), "http://127.0.0.1:9/answers/secret-of-the-choice");
    let inbox = fixture.store.inbox(None, &Visibility::All, PageRequest::first(10)).await.unwrap().rows;
    let url = "https://example.com/sign-in/secret-of-the-sign-in";
    assert!(matches!(&inbox[0].question, StoredQuestion::SignIn { auth_url } if auth_url == url));
    fixture.send_input("thread", Input::Interrupt).await.unwrap();
    fixture.send_input("thread", user("more")).await.unwrap();
    let turn = fixture.head("thread").await.turn();
    fixture.send_input("thread", answer(turn, "fine")).await.unwrap();
    check();
}
