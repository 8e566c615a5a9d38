//! Log output in which untrusted text cannot hide, reorder or forge what an operator reads.

use std::io::{self, Write};

use rap_protocol::visible;

/// Character that begins the escape sequences of colours. The formatter has already escaped those in untrusted text.
const ESCAPE: char = '\u{1b}';

/// A writer that makes hidden characters visible, such as those that change the writing direction. Each call of `write`
/// has to contain whole characters; formatters write one event at a time.
#[derive(Debug)]
pub struct VisibleLog<W>(pub W);

impl<W: Write> Write for VisibleLog<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let mut shown = String::with_capacity(text.len());
        for (position, part) in text.split(ESCAPE).enumerate() {
            if position > 0 {
                shown.push(ESCAPE);
            }
            shown.push_str(&visible::text(part));
        }
        self.0.write_all(shown.as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// A writer of JSON lines that escapes hidden characters, which does not change their meaning. Each call of `write` has to
/// contain whole characters.
#[derive(Debug)]
pub struct VisibleJsonLog<W>(pub W);

impl<W: Write> Write for VisibleJsonLog<W> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        self.0.write_all(visible::json(&String::from_utf8_lossy(event)).as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_characters_are_escaped_in_a_json_log() {
        let mut log = VisibleJsonLog(Vec::new());
        log.write_all("{\"tool\": \"\u{202e}txt.exe\"}\n".as_bytes()).unwrap();
        assert_eq!(String::from_utf8(log.0).unwrap(), "{\"tool\": \"\\u202etxt.exe\"}\n");
    }

    #[test]
    fn hidden_characters_of_foreign_text_are_visible_in_a_log_and_colours_stay() {
        let mut log = VisibleLog(Vec::new());
        let line = "\u{1b}[32m INFO\u{1b}[0m a tool named \u{202e}txt.exe\u{200b}, \u{e0041}, ö, 日本\n";
        log.write_all(line.as_bytes()).unwrap();
        let shown = String::from_utf8(log.0).unwrap();
        assert_eq!(
            shown,
            "\u{1b}[32m INFO\u{1b}[0m a tool named \\u{202e}txt.exe\\u{200b}, \\u{e0041}, ö, 日本\n"
        );
    }
}
