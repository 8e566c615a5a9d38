//! Listings over all threads, page by page: open calls, subscriptions, timers, questions. All but the questions, which
//! are few, are read along an index, so that a page costs what it shows.

use std::fmt;
use std::str::FromStr;

use rap_agent::Server;
use rap_protocol::{CallId, ThreadId, Timestamp};
use rusqlite::{Row, Rows, params};
use serde::Deserialize;

use super::cache::Loaded;
use super::read::legible;
use super::rows::{self, call_id, id, unreadable};
use super::thread::{Thread, ThreadNo};
use super::{Error, Store};

// The parameters of each are the place that a page begins behind, and how many rows it has.

const CALLS: &str = "SELECT * FROM (\
         SELECT c.invoke_at, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, c.acknowledged_at, \
                c.attempts, c.outcome \
         FROM calls c JOIN threads t ON t.no = c.thread \
         WHERE c.state = 0 AND c.invoke_at IS NULL AND ?1 IS NULL AND (c.thread, c.id) > (?2, ?3) \
         ORDER BY c.thread, c.id LIMIT ?4) \
     UNION ALL SELECT * FROM (\
         SELECT c.invoke_at, c.thread, c.id, t.id, c.name, c.server, c.since, c.until, c.acknowledged_at, \
                c.attempts, c.outcome \
         FROM calls c JOIN threads t ON t.no = c.thread \
         WHERE c.state = 0 AND (c.invoke_at, c.thread, c.id) > (coalesce(?1, -1), ?2, ?3) \
         ORDER BY c.invoke_at, c.thread, c.id LIMIT ?4) LIMIT ?4";
const SUBSCRIPTIONS: &str = "SELECT c.since, c.thread, c.id, t.id, c.name, c.server, \
            (SELECT count(*) FROM backlog b WHERE b.thread = c.thread AND b.call = c.id) / 2 \
     FROM calls c JOIN threads t ON t.no = c.thread \
     WHERE c.state = 5 AND (c.since, c.thread, c.id) > (coalesce(?1, -1), ?2, ?3) \
     ORDER BY c.since, c.thread, c.id LIMIT ?4";
const TIMERS: &str = "SELECT c.until, c.thread, c.id, t.id, c.name, \
            CASE WHEN c.server != ?5 THEN 0 WHEN c.state = 0 THEN 1 ELSE 2 END \
     FROM calls c JOIN threads t ON t.no = c.thread \
     WHERE c.until IS NOT NULL AND (c.until, c.thread, c.id) > (coalesce(?1, -1), ?2, ?3) \
     UNION ALL SELECT due, no, '', id, NULL, 3 FROM threads \
     WHERE due IS NOT NULL AND status = 'failed' AND (due, no, '') > (coalesce(?1, -1), ?2, ?3) \
     ORDER BY 1, 2, 3 LIMIT ?4";

/// What a listing is asked for.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    /// Only what comes behind this.
    pub(crate) after: Place,
    pub(crate) limit: usize,
}

impl Wanted {
    pub(crate) fn first(limit: usize) -> Wanted {
        Wanted { after: Place::default(), limit }
    }

    /// One more row tells whether there is another page.
    fn rows(&self) -> i64 {
        i64::try_from(self.limit).unwrap_or(i64::MAX).saturating_add(1)
    }
}

/// A page of a listing, and where the next one begins.
pub(crate) struct Listed<T> {
    pub(crate) rows: Vec<T>,
    pub(crate) next: Option<Place>,
}

/// A row of a listing: its time, where it has one, its thread and its id there. The first page begins behind none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Place {
    at: Option<i64>,
    thread: ThreadNo,
    id: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.at {
            Some(at) => write!(f, "{at}.{}.{}", self.thread, self.id),
            None => write!(f, "-.{}.{}", self.thread, self.id),
        }
    }
}

/// A text that is no place.
#[derive(Debug)]
pub(crate) struct NoPlace;

impl FromStr for Place {
    type Err = NoPlace;

    fn from_str(text: &str) -> Result<Place, NoPlace> {
        let (at, rest) = text.split_once('.').ok_or(NoPlace)?;
        let (thread, id) = rest.split_once('.').ok_or(NoPlace)?;
        let at = if at == "-" { None } else { Some(at.parse().map_err(|_| NoPlace)?) };
        Ok(Place { at, thread: thread.parse().map_err(|_| NoPlace)?, id: id.to_owned() })
    }
}

