//! A whole runtime around the step: it loads, steps, commits, answers, and its workers do what follows.
//!
//! All that a crash destroys is in [`Memory`]; after a restart it is made anew from what is stored.

mod budget;
mod fork;
mod lost;
mod summary;

use rap_agent::{
    Again, Amounts, Answer, Birth, Doubt, Effect, Entry, ForkPoint, Ignored, Limits, LostAfter, Message,
    Phase, Seq, Step, Usage, Write, step,
};
use rap_protocol::{CallId, Timestamp};

use super::disk::{Disk, Place, name, place};
use super::fault::Fault;
use super::invariants::{Broken, Checker, broken, word_of_message};
use super::outside::{Callback, Outside, Request, What};
pub use lost::Query;
pub use summary::SUMMARY;

pub struct World {
    pub disk: Disk,
    pub memory: Memory,
    pub outside: Outside,
    pub checker: Checker,
    pub limits: Limits,
    pub lost_after: LostAfter,
    pub now: Timestamp,
    pub fault: Fault,
    /// Where the next message that changes something meets a crash.
    pub crash: Option<Crash>,
    /// Every commit, so that the store can be compared with its replay.
    committed: Vec<Committed>,
    pub actions: Vec<String>,
    pub keeps_actions: bool,
    /// What a faulty shell would have stored.
    stored_notifications: Vec<Notification>,
    pub visitor: Option<Visitor>,
}

/// Sees the history that a question to the model covers.
pub type Visitor = Box<dyn FnMut(&[&Entry])>;

#[derive(Default)]
pub struct Memory {
    pub asks: Vec<Asked>,
    /// Questions that were abandoned, but whose answers may come all the same.
    pub stale: Vec<Asked>,
    pub invocations: Vec<(Place, CallId)>,
    pub flying: Vec<Flight>,
    pub answers: Vec<(Place, u64)>,
    pub notifications: Vec<Notification>,
    /// Tool servers that are being asked after their calls.
    pub queries: Vec<Query>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    pub thread: Place,
    pub turn: u64,
    pub up_to: Seq,
    /// Up to where the model was shown the history to summarise it, instead of the question.
    pub summary: Option<Seq>,
}

/// An invocation that was sent, and what comes back.
#[derive(Debug, Clone)]
pub struct Flight {
    pub thread: Place,
    pub call: CallId,
    pub response: Response,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Response {
    Accepted,
    Refused,
    Nothing,
}

/// A notification to all tool servers: of a call, or of the thread's closing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Notification {
    pub thread: Place,
    pub call: Option<CallId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crash {
    BeforeCommit,
    InCommit,
    BeforeReply,
}

#[derive(Debug, Clone)]
enum Committed {
    Step { thread: Place, message: Message, now: Timestamp, key: Option<u64> },
    Fork { source: Place, point: ForkPoint },
}

/// What the sender of a message hears.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    Taken,
    /// The same key was taken before.
    Known,
    Refused(Ignored),
    /// The connection broke.
    Nothing,
}

impl World {
    pub fn new(limits: Limits, lost_after: LostAfter, fault: Fault) -> World {
        World {
            disk: Disk { shares: fault == Fault::SharesHistory, ..Disk::default() },
            memory: Memory::default(),
            outside: Outside::default(),
            checker: Checker::new(limits.clone(), lost_after),
            limits,
            lost_after,
            now: Timestamp(1_000_000),
            fault,
            crash: None,
            committed: Vec::new(),
            actions: Vec::new(),
            keeps_actions: false,
            stored_notifications: Vec::new(),
            visitor: None,
        }
    }

    pub fn note(&mut self, action: impl FnOnce() -> String) {
        if self.keeps_actions {
            self.actions.push(action());
        }
    }

    pub fn add_root(&mut self) {
        let thread = self.disk.add_root();
        self.checker.born(&self.disk, thread, None);
    }

