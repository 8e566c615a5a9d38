//! A small runtime in memory: right enough to pass every probe, and wrong in one way where it is told to be.
//!
//! Its state outlives a crash as a disk would; a crash ends all that is under way and nothing else.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod agent;
mod fault;
mod http;
mod servers;

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard};

use rap_conformance::runtime::{Host, Restarted};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::UrlPolicy;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::AbortHandle;

pub use self::fault::Fault;

/// Ids of calls: the runtime makes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ids {
    /// Prompts have those of the wire.
    Own,
    /// Prompts have a short form of them.
    ShortInPrompts,
}

/// What a call has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallState {
    Open,
    /// Its place in the history is taken by a placeholder.
    Running,
    Returned,
    Interrupted,
    Subscribed,
    Ended,
}

#[derive(Debug, Clone)]
pub struct Call {
    pub thread: String,
    pub id: String,
    /// The id that the model gave it.
    pub given: String,
    pub name: String,
    pub arguments: Value,
    pub server: usize,
    pub url: String,
    pub state: CallState,
    pub acknowledged: bool,
    /// Where the person's choice goes.
    pub response_url: Option<String>,
}

#[derive(Debug, Clone, Default)]
pub struct Thread {
    pub ancestors: Vec<String>,
    pub messages: Vec<Value>,
    /// The calls of the last answer that have no result.
    pub batch: Vec<String>,
    pub held: Vec<Vec<Value>>,
    pub asking: Option<u64>,
    pub turn: u64,
    /// How long the history was when nothing was open.
    pub settled: usize,
    pub closed: bool,
    pub notices: Vec<String>,
    /// The latest content by type.
    pub views: HashMap<String, Value>,
    /// How many calls it has made.
    pub calls: u64,
}

/// What a session was offered: by server, the toolset.
pub type Tools = Vec<Option<Value>>;

#[derive(Debug, Default)]
pub struct State {
    pub threads: HashMap<String, Thread>,
    pub calls: Vec<Call>,
    pub sessions: HashMap<String, Tools>,
    pub count: u64,
}

pub struct Inner {
    pub fault: Option<Fault>,
    pub ids: Ids,
    pub url: String,
    pub servers: Vec<String>,
    pub model: String,
    pub token: String,
    pub http: Client,
    state: Mutex<State>,
    tasks: Mutex<Vec<AbortHandle>>,
}

/// The runtime.
#[derive(Clone)]
pub struct Toy(Arc<Inner>);

impl Toy {
    /// Starts it with the checker's values.
    pub async fn start(values: &[(&str, String)], ids: Ids, fault: Option<Fault>) -> Toy {
        let value = |name: &str| values.iter().find(|(known, _)| *known == name).unwrap().1.clone();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let inner = Inner {
            fault,
            ids,
            url,
            servers: ["tool_url", "tool_url_2", "tool_url_3"].map(value).to_vec(),
            model: value("model_url"),
            token: value("tool_token"),
            http: Client::new(UrlPolicy::Local, ClientLimits::default()),
            state: Mutex::default(),
            tasks: Mutex::default(),
        };
        let toy = Toy(Arc::new(inner));
        tokio::spawn(http::serve(toy.clone(), listener));
        if toy.is(Fault::PollsDiscovery) {
            tokio::spawn(toy.clone().poll());
        }
        toy
    }

    pub fn url(&self) -> &str {
        &self.0.url
    }

    fn is(&self, fault: Fault) -> bool {
        self.0.fault == Some(fault)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap()
    }

    /// What a crash ends.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.0.tasks.lock().unwrap().push(tokio::spawn(work).abort_handle());
    }

    fn recover(&self) {
        for task in self.0.tasks.lock().unwrap().drain(..) {
            task.abort();
        }
        let mut state = self.state();
        if self.is(Fault::ForgetsAtRestart) {
            *state = State::default();
        }
        // A first question, so that it is not a matter of luck whether it was asked before the crash.
        let forgotten =
            |thread: &Thread| self.is(Fault::ForgetsQuestionsAtRestart) && thread.messages.len() == 1;
        let asking: Vec<(String, u64)> = state
            .threads
            .iter()
            .filter(|(_, thread)| !forgotten(thread))
            .filter_map(|(id, thread)| Some((id.clone(), thread.asking?)))
            .collect();
        let unsent: Vec<Call> = state
            .calls
            .iter()
            .filter(|call| call.state == CallState::Open && !call.acknowledged)
            .cloned()
            .collect();
        if self.is(Fault::ForgetsDuplicatesAtRestart) {
            let returned = state.calls.iter_mut().filter(|call| call.state == CallState::Returned);
            returned.for_each(|call| call.state = CallState::Open);
        }
        drop(state);
        asking.into_iter().for_each(|(thread, turn)| self.spawn(self.clone().question(thread, turn)));
        for mut call in unsent {
            if self.is(Fault::NewUrlAfterRestart) {
                call.url.push_str("?again");
            }
            self.spawn(self.clone().invoke(call));
        }
    }
}

impl Host for Toy {
    fn restart(&self) -> Restarted<'_> {
        Box::pin(async {
            self.recover();
            Ok(())
        })
    }
}
