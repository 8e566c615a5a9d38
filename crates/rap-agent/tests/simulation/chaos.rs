//! Chaos: what happens next is drawn from the seed. Each seed has moods of its own, so that some runs are full of
//! interruptions, some of events, some of crashes; at the end chaos stops and all that is outstanding is delivered.

use std::time::Duration;

use rap_agent::{
    Again, Answer, Arguments, Birth, BuiltIn, CallState, Item, Limits, Message, OnBusy, Phase, Plan,
    PlannedCall, Server, Thought, ThoughtKind, Thoughts, Usage, words,
};
use rap_protocol::CallId;
use serde_json::{Map, Value};

use super::disk::{Place, name};
use super::fault::Fault;
use super::invariants::{Broken, broken};
use super::outside::{Callback, Request, What, text_of};
use super::rng::Rng;
use super::watch::SCHEDULED;
use super::world::{Asked, Crash, Response, World};

/// How many threads there may be in a run.
const THREADS: usize = 12;
/// How many rounds it may take until everything is at rest.
const ROUNDS: usize = 400;

const ACTIONS: usize = 19;

pub struct Chaos {
    pub world: World,
    rng: Rng,
    weights: [usize; ACTIONS],
    /// How likely the model makes calls, and how likely its id for one is odd.
    talkative: usize,
    odd_ids: usize,
    subscribing: usize,
    keys: u64,
    events: u64,
}

impl Chaos {
    pub fn new(seed: u64, fault: Fault) -> Chaos {
        let mut rng = Rng::new(seed);
        let limits = limits(&mut rng);
        let mut world = World::new(limits, fault);
        for _ in 0..=rng.below(3) {
            world.add_root();
        }
        let usual = [10, 50, 40, 40, 50, 20, 3, 5, 10, 4, 1, 5, 8, 10, 8, 2, 4, 10, 5];
        let weights = usual.map(|weight| match rng.below(8) {
            0 => 0,
            1 => weight * 3,
            _ => weight + 1,
        });
        Chaos {
            world,
            weights,
            talkative: 20 + rng.below(70),
            odd_ids: rng.below(40),
            subscribing: rng.below(90),
            keys: 0,
            events: 0,
            rng,
        }
    }

    /// A whole life: chaos, then rest.
    pub fn run(&mut self) -> Result<(), Broken> {
        let (shortest, more) = (50, 250);
        for _ in 0..shortest + self.rng.below(more) {
            self.act()?;
            if self.world.disk.threads.iter().all(|row| row.head.is_closed()) {
                break;
            }
        }
        let helped = self.rng.percent(50);
        self.settle(helped)?;
        self.world.checker.look_at_rest(&self.world.disk)?;
        self.world.replay()
    }

    fn act(&mut self) -> Result<(), Broken> {
        self.world.now = self.world.now.plus(Duration::from_millis(self.rng.below(300) as u64));
        self.world.crash = match self.rng.below(60) {
            0 => Some(Crash::BeforeCommit),
            1 => Some(Crash::InCommit),
            2 => Some(Crash::BeforeReply),
            _ => None,
        };
        match self.draw() {
            0 => self.say(),
            1 => self.answer(),
            2 => self.invoke(),
            3 => self.land(),
            4 => self.deliver(),
            5 => self.tool_speaks(),
            6 => self.person(Message::Interrupt),
            7 => self.cancel(),
            8 => self.choose(),
            9 => self.person(Message::Resume),
            10 => self.close(),
            11 => self.tick(),
            12 => self.letter(),
            13 => self.answer_delivered(),
            14 => self.notify(),
            15 => self.world.restart(),
            16 => self.stale_answer(),
            17 => self.retry(),
            _ => self.redeliver(),
        }?;
        self.world.crash = None;
        Ok(())
    }

