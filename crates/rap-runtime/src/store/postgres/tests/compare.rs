//! The same random messages give the same state on SQLite and on Postgres, and steps of a session touch no other session.

use std::collections::{BTreeMap, BTreeSet};

use rap_agent::{
    Bounds, Budgets, BuiltIn, Choice, Event, Head, Input, OnBusy, Plan, Server, ToolResult, TurnRetry,
};
use rap_protocol::{AuthUrl, EventId, ResponseUrl};
use rap_testkit::Rng;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::mpsc;

use super::*;
use crate::store::suite::fixture::{plans, rejecting, seconds, user};
use crate::store::transfer::Origin;
use crate::store::{Source, SqliteStore, StoredToolset, Target};

/// Number of random actions of a run, and of those between two comparisons.
const ACTIONS: usize = 240;
const COMPARE_EVERY: usize = 40;

/// A SQLite database in a directory of its own.
struct Sqlite(TempDir);

impl Database for Sqlite {
    fn open(&self, rules: StepSettings, clock: Arc<dyn Clock>, on_commit: OnCommit) -> Arc<dyn Store> {
        Arc::new(SqliteStore::open(&self.0.path().join("rap.db"), key(), rules, clock, on_commit).unwrap())
    }

    fn corrupt_head(&self, thread: &ThreadId) {
        panic!("{thread} stays as it is");
    }

    fn execute(&self, sqlite: &str, _: &str) {
        panic!("nothing runs {sqlite}");
    }

    fn setting(&self) -> crate::settings::Database {
        crate::settings::Database::File(self.0.path().join("rap.db"))
    }
}

/// Limits that random messages reach.
fn limits() -> Limits {
    let bounds = |turns, wakes| Bounds { turns: Some(turns), wakes: Some(wakes), ..Bounds::default() };
    Limits {
        budgets: Budgets { per_hour: bounds(60, 40), in_total: bounds(100_000, 100_000) },
        event_children: 1,
        events_per_child: 2,
        event_ids: 2,
        views: 1,
        held: 6,
        ..Limits::default()
    }
}

/// The same store on both databases.
struct Twins {
    sqlite: Fixture,
    postgres: Fixture,
    rng: Rng,
    roots: Vec<String>,
    threads: Vec<String>,
    /// Number of the last idempotency key.
    keys: u8,
    /// Calls of each thread, which may have returned.
    calls: BTreeMap<String, Vec<CallId>>,
}

impl Twins {
    fn new(postgres: Box<dyn Database>, seed: u64) -> Twins {
        let sqlite = Fixture::with(Box::new(Sqlite(tempfile::tempdir().unwrap())), limits());
        let postgres = Fixture::with(postgres, limits());
        Twins {
            sqlite,
            postgres,
            rng: Rng(seed),
            roots: Vec::new(),
            threads: Vec::new(),
            keys: 0,
            calls: BTreeMap::new(),
        }
    }

    fn both(&self) -> [&Fixture; 2] {
        [&self.sqlite, &self.postgres]
    }

    /// Applies messages to both stores, and compares the replies.
    async fn apply(&mut self, messages: impl AsyncFn(&Fixture) -> Vec<Message>) {
        let mut replies = Vec::new();
        for fixture in self.both() {
            let messages = messages(fixture).await;
            replies.push(format!("{:?}", fixture.apply(messages).await));
        }
        assert_eq!(replies[0], replies[1]);
        self.postgres.commits.take();
        for committed in self.sqlite.commits.take() {
            self.threads.extend(committed.children.iter().map(|child| child.id.as_str().to_owned()));
        }
    }

    async fn send(&mut self, message: Message) {
        self.apply(async |_| vec![message.clone()]).await;
    }

