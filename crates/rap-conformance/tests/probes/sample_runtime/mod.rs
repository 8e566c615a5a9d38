//! A small in-memory runtime that passes every probe, and that can be given one fault.
//!
//! A crash aborts all tasks and keeps the state, as if it were on disk.

mod agent;
mod fault;
mod http;
mod servers;

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard};

use rap_conformance::runtime::{RestartFuture, RuntimeHost};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::UrlPolicy;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::AbortHandle;

pub use self::fault::Fault;

/// Ids of calls in prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ids {
    /// The same as in invocations.
    SameAsWire,
    /// A short form of the ids in invocations.
    ShortInPrompts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallState {
    Open,
    /// The history has a placeholder result.
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
    /// Id that the model gave to the call.
    pub given: String,
    pub name: String,
    pub arguments: Value,
    pub server: usize,
    pub url: String,
    pub state: CallState,
    pub acknowledged: bool,
    /// URL for the user's choice.
    pub response_url: Option<String>,
}

#[derive(Debug, Clone, Default)]
pub struct Thread {
    pub ancestors: Vec<String>,
    pub messages: Vec<Value>,
    /// Calls of the last answer that have no result.
    pub batch: Vec<String>,
    pub held: Vec<Vec<Value>>,
    pub asking: Option<u64>,
    pub turn: u64,
    /// Length of the history when the thread was last idle.
    pub settled: usize,
    pub closed: bool,
    pub notices: Vec<String>,
    /// Latest content of each view type.
    pub views: HashMap<String, Value>,
    /// Number of calls that the thread has made.
    pub calls: u64,
}

/// Toolsets of a session, by server; `None` if one could not be fetched.
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

#[derive(Clone)]
pub struct SampleRuntime(Arc<Inner>);

impl SampleRuntime {
    /// Starts the runtime with the placeholder values of the checker.
    pub async fn start(values: &[(&str, String)], ids: Ids, fault: Option<Fault>) -> SampleRuntime {
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
            http: Client::new(UrlPolicy::Loopback, ClientLimits::default()),
            state: Mutex::default(),
            tasks: Mutex::default(),
        };
        let runtime = SampleRuntime(Arc::new(inner));
        tokio::spawn(http::serve(runtime.clone(), listener));
        if runtime.is(Fault::PollsDiscovery) {
            tokio::spawn(runtime.clone().poll());
        }
        runtime
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

    /// Spawns a task that a crash aborts.
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
        if self.is(Fault::ForgetsSubscriptionsAtRestart) {
            let subscribed = state.calls.iter_mut().filter(|call| call.state == CallState::Subscribed);
            subscribed.for_each(|call| call.state = CallState::Ended);
        }
        if self.is(Fault::ForgetsMessagesAtRestart) {
            for thread in state.threads.values_mut() {
                let last = thread.messages.iter().rposition(|message| message["role"] == "user");
                last.filter(|at| *at > 0).map(|at| thread.messages.remove(at));
            }
        }
        // Only the first model request of a thread is forgotten, so that the outcome does not depend on timing.
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
        asking.into_iter().for_each(|(thread, turn)| self.spawn(self.clone().ask_model(thread, turn)));
        for mut call in unsent {
            if self.is(Fault::NewUrlAfterRestart) {
                call.url.push_str("?again");
            }
            self.spawn(self.clone().invoke(call));
        }
    }
}

impl RuntimeHost for SampleRuntime {
    fn restart(&self) -> RestartFuture<'_> {
        Box::pin(async {
            self.recover();
            Ok(())
        })
    }
}
