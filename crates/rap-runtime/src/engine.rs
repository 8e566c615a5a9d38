//! The engine: carries out the effects of steps after they have been committed.
//!
//! Every effect that must not be lost is stored with its thread, call or question, and messages between threads are
//! stored in an outbox. Memory holds only work that is in progress or about to begin, so that a crash loses nothing.

mod alerts;
mod answer;
mod ask;
pub(crate) mod built_in;
mod clock;
mod deferred_writes;
mod deletion;
mod dispatch;
mod display_texts;
mod fallback;
mod figures;
mod fleet;
mod function;
mod idle;
mod invoke;
mod messages;
mod metrics;
mod moving;
mod notify;
mod plan_calls;
mod run;
mod status_query;
mod summary;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use rap_agent::{Effect, Head, Input, LostAfter, Write};
use rap_io::client::Client;
use rap_io::keyring::{BadKeyring, Keyring};
use rap_io::secret_box::{self, Key};
use rap_io::validation::Validations;
use rap_protocol::{Forbidden, Timestamp, UrlRules};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use url::Url;

use crate::function::Functions;
use crate::http::{Admission, CallbackRequirements};
use crate::hub::{Changes, Hub, LiveEvent};
use crate::model::ModelMemory;
use crate::settings::{Agent, Database, Limits, PostgresDatabase, Settings, SettingsError};
use crate::store::postgres::{self, Address, DatabaseClock, NodeSettings, Parts, PostgresStore, Time};
use crate::store::sqlite::sibling_path;
use crate::store::transfer::Origin;
use crate::store::{
    self, AskWork, Committed, InvokeWork, Message, MessageClass, MessageSender, OpenError, PostgresError,
    Receipt, Signal, SqliteStore, StepSettings, Store, Target, Thread, ThreadKey, TokenDigest, Work, WorkKey,
    WorkKind, WorkQueue,
};
use crate::telemetry::Telemetry;
use crate::token::Tokens;
use crate::toolsets::{DiscoveryLimits, Toolsets};
use crate::world::{Clock, HttpLimits, World};
use deferred_writes::DeferredRecords;
use dispatch::{Dispatcher, Slots};
use fallback::Outages;
use figures::PendingFigures;
use metrics::Metrics;
pub(crate) use moving::{Forwarded, MoveRefused, read_arrival};
use moving::{Forwarding, Moves};
use notify::Notifications;

/// Time limit of a notification or status query.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of the last writes and of closing the store, after which a shutdown goes on without them.
const CLOSE_WITHIN: Duration = Duration::from_secs(4);
/// First and longest pause before a write is retried that failed because the store was unavailable.
const STORE_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// Maximum number of concurrent deliveries of users' answers to each tool server.
const ANSWER_SLOTS: usize = 64;
/// Maximum number of model requests that wait for discovery. Further ones are sent with the tools that are known.
const AWAITING_TOOLS: usize = 1024;
/// Maximum number of concurrent status queries to each tool server.
const CHECK_SLOTS: usize = 16;

/// Reason why a runtime cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The settings are not valid.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The database cannot be opened.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// The Postgres database cannot be used.
    #[error(transparent)]
    Postgres(#[from] PostgresError),
    /// The key that protects callback URLs and stored secrets cannot be read or created.
    #[error(transparent)]
    Key(#[from] secret_box::Error),
    /// A key file does not contain a list of keys.
    #[error("{}: {bad}", path.display())]
    KeyFile {
        /// Path of the key file.
        path: PathBuf,
        /// Reason, which says what was expected.
        bad: BadKeyring,
    },
    /// The key of a Postgres database is not a list of keys.
    #[error("store.key: {0}")]
    Keyring(#[from] BadKeyring),
    /// There is a database, but its key file is missing. A new key would invalidate the callback URLs of all open
    /// calls.
    #[error(
        "the key file {key} of the database {database} is missing. Restore it from a backup: without it, no open call or \
         subscription can send its result. To continue with a new key all the same, write one: \
         (umask 077; openssl rand -hex 32 > {key})",
        key = key.display(), database = database.display()
    )]
    KeyMissing {
        /// Path of the key file.
        key: PathBuf,
        /// Path of the database.
        database: PathBuf,
    },
}

