//! Telling what happens, as it happens.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anstyle::Style;
use anyhow::bail;
use rap_agent::words;
use serde_json::{Value, json};

use super::kitchen::Kitchen;
use super::runtime::Runtime;
use crate::api::{Call, CallState, Entry, Item, Status, StatusNews, Waiting, text_of};
use crate::client::{Client, Event, Follower, News, idempotency_key};
use crate::commands::print;
use crate::table::{BOLD, CYAN, DIM, GREEN, YELLOW, plain, styled, terminal_width, wrap};

/// The demo's thread.
pub(super) const THREAD: &str = "demo";
/// Nothing in the story takes longer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why the agent wakes up when it rings.
const RANG: &str = "the doorbell rang";
/// And when its child has something to say.
const REPORTED: &str = "its child reports";

pub(super) struct Story {
    pub client: Client,
    pub runtime: Runtime,
    pub kitchen: Kitchen,
    follower: Follower,
    began: Instant,
    asleep: Option<Instant>,
    /// Why the agent wakes up next.
    reason: &'static str,
    state: State,
}

/// What is known of the agent.
#[derive(Default)]
pub(super) struct State {
    pub status: Option<Status>,
    /// Its open calls.
    pub open: HashMap<String, Waiting>,
    last_call: String,
    pub answers: usize,
    pub told: Vec<String>,
    pub lost: bool,
    subscribed: bool,
}

impl State {
    pub(super) fn is_at_rest(&self) -> bool {
        self.status == Some(Status::Idle) && self.open.is_empty()
    }

    fn is_asleep(&self) -> bool {
        matches!(self.status, Some(Status::Waiting | Status::Idle))
    }

    pub(super) fn has_told(&self, text: &str) -> bool {
        self.told.iter().any(|told| told == text)
    }
}

impl Story {
    pub(super) async fn begin(began: Instant, runtime: Runtime, kitchen: Kitchen) -> anyhow::Result<Story> {
        let client = Client::new(&runtime.url, None)?;
        client.create_thread(&json!({"id": THREAD, "title": "The demo"})).await?;
        let follower = Follower::new(client.clone(), THREAD, 0);
        let state = State::default();
        let mut story = Story { client, runtime, kitchen, follower, began, asleep: None, reason: "", state };
        // The stream says what is there already, which is nothing.
        while story.state.status.is_none() {
            if let News::Event(Event::Status(news)) = story.follower.next().await? {
                story.state.status = Some(news.status);
            }
        }
        story.asleep = Some(Instant::now());
        Ok(story)
    }

    pub(super) fn tell(&self, who: &str, style: Style, what: &str) -> anyhow::Result<()> {
        tell(self.began, who, style, what)
    }

    /// An explanation, for whoever reads along.
    pub(super) fn explain(&self, what: &str) -> anyhow::Result<()> {
        self.tell("", DIM, what)
    }

    /// The call that the agent made last.
    pub(super) fn last_call(&self) -> String {
        self.state.last_call.clone()
    }

    /// A user speaks.
    pub(super) async fn say(&mut self, text: &str) -> anyhow::Result<()> {
        self.state.status = None;
        self.client.say(THREAD, &json!({"text": text}), &idempotency_key()).await?;
        Ok(())
    }