    /// Creates a root thread, whose first call a person approves.
    async fn create(&mut self, root: &str) {
        self.send(new(root, Some("hello"))).await;
        self.roots.push(root.to_owned());
        self.threads.push(root.to_owned());
        let approve = Plan::Approve { server: Server(SERVER.into()), prompt: "May I?".into() };
        self.send(to(root, plans(1, "tool", vec![approve]))).await;
        let call = self.sqlite.head(root).await.batch()[0].id.clone();
        self.send(to(root, Input::Choose { call, selected: Some(0) })).await;
    }

    /// Closes the root threads, which causes alerts.
    async fn close(&mut self) {
        for root in self.roots.clone() {
            self.send(to(&root, Input::Close)).await;
            self.deliver().await;
        }
        self.compare().await;
    }

    /// Carries out random actions.
    async fn act(&mut self, actions: usize) {
        for action in 1..=actions {
            match self.rng.below(20) {
                0 => {
                    let time = seconds(*self.rng.pick(&[1, 30, 60, 3600]));
                    self.both().iter().for_each(|fixture| fixture.clock.pass(time));
                }
                1..=3 => self.deliver().await,
                4..=5 => self.fire().await,
                6 => self.repeat().await,
                7 => self.send_many().await,
                8 => self.refresh_toolset().await,
                _ => {
                    let thread = self.rng.pick(&self.threads).clone();
                    let input = self.input(&thread).await;
                    self.send(to(&thread, input)).await;
                }
            }
            if action % COMPARE_EVERY == 0 {
                self.compare().await;
            }
        }
    }

    /// Delivers the messages between threads.
    async fn deliver(&mut self) {
        let message = |OutboxMessage { key, sender, receiver, message, .. }| Message {
            outbox: Some(key),
            ..Message::new(Target::Id(receiver), Input::FromThread { sender, message })
        };
        self.apply(async |fixture| {
            let due = fixture.store.due_messages(fixture.now(), &[], 100).await.unwrap();
            due.into_iter().map(message).collect()
        })
        .await;
    }

    /// Fires the timers that are due.
    async fn fire(&mut self) {
        let threads = self.threads.clone();
        self.apply(async |fixture| {
            let due = fixture.store.due_timers(fixture.now(), Timestamp(i64::MIN), &[], 100).await.unwrap();
            let names = names(fixture, &threads).await;
            let mut messages: Vec<(String, Message)> = Vec::new();
            for Timer { thread, call, .. } in due {
                let input = call.map_or(Input::Due, |call| Input::TimerFired { call });
                let name = &names[&thread];
                messages.push((format!("{name} {input:?}"), to(name, input)));
            }
            messages.sort_by(|(one, _), (other, _)| one.cmp(other));
            messages.into_iter().map(|(_, message)| message).collect()
        })
        .await;
    }

    /// Sends a request with an idempotency key, which may have been used before.
    async fn repeat(&mut self) {
        if self.rng.below(2) == 0 {
            self.keys += 1;
        }
        let request = [self.rng.below(4).min(1) as u8; 32];
        let idempotency_key = Some(IdempotencyKey { key: [self.keys; 32], former_key: None, request });
        let thread = self.rng.pick(&self.threads).clone();
        self.send(Message { idempotency_key, ..to(&thread, enqueued("again")) }).await;
    }

    /// Sends several messages at once.
    async fn send_many(&mut self) {
        let mut messages = Vec::new();
        for _ in 0..=self.rng.below(6) {
            let thread = self.rng.pick(&self.threads).clone();
            let input = self.input(&thread).await;
            messages.push(to(&thread, input));
        }
        self.apply(async |_| messages.clone()).await;
    }