    /// Brings a message to a thread: load, step, commit, reply.
    pub fn offer(&mut self, thread: Place, message: Message, key: Option<u64>) -> Result<Reply, Broken> {
        let row = &self.disk.threads[thread];
        if key.is_some_and(|key| row.keys.contains(&key)) {
            self.note(|| format!("t{thread} {message:?} -> known by its key"));
            return Ok(Reply::Known);
        }
        let outcome = step(row.head.clone(), message.clone(), self.now, &self.limits);
        self.note(|| match &outcome {
            Ok(step) => format!(
                "t{thread} {message:?}\n    -> {:?}\n    -> {:?}\n    -> {:?}",
                step.head.phase, step.writes, step.effects
            ),
            Err(why) => format!("t{thread} {message:?}\n    -> {why:?}"),
        });
        let step = match outcome {
            Ok(step) => step,
            Err(why) => {
                self.checker.refused(&self.disk, thread, &message, self.now, &why)?;
                return Ok(Reply::Refused(why));
            }
        };
        match self.crash.take() {
            Some(Crash::BeforeCommit) => return self.cut(),
            Some(Crash::InCommit) => {
                self.tear(thread, &step)?;
                return self.cut();
            }
            Some(Crash::BeforeReply) => {
                self.commit(thread, &message, &step, key)?;
                return self.cut();
            }
            None => {}
        }
        self.commit(thread, &message, &step, key)?;
        self.start(thread, &step);
        self.offer_again(thread, &message)?;
        Ok(Reply::Taken)
    }

    fn cut(&mut self) -> Result<Reply, Broken> {
        self.restart()?;
        Ok(if self.fault == Fault::AcknowledgesEarly { Reply::Taken } else { Reply::Nothing })
    }

    /// A crash in a commit leaves nothing of it, unless the store is broken.
    fn tear(&mut self, thread: Place, step: &Step) -> Result<(), Broken> {
        match self.fault {
            Fault::TearsCommits => self.disk.threads[thread].head = step.head.clone(),
            Fault::KeepsOldHeads => {
                let head = self.disk.threads[thread].head.clone();
                self.disk.commit(thread, step, None, self.fault)?;
                self.disk.threads[thread].head = head;
            }
            _ => {}
        }
        Ok(())
    }

    fn commit(
        &mut self,
        thread: Place,
        message: &Message,
        step: &Step,
        key: Option<u64>,
    ) -> Result<(), Broken> {
        self.checker.judge(&self.disk, thread, message, step, self.now)?;
        let spent = Amounts::of(&self.disk.threads[thread].head, step);
        self.disk.commit(thread, step, key, self.fault)?;
        if self.fault == Fault::LosesLetters {
            self.disk.outbox.clear();
        }
        self.committed.push(Committed::Step { thread, message: message.clone(), now: self.now, key });
        for write in &step.writes {
            if let Write::Born { child, .. } = write {
                self.checker.born(&self.disk, place(child), Some((thread, message)));
                self.checker.look(&self.disk, place(child))?;
            }
        }
        self.checker.look(&self.disk, thread)?;
        self.spend(thread, step, spent)
    }

    /// What is to be done once a step is on disk.
    fn start(&mut self, thread: Place, step: &Step) {
        for effect in &step.effects {
            match effect {
                Effect::Ask { turn, up_to } => {
                    if self.disk.threads[thread].head.asking() == Some(*turn) {
                        self.ask(thread, *turn, *up_to);
                    }
                }
                Effect::Abandon { turn } => {
                    let (gone, asks) = std::mem::take(&mut self.memory.asks)
                        .into_iter()
                        .partition(|asked| asked.thread == thread && asked.turn == *turn);
                    self.memory.asks = asks;
                    self.memory.stale.extend::<Vec<Asked>>(gone);
                }
                Effect::Invoke { call, .. } => self.memory.invocations.push((thread, call.id.clone())),
                Effect::Dispatch { call } => self.memory.invocations.push((thread, call.clone())),
                Effect::Answer { no } => self.memory.answers.push((thread, *no)),
                Effect::NotifyCancel { call } => {
                    self.memory.notifications.push(Notification { thread, call: Some(call.clone()) });
                }
                Effect::NotifyClose => {
                    self.memory.notifications.push(Notification { thread, call: None });
                }
                Effect::Tell { .. } => {}
            }
        }
        for write in &step.writes {
            if let Write::Born { child, .. } = write {
                let head = &self.disk.threads[place(child)].head;
                let Phase::Asking { up_to } = head.phase else { continue };
                self.ask(place(child), head.turn, up_to);
            }
        }
    }

