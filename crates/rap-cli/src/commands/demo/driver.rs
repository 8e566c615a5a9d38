//! Sends messages to the agent of the demo, follows its thread and prints what happens.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anstyle::Style;
use anyhow::bail;
use rap_agent::texts;
use rap_api::client::{Client, Follower, IdempotencyKey, Update};
use rap_api::{
    Call, CallEventKind, CreateThread, Entry, Item, OpenCall, SendMessage, Status, StatusEvent, ThreadEvent,
};
use serde_json::Value;

use super::runtime::Runtime;
use super::tools::DemoTools;
use crate::commands::print;
use crate::table::{BOLD, CYAN, DIM, GREEN, YELLOW, plain, styled, terminal_width, wrap};

/// Id of the demo's thread.
pub(super) const THREAD: &str = "demo";
/// Maximum time to wait for an expected event.
const PATIENCE: Duration = Duration::from_secs(30);

/// Wake reason: an event of the doorbell.
const RANG: &str = "the doorbell rang";
/// Wake reason: a report of the child.
const REPORTED: &str = "its child reports";

pub(super) struct Driver {
    pub client: Client,
    pub runtime: Runtime,
    pub tools: DemoTools,
    follower: Follower,
    began: Instant,
    /// Time at which the agent went to sleep; `None` while it is awake.
    asleep: Option<Instant>,
    /// Reason of the next wake.
    reason: &'static str,
    state: State,
}

/// State of the agent as far as its events have shown.
#[derive(Default)]
pub(super) struct State {
    pub status: Option<Status>,
    /// Open calls by id.
    pub open: HashMap<String, OpenCall>,
    last_call: String,
    pub answers: usize,
    /// Lines that the oven has reported.
    pub oven_lines: Vec<String>,
    pub disconnected: bool,
    subscribed: bool,
}

impl State {
    pub(super) fn is_idle(&self) -> bool {
        self.status == Some(Status::Idle) && self.open.is_empty()
    }

    fn is_asleep(&self) -> bool {
        matches!(self.status, Some(Status::Waiting | Status::Idle))
    }

    pub(super) fn oven_reported(&self, text: &str) -> bool {
        self.oven_lines.iter().any(|line| line == text)
    }
}

impl Driver {
    pub(super) async fn start(began: Instant, runtime: Runtime, tools: DemoTools) -> anyhow::Result<Driver> {
        let client = Client::new(&runtime.url)?;
        let (id, title) = (Some(THREAD.into()), Some("The demo".into()));
        client.create_thread(&CreateThread { id, title, ..CreateThread::default() }).await?;
        let follower = client.follow(THREAD, 0);
        let state = State::default();
        let mut driver = Driver { client, runtime, tools, follower, began, asleep: None, reason: "", state };
        // Wait for the first status, which follows the empty history.
        while driver.state.status.is_none() {
            if let Update::Event(ThreadEvent::Status(update)) = driver.follower.next().await? {
                driver.state.status = Some(update.status);
            }
        }
        driver.asleep = Some(Instant::now());
        Ok(driver)
    }

    pub(super) fn print_line(&self, who: &str, style: Style, what: &str) -> anyhow::Result<()> {
        print_line(self.began, who, style, what)
    }

    /// Prints an explanation for the user.
    pub(super) fn explain(&self, what: &str) -> anyhow::Result<()> {
        self.print_line("", DIM, what)
    }

    /// Id of the agent's last call.
    pub(super) fn last_call(&self) -> String {
        self.state.last_call.clone()
    }

    /// Sends a message of the user.
    pub(super) async fn say(&mut self, text: &str) -> anyhow::Result<()> {
        self.state.status = None;
        self.client.send_message(THREAD, &SendMessage::new(text), &IdempotencyKey::random()).await?;
        Ok(())
    }

