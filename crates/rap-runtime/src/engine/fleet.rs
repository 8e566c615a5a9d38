//! Cooperation with the other nodes of the database: the lease of this node, the signals of the others, and work that
//! is taken over.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::notify::Notification;
use super::{Engine, STORE_PAUSE};
use crate::hub::{Changes, LiveEvent};
use crate::store::{
    self, Activity, Fleet, Node, Renewal, Reservation, Reserve, Signal, Thread, ThreadKey, WorkKind,
};

/// Time that requests in progress have to end before the others may take them over, when this node is stopped.
const HAND_OVER_AFTER: Duration = Duration::from_millis(400);
/// Time limit for giving the lease back. Without that, the others take over when it has expired.
const LEAVE_WITHIN: Duration = Duration::from_secs(2);

/// Returns a function that reserves slots of the engine in `engine_cell`.
pub(super) fn reserve(engine_cell: &Arc<OnceLock<Weak<Engine>>>) -> Reserve {
    let engine_cell = Arc::clone(engine_cell);
    Box::new(move |queue, session, key| {
        let engine = engine_cell.get().and_then(Weak::upgrade)?;
        if engine.stop.is_cancelled() || !engine.hosts(&queue.destination) {
            return None;
        }
        if !engine.dispatcher.reserve(queue, session, key) {
            return None;
        }
        let (engine, key) = (Arc::downgrade(&engine), key.clone());
        Some(Reservation::new(move || {
            let Some(engine) = engine.upgrade() else { return };
            if let Some(queue) = engine.dispatcher.unreserve(&key) {
                engine.fill_slots(&queue);
            }
        }))
    })
}

impl Signal {
    pub(super) fn of_step(thread: ThreadKey, status: rap_agent::Status, changes: &Changes) -> Signal {
        let Changes { questions, views, children } = changes.clone();
        Signal::Changed { thread, status, questions, views, children }
    }
}

impl Engine {
    /// Sends a signal to the other nodes, if there are any.
    pub(crate) fn tell_peers(&self, signal: impl FnOnce() -> Signal) {
        if let Some(fleet) = self.store.fleet().filter(|fleet| fleet.has_peers()) {
            fleet.publish(signal());
        }
    }

    /// Returns true if other nodes may use the database.
    pub(crate) fn has_peers(&self) -> bool {
        self.store.fleet().is_some_and(Fleet::has_peers)
    }

    /// Returns true if no other node takes over work of this one.
    pub(super) fn holds_lease(&self) -> bool {
        self.store.fleet().is_none_or(|fleet| !fleet.has_peers() || fleet.holds_lease())
    }

    /// Returns false if requests about calls of this destination are the work of another node, because the process that
    /// has the calls is there.
    pub(crate) fn hosts(&self, destination: &str) -> bool {
        self.store.fleet().is_none_or(|fleet| fleet.hosts(destination))
    }

    /// Returns the numbers of requests in progress.
    pub(crate) fn activity(&self) -> Activity {
        let count = |wanted: WorkKind| {
            let in_progress = self.dispatcher.in_progress();
            in_progress.into_iter().find(|(kind, _)| *kind == wanted.as_str()).map_or(0, |(_, count)| count)
        };
        Activity { asking: count(WorkKind::Ask), invoking: count(WorkKind::Invoke) }
    }

    /// Lists the nodes of the database.
    pub(crate) async fn nodes(&self) -> Result<Vec<Node>, store::Error> {
        if let Some(fleet) = self.store.fleet() {
            return fleet.nodes().await;
        }
        let (url, activity) = (self.settings.own_url(), self.activity());
        let (started_at, seen_at) = (self.started_at, self.now());
        Ok(vec![Node { id: "1".into(), url, started_at, seen_at, activity }])
    }

