//! Histories: what people and models see of a thread. A child's history begins with what it inherits.

use std::collections::{BTreeSet, HashMap, HashSet};

use rap_agent::prompt::seen;
use rap_agent::{Arguments, Cause, Entry, ForkPoint, ForkSearch, Item, Seq, Speaker};
use rap_protocol::{CallId, ThreadId, Timestamp};
use rusqlite::{Connection, OptionalExtension, Row, params};

use super::facts;
use super::heads::{self, THREAD_COLUMNS, thread_id, unreadable};
use super::writes::entry_key;
use crate::store::{HistoryPage, Loaded, Thread, ThreadKey, ThreadRow};

/// The columns of a thread for a listing.
pub(super) fn thread_rows() -> String {
    format!(
        "SELECT {THREAD_COLUMNS}, p.id, r.id, t.updated_at, s.id FROM threads t \
         LEFT JOIN threads p ON p.no = t.parent JOIN threads r ON r.no = t.root \
         LEFT JOIN threads s ON s.no = t.source AND t.parent IS NULL"
    )
}

pub(super) fn thread_row(row: &Row<'_>) -> rusqlite::Result<ThreadRow> {
    let Loaded { thread, head, .. } = heads::loaded(row)?;
    let (parent, source): (Option<String>, Option<String>) = (row.get(14)?, row.get(17)?);
    Ok(ThreadRow {
        thread,
        parent_id: parent.map(ThreadId::new).transpose().map_err(unreadable)?,
        root_id: thread_id(row, 15)?,
        forked_from: source.map(ThreadId::new).transpose().map_err(unreadable)?,
        head,
        updated_at: Timestamp(row.get(16)?),
    })
}

pub(super) fn thread(conn: &Connection, id: &ThreadId) -> rusqlite::Result<Option<ThreadRow>> {
    let sql = format!("{} WHERE t.id = ?1", thread_rows());
    conn.prepare_cached(&sql)?.query_row([id.as_str()], thread_row).optional()
}

/// A part of a history in which synthetic calls show the arguments of their original.
pub(super) fn for_people(
    conn: &Connection,
    thread: &Thread,
    page: HistoryPage,
) -> rusqlite::Result<Vec<(Seq, Entry)>> {
    let mut entries = read(conn, thread, page)?;
    let threads: Vec<ThreadKey> =
        pieces(conn, thread, page.up_to)?.into_iter().map(|(key, ..)| key).collect();
    for (_, entry) in &mut entries {
        if let Item::Assistant { calls, .. } = &mut entry.item {
            calls.iter_mut().try_for_each(|call| complete(conn, &threads, &mut call.arguments))?;
        }
    }
    Ok(entries)
}

/// The last summary, and what it does not cover. What it covers is not even read.
pub(super) fn for_prompt(conn: &Connection, thread: &Thread, up_to: Seq) -> rusqlite::Result<Vec<Entry>> {
    let pieces = pieces(conn, thread, up_to)?;
    let covered = covered(conn, &pieces)?;
    let mut entries = read(conn, thread, all(covered, up_to))?;
    if covered > 0 {
        let threads: Vec<ThreadKey> = pieces.into_iter().map(|(key, ..)| key).collect();
        recall(conn, &threads, &mut entries)?;
    }
    Ok(seen(entries))
}

/// All entries behind one and up to another.
fn all(after: Seq, up_to: Seq) -> HistoryPage {
    HistoryPage { after, up_to, rows: usize::MAX, bytes: usize::MAX }
}

pub(super) fn since_user(conn: &Connection, thread: &Thread, up_to: Seq) -> rusqlite::Result<Vec<Entry>> {
    let from = last_user(conn, thread, up_to)?;
    let entries = read(conn, thread, all(from.saturating_sub(1), up_to))?;
    Ok(entries.into_iter().map(|(_, entry)| entry).collect())
}

pub(super) fn displays(
    conn: &Connection,
    thread: &Thread,
    entries: Vec<Seq>,
) -> rusqlite::Result<HashMap<CallId, String>> {
    let mut displays = HashMap::new();
    for seq in entries.into_iter().collect::<BTreeSet<Seq>>() {
        for (_, entry) in read(conn, thread, all(seq - 1, seq))? {
            let Item::Assistant { calls, .. } = entry.item else { continue };
            displays.extend(calls.into_iter().filter_map(|call| Some((call.id, call.display?))));
        }
    }
    Ok(displays)
}

/// The cause of a thread, or of the thread that it descends from: work for an event gives no other rights.
pub(super) fn cause(conn: &Connection, thread: ThreadKey) -> rusqlite::Result<Cause> {
    let mut next = Some(thread);
    while let Some(key) = next {
        let Some(Loaded { thread, head, .. }) = heads::load(conn, key)? else { break };
        if let Some(cause) = head.origin().cause() {
            return Ok(cause);
        }
        next = thread.parent;
    }
    Ok(Cause::Client)
}

