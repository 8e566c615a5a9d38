//! Status checks: tool servers are asked whether calls and subscriptions are alive that were not heard of for long. The
//! meaning of their answers is a rule of `rap-agent`.

use bytes::Bytes;
use rap_agent::{CheckResult, Input, Liveness, LostAfter, words};
use rap_protocol::{StatusQuery, TOOL_CALL_STATUS_PATH, parse_status_answer};
use url::Url;

use super::Engine;
use super::run::Settlement;
use crate::store::{CheckWork, Message, Target};
use crate::toolsets::authorization;
use crate::world::Purpose;

impl Engine {
    pub(super) async fn check(&self, work: &CheckWork) -> Settlement {
        let lost_after = LostAfter(self.settings.limits.lost_after);
        if work.check.due(lost_after) > self.now() {
            return Settlement::Done;
        }
        let liveness = self.liveness(work).await;
        let CheckWork { thread, call, subscription, check, .. } = work;
        match check.after_answer(liveness, self.now(), lost_after) {
            CheckResult::Lost => {
                tracing::warn!(thread = %thread.id, %call, subscription, "the tool server has lost a call");
                let input = match subscription {
                    true => Input::SubscriptionLost { call: call.clone() },
                    // It failed, so that a result that comes all the same is not ignored.
                    false => Input::CallFailed { call: call.clone(), text: words::LOST.into() },
                };
                Settlement::Apply(Box::new(Message::new(Target::Key(thread.key), input)))
            }
            CheckResult::Open(check) => match self.store.record_check(thread.key, call, check).await {
                Ok(()) => Settlement::Done,
                Err(error) => Settlement::StoreFailed(error),
            },
        }
    }

    async fn liveness(&self, work: &CheckWork) -> Liveness {
        let server = self.settings.tool_servers.iter().find(|server| server.url == work.server);
        let Some(server) = server else { return Liveness::Unknown };
        let Ok(url) = Url::parse(&format!("{}{TOOL_CALL_STATUS_PATH}", server.url)) else {
            return Liveness::Unknown;
        };
        let query = StatusQuery { thread_id: work.thread.id.clone(), tool_call_id: work.call.clone() };
        let body = Bytes::from(serde_json::to_vec(&query).expect("bug: a query is JSON"));
        let answer = self.world.http.post(Purpose::Notify, &url, &authorization(server), body).await;
        let gone = answer.is_ok_and(|reply| {
            reply.status == 200 && parse_status_answer(&reply.body).is_ok_and(|answer| !answer.alive)
        });
        if gone { Liveness::Gone } else { Liveness::Unknown }
    }
}
