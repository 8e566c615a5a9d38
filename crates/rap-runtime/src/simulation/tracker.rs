//! The checker's own record of one thread: the states of its calls as clients and tool servers see them, and the
//! position up to which its history was read.

mod call_states;
mod effects;
mod reader;
mod summary;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use rap_agent::{
    Arguments, CallState, Effect, Entry, Input, Item, Limits, OnBusy, Origin, Phase, Queue, Seq, Speaker,
    Step, TurnRetry, Write,
};
use rap_protocol::{CallId, EventId, ThreadId, Timestamp};
use serde_json::{Map, Value};

use super::invariants::{Violation, ensure, tag_of_input, violation};
use super::peers::{Tag, tag_of, text_in};
use super::reference::{ReferenceStore, Row, ThreadIndex};
pub(super) use reader::TICK;
use reader::{Reader, ShownResult};

/// A tool that threads caused by an event may not call.
pub(super) const FOR_CLIENTS: &str = "touch";
/// Maximum number of answers in a row that joining user messages may drop.
const MAX_DROPS: u32 = 2;
/// Minimum and maximum pause before a failed model request is repeated automatically.
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(3600));

#[derive(Default)]
pub(super) struct ThreadTracker {
    pub(super) call_states: BTreeMap<CallId, CallState>,
    /// Events that were applied.
    pub(super) events: BTreeSet<(CallId, EventId)>,
    pub(super) children: BTreeSet<ThreadId>,
    /// Calls of tools that the runtime itself implements.
    runtime_calls: BTreeSet<CallId>,
    /// The current model request: its turn and the last entry that it covers.
    pub(super) asking: Option<(u64, Seq)>,
    /// The last entry when the thread was last idle without open calls.
    pub(super) settled: Seq,
    /// A copy of the inherited entries, made when the thread was created.
    pub(super) inherited: Vec<Entry>,
    /// Tags of inputs that were acknowledged and are held.
    pub(super) waiting: Vec<Tag>,
    /// True if it is idle because of an interrupt.
    pub(super) interrupted: bool,
    /// True if it has reported to its parent that it is idle.
    pub(super) reported_idle: bool,
    /// Number of model requests since the last new input.
    turns_without_input: u32,
    /// Number of answers in a row that joining user messages have dropped.
    dropped: u32,
    /// The last entry that the model has answered.
    pub(super) answered: Seq,
    /// The last entry that the last summary covers.
    covered: Seq,
    /// Number of tokens in the prompt of the last answer. 0 after a summary.
    prompt_tokens: u64,
    /// The turn of the last summary request, and the last entry in its prompt.
    pub(super) summary_prompt: Option<(u64, Seq)>,
    /// True if it, or one of its ancestors, was spawned for an event.
    pub(super) caused_by_event: bool,
    /// True if the clock was set back since the thread was created.
    pub(super) set_back: bool,
    /// Time since which model requests fail without an intervention by a person.
    failing: Option<Timestamp>,
    /// Order of arrival of inputs that may not overtake each other, by tag.
    arrivals: BTreeMap<Tag, u64>,
    queued: BTreeSet<Tag>,
    last_arrival: u64,
    last_queued: u64,
    reader: Reader,
}

pub(super) fn tag_in(entry: &Entry) -> Option<Tag> {
    match &entry.item {
        Item::User { text, from: Speaker::User | Speaker::Parent, .. } => tag_of(text),
        Item::Assistant { text, .. } => tag_of(text),
        Item::Result { content, .. } => tag_of(text_in(content)),
        _ => None,
    }
}

impl ThreadTracker {
    pub(super) fn new(reference: &ReferenceStore, thread: ThreadIndex) -> ThreadTracker {
        let row = &reference.threads[thread];
        let mut tracker = ThreadTracker { settled: row.base(), ..ThreadTracker::default() };
        tracker.inherited = reference.visible(thread, row.base()).into_iter().cloned().collect();
        for entry in &tracker.inherited {
            if let Item::Assistant { calls, .. } = &entry.item {
                tracker.reader.missing = calls.iter().map(|call| call.id.clone()).collect();
                tracker
                    .reader
                    .visible_calls
                    .extend(calls.iter().map(|call| (call.id.clone(), call.name.clone())));
            } else if let Item::Result { call_id, .. } = &entry.item {
                tracker.reader.missing.retain(|call| call != call_id);
            } else if let Item::Summary { covers, .. } = &entry.item {
                tracker.covered = tracker.covered.max(*covers);
            }
        }
        if let Phase::Asking(asking) = row.head.phase() {
            tracker.asking = Some((row.head.turn(), asking.up_to));
            tracker.turns_without_input = 1;
        }
        tracker
    }

