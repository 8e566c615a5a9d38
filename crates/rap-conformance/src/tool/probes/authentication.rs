//! Who may speak: without its token, or with another, a server listens to nobody.

use rap_protocol::{CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH};
use serde_json::json;

use crate::report::{Probe, Verdict};
use crate::tool::target::{Credentials, Said, Target};
use crate::tool::{Check, Found};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "invocation_needs_the_token",
            requirements: &["TR-19"],
            checks: "An invocation without the token, or with another, is answered 401 and brings no \
                     result.",
        },
        run: |target| Box::pin(invocation(target)),
    },
    Check {
        probe: Probe {
            name: "closing_needs_the_token",
            requirements: &["TC-18"],
            checks: "A closing without the token, or with another, is answered 401.",
        },
        run: |target| Box::pin(closing(target)),
    },
    Check {
        probe: Probe {
            name: "cancelling_needs_the_token",
            requirements: &["CN-20"],
            checks: "A cancellation without the token, or with another, is answered 401.",
        },
        run: |target| Box::pin(cancelling(target)),
    },
];

fn has_token(target: &Target) -> Found {
    let why = "no token is known; if the server wants one, give it with --bearer";
    if target.has_bearer() { Ok(()) } else { Err(Verdict::not_observable(why)) }
}

async fn invocation(target: &Target) -> Found {
    has_token(target)?;
    for credentials in [Credentials::Missing, Credentials::Wrong] {
        let call = target.operation()?;
        expect_401(target.send_invocation(&call, credentials).await?, credentials)?;
        let any = |deliveries: &[_]| (!deliveries.is_empty()).then_some(());
        if call.inbox.until(target.patience.quiet, any).await.is_some() {
            return Err(call.fail("it was refused, and brought a result all the same"));
        }
    }
    Ok(())
}

async fn closing(target: &Target) -> Found {
    has_token(target)?;
    for credentials in [Credentials::Missing, Credentials::Wrong] {
        let body = json!({"thread_id": target.fresh("thread")});
        expect_401(target.notify_as(CLOSE_THREAD_PATH, &body, credentials).await?, credentials)?;
    }
    Ok(())
}

async fn cancelling(target: &Target) -> Found {
    has_token(target)?;
    for credentials in [Credentials::Missing, Credentials::Wrong] {
        let body = json!({"thread_id": target.fresh("thread"), "tool_call_id": target.fresh("call")});
        expect_401(target.notify_as(CANCEL_TOOL_CALL_PATH, &body, credentials).await?, credentials)?;
    }
    Ok(())
}

fn expect_401(said: Said, credentials: Credentials) -> Found {
    if matches!(said.status, 401 | 403) {
        return Ok(());
    }
    let how = match credentials {
        Credentials::Wrong => "with a token that is not its own",
        _ => "without a token",
    };
    Err(Verdict::fail(format!("{how} it was answered {}", said.status), vec![said.exchange]))
}
