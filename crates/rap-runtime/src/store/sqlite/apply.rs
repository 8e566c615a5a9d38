//! Applies a batch of messages in one transaction.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rap_agent::{Input, facts_needed};
use rap_io::secret_box::Key;
use rap_protocol::{ThreadId, Timestamp};
use rusqlite::Connection;

use super::cache::Cache;
use super::heads::{self, is_row_error, unreadable};
use super::writes::StepWriter;
use super::{alerts, deletion, facts, history, toolsets};
use crate::store::alert;
use crate::store::apply::check_target;
use crate::store::batch::{Applied, DisabledThreads};
use crate::store::stored::{new_fork, new_root};
use crate::store::{
    Committed, Error, Loaded, Message, Receipt, SharedFacts, StepSettings, Stepped, Target, ThreadKey,
    rounds, step_one,
};

/// Applies batches. Used by one OS thread at a time.
#[derive(Default)]
pub(super) struct Applier {
    cache: Cache,
    disabled: DisabledThreads,
    #[cfg(test)]
    pub(super) observed: Vec<super::Observed>,
}

/// The environment of a batch.
pub(super) struct Context<'a> {
    pub(super) conn: &'a Connection,
    pub(super) rules: &'a StepSettings,
    pub(super) key: &'a Key,
    pub(super) now: Timestamp,
}

/// The thread that a message is for.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Lookup {
    Existing(ThreadKey),
    /// There is no thread with this id.
    Missing(ThreadId),
}

/// A message and its thread, or the reason why the thread cannot take it.
struct LoadedMessage<'a> {
    message: &'a Message,
    outcome: Result<Loaded, Error>,
}

impl Applier {
    pub(super) fn new(disabled: DisabledThreads) -> Applier {
        Applier { disabled, ..Applier::default() }
    }

    /// Drops all cached heads, because the last writes were rolled back.
    pub(super) fn forget_heads(&mut self) {
        self.cache.clear();
    }

    /// Applies a batch. If stored rows prevent that, each half of it is tried on its own, so that one bad message does
    /// not affect others. Any other error fails the batch.
    pub(super) fn apply(
        &mut self,
        context: &Context<'_>,
        batch: &[Message],
    ) -> rusqlite::Result<Vec<Applied>> {
        context.conn.prepare_cached("SAVEPOINT batch")?.execute([])?;
        #[cfg(test)]
        let observed = self.observed.len();
        let rounds = catch_unwind(AssertUnwindSafe(|| self.apply_rounds(context, batch)));
        match rounds.unwrap_or_else(|_| {
            Err(unreadable(std::io::Error::other("applying a message panicked outside of its step")))
        }) {
            Ok(applied) => {
                context.conn.prepare_cached("RELEASE batch")?.execute([])?;
                Ok(applied)
            }
            Err(error) if is_row_error(&error) => {
                context.conn.execute_batch("ROLLBACK TO batch; RELEASE batch")?;
                self.cache.clear();
                #[cfg(test)]
                self.observed.truncate(observed);
                if batch.len() == 1 {
                    tracing::error!(%error, "a message cannot be applied because of invalid stored data");
                    return Ok(vec![Applied::Refused(Error::Unreadable(error.into()))]);
                }
                let (first, second) = batch.split_at(batch.len() / 2);
                let mut applied = self.apply(context, first)?;
                applied.extend(self.apply(context, second)?);
                Ok(applied)
            }
            Err(error) => {
                self.cache.clear();
                Err(error)
            }
        }
    }

    fn apply_rounds(&mut self, context: &Context<'_>, batch: &[Message]) -> rusqlite::Result<Vec<Applied>> {
        let threads = batch.iter().map(|message| self.find(context.conn, &message.target));
        let threads = threads.collect::<rusqlite::Result<Vec<Lookup>>>()?;
        let mut shared = SharedFacts::default();
        let mut applied: Vec<Option<Applied>> = batch.iter().map(|_| None).collect();
        for round in rounds(threads) {
            for (at, outcome) in self.apply_round(context, batch, round, &mut shared)? {
                applied[at] = Some(outcome);
            }
        }
        facts::save_shared(context.conn, &shared)?;
        Ok(applied
            .into_iter()
            .map(|applied| applied.expect("bug: each message is in exactly one round"))
            .collect())
    }

