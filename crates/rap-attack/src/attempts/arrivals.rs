//! Sessions that arrive from elsewhere: files for `rap import`, and records from another runtime.

use std::path::Path;
use std::sync::Arc;

use rap_testkit::{Setup, programs};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{ATTACKER, BYSTANDER, Stage};
use crate::wire;

const TOPIC: &str = "imports";
/// Maximum size of a record.
const RECORD_BYTES: usize = 64 * 1024 * 1024;

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(TOPIC, "records without permission", "one who is no administrator sends some", permission),
        attempt!(TOPIC, "hostile records", "a part of them comes into use, or they use much memory", records),
        attempt!(TOPIC, "hostile import file", "a part of it is imported, or it uses much memory", files),
    ]
}

async fn permission(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    for (scope, user) in [("read", None), ("write", None), ("write", Some("mallory"))] {
        let body = json!({"name": "import", "scope": scope, "user_id": user});
        let made = wire::post(&stage.rap.at("/v1/tokens"), Some(BYSTANDER), &body).await.expect("no answer");
        let token = made.body["token"].as_str().unwrap_or_default().to_owned();
        stage.keep_secret(&token);
        for path in ["records", "check", "start", "discard"] {
            let url = stage.rap.at(&format!("/v1/imports/stolen/{path}"));
            let status = wire::post(&url, Some(&token), &json!({})).await.map_or(0, |answer| answer.status);
            tries.add(format!("{path} with {scope} was answered {status}"), status != 403);
        }
        for (method, path) in [
            ("GET", "/v1/imports"),
            ("GET", "/v1/threads/stolen/move"),
            ("POST", "/v1/threads/stolen/migrate"),
        ] {
            let headers = [("authorization", &*format!("Bearer {token}")), wire::JSON];
            let status = wire::status(method, &stage.rap.at(path), &headers, b"{}").await;
            tries.add(format!("{method} {path} with {scope} was answered {status}"), status != 403);
        }
    }
    tries
}

