//! The step: applies an input to a thread.
//!
//! The caller commits the head and the writes of a step together or not at all, and carries out the effects after the
//! commit. It must not change any of them. A step never reads the history, so its cost does not grow with the length of
//! the conversation.

use rap_protocol::{CallId, ThreadId, Timestamp};

use crate::budget::Verdict;
use crate::head::{Pause, TurnInProgress};
use crate::texts;
use crate::{
    Amounts, Arguments, Attention, CallEntry, CallState, Effect, Entry, Facts, Head, Ignored, Input,
    InputQueue, Item, Limits, OpenCall, Origin, PauseScope, Phase, Queue, Speaker, Step, ThreadMessage,
    ToolResult, UserMessage, Write,
};

/// Maximum number of messages of other threads of the session that a thread holds.
const MAX_SESSION_MESSAGES: u64 = 1024;
/// Size of held input, in bytes, at which a thread accepts no more messages of other threads of the session.
const MAX_SESSION_MESSAGE_BYTES: u64 = 64 * 1024 * 1024;

/// Applies an input to a thread. `facts` must contain what [`crate::facts_needed`] asked for.
pub fn step(
    head: Head,
    input: Input,
    facts: Facts,
    now: Timestamp,
    limits: &Limits,
) -> Result<Step, Ignored> {
    if head.is_closed() {
        return Err(Ignored::Closed);
    }
    let before = Attention::of(&head);
    let mut step = StepBuilder::new(head, facts, now, limits);
    step.correct_times(&input);
    match input {
        Input::Begin { message: None } => {}
        Input::Begin { message: Some(message) } => {
            step.set_default_title(&message);
            step.ask_with_message(message);
        }
        Input::UserMessage { message, on_busy } => {
            step.set_default_title(&message);
            step.handle_user_message(message, on_busy)?;
        }
        Input::TurnEnded { turn, .. }
        | Input::TurnFailed { turn, .. }
        | Input::Summarised { turn, .. }
        | Input::PromptTooLong { turn, .. }
            if step.head.turn_in_progress() != Some(turn) =>
        {
            return Err(Ignored::StaleTurn);
        }
        Input::TurnEnded { answer, .. } => step.handle_answer(answer),
        Input::TurnFailed { why, retry, .. } => step.fail(why, retry),
        Input::Summarised { text, usage, .. } => step.summarise(text, usage)?,
        Input::PromptTooLong { why, .. } => step.pause(why, PauseScope::Thread, None),
        Input::UnusedAnswer(usage) => step.add_usage(usage),
        Input::ToolResult { call, result } => step.handle_result(call, result)?,
        Input::CallFailed { call, text } => step.settle_with_text(&call, CallState::Failed, text)?,
        Input::CallbackRefused { call, why } => step.record_problem(&call, why)?,
        Input::TimerFired { call } => step.handle_timer(&call)?,
        Input::Event { call, event } => step.handle_event(call, event)?,
        Input::SubscriptionLost { call } => step.lose_subscription(&call)?,
        Input::SignInRequested { call, url } => step.request_sign_in(call, url)?,
        Input::ChoiceRequested { call, choice } => step.request_choice(call, choice)?,
        Input::View { call, view_type, content } => step.store_view(&call, view_type, content)?,
        Input::Choose { call, selected } => step.choose(&call, selected)?,
        Input::Interrupt => step.interrupt()?,
        Input::Cancel { call } => step.cancel(&call)?,
        Input::Resume => step.resume_session()?,
        Input::Close => step.close(),
        Input::Due => step.handle_due()?,
        Input::Notice { text } => step.append(Item::notice(text)),
        Input::FromThread { sender, message } => step.handle_thread_message(sender, message)?,
    }
    step.close_if_done();
    step.report_idle_if_stopped();
    let step = step.finish();
    let mut entered = Attention::of(&step.head);
    entered.retain(|state| !before.contains(state));
    Ok(Step { entered, ..step })
}