/// Reads a page. The place of a row stands in its first three columns; one that can not be read is passed over.
fn page<T>(
    mut found: Rows<'_>,
    limit: usize,
    read: impl Fn(&Row<'_>) -> rusqlite::Result<Option<T>>,
) -> rusqlite::Result<Listed<T>> {
    let (mut rows, mut last, mut count) = (Vec::new(), None, 0);
    while let Some(row) = found.next()? {
        if count == limit {
            return Ok(Listed { rows, next: last });
        }
        count += 1;
        last = Some(Place { at: row.get(0)?, thread: row.get(1)?, id: row.get(2)? });
        rows.extend(read(row)?);
    }
    Ok(Listed { rows, next: None })
}

/// What waits for a person.
pub(crate) struct InboxItem {
    pub(crate) thread: ThreadId,
    pub(crate) call: CallId,
    pub(crate) tool: String,
    pub(crate) asked_at: Timestamp,
    pub(crate) question: Asked,
}

/// What was asked.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum Asked {
    Choice {
        prompt: String,
        choices: Vec<String>,
        default: usize,
        /// None where the runtime itself asks.
        #[serde(default)]
        response_url: Option<String>,
    },
    SignIn {
        auth_url: String,
    },
}

/// An open call for a listing.
pub(crate) struct CallRow {
    pub(crate) thread: ThreadId,
    pub(crate) call: CallId,
    pub(crate) tool: String,
    pub(crate) server: String,
    pub(crate) since: Timestamp,
    pub(crate) until: Option<Timestamp>,
    pub(crate) acknowledged_at: Option<Timestamp>,
    pub(crate) attempts: u32,
    pub(crate) outcome: Option<String>,
}

/// An active subscription for a listing.
pub(crate) struct SubscriptionRow {
    pub(crate) thread: ThreadId,
    pub(crate) call: CallId,
    pub(crate) tool: String,
    pub(crate) server: String,
    pub(crate) since: Timestamp,
    /// How many of its events wait for a child.
    pub(crate) waiting: u64,
}

/// Something that happens at a time by itself.
pub(crate) struct TimerRow {
    pub(crate) thread: ThreadId,
    pub(crate) call: Option<CallId>,
    pub(crate) tool: Option<String>,
    pub(crate) kind: &'static str,
    pub(crate) at: Timestamp,
}

impl Store {
    /// What waits for a person, in one thread or in all; the oldest first.
    pub(crate) async fn inbox(
        &self,
        thread: Option<ThreadNo>,
        wanted: Wanted,
    ) -> Result<Listed<InboxItem>, Error> {
        let secrets = self.shared.key.clone();
        self.read(move |conn| {
            let mut statement = conn.prepare_cached(
                "SELECT q.asked_at, q.thread, CAST(q.no AS TEXT), q.no, q.call, q.body, c.name FROM questions q \
                 JOIN calls c ON c.thread = q.thread AND c.id = q.call \
                 WHERE q.answer IS NULL AND (?5 IS NULL OR q.thread = ?5) \
                 AND (q.asked_at, q.thread, q.no) > (coalesce(?1, -1), ?2, CAST(?3 AS INTEGER)) \
                 ORDER BY q.asked_at, q.thread, q.no LIMIT ?4",
            )?;
            let Place { at, thread: of, id } = &wanted.after;
            let found = statement.query(params![at, of, id, wanted.rows(), thread])?;
            page(found, wanted.limit, |row| {
                let of = row.get(1)?;
                let Some(Loaded { thread, .. }) = legible(of, rows::load(conn, of))?.flatten() else {
                    return Ok(None);
                };
                let no = row.get::<_, i64>(3)?.cast_unsigned();
                let question = open_question(&secrets, &thread, no, row.get_ref(5)?.as_blob()?);
                let Some(question) = legible(of, question)? else { return Ok(None) };
                Ok(Some(InboxItem {
                    question,
                    thread: thread.id.clone(),
                    call: call_id(row, 4)?,
                    asked_at: Timestamp(row.get(0)?),
                    tool: row.get(6)?,
                }))
            })
        })
        .await
    }

