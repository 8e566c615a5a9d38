//! A session of an MCP client: one thread for the tool servers, with its calls.
//!
//! When it ends, its open calls are cancelled and its thread is closed.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rap_protocol::{Address, CallId, ERROR_PREFIX, Invocation, ThreadId, ToolName};
use serde_json::{Map, Value};
use tokio::sync::broadcast;

use super::bridge::{Bridge, OPEN_CALLS};
use super::call::{Applied, Call};
use super::random_hex;
use super::tasks::Tasks;
use super::tool_server::{NotSent, ToolServer};

/// Maximum number of calls of one session that have ended and can still be read.
const ENDED: usize = 100;
/// Maximum number of resources that one session subscribes to.
const SUBSCRIBED: usize = 1_000;
/// Number of changes that a slow client may be behind.
const CHANGES: usize = 256;

/// A thread for the tool servers, and its calls.
pub(super) struct Session {
    bridge: Arc<Bridge>,
    group: ThreadId,
    calls: Mutex<BTreeMap<CallId, Held>>,
    /// Tasks that the client has asked for.
    pub(super) tasks: Tasks,
    /// Resources whose changes the client wants to know.
    subscribed: Mutex<HashSet<String>>,
    changes: broadcast::Sender<SessionChange>,
    closed: AtomicBool,
}

/// A change that the client of a session is notified about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SessionChange {
    /// The tools have changed.
    Tools,
    /// The list of resources has changed.
    Resources,
    /// A resource has changed.
    Updated(String),
}

#[derive(Clone)]
struct Held {
    call: Arc<Call>,
    token: String,
    /// True if the call is a resource: it is a subscription, or its caller does not wait for it.
    is_resource: bool,
}

/// Reason why a call was not made.
pub(super) enum NotStarted {
    UnknownTool,
    /// Text of an error result.
    Failed(String),
}

/// A call that somebody waits for. If this is dropped before the call has a result, the call is cancelled.
pub(super) struct Running {
    session: Arc<Session>,
    server: Arc<ToolServer>,
    pub(super) call: Arc<Call>,
    cancels: bool,
}

impl Session {
    pub(super) fn open(bridge: &Arc<Bridge>) -> Arc<Session> {
        let id = random_hex::<12>().expect("bug: the system has no source of random bytes");
        let session = Arc::new(Session {
            bridge: Arc::clone(bridge),
            group: ThreadId::new(format!("mcp_{id}")).expect("bug: letters and digits are a valid id"),
            calls: Mutex::default(),
            tasks: Tasks::default(),
            subscribed: Mutex::default(),
            changes: broadcast::Sender::new(CHANGES),
            closed: AtomicBool::new(false),
        });
        bridge.add_session(&session);
        session
    }

