//! `rap top`: a live overview of a runtime in the terminal.
//!
//! The screen is left, and the modes of the terminal are restored, however the command ends: by a key, a signal, an
//! error or a panic.

mod draw;
mod snapshot;

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use rap_api::Time;
use rap_api::client::Client;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;

use self::draw::{List, Screen};
use self::snapshot::Snapshot;
use super::{Connection, print};
use crate::config::parse_duration;

/// Capacity of the channel for keys.
const KEYS: usize = 64;
/// Intervals that `+` and `-` choose from, in seconds.
const INTERVALS: [u64; 6] = [1, 2, 5, 10, 30, 60];
/// Interval at which ages are updated.
const TICK: Duration = Duration::from_secs(1);

/// Arguments of `rap top`.
#[derive(Args)]
#[command(
    after_help = "Keys: q quits, p pauses, + and - change the interval, Tab goes to the next list, the arrow keys scroll it, \
                        ? shows help.\nIf stdout is not a terminal, one snapshot is printed."
)]
pub struct Top {
    /// Time between two requests, from 1s to 60s.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = interval)]
    interval: Duration,
    /// Print one snapshot and exit.
    #[arg(long)]
    once: bool,
    /// Runtime to talk to.
    #[command(flatten)]
    connection: Connection,
}

fn interval(text: &str) -> Result<Duration, &'static str> {
    let valid = Duration::from_secs(1)..=Duration::from_secs(60);
    parse_duration(text).filter(|time| valid.contains(time)).ok_or("expected a time from 1s to 60s")
}

/// Runs the command until the user quits.
pub async fn run(top: Top) -> anyhow::Result<()> {
    let client = top.connection.client()?;
    let first = Snapshot::fetch(&client).await?;
    let is_terminal = std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    if top.once || !is_terminal {
        if !top.once {
            eprintln!("this is not a terminal: one snapshot follows");
        }
        return Ok(print(&first.to_text(Time::now()))?);
    }
    let mut view = Screen::new(client.url().to_owned(), first, top.interval);
    let terminal = Terminal::enter()?;
    follow(client, &mut view, terminal).await
}

/// The terminal in raw mode with the alternate screen.
struct Terminal(ratatui::DefaultTerminal);

impl Terminal {
    fn enter() -> anyhow::Result<Terminal> {
        // This also restores the terminal before a panic is reported.
        Ok(Terminal(ratatui::try_init()?))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

async fn follow(client: Client, view: &mut Screen, mut terminal: Terminal) -> anyhow::Result<()> {
    let mut keys = read_events();
    let [mut terminated, mut hung_up] = [signal(SignalKind::terminate())?, signal(SignalKind::hangup())?];
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut fetched_at, mut fetching) = (Instant::now(), None);
    loop {
        terminal.0.draw(|frame| view.draw(frame, Time::now()))?;
        if fetching.is_none() && !view.is_paused() && fetched_at.elapsed() >= view.interval() {
            let client = client.clone();
            fetching = Some(tokio::spawn(async move { Snapshot::fetch(&client).await }));
        }
        let fetched = async {
            match &mut fetching {
                Some(task) => task.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            event = keys.recv() => match event {
                Some(Event::Key(key)) if key.kind != KeyEventKind::Release => {
                    if !press(view, key) {
                        return Ok(());
                    }
                }
                Some(_) => {}
                None => return Ok(()),
            },
            outcome = fetched => {
                (fetching, fetched_at) = (None, Instant::now());
                view.update(outcome?);
            }
            _ = tick.tick() => {}
            _ = terminated.recv() => return Ok(()),
            _ = hung_up.recv() => return Ok(()),
        }
    }
}

/// Handles a key. Returns false if it quits.
fn press(view: &mut Screen, key: KeyEvent) -> bool {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c' | 'd') if control => return false,
        KeyCode::Char('l') if control => {}
        KeyCode::Char('q') => return false,
        KeyCode::Esc if !view.close_help() => return false,
        KeyCode::Char('?' | 'h') => view.toggle_help(),
        KeyCode::Char('p' | ' ') => view.toggle_pause(),
        KeyCode::Char('+') => view.change_interval(&INTERVALS, 1),
        KeyCode::Char('-') => view.change_interval(&INTERVALS, -1),
        KeyCode::Tab | KeyCode::Right => view.next_list(1),
        KeyCode::BackTab | KeyCode::Left => view.next_list(List::ALL.len() - 1),
        KeyCode::Down | KeyCode::Char('j') => view.scroll(1),
        KeyCode::Up | KeyCode::Char('k') => view.scroll(-1),
        KeyCode::PageDown => view.scroll(10),
        KeyCode::PageUp => view.scroll(-10),
        _ => {}
    }
    true
}

/// Reads keys and changes of the terminal's size on a thread of its own, which ends with the process.
fn read_events() -> mpsc::Receiver<Event> {
    let (sender, keys) = mpsc::channel(KEYS);
    std::thread::spawn(move || {
        while let Ok(event) = event::read() {
            if sender.blocking_send(event).is_err() {
                return;
            }
        }
    });
    keys
}
