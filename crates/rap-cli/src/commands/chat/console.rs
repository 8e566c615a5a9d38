//! Where a chat is read and shown: an edited line on a terminal, plain lines on a pipe.
//!
//! On a terminal the line editor has a thread of its own, which reads on when the last input has been dealt with. So
//! the terminal is as it was whenever the chat ends; where it ends while a line is edited, it is put back.

use std::io::{self, BufRead, IsTerminal, Write};
use std::thread;

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;
use rustyline::{Config, Editor, ExternalPrinter};
use tokio::sync::mpsc;

use crate::table::terminal_width;

const PROMPT: &str = "> ";

/// What somebody did.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input {
    Line(String),
    /// ^C.
    Interrupt,
    /// ^D, or the end of a pipe.
    End,
}

pub(super) struct Console {
    screen: Screen,
    input: mpsc::Receiver<Input>,
    read_on: std::sync::mpsc::Sender<()>,
}

enum Screen {
    Terminal { printer: Box<dyn ExternalPrinter + Send>, before: Option<Termios>, colours: bool },
    Pipe,
}

type Lines = Editor<(), MemHistory>;

impl Console {
    /// A line editor if there is a terminal on both sides, else plain lines.
    pub(super) fn open() -> anyhow::Result<Console> {
        let (sender, input) = mpsc::channel(1);
        let (read_on, go) = std::sync::mpsc::channel();
        let screen = if io::stdin().is_terminal() && io::stdout().is_terminal() {
            let before = tcgetattr(io::stdin()).ok();
            let config = Config::builder().auto_add_history(true).build();
            let mut lines: Lines = Editor::with_history(config, MemHistory::new())?;
            let printer = Box::new(lines.create_external_printer()?);
            let colours = anstream::AutoStream::choice(&io::stdout()) != anstream::ColorChoice::Never;
            thread::spawn(move || edit(&mut lines, &sender, &go));
            Screen::Terminal { printer, before, colours }
        } else {
            thread::spawn(move || read(&sender));
            Screen::Pipe
        };
        Ok(Console { screen, input, read_on })
    }

    pub(super) fn is_terminal(&self) -> bool {
        matches!(self.screen, Screen::Terminal { .. })
    }

    /// How wide a line may be.
    pub(super) fn width(&self) -> usize {
        terminal_width().unwrap_or(80)
    }

    /// The next thing that somebody does. Call [`Console::read_on`] when it is dealt with.
    pub(super) async fn next(&mut self) -> Input {
        self.input.recv().await.unwrap_or(Input::End)
    }

    pub(super) fn read_on(&self) {
        // On a pipe nobody waits for it.
        self.read_on.send(()).ok();
    }

    /// Shows a line above the one that is edited.
    pub(super) fn show(&mut self, line: &str) -> anyhow::Result<()> {
        match &mut self.screen {
            Screen::Terminal { printer, colours, .. } => {
                let text = format!("{line}\n");
                let text = if *colours { text } else { anstream::adapter::strip_str(&text).to_string() };
                printer.print(text)?;
            }
            Screen::Pipe => {
                let mut out = anstream::stdout().lock();
                writeln!(out, "{line}")?;
                out.flush()?;
            }
        }
        Ok(())
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        if let Screen::Terminal { before: Some(before), .. } = &self.screen {
            // If the terminal is gone there is nothing to put back.
            tcsetattr(io::stdin(), OptionalActions::Now, before).ok();
        }
    }
}

fn edit(lines: &mut Lines, sender: &mpsc::Sender<Input>, go: &std::sync::mpsc::Receiver<()>) {
    loop {
        let input = match lines.readline(PROMPT) {
            Ok(line) => Input::Line(line),
            Err(ReadlineError::Interrupted) => Input::Interrupt,
            Err(_) => Input::End,
        };
        if sender.blocking_send(input).is_err() || go.recv().is_err() {
            return;
        }
    }
}

fn read(sender: &mpsc::Sender<Input>) {
    for line in io::stdin().lock().lines() {
        // What can not be read ends the input.
        let Ok(line) = line else { break };
        if sender.blocking_send(Input::Line(line)).is_err() {
            return;
        }
    }
}
