//! Tests of the tool server probes: each fault is found by the expected probes and by no other.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::faulty_server::{Fault, FaultyServer, TOKEN};
use futures_util::StreamExt;
use rap_conformance::tool::{Error, OperationCall, Options, Timeouts, check, probes};
use rap_conformance::{Profile, Report, RequirementResult, Strictness, Verdict};
use rap_protocol::Secret;
use serde_json::json;

/// Number of servers that are checked concurrently.
const CONCURRENT_CHECKS: usize = 6;
/// Number of times that an unexpected result is checked again alone. If many checks run concurrently on a slow machine,
/// another probe may time out.
const RETRIES: usize = 2;

fn options(server: &FaultyServer) -> Options {
    let named = |operation: &str, arguments: serde_json::Value| {
        let arguments = arguments.as_object().unwrap().clone();
        Some(OperationCall { operation: operation.into(), arguments })
    };
    Options {
        url: server.url.clone(),
        bearer: Some(Secret::new(TOKEN)),
        operation: None,
        slow_operation: named("crawl", json!({})),
        setup_operation: None,
        subscription: named("tick", json!({"count": 3})),
        listen: None,
        timeouts: Timeouts {
            answer: Duration::from_secs(10),
            prompt: Duration::from_millis(700),
            result: Duration::from_secs(4),
            quiet: Duration::from_millis(800),
        },
        profile: Profile::Rap,
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
    let checks = table.iter().map(|(fault, expected)| async move { (fault, expected, run(*fault).await) });
    let reports: Vec<_> =
        futures_util::stream::iter(checks).buffer_unordered(CONCURRENT_CHECKS).collect().await;
    let mut unexpected = Vec::new();
    for (fault, expected, mut report) in reports {
        let expected: BTreeSet<&str> = expected.iter().copied().collect();
        for _ in 0..RETRIES {
            if failed(&report) != expected {
                report = run(*fault).await;
            }
        }
        let shown = report.to_table(Strictness::Strict, None);
        let forms =
            [&shown, &report.to_junit(Strictness::Strict), &report.to_json(Strictness::Strict).to_string()];
        assert!(forms.iter().all(|form| !form.contains(TOKEN) && !form.contains("/callback/")), "{shown}");
        if failed(&report) != expected {
            unexpected
                .push(format!("{fault:?}: {:?} failed, expected {expected:?}\n{shown}", failed(&report)));
        }
    }
    assert!(unexpected.is_empty(), "{}", unexpected.join("\n\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_correct_server_passes_every_probe() {
    let report = run(Fault::None).await;
    let table = report.to_table(Strictness::Strict, None);
    assert_eq!(report.outcomes().len(), probes().count());
    assert!(report.outcomes().iter().all(|outcome| outcome.verdict.is_pass()), "{table}");
    assert!(report.is_good(Strictness::Strict), "{table}");
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_in_discovery_are_found() {
    expect_failures(&[
        (Fault::ServesNoToolset, &["toolset_is_served"]),
        (Fault::OffersAToolTwice, &["toolset_is_valid"]),
        (Fault::ChangesItsToolsAndNotItsVersion, &["toolset_changes_with_its_version"]),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_in_calls_are_found() {
    expect_failures(&[
        (Fault::NeverDelivers, &["result_is_delivered"]),
        (Fault::AcknowledgesWith202, &["acknowledged_with_200"]),
        (Fault::AcknowledgesLate, &["acknowledged_at_once"]),
        (Fault::AcknowledgesAfterDelivery, &["acknowledged_before_delivery"]),
        (Fault::WorksBeforeItAcknowledges, &["acknowledged_before_the_work"]),
        (Fault::SendsTwoResults, &["one_result_for_a_call"]),
        (Fault::RunsRepeatedInvocations, &["repeat_counts_once"]),
        (Fault::SendsPlainText, &["callbacks_are_json"]),
        (Fault::SendsWrongTypes, &["callbacks_are_json"]),
        (Fault::RefusesUnknownFields, &["optional_fields_are_taken"]),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_in_error_results_are_found() {
    expect_failures(&[
        (Fault::RefusesUnknownOperations, &["unknown_operation_is_an_error_result"]),
        (Fault::DropsUnknownOperations, &["unknown_operation_is_an_error_result"]),
        (Fault::SubscribesUnknownOperations, &["unknown_operation_makes_no_subscription"]),
        (Fault::NeverSendsErrors, &["unknown_operation_is_an_error_result"]),
        (Fault::RunsInvalidArguments, &["invalid_arguments_are_an_error_result"]),
        (Fault::IgnoresTypesOfArguments, &["invalid_arguments_are_an_error_result"]),
        (Fault::ErrorsWithoutPrefix, &["errors_begin_with_error"]),
        (Fault::RefusesDefects, &["defects_are_error_results"]),
        (Fault::ErrorsWithoutDescription, &["errors_say_what_is_wrong"]),
        (Fault::ShowsFilePaths, &["errors_hide_what_is_inside"]),
        (Fault::RepeatsTheCallbackUrl, &["callback_urls_are_not_shown"]),
        (Fault::AcceptsGarbage, &["unreadable_invocation_is_4xx"]),
        (Fault::FailsAtGarbage, &["unreadable_invocation_does_no_harm"]),
        (Fault::MakesFilesByGroupId, &["group_ids_are_no_paths"]),
        (Fault::RefusesLargeInvocations, &["large_invocation_is_taken"]),
        (Fault::FailsAtDeepJson, &["deep_json_does_no_harm"]),
        (Fault::IgnoresTheVersion, &["stale_version_is_409"]),
        (Fault::DropsStaleCalls, &["stale_call_is_not_lost"]),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
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

#[tokio::test(flavor = "multi_thread")]
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

#[tokio::test(flavor = "multi_thread")]
async fn faults_in_answers_to_close_thread_are_found() {
    expect_failures(&[
        (Fault::Answers404ToUnknownThreads, &["closing_an_unknown_thread_is_200"]),
        (Fault::Answers500ToClosings, &["closing_a_known_thread_is_200"]),
        (Fault::Answers409ToASecondClosing, &["closing_twice_is_harmless"]),
        (Fault::WaitsForItsCleanUp, &["closing_is_answered_at_once"]),
        (Fault::HasNoCloseEndpoint, &["close_thread_is_served"]),
        (Fault::FailsAtHostileThreadIds, &["closing_takes_hostile_ids"]),
        (Fault::DeletesFilesByThreadId, &["closing_takes_hostile_ids"]),
        (Fault::RefusesHostileIds, &["hostile_ids_are_200"]),
        (Fault::RevealsWhetherAThreadIsKnown, &["closing_reveals_nothing"]),
        (Fault::RevealsWhatIsAtWork, &["closing_reveals_nothing"]),
        (Fault::AnswersClosingsWithABody, &["closing_reveals_nothing"]),
        (Fault::RefusesCallsOfClosedThreads, &["a_closed_thread_can_call_again"]),
        (Fault::ClosesWithoutRateLimit, &["closings_are_rate_limited"]),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_in_answers_to_cancel_tool_call_are_found() {
    expect_failures(&[
        (Fault::Answers404ToUnknownCalls, &["cancelling_an_unknown_call_is_200"]),
        (Fault::SendsAResultAfterCancellingAFinishedCall, &["cancelling_a_finished_call_is_200"]),
        (Fault::Answers409ToASecondCancellation, &["cancelling_twice_is_harmless"]),
        (Fault::HasNoCancelEndpoint, &["cancel_tool_call_is_served"]),
        (Fault::FailsAtHostileCallIds, &["cancelling_takes_hostile_ids"]),
        (Fault::DeletesFilesByCallId, &["cancelling_takes_hostile_ids"]),
        (Fault::RevealsWhetherACallIsKnown, &["cancelling_reveals_nothing"]),
        (Fault::AnswersCancellationsWithABody, &["cancelling_reveals_nothing"]),
        (Fault::CancelsWithoutRateLimit, &["cancellations_are_rate_limited"]),
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread")]
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

#[tokio::test(flavor = "multi_thread")]
async fn missing_authentication_is_found() {
    expect_failures(&[
        (Fault::LetsAnyoneInvoke, &["invocation_needs_the_token"]),
        (Fault::LetsAnyoneClose, &["closing_needs_the_token"]),
        (Fault::LetsAnyoneCancel, &["cancelling_needs_the_token"]),
    ])
    .await;
}

fn result_of<'a>(report: &'a Report, id: &str) -> RequirementResult<'a> {
    report.requirement_results().find(|(requirement, _)| requirement.id == id).unwrap().1
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_without_the_needed_options_are_not_observable() {
    let server = FaultyServer::start(Fault::NeedsNoToken).await;
    let given = Options { bearer: None, subscription: None, slow_operation: None, ..options(&server) };
    let report = check(given, &|_| {}).await.unwrap();
    for outcome in report.outcomes() {
        let name = outcome.probe.name;
        let needs_options =
            name.contains("other_subscription") || name.contains("token") || name.contains("before_the_work");
        if needs_options {
            assert!(matches!(outcome.verdict, Verdict::NotObservable { .. }), "{outcome:?}");
        }
    }
    // Without a slow operation nothing shows that work begins after the acknowledgement.
    for id in ["TR-03", "TR-04", "LC-05", "LC-07"] {
        let result = result_of(&report, id);
        assert!(
            matches!(result, RequirementResult::Partial { unseen } if unseen.contains("--slow-operation")),
            "{id}: {result:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_correct_server_is_claimed_only_for_what_was_seen() {
    let report = run(Fault::None).await;
    for id in ["TR-03", "TR-04", "LC-05", "LC-07", "TC-19", "CN-21"] {
        assert_eq!(result_of(&report, id), RequirementResult::Pass, "{id}");
    }
    for id in ["TC-05", "TC-14", "CN-16", "LC-08", "LC-26"] {
        assert!(matches!(result_of(&report, id), RequirementResult::Partial { .. }), "{id}");
    }
    for id in ["TC-21", "CN-23", "TR-25"] {
        assert!(matches!(result_of(&report, id), RequirementResult::NotObservable { .. }), "{id}");
    }
    let seen: Vec<&str> = report.seen("TR-04").collect();
    assert!(seen.iter().any(|seen| seen.contains("its result arrived after")), "{seen:?}");
    let json = report.to_json(Strictness::Strict);
    for row in json["requirements"].as_array().unwrap() {
        assert_eq!(row["seen"].as_array().unwrap().is_empty(), row["probes"] == json!([]), "{row}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_never_sends_an_error_has_not_shown_that_its_errors_are_good() {
    let report = run(Fault::NeverSendsErrors).await;
    for id in ["LC-26", "LC-33"] {
        let result = result_of(&report, id);
        assert!(!matches!(result, RequirementResult::Pass), "{id}: {result:?}");
    }
}

/// Serving notifications is recommended for one endpoint and optional for the other.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_notification_endpoint_is_one_warning() {
    for (fault, failed_should) in [(Fault::HasNoCloseEndpoint, 1), (Fault::HasNoCancelEndpoint, 0)] {
        let server = FaultyServer::start(fault).await;
        let given = Options { profile: Profile::Spec, ..options(&server) };
        let report = check(given, &|_| {}).await.unwrap();
        let count = report.count();
        let table = report.to_table(Strictness::Lenient, None);
        assert_eq!((count.failed_must, count.failed_should), (0, failed_should), "{fault:?}\n{table}");
    }
}

/// These servers do what the specification says, and not what this project adds to it.
#[tokio::test(flavor = "multi_thread")]
async fn the_profile_of_the_specification_has_no_additions() {
    for fault in [
        Fault::None,
        Fault::ErrorsWithoutPrefix,
        Fault::AcceptsGarbage,
        Fault::RunsRepeatedInvocations,
        Fault::RefusesHostileIds,
        Fault::DropsTheCallId,
        Fault::RefusesUnknownFields,
    ] {
        let server = FaultyServer::start(fault).await;
        let given = Options { profile: Profile::Spec, ..options(&server) };
        let report = check(given, &|_| {}).await.unwrap();
        let table = report.to_table(Strictness::Strict, None);
        assert!(report.is_good(Strictness::Strict), "{fault:?}\n{table}");
        assert!(report.outcomes().iter().all(|outcome| !outcome.probe.is_addition()), "{table}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_named_and_read_only_operations_are_called() {
    let server = FaultyServer::start(Fault::AnnotatesNothing).await;
    let given = Options { subscription: None, slow_operation: None, ..options(&server) };
    let report = check(given, &|_| {}).await.unwrap();
    let called: Vec<String> =
        server.operations().into_iter().filter(|name| !name.starts_with("rap_check_no_such")).collect();
    assert_eq!(called, [""; 0], "{}", report.to_table(Strictness::Strict, None));
    let server = FaultyServer::start(Fault::None).await;
    check(options(&server), &|_| {}).await.unwrap();
    assert!(!server.operations().contains("open"), "{:?}", server.operations());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_needs_a_first_call_gets_it_in_each_thread() {
    let server = FaultyServer::start(Fault::NeedsSetup).await;
    let report = check(options(&server), &|_| {}).await.unwrap();
    assert!(failed(&report).contains("subscription_is_confirmed"));
    // The flood of the first check has used up the rate limit.
    let server = FaultyServer::start(Fault::NeedsSetup).await;
    let setup = OperationCall { operation: "open".into(), arguments: serde_json::Map::new() };
    let given = Options { setup_operation: Some(setup), ..options(&server) };
    let report = check(given, &|_| {}).await.unwrap();
    let table = report.to_table(Strictness::Strict, None);
    assert_eq!(failed(&report), BTreeSet::new(), "{table}");
    assert!(table.contains("--setup-operation open"), "{table}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_token_is_one_error_with_advice() {
    let server = FaultyServer::start(Fault::None).await;
    let table = [
        (None, "--bearer or RAP_TOOL_BEARER"),
        (Some(Secret::new("wrong")), "is not the one that it expects"),
    ];
    for (bearer, advice) in table {
        let error = check(Options { bearer, ..options(&server) }, &|_| {}).await.unwrap_err();
        assert!(matches!(&error, Error::Unauthorized(why) if why.contains(advice)), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_address_is_one_error_with_advice() {
    let server = FaultyServer::start(Fault::None).await;
    let given = Options { url: "http://127.0.0.1:1".parse().unwrap(), ..options(&server) };
    let error = check(given, &|_| {}).await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("start the server"), "{error}");
}
