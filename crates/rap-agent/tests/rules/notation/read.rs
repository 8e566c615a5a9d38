//! Parser of the input column of a table.
//!
//! Inputs: `begin[: TEXT]`, `said TEXT[, interrupt|enqueue|reject]`, `answer[ of TURN][ TEXT]: CALLS`,
//! `failed[ permanently]`, `too long: WHY`, `summarised[ of TURN]: TEXT`, `unused answer`, `returned CALL: TEXT`,
//! `subscribed CALL: TEXT`, `call failed CALL`, `refused CALL: WHY`, `timed out CALL`,
//! `ticked CALL: TEXT[, next SECONDS|unknown]`, `event CALL: TEXT[, child][, final][, id ID]`, `lost CALL`,
//! `sign in CALL`, `choice CALL NO`, `view CALL`, `chose CALL NO`, `dismissed CALL`, `interrupt`, `cancel CALL`,
//! `resume`, `close`, `due`, `notice: TEXT`; from other threads: `child closed THREAD`, `child idle THREAD`,
//! `child notice THREAD: TEXT`, `report THREAD CALL: TEXT[, newer]`, `from parent: TEXT[, newer]`, `parent closed`,
//! `resumed`.
//!
//! Other lines: `after SECONDS` advances the time, `clock back SECONDS` sets the clock back, `paused elsewhere THREADS` sets
//! the other paused threads of the session.
//!
//! Calls of an answer: `a` is sent to a server, `a=refuse` cannot be executed, `a=approve` is sent if the user allows
//! it, `a=malformed` has malformed arguments, `?` has a malformed id. The built-in tools: `a=cancel(CALL)`,
//! `a=cancel_short(CALL)`, `a=spawn(TEXT)`, `a=report(TEXT)`, `a=close`, `a=close(TEXT)`, `a=message(THREAD)`,
//! `a=sleep(SECOND)`, `a=wait`, `a=schedule(SECOND)`.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use rap_agent::{
    Arguments, BuiltIn, Choice, Event, Input, NextTime, Occurrence, OnBusy, Plan, PlannedCall, Server,
    ThreadMessage, ToolResult, TurnAnswer, TurnRetry, Usage, texts,
};
use rap_protocol::{AuthUrl, Body, CallId, EventId, ResponseUrl, Timestamp};
use serde_json::{Map, Value};

use super::{Names, Thread, id, thread_id};

const USAGE: Usage = Usage { input: 3, output: 1, cached: 0, written: 0, cost: 0 };

/// Parses an input. For `ticked`, also returns the occurrence of the schedule.
pub fn input(thread: &Thread, line: &str) -> (Input, Option<Occurrence>) {
    let (words, text) = match line.split_once(':') {
        Some((words, text)) => (words, text.trim()),
        None => (line, ""),
    };
    let words: Vec<&str> = words.split_whitespace().collect();
    if let ["ticked", call] = words.as_slice() {
        return (Input::TimerFired { call: thread.names.call(call) }, Some(occurrence(text)));
    }
    let session = |words| of_session(&thread.names, words, text);
    let read = of_model(thread, line, &words, text)
        .or_else(|| of_tool(&thread.names, &words, text))
        .or_else(|| of_person(&thread.names, &words, line, text))
        .or_else(|| session(&words));
    (read.unwrap_or_else(|| panic!("no such input: {line}")), None)
}

fn of_model(thread: &Thread, line: &str, words: &[&str], text: &str) -> Option<Input> {
    let current = thread.head.turn();
    let answer = |turn, said: &[&str]| {
        let calls = text.split_whitespace().map(|call| planned(&thread.names, call)).collect();
        Input::TurnEnded { turn, answer: TurnAnswer { text: said.join(" "), calls, ..TurnAnswer::default() } }
    };
    let summarised = |turn| Input::Summarised { turn, text: text.into(), usage: USAGE };
    let turn = |text: &str| text.parse().unwrap_or_else(|_| panic!("no turn: {line}"));
    Some(match words {
        ["answer", "of", of, said @ ..] => answer(turn(of), said),
        ["answer", said @ ..] => answer(current, said),
        ["failed", rest @ ..] => Input::TurnFailed {
            turn: current,
            why: "503".into(),
            retry: if rest.is_empty() { TurnRetry::Later } else { TurnRetry::Never },
        },
        ["too", "long"] => Input::PromptTooLong { turn: current, why: text.into() },
        ["summarised", "of", of] => summarised(turn(of)),
        ["summarised"] => summarised(current),
        ["unused", "answer"] => Input::UnusedAnswer(USAGE),
        _ => return None,
    })
}

