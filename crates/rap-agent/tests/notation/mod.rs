//! Rules as tables. A line is `message -> what comes of it`, in a few words:
//!
//! ```text
//! said hi          -> asking 1; user hi; ask 1
//! answer: a b      -> waiting; assistant[a b]; open a; open b; invoke a; invoke b
//! returned a: 42   -> waiting; settle a Returned; a: 42
//! ```
//!
//! First the phase, then what is written, then what is to be done. What changes nothing is `ignored: why`.
//! Messages: `said TEXT[, interrupt|enqueue|reject]`, `answer[ of TURN][ TEXT]: CALLS`, `failed[ for good]`, `summarised[ of TURN]: TEXT`, `over budget`, `spent`,
//! `returned CALL: TEXT`, `subscribed CALL: TEXT`, `call failed CALL`, `timed out CALL`, `event CALL: TEXT[, child][,
//! final][, id ID]`, `sign in CALL`, `choice CALL NO`, `view CALL`, `chose CALL NO`, `dismissed CALL`, `interrupt`,
//! `cancel CALL`, `resume`, `close`, `due`, `child closed THREAD`, `child rests THREAD`, `report THREAD CALL: TEXT`, `told: TEXT`, `ticked CALL:
//! TEXT[, next SECONDS]`. `after SECONDS` only lets time pass.
//! Calls of an answer: `a` is sent to a server, `a=refuse` can not be carried out, `a=approve` is sent if somebody allows it, `a=odd` has no arguments, `?` has no
//! usable id. The built-in tools: `a=cancel(CALL)`, `a=spawn(TEXT)`, `a=report(TEXT)`, `a=close`, `a=close(TEXT)`,
//! `a=tell(THREAD)`, `a=sleep(SECOND)`, `a=wait`, `a=schedule(SECOND)`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rap_agent::{
    Again, Amounts, Answer, Arguments, Birth, Budgets, BuiltIn, CallState, Choice, Effect, Entry, Event,
    Head, Ignored, Item, Letter, Limits, Message, NewQuestion, OnBusy, Outcome, PastCall, Phase, Plan,
    PlannedCall, Queue, Server, Step, Usage, Write, step, words,
};
use rap_protocol::{AuthUrl, Body, CallId, EventId, ResponseUrl, ThreadId, Timestamp};
use serde_json::{Map, Value};

/// Bounds that a table can reach.
pub fn narrow() -> Limits {
    Limits {
        subscriptions: 2,
        open_calls: 3,
        held: 2,
        held_bytes: 1 << 20,
        questions: 2,
        children: 1,
        event_children: 1,
        depth: 1,
        views: 64,
        turns_per_wake: 3,
        hold_max: Duration::from_secs(60),
        call_timeout: Some(Duration::from_secs(100)),
        approval_within: Duration::from_secs(24 * 3600),
        failed_retry_for: Duration::from_secs(3600),
        budgets: Budgets::default(),
    }
}

/// A thread, and what a store would know of it.
#[derive(Clone)]
pub struct Thread {
    pub head: Head,
    limits: Limits,
    now: Timestamp,
    calls: BTreeMap<CallId, PastCall>,
    marks: BTreeSet<(CallId, EventId)>,
    children: u32,
}

/// Plays a table line by line.
pub fn check(table: &str) {
    check_with(narrow(), table);
}

pub fn check_with(limits: Limits, table: &str) {
    let mut thread = Thread::new(limits);
    compare(table, |message| thread.take(message));
}

/// Plays a table in a child that was made for an event of its parent's subscription `s`.
pub fn check_child(table: &str) {
    let way = ["said hi", "answer: s", "subscribed s: ok", "answer done:"];
    check_child_of(&way, "event s: ding, child", table);
}

/// Plays a table in a child that was spawned by call `p`.
pub fn check_spawned(table: &str) {
    check_child_of(&["said hi"], "answer: p=spawn(dig)", table);
}