    fn ask(&mut self, thread: Place, turn: u64, up_to: Seq) {
        self.show(thread, up_to);
        self.memory.asks.push(Asked { thread, turn, up_to, summary: None });
    }

    /// A history goes to the model.
    fn show(&mut self, thread: Place, up_to: Seq) {
        if let Some(visitor) = &mut self.visitor {
            visitor(&self.disk.visible(thread, up_to));
        }
    }

    /// I2: what was taken is offered again and changes nothing. What people do has keys instead, the row of a letter goes
    /// with the step that takes it, and an event without an id counts each time.
    fn offer_again(&mut self, thread: Place, message: &Message) -> Result<(), Broken> {
        let row = &self.disk.threads[thread];
        let again = match message.clone() {
            Message::Returned { call, result, .. } => {
                let past = row.past(&call);
                Message::Returned { call, result, past }
            }
            Message::Happened { call, event, birth, .. } => {
                if event.id.is_none() && !event.is_final {
                    return Ok(());
                }
                let past = row.past(&call);
                let seen = event.id.clone().is_some_and(|id| row.marks.contains(&(call.clone(), id)));
                Message::Happened { call, event, past, seen, birth }
            }
            Message::Said { .. }
            | Message::Chose { .. }
            | Message::Interrupt
            | Message::Reported { .. }
            | Message::Told { .. }
            | Message::Resume
            | Message::Noted { .. }
            | Message::Spent(_) => return Ok(()),
            other => other,
        };
        let Ok(step) = step(row.head.clone(), again, self.now, &self.limits) else { return Ok(()) };
        let harmless = |write: &Write| match write {
            Write::View { server, view_type, content } => {
                row.views.get(&(server.clone(), view_type.clone())) == Some(content)
            }
            Write::Ask { no, question, .. } => {
                row.questions.get(no).is_some_and(|row| row.question == *question)
            }
            _ => false,
        };
        if step.head == row.head && step.effects.is_empty() && step.writes.iter().all(harmless) {
            return Ok(());
        }
        broken(format!("I2: t{thread} takes {message:?} twice: {:?} {:?}", step.writes, step.effects))
    }

    /// All that is in memory is gone; what is stored is taken up again.
    pub fn restart(&mut self) -> Result<(), Broken> {
        self.note(|| "crash and restart".into());
        self.memory = Memory::default();
        if self.fault == Fault::ForgetsSpending {
            self.disk.spending.clear();
        }
        self.checker.look_everywhere(&self.disk)?;
        if self.fault == Fault::StoresNotifications {
            self.memory.notifications = self.stored_notifications.clone();
        }
        if self.fault == Fault::ForgetsEffects {
            return Ok(());
        }
        for thread in 0..self.disk.threads.len() {
            let row = &self.disk.threads[thread];
            let calls: Vec<_> = row.calls.keys().filter(|call| row.is_due(call)).cloned().collect();
            let answers = row.questions.iter().filter(|(_, row)| row.selected.is_some() && !row.delivered);
            self.memory.answers.extend(answers.map(|(no, _)| (thread, *no)));
            if let Phase::Asking { up_to } = row.head.phase {
                let turn = row.head.turn;
                self.ask(thread, turn, up_to);
            }
            self.memory.invocations.extend(calls.into_iter().map(|call| (thread, call)));
        }
        Ok(())
    }

