//! Summaries of long conversations. In the prompt a summary replaces earlier entries; the history keeps them.

use crate::step::{StepBuilder, TurnReason};
use crate::{Ignored, Item, Usage, texts};

/// Maximum size of a summary in bytes. A longer one is truncated.
const SUMMARY_BYTES: usize = 64 * 1024;

impl StepBuilder<'_> {
    /// Appends the summary and starts the turn again. The repeated turn is not counted again in
    /// `turns_since_external_input`.
    pub(crate) fn summarise(&mut self, mut text: String, usage: Usage) -> Result<(), Ignored> {
        let covers = self.head.summarisable_up_to().ok_or(Ignored::Duplicate)?;
        self.add_usage(usage);
        self.failing_since = None;
        self.head.summarised_up_to = covers;
        self.head.prompt_tokens = 0;
        text.truncate(text.floor_char_boundary(SUMMARY_BYTES));
        text.push_str(&texts::still_open(&self.head));
        self.append(Item::Summary { text, covers });
        self.head.turns_since_external_input = self.head.turns_since_external_input.saturating_sub(1);
        self.ask(TurnReason::Continue);
        Ok(())
    }
}
