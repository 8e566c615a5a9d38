//! HTTP interface of the sample runtime: callbacks, and the part of the client API that the checker uses.

use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State as With;
use axum::http::{HeaderMap, Method, Request, Response, StatusCode};
use rap_protocol::{Callback, parse_callback};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::{Call, CallState, Fault, SampleRuntime};

const BODY_BYTES: usize = 1024 * 1024;

type Answer = (u16, Value);

pub(super) async fn serve(runtime: SampleRuntime, listener: TcpListener) {
    let router = Router::new().fallback(answer).with_state(runtime);
    axum::serve(listener, router).await.unwrap();
}

async fn answer(With(runtime): With<SampleRuntime>, request: Request<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let limit = match runtime.0.fault {
        Some(Fault::FailsAtHostileBodies) => 64 << 20,
        Some(Fault::RefusesLargeResults) => 64 << 10,
        _ => BODY_BYTES,
    };
    let (status, value) = match axum::body::to_bytes(body, limit).await {
        Err(_) => (413, json!({"error": "too large"})),
        Ok(raw) if path.starts_with("/callback/") => {
            let url = format!("{}{}", runtime.0.url, parts.uri);
            runtime.callback(&url, &parts.headers, &raw).await
        }
        Ok(raw) => {
            let body: Value = serde_json::from_slice(&raw).unwrap_or(Value::Null);
            let segments: Vec<&str> = path.trim_matches('/').split('/').collect();
            runtime.api(&parts.method, &segments, &body).await
        }
    };
    let response = Response::builder().status(StatusCode::from_u16(status).unwrap());
    response.header("content-type", "application/json").body(Body::from(value.to_string())).unwrap()
}

impl SampleRuntime {
    async fn api(&self, method: &Method, path: &[&str], body: &Value) -> Answer {
        let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
        match path {
            ["v1", "threads"] => (201, json!({"id": self.open(&text("message"))})),
            ["say", id] => {
                self.state().threads.entry((*id).to_owned()).or_default();
                self.take_message(id, &text("text"));
                (200, json!({}))
            }
            ["v1", "threads", id, ..] if !self.state().threads.contains_key(*id) => (404, json!({})),
            ["v1", "threads", id, "history"] if method == Method::GET => {
                (200, json!({"entries": self.state().threads[*id].notices}))
            }
            ["v1", "threads", id, "views"] => {
                let view =
                    |(kind, content): (&String, &Value)| json!({"view_type": kind, "content": content});
                let views: Vec<Value> = self.state().threads[*id].views.iter().map(view).collect();
                (200, json!({"views": views}))
            }
            ["v1", "threads", id] => (200, json!({"id": id, "status": self.status(id)})),
            ["v1", "threads", id, "messages"] => {
                self.take_message(id, &text("text"));
                (202, json!({}))
            }
            ["v1", "threads", id, "interrupt"] => {
                self.interrupt(id).await;
                (202, json!({}))
            }
            ["v1", "threads", id, "close"] => {
                self.close(id).await;
                (202, json!({}))
            }
            ["v1", "threads", id, "calls", call, "choice"] => {
                let call = self.state().call(id, call).cloned().unwrap();
                if !self.is(Fault::DropsChoices) {
                    self.deliver_choice(&call, body["selected"].as_u64().unwrap()).await;
                }
                (202, json!({}))
            }
            _ => (404, json!({})),
        }
    }

