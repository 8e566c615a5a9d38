//! Text tables that fit the width of the terminal.

use std::fmt::Write;

use anstyle::{AnsiColor, Effects, Style};
use rap_protocol::visible;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Separator between columns.
const GAP: &str = "  ";
/// Columns are not shrunk below this width.
const LEAST: usize = 8;

/// Style of headings.
pub const BOLD: Style = Style::new().effects(Effects::BOLD);
/// Style of less important text.
pub const DIM: Style = Style::new().effects(Effects::DIMMED);
/// Style of text that needs attention.
pub const YELLOW: Style = AnsiColor::Yellow.on_default();
/// Style of errors.
pub const RED: Style = AnsiColor::Red.on_default();
/// Style of success and of the agent's text.
pub const GREEN: Style = AnsiColor::Green.on_default();
/// Style of the user's text.
pub const CYAN: Style = AnsiColor::Cyan.on_default();

/// Returns the text with escape codes for a style. The output stream removes them if it is not a terminal.
pub fn styled(style: Style, text: &str) -> String {
    format!("{style}{text}{style:#}")
}

/// Width of the terminal on stdout; `None` if stdout is not a terminal.
pub fn terminal_width() -> Option<usize> {
    terminal_size::terminal_size_of(std::io::stdout()).map(|(width, _)| usize::from(width.0).max(20))
}

/// A table with a row of headings.
#[derive(Debug, Clone)]
pub struct Table {
    rows: Vec<Vec<String>>,
    styles: Vec<Option<(usize, Style)>>,
}

impl Table {
    pub fn new<const N: usize>(headings: [&str; N]) -> Table {
        Table { rows: vec![headings.map(str::to_owned).to_vec()], styles: vec![None] }
    }

    /// Adds a row. A tool's text must not move the cursor or hide a part of itself.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.iter().map(|cell| one_line(cell)).collect());
        self.styles.push(None);
    }

    /// Sets the style of a cell of the last row.
    pub fn style(&mut self, column: usize, style: Style) {
        if let Some(last) = self.styles.last_mut() {
            *last = Some((column, style));
        }
    }

    /// The table, no wider than this; longer texts are cut. Without a width nothing is.
    pub fn render(&self, width: Option<usize>) -> String {
        let widths = self.widths(width);
        let mut text = String::new();
        for (number, row) in self.rows.iter().enumerate() {
            for (column, cell) in row.iter().enumerate() {
                let cut = cut(cell, widths[column]);
                let padding = widths[column].saturating_sub(cut.width());
                let style = if number == 0 { Some(BOLD) } else { self.style_of(number, column) };
                let shown = style.map_or_else(|| cut.clone(), |style| styled(style, &cut));
                let last = column + 1 == row.len();
                let (padding, gap) = if last { (0, "") } else { (padding, GAP) };
                // Writing to a string does not fail.
                write!(text, "{shown}{:padding$}{gap}", "").ok();
            }
            text.truncate(text.trim_end_matches(' ').len());
            text.push('\n');
        }
        text
    }

    fn style_of(&self, row: usize, column: usize) -> Option<Style> {
        self.styles[row].filter(|(styled, _)| *styled == column).map(|(_, style)| style)
    }

    /// Widths of the columns. The widest columns are shrunk first.
    fn widths(&self, width: Option<usize>) -> Vec<usize> {
        let columns = self.rows[0].len();
        let widest = |column: usize| self.rows.iter().map(|row| row[column].width()).max().unwrap_or(0);
        let mut widths: Vec<usize> = (0..columns).map(widest).collect();
        let Some(room) = width.map(|width| width.saturating_sub(GAP.len() * (columns - 1))) else {
            return widths;
        };
        while widths.iter().sum::<usize>() > room {
            let Some(widest) = widths.iter_mut().max().filter(|widest| **widest > LEAST) else { break };
            *widest -= 1;
        }
        widths
    }
}

/// Returns a text of others for the terminal: on one line, with its hidden characters made visible.
pub fn one_line(text: &str) -> String {
    plain(text).replace(['\n', '\t'], " ").trim().to_owned()
}

/// Returns a text of others for the terminal: with its hidden characters, other than line breaks and tabs, made visible.
pub fn plain(text: &str) -> String {
    visible::text(text).into_owned()
}

/// Cuts the text to a width. An ellipsis marks the cut.
pub fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut taken = 0;
    let fits = |c: &char| {
        taken += c.width().unwrap_or(0);
        taken < width
    };
    let mut short: String = text.chars().take_while(fits).collect();
    short.truncate(short.trim_end().len());
    short.push('…');
    short
}

/// Wraps the text at word boundaries. A word longer than the width gets a line of its own.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut().filter(|line| line.width() + 1 + word.width() <= width) {
            Some(line) => {
                line.push(' ');
                line.push_str(word);
            }
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain_text(table: &Table, width: Option<usize>) -> String {
        anstream::adapter::strip_str(&table.render(width)).to_string()
    }

    #[test]
    fn columns_are_as_wide_as_their_content() {
        let mut table = Table::new(["ID", "TITLE"]);
        table.row(["a".into(), "one\ntwo\x1b[2J".into()]);
        table.row(["bcd".into(), String::new()]);
        assert_eq!(plain_text(&table, None), "ID   TITLE\na    one two\\u{1b}[2J\nbcd\n");
    }

    #[test]
    fn a_table_fits_its_width_and_cuts_the_widest_column_first() {
        let mut table = Table::new(["ID", "TITLE", "WHEN"]);
        table.row(["thread_1".into(), "a very long title that goes on and on".into(), "3 min ago".into()]);
        let text = plain_text(&table, Some(40));
        assert_eq!(text, "ID        TITLE                WHEN\nthread_1  a very long title…   3 min ago\n");
        assert!(text.lines().all(|line| line.width() <= 40));
    }

    #[test]
    fn wide_characters_count_as_two() {
        assert_eq!(cut("日本語のテキスト", 7), "日本語…");
        assert_eq!(cut("short", 5), "short");
        assert_eq!(cut("longer", 5), "long…");
    }

    #[test]
    fn text_is_wrapped_between_words() {
        assert_eq!(wrap("one two  three extraordinary x", 9), ["one two", "three", "extraordinary", "x"]);
        assert!(wrap("", 9).is_empty());
    }
}
