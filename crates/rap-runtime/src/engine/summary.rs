//! Long conversations: before the model's window is full, the model is asked for a summary instead of an answer.
//!
//! A summary that fails is no failure of the thread: the question is asked as it is, and the next one tries again.

use std::sync::Arc;

use rap_agent::prompt::{Parts, Room, Size, room, to_summarise, tokens};
use rap_agent::{Head, Input, Seq};

use super::Engine;
use super::ask::Failure;
use crate::hub::Live;
use crate::model::{self, Model, Offered, Question, Wants};
use crate::settings::{Agent, Window};
use crate::store::{self, Thread};

/// Smallest context window of any model, in tokens. Shorter prompts skip the lookup of the window.
const LEAST_WINDOW: u64 = 4_096;

/// Which model is asked.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) model: &'a dyn Model,
    pub(super) images: bool,
    pub(super) window: Window,
}

impl Asked<'_> {
    /// Number of tokens that the model can read, as configured or as its server says.
    async fn window(&self) -> Option<u64> {
        match self.window.tokens {
            Some(tokens) => Some(tokens.into()),
            None => self.model.window().await,
        }
    }
}

/// A question that may be too long.
#[derive(Clone, Copy)]
pub(super) struct Long<'a> {
    pub(super) thread: &'a Arc<Thread>,
    pub(super) turn: u64,
    pub(super) agent: &'a Agent,
    pub(super) asked: Asked<'a>,
    pub(super) head: &'a Head,
    pub(super) size: Size,
}

fn too_long(why: String) -> Failure {
    Failure::Model(model::Error::TooLong { why })
}

/// The size of a question. One to a model that reads nothing has none.
pub(super) fn size(asked: &Asked<'_>, head: &Head, up_to: Seq, question: &Question) -> Size {
    if asked.model.wants() == Wants::Nothing {
        return Size::default();
    }
    let since = usize::try_from(up_to.saturating_sub(head.answered())).unwrap_or(usize::MAX);
    let (before, since) = question.entries.split_at(question.entries.len().saturating_sub(since));
    let tool =
        |tool: &Offered| tool.name.len() + tool.description.len() + tool.schema.document().to_string().len();
    let fixed_bytes = question.system.len() + question.tools.iter().map(tool).sum::<usize>();
    Parts { fixed_bytes, before: tokens(before), since: tokens(since), read: head.prompt_tokens() }.size()
}

impl Engine {
    /// A summary, if the question takes more of the model's window than it may and a summary helps. A question that
    /// cannot fit is [`model::Error::TooLong`].
    pub(super) async fn make_room(&self, long: &Long<'_>) -> Result<Option<Input>, Failure> {
        let Long { asked, size, .. } = *long;
        let share = u64::from(asked.window.summarise_at);
        if asked.window.tokens.is_none() && size.filled.saturating_mul(100) < LEAST_WINDOW * share {
            return Ok(None);
        }
        let Some(window) = asked.window().await else { return Ok(None) };
        match room(size, window, share) {
            Room::Fits => Ok(None),
            Room::Summarise => self.summarise(long).await.map_err(Failure::Store),
            Room::CannotFit => Err(too_long(format!(
                "the prompt cannot fit: the system prompt and the tools alone have at least {} tokens, and the model \
                 can read {window}; shorten the system prompt, allow fewer tools, or correct model.window",
                size.fixed_at_least
            ))),
        }
    }

    /// A summary after the model's server refused a question for its length. If there is nothing left to cover, the
    /// error says how long the question is.
    pub(super) async fn after_too_long(&self, long: &Long<'_>, why: String) -> Result<Input, Failure> {
        if let Some(summary) = self.summarise(long).await.map_err(Failure::Store)? {
            return Ok(summary);
        }
        if long.head.coverable().is_some() {
            return Err(too_long(why));
        }
        let Size { fixed, filled, .. } = long.size;
        let window = long.asked.window().await;
        let window = window.map(|window| format!("; the model can read {window}")).unwrap_or_default();
        Err(too_long(format!(
            "the prompt cannot fit, and there is nothing left to summarise: the system prompt and the tools have about \
             {fixed} tokens, the conversation about {}{window}: {why}",
            filled.saturating_sub(fixed)
        )))
    }

    /// A summary for a thread, instead of an answer. None if there is nothing to cover, or it could not be made.
    pub(super) async fn summarise(&self, long: &Long<'_>) -> Result<Option<Input>, store::Error> {
        let Long { thread, turn, agent, asked, head, .. } = *long;
        let Some(covers) = head.coverable() else { return Ok(None) };
        let text = "the conversation is long; a summary of it is made".into();
        self.hub.tell(thread.key, Live::Notice { thread: thread.id.clone(), text });
        let entries = to_summarise(self.store.prompt_entries(thread, covers).await?);
        let system = agent.system.clone();
        let question = Question { system, entries, tools: Arc::new([]), turn, images: false };
        let timed = self.metrics.asking();
        let why = match timed.ended(asked.model.ask(question, &mut |_| {}).await) {
            Ok(answer) if !answer.text.trim().is_empty() => {
                return Ok(Some(Input::Summarised { turn, text: answer.text, usage: answer.usage }));
            }
            Ok(answer) => {
                self.insist(thread.key, Input::Spent(answer.usage)).await.ok();
                "it is empty".to_owned()
            }
            Err(error) => error.to_string(),
        };
        tracing::warn!(thread = %thread.id, turn, why, "no summary could be made");
        let text =
            format!("no summary of this long conversation could be made: {why}; it will be tried again");
        // It is for people; without it the question is the same.
        self.insist(thread.key, Input::Notice { text }).await.ok();
        Ok(None)
    }
}
