//! `rap demo`.

use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

use rap_testkit::block_until;
use rap_testkit::programs::rap;

use crate::standalone;
use crate::support::{Running, output};

/// Finds the address of the demo's runtime in its output.
fn address(output: &str) -> String {
    let rest = output.split("listening on http://").nth(1).unwrap_or_else(|| panic!("{output}"));
    rest.split(',').next().unwrap().to_owned()
}

/// Words of a text in alphabetical order. Numbers, ids and addresses are replaced, and units of numbers are left out.
fn words(text: &str) -> Vec<&str> {
    let has_digit = |word: &&str| word.contains(|c: char| c.is_ascii_digit());
    let is_unit = |word: &&str| ["s", "ms", "µs", "bytes", "kB", "MB"].contains(word);
    let words = text.split_whitespace().filter(|word| !is_unit(word));
    let mut words: Vec<&str> = words.map(|word| if has_digit(&word) { "#" } else { word }).collect();
    words.sort_unstable();
    words
}

/// Checks that the picture in the README shows the beginning of this output.
fn is_shown_by_the_picture(output: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let picture = std::fs::read_to_string(root.join("docs/demo.svg")).unwrap();
    let texts = picture.split("<text ").skip(1).map(|text| {
        let (_, text) = text.split_once('>').unwrap();
        text.split_once("</text>").unwrap().0
    });
    let picture = texts.collect::<Vec<_>>().join(" ");
    let picture = picture.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    let (shown, _) = output.split_once("\n4. ").unwrap();
    assert_eq!(words(&picture), words(shown), "write docs/demo.svg again: cargo xtask picture");
}

fn nothing_is_left(output: &str, temporary: &Path) {
    assert_eq!(std::fs::read_dir(temporary).unwrap().count(), 0);
    let address = address(output);
    block_until("the runtime is gone", || TcpStream::connect(&address).is_err());
}

/// Runs a copy of the binary in an empty directory.
#[test]
fn the_demo_runs_to_its_end() {
    let (place, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut demo = Command::new(standalone::copy(place.path()));
    demo.arg("demo").current_dir(place.path()).env_clear().stdin(Stdio::null());
    let output = output(demo.env("PATH", "").env("TMPDIR", temporary.path()));
    assert_eq!((output.code, output.err.as_str()), (Some(0), ""), "{}", output.out);
    let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let text = flat(&output.out);
    let mut rest = text.as_str();
    for expected in [
        "An agent that sleeps while it waits",
        "1. A slow call",
        "SLEEPS  until the call returns",
        "a thread that is waiting, 2 entries of history, 1 open call",
        "of CPU time and wrote 0 bytes to its database",
        "WAKES   after 6.",
        "“Your bread is ready.”",
        "2. An event",
        "because the doorbell rang",
        "3. A message during a call",
        "“42. The cake is still in the oven.”",
        "“And now the cake is ready.”",
        "4. A cancellation",
        "a pizza: cancelled, taken out again",
        "5. kill -9",
        "was killed with kill -9 during the call",
        "restarted on the same database",
        "croissants: golden brown",
        "6. A child and a sleep",
        "calls spawn_thread (instructions: Bake a tart.)",
        "SLEEPS  for 600 s, or until any input",
        "a tart: baking for 2 s",
        "A child is a separate thread, t",
        "report  The tart is done, with apples.",
        "because its child reports",
        "SLEEPS  for 2 s, or until any input",
        "clock   the sleep is over",
        "because its sleep is over",
        "“Tea is ready.”",
        "Nothing was lost or duplicated",
        "Shown: ",
        "Next:  write a rap.toml with rap init",
        "Or:    keep this runtime with rap demo --stay",
    ] {
        let Some((_, after)) = rest.split_once(&flat(expected)) else {
            panic!("`{expected}`: {}", output.out)
        };
        rest = after;
    }
    assert!(!output.out.contains('\x1b'));
    is_shown_by_the_picture(&output.out);
    nothing_is_left(&output.out, temporary.path());
}

#[test]
fn an_interrupted_demo_leaves_nothing_behind() {
    let temporary = tempfile::tempdir().unwrap();
    let mut command = rap(&["demo"]);
    command.env("TMPDIR", temporary.path());
    let mut demo = Running::on_pipes(command);
    demo.expect("oven    bread: baking for 6 s");
    let kill = Command::new("kill").args(["-INT", &demo.id().to_string()]).stdin(Stdio::null()).status();
    assert!(kill.unwrap().success());
    assert_eq!(demo.exit(), Some(1));
    assert!(demo.seen.ends_with("rap: the demo was interrupted\n"), "{}", demo.seen);
    nothing_is_left(&demo.seen, temporary.path());
}

/// The runtime stops when its stdin is closed.
#[test]
fn the_runtime_of_a_killed_demo_stops() {
    let temporary = tempfile::tempdir().unwrap();
    let mut command = rap(&["demo"]);
    command.env("TMPDIR", temporary.path());
    let mut demo = Running::on_pipes(command);
    demo.expect("oven    bread: baking for 6 s");
    let address = address(&demo.seen);
    drop(demo);
    block_until("the runtime is gone", || TcpStream::connect(&address).is_err());
}
