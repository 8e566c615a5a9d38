//! The step: how an input changes a thread.
//!
//! A step is final: its head and writes are committed together or not at all, and its effects are carried out after
//! that, unchanged. It never reads the history, so its cost does not grow with the conversation.

use rap_protocol::{AuthUrl, CallId, EventId, ThreadId, Timestamp};
use serde_json::{Map, Value};

use crate::budget::Verdict;
use crate::head::{Asking, Pause};
use crate::words;
use crate::{
    Amounts, Arguments, CallEntry, CallState, Choice, Entry, Facts, Head, Held, Input, Item, Limits,
    OpenCall, PauseScope, Phase, Seq, Server, Speaker, Spending, ThreadMessage, ToolResult,
};

/// The consequences of an input.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The thread's new head.
    pub head: Head,
    /// What is written together with the head, in this order.
    pub writes: Vec<Write>,
    /// What is done after the commit. Those that are promised are stored with the head or the writes as well.
    pub effects: Vec<Effect>,
}

impl Step {
    /// Calls that are settled by this step.
    pub fn settled(&self) -> impl Iterator<Item = &CallId> {
        self.writes.iter().filter_map(|write| match write {
            Write::Settle { call, .. } => Some(call),
            _ => None,
        })
    }
}

/// One thing to write.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// Append an entry to the history.
    Append {
        /// Its number.
        seq: Seq,
        /// The entry.
        entry: Entry,
    },
    /// Hold an entry.
    Hold {
        /// The queue.
        queue: Queue,
        /// Its number there.
        no: u64,
        /// The entry.
        entry: Entry,
    },
    /// Append held entries to the history, in order.
    Release {
        /// The queue.
        queue: Queue,
        /// Number of the first entry in the queue.
        first: u64,
        /// Number of entries.
        count: u64,
        /// Number of the first entry in the history.
        seq: Seq,
    },
    /// Add a call. Its invocation is due until it settles or is acknowledged, unless it is unapproved.
    Open(OpenCall),
    /// A person allowed a call: its invocation is due.
    Approve(OpenCall),
    /// Change the state of a call. Its invocation is not due any more.
    Settle {
        /// The call.
        call: CallId,
        /// Its state.
        state: CallState,
    },
    /// Add a question to a person, or replace the one of the same number.
    Question {
        /// Its number in the thread.
        no: u64,
        /// The call that asks.
        call: CallId,
        /// The question.
        question: NewQuestion,
    },
    /// Record the answer to a question. Its delivery is due.
    Answer {
        /// The question.
        no: u64,
        /// The choice.
        selected: usize,
    },
    /// Remove the questions of a call and their answers.
    DropQuestions {
        /// The call.
        call: CallId,
    },
    /// Store a view; it replaces the one of the same server and type.
    View {
        /// The server that shows it.
        server: Server,
        /// Its type.
        view_type: String,
        /// Its content.
        content: Value,
    },
    /// Set or clear the timer of a call.
    Timer {
        /// The call.
        call: CallId,
        /// The time.
        at: Option<Timestamp>,
    },
    /// Record an event id, so that the event is not taken twice.
    Mark {
        /// Its subscription.
        call: CallId,
        /// The event.
        event: EventId,
        /// Its number in the subscription, counted from 1.
        no: u64,
        /// Marks of the subscription up to this number are forgotten.
        forget: u64,
    },
    /// Store an entry of an event that waits for a child.
    Backlog {
        /// The call that subscribed.
        call: CallId,
        /// Its number in the backlog.
        no: u64,
        /// The entry.
        entry: Entry,
    },
    /// Remove the backlog of a subscription.
    DropBacklog {
        /// The call that subscribed.
        call: CallId,
    },
    /// Add a child.
    Spawn(Box<Spawn>),
    /// Store a message for another thread of the session.
    Send {
        /// The receiver.
        to: ThreadId,
        /// The message.
        message: ThreadMessage,
    },
    /// Store what the session has spent.
    Spending(Spending),
}

