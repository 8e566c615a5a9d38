//! What is due: read from the tables for the workers, and looked at once more before it is acted upon.

use std::sync::Arc;

use rap_agent::{Doubt, Letter, LostAfter, Message, Seq, Server};
use rap_protocol::{CallId, ResponseUrl, ThreadId, Timestamp};
use rusqlite::{Row, params};
use serde_json::{Map, Value};

use super::cache::Loaded;
use super::listings::{Asked, open_question};
use super::read::legible;
use super::rows::{self, call_id, id, unreadable};
use super::thread::{Thread, ThreadNo};
use super::{Error, Store};

/// How timers are found: each by an index, so that those that are not due cost nothing, however many they are.
const DUE_THREADS: &str = "SELECT no FROM threads WHERE due <= ?1 ORDER BY due LIMIT ?2";
const TIMED_OUT: &str = "SELECT thread, id FROM calls WHERE until <= ?2 AND (until > ?1 OR server = ?4) \
                         ORDER BY until LIMIT ?3";
const NEXT_DUE: [&str; 4] = [
    "SELECT min(due) FROM threads WHERE due > ?1",
    "SELECT min(invoke_at) FROM calls WHERE state = 0 AND invoke_at > ?1",
    "SELECT min(until) FROM calls WHERE until > ?1",
    "SELECT min(answer_at) FROM questions WHERE answer_at > ?1",
];

/// An invocation that has to be sent.
pub(crate) struct DueInvocation {
    pub(crate) thread: Arc<Thread>,
    pub(crate) call: rap_agent::OpenCall,
    pub(crate) arguments: Map<String, Value>,
    pub(crate) attempts: u32,
}

/// An answer of a person that has to be delivered.
pub(crate) struct DueAnswer {
    pub(crate) thread: Arc<Thread>,
    pub(crate) no: u64,
    pub(crate) call: CallId,
    pub(crate) response_url: ResponseUrl,
    pub(crate) selected: usize,
    pub(crate) attempts: u32,
    pub(crate) since: Timestamp,
}

/// A call that was acknowledged long ago.
pub(crate) struct Doubtful {
    pub(crate) thread: ThreadNo,
    pub(crate) thread_id: ThreadId,
    pub(crate) call: CallId,
    pub(crate) server: String,
    /// What is known of it.
    pub(crate) doubt: Doubt,
}

/// A letter on its way to a thread.
pub(crate) struct Letters {
    pub(crate) no: i64,
    pub(crate) receiver: ThreadId,
    pub(crate) message: Message,
}

