//! Summaries: what the model worker does when a question is too long.

use rap_agent::{Ignored, Message, Usage};

use super::{Asked, Reply, World};
use crate::sim::disk::Place;
use crate::sim::fault::Fault;
use crate::sim::invariants::Broken;

/// What every summary begins with.
pub const SUMMARY: &str = "much was said";

const USAGE: Usage = Usage { input: 10, output: 5, cached: 0 };

impl World {
    /// A question is too long: the model is shown what a summary would cover, and the answer is still to come.
    pub fn begin_summary(&mut self, mut asked: Asked) {
        let row = &self.disk.threads[asked.thread];
        let all = self.fault == Fault::SummarisesAll;
        asked.summary = if all { Some(row.last()) } else { row.head.coverable() };
        let Asked { thread, turn, summary, .. } = asked;
        self.note(|| format!("t{thread} is to be summarised to {summary:?} for turn {turn}"));
        if let Some(covers) = summary {
            self.show(thread, covers);
        }
        self.memory.asks.push(asked);
    }

    /// The model gives a summary.
    pub fn summarise(&mut self, asked: Asked, text: String) -> Result<(), Broken> {
        let Asked { thread, turn, summary, .. } = asked;
        self.checker.summarises(thread, turn, summary);
        let summarised = Message::Summarised { turn, text, usage: USAGE };
        if self.offer(thread, summarised, None)? == Reply::Refused(Ignored::StaleTurn) {
            self.offer(thread, Message::Spent(USAGE), None)?;
        }
        Ok(())
    }

    /// No summary could be made; people are told, what it cost is counted, and the question is asked as it is.
    pub fn do_without_summary(&mut self, mut asked: Asked, cost: bool) -> Result<(), Broken> {
        let thread = asked.thread;
        asked.summary = None;
        self.memory.asks.push(asked);
        if cost {
            self.offer(thread, Message::Spent(USAGE), None)?;
        }
        self.tell(thread, "no summary could be made")
    }

    /// Something that people should know.
    fn tell(&mut self, thread: Place, text: &str) -> Result<(), Broken> {
        self.offer(thread, Message::Noted { text: text.into() }, None).map(drop)
    }
}
