//! Boundaries between parts of the runtime that the compiler does not check.

use std::fs;
use std::path::{Path, PathBuf};

/// Files that know a database: the implementations of the store, the comparison with bare databases in the
/// measurements, and tests that look at rows or damage them.
const MAY_KNOW_A_DATABASE: [&str; 7] = [
    "store/sqlite",
    "store/postgres",
    "store/suite/damage.rs",
    "store/suite/deletion.rs",
    "simulation/",
    "measure/",
    "engine/tests.rs",
];

fn rust_files(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// A third database must only add a folder.
#[test]
fn only_the_implementations_of_the_store_know_a_database() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&source, &mut files);
    assert!(files.len() > 100, "{}", files.len());
    let words = [
        "rusqlite",
        "tokio_postgres",
        "rowid",
        "SELECT ",
        "INSERT INTO ",
        "DELETE FROM ",
        "PRAGMA ",
        "UPDATE ",
    ];
    for file in files {
        let path = file.strip_prefix(&source).unwrap().to_str().unwrap();
        if MAY_KNOW_A_DATABASE.iter().any(|allowed| path.starts_with(allowed)) {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        let found = text.lines().find(|line| words.iter().any(|word| line.contains(word)));
        assert!(found.is_none(), "{path}: {found:?}");
    }
}
