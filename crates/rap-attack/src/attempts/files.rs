//! Files that other users of the machine can read, and tokens that can be guessed.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use rap_testkit::{Process, Rap, Setup, programs};

use crate::attempt::{Attempt, Tries, attempt};
use crate::stage::{BYSTANDER, Stage};

const TOPIC: &str = "files";

pub(super) fn all() -> Vec<Attempt> {
    vec![
        attempt!(TOPIC, "files of another user", "one can be read by others", modes),
        attempt!(TOPIC, "exposed key", "a server uses a key that others can read", exposed),
        attempt!(TOPIC, "exposed database or secret", "nobody is warned", exposed_database),
        attempt!(TOPIC, "short or missing token", "a server that others can reach accepts it", tokens),
    ]
}

/// Names of files below a directory that others can read.
fn readable(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for file in std::fs::read_dir(directory).unwrap().flatten() {
        let metadata = file.metadata().unwrap();
        if metadata.is_file() && metadata.mode() & 0o077 != 0 {
            found.push(format!("{} has mode {:o}", file.path().display(), metadata.mode() & 0o777));
        }
    }
    found
}

async fn modes(stage: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    // The harness itself wrote these.
    let own = ["rap.toml", "stdout", "script.toml"];
    for target in stage.targets() {
        let found = readable(target.directory());
        let found: Vec<_> = found
            .into_iter()
            .filter(|text| !own.iter().any(|name| text.contains(&format!("/{name} "))))
            .collect();
        tries.count += std::fs::read_dir(target.directory()).unwrap().count();
        tries.add(found.join(", "), !found.is_empty());
    }
    let directory = tempfile::tempdir().unwrap();
    let made = programs::rap(&["init"]).current_dir(directory.path()).output().unwrap();
    let found = readable(directory.path());
    tries.add(format!("rap init: {found:?}"), !made.status.success() || !found.is_empty());
    tries
}

async fn exposed(_: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    for mode in [0o644, 0o640, 0o604, 0o666] {
        let directory = tempfile::tempdir().unwrap();
        let key = directory.path().join("rap.db.key");
        std::fs::write(&key, "ab".repeat(32)).unwrap();
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
        let rap = Setup::new().prepare(directory);
        tries.add(format!("a runtime with a key of mode {mode:o} starts"), starts(rap.serve_command()).await);
        let directory = tempfile::tempdir().unwrap();
        let key = directory.path().join("journal.key");
        std::fs::write(&key, "ab".repeat(32)).unwrap();
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
        let command = programs::example("kitchen_sink", directory.path(), &[]);
        tries.add(format!("a tool server with a key of mode {mode:o} starts"), starts(command).await);
    }
    tries
}

async fn exposed_database(_: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_owned();
    std::fs::write(path.join("secret"), "s3cret-token-in-a-file-of-its-own").unwrap();
    let tokens = format!("tokens = [\"file:secret\", {BYSTANDER:?}]");
    let rap = Setup::new().server(&tokens).prepare(directory);
    // The first start creates the database.
    log_of(&rap).await;
    for name in ["rap.db", "secret", "rap.toml"] {
        std::fs::set_permissions(path.join(name), std::fs::Permissions::from_mode(0o644)).unwrap();
    }
    let log = log_of(&rap).await;
    for name in ["rap.db", "secret", "rap.toml"] {
        let mut warnings = log.lines().filter_map(|line| line.split_once("chmod 600 "));
        let is_named = |path: &str| path.rsplit('/').next() == Some(name);
        let warned = warnings.any(|(_, paths)| paths.split_whitespace().any(is_named));
        tries.add(format!("{name} is not warned about"), !warned);
    }
    tries
}

/// Starts a runtime and stops it. Returns its log.
async fn log_of(rap: &Rap) -> String {
    let command = rap.serve_command();
    tokio::task::spawn_blocking(|| Process::start(command).into_log()).await.unwrap()
}

/// Returns true if a server starts, and stops it.
async fn starts(command: std::process::Command) -> bool {
    // `refused` panics if the server starts.
    tokio::task::spawn_blocking(|| Process::refused(command)).await.is_err()
}

async fn tokens(_: Arc<Stage>) -> Tries {
    let mut tries = Tries::new();
    for token in ["", "x", "secret", "password12345", "fifteen-letters"] {
        let rap = Setup::new().token(token).prepare(tempfile::tempdir().unwrap());
        let started = starts(rap.serve_command_on("0.0.0.0:0")).await;
        tries.add(format!("a runtime with the token {token:?} on all addresses starts"), started);
    }
    let rap = Setup::new().prepare(tempfile::tempdir().unwrap());
    tries.add(
        "a runtime without tokens on all addresses starts",
        starts(rap.serve_command_on("0.0.0.0:0")).await,
    );
    let rap = Setup::new().token("short").prepare(tempfile::tempdir().unwrap());
    let warned = log_of(&rap).await;
    tries.add("a short token on loopback is not warned about", !warned.contains("16"));
    let rap = Setup::new().token(BYSTANDER).prepare(tempfile::tempdir().unwrap());
    let log = log_of(&rap).await;
    tries.add("a long token is warned about", log.contains("16 characters"));
    tries
}
