//! Every configurable limit of a runtime, in one table.
//!
//! The table generates the structs and their defaults, and describes each limit as data ([`Limit`]), from which the
//! configuration reader, the file that `rap init` writes and the list in the guide are made. The limits of a thread are
//! rules of this crate; the others are for the runtime around it. Input beyond a limit of a thread is refused with
//! [`crate::Ignored::Full`] or gets an error result.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use rap_protocol::limits::{ANCESTORS, BODY_BYTES};

use crate::{Bounds, Budgets, Server};

/// Description of a limit in `L`.
#[derive(Debug)]
pub struct Limit<L: 'static> {
    /// Name in the configuration.
    pub key: &'static str,
    /// Earlier name in the configuration, which is still accepted.
    pub former_key: Option<&'static str>,
    /// Sentences that describe it. Several lines, each with a leading space.
    about: &'static str,
    /// Values that it may have.
    pub valid: Valid,
    /// Returns its value.
    pub get: fn(&L) -> LimitValue,
    /// Changes its value, which has to be valid.
    pub set: fn(&mut L, LimitValue),
}

impl<L> Limit<L> {
    /// Returns the description as one line.
    pub fn about(&self) -> String {
        self.about.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// Value of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitValue {
    /// A number, or a size in bytes.
    Number(u64),
    /// A time.
    Duration(Duration),
    /// No limit.
    None,
}

/// Values that a limit may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Valid {
    /// A number in this range.
    Count(RangeInclusive<u32>),
    /// A number above zero, or none.
    CountOrNone,
    /// A number of bytes in this range.
    Size(RangeInclusive<u64>),
    /// Any time.
    Duration,
    /// A time above zero.
    DurationAboveZero,
    /// A time above zero, or none.
    DurationOrNone,
}

/// A type that fields with limits have.
trait Field {
    fn get(&self) -> LimitValue;
    fn set(&mut self, value: LimitValue);
}

const MISMATCH: &str = "bug: the value of a limit does not fit its type";

macro_rules! number_fields {
    ($($type:ty)*) => {$(
        impl Field for $type {
            fn get(&self) -> LimitValue {
                LimitValue::Number(u64::try_from(*self).expect(MISMATCH))
            }

            fn set(&mut self, value: LimitValue) {
                let LimitValue::Number(number) = value else { panic!("{MISMATCH}") };
                *self = number.try_into().expect(MISMATCH);
            }
        }
    )*};
}

number_fields! { u32 u64 usize }

impl Field for Duration {
    fn get(&self) -> LimitValue {
        LimitValue::Duration(*self)
    }

    fn set(&mut self, value: LimitValue) {
        let LimitValue::Duration(duration) = value else { panic!("{MISMATCH}") };
        *self = duration;
    }
}

impl<F: Field + Default> Field for Option<F> {
    fn get(&self) -> LimitValue {
        self.as_ref().map_or(LimitValue::None, F::get)
    }

    fn set(&mut self, value: LimitValue) {
        *self = (value != LimitValue::None).then(|| {
            let mut field = F::default();
            field.set(value);
            field
        });
    }
}

