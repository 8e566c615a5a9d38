//! `rap chat` on a terminal: what is on the screen, and that the modes of the terminal are restored.

use std::process::Command;

use rap_testkit::Setup;

use crate::support::{Running, Runtime, plain};
use rap_testkit::manual_model::ManualModel;

fn agent_says(screen: &str, text: &str) -> bool {
    screen.contains(&format!("agent   {text}"))
}

/// Starts a chat with a model whose answers the test sends in pieces.
fn with_a_model() -> (Runtime, ManualModel, Running) {
    let model = ManualModel::start();
    let runtime = Runtime::with(Setup::new().model(&model.lines()));
    let mut chat = Running::on_a_terminal(runtime.command(&["chat"]), 80);
    chat.expect("> ");
    (runtime, model, chat)
}

#[test]
fn every_piece_of_an_answer_is_shown_at_once() {
    let (_runtime, model, mut chat) = with_a_model();
    chat.type_in("Hello?\r");
    let mut answer = model.next_answer();
    let mut so_far = String::new();
    for piece in ["Hel", "lo, ", "wor", "ld.\nSec", "ond line"] {
        answer.say(piece);
        so_far.push_str(&piece.replace('\n', "\n        "));
        chat.until_screen(piece, |screen| agent_says(screen, &format!("{so_far}\n> ")));
    }
    answer.end();
    chat.type_in("next");
    chat.until_screen("what is typed", |screen| screen.ends_with("\n> next"));
    let screen = chat.screen();
    assert_eq!(screen.matches("Hello, world.").count(), 1, "{screen}");
    assert!(!screen.contains("a scripted model answers"), "{screen}");
    assert!(
        screen.contains("you     Hello?\nagent   Hello, world.\n        Second line\n> next"),
        "{screen}"
    );
}

#[test]
fn a_dropped_answer_is_removed_from_the_screen() {
    let (_runtime, model, mut chat) = with_a_model();
    chat.type_in("Which?\r");
    let mut answer = model.next_answer();
    answer.say("It is the wro");
    chat.until_screen("the first attempt", |screen| agent_says(screen, "It is the wro\n"));
    answer.break_off();
    chat.until_screen("its end", |screen| screen.contains("the model request failed"));
    assert!(!chat.screen().contains("wro"), "{}", chat.screen());
    let mut answer = model.next_answer();
    answer.say("It is the ri");
    chat.until_screen("the second attempt", |screen| agent_says(screen, "It is the ri\n"));
    answer.say("ght one.");
    answer.end();
    chat.until_screen("the answer", |screen| agent_says(screen, "It is the right one.\n"));
    assert!(!chat.screen().contains("wro"), "{}", chat.screen());
}

#[test]
fn an_interrupted_answer_is_removed_from_the_screen() {
    let (_runtime, model, mut chat) = with_a_model();
    chat.type_in("Tell me everything.\r");
    let mut answer = model.next_answer();
    answer.say("Once upon a time");
    chat.until_screen("the beginning", |screen| agent_says(screen, "Once upon a time\n"));
    chat.type_in("\x03");
    chat.until_screen("the end", |screen| screen.contains("interrupted; press ^C again or ^D to exit"));
    chat.until_screen("nothing of it", |screen| !screen.contains("Once upon"));
    chat.type_in("Less.\r");
    let mut answer = model.next_answer();
    answer.say("Fine");
    chat.until_screen("the answer", |screen| agent_says(screen, "Fine\n"));
    // A message to a running thread restarts the model request.
    chat.type_in("Even less.\r");
    let mut answer = model.next_answer();
    chat.until_screen("nothing of the second", |screen| !screen.contains("agent   Fine"));
    answer.say("Ok.");
    answer.end();
    chat.until_screen("the last answer", |screen| agent_says(screen, "Ok.\n"));
    let screen = chat.screen();
    assert!(!screen.contains("Once") && !screen.contains("Fine"), "{screen}");
}

#[test]
fn an_answer_longer_than_the_terminal_is_printed_in_full() {
    let (_runtime, model, mut chat) = with_a_model();
    chat.type_in("Count.\r");
    let mut answer = model.next_answer();
    for number in 1..=40 {
        answer.say(&format!("number {number}\n"));
    }
    // While the answer is in progress its end is shown; then all of it is printed.
    chat.until_screen("the end of it", |screen| screen.contains("number 40\n> "));
    chat.expect("number 40");
    answer.end();
    chat.expect("agent   number 1\r");
    chat.type_in("\x04");
    assert_eq!(chat.exit(), Some(0));
    let seen = plain(&chat.seen);
    let whole = seen.rfind("agent   number 1\r").unwrap_or_else(|| panic!("{seen}"));
    for number in 2..=40 {
        assert!(seen[whole..].contains(&format!("        number {number}\r")), "{number}: {seen}");
    }
}

