//! What sessions with a budget have spent: counted in the transaction of the step that spends it.

use rap_agent::{Amounts, Budgets, Effect, Head, Phase, Spending};
use rap_protocol::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};

use super::cache::Loaded;
use super::rows::{self, unreadable};
use super::thread::{Thread, ThreadNo};
use super::{Committed, Error, Store, now};

/// How many threads of a session are resumed together.
const RESUMED: usize = 10_000;

/// Counts what a step spends, and the children that it bears.
pub(super) fn count(
    conn: &Connection,
    before: &Head,
    after: &Head,
    step: &Committed,
    born: &[Committed],
    now: Timestamp,
) -> rusqlite::Result<()> {
    let asks = |step: &Committed| step.effects.iter().any(|effect| matches!(effect, Effect::Ask { .. }));
    let spent = |head: &Head| head.usage.input.saturating_add(head.usage.output);
    let (asked, children) = (asks(step), born.len() as u64);
    let amounts = Amounts {
        turns: u64::from(asked) + children,
        tokens: spent(after).saturating_sub(spent(before)),
        wakes: u64::from(asked && after.turns_awake == 1) + children,
    };
    if amounts == Amounts::default() {
        return Ok(());
    }
    let mut spending = read(conn, step.thread.root)?.unwrap_or_else(|| Spending::new(now));
    spending.count(amounts, now);
    write(conn, step.thread.root, &spending)
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
    /// Why the model may not be asked for a thread, if its session has spent its budget.
    pub(crate) async fn over_budget(&self, thread: &Thread) -> Result<Option<String>, Error> {
        let budgets = self.shared.limits.of(thread).budgets;
        if budgets.are_off() {
            return Ok(None);
        }
        let root = thread.root;
        let spending = self.read(move |conn| read(conn, root)).await?;
        Ok(spending.and_then(|spending| spending.exceeds(&budgets, now())))
    }

    /// Allows a session as much again of what it has spent; gives those of its threads that wait for that.
    pub(crate) async fn lift(&self, thread: &Thread) -> Result<Vec<ThreadNo>, Error> {
        let (root, budgets): (ThreadNo, Budgets) = (thread.root, self.shared.limits.of(thread).budgets);
        self.write(move |conn| {
            if let Some(mut spending) = read(conn, root)? {
                spending.lift(&budgets);
                write(conn, root, &spending)?;
            }
            let sql = "SELECT no FROM threads WHERE no = ?1 AND status = 'needs_you' \
                       UNION SELECT no FROM threads WHERE root = ?1 AND parent IS NOT NULL \
                       AND status = 'needs_you' LIMIT ?2";
            let mut statement = conn.prepare_cached(sql)?;
            let found = statement.query_map(params![root, RESUMED as i64], |row| row.get(0))?;
            let mut paused = Vec::new();
            for no in found {
                let no: ThreadNo = no?;
                if let Some(Loaded { head, .. }) = rows::load(conn, no)?
                    && matches!(head.phase, Phase::Paused { .. })
                {
                    paused.push(no);
                }
            }
            Ok(paused)
        })
        .await
    }
}
