//! Invocations of functions of this process.
//!
//! The invocation stays in the store as work that is due until the function has returned and its result is stored, so
//! that a call that a crash interrupts runs again. The result is applied in the same way as that of a tool server.

use std::panic::AssertUnwindSafe;
use std::time::Instant;

use futures_util::FutureExt;
use rap_agent::{Input, ToolResult};
use rap_protocol::ERROR_PREFIX;
use tokio_util::sync::CancellationToken;

use super::Engine;
use super::run::WorkOutcome;
use crate::function::IN_PROCESS;
use crate::store::{InvokeWork, Message, Target};

impl Engine {
    pub(super) async fn run_function(&self, work: &InvokeWork, cancelled: &CancellationToken) -> WorkOutcome {
        let InvokeWork { thread, call, arguments, .. } = work;
        let number = work.attempts.saturating_add(1);
        let tools = match self.toolsets.load(thread.session).await {
            Ok(tools) => tools,
            Err(error) => return WorkOutcome::StoreFailed(error),
        };
        let toolset = tools.server(IN_PROCESS).and_then(|server| server.toolset.as_deref());
        let version = toolset.and_then(|toolset| toolset.version.as_deref());
        // The session has the toolset of an earlier program with other functions.
        let Some(function) = self.functions.get(&call.name).filter(|_| self.functions.has_version(version))
        else {
            return self.refresh_and_fail(work, number).await;
        };
        let began = Instant::now();
        let running = AssertUnwindSafe(function.run(arguments.clone())).catch_unwind();
        let (outcome, text) = tokio::select! {
            biased;
            () = cancelled.cancelled() => return WorkOutcome::Done,
            () = self.stop_time_is_over() => return WorkOutcome::Done,
            returned = running => match returned {
                Ok(Ok(text)) if text.len() > self.settings.limits.body => {
                    ("returned too much", self.too_long(text.len()))
                }
                Ok(Ok(text)) => ("returned", text),
                Ok(Err(error)) => ("failed", format!("{ERROR_PREFIX}{error}")),
                Err(_) => ("panicked", format!("{ERROR_PREFIX}the tool panicked")),
            },
        };
        self.audit(work, number, outcome, began.elapsed());
        let input = Input::ToolResult { call: call.id.clone(), result: ToolResult::text(text) };
        WorkOutcome::apply(Message::new(Target::Key(thread.key), input))
    }

    fn too_long(&self, bytes: usize) -> String {
        let limit = self.settings.limits.body;
        format!("{ERROR_PREFIX}the result has {bytes} bytes, and at most {limit} are allowed")
    }

    /// Waits until the runtime has been told to stop and work in progress has had its time to finish.
    async fn stop_time_is_over(&self) {
        self.stop.cancelled().await;
        tokio::time::sleep(self.settings.limits.stop_within).await;
    }
}
