//! Each commit of the real store, as it happens: the step is what the rules say, and the model takes it as well.

use std::sync::Arc;

use rap_agent::{Ignored, Input, Step, step};
use rap_protocol::Timestamp;

use super::disk::{Place, place_of};
use super::invariants::{Broken, broken, holds};
use super::state::{Sim, State};
use crate::store::sqlite::{Observed, ObservedOutcome};
use crate::store::{Message, Target, Thread};

impl Sim {
    /// What a commit has written.
    pub(super) fn observe(&self, observed: Vec<Observed>) {
        let mut state = self.state();
        for observed in observed {
            if state.broken.is_some() {
                break;
            }
            let outcome = state.take(observed);
            state.holds(outcome);
        }
        if state.broken.is_some() {
            self.crash.notify_one();
        }
    }
}

impl State {
    fn take(&mut self, observed: Observed) -> Result<(), Broken> {
        let Observed { message, now, outcome } = observed;
        self.steps += 1;
        self.note(|| match &outcome {
            ObservedOutcome::Done { thread, step, .. } => format!(
                "t{} {:?}\n    -> {:?}\n    -> {:?}\n    -> {:?}",
                place_of(thread.key),
                message.input,
                step.head.phase(),
                step.writes,
                step.effects
            ),
            ObservedOutcome::Repeated => format!("{:?} -> known by its key", message.input),
            ObservedOutcome::Ignored { thread, why } => {
                format!("t{} {:?} -> {why:?}", place_of(*thread), message.input)
            }
            ObservedOutcome::Refused(why) => format!("{:?} {:?} -> {why}", message.target, message.input),
        });
        let taken = self.take_outbox_message(&message, &outcome)?;
        match outcome {
            ObservedOutcome::Done { thread, step, children } => {
                self.take_step(&message, &thread, &step, &children, now)
            }
            ObservedOutcome::Ignored { thread, why } if taken || why != Ignored::Duplicate => {
                self.take_refusal(place_of(thread), message.input, why, now)
            }
            _ => Ok(()),
        }
    }

    /// A message between threads goes with the step or refusal of its receiver. Returns false if it was delivered
    /// before.
    fn take_outbox_message(&mut self, message: &Message, outcome: &ObservedOutcome) -> Result<bool, Broken> {
        let (Some(_), Input::FromThread { sender, message: text }, Target::Id(receiver)) =
            (message.outbox, &message.input, &message.target)
        else {
            return Ok(true);
        };
        let taken = self.disk.take_message(sender, receiver, text);
        let applied = matches!(outcome, ObservedOutcome::Done { .. });
        holds!(taken || !applied, "I2: {receiver} takes {text:?} of {sender} twice");
        Ok(taken)
    }

    fn take_step(
        &mut self,
        message: &Message,
        thread: &Arc<Thread>,
        done: &Step,
        children: &[Arc<Thread>],
        now: Timestamp,
    ) -> Result<(), Broken> {
        let place = place_of(thread.key);
        match &message.target {
            Target::New(_) => {
                self.disk.add(thread, rap_agent::Head::new())?;
                self.checker.born(&self.disk, place, None);
            }
            Target::Fork { at, .. } => {
                self.disk.add(thread, done.head.clone())?;
                self.checker.forked(&self.disk, place, *at)?;
            }
            _ => {}
        }
        holds!(place < self.disk.threads.len(), "I4: a step of a thread that is not there: {thread:?}");
        self.is_the_rules_step(place, &message.input, done, now)?;
        let input = &message.input;
        self.checker.judge(&self.disk, place, input, done, now)?;
        self.disk.commit(place, done, children)?;
        for child in children {
            self.checker.born(&self.disk, place_of(child.key), Some((place, input)));
            self.checker.look(&self.disk, place_of(child.key))?;
        }
        self.checker.look(&self.disk, place)?;
        self.offer_again(place, input, now)
    }

    /// I4: the store has made the step that the rules make of what the model knows.
    fn is_the_rules_step(
        &self,
        place: Place,
        input: &Input,
        done: &Step,
        now: Timestamp,
    ) -> Result<(), Broken> {
        let limits = &self.bounds.thread;
        let facts = self.disk.facts(place, input, limits, now);
        let head = self.disk.threads[place].head.clone();
        let expected = step(head, input.clone(), facts, now, limits);
        match expected {
            Ok(expected) if expected == *done => Ok(()),
            expected => broken(format!("I4: {input:?} is {done:?} for t{place}, the rules say {expected:?}")),
        }
    }

    fn take_refusal(
        &mut self,
        place: Place,
        input: Input,
        why: Ignored,
        now: Timestamp,
    ) -> Result<(), Broken> {
        let limits = &self.bounds.thread;
        let facts = self.disk.facts(place, &input, limits, now);
        let expected = step(self.disk.threads[place].head.clone(), input.clone(), facts, now, limits);
        let same = expected.as_ref().err() == Some(&why);
        holds!(same, "I4: t{place} says {why:?} to {input:?}, the rules say {expected:?}");
        self.checker.refused(&self.disk, place, &input, now, &why)
    }

    /// I2: what was taken is offered again and changes nothing. What people do has keys instead, a message between
    /// threads goes with its row, and an event without an id counts each time.
    fn offer_again(&self, place: Place, input: &Input, now: Timestamp) -> Result<(), Broken> {
        match input {
            Input::Event { event, .. } if event.id.is_none() && !event.is_final => return Ok(()),
            Input::Begin { .. }
            | Input::UserMessage { .. }
            | Input::Choose { .. }
            | Input::Interrupt
            | Input::FromThread { .. }
            | Input::Resume
            | Input::Notice { .. }
            | Input::Spent(_) => return Ok(()),
            _ => {}
        }
        let row = &self.disk.threads[place];
        let limits = &self.bounds.thread;
        let facts = self.disk.facts(place, input, limits, now);
        let Ok(again) = step(row.head.clone(), input.clone(), facts, now, limits) else { return Ok(()) };
        let harmless = |write: &rap_agent::Write| match write {
            rap_agent::Write::View { server, view_type, content } => {
                row.views.get(&(server.clone(), view_type.clone())) == Some(content)
            }
            rap_agent::Write::Question { no, question, .. } => {
                row.questions.get(no).is_some_and(|row| row.question == *question)
            }
            _ => false,
        };
        let nothing = again.head == row.head && again.effects.is_empty() && again.writes.iter().all(harmless);
        holds!(nothing, "I2: t{place} takes {input:?} twice: {:?} {:?}", again.writes, again.effects);
        Ok(())
    }
}
