//! One test suite for every database, written against [`Store`] only. [`suite!`] generates its tests for an
//! implementation.
//!
//! A test is a function that takes an empty [`Database`]. Tests that are specific to an implementation are in its
//! folder.

pub(crate) mod alerts;
pub(crate) mod apply;
pub(crate) mod damage;
pub(crate) mod deletion;
pub(crate) mod events;
pub(crate) mod fixture;
pub(crate) mod history;
pub(crate) mod idempotency;
pub(crate) mod listings;
pub(crate) mod page;
pub(crate) mod records;
pub(crate) mod steps;
pub(crate) mod timers;
pub(crate) mod tokens;
pub(crate) mod transfer;
pub(crate) mod work;

use std::sync::Arc;

use rap_protocol::ThreadId;

use super::{OnCommit, StepSettings, Store};
use crate::world::Clock;

/// A database of an implementation. It is empty at first.
pub(crate) trait Database: Send + Sync {
    /// Opens the database. An earlier store on it must have been closed.
    fn open(&self, rules: StepSettings, clock: Arc<dyn Clock>, on_commit: OnCommit) -> Arc<dyn Store>;

    /// Makes the stored head of a thread unreadable.
    fn corrupt_head(&self, thread: &ThreadId);

    /// Runs a statement in the SQL of the database.
    fn execute(&self, sqlite: &str, postgres: &str);

    /// Returns the setting that names the database.
    fn setting(&self) -> crate::settings::Database;

    /// Returns the number of rows of each table.
    fn row_counts(&self) -> std::collections::BTreeMap<String, i64> {
        panic!("no test counts the rows of this database")
    }
}

