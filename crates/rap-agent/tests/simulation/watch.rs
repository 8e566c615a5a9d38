//! What the checker remembers of one thread: the lives of its calls as the world outside saw them, and how far its
//! history was read.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use rap_agent::{Again, BuiltIn, OnBusy};
use rap_agent::{
    Arguments, CallEntry, CallState, Effect, Entry, Item, Letter, Limits, Message, Origin, Phase, Plan,
    Queue, Seq, Speaker, Step, Write, words,
};
use rap_protocol::{CallId, EventId, ThreadId, Timestamp};
use serde_json::{Map, Value};

use super::disk::{Disk, Place, Row};
use super::invariants::{Broken, broken, holds, word_of_message};
use super::outside::{Word, text_in, word_of};

/// What the model hears when a schedule begins.
pub const SCHEDULED: &str = "scheduled";
/// How many answers in a row may be dropped by those who join.
const DROPS: u32 = 2;

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
    /// Questions to the model since something came from outside.
    alone: u32,
    /// Answers in a row that somebody who joined has dropped.
    dropped: u32,
    /// What the last summary covers.
    covered: Seq,
    /// Since when the model has not answered, though nobody did anything about it.
    failing: Option<Timestamp>,
    /// In which order words came that may not overtake each other.
    arrivals: BTreeMap<Word, u64>,
    queued: BTreeSet<Word>,
    last_arrival: u64,
    last_queued: u64,
    reader: Reader,
}

