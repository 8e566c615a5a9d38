//! Long conversations: before the model's window is full, the model is asked for a summary instead of an answer.
//!
//! A summary that fails is no failure of the thread: the question is asked as it is, and the next one tries again.

use std::sync::Arc;

use rap_agent::prompt::{bytes_as_tokens, to_summarise, tokens};
use rap_agent::{Head, Message, Seq};

use super::Engine;
use crate::hub::Live;
use crate::model::{Model, Offered, Question, Wants};
use crate::settings::{Agent, Window};
use crate::store::{self, Thread};

/// No model reads less than this, in tokens: before, nobody has to be asked how much it is.
const LEAST_WINDOW: u64 = 4_096;

/// Which model is asked.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    pub(super) model: &'a Model,
    pub(super) images: bool,
    pub(super) window: Window,
}

/// A question that may be too long.
#[derive(Clone, Copy)]
pub(super) struct Long<'a> {
    pub(super) thread: &'a Arc<Thread>,
    pub(super) turn: u64,
    pub(super) agent: &'a Agent,
    pub(super) asked: Asked<'a>,
    pub(super) head: &'a Head,
}

/// Whether a question takes more of the model's window than it may, and a summary could help.
pub(super) async fn is_full(long: &Long<'_>, up_to: Seq, question: &Question) -> bool {
    let Asked { model, window, .. } = long.asked;
    if long.head.coverable().is_none() || model.wants() == Wants::Nothing {
        return false;
    }
    let (filled, share) = (filled(long.head, up_to, question), u64::from(window.summarise_at));
    let size = match window.tokens {
        Some(tokens) => Some(u64::from(tokens)),
        None if filled.saturating_mul(100) < LEAST_WINDOW * share => None,
        None => model.window().await,
    };
    size.is_some_and(|size| filled.saturating_mul(100) >= size.saturating_mul(share))
}

/// About how many tokens a question has: what the provider counted for the last one and what came since, or else all of
/// it by its bytes.
fn filled(head: &Head, up_to: Seq, question: &Question) -> u64 {
    let entries = &question.entries;
    if head.read > 0 {
        let since = usize::try_from(up_to.saturating_sub(head.answered)).unwrap_or(usize::MAX);
        return head.read.saturating_add(tokens(&entries[entries.len().saturating_sub(since)..]));
    }
    let tool =
        |tool: &Offered| tool.name.len() + tool.description.len() + tool.schema.document().to_string().len();
    let bytes = question.system.len() + question.tools.iter().map(tool).sum::<usize>();
    tokens(entries).saturating_add(bytes_as_tokens(bytes))
}

impl Engine {
    /// A summary for a thread, instead of an answer. None if there is nothing to cover, or it could not be made.
    pub(super) async fn summarise(&self, long: &Long<'_>) -> Result<Option<Message>, store::Error> {
        let Long { thread, turn, agent, asked, head } = *long;
        let Some(covers) = head.coverable() else { return Ok(None) };
        let text = "the conversation is long; a summary of it is made".into();
        self.hub.tell(thread.no, Live::Notice { thread: thread.id.clone(), text });
        let entries = to_summarise(self.store.seen(Arc::clone(thread), covers).await?);
        let system = agent.system.clone();
        let question = Question { system, entries, tools: Arc::new([]), turn, images: false };
        let timed = self.metrics.asking();
        let why = match timed.ended(asked.model.ask(question, &mut |_| {}).await) {
            Ok(answer) if !answer.text.trim().is_empty() => {
                return Ok(Some(Message::Summarised { turn, text: answer.text, usage: answer.usage }));
            }
            Ok(answer) => {
                self.insist(thread.no, Message::Spent(answer.usage)).await.ok();
                "it is empty".to_owned()
            }
            Err(error) => error.to_string(),
        };
        tracing::warn!(thread = %thread.id, turn, why, "no summary could be made");
        let text =
            format!("no summary of this long conversation could be made: {why}; it will be tried again");
        // It is for people; without it the question is the same.
        self.insist(thread.no, Message::Noted { text }).await.ok();
        Ok(None)
    }
}