/// A child to be added.
#[derive(Debug, Clone, PartialEq)]
pub struct Spawn {
    /// Its id.
    pub id: ThreadId,
    /// Its incarnation.
    pub incarnation: u64,
    /// It inherits the history of this thread up to here.
    pub at: Seq,
    /// Its head.
    pub head: Head,
    /// Waiting events that become its first entries.
    pub backlog: Option<BacklogRange>,
    /// Its own entries, behind those of the backlog.
    pub entries: Vec<Entry>,
    /// Its effects.
    pub effects: Vec<Effect>,
}

/// A part of a backlog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BacklogRange {
    /// The call that subscribed.
    pub call: CallId,
    /// Number of the first entry.
    pub first: u64,
    /// Number of entries.
    pub count: u64,
}

/// A queue of held input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Queue {
    /// Waits until the batch closes or the answer has no calls.
    Held,
    /// Waits until the thread would be idle.
    Queued,
}

/// A question to a person.
#[derive(Debug, Clone, PartialEq)]
pub enum NewQuestion {
    /// To sign in.
    SignIn(AuthUrl),
    /// To choose.
    Choice(Choice),
    /// To allow the call; the text says what it would do.
    Approval(String),
}

/// Work that follows a commit.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Ask the model. Stored with the head.
    Ask {
        /// Number of the question.
        turn: u64,
        /// The last entry that it covers.
        up_to: Seq,
    },
    /// Stop waiting for an answer.
    Abandon {
        /// Number of the question.
        turn: u64,
    },
    /// Invoke a tool. Stored with its call.
    Invoke {
        /// The call.
        call: OpenCall,
        /// Its arguments.
        arguments: Map<String, Value>,
    },
    /// Invoke a tool that a person has allowed. Stored with its call.
    InvokeApproved {
        /// The call.
        call: CallId,
        /// Its tool server.
        server: Server,
    },
    /// Tell every tool server that the thread is closed. Never stored.
    NotifyClose,
    /// Tell every tool server that a call is cancelled. Never stored.
    NotifyCancel {
        /// The call.
        call: CallId,
    },
    /// Deliver a person's answer. Stored with its question.
    Answer {
        /// The question.
        no: u64,
        /// The tool server that asked.
        server: Server,
    },
    /// Deliver the messages to other threads. Stored as [`Write::Send`].
    Deliver,
}

/// The reason why an input changes nothing. All of them are expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Ignored {
    /// The thread takes no input any more.
    #[error("the thread is closed")]
    Closed,
    /// An answer to a question that is not the current one.
    #[error("the answer belongs to a question that is no longer asked")]
    StaleTurn,
    /// The same input was taken before.
    #[error("it was taken before")]
    Duplicate,
    /// The call has its result.
    #[error("the call is settled")]
    SettledCall,
    /// The thread never made that call.
    #[error("the thread made no such call")]
    UnknownCall,
    /// The subscription was never there, was cancelled, or sent its final event.
    #[error("the subscription has ended")]
    EndedSubscription,
    /// The call has not been confirmed as a subscription yet.
    #[error("the call is still open; its confirmation has to come first")]
    NotYetSubscribed,
    /// A bound was reached.
    #[error("the thread has no room for it: {0}")]
    Full(&'static str),
    /// The thread is busy and the sender wanted a refusal.
    #[error("the thread is busy")]
    Busy,
    /// Nothing is in progress.
    #[error("there is nothing to interrupt")]
    NothingToInterrupt,
    /// The thread is neither failed nor paused.
    #[error("there is nothing to resume")]
    NothingToResume,
    /// The call asks nothing, or was answered.
    #[error("the call has no open question")]
    NoQuestion,
    /// The answer is none of the choices.
    #[error("the question has {0} choices, counted from 0")]
    NoSuchChoice(usize),
    /// A timer that something else has overtaken.
    #[error("nothing is due")]
    NotDue,
}

