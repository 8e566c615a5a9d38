//! Tests of the runtime probes: a correct runtime passes all of them, and each fault is found by the expected probes.

use std::time::Duration;

use crate::sample_runtime::{Fault, Ids, SampleRuntime};
use rap_conformance::runtime::{self, Api, Checker, RuntimeHost, SayCommand, Timeouts, User};
use rap_conformance::{Report, Strictness, Verdict};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Long enough for the sample runtime on a busy machine.
const TIMEOUTS: Timeouts = Timeouts { arrival: Duration::from_secs(12), settle: Duration::from_millis(1200) };
/// Limits the number of concurrent checks. They wait most of the time.
static PERMITS: Semaphore = Semaphore::const_new(7);

async fn checker(timeouts: Timeouts) -> Checker {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    Checker::listen(listener, None, timeouts).await.unwrap()
}

/// Checks the sample runtime.
async fn check(ids: Ids, fault: Option<Fault>) -> Report {
    let _permit = PERMITS.acquire().await.unwrap();
    let checker = checker(TIMEOUTS).await;
    let runtime = SampleRuntime::start(&checker.values(), ids, fault).await;
    let api = User::Api(Api::new(runtime.url().parse().unwrap(), None));
    let host: &dyn RuntimeHost = &runtime;
    checker.run("toy", api, Some(host), &|_| {}).await.unwrap()
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
    assert!(report.outcomes().iter().all(|outcome| outcome.verdict == Verdict::Pass), "{table}");
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
    (
        Fault::NeverRefetchesToolsets,
        &["discovery_once", "toolset_of_a_new_session", "toolset_after_a_conflict", "toolset_missing"],
    ),
    (Fault::DoesNotRefresh, &["toolset_after_a_conflict"]),
    (Fault::DoesNotReportMissingToolsets, &["toolset_missing"]),
    (Fault::NeedsDiscoveryForCalls, &["discovery_once", "toolset_from_the_cache"]),
    (Fault::NoVersion, &["invocation_version"]),
    (Fault::NoTokenWithNotifications, &["invocation_authenticated"]),
    (Fault::ReadsAcknowledgements, &["acknowledgement_body"]),
    (Fault::SendsPlainText, &["invocation_fields"]),
];

const ATTEMPTS: &Table = &[
    (Fault::GivesUpOnServerErrors, &["retry_server_errors", "crash_in_a_retry"]),
    (Fault::GivesUpWhenUnreachable, &["retry_unreachable"]),
    (Fault::ConstantRetryPauses, &["retry_backoff"]),
    (Fault::NewUrlPerAttempt, &["retry_is_the_same"]),
    (Fault::RetriesRefusals, &["no_retry_after_4xx", "refusal_is_told"]),
    (Fault::NoResultOfRefusals, &["refusal_is_told"]),
    (Fault::SwapsResults, &["parallel_calls"]),
];

const IDS: &Table = &[
    (Fault::ReusesCallIds, &["repeated_call_id"]),
    (Fault::UsesIdsOfTheModel, &["call_id_form", "call_ids_across_threads"]),
    (Fault::IdsPerThread, &["call_ids_across_threads"]),
    (Fault::IdsPerSession, &["call_ids_across_threads"]),
    (Fault::NoCallId, &["call_id_of_the_model"]),
];

const CALLBACKS: &Table = &[
    (Fault::CountsDuplicates, &["duplicate_result", "crash_and_a_duplicate"]),
    (Fault::ComparesHalfTheToken, &["forged_url"]),
    (Fault::UrlFromIds, &["unguessable_url"]),
    (Fault::IgnoresIdsInBodies, &["mismatched_result", "mismatched_result_unheard"]),
    (Fault::AcceptsInvalidCallbacks, &["invalid_callback"]),
    (Fault::AcceptsAnyContentType, &["callback_not_json"]),
    (Fault::FailsAtHostileBodies, &["hostile_callback"]),
    (Fault::InvokesAfterSignIn, &["sign_in"]),
    (Fault::DropsChoices, &["user_choice"]),
    (Fault::ViewsWake, &["view_update"]),
    (Fault::RefusesLateViews, &["view_after_result"]),
    (Fault::DropsLateViews, &["view_after_result"]),
    (Fault::Answers202, &["result", "view_after_result", "event_in_its_thread"]),
];

