//! The invariants, and how each is checked after every action. The checker has a memory of its own, made from what the
//! world outside could see.
//!
//! - I1 Each input is a word that stands nowhere else. A word that was acknowledged is in the history or held, at all
//!   times; held words enter the history in the order in which they came.
//! - I2 Each input that was taken is offered to the rules a second time at once, chaos offers it again later; no word
//!   stands twice.
//! - I3 The step that the store has made is the one that the rules make of the model's head and facts; two steps of one
//!   thread that saw the same head would differ from it.
//! - I4 The same; head, entries, held rows, calls and questions agree after every commit, the effects of a step are those
//!   that the stored rows imply, and after every crash and at the end the database equals the model.
//! - I5 The entries are read one by one by an automaton that knows which results are missing; an answer stands
//!   directly behind what the question covered.
//! - I6 An invocation is sent only for a call that is open and not answered; what the history shows of a call is one
//!   result, or a placeholder and one synthetic call, or an error and one late result.
//! - I7 Each notification is counted; it comes only of what has ended.
//! - I8, I10 The checker follows the life of each call by what the tools and people did, and what is taken has to fit.
//! - I9 A child is born at the point where its parent last came to rest with nothing open, a fork at the last valid
//!   point; what it inherits is compared with a copy made at its birth.
//! - I11 A closed thread says `Closed` to everything, and `Closed` is said by no other.
//! - I12 All that the head counts stays within the limits, and `Full` is said only at a limit.
//! - I13 is in `fairness`.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use rap_agent::{
    CallState, Head, Ignored, Input, Item, Limits, LostAfter, OnBusy, Origin, Phase, Queue, Seq, Speaker,
    StatusCheck, Step, ThreadMessage, Write, words,
};
use rap_protocol::{CallId, ThreadId, Timestamp};

use super::disk::{Disk, Place, Row, is_answer};
use super::outside::{Word, text_in, word_of};
use super::watch::{Watch, turn_of, word_in};

/// What does not hold, beginning with the name of the invariant.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Broken(pub(super) String);

pub(super) fn broken<T>(text: String) -> Result<T, Broken> {
    Err(Broken(text))
}

/// The invariant, or the sentence that says what is wrong.
macro_rules! holds {
    ($condition:expr, $($text:tt)*) => {
        if !$condition {
            return Err($crate::simulation::invariants::Broken(format!($($text)*)));
        }
    };
}
pub(super) use holds;

/// A notification to a server: of a call, or of the thread's closing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Notification {
    pub(super) server: String,
    pub(super) thread: ThreadId,
    pub(super) call: Option<CallId>,
}

pub(super) struct Checker {
    limits: Limits,
    lost_after: LostAfter,
    watches: Vec<Watch>,
    /// Words that stand in a history.
    written: HashSet<Word>,
    /// Words that somebody was told not to wait for: their call had ended, or their subscription was cancelled.
    excused: HashSet<Word>,
    /// Calls whose invocation has an answer that was recorded.
    answered: BTreeSet<CallId>,
    notified: BTreeSet<Notification>,
    /// The last time that is recorded at which a server has accepted a call, or said something about it.
    heard: BTreeMap<CallId, Timestamp>,
    /// When servers said that a call is gone, as often as they said nothing else.
    gone: BTreeMap<CallId, Vec<Timestamp>>,
}

impl Checker {
    pub(super) fn new(limits: Limits, lost_after: LostAfter) -> Checker {
        Checker {
            limits,
            lost_after,
            watches: Vec::new(),
            written: HashSet::new(),
            excused: HashSet::new(),
            answered: BTreeSet::new(),
            notified: BTreeSet::new(),
            heard: BTreeMap::new(),
            gone: BTreeMap::new(),
        }
    }

