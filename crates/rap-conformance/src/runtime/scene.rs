//! A scene: what one probe plays with the runtime. Its number stands in every mark, so that its calls and questions
//! are told from those of the other scenes.
//!
//! A call is recognised by its mark and never by an id: the runtime chooses the ids on the wire, and those in prompts
//! may differ from them.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rap_io::client::Client;
use serde_json::{Value, json};

use super::crash::Crash;
use super::gate::Gate;
use super::model::{CANCEL_SUBSCRIPTION, ModelCall, Prompt, Question, Step};
use super::stage::{Asked, Mark, Route, SERVERS, Stage};
use super::tools::{self, Acknowledgement, Call, Conduct, MARK, Notes};
use super::user::{Answered, User};
use crate::{Exchange, Verdict};

/// What a probe found: nothing wrong, or a verdict.
pub(crate) type Seen = Result<(), Verdict>;

/// How often a thread is looked at.
const LOOK: Duration = Duration::from_millis(20);
/// How many exchanges a failure shows at most.
const EXCHANGES: usize = 6;

/// What all scenes share.
pub(crate) struct Bench {
    pub(crate) stage: Arc<Stage>,
    pub(crate) user: User,
    pub(crate) http: Client,
    /// Whoever changes what the second server offers holds this.
    pub(crate) second: tokio::sync::Mutex<()>,
}

/// One scene. Clones are the same scene.
#[derive(Clone)]
pub(crate) struct Scene {
    pub(crate) bench: Arc<Bench>,
    pub(crate) number: u32,
    pub(crate) crash: Option<Arc<Crash>>,
    steps: Arc<AtomicU32>,
    taken: Arc<AtomicUsize>,
    pub(crate) notes: Notes,
}

impl Bench {
    pub(crate) fn new(stage: Arc<Stage>, user: User, http: Client) -> Arc<Bench> {
        Arc::new(Bench { stage, user, http, second: tokio::sync::Mutex::default() })
    }

    pub(crate) fn scene(self: &Arc<Self>, crash: Option<Arc<Crash>>) -> Scene {
        Scene {
            bench: Arc::clone(self),
            number: self.stage.scenes.fetch_add(1, Ordering::Relaxed),
            crash,
            steps: Arc::default(),
            taken: Arc::default(),
            notes: Notes::default(),
        }
    }

    /// The servers that the runtime has asked for their tools.
    pub(crate) fn servers(&self) -> Vec<usize> {
        (0..SERVERS).filter(|at| self.stage.discoveries(*at) > 0).collect()
    }
}

/// The mark of one call of a step.
fn call_mark(step: &str, at: usize) -> String {
    format!("{step}_{at}")
}

/// Fails with a sentence.
pub(crate) fn wrong<T>(what: impl Into<String>, exchanges: Vec<Exchange>) -> Result<T, Verdict> {
    Err(Verdict::fail(what, exchanges))
}

impl Scene {
    pub(crate) fn stage(&self) -> &Stage {
        &self.bench.stage
    }

    /// A word that nobody else uses.
    pub(crate) fn word(&self, word: &str) -> String {
        self.stage().word(self.number, word)
    }

    /// The model will do nothing about this mark but note it.
    pub(crate) fn note(&self) -> Mark {
        self.calls(&[])
    }

    /// The model will make these calls at once.
    pub(crate) fn calls(&self, names: &[&str]) -> Mark {
        self.calls_with(&names.iter().map(|name| (*name, json!({}))).collect::<Vec<_>>())
    }

    /// The same with more arguments than the mark.
    pub(crate) fn calls_with(&self, calls: &[(&str, Value)]) -> Mark {
        self.step(|mark, step| {
            for (at, (name, more)) in calls.iter().enumerate() {
                let arguments = tools::with(json!({MARK: call_mark(mark, at)}), more.clone());
                step.calls.push(ModelCall { id: self.model_id(), name: (*name).into(), arguments });
            }
        })
    }

