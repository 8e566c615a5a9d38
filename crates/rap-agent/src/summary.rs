//! Long conversations: a summary stands for what the model has answered before. Nothing is deleted.

use crate::step::Stepping;
use crate::{Ignored, Item, Usage, words};

/// The longest summary, in bytes; of a longer one the beginning is kept.
const SUMMARY_BYTES: usize = 64 * 1024;

impl Stepping<'_> {
    /// The summary is written, and the question is asked again with it. That is not the model talking to itself.
    pub(crate) fn summarise(&mut self, mut text: String, usage: Usage) -> Result<(), Ignored> {
        let covers = self.head.coverable().ok_or(Ignored::Duplicate)?;
        self.head.usage.add(usage);
        self.head.failing_since = None;
        self.head.summarised = covers;
        self.head.read = 0;
        text.truncate(text.floor_char_boundary(SUMMARY_BYTES));
        text.push_str(&words::still_open(&self.head));
        self.append(Item::Summary { text, covers });
        self.head.turns_awake = self.head.turns_awake.saturating_sub(1);
        self.ask();
        Ok(())
    }
}
