//! What the checker remembers of one thread: the lives of its calls as the world outside saw them, and how far its
//! history was read.

mod effects;
mod lives;
mod reader;
mod summary;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use rap_agent::{
    Again, Amounts, Arguments, CallState, Effect, Entry, Item, Limits, Message, OnBusy, Origin, Phase, Queue,
    Seq, Speaker, Step, Usage, Write,
};
use rap_protocol::{CallId, EventId, ThreadId, Timestamp};
use serde_json::{Map, Value};

use super::disk::{Disk, Place, Row};
use super::invariants::{Broken, broken, holds, word_of_message};
use super::outside::{Word, text_in, word_of};
use reader::{Reader, Shown};

/// What the model hears when a schedule begins.
pub const SCHEDULED: &str = "scheduled";
/// A tool that is not for threads that an event set going.
pub const FOR_CLIENTS: &str = "touch";
/// How many answers in a row may be dropped by those who join.
const DROPS: u32 = 2;
/// The shortest and the longest pause before a failed question is asked again by itself.
const PAUSES: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(3600));

#[derive(Default)]
pub struct Watch {
    pub lives: BTreeMap<CallId, CallState>,
    /// Events that were taken.
    pub events: BTreeSet<(CallId, EventId)>,
    pub children: BTreeSet<ThreadId>,
    /// Calls that the runtime carries out itself.
    own: BTreeSet<CallId>,
    /// The question that is with the model: its number and the last entry that it covers.
    pub asking: Option<(u64, Seq)>,
    /// Where the thread last came to rest with nothing open.
    pub rest_point: Seq,
    /// What was inherited, as it was at birth.
    pub heritage: Vec<Entry>,
    /// Words that were acknowledged and are held.
    pub waiting: Vec<Word>,
    /// Whether somebody stopped it since it was last asked.
    pub interrupted: bool,
    /// What the last message cost.
    pub spent: Vec<Amounts>,
    /// Questions to the model since something came from outside.
    alone: u32,
    /// Answers in a row that somebody who joined has dropped.
    dropped: u32,
    /// What the model has answered.
    pub answered: Seq,
    /// What the last summary covers that the thread sees.
    covered: Seq,
    /// How much the model read for its last answer, unless it sees a summary instead by now.
    read: u64,
    /// What the model was shown to make a summary for a question.
    pub shown: Option<(u64, Seq)>,
    /// Whether an event set it going, or one of its ancestors.
    pub of_event: bool,
    /// When what its server says of a call was last written down, and when that said that nobody works on it, as often
    /// as it said nothing else.
    pub heard: BTreeMap<CallId, Timestamp>,
    pub gone: BTreeMap<CallId, Vec<Timestamp>>,
    /// Since when the model has not answered, though nobody did anything about it.
    failing: Option<Timestamp>,
    /// In which order words came that may not overtake each other.
    arrivals: BTreeMap<Word, u64>,
    queued: BTreeSet<Word>,
    last_arrival: u64,
    last_queued: u64,
    reader: Reader,
}

/// Whether it is something that the model said.
pub fn is_answer(item: &Item) -> bool {
    match item {
        Item::Assistant { calls, .. } => !calls.iter().any(|call| call.arguments.is_synthetic()),
        _ => false,
    }
}

pub fn word_in(entry: &Entry) -> Option<Word> {
    match &entry.item {
        Item::User { text, from: Speaker::User | Speaker::Parent } => word_of(text),
        Item::Assistant { text, .. } => word_of(text),
        Item::Result { content, .. } => word_of(text_in(content)),
        _ => None,
    }
}

impl Watch {
    pub fn new(disk: &Disk, thread: Place) -> Watch {
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
        if let Phase::Asking { up_to } = row.head.phase {
            watch.asking = Some((row.head.turn, up_to));
            watch.alone = 1;
        }
        watch
    }

    pub fn has_open(&self) -> bool {
        self.lives.values().any(|life| *life == CallState::Open)
    }

    fn life(&self, call: &CallId) -> Option<CallState> {
        self.lives.get(call).copied()
    }

    /// Before a commit: what the message means for the lives of the calls, and whether the step agrees.
    pub fn judge(
        &mut self,
        row: &Row,
        message: &Message,
        step: &Step,
        limits: &Limits,
    ) -> Result<(), Broken> {
        let asking = self.asking;
        self.judge_last_words(message, step)?;
        let cancelled = self.live(row, message, step, limits)?;
        self.judge_turn(row, message, step)?;
        self.judge_summary(row, message, step)?;
        self.judge_effects(row, message, step, asking, cancelled)?;
        self.judge_loneliness(message, step, limits)?;
        self.judge_retry(row, message, step, limits)?;
        self.note_arrival(row, message, step);
        if step.head.phase == Phase::Idle {
            self.interrupted |= matches!(message, Message::Interrupt);
        } else {
            self.interrupted = false;
        }
        Ok(())
    }

