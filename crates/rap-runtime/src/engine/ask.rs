//! Questions to the model: at least once each. Nothing is locked while the model thinks.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use rap_agent::{Again, Answer, Cause, Entry, Head, Message, PlannedCall, Seq};
use rap_protocol::retry::{Attempt, Next, Outcome, Patience, after_attempt};

use super::plan::{Caller, UsedIds, plan};
use super::show::show;
use super::summary::{Asked, Long, is_full};
use super::{Engine, STORE_PAUSE, Source, built_in};
use crate::hub::Live;
use crate::model::{self, ModelCall, Offered, Question, Wants};
use crate::settings::{Agent, Rights, Settings};
use crate::store::{self, Thread, now, random};
use crate::toolsets::SessionTools;

/// The first and the longest pause between two attempts to ask.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));
/// How long arguments may take to be checked.
const CHECK_WITHIN: Duration = Duration::from_secs(5);

/// Why a question has no answer.
enum Failure {
    Model(model::Error),
    Store(store::Error),
}

impl Engine {
    pub(super) fn start_asking(
        self: &Arc<Self>,
        thread: &Arc<Thread>,
        turn: u64,
        up_to: Seq,
        source: Source,
    ) {
        let Some(abandoned) = self.underway.begin_ask(thread.no, turn) else { return };
        let Some(place) = self.place(&self.ask_places) else {
            self.underway.end_ask(thread.no, turn);
            return self.look_again(&self.ask_places);
        };
        let (engine, thread) = (Arc::clone(self), Arc::clone(thread));
        let ask = async move {
            let answered = tokio::select! {
                () = abandoned.cancelled() => None,
                () = engine.stop.cancelled() => None,
                message = engine.ask_if_due(&thread, turn, up_to, source) => message,
            };
            if let Some(message) = answered {
                engine.take_answer(&thread, message).await;
            }
            engine.underway.end_ask(thread.no, turn);
            drop(place);
            engine.place_is_free();
        };
        self.tasks.spawn_on(ask, &self.handle);
    }

    /// What was read from the table may have been answered since: an answer is paid for.
    async fn ask_if_due(
        &self,
        thread: &Arc<Thread>,
        turn: u64,
        up_to: Seq,
        source: Source,
    ) -> Option<Message> {
        if source != Source::Step && matches!(self.store.is_asking(thread.no, turn).await, Ok(false)) {
            return None;
        }
        Some(self.ask(thread, turn, up_to).await)
    }

    /// The answer is kept until it is on disk, or nobody waits for it any more; then only its cost counts.
    async fn take_answer(&self, thread: &Thread, message: Message) {
        let usage = match &message {
            Message::TurnEnded { answer, .. } => Some(answer.usage),
            Message::Summarised { usage, .. } => Some(*usage),
            _ => None,
        };
        match self.insist(thread.no, message).await {
            Ok(_) => {}
            Err(store::Error::Ignored(rap_agent::Ignored::StaleTurn)) => {
                if let Some(usage) = usage {
                    self.insist(thread.no, Message::Spent(usage)).await.ok();
                }
            }
            Err(error) => tracing::debug!(thread = %thread.id, %error, "an answer was not taken"),
        }
    }

    async fn ask(&self, thread: &Arc<Thread>, turn: u64, up_to: Seq) -> Message {
        let limits = &self.settings.limits;
        let patience = Patience {
            first_pause: PAUSES.0,
            longest_pause: PAUSES.1,
            give_up_after: Duration::from_secs(24 * 3600),
            attempts: limits.model_attempts,
        };
        let since = now();
        let mut number = 0;
        loop {
            number += 1;
            let asked =
                tokio::time::timeout(limits.model_timeout, self.ask_once(thread, turn, number, up_to)).await;
            let (why, retry_after) = match asked {
                Ok(Ok(message)) => return message,
                Ok(Err(Failure::Model(model::Error::Refused { why } | model::Error::TooLong { why }))) => {
                    return Message::TurnFailed { turn, why, again: Again::No };
                }
                Ok(Err(Failure::Model(model::Error::Retry { why, retry_after }))) => (why, retry_after),
                Ok(Err(Failure::Store(store::Error::Unavailable(why)))) => {
                    // The model has nothing to do with it, and that it failed could not be written either.
                    tracing::warn!(thread = %thread.id, turn, why, "the question waits for the store");
                    number -= 1;
                    tokio::time::sleep(STORE_PAUSE.1).await;
                    continue;
                }
                Ok(Err(Failure::Store(error))) => {
                    return Message::TurnFailed { turn, why: error.to_string(), again: Again::No };
                }
                Err(_) => (format!("no answer within {:?}", limits.model_timeout), None),
            };
            tracing::warn!(thread = %thread.id, turn, attempt = number, why, "the model could not be asked");
            let attempt = Attempt { number, since, now: now(), dice: random() as u32 };
            match after_attempt(Outcome::Answered { status: 503, retry_after }, attempt, &patience) {
                Next::Again { at } => {
                    let pause = at.since(now());
                    let text = format!("the model could not be asked: {why}; trying again in {pause:.1?}");
                    self.hub.tell(thread.no, Live::Notice { thread: thread.id.clone(), text: text.into() });
                    tokio::time::sleep(pause).await;
                }
                _ => return Message::TurnFailed { turn, why, again: Again::Later },
            }
        }
    }