/// Applies an input to a thread.
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
    let mut step = Stepping::new(head, facts, now, limits);
    match input {
        Input::Begin { text: None } => {}
        Input::Begin { text: Some(text) } => step.answer_now(text),
        Input::UserMessage { text, on_busy } => step.take_user_message(text, on_busy)?,
        Input::TurnEnded { turn, .. }
        | Input::TurnFailed { turn, .. }
        | Input::Summarised { turn, .. }
        | Input::PromptTooLong { turn, .. }
            if step.head.asking() != Some(turn) =>
        {
            return Err(Ignored::StaleTurn);
        }
        Input::TurnEnded { answer, .. } => step.take_answer(answer),
        Input::TurnFailed { why, again, .. } => step.fail(why, again),
        Input::Summarised { text, usage, .. } => step.summarise(text, usage)?,
        Input::PromptTooLong { why, .. } => step.pause(why, PauseScope::Thread, None),
        Input::Spent(usage) => step.add_usage(usage),
        Input::ToolResult { call, result } => step.take_result(call, result)?,
        Input::CallFailed { call, text } => step.give_up(&call, CallState::Failed, text)?,
        Input::CallbackRefused { call, why } => step.note_problem(&call, why)?,
        Input::TimerFired { call } => step.fire_timer(&call)?,
        Input::Event { call, event } => step.take_event(call, event)?,
        Input::SubscriptionLost { call } => step.lose_subscription(&call)?,
        Input::SignInRequested { call, url } => step.request_sign_in(call, url)?,
        Input::ChoiceRequested { call, choice } => step.request_choice(call, choice)?,
        Input::View { call, view_type, content } => step.show(&call, view_type, content)?,
        Input::Choose { call, selected } => step.choose(&call, selected)?,
        Input::Interrupt => step.interrupt()?,
        Input::Cancel { call } => step.cancel(&call)?,
        Input::Resume => step.resume_session()?,
        Input::Close => step.close(),
        Input::Due => step.take_due()?,
        Input::Notice { text } => step.append(Item::notice(text)),
        Input::FromThread { sender, message } => step.take_thread_message(sender, message)?,
    }
    step.close_if_done();
    step.leave_work_if_stuck();
    Ok(step.finish())
}

/// A step in progress.
pub(crate) struct Stepping<'a> {
    pub(crate) head: Head,
    pub(crate) facts: Facts,
    pub(crate) writes: Vec<Write>,
    pub(crate) effects: Vec<Effect>,
    pub(crate) now: Timestamp,
    pub(crate) limits: &'a Limits,
    /// Answers in a row that a user's message dropped.
    pub(crate) dropped: u8,
    /// Time of the first failure since anybody did something about it.
    pub(crate) failing_since: Option<Timestamp>,
    spent: bool,
}

/// Why the model is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wake {
    /// A person said or did something.
    Person,
    /// A tool, an event or a long timer.
    Outside,
    /// A message of another thread of the session, which has heard something from outside at this time.
    Session { heard: Timestamp },
    /// Nothing new: the results of the last answer's calls are there.
    Continue,
}