fn check_child_of(way: &[&str], birth: &str, table: &str) {
    let mut parent = Thread::new(narrow());
    for message in way {
        parent.take(message);
    }
    let mut child = parent.bear(birth);
    compare(table, |message| child.take(message));
}

/// Brings a thread into a state, then tries each line of the table from there.
pub fn from(way: &[&str], table: &str) {
    let mut thread = Thread::new(narrow());
    for message in way {
        let outcome = thread.take(message);
        assert!(!outcome.starts_with("ignored"), "{message} -> {outcome}");
    }
    compare(table, |message| thread.clone().take(message));
}

/// Plays a table of what each message spends: `turns, tokens, wakes`, and behind a `+` the same for each child.
pub fn check_spending(table: &str) {
    let mut thread = Thread::new(Limits { event_children: 2, children: 2, ..narrow() });
    compare(table, |message| thread.spend(message));
}

fn compare(table: &str, mut take: impl FnMut(&str) -> String) {
    let mut differs = false;
    let mut real = String::new();
    for line in table.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (message, expected) = line.split_once("->").unwrap_or((line, ""));
        let outcome = take(message.trim());
        differs |= outcome != expected.trim();
        real.push_str(&format!("        {:<26} -> {outcome}\n", message.trim()));
    }
    assert!(!differs, "expected:\n{table}\nreally:\n{real}");
}

impl Thread {
    pub fn new(limits: Limits) -> Thread {
        Thread {
            head: Head::new(),
            limits,
            now: Timestamp(0),
            calls: BTreeMap::new(),
            marks: BTreeSet::new(),
            children: 0,
        }
    }

    pub fn take(&mut self, line: &str) -> String {
        if let Some(seconds) = line.strip_prefix("after ") {
            let seconds = seconds.trim_end_matches('s').parse().expect("seconds");
            self.now = self.now.plus(Duration::from_secs(seconds));
            return "time passes".into();
        }
        let message = self.message(line);
        match self.step(message) {
            Ok(step) => show(&step),
            Err(why) => format!("ignored: {why:?}").replace('"', ""),
        }
    }

    /// The child that is born of a message.
    pub fn bear(&mut self, line: &str) -> Thread {
        let step = self.step(self.message(line)).expect("a child is born");
        let head = step.writes.iter().find_map(|write| match write {
            Write::Born { head, .. } => Some((**head).clone()),
            _ => None,
        });
        Thread { head: head.expect("a child"), ..Thread::new(narrow()) }
    }

    fn spend(&mut self, line: &str) -> String {
        if line.starts_with("after ") {
            return self.take(line);
        }
        let (before, message) = (self.head.clone(), self.message(line));
        let spent = match self.step(message) {
            Ok(step) => Amounts::of(&before, &step),
            Err(_) => vec![Amounts::default()],
        };
        let show = |Amounts { turns, tokens, wakes }: &Amounts| format!("{turns}, {tokens}, {wakes}");
        spent.iter().map(show).collect::<Vec<_>>().join(" + ")
    }

    pub fn step(&mut self, message: Message) -> Result<Step, Ignored> {
        let step = step(self.head.clone(), message, self.now, &self.limits)?;
        self.head = step.head.clone();
        for write in &step.writes {
            match write {
                Write::Open(open) => {
                    let past = PastCall { name: open.name.clone(), seq: open.seq, state: CallState::Open };
                    self.calls.insert(open.id.clone(), past);
                }
                Write::Settle { call, state } => {
                    self.calls.get_mut(call).expect("a call that was made").state = *state;
                }
                Write::Seen { call, event } => {
                    self.marks.insert((call.clone(), event.clone()));
                }
                Write::Born { .. } => self.children += 1,
                _ => {}
            }
        }
        Ok(step)
    }

