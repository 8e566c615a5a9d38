//! Requests to the model. Each is sent at least once, and no lock is held while the model answers.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rap_agent::{Cause, Entry, Head, Input, Seq, TurnAnswer, TurnRetry, Usage};
use rap_protocol::Timestamp;
use rap_protocol::retry::{Attempt, Next, Outcome, RetryPolicy, after_attempt};

use super::display_texts::show;
use super::fallback::{FailedRequest, ModelChange, ModelList, Outages};
use super::plan_calls::{CallContext, plan};
use super::run::{LONGEST_RETRY, WorkOutcome};
use super::summary::{ModelRef, TurnContext, size};
use super::{Engine, built_in};
use crate::hub::LiveEvent;
use crate::model::{
    self, AnswerMemory, HistoryScope, ModelAnswer, ModelRequest, OfferedTool, OnDelta, Spent,
};
use crate::settings::{Agent, Permissions, Settings};
use crate::store::{self, AskWork, Message, Signal, Target, Thread, WorkKind, WorkQueue};
use crate::toolsets::SessionTools;

/// First and longest pause between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// Maximum size of the part of an answer that event streams get at once, in bytes.
const DELTA_BYTES: usize = 16 * 1024;
/// Longest pause that a model server can ask for.
const MAX_RETRY_AFTER: Duration = LONGEST_RETRY;

