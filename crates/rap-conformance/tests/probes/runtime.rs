//! Tests of the runtime probes: a correct runtime passes all of them, and each fault is found by the expected probes.

use std::time::Duration;

use crate::sample_runtime::{Fault, Ids, SampleRuntime};
use rap_conformance::runtime::{self, Api, Checker, RuntimeHost, SayCommand, Timeouts, User};
use rap_conformance::{Profile, Report, RequirementResult, Strictness, Verdict};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Long enough for the sample runtime on a busy machine.
const TIMEOUTS: Timeouts =
    Timeouts { arrival: Duration::from_secs(12), quiet_period: Duration::from_millis(1200) };
/// Limits the number of concurrent checks. They wait most of the time.
static PERMITS: Semaphore = Semaphore::const_new(7);

async fn checker(timeouts: Timeouts) -> Checker {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    Checker::listen(listener, None, timeouts).await.unwrap()
}

/// Checks the sample runtime.
async fn check(ids: Ids, fault: Option<Fault>) -> Report {
    check_profile(ids, fault, Profile::Rap).await
}

async fn check_profile(ids: Ids, fault: Option<Fault>, profile: Profile) -> Report {
    let _permit = PERMITS.acquire().await.unwrap();
    let checker = checker(TIMEOUTS).await;
    let runtime = SampleRuntime::start(&checker.values(), ids, fault).await;
    let api = User::Api(Api::new(runtime.url().parse().unwrap(), None));
    let host: &dyn RuntimeHost = &runtime;
    checker.run("toy", profile, api, Some(host), &|_| {}).await.unwrap()
}

fn failed(report: &Report) -> Vec<&'static str> {
    let failed = report.outcomes().iter().filter(|outcome| matches!(outcome.verdict, Verdict::Fail { .. }));
    failed.map(|outcome| outcome.probe.name).collect()
}

/// Number of times that an unexpected result is checked again alone. If many checks run concurrently on a slow machine,
/// another probe may time out or be affected by the fault.
const RETRIES: usize = 2;