    pub(super) fn has_open(&self) -> bool {
        self.call_states.values().any(|state| *state == CallState::Open)
    }

    fn call_state(&self, call: &CallId) -> Option<CallState> {
        self.call_states.get(call).copied()
    }

    /// Checks a step before its commit against the input and the states of the calls.
    pub(super) fn check_step(
        &mut self,
        row: &Row,
        input: &Input,
        step: &Step,
        limits: &Limits,
    ) -> Result<(), Violation> {
        let asking = self.asking;
        self.check_close_result(input, step)?;
        let cancelled = self.follow_calls(row, input, step, limits)?;
        self.check_turn(row, input, step)?;
        self.check_summary(row, input, step)?;
        self.check_effects(row, input, step, asking, cancelled)?;
        self.check_turns_per_wake(input, step, limits)?;
        self.check_retry(row, input, step, limits)?;
        self.note_arrival(row, input, step);
        // A person has to resume a paused thread.
        if let Phase::Paused(_) = step.head.phase() {
            self.failing = None;
        }
        // A failed or paused model request has no answer that could be dropped.
        if !matches!(step.head.phase(), Phase::Asking(_)) {
            self.dropped = 0;
        }
        if *step.head.phase() == Phase::Idle {
            self.interrupted |= matches!(input, Input::Interrupt);
        } else {
            self.interrupted = false;
        }
        Ok(())
    }

    /// I5: an answer belongs to the current model request and directly follows the entries that it covers.
    fn check_turn(&mut self, row: &Row, input: &Input, step: &Step) -> Result<(), Violation> {
        match input {
            Input::TurnEnded { .. } | Input::Interrupt => self.dropped = 0,
            Input::UserMessage { on_busy: OnBusy::Interrupt, .. } => self.dropped = 0,
            Input::UserMessage { on_busy: OnBusy::Join, .. } => {
                let drops = step.effects.iter().any(|effect| matches!(effect, Effect::Abandon { .. }));
                self.dropped += u32::from(drops);
                ensure!(self.dropped <= MAX_DROPS, "I12: {} answers in a row are dropped", self.dropped);
            }
            _ => {}
        }
        if let Some(turn) = turn_of(input) {
            let Some((_, up_to)) = self.asking.take().filter(|(current, _)| *current == turn) else {
                return violation(format!(
                    "I2: an answer to turn {turn} is accepted, which is not being asked"
                ));
            };
            let since = &row.entries[(up_to - row.base()) as usize..];
            let only_notices = since.iter().all(|entry| matches!(entry.item, Item::Notice { .. }));
            ensure!(
                only_notices,
                "I5: the answer to turn {turn} follows {since:?}, which its prompt did not have"
            );
            match input {
                Input::TurnEnded { answer, .. } => {
                    (self.answered, self.prompt_tokens) = (up_to, answer.usage.input)
                }
                Input::Summarised { .. } => self.prompt_tokens = 0,
                _ => {}
            }
        }
        if let Input::TurnEnded { answer, .. } = input {
            let idle = matches!(step.head.phase(), Phase::Idle | Phase::Closed) && answer.calls.is_empty();
            let released = step.writes.iter().any(|write| matches!(write, Write::Release { .. }));
            let open = self.call_states.values().any(|state| *state == CallState::Open);
            if idle && !released && !open {
                self.settled = row.last() + 1;
            }
        }
        Ok(())
    }

    /// I12: the number of model requests without new input is limited. Failed requests do not count.
    fn check_turns_per_wake(&mut self, input: &Input, step: &Step, limits: &Limits) -> Result<(), Violation> {
        if matches!(input, Input::TurnFailed { .. } | Input::Summarised { .. }) {
            self.turns_without_input = self.turns_without_input.saturating_sub(1);
        }
        // The end of a sleep counts as new input.
        if matches!(input, Input::TimerFired { call } if self.runtime_calls.contains(call)) {
            self.turns_without_input = 0;
        }
        let is_new_input = |write: &Write| match write {
            Write::Release { .. } => true,
            Write::Append { entry, .. } => match &entry.item {
                Item::User { .. } => true,
                Item::Assistant { calls, .. } => calls.iter().any(|call| call.arguments.is_synthetic()),
                _ => false,
            },
            _ => false,
        };
        let resumed = matches!(
            input,
            Input::Resume | Input::Due | Input::FromThread { message: rap_agent::ThreadMessage::Resume, .. }
        );
        let new = resumed || step.writes.iter().any(is_new_input);
        if step.effects.iter().any(|effect| matches!(effect, Effect::AskModel { .. })) {
            self.turns_without_input = if new { 1 } else { self.turns_without_input + 1 };
            ensure!(
                self.turns_without_input <= limits.turns_per_wake,
                "I12: the model is asked too often without new input"
            );
        }
        Ok(())
    }

