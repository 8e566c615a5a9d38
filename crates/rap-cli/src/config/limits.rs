//! All limits in one table: name, type, default and valid values.

use std::time::Duration;

use rap_protocol::limits::{ANCESTORS, BODY_BYTES};

use super::section::Section;
use super::value::{Zero, count, duration, optional_count, optional_duration, size};

/// Limits of the runtime as a whole. All others are limits of a thread, which `[agent.limits]` can override.
pub(super) const RUNTIME_ONLY: [&str; 13] = [
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
        /// Limits of the runtime and of threads.
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
            /// Reads the limits. A limit that is not set or is invalid keeps its default.
            pub(super) fn read(section: &mut Section<'_>, defaults: Limits) -> Self {
                Limits { $($name: section.read(stringify!($name), $read).unwrap_or(defaults.$name),)* }
            }
        }
    };
}

limits! {
    /// Maximum number of active subscriptions of a thread.
    subscriptions_per_thread: u32 = 32, count(0..=u32::MAX);
    /// Time after which a call without a result gets an error result; `None` for no timeout.
    call_timeout: Option<Duration> = None, optional_duration;
    /// Time within which a person has to approve a call.
    approval_within: Duration = Duration::from_secs(24 * 3600), duration(Zero::Refused);
    /// Time for which a failed invocation is retried.
    invoke_retry_for: Duration = Duration::from_mins(10), duration(Zero::Allowed);
    /// Number of attempts for a model request before the turn fails.
    model_attempts: u32 = 5, count(1..=u32::MAX);
    /// Maximum number of messages and events that a busy thread holds.
    held_per_thread: u32 = 1_000, count(1..=u32::MAX);
    /// Maximum total size of the input that a busy thread holds. The model reads all of it at once.
    held_bytes_per_thread: usize = 16 * 1024 * 1024, size(1..=1 << 30);
    /// Maximum time that an event is held while calls are open.
    hold_max: Duration = Duration::from_secs(60), duration(Zero::Allowed);
    /// Maximum number of model requests in a row without new input from outside.
    turns_per_wake: u32 = 50, count(1..=u32::MAX);
    /// Maximum number of model requests of a session (a root thread and its descendants) in an hour; `None` for no
    /// limit.
    turns_per_hour: Option<u32> = None, optional_count;
    /// Maximum number of tokens that a session uses in an hour; `None` for no limit.
    tokens_per_hour: Option<u32> = None, optional_count;
    /// Maximum number of times in an hour that anything but a person wakes a thread of a session. Beyond it, the
    /// session holds its input until the hour is over or it is resumed.
    wakes_per_hour: Option<u32> = Some(1_000), optional_count;
    /// Maximum number of model requests of a session in total; `None` for no limit.
    turns_in_total: Option<u32> = None, optional_count;
    /// Maximum number of tokens that a session uses in total; `None` for no limit.
    tokens_in_total: Option<u32> = None, optional_count;
    /// Maximum number of times in total that anything but a person wakes a thread of a session; `None` for no limit.
    wakes_in_total: Option<u32> = None, optional_count;
    /// Maximum size of a request body, in bytes.
    body: usize = BODY_BYTES, size(1024..=BODY_BYTES as u64);
    /// Maximum number of open calls of a thread.
    open_calls_per_thread: u32 = 128, count(0..=u32::MAX);
    /// Maximum number of open questions of a thread to people.
    questions_per_thread: u32 = 64, count(0..=u32::MAX);
    /// Maximum number of open children of a thread. Event children count only while they are at work.
    children_per_thread: u32 = 64, count(0..=u32::MAX);
    /// Maximum number of event children of a subscription at work at the same time. Further events wait.
    event_children_per_subscription: u32 = 4, count(1..=u32::MAX);
    /// Maximum number of waiting events that one event child takes; 1 spawns a child for each event.
    events_per_child: u32 = 100, count(1..=u32::MAX);
    /// Maximum nesting depth of threads.
    depth: u32 = 8, count(0..=ANCESTORS as u32);
    /// Maximum number of views of a thread.
    views_per_thread: u32 = 64, count(0..=u32::MAX);
    /// Maximum size of a view, in bytes.
    view_bytes: usize = 256 * 1024, size(1..=BODY_BYTES as u64);
    /// Time within which a tool server has to acknowledge an invocation.
    invoke_ack_timeout: Duration = Duration::from_secs(10), duration(Zero::Refused);
    /// Time after the acknowledgement of a call when its tool server is first asked whether the call is still alive.
    lost_after: Duration = Duration::from_mins(15), duration(Zero::Refused);
    /// Maximum number of concurrent invocations to one tool server.
    invoke_concurrency: u32 = 256, count(1..=u32::MAX);
    /// Maximum number of concurrent requests to one model server.
    model_concurrency: u32 = 64, count(1..=u32::MAX);
    /// Maximum duration of a model request.
    model_timeout: Duration = Duration::from_mins(10), duration(Zero::Refused);
    /// Maximum time without data within the answer of a model.
    model_idle_timeout: Duration = Duration::from_mins(2), duration(Zero::Refused);
    /// Time for which a failed thread retries automatically.
    failed_retry_for: Duration = Duration::from_hours(24), duration(Zero::Allowed);
    /// Time within which a tool server has to answer discovery.
    discovery_timeout: Duration = Duration::from_secs(5), duration(Zero::Refused);
    /// Lifetime of a callback URL; `None` for the lifetime of its thread.
    callback_token_lifetime: Option<Duration> = None, optional_duration;
    /// Time for which the Idempotency-Key of a request is remembered. Event ids are remembered while their
    /// subscription is active.
    event_marks_for: Duration = Duration::from_hours(7 * 24), duration(Zero::Refused);
}
