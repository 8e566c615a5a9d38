//! The file: who may open it, and what becomes of a store whose file is not as it should be.

use super::*;

#[test]
fn a_second_owner_is_refused_and_told_why() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rap.db");
    let store = open(&path, &Acted::default()).unwrap();
    let refused = open(&path, &Acted::default()).err().expect("it is locked").to_string();
    assert!(refused.contains("rap.db.lock is locked: another process"), "{refused}");
    drop(store);
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused_and_both_versions_are_named() {
    let fixture = Fixture::new();
    let version = |conn: &Connection| -> i64 {
        conn.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap()
    };
    assert_eq!(version(&fixture.look()), MIGRATIONS.len() as i64);
    fixture.look().pragma_update(None, "user_version", 999).unwrap();
    let Fixture { dir, store, .. } = fixture;
    store.close().await;
    drop(store);
    let path = dir.path().join("rap.db");
    let refused = open(&path, &Acted::default()).err().expect("it is newer").to_string();
    for part in ["rap.db", "version 999", &format!("up to {}", MIGRATIONS.len())] {
        assert!(refused.contains(part), "{refused}");
    }
    assert_eq!(version(&open_sqlite(&path).unwrap()), 999);
}

/// Proves: LC-20
#[test]
fn a_file_that_is_no_database_is_refused_and_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rap.db");
    let garbage = b"This is a letter to my aunt. ".repeat(1000);
    std::fs::write(&path, &garbage).unwrap();
    let refused = open(&path, &Acted::default()).err().expect("it is no database").to_string();
    assert!(refused.contains("rap.db") && refused.contains("not a database"), "{refused}");
    assert_eq!(std::fs::read(&path).unwrap(), garbage);
}

/// Proves: LC-20, LC-37
#[tokio::test]
async fn a_thread_that_can_not_be_read_takes_nothing_and_stops_no_other() {
    let fixture = Fixture::new();
    fixture.create("bad", Some("hello")).await;
    fixture.create("good", Some("hello")).await;
    let fixture = fixture.reopen().await;
    fixture.alter("UPDATE threads SET head = '{\"phase\": \"confused\"}' WHERE id = 'bad'");
    let before = fixture.rows();
    for message in [said("one"), answered(1, "two"), Message::Close] {
        assert!(matches!(fixture.tell("bad", message).await, Err(Error::Illegible(_))));
    }
    assert!(matches!(fixture.store.thread(id("bad")).await, Err(Error::Illegible(_))));
    assert_eq!(fixture.rows(), before);
    fixture.tell("good", answered(1, "hello to you")).await.unwrap();
    fixture.tell("good", said("more")).await.unwrap();
    // What is due for others is found as well.
    let asks = fixture.store.asks(10).await.unwrap();
    assert_eq!(asks.iter().map(|(thread, ..)| thread.id.as_str()).collect::<Vec<_>>(), ["good"]);
}

/// Proves: LC-20, LC-37
#[tokio::test]
async fn a_store_whose_tables_can_not_be_read_is_not_readable() {
    let fixture = Fixture::new();
    fixture.create("thread", Some("hello")).await;
    fixture.store.is_readable().await.unwrap();
    fixture.look().execute_batch("ALTER TABLE threads RENAME TO gone").unwrap();
    assert!(matches!(fixture.store.is_readable().await, Err(Error::Unavailable(_))));
    assert!(matches!(fixture.store.thread(id("thread")).await, Err(Error::Unavailable(_))));
    fixture.look().execute_batch("ALTER TABLE gone RENAME TO threads").unwrap();
    fixture.store.is_readable().await.unwrap();
    assert_eq!(fixture.words("thread").await, ["hello"]);
}

/// Proves: LC-23
#[tokio::test]
async fn nothing_is_acknowledged_once_the_database_is_removed() {
    let fixture = Fixture::new();
    fixture.create("thread", Some("hello")).await;
    fixture.acted.take();
    let (path, aside) = (fixture.path(), fixture.dir.path().join("elsewhere"));
    std::fs::rename(&path, &aside).unwrap();
    for _ in 0..2 {
        let refused = fixture.tell("thread", said("more")).await;
        assert!(matches!(&refused, Err(Error::Unavailable(_))), "{refused:?}");
    }
    assert!(fixture.acted.take().is_empty());
    assert!(!path.exists(), "another database was made in its place");
    // Another file in its place is not the one that was opened.
    std::fs::write(&path, b"").unwrap();
    assert!(fixture.tell("thread", said("more")).await.is_err());
    std::fs::rename(&aside, &path).unwrap();
    fixture.tell("thread", said("more")).await.unwrap();
    assert_eq!(fixture.words("thread").await, ["hello", "more"]);
}

#[tokio::test]
async fn a_store_that_was_closed_is_one_file_and_refuses_everything() {
    let fixture = Fixture::new();
    fixture.create("thread", Some("hello")).await;
    fixture.words("thread").await;
    fixture.store.close().await;
    assert!(!beside_name(&fixture.path(), "-wal").exists(), "a part of the database is still in its log");
    assert!(matches!(fixture.tell("thread", said("more")).await, Err(Error::Closed)));
    assert!(matches!(fixture.store.thread(id("thread")).await, Err(Error::Closed)));
}

fn beside_name(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