/// Asserts that each fault makes exactly these probes fail. The faults are checked concurrently.
async fn expect_failures(table: &Table) {
    let checked = table.iter().map(|(fault, _)| check(Ids::SameAsWire, Some(*fault)));
    let reports = futures_util::future::join_all(checked).await;
    let mut wrong = String::new();
    for ((fault, expected), mut report) in table.iter().zip(reports) {
        for _ in 0..RETRIES {
            if failed(&report) != *expected {
                report = check(Ids::SameAsWire, Some(*fault)).await;
            }
        }
        let failed = failed(&report);
        if failed != *expected {
            let table = report.to_table(Strictness::Strict, None);
            wrong.push_str(&format!("{fault:?}: {failed:?} failed, expected {expected:?}\n{table}\n"));
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Asserts that every probe passes.
async fn expect_pass(ids: Ids) {
    let report = check(ids, None).await;
    let table = report.to_table(Strictness::Strict, None);
    assert!(report.outcomes().iter().all(|outcome| outcome.verdict.is_pass()), "{table}");
    assert!(report.is_good(Strictness::Strict), "{table}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_correct_runtime_passes_every_probe() {
    expect_pass(Ids::SameAsWire).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_with_different_ids_in_prompts_passes_every_probe() {
    expect_pass(Ids::ShortInPrompts).await;
}

/// Faults with the probes that have to fail.
type Table = [(Fault, &'static [&'static str])];

const TOOLSETS_AND_INVOCATIONS: &Table = &[
    (Fault::PollsDiscovery, &["discovery_once"]),
    (Fault::NeverRefetchesToolsets, &["toolset_of_a_new_session"]),
    (Fault::DoesNotRefresh, &["toolset_after_a_conflict"]),
    (Fault::DoesNotReportMissingToolsets, &["toolset_missing"]),
    (Fault::NeedsDiscoveryForCalls, &["toolset_from_the_cache"]),
    (Fault::OffersInvalidTools, &["invalid_toolset"]),
    (Fault::OffersDuplicateNames, &["duplicate_tool_names"]),
    (Fault::RemoteToolsReplaceBuiltIns, &["built_in_is_not_replaced"]),
    (Fault::NoVersion, &["invocation_version"]),
    (Fault::NoTokenWithNotifications, &["invocation_authenticated"]),
    (Fault::ReadsAcknowledgements, &["acknowledgement_body"]),
    (Fault::SendsPlainText, &["invocation_fields"]),
];

const ATTEMPTS: &Table = &[
    (Fault::GivesUpOnServerErrors, &["retry_server_errors"]),
    (Fault::GivesUpWhenUnreachable, &["retry_unreachable"]),
    (Fault::ConstantRetryPauses, &["retry_backoff"]),
    (Fault::NewUrlPerAttempt, &["retry_is_the_same"]),
    (Fault::RetriesRefusals, &["no_retry_after_4xx"]),
    (Fault::NoResultOfRefusals, &["refusal_is_told"]),
    (Fault::SwapsResults, &["results_reach_their_calls"]),
    (Fault::CallsOneByOne, &["parallel_calls"]),
    (Fault::AcknowledgementsBlockTheThread, &["slow_acknowledgement"]),
    (Fault::SendsInvalidArguments, &["invalid_arguments_not_sent"]),
];

const IDS: &Table = &[
    (Fault::ReusesCallIds, &["repeated_call_id"]),
    (Fault::UsesIdsOfTheModel, &["call_id_form"]),
    (Fault::IdsPerThread, &["call_ids_across_threads"]),
    (Fault::IdsPerSession, &["call_ids_across_threads"]),
    (Fault::NoCallId, &["call_id_of_the_model"]),
];

const RESULTS: &Table = &[
    (Fault::CountsDuplicates, &["duplicate_result"]),
    (Fault::ComparesHalfTheToken, &["forged_url"]),
    (Fault::UrlFromIds, &["unguessable_url"]),
    (Fault::IgnoresIdsInBodies, &["unmatched_result"]),
    (Fault::AcceptsResultsOfOtherCalls, &["mismatched_result_unheard"]),
    (Fault::Answers200ToUnmatched, &["mismatched_result"]),
    (Fault::AcceptsInvalidCallbacks, &["invalid_callback"]),
    (Fault::Answers200ToInvalid, &["invalid_callback_is_4xx"]),
    (Fault::MakesFilesByGroupId, &["hostile_ids"]),
    (Fault::RefusesLargeResults, &["large_result"]),
];

const OTHER_CALLBACKS: &Table = &[
    (Fault::AcceptsOauthOfUnknownCalls, &["oauth_of_an_unknown_call"]),
    (Fault::AcceptsEmptyChoices, &["empty_choices"]),
    (Fault::AcceptsAnyContentType, &["callback_not_json"]),
    (Fault::FailsAtHostileBodies, &["hostile_callback"]),
    (Fault::InvokesAfterSignIn, &["sign_in"]),
    (Fault::DropsChoices, &["user_choice"]),
    (Fault::ViewsWake, &["view_update"]),
    (Fault::RefusesLateViews, &["view_after_result"]),
    (Fault::DropsLateViews, &["view_after_result"]),
    (Fault::Answers202ToResults, &["result"]),
    (Fault::Answers202ToEvents, &["event_answered_200"]),
];

const EVENTS: &Table = &[
    (Fault::EventsAsUserMessages, &["event_is_a_synthetic_call"]),
    (Fault::EventsAsSecondResults, &["subscription_has_one_result"]),
    (Fault::AllEventsInline, &["event_in_a_child"]),
    (Fault::InlineByDefault, &["event_defaults"]),
    (Fault::NoInlineEvents, &["event_in_its_thread"]),
    (Fault::ChildrenInheritNothing, &["event_in_a_child"]),
    (Fault::NoAncestors, &["thread_ancestors"]),
    (Fault::DropsEventsBehindCalls, &["events_behind_a_call"]),
    (Fault::DropsEventsBehindQuestions, &["events_behind_a_question"]),
    (Fault::EventsBetweenCallsAndResults, &["prompts_are_valid"]),
    (Fault::MixesConversations, &["conversations_are_apart"]),
    (Fault::IgnoresConfirmations, &["subscription_confirmed"]),
];

const ENDS_OF_SUBSCRIPTIONS: &Table = &[
    (Fault::EventsAfterFinal, &["final_event"]),
    (Fault::EventsOfAnyCall, &["event_of_no_subscription"]),
    (Fault::CancelNotOffered, &["cancel_subscription_offered"]),
    (Fault::CancelSendsNoNotification, &["cancel_subscription_told"]),
    (Fault::CancelAnswersLater, &["cancel_subscription_at_once"]),
    (Fault::CancelLeavesActive, &["cancel_subscription_ends_it"]),
    (Fault::CancelsUnknown, &["cancel_subscription_unknown"]),
    (Fault::CancelsForeign, &["cancel_subscription_foreign"]),
    (Fault::AcceptsEventsAfterClosing, &["event_after_closing"]),
    (Fault::ClosingCancels, &["closing_cancels_nothing"]),
];

const CLOSINGS: &Table = &[
    (Fault::NotifiesOfNoClosing, &["closing_told"]),
    (Fault::NotifiesOnlyUsedServers, &["closing_told_to_all"]),
    (Fault::ClosingWaits, &["closing_waits_for_nobody"]),
    (Fault::ClosingOneByOne, &["closing_told_together"]),
    (Fault::RetriesClosing, &["closing_told_once"]),
    (Fault::ClosingStopsAtFailure, &["closing_told_despite_failures"]),
    (Fault::ClosesInPlainText, &["closing_told"]),
    (Fault::ClosingLeavesCalls, &["closing_cancels_open_calls"]),
    (Fault::CancelsBeforeClosing, &["closing_told_before_cancellations"]),
];

const CANCELLATIONS: &Table = &[
    (Fault::CancelsOnlyAtUsedServer, &["cancelling_told_to_all"]),
    (Fault::CancelsSubscriptionsOnlyAtUsedServer, &["cancel_subscription_told"]),
    (Fault::CancelsInPlainText, &["cancelling_told"]),
    (Fault::ReadsAnswersToCancellations, &["cancelling_told_once"]),
    (Fault::CancellingWaits, &["cancelling_waits_for_nobody"]),
    (Fault::CancellingOneByOne, &["cancelling_told_together"]),
    (Fault::RetriesCancelling, &["cancelling_told_once"]),
    (Fault::CancellingStopsAtFailure, &["cancelling_told_despite_failures"]),
    (Fault::FailsAtLateResults, &["late_result"]),
    (Fault::AcceptsLateResults, &["late_result_ignored"]),
];

const TURNS_AND_RESTARTS: &Table = &[
    (Fault::IgnoresMessagesWhileCallsAreOpen, &["responsive"]),
    (Fault::LosesMessages, &["model_failure"]),
    (Fault::ForgetsAtRestart, &["crash_in_a_call"]),
    (Fault::ForgetsSubscriptionsAtRestart, &["crash_after_an_event"]),
    (Fault::ForgetsMessagesAtRestart, &["crash_after_a_message"]),
    (Fault::AnswersBeforeStoring, &["crash_after_a_result"]),
    (Fault::ForgetsDuplicatesAtRestart, &["crash_and_a_duplicate"]),
    (Fault::ForgetsQuestionsAtRestart, &["crash_in_a_question"]),
    (Fault::NewUrlAfterRestart, &["crash_in_a_retry"]),
];

const ALL: &[&Table] = &[
    TOOLSETS_AND_INVOCATIONS,
    ATTEMPTS,
    IDS,
    RESULTS,
    OTHER_CALLBACKS,
    EVENTS,
    ENDS_OF_SUBSCRIPTIONS,
    CLOSINGS,
    CANCELLATIONS,
    TURNS_AND_RESTARTS,
];

#[tokio::test(flavor = "multi_thread")]
async fn faults_in_toolsets_and_invocations_are_found() {
    expect_failures(TOOLSETS_AND_INVOCATIONS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_in_retries_are_found() {
    expect_failures(ATTEMPTS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_in_ids_are_found() {
    expect_failures(IDS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_in_results_are_found() {
    expect_failures(RESULTS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_in_other_callbacks_are_found() {
    expect_failures(OTHER_CALLBACKS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_in_events_are_found() {
    expect_failures(EVENTS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_at_the_end_of_subscriptions_are_found() {
    expect_failures(ENDS_OF_SUBSCRIPTIONS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_in_closing_are_found() {
    expect_failures(CLOSINGS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_in_cancellations_are_found() {
    expect_failures(CANCELLATIONS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_in_turns_and_restarts_are_found() {
    expect_failures(TURNS_AND_RESTARTS).await;
}

/// These runtimes do what the specification says, and not what this project adds to it.
#[tokio::test(flavor = "multi_thread")]
async fn the_profile_of_the_specification_has_no_additions() {
    let faults = [
        None,
        Some(Fault::AcceptsAnyContentType),
        Some(Fault::AcceptsResultsOfOtherCalls),
        Some(Fault::CallsOneByOne),
        Some(Fault::Answers200ToInvalid),
        Some(Fault::Answers200ToUnmatched),
        Some(Fault::NoCallId),
    ];
    let checked = faults.map(|fault| check_profile(Ids::SameAsWire, fault, Profile::Spec));
    for (fault, report) in faults.into_iter().zip(futures_util::future::join_all(checked).await) {
        let table = report.to_table(Strictness::Strict, None);
        assert!(report.is_good(Strictness::Strict), "{fault:?}\n{table}");
        assert!(report.outcomes().iter().all(|outcome| !outcome.probe.is_addition()), "{table}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_correct_runtime_is_claimed_only_for_what_was_seen() {
    let report = check(Ids::SameAsWire, None).await;
    for (requirement, result) in report.requirement_results() {
        if ["TC-06", "CN-06", "TR-25", "LC-16", "LC-22"].contains(&requirement.id) {
            assert!(matches!(result, RequirementResult::Partial { .. }), "{}: {result:?}", requirement.id);
        }
        assert_eq!(
            report.seen(requirement.id).count() == 0,
            matches!(result, RequirementResult::NotObservable { .. }),
            "{}: {result:?}",
            requirement.id
        );
    }
}

#[test]
fn each_fault_is_one_failure() {
    for (fault, probes) in ALL.iter().copied().flatten() {
        assert_eq!(probes.len(), 1, "{fault:?}");
    }
}

#[test]
fn every_probe_finds_a_fault() {
    let found: Vec<&str> = ALL.iter().copied().flatten().flat_map(|(_, probes)| *probes).copied().collect();
    // This probe never fails: a limit that was not reached cannot be observed.
    let can_fail = runtime::probes().filter(|probe| probe.name != "subscription_limit");
    let unused: Vec<&str> = can_fail.map(|probe| probe.name).filter(|name| !found.contains(name)).collect();
    assert_eq!(unused, [""; 0]);
}

/// The user can only send messages. Probes that need more are not observable, and no probe fails.
#[tokio::test(flavor = "multi_thread")]
async fn a_say_command_is_sufficient_for_many_probes() {
    // Each message starts a process, which is slow.
    let checker = checker(Timeouts { arrival: Duration::from_secs(60), ..TIMEOUTS }).await;
    let runtime = SampleRuntime::start(&checker.values(), Ids::SameAsWire, None).await;
    let script = "import json, sys, urllib.request as r; url, thread, text = sys.argv[1:]; \
                  body = json.dumps({'text': text}).encode(); r.urlopen(url + '/say/' + thread, body)";
    let say =
        SayCommand::new(&format!("python3 -c \"{script}\" {} {{thread}} {{text}}", runtime.url())).unwrap();
    let report = checker.run("toy", Profile::Rap, User::Command(say), None, &|_| {}).await.unwrap();
    let table = report.to_table(Strictness::Strict, None);
    assert_eq!(failed(&report), [""; 0], "{table}");
    let is_not_observable = |name: &str| {
        let outcome = report.outcomes().iter().find(|outcome| outcome.probe.name == name).unwrap();
        matches!(&outcome.verdict, Verdict::NotObservable { .. })
    };
    for name in ["closing_told", "cancelling_told", "late_result", "user_choice", "crash_in_a_call"] {
        assert!(is_not_observable(name), "{name}\n{table}");
    }
    for name in ["invocation_fields", "duplicate_result", "event_in_a_child", "cancel_subscription_told"] {
        assert!(!is_not_observable(name), "{name}\n{table}");
    }
}

/// No runtime listens at the address.
#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_runtime_is_an_error_without_a_report() {
    let checker = checker(TIMEOUTS).await;
    let api = User::Api(Api::new("http://127.0.0.1:1".parse().unwrap(), None));
    let error = checker.run("nobody", Profile::Spec, api, None, &|_| {}).await.unwrap_err().to_string();
    assert!(error.contains("did not reach the model") && error.contains("could not connect"), "{error}");
}
