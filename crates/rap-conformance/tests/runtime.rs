//! The probes of a runtime: a right one passes them all, and each wrong one is found by the probe that is about it.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod toy;

use std::time::Duration;

use rap_conformance::runtime::{self, Api, Checker, Host, Pace, Say, User};
use rap_conformance::{Report, Strictness, Verdict};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use toy::{Fault, Ids, Toy};

/// Long enough for a small runtime on a busy machine.
const PACE: Pace = Pace { patience: Duration::from_secs(12), settle: Duration::from_millis(1200) };
/// How many runtimes are checked at a time: they wait most of the time, but not all of it.
static PLACES: Semaphore = Semaphore::const_new(7);

async fn checker(pace: Pace) -> Checker {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    Checker::listen(listener, None, pace).await.unwrap()
}

/// Checks the small runtime.
async fn check(ids: Ids, fault: Option<Fault>) -> Report {
    let _place = PLACES.acquire().await.unwrap();
    let checker = checker(PACE).await;
    let toy = Toy::start(&checker.values(), ids, fault).await;
    let api = User::Api(Api::new(toy.url().parse().unwrap(), None));
    let host: &dyn Host = &toy;
    checker.run("toy", api, Some(host), &|_| {}).await.unwrap()
}

fn failed(report: &Report) -> Vec<&'static str> {
    let failed = report.outcomes().iter().filter(|outcome| matches!(outcome.verdict, Verdict::Fail { .. }));
    failed.map(|outcome| outcome.probe.name).collect()
}

/// How often a wrong runtime is looked at again by itself. Where many are checked at the same time on a slow machine,
/// a probe of something else can run out of patience, or meet the fault by chance.
const AGAIN: usize = 2;