    /// The model will make one call and give it this id.
    pub(crate) fn call_as(&self, id: &str, name: &str) -> Mark {
        self.step(|mark, step| {
            let arguments = json!({MARK: call_mark(mark, 0)});
            step.calls.push(ModelCall { id: id.into(), name: name.into(), arguments });
        })
    }

    /// The model will cancel the subscription that it knows by this id.
    pub(crate) fn cancels(&self, subscription: &str) -> Mark {
        self.step(|_, step| {
            let arguments = json!({"tool_call_id": subscription});
            step.calls.push(ModelCall { id: self.model_id(), name: CANCEL_SUBSCRIPTION.into(), arguments });
        })
    }

    /// An id that the model can give to a call. It says nothing about the call.
    pub(crate) fn model_id(&self) -> String {
        self.stage().model_id()
    }

    pub(crate) fn step(&self, make: impl FnOnce(&str, &mut Step)) -> Mark {
        let mark = Mark { scene: self.number, step: self.steps.fetch_add(1, Ordering::Relaxed) + 1 };
        let written = self.stage().written(mark);
        let mut step = Step { text: format!("I do {written}."), ..Step::default() };
        make(&written, &mut step);
        self.stage().record().steps.insert(mark, step);
        mark
    }

    /// The mark in the arguments of the first call of a step.
    pub(crate) fn call_mark(&self, mark: Mark) -> String {
        call_mark(&self.stage().written(mark), 0)
    }

    /// The id by which the model knows a call: that of its prompts.
    pub(crate) fn known_as(&self, call: &Call) -> String {
        let told = self.questions().iter().rev().find_map(|asked| asked.call_of(call.mark()));
        told.map_or_else(|| call.id().to_owned(), |told| told.id)
    }

    /// The model's answer to a mark waits for the gate, which opens by itself when everybody has been patient.
    pub(crate) fn hold_answer(&self, mark: Mark) -> Gate {
        let gate = Gate::closed(self.stage().pace.patience);
        if let Some(step) = self.stage().record().steps.get_mut(&mark) {
            step.gate = Some(gate.clone());
        }
        gate
    }

    /// The next attempts to send the calls of a mark are answered so.
    pub(crate) fn acknowledge(&self, mark: Mark, with: impl IntoIterator<Item = Acknowledgement>) {
        self.stage().record().acknowledgements.insert(mark, with.into_iter().collect());
    }

    /// How the servers take notifications about a thread.
    pub(crate) fn conduct(&self, thread: &str, conduct: Conduct) {
        self.stage().record().conducts.insert(thread.to_owned(), conduct);
    }

    /// What is said to bring a mark.
    pub(crate) fn text(&self, mark: Mark) -> String {
        format!("Please go on with {}.", self.stage().written(mark))
    }

    /// Says it in a new thread, and gives the thread.
    pub(crate) async fn open(&self, mark: Mark) -> Result<String, Verdict> {
        let name = format!("rapcheck-{}-{}", self.number, mark.step);
        self.bench.user.open(&self.bench.http, &name, &self.text(mark)).await
    }

    pub(crate) async fn say(&self, thread: &str, mark: Mark) -> Result<(), Verdict> {
        self.bench.user.say(&self.bench.http, thread, &self.text(mark)).await
    }

    /// A POST to the client API; `what` is what it does.
    pub(crate) async fn order(&self, what: &str, path: &[&str], body: &Value) -> Result<Answered, Verdict> {
        let answered = self.bench.user.api(what)?.post(&self.bench.http, path, body).await?;
        self.notes.add(answered.exchange.clone());
        Ok(answered)
    }

    pub(crate) async fn close(&self, thread: &str) -> Result<(), Verdict> {
        self.order("close a thread", &["threads", thread, "close"], &json!({})).await?.expect(202)?;
        Ok(())
    }