/// Generates the tests of the suite from a function that returns a new [`Database`].
macro_rules! suite {
    ($database:path) => {
        $crate::store::suite::tests! { $database;
            apply {
                a_second_message_to_a_thread_sees_the_result_of_the_first
                messages_to_many_threads_are_applied_together
                more_messages_than_one_batch_holds_are_applied_in_order
                a_thread_is_addressed_by_id_key_or_token
                a_token_of_another_incarnation_finds_no_thread
                an_existing_thread_is_not_created_again
                a_fork_inherits_part_of_another_history
                a_fork_of_a_missing_thread_or_to_an_existing_id_is_refused
                a_panicking_step_fails_one_message_and_disables_its_thread
                a_new_thread_whose_first_step_panics_affects_no_other_thread
                spending_is_passed_from_step_to_step
                a_message_between_threads_is_applied_once
                a_message_is_kept_until_its_receiver_has_applied_or_refused_it
                a_message_to_a_missing_thread_is_removed
                a_closed_store_refuses_everything
            }
            damage {
                a_thread_that_was_set_aside_is_failed_until_its_next_step
                a_history_with_damaged_entries_is_shown_but_not_sent_to_a_model
                a_child_of_a_damaged_or_missing_parent_can_be_read
                work_of_a_missing_thread_is_refused
                a_doctor_finds_nothing_in_a_healthy_store
                a_doctor_finds_and_explains_each_kind_of_damage
            }
            idempotency {
                a_repeated_request_gets_the_receipt_of_the_first
                a_request_that_is_repeated_within_a_batch_is_applied_once
                a_key_that_was_used_for_another_request_is_refused
                a_refused_request_does_not_use_up_its_key
                old_idempotency_keys_are_pruned_page_by_page
            }
            steps {
                a_step_is_written_unchanged
                a_child_is_written_with_its_entries
                held_input_is_written_to_the_history_in_order_of_arrival
                waiting_events_become_the_first_entries_of_a_child
                a_dropped_backlog_is_deleted
                a_toolset_is_stored_with_its_step_or_not_at_all
                a_view_replaces_the_previous_one_and_views_are_bounded
                a_page_of_views_ends_at_a_size
                an_approved_call_is_due_from_its_approval
                a_timer_is_written_with_its_step
            }
            events {
                a_repeated_event_is_applied_once_even_after_a_restart
                a_repeated_result_is_applied_once_even_after_a_restart
                event_ids_are_bounded_and_the_oldest_are_dropped
                an_event_id_is_kept_as_long_as_its_subscription
                event_ids_of_an_ended_subscription_are_removed_page_by_page
            }
            history {
                a_child_sees_its_ancestors_up_to_its_spawn_point_only
                a_history_is_the_same_page_by_page
                a_page_is_bounded_in_bytes_and_has_one_entry_at_least
                people_see_the_original_arguments_of_a_synthetic_call
                a_page_ends_if_the_arguments_of_its_synthetic_calls_are_large
                entries_covered_by_a_summary_are_not_read_and_not_deleted
                entries_since_the_last_user_message_are_found
                a_thread_inherits_the_cause_of_its_ancestors
                calls_show_the_display_text_of_their_tools
            }
            listings {
                threads_are_listed_in_order_page_by_page
                every_open_call_is_listed_once
                the_usage_of_a_session_is_that_of_all_its_threads
                questions_are_listed_oldest_first
                subscriptions_are_listed_with_their_waiting_events
                timers_are_listed_by_time
            }
            page {
                threads_are_found_by_a_phrase_in_their_texts
                threads_are_listed_newest_first_and_without_children
                figures_are_added_up_in_parts_of_time
            }
            work {
                new_work_is_found_by_session_in_key_order
                a_page_is_bounded_per_session
                work_in_progress_is_left_out
                retries_are_found_when_they_are_due
                a_session_with_much_new_work_does_not_hide_others
                a_session_with_many_retries_does_not_hide_others
                a_page_reports_that_more_retries_are_due
                retries_in_progress_do_not_hide_others
                each_destination_has_its_own_work
                a_model_request_is_moved_to_another_destination
                work_is_loaded_with_everything_an_attempt_needs
                a_call_keeps_the_callback_base_that_it_was_sent_with
                settled_or_postponed_work_is_not_loaded
                an_unchanged_question_keeps_its_retry_time
                an_acknowledged_call_is_no_longer_due
                a_delivered_answer_is_no_longer_due
                calls_and_subscriptions_are_checked_at_their_server
                a_page_reports_that_more_checks_are_due
            }
            alerts {
                an_alert_is_stored_with_its_step_and_claimed_by_one_attempt
            }
            timers {
                timers_are_due_oldest_first
                late_timeouts_have_a_grace_period_and_sleeps_do_not
                sessions_can_be_excluded_from_timers_and_messages
                postponed_timers_and_messages_are_not_due
                a_timer_that_has_moved_is_not_postponed
                the_next_due_time_is_the_earliest_of_all_kinds
                no_pause_lasts_longer_than_its_kind_ever_does
                messages_are_due_in_sending_order
            }
            tokens {
                a_token_is_found_by_its_digest_until_it_is_revoked
                tokens_are_listed_page_by_page_and_their_number_is_bounded
                every_listing_of_a_user_has_the_rows_of_that_user_only
                a_message_of_a_user_reaches_threads_of_that_user_only
                a_key_of_a_release_without_client_tokens_is_recognised
            }
            transfer {
                a_session_moves_to_another_database_and_back
                a_packed_session_is_not_in_use_and_comes_back_unchanged
                a_parcel_that_has_left_goes_back_into_use_only_if_it_is_reclaimed
                a_damaged_session_is_not_packed
                what_forks_inherit_moves_with_them_and_stays_with_them
                an_import_is_repeated_without_harm_and_replaces_nothing
                root_threads_are_listed_in_order
                the_place_of_a_moved_thread_is_kept_while_callbacks_arrive
            }
            deletion {
                a_deleted_session_is_hidden_at_once_and_leaves_no_row
                only_a_closed_session_is_deleted
                a_deleted_session_is_not_exported
                forks_keep_their_history_when_their_source_is_deleted
                a_large_session_is_deleted_in_several_batches
                sessions_expire_when_they_have_been_closed_for_a_time
                a_fork_moves_while_its_source_is_being_deleted
                a_fork_comes_back_while_the_threads_of_its_source_are_deleted
                a_session_that_cannot_be_deleted_does_not_block_others
                a_session_with_a_damaged_thread_is_deleted_on_request_only
                damaged_entries_stay_as_they_are_in_forks_of_a_deleted_session
            }
            records {
                a_session_keeps_its_toolset_when_a_discovery_fails
                a_stand_in_never_replaces_the_toolset_of_a_session
                the_newest_toolset_of_a_server_is_found
                deliveries_are_listed_newest_first
                attempts_of_a_delivery_are_kept
                a_retried_delivery_ends_with_its_call
                an_invocation_is_redelivered_on_request
                threads_and_work_are_counted
                an_unreadable_thread_does_not_block_others
                a_store_is_readable_until_it_is_closed
            }
        }
    };
}
pub(crate) use suite;

/// Generates a test for each function.
macro_rules! tests {
    ($database:path; $($area:ident { $($test:ident)* })*) => {
        $(
            mod $area {
                $(
                    #[tokio::test]
                    async fn $test() {
                        $crate::store::suite::$area::$test(Box::new($database())).await;
                    }
                )*
            }
        )*
    };
}
pub(crate) use tests;
