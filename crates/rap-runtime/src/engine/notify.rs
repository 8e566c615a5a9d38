//! Notifications: every configured tool server, one attempt each.
//!
//! They are never stored and nothing waits for them. Each server has its own queue and slots, so that one that hangs
//! delays no other. Closings go before cancellations and are never dropped for one.

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

/// Notifications to one server at a time.
const SLOTS: usize = 64;
/// Notifications that wait for one server; beyond it they are dropped, cancellations first.
const WAITING: usize = 4096;

/// One notification.
#[derive(Clone)]
pub(super) struct Notification {
    thread: ThreadKey,
    thread_id: ThreadId,
    /// The call that is cancelled; none if the thread is closed.
    call: Option<CallId>,
    /// Calls that are cancelled after the closing was sent.
    then: Vec<CallId>,
}

impl Notification {
    fn path(&self) -> &'static str {
        if self.call.is_some() { CANCEL_TOOL_CALL_PATH } else { CLOSE_THREAD_PATH }
    }

    /// The cancellations that follow a closing.
    fn followers(&self) -> impl Iterator<Item = Notification> + '_ {
        self.then.iter().map(|call| Notification {
            call: Some(call.clone()),
            then: Vec::new(),
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

/// The queues of all servers.
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
    /// Adds a notification. Returns the one that is dropped for lack of room.
    fn push(&mut self, notification: Notification) -> Option<Notification> {
        let full = self.closings.len() + self.cancellations.len() >= WAITING;
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

    /// Takes the next notification if a slot is free.
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

    /// Number of notifications in progress.
    pub(super) fn running(&self) -> usize {
        self.servers.values().map(|queue| queue.lock().unwrap_or_else(PoisonError::into_inner).busy).sum()
    }
}

impl Engine {
    pub(super) fn notify_cancel(self: &Arc<Self>, thread: &Thread, call: CallId) {
        self.notify(thread, Some(call), Vec::new());
    }

    /// Tells every server of a closing, and of the calls that it cancels.
    pub(super) fn notify_close(self: &Arc<Self>, thread: &Thread, calls: Vec<CallId>) {
        self.notify(thread, None, calls);
    }

    // Argued: TC-02, CN-02, TC-16, CN-18 a task of its own sends each; nobody waits for it or hears of its end
    // Argued: TC-07, CN-07 nothing is stored but that it failed, and nothing is repeated
    fn notify(self: &Arc<Self>, thread: &Thread, call: Option<CallId>, then: Vec<CallId>) {
        let notification = Notification { thread: thread.key, thread_id: thread.id.clone(), call, then };
        for server in &self.settings.tool_servers {
            let Some(mut queue) = self.notifications.of(&server.url) else { continue };
            let dropped = queue.push(notification.clone());
            let next = queue.next();
            drop(queue);
            self.dropped(server, dropped);
            if let Some(next) = next {
                let (engine, server) = (Arc::clone(self), server.clone());
                self.spawn(async move { engine.send_notifications(&server, next).await });
            }
        }
    }

    /// Sends notifications to a server, one after the other, while some wait.
    async fn send_notifications(&self, server: &ToolServer, first: Notification) {
        let mut next = Some(first);
        while let Some(notification) = next {
            self.send_notification(server, &notification).await;
            let Some(mut queue) = self.notifications.of(&server.url) else { return };
            let dropped: Vec<Notification> =
                notification.followers().filter_map(|follower| queue.push(follower)).collect();
            queue.busy -= 1;
            next = if self.stop.is_cancelled() { None } else { queue.next() };
            drop(queue);
            self.dropped(server, dropped);
        }
    }

    fn dropped(&self, server: &ToolServer, dropped: impl IntoIterator<Item = Notification>) {
        for notification in dropped {
            let why = "too many notifications wait for this server";
            self.notified(server, &notification, DeliveryOutcome::Dropped, why.into());
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
        self.notified(server, notification, outcome, detail);
    }

    fn notified(
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
            then: Vec::new(),
        }
    }

    /// Proves: TC-13, CN-15
    #[test]
    fn closings_go_first_and_are_not_dropped_for_cancellations() {
        let mut queue = ServerQueue::default();
        for call in 0..WAITING as u32 {
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
    fn a_server_has_a_bounded_number_of_notifications_at_a_time() {
        let mut queue = ServerQueue::default();
        for _ in 0..2 * SLOTS {
            queue.push(notification(None));
        }
        assert_eq!(std::iter::from_fn(|| queue.next()).count(), SLOTS);
        queue.busy -= 1;
        assert_eq!(std::iter::from_fn(|| queue.next()).count(), 1);
    }
}
