//! The environment of an engine as values: clock, random numbers, outgoing HTTP and blocking work. The simulation
//! substitutes its own.
//!
//! Sleeping and spawning use tokio, whose clock and scheduler the simulation controls.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use rap_io::client::{Error, Fetched, Reply};
use rap_protocol::{Timestamp, TraceContext, UrlRules};
use url::Url;

use crate::outgoing::RealHttp;
use crate::settings::{AlertDestination, SettingsError, ToolServer};

/// The wall clock.
pub(crate) trait Clock: Send + Sync {
    fn now(&self) -> Timestamp;
}

/// Random numbers.
pub(crate) trait Random: Send + Sync {
    fn next(&self) -> u64;
}

/// Outgoing HTTP to tool servers.
#[async_trait]
pub(crate) trait Http: Send + Sync {
    /// Sends a message to a tool server.
    async fn post(&self, kind: MessageKind, to: To<'_>, body: Bytes) -> Result<Reply, Error>;
    /// Fetches a toolset of at most `max_bytes`.
    async fn get(&self, to: To<'_>, max_bytes: usize) -> Result<Fetched, Error>;
}

/// Destination of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct To<'a> {
    pub(crate) url: &'a Url,
    /// Base URL of the tool server whose credentials the request shows. `None` shows no credentials.
    pub(crate) credentials_of: Option<&'a str>,
    /// Context of the trace that the request belongs to.
    pub(crate) trace: Option<TraceContext>,
}

impl<'a> To<'a> {
    pub(crate) fn new(url: &'a Url, credentials_of: Option<&'a str>) -> To<'a> {
        To { url, credentials_of, trace: None }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageKind {
    Invocation,
    /// A user's answer to a question of a tool.
    Answer,
    Close,
    Cancel,
    StatusQuery,
    Migrate,
    /// An alert to people.
    Alert,
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
    pub(crate) fn real(
        rules: &UrlRules,
        limits: HttpLimits,
        servers: &[ToolServer],
        notify: &[AlertDestination],
    ) -> Result<World, SettingsError> {
        Ok(World {
            clock: Arc::new(SystemClock),
            random: Arc::new(SystemRandom),
            http: Arc::new(RealHttp::new(rules, limits, servers, notify)?),
            blocking: Blocking::Threads,
        })
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
