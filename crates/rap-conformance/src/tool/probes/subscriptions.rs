//! Subscriptions: a confirmation, then events, and no event after a final event, a cancellation or a closed thread.

use std::time::Duration;

use rap_protocol::{CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, parse_callback};
use serde_json::json;
use tokio::time::Instant;

use crate::report::{Probe, Verdict};
use crate::tool::inbox::{Delivery, Reply};
use crate::tool::target::{Call, Target, events, results};
use crate::tool::{Check, ProbeResult};

/// Maximum time in which an event arrives that was already in flight when the cancellation was answered.
const IN_FLIGHT: Duration = Duration::from_millis(300);

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "subscription_is_confirmed",
            requirements: &["SE-11"],
            checks: "A subscription is confirmed by a tool_result with `subscription: true`.",
        },
        run: |target| Box::pin(confirmed(target)),
    },
    Check {
        probe: Probe {
            name: "confirmation_comes_first",
            requirements: &["SE-11"],
            checks: "No event arrives before the confirmation.",
        },
        run: |target| Box::pin(confirmed_first(target)),
    },
    Check {
        probe: Probe {
            name: "confirmation_names_the_subscription",
            requirements: &["SE-12"],
            checks: "The text of the confirmation contains an identifier of the subscription.",
        },
        run: |target| Box::pin(named(target)),
    },
    Check {
        probe: Probe {
            name: "events_name_their_subscription",
            requirements: &["SE-01", "TR-12"],
            checks: "An event is a subscription_event with the group_id and the tool_call_id of its subscription, and \
                     with a text.",
        },
        run: |target| Box::pin(well_formed(target)),
    },
    Check {
        probe: Probe {
            name: "event_is_sent_again_after_503",
            requirements: &["TR-14"],
            checks: "An event that is answered 503 is sent again.",
        },
        run: |target| Box::pin(again_after_503(target)),
    },
    Check {
        probe: Probe {
            name: "refused_event_is_not_sent_again",
            requirements: &["TR-15"],
            checks: "An event that is answered 400 is not sent again.",
        },
        run: |target| Box::pin(not_after_400(target)),
    },
    Check {
        probe: Probe {
            name: "nothing_follows_a_final_event",
            requirements: &["SE-04"],
            checks: "After an event with `final: true`, no further event arrives.",
        },
        run: |target| Box::pin(nothing_after_final(target)),
    },
    Check {
        probe: Probe {
            name: "nothing_follows_a_cancellation",
            requirements: &["SE-19", "SE-26"],
            checks: "After POST /cancel_tool_call with a subscription, no further event arrives.",
        },
        run: |target| Box::pin(nothing_after(target, End::Cancelled)),
    },
    Check {
        probe: Probe {
            name: "closing_ends_subscriptions",
            requirements: &["TC-11"],
            checks: "After POST /close_thread, the subscriptions of the thread send no further event.",
        },
        run: |target| Box::pin(nothing_after(target, End::Closed)),
    },
];

/// These run alone, so that no other probe cancels or closes anything meanwhile.
pub(super) const OTHERS_AFTER_CANCELLATION: &[Check] = &[Check {
    probe: Probe {
        name: "cancelling_spares_other_subscriptions",
        requirements: &["SE-01"],
        checks: "After the cancellation of a subscription, a subscription with the same id in another thread continues.",
    },
    run: |target| Box::pin(others_continue(target, End::Cancelled)),
}];

pub(super) const OTHERS_AFTER_CLOSING: &[Check] = &[Check {
    probe: Probe {
        name: "closing_spares_other_subscriptions",
        requirements: &["SE-01"],
        checks: "After a thread is closed, a subscription of another thread continues.",
    },
    run: |target| Box::pin(others_continue(target, End::Closed)),
}];

/// Way in which the checker ends a subscription.
#[derive(Clone, Copy)]
enum End {
    Cancelled,
    Closed,
}

impl End {
    fn path(self) -> &'static str {
        match self {
            End::Cancelled => CANCEL_TOOL_CALL_PATH,
            End::Closed => CLOSE_THREAD_PATH,
        }
    }
}

/// Subscribes. Each probe cancels its subscription at the end.
async fn subscribe(target: &Target, replies: &[Reply]) -> Result<Call, Verdict> {
    let call = target.subscription(replies)?;
    target.invoke(&call).await?;
    Ok(call)
}

async fn cancel(target: &Target, call: &Call) -> ProbeResult {
    let body = json!({"thread_id": call.thread, "tool_call_id": call.id});
    target.notify(CANCEL_TOOL_CALL_PATH, &body).await.map(|_| ())
}

/// Cancels a subscription that is no longer needed. The probe does not depend on it.
async fn tidy(target: &Target, call: &Call) {
    drop(cancel(target, call).await);
}

async fn end_subscription(target: &Target, call: &Call, end: End) -> ProbeResult {
    match end {
        End::Cancelled => cancel(target, call).await,
        End::Closed => {
            let body = json!({"thread_id": call.thread});
            target.notify(CLOSE_THREAD_PATH, &body).await.map(|_| ())
        }
    }
}

async fn confirmed(target: &Target) -> ProbeResult {
    let call = subscribe(target, &[]).await?;
    let result = call.result(target.timeouts).await?;
    tidy(target, &call).await;
    if result.message["subscription"] == true {
        return Ok(());
    }
    Err(call.fail("the first result does not have `subscription: true`"))
}

async fn confirmed_first(target: &Target) -> ProbeResult {
    let call = subscribe(target, &[]).await?;
    call.event(target.timeouts).await?;
    tidy(target, &call).await;
    let deliveries = call.inbox.deliveries();
    let first =
        deliveries.iter().find(|delivery| matches!(delivery.kind(), "tool_result" | "subscription_event"));
    match first.map(Delivery::kind) {
        Some("subscription_event") => Err(call.fail("an event arrived before the confirmation")),
        _ => Ok(()),
    }
}

