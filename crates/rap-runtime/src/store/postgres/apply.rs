//! Applies a batch of messages in one transaction, with one pipeline for each round and one more.
//!
//! The first pipeline locks the heads in key order and loads the facts of the first round. Each further pipeline writes the
//! steps of a round, and either loads the facts of the next round or commits.

use std::collections::{BTreeSet, HashMap, HashSet};

use rap_agent::{FactsNeeded, facts_needed};
use rap_io::secret_box::Key;
use rap_protocol::{ThreadId, Timestamp};
use tokio_postgres::Row;

use super::bulk::Bulk;
use super::connect::{Connections, Transaction};
use super::deletion;
use super::directory::{Directory, new_keys};
use super::facts::{LoadedFacts, Wanted};
use super::heads::{self, THREAD_COLUMNS, thread_id, thread_key};
use super::history;
use super::nodes::NodeNumber;
use super::outcome::{NOW, TransactionId};
use super::statement::{BEGIN, Failure, Statement, get};
use super::writes::{Claims, StepWriter};
use crate::store::alert;
use crate::store::apply::check_target;
use crate::store::batch::{Applied, DisabledThreads};
use crate::store::stored::{new_fork, new_root};
use crate::store::{
    BoxError, Committed, Error, Loaded, Message, NewThread, Receipt, Reserve, SharedFacts, StepSettings,
    Stepped, Target, ThreadKey, Visibility, rounds, step_one,
};

/// Maximum number of rounds in a transaction. Further messages of a thread are left for the next one.
const ROUNDS: usize = 4;

/// The environment of batches.
pub(super) struct Context<'a> {
    pub(super) connections: &'a Connections,
    pub(super) directory: &'a Directory,
    pub(super) rules: &'a StepSettings,
    pub(super) key: &'a Key,
    pub(super) disabled: &'a DisabledThreads,
    pub(super) clock: &'a super::Time,
    pub(super) node: NodeNumber,
    pub(super) reserve: &'a Reserve,
    /// True if the batch failed before because of a row.
    pub(super) careful: bool,
}

/// A batch that was written.
pub(super) struct Written {
    /// The result of each message. `None` for a message that is left for the next batch.
    pub(super) applied: Vec<Option<Applied>>,
    /// The transaction, if it is not known whether it was committed.
    pub(super) unknown: Option<TransactionId>,
}

/// The thread that a message is for.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Lookup {
    Key(ThreadKey),
    Missing(ThreadId),
}

/// A batch in progress.
struct Batch<'a> {
    context: &'a Context<'a>,
    messages: &'a [&'a Message],
    lookups: Vec<Lookup>,
    heads: HashMap<ThreadKey, Result<Loaded, BoxError>>,
    /// Messages whose thread is looked up by its id in this transaction.
    named: HashMap<ThreadId, Vec<usize>>,
    /// Threads whose head another transaction holds.
    held: HashSet<ThreadKey>,
    /// Threads that are not there any more, because their session was moved away. It may have come back with other keys,
    /// so their messages are left for the next batch, which looks them up by their ids.
    gone: HashSet<ThreadKey>,
    facts: LoadedFacts,
    shared: SharedFacts,
    now: Timestamp,
    transaction: TransactionId,
    applied: Vec<Option<Applied>>,
}