    /// Prints what happens until the condition holds.
    pub(super) async fn run_until(
        &mut self,
        what: &str,
        condition: impl Fn(&State) -> bool,
    ) -> anyhow::Result<()> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while !condition(&self.state) {
            if !self.next(deadline).await? {
                bail!("the demo timed out waiting until {what}");
            }
        }
        Ok(())
    }

    /// Prints what happens for a while.
    pub(super) async fn run_for(&mut self, time: Duration) -> anyhow::Result<()> {
        let end = tokio::time::Instant::now() + time;
        while self.next(end).await? {}
        Ok(())
    }

    /// Handles the next event. Returns false if none came before the deadline.
    async fn next(&mut self, deadline: tokio::time::Instant) -> anyhow::Result<bool> {
        tokio::select! {
            // A line of the oven comes before the event that it causes, but after the agent's call.
            biased;
            Some(text) = self.tools.oven_log.recv(), if self.state.is_asleep() => {
                self.print_line("oven", YELLOW, &text)?;
                self.state.oven_lines.push(text);
            }
            update = self.follower.next() => self.handle(update?)?,
            () = tokio::time::sleep_until(deadline) => return Ok(false),
        }
        Ok(true)
    }

    /// Reconnects at once, because the runtime was restarted.
    pub(super) fn reconnect(&mut self) {
        self.follower.connect_now();
    }

    fn handle(&mut self, update: Update) -> anyhow::Result<()> {
        match update {
            Update::Disconnected => self.state.disconnected = true,
            Update::Reconnected => {
                self.state.disconnected = false;
                self.state.open.clear();
            }
            Update::Skipped(skipped) => self.explain(&skipped.to_string())?,
            Update::Event(ThreadEvent::Entry(entry)) => self.print_entry(&entry)?,
            Update::Event(ThreadEvent::Call(update)) => {
                match update.state {
                    CallEventKind::Opened => self.state.open.insert(update.call.call_id.clone(), update.call),
                    _ => self.state.open.remove(&update.call.call_id),
                };
            }
            Update::Event(ThreadEvent::Status(update)) => self.print_status(&update)?,
            Update::Event(_) => {}
        }
        Ok(())
    }

    fn print_entry(&mut self, entry: &Entry) -> anyhow::Result<()> {
        match &entry.item {
            Item::User { text, .. } => {
                self.reason = "you sent a message";
                self.print_line("you", CYAN, &plain(text))
            }
            Item::Assistant { calls, .. } if calls.iter().any(|call| call.synthetic) => {
                self.reason = wake_reason(&calls[0]);
                Ok(())
            }
            Item::Assistant { text, calls, .. } => self.print_answer(text, calls),
            Item::Result { content, .. } => self.print_result(&content.to_text()),
            Item::Notice { text } => self.explain(&plain(text)),
            Item::Summary { .. } | Item::Unknown => Ok(()),
        }
    }

    fn print_answer(&mut self, text: &str, calls: &[Call]) -> anyhow::Result<()> {
        if let Some(asleep) = self.asleep.take() {
            let slept = asleep.elapsed().as_secs_f64();
            let reason = self.reason;
            self.print_line(
                "WAKES",
                BOLD,
                &format!("after {slept:.1} s, because {reason}; the model is called"),
            )?;
        }
        self.state.answers += 1;
        if !text.is_empty() {
            self.print_line("agent", GREEN, &format!("“{}”", plain(text)))?;
        }
        for call in calls {
            self.state.last_call.clone_from(&call.id);
            self.state.subscribed |= call.name == "doorbell";
            let call = format!("calls {} {}", call.name, arguments(&call.arguments));
            self.print_line("agent", GREEN, call.trim_end())?;
        }
        Ok(())
    }

    fn print_result(&mut self, text: &str) -> anyhow::Result<()> {
        match text {
            texts::STILL_RUNNING | texts::SLEEP_ENDED_EARLY => Ok(()),
            texts::INTERRUPTED => {
                self.reason = "the call was cancelled";
                Ok(())
            }
            texts::SLEEP_OVER => {
                self.reason = "its sleep is over";
                self.print_line("clock", YELLOW, texts::SLEEP_OVER)
            }
            text => {
                let kind = match self.reason {
                    RANG => "event",
                    REPORTED => "report",
                    _ => "result",
                };
                if kind == "result" {
                    self.reason = "a result arrived";
                }
                self.print_line(kind, YELLOW, &plain(text))
            }
        }
    }

    fn print_status(&mut self, update: &StatusEvent) -> anyhow::Result<()> {
        self.state.status = Some(update.status);
        if let Some(why) = &update.why {
            bail!("the agent of the demo stopped: {why}");
        }
        if !matches!(update.status, Status::Waiting | Status::Idle) || self.asleep.is_some() {
            return Ok(());
        }
        self.asleep = Some(Instant::now());
        self.reason = "";
        let until = match (update.status, self.state.open.is_empty(), self.state.subscribed) {
            (Status::Waiting, ..) => self.wake_condition(),
            (_, false, _) => "until the call returns, or you send a message".into(),
            (_, true, false) => "until you send a message".into(),
            (_, true, true) => "until you send a message, or the doorbell rings".into(),
        };
        self.print_line("SLEEPS", BOLD, &until)
    }

    /// Describes what a waiting agent waits for.
    fn wake_condition(&self) -> String {
        let sleep = self.state.open.values().find(|call| call.tool == texts::SLEEP);
        match sleep.and_then(|call| Some(call.until?.since(call.since))) {
            Some(time) => format!("for {:.0} s, or until any input", time.as_secs_f64()),
            None => "until the call returns".into(),
        }
    }
}

/// Column at which texts begin.
const INDENT: usize = 17;
/// Maximum width of the output, and its width if stdout is not a terminal.
const WIDTH: usize = 100;

/// Prints a line: the time, the speaker in a column of its own, and the text.
pub(super) fn print_line(began: Instant, who: &str, style: Style, what: &str) -> anyhow::Result<()> {
    let time = styled(DIM, &format!("{:5.1} s", began.elapsed().as_secs_f64()));
    let head = format!("{time}  {}{:pad$}", styled(style, who), "", pad = 8 - who.len());
    let what_style = if who.is_empty() { DIM } else { Style::new() };
    Ok(print(&format!("{head}{}\n", paragraph(what, INDENT, what_style)))?)
}

/// Wraps a text and indents all lines but the first.
pub(super) fn paragraph(text: &str, indent: usize, style: Style) -> String {
    let width = terminal_width().unwrap_or(WIDTH).min(WIDTH).saturating_sub(indent);
    let lines: Vec<String> = wrap(text, width).iter().map(|line| styled(style, line)).collect();
    lines.join(&format!("\n{:indent$}", ""))
}

fn wake_reason(call: &Call) -> &'static str {
    match call.name.as_str() {
        "doorbell" => RANG,
        texts::SPAWN_THREAD => REPORTED,
        _ => "the background call has returned",
    }
}

/// Formats arguments as `(what: bread, seconds: 7)`.
fn arguments(arguments: &Value) -> String {
    let Value::Object(fields) = arguments else { return String::new() };
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let fields: Vec<String> = fields.iter().map(|(key, value)| format!("{key}: {}", text(value))).collect();
    if fields.is_empty() { String::new() } else { format!("({})", fields.join(", ")) }
}