impl Store {
    /// Threads whose model has to be asked.
    pub(crate) async fn asks(&self, limit: usize) -> Result<Vec<(Arc<Thread>, u64, Seq)>, Error> {
        let aside = self.shared.aside().clone();
        self.read(move |conn| {
            let mut statement =
                conn.prepare_cached("SELECT no FROM threads WHERE ask IS NOT NULL LIMIT ?1")?;
            let numbers: Vec<ThreadNo> =
                statement.query_map([limit as i64], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
            let mut asks = Vec::new();
            // A thread that is set aside would not take the answer.
            for no in numbers.into_iter().filter(|no| !aside.contains(no)) {
                if let Some(Loaded { thread, head, .. }) = legible(no, rows::load(conn, no))?.flatten()
                    && let rap_agent::Phase::Asking { up_to } = head.phase
                {
                    asks.push((thread, head.turn, up_to));
                }
            }
            Ok(asks)
        })
        .await
    }

    /// Whether a question still has to be asked.
    pub(crate) async fn is_asking(&self, thread: ThreadNo, turn: u64) -> Result<bool, Error> {
        self.read(move |conn| {
            let mut statement = conn.prepare_cached("SELECT 1 FROM threads WHERE no = ?1 AND ask = ?2")?;
            statement.exists(params![thread, turn.cast_signed()])
        })
        .await
    }

    pub(crate) async fn due_invocations(
        &self,
        now: Timestamp,
        limit: usize,
    ) -> Result<Vec<DueInvocation>, Error> {
        let aside = self.shared.aside().clone();
        self.read(move |conn| {
            let mut statement = conn.prepare_cached(
                "SELECT thread, id, call_id, name, server, seq, since, until, attempts FROM calls \
                 WHERE state = 0 AND invoke_at <= ?1 ORDER BY invoke_at LIMIT ?2",
            )?;
            let found: Vec<(ThreadNo, rap_agent::OpenCall, u32)> = statement
                .query_map(params![now.0, limit as i64], open_call)?
                .collect::<rusqlite::Result<_>>()?;
            let mut due = Vec::with_capacity(found.len());
            // A thread that is set aside would not take a refusal, and the call be sent again and again.
            for (no, call, attempts) in found.into_iter().filter(|(no, ..)| !aside.contains(no)) {
                if let Some(Loaded { thread, .. }) = legible(no, rows::load(conn, no))?.flatten()
                    && let Some(arguments) = legible(no, rows::arguments_of(conn, no, call.seq, &call.id))?
                {
                    due.push(DueInvocation { thread, call, arguments, attempts });
                }
            }
            Ok(due)
        })
        .await
    }

    /// Whether an invocation is due that was tried so often.
    pub(crate) async fn is_due(
        &self,
        thread: ThreadNo,
        call: CallId,
        attempts: u32,
        now: Timestamp,
    ) -> Result<bool, Error> {
        self.read(move |conn| {
            let sql = "SELECT 1 FROM calls \
                       WHERE thread = ?1 AND id = ?2 AND state = 0 AND attempts = ?3 AND invoke_at <= ?4";
            conn.prepare_cached(sql)?.exists(params![thread, call.as_str(), attempts, now.0])
        })
        .await
    }

    /// Whether a person's answer has yet to be delivered, after so many attempts.
    pub(crate) async fn is_answer_due(
        &self,
        thread: ThreadNo,
        no: u64,
        attempts: u32,
        now: Timestamp,
    ) -> Result<bool, Error> {
        self.read(move |conn| {
            let sql = "SELECT 1 FROM questions \
                       WHERE thread = ?1 AND no = ?2 AND attempts = ?3 AND answer_at <= ?4";
            conn.prepare_cached(sql)?.exists(params![thread, no.cast_signed(), attempts, now.0])
        })
        .await
    }

    pub(crate) async fn due_threads(&self, now: Timestamp, limit: usize) -> Result<Vec<ThreadNo>, Error> {
        self.read(move |conn| {
            let mut statement = conn.prepare_cached(DUE_THREADS)?;
            statement.query_map(params![now.0, limit as i64], |row| row.get(0))?.collect()
        })
        .await
    }

    /// Open calls whose time was over after one point in time and up to another. Those of the runtime's own do not
    /// wait for anybody: for them the first point does not count.
    pub(crate) async fn timed_out(
        &self,
        after: Timestamp,
        now: Timestamp,
        limit: usize,
    ) -> Result<Vec<(ThreadNo, CallId)>, Error> {
        self.read(move |conn| {
            let mut statement = conn.prepare_cached(TIMED_OUT)?;
            let found = |row: &Row<'_>| Ok((row.get(0)?, call_id(row, 1)?));
            let own = Server::runtime().0;
            statement.query_map(params![after.0, now.0, limit as i64, own], found)?.collect()
        })
        .await
    }

    /// Open calls whose servers are to be asked whether anybody works on them, as [`Doubt::due`] says.
    pub(crate) async fn doubtful(
        &self,
        now: Timestamp,
        patience: LostAfter,
        limit: usize,
    ) -> Result<Vec<Doubtful>, Error> {
        let (before, gone_before) = (now.minus(patience.0), now.minus(patience.pause()));
        self.read(move |conn| {
            let mut statement = conn.prepare_cached(
                "SELECT c.thread, t.id, c.id, c.server, coalesce(c.asked_after, c.acknowledged_at), c.gone_since \
                 FROM calls c JOIN threads t ON t.no = c.thread \
                 WHERE c.state = 0 AND c.acknowledged_at IS NOT NULL \
                 AND coalesce(c.asked_after, c.acknowledged_at) <= ?2 \
                 AND (c.gone_since IS NOT NULL OR coalesce(c.asked_after, c.acknowledged_at) <= ?1) \
                 ORDER BY coalesce(c.asked_after, c.acknowledged_at) LIMIT ?3",
            )?;
            let doubtful = |row: &Row<'_>| {
                let gone_since = row.get::<_, Option<i64>>(5)?.map(Timestamp);
                Ok(Doubtful {
                    thread: row.get(0)?,
                    thread_id: id(row, 1)?,
                    call: call_id(row, 2)?,
                    server: row.get(3)?,
                    doubt: Doubt { asked: Timestamp(row.get(4)?), gone_since },
                })
            };
            statement.query_map(params![before.0, gone_before.0, limit as i64], doubtful)?.collect()
        })
        .await
    }

    /// A call was asked after.
    pub(crate) async fn asked_after(
        &self,
        thread: ThreadNo,
        call: CallId,
        doubt: Doubt,
    ) -> Result<(), Error> {
        self.write(move |conn| {
            let sql = "UPDATE calls SET asked_after = ?3, gone_since = ?4 WHERE thread = ?1 AND id = ?2";
            let gone = doubt.gone_since.map(|gone| gone.0);
            conn.prepare_cached(sql)?.execute(params![thread, call.as_str(), doubt.asked.0, gone]).map(|_| ())
        })
        .await
    }

