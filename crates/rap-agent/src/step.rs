//! The step: how a message changes a thread.
//!
//! What a step gives is committed together or not at all, and acted upon only after that. It never reads the
//! history: its cost does not grow with the conversation.

use rap_protocol::{AuthUrl, CallId, EventId, ThreadId, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::words;
use crate::{
    Arguments, CallEntry, CallState, Choice, Entry, Head, Held, Item, Limits, Message, OpenCall, Outcome,
    Phase, Seq, Server, Speaker,
};

/// What follows from a message.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The thread as it is now.
    pub head: Head,
    /// What is written together with the head.
    pub writes: Vec<Write>,
    /// What is done once that is on disk. Those that are promised are stored with the head as well.
    pub effects: Vec<Effect>,
}

/// One thing to write.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// An entry of the history.
    Append {
        /// Its place.
        seq: Seq,
        /// The entry.
        entry: Entry,
    },
    /// An entry that waits.
    Hold {
        /// Where.
        queue: Queue,
        /// Its number there.
        no: u64,
        /// The entry.
        entry: Entry,
    },
    /// Entries that waited become history, in order.
    Release {
        /// From where.
        queue: Queue,
        /// The number of the first.
        first: u64,
        /// How many.
        count: u64,
        /// The place of the first.
        seq: Seq,
    },
    /// A call begins; until it settles or is acknowledged, its invocation is due, unless it waits to be allowed.
    Open(OpenCall),
    /// A call was allowed: its invocation is due.
    Dispatch(OpenCall),
    /// A call settles, or its subscription begins or ends; its invocation is due no more.
    Settle {
        /// The call.
        call: CallId,
        /// What became of it.
        state: CallState,
    },
    /// Something is asked of a person. It replaces what had the same number.
    Ask {
        /// Its number in the thread.
        no: u64,
        /// The call that asks.
        call: CallId,
        /// The question.
        question: NewQuestion,
    },
    /// The answer to a question is known and has to be delivered.
    Answer {
        /// The question.
        no: u64,
        /// The choice.
        selected: usize,
    },
    /// The questions of a call are void, and so are their answers.
    Forget {
        /// The call.
        call: CallId,
    },
    /// Something to look at; it replaces what the same server showed as the same type.
    View {
        /// Who shows it.
        server: Server,
        /// Which view.
        view_type: String,
        /// What it shows.
        content: Value,
    },
    /// When a call of the runtime's own fires next; never, if there is no time.
    Timer {
        /// The call.
        call: CallId,
        /// The time.
        at: Option<Timestamp>,
    },
    /// An event that must not be taken twice.
    Seen {
        /// Its subscription.
        call: CallId,
        /// The event.
        event: EventId,
    },
    /// An entry of an event waits for a child.
    Shelve {
        /// The call that subscribed.
        call: CallId,
        /// Its number there.
        no: u64,
        /// The entry.
        entry: Entry,
    },
    /// What waited for a child is dropped.
    Discard {
        /// The call that subscribed.
        call: CallId,
    },
    /// A child is born.
    Born {
        /// Its id.
        child: ThreadId,
        /// It sees the history of this thread up to here.
        at: Seq,
        /// Its first head.
        head: Box<Head>,
        /// What waited for it and becomes its first entries: the call that subscribed, and how many entries.
        shelf: Option<(CallId, u64)>,
        /// Its own entries; the first stands at `at + 1`, or behind what waited for it.
        entries: Vec<Entry>,
    },
}

/// Where input waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Queue {
    /// Until the batch closes or the answer has no calls.
    Held,
    /// Until the thread would be idle.
    Queued,
}

/// What is asked of a person.
#[derive(Debug, Clone, PartialEq)]
pub enum NewQuestion {
    /// To sign in.
    SignIn(AuthUrl),
    /// To choose.
    Choice(Choice),
    /// To allow the call, and what to read before.
    Approval(String),
}

/// Work that a step asks for.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Ask the model. Stored with the head.
    Ask {
        /// The question's number.
        turn: u64,
        /// The last entry that it covers.
        up_to: Seq,
    },
    /// Stop waiting for an answer.
    Abandon {
        /// The question's number.
        turn: u64,
    },
    /// Invoke a tool. Stored with its call.
    Invoke {
        /// The call.
        call: OpenCall,
        /// What it is called with.
        arguments: Map<String, Value>,
    },
    /// Invoke a tool that a person has allowed. Stored with its call.
    Dispatch {
        /// The call.
        call: CallId,
    },
    /// Tell every tool server that a call is not wanted any more. Never stored.
    NotifyCancel {
        /// The call.
        call: CallId,
    },
    /// Tell every tool server that the thread is closed. Never stored.
    NotifyClose,
    /// Deliver a person's answer. Stored with its question.
    Answer {
        /// The question.
        no: u64,
    },
    /// A message to another thread. Stored by itself.
    Tell {
        /// The other thread.
        to: ThreadId,
        /// What it is told.
        letter: Letter,
    },
}

