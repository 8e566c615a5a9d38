//! Describes the status of a thread in sentences: what it waits for, since when and until when, and which command
//! continues it.

use std::collections::HashMap;
use std::time::Duration;

use rap_agent::texts;
use rap_api::{OpenCall, Question, QuestionKind, Status, Subscription, Thread, Time, Usage, UsualDuration};

use crate::table::one_line;
use crate::time_format::{exact, exact_relative, long_duration, precise_duration, relative, short_duration};

/// Objects related to a thread that its description needs.
#[derive(Debug, Default)]
pub struct Related {
    /// Questions of the thread that wait for a person.
    pub questions: Vec<Question>,
    /// Children that are not closed; may be truncated.
    pub children: Vec<Thread>,
    /// Due times of timers, by call id.
    pub timers: HashMap<String, Time>,
}

/// Returns one sentence for the status, then one for each thing that the thread waits for.
pub fn describe(thread: &Thread, related: &Related, now: Time) -> Vec<String> {
    let mut sentences = vec![describe_status(thread, &related.questions, now)];
    sentences.extend(related.questions.iter().map(|question| describe_question(question, now)));
    sentences.extend(thread.waiting_on.iter().map(|call| describe_call(call, now)));
    let next = |subscription: &Subscription| related.timers.get(&subscription.call_id).copied();
    let describe = |subscription| describe_subscription(subscription, next(subscription), now);
    sentences.extend(thread.subscriptions.iter().map(describe));
    sentences.extend(related.children.iter().map(|child| describe_child(child, now)));
    let others = thread.children.saturating_sub(related.children.len());
    if others > 0 {
        let more = if related.children.is_empty() { "" } else { "more " };
        let noun = if others == 1 { "child" } else { "children" };
        sentences.push(format!("{others} {more}open {noun}"));
    }
    if thread.held > 0 {
        let noun = if thread.held == 1 { "input" } else { "inputs" };
        sentences.push(format!("{} held {noun}", thread.held));
    }
    sentences
}

/// Returns a reason with a word before it that says whether the thread failed or is paused. Reasons that earlier versions
/// stored begin with the word.
pub fn with_status_prefix(status: Status, why: &str) -> String {
    let word = if status == Status::Failed { "failed: " } else { "paused: " };
    if why.starts_with(word) { why.to_owned() } else { format!("{word}{why}") }
}

/// Describes the turns, tokens and cost of a thread.
pub fn usage(thread: &Thread) -> String {
    let turns = if thread.turn == 1 { "1 turn".into() } else { format!("{} turns", grouped(thread.turn)) };
    format!("{turns}; {}", tokens(&thread.usage))
}

/// Describes tokens and their cost.
pub fn tokens(usage: &Usage) -> String {
    let cached =
        if usage.cached == 0 { String::new() } else { format!(" ({} cached)", grouped(usage.cached)) };
    let cost = usage.cost.map_or_else(|| "cost unknown".into(), |cost| format!("cost {cost}"));
    format!("{} tokens in{cached}, {} out; {cost}", grouped(usage.input), grouped(usage.output))
}

/// Formats a number with commas between groups of three digits.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns a status as shown to people.
pub fn label(status: Status) -> &'static str {
    match status {
        Status::NeedsYou => "needs you",
        other => other.as_str(),
    }
}

fn describe_status(thread: &Thread, questions: &[Question], now: Time) -> String {
    let since = short_duration(now.since(thread.updated_at));
    let why = thread.why.as_deref().unwrap_or("unknown reason");
    let resume = format!("rap threads resume {}", thread.id);
    match thread.status {
        Status::Closed => format!("closed {}", relative(thread.updated_at, now)),
        Status::Failed => match thread.retry_at {
            Some(at) => format!("failed: {why}; retries {}, or at once with: {resume}", exact(at, now)),
            None => format!("failed: {why}; resume with: {resume}"),
        },
        Status::Running => format!("running: model request of turn {} for {since}", thread.turn),
        Status::NeedsYou if questions.is_empty() => match thread.retry_at {
            Some(at) => format!("needs you: {why}; continues {}, or at once with: {resume}", exact(at, now)),
            None => format!("needs you: {why}; resume with: {resume}"),
        },
        Status::NeedsYou => "needs you:".into(),
        Status::Waiting => format!("waiting for {}", calls(thread.waiting_on.len())),
        Status::Idle if thread.waiting_on.is_empty() => {
            format!("idle for {since}; talk to it with: rap chat {}", thread.id)
        }
        Status::Idle => format!("idle for {since}; {} in the background", calls(thread.waiting_on.len())),
        Status::Unknown => "in a status that this version of rap does not know".into(),
    }
}

