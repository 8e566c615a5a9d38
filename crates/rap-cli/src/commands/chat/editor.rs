//! Line editor with a history.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::keys::Key;

const PROMPT: &str = "> ";
/// Maximum number of lines in the history.
const HISTORY_LINES: usize = 1000;
/// Shown in place of a line break.
const BREAK: &str = "⏎";

/// An action of the user.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input {
    Line(String),
    /// ^C.
    Interrupt,
    /// ^D on an empty line, or the end of a pipe.
    End,
}

#[derive(Debug, Default)]
pub(super) struct Editor {
    text: String,
    /// Byte offset of the cursor.
    cursor: usize,
    history: Vec<String>,
    /// Index of the history line that is shown, and the text that was typed before.
    browsing: Option<(usize, String)>,
}

impl Editor {
    /// Handles a key. Returns an input if the key completes one.
    pub(super) fn press(&mut self, key: Key) -> Option<Input> {
        match key {
            Key::Char(c) => self.insert(c.encode_utf8(&mut [0; 4])),
            Key::Paste(text) => self.insert(&text),
            Key::Enter => return Some(Input::Line(self.take())),
            Key::Interrupt => return Some(Input::Interrupt),
            Key::EndOfInput if self.text.is_empty() => return Some(Input::End),
            Key::Delete | Key::EndOfInput => self.cut(self.cursor, self.right()),
            Key::Backspace => self.cut(self.left(), self.cursor),
            Key::CutToEnd => self.cut(self.cursor, self.text.len()),
            Key::CutToHome => self.cut(0, self.cursor),
            Key::CutWord => self.cut(self.word_left(), self.cursor),
            Key::Left => self.cursor = self.left(),
            Key::Right => self.cursor = self.right(),
            Key::WordLeft => self.cursor = self.word_left(),
            Key::WordRight => self.cursor = self.word_right(),
            Key::Home => self.cursor = 0,
            Key::End => self.cursor = self.text.len(),
            Key::Up => self.browse_history(-1),
            Key::Down => self.browse_history(1),
            Key::Redraw | Key::Suspend => {}
        }
        None
    }

    fn take(&mut self) -> String {
        let line = std::mem::take(&mut self.text);
        (self.cursor, self.browsing) = (0, None);
        if !line.trim().is_empty() && self.history.last() != Some(&line) {
            self.history.push(line.clone());
            let surplus = self.history.len().saturating_sub(HISTORY_LINES);
            self.history.drain(..surplus);
        }
        line
    }

    fn insert(&mut self, text: &str) {
        self.text.insert_str(self.cursor, text);
        self.cursor += text.len();
    }

    fn cut(&mut self, from: usize, to: usize) {
        self.text.replace_range(from..to, "");
        self.cursor = from;
    }

    /// Offset of the character before the cursor, including its combining marks.
    fn left(&self) -> usize {
        let mut before = self.text[..self.cursor].char_indices().rev();
        before.find(|(_, c)| c.width() != Some(0)).map_or(0, |(at, _)| at)
    }

    fn right(&self) -> usize {
        let mut behind = self.text[self.cursor..].char_indices().skip(1);
        behind.find(|(_, c)| c.width() != Some(0)).map_or(self.text.len(), |(at, _)| self.cursor + at)
    }

    fn word_left(&self) -> usize {
        let word = self.text[..self.cursor].trim_end();
        word.rfind(char::is_whitespace)
            .map_or(0, |at| at + word[at..].chars().next().map_or(0, char::len_utf8))
    }

    fn word_right(&self) -> usize {
        let behind = &self.text[self.cursor..];
        let word = behind.trim_start();
        let length = word.find(char::is_whitespace).unwrap_or(word.len());
        self.cursor + (behind.len() - word.len()) + length
    }

    /// Shows another line of the history. The typed text comes after the last one.
    fn browse_history(&mut self, step: isize) {
        let end = self.history.len();
        let at = self.browsing.as_ref().map_or(end, |(at, _)| *at);
        let Some(to) = at.checked_add_signed(step).filter(|to| *to <= end && *to != at) else { return };
        let typed = match self.browsing.take() {
            Some((_, typed)) => typed,
            None => std::mem::take(&mut self.text),
        };
        if to == end {
            self.text = typed;
        } else {
            self.text.clone_from(&self.history[to]);
            self.browsing = Some((to, typed));
        }
        self.cursor = self.text.len();
    }

