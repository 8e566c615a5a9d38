//! Files that are not a whole export, or that reach into other sessions, are refused with the line.

use serde_json::json;

use super::*;

const HEAD: &str = r#"{"phase":"idle","turn":1,"turns_awake":1,"seq":2,"settled":0,"minted":3,"usage":{"input":0,"output":0}}"#;

fn session(id: &str) -> String {
    json!({"session": {
        "version": 1,
        "session": id,
        "origin": {"key_id": "ab", "public_url": "http://h"},
        "exported_at": 1,
    }})
    .to_string()
}

fn thread(id: &str, parent: Option<&str>) -> String {
    json!({"thread": {
        "id": id, "key": 1, "token_key": 1, "parent": parent, "source": parent, "inherits": 0,
        "ancestors": parent.into_iter().collect::<Vec<_>>(),
        "incarnation": u64::MAX, "agent": "default", "user_id": null, "title": null, "created_at": 1,
        "updated_at": 1, "version": 1, "ask": null, "head": HEAD,
    }})
    .to_string()
}

fn verified(records: &[String]) -> Result<u64, String> {
    let mut lines = LineWriter::default();
    let text: String = records.iter().map(|record| lines.line(record)).collect();
    verify(&mut text.as_bytes()).map_err(|error| error.to_string())
}

fn end(records: u64) -> String {
    Record::End(records).write()
}

#[test]
fn a_file_has_one_whole_session_or_several() {
    let one = [session("a"), thread("a", None), thread("b", Some("a")), end(3)];
    assert_eq!(verified(&one), Ok(1));
    let two = [session("c"), thread("c", None), end(2)];
    assert_eq!(verified(&[&one[..], &two].concat()), Ok(2));
    let all = [&[Record::Store { version: 1 }.write()][..], &one, &two];
    let all = [&all.concat()[..], &[Record::StoreEnd { sessions: 2 }.write()]].concat();
    assert_eq!(verified(&all), Ok(2));
    assert!(verified(&all[..all.len() - 1]).unwrap_err().contains("not complete"));
    let wrong = [&all[..all.len() - 1], &[Record::StoreEnd { sessions: 3 }.write()]].concat();
    assert!(verified(&wrong).unwrap_err().contains("2 of 3 sessions"));
}

#[test]
fn a_file_of_a_newer_release_is_refused_by_its_version() {
    for record in [r#"{"session":{"version":2,"more":1}}"#, r#"{"store":{"version":7}}"#] {
        let error = verified(&[record.into()]).unwrap_err();
        assert!(error.starts_with("line 1: ") && error.contains("newer release"), "{error}");
    }
}