/// Returns the duration in the row of the open call, which is directly above the input line.
fn shown_duration(screen: &str) -> Option<u64> {
    assert!(screen.matches("has been running").count() <= 1, "{screen}");
    let (_, rest) = screen.split_once("        … slow (call_1) has been running for ")?;
    let (seconds, rest) = rest.split_once(" s")?;
    assert!(rest.starts_with("\n> "), "{screen}");
    seconds.parse().ok()
}

#[test]
fn the_duration_of_an_open_call_is_updated_in_place() {
    let runtime = Runtime::start();
    let mut chat = Running::on_a_terminal(runtime.command(&["chat"]), 80);
    chat.expect("> ");
    chat.type_in("call slow {\"seconds\": 1000}\r");
    for at_least in 0..3 {
        chat.until_screen("it counts", |screen| shown_duration(screen) >= Some(at_least));
    }
    chat.type_in("\x03");
    chat.until_screen("its end", |screen| screen.contains("slow") && screen.contains(": interrupted"));
    chat.until_screen("no row of it", |screen| shown_duration(screen).is_none());
    chat.type_in("call sleep {\"seconds\": 1000}\r");
    chat.until_screen("it sleeps", |screen| {
        screen.contains("… asleep for the last ") && screen.contains("; wakes in 16 min")
    });
    chat.type_in("half a li");
    chat.until_screen("both", |screen| {
        screen.contains("… asleep for the last ") && screen.ends_with("\n> half a li")
    });
}

#[test]
fn questions_are_answered_and_calls_interrupted_on_a_terminal() {
    let runtime = Runtime::start();
    runtime.ok(&["threads", "new", "say before", "--id", "t", "--wait"]);
    let mut chat = Running::on_a_terminal(runtime.command(&["chat", "t"]), 80);
    chat.expect("thread t “say before”, agent default");
    chat.expect("^C interrupts the agent, ^C twice or ^D exits");
    chat.expect("note    a scripted model answers, not a language model");
    chat.expect("agent   before");
    chat.type_in("say one\r");
    chat.expect("agent   one");
    chat.type_in("call choose\r");
    chat.expect("3) blue");
    chat.type_in("3\r");
    chat.expect("you     answer: blue");
    chat.expect("agent   choose: chose blue");
    chat.type_in("call authorize\r");
    chat.expect("authorize asks you to sign in: open http://127.0.0.1:");
    chat.type_in("\x03");
    chat.expect("interrupted; press ^C again or ^D to exit");
    chat.until_screen("its end", |screen| screen.contains(": interrupted"));
    chat.type_in("say two\r");
    chat.until_screen("the answer", |screen| agent_says(screen, "two"));
    chat.type_in("\x04");
    assert_eq!(chat.exit(), Some(0));
    assert!(chat.screen().trim_end().ends_with("continue with: rap chat t"), "{}", chat.screen());
    assert_eq!(runtime.json(&["threads", "show", "t", "--json"])["status"], "idle");
}

#[test]
fn interrupting_twice_exits() {
    let runtime = Runtime::start();
    let mut chat = Running::on_a_terminal(runtime.command(&["chat"]), 80);
    chat.expect("> ");
    chat.type_in("\x03");
    chat.expect("press ^C again or ^D to exit");
    chat.type_in("\x03");
    assert_eq!(chat.exit(), Some(0));
}

#[test]
fn a_chat_on_a_terminal_reconnects() {
    let mut runtime = Runtime::start();
    let mut chat = Running::on_a_terminal(runtime.command(&["chat"]), 80);
    chat.expect("> ");
    chat.type_in("call slow {\"seconds\": 2}\r");
    chat.until_screen("it runs", |screen| screen.contains("slow (call_1) has been running"));
    runtime.kill();
    chat.until_screen("it is gone", |screen| screen.contains("connection lost; reconnecting"));
    chat.type_in("say meanwhile\r");
    chat.until_screen("it was typed", |screen| screen.contains("you     say meanwhile"));
    runtime.start_again();
    chat.until_screen("it is back", |screen| screen.contains("reconnected"));
    chat.until_screen("both", |screen| agent_says(screen, "meanwhile") && screen.contains("slept 2"));
    assert_eq!(chat.screen().matches("say meanwhile").count(), 1, "{}", chat.screen());
}