/// A step in progress.
pub(crate) struct StepBuilder<'a> {
    pub(crate) head: Head,
    pub(crate) facts: Facts,
    pub(crate) writes: Vec<Write>,
    pub(crate) effects: Vec<Effect>,
    pub(crate) now: Timestamp,
    pub(crate) limits: &'a Limits,
    /// Number of consecutive answers that user messages dropped.
    pub(crate) dropped: u8,
    /// Time of the first failure since the last success or the last action of the user.
    pub(crate) failing_since: Option<Timestamp>,
    /// Calls whose timers were moved because the clock was set back.
    pub(crate) moved_timers: Vec<CallId>,
    /// True if `facts.spending` has to be stored.
    spending_changed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TurnReason {
    /// The user did something.
    User,
    /// A tool, an event or a long timer.
    External,
    /// A message of another thread of the session, whose newest external input arrived at this time.
    Session { external_input_at: Timestamp },
    /// No new input: all calls of the last answer have their results.
    Continue,
}

impl<'a> StepBuilder<'a> {
    fn new(head: Head, facts: Facts, now: Timestamp, limits: &'a Limits) -> StepBuilder<'a> {
        let (dropped, failing_since) = match &head.phase {
            Phase::Asking(asking) => (asking.dropped, asking.failing_since),
            Phase::Failed { since, .. } => (0, Some(*since)),
            _ => (0, None),
        };
        let (writes, effects) = (Vec::new(), Vec::new());
        StepBuilder {
            head,
            facts,
            writes,
            effects,
            now,
            limits,
            dropped,
            failing_since,
            moved_timers: Vec::new(),
            spending_changed: false,
        }
    }

    fn finish(mut self) -> Step {
        self.write_moved_timers();
        if let Some(spending) = self.facts.spending.filter(|_| self.spending_changed) {
            self.writes.push(Write::Spending(spending));
        }
        if self.writes.iter().any(|write| matches!(write, Write::Send { .. })) {
            self.effects.push(Effect::Deliver);
        }
        let head = self.head;
        let waits_without_calls = matches!(&head.phase, Phase::Waiting { batch } if batch.is_empty());
        debug_assert!(!waits_without_calls, "I5: a thread waits only for open calls");
        let idle = matches!(head.phase, Phase::Idle | Phase::Closed);
        let held = !head.held.is_empty() || !head.queued.is_empty();
        debug_assert!(!(idle && held), "I1: an idle thread holds no input");
        Step { head, writes: self.writes, effects: self.effects, entered: Vec::new() }
    }

    /// Gives a thread without a title one that is made from its first message.
    fn set_default_title(&mut self, message: &UserMessage) {
        if self.head.turn == 0 && self.head.title.is_none() {
            self.head.title = message.title();
        }
    }

    pub(crate) fn append(&mut self, item: Item) {
        self.head.seq += 1;
        self.writes.push(Write::Append { seq: self.head.seq, entry: Entry { at: self.now, item } });
    }

    pub(crate) fn send(&mut self, to: ThreadId, message: ThreadMessage) {
        self.writes.push(Write::Send { to, message });
    }

    /// Counts amounts against the session's budget.
    pub(crate) fn spend(&mut self, amounts: Amounts) -> Verdict {
        let budgets = &self.limits.budgets;
        if !budgets.apply_to(&amounts) {
            return Verdict::Allowed;
        }
        debug_assert!(self.facts.spending.is_some(), "bug: facts_needed left out the session's spending");
        let Some(spending) = &mut self.facts.spending else { return Verdict::Allowed };
        self.spending_changed = true;
        spending.spend(amounts, budgets, self.now)
    }

    pub(crate) fn mark_spending_changed(&mut self) {
        self.spending_changed = true;
    }

    pub(crate) fn add_usage(&mut self, usage: crate::Usage) {
        self.head.usage.add(usage);
        self.spend(Amounts { tokens: usage.tokens(), ..Amounts::default() });
    }

    /// Starts a turn, unless the thread's limit of turns without external input or the session's budget is reached.
    pub(crate) fn ask(&mut self, reason: TurnReason) {
        match reason {
            TurnReason::User | TurnReason::External => {
                self.note_external_input();
                self.reset_turns();
            }
            // Threads that only answer each other never report a newer time, so their count is not reset.
            TurnReason::Session { external_input_at } => {
                self.head.external_input_at = self.head.external_input_at.max(external_input_at);
                if self.head.external_input_at > self.head.turns_reset_at {
                    self.reset_turns();
                }
            }
            TurnReason::Continue => {}
        }
        if self.head.turns_since_external_input >= self.limits.turns_per_wake {
            let why = texts::turn_limit_reached(self.head.turns_since_external_input);
            return self.pause(why, PauseScope::Thread, None);
        }
        let wakes = u64::from(matches!(reason, TurnReason::External | TurnReason::Session { .. }));
        match self.spend(Amounts { turns: 1, tokens: 0, wakes }) {
            Verdict::Allowed => self.begin_turn(),
            Verdict::Spent { why } => self.pause(why, PauseScope::Session, None),
            Verdict::Hold { why, until } => self.pause(why, PauseScope::Session, Some(until)),
        }
    }

    /// Records an external input. Its time is later than that of any before, even if the clock was set back.
    pub(crate) fn note_external_input(&mut self) {
        self.head.external_input_at =
            self.now.max(Timestamp(self.head.external_input_at.0.saturating_add(1)));
    }

    pub(crate) fn reset_turns(&mut self) {
        (self.head.turns_since_external_input, self.head.turns_reset_at) = (0, self.head.external_input_at);
    }

    fn begin_turn(&mut self) {
        self.head.turn += 1;
        self.head.turns_since_external_input += 1;
        self.head.result_bytes = 0;
        let up_to = self.head.seq;
        let (dropped, failing_since) = (self.dropped, self.failing_since);
        self.head.phase = Phase::Asking(TurnInProgress { up_to, dropped, failing_since });
        self.effects.push(Effect::AskModel { turn: self.head.turn, up_to });
    }

    pub(crate) fn pause(&mut self, why: String, scope: PauseScope, until: Option<Timestamp>) {
        self.append(Item::notice(&why));
        self.head.phase = Phase::Paused(Pause { why, scope, until });
    }

    /// Abandons the turn in progress, if there is one.
    pub(crate) fn abandon_turn(&mut self) {
        if let Some(turn) = self.head.turn_in_progress() {
            self.effects.push(Effect::Abandon { turn });
        }
    }

    /// Handles input that must not stand between a call and its result: an idle thread appends it and asks the model, any
    /// other thread holds it.
    pub(crate) fn handle_input(&mut self, items: Vec<Item>, reason: TurnReason) {
        if self.head.phase == Phase::Idle {
            for item in items {
                self.append(item);
            }
            return self.ask(reason);
        }
        let was_empty = self.head.held.is_empty();
        self.hold(Queue::UntilBatchCloses, items);
        let held = &mut self.head.held;
        held.session_only = matches!(reason, TurnReason::Session { .. }) && (was_empty || held.session_only);
        if let TurnReason::Session { external_input_at } = reason {
            held.external_input_at = held.external_input_at.max(external_input_at);
        }
        self.end_sleeps_for_input();
    }

    /// Refuses input if the queue that would hold it is full.
    pub(crate) fn check_space(&self, queue: Queue) -> Result<(), Ignored> {
        let held = match queue {
            Queue::UntilBatchCloses => &self.head.held,
            Queue::UntilIdle => &self.head.queued,
        };
        let idle = self.head.phase == Phase::Idle;
        if idle || !held.is_full(self.limits) { Ok(()) } else { Err(Ignored::Full("too much input is held")) }
    }

    pub(crate) fn hold(&mut self, queue: Queue, items: Vec<Item>) {
        let at = self.now;
        let first = self.queue(queue).add(&items, at);
        let write = |(number, item)| Write::Hold { queue, number, entry: Entry { at, item } };
        self.writes.extend((first..).zip(items).map(write));
    }

    pub(crate) fn queue(&mut self, queue: Queue) -> &mut InputQueue {
        match queue {
            Queue::UntilBatchCloses => &mut self.head.held,
            Queue::UntilIdle => &mut self.head.queued,
        }
    }

    /// Appends all input of a queue to the history. Returns the reason for the next turn, or `None` if the queue was empty.
    pub(crate) fn release(&mut self, queue: Queue) -> Option<TurnReason> {
        let held = self.queue(queue);
        let reason = match queue {
            Queue::UntilIdle => TurnReason::User,
            Queue::UntilBatchCloses if held.user => TurnReason::User,
            Queue::UntilBatchCloses if held.session_only => {
                TurnReason::Session { external_input_at: held.external_input_at }
            }
            Queue::UntilBatchCloses => TurnReason::External,
        };
        let dropped = held.dropped_from_session;
        let (first, count) = held.clear();
        if count == 0 {
            return None;
        }
        self.writes.push(Write::Release { queue, first, count, seq: self.head.seq + 1 });
        self.head.seq += count;
        if dropped > 0 {
            self.append(Item::notice(texts::messages_dropped(dropped)));
        }
        Some(reason)
    }

    /// Makes a call id that is unique in all threads.
    pub(crate) fn new_call_id(&mut self) -> CallId {
        self.head.ids_made += 1;
        let incarnation = self.facts.thread.incarnation;
        let id = format!("{}{incarnation:016x}_{}", texts::ID_PREFIX, self.head.ids_made);
        CallId::new(id).expect("bug: an id of digits and letters is well-formed")
    }

    /// Makes a synthetic call and its result. Input from tools and other threads enters the history in this form.
    pub(crate) fn synthetic(
        &mut self,
        name: &str,
        of: &CallId,
        kind: String,
        result: ToolResult,
    ) -> Vec<Item> {
        let arguments = Arguments::Synthetic { of: of.clone(), kind, arguments: None };
        self.synthetic_with(name, arguments, result)
    }

    pub(crate) fn synthetic_with(
        &mut self,
        name: &str,
        arguments: Arguments,
        result: ToolResult,
    ) -> Vec<Item> {
        let id = self.new_call_id();
        let call =
            CallEntry { id: id.clone(), model_id: None, name: name.to_owned(), arguments, display: None };
        let ToolResult { content, display, .. } = result;
        vec![Item::assistant("", vec![call]), Item::Result { call_id: id, content, display, synthetic: true }]
    }

    /// Changes the state of a call that is no longer open, and drops its questions.
    pub(crate) fn settle(&mut self, call: CallId, state: CallState) {
        if self.head.questions.iter().any(|question| question.call == call) {
            self.head.questions.retain(|question| question.call != call);
            self.writes.push(Write::DropQuestions { call: call.clone() });
        }
        self.writes.push(Write::Settle { call, state });
    }

    /// Asks the model after all calls of the batch have results. Held input is included, unless it has to wait for the
    /// next hour.
    pub(crate) fn close_batch(&mut self, reason: TurnReason) {
        let waits = reason == TurnReason::Continue && self.held_must_wait();
        let released = if waits { None } else { self.release(Queue::UntilBatchCloses) };
        self.ask(released.unwrap_or(reason));
    }

    /// Continues after a call of the batch got its result. If only `wait` calls are left, they end. When the batch is
    /// empty, the model is asked.
    pub(crate) fn continue_batch(&mut self, reason: TurnReason) {
        if self.is_sleeping() && !self.head.queued.is_empty() {
            self.end_sleeps(|_| true);
            self.release(Queue::UntilBatchCloses);
            self.release(Queue::UntilIdle);
            return self.ask(TurnReason::User);
        }
        if self.head.batch().iter().all(|call| call.server.is_runtime() && call.until.is_none()) {
            self.end_sleeps(|_| true);
        }
        if self.head.batch().is_empty() {
            self.close_batch(reason);
        }
    }

    /// Returns whether the batch has only sleeps and waits. Enqueued messages treat such a thread as idle.
    pub(crate) fn is_sleeping(&self) -> bool {
        let batch = self.head.batch();
        !batch.is_empty() && batch.iter().all(|call| call.server.is_runtime())
    }

    /// Gives the open calls of the batch placeholder results and moves them to the background.
    pub(crate) fn move_batch_to_background(&mut self) {
        self.end_sleeps(|_| true);
        for call in self.take_batch() {
            let text = if call.unapproved { texts::AWAITS_APPROVAL } else { texts::STILL_RUNNING };
            self.append(Item::runtime_result(call.id.clone(), text));
            self.head.background.push(call);
        }
    }

    pub(crate) fn take_batch(&mut self) -> Vec<OpenCall> {
        match &mut self.head.phase {
            Phase::Waiting { batch } => std::mem::take(batch),
            _ => Vec::new(),
        }
    }

    pub(crate) fn take_from_batch(&mut self, call: &CallId) -> Option<OpenCall> {
        match &mut self.head.phase {
            Phase::Waiting { batch } => take(batch, call),
            _ => None,
        }
    }

    pub(crate) fn add_to_batch(&mut self, call: OpenCall) {
        match &mut self.head.phase {
            Phase::Waiting { batch } => batch.push(call),
            _ => unreachable!("bug: a call is added to a batch outside of Phase::Waiting"),
        }
    }

    pub(crate) fn take_from_background(&mut self, call: &CallId) -> Option<OpenCall> {
        take(&mut self.head.background, call)
    }

    pub(crate) fn open_call_mut(&mut self, call: &CallId) -> Option<&mut OpenCall> {
        let batch = match &mut self.head.phase {
            Phase::Waiting { batch } => batch.as_mut_slice(),
            _ => &mut [],
        };
        batch.iter_mut().chain(&mut self.head.background).find(|open| open.id == *call)
    }

    fn handle_thread_message(&mut self, sender: ThreadId, message: ThreadMessage) -> Result<(), Ignored> {
        match message {
            ThreadMessage::Close => {
                // The parent is closed and needs no report.
                self.head.owes_report = false;
                self.close();
            }
            ThreadMessage::Resume => match &self.head.phase {
                Phase::Paused(pause) if pause.scope == PauseScope::Session => self.resume()?,
                _ => return Err(Ignored::NothingToResume),
            },
            ThreadMessage::ChildClosed => self.forget_child(&sender)?,
            ThreadMessage::EventChildIdle => self.mark_child_idle(&sender)?,
            ThreadMessage::Notice { text } => self.append(Item::notice(text)),
            ThreadMessage::Report { call, tool, text, external_input_at } => {
                let kind = texts::report_kind(&call, &sender);
                let items = self.synthetic(&tool, &call, kind, ToolResult::text(text));
                self.handle_session_input(sender, items, external_input_at);
            }
            ThreadMessage::Text { text, external_input_at } => {
                self.head.owes_report = matches!(self.head.origin, Origin::Spawn { .. });
                let items = vec![Item::message(text, Speaker::Parent)];
                self.handle_session_input(sender, items, external_input_at);
            }
        }
        Ok(())
    }

    /// Handles a message of the session. Such messages have their own limit, so that they cannot use up the space for
    /// events. Beyond it, the message is dropped. Its sender gets a notice, and so does this thread when it reads the
    /// others, since the sender may be closed by then.
    fn handle_session_input(&mut self, sender: ThreadId, items: Vec<Item>, external_input_at: Timestamp) {
        let held = &mut self.head.held;
        if held.from_session >= MAX_SESSION_MESSAGES || held.bytes >= MAX_SESSION_MESSAGE_BYTES {
            held.dropped_from_session += 1;
            return self.send(sender, ThreadMessage::Notice { text: texts::MESSAGE_NOT_ACCEPTED.into() });
        }
        self.handle_input(items, TurnReason::Session { external_input_at });
        let held = self.queue(Queue::UntilBatchCloses);
        held.inputs = held.inputs.saturating_sub(1);
        held.from_session += u64::from(!held.is_empty());
    }
}

fn take(calls: &mut Vec<OpenCall>, id: &CallId) -> Option<OpenCall> {
    let at = calls.iter().position(|call| call.id == *id)?;
    Some(calls.remove(at))
}
