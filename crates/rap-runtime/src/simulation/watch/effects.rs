//! What a step wants to be done, beside what is stored and what has ended.

use std::collections::BTreeSet;

use rap_agent::{Effect, Input, OpenCall, Phase, Seq, Step, ThreadMessage, Write, words};
use rap_protocol::{CallId, ThreadId};
use serde_json::{Map, Value};

use super::{FOR_CLIENTS, Watch, arguments_of, turn_of};
use crate::simulation::disk::Row;
use crate::simulation::invariants::{Broken, holds};

impl Watch {
    /// I4, I7: the effects are those that follow from what is stored, and from what has ended.
    pub(super) fn judge_effects(
        &mut self,
        row: &Row,
        input: &Input,
        step: &Step,
        asked: Option<(u64, Seq)>,
        cancelled: Vec<CallId>,
    ) -> Result<(), Broken> {
        self.judge_questions(row, input, step, asked)?;
        self.judge_invocations(row, input, step)?;
        judge_answers(step)?;
        judge_notifications(step, cancelled)?;
        self.judge_messages(input, step)
    }

    /// What is asked is what the head says, and covers all; what is not asked any more is given up.
    fn judge_questions(
        &mut self,
        row: &Row,
        input: &Input,
        step: &Step,
        asked: Option<(u64, Seq)>,
    ) -> Result<(), Broken> {
        let asks = picked(step, |effect| match effect {
            Effect::Ask { turn, up_to } => Some((*turn, *up_to)),
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
        holds!(asks == new, "I4: {asks:?} is asked, and {asking:?} is stored");
        let covers = asks.iter().all(|(_, up_to)| *up_to == step.head.seq());
        holds!(covers, "I5: the question {asks:?} does not cover the entries up to {}", step.head.seq());
        let ended = turn_of(input).is_some();
        let given_up: Vec<u64> =
            asked.filter(|_| !ended && asking != asked).map(|(turn, _)| turn).into_iter().collect();
        // An answer may close its thread; its question is given up with everything else.
        let closes = ended && step.head.is_closed();
        let fits = abandoned == given_up || closes && abandoned.len() <= 1;
        holds!(fits, "I4: {abandoned:?} is abandoned instead of {given_up:?}");
        self.asking = asking;
        Ok(())
    }

    /// What is invoked is stored, was allowed where it has to be, and is for whoever set the thread going.
    fn judge_invocations(&self, row: &Row, input: &Input, step: &Step) -> Result<(), Broken> {
        let allowed = picked(step, |effect| match effect {
            Effect::InvokeApproved { call, .. } => Some(call),
            _ => None,
        });
        let may = match input {
            Input::Choose { call, selected: Some(words::ALLOW) } => Some(call),
            _ => None,
        };
        let may = may.filter(|call| row.calls.get(*call).is_some_and(|row| row.open.unapproved));
        holds!(allowed.iter().copied().eq(may), "I8: {allowed:?} is sent, allowed is {may:?}");
        let invoked = picked(step, |effect| match effect {
            Effect::Invoke { call, arguments } => Some((call, arguments)),
            _ => None,
        });
        let theirs = |call: &&OpenCall| call.is_sent() && !step.head.is_closed();
        let opened: Vec<_> = step.writes.iter().filter_map(opened).filter(theirs).collect();
        let stored = invoked.iter().map(|(call, _)| *call).eq(opened.iter().copied());
        holds!(stored, "I4: {invoked:?} is invoked, {opened:?} is stored");
        let trusted = opened.iter().find(|call| self.of_event && call.name == FOR_CLIENTS);
        holds!(trusted.is_none(), "I8: an event makes {trusted:?}, which it may not");
        for (call, arguments) in invoked {
            let own = step.writes.iter().find_map(|write| arguments_in(write, &call.id));
            holds!(own == Some(arguments), "I6: {call:?} is invoked with {arguments:?}, not with {own:?}");
        }
        Ok(())
    }

    /// Threads tell only their parents and their children; of a closing all of them hear, once.
    fn judge_messages(&mut self, input: &Input, step: &Step) -> Result<(), Broken> {
        let parent = step.head.origin().parent().map(|(parent, ..)| parent);
        let mut told = BTreeSet::new();
        let sent: Vec<(&ThreadId, &ThreadMessage)> = step.writes.iter().filter_map(sent).collect();
        let delivers = step.effects.contains(&Effect::Deliver);
        holds!(delivers != sent.is_empty(), "I4: {sent:?} is stored, and to be delivered: {delivers}");
        for (to, message) in sent {
            match message {
                ThreadMessage::Close | ThreadMessage::ChildClosed => {
                    let new = told.insert((to.clone(), *message == ThreadMessage::Close));
                    holds!(new, "I2: {to} is told twice");
                }
                ThreadMessage::ChildIdle => {
                    let first = !std::mem::replace(&mut self.left_work, true);
                    holds!(parent == Some(to) && first, "I2: {to} hears twice that its child is idle");
                }
                ThreadMessage::Notice { text } => {
                    let closes = parent == Some(to) && step.head.is_closed();
                    holds!(closes, "I8: {to} is told {text}");
                }
                ThreadMessage::Report { text, .. } => {
                    holds!(parent == Some(to), "I8: {to} hears {text}, and is not the parent");
                }
                ThreadMessage::Text { text, .. } => {
                    holds!(self.children.contains(to), "I8: {to} hears {text}, and is no child");
                }
                ThreadMessage::Resume => {
                    holds!(*input == Input::Resume, "I8: {to} is resumed by {input:?}");
                }
            }
        }
        let mut closings = BTreeSet::new();
        if step.head.is_closed() {
            closings.extend(std::mem::take(&mut self.children).into_iter().map(|child| (child, true)));
            closings.extend(parent.map(|parent| (parent.clone(), false)));
        }
        holds!(told == closings, "I11: {told:?} is told, {closings:?} has to be");
        Ok(())
    }
}

fn sent(write: &Write) -> Option<(&ThreadId, &ThreadMessage)> {
    match write {
        Write::Send { to, message } => Some((to, message)),
        _ => None,
    }
}

/// What is to be delivered is stored.
fn judge_answers(step: &Step) -> Result<(), Broken> {
    let answers = picked(step, |effect| match effect {
        Effect::Answer { no, .. } => Some(*no),
        _ => None,
    });
    let chosen = step.writes.iter().filter_map(|write| match write {
        Write::Answer { no, .. } => Some(*no),
        _ => None,
    });
    holds!(answers.iter().copied().eq(chosen), "I4: {answers:?} is to be delivered and not stored");
    Ok(())
}

/// The servers hear of what has ended, and of a closing.
fn judge_notifications(step: &Step, mut cancelled: Vec<CallId>) -> Result<(), Broken> {
    let mut notified = picked(step, |effect| match effect {
        Effect::NotifyCancel { call } => Some(call.clone()),
        _ => None,
    });
    notified.sort();
    cancelled.sort();
    holds!(notified == cancelled, "I7: the servers hear of {notified:?}, ended are {cancelled:?}");
    let closings = step.effects.iter().filter(|effect| **effect == Effect::NotifyClose).count();
    let closed = usize::from(step.head.is_closed());
    holds!(closings == closed, "I7: {closings} closings are told of, {closed} happened");
    Ok(())
}

/// The effects of a kind, in order.
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
