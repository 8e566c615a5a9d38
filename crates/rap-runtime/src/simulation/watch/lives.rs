//! The lives of the calls, as the world outside saw them.

use rap_agent::{
    Answer, BuiltIn, CallState, Input, Item, Limits, OnBusy, Phase, Plan, PlannedCall, Step, ThreadMessage,
    Write, words,
};
use rap_protocol::{CallId, Timestamp};

use super::{Watch, word_in};
use crate::simulation::disk::Row;
use crate::simulation::invariants::{Broken, broken, holds, word_of_input};
use crate::simulation::outside::{Word, text_in};

impl Watch {
    /// I6, I8, I10: follows the lives of the calls; gives those that the servers have to be told of.
    pub(super) fn live(
        &mut self,
        row: &Row,
        input: &Input,
        step: &Step,
        limits: &Limits,
    ) -> Result<Vec<CallId>, Broken> {
        let mut cancelled = Vec::new();
        match input {
            Input::ToolResult { call, result } => {
                cancelled.extend(self.take_result(call, result.subscription, limits)?);
            }
            Input::CallFailed { call, .. } => self.turn(call, CallState::Open, CallState::Failed)?,
            Input::CallbackRefused { call, .. } => self.turn(call, CallState::Open, CallState::Open)?,
            Input::TimerFired { call } => self.fire(row, call, step)?,
            Input::Event { call, event } => {
                let next = if event.is_final { CallState::Ended } else { CallState::Subscribed };
                self.turn(call, CallState::Subscribed, next)?;
                if let Some(id) = &event.id {
                    let new = self.events.insert((call.clone(), id.clone()));
                    holds!(new, "I2: event {id} of {call} is taken twice");
                }
            }
            Input::SubscriptionLost { call } => self.turn(call, CallState::Subscribed, CallState::Ended)?,
            Input::Choose { call, selected }
                if *selected != Some(words::ALLOW)
                    && row.calls.get(call).is_some_and(|row| row.open.unapproved) =>
            {
                self.turn(call, CallState::Open, CallState::Interrupted)?;
            }
            Input::SignInRequested { call, .. } | Input::ChoiceRequested { call, .. } => {
                self.turn(call, CallState::Open, CallState::Open)?;
            }
            Input::View { call, .. } => {
                let life = self.life(call);
                let speaks =
                    matches!(life, Some(CallState::Open | CallState::Subscribed | CallState::Returned));
                holds!(speaks, "I8: a view of {call} is taken, which is {life:?}");
            }
            Input::Cancel { call } => {
                match self.life(call) {
                    Some(CallState::Open) => self.lives.insert(call.clone(), CallState::Interrupted),
                    Some(CallState::Subscribed) => self.lives.insert(call.clone(), CallState::Ended),
                    life => return broken(format!("I8: {call} is cancelled, which is {life:?}")),
                };
                cancelled.extend(Some(call.clone()).filter(|call| self.is_sent(row, call)));
            }
            Input::Interrupt => cancelled = self.interrupt(row),
            Input::UserMessage { on_busy: OnBusy::Interrupt, .. }
                if matches!(row.head.phase(), Phase::Asking(_) | Phase::Waiting { .. }) =>
            {
                cancelled = self.interrupt(row);
            }
            Input::TurnEnded { answer, .. } => cancelled = self.cancel_by_model(answer),
            Input::FromThread { sender, message: ThreadMessage::ChildClosed } => {
                holds!(self.children.remove(sender), "I2: {sender} is closed twice");
            }
            _ => {}
        }
        self.follow(row, input, step)?;
        if step.head.is_closed() {
            cancelled.extend(self.interrupt(row));
            for life in self.lives.values_mut().filter(|life| **life == CallState::Subscribed) {
                *life = CallState::Ended;
            }
        }
        Ok(cancelled)
    }

    /// The timer of a call: a schedule, the end of a sleep, a time-out, or the end of the wait behind a problem.
    fn fire(&mut self, row: &Row, call: &CallId, step: &Step) -> Result<(), Broken> {
        if self.life(call) == Some(CallState::Subscribed) {
            holds!(self.own.contains(call), "I8: {call} is no schedule");
            return Ok(());
        }
        let open = &row.calls[call].open;
        let problem = row.head.open_call(call).and_then(|open| open.problem.as_ref());
        let now = step.writes.iter().find_map(written_at);
        let over = open.until.is_some_and(|until| now.is_some_and(|now| now >= until));
        let next = match () {
            () if !over => CallState::Failed,
            () if self.own.contains(call) => CallState::Returned,
            () if open.unapproved => CallState::Interrupted,
            () => CallState::TimedOut,
        };
        self.turn(call, CallState::Open, next)?;
        let late = problem.is_some_and(|problem| now.is_some_and(|now| now >= problem.settle_at));
        holds!(over || late, "I12: {call} times out at {now:?}, not at {:?}", open.until);
        Ok(())
    }

