//! Reads histories for people and for prompts. A child's history begins with the entries that it inherits.

use std::collections::{BTreeSet, HashMap, HashSet};

use rap_agent::prompt::{PromptEntries, visible_entries};
use rap_agent::{Arguments, Cause, Entry, ForkPoint, ForkSearch, Item, Seq, Speaker};
use rap_protocol::{CallId, ThreadId, Timestamp, UserId};
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde_json::{Map, Value};

use super::deletion::NOT_DELETED;
use super::facts;
use super::heads::{self, THREAD_COLUMNS, unreadable};
use super::writes::entry_key;
use crate::store::damage::{self, Damage, Sequence, reason};
use crate::store::{HistoryPage, Loaded, Thread, ThreadKey, ThreadRow, Visibility};

/// Returns the query for [`thread_row`], without a condition.
pub(super) fn thread_rows() -> String {
    format!(
        "SELECT {THREAD_COLUMNS}, p.id, r.id, t.updated_at, s.id, d.why FROM threads t \
         LEFT JOIN threads p ON p.no = t.parent LEFT JOIN threads r ON r.no = t.root \
         LEFT JOIN threads s ON s.no = t.source AND t.parent IS NULL \
         LEFT JOIN damaged d ON d.thread = t.no AND d.version = t.version"
    )
}

pub(super) fn thread_row(row: &Row<'_>) -> rusqlite::Result<ThreadRow> {
    let (Loaded { thread, mut head, .. }, damage) = heads::loaded_or_damaged(row)?;
    if let Some(why) = damage.map_or_else(|| row.get(19), |damage| Ok(Some(reason(&damage))))? {
        head.show_damage(why);
    }
    let (parent, source): (Option<String>, Option<String>) = (row.get(15)?, row.get(18)?);
    let root: Option<String> = row.get(16)?;
    Ok(ThreadRow {
        parent_id: parent.map(ThreadId::new).transpose().map_err(unreadable)?,
        // If the row of the root is missing, its id is still among the ancestors.
        root_id: match root {
            Some(root) => ThreadId::new(root).map_err(unreadable)?,
            None => thread.ancestors.first().unwrap_or(&thread.id).clone(),
        },
        thread,
        forked_from: source.map(ThreadId::new).transpose().map_err(unreadable)?,
        head,
        updated_at: Timestamp(row.get(17)?),
    })
}

pub(super) fn thread(
    conn: &Connection,
    id: &ThreadId,
    visible: &Visibility,
) -> rusqlite::Result<Option<ThreadRow>> {
    let sql =
        format!("{} WHERE t.id = ?1 AND (?2 IS NULL OR t.user_id = ?2) AND {NOT_DELETED}", thread_rows());
    let user = visible.user().map(UserId::as_str);
    conn.prepare_cached(&sql)?.query_row(params![id.as_str(), user], thread_row).optional()
}

/// Returns a page of a history in which synthetic calls show the arguments of the original call.
pub(super) fn for_people(
    conn: &Connection,
    thread: &Thread,
    page: HistoryPage,
) -> rusqlite::Result<Vec<(Seq, Entry)>> {
    Ok(damage::for_people(page.after, read_filled(conn, thread, page)?))
}

/// Returns a page of a history as a thread stores it that inherits it no longer: synthetic calls have the arguments of the
/// original call, and what is damaged stays as it is.
pub(super) fn for_copy(
    conn: &Connection,
    thread: &Thread,
    page: HistoryPage,
) -> rusqlite::Result<Vec<(Seq, String)>> {
    Ok(damage::as_stored(read_filled(conn, thread, page)?))
}

/// Reads a page, and fills in the arguments of synthetic calls, as far as those of the original call can be read.
fn read_filled(
    conn: &Connection,
    thread: &Thread,
    page: HistoryPage,
) -> rusqlite::Result<Vec<(Seq, Result<Entry, Damage>)>> {
    let mut entries = read(conn, thread, page)?;
    let threads: Vec<ThreadKey> =
        segments(conn, thread, page.up_to)?.into_iter().map(|(key, ..)| key).collect();
    let (mut filled, mut bytes) = (FilledArguments::default(), 0);
    for position in 0..entries.len() {
        let Ok(Entry { item: Item::Assistant { calls, .. }, .. }) = &mut entries[position].1 else {
            continue;
        };
        for call in calls {
            match filled.fill(conn, &threads, &mut call.arguments) {
                Err(error) if heads::is_row_error(&error) => {}
                size => bytes += size?,
            }
        }
        // Many events of one subscription repeat its arguments.
        if bytes >= page.bytes {
            entries.truncate(position + 1);
            break;
        }
    }
    Ok(entries)
}

