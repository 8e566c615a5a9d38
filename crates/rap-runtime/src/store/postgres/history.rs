//! Reads histories for people and for prompts. A child's history begins with the entries that it inherits.

use std::collections::{BTreeSet, HashMap, HashSet};

use rap_agent::prompt::{PromptEntries, visible_entries};
use rap_agent::{Arguments, Cause, Entry, ForkPoint, ForkSearch, Item, Seq, Speaker};
use rap_io::hashing::in_place;
use rap_protocol::{CallId, ThreadId};
use serde_json::{Map, Value};
use tokio_postgres::Row;

use super::connect::Transaction;
use super::facts::{call_of, past_call};
use super::heads::{self, THREAD_COLUMNS, number, thread_key, timestamp};
use super::statement::{Failure, Statement, get, unreadable};
use crate::store::damage::{self, Damage, Sequence, reason};
use crate::store::stored::call_arguments;
use crate::store::{HistoryPage, Loaded, Thread, ThreadKey, ThreadRow};

/// Number and size of the entries that are read at once when a history is searched backwards.
const BACKWARDS: (i64, i64) = (64, 1024 * 1024);

/// The threads whose histories a thread inherits, nearest first.
const SOURCES: &str = "WITH RECURSIVE chain AS (\
     SELECT no, source, inherits, 0 AS depth FROM threads WHERE no = $1 \
     UNION ALL SELECT t.no, t.source, t.inherits, depth + 1 FROM chain JOIN threads t ON t.no = chain.source) \
     SELECT no, inherits FROM chain ORDER BY depth";
/// Number and size of the entries that are read at once for a prompt.
const PROMPT_PAGE: (usize, usize) = (1000, 1024 * 1024);
/// The entries of segments of a history, in order. The last parameters bound the rows and the bytes before a row.
const ENTRIES: &str = "SELECT seq, body FROM (\
     SELECT e.seq, e.body, sum(octet_length(e.body)) OVER (ORDER BY e.seq) - octet_length(e.body) AS before \
     FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS s(thread, first, last), \
     LATERAL (SELECT seq, body FROM entries WHERE thread = s.thread AND seq > s.first AND seq <= s.last \
     ORDER BY seq LIMIT $4) AS e ORDER BY e.seq LIMIT $4) AS page WHERE before < $5 ORDER BY seq";
const ENTRY_SIZES: &str = "SELECT coalesce(sum(size), 0)::bigint FROM (\
     SELECT e.size, sum(e.size) OVER (ORDER BY e.seq) - e.size AS before \
     FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS s(thread, first, last), \
     LATERAL (SELECT seq, octet_length(body) AS size FROM entries \
     WHERE thread = s.thread AND seq > s.first AND seq <= s.last \
     ORDER BY seq LIMIT $4) AS e ORDER BY e.seq LIMIT $4) AS page WHERE before < $5";
const ENTRIES_BACKWARDS: &str = "SELECT seq, body FROM (\
     SELECT e.seq, e.body, sum(octet_length(e.body)) OVER (ORDER BY e.seq DESC) - octet_length(e.body) AS before \
     FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS s(thread, first, last), \
     LATERAL (SELECT seq, body FROM entries WHERE thread = s.thread AND seq > s.first AND seq <= least(s.last, $4) \
     ORDER BY seq DESC LIMIT $5) AS e ORDER BY e.seq DESC LIMIT $5) AS page WHERE before < $6 ORDER BY seq DESC";
const COVERED: &str = "SELECT s.covers FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS w(thread, last, at), \
     LATERAL (SELECT covers FROM summaries WHERE thread = w.thread AND seq <= w.last ORDER BY seq DESC LIMIT 1) AS s \
     ORDER BY w.at DESC LIMIT 1";

/// Returns the query for [`thread_row`], without a condition.
pub(super) fn thread_rows() -> String {
    format!(
        "SELECT {THREAD_COLUMNS}, p.id, r.id, t.updated_at, s.id, d.why FROM threads t \
         LEFT JOIN threads p ON p.no = t.parent LEFT JOIN threads r ON r.no = t.session \
         LEFT JOIN threads s ON s.no = t.source AND t.parent IS NULL \
         LEFT JOIN damaged d ON d.thread = t.no AND d.version = t.version"
    )
}

pub(super) fn thread_row(row: &Row) -> Result<ThreadRow, Failure> {
    let (Loaded { thread, mut head, .. }, damage) = heads::loaded_or_damaged(row)?;
    if let Some(why) = damage.map_or_else(|| get(row, 19), |damage| Ok(Some(reason(&damage))))? {
        head.show_damage(why);
    }
    let (parent, source): (Option<String>, Option<String>) = (get(row, 15)?, get(row, 18)?);
    let root: Option<String> = get(row, 16)?;
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
        updated_at: timestamp(row, 17)?,
    })
}