    /// Tells what happens until it is so.
    pub(super) async fn until(&mut self, what: &str, is_so: impl Fn(&State) -> bool) -> anyhow::Result<()> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while !is_so(&self.state) {
            if !self.next(deadline).await? {
                bail!("the demo waited too long until {what}");
            }
        }
        Ok(())
    }

    /// Tells what happens for so long.
    pub(super) async fn pass(&mut self, time: Duration) -> anyhow::Result<()> {
        let end = tokio::time::Instant::now() + time;
        while self.next(end).await? {}
        Ok(())
    }

    /// Tells the next thing that happens, if one does in time.
    async fn next(&mut self, deadline: tokio::time::Instant) -> anyhow::Result<bool> {
        tokio::select! {
            // What the oven does, the agent learns of later; that the agent has called it, was before.
            biased;
            Some(text) = self.kitchen.told.recv(), if self.state.is_asleep() => {
                self.tell("oven", YELLOW, &text)?;
                self.state.told.push(text);
            }
            news = self.follower.next() => self.learn(news?)?,
            () = tokio::time::sleep_until(deadline) => return Ok(false),
        }
        Ok(true)
    }

    /// The runtime was started again.
    pub(super) fn connect_again(&mut self) {
        self.follower.hurry();
    }

    fn learn(&mut self, news: News) -> anyhow::Result<()> {
        match news {
            News::Lost => self.state.lost = true,
            News::Back => {
                self.state.lost = false;
                self.state.open.clear();
            }
            News::LeftOut(left_out) => self.explain(&left_out.to_string())?,
            News::Event(Event::Entry(entry)) => self.tell_entry(&entry)?,
            News::Event(Event::Call(news)) => {
                match news.state {
                    CallState::Open => self.state.open.insert(news.call.call_id.clone(), news.call),
                    CallState::Settled => self.state.open.remove(&news.call.call_id),
                };
            }
            News::Event(Event::Status(news)) => self.tell_status(&news)?,
            News::Event(_) => {}
        }
        Ok(())
    }

    fn tell_entry(&mut self, entry: &Entry) -> anyhow::Result<()> {
        match &entry.item {
            Item::User { text, .. } => {
                self.reason = "you said something";
                self.tell("you", CYAN, &plain(text))
            }
            Item::Assistant { calls, .. } if calls.iter().any(|call| call.synthetic) => {
                self.reason = occasion(&calls[0]);
                Ok(())
            }
            Item::Assistant { text, calls } => self.tell_answer(text, calls),
            Item::Result { content, .. } => self.tell_result(&text_of(content)),
            Item::Notice { text } => self.explain(&plain(text)),
            Item::Summary { .. } | Item::Other => Ok(()),
        }
    }

    fn tell_answer(&mut self, text: &str, calls: &[Call]) -> anyhow::Result<()> {
        if let Some(asleep) = self.asleep.take() {
            let slept = asleep.elapsed().as_secs_f64();
            let reason = self.reason;
            self.tell("WAKES", BOLD, &format!("after {slept:.1} s, because {reason}; the model is asked"))?;
        }
        self.state.answers += 1;
        if !text.is_empty() {
            self.tell("agent", GREEN, &format!("“{}”", plain(text)))?;
        }
        for call in calls {
            self.state.last_call.clone_from(&call.id);
            self.state.subscribed |= call.name == "doorbell";
            let call = format!("calls {} {}", call.name, arguments(&call.arguments));
            self.tell("agent", GREEN, call.trim_end())?;
        }
        Ok(())
    }

    fn tell_result(&mut self, text: &str) -> anyhow::Result<()> {
        match text {
            words::STILL_RUNNING | words::ENDED => Ok(()),
            words::INTERRUPTED => {
                self.reason = "the call was cancelled";
                Ok(())
            }
            words::SLEPT => {
                self.reason = "its time has come";
                self.tell("clock", YELLOW, words::SLEPT)
            }
            text => {
                let kind = match self.reason {
                    RANG => "event",
                    REPORTED => "report",
                    _ => "result",
                };
                if kind == "result" {
                    self.reason = "a result has come";
                }
                self.tell(kind, YELLOW, &plain(text))
            }
        }
    }

    fn tell_status(&mut self, news: &StatusNews) -> anyhow::Result<()> {
        self.state.status = Some(news.status);
        if let Some(why) = &news.why {
            bail!("the demo's agent stopped: {why}");
        }
        if !matches!(news.status, Status::Waiting | Status::Idle) || self.asleep.is_some() {
            return Ok(());
        }
        self.asleep = Some(Instant::now());
        self.reason = "";
        let until = match (news.status, self.state.open.is_empty(), self.state.subscribed) {
            (Status::Waiting, ..) => self.wakes(),
            (_, false, _) => "until the call returns, or you say something".into(),
            (_, true, false) => "until you say something".into(),
            (_, true, true) => "until you say something, or it rings at the door".into(),
        };
        self.tell("SLEEPS", BOLD, &until)
    }

    /// What an agent waits for that waits.
    fn wakes(&self) -> String {
        let sleep = self.state.open.values().find(|call| call.tool == words::SLEEP);
        match sleep.and_then(|call| Some(call.until?.since(call.since))) {
            Some(time) => format!("for {:.0} s, or until something happens", time.as_secs_f64()),
            None => "until the call returns".into(),
        }
    }
}

/// Where a told text begins.
const INDENT: usize = 17;
/// How wide the story is where nobody says.
const WIDTH: usize = 100;

/// Who in a column of its own, behind the time.
pub(super) fn tell(began: Instant, who: &str, style: Style, what: &str) -> anyhow::Result<()> {
    let time = styled(DIM, &format!("{:5.1} s", began.elapsed().as_secs_f64()));
    let head = format!("{time}  {}{:pad$}", styled(style, who), "", pad = 8 - who.len());
    let what_style = if who.is_empty() { DIM } else { Style::new() };
    Ok(print(&format!("{head}{}\n", paragraph(what, INDENT, what_style)))?)
}

/// A text that stands this far from the left in all of its lines but the first.
pub(super) fn paragraph(text: &str, indent: usize, style: Style) -> String {
    let width = terminal_width().unwrap_or(WIDTH).min(WIDTH).saturating_sub(indent);
    let lines: Vec<String> = wrap(text, width).iter().map(|line| styled(style, line)).collect();
    lines.join(&format!("\n{:indent$}", ""))
}

fn occasion(call: &Call) -> &'static str {
    match call.name.as_str() {
        "doorbell" => RANG,
        words::SPAWN_THREAD => REPORTED,
        _ => "the call that went on has returned",
    }
}

/// `what: bread, seconds: 7`.
fn arguments(arguments: &Value) -> String {
    let Value::Object(fields) = arguments else { return String::new() };
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let fields: Vec<String> = fields.iter().map(|(key, value)| format!("{key}: {}", text(value))).collect();
    if fields.is_empty() { String::new() } else { format!("({})", fields.join(", ")) }
}