    /// Returns the line as it is shown in one row of this width, scrolled to the cursor, and the column of the cursor.
    pub(super) fn row(&self, width: usize) -> (String, usize) {
        let shown = |text: &str| text.replace('\n', BREAK).replace('\t', " ");
        let (before, behind) = (shown(&self.text[..self.cursor]), shown(&self.text[self.cursor..]));
        let room = width.saturating_sub(PROMPT.width() + 1);
        let mut left: &str = &before;
        while left.width() > room {
            left = left.char_indices().nth(1).map_or("", |(at, _)| &left[at..]);
        }
        let column = PROMPT.width() + left.width();
        let mut row = format!("{PROMPT}{left}");
        for c in behind.chars() {
            if row.width() + c.width().unwrap_or(0) > PROMPT.width() + room {
                break;
            }
            row.push(c);
        }
        (row, column)
    }
}

#[cfg(test)]
mod tests {
    use super::super::keys::Keys;
    use super::*;

    /// Presses keys and returns the line with a bar at the cursor.
    fn typed(editor: &mut Editor, keys: &str) -> String {
        for key in Keys::default().push(keys.as_bytes()) {
            assert_eq!(editor.press(key), None);
        }
        let (before, behind) = editor.text.split_at(editor.cursor);
        format!("{before}|{behind}")
    }

    #[test]
    fn a_line_is_edited() {
        let table = [
            ("hello", "hello|"),
            ("hello\x1b[D\x1b[D!", "hel!|lo"),
            ("one two three\x17", "one two |"),
            ("one two\x01\x1bfX", "oneX| two"),
            ("one two\x1bb\x0b", "one |"),
            ("one two\x1bb\x15", "|two"),
            ("ab\x01\x04", "|b"),
            ("ab\x02\x7f", "|b"),
            ("e\u{301}x\x02\x02", "|e\u{301}x"),
            ("日本\x7f", "日|"),
            ("\x7f\x17\x02\x1b[3~\x1b[A\x1b[B", "|"),
        ];
        for (keys, expected) in table {
            assert_eq!(typed(&mut Editor::default(), keys), expected, "{keys:?}");
        }
    }

    #[test]
    fn the_history_is_browsed_and_the_typed_text_is_kept() {
        let mut editor = Editor::default();
        for line in ["one", "two", "two", " "] {
            typed(&mut editor, line);
            assert_eq!(editor.press(Key::Enter), Some(Input::Line(line.into())));
        }
        assert_eq!(typed(&mut editor, "thr\x1b[A"), "two|");
        assert_eq!(typed(&mut editor, "\x1b[A\x1b[A"), "one|");
        assert_eq!(typed(&mut editor, "\x1b[B\x1b[B\x1b[B"), "thr|");
    }

    #[test]
    fn control_c_keeps_the_typed_text_and_control_d_exits_on_an_empty_line() {
        let mut editor = Editor::default();
        typed(&mut editor, "draft");
        assert_eq!(editor.press(Key::Interrupt), Some(Input::Interrupt));
        assert_eq!(typed(&mut editor, ""), "draft|");
        assert_eq!(editor.press(Key::EndOfInput), None);
        typed(&mut editor, "\x15");
        assert_eq!(editor.press(Key::EndOfInput), Some(Input::End));
    }

    #[test]
    fn a_long_line_is_scrolled_to_the_cursor() {
        let mut editor = Editor::default();
        typed(&mut editor, "abcdefghij");
        assert_eq!(editor.row(20), ("> abcdefghij".into(), 12));
        assert_eq!(editor.row(8), ("> fghij".into(), 7));
        typed(&mut editor, "\x01");
        assert_eq!(editor.row(8), ("> abcde".into(), 2));
        editor.press(Key::Paste("x\ny".into()));
        assert_eq!(editor.row(8), ("> x⏎yab".into(), 5));
    }
}
