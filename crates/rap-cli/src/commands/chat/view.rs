//! Output of a chat: finished lines, and on a terminal live rows for the answer in progress and open calls.

use std::collections::{BTreeMap, VecDeque};

use rap_api::{
    CallEvent, CallState, Delta, Entry, Item, OpenCall, Question, QuestionKind, Status, StatusEvent, Time,
};

use super::console::Console;
use super::screen::Size;
use super::streamed::{Streamed, lines};
use crate::commands::inbox::numbered;
use crate::status_text;
use crate::table::{BOLD, DIM, RED, YELLOW, cut, one_line, plain, styled};
use crate::transcript::{Line, Transcript};

/// Shown at the start of a chat with the scripted model.
const SCRIPTED: &str = "a scripted model answers, not a language model: it repeats your text and follows lines such as \
                        `call TOOL {json}`; to use a real model, set provider, name and api_key in the [model] section \
                        of rap.toml and restart rap serve";
/// Number of lines of the existing history that are shown.
const HISTORY_LINES: usize = 12;
/// Durations of a call, in seconds, after which a pipe gets a line about it; then every hour.
const MILESTONES: [u64; 8] = [5, 10, 30, 60, 120, 300, 600, 1800];
/// Maximum number of open calls with a row of their own.
const CALL_ROWS: usize = 5;
/// Width of the column with the speaker.
const INDENT: usize = 8;

pub(super) struct View {
    pub console: Console,
    transcript: Transcript,
    streamed: Streamed,
    /// Existing history, collected until all of it has arrived; then `None`.
    past: Option<VecDeque<Line>>,
    /// Open calls, with the number of milestones printed for each.
    open_calls: BTreeMap<String, (OpenCall, usize)>,
    /// Messages of this chat that are already on the screen. Their entries are not shown again.
    sent: Vec<String>,
}

impl View {
    pub(super) fn new(console: Console) -> View {
        View {
            console,
            transcript: Transcript::default(),
            streamed: Streamed::default(),
            past: Some(VecDeque::new()),
            open_calls: BTreeMap::new(),
            sent: Vec::new(),
        }
    }

    /// Prints the first lines of the chat.
    pub(super) fn greet(&mut self, thread: &str, agent: &str) -> anyhow::Result<()> {
        if !self.console.is_terminal() {
            return Ok(());
        }
        let keys = "^C interrupts the agent, ^C twice or ^D exits";
        self.print(&format!("thread {}, agent {}; {keys}", styled(BOLD, &one_line(thread)), one_line(agent)))
    }

    /// Tells the user that no language model answers. On a pipe the note goes to stderr.
    pub(super) fn warn_scripted(&mut self) -> anyhow::Result<()> {
        if !self.console.is_terminal() {
            eprintln!("{SCRIPTED}");
            return Ok(());
        }
        self.show(Line { who: "note", what: SCRIPTED.into() })
    }

    /// Shows a message of the user at once. On a pipe it is shown when it is in the history.
    pub(super) fn message(&mut self, text: &str) -> anyhow::Result<()> {
        if !self.console.is_terminal() {
            return Ok(());
        }
        self.sent.push(text.to_owned());
        self.show(Line { who: "you", what: plain(text) })
    }

    /// Reports that a message was not accepted.
    pub(super) fn message_refused(&mut self, text: &str, why: &str) -> anyhow::Result<()> {
        self.sent.retain(|sent| sent != text);
        self.warn(&format!("not sent: {why}"))
    }

    /// Prints a line above the live rows.
    pub(super) fn print(&mut self, line: &str) -> anyhow::Result<()> {
        let live = self.live();
        self.console.show(&format!("{line}\n"), live)
    }

    fn show(&mut self, line: Line) -> anyhow::Result<()> {
        let what = match self.console.size() {
            Some(size) => lines(&line.what, text_width(size)).join("\n"),
            None => line.what,
        };
        self.print(&Line { what, ..line }.render())
    }

    pub(super) fn note(&mut self, text: &str) -> anyhow::Result<()> {
        self.print(&styled(DIM, &format!("{:INDENT$}{}", "", plain(text))))
    }

    pub(super) fn warn(&mut self, text: &str) -> anyhow::Result<()> {
        self.print(&styled(RED, &plain(text)))
    }