    fn status(&self, id: &str) -> &'static str {
        let state = self.state();
        let thread = &state.threads[id];
        match thread.asking {
            Some(_) => "running",
            None if thread.batch.is_empty() => "idle",
            None => "waiting",
        }
    }

    /// The call that a callback URL belongs to.
    fn call_of_url(&self, url: &str) -> Option<Call> {
        let bare = url.split('?').next().unwrap();
        let same = |known: &str| match self.is(Fault::ComparesHalfTheToken) {
            true => known.len() == bare.len() && known[..known.len() - 16] == bare[..bare.len() - 16],
            false => known == bare,
        };
        let state = self.state();
        state.calls.iter().find(|call| same(call.url.split('?').next().unwrap())).cloned()
    }

    async fn callback(&self, url: &str, headers: &HeaderMap, raw: &Bytes) -> Answer {
        let Some(call) = self.call_of_url(url) else { return (401, json!({})) };
        let kind = headers.get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default();
        if kind != "application/json" && !self.is(Fault::AcceptsAnyContentType) {
            return (415, json!({}));
        }
        let body: Value = serde_json::from_slice(raw).unwrap_or(Value::Null);
        let group = body["group_id"].as_str().unwrap_or_default();
        if self.is(Fault::MakesFilesByGroupId) && group.contains('/') {
            drop(std::fs::create_dir_all(std::path::Path::new("/").join(group)));
        }
        let callback = match parse_callback(raw) {
            Ok(callback) => callback,
            Err(_) if self.is(Fault::AcceptsEmptyChoices) && body["choices"] == json!([]) => {
                return (200, json!({}));
            }
            Err(_) if self.is(Fault::Answers200ToInvalid) && body["choices"].is_null() => {
                return (200, json!({}));
            }
            Err(_) if self.is(Fault::FailsAtHostileBodies) && raw.len() > BODY_BYTES => {
                return (500, json!({}));
            }
            Err(_) if self.is(Fault::AcceptsInvalidCallbacks) => return self.take_invalid(&call, raw),
            Err(invalid) => return (400, json!({"error": invalid.to_string()})),
        };
        let named = match &callback {
            Callback::ToolResult(result) => result.id.as_str(),
            Callback::SubscriptionEvent(event) => event.tool_call_id.as_str(),
            Callback::Oauth(oauth) => oauth.id.as_str(),
            Callback::UserChoice(choice) => choice.id.as_str(),
            Callback::ViewUpdate(_) => call.id.as_str(),
        };
        let fits = named == call.id && callback.group_id().as_str() == call.thread;
        let is_result = matches!(callback, Callback::ToolResult(_));
        let other = self.state().call(callback.group_id().as_str(), named).cloned();
        let call = match (self.0.fault, &callback, other) {
            _ if fits => call,
            (Some(Fault::IgnoresIdsInBodies), Callback::ToolResult(_), _) => call,
            (Some(Fault::AcceptsOauthOfUnknownCalls), Callback::Oauth(_), _) => call,
            (Some(Fault::AcceptsResultsOfOtherCalls), _, Some(other)) => other,
            (Some(Fault::Answers200ToUnmatched), Callback::ToolResult(_), _) => return (200, json!({})),
            _ => return (403, json!({})),
        };
        let by_default = body["associative"].is_null();
        let (status, body) = self.take(call, callback, by_default).await;
        let accepts_with_202 = match is_result {
            true => self.is(Fault::Answers202ToResults),
            false => self.is(Fault::Answers202ToEvents),
        };
        (if status == 200 && accepts_with_202 { 202 } else { status }, body)
    }

    async fn take(&self, call: Call, callback: Callback, by_default: bool) -> Answer {
        match callback {
            Callback::ToolResult(_)
                if call.state == CallState::Interrupted && self.is(Fault::FailsAtLateResults) =>
            {
                (500, json!({}))
            }
            Callback::ToolResult(result) => {
                let text = match result.body {
                    rap_protocol::Body::Text(text) => text,
                    rap_protocol::Body::Content(items) => content(&items),
                };
                if self.is(Fault::AnswersBeforeStoring) {
                    let runtime = self.clone();
                    self.spawn(async move {
                        tokio::time::sleep(Duration::from_millis(300)).await;
                        runtime.take_result(&call, &text, result.subscription);
                    });
                } else {
                    self.take_result(&call, &text, result.subscription);
                }
                (200, json!({}))
            }
            Callback::SubscriptionEvent(event) => {
                let accepted = self.take_event(&call, &event, by_default);
                (if accepted { 200 } else { 410 }, json!({}))
            }
            Callback::Oauth(_) => {
                if self.is(Fault::InvokesAfterSignIn) {
                    self.spawn(self.clone().invoke(call));
                }
                (200, json!({}))
            }
            Callback::UserChoice(choice) => {
                let url = choice.response_url.expose().to_owned();
                self.state().call(&call.thread, &call.id).unwrap().response_url = Some(url);
                (200, json!({}))
            }
            Callback::ViewUpdate(_)
                if call.state == CallState::Returned && self.is(Fault::RefusesLateViews) =>
            {
                (410, json!({}))
            }
            Callback::ViewUpdate(view) => {
                if self.is(Fault::ViewsWake) {
                    self.take_message(&call.thread, &view.content.to_string());
                }
                if call.state != CallState::Returned || !self.is(Fault::DropsLateViews) {
                    let mut state = self.state();
                    let thread = state.threads.get_mut(&call.thread).unwrap();
                    thread.views.insert(view.view_type, view.content);
                }
                (200, json!({}))
            }
        }
    }

    fn take_invalid(&self, call: &Call, raw: &Bytes) -> Answer {
        match serde_json::from_slice::<Value>(raw) {
            Ok(body) if body["text"].is_string() => {
                self.take_result(call, body["text"].as_str().unwrap(), false);
                (200, json!({}))
            }
            _ => (400, json!({})),
        }
    }
}

fn content(items: &[rap_protocol::Content]) -> String {
    let text = |item: &rap_protocol::Content| match item {
        rap_protocol::Content::Text { text } => Some(text.clone()),
        _ => None,
    };
    items.iter().filter_map(text).collect::<Vec<_>>().join("\n")
}
