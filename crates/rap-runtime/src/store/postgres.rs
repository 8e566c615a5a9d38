//! The store in a Postgres database. A batch of messages is one short transaction with two round trips.
//!
//! Messages wait in two queues, chosen by a hash of their session; the writer of each queue applies them in batches. No
//! transaction is open while the runtime talks to a model or a tool server. Nothing depends on the state of a
//! connection, so a transaction pooler may be in between.

mod apply;
mod bulk;
mod clock;
mod connect;
mod delivery_log;
mod directory;
mod facts;
mod heads;
mod history;
mod kinds;
mod lease;
mod listings;
mod migrate;
mod statement;
#[cfg(test)]
mod tests;
mod tokens;
mod upkeep;
mod work;
mod writer;
mod writes;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use rap_agent::{Cause, Entry, Seq, StatusCheck};
use rap_io::metrics::{Counter, Exposition};
use rap_io::secret_box::Key;
use rap_protocol::{CallId, ThreadId, Timestamp};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::batch::{self, DisabledThreads, StepMetrics};
use super::{
    CallRow, ClientToken, Delivery, DeliveryFilter, DeliveryRecord, DuePage, DueWork, Error, HistoryPage,
    InboxItem, Message, MessageClass, NewClientToken, OnCommit, OutboxKey, OutboxMessage, Page, PageRequest,
    Receipt, Redelivery, SessionKey, SessionToolset, StepSettings, Store, StoreCounts, SubscriptionRow,
    Thread, ThreadFilter, ThreadKey, ThreadRow, Timer, TimerRow, TokenDigest, TokenId, ViewKey, ViewRow,
    Visibility, Work, WorkKey, WorkKind, WorkQueue,
};
use bulk::Bulk;
pub(crate) use clock::DatabaseClock;
pub(crate) use connect::Address;
use connect::Connections;
pub use connect::UrlError;
use directory::Directory;
pub use migrate::PostgresError;
pub(crate) use migrate::prepare_blocking;
use statement::{BEGIN_READ, Statement};
use writer::Lane;
pub(crate) use writer::Time;

/// Number of writers, each with one connection. More of them make smaller batches and are slower.
const LANES: usize = 2;
/// Number of connections for everything except steps.
const CONNECTIONS: usize = 6;

/// A store in a Postgres database. Clones refer to the same store.
#[derive(Clone)]
pub(crate) struct PostgresStore {
    inner: Arc<Inner>,
}

struct Inner {
    /// Connections of the writers.
    steps: Connections,
    /// Connections for everything else.
    others: Connections,
    lanes: [Lane; LANES],
    directory: Directory,
    disabled: DisabledThreads,
    rules: StepSettings,
    key: Key,
    time: Time,
    on_commit: OnCommit,
    metrics: StepMetrics,
    batches: Counter,
    /// Cancelled when the store is being closed. The writers apply the waiting messages and end.
    closing: CancellationToken,
    /// True when the writers have ended.
    closed: AtomicBool,
    writers: Mutex<Vec<JoinHandle<()>>>,
    /// Name of this node and the task that renews its lease.
    lease: Option<(String, JoinHandle<()>)>,
}

impl PostgresStore {
    /// Makes a store on a database that [`prepare_blocking`] has prepared. Connections are opened when they are needed.
    pub(crate) fn new(
        address: &Address,
        node: Option<String>,
        key: Key,
        rules: StepSettings,
        time: Time,
        on_commit: OnCommit,
    ) -> PostgresStore {
        let others = address.pool(CONNECTIONS);
        let lease = node.map(|node| (node.clone(), tokio::spawn(lease::keep(others.clone(), node))));
        let inner = Arc::new(Inner {
            steps: address.pool(LANES),
            others,
            lanes: Default::default(),
            directory: Directory::default(),
            disabled: DisabledThreads::default(),
            rules,
            key,
            time,
            on_commit,
            metrics: StepMetrics::new(),
            batches: Counter::default(),
            closing: CancellationToken::new(),
            closed: AtomicBool::new(false),
            writers: Mutex::default(),
            lease,
        });
        let writers = (0..LANES).map(|lane| tokio::spawn(Arc::clone(&inner).run_lane(lane))).collect();
        *inner.writers.lock().unwrap_or_else(PoisonError::into_inner) = writers;
        PostgresStore { inner }
    }

    async fn write(&self, statements: Vec<Statement>) -> Result<(), Error> {
        self.inner.others.write(statements).await?;
        Ok(())
    }
}

