//! Output of a command: collected for its result, or sent as events.

use std::time::Duration;

use rap_tool::prelude::*;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

use super::Finish;
use crate::cut::Cut;

/// Maximum size of a result as JSON, in bytes.
const RESULT_BYTES: usize = 1_500_000;
/// Pauses between the events of a streamed command. They grow, because each event may ask the model.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Maximum size of an event, and of all events of a command, in bytes. The rest is in the last event, cut.
const EVENT_BYTES: usize = 32 * 1024;
const STREAM_BYTES: usize = 512 * 1024;

/// Receiver of the output of a command.
pub(super) enum Sink<'a> {
    Collected(Cut),
    Streamed(Streamed<'a>),
}

impl Sink<'_> {
    pub(super) async fn take(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Sink::Collected(output) => output.push(bytes),
            Sink::Streamed(streamed) => streamed.take(bytes).await?,
        }
        Ok(())
    }

    /// Resolves when [`Sink::flush`] should be called.
    pub(super) async fn pause(&self) {
        match self {
            Sink::Streamed(Streamed { due: Some(due), .. }) => sleep_until(*due).await,
            _ => std::future::pending().await,
        }
    }

    pub(super) async fn flush(&mut self) -> Result<()> {
        match self {
            Sink::Collected(_) => Ok(()),
            Sink::Streamed(streamed) => streamed.flush().await,
        }
    }

    /// Returns the output that was not sent as events.
    pub(super) fn into_output(self) -> Cut {
        match self {
            Sink::Collected(output) => output,
            Sink::Streamed(streamed) => streamed.into_output(),
        }
    }
}

/// Returns the result of a command as JSON text.
pub(super) fn result(mut output: Cut, finish: &Finish) -> String {
    let mut fields = finish.fields();
    loop {
        fields["output"] = Value::String(output.text());
        fields["truncated"] = json!(output.is_cut());
        let text = fields.to_string();
        // A control character takes several bytes of JSON.
        if text.len() <= RESULT_BYTES {
            return text;
        }
        output.halve();
    }
}

/// Output that is sent as events while the command runs.
pub(super) struct Streamed<'a> {
    subscription: &'a Subscription,
    waiting: Vec<u8>,
    sent: usize,
    due: Option<Instant>,
    pause: Duration,
    /// Output that is not sent as events.
    rest: Cut,
}

impl<'a> Streamed<'a> {
    pub(super) fn new(subscription: &'a Subscription) -> Self {
        let rest = Cut::default();
        Streamed { subscription, waiting: Vec::new(), sent: 0, due: None, pause: FIRST_PAUSE, rest }
    }

    fn into_output(mut self) -> Cut {
        let waiting = std::mem::take(&mut self.waiting);
        if self.rest.is_empty() {
            self.rest.push(&waiting);
        }
        self.rest
    }
}

impl Streamed<'_> {
    async fn take(&mut self, bytes: &[u8]) -> Result<()> {
        if !self.rest.is_empty() || self.sent + self.waiting.len() + bytes.len() > STREAM_BYTES {
            let waiting = std::mem::take(&mut self.waiting);
            self.rest.push(&waiting);
            self.rest.push(bytes);
            return Ok(());
        }
        self.waiting.extend(bytes);
        self.due.get_or_insert_with(|| Instant::now() + self.pause);
        if self.waiting.len() >= EVENT_BYTES { self.flush().await } else { Ok(()) }
    }

    async fn flush(&mut self) -> Result<()> {
        self.due = None;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        // The rest of a character that is not complete yet waits for the next event.
        let complete = match std::str::from_utf8(&self.waiting) {
            Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => error.valid_up_to(),
            _ => self.waiting.len(),
        };
        let rest = self.waiting.split_off(complete);
        let text = String::from_utf8_lossy(&std::mem::replace(&mut self.waiting, rest)).into_owned();
        self.sent += text.len();
        if !text.is_empty() {
            self.subscription.send(Event::new(text).associative()).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rap_tool::process::Ended;

    use super::*;
    use crate::cut::KEPT;

    #[test]
    fn a_result_is_small_whatever_the_output_is() {
        for byte in [b'x', 1, 0xff, b'"'] {
            let mut output = Cut::default();
            output.push(&vec![byte; 2 * KEPT]);
            let text = result(output, &Finish::Ended(Ended::Exited(3)));
            // The result is a string in the JSON of a callback.
            assert!(serde_json::to_string(&text).unwrap().len() < 2_000_000);
            let fields: Value = serde_json::from_str(&text).unwrap();
            assert_eq!((&fields["exit_code"], &fields["truncated"]), (&json!(3), &json!(false)));
        }
        let timed_out = result(Cut::default(), &Finish::TimedOut { seconds: 5 });
        assert_eq!(
            timed_out,
            r#"{"error":"timed out after 5 seconds","exit_code":null,"output":"","truncated":false}"#
        );
    }
}
