//! Delivery of users' answers, at least once, to the tool that asked the question.

use bytes::Bytes;
use rap_agent::Input;
use rap_io::client;
use rap_protocol::ChoiceAnswer;
use rap_protocol::retry::{Attempt, Next, Outcome, after_attempt};

use super::Engine;
use super::run::WorkOutcome;
use crate::store::{AnswerWork, DeliveryKind, DeliveryRecord, outcome_after};
use crate::toolsets::may_have_credentials;
use crate::world::{MessageKind, To};

impl Engine {
    pub(super) async fn deliver_answer(&self, work: &AnswerWork) -> WorkOutcome {
        let body = ChoiceAnswer { id: work.call.clone(), selected: work.selected };
        let body = Bytes::from(serde_json::to_vec(&body).expect("bug: an answer is JSON"));
        let sent = self.send_answer(work, body).await;
        let (outcome, detail) = match &sent {
            Ok(reply) => (
                Outcome::Answered { status: reply.status, retry_after: reply.retry_after },
                format!("answered {}", reply.status),
            ),
            Err(NotSent::NotRunning(why)) => (Outcome::NoAnswer, why.clone()),
            Err(NotSent::Failed(error)) => (Outcome::NoAnswer, error.to_string()),
        };
        let attempts = work.attempts.saturating_add(1);
        let jitter = self.world.random.next() as u32;
        let attempt = Attempt { number: attempts, since: work.since, now: self.now(), jitter };
        let next = match &sent {
            Err(NotSent::Failed(client::Error::Forbidden(_))) => Next::GaveUp,
            _ => after_attempt(outcome, attempt, &self.retry_policy()),
        };
        let delivery = outcome_after(next);
        self.delivery_ended(DeliveryKind::Answer, delivery, attempts, || DeliveryRecord {
            kind: DeliveryKind::Answer,
            thread: Some(work.thread.key),
            thread_id: Some(work.thread.id.clone()),
            call: Some(work.call.clone()),
            server: None,
            topic: work.number.to_string(),
            outcome: delivery,
            attempts,
            detail: detail.clone(),
            at: self.now(),
        });
        let why = match next {
            Next::Done => return WorkOutcome::AnswerEnded { failed: None, attempts },
            Next::Retry { at } => return WorkOutcome::Retry { at, attempts, outcome: detail },
            Next::Refused { status } => format!("answered {status}"),
            Next::GaveUp => match sent {
                Err(NotSent::Failed(error @ client::Error::Forbidden(_))) => error.to_string(),
                _ => format!("no success in {attempts} attempts"),
            },
        };
        let text = format!("Error: the user's answer could not be delivered to the tool: {why}");
        let failed = Some(Input::CallFailed { call: work.call.clone(), text });
        WorkOutcome::AnswerEnded { failed, attempts }
    }

    async fn send_answer(&self, work: &AnswerWork, body: Bytes) -> Result<client::Reply, NotSent> {
        let named = work.response_url.to_url();
        let server = self.settings.tool_servers.iter().find(|server| server.url == work.server);
        let url = match server {
            Some(server) => server.resolve(&named).map_err(NotSent::NotRunning)?,
            None => named,
        };
        self.check_named_url(&work.server, &url).map_err(|forbidden| NotSent::Failed(forbidden.into()))?;
        let trusted = server.filter(|server| may_have_credentials(&self.urls, server, &url));
        let to = To::new(&url, trusted.map(|server| server.url.as_str()));
        self.world.http.post(MessageKind::Answer, to, body).await.map_err(NotSent::Failed)
    }
}

/// Reason why there is no reply.
enum NotSent {
    /// The server is one that is started, and does not run now.
    NotRunning(String),
    Failed(client::Error),
}
