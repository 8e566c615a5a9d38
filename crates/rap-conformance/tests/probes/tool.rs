//! Tests of the tool server probes: each fault is found by the expected probes and by no other.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::faulty_server::{Fault, FaultyServer, TOKEN};
use futures_util::StreamExt;
use rap_conformance::tool::{OperationCall, Options, Timeouts, check, probes};
use rap_conformance::{Report, Strictness, Verdict};
use rap_protocol::Secret;
use serde_json::json;

/// Number of servers that are checked concurrently.
const CONCURRENT_CHECKS: usize = 12;

fn options(server: &FaultyServer) -> Options {
    let arguments = json!({"count": 3}).as_object().unwrap().clone();
    Options {
        url: server.url.clone(),
        bearer: Some(Secret::new(TOKEN)),
        operation: None,
        subscription: Some(OperationCall { operation: "tick".into(), arguments }),
        listen: None,
        timeouts: Timeouts {
            answer: Duration::from_secs(5),
            prompt: Duration::from_secs(1),
            result: Duration::from_secs(4),
            quiet: Duration::from_millis(800),
        },
    }
}

async fn run(fault: Fault) -> Report {
    let server = FaultyServer::start(fault).await;
    check(options(&server), &|_| {}).await.unwrap()
}

fn failed(report: &Report) -> BTreeSet<&'static str> {
    let failed = report.outcomes().iter().filter(|outcome| matches!(outcome.verdict, Verdict::Fail { .. }));
    failed.map(|outcome| outcome.probe.name).collect()
}

