//! Observes each commit of the real store: compares the step with the rules and applies it to the reference store.

use std::sync::Arc;

use rap_agent::{Ignored, Input, Step, step};
use rap_protocol::Timestamp;

use super::invariants::{Violation, ensure, violation};
use super::reference::{ThreadIndex, index_of};
use super::state::{Sim, State};
use crate::store::sqlite::{Observed, ObservedOutcome};
use crate::store::{Message, Target, Thread};

impl Sim {
    /// Checks and applies the messages of a commit.
    pub(super) fn observe(&self, observed: Vec<Observed>) {
        let mut state = self.state();
        for observed in observed {
            if state.violation.is_some() {
                break;
            }
            let outcome = state.apply_observed(observed);
            state.record(outcome);
        }
        if state.violation.is_some() {
            self.crash.notify_one();
        }
    }
}

impl State {
    fn apply_observed(&mut self, observed: Observed) -> Result<(), Violation> {
        let Observed { message, now, outcome } = observed;
        self.steps += 1;
        self.note(|| match &outcome {
            ObservedOutcome::Done { thread, step, .. } => format!(
                "t{} {:?}\n    -> {:?}\n    -> {:?}\n    -> {:?}",
                index_of(thread.key),
                message.input,
                step.head.phase(),
                step.writes,
                step.effects
            ),
            ObservedOutcome::Repeated => format!("{:?} -> a repeat, recognised by its key", message.input),
            ObservedOutcome::Ignored { thread, why } => {
                format!("t{} {:?} -> {why:?}", index_of(*thread), message.input)
            }
            ObservedOutcome::Refused(why) => format!("{:?} {:?} -> {why}", message.target, message.input),
        });
        let taken = self.remove_outbox_message(&message, &outcome)?;
        match outcome {
            ObservedOutcome::Done { thread, step, children } => {
                self.apply_step(&message, &thread, &step, &children, now)
            }
            ObservedOutcome::Ignored { thread, why } if taken || why != Ignored::Duplicate => {
                self.check_refusal(index_of(thread), message.input, why, now)
            }
            _ => Ok(()),
        }
    }

    /// Removes a message between threads when its receiver applies or refuses it. Returns false if it was delivered
    /// before.
    fn remove_outbox_message(
        &mut self,
        message: &Message,
        outcome: &ObservedOutcome,
    ) -> Result<bool, Violation> {
        let (Some(_), Input::FromThread { sender, message: text }, Target::Id(receiver)) =
            (message.outbox, &message.input, &message.target)
        else {
            return Ok(true);
        };
        let taken = self.reference.remove_message(sender, receiver, text);
        let applied = matches!(outcome, ObservedOutcome::Done { .. });
        ensure!(taken || !applied, "I2: {receiver} applies {text:?} of {sender} twice");
        Ok(taken)
    }

    fn apply_step(
        &mut self,
        message: &Message,
        thread: &Arc<Thread>,
        done: &Step,
        children: &[Arc<Thread>],
        now: Timestamp,
    ) -> Result<(), Violation> {
        let index = index_of(thread.key);
        match &message.target {
            Target::New(_) => {
                self.reference.add(thread, rap_agent::Head::new())?;
                self.checker.on_thread_added(&self.reference, index, None);
            }
            Target::Fork { at, .. } => {
                self.reference.add(thread, done.head.clone())?;
                self.checker.on_fork(&self.reference, index, *at)?;
            }
            _ => {}
        }
        ensure!(index < self.reference.threads.len(), "I4: a step of an unknown thread: {thread:?}");
        self.check_against_rules(index, &message.input, done, now)?;
        let input = &message.input;
        let passed = self.simulated_time(now);
        self.checker.check_step(&self.reference, index, input, done, passed)?;
        self.reference.commit(index, done, children)?;
        for child in children {
            self.checker.on_thread_added(&self.reference, index_of(child.key), Some((index, input)));
            self.checker.check_thread(&self.reference, index_of(child.key))?;
        }
        self.checker.check_thread(&self.reference, index)?;
        self.check_repeat(index, input, now)
    }

    /// I4: the step of the store is the one that the rules give for the data of the reference store.
    fn check_against_rules(
        &self,
        index: ThreadIndex,
        input: &Input,
        done: &Step,
        now: Timestamp,
    ) -> Result<(), Violation> {
        let limits = &self.bounds.thread;
        let facts = self.reference.facts(index, input, limits, now);
        let head = self.reference.threads[index].head.clone();
        let expected = step(head, input.clone(), facts, now, limits);
        match expected {
            Ok(expected) if expected == *done => Ok(()),
            expected => violation(format!(
                "I4: the step of t{index} for {input:?} is {done:?}, the rules give {expected:?}"
            )),
        }
    }

    fn check_refusal(
        &mut self,
        index: ThreadIndex,
        input: Input,
        why: Ignored,
        now: Timestamp,
    ) -> Result<(), Violation> {
        let limits = &self.bounds.thread;
        let facts = self.reference.facts(index, &input, limits, now);
        let expected = step(self.reference.threads[index].head.clone(), input.clone(), facts, now, limits);
        let same = expected.as_ref().err() == Some(&why);
        ensure!(same, "I4: t{index} refuses {input:?} with {why:?}, the rules give {expected:?}");
        self.checker.on_refusal(&self.reference, index, &input, now, &why)
    }

    /// I2: an input that was applied changes nothing when it is applied again. Excluded are requests of people, which
    /// have idempotency keys, messages between threads, which are removed with their row, and events without an id,
    /// each of which counts.
    fn check_repeat(&self, index: ThreadIndex, input: &Input, now: Timestamp) -> Result<(), Violation> {
        match input {
            Input::Event { event, .. } if event.id.is_none() && !event.is_final => return Ok(()),
            Input::Begin { .. }
            | Input::UserMessage { .. }
            | Input::Choose { .. }
            | Input::Interrupt
            | Input::FromThread { .. }
            | Input::Resume
            | Input::Notice { .. }
            | Input::UnusedAnswer(_) => return Ok(()),
            _ => {}
        }
        let row = &self.reference.threads[index];
        let limits = &self.bounds.thread;
        let facts = self.reference.facts(index, input, limits, now);
        let Ok(again) = step(row.head.clone(), input.clone(), facts, now, limits) else { return Ok(()) };
        let harmless = |write: &rap_agent::Write| match write {
            rap_agent::Write::View { server, view_type, content } => {
                row.views.get(&(server.clone(), view_type.clone())) == Some(content)
            }
            rap_agent::Write::Question { number, question, .. } => {
                row.questions.get(number).is_some_and(|row| row.question == *question)
            }
            _ => false,
        };
        let nothing = again.head == row.head && again.effects.is_empty() && again.writes.iter().all(harmless);
        ensure!(nothing, "I2: t{index} applies {input:?} twice: {:?} {:?}", again.writes, again.effects);
        Ok(())
    }
}
