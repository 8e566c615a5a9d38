//! The invariants, which are checked after every action. The checker keeps its own records of what clients, tool
//! servers and models have sent and received.
//!
//! - I1 Each input has a unique tag. The tag of an acknowledged input is in the history or held at all times. Held
//!   inputs enter the history in order of arrival.
//! - I2 Each applied input is passed to the rules a second time at once, and chaos repeats some of them later. No tag
//!   is written twice.
//! - I3 The step of the store is the one that the rules give for the head and facts of the reference store. Two steps
//!   of one thread from the same head would differ from it.
//! - I4 Checked like I3. In addition, head, entries, held rows, calls and questions agree after every commit, the
//!   effects of a step are those that the stored rows require, and after every crash and at the end the database equals
//!   the reference store.
//! - I5 A state machine reads the entries one by one and knows which results are missing. An answer directly follows
//!   the entries that its model request covers.
//! - I6 An invocation is sent only for a call that is open and not answered. The history shows for a call one result,
//!   or a placeholder and one synthetic call, or an error and one late result.
//! - I7 Each notification is sent once, and only for something that has ended.
//! - I8, I10 The checker follows the state of each call by the inputs. Accepted inputs have to fit the state.
//! - I9 An event child is spawned at the point where its parent was last idle without open calls, and a fork begins at
//!   the last valid point. The inherited entries are compared with a copy from the time of creation.
//! - I11 A closed thread refuses everything with `Closed`, and no open thread does.
//! - I12 All counts of the head stay within the limits, and inputs are refused with `Full` only at a limit.
//! - I13 See `fairness`.

mod refusals;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::mem::discriminant;

use rap_agent::{
    CallState, Head, Ignored, Input, Item, Limits, LostAfter, Origin, Phase, Queue, Seq, Speaker,
    StatusCheck, Step, ThreadMessage, Write, texts,
};
use rap_protocol::{CallId, ThreadId, Timestamp};

use super::peers::{Tag, tag_of, text_in};
use super::reference::{ReferenceStore, Row, ThreadIndex, is_answer};
use super::tracker::{ThreadTracker, tag_in};

/// Describes the violation of an invariant. The text begins with the id of the invariant.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Violation(pub(super) String);

pub(super) fn violation<T>(text: String) -> Result<T, Violation> {
    Err(Violation(text))
}

/// Returns a violation with the given text unless the condition is true.
macro_rules! ensure {
    ($condition:expr, $($text:tt)*) => {
        if !$condition {
            return Err($crate::simulation::invariants::Violation(format!($($text)*)));
        }
    };
}
pub(super) use ensure;

/// A notification to a server that a call was cancelled or, without a call, that the thread was closed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Notification {
    pub(super) server: String,
    pub(super) thread: ThreadId,
    pub(super) call: Option<CallId>,
}

pub(super) struct Checker {
    limits: Limits,
    lost_after: LostAfter,
    trackers: Vec<ThreadTracker>,
    /// Tags that are in a history.
    written: HashSet<Tag>,
    /// Tags of inputs that need not be in a history: their call had ended, or their subscription was cancelled.
    exempt: HashSet<Tag>,
    /// Calls whose invocation has a recorded response.
    answered: BTreeSet<CallId>,
    notified: BTreeSet<Notification>,
    /// Simulated time of the last recorded acceptance or status check of a call.
    last_contact: BTreeMap<CallId, Timestamp>,
    /// Simulated times of the latest consecutive status checks in which the server did not know the call.
    gone: BTreeMap<CallId, Vec<Timestamp>>,
}

impl Checker {
    pub(super) fn new(limits: Limits, lost_after: LostAfter) -> Checker {
        Checker {
            limits,
            lost_after,
            trackers: Vec::new(),
            written: HashSet::new(),
            exempt: HashSet::new(),
            answered: BTreeSet::new(),
            notified: BTreeSet::new(),
            last_contact: BTreeMap::new(),
            gone: BTreeMap::new(),
        }
    }

