//! What a sleeping agent waits on, in words: since when, until when, and what a person can do about it.

use std::collections::HashMap;

use rap_agent::words;
use rap_protocol::Timestamp;

use crate::age::{ago, counted, span};
use crate::api::{Asked, Question, Status, Subscription, Thread, Waiting};
use crate::table::one_line;

/// What is known around a thread, besides itself.
#[derive(Debug, Default)]
pub struct Around {
    /// What a person is asked.
    pub questions: Vec<Question>,
    /// Its children that are open, or as many of them as were asked for.
    pub children: Vec<Thread>,
    /// When its calls and schedules wake it.
    pub timers: HashMap<String, Timestamp>,
}

/// A sentence for each thing that the thread waits on; at least one.
pub fn sentences(thread: &Thread, around: &Around, now: Timestamp) -> Vec<String> {
    let mut told = vec![first(thread, &around.questions, now)];
    told.extend(around.questions.iter().map(|question| asked(question, now)));
    told.extend(thread.waiting_on.iter().map(|call| waits(call, now)));
    let next = |held: &Subscription| around.timers.get(&held.call_id).copied();
    told.extend(thread.subscriptions.iter().map(|held| subscribed(held, next(held), now)));
    told.extend(around.children.iter().map(|open| child(open, now)));
    let rest = thread.children.saturating_sub(around.children.len() as u64);
    if rest > 0 {
        let more = if around.children.is_empty() { "" } else { " more" };
        told.push(format!("{rest}{more} of its threads {} at work", are(rest)));
    }
    if thread.held > 0 {
        told.push(format!("{} to be taken up later", inputs(thread.held)));
    }
    told
}

fn first(thread: &Thread, questions: &[Question], now: Timestamp) -> String {
    let since = span(now.since(thread.updated_at));
    let why = thread.why.as_deref().unwrap_or("nobody said why");
    let resume = format!("rap threads resume {}", thread.id);
    match thread.status {
        Status::Closed => format!("closed {}", ago(thread.updated_at, now)),
        Status::Failed => match thread.retry_at {
            Some(at) => format!("failed: {why}; asks again {}, or at once with: {resume}", ago(at, now)),
            None => format!("failed: {why}; resume with: {resume}"),
        },
        Status::Running => format!("running: the model is being asked (turn {}) for {since}", thread.turn),
        Status::NeedsYou if questions.is_empty() => format!("needs you: {why}; resume with: {resume}"),
        Status::NeedsYou => "needs you:".into(),
        Status::Waiting => format!("waiting on {}", calls(thread.waiting_on.len())),
        Status::Idle if thread.waiting_on.is_empty() => {
            format!("idle for {since}; talk to it with: rap chat {}", thread.id)
        }
        Status::Idle => format!("idle for {since}, while {} on", go(thread.waiting_on.len())),
    }
}

fn asked(question: &Question, now: Timestamp) -> String {
    let Question { thread_id, call_id, tool, .. } = question;
    let when = ago(question.asked_at, now);
    match &question.asked {
        Asked::Choice { prompt, choices, .. } => format!(
            "`{tool}` asked {when}: {prompt} {}; answer with: rap inbox answer {thread_id} {call_id} CHOICE",
            choices.join(", ")
        ),
        Asked::SignIn { auth_url } => format!("`{tool}` asked {when} to sign in: open {auth_url}"),
    }
}

/// What a call waits on, since when and until when. The runtime's own calls have words of their own: no tool server
/// may use their names.
fn waits(call: &Waiting, now: Timestamp) -> String {
    let (id, since) = (&call.call_id, span(now.since(call.since)));
    match call.tool.as_str() {
        words::SLEEP | words::SLEEP_UNTIL => {
            format!("sleeps ({id}) for {since}; wakes {}, or when something happens", ends(call, now))
        }
        words::WAIT => format!("waits ({id}) for {since} until something happens"),
        tool => {
            let shown = shown(call).map_or(String::new(), |shown| format!(", {shown},"));
            let until = call.until.map_or("no time-out".into(), |_| format!("given up {}", ends(call, now)));
            format!("waits for `{tool}`{shown} ({id}) for {since}; {until}")
        }
    }
}