/// Defines structs of limits. An entry is `field as key_in_the_configuration: Type = default, valid values;`. Without
/// `as`, the key is the name of the field. `was` gives an earlier key, which is still accepted. `part` is a field that
/// is not a limit itself; `within` lists limits inside it.
macro_rules! limits {
    ($(
        $(#[$about:meta])*
        $name:ident {
            $($(#[doc = $doc:literal])* $field:ident $(as $key:ident)? $(was $former:ident)?: $type:ty = $default:expr, $valid:expr;)*
        }
        part { $($(#[$part_doc:meta])* $part:ident: $part_type:ty = $part_default:expr;)* }
        within { $($(#[doc = $inner_doc:literal])* $($path:ident).+ as $inner_key:ident, $inner_valid:expr;)* }
    )*) => {$(
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct $name {
            $($(#[doc = $doc])* pub $field: $type,)*
            $($(#[$part_doc])* pub $part: $part_type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($field: $default,)* $($part: $part_default,)* }
            }
        }

        impl $name {
            /// All limits, in the order of the documentation.
            pub const TABLE: &[Limit<$name>] = &[
                $(Limit {
                    key: limits!(@key $field $($key)?),
                    former_key: limits!(@former $($former)?),
                    about: concat!($($doc, "\n"),*),
                    valid: $valid,
                    get: |limits| limits.$field.get(),
                    set: |limits, value| limits.$field.set(value),
                },)*
                $(Limit {
                    key: stringify!($inner_key),
                    former_key: None,
                    about: concat!($($inner_doc, "\n"),*),
                    valid: $inner_valid,
                    get: |limits| limits.$($path).+.get(),
                    set: |limits, value| limits.$($path).+.set(value),
                },)*
            ];
        }
    )*};
    (@key $field:ident) => { stringify!($field) };
    (@key $field:ident $key:ident) => { stringify!($key) };
    (@former) => { None };
    (@former $former:ident) => { Some(stringify!($former)) };
}

const ANY: RangeInclusive<u32> = 0..=u32::MAX;
const POSITIVE: RangeInclusive<u32> = 1..=u32::MAX;
const KIB: usize = 1024;
const MIB: u64 = 1024 * 1024;

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const fn minutes(minutes: u64) -> Duration {
    seconds(60 * minutes)
}

const fn hours(hours: u64) -> Duration {
    minutes(60 * hours)
}

limits! {
    /// Limits of a thread. An agent can have its own.
    Limits {
        /// Maximum number of active subscriptions of a thread, schedules included.
        subscriptions as subscriptions_per_thread: usize = 32, Valid::Count(ANY);
        /// Maximum number of open calls of a thread, including those that continue in the background.
        open_calls as open_calls_per_thread: usize = 128, Valid::Count(ANY);
        /// Time after which a call without a result gets an error result, or "none".
        call_timeout: Option<Duration> = None, Valid::DurationOrNone;
        /// Time within which a person has to approve a call.
        approval_within: Duration = hours(24), Valid::DurationAboveZero;
        /// Maximum number of open questions of a thread to people.
        questions as questions_per_thread: usize = 64, Valid::Count(ANY);
        /// Maximum number of messages and events that a busy thread holds, and of waiting events of each subscription.
        held as held_per_thread: u32 = 1000, Valid::Count(POSITIVE);
        /// Maximum total size of the input that a busy thread holds, and of the waiting events of each subscription. All
        /// of it is read at once.
        held_bytes as held_bytes_per_thread: u64 = 16 * MIB, Valid::Size(1..=1024 * MIB);
        /// Maximum total size of the results that a thread receives between two model requests. All of them are read at
        /// once. A result beyond it is replaced by an error that states its size.
        result_bytes as result_bytes_per_turn: u64 = 16 * MIB, Valid::Size(1..=1024 * MIB);
        /// Maximum time that an event is held while calls are open. Also the time for which a waiting event child
        /// counts as active.
        hold_max: Duration = seconds(60), Valid::Duration;
        /// Maximum number of open children that the model of a thread spawned, and of active event children for its
        /// events.
        children as children_per_thread: usize = 64, Valid::Count(ANY);
        /// Maximum number of event children of a subscription that are active at the same time. Further events wait.
        event_children as event_children_per_subscription: usize = 4, Valid::Count(POSITIVE);
        /// Maximum number of waiting events that one event child takes; 1 spawns a child for each event.
        events_per_child: u32 = 100, Valid::Count(POSITIVE);
        /// Maximum number of event ids that are remembered for each subscription, to recognise repeated events. Beyond it,
        /// the oldest are deleted.
        event_ids as event_ids_per_subscription: u64 = 100_000, Valid::Count(POSITIVE);
        /// Maximum nesting depth of threads; at most 64. A thread at this depth spawns no children and handles all events
        /// itself.
        depth: usize = 8, Valid::Count(0..=ANCESTORS as u32);
        /// Maximum number of views of a thread. Beyond it, the oldest is deleted.
        views as views_per_thread: usize = 64, Valid::Count(ANY);
        /// Time for which a failed thread retries automatically.
        failed_retry_for: Duration = hours(24), Valid::Duration;
        /// Maximum number of model requests in a row without new external input.
        turns_per_wake: u32 = 50, Valid::Count(POSITIVE);
    }
    part {
        /// Budget of the thread's session.
        budgets: Budgets = Budgets {
            per_hour: Bounds { wakes: Some(1000), ..Bounds::default() },
            in_total: Bounds::default(),
        };
        /// Tool servers with a `call_timeout` of their own; `None` means no timeout.
        call_timeouts: BTreeMap<Server, Option<Duration>> = BTreeMap::new();
    }
    within {
        /// Maximum number of model requests of a session (a root thread and its descendants) in an hour. Beyond it, the
        /// session has to be resumed by hand.
        budgets.per_hour.turns as turns_per_hour, Valid::CountOrNone;
        /// Maximum number of tokens that a session uses in an hour. Beyond it, the session has to be resumed by hand.
        budgets.per_hour.tokens as tokens_per_hour, Valid::CountOrNone;
        /// Maximum number of times in an hour that events, late results, timers and other threads wake the threads of a
        /// session. Beyond it, the session holds its input until the hour is over or it is resumed.
        budgets.per_hour.wakes as wakes_per_hour, Valid::CountOrNone;
        /// Maximum number of model requests of a session in total. Beyond it, the session has to be resumed by hand.
        budgets.in_total.turns as turns_in_total, Valid::CountOrNone;
        /// Maximum number of tokens that a session uses in total. Beyond it, the session has to be resumed by hand.
        budgets.in_total.tokens as tokens_in_total, Valid::CountOrNone;
        /// Maximum number of times in total that events, late results, timers and other threads wake the threads of a
        /// session. Beyond it, the session has to be resumed by hand.
        budgets.in_total.wakes as wakes_in_total, Valid::CountOrNone;
    }

    /// Limits of a runtime.
    RuntimeLimits {
        /// Time within which a tool server has to acknowledge an invocation.
        invoke_ack_timeout: Duration = seconds(10), Valid::DurationAboveZero;
        /// Time for which a failed invocation is retried.
        invoke_retry_for: Duration = minutes(10), Valid::Duration;
        /// Maximum number of concurrent invocations to one tool server.
        invoke_concurrency: usize = 256, Valid::Count(POSITIVE);
        /// Time after the acknowledgement of a call when its tool server is first asked whether the call is still alive, and
        /// interval of further checks.
        lost_after: Duration = minutes(15), Valid::DurationAboveZero;
        /// Time within which a tool server has to respond to discovery.
        discovery_timeout: Duration = seconds(5), Valid::DurationAboveZero;
        /// Time for which a model request waits for the discovery of tools. Tools that arrive later are offered with the
        /// next request.
        discovery_wait: Duration = seconds(1), Valid::Duration;
        /// Maximum memory of the toolsets that need more than 1 MiB, parsed or not. A tool server can have half of it, and a
        /// toolset beyond it is refused.
        toolset_bytes: usize = 128 * KIB * KIB, Valid::Size(32 * MIB..=64 * 1024 * MIB);
        /// Number of attempts for a model request before the turn fails.
        model_attempts: u32 = 5, Valid::Count(POSITIVE);
        /// Maximum number of concurrent requests to one model server.
        model_concurrency: usize = 64, Valid::Count(POSITIVE);
        /// Maximum duration of a model request.
        model_timeout: Duration = minutes(10), Valid::DurationAboveZero;
        /// Maximum time without data during the answer of a model.
        model_idle_timeout: Duration = minutes(2), Valid::DurationAboveZero;
        /// Maximum memory of all requests to models that are being sent and of all answers that are received or processed,
        /// besides the first 256 KiB of each. A model server can have half of it. Beyond it, requests wait, and one answer
        /// continues at a time.
        model_answer_bytes: usize = 128 * KIB * KIB, Valid::Size(MIB..=64 * 1024 * MIB);
        /// Maximum size of a request body; at most 8MiB.
        body: usize = BODY_BYTES, Valid::Size(1024..=BODY_BYTES as u64);
        /// Maximum size of a view.
        view_bytes: usize = 256 * KIB, Valid::Size(1..=BODY_BYTES as u64);
        /// Maximum number of events of a subscription in a second, or "none". Beyond it, events are refused with 503
        /// and have to be sent again.
        events_per_second: Option<u64> = Some(1000), Valid::CountOrNone;
        /// Lifetime of a callback URL, or "none" for as long as its call or subscription.
        callback_token_lifetime: Option<Duration> = None, Valid::DurationOrNone;
        /// Time for which the Idempotency-Key of a client's request is remembered.
        idempotency_key_lifetime was event_marks_for: Duration = hours(7 * 24), Valid::DurationAboveZero;
        /// Maximum number of requests of a client token in a second, or "none". Beyond it, requests are refused with 429.
        requests_per_second: Option<u64> = None, Valid::CountOrNone;
        /// Maximum number of concurrent incoming connections. Beyond it, those that made no progress for two seconds are
        /// closed. If there are none, new ones get 503, except callbacks and health checks.
        connections: usize = 4096, Valid::Count(POSITIVE);
        /// Time within which the headers of a request have to arrive, and after which an idle connection is closed.
        request_within: Duration = seconds(30), Valid::DurationAboveZero;
        /// Time that work in progress has to finish when the runtime stops.
        stop_within: Duration = Duration::from_millis(1500), Valid::Duration;
    }
    part {
        /// Limits of a thread, for agents without limits of their own.
        thread: Limits = Limits::default();
    }
    within {}
}

impl Limits {
    /// Returns the timeout of calls to a tool server; `None` means no timeout.
    pub fn call_timeout_of(&self, server: &Server) -> Option<Duration> {
        self.call_timeouts.get(server).copied().unwrap_or(self.call_timeout)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn is_valid(valid: &Valid, value: LimitValue) -> bool {
        match (valid, value) {
            (Valid::Count(range), LimitValue::Number(number)) => {
                u32::try_from(number).is_ok_and(|number| range.contains(&number))
            }
            (Valid::Size(range), LimitValue::Number(number)) => range.contains(&number),
            (Valid::CountOrNone, LimitValue::Number(number)) => number > 0,
            (Valid::CountOrNone | Valid::DurationOrNone, LimitValue::None) => true,
            (Valid::Duration, LimitValue::Duration(_)) => true,
            (Valid::DurationAboveZero | Valid::DurationOrNone, LimitValue::Duration(time)) => !time.is_zero(),
            _ => false,
        }
    }

    /// The smallest and the largest valid value, and one without a limit.
    fn examples(valid: &Valid) -> Vec<LimitValue> {
        let time = LimitValue::Duration(Duration::from_millis(1));
        match valid {
            Valid::Count(range) => {
                [range.start(), range.end()].map(|end| LimitValue::Number((*end).into())).into()
            }
            Valid::Size(range) => [range.start(), range.end()].map(|end| LimitValue::Number(*end)).into(),
            Valid::CountOrNone => vec![LimitValue::None, LimitValue::Number(1)],
            Valid::Duration => vec![LimitValue::Duration(Duration::ZERO), time],
            Valid::DurationAboveZero => vec![time],
            Valid::DurationOrNone => vec![LimitValue::None, time],
        }
    }

    fn check<L: Default + PartialEq>(table: &[Limit<L>]) {
        for limit in table {
            let mut limits = L::default();
            let default = (limit.get)(&limits);
            assert!(is_valid(&limit.valid, default), "{}: {default:?}", limit.key);
            for value in examples(&limit.valid) {
                (limit.set)(&mut limits, value);
                assert_eq!((limit.get)(&limits), value, "{}", limit.key);
            }
            (limit.set)(&mut limits, default);
            assert!(limits == L::default(), "{} changes another limit", limit.key);
            let about = limit.about();
            assert!(about.ends_with('.') && !about.contains("  "), "{}: {about}", limit.key);
        }
    }

    #[test]
    fn every_limit_has_a_valid_default_and_takes_every_valid_value() {
        check(Limits::TABLE);
        check(RuntimeLimits::TABLE);
    }

    #[test]
    fn keys_are_unique() {
        let keys = Limits::TABLE.iter().map(|limit| limit.key);
        let keys = keys.chain(RuntimeLimits::TABLE.iter().map(|limit| limit.key));
        let former = Limits::TABLE.iter().filter_map(|limit| limit.former_key);
        let former = former.chain(RuntimeLimits::TABLE.iter().filter_map(|limit| limit.former_key));
        let keys: Vec<_> = keys.chain(former).collect();
        assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len());
    }
}
