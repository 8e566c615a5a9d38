//! Output of a chat: finished lines, and on a terminal live rows for the answer in progress and open calls.

use std::collections::{BTreeMap, VecDeque};

use rap_api::{
    CallEvent, CallEventKind, ChildEvent, Delta, Entry, Item, OpenCall, Question, QuestionKind, Status,
    StatusEvent, Thread, Time,
};

use super::console::Console;
use super::questions::Questions;
use super::screen::Size;
use super::streamed::{Streamed, lines};
use super::tool_views::ToolViews;
use crate::commands::inbox::{is_approval, numbered};
use crate::status_text;
use crate::table::{BOLD, DIM, RED, YELLOW, cut, one_line, plain, styled};
use crate::time_format;
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
    views: ToolViews,
    /// Rows of the open questions.
    questions: Vec<String>,
    /// Text of the last notice. A reason that repeats it is not shown again.
    noticed: Option<String>,
    /// Last status, and the time since which the thread has it.
    status: Option<(StatusEvent, Time)>,
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
            views: ToolViews::default(),
            questions: Vec::new(),
            noticed: None,
            status: None,
        }
    }

    /// Prints the first lines of the chat.
    pub(super) fn greet(&mut self, thread: &Thread) -> anyhow::Result<()> {
        if !self.console.is_terminal() {
            return Ok(());
        }
        let keys = "^C interrupts the agent, ^C twice or ^D exits, /help shows more";
        let title = thread.title.as_ref().map_or(String::new(), |title| format!(" “{}”", one_line(title)));
        let (id, agent) = (styled(BOLD, &one_line(&thread.id)), one_line(&thread.agent));
        self.print(&format!("thread {id}{title}, agent {agent}"))?;
        self.note(keys)
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
    pub(super) fn message(&mut self, text: &str, images: &[&str]) -> anyhow::Result<()> {
        if !self.console.is_terminal() {
            return Ok(());
        }
        self.sent.push(text.to_owned());
        let images: String = images.iter().map(|name| format!(" [image: {}]", one_line(name))).collect();
        self.show(Line { who: "you", what: format!("{}{images}", plain(text)) })
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
        let text = self.wrapped(text, INDENT);
        self.print(&styled(DIM, &format!("{:INDENT$}{text}", "")))
    }

    /// Wraps a text between words, with its lines indented. A pipe gets it on one line.
    fn wrapped(&self, text: &str, indent: usize) -> String {
        match self.console.size() {
            Some(size) => {
                let width = size.columns.saturating_sub(indent + 1).max(1);
                lines(&plain(text), width).join(&format!("\n{:indent$}", ""))
            }
            None => plain(text),
        }
    }

    pub(super) fn warn(&mut self, text: &str) -> anyhow::Result<()> {
        let text = self.wrapped(text, 0);
        self.print(&styled(RED, &text))
    }

    pub(super) fn entry(&mut self, entry: &Entry) -> anyhow::Result<()> {
        let lines = self.transcript.lines(entry);
        match &entry.item {
            Item::User { text, from: None, .. } => {
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
            Item::Notice { text } => self.noticed = Some(text.clone()),
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
        let same = |(last, _): &(StatusEvent, Time)| last.status == update.status && last.turn == update.turn;
        let since =
            self.status.as_ref().filter(|last| same(last)).map_or_else(Time::now, |(_, since)| *since);
        self.status = Some((update.clone(), since));
        if update.status == Status::Idle {
            self.views.calls_ended();
        }
        self.show_past()
    }

    /// Tells why a thread failed or is paused, and when and how it continues.
    pub(super) fn why(&mut self, thread: &str, update: &StatusEvent) -> anyhow::Result<()> {
        let why = match update.why.as_deref().unwrap_or_default() {
            why if self.noticed.as_deref() == Some(why) => {
                status_text::with_status_prefix(update.status, "see above")
            }
            why => status_text::with_status_prefix(update.status, &one_line(why)),
        };
        let by_hand = if self.console.is_terminal() {
            "/resume".to_owned()
        } else {
            format!("rap threads resume {thread}")
        };
        let next = match update.retry_at {
            Some(at) => {
                format!("continues {}, or at once with: {by_hand}", time_format::exact(at, Time::now()))
            }
            None => format!("continue with: {by_hand}"),
        };
        self.warn(&format!("{why}; {next}"))
    }

    /// Shows that a child was spawned, for events or by the model.
    pub(super) fn child(&mut self, child: &ChildEvent) -> anyhow::Result<()> {
        self.show(crate::transcript::child_line(child))
    }

    /// Takes a view that a tool shows.
    pub(super) fn tool_view(&mut self, view: &rap_api::View) {
        self.views.push(view, self.past.is_some());
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
            CallEventKind::Opened => self.open_calls.insert(id, (update.call, 0)),
            _ => self.open_calls.remove(&id),
        };
        if self.open_calls.is_empty() {
            self.views.calls_ended();
        }
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
                let asks = self.wrapped(&format!("{tool} asks: {}", one_line(prompt)), 0);
                self.print(&styled(YELLOW, &asks))?;
                for (index, choice) in numbered(choices).iter().enumerate() {
                    let marker = if index == *default { " (default)" } else { "" };
                    self.print(&format!("  {}{marker}", one_line(choice)))?;
                }
                let how = if is_approval(choices) { "y or n" } else { "the number or the text of a choice" };
                self.note(&format!(
                    "answer with {how}; anything else is sent to the agent, and the question stays open"
                ))
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
    pub(super) fn refresh(&mut self, questions: &Questions) -> anyhow::Result<()> {
        for line in self.views.due() {
            self.show(line)?;
        }
        let Some(size) = self.console.size() else { return self.print_milestones() };
        self.questions = questions.rows(size.columns.saturating_sub(1).max(1));
        let live = self.live();
        self.console.show("", live)
    }

    /// Rows that are redrawn in place.
    fn live(&self) -> Vec<String> {
        let Some(size) = self.console.size() else { return Vec::new() };
        let mut below = self.call_rows(size);
        below.extend(self.questions.iter().map(|row| styled(YELLOW, row)));
        let answer = self.streamed.rows(text_width(size), size.rows.saturating_sub(below.len() + 2));
        let waiting = if answer.is_empty() { self.waiting_row(size) } else { None };
        let mut rows: Vec<String> = Vec::new();
        for (number, row) in answer.iter().enumerate() {
            let row = cut(row, text_width(size));
            rows.push(match number {
                0 => Line { who: "agent", what: row }.render(),
                _ => format!("{:INDENT$}{row}", ""),
            });
        }
        rows.extend(waiting);
        rows.extend(below);
        rows
    }

    /// Row that says that the model is being asked, or when it is asked again.
    fn waiting_row(&self, size: Size) -> Option<String> {
        let (status, since) = self.status.as_ref()?;
        let now = Time::now();
        let text = match (status.status, status.retry_at) {
            (Status::Running, _) => {
                format!("… asking the model for {}", time_format::long_duration(now.since(*since)))
            }
            (Status::Failed | Status::NeedsYou, Some(at)) if at > now => {
                format!("… continues {}", time_format::exact(at, now))
            }
            _ => return None,
        };
        Some(styled(DIM, &format!("{:INDENT$}{}", "", cut(&text, text_width(size)))))
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
        texts.extend(self.views.progress());
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
