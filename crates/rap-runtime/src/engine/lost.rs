//! Lost calls: a slow look at calls that were acknowledged long ago. Their servers are asked whether anybody still works
//! on them; what their answers mean is said in `rap-agent`.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::join_all;
use rap_agent::{LostAfter, Message, Verdict, Whereabouts};
use rap_protocol::{StatusQuery, TOOL_CALL_STATUS_PATH, parse_status_answer};
use url::Url;

use super::Engine;
use crate::store::{Doubtful, now};
use crate::toolsets::authorization;

/// How many calls are asked after at a time.
const AT_A_TIME: usize = 64;

impl Engine {
    pub(super) async fn look_for_lost(self: Arc<Self>) {
        let patience = LostAfter(self.settings.limits.lost_after);
        loop {
            tokio::select! {
                () = tokio::time::sleep(patience.pause()) => {}
                () = self.stop.cancelled() => return,
            }
            match self.store.doubtful(now(), patience, AT_A_TIME).await {
                Ok(calls) => {
                    drop(join_all(calls.into_iter().map(|call| self.ask_after(call, patience))).await)
                }
                Err(error) => tracing::warn!(%error, "nobody looked for lost calls"),
            }
        }
    }

    async fn ask_after(&self, call: Doubtful, patience: LostAfter) {
        let said = self.whereabouts(&call).await;
        let Doubtful { thread, thread_id, call, doubt, .. } = call;
        match doubt.hear(said, now(), patience) {
            Verdict::Lost => {
                tracing::warn!(thread = %thread_id, %call, "nobody works on a call any more");
                self.insist(thread, Message::lost(call)).await.ok();
            }
            Verdict::Open(doubt) => {
                if let Err(error) = self.store.asked_after(thread, call, doubt).await {
                    tracing::warn!(%error, "what is known of a doubtful call could not be noted");
                }
            }
        }
    }

    /// What its server says about it.
    async fn whereabouts(&self, call: &Doubtful) -> Whereabouts {
        let server = self.settings.tool_servers.iter().find(|server| server.url == call.server);
        let Some(server) = server else { return Whereabouts::Unknown };
        let Ok(url) = Url::parse(&format!("{}{TOOL_CALL_STATUS_PATH}", server.url)) else {
            return Whereabouts::Unknown;
        };
        let query = StatusQuery { thread_id: call.thread_id.clone(), tool_call_id: call.call.clone() };
        let body = Bytes::from(serde_json::to_vec(&query).expect("bug: a query is JSON"));
        let answer = self.notifier.post_json(&url, &authorization(server), body).await;
        let gone = answer.is_ok_and(|reply| {
            reply.status == 200 && parse_status_answer(&reply.body).is_ok_and(|answer| !answer.alive)
        });
        if gone { Whereabouts::Gone } else { Whereabouts::Unknown }
    }
}