/// Returns the last summary and the entries that it does not cover. Covered entries are not read.
pub(super) fn for_prompt(conn: &Connection, thread: &Thread, up_to: Seq) -> rusqlite::Result<Vec<Entry>> {
    let segments = segments(conn, thread, up_to)?;
    let covered = covered(conn, &segments)?;
    let mut entries = read_for_prompt(conn, thread, range(covered, up_to))?;
    if covered > 0 {
        let threads: Vec<ThreadKey> = segments.into_iter().map(|(key, ..)| key).collect();
        restore_arguments(conn, &threads, &mut entries)?;
    }
    Ok(visible_entries(entries))
}

/// Selects all entries after one and up to another.
fn range(after: Seq, up_to: Seq) -> HistoryPage {
    HistoryPage { after, up_to, rows: usize::MAX, bytes: usize::MAX }
}

pub(super) fn since_user(conn: &Connection, thread: &Thread, up_to: Seq) -> rusqlite::Result<Vec<Entry>> {
    let from = last_user(conn, thread, up_to)?;
    let entries = read_for_prompt(conn, thread, range(from.saturating_sub(1), up_to))?;
    Ok(entries.into_iter().map(|(_, entry)| entry).collect())
}

pub(super) fn displays(
    conn: &Connection,
    thread: &Thread,
    entries: Vec<Seq>,
) -> rusqlite::Result<HashMap<CallId, String>> {
    let mut displays = HashMap::new();
    for seq in entries.into_iter().collect::<BTreeSet<Seq>>() {
        for (_, entry) in read(conn, thread, range(seq - 1, seq))? {
            let Ok(Entry { item: Item::Assistant { calls, .. }, .. }) = entry else { continue };
            displays.extend(calls.into_iter().filter_map(|call| Some((call.id, call.display?))));
        }
    }
    Ok(displays)
}

/// Returns the cause of a thread, or of its nearest ancestor that has one. So a thread that an event child starts has
/// no more permissions than the event child itself.
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

/// Returns the segments of a history, oldest first: each is a thread and the range of its entries, from the first
/// number (exclusive) to the second (inclusive). They are read from the database, because a fork no longer inherits when its
/// source has been deleted.
fn segments(conn: &Connection, thread: &Thread, up_to: Seq) -> rusqlite::Result<Vec<(ThreadKey, Seq, Seq)>> {
    let mut statement = conn.prepare_cached("SELECT source, born_at FROM threads WHERE no = ?1")?;
    let mut segments = Vec::new();
    let (mut next, mut end) = (Some(thread.key), up_to);
    while let Some(key) = next {
        // The head of a source is not needed. It may be damaged.
        let found = statement.query_row([key], |row| Ok((row.get(0)?, row.get::<_, i64>(1)?.unsigned_abs())));
        let Some((source, inherits)) = found.optional()? else { break };
        segments.push((key, inherits, end));
        (next, end) = (source, end.min(inherits));
    }
    segments.reverse();
    Ok(segments)
}

/// Copies the positions of the summaries that a fork inherits.
pub(super) fn copy_summaries(conn: &Connection, fork: &Thread) -> rusqlite::Result<()> {
    let mut statement = conn.prepare_cached(
        "INSERT OR IGNORE INTO summaries (thread, seq, covers) \
         SELECT ?1, seq, covers FROM summaries WHERE thread = ?2 AND seq > ?3 AND seq <= ?4",
    )?;
    for (thread, from, to) in segments(conn, fork, fork.inherits)? {
        if thread != fork.key {
            statement.execute(params![fork.key, thread, from.cast_signed(), to.cast_signed()])?;
        }
    }
    Ok(())
}

