//! Runs handlers of calls that are on disk: validates the arguments, runs the handler and commits its result.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use futures_util::future::BoxFuture;
use rap_protocol::schema::{Budget, Rejected};
use rap_protocol::{CallId, ThreadId, limits};
use serde_json::Value;
use tokio::time::{Sleep, sleep};

use super::deadlines::Deadline;
use super::{Engine, Offer, Offered, Run, lock};
use crate::auth::Caller;
use crate::call::Call;
use crate::error::Error;
use crate::journal::{CallSeq, StoredCall};
use crate::output::Output;
use crate::rules::{Input, Returned, StopCause, time_left};
use crate::scrub::Scrubber;
use crate::subscription::Subscribe;
use crate::tool::{Handler, StartResult};

const PANICKED: &str = "the tool failed unexpectedly; it may have done part of its work, so check before you call \
                        it again";

/// Maximum number of tool names in an error message.
const LISTED_NAMES: usize = 50;

/// A handler that has not been polled yet, and its call.
struct Work {
    handler: Running,
    call: Call,
}

enum Running {
    Call(BoxFuture<'static, Result<Output, Error>>),
    Subscription(BoxFuture<'static, Result<(), Error>>),
}

impl Running {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Ended> {
        match self {
            Running::Call(handler) => poll_handler(handler, context, Ended::Output),
            Running::Subscription(handler) => poll_handler(handler, context, |()| Ended::Nothing),
        }
    }
}

/// Polls the author's future. A panic ends it.
fn poll_handler<T>(
    handler: &mut BoxFuture<'static, Result<T, Error>>,
    context: &mut Context<'_>,
    returned: fn(T) -> Ended,
) -> Poll<Ended> {
    match catch_unwind(AssertUnwindSafe(|| handler.as_mut().poll(context))) {
        Ok(polled) => polled.map(|output| output.map_or_else(Ended::Error, returned)),
        Err(_panic) => Poll::Ready(Ended::Panicked),
    }
}

/// The end of a handler.
enum Ended {
    Output(Output),
    /// The handler of a subscription has returned.
    Nothing,
    Error(Error),
    Panicked,
    /// The call was cancelled, and its handler has used up its grace time.
    GraceOver,
}

impl Engine {
    /// Starts the handler of a call that is on disk and registered.
    pub(super) fn start(self: &Arc<Self>, call: StoredCall, run: Arc<Run>) {
        if let Some(offered) = self.offer().tools.get(&call.operation)
            && !call.confirmed
        {
            let timeout = offered.tool.timeout_or(self.limits.call_timeout);
            let left = time_left(timeout, call.accepted_at, self.now());
            self.set_deadline(call.seq, &call.caller, Deadline::Timeout { timeout, left });
        }
        let engine = Arc::clone(self);
        self.tasks.spawn(engine.run(Box::new(call), run));
    }

    /// The size of this future is the memory cost of an idle subscription, so short-lived futures in it are boxed.
    async fn run(self: Arc<Self>, call: Box<StoredCall>, run: Arc<Run>) {
        let seq = call.seq;
        match Box::pin(self.begin_unless_stopped(call, &run)).await {
            Some(Ok(work)) => self.work(work, &run).await,
            Some(Err(rejected)) => Box::pin(self.reject(seq, rejected)).await,
            None => {}
        }
        self.clear_deadline(seq);
        lock(&self.runs).remove(&seq);
        self.run_ended.notify_waiters();
    }

    /// Prepares a call. Returns `None` if it was stopped meanwhile; a cancelled call then has its result.
    async fn begin_unless_stopped(
        self: &Arc<Self>,
        call: Box<StoredCall>,
        run: &Arc<Run>,
    ) -> Option<Result<Work, RejectedCall>> {
        let (seq, caller) = (call.seq, call.caller.clone());
        tokio::select! {
            biased;
            // Dropping the future of `begin` stops the validation.
            () = run.stopped() => {}
            begun = self.begin(call, run) => return Some(begun),
            () = self.ended.cancelled() => return None,
        }
        // Ignored if the thread was closed.
        self.commit(&caller, seq, Input::GraceOver, None).await.ok();
        None
    }

    /// Runs a handler until it returns, until it was stopped and its grace time is over, or until the server ends.
    async fn work(self: &Arc<Self>, Work { mut handler, call }: Work, run: &Run) {
        let begun = Instant::now();
        let mut grace = None;
        let ended = poll_fn(|context| self.poll_work(&mut handler, run, &mut grace, context)).await;
        drop(handler);
        if let Some(ended) = ended {
            Box::pin(self.finish(&call, ended, begun)).await;
        }
    }

    /// Polls a handler, and what may end it. `None` means that the server ends. There is no future to wait for a stop: it
    /// would be most of the memory of an idle subscription.
    fn poll_work(
        &self,
        handler: &mut Running,
        run: &Run,
        grace: &mut Option<Pin<Box<Sleep>>>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Ended>> {
        // Before everything is checked, so that no wake-up is lost.
        run.task.register(context.waker());
        if let Poll::Ready(ended) = handler.poll(context) {
            return Poll::Ready(Some(ended));
        }
        let server_ends = match handler {
            Running::Call(_) => &self.ended,
            // A subscription is resumed after a restart, so the server does not wait for it when it stops.
            Running::Subscription(_) => &self.stopping,
        };
        if server_ends.is_cancelled() {
            return Poll::Ready(None);
        }
        if !run.is_stopped() {
            return Poll::Pending;
        }
        let grace = grace.get_or_insert_with(|| Box::pin(sleep(self.limits.cancel_grace)));
        grace.as_mut().poll(context).map(|()| Some(Ended::GraceOver))
    }

    /// Wakes the tasks of all handlers, because the server stops.
    pub(super) fn wake_runs(&self) {
        for run in lock(&self.runs).values() {
            run.task.wake();
        }
    }

    /// Ends a call whose handler has returned, or was dropped after its grace time. Output and errors are scrubbed, unless
    /// the tool asks for unchanged output.
    async fn finish(self: &Arc<Self>, call: &Call, ended: Ended, begun: Instant) {
        let scrubber = call.scrubber();
        let (outcome, input) = match ended {
            Ended::Output(output) => {
                let output = match scrubber {
                    Some(scrubber) => scrubber.scrub(output).await,
                    None => output,
                };
                ("result", Input::Returned(output.into_returned()))
            }
            Ended::Nothing => ("ended", Input::Returned(Returned::Nothing)),
            Ended::Error(error) => {
                ("error", Input::Returned(Returned::Error(text_of(error, scrubber).await)))
            }
            Ended::Panicked => ("error", Input::Returned(Returned::Error(PANICKED.into()))),
            Ended::GraceOver => ("dropped", Input::GraceOver),
        };
        // Ignored if the call has ended meanwhile.
        let taken = call.commit(input, None).await;
        let stopped = call.run().stop_cause();
        let outcome = if taken.is_ok() { outcome } else { stopped.map_or(outcome, StopCause::as_str) };
        let ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (tool, thread, id) = (call.tool(), call.thread().id(), call.id());
        tracing::info!(tool, ?thread, ?id, outcome, ms, "call");
    }

    async fn reject(self: &Arc<Self>, seq: CallSeq, rejected: RejectedCall) {
        let RejectedCall { caller, tool, thread, id, why } = rejected;
        // Ignored if the call was cancelled or its thread was closed meanwhile.
        let taken = self.commit(&caller, seq, Input::Returned(Returned::Error(why)), None).await;
        let outcome = if taken.is_ok() { "refused" } else { "stopped" };
        tracing::info!(tool, ?thread, ?id, outcome, ms = 0, "call");
    }

    /// Validates a call and creates the future of its handler.
    async fn begin(
        self: &Arc<Self>,
        mut call: Box<StoredCall>,
        run: &Arc<Run>,
    ) -> Result<Work, RejectedCall> {
        let arguments = Arc::new(Value::Object(std::mem::take(&mut call.arguments)));
        let offered = match self.offered(&call, &arguments).await {
            Ok(offered) => offered,
            Err(why) => {
                let StoredCall { caller, operation: tool, thread, id, .. } = *call;
                return Err(RejectedCall { caller, tool, thread, id, why });
            }
        };
        let arguments = Arc::unwrap_or_clone(arguments);
        let thread = self.thread(&call.caller, &call.thread);
        let handle = Call::new(Arc::clone(self), Arc::clone(run), thread, Arc::clone(&offered), &mut call);
        let call_handle = handle.clone();
        let handler = match offered.tool.handler() {
            Handler::Call(handler) => Running::Call(started(|| handler(arguments, handle))),
            Handler::Subscription(handler) => {
                let subscribe = Subscribe::new(handle, call.confirmed, call.cursor);
                Running::Subscription(started(|| handler(arguments, subscribe)))
            }
        };
        Ok(Work { handler, call: call_handle })
    }

    /// Returns the called tool, or an error message if it does not exist or the arguments are invalid.
    async fn offered(&self, call: &StoredCall, arguments: &Arc<Value>) -> Result<Arc<Offered>, String> {
        let operation = call.operation.as_str();
        let offer = self.offer();
        let offered = offer.tools.get(operation).cloned().ok_or_else(|| unknown(&offer, operation))?;
        let mut inline = Budget::new(limits::INLINE_VALIDATION_STEPS);
        match self.validations.validate(&call.caller, &offered.schema, arguments, &mut inline).await {
            Ok(()) => Ok(offered),
            Err(rejected @ Rejected::Violations(_)) => {
                Err(format!("the arguments do not match the schema of {operation}: {rejected}"))
            }
            Err(rejected) => Err(format!("the arguments of {operation} could not be validated: {rejected}")),
        }
    }
}

fn unknown(offer: &Offer, operation: &str) -> String {
    let mut names: Vec<&str> = offer.tools.keys().map(String::as_str).collect();
    names.sort_unstable();
    let more = if names.len() > LISTED_NAMES { ", …" } else { "" };
    names.truncate(LISTED_NAMES);
    format!("there is no tool {operation:?}; the tools of this server are: {}{more}", names.join(", "))
}

/// A call that failed validation.
struct RejectedCall {
    caller: Caller,
    tool: String,
    thread: ThreadId,
    id: CallId,
    why: String,
}

/// Calls the author's function. Its future fails if the function itself fails, and panics if it panics.
fn started<T: Send + 'static>(
    start: impl FnOnce() -> StartResult<T>,
) -> BoxFuture<'static, Result<T, Error>> {
    match catch_unwind(AssertUnwindSafe(start)) {
        Ok(Ok(handler)) => handler,
        Ok(Err(error)) => Box::pin(std::future::ready(Err(error))),
        Err(panic) => Box::pin(async move { resume_unwind(panic) }),
    }
}

/// Returns the error of a handler as the model sees it.
async fn text_of(error: Error, scrubber: Option<Arc<Scrubber>>) -> String {
    if let Error::Source(cause) = &error {
        tracing::warn!(%cause, "a handler failed");
    }
    match scrubber {
        Some(scrubber) => scrubber.scrub(error.for_model()).await,
        None => error.for_model(),
    }
}
