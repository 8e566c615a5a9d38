//! An answer in progress, line by line. The entry that follows is the truth: what it has more is shown then, and what
//! turns out to be void is said to be.

use unicode_width::UnicodeWidthStr;

use crate::api::Delta;
use crate::table::plain;

/// What has been streamed of an answer, and how much of it is on the screen.
#[derive(Debug, Default)]
pub(super) struct Streamed {
    at: Option<(u64, u64)>,
    text: String,
    shown: usize,
}

/// What to show next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// The first line of an answer.
    First(String),
    /// A further one.
    More(String),
    /// What was shown is void.
    Void,
}

impl Streamed {
    /// Takes a piece of an answer and gives the lines that are complete, or full.
    pub(super) fn push(&mut self, delta: &Delta, width: usize) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if self.at.replace((delta.turn, delta.attempt)) != Some((delta.turn, delta.attempt)) {
            pieces.extend(self.drop_shown());
        }
        self.text.push_str(&plain(&delta.text));
        while let Some(end) = line_end(&self.text[self.shown..], width) {
            pieces.push(self.show(end));
        }
        pieces
    }

    /// The answer is in the history: gives what is not on the screen yet.
    pub(super) fn finish(&mut self, text: &str) -> Vec<Piece> {
        let text = plain(text);
        let mut pieces = Vec::new();
        if !text.starts_with(&self.text[..self.shown]) {
            pieces.extend(self.drop_shown());
        }
        self.text = text;
        let mut first = self.shown == 0;
        for line in self.text[self.shown..].lines() {
            let piece = if std::mem::take(&mut first) { Piece::First } else { Piece::More };
            pieces.push(piece(line.into()));
        }
        *self = Streamed::default();
        pieces
    }

    /// The answer will not come; what was shown of it is void.
    pub(super) fn drop_shown(&mut self) -> Option<Piece> {
        self.text.clear();
        (std::mem::take(&mut self.shown) > 0).then_some(Piece::Void)
    }

    fn show(&mut self, end: usize) -> Piece {
        let line = self.text[self.shown..self.shown + end].trim_end().to_owned();
        let piece = if self.shown == 0 { Piece::First(line) } else { Piece::More(line) };
        self.shown += end;
        piece
    }
}

/// Where the first line ends: behind its break, or behind the last space that fits.
fn line_end(text: &str, width: usize) -> Option<usize> {
    let first = text.find('\n').map(|at| at + 1);
    let line = &text[..first.unwrap_or(text.len())];
    if line.trim_end().width() <= width {
        return first;
    }
    let mut end = None;
    for (at, _) in line.match_indices(' ') {
        if line[..at].width() > width {
            break;
        }
        end = Some(at + 1);
    }
    end.or(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(attempt: u64, text: &str) -> Delta {
        Delta { turn: 1, attempt, text: text.into() }
    }

    fn first(text: &str) -> Piece {
        Piece::First(text.into())
    }

    fn more(text: &str) -> Piece {
        Piece::More(text.into())
    }

    #[test]
    fn lines_are_shown_as_they_become_complete() {
        let mut streamed = Streamed::default();
        assert_eq!(streamed.push(&delta(1, "one "), 20), []);
        assert_eq!(streamed.push(&delta(1, "two\nthr"), 20), [first("one two")]);
        assert_eq!(streamed.push(&delta(1, "ee and so on and on"), 20), [more("three and so on and")]);
        assert_eq!(streamed.finish("one two\nthree and so on and on.\nend"), [more("on."), more("end")]);
        assert_eq!(streamed.finish("short"), [first("short")]);
    }

    #[test]
    fn another_attempt_makes_the_first_one_void() {
        let mut streamed = Streamed::default();
        assert_eq!(streamed.push(&delta(1, "a\nb"), 20), [first("a")]);
        assert_eq!(streamed.push(&delta(2, "c\n"), 20), [Piece::Void, first("c")]);
        assert_eq!(streamed.finish("d"), [Piece::Void, first("d")]);
    }
}
