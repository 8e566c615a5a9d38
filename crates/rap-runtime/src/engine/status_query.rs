//! Status checks: tool servers are asked whether calls and subscriptions that have been silent for long are still
//! alive. The rules in `rap-agent` interpret the answers.

use bytes::Bytes;
use rap_agent::{CheckResult, Input, LostAfter, StatusAnswer, texts};
use rap_protocol::{StatusQuery, TOOL_CALL_STATUS_PATH, parse_status_answer};

use super::Engine;
use super::run::WorkOutcome;
use crate::store::{CheckWork, Message, Target};
use crate::world::{MessageKind, To};

impl Engine {
    pub(super) async fn check(&self, work: &CheckWork) -> WorkOutcome {
        let lost_after = LostAfter(self.settings.limits.lost_after);
        if work.check.due(lost_after) > self.now() {
            return WorkOutcome::Done;
        }
        let liveness = self.query_status(work).await;
        let CheckWork { thread, call, subscription, check, .. } = work;
        match check.after_answer(liveness, self.now(), lost_after) {
            CheckResult::Lost => {
                tracing::warn!(thread = %thread.id, %call, subscription, "the tool server no longer knows the call");
                let input = match subscription {
                    true => Input::SubscriptionLost { call: call.clone() },
                    // The call fails instead of being interrupted, so that a late result is not ignored.
                    false => Input::CallFailed { call: call.clone(), text: texts::CALL_LOST.into() },
                };
                WorkOutcome::apply(Message::new(Target::Key(thread.key), input))
            }
            CheckResult::KeepChecking(check) => {
                match self.store.record_check(thread.key, call, check).await {
                    Ok(()) => WorkOutcome::Done,
                    Err(error) => WorkOutcome::StoreFailed(error),
                }
            }
        }
    }

    async fn query_status(&self, work: &CheckWork) -> StatusAnswer {
        let server = self.settings.tool_servers.iter().find(|server| server.url == work.server);
        let Some(server) = server else { return StatusAnswer::Other };
        let Ok(url) = server.at(TOOL_CALL_STATUS_PATH) else { return StatusAnswer::Other };
        let query = StatusQuery { thread_id: work.thread.id.clone(), tool_call_id: work.call.clone() };
        let body = Bytes::from(serde_json::to_vec(&query).expect("bug: a query is JSON"));
        let to = To::new(&url, Some(&server.url));
        let answer = self.world.http.post(MessageKind::StatusQuery, to, body).await;
        let gone = answer.is_ok_and(|reply| {
            reply.status == 200 && parse_status_answer(&reply.body).is_ok_and(|answer| !answer.alive)
        });
        if gone { StatusAnswer::NotAlive } else { StatusAnswer::Other }
    }
}
