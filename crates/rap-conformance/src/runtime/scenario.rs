//! A scenario: the messages, calls and model requests of one probe. Its number is part of every marker, which separates
//! it from the other scenarios.
//!
//! A call is recognized by its marker and never by an id: the runtime chooses the ids in invocations, and the ids in
//! prompts may differ from them.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rap_io::client::Client;
use serde_json::{Value, json};

use super::crash::Crash;
use super::latch::Latch;
use super::mock_server::{Marker, MockServer, RecordedRequest, Route, SERVERS};
use super::model::{CANCEL_SUBSCRIPTION, ModelCall, ModelRequest, Prompt, ScriptedStep};
use super::tools::{self, Acknowledgement, Call, ExchangeLog, MARKER, NotificationBehavior};
use super::user::{ApiResponse, User};
use crate::{Exchange, Verdict};

/// `Ok` if the probe passed.
pub(crate) type ProbeResult = Result<(), Verdict>;

/// Interval at which the status of a thread is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum number of exchanges that a failure shows.
const SHOWN_EXCHANGES: usize = 6;

/// State that all scenarios share.
pub(crate) struct CheckContext {
    pub(crate) server: Arc<MockServer>,
    pub(crate) user: User,
    pub(crate) http: Client,
    /// Held while a probe changes the toolset of the second or the third server.
    pub(crate) toolset_lock: tokio::sync::Mutex<()>,
    /// Tool servers whose toolset the runtime had fetched at the first contact.
    servers: OnceLock<Vec<usize>>,
    /// Set if events of a confirmed subscription are not accepted.
    pub(crate) subscriptions_fail: OnceLock<()>,
}

/// Clones share the same state.
#[derive(Clone)]
pub(crate) struct Scenario {
    pub(crate) context: Arc<CheckContext>,
    pub(crate) number: u32,
    pub(crate) crash: Option<Arc<Crash>>,
    steps: Arc<AtomicU32>,
    calls_taken: Arc<AtomicUsize>,
    pub(crate) log: ExchangeLog,
}

impl CheckContext {
    pub(crate) fn new(server: Arc<MockServer>, user: User, http: Client) -> Arc<CheckContext> {
        Arc::new(CheckContext {
            server,
            user,
            http,
            toolset_lock: tokio::sync::Mutex::default(),
            servers: OnceLock::new(),
            subscriptions_fail: OnceLock::new(),
        })
    }

    pub(crate) fn scenario(self: &Arc<Self>, crash: Option<Arc<Crash>>) -> Scenario {
        Scenario {
            context: Arc::clone(self),
            number: self.server.scenarios.fetch_add(1, Ordering::Relaxed),
            crash,
            steps: Arc::default(),
            calls_taken: Arc::default(),
            log: ExchangeLog::default(),
        }
    }

    /// Records which tool servers the runtime uses. After that, no probe changes what the others see.
    pub(crate) fn fix_servers(&self) {
        self.servers.get_or_init(|| (0..SERVERS).filter(|at| self.server.discoveries(*at) > 0).collect());
    }

    /// Tool servers that the runtime uses.
    pub(crate) fn servers(&self) -> &[usize] {
        self.servers.get().map_or(&[], Vec::as_slice)
    }
}

/// Marker of one call of a step.
fn call_marker(step: &str, at: usize) -> String {
    format!("{step}_{at}")
}

/// Creates a failed result.
pub(crate) fn fail<T>(what: impl Into<String>, exchanges: Vec<Exchange>) -> Result<T, Verdict> {
    Err(Verdict::fail(what, exchanges))
}

impl Scenario {
    pub(crate) fn server(&self) -> &MockServer {
        &self.context.server
    }

    /// Text that no other scenario uses.
    pub(crate) fn unique_text(&self, prefix: &str) -> String {
        self.server().unique_text(self.number, prefix)
    }

    /// Scripts a step in which the model makes no call.
    pub(crate) fn noop_step(&self) -> Marker {
        self.step_with_calls(&[])
    }

    /// Scripts a step in which the model makes these calls in one answer.
    pub(crate) fn step_with_calls(&self, names: &[&str]) -> Marker {
        self.step_with_call_arguments(&names.iter().map(|name| (*name, json!({}))).collect::<Vec<_>>())
    }