    /// Applies one round: for each message, loads the head and the facts, computes the step in memory, and writes it.
    fn apply_round(
        &mut self,
        context: &Context<'_>,
        batch: &[Message],
        round: Vec<usize>,
        shared: &mut SharedFacts,
    ) -> rusqlite::Result<Vec<(usize, Applied)>> {
        let mut applied = Vec::with_capacity(round.len());
        for at in round {
            let message = &batch[at];
            let loaded = LoadedMessage { message, outcome: self.load(context, message)? };
            #[cfg(test)]
            let thread = loaded.outcome.as_ref().ok().map(|loaded| loaded.thread.key);
            let done = self.apply_one(context, loaded, shared)?;
            #[cfg(test)]
            self.observe(context, message, thread, &done);
            applied.push((at, done));
        }
        Ok(applied)
    }

    fn apply_one(
        &mut self,
        context: &Context<'_>,
        loaded: LoadedMessage<'_>,
        shared: &mut SharedFacts,
    ) -> rusqlite::Result<Applied> {
        let LoadedMessage { message, outcome } = loaded;
        if let Some(key) = &message.idempotency_key
            && let Some(repeated) = facts::repeated(context.conn, key, shared)?
        {
            self.put_back(outcome);
            return Ok(repeated.map_or_else(Applied::Refused, Applied::Repeated));
        }
        let stepped = match outcome {
            Ok(loaded) => self.step(context, loaded, message.input.clone(), shared)?,
            Err(error) => Err(error),
        };
        // A message that its receiver refuses counts as delivered. It stays in the outbox only if the step could not
        // run.
        if let Some(outbox) = message.outbox
            && !matches!(stepped, Err(Error::Disabled | Error::Unreadable(_)))
            && !facts::take_message(context.conn, outbox)?
        {
            if let Ok(stepped) = stepped {
                self.cache.put(stepped.loaded);
            }
            return Ok(Applied::Refused(rap_agent::Ignored::Duplicate.into()));
        }
        match stepped {
            Ok(stepped) => self.write(context, message, stepped, shared),
            Err(error) => Ok(Applied::Refused(error)),
        }
    }

    #[cfg(test)]
    fn observe(
        &mut self,
        context: &Context<'_>,
        message: &Message,
        thread: Option<ThreadKey>,
        applied: &Applied,
    ) {
        use super::ObservedOutcome;
        let outcome = match (applied, thread) {
            (Applied::Done { committed, .. }, _) => {
                let Committed { thread, step, children, .. } = &**committed;
                ObservedOutcome::Done {
                    thread: thread.clone(),
                    step: Box::new(step.clone()),
                    children: children.clone(),
                }
            }
            (Applied::Repeated(_), _) => ObservedOutcome::Repeated,
            (Applied::Refused(Error::Ignored(why)), Some(thread)) => {
                ObservedOutcome::Ignored { thread, why: why.clone() }
            }
            (Applied::Refused(error), _) => ObservedOutcome::Refused(error.to_string()),
        };
        self.observed.push(super::Observed { message: message.clone(), now: context.now, outcome });
    }

    fn put_back(&mut self, outcome: Result<Loaded, Error>) {
        match outcome {
            Ok(loaded) if loaded.version > 0 => self.cache.put(loaded),
            _ => {}
        }
    }

    fn step(
        &mut self,
        context: &Context<'_>,
        loaded: Loaded,
        input: Input,
        shared: &mut SharedFacts,
    ) -> rusqlite::Result<Result<Stepped, Error>> {
        let limits = context.rules.limits(&loaded.thread.agent);
        let needs = facts_needed(&loaded.head, &input, limits);
        let facts = facts::load(context.conn, &loaded.thread, &needs, shared, context.now)?;
        match step_one(loaded, input, facts, context.now, limits) {
            Ok(stepped) => Ok(Ok(stepped)),
            Err((loaded, error)) => {
                match error {
                    // A thread that was never stored has no key of its own: the next new thread gets the same one.
                    Error::Disabled if loaded.version == 0 => {}
                    Error::Disabled => self.disabled.insert(loaded.thread.key),
                    _ => self.put_back(Ok(*loaded)),
                }
                Ok(Err(error))
            }
        }
    }

