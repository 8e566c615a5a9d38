//! Open questions, images and other additions of `rap chat`, on a terminal.

use rap_testkit::Setup;

use crate::support::{Running, Runtime};
use rap_testkit::manual_model::ManualModel;

/// The smallest PNG: one pixel.
const PNG: &[u8] = &[
    0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', 0, 0, 0, 13, b'I', b'H', b'D', b'R', 0, 0, 0, 1, 0, 0,
    0, 1,
];

/// A runtime whose tool `echo` needs an approval.
fn with_approvals() -> Runtime {
    Runtime::with(Setup::new().agent("name = \"default\"\napprove = [\"echo\"]"))
}

fn chat(runtime: &Runtime, arguments: &[&str]) -> Running {
    let mut chat = Running::on_a_terminal(runtime.command(arguments), 100);
    chat.expect("> ");
    chat
}

#[test]
fn an_approval_stays_open_and_answerable_after_something_else_is_said() {
    let runtime = with_approvals();
    let mut chat = chat(&runtime, &["chat"]);
    chat.type_in("call echo {\"text\": \"one\"}\r");
    chat.until_screen("the question", |screen| screen.contains("? echo: Allow echo({\"text\":\"one\"})?"));
    chat.until_screen("that it is not running", |screen| {
        screen.contains("for your approval") && !screen.contains("has been running")
    });
    chat.type_in("say hello\r");
    chat.until_screen("the answer, and the question below it", |screen| {
        screen.contains("agent   hello") && screen.contains("y) Allow, n) Refuse\n> ")
    });
    // The placeholder does not say that the call is running.
    let history = runtime.ok(&["threads", "ls", "--json"]);
    let thread = serde_json::from_str::<serde_json::Value>(&history).unwrap()["threads"][0]["id"].clone();
    let thread = thread.as_str().unwrap().to_owned();
    let tail = runtime.ok(&["threads", "tail", &thread, "--once"]);
    assert!(tail.contains("not started: the call waits until the user allows it"), "{tail}");
    assert!(runtime.ok(&["calls", "ls"]).contains("waits for approval"));
    // A number that is not a choice is not sent.
    chat.type_in("7\r");
    chat.until_screen("the refusal", |screen| screen.contains("`7` is none of the choices"));
    chat.type_in("y\r");
    chat.until_screen("the result", |screen| screen.contains("echo: echo one"));
    chat.until_screen("no question", |screen| !screen.contains("y) Allow"));
    let screen = chat.screen();
    assert!(!screen.contains("you     7") && !screen.contains("you     y"), "{screen}");
}

#[test]
fn a_number_while_a_question_is_open_is_never_a_message() {
    let runtime = with_approvals();
    let mut chat = chat(&runtime, &["chat"]);
    chat.type_in("call echo {\"text\": \"one\"}\r");
    chat.until_screen("the question", |screen| screen.contains("y) Allow"));
    chat.type_in("what would it do?\r");
    chat.until_screen("the answer", |screen| screen.contains("agent   what would it do?"));
    chat.type_in("2\r");
    chat.until_screen("the refusal of the call", |screen| {
        screen.contains("refused: the user did not allow this call")
    });
    assert!(!chat.screen().contains("agent   2"), "{}", chat.screen());
    // Without a question it is a message.
    chat.until_screen("no question", |screen| !screen.contains("y) Allow"));
    chat.type_in("2\r");
    chat.until_screen("the echo", |screen| screen.contains("agent   2"));
}

#[test]
fn a_sign_shows_that_the_model_is_asked_and_when_it_is_asked_again() {
    let model = ManualModel::start();
    let runtime = Runtime::with(Setup::new().model(&model.lines()));
    let mut chat = chat(&runtime, &["chat"]);
    chat.type_in("Hello?\r");
    let answer = model.next_answer();
    chat.until_screen("the sign", |screen| screen.contains("… asking the model for"));
    answer.break_off();
    chat.until_screen("the reason and the time", |screen| {
        let line = screen.split("the model request failed").nth(1).unwrap_or_default();
        let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
        line.contains("retrying in") && line.contains("UTC")
    });
    let mut answer = model.next_answer();
    answer.say("Here.");
    chat.until_screen("the text instead of the sign", |screen| {
        screen.contains("agent   Here.") && !screen.contains("asking the model for")
    });
    answer.end();
}

#[test]
fn an_image_is_sent_from_a_file_and_mistakes_are_named() {
    let runtime = Runtime::start();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("my cat.png");
    std::fs::write(&path, PNG).unwrap();
    let text_file = directory.path().join("notes.png");
    std::fs::write(&text_file, "no image").unwrap();
    let mut chat = chat(&runtime, &["chat"]);
    chat.type_in("/image /no/such.png\r");
    chat.until_screen("no such file", |screen| screen.contains("not attached: cannot read /no/such.png"));
    chat.type_in(&format!("/image {}\r", text_file.display()));
    chat.until_screen("not an image", |screen| {
        screen.contains("is not an image of a type that models accept")
    });
    // A pasted path of an image attaches it.
    chat.type_in(&format!("'{}'\r", path.display()));
    chat.until_screen("the attachment", |screen| {
        screen.contains("my cat.png will be sent with your next message")
    });
    chat.type_in("say a cat\r");
    chat.until_screen("the message", |screen| screen.contains("you     say a cat [image: my cat.png]"));
    chat.until_screen("the answer", |screen| screen.contains("agent   a cat"));
    let threads = runtime.json(&["threads", "ls", "--json"]);
    let thread = threads["threads"][0]["id"].as_str().unwrap();
    let tail = runtime.ok(&["threads", "tail", thread, "--once", "--json"]);
    assert!(tail.contains("\"mediaType\":\"image/png\""), "{tail}");
}

#[test]
fn the_last_thread_is_continued_and_its_usage_is_shown() {
    let runtime = Runtime::start();
    assert!(runtime.fails(&["chat", "--last"]).contains("no open thread to continue"));
    for name in ["older", "newer"] {
        runtime.ok(&["threads", "new", &format!("say {name}"), "--id", name, "--wait", "--timeout", "60s"]);
    }
    runtime.ok(&["threads", "send", "older", "say again", "--wait"]);
    let mut chat = chat(&runtime, &["chat", "--last"]);
    chat.until_screen("its id and title", |screen| screen.contains("thread older “say older”"));
    chat.type_in("/usage\r");
    chat.until_screen("the usage", |screen| screen.contains("2 turns; ") && screen.contains("tokens in"));
    chat.type_in("/nonsense\r");
    chat.until_screen("the mistake", |screen| screen.contains("/nonsense is not a command"));
    chat.type_in("/quit\r");
    assert_eq!(chat.exit(), Some(0));
}

#[test]
fn events_for_children_progress_and_views_are_shown() {
    let runtime = Runtime::start();
    let mut chat = chat(&runtime, &["chat"]);
    chat.type_in("call news\r");
    chat.until_screen("the event in one line", |screen| {
        screen.contains("event   of news: it rains (child t")
    });
    chat.type_in("call build\r");
    chat.until_screen("the progress in a row", |screen| screen.contains("█████░░░░░  50% compiling\n> "));
    chat.until_screen("the view in a line", |screen| {
        screen.contains("view    map of http://") && screen.contains("{\"x\":1}")
    });
    chat.type_in("\x03");
    chat.until_screen("no progress", |screen| !screen.contains("compiling"));
}
