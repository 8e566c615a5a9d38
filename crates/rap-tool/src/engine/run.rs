//! Running handlers: acknowledge has happened, now validate, execute, and hand the result to delivery.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use super::{Engine, Run, lock};
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

/// A handler that waits to be polled.
enum Work {
    Call(BoxFuture<'static, Result<Output, Error>>),
    Subscription(BoxFuture<'static, Result<(), Error>>),
}

impl Engine {
    /// Starts the handler of a call that is on disk and registered.
    pub(super) fn start(self: &Arc<Self>, call: StoredCall, run: Arc<Run>) {
        let engine = Arc::clone(self);
        self.tasks.spawn(engine.run(Box::new(call), run));
    }

    /// The future of this is what a waiting subscription costs, so what it does not hold on to is boxed.
    async fn run(self: Arc<Self>, call: Box<StoredCall>, run: Arc<Run>) {
        let (seq, begun) = (call.seq, Instant::now());
        let name: Box<str> =
            format!("tool={} thread={:?} id={:?}", call.operation, call.thread, call.id).into();
        if !run.is_stopped()
            && let Some(returned) = self.work(call, &run).await
        {
            Box::pin(self.returned(seq, returned, &name, begun)).await;
        }
        lock(&self.runs).remove(&seq);
    }

    /// What the handler has to say; `None` if it was stopped and nobody wants to hear it.
    async fn work(self: &Arc<Self>, call: Box<StoredCall>, run: &Arc<Run>) -> Option<Returned> {
        match self.begin(*call, run) {
            Err(refused) => Some(Returned::Error(refused)),
            Ok(Work::Call(handler)) => {
                let finished = self.until_dropped(handler, run, &self.ended).await?;
                Some(finished.map_or_else(|error| failed(&error), Output::into_returned))
            }
            // A subscription is resumed after a restart: there is nothing to wait for when the server stops.
            Ok(Work::Subscription(handler)) => {
                let finished = self.until_dropped(handler, run, &self.stopping).await?;
                Some(finished.map_or_else(|error| failed(&error), |()| Returned::Nothing))
            }
        }
    }

    async fn returned(self: &Arc<Self>, seq: Seq, returned: Returned, name: &str, begun: Instant) {
        let outcome = match &returned {
            Returned::Result { .. } => "result",
            Returned::Error(_) => "error",
            Returned::Nothing => "ended",
        };
        // A call that was cancelled or closed meanwhile has its end already.
        let taken = self.commit(seq, Input::Returned(returned), None).await;
        let outcome = if taken.is_ok() { outcome } else { "cancelled" };
        let ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(outcome, ms, "{name}");
    }

    /// Validates a call and calls its handler, which does not run before it is polled.
    fn begin(self: &Arc<Self>, mut call: StoredCall, run: &Arc<Run>) -> Result<Work, String> {
        let Some(offered) = self.tools.get(&call.operation) else {
            return Err(self.unknown(&call.operation));
        };
        let arguments = std::mem::take(&mut call.arguments);
        if let Err(violations) = offered.schema.validate(&arguments) {
            let list: Vec<String> = violations.iter().map(ToString::to_string).collect();
            return Err(format!(
                "the arguments do not fit the schema of {}: {}",
                call.operation,
                list.join("; ")
            ));
        }
        let thread = self.thread(&call.caller, &call.thread);
        let handle = Call::new(Arc::clone(self), Arc::clone(run), thread, &mut call);
        // The author's code runs inside the future, where a panic is caught.
        Ok(match offered.tool.handler().clone() {
            Handler::Call(handler) => Work::Call(Box::pin(async move { handler(arguments, handle)?.await })),
            Handler::Subscription(handler) => {
                let subscribe = Subscribe::new(handle, call.confirmed, call.cursor);
                Work::Subscription(Box::pin(async move { handler(arguments, subscribe)?.await }))
            }
        })
    }

    fn unknown(&self, operation: &str) -> String {
        let mut names: Vec<&str> = self.tools.keys().map(String::as_str).collect();
        names.sort_unstable();
        let more = if names.len() > NAMES { ", …" } else { "" };
        names.truncate(NAMES);
        format!("there is no tool {operation:?} here; there is {}{more}", names.join(", "))
    }

    /// Lets a handler run to its end, or until the grace time after a cancellation, or until the server ends.
    async fn until_dropped<T>(
        &self,
        handler: BoxFuture<'static, Result<T, Error>>,
        run: &Run,
        server_ends: &CancellationToken,
    ) -> Option<Result<T, Error>> {
        tokio::select! {
            finished = AssertUnwindSafe(handler).catch_unwind() => {
                Some(finished.unwrap_or_else(|_| Err(Error::new(PANICKED))))
            }
            () = run.stopped_for(self.limits.cancel_grace) => None,
            () = server_ends.cancelled() => None,
        }
    }
}

fn failed(error: &Error) -> Returned {
    if let Error::Caused(cause) = error {
        tracing::warn!(%cause, "a handler failed");
    }
    Returned::Error(error.for_model())
}
