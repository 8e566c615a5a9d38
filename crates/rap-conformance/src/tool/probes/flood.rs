//! What a server does when it is sent too much.

use futures_util::StreamExt;
use rap_protocol::{CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH};
use serde_json::{Value, json};

use crate::report::{Probe, Verdict};
use crate::tool::target::{Credentials, Target};
use crate::tool::{Check, Found};

/// How many notifications are sent, and how many of them at a time.
const FLOOD: usize = 2_000;
const AT_A_TIME: usize = 16;

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "closings_are_rate_limited",
            requirements: &["TC-20"],
            checks: "Of 2,000 closings in a row some are answered 429.",
        },
        run: |target| Box::pin(closings(target)),
    },
    Check {
        probe: Probe {
            name: "cancellations_are_rate_limited",
            requirements: &["CN-22"],
            checks: "Of 2,000 cancellations in a row some are answered 429.",
        },
        run: |target| Box::pin(cancellations(target)),
    },
];

async fn closings(target: &Target) -> Found {
    flood(target, CLOSE_THREAD_PATH, |thread, _| json!({"thread_id": thread})).await
}

async fn cancellations(target: &Target) -> Found {
    flood(target, CANCEL_TOOL_CALL_PATH, |thread, call| json!({"thread_id": thread, "tool_call_id": call}))
        .await
}

async fn flood(target: &Target, path: &str, body: fn(String, String) -> Value) -> Found {
    let sent = (0..FLOOD).map(|_| async {
        target.notify_as(path, &body(target.fresh("thread"), target.fresh("call")), Credentials::Ours).await
    });
    let mut answers = futures_util::stream::iter(sent).buffer_unordered(AT_A_TIME);
    let mut last = None;
    while let Some(answer) = answers.next().await {
        let said = answer?;
        if said.status == 429 {
            return Ok(());
        }
        last = Some(said.exchange);
    }
    let what = format!("all of {FLOOD} in a row were taken; a limit, if there is one, lies above that");
    Err(Verdict::fail(what, last.into_iter().collect()))
}