/// Tokens of a turn that are not stored yet. They are paid for, even if the turn is cancelled.
#[derive(Default)]
pub(super) struct UnstoredTokens {
    /// Tokens of the request in progress, as far as its server has counted them.
    pub(super) spent: Spent,
    /// Tokens of an answer that has arrived. The metrics have them already.
    pub(super) answered: Spent,
}

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
    /// Makes one attempt to ask the model at a position of the agent's list.
    pub(super) async fn ask(&self, work: &AskWork, position: usize, tokens: &UnstoredTokens) -> WorkOutcome {
        rap_io::crash::point("before_ask");
        let AskWork { thread, turn, .. } = work;
        let within = self.settings.limits.model_timeout;
        let number = work.attempts.saturating_add(1);
        let message = |input| Message::new(Target::Key(thread.key), input);
        let apply = |input| WorkOutcome::apply(message(input));
        let fail = |why, retry| apply(Input::TurnFailed { turn: *turn, why, retry });
        let began = self.now();
        let memory = self.answer_memory(thread, position);
        let asked = self.ask_once(work, number, position, (tokens, &memory));
        let asked = tokio::time::timeout(within, asked).await;
        let asked = asked.unwrap_or_else(|_| {
            Err(Failure::Model(model::Error::retry(format!("no answer within {within:?}"))))
        });
        // A request that took too long was dropped.
        if asked.is_err() {
            self.count_unstored(thread, position, tokens).await;
        }
        self.note_outcome((thread, *turn), position, began, &asked).await;
        let error = match asked {
            Ok(input) => {
                // The input has them.
                tokens.answered.take();
                return WorkOutcome::Apply(Box::new(message(input)), memory);
            }
            Err(Failure::Model(error)) => error,
            // The model is not at fault, and a failed turn could not be stored either.
            Err(Failure::Store(error @ (store::Error::Unavailable(_) | store::Error::Closed))) => {
                return WorkOutcome::StoreFailed(error);
            }
            Err(Failure::Store(error)) => {
                let why = match &error {
                    store::Error::Unreadable(_) => store::damage::reason(&error),
                    error => error.with_sources(),
                };
                return fail(why, TurnRetry::Never);
            }
        };
        tracing::warn!(thread = %thread.id, turn, attempt = number, why = %error, "the model request failed");
        match self.next_attempt((thread, *turn), number, position, &error) {
            Ok((at, attempts)) => {
                let why = error.to_string();
                self.announce_retry(thread, &why, at);
                WorkOutcome::Retry { at, attempts, outcome: why }
            }
            Err(TurnRetry::Never) if matches!(error, model::Error::TooLong { .. }) => {
                apply(Input::PromptTooLong { turn: *turn, why: error.to_string() })
            }
            Err(retry) => fail(error.to_string(), retry),
        }
    }

    /// Returns the time of the next attempt after a failure, and the number of attempts to store. The number decides
    /// from which model on the next attempt chooses.
    fn next_attempt(
        &self,
        (thread, turn): (&Thread, u64),
        number: u32,
        position: usize,
        error: &model::Error,
    ) -> Result<(Timestamp, u32), TurnRetry> {
        let now = self.now();
        let each = self.settings.limits.model_attempts;
        let list = self.model_list(thread);
        let has_next = position + 1 < list.count;
        let retry_after = match error {
            // Another model may take the request, such as one with a larger window.
            _ if has_next && !matches!(error, model::Error::Retry { .. }) => {
                let attempts = each.saturating_mul(position as u32 + 1);
                return Ok((now.plus(PAUSES.0), attempts.max(number)));
            }
            model::Error::Retry { retry_after, .. } => *retry_after,
            _ if list.count == 1 || self.outages().all_refuse(list, (thread.key, turn)) => {
                return Err(TurnRetry::Never);
            }
            // A model before this one may work again later.
            _ => return Err(TurnRetry::Later),
        };
        if number >= each.saturating_mul(list.count as u32) {
            return Err(TurnRetry::Later);
        }
        // The pauses grow with the attempts at this model.
        let earlier = each.saturating_mul(position as u32);
        let own = if number > earlier { number - earlier } else { number };
        let attempt = Attempt { number: own, since: now, now, jitter: self.world.random.next() as u32 };
        let retry_policy = RetryPolicy {
            first_pause: PAUSES.0,
            longest_pause: PAUSES.1,
            give_up_after: Duration::from_secs(24 * 3600),
            attempts: u32::MAX,
        };
        let Next::Retry { at } =
            after_attempt(Outcome::Answered { status: 503, retry_after }, attempt, &retry_policy)
        else {
            return Err(TurnRetry::Later);
        };
        let mut at = at.max(now.plus(retry_after.unwrap_or_default().min(MAX_RETRY_AFTER)));
        if has_next {
            let is_used_up = number / each > position as u32;
            let left =
                if is_used_up { Duration::ZERO } else { self.outages().passed_over_in(list, position, now) };
            at = at.min(now.plus(left.max(PAUSES.0)));
        }
        Ok((at, number))
    }

    /// Tells the people who watch a thread when the model is asked again.
    fn announce_retry(&self, thread: &Arc<Thread>, why: &str, at: Timestamp) {
        let pause = at.since(self.now());
        let clock = rap_api::Time::from_millis(at.0).to_string();
        let text =
            format!("the model request failed: {why}; retrying in {pause:.1?}, at {} UTC", &clock[11..19]);
        self.tell_peers(|| Signal::Notice { thread: thread.key, text: text.clone() });
        self.hub.publish(thread.key, LiveEvent::Notice { thread: Arc::clone(thread), text: text.into() });
    }

    /// Counts the tokens of a turn whose answer is not used.
    pub(super) async fn count_unstored(&self, thread: &Thread, position: usize, tokens: &UnstoredTokens) {
        self.count_unused(thread, position, tokens.spent.take()).await;
        let answered = tokens.answered.take();
        if answered != Usage::default() {
            self.apply_with_retry(thread.key, Input::UnusedAnswer(answered)).await.ok();
        }
    }

    /// Counts the tokens of a request without an answer. A failure to write them is ignored: the answer is lost anyway.
    async fn count_unused(&self, thread: &Thread, position: usize, usage: Usage) {
        if usage != Usage::default() {
            self.metrics.count_unused(&thread.agent, position, &usage);
            self.count_tokens(&thread.agent, &usage);
            self.apply_with_retry(thread.key, Input::UnusedAnswer(usage)).await.ok();
        }
    }

    /// Sends a request, and counts its tokens if there is no answer.
    pub(super) async fn send_to_model(
        &self,
        thread: &Thread,
        chosen: &ModelRef<'_>,
        request: ModelRequest,
        on_delta: &mut OnDelta<'_>,
    ) -> Result<ModelAnswer, model::Error> {
        let spent = request.spent.clone();
        let began = SystemTime::now();
        let answer = chosen.model.ask(request, on_delta).await;
        if let Some(telemetry) = &self.telemetry {
            telemetry.model_request(thread, chosen.model, began, &answer);
        }
        // An answer has its own count.
        let unused = spent.take();
        if answer.is_err() {
            self.count_unused(thread, chosen.position, unused).await;
        }
        answer
    }

    fn model_list<'a>(&self, thread: &'a Thread) -> ModelList<'a> {
        let agent = self.agent(&thread.agent);
        let (count, after) =
            agent.map_or((1, Duration::ZERO), |agent| (1 + agent.fallbacks.len(), agent.fallback_after));
        ModelList { agent: &thread.agent, count, after }
    }

    /// Returns the position of the model to ask in the agent's list. Each model has its number of attempts.
    pub(super) fn choose_model(&self, thread: &Thread, attempts: u32) -> usize {
        let list = self.model_list(thread);
        if list.count == 1 {
            return 0;
        }
        let first = attempts / self.settings.limits.model_attempts;
        self.outages().choose(list, thread.key, first as usize, self.now())
    }

    /// Returns the queue of a model, if its agent has several.
    pub(super) fn queue_of_model(&self, thread: &Thread, position: usize) -> Option<WorkQueue> {
        let agent = self.agent(&thread.agent).ok().filter(|agent| !agent.fallbacks.is_empty())?;
        let destination = self.model_at(agent, position).model.destination();
        Some(WorkQueue { kind: WorkKind::Ask, destination: destination.to_owned() })
    }

    /// Remembers whether a model answered, if its agent has several. A notice tells a thread which model answers, if it is
    /// not the first, and when it is the first again.
    async fn note_outcome(
        &self,
        (thread, turn): (&Arc<Thread>, u64),
        position: usize,
        began: Timestamp,
        asked: &Result<Input, Failure>,
    ) {
        let Ok(agent) = self.agent(&thread.agent) else { return };
        if agent.fallbacks.is_empty() {
            return;
        }
        let now = self.now();
        let (why, refused, retry_after) = match asked {
            Ok(_) => {
                let change = self.outages().answered(&agent.name, position, (thread.key, turn), now);
                let name = |position| self.model_at(agent, position).model.name();
                let text = match change {
                    Some(ModelChange::Replaced(why)) => format!(
                        "the first model of the agent, {}, fails ({why}); its model {}, {}, answers instead",
                        name(0),
                        position + 1,
                        name(position)
                    ),
                    Some(ModelChange::Restored) => {
                        format!("the first model of the agent, {}, answers again", name(0))
                    }
                    None => return,
                };
                // The notice is only for people, so a failure to write it is ignored.
                self.apply_with_retry(thread.key, Input::Notice { text }).await.ok();
                return;
            }
            Err(Failure::Model(model::Error::Retry { why, retry_after })) => (why, false, *retry_after),
            Err(Failure::Model(model::Error::Refused { why, every_request: true })) => (why, true, None),
            // The model may answer other requests.
            Err(Failure::Model(
                model::Error::Refused { why, every_request: false } | model::Error::TooLong { why, .. },
            )) => {
                return self.outages().refused((thread.key, turn), position, why.clone());
            }
            Err(Failure::Store(_)) => return,
        };
        let not_before = retry_after.map(|pause| now.plus(pause.min(MAX_RETRY_AFTER)));
        let failed = FailedRequest { thread: thread.key, began, why: why.clone(), refused, not_before };
        self.outages().failed(&agent.name, position, failed, now);
    }

    pub(super) fn outages(&self) -> std::sync::MutexGuard<'_, Outages> {
        self.outages.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    async fn ask_once(
        &self,
        work: &AskWork,
        attempt: u32,
        position: usize,
        (tokens, memory): (&UnstoredTokens, &AnswerMemory),
    ) -> Result<Input, Failure> {
        let AskWork { thread, head, turn, up_to, .. } = work;
        let (turn, up_to) = (*turn, *up_to);
        let agent = self.agent(&thread.agent)?;
        let tools = self.toolsets.discover(thread).await?;
        let cause = self.store.cause(thread).await?;
        let chosen = self.model_at(agent, position);
        let request = ModelRequest {
            system: agent.system.clone(),
            entries: self.entries_within(memory, thread, up_to, &chosen).await?,
            tools: self.offer_tools(thread, agent, cause, &tools, head),
            turn,
            images: chosen.images,
            spent: tokens.spent.clone(),
            memory: memory.clone(),
        };
        let size = size(&chosen, head, up_to, &request);
        let context = TurnContext { thread, turn, agent, chosen, head, size, tokens, memory };
        // A failed summary is not repeated for the same request, unless the server refuses the request as too long.
        if attempt == 1
            && let Some(summary) = self.summarise_if_too_long(&context).await?
        {
            return Ok(summary);
        }
        let mut timer = self.metrics.start_request(&agent.name, position);
        let mut on_delta = |text: &str| {
            timer.on_first_text();
            if self.hub.has_listeners() {
                for text in parts(text) {
                    self.hub.publish(thread.key, LiveEvent::Delta { turn, attempt, text: text.into() });
                }
            }
            self.tell_peers(|| Signal::Delta { thread: thread.key, turn, attempt, text: text.into() });
        };
        let answer = self.send_to_model(thread, &chosen, request, &mut on_delta).await;
        self.count_request(&thread.agent, timer.elapsed(), &answer);
        let answer = match timer.finish(answer) {
            Err(model::Error::TooLong { why, .. }) => {
                return self.summarise_after_refusal(&context, why).await;
            }
            answer => answer.map_err(Failure::Model)?,
        };
        tokens.answered.set(answer.usage);
        let call_context = CallContext { permissions: agent.permissions(cause), now: self.now() };
        let mut calls = plan(answer.calls, &call_context, &tools, &self.validations).await;
        show(&mut calls, &tools, self.world.blocking).await;
        let answer = TurnAnswer { text: answer.text, calls, thoughts: answer.thoughts, usage: answer.usage };
        Ok(Input::TurnEnded { turn, answer })
    }

    /// Returns memory for the answer of the model at a position of the agent's list.
    fn answer_memory(&self, thread: &Thread, position: usize) -> AnswerMemory {
        let agent = self.agent(&thread.agent).ok();
        let server = agent.map(|agent| self.model_at(agent, position).model.destination());
        server.map(|server| self.model_memory.of(server)).unwrap_or_default()
    }

    /// Returns a model of the agent's list, which begins with its own model, or the default one.
    fn model_at<'a>(&'a self, agent: &'a Agent, position: usize) -> ModelRef<'a> {
        let fallback = position.checked_sub(1).and_then(|position| agent.fallbacks.get(position));
        match fallback.or(agent.model.as_ref()) {
            Some(own) => ModelRef { position, model: &*own.model, images: own.images, window: own.window },
            None => {
                let Settings { model, images, window, .. } = &self.settings;
                ModelRef { position, model: &**model, images: *images, window: *window }
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
        found.ok_or_else(|| Failure::Model(model::Error::refused(why())))
    }

    /// Loads the entries of a request. If there is no memory for them, waits for it without them and loads them again.
    async fn entries_within(
        &self,
        memory: &AnswerMemory,
        thread: &Arc<Thread>,
        up_to: Seq,
        chosen: &ModelRef<'_>,
    ) -> Result<Vec<Entry>, store::Error> {
        let entries = self.entries(thread, up_to, chosen).await?;
        let bytes = model::size_of(&entries);
        if memory.take_for_request(bytes) {
            return Ok(entries);
        }
        drop(entries);
        memory.wait_for_request(bytes).await;
        self.entries(thread, up_to, chosen).await
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

/// Splits text into parts of [`DELTA_BYTES`].
fn parts(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let (part, rest) = text.split_at(text.floor_char_boundary(DELTA_BYTES));
        text = rest;
        (!part.is_empty()).then_some(part)
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_reaches_event_streams_in_small_parts() {
        let text = "ä€x".repeat(DELTA_BYTES);
        let all: Vec<&str> = parts(&text).collect();
        assert!(all.iter().all(|part| part.len() <= DELTA_BYTES));
        assert_eq!(all.concat(), text);
        assert_eq!(parts("").count(), 0);
    }
}
