//! Close and cancel notifications, sent once to every configured tool server.
//!
//! Notifications are never stored, and nothing waits for them. Each server has its own queue and slots, so that a
//! server that hangs delays no other, and within a queue sessions take turns. Close notifications are sent before
//! cancellations and never dropped in favour of one. If a queue is full, the session that has most in it loses first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use rap_protocol::{CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, CallId, CancelToolCall, CloseThread, ThreadId};

use super::Engine;
use super::dispatch::HeldSlots;
use super::dispatch::fair_queue::{Bounds, FairQueue};
use crate::settings::ToolServer;
use crate::store::{DeliveryKind, DeliveryOutcome, DeliveryRecord, SessionKey, Signal, Thread, ThreadKey};
use crate::world::{MessageKind, To};

/// Maximum number of concurrent notifications to one server.
const SLOTS: usize = 64;
/// Maximum number of queued notifications for one server. Beyond it, cancellations are dropped first.
const MAX_QUEUED: usize = 4096;
/// Reasons for dropping a notification, as recorded in the delivery log.
const FULL: &str = "too many notifications are queued for this server";
const STOPPED: &str = "the runtime stopped before it was sent";
/// Statuses with which a server says that it has no such endpoint.
const NO_ENDPOINT: [u16; 3] = [404, 405, 501];

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Notification {
    pub(super) session: SessionKey,
    pub(super) thread: ThreadKey,
    pub(super) thread_id: ThreadId,
    /// The cancelled call. `None` means that the thread is closed.
    pub(super) call: Option<CallId>,
    /// Calls whose cancellations are sent after the close notification.
    pub(super) cancelled: Vec<CallId>,
}

impl Notification {
    fn path(&self) -> &'static str {
        if self.call.is_some() { CANCEL_TOOL_CALL_PATH } else { CLOSE_THREAD_PATH }
    }

    /// Returns the cancellations that follow a close notification.
    fn cancellations(&self) -> impl Iterator<Item = Notification> + '_ {
        self.cancelled.iter().map(|call| Notification {
            call: Some(call.clone()),
            cancelled: Vec::new(),
            ..self.clone()
        })
    }

    fn body(&self) -> Bytes {
        let thread_id = self.thread_id.clone();
        let body = match &self.call {
            Some(call) => serde_json::to_vec(&CancelToolCall { thread_id, tool_call_id: call.clone() }),
            None => serde_json::to_vec(&CloseThread { thread_id }),
        };
        body.expect("bug: a notification is JSON").into()
    }
}

/// Notification queues by server URL.
pub(super) struct Notifications {
    servers: BTreeMap<String, Mutex<ServerQueue>>,
}

struct ServerQueue {
    slots: HeldSlots,
    /// Paths that the server does not have.
    missing: BTreeSet<&'static str>,
    closings: Queued,
    cancellations: Queued,
}

type Queued = FairQueue<SessionKey, Notification>;

impl Default for ServerQueue {
    fn default() -> Self {
        let queued = || FairQueue::new(Bounds { items: MAX_QUEUED, per_session: MAX_QUEUED });
        ServerQueue {
            slots: HeldSlots::new(SLOTS),
            missing: BTreeSet::new(),
            closings: queued(),
            cancellations: queued(),
        }
    }
}

impl ServerQueue {
    /// Adds a notification. Returns the one that was dropped if the queue was full.
    fn push(&mut self, notification: Notification) -> Option<Notification> {
        let is_full = self.closings.len() + self.cancellations.len() >= MAX_QUEUED;
        let dropped = match notification.call {
            _ if !is_full => None,
            None if !self.cancellations.is_empty() => self.cancellations.longest(),
            None => longer_than(&self.closings, notification.session),
            Some(_) => longer_than(&self.cancellations, notification.session),
        };
        let dropped = match dropped {
            None if is_full => return Some(notification),
            None => None,
            Some((session, _)) => {
                self.cancellations.take_newest(session).or_else(|| self.closings.take_newest(session))
            }
        };
        let queue = if notification.call.is_some() { &mut self.cancellations } else { &mut self.closings };
        queue.push_unbounded(notification.session, notification);
        dropped
    }

