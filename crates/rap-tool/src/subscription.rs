//! Subscriptions: calls that are confirmed first and then send events.

use std::fmt;
use std::ops::Deref;
use std::sync::OnceLock;

use rap_protocol::limits;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::call::Call;
use crate::error::Error;
use crate::output::{ENVELOPE_BYTES, IntoOutput, json_len};
use crate::rate::Throttle;
use crate::rules::{Ignored, Input};

/// A subscription that has not been confirmed yet.
///
/// The handler first checks that it can serve the subscription; an error at this point is the result of the call. It
/// then calls [`Subscribe::confirm`], which returns the [`Subscription`] to send events with.
///
/// After a restart of the server, the handler is called again with the same arguments. [`Subscribe::cursor`] then
/// returns the last stored position, and confirming again sends nothing.
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

/// A confirmed subscription, which sends events.
pub struct Subscription {
    call: Call,
    /// Created with the first event.
    throttle: OnceLock<Box<Mutex<Throttle>>>,
}

/// An event of a subscription.
#[derive(Debug)]
pub struct Event {
    text: String,
    associative: bool,
    cursor: Option<serde_json::Result<String>>,
}

/// Reason why an event was not sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The subscription was cancelled, its thread was closed, or the runtime no longer knows it.
    #[error("the subscription has ended")]
    Ended,
    /// The event is larger than the protocol allows. Contains its size as JSON, in bytes.
    #[error("the event is too large: {0} bytes as JSON")]
    TooLarge(usize),
    /// The cursor could not be serialized.
    #[error("the cursor cannot be serialized as JSON: {0}")]
    Cursor(#[source] serde_json::Error),
}

impl Event {
    /// Creates an event with this text.
    pub fn new(text: impl Into<String>) -> Self {
        Event { text: text.into(), associative: false, cursor: None }
    }

    /// Creates an event whose text is `value` as JSON.
    pub fn json<T: Serialize>(value: &T) -> Result<Self, Error> {
        Ok(Event::new(serde_json::to_string(value)?))
    }

    /// Marks the event as associative: the runtime adds it to the subscribing thread, for example as further output
    /// of a running command. The runtime handles any other event in a separate thread.
    #[must_use]
    pub fn associative(mut self) -> Self {
        self.associative = true;
        self
    }

    /// Sets the position of the subscription after this event; see [`Subscribe::cursor`].
    ///
    /// It is stored in the same transaction as the event, so that a restart neither repeats nor skips an event.
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

    /// Returns the last cursor that was sent with an event or saved, or `None` if there is none yet.
    pub fn cursor<T: DeserializeOwned>(&self) -> Result<Option<T>, Error> {
        Ok(self.cursor.clone().map(serde_json::from_value).transpose()?)
    }

    /// Returns true if the subscription was confirmed before a restart of the server.
    pub fn is_confirmed(&self) -> bool {
        self.confirmed
    }

    /// Ends the call with a result instead of a subscription, for a tool that subscribes only on request.
    pub async fn answer(self, output: impl IntoOutput) -> Result<(), Error> {
        let output = self.call.scrubbed(output.into_output()?).await;
        let returned = Input::Returned(output.into_returned());
        let returned = Box::pin(self.call.commit(returned, None)).await;
        Ok(returned.map_err(|_| SendError::Ended)?)
    }

    /// Confirms the subscription with a text for the agent. The id with which the agent can cancel the subscription
    /// is appended to the text.
    pub fn confirm(
        self,
        text: impl Into<String>,
    ) -> impl Future<Output = Result<Subscription, Error>> + Send + Unpin {
        let text = text.into();
        // Boxed, because the future of the handler is the memory cost of an idle subscription.
        Box::pin(async move {
            if !self.confirmed {
                self.confirm_call(text).await?;
            }
            Ok(Subscription { call: self.call, throttle: OnceLock::new() })
        })
    }

    async fn confirm_call(&self, text: String) -> Result<(), Error> {
        let engine = self.call.engine();
        engine.admit_subscription(self.call.thread().caller(), self.call.run())?;
        let (text, id) = (self.call.scrubbed(text).await, self.call.id());
        let text = format!("{}{}Subscription ID: {id}", text, if text.is_empty() { "" } else { " " });
        let confirmed = self.call.commit(Input::Confirmed(text), None).await;
        confirmed.map_err(|_| SendError::Ended)?;
        engine.clear_deadline(self.call.seq());
        Ok(())
    }
}

impl Subscription {
    /// Sends an event. Returns when the event is on disk. The server then delivers it in order, with retries, even
    /// after a restart.
    ///
    /// Waits while the subscription exceeds [`Limits::event_rate`](crate::Limits::event_rate), or while
    /// [`Limits::waiting_events`](crate::Limits::waiting_events) of its events are undelivered.
    pub async fn send(&self, event: impl Into<Event>) -> Result<(), SendError> {
        let event = event.into();
        // Boxed, here and below, to keep the future of an idle subscription small.
        Box::pin(self.post(event, |text, associative| Input::Event { text, associative })).await
    }

    /// Sends the final event, which ends the subscription.
    pub async fn finish(self, event: impl Into<Event>) -> Result<(), Error> {
        let event = event.into();
        Ok(Box::pin(self.post(event, |text, associative| Input::FinalEvent { text, associative })).await?)
    }

    /// Stores a cursor without sending an event; see [`Subscribe::cursor`].
    pub async fn save(&self, cursor: impl Serialize) -> Result<(), SendError> {
        let cursor = serde_json::to_string(&cursor).map_err(SendError::Cursor)?;
        let (caller, call) = (self.call.thread().caller(), self.call.seq());
        Box::pin(self.call.engine().save_cursor(caller, call, cursor)).await;
        Ok(())
    }

    // Argued: SE-23 only the handler sends events; the guide tells authors to verify the source of an event.
    async fn post(&self, event: Event, input: impl Fn(String, bool) -> Input) -> Result<(), SendError> {
        let cursor = event.cursor.transpose().map_err(SendError::Cursor)?;
        let text = self.call.scrubbed(event.text).await;
        let bytes = json_len(&text);
        if bytes + ENVELOPE_BYTES > limits::BODY_BYTES {
            return Err(SendError::TooLarge(bytes));
        }
        // Held until the event is on disk, so that events are sent in the order in which `send` was called.
        let throttle = self.throttle.get_or_init(|| Box::new(Mutex::new(Throttle::new())));
        let mut throttle = throttle.lock().await;
        let wait = throttle.reserve(self.call.engine().limits.event_rate, Instant::now());
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        loop {
            let changed = self.call.run().changed.notified();
            let input = input(text.clone(), event.associative);
            match self.call.commit(input, cursor.clone()).await {
                Ok(()) => return Ok(()),
                Err(Ignored::Full) => changed.await,
                Err(_) => return Err(SendError::Ended),
            }
        }
    }
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