    fn message(&self, line: &str) -> Message {
        let (words, text) = match line.split_once(':') {
            Some((words, text)) => (words, text.trim()),
            None => (line, ""),
        };
        let words: Vec<&str> = words.split_whitespace().collect();
        match words.as_slice() {
            ["said", ..] => said(line.trim_start_matches("said ")),
            ["answer", "of", turn, said @ ..] => self.answer(turn.parse().expect("a turn"), said, text),
            ["answer", said @ ..] => self.answer(self.head.turn, said, text),
            ["failed", rest @ ..] => Message::TurnFailed {
                turn: self.head.turn,
                why: "503".into(),
                again: if rest.is_empty() { Again::Later } else { Again::No },
            },
            ["summarised", "of", turn] => summarised(turn.parse().expect("a turn"), text),
            ["summarised"] => summarised(self.head.turn, text),
            ["over", "budget"] => Message::OverBudget { turn: self.head.turn, why: "enough".into() },
            ["spent"] => Message::Spent(Usage { input: 3, output: 1, cached: 0 }),
            ["returned", call] => self.returned(call, text, false),
            ["subscribed", call] => self.returned(call, text, true),
            ["call", "failed", call] => Message::CallFailed { call: id(call), text: "Error: refused".into() },
            ["timed", "out", call] => Message::TimedOut { call: id(call) },
            ["event", call] => self.happened(call, text),
            ["sign", "in", call] => Message::WantsSignIn {
                call: id(call),
                url: AuthUrl::new("https://example.com/in").expect("a URL"),
            },
            ["choice", call, no] => {
                Message::WantsChoice { call: id(call), choice: choice(no.parse().expect("a number")) }
            }
            ["view", call] => {
                Message::Viewed { call: id(call), view_type: "progress".into(), content: Value::from(1) }
            }
            ["chose", call, no] => {
                Message::Chose { call: id(call), selected: Some(no.parse().expect("a number")) }
            }
            ["dismissed", call] => Message::Chose { call: id(call), selected: None },
            ["interrupt"] => Message::Interrupt,
            ["cancel", call] => Message::Cancel { call: id(call) },
            ["resume"] => Message::Resume,
            ["close"] => Message::Close,
            ["due"] => Message::Due,
            ["child", "closed", child] => {
                Message::ChildClosed { child: thread_id(child), birth: Some(birth(self.children + 1)) }
            }
            ["child", "rests", child] => {
                Message::ChildRests { child: thread_id(child), birth: Some(birth(self.children + 1)) }
            }
            ["report", child, call] => Message::Reported {
                child: thread_id(child),
                call: id(call),
                tool: words::SPAWN_THREAD.into(),
                text: text.into(),
            },
            ["told"] => Message::Told { text: text.into() },
            ["ticked", call] => {
                let (text, next) = text.split_once(", next ").unwrap_or((text, ""));
                Message::Ticked { call: id(call), text: text.into(), next: second(next) }
            }
            _ => panic!("no such message: {line}"),
        }
    }

    fn answer(&self, turn: u64, said: &[&str], calls: &str) -> Message {
        let calls = calls.split_whitespace().map(|call| planned(call, self.children + 1)).collect();
        Message::TurnEnded { turn, answer: Answer { text: said.join(" "), calls, ..Answer::default() } }
    }

    fn returned(&self, call: &str, text: &str, subscription: bool) -> Message {
        let result = Outcome { content: Body::Text(text.into()), display: Vec::new(), subscription };
        Message::Returned { call: id(call), result, past: self.calls.get(&id(call)).cloned() }
    }

    fn happened(&self, call: &str, text: &str) -> Message {
        let call = id(call);
        let mut words = text.split(", ");
        let text = words.next().unwrap_or_default().to_owned();
        let flags: Vec<&str> = words.collect();
        let event = flags.iter().find_map(|flag| flag.strip_prefix("id "));
        let event = event.map(|id| EventId::new(id).expect("an id"));
        let associative = !flags.contains(&"child");
        let birth = (!associative).then(|| birth(self.children + 1));
        let seen = event.clone().is_some_and(|event| self.marks.contains(&(call.clone(), event)));
        let past = self.calls.get(&call).cloned();
        let is_final = flags.contains(&"final");
        Message::Happened { call, event: Event { id: event, text, associative, is_final }, past, seen, birth }
    }
}