    /// A call fails because the toolset of its session is out of date.
    async fn refresh_toolset(&mut self) {
        let thread = self.rng.pick(&self.threads).clone();
        let source = if self.rng.below(2) == 0 { Source::Fetched } else { Source::StandIn };
        let body = format!("toolset {}", self.rng.below(3)).into_bytes();
        let hash: String = body.iter().map(|byte| format!("{byte:02x}")).collect();
        let head = self.sqlite.head(&thread).await;
        let Some(call) = head.open_calls().next().map(|call| call.id.clone()) else { return };
        let failed = Input::CallFailed { call, text: "Error: the tools changed".into() };
        self.apply(async |fixture| {
            let toolset = SessionToolset {
                session: fixture.session(&thread).await,
                server: SERVER.into(),
                toolset: Some(StoredToolset { hash: hash.clone(), body: Some(Arc::new(body.clone())) }),
                error: None,
                fetched_at: fixture.now(),
                source,
            };
            vec![Message { toolset: Some(toolset), ..to(&thread, failed.clone()) }]
        })
        .await;
    }

    /// Returns a random input that probably fits a thread.
    async fn input(&mut self, thread: &str) -> Input {
        let head = self.sqlite.head(thread).await;
        let open: Vec<CallId> = head.open_calls().map(|call| call.id.clone()).collect();
        let subscribed: Vec<CallId> = head.subscriptions().iter().map(|active| active.id.clone()).collect();
        let asked: Vec<CallId> = head.questions().iter().map(|question| question.call.clone()).collect();
        self.calls.entry(thread.to_owned()).or_default().extend(open.iter().cloned());
        let is_root = self.roots.iter().any(|root| root == thread);
        if let Some(turn) = head.turn_in_progress().filter(|_| self.rng.below(3) > 0) {
            return self.turn(turn, &head, is_root);
        }
        if !asked.is_empty() && self.rng.below(2) == 0 {
            let selected = Some(self.rng.below(3)).filter(|selected| *selected < 2);
            return Input::Choose { call: self.rng.pick(&asked).clone(), selected };
        }
        if !open.is_empty() && self.rng.below(3) > 0 {
            return self.of_call(self.rng.clone().pick(&open));
        }
        if !subscribed.is_empty() && self.rng.below(3) > 0 {
            return self.of_subscription(self.rng.clone().pick(&subscribed));
        }
        let calls = self.calls[thread].clone();
        match self.rng.below(14) {
            12.. if !calls.is_empty() => self.of_call(self.rng.clone().pick(&calls)),
            0..=2 => user("hello"),
            3..=4 => enqueued("later"),
            5 => rejecting("now"),
            6 => Input::UserMessage { message: "stop".into(), on_busy: OnBusy::Interrupt },
            7 => Input::Interrupt,
            8..=9 => Input::Resume,
            10 if !is_root => Input::Close,
            10 => Input::Notice { text: "a notice".into() },
            _ => Input::Due,
        }
    }

    /// Returns the outcome of a model request.
    fn turn(&mut self, turn: u64, head: &Head, is_root: bool) -> Input {
        match self.rng.below(16) {
            0..=3 => answer(turn, "an answer"),
            4 => Input::TurnFailed { turn, why: "busy".into(), retry: TurnRetry::Later },
            5 if self.rng.below(3) == 0 => {
                Input::TurnFailed { turn, why: "refused".into(), retry: TurnRetry::Never }
            }
            6 if head.summarisable_up_to().is_some() => {
                Input::Summarised { turn, text: "so far".into(), usage: Usage::default() }
            }
            7 if self.rng.below(3) == 0 => Input::PromptTooLong { turn, why: "too long".into() },
            8 => Input::UnusedAnswer(Usage { input: 3, output: 1, ..Usage::default() }),
            _ => {
                let count = 1 + self.rng.below(3);
                let plans_of_turn = (0..count).map(|_| self.plan(head, is_root)).collect();
                plans(turn, "tool", plans_of_turn)
            }
        }
    }

