//! Subscriptions: a confirmation, events, and silence after the last one, a cancellation or a closing.

use std::time::Duration;

use rap_protocol::{CANCEL_TOOL_CALL_PATH, CLOSE_THREAD_PATH, parse_callback};
use serde_json::json;
use tokio::time::Instant;

use crate::report::{Probe, Verdict};
use crate::tool::inbox::{Delivery, Reply};
use crate::tool::target::{Call, Target, events, results};
use crate::tool::{Check, Found};

/// An event that was on its way when the cancellation was answered arrives within this time.
const ON_ITS_WAY: Duration = Duration::from_millis(300);

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "subscription_is_confirmed",
            requirements: &["SE-11"],
            checks: "A subscription is confirmed with a tool_result that carries subscription: true.",
        },
        run: |target| Box::pin(confirmed(target)),
    },
    Check {
        probe: Probe {
            name: "confirmation_comes_first",
            requirements: &["SE-11"],
            checks: "No event comes before the confirmation was answered.",
        },
        run: |target| Box::pin(confirmed_first(target)),
    },
    Check {
        probe: Probe {
            name: "confirmation_names_the_subscription",
            requirements: &["SE-12"],
            checks: "The text of the confirmation names an identifier of the subscription.",
        },
        run: |target| Box::pin(named(target)),
    },
    Check {
        probe: Probe {
            name: "events_name_their_subscription",
            requirements: &["SE-01", "TR-12"],
            checks: "An event is a subscription_event with group_id, tool_call_id and text.",
        },
        run: |target| Box::pin(well_formed(target)),
    },
    Check {
        probe: Probe {
            name: "event_is_sent_again_after_503",
            requirements: &["TR-14"],
            checks: "An event that was answered 503 is sent again.",
        },
        run: |target| Box::pin(again_after_503(target)),
    },
    Check {
        probe: Probe {
            name: "refused_event_is_not_sent_again",
            requirements: &["TR-15"],
            checks: "An event that was answered 400 is not sent again.",
        },
        run: |target| Box::pin(not_after_400(target)),
    },
    Check {
        probe: Probe {
            name: "nothing_follows_a_final_event",
            requirements: &["SE-04"],
            checks: "After an event with final: true no event comes.",
        },
        run: |target| Box::pin(nothing_after_final(target)),
    },
    Check {
        probe: Probe {
            name: "nothing_follows_a_cancellation",
            requirements: &["SE-19", "SE-26"],
            checks: "After the cancellation of a subscription no event comes.",
        },
        run: |target| Box::pin(nothing_after(target, End::Cancelled)),
    },
    Check {
        probe: Probe {
            name: "closing_ends_subscriptions",
            requirements: &["TC-11"],
            checks: "After the closing of its thread a subscription sends no event.",
        },
        run: |target| Box::pin(nothing_after(target, End::Closed)),
    },
];

/// While these run, nobody else ends anything.
pub(super) const SPARED_BY_CANCELLING: &[Check] = &[Check {
    probe: Probe {
        name: "cancelling_spares_other_subscriptions",
        requirements: &["SE-01"],
        checks: "After the cancellation of a subscription, one of the same id in another thread goes on.",
    },
    run: |target| Box::pin(spares_others(target, End::Cancelled)),
}];

pub(super) const SPARED_BY_CLOSING: &[Check] = &[Check {
    probe: Probe {
        name: "closing_spares_other_subscriptions",
        requirements: &["SE-01"],
        checks: "After the closing of a thread, a subscription of another one goes on.",
    },
    run: |target| Box::pin(spares_others(target, End::Closed)),
}];

/// How a subscription is ended from outside.
#[derive(Clone, Copy)]
enum End {
    Cancelled,
    Closed,
}

/// A subscription with its confirmation. It is cancelled in the end, so that nothing of ours stays behind.
async fn subscribe(target: &Target, replies: &[Reply]) -> Result<Call, Verdict> {
    let call = target.subscription(replies)?;
    target.invoke(&call).await?;
    Ok(call)
}

async fn cancel(target: &Target, call: &Call) -> Found {
    let body = json!({"thread_id": call.thread, "tool_call_id": call.id});
    target.notify(CANCEL_TOOL_CALL_PATH, &body).await.map(|_| ())
}

async fn bring_about(target: &Target, call: &Call, end: End) -> Found {
    match end {
        End::Cancelled => cancel(target, call).await,
        End::Closed => {
            let body = json!({"thread_id": call.thread});
            target.notify(CLOSE_THREAD_PATH, &body).await.map(|_| ())
        }
    }
}

async fn confirmed(target: &Target) -> Found {
    let call = subscribe(target, &[]).await?;
    let result = call.result(target.patience).await?;
    cancel(target, &call).await?;
    if result.message["subscription"] == true {
        return Ok(());
    }
    Err(call.fail("its first result does not carry subscription: true"))
}

async fn confirmed_first(target: &Target) -> Found {
    let call = subscribe(target, &[]).await?;
    call.event(target.patience).await?;
    cancel(target, &call).await?;
    let deliveries = call.inbox.deliveries();
    let first =
        deliveries.iter().find(|delivery| matches!(delivery.kind(), "tool_result" | "subscription_event"));
    match first.map(Delivery::kind) {
        Some("subscription_event") => Err(call.fail("an event came before the confirmation")),
        _ => Ok(()),
    }
}