fn of_tool(names: &Names, words: &[&str], text: &str) -> Option<Input> {
    let result = |call: &str, subscription| {
        let result = ToolResult { content: Body::Text(text.into()), display: Vec::new(), subscription };
        Input::ToolResult { call: names.call(call), result }
    };
    Some(match words {
        ["returned", call] => result(call, false),
        ["subscribed", call] => result(call, true),
        ["call", "failed", call] => {
            Input::CallFailed { call: names.call(call), text: "Error: refused".into() }
        }
        ["refused", call] => Input::CallbackRefused { call: names.call(call), why: text.into() },
        ["timed", "out", call] => Input::TimerFired { call: names.call(call) },
        ["event", call] => event(names.call(call), text),
        ["lost", call] => Input::SubscriptionLost { call: names.call(call) },
        ["sign", "in", call] => Input::SignInRequested {
            call: names.call(call),
            url: AuthUrl::new("https://example.com/in").expect("a URL"),
        },
        ["choice", call, number] => Input::ChoiceRequested {
            call: names.call(call),
            choice: choice(number.parse().expect("a number")),
        },
        ["view", call] => {
            Input::View { call: names.call(call), view_type: "progress".into(), content: Value::from(1) }
        }
        _ => return None,
    })
}

fn of_person(names: &Names, words: &[&str], line: &str, text: &str) -> Option<Input> {
    Some(match words {
        ["begin"] => Input::Begin { message: Some(text).filter(|text| !text.is_empty()).map(Into::into) },
        ["said", ..] => said(line.trim_start_matches("said ")),
        ["chose", call, number] => {
            Input::Choose { call: names.call(call), selected: Some(number.parse().expect("a number")) }
        }
        ["dismissed", call] => Input::Choose { call: names.call(call), selected: None },
        ["interrupt"] => Input::Interrupt,
        ["cancel", call] => Input::Cancel { call: names.call(call) },
        ["resume"] => Input::Resume,
        ["close"] => Input::Close,
        ["due"] => Input::Due,
        ["notice"] => Input::Notice { text: text.into() },
        _ => return None,
    })
}

/// Returns a time that is later than all times before.
fn newer() -> Timestamp {
    static LAST: AtomicI64 = AtomicI64::new(1 << 50);
    Timestamp(LAST.fetch_add(1_000_000, Ordering::Relaxed))
}

fn of_session(names: &Names, words: &[&str], text: &str) -> Option<Input> {
    let (plain, external_input_at) = match text.strip_suffix(", newer") {
        Some(plain) => (plain.to_owned(), newer()),
        None => (text.to_owned(), Timestamp(0)),
    };
    let (sender, message) = match words {
        ["child", "closed", child] => (names.thread(child), ThreadMessage::ChildClosed),
        ["child", "idle", child] => (names.thread(child), ThreadMessage::EventChildIdle),
        ["child", "notice", child] => (names.thread(child), ThreadMessage::Notice { text: plain }),
        ["report", child, call] => {
            let (call, tool) = (names.call(call), texts::SPAWN_THREAD.into());
            (names.thread(child), ThreadMessage::Report { call, tool, text: plain, external_input_at })
        }
        ["from", "parent"] => (thread_id("t0"), ThreadMessage::Text { text: plain, external_input_at }),
        ["parent", "closed"] => (thread_id("t0"), ThreadMessage::Close),
        ["resumed"] => (thread_id("t0"), ThreadMessage::Resume),
        _ => return None,
    };
    Some(Input::FromThread { sender, message })
}

