//! Notifications: every configured tool server, all at once, one attempt each.
//!
//! They are never stored and nothing waits for them. What a server answers is not looked at.

use std::sync::Arc;

use bytes::Bytes;
use rap_protocol::{CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, CallId, CancelToolCall, CloseThread};
use url::Url;

use super::Engine;
use crate::settings::ToolServer;
use crate::store::Thread;
use crate::toolsets::authorization;

impl Engine {
    pub(super) fn notify_cancel(self: &Arc<Self>, thread: &Thread, call: CallId) {
        let body = CancelToolCall { thread_id: thread.id.clone(), tool_call_id: call };
        self.notify(CANCEL_TOOL_CALL_PATH, &body);
    }

    pub(super) fn notify_close(self: &Arc<Self>, thread: &Thread) {
        self.notify(CLOSE_THREAD_PATH, &CloseThread { thread_id: thread.id.clone() });
    }

    // Argued: TC-02, CN-02, TC-16, CN-18 a task of its own sends each; nobody waits for it or hears of its end
    // Argued: TC-07, CN-07 nothing is stored and nothing is repeated
    fn notify(self: &Arc<Self>, path: &'static str, body: &impl serde::Serialize) {
        let body = Bytes::from(serde_json::to_vec(body).expect("bug: a notification is JSON"));
        for server in &self.settings.tool_servers {
            let Ok(place) = Arc::clone(&self.notify_places).try_acquire_owned() else {
                tracing::warn!(server = server.url, path, "a notification was dropped: too many are under way");
                continue;
            };
            let (engine, server, body) = (Arc::clone(self), server.clone(), body.clone());
            let send = async move {
                engine.send_notification(&server, path, body).await;
                drop(place);
            };
            self.tasks.spawn_on(send, &self.handle);
        }
    }

    async fn send_notification(&self, server: &ToolServer, path: &str, body: Bytes) {
        let Ok(url) = Url::parse(&format!("{}{path}", server.url)) else { return };
        match self.notifier.post_json(&url, &authorization(server), body).await {
            Ok(reply) => tracing::debug!(server = server.url, path, status = reply.status, "notified"),
            Err(error) => tracing::info!(server = server.url, path, %error, "a notification did not arrive"),
        }
    }
}
