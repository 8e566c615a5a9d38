//! All limits of a tool server, with their defaults.

use std::time::Duration;

use rap_protocol::retry::RetryPolicy;

use crate::rate::Rate;

/// The limits of a tool server. Start from the defaults and change single fields:
///
/// ```
/// use rap_tool::Limits;
///
/// let mut limits = Limits::default();
/// limits.calls = 50;
/// ```
///
/// Callers share calls, subscriptions, callback requests and the memory for bodies: a quarter of each limit is
/// reserved. It is divided equally, and each part can be used only by its own caller. The rest is free for everyone. A
/// single caller can use all of it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Limits {
    /// Maximum number of calls that run at the same time. Further invocations are answered with 503. Shared among
    /// callers. Default: 10,000.
    pub calls: usize,
    /// Maximum number of active subscriptions. A further one ends with an error result. Shared among callers. Default:
    /// 1,000,000.
    pub subscriptions: usize,
    /// Maximum number of undelivered events of one subscription. Sending a further one waits. Default: 1,000.
    pub waiting_events: u32,
    /// Rate at which one subscription may send events. Sending faster waits. Default: 100 per second, bursts of 200.
    pub event_rate: Rate,
    /// Rate of invocations per caller. Further ones are answered with 503. Default: 20,000 per second.
    pub invocation_rate: Rate,
    /// Rate per caller of requests to close threads, cancel calls and query the status of calls. Further ones are
    /// answered with 429. Default: 100 per second, bursts of 200.
    pub notification_rate: Rate,
    /// Time that a call may take, from its acceptance on; [`Tool::timeout`](crate::Tool::timeout) overrides it. Then the
    /// call ends with an error result, and its handler is stopped like one of a cancelled call. A subscription has to be
    /// confirmed within this time, and has no time limit after that. Default: 24 hours, or twice the longest
    /// [`Tool::expected_duration`](crate::Tool::expected_duration) of the tool if that is longer.
    pub call_timeout: Duration,
    /// Time that a stopped handler has to return before its future is dropped. What it returns within this time after a
    /// cancellation is the result of the call. Default: 5 seconds.
    pub cancel_grace: Duration,
    /// Time that running calls have to finish when the server shuts down. Default: 30 seconds.
    pub stop_within: Duration,
    /// Time without a call after which the server closes a thread that no runtime has closed. Default: 7 days.
    pub thread_ttl: Duration,
    /// Time for which a settled call is kept, so that a repeated invocation is recognised. If `thread_ttl` is longer,
    /// that is used instead. Default: 7 days.
    pub remember: Duration,
    /// Time that a user has to answer [`Call::authorize`](crate::Call::authorize). Default: 1 hour.
    pub authorize_within: Duration,
    /// Retry policy of callbacks. A subscription ends if the runtime has not answered, or has refused every event, for
    /// `give_up_after`. Default: retries for 3 days.
    pub delivery: RetryPolicy,
    /// Time that the hook of [`ToolServer::on_close_thread`](crate::ToolServer::on_close_thread) may take. Then it is
    /// dropped, as if it had failed. Default: 30 seconds.
    pub close_within: Duration,
    /// Timeout of one callback request. The callback is retried after it. Default: 30 seconds.
    pub callback_within: Duration,
    /// Maximum number of concurrent callback requests. Shared among callers. Default: 1,024.
    pub deliveries: usize,
    /// Maximum number of concurrent callback requests to one host. Shared among callers. Default: 64.
    pub deliveries_per_host: usize,
    /// Time that the head of a request may take to arrive, and then its body. Also the time after which an idle
    /// connection is closed. Default: 30 seconds.
    pub request_within: Duration,
    /// Maximum total size of request bodies in memory, in bytes. The invocations of running calls and subscriptions may
    /// have twice that size. Further requests are answered with 503. Shared among callers. Default: 256 MiB.
    pub arriving_bytes: usize,
    /// Maximum number of open connections. Beyond it, those that made no progress for two seconds are closed; if there
    /// are none, new ones get 503, except invocations and health checks. Default: 10,000.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);
        Limits {
            calls: 10_000,
            subscriptions: 1_000_000,
            waiting_events: 1_000,
            event_rate: Rate::new(100, 200),
            invocation_rate: Rate::new(20_000, 20_000),
            notification_rate: Rate::new(100, 200),
            call_timeout: Duration::from_secs(24 * 3600),
            cancel_grace: Duration::from_secs(5),
            stop_within: Duration::from_secs(30),
            thread_ttl: WEEK,
            remember: WEEK,
            authorize_within: Duration::from_secs(3600),
            delivery: RetryPolicy::CALLBACK,
            close_within: Duration::from_secs(30),
            callback_within: Duration::from_secs(30),
            deliveries: 1_024,
            deliveries_per_host: 64,
            request_within: Duration::from_secs(30),
            arriving_bytes: 256 * 1024 * 1024,
            connections: 10_000,
        }
    }
}

