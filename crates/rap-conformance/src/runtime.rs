//! Checks a runtime. The checker acts as the tool servers, the model and the user. It observes what the runtime sends,
//! in which order and how often, and what reaches the model.
//!
//! Every probe runs its own scenario, most of them concurrently. A probe waits for expected messages until they arrive,
//! at most [`Timeouts::arrival`]. To show that something does not happen, it waits for [`Timeouts::quiet_period`].

mod crash;
mod latch;
mod mock_server;
mod model;
pub mod placeholders;
mod probes;
pub mod process;
mod scenario;
mod tools;
mod user;

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::{self, FuturesUnordered};
use rap_io::client::{Client, ClientLimits};
use rap_protocol::{Secret, UrlPolicy};
use tokio::net::TcpListener;

pub use self::process::{Launch, Process};
pub use self::user::{Api, SayCommand, User};

use self::crash::Crash;
use self::mock_server::MockServer;
use self::model::ModelRequest;
use self::probes::{Check, Phase};
use self::scenario::{CheckContext, Scenario};
use crate::{Outcome, Probe, Profile, Progress, Report, Subject, Verdict};

/// Number of scenarios that run concurrently.
const CONCURRENT_SCENARIOS: usize = 24;
/// Pause between attempts to contact a runtime that is not running yet.
const CONTACT_PAUSE: Duration = Duration::from_secs(2);
/// Number of further messages until the model gets the tools, and the pause before each. A runtime need not wait for a
/// toolset that is slow to arrive before it sends a first prompt.
const TOOL_TRIES: u32 = 4;
const TOOL_PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of bytes of an answer that are read.
const ANSWER_BYTES: usize = 1024 * 1024;

/// Time limits of the checker.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// Maximum wait for a message that should arrive.
    pub arrival: Duration,
    /// Wait before a probe concludes that a message does not arrive.
    pub quiet_period: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts { arrival: Duration::from_secs(30), quiet_period: Duration::from_secs(3) }
    }
}