    /// A thread is there that was not there before: a root, or a child that came of an input to its parent.
    pub(super) fn born(&mut self, disk: &Disk, thread: Place, of: Option<(Place, &Input)>) {
        let mut watch = Watch::new(disk, thread);
        match of {
            // A child that was spawned begins in the middle of an answer; its parent's last rest is its own.
            Some((parent, Input::TurnEnded { .. })) => {
                let parent = &self.watches[parent];
                watch.rest_point = parent.rest_point;
                watch.answered = parent.answered;
                watch.of_event = parent.of_event;
            }
            Some(_) => {
                watch.answered = disk.threads[thread].base();
                watch.of_event = true;
            }
            None => {}
        }
        self.watches.push(watch);
    }

    /// I9: a fork begins at the last point at which no call lacks its result, and waits to be spoken to.
    pub(super) fn forked(&mut self, disk: &Disk, fork: Place, at: Option<Seq>) -> Result<(), Broken> {
        let row = &disk.threads[fork];
        let Some(source) = row.source else { return broken(format!("I9: t{fork} has no source")) };
        let at = at.unwrap_or(Seq::MAX).min(disk.threads[source].last());
        let (mut valid, mut answered, mut missing) = (0, 0, BTreeSet::new());
        for (entry, seq) in disk.visible(source, at).into_iter().zip(1..) {
            match &entry.item {
                Item::Assistant { calls, .. } => missing.extend(calls.iter().map(|call| &call.id)),
                Item::Result { call_id, .. } => _ = missing.remove(call_id),
                _ => {}
            }
            if missing.is_empty() {
                valid = seq;
            }
        }
        let begins = row.base();
        holds!(begins == valid, "I9: t{fork}, forked at {at}, begins at {begins} instead of {valid}");
        for (entry, seq) in disk.visible(source, begins).into_iter().zip(1..) {
            if is_answer(&entry.item) {
                answered = seq - 1;
            }
        }
        let head = &row.head;
        let fresh = *head.phase() == Phase::Idle && *head.origin() == Origin::Root && head.turn() == 0;
        let alone = head.subscriptions().is_empty() && head.children().next().is_none();
        holds!(fresh && alone, "I9: t{fork}, a fork, begins as {head:?}");
        self.born(disk, fork, None);
        self.watches[fork].answered = answered;
        self.look(disk, fork)
    }

    /// The model of a thread is asked. I5: its question covers what was stored with it.
    pub(super) fn asked(
        &mut self,
        disk: &Disk,
        thread: Place,
        turn: u64,
        up_to: Seq,
        summary: bool,
    ) -> Result<(), Broken> {
        let watch = &mut self.watches[thread];
        if summary {
            watch.shown = Some((turn, up_to));
            return Ok(());
        }
        if let Some((current, covers)) = watch.asking.filter(|(current, _)| *current == turn) {
            holds!(covers == up_to, "I5: question {current} of t{thread} covers {up_to} instead of {covers}");
        }
        let last = disk.threads[thread].head.turn();
        holds!(turn <= last, "I4: question {turn} of t{thread} is asked before it is stored");
        Ok(())
    }

    /// Before a commit: whether what the step wants fits what has happened so far.
    pub(super) fn judge(
        &mut self,
        disk: &Disk,
        thread: Place,
        input: &Input,
        step: &Step,
        now: Timestamp,
    ) -> Result<(), Broken> {
        let row = &disk.threads[thread];
        holds!(!row.head.is_closed(), "I11: closed t{thread} takes {input:?}");
        for write in &step.writes {
            match write {
                Write::Spawn(spawn) => {
                    let point = match spawn.head.origin() {
                        Origin::Spawn { .. } => row.last() + 1,
                        _ => self.watches[thread].rest_point,
                    };
                    let at = spawn.at;
                    holds!(at == point, "I9: a child of t{thread} begins at {at}, not at {point}");
                    let parent = spawn.head.origin().parent().map(|(parent, ..)| parent);
                    holds!(parent == Some(&row.thread.id), "I9: a child of nobody");
                }
                Write::DropBacklog { call } => {
                    let dropped = row.backlog.iter().filter(|((of, _), _)| of == call);
                    self.excused.extend(dropped.filter_map(|(_, entry)| word_in(entry)));
                }
                Write::Settle { call, state: CallState::Subscribed } => {
                    self.heard.insert(call.clone(), now);
                    self.gone.remove(call);
                }
                _ => {}
            }
        }
        match input {
            Input::CallFailed { call, text } if text == words::LOST => self.judge_lost(call, now)?,
            Input::SubscriptionLost { call } => self.judge_lost(call, now)?,
            Input::Notice { .. } => {
                let same = step.head.phase() == row.head.phase() && step.head.seq() == row.head.seq() + 1;
                holds!(same, "I8: a notice makes {:?} of {:?}", step.head, row.head);
            }
            _ => {}
        }
        self.watches[thread].judge(row, input, step, &self.limits)
    }

