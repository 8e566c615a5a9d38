//! The screen of `rap top`: what is shown, and how it is drawn.

use std::time::Duration;

use rap_api::client::Error;
use rap_api::{Status, Time};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row, Table, TableState};

use super::snapshot::Snapshot;
use crate::status_text::{self, grouped};
use crate::table::one_line;
use crate::time_format::clock;

const HELP: [&str; 8] = [
    "q, Esc, ^C   quit",
    "p, Space     pause and continue",
    "+ and -      change the interval",
    "Tab, ← →     next list",
    "↑ ↓, j k     scroll the list",
    "PgUp PgDn    scroll by ten rows",
    "?            this help",
    "Answer with: rap inbox answer THREAD CALL CHOICE, or rap chat THREAD",
];

/// Width of the terminal from which the figures are in boxes.
const BOXES_FROM: u16 = 106;

/// A list of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum List {
    People,
    Threads,
    Calls,
}

impl List {
    pub(super) const ALL: [List; 3] = [List::People, List::Threads, List::Calls];

    fn name(self) -> &'static str {
        match self {
            List::People => "Needs a person",
            List::Threads => "Active threads",
            List::Calls => "Open calls",
        }
    }

    fn headings(self) -> [&'static str; 4] {
        match self {
            List::People => ["THREAD", "SINCE", "TOOL OR TITLE", "WHAT"],
            List::Threads => ["THREAD", "STATUS", "TITLE", "WAITING FOR"],
            List::Calls => ["THREAD", "AGE", "TOOL", "STATE"],
        }
    }

    fn rows(self, snapshot: &Snapshot, now: Time) -> Vec<[String; 4]> {
        match self {
            List::People => snapshot.for_people(now),
            List::Threads => snapshot.active_threads(now),
            List::Calls => snapshot.open_calls(now),
        }
    }
}

pub(super) struct Screen {
    url: String,
    now: Snapshot,
    before: Option<Snapshot>,
    /// Error of the last request.
    problem: Option<String>,
    interval: Duration,
    paused: bool,
    help: bool,
    focus: usize,
    /// First visible row of each list.
    scrolled: [usize; List::ALL.len()],
    colours: bool,
}

impl Screen {
    pub(super) fn new(url: String, first: Snapshot, interval: Duration) -> Screen {
        let colours = anstream::AutoStream::choice(&std::io::stdout()) != anstream::ColorChoice::Never;
        let scrolled = [0; List::ALL.len()];
        Screen {
            url,
            now: first,
            before: None,
            problem: None,
            interval,
            paused: false,
            help: false,
            focus: 0,
            scrolled,
            colours,
        }
    }

    pub(super) fn interval(&self) -> Duration {
        self.interval
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }

    pub(super) fn update(&mut self, outcome: Result<Snapshot, Error>) {
        match outcome {
            Ok(snapshot) => {
                self.before = Some(std::mem::replace(&mut self.now, snapshot));
                self.problem = None;
            }
            Err(error) => self.problem = Some(one_line(&error.to_string())),
        }
    }

    pub(super) fn toggle_help(&mut self) {
        self.help = !self.help;
    }

    /// Closes the help. Returns false if it was not open.
    pub(super) fn close_help(&mut self) -> bool {
        std::mem::take(&mut self.help)
    }

    pub(super) fn toggle_pause(&mut self) {
        self.paused = !self.paused;
    }

    pub(super) fn change_interval(&mut self, intervals: &[u64], step: isize) {
        let seconds = self.interval.as_secs();
        let at = intervals.iter().position(|interval| *interval >= seconds).unwrap_or(0);
        let next = at.saturating_add_signed(step).min(intervals.len() - 1);
        self.interval = Duration::from_secs(intervals[next]);
    }

    pub(super) fn next_list(&mut self, step: usize) {
        self.focus = (self.focus + step) % List::ALL.len();
    }

    pub(super) fn scroll(&mut self, rows: isize) {
        let scrolled = &mut self.scrolled[self.focus];
        *scrolled = scrolled.saturating_add_signed(rows);
    }

    fn style(&self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }

    pub(super) fn draw(&mut self, frame: &mut Frame<'_>, now: Time) {
        let [title, figures, lists, footer] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(6),
            Constraint::Min(3),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        frame.render_widget(self.title(now), title);
        self.draw_figures(frame, figures);
        let areas: [Rect; 3] = Layout::vertical(List::ALL.map(|_| Constraint::Fill(1))).areas(lists);
        for (index, area) in areas.into_iter().enumerate() {
            self.draw_list(frame, index, area, now);
        }
        let keys = "q quit  p pause  +/- interval  Tab next list  ↑↓ scroll  ? help";
        frame.render_widget(Line::styled(keys, Style::new().add_modifier(Modifier::DIM)), footer);
        if self.help {
            self.draw_help(frame);
        }
    }

