//! Close and cancel notifications, sent once to every configured tool server.
//!
//! Notifications are never stored, and nothing waits for them. Each server has its own queue and slots, so that a
//! server that hangs delays no other. Close notifications are sent before cancellations and never dropped in favour of
//! one.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use rap_protocol::{CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, CallId, CancelToolCall, CloseThread, ThreadId};
use url::Url;

use super::Engine;
use crate::settings::ToolServer;
use crate::store::{DeliveryKind, DeliveryOutcome, DeliveryRecord, Thread, ThreadKey};
use crate::toolsets::authorization;
use crate::world::Purpose;

/// Maximum number of concurrent notifications to one server.
const SLOTS: usize = 64;
/// Maximum number of queued notifications for one server. Beyond it, cancellations are dropped first.
const MAX_QUEUED: usize = 4096;
/// Reasons for dropping a notification, as recorded in the delivery log.
const FULL: &str = "too many notifications are queued for this server";
const STOPPED: &str = "the runtime stopped before it was sent";

#[derive(Clone)]
pub(super) struct Notification {
    thread: ThreadKey,
    thread_id: ThreadId,
    /// The cancelled call. `None` means that the thread is closed.
    call: Option<CallId>,
    /// Calls whose cancellations are sent after the close notification.
    cancelled: Vec<CallId>,
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

#[derive(Default)]
struct ServerQueue {
    busy: usize,
    closings: VecDeque<Notification>,
    cancellations: VecDeque<Notification>,
}

impl ServerQueue {
    /// Adds a notification. Returns the one that was dropped if the queue was full.
    fn push(&mut self, notification: Notification) -> Option<Notification> {
        let full = self.closings.len() + self.cancellations.len() >= MAX_QUEUED;
        match notification.call {
            Some(_) if full => return Some(notification),
            Some(_) => self.cancellations.push_back(notification),
            None if full => {
                let Some(dropped) = self.cancellations.pop_front() else { return Some(notification) };
                self.closings.push_back(notification);
                return Some(dropped);
            }
            None => self.closings.push_back(notification),
        }
        None
    }

    /// Takes the next notification and a slot, if one is free.
    fn take_all(&mut self) -> Vec<Notification> {
        let closings = std::mem::take(&mut self.closings);
        closings.into_iter().chain(std::mem::take(&mut self.cancellations)).collect()
    }

    fn next(&mut self) -> Option<Notification> {
        if self.busy >= SLOTS {
            return None;
        }
        let next = self.closings.pop_front().or_else(|| self.cancellations.pop_front())?;
        self.busy += 1;
        Some(next)
    }
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

    /// Returns the number of notifications in progress.
    pub(super) fn in_progress(&self) -> usize {
        self.servers.values().map(|queue| queue.lock().unwrap_or_else(PoisonError::into_inner).busy).sum()
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
        let notification = Notification { thread: thread.key, thread_id: thread.id.clone(), call, cancelled };
        for server in &self.settings.tool_servers {
            let Some(mut queue) = self.notifications.of(&server.url) else { continue };
            let dropped = queue.push(notification.clone());
            let next = queue.next();
            drop(queue);
            self.record_dropped(server, dropped, FULL);
            if let Some(next) = next {
                let (engine, server) = (Arc::clone(self), server.clone());
                self.spawn(async move { engine.send_notifications(&server, next).await });
            }
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
            queue.busy -= 1;
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
            self.record_notification(server, &notification, DeliveryOutcome::Dropped, why.into());
        }
    }

    async fn send_notification(&self, server: &ToolServer, notification: &Notification) {
        let (outcome, detail) = match Url::parse(&format!("{}{}", server.url, notification.path())) {
            Err(error) => {
                (DeliveryOutcome::GivenUp, format!("the URL of the tool server is not valid: {error}"))
            }
            Ok(url) => {
                let (headers, body) = (authorization(server), notification.body());
                match self.world.http.post(Purpose::Notify, &url, &headers, body).await {
                    Ok(reply) if (200..300).contains(&reply.status) => {
                        (DeliveryOutcome::Delivered, String::new())
                    }
                    Ok(reply) => (DeliveryOutcome::Refused, format!("answered {}", reply.status)),
                    Err(error) => (DeliveryOutcome::GivenUp, error.to_string()),
                }
            }
        };
        self.record_notification(server, notification, outcome, detail);
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

    fn notification(call: Option<u32>) -> Notification {
        let call = call.map(|call| CallId::new(format!("c{call}")).unwrap());
        Notification {
            thread: ThreadKey::from_bytes([0; 8]),
            thread_id: ThreadId::new("t").unwrap(),
            call,
            cancelled: Vec::new(),
        }
    }

    /// Proves: TC-13, CN-15
    #[test]
    fn close_notifications_are_sent_first_and_not_dropped_for_cancellations() {
        let mut queue = ServerQueue::default();
        for call in 0..MAX_QUEUED as u32 {
            assert!(queue.push(notification(Some(call))).is_none());
        }
        assert_eq!(
            queue.push(notification(Some(9999))).and_then(|dropped| dropped.call).unwrap().as_str(),
            "c9999"
        );
        assert_eq!(queue.push(notification(None)).and_then(|dropped| dropped.call).unwrap().as_str(), "c0");
        assert!(queue.next().unwrap().call.is_none());
        assert_eq!(queue.next().and_then(|next| next.call).unwrap().as_str(), "c1");
    }

    #[test]
    fn concurrent_notifications_to_a_server_are_bounded() {
        let mut queue = ServerQueue::default();
        for _ in 0..2 * SLOTS {
            queue.push(notification(None));
        }
        assert_eq!(std::iter::from_fn(|| queue.next()).count(), SLOTS);
        queue.busy -= 1;
        assert_eq!(std::iter::from_fn(|| queue.next()).count(), 1);
    }
}
