//! The store in a Postgres database. A batch of messages is one short transaction with two round trips.
//!
//! Messages wait in two queues, chosen by a hash of their session; the writer of each queue applies them in batches. No
//! transaction is open while the runtime talks to a model or a tool server. Nothing depends on the state of a
//! connection, so a transaction pooler may be in between.

mod alerts;
mod apply;
mod bulk;
mod clock;
mod connect;
mod deletion;
mod delivery_log;
mod directory;
mod facts;
mod figures;
mod heads;
mod history;
mod hosts;
mod kinds;
mod listings;
mod migrate;
mod nodes;
mod outcome;
mod raw_rows;
mod signals;
mod statement;
#[cfg(test)]
mod tests;
mod tokens;
mod transfer;
mod upkeep;
mod work;
mod writer;
mod writes;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use rap_agent::{Cause, Entry, Seq, StatusCheck, Usage};
use rap_io::metrics::{Counter, Exposition};
use rap_io::secret_box::Key;
use rap_protocol::{CallId, ThreadId, Timestamp, UserId};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::batch::{self, DisabledThreads, StepMetrics};
use super::transfer::DEPARTURE_LIFETIME;
use super::{
    Activity, COUNT_LIMIT, CallRow, ClaimedAlerts, ClientToken, Delivery, DeliveryFilter, DeliveryRecord,
    DuePage, DueWork, Error, Expired, Expiry, FiguresRow, Fleet, HistoryPage, InboxItem, LongestPauses,
    Message, MessageClass, NewClientToken, OnCommit, OutboxKey, OutboxMessage, Page, PageRequest, Receipt,
    Redelivery, Remaining, Renewal, Reserve, SessionKey, SessionToolset, Signal, StepSettings, Store,
    StoreCounts, SubscriptionRow, Target, Thread, ThreadFilter, ThreadKey, ThreadRow, Timer, TimerRow,
    TokenDigest, TokenId, ViewKey, ViewRow, Visibility, Work, WorkKey, WorkKind, WorkQueue,
};
use bulk::Bulk;
pub(crate) use clock::DatabaseClock;
pub(crate) use connect::Address;
use connect::Connections;
pub use connect::UrlError;
use directory::Directory;
use heads::THREAD_COLUMNS;
pub use migrate::PostgresError;
pub(crate) use migrate::{KNOWN, Prepared, prepare_blocking};
pub(crate) use nodes::NodeSettings;
use nodes::{Membership, NodeNumber};
pub(crate) use raw_rows::RawRows;
use signals::Signals;
use statement::{BEGIN_READ, Statement};
pub(crate) use writer::Time;
use writer::WriterQueue;

/// Number of writers, each with one connection. More of them make smaller batches and are slower.
const WRITERS: usize = 2;
/// Number of connections for everything except steps.
const CONNECTIONS: usize = 6;
/// Number of connections for the lease and the signals of the node, which must not wait for anything else.
const NODE_CONNECTIONS: usize = 2;

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
    writer_queues: [WriterQueue; WRITERS],
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
    /// Number and settings of this node.
    node: (NodeNumber, NodeSettings),
    membership: Mutex<Membership>,
    reserve: Reserve,
    signals: Arc<Signals>,
    /// Connections for the lease of this node and the signals between nodes.
    signalling: Connections,
    /// Tasks that end with the store.
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// The parts that a store is made of.
pub(crate) struct Parts {
    pub(crate) address: Address,
    /// A direct connection to the database, if a pooler is at `address`.
    pub(crate) listen: Option<Address>,
    pub(crate) node: NodeSettings,
    pub(crate) prepared: Prepared,
    pub(crate) key: Key,
    pub(crate) rules: StepSettings,
    pub(crate) time: Time,
    pub(crate) on_commit: OnCommit,
    pub(crate) reserve: Reserve,
}