    pub(crate) async fn letters(&self, limit: usize) -> Result<Vec<Letters>, Error> {
        self.read(move |conn| {
            let mut statement =
                conn.prepare_cached("SELECT no, sender, receiver, letter FROM letters ORDER BY no LIMIT ?1")?;
            let letter = |row: &Row<'_>| {
                let letter: Letter = serde_json::from_str(row.get_ref(3)?.as_str()?).map_err(unreadable)?;
                let message = letter.into_message(id(row, 1)?);
                Ok(Letters { no: row.get(0)?, receiver: id(row, 2)?, message })
            };
            let mut found = statement.query([limit as i64])?;
            let mut letters = Vec::new();
            while let Some(row) = found.next()? {
                match letter(row) {
                    // One that can not be read keeps no other from its receiver.
                    Err(error) if rows::is_illegible(&error) => {
                        tracing::error!(no = row.get::<_, i64>(0)?, %error, "a letter can not be read");
                    }
                    letter => letters.push(letter?),
                }
            }
            Ok(letters)
        })
        .await
    }

    pub(crate) async fn due_answers(&self, now: Timestamp, limit: usize) -> Result<Vec<DueAnswer>, Error> {
        let secrets = self.shared.key.clone();
        self.read(move |conn| {
            let mut statement = conn.prepare_cached(
                "SELECT thread, no, call, body, answer, attempts, answered_at FROM questions \
                 WHERE answer_at <= ?1 ORDER BY answer_at LIMIT ?2",
            )?;
            let mut rows_found = statement.query(params![now.0, limit as i64])?;
            let mut due = Vec::new();
            while let Some(row) = rows_found.next()? {
                let of = row.get(0)?;
                let Some(Loaded { thread, .. }) = legible(of, rows::load(conn, of))?.flatten() else {
                    continue;
                };
                let no = row.get::<_, i64>(1)?.cast_unsigned();
                let asked = open_question(&secrets, &thread, no, row.get_ref(3)?.as_blob()?);
                let Some(Asked::Choice { response_url: Some(response_url), .. }) = legible(of, asked)? else {
                    continue;
                };
                due.push(DueAnswer {
                    no,
                    call: call_id(row, 2)?,
                    response_url: ResponseUrl::new(response_url).map_err(unreadable)?,
                    selected: row.get::<_, i64>(4)?.unsigned_abs() as usize,
                    attempts: row.get(5)?,
                    since: Timestamp(row.get(6)?),
                    thread,
                });
            }
            Ok(due)
        })
        .await
    }

    /// When the next timer of any kind fires. What was due before has been begun.
    pub(crate) async fn next_due(&self, after: Timestamp) -> Result<Option<Timestamp>, Error> {
        self.read(move |conn| {
            let mut next: Option<i64> = None;
            for sql in NEXT_DUE {
                let due: Option<i64> = conn.prepare_cached(sql)?.query_row([after.0], |row| row.get(0))?;
                next = [next, due].into_iter().flatten().min();
            }
            Ok(next.map(Timestamp))
        })
        .await
    }
}

fn open_call(row: &Row<'_>) -> rusqlite::Result<(ThreadNo, rap_agent::OpenCall, u32)> {
    let secondary: Option<String> = row.get(2)?;
    let call = rap_agent::OpenCall {
        id: call_id(row, 1)?,
        call_id: secondary.map(CallId::new).transpose().map_err(unreadable)?,
        name: row.get(3)?,
        server: rap_agent::Server(row.get(4)?),
        seq: row.get::<_, i64>(5)?.unsigned_abs(),
        since: Timestamp(row.get(6)?),
        until: row.get::<_, Option<i64>>(7)?.map(Timestamp),
        unapproved: false,
    };
    Ok((row.get(0)?, call, row.get(8)?))
}

#[cfg(test)]
mod tests {
    use rusqlite::{Connection, Statement};

    use super::*;

    fn plan(conn: &Connection, sql: &str) -> Vec<String> {
        let mut statement = conn.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
        let bare = vec![0; Statement::parameter_count(&statement)];
        let steps = statement.query_map(rusqlite::params_from_iter(bare), |row| row.get(3)).unwrap();
        steps.collect::<rusqlite::Result<_>>().unwrap()
    }

    /// Nothing is known of a table's size when its plan is made, so a million rows have the same.
    #[test]
    fn timers_are_found_by_an_index_and_in_its_order() {
        let conn = Connection::open_in_memory().unwrap();
        conn.execute_batch(include_str!("schema_1.sql")).unwrap();
        let indices = ["threads_due", "calls_open", "calls_until", "questions_answer"];
        let found = [(DUE_THREADS, "threads_due"), (TIMED_OUT, "calls_until")];
        for (sql, index) in NEXT_DUE.into_iter().zip(indices).chain(found) {
            let plan = plan(&conn, sql);
            let searched = plan[0].starts_with("SEARCH ") && plan[0].contains(&format!("INDEX {index} ("));
            assert!(searched && plan.len() == 1, "{sql}: {plan:?}");
        }
    }
}
