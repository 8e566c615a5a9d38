//! `rap top` on a terminal and without one.

use rap_testkit::Setup;

use crate::support::{Running, Runtime};

#[test]
fn a_runtime_is_watched_and_the_terminal_is_restored() {
    let runtime = Runtime::with(Setup::new().agent("name = \"default\"\napprove = [\"echo\"]"));
    runtime.ok(&["threads", "new", "call slow {\"seconds\": 3600}", "--id", "busy"]);
    runtime.until_status("busy", "waiting");
    let mut top = Running::on_a_terminal(runtime.command(&["top", "--interval", "1s"]), 120);
    let before = top.modes();
    top.until_screen("the lists", |screen| {
        screen.contains("Needs a person (0)")
            && screen.contains("Active threads (1)")
            && screen.contains("Open calls (1)")
    });
    assert_ne!(top.modes().local_modes, before.local_modes);
    // Changes appear without a key press.
    runtime.ok(&["threads", "new", "call echo {\"text\": \"x\"}", "--id", "asks"]);
    top.until_screen("the question", |screen| {
        screen.contains("Needs a person (1)") && screen.contains("asks") && screen.contains("Allow echo")
    });
    top.type_in("?");
    top.until_screen("the help", |screen| screen.contains("change the interval"));
    top.type_in("?p");
    top.until_screen("the pause", |screen| screen.contains("paused"));
    top.resize(60);
    top.until_screen("the narrow screen", |screen| screen.lines().all(|line| line.chars().count() <= 60));
    top.type_in("q");
    assert_eq!(top.exit(), Some(0));
    assert_eq!(top.modes().local_modes, before.local_modes);
    assert!(top.seen.contains("\x1b[?1049l"), "the screen before is shown again");
}

#[test]
fn without_a_terminal_one_snapshot_is_printed() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "say hello", "--id", "t", "--wait"]);
    let output = runtime.run(&["top"]);
    assert_eq!(output.code, Some(0));
    assert_eq!(output.err, "this is not a terminal: one snapshot follows\n");
    for text in [
        "threads: needs you 0, failed 0, running 0, waiting 0, idle 1, closed 0",
        "tokens: ",
        "open calls: 0",
    ] {
        assert!(output.out.contains(text), "{text}: {}", output.out);
    }
}
