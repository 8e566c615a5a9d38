//! Questions to the model: at least once each. Nothing is locked while the model thinks.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use rap_agent::{Again, Answer, Cause, Entry, Head, Input, PlannedCall, Seq};
use rap_protocol::retry::{Attempt, Next, Outcome, Patience, after_attempt};

use super::plan::{Caller, plan};
use super::run::Settlement;
use super::show::show;
use super::summary::{Asked, Long, size};
use super::{Engine, built_in};
use crate::hub::Live;
use crate::model::{self, ModelCall, Offered, Question, Wants};
use crate::settings::{Agent, Rights, Settings};
use crate::store::{self, AskWork, Message, Target, Thread};
use crate::toolsets::SessionTools;

/// The first and the longest pause between two attempts to ask.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));
/// How long arguments may take to be checked.
const CHECK_WITHIN: Duration = Duration::from_secs(5);

/// Why a question has no answer.
pub(super) enum Failure {
    Model(model::Error),
    Store(store::Error),
}

impl From<store::Error> for Failure {
    fn from(error: store::Error) -> Self {
        Failure::Store(error)
    }
}

impl Engine {
    /// Asks once.
    pub(super) async fn ask(&self, work: &AskWork) -> Settlement {
        let AskWork { thread, turn, .. } = work;
        let within = self.settings.limits.model_timeout;
        let number = work.attempts.saturating_add(1);
        let apply = |input| Settlement::Apply(Box::new(Message::new(Target::Key(thread.key), input)));
        let (why, retry_after) = match tokio::time::timeout(within, self.ask_once(work, number)).await {
            Ok(Ok(input)) => return apply(input),
            Ok(Err(Failure::Model(model::Error::TooLong { why }))) => {
                return apply(Input::PromptTooLong { turn: *turn, why });
            }
            Ok(Err(Failure::Model(model::Error::Refused { why }))) => {
                return apply(Input::TurnFailed { turn: *turn, why, again: Again::No });
            }
            Ok(Err(Failure::Model(model::Error::Retry { why, retry_after }))) => (why, retry_after),
            // The model has nothing to do with it, and that it failed could not be written either.
            Ok(Err(Failure::Store(error @ (store::Error::Unavailable(_) | store::Error::Closed)))) => {
                return Settlement::StoreFailed(error);
            }
            Ok(Err(Failure::Store(error))) => {
                let why = error.with_sources();
                return apply(Input::TurnFailed { turn: *turn, why, again: Again::No });
            }
            Err(_) => (format!("no answer within {within:?}"), None),
        };
        tracing::warn!(thread = %thread.id, turn, attempt = number, why, "the model could not be asked");
        let now = self.now();
        let attempt = Attempt { number, since: now, now, dice: self.world.random.next() as u32 };
        let patience = Patience {
            first_pause: PAUSES.0,
            longest_pause: PAUSES.1,
            give_up_after: Duration::from_secs(24 * 3600),
            attempts: self.settings.limits.model_attempts,
        };
        match after_attempt(Outcome::Answered { status: 503, retry_after }, attempt, &patience) {
            Next::Again { at } => {
                let pause = at.since(now);
                let text = format!("the model could not be asked: {why}; trying again in {pause:.1?}");
                self.hub.tell(thread.key, Live::Notice { thread: thread.id.clone(), text: text.into() });
                Settlement::Again { at, attempts: number, outcome: why }
            }
            _ => apply(Input::TurnFailed { turn: *turn, why, again: Again::Later }),
        }
    }

    async fn ask_once(&self, work: &AskWork, attempt: u32) -> Result<Input, Failure> {
        let AskWork { thread, head, turn, up_to, .. } = work;
        let (turn, up_to) = (*turn, *up_to);
        let agent = self.agent(&thread.agent)?;
        let (tools, news) = self.toolsets.session(&*self.store, thread.session).await?;
        for text in news {
            // It is for people; without it the question is the same.
            self.insist(thread.key, Input::Notice { text }).await.ok();
        }
        let cause = self.store.cause(thread).await?;
        let asked = self.asked(agent);
        let question = Question {
            system: agent.system.clone(),
            entries: self.entries(thread, up_to, &asked).await?,
            tools: self.offer_tools(thread, agent, cause, &tools, head),
            turn,
            images: asked.images,
        };
        let size = size(&asked, head, up_to, &question);
        let long = Long { thread, turn, agent, asked, head, size };
        // A summary that could not be made is not tried again for the same question, unless there is no other way.
        if attempt == 1
            && let Some(summary) = self.make_room(&long).await?
        {
            return Ok(summary);
        }
        let mut timed = self.metrics.asking();
        let mut on_delta = |text: &str| {
            timed.said_something();
            if self.hub.is_heard() {
                self.hub.tell(thread.key, Live::Delta { turn, attempt, text: text.into() });
            }
        };
        let answer = asked.model.ask(question, &mut on_delta).await;
        let answer = match timed.ended(answer) {
            Err(model::Error::TooLong { why }) => return self.after_too_long(&long, why).await,
            answer => answer.map_err(Failure::Model)?,
        };
        let caller = Caller { rights: agent.rights(cause), now: self.now() };
        let mut calls = self.planned(answer.calls, caller, Arc::clone(&tools)).await;
        show(&mut calls, &tools, self.world.blocking).await;
        let answer = Answer { text: answer.text, calls, thoughts: answer.thoughts, usage: answer.usage };
        Ok(Input::TurnEnded { turn, answer })
    }