fn said(words: &str) -> Input {
    let (text, on_busy) = match words.rsplit_once(", ") {
        Some((text, "interrupt")) => (text, OnBusy::Interrupt),
        Some((text, "enqueue")) => (text, OnBusy::Enqueue),
        Some((text, "reject")) => (text, OnBusy::Reject),
        _ => (words, OnBusy::Join),
    };
    Input::UserMessage { message: text.into(), on_busy }
}

fn event(call: CallId, text: &str) -> Input {
    let mut words = text.split(", ");
    let text = words.next().unwrap_or_default().to_owned();
    let flags: Vec<&str> = words.collect();
    let event = flags.iter().find_map(|flag| flag.strip_prefix("id "));
    let id = event.map(|id| EventId::new(id).expect("an id"));
    let (associative, is_final) = (!flags.contains(&"child"), flags.contains(&"final"));
    Input::Event { call, event: Event { id, text, associative, is_final } }
}

fn occurrence(text: &str) -> Occurrence {
    let (text, next) = text.split_once(", next ").unwrap_or((text, ""));
    let next = match next {
        "" => NextTime::Never,
        "unknown" => NextTime::Unknown,
        next => NextTime::At(second(next)),
    };
    Occurrence { text: text.into(), next }
}

fn second(text: &str) -> Timestamp {
    Timestamp(text.parse::<i64>().expect("a second") * 1000)
}

fn planned(names: &Names, call: &str) -> PlannedCall {
    let (own, plan) = call.split_once('=').unwrap_or((call, ""));
    let (tool, with) = plan.trim_end_matches(')').split_once('(').unwrap_or((plan, ""));
    let arguments = Map::from_iter([("of".to_owned(), Value::from(own))]);
    let mut arguments = Arguments::Given(arguments);
    let server = Server("https://tools.example".into());
    let plan = match tool {
        "" => Plan::Invoke(server),
        "refuse" => Plan::Refuse("Error: no such tool".into()),
        "approve" => Plan::Approve { server, prompt: "Really?".into() },
        "malformed" => {
            arguments = Arguments::Unusable("{".into());
            Plan::Invoke(server)
        }
        tool => Plan::BuiltIn(built_in(names, tool, with)),
    };
    let call_id = (own != "?").then(|| id(own));
    PlannedCall { model_id: call_id, name: "look".into(), arguments, display: None, plan }
}

fn built_in(names: &Names, tool: &str, with: &str) -> BuiltIn {
    match tool {
        "cancel" => BuiltIn::CancelSubscription { tool_call_id: names.call(with).to_string() },
        "cancel_short" => {
            let tool_call_id = rap_agent::prompt::short_call_id(names.call(with).as_str());
            BuiltIn::CancelSubscription { tool_call_id }
        }
        "spawn" => BuiltIn::SpawnThread { instructions: with.into() },
        "report" => BuiltIn::ReportToParent { report: with.into() },
        "close" => BuiltIn::CloseThread { report: Some(with.to_owned()).filter(|with| !with.is_empty()) },
        "message" => {
            BuiltIn::SendMessageToChild { thread_id: names.thread(with).to_string(), message: "psst".into() }
        }
        "sleep" => BuiltIn::SleepUntil { until: second(with) },
        "sleep_for" => {
            BuiltIn::Sleep { duration: Duration::from_secs(with.parse().expect("a number of seconds")) }
        }
        "wait" => BuiltIn::Wait,
        "schedule" => BuiltIn::Schedule { next: second(with), confirmation: "scheduled".into() },
        _ => panic!("no such tool: {tool}"),
    }
}

fn choice(number: u64) -> Choice {
    Choice {
        prompt: "Which?".into(),
        choices: vec!["this".into(), "that".into()],
        default: 1,
        response_url: ResponseUrl::new(format!("https://example.com/{number}")).expect("a URL"),
        digest: number,
    }
}