/// The segments of a history, oldest first: each is a thread and the range of its entries, from the first number
/// (exclusive) to the second (inclusive).
struct Segments(Vec<(ThreadKey, Seq, Seq)>);

/// Returns the statement that copies the positions of the summaries that a fork inherits.
pub(super) async fn copy_summaries(tx: &mut Transaction, fork: &Thread) -> Result<Statement, Failure> {
    let sql = "INSERT INTO summaries (session, thread, seq, covers) SELECT $4, $5, s.seq, s.covers \
               FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS w(thread, first, last) \
               JOIN summaries s ON s.thread = w.thread AND s.seq > w.first AND s.seq <= w.last ON CONFLICT DO NOTHING";
    let segments = Segments::of(tx, fork, fork.inherits).await?;
    Ok(segments.add_to(Statement::new(sql), 0).session(fork.session).thread(fork.key))
}

impl Segments {
    async fn of(tx: &mut Transaction, thread: &Thread, up_to: Seq) -> Result<Segments, Failure> {
        if thread.source.is_none() {
            return Ok(Segments(vec![(thread.key, thread.inherits, up_to)]));
        }
        // Its own row is read as well, because a fork no longer inherits when its source has been deleted.
        let (mut segments, mut end) = (Vec::new(), up_to);
        for row in tx.query(Statement::new(SOURCES).thread(thread.key)).await? {
            let (key, inherits) = (thread_key(&row, 0)?, number(&row, 1)?);
            segments.push((key, inherits, end));
            end = end.min(inherits);
        }
        segments.reverse();
        Ok(Segments(segments))
    }

    fn threads(&self) -> Vec<ThreadKey> {
        self.0.iter().map(|(thread, ..)| *thread).collect()
    }

    /// Adds the segments to a statement, without the entries up to `after`.
    fn add_to(&self, statement: Statement, after: Seq) -> Statement {
        let segments = self.0.iter().map(|(thread, first, last)| (thread, (*first).max(after), last));
        let segments: Vec<_> = segments.filter(|(_, first, last)| first < last).collect();
        statement
            .with(segments.iter().map(|(thread, ..)| thread.number()).collect::<Vec<i64>>())
            .with(segments.iter().map(|(_, first, _)| first.cast_signed()).collect::<Vec<i64>>())
            .with(segments.iter().map(|(.., last)| last.cast_signed()).collect::<Vec<i64>>())
    }

    /// Reads a page. An entry that cannot be read does not hide the others.
    async fn read(
        &self,
        tx: &mut Transaction,
        page: HistoryPage,
    ) -> Result<Vec<(Seq, Result<Entry, Damage>)>, Failure> {
        tx.query(self.of_page(ENTRIES, page)).await?.iter().map(entry_or_damage).collect()
    }

    fn of_page(&self, sql: &'static str, page: HistoryPage) -> Statement {
        let most = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        self.add_to(Statement::new(sql), page.after).with(most(page.rows)).with(most(page.bytes))
    }

    /// Reads entries page by page, and keeps no more of them in memory than a prompt shows. Fails if an entry is missing
    /// or cannot be read.
    async fn read_for_prompt(
        &self,
        tx: &mut Transaction,
        mut after: Seq,
        up_to: Seq,
    ) -> Result<Vec<(Seq, Entry)>, Failure> {
        let (mut shown, mut sequence) = (PromptEntries::default(), Sequence::after(after));
        let (rows, bytes) = PROMPT_PAGE;
        while after < up_to {
            let page = self.read(tx, HistoryPage { after, up_to, rows, bytes }).await?;
            let Some((last, _)) = page.last() else { break };
            after = *last;
            for (seq, entry) in page {
                sequence.take(seq).map_err(unreadable)?;
                shown.push(seq, entry.map_err(unreadable)?);
            }
        }
        sequence.end(up_to).map_err(unreadable)?;
        Ok(shown.into_entries())
    }

    /// Visits entries from the last one backwards, until `visit` returns something.
    async fn backwards<T>(
        &self,
        tx: &mut Transaction,
        mut visit: impl FnMut(Seq, &Item) -> Option<T>,
    ) -> Result<Option<T>, Failure> {
        let mut last = i64::MAX;
        loop {
            let statement = self.add_to(Statement::new(ENTRIES_BACKWARDS), 0);
            let rows = tx.query(statement.with(last).with(BACKWARDS.0).with(BACKWARDS.1)).await?;
            for row in &rows {
                let (seq, entry) = entry(row)?;
                if let Some(found) = visit(seq, &entry.item) {
                    return Ok(Some(found));
                }
                last = seq.cast_signed() - 1;
            }
            if rows.is_empty() {
                return Ok(None);
            }
        }
    }
}

