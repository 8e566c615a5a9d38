//! Follows the states of calls by the inputs alone, as clients and tool servers see them.

use rap_agent::{
    BuiltIn, CallState, Input, Item, Limits, OnBusy, Phase, Plan, PlannedCall, Step, ThreadMessage,
    TurnAnswer, Write, texts,
};
use rap_protocol::{CallId, Timestamp};

use super::{ThreadTracker, tag_in};
use crate::simulation::invariants::{Violation, ensure, tag_of_input, violation};
use crate::simulation::peers::{Tag, text_in};
use crate::simulation::reference::Row;

impl ThreadTracker {
    /// I6, I8, I10: updates the states of calls. Returns the calls whose servers must be notified of a cancellation.
    pub(super) fn follow_calls(
        &mut self,
        row: &Row,
        input: &Input,
        step: &Step,
        limits: &Limits,
    ) -> Result<Vec<CallId>, Violation> {
        let mut cancelled = Vec::new();
        match input {
            Input::ToolResult { call, result } => {
                cancelled.extend(self.accept_result(call, result.subscription, limits)?);
            }
            Input::CallFailed { call, .. } => self.transition(call, CallState::Open, CallState::Failed)?,
            Input::CallbackRefused { call, .. } => self.transition(call, CallState::Open, CallState::Open)?,
            Input::TimerFired { call } => self.timer_fired(row, call, step)?,
            Input::Event { call, event } => {
                let next = if event.is_final { CallState::Ended } else { CallState::Subscribed };
                self.transition(call, CallState::Subscribed, next)?;
                if let Some(id) = &event.id {
                    let new = self.events.insert((call.clone(), id.clone()));
                    ensure!(new, "I2: event {id} of {call} is applied twice");
                }
            }
            Input::SubscriptionLost { call } => {
                self.transition(call, CallState::Subscribed, CallState::Ended)?
            }
            Input::Choose { call, selected }
                if *selected != Some(texts::ALLOW)
                    && row.calls.get(call).is_some_and(|row| row.open.unapproved) =>
            {
                self.transition(call, CallState::Open, CallState::Interrupted)?;
            }
            Input::SignInRequested { call, .. } | Input::ChoiceRequested { call, .. } => {
                self.transition(call, CallState::Open, CallState::Open)?;
            }
            Input::View { call, .. } => {
                let call_state = self.call_state(call);
                let may_send_views =
                    matches!(call_state, Some(CallState::Open | CallState::Subscribed | CallState::Returned));
                ensure!(may_send_views, "I8: a view of {call} is accepted, which is {call_state:?}");
            }
            Input::Cancel { call } => {
                self.cancel(call)?;
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
                ensure!(self.children.remove(sender), "I2: the closing of {sender} is applied twice");
            }
            _ => {}
        }
        self.follow_writes(row, input, step)?;
        if step.head.is_closed() {
            cancelled.extend(self.interrupt(row));
            for call_state in self.call_states.values_mut().filter(|state| **state == CallState::Subscribed) {
                *call_state = CallState::Ended;
            }
        }
        Ok(cancelled)
    }

    /// I8: only an open call or an active subscription can be cancelled.
    fn cancel(&mut self, call: &CallId) -> Result<(), Violation> {
        let next = match self.call_state(call) {
            Some(CallState::Open) => CallState::Interrupted,
            Some(CallState::Subscribed) => CallState::Ended,
            call_state => return violation(format!("I8: {call} is cancelled, which is {call_state:?}")),
        };
        self.call_states.insert(call.clone(), next);
        Ok(())
    }

    /// Checks the timer of a call: a schedule, the end of a sleep, a timeout, or the deadline after a refused
    /// callback.
    fn timer_fired(&mut self, row: &Row, call: &CallId, step: &Step) -> Result<(), Violation> {
        if self.call_state(call) == Some(CallState::Subscribed) {
            ensure!(self.runtime_calls.contains(call), "I8: {call} is not a schedule");
            return Ok(());
        }
        let moved = step.writes.iter().map_while(|write| match write {
            Write::Timer { call: of, at } => Some((of, *at)),
            _ => None,
        });
        let moved: Vec<_> = moved.collect();
        if !moved.is_empty() && moved.len() == step.writes.len() {
            // The clock was set back. Timers start again.
            let later = moved.iter().find(|(of, at)| *at >= row.calls[*of].timer);
            ensure!(later.is_none(), "I12: a timer is moved to a later time: {later:?}");
            let known = moved.iter().any(|(of, _)| *of == call);
            ensure!(known, "I12: the timer of {call} is kept, but others are moved: {moved:?}");
            return Ok(());
        }
        let open = row.head.open_call(call).unwrap_or(&row.calls[call].open);
        let problem = row.head.open_call(call).and_then(|open| open.problem.as_ref());
        let now = step.writes.iter().find_map(written_at);
        let over = open.until.is_some_and(|until| now.is_some_and(|now| now >= until));
        let next = match () {
            () if !over => CallState::Failed,
            () if self.runtime_calls.contains(call) => CallState::Returned,
            () if open.unapproved => CallState::Interrupted,
            () => CallState::TimedOut,
        };
        self.transition(call, CallState::Open, next)?;
        let late = problem.is_some_and(|problem| now.is_some_and(|now| now >= problem.settle_at));
        ensure!(over || late, "I12: {call} times out at {now:?} instead of {:?}", open.until);
        Ok(())
    }