/// Reason why nothing was checked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checker has no port for the tool servers and the model.
    #[error("cannot listen for requests of the runtime: {0}")]
    Listen(#[source] io::Error),
    /// The checker cannot create the runtime's directory or write its files.
    #[error("cannot write the runtime's files: {0}")]
    Directory(#[source] io::Error),
    /// The command is malformed.
    #[error(transparent)]
    Placeholder(#[from] placeholders::Error),
    /// The template cannot be read.
    #[error("cannot read the template {path}: {error}")]
    Template {
        /// Path of the template.
        path: String,
        /// Error of the operating system.
        error: io::Error,
    },
    /// The command cannot be run.
    #[error("cannot start the runtime: {0}")]
    Start(#[source] io::Error),
    /// The runtime exited before it accepted connections.
    #[error("the runtime exited ({status}) before it accepted connections:\n{log}")]
    Ended {
        /// Exit status.
        status: String,
        /// Last lines of its output.
        log: String,
    },
    /// The runtime runs, but does not accept connections.
    #[error("the runtime does not accept connections on {address}:\n{log}")]
    Silent {
        /// Address that was tried.
        address: String,
        /// Last lines of its output.
        log: String,
    },
    /// A first message to the runtime did not reach the model, or the runtime did not fetch any toolset.
    #[error("{0}")]
    NoContact(String),
}

/// Future of [`RuntimeHost::restart`].
pub type RestartFuture<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + Send + 'a>>;

/// Returns all probes of a runtime.
pub fn probes() -> impl Iterator<Item = &'static Probe> {
    probes::all().map(|check| &check.probe)
}

/// Kills and restarts the runtime under test.
pub trait RuntimeHost: Send + Sync {
    /// Kills the runtime without warning, as a power failure does, and restarts it with the same address and data.
    fn restart(&self) -> RestartFuture<'_>;
}

/// Checker of a runtime. It listens as three tool servers and a model.
pub struct Checker {
    server: Arc<MockServer>,
    http: Client,
}

impl Checker {
    /// Starts to listen. `public` is the URL by which the runtime reaches the listener; if `None`, the listener's
    /// address.
    pub async fn listen(
        listener: TcpListener,
        public: Option<&str>,
        timeouts: Timeouts,
    ) -> Result<Checker, Error> {
        let (run, token) = (random_word(6), Secret::new(random_word(24)));
        let server = MockServer::open(listener, public, run, token, timeouts).await.map_err(Error::Listen)?;
        let limits =
            ClientLimits { total: timeouts.arrival, drain_bytes: ANSWER_BYTES, ..ClientLimits::default() };
        Ok(Checker { server, http: Client::new(UrlPolicy::Loopback, limits) })
    }

    /// Returns the placeholders that the checker defines, with their values.
    pub fn values(&self) -> Vec<(&'static str, String)> {
        let server = &self.server;
        vec![
            ("tool_url", server.tool_url(0)),
            ("tool_url_2", server.tool_url(1)),
            ("tool_url_3", server.tool_url(2)),
            ("tool_token", server.token.expose().to_owned()),
            ("model_url", server.model_url()),
            ("model_key", "rapcheck".to_owned()),
        ]
    }

    /// Waits for a runtime that somebody else starts: sends messages until one is accepted. A `--say` command does not
    /// report whether its message was accepted; with such a user, waits until the runtime fetches a toolset.
    pub async fn wait_for_contact(&self, user: &User) {
        let context = CheckContext::new(Arc::clone(&self.server), user.clone(), self.http.clone());
        loop {
            let scenario = context.scenario(None);
            let accepted =
                scenario.open_thread(scenario.noop_step()).await.is_ok() && matches!(user, User::Api(_));
            if accepted || self.server.discoveries(tools::MAIN) > 0 {
                return;
            }
            tokio::time::sleep(CONTACT_PAUSE).await;
        }
    }

    /// Runs all probes of a profile and returns the report. Fails if a first message does not reach the model. Without a
    /// host, the crash probes are not observable.
    pub async fn run(
        &self,
        target: &str,
        profile: Profile,
        user: User,
        host: Option<&dyn RuntimeHost>,
        progress: &(dyn Fn(Progress<'_>) + Sync),
    ) -> Result<Report, Error> {
        let context = CheckContext::new(Arc::clone(&self.server), user, self.http.clone());
        self.make_contact(&context).await?;
        let mut report = Report::new(Subject::Runtime, target, profile, probes::GAPS);
        let run = Run { context, profile, host, progress };
        for phase in [Phase::First, Phase::Concurrent, Phase::Crash, Phase::Last] {
            for outcome in run.phase(phase).await {
                report.add(outcome);
            }
        }
        Ok(report)
    }

    /// Returns true if a prompt offers the tools of every server whose toolset was fetched.
    fn offers_all(&self, prompt: &ModelRequest) -> bool {
        let tools = [(tools::MAIN, tools::WORK), (tools::SECOND, tools::CHANGING)];
        let mut fetched = tools.into_iter().filter(|(server, _)| self.server.discoveries(*server) > 0);
        fetched.all(|(_, tool)| prompt.offers(tool) > 0)
    }

    /// Checks that a message reaches the model and that the runtime fetches a toolset. Otherwise nothing can be
    /// checked.
    async fn make_contact(&self, context: &Arc<CheckContext>) -> Result<(), Error> {
        let scenario = context.scenario(None);
        let contact = async {
            let marker = scenario.noop_step();
            let thread = scenario.open_thread(marker).await?;
            let mut prompt = scenario.wait_for_prompt_with(&self.server.marker_text(marker)).await?;
            for _ in 0..TOOL_TRIES {
                if self.offers_all(&prompt) {
                    break;
                }
                tokio::time::sleep(TOOL_PAUSE).await;
                prompt = scenario.current_prompt(&thread).await?;
            }
            Ok(prompt)
        };
        let why = match contact.await {
            Ok(_) if self.server.discoveries(tools::MAIN) > 0 => {
                context.fix_servers();
                return Ok(());
            }
            Ok(_) => {
                format!("the runtime did not fetch the toolset of {}", self.server.tool_url(tools::MAIN))
            }
            Err(Verdict::Fail { what, .. }) => what,
            Err(Verdict::NotObservable { why }) => why,
            Err(Verdict::Pass { .. }) => "unknown reason".to_owned(),
        };
        Err(Error::NoContact(format!(
            "a message to the runtime did not reach the model at {}: {why}",
            self.server.model_url()
        )))
    }
}

/// One run of all probes.
struct Run<'a> {
    context: Arc<CheckContext>,
    profile: Profile,
    host: Option<&'a dyn RuntimeHost>,
    progress: &'a (dyn Fn(Progress<'_>) + Sync),
}

impl Run<'_> {
    fn checks(&self) -> impl Iterator<Item = &'static Check> {
        let profile = self.profile;
        probes::all().filter(move |check| check.probe.is_in(profile))
    }

    async fn phase(&self, phase: Phase) -> Vec<Outcome> {
        let checks = self.checks().enumerate().filter(|(_, check)| check.phase == phase);
        let concurrent = match phase {
            Phase::First | Phase::Last => 1,
            Phase::Concurrent => CONCURRENT_SCENARIOS,
            Phase::Crash => return self.crash(checks.collect()).await,
        };
        let runs = checks.map(|(at, check)| self.run_probe(at, check, None));
        let mut outcomes: Vec<_> = stream::iter(runs).buffer_unordered(concurrent).collect().await;
        outcomes.sort_by_key(|(at, _)| *at);
        outcomes.into_iter().map(|(_, outcome)| outcome).collect()
    }

    async fn crash(&self, checks: Vec<(usize, &'static Check)>) -> Vec<Outcome> {
        let Some(host) = self.host else {
            let why =
                "the checker did not start the runtime and cannot restart it; pass its command after `--`";
            let verdict = || Verdict::not_observable(why);
            let not_observable = |(_, check): &(usize, &'static Check)| Outcome {
                probe: &check.probe,
                verdict: verdict(),
                took: Duration::ZERO,
            };
            return checks
                .iter()
                .map(not_observable)
                .inspect(|outcome| (self.progress)(Progress::Finished(outcome)))
                .collect();
        };
        let crash = Arc::new(Crash::new(checks.len()));
        let runs: FuturesUnordered<_> = checks
            .into_iter()
            .map(|(at, check)| self.run_probe(at, check, Some(Arc::clone(&crash))))
            .collect();
        let (mut outcomes, ()) = tokio::join!(runs.collect::<Vec<_>>(), crash.run(host));
        outcomes.sort_by_key(|(at, _)| *at);
        outcomes.into_iter().map(|(_, outcome)| outcome).collect()
    }

    async fn run_probe(
        &self,
        at: usize,
        check: &'static Check,
        crash: Option<Arc<Crash>>,
    ) -> (usize, Outcome) {
        let (probe, total) = (&check.probe, self.checks().count());
        (self.progress)(Progress::Started { probe, number: at + 1, total });
        let began = Instant::now();
        let scenario: Scenario = self.context.scenario(crash);
        let verdict = self.without_token(Verdict::of((check.run)(scenario).await));
        let outcome = Outcome { probe, verdict, took: began.elapsed() };
        (self.progress)(Progress::Finished(&outcome));
        (at, outcome)
    }

    /// Removes the tool servers' token from the exchanges.
    fn without_token(&self, verdict: Verdict) -> Verdict {
        match verdict {
            Verdict::Fail { what, exchanges, weight } => {
                let token = &self.context.server.token;
                let exchanges = exchanges.into_iter().map(|exchange| exchange.redact(token)).collect();
                Verdict::Fail { what, exchanges, weight }
            }
            other => other,
        }
    }
}