    /// Takes everything that is queued.
    fn take_all(&mut self) -> Vec<Notification> {
        let closings = std::iter::from_fn(|| self.closings.pop_if(|_| true));
        let cancellations = std::iter::from_fn(|| self.cancellations.pop_if(|_| true));
        closings.chain(cancellations).map(|(_, notification)| notification).collect()
    }

    /// Takes the next notification and a slot, if one is free.
    fn next(&mut self) -> Option<Notification> {
        let slots = &self.slots;
        let next = self.closings.pop_if(|session| slots.admits(session));
        let (session, next) = next.or_else(|| self.cancellations.pop_if(|session| slots.admits(session)))?;
        self.slots.take(session);
        Some(next)
    }
}

/// Returns the session that has most in a queue, if it has more than another one.
fn longer_than(queue: &Queued, session: SessionKey) -> Option<(SessionKey, usize)> {
    queue.longest().filter(|(_, length)| *length > queue.count(session) + 1)
}

impl Notifications {
    pub(super) fn new(servers: &[ToolServer]) -> Notifications {
        let servers = servers.iter().map(|server| (server.url.clone(), Mutex::default())).collect();
        Notifications { servers }
    }

    fn of(&self, server: &str) -> Option<MutexGuard<'_, ServerQueue>> {
        // No code under the lock can leave a queue half changed.
        self.servers.get(server).map(|queue| queue.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns true if a notification is queued or in progress.
    pub(super) fn has_work(&self) -> bool {
        let has_work = |queue: &ServerQueue| {
            queue.slots.busy > 0 || !queue.closings.is_empty() || !queue.cancellations.is_empty()
        };
        self.servers.values().any(|queue| has_work(&queue.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Returns the number of notifications in progress.
    pub(super) fn in_progress(&self) -> usize {
        let busy =
            |queue: &Mutex<ServerQueue>| queue.lock().unwrap_or_else(PoisonError::into_inner).slots.busy;
        self.servers.values().map(busy).sum()
    }
}

impl Engine {
    pub(super) fn notify_cancel(self: &Arc<Self>, thread: &Thread, call: CallId) {
        self.notify(thread, Some(call), Vec::new());
    }

    /// Notifies every server that the thread is closed, then that its calls are cancelled.
    pub(super) fn notify_close(self: &Arc<Self>, thread: &Thread, calls: Vec<CallId>) {
        self.notify(thread, None, calls);
    }

    // Argued: TC-02, CN-02, TC-16, CN-18 a separate task sends each; nothing waits for it or depends on its outcome
    // Argued: TC-07, CN-07 only a failure is stored, and nothing is sent again
    fn notify(self: &Arc<Self>, thread: &Thread, call: Option<CallId>, cancelled: Vec<CallId>) {
        let Thread { session, key, id, .. } = thread;
        let (session, thread, thread_id) = (*session, *key, id.clone());
        let notification = Notification { session, thread, thread_id, call, cancelled };
        let (here, elsewhere): (Vec<&ToolServer>, Vec<_>) =
            self.settings.tool_servers.iter().partition(|server| self.hosts(&server.url));
        for server in here {
            self.queue_notification(server, notification.clone());
        }
        if !elsewhere.is_empty() {
            let Notification { session, thread, thread_id, call, cancelled } = notification;
            self.tell_peers(|| Signal::Notify { session, thread, thread_id, call, cancelled });
        }
    }

    /// Notifies the tool servers whose host this node is, on behalf of another node.
    pub(super) fn notify_hosted(self: &Arc<Self>, notification: Notification) {
        let started = self.settings.tool_servers.iter().filter(|server| server.started.is_some());
        for server in started.filter(|server| self.hosts(&server.url)) {
            self.queue_notification(server, notification.clone());
        }
    }

    fn queue_notification(self: &Arc<Self>, server: &ToolServer, notification: Notification) {
        let Some(mut queue) = self.notifications.of(&server.url) else { return };
        let dropped = queue.push(notification);
        let next = queue.next();
        drop(queue);
        self.record_dropped(server, dropped, FULL);
        if let Some(next) = next {
            let (engine, server) = (Arc::clone(self), server.clone());
            self.spawn(async move { engine.send_notifications(&server, next).await });
        }
    }

    /// Sends notifications to a server, one after the other, until its queue is empty.
    async fn send_notifications(&self, server: &ToolServer, first: Notification) {
        let mut next = Some(first);
        while let Some(notification) = next {
            self.send_notification(server, &notification).await;
            let Some(mut queue) = self.notifications.of(&server.url) else { return };
            let dropped: Vec<Notification> =
                notification.cancellations().filter_map(|cancellation| queue.push(cancellation)).collect();
            queue.slots.release(notification.session);
            next = queue.next();
            drop(queue);
            self.record_dropped(server, dropped, FULL);
        }
    }

    /// Drops the notifications that were not sent before the runtime stopped. They are never sent again.
    pub(super) fn drop_unsent_notifications(&self) {
        for server in &self.settings.tool_servers {
            let Some(mut queue) = self.notifications.of(&server.url) else { continue };
            let unsent = queue.take_all();
            drop(queue);
            if !unsent.is_empty() {
                tracing::warn!(
                    server = server.url,
                    count = unsent.len(),
                    "notifications were dropped because the runtime stopped"
                );
            }
            self.record_dropped(server, unsent, STOPPED);
        }
    }

    fn record_dropped(
        &self,
        server: &ToolServer,
        dropped: impl IntoIterator<Item = Notification>,
        why: &str,
    ) {
        for notification in dropped {
            for dropped in notification.cancellations().chain([notification.clone()]) {
                self.record_notification(server, &dropped, DeliveryOutcome::Dropped, why.into());
            }
        }
    }

    async fn send_notification(&self, server: &ToolServer, notification: &Notification) {
        let (outcome, detail) = match server.at(notification.path()) {
            Err(why) => (DeliveryOutcome::GivenUp, why),
            Ok(url) => {
                let kind = if notification.call.is_some() { MessageKind::Cancel } else { MessageKind::Close };
                let to = To::new(&url, Some(&server.url));
                match self.world.http.post(kind, to, notification.body()).await {
                    Ok(reply) if NO_ENDPOINT.contains(&reply.status) => {
                        return self.note_missing(server, notification.path(), reply.status);
                    }
                    Ok(reply) if (200..300).contains(&reply.status) => {
                        if let Some(mut queue) = self.notifications.of(&server.url) {
                            queue.missing.remove(notification.path());
                        }
                        (DeliveryOutcome::Delivered, String::new())
                    }
                    Ok(reply) => (DeliveryOutcome::Refused, format!("answered {}", reply.status)),
                    Err(error) => (DeliveryOutcome::GivenUp, error.to_string()),
                }
            }
        };
        self.record_notification(server, notification, outcome, detail);
    }

    /// Remembers that a server has no endpoint for a kind of notifications. The delivery log has one record of it, however
    /// many notifications it concerns.
    fn note_missing(&self, server: &ToolServer, path: &'static str, status: u16) {
        let known = self.notifications.of(&server.url).is_none_or(|mut queue| !queue.missing.insert(path));
        self.metrics.count_delivery(DeliveryKind::Notification, DeliveryOutcome::Refused);
        if known {
            return;
        }
        self.record_delivery(DeliveryRecord {
            kind: DeliveryKind::Notification,
            thread: None,
            thread_id: None,
            call: None,
            server: Some(server.url.clone()),
            topic: path.trim_start_matches('/').to_owned(),
            outcome: DeliveryOutcome::Refused,
            attempts: 1,
            detail: format!("answered {status}: the server has no {path}; this is recorded once"),
            at: self.now(),
        });
    }

    fn record_notification(
        &self,
        server: &ToolServer,
        notification: &Notification,
        outcome: DeliveryOutcome,
        detail: String,
    ) {
        self.delivery_ended(DeliveryKind::Notification, outcome, 1, || DeliveryRecord {
            kind: DeliveryKind::Notification,
            thread: Some(notification.thread),
            thread_id: Some(notification.thread_id.clone()),
            call: notification.call.clone(),
            server: Some(server.url.clone()),
            topic: notification.path().trim_start_matches('/').to_owned(),
            outcome,
            attempts: 1,
            detail,
            at: self.now(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notification(session: u8, call: Option<u32>) -> Notification {
        of_thread(session, 0, call)
    }

    fn of_thread(session: u8, thread: u32, call: Option<u32>) -> Notification {
        let key = ThreadKey::from_bytes([0, 0, 0, 0, 0, 0, 0, session]);
        Notification {
            session: SessionKey::of_root(key),
            thread: key,
            thread_id: ThreadId::new(format!("t{thread}")).unwrap(),
            call: call.map(|call| CallId::new(format!("c{call}")).unwrap()),
            cancelled: Vec::new(),
        }
    }

    /// Returns the session, the thread and the call of a notification.
    fn shown(notification: &Notification) -> String {
        let call = notification.call.as_ref().map_or("closed", CallId::as_str);
        format!("{} {} {call}", notification.thread.to_bytes()[7], notification.thread_id)
    }

    /// Proves: TC-13, CN-15
    #[test]
    fn close_notifications_are_sent_first_and_not_dropped_for_cancellations() {
        let mut queue = ServerQueue::default();
        for call in 0..MAX_QUEUED as u32 {
            assert!(queue.push(notification(1, Some(call))).is_none());
        }
        let dropped = queue.push(notification(1, Some(9999))).unwrap();
        assert_eq!(shown(&dropped), "1 t0 c9999");
        let dropped = queue.push(notification(1, None)).unwrap();
        assert_eq!(shown(&dropped), format!("1 t0 c{}", MAX_QUEUED - 1));
        let sent: Vec<String> = (0..2).map(|_| shown(&queue.next().unwrap())).collect();
        assert_eq!(sent, ["1 t0 closed", "1 t0 c0"]);
    }

    #[test]
    fn concurrent_notifications_to_a_server_are_bounded() {
        let mut queue = ServerQueue::default();
        for session in 0..2 * SLOTS as u8 {
            queue.push(notification(session, None));
        }
        let started: Vec<Notification> = std::iter::from_fn(|| queue.next()).collect();
        assert_eq!(started.len(), SLOTS);
        queue.slots.release(started[0].session);
        assert_eq!(std::iter::from_fn(|| queue.next()).count(), 1);
    }

    #[test]
    fn sessions_take_turns_and_leave_slots_to_others() {
        let mut queue = ServerQueue::default();
        for thread in 0..2 * SLOTS as u32 {
            queue.push(of_thread(1, thread, None));
        }
        let started = std::iter::from_fn(|| queue.next()).count();
        assert!(started < SLOTS, "one session holds all slots");
        // Another session starts at once, although the first one has more in the queue.
        queue.push(notification(2, None));
        assert_eq!(shown(&queue.next().unwrap()), "2 t0 closed");
        queue.push(notification(3, Some(7)));
        assert_eq!(shown(&queue.next().unwrap()), "3 t0 c7");
        assert!(queue.next().is_none());
    }

    #[test]
    fn the_session_that_fills_a_queue_loses_its_own_notifications() {
        for call in [None, Some(7)] {
            let mut queue = ServerQueue::default();
            for thread in 0..MAX_QUEUED as u32 {
                assert!(queue.push(of_thread(1, thread, call)).is_none());
            }
            let dropped = queue.push(of_thread(2, 0, call)).unwrap();
            assert_eq!(dropped.session, notification(1, None).session, "{}", shown(&dropped));
            let dropped = queue.push(of_thread(1, 9999, call)).unwrap();
            assert_eq!(dropped.thread_id.as_str(), "t9999");
            let left = queue.take_all();
            assert_eq!(left.len(), MAX_QUEUED);
            assert!(left.contains(&of_thread(2, 0, call)));
        }
    }
}
