//! Runs handlers of calls that are on disk: validates the arguments, runs the handler and commits its result.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use rap_protocol::schema::{Budget, Rejected};
use rap_protocol::{CallId, ThreadId, limits};
use serde_json::Value;

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
use crate::tool::Handler;

const PANICKED: &str = "the tool failed unexpectedly; it may have done part of its work, so check before you call \
                        it again";

/// Maximum number of tool names in an error message.
const LISTED_NAMES: usize = 50;

/// A handler that has not been polled yet, and its call.
struct Work {
    handler: BoxFuture<'static, Returned>,
    call: Call,
    kind: WorkKind,
}

#[derive(Clone, Copy)]
enum WorkKind {
    Call,
    Subscription,
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

    /// Runs a handler until it returns, until it was stopped and its grace time is over, or until the server stops.
    async fn work(self: &Arc<Self>, Work { handler, call, kind }: Work, run: &Run) {
        let begun = Instant::now();
        let server_ends = match kind {
            WorkKind::Call => &self.ended,
            // A subscription is resumed after a restart, so the server does not wait for it when it stops.
            WorkKind::Subscription => &self.stopping,
        };
        let returned = tokio::select! {
            returned = handler => Some(returned),
            () = run.stopped_for(self.limits.cancel_grace) => None,
            () = server_ends.cancelled() => return,
        };
        Box::pin(self.finish(&call, returned, begun)).await;
    }

    /// Ends a call whose handler has returned, or was dropped after its grace time.
    async fn finish(self: &Arc<Self>, call: &Call, returned: Option<Returned>, begun: Instant) {
        let outcome = match &returned {
            Some(Returned::Result { .. }) => "result",
            Some(Returned::Error(_)) => "error",
            Some(Returned::Nothing) => "ended",
            None => "dropped",
        };
        let input = returned.map_or(Input::GraceOver, Input::Returned);
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
        let handle = Call::new(Arc::clone(self), Arc::clone(run), thread, &offered, &mut call);
        let scrubber = handle.scrubber();
        let call_handle = handle.clone();
        // The author's code runs inside the future, where a panic is caught.
        let (handler, kind): (BoxFuture<'static, Returned>, _) = match offered.tool.handler().clone() {
            Handler::Call(handler) => {
                let output = async move { handler(arguments, handle)?.await };
                (Box::pin(returned_output(output, scrubber)), WorkKind::Call)
            }
            Handler::Subscription(handler) => {
                let subscribe = Subscribe::new(handle, call.confirmed, call.cursor);
                let ended = async move { handler(arguments, subscribe)?.await };
                (Box::pin(returned_nothing(ended, scrubber)), WorkKind::Subscription)
            }
        };
        Ok(Work { handler, call: call_handle, kind })
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

/// Runs the handler of a call. Its output is scrubbed if there is a scrubber. A panic becomes an error.
async fn returned_output(
    handler: impl Future<Output = Result<Output, Error>>,
    scrubber: Option<Arc<Scrubber>>,
) -> Returned {
    let output = match AssertUnwindSafe(handler).catch_unwind().await {
        Ok(Ok(output)) => output,
        failed => return failure(failed.map(Result::err), scrubber).await,
    };
    match scrubber {
        Some(scrubber) => scrubber.scrub(output).await.into_returned(),
        None => output.into_returned(),
    }
}

/// Runs the handler of a subscription.
async fn returned_nothing(
    handler: impl Future<Output = Result<(), Error>>,
    scrubber: Option<Arc<Scrubber>>,
) -> Returned {
    match AssertUnwindSafe(handler).catch_unwind().await {
        Ok(Ok(())) => Returned::Nothing,
        failed => Box::pin(failure(failed.map(Result::err), scrubber)).await,
    }
}

/// Returns the error of a handler, or a general one if it panicked, which is `Err`.
async fn failure<P>(failed: Result<Option<Error>, P>, scrubber: Option<Arc<Scrubber>>) -> Returned {
    let Ok(Some(error)) = failed else { return Returned::Error(PANICKED.into()) };
    if let Error::Source(cause) = &error {
        tracing::warn!(%cause, "a handler failed");
    }
    Returned::Error(match scrubber {
        Some(scrubber) => scrubber.scrub(error.for_model()).await,
        None => error.for_model(),
    })
}
