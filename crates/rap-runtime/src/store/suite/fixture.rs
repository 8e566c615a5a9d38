//! Shared by the tests of the suite: a store with a manual clock, and constructors for inputs.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rap_agent::{
    Arguments, BuiltIn, Effect, Entry, Event, Head, Input, Item, Limits, LostAfter, OnBusy, Plan,
    PlannedCall, Seq, Server, ToolResult, TurnAnswer,
};
use rap_protocol::{Body, CallId, EventId, ThreadId, Timestamp};
use serde_json::{Map, json};

use super::Database;
use crate::store::{
    Committed, DuePage, DueWork, Error, HistoryPage, Message, MessageClass, NewThread, Receipt, SessionKey,
    StepSettings, Store, Target, Thread, ThreadKey, ThreadRow, Visibility, WorkKey, WorkKind, WorkQueue,
};
use crate::world::Clock;

/// The tool server of calls for which the server does not matter.
pub(crate) const SERVER: &str = "http://127.0.0.1:9";
/// The model server of all threads.
pub(crate) const MODEL: &str = "http://127.0.0.1:8";
/// Initial time of the clock.
pub(crate) const START: Timestamp = Timestamp(1_700_000_000_000);
/// Time after which calls and subscriptions are checked.
pub(crate) const LOST_AFTER: Duration = Duration::from_secs(900);

/// A clock that only the test advances.
pub(crate) struct ManualClock(AtomicI64);

impl ManualClock {
    pub(crate) fn new() -> ManualClock {
        ManualClock(AtomicI64::new(START.0))
    }

    pub(crate) fn pass(&self, time: Duration) {
        let millis = i64::try_from(time.as_millis()).expect("the duration fits into i64");
        self.0.fetch_add(millis, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::SeqCst))
    }
}

/// The committed steps, in order.
#[derive(Clone, Default)]
pub(crate) struct Commits(Arc<Mutex<Vec<Committed>>>);

impl Commits {
    fn all(&self) -> MutexGuard<'_, Vec<Committed>> {
        self.0.lock().expect("the lock is not poisoned")
    }

    pub(crate) fn push(&self, committed: Committed) {
        self.all().push(committed);
    }

    pub(crate) fn take(&self) -> Vec<Committed> {
        std::mem::take(&mut *self.all())
    }

    /// Takes the effects of all steps.
    pub(crate) fn take_effects(&self) -> Vec<(Arc<Thread>, Effect)> {
        let effects =
            |Committed { thread, step, .. }| step.effects.into_iter().map(move |e| (Arc::clone(&thread), e));
        self.take().into_iter().flat_map(effects).collect()
    }
}

pub(crate) struct Fixture {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) commits: Commits,
    pub(crate) database: Box<dyn Database>,
    limits: Limits,
}

/// Base of the callback URLs of new calls.
pub(crate) const CALLBACK_BASE: &str = "http://127.0.0.1:7420";
/// Destination that gets alerts about closed threads.
pub(crate) const ALERTS: &str = "hook";

pub(crate) fn rules(limits: Limits) -> StepSettings {
    StepSettings {
        limits,
        agent_limits: HashMap::new(),
        model_servers: HashMap::from([("default".to_owned(), MODEL.to_owned())]),
        lost_after: LostAfter(LOST_AFTER),
        alerts: vec![crate::store::AlertRule {
            destination: ALERTS.into(),
            on: vec![rap_agent::Attention::Closed],
        }],
        callback_base: CALLBACK_BASE.into(),
    }
}

impl Fixture {
    pub(crate) fn new(database: Box<dyn Database>) -> Fixture {
        Fixture::with(database, Limits::default())
    }

    pub(crate) fn with(database: Box<dyn Database>, limits: Limits) -> Fixture {
        let (clock, commits) = (Arc::new(ManualClock::new()), Commits::default());
        let store = open(&*database, rules(limits.clone()), &clock, &commits);
        Fixture { store, clock, commits, database, limits }
    }

    /// Closes and opens the store, as a restart does.
    pub(crate) async fn reopen(self) -> Fixture {
        self.reopen_at(CALLBACK_BASE).await
    }

