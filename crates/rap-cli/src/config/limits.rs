//! Every bound of the runtime: its name, its type, its default and what it may be, in one table.

use std::time::Duration;

use rap_protocol::limits::{ANCESTORS, BODY_BYTES};

use super::section::Section;
use super::value::{Zero, count, duration, optional_count, optional_duration, size};

/// The bounds of the runtime as a whole. All others are bounds of a thread, which an agent can have for itself.
pub(super) const OF_ALL: [&str; 13] = [
    "lost_after",
    "invoke_retry_for",
    "model_attempts",
    "body",
    "view_bytes",
    "invoke_ack_timeout",
    "invoke_concurrency",
    "model_concurrency",
    "model_timeout",
    "model_idle_timeout",
    "discovery_timeout",
    "callback_token_lifetime",
    "event_marks_for",
];

macro_rules! limits {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $default:expr, $read:expr;)*) => {
        /// The bounds of the runtime.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct Limits {
            $($(#[$doc])* pub $name: $type,)*
        }

        impl Default for Limits {
            fn default() -> Self {
                Limits { $($name: $default,)* }
            }
        }

        impl Limits {
            /// A bound that is not set, or wrong, is as usual.
            pub(super) fn read(section: &mut Section<'_>, usual: Limits) -> Self {
                Limits { $($name: section.read(stringify!($name), $read).unwrap_or(usual.$name),)* }
            }
        }
    };
}

limits! {
    /// How many subscriptions of one thread are active.
    subscriptions_per_thread: u32 = 32, count(0..=u32::MAX);
    /// How long a call may take; then it has an error for a result.
    call_timeout: Option<Duration> = None, optional_duration;
    /// How long a call waits for somebody to allow it.
    approval_within: Duration = Duration::from_secs(24 * 3600), duration(Zero::Refused);
    /// For how long an invocation is tried again.
    invoke_retry_for: Duration = Duration::from_mins(10), duration(Zero::Allowed);
    /// How often a model is asked the same question before the turn fails.
    model_attempts: u32 = 5, count(1..=u32::MAX);
    /// How many messages and events one thread holds while it is busy.
    held_per_thread: u32 = 1_000, count(1..=u32::MAX);
    /// How large they may be together; the model reads them all at once.
    held_bytes_per_thread: usize = 16 * 1024 * 1024, size(1..=1 << 30);
    /// How long an event waits for open calls.
    hold_max: Duration = Duration::from_secs(60), duration(Zero::Allowed);
    /// How often a model is asked without anything new from outside.
    turns_per_wake: u32 = 50, count(1..=u32::MAX);
    /// How often the model is asked in one session, a thread with all that come of it, in an hour.
    turns_per_hour: Option<u32> = None, optional_count;
    /// How many tokens the answers in one session cost in an hour.
    tokens_per_hour: Option<u32> = None, optional_count;
    /// How often something other than a person wakes a thread of one session in an hour; then the session holds its input until the hour is over, or it is resumed.
    wakes_per_hour: Option<u32> = Some(1_000), optional_count;
    /// How often the model is asked in one session in all.
    turns_in_total: Option<u32> = None, optional_count;
    /// How many tokens the answers in one session cost in all.
    tokens_in_total: Option<u32> = None, optional_count;
    /// How often something other than a person wakes a thread of one session in all.
    wakes_in_total: Option<u32> = None, optional_count;
    /// How large the body of a request may be, in bytes.
    body: usize = BODY_BYTES, size(1024..=BODY_BYTES as u64);
    /// How many calls of one thread are open.
    open_calls_per_thread: u32 = 128, count(0..=u32::MAX);
    /// How many questions of one thread wait for a person.
    questions_per_thread: u32 = 64, count(0..=u32::MAX);
    /// How many children of one thread are not closed; those for events that are not at work do not count.
    children_per_thread: u32 = 64, count(0..=u32::MAX);
    /// How many children of one subscription are at work on its events; more events wait for one of them to finish.
    event_children_per_subscription: u32 = 4, count(1..=u32::MAX);
    /// How many waiting events of a subscription one child takes; 1 makes a thread for each event.
    events_per_child: u32 = 100, count(1..=u32::MAX);
    /// How deep threads nest.
    depth: u32 = 8, count(0..=ANCESTORS as u32);
    /// How many views one thread keeps.
    views_per_thread: u32 = 64, count(0..=u32::MAX);
    /// How large one view may be, in bytes.
    view_bytes: usize = 256 * 1024, size(1..=BODY_BYTES as u64);
    /// How long a tool server may take to accept an invocation.
    invoke_ack_timeout: Duration = Duration::from_secs(10), duration(Zero::Refused);
    /// How long ago a call was accepted when its tool server is first asked whether anybody still works on it.
    lost_after: Duration = Duration::from_mins(15), duration(Zero::Refused);
    /// How many invocations to one tool server are under way at the same time.
    invoke_concurrency: u32 = 256, count(1..=u32::MAX);
    /// How many questions to one model server are under way at the same time.
    model_concurrency: u32 = 64, count(1..=u32::MAX);
    /// How long a model may take to answer one question.
    model_timeout: Duration = Duration::from_mins(10), duration(Zero::Refused);
    /// How long a model may be silent within an answer.
    model_idle_timeout: Duration = Duration::from_mins(2), duration(Zero::Refused);
    /// For how long a thread whose turn failed asks again by itself.
    failed_retry_for: Duration = Duration::from_hours(24), duration(Zero::Allowed);
    /// How long a tool server may take to tell its tools.
    discovery_timeout: Duration = Duration::from_secs(5), duration(Zero::Refused);
    /// How long a callback URL is good for.
    callback_token_lifetime: Option<Duration> = None, optional_duration;
    /// For how long a request with an Idempotency-Key is remembered, so that a repeat is recognised; event ids are remembered while their subscription is active.
    event_marks_for: Duration = Duration::from_hours(7 * 24), duration(Zero::Refused);
}
