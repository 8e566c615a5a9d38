//! Long conversations: a summary replaces what the model has answered before. Nothing is deleted.

use crate::step::{Stepping, Wake};
use crate::{Ignored, Item, Usage, words};

/// Bound of a summary in bytes; the beginning of a longer one is kept.
const SUMMARY_BYTES: usize = 64 * 1024;

impl Stepping<'_> {
    /// Writes the summary and asks the question again with it. That is not the model talking to itself.
    pub(crate) fn summarise(&mut self, mut text: String, usage: Usage) -> Result<(), Ignored> {
        let covers = self.head.coverable().ok_or(Ignored::Duplicate)?;
        self.add_usage(usage);
        self.failing_since = None;
        self.head.summarised = covers;
        self.head.prompt_tokens = 0;
        text.truncate(text.floor_char_boundary(SUMMARY_BYTES));
        text.push_str(&words::still_open(&self.head));
        self.append(Item::Summary { text, covers });
        self.head.turns_awake = self.head.turns_awake.saturating_sub(1);
        self.ask(Wake::Continue);
        Ok(())
    }
}