    /// Scripts a step in which the model makes these calls, with additional arguments.
    pub(crate) fn step_with_call_arguments(&self, calls: &[(&str, Value)]) -> Marker {
        self.step(|marker, step| {
            for (at, (name, more)) in calls.iter().enumerate() {
                let arguments = tools::with(json!({MARKER: call_marker(marker, at)}), more.clone());
                step.calls.push(ModelCall { id: self.model_id(), name: (*name).into(), arguments });
            }
        })
    }

    /// Scripts a step in which the model makes one call with this id.
    pub(crate) fn step_with_call_id(&self, id: &str, name: &str) -> Marker {
        self.step(|marker, step| {
            let arguments = json!({MARKER: call_marker(marker, 0)});
            step.calls.push(ModelCall { id: id.into(), name: name.into(), arguments });
        })
    }

    /// Scripts a step in which the model cancels a subscription, by its id in prompts.
    pub(crate) fn step_cancelling(&self, subscription: &str) -> Marker {
        self.step(|_, step| {
            let arguments = json!({"tool_call_id": subscription});
            step.calls.push(ModelCall { id: self.model_id(), name: CANCEL_SUBSCRIPTION.into(), arguments });
        })
    }

    /// A new id that the model can give to a call.
    pub(crate) fn model_id(&self) -> String {
        self.server().model_id()
    }

    pub(crate) fn step(&self, make: impl FnOnce(&str, &mut ScriptedStep)) -> Marker {
        let marker = Marker { scenario: self.number, step: self.steps.fetch_add(1, Ordering::Relaxed) + 1 };
        let text = self.server().marker_text(marker);
        let mut step = ScriptedStep { text: format!("I do {text}."), ..ScriptedStep::default() };
        make(&text, &mut step);
        self.server().record().steps.insert(marker, step);
        marker
    }

    /// Marker in the arguments of the first call of a step.
    pub(crate) fn call_marker(&self, marker: Marker) -> String {
        call_marker(&self.server().marker_text(marker), 0)
    }

    /// Id of a call in prompts.
    pub(crate) fn prompt_id_of(&self, call: &Call) -> String {
        let found = self.model_requests().iter().rev().find_map(|request| request.call_of(call.marker()));
        found.map_or_else(|| call.id().to_owned(), |found| found.id)
    }

    /// Holds back the model's answer to a marker until the latch is released, at most [`Timeouts::arrival`].
    ///
    /// [`Timeouts::arrival`]: super::Timeouts::arrival
    pub(crate) fn hold_answer(&self, marker: Marker) -> Latch {
        let latch = Latch::new(self.server().timeouts.arrival);
        if let Some(step) = self.server().record().steps.get_mut(&marker) {
            step.latch = Some(latch.clone());
        }
        latch
    }

    /// Sets the answers to the next invocations of a step.
    pub(crate) fn acknowledge(&self, marker: Marker, with: impl IntoIterator<Item = Acknowledgement>) {
        self.server().record().acknowledgements.insert(marker, with.into_iter().collect());
    }

    /// Sets how the tool servers answer notifications about a thread.
    pub(crate) fn set_notification_behavior(&self, thread: &str, behavior: NotificationBehavior) {
        self.server().record().notification_behaviors.insert(thread.to_owned(), behavior);
    }

    /// User message that contains a marker.
    pub(crate) fn message_text(&self, marker: Marker) -> String {
        format!("Please continue with {}.", self.server().marker_text(marker))
    }

    /// Sends the message in a new thread and returns the thread.
    pub(crate) async fn open_thread(&self, marker: Marker) -> Result<String, Verdict> {
        let name = format!("rapcheck-{}-{}", self.number, marker.step);
        self.context.user.open(&self.context.http, &name, &self.message_text(marker)).await
    }

    pub(crate) async fn send_message(&self, thread: &str, marker: Marker) -> Result<(), Verdict> {
        self.context.user.say(&self.context.http, thread, &self.message_text(marker)).await
    }

    /// Sends a POST to the client API. `what` describes the action for the case that there is no client API.
    pub(crate) async fn post_api(
        &self,
        what: &str,
        path: &[&str],
        body: &Value,
    ) -> Result<ApiResponse, Verdict> {
        let answered = self.context.user.api(what)?.post(&self.context.http, path, body).await?;
        self.log.add(answered.exchange.clone());
        Ok(answered)
    }

    pub(crate) async fn close(&self, thread: &str) -> Result<(), Verdict> {
        self.post_api("close a thread", &["threads", thread, "close"], &json!({})).await?.expect(202)?;
        Ok(())
    }

