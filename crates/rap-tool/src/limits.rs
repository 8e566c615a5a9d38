//! Every bound of a tool server, with its default.

use std::time::Duration;

use rap_protocol::UrlPolicy;
use rap_protocol::retry::Patience;
use tokio::sync::Semaphore;

use crate::rate::Rate;

/// The bounds of a tool server. Change those that do not fit:
///
/// ```
/// use rap_tool::Limits;
///
/// let mut limits = Limits::default();
/// limits.calls = 50;
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Limits {
    /// How many calls run at the same time; past it invocations are answered 503. Default: 10,000.
    pub calls: usize,
    /// How many subscriptions are active; past it a new one ends in an error. Default: 1,000,000.
    pub subscriptions: usize,
    /// How many events of one subscription wait to be delivered; past it sending waits. Default: 1,000.
    pub waiting_events: u32,
    /// How often one subscription may send an event; past it sending waits. Default: 100 a second, 200 at once.
    pub event_rate: Rate,
    /// How often one caller may invoke; past it invocations are answered 503. Default: 20,000 a second.
    pub invocation_rate: Rate,
    /// How often one caller may close, cancel and ask; past it 429. Default: 100 a second, 200 at once.
    pub notification_rate: Rate,
    /// How long a cancelled handler has to come to its end before it is dropped. Default: 5 seconds.
    pub cancel_grace: Duration,
    /// How long running calls have to finish when the server is told to stop. Default: 30 seconds.
    pub stop_within: Duration,
    /// After this long without a call, a thread whose closing never came is closed. Default: 7 days.
    pub thread_ttl: Duration,
    /// How long a call that is over is remembered, so that a repeat is recognised; never shorter than
    /// `thread_ttl`. Default: 7 days.
    pub remember: Duration,
    /// How long a user has to authorise a call. Default: 1 hour.
    pub authorize_within: Duration,
    /// How often, and for how long, a callback is tried. Default: for 72 hours.
    pub delivery: Patience,
    /// How long a callback may take to be answered; past it, it is tried again. Default: 30 seconds.
    pub callback_within: Duration,
    /// How many callbacks are under way at the same time. Default: 1,024.
    pub deliveries: usize,
    /// How many of them go to the same host. Default: 64.
    pub deliveries_per_host: usize,
    /// Where callback URLs may lead. Default: anywhere but link-local and metadata addresses.
    pub callbacks_to: UrlPolicy,
    /// How long the head of a request, and then its body, may take to arrive; an idle connection is kept as
    /// long. Default: 30 seconds.
    pub request_within: Duration,
    /// How many bytes of requests may be in memory while they arrive; past it 503. Default: 256 MiB.
    pub arriving_bytes: usize,
    /// How many connections may be open. Default: 10,000.
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
            cancel_grace: Duration::from_secs(5),
            stop_within: Duration::from_secs(30),
            thread_ttl: WEEK,
            remember: WEEK,
            authorize_within: Duration::from_secs(3600),
            delivery: Patience::CALLBACK,
            callback_within: Duration::from_secs(30),
            deliveries: 1_024,
            deliveries_per_host: 64,
            callbacks_to: UrlPolicy::default(),
            request_within: Duration::from_secs(30),
            arriving_bytes: 256 * 1024 * 1024,
            connections: 10_000,
        }
    }
}

impl Limits {
    /// The same, as far as counters and clocks reach; nobody will notice the rest.
    pub(crate) fn within_reach(mut self) -> Self {
        const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
        let counts = [
            &mut self.calls,
            &mut self.subscriptions,
            &mut self.deliveries,
            &mut self.arriving_bytes,
            &mut self.connections,
        ];
        for count in counts {
            *count = (*count).min(Semaphore::MAX_PERMITS);
        }
        self.request_within = self.request_within.min(CENTURY);
        self
    }
}