pub fn id(text: &str) -> CallId {
    CallId::new(text).expect("an id")
}

fn said(words: &str) -> Message {
    let (text, on_busy) = match words.rsplit_once(", ") {
        Some((text, "interrupt")) => (text, OnBusy::Interrupt),
        Some((text, "enqueue")) => (text, OnBusy::Enqueue),
        Some((text, "reject")) => (text, OnBusy::Reject),
        _ => (words, OnBusy::Join),
    };
    Message::Said { text: text.into(), on_busy }
}

fn summarised(turn: u64, text: &str) -> Message {
    Message::Summarised { turn, text: text.into(), usage: Usage { input: 3, output: 1, cached: 0 } }
}

fn thread_id(text: &str) -> ThreadId {
    ThreadId::new(text).expect("an id")
}

fn second(text: &str) -> Option<Timestamp> {
    text.parse::<i64>().ok().map(|second| Timestamp(second * 1000))
}

fn birth(child: u32) -> Birth {
    Birth { parent: thread_id("t0"), depth: 1, child: thread_id(&format!("t{child}")), arguments: Map::new() }
}

fn planned(call: &str, child: u32) -> PlannedCall {
    let (own, plan) = call.split_once('=').unwrap_or((call, ""));
    let (tool, with) = plan.trim_end_matches(')').split_once('(').unwrap_or((plan, ""));
    let mut arguments = Arguments::Given(Map::new());
    let plan = match tool {
        "" => Plan::Invoke(Server("https://tools.example".into())),
        "refuse" => Plan::Refuse("Error: no such tool".into()),
        "approve" => {
            let server = Server("https://tools.example".into());
            Plan::Approve { server, prompt: "Really?".into() }
        }
        "odd" => {
            arguments = Arguments::Unusable("{".into());
            Plan::Invoke(Server("https://tools.example".into()))
        }
        tool => Plan::BuiltIn(built_in(tool, with, child)),
    };
    let id = (own != "?").then(|| id(own));
    PlannedCall { id, call_id: None, name: "look".into(), arguments, display: None, plan }
}

fn built_in(tool: &str, with: &str, child: u32) -> BuiltIn {
    let at = || second(with).expect("a second");
    match tool {
        "cancel" => BuiltIn::CancelSubscription { tool_call_id: with.into() },
        "spawn" => BuiltIn::SpawnThread { instructions: with.into(), birth: birth(child) },
        "report" => BuiltIn::ReportToParent { report: with.into() },
        "close" => BuiltIn::CloseThread { report: Some(with.to_owned()).filter(|with| !with.is_empty()) },
        "tell" => BuiltIn::SendMessageToChild { thread_id: with.into(), message: "psst".into() },
        "sleep" => BuiltIn::Sleep { until: at() },
        "wait" => BuiltIn::Wait,
        "schedule" => BuiltIn::Schedule { next: at(), confirmation: "scheduled".into() },
        _ => panic!("no such tool: {tool}"),
    }
}

fn choice(no: u64) -> Choice {
    Choice {
        prompt: "Which?".into(),
        choices: vec!["this".into(), "that".into()],
        default: 1,
        response_url: ResponseUrl::new(format!("https://example.com/{no}")).expect("a URL"),
        digest: no,
    }
}

fn show(step: &Step) -> String {
    let head = &step.head;
    let phase = match &head.phase {
        Phase::Idle => "idle".to_owned(),
        Phase::Asking { .. } => format!("asking {}", head.turn),
        Phase::Waiting => "waiting".into(),
        Phase::Failed { retry_at: None, .. } => "failed".into(),
        Phase::Failed { retry_at: Some(at), .. } => format!("failed until {}s", at.0 / 1000),
        Phase::Paused { .. } => "paused".into(),
        Phase::Closed => "closed".into(),
    };
    let writes = step.writes.iter().map(write);
    let effects = step.effects.iter().map(effect);
    std::iter::once(phase).chain(writes).chain(effects).collect::<Vec<_>>().join("; ")
}

