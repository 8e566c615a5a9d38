//! Measurements, for the benchmark of this crate and for `rap bench`. Not part of the public API.
//!
//! The runtime and a tool are processes of their own. [`MeasuredStore`] is the store on Postgres alone.

pub mod bare;
pub mod client;
mod echo;
pub mod process;
pub mod trips;
pub mod waiting;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rap_agent::{Arguments, Input, OnBusy, Plan, PlannedCall, Server, ToolResult, TurnAnswer};
use rap_io::bench::BenchResult;
use rap_io::keyring::Keyring;
use rap_protocol::{CallId, ThreadId};
use serde_json::{Map, json};

use crate::engine;
use crate::settings::{Database, Settings};
use crate::store::postgres::PostgresStore;
use crate::store::{self, BoxError, Message, MessageClass, NewThread, Receipt, Store, Target};
use crate::world::{Clock, SystemClock};

/// Sizes of the measurements.
pub struct Sizes {
    pub measured: Duration,
    pub warm_up: Duration,
    pub late_turn: u64,
    /// Number of consecutive turns whose median is taken.
    pub turns_window: u64,
    pub sleeping: u32,
    pub timers: u32,
    pub events: u32,
}

/// Serves as a part of a benchmark, if one has started this process for that. Returns false otherwise.
pub async fn serve_role() -> BenchResult<bool> {
    match rap_io::bench::role() {
        Some((role, _)) if role == "echo" => echo::echo().await?,
        Some((role, arguments)) if role == "runtime" => {
            let [data, tool] = &arguments[..] else { return Err("expected a directory and a URL".into()) };
            process::runtime(Path::new(data), tool).await?;
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// The tool server of all calls. Nothing is sent to it.
const SERVER: &str = "http://127.0.0.1:9";

/// A store whose steps have no effects.
pub struct MeasuredStore {
    store: PostgresStore,
    /// The open call of each thread.
    calls: Arc<Mutex<HashMap<ThreadId, CallId>>>,
}

impl MeasuredStore {
    /// Opens the Postgres database of the settings as one more node, which takes no work.
    pub fn open(settings: &Settings) -> Result<MeasuredStore, BoxError> {
        let Database::Postgres(postgres) = &settings.database else {
            return Err("it measures Postgres".into());
        };
        let key = Keyring::parse(postgres.key.expose())?.for_storage(SystemClock.now());
        let calls: Arc<Mutex<HashMap<ThreadId, CallId>>> = Arc::default();
        let opened = Arc::clone(&calls);
        let on_commit: store::OnCommit = Box::new(move |committed| {
            if let Some(call) = committed.step.head.batch().first() {
                let mut calls = opened.lock().unwrap_or_else(PoisonError::into_inner);
                calls.insert(committed.thread.id.clone(), call.id.clone());
            }
        });
        let mut clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let reserve: store::Reserve = Box::new(|_, _, _| None);
        let name = engine::node_name(settings.listen);
        let store = engine::open_postgres(settings, postgres, name, &key, &mut clock, on_commit, reserve)?;
        Ok(MeasuredStore { store, calls })
    }

    async fn apply(&self, target: Target, input: Input) -> Result<Receipt, store::Error> {
        let message = Message::new(target, input);
        self.store.apply(MessageClass::Internal, vec![message]).await.remove(0)
    }

    /// Creates a thread. With a text the model is asked, without one the thread is idle.
    pub async fn create(&self, thread: &str, text: Option<&str>) -> Result<(), BoxError> {
        let new = NewThread {
            id: ThreadId::new(thread)?,
            incarnation: 1,
            agent: "default".into(),
            user_id: None,
            title: None,
        };
        self.apply(Target::New(new), Input::Begin { message: text.map(Into::into) }).await?;
        Ok(())
    }

    /// Applies steps to threads until the time is over: the model answers with a call, and the call returns. One task
    /// for each thread. Returns the duration of each step.
    pub async fn work(
        self: &Arc<Self>,
        threads: &[String],
        measured: Duration,
    ) -> Result<Vec<Duration>, BoxError> {
        let until = Instant::now() + measured;
        let tasks: Vec<_> = threads.iter().map(|thread| ThreadId::new(thread.as_str())).collect();
        let tasks = tasks.into_iter().map(|thread| Ok(tokio::spawn(Arc::clone(self).turns(thread?, until))));
        collect(tasks.collect::<Result<Vec<_>, BoxError>>()?).await
    }

    async fn turns(self: Arc<Self>, thread: ThreadId, until: Instant) -> Result<Vec<Duration>, BoxError> {
        let (mut steps, mut turn) = (Vec::new(), 1);
        let target = || Target::Id(thread.clone());
        while Instant::now() < until {
            let began = Instant::now();
            self.apply(target(), call(turn)).await?;
            steps.push(began.elapsed());
            let open = self.calls.lock().unwrap_or_else(PoisonError::into_inner).remove(&thread);
            let call = open.ok_or("the step opened no call")?;
            let began = Instant::now();
            let result = Input::ToolResult { call, result: ToolResult::text("hello") };
            turn = self.apply(target(), result).await?.turn;
            steps.push(began.elapsed());
        }
        Ok(steps)
    }

    /// Wakes threads until the time is over, any of `count` that sleep: a user says something, and the model answers.
    /// Returns the duration of each step.
    pub async fn wake(
        self: &Arc<Self>,
        name: &'static str,
        count: u64,
        tasks: u64,
        measured: Duration,
    ) -> Result<Vec<Duration>, BoxError> {
        let until = Instant::now() + measured;
        let task = |number| tokio::spawn(Arc::clone(self).wakes(name, count, number, until));
        collect((0..tasks).map(task).collect()).await
    }

    async fn wakes(
        self: Arc<Self>,
        name: &'static str,
        count: u64,
        task: u64,
        until: Instant,
    ) -> Result<Vec<Duration>, BoxError> {
        let (mut steps, mut random) = (Vec::new(), task + 1);
        while Instant::now() < until {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let thread = ThreadId::new(format!("{name}{}", (random >> 33) % count + 1))?;
            let target = || Target::Id(thread.clone());
            let began = Instant::now();
            let said = Input::UserMessage { message: "hello".into(), on_busy: OnBusy::Enqueue };
            let turn = self.apply(target(), said).await?.turn;
            steps.push(began.elapsed());
            let began = Instant::now();
            let answer = TurnAnswer { text: "hello to you".into(), ..TurnAnswer::default() };
            match self.apply(target(), Input::TurnEnded { turn, answer }).await {
                // Another task has woken the same thread.
                Err(store::Error::Ignored(_)) => {}
                applied => _ = applied?,
            }
            steps.push(began.elapsed());
        }
        Ok(steps)
    }

    /// Closes the store.
    pub async fn close(&self) {
        self.store.close().await;
    }
}

async fn collect(
    tasks: Vec<tokio::task::JoinHandle<Result<Vec<Duration>, BoxError>>>,
) -> Result<Vec<Duration>, BoxError> {
    let mut steps = Vec::new();
    for task in tasks {
        steps.extend(task.await??);
    }
    Ok(steps)
}

fn call(turn: u64) -> Input {
    let planned = PlannedCall {
        model_id: None,
        name: "echo".into(),
        arguments: Arguments::Given(Map::from_iter([("text".into(), json!("hello"))])),
        display: None,
        plan: Plan::Invoke(Server(SERVER.into())),
    };
    Input::TurnEnded { turn, answer: TurnAnswer { calls: vec![planned], ..TurnAnswer::default() } }
}
