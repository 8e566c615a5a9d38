//! Listings: pages of rows of all threads.

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::word::words;
use crate::{Delivery, ListedToken, Question, Thread, Time};

/// A page of a listing.
pub trait Listing: DeserializeOwned {
    /// Name of the listing in the path: `GET /v1/NAME`.
    const NAME: &'static str;
    /// Name of the field with the rows.
    const FIELD: &'static str;
    /// Type of the rows.
    type Row;

    /// Returns the rows.
    fn into_rows(self) -> Vec<Self::Row>;
}

macro_rules! listings {
    ($($(#[$about:meta])* $page:ident { $field:ident: $row:ty } at $name:literal;)*) => {$(
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(JsonSchema))]
        pub struct $page {
            /// Rows of the page.
            pub $field: Vec<$row>,
            /// Cursor of the next page. Null on the last page.
            pub next_cursor: Option<String>,
        }

        impl Listing for $page {
            const NAME: &'static str = $name;
            const FIELD: &'static str = stringify!($field);
            type Row = $row;

            fn into_rows(self) -> Vec<$row> {
                self.$field
            }
        }
    )*};
}

listings! {
    /// A page of threads, oldest first.
    Threads { threads: Thread } at "threads";
    /// A page of the open calls of all threads.
    Calls { calls: ListedCall } at "calls";
    /// A page of the active subscriptions of all threads.
    Subscriptions { subscriptions: ListedSubscription } at "subscriptions";
    /// A page of timers, the next one first.
    Timers { timers: Timer } at "timers";
    /// A page of the questions that wait for a user.
    Inbox { items: Question } at "inbox";
    /// A page of deliveries, newest first.
    Deliveries { deliveries: Delivery } at "deliveries";
    /// A page of the tokens of clients, oldest first.
    Tokens { tokens: ListedToken } at "tokens";
}

/// An open call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct ListedCall {
    /// Thread that made the call.
    pub thread_id: String,
    /// Id of the call.
    pub call_id: String,
    /// Name of the tool.
    pub tool: String,
    /// Base URL of the tool server.
    pub server: String,
    /// Time at which the call was made.
    pub since: Time,
    /// Time at which the call times out. Null if it never does.
    pub until: Option<Time>,
    /// Time at which the tool server accepted the call. Null if it has not yet.
    pub acknowledged_at: Option<Time>,
    /// Time of the next attempt to send the call. Null if the tool server has accepted it, if it is a tool of the runtime
    /// itself, or if it needs an approval first.
    pub next_attempt_at: Option<Time>,
    /// Number of failed attempts to send the call.
    pub attempts: u32,
    /// Outcome of the last failed attempt.
    pub last_attempt: Option<String>,
}

/// An active subscription.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct ListedSubscription {
    /// Thread that subscribed.
    pub thread_id: String,
    /// Call that created the subscription.
    pub call_id: String,
    /// Name of the tool.
    pub tool: String,
    /// Base URL of the tool server.
    pub server: String,
    /// Time at which the call was made.
    pub since: Time,
    /// Number of events that wait for a child thread.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(!default))]
    pub waiting: u64,
}

/// A timer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Timer {
    /// Thread that the timer belongs to.
    pub thread_id: String,
    /// Call that the timer belongs to. Null for the retry of a failed thread.
    pub call_id: Option<String>,
    /// Tool of that call.
    pub tool: Option<String>,
    /// What happens at that time.
    pub kind: TimerKind,
    /// Time at which the timer is due.
    pub at: Time,
}

words! {
    /// Kind of a timer.
    TimerKind {
        /// A call times out.
        Timeout = "timeout",
        /// A sleep ends.
        Sleep = "sleep",
        /// A schedule sends its text.
        Schedule = "schedule",
        /// A failed thread is retried.
        Retry = "retry",
    }
}