pub(crate) struct Engine {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) settings: Settings,
    /// Rules for URLs that tools name.
    urls: Arc<UrlRules>,
    pub(crate) tokens: Tokens,
    /// Digests of the configured tokens of clients, in the order of the settings.
    pub(crate) client_tokens: Vec<TokenDigest>,
    /// Identity of this runtime in the records of sessions that are moved.
    pub(crate) origin: Origin,
    /// Key that encrypts stored secrets.
    pub(crate) secrets: Key,
    pub(crate) moves: Moves,
    forwarding: Forwarding,
    pub(crate) toolsets: Arc<Toolsets>,
    functions: Functions,
    validations: Validations<String>,
    model_memory: Arc<ModelMemory>,
    pub(crate) hub: Hub,
    pub(crate) metrics: Metrics,
    /// Records traces, if a collector is configured.
    pub(crate) telemetry: Option<Telemetry>,
    pub(crate) world: World,
    pub(crate) dispatcher: Dispatcher,
    pub(crate) admission: Admission,
    pub(crate) callback_requirements: CallbackRequirements,
    notifications: Notifications,
    /// Wakes the task of each destination of alerts.
    alerts_due: Vec<Notify>,
    /// Bounds the model requests that wait for discovery.
    awaiting_tools: Arc<Semaphore>,
    /// Passes redirects after sign-ins on to tool servers. Created when the first one arrives.
    pub(crate) consent_client: OnceLock<Client>,
    /// Client for state of sessions that is sent to tool servers which the program around the runtime starts.
    pub(crate) started_client: OnceLock<Client>,
    outages: Mutex<Outages>,
    deferred: DeferredRecords,
    figures: PendingFigures,
    /// Notified when messages between threads are due.
    messages_due: Notify,
    /// Notified when the clock has to wake before its planned time.
    clock_due: Notify,
    /// Time at which the clock wakes next, in milliseconds since the epoch.
    clock_at: AtomicI64,
    /// Time of the last request of a client or committed step, in milliseconds since the epoch.
    active_at: AtomicI64,
    /// Notified when the lease of this node has to be renewed before its time.
    lease_due: Notify,
    /// Notified when a session was marked for deletion.
    deletions_due: Notify,
    /// Notified when an accepted invocation or a delivery has to be recorded.
    record_due: Notify,
    tasks: TaskTracker,
    pub(crate) stop: CancellationToken,
    /// Changes when a client token is revoked.
    pub(crate) revocations: watch::Sender<()>,
    pub(crate) started_at: Timestamp,
    handle: Handle,
}

impl Engine {
    /// Opens the database and resumes the work that it holds. Blocks while the database is opened.
    pub(crate) fn start(settings: Settings) -> Result<Arc<Engine>, StartError> {
        settings.check()?;
        let limits = &settings.limits;
        let http = HttpLimits {
            invoke: limits.invoke_ack_timeout,
            notify: NOTIFY_TIMEOUT,
            discover: limits.discovery_timeout,
        };
        let mut world = World::real(&settings.url_rules(), http, &settings.tool_servers, &settings.notify)?;
        let requirements = CallbackRequirements::new(&settings.tool_servers, settings.proxies.as_ref())?;
        let engine_cell: Arc<OnceLock<Weak<Engine>>> = Arc::default();
        let on_commit = on_commit(&engine_cell);
        let (store, keys): (Arc<dyn Store>, Keyring) = match &settings.database {
            Database::File(database) => {
                let keys = keys_of_file(database)?;
                let (rules, clock) = (rules(&settings), Arc::clone(&world.clock));
                let key = keys.for_storage(world.now());
                (Arc::new(SqliteStore::open(database, key, rules, clock, on_commit)?), keys)
            }
            Database::Postgres(postgres) => {
                let keys = Keyring::parse(postgres.key.expose())?;
                let (key, reserve) = (keys.for_storage(world.now()), fleet::reserve(&engine_cell));
                let (name, clock) = (node_name(settings.listen), &mut world.clock);
                let store = open_postgres(&settings, postgres, name, &key, clock, on_commit, reserve)?;
                (Arc::new(store), keys)
            }
        };
        Ok(Engine::run(settings, world, store, (keys, requirements), &engine_cell))
    }