    fn title(&self, now: Time) -> Line<'_> {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let state = match (&self.problem, self.paused) {
            (Some(problem), _) => Span::styled(format!("  {problem}; trying again"), self.style(Color::Red)),
            (None, true) => Span::styled("  paused", self.style(Color::Yellow)),
            (None, false) => Span::raw(format!("  every {} s", self.interval.as_secs())),
        };
        let at = clock(self.now.at, now);
        Line::from(vec![Span::styled("rap top", bold), Span::raw(format!("  {}  {at}", self.url)), state])
    }

    /// Draws the figures in three boxes, or in lines if the terminal is narrow.
    fn draw_figures(&self, frame: &mut Frame<'_>, area: Rect) {
        if area.width < BOXES_FROM {
            let threads = self.now.threads().into_iter();
            let threads =
                threads.map(|(status, count)| format!("{} {}", status_text::label(status), grouped(count)));
            let work = self.now.work().into_iter();
            let work =
                work.map(|(name, now, queued)| format!("{name} {} ({})", grouped(now), grouped(queued)));
            let mut lines = vec![
                Line::raw(threads.collect::<Vec<_>>().join("  ")),
                Line::raw(work.collect::<Vec<_>>().join("  ")),
            ];
            lines.extend(self.model_lines());
            return frame.render_widget(Paragraph::new(lines), area);
        }
        let [threads, work, model] =
            Layout::horizontal([Constraint::Length(36), Constraint::Length(36), Constraint::Fill(1)])
                .areas(area);
        let counts = self.now.threads();
        let count = |(status, count): &(Status, u64)| {
            let style = match status {
                Status::NeedsYou if *count > 0 => self.style(Color::Yellow),
                Status::Failed if *count > 0 => self.style(Color::Red),
                _ => Style::new(),
            };
            Span::styled(format!("{:<9}{:>7} ", status_text::label(*status), grouped(*count)), style)
        };
        // Two statuses in a line, so that six fit.
        let pairs = counts.chunks(2).map(|pair| Line::from(pair.iter().map(count).collect::<Vec<_>>()));
        let lines: Vec<Line<'_>> = pairs.collect();
        frame.render_widget(Paragraph::new(lines).block(Block::bordered().title("Threads")), threads);
        let row = |(name, in_progress, waiting): &(&str, u64, u64)| {
            Line::raw(format!("{name:<14}{:>6} ({} queued)", grouped(*in_progress), grouped(*waiting)))
        };
        let lines: Vec<Line<'_>> = self.now.work().iter().map(row).collect();
        frame.render_widget(Paragraph::new(lines).block(Block::bordered().title("Queue")), work);
        frame.render_widget(
            Paragraph::new(self.model_lines()).block(Block::bordered().title("Since the runtime started")),
            model,
        );
    }

    fn model_lines(&self) -> Vec<Line<'static>> {
        let [answered, failed, refused] = self.now.requests().map(|(_, count)| count);
        let [input, cached, output] = self.now.tokens();
        let rate = self.before.as_ref().map_or(0, |before| self.now.tokens_per_minute(before));
        let errors = self.now.failed_deliveries();
        let worry = |count: u64| if count > 0 { self.style(Color::Red) } else { Style::new() };
        vec![
            Line::from(vec![
                Span::raw(format!("model requests {}, ", grouped(answered))),
                Span::styled(format!("{} failed", grouped(failed + refused)), worry(failed + refused)),
            ]),
            Line::raw(format!(
                "tokens {} in ({} cached), {} out",
                grouped(input),
                grouped(cached),
                grouped(output)
            )),
            Line::raw(format!("cost ${:.4}, {} tokens per minute", self.now.cost(), grouped(rate))),
            Line::styled(format!("failed deliveries {}", grouped(errors)), worry(errors)),
        ]
    }

    fn draw_list(&mut self, frame: &mut Frame<'_>, index: usize, area: Rect, now: Time) {
        let list = List::ALL[index];
        let rows = list.rows(&self.now, now);
        let (count, visible) = (rows.len(), usize::from(area.height.saturating_sub(3)));
        self.scrolled[index] = self.scrolled[index].min(count.saturating_sub(visible));
        let title = format!("{} ({count})", list.name());
        let focus = if index == self.focus { Modifier::BOLD } else { Modifier::empty() };
        let block = Block::bordered().title(Line::styled(title, Style::new().add_modifier(focus)));
        let style = if list == List::People { self.style(Color::Yellow) } else { Style::new() };
        let rows = rows.into_iter().map(|cells| Row::new(cells.map(Cell::from)).style(style));
        let widths =
            [Constraint::Length(28), Constraint::Length(10), Constraint::Fill(1), Constraint::Fill(2)];
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let table = Table::new(rows, widths).header(Row::new(list.headings()).style(bold)).block(block);
        let mut state = TableState::new().with_offset(self.scrolled[index]);
        frame.render_stateful_widget(table, area, &mut state);
    }

    fn draw_help(&self, frame: &mut Frame<'_>) {
        let area = frame.area();
        let (width, height) = (72.min(area.width), (HELP.len() as u16 + 2).min(area.height));
        let area = Rect {
            x: area.width.saturating_sub(width) / 2,
            y: area.height.saturating_sub(height) / 2,
            width,
            height,
        };
        frame.render_widget(Clear, area);
        let lines: Vec<Line<'_>> = HELP.iter().map(|line| Line::raw(*line)).collect();
        frame.render_widget(Paragraph::new(lines).block(Block::bordered().title("Keys")), area);
    }
}