    pub(crate) async fn interrupt(&self, thread: &str) -> Result<(), Verdict> {
        self.post_api("interrupt a thread", &["threads", thread, "interrupt"], &json!({}))
            .await?
            .expect(202)?;
        Ok(())
    }

    /// Not observable if the user cannot close a thread.
    pub(crate) fn can_close(&self) -> ProbeResult {
        self.context.user.api("close a thread").map(|_| ())
    }

    /// Not observable if the user cannot interrupt a thread.
    pub(crate) fn can_interrupt(&self) -> ProbeResult {
        self.context.user.api("interrupt a thread").map(|_| ())
    }

    /// The last exchanges of this scenario, in chronological order.
    pub(crate) fn exchanges(&self) -> Vec<Exchange> {
        let mut exchanges = self.log.all().clone();
        exchanges.extend(self.invocations().iter().map(|request| (request.at, request.exchange())));
        exchanges.extend(self.model_requests().last().map(|request| (request.at(), request.exchange())));
        exchanges.sort_by_key(|(at, _)| *at);
        exchanges.drain(..exchanges.len().saturating_sub(SHOWN_EXCHANGES));
        exchanges.into_iter().map(|(_, exchange)| exchange).collect()
    }

    /// All invocations of this scenario so far, including retries.
    pub(crate) fn invocations(&self) -> Vec<Arc<RecordedRequest>> {
        self.server().requests(|request| request.prompt.is_none() && request.scenario == Some(self.number))
    }

    /// All model requests of this scenario so far.
    pub(crate) fn model_requests(&self) -> Vec<ModelRequest> {
        let requests = self.server().requests(|request| {
            request.scenario == Some(self.number) && request.prompt.as_ref().is_some_and(Prompt::is_turn)
        });
        requests.into_iter().filter_map(ModelRequest::of).collect()
    }

