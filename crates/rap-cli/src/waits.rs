//! What a sleeping agent waits on, in words: since when, until when, and what a person can do about it.

use rap_protocol::Timestamp;

use crate::age::{ago, span};
use crate::api::{Asked, Question, Status, Subscription, Thread, Waiting};
use crate::table::one_line;

/// A sentence for each thing that the thread waits on; at least one.
pub fn sentences(thread: &Thread, questions: &[Question], now: Timestamp) -> Vec<String> {
    let mut told = vec![first(thread, questions, now)];
    told.extend(questions.iter().map(|question| asked(question, now)));
    told.extend(thread.waiting_on.iter().map(|call| waits(call, now)));
    told.extend(thread.subscriptions.iter().map(|held| subscribed(held, now)));
    if thread.children > 0 {
        told.push(format!("{} of its threads {} at work", thread.children, are(thread.children)));
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

fn waits(call: &Waiting, now: Timestamp) -> String {
    let until = match call.until {
        Some(until) => format!("given up {}", ago(until, now)),
        None => "no time-out".into(),
    };
    let shown = call.display.as_ref().map_or(String::new(), |display| format!(", {},", one_line(display)));
    format!(
        "waits for `{}`{shown} ({}) for {}; {until}",
        call.tool,
        call.call_id,
        span(now.since(call.since))
    )
}

fn subscribed(held: &Subscription, now: Timestamp) -> String {
    format!("subscribed to `{}` ({}) for {}", held.tool, held.call_id, span(now.since(held.since)))
}

/// The same in a few words, for a table.
pub fn brief(thread: &Thread, now: Timestamp) -> String {
    if let Some(why) = &thread.why {
        return why.clone();
    }
    let calls =
        thread.waiting_on.iter().map(|call| format!("{} for {}", call.tool, span(now.since(call.since))));
    let held = thread.subscriptions.iter().map(|held| format!("events of {}", held.tool));
    calls.chain(held).collect::<Vec<_>>().join(", ")
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
            assert_eq!(sentences(&thread(changes.clone()), &[], NOW).join(" | "), expected, "{changes}");
        }
    }

    #[test]
    fn a_question_says_how_to_answer_it() {
        let choice =
            json!({"kind": "choice", "prompt": "Which colour?", "choices": ["red", "green"], "default": 1});
        let sign_in = json!({"kind": "oauth", "auth_url": "https://example.com/x"});
        let told =
            sentences(&thread(json!({"status": "needs_you"})), &[question(choice), question(sign_in)], NOW);
        let expected = [
            "needs you:",
            "`choose` asked 30 s ago: Which colour? red, green; \
             answer with: rap inbox answer t1 call_2_1 CHOICE",
            "`choose` asked 30 s ago to sign in: open https://example.com/x",
        ];
        assert_eq!(told, expected);
    }
}
