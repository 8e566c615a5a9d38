//! Runs handlers of calls that are on disk: validates the arguments, runs the handler and commits its result.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use rap_protocol::schema::{Budget, Rejected};
use rap_protocol::{CallId, ThreadId, limits};
use serde_json::Value;

use super::{Engine, Offered, Run, lock};
use crate::auth::Caller;
use crate::call::Call;
use crate::error::Error;
use crate::journal::{CallSeq, StoredCall};
use crate::output::Output;
use crate::rules::{Input, Returned};
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
        let engine = Arc::clone(self);
        self.tasks.spawn(engine.run(Box::new(call), run));
    }

    /// The size of this future is the memory cost of an idle subscription, so short-lived futures in it are boxed.
    async fn run(self: Arc<Self>, call: Box<StoredCall>, run: Arc<Run>) {
        let seq = call.seq;
        if !run.is_stopped() {
            let begun = tokio::select! {
                biased;
                begun = Box::pin(self.begin(call, &run)) => Some(begun),
                // Dropping the future stops the validation.
                () = run.stopped() => None,
                () = self.ended.cancelled() => None,
            };
            match begun {
                Some(Ok(work)) => self.work(work, &run).await,
                Some(Err(rejected)) => Box::pin(self.reject(seq, rejected)).await,
                None => {}
            }
        }
        lock(&self.runs).remove(&seq);
    }

    /// Runs a handler until it returns, until the grace time after a cancellation is over, or until the server stops.
    async fn work(self: &Arc<Self>, Work { handler, call, kind }: Work, run: &Run) {
        let begun = Instant::now();
        let server_ends = match kind {
            WorkKind::Call => &self.ended,
            // A subscription is resumed after a restart, so the server does not wait for it when it stops.
            WorkKind::Subscription => &self.stopping,
        };
        let returned = tokio::select! {
            returned = handler => returned,
            () = run.stopped_for(self.limits.cancel_grace) => return,
            () = server_ends.cancelled() => return,
        };
        Box::pin(self.finish(&call, returned, begun)).await;
    }

    async fn finish(self: &Arc<Self>, call: &Call, returned: Returned, begun: Instant) {
        let outcome = match &returned {
            Returned::Result { .. } => "result",
            Returned::Error(_) => "error",
            Returned::Nothing => "ended",
        };
        // Ignored if the call was cancelled or its thread was closed meanwhile.
        let taken = call.commit(Input::Returned(returned), None).await;
        let outcome = if taken.is_ok() { outcome } else { "cancelled" };
        let ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (tool, thread, id) = (call.tool(), call.thread().id(), call.id());
        tracing::info!(tool, ?thread, ?id, outcome, ms, "call");
    }

    async fn reject(self: &Arc<Self>, seq: CallSeq, rejected: RejectedCall) {
        let RejectedCall { caller, tool, thread, id, why } = rejected;
        // Ignored if the call was cancelled or its thread was closed meanwhile.
        let taken = self.commit(&caller, seq, Input::Returned(Returned::Error(why)), None).await;
        let outcome = if taken.is_ok() { "refused" } else { "cancelled" };
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
        let tool = Arc::clone(&offered.name);
        let handle = Call::new(Arc::clone(self), Arc::clone(run), thread, tool, &mut call);
        let call_handle = handle.clone();
        // The author's code runs inside the future, where a panic is caught.
        let (handler, kind): (BoxFuture<'static, Returned>, _) = match offered.tool.handler().clone() {
            Handler::Call(handler) => {
                let output = async move { handler(arguments, handle)?.await };
                (Box::pin(catch_panic(output, Output::into_returned)), WorkKind::Call)
            }
            Handler::Subscription(handler) => {
                let subscribe = Subscribe::new(handle, call.confirmed, call.cursor);
                let ended = async move { handler(arguments, subscribe)?.await };
                (Box::pin(catch_panic(ended, |()| Returned::Nothing)), WorkKind::Subscription)
            }
        };
        Ok(Work { handler, call: call_handle, kind })
    }

    /// Returns the called tool, or an error message if it does not exist or the arguments are invalid.
    async fn offered(&self, call: &StoredCall, arguments: &Arc<Value>) -> Result<&Offered, String> {
        let operation = call.operation.as_str();
        let offered = self.tools.get(operation).ok_or_else(|| self.unknown(operation))?;
        let mut inline = Budget::new(limits::INLINE_VALIDATION_STEPS);
        match self.validations.validate(&call.caller, &offered.schema, arguments, &mut inline).await {
            Ok(()) => Ok(offered),
            Err(rejected @ Rejected::Violations(_)) => {
                Err(format!("the arguments do not match the schema of {operation}: {rejected}"))
            }
            Err(rejected) => Err(format!("the arguments of {operation} could not be validated: {rejected}")),
        }
    }

    fn unknown(&self, operation: &str) -> String {
        let mut names: Vec<&str> = self.tools.keys().map(String::as_str).collect();
        names.sort_unstable();
        let more = if names.len() > LISTED_NAMES { ", …" } else { "" };
        names.truncate(LISTED_NAMES);
        format!("there is no tool {operation:?}; the tools of this server are: {}{more}", names.join(", "))
    }
}

/// A call that failed validation.
struct RejectedCall {
    caller: Caller,
    tool: String,
    thread: ThreadId,
    id: CallId,
    why: String,
}

/// Runs a handler and converts its result. A panic becomes an error.
async fn catch_panic<T>(
    handler: impl Future<Output = Result<T, Error>>,
    returned: impl FnOnce(T) -> Returned,
) -> Returned {
    match AssertUnwindSafe(handler).catch_unwind().await {
        Ok(Ok(value)) => returned(value),
        Ok(Err(error)) => failed(&error),
        Err(_) => Returned::Error(PANICKED.into()),
    }
}

fn failed(error: &Error) -> Returned {
    if let Error::Source(cause) = error {
        tracing::warn!(%cause, "a handler failed");
    }
    Returned::Error(error.for_model())
}