    fn plan(&mut self, head: &Head, is_root: bool) -> Plan {
        let now = self.sqlite.now();
        let server = Server(if self.rng.below(4) == 0 { "http://127.0.0.1:7" } else { SERVER }.into());
        let built_in = match self.rng.below(18) {
            0..=7 => return Plan::Invoke(server),
            8..=9 => return Plan::Approve { server, prompt: "May I?".into() },
            10 => return Plan::Refuse("Error: no such tool".into()),
            11 if self.threads.len() < 12 => BuiltIn::SpawnThread { instructions: "work".into() },
            12 => BuiltIn::Sleep { duration: seconds(40) },
            13 => BuiltIn::Wait,
            14 => BuiltIn::Schedule { next: now.plus(seconds(60)), confirmation: "scheduled".into() },
            15 => match head.children().next() {
                Some(child) => {
                    let thread_id = child.as_str().to_owned();
                    BuiltIn::SendMessageToChild { thread_id, message: "hurry".into() }
                }
                None => BuiltIn::ReportToParent { report: "so far".into() },
            },
            16 => match head.subscriptions().first() {
                Some(active) => BuiltIn::CancelSubscription { tool_call_id: active.id.to_string() },
                None => BuiltIn::Wait,
            },
            _ if !is_root => BuiltIn::CloseThread { report: Some("done".into()) },
            _ => return Plan::Invoke(server),
        };
        Plan::BuiltIn(built_in)
    }

    /// Returns an input that an open call receives.
    fn of_call(&mut self, call: &CallId) -> Input {
        let call = call.clone();
        match self.rng.below(12) {
            0..=2 => result(&call, "done"),
            3..=5 => {
                let result = ToolResult { subscription: true, ..ToolResult::text("subscribed") };
                Input::ToolResult { call, result }
            }
            6 => Input::CallFailed { call, text: "Error: it failed".into() },
            7..=8 => {
                let number = self.rng.below(2) as u64;
                let response_url = ResponseUrl::new(format!("{SERVER}/answers/{number}")).unwrap();
                let choices = vec!["red".into(), "green".into()];
                let (prompt, default) = ("Which?".into(), 0);
                let choice = Choice { prompt, choices, default, response_url, digest: number };
                Input::ChoiceRequested { call, choice }
            }
            9 => {
                let view_type = format!("view {}", self.rng.below(3));
                Input::View { call, view_type, content: json!({"done": 1}) }
            }
            10 => Input::SignInRequested { call, url: AuthUrl::new("https://id.example.com/x").unwrap() },
            _ if self.rng.below(2) == 0 => Input::Cancel { call },
            _ => Input::CallbackRefused { call, why: "413: too large".into() },
        }
    }

    /// Returns an input that a subscription receives.
    fn of_subscription(&mut self, call: &CallId) -> Input {
        let (call, kind) = (call.clone(), self.rng.below(16));
        if kind == 0 {
            return Input::SubscriptionLost { call };
        }
        if kind == 1 {
            return Input::Cancel { call };
        }
        let id = Some(self.rng.below(6)).filter(|id| *id < 5);
        let id = id.map(|id| EventId::new(format!("e{id}")).unwrap());
        let event = Event { id, text: "an event".into(), associative: kind < 5, is_final: kind == 15 };
        Input::Event { call, event }
    }

    /// Compares everything that the two databases contain.
    async fn compare(&self) {
        let [one, other] = self.both().map(|fixture| self.state(fixture));
        let (one, other) = tokio::join!(one, other);
        for (one, other) in one.iter().zip(&other) {
            assert_eq!(one, other);
        }
        assert_eq!(one.len(), other.len());
    }

