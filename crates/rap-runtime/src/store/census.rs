//! How much of everything there is, without looking at all of it.

use rap_agent::Status;
use rap_io::metrics::{Counter, Histogram};
use rap_io::writer::{Queued, WriterMetrics};

use super::{Error, Store};

/// What waits in the tables is counted up to here.
pub(crate) const COUNTED: u32 = 10_000;

/// How steps have gone since the start.
pub(crate) struct Steps {
    pub(crate) applied: Counter,
    pub(crate) refused: Counter,
    /// From the arrival of a message until it is on disk.
    pub(crate) seconds: Histogram,
}

impl Default for Steps {
    fn default() -> Self {
        let (applied, refused) = (Counter::default(), Counter::default());
        Steps { applied, refused, seconds: Histogram::of_seconds() }
    }
}

/// What is in the tables.
pub(crate) struct Census {
    /// How many threads have each status.
    pub(crate) threads: [(&'static str, i64); 6],
    /// What waits to be done, by kind; [`COUNTED`] is that many or more.
    pub(crate) waiting: Vec<(&'static str, u32)>,
}

/// What waits, by indexes that hold nothing else.
const WAITING: [(&str, &str); 4] = [
    ("ask", "threads WHERE ask IS NOT NULL"),
    ("invoke", "calls WHERE state = 0 AND invoke_at IS NOT NULL"),
    ("answer", "questions WHERE answer_at IS NOT NULL"),
    ("letter", "letters"),
];

impl Store {
    pub(crate) async fn census(&self) -> Result<Census, Error> {
        self.read(|conn| {
            let mut threads = Status::ALL.map(|status| (status.as_str(), 0));
            conn.prepare_cached("SELECT * FROM thread_counts")?.query_row([], |row| {
                threads.iter_mut().try_for_each(|(status, count)| {
                    *count = row.get(*status)?;
                    Ok(())
                })
            })?;
            let waiting = WAITING.into_iter().map(|(kind, what)| {
                let sql = format!("SELECT count(*) FROM (SELECT 1 FROM {what} LIMIT {COUNTED})");
                Ok((kind, conn.prepare_cached(&sql)?.query_row([], |row| row.get(0))?))
            });
            let waiting = waiting.collect::<rusqlite::Result<_>>()?;
            Ok(Census { threads, waiting })
        })
        .await
    }

    pub(crate) fn steps(&self) -> &Steps {
        &self.shared.steps
    }

    pub(crate) fn writer_metrics(&self) -> (&WriterMetrics, Queued) {
        (self.writer.metrics(), self.writer.queued())
    }

    /// How many threads are left alone because a step of theirs panicked.
    pub(crate) fn set_aside(&self) -> usize {
        self.shared.aside().len()
    }
}