    /// I12: a failed model request is retried automatically, for a limited time since a person last intervened.
    fn check_retry(
        &mut self,
        row: &Row,
        input: &Input,
        step: &Step,
        limits: &Limits,
    ) -> Result<(), Violation> {
        match input {
            Input::TurnEnded { .. } | Input::Summarised { .. } | Input::Interrupt | Input::Resume => {
                self.failing = None
            }
            Input::UserMessage { .. } if matches!(row.head.phase(), Phase::Failed { .. }) => {
                self.failing = None
            }
            Input::TurnFailed { retry, .. } => {
                let Some(Write::Append { entry, .. }) = step.writes.first() else {
                    return violation("LC-22: a failure is not reported".into());
                };
                // If the clock was set back, the time starts again.
                let since = self.failing.filter(|since| *since <= entry.at).unwrap_or(entry.at);
                self.failing = Some(since);
                let failing = entry.at.since(since);
                let event_child = matches!(row.head.origin(), Origin::Event { .. });
                let in_time = failing < limits.failed_retry_for;
                if event_child && !in_time {
                    ensure!(
                        step.head.is_closed(),
                        "I12: an event child keeps failing and is not closed: {:?}",
                        step.head
                    );
                    return Ok(());
                }
                let may = in_time && (*retry == TurnRetry::Later || event_child);
                let expected = may.then(|| entry.at.plus(failing.clamp(RETRY_PAUSES.0, RETRY_PAUSES.1)));
                let fits =
                    matches!(step.head.phase(), Phase::Failed { retry_at, .. } if *retry_at == expected);
                ensure!(fits, "I12: failing since {since:?}: {:?}", step.head.phase());
            }
            _ => {}
        }
        Ok(())
    }

    /// I1: records the order of inputs that may not overtake each other. Results of the open batch and queued input
    /// may.
    fn note_arrival(&mut self, row: &Row, input: &Input, step: &Step) {
        let Some(tag) = tag_of_input(input) else { return };
        let direct = match input {
            Input::TurnEnded { .. } => true,
            Input::ToolResult { call, .. } => row.head.batch().iter().any(|open| open.id == *call),
            _ => false,
        };
        if direct {
            return;
        }
        self.arrivals.insert(tag, self.arrivals.len() as u64 + 1);
        let queued = |write: &Write| matches!(write, Write::Hold { queue: Queue::UntilIdle, .. });
        if step.writes.iter().any(queued) {
            self.queued.insert(tag);
        }
    }

    /// I5: reads the new entries of the history.
    pub(super) fn read_history(
        &mut self,
        thread: ThreadIndex,
        row: &Row,
        written: &mut HashSet<Tag>,
    ) -> Result<(), Violation> {
        ensure!(self.reader.read <= row.entries.len(), "I1: t{thread} has lost entries");
        for entry in &row.entries[self.reader.read..] {
            self.reader.read_entry(thread, entry, &self.call_states)?;
            if let Some(tag) = tag_in(entry) {
                ensure!(written.insert(tag), "I2: w{tag} is written twice, the second time in t{thread}");
                self.check_order(thread, tag)?;
            }
        }
        self.reader.read = row.entries.len();
        let batch = row.head.batch().iter().map(|open| &open.id);
        let agrees = self.reader.missing.iter().eq(batch);
        let (missing, batch) = (&self.reader.missing, row.head.batch());
        ensure!(
            agrees,
            "I5: the history of t{thread} lacks results of {missing:?}, the head waits for {batch:?}"
        );
        let waits = matches!(row.head.phase(), Phase::Waiting { .. });
        ensure!(
            waits != missing.is_empty(),
            "I5: t{thread} is {:?}, results of {missing:?} are missing",
            row.head.phase()
        );
        Ok(())
    }

    fn check_order(&mut self, thread: ThreadIndex, tag: Tag) -> Result<(), Violation> {
        let Some(arrival) = self.arrivals.get(&tag).copied() else { return Ok(()) };
        let last = if self.queued.contains(&tag) { &mut self.last_queued } else { &mut self.last_arrival };
        ensure!(arrival > *last, "I1: w{tag} of t{thread} was overtaken");
        *last = arrival;
        Ok(())
    }