    async fn state(&self, fixture: &Fixture) -> Vec<String> {
        let names = names(fixture, &self.threads).await;
        let mut state = Vec::new();
        for root in &self.roots {
            state.extend(records(&*fixture.store, root).await);
        }
        for thread in &self.threads {
            let row = fixture.row(thread).await;
            let prompt = fixture.store.prompt_entries(&row.thread, row.head.seq()).await.unwrap();
            state.push(format!("{thread} {:?} {:?} {prompt:?}", row.head.status(), row.updated_at));
        }
        for kind in WorkKind::ALL {
            for destination in [MODEL, SERVER, "http://127.0.0.1:7"] {
                let due = fixture.due(kind, destination).await.into_iter();
                let name = |(_, key): (SessionKey, WorkKey)| {
                    let name = &names[&key.thread()];
                    match key {
                        WorkKey::Ask { turn, .. } => format!("{name} asks {turn}"),
                        WorkKey::Invoke { call, .. } => format!("{name} invokes {call}"),
                        WorkKey::Answer { number, .. } => format!("{name} answers {number}"),
                        WorkKey::Check { call, .. } => format!("{name} checks {call}"),
                    }
                };
                let due: BTreeSet<String> = due.map(name).collect();
                state.push(format!("{destination} {due:?}"));
            }
        }
        state.push(format!("{:?}", fixture.store.next_due(fixture.now()).await.unwrap()));
        state
    }
}

/// Returns the ids of threads by their keys.
async fn names(fixture: &Fixture, threads: &[String]) -> BTreeMap<ThreadKey, String> {
    let mut names = BTreeMap::new();
    for thread in threads {
        names.insert(fixture.key(thread).await, thread.clone());
    }
    names
}

/// Returns the records of a session in an order that does not depend on the database, without keys, times of the export, and
/// encrypted texts, which are random.
async fn records(store: &dyn Store, session: &str) -> Vec<String> {
    let (sender, mut receiver) = mpsc::channel(4);
    let origin = Origin { key_id: "7777".into(), key_ids: Vec::new(), public_url: PUBLIC_URL.into() };
    let session = id(session);
    let receive = async {
        let mut records = Vec::new();
        while let Some(record) = receiver.recv().await {
            records.push(record);
        }
        records
    };
    let (sent, records) = tokio::join!(store.export(&session, &origin, sender), receive);
    sent.unwrap();
    let comparable = |record: String| {
        let mut record: Value = serde_json::from_str(&record).unwrap();
        let differs =
            [("session", "exported_at"), ("thread", "key"), ("thread", "token_key"), ("question", "sealed")];
        for (kind, field) in differs {
            if let Some(fields) = record.get_mut(kind).and_then(Value::as_object_mut) {
                fields.remove(field);
            }
        }
        record.to_string()
    };
    let mut records: Vec<String> = records.into_iter().map(comparable).collect();
    records.sort();
    records
}

async fn random_messages(seed: u64) {
    let mut twins = Twins::new(Box::new(Shared::new()), seed);
    for root in ["one", "other"] {
        twins.create(root).await;
    }
    twins.act(ACTIONS).await;
    twins.close().await;
    let mut kinds = BTreeSet::new();
    for root in &twins.roots {
        kinds.extend(records(&*twins.postgres.store, root).await.iter().map(|record| record[..6].to_owned()));
    }
    assert!(kinds.len() > 5, "{kinds:?}");
}

#[tokio::test]
async fn random_messages_give_the_same_state_on_both_databases_1_of_3() {
    random_messages(1).await;
}

#[tokio::test]
async fn random_messages_give_the_same_state_on_both_databases_2_of_3() {
    random_messages(2).await;
}

#[tokio::test]
async fn random_messages_give_the_same_state_on_both_databases_3_of_3() {
    random_messages(3).await;
}

/// A database of which the store sees one session only.
struct Confined {
    shared: Arc<Shared>,
    session: i64,
}

impl Database for Confined {
    fn open(&self, rules: StepSettings, clock: Arc<dyn Clock>, on_commit: OnCommit) -> Arc<dyn Store> {
        let options = format!("sslmode=disable&options=-c%20rap.session%3D{}", self.session);
        let url = self.shared.database.url_with(&options).replace("postgres@", "confined@");
        let time = Time::Given(clock);
        Arc::new(PostgresStore::new(Parts { time, on_commit, ..parts(&url, "confined", rules) }))
    }