impl Inner {
    /// Returns the writer of a message. Messages of one session have the same one, since its threads share a budget.
    fn lane(&self, message: &Message) -> usize {
        let session = self.directory.session(&message.target).map_or(0, |session| session.0.number());
        let mixed = session.cast_unsigned().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        mixed as usize % LANES
    }
}

#[async_trait]
impl Store for PostgresStore {
    async fn apply(&self, class: MessageClass, messages: Vec<Message>) -> Vec<Result<Receipt, Error>> {
        let inner = &self.inner;
        if inner.closing.is_cancelled() {
            return messages.iter().map(|_| Err(Error::Closed)).collect();
        }
        // Keys of new threads are planned until their senders have a reply.
        let _planned = match inner.directory.prepare(&inner.others, &messages).await {
            Ok(planned) => planned,
            Err(failure) => {
                let why = failure.to_string();
                return messages.iter().map(|_| Err(Error::Unavailable(why.clone().into()))).collect();
            }
        };
        let mut lanes: [(Vec<Message>, Vec<usize>); LANES] = Default::default();
        let count = messages.len();
        // A request that is repeated in this call goes to the same writer, so that the first one counts.
        let mut requests: HashMap<[u8; 32], usize> = HashMap::new();
        for (at, message) in messages.into_iter().enumerate() {
            let lane = match &message.idempotency_key {
                Some(key) => *requests.entry(key.key).or_insert_with(|| inner.lane(&message)),
                None => inner.lane(&message),
            };
            lanes[lane].0.push(message);
            lanes[lane].1.push(at);
        }
        let mut receivers: Vec<_> = (0..count).map(|_| None).collect();
        for (lane, (messages, positions)) in inner.lanes.iter().zip(lanes) {
            let replies = lane.queue.push(class, messages, || lane.wake.notify_one());
            for (at, reply) in positions.into_iter().zip(replies) {
                receivers[at] = Some(reply);
            }
            if inner.closed.load(Ordering::SeqCst) {
                lane.queue.refuse_all(|| Error::Closed);
            }
        }
        batch::replies(receivers.into_iter().flatten().collect()).await
    }

    async fn thread(&self, id: &ThreadId, visible: &Visibility) -> Result<ThreadRow, Error> {
        let user = listings::user_condition(visible, "t.user_id", 2);
        let sql = format!("{} WHERE t.id = $1 AND {user}", history::thread_rows());
        let statement = Statement::new(sql).text(id.as_str()).with(listings::user(visible));
        let rows = self.inner.others.read_one(statement).await?;
        Ok(history::thread_row(rows.first().ok_or(Error::NoThread)?)?)
    }

    async fn threads(&self, filter: ThreadFilter) -> Result<Page<ThreadRow>, Error> {
        Ok(listings::threads(&self.inner.others, &filter).await?)
    }

    async fn history(&self, thread: &Thread, page: HistoryPage) -> Result<Vec<(Seq, Entry)>, Error> {
        let mut tx = self.inner.others.begin(BEGIN_READ).await?;
        Ok(history::for_people(&mut tx, thread, page).await?)
    }

    async fn prompt_entries(&self, thread: &Thread, up_to: Seq) -> Result<Vec<Entry>, Error> {
        let mut tx = self.inner.others.begin(BEGIN_READ).await?;
        Ok(history::for_prompt(&mut tx, thread, up_to).await?)
    }

    async fn entries_since_user(&self, thread: &Thread, up_to: Seq) -> Result<Vec<Entry>, Error> {
        let mut tx = self.inner.others.begin(BEGIN_READ).await?;
        Ok(history::since_user(&mut tx, thread, up_to).await?)
    }

    async fn displays(&self, row: &ThreadRow) -> Result<HashMap<CallId, String>, Error> {
        let calls: std::collections::BTreeSet<Seq> = row.head.open_calls().map(|call| call.seq).collect();
        if calls.is_empty() {
            return Ok(HashMap::new());
        }
        let mut tx = self.inner.others.begin(BEGIN_READ).await?;
        Ok(history::displays(&mut tx, &row.thread, calls).await?)
    }

    async fn cause(&self, thread: &Thread) -> Result<Cause, Error> {
        if thread.parent.is_none() {
            return Ok(Cause::Client);
        }
        let mut tx = self.inner.others.begin(BEGIN_READ).await?;
        Ok(history::cause(&mut tx, thread.key).await?)
    }

