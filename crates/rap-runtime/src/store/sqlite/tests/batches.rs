//! Batches of messages on a connection in memory, to count their instructions.

use rap_agent::{Input, Limits, ToolResult};
use rap_io::secret_box::Key;
use rap_protocol::{CallId, Timestamp};

use super::*;
use crate::store::batch::{Applied, DisabledThreads};
use crate::store::sqlite::apply::{Applier, Context};
use crate::store::suite::fixture::{SERVER, calls, new, rules, to};
use crate::store::{Message, StepSettings};

/// Threads that call a tool in every turn, all in one batch.
pub(crate) struct Batches {
    conn: Connection,
    applier: Applier,
    rules: StepSettings,
    key: Key,
    now: Timestamp,
    threads: Vec<String>,
    turn: u64,
}

impl Batches {
    pub(crate) fn new(threads: usize, now: Timestamp) -> Batches {
        let threads: Vec<String> = (0..threads).map(|number| format!("thread{number}")).collect();
        let applier = Applier::new(DisabledThreads::default());
        let (conn, key, rules) = (database(), key(), rules(Limits::default()));
        let mut batches = Batches { conn, applier, rules, key, now, threads, turn: 1 };
        let begin: Vec<Message> = batches.threads.iter().map(|thread| new(thread, Some("hello"))).collect();
        batches.apply(&begin);
        batches
    }

    /// Applies a batch. Returns the open call of each thread.
    fn apply(&mut self, batch: &[Message]) -> Vec<Option<CallId>> {
        let Batches { conn, rules, key, now, .. } = self;
        let context = Context { conn, rules, key, now: *now };
        let applied = self.applier.apply(&context, batch).unwrap();
        let call = |applied: Applied| match applied {
            Applied::Done { committed, .. } => {
                committed.step.head.batch().first().map(|call| call.id.clone())
            }
            _ => panic!("a step was refused"),
        };
        applied.into_iter().map(call).collect()
    }

    /// Applies two batches: each thread calls a tool, and each tool returns.
    pub(crate) fn turn(&mut self) {
        let turn = self.turn;
        let asked: Vec<Message> =
            self.threads.iter().map(|thread| to(thread, calls(turn, &[SERVER]))).collect();
        let open = self.apply(&asked);
        let result = |(thread, call): (&String, Option<CallId>)| {
            let result = ToolResult::text("a result");
            to(thread, Input::ToolResult { call: call.expect("a call is open"), result })
        };
        let returned: Vec<Message> = self.threads.iter().zip(open).map(result).collect();
        self.apply(&returned);
        self.turn += 1;
    }
}
