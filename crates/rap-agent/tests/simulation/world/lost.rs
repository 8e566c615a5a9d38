//! Lost calls: the sweep over calls that were acknowledged long ago.

use rap_agent::{Doubt, Message, OpenCall, Verdict, Whereabouts};
use rap_protocol::{CallId, Timestamp};

use super::World;
use crate::sim::disk::Place;
use crate::sim::fault::Fault;
use crate::sim::invariants::Broken;

/// A tool server is asked after a call, and says something.
#[derive(Debug, Clone)]
pub struct Query {
    pub thread: Place,
    pub call: CallId,
    doubt: Doubt,
    said: Whereabouts,
}

impl World {
    /// Calls that their servers have, and when those are to be asked about them, unless they are being asked.
    pub fn doubtful(&self) -> Vec<(Place, CallId, Timestamp)> {
        let asked =
            |query: &Query, thread: Place, call: &CallId| query.thread == thread && query.call == *call;
        let mut doubtful = Vec::new();
        for (thread, row) in self.disk.threads.iter().enumerate() {
            for OpenCall { id, .. } in row.head.open_calls() {
                if let Some(doubt) = row.calls[id].acknowledged
                    && !self.memory.queries.iter().any(|query| asked(query, thread, id))
                {
                    doubtful.push((thread, id.clone(), doubt.due(self.lost_after)));
                }
            }
        }
        doubtful
    }

    /// A server is asked after a call.
    pub fn ask_after(&mut self, thread: Place, call: CallId, said: Whereabouts) -> Result<(), Broken> {
        let Some(doubt) = self.disk.threads[thread].calls[&call].acknowledged else { return Ok(()) };
        self.note(|| format!("t{thread} {call} is asked after: {said:?}"));
        self.checker.asked_after(thread, &call, self.now)?;
        self.memory.queries.push(Query { thread, call, doubt, said });
        Ok(())
    }

    /// Its answer is here.
    pub fn hear(&mut self, query: Query) -> Result<(), Broken> {
        let Query { thread, call, doubt, said } = query;
        self.checker.heard(thread, &call, said, self.now);
        let believes = self.fault == Fault::BelievesAtOnce && said == Whereabouts::Gone;
        match doubt.hear(said, self.now, self.lost_after) {
            Verdict::Open(doubt) if !believes => {
                let row = self.disk.threads[thread].calls.get_mut(&call);
                if let Some(row) = row.filter(|_| self.fault != Fault::ForgetsDoubts) {
                    row.acknowledged = Some(doubt);
                    self.checker.noted(thread, &call, self.now);
                }
            }
            _ => _ = self.offer(thread, Message::lost(call), None)?,
        }
        Ok(())
    }
}
