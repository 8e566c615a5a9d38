//! Requests to the model. Each is sent at least once, and no lock is held while the model answers.

use std::sync::Arc;
use std::time::Duration;

use rap_agent::{Cause, Entry, Head, Input, Seq, TurnAnswer, TurnRetry};
use rap_protocol::retry::{Attempt, Next, Outcome, RetryPolicy, after_attempt};

use super::display_texts::show;
use super::plan_calls::{CallContext, plan};
use super::run::WorkOutcome;
use super::summary::{ModelRef, TurnContext, size};
use super::{Engine, built_in};
use crate::hub::LiveEvent;
use crate::model::{self, HistoryScope, ModelRequest, OfferedTool};
use crate::settings::{Agent, Permissions, Settings};
use crate::store::{self, AskWork, Message, Target, Thread};
use crate::toolsets::SessionTools;

/// First and longest pause between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// Reason why a request has no answer.
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
    /// Makes one attempt to ask the model.
    pub(super) async fn ask(&self, work: &AskWork) -> WorkOutcome {
        let AskWork { thread, turn, .. } = work;
        let within = self.settings.limits.model_timeout;
        let number = work.attempts.saturating_add(1);
        let apply = |input| WorkOutcome::Apply(Box::new(Message::new(Target::Key(thread.key), input)));
        let (why, retry_after) = match tokio::time::timeout(within, self.ask_once(work, number)).await {
            Ok(Ok(input)) => return apply(input),
            Ok(Err(Failure::Model(model::Error::TooLong { why }))) => {
                return apply(Input::PromptTooLong { turn: *turn, why });
            }
            Ok(Err(Failure::Model(model::Error::Refused { why }))) => {
                return apply(Input::TurnFailed { turn: *turn, why, retry: TurnRetry::Never });
            }
            Ok(Err(Failure::Model(model::Error::Retry { why, retry_after }))) => (why, retry_after),
            // The model is not at fault, and a failed turn could not be stored either.
            Ok(Err(Failure::Store(error @ (store::Error::Unavailable(_) | store::Error::Closed)))) => {
                return WorkOutcome::StoreFailed(error);
            }
            Ok(Err(Failure::Store(error))) => {
                let why = error.with_sources();
                return apply(Input::TurnFailed { turn: *turn, why, retry: TurnRetry::Never });
            }
            Err(_) => (format!("no answer within {within:?}"), None),
        };
        tracing::warn!(thread = %thread.id, turn, attempt = number, why, "the model could not be asked");
        let now = self.now();
        let attempt = Attempt { number, since: now, now, jitter: self.world.random.next() as u32 };
        let retry_policy = RetryPolicy {
            first_pause: PAUSES.0,
            longest_pause: PAUSES.1,
            give_up_after: Duration::from_secs(24 * 3600),
            attempts: self.settings.limits.model_attempts,
        };
        match after_attempt(Outcome::Answered { status: 503, retry_after }, attempt, &retry_policy) {
            Next::Retry { at } => {
                let pause = at.since(now);
                let text = format!("the model could not be asked: {why}; trying again in {pause:.1?}");
                self.hub
                    .publish(thread.key, LiveEvent::Notice { thread: Arc::clone(thread), text: text.into() });
                WorkOutcome::Retry { at, attempts: number, outcome: why }
            }
            _ => apply(Input::TurnFailed { turn: *turn, why, retry: TurnRetry::Later }),
        }
    }

    async fn ask_once(&self, work: &AskWork, attempt: u32) -> Result<Input, Failure> {
        let AskWork { thread, head, turn, up_to, .. } = work;
        let (turn, up_to) = (*turn, *up_to);
        let agent = self.agent(&thread.agent)?;
        let tools = self.toolsets.discover(thread).await?;
        let cause = self.store.cause(thread).await?;
        let chosen = self.choose_model(agent);
        let request = ModelRequest {
            system: agent.system.clone(),
            entries: self.entries(thread, up_to, &chosen).await?,
            tools: self.offer_tools(thread, agent, cause, &tools, head),
            turn,
            images: chosen.images,
        };
        let size = size(&chosen, head, up_to, &request);
        let context = TurnContext { thread, turn, agent, chosen, head, size };
        // A failed summary is not repeated for the same request, unless the server refuses the request as too long.
        if attempt == 1
            && let Some(summary) = self.summarise_if_too_long(&context).await?
        {
            return Ok(summary);
        }
        let mut timer = self.metrics.start_request();
        let mut on_delta = |text: &str| {
            timer.on_first_text();
            if self.hub.has_listeners() {
                self.hub.publish(thread.key, LiveEvent::Delta { turn, attempt, text: text.into() });
            }
        };
        let answer = chosen.model.ask(request, &mut on_delta).await;
        let answer = match timer.finish(answer) {
            Err(model::Error::TooLong { why }) => return self.summarise_after_refusal(&context, why).await,
            answer => answer.map_err(Failure::Model)?,
        };
        let call_context = CallContext { permissions: agent.permissions(cause), now: self.now() };
        let mut calls = plan(answer.calls, &call_context, &tools, &self.validations).await;
        show(&mut calls, &tools, self.world.blocking).await;
        let answer = TurnAnswer { text: answer.text, calls, thoughts: answer.thoughts, usage: answer.usage };
        Ok(Input::TurnEnded { turn, answer })
    }

    /// Returns the agent's own model, or the default one.
    fn choose_model<'a>(&'a self, agent: &'a Agent) -> ModelRef<'a> {
        match &agent.model {
            Some(own) => ModelRef { model: &*own.model, images: own.images, window: own.window },
            None => {
                let Settings { model, images, window, .. } = &self.settings;
                ModelRef { model: &**model, images: *images, window: *window }
            }
        }
    }

    /// Returns the tools that the model may call. Only the description of `close_thread` depends on the state of the
    /// thread.
    fn offer_tools(
        &self,
        thread: &Thread,
        agent: &Agent,
        cause: Cause,
        tools: &SessionTools,
        head: &Head,
    ) -> Arc<[OfferedTool]> {
        let child = thread.parent.is_some();
        let kind = (agent.name.clone(), cause, child);
        let offer = tools.cached_offer(kind, || offered(&agent.permissions(cause), tools, child));
        if head.subscriptions().is_empty() {
            return offer;
        }
        let mut offer = offer.to_vec();
        if let Some(last) = offer.last_mut() {
            *last = built_in::close_thread(head.subscriptions());
        }
        offer.into()
    }

    /// Finds an agent by name. There is no fallback for a removed agent, because another one may have other tools.
    fn agent(&self, name: &str) -> Result<&Agent, Failure> {
        let found = self.settings.agents.iter().find(|agent| agent.name == name);
        let why = || format!("the agent `{name}` is no longer configured");
        found.ok_or_else(|| Failure::Model(model::Error::Refused { why: why() }))
    }

    async fn entries(
        &self,
        thread: &Arc<Thread>,
        up_to: Seq,
        chosen: &ModelRef<'_>,
    ) -> Result<Vec<Entry>, store::Error> {
        match chosen.model.history_scope() {
            HistoryScope::None => Ok(Vec::new()),
            HistoryScope::SinceLastUser if chosen.window.tokens.is_none() => {
                self.store.entries_since_user(thread, up_to).await
            }
            _ => self.store.prompt_entries(thread, up_to).await,
        }
    }
}

/// Returns the tools that the model may call: those of the tool servers, then the built-in ones.
fn offered(permissions: &Permissions, tools: &SessionTools, has_parent: bool) -> Arc<[OfferedTool]> {
    let remote =
        tools.offered().filter(|tool| permissions.may_use(tool.name.as_str())).map(|tool| OfferedTool {
            name: tool.name.as_str().to_owned(),
            description: tool.description.clone(),
            schema: tool.input_schema.clone(),
        });
    remote.chain(built_in::offered(has_parent)).chain([built_in::close_thread(&[])]).collect()
}
