//! The bottom of a terminal: rows that change in place, and below them the line that is typed. What is over goes above
//! them and is never touched again.
//!
//! A frame is one text, written at once, and rows that stay are overwritten and not cleared first: nothing flickers.

use unicode_width::UnicodeWidthStr;

use crate::table::cut;

/// Begins a frame: terminals that can show nothing until its end.
const BEGIN: &str = "\x1b[?2026h\x1b[?25l\r";
const END: &str = "\x1b[?25h\x1b[?2026l";
const CLEAR_LINE: &str = "\x1b[K";
const CLEAR_BELOW: &str = "\x1b[J";

/// How large the terminal is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub columns: usize,
    pub rows: usize,
}

/// What is to stand at the bottom.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Bottom {
    /// What changes in place.
    pub live: Vec<String>,
    /// What is typed, and where the cursor is in it.
    pub line: (String, usize),
}

/// What is drawn at the bottom at the moment. The cursor stands in its last row.
#[derive(Debug, Default)]
pub(super) struct Screen {
    bottom: Bottom,
    columns: usize,
}

impl Screen {
    /// What to write so that `done` stands above the bottom for good, in lines that each end with a break. Empty if
    /// nothing changes.
    pub(super) fn frame(&mut self, done: &str, mut bottom: Bottom, size: Size) -> String {
        // A full row would leave the cursor behind its end, where terminals differ.
        let room = size.columns.saturating_sub(1).max(1);
        bottom.live.iter_mut().filter(|row| width(row) > room).for_each(|row| *row = cut(&bare(row), room));
        bottom.live.truncate(size.rows.saturating_sub(1));
        if done.is_empty() && bottom == self.bottom && size.columns == self.columns {
            return String::new();
        }
        let mut frame = format!("{BEGIN}{}", self.to_the_top(size.columns));
        if !done.is_empty() || size.columns != self.columns {
            // A line that is longer than the terminal is wide leaves nothing behind only on cleared ground.
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

    /// What to write so that nothing stands at the bottom any more.
    pub(super) fn clear(&mut self, size: Size) -> String {
        let frame = format!("{BEGIN}{}{CLEAR_BELOW}{END}", self.to_the_top(size.columns));
        *self = Screen::default();
        frame
    }

    /// The way from the cursor to the first row of the bottom. Where the terminal became narrower, its rows are wrapped.
    fn to_the_top(&self, columns: usize) -> String {
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

    /// Writes frames to a terminal, and gives what stands there and where the cursor is.
    fn shown(frames: &[String]) -> (String, (u16, u16)) {
        let mut terminal = vt100::Parser::new(nonzero(6), nonzero(20), 100);
        frames.iter().for_each(|frame| terminal.process(frame.as_bytes()));
        (terminal.screen().contents(), terminal.screen().cursor_position())
    }

    #[test]
    fn rows_change_in_place_below_what_is_over() {
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
    fn it_goes_on_at_the_end_of_a_full_screen_and_with_long_lines() {
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
    fn what_is_too_large_for_the_terminal_is_cut() {
        let mut screen = Screen::default();
        let many: Vec<&str> = vec!["a row that is too long for it"; 9];
        let frame = screen.frame("", bottom(&many, "> "), SIZE);
        let (text, cursor) = shown(&[frame]);
        assert_eq!(text, format!("{}> ", "a row that is too…\n".repeat(5)));
        assert_eq!(cursor, (5, 2));
    }
}
