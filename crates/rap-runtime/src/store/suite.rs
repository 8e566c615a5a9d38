//! One suite for every database, written against [`Store`] alone. [`suite!`] makes its tests for an implementation.
//!
//! A test is a function that is given an empty [`Database`]. What is particular to an implementation is tested beside it.

pub(crate) mod apply;
pub(crate) mod events;
pub(crate) mod fixture;
pub(crate) mod history;
pub(crate) mod listings;
pub(crate) mod once;
pub(crate) mod records;
pub(crate) mod steps;
pub(crate) mod timers;
pub(crate) mod work;

use std::sync::Arc;

use rap_protocol::ThreadId;

use super::{OnCommit, Rules, Store};
use crate::world::Clock;

/// A database of an implementation, which is empty at first.
pub(crate) trait Database: Send + Sync {
    /// Opens it. An earlier store on it was closed.
    fn open(&self, rules: Rules, clock: Arc<dyn Clock>, on_commit: OnCommit) -> Arc<dyn Store>;

    /// Makes the head of a thread unreadable behind the store's back.
    fn spoil(&self, thread: &ThreadId);
}

/// Makes the tests of the suite from a function that returns a new [`Database`].
macro_rules! suite {
    ($database:path) => {
        $crate::store::suite::tests! { $database;
            apply {
                a_second_message_of_a_thread_sees_what_the_first_one_did
                messages_of_many_threads_are_applied_together
                more_messages_than_one_batch_holds_are_applied_in_order
                a_thread_is_named_by_its_id_its_key_or_its_token
                a_thread_of_another_incarnation_is_another_thread
                a_thread_that_exists_is_not_made_again
                a_fork_begins_with_a_part_of_another_history
                a_fork_of_no_thread_or_to_an_id_in_use_is_refused
                a_step_that_panics_fails_one_message_and_sets_its_thread_aside
                a_new_thread_whose_first_step_panics_harms_no_other
                spending_is_passed_from_step_to_step
                a_message_between_threads_is_applied_once
                a_message_is_kept_until_its_receiver_has_taken_or_refused_it
                a_message_to_a_thread_that_is_gone_is_removed
                a_closed_store_refuses_everything
            }
            once {
                a_repeated_request_has_the_receipt_of_the_first
                a_request_that_is_repeated_within_a_batch_counts_once
                a_key_that_was_used_for_another_request_is_refused
                a_refused_request_does_not_use_up_its_key
                keys_are_forgotten_page_by_page
            }
            steps {
                a_step_is_written_as_it_is
                a_child_is_written_with_its_entries
                held_input_becomes_history_in_the_order_in_which_it_came
                events_that_waited_become_the_first_entries_of_a_child
                a_dropped_backlog_is_gone
                a_toolset_is_stored_with_its_step_or_not_at_all
                views_replace_each_other_and_are_bounded
                an_approved_call_is_due_from_then_on
                a_timer_is_moved_with_the_step_that_moves_it
            }
            events {
                an_event_that_comes_twice_is_taken_once_also_after_a_restart
                a_result_that_comes_twice_is_taken_once_also_after_a_restart
                event_ids_are_bounded_and_the_oldest_are_forgotten
                an_event_id_is_kept_as_long_as_its_subscription
                event_ids_of_an_ended_subscription_are_removed_page_by_page
            }
            history {
                a_child_sees_its_ancestors_up_to_its_birth_and_nothing_after_it
                a_history_is_the_same_page_by_page
                a_page_is_bounded_in_bytes_and_has_one_entry_at_least
                people_see_the_arguments_of_the_call_that_a_synthetic_one_repeats
                what_a_summary_covers_is_not_read_and_nothing_is_deleted
                entries_since_the_last_message_of_a_user
                the_cause_of_a_thread_is_that_of_its_ancestors
                calls_show_what_their_tools_say
            }
            listings {
                threads_are_listed_in_order_page_by_page
                calls_are_listed_once_each_whatever_became_of_them
                questions_are_listed_oldest_first
                subscriptions_are_listed_with_what_waits
                timers_are_listed_by_time
            }
            work {
                new_work_is_found_by_session_in_the_order_of_keys
                a_page_has_a_bound_for_each_session
                work_in_progress_is_left_out
                work_to_be_tried_again_is_found_when_it_is_due
                a_session_with_much_new_work_hides_no_other
                a_session_with_many_retries_hides_no_other
                retries_beyond_a_page_are_announced
                retries_in_progress_hide_no_other
                each_destination_has_its_own_work
                work_is_loaded_with_everything_an_attempt_needs
                work_that_is_settled_or_put_off_is_not_loaded
                a_question_keeps_its_retry_time_while_it_is_the_same
                an_acknowledged_call_is_not_due_any_more
                a_delivered_answer_is_not_due_any_more
                calls_and_subscriptions_are_checked_at_their_server
                checks_beyond_a_page_are_announced
            }
            timers {
                timers_are_due_oldest_first
                late_timeouts_have_a_grace_and_sleeps_have_not
                sessions_can_be_left_out_of_timers_and_messages
                timers_and_messages_that_are_put_off_wait
                a_timer_that_was_moved_meanwhile_is_not_put_off
                the_next_due_time_is_the_earliest_of_all
                messages_are_due_in_the_order_in_which_they_were_sent
            }
            records {
                a_session_keeps_its_toolset_when_a_discovery_fails
                the_newest_toolset_of_a_server_is_found
                deliveries_are_listed_newest_first
                a_delivery_that_was_retried_ends_with_its_call
                an_invocation_is_delivered_once_more_on_request
                threads_and_work_are_counted
                a_thread_that_cannot_be_read_stops_no_other
                the_store_says_that_it_is_readable
            }
        }
    };
}
pub(crate) use suite;

/// A test for each function.
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