    async fn ask_once(
        &self,
        thread: &Arc<Thread>,
        turn: u64,
        attempt: u32,
        up_to: Seq,
    ) -> Result<Message, Failure> {
        let agent = self.agent(&thread.agent)?;
        let (tools, news) = self.toolsets.session(&self.store, thread.root).await.map_err(Failure::Store)?;
        for text in news {
            // It is for people; without it the question is the same.
            self.insist(thread.no, Message::Noted { text }).await.ok();
        }
        let cause = self.store.cause(Arc::clone(thread)).await.map_err(Failure::Store)?;
        let asked = self.asked(agent);
        let head = self.store.head(thread.no).await.map_err(Failure::Store)?;
        let question = Question {
            system: agent.system.clone(),
            entries: self.entries(thread, up_to, &asked).await.map_err(Failure::Store)?,
            tools: self.offer(thread, agent, cause, &tools, &head),
            turn,
            images: asked.images,
        };
        let long = Long { thread, turn, agent, asked, head: &head };
        // One that could not be made is not tried again for the same question, unless there is no other way.
        if attempt == 1
            && is_full(&long, up_to, &question).await
            && let Some(summary) = self.summarise(&long).await.map_err(Failure::Store)?
        {
            return Ok(summary);
        }
        // A model that does not see all that the thread has made may well use an id of it again.
        let blind = asked.model.wants() != Wants::Everything && thread.source.is_some();
        let used = if blind { UsedIds::Unknown } else { UsedIds::of(&question.entries) };
        let mut timed = self.metrics.asking();
        let mut on_delta = |text: &str| {
            timed.said_something();
            if self.hub.is_heard() {
                self.hub.tell(thread.no, Live::Delta { turn, attempt, text: text.into() });
            }
        };
        let answer = asked.model.ask(question, &mut on_delta).await;
        let answer = match timed.ended(answer) {
            Err(error @ model::Error::TooLong { .. }) => {
                let summary = self.summarise(&long).await.map_err(Failure::Store)?;
                return summary.ok_or(Failure::Model(error));
            }
            answer => answer.map_err(Failure::Model)?,
        };
        let caller = Caller { thread: Arc::clone(thread), rights: agent.rights(cause) };
        let mut calls = self.planned(answer.calls, used, caller, Arc::clone(&tools)).await;
        show(&mut calls, &tools).await;
        let answer = Answer { text: answer.text, calls, thoughts: answer.thoughts, usage: answer.usage };
        Ok(Message::TurnEnded { turn, answer })
    }

    /// Which model an agent asks.
    fn asked<'a>(&'a self, agent: &'a Agent) -> Asked<'a> {
        match &agent.model {
            Some(own) => Asked { model: &own.model, images: own.images, window: own.window },
            None => {
                let Settings { model, images, window, .. } = &self.settings;
                Asked { model, images: *images, window: *window }
            }
        }
    }

    /// A schema that refers to its own parts can take longer than anybody lives, and is not ours. It is checked beside
    /// the others' work and within a time; beyond it the tool is not called any more.
    async fn planned(
        &self,
        calls: Vec<ModelCall>,
        used: UsedIds,
        caller: Caller,
        tools: Arc<SessionTools>,
    ) -> Vec<PlannedCall> {
        let intricate: Vec<&str> =
            calls.iter().map(|call| call.name.as_str()).filter(|name| tools.is_intricate(name)).collect();
        if intricate.is_empty() {
            return plan(calls, &used, &caller, &tools, &HashSet::new());
        }
        let unchecked = self.toolsets.unchecked(&tools, &intricate);
        let (own_calls, own_caller, own_tools) = (calls.clone(), caller.clone(), Arc::clone(&tools));
        let (own_used, own_unchecked) = (used.clone(), unchecked.clone());
        let work = tokio::task::spawn_blocking(move || {
            plan(own_calls, &own_used, &own_caller, &own_tools, &own_unchecked)
        });
        if let Ok(Ok(planned)) = tokio::time::timeout(CHECK_WITHIN, work).await {
            return planned;
        }
        tracing::error!(
            tools = ?intricate,
            "the schema of a tool takes too long to check; it is not called until the next start"
        );
        let unchecked = self.toolsets.give_up_checking(&tools, &intricate);
        plan(calls, &used, &caller, &tools, &unchecked)
    }

    /// What the model may call. Only what closes the thread depends on what the thread is doing.
    fn offer(
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
        if head.subscriptions.is_empty() {
            return offer;
        }
        let mut offer = offer.to_vec();
        if let Some(last) = offer.last_mut() {
            *last = built_in::close_thread(&head.subscriptions);
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
        let thread = Arc::clone(thread);
        match asked.model.wants() {
            Wants::Nothing => Ok(Vec::new()),
            Wants::SinceLastUser if asked.window.tokens.is_none() => {
                let found = self.store.since_last_user(thread, up_to).await?;
                Ok(found.into_iter().map(|(_, entry)| entry).collect())
            }
            _ => self.store.seen(thread, up_to).await,
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
