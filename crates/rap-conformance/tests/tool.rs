//! The probes of tool servers bite: each mistake is found by the probe that looks for it, and by no other.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod wrong;

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::StreamExt;
use rap_conformance::tool::{Options, Order, Patience, check, probes};
use rap_conformance::{Report, Strictness, Verdict};
use rap_protocol::Secret;
use serde_json::json;
use wrong::{Fault, TOKEN, WrongServer};

/// How many servers are checked at the same time.
const AT_ONCE: usize = 12;

fn options(server: &WrongServer) -> Options {
    let arguments = json!({"count": 3}).as_object().unwrap().clone();
    Options {
        url: server.url.clone(),
        bearer: Some(Secret::new(TOKEN)),
        operation: None,
        subscription: Some(Order { operation: "tick".into(), arguments }),
        listen: None,
        patience: Patience {
            answer: Duration::from_secs(5),
            prompt: Duration::from_secs(1),
            result: Duration::from_secs(4),
            quiet: Duration::from_millis(800),
        },
    }
}

async fn run(fault: Fault) -> Report {
    let server = WrongServer::start(fault).await;
    check(options(&server), &|_| {}).await.unwrap()
}

fn failed(report: &Report) -> BTreeSet<&'static str> {
    let failed = report.outcomes().iter().filter(|outcome| matches!(outcome.verdict, Verdict::Fail { .. }));
    failed.map(|outcome| outcome.probe.name).collect()
}

