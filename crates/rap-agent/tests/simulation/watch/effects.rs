//! What a step wants to be done, beside what is stored and what has ended.

use std::collections::BTreeSet;

use rap_agent::{Effect, Letter, Message, OpenCall, Phase, Seq, Step, Write, words};
use rap_protocol::CallId;
use serde_json::{Map, Value};

use super::{FOR_CLIENTS, Watch, arguments_of};
use crate::sim::disk::Row;
use crate::sim::invariants::{Broken, holds};

impl Watch {
    /// I4, I7: the effects are those that follow from what is stored, and from what has ended.
    pub(super) fn judge_effects(
        &mut self,
        row: &Row,
        message: &Message,
        step: &Step,
        asked: Option<(u64, Seq)>,
        cancelled: Vec<CallId>,
    ) -> Result<(), Broken> {
        self.judge_questions(row, message, step, asked)?;
        self.judge_invocations(row, message, step)?;
        judge_answers(step)?;
        judge_notifications(step, cancelled)?;
        self.judge_letters(row, step)
    }

    /// What is asked is what the head says, and covers all; what is not asked any more is given up.
    fn judge_questions(
        &mut self,
        row: &Row,
        message: &Message,
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
        Ok(())
    }

    /// What is invoked is stored, was allowed where it has to be, and is for whoever set the thread going.
    fn judge_invocations(&self, row: &Row, message: &Message, step: &Step) -> Result<(), Broken> {
        let allowed = picked(step, |effect| match effect {
            Effect::Dispatch { call } => Some(call),
            _ => None,
        });
        let may = match message {
            Message::Chose { call, selected: Some(words::ALLOW) } => Some(call),
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
    fn judge_letters(&mut self, row: &Row, step: &Step) -> Result<(), Broken> {
        let parent = step.head.origin.parent().map(|(parent, ..)| parent);
        let mut told = BTreeSet::new();
        for effect in &step.effects {
            let Effect::Tell { to, letter } = effect else { continue };
            match letter {
                Letter::Close | Letter::ChildClosed => {
                    let new = told.insert((to.clone(), *letter == Letter::Close));
                    holds!(new, "I2: {to} is told twice");
                }
                Letter::ChildRests => {
                    let first = step.head.rests && !row.head.rests;
                    holds!(parent == Some(to) && first, "I2: {to} hears twice that its child rests");
                }
                Letter::Report { text, .. } => {
                    holds!(parent == Some(to), "I8: {to} hears {text}, and is not the parent");
                }
                Letter::Say { text } => {
                    holds!(self.children.contains(to), "I8: {to} hears {text}, and is no child");
                }
            }
        }
        let mut letters = BTreeSet::new();
        if step.head.is_closed() {
            letters.extend(std::mem::take(&mut self.children).into_iter().map(|child| (child, true)));
            letters.extend(parent.map(|parent| (parent.clone(), false)));
        }
        holds!(told == letters, "I11: {told:?} is told, {letters:?} has to be");
        Ok(())
    }
}

/// What is to be delivered is stored.
fn judge_answers(step: &Step) -> Result<(), Broken> {
    let answers = picked(step, |effect| match effect {
        Effect::Answer { no } => Some(*no),
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