/// Applies a batch.
pub(super) async fn apply(context: &Context<'_>, messages: &[&Message]) -> Result<Written, Failure> {
    let lookup = |message: &&Message| match (context.directory.key(&message.target), &message.target) {
        (Some(key), _) => Lookup::Key(key),
        (None, Target::Id(id) | Target::New(NewThread { id, .. }) | Target::Fork { id, .. }) => {
            Lookup::Missing(id.clone())
        }
        (None, Target::Key(key) | Target::Token { key, .. }) => Lookup::Key(*key),
    };
    let mut batch = Batch {
        context,
        messages,
        lookups: messages.iter().map(lookup).collect(),
        heads: HashMap::new(),
        named: HashMap::new(),
        held: HashSet::new(),
        gone: HashSet::new(),
        facts: LoadedFacts::default(),
        shared: SharedFacts::default(),
        now: Timestamp(0),
        transaction: TransactionId::default(),
        applied: messages.iter().map(|_| None).collect(),
    };
    let mut tx = context.connections.begin(BEGIN).await?;
    batch.load(&mut tx).await?;
    let mut rounds = rounds(batch.lookups.clone());
    rounds.truncate(ROUNDS);
    let last = rounds.len() - 1;
    for (number, round) in rounds.iter().enumerate() {
        let mut statements = batch.step(&mut tx, round).await?;
        if number == last {
            statements.extend(batch.facts.save_shared(&batch.shared));
            rap_io::crash::point("before_commit");
            let unknown = match tx.finish(&statements).await {
                Err(Failure::Unknown(error)) => {
                    tracing::warn!(%error, "the outcome of a commit is unknown");
                    Some(batch.transaction)
                }
                done => done.map(|_| None)?,
            };
            rap_io::crash::point("after_commit");
            return Ok(Written { applied: batch.applied, unknown });
        }
        // The facts of the next round are loaded after the writes of this one.
        batch.facts.begin_round();
        let wanted = batch.wanted(&rounds[number + 1]);
        let writes = statements.len();
        statements.extend(wanted.statements());
        let mut rows = tx.pipeline(&statements).await?.into_iter().skip(writes);
        batch.facts.add(&wanted, &mut rows)?;
    }
    unreachable!("bug: a batch has at least one round")
}