/// Reads a page. An entry that cannot be read does not hide the others.
fn read(
    conn: &Connection,
    thread: &Thread,
    page: HistoryPage,
) -> rusqlite::Result<Vec<(Seq, Result<Entry, Damage>)>> {
    let mut entries = Vec::new();
    read_each(conn, thread, page, |seq, entry| {
        entries.push((seq, entry));
        Ok(())
    })?;
    Ok(entries)
}

/// Keeps no more of the entries in memory than a prompt shows. Fails if an entry is missing or cannot be read.
fn read_for_prompt(
    conn: &Connection,
    thread: &Thread,
    page: HistoryPage,
) -> rusqlite::Result<Vec<(Seq, Entry)>> {
    let (mut entries, mut sequence) = (PromptEntries::default(), Sequence::after(page.after));
    read_each(conn, thread, page, |seq, entry| {
        sequence.take(seq).map_err(unreadable)?;
        entries.push(seq, entry.map_err(unreadable)?);
        Ok(())
    })?;
    sequence.end(page.up_to).map_err(unreadable)?;
    Ok(entries.into_entries())
}

fn read_each(
    conn: &Connection,
    thread: &Thread,
    page: HistoryPage,
    mut take: impl FnMut(Seq, Result<Entry, Damage>) -> rusqlite::Result<()>,
) -> rusqlite::Result<()> {
    let sql = "SELECT key & 4294967295, body FROM entries WHERE key > ?1 AND key <= ?2 ORDER BY key LIMIT ?3";
    each_row(conn, thread, page, sql, |row| {
        let (seq, body) = (row.get::<_, i64>(0)?.unsigned_abs(), row.get_ref(1)?.as_str()?);
        take(seq, Damage::check_entry(seq, body))?;
        Ok(body.len())
    })
}

/// Returns the size of the entries of a page, without reading them.
pub(super) fn size(conn: &Connection, thread: &Thread, page: HistoryPage) -> rusqlite::Result<usize> {
    let sql = "SELECT octet_length(body) FROM entries WHERE key > ?1 AND key <= ?2 ORDER BY key LIMIT ?3";
    let mut bytes = 0;
    each_row(conn, thread, page, sql, |row| {
        let size = usize::try_from(row.get::<_, i64>(0)?).unwrap_or(usize::MAX);
        bytes += size;
        Ok(size)
    })?;
    Ok(bytes)
}