    /// I8: a call is lost if its server said so twice and nothing else in between.
    fn judge_lost(&self, call: &CallId, now: Timestamp) -> Result<(), Broken> {
        let said = self.gone.get(call).map_or(&[][..], Vec::as_slice);
        let apart = said.first().is_some_and(|first| now.since(*first) >= self.lost_after.pause());
        holds!(said.len() > 1 && apart, "I8: {call} is taken for lost at {now:?}, gone at {said:?}");
        Ok(())
    }

    /// I12: a tool server is asked after a call, as late and as seldom as was promised.
    pub(super) fn asked_after(&self, call: &CallId, now: Timestamp) -> Result<(), Broken> {
        let wait = if self.gone.contains_key(call) { self.lost_after.pause() } else { self.lost_after.0 };
        if let Some(last) = self.heard.get(call) {
            let patient = now.since(*last) >= wait;
            holds!(patient, "I12: {call} is asked after at {now:?}, though there was word of it at {last:?}");
        }
        Ok(())
    }

    /// A tool server says that it does not know a call.
    pub(super) fn said_gone(&mut self, call: &CallId, now: Timestamp) {
        self.gone.entry(call.clone()).or_default().push(now);
    }

    /// The answer of a tool server about a call is recorded. One that was not recorded does not count.
    pub(super) fn recorded(&mut self, call: &CallId, check: StatusCheck) {
        self.heard.insert(call.clone(), check.asked);
        if check.gone_since.is_none() {
            self.gone.remove(call);
        }
    }

    /// The answer to an invocation is recorded.
    pub(super) fn invocation_recorded(&mut self, call: &CallId, at: Timestamp) {
        if self.answered.insert(call.clone()) {
            self.heard.insert(call.clone(), at);
        }
    }

    /// A refusal has to be true.
    pub(super) fn refused(
        &mut self,
        disk: &Disk,
        thread: Place,
        input: &Input,
        now: Timestamp,
        why: &Ignored,
    ) -> Result<(), Broken> {
        let row = &disk.threads[thread];
        let closed = row.head.is_closed();
        holds!(closed == (*why == Ignored::Closed), "I11: t{thread} says {why:?} to {input:?}");
        let watch = &self.watches[thread];
        let honest = closed || self.is_true(watch, row, input, now, why);
        holds!(honest, "I1: t{thread} says {why:?} to {input:?}, which is not so: {:?}", row.head);
        if *why == Ignored::SettledCall {
            self.excused.extend(word_of_input(input));
        }
        Ok(())
    }