async fn named(target: &Target) -> ProbeResult {
    let call = subscribe(target, &[]).await?;
    let text = call.result(target.timeouts).await?.result_text();
    tidy(target, &call).await;
    let words = text.to_lowercase();
    let mentions_id =
        words.split(|c: char| !c.is_alphanumeric()).any(|word| matches!(word, "id" | "identifier"));
    if text.contains(&call.id) || mentions_id {
        Ok(())
    } else {
        Err(call.fail("the text of the confirmation contains no identifier of the subscription"))
    }
}

async fn well_formed(target: &Target) -> ProbeResult {
    let call = subscribe(target, &[]).await?;
    call.event(target.timeouts).await?;
    tidy(target, &call).await;
    for event in events(&call.inbox.deliveries()) {
        if event.text("group_id") != call.thread || event.text("tool_call_id") != call.id {
            return Err(
                call.fail("an event does not have the group_id and the tool_call_id of its subscription")
            );
        }
        if let Err(invalid) = parse_callback(&event.body) {
            return Err(call.fail(format!("an event is invalid: {invalid}")));
        }
    }
    Ok(())
}

async fn again_after_503(target: &Target) -> ProbeResult {
    let call = subscribe(target, &[Reply::Status(503)]).await?;
    let first = call.event(target.timeouts).await?;
    let again = |deliveries: &[Delivery]| repeats(deliveries, &first).then_some(());
    let observed = call.inbox.wait_for(target.timeouts.result, again).await;
    tidy(target, &call).await;
    let seconds = target.timeouts.result.as_secs_f64();
    observed.ok_or_else(|| call.fail(format!("the event was not sent again within {seconds} s")))
}

async fn not_after_400(target: &Target) -> ProbeResult {
    let call = subscribe(target, &[Reply::Status(400)]).await?;
    let first = call.event(target.timeouts).await?;
    let again = |deliveries: &[Delivery]| repeats(deliveries, &first).then_some(());
    let observed = call.inbox.wait_for(target.timeouts.quiet, again).await;
    tidy(target, &call).await;
    observed.map_or(Ok(()), |()| Err(call.fail("the event was sent again after a 400")))
}

/// Returns true if the event arrived again. Two equal events without an event_id may be two different ones.
fn repeats(deliveries: &[Delivery], first: &Delivery) -> bool {
    events(deliveries).skip(1).any(|event| event.message == first.message)
}

async fn nothing_after_final(target: &Target) -> ProbeResult {
    let call = subscribe(target, &[]).await?;
    call.event(target.timeouts).await?;
    let is_final = |delivery: &&Delivery| delivery.message["final"] == true;
    let ended = |deliveries: &[Delivery]| events(deliveries).find(is_final).map(|_| ());
    if call.inbox.wait_for(target.timeouts.result, ended).await.is_none() {
        tidy(target, &call).await;
        let seconds = target.timeouts.result.as_secs_f64();
        return Err(Verdict::not_observable(format!(
            "no final event arrived within {seconds} s; choose a subscription that ends soon"
        )));
    }
    let more = |deliveries: &[Delivery]| {
        let messages = || events(deliveries).chain(results(deliveries));
        let last = messages().find(|delivery| delivery.message["final"] == true)?.at;
        messages().find(|delivery| delivery.at > last).map(|_| ())
    };
    match call.inbox.wait_for(target.timeouts.quiet, more).await {
        None => Ok(()),
        Some(()) => Err(call.fail("a message arrived after the final event")),
    }
}

/// The answer to the first event is held back, so that a short subscription does not end before the checker ends it.
async fn nothing_after(target: &Target, end: End) -> ProbeResult {
    target.has_endpoint(end.path())?;
    let call = subscribe(target, &[Reply::Held]).await?;
    let first = call.event(target.timeouts).await?;
    if first.message["final"] == true {
        call.inbox.release();
        return Err(Verdict::not_observable(
            "the first event was final; choose a subscription that sends several events",
        ));
    }
    end_subscription(target, &call, end).await?;
    tokio::time::sleep(IN_FLIGHT).await;
    let ended = Instant::now();
    call.inbox.release();
    let later = |deliveries: &[Delivery]| events(deliveries).find(|event| event.at > ended).map(|_| ());
    let observed = call.inbox.wait_for(target.timeouts.quiet, later).await;
    match (observed, end) {
        (None, _) => Ok(()),
        (Some(()), End::Cancelled) => Err(call.fail("an event arrived after the cancellation was answered")),
        (Some(()), End::Closed) => Err(call.fail("an event arrived after the thread was closed")),
    }
}

/// The answer to the first event is held back, so that the subscription is still active when the other one ends.
async fn others_continue(target: &Target, end: End) -> ProbeResult {
    target.has_endpoint(end.path())?;
    let call = subscribe(target, &[Reply::Held]).await?;
    let first = call.event(target.timeouts).await?;
    if first.message["final"] == true {
        call.inbox.release();
        return Err(Verdict::not_observable(
            "the first event was final; choose a subscription that sends several events",
        ));
    }
    let mut other = target.subscription(&[])?;
    other.id.clone_from(&call.id);
    other.invocation["id"] = call.id.as_str().into();
    target.invoke(&other).await?;
    end_subscription(target, &other, end).await?;
    call.inbox.release();
    let later =
        |deliveries: &[Delivery]| events(deliveries).find(|event| event.message != first.message).map(|_| ());
    let observed = call.inbox.wait_for(target.timeouts.result, later).await;
    tidy(target, &call).await;
    observed.ok_or_else(|| call.fail("the subscription sent no further event after another one was ended"))
}
