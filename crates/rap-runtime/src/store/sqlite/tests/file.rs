//! The file: who may open it, and what becomes of a store whose file is not as it should be.

use std::path::Path;

use rap_agent::{Choice, Input};
use rap_protocol::{AuthUrl, ResponseUrl};

use super::*;
use crate::store::suite::fixture::{SERVER, answer, id, user};
use crate::store::{StoredQuestion, Work, WorkKind};

fn refusal(file: &File) -> String {
    file.try_open().err().expect("it cannot be opened").to_string()
}

#[test]
fn a_second_owner_is_refused_and_told_why() {
    let file = File::new();
    let store = file.try_open().unwrap();
    let refused = refusal(&file);
    assert!(refused.contains("rap.db.lock is locked: another process"), "{refused}");
    drop(store);
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused_and_left_as_it_is() {
    let (file, fixture) = fixture();
    let version = |conn: &Connection| -> i64 {
        conn.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap()
    };
    assert_eq!(version(&file.look()), MIGRATIONS.len() as i64);
    file.look().pragma_update(None, "user_version", 999).unwrap();
    fixture.store.close().await;
    drop(fixture);
    file.opened.lock().unwrap().take();
    let error = file.try_open().err().expect("it is newer");
    let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    let refused = format!("{error}: {source}");
    for part in ["rap.db", "version 999", &format!("up to {}", MIGRATIONS.len())] {
        assert!(refused.contains(part), "{refused}");
    }
    assert_eq!(version(&file.look()), 999);
}

/// Proves: LC-20
#[test]
fn a_file_that_is_no_database_is_refused_and_left_as_it_is() {
    let file = File::new();
    let garbage = b"This is no database. ".repeat(1000);
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
    file.look().execute_batch("ALTER TABLE threads RENAME TO gone").unwrap();
    assert!(matches!(fixture.store.is_readable().await, Err(Error::Unavailable(_))));
    assert!(matches!(fixture.store.thread(&id("thread")).await, Err(Error::Unavailable(_))));
    file.look().execute_batch("ALTER TABLE gone RENAME TO threads").unwrap();
    fixture.store.is_readable().await.unwrap();
    assert_eq!(fixture.words("thread").await, ["hello"]);
}

/// Proves: LC-23
#[tokio::test]
async fn nothing_is_acknowledged_once_the_database_is_removed_or_replaced() {
    let (file, fixture) = fixture();
    fixture.create("thread", Some("hello")).await;
    fixture.commits.take();
    let (path, aside) = (file.path(), file.dir.path().join("elsewhere"));
    std::fs::rename(&path, &aside).unwrap();
    for _ in 0..2 {
        let refused = fixture.tell("thread", user("more")).await;
        assert!(matches!(&refused, Err(Error::Unavailable(_))), "{refused:?}");
    }
    assert!(fixture.commits.take().is_empty());
    assert!(!path.exists(), "another database was made in its place");
    // Another file in its place is not the one that was opened.
    std::fs::write(&path, b"").unwrap();
    assert!(fixture.tell("thread", user("more")).await.is_err());
    std::fs::rename(&aside, &path).unwrap();
    fixture.tell("thread", user("more")).await.unwrap();
    assert_eq!(fixture.words("thread").await, ["hello", "more"]);
    assert_eq!(fixture.commits.take().len(), 1);
}

#[tokio::test]
async fn a_store_that_was_closed_is_one_file() {
    let (file, fixture) = fixture();
    fixture.create("thread", Some("hello")).await;
    fixture.words("thread").await;
    fixture.store.close().await;
    let mut log = file.path().into_os_string();
    log.push("-wal");
    assert!(!Path::new(&log).exists(), "a part of the database is still in its log");
}

fn bytes_below(dir: &Path) -> Vec<u8> {
    let files = std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    files.flat_map(|file| std::fs::read(file).unwrap()).collect()
}

fn holds(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

#[tokio::test]
async fn the_address_of_a_question_is_nowhere_in_the_files_in_plain_text() {
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
    fixture.tell("thread", Input::ChoiceRequested { call: call.clone(), choice }).await.unwrap();
    let url = AuthUrl::new("https://example.com/sign-in/secret-of-the-sign-in").unwrap();
    fixture.tell("thread", Input::SignInRequested { call: open[1].clone(), url }).await.unwrap();
    fixture.tell("thread", Input::Choose { call, selected: Some(1) }).await.unwrap();
    let fixture = fixture.reopen().await;
    let check = || {
        let bytes = bytes_below(file.dir.path());
        assert!(holds(&bytes, "hello"), "there is nothing in the files");
        for secret in ["secret-of-the", "/answers/", "/sign-in/", "Red or green?"] {
            assert!(!holds(&bytes, secret), "{secret}");
        }
    };
    check();
    // The key opens it.
    let due = fixture.due(WorkKind::Answer, SERVER).await;
    let Some(Work::Answer(work)) = fixture.store.load_work(&due[0].1, fixture.now()).await.unwrap() else {
        panic!("it is due")
    };
    assert_eq!(work.response_url.expose(), "http://127.0.0.1:9/answers/secret-of-the-choice");
    let inbox = fixture.store.inbox(None, Wanted::first(10)).await.unwrap().rows;
    let url = "https://example.com/sign-in/secret-of-the-sign-in";
    assert!(matches!(&inbox[0].question, StoredQuestion::SignIn { auth_url } if auth_url == url));
    fixture.tell("thread", Input::Interrupt).await.unwrap();
    fixture.tell("thread", user("more")).await.unwrap();
    let turn = fixture.head("thread").await.turn();
    fixture.tell("thread", answer(turn, "fine")).await.unwrap();
    check();
}
