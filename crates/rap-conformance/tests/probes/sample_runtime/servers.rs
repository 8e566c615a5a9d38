//! Requests of the sample runtime to tool servers.

use std::time::Duration;

use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderName, HeaderValue};
use rap_protocol::parse_toolset;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use url::Url;

use super::{Call, Fault, SampleRuntime, Tools};

const FIRST_PAUSE: Duration = Duration::from_millis(100);

fn plain_text() -> (HeaderName, HeaderValue) {
    (CONTENT_TYPE, HeaderValue::from_static("text/plain"))
}

impl SampleRuntime {
    fn authorization(&self) -> Vec<(HeaderName, HeaderValue)> {
        let bearer = HeaderValue::try_from(format!("Bearer {}", self.0.token)).unwrap();
        vec![(AUTHORIZATION, bearer)]
    }

    pub(super) async fn poll(self) {
        loop {
            self.discover().await;
            tokio::time::sleep(FIRST_PAUSE).await;
        }
    }

    pub(super) async fn discover(&self) -> Tools {
        let mut tools = Vec::new();
        for server in &self.0.servers {
            let url = Url::parse(&format!("{server}/.well-known/rap-toolset")).unwrap();
            let answer = self.0.http.get(&url, &self.authorization(), 1 << 20).await;
            let is_valid = |body: &[u8]| self.is(Fault::OffersInvalidTools) || parse_toolset(body).is_ok();
            let found = answer.ok().filter(|answer| answer.status == 200 && is_valid(&answer.body));
            tools.push(found.map(|answer| serde_json::from_slice(&answer.body).unwrap()));
        }
        tools
    }

    fn invocation(&self, call: &Call) -> (Url, Value) {
        let state = self.state();
        let thread = &state.threads[&call.thread];
        let root = thread.ancestors.first().unwrap_or(&call.thread);
        let toolset = state.sessions[root][call.server].clone().unwrap();
        let mut body = json!({
            "operation": call.name, "arguments": call.arguments, "id": call.id, "group_id": call.thread,
            "callback_url": call.url,
        });
        if !self.is(Fault::NoCallId) {
            body["call_id"] = json!(call.given);
        }
        if toolset["version"].is_string() && !self.is(Fault::NoVersion) {
            body["toolset_version"] = toolset["version"].clone();
        }
        if !thread.ancestors.is_empty() && !self.is(Fault::NoAncestors) {
            body["thread_ancestors"] = json!(thread.ancestors);
        }
        (Url::parse(toolset["endpoint"].as_str().unwrap()).unwrap(), body)
    }

    pub(super) async fn invoke(self, call: Call) {
        if self.is(Fault::NeedsDiscoveryForCalls) && self.discover().await[call.server].is_none() {
            return;
        }
        let (url, mut body) = self.invocation(&call);
        // Constant pauses are long, so that small delays do not make them look as if they grew.
        let mut pause =
            if self.is(Fault::ConstantRetryPauses) { Duration::from_millis(700) } else { FIRST_PAUSE };
        for attempt in 0.. {
            if attempt > 0 && self.is(Fault::NewUrlPerAttempt) {
                body["callback_url"] = format!("{}?attempt={attempt}", call.url).into();
            }
            let mut headers = self.authorization();
            if self.is(Fault::SendsPlainText) {
                headers.push(plain_text());
            }
            let sent = self.0.http.post_json(&url, &headers, body.to_string().into()).await;
            let again = match &sent {
                Ok(reply) if reply.status < 300 => {
                    self.acknowledged(&call);
                    if self.is(Fault::ReadsAcknowledgements) && !reply.body.is_empty() {
                        let body: Value = serde_json::from_slice(&reply.body).unwrap();
                        self.take_result(&call, body["text"].as_str().unwrap(), false);
                    }
                    return;
                }
                Ok(reply) if reply.status >= 500 => !self.is(Fault::GivesUpOnServerErrors),
                Ok(reply) if reply.status == 409 => return self.refresh(&call).await,
                Ok(_) => self.is(Fault::RetriesRefusals),
                Err(_) => !self.is(Fault::GivesUpWhenUnreachable),
            };
            if !again {
                self.acknowledged(&call);
                if !self.is(Fault::NoResultOfRefusals) {
                    self.take_result(&call, "Error: the tool server refused the call", false);
                }
                return;
            }
            tokio::time::sleep(pause).await;
            if !self.is(Fault::ConstantRetryPauses) {
                pause *= 4;
            }
        }
    }

    fn acknowledged(&self, call: &Call) {
        let mut state = self.state();
        if let Some(known) = state.call(&call.thread, &call.id) {
            known.acknowledged = true;
            self.unblock(&mut state, &call.thread);
        }
    }

    async fn refresh(&self, call: &Call) {
        if !self.is(Fault::DoesNotRefresh) {
            let tools = self.discover().await;
            let mut state = self.state();
            let root = state.root(&call.thread);
            state.sessions.insert(root, tools);
        }
        self.acknowledged(call);
        self.take_result(call, "Error: the tools changed; call again", false);
    }

    /// Notifies the servers concurrently and returns the tasks that are still running.
    pub(super) async fn notify(
        &self,
        path: &'static str,
        body: Value,
        only: Option<usize>,
    ) -> Vec<JoinHandle<u16>> {
        let [one_by_one, retries, stops] = match path {
            "/close_thread" => [Fault::ClosingOneByOne, Fault::RetriesClosing, Fault::ClosingStopsAtFailure],
            _ => [Fault::CancellingOneByOne, Fault::RetriesCancelling, Fault::CancellingStopsAtFailure],
        };
        let mut sent = Vec::new();
        for at in 0..self.0.servers.len() {
            if only.is_some_and(|only| at != only) {
                continue;
            }
            let (runtime, body) = (self.clone(), body.clone());
            let task = tokio::spawn(async move {
                let mut status = runtime.post_notification(at, path, &body).await;
                if runtime.is(retries) && status >= 500 {
                    status = runtime.post_notification(at, path, &body).await;
                }
                status
            });
            if self.is(one_by_one) {
                task.await.unwrap();
            } else if self.is(stops) && at == 0 {
                let early = tokio::time::timeout(Duration::from_secs(1), task).await;
                if early.is_ok_and(|status| status.unwrap() >= 500) {
                    return Vec::new();
                }
            } else {
                sent.push(task);
            }
        }
        sent
    }

    async fn post_notification(&self, at: usize, path: &str, body: &Value) -> u16 {
        let url = Url::parse(&format!("{}{path}", self.0.servers[at])).unwrap();
        let mut headers =
            if self.is(Fault::NoTokenWithNotifications) { Vec::new() } else { self.authorization() };
        let plain =
            if path == "/close_thread" { Fault::ClosesInPlainText } else { Fault::CancelsInPlainText };
        if self.is(plain) {
            headers.push(plain_text());
        }
        let sent = self.0.http.post_json(&url, &headers, body.to_string().into()).await;
        if let Ok(reply) = &sent
            && reply.status == 500
            && path == "/cancel_tool_call"
            && self.is(Fault::ReadsAnswersToCancellations)
        {
            let answer: Value = serde_json::from_slice(&reply.body).unwrap();
            self.take_message(body["thread_id"].as_str().unwrap(), answer["text"].as_str().unwrap());
        }
        sent.map_or(0, |reply| reply.status)
    }

    pub(super) async fn deliver_choice(&self, call: &Call, selected: u64) {
        let Some(url) = &call.response_url else { return };
        let body = json!({"id": call.id, "selected": selected});
        self.0.http.post_json(&Url::parse(url).unwrap(), &[], body.to_string().into()).await.unwrap();
    }
}
