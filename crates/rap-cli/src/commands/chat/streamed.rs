//! An answer in progress. The entry that follows is the truth: until it comes nothing of this is shown for good, and
//! what was dropped is gone.

use unicode_width::UnicodeWidthChar;

use crate::api::{Delta, Status};
use crate::table::plain;

/// How much of the end of an answer is kept at least, in bytes; twice that at most.
const TAIL: usize = 16 * 1024;

/// What has been streamed of an answer.
#[derive(Debug, Default)]
pub(super) struct Streamed {
    /// The question and the attempt that it is of.
    at: Option<(u64, u64)>,
    text: String,
    /// Whether it was dropped, as far as is known.
    dropped: bool,
    /// The question that the thread is at.
    turn: u64,
}

impl Streamed {
    /// Takes a piece of an answer. What another attempt said is void.
    pub(super) fn push(&mut self, delta: &Delta) {
        if delta.turn < self.turn {
            return;
        }
        if self.at.replace((delta.turn, delta.attempt)) != Some((delta.turn, delta.attempt)) {
            self.text.clear();
        }
        self.dropped = false;
        self.text.push_str(&plain(&delta.text));
        if self.text.len() > 2 * TAIL {
            let surplus = (self.text.len() - TAIL..).find(|at| self.text.is_char_boundary(*at));
            self.text.drain(..surplus.unwrap_or_default());
        }
    }

    /// The thread is at this question, and at this.
    pub(super) fn see(&mut self, turn: u64, status: Status) {
        self.turn = turn;
        if status != Status::Running || self.at.is_some_and(|(of, _)| of < turn) {
            self.drop_it();
        }
    }

    /// It will not become an answer, unless more of it comes.
    pub(super) fn drop_it(&mut self) {
        self.dropped = true;
    }

    /// The answer is in the history.
    pub(super) fn end(&mut self) {
        *self = Streamed { turn: self.turn, ..Streamed::default() };
    }

    /// The last of it, in rows.
    pub(super) fn rows(&self, width: usize, rows: usize) -> Vec<String> {
        if self.dropped || self.text.is_empty() {
            return Vec::new();
        }
        let lines = lines(&self.text, width);
        lines[lines.len().saturating_sub(rows)..].to_vec()
    }
}

/// The text in lines of this width, cut between words; a longer word stands alone.
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

/// Where the first line ends: behind its break, or behind the last space that fits. Nothing is looked at behind that,
/// so that a long text without breaks takes time in proportion.
fn line_end(text: &str, width: usize) -> Option<usize> {
    let (mut end, mut taken, mut inside, mut too_wide) = (None, 0, false, false);
    for (at, c) in text.char_indices() {
        if c == '\n' {
            return Some(at + 1);
        }
        // Spaces at its beginning are no place to cut a line.
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

    fn delta(turn: u64, attempt: u64, text: &str) -> Delta {
        Delta { turn, attempt, text: text.into() }
    }

    #[test]
    fn every_piece_is_shown_at_once() {
        let mut streamed = Streamed::default();
        streamed.push(&delta(1, 1, "one "));
        assert_eq!(streamed.rows(20, 9), ["one "]);
        streamed.push(&delta(1, 1, "two\nthr\x1b[2J"));
        assert_eq!(streamed.rows(20, 9), ["one two", "thr[2J"]);
        assert_eq!(streamed.rows(20, 1), ["thr[2J"]);
        streamed.end();
        assert!(streamed.rows(20, 9).is_empty());
    }

    #[test]
    fn of_a_long_answer_the_end_is_kept() {
        let mut streamed = Streamed::default();
        for number in 0..5_000 {
            streamed.push(&delta(1, 1, &format!("número {number}\n")));
        }
        assert!(streamed.text.len() <= 2 * TAIL);
        assert_eq!(streamed.rows(20, 2), ["número 4998", "número 4999"]);
    }

    #[test]
    fn nothing_stays_of_an_attempt_that_was_dropped() {
        let mut streamed = Streamed::default();
        streamed.push(&delta(1, 1, "a"));
        streamed.push(&delta(1, 2, "b"));
        assert_eq!(streamed.rows(20, 9), ["b"]);
        streamed.drop_it();
        assert!(streamed.rows(20, 9).is_empty());
        // It goes on after all.
        streamed.push(&delta(1, 2, "c"));
        assert_eq!(streamed.rows(20, 9), ["bc"]);
        streamed.see(2, Status::Running);
        assert!(streamed.rows(20, 9).is_empty());
        // What comes late of the question before is not shown.
        streamed.push(&delta(1, 2, "d"));
        assert!(streamed.rows(20, 9).is_empty());
        streamed.push(&delta(2, 1, "e"));
        streamed.see(2, Status::Running);
        assert_eq!(streamed.rows(20, 9), ["e"]);
        streamed.see(2, Status::Failed);
        assert!(streamed.rows(20, 9).is_empty());
    }

    #[test]
    fn lines_are_cut_between_words_and_keep_their_indentation() {
        assert_eq!(lines("three and so on and on", 12), ["three and so", "on and on"]);
        assert_eq!(lines("  code\n\nend\n", 12), ["  code", "", "end"]);
        assert_eq!(lines("  extraordinarily long", 8), ["  extraordinarily", "long"]);
        assert_eq!(lines("extraordinarily", 8), ["extraordinarily"]);
        assert_eq!(lines("extraordinarily\nlong", 8), ["extraordinarily", "long"]);
        assert_eq!(lines("abc      def", 4), ["abc", "    def"]);
        assert_eq!(lines("full line   \nnext", 9), ["full line", "next"]);
    }

    /// A look at all that follows, for each line, would take hours.
    #[test]
    fn a_long_text_without_breaks_takes_time_in_proportion() {
        let text = "word ".repeat(1_000_000);
        assert_eq!(lines(&text, 70).len(), 1_000_000 / 14 + 1);
    }
}