    /// Runs an engine on an open store. Sets `engine_cell`, through which the store's `on_commit` callback reaches the
    /// engine.
    pub(crate) fn run(
        settings: Settings,
        world: World,
        store: Arc<dyn Store>,
        (keys, callback_requirements): (Keyring, CallbackRequirements),
        engine_cell: &OnceLock<Weak<Engine>>,
    ) -> Arc<Engine> {
        let limits = &settings.limits;
        let functions =
            Functions::new(&settings.functions).expect("bug: the functions were checked with the settings");
        let (servers, urls) = (settings.tool_servers.clone(), Arc::new(settings.url_rules()));
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let key = keys.for_storage(world.now());
        let telemetry = settings.telemetry.clone().map(|collector| {
            let (telemetry, exporter) = Telemetry::new(collector);
            tasks.spawn(exporter.run(stop.clone()));
            telemetry
        });
        let engine = Arc::new(Engine {
            origin: Origin::new(&keys, world.now(), &settings.public_url),
            secrets: key,
            moves: Moves::default(),
            forwarding: Forwarding::default(),
            tokens: Tokens::new(keys, limits.callback_token_lifetime),
            toolsets: Toolsets::new(
                servers,
                functions.document(),
                Arc::clone(&urls),
                world.clone(),
                Arc::clone(&store),
                DiscoveryLimits {
                    timeout: limits.discovery_timeout,
                    wait: limits.discovery_wait,
                    bytes: limits.toolset_bytes,
                },
                (tasks.clone(), stop.clone()),
            ),
            store,
            urls,
            functions,
            validations: Validations::default(),
            model_memory: ModelMemory::new(limits.model_answer_bytes),
            hub: Hub::new(),
            metrics: Metrics::new(&settings),
            telemetry,
            dispatcher: Dispatcher::new(slots(limits)),
            awaiting_tools: Arc::new(Semaphore::new(AWAITING_TOOLS)),
            admission: Admission::new(limits),
            client_tokens: settings.tokens.iter().map(|token| TokenDigest::of(token.expose())).collect(),
            callback_requirements,
            notifications: Notifications::new(&settings.tool_servers),
            consent_client: OnceLock::new(),
            started_client: OnceLock::new(),
            outages: Mutex::default(),
            deferred: DeferredRecords::default(),
            figures: PendingFigures::default(),
            messages_due: Notify::new(),
            clock_due: Notify::new(),
            clock_at: AtomicI64::new(i64::MAX),
            active_at: AtomicI64::new(world.now().0),
            lease_due: Notify::new(),
            deletions_due: Notify::new(),
            record_due: Notify::new(),
            alerts_due: settings.notify.iter().map(|_| Notify::new()).collect(),
            tasks,
            stop,
            revocations: watch::Sender::default(),
            handle: Handle::current(),
            started_at: world.now(),
            world,
            settings,
        });
        engine_cell
            .set(Arc::downgrade(&engine))
            .unwrap_or_else(|_| unreachable!("bug: the cell is set once"));
        engine.start_tasks();
        engine
    }

    /// Starts the background tasks, which run until the engine is shut down.
    fn start_tasks(self: &Arc<Self>) {
        self.tasks.spawn(Arc::clone(self).resume_work());
        self.tasks.spawn(Arc::clone(self).resume_moves());
        self.tasks.spawn(Arc::clone(self).run_clock());
        self.tasks.spawn(Arc::clone(self).deliver_messages());
        self.tasks.spawn(Arc::clone(self).record());
        self.tasks.spawn(Arc::clone(self).run_deletions());
        self.start_alerts();
        self.tasks.spawn(Arc::clone(self).record_figures());
        if self.store.fleet().is_some() {
            self.tasks.spawn(Arc::clone(self).keep_lease());
            self.tasks.spawn(Arc::clone(self).follow_peers());
        }
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.world.now()
    }

