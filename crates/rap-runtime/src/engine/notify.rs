//! Notifications: every configured tool server, all at once, one attempt each.
//!
//! They are never stored and nothing waits for them. What a server answers changes nothing: that it failed is noted in
//! the ledger, for people.

use std::sync::Arc;

use bytes::Bytes;
use rap_protocol::{CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, CallId, CancelToolCall, CloseThread, ThreadId};
use url::Url;

use super::Engine;
use crate::settings::ToolServer;
use crate::store::{Fate, Kind, Line, Thread, ThreadNo, now};
use crate::toolsets::authorization;

/// What a notification is about.
#[derive(Clone)]
struct About {
    thread: ThreadNo,
    thread_id: ThreadId,
    call: Option<CallId>,
}

impl Engine {
    pub(super) fn notify_cancel(self: &Arc<Self>, thread: &Thread, call: CallId) {
        let body = CancelToolCall { thread_id: thread.id.clone(), tool_call_id: call.clone() };
        self.notify(thread, Some(call), CANCEL_TOOL_CALL_PATH, &body);
    }

    pub(super) fn notify_close(self: &Arc<Self>, thread: &Thread) {
        self.notify(thread, None, CLOSE_THREAD_PATH, &CloseThread { thread_id: thread.id.clone() });
    }

    // Argued: TC-02, CN-02, TC-16, CN-18 a task of its own sends each; nobody waits for it or hears of its end
    // Argued: TC-07, CN-07 nothing is stored but that it failed, and nothing is repeated
    fn notify(
        self: &Arc<Self>,
        thread: &Thread,
        call: Option<CallId>,
        path: &'static str,
        body: &impl serde::Serialize,
    ) {
        let about = About { thread: thread.no, thread_id: thread.id.clone(), call };
        let body = Bytes::from(serde_json::to_vec(body).expect("bug: a notification is JSON"));
        for server in &self.settings.tool_servers {
            let (server, about) = (server.clone(), about.clone());
            let Ok(place) = Arc::clone(&self.notify_places).try_acquire_owned() else {
                self.notified(&server, path, about, Fate::Dropped, "too many are under way".into());
                continue;
            };
            let (engine, body) = (Arc::clone(self), body.clone());
            let send = async move {
                engine.send_notification(&server, path, about, body).await;
                drop(place);
            };
            self.tasks.spawn_on(send, &self.handle);
        }
    }

    async fn send_notification(&self, server: &ToolServer, path: &'static str, about: About, body: Bytes) {
        let Ok(url) = Url::parse(&format!("{}{path}", server.url)) else { return };
        let (fate, detail) = match self.notifier.post_json(&url, &authorization(server), body).await {
            Ok(reply) if (200..300).contains(&reply.status) => (Fate::Delivered, String::new()),
            Ok(reply) => (Fate::Refused, format!("answered {}", reply.status)),
            Err(error) => (Fate::GivenUp, error.to_string()),
        };
        self.notified(server, path, about, fate, detail);
    }

    fn notified(&self, server: &ToolServer, path: &str, about: About, fate: Fate, detail: String) {
        self.ended(Kind::Notification, fate, 1, || Line {
            kind: Kind::Notification,
            thread: about.thread,
            thread_id: Some(about.thread_id),
            call: about.call,
            server: Some(server.url.clone()),
            topic: path.trim_start_matches('/').to_owned(),
            outcome: fate,
            attempts: 1,
            detail,
            at: now(),
        });
    }
}
