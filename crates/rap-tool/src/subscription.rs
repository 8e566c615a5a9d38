//! Subscriptions: calls that go on to send events.

use std::fmt;
use std::ops::Deref;

use rap_protocol::limits;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::call::Call;
use crate::error::Error;
use crate::output::{ENVELOPE_BYTES, counted};
use crate::rate::Pace;
use crate::rules::{Ignored, Input};

/// A subscription that has not been confirmed yet.
///
/// The handler looks whether it can watch what it is asked to watch (an error now is the result of the call),
/// then confirms, and has a [`Subscription`] to send events with. After a restart of the server the handler is
/// called again with the same arguments; [`Subscribe::cursor`] then tells how far it had come, and confirming
/// again sends nothing.
///
/// ```
/// use rap_tool::prelude::*;
///
/// /// Counts down to zero, a number a second.
/// #[derive(Deserialize, JsonSchema)]
/// struct Countdown {
///     /// Where to begin.
///     from: u64,
/// }
///
/// async fn countdown(args: Countdown, subscribe: Subscribe) -> Result<()> {
///     let mut next = subscribe.cursor()?.unwrap_or(args.from);
///     let subscription = subscribe.confirm(format!("Counting down from {}.", args.from)).await?;
///     while next > 0 {
///         tokio::time::sleep(std::time::Duration::from_secs(1)).await;
///         next -= 1;
///         subscription.send(Event::new(next.to_string()).cursor(next)).await?;
///     }
///     subscription.finish("Liftoff.").await
/// }
///
/// let server = ToolServer::new("space").subscription("countdown", countdown);
/// ```
pub struct Subscribe {
    call: Call,
    confirmed: bool,
    cursor: Option<Value>,
}

/// A confirmed subscription: the way to send events.
pub struct Subscription {
    call: Call,
    pace: Mutex<Pace>,
}

/// Something that happened.
#[derive(Debug)]
pub struct Event {
    text: String,
    associative: bool,
    cursor: Option<serde_json::Result<String>>,
}

/// Why an event was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The subscription was cancelled, its thread closed, or the runtime does not know it any more.
    #[error("the subscription has ended")]
    Ended,
    /// No runtime would take it.
    #[error("the event is too large: {0} bytes as JSON")]
    TooLarge(usize),
    /// The cursor can not be stored.
    #[error("the cursor can not be written as JSON: {0}")]
    Cursor(#[source] serde_json::Error),
}

impl Event {
    /// An event with this text.
    pub fn new(text: impl Into<String>) -> Self {
        Event { text: text.into(), associative: false, cursor: None }
    }

    /// An event with structured data, as JSON.
    pub fn json<T: Serialize>(value: &T) -> Result<Self, Error> {
        Ok(Event::new(serde_json::to_string(value)?))
    }

    /// It belongs into the subscribing thread itself, such as the output of a command that goes on. Any other
    /// event is handled in a thread of its own.
    #[must_use]
    pub fn associative(mut self) -> Self {
        self.associative = true;
        self
    }

    /// Where the subscription stands after this event. It is stored together with the event, so that a restart
    /// neither repeats nor skips one.
    #[must_use]
    pub fn cursor(mut self, cursor: impl Serialize) -> Self {
        self.cursor = Some(serde_json::to_string(&cursor));
        self
    }
}

impl From<String> for Event {
    fn from(text: String) -> Self {
        Event::new(text)
    }
}

impl From<&str> for Event {
    fn from(text: &str) -> Self {
        Event::new(text)
    }
}

impl Subscribe {
    pub(crate) fn new(call: Call, confirmed: bool, cursor: Option<Value>) -> Self {
        Subscribe { call, confirmed, cursor }
    }

    /// Where the subscription stood when the server stopped: the last cursor that was sent with an event or
    /// saved. None at its beginning.
    pub fn cursor<T: DeserializeOwned>(&self) -> Result<Option<T>, Error> {
        Ok(self.cursor.clone().map(serde_json::from_value).transpose()?)
    }

    /// Confirms the subscription to the agent. The id that the agent cancels it by is added to the text.
    pub async fn confirm(self, text: impl Into<String>) -> Result<Subscription, Error> {
        if !self.confirmed {
            self.call.engine().admit_subscription(self.call.run())?;
            let (text, id) = (text.into(), self.call.id());
            let text = format!("{}{}Subscription ID: {id}", text, if text.is_empty() { "" } else { " " });
            let commit = self.call.engine().commit(self.call.seq(), Input::Confirmed(text), None);
            Box::pin(commit).await.map_err(ended)?;
        }
        Ok(Subscription { call: self.call, pace: Mutex::new(Pace::new()) })
    }
}

impl Subscription {
    /// Sends an event: resolves when it is on disk, from where it is delivered in order, with retries, across
    /// restarts. Waits while the subscription is ahead of its rate, or while too many of its events wait.
    pub async fn send(&self, event: impl Into<Event>) -> Result<(), SendError> {
        let event = event.into();
        // Boxed, here and below, so that a subscription that waits for its next event is small.
        Box::pin(self.post(event, |text, associative| Input::Happened { text, associative })).await
    }

    /// Sends the last event.
    pub async fn finish(self, event: impl Into<Event>) -> Result<(), Error> {
        let event = event.into();
        Ok(Box::pin(self.post(event, |text, associative| Input::Finished { text, associative })).await?)
    }

    /// Stores where the subscription stands, without an event.
    pub async fn save(&self, cursor: impl Serialize) -> Result<(), SendError> {
        let cursor = serde_json::to_string(&cursor).map_err(SendError::Cursor)?;
        Box::pin(self.call.engine().save_cursor(self.call.seq(), cursor)).await;
        Ok(())
    }

    // Argued: SE-23 an event is what the handler sends and nothing else; the guide tells authors to check its source.
    async fn post(&self, event: Event, input: impl Fn(String, bool) -> Input) -> Result<(), SendError> {
        let cursor = event.cursor.transpose().map_err(SendError::Cursor)?;
        let bytes = counted(&event.text);
        if bytes + ENVELOPE_BYTES > limits::BODY_BYTES {
            return Err(SendError::TooLarge(bytes));
        }
        // Held until the event is on disk: events of one subscription are sent in the order of these calls.
        let mut pace = self.pace.lock().await;
        let wait = pace.take(self.call.engine().limits.event_rate, Instant::now());
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        loop {
            let news = self.call.run().news.notified();
            let input = input(event.text.clone(), event.associative);
            match self.call.engine().commit(self.call.seq(), input, cursor.clone()).await {
                Ok(()) => return Ok(()),
                Err(Ignored::Full) => news.await,
                Err(_) => return Err(SendError::Ended),
            }
        }
    }
}

fn ended(_: Ignored) -> Error {
    SendError::Ended.into()
}

impl Deref for Subscribe {
    type Target = Call;
    fn deref(&self) -> &Call {
        &self.call
    }
}

impl Deref for Subscription {
    type Target = Call;
    fn deref(&self) -> &Call {
        &self.call
    }
}

impl fmt::Debug for Subscribe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Subscribe({:?})", self.call)
    }
}

impl fmt::Debug for Subscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Subscription({:?})", self.call)
    }
}