    /// Carries out the effects of a committed step. The store calls it in commit order, so it must not block.
    fn on_commit(self: &Arc<Self>, committed: Committed) {
        rap_io::crash::point("before_effects");
        self.note_activity();
        // Reserved slots that no work of the step takes are released at the end.
        let Committed { thread, step, mut children, late, reserved: _reserved } = committed;
        for call in step.settled() {
            self.cancel(WorkKey::Invoke { thread: thread.key, call: call.clone() });
        }
        let limits = self.settings.thread_limits(&thread.agent);
        let timers = step.writes.iter().filter_map(|write| match write {
            Write::Open(call) | Write::Approve(call) => call.timer(),
            Write::Timer { at, .. } => *at,
            Write::Spawn(spawn) => spawn.head.due(limits),
            _ => None,
        });
        let due = timers.chain(step.head.due(limits)).min();
        self.count_wake(&thread, step.is_wake());
        if let Some(telemetry) = &self.telemetry {
            telemetry.step(&thread, &step);
        }
        let (status, alerts) = (step.head.status(), !step.entered.is_empty());
        tracing::debug!(thread = %thread.id, status = status.as_str(), effects = step.effects.len(), "step");
        self.tell_peers(|| Signal::of_step(thread.key, status, &Changes::of(&step)));
        if self.hub.has_listeners() {
            let (changed, changes) = (Arc::clone(&thread), Changes::of(&step));
            self.hub.publish(thread.key, LiveEvent::ThreadChanged { thread: changed, status, changes });
        }
        children.reverse();
        for write in step.writes {
            let Write::Spawn(spawn) = write else { continue };
            let Some(child) = children.pop() else { continue };
            let status = spawn.head.status();
            let (spawned, changes) = (Arc::clone(&child), Changes::default());
            self.tell_peers(|| Signal::of_step(child.key, status, &changes));
            self.hub.publish(child.key, LiveEvent::ThreadChanged { thread: spawned, status, changes });
            self.count_wake(&child, spawn.starts_turn());
            self.carry_out_all(&child, spawn.effects, Some(&spawn.head).filter(|_| !late));
        }
        self.carry_out_all(&thread, step.effects, Some(&step.head).filter(|_| !late));
        if alerts {
            self.wake_alerts();
        }
        if let Some(due) = due {
            self.wake_clock_by(due);
        }
    }

    /// Carries out the effects of a step, in order.
    ///
    /// `head` is the head that the step wrote. It is `None` if the commit is reported late; then new work is loaded
    /// from the store before it starts.
    fn carry_out_all(self: &Arc<Self>, thread: &Arc<Thread>, effects: Vec<Effect>, head: Option<&Head>) {
        effects.into_iter().for_each(|effect| self.carry_out(thread, effect, head));
    }

    fn carry_out(self: &Arc<Self>, thread: &Arc<Thread>, effect: Effect, head: Option<&Head>) {
        let key = thread.key;
        match effect {
            Effect::AskModel { turn, up_to } => {
                let queue = self.queue(WorkKind::Ask, self.settings.model_server(&thread.agent));
                let work = head.cloned().map(|head| {
                    let thread = Arc::clone(thread);
                    Work::Ask(Box::new(AskWork { thread, head, turn, up_to, attempts: 0 }))
                });
                self.offer_ask(queue, thread, WorkKey::Ask { thread: key, turn }, work);
            }
            Effect::Abandon { turn } => self.cancel(WorkKey::Ask { thread: key, turn }),
            Effect::Invoke { call, arguments } => {
                let queue = self.queue(WorkKind::Invoke, &call.server.0);
                let work_key = WorkKey::Invoke { thread: key, call: call.id.clone() };
                let work = head.map(|_| {
                    let thread = Arc::clone(thread);
                    let (outcome, callback_base) = (None, None);
                    Work::Invoke(InvokeWork { thread, call, arguments, attempts: 0, outcome, callback_base })
                });
                self.offer(queue, thread, work_key, work);
            }
            Effect::InvokeApproved { call, server } => {
                let queue = self.queue(WorkKind::Invoke, &server.0);
                self.offer(queue, thread, WorkKey::Invoke { thread: key, call }, None);
            }
            Effect::Answer { number, server } => {
                let queue = self.queue(WorkKind::Answer, &server.0);
                self.offer(queue, thread, WorkKey::Answer { thread: key, number }, None);
            }
            Effect::NotifyClose { cancelled } => self.notify_close(thread, cancelled),
            Effect::NotifyCancel { call } => self.notify_cancel(thread, call),
            Effect::Deliver => self.messages_due.notify_one(),
        }
    }

    /// Cancels work in progress, on whichever node.
    fn cancel(&self, key: WorkKey) {
        if !self.dispatcher.cancel(&key) {
            self.tell_peers(|| Signal::Cancelled { key });
        }
    }

    fn queue(&self, kind: WorkKind, destination: &str) -> WorkQueue {
        WorkQueue { kind, destination: destination.to_owned() }
    }

    /// Makes the clock wake no later than `due`.
    fn wake_clock_by(&self, due: Timestamp) {
        // The clock wakes at least this often anyway.
        let soon = due < self.now().plus(clock::LONGEST_SLEEP);
        if soon && due.0 < self.clock_at.load(Ordering::SeqCst) {
            self.clock_due.notify_one();
        }
    }

