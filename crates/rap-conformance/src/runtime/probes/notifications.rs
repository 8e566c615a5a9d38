//! Notifications about closed threads and cancelled calls: each tool server gets one, and the runtime does not wait for
//! the answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Value, json};

use super::{Check, Phase, as_not_observable};
use crate::runtime::latch::Latch;
use crate::runtime::mock_server::{RecordedRequest, Route};
use crate::runtime::scenario::{ProbeResult, Scenario, fail};
use crate::runtime::tools::{Call, MAIN, NotificationBehavior, WORK};
use crate::{Probe, Verdict};

pub(super) const CHECKS: &[Check] = &[
    Check {
        probe: Probe {
            name: "closing_told",
            requirements: &["TC-01"],
            checks: "The tool server that was used receives /close_thread when a thread is closed.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(closing_sent(scenario)),
    },
    Check {
        probe: Probe {
            name: "closing_told_to_all",
            requirements: &["TC-13"],
            checks: "Every tool server receives /close_thread, whether or not the thread used it.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(closing_sent_to_all(scenario)),
    },
    Check {
        probe: Probe {
            name: "closing_waits_for_nobody",
            requirements: &["TC-16", "TC-02"],
            checks: "Closing a thread does not wait for the answers of the tool servers.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(closing_does_not_wait(scenario)),
    },
    Check {
        probe: Probe {
            name: "closing_told_together",
            requirements: &["TC-15"],
            checks: "/close_thread is sent to all tool servers concurrently.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(closing_together(scenario)),
    },
    Check {
        probe: Probe {
            name: "closing_told_once",
            requirements: &["TC-07", "TC-06"],
            checks: "After an answer 500 with a body, /close_thread is not sent again.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(closing_once(scenario)),
    },
    Check {
        probe: Probe {
            name: "closing_told_despite_failures",
            requirements: &["TC-17"],
            checks: "/close_thread is sent to all tool servers, even if some of them fail.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(closing_despite(scenario)),
    },
    Check {
        probe: Probe {
            name: "cancelling_told",
            requirements: &["CN-01"],
            checks: "The tool server of a call receives /cancel_tool_call when the call is cancelled.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(cancelling_sent(scenario)),
    },
    Check {
        probe: Probe {
            name: "cancelling_told_to_all",
            requirements: &["CN-15"],
            checks: "Every tool server receives /cancel_tool_call, not only the one of the call.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(cancelling_sent_to_all(scenario)),
    },
    Check {
        probe: Probe {
            name: "cancelling_waits_for_nobody",
            requirements: &["CN-18", "CN-02"],
            checks: "Cancelling a call does not wait for the answers of the tool servers.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(cancelling_does_not_wait(scenario)),
    },
    Check {
        probe: Probe {
            name: "cancelling_told_together",
            requirements: &["CN-17"],
            checks: "/cancel_tool_call is sent to all tool servers concurrently.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(cancelling_together(scenario)),
    },
    Check {
        probe: Probe {
            name: "cancelling_told_once",
            requirements: &["CN-07", "CN-06"],
            checks: "After an answer 500 with a body, /cancel_tool_call is not sent again, and the body does not reach the \
                     model.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(cancelling_once(scenario)),
    },
    Check {
        probe: Probe {
            name: "cancelling_told_despite_failures",
            requirements: &["CN-19"],
            checks: "/cancel_tool_call is sent to all tool servers, even if some of them fail.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(cancelling_despite(scenario)),
    },
    Check {
        probe: Probe {
            name: "late_result",
            requirements: &["CN-10", "CN-14"],
            checks: "The late result of an interrupted call is not answered 5xx, and the thread continues.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(late_result_accepted(scenario)),
    },
    Check {
        probe: Probe {
            name: "late_result_ignored",
            requirements: &["CN-24"],
            checks: "The late result of an interrupted call does not reach the model.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(late_result_ignored(scenario)),
    },
    Check {
        probe: Probe {
            name: "closing_cancels_open_calls",
            requirements: &[],
            checks: "Closing a thread cancels its open calls.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(closing_cancels(scenario)),
    },
    Check {
        probe: Probe {
            name: "closing_told_before_cancellations",
            requirements: &[],
            checks: "A tool server receives /close_thread before the cancellations of the thread's open calls.",
        },
        phase: Phase::Concurrent,
        run: |scenario| Box::pin(closing_first(scenario)),
    },
];

/// Number of threads that are closed to observe the order of notifications.
const CLOSED_THREADS: usize = 5;

/// Notifications with the tool servers that received them.
type Received = Vec<(usize, Arc<RecordedRequest>)>;

/// Kind of notification.
#[derive(Clone, Copy)]
enum Notification {
    Closing,
    Cancelling,
}

impl Notification {
    fn route(self) -> fn(usize) -> Route {
        match self {
            Notification::Closing => Route::Close,
            Notification::Cancelling => Route::Cancel,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Notification::Closing => "/close_thread",
            Notification::Cancelling => "/cancel_tool_call",
        }
    }

    fn body(self, call: &Call) -> Value {
        match self {
            Notification::Closing => json!({"thread_id": call.thread()}),
            Notification::Cancelling => json!({"thread_id": call.thread(), "tool_call_id": call.id()}),
        }
    }

    /// Opens a thread with a call. Not observable if the user cannot close or interrupt threads.
    async fn open_with_call(self, scenario: &Scenario) -> Result<(String, Call), Verdict> {
        match self {
            Notification::Closing => scenario.can_close()?,
            Notification::Cancelling => scenario.can_interrupt()?,
        }
        scenario.open_with_call(WORK).await
    }

    /// Closes or interrupts a thread with an open call.
    async fn trigger(self, scenario: &Scenario, thread: &str) -> ProbeResult {
        match self {
            Notification::Closing => scenario.close(thread).await,
            Notification::Cancelling => scenario.interrupt(thread).await,
        }
    }
}

async fn sent(scenario: Scenario, notification: Notification) -> ProbeResult {
    let (thread, call) = notification.open_with_call(&scenario).await?;
    notification.trigger(&scenario, &thread).await?;
    let received = || {
        scenario.notifications(notification.route(), call.thread()).into_iter().find(|(at, _)| *at == MAIN)
    };
    let (_, request) = scenario
        .wait_for(&format!("{} at the tool server of the call", notification.name()), received)
        .await?;
    let kind = request.header("content-type").unwrap_or_default();
    let json = kind.split(';').next().unwrap_or_default().trim() == "application/json";
    if request.method == "POST" && json && request.body == notification.body(&call) {
        return Ok(());
    }
    let what =
        format!("{} is not a POST of the expected JSON: {} {kind}", notification.name(), request.method);
    fail(what, vec![request.exchange()])
}

/// Waits until every tool server has been notified.
async fn notified(scenario: &Scenario, notification: Notification, call: &Call) -> Result<Received, Verdict> {
    scenario.notifications_to_all(notification.route(), call.thread(), notification.name()).await
}

async fn sent_to_all(scenario: Scenario, notification: Notification) -> ProbeResult {
    scenario.several_servers()?;
    let (thread, call) = notification.open_with_call(&scenario).await?;
    notification.trigger(&scenario, &thread).await?;
    let told = notified(&scenario, notification, &call).await;
    if told.is_err() && scenario.notifications(notification.route(), call.thread()).is_empty() {
        return Err(Verdict::not_observable(format!(
            "no tool server received {}: see the probes closing_told and cancelling_told",
            notification.name()
        )));
    }
    told.map(|_| ())
}

/// Closes or interrupts a thread while the answers of all tool servers are held back. Returns the latch and the start
/// time.
async fn trigger_while_held(
    scenario: &Scenario,
    notification: Notification,
) -> Result<(Call, Latch, Instant), Verdict> {
    let (thread, call) = notification.open_with_call(scenario).await?;
    let latch = Latch::new(scenario.hold_time());
    scenario.set_notification_behavior(call.thread(), NotificationBehavior::Hold(latch.clone()));
    let began = Instant::now();
    notification.trigger(scenario, &thread).await?;
    Ok((call, latch, began))
}

async fn does_not_wait(scenario: Scenario, notification: Notification) -> ProbeResult {
    let (_, latch, began) = trigger_while_held(&scenario, notification).await?;
    let took = began.elapsed();
    latch.release();
    if took < scenario.hold_time() {
        return Ok(());
    }
    let what =
        format!("the request took {took:.1?}, so it waited for the answers to {}", notification.name());
    fail(what, scenario.exchanges())
}

async fn sent_concurrently(scenario: Scenario, notification: Notification) -> ProbeResult {
    scenario.several_servers()?;
    let (call, latch, _) = trigger_while_held(&scenario, notification).await?;
    let received = notified(&scenario, notification, &call).await.map_err(as_not_observable)?;
    latch.release();
    let times = received.iter().map(|(_, request)| request.at);
    let (first, last) = (times.clone().min(), times.max());
    let apart = last.zip(first).map(|(last, first)| last - first).unwrap_or_default();
    if apart < scenario.hold_time() {
        return Ok(());
    }
    let exchanges = received.iter().map(|(_, request)| request.exchange()).collect();
    fail(format!("the notifications were sent one after the other, {apart:.1?} apart"), exchanges)
}

/// Closes or interrupts a thread while all tool servers answer notifications with errors.
async fn trigger_with_failing_servers(
    scenario: &Scenario,
    notification: Notification,
) -> Result<(String, Call), Verdict> {
    let (thread, call) = notification.open_with_call(scenario).await?;
    scenario
        .set_notification_behavior(call.thread(), NotificationBehavior::Fail(scenario.unique_text("answer")));
    notification.trigger(scenario, &thread).await?;
    Ok((thread, call))
}

async fn sent_once(scenario: Scenario, notification: Notification) -> ProbeResult {
    let (thread, call) = trigger_with_failing_servers(&scenario, notification).await?;
    scenario
        .wait_for(&format!("{} at a tool server", notification.name()), || {
            (!scenario.notifications(notification.route(), call.thread()).is_empty()).then_some(())
        })
        .await
        .map_err(as_not_observable)?;
    scenario.wait_for_silence().await;
    if let Notification::Cancelling = notification {
        scenario.current_prompt(&thread).await.map_err(as_not_observable)?;
        scenario.expect_never_in_prompt(
            &scenario.unique_text("answer"),
            "the body of the answer to a notification",
        )?;
    }
    let mut times: HashMap<usize, usize> = HashMap::new();
    let received = scenario.notifications(notification.route(), call.thread());
    for (at, _) in &received {
        *times.entry(*at).or_default() += 1;
    }
    match times.values().max() {
        Some(1) => Ok(()),
        most => {
            let exchanges = received.iter().take(4).map(|(_, request)| request.exchange()).collect();
            fail(
                format!("{} was sent {} times to one tool server", notification.name(), most.unwrap_or(&0)),
                exchanges,
            )
        }
    }
}

async fn sent_despite_failures(scenario: Scenario, notification: Notification) -> ProbeResult {
    scenario.several_servers()?;
    // A server that is never notified is the failure of another probe.
    let (thread, call) = notification.open_with_call(&scenario).await?;
    notification.trigger(&scenario, &thread).await?;
    notified(&scenario, notification, &call).await.map_err(as_not_observable)?;
    let (_, call) = trigger_with_failing_servers(&scenario, notification).await?;
    notified(&scenario, notification, &call).await.map(|_| ())
}

async fn closing_sent(scenario: Scenario) -> ProbeResult {
    sent(scenario, Notification::Closing).await
}

async fn closing_sent_to_all(scenario: Scenario) -> ProbeResult {
    sent_to_all(scenario, Notification::Closing).await
}

async fn closing_does_not_wait(scenario: Scenario) -> ProbeResult {
    does_not_wait(scenario, Notification::Closing).await
}

async fn closing_together(scenario: Scenario) -> ProbeResult {
    sent_concurrently(scenario, Notification::Closing).await
}

async fn closing_once(scenario: Scenario) -> ProbeResult {
    sent_once(scenario, Notification::Closing).await
}

async fn closing_despite(scenario: Scenario) -> ProbeResult {
    sent_despite_failures(scenario, Notification::Closing).await
}

async fn cancelling_sent(scenario: Scenario) -> ProbeResult {
    sent(scenario, Notification::Cancelling).await
}

async fn cancelling_sent_to_all(scenario: Scenario) -> ProbeResult {
    sent_to_all(scenario, Notification::Cancelling).await
}

async fn cancelling_does_not_wait(scenario: Scenario) -> ProbeResult {
    does_not_wait(scenario, Notification::Cancelling).await
}

async fn cancelling_together(scenario: Scenario) -> ProbeResult {
    sent_concurrently(scenario, Notification::Cancelling).await
}

async fn cancelling_once(scenario: Scenario) -> ProbeResult {
    sent_once(scenario, Notification::Cancelling).await
}

async fn cancelling_despite(scenario: Scenario) -> ProbeResult {
    sent_despite_failures(scenario, Notification::Cancelling).await
}

/// A tool sends a result although its call was interrupted.
async fn late_result_accepted(scenario: Scenario) -> ProbeResult {
    let (thread, call) = Notification::Cancelling.open_with_call(&scenario).await?;
    scenario.interrupt(&thread).await?;
    let posted = call.post(&call.result(&scenario.unique_text("late"))).await?;
    if posted.status.is_none_or(|status| status >= 500) {
        return fail(
            "the late result of a cancelled call was answered 5xx or not at all",
            scenario.exchanges(),
        );
    }
    scenario.current_prompt(&thread).await?;
    Ok(())
}

async fn late_result_ignored(scenario: Scenario) -> ProbeResult {
    let (thread, call) = Notification::Cancelling.open_with_call(&scenario).await?;
    scenario.interrupt(&thread).await?;
    let text = scenario.unique_text("late");
    call.post(&call.result(&text)).await?;
    let model_request = scenario.current_prompt(&thread).await?;
    scenario.wait_for_silence().await;
    scenario.expect_never_in_prompt(&text, "the late result of an interrupted call")?;
    match model_request.results_of(call.marker()).as_slice() {
        [only] if only.contains("interrupted") => Ok(()),
        _ => fail(
            "the result of an interrupted call does not contain `interrupted`",
            vec![model_request.exchange()],
        ),
    }
}

/// The cancellation of a call at its tool server, if it has arrived.
fn cancelled(scenario: &Scenario, call: &Call) -> Option<Arc<RecordedRequest>> {
    let received = scenario.notifications(Route::Cancel, call.thread()).into_iter();
    received
        .filter(|(at, _)| *at == MAIN)
        .map(|(_, request)| request)
        .find(|request| request.field("tool_call_id") == call.id())
}

/// Waits for the cancellation of a call at its tool server.
async fn until_cancelled(scenario: &Scenario, call: &Call) -> Result<Arc<RecordedRequest>, Verdict> {
    scenario
        .wait_for("/cancel_tool_call for an open call of a closed thread", || cancelled(scenario, call))
        .await
}

async fn closing_cancels(scenario: Scenario) -> ProbeResult {
    scenario.can_close()?;
    let (thread, work) = scenario.open_with_call(WORK).await?;
    // Gives the runtime time to record the acknowledgement of the call.
    scenario.wait_for_silence().await;
    scenario.close(&thread).await?;
    until_cancelled(&scenario, &work).await.map(|_| ())
}

/// Two requests that are sent one after the other may sometimes arrive in reverse order, but not in most cases.
async fn closing_first(scenario: Scenario) -> ProbeResult {
    scenario.can_close()?;
    let mut calls = Vec::new();
    for _ in 0..CLOSED_THREADS {
        calls.push(scenario.open_with_call(WORK).await?);
    }
    scenario.wait_for_silence().await;
    for (thread, _) in &calls {
        scenario.close(thread).await?;
    }
    let mut early = Vec::new();
    for (_, call) in &calls {
        let received =
            || scenario.notifications(Route::Close, call.thread()).into_iter().find(|(at, _)| *at == MAIN);
        let (_, closing) = scenario
            .wait_for("/close_thread at the tool server of the call", received)
            .await
            .map_err(as_not_observable)?;
        let cancellation = until_cancelled(&scenario, call).await.map_err(as_not_observable)?;
        if cancellation.at < closing.at {
            early.extend([cancellation.exchange(), closing.exchange()]);
        }
    }
    // Each pair has two exchanges, so this tolerates up to half of the threads.
    if early.len() <= CLOSED_THREADS {
        return Ok(());
    }
    fail("/cancel_tool_call arrived before the /close_thread of the same closing", early)
}
