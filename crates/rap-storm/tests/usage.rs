//! The command line of `storm`. This test also has cargo build the program with the other tests.

use std::process::Command;

#[test]
fn a_wrong_option_is_refused_with_the_usage() {
    for arguments in [
        &["--hail"][..],
        &["--seconds", "many"],
        &["--store", "mysql"],
        &["--threads", "0"],
        &["--load", "heavy"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_storm")).args(arguments).output();
        let output = output.expect("storm starts");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(String::from_utf8_lossy(&output.stderr).starts_with("usage: storm"), "{arguments:?}");
    }
}
