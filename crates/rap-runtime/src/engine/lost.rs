//! Lost calls: a slow look at calls that were acknowledged long ago. Their servers are asked whether anybody still works
//! on them. Only the answer that nobody does, twice and some time apart, settles a call; any other means that it is not
//! known.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use rap_agent::Message;
use rap_protocol::{StatusQuery, TOOL_CALL_STATUS_PATH, parse_status_answer};
use url::Url;

use super::Engine;
use crate::store::{Doubtful, now};
use crate::toolsets::authorization;

/// How many calls are asked after at a time.
const AT_A_TIME: usize = 64;
/// The pause between two looks, and between the two answers that settle a call. A shorter patience has shorter ones.
const PAUSE: Duration = Duration::from_secs(60);

impl Engine {
    pub(super) async fn look_for_lost(self: Arc<Self>) {
        let patience = self.settings.limits.lost_after;
        let pause = PAUSE.min(patience);
        loop {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.stop.cancelled() => return,
            }
            match self.store.doubtful(now().minus(patience), now().minus(pause), AT_A_TIME).await {
                Ok(calls) => drop(join_all(calls.into_iter().map(|call| self.ask_after(call))).await),
                Err(error) => tracing::warn!(%error, "nobody looked for lost calls"),
            }
        }
    }

    async fn ask_after(&self, call: Doubtful) {
        let gone = self.is_gone(&call).await;
        if gone && call.gone_since.is_some() {
            tracing::warn!(thread = %call.thread_id, call = %call.call, "nobody works on a call any more");
            let text = "Error: the tool server does not know this call any more; it was lost".into();
            self.insist(call.thread, Message::CallFailed { call: call.call, text }).await.ok();
        } else if let Err(error) = self.store.asked_after(call, gone.then(now)).await {
            tracing::warn!(%error, "what is known of a doubtful call could not be noted");
        }
    }

    /// Whether its server says that nobody works on it.
    async fn is_gone(&self, call: &Doubtful) -> bool {
        let server = self.settings.tool_servers.iter().find(|server| server.url == call.server);
        let Some(server) = server else { return false };
        let Ok(url) = Url::parse(&format!("{}{TOOL_CALL_STATUS_PATH}", server.url)) else { return false };
        let query = StatusQuery { thread_id: call.thread_id.clone(), tool_call_id: call.call.clone() };
        let body = Bytes::from(serde_json::to_vec(&query).expect("bug: a query is JSON"));
        let answer = self.notifier.post_json(&url, &authorization(server), body).await;
        answer.is_ok_and(|reply| {
            reply.status == 200 && parse_status_answer(&reply.body).is_ok_and(|answer| !answer.alive)
        })
    }
}
