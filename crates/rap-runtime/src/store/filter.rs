//! Which threads are listed, and how they are found: those that are few among a million are not searched for.

use rap_agent::Status;
use rap_protocol::ThreadId;

use super::thread::ThreadNo;

/// Which threads to list.
#[derive(Debug, Clone, Default)]
pub(crate) struct ThreadFilter {
    pub(crate) status: Option<Status>,
    pub(crate) parent: Option<ThreadId>,
    /// After this number.
    pub(crate) after: ThreadNo,
    pub(crate) limit: usize,
}

impl ThreadFilter {
    /// The condition on a thread `t`, whose parameters are `after`, `parent` and `limit`. It is written out, so that its
    /// index is found.
    pub(super) fn condition(&self) -> String {
        let status = match self.status {
            None => String::new(),
            Some(Status::Running) => "AND t.ask IS NOT NULL".into(),
            Some(status) => format!("AND t.status = '{}'", status.as_str()),
        };
        // Without a parent the parameter is there all the same.
        let parent = match self.parent {
            None => "AND ?2 IS NOT NULL",
            Some(_) => "AND t.parent = (SELECT no FROM threads WHERE id = ?2)",
        };
        format!("WHERE t.no > ?1 {status} {parent} ORDER BY t.no LIMIT ?3")
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::{Connection, params};

    use super::*;

    #[test]
    fn threads_that_are_few_are_found_by_an_index() {
        let conn = Connection::open_in_memory().unwrap();
        conn.execute_batch(include_str!("schema_1.sql")).unwrap();
        let plan = |status, parent| {
            let filter = ThreadFilter { status, parent, after: 0, limit: 1 };
            let sql = format!("EXPLAIN QUERY PLAN SELECT head FROM threads t {}", filter.condition());
            let mut statement = conn.prepare(&sql).unwrap();
            let mut first = statement.query_map(params![0, "", 1], |row| row.get::<_, String>(3)).unwrap();
            first.next().unwrap().unwrap()
        };
        let table = [
            (Some(Status::NeedsYou), None, "threads_needs_you"),
            (Some(Status::Failed), None, "threads_failed"),
            (Some(Status::Running), None, "threads_ask"),
            (None, Some(ThreadId::new("p").unwrap()), "threads_parent"),
            (None, None, "INTEGER PRIMARY KEY"),
        ];
        for (status, parent, index) in table {
            let plan = plan(status, parent);
            assert!(plan.starts_with("SEARCH t ") && plan.contains(index), "{index}: {plan}");
        }
    }
}
