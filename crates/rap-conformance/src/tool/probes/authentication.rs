//! Authentication: requests without the token, or with a wrong one, are rejected.

use rap_protocol::{CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH};
use serde_json::json;

use crate::report::{Probe, Verdict};
use crate::tool::target::{Credentials, ServerResponse, Target};
use crate::tool::{Check, ProbeResult};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "invocation_needs_the_token",
            requirements: &["TR-19"],
            checks: "An invocation without the token, or with a wrong one, is answered 401 or 403, and no result \
                     follows.",
        },
        run: |target| Box::pin(invocation(target)),
    },
    Check {
        probe: Probe {
            name: "closing_needs_the_token",
            requirements: &["TC-18"],
            checks: "POST /close_thread without the token, or with a wrong one, is answered 401 or 403.",
        },
        run: |target| Box::pin(closing(target)),
    },
    Check {
        probe: Probe {
            name: "cancelling_needs_the_token",
            requirements: &["CN-20"],
            checks: "POST /cancel_tool_call without the token, or with a wrong one, is answered 401 or 403.",
        },
        run: |target| Box::pin(cancelling(target)),
    },
];

fn has_token(target: &Target) -> ProbeResult {
    let why = "no token was given; if the server requires one, pass it with --bearer";
    if target.has_bearer() { Ok(()) } else { Err(Verdict::not_observable(why)) }
}

async fn invocation(target: &Target) -> ProbeResult {
    has_token(target)?;
    for credentials in [Credentials::Missing, Credentials::Wrong] {
        let call = target.operation()?;
        expect_401(target.send_invocation(&call, credentials).await?, credentials)?;
        let any = |deliveries: &[_]| (!deliveries.is_empty()).then_some(());
        if call.inbox.wait_for(target.timeouts.quiet, any).await.is_some() {
            return Err(call.fail("the invocation was rejected, but a result followed"));
        }
    }
    Ok(())
}

async fn closing(target: &Target) -> ProbeResult {
    has_token(target)?;
    for credentials in [Credentials::Missing, Credentials::Wrong] {
        let body = json!({"thread_id": target.fresh_id("thread")});
        expect_401(target.notify_as(CLOSE_THREAD_PATH, &body, credentials).await?, credentials)?;
    }
    Ok(())
}

async fn cancelling(target: &Target) -> ProbeResult {
    has_token(target)?;
    for credentials in [Credentials::Missing, Credentials::Wrong] {
        let body = json!({"thread_id": target.fresh_id("thread"), "tool_call_id": target.fresh_id("call")});
        expect_401(target.notify_as(CANCEL_TOOL_CALL_PATH, &body, credentials).await?, credentials)?;
    }
    Ok(())
}

fn expect_401(response: ServerResponse, credentials: Credentials) -> ProbeResult {
    if matches!(response.status, 401 | 403) {
        return Ok(());
    }
    let how = match credentials {
        Credentials::Wrong => "with a wrong token",
        _ => "without a token",
    };
    Err(Verdict::fail(
        format!("a request {how} was answered {} instead of 401", response.status),
        vec![response.exchange],
    ))
}
