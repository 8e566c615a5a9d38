//! Rows of listings, and paging.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use rap_agent::{Head, Seq, Server, Status};
use rap_api::{ThreadOrder, TimerKind};
use rap_protocol::{CallId, ThreadId, Timestamp};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Thread, ThreadKey, Visibility};

/// Selects a page of a listing.
#[derive(Debug, Clone, Default)]
pub(crate) struct PageRequest {
    /// Return only rows after this one.
    pub(crate) after: Cursor,
    pub(crate) limit: usize,
}

impl PageRequest {
    pub(crate) fn first(limit: usize) -> PageRequest {
        PageRequest { after: Cursor::default(), limit }
    }
}

/// A page of a listing.
pub(crate) struct Page<T, C = Cursor> {
    pub(crate) rows: Vec<T>,
    /// Cursor of the last row, if there is another page.
    pub(crate) next: Option<C>,
}

/// Position of a row in a listing: its time, if the listing has one, its thread, and its id within the thread. The
/// default is before all rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cursor {
    pub(super) at: Option<i64>,
    pub(super) thread: ThreadKey,
    pub(super) id: String,
}

impl Default for Cursor {
    fn default() -> Self {
        Cursor { at: None, thread: ThreadKey::new(0), id: String::new() }
    }
}

impl Cursor {
    /// Regular expression of a cursor in text form.
    pub(crate) const PATTERN: &'static str =
        r"^(-|[0-9]{1,15})\.[0-9]{1,9}\.[^\u0000-\u001f\u007f-\u009f]{0,256}$";
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (thread, id) = (self.thread.number(), &self.id);
        match self.at {
            Some(at) => write!(f, "{at}.{thread}.{id}"),
            None => write!(f, "-.{thread}.{id}"),
        }
    }
}

/// The error for a text that is not a cursor.
#[derive(Debug)]
pub(crate) struct NotACursor;

impl FromStr for Cursor {
    type Err = NotACursor;

    fn from_str(text: &str) -> Result<Cursor, NotACursor> {
        let (at, rest) = text.split_once('.').ok_or(NotACursor)?;
        let (thread, id) = rest.split_once('.').ok_or(NotACursor)?;
        let at = if at == "-" { None } else { Some(at.parse().map_err(|_| NotACursor)?) };
        let thread = ThreadKey::new(thread.parse().map_err(|_| NotACursor)?);
        Ok(Cursor { at, thread, id: id.to_owned() })
    }
}

/// Selects the threads to list.
#[derive(Debug, Clone, Default)]
pub(crate) struct ThreadFilter {
    pub(crate) status: Option<Status>,
    pub(crate) parent: Option<ThreadId>,
    /// Only threads with this phrase in their title or texts. They are listed newest first.
    pub(crate) phrase: Option<String>,
    /// Only threads without a parent.
    pub(crate) roots: bool,
    pub(crate) order: ThreadOrder,
    pub(crate) visible: Visibility,
    pub(crate) page_request: PageRequest,
}

impl ThreadFilter {
    /// Returns the condition on the key of a thread, which is compared with the cursor's, and the order of keys.
    pub(super) fn direction(&self) -> (&'static str, &'static str) {
        match self.order {
            _ if self.phrase.is_some() => ("<", "DESC"),
            ThreadOrder::Newest => ("<", "DESC"),
            ThreadOrder::Oldest | ThreadOrder::Unknown => (">", "ASC"),
        }
    }

    /// Returns true if a thread has the status. A damaged thread is failed, whatever its stored status is.
    pub(super) fn has_status(&self, row: &ThreadRow) -> bool {
        self.status.is_none_or(|status| row.head.status() == status)
    }

    /// Returns the key of the thread after which the page begins.
    pub(super) fn begins_after(&self) -> ThreadKey {
        let after = self.page_request.after.thread;
        let is_first = after == Cursor::default().thread;
        if is_first && self.direction().0 == "<" { ThreadKey::new(i64::MAX) } else { after }
    }
}

/// Selects a page of a history. If any entry matches, at least one is returned, whatever its size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HistoryPage {
    /// Return only entries after this one.
    pub(crate) after: Seq,
    pub(crate) up_to: Seq,
    /// Maximum number of entries.
    pub(crate) rows: usize,
    /// Number of bytes after which no more entries are read.
    pub(crate) bytes: usize,
}

/// A thread in a listing.
pub(crate) struct ThreadRow {
    pub(crate) thread: Arc<Thread>,
    pub(crate) parent_id: Option<ThreadId>,
    pub(crate) root_id: ThreadId,
    pub(crate) forked_from: Option<ThreadId>,
    pub(crate) head: Head,
    pub(crate) updated_at: Timestamp,
}