/// Records that cannot be a session, with their names.
fn hostile(session: &str) -> Vec<(&'static str, String)> {
    let header = json!({"session": {
        "version": 1, "session": session, "exported_at": 0,
        "origin": {"key_id": "x", "key_ids": [], "public_url": "http://127.0.0.1:1"},
    }});
    let changed = |name: &str, value: Value| {
        let mut header = header.clone();
        header["session"][name] = value;
        header.to_string()
    };
    vec![
        ("text", "garbage".to_owned()),
        ("no record", "{}".to_owned()),
        ("two kinds", json!({"session": {}, "end": {}}).to_string()),
        ("an unknown kind", json!({"sqlite_master": {"sql": "DROP TABLE threads"}}).to_string()),
        ("a newer version", changed("version", json!(99))),
        ("another session", changed("session", json!("of-somebody-else"))),
        ("a path as id", changed("session", json!("../../etc/passwd\u{0}"))),
        ("a thread without fields", json!({"thread": {"id": session}}).to_string()),
        ("a row of no thread", json!({"entry": {"thread": "nobody", "seq": 1}}).to_string()),
        ("deep nesting", format!("{{\"thread\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000))),
        ("many values", format!("{{\"thread\": [{}0]}}", "{\"a\":0},".repeat(400_000))),
        ("an end without a beginning", json!({"end": {"records": 0}}).to_string()),
    ]
}

async fn records(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let (session, bearer) = ("arriving", format!("Bearer {ATTACKER}"));
    let url = stage.rap.at(&format!("/v1/imports/{session}/records?from=0"));
    let headers = [("authorization", bearer.as_str())];
    for (name, record) in hostile(session) {
        wire::status("POST", &url, &headers, record.as_bytes()).await;
        for path in ["check", "start"] {
            let url = stage.rap.at(&format!("/v1/imports/{session}/{path}"));
            let status = wire::post(&url, Some(ATTACKER), &json!({})).await.map_or(0, |answer| answer.status);
            tries.add(format!("{name}: {path} was answered {status}"), wire::is_success(status));
        }
    }
    // Their bodies need memory, and their parsed form would need a multiple of it.
    let large = format!("{{\"thread\": [{}0]}}", "{\"a\":0},".repeat(4_000_000));
    let sending = (0..8).map(|_| wire::status("POST", &url, &headers, large.as_bytes()));
    for status in futures_util::future::join_all(sending).await {
        tries.add(format!("a large record was answered {status}"), wire::is_success(status));
    }
    let too_large = vec![b' '; RECORD_BYTES + 1];
    let status = wire::status("POST", &url, &headers, &too_large).await;
    tries.add(format!("64 MiB and a byte were answered {status}"), ![0, 413, 503].contains(&status));
    let found = wire::get(&stage.rap.at(&format!("/v1/threads/{session}")), Some(ATTACKER)).await;
    tries.add("the session is in use", found.is_some_and(|found| found.status == 200));
    wire::status("POST", &stage.rap.at(&format!("/v1/imports/{session}/discard")), &headers, b"").await;
    tries
}

/// Lines of a file with correct checksums, which anybody can compute.
fn with_checksums(records: &[&str]) -> String {
    let mut chain = [0; 32];
    let lines = records.iter().map(|record| {
        chain = Sha256::new().chain_update(chain).chain_update(record).finalize().into();
        let sum: String = chain[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[\"{sum}\",{record}]\n")
    });
    lines.collect()
}

/// Records of an export.
fn records_of(file: &str) -> Vec<&str> {
    let record = |line: &'_ str| -> Option<(usize, usize)> {
        let begin = line.find("\",")? + 2;
        Some((begin, line.len().checked_sub(1)?))
    };
    file.lines().filter_map(|line| record(line).map(|(begin, end)| &line[begin..end])).collect()
}

/// Runs `rap import`. Returns true unless it refuses the file.
fn imports(directory: &Path, content: &[u8]) -> bool {
    std::fs::write(directory.join("hostile.jsonl"), content).unwrap();
    let output = programs::rap(&["import", "hostile.jsonl"]).current_dir(directory).output().unwrap();
    // Another code than 1 is a crash.
    output.status.code() != Some(1)
}

async fn files(stage: Arc<Stage>) -> Tries {
    let thread = stage.open("say hello").await;
    let exported = programs::rap(&["export", &thread]).current_dir(stage.rap.directory()).output().unwrap();
    let exported = String::from_utf8(exported.stdout).unwrap();
    tokio::task::spawn_blocking(move || import_all(&exported)).await.unwrap()
}

fn import_all(exported: &str) -> Tries {
    let mut tries = Tries::new();
    let rap = Setup::new().prepare(tempfile::tempdir().unwrap());
    let records = records_of(exported);
    let [header, root, .., end] = records.as_slice() else {
        panic!("an export has too few records: {exported}")
    };
    let headless = root.replacen("\"head\":\"", "\"head\":\"x", 1);
    let without_head = [&[*header, &headless][..], &records[2..]].concat();
    let whole = with_checksums(&records);
    let mut files: Vec<(String, Vec<u8>)> = vec![
        ("nothing".into(), Vec::new()),
        ("bytes".into(), (0..=255).collect()),
        ("a cut line".into(), whole.as_bytes()[..whole.len() - 20].to_vec()),
        ("a missing end".into(), with_checksums(&records[..records.len() - 1]).into_bytes()),
        ("a missing row".into(), with_checksums(&[*header, *root, *end]).into_bytes()),
        ("two beginnings".into(), with_checksums(&[&[*header][..], &records].concat()).into_bytes()),
        ("a changed byte".into(), whole.replacen("hello", "hallo", 1).into_bytes()),
        ("a line without end".into(), vec![b'['; RECORD_BYTES + 1_000]),
        ("a root twice".into(), with_checksums(&[*header, *root, *root, *end]).into_bytes()),
        ("a head that is no head".into(), with_checksums(&without_head).into_bytes()),
    ];
    let session = serde_json::from_str::<Value>(header).unwrap()["session"]["session"].clone();
    for (name, record) in hostile(session.as_str().unwrap()) {
        files.push((format!("{name}, alone"), with_checksums(&[&record]).into_bytes()));
        files
            .push((format!("{name}, inside"), with_checksums(&[*header, *root, &record, *end]).into_bytes()));
    }
    for (name, content) in files {
        tries.add(format!("the file with {name} was imported"), imports(rap.directory(), &content));
    }
    let sessions = programs::rap(&["export", "--all"]).current_dir(rap.directory()).output().unwrap();
    let text = String::from_utf8_lossy(&sessions.stdout).into_owned();
    tries.add("a part of a session was imported", text.contains("\"thread\""));
    tries
}
