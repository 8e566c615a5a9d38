//! The invariants, and how each is checked after every action. The checker has a memory of its own, made from what the
//! world outside could see; it never asks the rules what should be.
//!
//! - I1 Each input is a word that stands nowhere else. A word that was acknowledged is in the history or held, at all
//!   times; held words enter the history in the order in which they came.
//! - I2 [`super::world::World`] offers each message that was taken a second time at once, chaos offers it again later;
//!   no word stands twice.
//! - I3 A step gets one thread's head and nothing else, and answers and invocations of all threads are under way while
//!   others step: the simulation could not be written otherwise.
//! - I4 Head, entries, held rows, calls and questions agree after every commit and every crash; the effects of a step
//!   are those that the stored rows imply; at the end the store equals the replay of its steps.
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

use std::collections::{BTreeMap, BTreeSet, HashSet};

use rap_agent::{
    Amounts, CallState, Head, Ignored, Item, Limits, LostAfter, Message, OnBusy, Origin, Phase, Queue, Seq,
    Speaker, Step, Whereabouts, Write, words,
};
use rap_protocol::{CallId, Timestamp};

use super::disk::{Disk, Place, Row, name};
use super::outside::{Word, text_in, word_of};
use super::purse::Purse;
use super::watch::{Watch, is_answer, word_in};
use super::world::Notification;

/// What does not hold, beginning with the name of the invariant.
#[derive(Debug, PartialEq, Eq)]
pub struct Broken(pub String);

pub fn broken<T>(text: String) -> Result<T, Broken> {
    Err(Broken(text))
}

/// The invariant, or the sentence that says what is wrong.
macro_rules! holds {
    ($condition:expr, $($text:tt)*) => {
        if !$condition {
            return Err($crate::sim::invariants::Broken(format!($($text)*)));
        }
    };
}
pub(crate) use holds;

pub struct Checker {
    limits: Limits,
    lost_after: LostAfter,
    watches: Vec<Watch>,
    /// Words that stand in a history.
    written: HashSet<Word>,
    /// Calls whose invocation has an answer that was recorded.
    answered: BTreeSet<(Place, CallId)>,
    notified: BTreeSet<Notification>,
    /// What each session has spent of the one thing that is bounded.
    purses: BTreeMap<Place, Purse>,
}

impl Checker {
    pub fn new(limits: Limits, lost_after: LostAfter) -> Checker {
        Checker {
            limits,
            lost_after,
            watches: Vec::new(),
            written: HashSet::new(),
            answered: BTreeSet::new(),
            notified: BTreeSet::new(),
            purses: BTreeMap::new(),
        }
    }