/// Identifies a view of a thread. In text form it is the cursor of a listing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub(crate) struct ViewKey {
    pub(crate) server: String,
    pub(crate) view_type: String,
}

impl fmt::Display for ViewKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A URL contains no space.
        write!(f, "{} {}", self.server, self.view_type)
    }
}

impl FromStr for ViewKey {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<ViewKey, Infallible> {
        // Every text is a position in the order of keys.
        let (server, view_type) = text.split_once(' ').unwrap_or((text, ""));
        Ok(ViewKey { server: server.into(), view_type: view_type.into() })
    }
}

/// The latest content of a view.
pub(crate) struct ViewRow {
    pub(crate) key: ViewKey,
    pub(crate) content: Value,
    pub(crate) at: Timestamp,
}

/// An unanswered question to a person.
pub(crate) struct InboxItem {
    pub(crate) thread: ThreadId,
    pub(crate) call: CallId,
    pub(crate) tool: String,
    pub(crate) asked_at: Timestamp,
    pub(crate) question: StoredQuestion,
    /// Arguments of the call, if all threads are listed.
    pub(crate) arguments: Option<Map<String, Value>>,
}

/// The content of a question. It is stored encrypted.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum StoredQuestion {
    Choice {
        prompt: String,
        choices: Vec<String>,
        default: usize,
        /// `None` if the runtime itself asks.
        #[serde(default)]
        response_url: Option<String>,
    },
    SignIn {
        auth_url: String,
    },
}

/// An open call in a listing.
pub(crate) struct CallRow {
    pub(crate) thread: ThreadId,
    pub(crate) call: CallId,
    pub(crate) tool: String,
    pub(crate) server: String,
    pub(crate) since: Timestamp,
    pub(crate) until: Option<Timestamp>,
    pub(crate) acknowledged_at: Option<Timestamp>,
    /// Time of the next attempt to send the call.
    pub(crate) next_attempt_at: Option<Timestamp>,
    pub(crate) attempts: u32,
    pub(crate) outcome: Option<String>,
}

impl CallRow {
    /// Returns true if the call waits for an approval: it was not sent, and is not due to be sent.
    pub(crate) fn needs_approval(&self) -> bool {
        let unsent =
            self.acknowledged_at.is_none() && self.next_attempt_at.is_none() && self.outcome.is_none();
        unsent && self.server != Server::runtime().0
    }
}

/// An active subscription in a listing.
pub(crate) struct SubscriptionRow {
    pub(crate) thread: ThreadId,
    pub(crate) call: CallId,
    pub(crate) tool: String,
    pub(crate) server: String,
    pub(crate) since: Timestamp,
    /// Number of its events that wait for an event child.
    pub(crate) waiting: u64,
    /// Its last events, of which there are at most 100. `None` if there is none.
    pub(crate) events: Option<RecentEvents>,
}

/// The last events of a subscription.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecentEvents {
    pub(crate) last: Timestamp,
    pub(crate) first: Timestamp,
    pub(crate) count: u32,
}

impl RecentEvents {
    /// Parses the time of the last event, that of the first one and their number, separated by spaces.
    pub(super) fn parse(text: Option<&str>) -> Option<RecentEvents> {
        let mut numbers = text?.split(' ').map(|number| number.parse::<i64>().ok());
        let (last, first, count) = (numbers.next()??, numbers.next()??, numbers.next()??);
        Some(RecentEvents {
            last: Timestamp(last),
            first: Timestamp(first),
            count: u32::try_from(count).ok()?,
        })
    }

    /// Returns the rate of these events. `None` if there are too few to tell.
    pub(crate) fn per_hour(&self) -> Option<f64> {
        let milliseconds = self.last.since(self.first).as_millis();
        (self.count > 1 && milliseconds > 0)
            .then(|| f64::from(self.count - 1) * 3_600_000.0 / milliseconds as f64)
    }
}

/// A timer in a listing.
pub(crate) struct TimerRow {
    pub(crate) thread: ThreadId,
    /// `None` if the timer is the thread's own.
    pub(crate) call: Option<CallId>,
    pub(crate) tool: Option<String>,
    pub(crate) kind: TimerKind,
    pub(crate) at: Timestamp,
    /// The timer was set at this time or before. It is in the future if the clock was set back since then.
    pub(crate) set_by: Timestamp,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_survives_a_round_trip_through_text() {
        for text in ["-.0.", "-.3.call_1", "1700000000000.12.a.b.c", "5.1.ü x"] {
            assert_eq!(text.parse::<Cursor>().unwrap().to_string(), text);
        }
        for text in ["", "1", "1.2", "x.1.c", "1.x.c", ".1.c", "--.1.c"] {
            assert!(text.parse::<Cursor>().is_err(), "{text}");
        }
        assert_eq!(Cursor::default().to_string(), "-.0.");
    }
}