fn describe_question(question: &Question, now: Time) -> String {
    let Question { thread_id, call_id, tool, .. } = question;
    let when = relative(question.asked_at, now);
    match &question.kind {
        QuestionKind::Choice { prompt, choices, .. } => format!(
            "`{tool}` asked {when}: {prompt} {}; answer with: rap inbox answer {thread_id} {call_id} CHOICE",
            choices.join(", ")
        ),
        QuestionKind::SignIn { auth_url } => format!("`{tool}` asked {when} to sign in: open {auth_url}"),
        QuestionKind::Unknown => {
            format!("`{tool}` asked {when} something that this version of rap does not know")
        }
    }
}

/// Describes an open call. The built-in tools of the runtime have sentences of their own; no tool server can offer a tool
/// with their names.
fn describe_call(call: &OpenCall, now: Time) -> String {
    let (id, since) = (&call.call_id, short_duration(now.since(call.since)));
    match call.tool.as_str() {
        texts::SLEEP | texts::SLEEP_UNTIL => {
            format!("asleep for the last {since} ({id}); wakes {}, or on any input", ends(call, now))
        }
        texts::WAIT => format!("has waited {since} for any input ({id})"),
        tool if call.needs_approval => {
            format!(
                "`{tool}` ({id}) has waited {since} for your approval; refused automatically {}",
                ends(call, now)
            )
        }
        tool => {
            let shown = shown(call).map_or(String::new(), |shown| format!(", {shown},"));
            let until = call.until.map_or("no timeout".into(), |_| format!("times out {}", ends(call, now)));
            let problem = call
                .problem
                .as_ref()
                .map_or(String::new(), |problem| format!("; its last callback was {problem}"));
            let usual = usual(call.usually, call.overdue).map_or(String::new(), |usual| format!("; {usual}"));
            format!("waiting for `{tool}`{shown} ({id}) for {since}; {until}{usual}{problem}")
        }
    }
}

/// Describes an open call in a view that is updated every second.
pub fn call_progress(call: &OpenCall, now: Time) -> String {
    let (id, since) = (&call.call_id, long_duration(now.since(call.since)));
    match call.tool.as_str() {
        texts::SLEEP | texts::SLEEP_UNTIL => {
            format!("asleep for the last {since} ({id}); wakes {}", ends(call, now))
        }
        texts::WAIT => format!("has waited {since} for any input ({id})"),
        tool if call.needs_approval => format!("{tool} ({id}) has waited {since} for your approval"),
        tool => {
            let shown = shown(call).map_or(String::new(), |shown| format!(": {shown}"));
            format!("{tool} ({id}) has been running for {since}{shown}")
        }
    }
}

/// Describes the usual duration of a call, and says if it has taken far longer.
pub fn usual(usually: Option<UsualDuration>, overdue: bool) -> Option<String> {
    let UsualDuration { min_ms, max_ms } = usually?;
    let [min, max] = [min_ms, max_ms].map(|millis| precise_duration(Duration::from_millis(millis)));
    let takes = match () {
        () if min == max => format!("usually takes {max}"),
        () if min_ms == 0 => format!("usually takes up to {max}"),
        () => format!("usually takes {min} to {max}"),
    };
    Some(if overdue { format!("overdue: {takes}") } else { takes })
}

/// Display text that the tool provides for the call.
fn shown(call: &OpenCall) -> Option<String> {
    call.display.as_deref().map(one_line)
}

/// Time until a sleep ends or a call times out.
fn ends(call: &OpenCall, now: Time) -> String {
    match call.until {
        Some(until) if until > now => exact_relative(until, now),
        _ => "at any moment".into(),
    }
}

fn describe_subscription(subscription: &Subscription, next: Option<Time>, now: Time) -> String {
    let (id, since) = (&subscription.call_id, short_duration(now.since(subscription.since)));
    match (subscription.tool.as_str(), next) {
        (texts::SCHEDULE, Some(next)) => {
            let at = relative(next, now);
            format!("schedule ({id}) active for {since}; next wake {at}, at {}", next)
        }
        (texts::SCHEDULE, None) => format!("schedule ({id}) active for {since}"),
        (tool, _) => format!("subscribed to `{tool}` ({id}) for {since}"),
    }
}