    /// I5: an answer is taken for the current question, and stands directly behind what that covers.
    fn judge_turn(&mut self, row: &Row, message: &Message, step: &Step) -> Result<(), Broken> {
        match message {
            Message::TurnEnded { .. } | Message::Interrupt => self.dropped = 0,
            Message::Said { on_busy: OnBusy::Interrupt, .. } => self.dropped = 0,
            Message::Said { on_busy: OnBusy::Join, .. } => {
                let drops = step.effects.iter().any(|effect| matches!(effect, Effect::Abandon { .. }));
                self.dropped += u32::from(drops);
                holds!(self.dropped <= DROPS, "I12: {} answers in a row are dropped", self.dropped);
            }
            _ => {}
        }
        if let Message::TurnEnded { turn, .. }
        | Message::TurnFailed { turn, .. }
        | Message::Summarised { turn, .. }
        | Message::OverBudget { turn, .. } = message
        {
            let Some((_, up_to)) = self.asking.take().filter(|(current, _)| current == turn) else {
                return broken(format!("I2: an answer to question {turn} is taken, which is not asked"));
            };
            let since = &row.entries[(up_to - row.base()) as usize..];
            let quiet = since.iter().all(|entry| matches!(entry.item, Item::Notice { .. }));
            holds!(quiet, "I5: the answer to {turn} stands behind {since:?}, which it never saw");
            match message {
                Message::TurnEnded { answer, .. } => (self.answered, self.read) = (up_to, answer.usage.input),
                Message::Summarised { .. } => self.read = 0,
                _ => {}
            }
        }
        if let Message::TurnEnded { answer, .. } = message {
            let rests = matches!(step.head.phase, Phase::Idle | Phase::Closed) && answer.calls.is_empty();
            let released = step.writes.iter().any(|write| matches!(write, Write::Release { .. }));
            let open = self.lives.values().any(|life| *life == CallState::Open);
            if rests && !released && !open {
                self.rest_point = row.last() + 1;
            }
        }
        Ok(())
    }