    /// Writes a step unchanged.
    fn write(
        &mut self,
        context: &Context<'_>,
        message: &Message,
        stepped: Stepped,
        shared: &mut SharedFacts,
    ) -> rusqlite::Result<Applied> {
        let Stepped { loaded: Loaded { thread, version, .. }, step, now } = stepped;
        let Context { conn, rules, key, .. } = *context;
        match version {
            0 => heads::insert(conn, &thread, &step.head, rules, now)?,
            version => heads::update(conn, &thread, version, &step.head, rules, now)?,
        }
        let writer = StepWriter { conn, thread: &thread, key, rules, now };
        let mut children = Vec::new();
        for write in &step.writes {
            children.extend(writer.write(write)?);
        }
        for alert in alert::alerts(rules, &thread, &step, now) {
            alerts::add(conn, &alert)?;
        }
        shared.record_step(thread.session, &step);
        let receipt = Receipt { thread: thread.id.clone(), turn: step.head.turn() };
        if let Some(key) = &message.idempotency_key {
            facts::save_idempotency_key(conn, key, &receipt, now)?;
            shared.remember(key, &receipt);
        }
        if let Some(toolset) = &message.toolset {
            toolsets::save(conn, toolset)?;
        }
        let version = version + 1;
        self.cache.put(Loaded { thread: thread.clone(), head: step.head.clone(), version });
        Ok(Applied::Done {
            receipt,
            committed: Box::new(Committed { thread, step, children, late: false, reserved: Vec::new() }),
            version,
        })
    }

    fn find(&self, conn: &Connection, target: &Target) -> rusqlite::Result<Lookup> {
        let id = match target {
            Target::Key(key) | Target::Token { key, .. } => return Ok(Lookup::Existing(*key)),
            Target::Id(id) | Target::New(crate::store::NewThread { id, .. }) | Target::Fork { id, .. } => id,
        };
        let key = match self.cache.key(id) {
            Some(key) => Some(key),
            None => heads::key_of(conn, id)?,
        };
        Ok(key.map_or_else(|| Lookup::Missing(id.clone()), Lookup::Existing))
    }

    /// Loads the thread of a message, or returns the reason why it cannot take the message.
    fn load(&mut self, context: &Context<'_>, message: &Message) -> rusqlite::Result<Result<Loaded, Error>> {
        let (conn, target) = (context.conn, &message.target);
        let key = match (self.find(conn, target)?, target) {
            (Lookup::Existing(_), Target::New(_) | Target::Fork { .. }) => return Ok(Err(Error::Exists)),
            (Lookup::Missing(_), Target::New(new)) => {
                return Ok(Ok(new_root(heads::next_key(conn)?, new, context.now)));
            }
            (Lookup::Missing(_), Target::Fork { .. }) => return self.fork(context, message),
            (Lookup::Missing(_), _) => return Ok(Err(Error::NoThread)),
            (Lookup::Existing(key), _) => key,
        };
        if !heads::is_visible(conn, key, &message.visible)? {
            return Ok(Err(Error::NoThread));
        }
        if self.disabled.contains(key) {
            return Ok(Err(Error::Disabled));
        }
        let loaded = match self.cache.take(key) {
            Some(loaded) => loaded,
            None => match heads::load(conn, key)? {
                Some(loaded) => loaded,
                None => return Ok(Err(Error::NoThread)),
            },
        };
        if let Err(error) = check_target(target, &loaded.thread) {
            self.cache.put(loaded);
            return Ok(Err(error));
        }
        Ok(Ok(loaded))
    }

    fn fork(&self, context: &Context<'_>, message: &Message) -> rusqlite::Result<Result<Loaded, Error>> {
        let Target::Fork { source, at, id, incarnation } = &message.target else {
            unreachable!("bug: the target is not a fork")
        };
        let conn = context.conn;
        let source = match heads::key_of(conn, source)? {
            Some(key) if heads::is_visible(conn, key, &message.visible)? => heads::load(conn, key)?,
            _ => None,
        };
        let Some(source) = source else { return Ok(Err(Error::NoThread)) };
        if deletion::is_marked(conn, source.thread.session)? {
            return Ok(Err(Error::NoThread));
        }
        let last = source.head.seq();
        let point = history::fork_point(conn, &source.thread, at.unwrap_or(last).min(last))?;
        let key = heads::next_key(conn)?;
        Ok(Ok(new_fork(key, id.clone(), *incarnation, &source, point, context.now)))
    }
}
