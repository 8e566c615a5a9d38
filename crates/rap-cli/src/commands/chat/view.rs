//! What a chat shows: what is over as lines, and on a terminal what goes on in place below them.

use std::collections::{BTreeMap, VecDeque};

use super::console::Console;
use super::screen::Size;
use super::streamed::{Streamed, lines};
use crate::age;
use crate::api::{Asked, CallNews, CallState, Delta, Entry, Item, Question, Status, StatusNews, Waiting};
use crate::commands::inbox::numbered;
use crate::table::{BOLD, DIM, RED, YELLOW, cut, one_line, styled};
use crate::transcript::{Line, Transcript};
use crate::waits;

/// How much of an older conversation is shown.
const REMEMBERED: usize = 12;
/// When it is said on a pipe how long a call has been running, in seconds; every hour after that.
const MILESTONES: [u64; 8] = [5, 10, 30, 60, 120, 300, 600, 1800];
/// How many running calls have a row of their own.
const CALL_ROWS: usize = 5;
/// Where texts begin, behind who says them.
const INDENT: usize = 8;

pub(super) struct View {
    pub console: Console,
    transcript: Transcript,
    streamed: Streamed,
    /// What was there already, until all of it has been told.
    past: Option<VecDeque<Line>>,
    /// Open calls, and how many milestones of each were told.
    running: BTreeMap<String, (Waiting, usize)>,
    /// What was said here, and is not to be shown again.
    said: Vec<String>,
}

impl View {
    pub(super) fn new(console: Console) -> View {
        View {
            console,
            transcript: Transcript::default(),
            streamed: Streamed::default(),
            past: Some(VecDeque::new()),
            running: BTreeMap::new(),
            said: Vec::new(),
        }
    }

    pub(super) fn hello(&mut self, thread: &str, agent: &str) -> anyhow::Result<()> {
        if !self.console.is_terminal() {
            return Ok(());
        }
        let keys = "^C stops the agent, ^C twice or ^D leaves";
        self.put(&format!("thread {}, agent {agent}; {keys}", styled(BOLD, thread)))
    }

    /// Somebody here says this. On a terminal it stands there at once, on a pipe when it is in the history.
    pub(super) fn say(&mut self, text: &str) -> anyhow::Result<()> {
        if !self.console.is_terminal() {
            return Ok(());
        }
        self.said.push(text.to_owned());
        self.show(Line { who: "you", what: text.to_owned() })
    }

    /// What was said here was not taken.
    pub(super) fn unsay(&mut self, text: &str, why: &str) -> anyhow::Result<()> {
        self.said.retain(|said| said != text);
        self.warn(&format!("not said: {why}"))
    }

    /// Puts a line above what goes on, for good.
    pub(super) fn put(&mut self, line: &str) -> anyhow::Result<()> {
        let live = self.live();
        self.console.show(&format!("{line}\n"), live)
    }

    fn show(&mut self, line: Line) -> anyhow::Result<()> {
        let what = match self.console.size() {
            Some(size) => lines(&line.what, room(size)).join("\n"),
            None => line.what,
        };
        self.put(&Line { what, ..line }.render())
    }

    pub(super) fn note(&mut self, text: &str) -> anyhow::Result<()> {
        self.put(&styled(DIM, &format!("{:INDENT$}{text}", "")))
    }

    pub(super) fn warn(&mut self, text: &str) -> anyhow::Result<()> {
        self.put(&styled(RED, text))
    }

    pub(super) fn entry(&mut self, entry: &Entry) -> anyhow::Result<()> {
        let lines = self.transcript.lines(entry);
        match &entry.item {
            Item::User { text, from: None } => {
                // The model is asked anew.
                self.streamed.drop_it();
                if let Some(place) = self.said.iter().position(|said| said == text) {
                    self.said.remove(place);
                    return Ok(());
                }
            }
            Item::Assistant { calls, .. } if !calls.iter().any(|call| call.synthetic) => self.streamed.end(),
            _ => {}
        }
        if let Some(past) = &mut self.past {
            past.extend(lines);
            return Ok(());
        }
        lines.into_iter().try_for_each(|line| self.show(line))
    }

    pub(super) fn delta(&mut self, delta: &Delta) {
        self.streamed.push(delta);
    }

    /// Something went wrong with the answer in progress, or with the connection.
    pub(super) fn drop_answer(&mut self) {
        self.streamed.drop_it();
    }

    pub(super) fn status(&mut self, news: &StatusNews) -> anyhow::Result<()> {
        self.streamed.see(news.turn, news.status);
        self.show_past()
    }