    /// I12: the model is asked so often without anything new, and no oftener. What failed does not count.
    fn judge_loneliness(&mut self, message: &Message, step: &Step, limits: &Limits) -> Result<(), Broken> {
        if matches!(message, Message::TurnFailed { .. } | Message::Summarised { .. }) {
            self.alone = self.alone.saturating_sub(1);
        }
        // Time that has passed is something from outside.
        if matches!(message, Message::TimedOut { call } if self.own.contains(call)) {
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
        let new = matches!(message, Message::Resume) || step.writes.iter().any(news);
        if step.effects.iter().any(|effect| matches!(effect, Effect::Ask { .. })) {
            self.alone = if new { 1 } else { self.alone + 1 };
            holds!(self.alone <= limits.turns_per_wake, "I12: the model talks to itself");
        }
        self.count_costs(message, step, new);
        let pauses = step.writes.iter().any(|write| match write {
            Write::Append { entry, .. } => {
                matches!(&entry.item, Item::Notice { text } if text.starts_with("paused"))
            }
            _ => false,
        });
        let bored = !new && self.alone >= limits.turns_per_wake;
        holds!(!pauses || bored, "I12: it pauses after {} turns alone", self.alone);
        Ok(())
    }

    /// What a message costs: a question, one about something new, and the first of each child; and what the model read
    /// and wrote.
    fn count_costs(&mut self, message: &Message, step: &Step, new: bool) {
        let usage = match message {
            Message::TurnEnded { answer, .. } => answer.usage,
            Message::Summarised { usage, .. } | Message::Spent(usage) => *usage,
            _ => Usage::default(),
        };
        let asks = step.effects.iter().any(|effect| matches!(effect, Effect::Ask { .. }));
        let again = !new && matches!(message, Message::Due | Message::Summarised { .. });
        let born = step.writes.iter().filter(|write| matches!(write, Write::Born { .. })).count();
        let own = Amounts {
            turns: u64::from(asks),
            tokens: usage.input + usage.output,
            wakes: u64::from(asks && self.alone == 1 && !again),
        };
        self.spent = vec![own];
        self.spent.resize(1 + born, Amounts { turns: 1, tokens: 0, wakes: 1 });
    }

    /// I12: a failed question is asked again by itself, for so long since a person last had a hand in it.
    fn judge_retry(
        &mut self,
        row: &Row,
        message: &Message,
        step: &Step,
        limits: &Limits,
    ) -> Result<(), Broken> {
        match message {
            Message::TurnEnded { .. } | Message::Summarised { .. } | Message::Interrupt | Message::Resume => {
                self.failing = None
            }
            Message::Said { .. } if matches!(row.head.phase, Phase::Failed { .. }) => self.failing = None,
            Message::TurnFailed { again, .. } => {
                let Some(Write::Append { entry, .. }) = step.writes.first() else {
                    return broken("LC-22: a failure is not reported".into());
                };
                let since = *self.failing.get_or_insert(entry.at);
                let failing = entry.at.since(since);
                let may = *again == Again::Later && failing < limits.failed_retry_for;
                let retry_at = may.then(|| entry.at.plus(failing.clamp(PAUSES.0, PAUSES.1)));
                let fits = matches!(step.head.phase, Phase::Failed { retry_at: at, .. } if at == retry_at);
                holds!(fits, "I12: failing since {since:?}: {:?}", step.head.phase);
            }
            _ => {}
        }
        Ok(())
    }

    /// I1: the order of what may not overtake each other. Results of the open batch may, and so may what is queued.
    fn note_arrival(&mut self, row: &Row, message: &Message, step: &Step) {
        let Some(word) = word_of_message(message) else { return };
        let direct = match message {
            Message::TurnEnded { .. } => true,
            Message::Returned { call, .. } => row.head.batch.iter().any(|open| open.id == *call),
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
    pub fn read(&mut self, thread: Place, row: &Row, written: &mut HashSet<Word>) -> Result<(), Broken> {
        holds!(self.reader.read <= row.entries.len(), "I1: t{thread} has lost entries");
        for entry in &row.entries[self.reader.read..] {
            self.reader.take(thread, entry, &self.lives)?;
            if let Some(word) = word_in(entry) {
                holds!(written.insert(word), "I2: w{word} stands twice, in t{thread} again");
                self.check_order(thread, word)?;
            }
        }
        self.reader.read = row.entries.len();
        let batch = row.head.batch.iter().map(|open| &open.id);
        let agrees = self.reader.missing.iter().eq(batch);
        let (missing, batch) = (&self.reader.missing, &row.head.batch);
        holds!(agrees, "I5: the history of t{thread} lacks {missing:?}, the head waits for {batch:?}");
        let waits = row.head.phase == Phase::Waiting;
        holds!(waits != missing.is_empty(), "I5: t{thread} is {:?}, {missing:?} is missing", row.head.phase);
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
    pub fn look_at_calls(&self, thread: Place, row: &Row) -> Result<(), Broken> {
        let head = &row.head;
        let states = row.calls.iter().map(|(call, row)| (call, &row.state));
        holds!(states.eq(&self.lives), "I8: calls of t{thread} are {:?}, not {:?}", row.calls, self.lives);
        let open: BTreeSet<_> = head.open_calls().map(|open| &open.id).collect();
        let count = head.open_calls().count();
        let stored: BTreeSet<_> = in_state(row, CallState::Open);
        holds!(
            open == stored && count == stored.len(),
            "I4: t{thread} stores {stored:?} as open, not {open:?}"
        );
        let active: BTreeSet<_> = head.subscriptions.iter().map(|subscription| &subscription.id).collect();
        let stored = in_state(row, CallState::Subscribed);
        holds!(active == stored, "I10: t{thread} stores {stored:?} as active, not {active:?}");
        let known = head.questions.iter().map(|question| (question.no, &question.call, question.answered));
        let asked = row.questions.iter().map(|(no, row)| (*no, &row.call, row.selected.is_some()));
        holds!(known.eq(asked), "I4: t{thread} stores {:?}, not {:?}", row.questions, head.questions);
        let voiceless = head.questions.iter().find(|question| !open.contains(&question.call));
        holds!(voiceless.is_none(), "I8: a settled call of t{thread} asks: {voiceless:?}");
        holds!(
            head.children.iter().cloned().collect::<BTreeSet<_>>() == self.children,
            "I9: children of t{thread}"
        );
        Ok(())
    }

    /// I6: at rest, the history shows of every call what became of it.
    pub fn look_at_results(&self, thread: Place, row: &Row) -> Result<(), Broken> {
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
    pub fn look_at_answers(&self, thread: Place, row: &Row) -> Result<(), Broken> {
        let last = row.entries.iter().rev().find(|entry| !matches!(entry.item, Item::Notice { .. }));
        let answered = match last.map(|entry| &entry.item) {
            Some(Item::Assistant { calls, .. }) => calls.is_empty(),
            Some(_) => false,
            None => true,
        };
        holds!(answered, "I1: t{thread} is idle and has not answered {last:?}");
        let busy = !row.head.subscriptions.is_empty() || !row.head.children.is_empty();
        let made = matches!(row.head.origin, Origin::Event { .. });
        holds!(!made || busy, "I12: t{thread} was made for an event and is not closed: {:?}", row.head);
        Ok(())
    }
}

/// What a call in an entry is called with.
pub fn arguments_of<'a>(entry: &'a Entry, call: &CallId) -> Option<&'a Map<String, Value>> {
    let Item::Assistant { calls, .. } = &entry.item else { return None };
    match &calls.iter().find(|entry| entry.id == *call)?.arguments {
        Arguments::Given(arguments) => Some(arguments),
        _ => None,
    }
}

fn in_state(row: &Row, state: CallState) -> BTreeSet<&CallId> {
    row.calls.iter().filter(|(_, row)| row.state == state).map(|(call, _)| call).collect()
}