/// How far a history was read, and what has to come next.
#[derive(Default)]
struct Reader {
    read: usize,
    /// Calls of the last assistant entry without a result.
    missing: Vec<CallId>,
    /// Every call that the thread can see, with its tool.
    seen: BTreeMap<CallId, String>,
    /// What the history shows of each call that was really made.
    shown: BTreeMap<CallId, Shown>,
    /// The synthetic call whose result comes next: its original, if it stands for a late result.
    echo: Option<(CallId, Option<CallId>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shown {
    Placeholder,
    Interrupted,
    Error,
    Real,
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

    /// I6, I8, I10: follows the lives of the calls; gives those that the servers have to be told of.
    fn live(
        &mut self,
        row: &Row,
        message: &Message,
        step: &Step,
        limits: &Limits,
    ) -> Result<Vec<CallId>, Broken> {
        let mut cancelled = Vec::new();
        match message {
            Message::Returned { call, result, .. } => {
                let subscribed = self.lives.values().filter(|life| **life == CallState::Subscribed).count();
                let late = match self.life(call) {
                    Some(CallState::Open) => false,
                    Some(CallState::Failed | CallState::TimedOut) => true,
                    life => return broken(format!("I8: a result of {call} is taken, which is {life:?}")),
                };
                let kept = result.subscription && !late && subscribed < limits.subscriptions;
                if result.subscription && !kept {
                    cancelled.push(call.clone());
                }
                let life = if kept { CallState::Subscribed } else { CallState::Returned };
                self.lives.insert(call.clone(), life);
            }
            Message::CallFailed { call, .. } => self.turn(call, CallState::Open, CallState::Failed)?,
            Message::TimedOut { call } => {
                let over = match () {
                    () if self.own.contains(call) => CallState::Returned,
                    () if row.calls[call].open.unapproved => CallState::Interrupted,
                    () => CallState::TimedOut,
                };
                self.turn(call, CallState::Open, over)?;
                let now = step.writes.iter().find_map(written_at);
                let until = row.calls[call].open.until;
                holds!(until.is_some() && now >= until, "I12: {call} times out at {now:?}, not at {until:?}");
            }
            Message::Happened { call, event, .. } => {
                let next = if event.is_final { CallState::Ended } else { CallState::Subscribed };
                self.turn(call, CallState::Subscribed, next)?;
                if let Some(id) = &event.id {
                    let new = self.events.insert((call.clone(), id.clone()));
                    holds!(new, "I2: event {id} of {call} is taken twice");
                }
            }
            Message::Ticked { call, next, .. } => {
                let next = if next.is_none() { CallState::Ended } else { CallState::Subscribed };
                self.turn(call, CallState::Subscribed, next)?;
                holds!(self.own.contains(call), "I8: {call} is no schedule");
            }
            Message::Chose { call, selected }
                if *selected != Some(words::ALLOW)
                    && row.calls.get(call).is_some_and(|row| row.open.unapproved) =>
            {
                self.turn(call, CallState::Open, CallState::Interrupted)?;
            }
            Message::WantsSignIn { call, .. } | Message::WantsChoice { call, .. } => {
                self.turn(call, CallState::Open, CallState::Open)?;
            }
            Message::Viewed { call, .. } => {
                let life = self.life(call);
                let speaks = matches!(life, Some(CallState::Open | CallState::Subscribed));
                holds!(speaks, "I8: a view of {call} is taken, which is {life:?}");
            }
            Message::Cancel { call } => {
                match self.life(call) {
                    Some(CallState::Open) => self.lives.insert(call.clone(), CallState::Interrupted),
                    Some(CallState::Subscribed) => self.lives.insert(call.clone(), CallState::Ended),
                    life => return broken(format!("I8: {call} is cancelled, which is {life:?}")),
                };
                cancelled.extend(Some(call.clone()).filter(|call| self.is_sent(row, call)));
            }
            Message::Interrupt => cancelled = self.interrupt(row),
            Message::Said { on_busy: OnBusy::Interrupt, .. }
                if matches!(row.head.phase, Phase::Asking { .. } | Phase::Waiting) =>
            {
                cancelled = self.interrupt(row);
            }
            Message::TurnEnded { answer, .. } => {
                let closes = |planned: &&rap_agent::PlannedCall| {
                    matches!(planned.plan, Plan::BuiltIn(BuiltIn::CloseThread { .. }))
                };
                for planned in answer.calls.iter().take_while(|planned| !closes(planned)) {
                    let Plan::BuiltIn(BuiltIn::CancelSubscription { tool_call_id }) = &planned.plan else {
                        continue;
                    };
                    let Ok(call) = CallId::new(tool_call_id.clone()) else { continue };
                    if self.life(&call) == Some(CallState::Subscribed) {
                        self.lives.insert(call.clone(), CallState::Ended);
                        cancelled.extend(Some(call).filter(|call| !self.own.contains(call)));
                    }
                }
            }
            Message::ChildClosed { child, .. } => {
                holds!(self.children.remove(child), "I2: {child} is closed twice");
            }
            _ => {}
        }
        for write in &step.writes {
            match write {
                Write::Open(open) => {
                    let new = self.lives.insert(open.id.clone(), CallState::Open).is_none();
                    holds!(new, "I6: call {} is made twice", open.id);
                    if open.server.is_runtime() {
                        self.own.insert(open.id.clone());
                    }
                }
                Write::Settle { call, state } if self.own.contains(call) => {
                    self.settle_own(call, *state, message)?
                }
                Write::Discard { call } => {
                    let over = step.head.is_closed() || self.life(call) == Some(CallState::Ended);
                    holds!(over, "I1: events of {call} are dropped, which is {:?}", self.life(call));
                    let dropped = row.shelf.iter().filter(|((of, _), _)| of == call);
                    let dropped: Vec<Word> = dropped.filter_map(|(_, entry)| word_in(entry)).collect();
                    self.waiting.retain(|word| !dropped.contains(word));
                }
                Write::Born { child, .. } => {
                    holds!(self.children.insert(child.clone()), "I9: {child} is born twice");
                }
                _ => {}
            }
        }
        if step.head.is_closed() {
            self.interrupt(row);
            for life in self.lives.values_mut().filter(|life| **life == CallState::Subscribed) {
                *life = CallState::Ended;
            }
        }
        Ok(cancelled)
    }

    /// I8: a schedule begins with the answer that makes it; a sleep ends early only if something else happened.
    fn settle_own(&mut self, call: &CallId, state: CallState, message: &Message) -> Result<(), Broken> {
        match (self.life(call), state, message) {
            (Some(CallState::Open), ..) => {}
            // An answer may cancel what it has just scheduled.
            (Some(CallState::Subscribed), CallState::Ended, Message::TurnEnded { .. }) => {
                self.lives.insert(call.clone(), CallState::Ended);
                return Ok(());
            }
            _ => return Ok(()),
        }
        let allowed = match (state, message) {
            (CallState::Subscribed, Message::TurnEnded { .. }) => true,
            (CallState::Returned, Message::TimedOut { .. } | Message::TurnEnded { .. }) => true,
            (CallState::Returned, Message::CallFailed { .. } | Message::Cancel { .. } | Message::Due) => true,
            (CallState::Returned, Message::Chose { .. }) => true,
            (CallState::Returned, message) => word_of_message(message).is_some(),
            (CallState::Interrupted, _) => true,
            _ => false,
        };
        holds!(allowed, "I8: {call}, which sleeps, is {state:?} after {message:?}");
        self.lives.insert(call.clone(), state);
        Ok(())
    }

    fn turn(&mut self, call: &CallId, from: CallState, to: CallState) -> Result<(), Broken> {
        let life = self.life(call);
        holds!(life == Some(from), "I8: {call} has a say, though it is {life:?} and not {from:?}");
        self.lives.insert(call.clone(), to);
        Ok(())
    }

    /// Whether a tool server may have a call.
    fn is_sent(&self, row: &Row, call: &CallId) -> bool {
        !self.own.contains(call) && row.calls.get(call).is_none_or(|row| !row.open.unapproved)
    }

    fn interrupt(&mut self, row: &Row) -> Vec<CallId> {
        let open = self.lives.iter().filter(|(_, life)| **life == CallState::Open);
        let open: Vec<CallId> = open.map(|(call, _)| call.clone()).collect();
        for call in &open {
            self.lives.insert(call.clone(), CallState::Interrupted);
        }
        open.into_iter().filter(|call| self.is_sent(row, call)).collect()
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

    /// I5: a summary covers whole batches and nothing that the model has not answered; it names all that is open.
    fn judge_summary(&mut self, row: &Row, message: &Message, step: &Step) -> Result<(), Broken> {
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

    /// I4, I7: the effects are those that follow from what is stored, and from what has ended.
    fn judge_effects(
        &mut self,
        row: &Row,
        message: &Message,
        step: &Step,
        asked: Option<(u64, Seq)>,
        mut cancelled: Vec<CallId>,
    ) -> Result<(), Broken> {
        let mut asks = Vec::new();
        let mut abandoned = Vec::new();
        let mut notified = Vec::new();
        let mut closings = 0;
        let mut told = BTreeSet::new();
        let mut invoked = Vec::new();
        let mut allowed = Vec::new();
        let mut answers = Vec::new();
        for effect in &step.effects {
            match effect {
                Effect::Ask { turn, up_to } => asks.push((*turn, *up_to)),
                Effect::Abandon { turn } => abandoned.push(*turn),
                Effect::Invoke { call, arguments } => invoked.push((call.clone(), arguments.clone())),
                Effect::Dispatch { call } => allowed.push(call.clone()),
                Effect::NotifyCancel { call } => notified.push(call.clone()),
                Effect::NotifyClose => closings += 1,
                Effect::Answer { no } => answers.push(*no),
                Effect::Tell { to, letter: letter @ (Letter::Close | Letter::ChildClosed) } => {
                    let new = told.insert((to.clone(), *letter == Letter::Close));
                    holds!(new, "I2: {to} is told twice");
                }
                Effect::Tell { to, letter: Letter::ChildRests } => {
                    let parent = step.head.origin.parent().map(|(parent, ..)| parent);
                    let first = step.head.rests && !row.head.rests;
                    holds!(parent == Some(to) && first, "I2: {to} hears twice that its child rests");
                }
                Effect::Tell { to, letter: Letter::Report { text, .. } } => {
                    let parent = step.head.origin.parent().map(|(parent, ..)| parent);
                    holds!(parent == Some(to), "I8: {to} hears {text}, and is not the parent");
                }
                Effect::Tell { to, letter: Letter::Say { text } } => {
                    holds!(self.children.contains(to), "I8: {to} hears {text}, and is no child");
                }
            }
        }
        let asking = match step.head.phase {
            Phase::Asking { up_to } => Some((step.head.turn, up_to)),
            _ => None,
        };
        let new: Vec<_> = asking.filter(|_| step.head.turn != row.head.turn).into_iter().collect();
        holds!(asks == new, "I4: {asks:?} is asked, and {asking:?} is stored");
        let covers = asks.iter().all(|(_, up_to)| *up_to == step.head.seq);
        holds!(covers, "I5: the question {asks:?} does not cover the entries up to {}", step.head.seq);
        let ended = matches!(
            message,
            Message::TurnEnded { .. }
                | Message::TurnFailed { .. }
                | Message::Summarised { .. }
                | Message::OverBudget { .. }
        );
        let given_up: Vec<u64> =
            asked.filter(|_| !ended && asking != asked).map(|(turn, _)| turn).into_iter().collect();
        holds!(abandoned == given_up, "I4: {abandoned:?} is abandoned instead of {given_up:?}");
        self.asking = asking;

        let may = match message {
            Message::Chose { call, selected: Some(words::ALLOW) } => Some(call),
            _ => None,
        };
        let may = may.filter(|call| row.calls.get(*call).is_some_and(|row| row.open.unapproved));
        holds!(allowed.iter().eq(may), "I8: {allowed:?} is sent, allowed is {may:?}");
        let theirs = |call: &&rap_agent::OpenCall| call.is_sent() && !step.head.is_closed();
        let opened: Vec<_> = step.writes.iter().filter_map(opened).filter(theirs).collect();
        let stored = invoked.iter().map(|(call, _)| call).eq(opened.iter().copied());
        holds!(stored, "I4: {invoked:?} is invoked, {opened:?} is stored");
        for (call, arguments) in &invoked {
            let own = step.writes.iter().find_map(|write| arguments_in(write, &call.id));
            holds!(own == Some(arguments), "I6: {call:?} is invoked with {arguments:?}, not with {own:?}");
        }
        let chosen = step.writes.iter().filter_map(|write| match write {
            Write::Answer { no, .. } => Some(*no),
            _ => None,
        });
        holds!(answers.iter().copied().eq(chosen), "I4: {answers:?} is to be delivered and not stored");

        notified.sort();
        cancelled.sort();
        holds!(notified == cancelled, "I7: the servers hear of {notified:?}, ended are {cancelled:?}");
        let closed = usize::from(step.head.is_closed());
        holds!(closings == closed, "I7: {closings} closings are told of, {closed} happened");
        let mut letters = BTreeSet::new();
        if step.head.is_closed() {
            letters.extend(std::mem::take(&mut self.children).into_iter().map(|child| (child, true)));
            if let Some((parent, ..)) = step.head.origin.parent() {
                letters.insert((parent.clone(), false));
            }
        }
        holds!(told == letters, "I11: {told:?} is told, {letters:?} has to be");
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
                let retries = matches!(step.head.phase, Phase::Failed { retry_at: Some(_), .. });
                let may = *again == Again::Later && entry.at.since(since) < limits.failed_retry_for;
                holds!(retries == may, "I12: failing since {since:?}: {:?}", step.head.phase);
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

fn opened(write: &Write) -> Option<&rap_agent::OpenCall> {
    match write {
        Write::Open(open) => Some(open),
        _ => None,
    }
}

fn written_at(write: &Write) -> Option<Timestamp> {
    match write {
        Write::Append { entry, .. } | Write::Hold { entry, .. } => Some(entry.at),
        _ => None,
    }
}

fn arguments_in<'a>(write: &'a Write, call: &CallId) -> Option<&'a Map<String, Value>> {
    let Write::Append { entry, .. } = write else { return None };
    arguments_of(entry, call)
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

/// Whether a call was not allowed, by a person or by none.
fn is_refusal(text: &str) -> bool {
    text == words::REFUSED || text.starts_with("lapsed: ")
}

impl Reader {
    fn take(
        &mut self,
        thread: Place,
        entry: &Entry,
        lives: &BTreeMap<CallId, CallState>,
    ) -> Result<(), Broken> {
        let missing = &self.missing;
        match &entry.item {
            Item::Notice { .. } => {}
            Item::User { text, .. } | Item::Summary { text, .. } => {
                holds!(missing.is_empty(), "I5: {text:?} stands in t{thread} before {missing:?}");
            }
            Item::Assistant { calls, .. } => {
                holds!(missing.is_empty(), "I5: {calls:?} stands in t{thread} before {missing:?}");
                self.echo = None;
                for call in calls {
                    if let Arguments::Echo { .. } = &call.arguments {
                        holds!(calls.len() == 1, "I5: t{thread} has a synthetic call among others");
                        self.take_echo(thread, call)?;
                    }
                    let new = self.seen.insert(call.id.clone(), call.name.clone()).is_none();
                    holds!(new, "I5: t{thread} has two calls {}", call.id);
                }
                self.missing = calls.iter().map(|call| call.id.clone()).collect();
            }
            Item::Result { call_id, content, synthetic, .. } => {
                let Some(at) = missing.iter().position(|call| call == call_id) else {
                    return broken(format!(
                        "I5: t{thread} has a result of {call_id}, missing is {missing:?}"
                    ));
                };
                self.missing.remove(at);
                let text = text_in(content);
                match self.echo.take() {
                    Some((id, Some(of))) if id == *call_id => self.show_late(&of, text)?,
                    Some(_) => holds!(word_of(text).is_some(), "I8: an event without words: {text:?}"),
                    None if lives.contains_key(call_id) => self.show(call_id, text, *synthetic),
                    None => holds!(*synthetic, "I8: {call_id} was never made and has a result"),
                }
            }
        }
        Ok(())
    }

    /// A synthetic call says which call it stands for, in the exact words.
    fn take_echo(&mut self, thread: Place, call: &CallEntry) -> Result<(), Broken> {
        let Arguments::Echo { of, kind, arguments } = &call.arguments else { return Ok(()) };
        let late = *kind == words::late_kind(of);
        let report = kind.starts_with(&format!("interrupt:{of} (report of thread t"));
        let exact = late || report || *kind == words::event_kind(of) || *kind == words::final_kind(of);
        holds!(exact, "I5: t{thread} has a synthetic call of kind {kind}");
        match arguments {
            None => {
                let tool = self.seen.get(of);
                holds!(tool == Some(&call.name), "I5: {of}, echoed in t{thread}, can not be seen there");
            }
            Some(arguments) => {
                let own = arguments.get("of").is_some();
                holds!(own, "I9: the echo of {of} in t{thread} has the arguments {arguments:?}");
            }
        }
        holds!(call.id.as_str().starts_with(words::MINTED_PREFIX), "I5: {} is not minted", call.id);
        self.echo = Some((call.id.clone(), late.then(|| of.clone())));
        Ok(())
    }

    fn show(&mut self, call: &CallId, text: &str, synthetic: bool) {
        let shown = match text {
            _ if !synthetic => Shown::Real,
            words::SLEPT | words::ROUSED | SCHEDULED => Shown::Real,
            text if is_refusal(text) => Shown::Interrupted,
            words::STILL_RUNNING => Shown::Placeholder,
            words::INTERRUPTED => Shown::Interrupted,
            _ => Shown::Error,
        };
        self.shown.insert(call.clone(), shown);
    }

    fn show_late(&mut self, of: &CallId, text: &str) -> Result<(), Broken> {
        let shown = self.shown.get(of).copied();
        let next = match (shown, word_of(text)) {
            (Some(Shown::Placeholder | Shown::Error), Some(_)) => Shown::Real,
            (Some(Shown::Placeholder), None) if is_refusal(text) => Shown::Interrupted,
            (Some(Shown::Placeholder), None) => Shown::Error,
            _ => return broken(format!("I6: {text:?} follows for {of}, of which {shown:?} is shown")),
        };
        self.shown.insert(of.clone(), next);
        Ok(())
    }
}
