//! The engine: carries out what steps ask for, once it is on disk.
//!
//! What is promised is stored: a question to the model and a due invocation in the rows of their thread and call, an
//! answer of a person with its question, a message to another thread in the table of letters. In memory there is only
//! what is under way, so that nothing is begun twice at a time. Hand-off never blocks: what finds no place stays in
//! its table, and upkeep reads it from there when a place is free. After a crash upkeep finds all of it.

mod ask;
pub(crate) mod built_in;
mod invoke;
mod ledger;
mod lost;
mod metrics;
mod notify;
mod plan;
mod show;
#[cfg(test)]
mod tests;
mod underway;
mod upkeep;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering, fence};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use rap_agent::{Effect, Message};
use rap_io::client::{Client, ClientLimits};
use rap_io::secret_box::{self, Key};
use rap_io::writer::Lane;
use rap_protocol::{CallId, Timestamp};
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::hub::{Hub, Live};
use crate::settings::{Agent, Limits, Settings, ToolServer};
use crate::store::{self, AgentLimits, Committed, OpenError, Receipt, Store, Target, ThreadNo, beside};
use crate::token::Tokens;
use crate::toolsets::Toolsets;
use ledger::Ledger;
use metrics::Metrics;
use underway::Underway;

/// Notifications under way at a time. More are dropped, which the protocol allows.
const NOTIFICATIONS: usize = 1024;
/// How long a notification may take.
const NOTIFY_WITHIN: Duration = Duration::from_secs(10);
/// The pause before something that the store could not take is offered to it again; it doubles up to the second.
const STORE_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// Why a runtime can not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The database.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// The key that protects callback URLs and secrets at rest.
    #[error("{0}")]
    Key(#[from] secret_box::Error),
}

/// Where work was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// In the step that has just been committed.
    Step,
    /// In its table, a moment ago; it may be done since.
    Table {
        /// How often it was tried before.
        attempts: u32,
    },
}

pub(crate) struct Engine {
    pub(crate) store: Store,
    pub(crate) settings: Settings,
    pub(crate) tokens: Tokens,
    pub(crate) toolsets: Toolsets,
    pub(crate) hub: Hub,
    pub(crate) metrics: Metrics,
    invoker: Client,
    notifier: Client,
    underway: Underway,
    ledger: Ledger,
    ask_places: Arc<Semaphore>,
    /// By server: one that does not answer keeps no place of another.
    invoke_places: HashMap<String, Arc<Semaphore>>,
    notify_places: Arc<Semaphore>,
    /// Something that was promised found no place.
    overflow: AtomicBool,
    poke: Notify,
    /// When upkeep looks again by itself.
    sweeps_at: AtomicI64,
    /// An acknowledgement or a line of the ledger waits to be written.
    unrecorded: Notify,
    tasks: TaskTracker,
    pub(crate) stop: CancellationToken,
    handle: Handle,
}