    fn is_true(&self, watch: &Watch, row: &Row, input: &Input, now: Timestamp, why: &Ignored) -> bool {
        let head = &row.head;
        let life = call_of(input).and_then(|call| watch.lives.get(call).copied());
        let sent = call_of(input).and_then(|call| head.open_call(call)).is_some_and(|open| open.is_sent());
        match (why, input) {
            (Ignored::StaleTurn, input) => {
                turn_of(input).is_some_and(|turn| watch.asking.is_none_or(|(current, _)| current != turn))
            }
            (Ignored::Duplicate, Input::ToolResult { .. }) => {
                matches!(life, Some(CallState::Returned | CallState::Subscribed | CallState::Ended))
            }
            (Ignored::Duplicate, Input::Event { call, event }) => {
                event.id.as_ref().is_some_and(|id| watch.events.contains(&(call.clone(), id.clone())))
            }
            (Ignored::Duplicate, Input::ChoiceRequested { .. } | Input::CallbackRefused { .. }) => {
                life == Some(CallState::Open)
            }
            (Ignored::Duplicate, Input::Summarised { .. }) => head.coverable().is_none(),
            (Ignored::Duplicate, Input::FromThread { sender, message: ThreadMessage::ChildClosed }) => {
                !watch.children.contains(sender)
            }
            (Ignored::Duplicate, Input::FromThread { sender, message: ThreadMessage::ChildIdle }) => {
                !head.backlogs().iter().any(|backlog| backlog.at_work.contains(sender))
            }
            (Ignored::SettledCall, Input::ToolResult { .. }) => life == Some(CallState::Interrupted),
            (Ignored::SettledCall, Input::Cancel { .. }) => {
                !matches!(life, Some(CallState::Open | CallState::Subscribed))
            }
            (Ignored::SettledCall, Input::View { .. }) => {
                !sent && !matches!(life, Some(CallState::Subscribed | CallState::Returned))
            }
            (Ignored::SettledCall, _) => life != Some(CallState::Open) || !sent,
            (Ignored::UnknownCall, Input::ToolResult { .. }) => life.is_none() || !sent,
            (Ignored::UnknownCall, _) => life.is_none(),
            (Ignored::EndedSubscription, _) => {
                !matches!(life, None | Some(CallState::Open | CallState::Subscribed))
            }
            (Ignored::NotYetSubscribed, _) => life == Some(CallState::Open),
            (Ignored::Full(_), _) => self.is_full(watch, row, input),
            (Ignored::Busy, Input::UserMessage { on_busy, .. }) => {
                let busy =
                    matches!(head.phase(), Phase::Asking(_) | Phase::Waiting { .. } | Phase::Paused(_));
                *on_busy == OnBusy::Reject && busy
            }
            (Ignored::NothingToInterrupt, _) => *head.phase() == Phase::Idle && !watch.has_open(),
            (Ignored::NothingToResume, Input::Resume) => {
                !matches!(head.phase(), Phase::Failed { .. } | Phase::Paused(_))
            }
            (Ignored::NothingToResume, _) => {
                !matches!(head.phase(), Phase::Paused(pause) if pause.scope == rap_agent::PauseScope::Session)
            }
            (Ignored::NoQuestion, Input::Choose { call, .. }) => {
                let open = |question: &rap_agent::Question| question.call == *call && !question.answered;
                !head
                    .questions()
                    .iter()
                    .any(|question| open(question) && question.kind != rap_agent::QuestionKind::SignIn)
            }
            (Ignored::NoSuchChoice(choices), Input::Choose { selected, .. }) => {
                selected.is_some_and(|selected| selected >= *choices)
            }
            (Ignored::NotDue, Input::Due) => {
                // Held input may have to wait for the next hour.
                let waits = matches!(head.phase(), Phase::Waiting { .. }) && bounds_wakes(&self.limits);
                waits || head.due(&self.limits).is_none_or(|due| due > now)
            }
            (Ignored::NotDue, Input::TimerFired { call }) => {
                row.calls[call].timer.is_none_or(|timer| timer > now)
            }
            _ => false,
        }
    }

    fn is_full(&self, watch: &Watch, row: &Row, input: &Input) -> bool {
        let (head, limits) = (&row.head, &self.limits);
        let held = *head.phase() != Phase::Idle && head.held().inputs >= limits.held;
        let depth = row.thread.ancestors.len();
        match input {
            Input::UserMessage { on_busy: OnBusy::Enqueue, .. } => {
                let held = if head.queued().inputs >= limits.held { true } else { held };
                held && !watch.has_open() || head.queued().inputs >= limits.held
            }
            Input::UserMessage { .. } | Input::ToolResult { .. } | Input::SubscriptionLost { .. } => held,
            Input::Event { event, .. } if event.associative || depth >= limits.depth => held,
            Input::Event { call, .. } => {
                let backlog = head.backlogs().iter().find(|backlog| backlog.call == *call);
                let full = backlog.is_some_and(|backlog| backlog.held.inputs >= limits.held);
                full || backlog.is_none() && head.backlogs().len() >= 2 * limits.subscriptions
            }
            _ => head.questions().len() >= limits.questions,
        }
    }

