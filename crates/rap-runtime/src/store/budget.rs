//! What sessions with a budget have spent: counted in the transaction of the step that spends it.

use std::sync::Arc;

use rap_agent::{Amounts, Budgets, Effect, Message, Resumes, Spending};
use rap_protocol::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};

use super::cache::Loaded;
use super::read::legible;
use super::rows::{self, unreadable};
use super::thread::{Thread, ThreadNo};
use super::{Committed, Error, Ran, Shared, Store, Target};

/// How many threads of a session are resumed together.
const RESUMED: usize = 10_000;

impl Shared {
    /// Counts what was spent by a step and the children that it has borne, who come behind it. Whose question is beyond
    /// the budget does not ask it: that is decided where it is counted, so that nobody else's question can change it.
    pub(super) fn spend(
        &self,
        conn: &Connection,
        steps: Vec<Committed>,
        spent: Vec<Amounts>,
        now: Timestamp,
    ) -> rusqlite::Result<Vec<Committed>> {
        let mut all = Vec::with_capacity(steps.len());
        for (mut step, spent) in steps.into_iter().zip(spent) {
            let thread = Arc::clone(&step.thread);
            let why = count(conn, &thread, spent, &self.limits.of(&thread).budgets, now)?;
            let asks = step.effects.iter().position(|effect| matches!(effect, Effect::Ask { .. }));
            let (Some(why), Some(at)) = (why, asks) else {
                all.push(step);
                continue;
            };
            let Effect::Ask { turn, .. } = step.effects.remove(at) else { unreachable!("bug: it asks") };
            all.push(step);
            match self.apply(conn, &Target::No(thread.no), Message::OverBudget { turn, why })? {
                Ran::Done(paused, _) => all.extend(paused),
                Ran::Refused(error) => unreachable!("bug: a question is refused its pause: {error}"),
            }
        }
        Ok(all)
    }
}

/// Counts what is spent. If that is beyond the budget, gives the reason.
fn count(
    conn: &Connection,
    thread: &Thread,
    spent: Amounts,
    budgets: &Budgets,
    now: Timestamp,
) -> rusqlite::Result<Option<String>> {
    if spent == Amounts::default() {
        return Ok(None);
    }
    let mut spending = read(conn, thread.root)?.unwrap_or_else(|| Spending::new(now));
    let over = spending.spend(spent, budgets, now);
    write(conn, thread.root, &spending)?;
    Ok(over)
}

fn read(conn: &Connection, root: ThreadNo) -> rusqlite::Result<Option<Spending>> {
    let mut statement = conn.prepare_cached("SELECT body FROM spending WHERE root = ?1")?;
    let spending =
        |row: &rusqlite::Row<'_>| serde_json::from_str(row.get_ref(0)?.as_str()?).map_err(unreadable);
    statement.query_row([root], spending).optional()
}

fn write(conn: &Connection, root: ThreadNo, spending: &Spending) -> rusqlite::Result<()> {
    let body = serde_json::to_string(spending).expect("bug: what was spent is JSON");
    let sql = "INSERT OR REPLACE INTO spending (root, body) VALUES (?1, ?2)";
    conn.prepare_cached(sql)?.execute(params![root, body])?;
    Ok(())
}

impl Store {
    /// A thread is about to be resumed: if that is for its session, allows the session as much again of what it has
    /// spent. Gives the other threads that go on with it.
    pub(crate) async fn resumed_with(&self, thread: &Thread) -> Result<Vec<ThreadNo>, Error> {
        let (no, root): (ThreadNo, ThreadNo) = (thread.no, thread.root);
        let budgets: Budgets = self.shared.limits.of(thread).budgets;
        self.write(move |conn| {
            if !goes_on_with_session(conn, no)? {
                return Ok(Vec::new());
            }
            if let Some(mut spending) = read(conn, root)? {
                spending.lift(&budgets);
                write(conn, root, &spending)?;
            }
            let sql = "SELECT no FROM threads WHERE no = ?1 AND status = 'needs_you' \
                       UNION SELECT no FROM threads WHERE root = ?1 AND parent IS NOT NULL \
                       AND status = 'needs_you' LIMIT ?2";
            let mut statement = conn.prepare_cached(sql)?;
            let found = statement.query_map(params![root, RESUMED as i64], |row| row.get(0))?;
            let mut others = Vec::new();
            for other in found {
                let other = other?;
                if other != no && goes_on_with_session(conn, other)? {
                    others.push(other);
                }
            }
            Ok(others)
        })
        .await
    }
}

fn goes_on_with_session(conn: &Connection, no: ThreadNo) -> rusqlite::Result<bool> {
    let loaded = legible(no, rows::load(conn, no))?.flatten();
    Ok(loaded.is_some_and(|Loaded { head, .. }| head.resumes() == Resumes::WithSession))
}
