//! What a model sees of a history: the last summary, and what that does not cover. The rest is not even read.

use std::collections::HashSet;
use std::sync::Arc;

use rap_agent::prompt::seen;
use rap_agent::{Arguments, Entry, Item, Seq};
use rap_protocol::CallId;
use rusqlite::{Connection, OptionalExtension, params};

use super::read::{Page, complete, history, pieces};
use super::thread::{Thread, ThreadNo};
use super::{Error, Store};

impl Store {
    /// What a model sees of a thread up to an entry, with what the thread inherits.
    pub(crate) async fn seen(&self, thread: Arc<Thread>, up_to: Seq) -> Result<Vec<Entry>, Error> {
        self.read(move |conn| {
            let pieces = pieces(conn, &thread, up_to)?;
            let covered = covered(conn, &pieces)?;
            let mut entries = history(conn, &thread, covered, up_to, Page::rows(usize::MAX))?;
            if covered > 0 {
                let line: Vec<ThreadNo> = pieces.into_iter().map(|(no, ..)| no).collect();
                recall(conn, &line, &mut entries)?;
            }
            Ok(seen(entries))
        })
        .await
    }
}

/// What the last summary among the pieces of a history covers.
fn covered(conn: &Connection, pieces: &[(ThreadNo, Seq, Seq)]) -> rusqlite::Result<Seq> {
    let mut statement = conn.prepare_cached(
        "SELECT covers FROM summaries WHERE thread = ?1 AND seq <= ?2 ORDER BY seq DESC LIMIT 1",
    )?;
    for (no, _, to) in pieces.iter().rev() {
        let covers = statement.query_row(params![no, to.cast_signed()], |row| row.get::<_, i64>(0));
        if let Some(covers) = covers.optional()? {
            return Ok(covers.unsigned_abs());
        }
    }
    Ok(0)
}

/// Gives synthetic calls the arguments of originals that are not among the entries any more.
fn recall(conn: &Connection, line: &[ThreadNo], entries: &mut [(Seq, Entry)]) -> rusqlite::Result<()> {
    let mut made: HashSet<CallId> = HashSet::new();
    for (_, entry) in entries {
        let Item::Assistant { calls, .. } = &mut entry.item else { continue };
        for call in calls {
            match &call.arguments {
                Arguments::Echo { of, .. } if !made.contains(of) => {
                    complete(conn, line, &mut call.arguments)?;
                }
                _ => {}
            }
            made.insert(call.id.clone());
        }
    }
    Ok(())
}