    /// After a commit: whether all that is stored of a thread agrees.
    pub(super) fn look(&mut self, disk: &Disk, thread: Place) -> Result<(), Broken> {
        let row = &disk.threads[thread];
        let watch = &mut self.watches[thread];
        let head = &row.head;
        holds!(row.last() == head.seq(), "I4: t{thread} ends at {}, its head at {}", row.last(), head.seq());
        watch.read(thread, row, &mut self.written)?;
        look_at_held(thread, row, watch, &self.limits)?;
        look_at_backlog(thread, row, &self.limits)?;
        watch.look_at_calls(thread, row)?;
        look_at_bounds(thread, head, &self.limits)?;
        let (is, may) = (disk.depth(thread), self.limits.depth);
        holds!(is <= may, "I12: t{thread} has {is} ancestors, it may have {may}");
        let settled = watch.rest_point;
        holds!(head.settled() == settled, "I9: t{thread} rested at {settled}, not at {}", head.settled());
        watch.look_at_coverage(thread, head)?;
        let written = &self.written;
        watch.waiting.retain(|word| !written.contains(word));
        let lost = watch.waiting.iter().find(|word| !is_held(row, **word));
        holds!(lost.is_none(), "I1: t{thread} has lost w{}", lost.expect("it is lost"));
        Ok(())
    }

    /// I9: what a thread inherits is what it was when the thread was made.
    pub(super) fn look_at_heritage(&self, disk: &Disk) -> Result<(), Broken> {
        for thread in 0..disk.threads.len() {
            let inherited = disk.visible(thread, disk.threads[thread].base());
            let same = inherited.into_iter().eq(&self.watches[thread].heritage);
            holds!(same, "I9: t{thread} sees what came after it was made");
        }
        Ok(())
    }

    /// I1: somebody was told that a word was taken.
    pub(super) fn acknowledged(&mut self, disk: &Disk, word: Word) -> Result<(), Broken> {
        if self.written.contains(&word) || self.excused.contains(&word) {
            return Ok(());
        }
        let holder = disk.threads.iter().position(|row| is_held(row, word));
        let Some(holder) = holder else {
            return broken(format!("I1: w{word} was acknowledged and is nowhere"));
        };
        self.watches[holder].waiting.push(word);
        Ok(())
    }

    /// I6: an invocation goes out.
    pub(super) fn invoked(&self, disk: &Disk, thread: Place, call: &CallId) -> Result<(), Broken> {
        let row = &disk.threads[thread];
        let state = row.calls.get(call).map(|row| row.state);
        let life = self.watches[thread].lives.get(call).copied();
        holds!(state == Some(CallState::Open), "I6: t{thread} invokes {call}, which is {state:?}");
        holds!(life == Some(CallState::Open), "I6: t{thread} invokes {call}, which is {life:?}");
        let answered = self.answered.contains(call);
        holds!(!answered, "I6: t{thread} invokes {call} again, though it was answered");
        holds!(!row.head.is_closed(), "I11: closed t{thread} invokes {call}");
        Ok(())
    }

    /// I7: a notification goes to a server.
    pub(super) fn notified(&mut self, disk: &Disk, notification: Notification) -> Result<(), Broken> {
        let first = self.notified.insert(notification.clone());
        holds!(first, "I7: {notification:?} is sent twice");
        let Some(thread) = disk.place(&notification.thread) else {
            return broken(format!("I7: {notification:?} is about nothing"));
        };
        match &notification.call {
            Some(call) => {
                let life = self.watches[thread].lives.get(call).copied();
                let ended = !matches!(life, None | Some(CallState::Open | CallState::Subscribed));
                holds!(ended, "I7: the servers are told that {call} has ended, which is {life:?}");
            }
            None => {
                let closed = disk.threads[thread].head.is_closed();
                holds!(closed, "I7: t{thread} is open, the servers are told otherwise");
            }
        }
        Ok(())
    }

