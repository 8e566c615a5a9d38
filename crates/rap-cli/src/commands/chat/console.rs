//! Input and output of a chat: a terminal, or plain lines on pipes.

use std::io::{self, BufRead, Write};
use std::thread;

use tokio::sync::mpsc;

use super::editor::Input;
use super::screen::Size;
use super::terminal::Terminal;

pub(super) enum Console {
    Terminal(Box<Terminal>),
    Pipe(mpsc::Receiver<Input>),
}

impl Console {
    pub(super) fn open() -> anyhow::Result<Console> {
        if let Some(terminal) = Terminal::open()? {
            return Ok(Console::Terminal(Box::new(terminal)));
        }
        let (sender, lines) = mpsc::channel(1);
        thread::spawn(move || read(&sender));
        Ok(Console::Pipe(lines))
    }

    /// Size of the terminal; `None` for a pipe.
    pub(super) fn size(&self) -> Option<Size> {
        match self {
            Console::Terminal(terminal) => Some(terminal.size()),
            Console::Pipe(_) => None,
        }
    }

    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, Console::Terminal(_))
    }

    /// Returns the next input. Cancel safe.
    pub(super) async fn next(&mut self) -> anyhow::Result<Input> {
        match self {
            Console::Terminal(terminal) => terminal.next().await,
            Console::Pipe(lines) => Ok(lines.recv().await.unwrap_or(Input::End)),
        }
    }

    /// Prints `done`, complete lines that are never changed again. On a terminal, `live` are rows below them that are
    /// redrawn in place; a pipe ignores them.
    pub(super) fn show(&mut self, done: &str, live: Vec<String>) -> anyhow::Result<()> {
        match self {
            Console::Terminal(terminal) => terminal.show(done, live),
            Console::Pipe(_) => {
                let mut out = anstream::stdout().lock();
                out.write_all(done.as_bytes())?;
                Ok(out.flush()?)
            }
        }
    }
}

fn read(sender: &mpsc::Sender<Input>) {
    for line in io::stdin().lock().lines() {
        // A read error ends the input.
        let Ok(line) = line else { break };
        if sender.blocking_send(Input::Line(line)).is_err() {
            return;
        }
    }
}