    /// What happens next, among that which can.
    fn draw(&mut self) -> usize {
        let (memory, outside) = (&self.world.memory, &self.world.outside);
        let threads = &self.world.disk.threads;
        let possible = [
            (1, !memory.asks.is_empty()),
            (2, !memory.invocations.is_empty()),
            (3, !memory.flying.is_empty()),
            (4, !outside.mail.is_empty()),
            (5, !outside.accepted.is_empty()),
            (8, threads.iter().any(|row| !row.questions.is_empty())),
            (12, !self.world.disk.outbox.is_empty()),
            (13, !memory.answers.is_empty()),
            (14, !memory.notifications.is_empty()),
            (17, !outside.requests.is_empty()),
            (18, !outside.sent.is_empty()),
        ];
        let mut weights = self.weights;
        for (action, possible) in possible {
            weights[action] *= usize::from(possible);
        }
        // Where nothing is under way somebody has to begin.
        let quiet = possible[..4].iter().all(|(_, possible)| !possible);
        weights[0] += if quiet { 30 } else { 1 };
        self.rng.weighted(&weights)
    }

    /// A thread, rather one that is open and busy.
    fn thread(&mut self) -> Place {
        let threads = &self.world.disk.threads;
        let mut thread = self.rng.below(threads.len());
        for _ in 0..2 {
            if matches!(threads[thread].head.phase, Phase::Idle | Phase::Closed) {
                thread = self.rng.below(threads.len());
            }
        }
        thread
    }

    /// A call of the thread: mostly one that was made, sometimes one that was not.
    fn call(&mut self, thread: Place) -> CallId {
        let row = &self.world.disk.threads[thread];
        let open: Vec<CallId> = row.head.open_calls().map(|open| open.id.clone()).collect();
        let known: Vec<CallId> = row.calls.keys().cloned().collect();
        let from = if self.rng.percent(60) { open } else { known };
        match self.rng.pick(&from) {
            Some(call) if !self.rng.percent(5) => call.clone(),
            _ => CallId::new("nobody").expect("a short id"),
        }
    }

    fn key(&mut self) -> u64 {
        self.keys += 1;
        self.keys
    }

    fn say(&mut self) -> Result<(), Broken> {
        let thread = self.thread();
        let kinds = [OnBusy::Join, OnBusy::Join, OnBusy::Interrupt, OnBusy::Enqueue, OnBusy::Reject];
        let on_busy = kinds[self.rng.below(kinds.len())];
        let word = self.world.outside.word();
        let message = Message::Said { text: text_of(word), on_busy };
        let key = self.key();
        self.world.request(Request { thread, message, key, word: Some(word) })
    }

    fn person(&mut self, message: Message) -> Result<(), Broken> {
        let thread = self.thread();
        let key = self.key();
        self.world.request(Request { thread, message, key, word: None })
    }

    fn cancel(&mut self) -> Result<(), Broken> {
        let thread = self.thread();
        let call = self.call(thread);
        let key = self.key();
        self.world.request(Request { thread, message: Message::Cancel { call }, key, word: None })
    }

    fn choose(&mut self) -> Result<(), Broken> {
        let rows = self.world.disk.threads.iter().enumerate();
        let asked = rows.flat_map(|(thread, row)| row.questions.values().map(move |row| (thread, &row.call)));
        let asked: Vec<(Place, &CallId)> = asked.collect();
        let Some((thread, call)) = self.rng.pick(&asked).copied() else { return Ok(()) };
        let call = call.clone();
        let selected = [None, Some(0), Some(1), Some(2)][self.rng.below(4)];
        let key = self.key();
        self.world.request(Request { thread, message: Message::Chose { call, selected }, key, word: None })
    }

    fn close(&mut self) -> Result<(), Broken> {
        if self.rng.percent(20) { self.person(Message::Close) } else { Ok(()) }
    }