impl Limits {
    /// Clamps values to what clocks can represent.
    pub(crate) fn clamped(mut self) -> Self {
        const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
        for time in [&mut self.request_within, &mut self.call_timeout, &mut self.cancel_grace] {
            *time = (*time).min(CENTURY);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grouped(number: u64) -> String {
        if number < 1000 {
            number.to_string()
        } else {
            format!("{},{:03}", grouped(number / 1000), number % 1000)
        }
    }

    fn count(number: impl TryInto<u64>) -> String {
        grouped(number.try_into().ok().unwrap())
    }

    fn time(time: Duration) -> String {
        match time.as_secs() {
            3600 => "1 hour".into(),
            seconds if seconds % (24 * 3600) == 0 && seconds > 24 * 3600 => {
                format!("{} days", seconds / (24 * 3600))
            }
            seconds if seconds % 3600 == 0 => format!("{} hours", seconds / 3600),
            seconds => format!("{seconds} seconds"),
        }
    }

    fn rate(rate: Rate) -> String {
        let average = format!("{} per second", count(rate.per_second));
        if rate.burst == rate.per_second { average } else { format!("{average}, bursts of {}", rate.burst) }
    }

    /// Returns the end of the comment of a field, which begins with the default that it states.
    fn stated(field: &str) -> String {
        let (before, _) = include_str!("limits.rs").split_once(&format!("    pub {field}: ")).unwrap();
        let comment: Vec<&str> =
            before.lines().rev().map_while(|line| line.trim().strip_prefix("/// ")).collect();
        let comment = comment.into_iter().rev().collect::<Vec<_>>().join(" ");
        comment.split_once("Default: ").unwrap_or_else(|| panic!("{field}: {comment}")).1.to_owned()
    }

    #[test]
    fn comments_state_the_defaults() {
        let limits = Limits::default();
        let defaults = [
            ("calls", count(limits.calls)),
            ("subscriptions", count(limits.subscriptions)),
            ("waiting_events", count(limits.waiting_events)),
            ("event_rate", rate(limits.event_rate)),
            ("invocation_rate", rate(limits.invocation_rate)),
            ("notification_rate", rate(limits.notification_rate)),
            ("call_timeout", time(limits.call_timeout)),
            ("cancel_grace", time(limits.cancel_grace)),
            ("stop_within", time(limits.stop_within)),
            ("thread_ttl", time(limits.thread_ttl)),
            ("remember", time(limits.remember)),
            ("authorize_within", time(limits.authorize_within)),
            ("delivery", format!("retries for {}", time(limits.delivery.give_up_after))),
            ("close_within", time(limits.close_within)),
            ("callback_within", time(limits.callback_within)),
            ("deliveries", count(limits.deliveries)),
            ("deliveries_per_host", count(limits.deliveries_per_host)),
            ("request_within", time(limits.request_within)),
            ("arriving_bytes", format!("{} MiB", limits.arriving_bytes / 1024 / 1024)),
            ("connections", count(limits.connections)),
        ];
        for (field, default) in defaults {
            let stated = stated(field);
            let rest =
                stated.strip_prefix(&default).unwrap_or_else(|| panic!("{field}: {stated:?}, not {default}"));
            let ends = rest.starts_with(". ") || rest == "." || rest.starts_with(", or ");
            assert!(ends, "{field}: {stated:?}, not {default}");
        }
    }
}