impl Engine {
    /// Opens the database and takes up what was left; this blocks for a moment.
    pub(crate) fn start(settings: Settings) -> Result<Arc<Engine>, StartError> {
        let key = Key::from_file(&beside(&settings.database, "key"))?;
        let slot: Arc<OnceLock<Weak<Engine>>> = Arc::default();
        let engine_of = Arc::clone(&slot);
        let outlet = Box::new(move |committed| {
            if let Some(engine) = engine_of.get().and_then(Weak::upgrade) {
                engine.act(committed);
            }
        });
        let limits = &settings.limits;
        let own = |agent: &Agent| Some((agent.name.clone(), agent.limits.clone()?));
        let own = settings.agents.iter().filter_map(own).collect();
        let bounds = AgentLimits { usual: limits.thread.clone(), own };
        let store = Store::open(&settings.database, key.clone(), bounds, outlet)?;
        let client =
            |total| Client::new(settings.url_policy, ClientLimits { total, ..ClientLimits::default() });
        let engine = Arc::new(Engine {
            store,
            tokens: Tokens::new([key], limits.callback_token_lifetime),
            toolsets: Toolsets::new(
                settings.tool_servers.clone(),
                client(limits.discovery_timeout),
                limits.discovery_timeout,
            ),
            invoker: client(limits.invoke_ack_timeout),
            notifier: client(NOTIFY_WITHIN),
            hub: Hub::new(),
            metrics: Metrics::default(),
            underway: Underway::default(),
            ledger: Ledger::default(),
            ask_places: Arc::new(Semaphore::new(limits.model_concurrency)),
            invoke_places: settings.tool_servers.iter().map(|server| places_of(server, limits)).collect(),
            notify_places: Arc::new(Semaphore::new(NOTIFICATIONS)),
            overflow: AtomicBool::new(false),
            poke: Notify::new(),
            sweeps_at: AtomicI64::new(i64::MAX),
            unrecorded: Notify::new(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            handle: Handle::current(),
            settings,
        });
        slot.set(Arc::downgrade(&engine)).unwrap_or_else(|_| unreachable!("bug: the slot is set once"));
        engine.tasks.spawn(Arc::clone(&engine).upkeep());
        engine.tasks.spawn(Arc::clone(&engine).look_for_lost());
        engine.tasks.spawn(Arc::clone(&engine).record());
        Ok(engine)
    }

    /// Acts on a step that is on disk. Runs on the writer's thread.
    fn act(self: &Arc<Self>, committed: Committed) {
        let Committed { thread, effects, settled, due, status } = committed;
        tracing::debug!(thread = %thread.id, status = status.as_str(), effects = effects.len(), "step");
        if self.hub.is_heard() {
            self.hub.tell(thread.no, Live::Moved { thread: thread.id.clone(), status });
        }
        for call in settled {
            self.underway.invocation_is_void(thread.no, &call);
        }
        for effect in effects {
            match effect {
                Effect::Ask { turn, up_to } => self.start_asking(&thread, turn, up_to, Source::Step),
                Effect::Abandon { turn } => self.underway.abandon(thread.no, turn),
                Effect::Invoke { call, arguments } => {
                    self.start_invoking(&thread, call, arguments, Source::Step);
                }
                Effect::NotifyCancel { call } => self.notify_cancel(&thread, call),
                Effect::NotifyClose => self.notify_close(&thread),
                Effect::Dispatch { .. } | Effect::Answer { .. } | Effect::Tell { .. } => {
                    self.poke.notify_one()
                }
            }
        }
        self.look_by(due);
    }

    /// Upkeep has to look at this time, or before.
    fn look_by(&self, due: Option<Timestamp>) {
        if due.is_some_and(|due| due.0 < self.sweeps_at.load(Ordering::SeqCst)) {
            self.poke.notify_one();
        }
    }

    /// Something in the tables is due that no step has told of.
    pub(crate) fn look_now(&self) {
        self.poke.notify_one();
    }

    /// What found no place is read from its table later.
    fn leave_for_later(&self) {
        self.overflow.store(true, Ordering::SeqCst);
    }

    /// A place, or what asks for one is left for later. A place that became free between the two is taken all the
    /// same: whoever gave it back did not see that it is wanted.
    fn place(&self, places: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
        if let Ok(place) = Arc::clone(places).try_acquire_owned() {
            return Some(place);
        }
        self.leave_for_later();
        fence(Ordering::SeqCst);
        Arc::clone(places).try_acquire_owned().ok()
    }

    /// What found no place is not under way any more. Upkeep may have passed over it while it seemed to be, so that it
    /// has to look again if there is a place by now.
    fn look_again(&self, places: &Semaphore) {
        self.leave_for_later();
        fence(Ordering::SeqCst);
        if places.available_permits() > 0 {
            self.poke.notify_one();
        }
    }

    /// A place is free again.
    fn place_is_free(&self) {
        fence(Ordering::SeqCst);
        if self.overflow.load(Ordering::SeqCst) {
            self.poke.notify_one();
        }
    }

    /// A task that the runtime waits for when it stops.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn_on(task, &self.handle);
    }

    /// A message from outside.
    pub(crate) async fn tell(&self, target: Target, message: Message) -> Result<Receipt, store::Error> {
        self.store.step(Lane::External, target, message).await
    }

    /// A message of our own, which is kept until the store has taken it or refused it by name.
    async fn insist(&self, thread: ThreadNo, message: Message) -> Result<Receipt, store::Error> {
        let (mut pause, longest) = STORE_PAUSE;
        loop {
            match self.store.step(Lane::Internal, Target::No(thread), message.clone()).await {
                Err(store::Error::Unavailable(why)) => {
                    tracing::warn!(thread, why, "the store does not take a message of ours; trying again");
                }
                done => return done,
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(longest),
                () = self.stop.cancelled() => return Err(store::Error::Closed),
            }
        }
    }

    /// The callback URL of a call: the same in every attempt.
    fn callback_url(&self, thread: &store::Thread, call: &CallId, since: Timestamp) -> String {
        let grant = crate::token::Grant {
            thread: thread.no,
            incarnation: thread.incarnation,
            since,
            call: call.clone(),
        };
        format!("{}/callback/{}", self.settings.public_url, self.tokens.make(&grant))
    }

    /// Takes on nothing new, lets what is under way finish for a moment, and closes the store. Nothing is lost: what
    /// did not finish is taken up at the next start.
    pub(crate) async fn shut_down(&self) {
        self.stop.cancel();
        self.tasks.close();
        if tokio::time::timeout(self.settings.limits.stop_within, self.tasks.wait()).await.is_err() {
            tracing::info!("some work is left for the next start");
        }
        // What was acknowledged meanwhile need not be sent again at the next start.
        self.record_now().await;
        self.store.close().await;
    }
}

fn places_of(server: &ToolServer, limits: &Limits) -> (String, Arc<Semaphore>) {
    (server.url.clone(), Arc::new(Semaphore::new(limits.invoke_concurrency)))
}