    fn retry(&mut self) -> Result<(), Broken> {
        if self.world.outside.requests.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.world.outside.requests.len());
        let request = self.world.outside.requests.swap_remove(at);
        self.world.request(request)
    }

    fn answer(&mut self) -> Result<(), Broken> {
        if self.world.memory.asks.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.world.memory.asks.len());
        let asked = self.world.memory.asks.swap_remove(at);
        if self.rng.percent(8) {
            let again = if self.rng.percent(60) { Again::Later } else { Again::No };
            return self.world.fail(asked, again);
        }
        let long = self.world.disk.threads[asked.thread].head.coverable().is_some();
        if long && self.rng.percent(12) {
            return self.world.summarise(asked);
        }
        if self.rng.percent(3) {
            return self.world.hold_back(asked);
        }
        let answer = self.think(&asked);
        self.world.answer(asked, answer)
    }

    /// An answer that comes though its question was given up, or was answered before.
    fn stale_answer(&mut self) -> Result<(), Broken> {
        let thread = self.thread();
        let turns = self.world.disk.threads[thread].head.turn;
        let asked = match self.rng.pick(&self.world.memory.stale).cloned() {
            Some(asked) if self.rng.percent(70) => asked,
            _ if turns > 1 => Asked { thread, turn: 1 + self.rng.below(turns as usize - 1) as u64, up_to: 0 },
            _ => return Ok(()),
        };
        match self.rng.below(10) {
            0 | 1 => return self.world.fail(asked, Again::Later),
            2 => return self.world.summarise(asked),
            _ => {}
        }
        let answer = self.think(&asked);
        self.world.answer(asked, answer)
    }

    fn think(&mut self, asked: &Asked) -> Answer {
        let mut calls: Vec<PlannedCall> = Vec::new();
        if self.rng.percent(self.talkative) {
            for _ in 0..=self.rng.below(3) {
                let call = self.plan(asked.thread, &calls);
                calls.push(call);
            }
        }
        let word = self.world.outside.word();
        let usage = Usage { input: 10, output: 2, cached: 1 };
        // Every other answer comes after a thought.
        let kind = ThoughtKind::Open { text: "hm".into(), signature: "s".into() };
        let thoughts = Thoughts { model: "m".into(), parts: vec![Thought { at: 0, kind }] };
        let thoughts = word.is_multiple_of(2).then_some(thoughts);
        Answer { text: text_of(word), calls, thoughts, usage }
    }

    /// What the model worker does with a call: the model's id is used where it is new in all that the thread sees.
    fn plan(&mut self, thread: Place, batch: &[PlannedCall]) -> PlannedCall {
        let number = self.world.outside.word();
        let own = self.model_id(thread, number, batch);
        let trusted = self.world.fault == Fault::TrustsIds;
        let known = |id: &CallId| !trusted && sees_call(&self.world, thread, id);
        let (id, call_id) = match own {
            Some(id) if known(&id) => (None, Some(id)),
            own => (own, None),
        };
        let given = Arguments::Given(Map::from_iter([("of".to_owned(), Value::from(number))]));
        let server = Server(format!("s{}", self.rng.below(2)));
        let (name, arguments, plan) = match self.rng.below(20) {
            0 => ("nonsense", given, Plan::Refuse("Error: there is no tool nonsense".into())),
            1 => ("look", Arguments::Unusable("{".into()), Plan::Refuse("Error: no JSON".into())),
            2 => ("look", Arguments::Unusable("{".into()), Plan::Invoke(server)),
            3..=8 => {
                let (name, tool) = self.built_in(thread, batch);
                (name, given, Plan::BuiltIn(tool))
            }
            9 | 10 => ("look", given, Plan::Approve { server, prompt: "Really?".into() }),
            _ => ("look", given, Plan::Invoke(server)),
        };
        PlannedCall { id, call_id, name: name.into(), arguments, display: None, plan }
    }

    fn built_in(&mut self, thread: Place, batch: &[PlannedCall]) -> (&'static str, BuiltIn) {
        let row = &self.world.disk.threads[thread];
        let spawns = |call: &PlannedCall| matches!(call.plan, Plan::BuiltIn(BuiltIn::SpawnThread { .. }));
        let room = self.world.disk.threads.len() < 2 * THREADS && !batch.iter().any(spawns);
        let later = self.world.now.plus(Duration::from_secs(self.rng.below(40) as u64));
        match self.rng.below(12) {
            0 | 1 if room => {
                let (parent, child) = (name(thread), name(self.world.disk.threads.len()));
                let depth = self.world.disk.ancestors(thread) + 1;
                let birth = Birth { parent, depth, child, arguments: Map::new() };
                (words::SPAWN_THREAD, BuiltIn::SpawnThread { instructions: "dig".into(), birth })
            }
            2 => (words::REPORT_TO_PARENT, BuiltIn::ReportToParent { report: self.spoken() }),
            3 if self.rng.percent(40) => {
                let report = self.rng.percent(50).then(|| self.spoken());
                (words::CLOSE_THREAD, BuiltIn::CloseThread { report })
            }
            4 | 5 => {
                let child = self.rng.pick(&row.head.children).cloned().unwrap_or(name(thread));
                let (thread_id, message) = (child.as_str().to_owned(), self.spoken());
                (words::SEND_MESSAGE_TO_CHILD, BuiltIn::SendMessageToChild { thread_id, message })
            }
            6 => (words::SLEEP, BuiltIn::Sleep { until: later }),
            7 => (words::WAIT, BuiltIn::Wait),
            8 => {
                let confirmation = SCHEDULED.into();
                (words::SCHEDULE, BuiltIn::Schedule { next: later, confirmation })
            }
            _ => {
                let tool_call_id = self.subscription(thread);
                (words::CANCEL_SUBSCRIPTION, BuiltIn::CancelSubscription { tool_call_id })
            }
        }
    }

    fn spoken(&mut self) -> String {
        text_of(self.world.outside.word())
    }

    fn model_id(&mut self, thread: Place, number: u64, batch: &[PlannedCall]) -> Option<CallId> {
        if !self.rng.percent(self.odd_ids) {
            return CallId::new(format!("c{number}")).ok();
        }
        match self.rng.below(4) {
            0 => None,
            1 => CallId::new(format!("rap_{}", 1 + self.rng.below(9))).ok(),
            2 => batch.last().and_then(|call| call.id.clone()),
            _ => {
                let known: Vec<&CallId> = self.world.disk.threads[thread].calls.keys().collect();
                self.rng.pick(&known).map(|id| (*id).clone())
            }
        }
    }

    /// What the model takes for a subscription of its own.
    fn subscription(&mut self, thread: Place) -> String {
        let from = if self.rng.percent(85) { thread } else { self.thread() };
        let row = &self.world.disk.threads[from];
        let active: Vec<&CallId> =
            row.head.subscriptions.iter().map(|subscription| &subscription.id).collect();
        match self.rng.pick(&active) {
            Some(id) => id.as_str().to_owned(),
            None => "no such thing".into(),
        }
    }

    fn invoke(&mut self) -> Result<(), Broken> {
        if self.world.memory.invocations.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.world.memory.invocations.len());
        let (thread, call) = self.world.memory.invocations.swap_remove(at);
        // The server may have it though the runtime hears nothing of it.
        let (arrives, response) = match self.rng.below(10) {
            0 => (false, Response::Refused),
            1 => (false, Response::Nothing),
            2 => (true, Response::Nothing),
            _ => (true, Response::Accepted),
        };
        if self.world.invoke(thread, call.clone(), response)? && arrives {
            self.accept(thread, call);
        }
        Ok(())
    }

    /// A tool server has an invocation, perhaps for the second time.
    fn accept(&mut self, thread: Place, call: CallId) {
        let results = self.world.outside.accepted.entry((thread, call.clone())).or_default();
        let again = *results > 0;
        *results += 1;
        if again && self.rng.percent(50) {
            return;
        }
        match self.rng.below(10) {
            0 => {}
            1 | 2 => {
                for _ in 0..=self.rng.below(3) {
                    let what = self.aside();
                    self.send(thread, &call, what);
                }
                self.send_result(thread, &call);
            }
            _ => self.send_result(thread, &call),
        }
    }

    fn send(&mut self, thread: Place, call: &CallId, what: What) {
        self.world.outside.mail.push(Callback { thread, call: call.clone(), what });
    }

    fn send_result(&mut self, thread: Place, call: &CallId) {
        let subscription = self.rng.percent(self.subscribing);
        let word = self.world.outside.word();
        self.send(thread, call, What::Result { word, subscription });
    }

    fn aside(&mut self) -> What {
        self.events += 1;
        // Now and then the same one as before.
        let no = self.events - self.rng.below(2) as u64;
        match self.rng.below(3) {
            0 => What::SignIn(no),
            1 => What::Choice(no),
            _ => What::View(no),
        }
    }

    fn land(&mut self) -> Result<(), Broken> {
        if self.world.memory.flying.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.world.memory.flying.len());
        let flight = self.world.memory.flying.swap_remove(at);
        self.world.land(flight)
    }

    /// A tool server says something about a call that it has, or once had: an event, a question, a view, a result.
    fn tool_speaks(&mut self) -> Result<(), Broken> {
        let accepted: Vec<&(Place, CallId)> = self.world.outside.accepted.keys().collect();
        let state = |(thread, call): &(Place, CallId)| self.world.disk.threads[*thread].calls[call].state;
        let alive = |call: &&(Place, CallId)| matches!(state(call), CallState::Open | CallState::Subscribed);
        let living: Vec<_> = accepted.iter().copied().filter(alive).collect();
        let from = if self.rng.percent(80) { &living } else { &accepted };
        let Some(call) = self.rng.pick(from).copied() else { return Ok(()) };
        let subscribed = state(call) == CallState::Subscribed;
        let (thread, call) = call.clone();
        match self.rng.below(10) {
            0 => self.send_result(thread, &call),
            1..=3 if !subscribed => {
                let what = self.aside();
                self.send(thread, &call, what);
            }
            _ => {
                let flood = if self.rng.percent(10) { 8 } else { 1 };
                for _ in 0..flood {
                    let what = self.event();
                    self.send(thread, &call, what);
                }
            }
        }
        Ok(())
    }

    fn event(&mut self) -> What {
        self.events += 1;
        let id = if self.rng.percent(70) { Some(self.events) } else { None };
        let crowded = self.world.disk.threads.len() + self.world.outside.mail.len() / 2 >= THREADS;
        let associative = crowded || self.rng.percent(60);
        let word = self.world.outside.word();
        What::Event { id, word, associative, is_final: self.rng.percent(15) }
    }

    fn deliver(&mut self) -> Result<(), Broken> {
        if self.world.outside.mail.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.world.outside.mail.len());
        let callback = self.world.outside.mail.swap_remove(at);
        self.carry(callback)
    }

    /// The network brings a callback again that was answered long ago.
    fn redeliver(&mut self) -> Result<(), Broken> {
        let Some(callback) = self.rng.pick(&self.world.outside.sent).cloned() else { return Ok(()) };
        if matches!(callback.what, What::Event { id: None, .. }) {
            return Ok(());
        }
        let word = callback.word();
        let known = self.world.outside.sent.len();
        self.carry(callback)?;
        self.world.outside.sent.truncate(known);
        let mail = &mut self.world.outside.mail;
        mail.retain(|callback| word.is_none() || callback.word() != word);
        Ok(())
    }

    /// A child needs a place; past the bound of this simulation its event is lost on the way.
    fn carry(&mut self, callback: Callback) -> Result<(), Broken> {
        let bears = matches!(callback.what, What::Event { associative: false, .. });
        if bears && self.world.disk.threads.len() >= 2 * THREADS {
            return Ok(());
        }
        self.world.call_back(callback)
    }

    /// Time passes, and timers fire, some of them for nothing.
    fn tick(&mut self) -> Result<(), Broken> {
        if self.rng.percent(70) {
            let seconds = [1, 5, 40, 4000][self.rng.below(4)];
            self.world.now = self.world.now.plus(Duration::from_secs(seconds));
        }
        if self.rng.percent(40) {
            return self.fire(false).map(drop);
        }
        let limits = &self.world.limits;
        let rows = self.world.disk.threads.iter().enumerate();
        let due: Vec<_> =
            rows.filter_map(|(thread, row)| row.head.due(limits).map(|due| (thread, due))).collect();
        if let Some((thread, due)) = self.rng.pick(&due).copied() {
            // A moment too early now and then.
            let early = Duration::from_millis(self.rng.below(2) as u64);
            self.world.now = self.world.now.max(due.minus(early));
            return self.world.offer(thread, Message::Due, None).map(drop);
        }
        let thread = self.thread();
        if self.rng.percent(20) {
            return self.world.offer(thread, Message::Due, None).map(drop);
        }
        let call = self.call(thread);
        self.world.offer(thread, Message::TimedOut { call }, None).map(drop)
    }

    /// A timer of the runtime's own fires: one of all, or one that ends a sleep.
    fn fire(&mut self, only_sleep: bool) -> Result<bool, Broken> {
        let rows = self.world.disk.threads.iter().enumerate();
        let timers = rows.flat_map(|(thread, row)| row.timers().map(move |(call, at)| (thread, call, at)));
        let sleeps = |thread: Place, call: &CallId| self.world.disk.threads[thread].head.is_open(call);
        let timers: Vec<_> =
            timers.filter(|(thread, call, _)| !only_sleep || sleeps(*thread, call)).collect();
        let Some((thread, call, at)) = self.rng.pick(&timers).copied() else { return Ok(false) };
        let (call, sleeps) = (call.clone(), sleeps(thread, call));
        let early = Duration::from_millis(if only_sleep { 0 } else { self.rng.below(2) as u64 });
        self.world.now = self.world.now.max(at.minus(early));
        let message = if sleeps {
            Message::TimedOut { call }
        } else {
            let more = Duration::from_secs(1 + self.rng.below(100) as u64);
            let next = self.rng.percent(80).then(|| self.world.now.plus(more));
            Message::Ticked { call, text: self.spoken(), next }
        };
        self.world.offer(thread, message, None)?;
        Ok(true)
    }

    fn letter(&mut self) -> Result<(), Broken> {
        if self.world.disk.outbox.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.world.disk.outbox.len());
        let kept = self.rng.percent(30);
        self.world.deliver_letter(at, kept)
    }

    fn answer_delivered(&mut self) -> Result<(), Broken> {
        let Some((thread, no)) = self.world.memory.answers.pop() else { return Ok(()) };
        if self.rng.percent(10) {
            let question = self.world.disk.threads[thread].questions.get(&no);
            let Some(call) = question.map(|row| row.call.clone()) else { return Ok(()) };
            let text = "Error: the answer could not be delivered".into();
            return self.world.offer(thread, Message::CallFailed { call, text }, None).map(drop);
        }
        self.world.deliver_answer(thread, no);
        Ok(())
    }

    fn notify(&mut self) -> Result<(), Broken> {
        match self.world.memory.notifications.pop() {
            Some(notification) => self.world.notify(notification),
            None => Ok(()),
        }
    }

    /// Chaos stops: the model answers in plain text, tools return, timers fire, until nothing is left to do.
    fn settle(&mut self, helped: bool) -> Result<(), Broken> {
        self.world.note(|| "chaos stops".into());
        for _ in 0..ROUNDS {
            let mut worked = false;
            worked |= self.settle_work()?;
            worked |= self.settle_callbacks()?;
            worked |= self.settle_timers(helped)?;
            if !worked {
                return Ok(());
            }
        }
        broken("I12: it never comes to rest".into())
    }

    fn settle_work(&mut self) -> Result<bool, Broken> {
        let mut worked = false;
        while let Some(request) = self.world.outside.requests.pop() {
            self.world.request(request)?;
            worked = true;
        }
        while !self.world.disk.outbox.is_empty() {
            self.world.deliver_letter(0, false)?;
            worked = true;
        }
        while let Some(asked) = self.world.memory.asks.pop() {
            let text = text_of(self.world.outside.word());
            self.world.answer(asked, Answer { text, ..Answer::default() })?;
            worked = true;
        }
        while let Some((thread, call)) = self.world.memory.invocations.pop() {
            if self.world.invoke(thread, call.clone(), Response::Accepted)? {
                self.world.outside.accepted.insert((thread, call), 1);
            }
            worked = true;
        }
        while let Some(flight) = self.world.memory.flying.pop() {
            self.world.land(flight)?;
            worked = true;
        }
        while let Some((thread, no)) = self.world.memory.answers.pop() {
            self.world.deliver_answer(thread, no);
        }
        for notification in std::mem::take(&mut self.world.memory.notifications) {
            self.world.notify(notification)?;
        }
        Ok(worked)
    }

    fn settle_callbacks(&mut self) -> Result<bool, Broken> {
        let mut worked = false;
        for callback in std::mem::take(&mut self.world.outside.mail) {
            let waiting = self.world.outside.mail.len();
            self.carry(callback)?;
            worked |= self.world.outside.mail.len() == waiting;
        }
        for thread in 0..self.world.disk.threads.len() {
            let row = &self.world.disk.threads[thread];
            let theirs = row.head.open_calls().filter(|open| open.is_sent());
            let open = theirs.map(|open| &open.id);
            let working = open.filter(|call| !row.is_due(call)).cloned().collect::<Vec<_>>();
            for call in working {
                let word = self.world.outside.word();
                let what = What::Result { word, subscription: false };
                self.world.call_back(Callback { thread, call, what })?;
                worked = true;
            }
        }
        Ok(worked)
    }

    fn settle_timers(&mut self, helped: bool) -> Result<bool, Broken> {
        let mut worked = self.fire(true)?;
        for thread in 0..self.world.disk.threads.len() {
            let waits = |open: &rap_agent::OpenCall| open.server.is_runtime() && open.until.is_none();
            let unapproved = self.world.disk.threads[thread].head.open_calls().find(|open| open.unapproved);
            if let Some(open) = unapproved.cloned() {
                self.world.now = self.world.now.max(open.until.expect("it lapses"));
                self.world.offer(thread, Message::TimedOut { call: open.id }, None)?;
                worked = true;
            } else if self.world.disk.threads[thread].head.batch.iter().any(waits) {
                let (word, key) = (self.world.outside.word(), self.key());
                let message = Message::Said { text: text_of(word), on_busy: OnBusy::Join };
                self.world.request(Request { thread, message, key, word: Some(word) })?;
                worked = true;
            }
        }
        for thread in 0..self.world.disk.threads.len() {
            let head = &self.world.disk.threads[thread].head;
            let stuck = matches!(head.phase, Phase::Failed { .. } | Phase::Paused { .. });
            if let Some(due) = head.due(&self.world.limits) {
                self.world.now = self.world.now.max(due);
                self.world.offer(thread, Message::Due, None)?;
                worked = true;
            } else if stuck && helped {
                let key = self.key();
                self.world.request(Request { thread, message: Message::Resume, key, word: None })?;
                worked = true;
            }
        }
        Ok(worked)
    }
}