/// Each wrong runtime fails these probes, and no others. They are checked at the same time.
async fn bite(table: &Table) {
    let checked = table.iter().map(|(fault, _)| check(Ids::Own, Some(*fault)));
    let reports = futures_util::future::join_all(checked).await;
    let mut wrong = String::new();
    for ((fault, expected), mut report) in table.iter().zip(reports) {
        for _ in 0..AGAIN {
            if failed(&report) != *expected {
                report = check(Ids::Own, Some(*fault)).await;
            }
        }
        let failed = failed(&report);
        if failed != *expected {
            let told = report.to_table(Strictness::Strict, None);
            wrong.push_str(&format!("{fault:?}: {failed:?} failed and not {expected:?}\n{told}\n"));
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Every probe passes.
async fn pass(ids: Ids) {
    let report = check(ids, None).await;
    let table = report.to_table(Strictness::Strict, None);
    assert!(report.outcomes().iter().all(|outcome| outcome.verdict == Verdict::Pass), "{table}");
    assert!(report.is_good(Strictness::Strict), "{table}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_runtime_passes_every_probe() {
    pass(Ids::Own).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_whose_prompts_have_other_ids_than_the_wire_passes_every_probe() {
    pass(Ids::ShortInPrompts).await;
}

/// What each wrong runtime fails.
type Table = [(Fault, &'static [&'static str])];

const TOOLSETS_AND_INVOCATIONS: &Table = &[
    (Fault::PollsDiscovery, &["discovery_once"]),
    (
        Fault::KeepsToolsForEver,
        &["discovery_once", "toolset_of_a_new_session", "toolset_after_a_conflict", "toolset_missing"],
    ),
    (Fault::DoesNotRefresh, &["toolset_after_a_conflict"]),
    (Fault::SilentAboutToolsets, &["toolset_missing"]),
    (Fault::NeedsDiscoveryForCalls, &["discovery_once", "toolset_from_the_cache"]),
    (Fault::NoVersion, &["invocation_version"]),
    (Fault::NoTokenWithNotifications, &["invocation_authenticated"]),
    (Fault::ReadsAcknowledgements, &["acknowledgement_body"]),
    (Fault::SendsPlainText, &["invocation_fields"]),
];

const ATTEMPTS: &Table = &[
    (Fault::GivesUpOnServerErrors, &["retry_server_errors", "crash_in_a_retry"]),
    (Fault::GivesUpWhenUnreachable, &["retry_unreachable"]),
    (Fault::SteadyRetries, &["retry_backoff"]),
    (Fault::NewUrlPerAttempt, &["retry_is_the_same"]),
    (Fault::RetriesRefusals, &["no_retry_after_4xx", "refusal_is_told"]),
    (Fault::NoResultOfRefusals, &["refusal_is_told"]),
    (Fault::SwapsResults, &["parallel_calls"]),
];

const IDS: &Table = &[
    (Fault::UsesIdsTwice, &["repeated_call_id"]),
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
    (Fault::TakesInvalid, &["invalid_callback"]),
    (Fault::TakesAnyContentType, &["callback_not_json"]),
    (Fault::FailsAtHostile, &["hostile_callback"]),
    (Fault::InvokesAfterSignIn, &["sign_in"]),
    (Fault::KeepsChoices, &["user_choice"]),
    (Fault::ViewsWake, &["view_update"]),
    (Fault::RefusesLateViews, &["view_after_result"]),
    (Fault::DropsLateViews, &["view_after_result"]),
    (Fault::Answers202, &["result", "view_after_result", "event_in_its_thread"]),
];

const EVENTS: &Table = &[
    (Fault::PlainEvents, &["event_is_a_synthetic_call"]),
    (Fault::EventsAsSecondResults, &["subscription_has_one_result", "prompts_are_valid"]),
    (Fault::AllEventsInline, &["event_in_a_child", "event_defaults", "thread_ancestors"]),
    (Fault::NoEventInline, &["event_in_its_thread", "events_behind_a_call", "events_behind_a_question"]),
    (Fault::ChildrenKnowNothing, &["event_in_a_child"]),
    (Fault::NoAncestors, &["thread_ancestors"]),
    (Fault::DropsEventsBehindCalls, &["events_behind_a_call", "crash_after_an_event"]),
    (Fault::DropsEventsBehindQuestions, &["events_behind_a_question"]),
    (Fault::EventsBetween, &["prompts_are_valid"]),
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
    (Fault::CancelsQuietly, &["cancel_subscription_told"]),
    (Fault::CancelAnswersLater, &["cancel_subscription_at_once"]),
    (Fault::CancelLeavesActive, &["cancel_subscription_ends_it"]),
    (Fault::CancelsUnknown, &["cancel_subscription_unknown"]),
    (Fault::CancelsForeign, &["cancel_subscription_foreign"]),
    (Fault::ListensWhenClosed, &["event_after_closing"]),
    (Fault::ClosingCancels, &["closing_cancels_nothing", "closing_cancels_open_calls"]),
];

const CLOSINGS: &Table = &[
    (
        Fault::TellsOnlyTheUsed,
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
        Fault::CancelsOnlyAtTheUsed,
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
    (Fault::TakesLateResults, &["late_result_ignored"]),
];

const TURNS_AND_RESTARTS: &Table = &[
    (Fault::DeafWhileCallsAreOpen, &["responsive"]),
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
async fn wrong_toolsets_and_invocations_are_found() {
    bite(TOOLSETS_AND_INVOCATIONS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_attempts_are_found() {
    bite(ATTEMPTS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_ids_are_found() {
    bite(IDS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_callbacks_are_found() {
    bite(CALLBACKS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_events_are_found() {
    bite(EVENTS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_ends_of_subscriptions_are_found() {
    bite(ENDS_OF_SUBSCRIPTIONS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_closings_are_found() {
    bite(CLOSINGS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_cancellations_are_found() {
    bite(CANCELLATIONS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_turns_and_restarts_are_found() {
    bite(TURNS_AND_RESTARTS).await;
}

#[test]
fn every_probe_finds_a_wrong_runtime() {
    let found: Vec<&str> = ALL.iter().copied().flatten().flat_map(|(_, probes)| *probes).copied().collect();
    // Whether there is a limit that nobody has reached is not to be seen.
    let can_fail = runtime::probes().filter(|probe| probe.name != "subscription_limit");
    let idle: Vec<&str> = can_fail.map(|probe| probe.name).filter(|name| !found.contains(name)).collect();
    assert_eq!(idle, [""; 0]);
}

/// A user who can only say something: what takes more is not observable, and nothing else is wrong.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_only_speaks_is_enough_for_what_it_can_show() {
    // Each word takes a process.
    let checker = checker(Pace { patience: Duration::from_secs(60), ..PACE }).await;
    let toy = Toy::start(&checker.values(), Ids::Own, None).await;
    let script = "import json, sys, urllib.request as r; url, thread, text = sys.argv[1:]; \
                  body = json.dumps({'text': text}).encode(); r.urlopen(url + '/say/' + thread, body)";
    let say = Say::new(&format!("python3 -c \"{script}\" {} {{thread}} {{text}}", toy.url())).unwrap();
    let report = checker.run("toy", User::Command(say), None, &|_| {}).await.unwrap();
    let table = report.to_table(Strictness::Strict, None);
    assert_eq!(failed(&report), [""; 0], "{table}");
    let hidden = |name: &str| {
        let outcome = report.outcomes().iter().find(|outcome| outcome.probe.name == name).unwrap();
        matches!(&outcome.verdict, Verdict::NotObservable { .. })
    };
    for name in ["closing_told", "cancelling_told", "late_result", "user_choice", "crash_in_a_call"] {
        assert!(hidden(name), "{name}\n{table}");
    }
    for name in ["invocation_fields", "duplicate_result", "event_in_a_child", "cancel_subscription_told"] {
        assert!(!hidden(name), "{name}\n{table}");
    }
}

/// Nobody is there.
#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_can_not_be_spoken_to_is_an_error_and_no_report() {
    let checker = checker(PACE).await;
    let api = User::Api(Api::new("http://127.0.0.1:1".parse().unwrap(), None));
    let error = checker.run("nobody", api, None, &|_| {}).await.unwrap_err().to_string();
    assert!(error.contains("did not reach the model") && error.contains("could not connect"), "{error}");
}
