//! What the checker remembers of one thread: the lives of its calls as the world outside saw them, and how far its
//! history was read.

mod effects;
mod lives;
mod reader;
mod summary;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use rap_agent::{
    Again, Arguments, CallState, Effect, Entry, Input, Item, Limits, OnBusy, Origin, Phase, Queue, Seq,
    Speaker, Step, Write,
};
use rap_protocol::{CallId, EventId, ThreadId, Timestamp};
use serde_json::{Map, Value};

use super::disk::{Disk, Place, Row};
use super::invariants::{Broken, broken, holds, word_of_input};
use super::outside::{Word, text_in, word_of};
pub(super) use reader::TICK;
use reader::{Reader, Shown};

/// A tool that is not for threads that an event set going.
pub(super) const FOR_CLIENTS: &str = "touch";
/// How many answers in a row may be dropped by those who join.
const DROPS: u32 = 2;
/// The shortest and the longest pause before a failed question is asked again by itself.
const PAUSES: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(3600));

#[derive(Default)]
pub(super) struct Watch {
    pub(super) lives: BTreeMap<CallId, CallState>,
    /// Events that were taken.
    pub(super) events: BTreeSet<(CallId, EventId)>,
    pub(super) children: BTreeSet<ThreadId>,
    /// Calls that the runtime carries out itself.
    own: BTreeSet<CallId>,
    /// The question that is with the model: its number and the last entry that it covers.
    pub(super) asking: Option<(u64, Seq)>,
    /// The point at which the thread was last idle with nothing open.
    pub(super) rest_point: Seq,
    /// What was inherited, as it was when the thread was made.
    pub(super) heritage: Vec<Entry>,
    /// Words that were acknowledged and are held.
    pub(super) waiting: Vec<Word>,
    /// Whether somebody stopped it since it was last asked.
    pub(super) interrupted: bool,
    /// Whether its parent was told that it is not at work any more.
    pub(super) left_work: bool,
    /// Questions to the model since something came from outside.
    alone: u32,
    /// Answers in a row that somebody who joined has dropped.
    dropped: u32,
    /// The last entry that the model has answered.
    pub(super) answered: Seq,
    /// The last entry that the last summary covers.
    covered: Seq,
    /// How much the model read for its last answer, unless it sees a summary instead by now.
    read: u64,
    /// What the model was shown to make a summary for a question.
    pub(super) shown: Option<(u64, Seq)>,
    /// Whether an event set it going, or one of its ancestors.
    pub(super) of_event: bool,
    /// Time since which the model has not answered, though nobody did anything about it.
    failing: Option<Timestamp>,
    /// In which order words came that may not overtake each other.
    arrivals: BTreeMap<Word, u64>,
    queued: BTreeSet<Word>,
    last_arrival: u64,
    last_queued: u64,
    reader: Reader,
}

pub(super) fn word_in(entry: &Entry) -> Option<Word> {
    match &entry.item {
        Item::User { text, from: Speaker::User | Speaker::Parent } => word_of(text),
        Item::Assistant { text, .. } => word_of(text),
        Item::Result { content, .. } => word_of(text_in(content)),
        _ => None,
    }
}

impl Watch {
    pub(super) fn new(disk: &Disk, thread: Place) -> Watch {
        let row = &disk.threads[thread];
        let mut watch = Watch { rest_point: row.base(), ..Watch::default() };
        watch.heritage = disk.visible(thread, row.base()).into_iter().cloned().collect();
        for entry in &watch.heritage {
            if let Item::Assistant { calls, .. } = &entry.item {
                watch.reader.missing = calls.iter().map(|call| call.id.clone()).collect();
                watch.reader.seen.extend(calls.iter().map(|call| (call.id.clone(), call.name.clone())));
            } else if let Item::Result { call_id, .. } = &entry.item {
                watch.reader.missing.retain(|call| call != call_id);
            } else if let Item::Summary { covers, .. } = &entry.item {
                watch.covered = watch.covered.max(*covers);
            }
        }
        if let Phase::Asking(asking) = row.head.phase() {
            watch.asking = Some((row.head.turn(), asking.up_to));
            watch.alone = 1;
        }
        watch
    }

