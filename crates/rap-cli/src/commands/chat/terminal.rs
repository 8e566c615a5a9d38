//! A terminal in raw mode.
//!
//! `Drop` restores the modes of the terminal, so that they are restored however the chat ends: by ^D, an error, a panic
//! or a signal. They are also restored while the chat is suspended.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Read};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Signal as Stop, getpid, kill_process};
use rustix::termios::{
    InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use super::editor::{Editor, Input};
use super::keys::{Key, Keys};
use super::screen::{Bottom, Screen, Size};

/// Enables bracketed paste, so that a line break in a paste differs from the Enter key.
const ENTER: &str = "\x1b[?2004h";
const LEAVE: &str = "\x1b[?2004l\x1b[?25h";
/// Time in which SIGTSTP takes effect.
const STOPS_WITHIN: Duration = Duration::from_millis(50);
/// Delay before another write to a terminal whose buffer is full.
const FULL_DELAY: Duration = Duration::from_millis(5);
/// Capacity of the channel for input, in reads.
const INPUT_READS: usize = 64;

pub(super) struct Terminal {
    before: Termios,
    colours: bool,
    screen: Screen,
    keys: Keys,
    editor: Editor,
    live: Vec<String>,
    typed: mpsc::Receiver<Vec<u8>>,
    ready: VecDeque<Input>,
    signals: Signals,
}

struct Signals {
    resized: Signal,
    continued: Signal,
    terminated: Signal,
    hung_up: Signal,
}

impl Terminal {
    /// Opens the terminal; `None` unless both stdin and stdout are terminals.
    pub(super) fn open() -> anyhow::Result<Option<Terminal>> {
        if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
            return Ok(None);
        }
        let before = tcgetattr(io::stdin())?;
        let signals = Signals {
            resized: signal(SignalKind::window_change())?,
            continued: signal(SignalKind::from_raw(Stop::CONT.as_raw()))?,
            terminated: signal(SignalKind::terminate())?,
            hung_up: signal(SignalKind::hangup())?,
        };
        let (sender, typed) = mpsc::channel(INPUT_READS);
        thread::spawn(move || read(&sender));
        let mut terminal = Terminal {
            before,
            colours: anstream::AutoStream::choice(&io::stdout()) != anstream::ColorChoice::Never,
            screen: Screen::default(),
            keys: Keys::default(),
            editor: Editor::default(),
            live: Vec::new(),
            typed,
            ready: VecDeque::new(),
            signals,
        };
        terminal.enter()?;
        Ok(Some(terminal))
    }

    fn enter(&mut self) -> anyhow::Result<()> {
        let mut raw = self.before.clone();
        raw.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG | LocalModes::IEXTEN);
        raw.input_modes.remove(InputModes::IXON | InputModes::ICRNL);
        raw.special_codes[SpecialCodeIndex::VMIN] = 1;
        raw.special_codes[SpecialCodeIndex::VTIME] = 0;
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        write(ENTER)?;
        self.draw("")
    }

    fn leave(&mut self) {
        let clear = self.screen.clear(self.size());
        // Errors are ignored: a terminal that is gone needs no restoring.
        write(&format!("{clear}{LEAVE}")).ok();
        tcsetattr(io::stdin(), OptionalActions::Now, &self.before).ok();
    }

    /// Handles ^Z: stops the process until the shell continues it.
    fn suspend(&mut self) -> anyhow::Result<()> {
        self.leave();
        kill_process(getpid(), Stop::TSTP)?;
        // The signal may take effect after a moment, and raw mode must not be entered before.
        thread::sleep(STOPS_WITHIN);
        self.enter()
    }

    pub(super) fn size(&self) -> Size {
        match tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
                Size { columns: size.ws_col.into(), rows: size.ws_row.into() }
            }
            _ => Size { columns: 80, rows: 24 },
        }
    }

    /// Returns the next input. Cancel safe.
    pub(super) async fn next(&mut self) -> anyhow::Result<Input> {
        loop {
            if let Some(input) = self.ready.pop_front() {
                return Ok(input);
            }
            tokio::select! {
                typed = self.typed.recv() => match typed {
                    Some(bytes) => self.press(&bytes)?,
                    None => return Ok(Input::End),
                },
                _ = self.signals.resized.recv() => self.draw("")?,
                _ = self.signals.continued.recv() => self.enter()?,
                _ = self.signals.terminated.recv() => return Ok(Input::End),
                _ = self.signals.hung_up.recv() => return Ok(Input::End),
            }
        }
    }

    fn press(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        for key in self.keys.push(bytes) {
            match key {
                Key::Suspend => self.suspend()?,
                Key::Redraw => {
                    self.screen = Screen::default();
                    write("\x1b[2J\x1b[H")?;
                }
                key => self.ready.extend(self.editor.press(key)),
            }
        }
        self.draw("")
    }

    /// Prints `done`, complete lines, above the live rows.
    pub(super) fn show(&mut self, done: &str, live: Vec<String>) -> anyhow::Result<()> {
        self.live = live;
        self.draw(done)
    }

    fn draw(&mut self, done: &str) -> anyhow::Result<()> {
        let size = self.size();
        let coloured = |text: &str| match self.colours {
            true => text.to_owned(),
            false => anstream::adapter::strip_str(text).to_string(),
        };
        let live = self.live.iter().map(|row| coloured(row)).collect();
        let bottom = Bottom { live, line: self.editor.row(size.columns) };
        let done = coloured(done);
        Ok(write(&self.screen.frame(&done, bottom, size))?)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Writes to stdout without buffering.
fn write(text: &str) -> io::Result<()> {
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        match rustix::io::write(io::stdout(), rest) {
            Ok(count) => rest = &rest[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => thread::sleep(FULL_DELAY),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn read(sender: &mpsc::Sender<Vec<u8>>) {
    let mut bytes = [0; 4096];
    loop {
        match io::stdin().lock().read(&mut bytes) {
            Ok(0) => return,
            Ok(count) => {
                if sender.blocking_send(bytes[..count].to_vec()).is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The terminal is gone.
            Err(_) => return,
        }
    }
}