    /// Nothing is outstanding any more: every thread is at rest, and nothing is left behind.
    pub(super) fn look_at_rest(&mut self, disk: &Disk) -> Result<(), Broken> {
        self.look_at_heritage(disk)?;
        holds!(disk.outbox.is_empty(), "I1: messages are left: {:?}", disk.outbox);
        for (thread, row) in disk.threads.iter().enumerate() {
            let (head, watch) = (&row.head, &self.watches[thread]);
            let at_rest = matches!(head.phase(), Phase::Idle | Phase::Closed);
            holds!(at_rest, "I6: t{thread} does not come to rest: {head:?}");
            holds!(!watch.has_open(), "I6: t{thread} has open calls: {head:?}");
            holds!(row.held.is_empty(), "I1: t{thread} rests and holds {:?}", row.held);
            let lost = watch.waiting.iter().find(|word| !is_held(row, **word));
            holds!(lost.is_none(), "I1: t{thread} has lost {lost:?}");
            watch.look_at_results(thread, row)?;
            if *head.phase() == Phase::Idle && !watch.interrupted {
                watch.look_at_answers(thread, row)?;
            }
            let behind = head.backlogs().iter().find(|backlog| !backlog.held.is_empty());
            holds!(behind.is_none(), "I1: t{thread} is at rest, and {behind:?} waits");
            let children: BTreeSet<_> = (0..disk.threads.len())
                .filter(|child| disk.parent(*child) == Some(thread))
                .filter(|child| !disk.threads[*child].head.is_closed())
                .map(|child| disk.threads[child].thread.id.clone())
                .collect();
            let known: BTreeSet<_> = head.children().cloned().collect();
            holds!(children == known, "I11: open children of t{thread} are {children:?}, it knows {known:?}");
        }
        Ok(())
    }
}

/// The call that an input is about.
fn call_of(input: &Input) -> Option<&CallId> {
    match input {
        Input::ToolResult { call, .. }
        | Input::CallFailed { call, .. }
        | Input::CallbackRefused { call, .. }
        | Input::TimerFired { call }
        | Input::Event { call, .. }
        | Input::SubscriptionLost { call }
        | Input::SignInRequested { call, .. }
        | Input::ChoiceRequested { call, .. }
        | Input::View { call, .. }
        | Input::Choose { call, .. }
        | Input::Cancel { call } => Some(call),
        _ => None,
    }
}

fn is_held(row: &Row, word: Word) -> bool {
    row.held.values().chain(row.backlog.values()).any(|entry| word_in(entry) == Some(word))
}

/// I1: the rows that are held are exactly those that the head counts.
fn look_at_held(thread: Place, row: &Row, watch: &Watch, limits: &Limits) -> Result<(), Broken> {
    let head = &row.head;
    let counted = [(Queue::Held, head.held()), (Queue::Queued, head.queued())]
        .into_iter()
        .flat_map(|(queue, held)| (held.first..held.next).map(move |no| (queue, no)));
    let agrees = row.held.keys().copied().eq(counted);
    let (held, queued) = (head.held(), head.queued());
    holds!(agrees, "I1: t{thread} holds {:?}, its head says {held:?} {queued:?}", row.held);
    let idle = matches!(head.phase(), Phase::Idle | Phase::Closed);
    holds!(!idle || row.held.is_empty(), "I1: t{thread} is {:?} and holds {:?}", head.phase(), row.held);
    if matches!(head.phase(), Phase::Waiting { .. }) {
        let mut waiting =
            row.held.iter().filter(|((queue, _), _)| *queue == Queue::Held).map(|(_, entry)| entry);
        let oldest = waiting.clone().map(|entry| entry.at).min();
        let user = waiting.any(|entry| matches!(entry.item, Item::User { from: Speaker::User, .. }));
        let asleep = head.batch().iter().find(|call| call.server.is_runtime());
        let wakes = oldest.is_none() || asleep.is_none() || bounds_wakes(limits);
        holds!(wakes, "I1: t{thread} sleeps on: {asleep:?}");
        holds!(!user && !held.user, "I1: a user waits behind the calls of t{thread}");
        let sleeps = head.batch().iter().all(|call| call.server.is_runtime());
        holds!(!sleeps || queued.is_empty(), "I1: a user waits behind a sleep of t{thread}");
        let made = matches!(head.origin(), Origin::Event { .. }) && !watch.left_work;
        let working = head.batch().iter().map(|call| call.since).filter(|_| made);
        let due = oldest.into_iter().chain(working).min().map(|at| at.plus(limits.hold_max));
        holds!(head.due(limits) == due, "I12: t{thread} holds since {oldest:?}, due {:?}", head.due(limits));
    }
    Ok(())
}