    async fn has_call(&self, thread: &ThreadId, call: &CallId) -> Result<bool, Error> {
        let sql = "SELECT 1 FROM calls c JOIN threads t ON t.no = c.thread WHERE t.id = $1 AND c.id = $2";
        let statement = Statement::new(sql).text(thread.as_str()).text(call.as_str());
        Ok(!self.inner.others.read_one(statement).await?.is_empty())
    }

    async fn views(
        &self,
        thread: ThreadKey,
        after: Option<ViewKey>,
    ) -> Result<Page<ViewRow, ViewKey>, Error> {
        Ok(listings::views(&self.inner.others, thread, after).await?)
    }

    async fn view(&self, thread: ThreadKey, key: &ViewKey) -> Result<Option<ViewRow>, Error> {
        Ok(listings::view(&self.inner.others, thread, key).await?)
    }

    async fn inbox(
        &self,
        thread: Option<ThreadKey>,
        visible: &Visibility,
        page_request: PageRequest,
    ) -> Result<Page<InboxItem>, Error> {
        Ok(listings::inbox(&self.inner.others, &self.inner.key, thread, visible, &page_request).await?)
    }

    async fn calls(&self, visible: &Visibility, page_request: PageRequest) -> Result<Page<CallRow>, Error> {
        Ok(listings::calls(&self.inner.others, visible, &page_request).await?)
    }

    async fn subscriptions(
        &self,
        visible: &Visibility,
        page_request: PageRequest,
    ) -> Result<Page<SubscriptionRow>, Error> {
        Ok(listings::subscriptions(&self.inner.others, visible, &page_request).await?)
    }

    async fn timers(&self, visible: &Visibility, page_request: PageRequest) -> Result<Page<TimerRow>, Error> {
        Ok(listings::timers(&self.inner.others, visible, &page_request).await?)
    }

    async fn session_toolsets(&self, session: SessionKey) -> Result<Vec<SessionToolset>, Error> {
        Ok(upkeep::session_toolsets(&self.inner.others, session).await?)
    }

    async fn toolset(&self, hash: &str) -> Result<Option<Vec<u8>>, Error> {
        Ok(upkeep::toolset(&self.inner.others, hash).await?)
    }

    async fn newest_toolset(&self, server: &str) -> Result<Option<String>, Error> {
        Ok(upkeep::newest_toolset(&self.inner.others, server).await?)
    }

    async fn save_toolsets(&self, toolsets: Vec<SessionToolset>) -> Result<(), Error> {
        let mut bulk = Bulk::default();
        toolsets.iter().for_each(|toolset| bulk.toolset(toolset));
        self.write(bulk.statements()).await
    }

    async fn destinations(&self, kind: WorkKind) -> Result<Vec<String>, Error> {
        Ok(work::destinations(&self.inner.others, kind).await?)
    }

    async fn due_work(&self, queue: &WorkQueue, page: DuePage) -> Result<DueWork, Error> {
        Ok(work::due(&self.inner.others, queue, &page, self.inner.rules.lost_after).await?)
    }

    async fn load_work(&self, key: &WorkKey, now: Timestamp) -> Result<Option<Work>, Error> {
        if self.inner.disabled.contains(key.thread()) {
            return Err(Error::Disabled);
        }
        Ok(work::load(&self.inner.others, &self.inner.key, key, now).await?)
    }

    async fn postpone(
        &self,
        key: &WorkKey,
        at: Timestamp,
        attempts: u32,
        outcome: String,
    ) -> Result<(), Error> {
        self.write(vec![work::postpone(key, at, attempts, &outcome)]).await
    }

    async fn answer_delivered(&self, key: &WorkKey, attempts: u32) -> Result<(), Error> {
        self.write(work::answer_delivered(key, attempts).into_iter().collect()).await
    }

    async fn acknowledge(&self, calls: Vec<(ThreadKey, CallId)>, at: Timestamp) -> Result<(), Error> {
        self.write(vec![work::acknowledge(calls, at)]).await
    }

    async fn record_check(&self, thread: ThreadKey, call: &CallId, check: StatusCheck) -> Result<(), Error> {
        self.write(vec![work::record_check(thread, call, check)]).await
    }

    async fn due_messages(
        &self,
        now: Timestamp,
        skip: &[SessionKey],
        limit: usize,
    ) -> Result<Vec<OutboxMessage>, Error> {
        Ok(work::due_messages(&self.inner.others, now, skip, limit).await?)
    }

