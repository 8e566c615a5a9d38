//! The tools of all tool servers, and what the sessions of all MCP clients share.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use rap_io::validation::Validations;
use rap_protocol::schema::Budget;
use rap_protocol::{Tool, Toolset, limits};
use rmcp::task_manager::TaskManager;
use serde_json::{Map, Value};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;

use super::callbacks::Callbacks;
use super::session::{Session, SessionChange};
use super::tool_server::ToolServer;

/// Age up to which a toolset is not fetched again for a client that lists the tools.
const FRESH: Duration = Duration::from_secs(1);
/// Maximum number of calls that are running, and of subscriptions that are active, of all sessions together.
pub(super) const OPEN_CALLS: usize = 1_000;
/// Maximum number of tasks, those included that have ended and are kept for their clients.
const TASKS: usize = 256;
/// Time after its creation for which a task is kept. A call that runs longer is cancelled.
pub(super) const TASK_TTL: Duration = Duration::from_secs(24 * 60 * 60);

/// Maximum time to tell the tool servers that all sessions are closed.
const CLOSE_TIME: Duration = Duration::from_secs(5);

/// Limits on the time that a caller waits for a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waiting {
    /// Time after which a call becomes a task, if its client supports tasks.
    pub(super) task_after: Duration,
    /// Time after which the caller of any other call gets an error that names the call. The call itself continues.
    pub(super) at_most: Duration,
}

/// Offers the tools of tool servers to MCP clients.
pub(super) struct Bridge {
    servers: Vec<Arc<ToolServer>>,
    pub(super) callbacks: Callbacks,
    pub(super) waiting: Waiting,
    pub(super) tasks: TaskManager,
    /// Times at which tasks were created.
    task_times: Mutex<VecDeque<Instant>>,
    validations: Validations<usize>,
    offered: Mutex<Arc<Offered>>,
    /// Time of the last fetch. Its lock is held during a fetch.
    fetched: tokio::sync::Mutex<Option<Instant>>,
    sessions: Mutex<Vec<Weak<Session>>>,
    /// Notifications to tool servers that are on their way.
    notifications: TaskTracker,
    /// Session of all clients that have none of their own.
    shared: OnceLock<Arc<Session>>,
}

/// Tools that are offered, by name.
#[derive(Default)]
pub(super) struct Offered {
    tools: BTreeMap<String, OfferedTool>,
    errors: Vec<String>,
}

/// A tool with its server.
#[derive(Clone)]
pub(super) struct OfferedTool {
    index: usize,
    number: usize,
    pub(super) server: Arc<ToolServer>,
    pub(super) toolset: Arc<Toolset>,
}

impl OfferedTool {
    pub(super) fn tool(&self) -> &Tool {
        &self.toolset.tools[self.number]
    }
}

impl Offered {
    pub(super) fn tools(&self) -> impl Iterator<Item = &Tool> {
        self.tools.values().map(OfferedTool::tool)
    }

    pub(super) fn get(&self, name: &str) -> Option<&OfferedTool> {
        self.tools.get(name)
    }

    /// Collects the tools of all servers. A name that two servers use is offered by neither.
    fn collect(servers: &[Arc<ToolServer>], reserved: &[&str]) -> Offered {
        let mut offered = Offered::default();
        let mut clashes = BTreeSet::new();
        for (index, server) in servers.iter().enumerate() {
            let Some(toolset) = server.toolset() else { continue };
            for (number, tool) in toolset.tools.iter().enumerate() {
                let name = tool.name.as_str();
                if reserved.contains(&name) {
                    offered
                        .errors
                        .push(format!("{name} of {} has the name of a built-in tool", server.name()));
                    continue;
                }
                let one =
                    OfferedTool { index, number, server: Arc::clone(server), toolset: Arc::clone(&toolset) };
                if let Some(other) = offered.tools.insert(name.to_owned(), one) {
                    let (one, other) = (server.name(), other.server.name());
                    offered
                        .errors
                        .push(format!("{name} is a tool of both {other} and {one}; neither is offered"));
                    clashes.insert(name.to_owned());
                }
            }
        }
        offered.tools.retain(|name, _| !clashes.contains(name));
        offered
    }

    fn is_same(&self, other: &Offered) -> bool {
        self.tools().eq(other.tools())
    }
}

