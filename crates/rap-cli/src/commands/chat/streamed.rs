//! An answer in progress. Its text is shown only in live rows; the entry that follows is authoritative and is printed
//! instead.

use rap_api::{Delta, Status};
use unicode_width::UnicodeWidthChar;

use crate::table::plain;

/// Minimum length of the kept end of an answer, in bytes. At most twice as much is kept.
const TAIL: usize = 16 * 1024;

/// The streamed text of an answer.
#[derive(Debug, Default)]
pub(super) struct Streamed {
    /// Turn and attempt of the text.
    at: Option<(u64, u32)>,
    text: String,
    /// True if the answer was dropped. A further delta of the same attempt clears it.
    dropped: bool,
    /// Current turn of the thread.
    turn: u64,
}

impl Streamed {
    /// Adds a piece of an answer. Text of another attempt is discarded.
    pub(super) fn push(&mut self, delta: &Delta) {
        if delta.turn < self.turn {
            return;
        }
        if self.at.replace((delta.turn, delta.attempt)) != Some((delta.turn, delta.attempt)) {
            self.text.clear();
        }
        self.dropped = false;
        self.text.push_str(&delta.text);
        if self.text.len() > 2 * TAIL {
            let surplus = (self.text.len() - TAIL..).find(|at| self.text.is_char_boundary(*at));
            self.text.drain(..surplus.unwrap_or_default());
        }
    }

    /// Updates turn and status of the thread.
    pub(super) fn set_status(&mut self, turn: u64, status: Status) {
        self.turn = turn;
        if status != Status::Running || self.at.is_some_and(|(of, _)| of < turn) {
            self.mark_dropped();
        }
    }

    /// Hides the text, unless more of the same attempt follows.
    pub(super) fn mark_dropped(&mut self) {
        self.dropped = true;
    }

    /// Discards the text, because the answer is in the history.
    pub(super) fn finish(&mut self) {
        *self = Streamed { turn: self.turn, ..Streamed::default() };
    }

    /// Returns the last rows of the text.
    pub(super) fn rows(&self, width: usize, rows: usize) -> Vec<String> {
        if self.dropped || self.text.is_empty() {
            return Vec::new();
        }
        let lines = lines(&plain(&self.text), width);
        lines[lines.len().saturating_sub(rows)..].to_vec()
    }
}

/// Wraps the text at spaces and keeps its line breaks and indentation. A word longer than the width gets a line of its
/// own.
pub(super) fn lines(text: &str, width: usize) -> Vec<String> {
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(end) = line_end(rest, width) {
        lines.push(rest[..end].trim_end().to_owned());
        rest = &rest[end..];
    }
    if !rest.is_empty() {
        lines.push(rest.to_owned());
    }
    lines
}

/// Returns the end of the first line: after its line break, or after the last space that fits. The rest of the text is
/// not read, so that wrapping takes linear time.
fn line_end(text: &str, width: usize) -> Option<usize> {
    let (mut end, mut taken, mut inside, mut too_wide) = (None, 0, false, false);
    for (at, c) in text.char_indices() {
        if c == '\n' {
            return Some(at + 1);
        }
        // A line is not cut within its indentation.
        if c == ' ' && inside && (taken <= width || end.is_none()) {
            end = Some(at + 1);
        }
        inside |= c != ' ';
        taken += c.width().unwrap_or(0);
        too_wide |= taken > width && !c.is_whitespace();
        if too_wide && end.is_some() {
            return end;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(turn: u64, attempt: u32, text: &str) -> Delta {
        Delta { turn, attempt, text: text.into() }
    }

    #[test]
    fn every_piece_is_shown_at_once() {
        let mut streamed = Streamed::default();
        streamed.push(&delta(1, 1, "one "));
        assert_eq!(streamed.rows(20, 9), ["one "]);
        streamed.push(&delta(1, 1, "two\nthr\x1b[2J"));
        assert_eq!(streamed.rows(20, 9), ["one two", "thr\\u{1b}[2J"]);
        assert_eq!(streamed.rows(20, 1), ["thr\\u{1b}[2J"]);
        streamed.finish();
        assert!(streamed.rows(20, 9).is_empty());
    }

    #[test]
    fn the_end_of_a_long_answer_is_kept() {
        let mut streamed = Streamed::default();
        for number in 0..5_000 {
            streamed.push(&delta(1, 1, &format!("número {number}\n")));
        }
        assert!(streamed.text.len() <= 2 * TAIL);
        assert_eq!(streamed.rows(20, 2), ["número 4998", "número 4999"]);
    }

    #[test]
    fn the_text_of_a_dropped_attempt_is_hidden() {
        let mut streamed = Streamed::default();
        streamed.push(&delta(1, 1, "a"));
        streamed.push(&delta(1, 2, "b"));
        assert_eq!(streamed.rows(20, 9), ["b"]);
        streamed.mark_dropped();
        assert!(streamed.rows(20, 9).is_empty());
        // More text of the same attempt.
        streamed.push(&delta(1, 2, "c"));
        assert_eq!(streamed.rows(20, 9), ["bc"]);
        streamed.set_status(2, Status::Running);
        assert!(streamed.rows(20, 9).is_empty());
        // A late delta of the previous turn is not shown.
        streamed.push(&delta(1, 2, "d"));
        assert!(streamed.rows(20, 9).is_empty());
        streamed.push(&delta(2, 1, "e"));
        streamed.set_status(2, Status::Running);
        assert_eq!(streamed.rows(20, 9), ["e"]);
        streamed.set_status(2, Status::Failed);
        assert!(streamed.rows(20, 9).is_empty());
    }

    #[test]
    fn lines_are_wrapped_at_spaces_and_keep_their_indentation() {
        assert_eq!(lines("three and so on and on", 12), ["three and so", "on and on"]);
        assert_eq!(lines("  code\n\nend\n", 12), ["  code", "", "end"]);
        assert_eq!(lines("  extraordinarily long", 8), ["  extraordinarily", "long"]);
        assert_eq!(lines("extraordinarily", 8), ["extraordinarily"]);
        assert_eq!(lines("extraordinarily\nlong", 8), ["extraordinarily", "long"]);
        assert_eq!(lines("abc      def", 4), ["abc", "    def"]);
        assert_eq!(lines("full line   \nnext", 9), ["full line", "next"]);
    }

    /// Quadratic time would take hours.
    #[test]
    fn a_long_text_without_breaks_is_wrapped_in_linear_time() {
        let text = "word ".repeat(1_000_000);
        assert_eq!(lines(&text, 70).len(), 1_000_000 / 14 + 1);
    }
}