/// The same while somebody watches.
pub fn running(call: &Waiting, now: Timestamp) -> String {
    let (id, since) = (&call.call_id, counted(now.since(call.since)));
    match call.tool.as_str() {
        words::SLEEP | words::SLEEP_UNTIL => {
            format!("sleeps ({id}) for {since}; wakes {}", ends(call, now))
        }
        words::WAIT => format!("waits ({id}) for {since} until something happens"),
        tool => {
            let shown = shown(call).map_or(String::new(), |shown| format!(": {shown}"));
            format!("{tool} ({id}) has been running for {since}{shown}")
        }
    }
}

/// How its tool wants it to be shown.
fn shown(call: &Waiting) -> Option<String> {
    call.display.as_deref().map(one_line)
}

/// When a call ends by itself.
fn ends(call: &Waiting, now: Timestamp) -> String {
    match call.until {
        Some(until) if until > now => format!("in {}", counted(until.since(now))),
        _ => "any moment".into(),
    }
}

fn subscribed(held: &Subscription, next: Option<Timestamp>, now: Timestamp) -> String {
    let (id, since) = (&held.call_id, span(now.since(held.since)));
    match (held.tool.as_str(), next) {
        (words::SCHEDULE, Some(next)) => {
            let at = ago(next, now);
            format!("scheduled ({id}) for {since}; wakes next {at}, at {}", next.to_rfc3339())
        }
        (words::SCHEDULE, None) => format!("scheduled ({id}) for {since}"),
        (tool, _) => format!("subscribed to `{tool}` ({id}) for {since}"),
    }
}

/// A child, and what it waits on in turn.
fn child(child: &Thread, now: Timestamp) -> String {
    let title = child.title.as_ref().map_or(String::new(), |title| format!(" “{title}”"));
    let brief = brief(child, now);
    let brief = if brief.is_empty() { brief } else { format!(": {brief}") };
    format!("its thread {}{title} is {}{brief}", child.id, child.status.word())
}

/// The same in a few words, for a table.
pub fn brief(thread: &Thread, now: Timestamp) -> String {
    if let Some(why) = &thread.why {
        return why.clone();
    }
    let call = |call: &Waiting| match call.tool.as_str() {
        words::SLEEP | words::SLEEP_UNTIL => format!("sleeps, wakes {}", ends(call, now)),
        words::WAIT => "anything to happen".into(),
        tool => format!("{tool} for {}", span(now.since(call.since))),
    };
    let held = |held: &Subscription| match held.tool.as_str() {
        words::SCHEDULE => "its schedule".into(),
        tool => format!("events of {tool}"),
    };
    let children = match thread.children {
        0 => None,
        1 => Some("1 child".into()),
        count => Some(format!("{count} children")),
    };
    let (calls, held) = (thread.waiting_on.iter().map(call), thread.subscriptions.iter().map(held));
    calls.chain(held).chain(children).collect::<Vec<_>>().join(", ")
}

fn calls(count: usize) -> String {
    if count == 1 { "1 call".into() } else { format!("{count} calls") }
}

fn go(count: usize) -> String {
    if count == 1 { "1 call goes".into() } else { format!("{count} calls go") }
}

fn inputs(count: u64) -> String {
    if count == 1 { "1 input waits".into() } else { format!("{count} inputs wait") }
}

