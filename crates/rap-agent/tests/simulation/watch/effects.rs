//! What a step wants to be done, beside what is stored and what has ended.

use std::collections::BTreeSet;

use rap_agent::{Effect, Letter, Message, Phase, Seq, Step, Write, words};
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
        let allows = |call: &rap_agent::OpenCall| !self.of_event || call.name != FOR_CLIENTS;
        let trusted = opened.iter().find(|call| !allows(call));
        holds!(trusted.is_none(), "I8: an event makes {trusted:?}, which it may not");
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
}

fn opened(write: &Write) -> Option<&rap_agent::OpenCall> {
    match write {
        Write::Open(open) => Some(open),
        _ => None,
    }
}

fn arguments_in<'a>(write: &'a Write, call: &CallId) -> Option<&'a Map<String, Value>> {
    let Write::Append { entry, .. } = write else { return None };
    arguments_of(entry, call)
}