    pub(crate) async fn interrupt(&self, thread: &str) -> Result<(), Verdict> {
        self.order("interrupt a thread", &["threads", thread, "interrupt"], &json!({})).await?.expect(202)?;
        Ok(())
    }

    /// Whether the user can close a thread at all.
    pub(crate) fn may_close(&self) -> Seen {
        self.bench.user.api("close a thread").map(|_| ())
    }

    /// Whether the user can interrupt a thread at all.
    pub(crate) fn may_interrupt(&self) -> Seen {
        self.bench.user.api("interrupt a thread").map(|_| ())
    }

    /// What a report shows of this scene: the last of it, in the order of time.
    pub(crate) fn story(&self) -> Vec<Exchange> {
        let mut story = self.notes.all().clone();
        story.extend(self.invocations().iter().map(|asked| (asked.at, asked.exchange())));
        story.extend(self.questions().last().map(|question| (question.at(), question.exchange())));
        story.sort_by_key(|(at, _)| *at);
        story.drain(..story.len().saturating_sub(EXCHANGES));
        story.into_iter().map(|(_, exchange)| exchange).collect()
    }

    /// Every attempt to send a call of this scene, so far.
    pub(crate) fn invocations(&self) -> Vec<Arc<Asked>> {
        self.stage().asked(|asked| asked.prompt.is_none() && asked.scene == Some(self.number))
    }

    /// Every question of this scene's threads, so far.
    pub(crate) fn questions(&self) -> Vec<Question> {
        let asked = self.stage().asked(|asked| {
            asked.scene == Some(self.number) && asked.prompt.as_ref().is_some_and(Prompt::is_turn)
        });
        asked.into_iter().filter_map(Question::of).collect()
    }