async fn named(target: &Target) -> Found {
    let call = subscribe(target, &[]).await?;
    let text = call.result(target.patience).await?.says();
    cancel(target, &call).await?;
    let words = text.to_lowercase();
    let speaks_of_one =
        words.split(|c: char| !c.is_alphanumeric()).any(|word| matches!(word, "id" | "identifier"));
    if text.contains(&call.id) || speaks_of_one { Ok(()) } else { Err(call.fail("it names none")) }
}

async fn well_formed(target: &Target) -> Found {
    let call = subscribe(target, &[]).await?;
    call.event(target.patience).await?;
    cancel(target, &call).await?;
    for event in events(&call.inbox.deliveries()) {
        if event.text("group_id") != call.thread || event.text("tool_call_id") != call.id {
            return Err(call.fail("an event does not name its subscription"));
        }
        if let Err(invalid) = parse_callback(&event.body) {
            return Err(call.fail(format!("an event is invalid: {invalid}")));
        }
    }
    Ok(())
}

async fn again_after_503(target: &Target) -> Found {
    let call = subscribe(target, &[Reply::Status(503)]).await?;
    let first = call.event(target.patience).await?;
    let again = |deliveries: &[Delivery]| repeats(deliveries, &first).then_some(());
    let seen = call.inbox.until(target.patience.result, again).await;
    cancel(target, &call).await?;
    let seconds = target.patience.result.as_secs_f64();
    seen.ok_or_else(|| call.fail(format!("the event was not sent again within {seconds} s")))
}

async fn not_after_400(target: &Target) -> Found {
    let call = subscribe(target, &[Reply::Status(400)]).await?;
    let first = call.event(target.patience).await?;
    let again = |deliveries: &[Delivery]| repeats(deliveries, &first).then_some(());
    let seen = call.inbox.until(target.patience.quiet, again).await;
    cancel(target, &call).await?;
    seen.map_or(Ok(()), |()| Err(call.fail("the event was sent again after a 400")))
}

/// Whether an event came twice. Two that look alike and have no event_id may be two.
fn repeats(deliveries: &[Delivery], first: &Delivery) -> bool {
    events(deliveries).skip(1).any(|event| event.message == first.message)
}

async fn nothing_after_final(target: &Target) -> Found {
    let call = subscribe(target, &[]).await?;
    call.event(target.patience).await?;
    let is_final = |delivery: &&Delivery| delivery.message["final"] == true;
    let ended = |deliveries: &[Delivery]| events(deliveries).find(is_final).map(|_| ());
    if call.inbox.until(target.patience.result, ended).await.is_none() {
        cancel(target, &call).await?;
        let seconds = target.patience.result.as_secs_f64();
        return Err(Verdict::not_observable(format!(
            "no final event came within {seconds} s; name one that ends soon"
        )));
    }
    let more = |deliveries: &[Delivery]| {
        let messages = || events(deliveries).chain(results(deliveries));
        let last = messages().find(|delivery| delivery.message["final"] == true)?.at;
        messages().find(|delivery| delivery.at > last).map(|_| ())
    };
    match call.inbox.until(target.patience.quiet, more).await {
        None => Ok(()),
        Some(()) => Err(call.fail("something came after the final event")),
    }
}

/// The first event is held back, so that a short subscription is not over before it is ended.
async fn nothing_after(target: &Target, end: End) -> Found {
    let call = subscribe(target, &[Reply::Held]).await?;
    let first = call.event(target.patience).await?;
    if first.message["final"] == true {
        call.inbox.release();
        return Err(Verdict::not_observable(
            "the first event was the last; name a subscription that sends more",
        ));
    }
    bring_about(target, &call, end).await?;
    tokio::time::sleep(ON_ITS_WAY).await;
    let ended = Instant::now();
    call.inbox.release();
    let later = |deliveries: &[Delivery]| events(deliveries).find(|event| event.at > ended).map(|_| ());
    let seen = call.inbox.until(target.patience.quiet, later).await;
    match (seen, end) {
        (None, _) => Ok(()),
        (Some(()), End::Cancelled) => Err(call.fail("an event came after the cancellation was answered")),
        (Some(()), End::Closed) => Err(call.fail("an event came after the closing was answered")),
    }
}

/// The first event is held back, so that the subscription is still there when another is ended.
async fn spares_others(target: &Target, end: End) -> Found {
    let call = subscribe(target, &[Reply::Held]).await?;
    let first = call.event(target.patience).await?;
    if first.message["final"] == true {
        call.inbox.release();
        return Err(Verdict::not_observable(
            "the first event was the last; name a subscription that sends more",
        ));
    }
    let mut other = target.subscription(&[])?;
    other.id.clone_from(&call.id);
    other.invocation["id"] = call.id.as_str().into();
    target.invoke(&other).await?;
    bring_about(target, &other, end).await?;
    call.inbox.release();
    let later =
        |deliveries: &[Delivery]| events(deliveries).find(|event| event.message != first.message).map(|_| ());
    let seen = call.inbox.until(target.patience.result, later).await;
    cancel(target, &call).await?;
    seen.ok_or_else(|| call.fail("it sent nothing more after another one was ended"))
}