/// Asserts that each fault makes exactly these probes fail.
async fn expect_failures(table: &[(Fault, &[&'static str])]) {
    let checks = table.iter().map(|(fault, expected)| async move {
        let report = run(*fault).await;
        let shown = report.to_table(Strictness::Strict, None);
        let forms =
            [&shown, &report.to_junit(Strictness::Strict), &report.to_json(Strictness::Strict).to_string()];
        assert!(forms.iter().all(|form| !form.contains(TOKEN) && !form.contains("/callback/")), "{shown}");
        let expected: BTreeSet<&str> = expected.iter().copied().collect();
        (failed(&report) != expected)
            .then(|| format!("{fault:?}: {:?} failed, expected {expected:?}\n{shown}", failed(&report)))
    });
    let unexpected: Vec<Option<String>> =
        futures_util::stream::iter(checks).buffer_unordered(CONCURRENT_CHECKS).collect().await;
    let unexpected: Vec<String> = unexpected.into_iter().flatten().collect();
    assert!(unexpected.is_empty(), "{}", unexpected.join("\n\n"));
}

#[tokio::test]
async fn a_correct_server_passes_every_probe() {
    let report = run(Fault::None).await;
    let table = report.to_table(Strictness::Strict, None);
    assert_eq!(report.outcomes().len(), probes().count());
    assert!(report.outcomes().iter().all(|outcome| outcome.verdict == Verdict::Pass), "{table}");
    assert!(report.is_good(Strictness::Strict), "{table}");
}

#[tokio::test]
async fn faults_in_discovery_are_found() {
    expect_failures(&[
        (Fault::ServesNoToolset, &["toolset_is_served"]),
        (Fault::OffersAToolTwice, &["toolset_is_valid"]),
        (Fault::ChangesItsToolsAndNotItsVersion, &["toolset_changes_with_its_version"]),
    ])
    .await;
}

#[tokio::test]
async fn faults_in_calls_are_found() {
    expect_failures(&[
        (Fault::NeverDelivers, &["result_is_delivered"]),
        (Fault::AcknowledgesWith202, &["acknowledged_with_200"]),
        (Fault::AcknowledgesLate, &["acknowledged_at_once"]),
        (Fault::AcknowledgesAfterDelivery, &["acknowledged_before_delivery"]),
        (
            Fault::SendsTwoResults,
            &["cancelling_a_finished_call_is_200", "one_result_for_a_call", "repeat_counts_once"],
        ),
        (Fault::RunsRepeatedInvocations, &["repeat_counts_once"]),
        (Fault::SendsPlainText, &["callbacks_are_json"]),
        (Fault::SendsWrongTypes, &["callbacks_are_json"]),
        (Fault::RefusesUnknownFields, &["optional_fields_are_taken"]),
    ])
    .await;
}

#[tokio::test]
async fn faults_in_error_results_are_found() {
    expect_failures(&[
        (Fault::RefusesUnknownOperations, &["unknown_operation_is_an_error_result"]),
        (Fault::DropsUnknownOperations, &["unknown_operation_is_an_error_result"]),
        (Fault::RunsInvalidArguments, &["invalid_arguments_are_an_error_result"]),
        (Fault::RefusesDefects, &["defects_are_error_results"]),
        (Fault::ErrorsWithoutDescription, &["errors_say_what_is_wrong"]),
        (Fault::ShowsFilePaths, &["errors_hide_what_is_inside"]),
        (Fault::RepeatsTheCallbackUrl, &["callback_urls_are_not_shown"]),
        (Fault::AcceptsGarbage, &["unreadable_invocation_is_refused"]),
        (Fault::FailsAtDeepJson, &["deep_json_does_no_harm"]),
        (Fault::IgnoresTheVersion, &["stale_version_is_409"]),
        (Fault::DropsStaleCalls, &["stale_call_is_not_lost", "stale_version_is_409"]),
    ])
    .await;
}

#[tokio::test]
async fn faults_in_deliveries_are_found() {
    expect_failures(&[
        (Fault::GivesUpAfter503, &["result_is_sent_again_after_503"]),
        (Fault::GivesUpAfterALostConnection, &["result_is_sent_again_after_a_lost_connection"]),
        (Fault::NeverPauses, &["attempts_are_paced"]),
        (Fault::RetriesAfter404, &["refused_result_is_not_sent_again"]),
        (Fault::RetriesAfter400, &["invalid_result_is_not_sent_again"]),
    ])
    .await;
}

#[tokio::test]
async fn confused_calls_are_found() {
    expect_failures(&[
        (Fault::SendsResultsWithAnotherId, &["result_names_its_call"]),
        (Fault::SendsResultsWithAnotherThread, &["result_names_its_call"]),
        (Fault::DropsTheCallId, &["call_id_is_echoed"]),
        (Fault::DropsTheQueryOfTheCallbackUrl, &["callback_url_is_opaque"]),
        (Fault::KeepsOneCallbackUrlForAThread, &["each_call_has_its_callback_url"]),
        (Fault::IdentifiesCallsByIdAlone, &["same_id_in_two_threads"]),
        (Fault::MixesCallsUnderLoad, &["concurrent_calls_do_not_mix"]),
    ])
    .await;
}

#[tokio::test]
async fn faults_in_answers_to_close_thread_are_found() {
    expect_failures(&[
        (Fault::Answers404ToUnknownThreads, &["closing_an_unknown_thread_is_200"]),
        (Fault::Answers500ToClosings, &["closing_a_known_thread_is_200"]),
        (Fault::Answers409ToASecondClosing, &["closing_twice_is_harmless"]),
        (Fault::WaitsForItsCleanUp, &["closing_is_answered_at_once"]),
        (Fault::FailsAtHostileThreadIds, &["closing_takes_hostile_ids"]),
        (Fault::RevealsWhetherAThreadIsKnown, &["closing_reveals_nothing"]),
        (Fault::RefusesCallsOfClosedThreads, &["a_closed_thread_can_call_again"]),
        (Fault::HasNoRateLimit, &["cancellations_are_rate_limited", "closings_are_rate_limited"]),
    ])
    .await;
}

#[tokio::test]
async fn faults_in_answers_to_cancel_tool_call_are_found() {
    expect_failures(&[
        (Fault::Answers404ToUnknownCalls, &["cancelling_an_unknown_call_is_200"]),
        (Fault::SendsAResultAfterCancellingAFinishedCall, &["cancelling_a_finished_call_is_200"]),
        (Fault::Answers409ToASecondCancellation, &["cancelling_twice_is_harmless"]),
        (Fault::FailsAtHostileCallIds, &["cancelling_takes_hostile_ids"]),
        (Fault::RevealsWhetherACallIsKnown, &["cancelling_reveals_nothing"]),
    ])
    .await;
}

#[tokio::test]
async fn faults_in_subscriptions_are_found() {
    expect_failures(&[
        (Fault::ConfirmsWithoutSubscriptionFlag, &["subscription_is_confirmed"]),
        (Fault::SendsEventsBeforeItConfirms, &["confirmation_comes_first"]),
        (Fault::ConfirmsWithoutAnIdentifier, &["confirmation_names_the_subscription"]),
        (Fault::SendsEventsWithoutToolCallId, &["events_name_their_subscription"]),
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
    expect_failures(&[
        (Fault::LetsAnyoneInvoke, &["invocation_needs_the_token"]),
        (Fault::LetsAnyoneClose, &["closing_needs_the_token"]),
        (Fault::LetsAnyoneCancel, &["cancelling_needs_the_token"]),
    ])
    .await;
}

#[tokio::test]
async fn probes_without_the_needed_options_are_not_observable() {
    let server = FaultyServer::start(Fault::LetsAnyoneClose).await;
    let given = Options { bearer: None, subscription: None, ..options(&server) };
    let report = check(given, &|_| {}).await.unwrap();
    for outcome in report.outcomes() {
        let needs_options =
            outcome.probe.name.contains("subscription") || outcome.probe.name.contains("token");
        if needs_options {
            assert!(matches!(outcome.verdict, Verdict::NotObservable { .. }), "{outcome:?}");
        }
    }
}