fn write(write: &Write) -> String {
    match write {
        Write::Append { entry, .. } => item(entry),
        Write::Hold { queue: Queue::Held, entry, .. } => format!("hold {}", item(entry)),
        Write::Hold { queue: Queue::Queued, entry, .. } => format!("queue {}", item(entry)),
        Write::Release { queue, count, .. } => format!("release {count} {queue:?}"),
        Write::Open(open) => format!("open {}", open.id),
        Write::Dispatch(open) => format!("dispatch {}", open.id),
        Write::Settle { call, state } => format!("settle {call} {state:?}"),
        Write::Ask { no, call, question: NewQuestion::SignIn(_) } => format!("{call} wants sign-in #{no}"),
        Write::Ask { no, call, question: NewQuestion::Choice(_) } => format!("{call} wants choice #{no}"),
        Write::Ask { no, call, question: NewQuestion::Approval(_) } => format!("{call} wants approval #{no}"),
        Write::Answer { no, selected } => format!("#{no} is {selected}"),
        Write::Forget { call } => format!("forget questions of {call}"),
        Write::View { view_type, .. } => format!("view {view_type}"),
        Write::Timer { call, at: Some(at) } => format!("{call} at {}s", at.0 / 1000),
        Write::Timer { call, at: None } => format!("{call} never"),
        Write::Seen { event, .. } => format!("mark {event}"),
        Write::Shelve { call, entry, .. } => format!("shelve of {call} {}", item(entry)),
        Write::Discard { call } => format!("discard what waits of {call}"),
        Write::Born { child, at, head, shelf, entries } => {
            let shelf = shelf.iter().map(|(call, count)| format!("{count} from the shelf of {call}"));
            let entries: Vec<String> = shelf.chain(entries.iter().map(item)).collect();
            let own = format!("asking {}, {}", head.turn, entries.join(", "));
            format!("born {child} at {at} ({own})")
        }
    }
}

fn item(entry: &Entry) -> String {
    match &entry.item {
        Item::User { text, from } => format!("{from:?} {}", brief(text)).to_lowercase(),
        Item::Assistant { text, calls, .. } => {
            let calls: Vec<String> = calls
                .iter()
                .map(|call| match &call.arguments {
                    Arguments::Echo { kind, .. } => format!("{} {kind}", call.id),
                    _ => match &call.call_id {
                        Some(own) => format!("{} for {own}", call.id),
                        None => call.id.to_string(),
                    },
                })
                .collect();
            if calls.is_empty() {
                format!("assistant {text}")
            } else {
                format!("assistant {text}[{}]", calls.join(" "))
            }
        }
        Item::Result { call_id, content: Body::Text(text), .. } => {
            let text = match text.strip_prefix(words::CHILD_OPENING) {
                Some(instructions) => format!("do {instructions}"),
                None => text.replace("\n\n", " "),
            };
            format!("{call_id}: {text}")
        }
        Item::Result { call_id, .. } => format!("{call_id}: …"),
        Item::Summary { text, covers } => {
            format!("summary to {covers}: {}", text.replace('\n', " ").replace("  ", " "))
        }
        Item::Notice { text } => format!("notice {}", brief(text)),
    }
}

/// Long texts of the runtime's own are cut.
fn brief(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

fn effect(effect: &Effect) -> String {
    match effect {
        Effect::Ask { turn, .. } => format!("ask {turn}"),
        Effect::Abandon { turn } => format!("abandon {turn}"),
        Effect::Invoke { call, .. } => format!("invoke {}", call.id),
        Effect::Dispatch { call } => format!("send {call}"),
        Effect::NotifyCancel { call } => format!("notify cancel {call}"),
        Effect::NotifyClose => "notify close".into(),
        Effect::Answer { no } => format!("deliver #{no}"),
        Effect::Tell { to, letter: Letter::Report { text, .. } } => format!("report to {to}: {text}"),
        Effect::Tell { to, letter: Letter::Say { text } } => format!("say to {to}: {text}"),
        Effect::Tell { to, letter } => format!("tell {to} {letter:?}"),
    }
}