    /// Wakes the clock, after a write other than a step made work due.
    pub(crate) fn wake_clock(self: &Arc<Self>) {
        self.clock_due.notify_one();
    }

    /// Spawns a task that [`Engine::shut_down`] waits for.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn_on(task, &self.handle);
    }

    /// Applies the input of a callback to a thread.
    pub(crate) async fn apply_callback(
        &self,
        thread: ThreadKey,
        target: Target,
        input: Input,
    ) -> Result<Receipt, store::Error> {
        let class = MessageClass::External(MessageSender::Tools(thread));
        self.apply(class, Message::new(target, input)).await
    }

    /// Applies an input of a client.
    #[cfg(test)]
    pub(crate) async fn apply_external(&self, target: Target, input: Input) -> Result<Receipt, store::Error> {
        self.apply(MessageClass::OF_A_CLIENT, Message::new(target, input)).await
    }

    pub(crate) async fn apply(&self, class: MessageClass, message: Message) -> Result<Receipt, store::Error> {
        let target = message.target.clone();
        let applied = self.store.apply(class, vec![message]).await.pop();
        let applied = applied.unwrap_or(Err(store::Error::Closed));
        if let Err(error) = &applied {
            self.set_aside_if_damaged(&target, error).await;
        }
        applied
    }

    /// Sets a thread aside if an error was caused by its rows. Other threads are not affected.
    async fn set_aside_if_damaged(&self, target: &Target, error: &store::Error) {
        if !matches!(error, store::Error::Unreadable(_)) {
            return;
        }
        let why = store::damage::reason(error);
        tracing::error!(?target, why, "a thread was quarantined");
        if let Err(error) = self.store.set_aside(target, why, self.now()).await {
            tracing::warn!(why = error.with_sources(), "a damaged thread could not be recorded");
        }
    }

    /// Applies an input of the runtime itself, and retries while the store is unavailable.
    async fn apply_with_retry(&self, thread: ThreadKey, input: Input) -> Result<Receipt, store::Error> {
        self.apply_message_with_retry(Message::new(Target::Key(thread), input)).await
    }

    async fn apply_message_with_retry(&self, message: Message) -> Result<Receipt, store::Error> {
        let (mut pause, longest) = STORE_PAUSE;
        loop {
            match self.apply(MessageClass::Internal, message.clone()).await {
                Err(error @ store::Error::Unavailable(_)) => {
                    let why = error.with_sources();
                    tracing::warn!(why, "the store is unavailable; retrying an input of the runtime");
                }
                done => return done,
            }
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return Err(store::Error::Closed),
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(longest),
            }
        }
    }

    /// Judges a URL that the tool server with this base URL named.
    fn check_named_url(&self, server: &str, url: &Url) -> Result<(), Forbidden> {
        match Url::parse(server) {
            Ok(server) => self.urls.check_named_by(&server, url),
            Err(_) => self.urls.check(url),
        }
    }

    /// Returns the callback URL of a call. It depends only on what is stored with the call, so it is the same in every
    /// attempt: a tool server would run a call with another URL as a second one.
    fn callback_url(&self, work: &InvokeWork) -> String {
        let InvokeWork { thread, call, callback_base, .. } = work;
        let grant = crate::token::Grant {
            thread: thread.token_key,
            incarnation: thread.incarnation,
            since: call.since,
            call: call.id.clone(),
        };
        let base = callback_base.as_deref().unwrap_or(&self.settings.public_url);
        format!("{base}/callback/{}", self.tokens.make(&grant))
    }

    /// Starts no new work, gives work in progress `stop_within` to finish, and closes the store. Unfinished work is
    /// resumed at the next start. A store that does not answer is not waited for: everything acknowledged is in it.
    pub(crate) async fn shut_down(&self) {
        self.stop.cancel();
        self.tasks.close();
        let stop_within = self.settings.limits.stop_within;
        let began = tokio::time::Instant::now();
        self.hand_over(stop_within).await;
        if tokio::time::timeout_at(began + stop_within, self.tasks.wait()).await.is_err() {
            tracing::info!("some work did not finish in time; it is resumed at the next start");
        }
        self.drop_unsent_notifications();
        let close = async {
            // Record the invocations that were accepted meanwhile, so that the next start does not send them again.
            self.record_now().await;
            self.store.close().await;
        };
        if tokio::time::timeout(CLOSE_WITHIN, close).await.is_err() {
            tracing::warn!("the database did not answer in time and was not closed");
        }
    }
}