/// Each fault is found by these probes and no others.
async fn bites(table: &[(Fault, &[&'static str])]) {
    let checks = table.iter().map(|(fault, expected)| async move {
        let report = run(*fault).await;
        let shown = report.to_table(Strictness::Strict, None);
        let forms =
            [&shown, &report.to_junit(Strictness::Strict), &report.to_json(Strictness::Strict).to_string()];
        assert!(forms.iter().all(|form| !form.contains(TOKEN) && !form.contains("/callback/")), "{shown}");
        let expected: BTreeSet<&str> = expected.iter().copied().collect();
        (failed(&report) != expected).then(|| format!("{fault:?} fails {:?}\n{shown}", failed(&report)))
    });
    let wrong: Vec<Option<String>> =
        futures_util::stream::iter(checks).buffer_unordered(AT_ONCE).collect().await;
    let wrong: Vec<String> = wrong.into_iter().flatten().collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[tokio::test]
async fn a_server_without_a_mistake_passes_every_probe() {
    let report = run(Fault::None).await;
    let table = report.to_table(Strictness::Strict, None);
    assert_eq!(report.outcomes().len(), probes().count());
    assert!(report.outcomes().iter().all(|outcome| outcome.verdict == Verdict::Pass), "{table}");
    assert!(report.is_good(Strictness::Strict), "{table}");
}

#[tokio::test]
async fn wrong_discovery_is_found() {
    bites(&[
        (Fault::ServesNoToolset, &["toolset_is_served"]),
        (Fault::OffersAToolTwice, &["toolset_is_valid"]),
        (Fault::ChangesItsToolsAndNotItsVersion, &["toolset_changes_with_its_version"]),
    ])
    .await;
}

#[tokio::test]
async fn wrong_calls_are_found() {
    bites(&[
        (Fault::NeverDelivers, &["result_is_delivered"]),
        (Fault::AcknowledgesWith202, &["acknowledged_with_200"]),
        (Fault::AcknowledgesLate, &["acknowledged_at_once"]),
        (Fault::AcknowledgesAfterDelivery, &["acknowledged_before_delivery"]),
        (
            Fault::SendsTwoResults,
            &["cancelling_a_finished_call_is_200", "one_result_for_a_call", "repeat_counts_once"],
        ),
        (Fault::CountsRepeats, &["repeat_counts_once"]),
        (Fault::SendsPlainText, &["callbacks_are_json"]),
        (Fault::SendsWrongTypes, &["callbacks_are_json"]),
        (Fault::RefusesUnknownFields, &["optional_fields_are_taken"]),
    ])
    .await;
}

#[tokio::test]
async fn wrong_errors_are_found() {
    bites(&[
        (Fault::RefusesUnknownOperations, &["unknown_operation_is_an_error_result"]),
        (Fault::DropsUnknownOperations, &["unknown_operation_is_an_error_result"]),
        (Fault::RunsInvalidArguments, &["invalid_arguments_are_an_error_result"]),
        (Fault::RefusesDefects, &["defects_are_error_results"]),
        (Fault::SaysOnlyError, &["errors_say_what_is_wrong"]),
        (Fault::ShowsItsPaths, &["errors_hide_what_is_inside"]),
        (Fault::RepeatsTheCallbackUrl, &["callback_urls_are_not_shown"]),
        (Fault::AcceptsGarbage, &["unreadable_invocation_is_refused"]),
        (Fault::FallsOverDeepJson, &["deep_json_does_no_harm"]),
        (Fault::IgnoresTheVersion, &["stale_version_is_409"]),
        (Fault::DropsStaleCalls, &["stale_call_is_not_lost", "stale_version_is_409"]),
    ])
    .await;
}

#[tokio::test]
async fn wrong_deliveries_are_found() {
    bites(&[
        (Fault::GivesUpAfter503, &["result_is_sent_again_after_503"]),
        (Fault::GivesUpAfterALostConnection, &["result_is_sent_again_after_a_lost_connection"]),
        (Fault::NeverPauses, &["attempts_are_paced"]),
        (Fault::RetriesAfter404, &["refused_result_is_not_sent_again"]),
        (Fault::RetriesAfter400, &["invalid_result_is_not_sent_again"]),
    ])
    .await;
}

#[tokio::test]
async fn mixed_up_calls_are_found() {
    bites(&[
        (Fault::NamesAnotherCall, &["result_names_its_call"]),
        (Fault::NamesNoThread, &["result_names_its_call"]),
        (Fault::ForgetsTheCallId, &["call_id_is_echoed"]),
        (Fault::LeavesOutTheQuery, &["callback_url_is_opaque"]),
        (Fault::KeepsOneCallbackUrlForAThread, &["each_call_has_its_callback_url"]),
        (Fault::KnowsCallsByIdAlone, &["same_id_in_two_threads"]),
        (Fault::MixesCallsUnderLoad, &["concurrent_calls_do_not_mix"]),
    ])
    .await;
}

#[tokio::test]
async fn wrong_answers_to_closings_are_found() {
    bites(&[
        (Fault::Answers404ToUnknownThreads, &["closing_an_unknown_thread_is_200"]),
        (Fault::Answers500ToClosings, &["closing_a_known_thread_is_200"]),
        (Fault::Answers409ToASecondClosing, &["closing_twice_is_harmless"]),
        (Fault::WaitsForItsCleanUp, &["closing_is_answered_at_once"]),
        (Fault::TrustsThreadIds, &["closing_takes_hostile_ids"]),
        (Fault::TellsWhetherAThreadIsKnown, &["closing_reveals_nothing"]),
        (Fault::RefusesCallsOfClosedThreads, &["a_closed_thread_can_call_again"]),
        (Fault::HasNoRateLimit, &["cancellations_are_rate_limited", "closings_are_rate_limited"]),
    ])
    .await;
}

#[tokio::test]
async fn wrong_answers_to_cancellations_are_found() {
    bites(&[
        (Fault::Answers404ToUnknownCalls, &["cancelling_an_unknown_call_is_200"]),
        (Fault::SendsAResultForACancelledCallThatIsOver, &["cancelling_a_finished_call_is_200"]),
        (Fault::Answers409ToASecondCancellation, &["cancelling_twice_is_harmless"]),
        (Fault::TrustsCallIds, &["cancelling_takes_hostile_ids"]),
        (Fault::TellsWhetherACallIsKnown, &["cancelling_reveals_nothing"]),
    ])
    .await;
}

#[tokio::test]
async fn wrong_subscriptions_are_found() {
    bites(&[
        (Fault::ConfirmsLikeAnyCall, &["subscription_is_confirmed"]),
        (Fault::SendsEventsBeforeItConfirms, &["confirmation_comes_first"]),
        (Fault::ConfirmsWithoutAnIdentifier, &["confirmation_names_the_subscription"]),
        (Fault::NamesEventsLikeResults, &["events_name_their_subscription"]),
        (Fault::DropsEventsAfter503, &["event_is_sent_again_after_503"]),
        (Fault::RetriesEventsAfter400, &["refused_event_is_not_sent_again"]),
        (Fault::SendsEventsAfterTheFinalOne, &["nothing_follows_a_final_event"]),
        (Fault::SendsEventsAfterCancellation, &["nothing_follows_a_cancellation"]),
        (Fault::SendsEventsAfterClosing, &["closing_ends_subscriptions"]),
        (Fault::CancelsByIdAlone, &["cancelling_spares_other_subscriptions"]),
        (Fault::ClosesAllThreads, &["closing_spares_other_subscriptions"]),
    ])
    .await;
}

#[tokio::test]
async fn missing_authentication_is_found() {
    bites(&[
        (Fault::LetsAnyoneInvoke, &["invocation_needs_the_token"]),
        (Fault::LetsAnyoneClose, &["closing_needs_the_token"]),
        (Fault::LetsAnyoneCancel, &["cancelling_needs_the_token"]),
    ])
    .await;
}

#[tokio::test]
async fn what_can_not_be_observed_is_never_passed() {
    let server = WrongServer::start(Fault::LetsAnyoneClose).await;
    let given = Options { bearer: None, subscription: None, ..options(&server) };
    let report = check(given, &|_| {}).await.unwrap();
    for outcome in report.outcomes() {
        let hidden = outcome.probe.name.contains("subscription") || outcome.probe.name.contains("token");
        if hidden {
            assert!(matches!(outcome.verdict, Verdict::NotObservable { .. }), "{outcome:?}");
        }
    }
}