/// What threads tell each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Letter {
    /// The parent is closed, and so are you.
    Close,
    /// I, your child, am closed.
    ChildClosed,
    /// I, your child for events, am not at work any more.
    ChildRests,
    /// I, your child, report.
    Report {
        /// The call that I was born of.
        call: CallId,
        /// The tool of that call.
        tool: String,
        /// What I report.
        text: String,
    },
    /// I, your parent, tell you this.
    Say {
        /// What.
        text: String,
    },
}

impl Letter {
    /// What the letter is to its receiver.
    pub fn into_message(self, sender: ThreadId) -> Message {
        match self {
            Letter::Close => Message::Close,
            Letter::ChildClosed => Message::ChildClosed { child: sender, birth: None },
            Letter::ChildRests => Message::ChildRests { child: sender, birth: None },
            Letter::Report { call, tool, text } => Message::Reported { child: sender, call, tool, text },
            Letter::Say { text } => Message::Told { text },
        }
    }
}

/// Why a message changes nothing. All of it is expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Ignored {
    /// The thread takes no message any more.
    #[error("the thread is closed")]
    Closed,
    /// An answer to a question that is not the current one.
    #[error("the answer belongs to a question that is no longer asked")]
    StaleTurn,
    /// The same message was taken before.
    #[error("it was taken before")]
    Duplicate,
    /// The call has its last word.
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
    /// The sender wanted it refused.
    #[error("the thread is busy")]
    Busy,
    /// There is nothing that it could end.
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
    /// A timer that was overtaken by something else.
    #[error("nothing is due")]
    NotDue,
}

/// Applies a message to a thread.
pub fn step(head: Head, message: Message, now: Timestamp, limits: &Limits) -> Result<Step, Ignored> {
    if head.is_closed() {
        return Err(Ignored::Closed);
    }
    let mut step = Stepping { head, writes: Vec::new(), effects: Vec::new(), now, limits };
    match message {
        Message::Said { text, on_busy } => step.hear(text, on_busy)?,
        Message::TurnEnded { turn, .. }
        | Message::TurnFailed { turn, .. }
        | Message::Summarised { turn, .. }
        | Message::OverBudget { turn, .. }
            if step.head.asking() != Some(turn) =>
        {
            return Err(Ignored::StaleTurn);
        }
        Message::TurnEnded { answer, .. } => step.take_answer(answer),
        Message::TurnFailed { why, again, .. } => step.fail(why, again),
        Message::Summarised { text, usage, .. } => step.summarise(text, usage)?,
        Message::OverBudget { why, .. } => step.pause(why),
        Message::Spent(usage) => step.head.usage.add(usage),
        Message::Returned { call, result, past } => step.take_result(call, result, past)?,
        Message::CallFailed { call, text } => step.give_up(&call, CallState::Failed, text)?,
        Message::TimedOut { call } => step.time_out(&call)?,
        Message::Happened { call, event, past, seen, birth } => {
            step.take_event(call, event, past, seen, birth)?
        }
        Message::WantsSignIn { call, url } => step.want_sign_in(call, url)?,
        Message::WantsChoice { call, choice } => step.want_choice(call, choice)?,
        Message::Viewed { call, view_type, content } => step.view(&call, view_type, content)?,
        Message::Chose { call, selected } => step.choose(&call, selected)?,
        Message::Interrupt => step.interrupt()?,
        Message::Cancel { call } => step.cancel(&call)?,
        Message::Resume => step.resume()?,
        Message::Close => step.close(),
        Message::Due => step.due()?,
        Message::Noted { text } => step.append(Item::notice(text)),
        Message::ChildClosed { child, birth } => step.forget_child(&child, birth)?,
        Message::ChildRests { child, birth } => step.free_place(&child, birth)?,
        Message::Reported { child, call, tool, text } => step.take_report(&child, &call, &tool, text),
        Message::Told { text } => step.take_letter(vec![Item::User { text, from: Speaker::Parent }]),
        Message::Ticked { call, text, next } => step.tick(&call, text, next)?,
    }
    step.close_if_done();
    step.rest_if_made();
    Ok(step.done())
}

/// A step in the making.
pub(crate) struct Stepping<'a> {
    pub(crate) head: Head,
    pub(crate) writes: Vec<Write>,
    pub(crate) effects: Vec<Effect>,
    pub(crate) now: Timestamp,
    pub(crate) limits: &'a Limits,
}

/// Whether anything that waited became history.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Released {
    Something,
    Nothing,
}