    /// The model of an agent.
    fn asked<'a>(&'a self, agent: &'a Agent) -> Asked<'a> {
        match &agent.model {
            Some(own) => Asked { model: &*own.model, images: own.images, window: own.window },
            None => {
                let Settings { model, images, window, .. } = &self.settings;
                Asked { model: &**model, images: *images, window: *window }
            }
        }
    }

    /// Checking arguments against a schema that refers to its own parts can take very long. It is done beside other work and
    /// within a time; beyond it the tool is not called any more.
    async fn planned(
        &self,
        calls: Vec<ModelCall>,
        caller: Caller,
        tools: Arc<SessionTools>,
    ) -> Vec<PlannedCall> {
        let intricate: Vec<&str> =
            calls.iter().map(|call| call.name.as_str()).filter(|name| tools.is_intricate(name)).collect();
        if intricate.is_empty() {
            return plan(calls, &caller, &tools, &HashSet::new());
        }
        let unchecked = self.toolsets.unchecked(&tools, &intricate);
        let (own_calls, own_caller, own_tools) = (calls.clone(), caller.clone(), Arc::clone(&tools));
        let own_unchecked = unchecked.clone();
        let work = self.world.blocking.run(move || plan(own_calls, &own_caller, &own_tools, &own_unchecked));
        if let Ok(Some(planned)) = tokio::time::timeout(CHECK_WITHIN, work).await {
            return planned;
        }
        tracing::error!(
            tools = ?intricate,
            "the schema of a tool takes too long to check; it is not called until the next start"
        );
        let unchecked = self.toolsets.give_up_checking(&tools, &intricate);
        plan(calls, &caller, &tools, &unchecked)
    }

    /// What the model may call. Only what closes the thread depends on what the thread is doing.
    fn offer_tools(
        &self,
        thread: &Thread,
        agent: &Agent,
        cause: Cause,
        tools: &SessionTools,
        head: &Head,
    ) -> Arc<[Offered]> {
        let child = thread.parent.is_some();
        let kind = (agent.name.clone(), cause, child);
        let offer = tools.offer_to(kind, || offered(&agent.rights(cause), tools, child));
        if head.subscriptions().is_empty() {
            return offer;
        }
        let mut offer = offer.to_vec();
        if let Some(last) = offer.last_mut() {
            *last = built_in::close_thread(head.subscriptions());
        }
        offer.into()
    }

    /// Another agent may have other tools, so none stands in for one that is gone.
    fn agent(&self, name: &str) -> Result<&Agent, Failure> {
        let found = self.settings.agents.iter().find(|agent| agent.name == name);
        let why = || format!("there is no agent `{name}` in the configuration any more");
        found.ok_or_else(|| Failure::Model(model::Error::Refused { why: why() }))
    }

    async fn entries(
        &self,
        thread: &Arc<Thread>,
        up_to: Seq,
        asked: &Asked<'_>,
    ) -> Result<Vec<Entry>, store::Error> {
        match asked.model.wants() {
            Wants::Nothing => Ok(Vec::new()),
            Wants::SinceLastUser if asked.window.tokens.is_none() => {
                self.store.entries_since_user(thread, up_to).await
            }
            _ => self.store.prompt_entries(thread, up_to).await,
        }
    }
}

/// What the model may call: the tools of the servers, and the runtime's own.
fn offered(rights: &Rights, tools: &SessionTools, has_parent: bool) -> Arc<[Offered]> {
    let remote = tools.offered().filter(|tool| rights.may_use(tool.name.as_str())).map(|tool| Offered {
        name: tool.name.as_str().to_owned(),
        description: tool.description.clone(),
        schema: tool.input_schema.clone(),
    });
    remote.chain(built_in::offered(has_parent)).chain([built_in::close_thread(&[])]).collect()
}