fn entry(row: &Row) -> Result<(Seq, Entry), Failure> {
    let (seq, entry) = entry_or_damage(row)?;
    Ok((seq, entry.map_err(unreadable)?))
}

fn entry_or_damage(row: &Row) -> Result<(Seq, Result<Entry, Damage>), Failure> {
    let (seq, body): (_, &str) = (number(row, 0)?, get(row, 1)?);
    Ok((seq, in_place(body.len(), || Damage::check_entry(seq, body))))
}

/// Returns a page of a history in which synthetic calls show the arguments of the original call.
pub(super) async fn for_people(
    tx: &mut Transaction,
    thread: &Thread,
    page: HistoryPage,
) -> Result<Vec<(Seq, Entry)>, Failure> {
    Ok(damage::for_people(page.after, read_filled(tx, thread, page).await?))
}

/// Returns a page of a history as a thread stores it that inherits it no longer: synthetic calls have the arguments of the
/// original call, and what is damaged stays as it is.
pub(super) async fn for_copy(
    tx: &mut Transaction,
    thread: &Thread,
    page: HistoryPage,
) -> Result<Vec<(Seq, String)>, Failure> {
    Ok(damage::as_stored(read_filled(tx, thread, page).await?))
}

/// Reads a page, and fills in the arguments of synthetic calls, as far as those of the original call can be read.
async fn read_filled(
    tx: &mut Transaction,
    thread: &Thread,
    page: HistoryPage,
) -> Result<Vec<(Seq, Result<Entry, Damage>)>, Failure> {
    let segments = Segments::of(tx, thread, page.up_to).await?;
    let mut entries = segments.read(tx, page).await?;
    let threads = segments.threads();
    let (mut filled, mut bytes) = (FilledArguments::default(), 0);
    for position in 0..entries.len() {
        let Ok(Entry { item: Item::Assistant { calls, .. }, .. }) = &mut entries[position].1 else {
            continue;
        };
        for call in calls {
            match filled.fill(tx, &threads, &mut call.arguments).await {
                Err(Failure::Row(_)) => {}
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

/// Returns the size of the entries of a page, without reading them.
pub(super) async fn size(tx: &mut Transaction, thread: &Thread, page: HistoryPage) -> Result<usize, Failure> {
    let segments = Segments::of(tx, thread, page.up_to).await?;
    let sum = tx.query(segments.of_page(ENTRY_SIZES, page)).await?;
    let bytes = sum.first().map(|row| number(row, 0)).transpose()?.unwrap_or(0);
    Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// Returns the last summary and the entries that it does not cover. Covered entries are not read.
pub(super) async fn for_prompt(
    tx: &mut Transaction,
    thread: &Thread,
    up_to: Seq,
) -> Result<Vec<Entry>, Failure> {
    let segments = Segments::of(tx, thread, up_to).await?;
    let (threads, lasts): (Vec<i64>, Vec<i64>) =
        segments.0.iter().map(|(thread, _, last)| (thread.number(), last.cast_signed())).unzip();
    let covered = tx.query(Statement::new(COVERED).with(threads).with(lasts)).await?;
    let covered = covered.first().map(|row| number(row, 0)).transpose()?.unwrap_or(0);
    let mut entries = segments.read_for_prompt(tx, covered, up_to).await?;
    if covered > 0 {
        restore_arguments(tx, &segments.threads(), &mut entries).await?;
    }
    Ok(visible_entries(entries))
}

/// Selects all entries after one and up to another.
fn range(after: Seq, up_to: Seq) -> HistoryPage {
    HistoryPage { after, up_to, rows: usize::MAX, bytes: usize::MAX }
}

pub(super) async fn since_user(
    tx: &mut Transaction,
    thread: &Thread,
    up_to: Seq,
) -> Result<Vec<Entry>, Failure> {
    let segments = Segments::of(tx, thread, up_to).await?;
    let is_user = |seq, item: &Item| matches!(item, Item::User { from: Speaker::User, .. }).then_some(seq);
    let from = segments.backwards(tx, is_user).await?.unwrap_or(0);
    let entries = segments.read_for_prompt(tx, from.saturating_sub(1), up_to).await?;
    Ok(entries.into_iter().map(|(_, entry)| entry).collect())
}

pub(super) async fn displays(
    tx: &mut Transaction,
    thread: &Thread,
    entries: BTreeSet<Seq>,
) -> Result<HashMap<CallId, String>, Failure> {
    let mut displays = HashMap::new();
    let Some(last) = entries.last() else { return Ok(displays) };
    let segments = Segments::of(tx, thread, *last).await?;
    for seq in entries {
        for (_, entry) in segments.read(tx, HistoryPage { rows: 1, ..range(seq - 1, seq) }).await? {
            let Ok(Entry { item: Item::Assistant { calls, .. }, .. }) = entry else { continue };
            displays.extend(calls.into_iter().filter_map(|call| Some((call.id, call.display?))));
        }
    }
    Ok(displays)
}

/// Returns the cause of a thread, or of its nearest ancestor that has one. So a thread that an event child starts has
/// no more permissions than the event child itself.
pub(super) async fn cause(tx: &mut Transaction, thread: ThreadKey) -> Result<Cause, Failure> {
    let mut next = Some(thread);
    while let Some(key) = next {
        let Some(Loaded { thread, head, .. }) = heads::load(tx, key).await? else { break };
        if let Some(cause) = head.origin().cause() {
            return Ok(cause);
        }
        next = thread.parent;
    }
    Ok(Cause::Client)
}

/// Returns the nearest point at or before an entry at which a thread can be forked.
pub(super) async fn fork_point(tx: &mut Transaction, thread: &Thread, at: Seq) -> Result<ForkPoint, Failure> {
    let segments = Segments::of(tx, thread, at).await?;
    let mut search = ForkSearch::new(at);
    let point = segments.backwards(tx, |seq, item| search.visit(seq, item)).await?;
    Ok(point.unwrap_or_else(|| search.finish()))
}

/// Arguments of a call and their size in bytes.
type SizedArguments = (Map<String, Value>, usize);

/// Arguments of original calls. `None` for a call that is not found.
#[derive(Default)]
struct FilledArguments(HashMap<CallId, Option<SizedArguments>>);

impl FilledArguments {
    /// Fills in the arguments of a synthetic call from its original call, which one of these threads made. Returns
    /// their size in bytes.
    async fn fill(
        &mut self,
        tx: &mut Transaction,
        threads: &[ThreadKey],
        arguments: &mut Arguments,
    ) -> Result<usize, Failure> {
        let Arguments::Synthetic { of, arguments: arguments @ None, .. } = arguments else { return Ok(0) };
        if !self.0.contains_key(of) {
            self.0.insert(of.clone(), original_arguments(tx, threads, of).await?);
        }
        let Some((original, bytes)) = self.0.get(of).and_then(Option::as_ref) else { return Ok(0) };
        *arguments = Some(original.clone());
        Ok(*bytes)
    }
}

async fn original_arguments(
    tx: &mut Transaction,
    threads: &[ThreadKey],
    call: &CallId,
) -> Result<Option<SizedArguments>, Failure> {
    for thread in threads.iter().rev() {
        if let Some(row) = tx.query(call_of(*thread, call)).await?.first() {
            let arguments = arguments_of(tx, *thread, past_call(row)?.seq, call).await?;
            let bytes = serde_json::to_string(&arguments).map_or(0, |text| text.len());
            return Ok(Some((arguments, bytes)));
        }
    }
    Ok(None)
}

/// Returns the arguments of a call from the assistant entry that made it.
pub(super) async fn arguments_of(
    tx: &mut Transaction,
    thread: ThreadKey,
    seq: Seq,
    call: &CallId,
) -> Result<Map<String, Value>, Failure> {
    let sql = "SELECT seq, body FROM entries WHERE thread = $1 AND seq = $2";
    let rows = tx.query(Statement::new(sql).thread(thread).with(seq.cast_signed())).await?;
    let row = rows.first().ok_or_else(|| unreadable(Damage::MissingEntry(seq)))?;
    Ok(call_arguments(entry(row)?.1, call))
}

/// Fills in the arguments of synthetic calls whose original calls are not among the entries, because a summary covers
/// them.
async fn restore_arguments(
    tx: &mut Transaction,
    threads: &[ThreadKey],
    entries: &mut [(Seq, Entry)],
) -> Result<(), Failure> {
    let mut made: HashSet<CallId> = HashSet::new();
    let mut filled = FilledArguments::default();
    for (_, entry) in entries {
        let Item::Assistant { calls, .. } = &mut entry.item else { continue };
        for call in calls {
            match &call.arguments {
                Arguments::Synthetic { of, .. } if !made.contains(of) => {
                    filled.fill(tx, threads, &mut call.arguments).await?;
                }
                _ => {}
            }
            made.insert(call.id.clone());
        }
    }
    Ok(())
}
