//! Signals between nodes: rows that are kept for some seconds. A notification tells the other nodes that there are new ones.
//!
//! Notifications are only hints. They need a connection of their own, which a transaction pooler does not give; a node that
//! gets none looks for new rows by itself. Each node numbers its rows, so that a gap is noticed.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, mpsc};
use tokio_postgres::AsyncMessage;

use super::connect::{Address, Connections};
use super::nodes::NodeNumber;
use super::statement::{Failure, Statement, get};
use crate::hub::MAX_CHILDREN;
use crate::store::Signal;

/// Channel of the notifications. Their payload is the number of the node that sent them.
pub(super) const CHANNEL: &str = "rap";
/// Time that signals wait for others before they are stored together.
const GATHER: Duration = Duration::from_millis(5);
/// Maximum number of signals that wait, and of bytes of text in them. Beyond it, they are replaced by [`Signal::Lost`].
const WAITING: usize = 8192;
const WAITING_BYTES: usize = 1024 * 1024;
/// Maximum number of nodes that are gone whose last row is remembered.
const REMEMBERED: usize = 1000;
/// Maximum number of rows of one node that are read at once.
const ROWS: i64 = 64;
/// Time for which rows are kept.
pub(super) const KEPT: &str = "15 s";
/// Time after which a node that has read nothing takes it that rows are gone. It is shorter than the time for which
/// they are kept.
const READ_WITHIN: Duration = Duration::from_secs(10);
/// Pause before signals are stored again after that failed.
const PUBLISH_AGAIN: Duration = Duration::from_millis(500);
/// Time after which new rows are looked for, if notifications arrive, and if they do not.
const SLOW_POLL: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(200);
/// Pause before another connection for notifications is opened after one was lost, and after one was of no use.
const RECONNECT: Duration = Duration::from_secs(1);
const RECONNECT_USELESS: Duration = Duration::from_secs(60);
/// Maximum number of notifications that wait.
const NOTIFICATIONS: usize = 1024;
/// Time within which a notification must arrive on a new connection. If none does, a pooler is in between.
const PROBE: Duration = Duration::from_secs(3);

/// The signals of one node.
pub(super) struct Signals {
    node: NodeNumber,
    outgoing: Mutex<Outgoing>,
    /// Notified when a signal waits to be stored.
    publish: Notify,
    /// Notified when other nodes may have stored signals.
    arrived: Notify,
    /// True while notifications arrive.
    listening: AtomicBool,
    /// The last row that was read of each other node.
    read: Mutex<HashMap<i64, i64>>,
    /// The same for nodes whose lease ran out. If one is back, what it said before is not carried out again.
    gone: Mutex<HashMap<i64, i64>>,
    /// True if this node itself has missed something that is in the store.
    missed: AtomicBool,
    /// Time at which rows were last read.
    read_at: Mutex<Instant>,
    /// Number of times that another node was noticed, or may have come unnoticed.
    arrivals: AtomicU64,
}

#[derive(Default)]
struct Outgoing {
    signals: Vec<Signal>,
    bytes: usize,
    /// Number of the last row that was stored.
    last: i64,
}

impl Signals {
    pub(super) fn new(node: NodeNumber) -> Signals {
        Signals {
            node,
            outgoing: Mutex::default(),
            publish: Notify::new(),
            arrived: Notify::new(),
            listening: AtomicBool::new(false),
            read: Mutex::default(),
            gone: Mutex::default(),
            missed: AtomicBool::new(false),
            read_at: Mutex::new(Instant::now()),
            arrivals: AtomicU64::new(0),
        }
    }

    /// Makes this node read everything again, as after a lost signal.
    pub(super) fn read_everything_again(&self) {
        self.missed.store(true, Ordering::Relaxed);
        self.arrived.notify_one();
    }

