//! Threads of the sample runtime: messages, model requests, calls and results.

use std::time::Duration;

use serde_json::{Value, json};
use url::Url;

use super::{Call, CallState, Fault, Ids, SampleRuntime, State, Thread, Tools};

const SUBSCRIPTIONS: usize = 32;
/// Interval at which the fault of sequential calls looks for results.
const TURN: Duration = Duration::from_millis(20);
const INTERRUPTED: &str = "interrupted";
const RUNNING: &str = "still running; the result will follow";

impl State {
    pub(super) fn call(&mut self, thread: &str, id: &str) -> Option<&mut Call> {
        self.calls.iter_mut().rev().find(|call| call.thread == thread && call.id == id)
    }

    pub(super) fn root(&self, thread: &str) -> String {
        self.threads[thread].ancestors.first().cloned().unwrap_or_else(|| thread.to_owned())
    }

    fn thread(&mut self, id: &str) -> &mut Thread {
        self.threads.get_mut(id).unwrap()
    }

    pub(super) fn fresh_id(&mut self, prefix: &str) -> String {
        self.count += 1;
        format!("{prefix}{}", self.count)
    }
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn result(id: &str, text: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": text})
}

impl SampleRuntime {
    pub(super) fn open(&self, text: &str) -> String {
        let mut state = self.state();
        let id = state.fresh_id("thread-");
        state.threads.insert(id.clone(), Thread::default());
        drop(state);
        self.take_message(&id, text);
        id
    }

    pub(super) fn take_message(&self, id: &str, text: &str) {
        let mut state = self.state();
        let deaf = self.is(Fault::IgnoresMessagesWhileCallsAreOpen) || self.is_blocked(&state, id);
        let thread = state.thread(id);
        if thread.asking.is_none() && !thread.batch.is_empty() && !deaf {
            self.replace_with_placeholders(&mut state, id);
        }
        self.input(&mut state, id, vec![user(text)]);
    }

    /// Returns true if the thread waits for an acknowledgement, which is a fault.
    fn is_blocked(&self, state: &State, id: &str) -> bool {
        let waits = |call: &Call| call.thread == id && call.state == CallState::Open && !call.acknowledged;
        self.is(Fault::AcknowledgementsBlockTheThread) && state.calls.iter().any(waits)
    }

    /// Continues a thread that waited for an acknowledgement.
    pub(super) fn unblock(&self, state: &mut State, id: &str) {
        let user_waits = state.thread(id).held.iter().flatten().any(|item| item["role"] == "user");
        if self.is(Fault::AcknowledgementsBlockTheThread) && user_waits && !self.is_blocked(state, id) {
            self.replace_with_placeholders(state, id);
            self.release(state, id);
            self.ask(state, id);
        }
    }

    /// Gives open calls a placeholder result. Their real results arrive later as synthetic calls.
    fn replace_with_placeholders(&self, state: &mut State, id: &str) {
        for call in std::mem::take(&mut state.thread(id).batch) {
            state.thread(id).messages.push(result(&call, RUNNING));
            state.call(id, &call).unwrap().state = CallState::Running;
        }
    }

    /// Adds input to a thread, or holds it while the thread is busy.
    fn input(&self, state: &mut State, id: &str, items: Vec<Value>) {
        let thread = state.thread(id);
        if thread.asking.is_some() || !thread.batch.is_empty() {
            thread.held.push(items);
            return;
        }
        thread.messages.extend(items);
        self.ask(state, id);
    }

    fn ask(&self, state: &mut State, id: &str) {
        let thread = state.thread(id);
        thread.turn += 1;
        thread.asking = Some(thread.turn);
        let turn = thread.turn;
        self.spawn(self.clone().ask_model(id.to_owned(), turn));
    }

    /// Adds the held input to the history. Returns true if there was any.
    fn release(&self, state: &mut State, id: &str) -> bool {
        let thread = state.thread(id);
        let held = std::mem::take(&mut thread.held);
        let any = !held.is_empty();
        thread.messages.extend(held.into_iter().flatten());
        any
    }

    async fn session(&self, root: &str) -> Tools {
        let known = if self.is(Fault::NeverRefetchesToolsets) {
            self.state().sessions.get("thread-1").cloned()
        } else {
            self.state().sessions.get(root).cloned()
        };
        let tools = match known {
            Some(tools) => tools,
            None => self.discover().await,
        };
        self.state().sessions.insert(root.to_owned(), tools.clone());
        tools
    }