    /// Renews the lease of this node, and takes over the work of nodes whose lease has run out.
    pub(super) async fn keep_lease(self: Arc<Self>) {
        loop {
            let Some(fleet) = self.store.fleet() else { return };
            let pause = match fleet.renew(self.activity()).await {
                Ok(Renewal { lapsed, peer_gone, next }) => {
                    if lapsed {
                        // Signals of the others may be gone, too.
                        self.read_everything_again(fleet).await;
                    }
                    if lapsed || peer_gone {
                        self.take_over();
                    }
                    next
                }
                Err(store::Error::Closed) => return,
                Err(error) => {
                    tracing::warn!(why = error.with_sources(), "the lease of this node cannot be renewed");
                    STORE_PAUSE.0 * 10
                }
            };
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                () = self.lease_due.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Finds out what signals of other nodes would have said: streams read again or end, and so do requests of clients
    /// whose token was revoked and model requests that are no longer needed.
    async fn read_everything_again(&self, fleet: &dyn Fleet) {
        self.hub.publish_missed();
        self.revocations.send_replace(());
        self.abandon_lost_model_requests(fleet).await;
    }

    /// Abandons the model requests that are no longer needed, or that another node has taken over, because the lease of
    /// this one had run out.
    async fn abandon_lost_model_requests(&self, fleet: &dyn Fleet) {
        let in_progress = self.dispatcher.model_requests();
        match fleet.lost_model_requests(in_progress).await {
            Ok(lost) => lost.iter().for_each(|key| _ = self.dispatcher.cancel(key)),
            Err(error) => {
                tracing::warn!(why = error.with_sources(), "the claims of this node cannot be read")
            }
        }
    }

    /// Looks for work of every kind.
    fn take_over(self: &Arc<Self>) {
        self.note_activity();
        self.tasks.spawn_on(Arc::clone(self).resume_work(), &self.handle);
        self.tasks.spawn_on(Arc::clone(self).resume_moves(), &self.handle);
        self.messages_due.notify_one();
        self.clock_due.notify_one();
    }

    /// Carries out the signals of other nodes.
    pub(super) async fn follow_peers(self: Arc<Self>) {
        loop {
            let Some(fleet) = self.store.fleet() else { return };
            let received = tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                received = fleet.receive() => received,
            };
            match received {
                Ok(signals) => self.carry_out_signals(fleet, signals).await,
                Err(store::Error::Closed) => return,
                Err(error) => {
                    tracing::debug!(why = error.with_sources(), "the signals of other nodes cannot be read");
                    tokio::time::sleep(STORE_PAUSE.0 * 10).await;
                }
            }
        }
    }

    async fn carry_out_signals(self: &Arc<Self>, fleet: &dyn Fleet, signals: Vec<Signal>) {
        let threads = self.listened_threads(fleet, &signals).await;
        for signal in signals {
            match signal {
                Signal::Changed { thread, status, questions, views, children } => {
                    if let Some(thread) = threads.get(&thread).cloned() {
                        let changes = Changes { questions, views, children };
                        self.hub.publish(thread.key, LiveEvent::ThreadChanged { thread, status, changes });
                    }
                }
                Signal::Delta { thread, turn, attempt, text } => {
                    self.hub.publish(thread, LiveEvent::Delta { turn, attempt, text: text.into() });
                }
                Signal::Notice { thread, text } => {
                    if let Some(thread) = threads.get(&thread).cloned() {
                        self.hub.publish(thread.key, LiveEvent::Notice { thread, text: text.into() });
                    }
                }
                Signal::Delivery { id } => self.hub.publish_to_all(LiveEvent::Delivery { id }),
                Signal::Work { queue } => {
                    self.dispatcher.check_store(&queue);
                    self.fill_slots(&queue);
                }
                Signal::Cancelled { key } => _ = self.dispatcher.cancel(&key),
                Signal::Revoked => self.revocations.send_replace(()),
                Signal::Notify { session, thread, thread_id, call, cancelled } => {
                    self.notify_hosted(Notification { session, thread, thread_id, call, cancelled });
                }
                Signal::Left => {
                    // Its tool servers need another host.
                    self.lease_due.notify_one();
                    self.take_over();
                }
                Signal::Lost => {
                    self.read_everything_again(fleet).await;
                    self.take_over();
                }
            }
        }
    }

    /// Returns the threads of signals that somebody listens to.
    async fn listened_threads(
        &self,
        fleet: &dyn Fleet,
        signals: &[Signal],
    ) -> HashMap<ThreadKey, Arc<Thread>> {
        if !self.hub.has_listeners() {
            return HashMap::new();
        }
        let key = |signal: &Signal| match signal {
            Signal::Changed { thread, .. } | Signal::Notice { thread, .. } => Some(*thread),
            _ => None,
        };
        let keys = self.hub.listened_to(signals.iter().filter_map(key).collect());
        if keys.is_empty() {
            return HashMap::new();
        }
        match fleet.threads_by_key(keys).await {
            Ok(threads) => threads.into_iter().map(|thread| (thread.key, thread)).collect(),
            Err(error) => {
                tracing::debug!(
                    why = error.with_sources(),
                    "threads that changed on other nodes cannot be read"
                );
                self.hub.publish_missed();
                HashMap::new()
            }
        }
    }

    /// Hands work over to other nodes. Requests that end within a short time are not sent again by another node.
    pub(super) async fn hand_over(&self, stop_within: Duration) {
        let Some(fleet) = self.store.fleet() else { return };
        let until = Instant::now() + HAND_OVER_AFTER.min(stop_within);
        if tokio::time::timeout_at(until, self.tasks.wait()).await.is_err() {
            tracing::debug!("work in progress is handed over to other nodes");
        }
        match tokio::time::timeout(LEAVE_WITHIN, fleet.leave()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(why = error.with_sources(), "the lease of this node was not given back");
            }
            Err(_) => {
                tracing::warn!("the lease of this node was not given back: the database does not answer")
            }
        }
    }
}
