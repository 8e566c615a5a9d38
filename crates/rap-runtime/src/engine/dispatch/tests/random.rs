//! Random tests of the dispatcher against a model of the store. Work is added, finished, postponed and cancelled in any
//! order, and pages are read late or fail.
//!
//! Checked: slots are not exceeded, no item runs twice at the same time, all due work is started eventually, and I13.

use super::*;

const DESTINATIONS: [&str; 2] = ["a", "b"];

/// Bounds of the dispatcher and number of sessions.
#[derive(Debug, Clone, Copy)]
struct Case {
    slots: usize,
    bounds: Bounds,
    sessions: u64,
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }

    fn one_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }
}

/// A row of work in the store.
#[derive(Debug, Clone)]
struct Stored {
    destination: usize,
    session: u64,
    due: Timestamp,
    attempts: u32,
    /// True if the dispatcher was notified since the work became due.
    notified: bool,
}

/// Time that the first work item of a session has waited.
#[derive(Debug, Clone, Default)]
struct Wait {
    /// Number of starts of other sessions' work.
    starts: usize,
    /// Sessions that had work in that time.
    sessions: HashSet<u64>,
}

struct Model {
    case: Case,
    dispatcher: Dispatcher,
    random: Random,
    now: Timestamp,
    stored: BTreeMap<WorkKey, Stored>,
    /// Destination, session and key.
    in_progress: Vec<(usize, u64, WorkKey)>,
    /// Pages that are being read, with their content once the store has been queried.
    reading: Vec<(usize, DuePage, Option<DueWork>)>,
    waits: BTreeMap<(usize, u64), Wait>,
    last: u64,
    starts: usize,
    longest_wait: usize,
}