    /// Handles an accepted result. Returns the call if it asked for a subscription that is not tracked.
    fn accept_result(
        &mut self,
        call: &CallId,
        subscribes: bool,
        limits: &Limits,
    ) -> Result<Option<CallId>, Violation> {
        let subscribed = self.call_states.values().filter(|state| **state == CallState::Subscribed).count();
        let late = match self.call_state(call) {
            Some(CallState::Open) => false,
            Some(CallState::Failed | CallState::TimedOut) => true,
            call_state => {
                return violation(format!("I8: a result of {call} is accepted, which is {call_state:?}"));
            }
        };
        let kept = subscribes && !late && subscribed < limits.subscriptions;
        let call_state = if kept { CallState::Subscribed } else { CallState::Returned };
        self.call_states.insert(call.clone(), call_state);
        Ok((subscribes && !kept).then(|| call.clone()))
    }

    /// Handles subscriptions that the model cancels before it closes its thread. Returns those whose servers must be
    /// notified.
    fn cancel_by_model(&mut self, answer: &TurnAnswer) -> Vec<CallId> {
        let mut cancelled = Vec::new();
        let closes =
            |planned: &&PlannedCall| matches!(planned.plan, Plan::BuiltIn(BuiltIn::CloseThread { .. }));
        for planned in answer.calls.iter().take_while(|planned| !closes(planned)) {
            let Plan::BuiltIn(BuiltIn::CancelSubscription { tool_call_id }) = &planned.plan else { continue };
            let Ok(call) = CallId::new(tool_call_id.clone()) else { continue };
            if self.call_state(&call) == Some(CallState::Subscribed) {
                self.call_states.insert(call.clone(), CallState::Ended);
                cancelled.extend(Some(call).filter(|call| !self.runtime_calls.contains(call)));
            }
        }
        cancelled
    }

    /// Follows the writes of a step: new calls, calls of the runtime itself, dropped backlogs and new children.
    fn follow_writes(&mut self, row: &Row, input: &Input, step: &Step) -> Result<(), Violation> {
        for write in &step.writes {
            match write {
                Write::Open(open) => {
                    let new = self.call_states.insert(open.id.clone(), CallState::Open).is_none();
                    ensure!(new, "I6: call {} is made twice", open.id);
                    if open.server.is_runtime() {
                        self.runtime_calls.insert(open.id.clone());
                    }
                }
                Write::Settle { call, state } if self.runtime_calls.contains(call) => {
                    self.settle_runtime_call(call, *state, input)?
                }
                Write::DropBacklog { call } => {
                    let over = step.head.is_closed() || self.call_state(call) == Some(CallState::Ended);
                    ensure!(over, "I1: events of {call} are dropped, which is {:?}", self.call_state(call));
                    let dropped = row.backlog.iter().filter(|((of, _), _)| of == call);
                    let dropped: Vec<Tag> = dropped.filter_map(|(_, entry)| tag_in(entry)).collect();
                    self.waiting.retain(|tag| !dropped.contains(tag));
                }
                Write::Spawn(spawn) => {
                    ensure!(self.children.insert(spawn.id.clone()), "I9: {} is added twice", spawn.id);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// I10: the result of `close_thread` names the subscriptions that end with the thread.
    pub(super) fn check_close_result(&self, input: &Input, step: &Step) -> Result<(), Violation> {
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
            return violation("I5: the answer of the model is not written".into());
        };
        let result = written.find_map(|item| match item {
            Item::Result { call_id, content, .. } if *call_id == calls[close].id => Some(text_in(content)),
            _ => None,
        });
        let active = self.call_states.iter().filter(|(_, state)| **state == CallState::Subscribed);
        let unnamed = active
            .map(|(call, _)| call)
            .find(|call| !cancelled(call) && !result.is_some_and(|text| text.contains(call.as_str())));
        ensure!(
            unnamed.is_none(),
            "I10: {unnamed:?} ends with its thread, but the result of close_thread is {result:?}"
        );
        Ok(())
    }

    /// I8: a schedule starts with the answer that makes it, and a sleep ends early only because of other input.
    fn settle_runtime_call(
        &mut self,
        call: &CallId,
        state: CallState,
        input: &Input,
    ) -> Result<(), Violation> {
        match (self.call_state(call), state, input) {
            (Some(CallState::Open), ..) => {}
            // An answer may cancel a schedule that it has just made.
            (Some(CallState::Subscribed), CallState::Ended, Input::TurnEnded { .. }) => {
                self.call_states.insert(call.clone(), CallState::Ended);
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
            // A child that was closed before it reported.
            (CallState::Returned, Input::FromThread { message: ThreadMessage::Report { text, .. }, .. })
                if text == texts::CLOSED_WITHOUT_REPORT =>
            {
                true
            }
            (CallState::Returned, input) => tag_of_input(input).is_some(),
            (CallState::Interrupted, _) => true,
            _ => false,
        };
        ensure!(allowed, "I8: {call}, a call of the runtime itself, becomes {state:?} after {input:?}");
        self.call_states.insert(call.clone(), state);
        Ok(())
    }

    fn transition(&mut self, call: &CallId, from: CallState, to: CallState) -> Result<(), Violation> {
        let call_state = self.call_state(call);
        ensure!(
            call_state == Some(from),
            "I8: input of {call} is accepted, although it is {call_state:?} and not {from:?}"
        );
        self.call_states.insert(call.clone(), to);
        Ok(())
    }

    /// Returns whether a call may have been sent to a tool server.
    fn is_sent(&self, row: &Row, call: &CallId) -> bool {
        !self.runtime_calls.contains(call) && row.calls.get(call).is_none_or(|row| !row.open.unapproved)
    }

    fn interrupt(&mut self, row: &Row) -> Vec<CallId> {
        let open = self.call_states.iter().filter(|(_, state)| **state == CallState::Open);
        let open: Vec<CallId> = open.map(|(call, _)| call.clone()).collect();
        for call in &open {
            self.call_states.insert(call.clone(), CallState::Interrupted);
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