    fn corrupt_head(&self, thread: &ThreadId) {
        self.shared.corrupt_head(thread);
    }

    fn execute(&self, sqlite: &str, postgres: &str) {
        self.shared.execute(sqlite, postgres);
    }

    fn setting(&self) -> crate::settings::Database {
        self.shared.setting()
    }
}

/// Tables whose rows belong to no session, and which statements of steps name. Steps only add rows to them: alerts,
/// changes of counts, documents of toolsets by their hash.
const WITHOUT_SESSION: [&str; 3] = ["alerts", "thread_counts", "toolsets"];

/// Statements that load the facts of steps or write their rows.
fn statements_of_steps() -> impl Iterator<Item = &'static str> {
    kinds::ALL.iter().map(|kind| kind.sql()).chain(facts::ALL)
}

/// The natural key to distribute or partition by is the session: all rows that steps of a session need carry it. Random
/// messages reach every statement that writes or reads rows of steps. A fork alone reads the session that it is made
/// from.
#[tokio::test]
async fn steps_of_a_session_touch_no_row_of_another_one() {
    let shared = Arc::new(Shared::new());
    let other = Node::on(&shared.database.url());
    other.send(new("elsewhere", Some("hello"))).await.unwrap();
    other.send(to("elsewhere", calls(1, &[SERVER, SERVER]))).await.unwrap();
    let without = "SELECT table_name FROM information_schema.tables t WHERE table_schema = 'public' AND NOT EXISTS \
                   (SELECT 1 FROM information_schema.columns c WHERE c.table_name = t.table_name \
                   AND c.column_name = 'session' AND c.data_type = 'bigint') ORDER BY 1";
    let without = shared.database.sql(without);
    let is_word = |c: char| !c.is_alphanumeric() && c != '_';
    let is_named =
        |table: &&str| statements_of_steps().any(|sql| sql.split(is_word).any(|word| word == *table));
    assert_eq!(without.lines().filter(is_named).collect::<Vec<_>>(), WITHOUT_SESSION);
    // A new root thread is its own session, and has the next key.
    let session = 5001;
    shared.database.sql(&format!(
        "DO $$ BEGIN CREATE ROLE confined LOGIN; EXCEPTION WHEN OTHERS THEN NULL; END $$; \
         GRANT ALL ON SCHEMA public TO confined; GRANT ALL ON ALL TABLES IN SCHEMA public TO confined; \
         GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO confined; SELECT setval('thread_keys', {}); \
         DO $$ DECLARE t text; BEGIN FOR t IN SELECT table_name FROM information_schema.columns \
         WHERE column_name = 'session' AND data_type = 'bigint' AND table_schema = 'public' LOOP \
         EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', t); \
         EXECUTE format('CREATE POLICY own ON %I TO confined \
         USING (session = current_setting(''rap.session'')::bigint)', t); END LOOP; END $$",
        session - 1
    ));
    let mut twins = Twins::new(Box::new(Confined { shared: Arc::clone(&shared), session }), 17);
    twins.create("root").await;
    let missing = || -> Vec<&'static str> {
        let used = statement::USED.lock().unwrap();
        statements_of_steps().filter(|sql| !used.contains(*sql)).collect()
    };
    for _ in 0..20 {
        twins.act(ACTIONS / 4).await;
        // The last one is that of alerts, when a root thread is closed.
        if missing().len() <= 1 {
            break;
        }
    }
    twins.close().await;
    assert_eq!(missing(), [""; 0], "statements that no message has reached");
    let sessions = "SELECT count(DISTINCT session), max(session) FROM threads";
    assert_eq!(shared.database.sql(sessions), format!("2|{session}"));
    assert!(twins.postgres.store.thread(&id("elsewhere"), &Visibility::All).await.is_err());
    // Somebody who adds a statement adds it to the list.
    assert_eq!(include_str!("../kinds.rs").matches(": Kind =").count(), kinds::ALL.len());
}