impl PostgresStore {
    /// Makes a store on a database that [`prepare_blocking`] has prepared. Connections are opened when they are needed.
    pub(crate) fn new(parts: Parts) -> PostgresStore {
        let Parts { address, listen, node, prepared, key, rules, time, on_commit, reserve } = parts;
        let (others, signalling) = (address.pool(CONNECTIONS), address.pool(NODE_CONNECTIONS));
        let signals = Arc::new(Signals::new(prepared.node));
        signals.begin_after(prepared.signals);
        let tasks = vec![
            tokio::spawn(Arc::clone(&signals).run_publisher(signalling.clone())),
            tokio::spawn(
                Arc::clone(&signals).listen(listen.unwrap_or_else(|| address.clone()), signalling.clone()),
            ),
        ];
        let membership = Mutex::new(Membership::new(node.lease, prepared.hosted));
        let inner = Arc::new(Inner {
            steps: address.pool(WRITERS),
            others,
            writer_queues: Default::default(),
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
            node: (prepared.node, node),
            membership,
            reserve,
            signals,
            signalling,
            tasks,
        });
        let writers =
            (0..WRITERS).map(|writer| tokio::spawn(Arc::clone(&inner).run_writer(writer))).collect();
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
    fn writer(&self, message: &Message) -> usize {
        let session = self.directory.session(&message.target).map_or(0, |session| session.0.number());
        let mixed = session.cast_unsigned().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        mixed as usize % WRITERS
    }

    /// A poisoned lock is ignored: no code under the lock leaves a part of a change.
    fn membership(&self) -> MutexGuard<'_, Membership> {
        self.membership.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Fleet for PostgresStore {
    fn id(&self) -> String {
        self.inner.node.0.0.to_string()
    }

    fn has_peers(&self) -> bool {
        self.inner.signals.has_peers()
    }

    fn alone_since(&self) -> Option<u64> {
        self.inner.signals.alone_since()
    }

    fn holds_lease(&self) -> bool {
        Instant::now() < self.inner.membership().valid_until
    }

    fn hosts(&self, server: &str) -> bool {
        let is_started = self.inner.node.1.started.iter().any(|started| started == server);
        !is_started || self.inner.membership().hosted.contains(server)
    }

    async fn renew(&self, activity: Activity) -> Result<Renewal, Error> {
        let inner = &self.inner;
        let (number, node) = &inner.node;
        let asked = Instant::now();
        let renewed = nodes::renew(&inner.signalling, *number, node, activity).await?;
        inner.time.observe(renewed.now);
        if let Err(error) = migrate::check_oldest(renewed.oldest) {
            tracing::error!(%error, "this node stops: the database needs a newer release");
            inner.closing.cancel();
            return Err(Error::Closed);
        }
        let before = inner.membership().hosted.clone();
        let (peer_gone, next) = inner.membership().update(&renewed, node.lease, asked);
        inner.signals.set_peers(&inner.membership().peers);
        let gained: Vec<&String> = renewed.hosted.difference(&before).collect();
        if !gained.is_empty() {
            tracing::info!(servers = ?gained, "this node now owns these tool servers");
        }
        let lost: Vec<String> = inner.membership().lost.iter().cloned().collect();
        if !lost.is_empty() {
            tracing::info!(servers = ?lost, "another node now owns these tool servers");
            match inner.signalling.write(hosts::release(*number, &lost)).await {
                Ok(_) => inner.membership().lost.clear(),
                // The lease is renewed nevertheless. The next renewal tries again.
                Err(error) => {
                    tracing::warn!(%error, "claims on work of these tool servers could not be released; retrying")
                }
            }
        }
        Ok(Renewal { lapsed: !renewed.was_valid, peer_gone, next })
    }

    async fn leave(&self) -> Result<(), Error> {
        let mut statements = vec![nodes::leave(self.inner.node.0)];
        statements.extend(self.inner.signals.leaving());
        self.write(statements).await
    }

    async fn others_renewed(&self, since: Timestamp) -> Result<bool, Error> {
        let known = self.inner.signals.peers();
        if known.is_empty() {
            return Ok(true);
        }
        let nodes = self.nodes().await?;
        let alive = |peer: &i64| {
            let id = peer.to_string();
            nodes.iter().any(|node| node.id == id && node.seen_at > since)
        };
        Ok(known.iter().all(alive))
    }

    async fn nodes(&self) -> Result<Vec<super::Node>, Error> {
        Ok(nodes::list(&self.inner.others).await?)
    }

    async fn lost_model_requests(&self, keys: Vec<WorkKey>) -> Result<Vec<WorkKey>, Error> {
        Ok(nodes::lost_model_requests(&self.inner.others, self.inner.node.0, keys).await?)
    }

    async fn release(&self, key: &WorkKey) -> Result<(), Error> {
        self.write(vec![nodes::release(self.inner.node.0, key)]).await
    }

    fn publish(&self, signal: Signal) {
        if self.has_peers() {
            self.inner.signals.push(signal);
        }
    }

    async fn receive(&self) -> Result<Vec<Signal>, Error> {
        Ok(self.inner.signals.receive(&self.inner.signalling).await?)
    }

    async fn threads_by_key(&self, keys: Vec<ThreadKey>) -> Result<Vec<Arc<Thread>>, Error> {
        let sql = format!("SELECT {THREAD_COLUMNS} FROM threads t WHERE t.no = ANY($1)");
        let keys: Vec<i64> = keys.into_iter().map(ThreadKey::number).collect();
        let rows = self.inner.others.read_one(Statement::new(sql).with(keys)).await?;
        // Those that cannot be read are left out.
        Ok(rows.iter().filter_map(|row| heads::loaded(row).ok()).map(|loaded| loaded.thread).collect())
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
        let mut by_writer: [(Vec<Message>, Vec<usize>); WRITERS] = Default::default();
        let count = messages.len();
        // A request that is repeated in this call goes to the same writer, so that the first one counts.
        let mut requests: HashMap<[u8; 32], usize> = HashMap::new();
        for (at, message) in messages.into_iter().enumerate() {
            let writer = match &message.idempotency_key {
                Some(key) => *requests.entry(key.key).or_insert_with(|| inner.writer(&message)),
                None => inner.writer(&message),
            };
            by_writer[writer].0.push(message);
            by_writer[writer].1.push(at);
        }
        let mut receivers: Vec<_> = (0..count).map(|_| None).collect();
        for (own, (messages, positions)) in inner.writer_queues.iter().zip(by_writer) {
            let replies = own.queue.push(class, messages, || own.wake.notify_one());
            for (at, reply) in positions.into_iter().zip(replies) {
                receivers[at] = Some(reply);
            }
            if inner.closed.load(Ordering::SeqCst) {
                own.queue.refuse_all(|| Error::Closed);
            }
        }
        batch::replies(receivers.into_iter().flatten().collect()).await
    }

    async fn thread(&self, id: &ThreadId, visible: &Visibility) -> Result<ThreadRow, Error> {
        let user = listings::user_condition(visible, "t.user_id", 2);
        let sql =
            format!("{} WHERE t.id = $1 AND {user} AND {}", history::thread_rows(), deletion::NOT_DELETED);
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

    async fn history_bytes(&self, thread: &Thread, page: HistoryPage) -> Result<usize, Error> {
        let mut tx = self.inner.others.begin(BEGIN_READ).await?;
        Ok(history::size(&mut tx, thread, page).await?)
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

    async fn server_of_call(&self, thread: ThreadKey, call: &CallId) -> Result<Option<String>, Error> {
        let sql = "SELECT server FROM calls WHERE thread = $1 AND id = $2";
        let statement = Statement::new(sql).thread(thread).text(call.as_str());
        let rows = self.inner.others.read_one(statement).await?;
        Ok(rows.first().map(|row| row.get(0)))
    }

    async fn has_call(&self, thread: &ThreadId, call: &CallId) -> Result<bool, Error> {
        let sql = "SELECT 1 FROM calls c JOIN threads t ON t.no = c.thread WHERE t.id = $1 AND c.id = $2";
        let statement = Statement::new(sql).text(thread.as_str()).text(call.as_str());
        Ok(!self.inner.others.read_one(statement).await?.is_empty())
    }

    async fn session_usage(&self, session: SessionKey) -> Result<(Usage, u64), Error> {
        Ok(listings::session_usage(&self.inner.others, session).await?)
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
        let Inner { others, node, rules, .. } = &*self.inner;
        Ok(work::due(others, node.0, queue, &page, rules.lost_after).await?)
    }

    async fn load_work(&self, key: &WorkKey, now: Timestamp) -> Result<Option<Work>, Error> {
        if self.inner.disabled.contains(key.thread()) {
            return Err(Error::Disabled);
        }
        let Inner { others, node, rules, .. } = &*self.inner;
        Ok(work::load(others, &self.inner.key, (node.0, rules.lost_after), key, now).await?)
    }

    async fn set_aside(&self, target: &Target, why: String, now: Timestamp) -> Result<(), Error> {
        self.write(heads::set_aside(target, &why, now)).await
    }

    async fn postpone(
        &self,
        key: &WorkKey,
        at: Timestamp,
        attempts: u32,
        outcome: String,
    ) -> Result<(), Error> {
        self.write(vec![work::postpone(key, self.inner.node.0, at, attempts, &outcome)]).await
    }

    async fn redirect(&self, key: &WorkKey, destination: &str) -> Result<(), Error> {
        self.write(work::redirect(key, self.inner.node.0, destination).into_iter().collect()).await
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
        Ok(work::due_messages(&self.inner.others, self.inner.node.0, now, skip, limit).await?)
    }

    async fn due_timers(
        &self,
        now: Timestamp,
        late_after: Timestamp,
        skip: &[SessionKey],
        limit: usize,
    ) -> Result<Vec<Timer>, Error> {
        let node = (self.inner.node.0, self.has_peers());
        Ok(work::due_timers(&self.inner.others, node, (now, late_after), skip, limit).await?)
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

    async fn end_long_pauses(&self, now: Timestamp, longest: LongestPauses) -> Result<(), Error> {
        self.write(work::end_long_pauses(now, longest, self.inner.rules.longest_hold())).await
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

    async fn claim_alerts(
        &self,
        destination: &str,
        now: Timestamp,
        until: Timestamp,
        limit: usize,
    ) -> Result<ClaimedAlerts, Error> {
        Ok(alerts::claim(&self.inner.others, destination, now, until, limit).await?)
    }

    async fn settle_alert(&self, number: i64, next: Option<Timestamp>) -> Result<(), Error> {
        self.write(vec![next.map_or_else(|| alerts::remove(number), |at| alerts::postpone(number, at))]).await
    }

    async fn expire_alerts(&self, before: Timestamp) -> Result<(), Error> {
        self.write(vec![alerts::expire(before)]).await
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

    async fn add_figures(&self, rows: Vec<FiguresRow>, now: Timestamp) -> Result<(), Error> {
        self.write(figures::add(rows, now)).await
    }

    async fn figures(&self, since: Timestamp, step: i64) -> Result<Vec<FiguresRow>, Error> {
        Ok(figures::sum(&self.inner.others, since, step).await?)
    }

    async fn statuses(&self, user: &UserId) -> Result<Vec<(String, i64)>, Error> {
        Ok(figures::statuses(&self.inner.others, user.as_str(), COUNT_LIMIT).await?)
    }

    async fn prune(&self, keys_before: Timestamp, deliveries_before: Timestamp) -> Result<bool, Error> {
        // One node does it for all.
        let claim = nodes::claim_pruning(self.inner.node.0);
        if self.inner.others.write(vec![claim]).await?[0].is_empty() {
            return Ok(false);
        }
        let departures_before = self.time().minus(DEPARTURE_LIFETIME);
        Ok(upkeep::prune(&self.inner.others, keys_before, deliveries_before, departures_before).await?)
    }

    async fn delete_session(&self, id: &ThreadId, visible: &Visibility) -> Result<(), Error> {
        deletion::mark(&self.inner.others, id, visible, self.time()).await
    }

    async fn expire_sessions(
        &self,
        before: Timestamp,
        after: Option<ThreadKey>,
        expiry: Expiry,
    ) -> Result<Expired, Error> {
        deletion::expire(&self.inner.others, before, after, expiry, self.time()).await
    }

    async fn delete_batch(&self) -> Result<Remaining, Error> {
        let (remaining, is_gone) = deletion::batch(&self.inner.others, self.time()).await?;
        if is_gone {
            self.inner.directory.forget();
        }
        Ok(remaining)
    }

    async fn counts(&self) -> Result<StoreCounts, Error> {
        Ok(upkeep::counts(&self.inner.others, self.inner.disabled.len()).await?)
    }

    fn expose(&self, text: &mut Exposition) {
        let waiting = self.inner.writer_queues.iter().map(|own| own.queue.waiting());
        let waiting = waiting.fold((0, 0), |(a, b), (internal, external)| (a + internal, b + external));
        self.inner.metrics.expose(text, waiting);
        let help = "Transactions that applied messages.";
        text.counter("rap_store_batches_total", help, &self.inner.batches);
        let help = "Round trips to the database of transactions that applied messages.";
        text.counter("rap_store_round_trips_total", help, &self.inner.steps.round_trips);
    }

    async fn is_readable(&self) -> Result<(), Error> {
        let sql = "SELECT pg_is_in_recovery() FROM (SELECT 1) AS one LEFT JOIN (SELECT no FROM threads LIMIT 1) AS t ON true";
        let rows = self.inner.others.read_one(Statement::new(sql)).await?;
        match rows.first().map_or(Ok(false), |row| statement::get(row, 0))? {
            true => Err(Error::Unavailable("the database is a replica that takes no writes".into())),
            false if self.inner.closing.is_cancelled() => Err(Error::Closed),
            // For example because no replica confirms commits.
            false if self.inner.writer_queues.iter().any(|own| own.is_stuck.load(Ordering::Relaxed)) => {
                Err(Error::Unavailable("the outcome of a commit is not known yet".into()))
            }
            false => Ok(()),
        }
    }

    fn fleet(&self) -> Option<&dyn Fleet> {
        Some(self)
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
        self.inner.writer_queues.iter().for_each(|own| own.queue.refuse_all(|| Error::Closed));
        self.inner.tasks.iter().for_each(JoinHandle::abort);
        if let Err(error) = self.leave().await {
            tracing::debug!(why = error.with_sources(), "the lease of this node was not given back");
        }
        self.inner.steps.close();
        self.inner.signalling.close();
        self.inner.others.close();
    }
}