/// Visits the rows of a page. `take` returns the size of the entry.
fn each_row(
    conn: &Connection,
    thread: &Thread,
    page: HistoryPage,
    sql: &str,
    mut take: impl FnMut(&Row<'_>) -> rusqlite::Result<usize>,
) -> rusqlite::Result<()> {
    let HistoryPage { after, up_to, .. } = page;
    let (mut count, mut bytes) = (0, 0);
    let mut statement = conn.prepare_cached(sql)?;
    for (number, from, to) in segments(conn, thread, up_to)? {
        let from = from.max(after);
        if from >= to {
            continue;
        }
        let left = i64::try_from(page.rows - count).unwrap_or(i64::MAX);
        let mut found = statement.query(params![entry_key(number, from), entry_key(number, to), left])?;
        while let Some(row) = found.next()? {
            bytes += take(row)?;
            count += 1;
            if bytes >= page.bytes {
                return Ok(());
            }
        }
        if count >= page.rows {
            break;
        }
    }
    Ok(())
}

/// Arguments of a call and their size in bytes.
type SizedArguments = (Map<String, Value>, usize);

/// Arguments of original calls. `None` for a call that is not found.
#[derive(Default)]
struct FilledArguments(HashMap<CallId, Option<SizedArguments>>);

impl FilledArguments {
    /// Fills in the arguments of a synthetic call from its original call, which one of these threads made. Returns
    /// their size in bytes.
    fn fill(
        &mut self,
        conn: &Connection,
        threads: &[ThreadKey],
        arguments: &mut Arguments,
    ) -> rusqlite::Result<usize> {
        let Arguments::Synthetic { of, arguments: arguments @ None, .. } = arguments else { return Ok(0) };
        if !self.0.contains_key(of) {
            self.0.insert(of.clone(), original_arguments(conn, threads, of)?);
        }
        let Some((original, bytes)) = self.0.get(of).and_then(Option::as_ref) else { return Ok(0) };
        *arguments = Some(original.clone());
        Ok(*bytes)
    }
}

fn original_arguments(
    conn: &Connection,
    threads: &[ThreadKey],
    call: &CallId,
) -> rusqlite::Result<Option<SizedArguments>> {
    for number in threads.iter().rev() {
        if let Some(past) = facts::past_call(conn, *number, call)? {
            let arguments = facts::arguments_of(conn, *number, past.seq, call)?;
            let bytes = serde_json::to_string(&arguments).map_or(0, |text| text.len());
            return Ok(Some((arguments, bytes)));
        }
    }
    Ok(None)
}

/// Returns the nearest point at or before an entry at which a thread can be forked.
pub(super) fn fork_point(conn: &Connection, thread: &Thread, at: Seq) -> rusqlite::Result<ForkPoint> {
    let mut search = ForkSearch::new(at);
    let mut statement = conn.prepare_cached(
        "SELECT key & 4294967295, body FROM entries WHERE key > ?1 AND key <= ?2 ORDER BY key DESC",
    )?;
    for (number, from, to) in segments(conn, thread, at)?.into_iter().rev() {
        let mut found = statement.query(params![entry_key(number, from), entry_key(number, to)])?;
        while let Some(row) = found.next()? {
            let entry: Entry = serde_json::from_str(row.get_ref(1)?.as_str()?).map_err(unreadable)?;
            if let Some(point) = search.visit(row.get::<_, i64>(0)?.unsigned_abs(), &entry.item) {
                return Ok(point);
            }
        }
    }
    Ok(search.finish())
}

/// Returns the last user message, or 0 if there is none. Entries are read backwards.
fn last_user(conn: &Connection, thread: &Thread, up_to: Seq) -> rusqlite::Result<Seq> {
    let mut statement = conn.prepare_cached(
        "SELECT key & 4294967295, body FROM entries WHERE key > ?1 AND key <= ?2 ORDER BY key DESC",
    )?;
    for (number, from, to) in segments(conn, thread, up_to)?.into_iter().rev() {
        let mut found = statement.query(params![entry_key(number, from), entry_key(number, to)])?;
        while let Some(row) = found.next()? {
            let entry: Entry = serde_json::from_str(row.get_ref(1)?.as_str()?).map_err(unreadable)?;
            if let Item::User { from: Speaker::User, .. } = entry.item {
                return Ok(row.get::<_, i64>(0)?.unsigned_abs());
            }
        }
    }
    Ok(0)
}

/// Returns the last entry that the last summary of a history covers, or 0 if there is no summary.
fn covered(conn: &Connection, segments: &[(ThreadKey, Seq, Seq)]) -> rusqlite::Result<Seq> {
    let mut statement = conn.prepare_cached(
        "SELECT covers FROM summaries WHERE thread = ?1 AND seq <= ?2 ORDER BY seq DESC LIMIT 1",
    )?;
    for (number, _, to) in segments.iter().rev() {
        let covers = statement.query_row(params![number, to.cast_signed()], |row| row.get::<_, i64>(0));
        if let Some(covers) = covers.optional()? {
            return Ok(covers.unsigned_abs());
        }
    }
    Ok(0)
}

/// Fills in the arguments of synthetic calls whose original calls are not among the entries, because a summary covers
/// them.
fn restore_arguments(
    conn: &Connection,
    threads: &[ThreadKey],
    entries: &mut [(Seq, Entry)],
) -> rusqlite::Result<()> {
    let mut made: HashSet<CallId> = HashSet::new();
    let mut filled = FilledArguments::default();
    for (_, entry) in entries {
        let Item::Assistant { calls, .. } = &mut entry.item else { continue };
        for call in calls {
            match &call.arguments {
                Arguments::Synthetic { of, .. } if !made.contains(of) => {
                    filled.fill(conn, threads, &mut call.arguments)?;
                }
                _ => {}
            }
            made.insert(call.id.clone());
        }
    }
    Ok(())
}
