//! Formats a step for the outcome column of a table: the phase, then the writes, then the effects.

use rap_agent::{
    Arguments, CallEntry, Effect, Entry, Head, Item, NewQuestion, PauseScope, Phase, Queue, Spawn, Step,
    ThreadMessage, Write, texts,
};
use rap_protocol::{Body, Timestamp};

use super::Names;

pub fn step(step: &Step, names: &mut Names) -> String {
    let mut parts = vec![phase(&step.head)];
    for shown in &step.writes {
        let text = write(shown, names);
        parts.push(names.show(&text));
    }
    for shown in &step.effects {
        let text = effect(shown, names);
        parts.push(names.show(&text));
    }
    parts.join("; ")
}

fn seconds(at: Timestamp) -> String {
    format!("{}s", at.0 / 1000)
}

fn phase(head: &Head) -> String {
    match head.phase() {
        Phase::Idle => "idle".to_owned(),
        Phase::Asking(_) => format!("asking {}", head.turn()),
        Phase::Waiting { .. } => "waiting".into(),
        Phase::Failed { retry_at: None, .. } => "failed".into(),
        Phase::Failed { retry_at: Some(at), .. } => format!("failed until {}", seconds(*at)),
        Phase::Paused(pause) => {
            let until = pause.until.map(|at| format!(" until {}", seconds(at))).unwrap_or_default();
            let scope = if pause.scope == PauseScope::Session { "session paused" } else { "paused" };
            format!("{scope}{until}")
        }
        Phase::Closed => "closed".into(),
    }
}

fn write(write: &Write, names: &mut Names) -> String {
    match write {
        Write::Append { entry, .. } => item(entry, names),
        Write::Hold { queue: Queue::UntilBatchCloses, entry, .. } => format!("hold {}", item(entry, names)),
        Write::Hold { queue: Queue::UntilIdle, entry, .. } => format!("queue {}", item(entry, names)),
        Write::Release { queue, count, .. } => format!("release {count} {queue:?}"),
        Write::Open(open) => format!("open {}", open.id),
        Write::Approve(open) => format!("approve {}", open.id),
        Write::Settle { call, state } => format!("settle {call} {state:?}"),
        Write::Question { number, call, question } => {
            let kind = match question {
                NewQuestion::SignIn(_) => "sign-in",
                NewQuestion::Choice(_) => "choice",
                NewQuestion::Approval(_) => "approval",
            };
            format!("{call} wants {kind} #{}", names.question(*number))
        }
        Write::Answer { number, selected } => format!("#{} is {selected}", names.question(*number)),
        Write::DropQuestions { call } => format!("drop questions of {call}"),
        Write::View { view_type, .. } => format!("view {view_type}"),
        Write::Timer { call, at: Some(at) } => format!("{call} at {}", seconds(*at)),
        Write::Timer { call, at: None } => format!("{call} never"),
        Write::RecordEventId { event, number, forget: 0, .. } => format!("mark {number} {event}"),
        Write::RecordEventId { event, number, forget, .. } => {
            format!("mark {number} {event}, forget up to {forget}")
        }
        Write::Backlog { call, entry, .. } => format!("backlog of {call} {}", item(entry, names)),
        Write::DropBacklog { call } => format!("drop backlog of {call}"),
        Write::Spawn(child) => spawn(child, names),
        Write::Send { to, message } => send(to.as_str(), message),
        Write::Spending(spending) => {
            let hour = spending.hour;
            format!("hour {}, {}, {}", hour.turns, hour.tokens, hour.wakes)
        }
    }
}

fn spawn(spawn: &Spawn, names: &mut Names) -> String {
    let backlog =
        spawn.backlog.iter().map(|range| format!("{} from the backlog of {}", range.count, range.call));
    let mut parts = vec![phase(&spawn.head)];
    parts.extend(backlog);
    for entry in &spawn.entries {
        let text = item(entry, names);
        parts.push(names.show(&text));
    }
    format!("spawn {} at {} ({})", spawn.id, spawn.at, parts.join(", "))
}

fn send(to: &str, message: &ThreadMessage) -> String {
    match message {
        ThreadMessage::Report { text, .. } => format!("report to {to}: {text}"),
        ThreadMessage::Text { text, .. } => format!("send to {to}: {text}"),
        ThreadMessage::Close => format!("send to {to}: close"),
        ThreadMessage::Resume => format!("send to {to}: resume"),
        ThreadMessage::ChildClosed => format!("send to {to}: child closed"),
        ThreadMessage::EventChildIdle => format!("send to {to}: child idle"),
        ThreadMessage::Notice { text } => format!("send to {to}: notice {text}"),
    }
}

fn item(entry: &Entry, names: &mut Names) -> String {
    match &entry.item {
        Item::User { text, from, .. } => format!("{from:?} {}", brief(text, names)).to_lowercase(),
        Item::Assistant { text, calls, .. } => {
            let calls: Vec<String> = calls.iter().map(call).collect();
            if calls.is_empty() {
                format!("assistant {text}")
            } else {
                format!("assistant {text}[{}]", calls.join(" "))
            }
        }
        Item::Result { call_id, content: Body::Text(text), .. } => {
            let text = match text.strip_prefix(texts::CHILD_INSTRUCTIONS_PREFIX) {
                Some(instructions) => format!("do {instructions}"),
                None => text.replace("\n\n", " "),
            };
            format!("{call_id}: {text}")
        }
        Item::Result { call_id, .. } => format!("{call_id}: …"),
        Item::Summary { text, covers } => {
            format!("summary to {covers}: {}", text.replace('\n', " ").replace("  ", " "))
        }
        Item::Notice { text } => format!("notice {}", brief(text, names)),
    }
}

fn call(call: &CallEntry) -> String {
    match &call.arguments {
        Arguments::Synthetic { kind, .. } => format!("{} {kind}", call.id),
        _ => call.id.to_string(),
    }
}

/// Truncates long texts that the runtime wrote.
fn brief(text: &str, names: &mut Names) -> String {
    let text = names.show(text);
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn effect(effect: &Effect, names: &mut Names) -> String {
    match effect {
        Effect::AskModel { turn, .. } => format!("ask {turn}"),
        Effect::Abandon { turn } => format!("abandon {turn}"),
        Effect::Invoke { call, .. } => format!("invoke {}", call.id),
        Effect::InvokeApproved { call, .. } => format!("invoke {call}"),
        Effect::NotifyCancel { call } => format!("notify cancel {call}"),
        Effect::NotifyClose { cancelled } => {
            let cancelled = cancelled.iter().map(|call| format!("; notify cancel {call}"));
            ["notify close".to_owned()].into_iter().chain(cancelled).collect()
        }
        Effect::Answer { number, .. } => format!("deliver #{}", names.question(*number)),
        Effect::Deliver => "deliver".into(),
    }
}
