//! Search for a phrase in the titles and texts of threads.

use rap_agent::Status;
use rusqlite::{Connection, OptionalExtension, params};

use super::deletion::NOT_DELETED;
use super::heads::skip_unreadable;
use super::history::{thread_row, thread_rows};
use crate::store::{Cursor, Page, ThreadFilter, ThreadKey, ThreadRow, Visibility};

/// Rows of the index that one page looks at. Those that the filter leaves out count, too.
const ROWS_PER_PAGE: usize = 20_000;

/// Rows below a key, the newest first. A thread has one row for its title and one for each text.
const ROWS: &str = "SELECT rowid FROM search WHERE search MATCH ?1 AND rowid < ?2 ORDER BY rowid DESC";

/// Returns the full-text query for a phrase. Its last word may be the beginning of a word.
fn query(phrase: &str) -> String {
    format!("\"{}\" *", phrase.replace('"', "\"\""))
}

/// Lists the threads that contain a phrase, the newest first. The index is read in this order and only as far as the page
/// needs it.
pub(super) fn threads(
    conn: &Connection,
    filter: &ThreadFilter,
    phrase: &str,
) -> rusqlite::Result<Page<ThreadRow>> {
    let mut statement = conn.prepare_cached(ROWS)?;
    let mut load = conn.prepare_cached(&format!("{} WHERE t.no = ?1 AND {NOT_DELETED}", thread_rows()))?;
    let below = match filter.page_request.after.thread.number() {
        0 => i64::MAX,
        after => after << 32,
    };
    let mut found = statement.query(params![query(phrase), below])?;
    let (mut rows, mut last) = (Vec::new(), None);
    for _ in 0..ROWS_PER_PAGE {
        let Some(row) = found.next()? else { return Ok(Page { rows, next: None }) };
        let thread = ThreadKey::new(row.get::<_, i64>(0)? >> 32);
        if last == Some(thread) {
            continue;
        }
        if rows.len() == filter.page_request.limit {
            break;
        }
        last = Some(thread);
        let row = load.query_row([thread], thread_row).optional();
        if let Some(Some(row)) = skip_unreadable(thread, row)? {
            rows.extend(Some(row).filter(|row| fits(filter, row)));
        }
    }
    let next = last.map(|thread| Cursor { thread, ..Cursor::default() });
    Ok(Page { rows, next })
}

fn fits(filter: &ThreadFilter, row: &ThreadRow) -> bool {
    let visible = match &filter.visible {
        Visibility::All => true,
        Visibility::User(user) => row.thread.user_id.as_ref() == Some(user),
    };
    let status = |status: Status| row.head.status() == status;
    visible
        && filter.status.is_none_or(status)
        && filter.parent.as_ref().is_none_or(|parent| row.parent_id.as_ref() == Some(parent))
        && !(filter.roots && row.parent_id.is_some())
}
