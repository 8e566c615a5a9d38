//! Compares the effects of a step with its writes and with the calls that it ends.

use std::collections::BTreeSet;

use rap_agent::{Effect, Input, OpenCall, Phase, Seq, Step, ThreadMessage, Write, texts};
use rap_protocol::{CallId, ThreadId};
use serde_json::{Map, Value};

use super::{FOR_CLIENTS, ThreadTracker, arguments_of, turn_of};
use crate::simulation::invariants::{Violation, ensure};
use crate::simulation::reference::Row;

impl ThreadTracker {
    /// I4, I7: the effects are exactly those that the stored rows and the ended calls require.
    pub(super) fn check_effects(
        &mut self,
        row: &Row,
        input: &Input,
        step: &Step,
        asked: Option<(u64, Seq)>,
        cancelled: Vec<CallId>,
    ) -> Result<(), Violation> {
        self.check_model_requests(row, input, step, asked)?;
        self.check_invocations(row, input, step)?;
        check_answers(step)?;
        check_notifications(step, cancelled)?;
        self.check_messages(input, step)
    }

    /// A new model request is the one in the head and covers all entries. A request that is no longer current is abandoned.
    fn check_model_requests(
        &mut self,
        row: &Row,
        input: &Input,
        step: &Step,
        asked: Option<(u64, Seq)>,
    ) -> Result<(), Violation> {
        let asks = picked(step, |effect| match effect {
            Effect::AskModel { turn, up_to } => Some((*turn, *up_to)),
            _ => None,
        });
        let abandoned = picked(step, |effect| match effect {
            Effect::Abandon { turn } => Some(*turn),
            _ => None,
        });
        let asking = match step.head.phase() {
            Phase::Asking(asking) => Some((step.head.turn(), asking.up_to)),
            _ => None,
        };
        let new: Vec<_> = asking.filter(|_| step.head.turn() != row.head.turn()).into_iter().collect();
        ensure!(asks == new, "I4: the effects ask {asks:?}, but {asking:?} is stored");
        let covers = asks.iter().all(|(_, up_to)| *up_to == step.head.seq());
        ensure!(
            covers,
            "I5: the model request {asks:?} does not cover the entries up to {}",
            step.head.seq()
        );
        let ended = turn_of(input).is_some();
        let given_up: Vec<u64> =
            asked.filter(|_| !ended && asking != asked).map(|(turn, _)| turn).into_iter().collect();
        // An answer may close its thread, which abandons its model request.
        let closes = ended && step.head.is_closed();
        let fits = abandoned == given_up || closes && abandoned.len() <= 1;
        ensure!(fits, "I4: the step abandons {abandoned:?} instead of {given_up:?}");
        self.asking = asking;
        Ok(())
    }

    /// Invoked calls are stored, are approved if they need approval, and are permitted for the cause of the thread.
    fn check_invocations(&self, row: &Row, input: &Input, step: &Step) -> Result<(), Violation> {
        let allowed = picked(step, |effect| match effect {
            Effect::InvokeApproved { call, .. } => Some(call),
            _ => None,
        });
        let may = match input {
            Input::Choose { call, selected: Some(texts::ALLOW) } => Some(call),
            _ => None,
        };
        let may = may.filter(|call| row.calls.get(*call).is_some_and(|row| row.open.unapproved));
        ensure!(
            allowed.iter().copied().eq(may),
            "I8: {allowed:?} is sent as approved, but {may:?} was approved"
        );
        let invoked = picked(step, |effect| match effect {
            Effect::Invoke { call, arguments } => Some((call, arguments)),
            _ => None,
        });
        let theirs = |call: &&OpenCall| call.is_sent() && !step.head.is_closed();
        let opened: Vec<_> = step.writes.iter().filter_map(opened).filter(theirs).collect();
        let stored = invoked.iter().map(|(call, _)| *call).eq(opened.iter().copied());
        ensure!(stored, "I4: {invoked:?} is invoked, but {opened:?} is stored");
        let trusted = opened.iter().find(|call| self.caused_by_event && call.name == FOR_CLIENTS);
        ensure!(
            trusted.is_none(),
            "I8: a thread caused by an event calls {trusted:?}, which is not permitted"
        );
        for (call, arguments) in invoked {
            let own = step.writes.iter().find_map(|write| arguments_in(write, &call.id));
            ensure!(own == Some(arguments), "I6: {call:?} is invoked with {arguments:?} instead of {own:?}");
        }
        Ok(())
    }