    async fn due_timers(
        &self,
        now: Timestamp,
        late_after: Timestamp,
        skip: &[SessionKey],
        limit: usize,
    ) -> Result<Vec<Timer>, Error> {
        Ok(work::due_timers(&self.inner.others, now, late_after, skip, limit).await?)
    }

    async fn postpone_due(
        &self,
        timers: Vec<Timer>,
        messages: Vec<OutboxKey>,
        now: Timestamp,
        at: Timestamp,
    ) -> Result<(), Error> {
        self.write(work::postpone_due(&timers, &messages, now, at)).await
    }

    async fn next_due(&self, after: Timestamp) -> Result<Option<Timestamp>, Error> {
        Ok(work::next_due(&self.inner.others, after).await?)
    }

    async fn record_deliveries(&self, records: Vec<DeliveryRecord>) -> Result<Vec<String>, Error> {
        let rows = self.inner.others.write(delivery_log::record_all(&records)).await?;
        Ok(delivery_log::ids(&rows, records.len())?)
    }

    async fn deliveries(&self, filter: DeliveryFilter) -> Result<Page<Delivery>, Error> {
        Ok(delivery_log::list(&self.inner.others, &filter).await?)
    }

    async fn delivery(&self, id: &str, visible: &Visibility) -> Result<Option<Delivery>, Error> {
        let Ok(number) = id.parse() else { return Ok(None) };
        Ok(delivery_log::by_number(&self.inner.others, number, visible).await?)
    }

    async fn redeliver(&self, id: &str, visible: &Visibility, now: Timestamp) -> Result<Redelivery, Error> {
        let Ok(number) = id.parse() else { return Ok(Redelivery::NoSuchDelivery) };
        Ok(delivery_log::redeliver(&self.inner.others, number, visible, now).await?)
    }

    async fn add_token(&self, token: NewClientToken, max: usize) -> Result<Option<TokenId>, Error> {
        Ok(tokens::add(&self.inner.others, &token, max).await?)
    }

    async fn token(&self, digest: &TokenDigest) -> Result<Option<ClientToken>, Error> {
        Ok(tokens::find(&self.inner.others, digest).await?)
    }

    async fn tokens(&self, page_request: PageRequest) -> Result<Page<ClientToken>, Error> {
        Ok(tokens::list(&self.inner.others, &page_request).await?)
    }

    async fn token_used(&self, id: TokenId, at: Timestamp) -> Result<(), Error> {
        self.write(vec![tokens::used(id, at)]).await
    }

    async fn revoke_token(&self, id: TokenId) -> Result<bool, Error> {
        Ok(tokens::revoke(&self.inner.others, id).await?)
    }

    async fn prune(&self, keys_before: Timestamp, deliveries_before: Timestamp) -> Result<bool, Error> {
        Ok(upkeep::prune(&self.inner.others, keys_before, deliveries_before).await?)
    }

    async fn counts(&self) -> Result<StoreCounts, Error> {
        Ok(upkeep::counts(&self.inner.others, self.inner.disabled.len()).await?)
    }

    fn expose(&self, text: &mut Exposition) {
        let waiting = self.inner.lanes.iter().map(|lane| lane.queue.waiting());
        let waiting = waiting.fold((0, 0), |(a, b), (internal, external)| (a + internal, b + external));
        self.inner.metrics.expose(text, waiting);
        let help = "Transactions that applied messages.";
        text.counter("rap_store_batches_total", help, &self.inner.batches);
        let help = "Round trips to the database of transactions that applied messages.";
        text.counter("rap_store_round_trips_total", help, &self.inner.steps.round_trips);
    }

    async fn is_readable(&self) -> Result<(), Error> {
        self.inner.others.read_one(Statement::new("SELECT no FROM threads LIMIT 1")).await?;
        Ok(())
    }

    async fn close(&self) {
        self.inner.closing.cancel();
        let writers = std::mem::take(&mut *self.inner.writers.lock().unwrap_or_else(PoisonError::into_inner));
        for writer in writers {
            if let Err(error) = writer.await {
                tracing::error!(%error, "a writer of the store panicked");
            }
        }
        self.inner.closed.store(true, Ordering::SeqCst);
        self.inner.lanes.iter().for_each(|lane| lane.queue.refuse_all(|| Error::Closed));
        if let Some((node, renewals)) = &self.inner.lease {
            renewals.abort();
            if let Err(failure) = self.inner.others.write(vec![lease::give_back(node)]).await {
                tracing::debug!(%failure, "the lease of this node was not given back");
            }
        }
        self.inner.steps.close();
        self.inner.others.close();
    }
}