#[test]
fn an_error_names_the_line_and_the_reason() {
    let begin = || vec![session("a"), thread("a", None)];
    let row = |text: &str| text.to_owned();
    let entry = r#"{"at":5,"kind":"user","text":"hello"}"#;
    let cases: [(Vec<String>, &str); 12] = [
        (vec![thread("a", None)], "line 1: expected the first record"),
        (vec![session("a"), session("b")], "line 2: another session begins"),
        (vec![session("a"), thread("b", None)], "line 2: thread b"),
        (vec![session("a"), thread("a", Some("x"))], "line 2: thread a"),
        ([begin(), vec![thread("a", None)]].concat(), "line 3: thread a"),
        ([begin(), vec![thread("b", Some("x"))]].concat(), "line 3: thread b: its parent"),
        ([begin(), vec![end(1)]].concat(), "line 3: the session has 1 records, but 2"),
        ([begin(), vec![row(r#"{"poem":{}}"#)]].concat(), "line 3: `poem` is not a kind"),
        (
            [begin(), vec![row(r#"{"held":{"thread":"a"}}"#)]].concat(),
            "line 3: held: queue: it is not a number",
        ),
        (
            [begin(), vec![json!({"entry": {"thread": "z", "seq": 1, "body": entry}}).to_string()]].concat(),
            "line 3: entry: thread z is not in the session",
        ),
        (
            [begin(), vec![json!({"entry": {"thread": "a", "seq": 1, "body": "{}"}}).to_string()]].concat(),
            "line 3: entry: body: ",
        ),
        (vec![row("[]")], "line 1: it is not a JSON object"),
    ];
    for (records, expected) in cases {
        let error = verified(&records).unwrap_err();
        assert!(error.starts_with(expected), "{error}");
    }
}

/// Returns a thread with another value of a field.
fn with(thread: String, field: &str, value: serde_json::Value) -> String {
    let mut record: serde_json::Value = serde_json::from_str(&thread).unwrap();
    record["thread"][field] = value;
    record.to_string()
}

/// A file may come from anybody, and the database has sessions of others.
#[test]
fn records_that_reach_into_another_session_are_refused() {
    let root = || thread("a", None);
    let child = || thread("b", Some("a"));
    let head = |field: &str, value: serde_json::Value| {
        let mut head: serde_json::Value = serde_json::from_str(HEAD).unwrap();
        head[field] = value;
        json!(head.to_string())
    };
    let entry = |seq: i64| {
        let body = r#"{"at":5,"kind":"user","text":"hello"}"#;
        json!({"entry": {"thread": "a", "seq": seq, "body": body}}).to_string()
    };
    let call = |seq: i64| {
        json!({"call": {
            "thread": "a", "id": "c", "state": 0, "name": "n", "server": "s", "seq": seq, "since": 0, "attempts": 0,
        }})
        .to_string()
    };
    let message = |sender: &str, receiver: &str| {
        let body = json!("close").to_string();
        json!({"message": {"sender": sender, "receiver": receiver, "body": body, "due_at": 0}}).to_string()
    };
    let toolset = |hash: &str| json!({"toolset_document": {"hash": hash, "body": "eA=="}}).to_string();
    let hash_of_x = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881";
    let victim = json!(["victim"]);
    let spawned = json!({"spawn": {"parent": "victim", "call": "c"}});
    let named = "it refers to thread victim, which is not in the session";
    for (records, expected) in [
        (vec![root(), entry(0)], "its thread has no entry with this number"),
        (vec![root(), entry(-1)], "its thread has no entry with this number"),
        (vec![root(), entry(3)], "its thread has no entry with this number"),
        (vec![root(), entry((1 << 32) + 1)], "its thread has no entry with this number"),
        (vec![root(), call(1 << 32)], "its entry has no valid number"),
        (vec![root(), call(-1)], "its entry has no valid number"),
        (vec![with(root(), "ancestors", victim.clone())], "its ancestors are not those of its parent"),
        (vec![root(), with(child(), "ancestors", victim.clone())], "its ancestors are not"),
        (vec![root(), with(child(), "ancestors", json!(["victim", "a"]))], "its ancestors are not"),
        (vec![root(), with(child(), "ancestors", json!([]))], "its ancestors are not"),
        (vec![root(), with(child(), "inherits", json!(3))], "it inherits more than there is"),
        (vec![with(root(), "inherits", json!(1))], "a root thread inherits nothing"),
        (vec![root(), with(child(), "head", head("origin", spawned))], "its head names another parent"),
        (vec![with(root(), "head", head("seq", json!(1_u64 << 32)))], "its number of entries"),
        (vec![with(root(), "version", json!(i64::MAX))], "its number of entries or its version"),
        (vec![with(root(), "head", head("children", victim.clone())), end(2)], named),
        (vec![with(root(), "head", head("resting", victim)), end(2)], named),
        (vec![root(), message("a", "victim"), end(3)], named),
        (vec![root(), message("victim", "a"), end(3)], named),
        (vec![root(), toolset("00")], "its hash is not that of the document"),
    ] {
        let error = verified(&[vec![session("a")], records].concat()).unwrap_err();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    let good = vec![root(), child(), entry(1), entry(2), call(2), message("a", "b"), toolset(hash_of_x)];
    assert_eq!(verified(&[vec![session("a")], good, vec![end(8)]].concat()), Ok(1));
}

/// Otherwise other nodes would take over the work of the runtime, and do it a second time.
#[tokio::test]
async fn an_export_beside_a_runtime_is_not_taken_for_that_runtime_started_again() {
    let database = rap_testkit::postgres::Server::shared().database();
    let postgres = PostgresDatabase {
        url: Secret::new(database.url()),
        key: Secret::new("7".repeat(64)),
        listen_url: None,
        lease: PostgresDatabase::LEASE,
    };
    let listen = Some("127.0.0.1:7420".parse().unwrap());
    let model = crate::model::scripted::Scripted::command_driven();
    let settings = Settings {
        database: Database::Postgres(postgres.clone()),
        listen,
        ..Settings::new("unused", Arc::new(model))
    };
    let (_, key) = keys_of_text(&postgres.key).unwrap();
    let (mut clock, reserve): (Arc<dyn Clock>, store::Reserve) =
        (Arc::new(SystemClock), Box::new(|_, _, _| None));
    let (name, on_commit) = (engine::node_name(listen), Box::new(|_| ()));
    let runtime =
        engine::open_postgres(&settings, &postgres, name, &key, &mut clock, on_commit, reserve).unwrap();
    let own = store::Fleet::id(&runtime);
    assert_eq!(export(&settings, None, &mut Vec::new()).await.unwrap(), Exported::default());
    let nodes = store::Fleet::nodes(&runtime).await.unwrap();
    assert!(nodes.iter().any(|node| node.id == own), "{nodes:?}");
}

#[test]
fn sessions_move_only_to_servers_with_all_their_keys() {
    let keys = |text: &str| Origin::new(&Keyring::parse(text).unwrap(), SystemClock.now(), "http://h");
    let [old, new] = ["a", "b"].map(|digit| digit.repeat(64));
    let both = format!("{old},{new}@2020-01-01T00:00:00Z");
    let (both, old, new) = (&keys(&both), &keys(&old), &keys(&new));
    let is_known = |from: &Origin, to: &Origin| from.is_known_by(&to.key_id, &to.key_ids);
    assert!(is_known(both, both) && is_known(old, both) && is_known(new, both));
    // Open calls from before the rotation use the old key.
    assert_eq!(both.key_id, new.key_id);
    assert!(!is_known(both, new) && !is_known(both, old) && !is_known(old, new));
    // Earlier releases report only their current key.
    let earlier = Origin { key_ids: Vec::new(), ..new.clone() };
    assert!(is_known(&earlier, both) && is_known(&earlier, new) && is_known(new, &earlier));
}

#[test]
fn a_line_that_was_changed_lost_or_moved_is_found() {
    let records = [session("a"), thread("a", None), thread("b", Some("a")), end(3)];
    let mut lines = LineWriter::default();
    let lines: Vec<String> = records.iter().map(|record| lines.line(record)).collect();
    let verify = |lines: &[&String]| {
        let text: String = lines.iter().map(|line| line.as_str()).collect();
        super::verify(&mut text.as_bytes()).map_err(|error| error.to_string())
    };
    let [first, second, third, last] = [&lines[0], &lines[1], &lines[2], &lines[3]];
    assert_eq!(verify(&[first, second, third, last]), Ok(1));
    for damaged in [[first, third, last, last], [first, third, second, last]] {
        let error = verify(&damaged).unwrap_err();
        assert!(error.starts_with("line 2: its checksum is wrong"), "{error}");
    }
    let changed = second.replace("default", "another");
    assert!(verify(&[first, &changed, third, last]).unwrap_err().starts_with("line 2: its checksum"));
    let cut = &second[..second.len() - 2];
    assert!(verify(&[first, &cut.to_owned()]).unwrap_err().starts_with("line 2: it is cut off"));
    assert!(verify(&[first, second]).unwrap_err().starts_with("line 3: the file is not complete"));
}