const EVENTS: &Table = &[
    (Fault::EventsAsUserMessages, &["event_is_a_synthetic_call"]),
    (Fault::EventsAsSecondResults, &["subscription_has_one_result", "prompts_are_valid"]),
    (Fault::AllEventsInline, &["event_in_a_child", "event_defaults", "thread_ancestors"]),
    (Fault::NoInlineEvents, &["event_in_its_thread", "events_behind_a_call", "events_behind_a_question"]),
    (Fault::ChildrenInheritNothing, &["event_in_a_child"]),
    (Fault::NoAncestors, &["thread_ancestors"]),
    (Fault::DropsEventsBehindCalls, &["events_behind_a_call", "crash_after_an_event"]),
    (Fault::DropsEventsBehindQuestions, &["events_behind_a_question"]),
    (Fault::EventsBetweenCallsAndResults, &["prompts_are_valid"]),
    (Fault::MixesConversations, &["conversations_are_apart"]),
    (
        Fault::IgnoresConfirmations,
        &[
            "call_ids_across_threads",
            "subscription_confirmed",
            "event_is_a_synthetic_call",
            "subscription_has_one_result",
            "event_in_its_thread",
            "event_in_a_child",
            "event_defaults",
            "thread_ancestors",
            "events_behind_a_call",
            "events_behind_a_question",
            "final_event",
            "cancel_subscription_told",
            "cancel_subscription_at_once",
            "cancel_subscription_foreign",
            "crash_after_an_event",
        ],
    ),
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
    (Fault::ClosingCancels, &["closing_cancels_nothing", "closing_cancels_open_calls"]),
];

const CLOSINGS: &Table = &[
    (
        Fault::NotifiesOnlyUsedServers,
        &["closing_told_to_all", "closing_told_together", "closing_told_despite_failures"],
    ),
    (Fault::ClosingWaits, &["closing_waits_for_nobody"]),
    (Fault::ClosingOneByOne, &["closing_told_together"]),
    (Fault::RetriesClosing, &["closing_told_once"]),
    (Fault::ClosingStopsAtFailure, &["closing_told_despite_failures"]),
    (Fault::NotifiesInPlainText, &["closing_told", "cancelling_told"]),
    (Fault::ClosingLeavesCalls, &["closing_cancels_open_calls"]),
    (Fault::CancelsBeforeClosing, &["closing_told_before_cancellations"]),
];

const CANCELLATIONS: &Table = &[
    (
        Fault::CancelsOnlyAtUsedServer,
        &[
            "cancel_subscription_told",
            "cancelling_told_to_all",
            "cancelling_told_together",
            "cancelling_told_despite_failures",
        ],
    ),
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
    (
        Fault::ForgetsAtRestart,
        &[
            "crash_in_a_call",
            "crash_after_a_result",
            "crash_after_an_event",
            "crash_after_a_message",
            "crash_in_a_question",
            "crash_in_a_retry",
            "crash_and_a_duplicate",
        ],
    ),
    (Fault::AnswersBeforeStoring, &["crash_after_a_result"]),
    (Fault::ForgetsDuplicatesAtRestart, &["crash_and_a_duplicate"]),
    (Fault::ForgetsQuestionsAtRestart, &["crash_in_a_question"]),
    (Fault::NewUrlAfterRestart, &["crash_in_a_retry"]),
];

const ALL: &[&Table] = &[
    TOOLSETS_AND_INVOCATIONS,
    ATTEMPTS,
    IDS,
    CALLBACKS,
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
async fn faults_in_callbacks_are_found() {
    expect_failures(CALLBACKS).await;
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
    let report = checker.run("toy", User::Command(say), None, &|_| {}).await.unwrap();
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
    let error = checker.run("nobody", api, None, &|_| {}).await.unwrap_err().to_string();
    assert!(error.contains("did not reach the model") && error.contains("could not connect"), "{error}");
}