    fn calls(&self) -> MutexGuard<'_, BTreeMap<CallId, Held>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn subscribed(&self) -> MutexGuard<'_, HashSet<String>> {
        self.subscribed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Validates a call and sends it to its tool server.
    pub(super) async fn start(
        self: &Arc<Self>,
        name: &str,
        arguments: Map<String, Value>,
    ) -> Result<Running, NotStarted> {
        let known = self.bridge.offered().get(name).cloned();
        let tool = match known {
            Some(tool) => tool,
            None => {
                self.bridge.refresh().await;
                self.bridge.offered().get(name).cloned().ok_or(NotStarted::UnknownTool)?
            }
        };
        self.bridge.validate(&tool, &arguments).await.map_err(NotStarted::Failed)?;
        if self.bridge.callbacks.open() >= OPEN_CALLS {
            let text = format!("{OPEN_CALLS} calls are running already; wait for one of them, or cancel one");
            return Err(NotStarted::Failed(text));
        }
        let failed = |error: String| NotStarted::Failed(error);
        let id = random_hex::<12>().map_err(|error| failed(error.to_string()))?;
        let id = CallId::new(format!("call_{id}")).map_err(|error| failed(error.to_string()))?;
        let operation = tool.tool().name.clone();
        let (running, address) = self.hold(id, operation.clone(), &tool.server).map_err(failed)?;
        let invocation = Invocation {
            operation,
            arguments,
            address,
            thread_ancestors: Vec::new(),
            user_id: None,
            toolset_version: tool.toolset.version.clone(),
        };
        match tool.server.invoke(&tool.toolset, &invocation).await {
            Ok(()) => Ok(running),
            Err(not_sent) => {
                let text = match not_sent {
                    NotSent::Failed(why) => why,
                    NotSent::Changed => {
                        self.bridge.refresh().await;
                        format!("the tools of {} changed; call again", tool.toolset.name)
                    }
                };
                running.call.settle(format!("{ERROR_PREFIX}{text}"));
                self.forget_if_ended(&running.call);
                Err(NotStarted::Failed(text))
            }
        }
    }

    fn hold(
        self: &Arc<Self>,
        id: CallId,
        tool: ToolName,
        server: &Arc<ToolServer>,
    ) -> Result<(Running, Address), String> {
        let call = Arc::new(Call::new(id.clone(), self.group.clone(), tool));
        let (token, callback_url) = self.bridge.callbacks.register(&call, self)?;
        let held = Held { call: Arc::clone(&call), token, is_resource: false };
        self.calls().insert(id.clone(), held);
        let address = Address { id, call_id: None, callback_url, group_id: self.group.clone() };
        let (session, server) = (Arc::clone(self), Arc::clone(server));
        Ok((Running { session, server, call, cancels: true }, address))
    }

    /// Finds a call that is a resource.
    pub(super) fn resource(&self, id: &str) -> Option<Arc<Call>> {
        let id = CallId::new(id).ok()?;
        self.calls().get(&id).filter(|held| held.is_resource).map(|held| Arc::clone(&held.call))
    }

    /// Calls that are resources: subscriptions, and calls that nobody waits for.
    pub(super) fn resources(&self) -> Vec<Arc<Call>> {
        self.calls().values().filter(|held| held.is_resource).map(|held| Arc::clone(&held.call)).collect()
    }

    /// Makes a call a resource, or announces that it has changed.
    pub(super) fn resource_changed(&self, call: &Call) {
        let is_new = match self.calls().get_mut(&call.id) {
            Some(held) => !std::mem::replace(&mut held.is_resource, true),
            None => return,
        };
        if is_new {
            self.announce(SessionChange::Resources);
            self.announce(SessionChange::Tools);
        } else {
            self.announce(SessionChange::Updated(uri(call)));
        }
    }

    /// Announces the effect of a callback, and releases the call if it has ended.
    pub(super) fn callback_applied(&self, call: &Call, applied: &Applied) {
        let is_resource = self.calls().get(&call.id).is_some_and(|held| held.is_resource);
        if *applied == Applied::Resource || *applied == Applied::Changed && is_resource {
            self.resource_changed(call);
        }
        self.forget_if_ended(call);
    }

    /// Releases what is only needed for an open call, if the call has ended.
    pub(super) fn forget_if_ended(&self, call: &Call) {
        if call.is_open() {
            return;
        }
        let mut calls = self.calls();
        let Some(held) = calls.get(&call.id) else { return };
        self.bridge.callbacks.forget(&held.token);
        if !held.is_resource {
            calls.remove(&call.id);
            return;
        }
        let ended: Vec<CallId> =
            calls.iter().filter(|(_, held)| !held.call.is_open()).map(|(id, _)| id.clone()).collect();
        for id in ended.iter().take(ended.len().saturating_sub(ENDED)) {
            calls.remove(id);
        }
    }

    /// Cancels a call or a subscription, and tells the tool servers so.
    pub(super) fn cancel(&self, call: &Arc<Call>) {
        if !call.is_open() {
            return;
        }
        call.settle(format!("{ERROR_PREFIX}cancelled"));
        call.end_subscription();
        self.forget_if_ended(call);
        self.tell_cancelled(call);
    }

    fn tell_cancelled(&self, call: &Call) {
        for server in self.bridge.servers() {
            let (server, group, id) = (Arc::clone(server), self.group.clone(), call.id.clone());
            self.bridge.notify(async move { server.cancel(group, id).await });
        }
    }

    /// Subscribes the client to a resource. False if it subscribes to too many.
    pub(super) fn subscribe(&self, uri: String) -> bool {
        let mut subscribed = self.subscribed();
        let fits = subscribed.len() < SUBSCRIBED || subscribed.contains(&uri);
        if fits {
            subscribed.insert(uri);
        }
        fits
    }

    pub(super) fn unsubscribe(&self, uri: &str) {
        self.subscribed().remove(uri);
    }

    pub(super) fn is_subscribed(&self, uri: &str) -> bool {
        self.subscribed().contains(uri)
    }

    pub(super) fn announce(&self, change: SessionChange) {
        // There may be no client that listens.
        self.changes.send(change).ok();
    }

    /// Returns the resources that the client subscribed to.
    pub(super) fn followed(&self) -> Vec<String> {
        self.subscribed().iter().cloned().collect()
    }

    pub(super) fn changes(&self) -> broadcast::Receiver<SessionChange> {
        self.changes.subscribe()
    }

    /// Ends the calls. Returns those that were open; `None` if the session was closed before.
    fn end(&self) -> Option<Vec<Arc<Call>>> {
        if self.closed.swap(true, Ordering::SeqCst) {
            return None;
        }
        let held: Vec<Held> = std::mem::take(&mut *self.calls()).into_values().collect();
        let mut open = Vec::new();
        for Held { call, token, .. } in held {
            if call.is_open() {
                call.settle(format!("{ERROR_PREFIX}the session was closed"));
                call.end_subscription();
                open.push(call);
            }
            self.bridge.callbacks.forget(&token);
        }
        Some(open)
    }

    /// Closes the session, and tells all servers at once that its thread is closed and its open calls are cancelled.
    pub(super) fn close(&self) {
        let Some(open) = self.end() else { return };
        for server in self.bridge.servers() {
            let (server, group, open) = (Arc::clone(server), self.group.clone(), open.clone());
            self.bridge.notify(async move {
                server.close(group.clone()).await;
                for call in open {
                    server.cancel(group.clone(), call.id.clone()).await;
                }
            });
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
    }
}

impl Running {
    pub(super) fn server(&self) -> &Arc<ToolServer> {
        &self.server
    }

    /// Settles the call with an error, and tells the tool servers that its result is not needed any more.
    pub(super) fn fail(&self, text: String) {
        if self.call.settle(text) {
            self.session.forget_if_ended(&self.call);
            self.session.tell_cancelled(&self.call);
        }
    }

    /// Lets the call continue when nobody waits for it: it becomes a resource.
    pub(super) fn detach(mut self) -> Arc<Call> {
        self.cancels = false;
        self.session.resource_changed(&self.call);
        Arc::clone(&self.call)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.cancels && self.call.outcome().is_none() {
            self.session.cancel(&self.call);
        }
    }
}

/// URI of the resource of a call.
pub(super) fn uri(call: &Call) -> String {
    format!("{URI}{}", call.id)
}

/// Prefix of the URIs of calls.
pub(super) const URI: &str = "rap://calls/";
