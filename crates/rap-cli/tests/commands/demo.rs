//! The story that `rap demo` tells.

use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::alone;
use crate::support::{Running, rap, told, until};

/// The address of the demo's runtime, from what it told.
fn address(story: &str) -> String {
    let rest = story.split("listens on http://").nth(1).unwrap_or_else(|| panic!("{story}"));
    rest.split(',').next().unwrap().to_owned()
}

fn nothing_is_left(story: &str, temporary: &Path) {
    assert_eq!(std::fs::read_dir(temporary).unwrap().count(), 0);
    let address = address(story);
    until("the runtime is gone", || TcpStream::connect(&address).is_err());
}

/// It is a lone copy of the binary that tells it.
#[test]
fn the_demo_tells_its_story_to_the_end() {
    let (place, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut demo = Command::new(alone::copy(place.path()));
    demo.arg("demo").current_dir(place.path()).env_clear().stdin(Stdio::null());
    let told = told(demo.env("PATH", "").env("TMPDIR", temporary.path()));
    assert_eq!((told.code, told.err.as_str()), (Some(0), ""), "{}", told.out);
    let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let story = flat(&told.out);
    let mut rest = story.as_str();
    for expected in [
        "An agent that sleeps while it waits",
        "1. A slow call",
        "SLEEPS  until the call returns",
        "a thread that is waiting, 2 entries of history, 1 open call",
        "of processor time and wrote 0 bytes to its database",
        "WAKES   after 6.",
        "“Your bread is ready.”",
        "2. An event",
        "because the doorbell rang",
        "3. A word in between",
        "“42. The cake is still in the oven.”",
        "“And now the cake is ready.”",
        "4. A cancellation",
        "a pizza: cancelled, taken out again",
        "5. kill -9",
        "was killed with kill -9, in the middle of the call",
        "is started again on the same database",
        "croissants: golden brown",
        "6. A child, and a sleep",
        "calls spawn_thread (instructions: Bake a tart.)",
        "SLEEPS  for 600 s, or until something happens",
        "a tart: baking for 2 s",
        "A child is a thread of its own, t",
        "report  The tart is done, with apples.",
        "because its child reports",
        "SLEEPS  for 2 s, or until something happens",
        "clock   the time is over",
        "because its time has come",
        "“Tea is ready.”",
        "Nothing was lost and nothing came twice",
        "Shown: ",
        "Next:  rap init",
        "Or:    rap demo --stay",
    ] {
        let Some((_, after)) = rest.split_once(&flat(expected)) else { panic!("`{expected}`: {}", told.out) };
        rest = after;
    }
    assert!(!told.out.contains('\x1b'));
    nothing_is_left(&told.out, temporary.path());
}

#[test]
fn a_demo_that_is_stopped_leaves_nothing_behind() {
    let temporary = tempfile::tempdir().unwrap();
    let mut command = rap(&["demo"]);
    command.env("TMPDIR", temporary.path());
    let mut demo = Running::on_pipes(command);
    demo.expect("oven    bread: baking for 6 s");
    let kill = Command::new("kill").args(["-INT", &demo.id().to_string()]).stdin(Stdio::null()).status();
    assert!(kill.unwrap().success());
    assert_eq!(demo.exit(), Some(1));
    assert!(demo.seen.ends_with("rap: stopped before its end\n"), "{}", demo.seen);
    nothing_is_left(&demo.seen, temporary.path());
}

/// The runtime notices by itself that nobody is there any more.
#[test]
fn a_demo_that_is_killed_takes_its_runtime_along() {
    let temporary = tempfile::tempdir().unwrap();
    let mut command = rap(&["demo"]);
    command.env("TMPDIR", temporary.path());
    let mut demo = Running::on_pipes(command);
    demo.expect("oven    bread: baking for 6 s");
    let address = address(&demo.seen);
    drop(demo);
    until("the runtime is gone", || TcpStream::connect(&address).is_err());
}