    /// A thread was added: a root, or a child, in which case `spawned_by` is its parent and the input that spawned it.
    pub(super) fn on_thread_added(
        &mut self,
        reference: &ReferenceStore,
        thread: ThreadIndex,
        spawned_by: Option<(ThreadIndex, &Input)>,
    ) {
        let mut tracker = ThreadTracker::new(reference, thread);
        match spawned_by {
            // A child of `spawn_thread` begins in the middle of an answer, so it has the settled point of its parent.
            Some((parent, Input::TurnEnded { .. })) => {
                let parent = &self.trackers[parent];
                tracker.settled = parent.settled;
                tracker.answered = parent.answered;
                tracker.caused_by_event = parent.caused_by_event;
            }
            Some(_) => {
                tracker.answered = reference.threads[thread].base();
                tracker.caused_by_event = true;
            }
            None => {}
        }
        self.trackers.push(tracker);
    }

    /// I9: a fork begins at the last point at which every call has its result, and is idle.
    pub(super) fn on_fork(
        &mut self,
        reference: &ReferenceStore,
        fork: ThreadIndex,
        at: Option<Seq>,
    ) -> Result<(), Violation> {
        let row = &reference.threads[fork];
        let Some(source) = row.source else { return violation(format!("I9: t{fork} has no source")) };
        let at = at.unwrap_or(Seq::MAX).min(reference.threads[source].last());
        let (mut valid, mut answered, mut missing) = (0, 0, BTreeSet::new());
        for (entry, seq) in reference.visible(source, at).into_iter().zip(1..) {
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
        ensure!(begins == valid, "I9: t{fork}, forked at {at}, begins at {begins} instead of {valid}");
        for (entry, seq) in reference.visible(source, begins).into_iter().zip(1..) {
            if is_answer(&entry.item) {
                answered = seq - 1;
            }
        }
        let head = &row.head;
        let fresh = *head.phase() == Phase::Idle && *head.origin() == Origin::Root && head.turn() == 0;
        let detached = head.subscriptions().is_empty() && head.children().next().is_none();
        ensure!(fresh && detached, "I9: fork t{fork} begins with the head {head:?}");
        self.on_thread_added(reference, fork, None);
        self.trackers[fork].answered = answered;
        self.check_thread(reference, fork)
    }

    /// A thread asks the model. I5: the request covers the entries that were stored with it.
    pub(super) fn on_model_request(
        &mut self,
        reference: &ReferenceStore,
        thread: ThreadIndex,
        turn: u64,
        up_to: Seq,
        summary: bool,
    ) -> Result<(), Violation> {
        let tracker = &mut self.trackers[thread];
        if summary {
            tracker.summary_prompt = Some((turn, up_to));
            return Ok(());
        }
        if let Some((current, covers)) = tracker.asking.filter(|(current, _)| *current == turn) {
            ensure!(
                covers == up_to,
                "I5: model request {current} of t{thread} covers {up_to} instead of {covers}"
            );
        }
        let last = reference.threads[thread].head.turn();
        ensure!(turn <= last, "I4: model request {turn} of t{thread} is sent before it is stored");
        Ok(())
    }

    /// Checks a step before its commit.
    pub(super) fn check_step(
        &mut self,
        reference: &ReferenceStore,
        thread: ThreadIndex,
        input: &Input,
        step: &Step,
        now: Timestamp,
    ) -> Result<(), Violation> {
        let row = &reference.threads[thread];
        ensure!(!row.head.is_closed(), "I11: closed t{thread} accepts {input:?}");
        for write in &step.writes {
            match write {
                Write::Spawn(spawn) => {
                    let point = match spawn.head.origin() {
                        Origin::Spawn { .. } => row.last() + 1,
                        _ => self.trackers[thread].settled,
                    };
                    let at = spawn.at;
                    ensure!(at == point, "I9: a child of t{thread} begins at {at} instead of {point}");
                    let parent = spawn.head.origin().parent().map(|(parent, ..)| parent);
                    ensure!(parent == Some(&row.thread.id), "I9: a child has the wrong parent");
                }
                Write::DropBacklog { call } => {
                    let dropped = row.backlog.iter().filter(|((of, _), _)| of == call);
                    self.exempt.extend(dropped.filter_map(|(_, entry)| tag_in(entry)));
                }
                Write::Settle { call, state: CallState::Subscribed } => {
                    self.last_contact.insert(call.clone(), now);
                    self.gone.remove(call);
                }
                _ => {}
            }
        }
        match input {
            Input::CallFailed { call, text } if text == texts::CALL_LOST => self.check_lost(call, now)?,
            Input::SubscriptionLost { call } => self.check_lost(call, now)?,
            Input::Notice { .. } => {
                let same = is_same_phase(step.head.phase(), row.head.phase());
                let same = same && step.head.seq() == row.head.seq() + 1;
                ensure!(same, "I8: a notice changes the head to {:?} from {:?}", step.head, row.head);
            }
            _ => {}
        }
        self.trackers[thread].check_step(row, input, step, &self.limits)
    }

    /// I8: a call is lost only if its server denied it twice in a row, far enough apart.
    fn check_lost(&self, call: &CallId, now: Timestamp) -> Result<(), Violation> {
        let denied_at = self.gone.get(call).map_or(&[][..], Vec::as_slice);
        let apart = denied_at.first().is_some_and(|first| now.since(*first) >= self.lost_after.pause());
        ensure!(
            denied_at.len() > 1 && apart,
            "I8: {call} is considered lost at {now:?}, its server denied it at {denied_at:?}"
        );
        Ok(())
    }

    /// I12: status checks of a call keep the configured pauses.
    pub(super) fn on_status_check(&self, call: &CallId, now: Timestamp) -> Result<(), Violation> {
        let wait = if self.gone.contains_key(call) { self.lost_after.pause() } else { self.lost_after.0 };
        if let Some(last) = self.last_contact.get(call) {
            let late_enough = now.since(*last) >= wait;
            ensure!(late_enough, "I12: {call} is checked at {now:?}, too soon after {last:?}");
        }
        Ok(())
    }

    /// The clock was set back.
    pub(super) fn on_set_back(&mut self) {
        self.trackers.iter_mut().for_each(|tracker| tracker.set_back = true);
    }

    /// A tool server answers that it does not know a call.
    pub(super) fn on_gone(&mut self, call: &CallId, now: Timestamp) {
        self.gone.entry(call.clone()).or_default().push(now);
    }

    /// The result of a status check is recorded. Results that are not recorded do not count.
    pub(super) fn on_check_recorded(&mut self, call: &CallId, check: StatusCheck, at: Timestamp) {
        self.last_contact.insert(call.clone(), at);
        if check.gone_since.is_none() {
            self.gone.remove(call);
        }
    }

    /// The response to an invocation is recorded.
    pub(super) fn on_invocation_recorded(&mut self, call: &CallId, at: Timestamp) {
        if self.answered.insert(call.clone()) {
            self.last_contact.insert(call.clone(), at);
        }
    }

    /// An input is refused. The reason has to be true.
    pub(super) fn on_refusal(
        &mut self,
        reference: &ReferenceStore,
        thread: ThreadIndex,
        input: &Input,
        now: Timestamp,
        why: &Ignored,
    ) -> Result<(), Violation> {
        let row = &reference.threads[thread];
        let closed = row.head.is_closed();
        ensure!(closed == (*why == Ignored::Closed), "I11: t{thread} refuses {input:?} with {why:?}");
        let tracker = &self.trackers[thread];
        let honest = closed || self.is_reason_true(tracker, row, input, now, why);
        ensure!(honest, "I1: t{thread} refuses {input:?} with {why:?}, which is not true: {:?}", row.head);
        if *why == Ignored::SettledCall {
            self.exempt.extend(tag_of_input(input));
        }
        Ok(())
    }

    /// Checks after a commit that the stored data of a thread is consistent.
    pub(super) fn check_thread(
        &mut self,
        reference: &ReferenceStore,
        thread: ThreadIndex,
    ) -> Result<(), Violation> {
        let row = &reference.threads[thread];
        let tracker = &mut self.trackers[thread];
        let head = &row.head;
        ensure!(row.last() == head.seq(), "I4: t{thread} ends at {}, its head at {}", row.last(), head.seq());
        tracker.read_history(thread, row, &mut self.written)?;
        check_held(thread, row, tracker, &self.limits)?;
        check_backlog(thread, row, &self.limits)?;
        tracker.check_calls(thread, row)?;
        check_bounds(thread, head, &self.limits)?;
        let (count, limit) = (reference.depth(thread), self.limits.depth);
        ensure!(count <= limit, "I12: t{thread} has {count} ancestors, the limit is {limit}");
        let settled = tracker.settled;
        ensure!(
            head.settled_up_to() == settled,
            "I9: t{thread} was settled at {settled}, the head says {}",
            head.settled_up_to()
        );
        tracker.check_coverage(thread, head)?;
        let written = &self.written;
        tracker.waiting.retain(|tag| !written.contains(tag));
        let lost = tracker.waiting.iter().find(|tag| !is_held(row, **tag));
        ensure!(lost.is_none(), "I1: t{thread} has lost w{}", lost.expect("bug: checked before"));
        Ok(())
    }

    /// I9: the inherited entries of a thread are still those of the time of its creation.
    pub(super) fn check_inherited(&self, reference: &ReferenceStore) -> Result<(), Violation> {
        for thread in 0..reference.threads.len() {
            let inherited = reference.visible(thread, reference.threads[thread].base());
            let same = inherited.into_iter().eq(&self.trackers[thread].inherited);
            ensure!(same, "I9: the inherited entries of t{thread} have changed");
        }
        Ok(())
    }

    /// I1: the sender of an input got a success response.
    pub(super) fn on_acknowledged(&mut self, reference: &ReferenceStore, tag: Tag) -> Result<(), Violation> {
        if self.written.contains(&tag) || self.exempt.contains(&tag) {
            return Ok(());
        }
        let holder = reference.threads.iter().position(|row| is_held(row, tag));
        let Some(holder) = holder else {
            return violation(format!("I1: w{tag} was acknowledged and is neither written nor held"));
        };
        self.trackers[holder].waiting.push(tag);
        Ok(())
    }

    /// I6: an invocation is sent.
    pub(super) fn on_invocation(
        &self,
        reference: &ReferenceStore,
        thread: ThreadIndex,
        call: &CallId,
    ) -> Result<(), Violation> {
        let row = &reference.threads[thread];
        let state = row.calls.get(call).map(|row| row.state);
        let call_state = self.trackers[thread].call_states.get(call).copied();
        ensure!(state == Some(CallState::Open), "I6: t{thread} invokes {call}, which is {state:?}");
        ensure!(call_state == Some(CallState::Open), "I6: t{thread} invokes {call}, which is {call_state:?}");
        let answered = self.answered.contains(call);
        ensure!(!answered, "I6: t{thread} invokes {call} again, although it was answered");
        ensure!(!row.head.is_closed(), "I11: closed t{thread} invokes {call}");
        Ok(())
    }

    /// I7: a notification is sent to a server.
    pub(super) fn on_notification(
        &mut self,
        reference: &ReferenceStore,
        notification: Notification,
    ) -> Result<(), Violation> {
        let first = self.notified.insert(notification.clone());
        ensure!(first, "I7: {notification:?} is sent twice");
        let Some(thread) = reference.index(&notification.thread) else {
            return violation(format!("I7: {notification:?} is about an unknown thread"));
        };
        match &notification.call {
            Some(call) => {
                let call_state = self.trackers[thread].call_states.get(call).copied();
                let ended = !matches!(call_state, None | Some(CallState::Open | CallState::Subscribed));
                ensure!(ended, "I7: a server is notified of the end of {call}, which is {call_state:?}");
            }
            None => {
                let closed = reference.threads[thread].head.is_closed();
                ensure!(closed, "I7: a server is notified of the closing of t{thread}, which is open");
            }
        }
        Ok(())
    }

    /// Checks at the end of a run that every thread is idle or closed and that nothing is left over.
    pub(super) fn check_idle(&mut self, reference: &ReferenceStore) -> Result<(), Violation> {
        self.check_inherited(reference)?;
        ensure!(reference.outbox.is_empty(), "I1: messages were not delivered: {:?}", reference.outbox);
        for (thread, row) in reference.threads.iter().enumerate() {
            let (head, tracker) = (&row.head, &self.trackers[thread]);
            let idle = matches!(head.phase(), Phase::Idle | Phase::Closed);
            ensure!(idle, "I6: t{thread} does not become idle: {head:?}");
            ensure!(!tracker.has_open(), "I6: t{thread} has open calls: {head:?}");
            ensure!(row.held.is_empty(), "I1: t{thread} is idle and holds {:?}", row.held);
            let lost = tracker.waiting.iter().find(|tag| !is_held(row, **tag));
            ensure!(lost.is_none(), "I1: t{thread} has lost {lost:?}");
            tracker.check_results(thread, row)?;
            if *head.phase() == Phase::Idle && !tracker.interrupted {
                tracker.check_answered(thread, row)?;
            }
            let waiting = head.backlogs().iter().find(|backlog| !backlog.held.is_empty());
            ensure!(waiting.is_none(), "I1: t{thread} is idle, but events wait: {waiting:?}");
            let children: BTreeSet<_> = (0..reference.threads.len())
                .filter(|child| reference.parent(*child) == Some(thread))
                .filter(|child| !reference.threads[*child].head.is_closed())
                .map(|child| reference.threads[child].thread.id.clone())
                .collect();
            let known: BTreeSet<_> = head.children().cloned().collect();
            ensure!(
                children == known,
                "I17: open children of t{thread} are {children:?}, its head has {known:?}"
            );
        }
        Ok(())
    }
}

fn is_held(row: &Row, tag: Tag) -> bool {
    row.held.values().chain(row.backlog.values()).any(|entry| tag_in(entry) == Some(tag))
}

/// I1: the held rows are exactly those that the head counts.
fn check_held(
    thread: ThreadIndex,
    row: &Row,
    tracker: &ThreadTracker,
    limits: &Limits,
) -> Result<(), Violation> {
    let head = &row.head;
    let counted = [(Queue::UntilBatchCloses, head.held()), (Queue::UntilIdle, head.queued())]
        .into_iter()
        .flat_map(|(queue, held)| (held.first..held.next).map(move |number| (queue, number)));
    let agrees = row.held.keys().copied().eq(counted);
    let (held, queued) = (head.held(), head.queued());
    ensure!(agrees, "I1: t{thread} holds {:?}, its head says {held:?} {queued:?}", row.held);
    let idle = matches!(head.phase(), Phase::Idle | Phase::Closed);
    ensure!(!idle || row.held.is_empty(), "I1: t{thread} is {:?} and holds {:?}", head.phase(), row.held);
    if matches!(head.phase(), Phase::Waiting { .. }) {
        let mut waiting = row
            .held
            .iter()
            .filter(|((queue, _), _)| *queue == Queue::UntilBatchCloses)
            .map(|(_, entry)| entry);
        let oldest = waiting.clone().map(|entry| entry.at).min();
        let user = waiting.any(|entry| matches!(entry.item, Item::User { from: Speaker::User, .. }));
        let asleep = head.batch().iter().find(|call| call.server.is_runtime());
        let wakes = oldest.is_none() || asleep.is_none() || has_wake_limit(limits);
        ensure!(wakes, "I1: t{thread} holds input but keeps sleeping: {asleep:?}");
        ensure!(!user && !held.user, "I1: a user message waits for the calls of t{thread}");
        let sleeps = head.batch().iter().all(|call| call.server.is_runtime());
        ensure!(!sleeps || queued.is_empty(), "I1: a user message waits for a sleep of t{thread}");
        let event_child = matches!(head.origin(), Origin::Event { .. }) && !tracker.reported_idle;
        let working = head.batch().iter().map(|call| call.since).filter(|_| event_child);
        let latest = oldest.into_iter().chain(working).min().map(|at| at.plus(limits.hold_max));
        let due = head.due(limits);
        // A thread starts to wait again if the clock is set back.
        let earlier = tracker.set_back && due.is_some() && due < latest;
        ensure!(
            due == latest || earlier,
            "I12: t{thread} holds input since {oldest:?}, but is due at {due:?}"
        );
    }
    Ok(())
}

/// I1, I12: the events in backlogs are those that the head counts, and they wait only while event children are at work.
fn check_backlog(thread: ThreadIndex, row: &Row, limits: &Limits) -> Result<(), Violation> {
    let head = &row.head;
    let counted: BTreeSet<(CallId, u64)> = head
        .backlogs()
        .iter()
        .flat_map(|backlog| {
            (backlog.held.first..backlog.held.next).map(|number| (backlog.call.clone(), number))
        })
        .collect();
    let agrees = row.backlog.keys().eq(counted.iter());
    ensure!(agrees, "I1: t{thread} has the backlog {:?}, its head says {:?}", row.backlog, head.backlogs());
    for backlog in head.backlogs() {
        let (waiting, active) = (backlog.held.inputs, backlog.active_children.len());
        ensure!(waiting <= limits.held, "I12: {waiting} events of {} wait in t{thread}", backlog.call);
        ensure!(
            active <= limits.event_children,
            "I12: {active} children of {} are at work in t{thread}",
            backlog.call
        );
        let at_work = head.backlogs().iter().any(|backlog| !backlog.active_children.is_empty());
        let stuck = waiting > 0 && active == 0 && !at_work;
        ensure!(
            !stuck,
            "I1: {waiting} events of {} wait in t{thread} although no event child is at work",
            backlog.call
        );
    }
    Ok(())
}

fn check_bounds(thread: ThreadIndex, head: &Head, limits: &Limits) -> Result<(), Violation> {
    let open = head.open_calls().count();
    // Late results are always accepted. There cannot be more of them than open calls.
    let held = limits.held as usize + limits.open_calls;
    let at_work = head.backlogs().iter().map(|backlog| backlog.active_children.len()).sum::<usize>();
    let bounds = [
        ("subscriptions", head.subscriptions().len(), limits.subscriptions),
        ("open calls", open, limits.open_calls),
        ("held", head.held().inputs as usize, held),
        ("queued", head.queued().inputs as usize, limits.held as usize),
        ("questions", head.questions().len(), rap_agent::KEPT_QUESTIONS * limits.questions),
        ("children at work", at_work, limits.children),
        ("turns", head.turns_since_external_input() as usize, limits.turns_per_wake as usize),
    ];
    for (name, count, limit) in bounds {
        ensure!(count <= limit, "I12: t{thread} has {count} {name}, the limit is {limit}");
    }
    Ok(())
}

/// Returns whether input may have to wait because of the hourly budget for wakes.
fn has_wake_limit(limits: &Limits) -> bool {
    limits.budgets.per_hour.wakes.is_some()
}

/// Returns the tag of an input, if it has one.
pub(super) fn tag_of_input(input: &Input) -> Option<Tag> {
    match input {
        Input::Begin { message: Some(message) } | Input::UserMessage { message, .. } => tag_of(&message.text),
        Input::TurnEnded { answer, .. } => tag_of(&answer.text),
        Input::Event { event, .. } => tag_of(&event.text),
        Input::FromThread {
            message: ThreadMessage::Report { text, .. } | ThreadMessage::Text { text, .. },
            ..
        } => tag_of(text),
        Input::ToolResult { result, .. } => tag_of(text_in(&result.content)),
        _ => None,
    }
}

/// Returns true if two phases differ at most in times, which every step moves if the clock was set back.
fn is_same_phase(one: &Phase, other: &Phase) -> bool {
    let calls = |phase: &Phase| match phase {
        Phase::Waiting { batch } => batch.iter().map(|call| call.id.clone()).collect(),
        _ => Vec::new(),
    };
    discriminant(one) == discriminant(other) && calls(one) == calls(other)
}