    pub(super) async fn ask_model(self, id: String, turn: u64) {
        let root = self.state().root(&id);
        let tools = self.session(&root).await;
        let messages = {
            let mut state = self.state();
            for (at, toolset) in tools.iter().enumerate() {
                if toolset.is_none() && !self.is(Fault::DoesNotReportMissingToolsets) {
                    let notice = format!("the tools of {} could not be fetched", self.0.servers[at]);
                    state.thread(&id).notices.push(notice);
                }
            }
            state.thread(&id).messages.clone()
        };
        let messages: Vec<Value> = messages.iter().map(|message| self.in_prompt(message)).collect();
        let body = json!({"model": "toy", "messages": messages, "tools": self.offered(&tools)});
        let url = Url::parse(&format!("{}/chat/completions", self.0.model)).unwrap();
        let answer = self.0.http.post_json(&url, &[], body.to_string().into()).await.unwrap();
        let answered: Value = serde_json::from_slice(&answer.body).unwrap();
        let mut state = self.state();
        if state.thread(&id).asking != Some(turn) || state.thread(&id).closed {
            return;
        }
        state.thread(&id).asking = None;
        if answer.status != 200 {
            if self.is(Fault::LosesMessages) {
                state.thread(&id).messages.pop();
            }
            if self.release(&mut state, &id) {
                self.ask(&mut state, &id);
            }
            return;
        }
        self.take_answer(&mut state, &id, answered["choices"][0]["message"].clone(), &tools);
    }

    fn offered(&self, tools: &Tools) -> Vec<Value> {
        let function = |name: &Value, schema: &Value| json!({"type": "function", "function": {"name": name, "parameters": schema}});
        let remote = || tools.iter().flatten().flat_map(|toolset| toolset["tools"].as_array().unwrap());
        let is_unique = |tool: &&Value| {
            let same = remote().filter(|other| other["name"] == tool["name"]).count();
            same == 1 || self.is(Fault::OffersDuplicateNames)
        };
        let replaces = self.is(Fault::RemoteToolsReplaceBuiltIns);
        let is_built_in = |tool: &Value| tool["name"] == "cancel_subscription";
        let mut offered: Vec<Value> = remote()
            .filter(is_unique)
            .filter(|tool| replaces || !is_built_in(tool))
            .map(|tool| function(&tool["name"], &tool["inputSchema"]))
            .collect();
        let is_replaced = replaces && remote().any(is_built_in);
        if !self.is(Fault::CancelNotOffered) && !is_replaced {
            let schema = json!({"type": "object", "properties": {"tool_call_id": {"type": "string"}}});
            offered.push(function(&json!("cancel_subscription"), &schema));
        }
        offered
    }