    pub(super) fn entry(&mut self, entry: &Entry) -> anyhow::Result<()> {
        let lines = self.transcript.lines(entry);
        match &entry.item {
            Item::User { text, from: None } => {
                // The model request starts again.
                self.streamed.mark_dropped();
                if let Some(index) = self.sent.iter().position(|sent| sent == text) {
                    self.sent.remove(index);
                    return Ok(());
                }
            }
            Item::Assistant { calls, .. } if !calls.iter().any(|call| call.synthetic) => {
                self.streamed.finish()
            }
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

    /// Hides the answer in progress, because it or the connection failed.
    pub(super) fn drop_answer(&mut self) {
        self.streamed.mark_dropped();
    }

    pub(super) fn status(&mut self, update: &StatusEvent) -> anyhow::Result<()> {
        self.streamed.set_status(update.turn, update.status);
        self.show_past()
    }

    pub(super) fn why(&mut self, thread: &str, status: Status, why: &str) -> anyhow::Result<()> {
        let word = if status == Status::Failed { "failed" } else { "paused" };
        self.warn(&format!("{word}: {}; continue with: rap threads resume {thread}", one_line(why)))
    }

    /// Shows the last lines of the existing history on a terminal. A pipe gets only new entries.
    fn show_past(&mut self) -> anyhow::Result<()> {
        let mut past = self.past.take().unwrap_or_default();
        if self.console.is_terminal() {
            past.drain(..past.len().saturating_sub(HISTORY_LINES));
            past.into_iter().try_for_each(|line| self.show(line))?;
        }
        Ok(())
    }

    pub(super) fn call(&mut self, update: CallEvent) {
        let id = update.call.call_id.clone();
        match update.state {
            CallState::Open => self.open_calls.insert(id, (update.call, 0)),
            _ => self.open_calls.remove(&id),
        };
    }

    /// Forgets open calls, because a new connection sends all of them again.
    pub(super) fn reconnected(&mut self) {
        self.open_calls.clear();
    }

    pub(super) fn question(&mut self, question: &Question) -> anyhow::Result<()> {
        self.show_past()?;
        let tool = one_line(&question.tool);
        match &question.kind {
            QuestionKind::Choice { prompt, choices, default } => {
                self.print(&styled(YELLOW, &format!("{tool} asks: {}", one_line(prompt))))?;
                for (index, choice) in numbered(choices).iter().enumerate() {
                    let marker = if index == *default { " (default)" } else { "" };
                    self.print(&format!("  {}{marker}", one_line(choice)))?;
                }
                self.note("answer with a number; any other text is sent to the agent")
            }
            QuestionKind::SignIn { auth_url } => self
                .print(&styled(YELLOW, &format!("{tool} asks you to sign in: open {}", one_line(auth_url)))),
            QuestionKind::Unknown => {
                self.warn(&format!("{tool} asks something that this version of rap does not know"))
            }
        }
    }

    /// Shows the chosen answer on the terminal where it was typed.
    pub(super) fn answered(&mut self, choice: &str) -> anyhow::Result<()> {
        let line = Line { who: "you", what: format!("answer: {}", one_line(choice)) };
        if self.console.is_terminal() { self.show(line) } else { Ok(()) }
    }

    /// Redraws the live rows of a terminal, or prints due milestones on a pipe.
    pub(super) fn refresh(&mut self) -> anyhow::Result<()> {
        if !self.console.is_terminal() {
            return self.print_milestones();
        }
        let live = self.live();
        self.console.show("", live)
    }

    /// Rows that are redrawn in place.
    fn live(&self) -> Vec<String> {
        let Some(size) = self.console.size() else { return Vec::new() };
        let calls = self.call_rows(size);
        let answer = self.streamed.rows(text_width(size), size.rows.saturating_sub(calls.len() + 2));
        let mut rows: Vec<String> = Vec::new();
        for (number, row) in answer.iter().enumerate() {
            let row = cut(row, text_width(size));
            rows.push(match number {
                0 => Line { who: "agent", what: row }.render(),
                _ => format!("{:INDENT$}{row}", ""),
            });
        }
        rows.extend(calls);
        rows
    }

    fn call_rows(&self, size: Size) -> Vec<String> {
        let now = Time::now();
        let mut calls: Vec<&OpenCall> = self.open_calls.values().map(|(call, _)| call).collect();
        calls.sort_by_key(|call| call.since);
        let mut texts: Vec<String> =
            calls.iter().take(CALL_ROWS).map(|call| status_text::call_progress(call, now)).collect();
        if calls.len() > CALL_ROWS {
            texts.push(format!("and {} more", calls.len() - CALL_ROWS));
        }
        let row = |text: &String| cut(&one_line(&format!("… {text}")), text_width(size));
        texts.iter().map(|text| styled(DIM, &format!("{:INDENT$}{}", "", row(text)))).collect()
    }

    /// Prints a line for each open call that has passed another milestone.
    fn print_milestones(&mut self) -> anyhow::Result<()> {
        let now = Time::now();
        let mut due = Vec::new();
        for (call, told) in self.open_calls.values_mut() {
            let elapsed = now.since(call.since).as_secs();
            let passed = MILESTONES.iter().filter(|milestone| elapsed >= **milestone).count();
            let passed = passed + usize::try_from(elapsed / 3600).unwrap_or(usize::MAX);
            if passed > *told {
                *told = passed;
                due.push(format!("… {}", one_line(&status_text::call_progress(call, now))));
            }
        }
        due.iter().try_for_each(|text| self.note(text))
    }
}

/// Width of the text column.
fn text_width(size: Size) -> usize {
    size.columns.saturating_sub(INDENT + 1).max(1)
}