impl Model {
    fn new(case: Case, seed: u64) -> Model {
        let slots = Slots { ask: case.slots, ..SLOTS };
        Model {
            case,
            dispatcher: Dispatcher::with_bounds(slots, case.bounds),
            random: Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1),
            now: NOW,
            stored: BTreeMap::new(),
            in_progress: Vec::new(),
            reading: Vec::new(),
            waits: BTreeMap::new(),
            last: 0,
            starts: 0,
            longest_wait: 0,
        }
    }

    fn queue(destination: usize) -> WorkQueue {
        WorkQueue { kind: WorkKind::Ask, destination: DESTINATIONS[destination].into() }
    }

    fn is_in_progress(&self, key: &WorkKey) -> bool {
        self.in_progress.iter().any(|(.., other)| other == key)
    }

    /// Adds work. A few sessions get most of it.
    fn add_work(&mut self) {
        let destination = self.random.below(2);
        let all = self.case.sessions as usize;
        let session = 1 + if self.random.one_in(2) { self.random.below(2) } else { self.random.below(all) };
        for _ in 0..1 + self.random.below(3) {
            self.last += 1;
            let (key, due) = (ask(self.last, 1), self.now);
            let stored = Stored { destination, session: session as u64, due, attempts: 0, notified: true };
            self.stored.insert(key.clone(), stored);
            match self.dispatcher.offer(
                &Self::queue(destination),
                super::session(session as u64),
                key.clone(),
            ) {
                Some(_) => self.begin(destination, session as u64, key),
                None => self.fill_slots(destination),
            }
        }
    }

    fn fill_slots(&mut self, destination: usize) {
        loop {
            match self.dispatcher.next(&Self::queue(destination), self.now) {
                Next::Nothing => return,
                Next::Start(session, key, _) => {
                    let session = (1..=self.case.sessions)
                        .find(|number| super::session(*number) == session)
                        .expect("bug: a session of the case");
                    self.begin(destination, session, key);
                }
                Next::Read(page) => {
                    assert!(
                        !self.reading.iter().any(|(reading, ..)| *reading == destination),
                        "two reads of one queue"
                    );
                    return self.reading.push((destination, page, None));
                }
            }
        }
    }

    fn begin(&mut self, destination: usize, session: u64, key: WorkKey) {
        assert!(!self.is_in_progress(&key), "{key:?} was started twice");
        let in_use = self.in_progress.iter().filter(|(of, ..)| *of == destination).count();
        assert!(in_use < self.case.slots, "more work than slots");
        let is_reserved = in_use >= self.case.slots - self.case.slots / RESERVED_PART;
        assert!(!is_reserved || !self.holds_slot(destination, session), "a second slot from the reserve");
        self.in_progress.push((destination, session, key.clone()));
        match self.stored.get(&key).cloned() {
            Some(stored) if stored.due <= self.now => {
                assert_eq!(stored.destination, destination);
                self.starts += 1;
                self.count_start(destination, stored.session);
            }
            // The work was cancelled or finished meanwhile.
            _ => self.end(self.in_progress.len() - 1, false),
        }
    }

    fn holds_slot(&self, destination: usize, session: u64) -> bool {
        self.in_progress.iter().any(|(at, of, _)| (*at, *of) == (destination, session))
    }

    /// Returns the sessions with waiting work for a destination.
    fn waiting(&self, destination: usize) -> HashSet<u64> {
        let waits = |(key, stored): &(&WorkKey, &Stored)| {
            stored.destination == destination
                && stored.due <= self.now
                && stored.notified
                && !self.is_in_progress(key)
        };
        self.stored.iter().filter(waits).map(|(_, stored)| stored.session).collect()
    }

    fn count_start(&mut self, destination: usize, session: u64) {
        let waiting = self.waiting(destination);
        self.waits.retain(|(of, waits), _| *of != destination || waiting.contains(waits));
        self.waits.remove(&(destination, session));
        // A session that holds a slot may have to wait until a common slot is free.
        let holders: Vec<u64> =
            waiting.iter().copied().filter(|other| self.holds_slot(destination, *other)).collect();
        holders.iter().for_each(|other| drop(self.waits.remove(&(destination, *other))));
        for other in waiting.iter().filter(|other| **other != session && !holders.contains(*other)) {
            let wait = self.waits.entry((destination, *other)).or_default();
            wait.starts += 1;
            wait.sessions.extend(&waiting);
            wait.sessions.insert(session);
            self.longest_wait = self.longest_wait.max(wait.starts);
            // Work that is added while a page is read may have to wait for the next page.
            let mut bound = 2 * wait.sessions.len() + self.case.slots;
            if self.case.sessions as usize > self.case.bounds.items {
                // The work in memory has its turn before a round of several pages begins.
                bound += self.case.bounds.items;
            }
            assert!(
                wait.starts <= bound,
                "I13: session {other} has waited for {} starts of {} sessions",
                wait.starts,
                wait.sessions.len()
            );
        }
    }

    fn end(&mut self, at: usize, again: bool) {
        let (destination, session, key) = self.in_progress.remove(at);
        let queue = Self::queue(destination);
        self.dispatcher.release(&queue, super::session(session));
        // The key stays in progress until the outcome is stored.
        self.in_progress.push((usize::MAX, session, key.clone()));
        self.fill_slots(destination);
        match self.stored.get_mut(&key) {
            Some(stored) if again => {
                stored.due = Timestamp(self.now.0 + 1 + self.random.below(20) as i64);
                (stored.attempts, stored.notified) = (stored.attempts + 1, false);
            }
            _ => drop(self.stored.remove(&key)),
        }
        self.dispatcher.end(&key);
        self.in_progress.retain(|(.., other)| *other != key);
    }

    /// Queries the store, as `due_work` does.
    fn due(&mut self, destination: usize, page: &DuePage) -> DueWork {
        let mut due: Vec<(&WorkKey, &Stored)> = self
            .stored
            .iter()
            .filter(|(_, stored)| stored.destination == destination && stored.due <= page.now)
            .collect();
        due.sort_by_key(|(_, stored)| stored.due);
        let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
        let mut work = Vec::new();
        let mut more = false;
        let again = |(key, stored): &&(&WorkKey, &Stored)| stored.attempts > 0 && !page.skip.contains(key);
        for (key, stored) in due.iter().filter(again) {
            let count = counts.entry(stored.session).or_default();
            *count += 1;
            if *count > page.per_session || work.len() >= self.case.bounds.items {
                more = true;
            } else {
                work.push((super::session(stored.session), (*key).clone()));
            }
        }
        let new = |(_, stored): &&(&WorkKey, &Stored)| {
            stored.attempts == 0 && page.after.is_none_or(|after| super::session(stored.session) > after)
        };
        let mut sessions: BTreeMap<u64, Vec<WorkKey>> = BTreeMap::new();
        for (key, stored) in due.iter().filter(new) {
            sessions.entry(stored.session).or_default().push((*key).clone());
        }
        let mut after = None;
        for (at, (session, keys)) in sessions.into_iter().enumerate() {
            if at == page.sessions {
                return DueWork { work, after, more };
            }
            after = Some(super::session(session));
            // A session counts, even if all of its work is in progress.
            let keys = keys.into_iter().filter(|key| !page.skip.contains(key)).take(page.per_session);
            work.extend(keys.map(|key| (super::session(session), key)));
        }
        DueWork { work, after: None, more }
    }

    /// Continues the read of a page: queries the store, returns the content or fails.
    fn read(&mut self, at: usize) {
        let (destination, page, found) = self.reading.remove(at);
        match found {
            None if self.random.one_in(10) => {
                self.dispatcher.read_failed(&Self::queue(destination));
                self.fill_slots(destination);
            }
            None => {
                let found = self.due(destination, &page);
                self.reading.push((destination, page, Some(found)));
            }
            Some(found) => {
                self.dispatcher.page_read(&Self::queue(destination), &page, found);
                self.fill_slots(destination);
            }
        }
    }

    /// Advances the time, and lets the clock announce what has become due.
    fn pass_time(&mut self) {
        self.now.0 += 1 + self.random.below(10) as i64;
        for queue in self.dispatcher.check_store_for_all() {
            let destination = DESTINATIONS.iter().position(|name| *name == queue.destination).unwrap();
            self.fill_slots(destination);
        }
        let now = self.now;
        self.stored.values_mut().filter(|stored| stored.due <= now).for_each(|stored| stored.notified = true);
    }

    fn cancel(&mut self) {
        let waiting: Vec<WorkKey> =
            self.stored.keys().filter(|key| !self.is_in_progress(key)).cloned().collect();
        if !waiting.is_empty() {
            let key = &waiting[self.random.below(waiting.len())];
            self.stored.remove(key);
            self.dispatcher.cancel(key);
        }
    }

    fn act(&mut self) {
        match self.random.below(10) {
            0..=1 => self.add_work(),
            2..=5 if !self.in_progress.is_empty() => {
                let (at, again) = (self.random.below(self.in_progress.len()), self.random.one_in(4));
                self.end(at, again);
            }
            6 | 7 if !self.reading.is_empty() => {
                let at = self.random.below(self.reading.len());
                self.read(at);
            }
            8 => self.pass_time(),
            9 if self.random.one_in(4) => self.cancel(),
            _ => {}
        }
    }

    /// Adds no more work and checks that all of it is started and finished.
    fn finish(&mut self) {
        for _ in 0..100_000 {
            if let Some(at) = self.reading.len().checked_sub(1) {
                self.read(at);
            } else if !self.in_progress.is_empty() {
                self.end(0, false);
            } else if self.stored.values().any(|stored| !stored.notified) {
                self.pass_time();
            } else {
                break;
            }
        }
        assert!(self.stored.is_empty(), "never started: {:?}", self.stored);
        assert!(
            DESTINATIONS
                .iter()
                .enumerate()
                .all(|(at, _)| { matches!(self.dispatcher.next(&Self::queue(at), self.now), Next::Nothing) })
        );
        assert_eq!(self.dispatcher.in_progress()[0].1, 0);
    }
}

fn run(case: Case, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let mut model = Model::new(case, seed);
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..600 {
                model.act();
            }
            model.finish();
        }));
        if run.is_err() {
            panic!("{case:?}, seed {seed}, after {} starts", model.starts);
        }
        assert!(model.starts > 100);
    }
}

/// Proves: LC-17
#[test]
fn all_sessions_have_their_turn_if_one_page_holds_them() {
    let bounds = Bounds { items: 16, per_session: 4 };
    for (slots, sessions) in [(1, 3), (1, 8), (2, 8), (3, 6), (6, 8), (9, 4)] {
        run(Case { slots, bounds, sessions }, 0..12);
    }
}

#[test]
fn all_sessions_have_their_turn_in_rounds_of_several_pages() {
    let bounds = Bounds { items: 4, per_session: 2 };
    for (slots, sessions) in [(1, 6), (1, 20), (2, 30), (5, 20), (8, 12)] {
        run(Case { slots, bounds, sessions }, 0..12);
    }
}
