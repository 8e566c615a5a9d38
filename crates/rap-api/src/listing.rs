//! Listings: pages of rows of all threads.

#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::string_enum::string_enum;
use crate::{Delivery, ListedToken, Question, Thread, Time, UsualDuration};

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
    /// The nodes that share the database, oldest first. There is one page.
    Nodes { nodes: Node } at "nodes";
}

string_enum! {
    /// Order of a listing of threads.
    ThreadOrder {
        /// In the order of their creation.
        Oldest = "oldest",
        /// The thread that was created last comes first.
        Newest = "newest",
    }
}

#[expect(clippy::derivable_impls, reason = "a macro makes the enum")]
impl Default for ThreadOrder {
    fn default() -> Self {
        ThreadOrder::Oldest
    }
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
    /// Time at which the call was made or, if it needed approval, approved.
    pub since: Time,
    /// Time at which the call is settled if nothing else happens. Null if there is none.
    pub until: Option<Time>,
    /// True if the call waits until a person allows it. It is not sent before.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(!default))]
    pub needs_approval: bool,
    /// Time at which the tool server accepted the call. Null if it has not yet.
    pub acknowledged_at: Option<Time>,
    /// Time of the next attempt to send the call. Null if the tool server has accepted it, if it is a tool of the runtime
    /// itself, or if it needs an approval first.
    pub next_attempt_at: Option<Time>,
    /// Number of failed attempts to send the call.
    pub attempts: u32,
    /// Outcome of the last failed attempt.
    pub last_attempt: Option<String>,
    /// Usual duration of such a call. Null if the tool does not state it.
    pub usually: Option<UsualDuration>,
    /// True if the call has taken far longer than usual: more than twice the longest usual duration.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(!default))]
    pub overdue: bool,
}

/// An active subscription.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
    /// Time at which the subscription was confirmed.
    pub since: Time,
    /// Number of events that wait for a child thread.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(!default))]
    pub waiting: u64,
    /// Time of the last event. Null if there was none.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(!default))]
    pub last_event_at: Option<Time>,
    /// Rate of the last events, of which up to 100 count. Null if there are too few.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(!default))]
    pub events_per_hour: Option<f64>,
}

/// A runtime that uses the database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Node {
    /// Id of the node. A restarted node has another one.
    pub id: String,
    /// Address that the node itself listens on. All nodes share one public URL.
    pub url: String,
    /// Time at which the node was started.
    pub started_at: Time,
    /// Time at which the node last renewed its lease.
    pub seen_at: Time,
    /// Number of requests to models in progress, at that time.
    pub asking: u64,
    /// Number of invocations in progress, at that time.
    pub invoking: u64,
}

/// A timer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct Timer {
    /// Thread that the timer belongs to.
    pub thread_id: String,
    /// Call that the timer belongs to. Null if the thread itself continues.
    pub call_id: Option<String>,
    /// Tool of that call.
    pub tool: Option<String>,
    /// Kind of the timer, which decides what happens when it is due.
    pub kind: TimerKind,
    /// Time at which the timer is due.
    pub at: Time,
}

string_enum! {
    /// Kind of a timer.
    TimerKind {
        /// A call times out.
        Timeout = "timeout",
        /// A sleep ends.
        Sleep = "sleep",
        /// A schedule sends its text.
        Schedule = "schedule",
        /// A failed thread is retried, or a paused one continues.
        Retry = "retry",
    }
}