    /// A poisoned lock is ignored: no code under the locks leaves a part of a change.
    fn outgoing(&self) -> MutexGuard<'_, Outgoing> {
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self) -> MutexGuard<'_, HashMap<i64, i64>> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a signal. Signals that say the same are merged.
    pub(super) fn push(&self, signal: Signal) {
        let mut outgoing = self.outgoing();
        if outgoing.signals.len() >= WAITING || outgoing.bytes >= WAITING_BYTES {
            (outgoing.signals, outgoing.bytes) = (vec![Signal::Lost], 0);
        }
        outgoing.bytes += match &signal {
            Signal::Delta { text, .. } | Signal::Notice { text, .. } => text.len(),
            Signal::Changed { children, .. } => {
                children.iter().map(|child| child.title.as_ref().map_or(0, String::len)).sum()
            }
            _ => 0,
        };
        let first = outgoing.signals.is_empty();
        outgoing.signals.push(signal);
        drop(outgoing);
        if first {
            self.publish.notify_one();
        }
    }

    /// Locked after `read`.
    fn gone(&self) -> MutexGuard<'_, HashMap<i64, i64>> {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the nodes whose signals are read. Those of a new node are read from its first one.
    pub(super) fn set_peers(&self, peers: &HashSet<i64>) {
        let (mut read, mut gone) = (self.read(), self.gone());
        if gone.len() > REMEMBERED {
            gone.clear();
        }
        gone.extend(read.extract_if(|node, _| !peers.contains(node)));
        drop((read, gone));
        peers.iter().for_each(|peer| self.add_peer(*peer));
    }

    /// Adds a node. A node without others sends no signals, so the first one is told that it may have missed some.
    fn add_peer(&self, peer: i64) {
        let mut read = self.read();
        let was_alone = read.is_empty();
        read.entry(peer).or_insert_with(|| self.gone().remove(&peer).unwrap_or(0));
        drop(read);
        if was_alone {
            self.arrivals.fetch_add(1, Ordering::Relaxed);
            self.push(Signal::Lost);
        }
    }

    /// Skips the signals that others stored before this node was there.
    pub(super) fn begin_after(&self, last: HashMap<i64, i64>) {
        self.read().extend(last);
    }

    /// Stores signals until the store is closed.
    pub(super) async fn run_publisher(self: Arc<Self>, connections: Connections) {
        loop {
            self.publish.notified().await;
            tokio::time::sleep(GATHER).await;
            let (signals, number) = {
                let mut outgoing = self.outgoing();
                if outgoing.signals.is_empty() {
                    continue;
                }
                outgoing.last += 1;
                outgoing.bytes = 0;
                (std::mem::take(&mut outgoing.signals), outgoing.last)
            };
            match connections.write_soon(self.row(number, merge(signals))).await {
                Ok(_) => {}
                Err(Failure::Closed) => return,
                Err(failure) => {
                    tracing::debug!(%failure, "signals to other nodes are lost");
                    // The others notice a gap only at the next row, and there may be none for long.
                    self.push(Signal::Lost);
                    tokio::time::sleep(PUBLISH_AGAIN).await;
                }
            }
        }
    }

    /// Returns the statements that store signals and notify the other nodes.
    fn row(&self, number: i64, signals: Vec<Signal>) -> Vec<Statement> {
        let body = serde_json::to_string(&signals).unwrap_or_default();
        let insert = "INSERT INTO signals (node, no, body) VALUES ($1, $2, $3)";
        let notify = format!("SELECT pg_notify('{CHANNEL}', $1)");
        vec![
            Statement::new(insert).with(self.node.0).with(number).text(&body),
            Statement::new(notify).text(&self.node.0.to_string()),
        ]
    }

    /// Returns the statements that tell the others that this node gives up its lease.
    pub(super) fn leaving(&self) -> Vec<Statement> {
        let number = {
            let mut outgoing = self.outgoing();
            outgoing.last += 1;
            outgoing.last
        };
        self.row(number, vec![Signal::Left])
    }

    /// Waits for signals of other nodes.
    pub(super) async fn receive(&self, connections: &Connections) -> Result<Vec<Signal>, Failure> {
        loop {
            let mut signals = match self.read_new(connections).await {
                Ok(signals) => signals,
                Err(failure) => {
                    // Rows do not survive a crash of the database.
                    self.missed.store(true, Ordering::Relaxed);
                    return Err(failure);
                }
            };
            // Only when the database answers again, because each loss makes the node read everything again.
            let missed = self.missed.swap(false, Ordering::Relaxed);
            if self.was_away() || missed {
                signals.insert(0, Signal::Lost);
            }
            signals.dedup_by(|one, before| (&*one, &*before) == (&Signal::Lost, &Signal::Lost));
            if !signals.is_empty() {
                return Ok(signals);
            }
            let poll = if self.listening.load(Ordering::Relaxed) { SLOW_POLL } else { POLL };
            tokio::select! {
                () = self.arrived.notified() => {}
                () = tokio::time::sleep(poll) => {}
            }
        }
    }

    /// Notes that rows were read. Returns true if the last time was so long ago that some may be gone, because this
    /// node was frozen or cut off from the database.
    fn was_away(&self) -> bool {
        let mut read_at = self.read_at.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *read_at, Instant::now()).elapsed() > READ_WITHIN
    }

    async fn read_new(&self, connections: &Connections) -> Result<Vec<Signal>, Failure> {
        let (nodes, last): (Vec<i64>, Vec<i64>) =
            self.read().iter().map(|(node, last)| (*node, *last)).unzip();
        if nodes.is_empty() {
            return Ok(Vec::new());
        }
        let sql = "SELECT k.node, s.no, s.body FROM unnest($1::bigint[], $2::bigint[]) AS k(node, last), \
                   LATERAL (SELECT no, body FROM signals WHERE node = k.node AND no > k.last ORDER BY no LIMIT $3) AS s \
                   ORDER BY k.node, s.no";
        let rows = connections.read_one(Statement::new(sql).with(nodes).with(last).with(ROWS)).await?;
        let mut signals = Vec::new();
        let mut read = self.read();
        for row in &rows {
            let (node, number, body): (i64, i64, &str) = (get(row, 0)?, get(row, 1)?, get(row, 2)?);
            // A node that is gone meanwhile is not needed any more.
            let Some(last) = read.get_mut(&node) else { continue };
            if number > *last + 1 {
                signals.push(Signal::Lost);
            }
            *last = number;
            // A newer release may send signals that this one does not know.
            match serde_json::from_str::<Vec<Signal>>(body) {
                Ok(of_row) => signals.extend(of_row),
                Err(_) => signals.push(Signal::Lost),
            }
        }
        Ok(signals)
    }

    /// Keeps a connection for notifications open. `address` is a direct connection to the database.
    pub(super) async fn listen(self: Arc<Self>, address: Address, others: Connections) {
        let mut told = false;
        loop {
            let pause = match self.listen_once(&address, &others).await {
                Ok(Listened::Lost) => RECONNECT,
                Ok(Listened::Useless) => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::info!(
                            "no notifications arrive from the database, probably because of a pooler: the node polls for \
                             signals of other nodes. store.listen_url can name a direct connection"
                        );
                    }
                    RECONNECT_USELESS
                }
                Err(error) => {
                    tracing::debug!(%error, "the connection for notifications failed");
                    RECONNECT
                }
            };
            if self.listening.swap(false, Ordering::Relaxed) {
                // The database may have crashed, and signals do not survive that.
                self.read_everything_again();
            }
            self.arrived.notify_one();
            tokio::time::sleep(pause).await;
        }
    }

    async fn listen_once(
        &self,
        address: &Address,
        others: &Connections,
    ) -> Result<Listened, tokio_postgres::Error> {
        let (client, mut connection) = address.open().await?;
        let (sender, mut notifications) = mpsc::channel(NOTIFICATIONS);
        let driver = tokio::spawn(async move {
            while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
                if let AsyncMessage::Notification(notification) = message {
                    // If it is full, the receiver is going to look anyway.
                    sender.try_send(notification.payload().to_owned()).ok();
                }
            }
        });
        let _ends_with_this = AbortOnDrop(driver.abort_handle());
        client.batch_execute(&format!("LISTEN {CHANNEL}")).await?;
        let probe = format!("SELECT pg_notify('{CHANNEL}', $1)");
        let probe = Statement::new(probe).text(&self.node.0.to_string());
        if others.write_soon(vec![probe]).await.is_err() {
            return Ok(Listened::Lost);
        }
        match tokio::time::timeout(PROBE, notifications.recv()).await {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(Listened::Lost),
            Err(_) => return Ok(Listened::Useless),
        }
        // Nodes may have come and gone while no notifications arrived.
        self.arrivals.fetch_add(1, Ordering::Relaxed);
        self.listening.store(true, Ordering::Relaxed);
        self.arrived.notify_one();
        while let Some(payload) = notifications.recv().await {
            let Ok(node) = payload.parse::<i64>() else { continue };
            if node != self.node.0 {
                // It may be a node that has just been started.
                self.add_peer(node);
                self.arrived.notify_one();
            }
        }
        Ok(Listened::Lost)
    }

    /// Behaves as if nothing had been read for long.
    #[cfg(test)]
    pub(super) fn pretend_away(&self) {
        let long_ago = Instant::now().checked_sub(READ_WITHIN * 2).unwrap();
        *self.read_at.lock().unwrap() = long_ago;
    }

    #[cfg(test)]
    pub(super) fn is_listening(&self) -> bool {
        self.listening.load(Ordering::Relaxed)
    }

    /// Returns true if another node is known.
    pub(super) fn has_peers(&self) -> bool {
        !self.read().is_empty()
    }

    /// Returns the other nodes that are known.
    pub(super) fn peers(&self) -> Vec<i64> {
        self.read().keys().copied().collect()
    }

    /// See [`Fleet::alone_since`](crate::store::Fleet::alone_since). The start of a node is noticed only while
    /// notifications arrive.
    pub(super) fn alone_since(&self) -> Option<u64> {
        let arrivals = self.arrivals.load(Ordering::Relaxed);
        (self.listening.load(Ordering::Relaxed) && !self.has_peers()).then_some(arrivals)
    }
}

