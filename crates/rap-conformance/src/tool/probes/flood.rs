//! Rate limits of notifications.

use futures_util::StreamExt;
use rap_protocol::{CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH};
use serde_json::{Value, json};

use crate::report::{Probe, Verdict};
use crate::tool::target::{Credentials, Target};
use crate::tool::{Check, ProbeResult};

/// Number of notifications that are sent, and how many of them concurrently.
const FLOOD: usize = 2_000;
const AT_A_TIME: usize = 16;

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "closings_are_rate_limited",
            requirements: &["TC-20"],
            checks: "Of 2,000 /close_thread notifications in a row, some are answered 429.",
        },
        run: |target| Box::pin(closings(target)),
    },
    Check {
        probe: Probe {
            name: "cancellations_are_rate_limited",
            requirements: &["CN-22"],
            checks: "Of 2,000 /cancel_tool_call notifications in a row, some are answered 429.",
        },
        run: |target| Box::pin(cancellations(target)),
    },
];

async fn closings(target: &Target) -> ProbeResult {
    flood(target, CLOSE_THREAD_PATH, |thread, _| json!({"thread_id": thread})).await
}

async fn cancellations(target: &Target) -> ProbeResult {
    flood(target, CANCEL_TOOL_CALL_PATH, |thread, call| json!({"thread_id": thread, "tool_call_id": call}))
        .await
}

async fn flood(target: &Target, path: &str, body: fn(String, String) -> Value) -> ProbeResult {
    let sent = (0..FLOOD).map(|_| async {
        target
            .notify_as(path, &body(target.fresh_id("thread"), target.fresh_id("call")), Credentials::Valid)
            .await
    });
    let mut answers = futures_util::stream::iter(sent).buffer_unordered(AT_A_TIME);
    let mut last = None;
    while let Some(answer) = answers.next().await {
        let response = answer?;
        if response.status == 429 {
            return Ok(());
        }
        last = Some(response.exchange);
    }
    let what = format!(
        "none of {FLOOD} notifications in a row was answered 429; a rate limit, if there is one, is higher"
    );
    Err(Verdict::fail(what, last.into_iter().collect()))
}
