//! Checks which entries a summary covers, and its content.

use std::collections::BTreeSet;

use rap_agent::{CallState, Entry, Head, Input, Item, Origin, Step, Write};
use rap_protocol::ThreadId;

use super::ThreadTracker;
use crate::simulation::invariants::{Violation, ensure, violation};
use crate::simulation::reference::{Row, ThreadIndex, is_answer};

/// Maximum length of a summary in bytes, including the list of open calls that the runtime appends.
const MAX_SUMMARY_BYTES: usize = 66 * 1024;

impl ThreadTracker {
    /// I16: a summary can cover all entries that the model has answered, inherited ones included.
    pub(in crate::simulation) fn check_coverage(
        &self,
        thread: ThreadIndex,
        head: &Head,
    ) -> Result<(), Violation> {
        let may = (self.answered > self.covered).then_some(self.answered);
        let can = head.summarisable_up_to();
        ensure!(can == may, "I16: a summary of t{thread} can cover {can:?} instead of {may:?}");
        let (read, known) = (self.prompt_tokens, head.prompt_tokens());
        ensure!(read == known, "I16: the model read {read} tokens in t{thread}, the head says {known}");
        Ok(())
    }

    /// I16: a summary covers whole batches and only entries that the model has answered. It names all open calls, active
    /// subscriptions and children.
    pub(super) fn check_summary(&mut self, row: &Row, input: &Input, step: &Step) -> Result<(), Violation> {
        let Input::Summarised { turn, .. } = input else { return Ok(()) };
        let Some(Write::Append { entry: Entry { item: Item::Summary { text, covers }, .. }, .. }) =
            step.writes.first()
        else {
            return violation("I16: the step writes no summary".into());
        };
        ensure!(*covers > self.covered, "I16: the entries up to {covers} are covered twice");
        self.covered = *covers;
        let shown = self.summary_prompt.take().filter(|(of, _)| of == turn);
        let all = shown.is_none_or(|(_, shown)| shown == *covers);
        ensure!(all, "I16: a summary covers the entries up to {covers}, but its prompt had {shown:?}");
        ensure!(text.len() <= MAX_SUMMARY_BYTES, "I12: a summary has {} bytes", text.len());
        let all: Vec<&Entry> = self.inherited.iter().chain(&row.entries).collect();
        let (covered, rest) = all.split_at(*covers as usize);
        let mut open = BTreeSet::new();
        for entry in covered {
            match &entry.item {
                Item::Assistant { calls, .. } => open.extend(calls.iter().map(|call| &call.id)),
                Item::Result { call_id, .. } => _ = open.remove(call_id),
                _ => {}
            }
        }
        ensure!(open.is_empty(), "I16: a summary covers {open:?} without their results");
        let next = rest.iter().find(|entry| !matches!(entry.item, Item::Notice { .. }));
        let answers = next.is_some_and(|entry| is_answer(&entry.item));
        // All entries that an event child inherits were answered.
        let event_child = matches!(row.head.origin(), Origin::Event { .. });
        let answered = answers || event_child && *covers == row.base();
        ensure!(
            answered,
            "I16: a summary up to {covers} covers unanswered entries, the next entry is {next:?}"
        );
        let call_states = self.call_states.iter();
        let alive = call_states
            .filter(|(_, call_state)| matches!(call_state, CallState::Open | CallState::Subscribed));
        let names = alive.map(|(call, _)| call.as_str()).chain(self.children.iter().map(ThreadId::as_str));
        let unnamed = names.into_iter().find(|name| !text.contains(&format!("\n- {name}")));
        ensure!(unnamed.is_none(), "I16: {unnamed:?} is open and not in the summary {text:?}");
        Ok(())
    }
}
