//! Checks a runtime: plays the tool servers, the model and the user, and looks at what the runtime sends, in what order
//! and how often, and at what reaches the model.
//!
//! Every probe plays a scene of its own, most of them at the same time. What should not happen gets a fixed time to
//! happen ([`Pace::settle`]); everything else is waited for until it is there ([`Pace::patience`]).

mod crash;
mod gate;
mod model;
pub mod placeholders;
mod probes;
pub mod process;
mod scene;
mod stage;
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
pub use self::user::{Api, Say, User};

use self::crash::Crash;
use self::probes::{Check, Phase};
use self::scene::{Bench, Scene};
use self::stage::Stage;
use crate::{Outcome, Probe, Progress, Report, Subject, Verdict};

/// How many scenes are played at a time.
const SCENES: usize = 24;
/// How often a runtime is spoken to that is not there yet.
const CALL_AGAIN: Duration = Duration::from_secs(2);
/// How much of an answer is read, in bytes.
const ANSWER_BYTES: usize = 1024 * 1024;

/// How long the checker waits.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// For what should come.
    pub patience: Duration,
    /// For what should not.
    pub settle: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Pace { patience: Duration::from_secs(30), settle: Duration::from_secs(3) }
    }
}

/// Why nothing could be checked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No port for the tool servers and the model.
    #[error("can not listen for the runtime: {0}")]
    Listen(#[source] io::Error),
    /// No directory for the runtime's files.
    #[error("can not write the runtime's files: {0}")]
    Directory(#[source] io::Error),
    /// A command that makes no sense.
    #[error(transparent)]
    Placeholder(#[from] placeholders::Error),
    /// The template can not be read.
    #[error("can not read the template {path}: {error}")]
    Template {
        /// Where it should be.
        path: String,
        /// What the system said.
        error: io::Error,
    },
    /// The command can not be run.
    #[error("can not start the runtime: {0}")]
    Start(#[source] io::Error),
    /// It started and ended.
    #[error("the runtime ended ({status}) before it listened:\n{log}")]
    Ended {
        /// How.
        status: String,
        /// What it wrote.
        log: String,
    },
    /// It started and does not listen.
    #[error("the runtime does not listen on {address}:\n{log}")]
    Silent {
        /// Where it should.
        address: String,
        /// What it wrote.
        log: String,
    },
    /// The model was not asked.
    #[error("{0}")]
    NoContact(String),
}

/// What [`Host::restart`] gives.
pub type Restarted<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + Send + 'a>>;

/// All probes of a runtime.
pub fn probes() -> impl Iterator<Item = &'static Probe> {
    probes::all().map(|check| &check.probe)
}

/// Who can kill the runtime.
pub trait Host: Send + Sync {
    /// Ends the runtime without warning, as a power failure does, and starts it again where it was.
    fn restart(&self) -> Restarted<'_>;
}

/// The tool servers and the model, before anything is checked.
pub struct Checker {
    stage: Arc<Stage>,
    http: Client,
}

impl Checker {
    /// Listens. `public` is the URL under which the runtime reaches the listener, where that is not its address.
    pub async fn listen(listener: TcpListener, public: Option<&str>, pace: Pace) -> Result<Checker, Error> {
        let (run, token) = (random_word(6), Secret::new(random_word(24)));
        let stage = Stage::open(listener, public, run, token, pace).await.map_err(Error::Listen)?;
        let limits =
            ClientLimits { total: pace.patience, drain_bytes: ANSWER_BYTES, ..ClientLimits::default() };
        Ok(Checker { stage, http: Client::new(UrlPolicy::Local, limits) })
    }

    /// What the placeholders of these names stand for.
    pub fn values(&self) -> Vec<(&'static str, String)> {
        let stage = &self.stage;
        vec![
            ("tool_url", stage.tool_url(0)),
            ("tool_url_2", stage.tool_url(1)),
            ("tool_url_3", stage.tool_url(2)),
            ("tool_token", stage.token.expose().to_owned()),
            ("model_url", stage.model_url()),
            ("model_key", "rapcheck".to_owned()),
        ]
    }

    /// Somebody is about to start the runtime: speaks to it again and again until it listens. A command does not say
    /// whether it was heard; then the runtime has to ask for tools.
    pub async fn wait_for_contact(&self, user: &User) {
        let bench = Bench::new(Arc::clone(&self.stage), user.clone(), self.http.clone());
        loop {
            let scene = bench.scene(None);
            let heard = scene.open(scene.note()).await.is_ok() && matches!(user, User::Api(_));
            if heard || self.stage.discoveries(tools::MAIN) > 0 {
                return;
            }
            tokio::time::sleep(CALL_AGAIN).await;
        }
    }

    /// Makes the first contact, plays all scenes and reports. Without a host nothing is killed.
    pub async fn run(
        &self,
        target: &str,
        user: User,
        host: Option<&dyn Host>,
        progress: &(dyn Fn(Progress<'_>) + Sync),
    ) -> Result<Report, Error> {
        let bench = Bench::new(Arc::clone(&self.stage), user, self.http.clone());
        self.meet(&bench).await?;
        let mut report = Report::new(Subject::Runtime, target, probes::UNOBSERVABLE);
        let play = Play { bench, host, progress };
        for phase in [Phase::Alone, Phase::Together, Phase::Crash, Phase::Last] {
            for outcome in play.phase(phase).await {
                report.add(outcome);
            }
        }
        Ok(report)
    }

    /// The runtime asks for tools and asks the model, or nothing can be checked.
    async fn meet(&self, bench: &Arc<Bench>) -> Result<(), Error> {
        let scene = bench.scene(None);
        let met = async {
            let mark = scene.note();
            scene.open(mark).await?;
            scene.heard(&self.stage.written(mark)).await
        };
        let why = match met.await {
            Ok(_) if self.stage.discoveries(tools::MAIN) > 0 => return Ok(()),
            Ok(_) => format!("it never asked {} for its tools", self.stage.tool_url(tools::MAIN)),
            Err(Verdict::Fail { what, .. }) => what,
            Err(Verdict::NotObservable { why }) => why,
            Err(Verdict::Pass) => "of no known reason".to_owned(),
        };
        Err(Error::NoContact(format!(
            "a message to the runtime did not reach the model at {}: {why}",
            self.stage.model_url()
        )))
    }
}

/// A run.
struct Play<'a> {
    bench: Arc<Bench>,
    host: Option<&'a dyn Host>,
    progress: &'a (dyn Fn(Progress<'_>) + Sync),
}

impl Play<'_> {
    async fn phase(&self, phase: Phase) -> Vec<Outcome> {
        let checks = probes::all().enumerate().filter(|(_, check)| check.phase == phase);
        let places = match phase {
            Phase::Alone | Phase::Last => 1,
            Phase::Together => SCENES,
            Phase::Crash => return self.crash(checks.collect()).await,
        };
        let played = checks.map(|(at, check)| self.play(at, check, None));
        let mut outcomes: Vec<_> = stream::iter(played).buffer_unordered(places).collect().await;
        outcomes.sort_by_key(|(at, _)| *at);
        outcomes.into_iter().map(|(_, outcome)| outcome).collect()
    }

    async fn crash(&self, checks: Vec<(usize, &'static Check)>) -> Vec<Outcome> {
        let Some(host) = self.host else {
            let why =
                "the checker did not start the runtime and can not kill it; give its command behind `--`";
            let verdict = || Verdict::not_observable(why);
            let hidden = |(_, check): &(usize, &'static Check)| Outcome {
                probe: &check.probe,
                verdict: verdict(),
                took: Duration::ZERO,
            };
            return checks
                .iter()
                .map(hidden)
                .inspect(|outcome| (self.progress)(Progress::Done(outcome)))
                .collect();
        };
        let crash = Arc::new(Crash::of(checks.len()));
        let played: FuturesUnordered<_> =
            checks.into_iter().map(|(at, check)| self.play(at, check, Some(Arc::clone(&crash)))).collect();
        let (mut outcomes, ()) = tokio::join!(played.collect::<Vec<_>>(), crash.happen(host));
        outcomes.sort_by_key(|(at, _)| *at);
        outcomes.into_iter().map(|(_, outcome)| outcome).collect()
    }

    async fn play(&self, at: usize, check: &'static Check, crash: Option<Arc<Crash>>) -> (usize, Outcome) {
        let (probe, of) = (&check.probe, probes::all().count());
        (self.progress)(Progress::Begins { probe, number: at + 1, of });
        let began = Instant::now();
        let scene: Scene = self.bench.scene(crash);
        let verdict = match (check.run)(scene).await {
            Ok(()) => Verdict::Pass,
            Err(verdict) => self.hidden(verdict),
        };
        let outcome = Outcome { probe, verdict, took: began.elapsed() };
        (self.progress)(Progress::Done(&outcome));
        (at, outcome)
    }

    /// The tool servers' token is nobody's business.
    fn hidden(&self, verdict: Verdict) -> Verdict {
        match verdict {
            Verdict::Fail { what, exchanges } => {
                let token = &self.bench.stage.token;
                Verdict::fail(what, exchanges.into_iter().map(|exchange| exchange.hide(token)).collect())
            }
            other => other,
        }
    }
}

fn random_word(length: usize) -> String {
    let mut bytes = vec![0; length];
    getrandom::fill(&mut bytes).expect("bug: the system has random bytes");
    bytes.iter().map(|byte| char::from(b'a' + byte % 26)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn each_probe_has_a_name_of_its_own_and_names_requirements_of_runtimes() {
        let mut names = HashSet::new();
        for probe in probes() {
            assert!(names.insert(probe.name), "{} is there twice", probe.name);
            for id in probe.requirements {
                let known = Subject::Runtime.requirements().any(|requirement| requirement.id == *id);
                assert!(known, "{}: {id} is no requirement of runtimes", probe.name);
            }
        }
    }

    #[test]
    fn only_what_the_specification_leaves_open_is_a_reading() {
        let readings = probes().filter(|probe| probe.requirements.is_empty()).map(|probe| probe.name);
        let known = [
            "call_id_form",
            "call_id_of_the_model",
            "call_ids_across_threads",
            "view_after_result",
            "closing_cancels_open_calls",
            "closing_told_before_cancellations",
        ];
        assert_eq!(readings.collect::<Vec<_>>(), known);
    }

    #[test]
    fn each_requirement_of_runtimes_has_a_probe_or_a_reason_why_there_is_none() {
        let probed: HashSet<&str> = probes().flat_map(|probe| probe.requirements).copied().collect();
        for requirement in Subject::Runtime.requirements() {
            let reasons = probes::UNOBSERVABLE.iter().filter(|(id, _)| *id == requirement.id).count();
            let probed = usize::from(probed.contains(requirement.id));
            assert_eq!(probed + reasons, 1, "{}: a probe or one reason", requirement.id);
        }
    }
}
