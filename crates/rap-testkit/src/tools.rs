//! A fake tool server: the test reads its invocations and posts the callbacks.

use std::ops::{Deref, DerefMut};

use serde_json::{Value, json};

use crate::http::{self, Response};
use crate::peer::{Peer, Reply, Request};

pub const DISCOVERY: &str = "/.well-known/rap-toolset";
pub const INVOKE: &str = "/invoke";
pub const CLOSE: &str = "/close_thread";
pub const CANCEL: &str = "/cancel_tool_call";

/// A tool that accepts any arguments.
pub fn tool(name: &str) -> Value {
    json!({"name": name, "description": format!("Does {name}."), "inputSchema": {"type": "object"}})
}

pub struct Tools {
    peer: Peer,
}

impl Deref for Tools {
    type Target = Peer;

    fn deref(&self) -> &Peer {
        &self.peer
    }
}

impl DerefMut for Tools {
    fn deref_mut(&mut self) -> &mut Peer {
        &mut self.peer
    }
}

impl Tools {
    /// Starts a server `bench` with the tools `work` and `watch`.
    pub async fn start() -> Tools {
        Tools::offering("bench", &["work", "watch"]).await
    }

    /// Starts a server with these tools, which accept any arguments.
    pub async fn offering(name: &str, names: &[&str]) -> Tools {
        let tools = Tools { peer: Peer::start().await };
        tools.offer(tools.document(name, "1", names.iter().map(|name| tool(name)).collect()));
        tools
    }

    /// Returns a discovery document with the endpoint of this server.
    pub fn document(&self, name: &str, version: &str, tools: Vec<Value>) -> Value {
        json!({"name": name, "version": version, "endpoint": format!("{}{INVOKE}", self.url), "tools": tools})
    }

    /// Sets the discovery document.
    pub fn offer(&self, document: Value) {
        self.answer_always(DISCOVERY, Reply::json(&document));
    }

    /// Waits for the next invocation.
    pub async fn invocation(&self) -> Call {
        Call { request: self.next(INVOKE).await }
    }

    /// Waits for the next invocations, sorted by name.
    pub async fn invocations(&self, count: usize) -> Vec<Call> {
        let mut calls = Vec::new();
        for _ in 0..count {
            calls.push(self.invocation().await);
        }
        calls.sort_by_key(|call| call.name().to_owned());
        calls
    }

    /// Waits for notifications and returns their bodies, in order.
    pub async fn notified(&self, path: &str, count: usize) -> Vec<Value> {
        let mut bodies = Vec::new();
        for _ in 0..count {
            bodies.push(self.next(path).await.body);
        }
        bodies
    }
}

/// An invocation, with methods to post its callbacks.
#[derive(Debug, Clone)]
pub struct Call {
    pub request: Request,
}

impl Call {
    fn field(&self, name: &str) -> &str {
        self.request.body[name].as_str().unwrap_or_else(|| panic!("no {name} in {}", self.request.body))
    }

    pub fn id(&self) -> &str {
        self.field("id")
    }

    /// The model's id of the call; the runtime's id for a call of the first release.
    pub fn name(&self) -> &str {
        self.request.body["call_id"].as_str().unwrap_or_else(|| self.id())
    }

    pub fn thread(&self) -> &str {
        self.field("group_id")
    }

    pub fn url(&self) -> &str {
        self.field("callback_url")
    }

    pub fn arguments(&self) -> &Value {
        &self.request.body["arguments"]
    }

    pub fn result(&self, text: &str) -> Value {
        json!({"type": "tool_result", "group_id": self.thread(), "id": self.id(), "text": text})
    }

    pub fn confirmation(&self, text: &str) -> Value {
        with(self.result(text), json!({"subscription": true}))
    }

    /// An event that is handled in a child thread.
    pub fn event(&self, text: &str) -> Value {
        json!({"type": "subscription_event", "group_id": self.thread(), "tool_call_id": self.id(), "text": text})
    }

    /// An event that is handled in the thread itself.
    pub fn inline(&self, text: &str) -> Value {
        with(self.event(text), json!({"associative": true}))
    }

    pub fn oauth(&self, auth_url: &str) -> Value {
        json!({"type": "oauth", "group_id": self.thread(), "id": self.id(), "auth_url": auth_url})
    }

    /// A question with the choices `red` and `green`; the default is `green`.
    pub fn question(&self, response_url: &str) -> Value {
        json!({
            "type": "user_choice",
            "group_id": self.thread(),
            "id": self.id(),
            "prompt": "Which colour?",
            "choices": ["red", "green"],
            "default": 1,
            "response_url": response_url,
        })
    }

    pub fn view(&self, view_type: &str, content: Value) -> Value {
        json!({"type": "view_update", "group_id": self.thread(), "view_type": view_type, "content": content})
    }

    pub async fn post(&self, body: &Value) -> Response {
        http::post(self.url(), body).await
    }

    pub async fn post_with(&self, headers: &[(&str, &str)], body: &Value) -> Response {
        http::post_with(self.url(), headers, body).await
    }

    /// Posts a callback that has to be accepted.
    pub async fn says(&self, body: &Value) {
        let answer = self.post(body).await;
        assert_eq!(answer.status, 200, "{} was answered {}", body, answer.body);
    }

    pub async fn returns(&self, text: &str) {
        self.says(&self.result(text)).await;
    }

    pub async fn confirms(&self, text: &str) {
        self.says(&self.confirmation(text)).await;
    }
}

/// Returns the body with these fields replaced.
pub fn with(mut body: Value, more: Value) -> Value {
    let fields = body.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    body
}
