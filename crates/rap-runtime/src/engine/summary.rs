//! Summaries of long conversations: before the context window is full, the model is asked for a summary instead of an
//! answer.
//!
//! A failed summary does not fail the thread. The request is sent unchanged, and the next turn tries to summarise
//! again.

use std::sync::Arc;

use rap_agent::prompt::{
    PromptFit, PromptParts, PromptSize, entries_to_summarise, estimate_tokens, prompt_fit,
};
use rap_agent::{Head, Input, Seq};

use super::Engine;
use super::ask::{Failure, UnstoredTokens};
use crate::hub::LiveEvent;
use crate::model::{self, AnswerMemory, HistoryScope, Model, ModelRequest, OfferedTool};
use crate::settings::{Agent, Window};
use crate::store::Thread;

/// Smallest context window of any model, in tokens. Shorter prompts skip the lookup of the window.
const MIN_WINDOW: u64 = 4_096;

/// The model of an agent, with its settings.
#[derive(Clone, Copy)]
pub(super) struct ModelRef<'a> {
    /// Position in the agent's list.
    pub(super) position: usize,
    pub(super) model: &'a dyn Model,
    pub(super) images: bool,
    pub(super) window: Window,
}

impl ModelRef<'_> {
    /// Number of tokens that the model can read, as configured or as its server says.
    async fn window(&self) -> Option<u64> {
        match self.window.tokens {
            Some(tokens) => Some(tokens.into()),
            None => self.model.window().await,
        }
    }
}

/// A turn whose prompt may be too long.
#[derive(Clone, Copy)]
pub(super) struct TurnContext<'a> {
    pub(super) thread: &'a Arc<Thread>,
    pub(super) turn: u64,
    pub(super) agent: &'a Agent,
    pub(super) chosen: ModelRef<'a>,
    pub(super) head: &'a Head,
    pub(super) size: PromptSize,
    /// Receives the tokens of the requests of this turn.
    pub(super) tokens: &'a UnstoredTokens,
    /// Memory of its answer.
    pub(super) memory: &'a AnswerMemory,
}

fn too_long(why: String) -> Failure {
    Failure::Model(model::Error::TooLong { why, window: None })
}

/// Estimates the size of a request. It is zero for a model that reads no history.
pub(super) fn size(chosen: &ModelRef<'_>, head: &Head, up_to: Seq, request: &ModelRequest) -> PromptSize {
    if chosen.model.history_scope() == HistoryScope::None {
        return PromptSize::default();
    }
    let since = usize::try_from(up_to.saturating_sub(head.answered_up_to())).unwrap_or(usize::MAX);
    let (before, since) = request.entries.split_at(request.entries.len().saturating_sub(since));
    let tool = |tool: &OfferedTool| tool.name.len() + tool.description.len() + tool.schema.document_bytes();
    let fixed_bytes = request.system.len() + request.tools.iter().map(tool).sum::<usize>();
    PromptParts {
        fixed_bytes,
        before: estimate_tokens(before),
        since: estimate_tokens(since),
        read: head.prompt_tokens(),
    }
    .size()
}

impl Engine {
    /// Returns a summary if the request exceeds its share of the context window and a summary helps. Returns
    /// [`model::Error::TooLong`] if the request cannot fit even then.
    pub(super) async fn summarise_if_too_long(
        &self,
        context: &TurnContext<'_>,
    ) -> Result<Option<Input>, Failure> {
        let TurnContext { chosen, size, .. } = *context;
        let share = u64::from(chosen.window.summarise_at);
        if chosen.window.tokens.is_none() && size.filled.saturating_mul(100) < MIN_WINDOW * share {
            return Ok(None);
        }
        let Some(window) = chosen.window().await else { return Ok(None) };
        match prompt_fit(size, window, share) {
            PromptFit::Fits => Ok(None),
            PromptFit::Summarise => self.summarise(context).await,
            PromptFit::CannotFit => Err(too_long(format!(
                "the prompt cannot fit: the system prompt and the tools alone have at least {} tokens, and the model \
                 can read {window}; shorten the system prompt, allow fewer tools, or correct model.window",
                size.fixed_at_least
            ))),
        }
    }

    /// Returns a summary after the model's server refused a request as too long. If there is nothing left to
    /// summarise, the error states the size of the request.
    pub(super) async fn summarise_after_refusal(
        &self,
        context: &TurnContext<'_>,
        why: String,
    ) -> Result<Input, Failure> {
        if let Some(summary) = self.summarise(context).await? {
            return Ok(summary);
        }
        if context.head.summarisable_up_to().is_some() {
            return Err(too_long(why));
        }
        let PromptSize { fixed, filled, .. } = context.size;
        let window = context.chosen.window().await;
        let window = window.map(|window| format!("; the model can read {window}")).unwrap_or_default();
        Err(too_long(format!(
            "the prompt cannot fit, and there is nothing left to summarise: the system prompt and the tools have about \
             {fixed} tokens, the conversation about {}{window}: {why}",
            filled.saturating_sub(fixed)
        )))
    }

    /// Asks the model for a summary instead of an answer. Returns `None` if there is nothing to summarise or the model
    /// fails. If its server asks for a pause, that is an error, because the whole request must not be sent before either.
    pub(super) async fn summarise(&self, context: &TurnContext<'_>) -> Result<Option<Input>, Failure> {
        let TurnContext { thread, turn, agent, chosen, head, .. } = *context;
        let Some(covers) = head.summarisable_up_to() else { return Ok(None) };
        let text = "the conversation is long; the model is asked to summarise it".into();
        self.hub.publish(thread.key, LiveEvent::Notice { thread: Arc::clone(thread), text });
        let entries = entries_to_summarise(self.store.prompt_entries(thread, covers).await?);
        let system = agent.system.clone();
        let (spent, memory) = (context.tokens.spent.clone(), context.memory.clone());
        let request =
            ModelRequest { system, entries, tools: Arc::new([]), turn, images: false, spent, memory };
        let timer = self.metrics.start_request(&agent.name, chosen.position);
        let answer = self.send_to_model(thread, &chosen, request, &mut |_| {}).await;
        if let Ok(answer) = &answer {
            self.count_tokens(&agent.name, &answer.usage);
        }
        let why = match timer.finish(answer) {
            Ok(answer) if !answer.text.trim().is_empty() => {
                context.tokens.answered.set(answer.usage);
                return Ok(Some(Input::Summarised { turn, text: answer.text, usage: answer.usage }));
            }
            Ok(answer) => {
                // The metrics have its tokens already.
                self.apply_with_retry(thread.key, Input::UnusedAnswer(answer.usage)).await.ok();
                "the summary is empty".to_owned()
            }
            Err(error @ model::Error::Retry { retry_after: Some(_), .. }) => {
                return Err(Failure::Model(error));
            }
            Err(error) => error.to_string(),
        };
        tracing::warn!(thread = %thread.id, turn, why, "the conversation could not be summarised");
        let text =
            format!("this long conversation could not be summarised: {why}; the next turn tries again");
        // The notice is only for people, so a failure to write it is ignored.
        self.apply_with_retry(thread.key, Input::Notice { text }).await.ok();
        Ok(None)
    }
}