    /// A thread is there that was not there before: a root, or a child that came of a message to its parent.
    pub fn born(&mut self, disk: &Disk, thread: Place, of: Option<(Place, &Message)>) {
        let mut watch = Watch::new(disk, thread);
        match of {
            // A child that was spawned begins in the middle of an answer; its parent's last rest is its own.
            Some((parent, Message::TurnEnded { .. })) => {
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
    pub fn forked(&mut self, disk: &Disk, fork: Place, at: Seq) -> Result<(), Broken> {
        let row = &disk.threads[fork];
        let Some((source, born)) = row.born else { return broken(format!("I9: t{fork} has no source")) };
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
        holds!(born == valid, "I9: t{fork}, forked at {at}, begins at {born} instead of {valid}");
        for (entry, seq) in disk.visible(source, born).into_iter().zip(1..) {
            if is_answer(&entry.item) {
                answered = seq - 1;
            }
        }
        let head = &row.head;
        let fresh = head.phase == Phase::Idle && head.origin == Origin::Root && head.turn == 0;
        holds!(fresh, "I9: t{fork}, a fork, begins as {head:?}");
        self.born(disk, fork, None);
        self.watches[fork].answered = answered;
        self.look(disk, fork)
    }

    /// A summary is on its way; the model was shown the history up to there.
    pub fn summarises(&mut self, thread: Place, turn: u64, shown: Option<Seq>) {
        self.watches[thread].shown = shown.map(|shown| (turn, shown));
    }

    /// I12: a question is asked as long as there is a budget, and no longer.
    pub fn spent(&mut self, root: Place, spent: Amounts, over: bool, now: Timestamp) -> Result<(), Broken> {
        let purse = self.purses.entry(root).or_insert_with(|| Purse::new(&self.limits, now));
        purse.spend(spent, now);
        holds!(
            over == purse.is_over(),
            "I12: t{root} has spent {purse:?}, that is said to be too much: {over}"
        );
        Ok(())
    }

    /// A person lets a session go on.
    pub fn lifted(&mut self, root: Place) {
        if let Some(purse) = self.purses.get_mut(&root) {
            purse.fill();
        }
    }

    /// I12: a tool server is asked after a call, as late and as seldom as was promised.
    pub fn asked_after(&self, thread: Place, call: &CallId, now: Timestamp) -> Result<(), Broken> {
        let watch = &self.watches[thread];
        let wait = if watch.gone.contains_key(call) { self.lost_after.pause() } else { self.lost_after.0 };
        let last = watch.heard.get(call).copied();
        let patient = last.is_some_and(|last| now.since(last) >= wait);
        holds!(patient, "I12: {call} is asked after at {now:?}, though there was word of it at {last:?}");
        Ok(())
    }

    /// What a tool server said about a call.
    pub fn heard(&mut self, thread: Place, call: &CallId, said: Whereabouts, now: Timestamp) {
        let watch = &mut self.watches[thread];
        match said {
            Whereabouts::Gone => watch.gone.entry(call.clone()).or_default().push(now),
            Whereabouts::Unknown => _ = watch.gone.remove(call),
        }
    }

    /// That was written down.
    pub fn noted(&mut self, thread: Place, call: &CallId, now: Timestamp) {
        self.watches[thread].heard.insert(call.clone(), now);
    }

    /// Before a commit: whether what the step wants fits what has happened so far.
    pub fn judge(
        &mut self,
        disk: &Disk,
        thread: Place,
        message: &Message,
        step: &Step,
        now: Timestamp,
    ) -> Result<(), Broken> {
        let row = &disk.threads[thread];
        holds!(row.head.phase != Phase::Closed, "I11: closed t{thread} takes {message:?}");
        for write in &step.writes {
            if let Write::Born { at, head, .. } = write {
                let point = match head.origin {
                    Origin::Spawn { .. } => row.last() + 1,
                    _ => self.watches[thread].rest_point,
                };
                holds!(*at == point, "I9: a child of t{thread} is born at {at}, not at {point}");
                let parent = head.origin.parent().map(|(parent, ..)| parent);
                holds!(parent == Some(&name(thread)), "I9: a child of nobody");
            }
        }
        if let Message::CallFailed { call, text } = message {
            self.answered.insert((thread, call.clone()));
            if text == words::LOST {
                self.judge_lost(thread, call, now)?;
            }
        }
        if let Message::Noted { .. } = message {
            let noted = Head { seq: row.head.seq + 1, ..row.head.clone() };
            holds!(step.head == noted, "I8: a note makes {:?} of {:?}", step.head, row.head);
        }
        self.watches[thread].judge(row, message, step, &self.limits)?;
        let spends = Amounts::of(&row.head, step);
        let spent = &self.watches[thread].spent;
        holds!(spends == *spent, "I12: {message:?} costs t{thread} {spent:?}, not {spends:?}");
        Ok(())
    }

    /// I8: a call is lost if its server said so twice and nothing else in between.
    fn judge_lost(&self, thread: Place, call: &CallId, now: Timestamp) -> Result<(), Broken> {
        let said = self.watches[thread].gone.get(call).map_or(&[][..], Vec::as_slice);
        let apart = said.first().is_some_and(|first| now.since(*first) >= self.lost_after.pause());
        holds!(said.len() > 1 && apart, "I8: {call} is taken for lost at {now:?}, gone at {said:?}");
        Ok(())
    }

    /// A refusal has to be true.
    pub fn refused(
        &mut self,
        disk: &Disk,
        thread: Place,
        message: &Message,
        now: Timestamp,
        why: &Ignored,
    ) -> Result<(), Broken> {
        let row = &disk.threads[thread];
        let closed = row.head.phase == Phase::Closed;
        holds!(closed == (*why == Ignored::Closed), "I11: t{thread} says {why:?} to {message:?}");
        let watch = &self.watches[thread];
        let honest = closed || self.is_true(watch, row, message, now, why);
        holds!(honest, "I1: t{thread} says {why:?} to {message:?}, which is not so: {:?}", row.head);
        Ok(())
    }

    fn is_true(&self, watch: &Watch, row: &Row, message: &Message, now: Timestamp, why: &Ignored) -> bool {
        let head = &row.head;
        let life = call_of(message).and_then(|call| watch.lives.get(call).copied());
        match (why, message) {
            (
                Ignored::StaleTurn,
                Message::TurnEnded { turn, .. }
                | Message::TurnFailed { turn, .. }
                | Message::Summarised { turn, .. }
                | Message::OverBudget { turn, .. },
            ) => watch.asking.is_none_or(|(current, _)| current != *turn),
            (Ignored::Duplicate, Message::Returned { .. }) => {
                matches!(life, Some(CallState::Returned | CallState::Subscribed | CallState::Ended))
            }
            (Ignored::Duplicate, Message::Happened { call, event, .. }) => {
                event.id.as_ref().is_some_and(|id| watch.events.contains(&(call.clone(), id.clone())))
            }
            (Ignored::Duplicate, Message::WantsChoice { .. }) => life == Some(CallState::Open),
            (Ignored::Duplicate, Message::ChildClosed { child, .. }) => !watch.children.contains(child),
            (Ignored::Duplicate, Message::ChildRests { child, .. }) => {
                !head.backlogs.iter().any(|backlog| backlog.at_work.contains(child))
            }
            (Ignored::SettledCall, Message::Returned { .. }) => life == Some(CallState::Interrupted),
            (Ignored::SettledCall, Message::Cancel { .. } | Message::Viewed { .. }) => {
                !matches!(life, Some(CallState::Open | CallState::Subscribed))
            }
            (Ignored::SettledCall, _) => life != Some(CallState::Open),
            (Ignored::UnknownCall, _) => life.is_none(),
            (Ignored::EndedSubscription, _) => {
                !matches!(life, None | Some(CallState::Open | CallState::Subscribed))
            }
            (Ignored::NotYetSubscribed, _) => life == Some(CallState::Open),
            (Ignored::Full(_), _) => self.is_full(head, message),
            (Ignored::Busy, Message::Said { on_busy, .. }) => {
                let busy = matches!(head.phase, Phase::Asking { .. } | Phase::Waiting | Phase::Paused { .. });
                *on_busy == OnBusy::Reject && busy
            }
            (Ignored::NothingToInterrupt, _) => head.phase == Phase::Idle && !watch.has_open(),
            (Ignored::NothingToResume, _) => {
                !matches!(head.phase, Phase::Failed { .. } | Phase::Paused { .. })
            }
            (Ignored::NoQuestion, Message::Chose { call, .. }) => {
                let open = |question: &rap_agent::Question| question.call == *call && !question.answered;
                !head
                    .questions
                    .iter()
                    .any(|question| open(question) && question.kind != rap_agent::QuestionKind::SignIn)
            }
            (Ignored::NoSuchChoice(choices), Message::Chose { selected, .. }) => {
                selected.is_some_and(|selected| selected >= *choices)
            }
            (Ignored::NotDue, Message::Due) => head.due(&self.limits).is_none_or(|due| due > now),
            (Ignored::NotDue, Message::Ticked { call, .. }) => {
                head.subscription(call).is_some_and(|own| own.next.is_none_or(|next| next > now))
            }
            (Ignored::NotDue, Message::TimedOut { call }) => {
                row.calls[call].open.until.is_none_or(|until| until > now)
            }
            _ => false,
        }
    }

    fn is_full(&self, head: &Head, message: &Message) -> bool {
        let limits = &self.limits;
        let held = head.phase != Phase::Idle && head.held.inputs >= limits.held;
        match message {
            Message::Said { on_busy: OnBusy::Enqueue, .. } => head.queued.inputs >= limits.held,
            Message::Said { .. } | Message::Returned { .. } | Message::Ticked { .. } => held,
            Message::Happened { event, birth, .. }
                if event.associative
                    || birth.as_ref().is_none_or(|birth| birth.depth > self.limits.depth) =>
            {
                held
            }
            Message::Happened { call, .. } => {
                let backlog = head.backlogs.iter().find(|backlog| backlog.call == *call);
                let full = backlog.is_some_and(|backlog| backlog.held.inputs >= limits.held);
                full || backlog.is_none() && head.backlogs.len() >= 2 * limits.subscriptions
            }
            _ => head.questions.len() >= limits.questions,
        }
    }

    /// After a commit: whether all that is stored of a thread agrees.
    pub fn look(&mut self, disk: &Disk, thread: Place) -> Result<(), Broken> {
        let row = &disk.threads[thread];
        let watch = &mut self.watches[thread];
        let head = &row.head;
        holds!(row.last() == head.seq, "I4: t{thread} ends at {}, its head at {}", row.last(), head.seq);
        watch.read(thread, row, &mut self.written)?;
        look_at_held(thread, row, &self.limits)?;
        look_at_shelf(thread, row, &self.limits)?;
        watch.look_at_calls(thread, row)?;
        look_at_bounds(thread, head, &self.limits)?;
        let (is, may) = (disk.ancestors(thread), self.limits.depth);
        holds!(is <= may, "I12: t{thread} has {is} ancestors, it may have {may}");
        let settled = watch.rest_point;
        holds!(head.settled == settled, "I9: t{thread} rested at {settled}, not at {}", head.settled);
        watch.look_at_coverage(thread, head)?;
        let written = &self.written;
        watch.waiting.retain(|word| !written.contains(word));
        let lost = watch.waiting.iter().find(|word| !is_held(row, **word));
        holds!(lost.is_none(), "I1: t{thread} has lost w{}", lost.expect("it is lost"));
        Ok(())
    }

    /// After a crash: everything.
    pub fn look_everywhere(&mut self, disk: &Disk) -> Result<(), Broken> {
        for thread in 0..disk.threads.len() {
            self.look(disk, thread)?;
            self.look_at_heritage(disk, thread)?;
        }
        Ok(())
    }

    fn look_at_heritage(&self, disk: &Disk, thread: Place) -> Result<(), Broken> {
        let inherited = disk.visible(thread, disk.threads[thread].base());
        let same = inherited.into_iter().eq(&self.watches[thread].heritage);
        holds!(same, "I9: t{thread} sees what came after its birth");
        Ok(())
    }

    /// Somebody was told that a word was taken.
    pub fn acknowledged(&mut self, disk: &Disk, thread: Place, word: Word) -> Result<(), Broken> {
        if self.written.contains(&word) {
            return Ok(());
        }
        holds!(is_held(&disk.threads[thread], word), "I1: w{word} was acknowledged and is not in t{thread}");
        self.watches[thread].waiting.push(word);
        Ok(())
    }

    /// An invocation goes out.
    pub fn invoked(&self, disk: &Disk, thread: Place, call: &CallId) -> Result<(), Broken> {
        let row = &disk.threads[thread];
        let state = row.calls.get(call).map(|row| row.state);
        let life = self.watches[thread].lives.get(call).copied();
        holds!(state == Some(CallState::Open), "I6: t{thread} invokes {call}, which is {state:?}");
        holds!(life == Some(CallState::Open), "I6: t{thread} invokes {call}, which is {life:?}");
        let answered = self.answered.contains(&(thread, call.clone()));
        holds!(!answered, "I6: t{thread} invokes {call} again, though it was answered");
        holds!(!row.head.is_closed(), "I11: closed t{thread} invokes {call}");
        Ok(())
    }

    /// The answer to an invocation was recorded.
    pub fn acknowledged_call(&mut self, thread: Place, call: &CallId, now: Timestamp) {
        if self.answered.insert((thread, call.clone())) {
            self.watches[thread].heard.insert(call.clone(), now);
        }
    }

    /// A notification goes to every server.
    pub fn notified(&mut self, disk: &Disk, notification: &Notification) -> Result<(), Broken> {
        let first = self.notified.insert(notification.clone());
        holds!(first, "I7: {notification:?} is sent twice");
        let watch = &self.watches[notification.thread];
        match &notification.call {
            Some(call) => {
                let life = watch.lives.get(call).copied();
                let ended = !matches!(life, None | Some(CallState::Open | CallState::Subscribed));
                holds!(ended, "I7: the servers are told that {call} has ended, which is {life:?}");
            }
            None => {
                let closed = disk.threads[notification.thread].head.is_closed();
                holds!(closed, "I7: t{} is open, the servers are told otherwise", notification.thread);
            }
        }
        Ok(())
    }

    /// Nothing is outstanding any more: every thread is at rest, and nothing is left behind.
    pub fn look_at_rest(&mut self, disk: &Disk) -> Result<(), Broken> {
        self.look_everywhere(disk)?;
        holds!(disk.outbox.is_empty(), "I1: letters are left: {:?}", disk.outbox);
        for (thread, row) in disk.threads.iter().enumerate() {
            let (head, watch) = (&row.head, &self.watches[thread]);
            let rests = !matches!(head.phase, Phase::Asking { .. } | Phase::Waiting);
            holds!(rests, "I6: t{thread} does not come to rest: {head:?}");
            holds!(!watch.has_open(), "I6: t{thread} has open calls: {head:?}");
            let undelivered = row.questions.values().any(|row| row.selected.is_some() && !row.delivered);
            holds!(!undelivered, "I1: an answer in t{thread} was not delivered: {:?}", row.questions);
            let at_rest = matches!(head.phase, Phase::Idle | Phase::Closed);
            holds!(!at_rest || row.held.is_empty(), "I1: t{thread} rests and holds {:?}", row.held);
            let lost = watch.waiting.iter().find(|word| !is_held(row, **word));
            holds!(!at_rest || lost.is_none(), "I1: t{thread} has lost {lost:?}");
            if at_rest {
                watch.look_at_results(thread, row)?;
            }
            if head.phase == Phase::Idle && !watch.interrupted {
                watch.look_at_answers(thread, row)?;
            }
            let behind = head.backlogs.iter().find(|backlog| !backlog.held.is_empty());
            let crowded = head.children.len() >= self.limits.children;
            holds!(behind.is_none() || crowded, "I1: t{thread} is at rest, and {behind:?} waits");
            let children: BTreeSet<_> = (0..disk.threads.len())
                .filter(|child| disk.parent(*child) == Some(thread))
                .filter(|child| !disk.threads[*child].head.is_closed())
                .map(name)
                .collect();
            let known: BTreeSet<_> = head.children.iter().cloned().collect();
            holds!(children == known, "I11: open children of t{thread} are {children:?}, it knows {known:?}");
        }
        Ok(())
    }
}

/// The call that a message is about.
fn call_of(message: &Message) -> Option<&CallId> {
    match message {
        Message::Returned { call, .. }
        | Message::CallFailed { call, .. }
        | Message::TimedOut { call }
        | Message::Happened { call, .. }
        | Message::WantsSignIn { call, .. }
        | Message::WantsChoice { call, .. }
        | Message::Viewed { call, .. }
        | Message::Chose { call, .. }
        | Message::Ticked { call, .. }
        | Message::Cancel { call } => Some(call),
        _ => None,
    }
}

fn is_held(row: &Row, word: Word) -> bool {
    row.held.values().chain(row.shelf.values()).any(|entry| word_in(entry) == Some(word))
}

/// I1: the rows that are held are exactly those that the head counts.
fn look_at_held(thread: Place, row: &Row, limits: &Limits) -> Result<(), Broken> {
    let head = &row.head;
    let counted = [(Queue::Held, &head.held), (Queue::Queued, &head.queued)]
        .into_iter()
        .flat_map(|(queue, held)| (held.first..held.next).map(move |no| (queue, no)));
    let agrees = row.held.keys().copied().eq(counted);
    holds!(agrees, "I1: t{thread} holds {:?}, its head says {:?} {:?}", row.held, head.held, head.queued);
    let idle = matches!(head.phase, Phase::Idle | Phase::Closed);
    holds!(!idle || row.held.is_empty(), "I1: t{thread} is {:?} and holds {:?}", head.phase, row.held);
    if head.phase == Phase::Waiting {
        let mut waiting =
            row.held.iter().filter(|((queue, _), _)| *queue == Queue::Held).map(|(_, entry)| entry);
        let oldest = waiting.clone().map(|entry| entry.at).min();
        let user = waiting.any(|entry| matches!(entry.item, Item::User { from: Speaker::User, .. }));
        let asleep = head.batch.iter().find(|call| call.server.is_runtime());
        holds!(oldest.is_none() || asleep.is_none(), "I1: t{thread} sleeps on: {asleep:?}");
        holds!(!user && !head.held.user, "I1: a user waits behind the calls of t{thread}");
        let made = matches!(head.origin, Origin::Event { .. }) && !head.rests;
        let working = head.batch.iter().map(|call| call.since).filter(|_| made);
        let due = oldest.into_iter().chain(working).min().map(|at| at.plus(limits.hold_max));
        holds!(head.due(limits) == due, "I12: t{thread} holds since {oldest:?}, due {:?}", head.due(limits));
    }
    Ok(())
}

/// I1, I12: the events that wait for a child are those that the head counts, and they wait only where others work.
fn look_at_shelf(thread: Place, row: &Row, limits: &Limits) -> Result<(), Broken> {
    let head = &row.head;
    let counted: BTreeSet<(CallId, u64)> = head
        .backlogs
        .iter()
        .flat_map(|backlog| (backlog.held.first..backlog.held.next).map(|no| (backlog.call.clone(), no)))
        .collect();
    let agrees = row.shelf.keys().eq(counted.iter());
    holds!(agrees, "I1: t{thread} shelves {:?}, its head says {:?}", row.shelf, head.backlogs);
    for backlog in &head.backlogs {
        let (waits, works) = (backlog.held.inputs, backlog.at_work.len());
        holds!(waits <= limits.held, "I12: {waits} events of {} wait in t{thread}", backlog.call);
        holds!(works <= limits.event_children, "I12: {works} children of {} work in t{thread}", backlog.call);
        let stuck = waits > 0 && works == 0 && head.children.is_empty();
        holds!(!stuck, "I1: {waits} events of {} wait in t{thread} for nothing", backlog.call);
    }
    Ok(())
}

fn look_at_bounds(thread: Place, head: &Head, limits: &Limits) -> Result<(), Broken> {
    let open = head.open_calls().count();
    // Results behind placeholders find room always; there are no more of them than calls may be open.
    let held = limits.held as usize + limits.open_calls;
    let bounds = [
        ("subscriptions", head.subscriptions.len(), limits.subscriptions),
        ("open calls", open, limits.open_calls),
        ("held", head.held.inputs as usize, held),
        ("queued", head.queued.inputs as usize, limits.held as usize),
        ("questions", head.questions.len(), limits.questions),
        ("children", head.children.len(), limits.children),
        ("turns", head.turns_awake as usize, limits.turns_per_wake as usize),
    ];
    for (what, is, may) in bounds {
        holds!(is <= may, "I12: t{thread} has {is} {what}, it may have {may}");
    }
    Ok(())
}

/// The word of a message, where it has one.
pub fn word_of_message(message: &Message) -> Option<Word> {
    match message {
        Message::Said { text, .. } => word_of(text),
        Message::TurnEnded { answer, .. } => word_of(&answer.text),
        Message::Happened { event, .. } => word_of(&event.text),
        Message::Reported { text, .. } | Message::Told { text } | Message::Ticked { text, .. } => {
            word_of(text)
        }
        Message::Returned { result, .. } => word_of(text_in(&result.content)),
        _ => None,
    }
}
