//! Draws the bottom of a terminal: live rows that are redrawn in place, and below them the input line. Finished lines are
//! printed above and never redrawn.
//!
//! To avoid flicker, a frame is written at once, and rows are overwritten without being cleared first.

use unicode_width::UnicodeWidthStr;

use crate::table::cut;

/// Begins a synchronized update: terminals that support it show nothing until its end.
const BEGIN: &str = "\x1b[?2026h\x1b[?25l\r";
const END: &str = "\x1b[?25h\x1b[?2026l";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

/// Size of the terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub columns: usize,
    pub rows: usize,
}

/// Content of the bottom of the terminal.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Bottom {
    /// Rows that are redrawn in place.
    pub live: Vec<String>,
    /// Input line and the column of the cursor.
    pub line: (String, usize),
}

/// The bottom as it is currently drawn. The cursor is in its last row.
#[derive(Debug, Default)]
pub(super) struct Screen {
    bottom: Bottom,
    columns: usize,
}

impl Screen {
    /// Returns the bytes that print `done`, complete lines, above the bottom and redraw the bottom. Empty if nothing
    /// changes.
    pub(super) fn frame(&mut self, done: &str, mut bottom: Bottom, size: Size) -> String {
        // Terminals differ in where the cursor is after a full row, so rows are one column shorter.
        let room = size.columns.saturating_sub(1).max(1);
        bottom.live.iter_mut().filter(|row| width(row) > room).for_each(|row| *row = cut(&bare(row), room));
        bottom.live.truncate(size.rows.saturating_sub(1));
        if done.is_empty() && bottom == self.bottom && size.columns == self.columns {
            return String::new();
        }
        let mut frame = format!("{BEGIN}{}", self.move_to_top(size.columns));
        if !done.is_empty() || size.columns != self.columns {
            // A line longer than the terminal wraps over old rows, so they are cleared first.
            frame.push_str(CLEAR_BELOW);
            frame.push_str(&done.replace('\n', "\r\n"));
        }
        for row in &bottom.live {
            frame.push_str(&format!("{row}{CLEAR_LINE}\r\n"));
        }
        let (line, column) = &bottom.line;
        frame.push_str(&format!("{line}{CLEAR_BELOW}\r"));
        if *column > 0 {
            frame.push_str(&format!("\x1b[{column}C"));
        }
        frame.push_str(END);
        (self.bottom, self.columns) = (bottom, size.columns);
        frame
    }

    /// Returns the bytes that clear the bottom.
    pub(super) fn clear(&mut self, size: Size) -> String {
        let frame = format!("{BEGIN}{}{CLEAR_BELOW}{END}", self.move_to_top(size.columns));
        *self = Screen::default();
        frame
    }

    /// Moves the cursor to the first row of the bottom. Rows are wrapped if the terminal became narrower.
    fn move_to_top(&self, columns: usize) -> String {
        let rows = |width: usize| width.div_ceil(columns.max(1)).max(1);
        let above: usize = self.bottom.live.iter().map(|row| rows(width(row))).sum();
        match above + self.bottom.line.1 / columns.max(1) {
            0 => String::new(),
            up => format!("\x1b[{up}A"),
        }
    }
}

fn bare(row: &str) -> String {
    anstream::adapter::strip_str(row).to_string()
}

fn width(row: &str) -> usize {
    bare(row).width()
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use super::*;

    const SIZE: Size = Size { columns: 20, rows: 6 };

    fn bottom(live: &[&str], line: &str) -> Bottom {
        Bottom { live: live.iter().map(|row| (*row).to_owned()).collect(), line: (line.into(), line.len()) }
    }

    fn nonzero(number: u16) -> NonZero<u16> {
        NonZero::new(number).unwrap()
    }

    /// Writes frames to a terminal and returns its content and the position of the cursor.
    fn shown(frames: &[String]) -> (String, (u16, u16)) {
        let mut terminal = vt100::Parser::new(nonzero(6), nonzero(20), 100);
        frames.iter().for_each(|frame| terminal.process(frame.as_bytes()));
        (terminal.screen().contents(), terminal.screen().cursor_position())
    }

    #[test]
    fn live_rows_are_redrawn_below_finished_lines() {
        let mut screen = Screen::default();
        let mut frames = vec![
            screen.frame("one\n", bottom(&["a 1 s"], "> x"), SIZE),
            screen.frame("", bottom(&["a 2 s", "\x1b[2mb 1 s\x1b[0m"], "> x"), SIZE),
        ];
        assert_eq!(shown(&frames), ("one\na 2 s\nb 1 s\n> x".into(), (3, 3)));
        frames.push(screen.frame("two\n", bottom(&["b 2 s"], "> xy"), SIZE));
        assert_eq!(shown(&frames), ("one\ntwo\nb 2 s\n> xy".into(), (3, 4)));
        assert_eq!(screen.frame("", bottom(&["b 2 s"], "> xy"), SIZE), "");
        frames.push(screen.frame("", bottom(&[], "> "), SIZE));
        frames.push(screen.clear(SIZE));
        assert_eq!(shown(&frames), ("one\ntwo".into(), (2, 0)));
    }

    #[test]
    fn a_full_screen_scrolls_and_long_lines_wrap() {
        let mut screen = Screen::default();
        let mut frames = vec![screen.frame("", bottom(&["live", "more"], "> "), SIZE)];
        for number in 1..=5 {
            let done = format!("{number}: a line that is much longer than that\n");
            frames.push(screen.frame(&done, bottom(&["live", "more"], "> "), SIZE));
        }
        let expected = "5: a line that is much longer than that\nlive\nmore\n> ";
        let (text, cursor) = shown(&frames);
        assert!(text.ends_with(expected), "{text}");
        assert_eq!(cursor, (5, 2));
    }

    #[test]
    fn live_rows_are_cut_to_the_size_of_the_terminal() {
        let mut screen = Screen::default();
        let many: Vec<&str> = vec!["a row that is too long for it"; 9];
        let frame = screen.frame("", bottom(&many, "> "), SIZE);
        let (text, cursor) = shown(&[frame]);
        assert_eq!(text, format!("{}> ", "a row that is too…\n".repeat(5)));
        assert_eq!(cursor, (5, 2));
    }
}