/// Whether a call of that id is somewhere in what the thread sees.
fn sees_call(world: &World, thread: Place, id: &CallId) -> bool {
    let row = &world.disk.threads[thread];
    world.disk.visible(thread, row.last()).into_iter().any(|entry| match &entry.item {
        Item::Assistant { calls, .. } => calls.iter().any(|call| call.id == *id),
        _ => false,
    })
}

/// Narrow bounds, so that every run meets some of them.
fn limits(rng: &mut Rng) -> Limits {
    Limits {
        subscriptions: 1 + rng.below(3),
        open_calls: 1 + rng.below(5),
        held: 1 + rng.below(6) as u32,
        // What is said here is short.
        held_bytes: u64::MAX,
        questions: 1 + rng.below(3),
        children: 1 + rng.below(3),
        event_children: 1 + rng.below(2),
        depth: 1 + rng.below(3),
        views: 64,
        turns_per_wake: 2 + rng.below(6) as u32,
        hold_max: Duration::from_secs(1 + rng.below(10) as u64),
        call_timeout: rng.percent(50).then(|| Duration::from_secs(1 + rng.below(60) as u64)),
        approval_within: Duration::from_secs(1 + rng.below(60) as u64),
        failed_retry_for: Duration::from_secs(3600),
        budgets: rap_agent::Budgets::default(),
    }
}
