//! Files of a runtime: nobody but their owner can read them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rap_testkit::Setup;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).permissions().mode()
        & 0o777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[tokio::test]
async fn new_files_can_be_read_by_their_owner_only() {
    let rap = Setup::new().launched_by(&["/bin/sh", "-c", "umask 000; exec \"$0\" \"$@\""]).start();
    let thread = rap.open("say hi").await;
    rap.until_idle(&thread).await;
    for name in ["rap.db", "rap.db-wal", "rap.db-shm", "rap.db.key", "rap.db.lock"] {
        assert_eq!(mode(&rap.directory().join(name)), 0o600, "{name}");
    }
}

#[tokio::test]
async fn exposed_files_and_short_tokens_are_warned_about_at_the_start() {
    let mut rap = Setup::new().token("short").start();
    rap.until_logged("a token of server.tokens is shorter than 16 characters").await;
    set_mode(&rap.directory().join("rap.toml"), 0o600);
    rap.restart();
    assert!(!rap.log().contains("chmod"), "{}", rap.log());

    for (name, mode) in [("rap.toml", 0o640), ("rap.db", 0o604), ("rap.db.lock", 0o666)] {
        set_mode(&rap.directory().join(name), mode);
    }
    rap.stop();
    rap.start_again();
    let log = rap.log();
    assert!(log.contains("run: chmod 600 rap.toml\n"), "{log}");
    // The other files of a database get its mode.
    assert!(log.contains("run: chmod 600 rap.db rap.db-wal rap.db-shm rap.db.lock\n"), "{log}");
}