    /// A client's request; it is kept until it is answered.
    pub fn request(&mut self, request: Request) -> Result<(), Broken> {
        if request.message == Message::Resume && !self.resume_session(&request)? {
            self.outside.requests.push(request);
            return Ok(());
        }
        match self.offer(request.thread, request.message.clone(), Some(request.key))? {
            Reply::Taken | Reply::Known => match request.word {
                Some(word) => self.checker.acknowledged(&self.disk, request.thread, word),
                None => Ok(()),
            },
            Reply::Refused(_) => Ok(()),
            Reply::Nothing => {
                self.outside.requests.push(request);
                Ok(())
            }
        }
    }

    /// A tool server sends a callback; it sends it again if the runtime has no room or says nothing.
    pub fn call_back(&mut self, mut callback: Callback) -> Result<(), Broken> {
        match self.offer(callback.thread, callback.message(&self.disk), None)? {
            Reply::Taken => {
                if let Some(word) = callback.word() {
                    self.checker.acknowledged(&self.disk, callback.thread, word)?;
                }
                self.outside.sent.push(callback);
            }
            Reply::Refused(Ignored::Full(_) | Ignored::NotYetSubscribed) => self.outside.mail.push(callback),
            Reply::Nothing => {
                // Without an id, what is sent again is another event.
                if let What::Event { id: None, word, .. } = &mut callback.what {
                    *word = self.outside.word();
                }
                self.outside.mail.push(callback);
            }
            Reply::Refused(_) | Reply::Known => self.outside.sent.push(callback),
        }
        Ok(())
    }

    /// The model answers. An answer that nobody waits for is paid for all the same.
    pub fn answer(&mut self, asked: Asked, answer: Answer) -> Result<(), Broken> {
        let Asked { thread, turn, .. } = asked;
        let ended = Message::TurnEnded { turn, answer };
        if self.offer(thread, ended, None)? == Reply::Refused(Ignored::StaleTurn) {
            let usage = Usage { input: 1, output: 1, cached: 0 };
            self.offer(thread, Message::Spent(usage), None)?;
        }
        Ok(())
    }

    pub fn fail(&mut self, asked: Asked, again: Again) -> Result<(), Broken> {
        let Asked { thread, turn, .. } = asked;
        self.offer(thread, Message::TurnFailed { turn, why: "503".into(), again }, None)?;
        Ok(())
    }

    /// Sends an invocation, if it is still due.
    pub fn invoke(&mut self, thread: Place, call: CallId, response: Response) -> Result<bool, Broken> {
        let due = self.disk.threads[thread].is_due(&call);
        if !due && self.fault != Fault::InvokesBlindly {
            self.note(|| format!("t{thread} {call} is not invoked any more"));
            return Ok(false);
        }
        self.note(|| format!("t{thread} {call} is invoked: {response:?}"));
        self.checker.invoked(&self.disk, thread, &call)?;
        self.memory.flying.push(Flight { thread, call, response });
        Ok(true)
    }

    /// The response to an invocation is here.
    pub fn land(&mut self, flight: Flight) -> Result<(), Broken> {
        let Flight { thread, call, response } = flight;
        self.note(|| format!("t{thread} {call} was answered: {response:?}"));
        match response {
            Response::Accepted => {
                self.checker.acknowledged_call(thread, &call, self.now);
                if self.fault == Fault::InvokesOnAndOn {
                    self.memory.invocations.push((thread, call));
                } else if let Some(row) = self.disk.threads[thread].calls.get_mut(&call) {
                    row.acknowledged.get_or_insert(Doubt::new(self.now));
                }
            }
            Response::Refused => {
                let text = "Error: the tool server refused the call".into();
                self.offer(thread, Message::CallFailed { call, text }, None)?;
            }
            Response::Nothing => self.memory.invocations.push((thread, call)),
        }
        Ok(())
    }

    /// A person's answer goes to the tool.
    pub fn deliver_answer(&mut self, thread: Place, no: u64) {
        if let Some(question) = self.disk.threads[thread].questions.get_mut(&no) {
            question.delivered = true;
        }
        self.note(|| format!("t{thread} answer {no} is delivered"));
    }