    pub(super) fn why(&mut self, thread: &str, status: Status, why: &str) -> anyhow::Result<()> {
        let word = if status == Status::Failed { "failed" } else { "paused" };
        self.warn(&format!("{word}: {}; let it go on with: rap threads resume {thread}", one_line(why)))
    }

    /// Everything before has been told: a person sees the last of it, a pipe only what is new.
    fn show_past(&mut self) -> anyhow::Result<()> {
        let mut past = self.past.take().unwrap_or_default();
        if self.console.is_terminal() {
            past.drain(..past.len().saturating_sub(REMEMBERED));
            past.into_iter().try_for_each(|line| self.show(line))?;
        }
        Ok(())
    }

    pub(super) fn call(&mut self, news: CallNews) {
        let id = news.call.call_id.clone();
        match news.state {
            CallState::Open => self.running.insert(id, (news.call, 0)),
            CallState::Settled => self.running.remove(&id),
        };
    }

    /// A new connection tells the calls that are open from the beginning.
    pub(super) fn start_over(&mut self) {
        self.running.clear();
    }

    pub(super) fn question(&mut self, question: &Question) -> anyhow::Result<()> {
        self.show_past()?;
        let tool = one_line(&question.tool);
        match &question.asked {
            Asked::Choice { prompt, choices, default } => {
                self.put(&styled(YELLOW, &format!("{tool} asks: {}", one_line(prompt))))?;
                for (index, choice) in numbered(choices).iter().enumerate() {
                    let usual = if index == *default { " (default)" } else { "" };
                    self.put(&format!("  {}{usual}", one_line(choice)))?;
                }
                self.note("answer with a number; anything else is said to the agent")
            }
            Asked::SignIn { auth_url } => self
                .put(&styled(YELLOW, &format!("{tool} wants you to sign in: open {}", one_line(auth_url)))),
        }
    }

    /// Shows an answer to a question where it was typed.
    pub(super) fn answered(&mut self, choice: &str) -> anyhow::Result<()> {
        let line = Line { who: "you", what: format!("answer: {}", one_line(choice)) };
        if self.console.is_terminal() { self.show(line) } else { Ok(()) }
    }

    /// Shows what goes on: in place on a terminal, on a pipe now and then.
    pub(super) fn refresh(&mut self) -> anyhow::Result<()> {
        if !self.console.is_terminal() {
            return self.milestones();
        }
        let live = self.live();
        self.console.show("", live)
    }

    /// The rows that change in place.
    fn live(&self) -> Vec<String> {
        let Some(size) = self.console.size() else { return Vec::new() };
        let calls = self.call_rows(size);
        let answer = self.streamed.rows(room(size), size.rows.saturating_sub(calls.len() + 2));
        let mut rows: Vec<String> = Vec::new();
        for (number, row) in answer.iter().enumerate() {
            let row = cut(row, room(size));
            rows.push(match number {
                0 => Line { who: "agent", what: row }.render(),
                _ => format!("{:INDENT$}{row}", ""),
            });
        }
        rows.extend(calls);
        rows
    }

    fn call_rows(&self, size: Size) -> Vec<String> {
        let now = age::now();
        let mut calls: Vec<&Waiting> = self.running.values().map(|(call, _)| call).collect();
        calls.sort_by_key(|call| call.since);
        let mut texts: Vec<String> =
            calls.iter().take(CALL_ROWS).map(|call| waits::running(call, now)).collect();
        if calls.len() > CALL_ROWS {
            texts.push(format!("and {} more", calls.len() - CALL_ROWS));
        }
        let row = |text: &String| cut(&one_line(&format!("… {text}")), room(size));
        texts.iter().map(|text| styled(DIM, &format!("{:INDENT$}{}", "", row(text)))).collect()
    }

    fn milestones(&mut self) -> anyhow::Result<()> {
        let now = age::now();
        let mut due = Vec::new();
        for (call, told) in self.running.values_mut() {
            let elapsed = now.since(call.since).as_secs();
            let passed = MILESTONES.iter().filter(|milestone| elapsed >= **milestone).count();
            let passed = passed + usize::try_from(elapsed / 3600).unwrap_or(usize::MAX);
            if passed > *told {
                *told = passed;
                due.push(format!("… {}", one_line(&waits::running(call, now))));
            }
        }
        due.iter().try_for_each(|text| self.note(text))
    }
}

/// How wide a text may be beside who says it.
fn room(size: Size) -> usize {
    size.columns.saturating_sub(INDENT + 1).max(1)
}