impl<'a> Stepping<'a> {
    fn new(head: Head, facts: Facts, now: Timestamp, limits: &'a Limits) -> Stepping<'a> {
        let (dropped, failing_since) = match &head.phase {
            Phase::Asking(asking) => (asking.dropped, asking.failing_since),
            Phase::Failed { since, .. } => (0, Some(*since)),
            _ => (0, None),
        };
        let (writes, effects) = (Vec::new(), Vec::new());
        Stepping { head, facts, writes, effects, now, limits, dropped, failing_since, spent: false }
    }

    fn finish(mut self) -> Step {
        if let Some(spending) = self.facts.spending.filter(|_| self.spent) {
            self.writes.push(Write::Spending(spending));
        }
        if self.writes.iter().any(|write| matches!(write, Write::Send { .. })) {
            self.effects.push(Effect::Deliver);
        }
        let head = self.head;
        let waits_for_nothing = matches!(&head.phase, Phase::Waiting { batch } if batch.is_empty());
        debug_assert!(!waits_for_nothing, "I5: a thread waits only for open calls");
        let idle = matches!(head.phase, Phase::Idle | Phase::Closed);
        let held = !head.held.is_empty() || !head.queued.is_empty();
        debug_assert!(!(idle && held), "I1: an idle thread holds no input");
        Step { head, writes: self.writes, effects: self.effects }
    }

    pub(crate) fn append(&mut self, item: Item) {
        self.head.seq += 1;
        self.writes.push(Write::Append { seq: self.head.seq, entry: Entry { at: self.now, item } });
    }

    pub(crate) fn send(&mut self, to: ThreadId, message: ThreadMessage) {
        self.writes.push(Write::Send { to, message });
    }

    /// Counts what is spent against the session's budget.
    pub(crate) fn spend(&mut self, amounts: Amounts) -> Verdict {
        let budgets = &self.limits.budgets;
        if !budgets.count(&amounts) {
            return Verdict::Allowed;
        }
        debug_assert!(self.facts.spending.is_some(), "bug: facts_needed left out the session's spending");
        let Some(spending) = &mut self.facts.spending else { return Verdict::Allowed };
        self.spent = true;
        spending.spend(amounts, budgets, self.now)
    }

    pub(crate) fn mark_spent(&mut self) {
        self.spent = true;
    }

    pub(crate) fn add_usage(&mut self, usage: crate::Usage) {
        self.head.usage.add(usage);
        self.spend(Amounts { tokens: usage.tokens(), ..Amounts::default() });
    }

    /// Asks the model, unless it only talks to itself or the budget is spent.
    pub(crate) fn ask(&mut self, wake: Wake) {
        match wake {
            Wake::Person | Wake::Outside => {
                self.hear_outside();
                self.reset_turns();
            }
            // Threads that only answer each other tell each other nothing newer.
            Wake::Session { heard } => {
                self.head.heard = self.head.heard.max(heard);
                if self.head.heard > self.head.reset_for {
                    self.reset_turns();
                }
            }
            Wake::Continue => {}
        }
        if self.head.turns_awake >= self.limits.turns_per_wake {
            let why = words::talks_to_itself(self.head.turns_awake);
            return self.pause(why, PauseScope::Thread, None);
        }
        let wakes = u64::from(matches!(wake, Wake::Outside | Wake::Session { .. }));
        match self.spend(Amounts { turns: 1, tokens: 0, wakes }) {
            Verdict::Allowed => self.begin_turn(),
            Verdict::Spent { why } => self.pause(why, PauseScope::Session, None),
            Verdict::Hold { why, until } => self.pause(why, PauseScope::Session, Some(until)),
        }
    }

    /// Something from outside was heard. Its time is newer than that of anything before, whatever the clock says.
    pub(crate) fn hear_outside(&mut self) {
        self.head.heard = self.now.max(Timestamp(self.head.heard.0.saturating_add(1)));
    }

    pub(crate) fn reset_turns(&mut self) {
        (self.head.turns_awake, self.head.reset_for) = (0, self.head.heard);
    }

    fn begin_turn(&mut self) {
        self.head.turn += 1;
        self.head.turns_awake += 1;
        let up_to = self.head.seq;
        let (dropped, failing_since) = (self.dropped, self.failing_since);
        self.head.phase = Phase::Asking(Asking { up_to, dropped, failing_since });
        self.effects.push(Effect::Ask { turn: self.head.turn, up_to });
    }

    pub(crate) fn pause(&mut self, why: String, scope: PauseScope, until: Option<Timestamp>) {
        self.append(Item::notice(&why));
        self.head.phase = Phase::Paused(Pause { why, scope, until });
    }

    /// Stops waiting for the answer in progress, if there is one.
    pub(crate) fn abandon(&mut self) {
        if let Some(turn) = self.head.asking() {
            self.effects.push(Effect::Abandon { turn });
        }
    }

    /// Takes input that may not stand between a call and its result.
    pub(crate) fn take_input(&mut self, items: Vec<Item>, wake: Wake) {
        if self.head.phase == Phase::Idle {
            for item in items {
                self.append(item);
            }
            return self.ask(wake);
        }
        let was_empty = self.head.held.is_empty();
        self.hold(Queue::Held, items);
        let held = &mut self.head.held;
        held.session_only = matches!(wake, Wake::Session { .. }) && (was_empty || held.session_only);
        if let Wake::Session { heard } = wake {
            held.heard = held.heard.max(heard);
        }
        self.end_sleeps_for_input();
    }

    /// Whether input would find room.
    pub(crate) fn room(&self, queue: Queue) -> Result<(), Ignored> {
        let held = match queue {
            Queue::Held => &self.head.held,
            Queue::Queued => &self.head.queued,
        };
        let idle = self.head.phase == Phase::Idle;
        if idle || !held.is_full(self.limits) { Ok(()) } else { Err(Ignored::Full("too much input is held")) }
    }

    pub(crate) fn hold(&mut self, queue: Queue, items: Vec<Item>) {
        let at = self.now;
        let first = self.queue(queue).add(&items, at);
        let write = |(no, item)| Write::Hold { queue, no, entry: Entry { at, item } };
        self.writes.extend((first..).zip(items).map(write));
    }

    pub(crate) fn queue(&mut self, queue: Queue) -> &mut Held {
        match queue {
            Queue::Held => &mut self.head.held,
            Queue::Queued => &mut self.head.queued,
        }
    }

    /// Appends all input that a queue holds. Returns why the model is to be asked about it, if there was any.
    pub(crate) fn release(&mut self, queue: Queue) -> Option<Wake> {
        let held = self.queue(queue);
        let wake = match queue {
            Queue::Queued => Wake::Person,
            Queue::Held if held.user => Wake::Person,
            Queue::Held if held.session_only => Wake::Session { heard: held.heard },
            Queue::Held => Wake::Outside,
        };
        let (first, count) = held.clear();
        if count == 0 {
            return None;
        }
        self.writes.push(Write::Release { queue, first, count, seq: self.head.seq + 1 });
        self.head.seq += count;
        Some(wake)
    }

    /// Makes an id that no other thread and no other call has.
    pub(crate) fn new_call_id(&mut self) -> CallId {
        self.head.ids += 1;
        let incarnation = self.facts.thread.incarnation;
        let id = format!("{}{incarnation:016x}_{}", words::ID_PREFIX, self.head.ids);
        CallId::new(id).expect("bug: an id of digits and letters is well-formed")
    }

    /// Makes a call that the model did not make, and its result: this is how input enters the history.
    pub(crate) fn synthetic(
        &mut self,
        name: &str,
        of: &CallId,
        kind: String,
        result: ToolResult,
    ) -> Vec<Item> {
        let arguments = Arguments::Echo { of: of.clone(), kind, arguments: None };
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
            CallEntry { id: id.clone(), call_id: None, name: name.to_owned(), arguments, display: None };
        let ToolResult { content, display, .. } = result;
        vec![Item::answered("", vec![call]), Item::Result { call_id: id, content, display, synthetic: true }]
    }

    /// Changes the state of a call that is not open any more, and drops its questions.
    pub(crate) fn settle(&mut self, call: CallId, state: CallState) {
        if self.head.questions.iter().any(|question| question.call == call) {
            self.head.questions.retain(|question| question.call != call);
            self.writes.push(Write::DropQuestions { call: call.clone() });
        }
        self.writes.push(Write::Settle { call, state });
    }

    /// All results of the batch are there: the model is asked about them and all input that was held, except input that
    /// has to wait.
    pub(crate) fn close_batch(&mut self, wake: Wake) {
        let waits = wake == Wake::Continue && self.held_must_wait();
        let released = if waits { None } else { self.release(Queue::Held) };
        self.ask(released.unwrap_or(wake));
    }

    /// A call of the batch has its result. A `wait` has waited long enough then. When all results are there, the
    /// model is asked.
    pub(crate) fn continue_batch(&mut self, wake: Wake) {
        if self.is_sleeping() && !self.head.queued.is_empty() {
            self.end_sleeps(|_| true);
            self.release(Queue::Held);
            self.release(Queue::Queued);
            return self.ask(Wake::Person);
        }
        if self.head.batch().iter().all(|call| call.server.is_runtime() && call.until.is_none()) {
            self.end_sleeps(|_| true);
        }
        if self.head.batch().is_empty() {
            self.close_batch(wake);
        }
    }

    /// Whether only calls of the runtime's own are open. Such a thread is as good as idle.
    pub(crate) fn is_sleeping(&self) -> bool {
        let batch = self.head.batch();
        !batch.is_empty() && batch.iter().all(|call| call.server.is_runtime())
    }

    /// Open calls of the batch go on in the background.
    pub(crate) fn move_batch_to_background(&mut self) {
        self.end_sleeps(|_| true);
        for call in self.take_batch() {
            self.append(Item::made(call.id.clone(), words::STILL_RUNNING));
            self.head.background.push(call);
        }
    }

    /// Takes all calls out of the batch.
    pub(crate) fn take_batch(&mut self) -> Vec<OpenCall> {
        match &mut self.head.phase {
            Phase::Waiting { batch } => std::mem::take(batch),
            _ => Vec::new(),
        }
    }

    /// Takes a call out of the batch.
    pub(crate) fn take_from_batch(&mut self, call: &CallId) -> Option<OpenCall> {
        match &mut self.head.phase {
            Phase::Waiting { batch } => take(batch, call),
            _ => None,
        }
    }

    pub(crate) fn add_to_batch(&mut self, call: OpenCall) {
        match &mut self.head.phase {
            Phase::Waiting { batch } => batch.push(call),
            _ => unreachable!("bug: a call is added while an answer is taken"),
        }
    }

    pub(crate) fn take_from_background(&mut self, call: &CallId) -> Option<OpenCall> {
        take(&mut self.head.background, call)
    }

    /// An open call, to be changed.
    pub(crate) fn open_call_mut(&mut self, call: &CallId) -> Option<&mut OpenCall> {
        let batch = match &mut self.head.phase {
            Phase::Waiting { batch } => batch.as_mut_slice(),
            _ => &mut [],
        };
        batch.iter_mut().chain(&mut self.head.background).find(|open| open.id == *call)
    }

    fn take_thread_message(&mut self, sender: ThreadId, message: ThreadMessage) -> Result<(), Ignored> {
        match message {
            ThreadMessage::Close => self.close(),
            ThreadMessage::Resume => match &self.head.phase {
                Phase::Paused(pause) if pause.scope == PauseScope::Session => self.resume()?,
                _ => return Err(Ignored::NothingToResume),
            },
            ThreadMessage::ChildClosed => self.forget_child(&sender)?,
            ThreadMessage::ChildIdle => self.rest_child(&sender)?,
            ThreadMessage::Notice { text } => self.append(Item::notice(text)),
            ThreadMessage::Report { call, tool, text, heard } => {
                let kind = words::report_kind(&call, &sender);
                let items = self.synthetic(&tool, &call, kind, ToolResult::text(text));
                self.take_session_input(items, heard);
            }
            ThreadMessage::Text { text, heard } => {
                self.take_session_input(vec![Item::User { text, from: Speaker::Parent }], heard);
            }
        }
        Ok(())
    }

    /// Messages of the session always find room. Their number is bounded by the number of threads and of questions
    /// to the model.
    fn take_session_input(&mut self, items: Vec<Item>, heard: Timestamp) {
        self.take_input(items, Wake::Session { heard });
        let held = self.queue(Queue::Held);
        held.inputs = held.inputs.saturating_sub(1);
    }
}

fn take(calls: &mut Vec<OpenCall>, id: &CallId) -> Option<OpenCall> {
    let at = calls.iter().position(|call| call.id == *id)?;
    Some(calls.remove(at))
}
