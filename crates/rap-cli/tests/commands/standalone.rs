//! The binary needs no other files: a copy of it runs in an empty directory, with an empty environment and PATH.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rap_testkit::{Port, Process, programs};

use crate::support::{Output, output};

/// A copy of the binary, with nothing beside it.
pub fn copy(directory: &Path) -> PathBuf {
    let copy = directory.join("rap");
    std::fs::copy(programs::rap_path(), &copy).unwrap();
    copy
}

#[test]
fn a_copy_of_the_binary_needs_nothing_beside_it() {
    let (place, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let program = copy(place.path());
    let port = Port::reserve();
    let address = port.address();
    let url = format!("http://{address}");
    let rap = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command.args(arguments).current_dir(work.path()).env_clear().env("PATH", "").stdin(Stdio::null());
        command
    };
    let ok = |arguments: &[&str]| {
        let Output { code, out, err } = output(rap(arguments).env("RAP_URL", &url));
        assert_eq!((code, err.as_str()), (Some(0), ""), "{arguments:?}: {out}");
        out
    };
    assert_eq!(ok(&["init"]), "wrote rap.toml; `rap serve` reads it\n");
    let mut runtime = Process::start(rap(&["serve", "--listen", &address]));
    assert_eq!(ok(&["threads", "new", "say hi", "--id", "t", "--wait"]), "hi\n");
    let zone = "call sleep_until {\"time\": \"2020-01-01T00:00\", \"timezone\": \"Europe/Berlin\"}";
    assert_eq!(ok(&["threads", "send", "t", zone, "--wait"]), "sleep_until: the sleep is over\n");
    assert!(ok(&["threads", "show", "t"]).contains("idle"));
    for listing in ["threads", "calls", "subs", "timers", "inbox", "tools", "nodes"] {
        ok(&[listing, "ls"]);
    }
    assert!(ok(&["completions", "bash"]).contains("_rap"));
    let chat = output(rap(&["chat", "t"]).env("RAP_URL", &url));
    assert_eq!((chat.code, chat.out.as_str()), (Some(0), ""), "{}", chat.err);
    assert!(chat.err.starts_with("a scripted model answers, not a language model: "), "{}", chat.err);
    runtime.kill();
    let mut left: Vec<_> = work.path().read_dir().unwrap().map(|file| file.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["rap.db", "rap.db-shm", "rap.db-wal", "rap.db.key", "rap.db.lock", "rap.toml"]);
    assert_eq!(place.path().read_dir().unwrap().count(), 1);
}
