//! Chaos: what happens next is drawn from the seed. Each seed has moods of its own, so that some runs are full of
//! interruptions, some of events, some of crashes; at the end chaos stops and all that is outstanding is delivered.

mod model;
mod settle;
mod tools;

use std::time::Duration;

use rap_agent::{Bounds, Budgets, Limits, LostAfter, Message, OnBusy, Phase};
use rap_protocol::CallId;

use super::disk::Place;
use super::fault::Fault;
use super::invariants::Broken;
use super::outside::{Request, text_of};
use super::rng::Rng;
use super::world::{Crash, World};

/// How many threads there may be in a run.
const THREADS: usize = 12;

const ACTIONS: usize = 23;

pub struct Chaos {
    pub world: World,
    rng: Rng,
    weights: [usize; ACTIONS],
    /// How likely the model makes calls, and how likely its id for one is odd.
    talkative: usize,
    odd_ids: usize,
    subscribing: usize,
    /// How likely a question is too long, and how likely a tool server forgets a call.
    long: usize,
    forgetful: usize,
    keys: u64,
    events: u64,
}

impl Chaos {
    pub fn new(seed: u64, fault: Fault) -> Chaos {
        let mut rng = Rng::new(seed);
        let limits = limits(&mut rng);
        let lost_after = LostAfter(Duration::from_secs(1 + rng.below(200) as u64));
        let mut world = World::new(limits, lost_after, fault);
        for _ in 0..=rng.below(3) {
            world.add_root();
        }
        let usual = [10, 50, 40, 40, 50, 20, 3, 5, 10, 4, 1, 5, 8, 10, 8, 2, 4, 10, 5, 8, 8, 3, 4];
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
            long: rng.below(50),
            forgetful: rng.below(40),
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
            18 => self.redeliver(),
            19 => self.sweep(),
            20 => self.hear(),
            21 => self.fork(),
            _ => self.misdeliver(),
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
            (20, !memory.queries.is_empty()),
            (21, threads.len() < THREADS),
            (22, !outside.sent.is_empty()),
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

    /// Forks a thread somewhere: at its end, in what it inherits, or far behind.
    fn fork(&mut self) -> Result<(), Broken> {
        let source = self.rng.below(self.world.disk.threads.len());
        let last = self.world.disk.threads[source].last();
        let back = if self.rng.percent(50) { self.rng.below(4) } else { self.rng.below(last as usize + 1) };
        self.world.fork(source, last.saturating_sub(back as u64))
    }

    fn retry(&mut self) -> Result<(), Broken> {
        if self.world.outside.requests.is_empty() {
            return Ok(());
        }
        let at = self.rng.below(self.world.outside.requests.len());
        let request = self.world.outside.requests.swap_remove(at);
        self.world.request(request)
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
}

/// In some runs one thing is bounded for each session.
fn budgets(rng: &mut Rng) -> Budgets {
    if rng.percent(70) {
        return Budgets::default();
    }
    let few = Some(1 + rng.below(20) as u64);
    let bounds = match rng.below(3) {
        0 => Bounds { turns: few, ..Bounds::default() },
        1 => Bounds { tokens: Some(20 + rng.below(300) as u64), ..Bounds::default() },
        _ => Bounds { wakes: few, ..Bounds::default() },
    };
    match rng.below(2) {
        0 => Budgets { per_hour: bounds, ..Budgets::default() },
        _ => Budgets { in_total: bounds, ..Budgets::default() },
    }
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
        budgets: budgets(rng),
    }
}