    /// Does the same with another base of callback URLs.
    pub(crate) async fn reopen_at(self, callback_base: &str) -> Fixture {
        let Fixture { store, clock, commits, database, limits } = self;
        store.close().await;
        drop(store);
        commits.take();
        let rules = StepSettings { callback_base: callback_base.into(), ..rules(limits.clone()) };
        let store = open(&*database, rules, &clock, &commits);
        Fixture { store, clock, commits, database, limits }
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    pub(crate) async fn apply(&self, messages: Vec<Message>) -> Vec<Result<Receipt, Error>> {
        self.store.apply(MessageClass::OF_A_CLIENT, messages).await
    }

    pub(crate) async fn send(&self, message: Message) -> Result<Receipt, Error> {
        self.apply(vec![message]).await.pop().expect("one reply for each message")
    }

    pub(crate) async fn create(&self, thread: &str, text: Option<&str>) -> Receipt {
        self.send(new(thread, text)).await.unwrap()
    }

    /// Creates a thread and has the model answer its first message.
    pub(crate) async fn create_idle(&self, thread: &str) {
        self.create(thread, Some("hello")).await;
        self.send_input(thread, answer(1, "hello to you")).await.unwrap();
    }

    pub(crate) async fn send_input(&self, thread: &str, input: Input) -> Result<Receipt, Error> {
        self.send(to(thread, input)).await
    }

    /// Applies many inputs in few calls, because the queue of a sender is bounded. Fails if one of them is refused.
    pub(crate) async fn send_inputs(&self, inputs: Vec<(&str, Input)>) {
        const AT_ONCE: usize = 1000;
        let mut messages = inputs.into_iter().map(|(thread, input)| to(thread, input)).peekable();
        while messages.peek().is_some() {
            for result in self.apply(messages.by_ref().take(AT_ONCE).collect()).await {
                result.unwrap();
            }
        }
    }

    pub(crate) async fn row(&self, thread: &str) -> ThreadRow {
        self.store.thread(&id(thread), &Visibility::All).await.unwrap()
    }

    pub(crate) async fn key(&self, thread: &str) -> ThreadKey {
        self.row(thread).await.thread.key
    }

    pub(crate) async fn session(&self, thread: &str) -> SessionKey {
        self.row(thread).await.thread.session
    }

    pub(crate) async fn head(&self, thread: &str) -> Head {
        self.row(thread).await.head
    }

    /// Has the model answer with one call to each of these servers. Returns the calls.
    pub(crate) async fn call(&self, thread: &str, servers: &[&str]) -> Vec<CallId> {
        let turn = self.head(thread).await.turn();
        self.send_input(thread, calls(turn, servers)).await.unwrap();
        self.head(thread).await.batch().iter().map(|call| call.id.clone()).collect()
    }

    /// Gives an asking thread an active subscription. Afterwards the thread is idle.
    pub(crate) async fn subscribe(&self, thread: &str) -> CallId {
        let call = self.call(thread, &[SERVER]).await.remove(0);
        self.send_input(thread, subscribed(&call)).await.unwrap();
        let turn = self.head(thread).await.turn();
        self.send_input(thread, answer(turn, "I listen")).await.unwrap();
        call
    }

    /// Sends an event that spawns a child. Returns the child's id.
    pub(crate) async fn spawn(&self, thread: &str, call: &CallId, text: &str) -> String {
        self.commits.take();
        self.send_input(thread, event(call, text, None)).await.unwrap();
        let child = self.commits.take().pop().expect("a step").children.pop().expect("a child");
        child.id.as_str().to_owned()
    }

    pub(crate) async fn history(&self, thread: &str) -> Vec<(Seq, Entry)> {
        let row = self.row(thread).await;
        self.store.history(&row.thread, all(row.head.seq())).await.unwrap()
    }

    /// Returns the history as one text for each entry.
    pub(crate) async fn texts(&self, thread: &str) -> Vec<String> {
        self.history(thread).await.into_iter().map(|(_, entry)| entry_text(entry.item)).collect()
    }

    /// Returns all due work of a queue.
    pub(crate) async fn due(&self, kind: WorkKind, destination: &str) -> Vec<(SessionKey, WorkKey)> {
        self.page(kind, destination, self.due_page()).await.work
    }

    pub(crate) fn due_page(&self) -> DuePage {
        DuePage {
            now: self.now(),
            after: None,
            sessions: 1000,
            per_session: 1000,
            skip: std::collections::HashSet::new(),
        }
    }

    pub(crate) async fn page(&self, kind: WorkKind, destination: &str, page: DuePage) -> DueWork {
        let queue = WorkQueue { kind, destination: destination.to_owned() };
        self.store.due_work(&queue, page).await.unwrap()
    }
}

fn open(
    database: &dyn Database,
    rules: StepSettings,
    clock: &Arc<ManualClock>,
    commits: &Commits,
) -> Arc<dyn Store> {
    let commits = commits.clone();
    let on_commit = Box::new(move |committed| commits.push(committed));
    let clock: Arc<dyn Clock> = Arc::<ManualClock>::clone(clock);
    database.open(rules, clock, on_commit)
}

pub(crate) fn id(text: &str) -> ThreadId {
    ThreadId::new(text).unwrap()
}

pub(crate) fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A new root. Its incarnation is derived from its name.
pub(crate) fn new_thread(thread: &str) -> NewThread {
    let mut hasher = DefaultHasher::new();
    thread.hash(&mut hasher);
    NewThread {
        id: id(thread),
        incarnation: hasher.finish(),
        agent: "default".into(),
        user_id: None,
        title: None,
    }
}

pub(crate) fn new(thread: &str, text: Option<&str>) -> Message {
    Message::new(Target::New(new_thread(thread)), Input::Begin { message: text.map(Into::into) })
}

pub(crate) fn to(thread: &str, input: Input) -> Message {
    Message::new(Target::Id(id(thread)), input)
}

pub(crate) fn all(up_to: Seq) -> HistoryPage {
    HistoryPage { after: 0, up_to, rows: usize::MAX, bytes: usize::MAX }
}

pub(crate) fn user(text: &str) -> Input {
    Input::UserMessage { message: text.into(), on_busy: OnBusy::Join }
}

pub(crate) fn enqueued(text: &str) -> Input {
    Input::UserMessage { message: text.into(), on_busy: OnBusy::Enqueue }
}

pub(crate) fn rejecting(text: &str) -> Input {
    Input::UserMessage { message: text.into(), on_busy: OnBusy::Reject }
}

pub(crate) fn answer(turn: u64, text: &str) -> Input {
    Input::TurnEnded { turn, answer: TurnAnswer { text: text.into(), ..TurnAnswer::default() } }
}

fn planned(at: usize, name: &str, plan: Plan) -> PlannedCall {
    PlannedCall {
        model_id: Some(CallId::new(format!("model_{at}")).unwrap()),
        name: name.into(),
        arguments: Arguments::Given(Map::from_iter([("at".into(), json!(at))])),
        display: None,
        plan,
    }
}

pub(crate) fn plans(turn: u64, name: &str, plans: Vec<Plan>) -> Input {
    let calls = plans.into_iter().enumerate().map(|(at, plan)| planned(at, name, plan)).collect();
    Input::TurnEnded { turn, answer: TurnAnswer { calls, ..TurnAnswer::default() } }
}

/// An answer with one call to each of these servers.
pub(crate) fn calls(turn: u64, servers: &[&str]) -> Input {
    let invoke = |server: &&str| Plan::Invoke(Server((*server).into()));
    plans(turn, "tool", servers.iter().map(invoke).collect())
}

/// An answer with calls of the runtime's own tools.
pub(crate) fn built_in(turn: u64, tools: Vec<BuiltIn>) -> Input {
    plans(turn, "built_in", tools.into_iter().map(Plan::BuiltIn).collect())
}

pub(crate) fn spawns(turn: u64, count: usize) -> Input {
    built_in(turn, vec![BuiltIn::SpawnThread { instructions: "work".into() }; count])
}

pub(crate) fn result(call: &CallId, text: &str) -> Input {
    Input::ToolResult { call: call.clone(), result: ToolResult::text(text) }
}

pub(crate) fn subscribed(call: &CallId) -> Input {
    let result = ToolResult { subscription: true, ..ToolResult::text("subscribed") };
    Input::ToolResult { call: call.clone(), result }
}

/// An event that goes to a child.
pub(crate) fn event(call: &CallId, text: &str, event: Option<&str>) -> Input {
    let id = event.map(|event| EventId::new(event).unwrap());
    let event = Event { id, text: text.into(), associative: false, is_final: false };
    Input::Event { call: call.clone(), event }
}

/// An event that goes into the thread itself.
pub(crate) fn inline_event(call: &CallId, text: &str, event: Option<&str>) -> Input {
    let id = event.map(|event| EventId::new(event).unwrap());
    let event = Event { id, text: text.into(), associative: true, is_final: false };
    Input::Event { call: call.clone(), event }
}

pub(crate) fn entry_text(item: Item) -> String {
    match item {
        Item::User { text, .. } if text.starts_with("You are a thread of your own") => "spawned".into(),
        Item::User { text, .. } | Item::Notice { text } | Item::Summary { text, .. } => text,
        Item::Assistant { text, calls, .. } if calls.is_empty() => text,
        Item::Assistant { calls, .. } if calls.iter().any(|call| call.arguments.is_synthetic()) => {
            "synthetic".into()
        }
        Item::Assistant { calls, .. } => format!("{} calls", calls.len()),
        Item::Result { content: Body::Text(text), .. } => text,
        Item::Result { .. } => "content".into(),
    }
}
