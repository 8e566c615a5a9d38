//! The probes of a runtime: a right one passes them all, and each wrong one is found by the probe that is about it.

#![allow(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod toy;

use std::time::Duration;

use rap_conformance::runtime::{Api, Checker, Host, Pace, Say, User};
use rap_conformance::{Report, Strictness, Verdict};
use tokio::net::TcpListener;
use toy::{Fault, Toy};

/// Long enough for a small runtime on a busy machine.
const PACE: Pace = Pace { patience: Duration::from_secs(6), settle: Duration::from_millis(400) };

async fn checker() -> Checker {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    Checker::listen(listener, None, PACE).await.unwrap()
}

/// Checks the small runtime.
async fn check(fault: Option<Fault>) -> Report {
    let checker = checker().await;
    let toy = Toy::start(&checker.values(), fault).await;
    let api = User::Api(Api::new(toy.url().parse().unwrap(), None));
    let host: &dyn Host = &toy;
    checker.run("toy", api, Some(host), &|_| {}).await.unwrap()
}

fn failed(report: &Report) -> Vec<&'static str> {
    let failed = report.outcomes().iter().filter(|outcome| matches!(outcome.verdict, Verdict::Fail { .. }));
    failed.map(|outcome| outcome.probe.name).collect()
}

/// The probes that fail, and no others.
async fn bites(fault: Fault, expected: &[&str]) {
    let report = check(Some(fault)).await;
    let failed = failed(&report);
    assert_eq!(failed, expected, "{fault:?}\n{}", report.to_table(Strictness::Strict, None));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_runtime_passes_every_probe() {
    let report = check(None).await;
    let table = report.to_table(Strictness::Strict, None);
    assert!(report.outcomes().iter().all(|outcome| outcome.verdict == Verdict::Pass), "{table}");
    assert!(report.is_good(Strictness::Strict), "{table}");
}

macro_rules! wrong_runtimes {
    ($($test:ident: $fault:ident => [$($probe:literal),+];)*) => {
        $(#[tokio::test(flavor = "multi_thread")]
        async fn $test() {
            bites(Fault::$fault, &[$($probe),+]).await;
        })*
    };
}

wrong_runtimes! {
    polls_discovery_is_found: PollsDiscovery => ["discovery_once"];
    keeps_tools_for_ever_is_found: KeepsToolsForEver => ["discovery_once", "toolset_of_a_new_session", "toolset_missing"];
    does_not_refresh_is_found: DoesNotRefresh => ["toolset_after_a_conflict"];
    silent_about_toolsets_is_found: SilentAboutToolsets => ["toolset_missing"];
    needs_discovery_for_calls_is_found: NeedsDiscoveryForCalls => ["discovery_once", "toolset_from_the_cache"];
    no_version_is_found: NoVersion => ["toolset_after_a_conflict", "invocation_fields"];
    no_token_with_notifications_is_found: NoTokenWithNotifications => ["invocation_authenticated"];
    reads_acknowledgements_is_found: ReadsAcknowledgements => ["acknowledgement_body"];
    gives_up_on_server_errors_is_found: GivesUpOnServerErrors => ["retry_server_errors", "retry_backoff", "retry_is_the_same", "crash_in_a_retry"];
    gives_up_when_unreachable_is_found: GivesUpWhenUnreachable => ["retry_unreachable"];
    steady_retries_is_found: SteadyRetries => ["retry_backoff"];
    new_url_per_attempt_is_found: NewUrlPerAttempt => ["retry_is_the_same", "crash_in_a_retry"];
    retries_refusals_is_found: RetriesRefusals => ["no_retry_after_4xx", "refusal_is_told"];
    no_result_of_refusals_is_found: NoResultOfRefusals => ["refusal_is_told"];
    asks_early_is_found: AsksEarly => ["parallel_calls", "crash_after_a_result"];
    uses_ids_twice_is_found: UsesIdsTwice => ["repeated_call_id"];
    counts_duplicates_is_found: CountsDuplicates => ["duplicate_result", "crash_and_a_duplicate"];
    compares_half_the_token_is_found: ComparesHalfTheToken => ["forged_url"];
    url_from_ids_is_found: UrlFromIds => ["unguessable_url"];
    ignores_ids_in_bodies_is_found: IgnoresIdsInBodies => ["mismatched_result"];
    takes_invalid_is_found: TakesInvalid => ["invalid_callback"];
    takes_any_content_type_is_found: TakesAnyContentType => ["callback_not_json"];
    fails_at_hostile_is_found: FailsAtHostile => ["hostile_callback"];
    invokes_after_sign_in_is_found: InvokesAfterSignIn => ["sign_in"];
    keeps_choices_is_found: KeepsChoices => ["user_choice"];
    views_wake_is_found: ViewsWake => ["view_update"];
    plain_events_is_found: PlainEvents => ["event_is_a_synthetic_call"];
    events_as_second_results_is_found: EventsAsSecondResults => ["subscription_has_one_result", "prompts_are_valid"];
    all_events_inline_is_found: AllEventsInline => ["event_in_a_child", "event_defaults", "thread_ancestors"];
    no_event_inline_is_found: NoEventInline => ["event_in_its_thread"];
    children_know_nothing_is_found: ChildrenKnowNothing => ["event_in_a_child"];
    no_ancestors_is_found: NoAncestors => ["thread_ancestors"];
    drops_events_behind_calls_is_found: DropsEventsBehindCalls => ["events_behind_a_call", "crash_after_an_event"];
    drops_events_behind_questions_is_found: DropsEventsBehindQuestions => ["events_behind_a_question"];
    events_between_is_found: EventsBetween => ["prompts_are_valid"];
    events_after_final_is_found: EventsAfterFinal => ["final_event"];
    events_of_any_call_is_found: EventsOfAnyCall => ["event_of_no_subscription"];
    cancel_not_offered_is_found: CancelNotOffered => ["cancel_subscription_offered"];
    cancels_quietly_is_found: CancelsQuietly => ["cancel_subscription_told"];
    cancel_answers_later_is_found: CancelAnswersLater => ["cancel_subscription_at_once"];
    cancel_leaves_active_is_found: CancelLeavesActive => ["cancel_subscription_ends_it"];
    cancels_unknown_is_found: CancelsUnknown => ["cancel_subscription_unknown"];
    cancels_foreign_is_found: CancelsForeign => ["cancel_subscription_foreign"];
    listens_when_closed_is_found: ListensWhenClosed => ["event_after_closing"];
    closing_cancels_is_found: ClosingCancels => ["closing_cancels_nothing"];
    tells_only_the_used_is_found: TellsOnlyTheUsed => ["closing_told", "closing_told_together", "closing_told_despite_failures"];
    closing_waits_is_found: ClosingWaits => ["closing_waits_for_nobody"];
    closing_one_by_one_is_found: ClosingOneByOne => ["closing_told_together"];
    retries_closing_is_found: RetriesClosing => ["closing_told_once"];
    closing_stops_at_failure_is_found: ClosingStopsAtFailure => ["closing_told_despite_failures"];
    cancels_only_at_the_used_is_found: CancelsOnlyAtTheUsed => ["cancel_subscription_told", "cancelling_told", "cancelling_told_together", "cancelling_told_despite_failures"];
    cancelling_waits_is_found: CancellingWaits => ["cancelling_waits_for_nobody"];
    cancelling_one_by_one_is_found: CancellingOneByOne => ["cancelling_told_together"];
    retries_cancelling_is_found: RetriesCancelling => ["cancelling_told_once"];
    cancelling_stops_at_failure_is_found: CancellingStopsAtFailure => ["cancelling_told_despite_failures"];
    takes_late_results_is_found: TakesLateResults => ["late_result"];
    deaf_while_calls_are_open_is_found: DeafWhileCallsAreOpen => ["responsive"];
    loses_messages_is_found: LosesMessages => ["model_failure"];
    mixes_conversations_is_found: MixesConversations => ["conversations_are_apart"];
    forgets_at_restart_is_found: ForgetsAtRestart => ["crash_in_a_call", "crash_after_a_result", "crash_after_an_event", "crash_after_a_message", "crash_in_a_question", "crash_in_a_retry", "crash_and_a_duplicate"];
    answers_before_storing_is_found: AnswersBeforeStoring => ["crash_after_a_result"];
    forgets_duplicates_at_restart_is_found: ForgetsDuplicatesAtRestart => ["crash_and_a_duplicate"];
    forgets_questions_at_restart_is_found: ForgetsQuestionsAtRestart => ["crash_after_a_message", "crash_in_a_question"];
    new_url_after_restart_is_found: NewUrlAfterRestart => ["crash_in_a_retry"];
}