impl Bridge {
    pub(super) fn new(servers: Vec<ToolServer>, callbacks: Callbacks, waiting: Waiting) -> Bridge {
        Bridge {
            servers: servers.into_iter().map(Arc::new).collect(),
            callbacks,
            waiting,
            tasks: TaskManager::new(),
            task_times: Mutex::default(),
            validations: Validations::default(),
            offered: Mutex::default(),
            fetched: tokio::sync::Mutex::default(),
            sessions: Mutex::default(),
            notifications: TaskTracker::new(),
            shared: OnceLock::new(),
        }
    }

    pub(super) fn servers(&self) -> &[Arc<ToolServer>] {
        &self.servers
    }

    pub(super) fn offered(&self) -> Arc<Offered> {
        Arc::clone(&lock(&self.offered))
    }

    /// Fetches all toolsets at once, unless that was done a moment ago. Returns the reasons why toolsets or tools are not
    /// offered.
    pub(super) async fn refresh(&self) -> Vec<String> {
        let mut fetched = self.fetched.lock().await;
        if fetched.is_some_and(|at| at.elapsed() < FRESH) {
            return Vec::new();
        }
        let fetches: Vec<_> = self
            .servers
            .iter()
            .map(|server| {
                let server = Arc::clone(server);
                tokio::spawn(async move {
                    server.discover().await.err().map(|why| format!("{}: {why}", server.name()))
                })
            })
            .collect();
        let mut errors = Vec::new();
        for fetch in fetches {
            errors.extend(fetch.await.unwrap_or_else(|error| Some(error.to_string())));
        }
        let offered = Offered::collect(&self.servers, &super::handler::BUILT_IN);
        errors.extend(offered.errors.iter().cloned());
        let changed = {
            let mut current = lock(&self.offered);
            let changed = !current.is_same(&offered);
            *current = Arc::new(offered);
            changed
        };
        if changed && fetched.is_some() {
            self.sessions().iter().for_each(|session| session.announce(SessionChange::Tools));
        }
        *fetched = Some(Instant::now());
        for error in &errors {
            tracing::warn!("{error}");
        }
        errors
    }

    /// Validates the arguments of a call.
    pub(super) async fn validate(
        &self,
        tool: &OfferedTool,
        arguments: &Map<String, Value>,
    ) -> Result<(), String> {
        let arguments = Arc::new(Value::Object(arguments.clone()));
        let mut inline = Budget::new(limits::INLINE_VALIDATION_STEPS);
        let schema = &tool.tool().input_schema;
        let valid = self.validations.validate(&tool.index, schema, &arguments, &mut inline).await;
        valid.map_err(|why| format!("the arguments do not match the schema of {}: {why}", tool.tool().name))
    }

    /// Takes the right to create a task. False if there are too many.
    pub(super) fn may_create_task(&self) -> bool {
        let mut times = lock(&self.task_times);
        // A task that has ended is kept for its time once more.
        while times.front().is_some_and(|created| created.elapsed() > 2 * TASK_TTL) {
            times.pop_front();
        }
        let fits = times.len() < TASKS;
        if fits {
            times.push_back(Instant::now());
        }
        fits
    }

    /// Returns the session of clients that have none of their own.
    pub(super) fn shared(self: &Arc<Self>) -> Arc<Session> {
        Arc::clone(self.shared.get_or_init(|| Session::open(self)))
    }

    pub(super) fn add_session(&self, session: &Arc<Session>) {
        let mut sessions = lock(&self.sessions);
        sessions.retain(|session| session.strong_count() > 0);
        sessions.push(Arc::downgrade(session));
    }

    fn sessions(&self) -> Vec<Arc<Session>> {
        lock(&self.sessions).iter().filter_map(Weak::upgrade).collect()
    }

    /// Sends notifications in the background.
    pub(super) fn notify(&self, notifications: impl Future<Output = ()> + Send + 'static) {
        if let Ok(runtime) = Handle::try_current() {
            self.notifications.spawn_on(notifications, &runtime);
        }
    }

    /// Closes all sessions, and waits until the tool servers have been told so.
    pub(super) async fn close(&self) {
        self.sessions().iter().for_each(|session| session.close());
        self.notifications.close();
        if timeout(CLOSE_TIME, self.notifications.wait()).await.is_err() {
            tracing::warn!("some tool servers could not be told that the session is closed");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