    fn take_answer(&self, state: &mut State, id: &str, mut message: Value, tools: &Tools) {
        let (mut built_in, mut refused) = (Vec::new(), Vec::new());
        let mut calls = Vec::new();
        for told in message["tool_calls"].as_array_mut().into_iter().flatten() {
            let given = told["id"].as_str().unwrap().to_owned();
            let call_id = self.new_call_id(state, id, &given);
            told["id"] = json!(call_id);
            let name = told["function"]["name"].as_str().unwrap().to_owned();
            let arguments: Value =
                serde_json::from_str(told["function"]["arguments"].as_str().unwrap()).unwrap();
            if name == "cancel_subscription" {
                built_in.push((call_id, self.wire_id(arguments["tool_call_id"].as_str().unwrap())));
                continue;
            }
            let offers = |toolset: &Option<Value>| {
                toolset.as_ref().is_some_and(|toolset| {
                    toolset["tools"].as_array().unwrap().iter().any(|tool| tool["name"] == *name)
                })
            };
            let is_valid = arguments["mark"].is_string() || self.is(Fault::SendsInvalidArguments);
            let Some(server) = tools.iter().position(offers).filter(|_| is_valid) else {
                refused.push(call_id);
                continue;
            };
            let key = state.fresh_id("");
            let url = if self.is(Fault::UrlFromIds) {
                format!("{}/callback/{id}/{call_id}", self.0.url)
            } else {
                format!("{}/callback/{:016x}{:016x}", self.0.url, hashed(&key), hashed(&format!("{key}+")))
            };
            calls.push(Call {
                thread: id.to_owned(),
                id: call_id,
                given,
                name,
                arguments,
                server,
                url,
                state: CallState::Open,
                acknowledged: false,
                response_url: None,
            });
        }
        let any = !calls.is_empty() || !built_in.is_empty() || !refused.is_empty();
        let thread = state.thread(id);
        thread.messages.push(message);
        thread.batch = calls.iter().map(|call| call.id.clone()).collect();
        state.calls.extend(calls.iter().cloned());
        if self.is(Fault::CallsOneByOne) {
            self.spawn(self.clone().invoke_in_turn(calls));
        } else {
            calls.into_iter().for_each(|call| self.spawn(self.clone().invoke(call)));
        }
        for call in refused {
            state.thread(id).messages.push(result(&call, "Error: there is no such tool"));
        }
        for (call, subscription) in built_in {
            let text = self.cancel_subscription(state, id, &subscription);
            state.thread(id).messages.push(result(&call, &text));
        }
        if !state.thread(id).batch.is_empty() {
            // A user message that arrived meanwhile does not wait for the calls.
            let user_waits = state.thread(id).held.iter().flatten().any(|item| item["role"] == "user");
            if user_waits && !self.is(Fault::IgnoresMessagesWhileCallsAreOpen) {
                self.replace_with_placeholders(state, id);
                self.release(state, id);
                self.ask(state, id);
            }
            return;
        }
        if self.release(state, id) || any {
            return self.ask(state, id);
        }
        let thread = state.thread(id);
        thread.settled = thread.messages.len();
    }

    /// Invokes each call when the one before it has returned.
    async fn invoke_in_turn(self, calls: Vec<Call>) {
        for call in calls {
            self.clone().invoke(call.clone()).await;
            while self.state().call(&call.thread, &call.id).is_some_and(|call| call.state == CallState::Open)
            {
                tokio::time::sleep(TURN).await;
            }
        }
    }

    /// Id of a new call, in the invocation and in the history.
    fn new_call_id(&self, state: &mut State, thread: &str, given: &str) -> String {
        let number = &mut state.thread(thread).calls;
        *number += 1;
        let number = *number;
        match self.0.fault {
            Some(Fault::ReusesCallIds) => format!("toy_{:016x}", hashed(&format!("{thread} {given}"))),
            Some(Fault::UsesIdsOfTheModel) if state.call(thread, given).is_none() => given.to_owned(),
            Some(Fault::IdsPerThread) => format!("call-{number}"),
            Some(Fault::IdsPerSession) => format!("{}_{number}", state.root(thread)),
            _ => state.fresh_id("toy_"),
        }
    }

    /// A message of the history as it is written in prompts.
    fn in_prompt(&self, message: &Value) -> Value {
        if self.0.ids != Ids::ShortInPrompts {
            return message.clone();
        }
        let text = message.to_string();
        let mut parts = text.split("toy_");
        let mut short = parts.next().unwrap().to_owned();
        for part in parts {
            let digits = part.bytes().take_while(u8::is_ascii_digit).count();
            short.push_str(&format!("p{:0>8}{}", &part[..digits], &part[digits..]));
        }
        serde_json::from_str(&short).unwrap()
    }

    /// Converts an id in a prompt to the id in the invocation.
    fn wire_id(&self, id: &str) -> String {
        match id.strip_prefix('p').and_then(|number| number.parse::<u64>().ok()) {
            Some(number) if self.0.ids == Ids::ShortInPrompts => format!("toy_{number}"),
            _ => id.to_owned(),
        }
    }

    fn cancel_subscription(&self, state: &mut State, thread: &str, id: &str) -> String {
        let foreign = self.is(Fault::CancelsForeign);
        let found = state.calls.iter_mut().find(|call| {
            call.id == id && (call.thread == thread || foreign) && call.state == CallState::Subscribed
        });
        let Some(call) = found else {
            if self.is(Fault::CancelsUnknown) && state.calls.iter().all(|call| call.id != id) {
                return "cancelled".into();
            }
            return "Error: this thread has no such subscription".into();
        };
        if !self.is(Fault::CancelLeavesActive) {
            call.state = CallState::Interrupted;
        }
        let call = call.clone();
        if !self.is(Fault::CancelSendsNoNotification) {
            let only = self.is(Fault::CancelsSubscriptionsOnlyAtUsedServer).then_some(call.server);
            self.tell_cancelled(&call, only);
        }
        if self.is(Fault::CancelAnswersLater) { RUNNING.into() } else { "cancelled".into() }
    }