    /// Looks whenever something arrives, for as long as the run is patient.
    pub(crate) async fn until<T>(&self, what: &str, look: impl Fn() -> Option<T>) -> Result<T, Verdict> {
        let mut arrivals = self.stage().arrivals();
        let seen = async {
            loop {
                arrivals.borrow_and_update();
                if let Some(seen) = look() {
                    return seen;
                }
                if arrivals.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        let patience = self.stage().pace.patience;
        match tokio::time::timeout(patience, seen).await {
            Ok(seen) => Ok(seen),
            Err(_) => {
                let mut told = format!("{what}: not within {:.0} s", patience.as_secs_f64());
                if let User::Command(say) = &self.bench.user
                    && let Some(complaint) = say.complaint()
                {
                    told = format!("{told}; {complaint}");
                }
                wrong(told, self.story())
            }
        }
    }

    /// The next invocation that nobody has looked at.
    pub(crate) async fn call(&self) -> Result<Call, Verdict> {
        let at = self.taken.fetch_add(1, Ordering::Relaxed);
        let asked = self.until("an invocation", || self.invocations().get(at).cloned()).await?;
        Ok(Call { asked, http: self.bench.http.clone(), pace: self.stage().pace, notes: self.notes.clone() })
    }

    /// A call of a tool in a new thread, and the thread.
    pub(crate) async fn called(&self, tool: &str) -> Result<(String, Call), Verdict> {
        let thread = self.open(self.calls(&[tool])).await?;
        Ok((thread, self.call().await?))
    }

    /// A subscription in a new thread that the model knows of.
    pub(crate) async fn subscribed(&self) -> Result<(String, Call), Verdict> {
        self.subscribed_by(self.calls(&[tools::WATCH])).await
    }

    /// The same by a step of the model's.
    pub(crate) async fn subscribed_by(&self, mark: Mark) -> Result<(String, Call), Verdict> {
        let thread = self.open(mark).await?;
        let watch = self.call().await?;
        let word = self.word("watching");
        watch.confirms(&word).await?;
        self.heard(&word).await?;
        self.at_rest(&thread).await?;
        Ok((thread, watch))
    }

    /// Waits until a thread has nothing to do, where that can be seen; otherwise as long as that should take.
    pub(crate) async fn at_rest(&self, thread: &str) -> Seen {
        let User::Api(api) = &self.bench.user else {
            self.settle().await;
            return Ok(());
        };
        let began = Instant::now();
        while began.elapsed() < self.stage().pace.patience {
            if api.get(&self.bench.http, &["threads", thread]).await?["status"] == "idle" {
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
        }
        wrong("a thread whose calls have returned does not come to rest", self.story())
    }

    /// The first question whose prompt is like this.
    pub(crate) async fn question(
        &self,
        what: &str,
        is: impl Fn(&Question) -> bool,
    ) -> Result<Question, Verdict> {
        self.until(what, || self.questions().into_iter().find(&is)).await
    }

    /// The first question in which the model reads these words.
    pub(crate) async fn heard(&self, words: &str) -> Result<Question, Verdict> {
        self.question(&format!("a question that tells the model `{words}`"), |asked| asked.has(words)).await
    }

    /// Says something without consequence in a thread and gives the question that it makes: what the thread knows.
    pub(crate) async fn looked_at(&self, thread: &str) -> Result<Question, Verdict> {
        let mark = self.note();
        self.say(thread, mark).await?;
        self.heard(&self.stage().written(mark)).await
    }

    /// Whatever should not come has had its time to come.
    pub(crate) async fn settle(&self) {
        tokio::time::sleep(self.stage().pace.settle).await;
    }

    /// Nobody's model has read these words.
    pub(crate) fn never_heard(&self, words: &str, what: &str) -> Seen {
        match self.questions().into_iter().find(|asked| asked.has(words)) {
            None => Ok(()),
            Some(asked) => {
                let mut story = self.story();
                story.push(asked.exchange());
                wrong(format!("{what} reached the model"), story)
            }
        }
    }

    /// The notifications about a thread that have come, with the servers that they came to.
    pub(crate) fn told(&self, route: fn(usize) -> Route, thread: &str) -> Vec<(usize, Arc<Asked>)> {
        let of = |asked: &Asked| (0..SERVERS).find(|at| asked.route == route(*at));
        let asked = self.stage().asked(|asked| of(asked).is_some() && asked.field("thread_id") == thread);
        asked.into_iter().filter_map(|asked| Some((of(&asked)?, asked))).collect()
    }

    /// Waits until every server was told, and gives what they were told.
    pub(crate) async fn all_told(
        &self,
        route: fn(usize) -> Route,
        thread: &str,
        what: &str,
    ) -> Result<Vec<(usize, Arc<Asked>)>, Verdict> {
        let servers = self.bench.servers();
        self.until(&format!("{what} to all of the {} tool servers", servers.len()), || {
            let told = self.told(route, thread);
            let which: HashSet<usize> = told.iter().map(|(at, _)| *at).collect();
            servers.iter().all(|at| which.contains(at)).then_some(told)
        })
        .await
    }

    /// More than one server has to be configured to see this.
    pub(crate) fn several_servers(&self) -> Seen {
        match self.bench.servers().len() {
            0 | 1 => Err(Verdict::not_observable(
                "the runtime asked only one tool server for its tools; configure {tool_url}, {tool_url_2} and {tool_url_3}",
            )),
            _ => Ok(()),
        }
    }

    /// This server has to be configured to see this.
    pub(crate) fn needs(&self, server: usize) -> Seen {
        if self.stage().discoveries(server) > 0 {
            return Ok(());
        }
        Err(Verdict::not_observable(format!(
            "the runtime never asked the tool server {} for its tools; configure it too",
            ["{tool_url}", "{tool_url_2}", "{tool_url_3}"][server]
        )))
    }

    /// How long what has to be quick may take: long enough for a busy machine, shorter than anything is held back.
    pub(crate) fn hold(&self) -> Duration {
        self.stage().pace.patience / 4
    }
}