#[test]
fn unsent_messages_are_reported_on_exit() {
    let mut runtime = Runtime::start();
    let mut chat = Running::on_a_terminal(runtime.command(&["chat"]), 80);
    chat.expect("> ");
    chat.type_in("say found\r");
    chat.until_screen("it is connected", |screen| agent_says(screen, "found\n"));
    runtime.kill();
    chat.type_in("say lost\r");
    chat.until_screen("it was typed", |screen| screen.contains("you     say lost"));
    chat.type_in("\x04");
    assert_eq!(chat.exit(), Some(0));
    let screen = chat.screen();
    assert!(screen.contains("not sent, because the runtime is down: say lost"), "{screen}");
}

#[test]
fn a_paste_of_several_lines_is_one_message() {
    let runtime = Runtime::start();
    let mut chat = Running::on_a_terminal(runtime.command(&["chat"]), 80);
    chat.expect("> ");
    chat.type_in("\x1b[200~say one\rsay two\x1b[201~");
    chat.until_screen("the paste", |screen| screen.ends_with("> say one⏎say two"));
    chat.type_in("\r");
    chat.until_screen("the answer", |screen| agent_says(screen, "one\n        two\n> "));
    assert!(chat.screen().contains("you     say one\n        say two\n"), "{}", chat.screen());
}

#[test]
fn a_suspended_chat_continues() {
    let runtime = Runtime::start();
    let mut chat = Running::on_a_terminal(runtime.command(&["chat"]), 80);
    chat.expect("> ");
    chat.type_in("\x1ahere");
    // The system may ignore SIGTSTP for a process without a controlling shell. Both cases are correct.
    chat.until_screen("it is back", |screen| {
        kill("-CONT", &chat);
        screen.ends_with("\n> here")
    });
    chat.type_in("\x15say back\r");
    chat.until_screen("it answers", |screen| agent_says(screen, "back\n> "));
}

fn kill(signal: &str, chat: &Running) {
    let status = Command::new("kill").args([signal, &chat.id().to_string()]).status().unwrap();
    assert!(status.success());
}

/// Runs a chat, ends it with `end`, and checks that the modes of the terminal are restored.
fn restores_the_terminal(end: impl Fn(&mut Runtime, &mut Running)) {
    let mut runtime = Runtime::start();
    let mut chat = Running::on_a_terminal(runtime.command(&["chat"]), 80);
    let before = chat.modes();
    chat.expect("> ");
    chat.type_in("call slow {\"seconds\": 1000}\r");
    chat.until_screen("it runs", |screen| screen.contains("has been running"));
    assert_ne!(chat.modes().local_modes, before.local_modes);
    end(&mut runtime, &mut chat);
    chat.exit();
    let after = chat.modes();
    assert_eq!((after.local_modes, after.input_modes), (before.local_modes, before.input_modes));
    assert!(
        !chat.screen().contains("has been running") && !chat.screen().contains("\n> "),
        "{}",
        chat.screen()
    );
    let last = |sequence: &str| chat.seen.rfind(sequence).unwrap_or(0);
    assert!(
        last("\x1b[?2004l") > last("\x1b[?2004h") && last("\x1b[?25h") > last("\x1b[?25l"),
        "{:?}",
        chat.seen
    );
}

#[test]
fn the_terminal_is_restored_however_the_chat_ends() {
    restores_the_terminal(|_, chat| chat.type_in("\x04"));
    restores_the_terminal(|_, chat| kill("-TERM", chat));
    restores_the_terminal(|_, chat| kill("-HUP", chat));
    // An error: the database is empty, and the runtime does not know the thread.
    restores_the_terminal(|runtime, _| runtime.replace());
}

#[test]
fn a_resized_terminal_is_redrawn() {
    let runtime = Runtime::start();
    let mut chat = Running::on_a_terminal(runtime.command(&["chat"]), 80);
    chat.expect("> ");
    chat.type_in("call slow {\"seconds\": 1000}\r");
    chat.until_screen("it runs", |screen| screen.contains("slow (call_1) has been running"));
    chat.resize(40);
    chat.until_screen("it fits", |screen| {
        screen.lines().filter(|line| line.contains("… slow (call_1)")).all(|line| line.ends_with('…'))
    });
    chat.type_in("typed");
    chat.until_screen("it goes on", |screen| screen.ends_with("\n> typed"));
}