/// I1, I12: the events that wait for a child are those that the head counts, and they wait only where others work.
fn look_at_backlog(thread: Place, row: &Row, limits: &Limits) -> Result<(), Broken> {
    let head = &row.head;
    let counted: BTreeSet<(CallId, u64)> = head
        .backlogs()
        .iter()
        .flat_map(|backlog| (backlog.held.first..backlog.held.next).map(|no| (backlog.call.clone(), no)))
        .collect();
    let agrees = row.backlog.keys().eq(counted.iter());
    holds!(agrees, "I1: t{thread} keeps {:?}, its head says {:?}", row.backlog, head.backlogs());
    for backlog in head.backlogs() {
        let (waits, works) = (backlog.held.inputs, backlog.at_work.len());
        holds!(waits <= limits.held, "I12: {waits} events of {} wait in t{thread}", backlog.call);
        holds!(works <= limits.event_children, "I12: {works} children of {} work in t{thread}", backlog.call);
        let at_work = head.backlogs().iter().any(|backlog| !backlog.at_work.is_empty());
        let stuck = waits > 0 && works == 0 && !at_work;
        holds!(!stuck, "I1: {waits} events of {} wait in t{thread} for nothing", backlog.call);
    }
    Ok(())
}

fn look_at_bounds(thread: Place, head: &Head, limits: &Limits) -> Result<(), Broken> {
    let open = head.open_calls().count();
    // Results behind placeholders always find room; there are no more of them than calls may be open.
    let held = limits.held as usize + limits.open_calls;
    let at_work = head.backlogs().iter().map(|backlog| backlog.at_work.len()).sum::<usize>();
    let bounds = [
        ("subscriptions", head.subscriptions().len(), limits.subscriptions),
        ("open calls", open, limits.open_calls),
        ("held", head.held().inputs as usize, held),
        ("queued", head.queued().inputs as usize, limits.held as usize),
        ("questions", head.questions().len(), limits.questions),
        ("children at work", at_work, limits.children),
        ("turns", head.turns_awake() as usize, limits.turns_per_wake as usize),
    ];
    for (what, is, may) in bounds {
        holds!(is <= may, "I12: t{thread} has {is} {what}, it may have {may}");
    }
    Ok(())
}

/// Whether input may have to wait because the session was woken too often in this hour.
fn bounds_wakes(limits: &Limits) -> bool {
    limits.budgets.per_hour.wakes.is_some()
}

/// The word of an input, where it has one.
pub(super) fn word_of_input(input: &Input) -> Option<Word> {
    match input {
        Input::Begin { text: Some(text) } | Input::UserMessage { text, .. } => word_of(text),
        Input::TurnEnded { answer, .. } => word_of(&answer.text),
        Input::Event { event, .. } => word_of(&event.text),
        Input::FromThread {
            message: ThreadMessage::Report { text, .. } | ThreadMessage::Text { text, .. },
            ..
        } => word_of(text),
        Input::ToolResult { result, .. } => word_of(text_in(&result.content)),
        _ => None,
    }
}