    fn tell_cancelled(&self, call: &Call, only: Option<usize>) {
        let body = json!({"thread_id": call.thread, "tool_call_id": call.id});
        let runtime = self.clone();
        tokio::spawn(async move { runtime.notify("/cancel_tool_call", body, only).await });
    }

    /// A synthetic call with its result.
    fn synthetic(&self, state: &mut State, call: &Call, kind: &str, text: &str) -> Vec<Value> {
        let id = state.fresh_id("toy_");
        let mut arguments = call.arguments.clone();
        arguments["kind"] = json!(kind);
        let function = json!({"name": call.name, "arguments": arguments.to_string()});
        let told = json!({"id": id, "type": "function", "function": function});
        if self.is(Fault::EventsAsUserMessages) {
            return vec![user(text)];
        }
        vec![json!({"role": "assistant", "content": null, "tool_calls": [told]}), result(&id, text)]
    }

    pub(super) fn take_result(&self, call: &Call, text: &str, subscription: bool) {
        let mut state = self.state();
        let closed = state.thread(&call.thread).closed;
        let Some(known) = state.call(&call.thread, &call.id) else { return };
        let before = known.state;
        let late = before == CallState::Interrupted && self.is(Fault::AcceptsLateResults);
        let again = before == CallState::Returned && self.is(Fault::CountsDuplicates);
        if closed || !(matches!(before, CallState::Open | CallState::Running) || late || again) {
            return;
        }
        known.state = CallState::Returned;
        let active = state
            .calls
            .iter()
            .filter(|other| other.thread == call.thread && other.state == CallState::Subscribed)
            .count();
        if subscription && active < SUBSCRIPTIONS && !self.is(Fault::IgnoresConfirmations) {
            state.call(&call.thread, &call.id).unwrap().state = CallState::Subscribed;
        }
        let thread = state.thread(&call.thread);
        let Some(at) = thread.batch.iter().position(|open| *open == call.id) else {
            let kind = format!("interrupt:{} (result of a call that was still running)", call.id);
            let items = self.synthetic(&mut state, call, &kind, text);
            return self.input(&mut state, &call.thread, items);
        };
        // The fault: the first open call gets the result.
        let at = if self.is(Fault::SwapsResults) { 0 } else { at };
        let whose = thread.batch.remove(at);
        thread.messages.push(result(&whose, text));
        if state.thread(&call.thread).batch.is_empty() {
            self.release(&mut state, &call.thread);
            self.ask(&mut state, &call.thread);
        }
    }

    /// Returns true if the event was accepted. `by_default` means that it has no field `associative`.
    pub(super) fn take_event(
        &self,
        call: &Call,
        event: &rap_protocol::SubscriptionEvent,
        by_default: bool,
    ) -> bool {
        let mut state = self.state();
        let listens = self.is(Fault::AcceptsEventsAfterClosing);
        let active = matches!(call.state, CallState::Subscribed)
            || (call.state == CallState::Ended && self.is(Fault::EventsAfterFinal))
            || (call.state == CallState::Returned && self.is(Fault::EventsOfAnyCall));
        if !active || (state.thread(&call.thread).closed && !listens) {
            return false;
        }
        let end = if event.is_final { "subscription has ended" } else { "subscription remains active" };
        let items = self.synthetic(&mut state, call, &format!("interrupt:{} ({end})", call.id), &event.text);
        if event.is_final {
            state.call(&call.thread, &call.id).unwrap().state = CallState::Ended;
        }
        let inline = (event.associative && !self.is(Fault::NoInlineEvents))
            || self.is(Fault::AllEventsInline)
            || (by_default && self.is(Fault::InlineByDefault));
        if inline {
            self.take_inline(&mut state, call, items);
        } else {
            self.spawn_event_child(&mut state, &call.thread, items);
        }
        true
    }

