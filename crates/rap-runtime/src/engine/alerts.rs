//! Alerts: tells people that a thread needs them, has failed or was closed.
//!
//! An alert is stored in the transaction of the step that made it and sent until its receiver accepts it, at least once, for
//! at most [`GIVE_UP_AFTER`]. Each attempt has the same id and body, so that a receiver can tell a repetition. Each
//! destination has a task and slots of its own, so that one that hangs delays no other.
//!
//! An alert names a thread and a state. It has no content of the conversation except the title, and no URL of a tool.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use rap_protocol::Timestamp;
use rap_protocol::retry::{Attempt, Next, Outcome, RetryPolicy, after_attempt};
use serde_json::json;

use super::Engine;
use crate::settings::AlertDestination;
use crate::store::{Alert, AlertRule, DeliveryKind, DeliveryRecord, ThreadRow, Visibility, outcome_after};
use crate::world::{MessageKind, To};

/// Maximum number of concurrent requests to one destination.
const SLOTS: usize = 8;
/// First and longest pause between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3600));
/// The longest pause with its jitter.
pub(super) const LONGEST_RETRY: Duration = Duration::from_secs(2 * 3600);
/// Time after which an alert that nobody accepted is deleted.
const GIVE_UP_AFTER: Duration = Duration::from_secs(3 * 24 * 3600);
/// Time after which an attempt whose node died is repeated. It is longer than the time limit of a request.
pub(super) const CLAIM: Duration = Duration::from_secs(20);
/// Longest time between two reads of the store. Another node may have stored an alert.
const LONGEST_SLEEP: Duration = Duration::from_secs(10);
/// Status with which a destination says that it does not exist any more.
const GONE: u16 = 410;

impl AlertDestination {
    /// Returns the rule by which the store makes alerts for this destination.
    pub(crate) fn rule(&self) -> AlertRule {
        AlertRule { destination: self.key(), on: self.on.clone() }
    }
}

impl Engine {
    /// Starts a task for each destination.
    pub(super) fn start_alerts(self: &Arc<Self>) {
        for index in 0..self.settings.notify.len() {
            self.tasks.spawn(Arc::clone(self).send_alerts(index));
        }
    }

    /// Wakes the tasks of all destinations, after a step that made an alert.
    pub(super) fn wake_alerts(&self) {
        self.alerts_due.iter().for_each(tokio::sync::Notify::notify_one);
    }

    async fn send_alerts(self: Arc<Self>, index: usize) {
        let destination = &self.settings.notify[index];
        let key = destination.key();
        loop {
            let now = self.now();
            let claimed = self.store.claim_alerts(&key, now, now.plus(CLAIM), SLOTS).await;
            let pause = match claimed {
                Ok(claimed) if claimed.alerts.is_empty() => {
                    let next = claimed.next.map_or(LONGEST_SLEEP, |at| at.since(now));
                    next.clamp(Duration::from_millis(50), LONGEST_SLEEP)
                }
                Ok(claimed) => {
                    let send = |alert| self.send_alert(destination, alert);
                    tokio::select! {
                        () = self.stop.cancelled() => return,
                        _ = join_all(claimed.alerts.into_iter().map(send)) => continue,
                    }
                }
                Err(error) => {
                    tracing::warn!(why = error.with_sources(), "alerts could not be read");
                    LONGEST_SLEEP
                }
            };
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = self.alerts_due[index].notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Makes one attempt to send an alert.
    async fn send_alert(&self, destination: &AlertDestination, alert: Alert) {
        let row = self.store.thread(&alert.thread, &Visibility::All).await.ok();
        let body = self.alert_body(&alert, row.as_ref());
        let key = destination.key();
        let to = To::new(&destination.url, Some(&key));
        let sent = self.world.http.post(MessageKind::Alert, to, body).await;
        let now = self.now();
        let attempt =
            Attempt { number: alert.attempts, since: alert.at, now, jitter: self.world.random.next() as u32 };
        let policy = RetryPolicy {
            first_pause: PAUSES.0,
            longest_pause: PAUSES.1,
            give_up_after: GIVE_UP_AFTER,
            attempts: u32::MAX,
        };
        let (next, detail) = match sent {
            Ok(reply) if (200..300).contains(&reply.status) => (Next::Done, String::new()),
            Ok(reply) if reply.status == GONE => (Next::Refused { status: GONE }, format!("answered {GONE}")),
            // A receiver that is not set up yet may answer anything.
            Ok(reply) => {
                let retry = Outcome::Answered { status: 503, retry_after: reply.retry_after };
                (after_attempt(retry, attempt, &policy), format!("answered {}", reply.status))
            }
            Err(error) => (after_attempt(Outcome::NoAnswer, attempt, &policy), error.to_string()),
        };
        let retry_at = match next {
            Next::Retry { at } => Some(at),
            _ => None,
        };
        if let Err(error) = self.store.settle_alert(alert.number, retry_at).await {
            // Its claim ends, and it is sent again.
            tracing::warn!(why = error.with_sources(), "the outcome of an alert could not be stored");
        }
        let outcome = outcome_after(next);
        self.delivery_ended(DeliveryKind::Alert, outcome, alert.attempts, || DeliveryRecord {
            kind: DeliveryKind::Alert,
            thread: row.as_ref().map(|row| row.thread.key),
            thread_id: Some(alert.thread.clone()),
            call: None,
            server: Some(destination.origin()),
            topic: format!("{} {}", alert.state, alert.number),
            outcome,
            attempts: alert.attempts,
            detail,
            at: now,
        });
    }

    /// Returns the body of an alert. It is the same in each attempt.
    fn alert_body(&self, alert: &Alert, row: Option<&ThreadRow>) -> Bytes {
        let thread = row.map(rap_api::Thread::from);
        let id = alert.thread.as_str();
        let url = format!("{}/threads/{id}", self.settings.public_url.trim_end_matches('/'));
        let data = json!({
            "thread_id": id,
            "root": thread.as_ref().map(|thread| &thread.root),
            "agent": thread.as_ref().map(|thread| &thread.agent),
            "user_id": thread.as_ref().and_then(|thread| thread.user_id.as_ref()),
            "title": thread.as_ref().and_then(|thread| thread.title.as_ref()),
            "status": alert.state,
            "why": alert.reason,
            "url": url,
        });
        let timestamp = rap_api::Time::from_millis(alert.at.0);
        let body = json!({"type": format!("thread.{}", alert.state), "timestamp": timestamp, "data": data});
        body.to_string().into()
    }

    /// Deletes alerts that nobody accepted in time.
    pub(super) async fn expire_alerts(&self) {
        let before = Timestamp(self.now().0.saturating_sub(GIVE_UP_AFTER.as_millis() as i64));
        if let Err(error) = self.store.expire_alerts(before).await {
            tracing::warn!(why = error.with_sources(), "old alerts could not be deleted");
        }
    }
}
