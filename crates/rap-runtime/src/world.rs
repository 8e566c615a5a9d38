//! The environment of an engine as values: clock, random numbers, outgoing HTTP and blocking work. The simulation
//! substitutes its own.
//!
//! Sleeping and spawning use tokio, whose clock and scheduler the simulation controls.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use rap_io::client::{Client, ClientLimits, Error, Fetched, Reply};
use rap_protocol::{Timestamp, UrlRules};
use url::Url;

/// The wall clock.
pub(crate) trait Clock: Send + Sync {
    fn now(&self) -> Timestamp;
}

/// Random numbers.
pub(crate) trait Random: Send + Sync {
    fn next(&self) -> u64;
}

pub(crate) type Headers = [(HeaderName, HeaderValue)];

/// Outgoing HTTP to tool servers.
#[async_trait]
pub(crate) trait Http: Send + Sync {
    /// Sends an invocation, a notification, a user's answer or a status query.
    async fn post(&self, purpose: Purpose, url: &Url, headers: &Headers, body: Bytes)
    -> Result<Reply, Error>;
    /// Fetches a toolset of at most `max_bytes`.
    async fn get(&self, url: &Url, headers: &Headers, max_bytes: usize) -> Result<Fetched, Error>;
}

/// Purpose of a request. Each has its own time limit and connection pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Invocations and users' answers.
    Invoke,
    /// Notifications and status queries.
    Notify,
}

/// The environment that an engine is built with.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) random: Arc<dyn Random>,
    pub(crate) http: Arc<dyn Http>,
    pub(crate) blocking: Blocking,
}

/// Executor of work that blocks or takes long.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Blocking {
    /// Runs on tokio's blocking threads.
    Threads,
    /// Runs on the calling thread.
    #[cfg(test)]
    Inline,
}

impl Blocking {
    /// Runs a job. Returns `None` if it panicked.
    pub(crate) async fn run<T: Send + 'static>(self, job: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        match self {
            Blocking::Threads => tokio::task::spawn_blocking(job).await.ok(),
            #[cfg(test)]
            Blocking::Inline => Some(job()),
        }
    }
}

/// Time limits of outgoing requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HttpLimits {
    pub(crate) invoke: Duration,
    pub(crate) notify: Duration,
    pub(crate) discover: Duration,
}

impl World {
    pub(crate) fn real(rules: &UrlRules, limits: HttpLimits) -> World {
        let client =
            |total| Client::outgoing(rules.clone(), ClientLimits { total, ..ClientLimits::default() });
        let http = RealHttp {
            invoke: client(limits.invoke),
            notify: client(limits.notify),
            discover: client(limits.discover),
        };
        World {
            clock: Arc::new(SystemClock),
            random: Arc::new(SystemRandom),
            http: Arc::new(http),
            blocking: Blocking::Threads,
        }
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }
}

pub(crate) struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        SystemTime::now().into()
    }
}

struct SystemRandom;

impl Random for SystemRandom {
    fn next(&self) -> u64 {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).expect("bug: the system provides random numbers");
        u64::from_le_bytes(bytes)
    }
}

struct RealHttp {
    invoke: Client,
    notify: Client,
    discover: Client,
}

#[async_trait]
impl Http for RealHttp {
    async fn post(
        &self,
        purpose: Purpose,
        url: &Url,
        headers: &Headers,
        body: Bytes,
    ) -> Result<Reply, Error> {
        let client = match purpose {
            Purpose::Invoke => &self.invoke,
            Purpose::Notify => &self.notify,
        };
        client.post_json(url, headers, body).await
    }

    async fn get(&self, url: &Url, headers: &Headers, max_bytes: usize) -> Result<Fetched, Error> {
        self.discover.get(url, headers, max_bytes).await
    }
}