    fn take_inline(&self, state: &mut State, call: &Call, items: Vec<Value>) {
        let second = self.is(Fault::EventsAsSecondResults);
        let thread = state.thread(&call.thread);
        if second {
            let own = |message: &Value| message["tool_call_id"] == *call.id;
            let at = thread.messages.iter().rposition(own).unwrap();
            thread.messages.insert(at + 1, result(&call.id, "there is an event"));
        }
        let drops = (!thread.batch.is_empty() && self.is(Fault::DropsEventsBehindCalls))
            || (thread.asking.is_some() && self.is(Fault::DropsEventsBehindQuestions));
        if drops {
            return;
        }
        if !thread.batch.is_empty() && self.is(Fault::EventsBetweenCallsAndResults) {
            return thread.messages.extend(items);
        }
        self.input(state, &call.thread, items);
    }

    /// Creates a child thread for an event.
    fn spawn_event_child(&self, state: &mut State, parent: &str, items: Vec<Value>) {
        let id = state.fresh_id("thread-");
        let before = state.thread(parent).clone();
        let mut messages = before.messages[..before.settled].to_vec();
        if self.is(Fault::ChildrenInheritNothing) {
            messages.truncate(1);
        }
        messages.extend(items);
        if self.is(Fault::MixesConversations) {
            messages.push(state.thread("thread-1").messages[0].clone());
        }
        let mut ancestors = before.ancestors;
        ancestors.push(parent.to_owned());
        state.threads.insert(id.clone(), Thread { ancestors, messages, ..Thread::default() });
        self.ask(state, &id);
    }

    pub(super) async fn interrupt(&self, id: &str) {
        let calls = self.stop(id);
        if self.is(Fault::CancellingWaits) {
            return self.cancel_all(&calls).await;
        }
        for call in &calls {
            self.tell_cancelled(call, self.is(Fault::CancelsOnlyAtUsedServer).then_some(call.server));
        }
    }

    /// Notifies the servers and waits for their answers.
    async fn cancel_all(&self, calls: &[Call]) {
        for call in calls {
            let body = json!({"thread_id": call.thread, "tool_call_id": call.id});
            for told in self.notify("/cancel_tool_call", body, None).await {
                told.await.unwrap();
            }
        }
    }

    /// Interrupts the open calls and drops the model's answer in progress.
    fn stop(&self, id: &str) -> Vec<Call> {
        let mut state = self.state();
        state.thread(id).asking = None;
        let mut stopped = Vec::new();
        for call in std::mem::take(&mut state.thread(id).batch) {
            state.thread(id).messages.push(result(&call, INTERRUPTED));
            let call = state.call(id, &call).unwrap();
            call.state = CallState::Interrupted;
            stopped.push(call.clone());
        }
        stopped
    }

    pub(super) async fn close(&self, id: &str) {
        let open = self.stop(id);
        let used = {
            let mut state = self.state();
            state.thread(id).closed = true;
            let own = state.calls.iter().filter(|call| call.thread == id);
            let subscribed: Vec<Call> =
                own.clone().filter(|call| call.state == CallState::Subscribed).cloned().collect();
            if self.is(Fault::ClosingCancels) {
                subscribed.iter().for_each(|call| self.tell_cancelled(call, None));
            }
            own.map(|call| call.server).next().unwrap_or(0)
        };
        let (runtime, body) = (self.clone(), json!({"thread_id": id}));
        let told = tokio::spawn(async move {
            if runtime.is(Fault::CancelsBeforeClosing) {
                runtime.cancel_all(&open).await;
            }
            if !runtime.is(Fault::NotifiesOfNoClosing) {
                let only = runtime.is(Fault::NotifiesOnlyUsedServers).then_some(used);
                for told in runtime.notify("/close_thread", body, only).await {
                    told.await.unwrap();
                }
            }
            if !runtime.is(Fault::CancelsBeforeClosing) && !runtime.is(Fault::ClosingLeavesCalls) {
                runtime.cancel_all(&open).await;
            }
        });
        if self.is(Fault::ClosingWaits) {
            told.await.unwrap();
        }
    }
}

/// Hash for tokens. The checker cannot guess it, and it is the same in every run.
fn hashed(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
    })
}