/// The pieces of a history: each thread that it inherits from, and which of its entries it has.
fn pieces(conn: &Connection, thread: &Thread, up_to: Seq) -> rusqlite::Result<Vec<(ThreadKey, Seq, Seq)>> {
    let mut pieces = vec![(thread.key, thread.inherits, up_to)];
    let (mut source, mut end) = (thread.source, thread.inherits.min(up_to));
    while let Some(no) = source {
        let Some(Loaded { thread, .. }) = heads::load(conn, no)? else { break };
        pieces.push((no, thread.inherits, end));
        source = thread.source;
        end = end.min(thread.inherits);
    }
    pieces.reverse();
    Ok(pieces)
}

fn read(conn: &Connection, thread: &Thread, page: HistoryPage) -> rusqlite::Result<Vec<(Seq, Entry)>> {
    let HistoryPage { after, up_to, .. } = page;
    let mut entries = Vec::new();
    let mut bytes = 0;
    let mut statement = conn.prepare_cached(
        "SELECT key & 4294967295, body FROM entries WHERE key > ?1 AND key <= ?2 ORDER BY key LIMIT ?3",
    )?;
    for (no, from, to) in pieces(conn, thread, up_to)? {
        let from = from.max(after);
        if from >= to {
            continue;
        }
        let left = i64::try_from(page.rows - entries.len()).unwrap_or(i64::MAX);
        let mut found = statement.query(params![entry_key(no, from), entry_key(no, to), left])?;
        while let Some(row) = found.next()? {
            let body = row.get_ref(1)?.as_str()?;
            bytes += body.len();
            let entry: Entry = serde_json::from_str(body).map_err(unreadable)?;
            entries.push((row.get::<_, i64>(0)?.unsigned_abs(), entry));
            if bytes >= page.bytes {
                return Ok(entries);
            }
        }
        if entries.len() >= page.rows {
            break;
        }
    }
    Ok(entries)
}

/// Gives a synthetic call the arguments of its original, which one of these threads made.
fn complete(conn: &Connection, threads: &[ThreadKey], arguments: &mut Arguments) -> rusqlite::Result<()> {
    if let Arguments::Echo { of, arguments: arguments @ None, .. } = arguments {
        for no in threads.iter().rev() {
            if let Some(past) = facts::past_call(conn, *no, of)? {
                *arguments = Some(facts::arguments_of(conn, *no, past.seq, of)?);
                break;
            }
        }
    }
    Ok(())
}

/// The nearest point at or before an entry from which a thread can be forked.
pub(super) fn fork_point(conn: &Connection, thread: &Thread, at: Seq) -> rusqlite::Result<ForkPoint> {
    let mut search = ForkSearch::new(at);
    let mut statement = conn.prepare_cached(
        "SELECT key & 4294967295, body FROM entries WHERE key > ?1 AND key <= ?2 ORDER BY key DESC",
    )?;
    for (no, from, to) in pieces(conn, thread, at)?.into_iter().rev() {
        let mut found = statement.query(params![entry_key(no, from), entry_key(no, to)])?;
        while let Some(row) = found.next()? {
            let entry: Entry = serde_json::from_str(row.get_ref(1)?.as_str()?).map_err(unreadable)?;
            if let Some(point) = search.look(row.get::<_, i64>(0)?.unsigned_abs(), &entry.item) {
                return Ok(point);
            }
        }
    }
    Ok(search.end())
}

/// The last message of a user, searched from the end.
fn last_user(conn: &Connection, thread: &Thread, up_to: Seq) -> rusqlite::Result<Seq> {
    let mut statement = conn.prepare_cached(
        "SELECT key & 4294967295, body FROM entries WHERE key > ?1 AND key <= ?2 ORDER BY key DESC",
    )?;
    for (no, from, to) in pieces(conn, thread, up_to)?.into_iter().rev() {
        let mut found = statement.query(params![entry_key(no, from), entry_key(no, to)])?;
        while let Some(row) = found.next()? {
            let entry: Entry = serde_json::from_str(row.get_ref(1)?.as_str()?).map_err(unreadable)?;
            if let Item::User { from: Speaker::User, .. } = entry.item {
                return Ok(row.get::<_, i64>(0)?.unsigned_abs());
            }
        }
    }
    Ok(0)
}

/// What the last summary among the pieces of a history covers.
fn covered(conn: &Connection, pieces: &[(ThreadKey, Seq, Seq)]) -> rusqlite::Result<Seq> {
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
fn recall(conn: &Connection, threads: &[ThreadKey], entries: &mut [(Seq, Entry)]) -> rusqlite::Result<()> {
    let mut made: HashSet<CallId> = HashSet::new();
    for (_, entry) in entries {
        let Item::Assistant { calls, .. } = &mut entry.item else { continue };
        for call in calls {
            match &call.arguments {
                Arguments::Echo { of, .. } if !made.contains(of) => {
                    complete(conn, threads, &mut call.arguments)?;
                }
                _ => {}
            }
            made.insert(call.id.clone());
        }
    }
    Ok(())
}