fn describe_child(child: &Thread, now: Time) -> String {
    let title = child.title.as_ref().map_or(String::new(), |title| format!(" “{title}”"));
    let waiting_for = waiting_for(child, now);
    let waiting_for = if waiting_for.is_empty() { waiting_for } else { format!(": {waiting_for}") };
    format!("child {}{title} is {}{waiting_for}", child.id, label(child.status))
}

/// Lists what a thread waits for, in a few words for a table. A failed or paused thread gives its reason.
pub fn waiting_for(thread: &Thread, now: Time) -> String {
    if let Some(why) = &thread.why {
        return why.clone();
    }
    let call = |call: &OpenCall| match call.tool.as_str() {
        texts::SLEEP | texts::SLEEP_UNTIL => format!("sleep (wakes {})", ends(call, now)),
        texts::WAIT => "any input".into(),
        tool if call.needs_approval => format!("approval of {tool}"),
        tool => format!("{tool} for {}", short_duration(now.since(call.since))),
    };
    let subscription = |subscription: &Subscription| match subscription.tool.as_str() {
        texts::SCHEDULE => "schedule".into(),
        tool => format!("events of {tool}"),
    };
    let children = match thread.children {
        0 => None,
        1 => Some("1 child".into()),
        count => Some(format!("{count} children")),
    };
    let calls = thread.waiting_on.iter().map(call);
    let subscriptions = thread.subscriptions.iter().map(subscription);
    calls.chain(subscriptions).chain(children).collect::<Vec<_>>().join(", ")
}