    pub(super) fn has_open(&self) -> bool {
        self.lives.values().any(|life| *life == CallState::Open)
    }

    fn life(&self, call: &CallId) -> Option<CallState> {
        self.lives.get(call).copied()
    }

    /// Before a commit: what the input means for the lives of the calls, and whether the step agrees.
    pub(super) fn judge(
        &mut self,
        row: &Row,
        input: &Input,
        step: &Step,
        limits: &Limits,
    ) -> Result<(), Broken> {
        let asking = self.asking;
        self.judge_last_words(input, step)?;
        let cancelled = self.live(row, input, step, limits)?;
        self.judge_turn(row, input, step)?;
        self.judge_summary(row, input, step)?;
        self.judge_effects(row, input, step, asking, cancelled)?;
        self.judge_loneliness(input, step, limits)?;
        self.judge_retry(row, input, step, limits)?;
        self.note_arrival(row, input, step);
        // A person has to resume a paused thread.
        if let Phase::Paused(_) = step.head.phase() {
            self.failing = None;
        }
        // A question that failed or was paused has had no answer that could be dropped.
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

    /// I5: an answer is taken for the current question, and stands directly behind what that covers.
    fn judge_turn(&mut self, row: &Row, input: &Input, step: &Step) -> Result<(), Broken> {
        match input {
            Input::TurnEnded { .. } | Input::Interrupt => self.dropped = 0,
            Input::UserMessage { on_busy: OnBusy::Interrupt, .. } => self.dropped = 0,
            Input::UserMessage { on_busy: OnBusy::Join, .. } => {
                let drops = step.effects.iter().any(|effect| matches!(effect, Effect::Abandon { .. }));
                self.dropped += u32::from(drops);
                holds!(self.dropped <= DROPS, "I12: {} answers in a row are dropped", self.dropped);
            }
            _ => {}
        }
        if let Some(turn) = turn_of(input) {
            let Some((_, up_to)) = self.asking.take().filter(|(current, _)| *current == turn) else {
                return broken(format!("I2: an answer to question {turn} is taken, which is not asked"));
            };
            let since = &row.entries[(up_to - row.base()) as usize..];
            let quiet = since.iter().all(|entry| matches!(entry.item, Item::Notice { .. }));
            holds!(quiet, "I5: the answer to {turn} stands behind {since:?}, which it never saw");
            match input {
                Input::TurnEnded { answer, .. } => (self.answered, self.read) = (up_to, answer.usage.input),
                Input::Summarised { .. } => self.read = 0,
                _ => {}
            }
        }
        if let Input::TurnEnded { answer, .. } = input {
            let rests = matches!(step.head.phase(), Phase::Idle | Phase::Closed) && answer.calls.is_empty();
            let released = step.writes.iter().any(|write| matches!(write, Write::Release { .. }));
            let open = self.lives.values().any(|life| *life == CallState::Open);
            if rests && !released && !open {
                self.rest_point = row.last() + 1;
            }
        }
        Ok(())
    }

    /// I12: the model is asked only so often without anything new. A question that failed does not count.
    fn judge_loneliness(&mut self, input: &Input, step: &Step, limits: &Limits) -> Result<(), Broken> {
        if matches!(input, Input::TurnFailed { .. } | Input::Summarised { .. }) {
            self.alone = self.alone.saturating_sub(1);
        }
        // Time that has passed is something from outside.
        if matches!(input, Input::TimerFired { call } if self.own.contains(call)) {
            self.alone = 0;
        }
        let news = |write: &Write| match write {
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
        let new = resumed || step.writes.iter().any(news);
        if step.effects.iter().any(|effect| matches!(effect, Effect::Ask { .. })) {
            self.alone = if new { 1 } else { self.alone + 1 };
            holds!(self.alone <= limits.turns_per_wake, "I12: the model talks to itself");
        }
        Ok(())
    }

    /// I12: a failed question is asked again by itself, for so long since a person last had a hand in it.
    fn judge_retry(&mut self, row: &Row, input: &Input, step: &Step, limits: &Limits) -> Result<(), Broken> {
        match input {
            Input::TurnEnded { .. } | Input::Summarised { .. } | Input::Interrupt | Input::Resume => {
                self.failing = None
            }
            Input::UserMessage { .. } if matches!(row.head.phase(), Phase::Failed { .. }) => {
                self.failing = None
            }
            Input::TurnFailed { again, .. } => {
                let Some(Write::Append { entry, .. }) = step.writes.first() else {
                    return broken("LC-22: a failure is not reported".into());
                };
                let since = *self.failing.get_or_insert(entry.at);
                let failing = entry.at.since(since);
                let made = matches!(row.head.origin(), Origin::Event { .. });
                let in_time = failing < limits.failed_retry_for;
                if made && !in_time {
                    holds!(step.head.is_closed(), "I12: a thread for events fails for ever: {:?}", step.head);
                    return Ok(());
                }
                let may = in_time && (*again == Again::Later || made);
                let expected = may.then(|| entry.at.plus(failing.clamp(PAUSES.0, PAUSES.1)));
                let fits =
                    matches!(step.head.phase(), Phase::Failed { retry_at, .. } if *retry_at == expected);
                holds!(fits, "I12: failing since {since:?}: {:?}", step.head.phase());
            }
            _ => {}
        }
        Ok(())
    }

    /// I1: the order of what may not overtake each other. Results of the open batch may, and so may what is queued.
    fn note_arrival(&mut self, row: &Row, input: &Input, step: &Step) {
        let Some(word) = word_of_input(input) else { return };
        let direct = match input {
            Input::TurnEnded { .. } => true,
            Input::ToolResult { call, .. } => row.head.batch().iter().any(|open| open.id == *call),
            _ => false,
        };
        if direct {
            return;
        }
        self.arrivals.insert(word, self.arrivals.len() as u64 + 1);
        let queued = |write: &Write| matches!(write, Write::Hold { queue: Queue::Queued, .. });
        if step.writes.iter().any(queued) {
            self.queued.insert(word);
        }
    }

    /// I5: reads what is new in the history.
    pub(super) fn read(
        &mut self,
        thread: Place,
        row: &Row,
        written: &mut HashSet<Word>,
    ) -> Result<(), Broken> {
        holds!(self.reader.read <= row.entries.len(), "I1: t{thread} has lost entries");
        for entry in &row.entries[self.reader.read..] {
            self.reader.take(thread, entry, &self.lives)?;
            if let Some(word) = word_in(entry) {
                holds!(written.insert(word), "I2: w{word} stands twice, in t{thread} again");
                self.check_order(thread, word)?;
            }
        }
        self.reader.read = row.entries.len();
        let batch = row.head.batch().iter().map(|open| &open.id);
        let agrees = self.reader.missing.iter().eq(batch);
        let (missing, batch) = (&self.reader.missing, row.head.batch());
        holds!(agrees, "I5: the history of t{thread} lacks {missing:?}, the head waits for {batch:?}");
        let waits = matches!(row.head.phase(), Phase::Waiting { .. });
        holds!(
            waits != missing.is_empty(),
            "I5: t{thread} is {:?}, {missing:?} is missing",
            row.head.phase()
        );
        Ok(())
    }

    fn check_order(&mut self, thread: Place, word: Word) -> Result<(), Broken> {
        let Some(arrival) = self.arrivals.get(&word).copied() else { return Ok(()) };
        let last = if self.queued.contains(&word) { &mut self.last_queued } else { &mut self.last_arrival };
        holds!(arrival > *last, "I1: w{word} of t{thread} was overtaken");
        *last = arrival;
        Ok(())
    }

    /// I4: the calls that are stored are those that the head knows, and live as the world saw them live.
    pub(super) fn look_at_calls(&self, thread: Place, row: &Row) -> Result<(), Broken> {
        let head = &row.head;
        let states: BTreeMap<_, _> = row.calls.iter().map(|(call, row)| (call, row.state)).collect();
        let lives: BTreeMap<_, _> = self.lives.iter().map(|(call, life)| (call, *life)).collect();
        holds!(states == lives, "I8: calls of t{thread} are {states:?}, not {lives:?}");
        let open: BTreeSet<_> = head.open_calls().map(|open| &open.id).collect();
        let count = head.open_calls().count();
        let stored: BTreeSet<_> = in_state(row, CallState::Open);
        holds!(
            open == stored && count == stored.len(),
            "I4: t{thread} stores {stored:?} as open, not {open:?}"
        );
        let active: BTreeSet<_> = head.subscriptions().iter().map(|subscription| &subscription.id).collect();
        let stored = in_state(row, CallState::Subscribed);
        holds!(active == stored, "I10: t{thread} stores {stored:?} as active, not {active:?}");
        let known = head.questions().iter().map(|question| (question.no, &question.call, question.answered));
        let asked = row.questions.iter().map(|(no, row)| (*no, &row.call, row.selected.is_some()));
        holds!(known.eq(asked), "I4: t{thread} stores other questions than {:?}", head.questions());
        let voiceless = head.questions().iter().find(|question| !open.contains(&question.call));
        holds!(voiceless.is_none(), "I8: a settled call of t{thread} asks: {voiceless:?}");
        let children: BTreeSet<_> = head.children().cloned().collect();
        holds!(children == self.children, "I9: children of t{thread}: {children:?} {:?}", self.children);
        Ok(())
    }

    /// I6: at rest, the history shows of every call what became of it.
    pub(super) fn look_at_results(&self, thread: Place, row: &Row) -> Result<(), Broken> {
        for (call, row) in &row.calls {
            let shown = self.reader.shown.get(call).copied();
            let fits = match row.state {
                CallState::Open => false,
                CallState::Returned | CallState::Subscribed | CallState::Ended => shown == Some(Shown::Real),
                CallState::Interrupted => matches!(shown, Some(Shown::Interrupted | Shown::Placeholder)),
                CallState::Failed | CallState::TimedOut => shown == Some(Shown::Error),
            };
            holds!(fits, "I6: {call} of t{thread} is {:?}, the history shows {shown:?}", row.state);
        }
        Ok(())
    }

    /// At rest, all that was said has an answer; and a thread that was made for an event has something left to do.
    pub(super) fn look_at_answers(&self, thread: Place, row: &Row) -> Result<(), Broken> {
        let last = row.entries.iter().rev().find(|entry| !matches!(entry.item, Item::Notice { .. }));
        let answered = match last.map(|entry| &entry.item) {
            Some(Item::Assistant { calls, .. }) => calls.is_empty(),
            Some(_) => false,
            None => true,
        };
        holds!(answered, "I1: t{thread} is idle and has not answered {last:?}");
        let busy = !row.head.subscriptions().is_empty() || row.head.children().next().is_some();
        let made = matches!(row.head.origin(), Origin::Event { .. });
        holds!(!made || busy, "I12: t{thread} was made for an event and is not closed: {:?}", row.head);
        Ok(())
    }
}

/// The question that an input is about.
pub(super) fn turn_of(input: &Input) -> Option<u64> {
    match input {
        Input::TurnEnded { turn, .. }
        | Input::TurnFailed { turn, .. }
        | Input::PromptTooLong { turn, .. }
        | Input::Summarised { turn, .. } => Some(*turn),
        _ => None,
    }
}

/// What a call in an entry is called with.
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