fn random_word(length: usize) -> String {
    let mut bytes = vec![0; length];
    getrandom::fill(&mut bytes).expect("bug: the operating system has no random bytes");
    bytes.iter().map(|byte| char::from(b'a' + byte % 26)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::Extent;

    #[test]
    fn each_probe_has_a_unique_name_and_covers_requirements_of_runtimes() {
        let mut names = HashSet::new();
        for probe in probes() {
            assert!(names.insert(probe.name), "{} is not unique", probe.name);
            for id in probe.requirements {
                let known = Subject::Runtime.requirements().any(|requirement| requirement.id == *id);
                assert!(known, "{}: {id} is not a requirement of runtimes", probe.name);
            }
        }
    }

    #[test]
    fn only_additions_cover_no_requirement() {
        let additions = probes().filter(|probe| probe.is_addition()).map(|probe| probe.name);
        let known = [
            "invalid_toolset",
            "duplicate_tool_names",
            "invocation_version",
            "parallel_calls",
            "invalid_arguments_not_sent",
            "call_id_form",
            "call_id_of_the_model",
            "call_ids_across_threads",
            "mismatched_result",
            "mismatched_result_unheard",
            "invalid_callback_is_4xx",
            "callback_not_json",
            "oauth_of_an_unknown_call",
            "user_choice",
            "empty_choices",
            "view_update",
            "view_after_result",
            "thread_ancestors",
            "closing_cancels_open_calls",
            "closing_told_before_cancellations",
        ];
        assert_eq!(additions.collect::<Vec<_>>(), known);
    }

    #[test]
    fn each_requirement_of_runtimes_has_a_probe_or_a_gap() {
        let probed: HashSet<&str> = probes().flat_map(|probe| probe.requirements).copied().collect();
        for requirement in Subject::Runtime.requirements() {
            let gaps: Vec<Extent> =
                probes::GAPS.iter().filter(|gap| gap.id == requirement.id).map(|gap| gap.extent).collect();
            let is_listed = match gaps[..] {
                [] | [Extent::Part] => probed.contains(requirement.id),
                [Extent::Whole] => !probed.contains(requirement.id),
                _ => false,
            };
            assert!(is_listed, "{}", requirement.id);
        }
    }
}