    /// I4: the stored calls are those of the head, and their states are those that the inputs imply.
    pub(super) fn check_calls(&self, thread: ThreadIndex, row: &Row) -> Result<(), Violation> {
        let head = &row.head;
        let states: BTreeMap<_, _> = row.calls.iter().map(|(call, row)| (call, row.state)).collect();
        let call_states: BTreeMap<_, _> =
            self.call_states.iter().map(|(call, state)| (call, *state)).collect();
        ensure!(states == call_states, "I8: calls of t{thread} are {states:?} instead of {call_states:?}");
        let open: BTreeSet<_> = head.open_calls().map(|open| &open.id).collect();
        let count = head.open_calls().count();
        let stored: BTreeSet<_> = in_state(row, CallState::Open);
        ensure!(
            open == stored && count == stored.len(),
            "I4: t{thread} stores {stored:?} as open instead of {open:?}"
        );
        let active: BTreeSet<_> = head.subscriptions().iter().map(|subscription| &subscription.id).collect();
        let stored = in_state(row, CallState::Subscribed);
        ensure!(
            active == stored,
            "I10: t{thread} stores {stored:?} as active subscriptions instead of {active:?}"
        );
        let known =
            head.questions().iter().map(|question| (question.number, &question.call, question.answered));
        let asked = row.questions.iter().map(|(number, row)| (*number, &row.call, row.selected.is_some()));
        ensure!(known.eq(asked), "I4: t{thread} stores other questions than {:?}", head.questions());
        let orphan = head.questions().iter().find(|question| !open.contains(&question.call));
        ensure!(orphan.is_none(), "I8: a settled call of t{thread} has a question: {orphan:?}");
        let children: BTreeSet<_> = head.children().cloned().collect();
        ensure!(children == self.children, "I17: children of t{thread}: {children:?} {:?}", self.children);
        Ok(())
    }

    /// I6: in an idle thread the history shows the final result of every call.
    pub(super) fn check_results(&self, thread: ThreadIndex, row: &Row) -> Result<(), Violation> {
        for (call, row) in &row.calls {
            let shown = self.reader.shown.get(call).copied();
            let fits = match row.state {
                CallState::Open => false,
                CallState::Returned | CallState::Subscribed | CallState::Ended => {
                    shown == Some(ShownResult::Real)
                }
                CallState::Interrupted => {
                    matches!(shown, Some(ShownResult::Interrupted | ShownResult::Placeholder))
                }
                CallState::Failed | CallState::TimedOut => shown == Some(ShownResult::Error),
            };
            ensure!(fits, "I6: {call} of t{thread} is {:?}, the history shows {shown:?}", row.state);
        }
        Ok(())
    }

    /// An idle thread has answered all input, and an idle event child still has a subscription or a child.
    pub(super) fn check_answered(&self, thread: ThreadIndex, row: &Row) -> Result<(), Violation> {
        let last = row.entries.iter().rev().find(|entry| !matches!(entry.item, Item::Notice { .. }));
        let answered = match last.map(|entry| &entry.item) {
            Some(Item::Assistant { calls, .. }) => calls.is_empty(),
            Some(_) => false,
            None => true,
        };
        ensure!(answered, "I1: t{thread} is idle and has not answered {last:?}");
        let busy = !row.head.subscriptions().is_empty() || row.head.children().next().is_some();
        let event_child = matches!(row.head.origin(), Origin::Event { .. });
        ensure!(
            !event_child || busy,
            "I17: event child t{thread} has nothing left to do and is not closed: {:?}",
            row.head
        );
        Ok(())
    }
}

/// Returns the turn that an input refers to.
pub(super) fn turn_of(input: &Input) -> Option<u64> {
    match input {
        Input::TurnEnded { turn, .. }
        | Input::TurnFailed { turn, .. }
        | Input::PromptTooLong { turn, .. }
        | Input::Summarised { turn, .. } => Some(*turn),
        _ => None,
    }
}

pub(super) fn arguments_of<'a>(entry: &'a Entry, call: &CallId) -> Option<&'a Map<String, Value>> {
    let Item::Assistant { calls, .. } = &entry.item else { return None };
    match &calls.iter().find(|entry| entry.id == *call)?.arguments {
        Arguments::Given(arguments) => Some(arguments),
        _ => None,
    }
}

fn in_state(row: &Row, state: CallState) -> BTreeSet<&CallId> {
    row.calls.iter().filter(|(_, row)| row.state == state).map(|(call, _)| call).collect()
}