fn calls(count: usize) -> String {
    if count == 1 { "1 call".into() } else { format!("{count} calls") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn now() -> Time {
        Time::from_millis(600_000)
    }

    fn thread(changes: Value) -> Thread {
        let mut thread = json!({
            "id": "t1", "parent": null, "root": "t1", "agent": "default", "title": null, "status": "idle", "why": null,
            "waiting_on": [], "subscriptions": [], "children": 0, "held": 0, "turn": 2,
            "usage": {"input": 0, "output": 0, "cached": 0},
            "created_at": "1970-01-01T00:00:00.000Z", "updated_at": "1970-01-01T00:06:00.000Z",
        });
        for (key, value) in changes.as_object().unwrap() {
            thread[key] = value.clone();
        }
        serde_json::from_value(thread).unwrap()
    }

    fn question(asked: Value) -> Question {
        let mut question = json!({"thread_id": "t1", "call_id": "call_2_1", "tool": "choose",
            "asked_at": "1970-01-01T00:09:30.000Z"});
        for (key, value) in asked.as_object().unwrap() {
            question[key] = value.clone();
        }
        serde_json::from_value(question).unwrap()
    }

    #[test]
    fn each_status_is_described() {
        let call = json!({"call_id": "call_2_1", "tool": "slow", "since": "1970-01-01T00:07:00.000Z"});
        let mut timed = call.clone();
        timed["until"] = json!("1970-01-01T02:10:00.000Z");
        let with = |usually: Value| {
            let mut call = call.clone();
            (call["usually"], call["overdue"]) = (usually, json!(false));
            call
        };
        let usual = with(json!({"min_ms": 60_000, "max_ms": 7_200_000}));
        let at_most = with(json!({"min_ms": 0, "max_ms": 7_200_000}));
        let mut overdue = with(json!({"min_ms": 5_000, "max_ms": 5_000}));
        overdue["overdue"] = json!(true);
        let table = [
            (json!({}), "idle for 4 min; talk to it with: rap chat t1"),
            (json!({"status": "closed"}), "closed 4 min ago"),
            (json!({"status": "running"}), "running: model request of turn 2 for 4 min"),
            (
                json!({"status": "waiting", "waiting_on": [call]}),
                "waiting for 1 call | waiting for `slow` (call_2_1) for 3 min; no timeout",
            ),
            (
                json!({"status": "waiting", "waiting_on": [timed]}),
                "waiting for 1 call | waiting for `slow` (call_2_1) for 3 min; times out in 2 h",
            ),
            (
                json!({"waiting_on": [call], "subscriptions": [call], "children": 1, "held": 2}),
                "idle for 4 min; 1 call in the background | waiting for `slow` (call_2_1) for 3 min; no timeout | \
                 subscribed to `slow` (call_2_1) for 3 min | 1 open child | 2 held inputs",
            ),
            (
                json!({"status": "failed", "why": "no model"}),
                "failed: no model; resume with: rap threads resume t1",
            ),
            (
                json!({"status": "waiting", "waiting_on": [usual]}),
                "waiting for 1 call | waiting for `slow` (call_2_1) for 3 min; no timeout; usually takes 1 min to 2 h",
            ),
            (
                json!({"status": "waiting", "waiting_on": [at_most]}),
                "waiting for 1 call | waiting for `slow` (call_2_1) for 3 min; no timeout; usually takes up to 2 h",
            ),
            (
                json!({"status": "waiting", "waiting_on": [overdue]}),
                "waiting for 1 call | waiting for `slow` (call_2_1) for 3 min; no timeout; overdue: usually takes 5.0 s",
            ),
            (
                json!({"status": "failed", "why": "no model", "retry_at": "1970-01-01T00:10:30.000Z"}),
                "failed: no model; retries in 30 s, at 00:10:30 UTC, or at once with: rap threads resume t1",
            ),
            (
                json!({"status": "needs_you", "why": "paused"}),
                "needs you: paused; resume with: rap threads resume t1",
            ),
        ];
        for (changes, expected) in table {
            assert_eq!(
                describe(&thread(changes.clone()), &Related::default(), now()).join(" | "),
                expected,
                "{changes}"
            );
        }
    }

    #[test]
    fn a_question_says_how_to_answer_it() {
        let choice =
            json!({"kind": "choice", "prompt": "Which colour?", "choices": ["red", "green"], "default": 1});
        let sign_in = json!({"kind": "oauth", "auth_url": "https://example.com/x"});
        let related = Related { questions: vec![question(choice), question(sign_in)], ..Related::default() };
        let sentences = describe(&thread(json!({"status": "needs_you"})), &related, now());
        let expected = [
            "needs you:",
            "`choose` asked 30 s ago: Which colour? red, green; \
             answer with: rap inbox answer t1 call_2_1 CHOICE",
            "`choose` asked 30 s ago to sign in: open https://example.com/x",
        ];
        assert_eq!(sentences, expected);
    }

    #[test]
    fn calls_of_built_in_tools_are_described() {
        let since = "1970-01-01T00:07:00.000Z";
        let sleep =
            json!({"call_id": "c1", "tool": "sleep", "since": since, "until": "1970-01-01T00:11:15.000Z"});
        let until = json!({"call_id": "c2", "tool": "sleep_until", "since": since, "until": since});
        let wait = json!({"call_id": "c3", "tool": "wait", "since": since});
        let schedule = json!({"call_id": "c4", "tool": "schedule", "since": since});
        let sleeper = thread(json!({"status": "waiting", "waiting_on": [sleep, until, wait],
            "subscriptions": [schedule], "children": 3}));
        let child =
            thread(json!({"id": "t2", "title": "Look it up", "status": "waiting", "waiting_on": [sleep]}));
        let related = Related {
            children: vec![child],
            timers: HashMap::from([("c4".to_owned(), Time::from_millis(660_000))]),
            ..Related::default()
        };
        let expected = [
            "waiting for 3 calls",
            "asleep for the last 3 min (c1); wakes in 1 min 15 s, or on any input",
            "asleep for the last 3 min (c2); wakes at any moment, or on any input",
            "has waited 3 min for any input (c3)",
            "schedule (c4) active for 3 min; next wake in 1 min, at 1970-01-01T00:11:00.000Z",
            "child t2 “Look it up” is waiting: sleep (wakes in 1 min 15 s)",
            "2 more open children",
        ];
        assert_eq!(describe(&sleeper, &related, now()), expected);
        assert_eq!(
            waiting_for(&sleeper, now()),
            "sleep (wakes in 1 min 15 s), sleep (wakes at any moment), any input, schedule, 3 children"
        );
        let live: Vec<String> = sleeper.waiting_on.iter().map(|call| call_progress(call, now())).collect();
        assert_eq!(
            live,
            [
                "asleep for the last 3 min (c1); wakes in 1 min 15 s",
                "asleep for the last 3 min (c2); wakes at any moment",
                "has waited 3 min for any input (c3)",
            ]
        );
    }
}