fn slots(limits: &Limits) -> Slots {
    Slots {
        ask: limits.model_concurrency,
        invoke: limits.invoke_concurrency,
        answer: ANSWER_SLOTS,
        check: CHECK_SLOTS,
    }
}

/// Reads the keys of a SQLite database, or makes one for a new database.
pub(crate) fn keys_of_file(database: &Path) -> Result<Keyring, StartError> {
    let key_file = sibling_path(database, "key");
    if database.exists() && !key_file.exists() {
        return Err(StartError::KeyMissing { key: key_file, database: database.into() });
    }
    let keys = Keyring::parse(&secret_box::key_file(&key_file)?);
    keys.map_err(|bad| StartError::KeyFile { path: key_file, bad })
}

/// Opens a Postgres database as a node. The clock follows the database's from now on.
pub(crate) fn open_postgres(
    settings: &Settings,
    postgres: &PostgresDatabase,
    name: String,
    key: &Key,
    clock: &mut Arc<dyn Clock>,
    on_commit: store::OnCommit,
    reserve: store::Reserve,
) -> Result<PostgresStore, PostgresError> {
    let (address, rules) = (Address::parse(&postgres.url)?, rules(settings));
    let listen = postgres.listen_url.as_ref().map(Address::parse).transpose()?;
    let started = settings.tool_servers.iter().filter(|server| server.started.is_some());
    let started = started.map(|server| server.url.clone()).collect();
    let node = NodeSettings { name, url: settings.own_url(), lease: postgres.lease, started };
    let prepared = postgres::prepare_blocking(&address, key, &settings.public_url, &node, &rules)?;
    let database_clock = Arc::new(DatabaseClock::new(Arc::clone(clock), prepared.now));
    *clock = Arc::<DatabaseClock>::clone(&database_clock);
    let (key, time) = (key.clone(), Time::Database(database_clock));
    Ok(PostgresStore::new(Parts { address, listen, node, prepared, key, rules, time, on_commit, reserve }))
}

/// Returns the name of this node: its host and the address that it listens on. After a restart it has the same name,
/// unless it listens on no address of its own. Nodes of the same name that were started before lose their claims.
pub(crate) fn node_name(listen: Option<SocketAddr>) -> String {
    node_name_on(std::path::Path::new("/"), listen, std::process::id())
}

/// Machines that were made from one image often have the same host name, or the same machine id. A boot id is unique to
/// a machine that runs, but changes when it is started again; then the claims of the node before end with its lease.
/// Containers have their own host names and the boot id of their host.
fn node_name_on(root: &std::path::Path, listen: Option<SocketAddr>, process: u32) -> String {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default().trim().to_owned();
    let (host, boot) = (read("proc/sys/kernel/hostname"), read("proc/sys/kernel/random/boot_id"));
    let process = || format!("process {process}");
    let address = listen.map_or_else(process, |listen| listen.to_string());
    format!("{host} {boot} {address}")
}

/// Derives the rules of the store from the settings.
pub(crate) fn rules(settings: &Settings) -> StepSettings {
    let own = |agent: &Agent| Some((agent.name.clone(), agent.limits.clone()?));
    let server = |agent: &Agent| (agent.name.clone(), settings.model_server(&agent.name).to_owned());
    StepSettings {
        limits: settings.limits.thread.clone(),
        agent_limits: settings.agents.iter().filter_map(own).collect(),
        model_servers: settings.agents.iter().map(server).collect::<HashMap<_, _>>(),
        lost_after: LostAfter(settings.limits.lost_after),
        alerts: settings.notify.iter().map(crate::settings::AlertDestination::rule).collect(),
        callback_base: settings.public_url.clone(),
    }
}

/// Returns a callback that hands committed steps to the engine in `engine_cell`.
pub(crate) fn on_commit(engine_cell: &Arc<OnceLock<Weak<Engine>>>) -> store::OnCommit {
    let engine_cell = Arc::clone(engine_cell);
    Box::new(move |committed| {
        if let Some(engine) = engine_cell.get().and_then(Weak::upgrade) {
            engine.on_commit(committed);
        }
    })
}

#[cfg(test)]
mod tests;
