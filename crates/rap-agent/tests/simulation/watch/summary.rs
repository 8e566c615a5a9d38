//! What a summary may cover, and what it has to say.

use std::collections::BTreeSet;

use rap_agent::{CallState, Entry, Item, Message, Step, Write};
use rap_protocol::ThreadId;

use super::Watch;
use crate::sim::disk::Row;
use crate::sim::invariants::{Broken, broken, holds};

impl Watch {
    /// I5: a summary covers whole batches and nothing that the model has not answered; it names all that is open.
    pub(super) fn judge_summary(&mut self, row: &Row, message: &Message, step: &Step) -> Result<(), Broken> {
        let Message::Summarised { .. } = message else { return Ok(()) };
        let Some(Write::Append { entry: Entry { item: Item::Summary { text, covers }, .. }, .. }) =
            step.writes.first()
        else {
            return broken("I5: there is no summary".into());
        };
        holds!(*covers > self.covered, "I2: {covers} is covered twice");
        self.covered = *covers;
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
        let answers = match next.map(|entry| &entry.item) {
            Some(Item::Assistant { calls, .. }) => !calls.iter().any(|call| call.arguments.is_synthetic()),
            _ => false,
        };
        let answered = answers || *covers == row.base();
        holds!(answered, "I1: a summary to {covers} covers what nobody has answered: {next:?}");
        let lives = self.lives.iter();
        let alive = lives.filter(|(_, life)| matches!(life, CallState::Open | CallState::Subscribed));
        let names = alive.map(|(call, _)| call.as_str()).chain(self.children.iter().map(ThreadId::as_str));
        let unnamed = names.into_iter().find(|name| !text.contains(&format!("\n- {name}")));
        holds!(unnamed.is_none(), "I10: {unnamed:?} is open and not in the summary {text:?}");
        Ok(())
    }
}