impl Batch<'_> {
    /// Sends the first pipeline: the locks, the time, and the facts that the first round probably needs.
    async fn load(&mut self, tx: &mut Transaction) -> Result<(), Failure> {
        let mut keys = BTreeSet::new();
        let mut wanted = Wanted::default();
        for (at, (message, lookup)) in self.messages.iter().zip(&self.lookups).enumerate() {
            if let Lookup::Key(key) = lookup {
                keys.insert(key.number());
                if let Some(session) = self.context.directory.session(&message.target) {
                    // The limits of an agent that has its own may need another pipeline.
                    wanted.guess(*key, session, &message.input, &self.context.rules.limits);
                }
            }
            match (&message.target, lookup) {
                (Target::New(NewThread { id, .. }) | Target::Fork { id, .. }, _)
                | (Target::Id(id), Lookup::Missing(_)) => self.named.entry(id.clone()).or_default().push(at),
                _ => {}
            }
            wanted.add_message(message);
        }
        if !self.named.is_empty() {
            // A thread that another message of the batch creates may turn out to exist under another key.
            for (at, message) in self.messages.iter().enumerate() {
                if let (Target::Id(id), Lookup::Key(_)) = (&message.target, &self.lookups[at])
                    && let Some(messages) = self.named.get_mut(id)
                {
                    messages.push(at);
                }
            }
        }
        let keys: Vec<i64> = keys.into_iter().collect();
        let ids: Vec<String> = self.named.keys().map(|id| id.as_str().to_owned()).collect();
        let by_id = if ids.is_empty() { "" } else { " OR t.id = ANY($2)" };
        // Forks lock their source `FOR KEY SHARE`, which does not keep steps from it.
        let sql = format!(
            "SELECT {THREAD_COLUMNS} FROM threads t WHERE t.no = ANY($1){by_id} ORDER BY t.no \
             FOR NO KEY UPDATE SKIP LOCKED"
        );
        let mut select = Statement::new(sql).with(keys.clone());
        if !ids.is_empty() {
            select = select.with(ids.clone());
        }
        let mut statements = vec![select, Statement::new(NOW)];
        statements.extend(wanted.statements());
        let mut rows = tx.pipeline(&statements).await?.into_iter();
        for row in rows.next().unwrap_or_default() {
            self.add_head(&row)?;
        }
        let time = rows.next().unwrap_or_default();
        let time =
            time.first().ok_or_else(|| Failure::Unavailable("the database returned no time".into()))?;
        self.now = self.context.clock.observe(get(time, 0)?);
        self.transaction = TransactionId::read(time)?;
        self.facts.add(&wanted, &mut rows)?;
        self.find_missing(tx, keys, ids).await
    }

    fn add_head(&mut self, row: &Row) -> Result<(), Failure> {
        let key = thread_key(row, 0)?;
        let loaded = match heads::loaded(row) {
            Ok(loaded) => {
                self.context.directory.remember(&loaded.thread);
                Ok(loaded)
            }
            Err(Failure::Row(error)) => Err(error),
            Err(failure) => return Err(failure),
        };
        self.found(&thread_id(row, 1)?, key);
        self.heads.insert(key, loaded);
        Ok(())
    }

    /// Finds out which of the threads that were not loaded exist: another transaction holds those. The id of a new thread
    /// is nearly always free, so it is looked up again only after a failed write.
    async fn find_missing(
        &mut self,
        tx: &mut Transaction,
        keys: Vec<i64>,
        ids: Vec<String>,
    ) -> Result<(), Failure> {
        let is_new = |target: &Target| matches!(target, Target::New(_) | Target::Fork { .. });
        let mut expected = self.messages.iter().zip(&self.lookups);
        let all_there = expected.all(|(message, lookup)| match lookup {
            Lookup::Key(key) => self.heads.contains_key(key) || is_new(&message.target),
            Lookup::Missing(_) => is_new(&message.target),
        });
        if all_there && !self.context.careful {
            return Ok(());
        }
        let sql = "SELECT no, id FROM threads WHERE no = ANY($1) OR id = ANY($2)";
        for row in tx.query(Statement::new(sql).with(keys).with(ids)).await? {
            let (key, id) = (thread_key(&row, 0)?, thread_id(&row, 1)?);
            if self.heads.contains_key(&key) {
                continue;
            }
            self.held.insert(key);
            self.found(&id, key);
        }
        for (message, lookup) in self.messages.iter().zip(&self.lookups) {
            if let (Target::Id(id), Lookup::Key(key)) = (&message.target, lookup)
                && !self.heads.contains_key(key)
                && !self.held.contains(key)
                && self.context.directory.forget_thread(id, *key)
            {
                self.gone.insert(*key);
            }
        }
        Ok(())
    }

    /// Sets the thread of the messages that name it by its id.
    fn found(&mut self, id: &ThreadId, key: ThreadKey) {
        for at in self.named.get(id).into_iter().flatten() {
            self.lookups[*at] = Lookup::Key(key);
        }
    }

    /// Returns the facts that the messages of a round need and that are not loaded yet.
    fn wanted(&self, round: &[usize]) -> Wanted {
        let mut wanted = Wanted::default();
        for at in round {
            let Lookup::Key(key) = &self.lookups[*at] else { continue };
            let Some(Ok(loaded)) = self.heads.get(key) else { continue };
            wanted.add(&loaded.thread, &self.needs(loaded, *at), &self.facts, &self.shared);
        }
        wanted
    }

    fn needs(&self, loaded: &Loaded, at: usize) -> FactsNeeded {
        let limits = self.context.rules.limits(&loaded.thread.agent);
        facts_needed(&loaded.head, &self.messages[at].input, limits)
    }

    /// Computes the steps of a round, and returns the statements that write them.
    async fn step(&mut self, tx: &mut Transaction, round: &[usize]) -> Result<Vec<Statement>, Failure> {
        self.create_threads(tx, round).await?;
        let wanted = self.wanted(round);
        let statements = wanted.statements();
        if !statements.is_empty() {
            let mut rows = tx.pipeline(&statements).await?.into_iter();
            self.facts.add(&wanted, &mut rows)?;
        }
        let (mut bulk, mut stepped) = (Bulk::default(), Vec::new());
        for at in round {
            if let Some(step) = self.step_one(*at, &mut bulk)? {
                stepped.push((*at, step));
            }
        }
        let children = stepped.iter().map(|(_, stepped)| spawns(stepped)).sum();
        let mut keys = self.keys(tx, children).await?.into_iter();
        for (at, step) in stepped {
            let keys: Vec<ThreadKey> = keys.by_ref().take(spawns(&step)).collect();
            self.applied[at] = Some(self.write(at, step, keys, &mut bulk));
        }
        Ok(bulk.statements())
    }

    /// Makes the threads that messages of the round create.
    async fn create_threads(&mut self, tx: &mut Transaction, round: &[usize]) -> Result<(), Failure> {
        for at in round {
            let Lookup::Key(key) = &self.lookups[*at] else { continue };
            let Message { target, visible, .. } = self.messages[*at];
            if self.heads.contains_key(key) || self.held.contains(key) {
                continue;
            }
            let loaded = match target {
                Target::New(new) => Some(new_root(*key, new, self.now)),
                Target::Fork { source, at, id, incarnation } => {
                    match source_of_fork(tx, source, visible).await? {
                        Some(source) => {
                            let last = source.head.seq();
                            let at = at.unwrap_or(last).min(last);
                            let point = history::fork_point(tx, &source.thread, at).await?;
                            Some(new_fork(*key, id.clone(), *incarnation, &source, point, self.now))
                        }
                        None => None,
                    }
                }
                _ => None,
            };
            if let Some(loaded) = loaded {
                self.heads.insert(*key, Ok(loaded));
            }
        }
        Ok(())
    }

    /// Returns the thread of a message, or the reason why it cannot take the message. `None` if the message is left for
    /// the next batch.
    fn load_one(&self, at: usize) -> Option<Result<Loaded, Error>> {
        let Message { target, visible, .. } = self.messages[at];
        let is_new = matches!(target, Target::New(_) | Target::Fork { .. });
        let Lookup::Key(key) = &self.lookups[at] else { return Some(Err(Error::NoThread)) };
        if self.held.contains(key) {
            return is_new.then_some(Err(Error::Exists));
        }
        if self.gone.contains(key) {
            return None;
        }
        Some(match self.heads.get(key) {
            None => Err(Error::NoThread),
            Some(Ok(loaded)) if is_new && loaded.version > 0 => Err(Error::Exists),
            Some(Err(_)) if is_new => Err(Error::Exists),
            Some(Ok(loaded)) if !is_new && !visible.includes(loaded.thread.user_id.as_ref()) => {
                Err(Error::NoThread)
            }
            // The user of a thread that cannot be read is not known.
            Some(Err(_)) if *visible != Visibility::All => Err(Error::NoThread),
            Some(_) if self.context.disabled.contains(*key) => Err(Error::Disabled),
            Some(Err(error)) => Err(Error::Unreadable(error.to_string().into())),
            Some(Ok(loaded)) => check_target(target, &loaded.thread).map(|()| loaded.clone()),
        })
    }

    /// Computes the step of one message. If there is none, its result is already in `applied`.
    fn step_one(&mut self, at: usize, bulk: &mut Bulk) -> Result<Option<Stepped>, Failure> {
        let message = self.messages[at];
        let Some(outcome) = self.load_one(at) else { return Ok(None) };
        if let Some(key) = &message.idempotency_key
            && let Some(repeated) = self.facts.repeated(key, &self.shared)
        {
            self.forget_new(at);
            self.applied[at] = Some(repeated.map_or_else(Applied::Refused, Applied::Repeated));
            return Ok(None);
        }
        let stepped = match outcome {
            Ok(loaded) => self.run(loaded, at)?,
            Err(error) => Err(error),
        };
        // A message that its receiver refuses counts as delivered. It stays in the outbox only if the step could not
        // run.
        let could_run = !matches!(stepped, Err(Error::Disabled | Error::Unreadable(_)));
        if let Some(outbox) = message.outbox.filter(|_| could_run) {
            if !self.facts.take_message(outbox) {
                self.applied[at] = Some(Applied::Refused(rap_agent::Ignored::Duplicate.into()));
                return Ok(None);
            }
            bulk.delivered(outbox);
        }
        match stepped {
            Ok(stepped) => {
                // Steps of the same session in this round continue from its spending.
                self.shared.record_step(stepped.loaded.thread.session, &stepped.step);
                if let Some(key) = &message.idempotency_key {
                    self.shared.remember(key, &receipt(&stepped));
                }
                Ok(Some(stepped))
            }
            Err(error) => {
                self.forget_new(at);
                self.applied[at] = Some(Applied::Refused(error));
                Ok(None)
            }
        }
    }

    /// Removes a new thread whose first message was refused, so that it does not exist for the next one.
    fn forget_new(&mut self, at: usize) {
        if let Lookup::Key(key) = &self.lookups[at]
            && matches!(self.heads.get(key), Some(Ok(loaded)) if loaded.version == 0)
        {
            self.heads.remove(key);
        }
    }

    fn run(&mut self, loaded: Loaded, at: usize) -> Result<Result<Stepped, Error>, Failure> {
        let needs = self.needs(&loaded, at);
        let facts = match self.facts.of(&loaded.thread, &needs, &mut self.shared, self.now) {
            Ok(facts) => facts,
            // Only this message is concerned.
            Err(Failure::Row(error)) => return Ok(Err(Error::Unreadable(error))),
            Err(failure) => return Err(failure),
        };
        let limits = self.context.rules.limits(&loaded.thread.agent);
        let stepped = step_one(loaded, self.messages[at].input.clone(), facts, self.now, limits);
        Ok(stepped.map_err(|(loaded, error)| {
            if matches!(error, Error::Disabled) && loaded.version > 0 {
                self.context.disabled.insert(loaded.thread.key);
            }
            error
        }))
    }

    /// Takes keys for children, from the database if necessary.
    async fn keys(&mut self, tx: &mut Transaction, count: usize) -> Result<Vec<ThreadKey>, Failure> {
        if let Some(keys) = self.context.directory.take_keys(count) {
            return Ok(keys);
        }
        let rows = tx.query(new_keys(count.max(64))).await?;
        self.context.directory.add_keys(&rows)?;
        let missing = || Failure::Unavailable("other batches took the keys of new threads".into());
        self.context.directory.take_keys(count).ok_or_else(missing)
    }

    /// Writes a step unchanged.
    fn write(&mut self, at: usize, stepped: Stepped, keys: Vec<ThreadKey>, bulk: &mut Bulk) -> Applied {
        let (message, receipt) = (self.messages[at], receipt(&stepped));
        let Stepped { loaded: Loaded { thread, head: old, version }, step, now } = stepped;
        let Context { rules, key, node, reserve, .. } = *self.context;
        let keys = keys.into_iter();
        let claims = Claims { node, reserve, reserved: Vec::new() };
        let mut writer = StepWriter { bulk: &mut *bulk, thread: &thread, key, rules, now, keys, claims };
        writer.head((version > 0).then_some((&old, version)), &step.head);
        let children = step.writes.iter().filter_map(|write| writer.write(write)).collect();
        let reserved = writer.claims.reserved;
        for alert in alert::alerts(rules, &thread, &step, now) {
            bulk.alert(alert);
        }
        if let Some(key) = &message.idempotency_key {
            bulk.request(key, thread.session, &receipt, now);
        }
        if let Some(toolset) = &message.toolset {
            bulk.toolset(toolset);
        }
        let version = version + 1;
        let loaded = Loaded { thread: thread.clone(), head: step.head.clone(), version };
        self.heads.insert(thread.key, Ok(loaded));
        let committed = Box::new(Committed { thread, step, children, late: false, reserved });
        Applied::Done { receipt, committed, version }
    }
}

/// Loads the source of a new fork. Returns `None` if it is not visible or its session is being deleted, which does not begin
/// before the end of the transaction.
async fn source_of_fork(
    tx: &mut Transaction,
    id: &ThreadId,
    visible: &Visibility,
) -> Result<Option<Loaded>, Failure> {
    let Some(source) = heads::load_by_id(tx, id, visible).await? else { return Ok(None) };
    if deletion::forbids_fork(tx, source.thread.session).await? {
        return Ok(None);
    }
    // The session may have been deleted in the meantime.
    heads::load_by_id(tx, id, visible).await
}

fn receipt(stepped: &Stepped) -> Receipt {
    Receipt { thread: stepped.loaded.thread.id.clone(), turn: stepped.step.head.turn() }
}

fn spawns(stepped: &Stepped) -> usize {
    stepped.step.writes.iter().filter(|write| matches!(write, rap_agent::Write::Spawn(_))).count()
}