/// The reason why a connection for notifications ended.
enum Listened {
    Lost,
    /// No notification arrives on it.
    Useless,
}

struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Merges signals: the changes of a thread that follow each other with no delta of it in between, parts of the same
/// answer, and work of the same queue.
fn merge(signals: Vec<Signal>) -> Vec<Signal> {
    let mut merged: Vec<Signal> = Vec::with_capacity(signals.len());
    // Position of the last change or delta of each thread.
    let mut positions = HashMap::new();
    let mut queues = BTreeSet::new();
    for signal in signals {
        match signal {
            Signal::Work { queue } if !queues.insert(queue.clone()) => {}
            Signal::Changed { thread, status, questions, views, children } => {
                let known = positions.get(&thread).map(|at: &usize| &mut merged[*at]);
                if let Some(Signal::Changed {
                    status: newest,
                    questions: asked,
                    views: shown,
                    children: spawned,
                    ..
                }) = known
                {
                    *newest = status;
                    *asked |= questions;
                    shown.extend(views);
                    let room = MAX_CHILDREN.saturating_sub(spawned.len());
                    spawned.extend(children.into_iter().take(room));
                } else {
                    positions.insert(thread, merged.len());
                    merged.push(Signal::Changed { thread, status, questions, views, children });
                }
            }
            Signal::Delta { thread, turn, attempt, text } => {
                let known = positions.get(&thread).map(|at: &usize| &mut merged[*at]);
                match known {
                    Some(Signal::Delta { turn: of, attempt: number, text: before, .. })
                        if (*of, *number) == (turn, attempt) =>
                    {
                        before.push_str(&text);
                    }
                    _ => {
                        positions.insert(thread, merged.len());
                        merged.push(Signal::Delta { thread, turn, attempt, text });
                    }
                }
            }
            other => merged.push(other),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use rap_agent::Status;

    use super::*;
    use crate::store::{ThreadKey, WorkKind, WorkQueue};

    #[test]
    fn signals_of_a_thread_are_merged_in_order() {
        let thread = ThreadKey::new(1);
        let changed_with = |status, children: &[&str]| Signal::Changed {
            thread,
            status,
            questions: false,
            views: BTreeSet::new(),
            children: children.iter().map(|id| child(id)).collect(),
        };
        let changed = |status| changed_with(status, &[]);
        let delta = |turn, text: &str| Signal::Delta { thread, turn, attempt: 1, text: text.into() };
        let other = Signal::Delta { thread: ThreadKey::new(2), turn: 1, attempt: 1, text: "x".into() };
        let queue = WorkQueue { kind: WorkKind::Ask, destination: "model".into() };
        let work = || Signal::Work { queue: queue.clone() };
        let signals = vec![
            changed(Status::Running),
            delta(1, "Hel"),
            other.clone(),
            work(),
            delta(1, "lo"),
            changed_with(Status::Waiting, &["a"]),
            changed_with(Status::Idle, &["b", "c"]),
            work(),
            delta(2, "next"),
        ];
        let expected = [
            changed(Status::Running),
            delta(1, "Hello"),
            other,
            work(),
            changed_with(Status::Idle, &["a", "b", "c"]),
            delta(2, "next"),
        ];
        assert_eq!(merge(signals), expected);
        let many: Vec<String> = (0..MAX_CHILDREN).map(|number| number.to_string()).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let bounded = merge(vec![changed_with(Status::Idle, &["x"]), changed_with(Status::Idle, &many)]);
        assert!(matches!(&bounded[..], [Signal::Changed { children, .. }] if children.len() == MAX_CHILDREN));
    }

    fn child(id: &str) -> rap_api::ChildEvent {
        let (call_id, tool) = ("c1".to_owned(), "spawn_thread".to_owned());
        rap_api::ChildEvent { thread_id: id.to_owned(), call_id, tool, title: None }
    }

    /// The signal as releases before the children wrote it, and as this one writes it without any.
    #[test]
    fn a_change_without_children_is_read_from_and_written_for_earlier_releases() {
        let text = r#"[{"c":{"thread":1,"status":"idle","questions":false,"views":[]}}]"#;
        let signals: Vec<Signal> = serde_json::from_str(text).unwrap();
        assert!(matches!(&signals[..], [Signal::Changed { children, .. }] if children.is_empty()));
        assert_eq!(serde_json::to_string(&signals).unwrap(), text);
    }

    #[test]
    fn too_many_waiting_signals_are_replaced_by_the_news_that_they_are_lost() {
        let signals = Signals::new(NodeNumber(1));
        for _ in 0..WAITING + 1 {
            signals.push(Signal::Revoked);
        }
        let outgoing = signals.outgoing();
        assert_eq!(outgoing.signals, [Signal::Lost, Signal::Revoked]);
    }
}