    /// A result is taken; gives the call if its subscription is not kept.
    fn take_result(
        &mut self,
        call: &CallId,
        subscribes: bool,
        limits: &Limits,
    ) -> Result<Option<CallId>, Broken> {
        let subscribed = self.lives.values().filter(|life| **life == CallState::Subscribed).count();
        let late = match self.life(call) {
            Some(CallState::Open) => false,
            Some(CallState::Failed | CallState::TimedOut) => true,
            life => return broken(format!("I8: a result of {call} is taken, which is {life:?}")),
        };
        let kept = subscribes && !late && subscribed < limits.subscriptions;
        let life = if kept { CallState::Subscribed } else { CallState::Returned };
        self.lives.insert(call.clone(), life);
        Ok((subscribes && !kept).then(|| call.clone()))
    }

    /// What the model cancels, up to where it closes its thread; gives what a server has to hear of.
    fn cancel_by_model(&mut self, answer: &Answer) -> Vec<CallId> {
        let mut cancelled = Vec::new();
        let closes =
            |planned: &&PlannedCall| matches!(planned.plan, Plan::BuiltIn(BuiltIn::CloseThread { .. }));
        for planned in answer.calls.iter().take_while(|planned| !closes(planned)) {
            let Plan::BuiltIn(BuiltIn::CancelSubscription { tool_call_id }) = &planned.plan else { continue };
            let Ok(call) = CallId::new(tool_call_id.clone()) else { continue };
            if self.life(&call) == Some(CallState::Subscribed) {
                self.lives.insert(call.clone(), CallState::Ended);
                cancelled.extend(Some(call).filter(|call| !self.own.contains(call)));
            }
        }
        cancelled
    }

    /// What a step says of lives that begin, and of those that only the runtime knows of.
    fn follow(&mut self, row: &Row, input: &Input, step: &Step) -> Result<(), Broken> {
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
                    self.settle_own(call, *state, input)?
                }
                Write::DropBacklog { call } => {
                    let over = step.head.is_closed() || self.life(call) == Some(CallState::Ended);
                    holds!(over, "I1: events of {call} are dropped, which is {:?}", self.life(call));
                    let dropped = row.backlog.iter().filter(|((of, _), _)| of == call);
                    let dropped: Vec<Word> = dropped.filter_map(|(_, entry)| word_in(entry)).collect();
                    self.waiting.retain(|word| !dropped.contains(word));
                }
                Write::Spawn(spawn) => {
                    holds!(self.children.insert(spawn.id.clone()), "I9: {} is added twice", spawn.id);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// I10: whoever closes itself hears which subscriptions end with it.
    pub(super) fn judge_last_words(&self, input: &Input, step: &Step) -> Result<(), Broken> {
        let Input::TurnEnded { answer, .. } = input else { return Ok(()) };
        let built_in = |at: usize| match &answer.calls[at].plan {
            Plan::BuiltIn(tool) => Some(tool),
            _ => None,
        };
        let close =
            (0..answer.calls.len()).find(|at| matches!(built_in(*at), Some(BuiltIn::CloseThread { .. })));
        let Some(close) = close else { return Ok(()) };
        let cancelled = |call: &CallId| {
            (0..close).filter_map(built_in).any(|tool| {
                matches!(tool, BuiltIn::CancelSubscription { tool_call_id } if tool_call_id == call.as_str())
            })
        };
        let mut written = step.writes.iter().filter_map(appended);
        let Some(Item::Assistant { calls, .. }) = written.next() else {
            return broken("I5: an answer is not written".into());
        };
        let result = written.find_map(|item| match item {
            Item::Result { call_id, content, .. } if *call_id == calls[close].id => Some(text_in(content)),
            _ => None,
        });
        let active = self.lives.iter().filter(|(_, life)| **life == CallState::Subscribed);
        let unnamed = active
            .map(|(call, _)| call)
            .find(|call| !cancelled(call) && !result.is_some_and(|text| text.contains(call.as_str())));
        holds!(unnamed.is_none(), "I10: {unnamed:?} ends with its thread, which hears {result:?}");
        Ok(())
    }

    /// I8: a schedule begins with the answer that makes it; a sleep ends early only if something else happened.
    fn settle_own(&mut self, call: &CallId, state: CallState, input: &Input) -> Result<(), Broken> {
        match (self.life(call), state, input) {
            (Some(CallState::Open), ..) => {}
            // An answer may cancel what it has just scheduled.
            (Some(CallState::Subscribed), CallState::Ended, Input::TurnEnded { .. }) => {
                self.lives.insert(call.clone(), CallState::Ended);
                return Ok(());
            }
            _ => return Ok(()),
        }
        let allowed = match (state, input) {
            (CallState::Subscribed, Input::TurnEnded { .. }) => true,
            (
                CallState::Returned,
                Input::TimerFired { .. }
                | Input::TurnEnded { .. }
                | Input::CallFailed { .. }
                | Input::Cancel { .. }
                | Input::Due
                | Input::Choose { .. }
                | Input::SubscriptionLost { .. },
            ) => true,
            (CallState::Returned, input) => word_of_input(input).is_some(),
            (CallState::Interrupted, _) => true,
            _ => false,
        };
        holds!(allowed, "I8: {call}, which sleeps, is {state:?} after {input:?}");
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
}

fn appended(write: &Write) -> Option<&Item> {
    match write {
        Write::Append { entry, .. } => Some(&entry.item),
        _ => None,
    }
}

fn written_at(write: &Write) -> Option<Timestamp> {
    match write {
        Write::Append { entry, .. } | Write::Hold { entry, .. } => Some(entry.at),
        _ => None,
    }
}