    /// Open calls: those that were taken first, then by when they are sent.
    pub(crate) async fn calls(&self, wanted: Wanted) -> Result<Listed<CallRow>, Error> {
        self.read(move |conn| {
            let mut statement = conn.prepare_cached(CALLS)?;
            let Place { at, thread, id: after } = &wanted.after;
            let found = statement.query(params![at, thread, after, wanted.rows()])?;
            page(found, wanted.limit, |row| {
                Ok(Some(CallRow {
                    thread: id(row, 3)?,
                    call: call_id(row, 2)?,
                    tool: row.get(4)?,
                    server: row.get(5)?,
                    since: Timestamp(row.get(6)?),
                    until: row.get::<_, Option<i64>>(7)?.map(Timestamp),
                    acknowledged_at: row.get::<_, Option<i64>>(8)?.map(Timestamp),
                    attempts: row.get(9)?,
                    outcome: row.get(10)?,
                }))
            })
        })
        .await
    }

    /// Active subscriptions, the oldest first.
    pub(crate) async fn subscriptions(&self, wanted: Wanted) -> Result<Listed<SubscriptionRow>, Error> {
        self.read(move |conn| {
            let mut statement = conn.prepare_cached(SUBSCRIPTIONS)?;
            let Place { at, thread, id: after } = &wanted.after;
            let found = statement.query(params![at, thread, after, wanted.rows()])?;
            page(found, wanted.limit, |row| {
                Ok(Some(SubscriptionRow {
                    thread: id(row, 3)?,
                    call: call_id(row, 2)?,
                    tool: row.get(4)?,
                    server: row.get(5)?,
                    since: Timestamp(row.get(0)?),
                    waiting: row.get::<_, i64>(6)?.unsigned_abs(),
                }))
            })
        })
        .await
    }

    /// What happens by itself, the next first: sleeps and schedules, time-outs of calls, and failed threads that ask
    /// again.
    pub(crate) async fn timers(&self, wanted: Wanted) -> Result<Listed<TimerRow>, Error> {
        self.read(move |conn| {
            let mut statement = conn.prepare_cached(TIMERS)?;
            let Place { at, thread, id: after } = &wanted.after;
            let found = statement.query(params![at, thread, after, wanted.rows(), Server::runtime().0])?;
            page(found, wanted.limit, |row| {
                let kind = usize::from(row.get::<_, u8>(5)?);
                let call = Some(row.get::<_, String>(2)?).filter(|call| !call.is_empty());
                Ok(Some(TimerRow {
                    thread: id(row, 3)?,
                    call: call.map(CallId::new).transpose().map_err(unreadable)?,
                    tool: row.get(4)?,
                    at: Timestamp(row.get(0)?),
                    kind: ["timeout", "sleep", "schedule", "retry"][kind],
                }))
            })
        })
        .await
    }
}

/// What was asked, which is stored sealed.
pub(super) fn open_question(
    secrets: &rap_io::secret_box::Key,
    thread: &Thread,
    no: u64,
    sealed: &[u8],
) -> rusqlite::Result<Asked> {
    let plain = secrets.open(sealed, &rows::question_context(thread, no)).map_err(unreadable)?;
    serde_json::from_slice(&plain).map_err(unreadable)
}

#[cfg(test)]
mod tests {
    use rusqlite::Connection;

    use super::*;

    /// However many there are, a page is read where it begins and nothing is sorted.
    #[test]
    fn a_page_costs_what_it_shows() {
        let conn = Connection::open_in_memory().unwrap();
        conn.execute_batch(include_str!("schema_1.sql")).unwrap();
        let table = [
            (CALLS, "calls_open ((invoke_at,thread,id)>"),
            (SUBSCRIPTIONS, "calls_subscribed ((since,thread,id)>"),
            (TIMERS, "calls_until ((until,thread,id)>"),
        ];
        for (sql, index) in table {
            let mut statement = conn.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
            let steps = statement.raw_query().mapped(|row| row.get::<_, String>(3));
            let plan = steps.map(Result::unwrap).collect::<Vec<_>>().join("\n");
            assert!(plan.contains(index), "{plan}");
            assert!(!plan.contains("TEMP B-TREE") && !plan.contains("SCAN c"), "{plan}");
        }
    }

    #[test]
    fn a_place_is_read_as_it_is_written() {
        for text in ["-.0.", "-.3.call_1", "1700000000000.12.a.b.c", "5.1.ü x"] {
            assert_eq!(text.parse::<Place>().unwrap().to_string(), text);
        }
        for text in ["", "1", "1.2", "x.1.c", "1.x.c", ".1.c", "--.1.c"] {
            assert!(text.parse::<Place>().is_err(), "{text}");
        }
        assert_eq!(Place::default().to_string(), "-.0.");
    }
}