impl Stepping<'_> {
    fn done(self) -> Step {
        let head = self.head;
        let waiting = head.phase == Phase::Waiting;
        debug_assert_eq!(
            waiting,
            !head.batch.is_empty(),
            "I5: a batch is open exactly while the thread waits"
        );
        let idle = matches!(head.phase, Phase::Idle | Phase::Closed);
        debug_assert!(
            !idle || (head.held.is_empty() && head.queued.is_empty()),
            "I1: nothing waits for nothing"
        );
        Step { head, writes: self.writes, effects: self.effects }
    }

    pub(crate) fn append(&mut self, item: Item) {
        self.head.seq += 1;
        self.writes.push(Write::Append { seq: self.head.seq, entry: Entry { at: self.now, item } });
    }

    /// Ask the model, unless it only talks to itself.
    pub(crate) fn ask(&mut self) {
        if self.head.turns_awake >= self.limits.turns_per_wake {
            return self.pause(words::talks_to_itself(self.head.turns_awake));
        }
        self.head.turn += 1;
        self.head.turns_awake += 1;
        self.head.phase = Phase::Asking { up_to: self.head.seq };
        self.effects.push(Effect::Ask { turn: self.head.turn, up_to: self.head.seq });
    }

    /// Wait until a person lets it go on.
    fn pause(&mut self, why: String) {
        self.append(Item::notice(&why));
        self.head.phase = Phase::Paused { why };
    }

    /// Ask the model about something new.
    pub(crate) fn wake(&mut self) {
        self.head.turns_awake = 0;
        self.ask();
    }

    /// Stop waiting for the answer in progress, if there is one.
    pub(crate) fn abandon(&mut self) {
        if let Some(turn) = self.head.asking() {
            self.effects.push(Effect::Abandon { turn });
        }
    }

    /// Input from outside that may not stand between a call and its result.
    pub(crate) fn take_input(&mut self, items: Vec<Item>) {
        if self.head.phase == Phase::Idle {
            for item in items {
                self.append(item);
            }
            return self.wake();
        }
        self.hold(Queue::Held, items);
        self.stir();
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
        let first = self.held(queue).add(&items, at);
        let write = |(no, item)| Write::Hold { queue, no, entry: Entry { at, item } };
        self.writes.extend((first..).zip(items).map(write));
    }

    pub(crate) fn held(&mut self, queue: Queue) -> &mut Held {
        match queue {
            Queue::Held => &mut self.head.held,
            Queue::Queued => &mut self.head.queued,
        }
    }

    /// Writes all that waits there.
    pub(crate) fn release(&mut self, queue: Queue) -> Released {
        let held = self.held(queue);
        let (first, count) = (held.first, held.entries());
        *held = Held { first: held.next, next: held.next, ..Held::default() };
        if count == 0 {
            return Released::Nothing;
        }
        self.writes.push(Write::Release { queue, first, count, seq: self.head.seq + 1 });
        self.head.seq += count;
        Released::Something
    }

    pub(crate) fn mint(&mut self) -> CallId {
        self.head.minted += 1;
        let id = format!("{}{}", words::MINTED_PREFIX, self.head.minted);
        CallId::new(id).expect("bug: a counted id is well-formed")
    }

    /// A call that the model did not make, and its result: how something from outside enters the history.
    pub(crate) fn synthetic(&mut self, name: &str, of: &CallId, kind: String, result: Outcome) -> Vec<Item> {
        let arguments = Arguments::Echo { of: of.clone(), kind, arguments: None };
        self.synthetic_with(name, arguments, result)
    }

    pub(crate) fn synthetic_with(&mut self, name: &str, arguments: Arguments, result: Outcome) -> Vec<Item> {
        let id = self.mint();
        let call =
            CallEntry { id: id.clone(), call_id: None, name: name.to_owned(), arguments, display: None };
        let Outcome { content, display, .. } = result;
        vec![Item::answered("", vec![call]), Item::Result { call_id: id, content, display, synthetic: true }]
    }

    /// The call's last word; what it asks is void.
    pub(crate) fn settle(&mut self, call: CallId, state: CallState) {
        if self.head.questions.iter().any(|question| question.call == call) {
            self.head.questions.retain(|question| question.call != call);
            self.writes.push(Write::Forget { call: call.clone() });
        }
        self.writes.push(Write::Settle { call, state });
    }

    /// All results of the batch are there: what waited is written, and the model is asked once for all of it.
    pub(crate) fn close_batch(&mut self) {
        match self.release(Queue::Held) {
            Released::Something => self.wake(),
            Released::Nothing => self.ask(),
        }
    }

    /// A call of the batch has its result. What only waits for something to happen has waited long enough, and when
    /// all results are there, the model is asked.
    pub(crate) fn move_on(&mut self) {
        let waits = |call: &OpenCall| call.server.is_runtime() && call.until.is_none();
        if self.head.batch.iter().all(waits) {
            self.rouse(waits);
        }
        if self.head.batch.is_empty() {
            self.close_batch();
        }
    }

    /// Open calls of the batch go on in the background.
    pub(crate) fn let_run(&mut self) {
        self.rouse(|_| true);
        for call in std::mem::take(&mut self.head.batch) {
            self.append(Item::made(call.id.clone(), words::STILL_RUNNING));
            self.head.running.push(call);
        }
    }
}

/// Takes a call out of a list.
pub(crate) fn take(calls: &mut Vec<OpenCall>, id: &CallId) -> Option<OpenCall> {
    let at = calls.iter().position(|call| call.id == *id)?;
    Some(calls.remove(at))
}