    /// Threads send messages only to their parent and children. When a thread closes, each of them is told once.
    fn check_messages(&mut self, input: &Input, step: &Step) -> Result<(), Violation> {
        let parent = step.head.origin().parent().map(|(parent, ..)| parent);
        let mut notified = BTreeSet::new();
        let sent: Vec<(&ThreadId, &ThreadMessage)> = step.writes.iter().filter_map(sent).collect();
        let delivers = step.effects.contains(&Effect::Deliver);
        ensure!(
            delivers != sent.is_empty(),
            "I4: messages {sent:?} are stored, the effect Deliver is set: {delivers}"
        );
        for (to, message) in sent {
            match message {
                ThreadMessage::Close | ThreadMessage::ChildClosed => {
                    let new = notified.insert((to.clone(), *message == ThreadMessage::Close));
                    ensure!(new, "I2: {to} is told twice of the closing");
                }
                ThreadMessage::EventChildIdle => {
                    let first = !std::mem::replace(&mut self.reported_idle, true);
                    ensure!(
                        parent == Some(to) && first,
                        "I2: {to} is told twice that its child is idle, or is not the parent"
                    );
                }
                ThreadMessage::Notice { text } => {
                    let closes = parent == Some(to) && step.head.is_closed();
                    ensure!(
                        closes,
                        "I8: {to} is sent the notice {text}, although the sender is open or not its child"
                    );
                }
                ThreadMessage::Report { text, .. } => {
                    ensure!(parent == Some(to), "I8: {to} is sent the report {text}, but is not the parent");
                }
                ThreadMessage::Text { text, .. } => {
                    ensure!(self.children.contains(to), "I8: {to} is sent {text}, but is not a child");
                }
                ThreadMessage::Resume => {
                    ensure!(*input == Input::Resume, "I8: {to} is resumed because of {input:?}");
                }
            }
        }
        let mut closings = BTreeSet::new();
        if step.head.is_closed() {
            closings.extend(std::mem::take(&mut self.children).into_iter().map(|child| (child, true)));
            closings.extend(parent.map(|parent| (parent.clone(), false)));
        }
        ensure!(notified == closings, "I11: {notified:?} are told of the closing instead of {closings:?}");
        Ok(())
    }
}

fn sent(write: &Write) -> Option<(&ThreadId, &ThreadMessage)> {
    match write {
        Write::Send { to, message } => Some((to, message)),
        _ => None,
    }
}

/// Answers to be delivered are stored.
fn check_answers(step: &Step) -> Result<(), Violation> {
    let answers = picked(step, |effect| match effect {
        Effect::Answer { number, .. } => Some(*number),
        _ => None,
    });
    let chosen = step.writes.iter().filter_map(|write| match write {
        Write::Answer { number, .. } => Some(*number),
        _ => None,
    });
    ensure!(
        answers.iter().copied().eq(chosen),
        "I4: the answers to {answers:?} are to be delivered but not stored"
    );
    Ok(())
}

/// Tool servers are notified of cancelled calls and of the closing of the thread.
fn check_notifications(step: &Step, mut cancelled: Vec<CallId>) -> Result<(), Violation> {
    let notified = step.effects.iter().flat_map(|effect| match effect {
        Effect::NotifyCancel { call } => std::slice::from_ref(call),
        Effect::NotifyClose { cancelled } => cancelled.as_slice(),
        _ => &[],
    });
    let mut notified: Vec<CallId> = notified.cloned().collect();
    notified.sort();
    cancelled.sort();
    ensure!(
        notified == cancelled,
        "I7: servers are notified of {notified:?}, but {cancelled:?} were cancelled"
    );
    let closes = |effect: &&Effect| matches!(effect, Effect::NotifyClose { .. });
    let closings = step.effects.iter().filter(closes).count();
    let closed = usize::from(step.head.is_closed());
    ensure!(closings == closed, "I7: servers are notified of {closings} closings instead of {closed}");
    Ok(())
}

/// Returns the effects that `pick` selects, in order.
fn picked<'a, T>(step: &'a Step, pick: impl Fn(&'a Effect) -> Option<T>) -> Vec<T> {
    step.effects.iter().filter_map(pick).collect()
}

fn opened(write: &Write) -> Option<&OpenCall> {
    match write {
        Write::Open(open) => Some(open),
        _ => None,
    }
}

fn arguments_in<'a>(write: &'a Write, call: &CallId) -> Option<&'a Map<String, Value>> {
    let Write::Append { entry, .. } = write else { return None };
    arguments_of(entry, call)
}
