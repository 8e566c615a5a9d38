//! What a summary may cover, and what it has to say.

use std::collections::BTreeSet;

use rap_agent::{CallState, Entry, Head, Input, Item, Origin, Step, Write};
use rap_protocol::ThreadId;

use super::Watch;
use crate::simulation::disk::{Place, Row, is_answer};
use crate::simulation::invariants::{Broken, broken, holds};

/// The longest summary, with what the runtime adds of a few open calls, in bytes.
const LONGEST: usize = 66 * 1024;

impl Watch {
    /// I9: a thread can be summarised as far as the model has answered, whatever it inherits.
    pub(in crate::simulation) fn look_at_coverage(&self, thread: Place, head: &Head) -> Result<(), Broken> {
        let may = (self.answered > self.covered).then_some(self.answered);
        let can = head.coverable();
        holds!(can == may, "I9: a summary of t{thread} could cover {can:?} instead of {may:?}");
        let (read, known) = (self.read, head.prompt_tokens());
        holds!(read == known, "I9: the model read {read} tokens in t{thread}, not {known}");
        Ok(())
    }

    /// I5: a summary covers whole batches and nothing that the model has not answered; it names all that is open.
    pub(super) fn judge_summary(&mut self, row: &Row, input: &Input, step: &Step) -> Result<(), Broken> {
        let Input::Summarised { turn, .. } = input else { return Ok(()) };
        let Some(Write::Append { entry: Entry { item: Item::Summary { text, covers }, .. }, .. }) =
            step.writes.first()
        else {
            return broken("I5: there is no summary".into());
        };
        holds!(*covers > self.covered, "I2: {covers} is covered twice");
        self.covered = *covers;
        let shown = self.shown.take().filter(|(of, _)| of == turn);
        let all = shown.is_none_or(|(_, shown)| shown == *covers);
        holds!(all, "I1: a summary covers {covers}, the model was shown {shown:?}");
        holds!(text.len() <= LONGEST, "I12: a summary has {} bytes", text.len());
        let all: Vec<&Entry> = self.heritage.iter().chain(&row.entries).collect();
        let (covered, rest) = all.split_at(*covers as usize);
        let mut open = BTreeSet::new();
        for entry in covered {
            match &entry.item {
                Item::Assistant { calls, .. } => open.extend(calls.iter().map(|call| &call.id)),
                Item::Result { call_id, .. } => _ = open.remove(call_id),
                _ => {}
            }
        }
        holds!(open.is_empty(), "I5: a summary covers {open:?} without their results");
        let next = rest.iter().find(|entry| !matches!(entry.item, Item::Notice { .. }));
        let answers = next.is_some_and(|entry| is_answer(&entry.item));
        // All that a child of an event inherits was answered.
        let made = matches!(row.head.origin(), Origin::Event { .. });
        let answered = answers || made && *covers == row.base();
        holds!(answered, "I1: a summary to {covers} covers what nobody has answered: {next:?}");
        let lives = self.lives.iter();
        let alive = lives.filter(|(_, life)| matches!(life, CallState::Open | CallState::Subscribed));
        let names = alive.map(|(call, _)| call.as_str()).chain(self.children.iter().map(ThreadId::as_str));
        let unnamed = names.into_iter().find(|name| !text.contains(&format!("\n- {name}")));
        holds!(unnamed.is_none(), "I10: {unnamed:?} is open and not in the summary {text:?}");
        Ok(())
    }
}