    pub fn notify(&mut self, notification: Notification) -> Result<(), Broken> {
        self.note(|| format!("notify {notification:?}"));
        self.checker.notified(&self.disk, &notification)?;
        match self.fault {
            Fault::StoresNotifications => self.stored_notifications.push(notification),
            Fault::RetriesNotifications => self.memory.notifications.push(notification),
            _ => {}
        }
        Ok(())
    }

    /// A message from one thread to another. The row may be read again before it is gone, unless it has words.
    pub fn deliver_letter(&mut self, at: usize, kept: bool) -> Result<(), Broken> {
        let letter = self.disk.outbox[at].clone();
        let message = self.inform(letter.to, letter.message());
        let word = word_of_message(&message);
        let turn = self.disk.threads[letter.to].head.clone();
        let reply = self.offer(letter.to, message, None)?;
        // A crash behind the commit has taken the row with it.
        let taken = word.is_some() && turn != self.disk.threads[letter.to].head;
        if taken || reply != Reply::Nothing && !(kept && word.is_none()) {
            self.disk.outbox.retain(|other| other.no != letter.no);
        }
        match word {
            Some(word) if reply == Reply::Taken => self.checker.acknowledged(&self.disk, letter.to, word),
            _ => Ok(()),
        }
    }

    /// Adds what the rules need to know besides the head.
    fn inform(&self, thread: Place, message: Message) -> Message {
        let birth = Some(Birth {
            parent: name(thread),
            depth: self.disk.ancestors(thread) + 1,
            child: name(self.disk.threads.len()),
            arguments: serde_json::Map::new(),
        });
        match message {
            Message::ChildClosed { child, .. } => Message::ChildClosed { child, birth },
            Message::ChildRests { child, .. } => Message::ChildRests { child, birth },
            other => other,
        }
    }

    /// I4: the stored world is the replay of the committed steps, and reads back as it was written.
    pub fn replay(&self) -> Result<(), Broken> {
        let mut disk = Disk::default();
        for row in self.disk.threads.iter().take_while(|row| row.born.is_none()) {
            debug_assert!(row.born.is_none());
            disk.add_root();
        }
        for committed in &self.committed {
            let (thread, message, now, key) = match committed {
                Committed::Step { thread, message, now, key } => (*thread, message, *now, *key),
                Committed::Fork { source, point } => {
                    disk.fork(*source, *point, self.fault);
                    continue;
                }
            };
            let head = disk.threads[thread].head.clone();
            match step(head, message.clone(), now, &self.limits) {
                Ok(step) => disk.commit(thread, &step, key, self.fault)?,
                Err(why) => return broken(format!("I4: the replay of {message:?} is ignored: {why}")),
            }
        }
        for (thread, (stored, replayed)) in self.disk.threads.iter().zip(&disk.threads).enumerate() {
            let same = stored.head == replayed.head
                && stored.entries == replayed.entries
                && stored.held == replayed.held
                && stored.shelf == replayed.shelf
                && stored.marks == replayed.marks
                && stored.born == replayed.born;
            if !same || self.disk.threads.len() != disk.threads.len() {
                return broken(format!("I4: t{thread} is not what its steps made it"));
            }
            reads_back(&stored.head)?;
            // That takes as long as the run itself; one of a few shows it as well.
            if self.committed.len().is_multiple_of(4) {
                stored.entries.iter().try_for_each(reads_back)?;
            }
        }
        Ok(())
    }
}

fn reads_back<T>(value: &T) -> Result<(), Broken>
where
    T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let json = serde_json::to_string(value).map_err(|error| Broken(format!("I4: {error}")))?;
    match serde_json::from_str::<T>(&json) {
        Ok(read) if read == *value => Ok(()),
        other => broken(format!("I4: {value:?} reads back as {other:?}")),
    }
}