    /// Calls `look` whenever a request arrives, until it returns a value. Fails after the time limit.
    pub(crate) async fn wait_for<T>(&self, what: &str, look: impl Fn() -> Option<T>) -> Result<T, Verdict> {
        let mut arrivals = self.server().arrivals();
        let found = async {
            loop {
                arrivals.borrow_and_update();
                if let Some(value) = look() {
                    return value;
                }
                if arrivals.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        let limit = self.server().timeouts.arrival;
        match tokio::time::timeout(limit, found).await {
            Ok(value) => Ok(value),
            Err(_) => {
                let mut message = format!("{what} did not arrive within {:.0} s", limit.as_secs_f64());
                if let User::Command(say) = &self.context.user
                    && let Some(error) = say.last_error()
                {
                    message = format!("{message}; {error}");
                }
                fail(message, self.exchanges())
            }
        }
    }

    /// Waits for the next invocation that this method has not returned yet.
    pub(crate) async fn call(&self) -> Result<Call, Verdict> {
        let at = self.calls_taken.fetch_add(1, Ordering::Relaxed);
        let request = self.wait_for("an invocation", || self.invocations().get(at).cloned()).await?;
        Ok(Call {
            request,
            http: self.context.http.clone(),
            timeouts: self.server().timeouts,
            log: self.log.clone(),
        })
    }

    /// Opens a thread in which the model calls a tool, and waits for the invocation.
    pub(crate) async fn open_with_call(&self, tool: &str) -> Result<(String, Call), Verdict> {
        let thread = self.open_thread(self.step_with_calls(&[tool])).await?;
        Ok((thread, self.call().await?))
    }

    /// Opens a thread with a confirmed subscription.
    pub(crate) async fn open_with_subscription(&self) -> Result<(String, Call), Verdict> {
        self.open_with_subscription_step(self.step_with_calls(&[tools::WATCH])).await
    }

    /// Opens a thread in which this step makes a subscription, and confirms it.
    pub(crate) async fn open_with_subscription_step(
        &self,
        marker: Marker,
    ) -> Result<(String, Call), Verdict> {
        if self.context.subscriptions_fail.get().is_some() {
            return Err(Verdict::not_observable(
                "events of a confirmed subscription are not accepted: see the probe subscription_confirmed",
            ));
        }
        let thread = self.open_thread(marker).await?;
        let subscription_call = self.call().await?;
        let text = self.unique_text("watching");
        subscription_call.confirm(&text).await?;
        self.wait_for_prompt_with(&text).await?;
        self.wait_until_idle(&thread).await?;
        Ok((thread, subscription_call))
    }

    /// Waits until a thread is idle. Without a client API, waits for the quiet period.
    pub(crate) async fn wait_until_idle(&self, thread: &str) -> ProbeResult {
        let User::Api(api) = &self.context.user else {
            self.wait_for_silence().await;
            return Ok(());
        };
        let began = Instant::now();
        while began.elapsed() < self.server().timeouts.arrival {
            if api.get(&self.context.http, &["threads", thread]).await?["status"] == "idle" {
                return Ok(());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        fail("a thread does not become idle after its calls have returned", self.exchanges())
    }

    /// Waits for the first model request for which `is` returns true.
    pub(crate) async fn wait_for_model_request(
        &self,
        what: &str,
        is: impl Fn(&ModelRequest) -> bool,
    ) -> Result<ModelRequest, Verdict> {
        self.wait_for(what, || self.model_requests().into_iter().find(&is)).await
    }

    /// Waits for the first model request whose prompt contains a text.
    pub(crate) async fn wait_for_prompt_with(&self, needle: &str) -> Result<ModelRequest, Verdict> {
        self.wait_for_model_request(&format!("a model request with `{needle}`"), |request| {
            request.has(needle)
        })
        .await
    }

    /// Sends a message without consequences and returns the resulting model request, which shows the thread's history.
    pub(crate) async fn current_prompt(&self, thread: &str) -> Result<ModelRequest, Verdict> {
        let marker = self.noop_step();
        self.send_message(thread, marker).await?;
        self.wait_for_prompt_with(&self.server().marker_text(marker)).await
    }

    /// Waits for messages that should not arrive.
    pub(crate) async fn wait_for_silence(&self) {
        tokio::time::sleep(self.server().timeouts.quiet_period).await;
    }

    /// Fails if a text is in any prompt of this scenario.
    pub(crate) fn expect_never_in_prompt(&self, needle: &str, what: &str) -> ProbeResult {
        match self.model_requests().into_iter().find(|request| request.has(needle)) {
            None => Ok(()),
            Some(request) => {
                let mut exchanges = self.exchanges();
                exchanges.push(request.exchange());
                fail(format!("{what} reached the model"), exchanges)
            }
        }
    }

    /// Notifications about a thread so far, with the tool servers that received them.
    pub(crate) fn notifications(
        &self,
        route: fn(usize) -> Route,
        thread: &str,
    ) -> Vec<(usize, Arc<RecordedRequest>)> {
        let of = |request: &RecordedRequest| (0..SERVERS).find(|at| request.route == route(*at));
        let requests =
            self.server().requests(|request| of(request).is_some() && request.field("thread_id") == thread);
        requests.into_iter().filter_map(|request| Some((of(&request)?, request))).collect()
    }

    /// Waits until every tool server has received a notification, and returns all notifications.
    pub(crate) async fn notifications_to_all(
        &self,
        route: fn(usize) -> Route,
        thread: &str,
        what: &str,
    ) -> Result<Vec<(usize, Arc<RecordedRequest>)>, Verdict> {
        let servers = self.context.servers();
        self.wait_for(&format!("{what} at each of the {} tool servers", servers.len()), || {
            let received = self.notifications(route, thread);
            let which: HashSet<usize> = received.iter().map(|(at, _)| *at).collect();
            servers.iter().all(|at| which.contains(at)).then_some(received)
        })
        .await
    }

    /// Not observable if the runtime uses only one tool server.
    pub(crate) fn several_servers(&self) -> ProbeResult {
        match self.context.servers().len() {
            0 | 1 => Err(Verdict::not_observable(
                "the runtime fetched the toolset of only one tool server; configure {tool_url}, {tool_url_2} and {tool_url_3}",
            )),
            _ => Ok(()),
        }
    }

    /// Not observable if the runtime does not use this tool server.
    pub(crate) fn needs(&self, server: usize) -> ProbeResult {
        if self.context.servers().contains(&server) {
            return Ok(());
        }
        Err(Verdict::not_observable(format!(
            "the runtime never fetched the toolset of the tool server {}; configure it too",
            ["{tool_url}", "{tool_url_2}", "{tool_url_3}"][server]
        )))
    }

    /// Time for which answers are held back. An action that takes less has not waited for them. It is long enough for a
    /// slow machine.
    pub(crate) fn hold_time(&self) -> Duration {
        self.server().timeouts.arrival / 4
    }
}
