//! Running handlers: acknowledge has happened, now validate, execute, and hand the result to delivery.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use rap_protocol::{CallId, ThreadId};
use serde_json::Value;

use super::{Engine, Offered, Run, lock};
use crate::call::Call;
use crate::error::Error;
use crate::journal::{Seq, StoredCall};
use crate::output::Output;
use crate::rules::{Input, Returned};
use crate::subscription::Subscribe;
use crate::tool::Handler;

const PANICKED: &str = "the tool failed unexpectedly; it may have done part of its work, so check before you call \
                        it again";

/// How many names of tools an error lists.
const NAMES: usize = 50;

/// A handler that waits to be polled, and the call in its hands.
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

    /// The future of this is what a waiting subscription costs, so what it does not hold on to is boxed.
    async fn run(self: Arc<Self>, call: Box<StoredCall>, run: Arc<Run>) {
        let seq = call.seq;
        if !run.is_stopped() {
            match self.begin(call, &run) {
                Ok(work) => self.work(work, &run).await,
                Err(refused) => Box::pin(self.refuse(seq, refused)).await,
            }
        }
        lock(&self.runs).remove(&seq);
    }

    /// Lets a handler run to its end, or until the grace time after a cancellation, or until the server ends.
    async fn work(self: &Arc<Self>, Work { handler, call, kind }: Work, run: &Run) {
        let begun = Instant::now();
        let server_ends = match kind {
            WorkKind::Call => &self.ended,
            // It is resumed after a restart: there is nothing to wait for when the server stops.
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
        // A call that was cancelled or closed meanwhile has its end already.
        let taken = self.commit(call.seq(), Input::Returned(returned), None).await;
        let outcome = if taken.is_ok() { outcome } else { "cancelled" };
        let ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (tool, thread, id) = (call.tool(), call.thread().id(), call.id());
        tracing::info!(tool, ?thread, ?id, outcome, ms, "call");
    }

    async fn refuse(self: &Arc<Self>, seq: Seq, Refused { tool, thread, id, why }: Refused) {
        // If it was cancelled meanwhile, it has its end already.
        let taken = self.commit(seq, Input::Returned(Returned::Error(why)), None).await;
        let outcome = if taken.is_ok() { "refused" } else { "cancelled" };
        tracing::info!(tool, ?thread, ?id, outcome, ms = 0, "call");
    }

    /// Validates a call and makes its handler, which does not run before it is polled.
    fn begin(self: &Arc<Self>, mut call: Box<StoredCall>, run: &Arc<Run>) -> Result<Work, Refused> {
        let arguments = Value::Object(std::mem::take(&mut call.arguments));
        let offered = match self.offered(&call.operation, &arguments) {
            Ok(offered) => offered,
            Err(why) => return Err(Refused { tool: call.operation, thread: call.thread, id: call.id, why }),
        };
        let thread = self.thread(&call.caller, &call.thread);
        let tool = Arc::clone(&offered.name);
        let handle = Call::new(Arc::clone(self), Arc::clone(run), thread, tool, &mut call);
        let of = handle.clone();
        // The author's code runs inside the future, where a panic is caught.
        let (handler, kind): (BoxFuture<'static, Returned>, _) = match offered.tool.handler().clone() {
            Handler::Call(handler) => {
                let output = async move { handler(arguments, handle)?.await };
                (Box::pin(caught(output, Output::into_returned)), WorkKind::Call)
            }
            Handler::Subscription(handler) => {
                let subscribe = Subscribe::new(handle, call.confirmed, call.cursor);
                let ended = async move { handler(arguments, subscribe)?.await };
                (Box::pin(caught(ended, |()| Returned::Nothing)), WorkKind::Subscription)
            }
        };
        Ok(Work { handler, call: of, kind })
    }

    /// The tool that is called, if there is one and the arguments fit.
    fn offered(&self, operation: &str, arguments: &Value) -> Result<&Offered, String> {
        let offered = self.tools.get(operation).ok_or_else(|| self.unknown(operation))?;
        offered.schema.validate(arguments).map_err(|violations| {
            let list: Vec<String> = violations.iter().map(ToString::to_string).collect();
            format!("the arguments do not fit the schema of {operation}: {}", list.join("; "))
        })?;
        Ok(offered)
    }

    fn unknown(&self, operation: &str) -> String {
        let mut names: Vec<&str> = self.tools.keys().map(String::as_str).collect();
        names.sort_unstable();
        let more = if names.len() > NAMES { ", …" } else { "" };
        names.truncate(NAMES);
        format!("there is no tool {operation:?} here; there is {}{more}", names.join(", "))
    }
}

/// A call that never came to its handler.
struct Refused {
    tool: String,
    thread: ThreadId,
    id: CallId,
    why: String,
}

/// What a handler comes to, its panic included.
async fn caught<T>(
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
    if let Error::Caused(cause) = error {
        tracing::warn!(%cause, "a handler failed");
    }
    Returned::Error(error.for_model())
}