fn are(count: u64) -> &'static str {
    if count == 1 { "is" } else { "are" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const NOW: Timestamp = Timestamp(600_000);

    fn thread(changes: Value) -> Thread {
        let mut thread = json!({
            "id": "t1", "parent": null, "agent": "default", "title": null, "status": "idle", "why": null,
            "waiting_on": [], "subscriptions": [], "children": 0, "held": 0, "turn": 2,
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
    fn each_kind_of_waiting_has_its_words() {
        let call = json!({"call_id": "call_2_1", "tool": "slow", "since": "1970-01-01T00:07:00.000Z"});
        let mut timed = call.clone();
        timed["until"] = json!("1970-01-01T02:10:00.000Z");
        let table = [
            (json!({}), "idle for 4 min; talk to it with: rap chat t1"),
            (json!({"status": "closed"}), "closed 4 min ago"),
            (json!({"status": "running"}), "running: the model is being asked (turn 2) for 4 min"),
            (
                json!({"status": "waiting", "waiting_on": [call]}),
                "waiting on 1 call | waits for `slow` (call_2_1) for 3 min; no time-out",
            ),
            (
                json!({"status": "waiting", "waiting_on": [timed]}),
                "waiting on 1 call | waits for `slow` (call_2_1) for 3 min; given up in 2 h",
            ),
            (
                json!({"waiting_on": [call], "subscriptions": [call], "children": 1, "held": 2}),
                "idle for 4 min, while 1 call goes on | waits for `slow` (call_2_1) for 3 min; no time-out | \
                 subscribed to `slow` (call_2_1) for 3 min | 1 of its threads is at work | \
                 2 inputs wait to be taken up later",
            ),
            (
                json!({"status": "failed", "why": "no model"}),
                "failed: no model; resume with: rap threads resume t1",
            ),
            (
                json!({"status": "failed", "why": "no model", "retry_at": "1970-01-01T00:10:30.000Z"}),
                "failed: no model; asks again in 30 s, or at once with: rap threads resume t1",
            ),
            (
                json!({"status": "needs_you", "why": "paused"}),
                "needs you: paused; resume with: rap threads resume t1",
            ),
        ];
        for (changes, expected) in table {
            assert_eq!(
                sentences(&thread(changes.clone()), &Around::default(), NOW).join(" | "),
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
        let around = Around { questions: vec![question(choice), question(sign_in)], ..Around::default() };
        let told = sentences(&thread(json!({"status": "needs_you"})), &around, NOW);
        let expected = [
            "needs you:",
            "`choose` asked 30 s ago: Which colour? red, green; \
             answer with: rap inbox answer t1 call_2_1 CHOICE",
            "`choose` asked 30 s ago to sign in: open https://example.com/x",
        ];
        assert_eq!(told, expected);
    }
    #[test]
    fn what_the_runtime_itself_does_has_its_words() {
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
        let around = Around {
            children: vec![child],
            timers: HashMap::from([("c4".to_owned(), Timestamp(660_000))]),
            ..Around::default()
        };
        let expected = [
            "waiting on 3 calls",
            "sleeps (c1) for 3 min; wakes in 1 min 15 s, or when something happens",
            "sleeps (c2) for 3 min; wakes any moment, or when something happens",
            "waits (c3) for 3 min until something happens",
            "scheduled (c4) for 3 min; wakes next in 1 min, at 1970-01-01T00:11:00.000Z",
            "its thread t2 “Look it up” is waiting: sleeps, wakes in 1 min 15 s",
            "2 more of its threads are at work",
        ];
        assert_eq!(sentences(&sleeper, &around, NOW), expected);
        let brief = brief(&sleeper, NOW);
        assert_eq!(
            brief,
            "sleeps, wakes in 1 min 15 s, sleeps, wakes any moment, anything to happen, its schedule, 3 children"
        );
        let live: Vec<String> = sleeper.waiting_on.iter().map(|call| running(call, NOW)).collect();
        assert_eq!(
            live,
            [
                "sleeps (c1) for 3 min; wakes in 1 min 15 s",
                "sleeps (c2) for 3 min; wakes any moment",
                "waits (c3) for 3 min until something happens",
            ]
        );
    }
}
